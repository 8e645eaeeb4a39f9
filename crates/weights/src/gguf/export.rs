//! A checkpoint as a GGUF file has it: names, metadata, and the changes to values.

use super::config::metadata;
use super::edit::{Edit, Sizes};
use super::value::Value;
use crate::Checkpoint;
use crate::families::Family;
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

impl Export {
    /// How `checkpoint` goes into a file; `None` if its family has no such files.
    pub fn of(checkpoint: &Checkpoint) -> Option<Export> {
        Self::of_config(checkpoint.config(), checkpoint.text_config())
    }

    /// [`Export::of`] for a configuration and the language model's part of it.
    pub fn of_config(config: &Json, text: &Json) -> Option<Export> {
        let family = Family::of_config(config, text)?;
        let text = (family.text)(config, text)?;
        Some(Export {
            family,
            layers: (family.layers)(&text)?,
            sizes: Sizes::of(&text),
            config: config.clone(),
            text,
        })
    }

    /// What the model needs and GGUF files have no field for, if there is anything.
    pub fn lacks(&self) -> Option<&'static str> {
        (self.family.lacks)(&self.config, &self.text)
    }

    /// Whether GGUF files leave out the tensor `canonical`, since another one says the
    /// same.
    pub fn drops(&self, canonical: &str) -> bool {
        self.family.drops.contains(&canonical)
    }

    /// The value of `general.architecture`.
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

    /// Names under which the file has the tensor `canonical` once more: every one of the `heads` layers
    /// of an MTP head has what they share.
    pub fn copies(&self, canonical: &str, heads: usize) -> Vec<String> {
        self.family.copies(canonical, self.layers, heads)
    }

    /// `general.architecture` and the keys that say the model's sizes.
    pub fn metadata(&self) -> Vec<(String, Value<'static>)> {
        let architecture = self.architecture();
        let mut keys = vec![("general.architecture".to_owned(), architecture.into())];
        keys.extend(metadata(self.family, &self.config, &self.text));
        keys
    }

    /// Tensors in `f32` that follow from the configuration.
    pub fn derived(&self) -> Vec<(&'static str, Vec<f32>)> {
        (self.family.derived)(&self.text)
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

    /// Turns canonical integers into those of the file.
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
