//! One cell of the grid: what a model writes in it, with every page given back.

use crate::constrained::Pattern;
use crate::subjects::{Draft, Subject, TRAINED};
use crate::{CONTEXT, MAX_TOKENS};
use backend::{Backend, KvFormat};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use cpu::{Cpu, CpuOptions, Isa, PrefetchHint, Tuning, WeightKind, WeightReads};
use models::{
    BlockHead, BlockKind, ChainedHead, Eagle3, Gemma4Assistant, Qwen35Mtp, Target, load_target,
};
use speculate::draft::{Assistant, Block, Chained, DraftModel, Forced};
use speculate::{
    DraftLength, Drafter, Drafters, Guesser, Guesses, Logprobs, Prompt, Sampling, Speculator,
    Stats, StepRecord, Stream, StreamOptions, TopLogprobs,
};
use std::sync::Arc;
use suites::blocks::SeededBlock;
use suites::{finish, repository};
use weights::Checkpoint;

pub(crate) struct Setup<'a> {
    pub(crate) subject: Subject,
    pub(crate) backend: &'a Arc<dyn Backend>,
    pub(crate) draft: Draft,
    pub(crate) length: DraftLength,
    pub(crate) chunk: usize,
    pub(crate) width: usize,
    pub(crate) kv_format: KvPlan,
    /// Rows that a sequence has room for.
    pub(crate) context: usize,
    /// Whether its own head scores a part of the vocabulary, as long as that will do.
    pub(crate) shortlist: bool,
    /// Whether weights stay in their files.
    pub(crate) mapped: bool,
    /// Whether each text has a [`Pattern`], which its number chooses.
    pub(crate) constrained: bool,
}

impl<'a> Setup<'a> {
    /// Plain decoding, eight prompts at a time, each in one step.
    pub(crate) fn plain(subject: Subject, backend: &'a Arc<dyn Backend>) -> Self {
        Setup {
            subject,
            backend,
            draft: Draft::None,
            length: DraftLength::Fixed(0),
            chunk: 512,
            width: 8,
            kv_format: KvPlan::both(&quant::kv::BF16),
            context: CONTEXT,
            shortlist: false,
            mapped: false,
            constrained: false,
        }
    }
}

/// Writes after each prompt, `setup.width` prompts at a time. The prompts' numbers
/// count from `first`: seed and length of a text follow its number.
pub(crate) fn write(
    setup: &Setup<'_>,
    prompts: &[Vec<u32>],
    first: usize,
    sampling: &Sampling,
    truth: &[Text],
) -> Written {
    write_with(setup, prompts, first, sampling, truth, &|drafter| drafter)
}

/// [`write`], with the drafter that `wrap` makes of the one asked for.
pub(crate) fn write_with(
    setup: &Setup<'_>,
    prompts: &[Vec<u32>],
    first: usize,
    sampling: &Sampling,
    truth: &[Text],
    wrap: &dyn Fn(Box<dyn Drafter>) -> Box<dyn Drafter>,
) -> Written {
    let mut speculator = speculator(setup, truth, wrap);
    // Plain decoding, which the others are compared with, is not watched.
    let watches = setup.length.max() > 0;
    if watches {
        speculator.watch_steps();
    }
    let mut watched = Watched::default();
    let vocab = speculator.target().vocab_size() as u32;
    let mut written = Written {
        texts: vec![Text::default(); prompts.len()],
        drafted: 0,
        accepted: 0,
        forced: 0,
        guesses: Vec::new(),
    };
    let pattern = |i| Pattern::new(vocab, (first + i) as u32);
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
                logprobs: Some(TopLogprobs::of_logits((first + i) % 4)),
            };
            let mut stream = speculator.open(prompt.clone(), options).unwrap();
            if setup.constrained {
                stream.constrain(Box::new(pattern(i)));
            }
            running.push((i, stream));
        }
        if running.is_empty() {
            break;
        }
        let mut streams: Vec<&mut Stream> = running.iter_mut().map(|(_, s)| s).collect();
        let before = streams.iter().map(|s| s.tokens().len()).collect::<Vec<_>>();
        if let DraftLength::Fixed(_) = setup.length {
            take_turns(&speculator, &mut streams);
        }
        speculator.round(&mut streams, setup.chunk).unwrap();
        let step = speculator.take_step();
        assert_eq!(step.is_some(), watches);
        if let Some(step) = step {
            watched.add(&step, &streams, &before);
        }
        let (ended, going) = running.into_iter().partition(|(_, s)| s.finish().is_some());
        running = going;
        for (i, mut stream) in ended {
            written.texts[i] = Text::of(&mut stream);
            if setup.constrained {
                pattern(i).assert_allows(stream.output());
            }
            written.forced += stream.stats().forced;
            let guesses = Guesser::ALL.map(|guesser| stream.stats().guesses(guesser));
            assert_adds_up(stream.stats());
            written.guesses.push(guesses);
            written.drafted += stream.stats().drafted();
            written.accepted += stream.stats().accepted();
            watched.end(stream.stats());
            speculator.close(stream);
        }
    }
    assert_eq!(speculator.memory().pages_used().0, 0, "every page is back");
    assert!(!watches || watched.is_even(), "steps say what streams do");
    written
}

/// Writes after each prompt, as many at a time as there is room for: a group after the other, `chunk` rows of
/// each stream in a round. `options` has those of each prompt by its number. Also how many tokens were drafted,
/// and how many of these accepted.
pub(crate) fn write_groups<P: Clone + Into<Prompt>>(
    speculator: &mut Speculator,
    prompts: &[P],
    chunk: usize,
    options: impl Fn(usize) -> StreamOptions,
) -> (Vec<Text>, [u64; 2]) {
    let (mut texts, mut counts) = (Vec::new(), [0, 0]);
    let width = speculator.memory().size().sequences;
    for (first, group) in prompts.chunks(width).enumerate() {
        let open = |(i, prompt): (usize, &P)| {
            let opened = speculator.open(prompt.clone(), options(first * width + i));
            opened.unwrap()
        };
        let mut streams: Vec<Stream> = group.iter().enumerate().map(open).collect();
        finish(speculator, &mut streams, chunk);
        for mut stream in streams {
            texts.push(Text::of(&mut stream));
            counts[0] += stream.stats().drafted();
            counts[1] += stream.stats().accepted();
            speculator.close(stream);
        }
    }
    assert_eq!(speculator.memory().pages_used().0, 0, "every page is back");
    (texts, counts)
}

/// What steps have said so far, less what streams that have ended say.
#[derive(Default)]
struct Watched {
    rounds: i64,
    drafted: i64,
    accepted: i64,
    emitted: i64,
}

impl Watched {
    fn add(&mut self, step: &StepRecord, streams: &[&mut Stream], before: &[usize]) {
        assert_eq!(step.streams.len(), streams.len());
        for ((step, stream), &before) in step.streams.iter().zip(streams).zip(before) {
            assert_eq!(step.context, before);
            assert_eq!(before + step.emitted, stream.tokens().len());
            assert!(step.emitted <= step.accepted + 1 && step.forced <= step.drafted);
            assert_eq!(step.drafter.is_some(), step.drafted > step.forced);
            self.rounds += i64::from(step.round.is_some_and(|number| number > 0));
            self.drafted += step.drafted as i64;
            self.accepted += step.accepted as i64;
            self.emitted += step.emitted as i64;
        }
    }

    fn end(&mut self, stats: &Stats) {
        self.rounds -= stats.rounds as i64;
        self.drafted -= stats.drafted() as i64;
        self.accepted -= stats.accepted() as i64;
        self.emitted -= stats.emitted as i64;
    }

    fn is_even(&self) -> bool {
        [self.rounds, self.drafted, self.accepted, self.emitted] == [0; 4]
    }
}

/// What writes in a cell.
pub(crate) fn speculator(
    setup: &Setup<'_>,
    truth: &[Text],
    wrap: &dyn Fn(Box<dyn Drafter>) -> Box<dyn Drafter>,
) -> Speculator {
    let b = setup.backend;
    b.left_in_files();
    let target = load_target(&**b, &open(setup, &setup.target())).unwrap();
    let left = b.left_in_files() > 0;
    assert_eq!(left, setup.mapped, "weights stay in their files");
    let memory = Memory::new(&**b, target.plan(), setup.size());
    let drafters = drafters(setup, truth, wrap, &*target);
    Speculator::new(b.clone(), target, memory, drafters)
}

/// A model of `setup` in `folder`.
fn open(setup: &Setup<'_>, folder: &str) -> Checkpoint {
    let checkpoint = Checkpoint::open(&repository(folder)).unwrap();
    checkpoint.keep_mapped(setup.mapped);
    checkpoint
}

impl Setup<'_> {
    /// The folder of the target.
    fn target(&self) -> String {
        self.subject.folder().to_str().expect("a path").to_owned()
    }

    fn size(&self) -> MemorySize {
        MemorySize {
            sequences: self.width,
            context: self.context,
            step_rows: self.chunk,
            kv_format: self.kv_format,
            running_pages: None,
            kept: KeptSize {
                pages: 10,
                snapshots: 4,
            },
        }
    }
}

/// What drafts in a cell for `target`, each head as `wrap` makes it.
pub(crate) fn drafters(
    setup: &Setup<'_>,
    truth: &[Text],
    wrap: &dyn Fn(Box<dyn Drafter>) -> Box<dyn Drafter>,
    target: &dyn Target,
) -> Drafters {
    let (b, size) = (setup.backend, setup.size());
    let open = |folder: &str| open(setup, folder);
    // So many that some texts are covered and others are not.
    let ids: Vec<u32> = (0..target.vocab_size() as u32)
        .filter(|id| id % 16 != 7)
        .collect();
    let drafter = |draft| -> Option<Box<dyn Drafter>> {
        match draft {
            Draft::None | Draft::Ngram | Draft::Several(_) => None,
            Draft::Oracle => Some(oracle(truth, 4)),
            Draft::Head | Draft::Portfolio => Some(match setup.subject.assistant {
                Some(folder) => {
                    let checkpoint = open(folder);
                    let mut head = Gemma4Assistant::load(&**b, &checkpoint, target).unwrap();
                    if setup.shortlist {
                        head = head.with_shortlist(&**b, &checkpoint, &ids).unwrap();
                    }
                    Box::new(Assistant::new(head))
                }
                None => {
                    let checkpoint = open(&setup.target());
                    let mut head = Qwen35Mtp::load(&**b, &checkpoint, target).unwrap();
                    if setup.shortlist {
                        head = head
                            .with_shortlist(&**b, &checkpoint, target, &ids)
                            .unwrap();
                    }
                    let memory = Memory::new(&**b, head.plan(), size);
                    Box::new(Chained::new(head, memory))
                }
            }),
            Draft::Eagle3 => {
                let folder = setup.subject.eagle3.expect("the subject has one");
                let checkpoint = open(folder);
                let head = Eagle3::load(&**b, &checkpoint, target).unwrap();
                let memory = Memory::new(&**b, head.plan(), size);
                Some(Box::new(Chained::new(head, memory)))
            }
            Draft::Block => {
                let block = setup.subject.block.expect("the subject has one");
                let (checkpoint, kind) = if block.starts_with("models/") {
                    (open(block), BlockKind::Dspark)
                } else {
                    let seeded = SeededBlock::new(block);
                    (seeded.checkpoint(), seeded.kind)
                };
                let head = BlockHead::load(&**b, &checkpoint, target, kind).unwrap();
                let memory = Memory::new(&**b, head.plan(), size);
                Some(Box::new(Block::new(head, memory)))
            }
            Draft::Model => {
                let checkpoint = open(setup.subject.model.expect("the subject has one"));
                let model = load_target(&**b, &checkpoint).unwrap();
                let memory = Memory::new(&**b, model.plan(), size);
                Some(Box::new(DraftModel::new(
                    model,
                    memory,
                    target.vocab_size(),
                )))
            }
        }
    };
    let mut drafters = Drafters::none();
    for &draft in setup.draft.all() {
        drafters = drafters.with(Drafters::from(drafter(draft).map(wrap)));
        if matches!(draft, Draft::Ngram | Draft::Portfolio) {
            drafters = drafters.with_ngrams();
        }
    }
    drafters
}

/// Asserts that each drafted and each accepted token is of a drafter or forced.
fn assert_adds_up(stats: &Stats) {
    let sum = |of: fn(&Guesses) -> u64| stats.by_guesser.iter().map(of).sum::<u64>();
    let (drafted, accepted) = (sum(|g| g.drafted), sum(|g| g.accepted));
    assert_eq!(drafted + stats.forced, stats.drafted(), "{stats:?}");
    assert_eq!(
        accepted + stats.forced_accepted,
        stats.accepted(),
        "{stats:?}"
    );
}

/// Has the drafters of `speculator` guess in turn for each of `streams`, round by round, if several have heads.
pub(crate) fn take_turns(speculator: &Speculator, streams: &mut [&mut Stream]) {
    if speculator.n_heads() < 2 {
        return;
    }
    streams.iter_mut().for_each(|stream| stream.take_turns());
}

/// What a stream has written, and how likely the target held it.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Text {
    pub(crate) tokens: Vec<u32>,
    logprobs: Vec<Logprobs>,
}

impl Text {
    /// What `stream` has written.
    pub(crate) fn of(stream: &mut Stream) -> Self {
        let logprobs = stream.take_logprobs();
        assert_eq!(logprobs.len(), stream.output().len(), "one for each token");
        Text {
            tokens: stream.tokens().to_vec(),
            logprobs,
        }
    }

    /// The text without its prompt.
    pub(crate) fn output(&self) -> &[u32] {
        &self.tokens[self.tokens.len() - self.logprobs.len()..]
    }

    /// Where the first token lies that is not `other`'s.
    pub(crate) fn parting(&self, other: &Text) -> Option<usize> {
        let alike = self.tokens.iter().zip(&other.tokens);
        let at = alike.take_while(|(a, b)| a == b).count();
        (at < self.tokens.len().max(other.tokens.len())).then_some(at)
    }

    /// Token `at` and how likely it was. Where texts part at a near-tie, theirs are as likely.
    pub(crate) fn said(&self, at: usize) -> String {
        // The prompt's tokens have no log-probability.
        let n_prompt = self.tokens.len() - self.logprobs.len();
        let likely = at.checked_sub(n_prompt).and_then(|i| self.logprobs.get(i));
        match (self.tokens.get(at), likely) {
            (Some(token), Some(l)) => format!("{token} (log-probability {:.4})", l.logprob),
            _ => "the end".into(),
        }
    }
}

pub(crate) struct Written {
    pub(crate) texts: Vec<Text>,
    pub(crate) drafted: u64,
    pub(crate) accepted: u64,
    pub(crate) forced: u64,
    /// What each guesser has done for each text, in the order in which the texts ended.
    pub(crate) guesses: Vec<[Guesses; Guesser::ALL.len()]>,
}

/// A drafter, the length of its drafts, rows of a step, and texts at once.
pub(crate) type DraftCell = (Draft, DraftLength, usize, usize);

/// Writes as `plain` says, and asserts that each of these numbered drafters leaves the texts as they are: those of odd
/// numbers with mapped weights, on `backends` in turn from `first_backend` on. Returns the texts, and how many tokens were
/// drafted and accepted.
pub(crate) fn assert_same_with_drafts<'a>(
    plain: &Setup<'a>,
    backends: &'a [Arc<dyn Backend>; 2],
    cells: impl Iterator<Item = (usize, DraftCell)>,
    prompts: &[Vec<u32>],
    (what, sampling): (&str, &Sampling),
    first_backend: usize,
) -> (Vec<Text>, u64, u64) {
    let want = write(plain, prompts, 0, sampling, &[]).texts;
    let (mut drafted, mut accepted) = (0, 0);
    for (d, (draft, length, chunk, width)) in cells {
        if plain.subject.lacks(draft) {
            continue;
        }
        let setup = Setup {
            draft,
            length,
            chunk,
            width,
            mapped: d % 2 == 1 && backends[0].capabilities().mapped_weights,
            backend: &backends[(first_backend + d) % 2],
            ..*plain
        };
        let got = write(&setup, prompts, 0, sampling, &want);
        assert_same(&setup, what, &got, &want);
        drafted += got.drafted;
        accepted += got.accepted;
    }
    (want, drafted, accepted)
}

pub(crate) fn assert_same(setup: &Setup<'_>, what: &str, got: &Written, want: &[Text]) {
    for (i, (got, want)) in got.texts.iter().zip(want).enumerate() {
        if got != want {
            let at = got
                .tokens
                .iter()
                .zip(&want.tokens)
                .position(|(g, w)| g != w);
            let likely = got
                .logprobs
                .iter()
                .zip(&want.logprobs)
                .position(|(g, w)| g != w);
            panic!(
                "{} {:?} {what} draft {:?} chunk {} width {} kv {} on {}: prompt {i} differs at token {at:?} of {}, in log-probabilities at {likely:?}",
                setup.subject.target,
                setup.draft,
                setup.length,
                setup.chunk,
                setup.width,
                setup.kv_format,
                setup.backend.name(),
                want.tokens.len()
            );
        }
    }
}

/// Guesses the true text, wrong in every `spoil`-th position.
pub(crate) fn oracle(truth: &[Text], spoil: usize) -> Box<dyn Drafter> {
    let texts: Vec<Vec<u32>> = truth.iter().map(|text| text.tokens.clone()).collect();
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

/// Keys in one format and values in another.
pub(crate) fn pair(names: [&str; 2]) -> KvPlan {
    let [k, v] = names.map(|name| quant::kv_format(name).unwrap());
    KvFormat { k, v }.into()
}

/// A plan as users write it.
pub(crate) fn plan(text: &str) -> KvPlan {
    KvPlan::parse(text, ',').unwrap()
}

/// Formats for tests that take them in turn, in cell number `i` of those of `subject`: whole numbers, and where heads
/// are long enough compressed ones too, in one layer others than in the next, as far as the device keeps them.
pub(crate) fn in_turn(subject: Subject, backend: &Arc<dyn Backend>, i: usize) -> KvPlan {
    let kept = backend.capabilities().kv;
    let is_kept = |plan: &KvPlan| {
        let protect = plan.protect.map(|protect| protect.format);
        let formats = [Some(plan.base), protect, plan.window];
        formats.into_iter().flatten().all(|f| kept.contains(f))
    };
    let mut plans = vec!["bf16", "f32"];
    if TRAINED
        .iter()
        .any(|trained| trained.target == subject.target)
    {
        plans.extend([
            "turbo4,turbo3",
            "q8_0,turbo4",
            "turbo4,turbo3,protect=1,window=q8_0",
        ]);
    }
    let plans: Vec<KvPlan> = plans.into_iter().map(plan).filter(is_kept).collect();
    plans[i % plans.len()]
}

/// Values in `format`, a rotated one, and keys in codes.
pub(crate) fn rotated(format: &str) -> KvPlan {
    pair(["q8_0", format])
}

/// Keys and values in codes.
pub(crate) fn compressed() -> KvPlan {
    pair(["q8_0", "q4_0"])
}

/// The CPU with its best instructions and one thread. The grids over families vary how many there are; elsewhere
/// threads that wait for work would only take a core from the test beside.
pub(crate) fn one_thread() -> Cpu {
    let options = CpuOptions {
        threads: 1,
        ..CpuOptions::default()
    };
    Cpu::new(options).unwrap()
}

/// The CPU with its best instructions and one thread, for speculators that share it.
pub(crate) fn best_cpu() -> Arc<dyn Backend> {
    Arc::new(one_thread())
}

/// Weights that are read in other ways than by default.
fn other_tuning() -> Tuning {
    let mut tuning = Tuning::default();
    for kind in WeightKind::ALL {
        let reads = WeightReads {
            panels: 8,
            panels_of_few_rows: 2,
            distance: 1024,
            hint: PrefetchHint::Once,
        };
        tuning.set(kind, reads);
    }
    tuning
}

/// The CPU with these instructions and threads; several threads read weights in other ways than one.
pub(crate) fn backend(isa: Isa, threads: usize) -> Arc<dyn Backend> {
    let tuning = match threads {
        1 => Tuning::default(),
        _ => other_tuning(),
    };
    Arc::new(
        Cpu::new(CpuOptions {
            threads,
            isa: Some(isa),
            tuning,
            ..CpuOptions::default()
        })
        .unwrap(),
    )
}
