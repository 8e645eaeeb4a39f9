//! The sampling that a checkpoint recommends, and the ranges that a request may choose from.
//!
//! `generation_config.json` as a plain struct. An absent field and `null` recommend nothing;
//! a value that no sampler can use is an error, so that a damaged file does not silently
//! change how a model writes.
//!
//! The ranges are the same on the command line and in the API.

use std::ops::RangeInclusive;

use serde_json::Value;

use crate::error::{TextError, within};

/// The range of a request's temperature; 0 is greedy decoding.
pub const TEMPERATURE: RangeInclusive<f64> = 0.0..=2.0;
/// The range of a request's `top_p`, the probability mass to sample from; 0 keeps the most
/// likely token alone.
pub const TOP_P: RangeInclusive<f64> = 0.0..=1.0;
/// The range of a request's `min_p`, the least probability to sample from relative to the most
/// likely token's.
pub const MIN_P: RangeInclusive<f64> = 0.0..=1.0;
/// The range of a request's repetition penalty; 1 changes nothing.
pub const REPETITION_PENALTY: RangeInclusive<f64> = 0.01..=100.0;
/// The range of a request's presence penalty and frequency penalty; 0 changes nothing.
pub const PENALTY: RangeInclusive<f64> = -2.0..=2.0;
/// The range of what a request may add to the logit of one token.
pub const LOGIT_BIAS: RangeInclusive<f64> = -100.0..=100.0;

/// Checks that the sampling option `name` is within its `range`, one of those above.
///
/// # Errors
///
/// A message that names the option and the range.
pub fn check_range(name: &str, value: f32, range: RangeInclusive<f64>) -> Result<(), String> {
    // Compared as the sampler's numbers: 0.01 is a little less in 32 bits.
    let (low, high) = (*range.start(), *range.end());
    if (low as f32..=high as f32).contains(&value) {
        Ok(())
    } else {
        Err(format!(
            "{name} must be a number from {low} to {high}, got {value}"
        ))
    }
}

/// Most tokens that a checkpoint may suppress.
pub const SUPPRESSED_MAX: usize = 4096;

/// The file that recommends sampling.
const FILE: &str = "generation_config.json";

/// The sampling that a checkpoint recommends; `None` where its file has no field.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Whether to sample; `false` is greedy decoding, whatever the temperature.
    pub do_sample: Option<bool>,
    /// The temperature, in [`TEMPERATURE`]; 0 is greedy decoding.
    pub temperature: Option<f32>,
    /// The number of most likely tokens to sample from; 0 and −1 in the file mean all.
    pub top_k: Option<u32>,
    /// The probability mass to sample from, in (0, 1].
    pub top_p: Option<f32>,
    /// The least probability to sample from, relative to the most likely token's, in [0, 1].
    pub min_p: Option<f32>,
    /// The repetition penalty, greater than 0; 1 changes nothing.
    pub repetition_penalty: Option<f32>,
    /// Ids of tokens that are never chosen.
    pub suppress_tokens: Vec<u32>,
}

impl SamplingDefaults {
    /// Reads a parsed `generation_config.json`; `null` recommends nothing.
    ///
    /// # Errors
    ///
    /// [`TextError::BadField`] if a field is outside its range or has the wrong type;
    /// [`TextError::TooLarge`] for too many suppressed tokens.
    pub fn from_json(json: &Value) -> Result<Self, TextError> {
        Ok(Self {
            do_sample: match &json["do_sample"] {
                Value::Null => None,
                Value::Bool(flag) => Some(*flag),
                _ => return Err(bad("do_sample", "expected true or false")),
            },
            temperature: number(json, "temperature", "expected a number in [0, 2]", |x| {
                TEMPERATURE.contains(&f64::from(x))
            })?,
            top_k: match &json["top_k"] {
                Value::Null => None,
                value => match value.as_i64() {
                    Some(-1 | 0) => None,
                    Some(k) => {
                        Some(u32::try_from(k).map_err(|_| bad("top_k", "expected a count"))?)
                    }
                    None => return Err(bad("top_k", "expected a count")),
                },
            },
            top_p: number(json, "top_p", "expected a number in (0, 1]", |x| {
                x > 0.0 && x <= 1.0
            })?,
            min_p: number(json, "min_p", "expected a number in [0, 1]", |x| {
                (0.0..=1.0).contains(&x)
            })?,
            repetition_penalty: number(json, "repetition_penalty", "expected more than 0", |x| {
                x > 0.0
            })?,
            suppress_tokens: ids(&json["suppress_tokens"])?,
        })
    }

    /// The temperature of a request that asks for none: 0 if the file says not to sample, else
    /// the temperature of the file, else 1, the default of OpenAI's API.
    pub fn temperature(&self) -> f32 {
        match self.do_sample {
            Some(false) => 0.0,
            _ => self.temperature.unwrap_or(1.0),
        }
    }
}

/// The error for an unusable field.
fn bad(field: &'static str, reason: &'static str) -> TextError {
    TextError::BadField {
        file: FILE,
        field,
        reason,
    }
}

/// The number in a field, if there is one; an error with `reason` if it is not in range.
fn number(
    json: &Value,
    field: &'static str,
    reason: &'static str,
    is_in_range: impl Fn(f32) -> bool,
) -> Result<Option<f32>, TextError> {
    if json[field].is_null() {
        return Ok(None);
    }
    let x = json[field].as_f64().map(|x| x as f32);
    let x = x.filter(|x| x.is_finite() && is_in_range(*x));
    x.map(Some).ok_or(bad(field, reason))
}

/// A list of token ids, empty if there is none.
fn ids(list: &Value) -> Result<Vec<u32>, TextError> {
    const FIELD: &str = "suppress_tokens";
    if list.is_null() {
        return Ok(Vec::new());
    }
    let list = list.as_array().ok_or(bad(FIELD, "expected a list"))?;
    within("suppressed tokens", list.len(), SUPPRESSED_MAX)?;
    list.iter()
        .map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()))
        .collect::<Option<_>>()
        .ok_or(bad(FIELD, "expected token ids"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_file_is_read_and_silence_is_none() {
        assert_eq!(
            SamplingDefaults::from_json(&Value::Null).unwrap(),
            SamplingDefaults::default()
        );
        let json = json!({"do_sample": true, "temperature": 0.6, "top_k": 20, "top_p": 0.95,
            "min_p": 0, "repetition_penalty": 1.05, "suppress_tokens": [3, 4], "eos_token_id": 1});
        assert_eq!(
            SamplingDefaults::from_json(&json).unwrap(),
            SamplingDefaults {
                do_sample: Some(true),
                temperature: Some(0.6),
                top_k: Some(20),
                top_p: Some(0.95),
                min_p: Some(0.0),
                repetition_penalty: Some(1.05),
                suppress_tokens: vec![3, 4],
            }
        );
        assert_eq!(
            SamplingDefaults::from_json(&json!({"top_k": -1}))
                .unwrap()
                .top_k,
            None
        );
    }

    #[test]
    fn a_range_includes_its_ends_and_names_what_is_outside() {
        for value in [0.01, 1.0, 100.0] {
            assert_eq!(check_range("x", value, REPETITION_PENALTY), Ok(()));
        }
        for (value, range) in [
            (0.0, REPETITION_PENALTY),
            (2.001, TEMPERATURE),
            (f32::NAN, TOP_P),
            (f32::INFINITY, MIN_P),
            (-2.001, PENALTY),
        ] {
            assert!(check_range("x", value, range).is_err(), "{value}");
        }
        assert_eq!(
            check_range("temperature", 5.0, TEMPERATURE).unwrap_err(),
            "temperature must be a number from 0 to 2, got 5"
        );
    }

    #[test]
    fn a_temperature_counts_unless_the_file_does_not_sample() {
        for (json, temperature) in [
            (json!({}), 1.0),
            (json!({"temperature": 0.6}), 0.6),
            (json!({"do_sample": true, "temperature": 0.6}), 0.6),
            (json!({"do_sample": true, "top_k": 64}), 1.0),
            (json!({"do_sample": false, "temperature": 0.6}), 0.0),
        ] {
            let defaults = SamplingDefaults::from_json(&json).unwrap();
            assert_eq!(defaults.temperature(), temperature, "{json}");
        }
    }

    #[test]
    fn unusable_values_are_errors() {
        for json in [
            json!({"temperature": -1}),
            json!({"temperature": 2.5}),
            json!({"temperature": "hot"}),
            json!({"temperature": 1e300}),
            json!({"top_p": 0}),
            json!({"top_p": 1.1}),
            json!({"min_p": -0.1}),
            json!({"top_k": -2}),
            json!({"top_k": 1.5}),
            json!({"repetition_penalty": 0}),
            json!({"do_sample": 1}),
            json!({"suppress_tokens": [-1]}),
            json!({"suppress_tokens": 3}),
            json!({"suppress_tokens": vec![0; SUPPRESSED_MAX + 1]}),
        ] {
            assert!(SamplingDefaults::from_json(&json).is_err(), "{json}");
        }
    }
}
