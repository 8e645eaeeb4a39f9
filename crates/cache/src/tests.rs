//! What a memory promises, tried by random interleavings of what can be asked of it.

use crate::memory::Pools;
use crate::{GroupPlan, Memory, MemoryFull, MemoryPlan, MemorySize, Sequence};
use backend::{
    Attention, Batch, DeltaSpec, DeltaWeights, KvFormat, NO_PAGE, Ops, PAGE_ROWS, Reference, Store,
};
use proptest::prelude::*;

const WINDOW: usize = 100;

fn plan() -> MemoryPlan {
    let group = |window| GroupPlan {
        window,
        layers: vec![(1, COLS)],
    };
    MemoryPlan {
        groups: vec![group(Some(WINDOW)), group(None)],
        delta: vec![],
    }
}

fn memory(sequences: usize) -> Memory {
    let size = MemorySize {
        sequences,
        context: 1000,
        step_rows: 70,
        kv_format: KvFormat::both(&quant::kv::F32),
    };
    Memory::new(&Reference, plan(), size)
}

proptest! {
    #[test]
    fn every_row_a_later_row_can_see_has_a_page_of_its_own(
        steps in proptest::collection::vec((0usize..3, 1usize..70, 0usize..9, 0usize..9), 1..60)
    ) {
        let mut memory = memory(3);
        let mut open: Vec<Sequence> = (0..3).map(|_| memory.open().unwrap()).collect();
        // Pages that each had to give back, as no more than its share is its own.
        let share = memory.size().pages(Some(WINDOW));
        let mut given = vec![0; 3];
        for (s, certain, tentative, forget) in steps {
            let mut batch = Batch::default();
            let tokens = vec![0; certain + tentative];
            if memory.push(&mut batch, &mut open[s], &tokens, certain).is_err() {
                let mut fresh = memory.open();
                prop_assert!(fresh.is_err());
                memory.close(open.swap_remove(s));
                given.swap_remove(s);
                fresh = memory.open();
                open.push(fresh.unwrap());
                given.push(0);
                continue;
            }
            let pages = open[s].len().div_ceil(PAGE_ROWS);
            given[s] = given[s].max(pages.saturating_sub(share));
            let len = open[s].len() - forget.min(tentative);
            memory.truncate(&mut open[s], len);
            for (g, window) in [Some(WINDOW), None].into_iter().enumerate() {
                let mut taken = std::collections::HashSet::new();
                for (sequence, &given) in open.iter().zip(&given) {
                    let first = window.map_or(0, |w| (sequence.len() + 1).saturating_sub(w));
                    let table = &sequence.tables[g];
                    prop_assert_eq!(table.len(), sequence.len().div_ceil(PAGE_ROWS));
                    let gone = table.iter().take_while(|&&page| page == NO_PAGE).count();
                    prop_assert!(gone * PAGE_ROWS <= first, "{} pages of {:?}", gone, table);
                    prop_assert_eq!(gone, window.map_or(0, |_| given), "{:?}", table);
                    for &page in &table[gone..] {
                        prop_assert!(page != NO_PAGE && taken.insert(page), "{:?}", table);
                    }
                }
                let pools = Pools::lock(&memory.pools);
                prop_assert_eq!(taken.len() + pools.pages[g].n_free(), pools.pages[g].n_pages());
            }
        }
    }

    #[test]
    fn a_sequence_alone_never_runs_out_of_its_share(chunks in proptest::collection::vec(1usize..70, 1..40)) {
        let mut memory = memory(1);
        let mut sequence = memory.open().unwrap();
        for n in chunks {
            let mut batch = Batch::default();
            match memory.push(&mut batch, &mut sequence, &vec![0; n + 16], n) {
                Ok(()) => memory.truncate(&mut sequence, batch.rows[n - 1].sees.end as usize),
                Err(e) => {
                    prop_assert_eq!(e, MemoryFull::Context(1000));
                    break;
                }
            }
        }
        memory.close(sequence);
        prop_assert_eq!(memory.pages_used().0, 0);
    }

    #[test]
    fn a_sequence_goes_back_to_where_all_is_seen(steps in proptest::collection::vec((1usize..70, 0usize..400), 1..40)) {
        let mut memory = memory(1);
        let mut sequence = memory.open().unwrap();
        for (n, back) in steps {
            if memory.push(&mut Batch::default(), &mut sequence, &vec![0; n], n).is_err() {
                memory.restore(&Reference, &mut sequence, 0);
                prop_assert_eq!(sequence.n_pages(), 0);
                continue;
            }
            let len = sequence.len().saturating_sub(back);
            let rows = memory.restorable(&sequence, len);
            // Nothing is gone before a window and more than a step have passed.
            prop_assert!(rows == len || rows == 0 && sequence.len() > WINDOW + 70);
            memory.restore(&Reference, &mut sequence, rows);
            prop_assert_eq!(sequence.len(), rows);
            for (table, window) in sequence.tables.iter().zip([Some(WINDOW), None]) {
                prop_assert_eq!(table.len(), rows.div_ceil(PAGE_ROWS));
                let first = window.map_or(0, |w| (rows + 1).saturating_sub(w) / PAGE_ROWS);
                let seen = table.iter().skip(first);
                prop_assert!(seen.clone().all(|&page| page != NO_PAGE), "{:?}", table);
            }
            prop_assert_eq!(sequence.n_pages(), memory.pages_used().0);
        }
    }
}

#[test]
#[should_panic(expected = "can be forgotten")]
fn certain_rows_cannot_be_forgotten() {
    let mut memory = memory(1);
    let mut sequence = memory.open().unwrap();
    memory
        .push(&mut Batch::default(), &mut sequence, &[1, 2, 3], 2)
        .unwrap();
    memory.truncate(&mut sequence, 1);
}

/// Columns of every projection of the [`Toy`].
const COLS: usize = 16;

/// A model of one layer a kind: windowed attention, full attention, and, if wanted, the gated
/// delta rule. A row's output depends on all rows before it that the row may see, bit by bit.
struct Toy {
    memory: Memory,
    weights: DeltaWeights,
}

/// One text in a [`Toy`]'s memory: what each of its rows was computed from, and came to.
struct Written {
    sequence: Sequence,
    tokens: Vec<u32>,
    outputs: Vec<Vec<u32>>,
}

impl Toy {
    fn new(sequences: usize, has_delta: bool) -> Self {
        let spec = DeltaSpec {
            slots: 0,
            key_heads: 1,
            value_heads: 1,
            key_dim: 4,
            value_dim: 4,
            conv_taps: 3,
        };
        let plan = MemoryPlan {
            delta: if has_delta { vec![spec] } else { vec![] },
            ..plan()
        };
        let size = MemorySize {
            sequences,
            context: 400,
            step_rows: 70,
            kv_format: KvFormat::both(&quant::kv::F32),
        };
        let column = |n: usize, value: f32| Reference.upload(1, n, &vec![value; n]);
        Toy {
            memory: Memory::new(&Reference, plan, size),
            weights: DeltaWeights {
                conv: Reference.upload(12, 3, &(0..36).map(|i| noise(i, 7)).collect::<Vec<_>>()),
                decay: column(1, -0.3),
                dt_bias: column(1, 0.1),
            },
        }
    }

    fn open(&mut self) -> Result<Written, MemoryFull> {
        Ok(Written {
            sequence: self.memory.open()?,
            tokens: Vec::new(),
            outputs: Vec::new(),
        })
    }

    /// Runs `tokens` after `text` in one step, the first `certain` of them for good.
    fn push(
        &mut self,
        text: &mut Written,
        tokens: &[u32],
        certain: usize,
    ) -> Result<(), MemoryFull> {
        let mut batch = Batch::default();
        let memory = &mut self.memory;
        memory.push(&mut batch, &mut text.sequence, tokens, certain)?;
        let n = tokens.len();
        let rows = |cols: usize, salt: u32| {
            let values = tokens
                .iter()
                .flat_map(|&t| (0..cols).map(move |c| (t, c as u32)));
            let values: Vec<f32> = values.map(|(t, c)| noise(t, 31 * salt + c)).collect();
            Reference.upload(n, cols, &values)
        };
        let mut outputs = vec![Vec::new(); n];
        let mut add = |x: &backend::Tensor| {
            for (row, values) in outputs
                .iter_mut()
                .zip(Reference.download(x).chunks(x.cols()))
            {
                row.extend(values.iter().map(|v| v.to_bits()));
            }
        };
        for (group, window) in [Some(WINDOW), None].into_iter().enumerate() {
            let kv = &mut memory.kv[group][0];
            let salt = group as u32;
            Reference.kv_append(kv, &rows(COLS, salt), &rows(COLS, salt + 2), group, &batch);
            let attention = Attention {
                group,
                heads: 1,
                scale: 0.25,
                window,
            };
            add(&Reference.attend(&rows(COLS, salt + 4), kv, &attention, &batch));
        }
        for state in &mut memory.delta {
            let (qkv, b, a) = (rows(12, 6), rows(1, 7), rows(1, 8));
            add(&Reference.gated_delta(state, &self.weights, &qkv, &b, &a, &batch));
        }
        text.tokens.extend_from_slice(tokens);
        text.outputs.extend(outputs);
        Ok(())
    }

    /// Makes `text` forget what its sequence has forgotten.
    fn forget(text: &mut Written) {
        text.tokens.truncate(text.sequence.len());
        text.outputs.truncate(text.sequence.len());
    }

    /// Asserts that each page has as many owners as tables name it, and that pages without
    /// one are free; likewise slots and snapshots.
    fn check_owners(&self, texts: &[Written]) {
        let pools = Pools::lock(&self.memory.pools);
        for (g, pool) in pools.pages.iter().enumerate() {
            let named = |page: u32| {
                let tables = texts.iter().flat_map(|text| &text.sequence.tables[g]);
                tables.filter(|&&p| p == page).count()
            };
            let owners = (0..pool.n_pages() as u32).map(|page| (named(page), pool.owners(page)));
            let owners: Vec<(usize, usize)> = owners.collect();
            assert!(
                owners.iter().all(|(named, owners)| named == owners),
                "{owners:?}"
            );
            let free = owners.iter().filter(|(_, owners)| *owners == 0);
            assert_eq!(free.count(), pool.n_free());
        }
        assert_eq!(pools.slots.n_free() + texts.len(), pools.slots.n_pages());
    }
}

/// A number in -1..1 that depends on a token and a salt.
fn noise(token: u32, salt: u32) -> f32 {
    let x = (token + 1).wrapping_mul(0x9e37_79b9) ^ salt.wrapping_mul(0x85eb_ca6b);
    let x = (x ^ (x >> 15)).wrapping_mul(0x2c1b_3c6d);
    (x >> 8) as f32 / (1 << 23) as f32 - 1.0
}

/// What can happen to one of several texts.
#[derive(Clone, Debug)]
enum Event {
    /// So many certain and tentative rows, and how many of the latter are rolled back.
    Push(usize, usize, usize),
    Snapshot,
    /// Another one begins with rows up to so many.
    Fork(usize),
    /// The sequence goes back to so many rows, or as many fewer as it must.
    Restore(usize),
    Close,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        6 => (1usize..70, 0usize..9, 0usize..9).prop_map(|(n, t, f)| Event::Push(n, t, f.min(t))),
        2 => Just(Event::Snapshot),
        3 => (0usize..300).prop_map(Event::Fork),
        2 => (0usize..300).prop_map(Event::Restore),
        1 => Just(Event::Close),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// Whatever several texts do that share pages, each row comes to what it comes to in a
    /// text that was alone from its start: no page or state is written by two owners.
    #[test]
    fn texts_that_share_pages_are_as_if_alone(
        has_delta: bool,
        events in proptest::collection::vec((0usize..4, event()), 1..50),
    ) {
        let mut toy = Toy::new(4, has_delta);
        let mut texts = vec![toy.open().unwrap()];
        let mut next = 0;
        let mut shared = 0;
        for (i, event) in events {
            if texts.is_empty() {
                texts.push(toy.open().unwrap());
            }
            let i = i % texts.len();
            let text = &mut texts[i];
            match event {
                Event::Push(certain, tentative, forget) => {
                    let tokens: Vec<u32> = (next..).take(certain + tentative).collect();
                    next += tokens.len() as u32;
                    match toy.push(text, &tokens, certain) {
                        Ok(()) => {
                            let len = text.sequence.len() - forget;
                            toy.memory.truncate(&mut text.sequence, len);
                            Toy::forget(text);
                        }
                        Err(full) => prop_assert_eq!(full, MemoryFull::Context(400)),
                    }
                }
                // At the end of a page, as only whole pages are shared.
                Event::Snapshot => {
                    let missing = text.sequence.len().next_multiple_of(PAGE_ROWS) - text.sequence.len();
                    let tokens: Vec<u32> = (next..).take(missing.max(1)).collect();
                    next += tokens.len() as u32;
                    if toy.push(text, &tokens, tokens.len()).is_ok() {
                        toy.memory.snapshot(&Reference, &mut text.sequence);
                    }
                }
                Event::Fork(len) => {
                    let rows = toy.memory.forkable(&text.sequence, len);
                    prop_assert!(rows <= len && rows.is_multiple_of(PAGE_ROWS));
                    match toy.memory.fork(&Reference, &text.sequence, rows) {
                        Ok(sequence) => {
                            shared += rows;
                            prop_assert_eq!(sequence.len(), rows);
                            let fork = Written {
                                sequence,
                                tokens: text.tokens[..rows].to_vec(),
                                outputs: text.outputs[..rows].to_vec(),
                            };
                            texts.push(fork);
                        }
                        Err(full) => prop_assert_eq!((full, texts.len()), (MemoryFull::Sequences(4), 4)),
                    }
                }
                Event::Restore(len) => {
                    let rows = toy.memory.restorable(&text.sequence, len);
                    prop_assert!(rows <= len);
                    toy.memory.restore(&Reference, &mut text.sequence, rows);
                    Toy::forget(text);
                }
                Event::Close => drop(texts.swap_remove(i)),
            }
            toy.check_owners(&texts);
        }
        // A cold start of each: one row a step would give the same bits as any other way.
        for text in &texts {
            let mut alone = Toy::new(1, has_delta);
            let mut cold = alone.open().unwrap();
            for tokens in text.tokens.chunks(70) {
                alone.push(&mut cold, tokens, tokens.len()).unwrap();
            }
            prop_assert!(cold.outputs == text.outputs, "of {} rows, {shared} shared in all", text.tokens.len());
        }
        drop(texts);
        prop_assert_eq!(toy.memory.pages_used().0, 0);
        let pools = Pools::lock(&toy.memory.pools);
        prop_assert_eq!(pools.snapshots.n_free(), pools.snapshots.n_pages());
    }
}

/// A text of `n` certain rows, of which the first 64 were snapshot.
fn written(toy: &mut Toy, n: u32) -> Written {
    let mut text = toy.open().unwrap();
    for (i, tokens) in (0..n).collect::<Vec<u32>>().chunks(PAGE_ROWS).enumerate() {
        toy.push(&mut text, tokens, tokens.len()).unwrap();
        if i == 0 {
            toy.memory.snapshot(&Reference, &mut text.sequence);
        }
    }
    text
}

#[test]
fn two_live_sequences_share_the_pages_of_their_prefix() {
    for (has_delta, shared) in [(false, 128), (true, 64)] {
        let mut toy = Toy::new(2, has_delta);
        let first = written(&mut toy, 150);
        let rows = toy.memory.forkable(&first.sequence, 149);
        assert_eq!(rows, shared, "whole pages, and where there is a snapshot");
        let used = toy.memory.pages_used().0;
        let second = toy.memory.fork(&Reference, &first.sequence, rows).unwrap();
        assert_eq!(toy.memory.pages_used().0, used, "a fork takes no page");
        assert_eq!(second.n_pages(), 2 * rows / PAGE_ROWS);
        let both = [&first.sequence, &second];
        assert_eq!(toy.memory.pages_only_of(both.into_iter()), used);
        let only = toy.memory.pages_only_of([&second].into_iter());
        assert_eq!(only, 0, "all of its pages have two owners");
        drop(first);
        assert_eq!(
            toy.memory.pages_used().0,
            second.n_pages(),
            "the prefix stays"
        );
        drop(second);
        assert_eq!((toy.memory.pages_used().0, toy.memory.n_open()), (0, 0));
    }
}

#[test]
fn a_sequence_does_not_go_back_into_a_page_that_another_one_reads() {
    let mut toy = Toy::new(2, false);
    let first = written(&mut toy, 150);
    assert_eq!(toy.memory.restorable(&first.sequence, 100), 100);
    let second = toy.memory.fork(&Reference, &first.sequence, 128).unwrap();
    assert_eq!(toy.memory.restorable(&first.sequence, 100), 64);
    assert_eq!(toy.memory.restorable(&first.sequence, 140), 140);
    assert_eq!(toy.memory.restorable(&second, 100), 64);
    drop(second);
    assert_eq!(toy.memory.restorable(&first.sequence, 100), 100);
}

#[test]
fn rows_that_may_be_rolled_back_are_not_shared() {
    let mut toy = Toy::new(2, false);
    let mut text = toy.open().unwrap();
    let tokens: Vec<u32> = (0..70).collect();
    toy.push(&mut text, &tokens, 60).unwrap();
    assert_eq!(toy.memory.forkable(&text.sequence, 70), 0);
    toy.push(&mut text, &[1], 1).unwrap();
    assert_eq!(toy.memory.forkable(&text.sequence, 70), 64);
}

#[test]
fn a_fork_computes_what_the_first_sequence_did() {
    for has_delta in [false, true] {
        let mut toy = Toy::new(2, has_delta);
        let first = written(&mut toy, 150);
        let rows = toy.memory.forkable(&first.sequence, 149);
        let mut fork = Written {
            sequence: toy.memory.fork(&Reference, &first.sequence, rows).unwrap(),
            tokens: first.tokens[..rows].to_vec(),
            outputs: first.outputs[..rows].to_vec(),
        };
        for tokens in first.tokens[rows..].chunks(50) {
            toy.push(&mut fork, tokens, tokens.len()).unwrap();
        }
        assert_eq!(fork.outputs, first.outputs, "recurrent state: {has_delta}");
    }
}
