//! Texts, written again with drafts of other lengths.
//!
//! ```text
//! reach[q]   = the chance that a round begins at place q
//! ms         = Σ reach[q] (verify(rows of q) + draft(length of q))
//! ```
//!
//! A guess about which the trace says nothing is right with the chance of its position in drafts of its drafter. With lengths
//! that depend on the place alone all ways through the text are added up, so nothing is drawn;
//! the chooser's lengths depend on the way, and for them such guesses are drawn, by a seed.

use super::fit::{Fit, Kind};
use super::text::{Guess, Place, Stretch};
use speculate::length::{HeadTimes, Ledger, LengthInput, Lengths, Longest, RoundCost};
use speculate::{DraftLength, Guesser, Guessers, MAX_TENTATIVE};
use std::ops::AddAssign;
use std::time::Duration;

/// Streams of a round that the chooser is shown, at most: it chooses the same for more.
const STREAMS_MAX: usize = 256;

/// What writing the texts takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Sum {
    pub(super) rounds: f64,
    pub(super) ms: f64,
    /// Guesses that were verified, up to the first wrong one of each draft.
    pub(super) guesses: f64,
    /// Verified guesses about which the trace says nothing.
    pub(super) unknown: f64,
    /// Rounds of a kind that the trace has no times of.
    pub(super) untimed: f64,
}

impl AddAssign for Sum {
    fn add_assign(&mut self, other: Sum) {
        self.rounds += other.rounds;
        self.ms += other.ms;
        self.guesses += other.guesses;
        self.unknown += other.unknown;
        self.untimed += other.untimed;
    }
}

impl Sum {
    /// The mean of `n` of which this is the sum.
    pub(super) fn over(self, n: f64) -> Sum {
        Sum {
            rounds: self.rounds / n,
            ms: self.ms / n,
            guesses: self.guesses / n,
            unknown: self.unknown / n,
            untimed: self.untimed / n,
        }
    }
}

/// A stretch, and what is known of it and of rounds in general.
struct Text<'a> {
    fit: &'a Fit,
    stretch: &'a Stretch,
    places: Vec<Place>,
}

/// A round that begins at a place.
#[derive(Clone, Copy)]
struct Begun {
    /// Tokens of the draft.
    length: usize,
    kind: Kind,
    /// Who makes the draft.
    guesser: Guesser,
}

impl<'a> Text<'a> {
    fn new(fit: &'a Fit, stretch: &'a Stretch) -> Self {
        Text {
            fit,
            stretch,
            places: stretch.places(),
        }
    }

    /// The longest draft that has room at `place`.
    fn room(&self, place: usize) -> usize {
        let left = self.stretch.left.saturating_sub(place);
        left.saturating_sub(1).min(MAX_TENTATIVE)
    }

    /// The longest draft from `place` that the drafter finds.
    fn found(&self, place: usize) -> usize {
        let end = self.places[place].end;
        end.map_or(usize::MAX, |end| end.saturating_sub(place))
    }

    /// The round that begins at `place`, where a draft of `wish` tokens was asked for.
    fn begin(&self, place: usize, wish: usize) -> Begun {
        let round = &self.stretch.rounds[self.places[place].round];
        let asked = wish.min(self.room(place));
        let length = asked.min(self.found(place));
        // Nobody is asked to copy more than there is.
        let is_copy = round.guesser == Guesser::Ngram;
        let asked = if is_copy { length } else { asked };
        Begun {
            length,
            kind: Kind {
                context: round.context,
                streams: round.streams,
                rows: round.streams * (1 + length),
                drafts: Longest::by(round.guesser, asked),
            },
            guesser: round.guesser,
        }
    }

    /// What is known of the guess at `position` of a draft that begins at `place`.
    fn guess(&self, place: usize, position: usize) -> Guess {
        let at = place + position;
        match at < self.places[place].drafted_to {
            true => self.places[at].guess,
            false => Guess::Unknown,
        }
    }

    /// Milliseconds that no length changes: rows of others' prompts.
    fn waits(&self) -> f64 {
        let rounds = self.stretch.rounds.iter();
        rounds.map(|round| self.fit.wait_ms(round)).sum()
    }

    /// Milliseconds of the drafter after the last round, which asks for nothing.
    fn last_draft(&self) -> f64 {
        let Some(last) = self.places.len().checked_sub(1) else {
            return 0.0;
        };
        self.fit.draft_ms(self.begin(last, 0).kind)
    }
}

/// What the texts take with drafts of `wish` tokens: a function of the stretch and of the place in it.
pub(super) fn with_lengths(
    fit: &Fit,
    stretches: &[Stretch],
    wish: impl Fn(&Stretch, &Place) -> usize,
) -> Sum {
    let mut all = Sum::default();
    for stretch in stretches {
        let text = Text::new(fit, stretch);
        all += expected(&text, |place| wish(stretch, &text.places[place]));
    }
    all
}

fn expected(text: &Text<'_>, wish: impl Fn(usize) -> usize) -> Sum {
    let n = text.places.len();
    let mut reach = vec![0.0; n + 1];
    reach[0] = 1.0;
    let mut sum = Sum {
        ms: text.waits() + text.last_draft(),
        ..Sum::default()
    };
    for place in 0..n {
        let begins = reach[place];
        if begins == 0.0 {
            continue;
        }
        let round = text.begin(place, wish(place));
        sum.rounds += begins;
        sum.ms += begins * text.fit.verify_ms(round.kind);
        if place > 0 {
            // The first draft is made with the last rows of the prompt.
            sum.ms += begins * text.fit.draft_ms(round.kind);
        }
        sum.untimed += begins * f64::from(u8::from(!text.fit.is_timed(round.kind)));
        // The chance that all guesses so far are right.
        let mut right = begins;
        for position in 0..round.length.min(n - place) {
            sum.guesses += right;
            let chance = match text.guess(place, position) {
                Guess::Right => 1.0,
                Guess::Wrong => 0.0,
                Guess::Unknown => {
                    sum.unknown += right;
                    text.fit.chance(position, round.guesser)
                }
            };
            reach[place + position + 1] += right * (1.0 - chance);
            right *= chance;
        }
        reach[(place + round.length + 1).min(n)] += right;
    }
    sum
}

/// What the texts take with the lengths that the engine's chooser takes, up to `most` tokens.
pub(super) fn with_chooser(fit: &Fit, stretches: &[Stretch], most: usize, seed: u64) -> Sum {
    let mut lengths = Lengths::default();
    let mut all = Sum::default();
    for (number, stretch) in stretches.iter().enumerate() {
        let noise = Noise(mix(seed ^ mix(number as u64)));
        all += chosen(&Text::new(fit, stretch), &mut lengths, most, noise);
    }
    all
}

fn chosen(text: &Text<'_>, lengths: &mut Lengths, most: usize, noise: Noise) -> Sum {
    let n = text.places.len();
    let mut ledger = Ledger::default();
    let mut sum = Sum {
        ms: text.waits(),
        ..Sum::default()
    };
    let mut place = 0;
    let mut wish = choose(text, lengths, &ledger, most, place);
    while place < n {
        let round = text.begin(place, wish);
        let mut accepted = 0;
        while accepted < round.length.min(n - place) {
            sum.guesses += 1.0;
            let is_right = match text.guess(place, accepted) {
                Guess::Right => true,
                Guess::Wrong => false,
                Guess::Unknown => {
                    sum.unknown += 1.0;
                    noise.of(place + accepted) < text.fit.chance(accepted, round.guesser)
                }
            };
            if !is_right {
                break;
            }
            accepted += 1;
        }
        lengths.verified(&mut ledger, as_head(round.guesser), round.length, accepted);
        let emitted = (accepted + 1).min(n - place);
        let end = place + emitted;
        wish = choose(text, lengths, &ledger, most, end);
        let cost = cost(text, round, wish);
        lengths.took(&cost);
        lengths.book(&mut ledger, &cost, emitted);
        sum.rounds += 1.0;
        sum.ms += (cost.verify + cost.draft).as_secs_f64() * 1e3;
        sum.untimed += f64::from(u8::from(!text.fit.is_timed(round.kind)));
        place = end;
    }
    sum
}

/// Who `guesser` is to the chooser: n-grams are the first head, since what they would have proposed otherwise is not known.
fn as_head(guesser: Guesser) -> Guesser {
    match guesser {
        Guesser::Ngram => Guesser::HEAD,
        head => head,
    }
}

/// The length of the draft for a round that begins at `place`; nothing behind the end. Only whoever drafted there
/// could.
fn choose(text: &Text<'_>, lengths: &Lengths, ledger: &Ledger, most: usize, place: usize) -> usize {
    let Some(of) = text.places.get(place) else {
        return 0;
    };
    let round = &text.stretch.rounds[of.round];
    let input = LengthInput {
        may_be_cut: false,
        ledger,
        wish: DraftLength::UpTo(most),
        room: text.room(place).min(text.found(place)),
        context: round.context,
        heads: [as_head(round.guesser)].into_iter().collect::<Guessers>(),
        pinned: None,
        copy: None,
    };
    // The others in the round are taken to be as this one.
    let inputs = vec![input; round.streams.clamp(1, STREAMS_MAX)];
    lengths.choose(&inputs)[0].tokens
}

/// What a round takes, with a draft of `asked` tokens after it.
fn cost(text: &Text<'_>, round: Begun, asked: usize) -> RoundCost {
    let time = |ms: f64| Duration::from_secs_f64(ms / 1e3);
    let kind = round.kind;
    let next = Kind {
        drafts: Longest::by(round.guesser, asked),
        ..kind
    };
    let draft = time(text.fit.draft_ms(next));
    let mut by_head = HeadTimes::default();
    if let Guesser::Head(head) = as_head(round.guesser) {
        by_head[head] = Some(draft);
    }
    RoundCost {
        streams: kind.streams,
        rows: kind.rows,
        context: kind.context,
        experts: None,
        drafts: Longest::by(as_head(round.guesser), asked),
        verify: time(text.fit.verify_ms(kind)),
        draft,
        by_head,
    }
}

/// Numbers from 0 to 1, the same for the same place.
#[derive(Clone, Copy)]
struct Noise(u64);

impl Noise {
    fn of(self, place: usize) -> f64 {
        let bits = mix(self.0 ^ mix(place as u64)) >> 11;
        bits as f64 / (1u64 << 53) as f64
    }
}

/// SplitMix64's finalizer: bits that look random, from any.
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
