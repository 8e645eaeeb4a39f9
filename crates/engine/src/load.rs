//! The load plan: which files, which drafter, how much memory.

use crate::request::Rejected;
use crate::vocabulary::vocabulary;
use backend::{Backend, KvFormat};
use cache::{Memory, MemoryPlan, MemorySize};
use models::{ChainedHead, Eagle3, Gemma4Assistant, ModelError, Qwen35Mtp, Target};
use serde::Serialize;
use speculate::draft::{Assistant, Chained, Ngram};
use speculate::{Accept, Drafter, Speculator};
use std::borrow::Cow;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use text::{Text, TextFiles};
use weights::Checkpoint;

/// Where a model comes from.
#[derive(Clone, Debug)]
pub enum Source {
    /// A folder with `config.json`, safetensors and a tokenizer, or a GGUF file,
    /// which has all of it.
    Folder(PathBuf),
    /// Files that are in memory already, such as the bundled ones.
    Files(Box<ModelFiles>),
}

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
                let whole = path.canonicalize().unwrap_or_else(|_| path.clone());
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

    /// The assistant that lies beside the model: in `<model>-assistant` or
    /// `<model>/assistant`, of a file `<model>-assistant.gguf`.
    fn assistant_beside(&self) -> Option<Source> {
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

/// Who is to draft.
#[derive(Clone, Debug, Default)]
pub enum DraftChoice {
    /// The best that the checkpoint and its surroundings offer.
    #[default]
    Auto,
    /// Nobody.
    None,
    /// The checkpoint's own MTP head.
    Mtp,
    /// A Gemma 4 assistant; the one beside the model if no source is given.
    Assistant(Option<Source>),
    /// An EAGLE-3 head.
    Eagle3(Source),
    /// Repetition of the text itself.
    Ngram,
}

/// The values of `--draft`.
const DRAFT_CHOICES: &str = "auto, none, mtp, assistant, assistant:PATH, eagle3:PATH, ngram";

impl FromStr for DraftChoice {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        Ok(match s {
            "auto" => DraftChoice::Auto,
            "none" => DraftChoice::None,
            "mtp" => DraftChoice::Mtp,
            "ngram" => DraftChoice::Ngram,
            "assistant" => DraftChoice::Assistant(None),
            _ => match s.split_once(':') {
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
    /// Longest draft; how long one is, is what pays.
    pub draft_max: usize,
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
            draft_max: DEFAULT_DRAFT_MAX,
            accept: Accept::default(),
            context: None,
            sequences: 1,
            chunk: 256,
            kv_format: KvFormat::both(&quant::BF16),
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
    /// A drafter was asked for that is not there.
    #[error("--draft {asked}: {reason}")]
    NoDrafter {
        /// What was asked for.
        asked: &'static str,
        /// Why it cannot be had.
        reason: String,
    },
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
    /// Which drafted tokens stay.
    pub accept: &'static str,
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
    // After the check above: a drafter has no tokenizer to complain about.
    let text = source.text(&checkpoint)?;
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
    let mut plans = vec![target.plan()];
    fits(&plans[0], size.kv_format)?;
    let mut unused = checkpoint.unused();
    let (drafter, reason) = if options.draft_max == 0 {
        (None, "--draft-max is 0".to_owned())
    } else {
        let mut plan = DrafterPlan {
            b: &*b,
            source,
            checkpoint: &checkpoint,
            target: &*target,
            size,
            plans: &mut plans,
            unused: &mut unused,
        };
        plan.find(&options.draft)?
    };
    let memory = Memory::new(&*b, target.plan(), size);
    b.finish()?;
    let info = ModelInfo {
        name: source.name(),
        family: target.family(),
        backend: b.name(),
        context: size.context,
        vocab_size: target.vocab_size(),
        sequences: size.sequences,
        weight_bytes: checkpoint.bytes(),
        memory_bytes: plans.iter().map(|plan| Memory::bytes(plan, &size)).sum(),
        kv_format: size.kv_format.to_string(),
        drafter: drafter.as_ref().map(|d| d.name()),
        drafter_reason: reason,
        draft_max: options.draft_max,
        accept: options.accept.name(),
        unused_tensors: unused,
    };
    let speculator = Speculator::new(b, target, memory, drafter).accepting(options.accept);
    Ok(Model {
        speculator,
        text: Arc::new(text),
        info,
        chunk: options.chunk,
        plans,
    })
}

/// A drafter, or nobody, and the reason for it.
type Found = (Option<Box<dyn Drafter>>, String);

/// What choosing a drafter needs.
struct DrafterPlan<'a> {
    b: &'a dyn Backend,
    source: &'a Source,
    checkpoint: &'a Checkpoint,
    target: &'a dyn Target,
    size: MemorySize,
    plans: &'a mut Vec<MemoryPlan>,
    unused: &'a mut Vec<String>,
}

impl DrafterPlan<'_> {
    fn find(&mut self, choice: &DraftChoice) -> Result<Found, EngineError> {
        match choice {
            DraftChoice::None => Ok((None, "--draft none".into())),
            DraftChoice::Ngram => Ok((Some(Box::new(Ngram::new())), "--draft ngram".into())),
            DraftChoice::Mtp => self.mtp()?.ok_or_else(|| EngineError::NoDrafter {
                asked: "mtp",
                reason: format!("a {} checkpoint without an MTP head", self.target.family()),
            }),
            DraftChoice::Assistant(Some(source)) => self.assistant(source),
            DraftChoice::Assistant(None) => match self.source.assistant_beside() {
                Some(source) => self.assistant(&source),
                None => Err(EngineError::NoDrafter {
                    asked: "assistant",
                    reason: "none lies beside the model; name one with --draft assistant:PATH"
                        .into(),
                }),
            },
            DraftChoice::Eagle3(source) => self.eagle3(source),
            DraftChoice::Auto => {
                if let Some(found) = self.mtp()? {
                    return Ok(found);
                }
                if self.target.family() == "gemma4"
                    && let Some(source) = self.source.assistant_beside()
                {
                    return self.assistant(&source);
                }
                Ok((
                    Some(Box::new(Ngram::new())),
                    "no draft head in or beside the checkpoint".into(),
                ))
            }
        }
    }

    /// The checkpoint's MTP head, if its family has such heads and it has one.
    fn mtp(&mut self) -> Result<Option<Found>, EngineError> {
        if self.target.family() != "qwen3_5" || !Qwen35Mtp::is_in(self.checkpoint)? {
            return Ok(None);
        }
        let head = Qwen35Mtp::load(self.b, self.checkpoint, self.target)?;
        let memory = self.remember(head.plan())?;
        *self.unused = self.checkpoint.unused();
        Ok(Some((
            Some(Box::new(Chained::new(head, memory))),
            "the checkpoint's own MTP head".into(),
        )))
    }

    fn assistant(&mut self, source: &Source) -> Result<Found, EngineError> {
        let checkpoint = source.checkpoint()?;
        let head = Gemma4Assistant::load(self.b, &checkpoint, self.target)?;
        self.unused.extend(checkpoint.unused());
        Ok((
            Some(Box::new(Assistant::new(head))),
            format!("the assistant `{}`", source.name()),
        ))
    }

    fn eagle3(&mut self, source: &Source) -> Result<Found, EngineError> {
        let checkpoint = source.checkpoint()?;
        let head = Eagle3::load(self.b, &checkpoint, self.target)?;
        let memory = self.remember(head.plan())?;
        self.unused.extend(checkpoint.unused());
        Ok((
            Some(Box::new(Chained::new(head, memory))),
            format!("the EAGLE-3 head `{}`", source.name()),
        ))
    }

    fn remember(&mut self, plan: MemoryPlan) -> Result<Memory, EngineError> {
        fits(&plan, self.size.kv_format)?;
        self.plans.push(plan.clone());
        Ok(Memory::new(self.b, plan, self.size))
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
