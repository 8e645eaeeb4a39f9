//! Every model against other implementations: named intermediates of tiny seeded
//! checkpoints, made by `tests/golden/make.py`, and greedy text of real ones.

use backend::{Backend, Batch, Ops, Reference, Sample, Store};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use cpu::{Activations, Cpu, CpuOptions};
use models::{ChainedHead, Eagle3, Gemma4Assistant, Qwen35Mtp, Taps, Target, load_target};
use speculate::draft::Chained;
use speculate::{DraftLength, Drafter, Pooling, Sampling, Speculator, StreamOptions};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use suites::files::Files;
use suites::{Noting, Recorder, repository};
use weights::Checkpoint;

#[path = "golden/blocks.rs"]
mod blocks;
#[path = "golden/sounds.rs"]
mod sounds;
#[path = "golden/towers.rs"]
mod towers;
#[path = "golden/video.rs"]
mod video;

/// Largest difference to the goldens, in units of the tensor's largest value (or
/// of 1, if that is larger): they are computed in double precision, we in single.
const TOLERANCE: f32 = 1e-4;

/// All that was drafted.
type Drafts = Arc<Mutex<Vec<Vec<u32>>>>;

struct Golden {
    values: HashMap<String, Vec<f32>>,
    integers: HashMap<String, Vec<u32>>,
}

impl Golden {
    fn open(path: &Path) -> Golden {
        let bytes = std::fs::read(path).unwrap();
        let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
        let mut golden = Golden {
            values: HashMap::new(),
            integers: HashMap::new(),
        };
        for (name, tensor) in header.as_object().unwrap() {
            let Some(range) = tensor.get("data_offsets") else {
                continue;
            };
            let at = |i: usize| 8 + n + range[i].as_u64().unwrap() as usize;
            let data = &bytes[at(0)..at(1)];
            match tensor["dtype"].as_str().unwrap() {
                "F32" => {
                    let values = data
                        .chunks_exact(4)
                        .map(|c| f32::from_le_bytes(c.try_into().unwrap()));
                    golden.values.insert(name.clone(), values.collect());
                }
                "I64" => {
                    let values = data
                        .chunks_exact(8)
                        .map(|c| i64::from_le_bytes(c.try_into().unwrap()) as u32);
                    golden.integers.insert(name.clone(), values.collect());
                }
                other => panic!("{name} is of type {other}"),
            }
        }
        golden
    }

    fn assert_close(&self, case: &str, name: &str, got: &[f32]) {
        let want = &self.values[name];
        assert_eq!(got.len(), want.len(), "{case}: size of {name}");
        let scale = want.iter().fold(1.0f32, |m, x| m.max(x.abs()));
        let worst = got
            .iter()
            .zip(want)
            .map(|(g, w)| (g - w).abs())
            .fold(0.0, f32::max);
        assert!(
            worst <= TOLERANCE * scale,
            "{case}: {name} differs by {worst} (values up to {scale})"
        );
    }
}

fn size() -> MemorySize {
    MemorySize {
        sequences: 1,
        context: 128,
        step_rows: 128,
        kv_format: KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    }
}

/// Runs `tokens` through `target`; the hidden rows.
fn prefill(
    b: &dyn Backend,
    target: &dyn Target,
    memory: &mut Memory,
    tokens: &[u32],
) -> (cache::Sequence, backend::Tensor) {
    prefill_tapped(b, target, memory, tokens, &mut Taps::new(&[]))
}

fn prefill_tapped(
    b: &dyn Backend,
    target: &dyn Target,
    memory: &mut Memory,
    tokens: &[u32],
    taps: &mut Taps,
) -> (cache::Sequence, backend::Tensor) {
    let mut sequence = memory.open().unwrap();
    let mut batch = Batch::default();
    memory
        .push(&mut batch, &mut sequence, tokens, tokens.len())
        .unwrap();
    let hidden = target.forward_tapped(b, &batch, memory, taps);
    (sequence, hidden)
}

fn cases() -> Vec<serde_json::Value> {
    let cases = std::fs::read(repository("tests/golden/cases.json")).unwrap();
    serde_json::from_slice::<Vec<serde_json::Value>>(&cases).unwrap()
}

/// Opens a golden checkpoint.
type Open = fn(&str) -> Checkpoint;

/// As they are stored, and from f32 the same.
const FORMS: &[(&str, Open)] = &[
    ("as stored", suites::golden),
    ("in f32", suites::golden_in_f32),
];

/// The backends under test.
const BACKENDS: &[fn() -> Box<dyn Backend>] = &[
    || Box::new(Reference),
    || Box::new(Cpu::new(CpuOptions::default()).unwrap()),
];

#[test]
fn every_named_intermediate_agrees_with_the_public_implementations() {
    for new in BACKENDS {
        for (form, open) in FORMS {
            for case in cases() {
                let text = |key: &str| case[key].as_str().unwrap().to_owned();
                let name = text("name");
                let golden = Golden::open(&repository("tests/golden").join(text("outputs")));
                let b = new();
                let on = format!("{form} on {}", b.name());
                let checkpoint = open(&text("checkpoint"));
                let seen = match &*text("kind") {
                    "target" => check_target(b, &name, &checkpoint, &golden),
                    "assistant" => {
                        check_assistant(b, &name, &checkpoint, &open(&text("target")), &golden)
                    }
                    "mtp" => check_mtp(b, &name, &checkpoint, &golden),
                    "eagle3" => {
                        check_eagle3(b, &name, &checkpoint, &open(&text("target")), &golden)
                    }
                    other => panic!("{name} is of kind {other}"),
                };
                println!("{name} {on}: {seen} intermediates agree");
            }
        }
    }
}

fn check_target(
    b: Box<dyn Backend>,
    case: &str,
    checkpoint: &Checkpoint,
    golden: &Golden,
) -> usize {
    let b = Recorder::new(b);
    let target = load_target(&b, checkpoint).unwrap();
    let mut memory = Memory::new(&b, target.plan(), size());
    let layers: Vec<usize> = (0..=target.n_layers()).rev().collect();
    let mut taps = Taps::new(&layers);
    let tokens = &golden.integers["tokens"];
    let (_, hidden) = prefill_tapped(&b, &*target, &mut memory, tokens, &mut taps);
    target.logits(&b, &hidden);
    for (&layer, tap) in layers.iter().zip(taps.into_rows()) {
        let entering = match layer.checked_sub(1) {
            None => "embed".to_owned(),
            Some(before) => format!("layers.{before}.out"),
        };
        golden.assert_close(case, &entering, &b.download(&tap));
    }
    let mut seen = 0;
    for name in golden.values.keys() {
        let Some(got) = b.note_at(name, 0) else {
            continue;
        };
        golden.assert_close(case, name, &got);
        seen += 1;
    }
    for required in ["embed", "layers.0.out", "hidden", "logits"] {
        assert!(
            b.note_at(required, 0).is_some() && golden.values.contains_key(required),
            "{case}: {required}"
        );
    }
    let unused = checkpoint.unused();
    // A head, vision, and keys and values of layers that read another layer's.
    let expected = |name: &String| {
        ["mtp.", "vision_tower.", "visual.", "embed_vision."]
            .iter()
            .any(|p| name.starts_with(p))
            || case == "gemma4-ple"
                && ["k_proj", "v_proj", "k_norm"]
                    .iter()
                    .any(|part| name.contains(part))
    };
    assert!(
        unused.iter().all(expected),
        "{case}: nobody reads {unused:?}"
    );
    seen
}

fn check_assistant(
    b: Box<dyn Backend>,
    case: &str,
    drafter: &Checkpoint,
    target: &Checkpoint,
    golden: &Golden,
) -> usize {
    let b = Recorder::new(b);
    let target = load_target(&b, target).unwrap();
    let head = Gemma4Assistant::load(&b, drafter, &*target).unwrap();
    let mut memory = Memory::new(&b, target.plan(), size());
    let tokens = &golden.integers["tokens"];
    let (sequence, hidden) = prefill(&b, &*target, &mut memory, tokens);
    let mut hidden = b.gather(&hidden, &[tokens.len() - 1]);
    let mut token = golden.integers["pending"][0];
    let mut steps = 0;
    while golden.values.contains_key(&format!("draft.{steps}.logits")) {
        let mut batch = Batch::default();
        memory.peek(&mut batch, &sequence, token);
        let (z, next) = head.step(&b, &*target, &hidden, &batch, &memory);
        golden.assert_close(case, &format!("draft.{steps}.hidden"), &b.download(&next));
        let scored = head.logits(&b, &z);
        let scores = b.download(&scored.logits);
        let best = b.argmax(&scored.logits)[0];
        let best = match scored.scored.ids(0) {
            None => {
                golden.assert_close(case, &format!("draft.{steps}.logits"), &scores);
                best
            }
            Some(ids) => {
                let (want, values) = (
                    &golden.integers[&format!("draft.{steps}.candidate_ids")],
                    &golden.values[&format!("draft.{steps}.candidate_logits")],
                );
                let mut want: Vec<(u32, f32)> =
                    want.iter().copied().zip(values.iter().copied()).collect();
                want.sort_unstable_by_key(|(id, _)| *id);
                assert_eq!(
                    ids,
                    want.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
                    "{case}: candidates of step {steps}"
                );
                for ((id, want), got) in want.iter().zip(&*scores) {
                    assert!(
                        (want - got).abs() <= TOLERANCE,
                        "{case}: logit of {id} in step {steps} is {got}, not {want}"
                    );
                }
                ids[best as usize]
            }
        };
        token = golden.integers[&format!("draft.{steps}.token")][0];
        assert_eq!(best, token, "{case}: token of step {steps}");
        hidden = next;
        steps += 1;
    }
    assert!(steps >= 4, "{case} chains {steps} steps");
    steps
}

fn check_mtp(b: Box<dyn Backend>, case: &str, checkpoint: &Checkpoint, golden: &Golden) -> usize {
    let b = Recorder::new(b);
    let target = load_target(&b, checkpoint).unwrap();
    assert!(Qwen35Mtp::is_in(checkpoint).unwrap());
    let head = Qwen35Mtp::load(&b, checkpoint, &*target).unwrap();
    assert_eq!(checkpoint.unused(), [""; 0], "{case}: every tensor is read");
    let mut memory = Memory::new(&b, target.plan(), size());
    let tokens = &golden.integers["tokens"];
    let (_, hidden) = prefill(&b, &*target, &mut memory, tokens);
    let mut own = Memory::new(&b, head.plan(), size());
    let mut sequence = own.open().unwrap();
    let mut batch = Batch::default();
    let following: Vec<u32> = tokens[1..]
        .iter()
        .chain(&golden.integers["pending"])
        .copied()
        .collect();
    own.push(&mut batch, &mut sequence, &following, following.len())
        .unwrap();
    let m = head.forward(&b, &*target, &hidden, &[], &batch, &mut own);
    golden.assert_close(case, "draft.prefill.hidden", &b.download(&m));
    // Not `q` and `k`: row `p` stands at position `p` here and at `p + 1` there. Attention is
    // relative, so the layer's output is the same.
    for part in ["v", "attn_out", "mlp_out", "out"] {
        golden.assert_close(
            case,
            &format!("draft.prefill.layers.0.{part}"),
            &b.note_at(&format!("mtp.{part}"), 0).unwrap(),
        );
    }
    let mut m = b.gather(&m, &[tokens.len() - 1]);
    let mut steps = 0;
    loop {
        golden.assert_close(case, &format!("draft.{steps}.hidden"), &b.download(&m));
        let logits = target.logits(&b, &m);
        golden.assert_close(case, &format!("draft.{steps}.logits"), &b.download(&logits));
        let token = golden.integers[&format!("draft.{steps}.token")][0];
        assert_eq!(b.argmax(&logits)[0], token, "{case}: token of step {steps}");
        steps += 1;
        if !golden.values.contains_key(&format!("draft.{steps}.logits")) {
            break;
        }
        batch = Batch::default();
        own.push(&mut batch, &mut sequence, &[token], 0).unwrap();
        m = head.forward(&b, &*target, &m, &[], &batch, &mut own);
    }
    assert!(steps >= 3, "{case} chains {steps} steps");
    steps
}

/// What a head of several layers drafts, one token a layer and then in a second turn, against
/// `tests/golden/mtp_layers.py`.
#[test]
fn the_layers_of_an_mtp_head_draft_in_turn_as_in_the_public_implementations() {
    let path = "tests/golden/outputs/qwen3_5-dense-mtp-layers.safetensors";
    let golden = Golden::open(&repository(path));
    for (new, n) in BACKENDS.iter().flat_map(|new| [(new, 2), (new, 3)]) {
        let b = Arc::new(Recorder::new(new()));
        let checkpoint = Files::open("qwen3_5-dense").with_mtp_layers(n).checkpoint();
        assert!(Qwen35Mtp::is_in(&checkpoint).unwrap());
        let target = load_target(&*b, &checkpoint).unwrap();
        let head = Qwen35Mtp::load(&*b, &checkpoint, &*target).unwrap();
        assert_eq!(checkpoint.unused(), [""; 0], "every tensor is read");
        let memory = |plan| Memory::new(&*b, plan, size());
        let (own, drafts) = (memory(head.plan()), Drafts::default());
        let noting = Noting {
            inner: Box::new(Chained::new(head, own)),
            drafts: drafts.clone(),
        };
        let drafter: Box<dyn Drafter> = Box::new(noting);
        let memory = memory(target.plan());
        let mut speculator = Speculator::new(b.clone(), target, memory, Some(drafter));
        let integers = |name: &str| &golden.integers[&format!("{n}.{name}")];
        let (tokens, want) = (integers("tokens"), integers("drafts"));
        let options = StreamOptions {
            sampling: Sampling::default(),
            max_tokens: 20,
            stop_tokens: Arc::new([]),
            draft: DraftLength::Fixed(want.len()),
            logprobs: None,
        };
        let mut stream = speculator.open(tokens.clone(), options).unwrap();
        speculator.round(&mut [&mut stream], tokens.len()).unwrap();
        assert_eq!(stream.output(), integers("pending"), "{n} layers");
        assert_eq!(
            *drafts.lock().unwrap(),
            std::slice::from_ref(want),
            "{n} layers"
        );
        let hidden = &golden.values[&format!("{n}.hidden")];
        let cols = hidden.len() / want.len();
        for (i, row) in hidden.chunks_exact(cols).enumerate() {
            let made = b.note_at("draft.hidden", i).unwrap();
            let got = &made[made.len() - cols..];
            let error = got.iter().zip(row).map(|(a, b)| (a - b).abs());
            assert!(
                error.fold(0.0, f32::max) < TOLERANCE,
                "{n} layers: draft {i}"
            );
        }
    }
}

fn check_eagle3(
    b: Box<dyn Backend>,
    case: &str,
    drafter: &Checkpoint,
    target: &Checkpoint,
    golden: &Golden,
) -> usize {
    let b = Recorder::new(b);
    let target = load_target(&b, target).unwrap();
    let head = Eagle3::load(&b, drafter, &*target).unwrap();
    assert_eq!(drafter.unused(), [""; 0], "{case}: every tensor is read");
    let mut memory = Memory::new(&b, target.plan(), size());
    let tokens = &golden.integers["tokens"];
    let mut taps = Taps::new(head.taps());
    let (_, hidden) = prefill_tapped(&b, &*target, &mut memory, tokens, &mut taps);
    let mut own = Memory::new(&b, head.plan(), size());
    let mut sequence = own.open().unwrap();
    let following: Vec<u32> = tokens[1..]
        .iter()
        .chain(&golden.integers["pending"])
        .copied()
        .collect();
    let rows: Vec<usize> = (0..tokens.len()).collect();
    let features = head.features(&b, &hidden, &taps.into_rows(), &rows);
    golden.assert_close(case, "draft.prefill.feature", &b.download(&features));
    let mut batch = Batch::default();
    own.push(&mut batch, &mut sequence, &following, following.len())
        .unwrap();
    let mut x = head.forward(&b, &*target, &features, &[], &batch, &mut own);
    golden.assert_close(case, "draft.prefill.hidden", &b.download(&x));
    let all = head.logits(&b, &*target, &x).logits;
    golden.assert_close(case, "draft.prefill.logits", &b.download(&all));
    x = b.gather(&x, &[tokens.len() - 1]);
    let mut steps = 0;
    loop {
        golden.assert_close(case, &format!("draft.{steps}.hidden"), &b.download(&x));
        let scored = head.logits(&b, &*target, &x);
        let name = format!("draft.{steps}.logits");
        golden.assert_close(case, &name, &b.download(&scored.logits));
        let best = b.argmax(&scored.logits)[0];
        let best = scored.scored.ids(0).map_or(best, |ids| ids[best as usize]);
        let token = golden.integers[&format!("draft.{steps}.token")][0];
        assert_eq!(best, token, "{case}: token of step {steps}");
        steps += 1;
        if !golden.values.contains_key(&format!("draft.{steps}.logits")) {
            break;
        }
        batch = Batch::default();
        own.push(&mut batch, &mut sequence, &[token], 0).unwrap();
        x = head.forward(&b, &*target, &x, &[], &batch, &mut own);
    }
    // Rows of the prompt first, then one by one.
    let mut layers = 0;
    while let Some(prefill) = b.note_at(&format!("draft.layers.{layers}.out"), 0) {
        golden.assert_close(
            case,
            &format!("draft.prefill.layers.{layers}.out"),
            &prefill,
        );
        for step in 1..steps {
            let out = b
                .note_at(&format!("draft.layers.{layers}.out"), step)
                .unwrap();
            golden.assert_close(case, &format!("draft.{step}.layers.{layers}.out"), &out);
        }
        layers += 1;
    }
    assert!(steps >= 4 && layers >= 1, "{case} chains {steps} steps");
    3 + steps * (2 + layers)
}

/// Below this gap of the two best logits, rounding may choose: the library's own
/// single precision strays up to 3e-5 from the golden's double precision.
const NEAR_TIE: f64 = 2e-4;

#[test]
fn greedy_text_of_the_bundled_models_is_that_of_transformers() {
    for name in [
        "tiny-gemma4",
        "tiny-gemma4-e",
        "tiny-gemma4-moe",
        "tiny-qwen3.5",
        "tiny-qwen3.5-moe",
    ] {
        let b = Cpu::new(CpuOptions {
            activations: Activations::F32,
            ..CpuOptions::default()
        })
        .unwrap();
        let checkpoint = Checkpoint::open(&repository("models").join(name)).unwrap();
        let target = load_target(&b, &checkpoint).unwrap();
        let path = repository("tests/golden/greedy").join(format!("{name}.json"));
        let file: serde_json::Value =
            serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let prompts = file["prompts"].as_array().unwrap();
        let mut equal = 0;
        for (i, record) in prompts.iter().enumerate() {
            let numbers = |key: &str| record[key].as_array().unwrap().iter();
            let ids = |key: &str| {
                numbers(key)
                    .map(|t| t.as_u64().unwrap() as u32)
                    .collect::<Vec<_>>()
            };
            let (prompt, want) = (ids("prompt"), ids("tokens"));
            let size = MemorySize {
                context: prompt.len() + want.len(),
                step_rows: prompt.len(),
                ..size()
            };
            let mut memory = Memory::new(&b, target.plan(), size);
            let (mut sequence, hidden) = prefill(&b, &*target, &mut memory, &prompt);
            let mut last = b.gather(&hidden, &[prompt.len() - 1]);
            let backend: &dyn Backend = &b;
            let mut got = Vec::new();
            loop {
                got.push(b.argmax(&target.logits(backend, &last))[0]);
                if got.len() == want.len() {
                    break;
                }
                let mut batch = Batch::default();
                memory
                    .push(&mut batch, &mut sequence, &got[got.len() - 1..], 1)
                    .unwrap();
                last = target.forward(backend, &batch, &mut memory);
            }
            match got.iter().zip(&want).position(|(g, w)| g != w) {
                None => equal += 1,
                Some(at) => {
                    let gap = numbers("gaps").nth(at).unwrap().as_f64().unwrap();
                    println!("{name}: prompt {i} parts at token {at}, where the gap is {gap}");
                    assert!(
                        gap < NEAR_TIE,
                        "{name}: prompt {i} parts at token {at} without a near-tie ({gap})"
                    );
                }
            }
        }
        println!(
            "{name}: {equal} of {} texts of {} tokens are equal",
            prompts.len(),
            file["n_tokens"]
        );
        assert!(prompts.len() >= 20 && equal * 10 >= prompts.len() * 9);
    }
}

#[test]
fn pooled_rows_of_the_bundled_models_are_those_of_transformers() {
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        let b = Cpu::new(CpuOptions {
            activations: Activations::F32,
            ..CpuOptions::default()
        });
        let b: Arc<dyn Backend> = Arc::new(b.unwrap());
        let checkpoint = Checkpoint::open(&repository("models").join(model)).unwrap();
        let target = load_target(&*b, &checkpoint).unwrap();
        let case = format!("{model}-pooled");
        let path = format!("tests/golden/outputs/{case}.safetensors");
        let golden = Golden::open(&repository(path));
        let longest = golden.integers.values().map(Vec::len).max().unwrap();
        let size = MemorySize {
            context: longest,
            ..size()
        };
        let memory = Memory::new(&*b, target.plan(), size);
        let mut speculator = Speculator::new(b, target, memory, None);
        for i in 0..golden.integers.len() {
            let prompt = &golden.integers[&format!("{i}.tokens")];
            for pooling in [Pooling::Last, Pooling::Mean, Pooling::Cls] {
                let options = StreamOptions {
                    sampling: Sampling::default(),
                    max_tokens: 0,
                    stop_tokens: Arc::new([]),
                    draft: DraftLength::UpTo(0),
                    logprobs: None,
                };
                let mut stream = speculator.open(prompt.clone(), options).unwrap();
                stream.pool(pooling);
                while stream.finish().is_none() {
                    speculator.round(&mut [&mut stream], 16).unwrap();
                }
                let vectors: Vec<Vec<f64>> = speculator.vectors(&stream).collect();
                let [vector] = &vectors[..] else {
                    panic!("{case}: {} vectors", vectors.len());
                };
                let vector: Vec<f32> = vector.iter().map(|&x| x as f32).collect();
                golden.assert_close(&case, &format!("{i}.{}", pooling.name()), &vector);
                speculator.close(stream);
            }
        }
    }
}
