//! How the work of attention is cut into tasks.

use std::ops::Range;

/// A block of queries against some splits of their args.
#[derive(Clone, Debug)]
pub(super) struct Task {
    pub(super) seq: usize,
    pub(super) kv_head: usize,
    pub(super) rows: Range<usize>,
    pub(super) splits: Range<usize>,
    /// Where partial results go, if the splits of these rows run apart.
    pub(super) apart: Option<PartialSlots>,
}

/// Query `i`'s partial result of split `s` has number `start + i * splits + s`,
/// `s` counted from the block's first.
#[derive(Clone, Copy, Debug)]
pub(super) struct PartialSlots {
    pub(super) start: usize,
    pub(super) splits: usize,
}

/// What is remembered between calls, so that none allocates.
#[derive(Default)]
pub(crate) struct Plan {
    pub(super) blocks: Vec<Task>,
    pub(super) tasks: Vec<Task>,
    pub(super) stats: Vec<OnlineSoftmax>,
}

#[derive(Clone, Copy)]
pub(super) struct OnlineSoftmax {
    pub(super) max: f32,
    pub(super) sum: f32,
    pub(super) correction: f32,
    pub(super) total_max: f32,
    /// Negative until there is a total.
    pub(super) total_sum: f32,
    /// Keys of the current tile.
    pub(super) first: usize,
    pub(super) last: usize,
}

pub(super) const FRESH: OnlineSoftmax = OnlineSoftmax {
    max: 0.0,
    sum: 0.0,
    correction: 0.0,
    total_max: 0.0,
    total_sum: -1.0,
    first: 0,
    last: 0,
};

impl OnlineSoftmax {
    /// Whether none of the split's keys was visible: any score would have left
    /// a maximum, a sum, or NaN.
    pub(super) fn saw_nothing(&self) -> bool {
        self.max == f32::NEG_INFINITY && self.sum == 0.0
    }
}
