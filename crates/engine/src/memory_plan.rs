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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::TooLarge;
    use crate::{DraftChoice, ModelInfo, Placement, Probing, Source, load};
    use cpu::{Cpu, CpuOptions};
    use std::path::Path;
    use std::sync::Arc;

    /// The bundled models' own limit.
    const MOST: usize = 8192;

    fn options(sequences: usize, memory_limit: u64) -> LoadOptions {
        LoadOptions {
            probing: Probing::Skip {
                reason: "a test".into(),
            },
            weights: Placement::Packed,
            sequences,
            memory_limit: Some(memory_limit),
            kv_memory: KvMemory::Spare { models: 1 },
            ..LoadOptions::default()
        }
    }

    fn plan(model: &str, options: &LoadOptions) -> Result<ModelInfo, EngineError> {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        let source = Source::Folder(folder.join(model));
        load(Arc::new(cpu), &source, options).map(|model| model.info)
    }

    fn refused(model: &str, options: &LoadOptions) -> TooLarge {
        match plan(model, options) {
            Err(EngineError::TooLarge(too_large)) => too_large,
            Err(other) => panic!("{other}"),
            Ok(info) => panic!("{model} takes {} bytes", info.memory_bytes),
        }
    }

    #[test]
    fn enough_memory_holds_what_all_requests_can_need() {
        for model in ["tiny-gemma4", "tiny-qwen3.5"] {
            let info = plan(model, &options(4, 1 << 40)).unwrap();
            assert_eq!(info.context, MOST, "{model}");
            assert_eq!(info.context_fits, MOST, "{model}");
            assert_eq!(info.kv_tokens, 4 * MOST, "{model}");
        }
    }

    #[test]
    fn many_requests_share_half_of_what_weights_leave() {
        for model in ["tiny-gemma4", "tiny-qwen3.5"] {
            let limit = 1 << 29;
            let info = |models| {
                let options = LoadOptions {
                    draft: DraftChoice::None,
                    kv_memory: KvMemory::Spare { models },
                    ..options(60, limit)
                };
                plan(model, &options).unwrap()
            };
            let (one, three) = (info(1), info(3));
            let spare = limit - one.weight_bytes;
            for (info, share) in [(&one, spare / 2), (&three, spare / 6)] {
                let (taken, tokens) = (info.memory_bytes as u64, info.kv_tokens);
                assert_eq!(info.context, MOST, "{model}");
                assert!(taken <= share, "{model}: {taken} of {share}");
                assert!(taken > share / 10 * 9, "{model}: {taken} of {share}");
                assert!((MOST..60 * MOST).contains(&tokens), "{model}: {tokens}");
            }
        }
    }

    #[test]
    fn the_context_is_what_fits_where_nobody_asks_for_one() {
        for model in ["tiny-gemma4", "tiny-qwen3.5"] {
            for draft in [DraftChoice::None, DraftChoice::Auto] {
                let with = |extra| LoadOptions {
                    draft: draft.clone(),
                    ..options(1, extra)
                };
                // What refuses a limit of nothing says what the weights are, and the least that is remembered.
                let least = refused(model, &with(0));
                assert!(least.shared, "{model}");
                assert_eq!(least.context, LEAST_CONTEXT, "{model}");
                let floor = least.weights + least.remembered;
                let tight = plan(model, &with(floor + (2 << 20))).unwrap();
                assert!(
                    (LEAST_CONTEXT..MOST).contains(&tight.context),
                    "{model}: {}",
                    tight.context
                );
                assert!(tight.context <= tight.context_fits, "{model}");
                let taken = least.weights + tight.memory_bytes as u64;
                assert!(taken <= floor + (2 << 20), "{model}");
                // Who asks for more gets all there is, or is refused.
                let longer = LoadOptions {
                    context: Some(tight.context_fits),
                    ..with(floor + (2 << 20))
                };
                assert!(plan(model, &longer).is_ok(), "{model}");
                let longest = LoadOptions {
                    context: Some(MOST),
                    ..with(floor + (2 << 20))
                };
                assert_eq!(refused(model, &longest).context, MOST, "{model}");
            }
        }
    }

    #[test]
    fn no_number_of_requests_is_more_than_refused() {
        for model in ["tiny-gemma4", "tiny-qwen3.5"] {
            for sequences in [1 << 24, 1 << 40, usize::MAX] {
                let too_large = refused(model, &options(sequences, 8 << 30));
                assert_eq!(too_large.sequences, sequences, "{model}");
            }
        }
    }

    #[test]
    fn bytes_bound_the_context_too() {
        let within = |bytes| {
            let options = LoadOptions {
                draft: DraftChoice::None,
                kv_memory: KvMemory::Bytes(bytes),
                ..options(2, 1 << 40)
            };
            plan("tiny-gemma4", &options)
        };
        let short = within(4 << 20).unwrap();
        assert!((LEAST_CONTEXT..MOST).contains(&short.context));
        assert!(short.memory_bytes <= 4 << 20);
        assert_eq!(within(1 << 30).unwrap().context, MOST);
        assert!(matches!(
            within(1000),
            Err(EngineError::KvTooSmall { asked: 1000, .. })
        ));
    }
}
