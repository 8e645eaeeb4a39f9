//! The numbers of the sampler that requests may set: one table for the checks, the API and the
//! command line.

use crate::request::Rejected;
use speculate::Sampling;
use std::ops::RangeInclusive;
use text::SamplingDefaults;
use text::sampling::{
    LOGIT_BIAS, MIN_P, PENALTY, REPETITION_PENALTY, TEMPERATURE, TOP_P, check_range,
};

/// A number of the sampler.
#[derive(Debug)]
pub struct SamplerNumber {
    /// The option's name in requests; with hyphens it is a flag's.
    pub name: &'static str,
    /// Values that it may have.
    pub range: RangeInclusive<f64>,
    /// The range and its special values, in one line of Markdown.
    pub about: &'static str,
    /// Reads the number.
    pub get: fn(&Sampling) -> f32,
    /// Sets the number.
    pub set: fn(&mut Sampling, f32),
    /// What a checkpoint recommends where a request is silent; the sampler's own default if that
    /// is nothing.
    pub advised: fn(&SamplingDefaults) -> Option<f32>,
}

/// Every number of the sampler.
pub const SAMPLER_NUMBERS: &[SamplerNumber] = &[
    SamplerNumber {
        name: "temperature",
        range: TEMPERATURE,
        about: "0 to 2; 0 takes the likeliest token",
        get: |s| s.temperature,
        set: |s, x| s.temperature = x,
        advised: |advice| Some(advice.temperature()),
    },
    SamplerNumber {
        name: "top_p",
        range: TOP_P,
        about: "0 to 1; 0 keeps the likeliest token only",
        get: |s| s.top_p,
        set: |s, x| s.top_p = x,
        advised: |advice| advice.top_p,
    },
    SamplerNumber {
        name: "min_p",
        range: MIN_P,
        about: "0 to 1",
        get: |s| s.min_p,
        set: |s, x| s.min_p = x,
        advised: |advice| advice.min_p,
    },
    SamplerNumber {
        name: "typical_p",
        range: 0.0..=1.0,
        about: "0 to 1; 1 keeps all tokens",
        get: |s| s.typical_p,
        set: |s, x| s.typical_p = x,
        advised: |_| None,
    },
    SamplerNumber {
        name: "top_n_sigma",
        range: -1.0..=100.0,
        about: "-1 to 100; 0 and less keeps all tokens",
        get: |s| s.top_n_sigma,
        set: |s, x| s.top_n_sigma = x,
        advised: |_| None,
    },
    SamplerNumber {
        name: "xtc_probability",
        range: 0.0..=1.0,
        about: "0 to 1; 0 is off",
        get: |s| s.xtc_probability,
        set: |s, x| s.xtc_probability = x,
        advised: |_| None,
    },
    SamplerNumber {
        name: "xtc_threshold",
        range: 0.0..=1.0,
        about: "0 to 1, 0.1 by default; matters with `xtc_probability` only",
        get: |s| s.xtc_threshold,
        set: |s, x| s.xtc_threshold = x,
        advised: |_| None,
    },
    SamplerNumber {
        name: "dynatemp_range",
        range: 0.0..=2.0,
        about: "0 to 2: the temperature is that much less where the model is sure, and more where it is not; 0 is off",
        get: |s| s.dynatemp_range,
        set: |s, x| s.dynatemp_range = x,
        advised: |_| None,
    },
    SamplerNumber {
        name: "dynatemp_exponent",
        range: 0.0..=100.0,
        about: "0 to 100, 1 by default; matters with dynamic temperature only",
        get: |s| s.dynatemp_exponent,
        set: |s, x| s.dynatemp_exponent = x,
        advised: |_| None,
    },
    SamplerNumber {
        name: "repetition_penalty",
        range: REPETITION_PENALTY,
        about: "0.01 to 100; 1 is none",
        get: |s| s.repetition_penalty,
        set: |s, x| s.repetition_penalty = x,
        advised: |advice| advice.repetition_penalty,
    },
    SamplerNumber {
        name: "presence_penalty",
        range: PENALTY,
        about: "-2 to 2",
        get: |s| s.presence_penalty,
        set: |s, x| s.presence_penalty = x,
        advised: |_| None,
    },
    SamplerNumber {
        name: "frequency_penalty",
        range: PENALTY,
        about: "-2 to 2",
        get: |s| s.frequency_penalty,
        set: |s, x| s.frequency_penalty = x,
        advised: |_| None,
    },
    SamplerNumber {
        name: "dry_multiplier",
        range: 0.0..=100.0,
        about: "0 to 100; 0 is off, and so is DRY",
        get: |s| s.dry_multiplier,
        set: |s, x| s.dry_multiplier = x,
        advised: |_| None,
    },
    SamplerNumber {
        name: "dry_base",
        range: 1.0..=100.0,
        about: "1 to 100, 1.75 by default; matters with `dry_multiplier` only",
        get: |s| s.dry_base,
        set: |s, x| s.dry_base = x,
        advised: |_| None,
    },
];

/// Checks the sampling options of a request against the ranges that hold for the command
/// line and the API alike.
pub(crate) fn check_ranges(sampling: &Sampling) -> Result<(), Rejected> {
    let numbers = SAMPLER_NUMBERS.iter();
    let numbers = numbers.map(|n| (n.name, (n.get)(sampling), n.range.clone()));
    let biases = sampling.logit_bias.iter();
    let biases = biases.map(|&(_, bias)| ("logit_bias", bias, LOGIT_BIAS));
    numbers
        .chain(biases)
        .try_for_each(|(name, value, range)| check_range(name, value, range))
        .map_err(Rejected::BadParameter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_read_where_it_is_set() {
        for number in SAMPLER_NUMBERS {
            let mut sampling = Sampling::default();
            (number.set)(&mut sampling, 0.75);
            assert_eq!((number.get)(&sampling), 0.75, "{}", number.name);
            let others = SAMPLER_NUMBERS.iter().filter(|n| n.name != number.name);
            let none = Sampling::default();
            for other in others {
                assert_eq!((other.get)(&sampling), (other.get)(&none), "{}", other.name);
            }
        }
    }

    #[test]
    fn sampling_options_outside_their_range_are_named() {
        let bad = |change: fn(&mut Sampling)| {
            let mut sampling = Sampling::default();
            change(&mut sampling);
            check_ranges(&sampling).unwrap_err().to_string()
        };
        for (message, range) in [
            (
                bad(|s| s.temperature = 5.0),
                "temperature must be a number from 0 to 2, got 5",
            ),
            (bad(|s| s.temperature = f32::NAN), "temperature must be"),
            (
                bad(|s| s.top_p = -0.1),
                "top_p must be a number from 0 to 1",
            ),
            (bad(|s| s.min_p = 1.5), "min_p must be"),
            (
                bad(|s| s.repetition_penalty = 0.0),
                "repetition_penalty must be",
            ),
            (
                bad(|s| s.presence_penalty = 3.0),
                "presence_penalty must be",
            ),
            (
                bad(|s| s.frequency_penalty = -3.0),
                "frequency_penalty must be",
            ),
            (bad(|s| s.typical_p = -0.5), "typical_p must be"),
            (bad(|s| s.top_n_sigma = f32::NAN), "top_n_sigma must be"),
            (bad(|s| s.xtc_probability = 1.5), "xtc_probability must be"),
            (bad(|s| s.xtc_threshold = -0.5), "xtc_threshold must be"),
            (bad(|s| s.dynatemp_range = 3.0), "dynatemp_range must be"),
            (
                bad(|s| s.dynatemp_exponent = -1.0),
                "dynatemp_exponent must be",
            ),
            (bad(|s| s.dry_multiplier = -1.0), "dry_multiplier must be"),
            (
                bad(|s| s.dry_base = 0.5),
                "dry_base must be a number from 1 to 100, got 0.5",
            ),
            (
                bad(|s| s.logit_bias = vec![(1, 101.0)]),
                "logit_bias must be",
            ),
        ] {
            assert!(message.starts_with(range), "{message}");
        }
        let edges = Sampling {
            temperature: 2.0,
            top_p: 0.0,
            min_p: 1.0,
            repetition_penalty: 0.01,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            logit_bias: vec![(1, -100.0)],
            ..Sampling::default()
        };
        assert_eq!(check_ranges(&edges), Ok(()));
    }
}
