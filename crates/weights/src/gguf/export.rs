//! A checkpoint as a GGUF file has it: names, metadata, and the changes to values.

use super::config::{aux_layers, divisors, metadata};
use super::edit::{Edit, Sizes};
use super::names::Family;
use super::value::Value;
use crate::Checkpoint;
use serde_json::Value as Json;

/// How one model goes into a GGUF file.
///
/// [`Export::name`] says for each canonical tensor what it is called and what
/// happens to its values; [`Export::derived`] are tensors that only these files
/// have. Vocabulary and file type are the caller's to add to
/// [`Export::metadata`].
///
/// ```
/// # use weights::{Checkpoint, gguf::Export};
/// # let header = br#"{"model.norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
/// # let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// # file.extend(header);
/// # file.extend([1.0f32, 0.5].map(f32::to_le_bytes).concat());
/// # let config = r#"{"model_type": "gemma4_text", "num_hidden_layers": 1}"#;
/// # let checkpoint = Checkpoint::from_bytes(config, vec![("model.safetensors".into(), file.into())])?;
/// let export = Export::of(&checkpoint).expect("a family with GGUF files");
/// let (name, rewrite) = export.name("norm.weight").expect("a tensor of the family");
/// assert_eq!((name.as_str(), rewrite.is_nothing()), ("output_norm.weight", true));
/// # Ok::<(), weights::LoadError>(())
/// ```
#[derive(Debug)]
pub struct Export {
    family: &'static Family,
    layers: usize,
    sizes: Sizes,
    config: Json,
    text: Json,
}

/// `model_type` of a language model or a drafter, and the architecture.
const TYPES: &[(&str, &str)] = &[
    ("gemma4_text", "gemma4"),
    ("gemma4", "gemma4"),
    ("gemma4_assistant", "gemma4-assistant"),
    ("qwen3_5_text", "qwen35"),
    ("qwen3_5", "qwen35"),
    ("qwen3_5_moe_text", "qwen35moe"),
    ("qwen3_5_moe", "qwen35moe"),
];

impl Export {
    /// How `checkpoint` goes into a file; `None` if its family has no such files.
    pub fn of(checkpoint: &Checkpoint) -> Option<Export> {
        Self::of_config(checkpoint.config(), checkpoint.text_config())
    }

    /// [`Export::of`] for a configuration and the language model's part of it.
    pub fn of_config(config: &Json, text: &Json) -> Option<Export> {
        // Their `model_type` is that of their layers.
        let name = config["architectures"][0].as_str();
        if name.is_some_and(|name| name.contains("Eagle3")) {
            return Self::of_eagle3(config);
        }
        let of = |config: &Json| {
            let found = config["model_type"].as_str();
            TYPES.iter().find(|(name, _)| Some(*name) == found)
        };
        let (_, architecture) = of(config).or_else(|| of(text))?;
        Some(Export {
            family: Family::named(architecture)?,
            layers: usize::try_from(text["num_hidden_layers"].as_u64()?).ok()?,
            sizes: Sizes::of(text),
            config: config.clone(),
            text: text.clone(),
        })
    }

    /// How an EAGLE-3 head goes into a file.
    fn of_eagle3(config: &Json) -> Option<Export> {
        let part = config.get("transformer_layer_config");
        let mut text = part.filter(|p| p.is_object()).unwrap_or(config).clone();
        let heads = text["num_attention_heads"].as_u64()?;
        if text["num_key_value_heads"].is_null() {
            text["num_key_value_heads"] = heads.into();
        }
        if text["head_dim"].is_null() {
            text["head_dim"] = text["hidden_size"].as_u64()?.checked_div(heads)?.into();
        }
        Some(Export {
            family: Family::named("eagle3")?,
            layers: 1,
            sizes: Sizes::of(&text),
            config: config.clone(),
            text,
        })
    }

    /// What the model needs and such files have no field for, if there is anything.
    pub fn lacks(&self) -> Option<&'static str> {
        let (config, text) = (&self.config, &self.text);
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
        let is_eagle3 = self.architecture() == "eagle3";
        let first = cases.into_iter().find(|(_, lacks)| is_eagle3 && *lacks);
        first.map(|(what, _)| what)
    }

    /// Whether such files say the tensor `canonical` by another one.
    pub fn drops(&self, canonical: &str) -> bool {
        self.architecture() == "eagle3" && canonical == "t2d"
    }

    /// `general.architecture`.
    pub fn architecture(&self) -> &'static str {
        self.family.architectures[0]
    }

    /// Name in the file and treatment of the tensor `canonical`; `None` if such
    /// files have no place for it.
    pub fn name(&self, canonical: &str) -> Option<(String, Rewrite)> {
        let (name, edit, expert) = self.family.stored(canonical, self.layers)?;
        let rewrite = Rewrite {
            edit,
            sizes: self.sizes,
            expert,
        };
        Some((name, rewrite))
    }

    /// `general.architecture` and the keys that say the model's sizes.
    pub fn metadata(&self) -> Vec<(String, Value<'static>)> {
        let architecture = self.architecture();
        let mut keys = vec![("general.architecture".to_owned(), architecture.into())];
        keys.extend(metadata(architecture, &self.config, &self.text));
        keys
    }

    /// Tensors in `f32` that follow from the configuration.
    pub fn derived(&self) -> Vec<(&'static str, Vec<f32>)> {
        match self.architecture() {
            "gemma4" | "gemma4-assistant" => vec![("rope_freqs.weight", divisors(&self.text))],
            _ => Vec::new(),
        }
    }
}

/// What happens to a tensor's values on the way into a file.
#[derive(Clone, Copy, Debug)]
pub struct Rewrite {
    edit: Edit,
    sizes: Sizes,
    expert: Option<usize>,
}

impl Rewrite {
    /// Whether values stay what and where they are. For a norm
    /// ([`Rewrite::is_norm`]) that holds of its scale, `1 + w`.
    pub fn is_nothing(&self) -> bool {
        !self.edit.changes(&self.sizes)
    }

    /// Which of the tensor's stack it is, where experts lie one by one: the file
    /// has all of a layer as `[experts, rows, cols]` under one name.
    pub fn expert(&self) -> Option<usize> {
        self.expert
    }

    /// Whether the tensor is an offset norm, to be written as
    /// [`Checkpoint::norm`] gives it.
    pub fn is_norm(&self) -> bool {
        self.edit == Edit::Folded
    }

    /// Turns integers into those of the file.
    pub fn apply_integers(&self, values: &mut [i64]) {
        if self.edit == Edit::Absolute {
            (0..)
                .zip(values)
                .for_each(|(i, v)| *v = v.saturating_add(i));
        }
    }

    /// Turns `values: [rows, cols]` into those of the file. A vector is a column.
    ///
    /// # Errors
    ///
    /// If the shape is not that of the configuration's heads.
    ///
    /// # Panics
    ///
    /// If there are not `rows * cols` values.
    pub fn apply(&self, values: &mut [f32], rows: usize, cols: usize) -> Result<(), String> {
        assert_eq!(values.len(), rows * cols, "a value an element");
        if self.is_nothing() {
            return Ok(());
        }
        self.edit.apply(&self.sizes, values, rows, cols)
    }
}
