//! The cases every backend must pass.
//!
//! Two questions, asked op by op with random inputs of a fixed seed over awkward
//! shapes. [`check_bits_equal`]: are the results those of the definition, bit for
//! bit? [`check_row_invariance`]: does a row have the same bits whatever is
//! computed with it? The second needs no reference, so it also holds a device to
//! the promise whose sums are its own.
//!
//! A failed case panics and names the op, the case and the first wrong value.

use crate::{
    Activation, Attention, Backend, Batch, BatchSeq, Delta, DeltaSpec, DeltaWeights, Expert,
    Experts, Kv, KvFormat, KvSpec, MAX_TENTATIVE, Matrix, NO_PAGE, PAGE_ROWS, Reference, Rope, Row,
    SPLIT_ROWS, Tensor,
};
use quant::{BF16, F16, F32, Format, Owned, Scalar};
use std::ops::Range;

/// One op's cases against a reference.
pub type EqualCase = fn(&dyn Backend, &dyn Backend);

/// One op's cases against itself.
pub type InvarianceCase = fn(&dyn Backend);

/// Every op by name, compared with a reference.
pub const EQUAL_CASES: &[(&str, EqualCase)] = &[
    ("embed", embed_equals),
    ("matmul", matmul_equals),
    ("matmul_rows", matmul_rows_equals),
    ("rms_norm", rms_norm_equals),
    ("elementwise", elementwise_equals),
    ("moves", moves_equal),
    ("rope", rope_equals),
    ("attend", attend_equals),
    ("gated_delta", gated_delta_equals),
    ("moe", moe_equals),
    ("argmax", argmax_equals),
    ("likeliest", likeliest_equals),
];

/// Every op that could mix rows, compared with itself.
pub const INVARIANCE_CASES: &[(&str, InvarianceCase)] = &[
    ("matmul", matmul_rows_are_independent),
    ("rms_norm", rms_norm_rows_are_independent),
    ("elementwise", elementwise_rows_are_independent),
    ("rope", rope_rows_are_independent),
    ("attend", attend_rows_are_independent),
    ("gated_delta", gated_delta_rows_are_independent),
    ("moe", moe_rows_are_independent),
];

/// Everything: [`check_bits_equal_reference`] and [`check_row_invariance`].
///
/// # Panics
///
/// On the first case that fails.
pub fn check(backend: &dyn Backend) {
    check_bits_equal_reference(backend);
    check_row_invariance(backend);
}

/// Compares every op with [`Reference`].
///
/// # Panics
///
/// On the first case that fails.
pub fn check_bits_equal_reference(backend: &dyn Backend) {
    check_bits_equal(backend, &Reference);
}

/// Compares every op with that of `reference`: for backends whose products are
/// defined elsewhere.
///
/// # Panics
///
/// On the first case that fails.
pub fn check_bits_equal(backend: &dyn Backend, reference: &dyn Backend) {
    for (_, case) in EQUAL_CASES {
        case(backend, reference);
    }
    backend
        .finish()
        .expect("the cases ask for nothing that can fail");
}

/// Compares every row's result with that of the row in other company.
///
/// # Panics
///
/// On the first case that fails.
pub fn check_row_invariance(backend: &dyn Backend) {
    for (_, case) in INVARIANCE_CASES {
        case(backend);
    }
    backend
        .finish()
        .expect("the cases ask for nothing that can fail");
}

/// SplitMix64: equal numbers everywhere, forever.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// In `-scale .. scale`, with an exact zero now and then.
    fn value(&mut self, scale: f32) -> f32 {
        let bits = self.next();
        if bits.is_multiple_of(97) {
            return 0.0;
        }
        ((bits >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    }

    fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.value(scale)).collect()
    }
}

/// Fails unless the values have equal bits, or are both NaN.
fn same(op: &str, case: &str, cols: usize, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{op} ({case}): number of values");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
            "{op} ({case}): row {}, column {} is {got:?}, not {want:?}",
            i / cols.max(1),
            i % cols.max(1)
        );
    }
}

/// A backend and its reference, or the backend twice.
struct Pair<'a> {
    got: &'a dyn Backend,
    want: &'a dyn Backend,
}

impl Pair<'_> {
    fn each<T>(&self, f: impl Fn(&dyn Backend) -> T) -> (T, T) {
        (f(self.got), f(self.want))
    }

    /// Compares what `f` returns on both.
    fn compare(&self, op: &str, case: &str, f: impl Fn(&dyn Backend) -> Tensor) {
        let (got, want) = self.each(f);
        self.compare_tensors(op, case, &got, &want);
    }

    fn compare_tensors(&self, op: &str, case: &str, got: &Tensor, want: &Tensor) {
        assert_eq!(
            (got.rows(), got.cols()),
            (want.rows(), want.cols()),
            "{op} ({case}): shape"
        );
        same(
            op,
            case,
            got.cols(),
            &self.got.download(got),
            &self.want.download(want),
        );
    }
}

/// A random matrix in `format`.
fn stored(noise: &mut Noise, format: &'static Format, rows: usize, cols: usize) -> Owned {
    let values = noise.values(rows * cols, 1.0);
    let scale = [Scalar::Bf16, Scalar::F16, Scalar::F32][noise.below(3)];
    quant::encode(format, &values, cols, scale)
}

/// Plain formats, and a few with groups: odd widths and several group sizes, and
/// blocks with an offset, a bias, sub-scales and a table.
fn formats() -> Vec<&'static Format> {
    let mut all = vec![&F32, &F16, &BF16];
    all.extend(
        [
            (4, 32),
            (4, 64),
            (8, 64),
            (8, 128),
            (2, 128),
            (3, 32),
            (5, 32),
            (6, 64),
        ]
        .map(|(bits, group)| quant::affine(bits, group).expect("a format that exists")),
    );
    all.extend(
        ["q4_0", "q5_1", "q4_k", "q6_k", "mxfp4"]
            .map(|name| quant::format(name).expect("a format that exists")),
    );
    all
}

/// `cols`, or the next width that `format` can store.
fn width(format: &Format, cols: usize) -> usize {
    cols.next_multiple_of(format.block)
}

fn embed_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(1);
    for format in formats() {
        for (rows, cols) in [(1, 1), (17, 33), (50, 100)] {
            let cols = width(format, cols);
            let parts = [
                stored(&mut noise, format, rows, cols),
                stored(&mut noise, format, 3, cols),
            ];
            let tables = pair.each(|b| b.matrix(&parts.each_ref().map(Owned::view)));
            for n in [1, 5] {
                let tokens: Vec<u32> = (0..n).map(|_| noise.below(rows + 3) as u32).collect();
                for scale in [1.0, 16.0, 0.3] {
                    let case = format!(
                        "{} [{rows} + 3, {cols}], tokens {tokens:?} times {scale}",
                        format.name
                    );
                    let (x, y) = (
                        got.embed(&tables.0, &tokens, scale),
                        want.embed(&tables.1, &tokens, scale),
                    );
                    pair.compare_tensors("embed", &case, &x, &y);
                }
            }
        }
    }
}

fn matmul_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(2);
    // Rows of x against each shape of weights; wide ones cross any blocking.
    let mut shapes = vec![
        (1, 1, vec![1, 3]),
        (17, 7, vec![2]),
        (50, 33, (1..=17).collect()),
        (130, 100, vec![1, 8]),
    ];
    shapes.extend([(16, 600, vec![1, 4, 9]), (40, 1030, vec![1, 2, 20, 37])]);
    for format in formats() {
        for (rows, cols, ns) in &shapes {
            let cols = width(format, *cols);
            let w = stored(&mut noise, format, *rows, cols);
            let w = pair.each(|b| b.matrix(&[w.view()]));
            for &n in ns {
                let x = noise.values(n * cols, 2.0);
                let case = format!("{} [{rows}, {cols}] by {n} rows", format.name);
                let y = (
                    got.matmul(&got.upload(n, cols, &x), &w.0),
                    want.matmul(&want.upload(n, cols, &x), &w.1),
                );
                pair.compare_tensors("matmul", &case, &y.0, &y.1);
            }
        }
    }
    // Several matrices of one input, of different formats, some in parts.
    let cols = 256;
    let parts: Vec<Owned> = formats()
        .iter()
        .map(|f| stored(&mut noise, f, 1 + noise_rows(f), cols))
        .collect();
    let load = |b: &dyn Backend| -> Vec<Matrix> {
        parts
            .iter()
            .map(|p| b.matrix(&[p.view()]))
            .chain([
                b.matrix(&[parts[3].view(), parts[3].view()]),
                b.matrix(&[parts[0].view(), parts[2].view()]),
            ])
            .collect()
    };
    let w = pair.each(load);
    for n in [1, 2, 11] {
        let x = noise.values(n * cols, 2.0);
        let run = |b: &dyn Backend, w: &[Matrix]| {
            let mut y: Vec<Tensor> = w.iter().map(|w| b.scratch(n, w.rows)).collect();
            b.matmul_into(
                &b.upload(n, cols, &x),
                &w.iter().collect::<Vec<_>>(),
                &mut y,
            );
            y
        };
        for (i, (x, y)) in run(got, &w.0).iter().zip(&run(want, &w.1)).enumerate() {
            pair.compare_tensors("matmul", &format!("matrix {i} of a group, {n} rows"), x, y);
        }
    }
}

/// Some number of rows that differs between formats.
fn noise_rows(format: &Format) -> usize {
    format.name.bytes().map(usize::from).sum::<usize>() % 70
}

fn matmul_rows_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(3);
    for format in formats() {
        let (rows, cols) = (90, width(format, 40));
        let w = stored(&mut noise, format, rows, cols);
        let w = pair.each(|b| b.matrix(&[w.view()]));
        for (n, m) in [(1, 1), (3, 16), (2, 37)] {
            let x = noise.values(n * cols, 2.0);
            let scattered = (0..n)
                .map(|_| (0..m).map(|_| noise.below(rows) as u32).collect())
                .collect();
            let neighbours = (0..n)
                .map(|i| (0..m as u32).map(|id| 16 * i as u32 + id).collect())
                .collect();
            for ids in [scattered, neighbours] as [Vec<Vec<u32>>; 2] {
                let case = format!("{} [{rows}, {cols}], rows {ids:?}", format.name);
                let x = pair.each(|b| b.upload(n, cols, &x));
                let y = (
                    got.matmul_rows(&x.0, &w.0, &ids),
                    want.matmul_rows(&x.1, &w.1, &ids),
                );
                pair.compare_tensors("matmul_rows", &case, &y.0, &y.1);
            }
        }
    }
}

fn rms_norm_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(4);
    for (width, runs) in [
        (1, 3),
        (5, 2),
        (16, 1),
        (24, 4),
        (64, 3),
        (100, 2),
        (1030, 1),
    ] {
        for n in [1, 3, 40] {
            let mut x = noise.values(n * runs * width, 3.0);
            x[..width].fill(0.0);
            let weight = noise.values(width, 1.0);
            for eps in [1e-6, 0.1] {
                for with in [true, false] {
                    let case =
                        format!("{n} rows of {runs} runs of {width}, eps {eps}, weight: {with}");
                    pair.compare("rms_norm", &case, |b| {
                        let weight = b.upload(1, width, &weight);
                        b.rms_norm(
                            &b.upload(n, runs * width, &x),
                            with.then_some(&weight),
                            width,
                            eps,
                        )
                    });
                }
            }
        }
    }
}

/// A function of one or two tensors.
type Elementwise = fn(&dyn Backend, Tensor, &Tensor) -> Tensor;

const ELEMENTWISE: &[(&str, Elementwise)] = &[
    ("add", |b, x, y| b.add(x, y)),
    ("scale", |b, x, _| b.scale(x, 0.37)),
    ("glu silu", |b, x, y| b.glu(x, y, Activation::Silu)),
    ("glu gelu", |b, x, y| b.glu(x, y, Activation::GeluTanh)),
    ("glu sigmoid", |b, x, y| b.glu(x, y, Activation::Sigmoid)),
    ("softcap", |b, x, _| b.softcap(x, 30.0)),
];

fn elementwise_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(5);
    for &(op, f) in ELEMENTWISE {
        for (n, cols) in [(1, 1), (3, 17), (17, 48), (9, 5000)] {
            let (mut x, y) = (noise.values(n * cols, 20.0), noise.values(n * cols, 20.0));
            let odd = [
                -0.0, 0.0, 90.0, -90.0, 1e-30, -1e-30, 3e8, -3e8, 44.0, -44.0,
            ];
            x.iter_mut().rev().zip(odd).for_each(|(x, odd)| *x = odd);
            pair.compare(op, &format!("{n} rows of {cols}"), |b| {
                f(b, b.upload(n, cols, &x), &b.upload(n, cols, &y))
            });
        }
    }
    for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = [0.5; 40];
        x[33] = odd;
        let capped = got.softcap(got.upload(1, 40, &x), 30.0);
        let nan: Vec<bool> = got.download(&capped).iter().map(|y| y.is_nan()).collect();
        let want: Vec<bool> = (0..40).map(|i| i == 33).collect();
        assert_eq!(nan, want, "softcap of {odd}");
    }
}

fn moves_equal(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(6);
    for (n, cols) in [(1, 1), (7, 19), (17, 64)] {
        let (x, y) = (
            noise.values(n * cols, 1.0),
            noise.values(n * (cols + 3), 1.0),
        );
        let case = format!("{n} rows of {cols}");
        pair.compare("upload", &case, |b| b.upload(n, cols, &x));
        let rows: Vec<usize> = (0..2 * n).map(|_| noise.below(n)).collect();
        pair.compare("gather", &format!("{case}, rows {rows:?}"), |b| {
            b.gather(&b.upload(n, cols, &x), &rows)
        });
        for range in [0..cols, cols / 2..cols, cols / 3..cols / 3 + 1, cols..cols] {
            pair.compare("columns", &format!("{case}, columns {range:?}"), |b| {
                b.columns(&b.upload(n, cols, &x), range.start, range.len())
            });
        }
        pair.compare("concat", &case, |b| {
            b.concat(&b.upload(n, cols, &x), &b.upload(n, cols + 3, &y))
        });
    }
}

fn rope_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(7);
    for (head_dim, pair_offset, pairs) in [
        (2, 1, 1),
        (16, 8, 8),
        (24, 12, 5),
        (64, 8, 8),
        (128, 64, 64),
        (512, 256, 128),
    ] {
        let frequencies = (0..pairs)
            .map(|j| 1e4f32.powf(-2.0 * j as f32 / head_dim as f32))
            .collect();
        let rope = Rope {
            head_dim,
            pair_offset,
            frequencies,
        };
        for (n, heads) in [(1, 3), (5, 1), (40, 4)] {
            let x = noise.values(n * heads * head_dim, 4.0);
            let rows: Vec<Row> = (0..n)
                .map(|i| Row {
                    index: i as u32,
                    position: noise.below(200_000) as u32 * (i as u32 % 3),
                })
                .collect();
            let batch = Batch {
                rows,
                ..Batch::default()
            };
            let case = format!(
                "{n} rows of {heads} heads of {head_dim}, {pairs} pairs {pair_offset} apart"
            );
            pair.compare("rope", &case, |b| {
                b.rope(b.upload(n, heads * head_dim, &x), &rope, &batch)
            });
        }
    }
}

/// Sequences with pages, as `cache` would keep them.
struct Sequences {
    lens: Vec<usize>,
    tables: Vec<Vec<u32>>,
    free: Vec<u32>,
}

impl Sequences {
    fn new(noise: &mut Noise, n: usize, pages: usize) -> Self {
        let mut free: Vec<u32> = (0..pages as u32).collect();
        (1..pages).for_each(|i| free.swap(i, noise.below(i + 1)));
        Sequences {
            lens: vec![0; n],
            tables: vec![Vec::new(); n],
            free,
        }
    }

    /// A step of `rows[s]` more rows for each sequence `s`; pages that `window`
    /// has left are gone.
    fn step(&mut self, rows: &[usize], window: Option<usize>) -> Batch {
        let mut batch = Batch::default();
        for (s, &n) in rows.iter().enumerate().filter(|(_, n)| **n > 0) {
            let (old, len) = (self.lens[s], self.lens[s] + n);
            let table = &mut self.tables[s];
            while table.len() * PAGE_ROWS < len {
                table.push(self.free.pop().expect("pages enough for the case"));
            }
            if let Some(window) = window {
                let gone = (old + 1).saturating_sub(window) / PAGE_ROWS;
                table[..gone].fill(NO_PAGE);
            }
            let first = batch.n_rows();
            batch.rows.extend((old..len).map(|i| Row {
                index: i as u32,
                position: i as u32,
            }));
            let tables = batch.tables.len()..batch.tables.len() + table.len();
            batch.tables.extend_from_slice(table);
            batch.seqs.push(BatchSeq {
                rows: first..first + n,
                slot: s,
                is_new: old == 0,
                kept: 0,
                certain: n,
                tables: vec![tables],
            });
            self.lens[s] = len;
        }
        batch
    }
}

/// A shape of attention.
struct AttendCase {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
    k: &'static Format,
    v: &'static Format,
    /// Rows of each sequence, step by step.
    steps: &'static [&'static [usize]],
}

/// Lengths that cross tiles and splits, with rows enough to fill any block.
const LONG: &[&[usize]] = &[
    &[PAGE_ROWS - 1, SPLIT_ROWS + 3],
    &[1, 1],
    &[4, 7],
    &[17, 1],
    &[1, SPLIT_ROWS + 40],
    &[3, 2],
];
const SHORT: &[&[usize]] = &[
    &[1, 0, 3],
    &[1, 70, 0],
    &[5, 3, 17],
    &[2, 1, 1],
    &[40, 0, 100],
    &[1, 1, 1],
];

fn attend_cases() -> Vec<AttendCase> {
    let named = |name| quant::cache_format(name).expect("a format that exists");
    vec![
        AttendCase {
            heads: 1,
            kv_heads: 1,
            head_dim: 16,
            window: None,
            k: &F32,
            v: &F32,
            steps: LONG,
        },
        AttendCase {
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            window: None,
            k: &BF16,
            v: &BF16,
            steps: SHORT,
        },
        AttendCase {
            heads: 4,
            kv_heads: 1,
            head_dim: 16,
            window: Some(100),
            k: &F16,
            v: &F16,
            steps: LONG,
        },
        AttendCase {
            heads: 8,
            kv_heads: 1,
            head_dim: 24,
            window: Some(7),
            k: &BF16,
            v: &BF16,
            steps: SHORT,
        },
        AttendCase {
            heads: 2,
            kv_heads: 1,
            head_dim: 20,
            window: Some(SPLIT_ROWS + 5),
            k: &F32,
            v: &F32,
            steps: LONG,
        },
        AttendCase {
            heads: 3,
            kv_heads: 3,
            head_dim: 128,
            window: None,
            k: &F16,
            v: &F16,
            steps: SHORT,
        },
        AttendCase {
            heads: 2,
            kv_heads: 1,
            head_dim: 256,
            window: Some(64),
            k: &BF16,
            v: &BF16,
            steps: SHORT,
        },
        AttendCase {
            heads: 2,
            kv_heads: 2,
            head_dim: 512,
            window: None,
            k: &F32,
            v: &F32,
            steps: &[&[5, 70], &[1, 3]],
        },
        AttendCase {
            heads: 4,
            kv_heads: 1,
            head_dim: 64,
            window: None,
            k: named("q8_0"),
            v: named("q4_0"),
            steps: LONG,
        },
        AttendCase {
            heads: 10,
            kv_heads: 2,
            head_dim: 32,
            window: Some(100),
            k: named("q4_0"),
            v: named("q8_0"),
            steps: SHORT,
        },
        AttendCase {
            heads: 2,
            kv_heads: 1,
            head_dim: 96,
            window: None,
            k: &BF16,
            v: named("q8_0"),
            steps: SHORT,
        },
        // A format that a device may keep any way it likes.
        AttendCase {
            heads: 2,
            kv_heads: 1,
            head_dim: 64,
            window: None,
            k: named("q5_1"),
            v: named("affine8-g64"),
            steps: SHORT,
        },
        // Values that are rotated, in groups of 64, 128 and both.
        AttendCase {
            heads: 4,
            kv_heads: 2,
            head_dim: 64,
            window: Some(100),
            k: named("q8_0"),
            v: named("turbo3"),
            steps: SHORT,
        },
        AttendCase {
            heads: 9,
            kv_heads: 1,
            head_dim: 192,
            window: None,
            k: &BF16,
            v: named("turbo4"),
            steps: SHORT,
        },
        AttendCase {
            heads: 2,
            kv_heads: 1,
            head_dim: 256,
            window: None,
            k: &F32,
            v: named("turbo3"),
            steps: LONG,
        },
    ]
}

impl AttendCase {
    fn name(&self) -> String {
        let AttendCase {
            heads,
            kv_heads,
            head_dim,
            window,
            ..
        } = self;
        format!(
            "{heads} heads on {kv_heads} of {head_dim} in {}, window {window:?}",
            self.format()
        )
    }

    fn attention(&self) -> Attention {
        Attention {
            group: 0,
            heads: self.heads,
            scale: (self.head_dim as f32).sqrt().recip(),
            window: self.window,
        }
    }

    fn format(&self) -> KvFormat {
        KvFormat {
            k: self.k,
            v: self.v,
        }
    }

    fn kv(&self, b: &dyn Backend, pages: usize) -> Kv {
        b.kv(KvSpec {
            pages,
            heads: self.kv_heads,
            head_dim: self.head_dim,
            format: self.format(),
        })
    }

    /// Appends `k` and `v` and attends with `q`, `[n, ..]` each.
    fn run(&self, b: &dyn Backend, kv: &mut Kv, batch: &Batch, [q, k, v]: [&[f32]; 3]) -> Tensor {
        let n = batch.n_rows();
        let (cols, kv_cols) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        b.kv_append(
            kv,
            &b.upload(n, kv_cols, k),
            &b.upload(n, kv_cols, v),
            0,
            batch,
        );
        b.attend(&b.upload(n, cols, q), kv, &self.attention(), batch)
    }
}

fn attend_equals(got: &dyn Backend, want: &dyn Backend) {
    /// Enough for the longest case without giving pages back.
    const PAGES: usize = 48;
    let pair = Pair { got, want };
    let mut noise = Noise(8);
    let kept = |case: &AttendCase| got.capabilities().kv.contains(case.format());
    for case in attend_cases().into_iter().filter(kept) {
        let mut sequences = Sequences::new(&mut noise, case.steps[0].len(), PAGES);
        let (mut kv, mut kv_want) = pair.each(|b| case.kv(b, PAGES));
        for rows in case.steps {
            let batch = sequences.step(rows, case.window);
            let n = batch.n_rows();
            let q = noise.values(n * case.heads * case.head_dim, 6.0);
            let k = noise.values(n * case.kv_heads * case.head_dim, 1.0);
            let v = noise.values(n * case.kv_heads * case.head_dim, 1.0);
            let name = format!(
                "{}, {rows:?} rows more to {:?}",
                case.name(),
                sequences.lens
            );
            let got = case.run(got, &mut kv, &batch, [&q, &k, &v]);
            let want = case.run(want, &mut kv_want, &batch, [&q, &k, &v]);
            pair.compare_tensors("attend", &name, &got, &want);
        }
        // Rows that append nothing, as a draft head's.
        let mut batch = sequences.step(&vec![1; sequences.lens.len()], case.window);
        for row in &mut batch.rows {
            row.index -= 1;
        }
        let q = noise.values(batch.n_rows() * case.heads * case.head_dim, 6.0);
        let attend = |b: &dyn Backend, kv: &Kv| {
            b.attend(
                &b.upload(batch.n_rows(), case.heads * case.head_dim, &q),
                kv,
                &case.attention(),
                &batch,
            )
        };
        let name = format!("{}, rows that append nothing", case.name());
        pair.compare_tensors("attend", &name, &attend(got, &kv), &attend(want, &kv_want));
    }
}

const DELTA: &[DeltaSpec] = &[
    DeltaSpec {
        slots: 3,
        key_heads: 2,
        value_heads: 4,
        key_dim: 16,
        value_dim: 24,
        conv_taps: 4,
    },
    DeltaSpec {
        slots: 3,
        key_heads: 1,
        value_heads: 1,
        key_dim: 20,
        value_dim: 16,
        conv_taps: 2,
    },
    DeltaSpec {
        slots: 3,
        key_heads: 2,
        value_heads: 2,
        key_dim: 24,
        value_dim: 80,
        conv_taps: 3,
    },
    DeltaSpec {
        slots: 3,
        key_heads: 1,
        value_heads: 3,
        key_dim: 64,
        value_dim: 128,
        conv_taps: 4,
    },
];

/// Inputs of a gated-delta layer, by row.
struct DeltaRows {
    channels: usize,
    heads: usize,
    qkv: Vec<f32>,
    b: Vec<f32>,
    a: Vec<f32>,
}

impl DeltaRows {
    fn new(noise: &mut Noise, spec: &DeltaSpec, n: usize) -> Self {
        let (channels, heads) = (spec.channels(), spec.value_heads);
        DeltaRows {
            channels,
            heads,
            qkv: noise.values(n * channels, 2.0),
            b: noise.values(n * heads, 4.0),
            a: noise.values(n * heads, 3.0),
        }
    }

    fn run(
        &self,
        b: &dyn Backend,
        state: &mut Delta,
        weights: &DeltaWeights,
        batch: &Batch,
        rows: &[Range<usize>],
    ) -> Tensor {
        let upload = |values: &[f32], cols: usize| {
            let picked: Vec<f32> = rows
                .iter()
                .flat_map(|r| &values[r.start * cols..r.end * cols])
                .copied()
                .collect();
            b.upload(batch.n_rows(), cols, &picked)
        };
        let (qkv, beta, a) = (
            upload(&self.qkv, self.channels),
            upload(&self.b, self.heads),
            upload(&self.a, self.heads),
        );
        b.gated_delta(state, weights, &qkv, &beta, &a, batch)
    }
}

fn delta_weights(noise: &mut Noise, spec: &DeltaSpec) -> impl Fn(&dyn Backend) -> DeltaWeights {
    let (channels, taps, heads) = (spec.channels(), spec.conv_taps, spec.value_heads);
    let conv = noise.values(channels * taps, 1.0);
    let decay: Vec<f32> = noise
        .values(heads, 1.0)
        .iter()
        .map(|d| -d.abs() - 0.01)
        .collect();
    let dt_bias = noise.values(heads, 1.0);
    move |b| DeltaWeights {
        conv: b.upload(channels, taps, &conv),
        decay: b.upload(1, heads, &decay),
        dt_bias: b.upload(1, heads, &dt_bias),
    }
}

/// One sequence's share of a step: slot, rows, of which certain, and how many
/// tentative rows of its last step stay; new if absent.
type DeltaShare = (usize, usize, usize, Option<usize>);

fn delta_batch(shares: &[DeltaShare]) -> Batch {
    let mut batch = Batch::default();
    for &(slot, n, certain, kept) in shares {
        let first = batch.n_rows();
        batch.rows.extend((0..n as u32).map(|i| Row {
            index: i,
            position: i,
        }));
        batch.seqs.push(BatchSeq {
            rows: first..first + n,
            slot,
            is_new: kept.is_none(),
            kept: kept.unwrap_or(0),
            certain,
            tables: Vec::new(),
        });
    }
    batch
}

fn gated_delta_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(9);
    for spec in DELTA {
        let weights = pair.each(delta_weights(&mut noise, spec));
        let (mut state, mut state_want) = pair.each(|b| b.delta(*spec));
        // Every number of kept rows of a full step, then odd mixtures.
        let mut steps: Vec<Vec<DeltaShare>> = vec![
            vec![(0, 5, 5, None), (2, 1, 0, None)],
            vec![(1, 2, 1, None)],
        ];
        steps.extend((0..=MAX_TENTATIVE).map(|kept| {
            let last = if kept == 0 { 0 } else { MAX_TENTATIVE };
            vec![(0, MAX_TENTATIVE, 0, Some(kept.min(last)))]
        }));
        steps.extend([
            vec![(1, 1, 1, Some(1)), (2, 4, 1, Some(0))],
            vec![(2, 3, 2, Some(3)), (0, 40, 33, Some(9))],
            vec![(0, 1, 1, Some(7)), (1, 1, 0, Some(0)), (2, 17, 1, Some(1))],
            vec![(1, 3, 0, None), (0, 2, 2, Some(0)), (2, 1, 1, Some(16))],
            vec![(1, 1, 1, Some(2))],
        ]);
        let n_steps = steps.len();
        // Slot 1 as it is then goes on in slot 0, and in itself.
        steps.push(vec![(0, 3, 1, Some(0)), (1, 2, 2, Some(0))]);
        steps.push(vec![(1, 1, 1, Some(0)), (0, 1, 0, Some(1))]);
        for (i, shares) in steps.iter().enumerate() {
            if i == n_steps {
                pair.got.delta_copy(&mut state, 1, 0);
                pair.want.delta_copy(&mut state_want, 1, 0);
            }
            let batch = delta_batch(shares);
            let rows = DeltaRows::new(&mut noise, spec, batch.n_rows());
            let all = 0..batch.n_rows();
            let all = std::slice::from_ref(&all);
            let case = format!("{spec:?}, (slot, rows, certain, kept) {shares:?}");
            let got = rows.run(got, &mut state, &weights.0, &batch, all);
            let want = rows.run(want, &mut state_want, &weights.1, &batch, all);
            pair.compare_tensors("gated_delta", &case, &got, &want);
        }
    }
}

/// A shape of experts.
struct MoeCase {
    count: usize,
    top_k: usize,
    hidden: usize,
    inner: usize,
    format: &'static Format,
    activation: Activation,
    is_scaled: bool,
}

fn moe_cases() -> Vec<MoeCase> {
    let affine = |bits, group| quant::affine(bits, group).expect("a format that exists");
    vec![
        MoeCase {
            count: 5,
            top_k: 2,
            hidden: 24,
            inner: 20,
            format: &BF16,
            activation: Activation::GeluTanh,
            is_scaled: true,
        },
        MoeCase {
            count: 8,
            top_k: 3,
            hidden: 128,
            inner: 64,
            format: affine(4, 64),
            activation: Activation::Silu,
            is_scaled: false,
        },
        MoeCase {
            count: 3,
            top_k: 3,
            hidden: 64,
            inner: 160,
            format: affine(8, 32),
            activation: Activation::Silu,
            is_scaled: true,
        },
        MoeCase {
            count: 40,
            top_k: 1,
            hidden: 33,
            inner: 17,
            format: &F32,
            activation: Activation::GeluTanh,
            is_scaled: false,
        },
    ]
}

impl MoeCase {
    fn name(&self, n: usize) -> String {
        format!(
            "{n} rows, {} of {} experts, {} x {} in {}",
            self.top_k, self.count, self.hidden, self.inner, self.format.name
        )
    }

    fn load(&self, noise: &mut Noise) -> impl Fn(&dyn Backend) -> Experts {
        let (hidden, inner) = (self.hidden, self.inner);
        let weights: Vec<[Owned; 2]> = (0..self.count)
            .map(|_| {
                [
                    stored(noise, self.format, 2 * inner, hidden),
                    stored(noise, self.format, hidden, inner),
                ]
            })
            .collect();
        let scale = self.is_scaled.then(|| noise.values(self.count, 1.0));
        let (top_k, activation) = (self.top_k, self.activation);
        move |b| Experts {
            experts: weights
                .iter()
                .map(|[gate_up, down]| Expert {
                    gate_up: b.matrix(&[gate_up.view()]),
                    down: b.matrix(&[down.view()]),
                })
                .collect(),
            top_k,
            scale: scale.clone(),
            activation,
        }
    }

    /// Scores of `n` rows; some rows like several experts equally.
    fn scores(&self, noise: &mut Noise, n: usize) -> Vec<f32> {
        let mut scores = noise.values(n * self.count, 4.0);
        for row in scores.chunks_exact_mut(self.count).step_by(3) {
            row.iter_mut().for_each(|s| *s = s.round());
        }
        scores
    }
}

fn moe_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(17);
    for case in moe_cases() {
        let experts = pair.each(case.load(&mut noise));
        for n in [1, 2, 4, 9, 70] {
            let x = noise.values(n * case.hidden, 2.0);
            let scores = case.scores(&mut noise, n);
            let run = |b: &dyn Backend, experts: &Experts| {
                b.moe(
                    &b.upload(n, case.hidden, &x),
                    &b.upload(n, case.count, &scores),
                    experts,
                )
            };
            pair.compare_tensors(
                "moe",
                &case.name(n),
                &run(got, &experts.0),
                &run(want, &experts.1),
            );
            let gate = noise.values(n, 8.0);
            for activation in [Activation::Sigmoid, case.activation] {
                let name = format!("{n} rows of {}, {activation:?}", case.hidden);
                pair.compare("gate_rows", &name, |b| {
                    let x = b.upload(n, case.hidden, &x);
                    b.gate_rows(&x, &b.upload(n, 1, &gate), activation)
                });
            }
        }
    }
}

/// Rows of logits, some of them with equal values and such that are not numbers.
fn odd_logits(noise: &mut Noise) -> Vec<Vec<f32>> {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let mut rows: Vec<Vec<f32>> = vec![
        vec![1.0],
        vec![-inf; 40],
        vec![-0.0, 0.0, -0.0],
        vec![0.0, -0.0],
        vec![nan, 1.0, 2.0],
        vec![1.0, nan, 2.0, nan, 2.0],
        vec![-1.0, inf, inf],
        [vec![0.0; 1000], vec![1.0; 1000]].concat(),
    ];
    for n in [5, 16, 33, 300, 70_001] {
        let mut row = noise.values(n, 1.0);
        rows.push(row.clone());
        // The largest value several times, the first of them anywhere.
        for _ in 0..3 {
            row[noise.below(n)] = 2.0;
        }
        rows.push(row);
    }
    rows
}

fn argmax_equals(got: &dyn Backend, want: &dyn Backend) {
    let mut noise = Noise(10);
    let mut rows = odd_logits(&mut noise);
    // Rows that give no token, wherever the reason is.
    for n in [1, 5, 16, 33, 300, 2049, 70_001] {
        rows.push(vec![f32::NEG_INFINITY; n]);
        for value in [f32::NAN, -f32::NAN, f32::INFINITY] {
            for at in [0, n - 1, noise.below(n)] {
                let mut row = noise.values(n, 1.0);
                row[at] = value;
                rows.push(row);
            }
        }
    }
    for row in rows {
        let values = [row.clone(), row.iter().rev().copied().collect()].concat();
        let run = |b: &dyn Backend| b.argmax(&b.upload(2, row.len(), &values));
        assert_eq!(
            run(got),
            run(want),
            "argmax of {} values from {:?} on",
            row.len(),
            &row[..row.len().min(5)]
        );
    }
}

fn likeliest_equals(got: &dyn Backend, want: &dyn Backend) {
    let mut noise = Noise(19);
    for row in odd_logits(&mut noise) {
        let m = row.len();
        // Far apart, so that many of them weigh nothing.
        let apart = row.iter().rev().map(|x| x * 30.0);
        let values: Vec<f32> = row.iter().copied().chain(apart).collect();
        let mut any = || noise.below(m) as u32;
        let asked = [(1, 0), (0, m as u32 - 1), (1, any()), (0, any())];
        for n in [0, 1, 3, 20] {
            let run = |b: &dyn Backend| b.likeliest(&b.upload(2, m, &values), &asked, n);
            assert_eq!(
                run(got),
                run(want),
                "likeliest {n} of {m} values from {:?} on",
                &row[..m.min(5)]
            );
        }
    }
}

/// Ways to cut `n` rows into steps.
fn cuts(n: usize) -> Vec<Vec<Range<usize>>> {
    [1, 2, 3, 5, 8, 16]
        .into_iter()
        .filter(|&size| size < n)
        .map(|size| {
            (0..n)
                .step_by(size)
                .map(|first| first..(first + size).min(n))
                .collect()
        })
        .collect()
}

/// Compares `f` of all rows with `f` of the rows in every cut.
fn independent(
    op: &str,
    case: &str,
    b: &dyn Backend,
    n: usize,
    f: impl Fn(Range<usize>) -> Tensor,
) {
    let together = f(0..n);
    let cols = together.cols();
    let together = b.download(&together);
    for cut in cuts(n) {
        for rows in cut {
            let apart = f(rows.clone());
            let case = format!("{case}, rows {rows:?} of {n} apart");
            same(
                op,
                &case,
                cols,
                &b.download(&apart),
                &together[rows.start * cols..rows.end * cols],
            );
        }
    }
}

fn matmul_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(11);
    for format in formats() {
        for (rows, cols) in [(50, 100), (40, 600), (300, 70)] {
            let cols = width(format, cols);
            let w = b.matrix(&[stored(&mut noise, format, rows, cols).view()]);
            let n = 21;
            let x = noise.values(n * cols, 2.0);
            let case = format!("{} [{rows}, {cols}]", format.name);
            independent("matmul", &case, b, n, |r| {
                b.matmul(
                    &b.upload(r.len(), cols, &x[r.start * cols..r.end * cols]),
                    &w,
                )
            });
            // Chosen rows are those of the whole product.
            let y = b.matmul(&b.upload(n, cols, &x), &w);
            let ids: Vec<Vec<u32>> = (0..n)
                .map(|_| (0..20).map(|_| noise.below(rows) as u32).collect())
                .collect();
            let some = b.matmul_rows(&b.upload(n, cols, &x), &w, &ids);
            let all = b.download(&y);
            let picked: Vec<f32> = ids
                .iter()
                .enumerate()
                .flat_map(|(r, ids)| ids.iter().map(move |&id| r * rows + id as usize))
                .map(|i| all[i])
                .collect();
            same("matmul_rows", &case, 20, &b.download(&some), &picked);
        }
    }
}

fn rms_norm_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(12);
    let (n, cols) = (41, 960);
    let x = noise.values(n * cols, 2.0);
    for width in [24, 960] {
        independent("rms_norm", &format!("runs of {width}"), b, n, |r| {
            b.rms_norm(
                &b.upload(r.len(), cols, &x[r.start * cols..r.end * cols]),
                None,
                width,
                1e-6,
            )
        });
    }
}

fn elementwise_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(13);
    let (n, cols) = (41, 1001);
    let (x, y) = (noise.values(n * cols, 20.0), noise.values(n * cols, 20.0));
    for &(op, f) in ELEMENTWISE {
        independent(op, "", b, n, |r| {
            let part =
                |values: &[f32]| b.upload(r.len(), cols, &values[r.start * cols..r.end * cols]);
            f(b, part(&x), &part(&y))
        });
    }
}

fn rope_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(14);
    let rope = Rope {
        head_dim: 48,
        pair_offset: 24,
        frequencies: (0..20).map(|j| 0.7f32.powi(j)).collect(),
    };
    let (n, cols) = (41, 96);
    let x = noise.values(n * cols, 2.0);
    independent("rope", "", b, n, |r| {
        let rows = r
            .clone()
            .map(|i| Row {
                index: i as u32,
                position: 1000 * i as u32,
            })
            .collect();
        let batch = Batch {
            rows,
            ..Batch::default()
        };
        b.rope(
            b.upload(r.len(), cols, &x[r.start * cols..r.end * cols]),
            &rope,
            &batch,
        )
    });
}

fn attend_rows_are_independent(b: &dyn Backend) {
    const PAGES: usize = 40;
    let mut noise = Noise(15);
    let kept = |case: &AttendCase| b.capabilities().kv.contains(case.format());
    for case in attend_cases().into_iter().filter(kept) {
        // Two sequences share steps; the second is cut in other places.
        let (n, m) = if case.steps == LONG {
            (SPLIT_ROWS + 30, 90)
        } else {
            (150, 60)
        };
        let (cols, kv_cols) = (case.heads * case.head_dim, case.kv_heads * case.head_dim);
        let q = noise.values((n + m) * cols, 6.0);
        let (k, v) = (
            noise.values((n + m) * kv_cols, 1.0),
            noise.values((n + m) * kv_cols, 1.0),
        );
        let mut run = |steps: &mut dyn FnMut(usize) -> usize| -> Vec<f32> {
            let mut sequences = Sequences::new(&mut noise, 2, PAGES);
            let mut kv = case.kv(b, PAGES);
            let mut out = vec![0.0; (n + m) * cols];
            while sequences.lens != [n, m] {
                let old = sequences.lens.clone();
                let rows = [steps(0).min(n - old[0]), steps(1).min(m - old[1])];
                let batch = sequences.step(&rows, case.window);
                let parts = [old[0]..old[0] + rows[0], n + old[1]..n + old[1] + rows[1]];
                let pick = |from: &[f32], cols: usize| -> Vec<f32> {
                    parts
                        .iter()
                        .flat_map(|p| &from[p.start * cols..p.end * cols])
                        .copied()
                        .collect()
                };
                let y = case.run(
                    b,
                    &mut kv,
                    &batch,
                    [&pick(&q, cols), &pick(&k, kv_cols), &pick(&v, kv_cols)],
                );
                let y = b.download(&y);
                let mut rest = &y[..];
                for part in parts {
                    let (mine, other) = rest.split_at(part.len() * cols);
                    out[part.start * cols..part.end * cols].copy_from_slice(mine);
                    rest = other;
                }
            }
            out
        };
        let together = run(&mut |_| n);
        let mut turn = 0;
        let apart = run(&mut |s| {
            turn += 1;
            [1, 2, 4, 8, 16, 33, 64, 1, 5][turn % 9] * if s == 0 { 1 } else { turn / 2 % 2 }
        });
        same(
            "attend",
            &format!("{}, prefill in steps", case.name()),
            cols,
            &apart,
            &together,
        );
    }
}

fn gated_delta_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(16);
    for spec in DELTA {
        let weights = delta_weights(&mut noise, spec)(b);
        let n = 60;
        let cols = spec.value_heads * spec.value_dim;
        let rows = DeltaRows::new(&mut noise, spec, n);
        let mut state = b.delta(*spec);
        let all = 0..n;
        let all = std::slice::from_ref(&all);
        let together = rows.run(
            b,
            &mut state,
            &weights,
            &delta_batch(&[(1, n, n, None)]),
            all,
        );
        let together = b.download(&together);
        for (certain, tentative) in [
            (1, 0),
            (3, 0),
            (0, 1),
            (0, 4),
            (1, 3),
            (1, MAX_TENTATIVE),
            (7, 5),
        ] {
            // Some rows of every step are taken back and come again, next to
            // another sequence's.
            let mut done = 0;
            let mut kept = None;
            while done < n {
                let certain = certain.min(n - done);
                let step = (certain + tentative).min(n - done);
                let other = (0, 2, 1, None);
                let batch = delta_batch(&[(2, step, certain, kept), other]);
                let y = rows.run(b, &mut state, &weights, &batch, &[done..done + step, 0..2]);
                let case = format!(
                    "{spec:?}, {certain} certain of rows {done}..{}",
                    done + step
                );
                let want = &together[done * cols..(done + step) * cols];
                same(
                    "gated_delta",
                    &case,
                    cols,
                    &b.download(&y)[..step * cols],
                    want,
                );
                let stay = if done + step == n {
                    step - certain
                } else {
                    noise.below(step - certain + 1)
                };
                // A step must make way.
                let stay = if certain + stay == 0 {
                    step - certain
                } else {
                    stay
                };
                kept = Some(stay);
                done += certain + stay;
            }
        }
    }
}

fn moe_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(18);
    for case in moe_cases() {
        let experts = case.load(&mut noise)(b);
        let n = 37;
        let x = noise.values(n * case.hidden, 2.0);
        let scores = case.scores(&mut noise, n);
        independent("moe", &case.name(n), b, n, |r| {
            let part = |values: &[f32], cols: usize| {
                b.upload(r.len(), cols, &values[r.start * cols..r.end * cols])
            };
            b.moe(&part(&x, case.hidden), &part(&scores, case.count), &experts)
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DeviceError, Ops, Record, Sample, Store};
    use quant::Stored;
    use std::borrow::Cow;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    /// What [`Broken`] gets wrong.
    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Fault {
        None,
        Embed,
        Matmul,
        MatmulRows,
        RmsNorm,
        Add,
        Scale,
        Glu,
        Softcap,
        Gather,
        Columns,
        Concat,
        Rope,
        Append,
        Attend,
        GatedDelta,
        /// Forgets that rows were taken back.
        Kept,
        DeltaCopy,
        Moe,
        GateRows,
        Argmax,
        Likeliest,
    }

    /// The reference with one wrong op: a value moves by one bit, in one row of
    /// several only.
    struct Broken(Fault);

    impl Broken {
        fn nudge(&self, fault: Fault, mut x: Tensor) -> Tensor {
            if self.0 == fault
                && x.rows() > 1
                && let Some(x) = x.storage_mut::<Vec<f32>>().last_mut()
            {
                *x = f32::from_bits(x.to_bits() ^ 1);
            }
            x
        }
    }

    impl Backend for Broken {
        fn name(&self) -> String {
            format!("reference without {:?}", self.0)
        }
    }

    impl Store for Broken {
        fn matrix(&self, parts: &[Stored<'_>]) -> Matrix {
            Reference.matrix(parts)
        }
        fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Tensor {
            Reference.upload(rows, cols, values)
        }
        fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
            Reference.download(x)
        }
        fn kv(&self, spec: KvSpec) -> Kv {
            Reference.kv(spec)
        }
        fn delta(&self, spec: DeltaSpec) -> Delta {
            Reference.delta(spec)
        }
        fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize) {
            if self.0 != Fault::DeltaCopy {
                Reference.delta_copy(delta, from, to);
            }
        }
        fn scratch(&self, rows: usize, cols: usize) -> Tensor {
            Reference.scratch(rows, cols)
        }
    }

    impl Ops for Broken {
        fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
            self.nudge(Fault::Embed, Reference.embed(table, tokens, scale))
        }
        fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
            Reference.matmul_into(x, w, y);
            if self.0 == Fault::Matmul && x.rows() > 1 {
                let y = &mut y[0].storage_mut::<Vec<f32>>()[0];
                *y = f32::from_bits(y.to_bits() ^ 1);
            }
        }
        fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
            self.nudge(Fault::MatmulRows, Reference.matmul_rows(x, w, ids))
        }
        fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor {
            self.nudge(Fault::RmsNorm, Reference.rms_norm(x, weight, width, eps))
        }
        fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
            self.nudge(Fault::Add, Reference.add(x, y))
        }
        fn scale(&self, x: Tensor, factor: f32) -> Tensor {
            self.nudge(Fault::Scale, Reference.scale(x, factor))
        }
        fn glu(&self, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
            self.nudge(Fault::Glu, Reference.glu(gate, x, activation))
        }
        fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
            self.nudge(Fault::Softcap, Reference.softcap(x, cap))
        }
        fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
            self.nudge(Fault::Gather, Reference.gather(x, rows))
        }
        fn columns(&self, x: &Tensor, first: usize, cols: usize) -> Tensor {
            self.nudge(Fault::Columns, Reference.columns(x, first, cols))
        }
        fn concat(&self, a: &Tensor, b: &Tensor) -> Tensor {
            self.nudge(Fault::Concat, Reference.concat(a, b))
        }
        fn rope(&self, x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
            self.nudge(Fault::Rope, Reference.rope(x, rope, batch))
        }
        fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch) {
            let mut batch = batch.clone();
            if self.0 == Fault::Append && batch.n_rows() > 1 {
                let first = batch.seqs[0].rows.start;
                batch.rows[first].index += 1;
            }
            Reference.kv_append(kv, k, v, group, &batch);
        }
        fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor {
            self.nudge(Fault::Attend, Reference.attend(q, kv, attention, batch))
        }
        fn gated_delta(
            &self,
            state: &mut Delta,
            weights: &DeltaWeights,
            qkv: &Tensor,
            b: &Tensor,
            a: &Tensor,
            batch: &Batch,
        ) -> Tensor {
            let mut batch = batch.clone();
            if self.0 == Fault::Kept {
                // Too few rows stay, once there is a choice.
                batch
                    .seqs
                    .iter_mut()
                    .filter(|s| s.kept > 3)
                    .for_each(|s| s.kept -= 1);
            }
            self.nudge(
                Fault::GatedDelta,
                Reference.gated_delta(state, weights, qkv, b, a, &batch),
            )
        }
        fn moe(&self, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
            self.nudge(Fault::Moe, Reference.moe(x, scores, experts))
        }
        fn gate_rows(&self, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
            self.nudge(Fault::GateRows, Reference.gate_rows(x, gate, activation))
        }
    }

    impl Sample for Broken {
        fn argmax(&self, x: &Tensor) -> Vec<u32> {
            let mut best = Reference.argmax(x);
            if self.0 == Fault::Argmax {
                // The last of equal ones.
                let values = Reference.download(x);
                let rows = best.iter_mut().zip(values.chunks_exact(x.cols()));
                for (best, row) in rows.filter(|(best, _)| **best != crate::NO_TOKEN) {
                    let largest = row[*best as usize];
                    *best = row
                        .iter()
                        .rposition(|&x| x == largest)
                        .map_or(*best, |i| i as u32);
                }
            }
            best
        }
        fn likeliest(&self, x: &Tensor, asked: &[(usize, u32)], n: usize) -> Vec<crate::Likeliest> {
            let mut all = Reference.likeliest(x, asked, n);
            if self.0 == Fault::Likeliest {
                all[0].mass += 1;
            }
            all
        }
    }

    impl Record for Broken {
        fn finish(&self) -> Result<(), DeviceError> {
            Ok(())
        }
    }

    fn failure(f: impl FnOnce()) -> Option<String> {
        let panic = catch_unwind(AssertUnwindSafe(f)).err()?;
        Some(panic.downcast_ref::<String>().cloned().unwrap_or_default())
    }

    #[test]
    fn the_reference_passes_its_own_cases() {
        check(&Broken(Fault::None));
    }

    #[test]
    fn one_wrong_bit_in_any_op_fails() {
        use Fault::*;
        let faults = [
            (Embed, "embed", "embed ("),
            (Matmul, "matmul", "matmul ("),
            (MatmulRows, "matmul_rows", "matmul_rows ("),
            (RmsNorm, "rms_norm", "rms_norm ("),
            (Add, "elementwise", "add ("),
            (Scale, "elementwise", "scale ("),
            (Glu, "elementwise", "glu silu ("),
            (Softcap, "elementwise", "softcap ("),
            (Gather, "moves", "gather ("),
            (Columns, "moves", "columns ("),
            (Concat, "moves", "concat ("),
            (Rope, "rope", "rope ("),
            (Append, "attend", "attend ("),
            (Attend, "attend", "attend ("),
            (GatedDelta, "gated_delta", "gated_delta ("),
            (Kept, "gated_delta", "gated_delta ("),
            (DeltaCopy, "gated_delta", "gated_delta ("),
            (Moe, "moe", "moe ("),
            (GateRows, "moe", "gate_rows ("),
            (Argmax, "argmax", "argmax"),
            (Likeliest, "likeliest", "likeliest"),
        ];
        for (fault, case, op) in faults {
            let cases = EQUAL_CASES.iter().filter(|(name, _)| *name == case);
            let message = failure(|| cases.for_each(|(_, case)| case(&Broken(fault), &Reference)));
            assert!(
                message.as_ref().is_some_and(|m| m.contains(op)),
                "{fault:?}: {message:?}"
            );
        }
    }

    #[test]
    fn a_row_that_depends_on_its_company_fails() {
        use Fault::*;
        for (fault, case, op) in [
            (Matmul, "matmul", "matmul ("),
            (RmsNorm, "rms_norm", "rms_norm ("),
            (Softcap, "elementwise", "softcap ("),
            (Rope, "rope", "rope ("),
            (Append, "attend", "attend ("),
            (Attend, "attend", "attend ("),
            (GatedDelta, "gated_delta", "gated_delta ("),
            (Kept, "gated_delta", "gated_delta ("),
            (Moe, "moe", "moe ("),
        ] {
            let cases = INVARIANCE_CASES.iter().filter(|(name, _)| *name == case);
            let message = failure(|| cases.for_each(|(_, case)| case(&Broken(fault))));
            assert!(
                message.as_ref().is_some_and(|m| m.contains(op)),
                "{fault:?}: {message:?}"
            );
        }
    }
}
