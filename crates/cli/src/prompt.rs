//! The prompt of `paceline run`: from the argument, a file and stdin.
//!
//! ```text
//! argument or --prompt-file   stdin                        prompt
//! none, or `-`                anything                     stdin
//! a text                      pipe, file or socket         stdin, a blank line, the text
//! a text                      terminal, /dev/null, empty   the text
//! ```
//!
//! A character device is never read beside a text: it may be a terminal, or have no end.

use crate::args::{OutputArgs, RunArgs};
use crate::{resolve, usage_error};
use anyhow::{Context, Result, bail};
use std::io::{self, IsTerminal, Read};
use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::thread;
use std::time::Duration;

/// Longest prompt in bytes; a tokenizer takes no more.
const PROMPT_BYTES_MAX: usize = text::tokenizer::TEXT_BYTES_MAX;

/// How long stdin may stay open before the user is told that the program waits for it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Reads the prompt that `args` ask for.
///
/// # Errors
///
/// If the prompt cannot be read, is not UTF-8, is too long, or is empty without `--raw`.
pub(crate) fn read(args: &RunArgs, output: OutputArgs) -> Result<String> {
    let argument = args.prompt.as_ref().or(args.prompt_option.as_ref());
    let given = match (argument, &args.prompt_file) {
        (Some(prompt), _) if prompt != "-" => {
            note_model(prompt, output);
            Some(prompt.clone())
        }
        (None, Some(path)) if path != Path::new("-") => {
            let file = std::fs::File::open(path)
                .with_context(|| format!("cannot read `{}`", path.display()))?;
            Some(read_text(file, &path.display().to_string())?)
        }
        (None, None) if io::stdin().is_terminal() => {
            usage_error("no prompt: give it as an argument, with --prompt-file, or on stdin")
        }
        _ => None,
    };
    let prompt = match given {
        None => read_text(io::stdin(), "stdin")?,
        Some(text) if has_data() => join(&read_patiently(output)?, text),
        Some(text) => text,
    };
    if prompt.is_empty() && !args.raw {
        bail!("the prompt is empty");
    }
    Ok(prompt)
}

/// Puts the text of stdin before the prompt, with a blank line between them.
fn join(stdin: &str, prompt: String) -> String {
    match (stdin.trim().is_empty(), prompt.is_empty()) {
        (true, _) => prompt,
        (false, true) => stdin.to_owned(),
        (false, false) => format!("{stdin}\n\n{prompt}"),
    }
}

/// Whether stdin may have data: it is a pipe, a file or a socket, and not a terminal or
/// `/dev/null`.
#[cfg(unix)]
fn has_data() -> bool {
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileTypeExt;
    // A copy of the descriptor, so that asking closes nothing. A closed stdin has no data.
    let copy = io::stdin().as_fd().try_clone_to_owned();
    let kind = copy.and_then(|fd| std::fs::File::from(fd).metadata());
    kind.is_ok_and(|m| {
        let kind = m.file_type();
        kind.is_file() || kind.is_fifo() || kind.is_socket()
    })
}

/// Whether stdin may have data: it is not a terminal.
#[cfg(not(unix))]
fn has_data() -> bool {
    !io::stdin().is_terminal()
}

/// Reads stdin to its end, and tells the user if that takes long: a pipe that a script has
/// inherited may never be closed.
fn read_patiently(output: OutputArgs) -> Result<String> {
    let (done, inbox) = channel();
    thread::spawn(move || done.send(read_text(io::stdin(), "stdin")));
    match inbox.recv_timeout(PATIENCE) {
        Err(RecvTimeoutError::Timeout) => {
            if !output.quiet {
                say!(
                    "paceline: waiting for the end of stdin, which goes before the prompt \
                     (`</dev/null` leaves it out)"
                );
            }
            inbox.recv().context("cannot read `stdin`")?
        }
        read => read.context("cannot read `stdin`")?,
    }
}

/// Reads a text. One line break at the end belongs to the file and is dropped. `name` names the
/// source for errors.
fn read_text(from: impl Read, name: &str) -> Result<String> {
    let mut bytes = Vec::new();
    from.take(PROMPT_BYTES_MAX as u64 + 1)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read `{name}`"))?;
    if bytes.len() > PROMPT_BYTES_MAX {
        bail!("a prompt has at most {PROMPT_BYTES_MAX} bytes, `{name}` has more");
    }
    let mut whole = String::from_utf8(bytes)
        .with_context(|| format!("a prompt must be UTF-8 text, `{name}` is not"))?;
    if whole.ends_with('\n') {
        whole.pop();
        if whole.ends_with('\r') {
            whole.pop();
        }
    }
    Ok(whole)
}

/// Asks the user, if the prompt is the name of a model, whether it was meant as one.
fn note_model(prompt: &str, output: OutputArgs) {
    if !output.quiet && resolve::is_known(prompt) {
        say!("paceline: `{prompt}` is taken as the prompt; did you mean -m {prompt}?");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stdin_goes_before_the_prompt() {
        let joined = |stdin: &str, prompt: &str| join(stdin, prompt.to_owned());
        assert_eq!(joined("a letter", "Summarize:"), "a letter\n\nSummarize:");
        assert_eq!(joined(" \n", "Hello"), "Hello");
        assert_eq!(joined("a letter", ""), "a letter");
        assert_eq!(joined("", ""), "");
    }

    #[test]
    fn one_line_break_at_the_end_is_left_out() {
        let read = |bytes: &[u8]| read_text(bytes, "x").unwrap();
        assert_eq!(read(b"a\r\n"), "a");
        assert_eq!(read(b"a\n\n"), "a\n");
        assert_eq!(read(b"a"), "a");
        assert!(read_text(&b"\xff"[..], "x").is_err());
    }
}
