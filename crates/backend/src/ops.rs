//! Ops: what a model computes, each with the order of its sums.

use crate::{
    Batch, Delta, Experts, Kv, Matrix, POSITION_AXES, Row, Store, Tensor, TokenGroups, math, moe,
};

/// The gate's function in [`Ops::glu`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// `x sigmoid(x)`
    Silu,
    /// GELU, tanh approximation
    GeluTanh,
    /// `1 / (1 + e^-x)`
    Sigmoid,
    /// GELU as defined: `x` times the normal distribution's probability of less than `x`
    Gelu,
}

impl Activation {
    /// The function of one value.
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Activation::Silu => math::silu(x),
            Activation::GeluTanh => math::gelu_tanh(x),
            Activation::Sigmoid => math::sigmoid(x),
            Activation::Gelu => math::gelu(x),
        }
    }
}

/// A rotary embedding: pair `j` of a head is columns `(first + j, first + j +
/// pair_offset)` and turns by `position * frequencies[j]`, the product rounded to
/// `f32` as the reference implementations do. The position is the row's on axis `axes[j]`.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Head size `e`.
    pub head_dim: usize,
    /// Distance of a pair's two columns.
    pub pair_offset: usize,
    /// Radians a position, by pair; pairs without a frequency do not turn.
    pub frequencies: Vec<f32>,
    /// The axis of [`Position`](crate::Position) that a pair reads, by pair; none are all 0.
    pub axes: Vec<u8>,
}

impl Rope {
    /// The axis of positions that pair `j` reads.
    #[inline]
    pub fn axis(&self, j: usize) -> usize {
        self.axes.get(j).map_or(0, |&axis| usize::from(axis))
    }

    /// Asserts that pairs lie in their head without overlapping, and that there are no axes
    /// or one for each pair.
    ///
    /// # Panics
    ///
    /// If not.
    pub fn check(&self) {
        let pairs = self.frequencies.len();
        assert!(
            pairs <= self.pair_offset && self.pair_offset + pairs <= self.head_dim,
            "pairs do not overlap and lie in their head"
        );
        assert!(
            self.axes.is_empty() || self.axes.len() == pairs,
            "an axis of positions for each pair"
        );
        assert!(
            self.axes
                .iter()
                .all(|&axis| usize::from(axis) < POSITION_AXES),
            "axes of positions"
        );
    }
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
    /// `W`: of the keys that a row may see, those before the `W` that end with the row's own
    /// are hidden.
    pub window: Option<usize>,
}

impl Attention {
    /// The cache rows that `row` sees: those it may, within the window.
    #[inline]
    pub fn visible(&self, row: Row) -> std::ops::Range<usize> {
        let first = self
            .window
            .map_or(0, |w| (row.own() as usize + 1).saturating_sub(w));
        first.max(row.sees.start as usize)..row.sees.end as usize
    }
}

/// How rows attend to themselves and the rows right before them, in the order in which they stand.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NearAttention {
    /// Heads `H`.
    pub heads: usize,
    /// Rows that a row sees, its own included: 32 at most.
    pub window: usize,
    /// What scores are bounded by.
    pub cap: f32,
}

/// Rows that a row of [`Ops::attend_near`] sees, at most.
pub const NEAR_ROWS_MAX: usize = 32;

impl NearAttention {
    /// Asserts that the shapes of [`Ops::attend_near`] fit.
    ///
    /// # Panics
    ///
    /// If not.
    pub fn check(&self, q: &Tensor, k: &Tensor, v: &Tensor, relative: &Tensor) {
        let shape = |x: &Tensor| (x.rows(), x.cols());
        assert!(
            shape(q) == shape(k) && shape(q) == shape(v),
            "queries, keys and values of one shape"
        );
        assert!(q.cols().is_multiple_of(self.heads), "whole heads");
        assert_eq!(
            shape(relative),
            (self.window, q.cols()),
            "a row for each distance"
        );
        assert!(
            (1..=NEAR_ROWS_MAX).contains(&self.window),
            "1 to {NEAR_ROWS_MAX} rows are seen"
        );
    }

    /// The rows that row `row` sees.
    pub fn visible(&self, row: usize) -> std::ops::Range<usize> {
        (row + 1).saturating_sub(self.window)..row + 1
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

/// The ops of a model's layers.
pub trait Ops: Store {
    /// Rows `tokens` of `table`, times `scale`: `[n, cols]`.
    fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor;

    /// `x` with rows of `embeddings` in the place of its own: for each of the batch's
    /// [media rows](Batch::media) of this `source`.
    fn replace_rows(&self, x: Tensor, embeddings: &Tensor, source: u32, batch: &Batch) -> Tensor;

    /// `y_i = x wᵢᵀ` for each matrix: `[n, rows of wᵢ]`.
    ///
    /// One accumulator an output, `acc = fma(w, x, acc)` over ascending columns
    /// from 0. Callers use [`dyn Backend::matmul`](trait.Backend.html#method.matmul).
    fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]);

    /// `y[r][i] = x[r] · w[ids[r][i]]`: [`Ops::matmul_into`] for a few chosen
    /// rows of `w`, as many for each row of `x`.
    fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor;

    /// [`Ops::matmul_rows`] for the rows of `w` that [`TokenGroups::best`] of a row's
    /// `scores` has, in any order, and the bits of their ids; both `[n, m]`.
    fn matmul_groups(
        &self,
        x: &Tensor,
        w: &Matrix,
        scores: &Tensor,
        groups: &TokenGroups,
    ) -> [Tensor; 2] {
        let values = self.download(scores);
        let rows = values.chunks_exact(scores.cols());
        let ids: Vec<Vec<u32>> = rows.map(|row| groups.best(row)).collect();
        let bits: Vec<f32> = ids.iter().flatten().map(|&id| f32::from_bits(id)).collect();
        let bits = self.upload(x.rows(), bits.len() / x.rows().max(1), &bits);
        [self.matmul_rows(x, w, &ids), bits]
    }

    /// `x / sqrt(mean(x²) + eps) * weight` over each run of `width` columns;
    /// without weight when it is absent.
    ///
    /// The sum of squares keeps 16 lanes ([`math::sum_tree`]); then
    /// `(x * (1 / sqrt(sum / width + eps))) * weight`.
    fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor;

    /// `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias` of each row; `weight` and `bias`
    /// are `[1, cols]`.
    ///
    /// The sum of a row and that of its squared distances `d = x - mean` keep 16 lanes
    /// ([`math::sum_tree`]); then `fma(d * (1 / sqrt(Σd² / cols + eps)), weight, bias)`.
    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Tensor;

    /// `x * factor + shift` by column, rounded once, or `x + shift` without a factor; `factor` and
    /// `shift` are `[1, cols]`.
    fn affine(&self, x: Tensor, factor: Option<&Tensor>, shift: &Tensor) -> Tensor;

    /// `activation(x)`.
    fn activate(&self, x: Tensor, activation: Activation) -> Tensor;

    /// `x` where it lies between `low` and `high`, else the nearer of these; NaN stays.
    fn clamp(&self, x: Tensor, low: f32, high: f32) -> Tensor;

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

    /// Turns every head of every row by the row's position: `x' = x cos - y sin`,
    /// `y' = y cos + x sin`, each as one product and one fused multiply-add.
    fn rope(&self, x: Tensor, rope: &Rope, batch: &Batch) -> Tensor;

    /// Writes `k, v: [n, K e]` as cache rows [`Row::at`], in the cache's format. Rows that
    /// only read are left out.
    fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch);

    /// `softmax(scale q·kᵀ) v` over the visible cache rows: `[n, H e]`.
    ///
    /// Keys are walked in tiles of [`PAGE_ROWS`](crate::PAGE_ROWS) aligned to cache row 0, within
    /// splits of [`SPLIT_ROWS`](crate::SPLIT_ROWS) aligned likewise. Where the cache's keys are rotated
    /// ([`quant::KvRowFormat::rotation`]), each head of a query is rotated first. A score is one
    /// accumulator over ascending head columns, then times `scale`. Per tile: `m' = max(m,
    /// scores)`, `c = exp(m - m')`, `p = exp(s - m')`, `l = l c + tree(p)` with
    /// the tile's keys in 16 lanes, `o = o c` and then `o = fma(p, v, o)` over
    /// ascending keys. Splits merge from the left: `m' = max(m1, m2)`, both sides
    /// scaled by `exp(m - m')` and added, left first. At the end `o / l`, turned back
    /// by [`quant::Rotation::undo`] where the cache's values are rotated.
    fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor;

    /// `softmax(cap tanh(q·(k + r) / cap)) v` over the row itself and those right before it, as many
    /// as `attention` says: `[n, H e]`. `q, k, v: [n, H e]`; `r` is row `d` of `relative` for the key of
    /// the row `d` before, in the columns of the head.
    ///
    /// A score sums `q (k + r)` by fused multiply-add in 16 lanes ([`math::sum_tree`]). With `m` the
    /// largest one, `p = exp(s - m)`, `l = l + p` and `o = fma(p, v, o)`, over ascending keys from 0. At
    /// the end `o / l`.
    fn attend_near(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        relative: &Tensor,
        attention: &NearAttention,
    ) -> Tensor;

    /// One gated-delta layer between its projections: causal convolution with
    /// SiLU, normalized keys and queries, the delta rule: `[n, nv dv]`.
    ///
    /// `qkv: [n, C]`, `b, a: [n, nv]` are the projections. For each row, with the
    /// state `S: [dk, dv]` of each value head:
    /// `S ← S exp(decay softplus(a + dt_bias))`,
    /// `d = (v - Sᵀk) sigmoid(b)`, `S ← S + k dᵀ`, `o = Sᵀq`.
    /// Sums over `dk` are one accumulator, ascending, from 0.
    ///
    /// State is kept per slot together with what rebuilds it after each of the
    /// step's tentative rows, so that the next step can start after any of them
    /// ([`BatchSeq::kept`](crate::BatchSeq::kept)).
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
}
