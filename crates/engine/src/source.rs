//! Where a model's files are: a folder, a GGUF file, or memory.

use crate::error::EngineError;
use crate::hashes::{Hashes, sha256};
use convert::Quantize;
use models::ModelError;
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use text::tokenizer::TOKENIZER_FILE_BYTES_MAX;
use text::{Text, TextFiles, Tokenizer};
use weights::{Checkpoint, LoadError};

/// Where the files of a model are.
#[derive(Clone, Debug)]
pub enum Source {
    /// A folder with `config.json`, safetensors and a tokenizer, or a GGUF file,
    /// which has all of it.
    Folder(PathBuf),
    /// Files that are in memory already, such as the bundled ones.
    Files(Box<ModelFiles>),
}

/// What may lie beside a checkpoint's configuration and weights.
const SIDE_FILES: &[&str] = &[
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
];

/// The files of a checkpoint, in memory.
#[derive(Clone, Debug, Default)]
pub struct ModelFiles {
    /// The name that users have for the model.
    pub name: String,
    /// `config.json`.
    pub config: Cow<'static, str>,
    /// Safetensors files by name.
    pub weights: Vec<(String, Cow<'static, [u8]>)>,
    /// `tokenizer.json`; empty for a drafter.
    pub tokenizer: Cow<'static, [u8]>,
    /// `tokenizer_config.json`.
    pub tokenizer_config: Option<Cow<'static, [u8]>>,
    /// `chat_template.jinja`.
    pub chat_template: Option<Cow<'static, [u8]>>,
    /// `generation_config.json`.
    pub generation_config: Option<Cow<'static, [u8]>>,
    /// The files of the assistant that belongs to the model.
    pub assistant: Option<Box<ModelFiles>>,
}

impl Source {
    /// The name that users have for the model: its folder, or ORG/NAME in a hub cache.
    pub fn name(&self) -> String {
        match self {
            Source::Folder(path) => {
                let whole = whole(path);
                hub_name(&whole).unwrap_or_else(|| {
                    whole.file_name().map_or_else(
                        || path.display().to_string(),
                        |n| n.to_string_lossy().into_owned(),
                    )
                })
            }
            Source::Files(files) => files.name.clone(),
        }
    }

    /// The place of the model, for messages: its path, or ORG/NAME in a hub cache.
    pub(crate) fn place(&self) -> String {
        match self {
            Source::Folder(path) => {
                hub_name(&whole(path)).unwrap_or_else(|| path.display().to_string())
            }
            Source::Files(files) => files.name.clone(),
        }
    }

    /// Opens its weights; nothing is read yet but headers.
    ///
    /// # Errors
    ///
    /// If a file is missing or malformed.
    pub fn checkpoint(&self) -> Result<Checkpoint, EngineError> {
        Ok(match self {
            Source::Folder(path) => Checkpoint::open(path).map_err(ModelError::from)?,
            Source::Files(files) => Checkpoint::from_bytes(&files.config, files.weights.clone())
                .map_err(ModelError::from)?,
        })
    }

    /// Loads the model's text side, with `template` for its chat template if there is one.
    pub(crate) fn text(
        &self,
        checkpoint: &Checkpoint,
        template: Option<&str>,
    ) -> Result<Text, EngineError> {
        if let Some(metadata) = checkpoint.metadata() {
            let mut vocabulary = convert::vocabulary(&metadata);
            if let Some(template) = template {
                vocabulary.chat_template = Some(Cow::Borrowed(template));
            }
            return Ok(vocabulary.load()?);
        }
        Ok(match self {
            Source::Folder(path) => TextFiles::open_with(path, template)?,
            Source::Files(files) => TextFiles {
                tokenizer: &files.tokenizer,
                tokenizer_config: files.tokenizer_config.as_deref(),
                chat_template: template
                    .map(str::as_bytes)
                    .or(files.chat_template.as_deref()),
                generation_config: files.generation_config.as_deref(),
                config: Some(files.config.as_bytes()),
            }
            .load()?,
        })
    }

    /// What a copy of the model needs beside configuration and weights: names
    /// and contents.
    ///
    /// # Errors
    ///
    /// If a file cannot be read.
    pub fn side_files(&self) -> Result<Vec<(String, Vec<u8>)>, EngineError> {
        let mut files = Vec::new();
        match self {
            Source::Folder(path) => {
                for name in SIDE_FILES {
                    let path = path.join(name);
                    if path.is_file() {
                        let bytes =
                            std::fs::read(&path).map_err(|source| LoadError::Io { path, source });
                        files.push(((*name).to_owned(), bytes.map_err(ModelError::from)?));
                    }
                }
            }
            Source::Files(of) => {
                let mut add = |name: &str, bytes: Option<&[u8]>| {
                    files.extend(bytes.map(|bytes| (name.to_owned(), bytes.to_vec())));
                };
                add(
                    "tokenizer.json",
                    Some(&*of.tokenizer).filter(|bytes| !bytes.is_empty()),
                );
                add("tokenizer_config.json", of.tokenizer_config.as_deref());
                add("chat_template.jinja", of.chat_template.as_deref());
                add("generation_config.json", of.generation_config.as_deref());
            }
        }
        Ok(files)
    }

    /// The content hash of `checkpoint`, which was opened from here.
    pub(crate) fn hash(&self, checkpoint: &Checkpoint, hashes: &mut Hashes) -> String {
        checkpoint.content_hash_with(|name, bytes| match self {
            Source::Folder(path) if path.is_file() => hashes.of(&path.with_file_name(name), bytes),
            Source::Folder(path) => hashes.of(&path.join(name), bytes),
            Source::Files(_) => sha256(bytes),
        })
    }

    /// `tokenizer.json`, if it has one that can be read.
    pub(crate) fn tokenizer_bytes(&self) -> Option<Cow<'_, [u8]>> {
        match self {
            Source::Folder(path) => {
                let path = path.join("tokenizer.json");
                let len = path.metadata().ok().filter(|meta| meta.is_file())?.len();
                let fits = len <= TOKENIZER_FILE_BYTES_MAX as u64;
                fits.then(|| std::fs::read(path).ok().map(Cow::Owned))?
            }
            Source::Files(files) => {
                (!files.tokenizer.is_empty()).then(|| Cow::Borrowed(&*files.tokenizer))
            }
        }
    }

    /// A hash of what makes its prompts: tokenizer and template.
    pub(crate) fn text_hash(&self, hashes: &mut Hashes) -> String {
        const NAMES: &[&str] = &[
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ];
        let parts: Vec<String> = match self {
            Source::Folder(path) => NAMES
                .iter()
                .map(|name| path.join(name))
                .filter_map(|file| Some(hashes.of(&file, &std::fs::read(&file).ok()?)))
                .collect(),
            Source::Files(files) => [
                Some(&files.tokenizer),
                files.tokenizer_config.as_ref(),
                files.chat_template.as_ref(),
            ]
            .into_iter()
            .flatten()
            .map(|bytes| sha256(bytes))
            .collect(),
        };
        sha256(parts.concat().as_bytes())
    }

    /// The assistant that lies beside the model: in `<model>-assistant` or
    /// `<model>/assistant`, of a file `<model>-assistant.gguf`.
    pub fn assistant_beside(&self) -> Option<Source> {
        match self {
            Source::Folder(path) if path.is_file() => {
                let mut beside = path.file_stem()?.to_owned();
                beside.push("-assistant.gguf");
                let beside = path.with_file_name(beside);
                beside.is_file().then_some(Source::Folder(beside))
            }
            Source::Folder(path) => {
                let whole = path.canonicalize().ok()?;
                let mut beside = whole.file_name()?.to_owned();
                beside.push("-assistant");
                [whole.with_file_name(beside), whole.join("assistant")]
                    .into_iter()
                    .find(|p| p.join("config.json").is_file())
                    .map(Source::Folder)
            }
            Source::Files(files) => files.assistant.clone().map(Source::Files),
        }
    }
}

/// `checkpoint` with its weights stored as `quantize` says, or as they are.
pub(crate) fn quantized(
    checkpoint: Checkpoint,
    quantize: Option<&Quantize>,
) -> Result<Checkpoint, EngineError> {
    let Some(quantize) = quantize else {
        return Ok(checkpoint);
    };
    let recipe = quantize.apply(convert::convert(&checkpoint)?);
    Ok(recipe.checkpoint(&mut |_, _| {})?)
}

/// An error if the drafter brings a tokenizer that is not the target's: equal
/// vocabulary sizes do not make equal tokens.
pub(crate) fn same_tokens(target: &Source, drafter: &Source) -> Result<(), EngineError> {
    let Some((target, drafter)) = target.tokenizer_bytes().zip(drafter.tokenizer_bytes()) else {
        return Ok(());
    };
    if target == drafter {
        return Ok(());
    }
    let (target, drafter) = (
        Tokenizer::from_bytes(&target)?,
        Tokenizer::from_bytes(&drafter)?,
    );
    let n = target.vocab_size().max(drafter.vocab_size()) as u32;
    let differing = (0..n).find(|&id| target.entry(id) != drafter.entry(id));
    let Some(id) = differing else {
        return Ok(());
    };
    let entry = |tokenizer: &Tokenizer| {
        let entry = tokenizer.entry(id);
        entry.map_or("nothing".to_owned(), |e| format!("`{}`", e.escape_debug()))
    };
    Err(EngineError::Model(ModelError::Unpaired {
        what: "tokenizer",
        drafter: format!("another one (token {id} is {})", entry(&drafter)),
        target: entry(&target),
    }))
}

/// A folder's whole path. A file of the hub cache is a link to one that is called like
/// its hash, so that of a file is left as it is.
fn whole(path: &Path) -> PathBuf {
    let whole = path.canonicalize().ok().filter(|path| path.is_dir());
    whole.unwrap_or_else(|| path.to_owned())
}

/// `ORG/NAME` of a snapshot in a hub cache, `models--ORG--NAME/snapshots/COMMIT`, or
/// of a folder called like one.
fn hub_name(path: &Path) -> Option<String> {
    let above = path.parent().filter(|p| p.ends_with("snapshots"));
    let folder = above.map_or(Some(path), Path::parent)?;
    let name = folder.file_name()?.to_str()?.strip_prefix("models--")?;
    let (org, name) = name.split_once("--")?;
    Some(format!("{org}/{name}"))
}
