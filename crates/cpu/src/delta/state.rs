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

/// Allocates the memory of one layer; none where there is not so much.
///
/// # Panics
///
/// If the convolution has more than [`MAX_TAPS`] taps.
pub(crate) fn delta(spec: DeltaSpec) -> Option<Delta> {
    let shape = Shape::new(spec);
    assert!(
        spec.conv_taps <= MAX_TAPS,
        "{} taps are more than {MAX_TAPS}",
        spec.conv_taps
    );
    let rows = spec.slots.checked_mul(2 * MAX_TENTATIVE)?;
    let a_row = spec.value_heads + shape.keys() + shape.deltas();
    let states = spec.slots.checked_mul(spec.value_heads * shape.state())?;
    let history = spec.slots.checked_mul(shape.ring * shape.channels)?;
    let all = rows.checked_mul(a_row)?.checked_add(states)?;
    let all = all.checked_add(history)?.checked_mul(size_of::<f32>())?;
    // What a vector cannot get ends the program, so all of it is asked for once, and given back.
    drop(Region::sparse(all)?);
    let state = LayerState {
        slots: vec![Slot::default(); spec.slots],
        states: Region::sparse(size_of::<f32>() * states)?,
        decays: vec![0.0; rows * spec.value_heads],
        keys: vec![0.0; rows * shape.keys()],
        deltas: vec![0.0; rows * shape.deltas()],
        history: vec![0.0; history],
    };
    Some(Delta {
        spec,
        storage: Box::new(state),
    })
}

/// Copies a slot, with the updates that its last step has left to replay.
pub(crate) fn copy(delta: &mut Delta, from: usize, to: usize) {
    let shape = Shape::new(delta.spec);
    let state = delta.storage.downcast_mut::<LayerState>();
    let state = state.expect("memory of this backend");
    state.slots[to] = state.slots[from];
    let (from, to) = (state.parts(&shape, from), state.parts(&shape, to));
    let heads = state.states.elements_mut::<f32>();
    heads.copy_within(from.state, to.state.start);
    state.history.copy_within(from.history, to.history.start);
    state.decays.copy_within(from.decays, to.decays.start);
    state.keys.copy_within(from.keys, to.keys.start);
    state.deltas.copy_within(from.deltas, to.deltas.start);
}

/// The bytes of a slot: how many updates there are and where the ring starts, then state, history
/// and the updates' decays, keys and deltas.
pub(crate) fn save(delta: &Delta, slot: usize) -> Vec<u8> {
    let shape = Shape::new(delta.spec);
    let state = delta.storage.downcast_ref::<LayerState>();
    let state = state.expect("memory of this backend");
    let Slot {
        n_updates, start, ..
    } = state.slots[slot];
    let parts = state.parts(&shape, slot);
    let numbers = [n_updates, start].map(|n| (n as u32).to_le_bytes());
    let values = [
        &state.states.elements::<f32>()[parts.state],
        &state.history[parts.history],
        &state.decays[parts.decays],
        &state.keys[parts.keys],
        &state.deltas[parts.deltas],
    ];
    let values = values.into_iter().flatten();
    let values = values.map(|value| value.to_le_bytes());
    numbers.into_iter().chain(values).flatten().collect()
}

/// Makes a slot what [`save`] has saved, if `bytes` can be that.
pub(crate) fn load(delta: &mut Delta, slot: usize, bytes: &[u8]) -> bool {
    let shape = Shape::new(delta.spec);
    let state = delta.storage.downcast_mut::<LayerState>();
    let state = state.expect("memory of this backend");
    let (words, []) = bytes.as_chunks() else {
        return false;
    };
    let [n_updates, start, values @ ..] = words else {
        return false;
    };
    let [n_updates, start] = [n_updates, start].map(|&n| u32::from_le_bytes(n) as usize);
    if n_updates > MAX_TENTATIVE || start >= shape.ring {
        return false;
    }
    let loaded = Slot {
        half: 0,
        n_updates,
        start,
    };
    let before = std::mem::replace(&mut state.slots[slot], loaded);
    let parts = state.parts(&shape, slot);
    let all = [
        &mut state.states.elements_mut::<f32>()[parts.state],
        &mut state.history[parts.history],
        &mut state.decays[parts.decays],
        &mut state.keys[parts.keys],
        &mut state.deltas[parts.deltas],
    ];
    if all.iter().map(|part| part.len()).sum::<usize>() != values.len() {
        state.slots[slot] = before;
        return false;
    }
    for (to, from) in all.into_iter().flatten().zip(values) {
        *to = f32::from_le_bytes(*from);
    }
    true
}

/// Where the parts of a slot lie that somebody may still read.
struct Parts {
    state: Range<usize>,
    history: Range<usize>,
    decays: Range<usize>,
    keys: Range<usize>,
    deltas: Range<usize>,
}

impl LayerState {
    /// Where the parts of `slot` lie; of the updates, those of its last step.
    fn parts(&self, shape: &Shape, slot: usize) -> Parts {
        let Slot {
            half, n_updates, ..
        } = self.slots[slot];
        let first = (half * self.slots.len() + slot) * MAX_TENTATIVE;
        let part = |i: usize, n: usize| i * n..(i + 1) * n;
        let updates = |n: usize| first * n..(first + n_updates) * n;
        Parts {
            state: part(slot, shape.spec.value_heads * shape.state()),
            history: part(slot, shape.ring * shape.channels),
            decays: updates(shape.spec.value_heads),
            keys: updates(shape.keys()),
            deltas: updates(shape.deltas()),
        }
    }

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
