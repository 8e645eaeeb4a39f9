//! The end of a generation: stop strings in the text, stop tokens among the ids.
//!
//! The text ends before the first stop string that is complete. If several end at
//! the same character, the longest counts. Only characters decide, so the result does
//! not depend on how the text was divided into tokens, nor on how many tokens one
//! round of speculation accepted.

use serde_json::Value;

use crate::error::{TextError, within};
use crate::tokenizer::Tokenizer;

/// Most stop strings of one request.
pub const STOPS_MAX: usize = 16;
/// Most characters of one stop string.
pub const STOP_CHARS_MAX: usize = 256;
/// Most token ids that end a generation; real models have one to five.
pub const STOP_TOKENS_MAX: usize = 64;

/// Tokens that end a turn in some family of models, if the vocabulary marks them special.
///
/// Conversions often lose the right `eos_token_id`. Without these tokens such a model would
/// go on with the user's turn.
pub const TURN_ENDS: &[&str] = &[
    "<end_of_turn>",
    "<turn|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<eos>",
    "<|eot_id|>",
];

/// Finds one stop string (the algorithm of Knuth, Morris and Pratt).
#[derive(Clone, Debug)]
struct Matcher {
    /// The stop string.
    pattern: Box<[u8]>,
    /// `fallback[n]` is the length of the longest proper prefix of the pattern that ends
    /// its first `n + 1` bytes.
    fallback: Box<[u16]>,
    /// Bytes of the pattern that the text ends with.
    n_matched: usize,
}

impl Matcher {
    /// A matcher before any text.
    fn new(pattern: &str) -> Self {
        let pattern: Box<[u8]> = pattern.as_bytes().into();
        let mut fallback = vec![0_u16; pattern.len()];
        let mut n = 0;
        for i in 1..pattern.len() {
            while n > 0 && pattern[i] != pattern[n] {
                n = usize::from(fallback[n - 1]);
            }
            n += usize::from(pattern[i] == pattern[n]);
            fallback[i] = n as u16; // at most 256 characters of 4 bytes
        }
        Self {
            pattern,
            fallback: fallback.into(),
            n_matched: 0,
        }
    }

    /// Takes one byte of the text; returns whether the pattern is complete with it.
    fn step(&mut self, byte: u8) -> bool {
        while self.n_matched > 0 && self.pattern[self.n_matched] != byte {
            self.n_matched = usize::from(self.fallback[self.n_matched - 1]);
        }
        self.n_matched += usize::from(self.pattern[self.n_matched] == byte);
        self.n_matched == self.pattern.len()
    }
}

/// The part of a piece of text that may be sent, and whether a stop string ended it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopOutcome {
    /// Text that may be sent: it is certain that no part of it belongs to a stop string.
    pub emit: String,
    /// The stop string that ended the text, as an index into the request's list.
    pub hit: Option<usize>,
}

/// Looks for stop strings in a stream of text.
///
/// ```
/// let mut stops = text::StopStrings::new(&["\nUser:".to_owned()])?;
/// assert_eq!(stops.push("Hi.\nUs").emit, "Hi.");
/// let outcome = stops.push("er: me");
/// assert_eq!((outcome.emit.as_str(), outcome.hit), ("", Some(0)));
/// # Ok::<(), text::TextError>(())
/// ```
#[derive(Clone, Debug)]
pub struct StopStrings {
    matchers: Vec<Matcher>,
    /// Text that is held back because it may be the beginning of a stop string.
    held: String,
    /// The stop string that ended the text.
    hit: Option<usize>,
}

impl StopStrings {
    /// Prepares the stop strings of one request; the list may be empty.
    ///
    /// # Errors
    ///
    /// [`TextError::TooLarge`] for more than [`STOPS_MAX`] strings or one of more than
    /// [`STOP_CHARS_MAX`] characters; [`TextError::EmptyStop`] if one is empty.
    pub fn new(stops: &[String]) -> Result<Self, TextError> {
        within("stop strings", stops.len(), STOPS_MAX)?;
        for (index, stop) in stops.iter().enumerate() {
            if stop.is_empty() {
                return Err(TextError::EmptyStop { index });
            }
            within(
                "stop string characters",
                stop.chars().count(),
                STOP_CHARS_MAX,
            )?;
        }
        let matchers = stops.iter().map(|stop| Matcher::new(stop)).collect();
        Ok(Self {
            matchers,
            held: String::new(),
            hit: None,
        })
    }

    /// Takes the next piece of text. Nothing is sent after a stop string.
    pub fn push(&mut self, text: &str) -> StopOutcome {
        if self.hit.is_some() {
            return StopOutcome {
                emit: String::new(),
                hit: self.hit,
            };
        }
        if self.matchers.is_empty() {
            return StopOutcome {
                emit: text.to_owned(),
                hit: None,
            };
        }
        let start = self.held.len();
        let mut emit = std::mem::take(&mut self.held) + text;
        for (i, byte) in text.bytes().enumerate() {
            let mut hit: Option<usize> = None;
            for index in 0..self.matchers.len() {
                let len = self.matchers[index].pattern.len();
                if self.matchers[index].step(byte)
                    && hit.is_none_or(|best| len > self.matchers[best].pattern.len())
                {
                    hit = Some(index);
                }
            }
            if let Some(index) = hit {
                self.hit = hit;
                emit.truncate(start + i + 1 - self.matchers[index].pattern.len());
                return StopOutcome { emit, hit };
            }
        }
        // A stop string starts on a character, so this cuts between two.
        let n_held = self.matchers.iter().map(|m| m.n_matched).max().unwrap_or(0);
        self.held = emit.split_off(emit.len() - n_held);
        StopOutcome { emit, hit: None }
    }

    /// Ends a part of the text at `mark`, which may complete a stop string but is not sent
    /// itself. Text that was held back is sent unless it does, and no stop string begins in
    /// this part and ends in the next.
    pub fn pass(&mut self, mark: &str) -> StopOutcome {
        let n_held = self.held.len();
        let mut outcome = self.push(mark);
        if outcome.hit.is_none() {
            outcome.emit += &std::mem::take(&mut self.held);
            self.matchers.iter_mut().for_each(|m| m.n_matched = 0);
        }
        outcome.emit.truncate(n_held);
        outcome
    }

    /// Ends the text and returns what was held back.
    pub fn finish(self) -> String {
        self.held
    }

    /// The stop string that ended the text, as an index into the request's list.
    pub fn hit(&self) -> Option<usize> {
        self.hit
    }
}

/// The token ids that end a generation.
///
/// Such a token is neither sent nor counted. Collected once for a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopTokens {
    /// The ids, ascending, each once.
    ids: Vec<u32>,
}

impl StopTokens {
    /// Collects the `eos_token_id` of `config.json` (also under `text_config`) and of
    /// `generation_config.json`, the `eos_token` of `tokenizer_config.json`, and the
    /// [`TURN_ENDS`] that `tokenizer` has.
    ///
    /// # Errors
    ///
    /// If an `eos_token_id` is neither an id nor a list of at most [`STOP_TOKENS_MAX`] ids.
    pub fn new(
        config: &Value,
        generation_config: &Value,
        tokenizer_config: &Value,
        tokenizer: &Tokenizer,
    ) -> Result<Self, TextError> {
        let mut ids = Vec::new();
        for (file, json) in [
            ("config.json", config),
            ("config.json", &config["text_config"]),
            ("generation_config.json", generation_config),
        ] {
            collect(file, &json["eos_token_id"], &mut ids)?;
        }
        let eos = token_content(&tokenizer_config["eos_token"]);
        ids.extend(eos.and_then(|token| tokenizer.id_of(token)));
        ids.extend(
            TURN_ENDS
                .iter()
                .filter_map(|token| tokenizer.id_of(token))
                .filter(|&id| tokenizer.is_special(id)),
        );
        ids.sort_unstable();
        ids.dedup();
        Ok(Self { ids })
    }

    /// Whether `id` ends a generation.
    pub fn contains(&self, id: u32) -> bool {
        self.ids.binary_search(&id).is_ok()
    }

    /// The ids in ascending order.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }
}

/// The text of a special token in `tokenizer_config.json`, which is a string or an object with
/// its `content`.
pub(crate) fn token_content(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token["content"].as_str())
}

/// Adds the ids of an `eos_token_id` to `ids`.
fn collect(file: &'static str, eos: &Value, ids: &mut Vec<u32>) -> Result<(), TextError> {
    let reason = "expected a token id or a list of them";
    let list = match eos {
        Value::Null => return Ok(()),
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    within("stop tokens", list.len(), STOP_TOKENS_MAX)?;
    for id in list {
        let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
        ids.push(id.ok_or(TextError::BadField {
            file,
            field: "eos_token_id",
            reason,
        })?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::testing::{GEMMA, QWEN};

    /// The definition: the first character after which the text ends in a stop
    /// string, and the longest such string.
    fn naive(text: &str, stops: &[String]) -> (String, Option<usize>) {
        for end in (1..=text.len()).filter(|&end| text.is_char_boundary(end)) {
            let best = (0..stops.len())
                .filter(|&i| text[..end].ends_with(&stops[i]))
                .max_by_key(|&i| (stops[i].len(), std::cmp::Reverse(i)));
            if let Some(best) = best {
                return (text[..end - stops[best].len()].to_owned(), Some(best));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #[test]
        fn streamed_stops_equal_a_search_of_the_whole_text(
            pieces in vec("[abé👍]{0,4}", 0..12),
            stops in vec("[abé👍]{1,5}", 0..4),
        ) {
            let (expected, expected_hit) = naive(&pieces.concat(), &stops);
            let mut stream = StopStrings::new(&stops).unwrap();
            let mut text = String::new();
            for piece in &pieces {
                let outcome = stream.push(piece);
                text.push_str(&outcome.emit);
                prop_assert!(expected.starts_with(&text), "emitted too much: {:?}", text);
            }
            prop_assert_eq!(stream.hit(), expected_hit);
            if expected_hit.is_none() {
                text.push_str(&stream.finish());
            }
            prop_assert_eq!(text, expected);
        }

        #[test]
        fn no_more_is_held_than_the_beginning_of_a_stop(text in "[ab]{0,60}", stop in "[ab]{1,12}") {
            let stops = std::slice::from_ref(&stop);
            let mut stream = StopStrings::new(stops).unwrap();
            let outcome = stream.push(&text);
            prop_assert_eq!(outcome.hit, naive(&text, stops).1);
            if outcome.hit.is_none() {
                let held = &text[outcome.emit.len()..];
                prop_assert!(stop.starts_with(held));
                let longest = (0..stop.len()).rev().find(|&n| text.ends_with(&stop[..n])).unwrap();
                prop_assert_eq!(held.len(), longest);
            }
        }
    }

    /// Text made of beginnings of the stop string itself, where the matcher
    /// has to fall back the most.
    #[test]
    fn near_misses_are_found_and_held() {
        for bits in 0..1_u32 << 9 {
            let stop: String = (0..9)
                .map(|i| if bits >> i & 1 == 0 { 'a' } else { 'b' })
                .collect();
            for (first, second) in (0..9).flat_map(|i| (0..9).map(move |j| (i, j))) {
                let text = [&stop[..first], &stop[..second], &stop].concat();
                let stops = std::slice::from_ref(&stop);
                let outcome = StopStrings::new(stops).unwrap().push(&text);
                assert_eq!(
                    (outcome.emit, outcome.hit),
                    naive(&text, stops),
                    "{stop} in {text}"
                );
            }
        }
    }

    #[test]
    fn a_mark_may_be_a_stop_string_and_none_spans_it() {
        let of = |stop: &str| StopStrings::new(&[stop.to_owned()]).unwrap();
        for (stop, before, at, emit, hit) in [
            ("ab", "xa", "</m>", "a", None),
            ("</m>", "xa", "</m>", "", Some(0)),
            ("/m", "x<", "</m>", "", Some(0)),
            ("\n</m>", "x\n", "</m>", "", Some(0)),
            ("\n</m>\n", "x\n", "</m>", "\n", None),
        ] {
            let mut stops = of(stop);
            stops.push(before);
            let outcome = stops.pass(at);
            assert_eq!((outcome.emit.as_str(), outcome.hit), (emit, hit), "{stop}");
            let begun = if hit.is_none() {
                stop.chars().next_back()
            } else {
                None
            };
            let next = begun.map_or_else(|| "b".to_owned(), String::from);
            assert_eq!(stops.push(&next).hit, hit, "{stop}");
        }
    }

    #[test]
    fn nothing_follows_a_hit() {
        let mut stops = StopStrings::new(&["END".to_owned()]).unwrap();
        assert_eq!(
            stops.push("one END two"),
            StopOutcome {
                emit: "one ".into(),
                hit: Some(0)
            }
        );
        assert_eq!(
            stops.push("three"),
            StopOutcome {
                emit: String::new(),
                hit: Some(0)
            }
        );
        assert_eq!(stops.finish(), "");
    }

    #[test]
    fn the_limits_hold() {
        let of = |n: usize, text: &str| StopStrings::new(&vec![text.to_owned(); n]);
        assert!(of(STOPS_MAX, "x").is_ok());
        assert!(of(STOPS_MAX + 1, "x").is_err());
        assert!(of(1, &"👍".repeat(STOP_CHARS_MAX)).is_ok());
        assert!(of(1, &"👍".repeat(STOP_CHARS_MAX + 1)).is_err());
        assert!(matches!(of(2, ""), Err(TextError::EmptyStop { index: 0 })));
    }

    #[test]
    fn stop_tokens_come_from_every_file() {
        let null = Value::Null;
        let ids = |config: Value, generation: Value, tokenizer: Value| {
            StopTokens::new(&config, &generation, &tokenizer, &QWEN)
                .unwrap()
                .ids
        };
        assert_eq!(ids(json!({}), json!({}), json!({})), [8160, 8162]);
        assert_eq!(
            ids(json!({"eos_token_id": 7}), null.clone(), null.clone()),
            [7, 8160, 8162]
        );
        assert_eq!(
            ids(
                json!({"text_config": {"eos_token_id": [3, 1]}}),
                json!({"eos_token_id": [9]}),
                json!({"eos_token": {"content": "<|im_start|>"}}),
            ),
            [1, 3, 9, 8160, 8161, 8162]
        );
        let gemma = StopTokens::new(&null, &null, &null, &GEMMA).unwrap();
        assert_eq!(gemma.ids(), [1, 5]);
        assert!(gemma.contains(5) && !gemma.contains(4));
    }

    #[test]
    fn unusable_stop_tokens_are_errors() {
        let null = Value::Null;
        for eos in [
            json!("x"),
            json!(-1),
            json!([1.5]),
            json!({}),
            json!(1_u64 << 32),
            json!(vec![1; 65]),
        ] {
            assert!(StopTokens::new(&json!({"eos_token_id": eos}), &null, &null, &QWEN).is_err());
        }
    }
}
