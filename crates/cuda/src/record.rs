//! Ops on tensors, appended to a list; and the list, fused and launched.
//!
//! An op checks its shapes and is appended. The list is launched where the host needs a
//! result, where something is launched that is no op of it, at the end of what is being
//! recorded, and, once it is [`LONG`], before the next op that mixes rows, for no rule of
//! fusion reaches across one. So a GPU that runs a prompt starts soon, and a step of few rows is
//! recorded as it would run.

use crate::Cuda;
use crate::args::Address;
use crate::delta::States;
use crate::kv::Pages;
use crate::launch::{Device, launch};
use crate::machine::lock;
use crate::matmul::Weights;
use crate::memory::{Buffer, Cell, cell, tensor};
use crate::moe::Table;
use backend::Tensor;
use fusion::{Kind, OpList, Operand, Value};
use std::sync::Arc;

/// Ops from which on a list is launched before the next op that mixes rows.
const LONG: usize = 32;

/// Ops of a list, at most.
const LONGEST: usize = 1024;

/// What an [`Operand`] of a list is. It lives until the list was launched.
#[derive(Clone)]
pub(crate) enum Bound {
    Weights(Arc<Weights>),
    Experts {
        table: Arc<Table>,
        /// The weights that the table is kept with.
        _first: Arc<Weights>,
    },
    Kv(Arc<Pages>),
    Delta(Arc<States>),
    Batch {
        rows: Rows,
        /// The memory that they lie in.
        _own: Option<Arc<Buffer>>,
    },
    Rope(Frequencies),
    /// Numbers on the device.
    Numbers(Arc<Buffer>),
    Tokens(Tokens),
    Groups {
        size: usize,
        top: usize,
    },
}

/// A step's rows on the device.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Rows {
    pub(crate) address: Address,
    pub(crate) n: usize,
    pub(crate) seqs: usize,
    /// Rows that a sequence has, at most, in any step that a record of this one stands for ([`crate::step::longest`]).
    pub(crate) longest: usize,
    /// Cache rows beyond its own that a row sees, at most ([`backend::Batch::rows_ahead`]).
    pub(crate) ahead: usize,
}

/// A rotation's frequencies, and behind them the axes of positions that pairs turn by, on the
/// device; and which columns are a pair.
#[derive(Clone, Copy, PartialEq)]
pub(crate) struct Frequencies {
    pub(crate) address: Address,
    pub(crate) pair_offset: usize,
    pub(crate) pairs: usize,
}

/// Where an embedding finds its tokens: alone, or in the rows of a step.
#[derive(Clone)]
pub(crate) struct Tokens {
    pub(crate) ids: Address,
    pub(crate) batch: Address,
    /// Memory of their own.
    pub(crate) _own: Option<Arc<Buffer>>,
}

/// The list that ops are appended to.
#[derive(Default)]
pub(crate) struct Recorder {
    /// Which list it is, so that cells know whether they are values of it.
    number: u32,
    list: OpList,
    /// What each value is.
    cells: Vec<Arc<Cell>>,
    /// What each operand is.
    bound: Vec<Bound>,
}

impl Recorder {
    /// The value that `cell` is in this list.
    pub(crate) fn value(&mut self, cell: &Arc<Cell>) -> Value {
        if let Some(value) = cell.number(self.number + 1) {
            return Value(value);
        }
        let [rows, cols] = cell.shape();
        let value = self.list.value(rows, cols);
        cell.set_number(self.number + 1, value.0);
        self.cells.push(cell.clone());
        if let Some(copy) = cell.f16_copy() {
            let copy = self.value(&copy);
            self.list.set_f16(value, copy);
        }
        value
    }

    /// The values that tensors are.
    pub(crate) fn values<const N: usize>(&mut self, x: [&Tensor; N]) -> [Value; N] {
        x.map(|x| self.value(cell(x)))
    }

    /// The operand that `bound` is. Rows and rotations are the same operand if they are equal.
    pub(crate) fn operand(&mut self, bound: Bound) -> Operand {
        let same = |other: &Bound| match (&bound, other) {
            (Bound::Batch { rows: a, .. }, Bound::Batch { rows: b, .. }) => a == b,
            (Bound::Rope(a), Bound::Rope(b)) => a == b,
            (Bound::Weights(a), Bound::Weights(b)) => Arc::ptr_eq(a, b),
            (Bound::Kv(a), Bound::Kv(b)) => Arc::ptr_eq(a, b),
            _ => false,
        };
        let known = self.bound.iter().position(same);
        let at = known.unwrap_or_else(|| {
            self.bound.push(bound);
            self.bound.len() - 1
        });
        Operand(at as u32)
    }

    /// Appends an op.
    pub(crate) fn push(&mut self, kind: Kind, inputs: &[Value], outputs: &[&Arc<Cell>]) {
        let outputs = outputs.iter().map(|cell| self.value(cell)).collect();
        self.list.push(kind, inputs.to_vec(), outputs);
    }

    /// Appends an op that makes a tensor of `rows` and `cols`.
    pub(crate) fn make(
        &mut self,
        kind: Kind,
        inputs: &[Value],
        rows: usize,
        cols: usize,
    ) -> Tensor {
        let cell = Cell::f32(rows, cols);
        self.push(kind, inputs, &[&cell]);
        tensor(cell)
    }

    /// Fuses and launches the list, and begins the next one.
    pub(crate) fn launch(&mut self, device: &Device) {
        let number = self.number.wrapping_add(1) % (u32::MAX - 1);
        let next = Recorder {
            number,
            ..Recorder::default()
        };
        let done = std::mem::replace(self, next);
        if !done.list.ops.is_empty() {
            launch(device, done.list, done.cells, &done.bound);
        }
    }
}

impl Cuda {
    /// Appends what `work` says to the list.
    pub(crate) fn record<T>(&self, work: impl FnOnce(&mut Recorder) -> T) -> T {
        let mut recorder = lock(&self.recorder);
        if recorder.list.ops.len() >= LONGEST {
            recorder.launch(&self.device);
        }
        work(&mut recorder)
    }

    /// Appends an op that mixes rows, before which a long list is launched.
    pub(crate) fn record_mixing<T>(&self, work: impl FnOnce(&mut Recorder) -> T) -> T {
        let mut recorder = lock(&self.recorder);
        if recorder.list.ops.len() >= LONG {
            recorder.launch(&self.device);
        }
        work(&mut recorder)
    }

    /// Launches what was asked for so far.
    pub(crate) fn flush(&self) {
        lock(&self.recorder).launch(&self.device);
    }
}
