//! What follows from the trials of a model's drafters: which of them may draft.

use super::Remembered;
use crate::error::{DrafterReason, EngineError};
use crate::options::LoadOptions;
use crate::preflight::{self, HeadPreflight, Key, Preflight};
use speculate::Drafters;
use speculate::draft::NGRAM;
use text::Text;

impl Remembered {
    /// Lets the drafter go if the trial says that it must not draft.
    ///
    /// # Errors
    ///
    /// [`EngineError::NoDrafter`] if it was asked for by name.
    pub(super) fn settle(
        &mut self,
        preflight: &mut Preflight,
        options: &LoadOptions,
    ) -> Result<(), EngineError> {
        let Some((drafter, result)) = self.speculator.drafter().zip(preflight.result()) else {
            return Ok(());
        };
        let origin = self.found.reason.origin();
        let (refusal, is_inexact) = (result.refusal(drafter, &origin), result.is_inexact());
        if let Some(refusal) = refusal {
            if let Some(asked) = options.draft.asked() {
                return Err(EngineError::NoDrafter {
                    asked,
                    reason: DrafterReason::Failed(refusal),
                });
            }
            let falls_back = !is_inexact && drafter != NGRAM;
            self.speculator.replace_drafters(match falls_back {
                true => Drafters::ngrams(),
                false => Drafters::none(),
            });
            self.plans.truncate(1);
            (self.found.shortlist, self.found.weight_bytes) = (None, 0);
            self.found.reason = DrafterReason::Failed(refusal);
        }
        let warning = result.warning();
        preflight.warnings.extend(warning);
        Ok(())
    }

    /// Tries each head beside the first one, all of which were asked for by name; `key` is that of the first.
    ///
    /// # Errors
    ///
    /// [`EngineError::NoDrafter`] if one must not draft.
    pub(super) fn try_others(
        &mut self,
        preflight: &mut Preflight,
        text: &Text,
        options: &LoadOptions,
        key: Key<'_>,
    ) -> Result<(), EngineError> {
        for (i, other) in self.found.others.iter().enumerate() {
            let key = Key {
                drafter: other.sha256.as_deref(),
                drafter_kind: Some(other.name),
                draft_vocab: other.shortlist,
                ..key
            };
            let speculator = &mut self.speculator;
            let trial = preflight::run(speculator, text, &options.probing, 1 + i, &key)?;
            if let Some(result) = trial.result() {
                if let Some(refusal) = result.refusal(other.name, &other.origin) {
                    return Err(EngineError::NoDrafter {
                        asked: other.name,
                        reason: DrafterReason::Failed(refusal),
                    });
                }
                let warning = result.warning();
                let warning = warning.map(|warning| format!("{}: {warning}", other.name));
                preflight.warnings.extend(warning);
            }
            preflight.others.push(HeadPreflight {
                drafter: other.name,
                drafter_sha256: other.sha256.clone(),
                head: other.census.clone(),
                trial,
            });
        }
        Ok(())
    }
}
