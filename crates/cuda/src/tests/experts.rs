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
    for name in [
        "bf16",
        "affine4-g64",
        "affine5-g32",
        "q8_0",
        "tq3_1s",
        "tq4_1s",
    ] {
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
