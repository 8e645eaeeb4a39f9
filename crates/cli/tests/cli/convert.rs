//! `paceline convert`: what a conversion keeps.

use crate::{PROMPT, answer, bad, folder, good, models, paceline, text, words};
use serde_json::Value;
use std::fs;

#[test]
fn a_conversion_that_loses_nothing_answers_the_same() {
    let folder = folder("convert");
    let expected = answer(&folder, "tiny-qwen3.5", &[]);
    good(paceline(
        &folder,
        &["convert", "-q", "tiny-qwen3.5", "eight", "--quant", "q8"],
    ));
    assert_eq!(answer(&folder, "./eight", &[]), expected);
    assert_eq!(
        answer(&folder, "tiny-qwen3.5", &["--quant", "q8"]),
        expected
    );
    let head = ["convert", "-q", "tiny-qwen3.5", "head", "--extract-head"];
    good(paceline(&folder, &head));
    let attach = words("convert -q ./eight again --attach-head ./head");
    good(paceline(&folder, &attach));
    assert_eq!(answer(&folder, "./again", &["--draft", "mtp"]), expected);
    let gguf = words("convert -q tiny-qwen3.5 eight.gguf --quant q8_0 --format gguf");
    good(paceline(&folder, &gguf));
    assert!(answer(&folder, "./eight.gguf", &["--draft", "mtp"]).len() > 20);
    for (args, message) in [
        (&["tiny-qwen3.5", "eight"][..], "exists already"),
        (&["tiny-gemma4", "x", "--extract-head"], "has no MTP head"),
        (
            &["tiny-gemma4-moe", "x", "--inflate", "2b"],
            "growing experts",
        ),
        (
            &["tiny-qwen3.5", "x", "--inflate", "1m"],
            "more than 1000000",
        ),
        (
            &["tiny-qwen3.5", "x", "--quant", "q4_0"],
            "--quant q4_0: only GGUF files hold this format; use q8, q6, q4 or bf16, or let OUT end in .gguf",
        ),
    ] {
        let error = bad(paceline(&folder, &[&["convert"], args].concat()));
        assert!(error.contains(message), "{args:?}: {error}");
    }
    let left: Vec<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    assert_eq!(left.len(), 4, "nothing half written: {left:?}");
}

#[test]
fn every_format_is_written_to_every_container_or_refused_in_one_line() {
    let folder = folder("convert-formats");
    let source = models().join("tiny-qwen3.5-moe");
    let source = source.to_str().unwrap();
    // An unknown name is answered with those that each container takes.
    let output = paceline(&folder, &["convert", source, "x", "--quant", "?"]);
    let said = text(&{ output }.output().unwrap().stderr);
    let (_, said) = said.split_once("known are ").unwrap();
    let (folders, files) = said.lines().next().unwrap().split_once(';').unwrap();
    let (_, files) = files.split_once("also have ").unwrap();
    let listed: Vec<&str> = folders.split(", ").chain(files.split(", ")).collect();
    let short = ["q2", "q3", "q4", "q5", "q6", "q8"];
    let all = quant::FORMATS.iter().copied().flatten().map(|f| f.name);
    let known: Vec<&str> = short.into_iter().chain(all).collect();
    assert!(known.len() > 40 && known.contains(&"tq3_1s"), "{known:?}");
    let mut refused = Vec::new();
    for &name in &known {
        for (container, out) in [("safetensors", "out"), ("gguf", "out.gguf")] {
            let args = ["convert", "-q", source, out, "--quant", name];
            let args = [&args[..], &["--format", container]].concat();
            let output = paceline(&folder, &args).output().unwrap();
            let stderr = text(&output.stderr);
            let path = folder.join(out);
            if output.status.success() {
                assert_eq!(stderr, "", "{args:?}");
                let weights = match container {
                    "gguf" => path.clone(),
                    _ => path.join("model.safetensors"),
                };
                assert!(weights.metadata().unwrap().len() > 100_000, "{args:?}");
                good(paceline(
                    &folder,
                    &["inspect", "-q", "--no-probe", &format!("./{out}")],
                ));
                let removed = if path.is_dir() {
                    fs::remove_dir_all(&path)
                } else {
                    fs::remove_file(&path)
                };
                removed.unwrap();
            } else {
                assert_eq!(output.status.code(), Some(1), "{args:?}: {stderr}");
                assert_eq!(stderr.lines().count(), 1, "{args:?}: {stderr}");
                assert!(
                    stderr.contains(&format!("--quant {name}: ")) && stderr.contains("; use q8"),
                    "{args:?}: {stderr}"
                );
                refused.push((name.to_owned(), container));
            }
            assert!(!path.exists());
        }
    }
    let is_refused = |name: &str, container| refused.contains(&(name.to_owned(), container));
    for name in known {
        let taken = !is_refused(name, "safetensors") || !is_refused(name, "gguf");
        assert_eq!(listed.contains(&name), taken, "{name}");
        assert_eq!(
            folders.split(", ").any(|listed| listed == name),
            !is_refused(name, "safetensors"),
            "{name}"
        );
    }
    for name in ["nvfp4", "fp8", "int4-g64"] {
        for container in ["safetensors", "gguf"] {
            assert!(is_refused(name, container), "{name} {container}");
        }
    }
    for name in ["q4", "affine6-g32", "bf16", "f32"] {
        for container in ["safetensors", "gguf"] {
            assert!(!is_refused(name, container), "{name} {container}");
        }
    }
    for name in ["q4_0", "q4_k", "iq4_xs", "tq3_1s", "tq4_1s"] {
        assert!(
            is_refused(name, "safetensors") && !is_refused(name, "gguf"),
            "{name}"
        );
    }
    // Formats of single tensors are looked at in the same way.
    let one = [
        "convert",
        source,
        "out",
        "--quant",
        "q4",
        "--tensor",
        "*mlp*=fp8",
    ];
    let error = bad(paceline(&folder, &one));
    assert!(error.contains("--tensor *mlp*=fp8: "), "{error}");
}

#[test]
fn a_converted_model_keeps_its_assistant() {
    let folder = folder("convert-assistant");
    let convert = |args: &str| {
        let args = words(args);
        good(paceline(&folder, &args)).1
    };
    let drafts = |model: &str, more: &[&str]| {
        let mut args = words("run --temperature 0 -n 24 --json -m");
        args.extend([model, PROMPT]);
        args.extend(more);
        let report: Value = serde_json::from_str(&good(paceline(&folder, &args)).0).unwrap();
        report
    };
    let said = convert("convert tiny-gemma4 out");
    assert!(
        said.contains("drafter: the assistant in out-assistant"),
        "{said}"
    );
    let (before, after) = (drafts("tiny-gemma4", &[]), drafts("./out", &[]));
    assert_eq!(after["text"], before["text"]);
    // How much is drafted depends on the time that rounds take: only who drafts is compared.
    for report in [&before, &after] {
        assert_eq!(report["model"]["drafter"], "assistant", "{report}");
    }

    let said = convert("convert tiny-gemma4 alone --no-drafter");
    let advice = "drafter: none is written; use --draft assistant:tiny-gemma4-assistant";
    assert!(said.contains(advice), "{said}");
    assert!(!folder.join("alone-assistant").exists());
    // The advice works: bundled drafters have names.
    let named = drafts("./alone", &["--draft", "assistant:tiny-gemma4-assistant"]);
    let reason = "the assistant `tiny-gemma4-assistant`";
    assert_eq!(named["model"]["drafter_reason"], reason);

    let said = convert("convert tiny-gemma4 file.gguf --quant q8");
    assert!(
        said.contains("GGUF has no affine8-g64: these matrices are stored as q8_0"),
        "{said}"
    );
    assert!(folder.join("file-assistant.gguf").is_file());
    for (pin, line) in [
        (&[][..], " matrices are stored finer, as q8_0 (--pin mtp)"),
        (&["--pin", "none"], ""),
    ] {
        fs::remove_file(folder.join("rotated.gguf")).ok();
        let args = words("convert tiny-gemma4 rotated.gguf --quant tq4_1s --no-drafter");
        let said = good(paceline(&folder, &[&args[..], pin].concat())).1;
        assert_eq!(said.contains("stored finer"), !line.is_empty(), "{said}");
        assert!(said.contains(line), "{said}");
    }
    // Rows of 384 columns are no whole blocks of 256.
    let said = convert("convert tiny-gemma4 blocks.gguf --quant q4_k --no-drafter");
    let kept = "keep their format, for their rows are not whole blocks of 256 (q4_k): ";
    assert!(said.contains(kept), "{said}");
    let said = convert("convert tiny-qwen3.5 qwen");
    assert!(
        said.contains("drafter: the MTP head, written with the model"),
        "{said}"
    );

    // A folder called like a file would not be found again.
    let args = words("convert tiny-qwen3.5 folder.gguf --format safetensors");
    let error = bad(paceline(&folder, &args));
    assert!(error.contains("must not end in .gguf"), "{error}");
    for (command, words) in [("pull", "needs no download"), ("rm", "cannot be removed")] {
        let error = bad(paceline(&folder, &[command, "tiny-gemma4"]));
        assert!(error.contains(words), "{error}");
    }

    fs::create_dir(folder.join("taken-assistant")).unwrap();
    let error = bad(paceline(&folder, &["convert", "tiny-gemma4", "taken"]));
    assert!(error.contains("add --no-drafter"), "{error}");
    assert!(!folder.join("taken").exists());
    let error = bad(paceline(&folder, &["run", "--draft", "mtp:nobody", "hi"]));
    assert!(error.contains("no such drafter: `nobody`"), "{error}");
}
