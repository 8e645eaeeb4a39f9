//! Files of towers alone, `mmproj` (`checkpoints.md` §4.5): a vision tower, a sound tower, or both.
//!
//! Names of a block follow `v.blk.{i}.` in the file. Values are as converters leave them: numbers
//! of a patch of Gemma 4 lie channel by channel, and the two frames of a patch of Qwen 3.5 are two
//! tensors; who reads them knows. Names of a sound tower are in `sound_projector.rs`.

use super::{Family, PLAIN, sound_projector};
use crate::gguf::FileView;
use serde_json::{Value as Json, json};

/// Such files, whatever tower they hold. They are read, not written.
pub(crate) const FILE: Family = Family {
    architectures: &["clip"],
    ..PLAIN
};

/// A module in the file, its canonical name, and what comes before `weight` in the canonical name
/// of its weight.
pub(super) type Module = (&'static str, &'static str, &'static str);

/// A kind of tower, by how its rows become those of a language model.
pub(super) struct Projector {
    /// What files call it.
    name: &'static str,
    /// Modules that occur once.
    whole: &'static [Module],
    /// How canonical names of blocks begin.
    blocks: &'static str,
    /// Modules of a block.
    block: &'static [Module],
    config: fn(&FileView<'_>) -> Result<Json, String>,
}

const PROJECTORS: &[Projector] = &[GEMMA4, GEMMA4_UNIFIED, QWEN3_5];

const GEMMA4: Projector = Projector {
    name: "gemma4v",
    whole: &[
        ("v.patch_embd", "vision_tower.patch_embedder.input_proj", ""),
        ("v.std_bias", "vision_tower.std_bias", ""),
        ("v.std_scale", "vision_tower.std_scale", ""),
        (
            "mm.input_projection",
            "embed_vision.embedding_projection",
            "",
        ),
    ],
    blocks: "vision_tower.encoder.layers.",
    block: &[
        ("ln1", "input_layernorm", ""),
        ("attn_q", "self_attn.q_proj", "linear."),
        ("attn_k", "self_attn.k_proj", "linear."),
        ("attn_v", "self_attn.v_proj", "linear."),
        ("attn_q_norm", "self_attn.q_norm", ""),
        ("attn_k_norm", "self_attn.k_norm", ""),
        ("attn_out", "self_attn.o_proj", "linear."),
        ("attn_post_norm", "post_attention_layernorm", ""),
        ("ln2", "pre_feedforward_layernorm", ""),
        ("ffn_gate", "mlp.gate_proj", "linear."),
        ("ffn_up", "mlp.up_proj", "linear."),
        ("ffn_down", "mlp.down_proj", "linear."),
        ("ffn_post_norm", "post_feedforward_layernorm", ""),
    ],
    config: gemma4,
};

const GEMMA4_UNIFIED: Projector = Projector {
    name: "gemma4uv",
    whole: &[
        ("v.patch_norm.1", "vision_embedder.patch_ln1", ""),
        ("v.patch_embd", "vision_embedder.patch_dense", ""),
        ("v.patch_norm.2", "vision_embedder.patch_ln2", ""),
        ("v.patch_norm.3", "vision_embedder.pos_norm", ""),
        (
            "mm.input_projection",
            "embed_vision.embedding_projection",
            "",
        ),
    ],
    blocks: "",
    block: &[],
    config: gemma4_unified,
};

const QWEN3_5: Projector = Projector {
    name: "qwen3vl_merger",
    whole: &[
        ("v.patch_embd", "visual.patch_embed.proj", ""),
        ("v.position_embd", "visual.pos_embed", ""),
        ("v.post_ln", "visual.merger.norm", ""),
        ("mm.0", "visual.merger.linear_fc1", ""),
        ("mm.2", "visual.merger.linear_fc2", ""),
    ],
    blocks: "visual.blocks.",
    block: &[
        ("ln1", "norm1", ""),
        ("ln2", "norm2", ""),
        ("attn_qkv", "attn.qkv", ""),
        ("attn_out", "attn.proj", ""),
        ("ffn_up", "mlp.linear_fc1", ""),
        ("ffn_down", "mlp.linear_fc2", ""),
    ],
    config: qwen3_5,
};

/// Tensors whose canonical names have no `.weight`, though the file's may.
const BARE: &[(&str, &str, &str)] = &[
    (
        "gemma4v",
        "v.position_embd.weight",
        "vision_tower.patch_embedder.position_embedding_table",
    ),
    ("gemma4v", "v.std_bias", "vision_tower.std_bias"),
    ("gemma4v", "v.std_bias.weight", "vision_tower.std_bias"),
    ("gemma4v", "v.std_scale", "vision_tower.std_scale"),
    ("gemma4v", "v.std_scale.weight", "vision_tower.std_scale"),
    (
        "gemma4uv",
        "v.position_embd.weight",
        "vision_embedder.pos_embedding",
    ),
];

/// The towers of a file.
pub(crate) struct Towers {
    vision: Option<&'static Projector>,
    /// The configuration of the sound tower.
    sound: Option<Json>,
}

impl Towers {
    /// The towers of `file`.
    ///
    /// # Errors
    ///
    /// What is wrong with the metadata, or that nobody knows the kind of the vision tower.
    pub(crate) fn of(file: &FileView<'_>) -> Result<Self, String> {
        let sound = sound_projector::config(file);
        let sees = file.get("has_vision_encoder").and_then(|v| v.as_bool());
        let vision = match sees == Some(false) && sound.is_some() {
            true => None,
            false => Some(Projector::of(file)?),
        };
        Ok(Towers { vision, sound })
    }

    /// The configuration of `file`: that of its towers, and the width of the model that they are for.
    ///
    /// # Errors
    ///
    /// What is wrong with the metadata.
    pub(crate) fn config(&self, file: &FileView<'_>) -> Result<Json, String> {
        let mut config = match self.vision {
            Some(projector) => projector.config(file)?,
            None => json!({
                "model_type": "clip",
                "text_config": { "hidden_size": file.rows("mm.a.input_projection.weight") },
            }),
        };
        if let Some(mut sound) = self.sound.clone() {
            let fields = sound.as_object_mut().expect("made as an object");
            fields.retain(|_, value| !value.is_null());
            config["audio_config"] = sound;
        }
        Ok(config)
    }

    /// The canonical name of the tensor that a file calls `stored`; another one stays.
    pub(crate) fn canonical(&self, stored: &str) -> String {
        let heard = self
            .sound
            .as_ref()
            .and_then(|_| sound_projector::canonical(stored));
        let seen = || Some(self.vision?.canonical(stored));
        heard.or_else(seen).unwrap_or_else(|| stored.to_owned())
    }
}

impl Projector {
    /// The kind of tower in `file`.
    ///
    /// # Errors
    ///
    /// What is wrong with the metadata, or that nobody knows the kind.
    fn of(file: &FileView<'_>) -> Result<&'static Projector, String> {
        let keys = ["clip.vision.projector_type", "clip.projector_type"];
        let found = keys.iter().find_map(|key| file.metadata.text(key));
        let found = found.ok_or("`clip.projector_type` is missing")?;
        let known = PROJECTORS.iter().find(|p| p.name == found);
        known.ok_or_else(|| {
            let names: Vec<&str> = PROJECTORS.iter().map(|p| p.name).collect();
            format!(
                "vision towers of the types {} can be read, not `{}`",
                names.join(", "),
                crate::error::printable(&found)
            )
        })
    }

    /// The configuration of `file`: that of the tower, and the width of the model that it is for.
    fn config(&self, file: &FileView<'_>) -> Result<Json, String> {
        let mut vision = (self.config)(file)?;
        let fields = vision.as_object_mut().expect("made as an object");
        fields.retain(|_, value| !value.is_null());
        let rows = file.rows(match self.name {
            "qwen3vl_merger" => "mm.2.weight",
            _ => "mm.input_projection.weight",
        });
        Ok(json!({
            "model_type": "clip",
            "vision_config": vision,
            "text_config": { "hidden_size": rows },
        }))
    }

    /// The canonical name of the tensor that a file calls `stored`; another one stays.
    fn canonical(&self, stored: &str) -> String {
        let mut bare = BARE.iter();
        if let Some((.., name)) = bare.find(|(p, name, _)| *p == self.name && *name == stored) {
            return (*name).to_owned();
        }
        let of_block = || {
            let (block, part) = stored.strip_prefix("v.blk.")?.split_once('.')?;
            let number: usize = block.parse().ok()?;
            let part = named(self.block, part)?;
            (number.to_string() == block).then(|| format!("{}{block}.{part}", self.blocks))
        };
        of_block()
            .or_else(|| named(self.whole, stored))
            .unwrap_or_else(|| stored.to_owned())
    }
}

/// The canonical name of `stored` if it is of one of `modules`, the first that it fits.
pub(super) fn named(modules: &[Module], stored: &str) -> Option<String> {
    modules.iter().find_map(|(module, canonical, inner)| {
        let part = stored.strip_prefix(module)?.strip_prefix('.')?;
        let inner = if part == "weight" { inner } else { "" };
        Some(format!("{canonical}.{inner}{part}"))
    })
}

/// The `n`-th axis of a tensor from the end.
pub(super) fn axis(file: &FileView<'_>, tensor: &str, n: usize) -> Option<usize> {
    (file.shape)(tensor)?.iter().rev().nth(n).copied()
}

fn gemma4(file: &FileView<'_>) -> Result<Json, String> {
    let size = |key| file.size(key);
    let heads = size("vision.attention.head_count").filter(|n| *n > 0);
    let heads = heads.ok_or("`clip.vision.attention.head_count` is missing")?;
    let rows = |name| file.rows(name).unwrap_or(0) as u64;
    let head_dim = rows("v.blk.0.attn_q.weight") / heads;
    let clips = file.has("v.blk.0.attn_q.input_min") || file.has("v.blk.0.attn_q.output_min");
    Ok(json!({
        "model_type": "gemma4_vision",
        "hidden_size": size("vision.embedding_length"),
        "intermediate_size": size("vision.feed_forward_length"),
        "num_hidden_layers": size("vision.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": rows("v.blk.0.attn_k.weight").checked_div(head_dim),
        "head_dim": head_dim,
        "patch_size": size("vision.patch_size"),
        "pooling_kernel_size": size("vision.projector.scale_factor"),
        "position_embedding_size": axis(file, "v.position_embd.weight", 1),
        "rms_norm_eps": file.float("vision.attention.layer_norm_epsilon"),
        "use_clipped_linears": clips,
        "standardize": file.has("v.std_bias") || file.has("v.std_bias.weight"),
    }))
}

/// Patches of a side that towers of other sizes pool, of which this one reads the pixels.
const POOLED: usize = 3;

fn gemma4_unified(file: &FileView<'_>) -> Result<Json, String> {
    let shape = (file.shape)("v.patch_embd.weight").unwrap_or_default();
    let numbers = shape
        .iter()
        .skip(1)
        .fold(1, |n: usize, axis| n.saturating_mul(*axis));
    let side = (numbers / 3).isqrt();
    if side == 0 || 3 * side * side != numbers {
        return Err(format!(
            "`v.patch_embd.weight` is of {numbers} numbers, which are no square of pixels"
        ));
    }
    let pooled = if side.is_multiple_of(POOLED) {
        POOLED
    } else {
        1
    };
    Ok(json!({
        "model_type": "gemma4_unified_vision",
        "patch_size": side / pooled,
        "pooling_kernel_size": pooled,
        "mm_embed_dim": shape.first(),
        "mm_posemb_size": axis(file, "v.position_embd.weight", 1),
    }))
}

fn qwen3_5(file: &FileView<'_>) -> Result<Json, String> {
    let size = |key| file.size(key);
    let numbers = |key| {
        let values = file.get(key)?;
        let values = values.as_array()?.iter().map(|v| v.as_f64());
        values.collect::<Option<Vec<f64>>>()
    };
    let deep = file.get("vision.is_deepstack_layers");
    let deep = deep.as_ref().and_then(|v| v.as_array()).unwrap_or(&[]);
    let deep = (0..).zip(deep).filter(|(_, v)| v.as_bool() == Some(true));
    let deep: Vec<u64> = deep.map(|(layer, _)| layer).collect();
    let positions = axis(file, "v.position_embd.weight", 1);
    Ok(json!({
        "model_type": "qwen3_5_vision",
        "depth": size("vision.block_count"),
        "hidden_size": size("vision.embedding_length"),
        "intermediate_size": size("vision.feed_forward_length"),
        "num_heads": size("vision.attention.head_count"),
        "patch_size": size("vision.patch_size"),
        "spatial_merge_size": size("vision.spatial_merge_size"),
        "out_hidden_size": file.rows("mm.2.weight"),
        "num_position_embeddings": positions,
        "image_mean": numbers("vision.image_mean"),
        "image_std": numbers("vision.image_std"),
        "deepstack_visual_indexes": deep,
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_every_tower_are_those_of_its_model() {
        let named = |name: &str| PROJECTORS.iter().find(|p| p.name == name).unwrap();
        for (projector, stored, canonical) in [
            (
                "gemma4v",
                "v.patch_embd.weight",
                "vision_tower.patch_embedder.input_proj.weight",
            ),
            (
                "gemma4v",
                "v.blk.3.attn_q.weight",
                "vision_tower.encoder.layers.3.self_attn.q_proj.linear.weight",
            ),
            (
                "gemma4v",
                "v.blk.3.attn_q.input_min",
                "vision_tower.encoder.layers.3.self_attn.q_proj.input_min",
            ),
            (
                "gemma4v",
                "v.blk.0.ln1.weight",
                "vision_tower.encoder.layers.0.input_layernorm.weight",
            ),
            (
                "gemma4v",
                "v.position_embd.weight",
                "vision_tower.patch_embedder.position_embedding_table",
            ),
            ("gemma4v", "v.std_bias", "vision_tower.std_bias"),
            ("gemma4v", "a.blk.0.ln1.weight", "a.blk.0.ln1.weight"),
            ("gemma4v", "v.blk.07.ln1.weight", "v.blk.07.ln1.weight"),
            (
                "gemma4uv",
                "v.patch_norm.1.bias",
                "vision_embedder.patch_ln1.bias",
            ),
            (
                "gemma4uv",
                "v.patch_embd.bias",
                "vision_embedder.patch_dense.bias",
            ),
            (
                "gemma4uv",
                "v.position_embd.weight",
                "vision_embedder.pos_embedding",
            ),
            (
                "qwen3vl_merger",
                "v.patch_embd.weight.1",
                "visual.patch_embed.proj.weight.1",
            ),
            (
                "qwen3vl_merger",
                "v.blk.1.attn_qkv.bias",
                "visual.blocks.1.attn.qkv.bias",
            ),
            (
                "qwen3vl_merger",
                "mm.2.weight",
                "visual.merger.linear_fc2.weight",
            ),
        ] {
            assert_eq!(named(projector).canonical(stored), canonical, "{projector}");
        }
    }
}
