//! What a memory promises, tried by random interleavings of what can be asked of it.

use crate::memory::Pools;
use crate::{
    GroupPlan, KeptSize, KvLayer, KvPlan, Memory, MemoryFull, MemoryPlan, MemorySize, Sequence,
};
use backend::{
    Attention, Batch, DeltaSpec, DeltaWeights, NO_PAGE, Ops, PAGE_ROWS, Reference, Store,
};
use proptest::prelude::*;

mod sizes;

const WINDOW: usize = 100;

fn plan() -> MemoryPlan {
    let group = |window| GroupPlan {
        window,
        layers: vec![KvLayer {
            heads: 1,
            head_dim: COLS,
            query_heads: 1,
            edge: None,
        }],
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
        kv_format: KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    };
    Memory::new(&Reference, plan(), size)
}

proptest! {
    #[test]
    fn every_row_a_later_row_can_see_has_a_page_of_its_own(
        steps in proptest::collection::vec((0usize..3, 1usize..95, 0usize..9, 0usize..9), 1..60)
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
            let beside = memory.full_pages_beside(open.iter());
            prop_assert_eq!(beside, memory.n_free_full_pages());
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
    fn a_fork_begins_where_all_is_seen(steps in proptest::collection::vec((1usize..70, 0usize..400), 1..40)) {
        let mut memory = memory(2);
        let mut sequence = memory.open().unwrap();
        for (n, back) in steps {
            if memory.push(&mut Batch::default(), &mut sequence, &vec![0; n], n).is_err() {
                drop(sequence);
                sequence = memory.open().unwrap();
                continue;
            }
            let len = sequence.len().saturating_sub(back);
            let rows = memory.forkable(&sequence, len);
            // Nothing is gone before a window and more than a step have passed.
            prop_assert!(rows == len || rows == 0 && sequence.len() > WINDOW + 70);
            let fork = memory.fork(&Reference, &sequence, rows).unwrap();
            prop_assert_eq!(fork.len(), rows);
            for (table, window) in fork.tables.iter().zip([Some(WINDOW), None]) {
                prop_assert_eq!(table.len(), rows.div_ceil(PAGE_ROWS));
                let first = window.map_or(0, |w| (rows + 1).saturating_sub(w) / PAGE_ROWS);
                let seen = table.iter().skip(first);
                prop_assert!(seen.clone().all(|&page| page != NO_PAGE), "{:?}", table);
            }
            // Pages that both have are theirs once.
            let beside = memory.full_pages_beside([&sequence, &fork].into_iter());
            prop_assert_eq!(beside, memory.n_free_full_pages());
            sequence = fork;
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
    is_kept: bool,
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
            kv_format: KvPlan::both(&quant::kv::F32),
            running_pages: None,
            kept: KeptSize::default(),
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
            is_kept: false,
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

    /// Asserts that each page has as many owners as tables and snapshots name it, and that
    /// pages and slots without one are free.
    fn check_owners(&self, texts: &[Written]) {
        let all = texts.iter().flat_map(|text| text.sequence.snapshots());
        let mut snapshots: Vec<_> = all.collect();
        snapshots.sort_by_key(|s| std::sync::Arc::as_ptr(s));
        snapshots.dedup_by_key(|s| std::sync::Arc::as_ptr(s));
        let held: Vec<_> = snapshots.iter().filter_map(|s| s.held()).collect();
        let pools = Pools::lock(&self.memory.pools);
        for (g, pool) in pools.pages.iter().enumerate() {
            let tables = texts.iter().flat_map(|text| &text.sequence.tables[g]);
            let windows = held.iter().filter_map(|held| held.windows.get(g));
            let named = tables.chain(windows.flat_map(|(_, pages)| pages));
            let mut owners = vec![0; pool.n_pages()];
            named
                .filter(|&&p| p != NO_PAGE)
                .for_each(|&p| owners[p as usize] += 1);
            let counted: Vec<usize> = (0..pool.n_pages() as u32).map(|p| pool.owners(p)).collect();
            assert_eq!(owners, counted);
            let free = owners.iter().filter(|&&owners| owners == 0);
            assert_eq!(free.count(), pool.n_free());
        }
        let running = texts.iter().filter(|text| !text.is_kept).count();
        assert_eq!(pools.n_open, running);
        let saved = held.iter().filter(|held| held.slot.is_some()).count();
        assert_eq!(
            pools.slots.n_free() + running + saved,
            pools.slots.n_pages()
        );
    }

    /// Does `work`; where there is no room for it, forgets one of the kept `texts` after the other,
    /// and then snapshots of running ones, until there is.
    fn with_room<T>(
        &mut self,
        texts: &mut Vec<Written>,
        mut work: impl FnMut(&mut Self, &mut Vec<Written>) -> Result<T, MemoryFull>,
    ) -> Result<T, MemoryFull> {
        loop {
            match work(self, texts) {
                Err(MemoryFull::Pages(_) | MemoryFull::Snapshots(_)) => {}
                done => return done,
            }
            // Never the first one, which work is done with.
            match texts.iter().skip(1).position(|text| text.is_kept) {
                Some(i) => drop(texts.remove(i + 1)),
                None => {
                    let all = texts.iter().flat_map(|text| text.sequence.snapshots());
                    let mut all = all.filter(|s| !s.is_freed()).peekable();
                    assert!(all.peek().is_some(), "running texts alone always have room");
                    all.for_each(|snapshot| snapshot.free());
                }
            }
        }
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
    /// A snapshot of all certain rows, at the most.
    Snapshot,
    /// Another one begins with rows up to so many.
    Fork(usize),
    /// The text has ended.
    Keep,
    /// A text that has ended loses its rows from so many on.
    Cut(usize),
    Close,
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        8 => (1usize..70, 0usize..9, 0usize..9).prop_map(|(n, t, f)| Event::Push(n, t, f.min(t))),
        3 => Just(Event::Snapshot),
        5 => (0usize..300).prop_map(Event::Fork),
        2 => Just(Event::Keep),
        1 => (0usize..300).prop_map(Event::Cut),
        1 => Just(Event::Close),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever several texts do that share pages, each row comes to what it comes to in a
    /// text that was alone from its start: no row or state is written by two owners.
    #[test]
    fn texts_that_share_pages_are_as_if_alone(
        has_delta: bool,
        events in proptest::collection::vec((0usize..8, event()), 1..60),
    ) {
        let mut toy = Toy::new(4, has_delta);
        let mut texts: Vec<Written> = Vec::new();
        let mut next = 0;
        for (i, event) in events {
            if texts.iter().all(|text| text.is_kept) {
                let open = |toy: &mut Toy, _: &mut Vec<Written>| toy.open();
                let text = toy.with_room(&mut texts, open);
                texts.push(text.unwrap());
            }
            let i = i % texts.len();
            texts.swap(0, i);
            let text = &mut texts[0];
            match event {
                Event::Push(certain, tentative, forget) if !text.is_kept => {
                    let tokens: Vec<u32> = (next..).take(certain + tentative).collect();
                    next += tokens.len() as u32;
                    let push = |toy: &mut Toy, texts: &mut Vec<Written>| toy.push(&mut texts[0], &tokens, certain);
                    let pushed = toy.with_room(&mut texts, push);
                    let text = &mut texts[0];
                    match pushed {
                        Ok(()) => {
                            let len = text.sequence.len() - forget;
                            toy.memory.truncate(&mut text.sequence, len);
                            Toy::forget(text);
                        }
                        Err(full) => prop_assert_eq!(full, MemoryFull::Context(400)),
                    }
                }
                Event::Snapshot if !text.is_kept => {
                    let rows = text.sequence.certain();
                    if toy.memory.has_for_snapshot(&text.sequence, rows) {
                        toy.memory.snapshot(&Reference, &mut text.sequence, rows);
                    }
                }
                Event::Fork(len) => {
                    let fork = |toy: &mut Toy, texts: &mut Vec<Written>| {
                        let text = &texts[0];
                        let rows = toy.memory.forkable(&text.sequence, len);
                        assert!(rows <= len);
                        let sequence = toy.memory.fork(&Reference, &text.sequence, rows)?;
                        assert_eq!(sequence.len(), rows);
                        Ok(Written {
                            sequence,
                            tokens: text.tokens[..rows].to_vec(),
                            outputs: text.outputs[..rows].to_vec(),
                            is_kept: false,
                        })
                    };
                    match toy.with_room(&mut texts, fork) {
                        Ok(fork) => texts.push(fork),
                        Err(full) => prop_assert_eq!(full, MemoryFull::Sequences(4)),
                    }
                }
                Event::Keep if !text.is_kept => {
                    toy.memory.keep(&mut text.sequence);
                    text.is_kept = true;
                }
                Event::Cut(rows) if text.is_kept => {
                    toy.memory.cut(&mut text.sequence, rows);
                    Toy::forget(text);
                }
                Event::Close => drop(texts.swap_remove(0)),
                _ => {}
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
            prop_assert!(cold.outputs == text.outputs, "of {} rows", text.tokens.len());
        }
        drop(texts);
        prop_assert_eq!(toy.memory.pages_used().0, 0);
        let pools = Pools::lock(&toy.memory.pools);
        prop_assert_eq!(pools.slots.n_free(), pools.slots.n_pages());
    }
}

/// A text of `n` certain rows, of which the first 64 were snapshot.
fn written(toy: &mut Toy, n: u32) -> Written {
    let mut text = toy.open().unwrap();
    for (i, tokens) in (0..n).collect::<Vec<u32>>().chunks(PAGE_ROWS).enumerate() {
        toy.push(&mut text, tokens, tokens.len()).unwrap();
        if i == 0 {
            assert!(
                toy.memory
                    .snapshot(&Reference, &mut text.sequence, PAGE_ROWS)
            );
        }
    }
    text
}

#[test]
fn sequences_share_the_whole_pages_of_their_prefix() {
    for (has_delta, shared) in [(false, 149), (true, 64)] {
        let mut toy = Toy::new(2, has_delta);
        let mut first = written(&mut toy, 150);
        let rows = toy.memory.forkable(&first.sequence, 149);
        assert_eq!(rows, shared, "to the row, or where there is a snapshot");
        let used = toy.memory.pages_used().0;
        let second = toy.memory.fork(&Reference, &first.sequence, rows).unwrap();
        let copied = if has_delta { 0 } else { 2 };
        assert_eq!(toy.memory.pages_used().0, used + copied);
        let both = [&first.sequence, &second];
        assert_eq!(toy.memory.pages_only_of(both.into_iter()), used + copied);
        let only = toy.memory.pages_only_of([&second].into_iter());
        assert_eq!(only, copied, "its other pages have two owners");
        toy.memory.keep(&mut first.sequence);
        assert_eq!(toy.memory.n_open(), 1, "a kept sequence is not open");
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
fn a_kept_sequence_goes_on_at_its_end_and_at_its_snapshots() {
    for has_delta in [false, true] {
        let mut toy = Toy::new(2, has_delta);
        let mut text = written(&mut toy, 150);
        // Three tentative rows, of which two stay.
        toy.push(&mut text, &[200, 201, 202, 203], 1).unwrap();
        toy.memory.truncate(&mut text.sequence, 153);
        Toy::forget(&mut text);
        toy.memory.keep(&mut text.sequence);
        let rows = |len| toy.memory.forkable(&text.sequence, len);
        let ends = [500, 153, 152, 151, 150, 64].map(rows);
        match has_delta {
            true => assert_eq!(ends, [153, 153, 152, 151, 64, 64]),
            false => assert_eq!(ends, [153, 153, 152, 151, 150, 64]),
        }
        for rows in [153, 152, 64] {
            let mut fork = Written {
                sequence: toy.memory.fork(&Reference, &text.sequence, rows).unwrap(),
                tokens: text.tokens[..rows].to_vec(),
                outputs: text.outputs[..rows].to_vec(),
                is_kept: false,
            };
            let tokens: Vec<u32> = (300..370).collect();
            toy.push(&mut fork, &tokens, 70).unwrap();
            let mut alone = Toy::new(1, has_delta);
            let mut cold = alone.open().unwrap();
            for tokens in fork.tokens.chunks(70) {
                alone.push(&mut cold, tokens, tokens.len()).unwrap();
            }
            assert!(
                cold.outputs == fork.outputs,
                "{rows} rows, recurrent state: {has_delta}"
            );
        }
        toy.memory.cut(&mut text.sequence, 100);
        let left = toy.memory.forkable(&text.sequence, 500);
        assert_eq!(left, if has_delta { 64 } else { 100 });
    }
}

#[test]
fn a_sequence_that_is_rewound_goes_on_as_if_it_had_guessed_nothing() {
    for has_delta in [false, true] {
        let mut toy = Toy::new(1, has_delta);
        let mut text = toy.open().unwrap();
        let mut alone = Toy::new(1, has_delta);
        let mut want = alone.open().unwrap();
        for step in 0..9u32 {
            let tokens: Vec<u32> = (40 * step..40 * step + 40).collect();
            // The newest row is tentative, as that of a pending token.
            toy.push(&mut text, &tokens, 39).unwrap();
            alone.push(&mut want, &tokens, 39).unwrap();
            let mark = toy.memory.mark(&Reference, &text.sequence).unwrap();
            for guess in 0..step {
                toy.push(&mut text, &[1000 + guess], 0).unwrap();
            }
            toy.memory.rewind(&mut text.sequence, mark);
            Toy::forget(&mut text);
            assert_eq!(text.sequence.certain(), want.sequence.certain());
            assert_eq!(text.outputs, want.outputs, "recurrent state: {has_delta}");
            toy.check_owners(std::slice::from_ref(&text));
        }
    }
}

#[test]
fn a_snapshot_has_the_rows_of_windows_that_the_sequence_gives_back() {
    let mut toy = Toy::new(2, false);
    let text = written(&mut toy, 390);
    assert!(text.sequence.tables[0][0] == NO_PAGE, "out of the window");
    assert_eq!(toy.memory.forkable(&text.sequence, 120), 64);
    let fork = toy.memory.fork(&Reference, &text.sequence, 64).unwrap();
    let mut fork = Written {
        sequence: fork,
        tokens: text.tokens[..64].to_vec(),
        outputs: text.outputs[..64].to_vec(),
        is_kept: false,
    };
    toy.push(&mut fork, &text.tokens[64..120], 56).unwrap();
    assert_eq!(fork.outputs, text.outputs[..120]);
    text.sequence.snapshots()[0].free();
    assert_eq!(toy.memory.forkable(&text.sequence, 120), 0);
}

#[test]
fn rows_that_may_be_rolled_back_are_not_shared() {
    let mut toy = Toy::new(2, false);
    let mut text = toy.open().unwrap();
    let tokens: Vec<u32> = (0..70).collect();
    toy.push(&mut text, &tokens, 60).unwrap();
    assert_eq!(toy.memory.forkable(&text.sequence, 70), 60);
    toy.push(&mut text, &[1], 1).unwrap();
    assert_eq!(toy.memory.forkable(&text.sequence, 70), 70);
}

#[test]
fn room_for_ended_texts_is_what_the_budget_buys() {
    let size = *memory(2).size();
    for delta in [false, true] {
        let mut plan = plan();
        if delta {
            plan.delta = Toy::new(1, true).memory.plan().delta.clone();
        }
        let all = |size: &MemorySize| Memory::bytes(&plan, size);
        let bytes = |kept| all(&MemorySize { kept, ..size });
        let none = bytes(KeptSize::default());
        assert_eq!(KeptSize::within(0, &size, all), KeptSize::default());
        for budget in [100_000, 1_000_000] {
            let kept = KeptSize::within(budget, &size, all);
            assert!(kept.pages > 0 && kept.snapshots > 0);
            let taken = bytes(kept) - none;
            assert!(
                (budget as usize / 2..=budget as usize).contains(&taken),
                "{taken} of {budget}"
            );
        }
    }
}

/// A plan with a window, full attention and recurrent state, or without the last.
fn mixed_plan(has_state: bool) -> MemoryPlan {
    MemoryPlan {
        delta: if has_state {
            vec![delta_spec()]
        } else {
            vec![]
        },
        ..plan()
    }
}

fn delta_spec() -> DeltaSpec {
    DeltaSpec {
        slots: 0,
        key_heads: 1,
        value_heads: 1,
        key_dim: 2,
        value_dim: 2,
        conv_taps: 2,
    }
}

/// A memory of [`mixed_plan`] for three sequences.
fn mixed(has_state: bool) -> Memory {
    let size = MemorySize {
        running_pages: None,
        kept: KeptSize {
            pages: 8,
            snapshots: 3,
        },
        ..*memory(3).size()
    };
    Memory::new(&Reference, mixed_plan(has_state), size)
}

/// A kept sequence of 400 rows with a snapshot after 130 and after 290, whose pages all differ.
fn kept_sequence(memory: &mut Memory) -> Sequence {
    let mut sequence = memory.open().unwrap();
    for n in [65, 65, 64, 66, 30, 60, 50] {
        let mut batch = Batch::default();
        memory
            .push(&mut batch, &mut sequence, &vec![0; n], n)
            .unwrap();
        if [130, 290].contains(&sequence.len()) {
            let rows = sequence.len();
            assert!(memory.snapshot(&Reference, &mut sequence, rows));
        }
    }
    for (g, layers) in memory.kv.iter_mut().enumerate() {
        for kv in layers {
            for page in 0..kv.spec.pages {
                let mut bytes = Reference.kv_save(kv, page);
                bytes.fill((10 * g + page) as u8);
                assert!(Reference.kv_load(kv, page, &bytes));
            }
        }
    }
    memory.keep(&mut sequence);
    sequence
}

#[test]
fn a_restored_sequence_has_the_bytes_of_the_one_that_was_saved() {
    for has_state in [false, true] {
        let mut from = mixed(has_state);
        let sequence = kept_sequence(&mut from);
        let (outline, pieces) = from.outline(&sequence);
        assert!(from.has_all_of(&sequence, &outline));
        let mut to = mixed(has_state);
        assert!(to.fits(&outline, pieces.len()));
        let mut depths = 0;
        for rows in 1..=400 {
            assert_eq!(
                from.forkable(&sequence, rows),
                to.restorable(&outline, rows)
            );
            if to.restorable(&outline, rows) < rows {
                continue;
            }
            depths += 1;
            let (restored, places) = to.restore(&outline, rows).unwrap();
            assert_eq!(places.len(), pieces.len());
            assert_eq!(to.forkable(&restored, rows), rows, "{has_state}");
            for (place, &piece) in places.into_iter().zip(&pieces) {
                let bytes = from.save_piece(&Reference, piece);
                let Some(place) = place else { continue };
                assert!(!to.load_piece(&Reference, place, &bytes[1..]));
                assert!(to.load_piece(&Reference, place, &bytes));
                assert_eq!(to.save_piece(&Reference, place), bytes);
            }
            drop(restored);
            let pools = Pools::lock(&to.pools);
            let all = pools.pages.iter().chain([&pools.slots]);
            assert!(
                all.clone().all(|pool| pool.n_free() == pool.n_pages()),
                "{rows}"
            );
        }
        assert!(depths >= 3, "{depths} depths");
    }
}

proptest! {
    #[test]
    fn an_outline_from_anywhere_fits_or_is_refused_and_never_panics(
        has_state: bool,
        edits in proptest::collection::vec((0usize..9, 0usize..8, 0u32..500), 1..4),
    ) {
        let mut from = mixed(has_state);
        let sequence = kept_sequence(&mut from);
        let (mut outline, pieces) = from.outline(&sequence);
        for (what, at, to) in edits {
            let value = if to > 480 { u32::MAX } else { to / 3 };
            let group = at % 2;
            let n = outline.snapshots.len();
            match what {
                0 => outline.rows = value as usize,
                1 => outline.n_pages[group] = value as usize,
                2 => if let Some(page) = outline.tables[group].get_mut(at) { *page = value },
                3 => outline.tables[group].truncate(at),
                4 if n > 0 => outline.snapshots[at % n].base = value as usize,
                5 if n > 0 => outline.snapshots[at % n].len = value as usize,
                6 if n > 0 => outline.snapshots[at % n].has_state ^= true,
                7 if n > 0 => outline.snapshots[at % n].windows.truncate(at % 3),
                8 if n > 0 => {
                    let windows = &mut outline.snapshots[at % n].windows;
                    windows.iter_mut().for_each(|(_, pages)| pages.extend([value; 1]));
                }
                _ => {}
            }
        }
        let mut to = mixed(has_state);
        if to.fits(&outline, pieces.len()) {
            for rows in 0..=outline.rows.min(1000) {
                let rows = to.restorable(&outline, rows);
                if let Ok((restored, _)) = to.restore(&outline, rows) {
                    let rows = to.forkable(&restored, rows);
                    drop(to.fork(&Reference, &restored, rows));
                }
            }
        }
    }
}
