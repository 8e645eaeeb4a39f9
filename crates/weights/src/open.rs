//! Opening a checkpoint: a folder, a GGUF file, or the same bytes from memory.

use crate::assemble::assemble;
use crate::error::printable;
use crate::index::{INDEX, Index};
use crate::mapped::Bytes;
use crate::{Checkpoint, LoadError, folder, gguf, mtp};
use std::borrow::Cow;
use std::path::Path;

impl Checkpoint {
    /// Opens a folder or a GGUF file. Weights are mapped, not read.
    ///
    /// A folder has `config.json`, weights in `model.safetensors` or in the files of
    /// `model.safetensors.index.json`, and an MTP head in a file of its own if there is
    /// one. A part of a split GGUF file stands for all of them. A safetensors file is an MTP head
    /// alone; what the files beside it say of its use counts.
    ///
    /// # Errors
    ///
    /// If a file is missing, cannot be mapped, or is malformed.
    pub fn open(path: &Path) -> Result<Checkpoint, LoadError> {
        if path.is_file() && path.extension().is_some_and(|e| e == mtp::EXTENSION) {
            return mtp::open_file(path);
        }
        if path.is_file() {
            let name = |path: &Path| {
                let name = path.file_name().unwrap_or_default();
                printable(&name.to_string_lossy())
            };
            let parts = gguf::parts(path)?;
            let files = parts
                .iter()
                .map(|path| Ok((name(path), Bytes::map(path)?)))
                .collect::<Result<_, LoadError>>()?;
            return gguf::assemble(files);
        }
        let folder = folder::open(path)?;
        let mut checkpoint = assemble(folder.config, folder.index, folder.files)?;
        checkpoint.manifest = folder.manifest;
        Ok(checkpoint)
    }

    /// Reads a checkpoint from memory: `config` is the text of `config.json`, `files`
    /// are names relative to the folder and contents, an index among them or not. Of a
    /// GGUF file, `files` are all parts in order, and `config` does not count.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::open`].
    pub fn from_bytes(
        config: &str,
        files: Vec<(String, Cow<'static, [u8]>)>,
    ) -> Result<Checkpoint, LoadError> {
        if files.iter().any(|(name, _)| name.ends_with(gguf::SUFFIX)) {
            let files = files.into_iter();
            return gguf::assemble(files.map(|(name, b)| (name, Bytes::Memory(b))).collect());
        }
        let mut index = None;
        let mut weights = Vec::new();
        for (name, bytes) in files {
            if name == INDEX {
                index = Some(Index::parse(bytes)?);
            } else {
                weights.push((name, Bytes::Memory(bytes)));
            }
        }
        weights.sort_by(|a, b| a.0.cmp(&b.0));
        assemble(config.into(), index, weights)
    }
}
