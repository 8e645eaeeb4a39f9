//! How much requests remember together: the context of each, and the pages that they share.
//!
//! ```text
//! Whole          pages of `sequences` whole contexts
//! Bytes(n)       as many pages as n bytes have room for, at least those of one whole context
//! Spare          a share of what weights leave free, at least one whole context, at most what all can need
//! ```
//!
//! The context is the one that is asked for. Where none is, it is the longest one that fits, up to what the
//! model knows; [`KvMemory::Whole`] has [`DEFAULT_CONTEXT`] at most.
//!
//! Deliberately absent: whether all of it fits, with drafters and weights ([`Budget::check`]), and who waits
//! or is preempted where pages run out (`crate::scheduler`).

use crate::error::EngineError;
use crate::footprint::Planned;
use crate::options::{DEFAULT_CONTEXT, LoadOptions};
use crate::placement::Budget;
use backend::{Backend, PAGE_ROWS};
use cache::{KeptSize, MemorySize};
use models::Target;

/// How much memory keys, values and states of running requests take together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvMemory {
    /// As much as [`sequences`](LoadOptions::sequences) requests of [`context`](LoadOptions::context) tokens can need:
    /// nobody is preempted for memory.
    #[default]
    Whole,
    /// So many bytes of the target's and of a draft model's, and no more than all requests can need; a draft head's
    /// cache gets as many pages beside it. It has room for one whole context.
    Bytes(u64),
    /// What the weights leave free: half of it where the device shares the host's memory, three quarters of
    /// memory of its own, and of that the share of one among so many models. No more than all requests can need,
    /// and never less than one whole context. Where nobody knows what is free, as [`KvMemory::Whole`].
    Spare {
        /// Models that share the memory, this one included.
        models: usize,
    },
}

/// The shortest context that is planned where nobody asks for one.
const LEAST_CONTEXT: usize = 8 * PAGE_ROWS;

/// What [`KvMemory::Spare`] can have.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Room {
    /// Nobody knows.
    Unknown,
    /// As little as possible: room for one request of a usual context.
    Least,
    /// So many bytes.
    Bytes {
        /// All that is free.
        free: u64,
        /// What one model takes of that, unless one context needs more.
        share: u64,
    },
}

impl Room {
    /// What `budget` leaves of the memory of `b`, once weights are there. `mapped` is the size of those that stay
    /// in their files, `drafter` of those of a draft model that will come.
    pub(crate) fn within(
        b: &dyn Backend,
        budget: &Budget,
        (mapped, drafter): (u64, u64),
        options: &LoadOptions,
    ) -> Room {
        let (KvMemory::Spare { models }, Some(limit)) = (options.kv_memory, budget.limit) else {
            return Room::Unknown;
        };
        let beside = budget.weights.saturating_add(budget.tower);
        let free = limit.saturating_sub(beside.saturating_add(drafter));
        // Files that are read again and again want memory, too, but need not have all that they are.
        let free = free.saturating_sub(mapped.min(limit / 4 * 3));
        let share = match b.capabilities().own_memory {
            true => free / 4 * 3,
            false => free / 2,
        };
        let share = share / models.max(1) as u64;
        Room::Bytes { free, share }
    }
}

/// The size of a target's memory in which a step has `step_rows` rows of a sequence at most, where `room` is for
/// keys and values. `beside` is the memory of a draft model, which shares the budgets of the options.
pub(crate) fn planned_size(
    target: &dyn Target,
    beside: Option<&Planned>,
    step_rows: usize,
    room: Room,
    options: &LoadOptions,
) -> Result<MemorySize, EngineError> {
    let most = target.max_context();
    let usual = DEFAULT_CONTEXT.min(most);
    let size = MemorySize {
        sequences: options.sequences,
        context: options.context.unwrap_or(usual).min(most),
        step_rows,
        kv_format: options.kv_format,
        running_pages: None,
        kept: KeptSize::default(),
    };
    let target = Planned::target(target);
    let bytes = |size: &MemorySize| {
        let of_drafter = beside.map_or(0, |drafter| drafter.bytes(size));
        target.bytes(size).saturating_add(of_drafter)
    };
    let longest = |budget| size.context_within(budget, most, bytes);
    let with_context = |context: usize| MemorySize {
        context: options.context.unwrap_or(context).min(most),
        ..size
    };
    let size = match (options.kv_memory, room) {
        (KvMemory::Whole, _) | (KvMemory::Spare { .. }, Room::Unknown) => size,
        (KvMemory::Spare { .. }, Room::Least) => MemorySize {
            running_pages: Some(0),
            ..size
        },
        (KvMemory::Bytes(budget), _) => {
            let size = with_context(longest(budget).max(LEAST_CONTEXT));
            let pages = size.running_pages_within(budget, bytes);
            let pages = pages.map_err(|least| EngineError::KvTooSmall {
                asked: budget,
                least,
                context: size.context,
            })?;
            MemorySize {
                running_pages: pages,
                ..size
            }
        }
        (KvMemory::Spare { .. }, Room::Bytes { free, share }) => {
            let kept = options.prefix_cache_memory;
            let (free, share) = (free.saturating_sub(kept), share.saturating_sub(kept));
            // A usual context may have more than its share.
            let context = longest(share).max(usual.min(longest(free)));
            let size = with_context(context.max(LEAST_CONTEXT));
            let pages = size.running_pages_within(share, bytes);
            MemorySize {
                // Whether one context fits at all is found out with the drafter's part.
                running_pages: pages.unwrap_or(Some(0)),
                ..size
            }
        }
    };
    let kept = KeptSize::within(options.prefix_cache_memory, &size, bytes);
    Ok(MemorySize { kept, ..size })
}

/// A smaller plan than `size`, with half of the pages or of a context that nobody asked for; none where there is
/// less than that.
pub(crate) fn smaller(size: &MemorySize, options: &LoadOptions) -> Option<MemorySize> {
    let KvMemory::Spare { .. } = options.kv_memory else {
        return None;
    };
    let tokens = size.running_tokens();
    if tokens.div_ceil(PAGE_ROWS) > size.context.div_ceil(PAGE_ROWS) {
        return Some(MemorySize {
            running_pages: Some(tokens.div_ceil(PAGE_ROWS) / 2),
            ..*size
        });
    }
    let context = size.context / 2;
    let may_shrink = options.context.is_none() && context >= LEAST_CONTEXT;
    may_shrink.then_some(MemorySize {
        context,
        running_pages: Some(0),
        ..*size
    })
}

/// The longest context, of `most` tokens at most, of which `budget` has room for one whole with all of `plans`,
/// beside a target's memory otherwise of `size`.
pub(crate) fn longest_context(
    budget: &Budget,
    plans: &[Planned],
    size: &MemorySize,
    most: usize,
) -> usize {
    let Some(limit) = budget.limit else {
        return most;
    };
    let beside = budget.weights.saturating_add(budget.tower);
    size.context_within(limit.saturating_sub(beside), most, |size| {
        Planned::all_bytes(plans, size)
    })
}
