//! `paceline chat`: a conversation, with a line of input for each turn.
//!
//! On a terminal there is line editing, a history, and Ctrl-C stops the reply but
//! not the program. Otherwise each line of stdin is a turn and stdout has only the
//! replies, so that a script can hold a conversation. Reasoning goes to stderr,
//! dimmed on a terminal.

mod files;
mod history;
mod input;
mod settings;

use crate::args::{ChatArgs, OutputArgs};
use crate::form::{self, Constraint};
use crate::interrupts::Interrupts;
use crate::reply::{Reply, TextOut};
use crate::traced::Traced;
use crate::{is_broken_pipe, media, model, one_line, reply};
use anyhow::{Result, anyhow, bail};
use console::style;
use engine::{Engine, EngineOptions, FinishReason, MediaItem, Rejected, Request};
use input::Input;
use serde_json::{Value, json};
use settings::Settings;
use std::io::{self, IsTerminal};
use std::path::Path;
use std::process::ExitCode;

/// The commands that end the program.
const LEAVE: &[&str] = &["/exit", "/quit", "/bye"];

/// The answer to `/help`.
const HELP: &str = "\
/clear, /reset   forget the conversation
/system TEXT     set the system prompt, or clear it; forgets the conversation
/drop N          forget the N oldest questions and their answers
/image FILE      show a picture before the next question
/video FILE      show a video before the next question
/audio FILE      let the model hear a sound before the next question
/retry           forget the last answer and write another, with the next seed
/set NAME VALUE  change a sampling option, such as temperature; /set lists them
/draft WORD      auto, off, or the most tokens to draft
/stats           tokens, speed and context used so far
/save FILE       write the conversation to a new file, as JSON messages
/load FILE       go on with the conversation in such a file
/export FILE     write the conversation to a new file, as Markdown
/help            this list
/exit, /quit     leave, as does Ctrl-D
\\ at the end of a line continues it on the next; so does \"\"\" until the next \"\"\"
// at the start of a line is a plain /
Ctrl-C stops the reply, Ctrl-R searches the lines that were typed before";

/// Runs `paceline chat`.
pub(crate) fn run(args: &ChatArgs, output: OutputArgs) -> Result<ExitCode> {
    reply::check(&args.text)?;
    // Before a model is loaded for it.
    let form = form::read(&args.form)?;
    let traced = Traced::create(&args.trace)?;
    let interrupts = Interrupts::of_ctrl_c()?;
    let model =
        interrupts.while_idle(|| model::load(&args.model.model, &args.load, &args.draft, 1))?;
    let options = EngineOptions {
        step_sink: traced.sink(&model.info),
        overlap: !args.overlap.no_overlap,
        ..EngineOptions::default()
    };
    let engine = Engine::start(model, options);
    model::check_chats(engine.text())?;
    if output.verbose > 0 {
        say!("{}", model::describe(engine.info()));
    }
    let settings = Settings::new(args, &engine)?;
    let arguments = args.text.chat_template_kwargs.as_ref();
    let constraint = form.map(|form| Constraint::new(&engine, form, arguments));
    let is_interactive = io::stdin().is_terminal();
    let mut input = Input::open()?;
    if is_interactive && !output.quiet {
        let info = engine.info();
        let drafter = model::drafters(info);
        say!(
            "{}, {drafter} · /help lists commands, Ctrl-D leaves",
            info.name
        );
    }
    let mut chat = Chat {
        engine: &engine,
        args,
        settings,
        constraint: constraint.transpose()?,
        interrupts: &interrupts,
        system: args.text.system.clone(),
        turns: Vec::new(),
        shown: Vec::new(),
        next: Vec::new(),
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
    settings: Settings,
    /// What every reply has to follow.
    constraint: Option<Constraint>,
    interrupts: &'a Interrupts,
    /// The system prompt.
    system: Option<String>,
    /// The questions and answers so far, as messages.
    turns: Vec<Value>,
    /// The pictures and videos of each question so far.
    shown: Vec<Vec<MediaItem>>,
    /// The pictures and videos of the next question.
    next: Vec<MediaItem>,
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
    /// Takes a line of input: the path of a picture, a command, or words for the model.
    fn take(&mut self, line: &str) -> Result<()> {
        let words = line.trim();
        if let Some(file) = media::pasted(words) {
            return self.show_picture(&file);
        }
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
            "image" => {
                let file = file_of("image", rest, "kite.png")?;
                self.show_picture(Path::new(file))?;
            }
            "video" => {
                let file = file_of("video", rest, "kite.gif")?;
                self.show_next(file, media::video(self.engine, Path::new(file))?);
            }
            "audio" => {
                let file = file_of("audio", rest, "kite.wav")?;
                self.show_next(file, media::sound(self.engine, Path::new(file))?);
            }
            "retry" => self.retry()?,
            "set" => {
                let shown = self.settings.set(rest, self.engine)?;
                self.show(shown, || format!("{rest} from now on"));
            }
            "draft" => {
                let shown = self.settings.draft(rest, self.engine)?;
                self.show(shown, || format!("drafts: {rest} from now on"));
            }
            "stats" => say!("{}", self.stats()),
            "save" => {
                if self.shown.iter().any(|shown| !shown.is_empty()) {
                    bail!(
                        "/save writes no pictures and videos, and this conversation has some; /export writes its texts"
                    );
                }
                files::save(file_of("save", rest, "chat.json")?, &self.messages())?;
                self.note(&format!(
                    "{} messages written to `{rest}`",
                    self.messages().len()
                ));
            }
            "load" => {
                (self.system, self.turns) = files::load(file_of("load", rest, "chat.json")?)?;
                self.shown = vec![Vec::new(); self.turns.len() / 2];
                self.totals.context = 0;
                self.note(&format!(
                    "{} messages read from `{rest}`",
                    self.messages().len()
                ));
            }
            "export" => {
                let name = &self.engine.info().name;
                files::export(file_of("export", rest, "chat.md")?, name, &self.messages())?;
                self.note(&format!(
                    "{} messages written to `{rest}`",
                    self.messages().len()
                ));
            }
            "help" => say!("{HELP}"),
            _ => bail!("no command `/{name}`; /help lists them"),
        }
        Ok(())
    }

    /// Shows what is in `file` with the next question.
    fn show_next(&mut self, file: &str, item: MediaItem) {
        let rows = item.rows();
        self.note(&format!(
            "`{file}` goes with the next question, as {rows} tokens"
        ));
        self.next.push(item);
    }

    /// Shows the picture in `file` with the next question.
    fn show_picture(&mut self, file: &Path) -> Result<()> {
        let picture = media::picture(self.engine, file)?;
        self.show_next(&file.display().to_string(), picture);
        Ok(())
    }

    /// Forgets all questions and answers.
    fn reset(&mut self) {
        self.turns.clear();
        self.shown.clear();
        self.totals.context = 0;
    }

    /// Forgets the `count` oldest questions and their answers; one if `count` is empty.
    fn drop_oldest(&mut self, count: &str) -> Result<()> {
        let held = self.turns.len() / 2;
        let count = if count.is_empty() { "1" } else { count };
        match count.parse::<usize>() {
            Ok(n) if n >= 1 && n <= held => {
                self.turns.drain(..2 * n);
                self.shown.drain(..n);
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

    /// Shows the answer of a command, or where there is none says what it has done.
    fn show(&self, shown: Option<String>, note: impl FnOnce() -> String) {
        match shown {
            Some(shown) => say!("{shown}"),
            None => self.note(&note()),
        }
    }

    /// Writes another answer to the last question.
    fn retry(&mut self) -> Result<()> {
        let Some(last) = self.turns.pop() else {
            bail!("there is no answer yet to write again");
        };
        self.settings.next_seed();
        let question = self
            .turns
            .pop()
            .expect("a question stands before its answer");
        let shown = self.shown.pop().unwrap_or_default();
        let next = std::mem::replace(&mut self.next, shown);
        let words = media::words(&question["content"]).to_owned();
        let said = self.say(&words);
        let shown = std::mem::replace(&mut self.next, next);
        said.inspect_err(|_| {
            self.turns.extend([question, last]);
            self.shown.push(shown);
        })
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
        let content = media::content(&self.next, words);
        self.turns.push(json!({"role": "user", "content": content}));
        self.shown.push(std::mem::take(&mut self.next));
        let reply = self.answer().inspect_err(|_| {
            self.turns.pop();
            self.next = self.shown.pop().unwrap_or_default();
        })?;
        if self.shows_summary {
            let stopped = if reply.outcome.finish == FinishReason::Cancelled {
                "stopped · "
            } else {
                ""
            };
            let summary = reply::short_summary(&reply.outcome, self.settings.max_tokens);
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
        let (prompt, placed) = media::place(self.engine, prompt, self.shown.concat())?;
        let mut request = Request::new(prompt);
        request.media = placed;
        self.settings.hold(&mut request);
        request.ignore_eos = text.ignore_eos;
        request.splits_reasoning = true;
        if let Some(constraint) = &self.constraint {
            constraint.hold(&mut request);
        }
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
}

/// The file that a command names.
fn file_of<'a>(command: &str, file: &'a str, example: &str) -> Result<&'a str> {
    match file {
        "" => bail!("/{command} needs the name of a file, as in `/{command} {example}`"),
        file => Ok(file),
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
