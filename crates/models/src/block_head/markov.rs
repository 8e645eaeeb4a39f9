//! What a DSpark head's tokens have to say about those that follow them: its Markov head, of one
//! of three types, and its confidence head.
//!
//! ```text
//! e    = w1[previous token]
//! bias = w2 e                                          vanilla
//! bias = w2 (sigmoid([ z | e ] Wg + bg) * e)           gated
//! [ g | c | o ] = [ s | e | z ] Wj + bj                rnn: s is 0 before the block's first guess
//! s    = sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c)
//! bias = w2 tanh(o)
//! ```

use super::config::{Config, MarkovType};
use crate::ModelError;
use crate::layers::{Linear, Loader};
use backend::{Activation, Backend, Matrix, Tensor, math};

/// What stands between the previous token's row of `w1` and `w2`.
enum Kind {
    Vanilla,
    /// `[r, H + r]`
    Gated(Linear),
    /// `[3 r, 2 r + H]`
    Rnn(Linear),
}

/// What a token has to say about the one after it: `w1: [V, r]`, `w2: [D, r]`.
pub(super) struct Markov {
    w1: Matrix,
    w2: Matrix,
    rank: usize,
    kind: Kind,
}

impl Markov {
    /// The head at `at`, where `config` has one.
    pub(super) fn load(
        at: &Loader<'_>,
        config: &Config,
        [hidden, vocab, n_draft]: [usize; 3],
    ) -> Result<Option<Self>, ModelError> {
        let rank = config.markov_rank;
        if rank == 0 {
            return Ok(None);
        }
        let kind = match config.markov_type()? {
            MarkovType::Vanilla => Kind::Vanilla,
            MarkovType::Gated => Kind::Gated(Linear::load(at, "gate_proj", rank, hidden + rank)?),
            MarkovType::Rnn => {
                Kind::Rnn(Linear::load(at, "joint_proj", 3 * rank, 2 * rank + hidden)?)
            }
        };
        Ok(Some(Markov {
            w1: at.matrix("markov_w1", vocab, rank)?,
            w2: at.matrix("markov_w2", n_draft, rank)?,
            rank,
            kind,
        }))
    }

    /// Rows of `w1`: `[n, r]`.
    fn embed(&self, b: &dyn Backend, tokens: &[u32]) -> Tensor {
        b.embed(&self.w1, tokens, 1.0)
    }

    /// The state before a block's first guess, of `n` blocks: `[n, r]`, where the head has one.
    pub(super) fn start(&self, b: &dyn Backend, n: usize) -> Option<Tensor> {
        let zeros = || b.upload(n, self.rank, &vec![0.0; n * self.rank]);
        matches!(self.kind, Kind::Rnn(_)).then(zeros)
    }

    /// What the tokens `previous` add to the scores of the guesses of `z: [n, H]`: `[n, D]`; and
    /// the next state, of a head with one.
    pub(super) fn bias(
        &self,
        b: &dyn Backend,
        z: &Tensor,
        previous: &[u32],
        state: Option<&Tensor>,
    ) -> (Tensor, Option<Tensor>) {
        let e = self.embed(b, previous);
        match &self.kind {
            Kind::Vanilla => (b.matmul(&e, &self.w2), None),
            Kind::Gated(proj) => {
                let gate = proj.forward(b, &b.concat(z, &e));
                let e = b.glu(gate, &e, Activation::Sigmoid);
                (b.matmul(&e, &self.w2), None)
            }
            Kind::Rnn(proj) => {
                let state = state.expect("a state of each block");
                let all = proj.forward(b, &b.concat(&b.concat(state, &e), z)); // [n, 3 r]
                let part = |i: usize| b.columns(&all, i * self.rank, self.rank);
                let tanh = |x: Tensor| b.softcap(x, 1.0);
                let candidate = tanh(part(1));
                let minus = b.scale(b.columns(&candidate, 0, self.rank), -1.0);
                let gated = b.glu(part(0), &b.add(minus, state), Activation::Sigmoid);
                let next = b.add(gated, &candidate);
                (b.matmul(&tanh(part(2)), &self.w2), Some(next))
            }
        }
    }
}

/// How likely a guess stays: `proj: [1, H]`, or `[1, H + r]` with the previous token's `w1`.
pub(super) struct Confidence {
    proj: Matrix,
    bias: f32,
    reads_previous: bool,
}

impl Confidence {
    /// The head at `at`, where `config` has one.
    pub(super) fn load(
        at: &Loader<'_>,
        config: &Config,
        hidden: usize,
    ) -> Result<Option<Self>, ModelError> {
        if !config.enable_confidence_head {
            return Ok(None);
        }
        let reads_previous = config.confidence_head_with_markov;
        let previous = if reads_previous {
            config.markov_rank
        } else {
            0
        };
        Ok(Some(Confidence {
            proj: at.matrix("proj", 1, hidden + previous)?,
            bias: at.bare("proj.bias", 1)?[0],
            reads_previous,
        }))
    }

    /// How likely each of the guesses of `z: [n, H]` after the tokens `previous` stays.
    pub(super) fn of(
        &self,
        b: &dyn Backend,
        z: &Tensor,
        markov: Option<&Markov>,
        previous: &[u32],
    ) -> Vec<f32> {
        let scores = match markov {
            Some(markov) if self.reads_previous => {
                b.matmul(&b.concat(z, &markov.embed(b, previous)), &self.proj)
            }
            _ => b.matmul(z, &self.proj),
        }; // [n, 1]
        let scores = b.download(&scores);
        let confidences = scores.iter().map(|x| math::sigmoid(x + self.bias));
        confidences.collect()
    }
}
