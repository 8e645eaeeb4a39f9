//! The options of sampling, and which of them make sense.

use backend::TokenChoice;
use backend::math::ln;

/// Tokens a request may bias, and tokens it may suppress.
pub const MAX_LISTED_TOKENS: usize = 16_384;

/// How tokens are chosen. The default is greedy with everything else off.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Most likely tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Mass to keep; 1 keeps all.
    pub top_p: f32,
    /// Least probability to keep, as a share of the largest; 0 keeps all,
    /// and so does a number too small to be normal.
    pub min_p: f32,
    /// Factor against tokens of prompt and output; 1 is none.
    pub repetition_penalty: f32,
    /// Subtracted from tokens of the output; 0 is none.
    pub presence_penalty: f32,
    /// Subtracted for each time in the output; 0 is none.
    pub frequency_penalty: f32,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens never to choose.
    pub suppress: Vec<u32>,
    /// Key of the noise.
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

/// Why a request's sampling is refused.
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
        /// Its length.
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

impl Sampling {
    /// Checks what came from outside against a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    ///
    /// [`SamplingError`] for the first field that is not allowed.
    pub fn validate(&self, vocab: usize) -> Result<(), SamplingError> {
        let t = self.temperature;
        let numbers = [
            // A smaller one has no finite reciprocal.
            (
                "temperature",
                "0 or at least 1.2e-38",
                t,
                t == 0.0 || (t >= f32::MIN_POSITIVE && t.is_finite()),
            ),
            (
                "top_p",
                "above 0 and at most 1",
                self.top_p,
                self.top_p > 0.0 && self.top_p <= 1.0,
            ),
            (
                "min_p",
                "at least 0 and at most 1",
                self.min_p,
                (0.0..=1.0).contains(&self.min_p),
            ),
            (
                "repetition_penalty",
                "positive",
                self.repetition_penalty,
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
            ),
            (
                "presence_penalty",
                "finite",
                self.presence_penalty,
                self.presence_penalty.is_finite(),
            ),
            (
                "frequency_penalty",
                "finite",
                self.frequency_penalty,
                self.frequency_penalty.is_finite(),
            ),
        ];
        let biases = self.logit_bias.iter();
        let biases = biases.map(|&(_, bias)| ("logit_bias", "finite", bias, bias.is_finite()));
        for (name, allowed, value, is_allowed) in numbers.into_iter().chain(biases) {
            if !is_allowed {
                return Err(SamplingError::OutOfRange {
                    name,
                    allowed,
                    value,
                });
            }
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

    /// The choice of the token after `position` others as a device can make it, unless
    /// that depends on more than the logits.
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
            ln_min_p: ln_min_p(self),
            top_k: u32::try_from(self.top_k).unwrap_or(0),
        })
    }

    pub(super) fn edits_logits(&self) -> bool {
        self.counts_tokens() || !self.logit_bias.is_empty() || !self.suppress.is_empty()
    }

    pub(super) fn counts_tokens(&self) -> bool {
        self.counts_prompt() || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    pub(super) fn counts_prompt(&self) -> bool {
        self.repetition_penalty != 1.0
    }
}

pub(super) fn ln_min_p(sampling: &Sampling) -> f32 {
    if sampling.min_p >= f32::MIN_POSITIVE {
        ln(sampling.min_p)
    } else {
        f32::NEG_INFINITY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
