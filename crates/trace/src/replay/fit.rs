//! What rounds cost and what guesses were worth, fitted to a trace.
//!
//! Costs are the engine's own curves ([`Costs`]) of what rounds usually take. Rounds are held up now
//! and then, so that all of them take longer than they usually do: by the same factor, as is
//! assumed, whatever their drafts.

use super::text::{Stretch, Told, cost};
use crate::schema::{Known, Round};
use speculate::Guesser;
use speculate::length::{Costs, Longest, RoundCost};
use std::time::Duration;

/// What a trace says of rounds in general.
pub(super) struct Fit {
    costs: Costs,
    /// The chance of a guess of each drafter by its position in the draft, if those before it were accepted; in the order
    /// of [`Guesser::ALL`].
    chances: Vec<Vec<f64>>,
    /// How much longer rounds took than they usually do.
    pub(super) scale: f64,
}

/// Where in the space of costs a round is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// Tokens of the longest text in the round.
    pub(super) context: usize,
    /// Streams in the round.
    pub(super) streams: usize,
    /// Rows of the target.
    pub(super) rows: usize,
    /// The draft that is asked for.
    pub(super) drafts: Longest,
}

impl Fit {
    /// The fit to `rounds`, whose texts are `stretches`; none if no round only decoded.
    pub(super) fn new(rounds: &[Round], stretches: &[Stretch]) -> Option<Self> {
        let mut costs = Costs::default();
        let told: Vec<RoundCost> = rounds.iter().filter_map(cost).collect();
        told.iter().for_each(|cost| costs.learn(cost));
        learn_plain(&mut costs, rounds);
        let of = |guesser: Guesser| {
            let rounds = stretches.iter().flat_map(|stretch| &stretch.rounds);
            chances(rounds.filter(|round| round.is_guessed && round.guesser == guesser))
        };
        let fit = Fit {
            costs,
            chances: Guesser::ALL.into_iter().map(of).collect(),
            scale: 1.0,
        };
        let ms = |cost: &RoundCost| (cost.verify + cost.draft).as_secs_f64() * 1e3;
        let took: f64 = told.iter().map(ms).sum();
        let usual = |c: &RoundCost| {
            let rows = (c.rows, c.experts);
            fit.costs.usual(c.context, c.streams, rows, c.drafts)
        };
        let usual: f64 = told.iter().map(usual).sum();
        (!told.is_empty()).then(|| Fit {
            scale: if usual > 0.0 { took / usual } else { 1.0 },
            ..fit
        })
    }

    /// The chance of a guess of `guesser` at `position` of the draft, if those before it were accepted. Behind the
    /// longest draft of its own in the trace it is that of the last position. Where the trace has no drafts of its
    /// own, it is that of the first that has some, and without any draft there is none.
    pub(super) fn chance(&self, position: usize, guesser: Guesser) -> f64 {
        let own = self.by_position(guesser);
        let others = self.chances.iter().map(Vec::as_slice);
        let known = [own].into_iter().chain(others).find(|all| !all.is_empty());
        let known = known.and_then(|all| all.get(position).or(all.last()));
        known.copied().unwrap_or(0.0)
    }

    /// The chances of guesses of `guesser` by position; none if it has made none.
    pub(super) fn by_position(&self, guesser: Guesser) -> &[f64] {
        &self.chances[guesser.index()]
    }

    /// Milliseconds of the target.
    pub(super) fn verify_ms(&self, kind: Kind) -> f64 {
        let context = self.near(kind.context);
        self.scale * self.costs.verify_ms(context, 1, (kind.rows, None))
    }

    /// Milliseconds of the drafter.
    pub(super) fn draft_ms(&self, kind: Kind) -> f64 {
        let context = self.near(kind.context);
        self.scale * self.costs.draft_ms(context, kind.streams, kind.drafts)
    }

    /// Whether the trace has rounds of this kind, and not only ones like it.
    pub(super) fn is_timed(&self, kind: Kind) -> bool {
        let Kind {
            context,
            streams,
            rows,
            drafts,
        } = kind;
        self.costs.is_believed(context, streams, rows, drafts)
    }

    /// Milliseconds that a round waited for rows of others' prompts.
    pub(super) fn wait_ms(&self, round: &Told) -> f64 {
        if round.cost.is_some() {
            return 0.0;
        }
        let kind = Kind {
            context: round.context,
            streams: round.streams,
            rows: round.streams * (1 + round.drafted),
            drafts: Longest::by(round.guesser, round.asked),
        };
        (round.ms - self.verify_ms(kind) - self.draft_ms(kind)).max(0.0)
    }

    /// A context of which rounds were timed, `context` itself or the nearest.
    fn near(&self, context: usize) -> usize {
        let shifts =
            (0..usize::BITS).flat_map(|n| [context >> n, context.max(1).saturating_mul(1 << n)]);
        let mut known = shifts.filter(|&context| self.costs.has(context));
        known.next().unwrap_or(context)
    }
}

/// Learns what plain rounds take from what the engine says of them, where the trace has too few: an
/// engine may have timed them before.
fn learn_plain(costs: &mut Costs, rounds: &[Round]) {
    let measured = rounds.iter().filter(|r| r.plain == Some(Known::Measured));
    for (cost, plain) in measured.filter_map(|r| Some((cost(r)?, r.plain_ms?))) {
        let none = Longest::default();
        let RoundCost {
            streams, context, ..
        } = cost;
        if costs.is_believed(context, streams, streams, none) {
            continue;
        }
        let draft = costs.draft_ms(context, streams, none).clamp(0.0, plain);
        let time = |ms: f64| Duration::from_secs_f64(ms / 1e3);
        costs.learn(&RoundCost {
            rows: streams,
            experts: None,
            drafts: none,
            verify: time(plain - draft),
            draft: time(draft),
            // All of it is the first head's: what the others take is part of it.
            by_head: cost.by_head.map(|ms| ms.map(|_| Duration::ZERO)),
            ..cost
        });
    }
}

/// The share of guesses that were accepted, by position, of those whose predecessors all were.
fn chances<'a>(rounds: impl Iterator<Item = &'a Told>) -> Vec<f64> {
    let mut counts: Vec<(f64, f64)> = Vec::new();
    for round in rounds {
        let tested = round.guessed.min(round.accepted + 1);
        if counts.len() < tested {
            counts.resize(tested, (0.0, 0.0));
        }
        for (position, (tested, accepted)) in counts.iter_mut().take(tested).enumerate() {
            *tested += 1.0;
            *accepted += f64::from(u8::from(position < round.accepted));
        }
    }
    let share = |(tested, accepted): (f64, f64)| accepted / tested;
    counts.into_iter().map(share).collect()
}
