//! EAGLE-3 draft heads, for any target (`checkpoints.md` §4.3).

use super::{Family, PLAIN};
use crate::gguf::Edit::*;
use crate::gguf::{FileView, Keys, Value};
use serde_json::{Value as Json, json};

/// The head.
pub(super) const HEAD: Family = Family {
    architectures: &["eagle3"],
    // Their `model_type` is that of their layers.
    named_like: Some("Eagle3"),
    whole: &[
        ("token_embd.weight", "embed_tokens.weight", Same),
        ("output_norm.weight", "norm.weight", Same),
        ("output.weight", "lm_head.weight", Same),
        ("fc.weight", "fc.weight", Same),
        ("d2t", "d2t", Absolute),
    ],
    block: &[
        ("attn_norm.weight", "input_layernorm.weight", Same),
        ("attn_norm_2.weight", "hidden_norm.weight", Same),
        ("attn_q.weight", "self_attn.q_proj.weight", QueryPairs),
        ("attn_k.weight", "self_attn.k_proj.weight", KeyPairs),
        ("attn_v.weight", "self_attn.v_proj.weight", Same),
        ("attn_output.weight", "self_attn.o_proj.weight", Same),
        ("ffn_norm.weight", "post_attention_layernorm.weight", Same),
        ("ffn_gate.weight", "mlp.gate_proj.weight", Same),
        ("ffn_up.weight", "mlp.up_proj.weight", Same),
        ("ffn_down.weight", "mlp.down_proj.weight", Same),
    ],
    config,
    keys,
    text,
    layers: |_| Some(1),
    lacks,
    drops: &["t2d"],
    ..PLAIN
};

/// Tokens of a head that does not say how many: those of released targets.
const CONTEXT: u64 = 1 << 18;

fn config(file: &FileView<'_>, _layers: usize) -> Result<Json, String> {
    let size = |key| file.size(key);
    let ids = |layers: Value<'_>| {
        let ids = layers.as_array()?.iter().map(Value::as_u64);
        ids.collect::<Option<Vec<u64>>>()
    };
    let layers = file.get("target_layers").map(|layers| {
        ids(layers).ok_or("`eagle3.target_layers` is not a list of the target's layers, from 0")
    });
    let layers = layers.transpose()?;
    Ok(json!({
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": size("vocab_size"),
        "draft_vocab_size": file.rows("output.weight"),
        "hidden_size": size("embedding_length"),
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": 1,
        "num_attention_heads": size("attention.head_count"),
        "num_key_value_heads": size("attention.head_count_kv"),
        "head_dim": size("attention.key_length").or(size("rope.dimension_count")),
        "rms_norm_eps": file.float("attention.layer_norm_rms_epsilon"),
        "rope_theta": file.float("rope.freq_base").unwrap_or(1e4),
        "max_position_embeddings": size("context_length"),
        "target_hidden_size": size("target_hidden_size"),
        "norm_before_residual": file.get("norm_before_residual").and_then(|v| v.as_bool()),
        "eagle_aux_hidden_state_layer_ids": layers,
    }))
}

fn keys(keys: &mut Keys<'_>, config: &Json) {
    let (hidden, head_dim) = (keys.number("hidden_size"), keys.number("head_dim"));
    if keys.number("max_position_embeddings").is_none() {
        // A head has no limit of its own, but llama.cpp wants one said.
        keys.size("context_length", Some(CONTEXT));
    }
    for (key, value) in [
        ("block_count", Some(1)),
        ("vocab_size", keys.number("vocab_size")),
        ("feed_forward_length", keys.number("intermediate_size")),
        (
            "attention.head_count_kv",
            keys.number("num_key_value_heads"),
        ),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        ("rope.dimension_count", head_dim),
        (
            "target_hidden_size",
            config["target_hidden_size"].as_u64().or(hidden),
        ),
    ] {
        keys.size(key, value);
    }
    let theta = [
        &keys.text["rope_parameters"]["rope_theta"],
        &keys.text["rope_theta"],
    ];
    let theta = theta.into_iter().find_map(Json::as_f64);
    keys.float("rope.freq_base", theta.or(Some(1e4)));
    if let Some(layers) = aux_layers(config) {
        keys.list("target_layers", layers.into_iter());
    }
    let before = config["norm_before_residual"].as_bool();
    keys.push("norm_before_residual", Value::Bool(before == Some(true)));
}

/// The configuration of the head's layer, with the sizes that it leaves open.
fn text(config: &Json, _text: &Json) -> Option<Json> {
    let part = config.get("transformer_layer_config");
    let mut text = part.filter(|p| p.is_object()).unwrap_or(config).clone();
    let heads = text["num_attention_heads"].as_u64()?;
    if text["num_key_value_heads"].is_null() {
        text["num_key_value_heads"] = heads.into();
    }
    if text["head_dim"].is_null() {
        text["head_dim"] = text["hidden_size"].as_u64()?.checked_div(heads)?.into();
    }
    Some(text)
}

/// What a head needs and GGUF files have no field for.
fn lacks(config: &Json, text: &Json) -> Option<&'static str> {
    let is = |on: &Json| on.as_bool() == Some(true);
    let rope = &text["rope_parameters"];
    let share = rope["partial_rotary_factor"].as_f64().unwrap_or(1.0);
    let slides = text["layer_types"][0] == "sliding_attention";
    let cases = [
        ("`norm_before_fc`", is(&config["norm_before_fc"])),
        ("`fc_norm`", is(&config["fc_norm"])),
        ("`norm_output`", is(&config["norm_output"])),
        (
            "more than one layer",
            text["num_hidden_layers"].as_u64().is_some_and(|n| n != 1),
        ),
        (
            "a window of attention",
            slides && text["use_sliding_window"].as_bool() != Some(false),
        ),
        ("`rope_scaling`", !text["rope_scaling"].is_null()),
        ("a part of rotary columns", share != 1.0),
        (
            "the default of `eagle_aux_hidden_state_layer_ids`",
            aux_layers(config).is_none(),
        ),
    ];
    let first = cases.into_iter().find(|(_, lacks)| *lacks);
    first.map(|(what, _)| what)
}

/// The layers of the target that a head reads.
fn aux_layers(config: &Json) -> Option<Vec<u64>> {
    const IDS: &str = "eagle_aux_hidden_state_layer_ids";
    let ids = [&config[IDS], &config["eagle_config"][IDS]];
    let ids = ids.into_iter().find_map(Json::as_array)?;
    Some(ids.iter().filter_map(Json::as_u64).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::metadata;

    #[test]
    fn an_eagle3_file_says_how_far_it_reaches_whether_its_head_does_or_not() {
        for (said, written) in [(json!(4096), 4096), (Json::Null, 1 << 18)] {
            let config = json!({"hidden_size": 8, "max_position_embeddings": said});
            let keys = metadata(&HEAD, &config, &config);
            let reach = keys.iter().filter(|(k, _)| k == "eagle3.context_length");
            let reach: Vec<_> = reach.map(|(_, value)| value.clone()).collect();
            assert_eq!(reach, [Value::U32(written)]);
        }
    }
}
