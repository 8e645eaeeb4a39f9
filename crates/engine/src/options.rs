//! What a caller may ask of [`crate::load`].

use crate::preflight::Probing;
use crate::shortlist::DraftVocabulary;
use crate::source::Source;
use backend::KvFormat;
use models::Quantize;
use speculate::Accept;
use std::str::FromStr;

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

/// Where weights are to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Placement {
    /// Packed, unless they and what requests remember take more than this many bytes.
    Auto(u64),
    /// Packed, or as the device has it.
    #[default]
    Packed,
    /// In their files.
    Mapped,
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

impl DraftChoice {
    /// How it was asked for by name, if it was.
    pub(crate) fn asked(&self) -> Option<&'static str> {
        match self {
            DraftChoice::Auto | DraftChoice::None => None,
            DraftChoice::Mtp(_) => Some("mtp"),
            DraftChoice::Assistant(_) => Some("assistant"),
            DraftChoice::Eagle3(_) => Some("eagle3"),
            DraftChoice::Ngram => Some("ngram"),
        }
    }
}
