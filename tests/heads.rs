//! Draft heads with checkpoints of their own: every layout that they come in, what
//! is refused and why, and that a head's memory never holds a guess.

use backend::{Backend, Reference, Store, Tensor};
use cache::{KeptSize, Memory, MemoryFull, MemorySize};
use cpu::{Activations, Cpu, CpuOptions};
use models::{
    ChainedHead, Eagle3, Gemma4Assistant, HeadLogits, Qwen35Mtp, Shortlist, Target, load_target,
};
use quant::Scalar;
use serde_json::{Value, json};
use speculate::draft::{Chained, DraftRequest, DraftState, HiddenRows, TargetView};
use speculate::{DraftLength, Drafter, Sampling, Speculator, StreamOptions};
use std::sync::{Arc, Mutex};
use suites::files::Files;
use suites::rows::head_rows;
use suites::{Rng, repository};
use weights::Checkpoint;

const DENSE: &str = "gemma4-dense";

fn checkpoint(name: &str) -> Checkpoint {
    Checkpoint::open(&repository("tests/golden/checkpoints").join(name)).unwrap()
}

fn size(sequences: usize) -> MemorySize {
    MemorySize {
        sequences,
        context: 256,
        step_rows: 64,
        kv_format: cache::KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    }
}

/// Logits of a head after each token of a short text.
fn scores(b: &dyn Backend, head: &Eagle3, target: &dyn Target) -> Vec<f32> {
    let x = head_rows(b, head, target, size(1)).rows;
    b.download(&head.logits(b, target, &x).logits).into_owned()
}

/// That `list` has the bits of `whole` for its tokens, `ids`.
fn assert_part(b: &dyn Backend, list: &Shortlist, x: &Tensor, whole: &HeadLogits<'_>, ids: &[u32]) {
    let scored = list.logits(b, x);
    let (some, all) = (b.download(&scored.logits), b.download(&whole.logits));
    for row in 0..x.rows() {
        assert_eq!(scored.scored.ids(row), Some(ids));
        let some = some[row * ids.len()..].iter();
        for (&id, some) in ids.iter().zip(some) {
            let all = all[row * whole.logits.cols() + id as usize];
            assert_eq!(some.to_bits(), all.to_bits(), "token {id} after row {row}");
        }
    }
}

#[test]
fn a_shortlist_scores_its_tokens_as_the_whole_head_does() {
    let b = Cpu::new(CpuOptions::default()).unwrap();
    let open = |path: &str| Checkpoint::open(&repository(path)).unwrap();
    let rows = |cols: usize| {
        let mut rng = Rng(cols as u64);
        let values: Vec<f32> = (0..3 * cols)
            .map(|_| rng.below(2000) as f32 / 1000.0 - 1.0)
            .collect();
        b.upload(3, cols, &values)
    };
    // A long run, short ones, single tokens, and the last one.
    let ids = |n: u32| -> Vec<u32> {
        let scattered = (n / 2..n).filter(|id| id % 7 < 2 || id % 13 == 5);
        (0..n / 3).chain(scattered).chain([n]).collect()
    };
    for path in [
        "models/tiny-qwen3.5",
        "tests/golden/checkpoints/qwen3_5-moe",
    ] {
        let checkpoint = open(path);
        let target = load_target(&b, &checkpoint).unwrap();
        let ids = ids(target.vocab_size() as u32 - 1);
        let head = Qwen35Mtp::load(&b, &checkpoint, &*target).unwrap();
        assert!(head.shortlist().is_none());
        let head = head
            .with_shortlist(&b, &checkpoint, &*target, &ids)
            .unwrap();
        let x = rows(target.hidden_size());
        let whole = head.logits(&b, &*target, &x);
        assert_part(&b, head.shortlist().unwrap(), &x, &whole, &ids);
    }
    for (path, beside) in [
        ("models/tiny-gemma4", "models/tiny-gemma4-assistant"),
        (
            "tests/golden/checkpoints/gemma4-dense",
            "tests/golden/checkpoints/gemma4-dense-assistant",
        ),
    ] {
        let target = load_target(&b, &open(path)).unwrap();
        let ids = ids(target.vocab_size() as u32 - 1);
        let checkpoint = open(beside);
        let hidden = checkpoint.text_config()["hidden_size"].as_u64().unwrap() as usize;
        let head = Gemma4Assistant::load(&b, &checkpoint, &*target).unwrap();
        let head = head.with_shortlist(&b, &checkpoint, &ids).unwrap();
        let x = rows(hidden);
        let whole = head.logits(&b, &x);
        assert_part(&b, head.shortlist().unwrap(), &x, &whole, &ids);
    }
}

#[test]
fn a_flat_checkpoint_is_the_same_head() {
    let b = Reference;
    let target = load_target(&b, &checkpoint(DENSE)).unwrap();
    let mut files = Files::open("gemma4-dense-eagle3");
    files.config["eagle_aux_hidden_state_layer_ids"] = json!([2, 3, 4]);
    let head = Eagle3::load(&b, &files.checkpoint(), &*target).unwrap();
    let want = scores(&b, &head, &*target);

    files.rename("layers.0.", "midlayer.");
    let layer = files.config["transformer_layer_config"].take();
    let mut flat = layer.as_object().unwrap().clone();
    flat.insert("architectures".into(), json!(["LlamaForCausalLMEagle3"]));
    for key in ["draft_vocab_size", "norm_before_residual"] {
        flat.insert(key.into(), files.config[key].clone());
    }
    // Layers left and layers entered: the same rows.
    for ids in [[1, 2, 3], [2, 3, 4]] {
        flat.insert(
            "eagle_config".into(),
            json!({"eagle_aux_hidden_state_layer_ids": ids}),
        );
        files.config = Value::Object(flat.clone());
        let checkpoint = files.checkpoint();
        let head = Eagle3::load(&b, &checkpoint, &*target).unwrap();
        assert_eq!(head.taps(), [2, 3, 4], "{ids:?}");
        assert_eq!(checkpoint.unused(), [""; 0]);
        assert_eq!(scores(&b, &head, &*target), want);
    }
}

#[test]
fn quantised_weights_are_those_values() {
    let whole = CpuOptions {
        activations: Activations::F32,
        ..CpuOptions::default()
    };
    let backends: [Box<dyn Backend>; 2] = [Box::new(Reference), Box::new(Cpu::new(whole).unwrap())];
    for b in &backends {
        let b = &**b;
        let target = load_target(b, &checkpoint(DENSE)).unwrap();
        let mut quantised = Files::open("gemma4-dense-eagle3");
        let mut plain = Files::open("gemma4-dense-eagle3");
        let mut n = 0;
        for (name, (dtype, shape, bytes)) in &Files::open("gemma4-dense-eagle3").tensors {
            let &[rows, cols] = &shape[..] else { continue };
            if dtype != "BF16" || !cols.is_multiple_of(32) {
                continue;
            }
            let values: Vec<f32> = (0..rows * cols)
                .map(|i| Scalar::Bf16.get(bytes, i))
                .collect();
            let format = quant::affine(4, 32).unwrap();
            let stored = quant::encode(format, &values, cols, Scalar::F32);
            let module = name.strip_suffix(".weight").unwrap();
            let back = stored.view().to_f32();
            assert_ne!(back, values, "rounding changes `{name}`");
            let back = back.iter().flat_map(|v| v.to_le_bytes()).collect();
            plain
                .tensors
                .insert(name.clone(), ("F32".into(), shape.clone(), back));
            let groups = vec![rows, cols / 32];
            for (part, dtype, shape, bytes) in [
                ("weight", "U32", vec![rows, cols / 8], stored.codes),
                ("scales", "F32", groups.clone(), stored.scales),
                ("biases", "F32", groups, stored.biases),
            ] {
                let tensor = (dtype.to_owned(), shape, bytes);
                quantised.tensors.insert(format!("{module}.{part}"), tensor);
            }
            n += 1;
        }
        assert!(n >= 7, "projections, tables and heads");
        let [got, want] = [quantised, plain].map(|files| {
            let checkpoint = files.checkpoint();
            let head = Eagle3::load(b, &checkpoint, &*target).unwrap();
            assert_eq!(checkpoint.unused(), [""; 0]);
            scores(b, &head, &*target)
        });
        assert_eq!(got, want, "on {}", b.name());
    }
}

#[test]
fn a_head_that_does_not_fit_is_refused_by_name() {
    let b = Reference;
    let target = load_target(&b, &checkpoint(DENSE)).unwrap();
    type Change = fn(&mut Files);
    let wrong: &[(Change, &str)] = &[
        (
            |f| layer(f, "hidden_size", json!(48)),
            "hidden size of the target is 48",
        ),
        (
            |f| f.config["target_hidden_size"] = json!(64),
            "hidden size of the target is 64",
        ),
        (
            |f| layer(f, "vocab_size", json!(97)),
            "vocabulary size is 97",
        ),
        (
            |f| verifier(f, json!(["Qwen3_5ForCausalLM"])),
            "target's architecture is Qwen3_5ForCausalLM, the target's is gemma4",
        ),
        (
            |f| taps(f, json!([1, 2, 6])),
            "tapped layer is 6, the target's is one of 5 layers",
        ),
        (|f| taps(f, json!([])), "0 tapped layers"),
        (
            |f| f.config["num_aux_hidden_states"] = json!(4),
            "num_aux_hidden_states is 4, and there are 3 tapped layers",
        ),
        (
            |f| taps(f, json!([1, 2])),
            "tensor `fc.weight` has shape [32, 96]",
        ),
        (
            |f| f.config["architectures"] = json!(["Gemma4ForCausalLM"]),
            "is no EAGLE-3 head",
        ),
        (
            |f| layer(f, "model_type", json!("gemma4")),
            "`gemma4` layers is not supported",
        ),
        (
            |f| layer(f, "model_type", json!("qwen3")),
            "`layers.0.self_attn.q_norm.weight` is missing",
        ),
        (
            |f| layer(f, "attention_bias", json!(true)),
            "with biases is not supported",
        ),
        (
            |f| layer(f, "hidden_act", json!("gelu")),
            "hidden_act `gelu` is not supported",
        ),
        (
            |f| {
                layer(
                    f,
                    "rope_scaling",
                    json!({"rope_type": "llama3", "factor": 8.0}),
                )
            },
            "rope_type `llama3` is not supported",
        ),
        (
            |f| layer(f, "layer_types", json!(["sliding_attention"])),
            "without a sliding_window",
        ),
        (
            |f| layer(f, "layer_types", json!([])),
            "layer_types has 0 entries for 1 layers",
        ),
        (
            |f| layer(f, "num_key_value_heads", json!(3)),
            "4 query heads cannot share 3",
        ),
        (
            |f| layer(f, "num_attention_heads", json!(0)),
            "does not lie between 1 and",
        ),
        (
            |f| layer(f, "head_dim", json!(usize::MAX)),
            "does not lie between 1 and",
        ),
        (
            |f| layer(f, "num_hidden_layers", json!(2)),
            "`layers.1.self_attn.q_proj.weight` is missing",
        ),
        (
            |f| {
                f.config["fc_norm"] = json!(true);
                f.config["norm_before_fc"] = json!(true);
            },
            "exclude each other",
        ),
        (
            |f| f.config["norm_before_fc"] = json!(true),
            "`input_norm.weight` is missing",
        ),
        (
            |f| f.config["fc_norm"] = json!(true),
            "`fc_norm.0.weight` is missing",
        ),
        (
            |f| f.config["draft_vocab_size"] = json!(102),
            "a draft vocabulary of 102 of 101 tokens",
        ),
        (
            |f| f.config["draft_vocab_size"] = json!(0),
            "a draft vocabulary of 0 of 101 tokens",
        ),
        (
            |f| f.config["draft_vocab_size"] = json!(39),
            "`d2t` has shape [40]",
        ),
        (|f| drop(f.tensors.remove("d2t")), "`d2t` is missing"),
        (
            |f| d2t(f, 39, 62),
            "d2t: draft token 39 is token 101 of 101",
        ),
        (|f| d2t(f, 39, -1), "element 39 of tensor `d2t` is -1"),
        (|f| t2d(f), "d2t and t2d name different tokens"),
    ];
    for (change, message) in wrong {
        let mut files = Files::open("gemma4-dense-eagle3");
        change(&mut files);
        let error = match Eagle3::load(&b, &files.checkpoint(), &*target) {
            Ok(_) => panic!("{message}: loaded"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(message), "`{error}` is not `{message}`");
    }
}

fn layer(files: &mut Files, key: &str, value: Value) {
    files.config["transformer_layer_config"][key] = value;
}
fn verifier(files: &mut Files, value: Value) {
    files.config["speculators_config"]["verifier"]["architectures"] = value;
}
fn taps(files: &mut Files, value: Value) {
    files.config["eagle_aux_hidden_state_layer_ids"] = value;
}
fn d2t(files: &mut Files, at: usize, value: i64) {
    let (_, _, bytes) = files.tensors.get_mut("d2t").unwrap();
    bytes[8 * at..8 * at + 8].copy_from_slice(&value.to_le_bytes());
}
/// Turns the membership of every token round.
fn t2d(files: &mut Files) {
    let (_, _, bytes) = files.tensors.get_mut("t2d").unwrap();
    bytes.iter_mut().for_each(|b| *b ^= 1);
}

/// Two drafters that see the same rows; one is asked for a draft in every round, the
/// other in every third. What is verified is the true text, some of it spoilt.
struct Twins {
    often: Box<dyn Drafter>,
    seldom: Box<dyn Drafter>,
    rounds: usize,
    truth: Vec<u32>,
    compared: Arc<Mutex<usize>>,
}

/// The states of both for one text, which is neither cut back nor forked.
struct TwinStates {
    often: Box<dyn DraftState>,
    seldom: Box<dyn DraftState>,
}

impl DraftState for TwinStates {
    fn keep(&mut self) {
        self.often.keep();
        self.seldom.keep();
    }

    fn cut(&mut self, rows: usize) {
        self.often.cut(rows);
        self.seldom.cut(rows);
    }

    fn forkable(&self, _rows: usize) -> usize {
        0
    }

    fn fork(&self, backend: &dyn Backend, rows: usize) -> Result<Box<dyn DraftState>, MemoryFull> {
        Ok(Box::new(TwinStates {
            often: self.often.fork(backend, rows)?,
            seldom: self.seldom.fork(backend, rows)?,
        }))
    }
}

/// `requests` as one of the twins gets them, with its own state of each.
fn with_states<'a>(
    requests: &'a mut [DraftRequest<'_>],
    of: fn(&mut TwinStates) -> &mut (dyn DraftState + 'static),
) -> Vec<DraftRequest<'a>> {
    let own = |request: &'a mut DraftRequest<'_>| DraftRequest {
        sequence: request.sequence,
        state: of(request.state.of()),
        tokens: request.tokens,
        spans: request.spans,
        kept: request.kept.clone(),
        limit: request.limit,
        given: request.given,
        sampling: request.sampling,
        history: request.history,
        draft_probs: request.draft_probs.as_deref_mut(),
        confidences: None,
        stop: None,
    };
    requests.iter_mut().map(own).collect()
}

impl Drafter for Twins {
    fn name(&self) -> &'static str {
        "twins"
    }

    fn taps(&self) -> &[usize] {
        self.often.taps()
    }

    fn needs_all_hidden(&self) -> bool {
        self.often.needs_all_hidden()
    }

    fn state(&self) -> Result<Box<dyn DraftState>, MemoryFull> {
        Ok(Box::new(TwinStates {
            often: self.often.state()?,
            seldom: self.seldom.state()?,
        }))
    }

    fn draft(
        &mut self,
        target: TargetView<'_>,
        hidden: &HiddenRows,
        requests: &mut [DraftRequest<'_>],
    ) -> Vec<Vec<u32>> {
        self.rounds += 1;
        let mut own = with_states(requests, |twins| &mut *twins.often);
        let often = self.often.draft(target, hidden, &mut own);
        let asked = self.rounds.is_multiple_of(3);
        let limits: Vec<usize> = requests.iter().map(|r| r.limit).collect();
        if !asked {
            requests.iter_mut().for_each(|r| r.limit = 0);
        }
        let mut own = with_states(requests, |twins| &mut *twins.seldom);
        let seldom = self.seldom.draft(target, hidden, &mut own);
        if asked {
            assert_eq!(often, seldom, "drafts of round {}", self.rounds);
            *self.compared.lock().unwrap() += often.iter().filter(|d| d.len() > 1).count();
        }
        let spoilt = |(request, limit): (&DraftRequest<'_>, usize)| {
            let n = request.tokens.len();
            let rest = self.truth.get(n..).unwrap_or_default();
            let right = rest.iter().enumerate().map(|(i, &t)| match (n + i) % 5 {
                0 => t.saturating_sub(1),
                _ => t,
            });
            right.take(limit).collect()
        };
        requests.iter().zip(limits).map(spoilt).collect()
    }
}

#[test]
fn a_heads_memory_never_holds_a_guess() {
    let b: Arc<dyn Backend> = Arc::new(Reference);
    let prompt: Vec<u32> = (5..25).collect();
    let options = || StreamOptions {
        sampling: Sampling::default(),
        max_tokens: 120,
        stop_tokens: Arc::new([]),
        draft: DraftLength::Fixed(4),
        logprobs: None,
    };
    let open = |name: &str| match name.split_once('/') {
        Some((name, layers)) => {
            let layers = layers.parse().unwrap();
            Files::open(name).with_mtp_layers(layers).checkpoint()
        }
        None => checkpoint(name),
    };
    let text = |name: &str, drafter: Option<Box<dyn Drafter>>| {
        let target = load_target(&*b, &open(name)).unwrap();
        let memory = Memory::new(&*b, target.plan(), size(1));
        let mut speculator = Speculator::new(b.clone(), target, memory, drafter);
        let mut stream = speculator.open(prompt.clone(), options()).unwrap();
        while stream.finish().is_none() {
            speculator.round(&mut [&mut stream], 7).unwrap();
        }
        (stream.tokens().to_vec(), stream.stats().accepted())
    };
    let eagle3 = |name: &str| {
        let target = load_target(&*b, &checkpoint(name)).unwrap();
        let head = Eagle3::load(&*b, &checkpoint(&format!("{name}-eagle3")), &*target).unwrap();
        boxed(&*b, head)
    };
    let mtp = |name: &str| {
        let target = load_target(&*b, &open(name)).unwrap();
        boxed(&*b, Qwen35Mtp::load(&*b, &open(name), &*target).unwrap())
    };
    type New<'a> = &'a dyn Fn(&str) -> Box<dyn Drafter>;
    let cases: [(&str, New<'_>); 6] = [
        (DENSE, &eagle3),
        ("gemma4-ple", &eagle3),
        ("qwen3_5-dense", &eagle3),
        ("qwen3_5-dense", &mtp),
        // Heads of several layers.
        ("qwen3_5-dense/2", &mtp),
        ("qwen3_5-dense/3", &mtp),
    ];
    for (name, new) in cases {
        let (truth, _) = text(name, None);
        let compared = Arc::new(Mutex::new(0));
        let twins = Twins {
            often: new(name),
            seldom: new(name),
            rounds: 0,
            truth: truth.clone(),
            compared: compared.clone(),
        };
        let (got, accepted) = text(name, Some(Box::new(twins)));
        assert_eq!(got, truth, "{name}");
        assert!(accepted > 10, "{name}: some drafts are right");
        assert!(*compared.lock().unwrap() > 4, "{name}: drafts are compared");
    }
}

#[test]
fn layers_of_an_mtp_head_that_do_not_fit_are_refused() {
    let b = Reference;
    let refused = |files: &Files| {
        let checkpoint = files.checkpoint();
        let target = load_target(&b, &checkpoint).unwrap();
        let inside = Qwen35Mtp::is_in(&checkpoint)
            .and_then(|_| Qwen35Mtp::load(&b, &checkpoint, &*target).map(|head| head.layers()));
        inside.unwrap_err().to_string()
    };
    let files = |n| Files::open("qwen3_5-dense").with_mtp_layers(n);
    let mut more = files(2);
    more.config["mtp_num_hidden_layers"] = json!(1);
    let mut fewer = files(2);
    fewer.config["mtp_num_hidden_layers"] = json!(3);
    let mut other = files(2);
    let mut copy = other.tensors["mtp.fc.weight"].clone();
    other
        .tensors
        .insert("mtp.layers.1.fc.weight".into(), copy.clone());
    let n = Qwen35Mtp::load(
        &b,
        &other.checkpoint(),
        &*load_target(&b, &other.checkpoint()).unwrap(),
    );
    assert_eq!(n.unwrap().layers(), 2, "a copy is what the layers share");
    copy.2[0] ^= 1;
    other.tensors.insert("mtp.layers.1.fc.weight".into(), copy);
    for (files, wanted) in [
        (
            more,
            "2 layers where config.json has `mtp_num_hidden_layers: 1`",
        ),
        (
            fewer,
            "the MTP head is incomplete: 11 of its 37 tensors are missing: `mtp.layers.2.",
        ),
        (other, "`mtp.layers.1.fc.weight` other than `mtp.fc.weight`"),
        (files(9), "a head of 9 MTP layers, more than 8"),
    ] {
        let error = refused(&files);
        assert!(error.contains(wanted), "{error}");
    }
}

fn boxed<H: ChainedHead + 'static>(b: &dyn Backend, head: H) -> Box<dyn Drafter> {
    let memory = Memory::new(b, head.plan(), size(1));
    Box::new(Chained::new(head, memory))
}

/// What a fuzzer found: each made a size of nothing, or one that overflowed.
#[test]
fn sizes_that_no_model_has_are_refused_by_field() {
    let b = Reference;
    let huge = u64::MAX / 2;
    for (name, field, value) in [
        ("gemma4-moe", "num_hidden_layers", huge),
        ("gemma4-moe", "head_dim", huge),
        ("gemma4-moe", "sliding_window", huge),
        ("gemma4-moe", "moe_intermediate_size", huge),
        ("gemma4-moe", "intermediate_size", 0),
        ("gemma4-ple", "hidden_size_per_layer_input", huge),
        ("qwen3_5-moe", "shared_expert_intermediate_size", 0),
        ("qwen3_5-moe", "moe_intermediate_size", 0),
        ("qwen3_5-moe", "num_experts", huge),
        ("qwen3_5-moe", "linear_value_head_dim", huge),
        ("qwen3_5-dense", "head_dim", 0),
        ("qwen3_5-dense", "intermediate_size", 0),
    ] {
        let folder = repository("tests/golden/checkpoints").join(name);
        let config = std::fs::read(folder.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&config).unwrap();
        config[field] = value.into();
        // Or the list says how many layers there are.
        config.as_object_mut().unwrap().remove("layer_types");
        let weights = std::fs::read(folder.join("model.safetensors")).unwrap();
        let files = vec![("model.safetensors".into(), weights.into())];
        let checkpoint = Checkpoint::from_bytes(&config.to_string(), files).unwrap();
        let error = load_target(&b, &checkpoint).err().unwrap().to_string();
        assert!(
            error.contains(&format!("{field} is {value}, ")),
            "{name}: {error}"
        );
    }
}
