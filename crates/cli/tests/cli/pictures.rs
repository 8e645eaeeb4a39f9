//! Pictures: on the command line, in a chat, and for models whose tower is a file of its own.

use crate::{bad, feed, folder, good, paceline, projector, run_json, text};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use weights::Checkpoint;

const ASK: &str = "What is this?";

/// A model of the repository that sees.
fn model(name: &str) -> String {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    models.join(name).display().to_string()
}

/// A picture of the repository.
fn picture(name: &str) -> String {
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("../media/tests/files");
    files.join(name).display().to_string()
}

#[test]
fn run_shows_pictures_in_their_order() {
    let folder = folder("run-image");
    let (red, other) = (picture("cmyk.jpg"), picture("progressive.jpg"));
    for name in ["tiny-gemma4-vision", "tiny-qwen3.5-vision"] {
        let model = model(name);
        let run = |more: &[&str]| -> Value {
            let args = [ASK, "-n", "16", "--temperature", "0", "-m", &model];
            run_json(&folder, &[&args[..], more].concat())
        };
        let tokens = |record: &Value| record["usage"]["prompt_tokens"].as_u64().unwrap();
        let none = run(&[]);
        let one = run(&["--image", &red]);
        assert!(tokens(&one) > tokens(&none), "{name}: {one:#}");
        assert_eq!(
            one["text"],
            run(&["--image", &red, "--draft", "none"])["text"]
        );
        let both = run(&["--image", &red, "--image", &other]);
        let turned = run(&["--image", &other, "--image", &red]);
        assert!(tokens(&both) > tokens(&one));
        assert_eq!(tokens(&both), tokens(&turned));
    }
}

#[test]
fn what_is_no_picture_is_told_with_its_file() {
    let folder = folder("no-image");
    let run = |model: &str, image: &str| {
        bad(paceline(
            &folder,
            &["run", ASK, "-m", model, "--image", image],
        ))
    };
    let seeing = model("tiny-qwen3.5-vision");
    fs::write(folder.join("note.png"), "no picture").unwrap();
    let whole = fs::read(picture("progressive.jpg")).unwrap();
    fs::write(folder.join("cut.jpg"), &whole[..200]).unwrap();
    for (image, told) in [
        ("none.png", "cannot read `none.png`"),
        ("note.png", "the picture is in no known format"),
        ("cut.jpg", "the picture is broken or cut off"),
        (".", "cannot read `.`"),
    ] {
        let error = run(&seeing, image);
        assert!(error.contains(told), "{error}");
    }
    let error = run("tiny-qwen3.5", &picture("cmyk.jpg"));
    assert!(
        error.contains("the model takes no pictures: the model reads text alone"),
        "{error}"
    );
    let args = [
        "run",
        ASK,
        "-m",
        &seeing,
        "--no-pictures",
        "--image",
        &picture("cmyk.jpg"),
    ];
    let error = bad(paceline(&folder, &args));
    assert!(error.contains("pictures are turned off"), "{error}");
}

#[test]
fn a_chat_shows_pictures_by_command_and_by_pasted_path() {
    let folder = folder("chat-image");
    let model = model("tiny-qwen3.5-vision");
    let red = folder.join("a red square.jpg");
    fs::copy(picture("cmyk.jpg"), &red).unwrap();
    let whole = red.display().to_string();
    let say = |input: &str| {
        let args = [
            "chat",
            "--temperature=0",
            "-n",
            "16",
            "-m",
            &model,
            "--verbose",
        ];
        let output = feed(paceline(&folder, &args), input);
        (text(&output.stdout), text(&output.stderr))
    };
    let (answer, told) = say(&format!("/image {whole}\n{ASK}\n"));
    let note = format!("`{whole}` goes with the next question, as ");
    assert!(told.contains(&note), "{told}");
    for pasted in [
        whole.clone(),
        format!("'{whole}'"),
        format!("\"{whole}\" "),
        whole.replace(' ', "\\ "),
        format!("file://{}", whole.replace(' ', "%20")),
        "a red square.jpg".to_owned(),
    ] {
        let (same, told) = say(&format!("{pasted}\n{ASK}\n"));
        assert!(
            told.contains(" goes with the next question, as "),
            "{pasted}: {told}"
        );
        assert_eq!(same, answer, "{pasted}");
    }
    // What is no picture that is there is text, or a command.
    fs::write(folder.join("note.txt"), "a").unwrap();
    let (plain, told) = say("note.txt\n");
    assert!(!told.contains("goes with") && !plain.is_empty(), "{told}");
    let (_, told) = say(&format!("{whole}x\n"));
    assert!(told.contains("no command `/"), "{told}");
    let (_, told) = say("/image none.png\n");
    assert!(told.contains("cannot read `none.png`"), "{told}");
}

/// A GGUF model of the text of `name` in a folder of its own, and the file of its tower.
fn in_two_files(folder: &Path, name: &str, projector: &str) -> (PathBuf, Vec<u8>) {
    let text = folder.join("model-F32.gguf");
    let to = text.display().to_string();
    good(paceline(
        folder,
        &["convert", &model(name), &to, "--format", "gguf"],
    ));
    let whole = Checkpoint::open(Path::new(&model(name))).unwrap();
    (text, projector::mmproj(projector, &whole))
}

#[test]
fn a_gguf_model_sees_with_the_file_beside_it() {
    let (name, projector) = ("tiny-qwen3.5-vision", "qwen3vl_merger");
    let folder = folder("mmproj");
    let (file, tower) = in_two_files(&folder, name, projector);
    let file = file.display().to_string();
    let red = picture("cmyk.jpg");
    let ask = [ASK, "-n", "16", "--temperature", "0"];
    let run = |more: &[&str]| run_json(&folder, &[&ask[..], more].concat());
    let want = run(&["-m", &model(name), "--image", &red]);
    // Without its tower it reads text, and says what is missing.
    let blind = ["run", ASK, "-m", &file, "--image", &red];
    let error = bad(paceline(&folder, &blind));
    assert!(
        error.contains("`mmproj`") && error.contains("none beside it"),
        "{error}"
    );
    let inspect = |more: &[&str]| -> Value {
        let args = [&["inspect", &file, "--json"][..], more].concat();
        serde_json::from_str(&good(paceline(&folder, &args)).0).unwrap()
    };
    let before = inspect(&[]);
    assert!(
        before["tower"]["missing"]
            .as_str()
            .unwrap()
            .contains("mmproj")
    );
    // Elsewhere, by name.
    fs::create_dir(folder.join("elsewhere")).unwrap();
    let elsewhere = folder.join("elsewhere/tower.gguf").display().to_string();
    fs::write(&elsewhere, &tower).unwrap();
    let named = run(&["-m", &file, "--mmproj", &elsewhere, "--image", &red]);
    // The file rounds the weights of the text model once more, so its text is its own.
    for tokens in ["prompt_tokens", "picture_tokens"] {
        assert_eq!(named["usage"][tokens], want["usage"][tokens]);
    }
    // Beside the model; one of another model there is passed over.
    fs::write(folder.join("mmproj-BF16.gguf"), "damaged").unwrap();
    fs::write(folder.join("mmproj-F32.gguf"), &tower).unwrap();
    let beside = run(&["-m", &file, "--image", &red]);
    assert_eq!(
        (&beside["text"], &beside["usage"]),
        (&named["text"], &named["usage"])
    );
    assert_eq!(beside["model"]["vision"]["file"], "mmproj-F32.gguf");
    let after = inspect(&[]);
    assert_eq!(after["sha256"], before["sha256"]);
    assert_eq!(after["tower"]["architecture"], "qwen3_5_vision");
    assert_eq!(after["tower"]["file"], "mmproj-F32.gguf");
    let weights = |record: &Value| record["model"]["weight_bytes"].as_u64().unwrap();
    assert_eq!(weights(&after), weights(&before) + tower.len() as u64);
    for off in ["--no-mmproj", "--no-pictures"] {
        let off = inspect(&[off]);
        assert_eq!(weights(&off), weights(&before));
        assert_eq!(off["model"]["vision"], Value::Null);
    }
    // What was asked for by name and does not fit is an error.
    let args = ["run", ASK, "-m", "tiny-gemma4-moe", "--mmproj", &elsewhere];
    let error = bad(paceline(&folder, &args));
    assert!(
        error.contains("the tower was made for a model with hidden rows of"),
        "{error}"
    );
    // As wide, and of another family.
    let args = ["run", ASK, "-m", "tiny-gemma4", "--mmproj", &elsewhere];
    let error = bad(paceline(&folder, &args));
    assert!(error.contains("cannot be used with this model"), "{error}");
    let error = bad(paceline(
        &folder,
        &["run", ASK, "-m", &file, "--mmproj", &file],
    ));
    assert!(error.contains("no file of a vision tower"), "{error}");
}
