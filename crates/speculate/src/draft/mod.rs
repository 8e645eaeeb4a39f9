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
use backend::{
    Backend, Batch, Chain, Link, NO_TOKEN, StepKey, Tensor, TokenChoice, TokenList, gives_token,
};
use cache::{Memory, MemoryFull, Sequence};
use models::{HeadLogits, Scored, Target};

/// A drafter without a model: it guesses from the text alone.
pub struct Plain {
    /// The drafter's name, as users type it and as records have it.
    pub name: &'static str,
    /// What it is, in a few words for a help text; empty if the name says it.
    pub help: &'static str,
    /// Makes one.
    pub new: fn() -> Box<dyn Drafter>,
}

/// Every drafter without a model that users can ask for; the first one drafts where no draft head
/// can be used.
pub const PLAIN: &[Plain] = &[ngram::PLAIN];

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

    /// Goes back from the first `from` rows of the sequence in `slot`, all of which it has
    /// learned, to the first `to`: another text goes on from there. The token after
    /// them is the same.
    fn rewind(&mut self, b: &dyn Backend, slot: usize, from: usize, to: usize);

    /// Whether it can.
    fn can_rewind(&self, slot: usize, to: usize) -> bool {
        let _ = (slot, to);
        true
    }

    /// Learns the rows that stay of a round, then drafts up to `limit` tokens for
    /// each request, in order. `hidden: [n, H]` are all of the round's rows.
    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>>;
}

/// A part of a draft through which the same requests want tokens.
struct Stretch<'a> {
    /// Of single steps.
    key: StepKey,
    /// Of a chain of them.
    chain: StepKey,
    /// A batch for each token, of a row for each of `active`. Only the first one's tokens
    /// are known; without rows, it scores what the stretch starts from.
    batches: Vec<Batch>,
    active: &'a [usize],
    /// The tokens that the head scores, if not all, and the same ones after each row.
    list: Option<&'a TokenList>,
    /// Its scores as a chain takes them, if not [`HeadLogits::logits`].
    link: Option<&'a LinkScores<'a>>,
}

/// Scores of some rows as a chain takes them, and their tokens where these depend on the
/// row.
type LinkScores<'a> = dyn Fn(&Tensor) -> (Tensor, Option<Tensor>) + 'a;

impl Stretch<'_> {
    /// Drafts a token a batch for each active request, from `x` on: in one go if the
    /// device can choose all of them, else step by step. Returns what the next stretch
    /// starts from.
    ///
    /// `forward` runs a step's rows and returns what is to be scored and, if that is
    /// something else, then what the next step starts from.
    fn draft<'h>(
        mut self,
        b: &dyn Backend,
        mut x: Tensor,
        forward: &mut dyn FnMut(&Batch, &Tensor) -> Vec<Tensor>,
        score: &dyn Fn(&Tensor) -> HeadLogits<'h>,
        (requests, drafts): (&mut [DraftRequest<'_>], &mut [Vec<u32>]),
        scratch: &mut Scratch,
    ) -> Tensor {
        if let Some(chained) = self.chained(b, &x, forward, score, requests, drafts) {
            for tokens in chained.tokens {
                for (&r, token) in self.active.iter().zip(tokens) {
                    drafts[r].push(token);
                }
            }
            return chained.next.unwrap_or(x);
        }
        for (i, batch) in self.batches.iter_mut().enumerate() {
            if i > 0 {
                let newest = |&r: &usize| newest(&drafts[r]).expect("chosen in the step before");
                batch.tokens = self.active.iter().map(newest).collect();
            }
            let mut z = None;
            if batch.n_rows() > 0 {
                let mut made = b.step(self.key, batch, &[&x], &mut |x| forward(batch, x[0]));
                x = made.pop().expect("a step makes something");
                z = made.pop();
            }
            let scored = score(z.as_ref().unwrap_or(&x));
            choose(b, &scored, self.active, requests, drafts, scratch);
        }
        x
    }

    /// All its tokens from a chain of steps that the device runs alone.
    fn chained<'h>(
        &self,
        b: &dyn Backend,
        x: &Tensor,
        forward: &mut dyn FnMut(&Batch, &Tensor) -> Vec<Tensor>,
        score: &dyn Fn(&Tensor) -> HeadLogits<'h>,
        requests: &[DraftRequest<'_>],
        drafts: &[Vec<u32>],
    ) -> Option<backend::Chained> {
        let choices: Option<Vec<Vec<TokenChoice>>> = (0..self.batches.len())
            .map(|i| choices(self.active, requests, drafts, i))
            .collect();
        let chain = Chain {
            key: self.chain,
            batches: &self.batches,
            choices: &choices?,
            list: self.list,
        };
        b.chain(&chain, x, &mut |_, batch, x| {
            let mut made = match batch.n_rows() {
                0 => Vec::new(),
                _ => forward(batch, x),
            };
            let next = made.pop();
            let z = made.pop();
            let z = z.as_ref().or(next.as_ref()).unwrap_or(x);
            let (logits, ids) = match self.link {
                Some(link) => link(z),
                None => (score(z).logits, None),
            };
            Link { logits, ids, next }
        })
    }
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
            let token = match scored.ids(i) {
                Some(ids) if best != NO_TOKEN => ids[best as usize],
                _ => best,
            };
            drafts[r].push(token);
        }
        return;
    }
    let list = match scored {
        Scored::All => Some(None),
        Scored::Same(list) => Some(Some(*list)),
        Scored::ByRow(_) => None,
    };
    let chosen =
        list.and_then(|list| b.choose_tokens(logits, list, &choices(active, requests, drafts, 0)?));
    if let Some(tokens) = chosen {
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
        if let Some(laws) = request.laws.as_mut().filter(|_| gives_token(row)) {
            let (sampling, history) = (request.sampling, &*request.history);
            laws.push(sample::law(sampling, history, scored.ids(i), row, scratch));
        }
        for _ in &drafts[r] {
            request.history.pop();
        }
        drafts[r].push(token);
    }
}

/// How the draft tokens of `active` are chosen once `later` more are drafted, if they
/// depend on nothing but their logits and nobody asks for their law.
fn choices(
    active: &[usize],
    requests: &[DraftRequest<'_>],
    drafts: &[Vec<u32>],
    later: usize,
) -> Option<Vec<TokenChoice>> {
    let choice = |&r: &usize| {
        let request = &requests[r];
        let position = (request.tokens.len() + drafts[r].len() + later) as u64;
        let choice = request.sampling.on_device(position)?;
        request.laws.is_none().then_some(choice)
    };
    active.iter().map(choice).collect()
}

/// The last token of `draft` as the next step reads it. After a row that gave no token the
/// rest of the draft does not count ([`NO_TOKEN`]), so any token will do.
fn newest(draft: &[u32]) -> Option<u32> {
    let known = |&token: &u32| if token == NO_TOKEN { 0 } else { token };
    draft.last().map(known)
}

/// Tokens that all of `active` want after `n` of them.
fn shortest(requests: &[DraftRequest<'_>], active: &[usize], n: usize) -> usize {
    let limits = active.iter().map(|&r| requests[r].limit);
    limits.min().map_or(0, |limit| limit - n)
}

/// The requests that still want a token after `n` of them.
fn wanting(requests: &[DraftRequest<'_>], n: usize) -> Vec<usize> {
    (0..requests.len())
        .filter(|&r| requests[r].limit > n)
        .collect()
}
