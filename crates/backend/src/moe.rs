//! A mixture of experts, put together from other ops.
//!
//! Rows are grouped by expert, so that an expert's weights are read once a step
//! however many rows chose it. A row's result does not depend on the others:
//! products are row-invariant, and a row adds its experts in the order of their
//! rank.

use crate::{Activation, Matrix, Ops, Tensor, math};

/// One expert's weights.
#[derive(Debug)]
pub struct Expert {
    /// Gate rows, then up rows: `[2 I, H]`.
    pub gate_up: Matrix,
    /// `[H, I]`
    pub down: Matrix,
}

/// A layer's experts and how rows choose among them.
#[derive(Debug)]
pub struct Experts {
    /// All `E` of them.
    pub experts: Vec<Expert>,
    /// Experts of a row.
    pub top_k: usize,
    /// Factors by expert, applied after the chosen weights are normalized.
    pub scale: Option<Vec<f32>>,
    /// The gate's function.
    pub activation: Activation,
}

/// One row's choice: expert and weight, by rank.
pub type Choice = Vec<(usize, f32)>;

impl Experts {
    /// Chooses by router `scores: [E]`: `p = softmax(scores)` summed in ascending
    /// order, the `top_k` largest (the lower index of equal ones), divided by
    /// their sum in order of rank, times [`Experts::scale`].
    pub fn choose(&self, scores: &[f32]) -> Choice {
        let max = scores
            .iter()
            .fold(f32::NEG_INFINITY, |m, &s| if s > m { s } else { m });
        let powers: Vec<f32> = scores.iter().map(|s| math::exp(s - max)).collect();
        self.choose_by(&powers)
    }

    /// [`Experts::choose`] from `exp(scores - max scores)`, for backends that have
    /// a faster exponential.
    pub fn choose_by(&self, powers: &[f32]) -> Choice {
        let mut choice = Choice::new();
        self.choose_into(powers, &mut Vec::new(), &mut choice);
        choice
    }

    /// [`Experts::choose_by`] in the memory of `choice`; what `order` holds does not
    /// matter.
    pub fn choose_into(&self, powers: &[f32], order: &mut Vec<usize>, choice: &mut Choice) {
        let total: f32 = powers.iter().sum();
        order.clear();
        order.extend(0..powers.len());
        let by_power = |&a: &usize, &b: &usize| powers[b].total_cmp(&powers[a]).then(a.cmp(&b));
        if self.top_k < order.len() {
            order.select_nth_unstable_by(self.top_k, by_power);
            order.truncate(self.top_k);
        }
        order.sort_unstable_by(by_power);
        let chosen: f32 = order.iter().map(|&e| powers[e] / total).sum();
        let scale = |e: usize| self.scale.as_ref().map_or(1.0, |s| s[e]);
        choice.clear();
        choice.extend(
            order
                .iter()
                .map(|&e| (e, powers[e] / total / chosen * scale(e))),
        );
    }
}

/// [`Ops::moe`] put together from other ops: `y[r] = Σ_rank w · expert(x[r])`,
/// by fused multiply-add from 0.
pub fn grouped<B: Ops + ?Sized>(b: &B, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
    let hidden = x.cols();
    let choices: Vec<Choice> = b
        .download(scores)
        .chunks_exact(scores.cols())
        .map(|row| experts.choose(row))
        .collect();
    let mut by_expert: Vec<Vec<(usize, usize)>> = vec![Vec::new(); experts.experts.len()];
    for (row, choice) in choices.iter().enumerate() {
        for (rank, &(expert, _)) in choice.iter().enumerate() {
            by_expert[expert].push((row, rank));
        }
    }
    // By row and rank.
    let mut parts = vec![0.0; x.rows() * experts.top_k * hidden];
    for (expert, chosen) in experts
        .experts
        .iter()
        .zip(&by_expert)
        .filter(|(_, chosen)| !chosen.is_empty())
    {
        let rows: Vec<usize> = chosen.iter().map(|&(row, _)| row).collect();
        let product = |x: &Tensor, w: &Matrix| {
            let mut y = [b.scratch(x.rows(), w.rows)];
            b.matmul_into(x, &[w], &mut y);
            let [y] = y;
            y
        };
        let inner = expert.down.cols;
        let both = product(&b.gather(x, &rows), &expert.gate_up); // [m, 2 I]
        let up = b.columns(&both, inner, inner);
        let h = b.glu(b.columns(&both, 0, inner), &up, experts.activation);
        let y = product(&h, &expert.down); // [m, H]
        for (&(row, rank), y) in chosen.iter().zip(b.download(&y).chunks_exact(hidden)) {
            parts[(row * experts.top_k + rank) * hidden..][..hidden].copy_from_slice(y);
        }
    }
    let mut out = vec![0.0f32; x.rows() * hidden];
    for ((out, choice), parts) in out
        .chunks_exact_mut(hidden)
        .zip(&choices)
        .zip(parts.chunks_exact(experts.top_k * hidden))
    {
        for (&(_, weight), part) in choice.iter().zip(parts.chunks_exact(hidden)) {
            out.iter_mut()
                .zip(part)
                .for_each(|(out, y)| *out = weight.mul_add(*y, *out));
        }
    }
    b.upload(x.rows(), hidden, &out)
}

/// `activation(gate[r]) · x[r]`
pub(crate) fn gate_rows<B: Ops + ?Sized>(
    b: &B,
    x: &Tensor,
    gate: &Tensor,
    activation: Activation,
) -> Tensor {
    assert_eq!((gate.rows(), gate.cols()), (x.rows(), 1), "one gate a row");
    let mut values = b.download(x).into_owned();
    for (row, &gate) in values
        .chunks_exact_mut(x.cols())
        .zip(b.download(gate).iter())
    {
        let factor = activation.apply(gate);
        row.iter_mut().for_each(|x| *x *= factor);
    }
    b.upload(x.rows(), x.cols(), &values)
}
