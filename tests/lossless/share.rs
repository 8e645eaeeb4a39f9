//! Streams that run at the same time and share the rows of a common beginning write what
//! each writes after a cold start, bit for bit.

use crate::subjects::{ALONE, Draft, Subject, TINY, TRAINED, vocab};
use crate::writing::{Setup, Text, best_cpu, in_turn, speculator};
use crate::{CONTEXT, samplings};
use backend::{Backend, PAGE_ROWS};
use speculate::DraftLength::Fixed;
use speculate::{MediaSpan, Prompt, Sampling, Speculator, Stream, StreamOptions, TopLogprobs};
use std::sync::Arc;
use suites::{Rng, finish};

/// Rows that a prompt shares with a text: all before where they part but for one, whose next token
/// is another one, or those of which a model with recurrent state has taken a snapshot.
fn shared(speculator: &Speculator, text: &[u32], prompt: &[u32]) -> usize {
    let alike = text.iter().zip(prompt).take_while(|(a, b)| a == b);
    match speculator.memory().has_state() {
        true => 192,
        false => alike.count() - 1,
    }
}

#[test]
fn streams_that_share_a_prefix_write_what_cold_starts_do() {
    let b = best_cpu();
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_sharing_changes_nothing(s, subject, &b);
    }
}

/// Asserts that three streams of `subject`, two of them forks of one that is running, write
/// the texts and log-probabilities of cold starts, with every drafter, greedily and sampled.
pub(crate) fn assert_sharing_changes_nothing(s: usize, subject: Subject, b: &Arc<dyn Backend>) {
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
        // Greedy, and one of the other two.
        for (i, way) in [0, 1 + (s + d) % 2].into_iter().enumerate() {
            let setup = Setup {
                draft,
                chunk: [64, 33, 7, 512][(s + d + i) % 4],
                width: 3,
                kv_format: in_turn(subject, b, d + i),
                ..Setup::plain(subject, b)
            };
            share(&setup, &samplings()[way].1, (100 * s + 10 * d + i) as u64);
        }
    }
}

fn share(setup: &Setup<'_>, sampling: &Sampling, seed: u64) {
    let mut rng = Rng(seed);
    let n = vocab(setup.subject);
    let mut tokens =
        |n_tokens: usize| -> Vec<u32> { (0..n_tokens).map(|_| 8 + rng.below(n - 16)).collect() };
    let base = tokens(220);
    let second = [&base[..200], &tokens(30)].concat();
    // Parts within the first page that is the second stream's own.
    let third = [&second[..205], &tokens(40)].concat();
    let prompts = [base, second, third];
    let options = |of: usize| StreamOptions {
        sampling: Sampling {
            seed: sampling.seed + of as u64,
            ..sampling.clone()
        },
        max_tokens: 30 + 10 * of,
        stop_tokens: Arc::new([]),
        draft: Fixed(3),
        logprobs: Some(TopLogprobs::of_logits(of)),
    };
    let what = format!(
        "{} {:?} chunk {}",
        setup.subject.target, setup.draft, setup.chunk
    );

    let mut warm = speculator(setup, &[], &|drafter| drafter);
    let mut first = warm.open(prompts[0].clone(), options(0)).unwrap();
    while first.output().len() < 5 {
        warm.round(&mut [&mut first], setup.chunk).unwrap();
    }
    let second = Prompt::from(prompts[1].clone());
    let best = warm.best_fork(&[&first], &second, true);
    let rows = shared(&warm, &prompts[0], &prompts[1]);
    assert_eq!(best, Some((0, rows)), "{what}: what could be shared");
    let used = warm.memory().pages_used().0;
    let mut second = warm.fork(&first, second, options(1)).unwrap();
    assert_eq!(second.n_reused(), rows, "{what}");
    let copied = match rows % PAGE_ROWS {
        0 => 0,
        _ => warm.memory().plan().groups.len(),
    };
    assert_eq!(
        warm.memory().pages_used().0,
        used + copied,
        "{what}: a fork takes a page for rows of a part of one"
    );
    while second.output().len() < 5 {
        // A drafter that is always right may be done with the first one.
        let going = [&mut first, &mut second].into_iter();
        let mut going: Vec<&mut Stream> = going.filter(|s| s.finish().is_none()).collect();
        warm.round(&mut going, setup.chunk).unwrap();
    }
    // As the scheduler starts a request: it finds the second stream, which has most in common.
    let running = [&first, &second];
    let third = warm.start(prompts[2].clone(), options(2), &running);
    let mut third = third.unwrap();
    let rows = shared(&warm, &prompts[1], &prompts[2]);
    assert_eq!(third.n_reused(), rows, "{what}: a fork of a fork");
    // The first ends while the others still read its pages.
    let mut texts = Vec::new();
    finish(
        &mut warm,
        &mut [&mut first, &mut second, &mut third],
        setup.chunk,
    );
    for mut stream in [first, second, third] {
        texts.push(Text::of(&mut stream));
        warm.close(stream);
    }
    assert_eq!(
        warm.memory().pages_used().0,
        0,
        "{what}: every page is back"
    );

    let mut cold = speculator(setup, &[], &|drafter| drafter);
    for (of, (got, prompt)) in texts.iter().zip(prompts).enumerate() {
        let mut stream = cold.open(prompt, options(of)).unwrap();
        finish(&mut cold, &mut [&mut stream], setup.chunk);
        let want = Text::of(&mut stream);
        assert!(
            *got == want,
            "{what}: stream {of} parts from a cold start at {:?}",
            got.parting(&want)
        );
        if !matches!(setup.draft, Draft::None | Draft::Ngram) {
            assert!(stream.stats().drafted() > 0, "{what} has drafted");
        }
        cold.close(stream);
    }
}

/// A prompt whose rows 150..210 are a picture, as far as their keys say.
fn with_picture(tokens: &[u32], hash: u8) -> Prompt {
    let span = MediaSpan {
        rows: 150..210,
        hash: [hash; 16],
        grid: [6, 10],
        is_causal: false,
        embeddings: Arc::default(),
    };
    Prompt::with_media(tokens.to_vec(), vec![span])
}

#[test]
fn pictures_of_equal_placeholders_share_only_the_rows_before_them() {
    let b = best_cpu();
    let has_head = |s: &&Subject| s.target.ends_with("-dense") && !s.lacks(Draft::Eagle3);
    for &subject in TINY.iter().filter(has_head) {
        let has_state = subject.target.contains("qwen");
        let setup = Setup {
            draft: Draft::Eagle3,
            width: 2,
            // So many that windows keep their pages.
            chunk: 200,
            ..Setup::plain(subject, &b)
        };
        let mut speculator = speculator(&setup, &[], &|drafter| drafter);
        let options = || StreamOptions {
            sampling: Sampling::default(),
            max_tokens: 10,
            stop_tokens: Arc::new([]),
            draft: Fixed(2),
            logprobs: None,
        };
        let tokens: Vec<u32> = (0..300).map(|i| 10 + i % 60).collect();
        let mut first = speculator
            .open(with_picture(&tokens, 1), options())
            .unwrap();
        finish(&mut speculator, &mut [&mut first], setup.chunk);
        for (hash, shared) in [
            (1, if has_state { 256 } else { 299 }),
            (2, if has_state { 0 } else { 149 }),
        ] {
            let mut second = speculator
                .fork(&first, with_picture(&tokens, hash), options())
                .unwrap();
            assert_eq!(second.n_reused(), shared, "{} hash {hash}", subject.target);
            finish(&mut speculator, &mut [&mut second], setup.chunk);
            // The model reads the tokens alone.
            assert_eq!(second.tokens(), first.tokens(), "{}", subject.target);
            speculator.close(second);
        }
        let parked = speculator.park(first);
        let other = speculator.resume(parked, with_picture(&tokens, 2), options());
        let other = other.unwrap();
        // All before the picture, but for the row whose next token is in it.
        let rows = if has_state { 0 } else { 149 };
        assert_eq!(other.n_reused(), rows, "{}", subject.target);
        speculator.close(other);
        assert_eq!(speculator.memory().pages_used().0, 0, "every page is back");
    }
}

#[test]
fn no_chunk_of_a_prompt_cuts_a_span_whose_rows_see_each_other() {
    let b = best_cpu();
    // Rows of its pictures see each other.
    let subject = Subject {
        target: "tests/golden/checkpoints/gemma4-vision-standard",
        ..ALONE
    };
    let tokens: Vec<u32> = (0..220).map(|i| 10 + i % 60).collect();
    let options = || StreamOptions {
        sampling: Sampling::default(),
        max_tokens: 10,
        stop_tokens: Arc::new([]),
        draft: Fixed(0),
        logprobs: None,
    };
    let setup = |chunk| Setup {
        chunk,
        ..Setup::plain(subject, &b)
    };
    let mut texts = Vec::new();
    // Steps have room for 64 rows, whatever chunk a round is given.
    for chunk in [1, 33, 60, 64] {
        let mut speculator = speculator(&setup(64), &[], &|drafter| drafter);
        let mut stream = speculator
            .open(with_picture(&tokens, 1), options())
            .unwrap();
        let mut ends = Vec::new();
        while stream.n_prefilled() < stream.n_prompt() {
            speculator.round(&mut [&mut stream], chunk).unwrap();
            ends.push(stream.n_prefilled());
        }
        let cuts = ends.iter().any(|end| (151..210).contains(end));
        assert!(!cuts && ends.contains(&150), "chunk {chunk}: {ends:?}");
        finish(&mut speculator, &mut [&mut stream], chunk);
        texts.push(stream.tokens().to_vec());
    }
    assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    // A step too small for the picture is refused before any work.
    let mut speculator = speculator(&setup(59), &[], &|drafter| drafter);
    let refused = speculator.open(with_picture(&tokens, 1), options());
    let full = cache::MemoryFull::Span { rows: 60, most: 59 };
    assert_eq!(refused.err(), Some(full));
    assert_eq!(speculator.memory().n_open(), 0);
    // Causal rows may come in any pieces.
    let causal = Setup {
        chunk: 59,
        ..Setup::plain(TINY[0], &b)
    };
    let mut speculator = crate::writing::speculator(&causal, &[], &|drafter| drafter);
    let prompt = with_picture(&tokens, 1);
    let mut stream = speculator.open(prompt, options()).unwrap();
    finish(&mut speculator, &mut [&mut stream], causal.chunk);
    assert_eq!(stream.output().len(), 10);
}

/// Prompt and output of the longest text here.
const _: () = assert!(245 + 50 < CONTEXT);
