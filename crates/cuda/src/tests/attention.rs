//! Keys, values and attention.

use super::fused::batch_of;
use super::{PRODUCT, SUM, close, compile_ahead, gpu, noise};
use crate::{Cuda, DryRun};
use backend::{
    Attention, Backend, Batch, BatchSeq, KvFormat, KvSpec, PAGE_ROWS, Record, Reference, Row,
    Store, Tensor,
};
use quant::{KvLayout, KvRowFormat, Scalar};

/// A shape of attention.
#[derive(Clone, Copy)]
pub(super) struct AttentionCase {
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) window: Option<usize>,
}

impl AttentionCase {
    /// `new` rows after `old` of one sequence, whose pages lie in reverse.
    pub(super) fn run(&self, b: &dyn Backend, old: usize, new: usize, format: KvFormat) -> Tensor {
        self.run_with(b, old, new, format, |_, v| v)
    }

    /// Whether the heads are whole blocks.
    pub(super) fn takes(&self, format: KvFormat) -> bool {
        let is_whole = |f: &KvRowFormat| self.head_dim.is_multiple_of(f.block);
        is_whole(format.k) && is_whole(format.v)
    }

    /// [`run`](Self::run) on values that `edit` makes of a cache row's.
    fn run_with(
        &self,
        b: &dyn Backend,
        old: usize,
        new: usize,
        format: KvFormat,
        edit: impl Fn(usize, f32) -> f32,
    ) -> Tensor {
        self.run_scored(b, (old, new), format, 0.3, edit)
    }

    /// Attention of `new` rows after `old` ones, scores being multiplied by `scale`.
    fn run_scored(
        &self,
        b: &dyn Backend,
        (old, new): (usize, usize),
        format: KvFormat,
        scale: f32,
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
            format,
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
                scale,
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

    pub(super) fn check(&self, cuda: &Cuda, old: usize, new: usize, format: KvFormat) {
        let what = format!(
            "{new} rows after {old}, {} heads on {} of {}, window {:?}, {format}",
            self.heads, self.kv_heads, self.head_dim, self.window
        );
        // Queries and probabilities are rounded to f16 on tensor cores, and so is what codes stand for.
        let layouts = [format.k.layout, format.v.layout];
        let tolerance = if layouts.contains(&KvLayout::Plain(Scalar::F32)) {
            SUM
        } else if layouts.iter().all(|l| matches!(l, KvLayout::Plain(_))) {
            PRODUCT
        } else {
            2.0 * PRODUCT
        };
        let (got, want) = (
            self.run(cuda, old, new, format),
            self.run(&Reference, old, new, format),
        );
        close(&what, cuda, &got, &want, tolerance);
    }
}

/// Keys and values in formats of these names, as `--kv` has them.
pub(super) fn format_of(names: &str) -> KvFormat {
    let (k, v) = names.split_once(',').unwrap_or((names, names));
    let [k, v] = [k, v].map(|name| quant::kv_format(name).unwrap());
    KvFormat { k, v }
}

/// Needs no GPU, and so no name by which the tests of one are chosen.
#[test]
fn every_pair_is_launched_and_saved_in_the_bytes_of_its_formats() {
    let cuda = Cuda::dry_run(DryRun::default());
    for k in quant::KV_FORMATS {
        for v in quant::KV_FORMATS {
            let format = KvFormat { k, v };
            assert!(cuda.capabilities().kv.contains(format));
            let case = AttentionCase {
                heads: 4,
                kv_heads: 2,
                head_dim: 256,
                window: None,
            };
            // Few rows, and more than are split.
            for rows in [5, 100] {
                cuda.take_launches();
                let _y = case.run(&cuda, 0, rows, format);
                let launches = cuda.take_launches();
                // The merge of few rows turns results of rotated values back itself.
                let undone = launches
                    .iter()
                    .filter(|line| line.contains("undo_rotations"));
                let want = usize::from(rows > 64 && v.rotation.is_some());
                assert_eq!(undone.count(), want, "{format}: {launches:?}");
                let is_wgmma = launches.iter().any(|line| line.contains("attention_wgmma"));
                let may = rows > 64 && f16_like(k) && f16_like(v);
                assert_eq!(is_wgmma, may, "{format}: {launches:?}");
            }
            let kv = cuda.kv(KvSpec {
                pages: 3,
                rows: 3 * PAGE_ROWS,
                heads: 2,
                head_dim: 256,
                format,
            });
            let bytes = PAGE_ROWS * 2 * (k.row_bytes(256) + v.row_bytes(256));
            assert_eq!(cuda.kv_save(&kv, 1).len(), bytes, "a page in {format}");
        }
    }
}

/// Whether tensor cores take rows in `format` as they are stored.
fn f16_like(format: &KvRowFormat) -> bool {
    matches!(format.layout, KvLayout::Plain(Scalar::F16 | Scalar::Bf16))
}

/// Values as they are stored: a row that sees nothing but its own key takes its value as it is.
#[test]
fn gpu_values_are_stored_as_the_reference_stores_them() {
    let Some(cuda) = gpu() else { return };
    for head_dim in [64, 96, 128, 192, 256, 512] {
        for v in quant::KV_FORMATS {
            let case = AttentionCase {
                heads: 2,
                kv_heads: 2,
                head_dim,
                window: Some(1),
            };
            // Of keys in f32, attention of a GPU is all in f32.
            let format = KvFormat {
                k: &quant::kv::F32,
                v,
            };
            if !case.takes(format) {
                continue;
            }
            // Rows of all sizes, one of them zeros.
            let edit = |row: usize, v: f32| v * [1.0, 0.0, 1e-4, 3e3, 1e-12][row % 5];
            let run = |b: &dyn Backend| case.run_scored(b, (0, 70), format, 0.0, edit);
            let (got, want) = (run(&cuda), run(&Reference));
            assert_eq!(
                cuda.download(&got),
                Reference.download(&want),
                "heads of {head_dim} in {format}"
            );
        }
    }
    cuda.finish().unwrap();
}

#[test]
fn gpu_attention_is_close_to_the_reference() {
    let Some(cuda) = gpu() else { return };
    let alike = ["f32", "f16", "bf16", "q8_0"];
    // Every other format of keys, and every other one of values, beside those of other kinds.
    let cases: [(_, &[&str]); 7] = [
        (
            (2, 1, 64, None),
            &["bf16,turbo4", "rot-q8_0,rot-q4_0", "turbo2,f32"],
        ),
        (
            (8, 2, 128, Some(300)),
            &["turbo4,turbo3", "q8_0,q4_0", "rot-q5_0,turbo4"],
        ),
        (
            (6, 1, 256, None),
            &["q8_0,turbo4", "turbo3,q5_0", "q5_0,bf16", "bf16,f16"],
        ),
        ((4, 1, 512, Some(64)), &["rot-q4_0,turbo2", "turbo4,q8_0"]),
        ((2, 1, 320, None), &["f16,rot-q5_0", "q4_0,rot-q8_0"]),
        ((2, 2, 20, None), &[]),
        ((4, 4, 72, None), &["f32,bf16"]),
    ];
    let mut all = Vec::new();
    for ((heads, kv_heads, head_dim, window), pairs) in cases {
        let case = AttentionCase {
            heads,
            kv_heads,
            head_dim,
            window,
        };
        for names in alike.iter().chain(pairs) {
            let format = format_of(names);
            if case.takes(format) {
                all.push((case, format));
            }
        }
    }
    compile_ahead(&cuda, |dry| {
        for (case, format) in &all {
            for new in [1, 100] {
                case.run(dry, 0, new, *format);
            }
        }
    });
    for (case, format) in all {
        for (old, new) in [(0, 5), (0, 700), (1000, 1), (1000, 4), (513, 70)] {
            case.check(&cuda, old, new, format);
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
        (64, "q8_0,turbo4"),
        (128, "turbo4,turbo3"),
        (256, "turbo3,turbo2"),
        (256, "bf16,q5_0"),
        (512, "q4_0,rot-q4_0"),
        (64, "turbo4,f32"),
    ] {
        let format = format_of(format);
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
                    "head of {head_dim} in {format}, {later} later, values of {size}"
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
    let cases = [
        (2, 1, 32, "bf16"),
        (4, 2, 16, "bf16"),
        (4, 2, 64, "bf16"),
        (8, 1, 256, "bf16"),
        (2, 1, 512, "f16"),
        (3, 3, 96, "f16"),
        (4, 1, 256, "q8_0"),
        (2, 2, 64, "q8_0"),
        (4, 1, 256, "q8_0,turbo4"),
        (8, 1, 256, "bf16,q8_0"),
        (4, 1, 128, "turbo4,turbo3"),
        (2, 1, 512, "turbo4,turbo2"),
        (8, 1, 256, "q5_0,rot-q5_0"),
        (2, 2, 64, "rot-q8_0,q4_0"),
    ];
    compile_ahead(&cuda, |dry| {
        for (heads, kv_heads, head_dim, format) in cases {
            for window in [None, Some(8)] {
                let case = AttentionCase {
                    heads,
                    kv_heads,
                    head_dim,
                    window,
                };
                for new in [1, 100] {
                    case.run(dry, 0, new, format_of(format));
                }
            }
        }
    });
    for (heads, kv_heads, head_dim, format) in cases {
        let format = format_of(format);
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

/// Rows of three texts of one step: a short one; one with an image across the border of a page, whose rows see each other,
/// and with a row at its end that only reads; and one after 2,000 rows of its own.
fn three_texts() -> Batch {
    let mut second: Vec<Row> = (0..133).map(Row::text).collect();
    for row in &mut second[50..90] {
        row.sees.end = 90;
    }
    second.push(Row::reader(133));
    let texts = vec![
        (0..67).map(Row::text).collect(),
        second,
        (2000..2130).map(Row::text).collect(),
    ];
    let mut batch = batch_of(texts);
    batch.tokens = vec![0; batch.rows.len()];
    batch
}

/// Rows of [`three_texts`] on either side of what is different about them.
const SOME_ROWS: [usize; 16] = [
    0, 1, 63, 66, 67, 116, 117, 130, 156, 157, 199, 200, 201, 248, 249, 330,
];

/// Attention of all rows of [`three_texts`], and of [`SOME_ROWS`] in a step of their own, which sees the same keys.
fn attend_three_texts(b: &dyn Backend, case: AttentionCase, format: KvFormat) -> [Tensor; 2] {
    let batch = three_texts();
    let pages = batch.tables.len();
    let mut kv = b.kv(KvSpec {
        pages,
        rows: pages * PAGE_ROWS,
        heads: case.kv_heads,
        head_dim: case.head_dim,
        format,
    });
    let earlier = Batch {
        rows: (0..2000).map(Row::text).collect(),
        seqs: vec![BatchSeq {
            rows: 0..2000,
            certain: 2000,
            ..batch.seqs[2].clone()
        }],
        tables: batch.tables.clone(),
        ..Batch::default()
    };
    let cols = case.kv_heads * case.head_dim;
    for (seed, batch) in [(5, &earlier), (7, &batch)] {
        let n = batch.rows.len();
        let part = |seed| b.upload(n, cols, &noise(seed, n * cols));
        b.kv_append(&mut kv, &part(seed), &part(seed + 1), 0, batch);
    }
    let cols = case.heads * case.head_dim;
    let queries = noise(9, batch.rows.len() * cols);
    let attention = Attention {
        group: 0,
        heads: case.heads,
        scale: 0.3,
        window: case.window,
    };
    let attend = |rows: &[usize]| {
        let q: Vec<f32> = rows
            .iter()
            .flat_map(|row| &queries[row * cols..(row + 1) * cols])
            .copied()
            .collect();
        let q = b.upload(rows.len(), cols, &q);
        b.attend(&q, &kv, &attention, &batch.of_rows(rows))
    };
    let all: Vec<usize> = (0..batch.rows.len()).collect();
    [attend(&all), attend(&SOME_ROWS)]
}

/// Whether [`SOME_ROWS`] have the bits of the same rows among all.
fn have_equal_bits(b: &dyn Backend, [all, some]: &[Tensor; 2]) -> bool {
    let (all, some) = (b.download(all), b.download(some));
    let cols = some.len() / SOME_ROWS.len();
    let of_all = |row: &usize| &all[row * cols..(row + 1) * cols];
    let mut rows = SOME_ROWS.iter().map(of_all).zip(some.chunks(cols));
    rows.all(|(a, b)| {
        a.iter()
            .map(|v| v.to_bits())
            .eq(b.iter().map(|v| v.to_bits()))
    })
}

/// Shapes of [`attend_three_texts`], of which warpgroups take prompts on compute capability 9.0.
fn cases_of_three_texts() -> impl Iterator<Item = AttentionCase> {
    [(6, 2, 256), (4, 1, 512)]
        .into_iter()
        .flat_map(|(heads, kv_heads, head_dim)| {
            [None, Some(2), Some(100), Some(700), Some(3000)].map(|window| AttentionCase {
                heads,
                kv_heads,
                head_dim,
                window,
            })
        })
}

/// Needs no GPU: the reference has the bits of few rows, too, and a GPU's launches are those that are meant.
#[test]
fn prompts_of_several_texts_go_through_warpgroups() {
    let cuda = Cuda::dry_run(DryRun::default());
    for case in cases_of_three_texts() {
        let results = attend_three_texts(&Reference, case, format_of("bf16"));
        assert!(
            have_equal_bits(&Reference, &results),
            "{:?} of {}",
            case.window,
            case.head_dim
        );
        cuda.take_launches();
        let _results = attend_three_texts(&cuda, case, format_of("bf16"));
        let launches = cuda.take_launches();
        let is_short = case.window.is_some_and(|window| window <= 2048);
        let of_prompts: Vec<&String> = launches
            .iter()
            .filter(|line| line.contains("attention_wgmma"))
            .collect();
        let pages_only = format!("PAGES_ONLY={}", u8::from(is_short && case.head_dim == 256));
        assert!(
            of_prompts.len() == 1 && of_prompts[0].contains(&pages_only),
            "{pages_only}: {launches:?}"
        );
        let merges = launches
            .iter()
            .filter(|line| line.contains("attention_merge"));
        assert_eq!(merges.count(), 1, "of few rows: {launches:?}");
    }
}

#[test]
fn gpu_attention_of_several_texts_has_the_bits_of_few_rows() {
    let Some(cuda) = gpu() else { return };
    for case in cases_of_three_texts() {
        for format in ["bf16", "f16"] {
            let format = format_of(format);
            let (got, want) = (
                attend_three_texts(&cuda, case, format),
                attend_three_texts(&Reference, case, format),
            );
            let what = format!("window {:?}, heads of {}", case.window, case.head_dim);
            assert!(have_equal_bits(&cuda, &got), "{what}");
            close(&what, &cuda, &got[0], &want[0], PRODUCT);
        }
    }
    cuda.finish().unwrap();
}
