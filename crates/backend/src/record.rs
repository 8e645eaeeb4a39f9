//! Recording: steps and chains of steps that a device may record once and replay.

use crate::{Batch, ExpertMarks, Store, Tensor, TokenChoice, TokenList};
#[cfg(doc)]
use crate::{Ops, Sample};
use std::fmt::Arguments;
use std::sync::atomic::{AtomicU64, Ordering};

/// Why a step's results cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{device} failed: {message}")]
pub struct DeviceError {
    /// Which backend.
    pub device: String,
    /// What it said.
    pub message: String,
}

/// Whose work a step is, and which part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StepKey {
    owner: u64,
    part: &'static str,
}

impl StepKey {
    /// A key that no other owner of models and memory has.
    pub fn fresh() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        StepKey {
            owner: NEXT.fetch_add(1, Ordering::Relaxed),
            part: "",
        }
    }

    /// The key of a part of the owner's work.
    pub fn part(self, part: &'static str) -> Self {
        StepKey { part, ..self }
    }
}

/// Steps of which each is about the tokens that the one before it has chosen.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    /// Whose work it is, as in [`Record::step`].
    pub key: StepKey,
    /// The rows of each step. Only the first one's tokens are known; a first step without
    /// rows does nothing but score what the chain starts from.
    pub batches: &'a [Batch],
    /// By step, how each row's token is chosen.
    pub choices: &'a [Vec<TokenChoice>],
    /// The tokens that are scored, if not all.
    pub list: Option<&'a TokenList>,
    /// Whether [`Chained::confidences`] are wanted.
    pub wants_confidences: bool,
}

/// What a step of a [`Chain`] makes.
#[derive(Debug)]
pub struct Link {
    /// Scores of the next token after each row.
    pub logits: Tensor,
    /// Each row's tokens, where they depend on the row, as [`Ops::matmul_groups`]
    /// returns them.
    pub ids: Option<Tensor>,
    /// What the next step starts from, if not from the same as this one.
    pub next: Option<Tensor>,
}

/// What a [`Chain`] makes.
#[derive(Debug)]
pub struct Chained {
    /// By step, each row's token.
    pub tokens: Vec<Vec<u32>>,
    /// By step, the [confidence](Sample::confidences) of each row's logits, if these were wanted.
    pub confidences: Vec<Vec<f32>>,
    /// The last of [`Link::next`]; lasts until the next step or chain of the same key.
    pub next: Option<Tensor>,
}

/// Rows of a step that is recorded, at most: larger ones are prompts, which come in
/// any size and leave the host time enough.
pub const MAX_RECORDED_ROWS: usize = 64;

/// How ops become steps: where one begins, what may be recorded, where errors come out.
pub trait Record: Store {
    /// Runs `work`, ops of one step, on `inputs`, and returns its tensors.
    ///
    /// In steps of at most [`MAX_RECORDED_ROWS`] rows, what `work` asks for may depend on
    /// nothing but `key`, how many rows and
    /// sequences `batch` has and the shapes of `inputs`: a device may record it and
    /// then run the record, with the numbers of `batch` and the values of `inputs`,
    /// instead of calling `work` again. Larger steps are never recorded. The tensors last
    /// until the next step of the same key.
    fn step(
        &self,
        key: StepKey,
        batch: &Batch,
        inputs: &[&Tensor],
        work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
    ) -> Vec<Tensor> {
        let _ = (key, batch);
        work(inputs)
    }

    /// Runs the steps of `chain` in one go, tokens staying on the device in between: step
    /// `i` is `work(i, batch, x)`, `x` what the step before it passed on. Where all are
    /// greedy a token is the [`Sample::argmax`], else [`Sample::choose_tokens`].
    ///
    /// What `work` asks for may depend on nothing but the key and the shapes, as in
    /// [`Record::step`]; of tokens, it may hand the batch's to [`Ops::embed`]. `None`,
    /// the default, leaves the steps to whoever asks.
    fn chain(
        &self,
        chain: &Chain<'_>,
        x: &Tensor,
        work: &mut dyn FnMut(usize, &Batch, &Tensor) -> Link,
    ) -> Option<Chained> {
        let _ = (chain, x, work);
        None
    }

    /// Whether a step or a chain since the last call was among the first of its kind, which take longer than later ones,
    /// as where a device compiles and records it. False, by default.
    fn take_first_runs(&self) -> bool {
        false
    }

    /// Whether a step of `key` without inputs, of so many rows and sequences, runs as it will from now on: whether it is
    /// recorded, on a device that records steps. True, by default.
    fn is_recorded(&self, key: StepKey, rows: usize, sequences: usize) -> bool {
        let _ = (key, rows, sequences);
        true
    }

    /// Threads of the host that the device computes with, and that are free between steps: 1 where there are
    /// none.
    fn host_threads(&self) -> usize {
        1
    }

    /// Calls `work` once for each number below `n`, on the [host's threads](Record::host_threads): for work
    /// between steps whose parts do not need one another.
    fn host_each(&self, n: usize, work: &(dyn Fn(usize) + Sync)) {
        (0..n).for_each(work);
    }

    /// Notes from now on which experts rows choose in [`Ops::moe`], as far as this thread asks for it; what was noted
    /// before is forgotten. Nothing, by default.
    fn note_experts(&self) {}

    /// Ends what [`Record::note_experts`] began, and makes `marks` what rows have chosen since. Returns whether the
    /// device can tell: false, the default, where choices stay on a device, so that telling would take a download.
    fn take_experts(&self, marks: &mut ExpertMarks) -> bool {
        let _ = marks;
        false
    }

    /// Ends a step: waits, and returns the first error since the last call.
    fn finish(&self) -> Result<(), DeviceError>;

    /// Shows an intermediate to whoever listens: nobody, by default. Tests
    /// compare them by name with other implementations.
    fn note(&self, name: Arguments<'_>, x: &Tensor) {
        let _ = (name, x);
    }
}
