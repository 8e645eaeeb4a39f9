//! Replay: what other draft lengths would have brought and taken, by a trace.
//!
//! ```text
//! rounds ─→ text: which tokens were guessed right ─┐
//!       └─→ fit: what rounds cost, chances         ├─→ simulate: rounds and milliseconds by length
//!                            lengths to compare ───┘
//! ```
//!
//! A recorded round with a draft of `k` tokens, `a` of them accepted, tells what any shorter draft
//! would have brought. What a longer one would have brought is extrapolated, and so is the time of
//! rounds of a kind that the trace does not have; a [`Row`] says how much of it is.
//!
//! Each text is replayed by itself: as if the others of a round drafted as it does. Milliseconds
//! are those that texts spent in rounds, so a round of two texts counts for both.
//!
//! Deliberately absent: other drafters, whose guesses nobody has recorded, and prefill, which lengths
//! do not change. Where drafters take turns, they do so as recorded.

mod by_drafter;
mod fit;
mod names;
mod simulate;
mod text;

use crate::read::ModelTrace;
use by_drafter::by_drafter;
pub use by_drafter::{DrafterReplay, DrafterRow};
use fit::Fit;
use names::Names;
use serde::Serialize;
use simulate::{Sum, with_chooser, with_lengths};
use speculate::{DraftLength, MAX_TENTATIVE};
use text::{Stretch, stretches};

/// How often the chooser writes the texts where guesses have to be drawn.
const DRAWS: u64 = 8;

/// What a replay says of one model.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Replay {
    /// The model's name.
    pub model: String,
    /// The drafters.
    pub drafters: Vec<String>,
    /// Texts, or parts of texts where rounds are missing.
    pub texts: usize,
    /// Rounds of texts that are left out: those with which a preempted text went on.
    pub left_out: u64,
    /// How much longer rounds took than those of their kind usually do; milliseconds of all rows
    /// have this factor.
    pub ms_over_usual: f64,
    /// Each drafter that has guessed, by itself.
    pub by_drafter: Vec<DrafterReplay>,
    /// What was compared: as recorded, plain, fixed lengths, and what the chooser would do.
    pub rows: Vec<Row>,
}

/// Whose lengths a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Lengths {
    /// The lengths that the trace has recorded.
    Recorded,
    /// No drafts.
    Plain,
    /// Drafts of one length, which all rounds have.
    Fixed,
    /// As long as pays, as the engine's chooser decides.
    Adaptive,
}

/// What the texts take with drafts of some lengths.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Row {
    /// Whose lengths these are.
    pub lengths: Lengths,
    /// Tokens of the longest draft.
    pub draft: usize,
    /// Tokens written, without the first of each text.
    pub tokens: usize,
    /// Rounds of texts.
    pub rounds: f64,
    /// Tokens a round.
    pub tokens_per_round: f64,
    /// Milliseconds.
    pub ms: f64,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// Milliseconds fewer than without drafts; negative if more.
    pub ms_saved: f64,
    /// Share of the guesses that the trace says nothing about: these are right as often as others of
    /// their drafter at their position were.
    pub extrapolated: f64,
    /// Share of the rounds of a kind that the trace has no or few times of: theirs are on the line of
    /// the nearest.
    pub untimed: f64,
}

/// Why a trace cannot be replayed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReplayError {
    /// No round only wrote.
    #[error("the trace has no round that only writes: none to learn from what rounds take")]
    NoRounds,
}

/// Replays what a trace says of a model: with all lengths up to that of the longest draft, or up to
/// `length`, or with the fixed `length` alone.
///
/// # Errors
///
/// [`ReplayError`] if the trace has too little.
pub fn replay(trace: &ModelTrace, length: Option<DraftLength>) -> Result<Replay, ReplayError> {
    let names = Names::of(trace);
    let (stretches, left_out) = stretches(&trace.rounds, &names);
    let fit = Fit::new(&trace.rounds, &stretches).ok_or(ReplayError::NoRounds)?;
    let rounds = || stretches.iter().flat_map(|stretch| &stretch.rounds);
    let longest = rounds().map(|round| round.drafted).max().unwrap_or(0);
    let recorded = Sum {
        rounds: rounds().count() as f64,
        ms: rounds().map(|round| round.ms).sum(),
        ..Sum::default()
    };
    let most = length.map_or(trace.model.draft_max.max(longest), DraftLength::max);
    let most = most.min(MAX_TENTATIVE);
    let plain = with_lengths(&fit, &stretches, |_, _| 0);
    let row = |lengths, draft, sum| Row::new(lengths, draft, &stretches, sum, plain.ms);
    let mut rows = vec![
        row(Lengths::Recorded, longest, recorded),
        row(Lengths::Plain, 0, plain),
    ];
    let is_fixed = matches!(length, Some(DraftLength::Fixed(_)));
    let first = if is_fixed { most.max(1) } else { 1 };
    rows.extend((first..=most).map(|n| {
        let sum = with_lengths(&fit, &stretches, |_, _| n);
        row(Lengths::Fixed, n, sum)
    }));
    if !is_fixed && most > 0 {
        let sum = adaptive(&fit, &stretches, most);
        rows.push(row(Lengths::Adaptive, most, sum));
    }
    let of = (&fit, &names);
    let lengths: Vec<usize> = (first..=most).collect();
    let by_drafter = by_drafter(&trace.rounds, &stretches, of, &lengths);
    Ok(Replay {
        model: trace.model.name.clone(),
        drafters: by_drafter.iter().map(|of| of.drafter.clone()).collect(),
        by_drafter,
        texts: stretches.len(),
        left_out,
        ms_over_usual: fit.scale,
        rows,
    })
}

/// What the chooser would do: the mean, where guesses have to be drawn.
fn adaptive(fit: &Fit, stretches: &[Stretch], most: usize) -> Sum {
    let first = with_chooser(fit, stretches, most, 0);
    if first.unknown == 0.0 {
        return first;
    }
    let mut sum = first;
    for seed in 1..DRAWS {
        sum += with_chooser(fit, stretches, most, seed);
    }
    sum.over(DRAWS as f64)
}

impl Row {
    fn new(lengths: Lengths, draft: usize, stretches: &[Stretch], sum: Sum, plain_ms: f64) -> Self {
        let tokens: usize = stretches.iter().map(|stretch| stretch.len).sum();
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { 0.0 };
        Row {
            lengths,
            draft,
            tokens,
            rounds: sum.rounds,
            tokens_per_round: ratio(tokens as f64, sum.rounds),
            ms: sum.ms,
            tokens_per_second: ratio(tokens as f64, sum.ms) * 1e3,
            ms_saved: plain_ms - sum.ms,
            extrapolated: ratio(sum.unknown, sum.guesses),
            untimed: ratio(sum.untimed, sum.rounds),
        }
    }
}

#[cfg(test)]
mod tests;
