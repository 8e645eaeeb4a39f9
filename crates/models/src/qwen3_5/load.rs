//! Loading Qwen 3.5: which tensors a checkpoint holds, and of which shapes (`specs/qwen3_5.md`).

use super::config::LayerType;
use super::{
    Block, Config, DeltaMixer, FULL, FeedForward, FullAttention, FullLayer, Layer, Mixture, Qwen35,
};
use crate::ModelError;
use crate::layers::{ExpertShape, GatedMlp, Loader};
use backend::{Activation, Attention, Backend, DeltaWeights, math};
use cache::{Edge, GroupPlan, KvLayer, MemoryPlan};
use weights::Checkpoint;

impl Qwen35 {
    pub(super) fn load(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let mut config = Config::read(checkpoint)?;
        // The whole file's word on tying outweighs its text part's (§1).
        if let Some(tied) = checkpoint
            .config()
            .get("tie_word_embeddings")
            .and_then(serde_json::Value::as_bool)
        {
            config.tie_word_embeddings = tied;
        }
        let load = Loader::new(b, checkpoint);
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let mut plan = MemoryPlan {
            groups: vec![GroupPlan {
                window: None,
                layers: Vec::new(),
            }],
            delta: Vec::new(),
        };
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        let types = config.layer_types()?;
        let n_full = types.iter().filter(|&&t| t == LayerType::Full).count();
        for (i, layer_type) in types.into_iter().enumerate() {
            let at = load.at("layers").at(i);
            layers.push(match layer_type {
                LayerType::Delta => {
                    plan.delta.push(config.delta());
                    let mixer = DeltaMixer::load(&at.at("linear_attn"), &config)?;
                    Layer::Delta(mixer, Block::load(&at, &config)?, plan.delta.len() - 1)
                }
                LayerType::Full => {
                    let own = &mut plan.groups[FULL].layers;
                    let number = own.len();
                    own.push(KvLayer {
                        edge: Some(Edge::of(number, n_full)),
                        ..config.kv_layer()
                    });
                    Layer::Full(FullLayer::load(&at, &config)?, number)
                }
            });
        }
        Ok(Qwen35 {
            embed: load.matrix("embed_tokens", vocab, hidden)?,
            head: if config.tie_word_embeddings {
                None
            } else {
                Some(load.matrix("lm_head", vocab, hidden)?)
            },
            norm: load.offset_norm("norm", hidden)?,
            layers,
            plan,
            config,
        })
    }
}

impl FullLayer {
    /// Names of the tensors that [`FullLayer::load`] reads at `at`. Experts are
    /// those of the layout that `checkpoint` has, the stacked one if it has none.
    pub(crate) fn tensors(checkpoint: &Checkpoint, at: &str, config: &Config) -> Vec<String> {
        let mut modules: Vec<String> = [
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
        ]
        .map(str::to_owned)
        .into();
        let mlp = |of: &str| ["gate_proj", "up_proj", "down_proj"].map(|m| format!("mlp.{of}{m}"));
        if config.num_experts == 0 {
            modules.extend(mlp(""));
        } else {
            modules.extend(["mlp.gate".into(), "mlp.shared_expert_gate".into()]);
            modules.extend(mlp("shared_expert."));
        }
        let mut names: Vec<String> = modules
            .iter()
            .map(|module| format!("{at}.{module}.weight"))
            .collect();
        if config.num_experts > 0 {
            let experts = ExpertShape::tensors(
                checkpoint,
                &format!("{at}.mlp."),
                "switch_mlp",
                config.num_experts,
            );
            names.extend(experts);
        }
        names
    }

    pub(crate) fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        Ok(FullLayer {
            attention: FullAttention::load(&at.at("self_attn"), config)?,
            block: Block::load(at, config)?,
        })
    }
}

impl Block {
    pub(super) fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        Ok(Block {
            input_norm: at.offset_norm("input_layernorm", config.hidden_size)?,
            post_norm: at.offset_norm("post_attention_layernorm", config.hidden_size)?,
            mlp: FeedForward::load(&at.at("mlp"), config)?,
            eps: config.rms_norm_eps,
        })
    }
}

impl FullAttention {
    pub(super) fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (heads, e, hidden) = (
            config.num_attention_heads,
            config.head_dim,
            config.hidden_size,
        );
        let kv = config.num_key_value_heads * e;
        // Stored by head: `e` rows of the query, then `e` rows of its gate.
        let both = at.stored("q_proj", 2 * heads * e, hidden)?;
        let half = |gate: usize| {
            let head = |h: usize| both.slice((2 * h + gate) * e..(2 * h + gate + 1) * e);
            at.b.matrix(&(0..heads).map(head).collect::<Vec<_>>())
        };
        // A rotation of longer columns is a longer rotation.
        let lengthened = config.lengthened()?;
        Ok(FullAttention {
            q: half(0),
            gate: half(1),
            k: at.matrix("k_proj", kv, hidden)?,
            v: at.matrix("v_proj", kv, hidden)?,
            o: at.matrix("o_proj", hidden, heads * e)?,
            q_norm: at.lengthened_norm("q_norm", e, lengthened)?,
            k_norm: at.lengthened_norm("k_norm", e, lengthened)?,
            rope: config.rope()?,
            attention: Attention {
                group: FULL,
                heads,
                scale: (e as f32).sqrt().recip(),
                window: None,
            },
            eps: config.rms_norm_eps,
        })
    }
}

impl DeltaMixer {
    pub(super) fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let spec = config.delta();
        let (hidden, nv, channels) = (config.hidden_size, spec.value_heads, spec.channels());
        let conv = at
            .checkpoint
            .vector(&at.name_of("conv1d"), channels * spec.conv_taps)?;
        let decay: Vec<f32> = at
            .bare("A_log", nv)?
            .into_iter()
            .map(|a| -math::exp(a))
            .collect();
        Ok(DeltaMixer {
            qkv: at.matrix("in_proj_qkv", channels, hidden)?,
            z: at.matrix("in_proj_z", nv * spec.value_dim, hidden)?,
            beta: at.matrix("in_proj_b", nv, hidden)?,
            a: at.matrix("in_proj_a", nv, hidden)?,
            weights: DeltaWeights {
                conv: at.b.upload(channels, spec.conv_taps, &conv),
                decay: at.b.upload(1, nv, &decay),
                dt_bias: at.b.upload(1, nv, &at.bare("dt_bias", nv)?),
            },
            norm: at.vector("norm", spec.value_dim)?,
            out: at.matrix("out_proj", hidden, nv * spec.value_dim)?,
            eps: config.rms_norm_eps,
        })
    }
}

impl FeedForward {
    pub(super) fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        if config.num_experts == 0 {
            let mlp = GatedMlp::load(at, hidden, config.intermediate_size, Activation::Silu)?;
            return Ok(FeedForward::Dense(mlp));
        }
        let shape = ExpertShape {
            count: config.num_experts,
            top_k: config.num_experts_per_tok,
            hidden,
            inner: config.moe_intermediate_size,
            activation: Activation::Silu,
        };
        let shared = config.shared_expert_intermediate_size;
        Ok(FeedForward::Mixture(Box::new(Mixture {
            router: at.matrix("gate", shape.count, hidden)?,
            experts: shape.load(at, "switch_mlp", None)?,
            shared: GatedMlp::load(&at.at("shared_expert"), hidden, shared, Activation::Silu)?,
            shared_gate: at.matrix("shared_expert_gate", 1, hidden)?,
        })))
    }
}
