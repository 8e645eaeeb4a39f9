//! One stored tensor, what has been made of it, and the file it lies in.

use crate::LoadError;
use crate::container::Entry;
use crate::gguf::Edit;
use crate::mapped::Bytes;
use quant::Owned;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// A file of weights.
pub(crate) struct File {
    /// Relative to the folder.
    pub(crate) name: String,
    pub(crate) bytes: Bytes,
    pub(crate) writer: Writer,
}

/// Whose conventions a file follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    HuggingFace,
    Mlx,
    Gguf,
}

/// A stored tensor, and what has been made of it.
pub(crate) struct Tensor {
    /// The file, by its place among the checkpoint's files.
    pub(crate) file: usize,
    pub(crate) entry: Entry,
    used: AtomicBool,
    derived: OnceLock<Derived>,
    /// What the file's writer did to the values; `undone` holds them without it.
    pub(crate) edit: Edit,
    pub(crate) undone: OnceLock<Owned>,
}

/// Parts of a weight that are not read where they lie.
pub(crate) struct Derived {
    /// Zero points, a byte a tile.
    pub(crate) zeros: Vec<u8>,
    /// What scales are multiplied by, one for each matrix of a stack or for all.
    pub(crate) factors: Vec<f64>,
}

impl Tensor {
    pub(crate) fn new(file: usize, entry: Entry, edit: Edit) -> Tensor {
        Tensor {
            file,
            entry,
            used: AtomicBool::new(false),
            derived: OnceLock::new(),
            edit,
            undone: OnceLock::new(),
        }
    }

    /// Whether anybody has asked for the tensor.
    pub(crate) fn is_used(&self) -> bool {
        self.used.load(Relaxed)
    }

    /// Notes that somebody asks for the tensor.
    pub(crate) fn mark_used(&self) {
        self.used.store(true, Relaxed);
    }

    /// What is derived from the codes here, once.
    pub(crate) fn derived(&self, derive: impl FnOnce() -> Derived) -> &Derived {
        self.derived.get_or_init(derive)
    }

    /// Rows and columns: the outermost axis and the others, of blocks the innermost
    /// axis and the others.
    pub(crate) fn natural(&self) -> (usize, usize) {
        let shape = &self.entry.shape;
        let split = match self.entry.dtype.format {
            Some(_) => shape.len() - 1,
            None => shape.len().min(1),
        };
        (
            shape[..split].iter().product(),
            shape[split..].iter().product(),
        )
    }

    pub(crate) fn has_elements(&self, name: &str, n: usize) -> Result<(), LoadError> {
        if self.entry.elements() != n {
            return Err(LoadError::WrongShape {
                name: name.into(),
                expected: vec![n],
                found: self.entry.shape.clone(),
            });
        }
        Ok(())
    }
}
