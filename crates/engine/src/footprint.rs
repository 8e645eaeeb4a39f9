//! What requests take beside the weights.

use crate::Model;
use crate::info::KvLayersInfo;
use crate::memory_plan::longest_context;
use cache::{KeptSize, Memory, MemoryPlan, MemorySize};
use models::Target;

/// Bytes that one request's KV cache and recurrent state take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestBytes {
    /// Bytes of the target's.
    pub target: u64,
    /// Bytes of the drafter's, 0 where it has none.
    pub drafter: u64,
}

/// What a target or its drafter remembers of each row, and how the size of its memory follows from the
/// target's.
#[derive(Clone, Debug)]
pub(crate) struct Planned {
    plan: MemoryPlan,
    owner: Owner,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug)]
enum Owner {
    Target,
    /// A draft head, which has a row for each of the target's.
    Head,
    /// A draft model that knows so many tokens.
    DraftModel {
        max_context: usize,
    },
}

impl Planned {
    /// The memory of a target.
    pub(crate) fn target(target: &dyn Target) -> Planned {
        Planned {
            plan: target.plan(),
            owner: Owner::Target,
        }
    }

    /// The memory of a draft head with this plan.
    pub(crate) fn head(plan: MemoryPlan) -> Planned {
        Planned {
            plan,
            owner: Owner::Head,
        }
    }

    /// The memory of a draft model.
    pub(crate) fn draft_model(model: &dyn Target) -> Planned {
        Planned {
            plan: model.plan(),
            owner: Owner::DraftModel {
                max_context: model.max_context(),
            },
        }
    }

    /// What is remembered of each row.
    pub(crate) fn plan(&self) -> &MemoryPlan {
        &self.plan
    }

    /// The size beside a target's memory of size `target`.
    pub(crate) fn size(&self, target: &MemorySize) -> MemorySize {
        match self.owner {
            Owner::Target | Owner::Head => *target,
            Owner::DraftModel { max_context } => MemorySize {
                context: target.context.min(max_context),
                // Where the target keeps no recurrent state, texts that have ended need slots of their own.
                kept: KeptSize {
                    snapshots: target.kept.snapshots.saturating_add(target.sequences),
                    ..target.kept
                },
                ..*target
            },
        }
    }

    /// Bytes beside a target's memory of size `target`.
    pub(crate) fn bytes(&self, target: &MemorySize) -> usize {
        Memory::bytes(&self.plan, &self.size(target))
    }

    /// Bytes of all of `planned` beside a target's memory of size `target`.
    pub(crate) fn all_bytes(planned: &[Planned], target: &MemorySize) -> usize {
        let bytes = planned.iter().map(|planned| planned.bytes(target));
        bytes.fold(0, usize::saturating_add)
    }

    /// Bytes of keys and values of all of `planned` that each token of a context takes, beside a target's
    /// memory of size `target`.
    pub(crate) fn token_bytes(planned: &[Planned], target: &MemorySize) -> usize {
        let bytes = planned
            .iter()
            .map(|p| p.plan.token_bytes(&p.size(target).kv_format));
        bytes.sum()
    }

    /// Whether pages, slots and snapshots have numbers, beside a target's memory of size `target`.
    pub(crate) fn has_numbers(&self, target: &MemorySize) -> bool {
        Memory::has_numbers(&self.plan, &self.size(target))
    }
}

impl Model {
    /// What one request of `context` tokens takes, alone on this model.
    pub fn request_bytes(&self, context: usize) -> RequestBytes {
        let size = MemorySize {
            sequences: 1,
            context,
            step_rows: self.chunk,
            kv_format: self.speculator.memory().size().kv_format,
            running_pages: None,
            kept: KeptSize::default(),
        };
        let mut bytes = self.plans.iter().map(|planned| planned.bytes(&size) as u64);
        RequestBytes {
            target: bytes.next().unwrap_or(0),
            drafter: bytes.sum(),
        }
    }

    /// Notes again which formats keys and values have, and what KV caches and recurrent states take.
    pub(crate) fn count_memory(&mut self) {
        let size = self.speculator.memory().size();
        self.info.kv_format = size.kv_format.to_string();
        self.info.kv_layers = KvLayersInfo::of(&self.plans, size);
        let most = self.info.context_max;
        self.info.memory_bytes = Planned::all_bytes(&self.plans, size);
        self.info.kv_token_bytes = Planned::token_bytes(&self.plans, size);
        self.info.kv_tokens = size.running_tokens();
        self.info.context_fits = longest_context(&self.budget, &self.plans, size, most);
    }
}
