//! What is checked before a model is called ready.
//!
//! ```text
//! static   tensors of the head counted, norm convention read from values,
//!          pair compared, contents hashed              while loading
//! rows     a block of rows = the same rows one by one, bit for bit
//! chain    text with the drafter = text without it
//! guesses  share of first guesses accepted, against what a live drafter reaches
//! ```
//!
//! A head that loads and drafts may still be dead: halves swapped, scales dropped,
//! trained for another target. Its text is right and its guesses are worth nothing,
//! so only trying it tells. The trial takes a few dozen steps and is remembered
//! under the hashes of everything it depends on.

use crate::hashes::{read_json, sha256, write_json};
use models::Census;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use speculate::draft::NGRAM;
use speculate::{
    DraftLength, Finish, Guesser, RoundError, Sampling, Speculator, Stats, StreamOptions,
};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;
use text::Text;
use weights::NormFacts;

/// What the model is asked in the trial.
const PROMPTS: &[&str] = &[
    "Tell me a short story about a dog.",
    "Write down the numbers from one to twenty.",
    "What is the capital of France?",
];
/// Tokens written after each.
const TOKENS: usize = 20;
/// The longest draft of a reply: longer ones would say no more of a head, and take long.
const DRAFT: usize = 3;
/// Rows of a block: a pending token and the longest usual draft.
const BLOCK: usize = 8;
/// Prompt rows before the block.
const BLOCK_PROMPT: usize = 16;
/// First guesses needed for a verdict.
const GUESSES_MIN: u64 = 10;
/// Share of first guesses that a live drafter has accepted at least. Public
/// figures of working heads begin at 0.44; those of dead ones end at 0.11.
const EXPECTED: f64 = 0.3;
/// With a smaller share the drafter is dead, and is not used.
const DEAD: f64 = 0.1;
/// Changes when the trial does, so that old results do not count.
const VERSION: u32 = 2;
/// A result takes less than 1 KB.
const RESULT_BYTES_MAX: u64 = 64 << 10;
/// Results that are read to be shown.
const RESULTS_MAX: usize = 4096;
/// The folder of results in the cache folder.
const FOLDER: &str = "preflight";

/// Whether to try the model before it is ready.
#[derive(Clone, Debug)]
pub enum Probing {
    /// Try the model, and remember the result in this folder, if there is one.
    Run {
        /// The cache folder; made if needed.
        cache: Option<PathBuf>,
    },
    /// Do not try the model, for this reason, which is shown wherever the result would be.
    Skip {
        /// Why the model is not tried.
        reason: String,
    },
}

impl Default for Probing {
    fn default() -> Self {
        Probing::Run { cache: None }
    }
}

impl Probing {
    /// The folder that remembers.
    pub(crate) fn cache(&self) -> Option<&std::path::Path> {
        match self {
            Probing::Run { cache } => cache.as_deref(),
            Probing::Skip { .. } => None,
        }
    }
}

/// What is known of a model before it is called ready.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Preflight {
    /// Hash of the target's weights and configuration.
    pub target_sha256: Option<String>,
    /// Hash of the drafter's weights and configuration, where it is a checkpoint of its own.
    pub drafter_sha256: Option<String>,
    /// The head's tensors, counted.
    pub head: Option<Census>,
    /// What the offset norms hold, and the sign that tells.
    pub norms: Vec<Norms>,
    /// What came out of the trial, or why there was none.
    pub trial: Trial,
    /// What is known of each head beside the first, where there are several.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<HeadPreflight>,
    /// What looks wrong and does not keep the model from running.
    pub warnings: Vec<String>,
}

/// What is known of a head beside the first one.
#[derive(Clone, Debug, Serialize)]
pub struct HeadPreflight {
    /// The drafter's name.
    pub drafter: &'static str,
    /// Hash of its weights and configuration, where it is a checkpoint of its own.
    pub drafter_sha256: Option<String>,
    /// The head's tensors, counted.
    pub head: Option<Census>,
    /// What came out of its trial, or why there was none.
    pub trial: Trial,
}

/// What a part's offset norms hold.
#[derive(Clone, Debug, Serialize)]
pub struct Norms {
    /// `trunk` or `MTP head`.
    pub part: &'static str,
    /// `w` or `1 + w`.
    pub holds: &'static str,
    /// The sign that tells.
    pub sign: String,
}

/// The trial, or why there was none.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Trial {
    /// The trial was not run.
    Skipped {
        /// Why the trial was not run.
        skipped: String,
    },
    /// The trial was run, now or at an earlier start.
    Run {
        /// Whether it was run at an earlier start, and its result remembered.
        cached: bool,
        /// The result of the trial.
        #[serde(flatten)]
        result: TrialResult,
    },
}

impl Trial {
    /// The trial's result, if it was run.
    pub fn result(&self) -> Option<&TrialResult> {
        match self {
            Trial::Run { result, .. } => Some(result),
            Trial::Skipped { .. } => None,
        }
    }
}

impl std::fmt::Display for Trial {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Trial::Skipped { skipped } => write!(f, "not tried: {skipped}"),
            Trial::Run { result, cached } => {
                let when = if *cached {
                    " (remembered from an earlier start)"
                } else {
                    ""
                };
                write!(f, "{result}{when}")
            }
        }
    }
}

impl Default for Trial {
    fn default() -> Self {
        Trial::Skipped {
            skipped: "not run yet".into(),
        }
    }
}

/// What came out of a trial.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TrialResult {
    /// Whether a block of rows has the bits of its rows one by one; if not, where.
    pub rows: Finding,
    /// Whether the text is the same with and without the drafter; if not, where.
    pub chain: Finding,
    /// How the first guesses of the drafts did; absent where nobody drafts.
    pub guesses: Option<Guesses>,
}

/// The result of an earlier trial, and of what it was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PastTrial {
    /// When the trial was run, in UTC: the time of the file that remembers it.
    #[serde(default)]
    pub tried: String,
    /// The name of the model then.
    pub model: String,
    /// Hash of the target's weights and configuration.
    pub target_sha256: String,
    /// The name of the drafter; none if nothing was drafted.
    pub drafter: Option<String>,
    /// Hash of the drafter's weights and configuration, where it was a checkpoint of its own.
    pub drafter_sha256: Option<String>,
    /// The name of the device that ran it.
    pub backend: String,
    /// Format of keys and values.
    pub kv_format: String,
    /// The result of the trial.
    #[serde(flatten)]
    pub result: TrialResult,
}

/// What the folder `cache` of [`Probing::Run`] remembers of trials, the latest first.
pub fn past_trials(cache: &Path) -> Vec<PastTrial> {
    let files = std::fs::read_dir(cache.join(FOLDER)).into_iter().flatten();
    let trial = |path: PathBuf| {
        let trial: PastTrial = read_json(&path, RESULT_BYTES_MAX)?;
        let time = path.metadata().ok()?.modified().ok()?;
        let time = time.duration_since(UNIX_EPOCH).ok()?.as_secs();
        Some((time, trial))
    };
    let files = files.flatten().take(RESULTS_MAX);
    let mut trials: Vec<_> = files.filter_map(|file| trial(file.path())).collect();
    trials.sort_by(|(a, one), (b, other)| b.cmp(a).then_with(|| one.model.cmp(&other.model)));
    let tried = |time: u64| text::strftime("%Y-%m-%d %H:%M UTC", time as i64);
    trials
        .into_iter()
        .map(|(time, trial)| PastTrial {
            tried: tried(time),
            ..trial
        })
        .collect()
}

/// Whether two ways to compute agree.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Finding {
    /// Both computations agree bit for bit.
    Exact,
    /// The computations differ; the text says where.
    Differs(String),
}

impl Finding {
    fn of(difference: Option<String>) -> Finding {
        difference.map_or(Finding::Exact, Finding::Differs)
    }
}

/// First guesses of a drafter.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Guesses {
    /// Drafts verified.
    pub drafted: u64,
    /// Drafts whose first token was accepted.
    pub accepted: u64,
    /// Share that a live drafter has accepted, at least; absent for a drafter that
    /// depends on the text alone.
    pub expected: Option<f64>,
    /// Drafts that were cut short, since the drafter computed a value that is not a number.
    #[serde(default)]
    pub not_numbers: u64,
}

impl Guesses {
    /// Accepted of drafted.
    pub fn share(&self) -> f64 {
        self.accepted as f64 / self.drafted.max(1) as f64
    }

    fn below(&self, limit: f64) -> bool {
        self.expected.is_some() && self.drafted >= GUESSES_MIN && self.share() < limit
    }
}

impl std::fmt::Display for Guesses {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} of {} first guesses accepted",
            self.accepted, self.drafted
        )
    }
}

impl std::fmt::Display for TrialResult {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let finding = |finding: &Finding| match finding {
            Finding::Exact => "exact".to_owned(),
            Finding::Differs(at) => format!("NOT exact ({at})"),
        };
        let (rows, chain) = (finding(&self.rows), finding(&self.chain));
        write!(f, "rows {rows}, chain {chain}")?;
        let guesses = self.guesses.map(|guesses| write!(f, ", {guesses}"));
        guesses.unwrap_or(Ok(()))
    }
}

impl TrialResult {
    /// Why `drafter`, which `origin` describes, must not draft, if it must not.
    pub(crate) fn refusal(&self, drafter: &str, origin: &str) -> Option<String> {
        match (&self.rows, &self.chain) {
            (Finding::Differs(at), _) => Some(format!(
                "on this device rows computed together differ from the same rows one by one ({at}), \
                 so drafts could change the text"
            )),
            (_, Finding::Differs(at)) => Some(format!(
                "with the drafter `{drafter}` the text differs from the text without it ({at})"
            )),
            _ if self.guesses.is_some_and(|g| g.not_numbers > 0) => Some(format!(
                "{origin} loads, but computes values that are not numbers; its files may be damaged: \
                 fetch it again, or take the one that was made for this target"
            )),
            _ => self.guesses.filter(|g| g.below(DEAD)).map(|g| {
                format!(
                    "{origin} loads and drafts, but its guesses are not this target's: {g}, \
                     a live one reaches {:.0} %; take the one that was trained for this very target",
                    100.0 * EXPECTED
                )
            }),
        }
    }

    /// Whether rows or texts differ, so that nobody may draft.
    pub(crate) fn is_inexact(&self) -> bool {
        self.rows != Finding::Exact || self.chain != Finding::Exact
    }

    /// What looks wrong but not dead.
    pub(crate) fn warning(&self) -> Option<String> {
        let guesses = self
            .guesses
            .filter(|g| g.below(EXPECTED) && !g.below(DEAD))?;
        Some(format!(
            "the drafter is weaker than a live one should be: {guesses}, expected at least {:.0} %",
            100.0 * EXPECTED
        ))
    }
}

impl Preflight {
    /// The trial's result, if it was run.
    pub fn result(&self) -> Option<&TrialResult> {
        self.trial.result()
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        let others = self.others.iter();
        let others = others.map(|other| format!("; {}: {}", other.drafter, other.trial));
        format!("{}{}", self.trial, others.collect::<String>())
    }

    /// Takes over what the offset norms hold.
    pub(crate) fn note_norms(&mut self, facts: Vec<NormFacts>) {
        for fact in facts {
            if fact.may_be_folded_twice {
                self.warnings.push(format!(
                    "the norms of the {} may hold `2 + w`: {}, but hardly any value is below 1 and their mean is {:.2}; \
                     if its text makes no sense, convert the original again",
                    fact.part, fact.sign, fact.mean
                ));
            }
            // A contradiction is an error of whoever loads the part.
            if let Ok(holds) = fact.holds {
                self.norms.push(Norms {
                    part: fact.part,
                    holds,
                    sign: fact.sign,
                });
            }
        }
    }
}

/// All that the result of a trial depends on.
#[derive(Clone, Copy, Serialize)]
pub(crate) struct Key<'a> {
    /// Only said: the same files under another name give the same result.
    #[serde(skip)]
    pub(crate) model: &'a str,
    pub(crate) target: &'a str,
    pub(crate) drafter: Option<&'a str>,
    pub(crate) drafter_kind: Option<&'static str>,
    pub(crate) text: &'a str,
    pub(crate) backend: &'a str,
    pub(crate) kv_format: &'a str,
    pub(crate) chunk: usize,
    pub(crate) draft_max: usize,
    pub(crate) draft_vocab: Option<usize>,
    /// The hash of these entries, where a file of counts has chosen them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) draft_vocab_sha256: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) draft_window: Option<usize>,
}

impl Key<'_> {
    /// The file that holds the result.
    fn file_name(&self) -> String {
        let all = json!([VERSION, env!("CARGO_PKG_VERSION"), self]);
        format!("{}.json", sha256(all.to_string().as_bytes()))
    }

    /// The result as the file in the cache folder holds it.
    fn remember(&self, result: TrialResult) -> PastTrial {
        PastTrial {
            tried: String::new(),
            model: self.model.into(),
            target_sha256: self.target.into(),
            drafter: self.drafter_kind.map(Into::into),
            drafter_sha256: self.drafter.map(Into::into),
            backend: self.backend.into(),
            kv_format: self.kv_format.into(),
            result,
        }
    }
}

/// Runs the trial of the drafter of `key`, the head of this number if it is one, or finds its result.
///
/// # Errors
///
/// If the device fails, or the model computes values that are not numbers.
pub(crate) fn run(
    speculator: &mut Speculator,
    text: &Text,
    probing: &Probing,
    head: usize,
    key: &Key<'_>,
) -> Result<Trial, RoundError> {
    let folder = match probing {
        Probing::Skip { reason } => {
            return Ok(Trial::Skipped {
                skipped: reason.clone(),
            });
        }
        Probing::Run { cache } => cache.as_ref().map(|folder| folder.join(FOLDER)),
    };
    let file = folder.map(|folder| folder.join(key.file_name()));
    let known = file.as_deref().and_then(|f| read_json(f, RESULT_BYTES_MAX));
    if let Some(PastTrial { result, .. }) = known {
        return Ok(Trial::Run {
            cached: true,
            result,
        });
    }
    let prompts = match prompts(text, speculator.memory().size().context) {
        Ok(prompts) => prompts,
        Err(skipped) => return Ok(Trial::Skipped { skipped }),
    };
    let rows = rows(speculator, &prompts[0], key.chunk)?;
    let (chain, guesses) = drafts(speculator, text, &prompts, (head, key))?;
    let result = TrialResult {
        rows,
        chain,
        guesses,
    };
    if let Some(file) = &file {
        write_json(file, &key.remember(result.clone()));
    }
    Ok(Trial::Run {
        cached: false,
        result,
    })
}

/// The tokens of the prompts; why there are none, if so.
pub(crate) fn prompts(text: &Text, context: usize) -> Result<Vec<Vec<u32>>, String> {
    let encode = |prompt: &&str| match &text.template {
        None => text.encode_prompt(prompt),
        Some(_) => {
            let messages = json!([{"role": "user", "content": prompt}]);
            text.encode_chat(&messages, None, true, &Map::<String, Value>::new())
        }
    };
    let prompts: Result<Vec<Vec<u32>>, _> = PROMPTS.iter().map(encode).collect();
    let prompts = prompts.map_err(|e| format!("a prompt cannot be written: {e}"))?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    if prompts.iter().any(Vec::is_empty) {
        return Err("the tokenizer makes no token of a prompt".into());
    }
    if longest + TOKENS + BLOCK > context {
        return Err(format!("{context} tokens of context are too few for it"));
    }
    Ok(prompts)
}

/// A block of rows against its rows one by one.
fn rows(speculator: &mut Speculator, prompt: &[u32], chunk: usize) -> Result<Finding, RoundError> {
    let n = prompt.len().min(BLOCK_PROMPT).min(chunk);
    let block: Vec<u32> = prompt.iter().rev().copied().cycle().take(BLOCK).collect();
    let difference = speculator.probe_rows(&prompt[..n], &block)?;
    Ok(Finding::of(difference.map(|d| {
        format!(
            "row {}, token {}: {} together, {} alone",
            d.row, d.token, d.block, d.alone
        )
    })))
}

/// The text of each prompt with and without the drafter, and how its first guesses
/// did.
fn drafts(
    speculator: &mut Speculator,
    text: &Text,
    prompts: &[Vec<u32>],
    (head, key): (usize, &Key<'_>),
) -> Result<(Finding, Option<Guesses>), RoundError> {
    let Some(kind) = key.drafter_kind else {
        return Ok((Finding::Exact, None));
    };
    let mut finding = Finding::Exact;
    let mut guesses = Guesses {
        drafted: 0,
        accepted: 0,
        expected: (kind != NGRAM).then_some(EXPECTED),
        not_numbers: 0,
    };
    for prompt in prompts {
        let longest = key.draft_max.min(DRAFT);
        let (chain, _) = write(speculator, text, prompt, key.chunk, (head, 0))?;
        let (drafted, stats) = write(speculator, text, prompt, key.chunk, (head, longest))?;
        guesses.not_numbers += stats.drafts_cut;
        if let Some(first) = stats.by_position.first() {
            guesses.drafted += first.drafted;
            guesses.accepted += first.accepted;
        }
        if finding == Finding::Exact && chain != drafted {
            let at = chain
                .iter()
                .zip(&drafted)
                .take_while(|(a, b)| a == b)
                .count();
            finding = Finding::Differs(format!("token {at} of the reply"));
        }
    }
    Ok((finding, Some(guesses)))
}

/// The reply to `prompt` with drafts of at most `draft_max` tokens by `head`, if there is one, and what
/// speculation did.
fn write(
    speculator: &mut Speculator,
    text: &Text,
    prompt: &[u32],
    chunk: usize,
    (head, draft_max): (usize, usize),
) -> Result<(Vec<u32>, Stats), RoundError> {
    let options = StreamOptions {
        sampling: Sampling::default(),
        max_tokens: TOKENS,
        stop_tokens: Arc::from(text.stop_tokens.ids()),
        draft: DraftLength::Fixed(draft_max),
        logprobs: None,
    };
    let mut stream = speculator.open(prompt.to_vec(), options)?;
    stream.draft_by(Some(Guesser::Head(head)));
    let mut outcome = Ok(());
    while outcome.is_ok() && stream.finish().is_none() {
        outcome = speculator.round(&mut [&mut stream], chunk);
    }
    let finish = stream.finish();
    let written = (stream.output().to_vec(), stream.stats().clone());
    speculator.close(stream);
    if finish == Some(Finish::NoToken) {
        return Err(RoundError::NoToken);
    }
    outcome.map(|()| written)
}
