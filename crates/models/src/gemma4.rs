//! Gemma 4 decoder: dense, with per-layer embeddings, or with a mixture of
//! experts (`specs/gemma4.md`).
//!
//! ```text
//! x = E[id] √H
//! x = x + rms(attention(rms(x)))          sliding window or full, scores unscaled
//! x = x + rms(mlp(rms(x)))                GELU-gated
//!     or rms(rms(mlp(rms(x))) + rms(experts(rms(x))))
//! x = x + rms(P (gelu(G x) * ple))        models with per-layer embeddings
//! x = x * layer_scalar
//! logits = cap tanh(rms(x) Eᵀ / cap)
//! ```
//!
//! Full layers may take their values from the key projection (`k = v`); trailing
//! layers may read another layer's keys and values. Letters: `n` rows, `H`
//! hidden size, `h` query heads, `K` key/value heads, `e` head size.

use crate::layers::{ExpertShape, GatedMlp, Loader, frequencies};
use crate::{Family, ModelError, Taps, Target, parse, require, require_sizes};
use backend::{Activation, Attention, Backend, Batch, Experts, Matrix, Rope, Tensor};
use cache::{GroupPlan, Memory, MemoryPlan};
use serde::Deserialize;
use std::collections::BTreeMap;
use weights::Checkpoint;

pub(crate) const FAMILY: Family = Family {
    names: &[
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_text",
        "gemma4",
        "gemma4_unified",
    ],
    load: |b, checkpoint| Ok(Box::new(Gemma4::load(b, checkpoint)?)),
};

/// The memory group of sliding layers.
pub(crate) const SLIDING: usize = 0;
/// The memory group of full layers.
pub(crate) const FULL: usize = 1;

/// Rotary parameters of one layer type.
#[derive(Clone, Debug, Deserialize, PartialEq)]
pub(crate) struct RopeConfig {
    rope_theta: f64,
    #[serde(default)]
    rope_type: Option<String>,
    #[serde(default)]
    partial_rotary_factor: Option<f64>,
    #[serde(default)]
    factor: Option<f64>,
}

#[derive(Clone, Debug, Deserialize, PartialEq)]
pub(crate) struct RopeConfigs {
    pub(crate) sliding_attention: RopeConfig,
    pub(crate) full_attention: RopeConfig,
}

/// The text part of `config.json` (`specs/gemma4.md` §2).
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    pub(crate) num_key_value_heads: usize,
    pub(crate) head_dim: usize,
    #[serde(default)]
    pub(crate) global_head_dim: Option<usize>,
    #[serde(default)]
    pub(crate) num_global_key_value_heads: Option<usize>,
    #[serde(default)]
    layer_types: Option<Vec<LayerType>>,
    #[serde(default = "default_window")]
    pub(crate) sliding_window: usize,
    #[serde(default)]
    attention_k_eq_v: bool,
    #[serde(default)]
    num_kv_shared_layers: Option<usize>,
    #[serde(default)]
    use_double_wide_mlp: bool,
    #[serde(default)]
    pub(crate) hidden_size_per_layer_input: Option<usize>,
    #[serde(default)]
    vocab_size_per_layer_input: Option<usize>,
    #[serde(default)]
    pub(crate) enable_moe_block: bool,
    #[serde(default)]
    num_experts: Option<usize>,
    #[serde(default)]
    top_k_experts: Option<usize>,
    #[serde(default, alias = "expert_intermediate_size")]
    moe_intermediate_size: Option<usize>,
    pub(crate) rope_parameters: RopeConfigs,
    #[serde(default = "default_eps")]
    pub(crate) rms_norm_eps: f32,
    #[serde(default)]
    pub(crate) final_logit_softcapping: Option<f32>,
    #[serde(default)]
    use_bidirectional_attention: Option<serde_json::Value>,
    #[serde(default = "default_context")]
    max_position_embeddings: usize,
    #[serde(default, alias = "torch_dtype")]
    dtype: Option<String>,
    /// Newer files say here what `global_head_dim` and
    /// `num_global_key_value_heads` say in older ones.
    #[serde(default)]
    per_layer_config: BTreeMap<usize, LayerOverrides>,
    #[serde(skip)]
    full_key_value_heads: Option<usize>,
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
struct LayerOverrides {
    #[serde(default)]
    head_dim: Option<usize>,
    #[serde(default)]
    num_key_value_heads: Option<usize>,
}

fn default_window() -> usize {
    512
}
fn default_eps() -> f32 {
    1e-6
}
fn default_context() -> usize {
    131_072
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(crate) enum LayerType {
    #[serde(rename = "sliding_attention")]
    Sliding,
    #[serde(rename = "full_attention")]
    Full,
}

impl Config {
    /// Reads the text part of `checkpoint`'s configuration.
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let mut config: Config = parse(checkpoint.text_config())?;
        config.check_sizes()?;
        config.take_overrides()?;
        config.check()?;
        Ok(config)
    }

    /// Turns per-layer overrides into those of the layer type.
    fn take_overrides(&mut self) -> Result<(), ModelError> {
        let types = self.layer_types()?;
        let overrides = std::mem::take(&mut self.per_layer_config);
        for (i, layer) in overrides {
            let full = types.get(i) == Some(&LayerType::Full);
            if full {
                self.global_head_dim = layer.head_dim.or(self.global_head_dim);
                self.full_key_value_heads = layer.num_key_value_heads.or(self.full_key_value_heads);
            }
            // One value a layer type is all that any checkpoint has.
            let layer_type = if full {
                LayerType::Full
            } else {
                LayerType::Sliding
            };
            let (head_dim, kv_heads) = self.heads(layer_type);
            let same = |own: Option<usize>, all: usize| own.is_none_or(|own| own == all);
            if !same(layer.head_dim, head_dim) || !same(layer.num_key_value_heads, kv_heads) {
                return Err(ModelError::Unsupported {
                    feature: format!("per_layer_config with heads of layer {i} unlike its type's"),
                });
            }
        }
        Ok(())
    }

    /// The type of every layer; the last one is always full.
    pub(crate) fn layer_types(&self) -> Result<Vec<LayerType>, ModelError> {
        let n = self.num_hidden_layers;
        let mut types = match &self.layer_types {
            Some(types) => types.clone(),
            None => (0..n)
                .map(|i| {
                    if i % 6 == 5 {
                        LayerType::Full
                    } else {
                        LayerType::Sliding
                    }
                })
                .collect(),
        };
        require(types.len() == n && n > 0, || {
            format!("layer_types has {} entries for {n} layers", types.len())
        })?;
        types[n - 1] = LayerType::Full;
        Ok(types)
    }

    /// Head size and key/value heads of a layer type.
    pub(crate) fn heads(&self, layer_type: LayerType) -> (usize, usize) {
        match layer_type {
            LayerType::Sliding => (self.head_dim, self.num_key_value_heads),
            LayerType::Full => {
                let own = self
                    .num_global_key_value_heads
                    .filter(|_| self.attention_k_eq_v)
                    .or(self.full_key_value_heads);
                (
                    self.global_head_dim.unwrap_or(512),
                    own.unwrap_or(self.num_key_value_heads),
                )
            }
        }
    }

    /// How the heads of a layer type turn (§4.2). The exponent's denominator is
    /// the whole head, also where only some pairs turn.
    pub(crate) fn rope(&self, layer_type: LayerType) -> Result<Rope, ModelError> {
        let config = match layer_type {
            LayerType::Sliding => &self.rope_parameters.sliding_attention,
            LayerType::Full => &self.rope_parameters.full_attention,
        };
        let (head_dim, _) = self.heads(layer_type);
        let (pairs, factor) = match config.rope_type.as_deref().unwrap_or("default") {
            "default" => (head_dim / 2, 1.0),
            "proportional" => {
                let share = config.partial_rotary_factor.unwrap_or(1.0);
                (
                    (share * head_dim as f64 / 2.0) as usize,
                    config.factor.unwrap_or(1.0),
                )
            }
            other => {
                return Err(ModelError::Unsupported {
                    feature: format!("rope_type `{other}`"),
                });
            }
        };
        require(pairs <= head_dim / 2, || {
            format!("partial_rotary_factor turns {pairs} pairs of a head of {head_dim}")
        })?;
        let mut frequencies = frequencies(config.rope_theta, head_dim, pairs);
        frequencies
            .iter_mut()
            .for_each(|f| *f = (f64::from(*f) / factor) as f32);
        Ok(Rope {
            head_dim,
            pair_offset: head_dim / 2,
            frequencies,
            axes: Vec::new(),
        })
    }

    /// `√H`, rounded as the reference rounds it: to the embedding's type.
    fn embed_scale(&self, width: usize) -> f32 {
        let scale = (width as f64).sqrt() as f32;
        match self.dtype.as_deref() {
            Some("bfloat16") => round_bf16(scale),
            _ => scale,
        }
    }

    fn check_sizes(&self) -> Result<(), ModelError> {
        let or_one = |size: Option<usize>| size.unwrap_or(1).max(1);
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.num_key_value_heads),
            (
                "num_global_key_value_heads",
                or_one(self.num_global_key_value_heads),
            ),
            ("head_dim", self.head_dim),
            ("global_head_dim", or_one(self.global_head_dim)),
            ("sliding_window", self.sliding_window),
            (
                "hidden_size_per_layer_input",
                or_one(self.hidden_size_per_layer_input),
            ),
            ("num_experts", or_one(self.num_experts)),
            ("moe_intermediate_size", or_one(self.moe_intermediate_size)),
            ("max_position_embeddings", self.max_position_embeddings),
        ];
        require_sizes(self.num_hidden_layers, &sizes)
    }

    fn check(&self) -> Result<(), ModelError> {
        for layer_type in [LayerType::Sliding, LayerType::Full] {
            let (head_dim, kv_heads) = self.heads(layer_type);
            require(
                kv_heads > 0 && self.num_attention_heads.is_multiple_of(kv_heads),
                || {
                    format!(
                        "{} query heads cannot share {kv_heads} key/value heads",
                        self.num_attention_heads
                    )
                },
            )?;
            require(head_dim > 0 && head_dim.is_multiple_of(2), || {
                format!("head size {head_dim} has no pairs to turn")
            })?;
        }
        if self
            .use_bidirectional_attention
            .as_ref()
            .is_some_and(|v| v == "all")
        {
            return Err(ModelError::Unsupported {
                feature: "bidirectional text attention (embedding models)".into(),
            });
        }
        Ok(())
    }
}

fn round_bf16(x: f32) -> f32 {
    let mut bytes = [0; 2];
    quant::Scalar::Bf16.put(&mut bytes, 0, x);
    quant::Scalar::Bf16.get(&bytes, 0)
}

/// Query side of an attention layer: all of it, for a layer without keys and
/// values of its own.
pub(crate) struct QueryAttention {
    q: Matrix,
    q_norm: Tensor,
    o: Matrix,
    pub(crate) rope: Rope,
    attention: Attention,
    eps: f32,
}

impl QueryAttention {
    pub(crate) fn load(
        at: &Loader<'_>,
        config: &Config,
        layer_type: LayerType,
    ) -> Result<Self, ModelError> {
        let (head_dim, _) = config.heads(layer_type);
        let heads = config.num_attention_heads;
        let (group, window) = match layer_type {
            LayerType::Sliding => (SLIDING, Some(config.sliding_window)),
            LayerType::Full => (FULL, None),
        };
        Ok(QueryAttention {
            q: at.matrix("q_proj", heads * head_dim, config.hidden_size)?,
            q_norm: at.vector("q_norm", head_dim)?,
            o: at.matrix("o_proj", config.hidden_size, heads * head_dim)?,
            rope: config.rope(layer_type)?,
            attention: Attention {
                group,
                heads,
                scale: 1.0,
                window,
            },
            eps: config.rms_norm_eps,
        })
    }

    /// `rope(rms(x Wq))`: `[n, h e]`
    fn query(&self, b: &dyn Backend, q: Tensor, batch: &Batch) -> Tensor {
        let q = b.rms_norm(&q, Some(&self.q_norm), self.rope.head_dim, self.eps);
        b.rope(q, &self.rope, batch)
    }

    /// Attention over what the layer's keys and values hold: `[n, H]`.
    pub(crate) fn read(
        &self,
        b: &dyn Backend,
        q: &Tensor,
        kv: &backend::Kv,
        batch: &Batch,
    ) -> Tensor {
        b.matmul(&b.attend(q, kv, &self.attention, batch), &self.o)
    }

    /// Query projection and attention of a layer that owns no keys and values.
    pub(crate) fn forward(
        &self,
        b: &dyn Backend,
        x: &Tensor,
        kv: &backend::Kv,
        batch: &Batch,
    ) -> Tensor {
        let q = self.query(b, b.matmul(x, &self.q), batch);
        self.read(b, &q, kv, batch)
    }
}

/// Keys and values of a layer that owns them.
struct OwnKv {
    k: Matrix,
    /// Absent where values come from the key projection.
    v: Option<Matrix>,
    k_norm: Tensor,
}

/// A layer's gate on its token's own embedding (§7).
struct PerLayerGate {
    gate: Matrix,
    projection: Matrix,
    norm: Tensor,
}

/// The model's per-layer embeddings (§7).
struct PerLayerInputs {
    table: Matrix,
    table_scale: f32,
    projection: Matrix,
    norm: Tensor,
    width: usize,
}

/// The routed experts beside a layer's dense block (§8).
struct Mixture {
    router: Matrix,
    /// The router's scale with `1/√H`, as the norm's weight.
    router_scale: Tensor,
    experts: Experts,
    pre_norm: Tensor,
    post_dense_norm: Tensor,
    post_experts_norm: Tensor,
}

impl Mixture {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        let size = |value: Option<usize>, name: &str| {
            value.filter(|&n| n > 0).ok_or_else(|| ModelError::Config {
                message: format!("{name} is missing"),
            })
        };
        let shape = ExpertShape {
            count: size(config.num_experts, "num_experts")?,
            top_k: size(config.top_k_experts, "top_k_experts")?,
            hidden,
            inner: size(config.moe_intermediate_size, "moe_intermediate_size")?,
            activation: Activation::GeluTanh,
        };
        let router = at.at("router");
        let mut scale = router.bare("scale", hidden)?;
        scale
            .iter_mut()
            .for_each(|s| *s *= (hidden as f32).sqrt().recip());
        let per_expert = router.bare("per_expert_scale", shape.count)?;
        Ok(Mixture {
            router: router.matrix("proj", shape.count, hidden)?,
            router_scale: at.b.upload(1, hidden, &scale),
            experts: shape.load(at, "experts.switch_glu", Some(per_expert))?,
            pre_norm: at.vector("pre_feedforward_layernorm_2", hidden)?,
            post_dense_norm: at.vector("post_feedforward_layernorm_1", hidden)?,
            post_experts_norm: at.vector("post_feedforward_layernorm_2", hidden)?,
        })
    }

    /// `rms(mlp(h)) + rms(Σ w expert(rms(x)))`; the router reads the residual stream `x` itself.
    fn forward(
        &self,
        b: &dyn Backend,
        i: usize,
        x: &Tensor,
        (mlp, h): (&GatedMlp, &Tensor),
        eps: f32,
    ) -> Tensor {
        let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), w.cols(), eps);
        let scores = b.matmul(&norm(x, &self.router_scale), &self.router); // [n, E]
        let dense = mlp.forward(b, h); // [n, H]
        b.note(format_args!("layers.{i}.mlp_out"), &dense);
        let routed = b.moe(&norm(x, &self.pre_norm), &scores, &self.experts); // [n, H]
        b.note(format_args!("layers.{i}.moe_out"), &routed);
        b.add(
            norm(&dense, &self.post_dense_norm),
            &norm(&routed, &self.post_experts_norm),
        )
    }
}

struct Layer {
    attention: QueryAttention,
    own: Option<OwnKv>,
    /// Where its keys and values lie: group, and layer within the group.
    kv: (usize, usize),
    mlp: GatedMlp,
    mixture: Option<Mixture>,
    input_norm: Tensor,
    post_attention_norm: Tensor,
    pre_mlp_norm: Tensor,
    post_mlp_norm: Tensor,
    per_layer: Option<PerLayerGate>,
    scalar: f32,
}

/// A Gemma 4 target.
pub struct Gemma4 {
    pub(crate) config: Config,
    embed: Matrix,
    embed_scale: f32,
    layers: Vec<Layer>,
    norm: Tensor,
    per_layer: Option<PerLayerInputs>,
    plan: MemoryPlan,
}

impl Gemma4 {
    fn load(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = Config::read(checkpoint)?;
        let load = Loader::new(b, checkpoint);
        let (n_layers, hidden) = (config.num_hidden_layers, config.hidden_size);
        let types = config.layer_types()?;
        let shared = config.num_kv_shared_layers.unwrap_or(0);
        require(shared < n_layers, || {
            format!("{shared} of {n_layers} layers share keys and values")
        })?;
        let first_shared = n_layers - shared;

        let mut plan = MemoryPlan {
            groups: vec![
                GroupPlan {
                    window: Some(config.sliding_window),
                    layers: Vec::new(),
                },
                GroupPlan {
                    window: None,
                    layers: Vec::new(),
                },
            ],
            delta: Vec::new(),
        };
        let per_layer_width = config.hidden_size_per_layer_input.unwrap_or(0);
        let mut layers = Vec::with_capacity(n_layers);
        for (i, &layer_type) in types.iter().enumerate() {
            let at = load.at("layers").at(i);
            let attention = at.at("self_attn");
            let (head_dim, kv_heads) = config.heads(layer_type);
            let query = QueryAttention::load(&attention, &config, layer_type)?;
            let group = query.attention.group;
            let own = if i < first_shared {
                plan.groups[group].layers.push((kv_heads, head_dim));
                let from_keys = layer_type == LayerType::Full && config.attention_k_eq_v;
                let out = kv_heads * head_dim;
                Some(OwnKv {
                    k: attention.matrix("k_proj", out, hidden)?,
                    v: if from_keys {
                        None
                    } else {
                        Some(attention.matrix("v_proj", out, hidden)?)
                    },
                    k_norm: attention.vector("k_norm", head_dim)?,
                })
            } else {
                None
            };
            let source = plan.groups[group].layers.len().checked_sub(1);
            let source = source.ok_or_else(|| ModelError::Config {
                message: format!(
                    "layer {i} shares keys and values, but no earlier layer of its type owns any"
                ),
            })?;
            let wide = if i >= first_shared && config.use_double_wide_mlp {
                2
            } else {
                1
            };
            layers.push(Layer {
                attention: query,
                own,
                kv: (group, source),
                mlp: GatedMlp::load(
                    &at.at("mlp"),
                    hidden,
                    wide * config.intermediate_size,
                    Activation::GeluTanh,
                )?,
                mixture: if config.enable_moe_block {
                    Some(Mixture::load(&at, &config)?)
                } else {
                    None
                },
                input_norm: at.vector("input_layernorm", hidden)?,
                post_attention_norm: at.vector("post_attention_layernorm", hidden)?,
                pre_mlp_norm: at.vector("pre_feedforward_layernorm", hidden)?,
                post_mlp_norm: at.vector("post_feedforward_layernorm", hidden)?,
                per_layer: match per_layer_width {
                    0 => None,
                    width => Some(PerLayerGate {
                        gate: at.matrix("per_layer_input_gate", width, hidden)?,
                        projection: at.matrix("per_layer_projection", hidden, width)?,
                        norm: at.vector("post_per_layer_input_norm", hidden)?,
                    }),
                },
                scalar: at.bare("layer_scalar", 1)?[0],
            });
        }
        let per_layer = match per_layer_width {
            0 => None,
            width => {
                let rows = config
                    .vocab_size_per_layer_input
                    .unwrap_or(config.vocab_size);
                require(rows >= config.vocab_size, || {
                    format!(
                        "{rows} per-layer embeddings for {} tokens",
                        config.vocab_size
                    )
                })?;
                Some(PerLayerInputs {
                    table: load.matrix("embed_tokens_per_layer", rows, n_layers * width)?,
                    table_scale: config.embed_scale(width),
                    projection: load.matrix(
                        "per_layer_model_projection",
                        n_layers * width,
                        hidden,
                    )?,
                    norm: load.vector("per_layer_projection_norm", width)?,
                    width,
                })
            }
        };
        Ok(Gemma4 {
            embed: load.matrix("embed_tokens", config.vocab_size, hidden)?,
            embed_scale: config.embed_scale(hidden),
            norm: load.vector("norm", hidden)?,
            layers,
            per_layer,
            plan,
            config,
        })
    }

    /// One token's inputs to every layer: `[n, L P]`, layer after layer.
    fn per_layer_inputs(
        &self,
        b: &dyn Backend,
        inputs: &PerLayerInputs,
        tokens: &[u32],
        x: &Tensor,
    ) -> Tensor {
        let own = b.embed(&inputs.table, tokens, inputs.table_scale); // [n, L P]
        let scale = (self.config.hidden_size as f32).sqrt().recip();
        let context = b.scale(b.matmul(x, &inputs.projection), scale); // [n, L P]
        let context = b.rms_norm(
            &context,
            Some(&inputs.norm),
            inputs.width,
            self.config.rms_norm_eps,
        );
        b.scale(b.add(context, &own), std::f32::consts::FRAC_1_SQRT_2)
    }
}

impl Target for Gemma4 {
    fn family(&self) -> &'static str {
        "gemma4"
    }

    fn draft_heads(&self) -> &'static [&'static str] {
        &["assistant"]
    }

    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn n_layers(&self) -> usize {
        self.layers.len()
    }

    fn max_context(&self) -> usize {
        self.config.max_position_embeddings
    }

    fn plan(&self) -> MemoryPlan {
        self.plan.clone()
    }

    fn embed(&self, b: &dyn Backend, tokens: &[u32]) -> Tensor {
        b.embed(&self.embed, tokens, self.embed_scale)
    }

    fn embed_scale(&self) -> f32 {
        self.embed_scale
    }

    fn forward_inputs(
        &self,
        b: &dyn Backend,
        inputs: Tensor,
        batch: &Batch,
        memory: &mut Memory,
        taps: &mut Taps,
    ) -> Tensor {
        let eps = self.config.rms_norm_eps;
        let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), w.cols(), eps);
        let mut x = inputs; // [n, H]
        b.note(format_args!("embed"), &x);
        let per_layer = self
            .per_layer
            .as_ref()
            .map(|p| (p.width, self.per_layer_inputs(b, p, &batch.tokens, &x)));
        for (i, layer) in self.layers.iter().enumerate() {
            taps.see(b, i, &x);
            x = {
                let h = norm(&x, &layer.input_norm);
                let a = layer.attend(b, i, &h, batch, memory, eps); // [n, H]
                b.note(format_args!("layers.{i}.attn_out"), &a);
                b.add(norm(&a, &layer.post_attention_norm), &x)
            };
            x = {
                let m = layer.feed_forward(b, i, &x, eps); // [n, H]
                b.add(norm(&m, &layer.post_mlp_norm), &x)
            };
            if let (Some(gate), Some((width, inputs))) = (&layer.per_layer, &per_layer) {
                let own = b.columns(inputs, i * width, *width); // [n, P]
                let p = b.glu(b.matmul(&x, &gate.gate), &own, Activation::GeluTanh);
                x = b.add(norm(&b.matmul(&p, &gate.projection), &gate.norm), &x);
            }
            x = b.scale(x, layer.scalar);
            b.note(format_args!("layers.{i}.out"), &x);
        }
        taps.see(b, self.layers.len(), &x);
        let hidden = norm(&x, &self.norm);
        b.note(format_args!("hidden"), &hidden);
        hidden
    }

    fn logits(&self, b: &dyn Backend, hidden: &Tensor) -> Tensor {
        let logits = b.matmul(hidden, &self.embed); // [n, V]
        let logits = match self.config.final_logit_softcapping {
            Some(cap) => b.softcap(logits, cap),
            None => logits,
        };
        b.note(format_args!("logits"), &logits);
        logits
    }
}

impl Layer {
    /// `mlp(rms(x))`, or that and the routed experts.
    fn feed_forward(&self, b: &dyn Backend, i: usize, x: &Tensor, eps: f32) -> Tensor {
        let h = b.rms_norm(x, Some(&self.pre_mlp_norm), x.cols(), eps); // [n, H]
        if let Some(mixture) = &self.mixture {
            return mixture.forward(b, i, x, (&self.mlp, &h), eps);
        }
        let m = self.mlp.forward(b, &h);
        b.note(format_args!("layers.{i}.mlp_out"), &m);
        m
    }

    /// `softmax(q·kᵀ) v Wo`; remembers `k` and `v` where the layer owns them.
    fn attend(
        &self,
        b: &dyn Backend,
        i: usize,
        x: &Tensor,
        batch: &Batch,
        memory: &mut Memory,
        eps: f32,
    ) -> Tensor {
        let (group, layer) = self.kv;
        let a = &self.attention;
        let Some(own) = &self.own else {
            return a.forward(b, x, &memory.kv[group][layer], batch);
        };
        let (q, key, value);
        match &own.v {
            Some(wv) => {
                let [of_q, of_k, of_v] = b.matmul_many(x, [&a.q, &own.k, wv]);
                (q, key, value) = (of_q, of_k, Some(of_v));
            }
            None => {
                [q, key] = b.matmul_many(x, [&a.q, &own.k]);
                value = None;
            }
        }
        let head_dim = a.rope.head_dim;
        let q = a.query(b, q, batch); // [n, h e]
        let k = b.rms_norm(&key, Some(&own.k_norm), head_dim, eps);
        let k = b.rope(k, &a.rope, batch); // [n, K e]
        let v = b.rms_norm(value.as_ref().unwrap_or(&key), None, head_dim, eps); // [n, K e]
        b.note(format_args!("layers.{i}.q"), &q);
        b.note(format_args!("layers.{i}.k"), &k);
        b.note(format_args!("layers.{i}.v"), &v);
        b.kv_append(&mut memory.kv[group][layer], &k, &v, group, batch);
        a.read(b, &q, &memory.kv[group][layer], batch)
    }
}
