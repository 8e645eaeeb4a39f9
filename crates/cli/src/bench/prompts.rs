//! The prompts that are answered: built-in ones, or those of `--prompts`.

use crate::args::BenchArgs;
use crate::model;
use anyhow::{Context, Result, bail};
use engine::Text;
use serde::Deserialize;
use std::path::Path;

/// The prompts without `--prompts`, by class.
const PROMPTS: &[(&str, &[&str])] = &[
    (
        "story",
        &[
            "Tell me a story about a rabbit and a kite.",
            "Write a short story about two friends who find a map.",
            "Tell me a story about an old clock that stopped.",
        ],
    ),
    (
        "chat",
        &[
            "What should I cook for dinner tonight?",
            "Do you like music? What kind?",
            "Why is the sky blue?",
        ],
    ),
    (
        "exact",
        &[
            "What is 27 + 45?",
            "Name the days of the week.",
            "Count from one to twenty.",
        ],
    ),
];

/// A line of `--prompts`.
#[derive(Deserialize)]
struct PromptLine {
    #[serde(default = "no_category")]
    category: String,
    #[serde(default)]
    messages: Vec<serde_json::Value>,
    /// A text to continue, without the template.
    #[serde(default, alias = "raw", alias = "text")]
    prompt: Option<String>,
}

fn no_category() -> String {
    "prompts".into()
}

/// One prompt, ready to run.
pub(super) struct Prompt {
    pub(super) class: String,
    pub(super) ids: Vec<u32>,
}

/// The prompts of `file`, which is the text of `--prompts`, or the built-in ones.
pub(super) fn prompts(args: &BenchArgs, file: Option<&str>, text: &Text) -> Result<Vec<Prompt>> {
    match (&args.prompts, file) {
        (Some(path), Some(file)) => of_file(path, file, text),
        _ => built_in(text),
    }
}

fn built_in(text: &Text) -> Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    for (class, texts) in PROMPTS {
        for prompt in *texts {
            let message = serde_json::json!({"role": "user", "content": prompt});
            prompts.push(Prompt {
                class: (*class).into(),
                ids: model::encode_chat(text, vec![message], None)?,
            });
        }
    }
    Ok(prompts)
}

fn of_file(path: &Path, file: &str, text: &Text) -> Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    for (n, line) in file
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        let place = || format!("line {} of `{}`", n + 1, path.display());
        let line: PromptLine = serde_json::from_str(line).with_context(place)?;
        let ids = match line.prompt {
            Some(prompt) if line.messages.is_empty() => text.encode_prompt(&prompt)?,
            _ if line.messages.is_empty() => {
                bail!("{} has neither `messages` nor `prompt`", place())
            }
            _ => model::encode_chat(text, line.messages, None).with_context(place)?,
        };
        prompts.push(Prompt {
            class: line.category,
            ids,
        });
    }
    if prompts.is_empty() {
        bail!("there are no prompts in `{}`", path.display());
    }
    Ok(prompts)
}
