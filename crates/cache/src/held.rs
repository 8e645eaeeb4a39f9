//! Which pages of its rows a sequence still has, by kind: what other sequences could go on with.
//!
//! | group | has page `i`, rows `64 i` to `64 (i + 1)` |
//! | --- | --- |
//! | full attention | as long as the sequence has the rows |
//! | a window | while the page is in the sequence's table, or in that of a snapshot |
//! | recurrent state | if a snapshot has the state after its last row, or after another one of its rows |

use crate::{GroupPlan, Memory, Sequence};
use backend::{NO_PAGE, PAGE_ROWS};

/// Which layers a page is of: those that share what they remember of a row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PageGroup {
    /// The number of the group: 0 for full attention, then each window, then recurrent state.
    pub index: usize,
    /// What the layers remember.
    pub kind: PageKind,
}

/// What layers remember of rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum PageKind {
    /// Keys and values of all rows.
    #[default]
    Full,
    /// Keys and values of so many newest rows.
    Window(usize),
    /// A state after the last of the rows.
    State,
}

impl Memory {
    /// Pages of `sequence` in groups other than full attention, of the first `n` of its pages: the group
    /// and the number of the page, ascending in each group.
    pub fn held_pages(&self, sequence: &Sequence, n: usize) -> Vec<(PageGroup, usize)> {
        let n = n.min(sequence.len() / PAGE_ROWS);
        let held: Vec<_> = sequence
            .snapshots()
            .iter()
            .filter_map(|s| s.held())
            .collect();
        let windowed = self.plan().groups.iter().enumerate();
        let windowed = windowed.filter_map(|(g, group): (_, &GroupPlan)| Some((g, group.window?)));
        let mut all = Vec::new();
        let mut index = 0;
        for (g, window) in windowed {
            index += 1;
            let group = PageGroup {
                index,
                kind: PageKind::Window(window),
            };
            let table = sequence.tables[g].iter().enumerate();
            let own = table.filter(|(_, page)| **page != NO_PAGE).map(|(i, _)| i);
            let of_snapshots = held.iter().filter_map(|held| held.windows.get(g));
            let of_snapshots = of_snapshots.flat_map(|(first, pages)| *first..first + pages.len());
            all.extend(numbers(own.chain(of_snapshots), n).map(|i| (group, i)));
        }
        if self.has_state() {
            let group = PageGroup {
                index: index + 1,
                kind: PageKind::State,
            };
            let snapshots = sequence.snapshots().iter().filter(|s| s.has_state());
            // Whoever has the whole page has the row after which the state was saved; where the page is
            // not whole, the one before it is the nearest.
            let page = |rows: usize| match rows.saturating_sub(1) / PAGE_ROWS {
                i if i < n => Some(i),
                _ => (rows / PAGE_ROWS).checked_sub(1),
            };
            let pages = snapshots.filter_map(|s| page(s.rows()));
            all.extend(numbers(pages, n).map(|i| (group, i)));
        }
        all
    }
}

/// The numbers below `n` of `pages`, ascending, each once.
fn numbers(pages: impl Iterator<Item = usize>, n: usize) -> impl Iterator<Item = usize> {
    let mut pages: Vec<usize> = pages.filter(|&i| i < n).collect();
    pages.sort_unstable();
    pages.dedup();
    pages.into_iter()
}
