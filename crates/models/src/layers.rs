//! What families share: loading by name, clipped linears, and the gated feed-forward block.
//!
//! A tensor ends where nobody reads it any more, in a block of its own if need be:
//! what is alive at once is the room that a step takes, 2 MB for a chunk of 256 rows of
//! 2048 columns.

use crate::ModelError;
use backend::{Activation, Backend, Expert, Experts, Matrix, Tensor};
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

    /// A linear's or a layer norm's bias, `[1, n]`.
    pub(crate) fn bias(&self, name: &str, n: usize) -> Result<Tensor, ModelError> {
        let bias = self.bare(&format!("{name}.bias"), n)?;
        Ok(self.b.upload(1, n, &bias))
    }

    /// The weight of a norm that is stored around 0, as it multiplies: `[1, n]`.
    pub(crate) fn offset_norm(&self, name: &str, n: usize) -> Result<Tensor, ModelError> {
        Ok(self
            .b
            .upload(1, n, &self.checkpoint.norm(&self.name_of(name), n)?))
    }

    /// [`Loader::offset_norm`] with its first columns, so many, times a factor.
    pub(crate) fn lengthened_norm(
        &self,
        name: &str,
        n: usize,
        (first, factor): (usize, f32),
    ) -> Result<Tensor, ModelError> {
        let mut weight = self.checkpoint.norm(&self.name_of(name), n)?;
        weight[..first].iter_mut().for_each(|w| *w *= factor);
        Ok(self.b.upload(1, n, &weight))
    }

    /// The whole name of a parameter without `.weight`.
    fn bare_name(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// Whether there are parameters `name`, whose name has no `.weight`.
    pub(crate) fn has_bare(&self, name: &str) -> bool {
        self.checkpoint.has(&self.bare_name(name))
    }

    /// A table `[rows, cols]` whose name has no `.weight`.
    pub(crate) fn bare_matrix(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Matrix, ModelError> {
        let stored = self.checkpoint.matrix(&self.bare_name(name), rows, cols)?;
        Ok(self.b.matrix(&[stored]))
    }

    /// The numbers of [`Loader::bare_matrix`], of all its axes.
    pub(crate) fn bare_values(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Vec<f32>, ModelError> {
        let stored = self.checkpoint.matrix(&self.bare_name(name), rows, cols)?;
        Ok(stored.to_f32())
    }

    /// Parameters whose name has no `.weight`.
    pub(crate) fn bare(&self, name: &str, n: usize) -> Result<Vec<f32>, ModelError> {
        Ok(self.checkpoint.vector(&self.bare_name(name), n)?)
    }
}

/// `(x - mean(x)) / √(variance(x) + eps) · weight + bias`
pub(crate) struct LayerNorm {
    pub(crate) weight: Tensor,
    pub(crate) bias: Tensor,
    pub(crate) eps: f32,
}

impl LayerNorm {
    /// Reads `name.weight` and `name.bias`, of `n` each.
    pub(crate) fn load(
        at: &Loader<'_>,
        name: &str,
        n: usize,
        eps: f32,
    ) -> Result<Self, ModelError> {
        Ok(LayerNorm {
            weight: at.vector(name, n)?,
            bias: at.bias(name, n)?,
            eps,
        })
    }

    /// `x: [n, cols] → [n, cols]`
    pub(crate) fn forward(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        b.layer_norm(x, &self.weight, &self.bias, self.eps)
    }
}

/// `x Wᵀ + b`
pub(crate) struct Linear {
    /// `[rows, cols]`
    pub(crate) weight: Matrix,
    /// `[1, rows]`
    pub(crate) bias: Tensor,
}

impl Linear {
    pub(crate) fn load(
        at: &Loader<'_>,
        name: &str,
        rows: usize,
        cols: usize,
    ) -> Result<Self, ModelError> {
        Ok(Linear {
            weight: at.matrix(name, rows, cols)?,
            bias: at.bias(name, rows)?,
        })
    }

    /// `x: [n, cols] → [n, rows]`
    pub(crate) fn forward(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        b.affine(b.matmul(x, &self.weight), None, &self.bias)
    }
}

/// `clamp(clamp(x) Wᵀ)`, without bounds where there are none.
pub(crate) struct ClippedLinear {
    weight: Matrix,
    input: Option<[f32; 2]>,
    output: Option<[f32; 2]>,
}

impl ClippedLinear {
    /// Loads `name`, its weight made of the parts that `parts` takes from what is stored.
    pub(crate) fn load(
        at: &Loader<'_>,
        name: &str,
        (rows, cols): (usize, usize),
        is_clipped: bool,
        parts: impl Fn(quant::Stored<'_>) -> Vec<quant::Stored<'_>>,
    ) -> Result<Self, ModelError> {
        let at = at.at(name);
        let bounds = |of: &str| {
            let bound = |end: &str, none: f32| match at.has_bare(&format!("{of}_{end}")) {
                true => Ok(at.bare(&format!("{of}_{end}"), 1)?[0]),
                false => Ok::<_, ModelError>(none),
            };
            let bounds = [
                bound("min", f32::NEG_INFINITY)?,
                bound("max", f32::INFINITY)?,
            ];
            let is_bound = is_clipped && bounds.iter().any(|x| x.is_finite());
            Ok::<_, ModelError>(is_bound.then_some(bounds))
        };
        Ok(ClippedLinear {
            weight: at.b.matrix(&parts(at.stored("linear", rows, cols)?)),
            input: bounds("input")?,
            output: bounds("output")?,
        })
    }

    /// Loads `name`, its weight as it is stored.
    pub(crate) fn plain(
        at: &Loader<'_>,
        name: &str,
        shape: (usize, usize),
        is_clipped: bool,
    ) -> Result<Self, ModelError> {
        ClippedLinear::load(at, name, shape, is_clipped, |stored| vec![stored])
    }

    /// `x: [n, cols] → [n, rows]`
    pub(crate) fn forward(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        let y = match self.input {
            Some([low, high]) => {
                let x = b.clamp(b.columns(x, 0, x.cols()), low, high);
                b.matmul(&x, &self.weight)
            }
            None => b.matmul(x, &self.weight),
        };
        match self.output {
            Some([low, high]) => b.clamp(y, low, high),
            None => y,
        }
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
        let inner = {
            let [gate, up] = b.matmul_many(x, [&self.gate, &self.up]); // [n, inner]
            b.glu(gate, &up, self.activation)
        };
        b.matmul(&inner, &self.down)
    }
}

/// Experts of a layer: `count` of inner width `inner`, `top_k` for each row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExpertShape {
    pub(crate) count: usize,
    pub(crate) top_k: usize,
    pub(crate) hidden: usize,
    pub(crate) inner: usize,
    pub(crate) activation: Activation,
}

impl ExpertShape {
    /// Names of the tensors that [`ExpertShape::load`] reads of `count` experts at
    /// `at`, in the layout that `checkpoint` has; in the fused one if it has none.
    pub(crate) fn tensors(
        checkpoint: &Checkpoint,
        at: &str,
        mlx: &str,
        count: usize,
    ) -> Vec<String> {
        let projections = ["gate_proj", "up_proj", "down_proj"];
        let under = |module: String| projections.map(|p| format!("{at}{module}.{p}.weight"));
        let is_any = |names: &[String]| names.iter().any(|n| checkpoint.has(n));
        let stacked = under(mlx.to_owned());
        if is_any(&stacked) {
            return stacked.into();
        }
        let single: Vec<String> = (0..count)
            .flat_map(|e| under(format!("experts.{e}")))
            .collect();
        if is_any(&single) {
            return single;
        }
        ["gate_up_proj", "down_proj"]
            .map(|p| format!("{at}experts.{p}"))
            .into()
    }

    /// Reads a layer's experts in any of the layouts that checkpoints have:
    /// fused and stacked (`gate_up_proj: [E, 2 I, H]`), stacked
    /// (`gate_proj: [E, I, H]`, under `switch_mlp` or `switch_glu` in MLX files),
    /// or one by one (`0.gate_proj.weight`).
    pub(crate) fn load(
        self,
        at: &Loader<'_>,
        mlx: &str,
        scale: Option<Vec<f32>>,
    ) -> Result<Experts, ModelError> {
        let ExpertShape {
            count,
            top_k,
            hidden,
            inner,
            activation,
        } = self;
        if top_k == 0 || top_k > count {
            return Err(ModelError::Config {
                message: format!("a row cannot choose {top_k} of {count} experts"),
            });
        }
        let fused = at.at("experts");
        let stacked = match mlx.strip_prefix("experts.") {
            Some(inner) => fused.at(inner),
            None => at.at(mlx),
        };
        let one = |parts: &[quant::Stored<'_>], down: quant::Stored<'_>| Expert {
            gate_up: at.b.matrix(parts),
            down: at.b.matrix(&[down]),
        };
        let mut experts = Vec::with_capacity(count);
        if at.checkpoint.has(&fused.bare_name("gate_up_proj")) {
            let both = at.checkpoint.matrix(
                &fused.bare_name("gate_up_proj"),
                count * 2 * inner,
                hidden,
            )?;
            let down =
                at.checkpoint
                    .matrix(&fused.bare_name("down_proj"), count * hidden, inner)?;
            for e in 0..count {
                let both = both.slice(e * 2 * inner..(e + 1) * 2 * inner);
                experts.push(one(&[both], down.slice(e * hidden..(e + 1) * hidden)));
            }
        } else if at.checkpoint.has(&stacked.name_of("gate_proj")) {
            let gate = stacked.stored("gate_proj", count * inner, hidden)?;
            let up = stacked.stored("up_proj", count * inner, hidden)?;
            let down = stacked.stored("down_proj", count * hidden, inner)?;
            for e in 0..count {
                let rows = e * inner..(e + 1) * inner;
                let parts = [gate.slice(rows.clone()), up.slice(rows)];
                experts.push(one(&parts, down.slice(e * hidden..(e + 1) * hidden)));
            }
        } else {
            for e in 0..count {
                let at = fused.at(e);
                let (gate, up) = (
                    at.stored("gate_proj", inner, hidden)?,
                    at.stored("up_proj", inner, hidden)?,
                );
                experts.push(one(&[gate, up], at.stored("down_proj", hidden, inner)?));
            }
        }
        Ok(Experts {
            experts,
            top_k,
            scale,
            activation,
        })
    }
}

/// Rotary frequencies `theta^(-2j/dim)` of the first `pairs` pairs.
pub(crate) fn frequencies(theta: f64, dim: usize, pairs: usize) -> Vec<f32> {
    (0..pairs)
        .map(|j| (1.0 / theta.powf(2.0 * j as f64 / dim as f64)) as f32)
        .collect()
}
