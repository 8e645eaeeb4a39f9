//! Drafts what followed the last time the text ended like this.

use super::ngram_index::NgramIndex;
use super::{Derived, DraftRequest, DraftState, Drafter, Plain, TargetView};
use backend::Tensor;
use cache::MemoryFull;

pub(super) const PLAIN: Plain = Plain {
    name: "ngram",
    help: "repetitions of the text",
    new: || Box::new(Ngram::new()),
};

/// The drafter that guesses what followed the last time the text ended like this. Its state is an
/// index of the text's n-grams.
#[derive(Debug, Default)]
pub struct Ngram;

impl Derived for NgramIndex {}

impl Ngram {
    /// A drafter for any target.
    pub fn new() -> Self {
        Ngram
    }
}

impl Drafter for Ngram {
    fn name(&self) -> &'static str {
        PLAIN.name
    }

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        Ok(Box::new(NgramIndex::default()))
    }

    fn draft(
        &mut self,
        _target: TargetView<'_>,
        _hidden: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let draft = |request: &mut DraftRequest<'_>| {
            let index = request.state.of::<NgramIndex>();
            for &token in &request.tokens[index.len()..] {
                index.push(token);
            }
            let mut draft = request.given.to_vec();
            draft.extend(index.propose_after(&draft, request.limit - draft.len()));
            draft
        };
        requests.iter_mut().map(draft).collect()
    }
}
