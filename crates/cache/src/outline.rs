//! Outlines: what a kept sequence has, without its bytes, so that these can be saved piece by piece
//! and a memory of the same plan can have the sequence again.
//!
//! ```text
//! outline(sequence)      →  outline and pieces    save_piece each: bytes
//! restore(outline, rows) →  a sequence and where each piece goes    load_piece each: from bytes
//! ```
//!
//! Pieces are numbered: the pages of each group, group after group, then for each snapshot with
//! recurrent state its layers.
//!
//! Deliberately absent: files. An outline may come from anywhere, so a memory says whether it can be
//! of one of its sequences ([`Memory::fits`]) before anything is taken for it.

use crate::memory::{Memory, Pools};
use crate::snapshot::Held;
use crate::start::{Start, first_seen};
use crate::{GroupPlan, MemoryFull, Sequence, Snapshot};
use backend::{Backend, Kv, NO_PAGE, PAGE_ROWS};
use std::collections::{HashMap, HashSet};

/// What a kept sequence has, its pages numbered from 0 in each group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outline {
    /// Rows remembered.
    pub rows: usize,
    /// Different pages, by group.
    pub n_pages: Vec<usize>,
    /// By group: the number of the page of rows `i * PAGE_ROWS ..`, or [`NO_PAGE`] once it has left
    /// the window.
    pub tables: Vec<Vec<u32>>,
    /// What is saved on the way, ascending by rows.
    pub snapshots: Vec<SnapshotOutline>,
}

/// What a snapshot of an [`Outline`] has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotOutline {
    /// Rows that the saved state has seen for good.
    pub base: usize,
    /// Rows that the saved state can be brought to.
    pub len: usize,
    /// Whether it has recurrent state.
    pub has_state: bool,
    /// By group: numbers of the pages of its window, from the page of this place on; empty where the
    /// sequence's own tables have them.
    pub windows: Vec<(usize, Vec<u32>)>,
}

/// A part of the bytes of a sequence, by where it lies in its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A page of all layers of a group.
    Page {
        /// The group.
        group: usize,
        /// The page.
        page: u32,
    },
    /// A recurrent state of one layer.
    State {
        /// The gated-delta layer.
        layer: usize,
        /// The slot.
        slot: u32,
    },
}

impl Outline {
    /// Pieces in which the bytes come in a memory of `n_states` gated-delta layers.
    fn n_pieces(&self, n_states: usize) -> usize {
        let states = self.snapshots.iter().filter(|s| s.has_state).count();
        self.n_pages.iter().sum::<usize>() + states * n_states
    }

    /// Where sequences can begin besides, the newest first.
    fn starts(&self) -> impl Iterator<Item = Start> {
        self.snapshots.iter().rev().map(SnapshotOutline::start)
    }

    /// After how many rows a sequence is likely to go on from here: where snapshots are, and the end.
    pub fn depths(&self) -> impl Iterator<Item = usize> {
        let snapshots = self.snapshots.iter().flat_map(|s| [s.base, s.len]);
        snapshots.chain([self.rows])
    }
}

impl SnapshotOutline {
    fn start(&self) -> Start {
        Start {
            base: self.base,
            len: self.len,
            has_windows: !self.windows.is_empty(),
        }
    }
}

/// Numbers of the pages of a group that are to be restored.
struct Wanted<'a> {
    /// For the sequence's table.
    table: Vec<u32>,
    /// For the snapshot.
    windows: &'a [u32],
}

impl Wanted<'_> {
    /// All of them, as often as they are wanted.
    fn numbers(&self) -> impl Iterator<Item = u32> {
        let all = self.table.iter().chain(self.windows).copied();
        all.filter(|&page| page != NO_PAGE)
    }
}

/// Numbers from 0 for pages, in the order in which they are first asked for.
#[derive(Default)]
struct Numbers {
    pages: Vec<u32>,
    known: HashMap<u32, u32>,
}

impl Numbers {
    /// The number of `page`, which is counted from now on; [`NO_PAGE`] stays what it is.
    fn of(&mut self, page: u32) -> u32 {
        if page == NO_PAGE {
            return NO_PAGE;
        }
        *self.known.entry(page).or_insert_with(|| {
            self.pages.push(page);
            self.pages.len() as u32 - 1
        })
    }
}

impl Memory {
    /// What `sequence` has, and where the bytes of its pieces lie.
    ///
    /// # Panics
    ///
    /// If the sequence is not [kept](Memory::keep).
    pub fn outline(&self, sequence: &Sequence) -> (Outline, Vec<Piece>) {
        assert!(sequence.slot.is_none(), "a kept sequence");
        let n_groups = self.plan().groups.len();
        let mut numbers: Vec<Numbers> = (0..n_groups).map(|_| Numbers::default()).collect();
        let mut number = |group: usize, pages: &[u32]| -> Vec<u32> {
            pages.iter().map(|&page| numbers[group].of(page)).collect()
        };
        let tables = sequence.tables.iter().enumerate();
        let tables = tables.map(|(group, table)| number(group, table)).collect();
        let (mut snapshots, mut slots) = (Vec::new(), Vec::new());
        for snapshot in &sequence.snapshots {
            let Some(held) = snapshot.held() else {
                continue;
            };
            let windows = held.windows.iter().enumerate();
            let windows = windows.map(|(group, (first, pages))| (*first, number(group, pages)));
            snapshots.push(SnapshotOutline {
                base: snapshot.base,
                len: snapshot.len,
                has_state: held.slot.is_some(),
                windows: windows.collect(),
            });
            slots.extend(held.slot);
        }
        let pages = numbers.iter().enumerate().flat_map(|(group, numbers)| {
            let pages = numbers.pages.iter();
            pages.map(move |&page| Piece::Page { group, page })
        });
        let layers = 0..self.delta.len();
        let states = slots.iter().flat_map(|&slot| {
            layers
                .clone()
                .map(move |layer| Piece::State { layer, slot })
        });
        let pieces = pages.chain(states).collect();
        let outline = Outline {
            rows: sequence.len,
            n_pages: numbers.iter().map(|numbers| numbers.pages.len()).collect(),
            tables,
            snapshots,
        };
        (outline, pieces)
    }

    /// Whether `sequence` still has all of `outline`, which was made of it: nothing has been cut or
    /// freed since.
    pub fn has_all_of(&self, sequence: &Sequence, outline: &Outline) -> bool {
        let snapshots = sequence.snapshots.iter();
        sequence.len == outline.rows
            && snapshots.filter(|s| !s.is_freed()).count() == outline.snapshots.len()
    }

    /// The bytes of `piece` of a kept sequence. Waits for the device.
    pub fn save_piece(&self, backend: &dyn Backend, piece: Piece) -> Vec<u8> {
        match piece {
            Piece::Page { group, page } => {
                let layers = self.kv[group].iter();
                let layers = layers.flat_map(|kv| {
                    let bytes = backend.kv_save(kv, page as usize);
                    [(bytes.len() as u32).to_le_bytes().to_vec(), bytes]
                });
                layers.collect::<Vec<_>>().concat()
            }
            Piece::State { layer, slot } => backend.delta_save(&self.delta[layer], slot as usize),
        }
    }

    /// Makes `piece` of a sequence that is being [restored](Memory::restore) what
    /// [`Memory::save_piece`] has saved in a memory of the same plan on the same kind of device.
    /// Returns false if `bytes` cannot be that; the sequence is worth nothing then.
    pub fn load_piece(&mut self, backend: &dyn Backend, piece: Piece, bytes: &[u8]) -> bool {
        match piece {
            Piece::Page { group, page } => {
                let mut rest = bytes;
                let mut load = |kv: &mut Kv| {
                    let (n, bytes) = rest.split_first_chunk()?;
                    let n = u32::from_le_bytes(*n) as usize;
                    let (own, others) = bytes.split_at_checked(n)?;
                    rest = others;
                    backend.kv_load(kv, page as usize, own).then_some(())
                };
                let all = self.kv[group].iter_mut().all(|kv| load(kv).is_some());
                all && rest.is_empty()
            }
            Piece::State { layer, slot } => {
                backend.delta_load(&mut self.delta[layer], slot as usize, bytes)
            }
        }
    }

    /// Whether a sequence of this memory can have `outline`, and its bytes come in `n_pieces` pieces.
    pub fn fits(&self, outline: &Outline, n_pieces: usize) -> bool {
        let Outline {
            rows,
            n_pages,
            tables,
            snapshots,
        } = outline;
        let groups = &self.plan().groups;
        let is_of_groups = n_pages.len() == groups.len() && tables.len() == groups.len();
        if !is_of_groups || *rows > self.size().context {
            return false;
        }
        let pools = Pools::lock(&self.pools);
        let mut sizes = pools.pages.iter().zip(n_pages);
        if !sizes.all(|(pool, &n)| n <= pool.n_pages()) {
            return false;
        }
        let mut tables = tables.iter().zip(groups).zip(n_pages);
        let tables_fit = tables.all(|((table, group), &n)| {
            let gone = table.iter().take_while(|&&page| page == NO_PAGE).count();
            table.len() == rows.div_ceil(PAGE_ROWS)
                && (gone == 0 || group.window.is_some())
                && table[gone..].iter().all(|&page| (page as usize) < n)
        });
        let ascend = snapshots.is_sorted_by(|a, b| a.base < b.base);
        tables_fit
            && ascend
            && snapshots.iter().all(|s| self.snapshot_fits(s, outline))
            && outline.n_pieces(self.delta.len()) == n_pieces
    }

    /// Whether `snapshot` can be one of `outline`, whose tables fit.
    fn snapshot_fits(&self, snapshot: &SnapshotOutline, outline: &Outline) -> bool {
        let SnapshotOutline {
            base, len, windows, ..
        } = snapshot;
        let groups = self.plan().groups.iter().zip(&outline.n_pages);
        let mut windows_fit = windows.iter().zip(groups).map(|(seen, (group, &n))| {
            let (first, pages) = seen;
            let Some(window) = group.window else {
                return (*first, pages.len()) == (0, 0);
            };
            *first == first_seen(window, *base)
                && first + pages.len() == base.div_ceil(PAGE_ROWS)
                && pages.iter().all(|&page| (page as usize) < n)
        });
        let is_whole = windows.is_empty() || windows.len() == self.plan().groups.len();
        let rows = *base > 0 && base <= len && *len <= outline.rows;
        rows && snapshot.has_state == self.has_state() && is_whole && windows_fit.all(|fits| fits)
    }

    /// The most rows, `rows` at most, with which a sequence can begin once `outline`, which
    /// [fits](Memory::fits), is restored that far.
    pub fn restorable(&self, outline: &Outline, rows: usize) -> usize {
        let rows = rows.min(outline.rows);
        self.plan().deepest(&outline.tables, outline.starts(), rows)
    }

    /// A kept sequence of the first `rows` rows of `outline`, which [fits](Memory::fits), from which
    /// forks can begin after all of them; and where each piece goes, or none for one that so many
    /// rows do not need. Nobody may use the sequence before all of these are
    /// [loaded](Memory::load_piece).
    ///
    /// # Errors
    ///
    /// [`MemoryFull::Pages`] or [`MemoryFull::Snapshots`], and then nothing has changed.
    ///
    /// # Panics
    ///
    /// If so many rows are not [restorable](Memory::restorable).
    pub fn restore(
        &mut self,
        outline: &Outline,
        rows: usize,
    ) -> Result<(Sequence, Vec<Option<Piece>>), MemoryFull> {
        assert_eq!(
            self.restorable(outline, rows),
            rows,
            "so many rows of an outline of {}",
            outline.rows
        );
        let start = self.start_of(outline, rows);
        let wanted = self.wanted(outline, rows, start.map(|(_, snapshot)| snapshot));
        let mut places: Vec<Vec<Option<u32>>> =
            outline.n_pages.iter().map(|&n| vec![None; n]).collect();
        let slot = self.take_wanted(&wanted, &mut places, start.is_some())?;
        let mut sequence = Sequence {
            pools: self.pools.clone(),
            len: rows,
            base: rows,
            slot: None,
            tables: Vec::new(),
            snapshots: Vec::new(),
        };
        let place = |g: usize, pages: &[u32]| -> Vec<u32> {
            let place = |&page: &u32| match page {
                NO_PAGE => NO_PAGE,
                page => places[g][page as usize].expect("taken"),
            };
            pages.iter().map(place).collect()
        };
        let of_groups = wanted.iter().enumerate();
        sequence.tables = of_groups.map(|(g, w)| place(g, &w.table)).collect();
        if let Some((_, of)) = start {
            let mut windows = Vec::new();
            if !self.plan().windows_hold(&outline.tables, rows) {
                let of_groups = of.windows.iter().zip(&wanted).enumerate();
                windows.extend(of_groups.map(|(g, ((first, _), w))| (*first, place(g, w.windows))));
            }
            let held = Held { slot, windows };
            let snapshot = Snapshot::new(&sequence, (of.base, of.len), held);
            sequence.snapshots.push(snapshot);
        }
        let pages = places.iter().enumerate().flat_map(|(group, places)| {
            let places = places.iter();
            places.map(move |page| page.map(|page| Piece::Page { group, page }))
        });
        let with_state = outline.snapshots.iter().enumerate();
        let with_state = with_state.filter(|(_, s)| s.has_state);
        let states = with_state.flat_map(|(i, _)| {
            let slot = slot.filter(|_| start.is_some_and(|(used, _)| used == i));
            let layers = 0..self.delta.len();
            layers.map(move |layer| slot.map(|slot| Piece::State { layer, slot }))
        });
        let pieces = pages.chain(states).collect();
        Ok((sequence, pieces))
    }

    /// The snapshot of `outline`, and which one, that a sequence of its first `rows` rows goes on
    /// from, if it needs one.
    fn start_of<'a>(
        &self,
        outline: &'a Outline,
        rows: usize,
    ) -> Option<(usize, &'a SnapshotOutline)> {
        let (plan, tables) = (self.plan(), &outline.tables);
        if rows == 0 || !self.has_state() && plan.windows_hold(tables, rows) {
            return None;
        }
        let mut newest_first = outline.snapshots.iter().enumerate().rev();
        newest_first.find(|(_, s)| plan.allows(tables, s.start(), rows))
    }

    /// The pages of `outline` that its first `rows` rows need to go on from snapshot `start`, by group.
    fn wanted<'a>(
        &self,
        outline: &'a Outline,
        rows: usize,
        start: Option<&'a SnapshotOutline>,
    ) -> Vec<Wanted<'a>> {
        let in_tables = self.plan().windows_hold(&outline.tables, rows);
        let of = |(g, group): (usize, &GroupPlan)| {
            // Pages that have left the window are none of a later row's.
            let first = group.window.map_or(0, |window| match in_tables {
                true => first_seen(window, rows),
                false => usize::MAX,
            });
            let table = outline.tables[g].iter().take(rows.div_ceil(PAGE_ROWS));
            let keep = |(i, &page): (usize, &u32)| if i < first { NO_PAGE } else { page };
            let windows = start.filter(|_| !in_tables).map(|s| &s.windows[g].1[..]);
            Wanted {
                table: table.enumerate().map(keep).collect(),
                windows: windows.unwrap_or_default(),
            }
        };
        self.plan().groups.iter().enumerate().map(of).collect()
    }

    /// Takes a page for each different number in `wanted`, by group, with as many owners as it is
    /// there, and a slot if there is a snapshot and recurrent state.
    fn take_wanted(
        &self,
        wanted: &[Wanted<'_>],
        places: &mut [Vec<Option<u32>>],
        has_snapshot: bool,
    ) -> Result<Option<u32>, MemoryFull> {
        let mut pools = Pools::lock(&self.pools);
        for (wanted, pool) in wanted.iter().zip(&pools.pages) {
            let different: HashSet<u32> = wanted.numbers().collect();
            if different.len() > pool.n_free() {
                return Err(MemoryFull::Pages(pool.n_pages()));
            }
        }
        let slot = match has_snapshot && self.has_state() {
            false => None,
            true => {
                let full = MemoryFull::Snapshots(pools.slots.n_pages());
                Some(pools.slots.take().ok_or(full)?)
            }
        };
        for ((wanted, pool), places) in wanted.iter().zip(&mut pools.pages).zip(places) {
            for number in wanted.numbers() {
                let place = &mut places[number as usize];
                match place {
                    Some(page) => pool.share(*page),
                    None => *place = Some(pool.take().expect("counted above")),
                }
            }
        }
        Ok(slot)
    }

    /// Whether less than a quarter of the pages of a group, or of the slots of recurrent state, is
    /// free: what was kept longest may have to go soon.
    pub fn is_short(&self) -> bool {
        let pools = Pools::lock(&self.pools);
        let slots = Some(&pools.slots).filter(|_| self.has_state());
        let mut all = pools.pages.iter().chain(slots);
        all.any(|pool| 4 * pool.n_free() < pool.n_pages())
    }
}
