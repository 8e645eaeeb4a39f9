//! Texts of any length that nobody computed, and the times of steps and drafts behind them.

use crate::head::Head;
use backend::{Backend, Batch, Chain, Link, PAGE_ROWS, StepKey, Tensor, TokenChoice};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use models::Target;
use serde_json::{Value, json};
use speculate::Sampling;
use std::time::Instant;

/// The middle one of some times.
pub(crate) fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// A token that differs from its neighbors.
pub(crate) fn token(i: usize) -> u32 {
    (i.wrapping_mul(2_654_435_761) % 200_000) as u32
}

/// Lengthens `sequence` to `context` rows without computing them.
pub(crate) fn extend(memory: &mut Memory, sequence: &mut cache::Sequence, context: usize) {
    let mut batch = Batch::default();
    while sequence.len() < context {
        batch.clear();
        let tokens: Vec<u32> = (sequence.len()..context.min(sequence.len() + 2048))
            .map(token)
            .collect();
        memory
            .push(&mut batch, sequence, &tokens, tokens.len())
            .unwrap();
        let len = sequence.len();
        memory.truncate(sequence, len);
    }
}

/// Gives all pages of an empty `memory` the keys and values that `work` computes for the rows of one page. Where a system
/// hands out memory when it is first written, pages that nobody wrote are all the same few bytes, which stay in the
/// processor's cache.
fn fill_pages(b: &dyn Backend, memory: &mut Memory, work: impl FnOnce(&Batch, &mut Memory)) {
    let mut sequence = memory.open().unwrap();
    let mut batch = Batch::default();
    let tokens: Vec<u32> = (0..PAGE_ROWS).map(token).collect();
    memory
        .push(&mut batch, &mut sequence, &tokens, tokens.len())
        .unwrap();
    work(&batch, memory);
    b.finish().unwrap();
    for (group, layers) in memory.kv.iter_mut().enumerate() {
        let written = batch.page(0, group, 0);
        for kv in layers {
            let bytes = b.kv_save(kv, written);
            for page in (0..kv.spec.pages).filter(|&page| page != written) {
                assert!(b.kv_load(kv, page, &bytes));
            }
        }
    }
    b.finish().unwrap();
    memory.close(sequence);
}

/// Turns of a step that do not count, and then those whose median is taken: few where steps are not recorded, and take
/// long.
fn turns(b: &dyn Backend) -> (usize, usize) {
    if b.capabilities().records {
        (4, 20)
    } else {
        (1, 7)
    }
}

/// A text and the memory that it lies in.
pub(crate) struct Text<'a> {
    pub(crate) memory: &'a mut Memory,
    pub(crate) sequence: &'a mut cache::Sequence,
    pub(crate) key: StepKey,
}

/// Medians of the seconds that a recorded step takes which has `rows` rows of each of some texts, at their ends, and of those
/// until it is launched.
pub(crate) fn time_texts(
    b: &dyn Backend,
    target: &dyn Target,
    (memory, texts): (&mut Memory, &mut [cache::Sequence]),
    rows: usize,
    key: StepKey,
) -> (f64, f64) {
    let (mut whole, mut host) = (Vec::new(), Vec::new());
    let mut batch = Batch::default();
    let lengths: Vec<usize> = texts.iter().map(|text| text.len()).collect();
    let (warm_up, counted) = turns(b);
    for turn in 0..warm_up + counted {
        let start = Instant::now();
        batch.clear();
        let numbers = turn * texts.len()..;
        for (number, text) in numbers.zip(texts.iter_mut()) {
            let first = number * rows.max(8);
            let tokens: Vec<u32> = (first..first + rows).map(token).collect();
            memory.push(&mut batch, text, &tokens, 0).unwrap();
        }
        let (batch, kv) = (&batch, &mut *memory);
        let made = b.step(key, batch, &[], &mut |_| {
            let hidden = target.forward(b, batch, kv);
            let logits = target.logits(b, &hidden);
            vec![hidden, logits]
        });
        let launched = start.elapsed().as_secs_f64();
        b.argmax(&made[1]);
        b.finish().unwrap();
        if turn >= warm_up {
            whole.push(start.elapsed().as_secs_f64());
            host.push(launched);
        }
        for (text, &length) in texts.iter_mut().zip(&lengths) {
            memory.truncate(text, length);
        }
    }
    (median(whole), median(host))
}

impl Text<'_> {
    /// Medians of the seconds that a recorded step of `rows` rows takes at the text's end, and of those until it is
    /// launched.
    pub(crate) fn time_step(
        &mut self,
        b: &dyn Backend,
        target: &dyn Target,
        rows: usize,
    ) -> (f64, f64) {
        let text = std::slice::from_mut(&mut *self.sequence);
        time_texts(b, target, (&mut *self.memory, text), rows, self.key)
    }

    /// The median of the seconds that `tokens` guesses of `head` take, the text being the one that it reads: a chain, or
    /// where there are none, greedy steps one after the other.
    pub(crate) fn time_draft(
        &mut self,
        b: &dyn Backend,
        target: &dyn Target,
        head: &Head,
        hidden: &Tensor,
        sampling: &Sampling,
        tokens: usize,
    ) -> f64 {
        let (mut all, context) = (Vec::new(), self.sequence.len());
        let (warm_up, counted) = turns(b);
        for turn in 0..warm_up + counted {
            let start = Instant::now();
            let memory = &mut *self.memory;
            let mut batches = vec![Batch::default(); tokens];
            for batch in &mut batches {
                head.push(memory, batch, self.sequence, token(turn));
            }
            let choice = |i| vec![sampling.on_device(i).expect("no logit is edited")];
            let choices: Vec<Vec<TokenChoice>> = (0..tokens as u64).map(choice).collect();
            let chain = Chain {
                key: self.key,
                batches: &batches,
                choices: &choices,
                list: None,
                wants_confidences: false,
            };
            let made = b.chain(&chain, hidden, &mut |_, batch, x| {
                let (z, next) = head.guess(b, target, x, batch, memory);
                Link {
                    logits: head.logits(b, target, &z),
                    ids: None,
                    next: Some(next.unwrap_or(z)),
                }
            });
            match made {
                Some(made) => assert_eq!(made.tokens.len(), tokens),
                None => {
                    assert!(sampling.temperature <= 0.0, "steps one by one are greedy");
                    let mut previous: Option<(Tensor, u32)> = None;
                    for batch in &mut batches {
                        if let Some((_, token)) = previous {
                            batch.tokens = vec![token];
                        }
                        let x = previous.as_ref().map_or(hidden, |(x, _)| x);
                        let (z, next) = head.guess(b, target, x, batch, memory);
                        let token = b.argmax(&head.logits(b, target, &z))[0];
                        previous = Some((next.unwrap_or(z), token));
                    }
                }
            }
            b.finish().unwrap();
            if turn >= warm_up {
                all.push(start.elapsed().as_secs_f64());
            }
            self.memory.truncate(self.sequence, context);
        }
        median(all)
    }
}

/// Times steps, and drafts of three tokens, by context and format of the KV cache. On a device that shares the system's
/// memory, which records no steps, all of the cache is written before.
pub(crate) fn time_kv(
    b: &dyn Backend,
    target: &dyn Target,
    head: Option<&Head>,
    plans: &[KvPlan],
    of: &Value,
) {
    for &plan in plans {
        let size = MemorySize {
            sequences: 1,
            context: 101_000,
            step_rows: 2048,
            kv_format: plan,
            running_pages: None,
            kept: KeptSize::default(),
        };
        let mut memory = Memory::new(b, target.plan(), size);
        let plan_of_head = head.and_then(Head::plan);
        let mut head_memory = plan_of_head.map(|plan| Memory::new(b, plan, size));
        b.finish().unwrap();
        if !b.capabilities().records {
            let mut hidden = None;
            fill_pages(b, &mut memory, |batch, memory| {
                hidden = Some(target.forward(b, batch, memory));
            });
            if let (Some(head), Some(memory), Some(hidden)) = (head, &mut head_memory, hidden) {
                fill_pages(b, memory, |batch, memory| {
                    head.guess(b, target, &hidden, batch, memory);
                });
            }
        }
        for context in [1_000, 8_000, 32_000, 100_000] {
            let print = |what: String, of_it: Value| {
                let mut line = of.clone();
                let line_of = line.as_object_mut().unwrap();
                line_of.insert("what".into(), what.into());
                line_of.insert("kv".into(), plan.to_string().into());
                line_of.insert("context".into(), context.into());
                line_of.extend(of_it.as_object().unwrap().clone());
                println!("{line}");
            };
            let mut sequence = memory.open().unwrap();
            extend(&mut memory, &mut sequence, context);
            let key = StepKey::fresh();
            let mut text = Text {
                memory: &mut memory,
                sequence: &mut sequence,
                key,
            };
            let mut first = 0.0;
            for rows in [1, 2, 4, 8] {
                let (whole, _) = text.time_step(b, target, rows);
                if rows == 1 {
                    first = whole;
                }
                print(
                    "step".into(),
                    json!({"rows": rows, "ms": whole * 1e3, "against_one": whole / first,
                        "kv_bytes_a_token": target.plan().token_bytes(&plan)}),
                );
            }
            if let Some(head) = head {
                let hidden = b.upload(1, target.hidden_size(), &vec![0.5; target.hidden_size()]);
                let time = |memory: &mut Memory, sequence: &mut cache::Sequence| {
                    let mut text = Text {
                        memory,
                        sequence,
                        key: StepKey::fresh(),
                    };
                    let seconds =
                        text.time_draft(b, target, head, &hidden, &Sampling::default(), 3);
                    print("draft of 3".into(), json!({ "ms": seconds * 1e3 }));
                };
                match &mut head_memory {
                    Some(own) => {
                        let mut of_head = own.open().unwrap();
                        extend(own, &mut of_head, context);
                        time(own, &mut of_head);
                        own.close(of_head);
                    }
                    None => time(&mut memory, &mut sequence),
                }
            }
            memory.close(sequence);
        }
    }
}
