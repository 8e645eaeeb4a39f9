//! Reuse of rows: a stream begins with rows that have run for another text.
//!
//! An ended stream leaves what it remembers in its place, *parked*, until another stream goes
//! on from there ([`Speculator::resume`]) or needs the place. A running stream shares the first
//! pages of its rows ([`Speculator::fork`]). Either way the new stream writes what a cold start
//! would: rows have the same bits in whatever step they ran. A prompt that begins like one that
//! is being read had better wait for it ([`Speculator::should_wait`]).
//!
//! Texts are compared by what their rows are computed from ([`cache::RowKey`]), in one index of
//! all streams. The drafter's state goes back and is shared with the target's rows, so a hit
//! is as long as both allow.

use crate::parked::Parked;
use crate::prompt::Prompt;
use crate::speculator::Speculator;
use crate::stream::{Stream, StreamOptions, StreamState};
use cache::{Entry, MemoryFull, RowKey, whole_spans};

/// Rows that are worth more than whatever else a parked stream remembers.
const WORTH_KEEPING: usize = 64;

impl Speculator {
    /// Ends a stream and keeps what it remembers, which no failed round may have touched.
    pub fn park(&mut self, stream: Stream) -> Parked {
        self.ended.texts.push((stream.entry, stream.state));
        self.count_ended();
        Parked(stream.entry)
    }

    /// Frees what is left of an ended stream.
    ///
    /// # Panics
    ///
    /// If nothing is left: it was discarded or resumed.
    pub fn discard(&mut self, parked: Parked) {
        self.unpark(parked.0);
    }

    /// Frees what is left of all ended streams.
    pub fn discard_all(&mut self) {
        while let Some(&(entry, _)) = self.ended.texts.first() {
            self.unpark(entry);
        }
    }

    /// Starts a stream after `prompt` with the rows of an earlier text that begins like it: from
    /// what an ended one has left, if that is half of the prompt, or 64 rows where a place has to
    /// be made anyway, or sharing pages with one of the streams `running`, whichever has more of
    /// them. Else all rows are to be run. The longest ended text makes place if there is no free
    /// one.
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
        let is_full = self.memory.n_open() == self.memory.size().sequences;
        let half = prompt.tokens.len() / 2;
        let enough = if is_full {
            half.min(WORTH_KEEPING)
        } else {
            half
        };
        let drafts = options.draft.max() > 0;
        let keys = prompt.keys();
        let parked = self.best_parked(&keys, drafts);
        let parked = parked.filter(|&(rows, _)| rows >= enough.max(1));
        let shared = self.best_shared(running, &keys, drafts);
        let shared = shared.filter(|&(_, rows)| parked.as_ref().is_none_or(|p| rows > p.0));
        if let (None, Some((_, parked))) = (shared, parked) {
            return self.resume(parked, prompt, options);
        }
        if is_full && let Some(&(oldest, _)) = self.ended.texts.first() {
            self.unpark(oldest);
        }
        match shared {
            Some((i, _)) => self.fork(running[i], prompt, options),
            None => self.open(prompt, options),
        }
    }

    /// Whether a stream after `prompt` should start later: one of `running` is reading a prompt
    /// that begins like it, and will have at least half of its rows to share, and more than there
    /// are now. `drafts` says whether the stream will be drafted for.
    pub fn should_wait(&self, running: &[&Stream], prompt: &Prompt, drafts: bool) -> bool {
        let keys = prompt.keys();
        let parked = self.best_parked(&keys, drafts).map_or(0, |(rows, _)| rows);
        let shared = self.best_shared(running, &keys, drafts);
        let shared = shared.map_or(0, |(_, rows)| rows);
        let least = (keys.len() / 2).max(parked.max(shared) + 1);
        running.iter().filter(|s| s.is_reading()).any(|s| {
            let alike = self.index.alike(s.entry, &keys).min(s.n_prompt());
            let later = reusable(&keys, alike, |rows| s.will_share(&self.memory, rows));
            later >= least && s.n_prefilled() < later
        })
    }

    /// Starts a stream after `prompt` with as many rows as what is left of `parked` and the
    /// prompt have in common, as far as that can go back; the rest of it is forgotten.
    ///
    /// # Errors
    ///
    /// As [`Speculator::open`]; nothing is left of `parked` then.
    ///
    /// # Panics
    ///
    /// As [`Speculator::open`], and if nothing is left of `parked`.
    pub fn resume(
        &mut self,
        parked: Parked,
        prompt: impl Into<Prompt>,
        options: StreamOptions,
    ) -> Result<Stream, MemoryFull> {
        let (prompt, entry) = (prompt.into(), parked.0);
        if let Err(full) = self.check(&prompt) {
            self.unpark(entry);
            return Err(full);
        }
        let keys = prompt.keys();
        let alike = self.index.alike(entry, &keys);
        let mut state = self.unpark(entry);
        let drafts = options.draft.max() > 0;
        let rows = reusable(&keys, alike, |rows| {
            state.restorable(&self.memory, rows, drafts)
        });
        state.restore(&*self.b, &mut self.memory, rows);
        Ok(self.begin(state, keys, prompt, options))
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
        let alike = self.index.alike(stream.entry, &keys);
        let rows = self.shareable(stream, &keys, alike, options.draft.max() > 0);
        let state = stream.state.fork(&*self.b, &mut self.memory, rows)?;
        Ok(self.begin(state, keys, prompt, options))
    }

    /// Which of `streams` a stream after `prompt` could share most rows with, and how many;
    /// `drafts` says whether it will be drafted for. `None` if it could share none.
    pub fn best_fork(
        &self,
        streams: &[&Stream],
        prompt: &Prompt,
        drafts: bool,
    ) -> Option<(usize, usize)> {
        self.best_shared(streams, &prompt.keys(), drafts)
    }

    /// [`Speculator::best_fork`] of a prompt of `keys`.
    fn best_shared(
        &self,
        streams: &[&Stream],
        keys: &[RowKey],
        drafts: bool,
    ) -> Option<(usize, usize)> {
        let matches = self.index.matches(keys).into_iter();
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
        (used - self.ended.n_pages, all)
    }

    /// Rows that a stream after a prompt of `keys`, the first `alike` of which are those of
    /// `stream`, could share with it.
    fn shareable(&self, stream: &Stream, keys: &[RowKey], alike: usize, drafts: bool) -> usize {
        reusable(keys, alike, |rows| {
            stream.state.forkable(&self.memory, rows, drafts)
        })
    }

    /// The parked text in which a stream after a prompt of `keys` finds most rows, and how
    /// many; the newest of several.
    fn best_parked(&self, keys: &[RowKey], drafts: bool) -> Option<(usize, Parked)> {
        let matches = self.index.matches(keys).into_iter();
        let found = matches.filter_map(|found| {
            let texts = &self.ended.texts;
            let age = texts.iter().position(|&(entry, _)| entry == found.entry)?;
            let state = &texts[age].1;
            let rows = reusable(keys, found.rows, |rows| {
                state.restorable(&self.memory, rows, drafts)
            });
            Some((rows, age, found.entry))
        });
        let best = found.max_by_key(|&(rows, age, _)| (rows, age));
        best.map(|(rows, _, entry)| (rows, Parked(entry)))
    }

    /// Takes what is left of an ended stream out of its place and the index.
    fn unpark(&mut self, entry: Entry) -> StreamState {
        let texts = &mut self.ended.texts;
        let i = texts.iter().position(|(e, _)| *e == entry);
        let (_, state) = texts.remove(i.expect("something is left of the stream"));
        self.index.remove(entry);
        self.count_ended();
        state
    }

    fn count_ended(&mut self) {
        let sequences = self.ended.texts.iter().map(|(_, state)| &state.sequence);
        self.ended.n_pages = self.memory.pages_only_of(sequences);
    }
}

/// Rows to reuse for a prompt of `keys` that begins with `alike` rows of another text, of which
/// `allowed` says how many of so many can be had: whole spans, and less than all that is
/// alike, for the drafter's row of a token is of the token after it as well.
fn reusable(keys: &[RowKey], alike: usize, allowed: impl Fn(usize) -> usize) -> usize {
    let most = alike.saturating_sub(1);
    crate::stream::settle(most, |rows| whole_spans(keys, rows), allowed)
}
