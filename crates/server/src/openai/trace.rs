//! The trace: which token of an answer came from where, round by round. Chat and plain
//! completions spell it alike, as `trace` of a choice.

use engine::{Channel, RoundEvent, TokenSource};
use serde::Serialize;
use serde_json::{Map, Value};

use crate::errors::ApiError;
use crate::generation::Piece;

/// Reads `trace` of the object `speculation`, and takes it out: what is left is read as in all
/// APIs.
///
/// # Errors
///
/// 400 if it is neither true nor false.
pub(super) fn take(object: &mut Map<String, Value>) -> Result<bool, ApiError> {
    let speculation = object.get_mut("speculation").and_then(Value::as_object_mut);
    match speculation.and_then(|speculation| speculation.remove("trace")) {
        None | Some(Value::Null) => Ok(false),
        Some(Value::Bool(is_on)) => Ok(is_on),
        Some(_) => Err(ApiError::field(
            "speculation.trace",
            "must be true or false",
        )),
    }
}

/// One round of an answer.
#[derive(Serialize)]
pub(super) struct Round<'a> {
    round: u64,
    drafted: usize,
    accepted: usize,
    #[serde(skip_serializing_if = "is_zero")]
    forced: usize,
    tokens: Vec<Token<'a>>,
}

/// One token of a round.
#[derive(Serialize)]
struct Token<'a> {
    text: &'a str,
    /// Absent for the answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    channel: Option<&'static str>,
    /// 0 for the target's own choice, from 1 for a token of the draft.
    position: usize,
    /// The drafter that guessed the token.
    #[serde(skip_serializing_if = "Option::is_none")]
    drafter: Option<&'static str>,
    /// Whether a grammar left no choice about the token.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    forced: bool,
}

/// Whether `n` is 0; serde hands a reference over.
fn is_zero(n: &usize) -> bool {
    *n == 0
}

/// The rounds of `piece`, whose guesses are those of `drafters`.
pub(super) fn rounds<'a>(piece: &'a Piece, drafters: &[&'static str]) -> Vec<Round<'a>> {
    let round = |round: &'a RoundEvent| Round {
        round: round.number,
        drafted: round.drafted,
        accepted: round.accepted,
        forced: round.forced,
        tokens: round
            .tokens
            .iter()
            .map(|token| Token {
                text: &token.text,
                channel: match token.channel {
                    Channel::Answer => None,
                    Channel::Reasoning => Some("reasoning"),
                    Channel::ToolCall => Some("tool_call"),
                },
                position: match token.source {
                    TokenSource::Target => 0,
                    TokenSource::Guess(i, _) | TokenSource::Forced(i) => i + 1,
                },
                drafter: match token.source {
                    TokenSource::Guess(_, guesser) => guesser.name(drafters),
                    TokenSource::Target | TokenSource::Forced(_) => None,
                },
                forced: matches!(token.source, TokenSource::Forced(_)),
            })
            .collect(),
    };
    piece.rounds.iter().map(round).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_switch_is_taken_out_of_the_object_it_stands_in() {
        for (speculation, want, rest) in [
            (
                json!({"trace": true, "draft_max": 2}),
                true,
                json!({"draft_max": 2}),
            ),
            (json!({"trace": false}), false, json!({})),
            (json!({"trace": null}), false, json!({})),
            (json!("auto"), false, json!("auto")),
        ] {
            let mut object = Map::from_iter([("speculation".to_owned(), speculation)]);
            assert_eq!(take(&mut object).ok(), Some(want));
            assert_eq!(object["speculation"], rest);
        }
        let mut odd = Map::from_iter([("speculation".to_owned(), json!({"trace": 1}))]);
        assert_eq!(
            take(&mut odd).unwrap_err().param.as_deref(),
            Some("speculation.trace")
        );
    }
}
