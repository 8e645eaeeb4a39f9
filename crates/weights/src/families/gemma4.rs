//! Gemma 4 and its assistant (`checkpoints.md` §4.1).

use super::{Family, Name, PLAIN};
use crate::gguf::Edit::*;
use crate::gguf::{FileView, Keys, Kind, Value};
use serde_json::{Map, Value as Json, json};

/// The target.
pub(super) const TARGET: Family = Family {
    architectures: &["gemma4"],
    model_types: &[
        "gemma4_text",
        "gemma4",
        "gemma4_unified_text",
        "gemma4_unified",
    ],
    whole: &[
        ("token_embd.weight", "embed_tokens.weight", Same),
        ("output_norm.weight", "norm.weight", Same),
        (
            "per_layer_token_embd.weight",
            "embed_tokens_per_layer.weight",
            Same,
        ),
        (
            "per_layer_model_proj.weight",
            "per_layer_model_projection.weight",
            Same,
        ),
        (
            "per_layer_proj_norm.weight",
            "per_layer_projection_norm.weight",
            Same,
        ),
    ],
    block: BLOCK,
    fused: &[
        (super::FUSED, "experts.gate_up_proj", Same),
        ("ffn_down_exps.weight", "experts.down_proj", Same),
    ],
    experts: Some(("experts.", "experts.switch_glu.")),
    config,
    keys,
    derived: |text| vec![("rope_freqs.weight", divisors(text))],
    ..PLAIN
};

/// The assistant, which drafts for it.
pub(super) const ASSISTANT: Family = Family {
    architectures: &["gemma4-assistant", "gemma4_assistant"],
    model_types: &["gemma4_assistant", "gemma4_unified_assistant"],
    whole: &[
        ("token_embd.weight", "embed_tokens.weight", Same),
        ("output_norm.weight", "norm.weight", Same),
        ("nextn.pre_projection.weight", "pre_projection.weight", Same),
        (
            "nextn.post_projection.weight",
            "post_projection.weight",
            Same,
        ),
        (
            "masked_embd_centroids.weight",
            "masked_embedding.centroids.weight",
            Same,
        ),
        (
            "masked_embd_ordering",
            "masked_embedding.token_ordering",
            Same,
        ),
        // An older layout.
        ("mtp.pre_projection.weight", "pre_projection.weight", Same),
        ("mtp.post_projection.weight", "post_projection.weight", Same),
        (
            "mtp.centroids.weight",
            "masked_embedding.centroids.weight",
            Same,
        ),
        (
            "mtp.token_ordering",
            "masked_embedding.token_ordering",
            Same,
        ),
        (
            "mtp.token_ordering.weight",
            "masked_embedding.token_ordering",
            Same,
        ),
        (
            "masked_embd_ordering.weight",
            "masked_embedding.token_ordering",
            Same,
        ),
    ],
    block: BLOCK,
    config,
    wrap,
    keys: |keys_of, config| {
        keys(keys_of, config);
        let layers = keys_of.number("num_hidden_layers");
        let of = |key: &str| config[key].as_u64();
        keys_of.size("embedding_length_out", of("backbone_hidden_size"));
        keys_of.size("nextn_predict_layers", layers);
        keys_of.size("centroid_top_k", of("centroid_intermediate_top_k"));
    },
    derived: TARGET.derived,
    ..PLAIN
};

const BLOCK: &[Name] = &[
    ("attn_norm.weight", "input_layernorm.weight", Same),
    ("attn_q.weight", "self_attn.q_proj.weight", Same),
    ("attn_k.weight", "self_attn.k_proj.weight", Same),
    ("attn_v.weight", "self_attn.v_proj.weight", Same),
    ("attn_q_norm.weight", "self_attn.q_norm.weight", Same),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", Same),
    ("attn_output.weight", "self_attn.o_proj.weight", Same),
    (
        "post_attention_norm.weight",
        "post_attention_layernorm.weight",
        Same,
    ),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight", Same),
    ("ffn_gate.weight", "mlp.gate_proj.weight", Same),
    ("ffn_up.weight", "mlp.up_proj.weight", Same),
    ("ffn_down.weight", "mlp.down_proj.weight", Same),
    (
        "post_ffw_norm.weight",
        "post_feedforward_layernorm.weight",
        Same,
    ),
    ("layer_output_scale.weight", "layer_scalar", Same),
    ("inp_gate.weight", "per_layer_input_gate.weight", Same),
    ("proj.weight", "per_layer_projection.weight", Same),
    ("post_norm.weight", "post_per_layer_input_norm.weight", Same),
    ("ffn_gate_inp.weight", "router.proj.weight", Same),
    ("ffn_gate_inp.scale", "router.scale", Same),
    ("ffn_down_exps.scale", "router.per_expert_scale", Same),
    (
        "pre_ffw_norm_2.weight",
        "pre_feedforward_layernorm_2.weight",
        Same,
    ),
    (
        "post_ffw_norm_1.weight",
        "post_feedforward_layernorm_1.weight",
        Same,
    ),
    (
        "post_ffw_norm_2.weight",
        "post_feedforward_layernorm_2.weight",
        Same,
    ),
    (
        "ffn_gate_exps.weight",
        "experts.switch_glu.gate_proj.weight",
        Same,
    ),
    (
        "ffn_up_exps.weight",
        "experts.switch_glu.up_proj.weight",
        Same,
    ),
    (
        "ffn_down_exps.weight",
        "experts.switch_glu.down_proj.weight",
        Same,
    ),
];

/// Types of layers.
const SLIDING: &str = "sliding_attention";
const FULL: &str = "full_attention";
/// Centroids that an assistant looks into, where a file does not say.
const CENTROIDS_TOP_K: u64 = 32;

fn config(file: &FileView<'_>, layers: usize) -> Result<Json, String> {
    let types = layer_types(file, layers);
    let kv_heads = file
        .sizes("attention.head_count_kv", layers)
        .unwrap_or_default();
    let heads_of = |wanted: &str| {
        let mut of_type = types.iter().zip(&kv_heads).filter(|(t, _)| **t == wanted);
        of_type.next().map(|(_, n)| *n)
    };
    let inner = file
        .sizes("feed_forward_length", layers)
        .unwrap_or_default();
    let (narrow, wide) = (inner.iter().min(), inner.iter().max());
    let shared = file.size("attention.shared_kv_layers").unwrap_or(0);
    let own = layers.saturating_sub(usize::try_from(shared).unwrap_or(usize::MAX));
    let without_values = (0..own).any(|i| {
        types.get(i) == Some(&FULL)
            && file.has(&format!("blk.{i}.attn_k.weight"))
            && !file.has(&format!("blk.{i}.attn_v.weight"))
    });
    // An assistant has neither; what it shares may differ by type.
    let (sliding, full) = (heads_of(SLIDING), heads_of(FULL));
    let none_owned = own == 0 && sliding != full;
    let experts = file.size("expert_count").unwrap_or(0);
    Ok(json!({
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": file.dtype(),
        "vocab_size": file.rows("token_embd.weight"),
        "hidden_size": file.size("embedding_length"),
        "intermediate_size": narrow,
        "num_hidden_layers": layers,
        "num_attention_heads": file.size("attention.head_count"),
        "num_key_value_heads": sliding.or(full),
        "num_global_key_value_heads": full,
        "head_dim": file.size("attention.key_length_swa"),
        "global_head_dim": file.size("attention.key_length"),
        "layer_types": types,
        "sliding_window": file.size("attention.sliding_window"),
        "attention_k_eq_v": without_values || none_owned,
        // Of all released sizes, those whose full layers have no values of their own.
        "use_bidirectional_attention": without_values.then_some("vision"),
        // With values of their own, full layers say their heads one by one.
        "per_layer_config": (!without_values && !none_owned && sliding.is_some() && sliding != full).then(|| {
            let full_layers = (0..layers).filter(|&i| types[i] == FULL);
            full_layers.map(|i| (i.to_string(), json!({ "num_key_value_heads": full }))).collect::<Map<_, _>>()
        }),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": narrow != wide,
        "hidden_size_per_layer_input": file.size("embedding_length_per_layer_input"),
        "vocab_size_per_layer_input": file.rows("per_layer_token_embd.weight"),
        "enable_moe_block": experts > 0,
        "num_experts": (experts > 0).then_some(experts),
        "top_k_experts": file.size("expert_used_count"),
        "moe_intermediate_size": file.size("expert_feed_forward_length"),
        "rope_parameters": {
            SLIDING: {
                "rope_type": "default",
                "rope_theta": file.float("rope.freq_base_swa").unwrap_or(1e4),
            },
            FULL: {
                "rope_type": "proportional",
                "rope_theta": file.float("rope.freq_base").unwrap_or(1e6),
                "partial_rotary_factor": turned(file),
            },
        },
        "rms_norm_eps": file.float("attention.layer_norm_rms_epsilon"),
        "final_logit_softcapping": file.float("final_logit_softcapping"),
        "max_position_embeddings": file.size("context_length"),
        "tie_word_embeddings": true,
    }))
}

/// The type of every layer: a file says it of each, or says how many layers come before
/// a full one; without either, it is one in six.
fn layer_types(file: &FileView<'_>, layers: usize) -> Vec<&'static str> {
    let pattern = file.get("attention.sliding_window_pattern");
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
fn turned(file: &FileView<'_>) -> f64 {
    let divisors = (file.floats)("rope_freqs.weight").unwrap_or_default();
    let turned = divisors.iter().filter(|d| **d == 1.0).count();
    if divisors.is_empty() {
        0.25
    } else {
        turned as f64 / divisors.len() as f64
    }
}

/// An assistant's configuration around that of its layers, `text`.
fn wrap(file: &FileView<'_>, text: Json) -> Json {
    let centroids = ["masked_embd_centroids.weight", "mtp.centroids.weight"];
    let centroids = centroids.iter().find_map(|name| file.rows(name));
    json!({
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": text["dtype"],
        "backbone_hidden_size": file.size("embedding_length_out"),
        "use_ordered_embeddings": centroids.is_some(),
        "num_centroids": centroids.unwrap_or(0),
        "centroid_intermediate_top_k": file.size("centroid_top_k").unwrap_or(CENTROIDS_TOP_K),
        "tie_word_embeddings": true,
        "text_config": text,
    })
}

fn keys(keys: &mut Keys<'_>, _config: &Json) {
    let layers = keys.number("num_hidden_layers").unwrap_or(0);
    let types = keys.text["layer_types"]
        .as_array()
        .cloned()
        .unwrap_or_default();
    // The last layer is always full.
    let slides = |i: u64| i + 1 != layers && types.get(i as usize).is_none_or(|t| t == SLIDING);
    let shared = keys.text["num_kv_shared_layers"].as_u64().unwrap_or(0);
    let inner = keys.number("intermediate_size");
    keys.size("block_count", Some(layers));
    match (inner, keys.text["use_double_wide_mlp"].as_bool()) {
        (Some(inner), Some(true)) => {
            let own = layers.saturating_sub(shared);
            let wide = |i| if i < own { inner } else { 2 * inner };
            keys.list("feed_forward_length", (0..layers).map(wide));
        }
        _ => keys.size("feed_forward_length", inner),
    }
    let sliding = keys.number("num_key_value_heads");
    match (sliding, keys.number("num_global_key_value_heads")) {
        (Some(sliding), Some(full)) => {
            let heads = |i| if slides(i) { sliding } else { full };
            keys.list("attention.head_count_kv", (0..layers).map(heads));
        }
        _ => keys.size("attention.head_count_kv", sliding),
    }
    let (head, full) = (keys.number("head_dim"), keys.number("global_head_dim"));
    for (key, value) in [
        ("attention.key_length", full),
        ("attention.value_length", full),
        ("attention.key_length_swa", head),
        ("attention.value_length_swa", head),
        ("rope.dimension_count", full),
        ("rope.dimension_count_swa", head),
        ("attention.sliding_window", keys.number("sliding_window")),
        ("attention.shared_kv_layers", Some(shared)),
        ("expert_used_count", keys.number("top_k_experts")),
    ] {
        keys.size(key, value);
    }
    let width = keys.text["hidden_size_per_layer_input"].as_u64();
    keys.size("embedding_length_per_layer_input", width.or(Some(0)));
    let pattern = (0..layers).map(|i| Value::Bool(slides(i))).collect();
    keys.push(
        "attention.sliding_window_pattern",
        Value::Array(Kind::Bool, pattern),
    );
    let rope = &keys.text["rope_parameters"];
    let (slow, fast) = (
        rope[FULL]["rope_theta"].as_f64(),
        rope[SLIDING]["rope_theta"].as_f64(),
    );
    keys.float("rope.freq_base", slow);
    keys.float("rope.freq_base_swa", fast);
    keys.float(
        "final_logit_softcapping",
        keys.text["final_logit_softcapping"].as_f64(),
    );
}

/// The divisors of a full layer's frequencies: 1 for pairs that turn, one that
/// stops them for the others.
fn divisors(text: &Json) -> Vec<f32> {
    let rope = &text["rope_parameters"][FULL];
    let pairs = text["global_head_dim"].as_u64().unwrap_or(512) / 2;
    let share = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    let turned = (share * pairs as f64) as u64;
    let divisor = |pair| if pair < turned { 1.0 } else { 1e30 };
    (0..pairs.min(1 << 16)).map(divisor).collect()
}
