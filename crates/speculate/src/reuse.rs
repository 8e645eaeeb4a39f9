//! Reuse: a stream goes on from what an ended one has left.

use crate::speculator::Speculator;
use crate::stream::{Stream, StreamOptions};
use backend::PAGE_ROWS;
use cache::{MemoryFull, Sequence};

/// What is left of a stream: its text, and all that is remembered of it. A stream after a
/// prompt that begins like it can go on from there.
#[derive(Debug)]
pub struct Parked {
    sequence: Sequence,
    tokens: Vec<u32>,
    shown: usize,
    pages: usize,
}

impl Parked {
    /// Pages of keys and values of the target that it holds.
    pub fn n_pages(&self) -> usize {
        self.pages
    }
}

impl Speculator {
    /// Ends a stream and keeps what it remembers, which no failed round may have touched.
    pub fn park(&self, stream: Stream) -> Parked {
        Parked {
            pages: self.memory.pages_of(&stream.sequence),
            sequence: stream.sequence,
            tokens: stream.tokens,
            shown: stream.shown,
        }
    }

    /// Frees what is left of a stream.
    pub fn discard(&mut self, parked: Parked) {
        if let Some(drafter) = &mut self.drafter {
            drafter.close(parked.sequence.slot());
        }
        self.memory.close(parked.sequence);
    }

    /// Rows that a stream after `prompt` would find in `parked`; `drafts` as
    /// [`StreamOptions::draft`] says whether it will.
    pub fn reusable(&self, parked: &Parked, prompt: &[u32], drafts: bool) -> usize {
        let pairs = parked.tokens.iter().zip(prompt);
        let alike = pairs.take_while(|(a, b)| a == b).count();
        // The drafter's rows are of the token after them as well.
        let most = alike.saturating_sub(1);
        let most = match &self.drafter {
            Some(_) if drafts => most.min(parked.shown),
            _ => most,
        };
        let rows = self.memory.rewindable(&parked.sequence, most);
        let slot = parked.sequence.slot();
        let learned = rows.min(parked.shown);
        match &self.drafter {
            Some(drafter) if !drafter.can_rewind(slot, learned) => 0,
            _ => rows,
        }
    }

    /// Starts a stream after `prompt` with as many rows as are
    /// [reusable](Speculator::reusable) of `parked`, whose text is forgotten otherwise. It writes
    /// what one from [`Speculator::open`] would.
    ///
    /// # Errors
    ///
    /// [`MemoryFull::Context`] if the prompt does not fit; nothing is left then.
    ///
    /// # Panics
    ///
    /// As [`Speculator::open`].
    pub fn resume(
        &mut self,
        parked: Parked,
        prompt: Vec<u32>,
        options: StreamOptions,
    ) -> Result<Stream, MemoryFull> {
        if let Err(full) = self.check(&prompt) {
            self.discard(parked);
            return Err(full);
        }
        let drafts = options.draft.max() > 0;
        let rows = self.reusable(&parked, &prompt, drafts);
        let Parked {
            mut sequence,
            shown,
            ..
        } = parked;
        self.memory.rewind(&*self.b, &mut sequence, rows);
        let learned = shown.min(rows);
        if let Some(drafter) = &mut self.drafter {
            drafter.rewind(&*self.b, sequence.slot(), shown, learned);
        }
        Ok(self.start(sequence, learned, prompt, options))
    }
}

/// Fewest rows of a prompt that are worth a step of their own.
const LEAST_CHECKPOINT: usize = 128;

/// After how many rows of a prompt of `n` recurrent state is kept aside, for prompts that
/// begin like it: a little before its end, since its last tokens often are a template's way
/// to begin the reply, which a later turn writes in another way.
pub(crate) fn checkpoint(n: usize) -> usize {
    let rows = n.saturating_sub(16) / PAGE_ROWS * PAGE_ROWS;
    if rows < LEAST_CHECKPOINT { 0 } else { rows }
}
