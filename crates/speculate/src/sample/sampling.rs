//! The options of sampling: defaults, what each may be, and what they do to logits.
//!
//! An option that is one number is a field of [`Sampling`], an entry of [`NUMBERS`] and an
//! effect: on logits in [`Sampling::edited`], on which tokens stay in `key.rs`.

use super::history::{Count, History};
use backend::TokenChoice;
use backend::math::ln;

/// Tokens a request may bias, and tokens it may suppress.
pub const MAX_LISTED_TOKENS: usize = 16_384;

/// How tokens are chosen. The default is greedy with everything else off.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// How many of the likeliest tokens stay; 0 keeps all.
    pub top_k: usize,
    /// Probability mass that stays; 1 keeps all.
    pub top_p: f32,
    /// Least probability that stays, as a share of the likeliest token's; 0 keeps all,
    /// and so does a number too small to be normal.
    pub min_p: f32,
    /// Factor against tokens of prompt and output; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output; 0 changes nothing.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it is in the output; 0 changes nothing.
    pub frequency_penalty: f32,
    /// Tokens and what is added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that are never chosen.
    pub suppress: Vec<u32>,
    /// Key of the noise: the same seed gives the same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            suppress: Vec::new(),
            seed: 0,
        }
    }
}

/// An option that is one number, and what it must be for the sampler to compute with it.
struct Number {
    /// Name of the field.
    name: &'static str,
    get: fn(&Sampling) -> f32,
    /// What it may be, in words.
    allowed: &'static str,
    is_allowed: fn(f32) -> bool,
}

/// The options that are one number.
const NUMBERS: &[Number] = &[
    Number {
        name: "temperature",
        get: |s| s.temperature,
        // A smaller one has no finite reciprocal.
        allowed: "0 or at least 1.2e-38",
        is_allowed: |x| x == 0.0 || (x >= f32::MIN_POSITIVE && x.is_finite()),
    },
    Number {
        name: "top_p",
        get: |s| s.top_p,
        allowed: "above 0 and at most 1",
        is_allowed: |x| x > 0.0 && x <= 1.0,
    },
    Number {
        name: "min_p",
        get: |s| s.min_p,
        allowed: "at least 0 and at most 1",
        is_allowed: |x| (0.0..=1.0).contains(&x),
    },
    Number {
        name: "repetition_penalty",
        get: |s| s.repetition_penalty,
        allowed: "positive",
        is_allowed: |x| x > 0.0 && x.is_finite(),
    },
    Number {
        name: "presence_penalty",
        get: |s| s.presence_penalty,
        allowed: "finite",
        is_allowed: f32::is_finite,
    },
    Number {
        name: "frequency_penalty",
        get: |s| s.frequency_penalty,
        allowed: "finite",
        is_allowed: f32::is_finite,
    },
];

impl Sampling {
    /// Checks that the sampler can compute with these options, in a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    ///
    /// [`SamplingError`] for the first field that is not allowed.
    pub fn validate(&self, vocab: usize) -> Result<(), SamplingError> {
        for number in NUMBERS {
            check(
                number.name,
                number.allowed,
                (number.get)(self),
                number.is_allowed,
            )?;
        }
        for &(_, bias) in &self.logit_bias {
            check("logit_bias", "finite", bias, f32::is_finite)?;
        }
        let biased = self.logit_bias.iter().map(|&(token, _)| token).collect();
        for (name, tokens) in [("logit_bias", &biased), ("suppress", &self.suppress)] {
            let found = Vec::len(tokens);
            if found > MAX_LISTED_TOKENS {
                return Err(SamplingError::TooManyTokens { name, found });
            }
            if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab) {
                return Err(SamplingError::UnknownToken { name, token, vocab });
            }
        }
        Ok(())
    }

    /// Whether the token is the argmax of the logits as they are, which a device
    /// can tell without sending them.
    pub fn is_plain_greedy(&self) -> bool {
        self.temperature == 0.0 && !self.edits_logits()
    }

    /// The choice of the token after `position` others as a device can make it; none if
    /// it depends on more than the logits.
    pub fn on_device(&self, position: u64) -> Option<TokenChoice> {
        let scale = match self.temperature {
            0.0 => 0.0,
            temperature => 1.0 / temperature,
        };
        (!self.edits_logits()).then_some(TokenChoice {
            seed: self.seed,
            position,
            scale,
            top_p: self.top_p,
            ln_min_p: self.ln_min_p(),
            top_k: u32::try_from(self.top_k).unwrap_or(0),
        })
    }

    /// Whether any option changes logits before they are compared.
    pub(super) fn edits_logits(&self) -> bool {
        self.counts_tokens() || !self.logit_bias.is_empty() || !self.suppress.is_empty()
    }

    /// Whether a choice depends on which tokens came before.
    pub(super) fn counts_tokens(&self) -> bool {
        self.counts_prompt() || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    /// Whether a choice depends on the tokens of the prompt too.
    pub(super) fn counts_prompt(&self) -> bool {
        self.repetition_penalty != 1.0
    }

    /// Whether any option but noise rules out tokens of a row of `n` logits.
    pub(super) fn truncates(&self, n: usize) -> bool {
        (1..n).contains(&self.top_k) || self.top_p < 1.0 || self.min_p > 0.0
    }

    /// `1/T`; none if the largest logit, `top`, decides alone.
    pub(super) fn scale(&self, top: f32) -> Option<f32> {
        let scale = 1.0 / self.temperature;
        (self.temperature != 0.0 && (top * scale).is_finite()).then_some(scale)
    }

    /// `ln(min_p)`, -inf where min-p is off.
    pub(super) fn ln_min_p(&self) -> f32 {
        if self.min_p >= f32::MIN_POSITIVE {
            ln(self.min_p)
        } else {
            f32::NEG_INFINITY
        }
    }

    /// The logits after penalties, bias and suppression: in `buffer`, or as they are where no
    /// option changes any. `place(token)` is the index of the token's logit, if it has one.
    pub(super) fn edited<'a>(
        &self,
        history: &History,
        logits: &'a [f32],
        buffer: &'a mut Vec<f32>,
        place: impl Fn(u32) -> Option<usize>,
    ) -> &'a [f32] {
        if !self.edits_logits() {
            return logits;
        }
        buffer.clear();
        buffer.extend_from_slice(logits);
        // Each entry concerns its own token, so their order does not show.
        for (token, count) in history.counts() {
            if let Some(i) = place(token) {
                buffer[i] = self.penalized(buffer[i], count);
            }
        }
        for &(token, bias) in &self.logit_bias {
            if let Some(i) = place(token) {
                buffer[i] += bias;
            }
        }
        for &token in &self.suppress {
            if let Some(i) = place(token) {
                buffer[i] = f32::NEG_INFINITY;
            }
        }
        buffer
    }

    /// A token's logit after repetition, presence and frequency penalties.
    fn penalized(&self, logit: f32, count: Count) -> f32 {
        let mut l = logit;
        if count.in_prompt || count.n_output > 0 {
            l = if l > 0.0 {
                l / self.repetition_penalty
            } else {
                l * self.repetition_penalty
            };
        }
        if count.n_output > 0 {
            l -= self.presence_penalty + self.frequency_penalty * count.n_output as f32;
        }
        l
    }
}

/// Why sampling options are refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// A number is not allowed.
    #[error("{name} must be {allowed}, got {value}")]
    OutOfRange {
        /// The field.
        name: &'static str,
        /// What it may be.
        allowed: &'static str,
        /// What it is.
        value: f32,
    },
    /// A list is too long.
    #[error("{name} has {found} tokens, at most {MAX_LISTED_TOKENS} are allowed")]
    TooManyTokens {
        /// The field.
        name: &'static str,
        /// The number of tokens in the list.
        found: usize,
    },
    /// A list names a token that does not exist.
    #[error("{name} has token {token}, but the vocabulary ends at {vocab}")]
    UnknownToken {
        /// The field.
        name: &'static str,
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab: usize,
    },
}

/// Refuses the option `name` if its `value` is not allowed.
fn check(
    name: &'static str,
    allowed: &'static str,
    value: f32,
    is_allowed: impl Fn(f32) -> bool,
) -> Result<(), SamplingError> {
    if is_allowed(value) {
        Ok(())
    } else {
        Err(SamplingError::OutOfRange {
            name,
            allowed,
            value,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_read_from_the_fields_of_their_names() {
        let sampling = Sampling {
            temperature: 0.5,
            top_p: 0.25,
            min_p: 0.125,
            repetition_penalty: 1.5,
            presence_penalty: 2.5,
            frequency_penalty: 3.5,
            ..Sampling::default()
        };
        let fields = format!("{sampling:?}");
        for number in NUMBERS {
            let field = format!("{}: {:?}", number.name, (number.get)(&sampling));
            assert!(fields.contains(&field), "{field} in {fields}");
        }
    }

    #[test]
    fn plain_greedy_needs_nothing_but_an_argmax() {
        let greedy = Sampling::default();
        assert!(greedy.is_plain_greedy());
        assert!(
            Sampling {
                top_k: 4,
                seed: 3,
                ..greedy.clone()
            }
            .is_plain_greedy()
        );
        for other in [
            Sampling {
                temperature: 0.1,
                ..greedy.clone()
            },
            Sampling {
                repetition_penalty: 1.1,
                ..greedy.clone()
            },
            Sampling {
                presence_penalty: 0.1,
                ..greedy.clone()
            },
            Sampling {
                frequency_penalty: 0.1,
                ..greedy.clone()
            },
            Sampling {
                logit_bias: vec![(0, 1.0)],
                ..greedy.clone()
            },
            Sampling {
                suppress: vec![0],
                ..greedy
            },
        ] {
            assert!(!other.is_plain_greedy());
        }
    }

    #[test]
    fn what_is_out_of_range_is_refused_by_name() {
        let good = Sampling::default();
        let refused = |bad: Sampling| bad.validate(100).unwrap_err().to_string();
        assert_eq!(
            refused(Sampling {
                temperature: f32::NAN,
                ..good.clone()
            }),
            "temperature must be 0 or at least 1.2e-38, got NaN"
        );
        assert_eq!(
            refused(Sampling {
                top_p: 0.0,
                ..good.clone()
            }),
            "top_p must be above 0 and at most 1, got 0"
        );
        assert_eq!(
            refused(Sampling {
                logit_bias: vec![(1, f32::INFINITY)],
                ..good.clone()
            }),
            "logit_bias must be finite, got inf"
        );
        assert_eq!(
            refused(Sampling {
                suppress: vec![99, 100],
                ..good.clone()
            }),
            "suppress has token 100, but the vocabulary ends at 100"
        );
        assert_eq!(
            refused(Sampling {
                suppress: vec![0; MAX_LISTED_TOKENS + 1],
                ..good.clone()
            }),
            "suppress has 16385 tokens, at most 16384 are allowed"
        );
        for bad in [
            Sampling {
                temperature: -1.0,
                ..good.clone()
            },
            Sampling {
                temperature: f32::INFINITY,
                ..good.clone()
            },
            Sampling {
                temperature: 1e-40,
                ..good.clone()
            },
            Sampling {
                top_p: 1.1,
                ..good.clone()
            },
            Sampling {
                min_p: -0.1,
                ..good.clone()
            },
            Sampling {
                min_p: f32::NAN,
                ..good.clone()
            },
            Sampling {
                repetition_penalty: 0.0,
                ..good.clone()
            },
            Sampling {
                presence_penalty: f32::NAN,
                ..good.clone()
            },
            Sampling {
                frequency_penalty: f32::INFINITY,
                ..good.clone()
            },
            Sampling {
                logit_bias: vec![(100, 0.0)],
                ..good.clone()
            },
        ] {
            assert!(bad.validate(100).is_err(), "{bad:?}");
        }
    }
}
