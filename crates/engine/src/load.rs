//! The load plan: which files, which drafter, how much memory.

use crate::finder::{Finder, Found, fits, ngram};
use crate::hashes::Hashes;
use crate::placement::{self, Budget, Placement, TooLarge};
use crate::preflight::{self, Key, Preflight, Probing, TrialResult};
use crate::request::Rejected;
use crate::shortlist::DraftVocabulary;
use crate::source::Source;
use backend::{Backend, KvFormat, KvFormats};
use cache::{Memory, MemoryPlan, MemorySize};
use models::{ModelError, Quantize, Target};
use serde::Serialize;
use speculate::{Accept, Speculator};
use std::str::FromStr;
use std::sync::Arc;
use text::Text;
use weights::{Checkpoint, WriteError};

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
                _ => return Err(format!("`{s}` is not a drafter; known are {DRAFT_CHOICES}")),
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
    /// Prompt rows a request may run in one step; [`backend::Capabilities::prompt_rows`] if absent.
    pub chunk: Option<usize>,
    /// How keys and values are stored.
    pub kv_format: KvFormat,
    /// Quantises the weights while they are loaded.
    pub quantize: Option<Quantize>,
    /// Where weights are while the model runs.
    pub weights: Placement,
    /// Bytes of the host's memory that packed weights and the KV cache may take together;
    /// no limit if absent, as on a device with memory of its own, which has limits of its own.
    pub memory_limit: Option<u64>,
    /// Whether control tokens that messages, tools and template arguments spell are control
    /// tokens ([`Text::allow_special_tokens`]); else they are text.
    pub allow_special_tokens: bool,
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
            chunk: None,
            kv_format: KvFormat::both(&quant::BF16),
            quantize: None,
            weights: Placement::default(),
            memory_limit: None,
            allow_special_tokens: false,
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
    /// Weights and KV cache take more memory than they may.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
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
    /// Tokens of the longest sequence that the model knows.
    pub context_max: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Requests at once.
    pub sequences: usize,
    /// Bytes of the checkpoint's files.
    pub weight_bytes: u64,
    /// Bytes of the drafter's files, where it has its own.
    pub drafter_weight_bytes: u64,
    /// Where weights are: `packed` in memory, or `mapped`, in their files.
    pub weights: &'static str,
    /// Why.
    pub weights_reason: String,
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
    if options.sequences == 0 || options.chunk == Some(0) || options.context == Some(0) {
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
    let mut text = source.text(&checkpoint)?;
    text.allow_special_tokens = options.allow_special_tokens;
    // Before the weights are there a second time.
    let mut hashes = Hashes::open(options.probing.cache());
    let hashed = matches!(options.probing, Probing::Run { .. });
    let target_sha256 = hashed.then(|| source.hash(&checkpoint, &mut hashes));
    let device = b.capabilities();
    let chunk = options.chunk.unwrap_or(device.prompt_rows);
    let size = |target: &dyn Target| MemorySize {
        sequences: options.sequences,
        context: options
            .context
            .unwrap_or(DEFAULT_CONTEXT)
            .min(target.max_context()),
        step_rows: chunk,
        kv_format: options.kv_format,
    };
    let (target, placed) = placement::load_target(&*b, &checkpoint, options, size)?;
    if text.tokenizer.vocab_size() > target.vocab_size() {
        return bad(format!(
            "the tokenizer has {} tokens, the model {}: they do not belong together",
            text.tokenizer.vocab_size(),
            target.vocab_size()
        ));
    }
    let most = target.max_context();
    if let Some(context) = options.context.filter(|&context| context > most) {
        return bad(format!(
            "--context {context} is more than the {most} tokens that this model knows"
        ));
    }
    let size = size(&*target);
    if size.kv_format.k.is_rotated() {
        return bad(format!(
            "--kv {}: {} keeps values only",
            size.kv_format, size.kv_format.k.name
        ));
    }
    if !device.kv.contains(size.kv_format) {
        return bad(format!(
            "--kv {}: {} keeps {}",
            size.kv_format,
            b.name(),
            kept_formats(&device.kv)
        ));
    }
    fits(&target.plan(), size.kv_format)?;
    let budget = Budget {
        // A device with memory of its own says by itself when it is full.
        limit: options.memory_limit.filter(|_| !device.own_memory),
        weights: if placed.mapped { 0 } else { checkpoint.bytes() },
    };
    budget.check(&[target.plan()], &size)?;
    let mut finder = Finder {
        b: &*b,
        source,
        checkpoint: &checkpoint,
        target: &*target,
        options,
        mapped: placed.mapped,
        shortlist: options.draft_vocab.ids(target.vocab_size(), &text),
        size,
        budget,
        hashes,
        refused: Vec::new(),
        remedy: None,
    };
    let mut found = if options.draft_max == 0 {
        Found::nobody("--draft-max is 0")
    } else {
        finder.find()?
    };
    let Finder { mut hashes, .. } = finder;
    let drafter = found.reason.clone();
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
    let name = source.name();
    let key = Key {
        model: &name,
        target: preflight.target_sha256.as_deref().unwrap_or_default(),
        drafter: preflight.drafter_sha256.as_deref(),
        drafter_kind: speculator.drafter(),
        text: &text_hash,
        backend: &backend,
        kv_format: &kv_format,
        chunk,
        draft_max: options.draft_max,
        draft_vocab: found.shortlist,
    };
    preflight.trial = preflight::run(&mut speculator, &text, &options.probing, &key)?;
    if let (Some(result), Some(name)) = (preflight.result(), speculator.drafter()) {
        if let Some(refusal) = result.refusal(name, &drafter) {
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
    // The program says the same in its own words.
    tracing::trace!(
        drafter = speculator.drafter().unwrap_or("none"),
        reason = found.reason,
        preflight = preflight.summary(),
        "loaded"
    );
    let info = ModelInfo {
        name,
        family,
        backend,
        context: size.context,
        context_max: most,
        vocab_size,
        sequences: size.sequences,
        weight_bytes: checkpoint.bytes(),
        drafter_weight_bytes: found.weight_bytes,
        weights: if placed.mapped { "mapped" } else { "packed" },
        weights_reason: placed.reason,
        step_bytes: step_bytes(&checkpoint),
        memory_bytes: Memory::all_bytes(&plans, &size),
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
        chunk,
        plans,
    })
}

/// `checkpoint` as `options` want its weights stored.
pub(crate) fn quantized(
    checkpoint: Checkpoint,
    options: &LoadOptions,
) -> Result<Checkpoint, EngineError> {
    let Some(quantize) = &options.quantize else {
        return Ok(checkpoint);
    };
    let recipe = quantize.apply(models::convert(&checkpoint)?);
    Ok(recipe.checkpoint(&mut |_, _| {})?)
}

/// What a device keeps, for people.
fn kept_formats(kept: &KvFormats) -> String {
    let list = |formats: &[&quant::Format]| {
        let names: Vec<&str> = formats.iter().map(|f| f.name).collect();
        match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
            None => "no format".to_owned(),
        }
    };
    if kept.same {
        return format!("keys and values in {}, both alike", list(&kept.keys));
    }
    format!(
        "keys in {}, values in {}",
        list(&kept.keys),
        list(&kept.values)
    )
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
