//! A checkpoint of safetensors files: their tensors together, under canonical names.

use crate::checkpoint::Checkpoint;
use crate::error::printable;
use crate::gguf::Edit;
use crate::index::Index;
use crate::mapped::Bytes;
use crate::tensor::{File, Tensor, Writer};
use crate::{LoadError, folder, mtp, names, safetensors};
use serde_json::Value;

/// Tensors of one checkpoint. The largest known mixture of experts, one tensor
/// an expert and matrix, has some 200 000.
const MAX_TENSORS: usize = 1 << 20;

/// The checkpoint of `config_bytes`, the text of `config.json`, and files of weights by
/// name.
pub(crate) fn assemble(
    config_bytes: Vec<u8>,
    index: Option<Index>,
    weights: Vec<(String, Bytes)>,
) -> Result<Checkpoint, LoadError> {
    let config = parse_config(&config_bytes)?;
    let is_head = mtp::is_alone(&config);
    let mut files = Vec::new();
    let mut stored = Vec::new();
    for (name, bytes) in weights {
        let contents = safetensors::parse(&bytes, &name)?;
        let is_mtp_file = is_head || mtp::is_file(&name);
        for entry in contents.entries {
            if stored.len() == MAX_TENSORS {
                return Err(LoadError::TooLarge {
                    what: "number of tensors up to here",
                    found: stored.len() as u64 + 1,
                    limit: MAX_TENSORS as u64,
                    file: name,
                });
            }
            stored.push((
                names::canonical(&entry.name, is_mtp_file),
                Tensor::new(files.len(), entry, Edit::Same),
            ));
        }
        files.push(File {
            name,
            bytes,
            writer: match contents.says_mlx {
                true => Writer::Mlx,
                false => Writer::HuggingFace,
            },
        });
    }
    if let Some(index) = &index {
        obey(index, &files, &mut stored)?;
    }
    let mut checkpoint = Checkpoint::empty(config, config_bytes, files);
    let head = mtp::supplier(&checkpoint, &stored);
    for (name, tensor) in stored {
        let file = checkpoint.file_name(&tensor);
        if name.starts_with(names::MTP) && Some(mtp::rank(file)) != head {
            let shadowed = format!("{} in {file}", tensor.entry.name);
            checkpoint.shadowed.push(shadowed);
            continue;
        }
        checkpoint.insert(name, tensor)?;
    }
    Ok(checkpoint)
}

/// The text of `config.json` as an object.
fn parse_config(bytes: &[u8]) -> Result<Value, LoadError> {
    let bad = |reason: String| LoadError::BadJson {
        reason,
        file: "config.json".into(),
    };
    folder::few_values(bytes, folder::MAX_CONFIG_VALUES, "config.json")?;
    let config: Value =
        serde_json::from_slice(bytes).map_err(|e| bad(printable(&e.to_string())))?;
    if !config.is_object() {
        return Err(bad("no object".into()));
    }
    Ok(config)
}

/// Holds the index and the files against each other: what the index lists must
/// be where it says, and a copy in another file does not count.
fn obey(
    index: &Index,
    files: &[File],
    stored: &mut Vec<(String, Tensor)>,
) -> Result<(), LoadError> {
    let mut is_there = vec![false; index.entries().len()];
    stored.retain(|(_, tensor)| match index.find(&tensor.entry.name) {
        Some((at, shard)) if *shard == files[tensor.file].name => {
            is_there[at] = true;
            true
        }
        // An unlisted head keeps its names, even those the index gives to the trunk.
        Some(_) => mtp::is_file(&files[tensor.file].name),
        None => true,
    });
    let mut listed = index.entries().zip(is_there);
    let Some(((name, shard), _)) = listed.find(|(_, is_there)| !is_there) else {
        return Ok(());
    };
    let (name, shard) = (name.to_owned(), index.files()[shard].clone());
    Err(match files.iter().any(|file| file.name == shard) {
        true => LoadError::NotInShard { name, shard },
        false => LoadError::MissingShard { name, shard },
    })
}
