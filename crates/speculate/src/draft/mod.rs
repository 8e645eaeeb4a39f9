//! Drafters: whatever guesses ahead of the target.
//!
//! A drafter sees every row that stays, prompt rows and accepted rows alike, with
//! the target's true hidden row and the token that followed; then it guesses.
//! What it guesses can cost time, never change a token.

mod assistant;
mod chained;
mod coverage;
mod forced;
mod ngram;
mod ngram_index;

pub use assistant::Assistant;
pub use chained::Chained;
pub use forced::Forced;
pub use ngram::Ngram;

use crate::sample::{self, History, Law, Sampling, Scratch};
use backend::{Backend, Tensor, TokenChoice};
use cache::{Memory, MemoryFull, Sequence};
use models::{HeadLogits, Scored, Target};

/// The target as a drafter may use it.
#[derive(Clone, Copy)]
pub struct TargetView<'a> {
    /// Where it runs.
    pub b: &'a dyn Backend,
    /// The model.
    pub model: &'a dyn Target,
    /// What it remembers.
    pub memory: &'a Memory,
    /// The round's rows inside it, `[n, H]` for each of [`Drafter::taps`].
    pub taps: &'a [Tensor],
}

/// One stream's wish for a draft, after a round.
pub struct DraftRequest<'a> {
    /// The target's sequence.
    pub sequence: &'a Sequence,
    /// The stream's text: every token known, the pending one last.
    pub tokens: &'a [u32],
    /// The rows of the round's hidden rows that stay, ascending. The last one is
    /// cache row `sequence.len() - 1`; after each comes its token in `tokens`.
    pub kept: std::ops::Range<usize>,
    /// Tokens wanted, at most; 0 while the prompt is not finished.
    pub limit: usize,
    /// How the stream samples.
    pub sampling: &'a Sampling,
    /// Its token counts, `tokens` included. Whatever is pushed is popped again.
    pub history: &'a mut History,
    /// Takes the law that each token of the draft is drawn from, if it is wanted. A
    /// drafter that could not have drawn another token leaves it empty.
    pub laws: Option<&'a mut Vec<Law>>,
}

impl DraftRequest<'_> {
    /// The cache row of the first row that stays.
    fn first_row(&self) -> usize {
        self.sequence.len() - self.kept.len()
    }

    /// The tokens that followed the rows that stay.
    fn following(&self) -> &[u32] {
        &self.tokens[self.first_row() + 1..=self.sequence.len()]
    }
}

/// Whatever guesses ahead of the target.
pub trait Drafter: Send {
    /// Name, as users type it.
    fn name(&self) -> &'static str;

    /// The target's layers whose entering rows it reads ([`models::Taps`]), the same
    /// in every round.
    fn taps(&self) -> &[usize] {
        &[]
    }

    /// Starts a sequence in `slot`.
    ///
    /// # Errors
    ///
    /// [`MemoryFull`] if the drafter's own memory has no room.
    fn open(&mut self, slot: usize) -> Result<(), MemoryFull>;

    /// Forgets the sequence in `slot`.
    fn close(&mut self, slot: usize);

    /// Learns the rows that stay of a round, then drafts up to `limit` tokens for
    /// each request, in order. `hidden: [n, H]` are all of the round's rows.
    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>>;
}

/// Chooses the next draft token of each of `active` with the noise the target
/// will use, and remembers it. Row `i` of `scored` belongs to request `active[i]`.
fn choose(
    b: &dyn Backend,
    scored: &HeadLogits<'_>,
    active: &[usize],
    requests: &mut [DraftRequest<'_>],
    drafts: &mut [Vec<u32>],
    scratch: &mut Scratch,
) {
    let HeadLogits { logits, scored } = scored;
    let by_row = matches!(scored, Scored::ByRow(_));
    let greedy = !by_row
        && active
            .iter()
            .all(|&r| requests[r].sampling.is_plain_greedy());
    if greedy {
        for (i, (&r, best)) in active.iter().zip(b.argmax(logits)).enumerate() {
            let token = scored.ids(i).map_or(best, |ids| ids[best as usize]);
            drafts[r].push(token);
        }
        return;
    }
    if let Some(tokens) = chosen(b, logits, scored, active, requests, drafts) {
        for (&r, token) in active.iter().zip(tokens) {
            drafts[r].push(token);
        }
        return;
    }
    let scores = b.download(logits);
    for (i, (&r, row)) in active
        .iter()
        .zip(scores.chunks_exact(logits.cols()))
        .enumerate()
    {
        let request = &mut requests[r];
        let position = (request.tokens.len() + drafts[r].len()) as u64;
        for &token in &drafts[r] {
            request.history.push(token);
        }
        let token = match scored.ids(i) {
            None => sample::choose(request.sampling, request.history, position, row, scratch),
            Some(ids) => sample::choose_among(
                request.sampling,
                request.history,
                position,
                ids,
                row,
                scratch,
            ),
        };
        if let Some(laws) = &mut request.laws {
            let (sampling, history) = (request.sampling, &*request.history);
            laws.push(sample::law(sampling, history, scored.ids(i), row, scratch));
        }
        for _ in &drafts[r] {
            request.history.pop();
        }
        drafts[r].push(token);
    }
}

/// The next draft tokens, if the device can choose them: among the whole vocabulary.
fn chosen(
    b: &dyn Backend,
    logits: &Tensor,
    scored: &Scored<'_>,
    active: &[usize],
    requests: &[DraftRequest<'_>],
    drafts: &[Vec<u32>],
) -> Option<Vec<u32>> {
    let choice = |&r: &usize| {
        let request: &DraftRequest<'_> = &requests[r];
        let position = (request.tokens.len() + drafts[r].len()) as u64;
        let choice = request.sampling.on_device(position)?;
        request.laws.is_none().then_some(choice)
    };
    let choices: Option<Vec<TokenChoice>> = active.iter().map(choice).collect();
    let choices = choices.filter(|_| matches!(scored, Scored::All))?;
    b.choose_tokens(logits, &choices)
}

/// The requests that still want a token after `n` of them.
fn wanting(requests: &[DraftRequest<'_>], n: usize) -> Vec<usize> {
    (0..requests.len())
        .filter(|&r| requests[r].limit > n)
        .collect()
}
