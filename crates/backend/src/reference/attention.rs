//! Attention, key by key: tiles, and splits merged from the left.

use super::{KvRows, dot, tensor, values};
use crate::math::{self, sum_tree};
use crate::{Attention, Batch, Kv, KvSpec, NearAttention, PAGE_ROWS, SPLIT_ROWS, Tensor};

/// A running softmax-weighted sum.
struct Partial {
    max: f32,
    sum: f32,
    out: Vec<f32>,
}

impl Partial {
    fn new(head_dim: usize) -> Self {
        Partial {
            max: f32::NEG_INFINITY,
            sum: 0.0,
            out: vec![0.0; head_dim],
        }
    }

    fn rescale(&mut self, max: f32) {
        let c = math::exp(self.max - max);
        self.max = max;
        self.sum *= c;
        self.out.iter_mut().for_each(|o| *o *= c);
    }

    fn merge(&mut self, mut right: Partial) {
        let max = if right.max > self.max {
            right.max
        } else {
            self.max
        };
        self.rescale(max);
        right.rescale(max);
        self.sum += right.sum;
        self.out
            .iter_mut()
            .zip(&right.out)
            .for_each(|(o, r)| *o += r);
    }
}

/// [`crate::Ops::attend`].
pub(super) fn attend(q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor {
    let KvSpec {
        heads: kv_heads,
        head_dim,
        ..
    } = kv.spec;
    let heads = attention.heads;
    assert_eq!(
        (q.rows(), q.cols()),
        (batch.n_rows(), heads * head_dim),
        "shape of the queries"
    );
    let rows = kv
        .storage
        .downcast_ref::<KvRows>()
        .expect("memory of this backend");
    let mut out = Vec::with_capacity(q.rows() * q.cols());
    for (s, seq) in batch.seqs.iter().enumerate() {
        for (r, head) in seq
            .rows
            .clone()
            .flat_map(|r| (0..heads).map(move |h| (r, h)))
        {
            let mut q = values(q)[(r * heads + head) * head_dim..][..head_dim].to_vec();
            if let Some(rotation) = kv.spec.format.k.rotation {
                rotation.rotate(&mut q);
            }
            let visible = attention.visible(batch.rows[r]);
            let at = |index: usize| {
                let page = batch.page(s, attention.group, index);
                ((page * kv_heads + head / (heads / kv_heads)) * PAGE_ROWS + index % PAGE_ROWS)
                    * head_dim
            };
            let mut total: Option<Partial> = None;
            for split in visible.start / SPLIT_ROWS..visible.end.div_ceil(SPLIT_ROWS) {
                let mut part = Partial::new(head_dim);
                for tile in (split * SPLIT_ROWS..(split + 1) * SPLIT_ROWS).step_by(PAGE_ROWS) {
                    let keys = tile.max(visible.start)..(tile + PAGE_ROWS).min(visible.end);
                    if keys.is_empty() {
                        continue;
                    }
                    let scores: Vec<f32> = keys
                        .clone()
                        .map(|i| dot(&q, &rows.k[at(i)..][..head_dim]) * attention.scale)
                        .collect();
                    let max = scores
                        .iter()
                        .fold(part.max, |m, &s| if s > m { s } else { m });
                    part.rescale(max);
                    let mut lanes = [0.0; 16];
                    for (i, score) in keys.zip(scores) {
                        let p = math::exp(score - max);
                        lanes[i % 16] += p;
                        for (o, v) in part.out.iter_mut().zip(&rows.v[at(i)..][..head_dim]) {
                            *o = p.mul_add(*v, *o);
                        }
                    }
                    part.sum += sum_tree(lanes);
                }
                match &mut total {
                    None => total = Some(part),
                    Some(total) => total.merge(part),
                }
            }
            let total = total.expect("a row sees at least one key");
            let at = out.len();
            out.extend(total.out.iter().map(|o| o / total.sum));
            if let Some(rotation) = kv.spec.format.v.rotation {
                rotation.undo(&mut out[at..]);
            }
        }
    }
    tensor(q.rows(), q.cols(), out)
}

/// [`crate::Ops::attend_near`].
pub(super) fn attend_near(
    [q, k, v]: [&Tensor; 3],
    relative: &Tensor,
    attention: &NearAttention,
) -> Tensor {
    attention.check(q, k, v, relative);
    let (n, cols) = (q.rows(), q.cols());
    let e = cols / attention.heads;
    let mut out = vec![0.0f32; n * cols];
    for (row, head) in (0..n).flat_map(|r| (0..attention.heads).map(move |h| (r, h))) {
        let of = |x: &Tensor, row: usize| values(x)[row * cols + head * e..][..e].to_vec();
        let (q, seen) = (of(q, row), attention.visible(row));
        let score = |key: usize| {
            let (k, r) = (of(k, key), of(relative, row - key));
            let mut lanes = [0.0f32; 16];
            for (i, q) in q.iter().enumerate() {
                lanes[i % 16] = q.mul_add(k[i] + r[i], lanes[i % 16]);
            }
            attention.cap * math::tanh(sum_tree(lanes) / attention.cap)
        };
        let scores: Vec<f32> = seen.clone().map(score).collect();
        let larger = |a: f32, &b: &f32| if b > a { b } else { a };
        let max = scores.iter().fold(f32::NEG_INFINITY, larger);
        let (mut sum, o) = (0.0, &mut out[row * cols + head * e..][..e]);
        for (s, key) in scores.iter().zip(seen) {
            let p = math::exp(s - max);
            sum += p;
            let v = of(v, key);
            o.iter_mut().zip(v).for_each(|(o, v)| *o = p.mul_add(v, *o));
        }
        o.iter_mut().for_each(|o| *o /= sum);
    }
    tensor(n, cols, out)
}
