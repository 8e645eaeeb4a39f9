//! What loading a drafter needs and yields: the target that it is paired with, and what is known
//! of the pair.

use crate::error::{DrafterReason, EngineError, FoundHead, MissingHead, TooLarge};
use crate::footprint::Planned;
use crate::hashes::Hashes;
use crate::options::LoadOptions;
use crate::placement::Budget;
use crate::preflight::Preflight;
use crate::source::{Source, same_tokens};
use backend::Backend;
use cache::{KvPlan, Memory, MemoryPlan, MemorySize};
use models::{Census, ChainedHead, Target};
use serde_json::Value;
use speculate::draft::Chained;
use speculate::{Drafter, Drafters};
use text::Tokenizer;
use weights::Checkpoint;

/// A kind of draft head and the drafter that uses it: how it is called, found and loaded.
pub(crate) struct HeadDrafter {
    /// The drafter's name, as users type it and as records have it. A head with checkpoints of
    /// its own has the same name in [`models::DRAFT_HEADS`].
    pub(crate) name: &'static str,
    /// What it is, in a few words for a help text; empty if the name says it.
    pub(crate) help: &'static str,
    /// Whether the head's place must be named, since nobody knows where to look for it.
    pub(crate) needs_place: bool,
    /// The width of the target's hidden rows that the head of this configuration reads, if its
    /// `config.json` says that it is such a head. A guess: loading proves the pair.
    pub(crate) target_width: fn(&Value) -> Option<u64>,
    /// Looks for the head of a target in the checkpoint and beside it.
    pub(crate) find: fn(&Pairing<'_>) -> Result<Home, EngineError>,
    /// Loads the head.
    pub(crate) load: fn(&mut Pairing<'_>, Place<'_>) -> Result<Found, EngineError>,
}

/// Where the head of a target lies by itself.
pub(crate) enum Home {
    /// Inside the target's checkpoint.
    Inside,
    /// In a checkpoint of its own beside the target's.
    Beside(Source),
    /// Nowhere.
    Nowhere(MissingHead),
}

/// Which checkpoint a head is loaded from.
#[derive(Clone, Copy)]
pub(crate) enum Place<'a> {
    /// The target's.
    Inside,
    /// The one at this source.
    At(&'a Source),
}

/// A drafter, or none, and the reason for that.
pub(crate) struct Found {
    pub(crate) drafters: Drafters,
    pub(crate) reason: DrafterReason,
    /// What the drafters remember that have memories.
    pub(crate) plans: Vec<Planned>,
    /// Vocabulary entries that the first one scores, unless all.
    pub(crate) shortlist: Option<usize>,
    /// Bytes of their own checkpoints.
    pub(crate) weight_bytes: u64,
    /// Tensors of their own checkpoints that nothing has read.
    pub(crate) unused: Vec<String>,
    /// What is known of the first head.
    pub(crate) preflight: Preflight,
    /// What is known of the other heads.
    pub(crate) others: Vec<OtherHead>,
}

/// What is known of a head beside the first one.
pub(crate) struct OtherHead {
    /// The drafter's name.
    pub(crate) name: &'static str,
    /// What the head is, and where it was found.
    pub(crate) origin: String,
    /// Vocabulary entries that it scores, unless all.
    pub(crate) shortlist: Option<usize>,
    /// Hash of its own checkpoint.
    pub(crate) sha256: Option<String>,
    /// The tensors of the head, counted.
    pub(crate) census: Option<Census>,
}

impl Found {
    /// `drafters`, which have no memory and no checkpoint of their own.
    pub(crate) fn new(drafters: Drafters, reason: DrafterReason) -> Found {
        Found {
            drafters,
            reason,
            plans: Vec::new(),
            shortlist: None,
            weight_bytes: 0,
            unused: Vec::new(),
            preflight: Preflight::default(),
            others: Vec::new(),
        }
    }

    /// These drafters, and the head that `found` has, called `name`.
    pub(crate) fn and(mut self, name: &'static str, found: Found) -> Found {
        self.drafters = self.drafters.with(found.drafters);
        self.plans.extend(found.plans);
        self.weight_bytes += found.weight_bytes;
        self.unused.extend(found.unused);
        let Preflight {
            drafter_sha256,
            head,
            norms,
            warnings,
            ..
        } = found.preflight;
        self.preflight.norms.extend(norms);
        self.preflight.warnings.extend(warnings);
        self.others.push(OtherHead {
            name,
            origin: found.reason.origin(),
            shortlist: found.shortlist,
            sha256: drafter_sha256,
            census: head,
        });
        let first = self.reason;
        self.reason = match first {
            DrafterReason::Several(mut all) => {
                all.push(found.reason);
                DrafterReason::Several(all)
            }
            first => DrafterReason::Several(vec![first, found.reason]),
        };
        self
    }

    /// Hashes of the own checkpoints of all heads, of which `first` is the first one's; none if none has one.
    pub(crate) fn hashes(&self, first: Option<&str>) -> Option<String> {
        let others = self.others.iter().map(|other| other.sha256.as_deref());
        let all: Vec<Option<&str>> = [first].into_iter().chain(others).collect();
        all.iter().any(Option::is_some).then(|| {
            let all: Vec<&str> = all.into_iter().map(Option::unwrap_or_default).collect();
            all.join("+")
        })
    }

    /// A `drafter` with a draft head.
    pub(crate) fn head(
        drafter: Box<dyn Drafter>,
        head: FoundHead,
        census: Option<Census>,
        shortlist: Option<usize>,
        vocab_size: usize,
    ) -> Found {
        let scoring = shortlist.map(|n| (n, vocab_size));
        Found {
            shortlist,
            preflight: Preflight {
                head: census,
                ..Preflight::default()
            },
            ..Found::new(
                Drafters::head(drafter),
                DrafterReason::Head { head, scoring },
            )
        }
    }
}

/// A target that a drafter is paired with.
pub(crate) struct Pairing<'a> {
    pub(crate) b: &'a dyn Backend,
    pub(crate) source: &'a Source,
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) target: &'a dyn Target,
    /// The target's tokenizer.
    pub(crate) tokenizer: &'a Tokenizer,
    pub(crate) options: &'a LoadOptions,
    /// Whether weights stay in their files.
    pub(crate) mapped: bool,
    /// The vocabulary entries that a head scores, unless all.
    pub(crate) shortlist: Option<Vec<u32>>,
    pub(crate) size: MemorySize,
    pub(crate) budget: Budget,
    /// What drafters remember that were found before.
    pub(crate) beside: Vec<Planned>,
    pub(crate) hashes: &'a mut Hashes,
}

impl Pairing<'_> {
    /// A drafter that chains `head` on itself, if its KV cache fits beside the target's.
    pub(crate) fn chained(
        &self,
        head: impl ChainedHead + 'static,
        census: Option<Census>,
        found: FoundHead,
    ) -> Result<Found, TooLarge> {
        let shortlist = head.shortlist().map(|list| list.ids().len());
        let (plan, memory) = self.head_memory(head.plan())?;
        let drafter = Box::new(Chained::new(head, memory));
        let vocab_size = self.target.vocab_size();
        Ok(Found {
            plans: vec![plan],
            ..Found::head(drafter, found, census, shortlist, vocab_size)
        })
    }

    /// A draft head's own memory, and what is planned of it, if it fits beside the target's.
    pub(crate) fn head_memory(&self, plan: MemoryPlan) -> Result<(Planned, Memory), TooLarge> {
        let planned = Planned::head(plan);
        let memory = self.memory(&planned, self.budget)?;
        Ok((planned, memory))
    }

    /// The memory that is `planned` for a drafter, if it fits into `budget` beside the target's.
    pub(crate) fn memory(&self, planned: &Planned, budget: Budget) -> Result<Memory, TooLarge> {
        let mut all = vec![Planned::target(self.target)];
        all.extend(self.beside.iter().cloned());
        all.push(planned.clone());
        budget.check(&all, &self.size)?;
        let size = planned.size(&self.size);
        Ok(Memory::new(self.b, planned.plan().clone(), size))
    }

    /// Opens a head's own checkpoint, whose weights are where the target's are.
    pub(crate) fn open(&self, source: &Source) -> Result<Checkpoint, EngineError> {
        let checkpoint = source.checkpoint()?;
        checkpoint.keep_mapped(self.mapped);
        Ok(checkpoint)
    }

    /// Completes what is known of a head in a checkpoint of its own.
    pub(crate) fn apart(
        &mut self,
        source: &Source,
        checkpoint: &Checkpoint,
        found: Found,
    ) -> Result<Found, EngineError> {
        same_tokens(self.source, source)?;
        Ok(self.measured(source, checkpoint, found))
    }

    /// Completes what is known of a drafter in a checkpoint of its own, whose vocabulary is the target's.
    pub(crate) fn measured(
        &mut self,
        source: &Source,
        checkpoint: &Checkpoint,
        mut found: Found,
    ) -> Found {
        if self.options.hashes() {
            found.preflight.drafter_sha256 = Some(source.hash(checkpoint, self.hashes));
        }
        found.unused = checkpoint.unused();
        found.weight_bytes = checkpoint.bytes();
        found
    }
}

/// Whether the device keeps the formats that all layers of `plan` have by `kv`, and heads are whole blocks of them.
pub(crate) fn fits(b: &dyn Backend, plan: &MemoryPlan, kv: &KvPlan) -> Result<(), EngineError> {
    let supported = b.capabilities().kv;
    for group in &plan.groups {
        for layer in &group.layers {
            let pair = kv.of(layer, group.window);
            if !supported.contains(pair) {
                return Err(EngineError::NoKv {
                    kv: Box::new(*kv),
                    pair,
                    device: b.name(),
                    supported,
                });
            }
            if let Some(misfit) = pair.misfit(layer.head_dim) {
                return Err(EngineError::KvMisfit {
                    kv: Box::new(*kv),
                    format: misfit.name,
                    block: misfit.block,
                    head_dim: layer.head_dim,
                });
            }
        }
    }
    Ok(())
}
