//! Streams that are preempted, and go on later, write what they would have written in one go, and are
//! drafted for in the same way.

use crate::constrained::Pattern;
use crate::samplings;
use crate::subjects::{Draft, Subject, TINY, TRAINED, prompts, vocab};
use crate::writing::{Setup, Text, best_cpu, in_turn, speculator, take_turns};
use backend::Backend;
use speculate::DraftLength::Fixed;
use speculate::{Accept, Sampling, Speculator, Stats, Stream, StreamOptions, TopLogprobs};
use std::sync::Arc;
use std::time::Duration;

/// Rounds of a stream after which it is preempted: while it reads its prompt, in its text, and once more
/// before it has read all of that again.
const POINTS: [usize; 4] = [1, 9, 10, 17];

/// Rounds that a preempted stream waits for.
const AWAY: usize = 2;

#[test]
fn preempted_streams_write_the_same() {
    let b = best_cpu();
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_preemption_changes_nothing(s, subject, &b);
    }
}

/// Asserts that three streams of `subject` that are preempted at different times write the texts and
/// log-probabilities of streams that never were, with every drafter, greedily and sampled, under a
/// constraint and without, and with the prefix cache and without.
pub(crate) fn assert_preemption_changes_nothing(s: usize, subject: Subject, b: &Arc<dyn Backend>) {
    let drafts = [
        Draft::None,
        Draft::Head,
        Draft::Eagle3,
        Draft::Ngram,
        Draft::Block,
        Draft::Model,
        Draft::TWO,
    ];
    for (d, draft) in drafts.into_iter().enumerate() {
        if subject.lacks(draft) {
            continue;
        }
        for (i, way) in [0, 1 + (s + d) % 2].into_iter().enumerate() {
            let setup = Setup {
                draft,
                length: Fixed(3),
                chunk: [64, 33, 16, 512][(s + d + i) % 4],
                width: 3,
                kv_format: in_turn(subject, b, d + i),
                constrained: (s + d + i).is_multiple_of(2),
                ..Setup::plain(subject, b)
            };
            let prompts = prompts(3, vocab(subject), (10 * s + d) as u64);
            // A drafted token may stay that another draft would not have had: drafts count then.
            let accept = [Accept::Exact, Accept::Residual][(s + d + i) / 2 % 2];
            let run = |keeps| run(&setup, &prompts, &samplings()[way].1, accept, keeps);
            let want = run(None);
            for keeps in [true, false] {
                let got = run(Some(keeps));
                let what = format!(
                    "{} {draft:?} chunk {} way {way}, prefix cache {keeps}",
                    subject.target, setup.chunk
                );
                assert_alike(&what, &got, &want);
            }
        }
    }
}

/// A text and what speculation did for it.
type Ended = (Text, Stats);

fn assert_alike(what: &str, got: &[Ended], want: &[Ended]) {
    for (i, ((got, stats), (want, expected))) in got.iter().zip(want).enumerate() {
        assert!(
            got == want,
            "{what}: text {i} parts at {:?} of {}",
            got.parting(want),
            want.tokens.len()
        );
        assert!(stats.preemptions >= 2, "{what}: text {i} was preempted");
        let untimed = |stats: &Stats| Stats {
            verify: Duration::ZERO,
            draft: Duration::ZERO,
            prefill: Duration::ZERO,
            preemptions: 0,
            held_back: 0,
            ..stats.clone()
        };
        assert_eq!(untimed(stats), untimed(expected), "{what}: text {i}");
    }
}

/// A stream, the rounds that it was in, and for how many more it is away.
struct Going {
    stream: Stream,
    rounds: usize,
    away: usize,
}

/// Writes after `prompts`. Streams are preempted if the prefix cache keeps them or not is said.
fn run(
    setup: &Setup<'_>,
    prompts: &[Vec<u32>],
    sampling: &Sampling,
    accept: Accept,
    keeps: Option<bool>,
) -> Vec<Ended> {
    let mut speculator = speculator(setup, &[], &|drafter| drafter).accepting(accept);
    let vocab = speculator.target().vocab_size() as u32;
    let mut going = Vec::new();
    for (i, prompt) in prompts.iter().enumerate() {
        let options = StreamOptions {
            sampling: Sampling {
                seed: sampling.seed + i as u64,
                ..sampling.clone()
            },
            max_tokens: 60 + i,
            stop_tokens: Arc::new([]),
            draft: setup.length,
            logprobs: Some(TopLogprobs::of_logits(i)),
        };
        let mut stream = speculator.open(prompt.clone(), options).unwrap();
        if setup.constrained {
            stream.constrain(Box::new(Pattern::new(vocab, i as u32)));
        }
        going.push(Going {
            stream,
            rounds: 0,
            away: 0,
        });
    }
    while going.iter().any(|g| g.stream.finish().is_none()) {
        step(&mut speculator, &mut going, setup.chunk, keeps);
    }
    let end = |mut going: Going| {
        let ended = (Text::of(&mut going.stream), going.stream.stats().clone());
        speculator.close(going.stream);
        ended
    };
    let ended = going.into_iter().map(end).collect();
    speculator.discard_all();
    assert_eq!(speculator.memory().pages_used().0, 0, "every page is back");
    assert_eq!(speculator.memory().n_open(), 0, "every sequence is back");
    ended
}

/// Has those go on that were away long enough, runs a round, and preempts those whose time it is.
fn step(speculator: &mut Speculator, going: &mut [Going], chunk: usize, keeps: Option<bool>) {
    for i in 0..going.len() {
        if !going[i].stream.is_preempted() {
            continue;
        }
        going[i].away -= 1;
        if going[i].away > 0 {
            continue;
        }
        let (before, rest) = going.split_at_mut(i);
        let (one, after) = rest.split_first_mut().unwrap();
        let others = before.iter().chain(&*after).map(|g| &g.stream);
        let others: Vec<&Stream> = others.filter(|s| !s.is_preempted()).collect();
        let reuses = keeps == Some(true);
        speculator.go_on(&mut one.stream, reuses, &others).unwrap();
        if !reuses {
            assert_eq!(
                one.stream.n_due(),
                one.stream.tokens().len(),
                "all runs again"
            );
        }
    }
    let running = going.iter_mut();
    let running = running.filter(|g| g.stream.finish().is_none() && !g.stream.is_preempted());
    let mut streams: Vec<&mut Stream> = running
        .map(|g| {
            g.rounds += 1;
            &mut g.stream
        })
        .collect();
    if !streams.is_empty() {
        take_turns(speculator, &mut streams);
        speculator.round(&mut streams, chunk).unwrap();
    }
    let Some(keeps) = keeps else { return };
    for (i, g) in going.iter_mut().enumerate() {
        let goes = g.stream.finish().is_none() && !g.stream.is_preempted();
        if goes && POINTS.contains(&(g.rounds + i)) {
            let due = g.stream.n_due();
            speculator.preempt(&mut g.stream, keeps);
            assert!(due < g.stream.tokens().len(), "something had run");
            g.away = AWAY;
        }
    }
}
