//! Steps that are recorded once and replayed: a launch each instead of hundreds.
//!
//! A step is recorded when its key comes for the second time with as many rows and
//! sequences: by then everything is compiled. One that reads much of a prompt is recorded later, for recording it takes longer
//! than running it, and its number of rows may not come again soon. A record holds addresses, so all that
//! changes is read from memory at fixed places: the step's rows with their tokens,
//! positions and pages, and copies of its inputs. A longer context changes nothing
//! in it. A step that needs the host in between is run as it comes, and so is one with rows
//! of media.
//!
//! A chain is one record of all its steps. Their rows, and how tokens are chosen, are
//! written before it starts; the tokens themselves stay where the choice before leaves
//! them, and are read once at its end.

use crate::args::Address;
use crate::choose::{self, By, choose, listed};
use crate::machine::Graph;
use crate::memory::{cell, tensor};
use crate::record::Tokens;
use crate::{Cuda, batch};
use backend::{
    Batch, Chain, Chained, Link, MAX_RECORDED_ROWS, MAX_TENTATIVE, StepKey, Store, Tensor,
};

/// Times that a step with prompt rows is run before it is recorded; others are run once.
const PROMPT_RUNS: u32 = 8;

/// Bytes for a step's rows; page tables for contexts of a million tokens.
pub(crate) const BATCH_BYTES: usize = 1 << 20;

/// Everything that shapes a step.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    key: StepKey,
    /// Rows and sequences, of each step of a chain.
    batches: Vec<(usize, usize)>,
    inputs: Vec<(usize, usize)>,
    /// How a chain chooses, among which tokens, and whether it tells confidences.
    choice: Option<(By, Address, bool)>,
}

impl Shape {
    /// The shape that stands for all steps that launch about the same kernels.
    fn class(&self) -> Shape {
        let mut class = self.clone();
        let sizes = class
            .batches
            .iter_mut()
            .flat_map(|(rows, seqs)| [rows, seqs]);
        sizes.for_each(|size| *size = size.next_power_of_two());
        let inputs = class.inputs.iter_mut().map(|(rows, _)| rows);
        inputs.for_each(|rows| *rows = rows.next_power_of_two());
        class
    }
}

/// What is known of a step's shape.
pub(crate) enum Known {
    /// The step has run so many times.
    Seen(u32),
    /// The step needs the host between its ops.
    Unrecordable,
    Recorded(Record),
}

/// A recorded step and the memory it reads and writes.
pub(crate) struct Record {
    graph: Graph,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

/// A step while it is recorded.
pub(crate) struct Recording {
    pub(crate) batch: Batch,
    /// Where its rows are going to lie.
    pub(crate) at: Address,
    /// Where the step before leaves the tokens, in a chain.
    chosen: Option<Address>,
}

impl Recording {
    /// Where an embedding finds the step's tokens.
    pub(crate) fn tokens(&self) -> Tokens {
        let (ids, batch) = match self.chosen {
            Some(chosen) => (chosen, 0),
            None => (0, self.at),
        };
        Tokens {
            ids,
            batch,
            _own: None,
        }
    }
}

/// How many times a step of `batch` is run before it is recorded.
fn runs(batch: &Batch) -> u32 {
    match batch.seqs.iter().any(|s| s.certain > MAX_TENTATIVE) {
        true => PROMPT_RUNS,
        false => 1,
    }
}

/// Whether a record could stand for the ops of `batch`: rows of media have lists of their own,
/// and rows that see beyond themselves take more memory.
fn can_record(batch: &Batch) -> bool {
    batch.media.is_empty() && batch.rows_ahead() == 0
}

fn size(batch: &Batch) -> (usize, usize) {
    (batch.n_rows(), batch.seqs.len())
}

/// Rows of the longest sequence that a launch for `batch` must have blocks for. A record is replayed for every
/// step of its [`size`], whichever sequences the rows belong to, so in a step that may be recorded one sequence could
/// have all rows but one of each other.
pub(crate) fn longest(batch: &Batch) -> usize {
    let (rows, seqs) = size(batch);
    debug_assert!(
        batch.seqs.iter().all(|s| !s.rows.is_empty()),
        "a sequence without rows"
    );
    if rows <= MAX_RECORDED_ROWS {
        return (rows + 1).saturating_sub(seqs);
    }
    let of_each = batch.seqs.iter().map(|s| s.rows.len());
    of_each.max().unwrap_or(0)
}

pub(crate) fn step(
    cuda: &Cuda,
    key: StepKey,
    batch: &Batch,
    inputs: &[&Tensor],
    work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
) -> Vec<Tensor> {
    let shape = Shape {
        key,
        batches: vec![size(batch)],
        inputs: inputs.iter().map(|x| (x.rows(), x.cols())).collect(),
        choice: None,
    };
    if !can_record(batch) {
        return work(inputs);
    }
    let at = cuda.recorded_batch.address;
    let words = batch::words(batch);
    run(cuda, shape, runs(batch), &words, inputs, &mut |x| {
        cuda.records(batch, at, None);
        work(x)
    })
}

pub(crate) fn chain(
    cuda: &Cuda,
    chain: &Chain<'_>,
    x: &Tensor,
    work: &mut dyn FnMut(usize, &Batch, &Tensor) -> Link,
) -> Option<Chained> {
    if !chain.batches.iter().all(can_record) {
        return None;
    }
    let listed = listed(cuda, chain.list);
    let (n, rows) = (chain.batches.len(), chain.choices.first()?.len());
    let batches = chain.batches.iter().enumerate();
    assert!(
        chain.choices.len() == n
            && chain.choices.iter().all(|c| c.len() == rows)
            && batches.clone().all(|(i, b)| b.n_rows() == rows || i == 0),
        "a row and a choice for each token"
    );
    let all = chain.choices.concat();
    let mut words: Vec<u32> = all.iter().flat_map(choose::words).collect();
    let n_choices = words.len();
    let starts = batch::put(&mut words, chain.batches);
    let by = By::of(&all);
    let shape = Shape {
        key: chain.key,
        batches: chain.batches.iter().map(size).collect(),
        inputs: vec![(x.rows(), x.cols())],
        choice: Some((by, listed.0, chain.wants_confidences)),
    };
    let base = cuda.recorded_batch.address;
    let mut made = run(cuda, shape, 1, &words, &[x], &mut |inputs| {
        let is_recording = cuda.state().recording.is_some();
        let here = (!is_recording).then(|| cuda.device.arena.of(&words[..n_choices]));
        let choices = here.as_ref().map_or(base, |here| here.address);
        let chosen = cuda.scratch(n, rows);
        let chosen_at = cuda.address(&chosen);
        let sure = chain.wants_confidences.then(|| cuda.scratch(n, rows));
        let sure_at = sure.as_ref().map(|sure| cuda.address(sure));
        let tokens = |i: usize| chosen_at + (4 * i * rows) as Address;
        let mut next: Option<Tensor> = None;
        for (i, batch) in batches.clone() {
            let before = (i > 0).then(|| tokens(i - 1));
            let x = next.as_ref().unwrap_or(inputs[0]);
            let link = match before {
                Some(before) if !is_recording => {
                    let mut batch = batch.clone();
                    batch.tokens.resize(rows, 0);
                    cuda.device.driver.read(&mut batch.tokens, before);
                    work(i, &batch, x)
                }
                _ => {
                    cuda.records(batch, base + 4 * starts[i] as Address, before);
                    work(i, batch, x)
                }
            };
            let of = choices + (4 * choose::WORDS * i * rows) as Address;
            let ids = link.ids.as_ref();
            let ids = ids.map_or(listed, |ids| (cuda.address(ids), ids.cols()));
            let (logits, device) = (&link.logits, &cuda.device);
            let logits = (cuda.address(logits), [logits.rows(), logits.cols()]);
            if let Some(sure) = sure_at {
                choose::confidences(device, logits, sure + (4 * i * rows) as Address);
            }
            choose(device, logits, ids, by, of, tokens(i));
            next = link.next.or(next);
        }
        [Some(chosen), sure, next].into_iter().flatten().collect()
    });
    let mut tokens = vec![0u32; n * rows];
    cuda.device.driver.read(&mut tokens, cuda.address(&made[0]));
    let mut made = made.drain(1..);
    let sure = chain.wants_confidences.then(|| made.next()).flatten();
    let sure = sure.map_or_else(Vec::new, |sure| cuda.download(&sure).into_owned());
    Some(Chained {
        tokens: tokens.chunks(rows).map(<[u32]>::to_vec).collect(),
        confidences: sure.chunks(rows).map(<[f32]>::to_vec).collect(),
        next: made.next(),
    })
}

/// Whether a step of `key` without inputs is recorded, or never will be.
pub(crate) fn is_recorded(cuda: &Cuda, key: StepKey, rows: usize, sequences: usize) -> bool {
    let shape = Shape {
        key,
        batches: vec![(rows, sequences)],
        inputs: Vec::new(),
        choice: None,
    };
    let state = cuda.state();
    let known = state.steps.get(&shape);
    rows > MAX_RECORDED_ROWS || !matches!(known, None | Some(Known::Seen(_)))
}

impl Cuda {
    /// What is recorded from now on, if anything is, is about `batch`.
    fn records(&self, batch: &Batch, at: Address, chosen: Option<Address>) {
        if let Some(recording) = &mut self.state().recording {
            *recording = Recording {
                batch: batch.clone(),
                at,
                chosen,
            };
        }
    }
}

/// Runs `work`, or its record after writing `words` where that reads them. The record is made when `work` has run `runs`
/// times.
fn run(
    cuda: &Cuda,
    shape: Shape,
    runs: u32,
    words: &[u32],
    inputs: &[&Tensor],
    work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
) -> Vec<Tensor> {
    let rows = shape.batches.iter().map(|&(rows, _)| rows).max();
    if rows > Some(MAX_RECORDED_ROWS)
        || 4 * words.len() > BATCH_BYTES
        || cuda.device.driver.has_failed()
    {
        compile_ahead(cuda, &shape, inputs, work);
        return work(inputs);
    }
    let known = cuda.state().steps.remove(&shape);
    let is_first = matches!(known, None | Some(Known::Seen(_)));
    cuda.state().has_first_runs |= is_first;
    let (known, made) = match known {
        None => {
            compile_ahead(cuda, &shape, inputs, work);
            (Known::Seen(1), work(inputs))
        }
        Some(Known::Seen(n)) if n < runs => (Known::Seen(n + 1), work(inputs)),
        Some(Known::Unrecordable) => (Known::Unrecordable, work(inputs)),
        Some(Known::Seen(_)) => match record(cuda, inputs, work) {
            None => (Known::Unrecordable, work(inputs)),
            Some(record) => {
                let made = replay(cuda, &record, words, inputs);
                (Known::Recorded(record), made)
            }
        },
        Some(Known::Recorded(record)) => {
            let made = replay(cuda, &record, words, inputs);
            (Known::Recorded(record), made)
        }
    };
    cuda.state().steps.insert(shape, known);
    made
}

/// Compiles the kernels that `work` will launch, several at a time, unless a step of the same class has had that done: each
/// compiled when it is first launched would take the sum of their times.
fn compile_ahead(
    cuda: &Cuda,
    shape: &Shape,
    inputs: &[&Tensor],
    work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
) {
    if !cuda.device.driver.compiles() || !cuda.state().compiled.insert(shape.class()) {
        return;
    }
    // What was asked for before is not part of the step.
    cuda.flush();
    // New ones, since ops leave f16 copies with what they read.
    let inputs: Vec<Tensor> = inputs
        .iter()
        .map(|x| cuda.scratch(x.rows(), x.cols()))
        .collect();
    let borrowed: Vec<&Tensor> = inputs.iter().collect();
    cuda.device.driver.compile_ahead(|| {
        // Kept while ops are fused: what nobody holds is fused otherwise.
        let _made = work(&borrowed);
        cuda.flush();
    });
}

/// Records what `work` launches on copies of `inputs`; nothing, if the host had to take part.
fn record(
    cuda: &Cuda,
    inputs: &[&Tensor],
    work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
) -> Option<Record> {
    // What was asked for before is not part of the step.
    cuda.flush();
    cuda.device.arena.recording(true);
    let record = record_apart(cuda, inputs, work);
    cuda.device.arena.recording(false);
    record
}

/// Records a step whose inputs and results lie where no other record writes. Which buffers are results shows at the
/// end only; so where they got memory that others use, the step is recorded again.
fn record_apart(
    cuda: &Cuda,
    inputs: &[&Tensor],
    work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
) -> Option<Record> {
    let arena = &cuda.device.arena;
    let mut own = Vec::new();
    for _ in 0..2 {
        arena.own((0..inputs.len()).collect());
        // New ones each time, since ops leave f16 copies with what they read.
        let inputs: Vec<Tensor> = inputs
            .iter()
            .map(|x| cuda.scratch(x.rows(), x.cols()))
            .collect();
        // Each input gets its memory before the record begins.
        for x in &inputs {
            cuda.address(x);
        }
        arena.own(own);
        let borrowed: Vec<&Tensor> = inputs.iter().collect();
        let (graph, outputs) = capture(cuda, &borrowed, work)?;
        let buffers = outputs.iter().flat_map(|x| cell(x).buffers());
        let (numbers, is_shared): (Vec<usize>, Vec<bool>) = buffers.unzip();
        if !is_shared.contains(&true) {
            return Some(Record {
                graph,
                inputs,
                outputs,
            });
        }
        own = numbers;
    }
    None
}

/// What `work` launches on `inputs`, as a graph, and what it makes; nothing, if the host had to take part.
fn capture(
    cuda: &Cuda,
    inputs: &[&Tensor],
    work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
) -> Option<(Graph, Vec<Tensor>)> {
    cuda.state().recording = Some(Recording {
        batch: Batch::default(),
        at: 0,
        chosen: None,
    });
    let captured = cuda.device.driver.record(|| {
        let made = work(inputs);
        cuda.flush();
        made
    });
    cuda.state().recording = None;
    captured
}

/// Runs a record with the step's rows in `words` and the values of `inputs`.
fn replay(cuda: &Cuda, record: &Record, words: &[u32], inputs: &[&Tensor]) -> Vec<Tensor> {
    cuda.flush();
    cuda.device.driver.write(cuda.recorded_batch.address, words);
    for (to, from) in record.inputs.iter().zip(inputs) {
        cuda.device.driver.copy(
            cuda.address(to),
            cuda.address(from),
            4 * from.rows() * from.cols(),
        );
    }
    cuda.device.driver.replay(&record.graph);
    let alias = |x: &Tensor| tensor(cell(x).alias());
    record.outputs.iter().map(alias).collect()
}

#[cfg(test)]
mod tests {
    use super::{MAX_RECORDED_ROWS, MAX_TENTATIVE, PROMPT_RUNS, longest, size};
    use crate::{Cuda, DryRun};
    use backend::{Batch, BatchSeq, Ops, Record, Row, StepKey, Store, Tensor};

    fn batch(rows_of: &[usize]) -> Batch {
        let mut batch = Batch::default();
        for &n in rows_of {
            let first = batch.rows.len();
            batch.rows.extend((first..first + n).map(|_| Row::text(0)));
            batch.seqs.push(BatchSeq {
                rows: first..first + n,
                slot: 0,
                is_new: false,
                kept: 0,
                certain: n,
                tables: Vec::new(),
            });
        }
        batch
    }

    /// Needs no GPU: what is recorded when.
    #[test]
    fn a_step_that_reads_much_of_a_prompt_is_recorded_later() {
        let cuda = Cuda::dry_run(DryRun::default());
        let x = cuda.upload(1, 64, &[1.0; 64]);
        let norm = || vec![cuda.rms_norm(&x, None, 64, 1e-6)];
        for (rows, runs) in [(MAX_TENTATIVE, 1), (MAX_TENTATIVE + 1, PROMPT_RUNS)] {
            let key = StepKey::fresh();
            for _ in 0..=runs {
                assert!(!cuda.is_recorded(key, rows, 1));
                cuda.step(key, &batch(&[rows]), &[], &mut |_| norm());
            }
            assert!(cuda.is_recorded(key, rows, 1));
        }
    }

    /// Needs no GPU: what is compiled ahead is not launched, and what comes after is.
    #[test]
    fn kernels_that_are_compiled_ahead_are_not_launched() {
        let cuda = Cuda::dry_run(DryRun::default());
        let x = cuda.upload(1, 64, &[1.0; 64]);
        let driver = &cuda.device.driver;
        let norm = || {
            let y = cuda.rms_norm(&x, None, 64, 1e-6);
            cuda.flush();
            y
        };
        cuda.take_launches();
        let mut read = [1.0f32; 64];
        driver.compile_ahead(|| driver.read(&mut read, cuda.address(&norm())));
        assert_eq!(read, [0.0; 64]);
        assert!(cuda.take_launches().is_empty());
        norm();
        assert_eq!(cuda.take_launches().len(), 1);
        let panics = || driver.compile_ahead(|| panic!("as a test"));
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(panics)).unwrap_err();
        norm();
        assert_eq!(cuda.take_launches().len(), 1);
    }

    /// Needs no GPU: where results lie.
    #[test]
    fn results_of_a_step_lie_where_no_other_record_writes() {
        let cuda = Cuda::dry_run(DryRun::default());
        let x = cuda.upload(4, 64, &[1.0; 4 * 64]);
        let norm = |x: &Tensor| cuda.rms_norm(x, None, 64, 1e-6);
        // Where a step leaves the results of the last `n` of some norms of norms.
        let results = |n_norms: usize, n: usize| {
            let key = StepKey::fresh();
            let mut work = |x: &[&Tensor]| {
                let mut made = vec![norm(x[0])];
                while made.len() < n_norms {
                    made.push(norm(&made[made.len() - 1]));
                }
                made.split_off(n_norms - n)
            };
            // The first time it runs as it comes, the second time it is recorded.
            let mut step = || cuda.step(key, &batch(&[4]), &[&x], &mut work);
            let made = [step(), step(), step()];
            let at = |i: usize| made[i].iter().map(|x| cuda.address(x));
            let (second, third): (Vec<_>, Vec<_>) = (at(1).collect(), at(2).collect());
            assert_eq!(second, third, "a record leaves its results in one place");
            second
        };
        // Blocks that records have written to.
        let arena = &cuda.device.arena;
        let written = || {
            arena.recording(true);
            let blocks = [(); 2].map(|()| arena.buffer(4 * 4 * 64));
            arena.recording(false);
            let mut addresses = blocks.map(|block| block.address);
            addresses.sort_unstable();
            addresses
        };
        let first = results(2, 1);
        let scratch = written();
        assert_eq!(written(), scratch);
        for (n_norms, n) in [(1, 1), (3, 2), (3, 3)] {
            for address in results(n_norms, n) {
                assert!(!scratch.contains(&address) && !first.contains(&address));
            }
        }
    }

    /// Needs no GPU: which steps are records.
    #[test]
    fn the_first_two_steps_of_a_kind_are_told_apart() {
        let cuda = Cuda::dry_run(DryRun::default());
        let key = StepKey::fresh();
        let run = |rows: usize| {
            let x = cuda.upload(rows, 64, &vec![1.0; rows * 64]);
            let mut work = |x: &[&Tensor]| vec![cuda.rms_norm(x[0], None, 64, 1e-6)];
            cuda.step(key, &batch(&[rows]), &[&x], &mut work);
            cuda.take_first_runs()
        };
        assert_eq!(
            [4, 4, 4, 2, 4, 2, 2].map(run),
            [true, true, false, true, false, true, false]
        );
        // Prompts are never recorded, so that no run of theirs is another than the first.
        assert_eq!([MAX_RECORDED_ROWS + 1; 2].map(run), [false; 2]);
    }

    #[test]
    fn steps_that_share_a_record_share_what_its_launches_depend_on() {
        let (recorded, replayed) = (batch(&[20, 17]), batch(&[33, 4]));
        assert_eq!(size(&recorded), size(&replayed));
        assert_eq!(longest(&recorded), longest(&replayed));
        for n in 1..MAX_RECORDED_ROWS {
            let both = batch(&[n, MAX_RECORDED_ROWS - n]);
            assert_eq!(longest(&both), MAX_RECORDED_ROWS - 1, "{n}");
        }
        assert_eq!(longest(&batch(&[7])), 7);
        assert_eq!(longest(&batch(&[1; 8])), 1);
        assert_eq!(longest(&batch(&[])), 1);
        assert_eq!(
            longest(&batch(&[100, 300])),
            300,
            "no record stands for these"
        );
    }
}
