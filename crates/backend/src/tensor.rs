//! What ops take and return: matrices whose bytes only their backend can read.

use std::any::Any;
use std::sync::Arc;

/// Opaque device memory.
pub type Storage = Box<dyn Any + Send + Sync>;

/// Takes storage back when its tensor is dropped, so that a step allocates
/// nothing once its sizes have been seen.
pub trait Recycle: Send + Sync {
    /// Keeps `storage` for a later tensor.
    fn recycle(&self, storage: Storage);
}

/// Activations, `[rows, cols]` in `f32` precision or better, row-major: a row is
/// one token's. Heads lie side by side in the columns.
pub struct Tensor {
    rows: usize,
    cols: usize,
    storage: Option<Storage>,
    home: Option<Arc<dyn Recycle>>,
}

impl Tensor {
    /// Wraps a backend's storage.
    pub fn new(rows: usize, cols: usize, storage: Storage, home: Option<Arc<dyn Recycle>>) -> Self {
        Tensor {
            rows,
            cols,
            storage: Some(storage),
            home,
        }
    }

    /// Rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The storage as the backend's own type.
    ///
    /// # Panics
    ///
    /// If another backend made the tensor.
    pub fn storage<T: 'static>(&self) -> &T {
        self.storage
            .as_ref()
            .and_then(|s| s.downcast_ref())
            .expect("a tensor stays on the backend that made it")
    }

    /// The storage as the backend's own type, to write.
    ///
    /// # Panics
    ///
    /// If another backend made the tensor.
    pub fn storage_mut<T: 'static>(&mut self) -> &mut T {
        self.storage
            .as_mut()
            .and_then(|s| s.downcast_mut())
            .expect("a tensor stays on the backend that made it")
    }
}

impl Drop for Tensor {
    fn drop(&mut self) {
        if let (Some(home), Some(storage)) = (&self.home, self.storage.take()) {
            home.recycle(storage);
        }
    }
}

impl std::fmt::Debug for Tensor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tensor[{}, {}]", self.rows, self.cols)
    }
}

/// Weights of a linear or a table, `[rows, cols] = [out, in]`, in whatever order
/// the backend's kernels want.
pub struct Matrix {
    /// Outputs of a linear, entries of a table.
    pub rows: usize,
    /// Inputs of a linear, width of a table.
    pub cols: usize,
    /// Name of the format the values came in.
    pub format: &'static str,
    /// Bytes the backend holds for it.
    pub bytes: usize,
    storage: Storage,
}

impl Matrix {
    /// Wraps a backend's storage.
    pub fn new(
        rows: usize,
        cols: usize,
        format: &'static str,
        bytes: usize,
        storage: Storage,
    ) -> Self {
        Matrix {
            rows,
            cols,
            format,
            bytes,
            storage,
        }
    }

    /// The storage as the backend's own type.
    ///
    /// # Panics
    ///
    /// If another backend made the matrix.
    pub fn storage<T: 'static>(&self) -> &T {
        self.storage
            .downcast_ref()
            .expect("a matrix stays on the backend that made it")
    }
}

impl std::fmt::Debug for Matrix {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Matrix[{}, {}] {}", self.rows, self.cols, self.format)
    }
}

/// Shape of one attention layer's keys and values.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvSpec {
    /// Pages of [`crate::PAGE_ROWS`] rows each, of all sequences.
    pub pages: usize,
    /// Rows of one sequence, at most.
    pub rows: usize,
    /// Key/value heads `K`.
    pub heads: usize,
    /// Head size `e`.
    pub head_dim: usize,
    /// How a row is stored. Attention reads rows after this rounding, in the
    /// step that appends them too.
    pub format: KvFormat,
}

/// How keys and how values are stored, each head of each row on its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvFormat {
    /// Keys.
    pub k: &'static quant::KvRowFormat,
    /// Values.
    pub v: &'static quant::KvRowFormat,
}

impl KvFormat {
    /// Keys and values alike.
    pub const fn both(format: &'static quant::KvRowFormat) -> Self {
        KvFormat {
            k: format,
            v: format,
        }
    }

    /// Bytes of one head's key and value.
    pub const fn row_bytes(&self, head_dim: usize) -> usize {
        self.k.row_bytes(head_dim) + self.v.row_bytes(head_dim)
    }

    /// The format that cannot store heads of `head_dim`, if one cannot: blocks do
    /// not span heads.
    pub fn misfit(&self, head_dim: usize) -> Option<&'static quant::KvRowFormat> {
        [self.k, self.v]
            .into_iter()
            .find(|f| !head_dim.is_multiple_of(f.block))
    }
}

impl std::fmt::Display for KvFormat {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.k.name)?;
        if self.k != self.v {
            write!(f, ",{}", self.v.name)?;
        }
        Ok(())
    }
}

/// Shape of one gated-delta layer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaSpec {
    /// Sequences that can be remembered at once.
    pub slots: usize,
    /// Key heads `nk`.
    pub key_heads: usize,
    /// Value heads `nv`, a multiple of `nk`; value head `h` reads key head
    /// `h / (nv / nk)`.
    pub value_heads: usize,
    /// Key head size `dk`.
    pub key_dim: usize,
    /// Value head size `dv`.
    pub value_dim: usize,
    /// Taps of the causal convolution.
    pub conv_taps: usize,
}

impl DeltaSpec {
    /// Channels that pass the convolution: `2 nk dk + nv dv`.
    pub const fn channels(&self) -> usize {
        2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
    }
}

/// One attention layer's keys and values, for all sequences.
pub struct Kv {
    /// Heads, head size, pages and format.
    pub spec: KvSpec,
    /// The backend's memory for it.
    pub storage: Storage,
}

/// One gated-delta layer's states, for all sequences.
pub struct Delta {
    /// Heads, head sizes and slots.
    pub spec: DeltaSpec,
    /// The backend's memory for it.
    pub storage: Storage,
}
