//! What Qwen 3.5's `config.json` says, checked (`specs/qwen3_5.md`).

use crate::rope::{RopeScaling, Scaled};
use crate::{ModelError, parse, require, require_sizes};
use backend::{DeltaSpec, Rope};
use cache::KvLayer;
use serde::Deserialize;
use weights::Checkpoint;

#[derive(Clone, Debug, Default, Deserialize)]
struct RopeConfig {
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
    mrope_section: Option<Vec<u32>>,
    mrope_interleaved: Option<bool>,
    #[serde(flatten)]
    scaling: RopeScaling,
}

/// The text part of `config.json` (`specs/qwen3_5.md` §1).
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    /// Absent where every layer is a mixture.
    #[serde(default)]
    pub(super) intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    pub(super) num_key_value_heads: usize,
    #[serde(default = "default_head_dim")]
    pub(super) head_dim: usize,
    #[serde(default)]
    layer_types: Option<Vec<LayerType>>,
    #[serde(default = "default_interval")]
    full_attention_interval: usize,
    #[serde(default = "default_key_heads")]
    linear_num_key_heads: usize,
    #[serde(default = "default_value_heads")]
    linear_num_value_heads: usize,
    #[serde(default = "default_linear_dim")]
    linear_key_head_dim: usize,
    #[serde(default = "default_linear_dim")]
    linear_value_head_dim: usize,
    #[serde(default = "default_taps")]
    linear_conv_kernel_dim: usize,
    #[serde(default)]
    rope_parameters: RopeConfig,
    /// The older place of how positions are stretched.
    #[serde(default)]
    rope_scaling: Option<RopeScaling>,
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default)]
    partial_rotary_factor: Option<f64>,
    #[serde(default = "default_eps")]
    pub(crate) rms_norm_eps: f32,
    #[serde(default)]
    pub(super) tie_word_embeddings: bool,
    #[serde(default = "default_true")]
    attn_output_gate: bool,
    #[serde(default)]
    pub(crate) mtp_num_hidden_layers: usize,
    #[serde(default)]
    pub(super) num_experts: usize,
    #[serde(default)]
    pub(super) num_experts_per_tok: usize,
    #[serde(default)]
    pub(super) moe_intermediate_size: usize,
    #[serde(default)]
    pub(super) shared_expert_intermediate_size: usize,
    #[serde(default = "default_context")]
    pub(super) max_position_embeddings: usize,
}

fn default_head_dim() -> usize {
    256
}

fn default_interval() -> usize {
    4
}

fn default_key_heads() -> usize {
    16
}

fn default_value_heads() -> usize {
    32
}

fn default_linear_dim() -> usize {
    128
}

fn default_taps() -> usize {
    4
}

fn default_eps() -> f32 {
    1e-6
}

fn default_true() -> bool {
    true
}

fn default_context() -> usize {
    32_768
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub(super) enum LayerType {
    #[serde(rename = "linear_attention")]
    Delta,
    #[serde(rename = "full_attention")]
    Full,
}

impl Config {
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config: Config = parse(checkpoint.text_config())?;
        if !config.attn_output_gate {
            return Err(ModelError::Unsupported {
                feature: "Qwen 3.5 without the attention output gate".into(),
            });
        }
        let experts = |size: usize| if config.num_experts == 0 { 1 } else { size };
        let sizes = [
            ("vocab_size", config.vocab_size),
            ("hidden_size", config.hidden_size),
            (
                "intermediate_size",
                config
                    .intermediate_size
                    .max(usize::from(config.num_experts > 0)),
            ),
            ("num_attention_heads", config.num_attention_heads),
            ("num_key_value_heads", config.num_key_value_heads),
            ("head_dim", config.head_dim),
            ("linear_num_key_heads", config.linear_num_key_heads),
            ("linear_num_value_heads", config.linear_num_value_heads),
            ("linear_key_head_dim", config.linear_key_head_dim),
            ("linear_value_head_dim", config.linear_value_head_dim),
            ("linear_conv_kernel_dim", config.linear_conv_kernel_dim),
            ("num_experts", experts(config.num_experts)),
            (
                "moe_intermediate_size",
                experts(config.moe_intermediate_size),
            ),
            (
                "shared_expert_intermediate_size",
                experts(config.shared_expert_intermediate_size),
            ),
            ("max_position_embeddings", config.max_position_embeddings),
        ];
        require_sizes(config.num_hidden_layers, &sizes)?;
        let heads = |n: usize, of: usize, what| {
            require(n.is_multiple_of(of), || {
                format!("{n} {what} heads cannot share {of}")
            })
        };
        heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            "query",
        )?;
        heads(
            config.linear_num_value_heads,
            config.linear_num_key_heads,
            "value",
        )?;
        require(config.linear_conv_kernel_dim > 1, || {
            "linear_conv_kernel_dim must be 2 or more".into()
        })?;
        require(config.full_attention_interval > 0, || {
            "full_attention_interval must not be 0".into()
        })?;
        Ok(config)
    }

    pub(super) fn layer_types(&self) -> Result<Vec<LayerType>, ModelError> {
        let n = self.num_hidden_layers;
        let every = self.full_attention_interval;
        let types = self.layer_types.clone().unwrap_or_else(|| {
            (1..=n)
                .map(|i| {
                    if i % every == 0 {
                        LayerType::Full
                    } else {
                        LayerType::Delta
                    }
                })
                .collect()
        });
        require(types.len() == n && n > 0, || {
            format!("layer_types has {} entries for {n} layers", types.len())
        })?;
        Ok(types)
    }

    /// Which layers are full attention.
    pub(crate) fn full_layers(&self) -> Result<Vec<bool>, ModelError> {
        let is_full = |t| t == LayerType::Full;
        Ok(self.layer_types()?.into_iter().map(is_full).collect())
    }

    /// Turns the first quarter of each head, as the file says (§4).
    pub(super) fn rope(&self) -> Result<Rope, ModelError> {
        let (turned, scaled) = self.rotation()?;
        Ok(Rope {
            head_dim: self.head_dim,
            pair_offset: turned / 2,
            frequencies: scaled.frequencies,
            axes: self.axes(turned / 2),
        })
    }

    /// How many columns of queries and keys turn, and what these are multiplied with.
    pub(super) fn lengthened(&self) -> Result<(usize, f32), ModelError> {
        let (turned, scaled) = self.rotation()?;
        Ok((turned, scaled.length))
    }

    /// Columns of a head that turn, and how.
    fn rotation(&self) -> Result<(usize, Scaled), ModelError> {
        let theta = self
            .rope_parameters
            .rope_theta
            .or(self.rope_theta)
            .unwrap_or(1e7);
        let share = self
            .rope_parameters
            .partial_rotary_factor
            .or(self.partial_rotary_factor)
            .unwrap_or(0.25);
        let turned = (self.head_dim as f64 * share) as usize;
        require(turned.is_multiple_of(2) && turned <= self.head_dim, || {
            format!("{turned} rotary columns of {}", self.head_dim)
        })?;
        let scaled = self
            .scaling()
            .apply(theta, turned, self.max_position_embeddings)?;
        Ok((turned, scaled))
    }

    /// How positions are stretched.
    fn scaling(&self) -> &RopeScaling {
        let own = &self.rope_parameters.scaling;
        match &self.rope_scaling {
            Some(older) if own.is_default() => older,
            _ => own,
        }
    }

    /// Tokens of the longest sequence that the model knows.
    pub(super) fn max_context(&self) -> usize {
        self.scaling().positions(self.max_position_embeddings)
    }

    /// Which of time, height and width each of `pairs` pairs turns by: every third one by height
    /// from pair 1 on and by width from pair 2 on, as many as their sections say, the others by
    /// time; or section after section, in files that say so (§4). Nothing without sections of that
    /// many pairs: writers of models for text alone put those of released models there.
    fn axes(&self, pairs: usize) -> Vec<u8> {
        let rope = &self.rope_parameters;
        let sections = rope.mrope_section.as_deref().unwrap_or(&[11, 11, 10]);
        let &[time, height, width] = sections else {
            return Vec::new();
        };
        let [time, height, width] = [time, height, width].map(|n| n as usize);
        if time + height + width != pairs {
            return Vec::new();
        }
        let axis = |pair: usize| match rope.mrope_interleaved {
            Some(false) => u8::from(pair >= time) + u8::from(pair >= time + height),
            _ => match pair % 3 {
                1 if pair < 3 * height => 1,
                2 if pair < 3 * width => 2,
                _ => 0,
            },
        };
        (0..pairs).map(axis).collect()
    }

    /// An error unless the rotation tells rows and columns of a picture apart.
    pub(crate) fn require_axes(&self) -> Result<(), ModelError> {
        require(!self.rope()?.axes.is_empty(), || {
            "mrope_section does not divide the pairs of a head among time, height and width".into()
        })
    }

    pub(crate) fn delta(&self) -> DeltaSpec {
        DeltaSpec {
            slots: 0,
            key_heads: self.linear_num_key_heads,
            value_heads: self.linear_num_value_heads,
            key_dim: self.linear_key_head_dim,
            value_dim: self.linear_value_head_dim,
            conv_taps: self.linear_conv_kernel_dim,
        }
    }

    /// Keys and values of a full layer, of one that is no end of a model.
    pub(crate) fn kv_layer(&self) -> KvLayer {
        KvLayer {
            heads: self.num_key_value_heads,
            head_dim: self.head_dim,
            query_heads: self.num_attention_heads / self.num_key_value_heads.max(1),
            edge: None,
        }
    }
}
