//! Positions and sums of contexts of 100 000 tokens and more.
//!
//! A position is a number that `f32` has exactly, an angle is the product of position and frequency, rounded once, and
//! its sine and cosine are those of that product: so an angle is as exact as `f32` has it, however far a row stands. Sums
//! over all keys are sums of splits, so they lose no more than sums over a few hundred numbers.

use crate::writing::backend;
use backend::{Attention, Backend, Batch, BatchSeq, Position, Reference, Rope, Row};
use cache::{GroupPlan, KeptSize, KvLayer, KvPlan, Memory, MemoryPlan, MemorySize};
use cpu::Isa;
use std::sync::Arc;
use suites::Rng;

/// Rows of a long text: 196 splits of attention.
const ROWS: usize = 100_352;
/// Rows of a step.
const STEP: usize = 1024;
/// Query heads, and columns of each.
const HEADS: usize = 2;
const COLS: usize = 16;

/// The reference, and the CPU with each instruction set that it has.
fn backends() -> Vec<Arc<dyn Backend>> {
    let fast = Isa::available().into_iter().map(|isa| backend(isa, 1));
    let reference: Arc<dyn Backend> = Arc::new(Reference);
    std::iter::once(reference).chain(fast).collect()
}

/// Positions around 100 000, the ends of the families' contexts, and that of a context stretched to a million.
const POSITIONS: [u32; 8] = [
    99_999, 100_000, 100_001, 131_071, 200_003, 262_143, 999_983, 1_048_575,
];

#[test]
fn angles_of_far_positions_are_as_exact_as_their_products() {
    for b in backends() {
        for (theta, dim) in [(1e4_f64, 256), (1e6, 512), (1e7, 64)] {
            let pairs = dim / 2;
            let exact = |j: usize| theta.powf(-2.0 * j as f64 / dim as f64);
            let rope = Rope {
                head_dim: dim,
                pair_offset: pairs,
                frequencies: (0..pairs).map(|j| exact(j) as f32).collect(),
                axes: Vec::new(),
            };
            let batch = Batch {
                rows: POSITIONS
                    .map(|p| Row {
                        position: Position::text(p),
                        ..Row::text(3)
                    })
                    .to_vec(),
                ..Batch::default()
            };
            // The first column of a pair becomes its cosine, the other one its sine.
            let head: Vec<f32> = (0..dim)
                .map(|i| if i < pairs { 1.0 } else { 0.0 })
                .collect();
            let x = b.upload(POSITIONS.len(), dim, &head.repeat(POSITIONS.len()));
            let y = b.rope(x, &rope, &batch);
            let y = b.download(&y);
            for (row, p) in y.chunks_exact(dim).zip(POSITIONS) {
                for j in 0..pairs {
                    let (cos, sin) = (f64::from(row[j]), f64::from(row[j + pairs]));
                    let what = format!("{} theta {theta} position {p} pair {j}", b.name());
                    let product = f64::from(p as f32 * rope.frequencies[j]);
                    let error = (cos - product.cos()).abs().max((sin - product.sin()).abs());
                    assert!(error < 2e-7, "{what}: {error}");
                    // Frequency and product are rounded once each, by a unit of 2⁻²⁴ at most.
                    let angle = f64::from(p) * exact(j);
                    let most = angle * 0.5_f64.powi(23) * 1.001 + 2e-7;
                    let error = (cos - angle.cos()).abs().max((sin - angle.sin()).abs());
                    assert!(error <= most, "{what}: {error} of {most}");
                }
            }
        }
    }
}

#[test]
fn all_positions_are_numbers_of_their_own() {
    // `f32` has every whole number up to here, which is more than any context.
    assert!((0..1 << 24).all(|p: u32| p as f32 as u32 == p));
    assert!(POSITIONS.iter().all(|p| *p < 1 << 24));
}

/// A text of [`ROWS`] random rows of keys and values, and queries of its last five rows.
struct Long {
    memory: Memory,
    batch: Batch,
    keys: Vec<f32>,
    values: Vec<f32>,
    queries: Vec<f32>,
}

const LAST: usize = 5;

impl Long {
    fn new(b: &dyn Backend) -> Self {
        let plan = MemoryPlan {
            groups: vec![GroupPlan {
                window: None,
                layers: vec![KvLayer {
                    heads: 1,
                    head_dim: COLS,
                    query_heads: 1,
                    edge: None,
                }],
            }],
            delta: Vec::new(),
        };
        let size = MemorySize {
            sequences: 1,
            context: ROWS,
            step_rows: STEP,
            kv_format: KvPlan::both(&quant::kv::F32),
            running_pages: None,
            kept: KeptSize::default(),
        };
        let mut memory = Memory::new(b, plan, size);
        let mut rng = Rng(7);
        let mut random = |n: usize| -> Vec<f32> {
            let number = |_| rng.below(1 << 20) as f32 / (1 << 20) as f32;
            (0..n).map(number).collect()
        };
        let (keys, mut values) = (random(ROWS * COLS), random(ROWS * COLS));
        // Sums that grow and never cancel: what they lose shows.
        values.iter_mut().for_each(|v| *v += 0.5);
        let queries = random(LAST * HEADS * COLS);
        let mut sequence = memory.open().unwrap();
        let mut batch = Batch::default();
        while sequence.len() < ROWS {
            batch.clear();
            let first = sequence.len();
            // The last step has the rows that ask.
            let n = (ROWS - LAST - first).min(STEP);
            let n = if n == 0 { LAST } else { n };
            memory
                .push(&mut batch, &mut sequence, &vec![0; n], n)
                .unwrap();
            let part = |x: &[f32]| b.upload(n, COLS, &x[first * COLS..(first + n) * COLS]);
            b.kv_append(
                &mut memory.kv[0][0],
                &part(&keys),
                &part(&values),
                0,
                &batch,
            );
        }
        b.finish().unwrap();
        Long {
            memory,
            batch,
            keys,
            values,
            queries,
        }
    }

    /// What the queries of `rows` see, in `batch`.
    fn attend(&self, b: &dyn Backend, batch: &Batch, rows: std::ops::Range<usize>) -> Vec<f32> {
        let attention = Attention {
            group: 0,
            heads: HEADS,
            scale: 0.25,
            window: None,
        };
        let width = HEADS * COLS;
        let queries = &self.queries[rows.start * width..rows.end * width];
        let q = b.upload(rows.len(), width, queries);
        let y = b.attend(&q, &self.memory.kv[0][0], &attention, batch);
        b.download(&y).into_owned()
    }

    /// What head `head` of the last row sees, as exactly as `f64` has it, and with one `f32` for each sum.
    fn expected(&self, head: usize) -> (Vec<f64>, Vec<f64>) {
        let query = &self.queries[((LAST - 1) * HEADS + head) * COLS..][..COLS];
        let (mut sum, mut of) = (0.0_f64, vec![0.0_f64; COLS]);
        let (mut one, mut ones) = (0.0_f32, vec![0.0_f32; COLS]);
        let rows = self.keys.chunks_exact(COLS);
        for (key, value) in rows.zip(self.values.chunks_exact(COLS)) {
            let products = query.iter().zip(key);
            let score: f64 = products.map(|(q, k)| f64::from(*q) * f64::from(*k)).sum();
            let p = (score * 0.25).exp();
            sum += p;
            one += p as f32;
            for ((of, ones), v) in of.iter_mut().zip(&mut ones).zip(value) {
                *of += p * f64::from(*v);
                *ones += p as f32 * v;
            }
        }
        let exact = of.iter().map(|x| x / sum).collect();
        (exact, ones.iter().map(|x| f64::from(x / one)).collect())
    }
}

/// The largest difference, as a share.
fn error(got: &[f64], want: &[f64]) -> f64 {
    let of = got.iter().zip(want).map(|(g, w)| (g - w).abs() / w.abs());
    of.fold(0.0, f64::max)
}

#[test]
fn sums_over_a_hundred_thousand_keys_lose_nothing() {
    /// A few units of 2⁻²⁴.
    const TOLERANCE: f64 = 1e-6;
    for b in backends() {
        let long = Long::new(&*b);
        let all = long.attend(&*b, &long.batch, 0..LAST);
        let last = &all[(LAST - 1) * HEADS * COLS..];
        for (head, got) in last.chunks_exact(COLS).enumerate() {
            let got: Vec<f64> = got.iter().map(|x| f64::from(*x)).collect();
            let (exact, one_sum) = long.expected(head);
            let (error, naive) = (error(&got, &exact), error(&one_sum, &exact));
            assert!(error < TOLERANCE, "{} head {head}: {error}", b.name());
            assert!(naive > TOLERANCE, "one sum over all keys shows: {naive}");
        }
        // The bits of rows that run one by one.
        for row in 0..LAST {
            let tables = long.batch.tables.clone();
            let alone = Batch {
                tokens: vec![0],
                rows: vec![Row::text((ROWS - LAST + row) as u32)],
                seqs: vec![BatchSeq {
                    rows: 0..1,
                    slot: 0,
                    is_new: false,
                    kept: 0,
                    certain: 1,
                    tables: std::iter::once(0..tables.len()).collect(),
                }],
                tables,
                ..Batch::default()
            };
            let got = long.attend(&*b, &alone, row..row + 1);
            let want = &all[row * HEADS * COLS..][..HEADS * COLS];
            assert!(got == want, "{} row {row}", b.name());
        }
    }
}
