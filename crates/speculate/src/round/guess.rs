//! Who guesses what after a round: the plan of all drafts, then copies, then one head after the other. Every head that
//! may ever guess for a text sees its rows, whoever makes the draft.

use super::{StreamRows, Verified};
use crate::draft::{DraftRequest, TargetView};
use crate::length::{Drafted, Guesser, HeadTimes, LengthInput, Longest, Plan, StopRule};
use crate::speculator::Speculator;
use crate::stream::{Finish, Stream};
use backend::DeviceError;
use std::ops::Range;
use std::time::Instant;

/// Tokens that a stream may be drafted for.
#[derive(Clone, Copy, Default)]
struct DraftLimit {
    plan: Plan,
    /// Whether there was room for a draft and none would pay.
    is_held_back: bool,
}

impl Speculator {
    /// Has the drafters guess. Returns the longest drafts, and the time of each head.
    pub(super) fn guess(
        &mut self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        verified: &Verified,
    ) -> Result<(Longest, HeadTimes), DeviceError> {
        let context = self.memory.size().context;
        if self.drafters.copies {
            for (stream, rows) in streams.iter_mut().zip(rows) {
                stream.look_up_copy(rows.chooses, context);
            }
        } else if self.drafters.heads.is_empty() {
            return Ok(Default::default());
        }
        let (mut limits, rules) = self.draft_limits(streams, rows);
        let mut most = vec![0; streams.len()];
        for (i, stream) in streams.iter_mut().enumerate() {
            if !may_be_read(stream) {
                continue;
            }
            stream.stats.held_back += u64::from(limits[i].is_held_back);
            let Plan { guesser, tokens } = limits[i].plan;
            stream.n_asked = tokens;
            most[i] = stream.begin_draft(tokens, stream.draft_room(context));
            stream.guesser = guesser;
            if guesser == Guesser::Ngram {
                let copy = stream.ngrams.draft(&stream.given, most[i]);
                stream.take_draft(copy);
            }
        }
        let mut times = HeadTimes::default();
        let mut first_tap = 0;
        for (head, time) in times.iter_mut().enumerate().take(self.n_heads()) {
            let start = Instant::now();
            let taps = first_tap..first_tap + self.drafters.heads[head].taps().len();
            first_tap = taps.end;
            let wishes = (&most[..], &rules[..]);
            self.guess_by(head, streams, rows, (verified, taps), wishes)?;
            *time = Some(start.elapsed());
        }
        for (i, limit) in limits.iter_mut().enumerate() {
            if rules[i].is_some() {
                limit.plan.tokens = streams[i].draft.len();
            }
        }
        let longest = Longest::of(limits.iter().map(|limit| limit.plan));
        self.cut_drafts(streams, rows, &limits);
        Ok((longest, times))
    }

    /// Cuts drafts where the drafter itself is so unsure that the guesses are not worth their rows. Copies are cut as well on a
    /// device that records steps: their lengths would make steps of ever new sizes.
    fn cut_drafts(
        &mut self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        limits: &[DraftLimit],
    ) {
        let records = self.lengths.records();
        let is_cut = |stream: &Stream| {
            let is_told = match stream.guesser {
                Guesser::Head(_) => !stream.confidences.is_empty(),
                Guesser::Ngram => records && !stream.draft.is_empty(),
            };
            is_told && stream.may_be_cut()
        };
        if !streams.iter().any(|stream| is_cut(stream)) {
            return;
        }
        let context = self.memory.size().context;
        let n_heads = self.n_heads();
        let going: Vec<usize> = (0..streams.len())
            .filter(|&i| streams[i].finish.is_none())
            .collect();
        let drafted = |&i: &usize| Drafted {
            input: streams[i].length_input(rows[i].chooses, context, n_heads),
            plan: limits[i].plan,
            tokens: streams[i].draft.len(),
            given: streams[i].given.len(),
            may_be_cut: is_cut(streams[i]),
            confidences: match (is_cut(streams[i]), streams[i].guesser) {
                (true, Guesser::Head(_)) => &streams[i].confidences,
                _ => &[],
            },
        };
        let drafted: Vec<Drafted<'_>> = going.iter().map(drafted).collect();
        let is_recorded = |rows| self.is_recorded(rows, going.len());
        let worth = self.lengths.worth(&drafted, &is_recorded);
        for (i, n) in going.into_iter().zip(worth) {
            let stream = &mut streams[i];
            if !is_cut(stream) {
                continue;
            }
            if let (Guesser::Head(head), true) = (stream.guesser, stream.given.is_empty()) {
                self.lengths.cut(head, stream.draft.len(), n);
            }
            stream.cut_draft(n);
        }
    }

    /// Has `head`, which reads the rows `taps` of those inside the target, see the rows that stay, and make the drafts
    /// that are planned for it, with so many tokens at `most` or up to where a rule ends them.
    fn guess_by(
        &mut self,
        head: usize,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        (verified, taps): (&Verified, Range<usize>),
        (most, rules): (&[usize], &[Option<StopRule>]),
    ) -> Result<(), DeviceError> {
        let mut readers = Vec::with_capacity(streams.len());
        let mut requests: Vec<DraftRequest<'_>> = Vec::with_capacity(streams.len());
        for (i, (stream, rows)) in streams.iter_mut().zip(rows).enumerate() {
            if !may_be_read(stream) || !stream.is_read_by(head) {
                continue;
            }
            let n_kept = stream.state.sequence.len() - rows.n_before;
            let kept = rows.first..rows.first + n_kept;
            let is_guesser = stream.guesser == Guesser::Head(head);
            let limit = if is_guesser { most[i] } else { 0 };
            let rejects = is_guesser && stream.rejects();
            let tells = is_guesser && (stream.may_be_cut() || stream.is_calibration);
            let stop = rules[i].as_ref().filter(|_| is_guesser);
            if let Some(request) = stream.draft_request(head, kept, limit, rejects, tells, stop) {
                readers.push((i, is_guesser));
                requests.push(request);
            }
        }
        if requests.is_empty() {
            return Ok(());
        }
        let target = TargetView {
            b: &*self.b,
            model: &*self.target,
            memory: &self.memory,
            taps: &verified.taps[taps],
        };
        let drafts = self.drafters.heads[head].draft(target, &verified.hidden, &mut requests);
        self.b.finish()?;
        for ((i, is_guesser), draft) in readers.into_iter().zip(drafts) {
            if is_guesser {
                streams[i].take_draft(draft);
            }
        }
        Ok(())
    }

    /// How many tokens each stream may be drafted for, and by whom: none once it has ended. And where its draft may end
    /// before.
    fn draft_limits(
        &self,
        streams: &[&mut Stream],
        rows: &[StreamRows],
    ) -> (Vec<DraftLimit>, Vec<Option<StopRule>>) {
        let context = self.memory.size().context;
        let n_heads = self.n_heads();
        let going: Vec<usize> = (0..streams.len())
            .filter(|&i| streams[i].finish.is_none())
            .collect();
        let input = |&i: &usize| streams[i].length_input(rows[i].chooses, context, n_heads);
        let inputs: Vec<LengthInput<'_>> = going.iter().map(input).collect();
        let mut limits = vec![DraftLimit::default(); streams.len()];
        let mut rules = vec![None; streams.len()];
        let plans = self.lengths.choose(&inputs);
        for (&i, rule) in going.iter().zip(self.lengths.stop_rules(&inputs, &plans)) {
            let Some(rule) = rule else { continue };
            let stops = self.drafters.heads[rule.head()].stops();
            if stops && streams[i].given.is_empty() && !streams[i].is_calibration {
                rules[i] = Some(rule);
            }
        }
        for ((&i, input), plan) in going.iter().zip(&inputs).zip(plans) {
            limits[i] = DraftLimit {
                plan,
                is_held_back: input.could_draft() && plan.tokens == 0,
            };
        }
        (limits, rules)
    }
}

/// Whether a head that may guess for `stream` reads its rows: a text that is never drafted for need not be read, nor
/// one without a pending token. One that has ended is: another text may go on from its rows.
fn may_be_read(stream: &Stream) -> bool {
    let is_fault = stream.finish.is_some_and(Finish::is_fault);
    stream.options.draft.max() > 0 && !is_fault
}
