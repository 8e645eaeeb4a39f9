//! The lines of a trace.
//!
//! Each is a JSON object whose `type` says what it is. Readers skip types and fields that they do
//! not know; a change that such a reader would get wrong has another [`VERSION`].

use serde::{Deserialize, Serialize, Serializer};
use speculate::{StepRecord, StreamStep};
use std::time::Duration;

/// The name of the schema, in the header.
pub const SCHEMA: &str = "paceline-trace";
/// The version of the schema.
pub const VERSION: u64 = 1;

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum Line {
    /// The first line.
    Header(Header),
    /// A model that was loaded.
    Model(Model),
    /// What one round did.
    Round(Round),
    /// The last line.
    Summary(Summary),
}

/// What wrote the trace, and when.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Header {
    /// [`SCHEMA`].
    pub schema: String,
    /// [`VERSION`].
    pub version: u64,
    /// The version of paceline.
    pub paceline: String,
    /// Seconds from 1970 to the start of the trace, from which lines count their milliseconds.
    pub started: u64,
}

/// A model that rounds are of.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Model {
    /// What rounds call the model: 0 for the first one that was loaded, then 1, …
    pub model: usize,
    /// The model's name.
    pub name: String,
    /// The model family.
    pub family: String,
    /// The device.
    pub device: String,
    /// Format of the weights.
    pub weight_format: String,
    /// Format of keys and values.
    pub kv_format: String,
    /// Names of the drafters.
    pub drafters: Vec<String>,
    /// Tokens of the longest draft.
    pub draft_max: usize,
    /// The rule by which drafted tokens are accepted: `exact` or `residual`.
    pub accept: String,
    /// Tokens of a sequence.
    pub context: usize,
    /// Requests that run at once.
    pub sequences: usize,
}

/// What one round did: one step of the target, prefill included, and the drafting after it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Round {
    /// The number of the model.
    #[serde(default)]
    pub model: usize,
    /// Milliseconds from the start of the trace to the end of the round.
    #[serde(default, serialize_with = "short")]
    pub t_ms: f64,
    /// Whether a stream ran rows of its prompt, or rows again after a preemption. Such rounds are
    /// compared with no others.
    #[serde(default)]
    pub prefill: bool,
    /// Rows that the target ran.
    #[serde(default)]
    pub rows: usize,
    /// Experts of a mixture that the rows touched, each counted in every mixture of the model; absent where the
    /// model has none, and where the device does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<usize>,
    /// Experts that the length chooser expected; absent in prefill, and where no step had told.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "short_if_any"
    )]
    pub expected_experts: Option<f64>,
    /// The longest draft that a head was asked for after the rows, which `draft_ms` was spent on and the
    /// next round verifies.
    #[serde(default)]
    pub draft_asked: usize,
    /// The longest draft that n-grams were asked for after the rows.
    #[serde(default)]
    pub copy_asked: usize,
    /// Milliseconds of the target, choosing included.
    #[serde(serialize_with = "short")]
    pub verify_ms: f64,
    /// Milliseconds of the drafter.
    #[serde(serialize_with = "short")]
    pub draft_ms: f64,
    /// Milliseconds of turning what the rows have brought into text and sending it, where that goes on
    /// beside drafting.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "short_if_any"
    )]
    pub delivery_ms: Option<f64>,
    /// Milliseconds of these that were left when drafting had ended.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "short_if_any"
    )]
    pub delivery_wait_ms: Option<f64>,
    /// What each head did therein, in the order of the model's drafters; empty where there are fewer than two.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub heads: Vec<HeadRound>,
    /// Milliseconds that the length chooser expected of such a round; absent in prefill, and where
    /// it had nothing to go by.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "short_if_any"
    )]
    pub expected_ms: Option<f64>,
    /// Milliseconds of a round of the same streams without drafts, if that is known.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "short_if_any"
    )]
    pub plain_ms: Option<f64>,
    /// How `plain_ms` is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub plain: Option<Known>,
    /// What the round did for each request in it.
    pub streams: Vec<StreamRound>,
}

/// What one of several heads did after the rows of a round: it drafted, or read what others had written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct HeadRound {
    /// The longest draft that it was asked for.
    pub asked: usize,
    /// Milliseconds that it took.
    #[serde(serialize_with = "short")]
    pub ms: f64,
}

/// How a time is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Known {
    /// Rounds of this kind were timed, often enough to be believed.
    Measured,
    /// The time is derived from rounds of other kinds, or from the first of this one.
    Estimated,
    /// A way that is not known to this version.
    #[serde(other)]
    Otherwise,
}

/// What one round did for one request.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StreamRound {
    /// The number of the request; no other of the same model has it.
    pub request: u64,
    /// The number of the request's round, from 1; 0 for the prompt's last step, which writes the first
    /// token and is no round; absent where nothing was chosen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub round: Option<u64>,
    /// Whether the request ran rows of its prompt, or rows again after a preemption.
    #[serde(default)]
    pub prefill: bool,
    /// Rows of known tokens: those of the prompt, or the one of the pending token.
    #[serde(default)]
    pub known: usize,
    /// Tokens of prompt and text before the round.
    pub context: usize,
    /// Tokens that the request could still write before the round.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left: Option<usize>,
    /// Who guessed the draft's tokens; absent if there is none but forced ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub drafter: Option<String>,
    /// Tokens that the drafter was asked for, in the round before.
    #[serde(default)]
    pub asked: usize,
    /// The longest draft that could have been made, where no head guesses and less could be copied than
    /// there was room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<usize>,
    /// Tokens of the draft that was verified.
    pub drafted: usize,
    /// Tokens of the draft that a grammar left no choice about.
    #[serde(default)]
    pub forced: usize,
    /// Forced tokens that were accepted; absent if there are none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub forced_accepted: usize,
    /// Tokens of the draft that were guessed before the first forced one; absent if there is no forced one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guessed: Option<usize>,
    /// Tokens of the draft that were accepted, those behind the end of the text among them.
    pub accepted: usize,
    /// Tokens that were written, one that ends the text among them.
    pub emitted: usize,
    /// Tokens that the length chooser expected.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "short_if_any"
    )]
    pub expected_tokens: Option<f64>,
    /// Whether there was room for a draft after the round and none was asked for.
    #[serde(default)]
    pub held_back: bool,
    /// Milliseconds saved against plain decoding, estimated: what the tokens take in plain rounds, less
    /// what a round of this kind usually takes. This is what the record's `ms_saved` sums up.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "short_if_any"
    )]
    pub saved_ms_estimated: Option<f64>,
    /// Milliseconds saved against plain decoding, with the time that this round took; `plain` of the
    /// round says how that of plain rounds is known.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        serialize_with = "short_if_any"
    )]
    pub saved_ms_measured: Option<f64>,
}

/// What the trace has come to.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    /// Milliseconds from the start of the trace to its end.
    #[serde(serialize_with = "short")]
    pub t_ms: f64,
    /// Lines about rounds that were written.
    pub rounds: u64,
    /// Lines that were not written: the queue was full, or the file could not be written.
    pub lost: u64,
    /// Tokens written, over all requests.
    pub emitted: u64,
    /// Tokens drafted.
    pub drafted: u64,
    /// Draft tokens accepted.
    pub accepted: u64,
    /// Milliseconds of the target, over all rounds.
    #[serde(serialize_with = "short")]
    pub verify_ms: f64,
    /// Milliseconds of the drafter.
    #[serde(serialize_with = "short")]
    pub draft_ms: f64,
    /// Milliseconds that delivery beside drafting has saved.
    #[serde(serialize_with = "short")]
    pub overlap_saved_ms: f64,
}

impl Summary {
    /// Adds what a round did.
    pub fn add(&mut self, round: &Round) {
        self.rounds += 1;
        self.verify_ms += round.verify_ms;
        self.draft_ms += round.draft_ms;
        let (took, waited) = (round.delivery_ms, round.delivery_wait_ms);
        self.overlap_saved_ms += took.unwrap_or(0.0) - waited.unwrap_or(0.0);
        for stream in &round.streams {
            self.emitted += stream.emitted as u64;
            // The prompt's last step is no round, and verifies nothing.
            self.drafted += stream.drafted as u64;
            self.accepted += stream.accepted as u64;
        }
    }
}

/// How long a delivery beside drafting took.
#[derive(Clone, Copy, Debug)]
pub struct Delivery {
    /// All of it.
    pub took: Duration,
    /// The part after drafting.
    pub waited: Duration,
}

impl Round {
    /// The line of a round that has delivered beside drafting.
    #[must_use]
    pub fn with_delivery(self, delivery: Delivery) -> Self {
        Round {
            delivery_ms: Some(ms(delivery.took)),
            delivery_wait_ms: Some(ms(delivery.waited)),
            ..self
        }
    }

    /// The line of a step of the model number `model`, whose streams are of `requests`; it ended
    /// `t_ms` milliseconds after the start of the trace.
    pub fn new(model: usize, t_ms: f64, requests: &[u64], step: &StepRecord) -> Self {
        let (verify_ms, draft_ms) = (ms(step.verify), ms(step.draft));
        let expected = &step.expected;
        let measured = expected.is_plain_measured;
        let prefill = step.streams.iter().any(|stream| stream.is_prefill);
        let streams = step.streams.iter().enumerate();
        Round {
            model,
            t_ms,
            prefill,
            rows: step.rows,
            experts: step.experts,
            expected_experts: expected.experts,
            draft_asked: step.drafts.guessed(),
            copy_asked: step.drafts.copied,
            verify_ms,
            draft_ms,
            delivery_ms: None,
            delivery_wait_ms: None,
            heads: heads(step),
            expected_ms: expected.ms,
            plain_ms: expected.plain_ms,
            plain: expected.plain_ms.map(|_| match measured {
                true => Known::Measured,
                false => Known::Estimated,
            }),
            streams: streams
                .map(|(i, stream)| {
                    let plain = expected.plain_ms.map(|ms| ms * stream.emitted as f64);
                    StreamRound {
                        expected_tokens: (!prefill).then(|| expected.tokens[i]),
                        saved_ms_measured: plain.map(|plain| plain - verify_ms - draft_ms),
                        ..StreamRound::new(requests[i], stream)
                    }
                })
                .collect(),
        }
    }
}

/// What each head did in `step`, if there are several.
fn heads(step: &StepRecord) -> Vec<HeadRound> {
    let heads = step.by_head.iter().zip(step.drafts.by_head);
    let heads = heads.map_while(|(time, asked)| {
        let ms = time.as_ref()?.as_secs_f64() * 1e3;
        Some(HeadRound { asked, ms })
    });
    let all: Vec<HeadRound> = heads.collect();
    if all.len() < 2 { Vec::new() } else { all }
}

impl StreamRound {
    /// What a step did for a stream of the request number `request`.
    fn new(request: u64, stream: &StreamStep) -> Self {
        StreamRound {
            request,
            round: stream.round,
            prefill: stream.is_prefill,
            known: stream.known,
            context: stream.context,
            left: Some(stream.left),
            drafter: stream.drafter.map(str::to_owned),
            asked: stream.asked,
            found: stream.found,
            drafted: stream.drafted,
            forced: stream.forced,
            forced_accepted: stream.forced_accepted,
            guessed: (stream.forced > 0).then_some(stream.guessed),
            accepted: stream.accepted,
            emitted: stream.emitted,
            expected_tokens: None,
            held_back: stream.is_held_back,
            saved_ms_estimated: stream.saved_ms,
            saved_ms_measured: None,
        }
    }
}

/// Whether `n` is 0; serde hands a reference over.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn is_zero(n: &usize) -> bool {
    *n == 0
}

fn ms(d: Duration) -> f64 {
    d.as_secs_f64() * 1e3
}

/// A number with four digits after the point: a tenth of a microsecond.
#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde's signature")]
fn short<S: Serializer>(x: &f64, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_f64(shortened(*x))
}

#[allow(clippy::ref_option, reason = "serde's signature")]
fn short_if_any<S: Serializer>(x: &Option<f64>, to: S) -> Result<S::Ok, S::Error> {
    x.map(shortened).serialize(to)
}

/// `x` as a line has it.
fn shortened(x: f64) -> f64 {
    (x * 1e4).round() / 1e4
}

#[cfg(test)]
mod tests {
    use super::*;
    use speculate::Guesser;
    use speculate::length::{Expectation, HeadTimes, Longest};

    fn step() -> StepRecord {
        let stream = StreamStep {
            is_prefill: false,
            round: Some(7),
            known: 1,
            context: 120,
            left: 80,
            asked: 3,
            found: None,
            drafted: 3,
            forced: 1,
            forced_accepted: 0,
            guessed: 2,
            accepted: 2,
            emitted: 3,
            drafter: Some("mtp"),
            is_held_back: false,
            saved_ms: Some(12.5),
        };
        StepRecord {
            rows: 6,
            experts: Some(21),
            drafts: Longest::by(Guesser::HEAD, 2),
            verify: Duration::from_micros(14_000),
            draft: Duration::from_micros(1500),
            by_head: HeadTimes::default(),
            expected: Expectation {
                tokens: vec![2.75, 1.5],
                experts: Some(19.5),
                ms: Some(15.25),
                plain_ms: Some(10.0),
                is_plain_measured: true,
            },
            streams: vec![
                stream.clone(),
                StreamStep {
                    round: None,
                    drafter: None,
                    drafted: 0,
                    accepted: 0,
                    saved_ms: None,
                    ..stream
                },
            ],
        }
    }

    #[test]
    fn a_line_comes_back_as_it_was() {
        let round = Round::new(1, 250.5, &[4, 9], &step());
        assert_eq!(round.streams[0].saved_ms_measured, Some(30.0 - 15.5));
        assert_eq!(round.plain, Some(Known::Measured));
        assert_eq!(
            (round.experts, round.expected_experts),
            (Some(21), Some(19.5))
        );
        let mut summary = Summary::default();
        summary.add(&round);
        for line in [
            Line::Header(Header {
                schema: SCHEMA.into(),
                version: VERSION,
                paceline: "0.1.0".into(),
                started: 1_700_000_000,
            }),
            Line::Model(Model {
                model: 1,
                name: "tiny".into(),
                drafters: vec!["mtp".into()],
                ..Model::default()
            }),
            Line::Round(round),
            Line::Summary(summary),
        ] {
            let text = serde_json::to_string(&line).unwrap();
            assert_eq!(serde_json::from_str::<Line>(&text).unwrap(), line, "{text}");
        }
    }

    #[test]
    fn a_round_of_prompt_rows_promises_nothing() {
        let mut step = step();
        step.streams[1].is_prefill = true;
        (step.expected.ms, step.expected.plain_ms) = (None, None);
        (step.experts, step.expected.experts) = (None, None);
        let round = Round::new(0, 0.0, &[0, 1], &step);
        assert!(round.prefill && !round.streams[0].prefill);
        assert_eq!(
            (round.plain, round.streams[0].expected_tokens),
            (None, None)
        );
        let text = serde_json::to_string(&round).unwrap();
        assert!(!text.contains("experts"), "{text}");
    }

    #[test]
    fn numbers_are_short() {
        let round = Round {
            verify_ms: 1.0 / 3.0,
            ..Round::default()
        };
        let text = serde_json::to_string(&round).unwrap();
        assert!(text.contains("\"verify_ms\":0.3333,"), "{text}");
    }
}
