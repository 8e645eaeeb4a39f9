//! Qwen 3.5 and its MTP head, dense and with experts (`checkpoints.md` §4.2).

use super::{Family, Name, PLAIN};
use crate::gguf::Edit::*;
use crate::gguf::{FileView, Keys, Value};
use serde_json::{Value as Json, json};

/// The dense model.
pub(super) const DENSE: Family = Family {
    architectures: &["qwen35"],
    model_types: &["qwen3_5_text", "qwen3_5"],
    whole: WHOLE,
    block: BLOCK,
    fused: FUSED,
    head: HEAD,
    experts: Some(("mlp.experts.", "mlp.switch_mlp.")),
    offset_norms: OFFSET_NORMS,
    convolution: Some(".linear_attn.conv1d.weight"),
    head_blocks: |file| file.size("nextn_predict_layers").unwrap_or(0),
    config,
    keys,
    lacks,
    ..PLAIN
};

/// The mixture of experts.
pub(super) const MIXTURE: Family = Family {
    architectures: &["qwen35moe"],
    model_types: &["qwen3_5_moe_text", "qwen3_5_moe"],
    ..DENSE
};

/// Ends of the names of offset norms, `y = x/rms(x) · (1 + w)` (`qwen3_5.md` §2), beside
/// `norm.weight` itself. `linear_attn.norm` has no offset.
const OFFSET_NORMS: &[&str] = &[
    ".input_layernorm.weight",
    ".post_attention_layernorm.weight",
    ".self_attn.q_norm.weight",
    ".self_attn.k_norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
    "mtp.norm.weight",
];

const WHOLE: &[Name] = &[
    ("token_embd.weight", "embed_tokens.weight", Same),
    ("output_norm.weight", "norm.weight", Folded),
    ("output.weight", "lm_head.weight", Same),
];

const BLOCK: &[Name] = &[
    ("attn_norm.weight", "input_layernorm.weight", Folded),
    (
        "post_attention_norm.weight",
        "post_attention_layernorm.weight",
        Folded,
    ),
    ("attn_q.weight", "self_attn.q_proj.weight", Same),
    ("attn_k.weight", "self_attn.k_proj.weight", Same),
    ("attn_v.weight", "self_attn.v_proj.weight", Same),
    ("attn_q_norm.weight", "self_attn.q_norm.weight", Folded),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", Folded),
    ("attn_output.weight", "self_attn.o_proj.weight", Same),
    (
        "attn_qkv.weight",
        "linear_attn.in_proj_qkv.weight",
        MixedRows,
    ),
    (
        "attn_gate.weight",
        "linear_attn.in_proj_z.weight",
        ValueRows,
    ),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight", HeadRows),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight", HeadRows),
    ("ssm_a", "linear_attn.A_log", Decay),
    ("ssm_dt.bias", "linear_attn.dt_bias", HeadRows),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight", MixedRows),
    ("ssm_norm.weight", "linear_attn.norm.weight", Same),
    (
        "ssm_out.weight",
        "linear_attn.out_proj.weight",
        ValueColumns,
    ),
    ("ffn_gate.weight", "mlp.gate_proj.weight", Same),
    ("ffn_up.weight", "mlp.up_proj.weight", Same),
    ("ffn_down.weight", "mlp.down_proj.weight", Same),
    ("ffn_gate_inp.weight", "mlp.gate.weight", Same),
    (
        "ffn_gate_inp_shexp.weight",
        "mlp.shared_expert_gate.weight",
        Same,
    ),
    (
        "ffn_gate_shexp.weight",
        "mlp.shared_expert.gate_proj.weight",
        Same,
    ),
    (
        "ffn_up_shexp.weight",
        "mlp.shared_expert.up_proj.weight",
        Same,
    ),
    (
        "ffn_down_shexp.weight",
        "mlp.shared_expert.down_proj.weight",
        Same,
    ),
    (
        "ffn_gate_exps.weight",
        "mlp.switch_mlp.gate_proj.weight",
        Same,
    ),
    ("ffn_up_exps.weight", "mlp.switch_mlp.up_proj.weight", Same),
    (
        "ffn_down_exps.weight",
        "mlp.switch_mlp.down_proj.weight",
        Same,
    ),
];

const FUSED: &[Name] = &[
    (super::FUSED, "mlp.experts.gate_up_proj", Same),
    ("ffn_down_exps.weight", "mlp.experts.down_proj", Same),
];

const HEAD: &[Name] = &[
    ("nextn.eh_proj.weight", "mtp.fc.weight", Same),
    (
        "nextn.enorm.weight",
        "mtp.pre_fc_norm_embedding.weight",
        Folded,
    ),
    (
        "nextn.hnorm.weight",
        "mtp.pre_fc_norm_hidden.weight",
        Folded,
    ),
    ("nextn.shared_head_norm.weight", "mtp.norm.weight", Folded),
];

fn config(file: &FileView<'_>, layers: usize) -> Result<Json, String> {
    let size = |key| file.size(key);
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
    let kv_heads = file
        .sizes("attention.head_count_kv", layers)
        .unwrap_or_default();
    let mixture = file.architecture == "qwen35moe";
    // Time, height, width, and nothing.
    let sections = file.sizes("rope.dimension_sections", 4);
    let sections = sections
        .map(|s| s[..3].to_vec())
        .filter(|s| s.iter().any(|n| *n > 0));
    let scaling = file.get("rope.scaling.type");
    let scaling = scaling.as_ref().and_then(Value::as_str);
    let scaling = scaling.filter(|kind| *kind != "none");
    let factor = file
        .float("rope.scaling.factor")
        .filter(|_| scaling.is_some());
    // Files have what is multiplied with the usual length of queries and keys, and configurations the product.
    let attention_factor = file.float("rope.scaling.attn_factor").zip(factor);
    let attention_factor = attention_factor.map(|(a, s)| a * (0.1 * s.ln() + 1.0));
    Ok(json!({
        "architectures": [if mixture { "Qwen3_5MoeForCausalLM" } else { "Qwen3_5ForCausalLM" }],
        "model_type": if mixture { "qwen3_5_moe_text" } else { "qwen3_5_text" },
        "dtype": file.dtype(),
        "vocab_size": file.rows("token_embd.weight"),
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
            "rope_type": scaling.unwrap_or("default"),
            "factor": factor,
            "original_max_position_embeddings": size("rope.scaling.original_context_length"),
            "attention_factor": attention_factor,
            "rope_theta": file.float("rope.freq_base").unwrap_or(1e7),
            "partial_rotary_factor": turned.unwrap_or(0.25),
            "mrope_section": sections,
        },
        "rms_norm_eps": file.float("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": size("context_length"),
        "tie_word_embeddings": !file.has("output.weight"),
        "mtp_num_hidden_layers": size("nextn_predict_layers").unwrap_or(0),
        "num_experts": size("expert_count"),
        "num_experts_per_tok": size("expert_used_count"),
        "moe_intermediate_size": size("expert_feed_forward_length"),
        "shared_expert_intermediate_size": size("expert_shared_feed_forward_length"),
    }))
}

/// What a head needs and GGUF files have no field for.
fn lacks(config: &Json, text: &Json) -> Option<&'static str> {
    let contract = &config[crate::MTP_CONTRACT];
    let has_head = text["mtp_num_hidden_layers"].as_u64() > Some(0);
    let cases = [
        (
            "`base_hidden_variant: pre_norm` of its MTP head",
            "base_hidden_variant",
            "pre_norm",
        ),
        (
            "`hidden_variant: pre_norm` of its MTP head",
            "hidden_variant",
            "pre_norm",
        ),
        (
            "`concat_order: hidden_embedding` of its MTP head",
            "concat_order",
            "hidden_embedding",
        ),
    ];
    let asked = cases.iter().find(|(_, key, value)| contract[key] == *value);
    asked.filter(|_| has_head).map(|(what, ..)| *what)
}

fn keys(keys: &mut Keys<'_>, _config: &Json) {
    let head = keys.number("mtp_num_hidden_layers").unwrap_or(0);
    let layers = keys.number("num_hidden_layers").unwrap_or(0);
    let (values, width) = (
        keys.number("linear_num_value_heads"),
        keys.number("linear_value_head_dim"),
    );
    let head_dim = keys.number("head_dim");
    let rope = &keys.text["rope_parameters"];
    let turned = rope["partial_rotary_factor"].as_f64().unwrap_or(0.25);
    let theta = rope["rope_theta"].as_f64();
    let sections = rope["mrope_section"].as_array().cloned();
    for (key, value) in [
        ("block_count", Some(layers + head)),
        ("feed_forward_length", keys.number("intermediate_size")),
        (
            "attention.head_count_kv",
            keys.number("num_key_value_heads"),
        ),
        ("attention.key_length", head_dim),
        ("attention.value_length", head_dim),
        (
            "rope.dimension_count",
            head_dim.map(|d| (d as f64 * turned) as u64),
        ),
        (
            "full_attention_interval",
            keys.number("full_attention_interval").or(Some(4)),
        ),
        ("ssm.conv_kernel", keys.number("linear_conv_kernel_dim")),
        ("ssm.state_size", keys.number("linear_key_head_dim")),
        ("ssm.group_count", keys.number("linear_num_key_heads")),
        ("ssm.time_step_rank", values),
        (
            "ssm.inner_size",
            values.zip(width).map(|(n, w)| n.saturating_mul(w)),
        ),
        ("expert_used_count", keys.number("num_experts_per_tok")),
        (
            "expert_shared_feed_forward_length",
            keys.number("shared_expert_intermediate_size"),
        ),
        ("nextn_predict_layers", (head > 0).then_some(head)),
    ] {
        keys.size(key, value);
    }
    keys.float("rope.freq_base", theta);
    let older = &keys.text["rope_scaling"];
    let kind = |of: &Json| {
        of["rope_type"]
            .as_str()
            .or(of["type"].as_str())
            .map(str::to_owned)
    };
    let is_stretched = |of: &&Json| kind(of).is_some_and(|kind| kind != "default");
    if let Some(scaling) = [rope, older].into_iter().find(is_stretched) {
        let (kind, factor) = (kind(scaling), scaling["factor"].as_f64());
        let trained = scaling["original_max_position_embeddings"].as_u64();
        let length = scaling["attention_factor"].as_f64().zip(factor);
        let length = length.map(|(a, s)| a / (0.1 * s.ln() + 1.0));
        if let Some(kind) = kind {
            keys.push("rope.scaling.type", Value::String(kind.into()));
        }
        keys.float("rope.scaling.factor", factor);
        keys.size("rope.scaling.original_context_length", trained);
        keys.float("rope.scaling.attn_factor", length);
    }
    let sections = sections.map(|s| s.iter().filter_map(Json::as_u64).collect());
    let mut sections: Vec<u64> = sections.unwrap_or_else(|| vec![11, 11, 10]);
    sections.resize(4, 0);
    keys.list("rope.dimension_sections", sections.into_iter());
}
