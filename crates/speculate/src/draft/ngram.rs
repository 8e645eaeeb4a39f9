//! Drafts what followed the last time the text ended like this.

use super::ngram_index::NgramIndex;
use super::{DraftRequest, Drafter, Plain, TargetView};
use backend::{Backend, Tensor};
use cache::MemoryFull;

pub(super) const PLAIN: Plain = Plain {
    name: "ngram",
    help: "repetitions of the text",
    new: || Box::new(Ngram::new()),
};

/// The drafter that guesses what followed the last time the text ended like this.
#[derive(Default)]
pub struct Ngram {
    /// By the target's slot.
    indexes: Vec<Option<NgramIndex>>,
}

impl Ngram {
    /// A drafter for any target.
    pub fn new() -> Self {
        Ngram::default()
    }
}

impl Drafter for Ngram {
    fn name(&self) -> &'static str {
        PLAIN.name
    }

    fn open(&mut self, slot: usize) -> Result<(), MemoryFull> {
        if self.indexes.len() <= slot {
            self.indexes.resize_with(slot + 1, || None);
        }
        self.indexes[slot] = Some(NgramIndex::default());
        Ok(())
    }

    fn close(&mut self, slot: usize) {
        self.indexes[slot] = None;
    }

    fn rewind(&mut self, _b: &dyn Backend, slot: usize, _from: usize, _to: usize) {
        self.indexes[slot] = Some(NgramIndex::default());
    }

    fn draft(
        &mut self,
        _target: TargetView<'_>,
        _hidden: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let draft = |request: &mut DraftRequest<'_>| {
            let index = self.indexes[request.sequence.slot()]
                .as_mut()
                .expect("opened with the stream");
            for &token in &request.tokens[index.len()..] {
                index.push(token);
            }
            index.propose(request.limit)
        };
        requests.iter_mut().map(draft).collect()
    }
}
