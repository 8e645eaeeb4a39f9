//! What `paceline inspect` plans, against what a server holds whose context is full.
//!
//! Small layers under large tables, many heads of keys and values, and a draft head of
//! the same kind: weights, memory and drafter have a third each, so that a plan without
//! one of them is far off. All weights are 0, which is memory like any other.

use crate::{Server, folder, good, models, paceline};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const HIDDEN: usize = 64;
const HEADS: usize = 8;
const HEAD_DIM: usize = 256;
const VOCAB: usize = 1 << 18;
const LAYERS: usize = 3;
/// Rows of the head's own output.
const DRAFT_VOCAB: usize = 1 << 14;
const CONTEXT: usize = 2048;
type Tensors = Vec<(String, Vec<usize>)>;

/// A checkpoint of these tensors, bf16 but for a map of tokens, all zeros, of which no
/// byte is written.
fn checkpoint(folder: &Path, config: &Value, tensors: &Tensors) {
    fs::create_dir_all(folder).unwrap();
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let begin = end;
        let (dtype, bytes) = if name == "d2t" {
            ("I64", 8)
        } else {
            ("BF16", 2)
        };
        end += bytes * shape.iter().product::<usize>();
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, end]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let path = folder.join("model.safetensors");
    let start = [&(header.len() as u64).to_le_bytes(), header.as_bytes()].concat();
    fs::write(&path, &start).unwrap();
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len((start.len() + end) as u64).unwrap();
}

fn linear(at: &str, name: &str, rows: usize, cols: usize) -> (String, Vec<usize>) {
    (format!("{at}{name}.weight"), vec![rows, cols])
}

/// Attention and feed-forward block at `at`; attention reads rows of `input`.
fn layer(at: &str, input: usize) -> Tensors {
    let heads = HEADS * HEAD_DIM;
    vec![
        linear(at, "self_attn.q_proj", heads, input),
        linear(at, "self_attn.k_proj", heads, input),
        linear(at, "self_attn.v_proj", heads, input),
        linear(at, "self_attn.o_proj", HIDDEN, heads),
        linear(at, "mlp.gate_proj", HIDDEN, HIDDEN),
        linear(at, "mlp.up_proj", HIDDEN, HIDDEN),
        linear(at, "mlp.down_proj", HIDDEN, HIDDEN),
    ]
}

fn norms(at: &str, names: &[&str], width: usize) -> Tensors {
    let norm = |name: &&str| (format!("{at}{name}.weight"), vec![width]);
    names.iter().map(norm).collect()
}

fn target(to: &Path) {
    let rope = json!({"rope_type": "default", "rope_theta": 10000.0});
    let config = json!({
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "layer_types": vec!["full_attention"; LAYERS],
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_global_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "global_head_dim": HEAD_DIM,
        "sliding_window": 512,
        "attention_k_eq_v": false,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": false,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": true,
        "eos_token_id": 1,
    });
    let mut tensors = vec![linear("model.", "embed_tokens", VOCAB, HIDDEN)];
    tensors.extend(norms("model.", &["norm"], HIDDEN));
    for i in 0..LAYERS {
        let at = format!("model.layers.{i}.");
        tensors.extend(layer(&at, HIDDEN));
        tensors.extend(norms(
            &at,
            &[
                "input_layernorm",
                "post_attention_layernorm",
                "pre_feedforward_layernorm",
                "post_feedforward_layernorm",
            ],
            HIDDEN,
        ));
        tensors.extend(norms(
            &at,
            &["self_attn.q_norm", "self_attn.k_norm"],
            HEAD_DIM,
        ));
        tensors.push((format!("{at}layer_scalar"), vec![1]));
    }
    checkpoint(to, &config, &tensors);
    for file in [
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ] {
        fs::copy(models().join("tiny-gemma4").join(file), to.join(file)).unwrap();
    }
}

fn head(to: &Path) {
    let config = json!({
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "norm_before_residual": true,
        "transformer_layer_config": {
            "model_type": "llama",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    });
    let mut tensors = vec![
        linear("", "embed_tokens", VOCAB, HIDDEN),
        linear("", "fc", HIDDEN, 3 * HIDDEN),
        linear("", "lm_head", DRAFT_VOCAB, HIDDEN),
        ("d2t".into(), vec![DRAFT_VOCAB]),
    ];
    tensors.extend(norms("", &["norm"], HIDDEN));
    tensors.extend(layer("layers.0.", 2 * HIDDEN));
    let names = ["hidden_norm", "input_layernorm", "post_attention_layernorm"];
    tensors.extend(norms("layers.0.", &names, HIDDEN));
    checkpoint(to, &config, &tensors);
}

/// Bytes in memory of a process.
fn held(id: u32) -> u64 {
    let status = fs::read_to_string(format!("/proc/{id}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    1024 * line
        .unwrap()
        .trim()
        .trim_end_matches(" kB")
        .parse::<u64>()
        .unwrap()
}

/// The record of `inspect` on `model`, and its plan for `context` tokens.
fn plan(folder: &Path, model: &str, options: &[&str], context: usize) -> (Value, Value) {
    let args = [&["inspect", model, "--json"], options].concat();
    let record: Value = serde_json::from_str(&good(paceline(folder, &args)).0).unwrap();
    let mut rows = record["memory"].as_array().unwrap().iter();
    let row = rows.find(|row| row["context"] == context).unwrap().clone();
    (record, row)
}

/// What a server holds that has answered a prompt of `pairs` times two tokens, and how
/// many tokens that were.
fn served(folder: &Path, model: &str, options: &[&str], pairs: usize) -> (u64, Value) {
    let args = [&["-m", model, "--threads", "2"], options].concat();
    let server = Server::start(folder, &args);
    let body = json!({"prompt": "a b ".repeat(pairs), "max_tokens": 8});
    let answer = server.post("/v1/completions", "", &body.to_string());
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let answer = answer.split("\r\n\r\n").nth(1).unwrap();
    (
        held(server.child.id()),
        serde_json::from_str(answer).unwrap(),
    )
}

#[test]
fn a_server_holds_what_inspect_plans() {
    let folder = folder("memory");
    target(&folder.join("model"));
    head(&folder.join("head"));
    let number = |value: &Value| value.as_u64().unwrap();

    // What the program itself is, and its tables: a model that takes next to nothing.
    let options = ["--draft", "none", "--context", "64", "--no-probe"];
    let (_, row) = plan(&folder, "tiny-gemma4", &options, 64);
    let (small, _) = served(&folder, "tiny-gemma4", &options, 8);
    let program = small - number(&row["with_weights"]);

    let context = CONTEXT.to_string();
    let draft = ["--draft", "eagle3:head", "--context", &context];
    let options = [&draft[..], &["--kv", "f32", "--no-probe"]].concat();
    let (record, row) = plan(&folder, "./model", &options, CONTEXT);
    let (held, answer) = served(&folder, "./model", &options, CONTEXT / 2 - 32);
    assert_eq!(answer["speculation"]["drafter"], "eagle3", "{answer}");
    let used = number(&answer["usage"]["total_tokens"]);
    assert!(used > 9 * CONTEXT as u64 / 10, "{used} tokens");

    let (plan, found) = (number(&row["with_weights"]), held - program);
    let model = &record["model"];
    let drafter = number(&row["drafter_bytes"]) + number(&model["drafter_weight_bytes"]);
    let remembered = number(&row["bytes"]) - number(&row["drafter_bytes"]);
    let weights = number(&model["weight_bytes"]);
    let mb = |bytes: u64| bytes / (1 << 20);
    let said = format!(
        "{} MB planned (weights {}, remembered {}, drafter {}), {} held beside {} of the program",
        mb(plan),
        mb(weights),
        mb(remembered),
        mb(drafter),
        mb(found),
        mb(program)
    );
    println!("{said}");
    let most_wrong = plan / 6;
    assert!(plan.abs_diff(found) <= most_wrong, "{said}");
    // No part can be forgotten, or counted twice, within that.
    for part in [weights, remembered, drafter] {
        assert!(part > most_wrong, "{said}");
    }
}
