//! The two kinds of files, and which number formats each can hold.

use crate::gguf::stored_as;
use crate::{ConvertError, Data, Recipe, text_size, vocabulary_keys};
use quant::{Format, WeightLayout};
use std::collections::BTreeMap;
use std::path::Path;
use text::TextFiles;
use text::gguf::Vocabulary;

/// A kind of checkpoint files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Container {
    /// A folder of safetensors in MLX's layout.
    Safetensors,
    /// One GGUF file.
    Gguf,
}

impl Container {
    /// Whether matrices can be written as `format` into such files.
    ///
    /// ```
    /// use convert::Container::{Gguf, Safetensors};
    /// let format = |name| quant::format(name).expect("a format");
    /// assert!(Safetensors.holds(format("affine4-g64")) && Gguf.holds(format("affine4-g64")));
    /// assert!(!Safetensors.holds(format("q4_0")) && Gguf.holds(format("q4_0")));
    /// assert!(!Safetensors.holds(format("fp8")) && !Gguf.holds(format("fp8")));
    /// ```
    pub fn holds(self, format: &'static Format) -> bool {
        let has_place = match (self, format.layout) {
            (Container::Safetensors, WeightLayout::Plain(_) | WeightLayout::Affine { .. }) => true,
            (Container::Safetensors, _) => false,
            (Container::Gguf, _) => stored_as(format).is_some(),
        };
        has_place && format.can_encode()
    }

    /// Every format that [`Container::holds`], in the order users see them.
    pub fn formats(self) -> impl Iterator<Item = &'static Format> {
        let all = quant::FORMATS.iter().copied().flatten();
        all.filter(move |format| self.holds(format))
    }

    /// Writes `recipe` to `to`, a folder or a file that must not exist, with `files`
    /// (name, contents) beside the weights; a GGUF file holds their vocabulary. Calls
    /// `progress` with the bytes written and their total.
    ///
    /// # Errors
    ///
    /// [`ConvertError`]; a GGUF file needs a `tokenizer.json` among `files`.
    pub fn write(
        self,
        recipe: &Recipe<'_>,
        to: &Path,
        files: &[(String, Vec<u8>)],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), ConvertError> {
        match self {
            Container::Safetensors => recipe.write(to, files, progress),
            Container::Gguf => {
                let vocabulary = vocabulary_of(recipe, files)?;
                recipe.write_gguf(to, &vocabulary_keys(&vocabulary), progress)
            }
        }
    }

    /// Formats of `recipe` that such files do not have, each with the one in which its
    /// matrices are written instead.
    pub fn replaced(self, recipe: &Recipe<'_>) -> BTreeMap<&'static str, &'static str> {
        let matrices = recipe.items.iter().filter(|item| item.shape.len() > 1);
        let formats = matrices.filter_map(|item| match &item.data {
            Data::Matrix { format, .. } if self == Container::Gguf => Some(*format),
            _ => None,
        });
        let pairs = formats.filter_map(|from| Some((from.name, stored_as(from)?.name)));
        pairs.filter(|(from, to)| from != to).collect()
    }
}

/// The vocabulary of `files`, with a token for every row of the embeddings.
fn vocabulary_of(
    recipe: &Recipe<'_>,
    files: &[(String, Vec<u8>)],
) -> Result<Vocabulary<'static>, ConvertError> {
    let file = |name: &str| {
        let found = files.iter().find(|(n, _)| n == name);
        found.map(|(_, bytes)| &bytes[..])
    };
    let files = TextFiles {
        tokenizer: file("tokenizer.json").ok_or(ConvertError::NoTokenizer)?,
        tokenizer_config: file("tokenizer_config.json"),
        chat_template: file("chat_template.jinja"),
        generation_config: file("generation_config.json"),
        config: None,
    };
    Ok(Vocabulary::from_files(&files, text_size(&recipe.config))?)
}
