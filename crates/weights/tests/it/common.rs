//! Builds safetensors files out of plain bytes, without the code under test.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use weights::{Checkpoint, LoadError};

/// One tensor: name, type, shape, data.
#[derive(Clone)]
pub(crate) struct Tensor(
    pub(crate) String,
    pub(crate) &'static str,
    pub(crate) Vec<usize>,
    pub(crate) Vec<u8>,
);

pub(crate) fn f32s(name: &str, shape: &[usize], values: &[f32]) -> Tensor {
    let data = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    Tensor(name.into(), "F32", shape.into(), data)
}

/// `n` equal values of one axis.
pub(crate) fn filled(name: &str, n: usize, value: f32) -> Tensor {
    f32s(name, &[n], &vec![value; n])
}

/// A file of `tensors`, their data back to back in this order.
pub(crate) fn file(metadata: Option<&str>, tensors: &[Tensor]) -> Vec<u8> {
    let mut parts: Vec<String> = Vec::new();
    if let Some(metadata) = metadata {
        parts.push(format!(r#""__metadata__":{metadata}"#));
    }
    let mut data = Vec::new();
    for Tensor(name, dtype, shape, bytes) in tensors {
        let (begin, end) = (data.len(), data.len() + bytes.len());
        parts.push(format!(
            r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#
        ));
        data.extend(bytes);
    }
    with_header(&format!("{{{}}}", parts.join(",")), &data)
}

/// A file with `header` as it stands.
pub(crate) fn with_header(header: &str, data: &[u8]) -> Vec<u8> {
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend(header.as_bytes());
    out.extend(data);
    out
}

/// A checkpoint from memory.
pub(crate) fn load(config: &str, files: &[(&str, Vec<u8>)]) -> Result<Checkpoint, LoadError> {
    let files = files
        .iter()
        .map(|(name, bytes)| (name.to_string(), Cow::Owned(bytes.clone())));
    Checkpoint::from_bytes(config, files.collect())
}

/// A checkpoint of one file with these tensors.
pub(crate) fn single(tensors: &[Tensor]) -> Checkpoint {
    load("{}", &[("model.safetensors", file(None, tensors))]).unwrap()
}

/// Why one file with this header and data is refused.
pub(crate) fn refusal(header: &str, data: &[u8]) -> String {
    load("{}", &[("model.safetensors", with_header(header, data))])
        .unwrap_err()
        .to_string()
}

/// A folder that is removed with the value.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(files: &[(&str, &[u8])]) -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let unique = format!(
            "weights-{}-{}",
            std::process::id(),
            NEXT.fetch_add(1, Ordering::Relaxed)
        );
        let folder = Folder(Path::new(env!("CARGO_TARGET_TMPDIR")).join(unique));
        for (name, bytes) in files {
            let path = folder.0.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, bytes).unwrap();
        }
        folder
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn open(&self) -> Result<Checkpoint, LoadError> {
        Checkpoint::open(&self.0)
    }

    /// Why it is refused.
    pub(crate) fn refusal(&self) -> String {
        self.open().unwrap_err().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // a leftover in the build folder harms nobody
    }
}
