//! The prefix cache: a stream begins with rows that have run for another text.
//!
//! An ended stream leaves what it remembers behind, *parked*, until the room is wanted for
//! something of more worth ([`crate::kept`]). A stream shares the first rows of a parked or of a
//! running one ([`Speculator::start`]). Either way it writes what a cold start would: rows
//! have the same bits in whatever step they ran. A prompt that begins like one that is being read
//! had better wait for it ([`Speculator::should_wait`]).
//!
//! Texts are compared by what their rows are computed from ([`cache::RowKey`]), in one index of
//! all streams, and found by prompts of their own namespace only. The heads' states are shared with
//! the target's rows, so a hit is as long as all allow.

use crate::kept::{Evictions, Parked, Victim};
use crate::prompt::Prompt;
use crate::speculator::Speculator;
use crate::stream::{Stream, StreamOptions, StreamState};
use backend::MAX_TENTATIVE;
use cache::{Entry, MemoryFull, RowKey, whole_spans};

/// Fewest rows that are worth to be shared: fewer cost nothing beside those that have to run.
pub(crate) const LEAST_HIT: usize = 16;

impl Speculator {
    /// Ends a stream and keeps what it remembers, which no failed round may have touched. Texts
    /// that are a part of it go.
    pub fn park(&mut self, stream: Stream) -> Parked {
        self.park_text(stream.entry, stream.state)
    }

    /// Keeps what is remembered of the text of `entry`, which has ended or does not run for now.
    pub(crate) fn park_text(&mut self, entry: Entry, mut state: StreamState) -> Parked {
        state.keep(&mut self.memory);
        let (namespace, keys) = self.index.text(entry);
        let is_part = |text: &crate::kept::KeptText| {
            let (theirs, part) = self.index.text(text.entry);
            namespace == theirs
                && keys.starts_with(part)
                && state.has_all_of(&self.memory, &text.state)
        };
        let parts = self.kept.texts.iter().filter(|text| is_part(text));
        let parts: Vec<Entry> = parts.map(|text| text.entry).collect();
        for part in parts {
            self.unpark(part);
        }
        self.keep_text(entry, state, false);
        Parked(entry)
    }

    /// Adds the text of `entry` to those that have ended; one of least worth goes if there are too many.
    pub(crate) fn keep_text(&mut self, entry: Entry, state: StreamState, is_saved: bool) {
        self.kept.push(entry, state, is_saved);
        if let Some(surplus) = self.kept.surplus() {
            self.unpark(surplus);
        }
        self.count_kept();
    }

    /// Frees what is left of an ended stream, if anything is.
    pub fn discard(&mut self, parked: Parked) {
        self.unpark(parked.0);
    }

    /// Frees what is left of all ended streams.
    pub fn discard_all(&mut self) {
        self.restoring = None;
        while let Some(text) = self.kept.texts.first() {
            self.unpark(text.entry);
        }
    }

    /// Starts a stream after `prompt` with the rows of another text that begins like it: of an
    /// ended one or of one of the streams `running`, whichever has more of them. Else all rows
    /// are to be run.
    ///
    /// # Errors
    ///
    /// As [`Speculator::open`].
    ///
    /// # Panics
    ///
    /// As [`Speculator::open`].
    pub fn start(
        &mut self,
        prompt: impl Into<Prompt>,
        options: StreamOptions,
        running: &[&Stream],
    ) -> Result<Stream, MemoryFull> {
        let prompt = prompt.into();
        self.check(&prompt)?;
        let keys = prompt.keys();
        let state = self.warm_state(&prompt, &keys, options.draft.max() > 0, running)?;
        Ok(self.begin(state, keys, prompt, options))
    }

    /// The state of a text after `prompt`, of `keys`, with the rows of another text that begins like it
    /// ([`Speculator::start`]); `drafts` says whether it is drafted for.
    pub(crate) fn warm_state(
        &mut self,
        prompt: &Prompt,
        keys: &[RowKey],
        drafts: bool,
        running: &[&Stream],
    ) -> Result<StreamState, MemoryFull> {
        let parked = self.best_parked(prompt, keys, drafts);
        let shared = self.best_shared(running, prompt, keys, drafts);
        let parked = parked.filter(|&(rows, _)| {
            rows >= LEAST_HIT && shared.is_none_or(|(_, shared)| rows >= shared)
        });
        let state = match (parked, shared) {
            (Some((rows, Parked(entry))), _) => self.fork_parked(entry, rows, running)?,
            (None, Some((i, rows))) if rows >= LEAST_HIT => self.fork_running(running[i], rows)?,
            _ => None,
        };
        match state {
            Some(state) => Ok(state),
            None => self.fresh_state(running),
        }
    }

    /// Starts a stream after `prompt`, all of whose rows are to be run, beside the streams `running`:
    /// what ended ones have left makes room.
    ///
    /// # Errors
    ///
    /// As [`Speculator::open`].
    ///
    /// # Panics
    ///
    /// As [`Speculator::open`].
    pub fn start_afresh(
        &mut self,
        prompt: impl Into<Prompt>,
        options: StreamOptions,
        running: &[&Stream],
    ) -> Result<Stream, MemoryFull> {
        let prompt = prompt.into();
        self.check(&prompt)?;
        let state = self.fresh_state(running)?;
        let keys = prompt.keys();
        Ok(self.begin(state, keys, prompt, options))
    }

    /// Whether a stream after `prompt` should start later: one of `running` is reading a prompt
    /// that begins like it, and will have at least half of its rows to share, and more than there
    /// are now. `drafts` says whether the stream will be drafted for.
    pub fn should_wait(&self, running: &[&Stream], prompt: &Prompt, drafts: bool) -> bool {
        let keys = prompt.keys();
        let parked = self.best_parked(prompt, &keys, drafts);
        let shared = self.best_shared(running, prompt, &keys, drafts);
        let now = parked
            .map_or(0, |(rows, _)| rows)
            .max(shared.map_or(0, |(_, rows)| rows));
        let least = (keys.len() / 2).max(now + 1);
        // A stream that pools leaves with the last row that it reads.
        let mut reading = running.iter().filter(|s| s.is_reading() && !s.pools());
        reading.any(|s| {
            let alike = self.index.alike(s.entry, prompt.namespace, &keys);
            let later = reusable(&keys, alike.min(s.n_prompt()), |rows| {
                s.will_share(&self.memory, rows)
            });
            later >= least && s.n_prefilled() < later
        })
    }

    /// Starts a stream after `prompt` with as many rows as what is left of `parked` and the
    /// prompt have in common, as far as they can be shared; the rest of it is forgotten.
    ///
    /// # Errors
    ///
    /// As [`Speculator::open`]; nothing is left of `parked` then.
    ///
    /// # Panics
    ///
    /// As [`Speculator::open`].
    pub fn resume(
        &mut self,
        parked: Parked,
        prompt: impl Into<Prompt>,
        options: StreamOptions,
    ) -> Result<Stream, MemoryFull> {
        let (prompt, entry) = (prompt.into(), parked.0);
        let result = self.check(&prompt).and_then(|()| {
            let keys = prompt.keys();
            let rows = self.reusable_of(entry, &prompt, &keys, options.draft.max() > 0);
            let state = match self.fork_parked(entry, rows, &[])? {
                Some(state) => state,
                None => self.fresh_state(&[])?,
            };
            Ok(self.begin(state, keys, prompt, options))
        });
        self.unpark(entry);
        result
    }

    /// Starts a stream after `prompt` that shares what it can of the first rows of `stream`,
    /// which goes on as if alone.
    ///
    /// # Errors
    ///
    /// As [`Speculator::open`].
    ///
    /// # Panics
    ///
    /// As [`Speculator::open`].
    pub fn fork(
        &mut self,
        stream: &Stream,
        prompt: impl Into<Prompt>,
        options: StreamOptions,
    ) -> Result<Stream, MemoryFull> {
        let prompt = prompt.into();
        self.check(&prompt)?;
        let keys = prompt.keys();
        let alike = self.index.alike(stream.entry, prompt.namespace, &keys);
        let rows = self.shareable(stream, &keys, alike, options.draft.max() > 0);
        let state = match self.fork_running(stream, rows)? {
            Some(state) => state,
            None => self.fresh_state(&[])?,
        };
        Ok(self.begin(state, keys, prompt, options))
    }

    /// What has been evicted so far.
    pub fn evictions(&self) -> Evictions {
        self.kept.evictions
    }

    /// Texts that have ended and of which something is left, and the bytes of the target's memory
    /// that only they have.
    pub fn kept(&self) -> (usize, usize) {
        (self.kept.texts.len(), self.kept.n_bytes)
    }

    /// Does `work`; where there is no room for it, evicts what is of least worth, but nothing of the
    /// text of `spared`, until there is.
    pub(crate) fn with_room<T>(
        &mut self,
        spared: Option<Entry>,
        running: &[&Stream],
        mut work: impl FnMut(&mut Self) -> Result<T, MemoryFull>,
    ) -> Result<T, MemoryFull> {
        loop {
            match work(self) {
                Err(full) if self.evict(full, spared, running) => {}
                done => return done,
            }
        }
    }

    /// Makes some room where `full` says that there is none: what ended streams have left goes
    /// first, but nothing of the text of `spared`, then a text that is being restored, then the
    /// snapshots of `running` ones. Returns false if there is nothing that could go.
    pub(crate) fn evict(
        &mut self,
        full: MemoryFull,
        spared: Option<Entry>,
        running: &[&Stream],
    ) -> bool {
        if let Some(victim) = self.kept.victim(&self.memory, full, spared) {
            self.kept.note(&victim);
            match victim {
                Victim::Text(i, 0) => {
                    let entry = self.kept.texts[i].entry;
                    self.unpark(entry);
                }
                Victim::Text(i, rows) => {
                    let text = &mut self.kept.texts[i];
                    text.state.cut(&mut self.memory, rows);
                    self.index.truncate(text.entry, rows);
                    self.count_kept();
                }
                Victim::Snapshot(snapshot, _) => snapshot.free(),
            }
            return true;
        }
        let is_room = matches!(full, MemoryFull::Pages(_) | MemoryFull::Snapshots(_));
        if is_room && self.restoring.take().is_some() {
            return true;
        }
        let all = running.iter().flat_map(|s| s.state.sequence.snapshots());
        let mut held = all.filter(|snapshot| is_room && spared.is_none() && !snapshot.is_freed());
        held.next().map(|snapshot| snapshot.free()).is_some()
    }

    /// Has the heads' own memories ready for a round of `streams`, for they take pages where nothing
    /// can be evicted. False if there is too little that can be.
    pub(crate) fn make_room_for_heads(&mut self, streams: &[&Stream], chunk: usize) -> bool {
        (0..self.n_heads()).all(|head| self.make_room_for_head(head, streams, chunk))
    }

    fn make_room_for_head(&mut self, head: usize, streams: &[&Stream], chunk: usize) -> bool {
        let context = self.memory.size().context;
        let lacks = |stream: &&Stream| {
            let chunk = stream.next_chunk(chunk);
            let rows = stream.state.sequence.len() + chunk + 2 * MAX_TENTATIVE;
            let state = stream.state.heads.get(head);
            // Nobody reads what is never drafted for.
            let state = state.filter(|_| stream.is_read_by(head));
            state.map_or(0, |state| state.lacking_pages(rows.min(context)))
        };
        let wanted: usize = streams.iter().map(lacks).sum();
        while self.drafters.heads[head].n_free_pages() < wanted {
            if !self.evict(MemoryFull::Pages(wanted), None, &[]) {
                return false;
            }
        }
        true
    }

    /// The state of a stream that begins with the first `rows` rows of the ended text of `entry`;
    /// none if there is no room for it beside that text.
    fn fork_parked(
        &mut self,
        entry: Entry,
        rows: usize,
        running: &[&Stream],
    ) -> Result<Option<StreamState>, MemoryFull> {
        let forked = self.with_room(Some(entry), running, |this| {
            let i = this.kept.position(entry).expect("a text that is spared");
            this.kept.touch(i);
            this.kept.texts[i]
                .state
                .fork(&*this.b, &mut this.memory, rows)
        });
        as_far_as_there_is_room(forked)
    }

    /// The state of a stream that begins with the first `rows` rows of `stream`; none if there is no
    /// room for it.
    fn fork_running(
        &mut self,
        stream: &Stream,
        rows: usize,
    ) -> Result<Option<StreamState>, MemoryFull> {
        let forked = self.with_room(Some(stream.entry), &[], |this| {
            stream.state.fork(&*this.b, &mut this.memory, rows)
        });
        as_far_as_there_is_room(forked)
    }

    /// Which of `streams` a stream after `prompt` could share most rows with, and how many;
    /// `drafts` says whether it will be drafted for. `None` if it could share none.
    pub fn best_fork(
        &self,
        streams: &[&Stream],
        prompt: &Prompt,
        drafts: bool,
    ) -> Option<(usize, usize)> {
        self.best_shared(streams, prompt, &prompt.keys(), drafts)
    }

    /// [`Speculator::best_fork`] of a prompt of `keys`.
    pub(crate) fn best_shared(
        &self,
        streams: &[&Stream],
        prompt: &Prompt,
        keys: &[RowKey],
        drafts: bool,
    ) -> Option<(usize, usize)> {
        let matches = self.index.matches(prompt.namespace, keys).into_iter();
        let shared = matches.filter_map(|found| {
            let i = streams.iter().position(|s| s.entry == found.entry)?;
            Some((i, self.shareable(streams[i], keys, found.rows, drafts)))
        });
        shared
            .filter(|&(_, rows)| rows > 0)
            .max_by_key(|&(_, rows)| rows)
    }

    /// Pages of keys and values in use by streams that run, and pages in all.
    pub fn pages_running(&self) -> (usize, usize) {
        let (used, all) = self.memory.pages_used();
        (used - self.kept.n_pages.min(used), all)
    }

    /// Rows that a stream after a prompt of `keys`, the first `alike` of which are those of
    /// `stream`, could share with it.
    fn shareable(&self, stream: &Stream, keys: &[RowKey], alike: usize, drafts: bool) -> usize {
        reusable(keys, alike, |rows| {
            stream.state.forkable(&self.memory, rows, drafts)
        })
    }

    /// Rows that a stream after `prompt`, of `keys`, could share with the ended text of `entry`.
    fn reusable_of(&self, entry: Entry, prompt: &Prompt, keys: &[RowKey], drafts: bool) -> usize {
        let i = self
            .kept
            .position(entry)
            .expect("something is left of the stream");
        let alike = self.index.alike(entry, prompt.namespace, keys);
        let state = &self.kept.texts[i].state;
        reusable(keys, alike, |rows| {
            state.forkable(&self.memory, rows, drafts)
        })
    }

    /// The parked text in which a stream after `prompt`, of `keys`, finds most rows, and how
    /// many; the newest of several.
    pub(crate) fn best_parked(
        &self,
        prompt: &Prompt,
        keys: &[RowKey],
        drafts: bool,
    ) -> Option<(usize, Parked)> {
        let matches = self.index.matches(prompt.namespace, keys).into_iter();
        let parked = matches.filter(|found| self.kept.position(found.entry).is_some());
        let mut best: Option<(usize, Parked)> = None;
        for found in parked {
            // The others have fewer rows alike.
            if best.is_some_and(|(rows, _)| rows >= found.rows) {
                break;
            }
            let rows = self.reusable_of(found.entry, prompt, keys, drafts);
            if rows > 0 && best.is_none_or(|(most, _)| rows > most) {
                best = Some((rows, Parked(found.entry)));
            }
        }
        best
    }

    /// Frees what is left of an ended stream, if anything is, and takes it out of the index.
    fn unpark(&mut self, entry: Entry) {
        if let Some(i) = self.kept.position(entry) {
            self.kept.texts.remove(i);
            self.index.remove(entry);
            self.count_kept();
        }
    }

    fn count_kept(&mut self) {
        let sequences = self.kept.texts.iter().map(|text| &text.state.sequence);
        self.kept.n_pages = self.memory.pages_only_of(sequences.clone());
        self.kept.n_bytes = self.memory.bytes_only_of(sequences);
    }
}

/// What came of a fork; none where there was no room beside what it was to begin with.
fn as_far_as_there_is_room(
    forked: Result<StreamState, MemoryFull>,
) -> Result<Option<StreamState>, MemoryFull> {
    match forked {
        Ok(state) => Ok(Some(state)),
        Err(MemoryFull::Pages(_) | MemoryFull::Snapshots(_)) => Ok(None),
        Err(full) => Err(full),
    }
}

/// Rows to reuse for a prompt of `keys` that begins with `alike` rows of another text, of which
/// `allowed` says how many of so many can be had: whole spans, and less than all that is
/// alike, for the drafter's row of a token is of the token after it as well.
pub(crate) fn reusable(keys: &[RowKey], alike: usize, allowed: impl Fn(usize) -> usize) -> usize {
    let most = alike.saturating_sub(1);
    crate::stream::settle(most, |rows| whole_spans(keys, rows), allowed)
}
