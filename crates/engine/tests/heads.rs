//! The ways a draft head dies in silence (`docs/dead-heads.md`), each as a checkpoint
//! made from a bundled one by one change. None of them is silent here: asked for by
//! name, a head that is dead or not whole is an error; otherwise the model loads and
//! says why another drafts.

use engine::{DraftChoice, Engine, EngineOptions, LoadOptions, Model, Probing, Request, Source};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

const QWEN: &str = "tiny-qwen3.5";
const GEMMA: &str = "tiny-gemma4";
const ASSISTANT: &str = "tiny-gemma4-assistant";

/// One of these stands in every refusal.
const REMEDIES: &[&str] = &[
    "take the head of the original model",
    "fetch it again, or take the one that was made for this target",
    "take the one that was trained for this very target",
];

/// A tensor of a safetensors file.
#[derive(Clone)]
struct Tensor {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    data: Vec<u8>,
}

fn read(file: &Path) -> Vec<Tensor> {
    let bytes = fs::read(file).unwrap();
    let n = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Map<String, Value> = serde_json::from_slice(&bytes[8..8 + n]).unwrap();
    let tensor = |(name, entry): (String, Value)| {
        let at = |i: usize| 8 + n + entry["data_offsets"][i].as_u64().unwrap() as usize;
        Tensor {
            name,
            dtype: entry["dtype"].as_str().unwrap().into(),
            shape: serde_json::from_value(entry["shape"].clone()).unwrap(),
            data: bytes[at(0)..at(1)].to_vec(),
        }
    };
    let tensors = header
        .into_iter()
        .filter(|(name, _)| name != "__metadata__");
    tensors.map(tensor).collect()
}

fn write(file: &Path, tensors: &[Tensor]) {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), json!({"format": "mlx"}));
    let mut end = 0;
    for t in tensors {
        let begin = end;
        end += t.data.len();
        let entry = json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, end]});
        header.insert(t.name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    tensors.iter().for_each(|t| bytes.extend(&t.data));
    fs::write(file, bytes).unwrap();
}

fn bundled(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models")
        .join(model)
}

/// A copy of a bundled model that can be changed.
struct Copy(PathBuf);

impl Copy {
    fn of(model: &str, test: &str) -> Copy {
        let to = Path::new(env!("CARGO_TARGET_TMPDIR"))
            .join(test)
            .join(model);
        let _ = fs::remove_dir_all(&to);
        fs::create_dir_all(&to).unwrap();
        for entry in fs::read_dir(bundled(model)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
        }
        Copy(to)
    }

    /// Changes the tensors of `model.safetensors`.
    fn change(self, change: impl FnOnce(&mut Vec<Tensor>)) -> Self {
        let file = self.0.join("model.safetensors");
        let mut tensors = read(&file);
        change(&mut tensors);
        write(&file, &tensors);
        self
    }

    /// Changes each tensor whose name has `part` in it; there is at least one.
    fn each(self, part: &str, mut change: impl FnMut(&mut Tensor)) -> Self {
        self.change(|tensors| {
            let mut found = tensors
                .iter_mut()
                .filter(|t| t.name.contains(part))
                .peekable();
            assert!(found.peek().is_some(), "no tensor `{part}`");
            found.for_each(&mut change);
        })
    }

    fn without(self, part: &str) -> Self {
        self.change(|tensors| {
            let before = tensors.len();
            tensors.retain(|t| !t.name.contains(part));
            assert!(tensors.len() < before, "no tensor `{part}`");
        })
    }

    fn json(self, file: &str, change: impl FnOnce(&mut Value)) -> Self {
        let path = self.0.join(file);
        let mut value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        change(&mut value);
        fs::write(path, serde_json::to_vec(&value).unwrap()).unwrap();
        self
    }

    fn source(&self) -> Source {
        Source::Folder(self.0.clone())
    }

    fn load(&self, draft: DraftChoice) -> Result<Model, String> {
        load(self.source(), draft, Probing::default())
    }

    /// Why `draft` is refused when it is asked for, and who drafts and why when it is
    /// not.
    fn refused(&self, draft: DraftChoice) -> String {
        let error = self.load(draft).err().expect("refused");
        let model = self.load(DraftChoice::Auto).unwrap();
        assert_eq!(model.info.drafter, Some("ngram"), "{error}");
        let reason = &model.info.drafter_reason;
        let tail = |text: &str| text.split(": ").last().unwrap_or_default().to_owned();
        assert_eq!(tail(&error), tail(reason), "the same reason either way");
        assert!(
            REMEDIES.iter().any(|r| error.contains(r)),
            "no advice: {error}"
        );
        error
    }
}

fn load(source: Source, draft: DraftChoice, probing: Probing) -> Result<Model, String> {
    let backend = cpu::Cpu::new(cpu::CpuOptions::default()).unwrap();
    let options = LoadOptions {
        draft,
        probing,
        context: Some(256),
        ..LoadOptions::default()
    };
    engine::load(Arc::new(backend), &source, &options).map_err(|e| e.to_string())
}

fn has(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "`{part}` in: {text}");
    }
}

fn add_one(tensor: &mut Tensor, by: f32) {
    assert_eq!(tensor.dtype, "BF16");
    for pair in tensor.data.chunks_exact_mut(2) {
        let value = f32::from_bits(u32::from(u16::from_le_bytes([pair[0], pair[1]])) << 16) + by;
        pair.copy_from_slice(&((value.to_bits() >> 16) as u16).to_le_bytes());
    }
}

/// Whether a tensor is one of Qwen's offset norms.
fn is_norm(tensor: &Tensor) -> bool {
    let name = &tensor.name;
    name.ends_with("norm.weight") && !name.contains("linear_attn") || name.contains("pre_fc_norm")
}

/// Exchanges the two halves of each row.
fn swap_halves(tensor: &mut Tensor) {
    let row = tensor.data.len() / tensor.shape[0];
    tensor
        .data
        .chunks_exact_mut(row)
        .for_each(|r| r.rotate_left(row / 2));
}

/// Reverses the order of rows: plausible weights of another model.
fn reverse_rows(tensor: &mut Tensor) {
    let row = tensor.data.len() / tensor.shape[0];
    let rows: Vec<&[u8]> = tensor.data.chunks_exact(row).rev().collect();
    tensor.data = rows.concat();
}

fn mtp() -> DraftChoice {
    DraftChoice::Named("mtp", None)
}

#[test]
fn a_living_head_passes() {
    // A checkpoint that adds a tower to another one has that one's drafter.
    for (model, drafter) in [
        (QWEN, "mtp"),
        (GEMMA, "assistant"),
        ("tiny-gemma4-vision", "assistant"),
        ("tiny-qwen3.5-vision", "mtp"),
    ] {
        let model = load(
            Source::Folder(bundled(model)),
            DraftChoice::Auto,
            Probing::default(),
        );
        let info = model.unwrap().info;
        assert_eq!(info.drafter, Some(drafter));
        let preflight = &info.preflight;
        let result = preflight.result().expect("tried");
        assert_eq!(result.rows, engine::Finding::Exact);
        assert_eq!(result.chain, engine::Finding::Exact);
        let guesses = result.guesses.unwrap();
        assert!(
            guesses.share() >= 0.4 && guesses.drafted >= 10,
            "{drafter}: {guesses}"
        );
        let head = preflight.head.as_ref().unwrap();
        assert!(
            head.expected >= 15 && head.missing.is_empty() && head.extra.is_empty(),
            "{head:?}"
        );
        assert_eq!(preflight.drafter_sha256.is_some(), drafter == "assistant");
        assert_eq!(preflight.target_sha256.as_ref().map(String::len), Some(64));
        assert!(preflight.warnings.is_empty(), "{:?}", preflight.warnings);
    }
}

#[test]
fn sampling_does_not_turn_a_head_off() {
    let model = load(
        Source::Folder(bundled(QWEN)),
        DraftChoice::Auto,
        Probing::default(),
    )
    .unwrap();
    let engine = Engine::start(model, EngineOptions::default());
    let prompt = engine
        .text()
        .encode_prompt("The dog went to the park.")
        .unwrap();
    let mut request = Request::new(prompt);
    request.sampling.temperature = 1.0;
    request.max_tokens = Some(24);
    let (_, _, outcome) = engine.complete(request).unwrap();
    assert!(
        outcome.speculation.engaged && outcome.speculation.accepted > 0,
        "{outcome:?}"
    );
}

#[test]
fn a_stripped_head_is_named() {
    let copy = Copy::of(QWEN, "stripped").without("mtp.");
    has(
        &copy.refused(mtp()),
        &[
            "the drafter `mtp` cannot be used: ",
            "mtp_num_hidden_layers: 1",
            "a conversion has dropped the head",
        ],
    );
}

#[test]
fn a_checkpoint_that_never_had_a_head_says_so() {
    let copy = Copy::of(QWEN, "none")
        .without("mtp.")
        .json("config.json", |c| c["mtp_num_hidden_layers"] = json!(0));
    let error = copy.load(mtp()).err().unwrap();
    has(
        &error,
        &[
            "the drafter `mtp` cannot be used: this qwen3_5 checkpoint has no MTP head and promises none",
        ],
    );
    let model = copy.load(DraftChoice::Auto).unwrap();
    has(
        &model.info.drafter_reason,
        &["no draft head in or beside the checkpoint"],
    );
}

#[test]
fn tensors_without_a_promise_are_named() {
    let copy = Copy::of(QWEN, "unpromised").json("config.json", |c| {
        c.as_object_mut().unwrap().remove("mtp_num_hidden_layers");
    });
    has(
        &copy.refused(mtp()),
        &[
            "has `mtp.*` tensors",
            "no `mtp_num_hidden_layers`, which is 1",
        ],
    );
}

#[test]
fn half_a_head_is_counted() {
    let copy = Copy::of(QWEN, "half")
        .without("mtp.fc.")
        .without("mtp.norm.");
    has(
        &copy.refused(mtp()),
        &[
            "the MTP head is incomplete: 2 of its 15 tensors are missing: `mtp.fc.weight`, `mtp.norm.weight`",
        ],
    );
    let assistant = Copy::of(ASSISTANT, "half").without("layers.2.self_attn.q_norm");
    let gemma = Copy::of(GEMMA, "half");
    has(
        &gemma.refused(DraftChoice::Named("assistant", Some(assistant.source()))),
        &[
            "the drafter `assistant` cannot be used: `",
            "half/tiny-gemma4-assistant`: ",
            "the assistant is incomplete: 1 of its",
            "`layers.2.self_attn.q_norm.weight`",
        ],
    );
}

#[test]
fn a_part_that_nobody_reads_is_named() {
    let bias = Tensor {
        name: "mtp.fc.bias".into(),
        dtype: "F32".into(),
        shape: vec![384],
        data: [0.5f32.to_le_bytes(); 384].concat(),
    };
    let copy = Copy::of(QWEN, "unread").change(|tensors| tensors.push(bias));
    has(
        &copy.refused(mtp()),
        &["the draft head has `mtp.fc.bias`, which cannot be applied here"],
    );
}

#[test]
fn a_quantised_head_needs_its_scales() {
    for part in ["scales", "biases"] {
        let name = format!("mtp.layers.0.mlp.up_proj.{part}");
        let copy = Copy::of(QWEN, part).without(&name);
        has(
            &copy.refused(mtp()),
            &[&format!("tensor `{name}` is missing")],
        );
    }
}

#[test]
fn norms_with_and_without_one_are_told_apart() {
    // A head as Hugging Face stores it inside a converted file.
    let raw = Copy::of(QWEN, "raw-head").change(|tensors| {
        let norms = tensors
            .iter_mut()
            .filter(|t| t.name.starts_with("mtp.") && is_norm(t));
        norms.for_each(|t| add_one(t, -1.0));
    });
    has(
        &raw.refused(mtp()),
        &["cannot tell whether the norms of the MTP head hold `w` or `1 + w`"],
    );
    // The same mistake in the target is no matter of the drafter.
    let raw = Copy::of(QWEN, "raw-trunk").change(|tensors| {
        let norms = tensors
            .iter_mut()
            .filter(|t| !t.name.starts_with("mtp.") && is_norm(t));
        norms.for_each(|t| add_one(t, -1.0));
    });
    let error = raw.load(DraftChoice::Auto).err().unwrap();
    has(
        &error,
        &["cannot tell whether the norms of the trunk hold `w` or `1 + w`"],
    );
    // Folded once more by a tool that took the file for a raw one.
    let twice = Copy::of(QWEN, "folded-twice").change(|tensors| {
        let norms = tensors
            .iter_mut()
            .filter(|t| !t.name.starts_with("mtp.") && is_norm(t));
        norms.for_each(|t| add_one(t, 1.0));
    });
    let model = twice.load(DraftChoice::Auto).unwrap();
    let warnings = model.info.preflight.warnings.join("\n");
    has(&warnings, &["the norms of the trunk may hold `2 + w`"]);
}

#[test]
fn heads_that_load_and_guess_wrong_are_dead() {
    let dead = [
        "loads and drafts, but its guesses are not this target's",
        "first guesses accepted",
    ];
    let swapped = Copy::of(QWEN, "swapped").each("mtp.fc.weight", swap_halves);
    has(&swapped.refused(mtp()), &dead);
    let foreign = Copy::of(QWEN, "foreign").each("mtp.layers.0.self_attn.o_proj", reverse_rows);
    let foreign = foreign.each("mtp.layers.0.mlp.down_proj", reverse_rows);
    has(&foreign.refused(mtp()), &dead);
    let assistant = Copy::of(ASSISTANT, "dead").each("pre_projection", reverse_rows);
    let assistant = assistant.each("self_attn.o_proj", reverse_rows);
    let gemma = Copy::of(GEMMA, "dead");
    has(
        &gemma.refused(DraftChoice::Named("assistant", Some(assistant.source()))),
        &dead,
    );
}

/// The bundled head with its left and right columns exchanged and a manifest that says so is the
/// same head: without its manifest it guesses nothing right.
#[test]
fn a_manifest_that_asks_for_another_order_is_obeyed() {
    let contract = json!({"concat_order": "hidden_embedding", "new": 1});
    let guesses = |copy: &Copy| {
        let model = copy.load(mtp()).unwrap();
        model.info.preflight.result().unwrap().guesses.unwrap()
    };
    let plain = Copy::of(QWEN, "in-order");
    let swapped = Copy::of(QWEN, "hidden-first").each("mtp.fc.", swap_halves);
    let manifest = json!({"mtp_contract": contract}).to_string();
    fs::write(swapped.0.join("mtplx_runtime.json"), manifest).unwrap();
    assert_eq!(guesses(&swapped), guesses(&plain));
    let said = Copy::of(QWEN, "hidden-first-config")
        .each("mtp.fc.", swap_halves)
        .json("config.json", |c| {
            c["mtplx_mtp_contract"] = contract.clone()
        });
    // Files that were made later count more.
    let manifest = json!({"mtp_contract": {"concat_order": "embedding_hidden"}}).to_string();
    fs::write(said.0.join("mtplx_runtime.json"), manifest).unwrap();
    assert_eq!(guesses(&said), guesses(&plain));
}

#[test]
fn a_head_in_one_file_drafts_as_its_neighbors_say() {
    let target = Copy::of(QWEN, "one-file");
    let folder = target.0.join("head");
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("head.safetensors");
    let mut tensors = read(&target.0.join("model.safetensors"));
    tensors.retain(|t| t.name.contains("mtp."));
    let choice = || DraftChoice::Named("mtp", Some(Source::Folder(file.clone())));
    write(&file, &tensors);
    let guesses = |model: Model| model.info.preflight.result().unwrap().guesses.unwrap();
    let own = guesses(target.load(mtp()).unwrap());
    assert_eq!(guesses(target.load(choice()).unwrap()), own);
    for t in tensors.iter_mut().filter(|t| t.name.contains("mtp.fc.")) {
        swap_halves(t);
    }
    write(&file, &tensors);
    let error = target.load(choice()).err().expect("refused");
    has(&error, &["its guesses are not this target's"]);
    let manifest = json!({"mtp_contract": {"concat_order": "hidden_embedding"}}).to_string();
    fs::write(folder.join("mtplx_runtime.json"), manifest).unwrap();
    assert_eq!(guesses(target.load(choice()).unwrap()), own);
}

#[test]
fn a_manifest_that_asks_for_other_rows_is_obeyed() {
    let plain = Copy::of(QWEN, "post_norm");
    let manifest = json!({"mtp_contract": {"hidden_variant": "post_norm", "new": 1}}).to_string();
    fs::write(plain.0.join("mtplx_runtime.json"), manifest).unwrap();
    let by_position = |copy: &Copy| {
        let engine = Engine::start(copy.load(mtp()).unwrap(), EngineOptions::default());
        let prompt = engine.text().encode_prompt("The dog went to the park.");
        let mut request = Request::new(prompt.unwrap());
        request.max_tokens = Some(48);
        request.draft = Some(engine::DraftLength::Fixed(3));
        let (text, _, outcome) = engine.complete(request).unwrap();
        (text, outcome.speculation.by_position)
    };
    let (text, by_rows) = by_position(&plain);
    for key in ["hidden_variant", "base_hidden_variant"] {
        let copy = Copy::of(QWEN, key);
        let manifest = json!({"mtp_contract": {key: "pre_norm"}}).to_string();
        fs::write(copy.0.join("mtplx_runtime.json"), manifest).unwrap();
        let (same, other) = by_position(&copy);
        assert_eq!(same, text, "guesses change no token");
        assert_ne!(
            format!("{other:?}"),
            format!("{by_rows:?}"),
            "{key} is obeyed"
        );
    }
}

#[test]
fn one_newline_in_the_template_means_a_new_trial() {
    let copy = Copy::of(QWEN, "newline");
    let cache = copy.0.join("cache");
    let tried = || {
        let probing = Probing::Run {
            cache: Some(cache.clone()),
        };
        let model = load(copy.source(), DraftChoice::Auto, probing).unwrap();
        json!(model.info.preflight.trial)["cached"].clone()
    };
    assert_eq!([tried(), tried()], [json!(false), json!(true)]);
    let template = copy.0.join("chat_template.jinja");
    let text = fs::read_to_string(&template).unwrap();
    fs::write(&template, text + "\n\n").unwrap();
    assert_eq!([tried(), tried()], [json!(false), json!(true)]);
    // The same weights under another name are the same model.
    let weights = copy.0.join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, bytes).unwrap();
    assert_eq!(tried(), json!(true));
}

#[test]
fn a_multimodal_checkpoint_keeps_its_head() {
    let copy = Copy::of(QWEN, "multimodal")
        .change(|tensors| {
            for t in tensors {
                let name = t.name.strip_prefix("model.").unwrap_or(&t.name);
                t.name = format!("model.language_model.{name}");
            }
        })
        .json("config.json", |c| {
            let text = c.take();
            *c = json!({
                "architectures": ["Qwen3_5ForConditionalGeneration"],
                "model_type": "qwen3_5",
                "quantization": text["quantization"],
                "text_config": text,
            });
        });
    let info = copy.load(mtp()).unwrap().info;
    assert!(info.preflight.result().unwrap().guesses.unwrap().share() > 0.5);
}

#[test]
fn a_drafter_beside_its_target_is_found_and_a_foreign_one_refused() {
    let gemma = Copy::of(GEMMA, "beside");
    assert_eq!(
        gemma.load(DraftChoice::Auto).unwrap().info.drafter,
        Some("ngram")
    );
    let assistant = Copy::of(ASSISTANT, "beside");
    let info = gemma.load(DraftChoice::Auto).unwrap().info;
    assert_eq!(info.drafter, Some("assistant"));
    // Of another vocabulary.
    let other = assistant.json("config.json", |c| {
        c["text_config"]["vocab_size"] = json!(8000)
    });
    has(
        &gemma.refused(DraftChoice::Named("assistant", None)),
        &[
            "the draft head does not fit the target: its vocabulary size is 8000, the target's is 8192",
        ],
    );
    // Of another tokenizer with as many tokens.
    let other = other.json("config.json", |c| {
        c["text_config"]["vocab_size"] = json!(8192)
    });
    fs::copy(
        gemma.0.join("tokenizer.json"),
        other.0.join("tokenizer.json"),
    )
    .unwrap();
    assert_eq!(
        gemma.load(DraftChoice::Auto).unwrap().info.drafter,
        Some("assistant")
    );
    let other = other.json("tokenizer.json", |t| {
        let vocab = t["model"]["vocab"].as_object_mut().unwrap();
        let (a, b) = (
            vocab.keys().nth(900).unwrap().clone(),
            vocab.keys().nth(901).unwrap().clone(),
        );
        let (x, y) = (vocab[&a].clone(), vocab[&b].clone());
        vocab.insert(a, y);
        vocab.insert(b, x);
    });
    has(
        &gemma.refused(DraftChoice::Named("assistant", None)),
        &["its tokenizer is another one (token "],
    );
    drop(other);
    let qwen = Source::Folder(bundled(QWEN));
    let assistant = DraftChoice::Named("assistant", Some(Source::Folder(bundled(ASSISTANT))));
    let error = load(qwen, assistant, Probing::default()).err().unwrap();
    has(
        &error,
        &["its family is gemma4_assistant, the target's is qwen3_5"],
    );
}

#[test]
fn a_stale_sidecar_is_found_by_shape_or_by_trial() {
    let head = |copy: &Copy| -> Vec<Tensor> {
        let all = read(&copy.0.join("model.safetensors"));
        all.into_iter()
            .filter(|t| t.name.starts_with("mtp."))
            .collect()
    };
    let copy = Copy::of(QWEN, "sidecar");
    let sidecar = copy.0.join("mtp.safetensors");
    let mut tensors = head(&copy);
    // Of a target with another width.
    let fc = tensors
        .iter_mut()
        .find(|t| t.name == "mtp.fc.weight")
        .unwrap();
    fc.data.truncate(fc.data.len() / 2);
    fc.shape[0] /= 2;
    write(&sidecar, &tensors);
    has(
        &copy.refused(mtp()),
        &["tensor `mtp.fc.weight` has shape [192, 768], expected [384, 768]"],
    );
    // Of another training of the same target.
    let mut tensors = head(&copy);
    tensors
        .iter_mut()
        .filter(|t| t.name.contains("o_proj") || t.name.contains("down_proj"))
        .for_each(reverse_rows);
    write(&sidecar, &tensors);
    has(&copy.refused(mtp()), &["its guesses are not this target's"]);
    // Its own; the head in the trunk's file is then listed as unused.
    write(&sidecar, &head(&copy));
    let info = copy.load(mtp()).unwrap().info;
    assert_eq!(info.drafter, Some("mtp"));
    assert!(
        info.unused_tensors
            .iter()
            .any(|t| t == "mtp.fc.weight in model.safetensors")
    );
}

#[test]
fn a_head_published_alone_drafts_for_its_target() {
    let copy = Copy::of(QWEN, "alone");
    let all = read(&copy.0.join("model.safetensors"));
    let (mut head, trunk): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|t| t.name.starts_with("mtp."));
    write(&copy.0.join("model.safetensors"), &trunk);
    let folder = copy.0.join("head");
    fs::create_dir_all(&folder).unwrap();
    fs::write(
        folder.join("config.json"),
        r#"{"model_type": "qwen3_5_mtp"}"#,
    )
    .unwrap();
    for t in &mut head {
        t.name = t.name.strip_prefix("mtp.").unwrap().into();
    }
    write(&folder.join("model.safetensors"), &head);
    let info = copy
        .load(DraftChoice::Named(
            "mtp",
            Some(Source::Folder(folder.clone())),
        ))
        .unwrap()
        .info;
    assert!(info.preflight.result().unwrap().guesses.unwrap().share() > 0.5);
    assert!(info.preflight.drafter_sha256.is_some());
    // Known to belong to it, and therefore found by itself.
    let backend = Arc::new(cpu::Cpu::new(cpu::CpuOptions::default()).unwrap());
    let options = LoadOptions {
        drafters: vec![Source::Folder(folder)],
        context: Some(256),
        ..LoadOptions::default()
    };
    let info = engine::load(backend, &copy.source(), &options)
        .unwrap()
        .info;
    assert_eq!(info.drafter, Some("mtp"), "{}", info.drafter_reason);
}

#[test]
fn several_heads_are_loaded_tried_and_timed_and_a_request_may_name_one() {
    let eagle3 = Source::Folder(bundled("tiny-qwen3.5-eagle3"));
    let several = |heads: &[(&'static str, Option<Source>)]| DraftChoice::Several {
        heads: heads.to_vec(),
        ngrams: true,
    };
    let choice = several(&[("mtp", None), ("eagle3", Some(eagle3.clone()))]);
    let source = || Source::Folder(bundled(QWEN));
    let model = load(source(), choice, Probing::default()).unwrap();
    let info = &model.info;
    assert_eq!(info.drafters, ["mtp", "eagle3", "ngram"]);
    assert_eq!(info.drafter, Some("mtp"));
    has(&info.drafter_reason, &["MTP head", "EAGLE-3 head"]);
    let of_other = &info.preflight.others[0];
    assert_eq!(of_other.drafter, "eagle3");
    assert!(of_other.drafter_sha256.is_some());
    assert!(of_other.trial.result().unwrap().guesses.unwrap().share() > 0.3);
    let alone = load(source(), mtp(), Probing::default()).unwrap();
    let bytes = |model: &Model| model.request_bytes(200).drafter;
    assert!(bytes(&model) > bytes(&alone), "both heads remember");
    let times = &info.calibration.as_ref().unwrap().times;
    for head in 0..2 {
        let timed = |t: &&engine::CostPoint| t.of == engine::CostOf::Draft && t.head == head;
        assert!(times.iter().filter(timed).count() >= 4, "{times:?}");
    }

    let guessers = ["mtp", "eagle3", "ngram"].map(|name| info.guesser(name));
    assert_eq!(info.guesser("model"), None);
    let plain = load(source(), DraftChoice::None, Probing::default()).unwrap();
    let prompt = model.text.encode_prompt("Once upon a time").unwrap();
    let write = |engine: &Engine, drafters: engine::Guessers, length: Option<usize>| {
        let mut request = Request::new(prompt.clone());
        request.max_tokens = Some(60);
        request.drafters = drafters;
        request.draft = length.map(engine::DraftLength::Fixed);
        let (text, _, outcome) = engine.complete(request).unwrap();
        (text, outcome)
    };
    let (want, _) = write(
        &Engine::start(plain, EngineOptions::default()),
        engine::Guessers::default(),
        None,
    );
    let engine = Engine::start(model, EngineOptions::default());
    let (text, outcome) = write(&engine, engine::Guessers::default(), None);
    assert_eq!(text, want);
    assert!(outcome.speculation.engaged);
    for (guesser, name) in guessers.into_iter().zip(["mtp", "eagle3"]) {
        let (text, outcome) = write(&engine, [guesser.unwrap()].into_iter().collect(), Some(3));
        assert_eq!(text, want, "{name}");
        let by: Vec<String> = outcome
            .speculation
            .by_drafter
            .into_iter()
            .map(|counts| counts.drafter)
            .collect();
        assert_eq!(by, [name]);
        assert_eq!(outcome.speculation.drafter.as_deref(), Some(name));
    }

    let error = |choice| load(source(), choice, Probing::default()).err().unwrap();
    let twice = several(&[("mtp", None), ("mtp", None)]);
    has(&error(twice), &["`mtp`", "twice"]);
    // One that cannot be had is an error, whatever the others are.
    let wrong = several(&[("mtp", None), ("dspark", Some(eagle3))]);
    has(&error(wrong), &["`dspark`"]);
}

#[test]
fn a_trial_that_was_not_run_says_why() {
    let reason = "as the test wants".to_owned();
    let probing = Probing::Skip { reason };
    let info = load(Source::Folder(bundled(QWEN)), mtp(), probing)
        .unwrap()
        .info;
    assert_eq!(
        json!(info.preflight.trial),
        json!({"skipped": "as the test wants"})
    );
    assert_eq!(info.preflight.summary(), "not tried: as the test wants");
}
