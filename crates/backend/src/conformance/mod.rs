//! The cases every backend must pass.
//!
//! Two questions, asked op by op with random inputs of a fixed seed over awkward
//! shapes. [`check_bits_equal`]: are the results those of the definition, bit for
//! bit? [`check_row_invariance`]: does a row have the same bits whatever is
//! computed with it? The second needs no reference, so it also holds a device to
//! the promise whose sums are its own.
//!
//! A failed case panics and names the op, the case and the first wrong value.

mod attend;
#[cfg(test)]
mod broken;
mod choose;
mod delta;
mod edit;
mod elementwise;
mod matmul;
mod moe;
mod near;
mod norm;
mod record;
mod sample;

use crate::{Backend, Reference, Tensor};
use quant::{BF16, F16, F32, Format, Owned, Scalar};
use std::ops::Range;

/// One op's cases against a reference.
pub type EqualCase = fn(&dyn Backend, &dyn Backend);

/// One op's cases against itself.
pub type InvarianceCase = fn(&dyn Backend);

/// Every op by name, compared with a reference.
pub const EQUAL_CASES: &[(&str, EqualCase)] = &[
    ("embed", matmul::embed_equals),
    ("matmul", matmul::matmul_equals),
    ("matmul_rows", matmul::matmul_rows_equals),
    ("rms_norm", norm::rms_norm_equals),
    ("layer_norm", norm::layer_norm_equals),
    ("affine", elementwise::affine_equals),
    ("elementwise", elementwise::elementwise_equals),
    ("moves", elementwise::moves_equal),
    ("rope", norm::rope_equals),
    ("attend", attend::attend_equals),
    ("attend_near", near::attend_near_equals),
    ("gated_delta", delta::gated_delta_equals),
    ("moe", moe::moe_equals),
    ("argmax", sample::argmax_equals),
    ("choose_tokens", choose::chosen_tokens_equal),
    ("likeliest", sample::likeliest_equals),
    ("moments", sample::moments_equal),
    ("mask_logits", sample::masked_logits_equal),
    ("edit_logits", edit::edited_logits_equal),
];

/// Every op that could mix rows, and every record of ops, compared with the same device's ops.
pub const INVARIANCE_CASES: &[(&str, InvarianceCase)] = &[
    ("matmul", matmul::matmul_rows_are_independent),
    ("rms_norm", norm::rms_norm_rows_are_independent),
    ("layer_norm", norm::layer_norm_rows_are_independent),
    ("affine", elementwise::affine_rows_are_independent),
    ("elementwise", elementwise::elementwise_rows_are_independent),
    ("rope", norm::rope_rows_are_independent),
    ("attend", attend::attend_rows_are_independent),
    ("attend_near", near::attend_near_rows_are_independent),
    ("gated_delta", delta::gated_delta_rows_are_independent),
    ("moe", moe::moe_rows_are_independent),
    ("matmul_groups", record::groups_are_chosen_rows),
    ("step", record::steps_follow_their_batch),
    ("chain", record::chains_choose_what_single_steps_do),
];

/// Everything: [`check_bits_equal_reference`] and [`check_row_invariance`].
///
/// # Panics
///
/// On the first case that fails.
pub fn check(backend: &dyn Backend) {
    check_bits_equal_reference(backend);
    check_row_invariance(backend);
}

/// Compares every op with [`Reference`].
///
/// # Panics
///
/// On the first case that fails.
pub fn check_bits_equal_reference(backend: &dyn Backend) {
    check_bits_equal(backend, &Reference);
}

/// Compares every op with that of `reference`: for backends whose products are
/// defined elsewhere.
///
/// # Panics
///
/// On the first case that fails.
pub fn check_bits_equal(backend: &dyn Backend, reference: &dyn Backend) {
    for (_, case) in EQUAL_CASES {
        case(backend, reference);
    }
    backend
        .finish()
        .expect("the cases ask for nothing that can fail");
}

/// Compares every row's result with that of the row in other company.
///
/// # Panics
///
/// On the first case that fails.
pub fn check_row_invariance(backend: &dyn Backend) {
    for (_, case) in INVARIANCE_CASES {
        case(backend);
    }
    backend
        .finish()
        .expect("the cases ask for nothing that can fail");
}

/// SplitMix64: equal numbers everywhere, forever.
struct Noise(u64);

impl Noise {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `n`.
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// In `-scale .. scale`, with an exact zero now and then.
    fn value(&mut self, scale: f32) -> f32 {
        let bits = self.next();
        if bits.is_multiple_of(97) {
            return 0.0;
        }
        ((bits >> 40) as f32 / (1 << 23) as f32 - 1.0) * scale
    }

    fn values(&mut self, n: usize, scale: f32) -> Vec<f32> {
        (0..n).map(|_| self.value(scale)).collect()
    }
}

/// Fails unless the values have equal bits, or are both NaN.
fn same(op: &str, case: &str, cols: usize, got: &[f32], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{op} ({case}): number of values");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!(
            got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(),
            "{op} ({case}): row {}, column {} is {got:?}, not {want:?}",
            i / cols.max(1),
            i % cols.max(1)
        );
    }
}

/// A backend and its reference, or the backend twice.
struct Pair<'a> {
    got: &'a dyn Backend,
    want: &'a dyn Backend,
}

impl Pair<'_> {
    fn each<T>(&self, f: impl Fn(&dyn Backend) -> T) -> (T, T) {
        (f(self.got), f(self.want))
    }

    /// Compares what `f` returns on both.
    fn compare(&self, op: &str, case: &str, f: impl Fn(&dyn Backend) -> Tensor) {
        let (got, want) = self.each(f);
        self.compare_tensors(op, case, &got, &want);
    }

    fn compare_tensors(&self, op: &str, case: &str, got: &Tensor, want: &Tensor) {
        assert_eq!(
            (got.rows(), got.cols()),
            (want.rows(), want.cols()),
            "{op} ({case}): shape"
        );
        same(
            op,
            case,
            got.cols(),
            &self.got.download(got),
            &self.want.download(want),
        );
    }
}

/// A random matrix in `format`.
fn stored(noise: &mut Noise, format: &'static Format, rows: usize, cols: usize) -> Owned {
    let values = noise.values(rows * cols, 1.0);
    let scale = [Scalar::Bf16, Scalar::F16, Scalar::F32][noise.below(3)];
    quant::encode(format, &values, cols, scale)
}

/// Plain formats, and a few with groups: odd widths and several group sizes, and
/// blocks with an offset, a bias, sub-scales and a table.
fn formats() -> Vec<&'static Format> {
    let mut all = vec![&F32, &F16, &BF16];
    all.extend(
        [
            (4, 32),
            (4, 64),
            (8, 64),
            (8, 128),
            (2, 128),
            (3, 32),
            (5, 32),
            (6, 64),
        ]
        .map(|(bits, group)| quant::affine(bits, group).expect("a format that exists")),
    );
    all.extend(
        ["q4_0", "q5_1", "q4_k", "q6_k", "mxfp4"]
            .map(|name| quant::format(name).expect("a format that exists")),
    );
    all
}

/// `cols`, or the next width that `format` can store.
fn width(format: &Format, cols: usize) -> usize {
    cols.next_multiple_of(format.block)
}

/// Ways to cut `n` rows into steps.
fn cuts(n: usize) -> Vec<Vec<Range<usize>>> {
    [1, 2, 3, 5, 8, 16]
        .into_iter()
        .filter(|&size| size < n)
        .map(|size| {
            (0..n)
                .step_by(size)
                .map(|first| first..(first + size).min(n))
                .collect()
        })
        .collect()
}

/// Compares `f` of all rows with `f` of the rows in every cut.
fn independent(
    op: &str,
    case: &str,
    b: &dyn Backend,
    n: usize,
    f: impl Fn(Range<usize>) -> Tensor,
) {
    let together = f(0..n);
    let cols = together.cols();
    let together = b.download(&together);
    for cut in cuts(n) {
        for rows in cut {
            let apart = f(rows.clone());
            let case = format!("{case}, rows {rows:?} of {n} apart");
            same(
                op,
                &case,
                cols,
                &b.download(&apart),
                &together[rows.start * cols..rows.end * cols],
            );
        }
    }
}
