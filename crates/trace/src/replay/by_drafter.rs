//! Each drafter by itself: what it has brought in the rounds whose drafts it guessed, and would have with drafts of other
//! lengths there.
//!
//! Every such round is taken alone, from where it began: what a shorter or longer draft changes is where it ends,
//! and so who drafts next, which this leaves out.

use super::Lengths;
use super::fit::{Fit, Kind};
use super::names::Names;
use super::text::{Stretch, Told};
use crate::schema::Round;
use serde::Serialize;
use speculate::length::Longest;
use speculate::{Guesser, MAX_TENTATIVE};
use std::collections::HashMap;

/// What one drafter has done.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct DrafterReplay {
    /// The drafter's name.
    pub drafter: String,
    /// Rounds of texts whose draft it guessed.
    pub rounds: usize,
    /// Tokens that it guessed, without forced ones.
    pub drafted: usize,
    /// Guessed tokens that were accepted.
    pub accepted: usize,
    /// The share of guesses that were accepted, by position in the draft, of those whose predecessors
    /// all were.
    pub by_position: Vec<f64>,
    /// Tokens written a round.
    pub tokens_per_round: f64,
    /// Tokens a round that the length chooser expected, of the rounds of which the trace says so.
    pub expected_tokens_per_round: Option<f64>,
    /// Milliseconds that it took to make a draft, for all texts of a round; none where that was not timed apart.
    pub ms_per_draft: Option<f64>,
    /// Milliseconds of its drafts for each token of them that was verified.
    pub ms_per_guess: Option<f64>,
    /// Milliseconds that it took to read what others had written, where others drafted or nobody did.
    pub ms_reading: Option<f64>,
    /// What the rounds that the drafter guessed for would take and bring with drafts of other lengths.
    pub rows: Vec<DrafterRow>,
}

/// What a drafter's rounds take and bring with drafts of some length.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct DrafterRow {
    /// Whose lengths these are.
    pub lengths: Lengths,
    /// Tokens of the longest draft.
    pub draft: usize,
    /// Tokens a round.
    pub tokens_per_round: f64,
    /// Milliseconds of a round and of its draft.
    pub ms_per_round: f64,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// Share of the guesses that the trace says nothing about.
    pub extrapolated: f64,
    /// Share of the rounds of a kind that the trace has no or few times of.
    pub untimed: f64,
}

/// The drafters of the trace, in the order in which they first drafted. `lengths` are those to compare.
pub(super) fn by_drafter(
    rounds: &[Round],
    stretches: &[Stretch],
    (fit, names): (&Fit, &Names),
    lengths: &[usize],
) -> Vec<DrafterReplay> {
    let mut drafters: Vec<Guesser> = Vec::new();
    for told in stretches.iter().flat_map(|stretch| &stretch.rounds) {
        if told.is_guessed && !drafters.contains(&told.guesser) {
            drafters.push(told.guesser);
        }
    }
    let one = |guesser| {
        let own = own_rounds(stretches, guesser);
        let sum = |of: fn(&Told) -> usize| own.iter().map(|one| of(one.told)).sum::<usize>();
        let expected: Vec<f64> = own.iter().filter_map(|one| one.told.expected).collect();
        let n_expected = expected.len() as f64;
        let times = Times::of(rounds, guesser, names);
        DrafterReplay {
            drafter: names.name(guesser).to_owned(),
            rounds: own.len(),
            drafted: sum(|told| told.drafted - told.forced),
            // Older traces do not say how many forced tokens were accepted.
            accepted: sum(|told| {
                let own = told.accepted - told.forced_accepted;
                own.min(told.drafted - told.forced)
            }),
            by_position: fit.by_position(guesser).to_vec(),
            tokens_per_round: sum(|told| told.emitted) as f64 / own.len() as f64,
            expected_tokens_per_round: (n_expected > 0.0)
                .then(|| expected.iter().sum::<f64>() / n_expected),
            ms_per_draft: times.share(times.drafts),
            ms_per_guess: times.share(times.guesses),
            ms_reading: times.reading,
            rows: rows(fit, &own, lengths),
        }
    };
    drafters.into_iter().map(one).collect()
}

/// A round, and where it begins.
struct OwnRound<'a> {
    told: &'a Told,
    /// Tokens that could still be written.
    left: usize,
    /// Tokens that rounds from this one on have written.
    rest: usize,
}

/// The rounds that `guesser` drafted for.
fn own_rounds(stretches: &[Stretch], guesser: Guesser) -> Vec<OwnRound<'_>> {
    let mut own = Vec::new();
    for stretch in stretches {
        let mut place = 0;
        for told in &stretch.rounds {
            if told.is_guessed && told.guesser == guesser {
                own.push(OwnRound {
                    told,
                    left: stretch.left.saturating_sub(place),
                    rest: stretch.len - place,
                });
            }
            place += told.emitted;
        }
    }
    own
}

/// How long a drafter took, in rounds without rows of prompts.
#[derive(Default)]
struct Times {
    /// Milliseconds of rounds in which it was asked for drafts; none if nobody timed it.
    drafting: Option<f64>,
    /// Such rounds.
    drafts: f64,
    /// Tokens of these drafts that were verified.
    guesses: f64,
    /// Milliseconds of the other rounds.
    reading: Option<f64>,
}

impl Times {
    fn of(rounds: &[Round], guesser: Guesser, names: &Names) -> Self {
        let mut times = Times::default();
        // Whether the request's draft was made in a round that counts here.
        let mut is_timed: HashMap<u64, bool> = HashMap::new();
        for round in rounds {
            for stream in &round.streams {
                let is_own = stream.drafter.as_deref() == Some(names.name(guesser));
                if is_own && is_timed.get(&stream.request) == Some(&true) {
                    times.guesses += stream.drafted.saturating_sub(stream.forced) as f64;
                }
                is_timed.insert(stream.request, !round.prefill);
            }
            if let Some((asked, ms)) = asked(round, guesser, names).filter(|_| !round.prefill) {
                let (sum, n) = match asked > 0 {
                    true => (&mut times.drafting, 1.0),
                    false => (&mut times.reading, 0.0),
                };
                *sum.get_or_insert(0.0) += ms;
                times.drafts += n;
            }
        }
        times
    }

    /// Milliseconds of drafting for each of `n`.
    fn share(&self, n: f64) -> Option<f64> {
        self.drafting.filter(|_| n > 0.0).map(|ms| ms / n)
    }
}

/// The tokens that `guesser` was asked for after the rows of `round`, and the milliseconds that it took; none where it was
/// not timed apart from others.
fn asked(round: &Round, guesser: Guesser, names: &Names) -> Option<(usize, f64)> {
    match guesser {
        Guesser::Ngram if names.only_ngrams() => Some((round.copy_asked, round.draft_ms)),
        Guesser::Ngram => None,
        Guesser::Head(0) if round.heads.is_empty() => Some((round.draft_asked, round.draft_ms)),
        Guesser::Head(head) => round.heads.get(head).map(|head| (head.asked, head.ms)),
    }
}

/// The rounds as they were drafted for, without drafts, and with drafts of each of `lengths`.
fn rows(fit: &Fit, own: &[OwnRound<'_>], lengths: &[usize]) -> Vec<DrafterRow> {
    let longest = own.iter().map(|one| one.told.drafted).max().unwrap_or(0);
    let recorded = row(fit, own, (Lengths::Recorded, longest), |told| {
        told.asked.max(told.drafted)
    });
    let plain = row(fit, own, (Lengths::Plain, 0), |_| 0);
    let fixed = lengths
        .iter()
        .map(|&n| row(fit, own, (Lengths::Fixed, n), |_| n));
    [recorded, plain].into_iter().chain(fixed).collect()
}

/// The rounds with drafts for which `wish` tokens are asked.
fn row(
    fit: &Fit,
    own: &[OwnRound<'_>],
    (lengths, draft): (Lengths, usize),
    wish: impl Fn(&Told) -> usize,
) -> DrafterRow {
    let (mut tokens, mut ms, mut guesses, mut unknown, mut untimed) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for OwnRound { told, left, rest } in own {
        let asked = wish(told).min(left.saturating_sub(1)).min(MAX_TENTATIVE);
        let length = asked.min(told.most().unwrap_or(usize::MAX));
        // Nobody is asked to copy more than there is.
        let is_copy = told.guesser == Guesser::Ngram;
        let kind = Kind {
            context: told.context,
            streams: told.streams,
            rows: told.streams * (1 + length),
            drafts: Longest::by(told.guesser, if is_copy { length } else { asked }),
        };
        ms += fit.verify_ms(kind) + fit.draft_ms(kind);
        untimed += f64::from(u8::from(!fit.is_timed(kind)));
        tokens += 1.0;
        let mut right = 1.0;
        for position in 0..length {
            guesses += right;
            right *= match position {
                _ if position < told.accepted => 1.0,
                _ if position < told.drafted => 0.0,
                _ => {
                    unknown += right;
                    fit.chance(position, told.guesser)
                }
            };
            if position + 1 < *rest {
                tokens += right;
            }
        }
    }
    let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
    let n = own.len() as f64;
    DrafterRow {
        lengths,
        draft,
        tokens_per_round: ratio(tokens, n),
        ms_per_round: ratio(ms, n),
        tokens_per_second: ratio(tokens, ms) * 1e3,
        extrapolated: ratio(unknown, guesses),
        untimed: ratio(untimed, n),
    }
}
