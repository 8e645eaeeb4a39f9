//! Streams that begin with rows of many earlier texts, more than run at once and more than there is
//! room for, write what each writes after a cold start, bit for bit.

use crate::subjects::{Draft, Subject, TINY, TRAINED, vocab};
use crate::writing::{Setup, Text, best_cpu, in_turn, speculator, take_turns};
use crate::{CONTEXT, samplings};
use backend::Backend;
use cache::Namespace;
use speculate::DraftLength::Fixed;
use speculate::{Prompt, Sampling, Speculator, Stream, StreamOptions, TopLogprobs};
use std::sync::Arc;
use suites::Rng;

#[test]
fn texts_that_outlive_their_places_change_nothing() {
    let b = best_cpu();
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_kept_texts_change_nothing(s, subject, &b);
    }
}

/// Conversations of two system prompts in random order, of which one takes a turn or ends at random,
/// beside each other, against a cold start of each turn; with every drafter.
pub(crate) fn assert_kept_texts_change_nothing(s: usize, subject: Subject, b: &Arc<dyn Backend>) {
    let drafts = [
        Draft::None,
        Draft::Head,
        Draft::Eagle3,
        Draft::Ngram,
        Draft::Portfolio,
        Draft::Block,
        Draft::Model,
        Draft::TWO,
    ];
    let (mut hits, mut cells) = (0, 0);
    for (d, draft) in drafts.into_iter().enumerate() {
        if subject.lacks(draft) {
            continue;
        }
        let setup = Setup {
            draft,
            chunk: [64, 33, 512][(s + d) % 3],
            width: 2,
            kv_format: in_turn(subject, b, s + d),
            ..Setup::plain(subject, b)
        };
        hits += converse(&setup, &samplings()[(s + d) % 3].1, (100 * s + d) as u64);
        cells += 1;
    }
    // Where a text can begin at snapshots only, few turns find one that is still there, and which depends on the texts.
    let (what, turns) = (subject.target, TURNS * cells);
    assert!(
        hits >= 5 * cells,
        "{what}: {hits} of {turns} turns found a beginning"
    );
}

/// Turns of all conversations with a drafter.
const TURNS: usize = 24;

/// A turn that runs.
struct Turn {
    stream: Stream,
    /// Which conversation it is of.
    of: usize,
    prompt: Prompt,
    options: StreamOptions,
}

/// Returns how many turns have found a beginning.
fn converse(setup: &Setup<'_>, sampling: &Sampling, seed: u64) -> usize {
    let what = format!(
        "{} {:?} chunk {}",
        setup.subject.target, setup.draft, setup.chunk
    );
    let mut rng = Rng(seed);
    let n = vocab(setup.subject);
    let mut warm = speculator(setup, &[], &|drafter| drafter);
    let mut cold = speculator(setup, &[], &|drafter| drafter);
    let tokens = |rng: &mut Rng, n_tokens: usize| -> Vec<u32> {
        (0..n_tokens).map(|_| 8 + rng.below(n - 16)).collect()
    };
    let systems = [tokens(&mut rng, 90), tokens(&mut rng, 75)];
    // Messages of each conversation, by where they end.
    let mut texts: Vec<(Vec<u32>, Vec<usize>)> = (0..6)
        .map(|i| (systems[i % 2].clone(), vec![systems[i % 2].len()]))
        .collect();
    let (mut running, mut turn) = (Vec::<Turn>::new(), 0);
    let (mut hits, mut most) = (0, 0);
    while turn < TURNS || !running.is_empty() {
        let free: Vec<usize> = (0..texts.len())
            .filter(|&i| running.iter().all(|turn| turn.of != i))
            .collect();
        if turn < TURNS && running.len() < setup.width {
            let of = free[rng.below(free.len() as u32) as usize];
            let (text, marks) = &mut texts[of];
            if text.len() > CONTEXT - 110 {
                text.truncate(marks[0]);
                marks.truncate(1);
            }
            let message = 20 + rng.below(30) as usize;
            text.extend(tokens(&mut rng, message));
            marks.push(text.len());
            // How a template begins the reply.
            text.extend([9, 10, 11]);
            let prompt = Prompt::from(text.clone()).with_marks(marks.clone());
            let options = StreamOptions {
                sampling: Sampling {
                    seed: sampling.seed + turn as u64,
                    ..sampling.clone()
                },
                max_tokens: 6 + turn % 9,
                stop_tokens: Arc::new([]),
                draft: Fixed(if turn % 5 == 4 { 0 } else { 3 }),
                logprobs: Some(TopLogprobs::of_logits(turn % 3)),
            };
            let others: Vec<&Stream> = running.iter().map(|turn| &turn.stream).collect();
            let stream = warm
                .start(prompt.clone(), options.clone(), &others)
                .unwrap();
            hits += usize::from(stream.n_reused() > 0);
            running.push(Turn {
                stream,
                of,
                prompt,
                options,
            });
            turn += 1;
        }
        let mut streams: Vec<&mut Stream> = running.iter_mut().map(|t| &mut t.stream).collect();
        take_turns(&warm, &mut streams);
        warm.round(&mut streams, setup.chunk).unwrap();
        let (ended, going) = running
            .into_iter()
            .partition(|t| t.stream.finish().is_some());
        running = going;
        for Turn {
            mut stream,
            of,
            prompt,
            options,
        } in ended
        {
            let got = Text::of(&mut stream);
            let (text, marks) = &mut texts[of];
            let rewrites = rng.below(2) == 0;
            // A template leaves out how it began the reply before it goes on.
            text.truncate(text.len() - if rewrites { 2 } else { 0 });
            text.extend(&got.tokens[stream.n_prompt()..]);
            marks.push(text.len());
            let reused = stream.n_reused();
            warm.park(stream);
            most = most.max(warm.kept().0);
            let want = alone(&mut cold, prompt, options, setup.chunk);
            assert!(
                got == want,
                "{what}: {reused} rows reused, parts from a cold start at {:?}",
                got.parting(&want)
            );
        }
    }
    assert!(hits > 0, "{what}: no turn found a beginning");
    assert!(warm.evictions().texts > 0, "{what}: {:?}", warm.evictions());
    assert!(most > setup.width, "{what}: texts outlive places");
    warm.discard_all();
    assert_eq!(
        warm.memory().pages_used().0,
        0,
        "{what}: every page is back"
    );
    assert_eq!(warm.memory().n_open(), 0, "{what}: every sequence is back");
    hits
}

/// What a stream after `prompt` writes after a cold start.
fn alone(cold: &mut Speculator, prompt: Prompt, options: StreamOptions, chunk: usize) -> Text {
    let mut stream = cold.open(prompt, options).unwrap();
    while stream.finish().is_none() {
        take_turns(cold, &mut [&mut stream]);
        cold.round(&mut [&mut stream], chunk).unwrap();
    }
    let text = Text::of(&mut stream);
    cold.close(stream);
    text
}

#[test]
fn a_turn_starts_at_the_last_message_however_the_reply_is_written_again() {
    let b = best_cpu();
    for &subject in TINY.iter().chain(TRAINED) {
        let setup = Setup {
            draft: Draft::Ngram,
            width: 2,
            chunk: 64,
            ..Setup::plain(subject, &b)
        };
        let mut speculator = speculator(&setup, &[], &|drafter| drafter);
        let options = || StreamOptions {
            sampling: Sampling::default(),
            max_tokens: 8,
            stop_tokens: Arc::new([]),
            draft: Fixed(2),
            logprobs: None,
        };
        let tokens: Vec<u32> = (0..200).map(|i| 10 + i % 50).collect();
        let prompt = |tokens: &[u32], marks: &[usize]| {
            Prompt::from(tokens.to_vec()).with_marks(marks.to_vec())
        };
        let what = subject.target;
        let mut first = speculator
            .open(prompt(&tokens[..110], &[70, 105]), options())
            .unwrap();
        while first.finish().is_none() {
            speculator.round(&mut [&mut first], 64).unwrap();
        }
        speculator.park(first);
        // Parts two rows after the last message, and within the second one.
        for (keep, most, state) in [(107, 106, 106), (90, 89, 70)] {
            let second = [&tokens[..keep], &[7; 30]].concat();
            let second = speculator.start(prompt(&second, &[70, 130]), options(), &[]);
            let second = second.unwrap();
            let want = if speculator.memory().has_state() {
                state
            } else {
                most
            };
            assert_eq!(second.n_reused(), want, "{what}");
            speculator.close(second);
        }
        // Another namespace finds nothing.
        let theirs = prompt(&tokens[..110], &[70, 105]).in_namespace(Namespace([1; 32]));
        let theirs = speculator.start(theirs, options(), &[]).unwrap();
        assert_eq!(theirs.n_reused(), 0, "{what}");
        // Not among running ones either.
        let ours = prompt(&tokens[..110], &[70, 105]).in_namespace(Namespace([2; 32]));
        assert_eq!(
            speculator.best_fork(&[&theirs], &ours, true),
            None,
            "{what}"
        );
        assert!(!speculator.should_wait(&[&theirs], &ours, true), "{what}");
        let same = prompt(&tokens[..110], &[70, 105]).in_namespace(Namespace([1; 32]));
        assert!(speculator.should_wait(&[&theirs], &same, true), "{what}");
        speculator.close(theirs);
    }
}
