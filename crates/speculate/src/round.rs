//! The round.
//!
//! ```text
//! rows     = tokens not remembered yet, then the draft
//! hidden   = target(rows)                                        verify
//! y_i      = choice after the last known token and draft[..i]
//! a        = length of the draft's prefix that equals y          accept
//! text    += y_0 .. y_a
//! memory  -= rows after the accepted ones                        rollback
//! draft    = drafter(rows that stay)                             draft
//! ```
//!
//! The tokens not remembered yet are the prompt, or a chunk of it, or the one
//! pending token. A chunk that does not reach the prompt's end chooses nothing.

use crate::accept::{Accept, accept_with, residual};
use crate::draft::{DraftRequest, TargetView};
use crate::length::{LengthInput, RoundCost};
use crate::logprobs::Logprobs;
use crate::sample;
use crate::speculator::Speculator;
use crate::stream::{Finish, Stream};
use backend::{DeviceError, NO_TOKEN, Tensor, TokenChoice, gives_token};
use cache::MemoryFull;
use models::Taps;
use std::time::Instant;

/// Why a round failed. The streams in it cannot go on.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RoundError {
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A sequence found no room.
    #[error(transparent)]
    Memory(#[from] MemoryFull),
    /// A target's logits [give no token](backend::gives_token). A round says so of a stream
    /// alone ([`Finish::NoToken`]).
    #[error("{NO_TOKEN_REASON}")]
    NoToken,
}

/// What is wrong where logits [give no token](backend::gives_token).
pub const NO_TOKEN_REASON: &str = "the model computed a value that is not a number; \
    the checkpoint may be damaged: fetch or convert it again";

impl Speculator {
    /// One round for all of `streams`; none of them may have ended. Each runs at
    /// most `chunk` rows of its prompt.
    ///
    /// # Errors
    ///
    /// [`RoundError`]; the streams must then be closed.
    ///
    /// # Panics
    ///
    /// If a stream has ended, or `chunk` is 0.
    pub fn round(&mut self, streams: &mut [&mut Stream], chunk: usize) -> Result<(), RoundError> {
        assert!(
            chunk > 0 && streams.iter().all(|s| s.finish.is_none()),
            "streams that go on, and rows for them"
        );
        let start = Instant::now();
        let shares = self.gather(streams, chunk)?;
        let b = &*self.b;
        let wanted: Vec<usize> = shares.iter().flat_map(Share::choosing).collect();
        let all = wanted.len() == self.batch.n_rows();
        let key = self.key.part(if all { "verify" } else { "prefill" });
        let (target, batch, memory) = (&*self.target, &self.batch, &mut self.memory);
        let tapped = self.drafter.as_ref().map_or(&[][..], |d| d.taps());
        let mut made = b.step(key, batch, &[], &mut |_| {
            let mut taps = Taps::new(tapped);
            let hidden = target.forward_tapped(b, batch, memory, &mut taps);
            let logits = all.then(|| target.logits(b, &hidden));
            let kept = [hidden].into_iter().chain(taps.into_rows());
            kept.chain(logits).collect()
        });
        let logits = if all { made.pop() } else { None };
        let taps = made.split_off(1);
        let hidden = made.pop().expect("a step's hidden rows");
        let logits = logits.or_else(|| {
            (!wanted.is_empty()).then(|| target.logits(b, &b.gather(&hidden, &wanted)))
        });
        // Asked for before the wait, so that a device goes on with it at once.
        let chosen = logits
            .as_ref()
            .and_then(|logits| self.chosen(streams, &shares, logits));
        self.b.finish()?;
        if let Some(logits) = &logits {
            self.choose(streams, &shares, logits, chosen.as_deref());
            self.judge(streams, &shares, logits)?;
        }
        for (stream, share) in streams.iter_mut().zip(&shares) {
            // A chosen token is pending: known, not remembered.
            let len = if stream.finish == Some(Finish::NoToken) {
                stream.tokens.len()
            } else if share.ends {
                stream.tokens.len() - 1
            } else {
                share.first + share.known
            };
            self.memory.truncate(&mut stream.sequence, len);
            if stream.checkpoint == Some(len) {
                self.memory.checkpoint(&*self.b, &mut stream.sequence);
            }
        }
        let verify = start.elapsed();
        let asked = self.draft(streams, &shares, &hidden, &taps)?;
        let draft = start.elapsed() - verify;
        for (stream, share) in streams.iter_mut().zip(&shares) {
            let stats = &mut stream.stats;
            if share.first < stream.n_prompt {
                stats.prefill += verify + draft;
            } else {
                stats.verify += verify;
                stats.draft += draft;
            }
        }
        if streams
            .iter()
            .zip(&shares)
            .all(|(s, share)| share.first >= s.n_prompt)
        {
            let cost = RoundCost {
                streams: streams.len(),
                rows: self.batch.n_rows(),
                context: streams.iter().map(|s| s.tokens.len()).max().unwrap_or(0),
                asked,
                verify,
                draft,
            };
            self.lengths.took(&cost);
            for (stream, share) in streams.iter_mut().zip(&shares) {
                let emitted = stream.tokens.len() - share.first - share.known;
                self.lengths.book(&mut stream.ledger, &cost, emitted);
            }
        }
        Ok(())
    }

    /// Collects the round's rows.
    fn gather(
        &mut self,
        streams: &mut [&mut Stream],
        chunk: usize,
    ) -> Result<Vec<Share>, MemoryFull> {
        self.batch.clear();
        let mut shares = Vec::with_capacity(streams.len());
        for stream in streams {
            let first = stream.sequence.len();
            let due = stream.checkpoint.map_or(0, |at| at.saturating_sub(first));
            let due = if due > 0 { due } else { usize::MAX };
            let known = (stream.tokens.len() - first).min(chunk).min(due);
            let ends = first + known == stream.tokens.len();
            if !ends {
                stream.draft.clear();
            }
            let row = self.batch.n_rows();
            let mut tokens = stream.tokens[first..first + known].to_vec();
            tokens.extend_from_slice(&stream.draft);
            self.memory
                .push(&mut self.batch, &mut stream.sequence, &tokens, known)?;
            shares.push(Share {
                row,
                first,
                known,
                drafted: stream.draft.len(),
                ends,
            });
        }
        Ok(shares)
    }

    /// Chooses, unless the device has `chosen`, and accepts. The rows of `logits` are
    /// those of [`Share::choosing`], one stream after the other.
    fn choose(
        &mut self,
        streams: &mut [&mut Stream],
        shares: &[Share],
        logits: &Tensor,
        chosen: Option<&[u32]>,
    ) {
        let scores = match chosen {
            Some(_) => Default::default(),
            None => self.b.download(logits),
        };
        let cols = logits.cols();
        let context = self.memory.size().context;
        let mut row = 0;
        for (stream, share) in streams
            .iter_mut()
            .zip(shares)
            .filter(|(_, share)| share.ends)
        {
            let left = stream.left(context);
            let Stream {
                tokens,
                draft,
                laws,
                history,
                options,
                stats,
                ledger,
                finish,
                n_prompt,
                ..
            } = &mut **stream;
            let known = tokens.len();
            let scratch = &mut self.scratch;
            let verdict = accept_with(draft, |i| {
                if i > 0 {
                    history.push(draft[i - 1]);
                }
                if let Some(chosen) = chosen {
                    return chosen[row + i];
                }
                let scores = &scores[(row + i) * cols..(row + i + 1) * cols];
                let sampling = &options.sampling;
                if let Some(&drafted) = draft.get(i)
                    && self.accept.with(sampling) == Accept::Residual
                    && gives_token(scores)
                {
                    let target = sample::law(sampling, history, None, scores, scratch);
                    let position = (known + i) as u64;
                    return residual(drafted, &target, laws.get(i), sampling.seed, position);
                }
                sample::choose(
                    &options.sampling,
                    history,
                    (known + i) as u64,
                    scores,
                    scratch,
                )
            });
            if verdict.pending != NO_TOKEN {
                history.push(verdict.pending);
            }
            row += share.drafted + 1;

            for &token in draft[..verdict.n_accepted]
                .iter()
                .chain([&verdict.pending])
                .take(left)
            {
                if token == NO_TOKEN {
                    *finish = Some(Finish::NoToken);
                    break;
                }
                tokens.push(token);
                if options.stop_tokens.contains(&token) {
                    *finish = Some(Finish::Stop);
                    break;
                }
            }
            if finish.is_none() && tokens.len() == known + left {
                *finish = Some(Finish::Length);
            }
            stats.emitted += (tokens.len() - known) as u64;
            if share.first >= *n_prompt {
                stats.rounds += 1;
                stats.count(share.drafted, verdict.n_accepted);
                self.lengths
                    .verified(ledger, share.drafted, verdict.n_accepted);
            }
        }
    }

    /// Adds what the rows of `logits` say of the tokens that were just chosen after them,
    /// where a stream wants to know.
    fn judge(
        &self,
        streams: &mut [&mut Stream],
        shares: &[Share],
        logits: &Tensor,
    ) -> Result<(), DeviceError> {
        let mut asked = Vec::new();
        let mut most = 0;
        let mut row = 0;
        for (stream, share) in streams.iter().zip(shares).filter(|(_, share)| share.ends) {
            if let Some(top) = stream.options.logprobs {
                most = most.max(top);
                let new = &stream.tokens[share.first + share.known..];
                asked.extend((row..).zip(new.iter().copied()));
            }
            row += share.drafted + 1;
        }
        if asked.is_empty() {
            return Ok(());
        }
        let mut said = self.b.likeliest(logits, &asked, most).into_iter();
        self.b.finish()?;
        for (stream, share) in streams
            .iter_mut()
            .zip(shares)
            .filter(|(_, share)| share.ends)
        {
            if let Some(top) = stream.options.logprobs {
                let n_new = stream.tokens.len() - share.first - share.known;
                stream
                    .logprobs
                    .extend(said.by_ref().take(n_new).map(|mut row| {
                        row.top.truncate(top);
                        Logprobs::of(&row)
                    }));
            }
        }
        Ok(())
    }

    /// The choices of all rows of `logits`, if the device can make them.
    fn chosen(
        &self,
        streams: &[&mut Stream],
        shares: &[Share],
        logits: &Tensor,
    ) -> Option<Vec<u32>> {
        let ending = streams.iter().zip(shares).filter(|(_, share)| share.ends);
        let plain = |(s, _): (&&mut Stream, _)| s.options.sampling.is_plain_greedy();
        if ending.clone().all(plain) {
            return Some(self.b.argmax(logits));
        }
        let choice = |(s, i): (&&mut Stream, usize)| {
            let sampling = &s.options.sampling;
            let alone = self.accept.with(sampling) == Accept::Exact;
            sampling
                .on_device((s.tokens.len() + i) as u64)
                .filter(|_| alone)
        };
        let rows = ending.flat_map(|(s, share)| (0..=share.drafted).map(move |i| (s, i)));
        let choices: Option<Vec<TokenChoice>> = rows.map(choice).collect();
        self.b.choose_tokens(logits, None, &choices?)
    }

    /// Lets the drafter see what stays, and guess; returns the longest draft that
    /// was asked for.
    fn draft(
        &mut self,
        streams: &mut [&mut Stream],
        shares: &[Share],
        hidden: &Tensor,
        taps: &[Tensor],
    ) -> Result<usize, RoundError> {
        for stream in streams.iter_mut() {
            stream.draft.clear();
            stream.laws.clear();
        }
        let Some(drafter) = &mut self.drafter else {
            return Ok(0);
        };
        let context = self.memory.size().context;
        let asking: Vec<usize> = (0..streams.len())
            .filter(|&i| streams[i].finish.is_none())
            .collect();
        let inputs: Vec<LengthInput<'_>> = asking
            .iter()
            .map(|&i| streams[i].length_input(shares[i].ends, context))
            .collect();
        let limits = self.lengths.choose(&inputs);
        let held = |(input, limit): (&LengthInput<'_>, &usize)| input.room > 0 && *limit == 0;
        let held_back: Vec<bool> = inputs.iter().zip(&limits).map(held).collect();
        let mut requests = Vec::with_capacity(asking.len());
        let mut chosen = limits.iter().zip(held_back);
        let mut shown = Vec::with_capacity(asking.len());
        for (i, (stream, share)) in streams.iter_mut().zip(shares).enumerate() {
            // One that has ended shows its rows too: another text may go on from them.
            let (limit, held_back) = match stream.finish {
                None => chosen.next().expect("a length for each that goes on"),
                Some(_) => (&0, false),
            };
            // One that never drafts need not be read either, nor one without a pending token.
            if stream.options.draft.max() == 0 || stream.finish == Some(Finish::NoToken) {
                continue;
            }
            shown.push(i);
            let Stream {
                sequence,
                tokens,
                options,
                history,
                stats,
                laws,
                shown: learned,
                ..
            } = &mut **stream;
            *learned = sequence.len();
            stats.held_back += u64::from(held_back);
            let rejects = self.accept.with(&options.sampling) == Accept::Residual;
            requests.push(DraftRequest {
                kept: share.row..share.row + sequence.len() - share.first,
                sequence,
                tokens,
                limit: *limit,
                sampling: &options.sampling,
                history,
                laws: rejects.then_some(laws),
            });
        }
        if requests.is_empty() {
            return Ok(0);
        }
        let target = TargetView {
            b: &*self.b,
            model: &*self.target,
            memory: &self.memory,
            taps,
        };
        let drafts = drafter.draft(target, hidden, &mut requests);
        self.b.finish()?;
        for (i, mut draft) in shown.into_iter().zip(drafts) {
            // The drafter has computed NaN or an infinity: no guess of it counts from there on.
            if let Some(n) = draft.iter().position(|&token| token == NO_TOKEN) {
                draft.truncate(n);
                streams[i].laws.truncate(n);
                streams[i].stats.drafts_cut += 1;
            }
            streams[i].draft = draft;
        }
        Ok(limits.into_iter().max().unwrap_or(0))
    }
}

/// One stream's rows in a round.
struct Share {
    /// Its first row in the batch.
    row: usize,
    /// That row's place in the cache.
    first: usize,
    /// Rows of known tokens.
    known: usize,
    /// Rows of the draft, after them.
    drafted: usize,
    /// Whether the rows reach the end of the text.
    ends: bool,
}

impl Share {
    /// The rows after which a token is chosen.
    fn choosing(&self) -> std::ops::Range<usize> {
        let last_known = self.row + self.known - 1;
        if self.ends {
            last_known..last_known + 1 + self.drafted
        } else {
            last_known..last_known
        }
    }
}
