//! What sequences remember of their rows, how they forget it, and how they share it.
//!
//! [`Memory`] owns the device memory of one model for all its sequences: pages of keys and
//! values by attention group, and slots of recurrent state. A [`Sequence`] is a handle on its
//! part of it: page tables, a slot, snapshots, and how many rows it holds. Dropping it gives
//! all of that back.
//!
//! | verb | what happens |
//! | --- | --- |
//! | [`Memory::push`] | gives a sequence rows in a step |
//! | [`Memory::truncate`] | rollback: forgets the newest tentative rows |
//! | [`Memory::mark`], [`Memory::rewind`] | the same after several steps of guesses |
//! | [`Memory::snapshot`] | saves what only the newest rows still have: recurrent state, and pages that leave a window |
//! | [`Memory::keep`] | ends a sequence, whose rows others may go on from |
//! | [`Memory::fork`] | begins a sequence with the first rows of another one, running or kept |
//! | [`Memory::cut`] | has a kept sequence forget its newest rows |
//! | [`Memory::outline`], [`Memory::restore`] | what a kept sequence has, to be saved elsewhere, and such a sequence again |
//!
//! Keys and values are cut by length, recurrent state by the number of tentative rows that
//! stay. Nothing is computed again for a rollback.
//!
//! # Sharing
//!
//! Pages count their owners ([`PagePool`]). A page is written by the sequence that took it, row
//! after row, and rows that anybody else has are certain: they never change until the last
//! owner gives the page back. Forks share whole pages, and copy the one that they go on in.
//!
//! [`PrefixIndex`] finds who remembers the beginning of a prompt. It compares [`RowKey`]s,
//! never hashes or token ids alone.
//!
//! Layers that share a window share page tables: they are a *group*. Pages that have left
//! every window go back to their pool when the sequence needs others.
//!
//! Deliberately absent: the tokens of a text beyond those of the step, the model, and any
//! policy of what to keep.

#![forbid(unsafe_code)]

mod held;
mod kv_plan;
mod mark;
mod memory;
mod outline;
mod pages;
mod prefix;
mod sequence;
mod snapshot;
mod start;
#[cfg(test)]
mod tests;

pub use held::{PageGroup, PageKind};
pub use kv_plan::{
    Edge, Ends, KV_PRESETS, KvLayer, KvLayers, KvPlan, KvPlanError, MANY_QUERY_HEADS, Protect,
};
pub use mark::Mark;
pub use memory::{KeptSize, Memory, MemorySize};
pub use outline::{Outline, Piece, SnapshotOutline};
pub use pages::PagePool;
pub use prefix::{Entry, Match, Namespace, PageChange, PrefixIndex, RowKey, whole_spans};
pub use sequence::Sequence;
pub use snapshot::Snapshot;

use backend::{MAX_TENTATIVE, PAGE_ROWS};

/// What a model remembers of each row.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryPlan {
    /// Attention layers by window.
    pub groups: Vec<GroupPlan>,
    /// Gated-delta layers; `slots` is filled in by [`Memory::new`].
    pub delta: Vec<backend::DeltaSpec>,
}

/// Attention layers that see the same rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupPlan {
    /// Rows see this many newest keys, themselves included; all if absent.
    pub window: Option<usize>,
    /// The layers that own keys and values.
    pub layers: Vec<KvLayer>,
}

impl MemoryPlan {
    /// Bytes of a slot of recurrent state, over all layers.
    pub(crate) fn state_bytes(&self) -> usize {
        let layer = |d: &backend::DeltaSpec| {
            let state = d.value_heads * d.key_dim * d.value_dim;
            let updates = MAX_TENTATIVE * d.value_heads * (d.key_dim + d.value_dim + 1);
            let history = (d.conv_taps - 1 + MAX_TENTATIVE) * d.channels();
            4 * (state + updates + history)
        };
        self.delta.iter().map(layer).sum()
    }
}

impl MemoryPlan {
    /// Bytes of keys and values of a token in layers that see all tokens, which each token of a context
    /// takes. Those of windows are not counted: a long context takes no more of them than a short one.
    pub fn token_bytes(&self, kv: &KvPlan) -> usize {
        let groups = self.groups.iter().filter(|group| group.window.is_none());
        let bytes: usize = groups.map(|group| group.page_bytes(kv)).sum();
        bytes / PAGE_ROWS
    }
}

impl GroupPlan {
    /// Bytes of a page, over all layers.
    pub(crate) fn page_bytes(&self, kv: &KvPlan) -> usize {
        let layers = self.layers.iter();
        let rows = layers.map(|layer| {
            let format = kv.of(layer, self.window);
            layer.heads * format.row_bytes(layer.head_dim)
        });
        PAGE_ROWS * rows.sum::<usize>()
    }
}

/// Why a sequence cannot have what it asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryFull {
    /// All slots are taken.
    #[error("all {0} sequence slots are taken")]
    Sequences(usize),
    /// Snapshots have all slots of recurrent state.
    #[error("snapshots have taken all {0} slots of recurrent state")]
    Snapshots(usize),
    /// All pages of a group are taken.
    #[error("all {0} pages of the key/value cache are taken")]
    Pages(usize),
    /// The sequence is as long as the cache allows.
    #[error("the sequence would grow past the context of {0} tokens")]
    Context(usize),
    /// A span of media rows is longer than a step can be.
    #[error(
        "a picture, video or sound of {rows} rows does not fit a step of {most}; allow longer steps"
    )]
    Span {
        /// Rows of the span.
        rows: usize,
        /// Rows of a step, at most.
        most: usize,
    },
}
