//! What families share: loading by name, and the gated feed-forward block.

use crate::ModelError;
use backend::{Activation, Backend, Matrix, Tensor};
use weights::Checkpoint;

/// Takes tensors out of a checkpoint and gives them to a backend.
#[derive(Clone)]
pub(crate) struct Loader<'a> {
    pub(crate) b: &'a dyn Backend,
    pub(crate) checkpoint: &'a Checkpoint,
    prefix: String,
}

impl<'a> Loader<'a> {
    pub(crate) fn new(b: &'a dyn Backend, checkpoint: &'a Checkpoint) -> Self {
        Loader {
            b,
            checkpoint,
            prefix: String::new(),
        }
    }

    /// The same, for names that go on from `name`.
    pub(crate) fn at(&self, name: impl std::fmt::Display) -> Self {
        Loader {
            prefix: format!("{}{name}.", self.prefix),
            ..*self
        }
    }

    /// The whole name of a weight.
    pub(crate) fn name_of(&self, name: &str) -> String {
        format!("{}{name}.weight", self.prefix)
    }

    /// A linear's or a table's weights, `[rows, cols]`.
    pub(crate) fn matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, ModelError> {
        Ok(self.b.matrix(&[self.stored(name, rows, cols)?]))
    }

    pub(crate) fn stored(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<quant::Stored<'a>, ModelError> {
        Ok(self.checkpoint.matrix(&self.name_of(name), rows, cols)?)
    }

    /// A norm's weight as it multiplies, `[1, n]`.
    pub(crate) fn vector(&self, name: &str, n: usize) -> Result<Tensor, ModelError> {
        Ok(self
            .b
            .upload(1, n, &self.checkpoint.vector(&self.name_of(name), n)?))
    }

    /// The weight of a norm that is stored around 0, as it multiplies: `[1, n]`.
    pub(crate) fn offset_norm(&self, name: &str, n: usize) -> Result<Tensor, ModelError> {
        Ok(self
            .b
            .upload(1, n, &self.checkpoint.norm(&self.name_of(name), n)?))
    }

    /// Parameters whose name has no `.weight`.
    pub(crate) fn bare(&self, name: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self
            .checkpoint
            .vector(&format!("{}{name}", self.prefix), n)?)
    }
}

/// `down(act(gate x) * up x)`
pub(crate) struct GatedMlp {
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    activation: Activation,
}

impl GatedMlp {
    /// Reads `gate_proj`, `up_proj: [inner, H]` and `down_proj: [H, inner]`.
    pub(crate) fn load(
        at: &Loader<'_>,
        hidden: usize,
        inner: usize,
        activation: Activation,
    ) -> Result<Self, ModelError> {
        Ok(GatedMlp {
            gate: at.matrix("gate_proj", inner, hidden)?,
            up: at.matrix("up_proj", inner, hidden)?,
            down: at.matrix("down_proj", hidden, inner)?,
            activation,
        })
    }

    /// `x: [n, H] → [n, H]`
    pub(crate) fn forward(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        let [gate, up] = b.matmul_many(x, [&self.gate, &self.up]); // [n, inner]
        b.matmul(&b.glu(gate, &up, self.activation), &self.down)
    }
}

/// Rotary frequencies `theta^(-2j/dim)` of the first `pairs` pairs.
pub(crate) fn frequencies(theta: f64, dim: usize, pairs: usize) -> Vec<f32> {
    (0..pairs)
        .map(|j| (1.0 / theta.powf(2.0 * j as f64 / dim as f64)) as f32)
        .collect()
}
