//! Block drafters, DFlash and DSpark heads of Qwen 3's layers, for any target (`checkpoints.md` §4.3).
//!
//! Files of DSpark and DFlash 2 heads are of the same architecture: what makes them such is their
//! Markov head, and their candidate selector.

use super::{Family, PLAIN};
use crate::gguf::Edit::*;
use crate::gguf::{FileView, Value};
use serde_json::{Value as Json, json};

/// The head.
pub(super) const HEAD: Family = Family {
    architectures: &["dflash", "dspark"],
    whole: &[
        ("token_embd.weight", "embed_tokens.weight", Same),
        ("output_norm.weight", "norm.weight", Same),
        ("output.weight", "lm_head.weight", Same),
        ("enc.output_norm.weight", "hidden_norm.weight", Same),
        ("fc.weight", "fc.weight", Same),
        ("d2t", "d2t", Absolute),
        ("markov_w1.weight", "markov_head.markov_w1.weight", Same),
        ("markov_w2.weight", "markov_head.markov_w2.weight", Same),
        (
            "selector_hidden.weight",
            "candidate_selector.hidden_projection.weight",
            Same,
        ),
        (
            "selector_predecessor.weight",
            "candidate_selector.predecessor_codebook",
            Same,
        ),
        (
            "selector_successor.weight",
            "candidate_selector.successor_codebook",
            Same,
        ),
        ("conf_proj.weight", "confidence_head.proj.weight", Same),
        ("conf_proj.bias", "confidence_head.proj.bias", Same),
    ],
    block: &[
        ("attn_norm.weight", "input_layernorm.weight", Same),
        ("attn_q.weight", "self_attn.q_proj.weight", Same),
        ("attn_k.weight", "self_attn.k_proj.weight", Same),
        ("attn_v.weight", "self_attn.v_proj.weight", Same),
        ("attn_output.weight", "self_attn.o_proj.weight", Same),
        ("attn_q_norm.weight", "self_attn.q_norm.weight", Same),
        ("attn_k_norm.weight", "self_attn.k_norm.weight", Same),
        ("attn_conv_base", "attention_conv.base_kernel", Same),
        (
            "attn_conv_proj.weight",
            "attention_conv.kernel_projection.weight",
            Same,
        ),
        ("ffn_conv_base", "mlp_conv.base_kernel", Same),
        (
            "ffn_conv_proj.weight",
            "mlp_conv.kernel_projection.weight",
            Same,
        ),
        ("ffn_norm.weight", "post_attention_layernorm.weight", Same),
        ("ffn_gate.weight", "mlp.gate_proj.weight", Same),
        ("ffn_up.weight", "mlp.up_proj.weight", Same),
        ("ffn_down.weight", "mlp.down_proj.weight", Same),
    ],
    config,
    ..PLAIN
};

const MARKOV: &str = "markov_w1.weight";
const CONFIDENCE: &str = "conf_proj.weight";

fn config(file: &FileView<'_>, layers: usize) -> Result<Json, String> {
    let size = |key| file.size(key);
    let cols = |tensor| (file.shape)(tensor).and_then(|shape| shape.last().copied());
    let is_second = file.has("selector_hidden.weight");
    let causal = file.get("attention.causal").and_then(|v| v.as_bool());
    let architecture = match () {
        () if is_second => "DFlash2DraftModel",
        () if file.has(MARKOV) || file.architecture == "dspark" => "DSparkDraftModel",
        () => "DFlashDraftModel",
    };
    let (hidden, rank) = (size("embedding_length"), cols(MARKOV));
    let head_dim = size("attention.key_length");
    let turned = size("rope.dimension_count").or(head_dim);
    let windows = windows(file, layers)?;
    let scaling = file.get("rope.scaling.type");
    let scaling = scaling.as_ref().and_then(Value::as_str);
    let said = file.metadata.scalar("tokenizer.ggml.mask_token_id");
    Ok(json!({
        "architectures": [architecture],
        "model_type": "qwen3",
        "vocab_size": vocab_size(file),
        "draft_vocab_size": file.rows("d2t"),
        "hidden_size": hidden,
        "intermediate_size": size("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": size("attention.head_count"),
        "num_key_value_heads": size("attention.head_count_kv"),
        "head_dim": head_dim.or(turned),
        "rms_norm_eps": file.float("attention.layer_norm_rms_epsilon"),
        "rope_parameters": {
            "rope_theta": file.float("rope.freq_base").unwrap_or(1e4),
            "rope_type": scaling.filter(|kind| *kind != "none").unwrap_or("default"),
            "partial_rotary_factor": match (turned, head_dim) {
                (Some(turned), Some(all)) if all > 0 => turned as f64 / all as f64,
                _ => 1.0,
            },
        },
        "layer_types": windows,
        "sliding_window": size("attention.sliding_window").filter(|rows| *rows > 0),
        // Rows of a DFlash 2 block see each other in windows, too, and files do not say so.
        "is_causal": causal.or(is_second.then_some(false)),
        "conv_kernel_size": size("conv_kernel_size"),
        "conv_group_size": size("conv_group_size"),
        "selector_rank": size("selector_rank"),
        "selector_top_k": size("selector_top_k"),
        "block_size": size("block_size").ok_or_else(|| missing(file, "block_size"))?,
        "mask_token_id": said.and_then(|id| id.as_u64()),
        "target_layer_ids": tapped(file)?,
        "output_multiplier": file.float("logit_scale").filter(|scale| *scale != 0.0),
        "final_logit_softcapping": file.float("final_logit_softcapping").filter(|cap| *cap > 0.0),
        "markov_rank": rank.unwrap_or(0),
        "enable_confidence_head": file.has(CONFIDENCE),
        "confidence_head_with_markov": rank.is_some()
            && cols(CONFIDENCE).map(|cols| cols as u64) != hidden,
    }))
}

fn missing(file: &FileView<'_>, key: &str) -> String {
    format!(
        "`{}.{key}` is missing, which a block drafter needs; convert the head again with a newer llama.cpp",
        file.architecture
    )
}

/// Tokens of the target: those of the file's own vocabulary, if it says no number.
fn vocab_size(file: &FileView<'_>) -> Option<u64> {
    let tokens = file.metadata.count("tokenizer.ggml.tokens");
    let rows = || file.rows(MARKOV).or_else(|| file.rows("token_embd.weight"));
    file.size("vocab_size")
        .or_else(|| Some(rows().or(tokens)? as u64))
}

/// The layers of the target whose outputs are tapped, -1 for its embeddings: the file counts
/// from the embeddings on.
fn tapped(file: &FileView<'_>) -> Result<Vec<i64>, String> {
    let layers = file
        .get("target_layers")
        .ok_or_else(|| missing(file, "target_layers"))?;
    let ids = layers.as_array().map(|layers| {
        let below = |layer: &Value<'_>| Some(i64::try_from(layer.as_u64()?).ok()? - 1);
        layers.iter().map(below).collect::<Option<Vec<i64>>>()
    });
    ids.flatten().ok_or_else(|| {
        format!(
            "`{}.target_layers` is not a list of the target's layers, from 0",
            file.architecture
        )
    })
}

/// The type of each layer, where some have a window.
fn windows(file: &FileView<'_>, layers: usize) -> Result<Option<Vec<&'static str>>, String> {
    if file.size("attention.sliding_window").unwrap_or(0) == 0 {
        return Ok(None);
    }
    let key = "attention.sliding_window_pattern";
    let pattern: Option<Vec<bool>> = match file.get(key) {
        None => Some(vec![true; layers]),
        Some(Value::Array(_, items)) => items.iter().map(Value::as_bool).collect(),
        Some(_) => None,
    };
    let pattern = pattern.filter(|pattern| pattern.len() == layers);
    let pattern = pattern.ok_or_else(|| {
        let architecture = file.architecture;
        format!("`{architecture}.{key}` does not say for each of {layers} layers whether it slides")
    })?;
    let name = |slides| match slides {
        true => "sliding_attention",
        false => "full_attention",
    };
    Ok(Some(pattern.into_iter().map(name).collect()))
}
