//! What Gemma 4's `config.json` says, checked (`specs/gemma4.md`).

use crate::layers::frequencies;
use crate::{ModelError, parse, require, require_sizes};
use backend::Rope;
use cache::KvLayer;
use serde::Deserialize;
use std::collections::BTreeMap;
use weights::Checkpoint;

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
    pub(crate) attention_k_eq_v: bool,
    #[serde(default)]
    pub(crate) num_kv_shared_layers: Option<usize>,
    #[serde(default)]
    pub(crate) use_double_wide_mlp: bool,
    #[serde(default)]
    hidden_size_per_layer_input: Option<usize>,
    #[serde(default)]
    pub(super) vocab_size_per_layer_input: Option<usize>,
    #[serde(default)]
    pub(crate) enable_moe_block: bool,
    #[serde(default)]
    pub(super) num_experts: Option<usize>,
    #[serde(default)]
    pub(super) top_k_experts: Option<usize>,
    #[serde(default, alias = "expert_intermediate_size")]
    pub(super) moe_intermediate_size: Option<usize>,
    pub(crate) rope_parameters: RopeConfigs,
    #[serde(default = "default_eps")]
    pub(crate) rms_norm_eps: f32,
    #[serde(default)]
    pub(crate) final_logit_softcapping: Option<f32>,
    #[serde(default)]
    use_bidirectional_attention: Option<serde_json::Value>,
    /// Stands for rows of media where a model has per-layer embeddings.
    #[serde(default)]
    pub(super) pad_token_id: u32,
    #[serde(default = "default_context")]
    pub(super) max_position_embeddings: usize,
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
    pub(super) head_dim: Option<usize>,
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
        Config::from_json(checkpoint.text_config())
    }

    /// Reads `part`, a configuration of Gemma 4's layers.
    pub(crate) fn from_json(part: &serde_json::Value) -> Result<Self, ModelError> {
        let mut config: Config = parse(part)?;
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

    /// The first layer that reads the keys and values of an earlier one, as all after it do;
    /// the number of layers if each has its own.
    pub(super) fn first_shared(&self) -> Result<usize, ModelError> {
        let n = self.num_hidden_layers;
        let shared = self.num_kv_shared_layers.unwrap_or(0);
        require(shared < n, || {
            format!("{shared} of {n} layers share keys and values")
        })?;
        Ok(n - shared)
    }

    /// Width of a layer's share of its token's per-layer embedding, in models that have them.
    pub(crate) fn per_layer_width(&self) -> Option<usize> {
        self.hidden_size_per_layer_input.filter(|&width| width > 0)
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

    /// Keys and values of a layer type, of a layer that is no end of a model.
    pub(crate) fn kv_layer(&self, layer_type: LayerType) -> KvLayer {
        let (head_dim, heads) = self.heads(layer_type);
        KvLayer {
            heads,
            head_dim,
            query_heads: self.num_attention_heads / heads.max(1),
            edge: None,
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
    pub(crate) fn embed_scale(&self, width: usize) -> f32 {
        let scale = (width as f64).sqrt() as f32;
        match self.dtype.as_deref() {
            Some("bfloat16") => round_bf16(scale),
            _ => scale,
        }
    }

    /// Whether the rows of a picture, or of a frame, see each other (§5).
    pub(super) fn sees_spans(&self) -> bool {
        let value = self.use_bidirectional_attention.as_ref();
        value.is_some_and(|value| value == "vision")
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
        require((self.pad_token_id as usize) < self.vocab_size, || {
            format!("pad_token_id {} is no token", self.pad_token_id)
        })?;
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
