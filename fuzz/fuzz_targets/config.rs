//! Any `config.json` beside good tensors: refused, or the model or draft head that it
//! describes can be planned and run.
//!
//! An input that begins with `{` is the file itself, tried beside every checkpoint's
//! tensors. Any other says which checkpoint, and what to change in its file.

#![no_main]

use backend::{Backend, Batch, Reference};
use cache::{KeptSize, Memory, MemoryPlan, MemorySize};
use libfuzzer_sys::fuzz_target;
use models::{ChainedHead, Eagle3, Gemma4Assistant, Qwen35Mtp, Target, load_target};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use std::sync::LazyLock;
use weights::Checkpoint;

/// A model (`fuzz/models.py`), and the number of the one that it drafts for.
struct Case {
    config: Value,
    weights: &'static [u8],
    target: Option<usize>,
}

const CASES: &[(&str, Option<usize>)] = &[
    (include_str!("../models/gemma4-moe.json"), None),
    (include_str!("../models/gemma4-ple.json"), None),
    (include_str!("../models/qwen3_5.json"), None),
    (include_str!("../models/qwen3_5-moe.json"), None),
    (include_str!("../models/gemma4-assistant.json"), Some(1)),
    (include_str!("../models/eagle3.json"), Some(0)),
];

impl Case {
    /// All weights are alike: only shapes count here.
    fn new((model, target): &(&str, Option<usize>)) -> Case {
        let mut model: Value = serde_json::from_str(model).expect("a good file");
        let (mut header, mut data) = (Map::new(), Vec::new());
        for (name, shape) in model["tensors"].as_object().expect("shapes by name") {
            let axes = shape.as_array().expect("a shape").iter();
            let n: u64 = axes.map(|axis| axis.as_u64().expect("an axis")).product();
            let begin = data.len();
            let dtype = match name.ends_with("token_ordering") || name == "d2t" {
                true => {
                    data.resize(begin + 8 * n as usize, 0);
                    "I64"
                }
                false => {
                    data.resize(begin + 2 * n as usize, 0x3c);
                    "BF16"
                }
            };
            let entry =
                json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]});
            header.insert(name.clone(), entry);
        }
        let header = Value::Object(header).to_string();
        let weights = [
            &(header.len() as u64).to_le_bytes(),
            header.as_bytes(),
            &data,
        ]
        .concat();
        Case {
            config: model["config"].take(),
            weights: weights.leak(),
            target: *target,
        }
    }
}

/// Fields that some family reads and not every file has, and values of fields.
const WORDS: &[&str] = &[
    "layer_types",
    "full_attention",
    "sliding_attention",
    "linear_attention",
    "per_layer_config",
    "head_dim",
    "num_key_value_heads",
    "num_experts",
    "text_config",
    "use_bidirectional_attention",
    "all",
    "norm_topk_prob",
    "eagle_aux_hidden_state_layer_ids",
    "eagle_config",
    "draft_vocab_size",
    "target_hidden_size",
    "sliding_window",
    "max_position_embeddings",
    "partial_rotary_factor",
    "factor",
    "default",
    "proportional",
    "linear",
    "yarn",
    "llama3",
    "silu",
    "float16",
    "bfloat16",
    "quantization",
    "bits",
    "group_size",
];

/// The cases, and the targets that some of them are.
struct World {
    cases: Vec<Case>,
    targets: Vec<Option<Box<dyn Target>>>,
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let cases: Vec<Case> = CASES.iter().map(Case::new).collect();
    let load = |case: &Case| {
        let checkpoint = open(&case.config.to_string(), case).expect("a good checkpoint");
        let target = || load_target(&Reference, &checkpoint).expect("a good target");
        case.target.is_none().then(target)
    };
    World {
        targets: cases.iter().map(load).collect(),
        cases,
    }
});

fuzz_target!(|data: &[u8]| {
    if data.first() == Some(&b'{') {
        if let Ok(config) = std::str::from_utf8(data) {
            WORLD.cases.iter().for_each(|case| exercise(config, case));
        }
        return;
    }
    let Some((which, edits)) = data.split_first() else {
        return;
    };
    let case = &WORLD.cases[usize::from(*which) % WORLD.cases.len()];
    let mut config = case.config.clone();
    fuzz::edit(&mut config, WORDS, edits);
    let config = config.to_string();
    if std::env::var_os("FUZZ_SHOW").is_some() {
        eprintln!("{config}");
    }
    exercise(&config, case);
});

fn open(config: &str, case: &Case) -> Option<Checkpoint> {
    let file = ("model.safetensors".to_string(), Cow::Borrowed(case.weights));
    Checkpoint::from_bytes(config, vec![file]).ok()
}

fn exercise(config: &str, case: &Case) {
    let b = &Reference;
    let Some(checkpoint) = open(config, case) else {
        return;
    };
    let Some(target) = case.target else {
        if let Ok(target) = load_target(b, &checkpoint) {
            if matches!(Qwen35Mtp::is_in(&checkpoint), Ok(true))
                && let Ok(head) = Qwen35Mtp::load(b, &checkpoint, &*target)
            {
                plan(&head.plan(), target.max_context());
            }
            run(b, &*target);
        }
        return;
    };
    let target = WORLD.targets[target].as_deref().expect("a target");
    let _ = Gemma4Assistant::census(&checkpoint);
    let _ = Gemma4Assistant::load(b, &checkpoint, target); // refusing is an answer too
    if let Ok(head) = Eagle3::load(b, &checkpoint, target) {
        plan(&head.plan(), target.max_context());
    }
}

fn size(context: usize) -> MemorySize {
    MemorySize {
        sequences: 1,
        context,
        step_rows: 64,
        kv_format: cache::KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    }
}

/// What a memory plan takes, as `paceline inspect` shows it.
fn plan(plan: &MemoryPlan, context: usize) {
    Memory::bytes(plan, &size(context));
}

/// A step of three rows.
fn run(b: &dyn Backend, target: &dyn Target) {
    plan(&target.plan(), target.max_context());
    let mut memory = Memory::new(b, target.plan(), size(64));
    let mut sequence = memory.open().expect("room for one");
    let mut batch = Batch::default();
    let tokens = [0, 1, 2].map(|t| t % target.vocab_size() as u32);
    let pushed = memory.push(&mut batch, &mut sequence, &tokens, tokens.len());
    pushed.expect("room for three rows");
    let hidden = target.forward(b, &batch, &mut memory);
    let logits = target.logits(b, &hidden);
    assert_eq!(
        (logits.rows(), logits.cols()),
        (tokens.len(), target.vocab_size())
    );
}
