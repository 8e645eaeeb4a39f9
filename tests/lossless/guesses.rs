//! How a head is asked changes none of its guesses: in one go or step by step, and
//! whether it reads every row at once or lets some wait.

use crate::samplings;
use crate::subjects::{Draft, Subject, TINY, TRAINED, greedy_prompts, prompts, vocab};
use crate::writing::{
    Setup, assert_same, best_cpu, one_thread, speculator, write, write_groups, write_with,
};
use backend::Backend;
use cache::MemoryFull;
use speculate::DraftLength::{Fixed, UpTo};
use speculate::draft::{DraftRequest, DraftState, HiddenRows, TargetView};
use speculate::length::{CostOf, CostPoint, Costs};
use speculate::{Drafter, Sampling, Speculator, Stats, Stream, StreamOptions, TopLogprobs};
use std::sync::Arc;
use std::time::Duration;
use suites::Recorder;

#[test]
fn drafts_in_one_go_are_those_of_single_steps() {
    let cpu = || Box::new(one_thread());
    assert_same_guesses(
        &(Arc::new(Recorder::new(cpu())) as _),
        &(Arc::new(Recorder::chaining(cpu())) as _),
    );
}

/// A device that keeps a draft's tokens to itself until all are chosen guesses what one
/// guesses that tells each of them.
pub(crate) fn assert_same_guesses(single: &Arc<dyn Backend>, chaining: &Arc<dyn Backend>) {
    for (s, &subject) in TINY.iter().chain(&TRAINED[..3]).enumerate() {
        let prompts = match subject.target.strip_prefix("models/") {
            Some(name) => greedy_prompts(name)[..2].to_vec(),
            None => prompts(2, vocab(subject), s as u64),
        };
        let heads = [
            subject.has_head().then_some(Draft::Head),
            subject.eagle3.map(|_| Draft::Eagle3),
            subject.model.map(|_| Draft::Model),
        ];
        for (d, draft) in heads.into_iter().flatten().enumerate() {
            for (i, (what, sampling)) in samplings().into_iter().take(2).enumerate() {
                let setup = |backend| Setup {
                    draft,
                    length: Fixed([3, 8, 1, 5][(s + d + i) % 4]),
                    chunk: 33,
                    width: [1, 2][(s + i) % 2],
                    shortlist: (s + d + i).is_multiple_of(2),
                    ..Setup::plain(subject, backend)
                };
                let want = write(&setup(single), &prompts, 0, &sampling, &[]);
                let got = write(&setup(chaining), &prompts, 0, &sampling, &[]);
                assert_same(&setup(chaining), what, &got, &want.texts);
                assert_eq!(
                    (got.drafted, got.accepted),
                    (want.drafted, want.accepted),
                    "{} {draft:?} {what}",
                    subject.target
                );
            }
        }
    }
}

#[test]
fn a_head_that_rested_guesses_what_one_guesses_that_read_on() {
    let backend: Arc<dyn Backend> = best_cpu();
    let subject = |name: &str| *TRAINED.iter().find(|s| s.target.ends_with(name)).unwrap();
    for (name, draft) in [
        ("tiny-qwen3.5", Draft::Head),
        ("tiny-qwen3.5", Draft::Eagle3),
        ("tiny-gemma4", Draft::Eagle3),
        ("tiny-gemma4", Draft::Head),
        ("tiny-gemma4", Draft::Model),
        ("tiny-qwen3.5", Draft::Model),
    ] {
        let prompts = greedy_prompts(name)[..4].to_vec();
        for (chunk, width) in [(1, 1), (7, 3), (64, 2)] {
            let setup = Setup {
                draft,
                length: Fixed(3),
                chunk,
                width,
                shortlist: chunk == 7,
                ..Setup::plain(subject(name), &backend)
            };
            let written = |idles| {
                let wrap = |inner| -> Box<dyn Drafter> {
                    Box::new(Resting {
                        inner,
                        idles,
                        round: 0,
                    })
                };
                write_with(&setup, &prompts, 0, &Sampling::default(), &[], &wrap)
            };
            let (want, got) = (written(false), written(true));
            assert_eq!(got.texts, want.texts, "{name} {draft:?}");
            assert_eq!(
                (got.drafted, got.accepted),
                (want.drafted, want.accepted),
                "{name} {draft:?} in chunks of {chunk}"
            );
            assert!(got.accepted > 20, "{name} {draft:?}: {}", got.accepted);
        }
    }
}

#[test]
fn drafts_that_are_cut_where_the_head_is_unsure_change_no_token() {
    let cpu = || Box::new(one_thread());
    let single: Arc<dyn Backend> = Arc::new(Recorder::new(cpu()));
    assert_cuts_change_nothing(&[single, Arc::new(Recorder::chaining(cpu()))]);
}

#[test]
fn a_warm_up_has_steps_of_several_texts_recorded_and_changes_no_token() {
    let cpu = Box::new(one_thread());
    let recorder = Arc::new(Recorder::recording(cpu));
    let backend: Arc<dyn Backend> = recorder.clone();
    let is_wanted = |s: &&Subject| s.target.ends_with("tiny-qwen3.5");
    let subject = *TRAINED.iter().find(is_wanted).unwrap();
    let prompts = greedy_prompts("tiny-qwen3.5")[..3].to_vec();
    let setup = Setup {
        draft: Draft::Head,
        width: 3,
        ..Setup::plain(subject, &backend)
    };
    let mut speculator = speculator(&setup, &[], &|drafter| drafter);
    // Rows of one text, and of several: as many guesses as drafts of these lengths have, and one less of some texts.
    let of_one = (1..=5).map(|rows| (rows, 1));
    let of_more = |n: usize| {
        [0, n, 2 * n - n / 2, 2 * n, 3 * n - n / 2, 3 * n, 4 * n].map(|guesses| (n + guesses, n))
    };
    let kinds: Vec<(usize, usize)> = of_one.chain(of_more(3)).chain(of_more(2)).collect();
    let recorded = |speculator: &Speculator| -> Vec<(usize, usize)> {
        let kinds = kinds.iter().copied();
        kinds
            .filter(|&(rows, n)| speculator.is_recorded(rows, n))
            .collect()
    };
    assert_eq!(recorded(&speculator), []);
    let limit = Duration::from_secs(600);
    speculator.warm_up_prompts(&prompts[0], limit).unwrap();
    // Prompts of 383, 191 and 95 tokens, the first two cut where their last whole page ends.
    let long = recorder.rows_run().split_off(&64);
    assert_eq!(long.into_iter().collect::<Vec<_>>(), [95, 128, 320]);
    assert_eq!(recorded(&speculator), [], "nothing else ran");
    speculator.warm_up(&prompts[0], 4, limit).unwrap();
    assert_eq!(recorded(&speculator), kinds);
    assert!(
        !speculator.is_recorded(3 * 17, 3),
        "longer drafts are not run"
    );

    let options = |draft| StreamOptions {
        sampling: Sampling::default(),
        max_tokens: 40,
        stop_tokens: Arc::new([]),
        draft,
        logprobs: None,
    };
    let mut texts = |draft| -> Vec<Vec<u32>> {
        let open = |prompt: &Vec<u32>| speculator.open(prompt.clone(), options(draft)).unwrap();
        let mut streams: Vec<Stream> = prompts.iter().map(open).collect();
        while streams.iter().any(|stream| stream.finish().is_none()) {
            let going = streams
                .iter_mut()
                .filter(|stream| stream.finish().is_none());
            speculator
                .round(&mut going.collect::<Vec<_>>(), 512)
                .unwrap();
        }
        let texts = streams.iter().map(|stream| stream.output().to_vec());
        let texts = texts.collect();
        streams
            .into_iter()
            .for_each(|stream| speculator.close(stream));
        texts
    };
    let (plain, auto) = (texts(Fixed(0)), texts(UpTo(4)));
    assert_eq!(auto, plain);
}

/// Where each further row of a step costs most of a step, drafts end before unsure guesses, and texts are the same.
pub(crate) fn assert_cuts_change_nothing(backends: &[Arc<dyn Backend>]) {
    let time = |of, count: usize, ns| CostPoint {
        of,
        head: 0,
        octave: 10,
        streams: [3, 0][usize::from(of == CostOf::Verify)],
        count,
        experts: 0,
        ns,
        seen: 3,
    };
    let dear = Costs::of_points(&[
        time(CostOf::Verify, 1, 1_000_000),
        time(CostOf::Verify, 31, 31_000_000),
        time(CostOf::Draft, 0, 0),
        time(CostOf::Draft, 8, 1_000),
    ]);
    for (s, &subject) in TRAINED.iter().enumerate().take(3) {
        let name = subject.target.strip_prefix("models/").unwrap();
        let prompts = greedy_prompts(name)[..3].to_vec();
        for (i, (what, sampling)) in samplings().into_iter().enumerate() {
            let setup = |draft, length| Setup {
                draft,
                length,
                width: 3,
                ..Setup::plain(subject, &backends[(s + i) % backends.len()])
            };
            let options = |length| {
                let sampling = sampling.clone();
                move |i| StreamOptions {
                    sampling: Sampling {
                        seed: sampling.seed + i as u64,
                        ..sampling.clone()
                    },
                    max_tokens: 40,
                    stop_tokens: Arc::new([]),
                    draft: length,
                    logprobs: Some(TopLogprobs::of_logits(0)),
                }
            };
            let alone = |drafter| drafter;
            let plain = setup(Draft::None, Fixed(0));
            let mut plain = speculator(&plain, &[], &alone);
            let (want, _) = write_groups(&mut plain, &prompts, 64, options(Fixed(0)));
            let cut = setup(Draft::Head, UpTo(8));
            let mut cut = speculator(&cut, &[], &alone);
            let open = |(i, prompt): (usize, &Vec<u32>)| {
                cut.open(prompt.clone(), options(UpTo(8))(i)).unwrap()
            };
            let mut streams: Vec<Stream> = prompts.iter().enumerate().map(open).collect();
            while streams.iter().any(|stream| stream.finish().is_none()) {
                let going = streams.iter_mut().filter(|s| s.finish().is_none());
                let mut going: Vec<&mut Stream> = going.collect();
                // Whatever rounds take here.
                cut.set_costs(dear.clone());
                cut.round(&mut going, 64).unwrap();
            }
            let sum = |of: fn(&Stats) -> u64| streams.iter().map(|s| of(s.stats())).sum::<u64>();
            let (unverified, accepted) = (sum(|s| s.unverified), sum(Stats::accepted));
            assert!(
                unverified > 0 && accepted > 0,
                "{name} {what}: {unverified}, {accepted}"
            );
            for (stream, want) in streams.iter().zip(&want) {
                assert_eq!(stream.tokens(), &want.tokens[..], "{name} {what}");
            }
        }
    }
}

/// A drafter whose drafts are dropped in some rounds, in one stretch for longer than a
/// head lets rows wait.
struct Resting {
    inner: Box<dyn Drafter>,
    /// Whether it is not even asked in those rounds.
    idles: bool,
    round: usize,
}

impl Drafter for Resting {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn taps(&self) -> &[usize] {
        self.inner.taps()
    }

    fn needs_all_hidden(&self) -> bool {
        self.inner.needs_all_hidden()
    }

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        self.inner.state()
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &HiddenRows,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        self.round += 1;
        let rests = !self.round.is_multiple_of(3) || (20..60).contains(&(self.round % 80));
        if rests && self.idles {
            requests.iter_mut().for_each(|request| request.limit = 0);
        }
        let drafts = self.inner.draft(target, hidden, requests);
        if rests {
            return vec![Vec::new(); requests.len()];
        }
        drafts
    }
}
