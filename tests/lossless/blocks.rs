//! Every seeded block drafter of [`suites::blocks`] beside a target that it is made for: some cells of
//! the grid, of every way of sampling.

use crate::subjects::{ALONE, Draft, Subject, prompts, vocab};
use crate::writing::{Setup, assert_same, best_cpu, write};
use crate::{samplings, shaped};
use backend::Backend;
use speculate::DraftLength::{Fixed, UpTo};
use std::sync::Arc;

/// Names of heads, and folders of their targets.
const HEADS: &[(&str, &str)] = &[
    ("dflash", "tests/golden/checkpoints/gemma4-dense"),
    ("deepspec", "tests/golden/checkpoints/qwen3_5-dense"),
    ("speculators", "tests/golden/checkpoints/gemma4-dense"),
    ("gemma", "tests/golden/checkpoints/gemma4-dense"),
    ("gemma_dflash", "tests/golden/checkpoints/gemma4-dense"),
    ("gated", "tests/golden/checkpoints/qwen3_5-dense"),
    ("dflash2", "tests/golden/checkpoints/gemma4-dense"),
    ("rnn", "tests/golden/checkpoints/qwen3_5-dense"),
];

#[test]
fn speculation_never_changes_a_token_with_any_block_drafter() {
    let cpu: Arc<dyn Backend> = best_cpu();
    assert_lossless_with_blocks(true, &cpu);
}

/// Asserts that what is drafted by each of [`HEADS`] on `backend` changes no text. Weights stay in their files in some
/// cells, if `has_mapped`.
pub(crate) fn assert_lossless_with_blocks(has_mapped: bool, backend: &Arc<dyn Backend>) {
    for (s, &(head, target)) in HEADS.iter().enumerate() {
        let subject = Subject {
            target,
            block: Some(head),
            ..ALONE
        };
        let prompts = prompts(4, vocab(subject), s as u64);
        let mut drafted = 0;
        for (w, (what, sampling)) in samplings().into_iter().chain([shaped()]).enumerate() {
            let plain = Setup::plain(subject, backend);
            let truth = write(&plain, &prompts, 0, &sampling, &[]).texts;
            let cells = [(Fixed(7), 33, 1), (UpTo(8), 512, 4), (Fixed(3), 7, 3)];
            for (c, (length, chunk, width)) in cells.into_iter().enumerate() {
                let setup = Setup {
                    draft: Draft::Block,
                    length,
                    chunk,
                    width,
                    mapped: has_mapped && (w + c) % 2 == 1,
                    ..Setup::plain(subject, backend)
                };
                let got = write(&setup, &prompts, 0, &sampling, &truth);
                assert_same(&setup, &format!("{head}, {what}"), &got, &truth);
                drafted += got.drafted;
            }
        }
        assert!(drafted > 500, "{head} has drafted {drafted}");
    }
}
