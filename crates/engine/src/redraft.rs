//! Another drafter for a model that is loaded: its target stays where it is.

use crate::drafters::{self, pairing::Pairing};
use crate::error::EngineError;
use crate::hashes::Hashes;
use crate::info::Model;
use crate::options::{DraftChoice, LoadOptions};
use crate::source::{Source, quantized};
use speculate::Drafters;
use weights::Checkpoint;

impl Model {
    /// Every drafter that may fit the model, which was loaded from `source` with `options`: those
    /// that [`DraftChoice::Auto`] looks at, in its order, the first with n-grams beside it, then n-grams alone. Whether a
    /// head is whole and fits shows in [`redraft`](Model::redraft).
    ///
    /// # Errors
    ///
    /// [`EngineError`] if the model's files cannot be read.
    pub fn drafters(
        &self,
        source: &Source,
        options: &LoadOptions,
    ) -> Result<Vec<DraftChoice>, EngineError> {
        let checkpoint = quantized(source.checkpoint()?, options.quantize.as_ref())?;
        let mut hashes = Hashes::open(None);
        let pair = self.pairing(source, options, &checkpoint, &mut hashes)?;
        Ok(drafters::candidates(&pair))
    }

    /// Replaces the drafter by the one that `options` ask for. The model was loaded from `source`
    /// with the same options but for [`draft`](LoadOptions::draft) and
    /// [`draft_max`](LoadOptions::draft_max); it is not tried again.
    ///
    /// # Errors
    ///
    /// [`EngineError`] as of [`load`](crate::load); the model then has no drafter.
    pub fn redraft(&mut self, source: &Source, options: &LoadOptions) -> Result<(), EngineError> {
        options.check()?;
        self.discard_drafter();
        let checkpoint = quantized(source.checkpoint()?, options.quantize.as_ref())?;
        let mut hashes = Hashes::open(None);
        let mut pair = self.pairing(source, options, &checkpoint, &mut hashes)?;
        let found = drafters::find(&mut pair)?;
        self.speculator.backend().finish()?;
        self.speculator.replace_drafters(found.drafters);
        if options.draft.adds_ngrams() && self.speculator.drafter().is_some() {
            self.speculator.add_ngrams();
        }
        self.plans.extend(found.plans);
        let info = &mut self.info;
        info.drafter = self.speculator.drafter();
        info.drafters = self.speculator.drafters();
        info.drafter_reason = (options.words.drafter)(&found.reason);
        info.drafter_weight_bytes = found.weight_bytes;
        info.draft_vocab = found.shortlist;
        info.draft_max = options.draft_max;
        self.count_memory();
        Ok(())
    }

    /// Leaves the model without a drafter and without ended texts.
    pub(crate) fn discard_drafter(&mut self) {
        self.speculator.discard_all();
        self.speculator.replace_drafters(Drafters::none());
        self.plans.truncate(1);
        let info = &mut self.info;
        (info.drafter, info.drafter_weight_bytes) = (None, 0);
        info.drafters.clear();
        self.count_memory();
    }

    /// The target, for whoever looks for its drafter.
    fn pairing<'a>(
        &'a self,
        source: &'a Source,
        options: &'a LoadOptions,
        checkpoint: &'a Checkpoint,
        hashes: &'a mut Hashes,
    ) -> Result<Pairing<'a>, EngineError> {
        let mapped = self.info.weights == "mapped";
        checkpoint.keep_mapped(mapped);
        let shortlist = options.draft_vocab.ids(self.info.vocab_size, &self.text)?;
        Ok(Pairing {
            b: &**self.speculator.backend(),
            source,
            checkpoint,
            target: self.speculator.target(),
            tokenizer: &self.text.tokenizer,
            options,
            mapped,
            shortlist: shortlist.map(|chosen| chosen.ids),
            size: *self.speculator.memory().size(),
            budget: self.budget,
            beside: Vec::new(),
            hashes,
        })
    }
}
