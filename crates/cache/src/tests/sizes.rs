//! How large memories are, and that the pages of windows last as long as those of full attention.

use super::{delta_spec, memory, mixed_plan, plan};
use crate::{GroupPlan, KvLayer, KvPlan, Memory, MemoryPlan, MemorySize, Sequence};
use backend::{Batch, MAX_TENTATIVE, PAGE_ROWS, Reference};
use proptest::prelude::*;

/// A size of `sequences` of `context` rows.
fn size(sequences: usize, context: usize) -> MemorySize {
    MemorySize {
        sequences,
        context,
        ..*memory(1).size()
    }
}

#[test]
fn a_budget_buys_pages_that_sequences_share() {
    for has_state in [false, true] {
        let plan = mixed_plan(has_state);
        let bytes = |size: &MemorySize| Memory::bytes(&plan, size);
        let size = size(64, 1000);
        let all = bytes(&size) as u64;
        assert_eq!(size.running_pages_within(all, bytes), Ok(None));
        let least = size.running_pages_within(1, bytes).unwrap_err();
        assert!(size.running_pages_within(least - 1, bytes).is_err());
        assert_eq!(size.running_pages_within(least, bytes), Ok(Some(16)));
        for budget in [least + 1, (least + all) / 2, all - 1] {
            let pages = size.running_pages_within(budget, bytes).unwrap().unwrap();
            let with = |running_pages| {
                bytes(&MemorySize {
                    running_pages: Some(running_pages),
                    ..size
                }) as u64
            };
            assert!(
                with(pages) <= budget && with(pages + 1) > budget,
                "{budget}"
            );
        }
    }
}

#[test]
fn the_longest_context_is_the_last_that_fits() {
    let plan = mixed_plan(true);
    let bytes = |size: &MemorySize| Memory::bytes(&plan, size);
    let size = size(4, 1);
    let with = |context| {
        bytes(&MemorySize {
            context,
            running_pages: Some(0),
            ..size
        }) as u64
    };
    for context in [1, 5, 77, 2000] {
        let context = context * PAGE_ROWS;
        let within = |budget| size.context_within(budget, 1 << 20, bytes);
        assert_eq!(within(with(context)), context);
        assert_eq!(within(with(context) - 1), context - PAGE_ROWS);
        assert_eq!(
            size.context_within(with(context), context - 1, bytes),
            context - 1
        );
    }
    assert_eq!(size.context_within(0, 1 << 20, bytes), 0);
}

#[test]
fn sizes_that_nobody_has_are_told_and_not_computed_wrong() {
    let plan = mixed_plan(true);
    let bytes = |size: &MemorySize| Memory::bytes(&plan, size);
    for sequences in [1 << 40, usize::MAX] {
        let size = size(sequences, 1 << 20);
        assert!(!Memory::has_numbers(&plan, &size));
        assert!(size.running_pages_within(1 << 40, bytes).is_err());
        assert_eq!(size.context_within(1 << 40, 1 << 20, bytes), 0);
    }
}

/// 100 000 rows and more, of as many heads as any model has, are counted in full.
#[test]
fn bytes_of_long_contexts_do_not_wrap() {
    let plan = MemoryPlan {
        groups: vec![GroupPlan {
            window: None,
            layers: vec![
                KvLayer {
                    heads: 128,
                    head_dim: 512,
                    query_heads: 1,
                    edge: None,
                };
                100
            ],
        }],
        delta: vec![delta_spec()],
    };
    let size = MemorySize {
        kv_format: KvPlan::both(&quant::kv::BF16),
        ..size(1, 131_072)
    };
    // Keys and values, 100 layers of 128 heads of 512 columns of 2 bytes.
    let token = 2 * 100 * 128 * 512 * 2;
    let state = 2 * plan.state_bytes();
    assert_eq!(Memory::bytes(&plan, &size), 131_072 * token + state);
    assert!(131_072 * token > u32::MAX as usize * 100);
    assert_eq!(plan.token_bytes(&size.kv_format), token);
    assert!(Memory::has_numbers(&plan, &size));
}

proptest! {
    /// Whoever sees to it that there are pages of full attention finds pages of windows, too.
    #[test]
    fn windows_do_not_run_out_before_full_attention_does(
        steps in proptest::collection::vec((0usize..6, 1usize..71, 0usize..9, 0usize..5), 1..150)
    ) {
        const SEQUENCES: usize = 6;
        let size = MemorySize { running_pages: Some(20), ..*memory(SEQUENCES).size() };
        let mut memory = Memory::new(&Reference, plan(), size);
        let mut open: Vec<Option<Sequence>> = (0..SEQUENCES).map(|_| None).collect();
        for (s, rows, forget, what) in steps {
            if what == 0 {
                // Another one begins with what this one has.
                let other = (s + 1) % SEQUENCES;
                open[other] = None;
                let Some(from) = &open[s] else { continue };
                let rows = memory.forkable(from, from.len());
                if memory.n_free_full_pages() > 0 {
                    open[other] = Some(memory.fork(&Reference, from, rows).unwrap());
                }
                continue;
            }
            let sequence = open[s].get_or_insert_with(|| memory.open().unwrap());
            let rows = rows.min(size.context - sequence.len());
            if rows == 0 || memory.n_free_full_pages() < sequence.lacking_pages(sequence.len() + rows) {
                open[s] = None;
                continue;
            }
            let tentative = forget.min(rows).min(MAX_TENTATIVE);
            let pushed = memory.push(&mut Batch::default(), sequence, &vec![0; rows], rows - tentative);
            prop_assert_eq!(pushed, Ok(()));
            memory.truncate(sequence, sequence.len() - tentative);
        }
    }
}
