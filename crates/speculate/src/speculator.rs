//! A target, its drafter, and what they remember.

use crate::accept::Accept;
use crate::draft::Drafter;
use crate::length::{Ledger, Lengths};
use crate::reuse::checkpoint;
use crate::sample::{History, Scratch};
use crate::stats::Stats;
use crate::stream::{Finish, Stream, StreamOptions};
use backend::{Backend, Batch, StepKey};
use cache::{Memory, MemoryFull, Sequence};
use models::Target;
use std::sync::Arc;

/// A target, its drafter, and what they remember.
pub struct Speculator {
    pub(crate) b: Arc<dyn Backend>,
    pub(crate) target: Box<dyn Target>,
    pub(crate) drafter: Option<Box<dyn Drafter>>,
    pub(crate) lengths: Lengths,
    pub(crate) accept: Accept,
    pub(crate) memory: Memory,
    pub(crate) batch: Batch,
    pub(crate) scratch: Scratch,
    pub(crate) key: StepKey,
}

impl Speculator {
    /// Puts the parts together. `memory` is planned by the target.
    pub fn new(
        b: Arc<dyn Backend>,
        target: Box<dyn Target>,
        memory: Memory,
        drafter: Option<Box<dyn Drafter>>,
    ) -> Self {
        Speculator {
            b,
            target,
            drafter,
            lengths: Lengths::default(),
            accept: Accept::Exact,
            memory,
            batch: Batch::default(),
            scratch: Scratch::default(),
            key: StepKey::fresh(),
        }
    }

    /// The model whose output counts.
    pub fn target(&self) -> &dyn Target {
        &*self.target
    }

    /// Where it all runs.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.b
    }

    /// What the target remembers.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// The drafter's name, if there is one.
    pub fn drafter(&self) -> Option<&'static str> {
        self.drafter.as_ref().map(|d| d.name())
    }

    /// How it is decided which drafted tokens stay.
    pub fn accept(&self) -> Accept {
        self.accept
    }

    /// Decides from now on by `accept` which drafted tokens stay.
    #[must_use]
    pub fn accepting(mut self, accept: Accept) -> Self {
        self.accept = accept;
        self
    }

    /// Lets `drafter` draft from now on, or nobody.
    ///
    /// # Panics
    ///
    /// If a stream is open: its drafter would not have seen its rows.
    pub fn replace_drafter(&mut self, drafter: Option<Box<dyn Drafter>>) {
        assert_eq!(self.memory.pages_used().0, 0, "no stream is open");
        self.drafter = drafter;
        // What the old one's guesses were worth says nothing of the new one's.
        self.lengths = Lengths::default();
    }

    /// Starts a stream after `prompt`.
    ///
    /// # Errors
    ///
    /// [`MemoryFull::Context`] if the prompt does not fit,
    /// [`MemoryFull::Sequences`] if too many streams are open.
    ///
    /// # Panics
    ///
    /// If the prompt is empty or names a token outside the vocabulary.
    pub fn open(&mut self, prompt: Vec<u32>, options: StreamOptions) -> Result<Stream, MemoryFull> {
        self.check(&prompt)?;
        let sequence = self.memory.open()?;
        if let Some(drafter) = &mut self.drafter
            && let Err(full) = drafter.open(sequence.slot())
        {
            self.memory.close(sequence);
            return Err(full);
        }
        Ok(self.start(sequence, 0, prompt, options))
    }

    pub(crate) fn check(&self, prompt: &[u32]) -> Result<(), MemoryFull> {
        assert!(!prompt.is_empty(), "a prompt has at least one token");
        let vocab = self.target.vocab_size();
        assert!(
            prompt.iter().all(|&t| (t as usize) < vocab),
            "prompt tokens are in the vocabulary"
        );
        let context = self.memory.size().context;
        if prompt.len() > context {
            return Err(MemoryFull::Context(context));
        }
        Ok(())
    }

    /// A stream after `prompt`, whose first rows `sequence` remembers, and of whose rows
    /// the drafter has learned `shown`.
    pub(crate) fn start(
        &self,
        sequence: Sequence,
        shown: usize,
        prompt: Vec<u32>,
        options: StreamOptions,
    ) -> Stream {
        let reused = sequence.len();
        let checkpoint = checkpoint(prompt.len());
        let keeps_states = !self.memory.delta.is_empty() && checkpoint > reused;
        Stream {
            sequence,
            reused,
            shown,
            checkpoint: keeps_states.then_some(checkpoint),
            n_prompt: prompt.len(),
            draft: Vec::new(),
            laws: Vec::new(),
            logprobs: Vec::new(),
            history: History::new(&options.sampling, &prompt),
            finish: if options.max_tokens == 0 || prompt.len() >= self.memory.size().context {
                Some(Finish::Length)
            } else {
                None
            },
            stats: Stats::default(),
            ledger: Ledger::default(),
            tokens: prompt,
            options,
        }
    }

    /// Ends a stream and frees what it remembers.
    pub fn close(&mut self, stream: Stream) {
        self.discard(self.park(stream));
    }
}
