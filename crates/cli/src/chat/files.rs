//! Conversations in files: JSON messages that `/save` writes and `/load` reads, and Markdown for
//! people.

use crate::media;
use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::fs::File;
use std::io::{Read, Write};

/// Largest file of a conversation.
const FILE_BYTES_MAX: u64 = 16 << 20;

/// Writes a conversation as JSON messages to a new file.
///
/// # Errors
///
/// If the file exists, or cannot be written.
pub(super) fn save(file: &str, messages: &[Value]) -> Result<()> {
    let text = serde_json::to_string_pretty(messages).expect("messages are JSON");
    write_new(file, &(text + "\n"))
}

/// Writes a conversation as Markdown to a new file: a heading a turn; what was thought is quoted.
///
/// # Errors
///
/// As [`save`].
pub(super) fn export(file: &str, model: &str, messages: &[Value]) -> Result<()> {
    let mut text = format!("# Conversation with {model}\n");
    for message in messages {
        let of = |name: &str| message[name].as_str().unwrap_or_default();
        let heading = match of("role") {
            "system" => "Instructions",
            "user" => "You",
            _ => model,
        };
        text += &format!("\n## {heading}\n\n");
        let thoughts = of("reasoning_content").trim();
        for line in thoughts.lines() {
            text += format!("> {line}").trim_end();
            text.push('\n');
        }
        if !thoughts.is_empty() {
            text.push('\n');
        }
        text += media::words(&message["content"]).trim();
        text.push('\n');
    }
    write_new(file, &text)
}

/// A slip of the finger must not overwrite anything.
fn write_new(file: &str, text: &str) -> Result<()> {
    let mut out = File::create_new(file).with_context(|| format!("cannot create `{file}`"))?;
    let written = out.write_all(text.as_bytes());
    written.with_context(|| format!("cannot write `{file}`"))
}

/// Reads the conversation that [`save`] has written: the system prompt, and the questions and
/// answers in turn.
///
/// # Errors
///
/// If the file cannot be read, or holds anything else.
pub(super) fn load(file: &str) -> Result<(Option<String>, Vec<Value>)> {
    let cannot = || format!("cannot read `{file}`");
    let mut text = String::new();
    let from = File::open(file).with_context(cannot)?;
    from.take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .with_context(cannot)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        bail!("a conversation has at most {FILE_BYTES_MAX} bytes, there are more in `{file}`");
    }
    let messages: Vec<Value> = serde_json::from_str(&text)
        .with_context(|| format!("there is no list of messages in `{file}`"))?;
    let has_text =
        |message: &Value, role: &str| message["role"] == role && message["content"].is_string();
    let system = messages.first().filter(|first| has_text(first, "system"));
    let turns = &messages[usize::from(system.is_some())..];
    let roles = ["user", "assistant"].iter().cycle();
    let is_in_turn = turns
        .iter()
        .zip(roles)
        .all(|(turn, role)| has_text(turn, role));
    if !is_in_turn || turns.len() % 2 == 1 {
        bail!(
            "after a system prompt there must be questions (user) and answers (assistant) in turn, \
             with text as content, in `{file}`"
        );
    }
    let system = system.and_then(|system| system["content"].as_str());
    Ok((system.map(str::to_owned), turns.to_vec()))
}
