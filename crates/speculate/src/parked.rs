//! What ended streams have left, and the name of one such place.

use crate::stream::StreamState;
use cache::Entry;

/// Names what an ended stream has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parked(pub(crate) Entry);

/// What ended streams have left.
#[derive(Default)]
pub(crate) struct Ended {
    /// Each ended stream's place in the index and what it remembers; the longest ended first.
    pub(crate) texts: Vec<(Entry, StreamState)>,
    /// Pages that only ended streams own, counted when one of them came or went.
    pub(crate) n_pages: usize,
}
