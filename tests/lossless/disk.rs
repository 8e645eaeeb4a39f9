//! Streams that begin with rows which another engine has saved to a file write what each writes after
//! a cold start, bit for bit, and are drafted for as they are then.

use crate::reuse::{Drafts, WAYS, next, run};
use crate::samplings;
use crate::subjects::{Draft, Subject, TINY, TRAINED, vocab};
use crate::writing::{Setup, Text, best_cpu, compressed, rotated, speculator};
use backend::Backend;
use cache::{KvPlan, Namespace};
use speculate::DraftLength::Fixed;
use speculate::saved::file::{FileReader, FileWriter, Head};
use speculate::saved::{NextPiece, Restored};
use speculate::{
    Drafter, Parked, Prompt, Sampling, Speculator, Stream, StreamOptions, TopLogprobs,
};
use std::fs::File;
use std::io::{BufReader, BufWriter};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use suites::{Noting, Rng};

#[test]
fn a_beginning_from_a_file_changes_nothing() {
    let b = best_cpu();
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        let mut formats = vec![
            KvPlan::both(&quant::kv::BF16),
            KvPlan::both(&quant::kv::F32),
        ];
        // The others have heads smaller than a block.
        if subject.target.contains("qwen") {
            formats.push(compressed());
        }
        if subject.target.starts_with("models/") {
            formats.push(rotated("turbo4"));
        }
        assert_files_change_nothing(s, subject, &formats, &b);
    }
}

/// Whose texts they are.
const OURS: Namespace = Namespace([7; 32]);

/// Ended texts of an engine, saved to files, each restored by another engine for prompts that begin
/// like it, against cold starts; with every drafter, and `formats` in turn.
pub(crate) fn assert_files_change_nothing(
    s: usize,
    subject: Subject,
    formats: &[KvPlan],
    b: &Arc<dyn Backend>,
) {
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
        for (f, &kv_format) in formats.iter().enumerate() {
            // Seeded EAGLE-3 heads and block drafters have heads smaller than a block.
            let is_blocked = kv_format.base.k.block > 1;
            let is_thinned = (f + d) % 2 == 1 && (draft == Draft::None || !subject.whole_grid);
            let is_small = draft.is_small() && !subject.target.starts_with("models/");
            if is_small && is_blocked || is_thinned {
                continue;
            }
            let setup = Setup {
                draft,
                chunk: [64, 33, 512][(s + d + f) % 3],
                width: 2,
                kv_format,
                ..Setup::plain(subject, b)
            };
            let what = format!("{} {draft:?} {kv_format}", subject.target);
            restart(
                &setup,
                &samplings()[(s + d + f) % 3].1,
                &what,
                (100 * s + d) as u64,
            );
        }
    }
}

fn restart(setup: &Setup<'_>, sampling: &Sampling, what: &str, seed: u64) {
    let folder = std::env::temp_dir().join(format!("paceline-disk-{}-{seed}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let drafts = Drafts::default();
    let noting = |inner| -> Box<dyn Drafter> {
        let drafts = drafts.clone();
        Box::new(Noting { inner, drafts })
    };
    let mut rng = Rng(seed);
    let n = vocab(setup.subject);
    let mut tokens =
        |n_tokens: usize| -> Vec<u32> { (0..n_tokens).map(|_| 8 + rng.below(n - 16)).collect() };
    let options = |i: usize, length: usize| StreamOptions {
        sampling: Sampling {
            seed: sampling.seed + i as u64,
            ..sampling.clone()
        },
        max_tokens: 20 + i % 7,
        stop_tokens: Arc::new([]),
        draft: Fixed(length),
        logprobs: Some(TopLogprobs::of_logits(i % 3)),
    };
    let prompt = |tokens: Vec<u32>| {
        let marks = [70, 160, tokens.len() - 3];
        let marks = marks.iter().filter(|&&at| at + 3 <= tokens.len());
        let mut marks: Vec<usize> = marks.copied().collect();
        marks.dedup();
        Prompt::from(tokens).with_marks(marks).in_namespace(OURS)
    };
    let system = tokens(70);
    let mut before = speculator(setup, &[], &noting);
    let texts: Vec<Vec<u32>> = (0..2)
        .map(|i| [&system[..], &tokens(100 + 9 * i)].concat())
        .collect();
    let streams = texts.iter().enumerate().map(|(i, text)| {
        // The drafter of the second one has not learned all of its rows.
        let stream = before.open(prompt(text.clone()), options(i, 3 * (1 - i)));
        stream.unwrap()
    });
    let streams: Vec<Stream> = streams.collect();
    let ended = run(&mut before, streams, setup.chunk, &drafts);
    let saved: Vec<(PathBuf, Text)> = ended
        .into_iter()
        .enumerate()
        .map(|(i, (parked, text, _))| {
            let path = folder.join(i.to_string());
            save(&before, parked, &path);
            before.mark_saved(parked);
            (path, text)
        })
        .collect();
    assert!(before.unsaved().is_empty(), "{what}");

    let mut after = speculator(setup, &[], &noting);
    let mut cold = speculator(setup, &[], &noting);
    let more = tokens(170);
    let mut reused = [0; WAYS];
    for (i, (_, text)) in saved.iter().enumerate() {
        for (way, reused) in reused.iter_mut().enumerate() {
            let prompt = prompt(next(way, &text.tokens, texts[i].len(), &more));
            let length = 3 * usize::from((i + way) % 4 != 3);
            let rows = restore(&mut after, &saved, &prompt, length > 0);
            let known = before.found(&prompt, &[], length > 0);
            assert!(
                rows == known,
                "{what} way {way}: {rows} rows from a file, {known} in memory"
            );
            let options = options(10 + way, length);
            let stream = after.start(prompt.clone(), options.clone(), &[]).unwrap();
            assert_eq!(stream.n_reused(), rows, "{what} way {way}");
            *reused += rows;
            let (spent, got, guesses) =
                run(&mut after, vec![stream], setup.chunk, &drafts).remove(0);
            after.discard(spent);
            after.discard_all();
            let stream = cold.open(prompt, options).unwrap();
            let (spent, want, expected) =
                run(&mut cold, vec![stream], setup.chunk, &drafts).remove(0);
            cold.discard(spent);
            assert!(
                got == want,
                "{what} way {way}: {rows} rows from a file, parts from a cold start at {:?}",
                got.parting(&want)
            );
            assert!(
                guesses == expected,
                "{what} way {way}: drafts {guesses:?}, not {expected:?}"
            );
        }
    }
    assert!(
        reused[..5].iter().all(|&n| n > 0),
        "{what}: {reused:?} rows"
    );
    assert_eq!(
        after.memory().pages_used().0,
        0,
        "{what}: every page is back"
    );
    assert_eq!(after.memory().n_open(), 0, "{what}: every sequence is back");
    std::fs::remove_dir_all(folder).unwrap();
}

/// Writes what is left of `parked` to a file.
fn save(from: &Speculator, parked: Parked, path: &Path) {
    let mut saving = from.save(parked).expect("something is left");
    let head = Head {
        identity: [3; 32],
        namespace: saving.namespace,
        keys: saving.keys.clone(),
        text: saving.text.clone(),
    };
    let mut writer = FileWriter::new(BufWriter::new(File::create(path).unwrap()), &head).unwrap();
    loop {
        match from.save_piece(&mut saving) {
            NextPiece::Bytes(bytes) => writer.piece(&bytes).unwrap(),
            NextPiece::End => break,
            NextPiece::Gone => panic!("nobody has evicted it"),
        }
    }
    writer.finish().unwrap();
}

/// Has the text of one of `files` again, of the one with most rows for a stream after `prompt`, as far
/// as it can begin with them. Returns how far.
fn restore(to: &mut Speculator, files: &[(PathBuf, Text)], prompt: &Prompt, drafts: bool) -> usize {
    let keys = prompt.keys();
    let open = |(path, _): &(PathBuf, Text)| {
        let file = BufReader::new(File::open(path).unwrap());
        let (reader, head) = FileReader::open(file).unwrap();
        assert!(to.fits(&head.text, &head.keys));
        let pairs = keys.iter().zip(&head.keys);
        let alike = pairs.take_while(|(a, b)| a == b).count();
        let rows = to.restorable(&head.text, alike, prompt, drafts);
        (rows, reader, head)
    };
    let best = files.iter().map(open).max_by_key(|(rows, ..)| *rows);
    let (rows, mut reader, head) = best.unwrap();
    if rows < 16 {
        return 0;
    }
    let wanted = to.restore(&head.text, rows, OURS, &head.keys).unwrap();
    assert_eq!(wanted.len(), head.text.all_pieces());
    let mut last = Restored::Partly;
    for wanted in wanted {
        if let Some(bytes) = reader.piece(wanted).unwrap() {
            assert_eq!(last, Restored::Partly);
            last = to.load_piece(&bytes);
        }
    }
    assert!(matches!(last, Restored::Whole(_)) && reader.is_at_end());
    rows
}
