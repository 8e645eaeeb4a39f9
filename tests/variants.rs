//! Checkpoints that say in another way what a usual one says, or whose writer asks for a head to be
//! used in another way: both compute what they should, with `==`.

use backend::{Backend, Batch, Ops, Reference, Store};
use cache::{KeptSize, Memory, MemorySize};
use models::{ChainedHead, Gemma4Assistant, Qwen35Mtp, Target, load_target};
use serde_json::{Value, json};
use suites::files::Files;
use suites::repository;
use suites::rows::{HeadRows, head_rows};
use weights::Checkpoint;

const QWEN: &str = "qwen3_5-dense";

fn size() -> MemorySize {
    MemorySize {
        sequences: 1,
        context: 256,
        step_rows: 64,
        kv_format: cache::KvPlan::both(&quant::kv::F32),
        running_pages: None,
        kept: KeptSize::default(),
    }
}

/// Logits of `target` after each token of a short text.
fn scores(b: &dyn Backend, target: &dyn Target) -> Vec<f32> {
    let mut memory = Memory::new(b, target.plan(), size());
    let mut sequence = memory.open().unwrap();
    let tokens: Vec<u32> = (3..20).collect();
    let mut batch = Batch::default();
    let n = tokens.len();
    memory.push(&mut batch, &mut sequence, &tokens, n).unwrap();
    let hidden = target.forward(b, &batch, &mut memory);
    b.download(&target.logits(b, &hidden)).into_owned()
}

/// What an MTP head makes of the rows of a short text: its features, its rows, the logits of
/// all tokens and those of a few.
fn mtp_rows(b: &dyn Backend, head: &Qwen35Mtp, target: &dyn Target) -> [Vec<f32>; 5] {
    let HeadRows {
        hidden,
        features,
        rows: x,
    } = head_rows(b, head, target, size());
    let listed = head.listed_logits(b, &x).unwrap();
    let all = head.logits(b, target, &x);
    [&hidden, &features, &x, &all.logits, &listed.logits].map(|x| b.download(x).into_owned())
}

#[test]
fn a_contract_says_which_rows_an_mtp_head_reads_and_hands_on() {
    let b = Reference;
    let plain = Files::open(QWEN).checkpoint();
    let target = load_target(&b, &plain).unwrap();
    let run = |contract: Value| {
        let mut files = Files::open(QWEN);
        files.config["mtplx_mtp_contract"] = contract;
        let checkpoint = files.checkpoint();
        let head = Qwen35Mtp::load(&b, &checkpoint, &*target).unwrap();
        let head = head.with_shortlist(&b, &plain, &*target, &[2, 3, 5, 40]);
        mtp_rows(&b, &head.unwrap(), &*target)
    };
    let cols = target.hidden_size();
    let normed = |x: &[f32], name: &str| {
        let weight = b.upload(1, cols, &plain.norm(name, cols).unwrap());
        let x = b.upload(x.len() / cols, cols, x);
        b.download(&b.rms_norm(&x, Some(&weight), cols, 1e-6))
            .into_owned()
    };
    let [hidden, features, x, logits, listed] = run(json!({"hidden_variant": "post_norm"}));
    assert_eq!(features, hidden);

    let [_, same, before, scores, some] = run(json!({"hidden_variant": "pre_norm"}));
    assert_eq!(same, hidden);
    assert_eq!(normed(&before, "mtp.norm.weight"), x);
    assert_eq!(
        [&scores, &some],
        [&logits, &listed],
        "the chain alone goes on from another row"
    );

    let [_, before, other, ..] = run(json!({"base_hidden_variant": "pre_norm"}));
    assert_eq!(normed(&before, "norm.weight"), hidden);
    assert_ne!(other, x);
}

/// The files of [`QWEN`] as those of Qwen 3.8: for pictures, too, with an activation of the output
/// gate by a name that the weights do not know, and `A_log` and gated norms in `dtype`, whose
/// digits are those of bf16.
fn qwen_3_8(dtype: &str) -> Files {
    let mut files = Files::open(QWEN);
    files.rename("model.", "model.language_model.");
    let mut text = files.config.take();
    text["model_type"] = json!("qwen3_5_text");
    text["output_gate_type"] = json!("swish");
    text["mtp_use_dedicated_embeddings"] = json!(false);
    files.config = json!({
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "tie_word_embeddings": text["tie_word_embeddings"],
        "text_config": text,
    });
    let mut n = 0;
    for (name, (stored, _, bytes)) in &mut files.tensors {
        if !name.ends_with("A_log") && !name.ends_with("linear_attn.norm.weight") {
            continue;
        }
        assert_eq!(stored, "F32", "{name}");
        let digits = bytes.chunks_exact(4).map(|b| [b[2], b[3]]);
        *bytes = match dtype {
            "BF16" => digits.flatten().collect(),
            _ => digits.flat_map(|[low, high]| [0, 0, low, high]).collect(),
        };
        *stored = dtype.to_owned();
        n += 1;
    }
    assert_eq!(n, 6, "two in each of three layers");
    files
}

#[test]
fn the_layout_of_qwen_3_8_is_the_same_model() {
    let b = Reference;
    let of = |dtype| {
        let checkpoint = qwen_3_8(dtype).checkpoint();
        let target = load_target(&b, &checkpoint).unwrap();
        assert!(Qwen35Mtp::is_in(&checkpoint).unwrap());
        let head = Qwen35Mtp::load(&b, &checkpoint, &*target).unwrap();
        let head = head.with_shortlist(&b, &checkpoint, &*target, &[1, 9]);
        let rows = mtp_rows(&b, &head.unwrap(), &*target);
        assert_eq!(checkpoint.unused(), [""; 0]);
        (scores(&b, &*target), rows)
    };
    assert_eq!(of("BF16"), of("F32"));
}

#[test]
fn the_assistant_of_a_unified_model_is_an_assistant() {
    let b = Reference;
    let target = load_target(&b, &Files::open("gemma4-dense").checkpoint()).unwrap();
    let rows = |files: &Files| {
        let checkpoint = files.checkpoint();
        let head = Gemma4Assistant::load(&b, &checkpoint, &*target).unwrap();
        assert_eq!(checkpoint.unused(), [""; 0]);
        let mut memory = Memory::new(&b, target.plan(), size());
        let mut sequence = memory.open().unwrap();
        let tokens: Vec<u32> = (3..20).collect();
        let mut batch = Batch::default();
        let n = tokens.len();
        memory.push(&mut batch, &mut sequence, &tokens, n).unwrap();
        let hidden = target.forward(&b, &batch, &mut memory);
        let mut next = Batch::default();
        memory.peek(&mut next, &sequence, 20);
        let last = b.gather(&hidden, &[n - 1]);
        let (z, _) = head.step(&b, &*target, &last, &next, &memory);
        b.download(&head.logits(&b, &z).logits).into_owned()
    };
    let mut files = Files::open("gemma4-dense-assistant");
    let want = rows(&files);
    // As the release has it: sizes of full layers by layer.
    files.config["architectures"] = json!(["Gemma4UnifiedAssistantForCausalLM"]);
    files.config["model_type"] = json!("gemma4_unified_assistant");
    let text = &mut files.config["text_config"];
    text["model_type"] = json!("gemma4_unified_text");
    let full = json!({"head_dim": text["global_head_dim"], "num_key_value_heads": 1});
    let layers = text["layer_types"].as_array().unwrap().iter().enumerate();
    let layers = layers.filter(|(_, kind)| *kind == "full_attention");
    let layers: serde_json::Map<String, Value> =
        layers.map(|(i, _)| (i.to_string(), full.clone())).collect();
    let text = files.config["text_config"].as_object_mut().unwrap();
    text.remove("global_head_dim");
    text.remove("num_global_key_value_heads");
    text.insert("per_layer_config".into(), layers.into());
    assert_eq!(rows(&files), want);
}

#[test]
fn a_window_hides_older_rows_from_an_assistant() {
    let b = Reference;
    let target = load_target(&b, &Files::open("gemma4-dense").checkpoint()).unwrap();
    let checkpoint = Files::open("gemma4-dense-assistant").checkpoint();
    let logits = |first: u32, window: Option<usize>| {
        let head = Gemma4Assistant::load(&b, &checkpoint, &*target).unwrap();
        let head = match window {
            Some(rows) => head.with_window(rows),
            None => head,
        };
        let mut memory = Memory::new(&b, target.plan(), size());
        let mut sequence = memory.open().unwrap();
        // Another first token changes the keys of all rows a little, so the hidden row is fixed.
        let tokens: Vec<u32> = [first].into_iter().chain(30..60).collect();
        let mut batch = Batch::default();
        let n = tokens.len();
        memory.push(&mut batch, &mut sequence, &tokens, n).unwrap();
        target.forward(&b, &batch, &mut memory);
        let mut next = Batch::default();
        memory.peek(&mut next, &sequence, 60);
        let last = b.upload(1, target.hidden_size(), &vec![0.5; target.hidden_size()]);
        let (z, _) = head.step(&b, &*target, &last, &next, &memory);
        b.download(&head.logits(&b, &z).logits).into_owned()
    };
    let whole = logits(5, None);
    assert_eq!(
        logits(5, Some(31)),
        whole,
        "a window of all rows hides none"
    );
    let windows = [1, 2, 7, 30].map(|rows| logits(5, Some(rows)));
    for (i, narrow) in windows.iter().enumerate() {
        assert_ne!(*narrow, whole);
        assert!(windows[..i].iter().all(|other| other != narrow));
    }
}

/// A GGUF file of the assistant of a unified model is one of an assistant, not of a target.
#[test]
fn a_unified_assistant_becomes_a_gguf_file_of_an_assistant() {
    let mut files = Files::open("gemma4-dense-assistant");
    files.config["architectures"] = json!(["Gemma4UnifiedAssistantForCausalLM"]);
    files.config["model_type"] = json!("gemma4_unified_assistant");
    files.config["text_config"]["model_type"] = json!("gemma4_unified_text");
    let checkpoint = files.checkpoint();
    let folder = std::env::temp_dir().join(format!("paceline-unified-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let file = folder.join("assistant.gguf");
    let recipe = convert::convert(&checkpoint).unwrap();
    recipe.write_gguf(&file, &[], &mut |_, _| {}).unwrap();
    let written = Checkpoint::open(&file).unwrap();
    assert_eq!(
        written.architecture().unwrap(),
        "Gemma4AssistantForCausalLM"
    );
    let target = Checkpoint::open(&repository("tests/golden/checkpoints/gemma4-dense")).unwrap();
    let target = load_target(&Reference, &target).unwrap();
    Gemma4Assistant::load(&Reference, &written, &*target).unwrap();
    std::fs::remove_dir_all(&folder).unwrap();
}

/// What a head's writer asks for goes with the head, into folders; GGUF files cannot say it.
#[test]
fn a_contract_goes_with_its_head() {
    let mut files = Files::open(QWEN);
    files.config["mtplx_mtp_contract"] = json!({"hidden_variant": "pre_norm"});
    let (with, plain) = (files.checkpoint(), Files::open(QWEN).checkpoint());
    let recipe = |checkpoint| convert::convert(checkpoint).unwrap();
    let mut other = recipe(&plain);
    other.attach_head(recipe(&with));
    assert_eq!(
        other.config["mtplx_mtp_contract"]["hidden_variant"],
        "pre_norm"
    );
    let error = other.write_gguf("none.gguf".as_ref(), &[], &mut |_, _| {});
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`hidden_variant: pre_norm`"), "{error}");
    let mut back = recipe(&with);
    back.attach_head(recipe(&plain));
    assert!(back.config.get("mtplx_mtp_contract").is_none());
}
