//! One naming for every source (`checkpoints.md` §2.4 and §2.5).
//!
//! ```text
//! embed_tokens.weight  norm.weight  lm_head.weight  layers.{i}.…     trunk, or an assistant's own decoder
//! mtp.…                                                              MTP head
//! pre_projection.weight  post_projection.weight  masked_embedding.…  assistant
//! vision_tower.…  embed_vision.…  vision_embedder.…                  Gemma 4's pictures
//! visual.…                                                           Qwen 3.5's pictures, MLX's `vision_tower.…`
//! audio_tower.…                                                      as stored
//! ```
//!
//! Only prefixes change: a tensor's meaning, and so its layout, never depends on
//! its name alone.

/// Prefixes that say only where a writer nested the language model. The first
/// that fits is removed, so longer ones come first.
pub(crate) const PREFIXES: &[&str] = &[
    "model.language_model.", // Hugging Face, multimodal
    "language_model.model.", // MLX
    "language_model.",       // MLX: `lm_head`, `mtp.…`
    "model.",                // text only; vision and audio in Hugging Face files
];

/// How MLX files name the tensors of any vision tower.
const MLX_TOWER: &str = "vision_tower.";

/// How names in the tower of Qwen 3.5 go on, which other files put under `visual.`
const VISUAL: &[&str] = &["patch_embed.", "pos_embed.", "blocks.", "merger."];

/// How names of an MTP head's tensors begin.
pub(crate) const MTP: &str = "mtp.";

/// Names that may be stored twice with equal bytes: tied heads that a writer
/// saved under two prefixes.
pub(crate) const DUPLICATES: &[&str] = &["lm_head."];

/// Ends of the names of scales and zero points that belong to activations or to
/// cached keys and values.
const OF_ACTIVATIONS: &[&str] = &[
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".q_zero_point",
    ".k_scale",
    ".k_zero_point",
    ".v_scale",
    ".v_zero_point",
];

/// Parts of a module that change no weight: scales of activations and of cached
/// keys and values, and the shape before packing.
pub(crate) const INERT_PARTS: &[&str] = &["input", "output", "k_scale", "v_scale", "shape"];

/// What other quantized formats store in place of `MODULE.weight`
/// (`checkpoints.md` §1.1), to tell a format that cannot be read from a tensor
/// that is not there.
pub(crate) const FOREIGN: &[(&str, &str)] = &[("qweight", "GPTQ or AWQ")];

/// What belongs to a tensor called `NAME`, by the end of its name: stored alone,
/// the weight is missing.
pub(crate) const COMPANIONS: &[&str] = &[
    "_scale",
    "_scale_inv",
    "_scale_2",
    "_global_scale",
    "_zero_point",
    "_shape",
    "_g_idx",
];

/// The canonical name of `stored`. In a file of nothing but an MTP head
/// (`is_mtp_file`) the prefix `mtp.` may be missing and is added.
pub(crate) fn canonical(stored: &str, is_mtp_file: bool) -> String {
    let name = PREFIXES
        .iter()
        .find_map(|p| stored.strip_prefix(p))
        .unwrap_or(stored);
    if let Some(rest) = name.strip_prefix(MLX_TOWER)
        && VISUAL.iter().any(|module| rest.starts_with(module))
    {
        return format!("visual.{rest}");
    }
    if is_mtp_file && !name.starts_with(MTP) {
        return format!("{}{name}", MTP);
    }
    name.into()
}

/// Whether canonical `name` changes no weight.
pub(crate) fn is_of_activations(name: &str) -> bool {
    OF_ACTIVATIONS.iter().any(|end| name.ends_with(end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_naming_becomes_one() {
        for (stored, expected) in [
            (
                "model.language_model.layers.3.mlp.up_proj.weight",
                "layers.3.mlp.up_proj.weight",
            ),
            (
                "language_model.model.layers.3.mlp.up_proj.weight",
                "layers.3.mlp.up_proj.weight",
            ),
            (
                "model.layers.3.mlp.up_proj.weight",
                "layers.3.mlp.up_proj.weight",
            ),
            ("model.embed_tokens.weight", "embed_tokens.weight"),
            ("language_model.lm_head.weight", "lm_head.weight"),
            ("lm_head.weight", "lm_head.weight"),
            ("mtp.fc.weight", "mtp.fc.weight"),
            ("model.mtp.fc.weight", "mtp.fc.weight"),
            ("language_model.mtp.fc.weight", "mtp.fc.weight"),
            ("model.language_model.mtp.fc.weight", "mtp.fc.weight"),
            (
                "masked_embedding.token_ordering",
                "masked_embedding.token_ordering",
            ),
            ("pre_projection.weight", "pre_projection.weight"),
            ("model.visual.pos_embed.weight", "visual.pos_embed.weight"),
            ("vision_tower.std_bias", "vision_tower.std_bias"),
            (
                "vision_tower.blocks.0.attn.qkv.bias",
                "visual.blocks.0.attn.qkv.bias",
            ),
            (
                "vision_tower.patch_embedder.input_proj.weight",
                "vision_tower.patch_embedder.input_proj.weight",
            ),
        ] {
            assert_eq!(canonical(stored, false), expected, "{stored}");
        }
        for (stored, expected) in [
            ("fc.weight", "mtp.fc.weight"),
            ("norm.weight", "mtp.norm.weight"),
            ("mtp.norm.weight", "mtp.norm.weight"),
            (
                "language_model.mtp.layers.0.mlp.up_proj.scales",
                "mtp.layers.0.mlp.up_proj.scales",
            ),
        ] {
            assert_eq!(canonical(stored, true), expected, "{stored}");
        }
    }
}
