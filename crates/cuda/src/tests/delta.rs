//! The gated delta rule.

use super::{gpu, gpu_with, noise};
use crate::delta;
use crate::driver::Driver;
use crate::machine::Grid;
use crate::tuning::Tunings;
use crate::{Cuda, DryRun};
use backend::{
    Activation, Backend, Batch, BatchSeq, DeltaSpec, DeltaWeights, Record, Row, Store, Tensor,
};

/// Three steps of the delta rule, of which some rows stay, and of the last one its gated norm.
pub(super) fn delta_steps(b: &dyn Backend) -> [Tensor; 3] {
    delta_rows(
        b,
        Heads::of_qwen(2, 4),
        &[(7, 3), (6, 1), (10, 10)],
        &[2, 4],
        |x| x,
    )
}

/// Heads of keys and of values, and their columns.
#[derive(Clone, Copy, Debug)]
struct Heads {
    keys: usize,
    values: usize,
    key_dim: usize,
    value_dim: usize,
}

impl Heads {
    fn of_qwen(keys: usize, values: usize) -> Self {
        Heads::from((keys, values, 128, 128))
    }

    fn spec(self, slots: usize) -> DeltaSpec {
        DeltaSpec {
            slots,
            key_heads: self.keys,
            value_heads: self.values,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            conv_taps: 4,
        }
    }
}

impl From<(usize, usize, usize, usize)> for Heads {
    fn from((keys, values, key_dim, value_dim): (usize, usize, usize, usize)) -> Self {
        Heads {
            keys,
            values,
            key_dim,
            value_dim,
        }
    }
}

/// The steps of a text: of each its rows and how many of them are certain, and of all but the last how many others stay.
/// A step begins with the row after those that stayed.
#[derive(Clone, Copy, Debug)]
struct Steps<'a> {
    rows: &'a [(usize, usize)],
    kept: &'a [usize],
}

impl Steps<'_> {
    /// Rows that stay before step `i`.
    fn kept_before(self, i: usize) -> usize {
        i.checked_sub(1).map_or(0, |i| self.kept[i])
    }

    /// The row that step `i` begins with.
    fn first(self, i: usize) -> usize {
        let certain: usize = self.rows[..i].iter().map(|step| step.1).sum();
        certain + self.kept[..i].iter().sum::<usize>()
    }
}

/// [`delta_texts`] of one text.
fn delta_rows(
    b: &dyn Backend,
    heads: Heads,
    rows: &[(usize, usize)],
    kept: &[usize],
    tell: impl Fn(Tensor) -> Tensor,
) -> [Tensor; 3] {
    delta_texts(b, heads, &[Steps { rows, kept }], tell)
}

/// As many steps of each of some texts, all texts at once, with such heads: results of the last step, their norm, and
/// that gated. Row i of all texts has the same input.
fn delta_texts(
    b: &dyn Backend,
    heads: Heads,
    texts: &[Steps<'_>],
    tell: impl Fn(Tensor) -> Tensor,
) -> [Tensor; 3] {
    let spec = heads.spec(texts.len() + 1);
    let (channels, value_heads, dim) = (spec.channels(), heads.values, heads.value_dim);
    let weights = DeltaWeights {
        conv: b.upload(channels, 4, &noise(8, 4 * channels)),
        decay: b.upload(
            1,
            value_heads,
            &cycle(&[-0.1, -0.5, -1.0, -0.01], value_heads),
        ),
        dt_bias: b.upload(1, value_heads, &cycle(&[0.3, -0.3, 0.0, 1.0], value_heads)),
    };
    let weight = b.upload(1, dim, &noise(7, dim));
    let mut state = b.delta(spec);
    let mut last = None;
    for i in 0..texts[0].rows.len() {
        let mut batch = Batch::default();
        for (text, steps) in texts.iter().enumerate() {
            let ((n, certain), at) = (steps.rows[i], steps.first(i));
            let start = batch.rows.len();
            batch
                .rows
                .extend((at as u32..(at + n) as u32).map(Row::text));
            batch.seqs.push(BatchSeq {
                rows: start..start + n,
                slot: text + 1,
                is_new: i == 0,
                kept: steps.kept_before(i),
                certain,
                tables: Vec::new(),
            });
        }
        let part = |seed, cols| {
            let all = noise(seed, 40 * cols);
            let of_text =
                |steps: &Steps<'_>| &all[steps.first(i) * cols..][..steps.rows[i].0 * cols];
            let rows: Vec<f32> = texts.iter().flat_map(of_text).copied().collect();
            b.upload(batch.rows.len(), cols, &rows)
        };
        let (qkv, beta, a) = (
            part(9, channels),
            part(10, value_heads),
            part(11, value_heads),
        );
        let gate = part(12, value_heads * dim);
        let y = tell(b.gated_delta(&mut state, &weights, &qkv, &beta, &a, &batch));
        let norm = tell(b.rms_norm(&y, Some(&weight), dim, 1e-6));
        let gated = tell(b.glu(gate, &norm, Activation::Silu));
        last = Some([y, norm, gated]);
    }
    last.expect("a step")
}

/// The first `n` of `values` again and again.
fn cycle(values: &[f32], n: usize) -> Vec<f32> {
    values.iter().copied().cycle().take(n).collect()
}

/// One kernel for few rows, and one after the other, whatever rows come together.
#[test]
fn gpu_small_delta_steps_of_few_rows_have_the_bits_of_many() {
    let Some(cuda) = gpu() else { return };
    let tell = |x: Tensor| {
        cuda.download(&x);
        x
    };
    let down = |x: &Tensor| cuda.download(x).into_owned();
    let steps: [(&[_], &[_]); 11] = [
        (&[(7, 3), (6, 1), (10, 10)], &[2, 4]),
        (&[(16, 16), (4, 4)], &[0]),
        (&[(14, 2), (18, 18)], &[0]),
        (&[(12, 12), (8, 8)], &[0]),
        (&[(19, 19), (1, 1)], &[0]),
        (&[(3, 0), (17, 1), (18, 18)], &[1, 0]),
        (&[(18, 3), (15, 15)], &[2]),
        (&[(18, 3), (17, 17)], &[0]),
        // As many rows are remembered as can be, and rows of drafts make chunks whole.
        (&[(31, 15), (9, 9)], &[16]),
        (&[(31, 15), (1, 1), (8, 8)], &[16, 0]),
        (&[(17, 1), (16, 0), (7, 7)], &[16, 16]),
    ];
    // Blocks take 32 columns of values, and keys are padded to 64 columns.
    let heads = [
        (2, 4, 128, 128),
        (3, 9, 128, 128),
        // More value heads a key head than are prepared at once.
        (1, 6, 128, 128),
        // Eight blocks a head, one, three of which one has half of its columns, and one with less than a warp's.
        (1, 2, 64, 256),
        (2, 4, 32, 32),
        (2, 2, 24, 80),
        (2, 4, 16, 24),
        // Values are copied one by one.
        (1, 2, 128, 18),
        // Shared memory has room for one chunk.
        (1, 2, 192, 32),
        (1, 2, 256, 64),
    ];
    for heads in heads.map(Heads::from) {
        let all = [20, 40].map(|n| delta_rows(&cuda, heads, &[(n, n)], &[], |x| x));
        for (steps, kept) in steps {
            let rows = steps.iter().map(|step| step.1).chain(kept.iter().copied());
            let all = &all[usize::from(rows.sum::<usize>() > 20)];
            for some in [
                delta_rows(&cuda, heads, steps, kept, |x| x),
                delta_rows(&cuda, heads, steps, kept, tell),
            ] {
                for (i, (got, all)) in some.iter().zip(all).enumerate() {
                    let (got, all) = (down(got), down(all));
                    let same = got[..] == all[all.len() - got.len()..];
                    assert!(same, "tensor {i} of {steps:?}, {kept:?} stay, {heads:?}");
                }
            }
        }
    }
    cuda.finish().unwrap();
}

/// Heads whose blocks exchange results before the norm: four blocks of a head, eight, two and six.
const EXCHANGING: [(usize, usize, usize, usize); 5] = [
    (2, 4, 128, 128),
    (1, 2, 64, 256),
    (1, 2, 128, 64),
    (1, 2, 64, 192),
    (1, 2, 256, 64),
];

/// The norm and the gate in the kernel of few rows, of one text and of several that have different numbers of rows.
#[test]
fn gpu_small_delta_with_its_gate_has_the_bits_of_many_rows() {
    if let Some(cuda) = gpu() {
        assert_gated_deltas(&cuda);
    }
}

/// As [`gpu_small_delta_with_its_gate_has_the_bits_of_many_rows`], on a device without clusters.
#[test]
fn gpu_small_delta_with_its_gate_needs_no_cluster() {
    if let Some(cuda) = gpu_with(|driver| driver.max_cluster = 1) {
        assert_gated_deltas(&cuda);
    }
}

fn assert_gated_deltas(cuda: &Cuda) {
    let texts: [&[Steps<'_>]; 3] = [
        &[Steps {
            rows: &[(7, 3), (16, 16)],
            kept: &[2],
        }],
        &[
            Steps {
                rows: &[(1, 1), (3, 3)],
                kept: &[0],
            },
            Steps {
                rows: &[(8, 4), (1, 1)],
                kept: &[3],
            },
            Steps {
                rows: &[(5, 1), (9, 9)],
                kept: &[4],
            },
        ],
        // What came before is remembered, and with the rows of the step makes more than a chunk.
        &[
            Steps {
                rows: &[(15, 15), (2, 1), (4, 4)],
                kept: &[0, 1],
            },
            Steps {
                rows: &[(1, 1), (14, 0), (12, 12)],
                kept: &[0, 14],
            },
        ],
    ];
    for heads in EXCHANGING.map(Heads::from) {
        let [.., all] = delta_rows(cuda, heads, &[(40, 40)], &[], |x| x);
        let (all, cols) = (
            cuda.download(&all).into_owned(),
            heads.values * heads.value_dim,
        );
        for texts in texts {
            let [.., some] = delta_texts(cuda, heads, texts, |x| x);
            let want: Vec<f32> = (texts.iter())
                .flat_map(|steps| {
                    let last = steps.rows.len() - 1;
                    &all[steps.first(last) * cols..][..steps.rows[last].0 * cols]
                })
                .copied()
                .collect();
            assert!(cuda.download(&some)[..] == want, "{texts:?}, {heads:?}");
        }
    }
    cuda.finish().unwrap();
}

/// Needs no GPU: that the two tests before are about two kernels.
#[test]
fn few_rows_with_a_gate_take_a_cluster_where_there_is_one() {
    for (max_cluster, kernel) in [(16, "delta_fused_cluster"), (1, "delta_fused")] {
        let mut driver = Driver::dry(DryRun::default());
        driver.max_cluster = max_cluster;
        let cuda = Cuda::on(driver, Tunings::new(None, false));
        for heads in EXCHANGING.map(Heads::from) {
            cuda.take_launches();
            let [.., gated] = delta_rows(&cuda, heads, &[(3, 3)], &[], |x| x);
            cuda.download(&gated);
            let launches = cuda.take_launches();
            let found = |l: &String| l.starts_with(&format!("delta::{kernel} "));
            assert!(launches.iter().any(found), "{heads:?}: {launches:#?}");
        }
        cuda.finish().unwrap();
    }
}

/// As many blocks fit a multiprocessor as it has to take, and no more.
#[test]
fn spread_blocks_leave_no_multiprocessor_without_one() {
    let driver = Driver::dry(DryRun::default());
    assert!(driver.arch >= 90, "where kernels start early");
    let (all, sms) = (driver.shared + 1024, driver.sms);
    for declared in [0, 12_544, 18_464] {
        for (blocks, share) in [
            (1, 1),
            (sms, 1),
            (sms + 1, 2),
            (2 * sms, 2),
            (3 * sms, 3),
            (3 * sms + 1, 4),
        ] {
            let grid = driver.spread(Grid::new(blocks, 128), declared);
            let block = (grid.shared + declared + 1024).next_multiple_of(128);
            assert!(share * block <= all, "{share} of {block} bytes fit");
            assert!(
                (share + 1) * block > all,
                "one more of {block} bytes does not"
            );
        }
    }
    let wide = Grid {
        shared: 200 << 10,
        ..Grid::new(500, 128)
    };
    assert_eq!(
        driver.spread(wide, 0).shared,
        200 << 10,
        "what it asks for already"
    );
}

/// The first kernel after all have ended may read states early, and those that write them after it not.
#[test]
fn states_are_settled_once_in_an_epoch() {
    let cuda = Cuda::dry_run(DryRun::default());
    let driver = &cuda.device.driver;
    let [one, other] = [(); 2].map(|()| cuda.delta(Heads::of_qwen(1, 2).spec(2)));
    let [one, other] = [&one, &other].map(|state| delta::states(state).clone());
    let write = || [&one, &one, &other].map(|states| states.begin_write(driver));
    assert_eq!(write(), [true, false, true]);
    assert_eq!(write(), [false; 3]);
    driver.zero(driver.allocate(4, "a number"), 4);
    assert_eq!(write(), [true, false, true]);
    let (graph, recorded) = driver.record(write).expect("a graph");
    assert_eq!(recorded, [true, false, true]);
    assert_eq!(write(), [true, false, true]);
    driver.replay(&graph);
    assert_eq!(write(), [true, false, true]);
}

/// A slot's saved bytes are not believed where kernels would go by them.
#[test]
fn slots_are_not_loaded_with_more_rows_than_a_chunk_has() {
    let cuda = Cuda::dry_run(DryRun::default());
    let heads = Heads::of_qwen(1, 2);
    let mut state = cuda.delta(heads.spec(2));
    let saved = cuda.delta_save(&state, 0);
    assert!(cuda.delta_load(&mut state, 1, &saved));
    assert!(!cuda.delta_load(&mut state, 1, &saved[1..]));
    // Both heads have four blocks, at the end of a slot.
    let block = 4 * (4 + 31 * (4 + 64));
    let with = |rows: &[(usize, u8)]| {
        let mut bytes = saved.clone();
        for &(back, n) in rows {
            let at = bytes.len() - back * block;
            bytes[at] = n;
        }
        bytes
    };
    let all = |n| (1..=8).map(|back| (back, n)).collect::<Vec<_>>();
    assert!(cuda.delta_load(&mut state, 1, &with(&all(15))));
    assert!(!cuda.delta_load(&mut state, 1, &with(&all(16))));
    assert!(!cuda.delta_load(&mut state, 1, &with(&[(3, 1)])));
}
