//! Keys, values and attention.

use super::{PRODUCT, SUM, close, gpu, noise};
use crate::Cuda;
use backend::{
    Attention, Backend, Batch, BatchSeq, KvFormat, KvSpec, Record, Reference, Row, Store, Tensor,
};

/// A shape of attention.
pub(super) struct AttentionCase {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) window: Option<usize>,
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
            rows: n,
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

    pub(super) fn check(
        &self,
        cuda: &Cuda,
        old: usize,
        new: usize,
        format: &'static quant::KvRowFormat,
    ) {
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
        (4, 4, 72, None),
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
