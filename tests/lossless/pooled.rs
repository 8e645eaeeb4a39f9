//! Vectors of texts have the same bits alone and beside streams that write, in steps of any size, and after a
//! preemption.

use crate::subjects::{Draft, Subject, TRAINED, prompts, vocab};
use crate::writing::{Setup, best_cpu, speculator};
use backend::Backend;
use speculate::DraftLength::Fixed;
use speculate::{Pooling, Sampling, Speculator, Stream, StreamOptions};
use std::sync::Arc;

#[test]
fn vectors_depend_on_nothing_but_their_text() {
    let b = best_cpu();
    for &subject in TRAINED {
        assert_vectors_hold(subject, &b);
    }
}

/// Asserts that vectors of every kind have the same bits however they are computed. Returns those
/// of the first text, of each kind.
pub(crate) fn assert_vectors_hold(subject: Subject, b: &Arc<dyn Backend>) -> Vec<Vec<Vec<f64>>> {
    let texts = prompts(3, vocab(subject), 7);
    let alone = |chunk| {
        let setup = Setup {
            chunk,
            ..Setup::plain(subject, b)
        };
        vectors(&setup, &texts, false)
    };
    let want = alone(512);
    for chunk in [1, 7, 64] {
        assert!(alone(chunk) == want, "{} chunk {chunk}", subject.target);
        let setup = Setup {
            draft: Draft::Head,
            chunk,
            ..Setup::plain(subject, b)
        };
        // Nobody's head drafts for some.
        if !subject.lacks(Draft::Head) {
            let beside = vectors(&setup, &texts, true);
            assert!(
                beside == want,
                "{} chunk {chunk}, beside a text",
                subject.target
            );
        }
    }
    want.into_iter().take(Pooling::ALL.len()).collect()
}

/// The vectors of each of `texts`, of every kind; if so in `is_beside`, beside a stream that writes, and
/// with a preemption on the way.
fn vectors(setup: &Setup<'_>, texts: &[Vec<u32>], is_beside: bool) -> Vec<Vec<Vec<f64>>> {
    let mut speculator = speculator(setup, &[], &|drafter| drafter);
    let options = |max_tokens| StreamOptions {
        sampling: Sampling::default(),
        max_tokens,
        stop_tokens: Arc::new([]),
        draft: Fixed(3),
        logprobs: None,
    };
    let mut beside = is_beside.then(|| speculator.open(texts[0].clone(), options(200)).unwrap());
    let mut all = Vec::new();
    for text in texts {
        for pooling in Pooling::ALL {
            let mut stream = speculator.open(text.clone(), options(0)).unwrap();
            stream.pool(pooling);
            let mut round = |speculator: &mut Speculator, stream: &mut Stream| {
                let going = beside.as_mut().filter(|s| s.finish().is_none());
                let mut streams: Vec<&mut Stream> = going.into_iter().chain([stream]).collect();
                speculator.round(&mut streams, setup.chunk).unwrap();
            };
            round(&mut speculator, &mut stream);
            if is_beside && stream.finish().is_none() {
                speculator.preempt(&mut stream, false);
                speculator.go_on(&mut stream, true, &[]).unwrap();
            }
            while stream.finish().is_none() {
                round(&mut speculator, &mut stream);
            }
            all.push(speculator.vectors(&stream).collect());
            speculator.close(stream);
        }
    }
    all
}
