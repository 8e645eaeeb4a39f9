//! Ops of single values, and those that move rows and columns.

use super::{Noise, Pair, independent};
use crate::{Activation, Backend, Batch, MediaRow, Tensor};

/// A function of one or two tensors.
pub(super) type Elementwise = fn(&dyn Backend, Tensor, &Tensor) -> Tensor;

pub(super) const ELEMENTWISE: &[(&str, Elementwise)] = &[
    ("add", |b, x, y| b.add(x, y)),
    ("scale", |b, x, _| b.scale(x, 0.37)),
    ("glu silu", |b, x, y| b.glu(x, y, Activation::Silu)),
    ("glu gelu", |b, x, y| b.glu(x, y, Activation::GeluTanh)),
    ("glu sigmoid", |b, x, y| b.glu(x, y, Activation::Sigmoid)),
    ("glu exact gelu", |b, x, y| b.glu(x, y, Activation::Gelu)),
    ("activate silu", |b, x, _| b.activate(x, Activation::Silu)),
    ("activate gelu", |b, x, _| {
        b.activate(x, Activation::GeluTanh)
    }),
    ("activate sigmoid", |b, x, _| {
        b.activate(x, Activation::Sigmoid)
    }),
    ("activate exact gelu", |b, x, _| {
        b.activate(x, Activation::Gelu)
    }),
    ("clamp", |b, x, _| b.clamp(x, -1.5, 1.2)),
    ("softcap", |b, x, _| b.softcap(x, 30.0)),
];

pub(super) fn elementwise_equals(got: &dyn Backend, want: &dyn Backend) {
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
    let clamped = got.clamp(
        got.upload(1, 3, &[f32::NAN, f32::INFINITY, -7.0]),
        -1.0,
        2.0,
    );
    let clamped = got.download(&clamped);
    assert!(
        clamped[0].is_nan() && clamped[1..] == [2.0, -1.0],
        "clamp keeps NaN: {clamped:?}"
    );
}

pub(super) fn affine_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(35);
    for (n, cols) in [(1, 1), (3, 17), (17, 48), (9, 5000)] {
        let x = noise.values(n * cols, 20.0);
        let (factor, shift) = (noise.values(cols, 3.0), noise.values(cols, 20.0));
        for with in [true, false] {
            let case = format!("{n} rows of {cols}, factor: {with}");
            pair.compare("affine", &case, |b| {
                let (factor, shift) = (b.upload(1, cols, &factor), b.upload(1, cols, &shift));
                b.affine(b.upload(n, cols, &x), with.then_some(&factor), &shift)
            });
        }
    }
}

pub(super) fn affine_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(36);
    let (n, cols) = (41, 1001);
    let x = noise.values(n * cols, 20.0);
    let factor = b.upload(1, cols, &noise.values(cols, 3.0));
    let shift = b.upload(1, cols, &noise.values(cols, 20.0));
    independent("affine", "", b, n, |r| {
        let part = b.upload(r.len(), cols, &x[r.start * cols..r.end * cols]);
        b.affine(part, Some(&factor), &shift)
    });
}

pub(super) fn moves_equal(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(6);
    for (n, cols) in [(1, 1), (7, 19), (17, 64)] {
        let (x, y) = (
            noise.values(n * cols, 1.0),
            noise.values(n * (cols + 3), 1.0),
        );
        let case = format!("{n} rows of {cols}");
        pair.compare("upload", &case, |b| b.upload(n, cols, &x));
        for source in [0, 1] {
            let media = |row: usize| MediaRow {
                row: row as u32,
                source: row as u32 / 3 % 2,
                embedding: (n - 1 - row) as u32,
            };
            let batch = Batch {
                media: (0..n).filter(|row| row % 3 != 1).map(media).collect(),
                ..Batch::default()
            };
            pair.compare("replace_rows", &format!("{case}, source {source}"), |b| {
                let embeddings = b.upload(n, cols, &y[..n * cols]);
                b.replace_rows(b.upload(n, cols, &x), &embeddings, source, &batch)
            });
        }
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

pub(super) fn elementwise_rows_are_independent(b: &dyn Backend) {
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
