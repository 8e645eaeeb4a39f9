//! The engine speaks for no command line, no device and no family of models: what it says names
//! none of them. Whoever has names for its options spells its errors and reasons.

use std::fs;
use std::path::{Path, PathBuf};

/// Words that no string of the engine has in it, in small letters.
const FOREIGN: &[&str] = &["paceline", "cuda", "gpu", "nvidia", "cpu", "gemma", "qwen"];

/// Every source file of the engine.
fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("tests.rs") {
            found.push(path);
        }
    }
}

/// The string literals of a source file up to its tests, with the number of the line each begins
/// in. Comments are not strings.
fn strings(source: &str) -> Vec<(usize, String)> {
    let code = source.split("#[cfg(test)]").next().unwrap_or_default();
    let (mut found, mut line) = (Vec::new(), 1);
    let mut chars = code.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '\n' => line += 1,
            '/' if chars.peek() == Some(&'/') => while chars.next_if(|&c| c != '\n').is_some() {},
            // A quote as a character: '"'.
            '\'' if chars.peek() == Some(&'"') => {
                chars.next();
            }
            '"' => {
                let (begin, mut text) = (line, String::new());
                while let Some(c) = chars.next() {
                    match c {
                        '"' => break,
                        '\\' => text.extend(chars.next()),
                        c => text.push(c),
                    }
                    line += usize::from(c == '\n');
                }
                found.push((begin, text));
            }
            _ => {}
        }
    }
    found
}

/// What a string must not say, if it does: an option, or a foreign word.
fn foreign(text: &str) -> Option<String> {
    let is_option = |word: &str| {
        let name = word.trim_start_matches(['`', '(', '\'']).strip_prefix("--");
        name.is_some_and(|name| name.starts_with(|c: char| c.is_ascii_alphabetic()))
    };
    let option = text.split_whitespace().find(|word| is_option(word));
    let lower = text.to_lowercase();
    let word = FOREIGN.iter().find(|word| lower.contains(**word));
    option.or(word.copied()).map(str::to_owned)
}

#[test]
fn no_message_names_a_flag_a_device_or_a_family() {
    let mut files = Vec::new();
    sources(
        &Path::new(env!("CARGO_MANIFEST_DIR")).join("src"),
        &mut files,
    );
    assert!(files.len() > 10, "the sources are found");
    let mut wrong = Vec::new();
    let mut seen = 0;
    for file in files {
        for (line, text) in strings(&fs::read_to_string(&file).unwrap()) {
            seen += 1;
            if let Some(word) = foreign(&text) {
                wrong.push(format!("{}:{line}: `{word}` in {text:?}", file.display()));
            }
        }
    }
    assert!(seen > 100, "the strings are found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn flags_and_names_are_recognized() {
    for text in [
        "--draft none",
        "a smaller --context",
        "(--context sets it)",
        "`--kv q8_0` needs less",
        "on CUDA, both alike",
        "this qwen3_5 checkpoint",
        "run `paceline pull`",
    ] {
        assert!(foreign(text).is_some(), "{text}");
    }
    for text in ["a - b -- c", "drafts of {asked} tokens", "-1"] {
        assert_eq!(foreign(text), None, "{text}");
    }
    let source =
        "// \"--a\"\nlet x = '\"'; f(\"one\\\"\", \"two\n\"); \"three\" #[cfg(test)] \"--b\"";
    let found: Vec<_> = strings(source);
    let expected = [(2, "one\""), (2, "two\n"), (3, "three")];
    assert!(
        found.iter().map(|(l, s)| (*l, s.as_str())).eq(expected),
        "{found:?}"
    );
}
