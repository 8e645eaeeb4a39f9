//! What a sequence remembers.
//!
//! [`Memory`] owns the device memory of one model for all its sequences: pages
//! of keys and values by attention group, slots of recurrent state. A
//! [`Sequence`] is a handle on its part: page tables, a slot, and how many rows
//! it holds. [`Memory::push`] gives a sequence rows in a step;
//! [`Memory::truncate`] makes it forget the newest of them. That is all of
//! rollback: keys and values are cut by length, recurrent state by the number of
//! tentative rows that stay. Nothing is computed again.
//!
//! [`Memory::rewind`] goes further back, so that another text can go on from there: as far
//! as windows still have their pages, and with recurrent state to where
//! [`Memory::checkpoint`] kept it aside.
//!
//! Layers that share a window share page tables: they are a *group*. Pages that
//! have left every window go back to their pool when the sequence needs others.
//!
//! No tokens beyond those of the step, no model, no policy.

#![forbid(unsafe_code)]

mod memory;
mod pages;

pub use memory::{Memory, MemorySize, Sequence};
pub use pages::PagePool;

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
}
