//! The op vocabulary: what a model may ask of a device.
//!
//! A device is a [`Backend`]: four contracts and a table of what it can do.
//!
//! | contract | what it is about |
//! | --- | --- |
//! | [`Store`] | device memory: weights, activations, keys and values, recurrent state |
//! | [`Ops`] | what models compute, fused where they always use ops together |
//! | [`Sample`] | which tokens rows of logits give |
//! | [`Record`] | where a step begins and ends, and what may be recorded and replayed |
//! | [`Capabilities`] | plain data: formats of keys and values, rows of a prompt, … |
//!
//! A model is equations over `&dyn Backend`; it never asks which one it got.
//!
//! ```
//! use backend::{Backend, Reference, TokenMask};
//!
//! let device: &dyn Backend = &Reference;
//! let logits = device.upload(1, 4, &[1.0, 3.0, -2.0, 2.5]);
//! assert_eq!(device.argmax(&logits), [1]);
//! // Only tokens 0 and 3 may follow.
//! let logits = device.mask_logits(logits, &[Some(TokenMask::new(4, [0, 3]))]);
//! assert_eq!(device.argmax(&logits), [3]);
//! ```
//!
//! # Row invariance
//!
//! A row's result has the same bits however many rows, sequences, threads or
//! prefill chunks it is computed with. The order of every float sum is therefore
//! part of an op's definition, stated at each op; [`Reference`] is that
//! definition as plain loops, and [`conformance`] holds the cases that any
//! backend must pass. On CPUs the bits also agree between instruction sets.
//!
//! Shapes are proven when a model is loaded; ops assert them. An op cannot fail:
//! a device keeps its error and [`Record::finish`] returns it once a step.
//!
//! Letters: `n` rows of the step, `H` query heads, `K` key/value heads, `e` head
//! size, `W` window.

#![forbid(unsafe_code)]

pub mod batch;
mod capabilities;
mod choice;
pub mod conformance;
mod edit;
mod marks;
mod mask;
pub mod math;
pub mod moe;
pub mod moments;
pub mod noise;
mod ops;
mod record;
mod reference;
mod sample;
mod store;
mod tensor;
pub mod trial;

pub use batch::{
    Batch, BatchSeq, CacheRows, MAX_TENTATIVE, MediaRow, NO_PAGE, PAGE_ROWS, POSITION_AXES,
    Position, Row,
};
pub use capabilities::{Capabilities, KvFormats, PromptRows};
pub use choice::{Likeliest, NO_TOKEN, TokenChoice, TokenGroups, TokenList, gives_token, nan_sign};
pub use edit::{Edit, RowEdits};
pub use marks::{ExpertMarks, ExpertSet};
pub use mask::TokenMask;
pub use moe::{Choice, Expert, Experts};
pub use ops::{Activation, Attention, DeltaWeights, NEAR_ROWS_MAX, NearAttention, Ops, Rope};
pub use record::{Chain, Chained, DeviceError, Link, MAX_RECORDED_ROWS, Record, StepKey};
pub use reference::Reference;
pub use sample::{Sample, confidence};
pub use store::Store;
pub use tensor::{Delta, DeltaSpec, Kv, KvFormat, KvSpec, Matrix, Recycle, Storage, Tensor};

/// Keys of one attention split: partial results of whole splits are merged from
/// the left, so a device may compute them apart without changing a bit.
pub const SPLIT_ROWS: usize = 512;

/// The version of the definitions of ops, and of the layouts in which devices save keys, values and
/// states. A change of either that changes bits raises it, so that nobody goes on from bits that were
/// saved before.
pub const NUMERICS: u32 = 4;

/// A device.
pub trait Backend: Store + Ops + Sample + Record {
    /// Name for people, such as `cpu (avx512, 2 threads)`.
    fn name(&self) -> String;

    /// What bits depend on besides [`NUMERICS`]: devices for which this is equal compute equal bits, and
    /// load what another one has [saved](Store::kv_save).
    fn numerics(&self) -> String {
        self.name()
    }

    /// What the device can do.
    fn capabilities(&self) -> Capabilities {
        Capabilities::default()
    }
}

impl dyn Backend + '_ {
    /// `x wᵀ` for each of `w`.
    pub fn matmul_many<const N: usize>(&self, x: &Tensor, w: [&Matrix; N]) -> [Tensor; N] {
        let mut y = w.map(|w| {
            assert_eq!(w.cols, x.cols(), "inputs of the matrix");
            self.scratch(x.rows(), w.rows)
        });
        self.matmul_into(x, &w, &mut y);
        y
    }

    /// `x wᵀ`: `[n, rows of w]`.
    pub fn matmul(&self, x: &Tensor, w: &Matrix) -> Tensor {
        let [y] = self.matmul_many(x, [w]);
        y
    }
}
