//! Rotary frequencies beyond the positions that a model was trained at.
//!
//! ```text
//! default   f_j
//! linear    f_j / s
//! llama3    f_j / s where a turn takes longer than c / low positions, f_j where it takes less than c / high,
//!           between them a mixture that is linear in c f_j / 2π
//! yarn      f_j / s where a pair turns less than `slow` times in c positions, f_j where more than `fast` times,
//!           between them a mixture that is linear in j; and queries and keys are a little longer: times
//!           0.1 ln s + 1, or as the file says
//! ```
//!
//! `f_j = theta^(-2j/dim)`, `s` the factor, `c` the positions of the training. Yarn is arXiv:2309.00071.
//!
//! Deliberately absent: kinds whose frequencies depend on how long a text is (`dynamic`, `longrope`). Rows that are
//! remembered could not be used once it has grown.

use crate::layers::frequencies;
use crate::{ModelError, require};
use serde::Deserialize;
use std::f64::consts::TAU;

/// The most positions that a factor can lead to: `f32` has every whole number up to here.
const POSITIONS_MAX: usize = 1 << 24;

/// How frequencies follow from those of the training, as `rope_parameters` or `rope_scaling` of a `config.json` say.
#[derive(Clone, Debug, Default, Deserialize)]
pub(crate) struct RopeScaling {
    rope_type: Option<String>,
    /// The older name of `rope_type`.
    #[serde(rename = "type")]
    kind: Option<String>,
    factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
}

/// Frequencies of a model, and what its queries and keys are multiplied with where they turn.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Scaled {
    pub(crate) frequencies: Vec<f32>,
    pub(crate) length: f32,
}

impl RopeScaling {
    fn kind(&self) -> &str {
        let kind = self.rope_type.as_deref().or(self.kind.as_deref());
        kind.unwrap_or("default")
    }

    /// Whether positions are those of the training.
    pub(crate) fn is_default(&self) -> bool {
        self.kind() == "default"
    }

    /// Positions for which a model of `known` positions was made.
    pub(crate) fn positions(&self, known: usize) -> usize {
        let trained = self.original_max_position_embeddings;
        let stretched = trained.zip(self.factor).map(|(c, s)| (c * s) as usize);
        match self.kind() {
            "yarn" => stretched.map_or(known, |n| n.min(POSITIONS_MAX).max(known)),
            _ => known,
        }
    }

    /// The frequencies of a rotation of `dim` columns, in a model of `known` positions.
    pub(crate) fn apply(&self, theta: f64, dim: usize, known: usize) -> Result<Scaled, ModelError> {
        let plain = Scaled {
            frequencies: frequencies(theta, dim, dim / 2),
            length: 1.0,
        };
        let kind = self.kind();
        if self.is_default() || dim == 0 {
            return Ok(plain);
        }
        let factor = self.factor.unwrap_or(1.0);
        require(factor.is_finite() && factor >= 1.0, || {
            format!("a rope scaling factor of {factor}, which is less than 1")
        })?;
        let trained = self.original_max_position_embeddings;
        let trained = trained.unwrap_or(known as f64);
        require(trained.is_finite() && trained >= 1.0, || {
            format!("rope scaling of {trained} positions")
        })?;
        let pairs = || (0..dim / 2).map(|j| (j as f64, theta.powf(-2.0 * j as f64 / dim as f64)));
        let mixed = |share: &dyn Fn(f64, f64) -> f64| -> Vec<f32> {
            let mix = |(j, f): (f64, f64)| {
                let kept = share(j, f).clamp(0.0, 1.0);
                (f / factor * (1.0 - kept) + f * kept) as f32
            };
            pairs().map(mix).collect()
        };
        let scaled = match kind {
            "linear" => Scaled {
                frequencies: mixed(&|_, _| 0.0),
                ..plain
            },
            "llama3" => {
                let low = self.low_freq_factor.unwrap_or(1.0);
                let high = self.high_freq_factor.unwrap_or(4.0);
                require(high > low, || {
                    format!("low_freq_factor {low}, which is no less than high_freq_factor {high}")
                })?;
                let share = |_, f: f64| (trained * f / TAU - low) / (high - low);
                Scaled {
                    frequencies: mixed(&share),
                    ..plain
                }
            }
            "yarn" => {
                // The pair that turns so many times in all positions of the training.
                let pair =
                    |turns: f64| dim as f64 * (trained / (turns * TAU)).ln() / (2.0 * theta.ln());
                let first = pair(self.beta_fast.unwrap_or(32.0)).floor().max(0.0);
                let last = pair(self.beta_slow.unwrap_or(1.0)).ceil();
                let last = last.min(dim as f64 - 1.0);
                let width = if last == first { 1e-3 } else { last - first };
                let length = self.attention_factor;
                Scaled {
                    frequencies: mixed(&|j, _| 1.0 - (j - first) / width),
                    length: length.unwrap_or(0.1 * factor.ln() + 1.0) as f32,
                }
            }
            other => {
                return Err(ModelError::Unsupported {
                    feature: format!(
                        "rope_type `{other}` (known are default, linear, llama3 and yarn)"
                    ),
                });
            }
        };
        require(scaled.frequencies.iter().all(|f| f.is_finite()), || {
            format!("frequencies that are no numbers, by rope scaling `{kind}` and theta {theta}")
        })?;
        Ok(scaled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn apply(config: Value) -> Result<Scaled, ModelError> {
        let scaling: RopeScaling = serde_json::from_value(config).unwrap();
        scaling.apply(1e6, 64, 32_768)
    }

    fn of(config: Value) -> Scaled {
        apply(config).unwrap()
    }

    #[test]
    fn frequencies_are_the_nearest_floats() {
        for (theta, dim) in [(1e4, 256), (1e6, 128), (1e7, 64)] {
            for (j, f) in frequencies(theta, dim, dim / 2).into_iter().enumerate() {
                let exact = (-2.0 * j as f64 / dim as f64 * f64::ln(theta)).exp();
                let error = (f64::from(f) - exact).abs() / exact;
                // Half a unit in the last place.
                assert!(error <= 0.5f64.powi(24) * 1.001, "{theta} {j}: {error}");
            }
        }
    }

    #[test]
    fn without_a_kind_nothing_changes() {
        let plain = frequencies(1e6, 64, 32);
        for config in [json!({}), json!({"rope_type": "default", "factor": 8.0})] {
            let scaled = of(config);
            assert_eq!(scaled.frequencies, plain);
            assert_eq!(scaled.length, 1.0);
        }
    }

    #[test]
    fn linear_turns_all_pairs_more_slowly() {
        let plain = frequencies(1e6, 64, 32);
        let scaled = of(json!({"type": "linear", "factor": 4.0}));
        assert_eq!(scaled.length, 1.0);
        for (f, plain) in scaled.frequencies.iter().zip(plain) {
            assert_eq!(*f, plain / 4.0);
        }
    }

    #[test]
    fn llama3_keeps_fast_pairs_and_slows_the_others() {
        let plain = frequencies(1e6, 64, 32);
        let scaled = of(json!({
            "rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        }));
        for (f, plain) in scaled.frequencies.iter().zip(plain) {
            let turns = 8192.0 * f64::from(plain) / TAU;
            let (f, plain) = (f64::from(*f), f64::from(plain));
            let want = match turns {
                n if n >= 4.0 => plain,
                n if n <= 1.0 => plain / 8.0,
                n => plain / 8.0 + (n - 1.0) / 3.0 * (plain - plain / 8.0),
            };
            assert!((f / want - 1.0).abs() < 1e-6, "{turns}: {f} {want}");
        }
    }

    /// Computed apart, with the formulas of the paper: bounds of the ramp are pairs 8.6 → 8 and 16.6 → 17.
    #[test]
    fn yarn_mixes_by_pair_and_lengthens() {
        let scaled = of(json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192,
        }));
        let plain = frequencies(1e6, 64, 32);
        let share = |j: usize| f64::from(scaled.frequencies[j]) / f64::from(plain[j]);
        assert_eq!(scaled.frequencies[..9], plain[..9]);
        assert!((share(12) - (1.0 - 4.0 / 9.0 * 0.75)).abs() < 1e-6);
        for j in 17..32 {
            assert!((share(j) - 0.25).abs() < 1e-6, "{j}");
        }
        assert!((scaled.length - 1.138_629_4).abs() < 1e-6);
        let said = of(json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0}));
        assert_eq!(said.length, 1.0);
    }

    #[test]
    fn a_stretched_model_knows_more_positions() {
        let positions = |config: Value| {
            let scaling: RopeScaling = serde_json::from_value(config).unwrap();
            scaling.positions(262_144)
        };
        assert_eq!(positions(json!({})), 262_144);
        let yarn = json!({
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 262_144,
        });
        assert_eq!(positions(yarn), 1_048_576);
        let absurd = json!({
            "rope_type": "yarn", "factor": 1e300, "original_max_position_embeddings": 8192,
        });
        assert_eq!(positions(absurd), 1 << 24);
    }

    #[test]
    fn kinds_that_depend_on_the_text_and_wrong_numbers_are_refused() {
        for (config, what) in [
            (json!({"rope_type": "dynamic", "factor": 2.0}), "`dynamic`"),
            (json!({"rope_type": "longrope"}), "`longrope`"),
            (
                json!({"rope_type": "linear", "factor": 0.5}),
                "factor of 0.5",
            ),
            (
                json!({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": -1.0}),
                "of -1 positions",
            ),
            (
                json!({"rope_type": "llama3", "low_freq_factor": 4.0, "high_freq_factor": 4.0}),
                "low_freq_factor 4",
            ),
        ] {
            let error = apply(config).unwrap_err().to_string();
            assert!(error.contains(what), "{error}");
        }
    }
}
