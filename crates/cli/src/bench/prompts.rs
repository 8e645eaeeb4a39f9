//! The prompts that are answered: built-in ones, or those of `--prompts`; then some of random tokens, whose
//! texts are hard to guess.

use crate::model;
use anyhow::{Context, Result, bail};
use engine::Text;
use serde::Deserialize;
use serde_json::{Value, json};
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

/// Tokens of a note of a [`filler`], at most: none of them is as long.
const NOTE_TOKENS: usize = 64;

/// The words of a note by their place in it.
const NOTE_WORDS: [&[&str]; 5] = [
    &[
        "the rabbit",
        "a girl",
        "the baker",
        "his uncle",
        "her friend",
        "the teacher",
        "a sailor",
        "the old man",
    ],
    &[
        "found", "painted", "lost", "carried", "bought", "hid", "mended", "borrowed",
    ],
    &[
        "red", "small", "heavy", "broken", "green", "warm", "silver", "strange",
    ],
    &[
        "kite", "clock", "map", "basket", "lamp", "boat", "letter", "key",
    ],
    &[
        "in the garden",
        "at the harbor",
        "near the school",
        "under the bridge",
        "on Monday",
        "after lunch",
        "before the rain",
        "by the river",
    ],
];

/// A line of `--prompts`.
#[derive(Deserialize)]
struct PromptLine {
    #[serde(default = "no_category")]
    category: String,
    #[serde(default)]
    messages: Vec<Value>,
    /// A text to continue, without the template.
    #[serde(default, alias = "raw", alias = "text")]
    prompt: Option<String>,
}

fn no_category() -> String {
    "prompts".into()
}

/// What a prompt asks, before the tokenizer reads it.
pub(crate) struct Wording {
    class: String,
    /// A conversation; empty if `raw` is a text to continue.
    messages: Vec<Value>,
    raw: String,
    /// Where it is from, if it is from a file.
    place: Option<String>,
}

/// One prompt, ready to run.
pub(crate) struct Prompt {
    pub(super) class: String,
    pub(crate) ids: Vec<u32>,
    /// Whether it is of random tokens: written at [`RANDOM_TEMPERATURE`] alone, and on after the model's own end.
    pub(super) is_random: bool,
}

/// What the prompts of `file` ask, which is the text of `--prompts`, or the built-in ones.
pub(crate) fn wordings(path: Option<&Path>, file: Option<&str>) -> Result<Vec<Wording>> {
    match (path, file) {
        (Some(path), Some(file)) => of_file(path, file),
        _ => Ok(built_in()),
    }
}

impl Wording {
    /// The prompt with the text `before` in front of what its first user says, or of the text to continue.
    pub(crate) fn encode(&self, text: &Text, before: &str) -> Result<Prompt> {
        let encoded: Result<Vec<u32>> = match self.messages.is_empty() {
            true => text
                .encode_prompt(&format!("{before}{}", self.raw))
                .map_err(Into::into),
            false => behind(before, &self.messages)
                .and_then(|messages| model::encode_chat(text, messages, None)),
        };
        let ids = match &self.place {
            Some(place) => encoded.with_context(|| place.clone())?,
            None => encoded?,
        };
        Ok(Prompt {
            class: self.class.clone(),
            ids,
            is_random: false,
        })
    }
}

/// `messages` with the text `before` in front of what the first user says.
fn behind(before: &str, messages: &[Value]) -> Result<Vec<Value>> {
    let mut messages = messages.to_vec();
    if before.is_empty() {
        return Ok(messages);
    }
    let mut contents = messages.iter_mut();
    let first = contents.find(|message| message["role"] == "user");
    match first.map(|message| &mut message["content"]) {
        Some(Value::String(content)) => content.insert_str(0, before),
        Some(Value::Array(parts)) => parts.insert(0, json!({"type": "text", "text": before})),
        _ => bail!("no user says anything that text could stand before"),
    }
    Ok(messages)
}

/// A text of `tokens` tokens at least, the same one every time: numbered notes that have words in common, but no
/// sentence.
///
/// # Errors
///
/// As of the tokenizer.
pub(super) fn filler(text: &Text, tokens: usize) -> Result<String> {
    // Fewer notes than are needed, and more until they are enough.
    let mut n = tokens.div_ceil(NOTE_TOKENS) as u64;
    loop {
        let notes: String = (1..=n).map(note).collect();
        let found = text.tokenizer.encode(&notes, false)?.len();
        if found >= tokens {
            return Ok(notes);
        }
        let each = found.div_ceil(n as usize).max(1);
        n += (tokens - found).div_ceil(each) as u64;
    }
}

/// One note of [`filler`].
fn note(number: u64) -> String {
    let draw = |place: usize| {
        let words = NOTE_WORDS[place];
        words[(mixed(number << 8 | place as u64) % words.len() as u64) as usize]
    };
    format!(
        "Note {number}: {} {} a {} {} {}.\n",
        draw(0),
        draw(1),
        draw(2),
        draw(3),
        draw(4)
    )
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

fn built_in() -> Vec<Wording> {
    let mut wordings = Vec::new();
    for (class, texts) in PROMPTS {
        for text in *texts {
            wordings.push(Wording {
                class: (*class).into(),
                messages: vec![json!({"role": "user", "content": text})],
                raw: String::new(),
                place: None,
            });
        }
    }
    wordings
}

fn of_file(path: &Path, file: &str) -> Result<Vec<Wording>> {
    let mut prompts = Vec::new();
    for (n, line) in file
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        let place = format!("line {} of `{}`", n + 1, path.display());
        let line: PromptLine = serde_json::from_str(line).with_context(|| place.clone())?;
        if line.messages.is_empty() && line.prompt.is_none() {
            bail!("{place} has neither `messages` nor `prompt`");
        }
        prompts.push(Wording {
            class: line.category,
            messages: line.messages,
            raw: line.prompt.unwrap_or_default(),
            place: Some(place),
        });
    }
    if prompts.is_empty() {
        bail!("there are no prompts in `{}`", path.display());
    }
    Ok(prompts)
}
