//! Drafts whatever a function says: for tests that want a draft to be right,
//! wrong, or both.

use super::{DraftRequest, Drafter, HiddenRows, TargetView};

/// A drafter that asks `guess(tokens, limit)`.
pub struct Forced<F> {
    guess: F,
}

impl<F: FnMut(&[u32], usize) -> Vec<u32> + Send> Forced<F> {
    /// Drafts the first `limit` tokens of what `guess` returns.
    pub fn new(guess: F) -> Self {
        Forced { guess }
    }
}

impl<F: FnMut(&[u32], usize) -> Vec<u32> + Send> Drafter for Forced<F> {
    fn name(&self) -> &'static str {
        "forced"
    }

    fn needs_all_hidden(&self) -> bool {
        false
    }

    fn draft(
        &mut self,
        _target: TargetView<'_>,
        _hidden: &HiddenRows,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        let draft = |request: &mut DraftRequest<'_>| {
            let mut draft = (self.guess)(request.tokens, request.limit);
            draft.truncate(request.limit);
            draft
        };
        requests.iter_mut().map(draft).collect()
    }
}
