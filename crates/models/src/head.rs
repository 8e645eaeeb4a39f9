//! What draft heads have in common, as drafters see it.

use crate::Target;
use backend::{Backend, Batch, Matrix, Tensor, TokenList};
use cache::{Memory, MemoryPlan};
use quant::Stored;
use std::ops::Range;

/// Which tokens a head has scored.
#[derive(Debug)]
pub enum Scored<'a> {
    /// All of the target's vocabulary.
    All,
    /// The same tokens after every row.
    Same(&'a TokenList),
    /// Other tokens after each row.
    ByRow(Vec<Vec<u32>>),
}

impl Scored<'_> {
    /// The tokens scored after row `row`; all of them if `None`.
    pub fn ids(&self, row: usize) -> Option<&[u32]> {
        match self {
            Scored::All => None,
            Scored::Same(list) => Some(list.ids()),
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

/// Tokens that a head can score apart from all others, for a share of the cost.
///
/// The others cannot be guessed then, which no text depends on.
#[derive(Debug)]
pub struct Shortlist {
    /// The tokens, ascending.
    list: TokenList,
    /// Rows of the output matrix for the tokens of the list, `[m, H]`.
    rows: Matrix,
}

impl Shortlist {
    /// Copies the rows of `output: [V, H]` that belong to `ids`, which ascend.
    pub(crate) fn new(b: &dyn Backend, output: &Stored<'_>, ids: &[u32]) -> Self {
        let runs: Vec<Stored<'_>> = runs(ids).map(|run| output.slice(run)).collect();
        Shortlist {
            list: TokenList::new(b, ids.to_vec()),
            rows: b.matrix(&runs),
        }
    }

    /// The tokens, ascending.
    pub fn ids(&self) -> &[u32] {
        self.list.ids()
    }

    /// The same as its columns stand for them.
    pub fn list(&self) -> &TokenList {
        &self.list
    }

    /// Scores of its tokens after each row of `x: [n, H]`.
    pub fn logits(&self, b: &dyn Backend, x: &Tensor) -> HeadLogits<'_> {
        HeadLogits {
            logits: b.matmul(x, &self.rows),
            scored: Scored::Same(&self.list),
        }
    }
}

/// Numbers that follow each other, as ranges.
fn runs(ids: &[u32]) -> impl Iterator<Item = Range<usize>> {
    ids.chunk_by(|a, b| a + 1 == *b)
        .map(|run| run[0] as usize..run[0] as usize + run.len())
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

    /// Layers that guess in turn, each with keys and values of its own. Layer `i` reads, in row `p`,
    /// the token after the target's row `p + i` and what the layer before it has returned for row `p`,
    /// or the feature if it is the first one; so it guesses the token `i` places after the one that the
    /// first layer guesses.
    fn layers(&self) -> usize {
        1
    }

    /// Values of a feature: F.
    fn feature_cols(&self) -> usize;

    /// Features of rows `rows` of a target's step, in order: of a head with [taps](ChainedHead::taps) from these,
    /// `[n, H]` each, of one without from all hidden rows, `hidden: [n, H]`. Where there are taps, `hidden` may have some
    /// of the step's rows alone.
    fn features(&self, b: &dyn Backend, hidden: &Tensor, taps: &[Tensor], rows: &[usize])
    -> Tensor;

    /// Whether the positions of its rows follow those of the target's rows of media
    /// ([`MediaRows::has_grid`](crate::MediaRows)); otherwise its rows are counted.
    fn follows_grid(&self) -> bool {
        false
    }

    /// Runs the head over rows of `features: [n, F]` and the tokens in `batch`; of its media rows,
    /// over rows of `media`, a tensor a source, as in [`Target::inputs`]. Returns what [`ChainedHead::logits`] scores and the next row of a chain takes
    /// as its feature: `[n, F]`.
    fn forward(
        &self,
        b: &dyn Backend,
        target: &dyn Target,
        features: &Tensor,
        media: &[&Tensor],
        batch: &Batch,
        memory: &mut Memory,
    ) -> Tensor;

    /// Runs layer `layer` of [`ChainedHead::layers`] as [`ChainedHead::forward`] runs the first one. The
    /// first of `inputs` are the features, the others the embeddings of media.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    fn forward_layer(
        &self,
        layer: usize,
        b: &dyn Backend,
        target: &dyn Target,
        inputs: &[&Tensor],
        batch: &Batch,
        memory: &mut Memory,
    ) -> Tensor {
        assert_eq!(layer, 0, "a head of one layer");
        self.forward(b, target, inputs[0], &inputs[1..], batch, memory)
    }

    /// The tokens that [`ChainedHead::listed_logits`] scores apart.
    fn shortlist(&self) -> Option<&Shortlist> {
        None
    }

    /// Scores of the [`ChainedHead::shortlist`] after each of the rows that
    /// [`ChainedHead::forward`] returned, if there is one.
    fn listed_logits(&self, b: &dyn Backend, features: &Tensor) -> Option<HeadLogits<'_>> {
        Some(self.shortlist()?.logits(b, features))
    }

    /// The tokens that [`ChainedHead::logits`] scores, if not all.
    fn list(&self) -> Option<&TokenList> {
        None
    }

    /// Scores of the next token after each of the rows that
    /// [`ChainedHead::forward`] returned.
    fn logits(&self, b: &dyn Backend, target: &dyn Target, features: &Tensor) -> HeadLogits<'_>;
}
