//! Sound towers in files of towers alone, `mmproj`.
//!
//! Names of a block follow `a.blk.{i}.` in the file. Values are as llama.cpp's converter leaves them:
//! the scales of queries have gone through softplus, and the names of two norms around a convolution are
//! each other's. Who reads the tower knows of the scales.

use super::projector::{Module, axis, named};
use crate::gguf::FileView;
use serde_json::{Value as Json, json};

/// The kinds of towers that are known, by what files call them.
const KINDS: [&str; 2] = ["gemma4a", "gemma4ua"];

/// Modules that occur once.
const WHOLE: &[Module] = &[
    (
        "a.conv1d.0.norm",
        "audio_tower.subsample_conv_projection.layer0.norm",
        "",
    ),
    (
        "a.conv1d.1.norm",
        "audio_tower.subsample_conv_projection.layer1.norm",
        "",
    ),
    (
        "a.conv1d.0",
        "audio_tower.subsample_conv_projection.layer0.conv",
        "",
    ),
    (
        "a.conv1d.1",
        "audio_tower.subsample_conv_projection.layer1.conv",
        "",
    ),
    (
        "a.input_projection",
        "audio_tower.subsample_conv_projection.input_proj_linear",
        "",
    ),
    ("a.pre_encode.out", "audio_tower.output_proj", ""),
    (
        "mm.a.input_projection",
        "embed_audio.embedding_projection",
        "",
    ),
];

/// Modules of a block.
const BLOCK: &[Module] = &[
    ("ffn_norm", "feed_forward1.pre_layer_norm", ""),
    ("ffn_up", "feed_forward1.ffw_layer_1", "linear."),
    ("ffn_down", "feed_forward1.ffw_layer_2", "linear."),
    ("ffn_post_norm", "feed_forward1.post_layer_norm", ""),
    ("attn_pre_norm", "norm_pre_attn", ""),
    ("attn_q", "self_attn.q_proj", "linear."),
    ("attn_k", "self_attn.k_proj", "linear."),
    ("attn_v", "self_attn.v_proj", "linear."),
    ("attn_out", "self_attn.post", "linear."),
    ("attn_k_rel", "self_attn.relative_k_proj", ""),
    ("attn_post_norm", "norm_post_attn", ""),
    ("conv_norm", "lconv1d.pre_layer_norm", ""),
    ("conv_pw1", "lconv1d.linear_start", "linear."),
    ("conv_dw", "lconv1d.depthwise_conv1d", ""),
    ("norm_conv", "lconv1d.conv_norm", ""),
    ("conv_pw2", "lconv1d.linear_end", "linear."),
    ("ffn_norm_1", "feed_forward2.pre_layer_norm", ""),
    ("ffn_up_1", "feed_forward2.ffw_layer_1", "linear."),
    ("ffn_down_1", "feed_forward2.ffw_layer_2", "linear."),
    ("ffn_post_norm_1", "feed_forward2.post_layer_norm", ""),
    ("ln2", "norm_out", ""),
];

/// The configuration of the sound tower in `file`; `None` without one that is known. A model reads
/// pictures and text without it.
pub(super) fn config(file: &FileView<'_>) -> Option<Json> {
    let keys = ["clip.audio.projector_type", "clip.projector_type"];
    let found = keys.iter().find_map(|key| file.metadata.text(key))?;
    let size = |key| file.size(key);
    let rows = |name| file.rows(name);
    let config = match KINDS.iter().position(|kind| *kind == found)? {
        0 => json!({
            "model_type": "gemma4_audio",
            "hidden_size": size("audio.embedding_length"),
            "num_hidden_layers": size("audio.block_count"),
            "num_attention_heads": size("audio.attention.head_count"),
            "subsampling_conv_channels": [rows("a.conv1d.0.weight"), rows("a.conv1d.1.weight")],
            "conv_kernel_size": axis(file, "a.blk.0.conv_dw.weight", 0),
            "rms_norm_eps": file.float("audio.attention.layer_norm_epsilon"),
            "use_clipped_linears": file.has("a.blk.0.attn_q.input_min")
                || file.has("a.blk.0.attn_q.output_min"),
            "output_proj_dims": rows("a.pre_encode.out.weight"),
        }),
        _ => json!({
            "model_type": "gemma4_unified_audio",
            "audio_embed_dim": axis(file, "mm.a.input_projection.weight", 0),
        }),
    };
    Some(config)
}

/// The canonical name of the tensor of a sound tower that a file calls `stored`; `None` for others.
pub(super) fn canonical(stored: &str) -> Option<String> {
    let of_block = || {
        let (block, part) = stored.strip_prefix("a.blk.")?.split_once('.')?;
        let number: usize = block.parse().ok()?;
        let part = match part {
            "per_dim_scale.weight" => "self_attn.per_dim_scale".to_owned(),
            _ => named(BLOCK, part)?,
        };
        (number.to_string() == block).then(|| format!("audio_tower.layers.{block}.{part}"))
    };
    of_block().or_else(|| named(WHOLE, stored))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_model() {
        for (stored, want) in [
            (
                "a.conv1d.0.weight",
                "audio_tower.subsample_conv_projection.layer0.conv.weight",
            ),
            (
                "a.conv1d.1.norm.weight",
                "audio_tower.subsample_conv_projection.layer1.norm.weight",
            ),
            ("a.pre_encode.out.bias", "audio_tower.output_proj.bias"),
            (
                "mm.a.input_projection.weight",
                "embed_audio.embedding_projection.weight",
            ),
            (
                "a.blk.11.attn_q.weight",
                "audio_tower.layers.11.self_attn.q_proj.linear.weight",
            ),
            (
                "a.blk.0.conv_pw1.output_max",
                "audio_tower.layers.0.lconv1d.linear_start.output_max",
            ),
            // The names of these two are each other's.
            (
                "a.blk.0.conv_norm.weight",
                "audio_tower.layers.0.lconv1d.pre_layer_norm.weight",
            ),
            (
                "a.blk.0.norm_conv.weight",
                "audio_tower.layers.0.lconv1d.conv_norm.weight",
            ),
            (
                "a.blk.0.per_dim_scale.weight",
                "audio_tower.layers.0.self_attn.per_dim_scale",
            ),
            (
                "a.blk.0.ffn_post_norm_1.weight",
                "audio_tower.layers.0.feed_forward2.post_layer_norm.weight",
            ),
        ] {
            assert_eq!(canonical(stored).as_deref(), Some(want));
        }
        for other in [
            "v.blk.0.ln1.weight",
            "a.blk.00.ln2.weight",
            "mm.input_projection.weight",
        ] {
            assert_eq!(canonical(other), None, "{other}");
        }
    }
}
