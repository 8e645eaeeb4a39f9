//! What a caller may ask of [`crate::load`].

use crate::error::EngineError;
use crate::memory_plan::KvMemory;
use crate::multimodal::TowerFile;
use crate::preflight::Probing;
use crate::reason::{Placement, Words};
use crate::shortlist::DraftVocabulary;
use crate::source::Source;
use cache::KvPlan;
use convert::Quantize;
use speculate::Accept;
use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

/// Tokens of a sequence where nobody says otherwise, and memory does not either.
pub const DEFAULT_CONTEXT: usize = 8192;
/// Draft length where nobody says otherwise.
pub const DEFAULT_DRAFT_MAX: usize = 16;
/// Longest draft that can be asked for.
pub const DRAFT_MAX: usize = backend::MAX_TENTATIVE;

/// Which drafter is to guess ahead of the target.
#[derive(Clone, Debug, Default)]
pub enum DraftChoice {
    /// The best head that the checkpoint and its surroundings offer, and n-grams beside it.
    #[default]
    Auto,
    /// None: plain decoding.
    None,
    /// The drafter of this name, one of [`crate::drafter_kinds`]. Its head is at the source; where
    /// none is given, it is looked for in the checkpoint, beside it and in
    /// [`LoadOptions::drafters`].
    Named(&'static str, Option<Source>),
    /// The drafter with a head as [`DraftChoice::Named`] has it, and n-grams beside it.
    WithNgrams(&'static str, Option<Source>),
    /// Several drafters with heads of different kinds, of which the one that promises most guesses for each text
    /// and round.
    Several {
        /// The drafters, each as [`DraftChoice::Named`] has it.
        heads: Vec<(&'static str, Option<Source>)>,
        /// Whether n-grams guess beside them.
        ngrams: bool,
    },
}

/// Whoever is told how far a model is that is being loaded: the stage, and the share of all work that
/// is done, roughly.
#[derive(Clone, Default)]
pub struct LoadProgress(pub Option<Arc<dyn Fn(&'static str, f64) + Send + Sync>>);

impl LoadProgress {
    /// Tells of a stage and a share.
    pub(crate) fn report(&self, stage: &'static str, fraction: f64) {
        if let Some(tell) = &self.0 {
            tell(stage, fraction);
        }
    }
}

impl fmt::Debug for LoadProgress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() {
            "followed"
        } else {
            "not followed"
        })
    }
}

/// How to load a model.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Which drafter is to guess ahead.
    pub draft: DraftChoice,
    /// Where else a drafter of this model may lie, the best first. Each is tried as
    /// what its configuration says it is.
    pub drafters: Vec<Source>,
    /// What a person could do if no draft head is found; part of the reason then.
    pub advice: Option<String>,
    /// How reasons are spelled in [`crate::ModelInfo`].
    pub words: Words,
    /// Whether the model is tried before it is ready.
    pub probing: Probing,
    /// What tells this machine from others: under it the times of rounds are remembered.
    pub machine: String,
    /// Whether it is found out on what the bits of keys, values and states depend, which
    /// [`EngineOptions::disk`](crate::EngineOptions::disk) asks for: all files are hashed then.
    pub identify: bool,
    /// Longest draft, in tokens, at most [`DRAFT_MAX`]; drafts are shorter where that is faster,
    /// and 0 turns speculation off.
    pub draft_max: usize,
    /// Vocabulary entries that a draft head scores.
    pub draft_vocab: DraftVocabulary,
    /// The newest rows of the target that a Gemma 4 assistant reads; all that it was trained to
    /// read if absent.
    pub draft_window: Option<NonZeroUsize>,
    /// Which drafted tokens are accepted.
    pub accept: Accept,
    /// Tokens of a sequence, prompt and output together. If absent, as many as
    /// [`kv_memory`](LoadOptions::kv_memory) has room for, up to the model's own limit; with
    /// [`KvMemory::Whole`] that limit, but at most [`DEFAULT_CONTEXT`].
    pub context: Option<usize>,
    /// Requests that run at once.
    pub sequences: usize,
    /// Prompt rows that a request may run in one step; as many as [`backend::Capabilities::prompt_rows`] says if absent.
    pub chunk: Option<usize>,
    /// Formats of keys and of values in the KV cache.
    pub kv_format: KvPlan,
    /// Quantizes the weights while they are loaded, if present.
    pub quantize: Option<Quantize>,
    /// Where weights are while the model runs.
    pub weights: Placement,
    /// Bytes of the host's memory that packed weights and the KV cache may take together;
    /// no limit if absent. A device with memory of its own has limits of its own and ignores it.
    pub memory_limit: Option<u64>,
    /// How much keys, values and states of running requests take together. Where it is less than all of them could
    /// need, they share it, and are preempted where it runs out.
    pub kv_memory: KvMemory,
    /// Bytes of the prefix cache beyond what running requests leave free of theirs: of keys, values
    /// and states of the target, and of a draft model. A draft head's cache gets as many pages beside it.
    pub prefix_cache_memory: u64,
    /// Whether a model that has a vision tower takes pictures and clips; its tower is not loaded otherwise.
    pub pictures: bool,
    /// Which file the tower comes from, where it is not in the model's own.
    pub tower: TowerFile,
    /// Whether control tokens that messages, tools and template arguments spell are control
    /// tokens ([`text::Text::allow_special_tokens`]); otherwise they are text.
    pub allow_special_tokens: bool,
    /// A chat template in place of the checkpoint's own: a Jinja program.
    pub chat_template: Option<String>,
    /// Who is told how far loading is.
    pub progress: LoadProgress,
}

impl Default for LoadOptions {
    fn default() -> Self {
        LoadOptions {
            draft: DraftChoice::Auto,
            drafters: Vec::new(),
            advice: None,
            words: Words::default(),
            probing: Probing::default(),
            machine: String::new(),
            identify: false,
            draft_max: DEFAULT_DRAFT_MAX,
            draft_vocab: DraftVocabulary::default(),
            draft_window: None,
            accept: Accept::default(),
            context: None,
            sequences: 1,
            chunk: None,
            kv_format: KvPlan::both(&quant::kv::BF16),
            quantize: None,
            weights: Placement::default(),
            memory_limit: None,
            kv_memory: KvMemory::default(),
            prefix_cache_memory: 0,
            pictures: true,
            tower: TowerFile::default(),
            allow_special_tokens: false,
            chat_template: None,
            progress: LoadProgress::default(),
        }
    }
}

impl LoadOptions {
    /// Whether the contents of files are hashed.
    pub(crate) fn hashes(&self) -> bool {
        self.identify || matches!(self.probing, Probing::Run { .. })
    }

    /// Checks what can be checked without a model.
    pub(crate) fn check(&self) -> Result<(), EngineError> {
        if self.draft_max > DRAFT_MAX {
            return Err(EngineError::DraftTooLong {
                asked: self.draft_max,
                most: DRAFT_MAX,
            });
        }
        if self.sequences == 0 || self.chunk == Some(0) || self.context == Some(0) {
            return Err(EngineError::NoSize);
        }
        Ok(())
    }
}

impl DraftChoice {
    /// Whether n-grams guess beside a head.
    pub(crate) fn adds_ngrams(&self) -> bool {
        match self {
            DraftChoice::Auto | DraftChoice::WithNgrams(..) => true,
            DraftChoice::None | DraftChoice::Named(..) => false,
            DraftChoice::Several { ngrams, .. } => *ngrams,
        }
    }

    /// The drafters that are asked for by name but for n-grams beside others, and the places of their heads.
    pub fn named(&self) -> Vec<(&'static str, Option<&Source>)> {
        match self {
            DraftChoice::Auto | DraftChoice::None => Vec::new(),
            DraftChoice::Named(name, source) | DraftChoice::WithNgrams(name, source) => {
                vec![(name, source.as_ref())]
            }
            DraftChoice::Several { heads, .. } => {
                let heads = heads.iter();
                heads
                    .map(|(name, source)| (*name, source.as_ref()))
                    .collect()
            }
        }
    }

    /// The drafter that was asked for by name, if one was; the first of several.
    pub(crate) fn asked(&self) -> Option<&'static str> {
        self.named().first().map(|&(name, _)| name)
    }
}
