//! Norms of rows and heads, and rotary embeddings.

use super::{Noise, Pair, independent};
use crate::{Backend, Batch, POSITION_AXES, Position, Rope, Row};

pub(super) fn rms_norm_equals(got: &dyn Backend, want: &dyn Backend) {
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

pub(super) fn rms_norm_rows_are_independent(b: &dyn Backend) {
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

pub(super) fn layer_norm_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(37);
    for cols in [1, 5, 16, 24, 100, 1152, 6912] {
        for n in [1, 3, 40] {
            let mut x = noise.values(n * cols, 3.0);
            x[..cols].fill(0.5);
            let (weight, bias) = (noise.values(cols, 1.0), noise.values(cols, 1.0));
            for eps in [1e-6, 0.1] {
                pair.compare(
                    "layer_norm",
                    &format!("{n} rows of {cols}, eps {eps}"),
                    |b| {
                        let (weight, bias) = (b.upload(1, cols, &weight), b.upload(1, cols, &bias));
                        b.layer_norm(&b.upload(n, cols, &x), &weight, &bias, eps)
                    },
                );
            }
        }
    }
}

pub(super) fn layer_norm_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(38);
    for cols in [24, 960, 6912] {
        let n = 41;
        let x = noise.values(n * cols, 2.0);
        let weight = b.upload(1, cols, &noise.values(cols, 1.0));
        let bias = b.upload(1, cols, &noise.values(cols, 1.0));
        independent("layer_norm", &format!("rows of {cols}"), b, n, |r| {
            let part = b.upload(r.len(), cols, &x[r.start * cols..r.end * cols]);
            b.layer_norm(&part, &weight, &bias, 1e-6)
        });
    }
}

pub(super) fn rope_equals(got: &dyn Backend, want: &dyn Backend) {
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
        let text = Rope {
            head_dim,
            pair_offset,
            frequencies,
            axes: Vec::new(),
        };
        // Axes that take turns, and one after the other.
        let by_turns = (0..pairs).map(|j| (j % POSITION_AXES) as u8).collect();
        let in_sections = (0..pairs)
            .map(|j| (POSITION_AXES * j / pairs) as u8)
            .collect();
        let with = |axes: Vec<u8>| Rope {
            axes,
            ..text.clone()
        };
        let ropes = [with(Vec::new()), with(by_turns), with(in_sections)];
        for ((n, heads), rope) in [(1, 3), (5, 1), (40, 4)]
            .into_iter()
            .flat_map(|shape| ropes.iter().map(move |rope| (shape, rope)))
        {
            let x = noise.values(n * heads * head_dim, 4.0);
            let rows: Vec<Row> = (0..n)
                .map(|i| Row {
                    position: Position::new(
                        [(); POSITION_AXES].map(|()| noise.below(200_000) as u32 * (i as u32 % 3)),
                    ),
                    ..Row::text(i as u32)
                })
                .collect();
            let batch = Batch {
                rows,
                ..Batch::default()
            };
            let case = format!(
                "{n} rows of {heads} heads of {head_dim}, {pairs} pairs {pair_offset} apart, axes {:?}",
                rope.axes
            );
            pair.compare("rope", &case, |b| {
                b.rope(b.upload(n, heads * head_dim, &x), rope, &batch)
            });
        }
    }
}

pub(super) fn rope_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(14);
    let rope = Rope {
        head_dim: 48,
        pair_offset: 24,
        frequencies: (0..20).map(|j| 0.7f32.powi(j)).collect(),
        axes: Vec::new(),
    };
    let (n, cols) = (41, 96);
    let x = noise.values(n * cols, 2.0);
    independent("rope", "", b, n, |r| {
        let rows = r
            .clone()
            .map(|i| Row {
                position: Position::text(1000 * i as u32),
                ..Row::text(i as u32)
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
