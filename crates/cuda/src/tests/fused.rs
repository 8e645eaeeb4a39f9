//! Fused ops have the bits of their parts.

use super::experts::{experts, matrix, mixture};
use super::{gpu, noise};
use backend::{Activation, Backend, Batch, Ops, Position, Record, Rope, Row, Store, Tensor};
use quant::Scalar;

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
