//! Mixtures of experts.

use super::{gpu, noise};
use backend::{Activation, Backend, Expert, Experts, Matrix, Ops, Record, Store, Tensor};
use quant::Scalar;

pub(super) fn matrix(
    b: &dyn Backend,
    format: &'static quant::Format,
    seed: u32,
    shape: [usize; 2],
) -> Matrix {
    let w = quant::encode(
        format,
        &noise(seed, shape[0] * shape[1]),
        shape[1],
        Scalar::F16,
    );
    b.matrix(&[w.view()])
}

/// 9 experts, 3 a row.
pub(super) fn experts(
    b: &dyn Backend,
    format: &'static quant::Format,
    hidden: usize,
    inner: usize,
) -> Experts {
    experts_of(b, [format; 2], [hidden, inner], 9, 3)
}

/// `count` experts, `top_k` a row, with gate and up in the first format and down in the second.
fn experts_of(
    b: &dyn Backend,
    [first, second]: [&'static quant::Format; 2],
    [hidden, inner]: [usize; 2],
    count: u16,
    top_k: usize,
) -> Experts {
    let one = |e: u16| Expert {
        gate_up: matrix(b, first, 20 + u32::from(e), [2 * inner, hidden]),
        down: matrix(b, second, 40 + u32::from(e), [hidden, inner]),
    };
    Experts {
        experts: (0..count).map(one).collect(),
        top_k,
        scale: Some((0..count).map(|e| 0.5 + f32::from(e)).collect()),
        activation: Activation::GeluTanh,
    }
}

/// A mixture, one of whose experts is chosen by most rows.
pub(super) fn mixture(b: &dyn Backend, format: &'static quant::Format, n: usize) -> Tensor {
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
    let shapes = &[[128, 64], [1280, 320]][..];
    for (first, second, shapes) in [
        ("bf16", "bf16", shapes),
        ("affine4-g64", "affine4-g64", shapes),
        ("affine5-g32", "affine5-g32", shapes),
        ("q8_0", "q8_0", shapes),
        ("tq3_1s", "tq3_1s", shapes),
        ("tq4_1s", "tq4_1s", shapes),
        // Second products that the pipelines of few rows do not take.
        ("affine4-g64", "bf16", shapes),
        ("q8_0", "f32", shapes),
        ("affine4-g64", "affine4-g64", &[[1280, 2112]]),
    ] {
        let formats = [first, second].map(|name| quant::format(name).unwrap());
        for &shape in shapes {
            let [hidden, _] = shape;
            let experts = experts_of(&cuda, formats, shape, 9, 3);
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
                let what = format!("{first} and {second}, {shape:?}, {n} rows of 300");
                assert_eq!(differ, None, "{what}");
            }
        }
    }
    cuda.finish().unwrap();
}

/// Scores that fit the registers of a warp and that do not, with many equal ones: whichever kernels route few rows, by
/// themselves or beside others, the first experts of equal ones are chosen, with the same weights.
#[test]
fn gpu_small_rows_choose_the_same_experts_however_many_there_are() {
    let Some(cuda) = gpu() else { return };
    let format = quant::format("affine4-g64").unwrap();
    let shapes = [
        (9, 1, [64, 64]),
        (40, 8, [64, 64]),
        (300, 10, [64, 64]),
        (600, 4, [64, 64]),
        // Eight rows of these go through pipelines.
        (24, 10, [2048, 512]),
    ];
    for (count, top_k, shape) in shapes {
        let experts = experts_of(&cuda, [format; 2], shape, count, top_k);
        let count = usize::from(count);
        let run = |n: usize| {
            let scores = noise(12, n * count);
            let scores: Vec<f32> = scores.iter().map(|v| (4.0 * v).round() / 4.0).collect();
            let scores = cuda.upload(n, count, &scores);
            let x = cuda.upload(n, shape[0], &noise(13, n * shape[0]));
            cuda.download(&cuda.moe(&x, &scores, &experts)).into_owned()
        };
        let all = run(20);
        for n in [1, 2, 3, 5, 6, 7, 8, 12] {
            let some = run(n);
            let differ = some.iter().zip(&all).position(|(a, b)| a != b);
            assert_eq!(differ, None, "{count} experts, {n} rows of 20");
        }
    }
    cuda.finish().unwrap();
}
