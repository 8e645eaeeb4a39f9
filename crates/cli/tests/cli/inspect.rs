//! `paceline inspect`: what a model is, and what is wrong with a damaged one.

use crate::{
    ASSISTANT, PROMPT, WITH_ASSISTANT, WITH_MTP, answer, bad, copy, folder, good, models, paceline,
    rename_tensors, text,
};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

#[test]
fn inspect_tells_what_a_model_is() {
    let folder = folder("inspect");
    let (stdout, stderr) = good(paceline(&folder, &["inspect", WITH_MTP]));
    for words in [
        "architecture",
        "gated delta",
        "mtp: the checkpoint's own MTP head",
        "affine4-g128",
        "unused tensors none",
    ] {
        assert!(stdout.contains(words), "{words}\n{stdout}");
    }
    assert!(stderr.is_empty());
}

#[test]
fn layers_whose_keys_and_values_are_finer_are_shown() {
    let folder = folder("kv-layers");
    let args = |kv| ["inspect", "-c", "1k", WITH_ASSISTANT, "--kv", kv];
    let parse = |args: &[&str]| -> Value {
        let args = [args, &["--json"]].concat();
        serde_json::from_str(&good(paceline(&folder, &args)).0).unwrap()
    };
    let record = |kv| parse(&args(kv));
    let layers = |record: &Value| record["model"]["kv_layers"].clone();
    let coarse = record("turbo4,turbo3");
    let windowed = json!({"format": "turbo4,turbo3", "layers": 6, "window": 128});
    let full = json!({"format": "turbo4,turbo3", "layers": 2, "window": null});
    assert_eq!(layers(&coarse), json!([windowed, full]));
    let warnings = coarse["model"]["preflight"]["warnings"].to_string();
    assert!(
        warnings.contains("keys of 2 layers are coarser than q8_0 though 6 query heads share each"),
        "{warnings}"
    );

    let turbo = record("turbo");
    assert_eq!(
        turbo["model"]["kv_format"],
        "turbo4,turbo3,protect=auto,window=q8_0,gqa=6"
    );
    assert_eq!(
        layers(&turbo),
        json!([
            {"format": "q8_0", "layers": 6, "window": 128},
            {"format": "q8_0,turbo3", "layers": 1, "window": null},
            {"format": "q8_0", "layers": 1, "window": null},
        ])
    );
    assert!(
        !turbo["model"]["preflight"]["warnings"]
            .to_string()
            .contains("coarser")
    );
    // A key head and a value head of 128 columns a layer: 136 + 50 bytes, and 136 + 136.
    assert_eq!(turbo["model"]["kv_token_bytes"], 186 + 272);
    let (stdout, _) = good(paceline(&folder, &args("turbo")));
    for words in [
        " as turbo4,turbo3,protect=auto,window=q8_0,gqa=6, 458 B a token",
        "7 layers q8_0, 1 q8_0,turbo3",
    ] {
        assert!(stdout.contains(words), "{words}\n{stdout}");
    }

    // Two layers of four read what the others keep, so that both are at an end.
    let sharing = models().join("tiny-gemma4-e");
    let sharing = sharing.to_str().unwrap();
    let sharing = parse(&["inspect", sharing, "--kv", "turbo4,turbo3,protect=1"]);
    let windowed = json!({"format": "q8_0", "layers": 1, "window": 128});
    let full = json!({"format": "q8_0", "layers": 1, "window": null});
    assert_eq!(layers(&sharing), json!([windowed, full]));
}

#[test]
fn a_vision_tower_is_shown_and_one_that_a_conversion_has_dropped_is_missed() {
    let folder = folder("tower");
    let record = |args: &[&str]| -> Value {
        let all = [&["inspect", "--json", "--no-probe"], args].concat();
        serde_json::from_str(&good(paceline(&folder, &all)).0).unwrap()
    };
    let seeing = models().join("tiny-qwen3.5-vision");
    let seeing = seeing.to_str().unwrap();
    let tower = &record(&[seeing])["tower"];
    let facts = [
        "architecture",
        "layers",
        "patch_pixels",
        "patches_a_side",
        "most_rows",
    ];
    let facts = facts.map(|key| tower[key].clone());
    let want = json!(["qwen3_5_vision", 5, 16, 2, 16384]);
    assert_eq!(json!(facts), want, "{tower}");
    let (stdout, _) = good(paceline(&folder, &["inspect", "--no-probe", seeing]));
    assert!(
        stdout.contains("patches of 16 pixels, 2×2 a row"),
        "{stdout}"
    );

    let blind = copy(&folder, WITH_MTP);
    let config = fs::read_to_string(blind.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&config).unwrap();
    config["vision_config"] = json!({"model_type": "qwen3_5_vision"});
    fs::write(blind.join("config.json"), config.to_string()).unwrap();
    let tower = &record(&[blind.to_str().unwrap()])["tower"];
    let reason = tower["missing"].as_str().unwrap();
    assert!(
        reason.contains("for text alone has dropped them"),
        "{reason}"
    );
    assert!(record(&[WITH_MTP]).get("tower").is_none());
}

#[test]
fn a_drafter_is_inspected_as_one() {
    let assistant = models().join(ASSISTANT);
    let args = ["inspect", assistant.to_str().unwrap()];
    let (stdout, stderr) = good(paceline(&folder("inspect-drafter"), &args));
    assert!(stdout.contains("--draft assistant:PATH"), "{stdout}");
    assert!(!stderr.contains("cannot load"), "{stderr}");
}

#[test]
fn a_memory_plan_counts_the_weights_of_an_assistant() {
    let folder = folder("plan");
    let beyond_the_files = |draft: &str| {
        let args = [
            "inspect",
            "tiny-gemma4",
            "--json",
            "--no-probe",
            "--draft",
            draft,
        ];
        let (stdout, _) = good(paceline(&folder, &args));
        let record: Value = serde_json::from_str(&stdout).unwrap();
        let count = |value: &Value| value.as_u64().unwrap();
        let row = &record["memory"][0];
        count(&row["with_weights"]) - count(&row["bytes"]) - count(&record["file_bytes"])
    };
    assert_eq!(beyond_the_files("none"), 0);
    assert!(beyond_the_files("assistant") > 1 << 20);
}

#[test]
fn damaged_checkpoints_are_named_and_explained() {
    let folder = folder("damaged");
    let run = |model: &Path, args: &[&str]| {
        bad(paceline(
            &folder,
            &[
                &["run", PROMPT, "-n", "4", "-m", model.to_str().unwrap()],
                args,
            ]
            .concat(),
        ))
    };

    let model = copy(&folder, WITH_ASSISTANT);
    let weights = model.join("model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    fs::write(&weights, &bytes[..bytes.len() / 2]).unwrap();
    let error = run(&model, &[]);
    assert!(
        error.contains("cut short") && error.contains("`model.safetensors`"),
        "{error}"
    );
    fs::write(&weights, &bytes).unwrap();

    let index = model.join("model.safetensors.index.json");
    fs::write(
        &index,
        r#"{"weight_map": {"model.no.such.weight": "model.safetensors"}}"#,
    )
    .unwrap();
    let error = run(&model, &[]);
    assert!(error.ends_with(
        "puts tensor `model.no.such.weight` into `model.safetensors`, which does not contain it"
    ));
    fs::remove_file(index).unwrap();

    let config = model.join("config.json");
    let known = fs::read_to_string(&config).unwrap();
    fs::write(
        &config,
        known.replace("Gemma4ForCausalLM", "Oracle9ForCausalLM"),
    )
    .unwrap();
    let error = run(&model, &[]);
    assert!(
        error.contains("architecture `Oracle9ForCausalLM` is not supported; supported are"),
        "{error}"
    );
    // What it is can still be seen.
    let output = paceline(&folder, &["inspect", model.to_str().unwrap()])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        text(&output.stdout).contains("Oracle9ForCausalLM")
            && text(&output.stdout).contains("runs           no")
    );
    assert!(text(&output.stderr).contains("is not supported"));

    let model = copy(&folder, WITH_MTP);
    rename_tensors(&model, "\"mtp.", "\"old.");
    let error = run(&model, &["--draft", "mtp"]);
    assert!(
        error.contains("--draft mtp: config.json promises `mtp_num_hidden_layers: 1`"),
        "{error}"
    );
    assert!(error.contains("has dropped the head"), "{error}");
    let args = [
        "run",
        PROMPT,
        "-n",
        "4",
        "--draft",
        "none",
        "-m",
        model.to_str().unwrap(),
    ];
    let (_, stderr) = good(paceline(&folder, &args));
    assert!(
        stderr.ends_with("no speculation: --draft none\n"),
        "{stderr}"
    );
}

#[test]
fn gguf_files_are_known_by_their_names_or_their_first_bytes() {
    let folder = folder("gguf-names");
    let convert = paceline(&folder, &["convert", WITH_MTP, "x", "--format", "gguf"]);
    assert!(bad(convert).contains("must end in .gguf"));
    fs::write(folder.join("x"), "GGUF and more").unwrap();
    let damaged = bad(paceline(&folder, &["inspect", "x"]));
    assert!(!damaged.contains("neither"), "{damaged}");
    good(paceline(
        &folder,
        &["convert", WITH_MTP, "x.gguf", "--format", "gguf"],
    ));
    let answer = |model: &str| answer(&folder, model, &[]);
    let named = answer("x.gguf");
    fs::rename(folder.join("x.gguf"), folder.join("blob")).unwrap();
    assert_eq!(answer("blob"), named);
    fs::write(folder.join("y"), "else").unwrap();
    assert!(bad(paceline(&folder, &["inspect", "y"])).contains("neither: `y`"));
    let missing = bad(paceline(&folder, &["inspect", "w/nope.gguf"]));
    assert!(
        missing.ends_with("there is no file `w/nope.gguf`"),
        "{missing}"
    );
}
