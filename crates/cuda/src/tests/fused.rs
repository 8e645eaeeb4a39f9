//! Fused ops have the bits of their parts.

use super::attention::{AttentionCase, format_of};
use super::experts::{experts, matrix, mixture};
use super::{fp8, fp8_noise, gpu, gpu_with, noise};
use crate::driver::Driver;
use crate::elementwise::MANY_ROWS;
use crate::tuning::Tunings;
use crate::{Cuda, DryRun};
use backend::{
    Activation, Backend, Batch, BatchSeq, Experts, KvSpec, Matrix, Ops, Position, Record, Rope,
    Row, Store, Tensor,
};
use quant::{Format, Scalar};

/// Launches what makes `x` if ops are to be `alone`: what the host looks at is fused with nothing
/// that follows.
fn tell(cuda: &Cuda, alone: bool, x: &Tensor) {
    if alone {
        cuda.download(x);
    }
}

fn same(cuda: &Cuda, what: &str, a: &Tensor, b: &Tensor) {
    assert_eq!(cuda.download(a), cuda.download(b), "{what}");
}

#[test]
fn gpu_fused_sums_have_the_bits_of_their_parts() {
    let Some(cuda) = gpu() else { return };
    for (n, cols) in [(1, 64), (3, 640), (3, 5376), (5, 5376)] {
        let up = |seed| cuda.upload(n, cols, &noise(seed, n * cols));
        let weight = |seed| cuda.upload(1, cols, &noise(seed, cols));
        let (post, next) = (weight(3), weight(4));
        for (post, factor) in [(Some(&post), 0.7), (None, 1.0)] {
            let sum = |alone| {
                let mut y = up(2);
                if let Some(w) = post {
                    y = cuda.rms_norm(&y, Some(w), cols, 1e-6);
                    tell(&cuda, alone, &y);
                }
                let x = cuda.add(y, &up(1));
                tell(&cuda, alone, &x);
                let x = cuda.scale(x, factor);
                tell(&cuda, alone, &x);
                let h = cuda.rms_norm(&x, Some(&next), cols, 1e-6);
                tell(&cuda, alone, &h);
                [x, h]
            };
            let ([x, h], [want_x, want]) = (sum(false), sum(true));
            same(&cuda, "the sum", &x, &want_x);
            same(&cuda, "its norm", &h, &want);
            let w = quant::encode(&quant::BF16, &noise(5, 32 * cols), cols, Scalar::F32);
            let b: &dyn Backend = &cuda;
            let w = cuda.matrix(&[w.view()]);
            let [_x, h] = sum(false);
            same(&cuda, "a product", &b.matmul(&h, &w), &b.matmul(&want, &w));
        }
    }
    cuda.finish().unwrap();
}

#[test]
fn gpu_fused_mixtures_have_the_bits_of_their_parts() {
    let Some(cuda) = gpu() else { return };
    for n in [1, 3, 40] {
        let up = |seed, cols| cuda.upload(n, cols, &noise(seed, n * cols));
        let next = cuda.upload(1, 128, &noise(4, 128));
        let sum = |alone: bool| {
            let routed = mixture(&cuda, &quant::BF16, n);
            tell(&cuda, alone, &routed);
            let gated = cuda.gate_rows(&up(5, 128), &up(6, 1), Activation::Sigmoid);
            tell(&cuda, alone, &gated);
            let y = cuda.add(routed, &gated);
            tell(&cuda, alone, &y);
            let x = cuda.add(up(1, 128), &y);
            tell(&cuda, alone, &x);
            let h = cuda.rms_norm(&x, Some(&next), 128, 1e-6);
            [x, h]
        };
        for (i, (a, b)) in sum(false).iter().zip(&sum(true)).enumerate() {
            same(
                &cuda,
                &format!("tensor {i} of a mixture and its norm"),
                a,
                b,
            );
        }
    }
    cuda.finish().unwrap();
}

/// Experts and matrices that read a norm in f32, as f16 and rotated: what they do not read is not stored.
#[test]
fn gpu_products_of_norms_have_the_bits_of_their_parts() {
    let Some(cuda) = gpu() else { return };
    let b: &dyn Backend = &cuda;
    for format in ["f32", "bf16", "tq4_1s"].map(|name| quant::format(name).unwrap()) {
        let experts = experts(&cuda, format, 128, 64);
        let w = matrix(&cuda, format, 3, [96, 128]);
        for n in [1, 3, 40, 300] {
            let up = |seed, cols| cuda.upload(n, cols, &noise(seed, n * cols));
            let weight = cuda.upload(1, 128, &noise(4, 128));
            let made = |alone| {
                let h = cuda.rms_norm(&up(1, 128), Some(&weight), 128, 1e-6);
                tell(&cuda, alone, &h);
                let routed = cuda.moe(&h, &up(2, 9), &experts);
                tell(&cuda, alone, &routed);
                let h = cuda.rms_norm(&routed, Some(&weight), 128, 1e-6);
                tell(&cuda, alone, &h);
                [routed, b.matmul(&h, &w)]
            };
            for (what, (a, b)) in ["experts", "a matrix"]
                .iter()
                .zip(made(false).iter().zip(&made(true)))
            {
                same(
                    &cuda,
                    &format!("{n} rows of {what} in {}", format.name),
                    a,
                    b,
                );
            }
        }
    }
    cuda.finish().unwrap();
}

#[test]
fn gpu_fused_rotations_have_the_bits_of_their_parts() {
    let Some(cuda) = gpu() else { return };
    for (head_dim, pair_offset, pairs) in [(64, 32, 32), (256, 32, 32), (512, 256, 64)] {
        let rope = Rope {
            head_dim,
            pair_offset,
            frequencies: noise(6, pairs),
            axes: Vec::new(),
        };
        let (n, cols) = (3, 5 * head_dim);
        let x = cuda.upload(n, cols, &noise(7, n * cols));
        let weight = cuda.upload(1, head_dim, &noise(8, head_dim));
        let row = |i| Row {
            position: Position::text(1000 * i),
            ..Row::text(i)
        };
        let batch = Batch {
            rows: (0..3).map(row).collect(),
            ..Batch::default()
        };
        let turned = |alone| {
            let y = cuda.rms_norm(&x, Some(&weight), head_dim, 1e-6);
            tell(&cuda, alone, &y);
            cuda.rope(y, &rope, &batch)
        };
        same(&cuda, "norm and rope", &turned(false), &turned(true));
    }
    cuda.finish().unwrap();
}

/// Keys and values that are stored by the kernel that makes them, and by one of their own.
#[test]
fn gpu_fused_heads_are_stored_with_the_bits_of_their_parts() {
    let whole = |head_dim| (head_dim, head_dim / 2, head_dim / 2);
    assert_fused_heads(&[
        (whole(64), "bf16"),
        (whole(64), "q8_0,turbo4"),
        (whole(128), "f16"),
        (whole(128), "f16,q8_0"),
        (whole(192), "bf16"),
        (whole(192), "turbo4,turbo3"),
        (whole(192), "q5_0,rot-q4_0"),
        (whole(256), "q8_0"),
        (whole(256), "bf16,turbo4"),
        (whole(256), "f32,turbo3"),
        (whole(256), "turbo2,q4_0"),
        (whole(512), "rot-q5_0,turbo2"),
        (whole(512), "bf16,f32"),
        // The last columns of all are not rotated, as in Qwen.
        ((256, 32, 32), "bf16"),
    ]);
}

/// As [`gpu_fused_heads_are_stored_with_the_bits_of_their_parts`], few enough for compute-sanitizer.
#[test]
fn gpu_small_fused_heads_are_stored_with_the_bits_of_their_parts() {
    assert_fused_heads(&[
        ((256, 128, 128), "bf16"),
        ((256, 128, 128), "turbo4,bf16"),
        // The last columns of each half are not rotated, as in Gemma.
        ((512, 256, 64), "bf16"),
    ]);
}

/// Asserts that heads are stored as by the parts of the fused op: columns of a head, distance and
/// number of the pairs that RoPE rotates, and format, of each.
fn assert_fused_heads(cases: &[((usize, usize, usize), &str)]) {
    let Some(cuda) = gpu() else { return };
    for &((head_dim, pair_offset, pairs), format) in cases {
        let rope = Rope {
            head_dim,
            pair_offset,
            frequencies: noise(6, pairs),
            axes: Vec::new(),
        };
        // Of few rows a block takes a head, of many a row.
        for n in [70, 2 * cuda.device.driver.sms + 1] {
            for (texts, values, is_read) in [
                (
                    vec![(0..n as u32).map(Row::text).collect()],
                    Values::Normed,
                    false,
                ),
                (texts_with_gaps(n), Values::Normed, true),
                (texts_with_gaps(n), Values::Plain, false),
                (texts_with_gaps(n), Values::Weighted, false),
                (texts_with_gaps(n), Values::Rotated, true),
            ] {
                let case = HeadsCase {
                    rope: &rope,
                    format,
                    batch: &batch_of(texts),
                    values,
                    is_read,
                };
                let (fused, alone) = (case.run(&cuda, false), case.run(&cuda, true));
                let what = if is_read { "read" } else { "not read" };
                assert!(
                    fused == alone,
                    "{n} rows, pairs {pairs} of {head_dim} in {format}, values {values:?}, {what}"
                );
            }
        }
    }
    cuda.finish().unwrap();
}

/// `n` rows of two texts. Of eight rows that are stored together, each from a multiple of eight on:
/// the row 20 writes nothing; row 28, which begins the second text, writes the cache row behind that
/// of row 27; row 40 writes nothing; and the last are fewer than eight.
fn texts_with_gaps(n: usize) -> Vec<Vec<Row>> {
    let mut rows: Vec<Row> = (8..).take(n).map(Row::text).collect();
    for row in [20, 40] {
        rows[row] = Row::reader(8 + row as u32);
    }
    let second = rows.split_off(28);
    vec![rows, second]
}

/// A batch of texts, by the rows of each; they have the pages up to their last row, which lie in
/// descending order.
pub(super) fn batch_of(texts: Vec<Vec<Row>>) -> Batch {
    let mut batch = Batch::default();
    for rows in texts {
        let last = rows.iter().filter_map(|row| row.at).max();
        let pages = last.map_or(0, |at| at as usize / backend::PAGE_ROWS + 1);
        let (first, before) = (batch.rows.len(), batch.tables.len());
        let table = before..before + pages;
        batch.seqs.push(BatchSeq {
            rows: first..first + rows.len(),
            slot: batch.seqs.len(),
            is_new: true,
            kept: 0,
            certain: rows.len(),
            tables: vec![table],
        });
        batch.rows.extend(rows);
        batch.tables.extend((before as u32..).take(pages));
    }
    batch.tables.reverse();
    batch
}

/// How the values of a [`HeadsCase`] are made.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Values {
    /// As they come; of 16 bits, some of them beyond f16, below its normal numbers, or NaN.
    Plain,
    /// By an RMS norm without a weight.
    Normed,
    /// By an RMS norm with a weight.
    Weighted,
    /// By a norm and RoPE, as keys are; there is one head of them.
    Rotated,
}

/// Queries, keys and values of a batch.
struct HeadsCase<'a> {
    rope: &'a Rope,
    format: &'a str,
    batch: &'a Batch,
    values: Values,
    /// Whether keys and values are read, too, not only stored.
    is_read: bool,
}

impl HeadsCase<'_> {
    /// The pages, and the tensors that are read; op by op if they are `alone`.
    fn run(&self, cuda: &Cuda, alone: bool) -> (Vec<Vec<u8>>, Vec<Vec<u32>>) {
        let (batch, head_dim) = (self.batch, self.rope.head_dim);
        let (n, pages) = (batch.rows.len(), batch.tables.len());
        let kv_heads = if self.values == Values::Rotated { 1 } else { 2 };
        let x = |seed, heads: usize| {
            let cols = heads * head_dim;
            cuda.upload(n, cols, &noise(seed, n * cols))
        };
        let weight = cuda.upload(1, head_dim, &noise(8, head_dim));
        let mut kv = cuda.kv(KvSpec {
            pages,
            rows: pages * backend::PAGE_ROWS,
            heads: kv_heads,
            head_dim,
            format: format_of(self.format),
        });
        let normed = |x: &Tensor, weight| {
            let y = cuda.rms_norm(x, weight, head_dim, 1e-6);
            tell(cuda, alone, &y);
            y
        };
        let turned = |x: &Tensor| {
            let y = cuda.rope(normed(x, Some(&weight)), self.rope, batch);
            tell(cuda, alone, &y);
            y
        };
        let q = turned(&x(1, 4));
        let k = turned(&x(2, kv_heads));
        let v = match self.values {
            Values::Plain => self.plain_values(cuda, kv_heads),
            Values::Normed => normed(&x(3, kv_heads), None),
            Values::Weighted => normed(&x(3, kv_heads), Some(&weight)),
            Values::Rotated => turned(&x(3, kv_heads)),
        };
        cuda.kv_append(&mut kv, &k, &v, 0, batch);
        let mut read = vec![q];
        if self.is_read {
            read.extend([k, v]);
        } else {
            drop((k, v));
        }
        let saved = (0..pages).map(|page| cuda.kv_save(&kv, page)).collect();
        let bits = |y: &Tensor| cuda.download(y).iter().map(|v| v.to_bits()).collect();
        (saved, read.iter().map(bits).collect())
    }

    /// See [`Values::Plain`].
    fn plain_values(&self, cuda: &Cuda, heads: usize) -> Tensor {
        let (n, cols) = (self.batch.rows.len(), heads * self.rope.head_dim);
        let mut x = noise(3, n * cols);
        if self.format.ends_with("16") {
            let odd = [1e5, -7e4, f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 1e-6];
            let places = x.iter_mut().step_by(37).take(40);
            places
                .zip(odd.into_iter().cycle())
                .for_each(|(x, v)| *x = v);
        }
        cuda.upload(n, cols, &x)
    }
}

/// Needs no GPU: which values a kernel of their own stores.
#[test]
fn values_of_16_bits_of_many_rows_have_a_kernel() {
    let launches = |format, values, n: u32| {
        let cuda = Cuda::on(Driver::dry(DryRun::default()), Tunings::new(None, false));
        let rope = Rope {
            head_dim: 256,
            pair_offset: 128,
            frequencies: noise(6, 128),
            axes: Vec::new(),
        };
        let case = HeadsCase {
            rope: &rope,
            format,
            batch: &batch_of(vec![(0..n).map(Row::text).collect()]),
            values,
            is_read: false,
        };
        cuda.take_launches();
        case.run(&cuda, false);
        cuda.finish().unwrap();
        let launches = cuda.take_launches();
        let first_words = launches.iter().filter_map(|line| line.split(' ').next());
        let names = first_words.filter_map(|word| word.strip_prefix("kv_append::"));
        names.collect::<Vec<_>>().join(" ")
    };
    let (rows, apart) = (
        "norm_rope_append_rows",
        "norm_rope_append_rows norm_append_values",
    );
    for (format, values, n, expected) in [
        ("bf16", Values::Normed, 500, apart),
        ("turbo4,f16", Values::Plain, 500, apart),
        ("bf16", Values::Rotated, 500, rows),
        ("bf16,turbo4", Values::Normed, 500, rows),
        ("bf16", Values::Normed, 100, "norm_rope_append"),
    ] {
        let what = format!("{n} rows in {format}, values {values:?}");
        assert_eq!(launches(format, values, n), expected, "{what}");
    }
}

/// Attention that writes the f16 copy which a product reads, and not what the product does not read.
#[test]
fn gpu_products_of_attention_have_the_bits_of_their_parts() {
    let Some(cuda) = gpu() else { return };
    let b: &dyn Backend = &cuda;
    // Few rows, whose parts are merged, and many; heads for warpgroups, and others.
    for (n, head_dim, format) in [
        (3, 256, "bf16"),
        (200, 256, "bf16"),
        (200, 512, "f16"),
        (200, 128, "bf16"),
        (200, 256, "q8_0,turbo4"),
    ] {
        let case = AttentionCase {
            heads: 4,
            kv_heads: 2,
            head_dim,
            window: None,
        };
        let cols = case.heads * head_dim;
        let w = quant::encode(&quant::BF16, &noise(5, 32 * cols), cols, Scalar::F32);
        let w = cuda.matrix(&[w.view()]);
        let product = |alone| {
            let y = case.run(&cuda, 100, n, format_of(format));
            tell(&cuda, alone, &y);
            b.matmul(&y, &w)
        };
        same(
            &cuda,
            &format!("{n} rows, heads of {head_dim} in {format}"),
            &product(false),
            &product(true),
        );
    }
    cuda.finish().unwrap();
}

/// A narrow gate between the products of two matrices.
struct GatedCase {
    hidden: usize,
    gate: Matrix,
    projection: Matrix,
}

impl GatedCase {
    fn new(b: &dyn Backend, name: &str, hidden: usize, inner: usize) -> Self {
        let weights = |seed, rows, cols| match name {
            "fp8" => {
                let [codes, scales] = fp8_noise(seed, [rows, cols], cols);
                b.matrix(&[fp8(rows, cols, cols, &codes, &scales)])
            }
            _ => matrix(b, quant::format(name).unwrap(), seed, [rows, cols]),
        };
        GatedCase {
            hidden,
            gate: weights(1, inner, hidden),
            projection: weights(2, hidden, inner),
        }
    }

    /// What `n` rows come to, op by op if they are `alone`.
    fn run(&self, cuda: &Cuda, n: usize, alone: bool) -> Tensor {
        let b: &dyn Backend = cuda;
        let up = |seed, cols| cuda.upload(n, cols, &noise(seed, n * cols));
        let norm = cuda.upload(1, self.hidden, &noise(5, self.hidden));
        let h = cuda.rms_norm(&up(3, self.hidden), Some(&norm), self.hidden, 1e-6);
        tell(cuda, alone, &h);
        let g = b.matmul(&h, &self.gate);
        tell(cuda, alone, &g);
        let c = cuda.columns(&up(4, 500), 101, self.gate.rows);
        tell(cuda, alone, &c);
        let y = cuda.glu(g, &c, Activation::GeluTanh);
        drop(c);
        tell(cuda, alone, &y);
        b.matmul(&y, &self.projection)
    }
}

/// Formats, hidden columns and a gate's columns that one kernel takes.
const GATED_CASES: &[(&str, usize, usize)] = &[
    ("affine4-g64", 2560, 256),
    ("affine4-g64", 1536, 256),
    ("affine8-g64", 1024, 256),
    ("affine5-g32", 704, 160),
    ("q4_0", 192, 32),
    ("q8_0", 2048, 128),
    ("affine4-g64", 4096, 64),
    // Rows that are no whole row tiles, and an odd number of row tiles that lie beside each other in pairs.
    ("bf16", 632, 48),
    ("fp8", 1040, 208),
];

/// As [`GATED_CASES`], where only clusters of 16 blocks have room for the weights.
const LARGE_GATED_CASES: &[(&str, usize, usize)] = &[("bf16", 2560, 256), ("q8_0", 2560, 256)];

/// Too many columns of a gate, or of K, or warps; columns that are no whole row tiles, rotated ones, and those that
/// tensor cores do not take.
const SEPARATE_CASES: &[(&str, usize, usize)] = &[
    ("affine4-g64", 640, 320),
    ("affine4-g64", 8256, 64),
    ("affine4-g64", 8192, 64),
    ("bf16", 640, 72),
    ("tq4_1s", 640, 64),
    ("f32", 128, 64),
];

/// A narrow gate between two products, as one kernel takes them in some formats and numbers of rows, and as three.
#[test]
fn gpu_small_gated_projections_have_the_bits_of_their_parts() {
    if let Some(cuda) = gpu() {
        assert_gated_projections(&cuda);
    }
}

/// As [`gpu_small_gated_projections_have_the_bits_of_their_parts`], in the clusters that every device has.
#[test]
fn gpu_small_gated_projections_of_small_clusters_have_the_bits_of_their_parts() {
    if let Some(cuda) = gpu_with(|driver| driver.max_cluster = 8) {
        assert_gated_projections(&cuda);
    }
}

fn assert_gated_projections(cuda: &Cuda) {
    let cases = GATED_CASES.iter().chain(LARGE_GATED_CASES);
    for &(name, hidden, inner) in cases.chain(SEPARATE_CASES) {
        let case = GatedCase::new(cuda, name, hidden, inner);
        for n in [1, 2, 3, 8, 9, 16, 40, MANY_ROWS] {
            let what = format!("{n} rows, {inner} columns of {hidden} in {name}");
            same(
                cuda,
                &what,
                &case.run(cuda, n, false),
                &case.run(cuda, n, true),
            );
        }
    }
    cuda.finish().unwrap();
}

/// Needs no GPU: which gates are one kernel with the products around them.
#[test]
fn few_rows_of_a_narrow_gate_take_one_kernel() {
    let launches = |device: DryRun, max_cluster: usize, (name, hidden, inner), n| {
        let mut driver = Driver::dry(device);
        driver.max_cluster = max_cluster;
        let cuda = Cuda::on(driver, Tunings::new(None, false));
        let case = GatedCase::new(&cuda, name, hidden, inner);
        cuda.take_launches();
        let _z = case.run(&cuda, n, false);
        cuda.flush();
        cuda.finish().unwrap();
        let launches = cuda.take_launches();
        let found = |blocks: usize| {
            let blocks = format!("GATED_BLOCKS={blocks} ");
            launches.iter().any(|l| l.contains(&blocks))
        };
        [16, 8].map(found)
    };
    let hopper = DryRun::default();
    let ampere = DryRun {
        capability: (8, 0),
        ..hopper
    };
    for &case in GATED_CASES {
        for n in [1, 8, 16] {
            assert_eq!(launches(hopper, 16, case, n), [true, false], "{case:?}");
            assert_eq!(launches(hopper, 8, case, n), [false, true], "{case:?}");
            assert_eq!(launches(ampere, 16, case, n), [false; 2], "{case:?}");
        }
        assert_eq!(launches(hopper, 16, case, 17), [false; 2], "{case:?}");
    }
    for &case in LARGE_GATED_CASES {
        assert_eq!(launches(hopper, 16, case, 8), [true, false], "{case:?}");
        assert_eq!(launches(hopper, 8, case, 8), [false; 2], "{case:?}");
    }
    for &case in SEPARATE_CASES {
        assert_eq!(launches(hopper, 16, case, 1), [false; 2], "{case:?}");
    }
}

/// Gates as threads of many rows take them, several pairs of columns each, and as those of few rows do.
#[test]
fn gpu_small_gates_of_many_rows_have_the_bits_of_few() {
    let Some(cuda) = gpu() else { return };
    // Two blocks a row, the second of them not full, and columns that are no whole pairs.
    for (cols, first) in [(4160, 0), (4160, 2), (4160, 1), (1033, 3)] {
        let gate = noise(1, MANY_ROWS * cols);
        let wide = cols + 8;
        let inputs = noise(2, MANY_ROWS * wide);
        let made = |n: usize| {
            let x = cuda.upload(n, wide, &inputs[..n * wide]);
            let c = cuda.columns(&x, first, cols);
            let y = cuda.glu(
                cuda.upload(n, cols, &gate[..n * cols]),
                &c,
                Activation::GeluTanh,
            );
            cuda.download(&y).into_owned()
        };
        let (few, many) = (made(40), made(MANY_ROWS));
        assert!(many[..few.len()] == few, "{cols} columns from {first}");
    }
    cuda.finish().unwrap();
}

/// Columns of a gate, which are neither the first nor the last of its inputs.
const GATED: std::ops::Range<usize> = 100..420;

/// The weights of a layer whose ends the families' layers have.
struct Layer {
    experts: Experts,
    /// Weights of norms: after a block, of what follows (three), of a dense block and of the experts.
    norms: [Tensor; 6],
    /// Gate and up of a dense block, and down.
    wide: [Matrix; 2],
    down: Matrix,
    /// Scores of experts, and what follows a norm.
    router: Matrix,
    after: Matrix,
    /// A gate of [`GATED`] columns, and its product.
    gate: Matrix,
    narrow: Matrix,
}

const POST: usize = 0;
const NEXT: [usize; 3] = [1, 2, 3];
const OF_DENSE: usize = 4;
const OF_EXPERTS: usize = 5;

impl Layer {
    fn new(b: &dyn Backend, format: &'static Format, hidden: usize, inner: usize) -> Self {
        let matrix = |seed, rows, cols| matrix(b, format, seed, [rows, cols]);
        Layer {
            experts: experts(b, format, hidden, inner),
            norms: [1, 2, 3, 4, 5, 6].map(|seed| b.upload(1, hidden, &noise(seed, hidden))),
            wide: [60, 61].map(|seed| matrix(seed, inner, hidden)),
            down: matrix(62, hidden, inner),
            narrow: matrix(63, hidden, GATED.len()),
            router: matrix(64, 9, hidden),
            after: matrix(65, 70, hidden),
            gate: matrix(66, GATED.len(), hidden),
        }
    }

    /// The values that the layer's ends make of `n` rows, op by op if they are `alone`.
    fn run(&self, cuda: &Cuda, n: usize, alone: bool) -> Vec<Vec<f32>> {
        let hidden = self.norms[POST].cols();
        let up = |seed, cols: usize| cuda.upload(n, cols, &noise(seed, n * cols));
        let (x, h, y) = (up(1, hidden), up(2, hidden), up(3, hidden));
        let (scores, gates, inputs) = (up(4, 9), up(5, 1), up(6, 500));
        let mut run = Run {
            b: cuda,
            layer: self,
            alone,
            made: Vec::new(),
            held: Vec::new(),
        };
        let x = run.experts_and_a_shared_one(x, &h, &scores, &gates);
        let x = run.experts_beside_a_dense_block(x, &y);
        run.gate_of_columns(x, &y, &inputs);
        let download = |x| cuda.download(x).into_owned();
        run.made.iter().map(download).collect()
    }
}

/// A run through a layer's ends.
struct Run<'a> {
    b: &'a dyn Backend,
    layer: &'a Layer,
    alone: bool,
    /// What is compared.
    made: Vec<Tensor>,
    /// What the host holds until then, so that it is not fused away.
    held: Vec<Tensor>,
}

impl Run<'_> {
    fn tell(&self, x: Tensor) -> Tensor {
        if self.alone {
            self.b.download(&x);
        }
        x
    }

    fn norm(&self, x: &Tensor, weight: usize) -> Tensor {
        let weight = &self.layer.norms[weight];
        self.tell(self.b.rms_norm(x, Some(weight), x.cols(), 1e-6))
    }

    fn product(&self, x: &Tensor, w: &Matrix) -> Tensor {
        self.tell(self.b.matmul(x, w))
    }

    fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
        self.tell(self.b.add(x, y))
    }

    fn dense(&self, x: &Tensor) -> Tensor {
        let gated = {
            let [gate, up] = self.b.matmul_many(x, self.layer.wide.each_ref());
            self.tell(self.b.glu(self.tell(gate), &up, Activation::Silu))
        };
        self.product(&gated, &self.layer.down)
    }

    /// `x` with the norm of a block's result `y`, and the norm for the next block.
    fn end(&self, x: Tensor, y: &Tensor, factor: f32, next: usize) -> (Tensor, Tensor) {
        let sum = self.add(self.norm(y, POST), &x);
        let x = self.tell(self.b.scale(sum, factor));
        let h = self.norm(&x, next);
        (x, h)
    }

    fn experts_and_a_shared_one(
        &mut self,
        x: Tensor,
        h: &Tensor,
        scores: &Tensor,
        gates: &Tensor,
    ) -> Tensor {
        let shared = self.dense(h);
        let routed = self.tell(self.b.moe(h, scores, &self.layer.experts));
        let gated = self.tell(self.b.gate_rows(&shared, gates, Activation::Sigmoid));
        let sum = self.add(routed, &gated);
        // What is fused away is not looked at again.
        self.made.push(shared);
        let x = self.add(x, &sum);
        drop((sum, gated));
        let norms = [NEXT[0], NEXT[1]].map(|weight| self.norm(&x, weight));
        self.made.push(self.product(&norms[1], &self.layer.after));
        self.made.extend(norms);
        x
    }

    /// Experts beside a dense block, whose inputs are norms of one row.
    fn experts_beside_a_dense_block(&mut self, x: Tensor, y: &Tensor) -> Tensor {
        let (x, h) = self.end(x, y, 1.0, NEXT[0]);
        let [for_router, for_experts] = [NEXT[1], NEXT[2]].map(|weight| self.norm(&x, weight));
        let scores = self.product(&for_router, &self.layer.router);
        let block = self.dense(&h);
        let routed = self.b.moe(&for_experts, &scores, &self.layer.experts);
        let routed = self.tell(routed);
        let sum = self.add(self.norm(&block, OF_DENSE), &self.norm(&routed, OF_EXPERTS));
        drop(routed);
        self.made.extend([for_experts, block]);
        self.held.extend([h, for_router, scores]);
        let (x, h) = self.end(x, &sum, 0.7, NEXT[1]);
        drop(sum);
        self.made.push(self.product(&h, &self.layer.after));
        self.held.push(h);
        x
    }

    /// A sum that is multiplied, and a gate of columns.
    fn gate_of_columns(&mut self, x: Tensor, y: &Tensor, inputs: &Tensor) {
        let x = self.add(self.norm(y, POST), &self.tell(x));
        let p = self.product(&x, &self.layer.gate);
        let own = self.tell(self.b.columns(inputs, GATED.start, GATED.len()));
        let p = self.tell(self.b.glu(p, &own, Activation::GeluTanh));
        let y = self.product(&p, &self.layer.narrow);
        let (x, h) = self.end(x, &y, 0.7, NEXT[0]);
        self.made.extend([p, own, y, x, h]);
    }
}

/// A layer's ends and gates as the families ask for them, op by op or together, by few rows, more than one block
/// chooses experts for, or as many as are normed by smaller blocks.
#[test]
fn gpu_small_ends_of_layers_have_the_bits_of_their_parts() {
    let Some(cuda) = gpu() else { return };
    for (name, hidden, inner) in [
        ("bf16", 128, 320),
        ("affine4-g64", 128, 320),
        ("affine4-g64", 640, 576),
        // One, two and three pairs of columns for each thread of a row.
        ("affine4-g64", 1024, 64),
        ("affine4-g64", 2112, 64),
        ("affine4-g64", 5376, 64),
        ("q8_0", 640, 576),
        ("f32", 128, 320),
    ] {
        let layer = Layer::new(&cuda, quant::format(name).unwrap(), hidden, inner);
        let all = layer.run(&cuda, 20, true);
        for n in [1, 3, 8, 12, 20, MANY_ROWS] {
            for alone in [false, true] {
                let made = layer.run(&cuda, n, alone);
                for (i, (got, want)) in made.iter().zip(&all).enumerate() {
                    let shared = got.len().min(want.len());
                    let same = got[..shared] == want[..shared];
                    let what = format!("{hidden} by {inner} in {name}, alone: {alone}");
                    assert!(same, "tensor {i} of {n} rows, {what}");
                }
            }
        }
    }
    cuda.finish().unwrap();
}
