//! Lines of input: with editing and a history on a terminal, a line a turn otherwise.

use super::history::FuzzyHistory;
use anyhow::{Context, Result, bail};
use rustyline::Editor;
use rustyline::error::ReadlineError;
use std::io::{self, BufRead, IsTerminal, Read};
use std::path::PathBuf;

/// Most lines of input in the history.
const HISTORY_LINES_MAX: usize = 1000;
/// Longest line of input without a terminal, in bytes.
const LINE_BYTES_MAX: usize = 1 << 20;

/// The prompt for a new line of input.
const PROMPT: &str = "> ";
/// The prompt for a line that continues the one before it.
const MORE_PROMPT: &str = ". ";

/// The mark that begins and ends a text of several lines.
const FENCE: &str = "\"\"\"";

/// The source of lines of input.
pub(super) enum Input {
    /// A terminal, with line editing.
    Terminal {
        editor: Box<Editor<(), FuzzyHistory>>,
        /// The file of the history, if there can be one.
        history: Option<PathBuf>,
    },
    /// Standard input that is not a terminal.
    Pipe,
}

impl Input {
    /// Opens standard input, and on a terminal the history.
    pub(super) fn open() -> Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Input::Pipe);
        }
        let config = rustyline::Config::builder()
            .max_history_size(HISTORY_LINES_MAX)?
            .auto_add_history(false)
            .build();
        let mut editor = Editor::with_history(config.clone(), FuzzyHistory::new(&config))?;
        let history = history_file();
        if let Some(file) = &history {
            // There is none at first; one that cannot be read is not worth a message.
            let _ = editor.load_history(file);
        }
        Ok(Input::Terminal {
            editor: Box::new(editor),
            history,
        })
    }

    /// The next line of input together with the lines that continue it; `None` at the end.
    pub(super) fn next(&mut self) -> Result<Option<String>> {
        let mut whole = String::new();
        let mut fenced = false;
        loop {
            let Some(line) = self.line(if whole.is_empty() && !fenced {
                PROMPT
            } else {
                MORE_PROMPT
            })?
            else {
                return Ok(Some(whole).filter(|w| !w.is_empty()));
            };
            match line {
                Line::Abandoned => {
                    if whole.is_empty() {
                        say!("press Ctrl-D or type /exit to leave");
                    }
                    whole.clear();
                    fenced = false;
                }
                Line::Text(text) if fenced => match text.trim_end().strip_suffix(FENCE) {
                    Some(end) => {
                        whole += end;
                        let whole = whole.trim_matches('\n').to_owned();
                        self.remember(&format!("{FENCE}{whole}{FENCE}"));
                        return Ok(Some(whole));
                    }
                    None => {
                        whole += &text;
                        whole.push('\n');
                    }
                },
                Line::Text(text) if whole.is_empty() && text.trim_start().starts_with(FENCE) => {
                    let begun = &text.trim_start()[FENCE.len()..];
                    if let Some(one_line) = begun.trim_end().strip_suffix(FENCE) {
                        return Ok(Some(one_line.to_owned()));
                    }
                    fenced = true;
                    whole = format!("{begun}\n");
                }
                Line::Text(text) => match text.strip_suffix('\\') {
                    Some(begun) => {
                        whole += begun;
                        whole.push('\n');
                    }
                    None => {
                        whole += &text;
                        if !is_command(&whole) {
                            self.remember(&whole);
                        }
                        return Ok(Some(whole));
                    }
                },
            }
        }
    }

    /// Reads one line; `None` at the end of input.
    fn line(&mut self, prompt: &str) -> Result<Option<Line>> {
        match self {
            Input::Terminal { editor, .. } => match editor.readline(prompt) {
                Ok(line) => Ok(Some(Line::Text(line))),
                Err(ReadlineError::Interrupted) => Ok(Some(Line::Abandoned)),
                Err(ReadlineError::Eof) => Ok(None),
                Err(error) => Err(error).context("cannot read from the terminal"),
            },
            Input::Pipe => read_line(&mut io::stdin().lock()).map(|line| line.map(Line::Text)),
        }
    }

    /// Adds a line of input to the history. A failure is not worth a message.
    fn remember(&mut self, whole: &str) {
        if let Input::Terminal { editor, history } = self {
            let _ = editor.add_history_entry(whole);
            if let Some(file) = history {
                let _ = editor.append_history(file);
            }
        }
    }
}

/// Whether a line is a command for this program, and not for the model.
fn is_command(line: &str) -> bool {
    let line = line.trim();
    line.starts_with('/') && !line.starts_with("//")
}

/// A line of input.
enum Line {
    /// The text that was typed.
    Text(String),
    /// The user pressed Ctrl-C: what was typed does not count.
    Abandoned,
}

/// Reads a line of at most [`LINE_BYTES_MAX`], without its line break; `None` at the end.
fn read_line(input: &mut impl BufRead) -> Result<Option<String>> {
    let mut bytes = Vec::new();
    let read = input
        .by_ref()
        .take(LINE_BYTES_MAX as u64 + 1)
        .read_until(b'\n', &mut bytes);
    if read.context("cannot read stdin")? == 0 {
        return Ok(None);
    }
    if bytes.len() > LINE_BYTES_MAX {
        bail!("a line of stdin has more than {LINE_BYTES_MAX} bytes: split it");
    }
    let text = String::from_utf8(bytes).context("stdin is not UTF-8 text")?;
    Ok(Some(text.trim_end_matches(['\n', '\r']).to_owned()))
}

/// The file of the history, `$XDG_STATE_HOME/paceline/history`; `None` if its folder cannot be
/// made.
fn history_file() -> Option<PathBuf> {
    let folder = crate::places::state()?;
    std::fs::create_dir_all(&folder).ok()?;
    Some(folder.join("history"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_end_anyhow_and_have_a_limit() {
        let mut input = io::Cursor::new("a\r\n\nb".as_bytes());
        let mut next = || read_line(&mut input).unwrap();
        assert_eq!(
            [next(), next(), next(), next()],
            [
                Some("a".into()),
                Some(String::new()),
                Some("b".into()),
                None
            ]
        );
        assert!(read_line(&mut io::Cursor::new(vec![b'a'; LINE_BYTES_MAX + 1])).is_err());
        assert!(read_line(&mut io::Cursor::new(b"\xff\n")).is_err());
    }
}
