//! Ways to use a draft head that options and its writer's manifest ask for: each changes what is
//! guessed, and no token.

use crate::samplings;
use crate::subjects::{ALONE, Subject};
use crate::subjects::{prompts, vocab};
use crate::writing::{best_cpu, write_groups};
use crate::{CONTEXT, MAX_TOKENS};
use backend::Backend;
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use models::{ChainedHead, Gemma4Assistant, Qwen35Mtp, load_target};
use serde_json::{Value, json};
use speculate::draft::{Assistant, Chained};
use speculate::{DraftLength, Drafter, Sampling, Speculator, StreamOptions, TopLogprobs};
use std::sync::Arc;
use suites::files::Files;
use suites::repository;
use weights::Checkpoint;

const GOLDEN: &str = "tests/golden/checkpoints";

/// Streams at once.
const WIDTH: usize = 3;

fn open(folder: &str) -> Checkpoint {
    Checkpoint::open(&repository(folder)).unwrap()
}

/// The golden checkpoint `name`, its configuration changed.
fn changed(name: &str, change: impl FnOnce(&mut Value)) -> Checkpoint {
    let mut files = Files::open(name);
    change(&mut files.config);
    files.checkpoint()
}

fn size(chunk: usize) -> MemorySize {
    MemorySize {
        sequences: WIDTH,
        context: CONTEXT,
        step_rows: chunk,
        kv_format: KvPlan::both(&quant::kv::BF16),
        running_pages: None,
        kept: KeptSize::default(),
    }
}

/// Prompt number `i`'s options.
fn options(sampling: &Sampling, draft: DraftLength, i: usize) -> StreamOptions {
    StreamOptions {
        sampling: Sampling {
            seed: i as u64,
            ..sampling.clone()
        },
        // Lengths differ, so that streams end beside running ones.
        max_tokens: MAX_TOKENS / 2 - i,
        stop_tokens: Arc::new([]),
        draft,
        logprobs: Some(TopLogprobs::of_logits(1)),
    }
}

/// That drafters that `make` makes for the target at `folder`, by their number, change no token.
fn assert_lossless(
    folder: &'static str,
    target: impl Fn() -> Checkpoint,
    n: usize,
    make: impl Fn(&dyn Backend, &dyn models::Target, MemorySize, usize) -> Box<dyn Drafter>,
) {
    let b = best_cpu();
    let subject = Subject {
        target: folder,
        ..ALONE
    };
    let prompts = prompts(2 * WIDTH, vocab(subject), 7);
    let speculator = |chunk: usize, drafter: Option<usize>| {
        let target = load_target(&*b, &target()).unwrap();
        let memory = Memory::new(&*b, target.plan(), size(chunk));
        let drafter = drafter.map(|i| make(&*b, &*target, size(chunk), i));
        Speculator::new(b.clone(), target, memory, drafter)
    };
    for (what, sampling) in samplings() {
        let plain = |i| options(&sampling, DraftLength::Fixed(0), i);
        let (want, _) = write_groups(&mut speculator(512, None), &prompts, 512, plain);
        for i in 0..n {
            for cell in [
                (DraftLength::Fixed(1), 7),
                (DraftLength::Fixed(4), 512),
                (DraftLength::UpTo(8), 64),
            ] {
                let (length, chunk) = cell;
                let mut speculator = speculator(chunk, Some(i));
                let options = |i| options(&sampling, length, i);
                let (got, [drafted, _]) = write_groups(&mut speculator, &prompts, chunk, options);
                assert!(got == want, "{folder}, drafter {i}, {what}, {cell:?}");
                assert!(drafted > 0, "{folder}, drafter {i}, {what}, {cell:?}");
            }
        }
    }
}

#[test]
fn an_mtp_head_with_another_contract_changes_no_token() {
    const CONTRACTS: &[(&str, &str)] = &[
        ("base_hidden_variant", "pre_norm"),
        ("hidden_variant", "pre_norm"),
        ("concat_order", "hidden_embedding"),
    ];
    const DENSE: &str = "tests/golden/checkpoints/qwen3_5-dense";
    let make = |b: &dyn Backend, target: &dyn models::Target, size, i: usize| {
        let (key, value) = CONTRACTS[i];
        let contract = json!({key: value});
        let checkpoint = changed("qwen3_5-dense", |config| {
            config["mtplx_mtp_contract"] = contract;
        });
        let mut head = Qwen35Mtp::load(b, &checkpoint, target).unwrap();
        if i > 0 {
            let ids: Vec<u32> = (0..target.vocab_size() as u32).step_by(2).collect();
            head = head.with_shortlist(b, &checkpoint, target, &ids).unwrap();
        }
        let memory = Memory::new(b, head.plan(), size);
        Box::new(Chained::new(head, memory)) as Box<dyn Drafter>
    };
    assert_lossless(DENSE, || open(DENSE), CONTRACTS.len(), make);
}

#[test]
fn an_mtp_head_of_several_layers_changes_no_token() {
    const DENSE: &str = "tests/golden/checkpoints/qwen3_5-dense";
    let layers = |n| Files::open("qwen3_5-dense").with_mtp_layers(n).checkpoint();
    let make = |b: &dyn Backend, target: &dyn models::Target, size, i: usize| {
        let checkpoint = layers([2, 3, 8][i]);
        let mut head = Qwen35Mtp::load(b, &checkpoint, target).unwrap();
        if i == 1 {
            let ids: Vec<u32> = (0..target.vocab_size() as u32).step_by(2).collect();
            head = head.with_shortlist(b, &checkpoint, target, &ids).unwrap();
        }
        let memory = Memory::new(b, head.plan(), size);
        Box::new(Chained::new(head, memory)) as Box<dyn Drafter>
    };
    assert_lossless(DENSE, || open(DENSE), 3, make);
}

#[test]
fn an_assistant_with_a_window_changes_no_token() {
    const PAIRS: &[(&str, &str)] = &[
        (
            "tests/golden/checkpoints/gemma4-dense",
            "gemma4-dense-assistant",
        ),
        (
            "tests/golden/checkpoints/gemma4-ple",
            "gemma4-ple-assistant",
        ),
    ];
    for &(folder, assistant) in PAIRS {
        let make = |b: &dyn Backend, target: &dyn models::Target, _, i: usize| {
            let checkpoint = open(&format!("{GOLDEN}/{assistant}"));
            let head = Gemma4Assistant::load(b, &checkpoint, target).unwrap();
            let head = head.with_window([1, 6, 1000][i]);
            Box::new(Assistant::new(head)) as Box<dyn Drafter>
        };
        assert_lossless(folder, || open(folder), 3, make);
    }
}

/// The assistant of Gemma 4 12B says that it is another kind of model, and is the same.
#[test]
fn a_unified_assistant_changes_no_token() {
    const DENSE: &str = "tests/golden/checkpoints/gemma4-dense";
    let target = || {
        changed("gemma4-dense", |config| {
            config["architectures"] = json!(["Gemma4UnifiedForCausalLM"]);
            config["model_type"] = json!("gemma4_unified_text");
        })
    };
    let make = |b: &dyn Backend, target: &dyn models::Target, _, _| {
        let checkpoint = changed("gemma4-dense-assistant", |config| {
            config["architectures"] = json!(["Gemma4UnifiedAssistantForCausalLM"]);
            config["model_type"] = json!("gemma4_unified_assistant");
            config["text_config"]["model_type"] = json!("gemma4_unified_text");
        });
        let head = Gemma4Assistant::load(b, &checkpoint, target).unwrap();
        Box::new(Assistant::new(head)) as Box<dyn Drafter>
    };
    assert_lossless(DENSE, target, 1, make);
}
