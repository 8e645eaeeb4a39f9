//! Times of the target alone: steps by their rows, prefill by prompt length, and a plain
//! read of as many bytes as a step reads.

use anyhow::Result;
use backend::{Backend, Matrix};
use engine::Model;
use quant::{Scalar, Stored};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

/// Rows of the steps that are timed, where the context has room for them.
const STEP_ROWS: [usize; 7] = [1, 2, 3, 4, 6, 8, 16];
/// Tokens that a timed step follows, where the context has room for them.
const STEP_CONTEXT: usize = 64;
/// Lengths of the prompts that are timed, as far as the context has room for them.
const PREFILL: [usize; 2] = [512, 2048];
/// Bytes of one matrix of the plain read.
const READ_PART: usize = 64 << 20;
/// Bytes that a plain read has at least: more than the caches hold, or it would
/// say nothing about memory.
const READ_MIN: usize = 256 << 20;

/// What [`measure`] finds.
#[derive(Default)]
pub(super) struct Times {
    /// Median milliseconds of a step by its rows, logits included.
    pub(super) step_ms: BTreeMap<usize, f64>,
    /// Prompt tokens a second by prompt length, the first token of the reply included.
    pub(super) prefill_tok_s: BTreeMap<usize, f64>,
    /// Median milliseconds of a plain read of as many bytes as a step reads, in the rounds
    /// of the steps; absent where the device has none.
    pub(super) read_ms: Option<f64>,
}

/// Times steps and reads in `reps` rounds, and prefill in a quarter as many.
pub(super) fn measure(model: &mut Model, reps: usize) -> Result<Times> {
    let (step_ms, read_ms) = steps(model, reps)?;
    Ok(Times {
        step_ms,
        read_ms,
        prefill_tok_s: prefill(model, reps.div_ceil(4))?,
    })
}

/// `n` tokens of a text that means nothing.
fn tokens(model: &Model, n: usize) -> Vec<u32> {
    let vocab = model.speculator.target().vocab_size();
    (0..n).map(|i| (i * 37 % vocab) as u32).collect()
}

/// Steps by their rows, and the plain read between them.
fn steps(model: &mut Model, reps: usize) -> Result<(BTreeMap<usize, f64>, Option<f64>)> {
    let fits = |&n_rows: &usize| n_rows <= model.info.context;
    let step_rows: Vec<usize> = STEP_ROWS.into_iter().filter(fits).collect();
    let longest = step_rows.iter().copied().max().unwrap_or(0);
    let context = tokens(model, STEP_CONTEXT.min(model.info.context - longest));
    let mut step_ms: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
    let mut read_ms = Vec::new();
    let backend = model.speculator.backend().clone();
    let read = PlainRead::new(&*backend, model.info.step_bytes as usize);
    // Not counted: the first round, which finds caches cold, or the first two, in which a device records steps.
    let cold = if backend.capabilities().records { 2 } else { 1 };
    for rep in 0..cold + reps {
        for &n_rows in &step_rows {
            let rows = tokens(model, n_rows);
            let time = model.speculator.time_step(&context, &rows)?;
            if rep >= cold {
                let times = step_ms.entry(n_rows).or_default();
                times.push(time.as_secs_f64() * 1e3);
            }
        }
        let ms = read.time_ms();
        if rep >= cold {
            read_ms.extend(ms);
        }
    }
    let medians = step_ms.into_iter();
    let medians = medians.map(|(n_rows, times)| (n_rows, median(times)));
    Ok((
        medians.collect(),
        (!read_ms.is_empty()).then(|| median(read_ms)),
    ))
}

/// Prefill by prompt length.
fn prefill(model: &mut Model, reps: usize) -> Result<BTreeMap<usize, f64>> {
    let mut rates = BTreeMap::new();
    for n in PREFILL.into_iter().filter(|&n| n <= model.info.context) {
        let prompt = tokens(model, n);
        let mut times = Vec::new();
        for rep in 0..=reps.max(1) {
            let time = model.speculator.time_prefill(&prompt)?;
            if rep > 0 {
                times.push(time.as_secs_f64());
            }
        }
        rates.insert(n, n as f64 / median(times));
    }
    Ok(rates)
}

/// Matrices that are read and not multiplied: as fast as memory gives what a step reads.
struct PlainRead<'a> {
    backend: &'a dyn Backend,
    parts: Vec<Matrix>,
    /// Bytes wished for, of bytes read.
    share: f64,
}

impl<'a> PlainRead<'a> {
    /// A read of `bytes`, or of more where the caches would hold those.
    fn new(backend: &'a dyn Backend, bytes: usize) -> Self {
        // Rows of a page each; panels hold 16 of them.
        const ROW: usize = 1024;
        let part = |bytes: usize| {
            let rows = (bytes / (4 * ROW)).max(16);
            let zeros = vec![0; rows * 4 * ROW];
            backend.matrix(&[Stored::plain(Scalar::F32, rows, ROW, &zeros)])
        };
        let all = bytes.max(READ_MIN);
        let parts = (0..all).step_by(READ_PART);
        PlainRead {
            backend,
            parts: parts.map(|at| part(READ_PART.min(all - at))).collect(),
            share: bytes as f64 / all as f64,
        }
    }

    /// Milliseconds that the bytes wished for take, if the device can tell.
    fn time_ms(&self) -> Option<f64> {
        let start = Instant::now();
        let sums: Vec<_> = self.parts.iter().map(|m| self.backend.read(m)).collect();
        let ms = start.elapsed().as_secs_f64() * 1e3;
        black_box(sums)
            .iter()
            .all(Option::is_some)
            .then_some(ms * self.share)
    }
}

/// The middle of `values`; 0 if there are none.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}
