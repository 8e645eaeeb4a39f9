//! Rejection sampling keeps the distribution of texts: whole rounds on tiny models, where the
//! probability of every text can be computed.

use backend::{Backend, Batch};
use cache::{KeptSize, Memory, MemorySize};
use cpu::{Cpu, CpuOptions};
use models::{BlockHead, ChainedHead, Eagle3, Qwen35Mtp, Target, load_target};
use speculate::draft::{Block, Chained, Forced};
use speculate::sample::{self, Breakers, History, Mirostat, Scratch};
use speculate::{Accept, DraftLength, Drafter, Sampling, Speculator, StreamOptions};
use std::collections::BTreeMap;
use std::sync::Arc;
use suites::blocks::SeededBlock;
use suites::repository;
use weights::Checkpoint;

/// Texts written for each case.
const TEXTS: u64 = 4000;
/// Tokens of a text, the first of them without a draft.
const TOKENS: usize = 4;
/// The tokens that may be written, so that there are few texts. The EAGLE-3 heads of
/// the cases draft some of them, not all.
const ALPHABET: [u32; 3] = [6, 36, 50];
const PROMPT: [u32; 5] = [5, 17, 23, 9, 41];

fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint::open(&repository("tests/golden/checkpoints").join(name)).unwrap()
}

fn size() -> MemorySize {
    MemorySize {
        sequences: 1,
        context: 64,
        step_rows: 16,
        kv_format: cache::KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    }
}

/// What XTC does in the cases that have it.
const XTC_PROBABILITY: f32 = 0.4;

/// How the texts of a case are sampled.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// With temperature and penalties.
    Plain,
    /// With every sampler but mirostat.
    Shaped,
    /// With mirostat, whose bound each token moves.
    Mirostat,
}

fn sampling(vocab: usize, way: Way, seed: u64) -> Sampling {
    let plain = Sampling {
        temperature: 2.0,
        suppress: (0..vocab as u32)
            .filter(|t| !ALPHABET.contains(t))
            .collect(),
        presence_penalty: 0.7,
        seed,
        ..Sampling::default()
    };
    if way == Way::Plain {
        return plain;
    }
    if way == Way::Mirostat {
        return Sampling {
            mirostat: Mirostat::V2,
            mirostat_tau: 1.0,
            mirostat_eta: 0.7,
            ..plain
        };
    }
    Sampling {
        dynatemp_range: 1.0,
        dynatemp_exponent: 0.5,
        top_n_sigma: 4.0,
        xtc_probability: XTC_PROBABILITY,
        xtc_threshold: 0.4,
        dry_multiplier: 0.5,
        dry_allowed_length: 1,
        dry_breakers: Breakers::new([vec![ALPHABET[2]]]),
        ..plain
    }
}

/// How likely each token is to follow `text`, over all seeds: XTC acts on a part of them. `rows` are
/// the logits from which each token of the text was chosen, and those of the next.
fn next_probs(sampling: &Sampling, text: &[u32], rows: &[&[f32]]) -> BTreeMap<u32, f64> {
    let scratch = &mut Scratch::default();
    let mut history = History::new(sampling, &PROMPT);
    for (&token, row) in text.iter().zip(rows) {
        sample::observe(sampling, &mut history, 0, row, token, scratch);
        history.push(token);
    }
    let row = rows[text.len()];
    let acts = sampling.xtc_probability;
    let mut next = BTreeMap::new();
    for (xtc_probability, weight) in [(0.0, 1.0 - acts), (1.0, acts)] {
        let sampling = Sampling {
            xtc_probability,
            ..sampling.clone()
        };
        for (token, prob) in sample::token_probs(&sampling, &history, 0, None, row, scratch) {
            *next.entry(token).or_insert(0.0) += f64::from(weight) * f64::from(prob);
        }
    }
    next
}

/// The probability of every text.
fn text_probs(b: &dyn Backend, target: &dyn Target, way: Way) -> BTreeMap<Vec<u32>, f64> {
    let sampling = sampling(target.vocab_size(), way, 0);
    let mut texts = BTreeMap::from([(Vec::new(), 1.0)]);
    let mut bounded = false;
    for _ in 0..TOKENS {
        let mut longer = BTreeMap::new();
        for (text, probability) in texts {
            let mut memory = Memory::new(b, target.plan(), size());
            let mut sequence = memory.open().unwrap();
            let tokens: Vec<u32> = PROMPT.iter().chain(&text).copied().collect();
            let mut batch = Batch::default();
            memory
                .push(&mut batch, &mut sequence, &tokens, tokens.len())
                .unwrap();
            let hidden = target.forward(b, &batch, &mut memory);
            let choosing: Vec<usize> = (PROMPT.len() - 1..tokens.len()).collect();
            let logits = target.logits(b, &b.gather(&hidden, &choosing));
            let values = b.download(&logits);
            let rows: Vec<&[f32]> = values.chunks_exact(logits.cols()).collect();
            let next = next_probs(&sampling, &text, &rows);
            if way == Way::Mirostat {
                bounded |= next.len() < ALPHABET.len();
            } else {
                assert_eq!(next.len(), ALPHABET.len());
            }
            for (token, share) in next {
                let text = text.iter().copied().chain([token]).collect();
                longer.insert(text, probability * share);
            }
        }
        texts = longer;
    }
    assert_eq!(bounded, way == Way::Mirostat, "a bound rules tokens out");
    texts
}

#[test]
fn residual_acceptance_writes_texts_as_often_as_the_target_would() {
    let b: Arc<dyn Backend> = Arc::new(Cpu::new(CpuOptions::default()).unwrap());
    let head = |name: &str, target: &dyn Target| -> Box<dyn Drafter> {
        match name {
            "mtp" => {
                let head = Qwen35Mtp::load(&*b, &checkpoint("qwen3_5-dense"), target).unwrap();
                let memory = Memory::new(&*b, head.plan(), size());
                Box::new(Chained::new(head, memory))
            }
            // Always the same guess, of probability 1.
            "forced" => Box::new(Forced::new(|tokens: &[u32], limit| {
                vec![ALPHABET[tokens.len() % 2]; limit]
            })),
            "deepspec" | "dflash" | "gemma" => {
                let seeded = SeededBlock::new(name);
                let checkpoint = seeded.checkpoint();
                let head = BlockHead::load(&*b, &checkpoint, target, seeded.kind).unwrap();
                let memory = Memory::new(&*b, head.plan(), size());
                Box::new(Block::new(head, memory))
            }
            folder => {
                let head = Eagle3::load(&*b, &checkpoint(folder), target).unwrap();
                let memory = Memory::new(&*b, head.plan(), size());
                Box::new(Chained::new(head, memory))
            }
        }
    };
    for (model, drafter, way) in [
        ("gemma4-dense", "gemma4-dense-eagle3", Way::Plain),
        ("qwen3_5-dense", "qwen3_5-dense-eagle3", Way::Shaped),
        ("gemma4-dense", "dflash", Way::Plain),
        ("gemma4-dense", "gemma", Way::Shaped),
        ("qwen3_5-dense", "deepspec", Way::Shaped),
        ("qwen3_5-dense", "mtp", Way::Plain),
        ("qwen3_5-dense", "mtp", Way::Shaped),
        ("qwen3_5-dense", "mtp", Way::Mirostat),
        ("gemma4-dense", "forced", Way::Plain),
        ("gemma4-dense", "forced", Way::Shaped),
        ("gemma4-dense", "forced", Way::Mirostat),
    ] {
        let target = load_target(&*b, &checkpoint(model)).unwrap();
        let vocab = target.vocab_size();
        let text_probs = text_probs(&*b, &*target, way);
        let drafter = head(drafter, &*target);
        let name = format!("{model} with {}, {way:?}", drafter.name());
        let memory = Memory::new(&*b, target.plan(), size());
        let mut speculator =
            Speculator::new(b.clone(), target, memory, Some(drafter)).accepting(Accept::Residual);
        let mut counts: BTreeMap<Vec<u32>, u64> = BTreeMap::new();
        let (mut drafted, mut accepted) = (0, 0);
        for seed in 0..TEXTS {
            let options = StreamOptions {
                sampling: sampling(vocab, way, seed),
                max_tokens: TOKENS,
                stop_tokens: Arc::new([]),
                draft: DraftLength::Fixed(2),
                logprobs: None,
            };
            let mut stream = speculator.open(PROMPT.to_vec(), options).unwrap();
            while stream.finish().is_none() {
                speculator.round(&mut [&mut stream], 16).unwrap();
            }
            drafted += stream.stats().drafted();
            accepted += stream.stats().accepted();
            *counts.entry(stream.output().to_vec()).or_default() += 1;
            speculator.close(stream);
        }
        // Texts that are expected less than five times count together.
        let n = TEXTS as f64;
        let (mut chi2, mut freedom, mut rare) = (0.0, 0.0, (0.0, 0.0));
        let mut cell = |count: f64, expected: f64| {
            chi2 += (count - expected).powi(2) / expected;
            freedom += 1.0;
        };
        for (text, probability) in &text_probs {
            let count = counts.remove(text).unwrap_or(0) as f64;
            let expected = probability * n;
            if expected < 5.0 {
                rare = (rare.0 + count, rare.1 + expected);
            } else {
                cell(count, expected);
            }
        }
        if rare.1 > 0.0 {
            cell(rare.0, rare.1);
        }
        assert!(counts.is_empty(), "{name}: {counts:?} cannot be written");
        // The chi-square distribution is close to normal with so many degrees of freedom,
        // a little wider above: five deviations and a half are exceeded once in 10^6.
        freedom -= 1.0;
        let limit = freedom + 5.5 * f64::sqrt(2.0 * freedom);
        println!("{name}: {accepted} of {drafted} accepted, chi-square {chi2:.1} of {freedom}");
        assert!(chi2 < limit, "{name}: chi-square {chi2}, at most {limit}");
        // Mirostat rules most texts out.
        let least = if way == Way::Mirostat { 5.0 } else { 25.0 };
        assert!(
            freedom > least && 0 < accepted && accepted < drafted,
            "{name}"
        );
    }
}
