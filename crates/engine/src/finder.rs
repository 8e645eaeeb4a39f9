//! Choosing a drafter: the one asked for, or the best that lies in the checkpoint,
//! beside it or where the caller says.

use crate::error::{EngineError, TooLarge};
use crate::hashes::Hashes;
use crate::options::{DraftChoice, LoadOptions};
use crate::placement::Budget;
use crate::preflight::{Preflight, Probing};
use crate::source::{Source, quantized};
use backend::{Backend, KvFormat};
use cache::{Memory, MemoryPlan, MemorySize};
use models::{Census, ChainedHead, Eagle3, Gemma4Assistant, ModelError, Qwen35Mtp, Target};
use speculate::Drafter;
use speculate::draft::{Assistant, Chained, Ngram};
use text::Tokenizer;
use weights::Checkpoint;

/// What to do about a head inside the checkpoint that cannot be used.
const OWN_REMEDY: &str = "`paceline pull ORIGINAL --head-only` fetches the head of the original, for --draft mtp:ORIGINAL";
/// The same about a drafter in files of its own.
const APART_REMEDY: &str = "fetch it again, or take the one that was made for this target";

/// The drafter that needs no head.
pub(crate) fn ngram() -> Box<dyn Drafter> {
    Box::new(Ngram::new())
}

/// A drafter, or nobody, and the reason for it.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) drafter: Option<Box<dyn Drafter>>,
    pub(crate) reason: String,
    /// What the drafter remembers, if it has a memory.
    pub(crate) plan: Option<MemoryPlan>,
    /// Tokens that it scores, unless all.
    pub(crate) shortlist: Option<usize>,
    /// Bytes of its own checkpoint.
    pub(crate) weight_bytes: u64,
    /// Tensors of its own checkpoint that nothing has read.
    pub(crate) unused: Vec<String>,
    /// What is known of the head.
    pub(crate) preflight: Preflight,
}

impl Found {
    pub(crate) fn nobody(reason: &str) -> Found {
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

/// `error`, unless memory is too small: then another drafter is no answer.
fn unless_too_large(error: EngineError) -> Result<EngineError, EngineError> {
    match error {
        EngineError::TooLarge(_) => Err(error),
        other => Ok(other),
    }
}

/// What choosing a drafter needs.
pub(crate) struct Finder<'a> {
    pub(crate) b: &'a dyn Backend,
    pub(crate) source: &'a Source,
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) target: &'a dyn Target,
    pub(crate) options: &'a LoadOptions,
    /// Whether weights stay in their files.
    pub(crate) mapped: bool,
    /// The tokens that a head scores, unless all.
    pub(crate) shortlist: Option<Vec<u32>>,
    pub(crate) size: MemorySize,
    pub(crate) budget: Budget,
    pub(crate) hashes: Hashes,
    /// Why heads that are there are not used.
    pub(crate) refused: Vec<String>,
    /// What to do about the first of them, where nobody knows better.
    pub(crate) remedy: Option<&'static str>,
}

impl Finder<'_> {
    pub(crate) fn find(&mut self) -> Result<Found, EngineError> {
        let missing = |asked, reason: &str, finder: &Self| EngineError::NoDrafter {
            asked,
            reason: finder.explain(reason),
        };
        match &self.options.draft {
            DraftChoice::None => Ok(Found::nobody("--draft none")),
            DraftChoice::Ngram => Ok(Found::ngram("--draft ngram".into())),
            DraftChoice::Mtp(Some(source)) => self.asked_for("mtp", source, Self::mtp_of),
            DraftChoice::Mtp(None) => {
                match self.own_mtp() {
                    Ok(Some(found)) => return Ok(found),
                    Ok(None) => {}
                    Err(error) => self.refuse(unless_too_large(error)?.to_string(), OWN_REMEDY),
                }
                let what = match self.target.family() {
                    "qwen3_5" => "this qwen3_5 checkpoint has no MTP head and promises none; \
                                  name one with --draft mtp:PATH"
                        .to_owned(),
                    other => format!("targets of the family {other} have no MTP heads"),
                };
                let found = self.elsewhere()?;
                found.ok_or_else(|| missing("mtp", &what, self))
            }
            DraftChoice::Assistant(Some(source)) => {
                self.asked_for("assistant", source, Self::assistant)
            }
            DraftChoice::Assistant(None) => match self.source.assistant_beside() {
                Some(source) => self.asked_for("assistant", &source, Self::assistant),
                None => self.elsewhere()?.ok_or_else(|| {
                    let what = "none lies beside the model; name one with --draft assistant:PATH";
                    missing("assistant", what, self)
                }),
            },
            DraftChoice::Eagle3(source) => self.asked_for("eagle3", source, Self::eagle3),
            DraftChoice::Auto => self.best(),
        }
    }

    /// The best that there is; heads that cannot be used are part of the reason.
    fn best(&mut self) -> Result<Found, EngineError> {
        match self.own_mtp() {
            Ok(Some(found)) => return Ok(found),
            Ok(None) => {}
            Err(error) => self.refuse(unless_too_large(error)?.to_string(), OWN_REMEDY),
        }
        if self.target.family() == "gemma4"
            && let Some(source) = self.source.assistant_beside()
        {
            match self.assistant(&source) {
                Ok(found) => return Ok(found),
                Err(error) => self.refuse_apart(&source, &unless_too_large(error)?),
            }
        }
        Ok(match self.elsewhere()? {
            Some(found) => found,
            None => Found::ngram(self.explain("no draft head in or beside the checkpoint")),
        })
    }

    /// `what`, or why the heads that are there are not used, and what to do.
    fn explain(&self, what: &str) -> String {
        let mut parts = self.refused.clone();
        if parts.is_empty() {
            parts.push(what.to_owned());
        }
        let advice = self.options.advice.clone();
        parts.extend(advice.or_else(|| self.remedy.map(str::to_owned)));
        parts.join("; ")
    }

    /// Notes why a head that is there is not used, and what to do about it.
    fn refuse(&mut self, reason: String, remedy: &'static str) {
        self.refused.push(reason);
        self.remedy.get_or_insert(remedy);
    }

    /// The same of a drafter in files of its own.
    fn refuse_apart(&mut self, source: &Source, error: &EngineError) {
        self.refuse(format!("`{}`: {error}", source.place()), APART_REMEDY);
    }

    /// The drafter at `source`, which a user has named.
    fn asked_for(
        &mut self,
        asked: &'static str,
        source: &Source,
        load: fn(&mut Self, &Source) -> Result<Found, EngineError>,
    ) -> Result<Found, EngineError> {
        let error = match load(self, source) {
            Ok(found) => return Ok(found),
            Err(error) => unless_too_large(error)?,
        };
        Err(EngineError::NoDrafter {
            asked,
            reason: format!("`{}`: {error}; {APART_REMEDY}", source.place()),
        })
    }

    /// The first of the other places that has a drafter for this target.
    fn elsewhere(&mut self) -> Result<Option<Found>, EngineError> {
        for source in &self.options.drafters {
            match self.by_kind(source) {
                Ok(found) => return Ok(Some(found)),
                Err(error) => self.refuse_apart(source, &unless_too_large(error)?),
            }
        }
        Ok(None)
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
    fn own_mtp(&mut self) -> Result<Option<Found>, EngineError> {
        if self.target.family() != "qwen3_5" || !Qwen35Mtp::is_in(self.checkpoint)? {
            return Ok(None);
        }
        let reason = "the checkpoint's own MTP head".into();
        Ok(Some(self.mtp(self.checkpoint, reason)?))
    }

    /// The MTP head in a checkpoint of its own.
    fn mtp_of(&mut self, source: &Source) -> Result<Found, EngineError> {
        let checkpoint = self.open(source)?;
        let mut found = self.mtp(&checkpoint, format!("the MTP head `{}`", source.name()))?;
        found.preflight.note_norms(checkpoint.norm_facts());
        self.apart(source, &checkpoint, found)
    }

    /// The MTP head in `checkpoint`.
    fn mtp(&self, checkpoint: &Checkpoint, reason: String) -> Result<Found, EngineError> {
        let mut head = Qwen35Mtp::load(self.b, checkpoint, self.target)?;
        if let Some(ids) = &self.shortlist {
            head = head.with_shortlist(self.b, self.checkpoint, self.target, ids)?;
        }
        let census = Qwen35Mtp::census(checkpoint, self.target)?;
        Ok(self.chained(head, Some(census), reason)?)
    }

    /// A drafter that chains `head` on itself, if its KV cache fits beside the target's.
    fn chained(
        &self,
        head: impl ChainedHead + 'static,
        census: Option<Census>,
        reason: String,
    ) -> Result<Found, TooLarge> {
        let plan = head.plan();
        self.budget
            .check(&[self.target.plan(), plan.clone()], &self.size)?;
        let shortlist = head.shortlist().map(|list| list.ids().len());
        let size = MemorySize {
            kv_format: self.size.kv_format.of_draft_head(),
            ..self.size
        };
        let memory = Memory::new(self.b, plan.clone(), size);
        Ok(Found {
            drafter: Some(Box::new(Chained::new(head, memory))),
            reason,
            plan: Some(plan),
            shortlist,
            preflight: Preflight {
                head: census,
                ..Preflight::default()
            },
            ..Found::default()
        })
    }

    fn assistant(&mut self, source: &Source) -> Result<Found, EngineError> {
        let checkpoint = quantized(self.open(source)?, self.options)?;
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
        let checkpoint = self.open(source)?;
        let head = Eagle3::load(self.b, &checkpoint, self.target)?;
        let reason = format!("the EAGLE-3 head `{}`", source.name());
        fits(&head.plan(), self.size.kv_format.of_draft_head())?;
        let found = self.chained(head, None, reason)?;
        self.apart(source, &checkpoint, found)
    }

    /// Opens a head's own checkpoint, whose weights are where the target's are.
    fn open(&self, source: &Source) -> Result<Checkpoint, EngineError> {
        let checkpoint = source.checkpoint()?;
        checkpoint.keep_mapped(self.mapped);
        Ok(checkpoint)
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
pub(crate) fn fits(plan: &MemoryPlan, format: KvFormat) -> Result<(), EngineError> {
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
