//! Steps that are recorded once and replayed: a launch each instead of hundreds.
//!
//! A step is recorded when its key comes for the second time with as many rows and
//! sequences: by then everything is compiled. A record holds addresses, so all that
//! changes is read from memory at fixed places: the step's rows with their tokens,
//! positions and pages, and copies of its inputs. A longer context changes nothing
//! in it. A step that needs the host in between is run as it comes.

use crate::driver::Graph;
use crate::memory::{Values, address};
use crate::{Cuda, batch};
use backend::{Batch, StepKey, Tensor};

/// Rows of a step that is recorded, at most: larger ones are prompts, which come in
/// any size and leave the host time enough.
const MAX_ROWS: usize = 64;

/// Bytes for a step's rows; page tables for contexts of a million tokens.
pub(crate) const BATCH_BYTES: usize = 1 << 18;

/// Everything that shapes a step.
#[derive(Clone, PartialEq, Eq, Hash)]
pub(crate) struct Shape {
    key: StepKey,
    rows: usize,
    seqs: usize,
    inputs: Vec<(usize, usize)>,
}

/// What is known of a step's shape.
pub(crate) enum Known {
    /// It has run once.
    Seen,
    /// It needs the host.
    Unrecordable,
    Recorded(Record),
}

/// A recorded step and the memory it reads and writes.
pub(crate) struct Record {
    graph: Graph,
    inputs: Vec<Tensor>,
    outputs: Vec<Tensor>,
}

pub(crate) fn step(
    cuda: &Cuda,
    key: StepKey,
    batch: &Batch,
    inputs: &[&Tensor],
    work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
) -> Vec<Tensor> {
    let words = batch::words(batch);
    if batch.n_rows() > MAX_ROWS || 4 * words.len() > BATCH_BYTES || cuda.driver.has_failed() {
        return work(inputs);
    }
    let shape = Shape {
        key,
        rows: batch.n_rows(),
        seqs: batch.seqs.len(),
        inputs: inputs.iter().map(|x| (x.rows(), x.cols())).collect(),
    };
    let known = cuda.state().steps.remove(&shape);
    let (known, made) = match known {
        None => (Known::Seen, work(inputs)),
        Some(Known::Unrecordable) => (Known::Unrecordable, work(inputs)),
        Some(Known::Seen) => match record(cuda, batch, inputs, work) {
            None => (Known::Unrecordable, work(inputs)),
            Some(record) => {
                let made = replay(cuda, &record, &words, inputs);
                (Known::Recorded(record), made)
            }
        },
        Some(Known::Recorded(record)) => {
            let made = replay(cuda, &record, &words, inputs);
            (Known::Recorded(record), made)
        }
    };
    cuda.state().steps.insert(shape, known);
    made
}

fn record(
    cuda: &Cuda,
    batch: &Batch,
    inputs: &[&Tensor],
    work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
) -> Option<Record> {
    cuda.arena.recording(true);
    cuda.state().recording = Some(batch.clone());
    let inputs: Vec<Tensor> = inputs
        .iter()
        .map(|x| cuda.tensor(x.rows(), x.cols()))
        .collect();
    let borrowed: Vec<&Tensor> = inputs.iter().collect();
    let recorded = cuda.driver.record(|| work(&borrowed));
    cuda.state().recording = None;
    cuda.arena.recording(false);
    let (graph, outputs) = recorded?;
    Some(Record {
        graph,
        inputs,
        outputs,
    })
}

fn replay(cuda: &Cuda, record: &Record, words: &[u32], inputs: &[&Tensor]) -> Vec<Tensor> {
    cuda.driver.write(cuda.recorded_batch.address, words);
    for (to, from) in record.inputs.iter().zip(inputs) {
        cuda.driver
            .copy(address(to), address(from), 4 * from.rows() * from.cols());
    }
    cuda.driver.replay(&record.graph);
    let alias = |x: &Tensor| {
        let values = x.storage::<Values>().alias();
        Tensor::new(x.rows(), x.cols(), Box::new(values), None)
    };
    record.outputs.iter().map(alias).collect()
}
