//! The end of the context: prompt and output together are as many tokens as it says.

use crate::samplings;
use crate::subjects::{Draft, TINY, prompts, vocab};
use crate::writing::{Setup, Text, assert_same, best_cpu, speculator, write};
use speculate::DraftLength::{Fixed, UpTo};
use speculate::{Sampling, Speculator, Stream, StreamOptions, TopLogprobs};
use std::sync::Arc;

/// No multiple of a page's rows, so that the last page is not full.
const CONTEXT: usize = 70;

/// Rows of a prompt in one step.
const CHUNK: usize = 7;

#[test]
fn prompt_and_output_fill_the_context_and_no_more() {
    let b = best_cpu();
    for (s, &subject) in TINY.iter().enumerate() {
        let long = prompts(200, vocab(subject), s as u64).into_iter();
        let long: Vec<_> = long.filter(|p| p.len() >= CONTEXT).take(6).collect();
        // With room for one token, two, … of output, and for many.
        let room = [1, 2, 3, 5, 9, 30];
        let cut = |(prompt, room): (Vec<u32>, usize)| prompt[..CONTEXT - room].to_vec();
        let prompts: Vec<_> = long.into_iter().zip(room).map(cut).collect();
        let (what, sampling) = samplings().into_iter().nth(s % 3).unwrap();
        let setup = |draft, length, chunk, width| Setup {
            draft,
            length,
            chunk,
            width,
            context: CONTEXT,
            ..Setup::plain(subject, &b)
        };
        let plain = setup(Draft::None, Fixed(0), 512, 1);
        let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
        for text in &want {
            assert_eq!(text.tokens.len(), CONTEXT, "{}", subject.target);
        }
        let cells = [
            (Draft::Head, UpTo(8)),
            (Draft::Eagle3, Fixed(3)),
            (Draft::Block, Fixed(6)),
            (Draft::Model, Fixed(6)),
            (Draft::Ngram, Fixed(5)),
            (Draft::Oracle, Fixed(8)),
        ];
        for (draft, length) in cells {
            if subject.lacks(draft) {
                continue;
            }
            let setup = setup(draft, length, CHUNK, 3);
            let got = write(&setup, &prompts, 0, &sampling, &want);
            assert_same(&setup, what, &got, &want);
            // Once more from what a text that filled the context has left.
            let mut again = speculator(&setup, &want, &|drafter| drafter);
            for (i, prompt) in prompts.iter().enumerate() {
                let options = || StreamOptions {
                    sampling: Sampling {
                        seed: sampling.seed + i as u64,
                        ..sampling.clone()
                    },
                    max_tokens: usize::MAX,
                    stop_tokens: Arc::new([]),
                    draft: length,
                    logprobs: Some(TopLogprobs::of_logits(i % 4)),
                };
                let first = again.open(prompt.clone(), options()).unwrap();
                let first = finished(&mut again, first);
                let parked = again.park(first);
                let second = again.resume(parked, prompt.clone(), options()).unwrap();
                let mut second = finished(&mut again, second);
                assert_eq!(
                    Text::of(&mut second),
                    want[i],
                    "{} {draft:?}",
                    subject.target
                );
                again.close(second);
            }
        }
    }
}

/// `stream` after all of its rounds.
fn finished(speculator: &mut Speculator, mut stream: Stream) -> Stream {
    while stream.finish().is_none() {
        speculator.round(&mut [&mut stream], CHUNK).unwrap();
    }
    stream
}
