//! What a trace knows of each text: which of its tokens were guessed right.
//!
//! ```text
//! round      pending │ g g g       drafted 3, accepted 2: two tokens right, then a wrong one
//! text       … p     │ 0 1 2 …     token 2 is the target's own; the next round begins after it
//! known                R R W
//! ```
//!
//! A draft of another length that begins within a round is told by the same tokens: what was guessed
//! from further away would have been guessed again. What lies behind the draft of its round
//! was guessed by nobody, and is not known.

use super::names::Names;
use crate::schema::{Round, StreamRound};
use speculate::Guesser;
use speculate::length::{HeadTimes, Longest, RoundCost};
use std::collections::HashMap;
use std::time::Duration;

/// A stretch of a text that rounds wrote without a gap, after its first token.
#[derive(Clone, Debug)]
pub(super) struct Stretch {
    /// Tokens before it: the prompt, and of the text at least one.
    pub(super) context: usize,
    /// Tokens that could still be written, from its beginning on.
    pub(super) left: usize,
    /// Tokens that its rounds have written.
    pub(super) len: usize,
    pub(super) rounds: Vec<Told>,
}

/// What the trace says of one round of a stretch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Told {
    pub(super) asked: usize,
    pub(super) drafted: usize,
    pub(super) accepted: usize,
    pub(super) emitted: usize,
    /// Tokens of the draft that a grammar left no choice about, and those of them that were accepted.
    pub(super) forced: usize,
    pub(super) forced_accepted: usize,
    /// Tokens of the draft that were guessed, before the first forced one.
    pub(super) guessed: usize,
    /// Tokens that the length chooser expected.
    pub(super) expected: Option<f64>,
    /// The longest draft that there was, if that is known.
    pub(super) found: Option<usize>,
    /// Who made the draft; where nobody did, whoever is taken to have been asked.
    pub(super) guesser: Guesser,
    /// Whether somebody guessed: not nobody, and not a grammar alone.
    pub(super) is_guessed: bool,
    /// Streams in the round that decoded.
    pub(super) streams: usize,
    /// Tokens of the longest text in the round.
    pub(super) context: usize,
    /// Milliseconds of the round.
    pub(super) ms: f64,
    /// What the round took as one of decoding streams; none where others ran rows of prompts.
    pub(super) cost: Option<RoundCost>,
}

/// What is known of the token at a place of a stretch, where it was drafted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Guess {
    Right,
    Wrong,
    Unknown,
}

/// What is known of a place of a stretch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    /// The round that wrote its token.
    pub(super) round: usize,
    pub(super) guess: Guess,
    /// The place behind the draft of that round.
    pub(super) drafted_to: usize,
    /// Where a draft from here ends, because the drafter finds no more.
    pub(super) end: Option<usize>,
}

impl Told {
    /// The longest draft that there was, if that is known: the drafter was asked for more, or there was
    /// no more to copy.
    pub(super) fn most(&self) -> Option<usize> {
        let is_less = self.drafted < self.asked;
        let found = self.found.map(|found| found.max(self.drafted));
        found.or(is_less.then_some(self.drafted))
    }
}

impl Stretch {
    /// Who is taken to have been asked where nobody drafts next.
    fn asked(&self, names: &Names) -> Guesser {
        let drafted = self.rounds.iter().rev().filter(|round| round.is_guessed);
        let mut heads = drafted.map(|round| round.guesser);
        let head = heads.find(|&guesser| guesser != Guesser::Ngram);
        head.unwrap_or(names.first())
    }

    fn push(&mut self, round: Told) {
        self.len += round.emitted;
        self.rounds.push(round);
    }

    /// What is known of each place, from the beginning on.
    pub(super) fn places(&self) -> Vec<Place> {
        let mut places = Vec::with_capacity(self.len);
        for (i, round) in self.rounds.iter().enumerate() {
            let first = places.len();
            let end = round.most().map(|most| first + most);
            places.extend((0..round.emitted).map(|j| Place {
                round: i,
                guess: match j {
                    _ if j < round.accepted => Guess::Right,
                    _ if j < round.drafted => Guess::Wrong,
                    _ => Guess::Unknown,
                },
                drafted_to: first + round.drafted,
                end,
            }));
        }
        places
    }
}

/// The stretches of the texts of `rounds`, in the order of their beginnings, and how many rounds
/// of texts belong to none of them: a text that was preempted runs rows again with its next token.
/// Drafts are of the drafters that `names` has. Where nobody drafted, the head that did last in the stretch is taken to
/// have been asked.
pub(super) fn stretches(rounds: &[Round], names: &Names) -> (Vec<Stretch>, u64) {
    let mut stretches: Vec<Stretch> = Vec::new();
    let mut open: HashMap<u64, usize> = HashMap::new();
    let mut left_out = 0;
    for round in rounds {
        let cost = cost(round);
        let decodes = round.streams.iter().filter(|stream| !stream.prefill);
        let (streams, context) = (decodes.count(), context(round));
        for stream in &round.streams {
            let writes = stream.round.is_none_or(|number| number > 0) && stream.emitted > 0;
            if stream.prefill || !writes {
                left_out += u64::from(stream.round.is_some_and(|number| number > 0));
                continue;
            }
            let at = open.get(&stream.request).copied().filter(|&at| {
                let known: &Stretch = &stretches[at];
                known.context + known.len == stream.context
            });
            let at = at.unwrap_or_else(|| {
                stretches.push(begin(stream));
                stretches.len() - 1
            });
            open.insert(stream.request, at);
            let named = stream.drafter.as_deref().map(|name| names.guesser(name));
            let stretch = &mut stretches[at];
            let guesser = named.unwrap_or_else(|| stretch.asked(names));
            stretch.push(Told {
                guesser,
                forced: stream.forced,
                forced_accepted: stream.forced_accepted,
                guessed: stream.guessed.unwrap_or(stream.drafted).min(stream.drafted),
                expected: stream.expected_tokens,
                asked: stream.asked,
                drafted: stream.drafted,
                accepted: stream.accepted,
                emitted: stream.emitted,
                found: stream.found,
                is_guessed: stream.drafter.is_some() && stream.drafted > stream.forced,
                streams,
                context,
                ms: round.verify_ms + round.draft_ms,
                cost,
            });
        }
    }
    (stretches, left_out)
}

/// A stretch that begins with the round of `stream`.
fn begin(stream: &StreamRound) -> Stretch {
    Stretch {
        context: stream.context,
        left: stream.left.unwrap_or(usize::MAX),
        len: 0,
        rounds: Vec::new(),
    }
}

/// Tokens of the longest text after the round.
fn context(round: &Round) -> usize {
    let after = round.streams.iter().map(|s| s.context + s.emitted);
    after.max().unwrap_or(0)
}

/// The drafts after the rows of a round.
fn drafts(round: &Round) -> Longest {
    let mut drafts = Longest::by(Guesser::HEAD, round.draft_asked);
    for (asked, head) in drafts.by_head.iter_mut().zip(&round.heads) {
        *asked = head.asked;
    }
    drafts.copied = round.copy_asked;
    drafts
}

/// Milliseconds as a time; traces may hold anything.
fn time(ms: f64) -> Duration {
    Duration::try_from_secs_f64(ms / 1e3).unwrap_or_default()
}

/// What a round took, if it can be compared with others.
pub(super) fn cost(round: &Round) -> Option<RoundCost> {
    if round.prefill || round.streams.iter().any(|stream| stream.prefill) {
        return None;
    }
    let rows = round.streams.iter().map(|stream| 1 + stream.drafted);
    let mut by_head = HeadTimes::default();
    for (own, head) in by_head.iter_mut().zip(&round.heads) {
        *own = Some(time(head.ms));
    }
    Some(RoundCost {
        streams: round.streams.len(),
        rows: rows.sum(),
        context: context(round),
        experts: round.experts.map(|experts| experts as f64),
        drafts: drafts(round),
        verify: time(round.verify_ms),
        draft: time(round.draft_ms),
        by_head,
    })
}
