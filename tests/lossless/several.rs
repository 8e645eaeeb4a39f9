//! Several heads at once: whichever drafts in a round, and however they alternate, every text is that of plain
//! decoding.

use crate::samplings;
use crate::subjects::{Draft, Subject, TINY, TRAINED, greedy_prompts, prompts, vocab};
use crate::writing::{
    Setup, Text, Written, assert_same, best_cpu, drafters, speculator, take_turns, write,
};
use backend::Backend;
use cache::KvPlan;
use models::load_target;
use speculate::DraftLength::{self, Fixed, UpTo};
use speculate::{Guesser, Sampling, Speculator, StreamOptions, TopLogprobs};
use std::sync::Arc;
use weights::Checkpoint;

const COMBINATIONS: [Draft; 6] = [
    Draft::TWO,
    Draft::Several(&[Draft::Head, Draft::Block]),
    Draft::Several(&[Draft::Head, Draft::Model, Draft::Ngram]),
    Draft::Several(&[Draft::Eagle3, Draft::Block, Draft::Ngram]),
    Draft::Several(&[Draft::Model, Draft::Eagle3]),
    Draft::Several(&[Draft::Head, Draft::Eagle3, Draft::Model, Draft::Ngram]),
];

#[test]
fn several_heads_change_no_token() {
    let b = best_cpu();
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        assert_several_heads_change_nothing(s, subject, &b);
    }
}

/// Asserts that `subject` writes the tokens and log-probabilities of plain decoding with every combination of heads
/// that it has: which take turns, or of which the one guesses that promises most.
pub(crate) fn assert_several_heads_change_nothing(
    s: usize,
    subject: Subject,
    b: &Arc<dyn Backend>,
) {
    let combinations = COMBINATIONS
        .into_iter()
        .filter(|&draft| !subject.lacks(draft));
    let ways: [(DraftLength, usize, usize); 3] =
        [(Fixed(3), 33, 3), (UpTo(8), 64, 2), (Fixed(5), 512, 1)];
    for (c, draft) in combinations.enumerate() {
        for (i, (what, sampling)) in samplings().into_iter().take(2).enumerate() {
            let kv_format = KvPlan::both([&quant::kv::BF16, &quant::kv::F32][(s + c) % 2]);
            let prompts = texts(subject, i, (10 * s + c) as u64);
            let plain = Setup {
                kv_format,
                ..Setup::plain(subject, b)
            };
            let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
            let (length, chunk, width) = ways[(s + c + i) % ways.len()];
            for (length, shortlist) in [(length, false), (Fixed(2), c % 2 == 0)] {
                let setup = Setup {
                    draft,
                    length,
                    chunk,
                    width,
                    kv_format,
                    shortlist,
                    constrained: false,
                    ..Setup::plain(subject, b)
                };
                let got = write(&setup, &prompts, 0, &sampling, &[]);
                assert_same(&setup, what, &got, &want);
                if let Fixed(_) = length {
                    assert_all_have_guessed(&setup, &got);
                }
            }
        }
    }
}

#[test]
fn drafters_can_be_replaced() {
    let b = best_cpu();
    assert_drafters_can_be_replaced(&b);
}

/// Asserts that texts are those of plain decoding, and drafted, after the drafters of a speculator have been replaced
/// by others, which may read other rows inside the target.
pub(crate) fn assert_drafters_can_be_replaced(b: &Arc<dyn Backend>) {
    for &subject in TINY.iter().chain(TRAINED) {
        let setup = |draft| Setup {
            draft,
            chunk: 64,
            constrained: false,
            ..Setup::plain(subject, b)
        };
        let prompt = prompts(1, vocab(subject), 3).remove(0);
        let write = |speculator: &mut Speculator| {
            let options = StreamOptions {
                sampling: Sampling::default(),
                max_tokens: 20,
                stop_tokens: Arc::new([]),
                draft: Fixed(3),
                logprobs: Some(TopLogprobs::of_logits(1)),
            };
            let mut stream = speculator.open(prompt.clone(), options).unwrap();
            while stream.finish().is_none() {
                take_turns(speculator, &mut [&mut stream]);
                speculator.round(&mut [&mut stream], 64).unwrap();
            }
            let (text, drafted) = (Text::of(&mut stream), stream.stats().drafted());
            speculator.close(stream);
            (text, drafted)
        };
        let checkpoint = Checkpoint::open(&subject.folder()).unwrap();
        let target = load_target(&**b, &checkpoint).unwrap();
        let mut one = speculator(&setup(Draft::None), &[], &|drafter| drafter);
        let (want, _) = write(&mut one);
        for draft in [
            Draft::Head,
            Draft::Eagle3,
            Draft::Block,
            Draft::TWO,
            Draft::Head,
        ] {
            if subject.lacks(draft) {
                continue;
            }
            one.replace_drafters(drafters(&setup(draft), &[], &|drafter| drafter, &*target));
            let (got, drafted) = write(&mut one);
            let what = format!("{} {draft:?}", subject.target);
            assert!(got == want, "{what} parts at {:?}", got.parting(&want));
            assert!(drafted > 0, "{what}");
        }
    }
}

/// Prompts for `subject`: those of a trained model, which repeat themselves, in its own way.
fn texts(subject: Subject, way: usize, seed: u64) -> Vec<Vec<u32>> {
    match subject.target.strip_prefix("models/") {
        Some(name) if way == 0 => greedy_prompts(name)[..3].to_vec(),
        _ => prompts(3, vocab(subject), seed),
    }
}

/// Asserts that each head has guessed in each text, in about as many rounds as the others.
fn assert_all_have_guessed(setup: &Setup<'_>, got: &Written) {
    let heads = setup
        .draft
        .all()
        .iter()
        .filter(|&&draft| draft != Draft::Ngram);
    let n = heads.count();
    for guesses in &got.guesses {
        let rounds = |head| guesses[Guesser::Head(head).index()].rounds;
        let all: Vec<u64> = (0..n).map(rounds).collect();
        let what = || format!("{} {:?}: rounds {all:?}", setup.subject.target, setup.draft);
        // A draft model that does not know all tokens of a text drafts less.
        assert!(all.iter().all(|&rounds| rounds > 0), "{}", what());
        assert_eq!(guesses[Guesser::Head(n).index()].rounds, 0, "{}", what());
    }
}

/// What a request restricts to one of several heads is drafted by this one alone, and costs the others nothing.
#[test]
fn a_head_that_may_not_guess_for_a_text_reads_nothing_of_it() {
    use crate::writing::{Text, speculator};
    use speculate::{Guessers, Stream, StreamOptions};

    let b = best_cpu();
    let subject = *TRAINED
        .iter()
        .find(|s| s.target.ends_with("tiny-qwen3.5"))
        .unwrap();
    let prompts = greedy_prompts("tiny-qwen3.5")[..2].to_vec();
    let want = write(
        &Setup::plain(subject, &b),
        &prompts,
        0,
        &Sampling::default(),
        &[],
    );
    for only in 0..2 {
        let setup = Setup {
            draft: Draft::TWO,
            ..Setup::plain(subject, &b)
        };
        let mut speculator = speculator(&setup, &[], &|drafter| drafter);
        for (i, prompt) in prompts.iter().enumerate() {
            let options = StreamOptions {
                sampling: Sampling::default(),
                max_tokens: crate::MAX_TOKENS - i % 5,
                stop_tokens: Arc::new([]),
                draft: Fixed(3),
                logprobs: Some(speculate::TopLogprobs::of_logits(i % 4)),
            };
            let mut stream: Stream = speculator.open(prompt.clone(), options).unwrap();
            stream.restrict_drafters(Guessers::from_iter([Guesser::Head(only)]));
            while stream.finish().is_none() {
                speculator.round(&mut [&mut stream], 64).unwrap();
            }
            assert!(stream.stats().guesses(Guesser::Head(only)).rounds > 0);
            assert_eq!(stream.stats().guesses(Guesser::Head(1 - only)).rounds, 0);
            let got = Text::of(&mut stream);
            assert!(got == want.texts[i], "head {only}, text {i}");
            speculator.close(stream);
        }
    }
}
