//! What draft heads have in common, as drafters see it.

use crate::Target;
use backend::{Backend, Batch, Tensor};
use cache::{Memory, MemoryPlan};

/// Which tokens a head has scored.
#[derive(Debug)]
pub enum Scored<'a> {
    /// All of the target's vocabulary.
    All,
    /// These, after every row.
    Same(&'a [u32]),
    /// Others after each row.
    ByRow(Vec<Vec<u32>>),
}

impl Scored<'_> {
    /// The tokens scored after row `row`; all of them if `None`.
    pub fn ids(&self, row: usize) -> Option<&[u32]> {
        match self {
            Scored::All => None,
            Scored::Same(ids) => Some(ids),
            Scored::ByRow(ids) => Some(&ids[row]),
        }
    }
}

/// Scores of the next token after each row.
#[derive(Debug)]
pub struct HeadLogits<'a> {
    /// `[n, V]`, or `[n, m]` for the tokens of `scored`.
    pub logits: Tensor,
    /// The token of each column.
    pub scored: Scored<'a>,
}

/// A draft head with keys and values of its own, a row for each of the target's,
/// that drafts further from what it has returned itself.
///
/// Row `p` reads the token after the target's row `p` and a *feature*, `[n, F]`: made
/// from the target's row `p`, or what the head returned for row `p - 1`.
pub trait ChainedHead: Send + Sync {
    /// Name, as users type it.
    fn name(&self) -> &'static str;

    /// The layers whose entering rows it reads ([`crate::Taps`]).
    fn taps(&self) -> &[usize] {
        &[]
    }

    /// What the head remembers of each of its rows.
    fn plan(&self) -> MemoryPlan;

    /// Features of the target's rows `rows`, in order, from all `hidden: [n, H]`
    /// and the `taps` of a step.
    fn features(&self, b: &dyn Backend, hidden: &Tensor, taps: &[Tensor], rows: &[usize])
    -> Tensor;

    /// Runs the head over rows of `features: [n, F]` and the tokens in `batch`.
    /// Returns what [`ChainedHead::logits`] scores and the next row of a chain takes
    /// as its feature: `[n, F]`.
    fn forward(
        &self,
        b: &dyn Backend,
        target: &dyn Target,
        features: &Tensor,
        batch: &Batch,
        memory: &mut Memory,
    ) -> Tensor;

    /// Scores of the next token after each of the rows that
    /// [`ChainedHead::forward`] returned.
    fn logits(&self, b: &dyn Backend, target: &dyn Target, features: &Tensor) -> HeadLogits<'_>;
}
