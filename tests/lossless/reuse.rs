//! A stream that goes on from what another one has left writes what a fresh one would.

use crate::subjects::{Draft, Subject, TINY, TRAINED, vocab};
use crate::writing::{Setup, Text, best_cpu, in_turn, speculator, take_turns};
use crate::{CONTEXT, samplings};
use backend::Backend;
use speculate::DraftLength::Fixed;
use speculate::{Drafter, Parked, Sampling, Speculator, Stream, StreamOptions, TopLogprobs};
use std::sync::{Arc, Mutex};
use suites::{Noting, Rng};

#[test]
fn a_beginning_that_is_remembered_changes_nothing() {
    let b = best_cpu();
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_reuse_changes_nothing(s, subject, &b);
    }
}

/// Turns of two conversations beside each other, each of which goes on from what its last
/// one has left, against the same ones from the start. Alone, they also draft the same.
pub(crate) fn assert_reuse_changes_nothing(s: usize, subject: Subject, b: &Arc<dyn Backend>) {
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
        let (_, sampling) = &samplings()[(s + d) % 3];
        let setup = Setup {
            draft,
            chunk: [512, 33, 7][(s + d) % 3],
            width: 2,
            kv_format: in_turn(subject, b, d),
            ..Setup::plain(subject, b)
        };
        let whole = Setup {
            chunk: 512,
            ..setup
        };
        let drafts = Drafts::default();
        let noting = |inner| -> Box<dyn Drafter> {
            let drafts = drafts.clone();
            Box::new(Noting { inner, drafts })
        };
        let mut fresh = speculator(&whole, &[], &noting);
        let mut going = speculator(&setup, &[], &noting);
        let mut rng = Rng((100 * s + d) as u64);
        let mut left: Vec<(Parked, Text, usize)> = Vec::new();
        let mut reused = [0; WAYS];
        for turn in 0..3 * WAYS {
            let options = |of: usize| StreamOptions {
                sampling: Sampling {
                    seed: sampling.seed + (2 * turn + of) as u64,
                    ..sampling.clone()
                },
                max_tokens: 20 + (turn + 3 * of) % 7,
                stop_tokens: Arc::new([]),
                draft: Fixed(if turn % 4 == 3 { 0 } else { 3 }),
                logprobs: Some(TopLogprobs::of_logits(of)),
            };
            let way = |of: usize| (turn + of * (turn / WAYS + 1)) % WAYS;
            let mut streams = Vec::new();
            for of in 0..2 {
                let tokens = |n: usize, rng: &mut Rng| -> Vec<u32> {
                    (0..n).map(|_| 8 + rng.below(vocab(subject) - 16)).collect()
                };
                if turn == 0 {
                    let prompt = tokens(170 + 9 * of, &mut rng);
                    streams.push(going.open(prompt, options(of)).unwrap());
                    continue;
                }
                let (parked, text, n_prompt) = left.remove(0);
                let more = tokens(170, &mut rng);
                let prompt = next(way(of), &text.tokens, n_prompt, &more);
                let goes_on = prompt.starts_with(&text.tokens);
                let stream = going.resume(parked, prompt, options(of)).unwrap();
                // After a turn without drafts, the drafter has to learn its rows.
                if goes_on && turn % 4 != 0 {
                    assert_eq!(stream.n_reused(), text.tokens.len() - 1, "all of it");
                }
                reused[way(of)] += stream.n_reused();
                streams.push(stream);
            }
            let prompts: Vec<usize> = streams.iter().map(Stream::n_prompt).collect();
            let starts: Vec<usize> = streams.iter().map(Stream::n_reused).collect();
            let alone = turn % 2 == 0;
            let ended = if alone {
                let one = |stream| run(&mut going, vec![stream], setup.chunk, &drafts);
                streams.into_iter().flat_map(one).collect()
            } else {
                run(&mut going, streams, setup.chunk, &drafts)
            };
            for (of, (parked, got, guesses)) in ended.into_iter().enumerate() {
                let prompt = got.tokens[..prompts[of]].to_vec();
                let stream = fresh.open(prompt, options(of)).unwrap();
                let mut want = run(&mut fresh, vec![stream], 512, &drafts);
                let (spent, want, expected) = want.pop().unwrap();
                fresh.discard(spent);
                assert!(
                    got == want,
                    "{} {draft:?} chunk {} turn {turn} of {of}, {} of {} rows reused: parts at {:?}",
                    subject.target,
                    setup.chunk,
                    starts[of],
                    prompts[of],
                    got.parting(&want)
                );
                assert!(
                    !alone || guesses == expected,
                    "{} {draft:?} turn {turn} of {of}, {} rows reused: drafts {guesses:?}, not {expected:?}",
                    subject.target,
                    starts[of]
                );
                left.push((parked, got, prompts[of]));
            }
        }
        for (parked, ..) in left {
            going.discard(parked);
        }
        assert_eq!(going.memory().pages_used().0, 0, "every page is back");
        assert_eq!(going.memory().n_open(), 0, "every sequence is back");
        assert!(reused[..3].iter().all(|&n| n > 0), "{reused:?} rows reused");
    }
}

/// Ways in which a prompt may begin like a text.
pub(crate) const WAYS: usize = 6;

/// A prompt that begins like `text`, whose first `n_prompt` tokens were its prompt, and then
/// has some of `more`.
pub(crate) fn next(way: usize, text: &[u32], n_prompt: usize, more: &[u32]) -> Vec<u32> {
    let with = |text: &[u32], n: usize| {
        let room = CONTEXT - 40 - text.len().min(CONTEXT - 40);
        [text, &more[..n.min(room)]].concat()
    };
    // Too long to go on like this.
    if text.len() > CONTEXT - 90 {
        return with(&text[..150], 20);
    }
    match way {
        // Another turn.
        0 => with(text, 25),
        // One before which the reply is written in another way.
        1 => with(&text[..n_prompt - 5], 60),
        // The same prompt again.
        2 => text[..n_prompt].to_vec(),
        // One like its first half.
        3 => with(&text[..n_prompt / 2], 120),
        // A part of it.
        4 => text[..n_prompt - 20].to_vec(),
        // Something else.
        _ => with(&text[..1], 160),
    }
}

/// Takes `streams` to their ends, and returns what is left of them, in order, with their texts
/// and all that was drafted.
pub(crate) fn run(
    speculator: &mut Speculator,
    mut streams: Vec<Stream>,
    chunk: usize,
    drafts: &Drafts,
) -> Vec<(Parked, Text, Vec<Vec<u32>>)> {
    drafts.lock().unwrap().clear();
    loop {
        let going = streams.iter_mut().filter(|s| s.finish().is_none());
        let mut going: Vec<&mut Stream> = going.collect();
        if going.is_empty() {
            break;
        }
        take_turns(speculator, &mut going);
        speculator.round(&mut going, chunk).unwrap();
    }
    let park = |mut stream: Stream| {
        let text = Text::of(&mut stream);
        let drafts = drafts.lock().unwrap();
        let drafts = drafts.iter().filter(|draft| !draft.is_empty());
        let drafts = drafts.cloned().collect();
        (speculator.park(stream), text, drafts)
    };
    streams.into_iter().map(park).collect()
}

pub(crate) type Drafts = Arc<Mutex<Vec<Vec<u32>>>>;
