//! Choosing: which token follows each row of a round, on the device where it can tell.
//!
//! ```text
//! logits    of the rows after which a token is chosen
//! masked    -inf where the row's constraint does not allow the token
//! edited    after penalties, DRY, bias and suppression, by the text up to the row: a few tokens' logits
//! token     the device's choice of the edited row, or the host's of the masked one
//! ```
//!
//! The device edits and chooses with the host's bits, so who does it never shows in a text. The host
//! sends it the edits alone, and no row of logits comes back.
//!
//! Dynamic temperature and top-n-sigma go by sums over the whole edited row, of integers and so the same in
//! any order: the device tells them ([`backend::moments`]), and the host finds the choice by them.
//!
//! What the host still chooses, of rows that it reads back for that, a row at a time:
//!
//! - typical-p, and XTC at positions where its coin has it act: what they keep is no prefix of the tokens by
//!   value, which is all that the kernels can cut. Elsewhere XTC is no option at all;
//! - mirostat: the bound of a row follows from the token of the row before, so that rows of one round
//!   cannot be chosen together;
//! - residual acceptance, and the log-probabilities of what tokens are chosen from, which need the
//!   probabilities of all tokens;
//! - rows that give no token once they are edited. Either they gave none before, or edits have left
//!   nothing to choose from: the logits are computed once more, and the host tells the two apart.

use crate::draft::HiddenRows;
use crate::logprobs::LogprobsOf;
use crate::round::StreamRows;
use crate::sample::ByDevice;
use crate::speculator::Speculator;
use crate::stream::Stream;
use backend::moments::Moments;
use backend::{Backend, NO_TOKEN, RowEdits, Tensor, TokenChoice, TokenMask};

/// What is known of the tokens after the rows of a round.
pub(crate) struct Chosen {
    /// The device's choices; none where the host is to choose.
    pub(crate) tokens: Vec<Option<u32>>,
    /// Masked logits of the rows where the host is to choose, one after the other, if those are not
    /// all.
    open: Option<Tensor>,
    /// Logits of all rows, as choices were made from them.
    logits: Tensor,
    /// Logits of all rows as they are, where they differ and their log-probabilities are asked for.
    as_they_are: Option<Tensor>,
}

impl Chosen {
    /// Logits of all rows as they are, where their log-probabilities are asked for.
    pub(crate) fn as_they_are(&self) -> &Tensor {
        self.as_they_are.as_ref().unwrap_or(&self.logits)
    }

    /// Masked logits of the rows where the host is to choose, one after the other; none if there
    /// are no such rows.
    pub(crate) fn open(&self) -> Option<&Tensor> {
        let any = self.tokens.iter().any(Option::is_none);
        any.then(|| self.open.as_ref().unwrap_or(&self.logits))
    }
}

/// Logits of the rows after which a token is chosen.
struct Masked {
    /// The logits, -inf where a mask does not allow the token.
    logits: Tensor,
    /// The logits as they are, where they differ and their log-probabilities are asked for.
    as_they_are: Option<Tensor>,
    /// The row's masks; empty if there is none at all.
    masks: Vec<Option<TokenMask>>,
}

/// Where the rows of [`Chosen`] come from.
pub(crate) struct Source<'a> {
    /// The target's hidden rows.
    pub(crate) hidden: &'a HiddenRows,
    /// Numbers of the rows after which a token is chosen.
    pub(crate) choosing: &'a [usize],
}

impl Speculator {
    /// Has the device choose what it can of the tokens after the rows of `logits`. Streams whose constraint fails have ended.
    pub(crate) fn choose_on_device(
        &mut self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        logits: Tensor,
        source: Source<'_>,
    ) -> Chosen {
        let b = &*self.b;
        let masked = mask_rows(b, logits, streams, rows);
        let choosing = || streams.iter().zip(rows).filter(|(_, r)| r.chooses);
        let is_plain = |s: &Stream| {
            s.options.sampling.is_plain_greedy()
                && s.options.logprobs_of(LogprobsOf::Choice).is_none()
        };
        if choosing().all(|(s, _)| is_plain(s)) {
            let tokens = b.argmax(&masked.logits).into_iter().map(Some).collect();
            return Chosen {
                tokens,
                open: None,
                logits: masked.logits,
                as_they_are: masked.as_they_are,
            };
        }
        let plan = |(s, i): (&&mut Stream, usize)| {
            let sampling = &s.options.sampling;
            let needs_all = s.rejects() || s.options.logprobs_of(LogprobsOf::Choice).is_some();
            match needs_all {
                false => sampling.by_device((s.tokens.len() + i) as u64),
                true => ByDevice::Nothing,
            }
        };
        let each = choosing().flat_map(|(s, r)| (0..=r.n_drafted).map(move |i| (s, i)));
        let plans: Vec<ByDevice> = each.map(plan).collect();
        let edits = choosing().any(|(s, _)| s.options.sampling.edits_logits());
        let is_choice = |plan: &ByDevice| matches!(plan, ByDevice::Choice(_));
        let takes_all = !edits && plans.iter().all(is_choice);
        let is_open = |plan: &ByDevice| *plan == ByDevice::Nothing;
        let takes_some = !plans.iter().all(is_open) && b.capabilities().edits;
        if !takes_all && !takes_some {
            return masked.left_to_the_host();
        }
        let edits = match edits {
            true => self.row_edits(streams, rows, &plans, masked.logits.cols()),
            false => vec![RowEdits::default(); plans.len()],
        };
        self.choose_edited((streams, rows), masked, &plans, &edits, source)
    }

    /// Has the device edit the rows and choose a token of each that `plans` leave to it.
    fn choose_edited(
        &self,
        (streams, rows): (&[&mut Stream], &[StreamRows]),
        masked: Masked,
        plans: &[ByDevice],
        edits: &[RowEdits],
        source: Source<'_>,
    ) -> Chosen {
        let b = &*self.b;
        let Masked {
            logits,
            mut as_they_are,
            masks,
        } = masked;
        let is_open = |&row: &usize| plans[row] == ByDevice::Nothing;
        let mut open_rows: Vec<usize> = (0..plans.len()).filter(is_open).collect();
        let mut open = (!open_rows.is_empty()).then(|| b.gather(&logits, &open_rows));
        let has_edits = edits.iter().any(|row| !row.is_empty());
        let has_logprobs = streams
            .iter()
            .any(|s| s.options.logprobs_of(LogprobsOf::Logits).is_some());
        if has_edits && has_logprobs && as_they_are.is_none() {
            as_they_are = Some(copy(b, &logits));
        }
        let edited = match has_edits {
            true => b.edit_logits(logits, edits),
            false => logits,
        };
        let choices = choices(b, &edited, (streams, rows), plans);
        let Some(tokens) = b.choose_tokens(&edited, None, &choices) else {
            assert!(!has_edits, "a device that edits logits chooses tokens");
            let masked = Masked {
                logits: edited,
                as_they_are,
                masks,
            };
            return masked.left_to_the_host();
        };
        let is_lost = |row: usize| tokens[row] == NO_TOKEN && !edits[row].is_empty();
        let n_open = open_rows.len();
        open_rows.extend((0..tokens.len()).filter(|row| !is_open(row) && is_lost(*row)));
        if open_rows.len() > n_open {
            open_rows.sort_unstable();
            open = Some(self.logits_again(&open_rows, &masks, source));
        }
        let mut tokens: Vec<Option<u32>> = tokens.into_iter().map(Some).collect();
        open_rows.iter().for_each(|&row| tokens[row] = None);
        Chosen {
            tokens,
            open,
            logits: edited,
            as_they_are,
        }
    }

    /// Masked logits of some rows of those after which a token is chosen, computed once more.
    fn logits_again(
        &self,
        rows: &[usize],
        masks: &[Option<TokenMask>],
        source: Source<'_>,
    ) -> Tensor {
        let b = &*self.b;
        let of_batch: Vec<usize> = rows.iter().map(|&row| source.choosing[row]).collect();
        let logits = self.target.logits(b, &source.hidden.gather(b, &of_batch));
        if masks.is_empty() {
            return logits;
        }
        let masks: Vec<_> = rows.iter().map(|&row| masks[row].clone()).collect();
        b.mask_logits(logits, &masks)
    }

    /// The edits of each row of `cols` logits; none where the host chooses.
    fn row_edits(
        &mut self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        plans: &[ByDevice],
        cols: usize,
    ) -> Vec<RowEdits> {
        let mut edits = Vec::with_capacity(plans.len());
        let place = |token: u32| Some(token).filter(|&token| (token as usize) < cols);
        for (stream, rows) in streams.iter_mut().zip(rows).filter(|(_, r)| r.chooses) {
            let Stream {
                draft,
                history,
                options,
                ..
            } = &mut **stream;
            let mut pushed = 0;
            // Rows behind a draft that its masks have cut give no token of the text.
            for i in 0..=rows.n_drafted {
                if i > 0 && i <= draft.len() {
                    history.push(draft[i - 1]);
                    pushed += 1;
                }
                edits.push(match plans[edits.len()] {
                    ByDevice::Nothing => RowEdits::default(),
                    _ => options.sampling.edits(history, &mut self.scratch, place),
                });
            }
            (0..pushed).for_each(|_| history.pop());
        }
        edits
    }
}

impl Masked {
    /// All choices are the host's.
    fn left_to_the_host(self) -> Chosen {
        Chosen {
            tokens: vec![None; self.logits.rows()],
            open: None,
            logits: self.logits,
            as_they_are: self.as_they_are,
        }
    }
}

/// The choice of each row of `edited`. Nobody looks at what comes of the one for a row that the host
/// chooses of.
fn choices(
    b: &dyn Backend,
    edited: &Tensor,
    (streams, rows): (&[&mut Stream], &[StreamRows]),
    plans: &[ByDevice],
) -> Vec<TokenChoice> {
    let asks = |&row: &usize| plans[row] == ByDevice::Moments;
    let asked: Vec<usize> = (0..plans.len()).filter(asks).collect();
    let moments = match asked.is_empty() {
        true => Vec::new(),
        false => b.moments(edited, &asked),
    };
    let mut moments = moments.into_iter();
    let choosing = streams.iter().zip(rows).filter(|(_, r)| r.chooses);
    let each = choosing.flat_map(|(s, r)| (0..=r.n_drafted).map(move |i| (s, i)));
    let choice = |((stream, i), plan): ((&&mut Stream, usize), &ByDevice)| {
        let sampling = &stream.options.sampling;
        let position = (stream.tokens.len() + i) as u64;
        match plan {
            ByDevice::Choice(choice) => *choice,
            ByDevice::Moments => {
                let moments = moments.next().expect("the moments of each row that asks");
                sampling.of_row(position, &moments)
            }
            // Of no logits at all: greedy.
            ByDevice::Nothing => sampling.of_row(position, &Moments::of(&[])),
        }
    };
    each.zip(plans).map(choice).collect()
}

/// The rows of `logits`, once more.
fn copy(b: &dyn Backend, logits: &Tensor) -> Tensor {
    let all: Vec<usize> = (0..logits.rows()).collect();
    b.gather(logits, &all)
}

/// `logits` under the masks of their rows. Streams whose constraint fails have ended.
fn mask_rows(
    b: &dyn Backend,
    logits: Tensor,
    streams: &mut [&mut Stream],
    rows: &[StreamRows],
) -> Masked {
    let (vocab, mut masks, mut has_logprobs) = (logits.cols(), Vec::new(), false);
    if streams.iter().any(|stream| stream.constraint.is_some()) {
        for (stream, _) in streams.iter_mut().zip(rows).filter(|(_, r)| r.chooses) {
            masks.append(&mut stream.masks(vocab));
            has_logprobs |= stream.options.logprobs_of(LogprobsOf::Logits).is_some();
        }
    }
    if masks.iter().all(Option::is_none) {
        return Masked {
            logits,
            as_they_are: None,
            masks: Vec::new(),
        };
    }
    Masked {
        as_they_are: has_logprobs.then(|| copy(b, &logits)),
        logits: b.mask_logits(logits, &masks),
        masks,
    }
}
