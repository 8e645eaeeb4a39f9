//! Cells: texts of plain decoding against those with a drafter, and what comes of it.

use super::features::{FEATURES, Feature, Mode, PROMPTS, Shape, next_turn};
use super::writing::{OFF, Run, Script, Written, run};
use engine::{DraftLength, DrafterCounts, Engine, Request};
use serde::Serialize;
use serde_json::{Map, Value, json};
use server::RequestReader;
use std::time::Instant;
use tokio::runtime::Runtime;

/// What a cell has shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Verdict {
    /// All texts are the same, and tokens were drafted.
    Equal,
    /// A text is not the same.
    Differs,
    /// All texts are the same, and speculation had no part in them.
    NotEngaged,
    /// The model or the device cannot have the feature.
    NotApplicable,
    /// A request failed.
    Failed,
}

/// Whether speculation did something.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Engagement {
    /// Tokens were drafted, and some accepted and some refused.
    Engaged,
    /// Tokens were drafted, and all were accepted or all refused.
    Drafted,
    /// Nothing was drafted.
    None,
}

/// The first difference of a cell.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Difference {
    /// The kind of the prompt; the first where several run at once.
    pub(super) prompt: &'static str,
    /// Which of the cell's texts after this prompt.
    pub(super) text: usize,
    /// The draft length, or `auto`.
    pub(super) draft: String,
    /// The first token that is not the same, from 0.
    pub(super) token: usize,
}

/// One feature with one drafter, greedy or sampled.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Cell {
    pub(super) drafter: String,
    pub(super) feature: &'static str,
    pub(super) mode: &'static str,
    pub(super) result: Verdict,
    pub(super) engagement: Engagement,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) difference: Option<Difference>,
    /// Why the cell is not `equal`, if that is not a difference.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reason: Option<String>,
    /// Texts compared, and their tokens.
    pub(super) texts: usize,
    pub(super) tokens: usize,
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    /// What each drafter has guessed of them.
    pub(super) by_drafter: Vec<DrafterCounts>,
    pub(super) seconds: f64,
}

/// What plain decoding writes for a feature in one mode, and how to ask for it again.
pub(super) struct Plain {
    pub(super) feature: &'static Feature,
    pub(super) mode: Mode,
    /// A script for each prompt, or why there is none.
    pub(super) prompts: Result<Vec<Prompted>, Unshown>,
}

/// Why there are no texts to compare with.
#[derive(Debug)]
pub(super) struct Unshown {
    pub(super) verdict: Verdict,
    pub(super) reason: String,
}

impl Unshown {
    /// A request failed for this reason.
    fn failed(reason: String) -> Self {
        Unshown {
            verdict: Verdict::Failed,
            reason,
        }
    }
}

impl From<String> for Unshown {
    /// The model or the device cannot have the feature, for this reason.
    fn from(reason: String) -> Self {
        Unshown {
            verdict: Verdict::NotApplicable,
            reason,
        }
    }
}

/// One script and its texts.
pub(super) struct Prompted {
    pub(super) kind: &'static str,
    pub(super) script: Script,
    pub(super) texts: Vec<Written>,
}

/// What writes without a drafter, and reads requests.
pub(super) struct Author<'a> {
    pub(super) engine: &'a Engine,
    pub(super) reader: RequestReader,
    pub(super) runtime: Runtime,
    pub(super) is_quick: bool,
}

impl Author<'_> {
    /// The texts of every feature in every mode. `tell` is called after each.
    pub(super) fn all(&self, mut tell: impl FnMut()) -> Vec<Plain> {
        let mut all = Vec::new();
        for feature in FEATURES {
            for mode in Mode::ALL {
                all.push(Plain {
                    feature,
                    mode,
                    prompts: self.prompts(feature, mode),
                });
                tell();
            }
        }
        all
    }

    fn prompts(&self, feature: &Feature, mode: Mode) -> Result<Vec<Prompted>, Unshown> {
        let several = matches!(feature.shape, Shape::Together | Shape::Cancelled);
        let n = if self.is_quick || several {
            1
        } else {
            PROMPTS.len()
        };
        let one = |i: usize| -> Result<Prompted, Unshown> {
            let script = self.script(feature, i, mode)?;
            Ok(Prompted {
                kind: PROMPTS[i].0,
                texts: self.write(&script.alone())?.texts,
                script,
            })
        };
        (0..n).map(one).collect()
    }

    /// The requests of `feature` for a prompt, or for all that run at once.
    fn script(&self, feature: &Feature, i: usize, mode: Mode) -> Result<Script, Unshown> {
        let text = self.engine.text();
        let mut body = feature.body(text, i, mode, self.is_quick)?;
        let waves = match feature.shape {
            Shape::Each => vec![self.read(&body)?],
            Shape::Stopped => {
                body.extend(self.stops(&body)?);
                vec![self.read(&body)?]
            }
            Shape::Warm => {
                let first = self.read(&body)?;
                let answer = self.first_text(&first)?.answer();
                vec![first, self.read(&next_turn(&body, &answer))?]
            }
            Shape::Together | Shape::Cancelled => {
                let mut wave = Vec::new();
                for i in 0..PROMPTS.len() {
                    wave.extend(self.read(&feature.body(text, i, mode, self.is_quick)?)?);
                }
                vec![wave]
            }
        };
        Ok(Script {
            waves,
            cancels_first: feature.shape == Shape::Cancelled,
        })
    }

    /// The texts of `script` without drafts.
    fn write(&self, script: &Script) -> Result<Run, Unshown> {
        run(self.engine, script, OFF).map_err(Unshown::failed)
    }

    fn read(&self, body: &Map<String, Value>) -> Result<Vec<Request>, String> {
        let body = body.clone();
        self.runtime.block_on(async {
            match body.contains_key("messages") {
                true => self.reader.chat(body).await,
                false => self.reader.completion(body).await,
            }
        })
    }

    fn first_text(&self, wave: &[Request]) -> Result<Written, Unshown> {
        let script = Script {
            waves: vec![wave[..1].to_vec()],
            cancels_first: false,
        };
        let texts = self.write(&script)?.texts;
        let first = texts.into_iter().next();
        first.ok_or_else(|| Unshown::failed("nothing was written".into()))
    }

    /// Fields that end the text of `body` in its last third: a string that comes there first, and the
    /// last of the tokens that do, if there is one.
    fn stops(&self, body: &Map<String, Value>) -> Result<Map<String, Value>, Unshown> {
        let written = self.first_text(&self.read(body)?)?;
        let answer = written.answer();
        let stop = late_words(&answer);
        let stop = stop.ok_or_else(|| "the model wrote no word to stop at".to_owned())?;
        let ids: Vec<u32> = written.tokens.iter().map(|(_, token)| token.id).collect();
        let token = late_token(&ids);
        let fields = json!({"stop": [stop], "stop_token_ids": token.as_slice()});
        Ok(fields.as_object().cloned().unwrap_or_default())
    }
}

/// As few words of `text` as end in its last third and not before; `None` if there is no word. Of a text
/// that repeats itself these are many: a single word would end it where nothing has been repeated.
pub(super) fn late_words(text: &str) -> Option<&str> {
    let late = text.len() * 2 / 3;
    let begin_of = |word: &str| word.as_ptr() as usize - text.as_ptr() as usize;
    let words: Vec<_> = text
        .split_whitespace()
        .map(|word| begin_of(word)..begin_of(word) + word.len())
        .collect();
    let runs = (1..=words.len()).flat_map(|n| words.windows(n));
    let mut runs = runs.map(|run| &text[run[0].start..run[run.len() - 1].end]);
    runs.find(|run| {
        let first = text.find(run).map_or(0, |begin| begin + run.len());
        first > late
    })
}

/// The last token of `ids` that comes first in their last third.
pub(super) fn late_token(ids: &[u32]) -> Option<u32> {
    let late = ids.len() * 2 / 3;
    let (before, after) = ids.split_at(late);
    after.iter().copied().rfind(|id| !before.contains(id))
}

/// Writes the texts of a script with drafts of a length, or of those that are chosen.
pub(super) type Write<'a> = dyn FnMut(&Script, Option<DraftLength>) -> Result<Run, String> + 'a;

impl Plain {
    /// Compares with the texts that `write` brings, for each of `lengths`. Each of `heads` has to draft.
    pub(super) fn compare(
        &self,
        (drafter, heads): (&str, &[&str]),
        lengths: &[Option<DraftLength>],
        write: &mut Write<'_>,
    ) -> Cell {
        let start = Instant::now();
        let mut cell = Cell {
            drafter: drafter.to_owned(),
            feature: self.feature.name,
            mode: self.mode.name(),
            result: Verdict::NotApplicable,
            engagement: Engagement::None,
            difference: None,
            reason: None,
            texts: 0,
            tokens: 0,
            drafted: 0,
            accepted: 0,
            by_drafter: Vec::new(),
            seconds: 0.0,
        };
        let prompts = match &self.prompts {
            Ok(prompts) => prompts,
            Err(unshown) => {
                cell.result = unshown.verdict;
                cell.reason = Some(unshown.reason.clone());
                return cell;
            }
        };
        let mut is_warm = true;
        for prompt in prompts {
            for &length in lengths {
                match write(&prompt.script, length) {
                    Ok(run) => {
                        is_warm &= run.cached > 0;
                        cell.add(prompt, length, &run);
                    }
                    Err(reason) => cell.reason = Some(reason),
                }
            }
        }
        cell.judge(self.feature.shape != Shape::Warm || is_warm, heads);
        cell.seconds = start.elapsed().as_secs_f64();
        cell
    }
}

impl Cell {
    /// Takes note of one run.
    fn add(&mut self, prompt: &Prompted, length: Option<DraftLength>, run: &Run) {
        self.drafted += run.drafted;
        self.accepted += run.accepted;
        DrafterCounts::add(&mut self.by_drafter, &run.by_drafter);
        self.texts += run.texts.len();
        self.tokens += run
            .texts
            .iter()
            .map(|text| text.tokens.len())
            .sum::<usize>();
        if self.difference.is_some() {
            return;
        }
        let pairs = run.texts.iter().zip(&prompt.texts).enumerate();
        let first = pairs.filter_map(|(i, (text, plain))| Some((i, text.differs_from(plain)?)));
        let first = first.min_by_key(|&(i, _)| i);
        // As many texts as without speculation, or something is missing.
        let missing = run.texts.len() != prompt.texts.len();
        let first = first.or(missing.then_some((run.texts.len(), 0)));
        self.difference = first.map(|(text, token)| Difference {
            prompt: prompt.kind,
            text,
            draft: match length {
                Some(length) => length.max().to_string(),
                None => "auto".into(),
            },
            token,
        });
    }

    /// Decides what has been shown, once everything has run.
    fn judge(&mut self, is_warm: bool, heads: &[&str]) {
        let has_drafted = |head: &str| self.by_drafter.iter().any(|of| of.drafter == head);
        let idle = heads.iter().find(|&&head| !has_drafted(head));

        self.engagement = match (self.drafted, self.accepted) {
            (0, _) => Engagement::None,
            (drafted, accepted) if accepted > 0 && accepted < drafted => Engagement::Engaged,
            _ => Engagement::Drafted,
        };
        self.result = if self.difference.is_some() {
            Verdict::Differs
        } else if self.reason.is_some() {
            Verdict::Failed
        } else if self.drafted == 0 {
            self.reason = Some("nothing was drafted".into());
            Verdict::NotEngaged
        } else if let Some(idle) = idle {
            self.reason = Some(format!("{idle} drafted nothing"));
            Verdict::NotEngaged
        } else if !is_warm {
            self.reason = Some("no token came from the prefix cache".into());
            Verdict::NotEngaged
        } else {
            Verdict::Equal
        };
    }

    /// Whether the cell proves nothing, or the opposite.
    pub(super) fn is_bad(&self) -> bool {
        !matches!(self.result, Verdict::Equal | Verdict::NotApplicable)
    }
}
