//! The options of sampling: defaults, what each may be, and what they do to logits.
//!
//! An option that is one number is a field of [`Sampling`], an entry of [`NUMBERS`] and an
//! effect: on logits in `edits.rs`, on the temperature in [`Sampling::scale`], on which
//! tokens stay in `key.rs`.

use super::dry::Breakers;
use super::mirostat::Mirostat;
use crate::noise::xtc_coin;
use backend::TokenChoice;
use backend::math::{exp, ln};
use backend::moments::{Moments, Surprise};

/// Tokens a request may bias, and tokens it may suppress.
pub const MAX_LISTED_TOKENS: usize = 16_384;

/// How tokens are chosen. The default is greedy with everything else off.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// Divides the logits; 0 is greedy.
    pub temperature: f32,
    /// How far dynamic temperature goes from [`temperature`](Sampling::temperature), down where
    /// the model is sure and up where it is not; 0 is off. Greedy stays greedy.
    pub dynatemp_range: f32,
    /// Power of the entropy that dynamic temperature goes by; 1 is the entropy itself.
    pub dynatemp_exponent: f32,
    /// How many standard deviations below the largest logit tokens stay; 0 and less keeps all.
    pub top_n_sigma: f32,
    /// How many of the likeliest tokens stay; 0 keeps all.
    pub top_k: usize,
    /// Probability mass that stays, of the tokens whose surprise is closest to the mean
    /// (locally typical sampling); 1 keeps all.
    pub typical_p: f32,
    /// Probability mass that stays; 1 keeps all.
    pub top_p: f32,
    /// Least probability that stays, as a share of the likeliest token's; 0 keeps all,
    /// and so does a number too small to be normal.
    pub min_p: f32,
    /// How likely XTC ("exclude top choices") is to act on a token of output; 0 is off.
    pub xtc_probability: f32,
    /// Probability from which on XTC drops tokens, but for the least likely of them; above 0.5
    /// there is never more than one.
    pub xtc_threshold: f32,
    /// What decides which tokens stay instead of the seven options above, dynamic temperature among
    /// them, if it is on.
    pub mirostat: Mirostat,
    /// How surprising tokens are to be, in bits; matters with [`mirostat`](Sampling::mirostat) only.
    pub mirostat_tau: f32,
    /// How fast mirostat follows the text.
    pub mirostat_eta: f32,
    /// Factor against tokens of prompt and output; 1 changes nothing.
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens in the output; 0 changes nothing.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit for each time it is in the output; 0 changes nothing.
    pub frequency_penalty: f32,
    /// How many of the last tokens of prompt and output the three penalties look at; all if absent.
    pub repeat_last_n: Option<usize>,
    /// Subtracted from the logits of tokens that would go on with a repetition of
    /// [`dry_allowed_length`](Sampling::dry_allowed_length) tokens; 0 is off, and so is DRY.
    pub dry_multiplier: f32,
    /// Factor of that for each token that the repetition is longer; at least 1.
    pub dry_base: f32,
    /// Tokens that may be repeated before DRY acts on the next.
    pub dry_allowed_length: usize,
    /// How many of the last tokens DRY looks at, those of the prompt among them; all if absent.
    pub dry_penalty_last_n: Option<usize>,
    /// What no repetition reaches over.
    pub dry_breakers: Breakers,
    /// Tokens and what is added to their logits.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens that are never chosen.
    pub suppress: Vec<u32>,
    /// Tokens of output before any of [`end_tokens`](Sampling::end_tokens) is chosen.
    pub min_tokens: usize,
    /// Tokens that end a text.
    pub end_tokens: Vec<u32>,
    /// Key of the noise: the same seed gives the same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            dynatemp_range: 0.0,
            dynatemp_exponent: 1.0,
            top_n_sigma: 0.0,
            top_k: 0,
            typical_p: 1.0,
            top_p: 1.0,
            min_p: 0.0,
            xtc_probability: 0.0,
            xtc_threshold: 0.1,
            mirostat: Mirostat::Off,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_last_n: None,
            dry_multiplier: 0.0,
            dry_base: 1.75,
            dry_allowed_length: 2,
            dry_penalty_last_n: None,
            dry_breakers: Breakers::default(),
            logit_bias: Vec::new(),
            suppress: Vec::new(),
            min_tokens: 0,
            end_tokens: Vec::new(),
            seed: 0,
        }
    }
}

/// What a device can do about the choice of a token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum ByDevice {
    /// The device can make this choice.
    Choice(TokenChoice),
    /// The device can make a choice once the row's moments are known ([`Sampling::of_row`]).
    Moments,
    /// An option stands in the way that devices do not know.
    Nothing,
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
        name: "dynatemp_range",
        get: |s| s.dynatemp_range,
        allowed: "at least 0",
        is_allowed: |x| x >= 0.0 && x.is_finite(),
    },
    Number {
        name: "dynatemp_exponent",
        get: |s| s.dynatemp_exponent,
        allowed: "at least 0",
        is_allowed: |x| x >= 0.0 && x.is_finite(),
    },
    Number {
        name: "top_n_sigma",
        get: |s| s.top_n_sigma,
        allowed: "finite",
        is_allowed: f32::is_finite,
    },
    Number {
        name: "typical_p",
        get: |s| s.typical_p,
        allowed: "at least 0 and at most 1",
        is_allowed: |x| (0.0..=1.0).contains(&x),
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
        name: "xtc_probability",
        get: |s| s.xtc_probability,
        allowed: "at least 0 and at most 1",
        is_allowed: |x| (0.0..=1.0).contains(&x),
    },
    Number {
        name: "xtc_threshold",
        get: |s| s.xtc_threshold,
        allowed: "at least 0 and at most 1",
        is_allowed: |x| (0.0..=1.0).contains(&x),
    },
    Number {
        name: "mirostat_tau",
        get: |s| s.mirostat_tau,
        allowed: "at least 0 and at most 1000",
        is_allowed: |x| (0.0..=1000.0).contains(&x),
    },
    Number {
        name: "mirostat_eta",
        get: |s| s.mirostat_eta,
        allowed: "at least 0 and at most 1000",
        is_allowed: |x| (0.0..=1000.0).contains(&x),
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
    Number {
        name: "dry_multiplier",
        get: |s| s.dry_multiplier,
        allowed: "at least 0",
        is_allowed: |x| x >= 0.0 && x.is_finite(),
    },
    Number {
        name: "dry_base",
        get: |s| s.dry_base,
        allowed: "at least 1",
        is_allowed: |x| x >= 1.0 && x.is_finite(),
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
        let out_of_vocab = |&token: &u32| token as usize >= vocab;
        if let Some(token) = self.dry_breakers.sequences().flatten().find(out_of_vocab) {
            let name = "dry_breakers";
            return Err(SamplingError::UnknownToken { name, token, vocab });
        }
        for (name, tokens) in [
            ("logit_bias", &biased),
            ("suppress", &self.suppress),
            ("end_tokens", &self.end_tokens),
        ] {
            let found = Vec::len(tokens);
            if found > MAX_LISTED_TOKENS {
                return Err(SamplingError::TooManyTokens { name, found });
            }
            if let Some(token) = tokens.iter().copied().find(out_of_vocab) {
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
        let choice = self.of_edited(position);
        choice.filter(|_| !self.edits_logits())
    }

    /// The choice of the token after `position` others as a device can make it among logits that
    /// are edited already; none if an option stands in the way that devices do not know.
    pub(crate) fn of_edited(&self, position: u64) -> Option<TokenChoice> {
        match self.by_device(position) {
            ByDevice::Choice(choice) => Some(choice),
            ByDevice::Moments | ByDevice::Nothing => None,
        }
    }

    /// What a device can do about the choice of the token after `position` others, among logits that
    /// are edited already.
    pub(crate) fn by_device(&self, position: u64) -> ByDevice {
        if self.truncates_by_host(position) {
            ByDevice::Nothing
        } else if self.needs_moments() {
            ByDevice::Moments
        } else {
            ByDevice::Choice(self.plain_choice(position))
        }
    }

    /// The choice of the token after `position` others, in an edited row of these moments.
    pub(crate) fn of_row(&self, position: u64, moments: &Moments) -> TokenChoice {
        let (largest, deviation) = (moments.largest, &moments.deviation);
        let surprise = || (deviation.n() as usize, moments.surprise);
        let plain = self.plain_choice(position);
        match self.scale(largest, surprise) {
            None => TokenChoice {
                scale: 0.0,
                ..plain
            },
            Some(scale) => TokenChoice {
                scale,
                floor: self.sigma_cut(largest * scale, scale, || deviation.sigma()),
                ..plain
            },
        }
    }

    /// The choice of the token after `position` others by what a device knows of an option.
    fn plain_choice(&self, position: u64) -> TokenChoice {
        let scale = match self.temperature {
            0.0 => 0.0,
            temperature => 1.0 / temperature,
        };
        TokenChoice {
            seed: self.seed,
            position,
            scale,
            top_p: self.top_p,
            ln_min_p: self.ln_min_p(),
            top_k: u32::try_from(self.top_k).unwrap_or(0),
            floor: f32::MIN,
        }
    }

    /// Whether any option changes logits before they are compared.
    pub(crate) fn edits_logits(&self) -> bool {
        self.depends_on_text() || !self.logit_bias.is_empty() || !self.suppress.is_empty()
    }

    /// Whether a choice depends on which tokens came before, or on how many.
    pub(super) fn depends_on_text(&self) -> bool {
        self.counts_tokens() || self.penalizes_passages() || self.min_tokens > 0
    }

    /// Whether a choice depends on its row of logits alone: neither on the tokens before it nor on
    /// what was chosen of other rows.
    pub(crate) fn depends_on_row_alone(&self) -> bool {
        !self.depends_on_text() && (self.mirostat == Mirostat::Off || self.temperature == 0.0)
    }

    /// Whether a choice depends on how often tokens came before.
    pub(super) fn counts_tokens(&self) -> bool {
        let counts_output = self.presence_penalty != 0.0 || self.frequency_penalty != 0.0;
        self.counts_prompt() || counts_output && self.repeat_last_n != Some(0)
    }

    /// Whether a choice depends on the tokens of the prompt too.
    pub(super) fn counts_prompt(&self) -> bool {
        self.repetition_penalty != 1.0 && self.repeat_last_n != Some(0)
    }

    /// Whether a choice depends on the order of the tokens before, those of the prompt among them.
    pub(super) fn penalizes_passages(&self) -> bool {
        self.dry_multiplier != 0.0 && self.dry_penalty_last_n != Some(0)
    }

    /// Whether an option that devices do not know has a part in which tokens noise decides between
    /// after `position` others.
    fn truncates_by_host(&self, position: u64) -> bool {
        self.temperature != 0.0
            && (self.mirostat != Mirostat::Off
                || self.typical_p < 1.0
                || self.excludes_top(position))
    }

    /// Whether a choice depends on sums over a whole row, which a device tells of.
    fn needs_moments(&self) -> bool {
        self.temperature != 0.0 && (self.dynatemp_range > 0.0 || self.top_n_sigma > 0.0)
    }

    /// Whether any option but noise rules out tokens of a row of `n` logits.
    pub(super) fn truncates(&self, n: usize) -> bool {
        self.mirostat != Mirostat::Off
            || (1..n).contains(&self.top_k)
            || self.top_n_sigma > 0.0
            || self.typical_p < 1.0
            || self.top_p < 1.0
            || self.min_p > 0.0
            || self.xtc_probability > 0.0
    }

    /// `1/T`; none if the largest logit, `top`, decides alone. `surprise` tells how many logits
    /// are above -inf and how surprising they are as they are; dynamic temperature asks for it.
    pub(super) fn scale(
        &self,
        top: f32,
        surprise: impl FnOnce() -> (usize, Surprise),
    ) -> Option<f32> {
        if self.temperature == 0.0 || !top.is_finite() {
            return None;
        }
        let is_dynamic = self.dynatemp_range > 0.0 && self.mirostat == Mirostat::Off;
        let temperature = match is_dynamic {
            true => self.dynamic_temperature(surprise()),
            false => self.temperature,
        };
        let scale = 1.0 / temperature;
        (temperature >= f32::MIN_POSITIVE && (top * scale).is_finite()).then_some(scale)
    }

    /// The temperature by the entropy of `n` logits: the lowest where the model is sure, the
    /// highest where all are alike.
    fn dynamic_temperature(&self, (n, surprise): (usize, Surprise)) -> f32 {
        if n < 2 {
            return self.temperature;
        }
        let share = (surprise.entropy() / ln(n as f32)).clamp(0.0, 1.0);
        let power = match share >= f32::MIN_POSITIVE {
            true => exp(self.dynatemp_exponent * ln(share)),
            false if self.dynatemp_exponent == 0.0 => 1.0,
            false => 0.0,
        };
        let lowest = (self.temperature - self.dynatemp_range).max(0.0);
        let highest = self.temperature + self.dynatemp_range;
        lowest + (highest - lowest) * power
    }

    /// The least `z` that top-n-sigma keeps, `top` being the largest and `sigma` the standard
    /// deviation of the logits before scaling; never -inf.
    pub(super) fn sigma_cut(&self, top: f32, scale: f32, sigma: impl FnOnce() -> f64) -> f32 {
        if self.top_n_sigma <= 0.0 {
            return f32::MIN;
        }
        let distance = f64::from(self.top_n_sigma) * sigma() * f64::from(scale);
        ((f64::from(top) - distance) as f32).max(f32::MIN)
    }

    /// Whether XTC acts on the token after `position` others.
    pub(super) fn excludes_top(&self, position: u64) -> bool {
        self.xtc_probability > 0.0 && xtc_coin(self.seed, position) < self.xtc_probability
    }

    /// `ln(min_p)`, -inf where min-p is off.
    pub(super) fn ln_min_p(&self) -> f32 {
        if self.min_p >= f32::MIN_POSITIVE {
            ln(self.min_p)
        } else {
            f32::NEG_INFINITY
        }
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
        /// The values that are allowed.
        allowed: &'static str,
        /// The value that was given.
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
            dynatemp_range: 0.75,
            dynatemp_exponent: 1.25,
            top_n_sigma: 1.75,
            typical_p: 0.875,
            xtc_probability: 0.375,
            xtc_threshold: 0.0625,
            dry_multiplier: 4.5,
            dry_base: 5.5,
            mirostat_tau: 6.5,
            mirostat_eta: 0.03125,
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
                ..greedy.clone()
            },
            Sampling {
                dry_multiplier: 0.8,
                ..greedy.clone()
            },
            Sampling {
                min_tokens: 1,
                ..greedy
            },
        ] {
            assert!(!other.is_plain_greedy());
            assert_eq!(other.on_device(3).is_some(), other.temperature > 0.0);
        }
    }

    #[test]
    fn a_device_makes_no_choice_that_it_does_not_know() {
        let greedy = Sampling::default();
        let mut shaped = std::array::from_fn::<Sampling, 4, _>(|_| greedy.clone());
        shaped[0].dynatemp_range = 0.5;
        shaped[1].top_n_sigma = 1.0;
        shaped[2].typical_p = 0.9;
        shaped[3].mirostat = Mirostat::V2;
        for sampling in shaped {
            // Greedy choices are the argmax all the same.
            assert!(sampling.is_plain_greedy() && sampling.on_device(3).is_some());
            let sampled = Sampling {
                temperature: 1.0,
                ..sampling
            };
            assert_eq!(sampled.on_device(3), None, "{sampled:?}");
        }
        // XTC stands in the way where its coin has it act, and is nothing elsewhere.
        let excluding = Sampling {
            temperature: 1.0,
            xtc_probability: 0.5,
            ..greedy.clone()
        };
        let acts: Vec<bool> = (0..50).map(|at| excluding.excludes_top(at)).collect();
        assert!(acts.contains(&true) && acts.contains(&false));
        for (at, acts) in (0..).zip(acts) {
            assert_eq!(excluding.on_device(at).is_none(), acts);
        }
        let off = Sampling {
            temperature: 1.0,
            top_n_sigma: -1.0,
            dry_multiplier: 0.8,
            dry_penalty_last_n: Some(0),
            ..greedy
        };
        assert!(off.on_device(3).is_some());
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
            Sampling {
                dynatemp_range: -0.1,
                ..good.clone()
            },
            Sampling {
                dynatemp_exponent: f32::INFINITY,
                ..good.clone()
            },
            Sampling {
                top_n_sigma: f32::NAN,
                ..good.clone()
            },
            Sampling {
                typical_p: 1.5,
                ..good.clone()
            },
            Sampling {
                xtc_probability: -0.5,
                ..good.clone()
            },
            Sampling {
                xtc_threshold: 1.5,
                ..good.clone()
            },
            Sampling {
                dry_multiplier: -1.0,
                ..good.clone()
            },
            Sampling {
                dry_base: 0.5,
                ..good.clone()
            },
            Sampling {
                dry_breakers: Breakers::new([vec![1, 100]]),
                ..good.clone()
            },
            Sampling {
                end_tokens: vec![100],
                ..good.clone()
            },
        ] {
            assert!(bad.validate(100).is_err(), "{bad:?}");
        }
    }
}
