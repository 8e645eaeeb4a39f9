//! How a head is asked changes none of its guesses: in one go or step by step, and
//! whether it reads every row at once or lets some wait.

use crate::samplings;
use crate::subjects::{Draft, TINY, TRAINED, greedy_prompts, prompts, vocab};
use crate::writing::{Setup, assert_same, write, write_with};
use backend::{Backend, Tensor};
use cache::MemoryFull;
use cpu::{Cpu, CpuOptions};
use speculate::DraftLength::Fixed;
use speculate::draft::{DraftRequest, DraftState, TargetView};
use speculate::{Drafter, Sampling};
use std::sync::Arc;
use suites::Recorder;

#[test]
fn drafts_in_one_go_are_those_of_single_steps() {
    let cpu = || Box::new(Cpu::new(CpuOptions::default()).unwrap());
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
    let backend: Arc<dyn Backend> = Arc::new(Cpu::new(CpuOptions::default()).unwrap());
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

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        self.inner.state()
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &Tensor,
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
