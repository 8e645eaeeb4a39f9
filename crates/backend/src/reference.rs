//! The definition of every op, as plain loops. Slow, and meant to be read.

mod attention;
mod delta;

use crate::math::{self, sum_tree};
use crate::{
    Activation, Attention, Backend, Batch, Delta, DeltaSpec, DeltaWeights, DeviceError, Kv, KvSpec,
    MAX_TENTATIVE, Matrix, NO_TOKEN, NearAttention, Ops, PAGE_ROWS, Record, Rope, Sample, Store,
    Tensor, TokenChoice, TokenList, gives_token,
};
use delta::{DeltaSlot, convolve, delta_head};
use quant::Stored;
use std::borrow::Cow;

/// The slow backend that defines the fast ones' results.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

/// Keys and values as they read back from the cache's format:
/// `[pages, K, PAGE_ROWS, e]` each.
struct KvRows {
    k: Vec<f32>,
    v: Vec<f32>,
}

/// Which keys or values of a layer are those of page `page`.
fn page_values(spec: &KvSpec, page: usize) -> std::ops::Range<usize> {
    let n = spec.heads * PAGE_ROWS * spec.head_dim;
    page * n..(page + 1) * n
}

/// `sum x` in 16 lanes.
fn sum(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for chunk in x.chunks(16) {
        lanes.iter_mut().zip(chunk).for_each(|(lane, x)| *lane += x);
    }
    sum_tree(lanes)
}

/// `sum x²` in 16 lanes.
fn sum_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    for chunk in x.chunks(16) {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = x.mul_add(x, *lane);
        }
    }
    sum_tree(lanes)
}

fn values(x: &Tensor) -> &[f32] {
    x.storage::<Vec<f32>>()
}

fn tensor(rows: usize, cols: usize, values: Vec<f32>) -> Tensor {
    assert_eq!(values.len(), rows * cols, "one value an element");
    Tensor::new(rows, cols, Box::new(values), None)
}

fn map(mut x: Tensor, f: impl Fn(usize, f32) -> f32) -> Tensor {
    for (i, x) in x.storage_mut::<Vec<f32>>().iter_mut().enumerate() {
        *x = f(i, *x);
    }
    x
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |acc, (&a, &b)| a.mul_add(b, acc))
}

impl Backend for Reference {
    fn name(&self) -> String {
        "reference".into()
    }
}

impl Store for Reference {
    fn matrix(&self, parts: &[Stored<'_>]) -> Matrix {
        let cols = parts[0].cols;
        assert!(parts.iter().all(|p| p.cols == cols), "parts of one width");
        let values: Vec<f32> = parts.iter().flat_map(Stored::to_f32).collect();
        let rows = parts.iter().map(|p| p.rows).sum();
        Matrix::new(
            rows,
            cols,
            parts[0].format.name,
            4 * values.len(),
            Box::new(values),
        )
    }

    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Tensor {
        tensor(rows, cols, values.to_vec())
    }

    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
        Cow::Borrowed(values(x))
    }

    fn kv(&self, spec: KvSpec) -> Kv {
        let n = spec.pages * spec.heads * PAGE_ROWS * spec.head_dim;
        Kv {
            spec,
            storage: Box::new(KvRows {
                k: vec![0.0; n],
                v: vec![0.0; n],
            }),
        }
    }

    fn delta(&self, spec: DeltaSpec) -> Delta {
        let slot = DeltaSlot {
            state: vec![0.0; spec.value_heads * spec.key_dim * spec.value_dim],
            history: vec![0.0; (spec.conv_taps - 1 + MAX_TENTATIVE) * spec.channels()],
            updates: Vec::new(),
        };
        Delta {
            spec,
            storage: Box::new(vec![slot; spec.slots]),
        }
    }

    fn kv_copy(&self, kv: &mut Kv, from: usize, to: usize) {
        let bytes = self.kv_save(kv, from);
        self.kv_load(kv, to, &bytes);
    }

    fn kv_save(&self, kv: &Kv, page: usize) -> Vec<u8> {
        let rows = kv.storage.downcast_ref::<KvRows>();
        let rows = rows.expect("memory of this backend");
        let page = page_values(&kv.spec, page);
        let values = rows.k[page.clone()].iter().chain(&rows.v[page]);
        values.flat_map(|value| value.to_le_bytes()).collect()
    }

    fn kv_load(&self, kv: &mut Kv, page: usize, bytes: &[u8]) -> bool {
        let rows = kv.storage.downcast_mut::<KvRows>();
        let rows = rows.expect("memory of this backend");
        let page = page_values(&kv.spec, page);
        if bytes.len() != 2 * size_of::<f32>() * page.len() {
            return false;
        }
        let values = rows.k[page.clone()].iter_mut().chain(&mut rows.v[page]);
        for (value, bytes) in values.zip(bytes.as_chunks().0) {
            *value = f32::from_le_bytes(*bytes);
        }
        true
    }

    fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize) {
        let slots = delta.storage.downcast_mut::<Vec<DeltaSlot>>();
        let slots = slots.expect("memory of this backend");
        slots[to] = slots[from].clone();
    }

    fn delta_save(&self, delta: &Delta, slot: usize) -> Vec<u8> {
        let slots = delta.storage.downcast_ref::<Vec<DeltaSlot>>();
        slots.expect("memory of this backend")[slot].save()
    }

    fn delta_load(&self, delta: &mut Delta, slot: usize, bytes: &[u8]) -> bool {
        let slots = delta.storage.downcast_mut::<Vec<DeltaSlot>>();
        let slots = slots.expect("memory of this backend");
        slots[slot].load(&delta.spec, bytes)
    }

    fn scratch(&self, rows: usize, cols: usize) -> Tensor {
        tensor(rows, cols, vec![f32::NAN; rows * cols])
    }
}

impl Ops for Reference {
    fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
        let w = table.storage::<Vec<f32>>();
        let out = tokens
            .iter()
            .flat_map(|&t| &w[t as usize * table.cols..(t as usize + 1) * table.cols])
            .map(|w| w * scale)
            .collect();
        tensor(tokens.len(), table.cols, out)
    }

    fn replace_rows(
        &self,
        mut x: Tensor,
        embeddings: &Tensor,
        source: u32,
        batch: &Batch,
    ) -> Tensor {
        assert_eq!(x.cols(), embeddings.cols(), "rows of one width");
        let cols = x.cols();
        let out = x.storage_mut::<Vec<f32>>();
        for media in batch.media.iter().filter(|m| m.source == source) {
            let (to, from) = (media.row as usize * cols, media.embedding as usize * cols);
            out[to..to + cols].copy_from_slice(&values(embeddings)[from..from + cols]);
        }
        x
    }

    fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
        for (w, y) in w.iter().zip(y) {
            assert_eq!(
                (w.cols, w.rows, x.rows()),
                (x.cols(), y.cols(), y.rows()),
                "shapes of a product"
            );
            let weights = w.storage::<Vec<f32>>();
            let out = y.storage_mut::<Vec<f32>>();
            for (x, y) in values(x)
                .chunks_exact(w.cols)
                .zip(out.chunks_exact_mut(w.rows))
            {
                for (w, y) in weights.chunks_exact(w.cols).zip(y) {
                    *y = dot(w, x);
                }
            }
        }
    }

    fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
        let weights = w.storage::<Vec<f32>>();
        let out: Vec<f32> = values(x)
            .chunks_exact(w.cols)
            .zip(ids)
            .flat_map(|(x, ids)| {
                ids.iter()
                    .map(move |&id| dot(&weights[id as usize * w.cols..][..w.cols], x))
            })
            .collect();
        tensor(x.rows(), ids.first().map_or(0, Vec::len), out)
    }

    fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor {
        assert!(
            x.cols().is_multiple_of(width),
            "whole runs of the norm's width"
        );
        let mut out = values(x).to_vec();
        for run in out.chunks_exact_mut(width) {
            let inverse = 1.0 / (sum_squares(run) / width as f32 + eps).sqrt();
            run.iter_mut().for_each(|x| *x *= inverse);
            if let Some(weight) = weight {
                run.iter_mut()
                    .zip(values(weight))
                    .for_each(|(x, w)| *x *= w);
            }
        }
        tensor(x.rows(), x.cols(), out)
    }

    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Tensor {
        let cols = x.cols();
        let want = (1, cols);
        assert_eq!(
            (weight.rows(), weight.cols()),
            want,
            "shape of a norm's weight"
        );
        assert_eq!((bias.rows(), bias.cols()), want, "shape of a norm's bias");
        let mut out = values(x).to_vec();
        for row in out.chunks_exact_mut(cols) {
            let mean = sum(row) / cols as f32;
            row.iter_mut().for_each(|x| *x -= mean);
            let inverse = 1.0 / (sum_squares(row) / cols as f32 + eps).sqrt();
            let learned = values(weight).iter().zip(values(bias));
            for (x, (w, b)) in row.iter_mut().zip(learned) {
                *x = (*x * inverse).mul_add(*w, *b);
            }
        }
        tensor(x.rows(), cols, out)
    }

    fn affine(&self, x: Tensor, factor: Option<&Tensor>, shift: &Tensor) -> Tensor {
        let cols = x.cols();
        for row in factor.into_iter().chain([shift]) {
            assert_eq!(
                (row.rows(), row.cols()),
                (1, cols),
                "a value for each column"
            );
        }
        let (factor, shift) = (factor.map(values), values(shift));
        map(x, |i, x| match factor {
            Some(factor) => x.mul_add(factor[i % cols], shift[i % cols]),
            None => x + shift[i % cols],
        })
    }

    fn activate(&self, x: Tensor, activation: Activation) -> Tensor {
        map(x, |_, x| activation.apply(x))
    }

    fn clamp(&self, x: Tensor, low: f32, high: f32) -> Tensor {
        // Not `f32::clamp`, which panics.
        map(x, |_, x| match () {
            () if x < low => low,
            () if x > high => high,
            () => x,
        })
    }

    fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
        assert_eq!(
            (x.rows(), x.cols()),
            (y.rows(), y.cols()),
            "shapes of a sum"
        );
        let y = values(y);
        map(x, |i, x| x + y[i])
    }

    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        map(x, |_, x| x * factor)
    }

    fn glu(&self, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
        assert_eq!(
            (gate.rows(), gate.cols()),
            (x.rows(), x.cols()),
            "shapes of a gate"
        );
        let x = values(x);
        map(gate, |i, g| activation.apply(g) * x[i])
    }

    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        // Of what is not finite `x * 0` is NaN, which tanh is not.
        map(x, |_, x| cap * math::tanh(x / cap) + x * 0.0)
    }

    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        let out = rows
            .iter()
            .flat_map(|r| &values(x)[r * x.cols()..(r + 1) * x.cols()])
            .copied()
            .collect();
        tensor(rows.len(), x.cols(), out)
    }

    fn columns(&self, x: &Tensor, first: usize, cols: usize) -> Tensor {
        let out = values(x)
            .chunks_exact(x.cols())
            .flat_map(|row| &row[first..first + cols])
            .copied()
            .collect();
        tensor(x.rows(), cols, out)
    }

    fn concat(&self, a: &Tensor, b: &Tensor) -> Tensor {
        assert_eq!(a.rows(), b.rows(), "rows to join");
        let rows = values(a)
            .chunks_exact(a.cols())
            .zip(values(b).chunks_exact(b.cols()));
        let out = rows.flat_map(|(a, b)| a.iter().chain(b)).copied().collect();
        tensor(a.rows(), a.cols() + b.cols(), out)
    }

    fn rope(&self, mut x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
        assert_eq!(x.rows(), batch.n_rows(), "a row for each of the step's");
        assert!(x.cols().is_multiple_of(rope.head_dim), "whole heads");
        rope.check();
        let cols = x.cols();
        for (row, x) in batch
            .rows
            .iter()
            .zip(x.storage_mut::<Vec<f32>>().chunks_exact_mut(cols))
        {
            for head in x.chunks_exact_mut(rope.head_dim) {
                for (j, f) in rope.frequencies.iter().enumerate() {
                    let position = row.position.axes()[rope.axis(j)];
                    let (sin, cos) = math::sin_cos(position as f32 * f);
                    let (a, b) = (head[j], head[j + rope.pair_offset]);
                    head[j] = (-b).mul_add(sin, a * cos);
                    head[j + rope.pair_offset] = a.mul_add(sin, b * cos);
                }
            }
        }
        x
    }

    fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch) {
        let KvSpec {
            heads,
            head_dim,
            format,
            ..
        } = kv.spec;
        assert_eq!(
            (k.cols(), v.cols()),
            (heads * head_dim, heads * head_dim),
            "columns of keys and values"
        );
        let rows = kv
            .storage
            .downcast_mut::<KvRows>()
            .expect("memory of this backend");
        let mut stored = Vec::new();
        for (s, seq) in batch.seqs.iter().enumerate() {
            for r in seq.rows.clone() {
                let Some(at) = batch.rows[r].at else { continue };
                let index = at as usize;
                let page = batch.page(s, group, index);
                for head in 0..heads {
                    let at = ((page * heads + head) * PAGE_ROWS + index % PAGE_ROWS) * head_dim;
                    for (format, from, to) in
                        [(format.k, k, &mut rows.k), (format.v, v, &mut rows.v)]
                    {
                        let row = &values(from)[(r * heads + head) * head_dim..][..head_dim];
                        format.encode(row, &mut stored);
                        format.decode(&stored, &mut to[at..at + head_dim]);
                    }
                }
            }
        }
    }

    fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor {
        attention::attend(q, kv, attention, batch)
    }

    fn attend_near(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        relative: &Tensor,
        attention: &NearAttention,
    ) -> Tensor {
        attention::attend_near([q, k, v], relative, attention)
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
        let spec = state.spec;
        let (heads, value_dim) = (spec.value_heads, spec.value_dim);
        let (channels, size) = (spec.channels(), spec.key_dim * value_dim);
        assert_eq!(
            (qkv.cols(), b.cols(), a.cols()),
            (channels, heads, heads),
            "columns of the projections"
        );
        let slots = state
            .storage
            .downcast_mut::<Vec<DeltaSlot>>()
            .expect("memory of this backend");
        let mut out = vec![0.0; batch.n_rows() * heads * value_dim];
        for seq in &batch.seqs {
            let slot = &mut slots[seq.slot];
            let rows = &values(qkv)[seq.rows.start * channels..seq.rows.end * channels];
            let before = slot.begin(&spec, seq, rows);
            let mut running = slot.state.clone();
            for (i, r) in seq.rows.clone().enumerate() {
                let conv = convolve(&spec, values(&weights.conv), &before[i * channels..]);
                let mut updates = Vec::with_capacity(heads);
                for head in 0..heads {
                    let at = r * heads + head;
                    let softplus = math::softplus(values(a)[at] + values(&weights.dt_bias)[head]);
                    let decay = math::exp(values(&weights.decay)[head] * softplus);
                    let beta = math::sigmoid(values(b)[at]);
                    let s = &mut running[head * size..][..size];
                    let out = &mut out[at * value_dim..][..value_dim];
                    updates.push(delta_head(&spec, head, &conv, (decay, beta), s, out));
                }
                if i < seq.certain {
                    slot.state.copy_from_slice(&running);
                } else {
                    slot.updates.push(updates);
                }
            }
            assert!(
                slot.updates.len() <= MAX_TENTATIVE,
                "{} tentative rows",
                slot.updates.len()
            );
            let kept = &before[seq.certain * channels..];
            slot.history[..kept.len()].copy_from_slice(kept);
        }
        tensor(batch.n_rows(), heads * value_dim, out)
    }
}

impl Sample for Reference {
    fn argmax(&self, x: &Tensor) -> Vec<u32> {
        values(x)
            .chunks_exact(x.cols())
            .map(|row| {
                if !gives_token(row) {
                    return NO_TOKEN;
                }
                let best = row
                    .iter()
                    .enumerate()
                    .fold(0, |best, (i, &x)| if x > row[best] { i } else { best });
                best as u32
            })
            .collect()
    }

    fn choose_tokens(
        &self,
        x: &Tensor,
        list: Option<&TokenList>,
        choices: &[TokenChoice],
    ) -> Option<Vec<u32>> {
        assert_eq!(choices.len(), x.rows(), "a choice a row");
        let ids = list.map(TokenList::ids);
        let rows = values(x).chunks_exact(x.cols()).zip(choices);
        Some(rows.map(|(row, choice)| choice.choose(row, ids)).collect())
    }
}

impl Record for Reference {
    fn finish(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
