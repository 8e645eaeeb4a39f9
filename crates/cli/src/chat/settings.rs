//! What `/set` and `/draft` change: how the tokens of the next replies are chosen and drafted.

use crate::args::ChatArgs;
use crate::reply;
use anyhow::{Result, anyhow, bail};
use engine::{DraftLength, Engine, Request, SAMPLER_NUMBERS, Sampling};
use std::fmt::Write as _;
use std::str::FromStr;

/// The options of the next replies.
pub(super) struct Settings {
    sampling: Sampling,
    /// Tokens of a reply, at most.
    pub(super) max_tokens: usize,
    /// Strings that end a reply.
    stop: Vec<String>,
    /// How long drafts are, where `/draft` has said.
    draft: Option<DraftLength>,
}

impl Settings {
    /// The options that the command line asks for.
    pub(super) fn new(args: &ChatArgs, engine: &Engine) -> Result<Self> {
        Ok(Settings {
            sampling: reply::sampling_for(&args.text, engine)?,
            max_tokens: args.text.max_tokens,
            stop: args.text.stop.clone(),
            draft: None,
        })
    }

    /// Has `request` chosen and drafted so.
    pub(super) fn hold(&self, request: &mut Request) {
        request.sampling = self.sampling.clone();
        request.max_tokens = Some(self.max_tokens);
        request.stop = self.stop.clone();
        request.draft = self.draft;
    }

    /// Has the next reply differ from the last one to the same prompt.
    pub(super) fn next_seed(&mut self) {
        self.sampling.seed = self.sampling.seed.wrapping_add(1);
    }

    /// `/set`: without words, every option with its value; else the option and its new value, or
    /// its value alone. Returns what to show.
    ///
    /// # Errors
    ///
    /// If there is no such option, or the value is none of its own.
    pub(super) fn set(&mut self, words: &str, engine: &Engine) -> Result<Option<String>> {
        let (name, value) = words.split_once(char::is_whitespace).unwrap_or((words, ""));
        if name.is_empty() {
            return Ok(Some(self.list()));
        }
        let name = name.replace('-', "_");
        let value = value.trim();
        if value.is_empty() {
            let value = self.value(&name).ok_or_else(|| unknown(&name))?;
            return Ok(Some(format!("{name} {value}")));
        }
        let mut sampling = self.sampling.clone();
        match name.as_str() {
            "seed" => sampling.seed = number(&name, value, "a whole number")?,
            "top_k" => sampling.top_k = number(&name, value, "a whole number, 0 for all tokens")?,
            "max_tokens" => {
                let most: usize = number(&name, value, "a whole number from 1")?;
                if most == 0 {
                    bail!("max_tokens takes a whole number from 1, not `0`");
                }
                self.max_tokens = most;
            }
            "stop" => {
                self.stop = match value {
                    "off" => Vec::new(),
                    text => vec![text.to_owned()],
                }
            }
            _ => {
                let known = SAMPLER_NUMBERS.iter().find(|number| number.name == name);
                let known = known.ok_or_else(|| unknown(&name))?;
                let x: f32 = number(&name, value, known.about)?;
                if !known.range.contains(&f64::from(x)) {
                    bail!("{name} takes {}, not `{value}`", known.about);
                }
                (known.set)(&mut sampling, x);
            }
        }
        sampling.validate(usize::MAX)?;
        if sampling.dry_multiplier > 0.0 {
            sampling.dry_breakers = engine::sequence_breakers(engine, engine::DRY_BREAKERS)?;
        }
        self.sampling = sampling;
        Ok(None)
    }

    /// The value of an option, as `/set` takes it.
    fn value(&self, name: &str) -> Option<String> {
        match name {
            "seed" => return Some(self.sampling.seed.to_string()),
            "top_k" => return Some(self.sampling.top_k.to_string()),
            "max_tokens" => return Some(self.max_tokens.to_string()),
            "stop" => return Some(self.stop.first().map_or("off".into(), Clone::clone)),
            _ => {}
        }
        let number = SAMPLER_NUMBERS.iter().find(|number| number.name == name)?;
        Some((number.get)(&self.sampling).to_string())
    }

    /// Every option and its value, a line each.
    fn list(&self) -> String {
        let mut list = String::new();
        let names = SAMPLER_NUMBERS.iter().map(|number| number.name);
        for name in names.chain(["top_k", "seed", "max_tokens", "stop"]) {
            let value = self.value(name).expect("the name is of an option");
            let _ = writeln!(list, "{name:<20}{value}");
        }
        list.trim_end().to_owned()
    }

    /// `/draft`: `auto`, `off` or the most tokens to draft; without a word, what holds. Returns
    /// what to show.
    ///
    /// # Errors
    ///
    /// If the word is none of these, or nobody drafts for the model.
    pub(super) fn draft(&mut self, word: &str, engine: &Engine) -> Result<Option<String>> {
        let info = engine.info();
        let Some(drafter) = info.drafter else {
            bail!("nobody drafts for this model: {}", info.drafter_reason);
        };
        let most = info.draft_max;
        self.draft = match word {
            "" => {
                let length = match self.draft.map(DraftLength::max) {
                    None => format!("as many tokens as pay, up to {most}"),
                    Some(0) => "nothing: speculation is off".to_owned(),
                    Some(n) => format!("as many tokens as pay, up to {n}"),
                };
                return Ok(Some(format!("{drafter} drafts {length}")));
            }
            "auto" | "on" => None,
            "off" => Some(DraftLength::UpTo(0)),
            _ => match word.parse() {
                Ok(n) if n <= most => Some(DraftLength::UpTo(n)),
                _ => bail!("/draft takes auto, off, or a number of tokens up to {most}"),
            },
        };
        Ok(None)
    }
}

/// A value of the option `name`, which takes what `about` says.
fn number<T: FromStr>(name: &str, value: &str, about: &str) -> Result<T> {
    let number = value.parse();
    number.map_err(|_| anyhow!("{name} takes {about}, not `{value}`"))
}

fn unknown(name: &str) -> anyhow::Error {
    anyhow!("there is no option `{name}`; /set lists them")
}
