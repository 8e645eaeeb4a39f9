//! Ops that wait for company: what a step asks for one after the other, and one
//! kernel can do.
//!
//! Such an op is not launched at once. If the next one goes with it, that one takes
//! it along; anything else launches it first ([`Driver::defer`]). So everything still
//! happens in order, and a buffer that is free again is not written before whoever
//! read it has run.
//!
//! [`Driver::defer`]: crate::driver::Driver::defer

use crate::compile::Kernel;
use crate::driver::{Address, Args, Grid};
use crate::memory::Buffer;
use crate::{moe, rows};
use backend::Activation;

/// Jobs of the kernel `heads`.
pub(crate) const MAX_JOBS: usize = 3;

/// Ops that have not been launched yet.
pub(crate) enum Deferred {
    /// `x += y`, of `n` values.
    Add { x: Address, y: Address, n: usize },
    /// Norms of heads, of which none reads what another one writes.
    Heads(Vec<Norm>),
    /// What a row's experts add up to.
    Mixed(Mixed),
}

/// The sum of a row's experts, and perhaps of one that all rows share: the last ops of a
/// layer, so that the norm that follows can take them along.
pub(crate) struct Mixed {
    /// A part for each pair of row and rank, and its weight.
    pub(crate) parts: Buffer,
    pub(crate) weights: Buffer,
    pub(crate) y: Address,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) top_k: usize,
    /// The shared expert's part, and whether it has been added.
    pub(crate) gated: Option<Gated>,
    pub(crate) added: bool,
}

/// `y = activation(gate) x`, one gate a row.
#[derive(Clone, Copy)]
pub(crate) struct Gated {
    pub(crate) x: Address,
    pub(crate) gate: Address,
    pub(crate) y: Address,
    pub(crate) activation: Activation,
}

/// The norm of every head of a tensor, turned or not.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Norm {
    pub(crate) x: Address,
    /// 0: none.
    pub(crate) weight: Address,
    pub(crate) y: Address,
    pub(crate) rows: usize,
    pub(crate) heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) eps: f32,
    pub(crate) turn: Option<Turn>,
}

/// A rotary embedding on the device.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Turn {
    pub(crate) frequencies: Address,
    pub(crate) pair_offset: usize,
    pub(crate) pairs: usize,
    pub(crate) batch: Address,
}

impl Norm {
    /// Whether one kernel can do both.
    pub(crate) fn goes_with(&self, other: &Norm) -> bool {
        let turns = [self.turn, other.turn];
        (self.rows, self.head_dim, self.eps) == (other.rows, other.head_dim, other.eps)
            && (turns[0] == turns[1] || turns.contains(&None))
            && self.y != other.x
            && self.x != other.y
    }
}

impl Deferred {
    /// The kernels of the ops one by one.
    pub(crate) fn launches(self) -> Vec<(Kernel, Grid, Args)> {
        match self {
            Deferred::Add { x, y, n } => vec![rows::add_alone(x, y, n)],
            Deferred::Heads(norms) => norms.iter().map(rows::norm_alone).collect(),
            Deferred::Mixed(m) => {
                let (n, shape) = (m.rows * m.cols, [m.rows, m.cols]);
                let gated = m.gated.map(|g| rows::gate_alone(g, shape));
                let added = m.gated.filter(|_| m.added);
                let added = added.map(|g| rows::add_alone(m.y, g.y, n));
                let all = [Some(moe::combine_alone(&m)), gated, added];
                all.into_iter().flatten().collect()
            }
        }
    }
}
