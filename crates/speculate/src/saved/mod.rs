//! Ended texts outlive their memory: what one has left is saved elsewhere, and had again later.
//!
//! Both ways go piece by piece, so that whoever calls decides how much time a round can spare:
//!
//! ```text
//! save(parked)        →  Saving      save_piece until there is none      mark_saved
//! restore(saved, ..)  →  which pieces are wanted      load_piece each    → parked
//! ```
//!
//! A text that is being restored gives its room back when a running stream needs it. Rows have the
//! bits that they had when they ran, so a stream that begins with them writes what it would after a
//! cold start.
//!
//! Deliberately absent: where the bytes are, and which texts are worth it. [`mod@file`] is one form for
//! them.

pub mod file;
#[cfg(test)]
mod tests;

use crate::draft::SavedDraft;
use crate::kept::Parked;
use crate::prompt::Prompt;
use crate::reuse::{LEAST_HIT, reusable};
use crate::speculator::Speculator;
use crate::stream::{Stream, StreamState, settle};
use cache::{MemoryFull, Namespace, Outline, Piece, RowKey};
use std::collections::VecDeque;

/// What it takes to have an ended text again, beside what its rows were computed from and the bytes
/// of its pieces: those of the target, then those of each head.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedText {
    /// What the target remembers of it.
    pub target: Outline,
    /// Pieces of the text that are the target's.
    pub n_pieces: usize,
    /// What each head has of it.
    pub heads: Vec<SavedHead>,
}

/// What one head has of an ended text.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SavedHead {
    /// What it remembers, where that cannot be made anew from the text.
    pub draft: Option<SavedDraft>,
    /// Pieces of the text that are the head's.
    pub n_pieces: usize,
}

/// Whose memory a piece is of.
#[derive(Clone, Copy, Debug)]
enum Of {
    Target,
    /// The head of this number.
    Head(usize),
}

/// An ended text that is being saved.
#[derive(Debug)]
pub struct Saving {
    parked: Parked,
    /// Whose text it is.
    pub namespace: Namespace,
    /// What its rows, and the one after them, are computed from.
    pub keys: Vec<RowKey>,
    /// What is saved of the text.
    pub text: SavedText,
    pieces: VecDeque<(Of, Piece)>,
}

impl Saving {
    /// The text.
    pub fn parked(&self) -> Parked {
        self.parked
    }
}

/// What came of asking for the next piece of a text.
#[derive(Debug, PartialEq, Eq)]
pub enum NextPiece {
    /// The bytes of the piece.
    Bytes(Vec<u8>),
    /// There are no more.
    End,
    /// The text has been evicted, or some of it, so that it cannot be saved as it was.
    Gone,
}

/// What came of loading a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Restored {
    /// More pieces are wanted.
    Partly,
    /// The text can be found by prompts from now on.
    Whole(Parked),
    /// There is no such text any more: its room was wanted for a running stream.
    Evicted,
    /// The bytes are not those of the piece.
    Misfit,
}

/// A text that is being restored.
pub(crate) struct Restoring {
    state: StreamState,
    namespace: Namespace,
    keys: Vec<RowKey>,
    /// The pieces that are still wanted.
    pieces: VecDeque<(Of, Piece)>,
}

impl SavedText {
    /// Pieces in all.
    pub fn all_pieces(&self) -> usize {
        let of_heads = self.heads.iter().map(|head| head.n_pieces);
        self.n_pieces + of_heads.sum::<usize>()
    }
}

impl Speculator {
    /// Ended texts that are not marked as saved, those of least worth first.
    pub fn unsaved(&self) -> Vec<Parked> {
        if self.kept.texts.iter().all(|text| text.is_saved) {
            return Vec::new();
        }
        let order = self.kept.by_worth().into_iter();
        let texts = order.map(|i| &self.kept.texts[i]);
        let unsaved = texts.filter(|text| !text.is_saved);
        unsaved.map(|text| Parked(text.entry)).collect()
    }

    /// Whether texts may soon be evicted to make room: little of a memory is free.
    pub fn is_short_of_room(&self) -> bool {
        self.memory.is_short()
    }

    /// Begins to save what is left of an ended text; none if nothing is.
    pub fn save(&self, parked: Parked) -> Option<Saving> {
        let state = &self.kept.texts[self.kept.position(parked.0)?].state;
        let (target, pieces) = self.memory.outline(&state.sequence);
        let n_pieces = pieces.len();
        let mut pieces: VecDeque<(Of, Piece)> = pieces
            .into_iter()
            .map(|piece| (Of::Target, piece))
            .collect();
        let mut heads = Vec::with_capacity(state.heads.len());
        for (i, head) in state.heads.iter().enumerate() {
            let (draft, own) = head.saved().unzip();
            let own: Vec<Piece> = own.unwrap_or_default();
            heads.push(SavedHead {
                draft,
                n_pieces: own.len(),
            });
            pieces.extend(own.into_iter().map(|piece| (Of::Head(i), piece)));
        }
        let (namespace, keys) = self.index.text(parked.0);
        let n_keys = keys.len().min(target.rows + 1);
        Some(Saving {
            parked,
            namespace,
            keys: keys[..n_keys].to_vec(),
            text: SavedText {
                target,
                n_pieces,
                heads,
            },
            pieces,
        })
    }

    /// The next piece of a text that is being saved. Waits for the device.
    pub fn save_piece(&self, saving: &mut Saving) -> NextPiece {
        let Some(i) = self.kept.position(saving.parked.0) else {
            return NextPiece::Gone;
        };
        let StreamState { sequence, heads } = &self.kept.texts[i].state;
        let has = |(i, saved): (usize, &SavedHead)| match (heads.get(i), &saved.draft) {
            (Some(head), Some(saved)) => head.has_all_of(saved),
            (_, saved) => saved.is_none(),
        };
        let have_all = saving.text.heads.iter().enumerate().all(has);
        if !have_all || !self.memory.has_all_of(sequence, &saving.text.target) {
            return NextPiece::Gone;
        }
        let b = &*self.b;
        match saving.pieces.pop_front() {
            None => NextPiece::End,
            Some((Of::Head(head), piece)) => NextPiece::Bytes(heads[head].save_piece(b, piece)),
            Some((Of::Target, piece)) => NextPiece::Bytes(self.memory.save_piece(b, piece)),
        }
    }

    /// Notes that an ended text need not be saved: it is somewhere, or not worth it.
    pub fn mark_saved(&mut self, parked: Parked) {
        if let Some(i) = self.kept.position(parked.0) {
            self.kept.texts[i].is_saved = true;
        }
    }

    /// Whether a text with `keys` can be saved as `saved`, wherever that comes from.
    pub fn fits(&self, saved: &SavedText, keys: &[RowKey]) -> bool {
        let heads = &self.drafters.heads;
        let mut pairs = heads.iter().zip(&saved.heads);
        heads.len() == saved.heads.len()
            && pairs.all(|(head, saved)| head.fits(saved.draft.as_ref(), saved.n_pieces))
            && keys.len() > saved.target.rows
            && self.memory.fits(&saved.target, saved.n_pieces)
    }

    /// Rows that a stream after `prompt` could share once `saved`, which [fits](Speculator::fits), is
    /// restored, where the first `alike` rows of both are computed from the same; `drafts` says
    /// whether the stream will be drafted for.
    pub fn restorable(
        &self,
        saved: &SavedText,
        alike: usize,
        prompt: &Prompt,
        drafts: bool,
    ) -> usize {
        reusable(&prompt.keys(), alike, |rows| {
            self.restorable_rows(saved, rows, drafts)
        })
    }

    fn restorable_rows(&self, saved: &SavedText, rows: usize, drafts: bool) -> usize {
        let heads = if drafts {
            &self.drafters.heads[..]
        } else {
            &[]
        };
        settle(
            rows,
            |rows| self.memory.restorable(&saved.target, rows),
            |rows| {
                let heads = heads.iter().zip(&saved.heads);
                heads.fold(rows, |rows, (head, saved)| {
                    head.restorable(saved.draft.as_ref(), rows)
                })
            },
        )
    }

    /// Whether whoever could go on from `part`, of a text that the one of `saved` begins with, can as
    /// well go on from there. Both [fit](Speculator::fits).
    pub fn has_all_of(&self, saved: &SavedText, part: &SavedText) -> bool {
        let depths = part
            .target
            .depths()
            .flat_map(|rows| [(rows, false), (rows, true)]);
        let mut depths = depths.map(|(rows, drafts)| {
            let rows = self.restorable_rows(part, rows, drafts);
            self.restorable_rows(saved, rows, drafts) == rows
        });
        depths.all(|is_there| is_there)
    }

    /// Rows that a stream after `prompt` would begin with now: of ended texts, or of those of the
    /// streams `running`.
    pub fn found(&self, prompt: &Prompt, running: &[&Stream], drafts: bool) -> usize {
        let keys = prompt.keys();
        let parked = self.best_parked(prompt, &keys, drafts);
        let shared = self.best_shared(running, prompt, &keys, drafts);
        let rows = parked.map(|(rows, _)| rows);
        let rows = rows.max(shared.map(|(_, rows)| rows)).unwrap_or(0);
        if rows < LEAST_HIT { 0 } else { rows }
    }

    /// Begins to restore the first `rows` rows of `saved`, which [fits](Speculator::fits), for
    /// prompts of `namespace`; `keys` are what they and the row after them are computed from.
    /// Returns which of all pieces are wanted, in order. What ended streams have left makes room.
    /// A text that is being restored already is given up.
    ///
    /// # Errors
    ///
    /// [`MemoryFull`] if there is no room.
    ///
    /// # Panics
    ///
    /// If so many rows are not [restorable](Speculator::restorable), or there are fewer keys.
    pub fn restore(
        &mut self,
        saved: &SavedText,
        rows: usize,
        namespace: Namespace,
        keys: &[RowKey],
    ) -> Result<Vec<bool>, MemoryFull> {
        self.restoring = None;
        let (sequence, heads, pieces) = self.with_room(None, &[], |this| {
            let (sequence, pieces) = this.memory.restore(&saved.target, rows)?;
            let mut pieces: Vec<(Of, Option<Piece>)> = pieces
                .into_iter()
                .map(|piece| (Of::Target, piece))
                .collect();
            let mut heads = Vec::with_capacity(this.n_heads());
            for (i, (head, saved)) in this.drafters.heads.iter().zip(&saved.heads).enumerate() {
                let draft = saved.draft.as_ref();
                let (state, own) = head.restore(draft, head.restorable(draft, rows))?;
                pieces.extend(own.into_iter().map(|piece| (Of::Head(i), piece)));
                heads.push(state);
            }
            Ok((sequence, heads, pieces))
        })?;
        let wanted = pieces.iter().map(|(_, piece)| piece.is_some()).collect();
        let pieces = pieces.into_iter();
        self.restoring = Some(Restoring {
            state: StreamState { sequence, heads },
            namespace,
            keys: keys[..=rows].to_vec(),
            pieces: pieces
                .filter_map(|(of, piece)| Some((of, piece?)))
                .collect(),
        });
        Ok(wanted)
    }

    /// Loads the next wanted piece of the text that is being restored.
    pub fn load_piece(&mut self, bytes: &[u8]) -> Restored {
        let Some(restoring) = &mut self.restoring else {
            return Restored::Evicted;
        };
        let b = &*self.b;
        let is_loaded = match restoring.pieces.pop_front() {
            Some((Of::Target, piece)) => self.memory.load_piece(b, piece, bytes),
            Some((Of::Head(head), piece)) => {
                restoring.state.heads[head].load_piece(b, piece, bytes)
            }
            None => false,
        };
        if !is_loaded {
            self.restoring = None;
            return Restored::Misfit;
        }
        if !restoring.pieces.is_empty() {
            return Restored::Partly;
        }
        match self.restoring.take() {
            None => Restored::Evicted,
            Some(whole) => {
                let entry = self.index.insert(whole.namespace, whole.keys);
                self.keep_text(entry, whole.state, true);
                Restored::Whole(Parked(entry))
            }
        }
    }

    /// Gives up the text that is being restored, if one is.
    pub fn stop_restoring(&mut self) {
        self.restoring = None;
    }
}
