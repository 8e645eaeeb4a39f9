//! Preemption: a stream gives its memory to others, and goes on later by running its rows again.
//!
//! ```text
//! preempt    what the stream remembers → the prefix cache, or nowhere
//! go_on      the state of prompt and text so far, as far as the prefix cache has it
//! round      the other known rows, in chunks, as those of a prompt; then the next token
//! ```
//!
//! Everything else stays with the stream: tokens, what the sampler counts, the constraint, the draft that the
//! next round would have verified. Rows have the same bits in whatever step they run, noise is keyed by
//! position, and a drafter learns rows as it did the first time: so the text, its log-probabilities and its
//! drafts are those of a stream that never stopped.
//!
//! Deliberately absent: who is preempted and when. The scheduler decides that.

use crate::length::Guesser;
use crate::prompt::Prompt;
use crate::sample::TokenProbs;
use crate::speculator::Speculator;
use crate::stream::{SnapshotDue, Stream, StreamState};
use cache::MemoryFull;

/// The draft of a preempted stream.
pub(crate) struct PutBy {
    draft: Vec<u32>,
    probs: Vec<TokenProbs>,
    forced: Vec<bool>,
    guesser: Guesser,
    n_guessed: usize,
    n_asked: usize,
}

impl Stream {
    /// Whether the stream has been [preempted](Speculator::preempt) and does not go on yet.
    pub fn is_preempted(&self) -> bool {
        self.state.sequence.is_closed()
    }

    /// How often the stream was preempted.
    pub fn n_preemptions(&self) -> u64 {
        self.stats.preemptions
    }

    /// The most rows that the stream will have, if `context` allows it.
    pub fn most_rows(&self, context: usize) -> usize {
        let wanted = self.n_prompt.saturating_add(self.options.max_tokens);
        let wanted = if self.pools() { self.n_prompt } else { wanted };
        wanted.min(context)
    }

    /// Whether rows of the prefix cache may stand in for its own.
    fn may_reuse(&self) -> bool {
        self.pool
            .as_ref()
            .is_none_or(|pool| !pool.needs_every_row())
    }

    /// Tokens of the draft that is put by.
    pub(crate) fn n_put_by(&self) -> usize {
        self.put_by.as_ref().map_or(0, |put_by| put_by.draft.len())
    }

    /// Takes the draft up again that was put by, if one was: the round reaches the end of the text.
    pub(crate) fn take_up_draft(&mut self) {
        if let Some(put_by) = self.put_by.take() {
            self.draft = put_by.draft;
            self.draft_probs = put_by.probs;
            self.draft_forced = put_by.forced;
            self.guesser = put_by.guesser;
            self.n_guessed = put_by.n_guessed;
            self.n_asked = put_by.n_asked;
        }
    }

    /// Puts the draft by for the round that reaches the end of the text again.
    fn put_draft_by(&mut self) {
        // What the draft was cut by is not counted then.
        self.confidences.clear();
        self.cut_off = None;
        // A stream may be preempted again before it has come so far.
        self.put_by.get_or_insert_with(|| PutBy {
            draft: std::mem::take(&mut self.draft),
            probs: std::mem::take(&mut self.draft_probs),
            forced: std::mem::take(&mut self.draft_forced),
            guesser: self.guesser,
            n_guessed: self.n_guessed,
            n_asked: self.n_asked,
        });
    }
}

impl Speculator {
    /// Whether there are pages for the next round of `streams`, of which each runs `chunk` rows at most.
    /// What ended streams have left makes room. If there are too few, one of the streams has to be
    /// [preempted](Speculator::preempt), unless it is alone.
    pub fn make_room(&mut self, streams: &[&Stream], chunk: usize) -> bool {
        let lacks = |stream: &&Stream| {
            let sequence = &stream.state.sequence;
            let rows = sequence.len() + stream.next_chunk(chunk);
            let drafted = stream.draft.len().max(stream.n_put_by());
            sequence.lacking_pages(rows + drafted)
        };
        let wanted: usize = streams.iter().map(lacks).sum();
        while self.memory.n_free_full_pages() < wanted {
            if !self.evict(MemoryFull::Pages(wanted), None, &[]) {
                return false;
            }
        }
        self.make_room_for_heads(streams, chunk)
    }

    /// Whether a text of `rows` rows that would share `shared` of them with `running` streams has room
    /// beside these, with `more` rows for each of them to grow before anybody has to be preempted; no
    /// text grows past its `most` rows.
    pub fn has_room(
        &self,
        (rows, most, shared): (usize, usize, usize),
        running: &[&Stream],
        more: usize,
    ) -> bool {
        let page_rows = backend::PAGE_ROWS;
        let context = self.memory.size().context;
        let new = (rows + more).min(most).div_ceil(page_rows) - shared / page_rows;
        let grown = running.iter().map(|stream| {
            let rows = stream.tokens.len() + more;
            let rows = rows.min(stream.most_rows(context));
            stream.state.sequence.lacking_pages(rows)
        });
        let wanted = new + grown.sum::<usize>();
        let sequences = running.iter().map(|stream| &stream.state.sequence);
        wanted <= self.memory.full_pages_beside(sequences)
    }

    /// Takes from `stream`, which goes on later, all that it remembers: whole, for the prefix cache, if so
    /// in `keeps`, else nothing is left of it.
    ///
    /// # Panics
    ///
    /// If the stream has ended, or is preempted already.
    pub fn preempt(&mut self, stream: &mut Stream, keeps: bool) {
        assert!(
            stream.finish.is_none() && !stream.is_preempted(),
            "a stream that runs"
        );
        let (namespace, _) = self.index.text(stream.entry);
        let entry = std::mem::replace(&mut stream.entry, self.index.insert(namespace, []));
        let absent = StreamState {
            sequence: self.memory.absent(),
            heads: Vec::new(),
        };
        let state = std::mem::replace(&mut stream.state, absent);
        stream.put_draft_by();
        stream.stats.preemptions += 1;
        if keeps && !state.sequence.is_empty() {
            self.park_text(entry, state);
        } else {
            self.index.remove(entry);
        }
    }

    /// Has a preempted `stream` go on beside those of `running`, with what the prefix cache has of its
    /// text if it `reuses` that. The other rows run again in the next rounds.
    ///
    /// # Errors
    ///
    /// As [`Speculator::open`]; the stream is still preempted then.
    ///
    /// # Panics
    ///
    /// If the stream is not preempted.
    pub fn go_on(
        &mut self,
        stream: &mut Stream,
        reuses: bool,
        running: &[&Stream],
    ) -> Result<(), MemoryFull> {
        assert!(stream.is_preempted(), "a stream that is preempted");
        let prompt = self.text_so_far(stream);
        let keys = prompt.keys();
        let drafts = stream.options.draft.max() > 0;
        let state = match reuses && stream.may_reuse() {
            true => self.warm_state(&prompt, &keys, drafts, running)?,
            false => self.fresh_state(running)?,
        };
        self.index.extend(stream.entry, keys);
        let first = state.sequence.len();
        let due = |due: &&SnapshotDue| due.rows > first;
        stream.snapshots_due = stream.snapshots.iter().filter(due).copied().collect();
        stream.pool = stream.pool.as_ref().map(|pool| pool.afresh());
        stream.state = state;
        Ok(())
    }

    /// Prompt and text of `stream` so far, as the prompt that it goes on from.
    fn text_so_far(&self, stream: &Stream) -> Prompt {
        Prompt {
            tokens: stream.tokens.clone(),
            spans: stream.spans.clone(),
            namespace: self.index.text(stream.entry).0,
            marks: Vec::new(),
        }
    }

    /// How many of its rows a preempted `stream` could share with those of `running`.
    pub fn shared_of(&self, stream: &Stream, running: &[&Stream]) -> usize {
        let prompt = self.text_so_far(stream);
        let drafts = stream.options.draft.max() > 0;
        let shared = self.best_fork(running, &prompt, drafts);
        shared.map_or(0, |(_, rows)| rows)
    }
}
