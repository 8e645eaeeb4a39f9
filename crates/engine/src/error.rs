//! Why a model cannot be used, and why a draft head is used or not.
//!
//! Each error carries what a caller needs to say it in its own words: a command line names its
//! options, a library its fields. A draft head that cannot be used carries its error, and the
//! error of a drafter that cannot be had names such heads, so both are here.

use crate::request::Rejected;
use backend::{KvFormat, KvFormats};
use cache::KvPlan;
use convert::ConvertError;
use models::ModelError;
use std::fmt;
use std::path::PathBuf;

/// Why a model cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The checkpoint or its drafter is damaged, incomplete or of an unknown kind.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The tokenizer, the chat template or a configuration beside them cannot be read.
    #[error(transparent)]
    Text(#[from] text::TextError),
    /// The checkpoint is a draft head and no target.
    #[error("this checkpoint is a draft head ({drafter}) and writes no text alone")]
    IsDrafter {
        /// The drafter that it is a head of.
        drafter: &'static str,
    },
    /// A drafter was asked for that is not there, or does not work.
    #[error("the drafter `{asked}` cannot be used: {reason}")]
    NoDrafter {
        /// The drafter that was asked for.
        asked: &'static str,
        /// Why it cannot be had.
        reason: DrafterReason,
    },
    /// A drafter was asked for twice.
    #[error("the drafter `{name}` was asked for twice; name each once, n-grams last")]
    DrafterTwice {
        /// The drafter's name.
        name: &'static str,
    },
    /// Nobody here knows a drafter of this name.
    #[error("`{name}` is not a drafter")]
    UnknownDrafter {
        /// What was asked for.
        name: &'static str,
    },
    /// The file of token counts by which a draft head's vocabulary is to be chosen does not serve.
    #[error("the draft vocabulary in `{file}` cannot be used: {reason}")]
    DraftVocabulary {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The tower's file that was asked for gives the model nothing to see or hear with.
    #[error("the tower in `{file}` cannot be used with this model: {reason}")]
    NoTower {
        /// The file.
        file: PathBuf,
        /// Why the model takes no pictures.
        reason: String,
    },
    /// The weights cannot be stored as asked.
    #[error(transparent)]
    Quantize(#[from] ConvertError),
    /// The weights were asked to stay in their files and cannot.
    #[error("the weights cannot stay in their files: {0}")]
    Unmappable(Unmappable),
    /// The device failed while the model was tried.
    #[error("the model cannot be tried")]
    Round(#[from] speculate::RoundError),
    /// Drafts are asked for that are longer than a step can verify.
    #[error("drafts of {asked} tokens are longer than {most}")]
    DraftTooLong {
        /// Tokens that were asked for.
        asked: usize,
        /// Tokens that a draft may have.
        most: usize,
    },
    /// One of the sizes is 0: sequences, rows of a prompt in a step, or the context.
    #[error("sequences, rows in a step and context must be at least 1")]
    NoSize,
    /// The context asked for is longer than the model was made for.
    #[error("a context of {asked} is more than the {most} tokens that this model knows")]
    ContextTooLong {
        /// Tokens that were asked for.
        asked: usize,
        /// Tokens that the model knows.
        most: usize,
    },
    /// The tokenizer has more tokens than the model.
    #[error("the tokenizer has {tokenizer} tokens, the model {model}: they do not belong together")]
    OtherTokenizer {
        /// Tokens of the tokenizer.
        tokenizer: usize,
        /// Tokens of the model's vocabulary.
        model: usize,
    },
    /// The draft model has no tokenizer, so its tokens cannot be compared with the target's.
    #[error(
        "the draft model has no tokenizer, so nobody can tell whether its tokens are the target's; \
         put the target's tokenizer.json beside it if they are"
    )]
    NoDraftTokenizer,
    /// The draft model has another vocabulary than the target.
    #[error(
        "the draft model's vocabulary is not the target's: token {id} is `{drafter}` in the draft model \
         and `{target}` in the target"
    )]
    OtherVocabulary {
        /// The first token that differs.
        id: u32,
        /// What it is in the draft model.
        drafter: String,
        /// What it is in the target.
        target: String,
    },
    /// The device cannot keep the keys and values of some layers in their formats.
    #[error("a KV cache of {kv}: {device} keeps {}{}", kept_formats(supported), of_some_layers(kv, *pair))]
    NoKv {
        /// The formats asked for.
        kv: Box<KvPlan>,
        /// The formats of a layer that cannot be kept.
        pair: KvFormat,
        /// The device's name.
        device: String,
        /// The formats that it can keep.
        supported: KvFormats,
    },
    /// Blocks of the format do not divide a head's values.
    #[error(
        "a KV cache of {kv}: {format} has blocks of {block} values, of which heads of {head_dim} are no multiple"
    )]
    KvMisfit {
        /// The formats asked for.
        kv: Box<KvPlan>,
        /// The one of them that does not fit.
        format: &'static str,
        /// Values in a block of that format.
        block: usize,
        /// Values in a head of the model.
        head_dim: usize,
    },
    /// Weights and KV cache take more memory than they may.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
    /// The KV cache asked for has no room for one whole context.
    #[error(
        "a KV cache of {asked} bytes is too small: one request of {context} tokens needs {least} bytes"
    )]
    KvTooSmall {
        /// Bytes that were asked for.
        asked: u64,
        /// Bytes that are needed at least.
        least: u64,
        /// Tokens of a request, prompt and output together.
        context: usize,
    },
    /// The request cannot be taken.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// The device cannot hold the model, or failed while loading it.
    #[error(transparent)]
    Device(#[from] backend::DeviceError),
}

/// The formats that a device keeps, for people: `keys and values in bf16 or f16, both alike`.
pub fn kept_formats(kept: &KvFormats) -> String {
    let list = |formats: &[&quant::KvRowFormat]| {
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

/// What to add where only some layers of a KV cache of `kv` have the formats `pair`; nothing where they are those of
/// all other layers.
pub fn of_some_layers(kv: &KvPlan, pair: KvFormat) -> String {
    match pair == kv.base {
        true => String::new(),
        false => format!("; some layers would have {pair}"),
    }
}

/// Weights and KV cache take more memory than they may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLarge {
    /// Bytes of packed weights; 0 where they stay in their files.
    pub weights: u64,
    /// Bytes of keys, values and recurrent states of all requests.
    pub remembered: u64,
    /// Bytes that both may take together.
    pub limit: u64,
    /// Requests at once.
    pub sequences: usize,
    /// Tokens of each request, prompt and output together.
    pub context: usize,
    /// Whether requests share memory, of which `remembered` is the least: room for one of them as long as that.
    pub shared: bool,
    /// Whether it is memory of the device's own.
    pub own_memory: bool,
}

impl fmt::Display for TooLarge {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gb = |bytes: u64| bytes as f64 / 1e9;
        let (sequences, context) = (self.sequences, self.context);
        match self.shared {
            false => write!(
                f,
                "the KV cache of {sequences} requests of {context} tokens"
            )?,
            true => write!(
                f,
                "the KV cache that {sequences} requests share, one of them of {context} tokens,"
            )?,
        }
        write!(f, " needs {:.1} GB", gb(self.remembered))?;
        if self.weights > 0 {
            write!(f, ", the weights {:.1} GB", gb(self.weights))?;
        }
        write!(f, "; {:.1} GB are free", gb(self.limit))
    }
}

impl std::error::Error for TooLarge {}

/// Why weights cannot stay in their files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Unmappable {
    /// Weights are quantized while they are loaded, so no file holds them.
    Quantized,
    /// The device always packs weights.
    Device {
        /// The device's name.
        name: String,
    },
    /// The checkpoint is in memory already, not in files.
    InMemory,
}

impl fmt::Display for Unmappable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Unmappable::Quantized => {
                f.write_str("weights that are quantized while loading lie in no file")
            }
            Unmappable::Device { name } => write!(f, "{name} packs what it computes with"),
            Unmappable::InMemory => f.write_str("the model is part of the program"),
        }
    }
}

/// Why a drafter drafts, or why none does.
#[derive(Debug)]
pub enum DrafterReason {
    /// The caller asked for plain decoding.
    NotAsked,
    /// The caller asked for drafts of no token.
    NoLength,
    /// The caller asked for this drafter, which needs no draft head.
    Asked {
        /// The drafter's name.
        drafter: &'static str,
    },
    /// A draft head was found and fits.
    Head {
        /// The head.
        head: FoundHead,
        /// Tokens that it scores and tokens of the vocabulary, unless it scores all.
        scoring: Option<(usize, usize)>,
    },
    /// Several drafters were asked for; why each drafts.
    Several(Vec<DrafterReason>),
    /// No draft head can be used.
    NoHead(NoHead),
    /// The drafter was loaded and failed the trial; the text says how.
    Failed(String),
}

/// A draft head, and where it was found.
#[derive(Clone, Debug)]
pub struct FoundHead {
    /// The kind of head, as people call it: `MTP head`.
    pub what: &'static str,
    /// The name of its own checkpoint; absent for a head inside the target's.
    pub checkpoint: Option<String>,
}

/// Why no draft head can be used, and what could be done.
#[derive(Debug)]
pub struct NoHead {
    /// Heads that are there, and why each is not used.
    pub refused: Vec<RefusedHead>,
    /// What is missing, where no head is there.
    pub missing: MissingHead,
    /// What could be done about it, if anything is known.
    pub remedy: Option<Remedy>,
}

/// A draft head that is there and cannot be used.
#[derive(Debug)]
pub struct RefusedHead {
    /// Where its own checkpoint is; absent for a head inside the target's.
    pub place: Option<String>,
    /// Why it is not used.
    pub error: EngineError,
}

/// Which draft head is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MissingHead {
    /// Any: there is none in the target's checkpoint, beside it or in the other places.
    Anywhere,
    /// One inside the target's checkpoint, whose family has such heads.
    Inside {
        /// The target's family.
        family: &'static str,
        /// The drafter that was asked for.
        drafter: &'static str,
        /// The kind of head.
        what: &'static str,
    },
    /// One beside the target's checkpoint.
    Beside {
        /// The drafter that was asked for.
        drafter: &'static str,
    },
    /// The target's family has no such heads at all.
    Family {
        /// The target's family.
        family: &'static str,
        /// The kind of head.
        what: &'static str,
    },
}

/// What could be done where no draft head can be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The caller's own advice, [`crate::LoadOptions::advice`].
    Advice(String),
    /// The head inside the checkpoint is damaged or missing: the original model has a whole one.
    HeadOfOriginal {
        /// The drafter that it is for.
        drafter: &'static str,
    },
    /// The head's own checkpoint is damaged, or made for another target.
    OtherHead,
}

impl fmt::Display for FoundHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.checkpoint {
            None => write!(f, "the checkpoint's own {}", self.what),
            Some(name) => write!(f, "the {} `{name}`", self.what),
        }
    }
}

impl fmt::Display for DrafterReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DrafterReason::NotAsked => f.write_str("no drafter was asked for"),
            DrafterReason::NoLength => f.write_str("drafts of no token were asked for"),
            DrafterReason::Asked { drafter } => write!(f, "the drafter `{drafter}` was asked for"),
            DrafterReason::Head { head, scoring } => {
                head.fmt(f)?;
                match scoring {
                    Some((n, all)) => write!(f, ", scoring {n} of {all} tokens"),
                    None => Ok(()),
                }
            }
            DrafterReason::Several(all) => {
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                f.write_str(&all.join("; "))
            }
            DrafterReason::NoHead(none) => none.fmt(f),
            DrafterReason::Failed(how) => f.write_str(how),
        }
    }
}

impl DrafterReason {
    /// The draft head that drafts, and where it was found; of several, the first.
    pub(crate) fn origin(&self) -> String {
        match self {
            DrafterReason::Head { head, .. } => head.to_string(),
            DrafterReason::Several(all) => {
                all.first().map(DrafterReason::origin).unwrap_or_default()
            }
            reason => reason.to_string(),
        }
    }
}

impl NoHead {
    /// One line: the refused heads, or the missing one, and what could be done.
    pub fn spell(
        &self,
        error: impl Fn(&EngineError) -> String,
        missing: impl Fn(&MissingHead) -> String,
        remedy: impl Fn(&Remedy) -> String,
    ) -> String {
        let refused = self.refused.iter().map(|head| match &head.place {
            Some(place) => format!("`{place}`: {}", error(&head.error)),
            None => error(&head.error),
        });
        let mut parts: Vec<String> = refused.collect();
        if parts.is_empty() {
            parts.push(missing(&self.missing));
        }
        parts.extend(self.remedy.as_ref().map(remedy));
        parts.join("; ")
    }
}

impl fmt::Display for NoHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let line = self.spell(
            ToString::to_string,
            ToString::to_string,
            ToString::to_string,
        );
        f.write_str(&line)
    }
}

impl fmt::Display for MissingHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MissingHead::Anywhere => f.write_str("no draft head in or beside the checkpoint"),
            MissingHead::Inside { family, what, .. } => {
                write!(
                    f,
                    "this {family} checkpoint has no {what} and promises none"
                )
            }
            MissingHead::Beside { .. } => f.write_str("none lies beside the model"),
            MissingHead::Family { family, what } => {
                write!(f, "targets of the family {family} have no {what}s")
            }
        }
    }
}

impl fmt::Display for Remedy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Remedy::Advice(advice) => f.write_str(advice),
            Remedy::HeadOfOriginal { .. } => f.write_str("take the head of the original model"),
            Remedy::OtherHead => {
                f.write_str("fetch it again, or take the one that was made for this target")
            }
        }
    }
}
