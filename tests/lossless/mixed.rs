//! Streams of one batch that ask for different speculation: off, drafts of a fixed length or of as many tokens as pay,
//! accepted exactly or by rejection sampling. Each writes what it writes alone.

use crate::samplings;
use crate::subjects::{Draft, Subject, TINY, TRAINED, prompts, vocab};
use crate::writing::{Setup, Text, best_cpu, speculator};
use backend::Backend;
use speculate::{Accept, DraftLength, Sampling, Speculator, Stream, StreamOptions, TopLogprobs};
use std::sync::Arc;
use suites::finish;

/// What the streams ask for, one after the other.
const WISHES: [(DraftLength, Accept); 6] = [
    (DraftLength::Fixed(3), Accept::Exact),
    (DraftLength::Fixed(3), Accept::Residual),
    (DraftLength::UpTo(0), Accept::Exact),
    (DraftLength::UpTo(8), Accept::Exact),
    (DraftLength::Fixed(2), Accept::Residual),
    (DraftLength::UpTo(0), Accept::Residual),
];

/// Streams of a batch: each wish twice, with another sampling.
const WIDTH: usize = 2 * WISHES.len();

#[test]
fn what_one_stream_asks_of_speculation_changes_no_other() {
    let b = best_cpu();
    let mut parted = 0;
    for (s, &subject) in TINY.iter().chain(TRAINED).enumerate() {
        parted += assert_mixed_batches_hold(s, subject, &b);
    }
    assert!(
        parted > 10,
        "rejection sampling writes other texts: {parted}"
    );
}

/// One text to write.
struct Task {
    prompt: Vec<u32>,
    sampling: Sampling,
    draft: DraftLength,
    accept: Accept,
    max_tokens: usize,
    top: usize,
}

impl Task {
    /// Whether what stays is what the target chooses itself.
    fn is_exact(&self) -> bool {
        let drafts = self.draft.max() > 0;
        !drafts || self.accept.with(&self.sampling) == Accept::Exact
    }

    fn open(&self, speculator: &mut Speculator) -> Stream {
        let options = StreamOptions {
            sampling: self.sampling.clone(),
            max_tokens: self.max_tokens,
            stop_tokens: Arc::new([]),
            draft: self.draft,
            logprobs: Some(TopLogprobs::of_logits(self.top)),
        };
        speculator.open(self.prompt.clone(), options).unwrap()
    }
}

/// Asserts that streams of `subject` write in a batch, whose streams differ in what they ask of speculation, the tokens
/// and log-probabilities of plain decoding if they are exact, else those that they write alone. Returns how many of the
/// others wrote something else than plain decoding.
pub(crate) fn assert_mixed_batches_hold(s: usize, subject: Subject, b: &Arc<dyn Backend>) -> usize {
    let mut parted = 0;
    let drafts = [
        Draft::Head,
        Draft::Eagle3,
        Draft::Block,
        Draft::Ngram,
        Draft::Portfolio,
    ];
    for (d, draft) in drafts.into_iter().enumerate() {
        if subject.lacks(draft) {
            continue;
        }
        let setup = Setup {
            draft,
            chunk: [64, 33, 512, 16][(s + d) % 4],
            width: WIDTH,
            shortlist: draft == Draft::Head && s.is_multiple_of(2),
            ..Setup::plain(subject, b)
        };
        let tasks = tasks(&setup, (10 * s + d) as u64);
        let plain = Setup {
            draft: Draft::None,
            width: WIDTH,
            ..Setup::plain(subject, b)
        };
        let plain = run(&plain, &tasks, false, Accept::Exact);
        // The rule of a stream goes before that of all, whichever that is.
        let rule_of_all = Accept::ALL[(s + d) % 2];
        let got = run(&setup, &tasks, true, rule_of_all);
        // Drafts depend on times where two may guess, and on all of the batch where a head scores a part of the
        // vocabulary as long as that will do for everyone.
        let varies = draft == Draft::Portfolio || setup.shortlist;
        for (i, task) in tasks.iter().enumerate() {
            let (own, (text, drafted)) = (&tasks[i..=i], &got[i]);
            let what = format!(
                "{} {draft:?}, stream {i}: {:?} {:?}, T {}",
                subject.target, task.draft, task.accept, task.sampling.temperature
            );
            let same = |other: &Text, of: &str| {
                let parting = text.parting(other);
                assert!(text == other, "{what}: not the text {of}, at {parting:?}");
            };
            if task.is_exact() {
                same(&plain[i].0, "of plain decoding");
            } else {
                parted += usize::from(*text != plain[i].0);
                if !varies {
                    same(&run(&setup, own, true, rule_of_all)[0].0, "written alone");
                    let by_all = run(&setup, own, false, Accept::Residual);
                    same(&by_all[0].0, "written by the rule of all");
                }
            }
            let has_head = !matches!(draft, Draft::Ngram | Draft::Portfolio);
            match task.draft {
                DraftLength::UpTo(0) => assert_eq!(*drafted, 0, "{what}"),
                DraftLength::Fixed(_) if has_head => assert!(*drafted > 0, "{what}"),
                _ => {}
            }
        }
    }
    parted
}

/// The texts of a batch: greedy and sampled ones with each wish.
fn tasks(setup: &Setup<'_>, seed: u64) -> Vec<Task> {
    let prompts = prompts(WIDTH, vocab(setup.subject), seed);
    let task = |(i, prompt): (usize, Vec<u32>)| {
        let (draft, accept) = WISHES[i % WISHES.len()];
        // Every way for every wish over the grid, and never one way alone in a batch.
        let way = (seed as usize + i + i / WISHES.len()) % 3;
        let sampling = samplings()[way].1.clone();
        Task {
            prompt,
            sampling: Sampling {
                seed: sampling.seed + i as u64,
                ..sampling
            },
            draft,
            accept,
            max_tokens: 40 + i,
            top: i % 4,
        }
    };
    prompts.into_iter().enumerate().map(task).collect()
}

/// Writes `tasks` side by side: the texts, and how many tokens were drafted for each. Streams go by their own rules if
/// they tell them (`tells`), else by `accept`.
fn run(setup: &Setup<'_>, tasks: &[Task], tells: bool, accept: Accept) -> Vec<(Text, u64)> {
    let mut speculator = speculator(setup, &[], &|drafter| drafter).accepting(accept);
    let open = |task: &Task| {
        let mut stream = task.open(&mut speculator);
        if tells {
            stream.accept_by(task.accept);
        }
        stream
    };
    let mut streams: Vec<Stream> = tasks.iter().map(open).collect();
    finish(&mut speculator, &mut streams, setup.chunk);
    let end = |mut stream: Stream| {
        let written = (Text::of(&mut stream), stream.stats().drafted());
        speculator.close(stream);
        written
    };
    streams.into_iter().map(end).collect()
}
