//! Draft length: how many tokens to ask the drafter for.
//!
//! What is decided here changes how soon tokens come, never which ones. A round
//! of `r` rows takes `verify(r) + draft(n)` milliseconds, as measured in earlier
//! rounds, and brings each stream one token and one more for every guess that is
//! accepted. Lengths are those for which the batch's expected tokens a
//! millisecond are most: 0 where plain decoding is.
//!
//! Guesses can be wrong about a text, so a stream's [`Ledger`] compares every
//! round with the plain rounds it replaced. A stream that has lost
//! [`LOSS_STEPS`] plain steps and [`LOSS_SHARE`] of its time drafts no more until
//! plain rounds have made the share smaller: speculation costs at most that, and
//! the first few rounds of each kind, which run cold. A stream that does not draft
//! tries a draft now and then, as far as that limit allows; every stream tries a first.
//!
//! A step of a mixture of experts takes as long as the experts that its rows choose, so that `verify` is of rows and
//! of the experts that they are expected to touch.
//!
//! Decisions only: what rounds cost is measured in `costs.rs`, what guesses were worth
//! is counted in `ledger.rs`, which experts rows choose in `unions.rs`.

mod costs;
mod curve;
mod expect;
mod expert_time;
mod guesser;
mod ledger;
mod plan;
mod stop;
mod unions;
mod worth;

pub(crate) use costs::BELIEVED;
pub use costs::{CostOf, CostPoint, Costs, HeadTimes, Longest, RoundCost};
pub use expect::{DraftInput, Expectation};
pub use guesser::{Guesser, Guessers, MAX_HEADS};
pub use ledger::{LOSS_SHARE, LOSS_STEPS, Ledger};
pub use plan::{Copy, DraftLength, LengthInput, Plan};
pub use stop::StopRule;

pub(crate) use unions::TextRows;
pub(crate) use worth::Drafted;

use backend::ExpertMarks;
use ledger::{Acceptance, Acceptances};
use std::time::Duration;
use unions::{NextUnions, Unions};

/// How much of what a round taught about its own stream still counts a round later.
const KEEP_STREAM: f64 = 0.96;
/// How much of what a round taught about streams to come still counts a round later.
const KEEP_MODEL: f64 = 0.998;
/// The chance of a head's first guess before there was a round.
const FIRST_CHANCE: f64 = 0.8;
/// The chance of a copied token before there was a round, by the tokens of the match before it, from 0.
const FIRST_COPY: [f64; 6] = [0.2, 0.2, 0.3, 0.5, 0.6, 0.7];
/// Chances below this are not worth looking at.
const FAINT: f64 = 0.02;
/// The least chance of a head's guess that a new text starts with, however rarely guesses about
/// others were accepted: it may differ.
const LEAST_PRIOR: f64 = 0.25;
/// The greatest chance of any guess that a new text starts with, for the same reason.
const MOST_PRIOR: f64 = 0.95;

/// Rounds of a text that wait to be entered into its ledger, at most.
const MAX_UNKNOWN: usize = 32;

/// Decides on draft lengths, and on who drafts, from what rounds have cost and brought.
#[derive(Clone, Debug, Default)]
pub struct Lengths {
    /// How often guesses were accepted, over all streams.
    acceptance: Acceptances,
    /// How often tokens of each head's drafts were kept to be verified, by position, of those whose predecessors were.
    kept: [Acceptance; MAX_HEADS],
    costs: Costs,
    /// Whether the device records steps of each kind, so that few kinds are better.
    records: bool,
    /// Which experts steps touch, of a mixture.
    unions: Unions,
}

/// What the next round's cost depends on, whatever its drafts are.
struct Next {
    /// Tokens of the longest stream.
    context: usize,
    /// Which experts its step may touch, of a mixture.
    unions: Option<NextUnions>,
}

impl Lengths {
    /// Nothing known yet, on a device that records steps of each kind or does not.
    pub(crate) fn on_device(records: bool) -> Self {
        Lengths {
            records,
            costs: Costs::counted(records),
            ..Lengths::default()
        }
    }

    /// Whether the device records steps of each kind.
    pub(crate) fn records(&self) -> bool {
        self.records
    }

    /// What rounds have cost so far.
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Takes `costs` for what rounds cost, until they are measured.
    pub fn set_costs(&mut self, costs: Costs) {
        self.costs = costs.counting(self.records);
    }

    /// Forgets what guesses were worth of which `before` did not know; times are kept.
    pub(crate) fn forget_guesses_since(&mut self, before: &Lengths) {
        self.acceptance = before.acceptance.clone();
        self.kept = before.kept.clone();
        self.unions = before.unions.clone();
    }

    /// Takes note of which experts a step has touched, by what its rows have chosen: `texts` are those of its streams.
    /// Returns how many they are.
    pub(crate) fn touched(
        &mut self,
        marks: &ExpertMarks,
        texts: &mut [(&mut Ledger, TextRows)],
    ) -> usize {
        let learn = |(ledger, rows): &mut (&mut Ledger, TextRows)| {
            self.unions.learn(&mut ledger.unions, marks, rows)
        };
        let shares: Vec<f64> = texts.iter_mut().map(learn).collect();
        let union = marks.union(0..marks.n_rows()).len();
        let share = union as f64 / marks.n_experts() as f64;
        self.unions.learn_overlap(&shares, share);
        union
    }

    /// Takes note of a step of `rows` rows that is no round's, and that touched `experts` in `time`.
    pub(crate) fn timed_step(&mut self, rows: usize, experts: f64, time: Duration) {
        self.costs.learn_step(rows, experts, time);
    }

    /// What the next round of `streams` depends on.
    fn next<'a>(&self, streams: impl Iterator<Item = &'a LengthInput<'a>>, context: usize) -> Next {
        let unions = self.unions.next(streams.map(|s| &s.ledger.unions));
        Next { context, unions }
    }

    /// Milliseconds that the next round takes with these drafts, of which so many `rows` are expected to be verified.
    fn round_ms(&self, next: &Next, plans: &[Plan], rows: f64) -> f64 {
        let experts = next.unions.as_ref().map(|unions| unions.of(plans));
        let verify = |rows: f64| {
            let rows = rows as usize;
            self.costs
                .verify_ms(next.context, plans.len(), (rows, experts))
        };
        let (low, share) = (rows.floor(), rows.fract());
        let mut ms = verify(low);
        if share > 0.0 {
            ms += share * (verify(low + 1.0) - ms);
        }
        let longest = Longest::of(plans.iter().copied());
        ms + self.costs.draft_ms(next.context, plans.len(), longest)
    }

    /// The chance that the token at `position` of a draft is kept to be verified if those before it are
    /// ([`Lengths::worth`]).
    fn kept(&self, stream: &LengthInput<'_>, guesser: Guesser, position: usize) -> f64 {
        match guesser {
            Guesser::Head(head) if stream.may_be_cut => self.kept[head].chance(position, 1.0),
            _ => 1.0,
        }
    }

    /// The next drafts, one for each of `streams`.
    pub fn choose(&self, streams: &[LengthInput<'_>]) -> Vec<Plan> {
        let likelier = streams.iter().map(|s| self.likelier(s, &Guesser::ALL));
        let likelier: Vec<Guesser> = likelier.collect();
        let start = |(s, &guesser): (&LengthInput<'_>, &Guesser)| match s.is_fixed() {
            true => Plan {
                guesser,
                tokens: s.most(guesser),
            },
            false => Plan::default(),
        };
        let mut plans: Vec<Plan> = streams.iter().zip(&likelier).map(start).collect();
        let context = streams.iter().map(|s| s.context).max().unwrap_or(0);
        let Some(plain) = self.costs.plain_step(context, streams.len()) else {
            for (i, stream) in streams.iter().enumerate() {
                if !stream.is_fixed() && !stream.ledger.tried {
                    plans[i] = self.likely(stream, likelier[i]);
                }
            }
            return plans;
        };
        let may_grow = |s: &LengthInput<'_>| !s.is_fixed() && s.ledger.may_draft(plain);
        let grows: Vec<bool> = streams.iter().map(may_grow).collect();
        let next = self.next(streams.iter(), context);
        let mut best = self.best_by(streams, &next, &plans, &grows, &likelier);
        for (i, stream) in streams.iter().enumerate() {
            if grows[i] && best[i].tokens == 0 && stream.ledger.is_curious() {
                best[i] = self.likely(stream, likelier[i]);
            }
        }
        self.try_others(streams, plain, &grows, &mut best);
        level(streams, &mut best, self.records);
        best
    }

    /// Where a stream has several heads, has one that others keep from guessing do so now and then: what its
    /// guesses are worth in this text shows in no other way. One head for all streams, since it takes the
    /// same time for them all.
    fn try_others(
        &self,
        streams: &[LengthInput<'_>],
        plain: f64,
        grows: &[bool],
        best: &mut [Plan],
    ) {
        let overdue = |i: usize, head: usize| {
            let (stream, guesser) = (&streams[i], Guesser::Head(head));
            let is_free = grows[i] && stream.pinned.is_none() && stream.heads.n_heads() > 1;
            let is_idle = best[i].tokens == 0 || best[i].guesser != guesser;
            let could = is_free && is_idle && stream.most(guesser) > 0;
            stream.ledger.overdue(head, plain).filter(|_| could)
        };
        let all = (0..streams.len()).flat_map(|i| (0..MAX_HEADS).map(move |head| (i, head)));
        let most = all.filter_map(|(i, head)| Some((overdue(i, head)?, head)));
        let Some((_, head)) = most.max_by_key(|&(idle, _)| idle) else {
            return;
        };
        let due: Vec<usize> = (0..streams.len())
            .filter(|&i| overdue(i, head).is_some())
            .collect();
        for i in due {
            best[i] = self.likely(&streams[i], Guesser::Head(head));
        }
    }

    /// The plans of most expected tokens a millisecond where each of `streams` does what is likelier to be right, all
    /// that can have the same one guess, or one of the same two. A head takes the same time for one
    /// stream as for several, so that who guesses is chosen for all together.
    fn best_by(
        &self,
        streams: &[LengthInput<'_>],
        next: &Next,
        plans: &[Plan],
        grows: &[bool],
        likelier: &[Guesser],
    ) -> Vec<Plan> {
        let with = |guesser: &dyn Fn(usize) -> Guesser| {
            let mut plans = plans.to_vec();
            for (i, plan) in plans.iter_mut().enumerate().filter(|(i, _)| grows[*i]) {
                plan.guesser = streams[i].pinned_or(guesser(i));
            }
            self.best(streams, next, plans, grows)
        };
        let mut best = with(&|i| likelier[i]);
        let able_for = |s: &LengthInput<'_>| Guesser::ALL.map(|guesser| s.most(guesser) > 0);
        let able: Vec<[bool; Guesser::ALL.len()]> = streams.iter().map(able_for).collect();
        let several = |able: &[bool; Guesser::ALL.len()]| able.iter().filter(|&&a| a).count() > 1;
        if !able.iter().any(several) {
            return best.0;
        }
        let could = |guesser: &Guesser| able.iter().any(|able| able[guesser.index()]);
        let able: Vec<Guesser> = Guesser::ALL.into_iter().filter(could).collect();
        let mut better = |other: (Vec<Plan>, f64)| {
            if other.1 > best.1 {
                best = other;
            }
        };
        for &all in &able {
            better(with(&|_| all));
        }
        // With two, each stream has its likelier one already.
        if able.len() > 2 && streams.len() > 1 {
            for (i, &one) in able.iter().enumerate() {
                for &other in &able[i + 1..] {
                    better(with(&|i| self.likelier(&streams[i], &[one, other])));
                }
            }
        }
        best.0
    }

    /// The lengths of most expected tokens a millisecond, from those of `plans` on, and these tokens a
    /// millisecond. Drafts of streams that may grow get longer by one guess at a time, the likeliest first.
    fn best(
        &self,
        streams: &[LengthInput<'_>],
        round: &Next,
        mut plans: Vec<Plan>,
        grows: &[bool],
    ) -> (Vec<Plan>, f64) {
        // The chance that all of a stream's guesses so far are accepted.
        let mut reached = vec![1.0; streams.len()];
        let mut tokens = streams.len() as f64;
        // The chance that the next guess is kept to be verified, and the rows that are.
        let mut kept = vec![1.0; streams.len()];
        let mut rows = tokens;
        for (i, stream) in streams.iter().enumerate() {
            for position in 0..plans[i].tokens {
                reached[i] *= self.chance(stream, plans[i].guesser, position);
                kept[i] *= self.kept(stream, plans[i].guesser, position);
                tokens += reached[i];
                rows += kept[i];
            }
        }
        let mut best = plans.clone();
        let mut best_rate = tokens / self.round_ms(round, &plans, rows);
        loop {
            let next = (0..streams.len())
                .filter(|&i| grows[i] && plans[i].tokens < streams[i].most(plans[i].guesser))
                .map(|i| {
                    let chance = self.chance(&streams[i], plans[i].guesser, plans[i].tokens);
                    (i, reached[i] * chance)
                })
                .max_by(|a, b| a.1.total_cmp(&b.1));
            let Some((i, chance)) = next.filter(|n| n.1 > FAINT) else {
                return (best, best_rate);
            };
            kept[i] *= self.kept(&streams[i], plans[i].guesser, plans[i].tokens);
            rows += kept[i];
            plans[i].tokens += 1;
            reached[i] = chance;
            tokens += chance;
            let rate = tokens / self.round_ms(round, &plans, rows);
            if rate > best_rate {
                best_rate = rate;
                best.copy_from_slice(&plans);
            }
        }
    }

    /// Tokens a millisecond that are expected of a round with the drafts `plans`, one for each of `streams`.
    fn rate(&self, streams: &[LengthInput<'_>], plans: &[Plan]) -> f64 {
        let context = streams.iter().map(|s| s.context).max().unwrap_or(0);
        let round = self.next(streams.iter(), context);
        let grows = vec![false; streams.len()];
        self.best(streams, &round, plans.to_vec(), &grows).1
    }

    /// Who is to guess for `stream`: whoever of `among` is expected to have most tokens accepted, the first of them if
    /// it is as good as any.
    fn likelier(&self, stream: &LengthInput<'_>, among: &[Guesser]) -> Guesser {
        let expected = |guesser: Guesser| {
            let mut reached = 1.0;
            let each = (0..stream.most(guesser)).map(|position| {
                reached *= self.chance(stream, guesser, position);
                reached
            });
            each.sum::<f64>()
        };
        let mut best = (among[0], expected(among[0]));
        for &other in &among[1..] {
            let by_other = expected(other);
            if by_other > best.1 {
                best = (other, by_other);
            }
        }
        stream.pinned_or(best.0)
    }

    /// The draft up to where it is rather accepted than not, of at least 1 token where there is
    /// room.
    fn likely(&self, stream: &LengthInput<'_>, guesser: Guesser) -> Plan {
        let mut reached = 1.0;
        let likely = |&position: &usize| {
            reached *= self.chance(stream, guesser, position);
            reached >= 0.5
        };
        let most = stream.most(guesser);
        let tokens = (0..most).take_while(likely).count().max(1).min(most);
        Plan { guesser, tokens }
    }

    /// Takes note of a stream's verified draft.
    pub fn verified(
        &mut self,
        ledger: &mut Ledger,
        guesser: Guesser,
        n_drafted: usize,
        n_accepted: usize,
    ) {
        // Copies are judged by `proposed`, whether they were drafts or not.
        if let Guesser::Head(head) = guesser {
            let own = &mut ledger.acceptance.heads[head];
            own.learn(KEEP_STREAM, n_drafted, n_accepted);
            if n_drafted > 0 {
                let all = &mut self.acceptance.heads[head];
                let prior = |position| all.prior(position, FIRST_CHANCE);
                own.fit_shift(|position| prior(position).clamp(LEAST_PRIOR, MOST_PRIOR));
                all.learn(KEEP_MODEL, n_drafted, n_accepted);
            }
        }
        ledger.verified(guesser, n_drafted, n_accepted);
    }

    /// Takes note of what a copy would have been worth, whether it was the draft or not: of its
    /// first `n_tested` tokens, before which the text is known, the first `n_right` are the text's.
    pub fn proposed(
        &mut self,
        ledger: &mut Ledger,
        matched: usize,
        n_tested: usize,
        n_right: usize,
    ) {
        let all = [
            (KEEP_STREAM, &mut ledger.acceptance),
            (KEEP_MODEL, &mut self.acceptance),
        ];
        for (keep, acceptance) in all {
            acceptance.copies(matched).learn(keep, n_tested, n_right);
        }
    }

    /// Takes note of what a round took.
    pub fn took(&mut self, cost: &RoundCost) {
        self.costs.learn(cost);
    }

    /// Enters a round that brought a stream `emitted` tokens into its ledger: with
    /// what such a round usually takes, since a hiccup is nobody's fault. The first
    /// rounds of a kind find caches and memory cold: they wait until that is known.
    pub fn book(&self, ledger: &mut Ledger, cost: &RoundCost, emitted: usize) {
        let Some(plain) = self.costs.plain_step(cost.context, cost.streams) else {
            return;
        };
        let mut unknown = std::mem::take(&mut ledger.unknown);
        unknown.retain(|(cost, emitted)| {
            let plain = self.costs.plain_step(cost.context, cost.streams);
            let known = self.costs.believed(cost).zip(plain);
            known.inspect(|((ms, _), plain)| ledger.enter_late(*ms, *emitted, *plain));
            known.is_none()
        });
        match self.costs.believed(cost) {
            Some(times) => ledger.enter(times, emitted, plain),
            None => {
                if unknown.len() == MAX_UNKNOWN {
                    unknown.remove(0);
                }
                unknown.push((*cost, emitted));
            }
        }
        ledger.unknown = unknown;
    }

    /// The chance that the guess at `position` of a draft by `guesser` is accepted if those before it are.
    fn chance(&self, stream: &LengthInput<'_>, guesser: Guesser, position: usize) -> f64 {
        let own = &stream.ledger.acceptance;
        let matched = stream.copy.map_or(0, |copy| copy.matched);
        let (all, own, first, least) = match guesser {
            Guesser::Head(head) => {
                let all = &self.acceptance.heads[head];
                (all, &own.heads[head], FIRST_CHANCE, LEAST_PRIOR)
            }
            Guesser::Ngram => {
                let first = FIRST_COPY[matched.min(FIRST_COPY.len() - 1)];
                let all = self.acceptance.of_copies(matched);
                (all, own.of_copies(matched), first, 0.0)
            }
        };
        let prior = all.prior(position, first).clamp(least, MOST_PRIOR);
        own.chance(position, prior)
    }
}

/// Lengths that the drafts of a batch are made of on a device that records steps.
pub(crate) const LEVELS: [usize; 8] = [1, 2, 3, 4, 6, 8, 12, 16];

/// Gives the drafts that one head makes for several streams one length, where they may be cut afterwards: the head takes
/// little longer for them, and which guesses are worth a row shows better once they are made. On a device that `records`
/// steps, lengths are also few.
fn level(streams: &[LengthInput<'_>], plans: &mut [Plan], records: bool) {
    for head in (0..MAX_HEADS).map(Guesser::Head) {
        let of_head = |(i, plan): (usize, &Plan)| {
            let is_one = plan.guesser == head && plan.tokens > 0 && streams[i].may_be_cut;
            is_one.then_some(i)
        };
        let all: Vec<usize> = plans.iter().enumerate().filter_map(of_head).collect();
        if all.len() < 2 {
            continue;
        }
        let longest = all.iter().map(|&i| plans[i].tokens).max().unwrap_or(0);
        let level = LEVELS.into_iter().find(|&n| n >= longest && records);
        let longest = level.unwrap_or(longest);
        for i in all {
            plans[i].tokens = longest.min(streams[i].most(head));
        }
    }
}

#[cfg(test)]
mod arbitration;
#[cfg(test)]
mod tests;
