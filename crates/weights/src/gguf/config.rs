//! A configuration as `config.json` has it, from a GGUF file's metadata
//! (`checkpoints.md` §4), and the other way round: what all families have in common.
//!
//! Only what a model reads is made. What metadata leave open follows from the
//! tensors: whether a head is tied, whether keys are values, how much of a head
//! turns.

use super::value::{Kind, Metadata, Value};
use crate::families::Family;
use serde_json::Value as Json;

/// What a file is, as far as names and configuration need it.
pub(crate) struct FileView<'a> {
    pub(crate) metadata: Metadata<'a>,
    pub(crate) family: &'static Family,
    /// `general.architecture`, with which its keys begin.
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

impl FileView<'_> {
    /// A value, if it is no longer than a number for every block.
    pub(crate) fn get(&self, key: &str) -> Option<Value<'_>> {
        let key = format!("{}.{key}", self.architecture);
        let fits = self
            .metadata
            .count(&key)
            .is_none_or(|n| n as u64 <= MAX_BLOCKS);
        fits.then(|| self.metadata.get(&key))?
    }

    pub(crate) fn size(&self, key: &str) -> Option<u64> {
        self.get(key)?.as_u64()
    }

    /// A number a layer, of a key that may be one for all.
    pub(crate) fn sizes(&self, key: &str, layers: usize) -> Option<Vec<u64>> {
        match self.get(key)? {
            Value::Array(_, items) => items.iter().map(Value::as_u64).collect(),
            one => Some(vec![one.as_u64()?; layers]),
        }
    }

    pub(crate) fn float(&self, key: &str) -> Option<f64> {
        self.get(key)?.as_f64()
    }

    pub(crate) fn has(&self, tensor: &str) -> bool {
        (self.shape)(tensor).is_some()
    }

    /// Rows of a matrix.
    pub(crate) fn rows(&self, tensor: &str) -> Option<usize> {
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
        let head = (self.family.head_blocks)(self);
        blocks
            .checked_sub(head)
            .map(|n| n as usize)
            .ok_or_else(|| format!("{head} of {blocks} blocks are to be an MTP head"))
    }

    /// The configuration.
    ///
    /// # Errors
    ///
    /// As [`FileView::layers`].
    pub(crate) fn config(&self) -> Result<Json, String> {
        let layers = self.layers()?;
        let mut config = (self.family.config)(self, layers)?;
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
        Ok((self.family.wrap)(self, config))
    }

    /// The type that embeddings had: `f32` files come from `f32` models, others
    /// from the `bf16` that is published.
    pub(crate) fn dtype(&self) -> &'static str {
        if (self.is_f32)("token_embd.weight") {
            "float32"
        } else {
            "bfloat16"
        }
    }
}

/// The metadata that a file of `family` has for a `config.json`, the language model's
/// part `text` apart.
pub(crate) fn metadata(
    family: &Family,
    config: &Json,
    text: &Json,
) -> Vec<(String, Value<'static>)> {
    let mut out = Keys {
        architecture: family.architectures[0],
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
    (family.keys)(&mut out, config);
    out.keys
}

/// Metadata as they are made.
pub(crate) struct Keys<'a> {
    architecture: &'a str,
    /// The language model's part of the configuration.
    pub(crate) text: &'a Json,
    keys: Vec<(String, Value<'static>)>,
}

impl Keys<'_> {
    /// A number of the configuration that is not 0.
    pub(crate) fn number(&self, key: &str) -> Option<u64> {
        self.text[key].as_u64().filter(|n| *n > 0)
    }

    pub(crate) fn push(&mut self, key: &str, value: Value<'static>) {
        self.keys
            .push((format!("{}.{key}", self.architecture), value));
    }

    pub(crate) fn size(&mut self, key: &str, value: Option<u64>) {
        if let Some(value) = value {
            self.push(key, Value::U32(value.try_into().unwrap_or(u32::MAX)));
        }
    }

    pub(crate) fn float(&mut self, key: &str, value: Option<f64>) {
        if let Some(value) = value {
            self.push(key, Value::F32(value as f32));
        }
    }

    pub(crate) fn list(&mut self, key: &str, values: impl Iterator<Item = u64>) {
        let values = values.map(|v| Value::I32(v.try_into().unwrap_or(i32::MAX)));
        self.push(key, Value::Array(Kind::I32, values.collect()));
    }
}
