//! The load plan: which files, which drafter, how much memory.

use crate::hashes::{Hashes, sha256};
use crate::preflight::{self, Key, Preflight, Probing, TrialResult};
use crate::request::Rejected;
use crate::shortlist::DraftVocabulary;
use crate::vocabulary::vocabulary;
use backend::{Backend, KvFormat};
use cache::{Memory, MemoryPlan, MemorySize};
use models::{
    Census, ChainedHead, Eagle3, Gemma4Assistant, ModelError, Quantize, Qwen35Mtp, Target,
};
use serde::Serialize;
use speculate::draft::{Assistant, Chained, Ngram};
use speculate::{Accept, Drafter, Speculator};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use text::tokenizer::TOKENIZER_FILE_BYTES_MAX;
use text::{Text, TextFiles, Tokenizer};
use weights::{Checkpoint, LoadError, WriteError};

/// Where a model comes from.
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
    /// What users call it.
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
    /// The files of the assistant that belongs to it.
    pub assistant: Option<Box<ModelFiles>>,
}

impl Source {
    /// What users call it.
    pub fn name(&self) -> String {
        match self {
            Source::Folder(path) => {
                // A file of the hub cache is a link to one that is called like its hash.
                let whole = path.canonicalize().ok().filter(|path| path.is_dir());
                let whole = whole.unwrap_or_else(|| path.clone());
                if let Some(name) = hub_name(&whole) {
                    return name;
                }
                whole.file_name().map_or_else(
                    || path.display().to_string(),
                    |n| n.to_string_lossy().into_owned(),
                )
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

    fn text(&self, checkpoint: &Checkpoint) -> Result<Text, EngineError> {
        if let Some(metadata) = checkpoint.metadata() {
            return Ok(vocabulary(&metadata).load()?);
        }
        Ok(match self {
            Source::Folder(path) => TextFiles::open(path)?,
            Source::Files(files) => TextFiles {
                tokenizer: &files.tokenizer,
                tokenizer_config: files.tokenizer_config.as_deref(),
                chat_template: files.chat_template.as_deref(),
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
    fn hash(&self, checkpoint: &Checkpoint, hashes: &mut Hashes) -> String {
        checkpoint.content_hash_with(|name, bytes| match self {
            Source::Folder(path) if path.is_file() => hashes.of(&path.with_file_name(name), bytes),
            Source::Folder(path) => hashes.of(&path.join(name), bytes),
            Source::Files(_) => sha256(bytes),
        })
    }

    /// `tokenizer.json`, if it has one that can be read.
    fn tokenizer_bytes(&self) -> Option<Cow<'_, [u8]>> {
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
    fn text_hash(&self, hashes: &mut Hashes) -> String {
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

/// `ORG/NAME` of a snapshot in a hub cache, `models--ORG--NAME/snapshots/COMMIT`, or
/// of a folder called like one.
fn hub_name(path: &Path) -> Option<String> {
    let above = path.parent().filter(|p| p.ends_with("snapshots"));
    let folder = above.map_or(Some(path), Path::parent)?;
    let name = folder.file_name()?.to_str()?.strip_prefix("models--")?;
    let (org, name) = name.split_once("--")?;
    Some(format!("{org}/{name}"))
}

/// Who is to draft.
#[derive(Clone, Debug, Default)]
pub enum DraftChoice {
    /// The best that the checkpoint and its surroundings offer.
    #[default]
    Auto,
    /// Nobody.
    None,
    /// An MTP head; the checkpoint's own, or one known to belong to it, if no source
    /// is given.
    Mtp(Option<Source>),
    /// A Gemma 4 assistant; the one beside the model if no source is given.
    Assistant(Option<Source>),
    /// An EAGLE-3 head.
    Eagle3(Source),
    /// Repetition of the text itself.
    Ngram,
}

/// The values of `--draft`.
const DRAFT_CHOICES: &str =
    "auto, none, mtp, mtp:PATH, assistant, assistant:PATH, eagle3:PATH, ngram";

impl FromStr for DraftChoice {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Ok(match s {
            "auto" => DraftChoice::Auto,
            "none" => DraftChoice::None,
            "mtp" => DraftChoice::Mtp(None),
            "ngram" => DraftChoice::Ngram,
            "assistant" => DraftChoice::Assistant(None),
            _ => match s.split_once(':') {
                Some(("mtp", path)) if !path.is_empty() => {
                    DraftChoice::Mtp(Some(Source::Folder(path.into())))
                }
                Some(("assistant", path)) if !path.is_empty() => {
                    DraftChoice::Assistant(Some(Source::Folder(path.into())))
                }
                Some(("eagle3", path)) if !path.is_empty() => {
                    DraftChoice::Eagle3(Source::Folder(path.into()))
                }
                _ => return Err(format!("`{s}` is no drafter; known are {DRAFT_CHOICES}")),
            },
        })
    }
}

/// How to load a model.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Who drafts.
    pub draft: DraftChoice,
    /// Where else a drafter of this model may lie, the best first. Each is tried as
    /// what its configuration says it is.
    pub drafters: Vec<Source>,
    /// What a person could do if no draft head is found.
    pub advice: Option<String>,
    /// Whether the model is tried before it is ready.
    pub probing: Probing,
    /// Longest draft; how long one is, is what pays.
    pub draft_max: usize,
    /// How many tokens a draft head scores.
    pub draft_vocab: DraftVocabulary,
    /// Which drafted tokens stay.
    pub accept: Accept,
    /// Tokens of a sequence; the model's own limit, but at most
    /// [`DEFAULT_CONTEXT`], if absent.
    pub context: Option<usize>,
    /// Requests at once.
    pub sequences: usize,
    /// Prompt rows a request may run in one step.
    pub chunk: usize,
    /// How keys and values are stored.
    pub kv_format: KvFormat,
    /// Quantises the weights while they are loaded.
    pub quantize: Option<Quantize>,
}

/// Tokens of a sequence where nobody says otherwise.
pub const DEFAULT_CONTEXT: usize = 8192;
/// Draft length where nobody says otherwise.
pub const DEFAULT_DRAFT_MAX: usize = 3;
/// Longest draft that can be asked for.
pub const DRAFT_MAX: usize = backend::MAX_TENTATIVE;

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            draft: DraftChoice::Auto,
            drafters: Vec::new(),
            advice: None,
            probing: Probing::default(),
            draft_max: DEFAULT_DRAFT_MAX,
            draft_vocab: DraftVocabulary::default(),
            accept: Accept::default(),
            context: None,
            sequences: 1,
            chunk: 256,
            kv_format: KvFormat::both(&quant::BF16),
            quantize: None,
        }
    }
}

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The checkpoint or its drafter.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// Tokenizer, template or a configuration beside them.
    #[error(transparent)]
    Text(#[from] text::TextError),
    /// A drafter was asked for that is not there, or does not work.
    #[error("--draft {asked}: {reason}")]
    NoDrafter {
        /// What was asked for.
        asked: &'static str,
        /// Why it cannot be had.
        reason: String,
    },
    /// The weights cannot be stored as asked.
    #[error(transparent)]
    Quantize(#[from] WriteError),
    /// The device failed while the model was tried.
    #[error("the model cannot be tried")]
    Round(#[from] speculate::RoundError),
    /// An option is out of range.
    #[error("{0}")]
    BadOption(String),
    /// The request cannot be taken.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// The device cannot hold the model, or failed while loading it.
    #[error(transparent)]
    Device(#[from] backend::DeviceError),
}

/// What is known of a loaded model.
#[derive(Clone, Debug, Serialize)]
pub struct ModelInfo {
    /// What users call it.
    pub name: String,
    /// Family.
    pub family: &'static str,
    /// Where it runs.
    pub backend: String,
    /// Tokens of a sequence.
    pub context: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Requests at once.
    pub sequences: usize,
    /// Bytes of the checkpoint's files.
    pub weight_bytes: u64,
    /// Bytes of the drafter's files, where it has its own.
    pub drafter_weight_bytes: u64,
    /// Bytes of the weights that a step of one row reads.
    pub step_bytes: u64,
    /// Bytes of keys, values and states, at most.
    pub memory_bytes: usize,
    /// Format of keys and values.
    pub kv_format: String,
    /// Who drafts.
    pub drafter: Option<&'static str>,
    /// Why this one, or why nobody.
    pub drafter_reason: String,
    /// Longest draft.
    pub draft_max: usize,
    /// Tokens that its draft head scores, unless all.
    pub draft_vocab: Option<usize>,
    /// Which drafted tokens stay.
    pub accept: &'static str,
    /// What was checked.
    pub preflight: Preflight,
    /// Tensors of the files that nothing has read.
    pub unused_tensors: Vec<String>,
}

/// A model ready to write.
pub struct Model {
    /// Target, drafter and their memory.
    pub speculator: Speculator,
    /// Tokenizer, template, stop tokens.
    pub text: Arc<Text>,
    /// What is known of it.
    pub info: ModelInfo,
    /// Prompt rows a request may run in one step.
    pub chunk: usize,
    /// What the target and, if it has a memory, the drafter remember.
    pub plans: Vec<MemoryPlan>,
}

impl DraftChoice {
    /// How it was asked for by name, if it was.
    fn asked(&self) -> Option<&'static str> {
        match self {
            DraftChoice::Auto | DraftChoice::None => None,
            DraftChoice::Mtp(_) => Some("mtp"),
            DraftChoice::Assistant(_) => Some("assistant"),
            DraftChoice::Eagle3(_) => Some("eagle3"),
            DraftChoice::Ngram => Some("ngram"),
        }
    }
}

/// Loads a model and its drafter.
///
/// # Errors
///
/// [`EngineError`]; a drafter that is asked for by name and cannot be had is one.
pub fn load(
    b: Arc<dyn Backend>,
    source: &Source,
    options: &LoadOptions,
) -> Result<Model, EngineError> {
    let bad = |message: String| Err(EngineError::BadOption(message));
    if options.draft_max > DRAFT_MAX {
        return bad(format!(
            "--draft-max {} is more than {DRAFT_MAX}",
            options.draft_max
        ));
    }
    if options.sequences == 0 || options.chunk == 0 || options.context == Some(0) {
        return bad("--parallel, --chunk and --context must be at least 1".into());
    }
    let checkpoint = source.checkpoint()?;
    let architecture = checkpoint.architecture().map_err(ModelError::from)?;
    if let Some(head) = models::DRAFT_HEADS
        .iter()
        .find(|h| h.architectures.contains(&architecture))
    {
        return bad(format!(
            "this checkpoint is a drafter: name its target with -m, and it with --draft {}:PATH",
            head.name
        ));
    }
    let checkpoint = quantized(checkpoint, options)?;
    // After the check above: a drafter has no tokenizer to complain about.
    let text = source.text(&checkpoint)?;
    // Before the weights are there a second time.
    let mut hashes = Hashes::open(options.probing.cache());
    let hashed = matches!(options.probing, Probing::Run { .. });
    let target_sha256 = hashed.then(|| source.hash(&checkpoint, &mut hashes));
    let target = models::load_target(&*b, &checkpoint)?;
    if text.tokenizer.vocab_size() > target.vocab_size() {
        return bad(format!(
            "the tokenizer has {} tokens, the model {}: they do not belong together",
            text.tokenizer.vocab_size(),
            target.vocab_size()
        ));
    }
    let size = MemorySize {
        sequences: options.sequences,
        context: options
            .context
            .unwrap_or(DEFAULT_CONTEXT)
            .min(target.max_context()),
        step_rows: options.chunk,
        kv_format: options.kv_format,
    };
    if !b.keeps(size.kv_format) {
        return bad(format!(
            "--kv {}: {} keeps keys and values in bf16, f16 or f32 only",
            size.kv_format,
            b.name()
        ));
    }
    fits(&target.plan(), size.kv_format)?;
    let mut finder = Finder {
        b: &*b,
        source,
        checkpoint: &checkpoint,
        target: &*target,
        options,
        shortlist: options.draft_vocab.ids(target.vocab_size(), &text),
        size,
        hashes,
        refused: Vec::new(),
    };
    let mut found = if options.draft_max == 0 {
        Found::nobody("--draft-max is 0")
    } else {
        finder.find()?
    };
    let Finder { mut hashes, .. } = finder;
    if let Some(n) = found.shortlist {
        let all = target.vocab_size();
        found.reason += &format!(", scoring {n} of {all} tokens");
    }
    let mut preflight = std::mem::take(&mut found.preflight);
    if target.family() == "qwen3_5" {
        preflight.note_norms(checkpoint.norm_facts());
    }
    preflight.target_sha256 = target_sha256;
    let text_hash = if hashed {
        source.text_hash(&mut hashes)
    } else {
        String::new()
    };
    hashes.save();

    let mut unused = checkpoint.unused();
    unused.append(&mut found.unused);
    let mut plans = vec![target.plan()];
    plans.extend(found.plan.take());
    let memory = Memory::new(&*b, target.plan(), size);
    b.finish()?;
    let (family, vocab_size, backend) = (target.family(), target.vocab_size(), b.name());
    let mut speculator =
        Speculator::new(b, target, memory, found.drafter.take()).accepting(options.accept);
    let kv_format = size.kv_format.to_string();
    let key = Key {
        target: preflight.target_sha256.as_deref().unwrap_or_default(),
        drafter: preflight.drafter_sha256.as_deref(),
        drafter_kind: speculator.drafter(),
        text: &text_hash,
        backend: &backend,
        kv_format: &kv_format,
        chunk: options.chunk,
        draft_max: options.draft_max,
        draft_vocab: found.shortlist,
    };
    preflight.trial = preflight::run(&mut speculator, &text, &options.probing, &key)?;
    if let (Some(result), Some(name)) = (preflight.result(), speculator.drafter()) {
        if let Some(refusal) = result.refusal(name) {
            if let Some(asked) = options.draft.asked() {
                return Err(EngineError::NoDrafter {
                    asked,
                    reason: refusal,
                });
            }
            let replacement = (!result.is_inexact() && name != "ngram").then(ngram);
            speculator.replace_drafter(replacement);
            plans.truncate(1);
            (found.shortlist, found.weight_bytes) = (None, 0);
            found.reason = refusal;
        }
        preflight
            .warnings
            .extend(preflight.result().and_then(TrialResult::warning));
    }
    for warning in &preflight.warnings {
        tracing::warn!("{warning}");
    }
    tracing::info!(
        drafter = speculator.drafter().unwrap_or("none"),
        reason = found.reason,
        preflight = preflight.summary(),
        "loaded"
    );
    let info = ModelInfo {
        name: source.name(),
        family,
        backend,
        context: size.context,
        vocab_size,
        sequences: size.sequences,
        weight_bytes: checkpoint.bytes(),
        drafter_weight_bytes: found.weight_bytes,
        step_bytes: step_bytes(&checkpoint),
        memory_bytes: plans.iter().map(|plan| Memory::bytes(plan, &size)).sum(),
        kv_format: size.kv_format.to_string(),
        drafter: speculator.drafter(),
        drafter_reason: found.reason,
        draft_max: options.draft_max,
        draft_vocab: found.shortlist,
        accept: options.accept.name(),
        preflight,
        unused_tensors: unused,
    };
    Ok(Model {
        speculator,
        text: Arc::new(text),
        info,
        chunk: options.chunk,
        plans,
    })
}

/// `checkpoint` as `options` want its weights stored.
fn quantized(checkpoint: Checkpoint, options: &LoadOptions) -> Result<Checkpoint, EngineError> {
    let Some(quantize) = &options.quantize else {
        return Ok(checkpoint);
    };
    let recipe = quantize.apply(models::convert(&checkpoint)?);
    Ok(recipe.checkpoint(&mut |_, _| {})?)
}

/// Bytes of the weights that a step of one row reads: not the draft head, not
/// what reads images, and a table of embeddings only where it is the head too.
/// Experts count whole, though a row reads few of them.
fn step_bytes(checkpoint: &Checkpoint) -> u64 {
    let head_apart = checkpoint.has("lm_head.weight");
    let is_read = |name: &str| {
        let is_table = name.starts_with("embed_tokens_per_layer.")
            || head_apart && name.starts_with("embed_tokens.");
        !is_table
            && ["layers.", "norm.", "lm_head.", "embed_tokens."]
                .iter()
                .any(|start| name.starts_with(start))
    };
    checkpoint
        .sizes()
        .filter(|(name, _)| is_read(name))
        .map(|(_, bytes)| bytes as u64)
        .sum()
}

/// The drafter that needs no head.
fn ngram() -> Box<dyn Drafter> {
    Box::new(Ngram::new())
}

/// A drafter, or nobody, and the reason for it.
#[derive(Default)]
struct Found {
    drafter: Option<Box<dyn Drafter>>,
    reason: String,
    /// What the drafter remembers, if it has a memory.
    plan: Option<MemoryPlan>,
    /// Tokens that it scores, unless all.
    shortlist: Option<usize>,
    /// Bytes of its own checkpoint.
    weight_bytes: u64,
    /// Tensors of its own checkpoint that nothing has read.
    unused: Vec<String>,
    /// What is known of the head.
    preflight: Preflight,
}

impl Found {
    fn nobody(reason: &str) -> Found {
        Found {
            reason: reason.to_owned(),
            ..Found::default()
        }
    }

    fn ngram(reason: String) -> Found {
        Found {
            drafter: Some(ngram()),
            reason,
            ..Found::default()
        }
    }
}

/// What choosing a drafter needs.
struct Finder<'a> {
    b: &'a dyn Backend,
    source: &'a Source,
    checkpoint: &'a Checkpoint,
    target: &'a dyn Target,
    options: &'a LoadOptions,
    /// The tokens that a head scores, unless all.
    shortlist: Option<Vec<u32>>,
    size: MemorySize,
    hashes: Hashes,
    /// Why heads that are there are not used.
    refused: Vec<String>,
}

impl Finder<'_> {
    fn find(&mut self) -> Result<Found, EngineError> {
        let missing = |asked, reason: &str, finder: &Self| EngineError::NoDrafter {
            asked,
            reason: finder.explain(reason),
        };
        match &self.options.draft {
            DraftChoice::None => Ok(Found::nobody("--draft none")),
            DraftChoice::Ngram => Ok(Found::ngram("--draft ngram".into())),
            DraftChoice::Mtp(Some(source)) => self.mtp_of(source),
            DraftChoice::Mtp(None) => {
                match self.own_mtp() {
                    Ok(Some(found)) => return Ok(found),
                    Ok(None) => {}
                    Err(error) => self.refused.push(error.to_string()),
                }
                let what = format!("a {} checkpoint without an MTP head", self.target.family());
                self.elsewhere().ok_or_else(|| missing("mtp", &what, self))
            }
            DraftChoice::Assistant(Some(source)) => self.assistant(source),
            DraftChoice::Assistant(None) => match self.source.assistant_beside() {
                Some(source) => self.assistant(&source),
                None => self.elsewhere().ok_or_else(|| {
                    let what = "none lies beside the model; name one with --draft assistant:PATH";
                    missing("assistant", what, self)
                }),
            },
            DraftChoice::Eagle3(source) => self.eagle3(source),
            DraftChoice::Auto => Ok(self.best()),
        }
    }

    /// The best that there is; heads that cannot be used are part of the reason.
    fn best(&mut self) -> Found {
        match self.own_mtp() {
            Ok(Some(found)) => return found,
            Ok(None) => {}
            Err(error) => self.refused.push(error.to_string()),
        }
        if self.target.family() == "gemma4"
            && let Some(source) = self.source.assistant_beside()
        {
            match self.assistant(&source) {
                Ok(found) => return found,
                Err(error) => self.refused.push(error.to_string()),
            }
        }
        match self.elsewhere() {
            Some(found) => found,
            None => Found::ngram(self.explain("no draft head in or beside the checkpoint")),
        }
    }

    /// `what`, or why the heads that are there are not used, and what to do.
    fn explain(&self, what: &str) -> String {
        let mut parts = self.refused.clone();
        if parts.is_empty() {
            parts.push(what.to_owned());
        }
        parts.extend(self.options.advice.clone());
        parts.join("; ")
    }

    /// The first of the other places that has a drafter for this target.
    fn elsewhere(&mut self) -> Option<Found> {
        for source in &self.options.drafters {
            match self.by_kind(source) {
                Ok(found) => return Some(found),
                Err(error) => self.refused.push(format!("`{}`: {error}", source.name())),
            }
        }
        None
    }

    /// A drafter of the kind that its configuration names.
    fn by_kind(&mut self, source: &Source) -> Result<Found, EngineError> {
        let checkpoint = source.checkpoint()?;
        let architecture = checkpoint.architecture().map_err(ModelError::from)?;
        let kind = models::DRAFT_HEADS
            .iter()
            .find(|kind| kind.architectures.contains(&architecture));
        match kind.map(|kind| kind.name) {
            Some("assistant") => self.assistant(source),
            Some("eagle3") => self.eagle3(source),
            _ => self.mtp_of(source),
        }
    }

    /// The checkpoint's MTP head, if its family has such heads and it has one.
    fn own_mtp(&mut self) -> Result<Option<Found>, ModelError> {
        if self.target.family() != "qwen3_5" || !Qwen35Mtp::is_in(self.checkpoint)? {
            return Ok(None);
        }
        let reason = "the checkpoint's own MTP head".into();
        Ok(Some(self.mtp(self.checkpoint, reason)?))
    }

    /// The MTP head in a checkpoint of its own.
    fn mtp_of(&mut self, source: &Source) -> Result<Found, EngineError> {
        let checkpoint = source.checkpoint()?;
        let mut found = self.mtp(&checkpoint, format!("the MTP head `{}`", source.name()))?;
        found.preflight.note_norms(checkpoint.norm_facts());
        self.apart(source, &checkpoint, found)
    }

    /// The MTP head in `checkpoint`.
    fn mtp(&self, checkpoint: &Checkpoint, reason: String) -> Result<Found, ModelError> {
        let mut head = Qwen35Mtp::load(self.b, checkpoint, self.target)?;
        if let Some(ids) = &self.shortlist {
            head = head.with_shortlist(self.b, self.checkpoint, self.target, ids)?;
        }
        let census = Qwen35Mtp::census(checkpoint, self.target)?;
        Ok(self.chained(head, Some(census), reason))
    }

    /// A drafter that chains `head` on itself.
    fn chained(
        &self,
        head: impl ChainedHead + 'static,
        census: Option<Census>,
        reason: String,
    ) -> Found {
        let plan = head.plan();
        let shortlist = head.shortlist().map(|list| list.ids().len());
        let memory = Memory::new(self.b, plan.clone(), self.size);
        Found {
            drafter: Some(Box::new(Chained::new(head, memory))),
            reason,
            plan: Some(plan),
            shortlist,
            preflight: Preflight {
                head: census,
                ..Preflight::default()
            },
            ..Found::default()
        }
    }

    fn assistant(&mut self, source: &Source) -> Result<Found, EngineError> {
        let checkpoint = quantized(source.checkpoint()?, self.options)?;
        let mut head = Gemma4Assistant::load(self.b, &checkpoint, self.target)?;
        if let Some(ids) = &self.shortlist {
            head = head.with_shortlist(self.b, &checkpoint, ids)?;
        }
        let found = Found {
            shortlist: head.shortlist().map(|list| list.ids().len()),
            drafter: Some(Box::new(Assistant::new(head))),
            reason: format!("the assistant `{}`", source.name()),
            preflight: Preflight {
                head: Some(Gemma4Assistant::census(&checkpoint)?),
                ..Preflight::default()
            },
            ..Found::default()
        };
        self.apart(source, &checkpoint, found)
    }

    fn eagle3(&mut self, source: &Source) -> Result<Found, EngineError> {
        let checkpoint = source.checkpoint()?;
        let head = Eagle3::load(self.b, &checkpoint, self.target)?;
        let reason = format!("the EAGLE-3 head `{}`", source.name());
        fits(&head.plan(), self.size.kv_format)?;
        let found = self.chained(head, None, reason);
        self.apart(source, &checkpoint, found)
    }

    /// Completes what is known of a head in a checkpoint of its own.
    fn apart(
        &mut self,
        source: &Source,
        checkpoint: &Checkpoint,
        mut found: Found,
    ) -> Result<Found, EngineError> {
        same_tokens(self.source, source)?;
        if matches!(self.options.probing, Probing::Run { .. }) {
            found.preflight.drafter_sha256 = Some(source.hash(checkpoint, &mut self.hashes));
        }
        found.unused = checkpoint.unused();
        found.weight_bytes = checkpoint.bytes();
        Ok(found)
    }
}

/// Whether all heads of `plan` can be stored in `format`.
fn fits(plan: &MemoryPlan, format: KvFormat) -> Result<(), EngineError> {
    let mut layers = plan.groups.iter().flat_map(|g| &g.layers);
    match layers.find_map(|&(_, head_dim)| Some((format.misfit(head_dim)?, head_dim))) {
        None => Ok(()),
        Some((misfit, head_dim)) => Err(EngineError::BadOption(format!(
            "--kv {format}: {} has blocks of {} values, of which heads of {head_dim} are no multiple",
            misfit.name, misfit.block
        ))),
    }
}

/// An error if the drafter brings a tokenizer that is not the target's: equal
/// vocabulary sizes do not make equal tokens.
fn same_tokens(target: &Source, drafter: &Source) -> Result<(), EngineError> {
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
