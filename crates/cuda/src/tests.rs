//! The conformance suite on the GPU, and that every kernel compiles without one.

use crate::compile::{self, Kernel};
use crate::driver::Driver;
use crate::gemm::{self, Warpgroups};
use crate::matmul::Tiles;
use crate::pack::Packing;
use crate::{Cuda, CudaError, CudaOptions, EQUAL_OPS, args};
use backend::{
    Activation, Attention, Backend, Batch, BatchSeq, DeltaSpec, DeltaWeights, Expert, Experts,
    KvFormat, KvSpec, Matrix, Ops, Position, Record, Reference, Rope, Row, Sample, Store, Tensor,
    TokenChoice, TokenList, TokenMask, conformance,
};
use quant::{Scalar, Stored};
use std::collections::HashSet;

/// A GPU, or nothing, loudly: where there is none, these tests test nothing.
fn gpu() -> Option<Cuda> {
    gpu_with(|_| {})
}

fn gpu_with(change: impl Fn(&mut Driver)) -> Option<Cuda> {
    // Compiled code is named by its content, so that tests can share it.
    let cache = std::env::temp_dir().join("paceline-cuda-tests");
    let options = CudaOptions {
        cache: Some(cache),
        kernels: std::env::var_os("CUDA_KERNELS").map(Into::into),
        ..CudaOptions::default()
    };
    match Driver::new(options) {
        Ok(mut driver) => {
            change(&mut driver);
            Some(Cuda::on(driver))
        }
        Err(e @ (CudaError::NoDriver | CudaError::NoCompiler | CudaError::NoDevice { .. })) => {
            eprintln!("!!! SKIPPED, nothing is tested on a GPU: {e}");
            None
        }
        Err(e) => panic!("{e}"),
    }
}

#[test]
fn gpu_ops_without_long_sums_have_the_bits_of_the_reference() {
    let Some(cuda) = gpu() else { return };
    for (name, case) in conformance::EQUAL_CASES {
        if EQUAL_OPS.contains(name) {
            case(&cuda, &Reference);
        }
    }
    cuda.finish().unwrap();
}

#[test]
fn gpu_tables_hold_what_they_were_given() {
    let Some(cuda) = gpu() else { return };
    // The last two are formats that become f16.
    for name in [
        "f32",
        "f16",
        "bf16",
        "affine3-g32",
        "affine4-g64",
        "affine8-g128",
        "q4_0",
        "q5_1",
        "q4_k",
        "q6_k",
        "mxfp4",
    ] {
        let format = quant::format(name).unwrap();
        let (rows, cols) = (50, 512);
        let w = quant::encode(format, &noise(1, rows * cols), cols, Scalar::F16);
        let y = |b: &dyn Backend| b.embed(&b.matrix(&[w.view()]), &[0, 49, 17, 17, 8], 16.0);
        close(
            name,
            &cuda,
            &y(&cuda),
            &y(&Reference),
            // Scales of more bits than f16 has.
            if ["q4_k", "q6_k", "mxfp4"].contains(&name) {
                PRODUCT
            } else {
                0.0
            },
        );
    }
    cuda.finish().unwrap();
}

#[test]
fn gpu_fused_ops_have_the_bits_of_their_parts() {
    let Some(cuda) = gpu() else { return };
    // What is looked at has been launched, so that nothing is fused with it.
    let tell = |alone: bool, x: &Tensor| {
        if alone {
            cuda.download(x);
        }
    };
    let same = |what: &str, a: &Tensor, b: &Tensor| {
        assert_eq!(cuda.download(a), cuda.download(b), "{what}");
    };
    for (n, cols) in [(1, 64), (3, 640), (3, 5376), (5, 5376)] {
        let up = |seed| cuda.upload(n, cols, &noise(seed, n * cols));
        let weight = |seed| cuda.upload(1, cols, &noise(seed, cols));
        let (post, next) = (weight(3), weight(4));
        for (post, factor) in [(Some(&post), 0.7), (None, 1.0)] {
            let sum = |alone| {
                let mut y = up(2);
                if let Some(w) = post {
                    y = cuda.rms_norm(&y, Some(w), cols, 1e-6);
                    tell(alone, &y);
                }
                let x = cuda.add(y, &up(1));
                tell(alone, &x);
                let x = cuda.scale(x, factor);
                tell(alone, &x);
                let h = cuda.rms_norm(&x, Some(&next), cols, 1e-6);
                tell(alone, &h);
                [x, h]
            };
            let ([x, h], [want_x, want]) = (sum(false), sum(true));
            same("the sum", &x, &want_x);
            same("its norm", &h, &want);
            let w = quant::encode(&quant::BF16, &noise(5, 32 * cols), cols, Scalar::F32);
            let b: &dyn Backend = &cuda;
            let w = cuda.matrix(&[w.view()]);
            let [_x, h] = sum(false);
            same("a product", &b.matmul(&h, &w), &b.matmul(&want, &w));
        }
    }
    for n in [1, 3, 40] {
        let up = |seed, cols| cuda.upload(n, cols, &noise(seed, n * cols));
        let next = cuda.upload(1, 128, &noise(4, 128));
        let sum = |alone: bool| {
            let routed = mixture(&cuda, &quant::BF16, n);
            tell(alone, &routed);
            let gated = cuda.gate_rows(&up(5, 128), &up(6, 1), Activation::Sigmoid);
            tell(alone, &gated);
            let y = cuda.add(routed, &gated);
            tell(alone, &y);
            let x = cuda.add(up(1, 128), &y);
            tell(alone, &x);
            let h = cuda.rms_norm(&x, Some(&next), 128, 1e-6);
            [x, h]
        };
        for (i, (a, b)) in sum(false).iter().zip(&sum(true)).enumerate() {
            same(&format!("tensor {i} of a mixture and its norm"), a, b);
        }
    }
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
            tell(alone, &y);
            cuda.rope(y, &rope, &batch)
        };
        same("norm and rope", &turned(false), &turned(true));
    }
    cuda.finish().unwrap();
}

#[test]
fn gpu_rows_do_not_depend_on_their_company() {
    let Some(cuda) = gpu() else { return };
    conformance::check_row_invariance(&cuda);
}

/// `‖got - want‖ / ‖want‖`
fn distance(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |x: f64| x * x;
    let sum = |f: &dyn Fn(f64, f64) -> f64| -> f64 {
        got.iter()
            .zip(want)
            .map(|(g, w)| f(f64::from(*g), f64::from(*w)))
            .sum()
    };
    let (d, n) = (sum(&|g, w| square(g - w)), sum(&|_, w| square(w)));
    (d / n.max(1e-30)).sqrt()
}

/// Numbers of no pattern in `-1 .. 1`.
fn noise(seed: u32, n: usize) -> Vec<f32> {
    (0..n as u32)
        .map(|i| {
            let mut x = i.wrapping_mul(0x9e37_79b9) ^ seed.wrapping_mul(0x85eb_ca6b);
            x ^= x >> 16;
            x = x.wrapping_mul(0x7feb_352d);
            x ^= x >> 15;
            x = x.wrapping_mul(0x846c_a68b);
            ((x >> 8) as f32 / (1 << 23) as f32) - 1.0
        })
        .collect()
}

/// How far a product may be from exact activations: f16 has 11 bits.
const PRODUCT: f64 = 5e-4;
/// How far a sum in `f32` may be from one in another order.
const SUM: f64 = 2e-6;

fn close(what: &str, cuda: &Cuda, got: &Tensor, want: &Tensor, tolerance: f64) {
    let d = distance(&cuda.download(got), &Reference.download(want));
    assert!(
        d <= tolerance,
        "{what}: {d:.1e} is more than {tolerance:.1e}"
    );
}

#[test]
fn gpu_products_are_close_to_the_reference() {
    let Some(cuda) = gpu() else { return };
    // Each width of code and each kind of scale: a format takes seconds to compile.
    for name in [
        "f32",
        "f16",
        "bf16",
        "affine2-g64",
        "affine3-g32",
        "affine4-g32",
        "affine4-g64",
        "affine5-g128",
        "affine6-g64",
        "affine8-g32",
    ] {
        let format = quant::format(name).unwrap();
        for (rows, cols, n) in [
            (5, 128, 1),
            (100, 768, 3),
            (33, 4096, 8),
            (300, 1280, 17),
            (64, 9216, 40),
        ] {
            let cols = cols + if format.block == 1 { 7 } else { 0 };
            let w = quant::encode(format, &noise(1, rows * cols), cols, Scalar::Bf16);
            let x = noise(2, n * cols);
            let y = |b: &dyn Backend| b.matmul(&b.upload(n, cols, &x), &b.matrix(&[w.view()]));
            let what = format!("{} [{rows}, {cols}] by {n}", format.name);
            close(&what, &cuda, &y(&cuda), &y(&Reference), PRODUCT);
        }
    }
    cuda.finish().unwrap();
}

/// The kernels that stream weights through shared memory, and the simple ones for
/// devices with little of it.
#[test]
fn gpu_small_streamed_products_have_the_bits_of_simple_ones() {
    let (Some(cuda), Some(simple)) = (gpu(), gpu_with(|driver| driver.shared = 0)) else {
        return;
    };
    for name in [
        "bf16",
        "affine4-g64",
        "affine5-g32",
        "affine6-g64",
        "affine8-g32",
    ] {
        let format = quant::format(name).unwrap();
        // Rows of tiles that blocks share unevenly, of three matrices; few and many slices.
        for (rows, cols) in [
            ([40, 5, 700], 192),
            ([2100, 40, 2300], 1088),
            ([4, 20, 900], 8256),
        ] {
            let stored =
                rows.map(|rows| quant::encode(format, &noise(1, rows * cols), cols, Scalar::Bf16));
            let mut widest: [Vec<f32>; 3] = Default::default();
            for n in [1, 3, 8, 9, 16, 20, 33, 200] {
                let x = noise(2, n * cols);
                let y = |cuda: &Cuda| {
                    let b: &dyn Backend = cuda;
                    let w = stored.each_ref().map(|w| b.matrix(&[w.view()]));
                    let x = b.upload(n, cols, &x);
                    b.matmul_many(&x, w.each_ref())
                        .map(|y| b.download(&y).into_owned())
                };
                let made = y(&cuda);
                let what = format!("{name} {rows:?} by {cols}, {n} rows");
                assert!(made == y(&simple), "{what}");
                for (made, before) in made.iter().zip(&widest) {
                    assert!(made.starts_with(before), "{what}: those of fewer");
                }
                widest = made;
            }
        }
    }
    cuda.finish().unwrap();
    simple.finish().unwrap();
}

/// `[rows, cols]` E4M3 codes with an f32 scale for every `tile` columns of a row.
pub(crate) fn fp8<'a>(
    rows: usize,
    cols: usize,
    tile: usize,
    codes: &'a [u8],
    scales: &'a [u8],
) -> Stored<'a> {
    Stored {
        format: quant::format("fp8").unwrap(),
        rows,
        cols,
        codes,
        scale: Scalar::F32,
        scales,
        biases: &[],
        tiles: quant::Tiles::of_rows(tile),
        mapping: None,
    }
}

/// Floats of 8 bits, which others write: products of any kind and looked up rows.
#[test]
fn gpu_small_products_of_e4m3_are_close_to_the_reference() {
    let (Some(cuda), Some(simple)) = (gpu(), gpu_with(|driver| driver.shared = 0)) else {
        return;
    };
    for (tile, rows, cols) in [(32, 100, 352), (128, 40, 4096), (8320, 33, 8320)] {
        let code = |v: f32| ((v.to_bits() >> 20) as u8 & 0xbf) | (v.to_bits() >> 24) as u8 & 0x80;
        let codes: Vec<u8> = noise(1, rows * cols).into_iter().map(code).collect();
        let scales = noise(3, rows * cols.div_ceil(tile));
        let scales: Vec<u8> = scales.iter().flat_map(|s| s.to_le_bytes()).collect();
        let w = fp8(rows, cols, tile, &codes, &scales);
        for n in [1, 3, 8, 9, 40] {
            let x = noise(2, n * cols);
            let y = |b: &dyn Backend| b.matmul(&b.upload(n, cols, &x), &b.matrix(&[w]));
            let what = format!("[{rows}, {cols}] by {n}");
            close(&what, &cuda, &y(&cuda), &y(&Reference), PRODUCT);
            assert!(
                cuda.download(&y(&cuda)) == simple.download(&y(&simple)),
                "{what}"
            );
        }
        let ids = [0, 17, 31, 2];
        // Of scales with no more bits than f16 has.
        let short = |s: &[u8]| [0, 0, s[2], s[3]];
        let scales: Vec<u8> = scales.chunks(4).flat_map(short).collect();
        let table = fp8(rows, cols, tile, &codes, &scales);
        let y = |b: &dyn Backend| b.embed(&b.matrix(&[table]), &ids, 1.0);
        close("rows", &cuda, &y(&cuda), &y(&Reference), 0.0);
        let x = noise(4, cols);
        let chosen = |b: &dyn Backend| {
            b.matmul_rows(&b.upload(1, cols, &x), &b.matrix(&[w]), &[ids.to_vec()])
        };
        close(
            "chosen",
            &cuda,
            &chosen(&cuda),
            &chosen(&Reference),
            PRODUCT,
        );
    }
    cuda.finish().unwrap();
    simple.finish().unwrap();
}

#[test]
fn gpu_norms_are_close_to_the_reference() {
    let Some(cuda) = gpu() else { return };
    for (width, runs) in [(1, 3), (128, 5), (5376, 1)] {
        let x = noise(3, 4 * runs * width);
        let weight = noise(4, width);
        let y = |b: &dyn Backend| {
            let weight = b.upload(1, width, &weight);
            b.rms_norm(&b.upload(4, runs * width, &x), Some(&weight), width, 1e-6)
        };
        close("rms_norm", &cuda, &y(&cuda), &y(&Reference), SUM);
    }
    cuda.finish().unwrap();
}

/// A shape of attention.
struct AttentionCase {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    window: Option<usize>,
}

impl AttentionCase {
    /// `new` rows after `old` of one sequence, whose pages lie in reverse.
    fn run(
        &self,
        b: &dyn Backend,
        old: usize,
        new: usize,
        format: &'static quant::KvRowFormat,
    ) -> Tensor {
        self.run_with(b, old, new, format, |_, v| v)
    }

    /// [`run`](Self::run) on values that `edit` makes of a cache row's.
    fn run_with(
        &self,
        b: &dyn Backend,
        old: usize,
        new: usize,
        format: &'static quant::KvRowFormat,
        edit: impl Fn(usize, f32) -> f32,
    ) -> Tensor {
        let n = old + new;
        let pages = n.div_ceil(64);
        let table = 0..pages;
        let mut kv = b.kv(KvSpec {
            pages,
            heads: self.kv_heads,
            head_dim: self.head_dim,
            format: KvFormat::both(format),
        });
        let mut y = None;
        for rows in [0..old, old..n].into_iter().filter(|r| !r.is_empty()) {
            let len = rows.len();
            let row = |i: usize| Row::text(i as u32);
            let batch = Batch {
                rows: rows.clone().map(row).collect(),
                seqs: vec![BatchSeq {
                    rows: 0..len,
                    slot: 0,
                    is_new: rows.start == 0,
                    kept: 0,
                    certain: len,
                    tables: vec![table.clone()],
                }],
                tables: (0..pages as u32).rev().collect(),
                ..Batch::default()
            };
            let part = |seed, cols: usize| {
                b.upload(
                    len,
                    cols,
                    &noise(seed, n * cols)[rows.start * cols..rows.end * cols],
                )
            };
            let cols = self.kv_heads * self.head_dim;
            let values = noise(6, n * cols);
            let values = values.iter().enumerate().map(|(i, &v)| edit(i / cols, v));
            let values: Vec<f32> = values.collect();
            let values = b.upload(len, cols, &values[rows.start * cols..rows.end * cols]);
            b.kv_append(&mut kv, &part(5, cols), &values, 0, &batch);
            if rows.end < n {
                continue; // nobody looks at what the old rows see
            }
            let attention = Attention {
                group: 0,
                heads: self.heads,
                scale: 0.3,
                window: self.window,
            };
            y = Some(b.attend(
                &part(7, self.heads * self.head_dim),
                &kv,
                &attention,
                &batch,
            ));
        }
        y.expect("some rows")
    }

    fn check(&self, cuda: &Cuda, old: usize, new: usize, format: &'static quant::KvRowFormat) {
        let what = format!(
            "{new} rows after {old}, {} heads on {} of {}, window {:?}, {}",
            self.heads, self.kv_heads, self.head_dim, self.window, format.name
        );
        // Queries and probabilities are rounded to f16, and so is what codes stand for.
        let tolerance = match format.name {
            "f32" => SUM,
            "q8_0" => 2.0 * PRODUCT,
            _ => PRODUCT,
        };
        let (got, want) = (
            self.run(cuda, old, new, format),
            self.run(&Reference, old, new, format),
        );
        close(&what, cuda, &got, &want, tolerance);
    }
}

#[test]
fn gpu_attention_is_close_to_the_reference() {
    let Some(cuda) = gpu() else { return };
    for (heads, kv_heads, head_dim, window) in [
        (2, 1, 64, None),
        (8, 2, 128, Some(300)),
        (6, 1, 256, None),
        (4, 1, 512, Some(64)),
        (2, 1, 320, None),
        (2, 2, 20, None),
    ] {
        let case = AttentionCase {
            heads,
            kv_heads,
            head_dim,
            window,
        };
        for (old, new) in [(0, 5), (0, 700), (1000, 1), (1000, 4), (513, 70)] {
            for format in ["f32", "f16", "bf16", "q8_0"] {
                let format = quant::kv_format(format).unwrap();
                if head_dim % format.block == 0 {
                    case.check(&cuda, old, new, format);
                }
            }
        }
    }
    cuda.finish().unwrap();
}

/// Tensor cores multiply what a row does not see by 0.
#[test]
fn gpu_attention_takes_nothing_of_values_that_a_row_does_not_see() {
    let Some(cuda) = gpu() else { return };
    for (head_dim, format) in [
        (64, "bf16"),
        (64, "q8_0"),
        (256, "bf16"),
        (256, "f16"),
        (256, "q8_0"),
        (512, "f16"),
        (20, "f16"),
    ] {
        let format = quant::kv_format(format).unwrap();
        let case = AttentionCase {
            heads: 4,
            kv_heads: 1,
            head_dim,
            window: None,
        };
        for later in [6e4, -7e4, 9e9, f32::INFINITY, f32::NAN] {
            for size in [1.0, 2.0f32.powi(-17)] {
                let edit = |row: usize, v: f32| if row == 90 { later } else { v * size };
                let run = |old, new| {
                    cuda.download(&case.run_with(&cuda, old, new, format, edit))
                        .into_owned()
                };
                let cols = 4 * head_dim;
                let (alone, among) = (run(80, 1), run(0, 100));
                assert!(
                    alone == among[80 * cols..81 * cols] && alone.iter().all(|v| v.is_finite()),
                    "head of {head_dim} in {}, {later} later, values of {size}",
                    format.name
                );
            }
        }
    }
    cuda.finish().unwrap();
}

/// A long context is walked by splits of keys, of which a block may have several, a short
/// one by pages; rows on either side of the border, and many at once, must not tell.
#[test]
fn gpu_attention_by_pages_has_the_bits_of_that_by_splits() {
    let Some(cuda) = gpu() else { return };
    let q8_0 = quant::kv_format("q8_0").unwrap();
    for (heads, kv_heads, head_dim, format) in [
        (2, 1, 32, &quant::kv::BF16),
        (4, 2, 16, &quant::kv::BF16),
        (4, 2, 64, &quant::kv::BF16),
        (8, 1, 256, &quant::kv::BF16),
        (2, 1, 512, &quant::kv::F16),
        (3, 3, 96, &quant::kv::F16),
        (4, 1, 256, q8_0),
        (2, 2, 64, q8_0),
    ] {
        for window in [None, Some(8), Some(700), Some(3000)] {
            let case = AttentionCase {
                heads,
                kv_heads,
                head_dim,
                window,
            };
            let run = |old, new| {
                cuda.download(&case.run(&cuda, old, new, format))
                    .into_owned()
            };
            let cols = heads * head_dim;
            let far = [(9001, 2), (9000, 4), (9000, 40)];
            let near = [(2038, 1), (2038, 20), (2047, 1), (2048, 1), (2040, 8)];
            let first = [
                (0, 1),
                (3, 1),
                (60, 7),
                (70, 33),
                (250, 16),
                (255, 1),
                (256, 1),
                (299, 1),
            ];
            for (start, n, parts) in [(0, 300, &first[..]), (2038, 70, &near), (9000, 70, &far)] {
                let all = run(start, n);
                for &(old, new) in parts {
                    let from = (old - start) * cols;
                    assert!(
                        run(old, new) == all[from..from + new * cols],
                        "{new} rows after {old}, head of {head_dim}, window {window:?}"
                    );
                }
            }
        }
    }
    cuda.finish().unwrap();
}

/// Three steps of the delta rule, of which some rows stay, and of the last one its gated norm.
fn delta_steps(b: &dyn Backend) -> [Tensor; 3] {
    delta_rows(b, &[(7, 3), (6, 1), (10, 10)], &[2, 4], |x| x)
}

/// Steps of so many rows and certain ones, of which so many others stay, each from the row on
/// that comes after those that stayed: results of the last one, their norm, and that gated.
fn delta_rows(
    b: &dyn Backend,
    steps: &[(usize, usize)],
    kept: &[usize],
    tell: impl Fn(Tensor) -> Tensor,
) -> [Tensor; 3] {
    let spec = DeltaSpec {
        slots: 2,
        key_heads: 2,
        value_heads: 4,
        key_dim: 128,
        value_dim: 128,
        conv_taps: 4,
    };
    let channels = spec.channels();
    let weights = DeltaWeights {
        conv: b.upload(channels, 4, &noise(8, 4 * channels)),
        decay: b.upload(1, 4, &[-0.1, -0.5, -1.0, -0.01]),
        dt_bias: b.upload(1, 4, &[0.3, -0.3, 0.0, 1.0]),
    };
    let weight = b.upload(1, 128, &noise(7, 128));
    let mut state = b.delta(spec);
    let (mut last, mut at) = (None, 0);
    for (i, &(n, certain)) in steps.iter().enumerate() {
        let kept = i.checked_sub(1).map(|i| kept[i]);
        at += kept.unwrap_or(0);
        let row = Row::text;
        let batch = Batch {
            rows: (at as u32..(at + n) as u32).map(row).collect(),
            seqs: vec![BatchSeq {
                rows: 0..n,
                slot: 1,
                is_new: kept.is_none(),
                kept: kept.unwrap_or(0),
                certain,
                tables: Vec::new(),
            }],
            ..Batch::default()
        };
        let part = |seed, cols| b.upload(n, cols, &noise(seed, 40 * cols)[at * cols..][..n * cols]);
        let (qkv, beta, a) = (part(9, channels), part(10, 4), part(11, 4));
        let gate = part(12, 4 * 128);
        let y = tell(b.gated_delta(&mut state, &weights, &qkv, &beta, &a, &batch));
        let norm = tell(b.rms_norm(&y, Some(&weight), 128, 1e-6));
        let gated = tell(b.glu(gate, &norm, Activation::Silu));
        last = Some([y, norm, gated]);
        at += certain;
    }
    last.expect("a step")
}

/// One kernel for few rows, and one after the other, whatever rows come together.
#[test]
fn gpu_small_delta_steps_of_few_rows_have_the_bits_of_many() {
    let Some(cuda) = gpu() else { return };
    let tell = |x: Tensor| {
        cuda.download(&x);
        x
    };
    let down = |x: &Tensor| cuda.download(x).into_owned();
    let all = delta_rows(&cuda, &[(20, 20)], &[], |x| x);
    let steps: [(&[_], &[_]); 4] = [
        (&[(7, 3), (6, 1), (10, 10)], &[2, 4]),
        (&[(12, 12), (8, 8)], &[0]),
        (&[(19, 19), (1, 1)], &[0]),
        (&[(3, 0), (17, 1), (18, 18)], &[1, 0]),
    ];
    for (steps, kept) in steps {
        for some in [
            delta_rows(&cuda, steps, kept, |x| x),
            delta_rows(&cuda, steps, kept, tell),
        ] {
            for (i, (got, all)) in some.iter().zip(&all).enumerate() {
                let (got, all) = (down(got), down(all));
                let same = got[..] == all[all.len() - got.len()..];
                assert!(same, "tensor {i} of {steps:?}, {kept:?} stay");
            }
        }
    }
    cuda.finish().unwrap();
}

fn matrix(b: &dyn Backend, format: &'static quant::Format, seed: u32, shape: [usize; 2]) -> Matrix {
    let w = quant::encode(
        format,
        &noise(seed, shape[0] * shape[1]),
        shape[1],
        Scalar::F16,
    );
    b.matrix(&[w.view()])
}

/// 9 experts, 3 a row.
fn experts(
    b: &dyn Backend,
    format: &'static quant::Format,
    hidden: usize,
    inner: usize,
) -> Experts {
    let one = |e: u32| Expert {
        gate_up: matrix(b, format, 20 + e, [2 * inner, hidden]),
        down: matrix(b, format, 40 + e, [hidden, inner]),
    };
    Experts {
        experts: (0..9).map(one).collect(),
        top_k: 3,
        scale: Some((0..9u8).map(|e| 0.5 + f32::from(e)).collect()),
        activation: Activation::GeluTanh,
    }
}

/// A mixture, one of whose experts is chosen by most rows.
fn mixture(b: &dyn Backend, format: &'static quant::Format, n: usize) -> Tensor {
    let (hidden, count) = (128, 9);
    let scores = b.upload(n, count, &noise(12, n * count));
    let x = b.upload(n, hidden, &noise(13, n * hidden));
    b.moe(&x, &scores, &experts(b, format, hidden, 64))
}

/// Pairs of an expert that go through warpgroups, and those of few rows, which do not: one
/// expert has more than a block takes, others a pair or none.
#[test]
fn gpu_small_experts_of_many_rows_have_the_bits_of_few() {
    let Some(cuda) = gpu() else { return };
    let count = 9;
    for name in ["bf16", "affine4-g64", "affine5-g32", "q8_0"] {
        let format = quant::format(name).unwrap();
        for (hidden, inner) in [(128, 64), (1280, 320)] {
            let experts = experts(&cuda, format, hidden, inner);
            let run = |n: usize| {
                let mut scores = noise(12, n * count);
                // All rows but some choose the first one, and none the last.
                for (row, scores) in scores.chunks_mut(count).enumerate() {
                    scores[0] += if row % 7 == 3 { 0.0 } else { 9.0 };
                    scores[count - 1] = -9.0;
                }
                let scores = cuda.upload(n, count, &scores);
                let x = cuda.upload(n, hidden, &noise(13, n * hidden));
                cuda.download(&cuda.moe(&x, &scores, &experts)).into_owned()
            };
            let all = run(300);
            for n in [1, 8, 20, 72, 200] {
                let some = run(n);
                let differ = some.iter().zip(&all).position(|(a, b)| a != b);
                assert_eq!(differ, None, "{name}, {hidden} by {inner}, {n} rows of 300");
            }
        }
    }
    cuda.finish().unwrap();
}

/// A layer's ends and gates as the families ask for them, op by op or together, by few rows or
/// more than one block chooses experts for.
#[test]
fn gpu_small_ends_of_layers_have_the_bits_of_their_parts() {
    let Some(cuda) = gpu() else { return };
    let b: &dyn Backend = &cuda;
    let eps = 1e-6;
    for (name, hidden, inner) in [
        ("bf16", 128, 320),
        ("affine4-g64", 128, 320),
        ("affine4-g64", 640, 576),
        ("affine4-g64", 1024, 64),
        ("q8_0", 640, 576),
        ("f32", 128, 320),
    ] {
        let format = quant::format(name).unwrap();
        let experts = experts(b, format, hidden, inner);
        let weights = [1, 2, 3, 4, 5, 6].map(|seed| b.upload(1, hidden, &noise(seed, hidden)));
        let [post, first, second, third, of_dense, of_experts] = weights.each_ref();
        let wide = [60, 61].map(|seed| matrix(b, format, seed, [inner, hidden]));
        let [down, narrow] =
            [(62, inner), (63, 320)].map(|(seed, cols)| matrix(b, format, seed, [hidden, cols]));
        let [router, after, gate] = [(64, 9), (65, 70), (66, 320)]
            .map(|(seed, rows)| matrix(b, format, seed, [rows, hidden]));
        let run = |n: usize, alone: bool| {
            let tell = |x: Tensor| {
                if alone {
                    // What is looked at has been launched.
                    cuda.download(&x);
                }
                x
            };
            let norm = |x: &Tensor, w: &Tensor| tell(b.rms_norm(x, Some(w), x.cols(), eps));
            let dense = |x: &Tensor| {
                let gated = {
                    let [gate, up] = b.matmul_many(x, wide.each_ref());
                    tell(b.glu(tell(gate), &up, Activation::Silu))
                };
                tell(b.matmul(&gated, &down))
            };
            let up = |seed, cols: usize| cuda.upload(n, cols, &noise(seed, n * cols));
            let (x, h, y) = (up(1, hidden), up(2, hidden), up(3, hidden));
            let (scores, gates, inputs) = (up(4, 9), up(5, 1), up(6, 500));
            let mut made = Vec::new();
            // Experts and a shared one.
            let shared = dense(&h);
            let routed = tell(b.moe(&h, &scores, &experts));
            let gated = tell(b.gate_rows(&shared, &gates, Activation::Sigmoid));
            let sum = tell(b.add(routed, &gated));
            // What is fused away is not looked at again.
            made.push(shared);
            let x = tell(b.add(x, &sum));
            drop((sum, gated));
            let norms = [norm(&x, first), norm(&x, second)];
            made.push(tell(b.matmul(&norms[1], &after)));
            made.extend(norms);
            // Experts beside a dense block, whose inputs are norms of one row.
            let end = |x: Tensor, y: &Tensor, factor: f32, next: &Tensor| {
                let x = tell(b.scale(tell(b.add(norm(y, post), &x)), factor));
                let h = norm(&x, next);
                (x, h)
            };
            let (x, h) = end(x, &y, 1.0, first);
            let [for_router, for_experts] = [second, third].map(|w| norm(&x, w));
            let scores = tell(b.matmul(&for_router, &router));
            let block = dense(&h);
            let routed = tell(b.moe(&for_experts, &scores, &experts));
            let sum = tell(b.add(norm(&block, of_dense), &norm(&routed, of_experts)));
            drop(routed);
            made.extend([for_experts, block]);
            let (x, h) = end(x, &sum, 0.7, second);
            drop(sum);
            made.push(tell(b.matmul(&h, &after)));
            // A sum that is multiplied, and a gate of columns.
            let x = tell(b.add(norm(&y, post), &tell(x)));
            let p = tell(b.matmul(&x, &gate));
            let own = tell(b.columns(&inputs, 100, 320));
            let p = tell(b.glu(p, &own, Activation::GeluTanh));
            let y = tell(b.matmul(&p, &narrow));
            let (x, h) = end(x, &y, 0.7, first);
            made.extend([p, own, y, x, h]);
            made.iter()
                .map(|x| cuda.download(x).into_owned())
                .collect::<Vec<_>>()
        };
        let all = run(20, true);
        for n in [1, 3, 8, 12, 20] {
            for alone in [false, true] {
                for (i, (got, want)) in run(n, alone).iter().zip(&all).enumerate() {
                    let same = got[..] == want[..got.len()];
                    assert!(same, "tensor {i} of {n} rows in {name}, alone: {alone}");
                }
            }
        }
    }
    cuda.finish().unwrap();
}

/// Small enough for the tools that watch every access; also close to the reference.
#[test]
fn gpu_small_cases_of_every_kernel_are_close_to_the_reference() {
    let Some(cuda) = gpu() else { return };
    for name in ["affine4-g64", "affine5-g32", "affine8-g64", "bf16", "f32"] {
        let format = quant::format(name).unwrap();
        for n in [1, 3, 12, 40] {
            let (rows, cols) = (70, 320);
            let w = quant::encode(format, &noise(1, rows * cols), cols, Scalar::F16);
            let x = noise(2, n * cols);
            let y = |b: &dyn Backend| b.matmul(&b.upload(n, cols, &x), &b.matrix(&[w.view()]));
            close(
                &format!("{name} by {n}"),
                &cuda,
                &y(&cuda),
                &y(&Reference),
                PRODUCT,
            );
        }
        for n in [1, 4, 8, 40, 100] {
            let (got, want) = (mixture(&cuda, format, n), mixture(&Reference, format, n));
            close(
                &format!("experts in {name}, {n} rows"),
                &cuda,
                &got,
                &want,
                2.0 * PRODUCT,
            );
        }
    }
    let delta = [delta_steps(&cuda), delta_steps(&Reference)];
    close("delta rule", &cuda, &delta[0][0], &delta[1][0], 2e-5);
    let heads = AttentionCase {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        window: Some(100),
    };
    let long = AttentionCase {
        heads: 8,
        kv_heads: 1,
        head_dim: 256,
        window: None,
    };
    for format in [&quant::kv::BF16, quant::kv_format("q8_0").unwrap()] {
        for (old, new) in [(0, 70), (300, 3)] {
            heads.check(&cuda, old, new, format);
        }
        for (old, new) in [(0, 70), (2100, 1), (2100, 3)] {
            long.check(&cuda, old, new, format);
        }
    }
    cuda.finish().unwrap();
}

/// Tokens that stay on the device, chosen in every way, among all columns and among some.
#[test]
fn gpu_rows_without_a_token_are_told() {
    let Some(cuda) = gpu() else { return };
    let b: &dyn Backend = &cuda;
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    for cols in [5, 2048, 5000] {
        let sound: Vec<f32> = (0..cols).map(|i| (i * 37 % 101) as f32 * 0.1).collect();
        let with = |at: usize, value: f32| {
            let mut row = sound.clone();
            row[at] = value;
            row
        };
        let mut rows = vec![sound.clone(), with(0, -inf), vec![-inf; cols]];
        for at in [0, cols / 2, cols - 1] {
            rows.extend([nan, -nan, inf].map(|value| with(at, value)));
        }
        let x = b.upload(rows.len(), cols, &rows.concat());
        let want: Vec<bool> = rows.iter().map(|row| backend::gives_token(row)).collect();
        let told = |tokens: Vec<u32>| -> Vec<bool> {
            tokens.iter().map(|&t| t != backend::NO_TOKEN).collect()
        };
        assert_eq!(told(b.argmax(&x)), want, "argmax of {cols}");
        let ids = (0..cols as u32).map(|i| 3 * i).collect();
        for list in [None, Some(TokenList::new(b, ids))] {
            for (scale, top_p, top_k) in
                [(0.0, 1.0, 0), (1.0, 1.0, 0), (1.0, 0.9, 0), (1e-3, 0.9, 3)]
            {
                let choice = TokenChoice {
                    seed: 1,
                    position: 2,
                    scale,
                    top_p,
                    ln_min_p: f32::NEG_INFINITY,
                    top_k,
                };
                let tokens = b.choose_tokens(&x, list.as_ref(), &vec![choice; rows.len()]);
                let tokens = tokens.expect("a device that chooses");
                assert_eq!(told(tokens), want, "{cols}, {scale} {top_p} {top_k}");
            }
        }
    }
    cuda.finish().unwrap();
}

/// Needs no GPU: what a GPU would be asked to launch.
#[test]
fn masks_are_one_launch_and_rows_without_them_none() {
    let cuda = Cuda::dry_run(crate::DryRun::default());
    let cols = 5000;
    let some = TokenMask::new(cols, [1, 4999]);
    let masked = |masks: &[Option<TokenMask>]| {
        let x = cuda.upload(masks.len(), cols, &vec![0.0; masks.len() * cols]);
        cuda.take_launches();
        let masked = cuda.mask_logits(x, masks);
        assert_eq!((masked.rows(), masked.cols()), (masks.len(), cols));
        cuda.take_launches()
    };
    assert_eq!(masked(&[None, None]), [""; 0]);
    let other = TokenMask::new(cols, [2]);
    let launches = masked(&[None, Some(some.clone()), Some(some), Some(other)]);
    assert_eq!(
        launches,
        ["choose::mask_logits <<<3x4, 256, 0, 1>>> (@, @, 1388)"]
    );
    assert!(cuda.capabilities().masks);
}

/// Every file of kernels with the numbers that models need; for other
/// architectures than the first, those of common formats. Pipelined products start at
/// compute capability 9.0.
fn variants(first: bool, pipelined: bool) -> Vec<Kernel> {
    let with = |file, defines: &[(&'static str, usize)]| Kernel {
        file,
        name: "",
        defines: defines.to_vec(),
    };
    let attention = |file, kv, head| {
        let tiles = usize::from(head > 0);
        let depth = if head == 0 || head % 256 > 0 {
            0
        } else if first {
            4
        } else {
            2
        };
        with(
            file,
            &[
                ("KV_FORMAT", kv),
                ("TENSOR_CORES", tiles),
                ("HEAD_DIM", head),
                ("STAGES", depth),
            ],
        )
    };
    let prompts = |kv, head, stages| {
        let defines = [
            ("KV_FORMAT", kv),
            ("TENSOR_CORES", 1),
            ("HEAD_DIM", head),
            ("STAGES", stages),
        ];
        with(compile::ATTENTION_WGMMA, &defines)
    };
    let delta = |dk, dv, parts| {
        let threads = parts * dv / 4;
        let defines = [
            ("DK", dk),
            ("DV", dv),
            ("PARTS", parts),
            ("COLUMN_SPLITS", 4),
            ("TAPS", 4),
            ("THREADS", threads),
        ];
        with("delta", &defines)
    };
    let codes = |bits, group| Packing::Codes { bits, group };
    let alone = [
        "elementwise",
        "gemv_f32",
        "moe_route",
        "moe_combine",
        "choose",
    ];
    let mut all: Vec<Kernel> = alone.map(|file| with(file, &[])).into();
    for file in ["kv_append", "attention"] {
        all.extend([attention(file, 0, 0), attention(file, 2, 256)]);
        if first {
            let more = [(1, 128), (2, 64), (2, 512), (3, 64), (3, 256)];
            all.extend(more.map(|(kv, head)| attention(file, kv, head)));
        }
    }
    all.push(delta(128, 128, 8));
    let mut packings = vec![Packing::Plain, codes(4, 64)];
    if first {
        all.extend([prompts(2, 256, 5), prompts(1, 512, 8), delta(64, 256, 4)]);
        packings.push(Packing::E4m3 { group: 64 });
        packings.extend([2, 3, 4, 5, 6, 8].map(|bits| codes(bits, 32)));
    }
    for packing in packings {
        let tiles = Tiles::new(packing, 4096);
        let files = ["embed", "gemv", "moe_gemv", "moe_gemv_glu"];
        all.extend(files.map(|file| tiles.kernel(file, "")));
        if pipelined {
            all.push(tiles.kernel("gemv_pipelined", ""));
        }
        all.push(gemm::simple(packing, ""));
        if first {
            all.extend([64, 128].map(|rows| Warpgroups::new(packing, rows).kernel("")));
        }
    }
    all
}

/// Registers of a thread and instructions, at most, by how a kernel's name starts; 40 and
/// 1000 for others. More registers mean fewer threads at once, or spills. Instructions may
/// grow by a fifth or so; more is a loop unrolled by mistake. Look before you raise one.
const BUDGETS: &[(&str, usize, usize)] = &[
    ("gemm", 255, 3200),
    ("moe_gemv_8", 128, 1450),
    ("moe_gemv_16", 128, 1450),
    ("moe_gemm_wgmma", 168, 1700),
    ("moe_gemv_glu", 176, 4600),
    ("moe_gemv_pipelined", 128, 4600),
    ("gemv_pipelined", 128, 4600),
    ("gemv", 112, 2200),
    ("choose_cut", 64, 3800),
    ("choose_noise", 40, 2700),
    ("choose_best", 40, 1300),
    ("attention_decode_pages", 168, 2900),
    ("attention_decode", 232, 5500),
    ("attention_pipelined", 200, 7400),
    ("attention_wgmma", 168, 6000),
    ("attention", 204, 5500),
    ("delta_rule", 112, 2400),
    ("delta_fused", 128, 4000),
    ("delta_conv", 40, 1500),
    ("add_norm", 64, 2600),
    ("rms_norm_glu", 64, 2750),
    ("rms_norm", 40, 1400),
    ("moe_shared_norm", 64, 3200),
    ("moe_dense_norm", 64, 3400),
    ("glu", 40, 2600),
    ("norm_rope_append", 48, 2200),
    ("group", 48, 1700),
    ("route", 40, 4200),
];

/// Needs no GPU, and so no name by which the tests of one are chosen.
#[test]
fn every_kernel_compiles_within_its_budget() {
    if !compile::is_present() {
        eprintln!("!!! SKIPPED, no kernel is compiled: NVRTC is not on LD_LIBRARY_PATH");
        return;
    }
    let mut over = Vec::new();
    for arch in [90, 80, 100] {
        for kernel in variants(arch == 90, arch >= 90) {
            let report = compile::report(arch, &kernel).unwrap();
            assert!(!report.is_empty(), "{kernel} has kernels");
            for (name, usage) in report {
                let budget = BUDGETS.iter().find(|(start, ..)| name.starts_with(start));
                let (registers, instructions) = budget.map_or((40, 1000), |b| (b.1, b.2));
                // What its warps give up and take (setmaxnreg) adds up to its budget and no less.
                let takes_all = name != "attention_wgmma" || usage.registers == registers;
                let few = usage.registers <= registers && usage.instructions <= instructions;
                let fits = few && takes_all;
                // Of heads of 512 columns, four results wait there while a split is read.
                let stack = if name == "attention_wgmma" { 16 } else { 0 };
                if !fits || usage.stack > stack {
                    over.push(format!("{kernel}{name} for sm_{arch}: {usage:?}"));
                }
            }
        }
    }
    assert!(over.is_empty(), "over their budgets:\n{}", over.join("\n"));
}

/// Needs no GPU either.
#[test]
fn every_argument_has_the_layout_of_its_kernels() {
    if !compile::is_present() {
        eprintln!("!!! SKIPPED, no layout is checked: NVRTC is not on LD_LIBRARY_PATH");
        return;
    }
    // One variant of each file.
    let (mut files, mut found) = (HashSet::new(), HashSet::new());
    for kernel in variants(true, true) {
        if files.insert(kernel.file) {
            found.extend(compile::check_layouts(90, &kernel).unwrap());
        }
    }
    for (name, ..) in args::layouts() {
        assert!(found.contains(name), "no kernel has a struct {name}");
    }
}
