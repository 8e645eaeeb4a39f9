//! Ops that wait for company: what a step asks for one after the other, and one
//! kernel can do.
//!
//! Such an op is not launched at once. If the next one goes with it, that one takes
//! it along; anything else launches it first ([`Driver::defer`]). So everything still
//! happens in order, and a buffer that is free again is not written before whoever
//! read it has run. Where an op is taken along, what it writes may be such a buffer: a
//! kernel's thread reads a row's columns before it writes those of a tensor of the same
//! shape, but what products read lies otherwise ([`End::may_write`]).
//!
//! [`Driver::defer`]: crate::driver::Driver::defer

use crate::args::NormEpilogue;
use crate::compile::Kernel;
use crate::delta::Rule;
use crate::driver::{Address, Args, Grid};
use crate::matmul::Single;
use crate::memory::{Buffer, Half};
use crate::{elementwise, moe};
use backend::Activation;
use std::sync::Arc;

/// Jobs of the kernel `norm_rope_append`.
pub(crate) const MAX_JOBS: usize = 3;

/// Norms that a kernel makes of one row.
const MAX_NEXT: usize = 3;

/// Ops that have not been launched yet.
pub(crate) enum Deferred {
    /// `x += y`, of `n` values.
    Add {
        x: Address,
        y: Address,
        n: usize,
    },
    /// The norm of whole rows.
    Norm(RowNorm),
    /// What rows add up to.
    End(End),
    /// Norms of heads, of which none reads what another one writes.
    Heads(Vec<Norm>),
    /// What a row's experts add up to.
    Mixed(Mixed),
    Columns(Columns),
    Glu(Glu),
    Rule(Rule),
}

/// The sum of a row's experts, and what is beside them: the last ops of a layer, so that
/// the norm that follows can take them along.
pub(crate) struct Mixed {
    /// A part for each pair of row and rank, and its weight.
    pub(crate) parts: Buffer,
    pub(crate) weights: Buffer,
    pub(crate) y: Address,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) top_k: usize,
    pub(crate) beside: Beside,
}

/// What a mixture is added to.
pub(crate) enum Beside {
    Nothing,
    /// The shared expert's part; whether it has been added to `y`, and what `y` has been
    /// added to.
    Gated {
        by: Gated,
        added: bool,
        onto: Option<Address>,
    },
    /// The norm of a dense block, that of `y`, and whether the latter has been added to it.
    Norms {
        dense: RowNorm,
        own: Option<RowNorm>,
        added: bool,
    },
}

/// `y = activation(gate) x`, one gate a row.
#[derive(Clone, Copy)]
pub(crate) struct Gated {
    pub(crate) x: Address,
    pub(crate) gate: Address,
    pub(crate) y: Address,
    pub(crate) activation: Activation,
}

/// The norm of whole rows; beside it what products read, if a kernel is to write it.
#[derive(Clone)]
pub(crate) struct RowNorm {
    pub(crate) x: Address,
    pub(crate) weight: Address,
    pub(crate) y: Address,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) eps: f32,
    pub(crate) half: Option<Arc<Half>>,
}

/// `x = (from + y) factor`, and what is made of it.
pub(crate) struct End {
    pub(crate) from: Address,
    pub(crate) x: Address,
    pub(crate) y: Term,
    /// Weight of the norm of `y`; 0: none.
    pub(crate) post: Address,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) factor: f32,
    pub(crate) eps: f32,
    pub(crate) next: Vec<Next>,
}

/// What is added to a row.
pub(crate) enum Term {
    Plain(Address),
    /// Experts and a shared one, or a dense block.
    Mixed(Box<Mixed>),
}

/// A norm of a row, or, without a weight, the row as products read it.
pub(crate) struct Next {
    /// 0: none.
    pub(crate) weight: Address,
    pub(crate) n: Address,
    pub(crate) half: Arc<Half>,
}

impl Mixed {
    /// Whether `y` is all that it comes to, and a kernel can go on from there, to a norm or
    /// without.
    pub(crate) fn ends_with(&self, y: Address, has_norm: bool, eps: f32) -> bool {
        match &self.beside {
            Beside::Nothing => false,
            Beside::Gated { added, onto, .. } => {
                *added && onto.is_none() && self.y == y && !has_norm
            }
            Beside::Norms { dense, added, .. } => *added && dense.y == y && dense.eps == eps,
        }
    }

    /// What its kernels read and write row by row.
    fn tensors(&self) -> Vec<Address> {
        let mut all = vec![self.y];
        match &self.beside {
            Beside::Nothing => {}
            Beside::Gated { by, .. } => all.extend([by.x, by.gate, by.y]),
            Beside::Norms { dense, own, .. } => {
                all.extend([dense.x, dense.y]);
                all.extend(own.as_ref().map(|n| n.y));
            }
        }
        all
    }
}

impl End {
    /// Whether its kernel may write another norm to `n`, and that as products read it to
    /// `half`: neither is memory that another row's block, or thread, still uses.
    pub(crate) fn may_write(&self, n: Address, half: &Half) -> bool {
        let half = half.address();
        let mut tensors = vec![self.from, self.x];
        let mut gate = None;
        match &self.y {
            Term::Plain(y) => tensors.push(*y),
            Term::Mixed(m) => {
                tensors.extend(m.tensors());
                if let Beside::Gated { by, .. } = &m.beside {
                    gate = Some(by.gate);
                }
            }
        }
        tensors.extend(self.next.iter().map(|next| next.n));
        let mut halves = self.next.iter().map(|next| next.half.address());
        Some(n) != gate && !tensors.contains(&half) && halves.all(|h| h != n && h != half)
    }

    /// Takes a norm of what it makes along, if it can.
    pub(crate) fn take(&mut self, norm: &RowNorm) -> bool {
        let Some(half) = &norm.half else { return false };
        let fits = norm.x == self.x
            && (norm.rows, norm.cols, norm.eps) == (self.rows, self.cols, self.eps)
            && self.next.len() < MAX_NEXT
            && self.next.iter().all(|next| next.weight != 0)
            && self.may_write(norm.y, half);
        if fits {
            self.push(norm, half);
        }
        fits
    }

    /// Takes a norm along that it can.
    pub(crate) fn push(&mut self, norm: &RowNorm, half: &Arc<Half>) {
        self.next.push(Next {
            weight: norm.weight,
            n: norm.y,
            half: half.clone(),
        });
    }

    /// The kernels' struct.
    pub(crate) fn epilogue(&self) -> NormEpilogue {
        let mut norms = NormEpilogue {
            count: self.next.len() as i32,
            ..NormEpilogue::default()
        };
        for (i, next) in self.next.iter().enumerate() {
            norms.weight[i] = next.weight;
            norms.y[i] = next.n;
            norms.f16[i] = next.half.args();
        }
        norms
    }
}

/// `cols` columns of a tensor from number `first` on, whose rows have `from`.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    pub(crate) x: Address,
    pub(crate) first: usize,
    pub(crate) from: usize,
    pub(crate) y: Address,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Columns {
    pub(crate) fn start(&self) -> Address {
        self.x + 4 * self.first as Address
    }
}

/// `y = activation(gate) x`, rows of either so many columns apart, and `y` as products
/// read it.
pub(crate) struct Glu {
    pub(crate) gate: (Address, usize),
    pub(crate) x: (Address, usize),
    pub(crate) y: Address,
    /// Where `x` goes besides; 0: nowhere.
    pub(crate) copy: Address,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) activation: Activation,
    pub(crate) half: Arc<Half>,
    /// A product of it that follows.
    pub(crate) product: Option<Single>,
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
    /// The kernels of the ops, one by one where none does them together.
    pub(crate) fn launches(self) -> Vec<(Kernel, Grid, Args)> {
        match self {
            Deferred::Add { x, y, n } => vec![elementwise::add_alone(x, y, n)],
            Deferred::Norm(norm) => vec![elementwise::row_norm_alone(&norm)],
            Deferred::End(end) => vec![match &end.y {
                Term::Plain(y) => elementwise::end_alone(&end, *y),
                Term::Mixed(m) => moe::end(&end, m),
            }],
            Deferred::Heads(norms) => norms.iter().map(elementwise::norm_alone).collect(),
            Deferred::Mixed(m) => {
                let (n, shape) = (m.rows * m.cols, [m.rows, m.cols]);
                let mut all = vec![moe::combine_alone(&m)];
                match &m.beside {
                    Beside::Nothing => {}
                    Beside::Gated { by, added, onto } => {
                        all.push(elementwise::gate_alone(*by, shape));
                        all.extend(added.then(|| elementwise::add_alone(m.y, by.y, n)));
                        all.extend(onto.map(|x| elementwise::add_alone(x, m.y, n)));
                    }
                    Beside::Norms { dense, own, added } => {
                        all.push(elementwise::row_norm_alone(dense));
                        let own = own.as_ref();
                        all.extend(own.map(elementwise::row_norm_alone));
                        let own = own.filter(|_| *added);
                        all.extend(own.map(|own| elementwise::add_alone(dense.y, own.y, n)));
                    }
                }
                all
            }
            Deferred::Rule(rule) => rule.launches(),
            Deferred::Columns(columns) => vec![elementwise::columns_alone(columns)],
            Deferred::Glu(glu) => {
                let gate = elementwise::glu_alone(&glu);
                let product = glu.product.map(|p| p.launch);
                [Some(gate), product].into_iter().flatten().collect()
            }
        }
    }
}
