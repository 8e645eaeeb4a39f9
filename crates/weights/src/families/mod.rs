//! How checkpoint files spell a family's tensors and configuration: one file a family.
//!
//! A [`Family`] is data for the readers and writers of GGUF files (`gguf`) and for the
//! norms that files store in two forms (`norms.rs`). A new family is a file beside this
//! one and a line in [`FAMILIES`]; folders of safetensors alone need neither.

mod block;
mod eagle3;
mod gemma4;
mod projector;
mod qwen3_5;
mod sound_projector;

pub(crate) use projector::Towers;

use crate::gguf::{Edit, FileView, Keys};
use serde_json::{Value as Json, json};

/// A name in a GGUF file, its canonical name, and what the file's writer does to the
/// values.
pub(crate) type Name = (&'static str, &'static str, Edit);

/// Name in a GGUF file and values of a tensor that follows from the configuration.
pub(crate) type DerivedTensor = (&'static str, Vec<f32>);

/// One architecture of GGUF files, and what files of other kinds have of it.
///
/// Names of a block follow `blk.{i}.` in a GGUF file and `layers.{i}.` in canonical
/// names; an MTP head is the block behind the trunk's.
pub(crate) struct Family {
    /// `general.architecture`; the first is written.
    pub(crate) architectures: &'static [&'static str],
    /// `model_type` of `config.json` or of its `text_config`.
    pub(crate) model_types: &'static [&'static str],
    /// A part of `architectures[0]` in `config.json` that names the family, whatever the
    /// `model_type`.
    pub(crate) named_like: Option<&'static str>,
    /// Names that occur once.
    pub(crate) whole: &'static [Name],
    /// Names of a block.
    pub(crate) block: &'static [Name],
    /// Names of a block with experts in one matrix, where it has [`FUSED`]; they go
    /// before `block`.
    pub(crate) fused: &'static [Name],
    /// Names of the MTP block that are not those of any block.
    pub(crate) head: &'static [Name],
    /// How canonical names of experts begin, one by one and stacked.
    pub(crate) experts: Option<(&'static str, &'static str)>,
    /// Ends of the names of norms that compute with `1 + w`
    /// ([`crate::Checkpoint::norm`]).
    pub(crate) offset_norms: &'static [&'static str],
    /// The end of the name of a convolution, whose layout tells who wrote a file.
    pub(crate) convolution: Option<&'static str>,
    /// Blocks of a GGUF file that are an MTP head.
    pub(crate) head_blocks: fn(&FileView<'_>) -> u64,
    /// The language model's configuration, from a GGUF file whose trunk has so many
    /// blocks. Values that the file leaves open are null.
    pub(crate) config: fn(&FileView<'_>, usize) -> Result<Json, String>,
    /// The whole configuration around [`Family::config`]'s.
    pub(crate) wrap: fn(&FileView<'_>, Json) -> Json,
    /// Adds the keys of a GGUF file for a whole configuration; the language model's
    /// part is in [`Keys`].
    pub(crate) keys: fn(&mut Keys<'_>, &Json),
    /// The language model's part of a configuration, from the whole and what is taken
    /// for the part elsewhere.
    pub(crate) text: fn(&Json, &Json) -> Option<Json>,
    /// Blocks of the trunk, from the language model's part.
    pub(crate) layers: fn(&Json) -> Option<usize>,
    /// What a model needs and GGUF files have no field for, from the whole configuration
    /// and the language model's part.
    pub(crate) lacks: fn(&Json, &Json) -> Option<&'static str>,
    /// Canonical tensors that GGUF files say by others.
    pub(crate) drops: &'static [&'static str],
    /// Tensors in `f32` of GGUF files that follow from the language model's part.
    pub(crate) derived: fn(&Json) -> Vec<DerivedTensor>,
}

/// Every family. `config.json` is looked up in this order.
pub(crate) const FAMILIES: &[&Family] = &[
    &gemma4::TARGET,
    &gemma4::ASSISTANT,
    &qwen3_5::DENSE,
    &qwen3_5::MIXTURE,
    &eagle3::HEAD,
    &block::HEAD,
];

/// A family without peculiarities, to fill up others.
const PLAIN: Family = Family {
    architectures: &[],
    model_types: &[],
    named_like: None,
    whole: &[],
    block: &[],
    fused: &[],
    head: &[],
    experts: None,
    offset_norms: &[],
    convolution: None,
    head_blocks: |_| 0,
    config: |_, _| Ok(json!({})),
    wrap: |_, text| text,
    keys: |_, _| {},
    text: |_, text| Some(text.clone()),
    layers: |text| usize::try_from(text["num_hidden_layers"].as_u64()?).ok(),
    lacks: |_, _| None,
    drops: &[],
    derived: |_| Vec::new(),
};

/// The name in GGUF files that shows experts with gate and up in one matrix.
pub(crate) const FUSED: &str = "ffn_gate_up_exps.weight";

impl std::fmt::Debug for Family {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.architectures[0])
    }
}

impl Family {
    /// The family that GGUF files call `architecture`.
    pub(crate) fn named(architecture: &str) -> Option<&'static Family> {
        let all = FAMILIES.iter().copied();
        all.chain([&projector::FILE])
            .find(|f| f.architectures.contains(&architecture))
    }

    /// The family of a configuration whose language model's part is `text`.
    pub(crate) fn of_config(config: &Json, text: &Json) -> Option<&'static Family> {
        let families = || FAMILIES.iter().copied();
        let architecture = config["architectures"][0].as_str().unwrap_or_default();
        let like = |f: &&Family| f.named_like.is_some_and(|part| architecture.contains(part));
        let of = |config: &Json| {
            let found = config["model_type"].as_str()?;
            families().find(|f| f.model_types.contains(&found))
        };
        families()
            .find(like)
            .or_else(|| of(config))
            .or_else(|| of(text))
    }

    /// Whether it is that of files of towers alone.
    pub(crate) fn is_tower(&self) -> bool {
        self.architectures == projector::FILE.architectures
    }

    /// The architectures of GGUF files that are known, for a message.
    pub(crate) fn all() -> String {
        let names = FAMILIES.iter().map(|f| f.architectures[0]);
        names.collect::<Vec<_>>().join(", ")
    }
}

/// Whether canonical `name` is a norm that [`crate::Checkpoint::norm`] may read.
pub(crate) fn is_offset_norm(name: &str) -> bool {
    let is_end = |f: &&Family| f.offset_norms.iter().any(|end| name.ends_with(end));
    name == "norm.weight"
        || ((name.starts_with("layers.") || name.starts_with(crate::names::MTP))
            && FAMILIES.iter().any(is_end))
}

/// Whether canonical `name` is a convolution whose layout tells who wrote the trunk.
pub(crate) fn is_convolution(name: &str) -> bool {
    let is_end = |f: &&Family| f.convolution.is_some_and(|end| name.ends_with(end));
    name.starts_with("layers.") && FAMILIES.iter().any(is_end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_norms_with_an_offset_are_offset_norms() {
        for name in [
            "norm.weight",
            "mtp.norm.weight",
            "layers.0.input_layernorm.weight",
            "mtp.layers.0.self_attn.q_norm.weight",
            "mtp.pre_fc_norm_hidden.weight",
        ] {
            assert!(is_offset_norm(name), "{name}");
        }
        for name in [
            "layers.0.linear_attn.norm.weight",
            "visual.merger.norm.weight",
            "vision_tower.encoder.layers.0.input_layernorm.weight",
            "layers.0.mlp.up_proj.weight",
        ] {
            assert!(!is_offset_norm(name), "{name}");
        }
    }
}
