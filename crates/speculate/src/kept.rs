//! What ended streams have left, and which of it makes room for what runs.
//!
//! Texts and snapshots are worth what it costs to compute them again, for each byte that they
//! take, and lose that worth as others are used (Greedy-Dual-Size, Cao and Irani 1997):
//!
//! ```text
//! worth = clock at the last use + cost / size        evicted: the least worth
//! clock = worth of what was evicted last
//! ```
//!
//! Among texts of equal cost and size, that is the least recently used one. Nothing that a running
//! stream uses ever goes: it owns its pages itself.

use crate::stream::StreamState;
use cache::{Entry, KeptSize, Memory, MemoryFull, MemorySize, Snapshot};
use std::collections::HashMap;
use std::sync::Arc;

/// Names what an ended stream has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parked(pub(crate) Entry);

/// Rows that a text loses at a time, from its end, where pages are wanted.
const CUT_ROWS: usize = 512;

/// Fewest rows that are worth keeping.
const LEAST_ROWS: usize = 16;

/// Ended texts at the most: each look-up compares the first page of all of them.
const TEXTS_MAX: usize = 512;

/// Rows whose attention costs as much as everything else in a layer, roughly: the later a row, the
/// more it costs to compute.
const ATTENTION_ROWS: f64 = 8192.0;

/// What has been evicted so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Evictions {
    /// Texts, whole or in part.
    pub texts: u64,
    /// Snapshots of texts that stayed.
    pub snapshots: u64,
}

/// One ended text.
pub(crate) struct KeptText {
    pub(crate) entry: Entry,
    pub(crate) state: StreamState,
    /// Whether it need not be [saved](crate::Speculator::save) any more.
    pub(crate) is_saved: bool,
    /// The clocks of texts and of snapshots when it was last used.
    used: [f64; 2],
}

/// What ended streams have left.
pub(crate) struct Kept {
    /// The longest ended first.
    pub(crate) texts: Vec<KeptText>,
    /// Pages that only ended streams own, counted when one of them came or went.
    pub(crate) n_pages: usize,
    /// Bytes of those pages and of snapshots.
    pub(crate) n_bytes: usize,
    pub(crate) evictions: Evictions,
    /// Clocks of texts and of snapshots.
    clocks: [f64; 2],
    /// Rows whose pages take as many bytes as a snapshot of recurrent state.
    snapshot_rows: f64,
}

impl Kept {
    pub(crate) fn new(memory: &Memory) -> Self {
        let size = MemorySize {
            sequences: 1,
            ..*memory.size()
        };
        let bytes = |pages, snapshots| {
            let kept = KeptSize { pages, snapshots };
            Memory::bytes(memory.plan(), &MemorySize { kept, ..size })
        };
        let none = bytes(0, 0);
        let row = ((bytes(1, 0) - none) / backend::PAGE_ROWS).max(1);
        Kept {
            texts: Vec::new(),
            n_pages: 0,
            n_bytes: 0,
            evictions: Evictions::default(),
            clocks: [0.0; 2],
            snapshot_rows: if memory.has_state() {
                (bytes(0, 1) - none) as f64 / row as f64
            } else {
                0.0
            },
        }
    }

    /// Which text is that of `entry`.
    pub(crate) fn position(&self, entry: Entry) -> Option<usize> {
        self.texts.iter().position(|text| text.entry == entry)
    }

    /// Adds a text as just used.
    pub(crate) fn push(&mut self, entry: Entry, state: StreamState, is_saved: bool) {
        self.texts.push(KeptText {
            entry,
            state,
            is_saved,
            used: self.clocks,
        });
    }

    /// Notes that text `i` was used.
    pub(crate) fn touch(&mut self, i: usize) {
        self.texts[i].used = self.clocks;
    }

    /// The text that should go before any other one, once there are too many.
    pub(crate) fn surplus(&self) -> Option<Entry> {
        let too_many = self.texts.len() > TEXTS_MAX;
        let least = self.by_worth().into_iter().next();
        least.filter(|_| too_many).map(|i| self.texts[i].entry)
    }

    /// What text `i` is worth.
    fn worth(&self, i: usize) -> f64 {
        let text = &self.texts[i];
        let rows = text.state.sequence.len() as f64;
        let snapshots = text.state.sequence.snapshots().iter();
        let snapshots = snapshots.filter(|s| s.has_state()).count() as f64;
        let size = rows + snapshots * self.snapshot_rows + 1.0;
        text.used[0] + rows * (1.0 + rows / (2.0 * ATTENTION_ROWS)) / size
    }

    /// Numbers of all texts, those of least worth first, and the oldest first among equals.
    pub(crate) fn by_worth(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.texts.len()).collect();
        order.sort_by(|&a, &b| self.worth(a).total_cmp(&self.worth(b)));
        order
    }

    /// What should make room where `full` says that there is none: never text `spared`, nor
    /// what freeing would bring nothing for.
    pub(crate) fn victim(
        &self,
        memory: &Memory,
        full: MemoryFull,
        spared: Option<Entry>,
    ) -> Option<Victim> {
        match full {
            MemoryFull::Pages(_) => self.victim_for_pages(memory, spared),
            MemoryFull::Snapshots(_) => self.victim_for_slots(spared),
            _ => None,
        }
    }

    fn victim_for_pages(&self, memory: &Memory, spared: Option<Entry>) -> Option<Victim> {
        let order = self.by_worth().into_iter();
        let others = order.filter(|&i| Some(self.texts[i].entry) != spared);
        let others: Vec<usize> = others.collect();
        let sequence = |i: usize| &self.texts[i].state.sequence;
        let frees = |i: &&usize| memory.pages_only_of([sequence(**i)].into_iter()) > 0;
        if let Some(&i) = others.iter().find(frees) {
            let rows = sequence(i).len().saturating_sub(CUT_ROWS);
            let rows = memory.forkable(sequence(i), rows);
            return Some(Victim::Text(i, if rows < LEAST_ROWS { 0 } else { rows }));
        }
        // Pages that several of them share, and nobody else.
        let all = others.iter().map(|&i| sequence(i));
        let any = memory.pages_only_of(all) > 0;
        others.first().filter(|_| any).map(|&i| Victim::Text(i, 0))
    }

    fn victim_for_slots(&self, spared: Option<Entry>) -> Option<Victim> {
        let mut worth: HashMap<*const Snapshot, (f64, &Arc<Snapshot>)> = HashMap::new();
        let mut spared_ones = Vec::new();
        for text in &self.texts {
            let mut before = 0;
            for snapshot in text.state.sequence.snapshots() {
                if !snapshot.has_state() {
                    continue;
                }
                if Some(text.entry) == spared {
                    spared_ones.push(Arc::as_ptr(snapshot));
                }
                let saves = (snapshot.rows() - before) as f64;
                before = snapshot.rows();
                let own = text.used[1] + saves / self.snapshot_rows.max(1.0);
                let most = worth
                    .entry(Arc::as_ptr(snapshot))
                    .or_insert((own, snapshot));
                most.0 = most.0.max(own);
            }
        }
        worth.retain(|snapshot, _| !spared_ones.contains(snapshot));
        let least = worth.into_values();
        // Of equal worth, that of fewest rows: which one must not depend on addresses.
        let least = least.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.rows().cmp(&b.1.rows())));
        least.map(|(worth, snapshot)| Victim::Snapshot(snapshot.clone(), worth))
    }

    /// Notes that `victim` goes.
    pub(crate) fn note(&mut self, victim: &Victim) {
        match victim {
            Victim::Text(i, _) => {
                self.clocks[0] = self.clocks[0].max(self.worth(*i));
                self.evictions.texts += 1;
            }
            Victim::Snapshot(_, worth) => {
                self.clocks[1] = self.clocks[1].max(*worth);
                self.evictions.snapshots += 1;
            }
        }
    }
}

/// What makes room.
pub(crate) enum Victim {
    /// The rows of this text from so many on.
    Text(usize, usize),
    /// A snapshot, and what it is worth.
    Snapshot(Arc<Snapshot>, f64),
}
