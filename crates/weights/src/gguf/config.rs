//! A configuration as `config.json` has it, from a GGUF file's metadata
//! (`checkpoints.md` §4), and the other way round.
//!
//! Only what a model reads is made. What metadata leave open follows from the
//! tensors: whether a head is tied, whether keys are values, how much of a head
//! turns.

use super::value::{Metadata, Value};
use serde_json::{Map, Value as Json, json};

/// A layer of type "sliding" in six, where a file does not say.
const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";
/// Centroids that an assistant looks into, where a file does not say.
const CENTROIDS_TOP_K: u64 = 32;

/// What a file is, as far as names and configuration need it.
pub(crate) struct Source<'a> {
    pub(crate) metadata: Metadata<'a>,
    pub(crate) architecture: &'a str,
    /// The shape of a tensor, outermost axis first.
    pub(crate) shape: &'a dyn Fn(&str) -> Option<Vec<usize>>,
    /// The values of a tensor, if it is short and in `f32`.
    pub(crate) floats: &'a dyn Fn(&str) -> Option<Vec<f32>>,
    /// Whether a tensor is in `f32`.
    pub(crate) is_f32: &'a dyn Fn(&str) -> bool,
}

/// Blocks of a trunk; more than any model has.
const MAX_BLOCKS: u64 = 1 << 12;

impl Source<'_> {
    /// A value, if it is no longer than a number for every block.
    fn get(&self, key: &str) -> Option<Value<'_>> {
        let key = format!("{}.{key}", self.architecture);
        let fits = self
            .metadata
            .count(&key)
            .is_none_or(|n| n as u64 <= MAX_BLOCKS);
        fits.then(|| self.metadata.get(&key))?
    }

    fn size(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// A number a layer, of a key that may be one for all.
    fn sizes(&self, key: &str, layers: usize) -> Option<Vec<u64>> {
        match self.get(key)? {
            Value::Array(_, items) => items.iter().map(Value::as_u64).collect(),
            one => Some(vec![one.as_u64()?; layers]),
        }
    }

    fn float(&self, key: &str) -> Option<f64> {
        self.get(key)?.as_f64()
    }

    fn has(&self, tensor: &str) -> bool {
        (self.shape)(tensor).is_some()
    }

    /// Rows of a matrix.
    fn rows(&self, tensor: &str) -> Option<usize> {
        (self.shape)(tensor)?.first().copied()
    }

    /// Blocks without those of an MTP head.
    ///
    /// # Errors
    ///
    /// What is wrong with the metadata.
    pub(crate) fn layers(&self) -> Result<usize, String> {
        let blocks = self.size("block_count").filter(|n| *n <= MAX_BLOCKS);
        let blocks = blocks.ok_or_else(|| {
            format!(
                "`{}.block_count` is missing or more than {MAX_BLOCKS}",
                self.architecture
            )
        })?;
        let head = match self.architecture {
            "qwen35" | "qwen35moe" => self.size("nextn_predict_layers").unwrap_or(0),
            _ => 0,
        };
        blocks
            .checked_sub(head)
            .map(|n| n as usize)
            .ok_or_else(|| format!("{head} of {blocks} blocks are to be an MTP head"))
    }

    /// The configuration.
    ///
    /// # Errors
    ///
    /// As [`Source::layers`].
    pub(crate) fn config(&self) -> Result<Json, String> {
        let layers = self.layers()?;
        let mut config = match self.architecture {
            "qwen35" | "qwen35moe" => self.qwen35(layers),
            "eagle3" => self.eagle3()?,
            _ => self.gemma4(layers),
        };
        let fields = config.as_object_mut().expect("made as an object");
        // What a file does not say is left out, not null.
        fields.retain(|_, value| !value.is_null());
        for (name, key) in [
            ("bos_token_id", "bos"),
            ("eos_token_id", "eos"),
            ("pad_token_id", "padding"),
        ] {
            let key = format!("tokenizer.ggml.{key}_token_id");
            if let Some(id) = self.metadata.scalar(&key).and_then(|v| v.as_u64()) {
                fields.insert(name.into(), id.into());
            }
        }
        if matches!(self.architecture, "gemma4-assistant" | "gemma4_assistant") {
            return Ok(self.assistant(config));
        }
        Ok(config)
    }

    /// The type that embeddings had: `f32` files come from `f32` models, others
    /// from the `bf16` that is published.
    fn dtype(&self) -> &'static str {
        if (self.is_f32)("token_embd.weight") {
            "float32"
        } else {
            "bfloat16"
        }
    }

    fn gemma4(&self, layers: usize) -> Json {
        let types = self.layer_types(layers);
        let kv_heads = self
            .sizes("attention.head_count_kv", layers)
            .unwrap_or_default();
        let heads_of = |wanted: &str| {
            let mut of_type = types.iter().zip(&kv_heads).filter(|(t, _)| **t == wanted);
            of_type.next().map(|(_, n)| *n)
        };
        let inner = self
            .sizes("feed_forward_length", layers)
            .unwrap_or_default();
        let (narrow, wide) = (inner.iter().min(), inner.iter().max());
        let shared = self.size("attention.shared_kv_layers").unwrap_or(0);
        let own = layers.saturating_sub(usize::try_from(shared).unwrap_or(usize::MAX));
        let without_values = (0..own).any(|i| {
            types.get(i) == Some(&FULL)
                && self.has(&format!("blk.{i}.attn_k.weight"))
                && !self.has(&format!("blk.{i}.attn_v.weight"))
        });
        // An assistant has neither; what it shares may differ by type.
        let (sliding, full) = (heads_of(SLIDING), heads_of(FULL));
        let none_owned = own == 0 && sliding != full;
        let experts = self.size("expert_count").unwrap_or(0);
        json!({
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "dtype": self.dtype(),
            "vocab_size": self.rows("token_embd.weight"),
            "hidden_size": self.size("embedding_length"),
            "intermediate_size": narrow,
            "num_hidden_layers": layers,
            "num_attention_heads": self.size("attention.head_count"),
            "num_key_value_heads": sliding.or(full),
            "num_global_key_value_heads": full,
            "head_dim": self.size("attention.key_length_swa"),
            "global_head_dim": self.size("attention.key_length"),
            "layer_types": types,
            "sliding_window": self.size("attention.sliding_window"),
            "attention_k_eq_v": without_values || none_owned,
            // With values of their own, full layers say their heads one by one.
            "per_layer_config": (!without_values && !none_owned && sliding.is_some() && sliding != full).then(|| {
                let full_layers = (0..layers).filter(|&i| types[i] == FULL);
                full_layers.map(|i| (i.to_string(), json!({ "num_key_value_heads": full }))).collect::<Map<_, _>>()
            }),
            "num_kv_shared_layers": shared,
            "use_double_wide_mlp": narrow != wide,
            "hidden_size_per_layer_input": self.size("embedding_length_per_layer_input"),
            "vocab_size_per_layer_input": self.rows("per_layer_token_embd.weight"),
            "enable_moe_block": experts > 0,
            "num_experts": (experts > 0).then_some(experts),
            "top_k_experts": self.size("expert_used_count"),
            "moe_intermediate_size": self.size("expert_feed_forward_length"),
            "rope_parameters": {
                SLIDING: {
                    "rope_type": "default",
                    "rope_theta": self.float("rope.freq_base_swa").unwrap_or(1e4),
                },
                FULL: {
                    "rope_type": "proportional",
                    "rope_theta": self.float("rope.freq_base").unwrap_or(1e6),
                    "partial_rotary_factor": self.turned(),
                },
            },
            "rms_norm_eps": self.float("attention.layer_norm_rms_epsilon"),
            "final_logit_softcapping": self.float("final_logit_softcapping"),
            "max_position_embeddings": self.size("context_length"),
            "tie_word_embeddings": true,
        })
    }

    fn layer_types(&self, layers: usize) -> Vec<&'static str> {
        let pattern = self.get("attention.sliding_window_pattern");
        let slides = |i: usize| match &pattern {
            Some(Value::Array(_, items)) => {
                let slides = items.get(i);
                slides.and_then(|v| v.as_bool().or(v.as_i64().map(|n| n != 0)))
            }
            // Every so many layers a full one.
            Some(period) => period.as_u64().map(|n| !(i as u64 + 1).is_multiple_of(n)),
            None => Some(i % 6 != 5),
        };
        let name = |i| {
            if slides(i).unwrap_or(true) {
                SLIDING
            } else {
                FULL
            }
        };
        (0..layers).map(name).collect()
    }

    /// The share of a full layer's head that turns: pairs with a divisor of 1; the
    /// others have one that stops them.
    fn turned(&self) -> f64 {
        let divisors = (self.floats)("rope_freqs.weight").unwrap_or_default();
        let turned = divisors.iter().filter(|d| **d == 1.0).count();
        if divisors.is_empty() {
            0.25
        } else {
            turned as f64 / divisors.len() as f64
        }
    }

    fn assistant(&self, text: Json) -> Json {
        let centroids = ["masked_embd_centroids.weight", "mtp.centroids.weight"];
        let centroids = centroids.iter().find_map(|name| self.rows(name));
        json!({
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "dtype": text["dtype"],
            "backbone_hidden_size": self.size("embedding_length_out"),
            "use_ordered_embeddings": centroids.is_some(),
            "num_centroids": centroids.unwrap_or(0),
            "centroid_intermediate_top_k": self.size("centroid_top_k").unwrap_or(CENTROIDS_TOP_K),
            "tie_word_embeddings": true,
            "text_config": text,
        })
    }

    fn qwen35(&self, layers: usize) -> Json {
        let size = |key| self.size(key);
        let value_heads = size("ssm.time_step_rank");
        let value_dim = match (size("ssm.inner_size"), value_heads) {
            (Some(inner), Some(heads)) => inner.checked_div(heads),
            _ => None,
        };
        let head_dim = size("attention.key_length");
        let turned = match (size("rope.dimension_count"), head_dim) {
            (Some(turned), Some(head)) if head > 0 => Some(turned as f64 / head as f64),
            _ => None,
        };
        // Layers without attention may count none.
        let kv_heads = self
            .sizes("attention.head_count_kv", layers)
            .unwrap_or_default();
        let mixture = self.architecture == "qwen35moe";
        json!({
            "architectures": [if mixture { "Qwen3_5MoeForCausalLM" } else { "Qwen3_5ForCausalLM" }],
            "model_type": if mixture { "qwen3_5_moe_text" } else { "qwen3_5_text" },
            "dtype": self.dtype(),
            "vocab_size": self.rows("token_embd.weight"),
            "hidden_size": size("embedding_length"),
            "intermediate_size": size("feed_forward_length"),
            "num_hidden_layers": layers,
            "num_attention_heads": size("attention.head_count"),
            "num_key_value_heads": kv_heads.iter().max(),
            "head_dim": head_dim,
            "full_attention_interval": size("full_attention_interval").unwrap_or(4),
            "linear_num_key_heads": size("ssm.group_count"),
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": size("ssm.state_size"),
            "linear_value_head_dim": value_dim,
            "linear_conv_kernel_dim": size("ssm.conv_kernel"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.float("rope.freq_base").unwrap_or(1e7),
                "partial_rotary_factor": turned.unwrap_or(0.25),
            },
            "rms_norm_eps": self.float("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": size("context_length"),
            "tie_word_embeddings": !self.has("output.weight"),
            "mtp_num_hidden_layers": size("nextn_predict_layers").unwrap_or(0),
            "num_experts": size("expert_count"),
            "num_experts_per_tok": size("expert_used_count"),
            "moe_intermediate_size": size("expert_feed_forward_length"),
            "shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
        })
    }

    fn eagle3(&self) -> Result<Json, String> {
        let size = |key| self.size(key);
        let ids = |layers: Value<'_>| {
            let ids = layers.as_array()?.iter().map(Value::as_u64);
            ids.collect::<Option<Vec<u64>>>()
        };
        let layers = self.get("target_layers").map(|layers| {
            ids(layers).ok_or("`eagle3.target_layers` is not a list of the target's layers, from 0")
        });
        let layers = layers.transpose()?;
        Ok(json!({
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": size("vocab_size"),
            "draft_vocab_size": self.rows("output.weight"),
            "hidden_size": size("embedding_length"),
            "intermediate_size": size("feed_forward_length"),
            "num_hidden_layers": 1,
            "num_attention_heads": size("attention.head_count"),
            "num_key_value_heads": size("attention.head_count_kv"),
            "head_dim": size("attention.key_length").or(size("rope.dimension_count")),
            "rms_norm_eps": self.float("attention.layer_norm_rms_epsilon"),
            "rope_theta": self.float("rope.freq_base").unwrap_or(1e4),
            "max_position_embeddings": size("context_length"),
            "target_hidden_size": size("target_hidden_size"),
            "norm_before_residual": self.get("norm_before_residual").and_then(|v| v.as_bool()),
            "eagle_aux_hidden_state_layer_ids": layers,
        }))
    }
}

/// The metadata that `architecture` has for a `config.json`, its language model's
/// part `text` apart.
pub(crate) fn metadata(
    architecture: &str,
    config: &Json,
    text: &Json,
) -> Vec<(String, Value<'static>)> {
    let mut out = Keys {
        architecture,
        text,
        keys: Vec::new(),
    };
    for (key, from) in [
        ("context_length", "max_position_embeddings"),
        ("embedding_length", "hidden_size"),
        ("attention.head_count", "num_attention_heads"),
        ("expert_count", "num_experts"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
    ] {
        out.size(key, out.number(from));
    }
    out.float(
        "attention.layer_norm_rms_epsilon",
        text["rms_norm_eps"].as_f64(),
    );
    match architecture {
        "qwen35" | "qwen35moe" => out.qwen35(),
        "eagle3" => out.eagle3(config),
        _ => out.gemma4(),
    }
    if architecture == "gemma4-assistant" {
        let layers = out.number("num_hidden_layers");
        let of = |key: &str| config[key].as_u64();
        out.size("embedding_length_out", of("backbone_hidden_size"));
        out.size("nextn_predict_layers", layers);
        out.size("centroid_top_k", of("centroid_intermediate_top_k"));
    }
    out.keys
}

/// Tokens of an EAGLE-3 head that does not say how many: those of released targets.
const EAGLE3_CONTEXT: u64 = 1 << 18;

/// Metadata as they are made.
struct Keys<'a> {
    architecture: &'a str,
    text: &'a Json,
    keys: Vec<(String, Value<'static>)>,
}

impl Keys<'_> {
    /// A number of the configuration that is not 0.
    fn number(&self, key: &str) -> Option<u64> {
        self.text[key].as_u64().filter(|n| *n > 0)
    }

    fn push(&mut self, key: &str, value: Value<'static>) {
        self.keys
            .push((format!("{}.{key}", self.architecture), value));
    }

    fn size(&mut self, key: &str, value: Option<u64>) {
        if let Some(value) = value {
            self.push(key, Value::U32(value.try_into().unwrap_or(u32::MAX)));
        }
    }

    fn float(&mut self, key: &str, value: Option<f64>) {
        if let Some(value) = value {
            self.push(key, Value::F32(value as f32));
        }
    }

    fn list(&mut self, key: &str, values: impl Iterator<Item = u64>) {
        let values = values.map(|v| Value::I32(v.try_into().unwrap_or(i32::MAX)));
        self.push(key, Value::Array(super::Kind::I32, values.collect()));
    }

    fn gemma4(&mut self) {
        let layers = self.number("num_hidden_layers").unwrap_or(0);
        let types = self.text["layer_types"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        // The last layer is always full.
        let slides = |i: u64| i + 1 != layers && types.get(i as usize).is_none_or(|t| t == SLIDING);
        let shared = self.text["num_kv_shared_layers"].as_u64().unwrap_or(0);
        let inner = self.number("intermediate_size");
        self.size("block_count", Some(layers));
        match (inner, self.text["use_double_wide_mlp"].as_bool()) {
            (Some(inner), Some(true)) => {
                let own = layers.saturating_sub(shared);
                let wide = |i| if i < own { inner } else { 2 * inner };
                self.list("feed_forward_length", (0..layers).map(wide));
            }
            _ => self.size("feed_forward_length", inner),
        }
        let sliding = self.number("num_key_value_heads");
        match (sliding, self.number("num_global_key_value_heads")) {
            (Some(sliding), Some(full)) => {
                let heads = |i| if slides(i) { sliding } else { full };
                self.list("attention.head_count_kv", (0..layers).map(heads));
            }
            _ => self.size("attention.head_count_kv", sliding),
        }
        let (head, full) = (self.number("head_dim"), self.number("global_head_dim"));
        for (key, value) in [
            ("attention.key_length", full),
            ("attention.value_length", full),
            ("attention.key_length_swa", head),
            ("attention.value_length_swa", head),
            ("rope.dimension_count", full),
            ("rope.dimension_count_swa", head),
            ("attention.sliding_window", self.number("sliding_window")),
            ("attention.shared_kv_layers", Some(shared)),
            ("expert_used_count", self.number("top_k_experts")),
        ] {
            self.size(key, value);
        }
        let width = self.text["hidden_size_per_layer_input"].as_u64();
        self.size("embedding_length_per_layer_input", width.or(Some(0)));
        let pattern = (0..layers).map(|i| Value::Bool(slides(i))).collect();
        self.push(
            "attention.sliding_window_pattern",
            Value::Array(super::Kind::Bool, pattern),
        );
        let rope = &self.text["rope_parameters"];
        let (slow, fast) = (
            rope[FULL]["rope_theta"].as_f64(),
            rope[SLIDING]["rope_theta"].as_f64(),
        );
        self.float("rope.freq_base", slow);
        self.float("rope.freq_base_swa", fast);
        self.float(
            "final_logit_softcapping",
            self.text["final_logit_softcapping"].as_f64(),
        );
    }

    fn eagle3(&mut self, config: &Json) {
        let (hidden, head_dim) = (self.number("hidden_size"), self.number("head_dim"));
        if self.number("max_position_embeddings").is_none() {
            // A head has no limit of its own, but llama.cpp wants one said.
            self.size("context_length", Some(EAGLE3_CONTEXT));
        }
        for (key, value) in [
            ("block_count", Some(1)),
            ("vocab_size", self.number("vocab_size")),
            ("feed_forward_length", self.number("intermediate_size")),
            (
                "attention.head_count_kv",
                self.number("num_key_value_heads"),
            ),
            ("attention.key_length", head_dim),
            ("attention.value_length", head_dim),
            ("rope.dimension_count", head_dim),
            (
                "target_hidden_size",
                config["target_hidden_size"].as_u64().or(hidden),
            ),
        ] {
            self.size(key, value);
        }
        let theta = [
            &self.text["rope_parameters"]["rope_theta"],
            &self.text["rope_theta"],
        ];
        let theta = theta.into_iter().find_map(Json::as_f64);
        self.float("rope.freq_base", theta.or(Some(1e4)));
        if let Some(layers) = aux_layers(config) {
            self.list("target_layers", layers.into_iter());
        }
        let before = config["norm_before_residual"].as_bool();
        self.push("norm_before_residual", Value::Bool(before == Some(true)));
    }

    fn qwen35(&mut self) {
        let head = self.number("mtp_num_hidden_layers").unwrap_or(0);
        let layers = self.number("num_hidden_layers").unwrap_or(0);
        let (values, width) = (
            self.number("linear_num_value_heads"),
            self.number("linear_value_head_dim"),
        );
        let head_dim = self.number("head_dim");
        let rope = &self.text["rope_parameters"];
        let turned = rope["partial_rotary_factor"].as_f64().unwrap_or(0.25);
        let theta = rope["rope_theta"].as_f64();
        let sections = rope["mrope_section"].as_array().cloned();
        for (key, value) in [
            ("block_count", Some(layers + head)),
            ("feed_forward_length", self.number("intermediate_size")),
            (
                "attention.head_count_kv",
                self.number("num_key_value_heads"),
            ),
            ("attention.key_length", head_dim),
            ("attention.value_length", head_dim),
            (
                "rope.dimension_count",
                head_dim.map(|d| (d as f64 * turned) as u64),
            ),
            (
                "full_attention_interval",
                self.number("full_attention_interval").or(Some(4)),
            ),
            ("ssm.conv_kernel", self.number("linear_conv_kernel_dim")),
            ("ssm.state_size", self.number("linear_key_head_dim")),
            ("ssm.group_count", self.number("linear_num_key_heads")),
            ("ssm.time_step_rank", values),
            (
                "ssm.inner_size",
                values.zip(width).map(|(n, w)| n.saturating_mul(w)),
            ),
            ("expert_used_count", self.number("num_experts_per_tok")),
            (
                "expert_shared_feed_forward_length",
                self.number("shared_expert_intermediate_size"),
            ),
            ("nextn_predict_layers", (head > 0).then_some(head)),
        ] {
            self.size(key, value);
        }
        self.float("rope.freq_base", theta);
        let sections = sections.map(|s| s.iter().filter_map(Json::as_u64).collect());
        let mut sections: Vec<u64> = sections.unwrap_or_else(|| vec![11, 11, 10]);
        sections.resize(4, 0);
        self.list("rope.dimension_sections", sections.into_iter());
    }
}

/// The layers of its target that an EAGLE-3 head reads.
pub(crate) fn aux_layers(config: &Json) -> Option<Vec<u64>> {
    const IDS: &str = "eagle_aux_hidden_state_layer_ids";
    let ids = [&config[IDS], &config["eagle_config"][IDS]];
    let ids = ids.into_iter().find_map(Json::as_array)?;
    Some(ids.iter().filter_map(Json::as_u64).collect())
}

/// The divisors of a full layer's frequencies: 1 for pairs that turn, one that
/// stops them for the others.
pub(crate) fn divisors(text: &Json) -> Vec<f32> {
    let rope = &text["rope_parameters"][FULL];
    let pairs = text["global_head_dim"].as_u64().unwrap_or(512) / 2;
    let share = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    let turned = (share * pairs as f64) as u64;
    let divisor = |pair| if pair < turned { 1.0 } else { 1e30 };
    (0..pairs.min(1 << 16)).map(divisor).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_eagle3_file_says_how_far_it_reaches_whether_its_head_does_or_not() {
        for (said, written) in [(json!(4096), 4096), (Json::Null, 1 << 18)] {
            let config = json!({"hidden_size": 8, "max_position_embeddings": said});
            let keys = metadata("eagle3", &config, &config);
            let reach = keys.iter().filter(|(k, _)| k == "eagle3.context_length");
            let reach: Vec<_> = reach.map(|(_, value)| value.clone()).collect();
            assert_eq!(reach, [Value::U32(written)]);
        }
    }
}
