//! Which file supplies a checkpoint's MTP head (`checkpoints.md` §2.5).
//!
//! A head lies among the trunk's tensors, in a file beside them, or alone in a
//! checkpoint of its own. The first file of [`FILES`] with a head supplies it; heads in
//! other files are named as unused.

use crate::assemble::assemble;
use crate::checkpoint::Checkpoint;
use crate::error::printable;
use crate::mapped::Bytes;
use crate::tensor::Tensor;
use crate::{LoadError, folder, names};
use serde_json::{Value, json};
use std::path::Path;

/// Files beside the weights that hold a head, in the order they are looked for, before
/// the trunk's own files.
pub(crate) const FILES: &[&str] = &[
    "mtp.safetensors",
    "model-mtp.safetensors",
    "mtp/model.safetensors",
];

/// What the writer of a file of [`FILES`] says of it.
pub(crate) const MANIFEST: &str = "mtplx_runtime.json";

/// Where `config.json` says how the writer of an MTP head wants the head to be used
/// ([`Checkpoint::mtp_contract`]).
pub const CONTRACT: &str = "mtplx_mtp_contract";

/// The extension of a head's own file.
pub(crate) const EXTENSION: &str = "safetensors";

/// The `model_type` of a head published alone.
const ALONE: &str = "qwen3_5_mtp";

/// Opens the head in the file at `path`, which has nothing else. `config.json` and [`MANIFEST`]
/// beside it, which may be its target's, tell how it is to be used, if they are there.
pub(crate) fn open_file(path: &Path) -> Result<Checkpoint, LoadError> {
    let beside = |name: &str| folder::json(&path.with_file_name(name));
    let mut config = json!({"model_type": ALONE});
    if let Some(contract) = beside("config.json")?.and_then(|c| c.get(CONTRACT).cloned()) {
        config[CONTRACT] = contract;
    }
    let name = printable(&path.file_name().unwrap_or_default().to_string_lossy());
    let files = vec![(name, Bytes::map(path)?)];
    let mut checkpoint = assemble(config.to_string().into_bytes(), None, files)?;
    checkpoint.manifest = beside(MANIFEST)?;
    Ok(checkpoint)
}

/// Where `file` stands in the search for the head; files of the trunk come last.
pub(crate) fn rank(file: &str) -> usize {
    FILES.iter().position(|f| *f == file).unwrap_or(FILES.len())
}

/// Whether `file` holds nothing but a head, by its name.
pub(crate) fn is_file(file: &str) -> bool {
    rank(file) < FILES.len()
}

/// Whether a configuration is that of a head published alone: all its files are a head
/// without prefix.
pub(crate) fn is_alone(config: &Value) -> bool {
    let model_type = config.get("model_type").and_then(Value::as_str);
    model_type.is_some_and(|t| t.ends_with("_mtp"))
}

/// The [`rank`] of the files that supply the head of `stored`, tensors by canonical
/// name; `None` where there is no head.
pub(crate) fn supplier(checkpoint: &Checkpoint, stored: &[(String, Tensor)]) -> Option<usize> {
    let head = stored
        .iter()
        .filter(|(name, _)| name.starts_with(names::MTP));
    head.map(|(_, tensor)| rank(checkpoint.file_name(tensor)))
        .min()
}

impl Checkpoint {
    /// What the writer of an MTP head says under `key` of how the head is to be used: in
    /// `mtplx_mtp_contract` of `config.json`, else in `mtp_contract` of `mtplx_runtime.json`
    /// (`checkpoints.md` §2.5). `None` if neither says anything.
    pub fn mtp_contract(&self, key: &str) -> Option<&str> {
        let own = self.config.get(CONTRACT);
        let manifest = self.manifest.as_ref().and_then(|m| m.get("mtp_contract"));
        let say = |part: &&Value| part.get(key).is_some_and(Value::is_string);
        let said = [own, manifest].into_iter().flatten().find(say)?;
        said.get(key)?.as_str()
    }

    /// The configuration with all that the writer of an MTP head says of how it is to be used, so
    /// that it can do without `mtplx_runtime.json`.
    pub fn whole_config(&self) -> Value {
        let mut config = self.config.clone();
        let manifest = self.manifest.as_ref().and_then(|m| m.get("mtp_contract"));
        if let Some(Value::Object(manifest)) = manifest {
            let mut contract = manifest.clone();
            if let Some(Value::Object(own)) = config.get(CONTRACT) {
                contract.extend(own.clone());
            }
            config[CONTRACT] = Value::Object(contract);
        }
        config
    }

    /// Whether the MTP head comes from a file of its own.
    pub(crate) fn mtp_is_apart(&self) -> bool {
        let mut head = self
            .tensors
            .range(names::MTP.to_string()..)
            .take_while(|(name, _)| name.starts_with(names::MTP));
        head.next()
            .is_some_and(|(_, tensor)| is_file(self.file_name(tensor)))
    }
}
