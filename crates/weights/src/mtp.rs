//! Which file supplies a checkpoint's MTP head (`checkpoints.md` §2.5).
//!
//! A head lies among the trunk's tensors, in a file beside them, or alone in a
//! checkpoint of its own. The first file of [`FILES`] with a head supplies it; heads in
//! other files are named as unused.

use crate::checkpoint::Checkpoint;
use crate::names;
use crate::tensor::Tensor;
use serde_json::Value;

/// Files beside the weights that hold a head, in the order they are looked for, before
/// the trunk's own files.
pub(crate) const FILES: &[&str] = &[
    "mtp.safetensors",
    "model-mtp.safetensors",
    "mtp/model.safetensors",
];

/// What the writer of a file of [`FILES`] says of it.
pub(crate) const MANIFEST: &str = "mtplx_runtime.json";

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
    /// `mtplx_runtime.json`: how the writer of an MTP head's own file wants the head to
    /// be used (`checkpoints.md` §2.5).
    pub fn manifest(&self) -> Option<&Value> {
        self.manifest.as_ref()
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
