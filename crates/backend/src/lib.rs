//! The op vocabulary: what a model may ask of a device.
//!
//! [`Backend`] has few ops, fused where models always use them together. A model
//! is equations over `&dyn Backend`; it never asks which one it got.
//!
//! # Row invariance
//!
//! A row's result has the same bits however many rows, sequences, threads or
//! prefill chunks it is computed with. The order of every float sum is therefore
//! part of an op's definition, stated at each op; [`Reference`] is that
//! definition as plain loops, and [`conformance`] holds the cases that any
//! backend must pass. On CPUs the bits also agree between instruction sets.
//!
//! Shapes are proven when a model is loaded; ops assert them. An op cannot fail:
//! a device keeps its error and [`Backend::finish`] returns it once a step.
//!
//! Letters: `n` rows of the step, `H` query heads, `K` key/value heads, `e` head
//! size, `W` window.

#![forbid(unsafe_code)]

pub mod batch;
mod choice;
pub mod conformance;
pub mod math;
pub mod moe;
mod reference;
mod tensor;

pub use batch::{Batch, BatchSeq, MAX_TENTATIVE, NO_PAGE, PAGE_ROWS, Row, StepKey};
pub use choice::{
    Chain, Chained, Likeliest, Link, NO_TOKEN, TokenChoice, TokenGroups, TokenList, gives_token,
};
pub use moe::{Choice, Expert, Experts};
pub use reference::Reference;
pub use tensor::{Delta, DeltaSpec, Kv, KvFormat, KvSpec, Matrix, Recycle, Storage, Tensor};

use quant::Stored;
use std::borrow::Cow;
use std::fmt::Arguments;

/// Keys of one attention split: partial results of whole splits are merged from
/// the left, so a device may compute them apart without changing a bit.
pub const SPLIT_ROWS: usize = 512;

/// Why a step's results cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{device} failed: {message}")]
pub struct DeviceError {
    /// Which backend.
    pub device: String,
    /// What it said.
    pub message: String,
}

/// The gate's function in [`Backend::glu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(x)`
    Silu,
    /// GELU, tanh approximation
    GeluTanh,
    /// `1 / (1 + e^-x)`
    Sigmoid,
}

impl Activation {
    /// The function of one value.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Silu => math::silu(x),
            Activation::GeluTanh => math::gelu_tanh(x),
            Activation::Sigmoid => math::sigmoid(x),
        }
    }
}

/// A rotary embedding: pair `j` of a head is columns `(first + j, first + j +
/// pair_offset)` and turns by `position * frequencies[j]`, the product rounded to
/// `f32` as the reference implementations do.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Head size `e`.
    pub head_dim: usize,
    /// Distance of a pair's two columns.
    pub pair_offset: usize,
    /// Radians a position, by pair; pairs without a frequency do not turn.
    pub frequencies: Vec<f32>,
}

/// How a step's rows attend.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attention {
    /// Which page tables of the batch.
    pub group: usize,
    /// Query heads `H`; head `h` reads key/value head `h / (H / K)`.
    pub heads: usize,
    /// Factor of the scores.
    pub scale: f32,
    /// Rows see keys above `position - W` only.
    pub window: Option<usize>,
}

impl Attention {
    /// The cache rows that `row` sees.
    #[inline]
    pub fn visible(&self, row: Row) -> std::ops::Range<usize> {
        let first = self
            .window
            .map_or(0, |w| (row.position as usize + 1).saturating_sub(w));
        first..row.index as usize + 1
    }
}

/// The learned parts of one gated-delta layer.
#[derive(Debug)]
pub struct DeltaWeights {
    /// Taps by channel, `[C, taps]`; the last one multiplies the current row.
    pub conv: Tensor,
    /// `-exp(A_log)`, `[1, nv]`.
    pub decay: Tensor,
    /// `[1, nv]`.
    pub dt_bias: Tensor,
}

/// A device.
pub trait Backend: Send + Sync {
    /// Name for people, such as `cpu (avx512, 2 threads)`.
    fn name(&self) -> String;

    /// Loads a matrix. Several parts of equal width become one matrix, rows in
    /// order.
    fn matrix(&self, parts: &[Stored<'_>]) -> Matrix;

    /// Bytes that the matrices loaded since the last call would take, had the device
    /// not left them in their mapped files as [`Stored::keep`] asks; `None` if it never
    /// leaves any there.
    fn left_in_files(&self) -> Option<u64> {
        None
    }

    /// Loads activations or a vector of parameters, `[rows, cols]`.
    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Tensor;

    /// The values of `x`, row-major. Waits for the device.
    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]>;

    /// Rows of a prompt that a step has where nobody says otherwise: enough to keep the
    /// device busy, for they take memory and others wait meanwhile.
    fn prompt_rows(&self) -> usize {
        256
    }

    /// Whether it can keep keys and values in `format`. No device keeps keys that are
    /// rotated.
    fn keeps(&self, format: KvFormat) -> bool {
        !format.k.is_rotated()
    }

    /// Memory for one attention layer, in a format that the device
    /// [keeps](Backend::keeps).
    fn kv(&self, spec: KvSpec) -> Kv;

    /// Memory for one gated-delta layer.
    fn delta(&self, spec: DeltaSpec) -> Delta;

    /// Makes slot `to` of a gated-delta layer what slot `from` is, whose newest rows are
    /// all certain.
    fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize);

    /// Ends a step: waits, and returns the first error since the last call.
    fn finish(&self) -> Result<(), DeviceError>;

    /// Reads every byte of `w` once and computes next to nothing, as fast as the
    /// device can: how long this takes is the floor of a product with `w`. Returns
    /// something that depends on all of them, or `None` where there is no such
    /// measure.
    fn read(&self, _w: &Matrix) -> Option<u64> {
        None
    }

    /// Runs `work`, ops of one step, on `inputs`, and returns its tensors.
    ///
    /// What `work` asks for may depend on nothing but `key`, how many rows and
    /// sequences `batch` has and the shapes of `inputs`: a device may record it and
    /// then run the record, with the numbers of `batch` and the values of `inputs`,
    /// instead of calling `work` again. The tensors last until the next step of the
    /// same key.
    fn step(
        &self,
        key: StepKey,
        batch: &Batch,
        inputs: &[&Tensor],
        work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
    ) -> Vec<Tensor> {
        let _ = (key, batch);
        work(inputs)
    }

    /// A tensor of unspecified content, for ops that take their output.
    fn scratch(&self, rows: usize, cols: usize) -> Tensor;

    /// Rows `tokens` of `table`, times `scale`: `[n, cols]`.
    fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor;

    /// `y_i = x wᵢᵀ` for each matrix: `[n, rows of wᵢ]`.
    ///
    /// One accumulator an output, `acc = fma(w, x, acc)` over ascending columns
    /// from 0. Callers use [`dyn Backend::matmul`](#method.matmul).
    fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]);

    /// `y[r][i] = x[r] · w[ids[r][i]]`: [`Backend::matmul_into`] for a few chosen
    /// rows of `w`, as many for each row of `x`.
    fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor;

    /// [`Backend::matmul_rows`] for the rows of `w` that [`TokenGroups::best`] of a row's
    /// `scores` has, in any order, and their bits; both `[n, m]`. Every device with
    /// [`Backend::chain`] has it, and that alone uses it.
    fn matmul_groups(
        &self,
        x: &Tensor,
        w: &Matrix,
        scores: &Tensor,
        groups: &TokenGroups,
    ) -> Option<[Tensor; 2]> {
        let _ = (x, w, scores, groups);
        None
    }

    /// `x / sqrt(mean(x²) + eps) * weight` over each run of `width` columns;
    /// without weight when it is absent.
    ///
    /// The sum of squares keeps 16 lanes ([`math::sum_tree`]); then
    /// `(x * (1 / sqrt(sum / width + eps))) * weight`.
    fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor;

    /// `x + y`.
    fn add(&self, x: Tensor, y: &Tensor) -> Tensor;

    /// `x * factor`.
    fn scale(&self, x: Tensor, factor: f32) -> Tensor;

    /// `activation(gate) * x`.
    fn glu(&self, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor;

    /// `cap * tanh(x / cap)`; NaN of what is not finite, so that a row of NaN stays one.
    fn softcap(&self, x: Tensor, cap: f32) -> Tensor;

    /// Rows `rows` of `x`.
    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor;

    /// Columns `first .. first + cols` of `x`.
    fn columns(&self, x: &Tensor, first: usize, cols: usize) -> Tensor;

    /// The columns of `a`, then those of `b`.
    fn concat(&self, a: &Tensor, b: &Tensor) -> Tensor;

    /// Turns every head of every row by its position: `x' = x cos - y sin`,
    /// `y' = y cos + x sin`, each as one product and one fused multiply-add.
    fn rope(&self, x: Tensor, rope: &Rope, batch: &Batch) -> Tensor;

    /// Writes `k, v: [n, K e]` as cache rows `row.index`, in the cache's format.
    fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch);

    /// `softmax(scale q·kᵀ) v` over the visible cache rows: `[n, H e]`.
    ///
    /// Keys are walked in tiles of [`PAGE_ROWS`] aligned to cache row 0, within
    /// splits of [`SPLIT_ROWS`] aligned likewise. A score is one accumulator over
    /// ascending head columns, then times `scale`. Per tile: `m' = max(m,
    /// scores)`, `c = exp(m - m')`, `p = exp(s - m')`, `l = l c + tree(p)` with
    /// the tile's keys in 16 lanes, `o = o c` and then `o = fma(p, v, o)` over
    /// ascending keys. Splits merge from the left: `m' = max(m1, m2)`, both sides
    /// scaled by `exp(m - m')` and added, left first. At the end `o / l`, turned back
    /// by [`quant::turbo::unrotate`] where the cache's values are rotated.
    fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor;

    /// One gated-delta layer between its projections: causal convolution with
    /// SiLU, normalised keys and queries, the delta rule: `[n, nv dv]`.
    ///
    /// `qkv: [n, C]`, `b, a: [n, nv]` are the projections. For each row, with the
    /// state `S: [dk, dv]` of each value head:
    /// `S ← S exp(decay softplus(a + dt_bias))`,
    /// `d = (v - Sᵀk) sigmoid(b)`, `S ← S + k dᵀ`, `o = Sᵀq`.
    /// Sums over `dk` are one accumulator, ascending, from 0.
    ///
    /// State is kept per slot together with what rebuilds it after each of the
    /// step's tentative rows, so that the next step can start after any of them
    /// ([`BatchSeq::kept`]).
    fn gated_delta(
        &self,
        state: &mut Delta,
        weights: &DeltaWeights,
        qkv: &Tensor,
        b: &Tensor,
        a: &Tensor,
        batch: &Batch,
    ) -> Tensor;

    /// Each row's experts, by `scores: [n, E]`: `Σ_rank w · expert(x)`, `[n, H]`.
    ///
    /// [`Experts::choose`] defines the choice and its weights; an expert is
    /// `down(activation(gate x) * up x)`; a row adds its experts by fused
    /// multiply-add in order of rank, from 0.
    fn moe(&self, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
        moe::grouped(self, x, scores, experts)
    }

    /// `activation(gate) * x`, one `gate: [n, 1]` for all of a row's columns.
    fn gate_rows(&self, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
        moe::gate_rows(self, x, gate, activation)
    }

    /// The column of each row's largest value; the lowest of equal ones. [`NO_TOKEN`] for a
    /// row that [gives no token](gives_token).
    fn argmax(&self, x: &Tensor) -> Vec<u32>;

    /// The token that each row of logits gives, as [`TokenChoice`] defines it: for a
    /// device that need not send the logits for that. The columns are the tokens of
    /// `list`, or all. `None`, the default, leaves the choice to whoever asks.
    fn choose_tokens(
        &self,
        x: &Tensor,
        list: Option<&TokenList>,
        choices: &[TokenChoice],
    ) -> Option<Vec<u32>> {
        let _ = (x, list, choices);
        None
    }

    /// What the rows of logits that `asked` names say of the token beside each, and their
    /// `n` likeliest, as [`Likeliest::of`] has it. Waits for the device.
    fn likeliest(&self, x: &Tensor, asked: &[(usize, u32)], n: usize) -> Vec<Likeliest> {
        let (values, cols) = (self.download(x), x.cols());
        let of = |&(row, token): &(usize, u32)| {
            Likeliest::of(&values[row * cols..(row + 1) * cols], token, n)
        };
        asked.iter().map(of).collect()
    }

    /// Runs the steps of `chain` in one go, tokens staying on the device in between: step
    /// `i` is `work(i, batch, x)`, `x` what the step before it passed on. Where all are
    /// greedy a token is the [`Backend::argmax`], else [`Backend::choose_tokens`].
    ///
    /// What `work` asks for may depend on nothing but the key and the shapes, as in
    /// [`Backend::step`]; of tokens, it may hand the batch's to [`Backend::embed`]. `None`,
    /// the default, leaves the steps to whoever asks.
    fn chain(
        &self,
        chain: &Chain<'_>,
        x: &Tensor,
        work: &mut dyn FnMut(usize, &Batch, &Tensor) -> Link,
    ) -> Option<Chained> {
        let _ = (chain, x, work);
        None
    }

    /// Ends a block of a residual stream and begins the next one: `x' = (x +
    /// rms(y) post) factor`, without norm where `post` is absent, and `rms(x')
    /// next`; both `[n, H]`.
    ///
    /// The ops of the same names one after the other, for devices that can do them
    /// in one go.
    fn add_norm(
        &self,
        x: Tensor,
        y: &Tensor,
        post: Option<&Tensor>,
        factor: f32,
        next: &Tensor,
        eps: f32,
    ) -> (Tensor, Tensor) {
        let mut x = match post {
            Some(w) => self.add(self.rms_norm(y, Some(w), y.cols(), eps), &x),
            None => self.add(x, y),
        };
        if factor != 1.0 {
            x = self.scale(x, factor);
        }
        let next = self.rms_norm(&x, Some(next), x.cols(), eps);
        (x, next)
    }

    /// [`Backend::rms_norm`] of every head, then [`Backend::rope`].
    fn norm_rope(
        &self,
        x: &Tensor,
        weight: &Tensor,
        rope: &Rope,
        eps: f32,
        batch: &Batch,
    ) -> Tensor {
        let heads = self.rms_norm(x, Some(weight), rope.head_dim, eps);
        self.rope(heads, rope, batch)
    }

    /// Shows an intermediate to whoever listens: nobody, by default. Tests
    /// compare them by name with other implementations.
    fn note(&self, name: Arguments<'_>, x: &Tensor) {
        let _ = (name, x);
    }
}

impl dyn Backend + '_ {
    /// `x wᵀ` for each of `w`.
    pub fn matmul_many<const N: usize>(&self, x: &Tensor, w: [&Matrix; N]) -> [Tensor; N] {
        let mut y = w.map(|w| {
            assert_eq!(w.cols, x.cols(), "inputs of the matrix");
            self.scratch(x.rows(), w.rows)
        });
        self.matmul_into(x, &w, &mut y);
        y
    }

    /// `x wᵀ`: `[n, rows of w]`.
    pub fn matmul(&self, x: &Tensor, w: &Matrix) -> Tensor {
        let [y] = self.matmul_many(x, [w]);
        y
    }
}
