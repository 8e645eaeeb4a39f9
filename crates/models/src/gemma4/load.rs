//! Loading Gemma 4: which tensors a checkpoint holds, and of which shapes (`specs/gemma4.md`).

use super::{
    Config, FULL, Gemma4, Layer, LayerType, Mixture, OwnKv, PerLayerGate, PerLayerInputs,
    QueryAttention, SLIDING,
};
use crate::layers::{ExpertShape, GatedMlp, Loader};
use crate::{ModelError, require};
use backend::{Activation, Attention, Backend};
use cache::{GroupPlan, MemoryPlan};
use weights::Checkpoint;

impl Gemma4 {
    pub(super) fn load(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
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
}

impl Mixture {
    pub(super) fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
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
}
