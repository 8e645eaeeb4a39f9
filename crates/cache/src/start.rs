//! Where a sequence that remembers the first rows of another one can begin.

use crate::MemoryPlan;
use backend::{NO_PAGE, PAGE_ROWS};

/// After how many rows a sequence can go on from a snapshot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Start {
    /// Rows that the saved state has seen for good.
    pub(crate) base: usize,
    /// Rows that the saved state can be brought to.
    pub(crate) len: usize,
    /// Whether the snapshot has the pages of windows that a row after the first `base` rows sees.
    pub(crate) has_windows: bool,
}

impl MemoryPlan {
    /// The most rows, `len` at most, with which a sequence can begin that has whole pages from
    /// `tables` and goes on from one of the snapshots at `starts`, the newest first.
    pub(crate) fn deepest(
        &self,
        tables: &[Vec<u32>],
        starts: impl Iterator<Item = Start>,
        len: usize,
    ) -> usize {
        if self.delta.is_empty() && self.windows_hold(tables, len) {
            return len;
        }
        let mut depths = starts.flat_map(|s| [(s, s.len.min(len)), (s, s.base)]);
        let usable = depths.find(|&(start, rows)| rows <= len && self.allows(tables, start, rows));
        usable.map_or(0, |(_, rows)| rows)
    }

    /// Whether a sequence with pages from `tables` can begin with `rows` rows at the snapshot of
    /// `start`.
    pub(crate) fn allows(&self, tables: &[Vec<u32>], start: Start, rows: usize) -> bool {
        let is_near = (start.base..=start.len).contains(&rows);
        let own = rows == start.base && start.has_windows;
        is_near && (own || self.windows_hold(tables, rows))
    }

    /// Whether all that a row after the first `len` rows would see is in `tables`.
    pub(crate) fn windows_hold(&self, tables: &[Vec<u32>], len: usize) -> bool {
        let mut tables = tables.iter().zip(&self.groups);
        tables.all(|(table, group)| {
            let first = first_seen(group.window.unwrap_or(usize::MAX), len);
            table.get(first).is_none_or(|&page| page != NO_PAGE)
        })
    }
}

/// Which page is the first that a row after the first `rows` rows sees through a window of `window`
/// rows.
pub(crate) fn first_seen(window: usize, rows: usize) -> usize {
    (rows + 1).saturating_sub(window) / PAGE_ROWS
}
