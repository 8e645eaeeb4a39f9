//! The prompts that are answered: built-in ones, or those of `--prompts`; then some of random tokens, whose
//! texts are hard to guess.

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

/// The class of prompts of random tokens.
const RANDOM: &str = "random";
/// The temperature after these.
pub(super) const RANDOM_TEMPERATURE: f32 = 1.5;
/// Tokens of such a prompt, and how many prompts there are.
const RANDOM_TOKENS: usize = 48;
const RANDOM_PROMPTS: u64 = 3;

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
    /// Whether it is of random tokens: written at [`RANDOM_TEMPERATURE`] alone, and on after the model's own end.
    pub(super) is_random: bool,
}

/// The prompts of `file`, which is the text of `--prompts`, or the built-in ones.
pub(super) fn prompts(args: &BenchArgs, file: Option<&str>, text: &Text) -> Result<Vec<Prompt>> {
    match (&args.prompts, file) {
        (Some(path), Some(file)) => of_file(path, file, text),
        _ => built_in(text),
    }
}

/// Prompts of random tokens of a vocabulary of `vocab` tokens, the same ones every time.
pub(super) fn random(text: &Text, vocab: usize) -> Vec<Prompt> {
    let prompt = |number: u64| {
        let draws = (0..).map(|i: u64| mixed(number << 32 | i) % vocab.max(1) as u64);
        let tokens = draws.take(RANDOM_TOKENS * 4).map(|token| token as u32);
        let plain = tokens.filter(|&token| !text.tokenizer.is_special(token));
        Prompt {
            class: RANDOM.into(),
            ids: plain.take(RANDOM_TOKENS).collect(),
            is_random: true,
        }
    };
    let prompts = (0..RANDOM_PROMPTS).map(prompt);
    prompts.filter(|prompt| !prompt.ids.is_empty()).collect()
}

/// A number that looks random, by the finalizer of SplitMix64 (Steele, Lea and Flood 2014).
fn mixed(seed: u64) -> u64 {
    let mut x = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

fn built_in(text: &Text) -> Result<Vec<Prompt>> {
    let mut prompts = Vec::new();
    for (class, texts) in PROMPTS {
        for prompt in *texts {
            let message = serde_json::json!({"role": "user", "content": prompt});
            prompts.push(Prompt {
                class: (*class).into(),
                ids: model::encode_chat(text, vec![message], None)?,
                is_random: false,
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
            is_random: false,
        });
    }
    if prompts.is_empty() {
        bail!("there are no prompts in `{}`", path.display());
    }
    Ok(prompts)
}
