//! Block drafters: DFlash and DSpark heads, which guess a block of tokens in one step from
//! residual rows inside the target.
//!
//! ```text
//! c_p = rms([ a_1 | … | a_A ] Wfc)             tapped rows of the target, once a row
//! K, V of a layer, row p < m = c_p Wk, c_p Wv   of the m rows that the target has
//! x   = [ E[pending], E[mask], … ]              B rows at positions m, m + 1, …
//! x   = x + attention(rms(x))                   K, V of the block's own rows after those of c
//! x   = x + mlp(rms(x))
//! z   = rms(x)
//! logits = z Wᵀ + w1[previous token] w2ᵀ        DSpark's Markov head, plain, sampled from the left
//! confidence = sigmoid([ z | w1[previous token] ]·v + b)
//! ```
//!
//! DFlash 2 has convolutions in its layers and scores a few candidates by the token before them
//! (`conv.rs`, `selector.rs`).
//!
//! Rows of a block see each other, but in causal layers. Queries and keys are normed by head and
//! turned by the target's positions. Layers are those of Qwen 3 or of Gemma 4. A DSpark head's row
//! `i` guesses the token after it; a DFlash head's row `i` its own token, so that row 0, the
//! pending token's, guesses nothing. A confidence is how likely the target keeps the guess if it
//! has kept all before it. Embeddings, as the target scales them, and output matrix are the
//! target's where the head has none. The head remembers `K` and `V` of `c` and of no guess: a
//! block's rows are forgotten when it has run.
//!
//! Letters: `n` rows, `H` hidden size, `A` taps, `B` rows of a block, `r` Markov rank, `D` draft
//! vocabulary. Sampling and the use of confidences are the drafter's.

mod config;
mod conv;
mod layer;
mod load;
mod markov;
mod selector;

use crate::{HeadKind, HeadLogits, Scored, Target};
use backend::{Backend, Batch, Matrix, Tensor, TokenList};
use cache::{Memory, MemoryPlan};
use conv::Before;
use layer::Layer;
use markov::{Confidence, Markov};
use selector::Selector;

/// A kind of block drafter, by how its checkpoints name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockKind {
    /// A block of masks, filled at once; or, in DFlash 2, chosen from the left of the best candidates.
    Dflash,
    /// DFlash's layers with a Markov head and a confidence head.
    Dspark,
}

impl BlockKind {
    /// The kind's name, as users type it, and the architectures of its checkpoints.
    pub const fn head(self) -> HeadKind {
        match self {
            BlockKind::Dflash => HeadKind {
                name: "dflash",
                architectures: &["DFlashDraftModel", "DFlashSpeculator", load::DFLASH2],
            },
            BlockKind::Dspark => HeadKind {
                name: "dspark",
                architectures: &[
                    "Qwen3DSparkModel",
                    "DSparkDraftModel",
                    "DSparkSpeculator",
                    "Gemma4DSparkModel",
                ],
            },
        }
    }
}

/// A DFlash or DSpark head, paired with its target.
pub struct BlockHead {
    kind: BlockKind,
    taps: Vec<usize>,
    fc: Matrix,
    hidden_norm: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    /// Absent where the target's embeddings are used.
    embed: Option<Matrix>,
    /// The factor of the table's rows, or of those that the target reads.
    input_scale: f32,
    /// Absent where the target's output matrix is used.
    lm_head: Option<Matrix>,
    /// The target's token of each draft token; the same if absent.
    list: Option<TokenList>,
    output_scale: f32,
    softcap: Option<f32>,
    markov: Option<Markov>,
    confidence: Option<Confidence>,
    selector: Option<Selector>,
    block_rows: usize,
    from_anchor: bool,
    mask_token: u32,
    plan: MemoryPlan,
    eps: f32,
}

impl BlockHead {
    fn norm(&self, b: &dyn Backend, x: &Tensor, weight: &Tensor) -> Tensor {
        b.rms_norm(x, Some(weight), weight.cols(), self.eps)
    }

    /// Which kind of head it is.
    pub fn kind(&self) -> BlockKind {
        self.kind
    }

    /// The layers whose entering rows it reads ([`crate::Taps`]).
    pub fn taps(&self) -> &[usize] {
        &self.taps
    }

    /// What the head remembers of each of the target's rows.
    pub fn plan(&self) -> MemoryPlan {
        self.plan.clone()
    }

    /// Rows of a block: B.
    pub fn block_rows(&self) -> usize {
        self.block_rows
    }

    /// The row of a block that guesses the first token: 0, or 1 where a row guesses its own.
    pub fn first_guess(&self) -> usize {
        usize::from(!self.from_anchor)
    }

    /// The token that stands for those to be guessed.
    pub fn mask_token(&self) -> u32 {
        self.mask_token
    }

    /// Values of a feature: H.
    pub fn feature_cols(&self) -> usize {
        self.fc.rows
    }

    /// Features `c` of the target's rows `rows`, in order, from the `taps` of a step: `[n, H]`.
    pub fn features(&self, b: &dyn Backend, taps: &[Tensor], rows: &[usize]) -> Tensor {
        let mut each = taps.iter().map(|tap| b.gather(tap, rows));
        let first = each.next().expect("a head has taps");
        let all = each.fold(first, |all, row| b.concat(&all, &row)); // [n, A H]
        let c = self.norm(b, &b.matmul(&all, &self.fc), &self.hidden_norm);
        b.note(format_args!("draft.feature"), &c);
        c
    }

    /// Remembers rows of `features: [n, H]` as the rows of `batch`.
    pub fn remember(&self, b: &dyn Backend, features: &Tensor, batch: &Batch, memory: &mut Memory) {
        for layer in &self.layers {
            layer.remember(b, features, batch, memory);
        }
    }

    /// Which of `n` rows begin a block, for a head whose layers have convolutions: what
    /// [`BlockHead::forward`] takes, a value a row, `[n, 1]`.
    pub fn starts(&self, b: &dyn Backend, n: usize, first: &[usize]) -> Option<Tensor> {
        self.selector.as_ref()?;
        // The sigmoid of these is exactly 1 and 0.
        let (open, shut) = (1e4, -1e4);
        let gate = (0..n).map(|row| if first.contains(&row) { shut } else { open });
        Some(b.upload(n, 1, &gate.collect::<Vec<f32>>()))
    }

    /// Runs the blocks of `batch`, whose tokens are a pending one and masks, and of which each
    /// row sees the whole block: `z: [n, H]`. `starts` is what [`BlockHead::starts`] gave for them.
    pub fn forward(
        &self,
        b: &dyn Backend,
        target: &dyn Target,
        batch: &Batch,
        starts: Option<&Tensor>,
        memory: &mut Memory,
    ) -> Tensor {
        let mut x = match &self.embed {
            Some(table) => b.embed(table, &batch.tokens, self.input_scale),
            None => {
                let x = target.embed(b, &batch.tokens);
                match self.input_scale {
                    1.0 => x,
                    factor => b.scale(x, factor),
                }
            }
        }; // [n, H]
        let causal = (batch.rows_ahead() > 0).then(|| batch.causal());
        let causal = causal.as_ref().unwrap_or(batch);
        let rows: Vec<usize> = (0..batch.n_rows())
            .map(|row| row.saturating_sub(1))
            .collect();
        let before = starts.map(|gate| Before { rows: &rows, gate });
        for (i, layer) in self.layers.iter().enumerate() {
            x = layer.forward(b, &x, (batch, causal), before.as_ref(), memory);
            b.note(format_args!("draft.layers.{i}.out"), &x);
        }
        let z = self.norm(b, &x, &self.norm);
        b.note(format_args!("draft.hidden"), &z);
        z
    }

    /// The tokens that [`BlockHead::logits`] scores, if not all.
    pub fn list(&self) -> Option<&TokenList> {
        self.list.as_ref()
    }

    /// Scores of what each row of `z: [n, H]` guesses, without what the token before says.
    pub fn logits(&self, b: &dyn Backend, target: &dyn Target, z: &Tensor) -> Tensor {
        let logits = match &self.lm_head {
            Some(lm_head) => b.matmul(z, lm_head),
            // The target's own scores, then, so that noise chooses of both alike.
            None if self.output_scale == 1.0 && self.softcap.is_none() => target.logits(b, z),
            None => target.uncapped_logits(b, z),
        }; // [n, D]
        let logits = match self.output_scale {
            1.0 => logits,
            factor => b.scale(logits, factor),
        };
        let logits = match self.softcap {
            Some(cap) => b.softcap(logits, cap),
            None => logits,
        };
        b.note(format_args!("draft.logits"), &logits);
        logits
    }

    /// What the head carries from one guess of a block to the next, before the first of `n` blocks:
    /// a row for each, `[n, r]`. Absent where it carries nothing but the guess itself.
    pub fn start(&self, b: &dyn Backend, n: usize) -> Option<Tensor> {
        self.markov.as_ref().and_then(|markov| markov.start(b, n))
    }

    /// `logits: [n, D]` of the guesses of `z: [n, H]` with what each of the tokens `previous` says
    /// about the one after it; and what is carried to the next guess from `state`, which begins
    /// as [`BlockHead::start`].
    pub fn after(
        &self,
        b: &dyn Backend,
        logits: Tensor,
        z: &Tensor,
        previous: &[u32],
        state: Option<&Tensor>,
    ) -> (HeadLogits<'_>, Option<Tensor>) {
        if let Some(selector) = &self.selector {
            let scored = selector.select(b, &logits, z, previous);
            b.note(format_args!("draft.after"), &scored.logits);
            return (scored, None);
        }
        let (logits, state) = match &self.markov {
            Some(markov) => {
                let (bias, state) = markov.bias(b, z, previous, state);
                (b.add(bias, &logits), state)
            }
            None => (logits, None),
        };
        b.note(format_args!("draft.after"), &logits);
        let scored = self.list.as_ref().map_or(Scored::All, Scored::Same);
        (HeadLogits { logits, scored }, state)
    }

    /// Whether the head says how likely its guesses stay.
    pub fn has_confidences(&self) -> bool {
        self.confidence.is_some()
    }

    /// How likely the target keeps what each row of `z: [n, H]` guesses after the tokens
    /// `previous`, if it keeps those.
    ///
    /// # Panics
    ///
    /// If the head [does not say](BlockHead::has_confidences).
    pub fn confidences(&self, b: &dyn Backend, z: &Tensor, previous: &[u32]) -> Vec<f32> {
        let head = self.confidence.as_ref().expect("a confidence head");
        head.of(b, z, self.markov.as_ref(), previous)
    }
}
