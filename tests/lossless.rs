//! Speculation on equals speculation off, with `==`.
//!
//! For every family, drafter, way of sampling, draft length, prefill chunk, batch
//! width, thread count, instruction set, and weights packed or left in their files: the same tokens as plain decoding with
//! the whole prompt in one step.
//!
//! Tiny random models reach every path in little time, but their heads guess
//! nothing right; so drafts that are partly right come from [`Oracle`], which
//! knows the text and spoils some of it, and the small trained models of `models/`
//! draft with their own heads.

use backend::{Backend, KvFormat, Tensor, TokenList};
use cache::{Memory, MemoryFull, MemorySize};
use cpu::{Cpu, CpuOptions, Isa};
use models::{ChainedHead, Eagle3, Gemma4Assistant, Qwen35Mtp, load_target};
use speculate::DraftLength::{self, Fixed, UpTo};
use speculate::draft::{Assistant, Chained, DraftRequest, Forced, Ngram, TargetView};
use speculate::sample::{History, Scratch, choose, choose_among};
use speculate::{Drafter, Sampling, Speculator, Stream, StreamOptions};
use std::collections::HashMap;
use std::sync::Arc;
use suites::{CODED, Recorder, Rng, repository};
use weights::Checkpoint;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Draft {
    None,
    /// The family's own head.
    Head,
    Eagle3,
    Ngram,
    /// The true text with every so many tokens spoilt.
    Oracle,
}

/// A model under test: folders of the target and, for Gemma, its assistant, and of an
/// EAGLE-3 head.
#[derive(Clone, Copy, Debug)]
struct Subject {
    target: &'static str,
    assistant: Option<&'static str>,
    eagle3: Option<&'static str>,
    /// Whether every cell of the grid is run, or every fifth.
    whole_grid: bool,
}

const TINY: &[Subject] = &[
    Subject {
        target: "tests/golden/checkpoints/gemma4-dense",
        assistant: Some("tests/golden/checkpoints/gemma4-dense-assistant"),
        eagle3: Some("tests/golden/checkpoints/gemma4-dense-eagle3"),
        whole_grid: true,
    },
    Subject {
        target: "tests/golden/checkpoints/gemma4-ple",
        assistant: Some("tests/golden/checkpoints/gemma4-ple-assistant"),
        eagle3: Some("tests/golden/checkpoints/gemma4-ple-eagle3"),
        whole_grid: false,
    },
    Subject {
        target: "tests/golden/checkpoints/gemma4-moe",
        assistant: None,
        eagle3: Some("tests/golden/checkpoints/gemma4-dense-eagle3"),
        whole_grid: false,
    },
    Subject {
        target: "tests/golden/checkpoints/qwen3_5-dense",
        assistant: None,
        eagle3: Some("tests/golden/checkpoints/qwen3_5-dense-eagle3"),
        whole_grid: true,
    },
    Subject {
        target: "tests/golden/checkpoints/qwen3_5-moe",
        assistant: None,
        eagle3: Some("tests/golden/checkpoints/qwen3_5-moe-eagle3"),
        whole_grid: false,
    },
    Subject {
        target: "tests/golden/gguf/gemma4-ple.gguf",
        assistant: Some("tests/golden/gguf/gemma4-ple-assistant.gguf"),
        eagle3: None,
        whole_grid: false,
    },
    Subject {
        target: "tests/golden/gguf/qwen3_5-moe.gguf",
        assistant: None,
        eagle3: None,
        whole_grid: false,
    },
];

const TRAINED: &[Subject] = &[
    Subject {
        target: "models/tiny-gemma4",
        assistant: Some("models/tiny-gemma4-assistant"),
        eagle3: Some("models/tiny-gemma4-eagle3"),
        whole_grid: false,
    },
    Subject {
        target: "models/tiny-gemma4-e",
        assistant: Some("models/tiny-gemma4-e-assistant"),
        eagle3: None,
        whole_grid: false,
    },
    Subject {
        target: "models/tiny-qwen3.5",
        assistant: None,
        eagle3: Some("models/tiny-qwen3.5-eagle3"),
        whole_grid: false,
    },
    Subject {
        target: "models/tiny-qwen3.5-moe",
        assistant: None,
        eagle3: None,
        whole_grid: false,
    },
];

const DRAFT_LENGTHS: &[DraftLength] = &[
    Fixed(0),
    Fixed(1),
    Fixed(2),
    Fixed(3),
    Fixed(5),
    Fixed(8),
    UpTo(8),
];
const CHUNKS: &[usize] = &[1, 7, 64, 512];
const WIDTHS: &[usize] = &[1, 3, 8];
const CONTEXT: usize = 384;
const MAX_TOKENS: usize = 128;

impl Subject {
    fn has_head(&self) -> bool {
        self.assistant.is_some() || self.target.contains("qwen")
    }
}

fn samplings() -> [(&'static str, Sampling); 3] {
    [
        ("greedy", Sampling::default()),
        (
            "T=0.7 top-p 0.9",
            Sampling {
                temperature: 0.7,
                top_p: 0.9,
                seed: 17,
                ..Sampling::default()
            },
        ),
        (
            "T=1 with penalties",
            Sampling {
                temperature: 1.0,
                repetition_penalty: 1.2,
                presence_penalty: 0.3,
                frequency_penalty: 0.2,
                logit_bias: vec![(3, 1.5), (5, -2.0)],
                seed: 99,
                ..Sampling::default()
            },
        ),
    ]
}

/// Guesses the true text, wrong in every `spoil`-th position.
fn oracle(texts: Vec<Vec<u32>>, spoil: usize) -> Box<dyn Drafter> {
    Box::new(Forced::new(move |tokens: &[u32], limit: usize| {
        let text = texts.iter().find(|t| t.starts_with(tokens));
        let rest = text.map_or(&[][..], |t| &t[tokens.len()..]);
        let guess = |(i, &token): (usize, &u32)| {
            if (tokens.len() + i).is_multiple_of(spoil) {
                if token > 0 { token - 1 } else { 1 }
            } else {
                token
            }
        };
        rest.iter().take(limit).enumerate().map(guess).collect()
    }))
}

/// Keys and values in codes.
fn compressed() -> KvFormat {
    let format = |name| quant::format(name).unwrap();
    KvFormat {
        k: format("q8_0"),
        v: format("q4_0"),
    }
}

struct Setup<'a> {
    subject: Subject,
    backend: &'a Arc<dyn Backend>,
    draft: Draft,
    length: DraftLength,
    chunk: usize,
    width: usize,
    kv_format: KvFormat,
    /// Whether its own head scores a part of the vocabulary, as long as that will do.
    shortlist: bool,
    /// Whether weights stay in their files.
    mapped: bool,
}

/// Writes after each prompt, `setup.width` prompts at a time. The prompts' numbers
/// count from `first`: seed and length of a text follow its number.
fn write(
    setup: &Setup<'_>,
    prompts: &[Vec<u32>],
    first: usize,
    sampling: &Sampling,
    truth: &[Vec<u32>],
) -> Written {
    write_with(setup, prompts, first, sampling, truth, &|drafter| drafter)
}

/// [`write`], with the drafter that `wrap` makes of the one asked for.
fn write_with(
    setup: &Setup<'_>,
    prompts: &[Vec<u32>],
    first: usize,
    sampling: &Sampling,
    truth: &[Vec<u32>],
    wrap: &dyn Fn(Box<dyn Drafter>) -> Box<dyn Drafter>,
) -> Written {
    let b = setup.backend;
    let open = |folder: &str| {
        let checkpoint = Checkpoint::open(&repository(folder)).unwrap();
        checkpoint.keep_mapped(setup.mapped);
        checkpoint
    };
    let checkpoint = open(setup.subject.target);
    b.left_in_files();
    let target = load_target(&**b, &checkpoint).unwrap();
    let left = b.left_in_files().is_some_and(|bytes| bytes > 0);
    assert_eq!(left, setup.mapped, "weights stay in their files");
    let size = MemorySize {
        sequences: setup.width,
        context: CONTEXT,
        step_rows: setup.chunk,
        kv_format: setup.kv_format,
    };
    let memory = Memory::new(&**b, target.plan(), size);
    // So many that some texts are covered and others are not.
    let ids: Vec<u32> = (0..target.vocab_size() as u32)
        .filter(|id| id % 16 != 7)
        .collect();
    let drafter: Option<Box<dyn Drafter>> = match setup.draft {
        Draft::None => None,
        Draft::Ngram => Some(Box::new(Ngram::new())),
        Draft::Oracle => Some(oracle(truth.to_vec(), 4)),
        Draft::Head => Some(match setup.subject.assistant {
            Some(folder) => {
                let checkpoint = open(folder);
                let mut head = Gemma4Assistant::load(&**b, &checkpoint, &*target).unwrap();
                if setup.shortlist {
                    head = head.with_shortlist(&**b, &checkpoint, &ids).unwrap();
                }
                Box::new(Assistant::new(head))
            }
            None => {
                let mut head = Qwen35Mtp::load(&**b, &checkpoint, &*target).unwrap();
                if setup.shortlist {
                    head = head
                        .with_shortlist(&**b, &checkpoint, &*target, &ids)
                        .unwrap();
                }
                let memory = Memory::new(&**b, head.plan(), size);
                Box::new(Chained::new(head, memory))
            }
        }),
        Draft::Eagle3 => {
            let folder = setup.subject.eagle3.expect("the subject has one");
            let checkpoint = open(folder);
            let head = Eagle3::load(&**b, &checkpoint, &*target).unwrap();
            let memory = Memory::new(&**b, head.plan(), size);
            Some(Box::new(Chained::new(head, memory)))
        }
    };
    let mut speculator = Speculator::new(b.clone(), target, memory, drafter.map(wrap));
    let mut written = Written {
        texts: vec![Vec::new(); prompts.len()],
        drafted: 0,
        accepted: 0,
    };
    let mut waiting = prompts.iter().enumerate();
    let mut running: Vec<(usize, Stream)> = Vec::new();
    loop {
        while running.len() < setup.width
            && let Some((i, prompt)) = waiting.next()
        {
            let options = StreamOptions {
                sampling: Sampling {
                    seed: sampling.seed + (first + i) as u64,
                    ..sampling.clone()
                },
                // Lengths differ, so that streams start and end beside running ones.
                max_tokens: MAX_TOKENS - (first + i) % 5,
                stop_tokens: Arc::new([]),
                draft: setup.length,
            };
            running.push((i, speculator.open(prompt.clone(), options).unwrap()));
        }
        if running.is_empty() {
            break;
        }
        let mut streams: Vec<&mut Stream> = running.iter_mut().map(|(_, s)| s).collect();
        speculator.round(&mut streams, setup.chunk).unwrap();
        let (ended, going) = running.into_iter().partition(|(_, s)| s.finish().is_some());
        running = going;
        for (i, stream) in ended {
            written.texts[i] = stream.tokens().to_vec();
            written.drafted += stream.stats().drafted();
            written.accepted += stream.stats().accepted();
            speculator.close(stream);
        }
    }
    assert_eq!(speculator.memory().pages_used().0, 0, "every page is back");
    written
}

struct Written {
    texts: Vec<Vec<u32>>,
    drafted: u64,
    accepted: u64,
}

fn prompts(n: usize, vocab: u32, seed: u64) -> Vec<Vec<u32>> {
    let mut rng = Rng(seed);
    (0..n)
        .map(|_| {
            // Prompts repeat themselves, so that n-grams have something to find.
            let len = 1 + rng.below(150) as usize;
            let period = 1 + rng.below(20) as usize;
            let base: Vec<u32> = (0..period).map(|_| 8 + rng.below(vocab - 16)).collect();
            (0..len)
                .map(|i| {
                    if rng.below(6) == 0 {
                        8 + rng.below(vocab - 16)
                    } else {
                        base[i % period]
                    }
                })
                .collect()
        })
        .collect()
}

fn vocab(subject: Subject) -> u32 {
    let checkpoint = Checkpoint::open(&repository(subject.target)).unwrap();
    checkpoint.text_config()["vocab_size"].as_u64().unwrap() as u32
}

fn backend(isa: Isa, threads: usize) -> Arc<dyn Backend> {
    Arc::new(
        Cpu::new(CpuOptions {
            threads,
            isa: Some(isa),
            ..CpuOptions::default()
        })
        .unwrap(),
    )
}

fn assert_same(setup: &Setup<'_>, what: &str, got: &Written, want: &[Vec<u32>]) {
    for (i, (got, want)) in got.texts.iter().zip(want).enumerate() {
        if got != want {
            let at = got.iter().zip(want).position(|(g, w)| g != w);
            panic!(
                "{} {:?} {what} draft {:?} chunk {} width {} kv {} on {}: prompt {i} differs at token {at:?} of {}",
                setup.subject.target,
                setup.draft,
                setup.length,
                setup.chunk,
                setup.width,
                setup.kv_format,
                setup.backend.name(),
                want.len()
            );
        }
    }
}

#[test]
fn speculation_never_changes_a_token_of_a_tiny_model() {
    let n_prompts = 208;
    let mut cells = 0;
    let mut texts = 0;
    let mut accepted: HashMap<(&str, Draft), (u64, u64)> = HashMap::new();
    let backends: Vec<(Isa, Arc<dyn Backend>)> = Isa::available()
        .into_iter()
        .flat_map(|isa| [1, 2].map(|threads| (isa, backend(isa, threads))))
        .collect();
    for (s, &subject) in TINY.iter().enumerate() {
        let prompts = prompts(n_prompts, vocab(subject), s as u64);
        for (what, sampling) in samplings() {
            let plain = |kv_format| Setup {
                subject,
                backend: &backends.last().unwrap().1,
                draft: Draft::None,
                length: Fixed(0),
                chunk: 512,
                width: 8,
                kv_format,
                shortlist: false,
                mapped: false,
            };
            let mut formats = vec![KvFormat::both(&quant::F32), KvFormat::both(&quant::BF16)];
            // The others, and EAGLE-3 heads, have heads smaller than a block.
            if subject.target.contains("qwen") {
                formats.push(compressed());
            }
            let truth: Vec<_> = formats
                .into_iter()
                .map(|kv| (kv, write(&plain(kv), &prompts, 0, &sampling, &[]).texts))
                .collect();
            // The grid's axes vary together: each cell takes the next few prompts.
            let mut next = 0;
            for (d, &length) in DRAFT_LENGTHS.iter().enumerate() {
                for (c, &chunk) in CHUNKS.iter().enumerate() {
                    for (k, (isa, backend)) in backends.iter().enumerate() {
                        for draft in [Draft::Head, Draft::Eagle3, Draft::Ngram, Draft::Oracle] {
                            let every = match (subject.whole_grid, draft) {
                                (true, Draft::Eagle3) => 3,
                                (true, _) => 1,
                                (false, _) => 5,
                            };
                            let thinned = !(d + 5 * c + 7 * k).is_multiple_of(every);
                            let lacks = match draft {
                                Draft::Head => !subject.has_head(),
                                Draft::Eagle3 => subject.eagle3.is_none(),
                                _ => false,
                            };
                            if thinned || lacks {
                                continue;
                            }
                            // The scalar path takes twenty times as long.
                            let n = if *isa == Isa::Scalar { 1 } else { 3 };
                            let range = next..next + n;
                            next = (next + n) % (n_prompts - n);
                            let formats = if draft == Draft::Eagle3 {
                                2
                            } else {
                                truth.len()
                            };
                            let (kv_format, truth) = &truth[(d + c + k) % formats];
                            let width = WIDTHS[(d + k + c) % WIDTHS.len()];
                            let setup = Setup {
                                subject,
                                backend,
                                draft,
                                length,
                                chunk,
                                width,
                                kv_format: *kv_format,
                                shortlist: (d + c) % 2 == 1,
                                mapped: (d + k) % 3 == 1,
                            };
                            let want = &truth[range.clone()];
                            let got = write(
                                &setup,
                                &prompts[range.clone()],
                                range.start,
                                &sampling,
                                want,
                            );
                            assert_same(&setup, what, &got, want);
                            let entry = accepted.entry((subject.target, draft)).or_default();
                            entry.0 += got.drafted;
                            entry.1 += got.accepted;
                            cells += 1;
                            texts += n;
                        }
                    }
                }
            }
        }
    }
    println!("{cells} cells, {texts} texts of up to {MAX_TOKENS} tokens");
    for ((target, draft), (drafted, accepted)) in &accepted {
        println!("{target} {draft:?}: {accepted} of {drafted} accepted");
        assert!(*drafted > 1000, "{target} {draft:?} has drafted");
        if matches!(draft, Draft::Oracle | Draft::Ngram) {
            assert!(
                0 < *accepted && accepted < drafted,
                "{target} {draft:?}: some are accepted, some are not"
            );
        }
    }
}

#[test]
fn speculation_never_changes_a_token_of_a_trained_model() {
    for &subject in TRAINED {
        let name = subject.target.strip_prefix("models/").unwrap();
        let prompts = greedy_prompts(name);
        assert!(prompts.len() >= 15, "{name} has prompts");
        let best = Isa::available().pop().unwrap();
        let backends = [backend(best, 2), backend(best, 1)];
        for (s, (what, sampling)) in samplings().into_iter().enumerate() {
            let setup = |draft, length, chunk, width, backend| Setup {
                subject,
                backend,
                draft,
                length,
                chunk,
                width,
                kv_format: [KvFormat::both(&quant::BF16), compressed()][s % 2],
                shortlist: s == 1,
                mapped: draft != Draft::None && s != 1,
            };
            let plain = setup(Draft::None, Fixed(0), 512, 1, &backends[0]);
            let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
            let mut cases = vec![
                (
                    Draft::Head,
                    [Fixed(3), UpTo(8), Fixed(1)][s],
                    [64, 512, 7][s],
                    [1, 3, 8][s],
                ),
                (Draft::Ngram, Fixed(5), 33, [8, 1, 3][s]),
            ];
            if subject.eagle3.is_some() {
                cases.push((
                    Draft::Eagle3,
                    [UpTo(8), Fixed(2), Fixed(3)][s],
                    64,
                    [3, 8, 1][s],
                ));
            }
            for (draft, length, chunk, width) in cases {
                let setup = setup(draft, length, chunk, width, &backends[s % 2]);
                let got = write(&setup, &prompts, 0, &sampling, &[]);
                assert_same(&setup, what, &got, &want);
                println!(
                    "{name} {draft:?} {what}: {} of {} accepted at length {length:?}",
                    got.accepted, got.drafted
                );
                if draft != Draft::Ngram {
                    assert!(
                        got.accepted * 4 > got.drafted,
                        "{name}: a trained head is right now and then"
                    );
                }
            }
        }
    }
}

#[test]
fn speculation_never_changes_a_token_over_coded_weights() {
    let isas = Isa::available();
    let backends: Vec<_> = isas.iter().map(|&isa| backend(isa, 2)).collect();
    let best = backends.last().unwrap();
    for (f, &target) in CODED.iter().enumerate() {
        let subject = Subject {
            target,
            assistant: None,
            eagle3: None,
            whole_grid: false,
        };
        let checkpoint = Checkpoint::open(&repository(target)).unwrap();
        let has_head = checkpoint.has("mtp.norm.weight");
        let prompts = prompts(9, 96, f as u64);
        for (s, (what, sampling)) in samplings().into_iter().enumerate() {
            let setup = |draft, length, chunk, width, backend| Setup {
                subject,
                backend,
                draft,
                length,
                chunk,
                width,
                kv_format: KvFormat::both(&quant::BF16),
                shortlist: s == 2,
                mapped: draft != Draft::None && (f + s) % 2 == 0,
            };
            let plain = setup(Draft::None, Fixed(0), 512, 8, best);
            let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
            let mut cells = vec![
                (
                    Draft::Oracle,
                    Fixed([3, 8, 1][s]),
                    [64, 1, 7][s],
                    [1, 3, 8][s],
                ),
                (Draft::Ngram, Fixed(5), 33, [8, 1, 3][s]),
            ];
            if has_head {
                cells.push((Draft::Head, Fixed(2), [7, 512, 64][s], [3, 8, 1][s]));
            }
            for (c, (draft, length, chunk, width)) in cells.into_iter().enumerate() {
                let k = (f + s + c) % backends.len();
                // The scalar path takes twenty times as long.
                let n = if isas[k] == Isa::Scalar {
                    1
                } else {
                    prompts.len()
                };
                let setup = setup(draft, length, chunk, width, &backends[k]);
                let got = write(&setup, &prompts[..n], 0, &sampling, &want);
                assert_same(&setup, what, &got, &want[..n]);
                assert!(got.drafted > 0, "{target} {draft:?} has drafted");
            }
        }
    }
}

/// The prompts of a trained model that fit.
fn greedy_prompts(name: &str) -> Vec<Vec<u32>> {
    let path = repository("tests/golden/greedy").join(format!("{name}.json"));
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |v: &serde_json::Value| -> Vec<u32> {
        let ids = v.as_array().unwrap().iter();
        ids.map(|t| t.as_u64().unwrap() as u32).collect()
    };
    let prompts = file["prompts"].as_array().unwrap().iter();
    let prompts = prompts.map(|p| ids(&p["prompt"]));
    prompts
        .filter(|p| p.len() + MAX_TOKENS <= CONTEXT)
        .collect()
}

/// A device that keeps a draft's tokens to itself until all are chosen guesses what one
/// guesses that tells each of them.
fn assert_same_guesses(single: &Arc<dyn Backend>, chaining: &Arc<dyn Backend>) {
    for (s, &subject) in TINY.iter().chain(&TRAINED[..3]).enumerate() {
        let prompts = match subject.target.strip_prefix("models/") {
            Some(name) => greedy_prompts(name)[..2].to_vec(),
            None => prompts(2, vocab(subject), s as u64),
        };
        let heads = [
            subject.has_head().then_some(Draft::Head),
            subject.eagle3.map(|_| Draft::Eagle3),
        ];
        for (d, draft) in heads.into_iter().flatten().enumerate() {
            for (i, (what, sampling)) in samplings().into_iter().take(2).enumerate() {
                let setup = |backend| Setup {
                    subject,
                    backend,
                    draft,
                    length: Fixed([3, 8, 1, 5][(s + d + i) % 4]),
                    chunk: 33,
                    width: [1, 2][(s + i) % 2],
                    kv_format: KvFormat::both(&quant::BF16),
                    shortlist: (s + d + i).is_multiple_of(2),
                    mapped: false,
                };
                let want = write(&setup(single), &prompts, 0, &sampling, &[]);
                let got = write(&setup(chaining), &prompts, 0, &sampling, &[]);
                assert_same(&setup(chaining), what, &got, &want.texts);
                assert_eq!(
                    (got.drafted, got.accepted),
                    (want.drafted, want.accepted),
                    "{} {draft:?} {what}",
                    subject.target
                );
            }
        }
    }
}

/// A drafter whose drafts are dropped in some rounds, in one stretch for longer than a
/// head lets rows wait.
struct Resting {
    inner: Box<dyn Drafter>,
    /// Whether it is not even asked in those rounds.
    idles: bool,
    round: usize,
}

impl Drafter for Resting {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn taps(&self) -> &[usize] {
        self.inner.taps()
    }

    fn open(&mut self, slot: usize) -> Result<(), MemoryFull> {
        self.inner.open(slot)
    }

    fn close(&mut self, slot: usize) {
        self.inner.close(slot);
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &Tensor,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        self.round += 1;
        let rests = !self.round.is_multiple_of(3) || (20..60).contains(&(self.round % 80));
        if rests && self.idles {
            requests.iter_mut().for_each(|request| request.limit = 0);
        }
        let drafts = self.inner.draft(target, hidden, requests);
        if rests {
            return vec![Vec::new(); requests.len()];
        }
        drafts
    }
}

#[test]
fn a_head_that_rested_guesses_what_one_guesses_that_read_on() {
    let backend: Arc<dyn Backend> = Arc::new(Cpu::new(CpuOptions::default()).unwrap());
    let subject = |name: &str| *TRAINED.iter().find(|s| s.target.ends_with(name)).unwrap();
    for (name, draft) in [
        ("tiny-qwen3.5", Draft::Head),
        ("tiny-qwen3.5", Draft::Eagle3),
        ("tiny-gemma4", Draft::Eagle3),
        ("tiny-gemma4", Draft::Head),
    ] {
        let prompts = greedy_prompts(name)[..4].to_vec();
        for (chunk, width) in [(1, 1), (7, 3), (64, 2)] {
            let setup = Setup {
                subject: subject(name),
                backend: &backend,
                draft,
                length: Fixed(3),
                chunk,
                width,
                kv_format: KvFormat::both(&quant::BF16),
                shortlist: chunk == 7,
                mapped: false,
            };
            let written = |idles| {
                let wrap = |inner| -> Box<dyn Drafter> {
                    Box::new(Resting {
                        inner,
                        idles,
                        round: 0,
                    })
                };
                write_with(&setup, &prompts, 0, &Sampling::default(), &[], &wrap)
            };
            let (want, got) = (written(false), written(true));
            assert_eq!(got.texts, want.texts, "{name} {draft:?}");
            assert_eq!(
                (got.drafted, got.accepted),
                (want.drafted, want.accepted),
                "{name} {draft:?} in chunks of {chunk}"
            );
            assert!(got.accepted > 20, "{name} {draft:?}: {}", got.accepted);
        }
    }
}

#[test]
fn drafts_in_one_go_are_those_of_single_steps() {
    let cpu = || Box::new(Cpu::new(CpuOptions::default()).unwrap());
    assert_same_guesses(
        &(Arc::new(Recorder::new(cpu())) as _),
        &(Arc::new(Recorder::chaining(cpu())) as _),
    );
}

/// Needs a GPU; says so and tests nothing where there is none.
#[test]
fn drafts_in_one_go_on_a_gpu_are_those_of_single_steps() {
    let chaining = match cuda::Cuda::new(gpu_options()) {
        Ok(gpu) => Arc::new(gpu),
        Err(e) => return eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}"),
    };
    let host = Box::new(cuda::Cuda::new(gpu_options()).unwrap());
    let host: Arc<dyn Backend> = Arc::new(Recorder::new(host));
    assert_same_guesses(&host, &(chaining as _));
}

/// Compiled code is named by its content, so that tests can share it.
fn gpu_options() -> cuda::CudaOptions {
    cuda::CudaOptions {
        cache: Some(std::env::temp_dir().join("paceline-cuda-tests")),
        kernels: std::env::var_os("CUDA_KERNELS").map(Into::into),
        ..Default::default()
    }
}

/// Needs a GPU; says so and tests nothing where there is none.
#[test]
fn speculation_never_changes_a_token_on_a_gpu() {
    if let Err(e) = cuda::Cuda::new(gpu_options()) {
        return eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}");
    }
    // Each on a stream of its own: a GPU has room for all of them.
    std::thread::scope(|scope| {
        for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
            scope.spawn(move || assert_lossless_on_a_gpu(s, subject));
        }
    });
}

fn assert_lossless_on_a_gpu(s: usize, subject: Subject) {
    let gpu: Arc<dyn Backend> = Arc::new(cuda::Cuda::new(gpu_options()).unwrap());
    let exact = CpuOptions {
        activations: cpu::Activations::F32,
        threads: 1,
        ..CpuOptions::default()
    };
    let cpu: Arc<dyn Backend> = Arc::new(Cpu::new(exact).unwrap());
    // Leaves the choice of tokens to the host.
    let host = Box::new(cuda::Cuda::new(gpu_options()).unwrap());
    let host: Arc<dyn Backend> = Arc::new(Recorder::new(host));
    let trained = subject.target.strip_prefix("models/");
    let prompts = match trained {
        Some(name) => greedy_prompts(name),
        None => prompts(8, vocab(subject), s as u64),
    };
    let setup = |backend, draft, draft_max, chunk, width, kv_format| Setup {
        subject,
        backend,
        draft,
        length: Fixed(draft_max),
        chunk,
        width,
        kv_format,
        shortlist: chunk == 33,
        mapped: false,
    };
    for (i, (what, sampling)) in samplings().into_iter().enumerate() {
        // Codes for every other way of choosing; other models, and EAGLE-3 heads, have
        // heads smaller than a block of them.
        let codes = i % 2 == 1 && subject.target.contains("qwen");
        let other = match codes {
            true => quant::format("q8_0").unwrap(),
            false => &quant::F32,
        };
        for kv in [&quant::BF16, other]
            .map(KvFormat::both)
            .into_iter()
            .take(if trained.is_some() { 1 } else { 2 })
        {
            let plain = setup(&gpu, Draft::None, 0, 512, 1, kv);
            let want = write(&plain, &prompts, 0, &sampling, &[]).texts;
            if i == 1 && trained.is_none() {
                let plain = setup(&host, Draft::None, 0, 512, 1, kv);
                let texts = write(&plain, &prompts[..1], 0, &sampling, &[]).texts;
                assert_eq!(texts, want[..1], "{} by the host", subject.target);
            }
            for draft in [
                Draft::None,
                Draft::Head,
                Draft::Eagle3,
                Draft::Ngram,
                Draft::Oracle,
            ] {
                let missing = draft == Draft::Head && !subject.has_head()
                    || draft == Draft::Eagle3
                        && (subject.eagle3.is_none() || kv.k == other && codes);
                if missing {
                    continue;
                }
                let cells = [(3, 64, 1), (8, 512, 3), (1, 7, 8), (2, 33, 2)];
                let n = if draft == Draft::Head { 2 } else { 1 };
                for (draft_max, chunk, width) in [cells[i], cells[3]].into_iter().take(n) {
                    let setup = setup(&gpu, draft, draft_max, chunk, width, kv);
                    let got = write(&setup, &prompts, 0, &sampling, &want);
                    assert_same(&setup, what, &got, &want);
                    println!(
                        "{} {draft:?} {what}: {} of {} accepted at length {draft_max}",
                        subject.target, got.accepted, got.drafted
                    );
                }
            }
            if i == 0 {
                let plain = setup(&cpu, Draft::None, 0, 512, 8, kv);
                let cpu = write(&plain, &prompts, 0, &sampling, &[]).texts;
                let same = want.iter().zip(&cpu).filter(|(a, b)| a == b).count();
                println!(
                    "{}: {same} of {} greedy texts are the CPU's",
                    subject.target,
                    prompts.len()
                );
            }
        }
    }
}

/// Needs a GPU; says so and tests nothing where there is none.
#[test]
fn tokens_chosen_on_a_gpu_are_the_hosts() {
    let gpu = match cuda::Cuda::new(gpu_options()) {
        Ok(gpu) => gpu,
        Err(e) => return eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}"),
    };
    let mut rng = Rng(7);
    let mut scratch = Scratch::default();
    for cols in [1, 5, 300, 4_099, 4_099, 4_099, 262_144] {
        for spread in [0.001, 1.0, 12.0, 100.0] {
            // Many equal ones, some that are none; small ones more often than large ones.
            let logit = |rng: &mut Rng| {
                let steps = [8.0, 1e6][rng.below(2) as usize];
                let v = (f64::from(rng.below(1 << 20)) / 524_288.0 - 1.0) * steps;
                let v = v.round() / steps;
                match rng.below(1000) {
                    0 => f32::NEG_INFINITY,
                    1 => f32::NAN,
                    2 => -0.0,
                    // The largest, some of them equal once they are scaled.
                    3 => f32::from_bits((spread as f32).to_bits() + rng.below(8)),
                    _ => (v * v * v * spread) as f32,
                }
            };
            let rows = 24;
            let logits: Vec<f32> = (0..rows * cols).map(|_| logit(&mut rng)).collect();
            let mut of = |n| rng.below(n) as usize;
            let samplings: Vec<Sampling> = (0..rows)
                .map(|_| Sampling {
                    temperature: [0.0, 0.3, 0.7, 1.0, 2.5, 1.2e-38][of(6)],
                    top_k: [0, 0, 1, 5, 40, 5_000][of(6)],
                    top_p: [1.0, 1.0, 0.9, 0.5, 0.999_999_9, 1e-6][of(6)],
                    min_p: [0.0, 0.0, 0.05, 1.0][of(4)],
                    seed: of(u32::MAX) as u64,
                    ..Sampling::default()
                })
                .collect();
            let position = |row: usize| row as u64 + (1 << 33);
            let choices: Option<Vec<_>> = samplings
                .iter()
                .enumerate()
                .map(|(row, s)| s.on_device(position(row)))
                .collect();
            let choices = choices.unwrap();
            let x = gpu.upload(rows, cols, &logits);
            let mut ids: Vec<u32> = (0..cols as u32).map(|i| 3 * i + i % 3).collect();
            ids.rotate_left(cols / 3);
            for list in [None, Some(TokenList::new(&gpu, ids))] {
                let got = gpu.choose_tokens(&x, list.as_ref(), &choices).unwrap();
                for (row, (s, got)) in samplings.iter().zip(got).enumerate() {
                    let logits = &logits[row * cols..][..cols];
                    let (history, position) = (History::new(s, &[]), position(row));
                    let want = match &list {
                        None => choose(s, &history, position, logits, &mut scratch),
                        Some(list) => {
                            choose_among(s, &history, position, list.ids(), logits, &mut scratch)
                        }
                    };
                    assert_eq!(got, want, "row {row} of {cols}, spread {spread}, {s:?}");
                }
            }
        }
    }
}

#[test]
fn a_rollback_that_is_off_by_one_does_not_go_unseen() {
    let subject = *TINY
        .iter()
        .find(|s| s.target.ends_with("qwen3_5-dense"))
        .unwrap();
    fn setup<'a>(
        subject: Subject,
        backend: &'a Arc<dyn Backend>,
        draft: Draft,
        length: DraftLength,
    ) -> Setup<'a> {
        Setup {
            subject,
            backend,
            draft,
            length,
            chunk: 64,
            width: 3,
            kv_format: KvFormat::both(&quant::F32),
            shortlist: false,
            mapped: false,
        }
    }
    let prompts = prompts(6, 90, 5);
    let sampling = Sampling::default();
    let right: Arc<dyn Backend> = Arc::new(backend::Reference);
    let want = write(
        &setup(subject, &right, Draft::None, Fixed(0)),
        &prompts,
        0,
        &sampling,
        &[],
    )
    .texts;
    let drafted = write(
        &setup(subject, &right, Draft::Oracle, Fixed(3)),
        &prompts,
        0,
        &sampling,
        &want,
    )
    .texts;
    assert_eq!(drafted, want);
    let mistakes: [fn(&mut backend::Batch); 2] = [
        |batch| {
            batch
                .seqs
                .iter_mut()
                .for_each(|s| s.kept = s.kept.saturating_sub(1))
        },
        |batch| {
            batch
                .seqs
                .iter_mut()
                .for_each(|s| s.certain = s.rows.len().min(s.certain + 1))
        },
    ];
    for mistake in mistakes {
        let wrong: Arc<dyn Backend> = Arc::new(Recorder::with_mistake(
            Box::new(backend::Reference),
            mistake,
        ));
        let got = write(
            &setup(subject, &wrong, Draft::Oracle, Fixed(3)),
            &prompts,
            0,
            &sampling,
            &want,
        )
        .texts;
        assert_ne!(got, want, "recurrent state after the wrong row");
    }
}
