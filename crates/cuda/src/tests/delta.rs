//! The gated delta rule.

use super::{gpu, noise};
use crate::delta;
use crate::driver::Driver;
use crate::machine::Grid;
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
        Heads {
            keys,
            values,
            key_dim: 128,
            value_dim: 128,
        }
    }

    fn spec(self) -> DeltaSpec {
        DeltaSpec {
            slots: 2,
            key_heads: self.keys,
            value_heads: self.values,
            key_dim: self.key_dim,
            value_dim: self.value_dim,
            conv_taps: 4,
        }
    }
}

/// Steps with such heads, of so many rows and certain ones, of which so many others stay,
/// each from the row on that comes after those that stayed: results of the last one, their norm, and that gated.
fn delta_rows(
    b: &dyn Backend,
    heads: Heads,
    steps: &[(usize, usize)],
    kept: &[usize],
    tell: impl Fn(Tensor) -> Tensor,
) -> [Tensor; 3] {
    let spec = heads.spec();
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
    let (mut last, mut at) = (None, 0);
    for (i, &(n, certain)) in steps.iter().enumerate() {
        let kept = i.checked_sub(1).map(|i| kept[i]);
        at += kept.unwrap_or(0);
        let row = Row::text;
        let batch = Batch {
            rows: (at as u32..(at + n) as u32).map(row).collect(),
            seqs: vec![BatchSeq {
                rows: 0..n,
                slot: 1,
                is_new: kept.is_none(),
                kept: kept.unwrap_or(0),
                certain,
                tables: Vec::new(),
            }],
            ..Batch::default()
        };
        let part = |seed, cols| b.upload(n, cols, &noise(seed, 40 * cols)[at * cols..][..n * cols]);
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
        at += certain;
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
    ];
    for (keys, values, key_dim, value_dim) in heads {
        let heads = Heads {
            keys,
            values,
            key_dim,
            value_dim,
        };
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
    let [one, other] = [(); 2].map(|()| cuda.delta(Heads::of_qwen(1, 2).spec()));
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
    let mut state = cuda.delta(heads.spec());
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
