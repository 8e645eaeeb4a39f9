//! Who drafts: any drafter leaves the text alone, and one that cannot draft says why.

use crate::{
    ASSISTANT, PROMPT, WITH_ASSISTANT, WITH_MTP, bad, copy, folder, good, models, paceline,
    rename_tensors, run_json,
};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

#[test]
fn any_drafter_gives_the_same_text() {
    let folder = folder("drafters");
    let path = format!("assistant:{}", models().join(ASSISTANT).display());
    for (model, drafters) in [
        (WITH_ASSISTANT, &["auto", "assistant", "ngram", &path][..]),
        (WITH_MTP, &["auto", "mtp", "ngram"]),
    ] {
        for sampling in [
            &["--temperature=0"][..],
            &["--temperature=0.8", "--seed=7", "--top-p=0.9"],
        ] {
            let run = |draft: &str| {
                let draft = format!("--draft={draft}");
                run_json(
                    &folder,
                    &[&[PROMPT, "-n", "40", "-m", model, &draft], sampling].concat(),
                )
            };
            let plain = run("none");
            assert_eq!(plain["speculation"]["engaged"], false);
            assert_eq!(plain["speculation"]["reason"], "--draft none");
            for draft in drafters {
                let drafted = run(draft);
                assert_eq!(
                    drafted["token_ids"], plain["token_ids"],
                    "{model} {draft} {sampling:?}"
                );
                assert_eq!(drafted["text"], plain["text"]);
                assert_eq!(drafted["finish"], plain["finish"]);
                if *draft != "ngram" {
                    assert_eq!(drafted["speculation"]["engaged"], true, "{model} {draft}");
                }
            }
        }
    }
}

#[test]
fn a_counted_vocabulary_and_a_window_change_guesses_alone() {
    let folder = folder("counted");
    for (model, head) in [(WITH_MTP, "mtp"), (WITH_ASSISTANT, "assistant")] {
        fs::write(
            folder.join("text.txt"),
            "The cat sat on the mat. ".repeat(4),
        )
        .unwrap();
        let count = |more: &[&str]| {
            let file = format!("{model}.json");
            let words = ["count", "-q", "-m", model, "--no-probe", &file];
            good(paceline(&folder, &[&words, more].concat()));
            let counts = fs::read(folder.join(&file)).unwrap();
            serde_json::from_slice::<Value>(&counts).unwrap()
        };
        let of_text = count(&["text.txt"]);
        let most = of_text["counts"][0][1].as_u64().unwrap();
        assert!(most >= 4 && of_text["tokens"].as_u64().unwrap() > 4 * 4);
        let written = count(&["--max-tokens", "24", "--answers", "2"]);
        let n = written["counts"].as_array().unwrap().len();
        assert!(n > 20, "{n}");
        let run = |more: &[&str]| {
            let words = [PROMPT, "-n", "40", "-m", model, "--no-probe"];
            run_json(&folder, &[&words, more].concat())
        };
        let plain = run(&["--draft", "none"]);
        let counted = format!("{model}.json:300");
        let window = ["--draft-vocab", &counted, "--draft-window", "6"];
        let options = match head {
            "mtp" => &window[..2],
            _ => &window[..],
        };
        let drafted = run(&[&["--draft", head], options].concat());
        assert_eq!(drafted["token_ids"], plain["token_ids"]);
        assert_eq!(drafted["speculation"]["engaged"], true);
    }
    let other = format!("{WITH_MTP}.json");
    let words = ["run", PROMPT, "-m", WITH_ASSISTANT, "--draft-vocab", &other];
    let error = bad(paceline(&folder, &words));
    assert!(
        error.contains("another vocabulary; `paceline count`"),
        "{error}"
    );
}

/// A folder with an EAGLE-3 head for [`WITH_ASSISTANT`] that has learnt nothing.
fn eagle3(folder: &Path) -> PathBuf {
    const HIDDEN: usize = 384;
    const DRAFTED: usize = 64;
    let config = json!({
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": DRAFTED,
        "norm_before_residual": true,
        "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "vocab_size": 8192,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 32,
        },
    });
    let attention = |name: &str| format!("layers.0.self_attn.{name}_proj.weight");
    let mlp = |name: &str| format!("layers.0.mlp.{name}_proj.weight");
    let norm = |name: &str| format!("{name}.weight");
    let matrices = [
        ("fc.weight".into(), HIDDEN, 3 * HIDDEN),
        (attention("q"), 64, 2 * HIDDEN),
        (attention("k"), 32, 2 * HIDDEN),
        (attention("v"), 32, 2 * HIDDEN),
        (attention("o"), HIDDEN, 64),
        (mlp("gate"), 64, HIDDEN),
        (mlp("up"), 64, HIDDEN),
        (mlp("down"), HIDDEN, 64),
        ("lm_head.weight".into(), DRAFTED, HIDDEN),
    ];
    let norms = [
        "layers.0.input_layernorm",
        "layers.0.hidden_norm",
        "layers.0.post_attention_layernorm",
        "norm",
    ];
    let mut header = serde_json::Map::new();
    let mut data: Vec<u8> = Vec::new();
    let mut put = |name: String, dtype: &str, shape: &[usize], bytes: Vec<u8>| {
        let range = [data.len(), data.len() + bytes.len()];
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": range});
        header.insert(name, entry);
        data.extend(bytes);
    };
    let ids: Vec<u8> = (0..DRAFTED)
        .flat_map(|i| (i as i64 * 7).to_le_bytes())
        .collect();
    put("d2t".into(), "I64", &[DRAFTED], ids);
    for (name, rows, cols) in matrices {
        let value = |i: usize| ((i * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5;
        let values = (0..rows * cols).flat_map(|i| (value(i) * 0.2).to_le_bytes());
        put(name, "F32", &[rows, cols], values.collect());
    }
    for name in norms {
        put(
            norm(name),
            "F32",
            &[HIDDEN],
            1f32.to_le_bytes().repeat(HIDDEN),
        );
    }
    let header = serde_json::to_vec(&header).unwrap();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    file.extend(data);
    let head = folder.join("eagle3-head");
    fs::create_dir_all(&head).unwrap();
    fs::write(head.join("config.json"), config.to_string()).unwrap();
    fs::write(head.join("model.safetensors"), file).unwrap();
    head
}

#[test]
fn an_eagle3_head_drafts_for_the_target_it_was_made_for() {
    let folder = folder("eagle3");
    let head = eagle3(&folder);
    let choice = format!("eagle3:{}", head.display());
    let args = [PROMPT, "-n", "24", "--no-probe", "--draft"];
    let drafted = run_json(&folder, &[&args[..], &[&choice]].concat());
    let plain = run_json(&folder, &[&args[..], &["none"]].concat());
    assert_eq!(drafted["text"], plain["text"]);
    assert_eq!(drafted["speculation"]["drafter"], "eagle3");
    assert_eq!(drafted["speculation"]["engaged"], true);
    // The head has random weights: tried, it is dead.
    let dead = bad(paceline(&folder, &["run", PROMPT, "--draft", &choice]));
    assert!(
        dead.contains(
            "--draft eagle3: the EAGLE-3 head `eagle3-head` loads and drafts, but its guesses"
        ),
        "{dead}"
    );
    let inspect = ["inspect", "--no-probe", "--draft", &choice];
    let (stdout, _) = good(paceline(&folder, &inspect));
    assert!(
        stdout.contains("eagle3: the EAGLE-3 head `eagle3-head`"),
        "{stdout}"
    );

    let run = |args: &[&str]| bad(paceline(&folder, &[&["run", PROMPT], args].concat()));
    let alone = run(&["-m", head.to_str().unwrap()]);
    assert!(alone.ends_with("it with --draft eagle3:PATH"), "{alone}");
    let assistant = format!("eagle3:{}", models().join(ASSISTANT).display());
    let other = run(&["--draft", &assistant]);
    assert!(other.contains("is no EAGLE-3 head"), "{other}");
    let config = fs::read_to_string(head.join("config.json")).unwrap();
    let config = config.replace("8192", "8191");
    fs::write(head.join("config.json"), config).unwrap();
    let unpaired = run(&["--draft", &choice]);
    assert!(
        unpaired.contains("its vocabulary size is 8191, the target's is 8192"),
        "{unpaired}"
    );
}

#[test]
fn a_draft_model_drafts_for_targets_with_its_vocabulary() {
    let folder = folder("draft-model");
    let path = |name: &str| format!("model:{}", models().join(name).display());
    // A target drafts for itself as well as anybody can.
    for (model, draft, is_itself) in [
        (WITH_ASSISTANT, path("tiny-gemma4-e"), false),
        (WITH_ASSISTANT, format!("model:{WITH_ASSISTANT}"), true),
        (WITH_MTP, format!("model:{WITH_MTP}+ngram"), false),
    ] {
        let run = |draft: &str, rest: &[&str]| {
            let args = [PROMPT, "-n", "32", "-m", model, "--draft", draft];
            run_json(&folder, &[&args, rest].concat())
        };
        for sampling in [
            &["--temperature=0"][..],
            &["--temperature=0.8", "--seed=7", "--top-p=0.9"],
        ] {
            let (plain, drafted) = (run("none", sampling), run(&draft, sampling));
            assert_eq!(drafted["token_ids"], plain["token_ids"], "{model} {draft}");
            let record = &drafted["speculation"];
            assert_eq!(record["drafter"], "model", "{draft}");
            assert_eq!(record["engaged"], true, "{draft}");
            if is_itself {
                assert_eq!(record["accepted"], record["drafted"], "{record}");
            }
        }
    }
    let inspect = ["inspect", "--json", "--draft", &path("tiny-gemma4-e")];
    let (stdout, _) = good(paceline(&folder, &inspect));
    let facts: Value = serde_json::from_str(&stdout).unwrap();
    let model = &facts["model"];
    assert_eq!(model["drafter_reason"], "the draft model `tiny-gemma4-e`");
    assert!(model["drafter_weight_bytes"].as_u64() > Some(1_000_000));
    assert!(facts["memory"][0]["drafter_bytes"].as_u64() > Some(10_000));

    let refused = |draft: &str| bad(paceline(&folder, &["run", PROMPT, "--draft", draft]));
    let other = refused(&format!("model:{WITH_MTP}"));
    assert!(
        other.contains("the draft model's vocabulary is not the target's: token "),
        "{other}"
    );
    let head = refused(&path(ASSISTANT));
    assert!(
        head.contains("name its target with -m, and it with --draft assistant:PATH"),
        "{head}"
    );
}

#[test]
fn residual_acceptance_is_recorded_and_leaves_greedy_text_alone() {
    let folder = folder("residual");
    let run = |args: &[&str]| {
        let fixed = [PROMPT, "-n", "24", "--seed", "7"];
        run_json(&folder, &[&fixed[..], args].concat())
    };
    let plain = run(&["--temperature=0"]);
    let greedy = run(&["--temperature=0", "--accept", "residual"]);
    assert_eq!(greedy["text"], plain["text"]);
    assert_eq!(greedy["speculation"]["accept"], "exact");
    let sampled = run(&["--temperature=1", "--accept", "residual"]);
    assert_eq!(sampled["speculation"]["accept"], "residual");
    assert_eq!(sampled["model"]["accept"], "residual");
}

#[test]
fn a_stripped_conversion_says_where_its_head_is() {
    let folder = folder("stripped-advice");
    let model = copy(&folder, WITH_MTP);
    let model = {
        let renamed = folder.join("Qwen3.6-27B-4bit");
        fs::rename(model, &renamed).unwrap();
        renamed
    };
    rename_tensors(&model, "\"mtp.", "\"old.");
    let model = model.to_str().unwrap();
    let record = run_json(&folder, &[PROMPT, "-n", "4", "-m", model]);
    let reason = record["model"]["drafter_reason"].as_str().unwrap();
    assert!(
        reason.contains("a conversion has dropped the head")
            && reason.ends_with(
                "`paceline pull Qwen/Qwen3.6-27B --head-only` fetches the head of the original"
            ),
        "{reason}"
    );
    let error = bad(paceline(
        &folder,
        &["run", PROMPT, "-m", model, "--draft", "mtp"],
    ));
    assert!(
        error.contains("--draft mtp: config.json promises"),
        "{error}"
    );
}

#[test]
fn a_trial_is_remembered_and_can_be_left_out() {
    let folder = folder("trial");
    let inspect = |args: &[&str]| {
        let mut command = paceline(&folder, &[&["inspect", "--json"], args].concat());
        command.env("XDG_CACHE_HOME", &folder);
        let (stdout, _) = good(command);
        serde_json::from_str::<Value>(&stdout).unwrap()["model"]["preflight"].clone()
    };
    let first = inspect(&[]);
    assert_eq!(first["trial"]["cached"], false);
    assert_eq!(
        (&first["trial"]["rows"], &first["trial"]["chain"]),
        (&json!("exact"), &json!("exact"))
    );
    let again = inspect(&[]);
    assert_eq!(again["trial"]["cached"], true);
    assert_eq!(again["trial"]["guesses"], first["trial"]["guesses"]);
    assert_eq!(
        inspect(&["--no-probe"])["trial"],
        json!({"skipped": "--no-probe"})
    );
    // Another drafter, another trial.
    assert_eq!(inspect(&["--draft=ngram"])["trial"]["cached"], false);
}
