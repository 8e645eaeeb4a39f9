//! Layers of a block drafter: those of Qwen 3, or of Gemma 4.
//!
//! ```text
//! x = x + attention(rms(x))                 Qwen 3: scores scaled by 1/√e
//! x = x + mlp(rms(x))                       gated with SiLU
//!
//! x = x + rms(attention(rms(x)))            Gemma 4: scores unscaled, values normed by head
//! x = (x + rms(mlp(rms(x)))) layer_scalar   gated with GELU
//! ```
//!
//! DFlash 2 has convolutions before and after either sublayer of Qwen 3 (`conv.rs`).
//!
//! Layers of Gemma 4 attend as its full layers do, with their head size and rotary frequencies,
//! and may take their values from the key projection.

use super::conv::{Before, ConvShape, Convolution};
use crate::gemma4;
use crate::head_config::{LayerConfig, remember};
use crate::layers::{GatedMlp, Loader};
use crate::{ModelError, parse};
use backend::{Activation, Attention, Backend, Batch, Matrix, Rope, Tensor};
use cache::{GroupPlan, Memory, MemoryPlan};
use serde_json::Value;

/// What layers of Gemma 4 have beside those of Qwen 3.
struct Sandwich {
    post_attention_norm: Tensor,
    post_mlp_norm: Tensor,
    scalar: f32,
}

/// One layer.
pub(super) struct Layer {
    q: Matrix,
    k: Matrix,
    /// Absent where values come from the key projection.
    v: Option<Matrix>,
    o: Matrix,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: Rope,
    attention: Attention,
    /// Whether a row sees none of the block's later rows.
    is_causal: bool,
    /// The layer's number among those of its memory group.
    kv: usize,
    input_norm: Tensor,
    pre_mlp_norm: Tensor,
    mlp: GatedMlp,
    sandwich: Option<Sandwich>,
    /// Around attention and the feed-forward block.
    convolutions: Option<[Convolution; 2]>,
    eps: f32,
}

impl Layer {
    fn norm(&self, b: &dyn Backend, x: &Tensor, weight: &Tensor) -> Tensor {
        b.rms_norm(x, Some(weight), weight.cols(), self.eps)
    }

    /// Remembers keys of `x: [n, H]`, normed and turned, and values: `[n, K e]` each.
    pub(super) fn remember(&self, b: &dyn Backend, x: &Tensor, batch: &Batch, memory: &mut Memory) {
        let (key, value) = match &self.v {
            Some(v) => {
                let [key, value] = b.matmul_many(x, [&self.k, v]);
                (key, Some(value))
            }
            None => (b.matmul(x, &self.k), None),
        };
        let k = b.rope(self.norm(b, &key, &self.k_norm), &self.rope, batch);
        let value = value.unwrap_or(key);
        let v = match &self.sandwich {
            Some(_) => b.rms_norm(&value, None, self.rope.head_dim, self.eps),
            None => value,
        };
        let group = self.attention.group;
        b.kv_append(&mut memory.kv[group][self.kv], &k, &v, group, batch);
    }

    /// `softmax(q·kᵀ) v Wo` of `x: [n, H]`, which is remembered, too.
    fn attend(
        &self,
        b: &dyn Backend,
        x: &Tensor,
        (batch, causal): (&Batch, &Batch),
        memory: &mut Memory,
    ) -> Tensor {
        let q = self.norm(b, &b.matmul(x, &self.q), &self.q_norm);
        let q = b.rope(q, &self.rope, batch); // [n, h e]
        let seen = if self.is_causal { causal } else { batch };
        self.remember(b, x, batch, memory);
        let kv = &memory.kv[self.attention.group][self.kv];
        b.matmul(&b.attend(&q, kv, &self.attention, seen), &self.o)
    }

    /// The layer over `x: [n, H]`. `causal` is the batch in which no row sees later ones; `before`
    /// tells the rows before those of `x`, where the layer has convolutions.
    pub(super) fn forward(
        &self,
        b: &dyn Backend,
        x: &Tensor,
        batches: (&Batch, &Batch),
        before: Option<&Before<'_>>,
        memory: &mut Memory,
    ) -> Tensor {
        let h = self.norm(b, x, &self.input_norm);
        let a = self.around(b, 0, h, before, |h| self.attend(b, h, batches, memory)); // [n, H]
        let x = match &self.sandwich {
            Some(own) => b.add(self.norm(b, &a, &own.post_attention_norm), x),
            None => b.add(a, x),
        };
        let h = self.norm(b, &x, &self.pre_mlp_norm);
        let m = self.around(b, 1, h, before, |h| self.mlp.forward(b, h));
        match &self.sandwich {
            Some(own) => {
                let x = b.add(self.norm(b, &m, &own.post_mlp_norm), &x);
                b.scale(x, own.scalar)
            }
            None => b.add(m, &x),
        }
    }

    /// `sublayer(h)`, with convolutions `i` around it where the layer has them.
    fn around(
        &self,
        b: &dyn Backend,
        i: usize,
        h: Tensor,
        before: Option<&Before<'_>>,
        sublayer: impl FnOnce(&Tensor) -> Tensor,
    ) -> Tensor {
        let Some(convolutions) = &self.convolutions else {
            return sublayer(&h);
        };
        let before = before.expect("the rows before those of a block");
        let (h, added) = convolutions[i].before(b, &h, before);
        convolutions[i].after(b, &sublayer(&h), &added, before)
    }
}

/// What the configuration says of all layers.
pub(super) enum Shape {
    Qwen(Box<LayerConfig>),
    Gemma(Box<gemma4::Config>),
}

impl Shape {
    /// Reads `part`, the configuration of the layers; all of them have windows of so many rows as
    /// `window` says, if it is given and they name none.
    pub(super) fn read(part: &Value, window: Option<Option<usize>>) -> Result<Self, ModelError> {
        let model_type = part["model_type"].as_str().unwrap_or_default();
        if model_type.starts_with("gemma4") {
            let config = gemma4::Config::from_json(part)?;
            check_gemma(&config, part, window.is_some())?;
            return Ok(Shape::Gemma(Box::new(config)));
        }
        let mut config: LayerConfig = parse(part)?;
        if let Some(rows) = window {
            config.slide(rows);
        }
        config.check()?;
        Ok(Shape::Qwen(Box::new(config)))
    }

    pub(super) fn hidden_size(&self) -> usize {
        match self {
            Shape::Qwen(config) => config.hidden_size,
            Shape::Gemma(config) => config.hidden_size,
        }
    }

    pub(super) fn vocab_size(&self) -> usize {
        match self {
            Shape::Qwen(config) => config.vocab_size,
            Shape::Gemma(config) => config.vocab_size,
        }
    }

    pub(super) fn eps(&self) -> f32 {
        match self {
            Shape::Qwen(config) => config.rms_norm_eps,
            Shape::Gemma(config) => config.rms_norm_eps,
        }
    }

    /// The factor of embeddings, where the configuration names none.
    pub(super) fn embed_scale(&self) -> f32 {
        match self {
            Shape::Qwen(_) => 1.0,
            Shape::Gemma(config) => config.embed_scale(config.hidden_size),
        }
    }

    /// The layers at `at` and what they remember. `is_causal` tells by whether a layer has a
    /// window whether rows of a block see no later ones in it.
    pub(super) fn load(
        &self,
        at: &Loader<'_>,
        convolutions: Option<&ConvShape>,
        is_causal: impl Fn(bool) -> bool,
    ) -> Result<(Vec<Layer>, MemoryPlan), ModelError> {
        match self {
            Shape::Qwen(config) => {
                let (plan, places) = remember(config)?;
                let rope = config.rope()?;
                let layers = places.into_iter().enumerate().map(|(i, place)| {
                    let is_causal = is_causal(place.0.window.is_some());
                    load_qwen(&at.at(i), config, place, (&rope, convolutions), is_causal)
                });
                Ok((layers.collect::<Result<_, _>>()?, plan))
            }
            Shape::Gemma(_) if convolutions.is_some() => Err(ModelError::Unsupported {
                feature: "a DFlash 2 head of Gemma 4's layers".into(),
            }),
            Shape::Gemma(config) => {
                let n = config.num_hidden_layers;
                let group = GroupPlan {
                    window: None,
                    layers: vec![config.kv_layer(gemma4::LayerType::Full); n],
                };
                let plan = MemoryPlan {
                    groups: vec![group],
                    delta: Vec::new(),
                };
                let layers = (0..n).map(|i| load_gemma(&at.at(i), config, i, is_causal(false)));
                Ok((layers.collect::<Result<_, _>>()?, plan))
            }
        }
    }
}

/// An error if `config`, which is read from `part`, is of layers that no known block drafter has.
fn check_gemma(config: &gemma4::Config, part: &Value, has_window: bool) -> Result<(), ModelError> {
    let types = config.layer_types()?;
    let gelu = "gelu_pytorch_tanh";
    let activation = part["hidden_activation"].as_str().unwrap_or(gelu);
    let unknown = [
        (
            has_window || types.contains(&gemma4::LayerType::Sliding),
            "sliding windows".to_owned(),
        ),
        (config.enable_moe_block, "experts".to_owned()),
        (
            config.per_layer_width().is_some(),
            "per-layer embeddings".to_owned(),
        ),
        (
            part["attention_bias"].as_bool() == Some(true),
            "biases".to_owned(),
        ),
        (
            activation != gelu,
            format!("hidden_activation `{activation}`"),
        ),
    ];
    match unknown.into_iter().find(|(is, _)| *is) {
        Some((_, what)) => Err(ModelError::Unsupported {
            feature: format!("a block drafter of Gemma 4's layers with {what}"),
        }),
        None => Ok(()),
    }
}

fn load_qwen(
    at: &Loader<'_>,
    config: &LayerConfig,
    (attention, kv): (Attention, usize),
    (rope, convolutions): (&Rope, Option<&ConvShape>),
    is_causal: bool,
) -> Result<Layer, ModelError> {
    let (hidden, e) = (config.hidden_size, config.head_dim());
    let (q_out, kv_out) = (config.num_attention_heads * e, config.kv_heads() * e);
    let inner = config.intermediate_size;
    let own = at.at("self_attn");
    let convolutions = match convolutions {
        Some(shape) => Some([
            Convolution::load(&at.at("attention_conv"), shape)?,
            Convolution::load(&at.at("mlp_conv"), shape)?,
        ]),
        None => None,
    };
    Ok(Layer {
        q: own.matrix("q_proj", q_out, hidden)?,
        k: own.matrix("k_proj", kv_out, hidden)?,
        v: Some(own.matrix("v_proj", kv_out, hidden)?),
        o: own.matrix("o_proj", hidden, q_out)?,
        q_norm: own.vector("q_norm", e)?,
        k_norm: own.vector("k_norm", e)?,
        rope: rope.clone(),
        attention,
        is_causal,
        kv,
        input_norm: at.vector("input_layernorm", hidden)?,
        pre_mlp_norm: at.vector("post_attention_layernorm", hidden)?,
        mlp: GatedMlp::load(&at.at("mlp"), hidden, inner, Activation::Silu)?,
        sandwich: None,
        convolutions,
        eps: config.rms_norm_eps,
    })
}

/// Layer `i` of a head of Gemma 4's layers.
fn load_gemma(
    at: &Loader<'_>,
    config: &gemma4::Config,
    i: usize,
    is_causal: bool,
) -> Result<Layer, ModelError> {
    let full = gemma4::LayerType::Full;
    let hidden = config.hidden_size;
    let (e, kv_heads) = config.heads(full);
    let (q_out, kv_out) = (config.num_attention_heads * e, kv_heads * e);
    let own = at.at("self_attn");
    let has_values = !config.attention_k_eq_v;
    let values = has_values.then(|| own.matrix("v_proj", kv_out, hidden));
    // What is left of the target's configuration: it counts layers of the head here.
    let n_shared = config.num_kv_shared_layers.unwrap_or(0);
    let n = config.num_hidden_layers;
    let is_wide = config.use_double_wide_mlp && n_shared < n && i >= n - n_shared;
    let inner = config.intermediate_size * if is_wide { 2 } else { 1 };
    let scalar = match at.has_bare("layer_scalar") {
        true => at.bare("layer_scalar", 1)?[0],
        false => 1.0,
    };
    Ok(Layer {
        q: own.matrix("q_proj", q_out, hidden)?,
        k: own.matrix("k_proj", kv_out, hidden)?,
        v: values.transpose()?,
        o: own.matrix("o_proj", hidden, q_out)?,
        q_norm: own.vector("q_norm", e)?,
        k_norm: own.vector("k_norm", e)?,
        rope: config.rope(full)?,
        attention: Attention {
            group: 0,
            heads: config.num_attention_heads,
            scale: 1.0,
            window: None,
        },
        is_causal,
        kv: i,
        input_norm: at.vector("input_layernorm", hidden)?,
        pre_mlp_norm: at.vector("pre_feedforward_layernorm", hidden)?,
        mlp: GatedMlp::load(&at.at("mlp"), hidden, inner, Activation::GeluTanh)?,
        sandwich: Some(Sandwich {
            post_attention_norm: at.vector("post_attention_layernorm", hidden)?,
            post_mlp_norm: at.vector("post_feedforward_layernorm", hidden)?,
            scalar,
        }),
        convolutions: None,
        eps: config.rms_norm_eps,
    })
}
