//! A target, its drafters, and what they remember.

use crate::accept::Accept;
use crate::draft::Drafters;
use crate::kept::Kept;
use crate::length::Lengths;
use crate::prompt::Prompt;
use crate::sample::Scratch;
use crate::saved::Restoring;
use crate::step::Watch;
use crate::stream::{Stream, StreamOptions, StreamState};
use crate::told::Told;
use backend::{Backend, Batch, ExpertMarks, StepKey};
use cache::{Memory, MemoryFull, MemoryPlan, MemorySize, PrefixIndex, RowKey};
use models::Target;
use std::sync::Arc;

/// A target, its drafters, and what they remember.
pub struct Speculator {
    pub(crate) b: Arc<dyn Backend>,
    pub(crate) target: Box<dyn Target>,
    pub(crate) drafters: Drafters,
    pub(crate) lengths: Lengths,
    pub(crate) accept: Accept,
    pub(crate) memory: Memory,
    /// All texts, running or ended, by what their rows are computed from.
    pub(crate) index: PrefixIndex,
    /// What ended streams have left.
    pub(crate) kept: Kept,
    /// Which pages somebody was told of.
    pub(crate) told: Told,
    /// An ended text that is being restored.
    pub(crate) restoring: Option<Restoring>,
    pub(crate) batch: Batch,
    /// Which experts the rows of the last step have chosen, if the device has told.
    pub(crate) marks: ExpertMarks,
    /// Embeddings of the batch's media rows, one after the other.
    pub(crate) embeddings: Vec<f32>,
    pub(crate) scratch: Scratch,
    pub(crate) key: StepKey,
    /// Whether the last round ran steps that the device ran for the first times, which take longer than later ones.
    pub(crate) ran_first: bool,
    /// What the last step did, if steps are watched.
    pub(crate) watch: Watch,
}

impl Speculator {
    /// Puts the parts together. `memory` is planned by the target; a head alone is
    /// `Option<Box<dyn Drafter>>`, others are [`Drafters`].
    pub fn new(
        b: Arc<dyn Backend>,
        target: Box<dyn Target>,
        memory: Memory,
        drafters: impl Into<Drafters>,
    ) -> Self {
        let lengths = Lengths::on_device(b.capabilities().records);
        Speculator {
            b,
            target,
            drafters: drafters.into(),
            lengths,
            accept: Accept::Exact,
            kept: Kept::new(&memory),
            memory,
            told: Told::default(),
            restoring: None,
            index: PrefixIndex::new(),
            batch: Batch::default(),
            marks: ExpertMarks::default(),
            embeddings: Vec::new(),
            scratch: Scratch::default(),
            key: StepKey::fresh(),
            ran_first: false,
            watch: Watch::default(),
        }
    }

    /// The model whose output counts.
    pub fn target(&self) -> &dyn Target {
        &*self.target
    }

    /// Whether the device has [recorded](backend::Record::is_recorded) the step that verifies `rows` rows of `streams`
    /// streams.
    pub fn is_recorded(&self, rows: usize, streams: usize) -> bool {
        self.b.is_recorded(self.key.part("verify"), rows, streams)
    }

    /// The device that the target runs on.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.b
    }

    /// The target's memory of all streams.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The drafter's name, if there is one: the first head's, whoever guesses beside it.
    pub fn drafter(&self) -> Option<&'static str> {
        self.drafters().first().copied()
    }

    /// Whether a drafter with a model of its own may guess, so that a round spends time on drafting.
    pub fn has_head(&self) -> bool {
        self.n_heads() > 0
    }

    /// The names of all that may guess: of the heads, by their numbers, then that of n-grams.
    pub fn drafters(&self) -> Vec<&'static str> {
        self.drafters.names()
    }

    /// Heads that may guess.
    pub fn n_heads(&self) -> usize {
        self.drafters.heads.len()
    }

    /// Lets the n-grams of each text guess from now on, beside the heads if there are any.
    pub fn add_ngrams(&mut self) {
        self.drafters.copies = true;
    }

    /// How it is decided which drafted tokens stay, of streams that do not [say it themselves](Stream::accept_by).
    pub fn accept(&self) -> Accept {
        self.accept
    }

    /// Decides by `accept` which drafted tokens of streams stay that are started from now on.
    #[must_use]
    pub fn accepting(mut self, accept: Accept) -> Self {
        self.accept = accept;
        self
    }

    /// Lets `drafters` draft from now on.
    ///
    /// # Panics
    ///
    /// If a stream is open or parked: the drafter would not have seen its rows.
    pub fn replace_drafters(&mut self, drafters: impl Into<Drafters>) {
        let is_idle = self.memory.n_open() == 0 && self.kept.texts.is_empty();
        self.restoring = None;
        assert!(is_idle, "no stream is open or parked");
        self.drafters = drafters.into();
        // A step makes the rows that heads read, so others are other steps.
        self.key = StepKey::fresh();
        // The old ones' guesses say nothing of what the new ones' are worth.
        self.lengths = Lengths::default();
    }

    /// Remembers as much as `size` says from now on, of the target alone: drafters have memories of their own,
    /// and are [replaced](Speculator::replace_drafters) before.
    ///
    /// # Panics
    ///
    /// If a stream is open or parked, or pages or slots do not [have numbers](Memory::has_numbers).
    pub fn resize(&mut self, size: MemorySize) {
        let is_idle = self.memory.n_open() == 0 && self.kept.texts.is_empty();
        assert!(is_idle, "no stream is open or parked");
        // What there was goes first: there may not be room for both.
        self.memory = Memory::new(&*self.b, MemoryPlan::default(), size);
        self.memory = Memory::new(&*self.b, self.target.plan(), size);
        self.kept = Kept::new(&self.memory);
        self.restoring = None;
        // Recorded steps are about the old memory.
        self.key = StepKey::fresh();
    }

    /// Starts a stream after `prompt`, all of whose rows are to be run.
    ///
    /// # Errors
    ///
    /// [`MemoryFull::Context`] if the prompt does not fit, [`MemoryFull::Span`] if the rows of one of
    /// its media spans see each other and do not fit a step, [`MemoryFull::Sequences`] if too many streams are open.
    ///
    /// # Panics
    ///
    /// If the prompt is empty, names a token outside the vocabulary, or has embeddings of another
    /// width than the target's.
    pub fn open(
        &mut self,
        prompt: impl Into<Prompt>,
        options: StreamOptions,
    ) -> Result<Stream, MemoryFull> {
        self.start_afresh(prompt, options, &[])
    }

    /// Ends a stream and frees what nobody else owns of what it remembers.
    pub fn close(&mut self, stream: Stream) {
        self.index.remove(stream.entry);
    }

    /// The state of a new text. Where there is no room for it, what ended streams have left goes,
    /// and then the snapshots of `running` ones.
    pub(crate) fn fresh_state(&mut self, running: &[&Stream]) -> Result<StreamState, MemoryFull> {
        let sequence = self.with_room(None, running, |this| this.memory.open())?;
        let heads = self.drafters.heads.iter().map(|head| head.state());
        let heads = heads.collect::<Result<_, _>>()?;
        Ok(StreamState { sequence, heads })
    }

    /// Checks what [`Speculator::open`] says of prompts.
    pub(crate) fn check(&self, prompt: &Prompt) -> Result<(), MemoryFull> {
        assert!(!prompt.tokens.is_empty(), "a prompt has at least one token");
        let vocab = self.target.vocab_size();
        assert!(
            prompt.tokens.iter().all(|&t| (t as usize) < vocab),
            "prompt tokens are in the vocabulary"
        );
        assert!(
            prompt.spans.are_as_wide_as(self.target.hidden_size()),
            "embeddings of media are as wide as the target's rows"
        );
        let size = self.memory.size();
        if prompt.tokens.len() > size.context {
            return Err(MemoryFull::Context(size.context));
        }
        let rows = prompt.spans.longest();
        if self.target.media_rows().see_their_span && rows > size.step_rows {
            let most = size.step_rows;
            return Err(MemoryFull::Span { rows, most });
        }
        Ok(())
    }

    /// A stream after `prompt`, whose rows have `keys`, of which `state` remembers the first.
    pub(crate) fn begin(
        &mut self,
        state: StreamState,
        keys: Vec<RowKey>,
        prompt: Prompt,
        options: StreamOptions,
    ) -> Stream {
        let entry = self.index.insert(prompt.namespace, keys);
        let rule = self.target.media_rows();
        let mut stream = Stream::new(state, entry, prompt, options, &self.memory, rule);
        stream.accept_by(self.accept);
        stream
    }
}
