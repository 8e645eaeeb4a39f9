//! Contexts that cross several splits of attention.
//!
//! Attention sums keys in splits of 512 and merges them (`backend/src/lib.rs`), so texts
//! of a few hundred rows leave the merge, and windows far from a sequence's start, untried.

use crate::samplings;
use crate::subjects::{Draft, Subject, vocab};
use crate::writing::{Setup, assert_same, compressed, write};
use backend::{Backend, KvFormat};
use speculate::DraftLength::{Fixed, UpTo};
use std::sync::Arc;
use suites::Rng;

/// Rows of a sequence: more than three splits.
const CONTEXT: usize = 2048;

/// Prompts that end a little before, at, and a little after the end of a split; drafts
/// and bonus tokens then cross it. Every one repeats itself now and then.
fn prompts(vocab: u32, seed: u64) -> Vec<Vec<u32>> {
    let mut rng = Rng(seed);
    [1490, 1536, 1601]
        .map(|len| {
            let mut tokens: Vec<u32> = (0..len).map(|_| 8 + rng.below(vocab - 16)).collect();
            tokens.copy_within(100..160, len - 60);
            tokens
        })
        .to_vec()
}

/// The formats of a seeded subject: codes where its heads are no smaller than a block of them.
pub(crate) fn formats(subject: Subject) -> [KvFormat; 2] {
    let second = match subject.target.contains("qwen") {
        true => compressed(),
        false => KvFormat::both(&quant::kv::F32),
    };
    [KvFormat::both(&quant::kv::BF16), second]
}

/// Asserts that `subject` writes the same on `backend` after long prompts with every
/// drafter it has, cut into other chunks and beside other streams, as by plain decoding, with keys and
/// values in each of `formats`.
pub(crate) fn assert_lossless_over_splits(
    s: usize,
    subject: Subject,
    formats: &[KvFormat],
    backend: &Arc<dyn Backend>,
) {
    let prompts = prompts(vocab(subject), s as u64);
    let (what, sampling) = samplings().into_iter().nth(s % 2).unwrap();
    for &kv_format in formats {
        // Heads of seeded EAGLE-3 heads are smaller than a block of codes.
        let is_seeded = !subject.target.starts_with("models/");
        let is_misfit = is_seeded && kv_format.k.block > 1;
        let setup = |draft, length, chunk, width| Setup {
            draft,
            length,
            chunk,
            width,
            kv_format,
            context: CONTEXT,
            ..Setup::plain(subject, backend)
        };
        let plain = setup(Draft::None, Fixed(0), 2048, 1);
        let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
        let cells = [
            (Draft::Head, Fixed(3), 512, 3),
            (Draft::Eagle3, Fixed(2), 256, 2),
            (Draft::Model, Fixed(3), 256, 2),
            (Draft::Ngram, UpTo(8), 100, 3),
            (Draft::Oracle, Fixed(8), 64, 2),
        ];
        for (draft, length, chunk, width) in cells {
            let lacks = match draft {
                Draft::Head => !subject.has_head(),
                Draft::Eagle3 => subject.eagle3.is_none() || is_misfit,
                draft => subject.lacks(draft),
            };
            if lacks {
                continue;
            }
            let setup = setup(draft, length, chunk, width);
            let got = write(&setup, &prompts, 0, &sampling, &want);
            assert_same(&setup, what, &got, &want);
            assert!(got.drafted > 0, "{} {draft:?} has drafted", subject.target);
        }
    }
}
