//! What sequences remember of their rows, how they forget it, and how they share it.
//!
//! [`Memory`] owns the device memory of one model for all its sequences: pages of keys and
//! values by attention group, slots of recurrent state, and snapshots of such state. A
//! [`Sequence`] is a handle on its part of it: page tables, a slot, snapshots, and how many
//! rows it holds. Dropping it gives all of that back.
//!
//! | verb | what happens |
//! | --- | --- |
//! | [`Memory::push`] | gives a sequence rows in a step |
//! | [`Memory::truncate`] | rollback: forgets the newest tentative rows |
//! | [`Memory::snapshot`] | saves recurrent state, so that a sequence can go back to it |
//! | [`Memory::restore`] | goes back to any row that [`Memory::restorable`] allows |
//! | [`Memory::fork`] | begins another sequence with the same first rows |
//!
//! Keys and values are cut by length, recurrent state by the number of tentative rows that
//! stay. Nothing is computed again for a rollback.
//!
//! # Sharing
//!
//! Pages and snapshots count their owners ([`PagePool`]). Sequences share whole pages only,
//! and only pages whose rows are certain: whoever owns a page alone may write to it, and a
//! page with two owners is never written again. A partly filled page stays with the one
//! who fills it; the other sequence computes those rows, 63 at most, in a page of its own.
//! Copying it would give the same bits, since a row's result does not depend on the step it
//! is computed in, but it would take an op of every device to save less than one chunk of a
//! prompt.
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

mod memory;
mod pages;
mod prefix;
mod sequence;
#[cfg(test)]
mod tests;

pub use memory::{Memory, MemorySize, SNAPSHOTS_A_SEQUENCE};
pub use pages::PagePool;
pub use prefix::{Entry, Match, PrefixIndex, RowKey, whole_spans};
pub use sequence::Sequence;

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
    /// Key/value heads and head size of each layer that owns keys and values.
    pub layers: Vec<(usize, usize)>,
}

/// Why a sequence cannot have what it asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryFull {
    /// All slots are taken.
    #[error("all {0} sequence slots are taken")]
    Sequences(usize),
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
