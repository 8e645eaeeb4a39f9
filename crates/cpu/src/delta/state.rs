//! The memory of a gated-delta layer: recurrent states, kept updates, and rows before the
//! convolution, for each slot.

use crate::memory::Region;
use backend::{BatchSeq, Delta, DeltaSpec, MAX_TENTATIVE};
use std::ops::Range;

/// Columns of a state that are worked on together: with 128 key columns they
/// take 16 KiB, and their copy as much, so that two threads of a core can share
/// a first-level cache of 48 KiB or one have 32 KiB.
pub(super) const COLUMNS: usize = 32;

/// The most taps of the convolution.
pub(super) const MAX_TAPS: usize = 16;

/// One layer's memory, all slots.
pub(super) struct LayerState {
    pub(super) slots: Vec<Slot>,
    /// `[slots, nv, dk, padded dv]`, each head cut in blocks of columns: see [`Shape`].
    pub(super) states: Region,
    /// The updates of tentative rows, `[2, slots, MAX_TENTATIVE]` of decays, keys and `d`: one half
    /// is replayed while the other is written.
    pub(super) decays: Vec<f32>,
    pub(super) keys: Vec<f32>,
    pub(super) deltas: Vec<f32>,
    /// Rows before the convolution, a ring for each slot:
    /// `[slots, taps - 1 + MAX_TENTATIVE, C]`.
    pub(super) history: Vec<f32>,
}

/// Where a slot's updates and history are.
#[derive(Clone, Copy, Default)]
pub(super) struct Slot {
    /// Which half of the updates was written last.
    pub(super) half: usize,
    /// How many updates that was.
    pub(super) n_updates: usize,
    /// The ring's oldest row: `taps - 1` rows from here end where the state does.
    pub(super) start: usize,
}

/// The sizes of a layer.
#[derive(Clone, Copy)]
pub(super) struct Shape {
    pub(super) spec: DeltaSpec,
    pub(super) channels: usize,
    /// Columns of a state with padding.
    pub(super) width: usize,
    /// Rows of the history ring.
    pub(super) ring: usize,
}

impl Shape {
    pub(super) fn new(spec: DeltaSpec) -> Self {
        Shape {
            spec,
            channels: spec.channels(),
            width: spec.value_dim.next_multiple_of(16),
            ring: spec.conv_taps - 1 + MAX_TENTATIVE,
        }
    }

    /// Values of one head's state.
    pub(super) fn state(&self) -> usize {
        self.spec.key_dim * self.width
    }

    /// Blocks of columns of a head.
    pub(super) fn blocks(&self) -> usize {
        self.width.div_ceil(COLUMNS)
    }

    /// Columns of block `block`, padding included.
    pub(super) fn columns(&self, block: usize) -> Range<usize> {
        block * COLUMNS..((block + 1) * COLUMNS).min(self.width)
    }

    /// Values of all update keys of one row.
    pub(super) fn keys(&self) -> usize {
        self.spec.key_heads * self.spec.key_dim
    }

    /// Values of all `d` of one row.
    pub(super) fn deltas(&self) -> usize {
        self.spec.value_heads * self.width
    }
}

/// Allocates the memory of one layer.
///
/// # Panics
///
/// If the convolution has more than [`MAX_TAPS`] taps.
pub(crate) fn delta(spec: DeltaSpec) -> Delta {
    let shape = Shape::new(spec);
    assert!(
        spec.conv_taps <= MAX_TAPS,
        "{} taps are more than {MAX_TAPS}",
        spec.conv_taps
    );
    let rows = 2 * spec.slots * MAX_TENTATIVE;
    let state = LayerState {
        slots: vec![Slot::default(); spec.slots],
        states: Region::sparse(4 * spec.slots * spec.value_heads * shape.state()),
        decays: vec![0.0; rows * spec.value_heads],
        keys: vec![0.0; rows * shape.keys()],
        deltas: vec![0.0; rows * shape.deltas()],
        history: vec![0.0; spec.slots * shape.ring * shape.channels],
    };
    Delta {
        spec,
        storage: Box::new(state),
    }
}

/// Copies a slot whose newest rows are all certain: there is nothing to replay.
pub(crate) fn copy(delta: &mut Delta, from: usize, to: usize) {
    let shape = Shape::new(delta.spec);
    let state = delta.storage.downcast_mut::<LayerState>();
    let state = state.expect("memory of this backend");
    debug_assert_eq!(state.slots[from].n_updates, 0, "all rows are certain");
    state.slots[to] = state.slots[from];
    let part = |n: usize| (from * n..(from + 1) * n, to * n);
    let (heads, at) = part(shape.spec.value_heads * shape.state());
    state.states.elements_mut::<f32>().copy_within(heads, at);
    let (history, at) = part(shape.ring * shape.channels);
    state.history.copy_within(history, at);
}

impl LayerState {
    /// Row `u` of those before the convolution that a slot keeps, `u` counted from the first
    /// that the step's first row needs.
    pub(super) fn history_row(&self, shape: &Shape, seq: &BatchSeq, u: usize) -> &[f32] {
        let start = self.slots[seq.slot].start + seq.kept;
        let at = seq.slot * shape.ring + (start + u) % shape.ring;
        &self.history[at * shape.channels..][..shape.channels]
    }

    /// Moves a slot's ring past the certain rows and adds the step's rows `qkv`, before the
    /// convolution.
    pub(super) fn remember(&mut self, shape: &Shape, seq: &BatchSeq, qkv: &[f32]) {
        let (past, ring, channels) = (shape.spec.conv_taps - 1, shape.ring, shape.channels);
        let slot = &mut self.slots[seq.slot];
        let history = &mut self.history[seq.slot * ring * channels..][..ring * channels];
        if seq.is_new {
            history[..past * channels].fill(0.0);
            slot.start = 0;
        } else {
            slot.start += seq.kept;
        }
        slot.start = (slot.start + seq.certain) % ring;
        // Rows `certain ..` of those before the step and the step's own.
        for u in seq.certain.max(past)..past + seq.rows.len() {
            let to = (slot.start + u - seq.certain) % ring;
            let from = (seq.rows.start + u - past) * channels;
            history[to * channels..][..channels].copy_from_slice(&qkv[from..][..channels]);
        }
        slot.half = 1 - slot.half;
        slot.n_updates = seq.rows.len() - seq.certain;
    }
}
