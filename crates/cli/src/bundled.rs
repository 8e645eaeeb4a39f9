//! Models inside the binary, so that the first command works without a download.
//!
//! Their bytes stay where the linker put them: nothing is copied before a
//! backend repacks a matrix, and a model that is not asked for costs no memory.

use engine::ModelFiles;
use std::borrow::Cow;

/// One bundled model.
pub(crate) struct Bundled {
    /// What users type after `-m`.
    pub(crate) name: &'static str,
    files: fn() -> ModelFiles,
}

impl Bundled {
    /// The files of the model, which the program holds.
    pub(crate) fn files(&self) -> ModelFiles {
        (self.files)()
    }
}

/// The bytes of a file under `models/`: a static, of which a program holds one copy.
macro_rules! file {
    ($folder:literal, $name:literal) => {{
        static BYTES: &[u8] = include_bytes!(concat!("../../../models/", $folder, "/", $name));
        Cow::Borrowed(BYTES)
    }};
}

/// What every checkpoint has.
macro_rules! checkpoint {
    ($folder:literal) => {
        ModelFiles {
            name: $folder.into(),
            config: Cow::Borrowed(include_str!(concat!(
                "../../../models/",
                $folder,
                "/config.json"
            ))),
            weights: vec![(
                "model.safetensors".into(),
                file!($folder, "model.safetensors"),
            )],
            ..ModelFiles::default()
        }
    };
}

/// A target: a folder under `models/`, and its assistant's folder if it has one.
macro_rules! target {
    ($folder:literal $(, assistant: $assistant:literal)?) => {
        Bundled {
            name: $folder,
            files: || ModelFiles {
                tokenizer: file!($folder, "tokenizer.json"),
                tokenizer_config: Some(file!($folder, "tokenizer_config.json")),
                chat_template: Some(file!($folder, "chat_template.jinja")),
                generation_config: Some(file!($folder, "generation_config.json")),
                $(assistant: Some(Box::new(checkpoint!($assistant))),)?
                ..checkpoint!($folder)
            },
        }
    };
}

/// Every bundled model, the default one first.
pub(crate) static BUNDLED: &[Bundled] = &[
    target!("tiny-gemma4", assistant: "tiny-gemma4-assistant"),
    target!("tiny-gemma4-moe", assistant: "tiny-gemma4-moe-assistant"),
    target!("tiny-qwen3.5"),
];

/// The model that runs where nobody names one.
pub(crate) const DEFAULT: &str = "tiny-gemma4";

/// The bundled model called `name`.
pub(crate) fn find(name: &str) -> Option<&'static Bundled> {
    BUNDLED.iter().find(|b| b.name == name)
}

/// The bundled drafter called `name`: an assistant, or a model whose MTP head drafts.
pub(crate) fn find_drafter(name: &str) -> Option<ModelFiles> {
    let assistants = BUNDLED.iter().filter_map(|b| b.files().assistant);
    let mut assistants = assistants.map(|assistant| *assistant);
    assistants
        .find(|assistant| assistant.name == name)
        .or_else(|| find(name).map(Bundled::files))
}

/// The names, for a message.
pub(crate) fn names() -> String {
    BUNDLED
        .iter()
        .map(|b| b.name)
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_the_first() {
        assert_eq!(BUNDLED[0].name, DEFAULT);
    }

    #[test]
    fn nothing_is_copied() {
        for bundled in BUNDLED {
            let files = bundled.files();
            let assistant = files.assistant.as_deref();
            for (_, bytes) in files
                .weights
                .iter()
                .chain(assistant.iter().flat_map(|a| &a.weights))
            {
                assert!(matches!(bytes, Cow::Borrowed(_)), "{}", bundled.name);
            }
        }
    }
}
