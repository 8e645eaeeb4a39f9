//! A seeded block drafter as a GGUF file of llama.cpp's converter.

use super::{SeededBlock, stored};
use convert::gguf::{Store, TensorInfo, Writer};
use serde_json::Value as Json;
use weights::Checkpoint;
use weights::gguf::{Kind, Value};

/// Names in checkpoints of z-lab and DeepSpec, and in GGUF files.
const NAMES: &[(&str, &str)] = &[
    ("embed_tokens.weight", "token_embd.weight"),
    ("lm_head.weight", "output.weight"),
    ("hidden_norm.weight", "enc.output_norm.weight"),
    ("norm.weight", "output_norm.weight"),
    ("fc.weight", "fc.weight"),
    ("d2t", "d2t"),
    ("markov_head.markov_w1.weight", "markov_w1.weight"),
    ("markov_head.markov_w2.weight", "markov_w2.weight"),
    ("confidence_head.proj.weight", "conf_proj.weight"),
    ("confidence_head.proj.bias", "conf_proj.bias"),
    (
        "candidate_selector.hidden_projection.weight",
        "selector_hidden.weight",
    ),
    (
        "candidate_selector.predecessor_codebook",
        "selector_predecessor.weight",
    ),
    (
        "candidate_selector.successor_codebook",
        "selector_successor.weight",
    ),
    ("attention_conv.base_kernel", "attn_conv_base"),
    (
        "attention_conv.kernel_projection.weight",
        "attn_conv_proj.weight",
    ),
    ("mlp_conv.base_kernel", "ffn_conv_base"),
    ("mlp_conv.kernel_projection.weight", "ffn_conv_proj.weight"),
    ("input_layernorm.weight", "attn_norm.weight"),
    ("self_attn.q_proj.weight", "attn_q.weight"),
    ("self_attn.k_proj.weight", "attn_k.weight"),
    ("self_attn.v_proj.weight", "attn_v.weight"),
    ("self_attn.o_proj.weight", "attn_output.weight"),
    ("self_attn.q_norm.weight", "attn_q_norm.weight"),
    ("self_attn.k_norm.weight", "attn_k_norm.weight"),
    ("post_attention_layernorm.weight", "ffn_norm.weight"),
    ("mlp.gate_proj.weight", "ffn_gate.weight"),
    ("mlp.up_proj.weight", "ffn_up.weight"),
    ("mlp.down_proj.weight", "ffn_down.weight"),
];

/// The name of tensor `name` in the file; `None` of one that it leaves out.
fn name_in_file(name: &str) -> Option<String> {
    let of = |name: &str| {
        let found = NAMES.iter().find(|(stored, _)| *stored == name);
        found.map(|(_, file)| (*file).to_owned())
    };
    let Some((layer, part)) = name.strip_prefix("layers.").and_then(|n| n.split_once('.')) else {
        return of(name);
    };
    let part = of(part).unwrap_or_else(|| panic!("`{part}` has no name in GGUF files"));
    Some(format!("blk.{layer}.{part}"))
}

impl SeededBlock {
    /// What of its configuration is in `key`: of the head, or of its layers.
    fn field(&self, key: &str) -> &Json {
        let parts = [
            &self.config[key],
            &self.config["dflash_config"][key],
            &self.config["transformer_layer_config"][key],
        ];
        let found = parts.into_iter().find(|value| !value.is_null());
        found.unwrap_or(&Json::Null)
    }

    /// The metadata of its file, without a tokenizer's texts.
    pub fn metadata(&self) -> Vec<(String, Value<'static>)> {
        let number = |key: &str| Value::U32(self.field(key).as_u64().unwrap() as u32);
        let float = |key: &str| Value::F32(self.field(key).as_f64().unwrap() as f32);
        let tapped: Vec<i32> = match self.field("target_layer_ids").as_array() {
            Some(ids) => ids
                .iter()
                .map(|id| id.as_i64().unwrap() as i32 + 1)
                .collect(),
            None => {
                let ids = self.field("aux_hidden_state_layer_ids").as_array().unwrap();
                ids.iter().map(|id| id.as_i64().unwrap() as i32).collect()
            }
        };
        let tapped = tapped.into_iter().map(Value::I32).collect();
        let mut keys = vec![
            ("block_count", number("num_hidden_layers")),
            ("context_length", number("max_position_embeddings")),
            ("embedding_length", number("hidden_size")),
            ("feed_forward_length", number("intermediate_size")),
            ("attention.head_count", number("num_attention_heads")),
            ("attention.head_count_kv", number("num_key_value_heads")),
            ("attention.key_length", number("head_dim")),
            ("attention.value_length", number("head_dim")),
            ("attention.layer_norm_rms_epsilon", float("rms_norm_eps")),
            ("rope.freq_base", float("rope_theta")),
            ("vocab_size", number("vocab_size")),
            ("block_size", number("block_size")),
            ("target_layers", Value::Array(Kind::I32, tapped)),
        ];
        if self.field("use_sliding_window").as_bool() == Some(true) {
            let types = self.field("layer_types").as_array().unwrap();
            let slides = types.iter().map(|t| Value::Bool(t == "sliding_attention"));
            let slides = Value::Array(Kind::Bool, slides.collect());
            keys.push(("attention.sliding_window", number("sliding_window")));
            keys.push(("attention.sliding_window_pattern", slides));
        }
        for key in [
            "conv_kernel_size",
            "conv_group_size",
            "selector_rank",
            "selector_top_k",
        ] {
            if !self.field(key).is_null() {
                keys.push((key, number(key)));
            }
        }
        let keys = keys.into_iter();
        let mut all: Vec<_> = keys.map(|(k, v)| (format!("dflash.{k}"), v)).collect();
        all.push(("general.architecture".into(), "dflash".into()));
        all.push((
            "tokenizer.ggml.mask_token_id".into(),
            number("mask_token_id"),
        ));
        all
    }

    /// The bytes of its file with `metadata`, matrices in `f32`.
    pub fn gguf(&self, metadata: &[(String, Value<'static>)]) -> Vec<u8> {
        let mut infos = Vec::new();
        let mut data = Vec::new();
        for (name, shape) in &self.tensors {
            let Some(in_file) = name_in_file(name) else {
                continue;
            };
            let (_, mut bytes) = stored(name, shape);
            let store = match name.as_str() {
                "d2t" => {
                    // Target tokens here, and what is to be added to draft tokens there.
                    let added = bytes.chunks_exact(8).map(|id| id.try_into().unwrap());
                    let ids = added
                        .enumerate()
                        .map(|(i, id)| i as i64 + i64::from_le_bytes(id));
                    bytes = ids.flat_map(i64::to_le_bytes).collect();
                    Store::I64
                }
                _ => Store::Numbers(&quant::F32),
            };
            infos.push(TensorInfo {
                name: in_file,
                shape: shape.clone(),
                store,
            });
            data.push(bytes);
        }
        let metadata: Vec<_> = metadata
            .iter()
            .map(|(k, v)| (k.as_str(), v.clone()))
            .collect();
        let mut writer = Writer::new(Vec::new(), &metadata, infos).unwrap();
        data.iter().for_each(|bytes| writer.write(bytes).unwrap());
        writer.finish().unwrap()
    }

    /// The checkpoint of its GGUF file.
    pub fn gguf_checkpoint(&self) -> Checkpoint {
        let files = vec![("head.gguf".to_owned(), self.gguf(&self.metadata()).into())];
        Checkpoint::from_bytes("", files).unwrap()
    }
}
