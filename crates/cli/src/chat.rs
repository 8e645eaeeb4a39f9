//! `paceline chat`: a conversation, with a line of input for each turn.
//!
//! On a terminal there is line editing, a history, and Ctrl-C stops the reply but
//! not the program. Otherwise each line of stdin is a turn and stdout has only the
//! replies, so that a script can hold a conversation. Reasoning goes to stderr,
//! dimmed on a terminal.

use crate::args::{ChatArgs, OutputArgs};
use crate::interrupts::Interrupts;
use crate::reply::{Reply, TextOut};
use crate::{is_broken_pipe, model, one_line, reply};
use anyhow::{Context, Result, anyhow, bail};
use console::style;
use engine::{Engine, EngineOptions, FinishReason, Rejected, Request, Sampling};
use rustyline::DefaultEditor;
use rustyline::error::ReadlineError;
use rustyline::history::DefaultHistory;
use serde_json::{Value, json};
use std::io::{self, BufRead, IsTerminal, Read, Write};
use std::path::PathBuf;
use std::process::ExitCode;

/// Most lines of input in the history.
const HISTORY_LINES_MAX: usize = 1000;
/// Longest line of input without a terminal, in bytes.
const LINE_BYTES_MAX: usize = 1 << 20;

/// The prompt for a new line of input.
const PROMPT: &str = "> ";
/// The prompt for a line that continues the one before it.
const MORE_PROMPT: &str = ". ";

/// The commands that end the program.
const LEAVE: &[&str] = &["/exit", "/quit", "/bye"];

/// The mark that begins and ends a text of several lines.
const FENCE: &str = "\"\"\"";

/// The answer to `/help`.
const HELP: &str = "\
/clear, /reset   forget the conversation
/system TEXT     set the system prompt, or clear it; forgets the conversation
/drop N          forget the N oldest questions and their answers
/stats           tokens, speed and context used so far
/save FILE       write the conversation to a new file, as JSON messages
/help            this list
/exit, /quit     leave, as does Ctrl-D
\\ at the end of a line continues it on the next; so does \"\"\" until the next \"\"\"
// at the start of a line is a plain /
Ctrl-C stops the reply";

/// Runs `paceline chat`.
pub(crate) fn run(args: &ChatArgs, output: OutputArgs) -> Result<ExitCode> {
    reply::check(&args.text)?;
    let interrupts = Interrupts::of_ctrl_c()?;
    let engine =
        interrupts.while_idle(|| model::load(&args.model.model, &args.load, &args.draft, 1))?;
    let engine = Engine::start(engine, EngineOptions::default());
    model::check_chats(engine.text())?;
    if output.verbose > 0 {
        say!("{}", model::describe(engine.info()));
    }
    let sampling = reply::sampling_for(&args.text, &engine)?;
    let is_interactive = io::stdin().is_terminal();
    let mut input = Input::open()?;
    if is_interactive && !output.quiet {
        let info = engine.info();
        let drafter = info
            .drafter
            .map_or("no drafter".to_owned(), |name| format!("drafter {name}"));
        say!(
            "{}, {drafter} · /help lists commands, Ctrl-D leaves",
            info.name
        );
    }
    let mut chat = Chat {
        engine: &engine,
        args,
        sampling,
        interrupts: &interrupts,
        system: args.text.system.clone(),
        turns: Vec::new(),
        totals: Totals::default(),
        shows_reasoning: !output.quiet,
        shows_summary: !output.quiet && (is_interactive || output.verbose > 0),
    };
    let mut code = ExitCode::SUCCESS;
    while let Some(line) = interrupts.while_idle(|| input.next())? {
        if LEAVE.contains(&line.trim()) {
            break;
        }
        match chat.take(&line) {
            Ok(()) => {}
            Err(error) if is_broken_pipe(&error) => return Err(error),
            Err(error) => {
                say!("paceline: {}", one_line(&error));
                if !is_interactive {
                    code = ExitCode::FAILURE;
                }
            }
        }
    }
    Ok(code)
}

/// A conversation, and what it takes to go on with it.
struct Chat<'a> {
    engine: &'a Engine,
    args: &'a ChatArgs,
    sampling: Sampling,
    interrupts: &'a Interrupts,
    /// The system prompt.
    system: Option<String>,
    /// The questions and answers so far, as messages.
    turns: Vec<Value>,
    totals: Totals,
    /// Whether a line about each reply follows it.
    shows_summary: bool,
    shows_reasoning: bool,
}

/// Counts over all replies of a conversation.
#[derive(Default)]
struct Totals {
    replies: usize,
    tokens: usize,
    /// Tokens of the prompt and the reply of the last turn.
    context: usize,
    rounds: u64,
    drafted: u64,
    accepted: u64,
    decode_ms: f64,
}

impl Chat<'_> {
    /// Takes a line of input: a command, or words for the model.
    fn take(&mut self, line: &str) -> Result<()> {
        let words = line.trim();
        match words.strip_prefix('/') {
            _ if words.is_empty() => Ok(()),
            Some(command) if !command.starts_with('/') => self.command(command),
            Some(escaped) => self.say(escaped),
            None => self.say(words),
        }
    }

    /// Carries out a command, given without its slash.
    fn command(&mut self, command: &str) -> Result<()> {
        let (name, rest) = command
            .split_once(char::is_whitespace)
            .unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "reset" | "clear" => self.reset(),
            "drop" => self.drop_oldest(rest)?,
            "system" => {
                self.system = Some(rest.to_owned()).filter(|text| !text.is_empty());
                self.reset();
            }
            "stats" => say!("{}", self.stats()),
            "save" => self.save(rest)?,
            "help" => say!("{HELP}"),
            _ => bail!("no command `/{name}`; /help lists them"),
        }
        Ok(())
    }

    /// Forgets all questions and answers.
    fn reset(&mut self) {
        self.turns.clear();
        self.totals.context = 0;
    }

    /// Forgets the `count` oldest questions and their answers; one if `count` is empty.
    fn drop_oldest(&mut self, count: &str) -> Result<()> {
        let held = self.turns.len() / 2;
        let count = if count.is_empty() { "1" } else { count };
        match count.parse::<usize>() {
            Ok(n) if n >= 1 && n <= held => {
                self.turns.drain(..2 * n);
                self.note(&format!("{n} of {held} questions and answers forgotten"));
                Ok(())
            }
            _ => bail!("/drop needs a number from 1 to {held}, the questions so far"),
        }
    }

    /// Says what a command has done, if the user wants to see summaries.
    fn note(&self, line: &str) {
        if self.shows_summary {
            say!("{line}");
        }
    }

    /// The conversation as messages, with the system prompt.
    fn messages(&self) -> Vec<Value> {
        let system = self
            .system
            .iter()
            .map(|text| json!({"role": "system", "content": text}));
        system.chain(self.turns.iter().cloned()).collect()
    }

    /// Adds a question and writes the answer to it. If that fails, the question is forgotten.
    fn say(&mut self, words: &str) -> Result<()> {
        self.turns.push(json!({"role": "user", "content": words}));
        let reply = self.answer().inspect_err(|_| {
            self.turns.pop();
        })?;
        if self.shows_summary {
            let stopped = if reply.outcome.finish == FinishReason::Cancelled {
                "stopped · "
            } else {
                ""
            };
            let summary = reply::short_summary(&reply.outcome, self.args.text.max_tokens);
            say!(
                "{}",
                style(format!("{stopped}{summary}")).for_stderr().dim()
            );
        }
        self.totals.add(&reply);
        let mut turn = json!({"role": "assistant", "content": reply.text});
        if !reply.reasoning.is_empty() {
            // The template knows which turns keep theirs.
            turn["reasoning_content"] = json!(reply.reasoning);
        }
        self.turns.push(turn);
        Ok(())
    }

    /// Generates the answer to the last question, and writes it as it comes.
    fn answer(&self) -> Result<Reply> {
        let text = &self.args.text;
        let arguments = text.chat_template_kwargs.as_ref();
        let prompt = model::encode_chat(self.engine.text(), self.messages(), arguments)?;
        let mut request = Request::new(prompt);
        request.sampling = self.sampling.clone();
        request.max_tokens = Some(text.max_tokens);
        request.stop = text.stop.clone();
        request.ignore_eos = text.ignore_eos;
        request.splits_reasoning = true;
        self.interrupts.clear();
        let mut stdout = TextOut::wrapped_stdout();
        let mut reasoning = TextOut::reasoning(self.shows_reasoning);
        let reply = reply::stream(
            self.engine,
            request,
            self.interrupts,
            self.shows_summary,
            (&mut stdout, &mut reasoning),
        );
        stdout.end_line()?;
        reply.map_err(|error| match error.downcast_ref() {
            Some(Rejected::PromptTooLong {
                tokens,
                context,
                context_max,
            }) => {
                let room = if context < context_max {
                    ", a larger --context may hold more"
                } else {
                    ""
                };
                anyhow!(
                    "the conversation has grown to {tokens} tokens, the context holds {context}: \
                     /drop N forgets the N oldest questions and answers, /clear starts anew{room}"
                )
            }
            _ => error,
        })
    }

    /// The answer to `/stats`.
    fn stats(&self) -> String {
        let Totals {
            replies,
            tokens,
            context,
            rounds,
            drafted,
            accepted,
            decode_ms,
        } = self.totals;
        let rate = if decode_ms > 0.0 {
            tokens as f64 * 1e3 / decode_ms
        } else {
            0.0
        };
        let share = if drafted > 0 {
            100.0 * accepted as f64 / drafted as f64
        } else {
            0.0
        };
        let most = self.engine.info().context;
        format!(
            "replies  {replies}\n\
             tokens   {tokens}, {rate:.1} tok/s\n\
             context  {context} of {most} tokens\n\
             rounds   {rounds}: {drafted} tokens drafted, {share:.0} % accepted"
        )
    }

    /// Writes the conversation as messages of JSON to a new `file`.
    fn save(&self, file: &str) -> Result<()> {
        if file.is_empty() {
            bail!("/save needs the name of a new file, as in `/save chat.json`");
        }
        // A slip of the finger must not overwrite anything.
        let mut out =
            std::fs::File::create_new(file).with_context(|| format!("cannot create `{file}`"))?;
        let text = serde_json::to_string_pretty(&self.messages()).expect("messages are JSON");
        writeln!(out, "{text}").with_context(|| format!("cannot write `{file}`"))?;
        self.note(&format!(
            "{} messages written to `{file}`",
            self.messages().len()
        ));
        Ok(())
    }
}

impl Totals {
    /// Adds the counts of one reply.
    fn add(&mut self, reply: &Reply) {
        let outcome = &reply.outcome;
        self.replies += 1;
        self.tokens += outcome.usage.completion_tokens;
        self.context = outcome.usage.prompt_tokens + outcome.usage.completion_tokens;
        self.rounds += outcome.speculation.rounds;
        self.drafted += outcome.speculation.drafted;
        self.accepted += outcome.speculation.accepted;
        self.decode_ms += outcome.timings.decode_ms;
    }
}

/// The source of lines of input.
enum Input {
    /// A terminal, with line editing.
    Terminal {
        editor: Box<DefaultEditor>,
        /// The file of the history, if there can be one.
        history: Option<PathBuf>,
    },
    /// Standard input that is not a terminal.
    Pipe,
}

impl Input {
    /// Opens standard input, and on a terminal the history.
    fn open() -> Result<Self> {
        if !io::stdin().is_terminal() {
            return Ok(Input::Pipe);
        }
        let config = rustyline::Config::builder()
            .max_history_size(HISTORY_LINES_MAX)?
            .auto_add_history(false)
            .build();
        let mut editor =
            DefaultEditor::with_history(config.clone(), DefaultHistory::with_config(&config))?;
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
    fn next(&mut self) -> Result<Option<String>> {
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
    let variable = |name| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    let state =
        variable("XDG_STATE_HOME").or_else(|| Some(variable("HOME")?.join(".local/state")))?;
    let folder = state.join("paceline");
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
