//! Loading Gemma 4: which tensors a checkpoint holds, and of which shapes (`specs/gemma4.md`).

use super::{
    Config, FULL, Gemma4, Layer, LayerType, Mixture, OwnKv, PerLayerGate, PerLayerInputs,
    QueryAttention, SLIDING,
};
use crate::layers::{ExpertShape, GatedMlp, Loader};
use crate::{ModelError, require};
use backend::{Activation, Attention, Backend};
use cache::{Edge, GroupPlan, KvLayer, MemoryPlan};
use weights::Checkpoint;

impl Gemma4 {
    pub(super) fn load(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = Config::read(checkpoint)?;
        let load = Loader::new(b, checkpoint);
        let hidden = config.hidden_size;
        let types = config.layer_types()?;
        let first_shared = config.first_shared()?;
        let group = |window| GroupPlan {
            window,
            layers: Vec::new(),
        };
        let mut plan = MemoryPlan {
            // By number: SLIDING, FULL.
            groups: vec![group(Some(config.sliding_window)), group(None)],
            delta: Vec::new(),
        };
        let n = types.len();
        let mut layers = Vec::with_capacity(n);
        for (i, layer_type) in types.into_iter().enumerate() {
            let owns = i < first_shared;
            let edge = Edge::of(i, n);
            layers.push(Layer::load(
                (&load, i),
                &config,
                layer_type,
                (owns, edge),
                &mut plan,
            )?);
        }
        let per_layer = config.per_layer_width();
        let per_layer = per_layer.map(|width| PerLayerInputs::load(&load, &config, width));
        Ok(Gemma4 {
            per_layer: per_layer.transpose()?,
            embed: load.matrix("embed_tokens", config.vocab_size, hidden)?,
            embed_scale: config.embed_scale(hidden),
            norm: load.vector("norm", hidden)?,
            layers,
            // As the reference implementation generates text with the unified model (§5).
            full_are_causal: !is_unified(checkpoint)?,
            plan,
            config,
        })
    }
}

/// Whether `checkpoint` is the model whose pictures come without an encoder. GGUF files of its text
/// look like those of others; then the tower's own file tells.
fn is_unified(checkpoint: &Checkpoint) -> Result<bool, ModelError> {
    let tower = &checkpoint.config()["vision_config"]["model_type"];
    let names = [
        checkpoint.architecture()?,
        tower.as_str().unwrap_or_default(),
    ];
    Ok(names
        .iter()
        .any(|name| name.to_lowercase().contains("unified")))
}

impl Layer {
    /// Loads layer `i`, which is as near an end of the model as `edge` says. One that `owns` keys and values
    /// gets a place for them in `plan`; any other reads those of the last layer of its type that does.
    fn load(
        (load, i): (&Loader<'_>, usize),
        config: &Config,
        layer_type: LayerType,
        (owns, edge): (bool, Edge),
        plan: &mut MemoryPlan,
    ) -> Result<Self, ModelError> {
        let at = load.at("layers").at(i);
        let self_attn = at.at("self_attn");
        let hidden = config.hidden_size;
        let attention = QueryAttention::load(&self_attn, config, layer_type)?;
        let group = attention.attention.group;
        let own = if owns {
            let edge = Some(edge);
            plan.groups[group].layers.push(KvLayer {
                edge,
                ..config.kv_layer(layer_type)
            });
            Some(OwnKv::load(&self_attn, config, layer_type)?)
        } else {
            None
        };
        let owners = &mut plan.groups[group].layers;
        let source = owners.len().checked_sub(1);
        let source = source.ok_or_else(|| ModelError::Config {
            message: format!(
                "layer {i} shares keys and values, but no earlier layer of its type owns any"
            ),
        })?;
        let read = &mut owners[source].edge;
        *read = read.map(|owner| owner.nearer(edge));
        let wide = if !owns && config.use_double_wide_mlp {
            2
        } else {
            1
        };
        let inner = wide * config.intermediate_size;
        let mixture = config.enable_moe_block;
        let gate = config.per_layer_width();
        Ok(Layer {
            attention,
            own,
            kv: (group, source),
            mlp: GatedMlp::load(&at.at("mlp"), hidden, inner, Activation::GeluTanh)?,
            mixture: mixture.then(|| Mixture::load(&at, config)).transpose()?,
            input_norm: at.vector("input_layernorm", hidden)?,
            post_attention_norm: at.vector("post_attention_layernorm", hidden)?,
            pre_mlp_norm: at.vector("pre_feedforward_layernorm", hidden)?,
            post_mlp_norm: at.vector("post_feedforward_layernorm", hidden)?,
            per_layer: gate
                .map(|width| PerLayerGate::load(&at, width, hidden))
                .transpose()?,
            scalar: at.bare("layer_scalar", 1)?[0],
        })
    }
}

impl OwnKv {
    fn load(at: &Loader<'_>, config: &Config, layer_type: LayerType) -> Result<Self, ModelError> {
        let (head_dim, kv_heads) = config.heads(layer_type);
        let (hidden, out) = (config.hidden_size, kv_heads * head_dim);
        let from_keys = layer_type == LayerType::Full && config.attention_k_eq_v;
        Ok(OwnKv {
            k: at.matrix("k_proj", out, hidden)?,
            v: if from_keys {
                None
            } else {
                Some(at.matrix("v_proj", out, hidden)?)
            },
            k_norm: at.vector("k_norm", head_dim)?,
        })
    }
}

impl PerLayerGate {
    fn load(at: &Loader<'_>, width: usize, hidden: usize) -> Result<Self, ModelError> {
        Ok(PerLayerGate {
            gate: at.matrix("per_layer_input_gate", width, hidden)?,
            projection: at.matrix("per_layer_projection", hidden, width)?,
            norm: at.vector("post_per_layer_input_norm", hidden)?,
        })
    }
}

impl PerLayerInputs {
    fn load(load: &Loader<'_>, config: &Config, width: usize) -> Result<Self, ModelError> {
        let vocab = config.vocab_size;
        let rows = config.vocab_size_per_layer_input.unwrap_or(vocab);
        require(rows >= vocab, || {
            format!("{rows} per-layer embeddings for {vocab} tokens")
        })?;
        let out = config.num_hidden_layers * width;
        Ok(PerLayerInputs {
            table: load.matrix("embed_tokens_per_layer", rows, out)?,
            table_scale: config.embed_scale(width),
            projection: load.matrix("per_layer_model_projection", out, config.hidden_size)?,
            norm: load.vector("per_layer_projection_norm", width)?,
            width,
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
