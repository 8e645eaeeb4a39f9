//! Weights in other formats than the bundled models', rotated ones among them, multiplied at their packed size: what is
//! written depends on them, and not on drafts.

use crate::samplings;
use crate::subjects::{Draft, Subject, TRAINED, greedy_prompts};
use crate::writing::{Setup, assert_same_with_drafts, backend};
use backend::Backend;
use convert::{Pins, Quantize, convert};
use cpu::Isa;
use speculate::DraftLength::{Fixed, UpTo};
use std::path::Path;
use std::sync::Arc;
use suites::repository;
use weights::Checkpoint;

#[test]
fn speculation_never_changes_a_token_with_rotated_weights() {
    let isas = Isa::available();
    let backends = [1, 2].map(|threads| backend(*isas.last().unwrap(), threads));
    assert_lossless_stored_as(ROTATED, TRAINED, &backends);
}

/// `subject` as a GGUF file with weights in `format`, the MTP head with 8 bits if it is pinned.
fn stored_as(subject: &Subject, format: &str, pins: &str) -> Subject {
    let name = subject.target.strip_prefix("models/").unwrap();
    let file = format!("{name}-{format}-{pins}-{}.gguf", std::process::id());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::create_dir_all(folder).unwrap();
    let path = folder.join(file);
    let stored = Checkpoint::open(&repository(subject.target)).unwrap();
    let quantize = Quantize {
        pins: Pins::named(pins).unwrap(),
        ..Quantize::new(quant::format(format).unwrap())
    };
    let recipe = quantize.apply(convert(&stored).unwrap());
    recipe.write_gguf(&path, &[], &mut |_, _| {}).unwrap();
    Subject {
        target: Box::leak(
            path.into_os_string()
                .into_string()
                .unwrap()
                .into_boxed_str(),
        ),
        ..*subject
    }
}

/// Formats whose columns are rotated, and what of the MTP head keeps 8 bits.
pub(crate) const ROTATED: [(&str, &str); 2] = [("tq3_1s", "none"), ("tq4_1s", "mtp")];

/// Asserts that trained `subjects`, with weights in each of `formats`, write the same with every drafter as by plain
/// decoding, on one of `backends` as on the other.
pub(crate) fn assert_lossless_stored_as(
    formats: [(&str, &str); 2],
    subjects: &[Subject],
    backends: &[Arc<dyn Backend>; 2],
) {
    let drafts = [
        (Draft::Head, Fixed(3), 64, 2),
        (Draft::Eagle3, UpTo(8), 33, 3),
        (Draft::Block, Fixed(7), 512, 1),
        (Draft::Portfolio, UpTo(8), 64, 1),
        (Draft::Oracle, Fixed(8), 512, 3),
    ];
    for (s, subject) in subjects.iter().enumerate() {
        let name = subject.target.strip_prefix("models/").unwrap();
        let prompts = &greedy_prompts(name)[..3];
        let (mut texts, mut accepted) = (Vec::new(), 0);
        for (f, (format, pins)) in formats.into_iter().enumerate() {
            let subject = stored_as(subject, format, pins);
            let (what, sampling) = &samplings()[(s + f) % 3];
            let plain = Setup::plain(subject, &backends[f]);
            let (cells, sampling) = (drafts.into_iter().enumerate(), (*what, sampling));
            let (want, _, n) =
                assert_same_with_drafts(&plain, backends, cells, prompts, sampling, f);
            accepted += n;
            std::fs::remove_file(subject.target).unwrap();
            texts.push(want);
        }
        assert!(accepted > 100, "{name}: {accepted} guesses were right");
        assert_ne!(texts[0], texts[1], "{name}: another format, other logits");
    }
}
