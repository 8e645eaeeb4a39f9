//! Attention to the rows right before a row.

use super::{Noise, Pair};
use crate::{Backend, NearAttention, Tensor};

/// Queries, keys and values of `n` rows, and keys of distances.
struct Inputs {
    qkv: [Vec<f32>; 3],
    relative: Vec<f32>,
    cols: usize,
    attention: NearAttention,
}

impl Inputs {
    fn new(noise: &mut Noise, n: usize, head_dim: usize, attention: NearAttention) -> Self {
        let cols = attention.heads * head_dim;
        Inputs {
            qkv: [2.0, 3.0, 1.0].map(|spread| noise.values(n * cols, spread)),
            relative: noise.values(attention.window * cols, 1.0),
            cols,
            attention,
        }
    }

    /// Rows `rows` alone.
    fn attend(&self, b: &dyn Backend, rows: std::ops::Range<usize>) -> Tensor {
        let part = rows.start * self.cols..rows.end * self.cols;
        let [q, k, v] = self.qkv.each_ref().map(|x| {
            let part = &x[part.clone()];
            b.upload(rows.len(), self.cols, part)
        });
        let relative = b.upload(self.attention.window, self.cols, &self.relative);
        b.attend_near(&q, &k, &v, &relative, &self.attention)
    }
}

pub(super) fn attend_near_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(51);
    for (heads, head_dim) in [(1, 1), (3, 5), (2, 16), (4, 24), (8, 128)] {
        for (window, cap) in [(1, 50.0), (3, 0.7), (12, 50.0), (32, 5.0)] {
            let attention = NearAttention { heads, window, cap };
            for n in [1, 2, 40] {
                let inputs = Inputs::new(&mut noise, n, head_dim, attention);
                let case = format!("{n} rows of {heads} heads of {head_dim}, {window} rows, {cap}");
                pair.compare("attend_near", &case, |b| inputs.attend(b, 0..n));
            }
        }
    }
}

pub(super) fn attend_near_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(52);
    let (heads, window, cap, n) = (2, 12, 50.0, 41);
    let attention = NearAttention { heads, window, cap };
    let inputs = Inputs::new(&mut noise, n, 24, attention);
    let all = b.download(&inputs.attend(b, 0..n)).into_owned();
    // A row sees nothing behind it, and nothing further ahead than the window.
    for row in [0, 1, 11, 12, 30, 40] {
        for end in [row + 1, n] {
            let first = attention.visible(row).start;
            let part = b.download(&inputs.attend(b, first..end)).into_owned();
            let of = |values: &[f32], row: usize| {
                let row = &values[row * inputs.cols..][..inputs.cols];
                row.iter().map(|x| x.to_bits()).collect::<Vec<_>>()
            };
            assert_eq!(
                of(&part, row - first),
                of(&all, row),
                "attend_near (row {row} of rows {first}..{end})"
            );
        }
    }
}
