//! Which pages of the prefix cache came and went, for whoever is told: of full attention by the prefix
//! index, of windows and recurrent state by what the texts still have.

use crate::speculator::Speculator;
use crate::stream::Stream;
use backend::PAGE_ROWS;
use cache::{Entry, PageChange, PageGroup, Sequence};
use std::collections::{BTreeMap, HashSet};

/// Pages of windows and recurrent state that somebody was told of, by group and chained hash; absent
/// where nobody is told.
#[derive(Default)]
pub(crate) struct Told(Option<HashSet<(PageGroup, u64)>>);

impl Speculator {
    /// Notes from now on which pages come into the prefix cache and leave it.
    pub fn watch_pages(&mut self) {
        self.index.watch();
        if self.memory.takes_snapshots() {
            self.told.0.get_or_insert_default();
        }
    }

    /// Which pages came and went since the last call, beside streams that are `running`: those of full
    /// attention in order ([`PrefixIndex::take_changes`]), then those of each other group that went,
    /// and those that came.
    ///
    /// [`PrefixIndex::take_changes`]: cache::PrefixIndex::take_changes
    pub fn take_page_changes(&mut self, running: &[&Stream]) -> Vec<PageChange> {
        let mut changes = self.index.take_changes();
        let Some(told) = self.told.0.take() else {
            return changes;
        };
        let mut now: BTreeMap<(PageGroup, usize, u64), Entry> = BTreeMap::new();
        let kept = self.kept.texts.iter();
        let kept = kept.map(|text| (text.entry, &text.state.sequence));
        let running = running.iter().map(|s| (s.entry, &s.state.sequence));
        for (entry, sequence) in kept.chain(running) {
            self.note_held(entry, sequence, &mut now);
        }
        let held: HashSet<(PageGroup, u64)> =
            now.keys().map(|&(group, _, hash)| (group, hash)).collect();
        let mut gone: Vec<(PageGroup, u64)> = told.difference(&held).copied().collect();
        gone.sort_unstable();
        let gone = gone.into_iter();
        changes.extend(gone.map(|(group, hash)| PageChange::Removed { group, hash }));
        for ((group, i, hash), entry) in now {
            if told.contains(&(group, hash)) {
                continue;
            }
            let (_, keys) = self.index.text(entry);
            changes.push(PageChange::Added {
                group,
                hash,
                before: i
                    .checked_sub(1)
                    .map(|before| self.index.hashes(entry)[before]),
                keys: keys[i * PAGE_ROWS..(i + 1) * PAGE_ROWS].to_vec(),
            });
        }
        self.told.0 = Some(held);
        changes
    }

    /// Notes which pages the `sequence` of the text of `entry` has, by group, number and hash.
    fn note_held(
        &self,
        entry: Entry,
        sequence: &Sequence,
        now: &mut BTreeMap<(PageGroup, usize, u64), Entry>,
    ) {
        let hashes = self.index.hashes(entry);
        for (group, i) in self.memory.held_pages(sequence, hashes.len()) {
            now.entry((group, i, hashes[i])).or_insert(entry);
        }
    }
}
