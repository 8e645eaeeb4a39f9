//! One reply: from a request to text on a stream, and to a line about it.

use crate::args::TextArgs;
use crate::interrupts::Interrupts;
use crate::progress::PrefillBar;
use crate::wrap::Wrap;
use anyhow::{Result, anyhow, bail};
use engine::{
    Channel, DrafterCounts, Engine, Event, FinishReason, PositionCounts, Request, RequestOutcome,
    SAMPLER_NUMBERS, Sampling, SamplingDefaults, Speculation,
};
use std::fmt::Write as _;
use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// The time between two looks at whether a waiting reply was interrupted.
const INTERRUPT_POLL: Duration = Duration::from_millis(20);

/// The highest temperature, as in the API.
const TEMPERATURE_MAX: f32 = 2.0;

/// Fewest drafted tokens of a position for which a share of accepted ones is printed.
const TELLING: u64 = 5;

/// A reply that has ended.
pub(crate) struct Reply {
    /// The text of the answer.
    pub(crate) text: String,
    /// The text of the reasoning before the answer.
    pub(crate) reasoning: String,
    /// The token ids of the whole reply.
    pub(crate) tokens: Vec<u32>,
    /// Usage, timings and speculation of the request.
    pub(crate) outcome: RequestOutcome,
    /// Milliseconds from submission to the first text.
    pub(crate) first_text_ms: f64,
}

/// Runs `request` and passes its answer and its reasoning as they come, a line break
/// between them.
///
/// # Errors
///
/// If the engine refuses or fails, or one of them cannot be written.
pub(crate) fn stream(
    engine: &Engine,
    request: Request,
    interrupts: &Interrupts,
    bar: bool,
    (out, aside): (&mut dyn Write, &mut dyn Write),
) -> Result<Reply> {
    let (events, inbox) = channel();
    let start = Instant::now();
    let mut bar = PrefillBar::new(bar);
    let cancel = engine.submit(request, Box::new(move |event| events.send(event).is_ok()))?;
    let (mut text, mut reasoning) = (String::new(), String::new());
    let (mut tokens, mut first_text_ms) = (Vec::new(), 0.0);
    let mut is_aside = false;
    loop {
        match inbox.recv_timeout(INTERRUPT_POLL) {
            Ok(Event::Prefill { done, total, .. }) => bar.set(done, total),
            Ok(Event::Text(segments)) => {
                bar.clear();
                if first_text_ms == 0.0 {
                    first_text_ms = start.elapsed().as_secs_f64() * 1e3;
                }
                for segment in segments {
                    tokens.extend(segment.tokens.iter().map(|token| token.id));
                    if segment.text.is_empty() {
                        continue;
                    }
                    // An error here drops the inbox, which cancels the request.
                    if segment.channel == Channel::Reasoning {
                        is_aside = true;
                        reasoning.push_str(&segment.text);
                        aside.write_all(segment.text.as_bytes())?;
                        aside.flush()?;
                    } else {
                        if std::mem::take(&mut is_aside) {
                            aside.write_all(b"\n")?;
                        }
                        text.push_str(&segment.text);
                        out.write_all(segment.text.as_bytes())?;
                        out.flush()?;
                    }
                }
            }
            Ok(Event::Done(outcome)) => {
                bar.clear();
                if is_aside {
                    aside.write_all(b"\n")?;
                }
                return Ok(Reply {
                    text,
                    reasoning,
                    tokens,
                    outcome: *outcome,
                    first_text_ms,
                });
            }
            Ok(Event::Failed(reason)) => return Err(anyhow!(reason)),
            Ok(Event::Round(_)) | Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return Err(anyhow!("the engine has stopped")),
        }
        if interrupts.is_set() {
            cancel.cancel();
        }
    }
}

/// The sampler that `args` ask for. What they leave open is the checkpoint's, as in
/// the API: a penalty counts in greedy text too.
pub(crate) fn sampling(args: &TextArgs, defaults: &SamplingDefaults) -> Sampling {
    let none = Sampling::default();
    let mut sampling = Sampling {
        top_k: args
            .sampler
            .top_k
            .or(defaults.top_k.map(|k| k as usize))
            .unwrap_or(none.top_k),
        logit_bias: args.logit_bias.clone(),
        // Not advice but part of the model: greedy decoding must not choose these either.
        suppress: defaults.suppress_tokens.clone(),
        seed: args.seed.unwrap_or_else(new_seed),
        ..none
    };
    for option in SAMPLER_NUMBERS {
        if let Some(number) = args
            .sampler
            .number(option.name)
            .or((option.advised)(defaults))
        {
            (option.set)(&mut sampling, number);
        }
    }
    // As in the API: 0 keeps the likeliest token alone, which the sampler calls the least positive.
    if sampling.top_p == 0.0 {
        sampling.top_p = f32::MIN_POSITIVE;
    }
    sampling
}

/// [`sampling`] as `engine` needs it: with what no repetition of DRY reaches over, where DRY is on.
pub(crate) fn sampling_for(args: &TextArgs, engine: &Engine) -> Result<Sampling> {
    let mut sampling = sampling(args, &engine.text().sampling);
    if sampling.dry_multiplier > 0.0 {
        sampling.dry_breakers = engine::sequence_breakers(engine, engine::DRY_BREAKERS)?;
    }
    Ok(sampling)
}

/// Refuses numbers that no sampler takes, before a model is loaded for them.
pub(crate) fn check(args: &TextArgs) -> Result<()> {
    let sampling = sampling(args, &SamplingDefaults::default());
    if sampling.temperature > TEMPERATURE_MAX {
        bail!(
            "temperature must be between 0 and {TEMPERATURE_MAX}, not {}",
            sampling.temperature
        );
    }
    Ok(sampling.validate(usize::MAX)?)
}

/// A seed that differs from run to run, short enough to be typed again.
fn new_seed() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
        >> 32
}

/// Tokens, speed and speculation of a reply, in one line for people.
pub(crate) fn summary(outcome: &RequestOutcome, max_tokens: usize, draft_max: usize) -> String {
    let Speculation {
        engaged,
        reason,
        by_position,
        tokens_per_round,
        rounds,
        drafted,
        accepted,
        ..
    } = &outcome.speculation;
    let mut line = rate(outcome, max_tokens);
    if *engaged {
        let drafter = who(&outcome.speculation, "someone");
        let _ = write!(
            line,
            " · {drafter} drafted up to {draft_max}: {tokens_per_round:.2} tokens a round, accepted draft tokens:"
        );
        // Of a few guesses a share says nothing.
        let is_telling = |p: &&PositionCounts| p.drafted >= TELLING && 100 * p.drafted >= *rounds;
        for position in by_position.iter().take_while(is_telling) {
            let share = 100.0 * position.accepted as f64 / position.drafted as f64;
            let _ = write!(line, " {share:.0} %");
        }
        if line.ends_with('%') {
            line += " (1st, 2nd, …)";
        } else {
            let _ = write!(line, " {accepted} of {drafted}");
        }
    } else {
        let reason = reason.as_deref().unwrap_or("nothing was drafted");
        let _ = write!(line, " · no speculation: {reason}");
    }
    line
}

/// Tokens, speed and acceptance of a reply, short enough to stand under every reply of a
/// conversation.
pub(crate) fn short_summary(outcome: &RequestOutcome, max_tokens: usize) -> String {
    let mut line = rate(outcome, max_tokens);
    let speculation = &outcome.speculation;
    if speculation.engaged {
        let drafter = who(speculation, "drafter");
        let _ = write!(
            line,
            " · {drafter}: {:.2} tokens a round",
            speculation.tokens_per_round
        );
    }
    line
}

/// Who drafted: the model's drafter, `nobody` where it has no name; where several heads did, each guesser with its
/// share of the rounds with guesses.
fn who(speculation: &Speculation, nobody: &str) -> String {
    let all = &speculation.by_drafter;
    let heads = all.iter().filter(|counts| counts.drafter != "ngram");
    if heads.count() < 2 {
        return speculation.drafter.as_deref().unwrap_or(nobody).to_owned();
    }
    let rounds: u64 = all.iter().map(|counts| counts.rounds).sum();
    let share = |counts: &DrafterCounts| {
        let share = 100.0 * counts.rounds as f64 / rounds as f64;
        format!("{} ({share:.0} %)", counts.drafter)
    };
    all.iter().map(share).collect::<Vec<_>>().join(", ")
}

/// The number of tokens, their speed, and the option that cut them off.
fn rate(outcome: &RequestOutcome, max_tokens: usize) -> String {
    let n = outcome.usage.completion_tokens;
    let mut line = format!("{n} token{}", if n == 1 { "" } else { "s" });
    if outcome.timings.decode_tokens_per_second > 0.0 {
        let _ = write!(
            line,
            ", {:.1} tok/s",
            outcome.timings.decode_tokens_per_second
        );
    }
    if outcome.finish == FinishReason::Length && n > 0 {
        let by_context = n < max_tokens;
        let flag = if by_context { "context" } else { "max-tokens" };
        let _ = write!(line, ", cut off by --{flag}");
    }
    line
}

/// Writes text of a model to stdout or stderr. On a terminal, control characters are replaced.
///
/// A model can be made to write escape sequences, and those can rename windows,
/// hide text and on some terminals do worse.
pub(crate) struct TextOut<W> {
    out: W,
    is_terminal: bool,
    is_dim: bool,
    ends_line: bool,
    /// Breaks lines between words; `None` leaves that to the terminal.
    wrap: Option<Wrap>,
}

impl TextOut<Box<dyn Write>> {
    /// Writes to stderr, dimmed if it shows colors; to nowhere unless `is_shown`.
    pub(crate) fn reasoning(is_shown: bool) -> Self {
        let out: Box<dyn Write> = if is_shown {
            Box::new(io::stderr())
        } else {
            Box::new(io::sink())
        };
        TextOut {
            out,
            is_terminal: io::stderr().is_terminal(),
            is_dim: console::colors_enabled_stderr(),
            ends_line: true,
            wrap: None,
        }
    }
}

impl TextOut<io::StdoutLock<'static>> {
    /// Writes to stdout.
    pub(crate) fn stdout() -> Self {
        let stdout = io::stdout();
        TextOut {
            is_terminal: stdout.is_terminal(),
            out: stdout.lock(),
            is_dim: false,
            ends_line: true,
            wrap: None,
        }
    }

    /// Writes to stdout; on a terminal, lines break between words.
    pub(crate) fn wrapped_stdout() -> Self {
        let size = console::Term::stdout().size_checked();
        TextOut {
            wrap: size.map(|(_, columns)| Wrap::new(columns.into())),
            ..Self::stdout()
        }
    }
}

impl<W: Write> TextOut<W> {
    /// Ends the last line with a line break unless it has one.
    pub(crate) fn end_line(&mut self) -> io::Result<()> {
        if let Some(wrap) = &mut self.wrap {
            let held = wrap.finish();
            self.out.write_all(held.as_bytes())?;
        }
        if !self.ends_line {
            self.write_all(b"\n")?;
        }
        self.flush()
    }
}

impl<W: Write> Write for TextOut<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(last) = bytes.last() {
            self.ends_line = *last == b'\n';
        }
        if !self.is_terminal {
            return self.out.write(bytes);
        }
        // Pieces of a reply are whole characters, so nothing is lost here.
        let shown: String = String::from_utf8_lossy(bytes)
            .chars()
            .filter(|c| *c != '\r')
            .map(|c| {
                if c.is_control() && !matches!(c, '\n' | '\t') {
                    '\u{fffd}'
                } else {
                    c
                }
            })
            .collect();
        let shown = match &mut self.wrap {
            Some(wrap) => wrap.push(&shown),
            None => shown,
        };
        if self.is_dim {
            let dim = console::style(shown).for_stderr().dim();
            write!(self.out, "{dim}")?;
        } else {
            self.out.write_all(shown.as_bytes())?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use engine::{FinishReason, Timings, Usage};

    fn outcome(completion_tokens: usize, speculation: Speculation) -> RequestOutcome {
        RequestOutcome {
            finish: FinishReason::Stop,
            usage: Usage {
                prompt_tokens: 5,
                cached_tokens: 0,
                media_tokens: engine::MediaRowCounts::default(),
                completion_tokens,
                reasoning_tokens: 0,
            },
            timings: Timings {
                decode_tokens_per_second: 212.36,
                ..Timings::default()
            },
            speculation,
            embedding: Vec::new(),
        }
    }

    #[test]
    fn the_summary_says_what_speculation_did() {
        let counts = |drafted, accepted| PositionCounts { drafted, accepted };
        let speculation = Speculation {
            engaged: true,
            drafter: Some("assistant".into()),
            by_position: vec![counts(50, 39), counts(50, 30), counts(49, 23), counts(0, 0)],
            tokens_per_round: 2.614,
            rounds: 50,
            drafted: 149,
            accepted: 92,
            ..Speculation::default()
        };
        let few = |rounds, by_position: Vec<PositionCounts>| {
            let speculation = Speculation {
                rounds,
                drafted: by_position.iter().map(|p| p.drafted).sum(),
                accepted: by_position.iter().map(|p| p.accepted).sum(),
                by_position,
                ..speculation.clone()
            };
            let line = summary(&outcome(128, speculation), 512, 3);
            line.split_once("draft tokens: ").unwrap().1.to_owned()
        };
        let rare = vec![counts(900, 450), counts(9, 0), counts(1, 0)];
        assert_eq!(few(1000, rare), "50 % (1st, 2nd, …)");
        assert_eq!(
            few(50, vec![counts(50, 25), counts(4, 0)]),
            "50 % (1st, 2nd, …)"
        );
        assert_eq!(few(3, vec![counts(3, 2), counts(2, 1)]), "3 of 5");
        assert_eq!(
            summary(&outcome(128, speculation.clone()), 512, 3),
            "128 tokens, 212.4 tok/s · assistant drafted up to 3: 2.61 tokens a round, accepted draft tokens: 78 % 60 % 47 % (1st, 2nd, …)"
        );
        let by = |drafter: &str, rounds| DrafterCounts {
            drafter: drafter.into(),
            rounds,
            drafted: 3 * rounds,
            accepted: rounds,
        };
        let several = Speculation {
            by_drafter: vec![by("mtp", 30), by("dspark", 15), by("ngram", 5)],
            ..speculation.clone()
        };
        assert_eq!(
            short_summary(&outcome(128, several.clone()), 512),
            "128 tokens, 212.4 tok/s · mtp (60 %), dspark (30 %), ngram (10 %): 2.61 tokens a round"
        );
        // One head beside copies is the drafter, as ever.
        let one = Speculation {
            by_drafter: vec![by("assistant", 45), by("ngram", 5)],
            ..several
        };
        assert_eq!(
            short_summary(&outcome(128, one), 512),
            "128 tokens, 212.4 tok/s · assistant: 2.61 tokens a round"
        );
        let plain = Speculation {
            reason: Some("--draft none".into()),
            ..Speculation::default()
        };
        assert_eq!(
            summary(&outcome(1, plain), 512, 3),
            "1 token, 212.4 tok/s · no speculation: --draft none"
        );
    }

    #[test]
    fn text_cannot_steer_a_terminal_but_stays_whole_in_a_pipe() {
        for (is_terminal, expected) in [(true, "a\u{fffd}[2Jb\té\n"), (false, "a\u{1b}[2Jb\té\r\n")]
        {
            let mut bytes = Vec::new();
            let mut out = TextOut {
                out: &mut bytes,
                is_terminal,
                is_dim: false,
                ends_line: true,
                wrap: None,
            };
            out.write_all("a\u{1b}[2Jb\té\r\n".as_bytes()).unwrap();
            out.end_line().unwrap();
            assert_eq!(String::from_utf8(bytes).unwrap(), expected);
        }
    }

    #[test]
    fn an_open_line_is_ended_once() {
        let mut bytes = Vec::new();
        let mut out = TextOut {
            out: &mut bytes,
            is_terminal: false,
            is_dim: false,
            ends_line: true,
            wrap: None,
        };
        out.end_line().unwrap();
        out.write_all(b"a").unwrap();
        out.end_line().unwrap();
        out.end_line().unwrap();
        assert_eq!(bytes, b"a\n");
    }
}
