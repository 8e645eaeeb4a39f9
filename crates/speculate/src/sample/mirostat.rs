//! Mirostat: how surprising tokens are stays near a target, by a bound that follows the text.
//!
//! ```text
//! mu        the bound in bits: 2 tau before the first token of output
//! p_i       the share of token i in the mass of all tokens
//! version 1 S = the k likeliest;  k = (e 2^mu / (1 - n^-e))^(1/s), e = s - 1, of n tokens in all
//!           s = sum t_i (z_i - z_(i+1)) / sum t_i^2, t_i = ln((i+1) / i), the i-th by z and the next
//!           of the m = 100 likeliest: the exponent of Zipf's law
//! version 2 S = {i: -log2 p_i <= mu}, and whichever are as likely as the likeliest
//! token     argmax over S of z + g
//! mu       -= eta (-log2(p_token / sum over S of p) - tau)
//! ```
//!
//! Basu et al. 2021, arXiv:2007.14966; what it leaves open is done as llama.cpp does it. Tokens without
//! a mass are in no S, and one token always is.
//!
//! The bound is a function of the tokens of the output and of the logits that each was chosen from. A
//! round moves it once a token of the text ([`observe`]), in the order of its rows, which ends with the
//! first that differs from the draft: no guess ever moves it, so there is nothing to roll back, and a
//! text with speculation has the bounds of the text without. A drafter guesses with the bound of the
//! newest token of the text.

use super::key::{Key, retain, total_mass};
use super::support::{Support, support};
use super::{History, Sampling, Scratch};
use backend::math::{MASS_ONE, exp, ln, mass};
use std::f32::consts::LN_2;

/// Which version of mirostat bounds how surprising tokens are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mirostat {
    /// None: the other options say which tokens stay.
    #[default]
    Off,
    /// The first, which estimates how many tokens stay by Zipf's law.
    V1,
    /// The second, which drops the tokens that are more surprising than the bound.
    V2,
}

/// The likeliest tokens that version 1 looks at.
const M: usize = 100;

/// Applies the bound `mu` to `keys`, those of the tokens that have a mass among them, in a row of `n`
/// tokens of which `top` is the largest `z`: how many stay, at the front. One does.
pub(super) fn bound(sampling: &Sampling, mu: f32, n: usize, top: f32, keys: &mut [Key]) -> usize {
    let with_mass = retain(keys, |key| mass(key.z() - top) > 0);
    let keys = &mut keys[..with_mass];
    match sampling.mirostat {
        Mirostat::Off => keys.len(),
        Mirostat::V1 => {
            keys.sort_unstable();
            let most = likeliest(zipf_exponent(keys), mu, n);
            keys.len().min(most)
        }
        Mirostat::V2 => {
            let least = top + log_mass(keys, top) - mu * LN_2;
            retain(keys, |key| key.z() >= least.min(top))
        }
    }
}

/// The exponent of Zipf's law by the first of `keys`, which ascend; 0 where all are as likely.
fn zipf_exponent(keys: &[Key]) -> f32 {
    let (mut along, mut squares) = (0.0f64, 0.0f64);
    for (i, pair) in keys[..keys.len().min(M)].windows(2).enumerate() {
        let t = f64::from(ln((i + 2) as f32 / (i + 1) as f32));
        along += t * f64::from(pair[0].z() - pair[1].z());
        squares += t * t;
    }
    if squares > 0.0 {
        (along / squares) as f32
    } else {
        0.0
    }
}

/// How many of the likeliest tokens of `n` stay under the bound `mu`, by Zipf's law with exponent `s`; at
/// least one.
fn likeliest(s: f32, mu: f32, n: usize) -> usize {
    let ln_n = ln(n as f32);
    let e = s - 1.0;
    // e / (1 - n^-e), which is 1 / ln n at e = 0.
    let ratio = match e.abs() * ln_n < 1e-3 {
        true => ln_n.recip(),
        false => e / (1.0 - exp((-e * ln_n).clamp(-80.0, 80.0))),
    };
    let ln_k = (ln(ratio) + mu * LN_2) / s;
    if ln_k >= ln_n {
        n
    } else if ln_k > 0.0 {
        (exp(ln_k) as usize).clamp(1, n)
    } else if ln_k.is_nan() {
        // As likely as each other, and nothing else is known of them.
        n
    } else {
        1
    }
}

/// The logarithm of the mass of `keys`, `top` having a mass of 1.
fn log_mass(keys: &[Key], top: f32) -> f32 {
    ln((total_mass(keys, top) as f64 / MASS_ONE) as f32)
}

/// Moves the bound of `history`, which ends before `token`: the token of the text after `position`
/// others, chosen from `logits`. Does nothing without mirostat, and where a text is greedy.
///
/// # Panics
///
/// As [`choose`](super::choose).
pub fn observe(
    sampling: &Sampling,
    history: &mut History,
    position: u64,
    logits: &[f32],
    token: u32,
    scratch: &mut Scratch,
) {
    if sampling.mirostat == Mirostat::Off || sampling.temperature == 0.0 {
        return;
    }
    let surprise = match support(sampling, history, position, logits, scratch) {
        Support::One(_) => 0.0,
        Support::Keys(keys) => {
            let top = keys.iter().min().expect("a support is not empty").z();
            let Some(key) = keys.iter().find(|key| key.id() == token) else {
                return;
            };
            (log_mass(keys, top) + (top - key.z())) / LN_2
        }
    };
    history.adapt(sampling, surprise);
}

#[cfg(test)]
mod tests {
    use super::super::{choose, token_probs};
    use super::*;
    use crate::noise::Noise;

    fn mirostat(mirostat: Mirostat, tau: f32) -> Sampling {
        Sampling {
            temperature: 1.0,
            mirostat,
            mirostat_tau: tau,
            mirostat_eta: 0.1,
            seed: 11,
            ..Sampling::default()
        }
    }

    /// Tokens with shares by Zipf's law of this exponent.
    fn zipf(n: usize, s: f32) -> Vec<f32> {
        (1..=n).map(|rank| -s * (rank as f32).ln()).collect()
    }

    #[test]
    fn the_exponent_of_zipfs_law_is_found() {
        for s in [0.7f32, 1.0, 1.3, 2.5] {
            for n in [2, 50, 3000] {
                let z = zipf(n, s).into_iter().zip(0..);
                let keys: Vec<Key> = z.map(Key::new).collect();
                assert!((zipf_exponent(&keys) - s).abs() < 1e-3, "{s}, {n}");
            }
        }
        assert_eq!(zipf_exponent(&[Key::new((1.0, 0))]), 0.0);
    }

    #[test]
    fn how_many_stay_follows_the_definition() {
        for s in [0.6f64, 0.9, 1.1, 1.7, 3.0] {
            for mu in [0.5f64, 2.0, 5.0, 10.0] {
                for n in [10usize, 1000, 200_000] {
                    let e = s - 1.0;
                    let ratio = e / (1.0 - (n as f64).powf(-e));
                    let want = (ratio * mu.exp2()).powf(1.0 / s).clamp(1.0, n as f64);
                    let got = likeliest(s as f32, mu as f32, n) as f64;
                    assert!(
                        (got - want).abs() <= 1.0 + 1e-4 * want,
                        "{s} {mu} {n}: {got}, {want}"
                    );
                }
            }
        }
        assert_eq!(likeliest(0.0, 4.0, 1), 1);
        assert_eq!(likeliest(1.0, 4.0, 1000), 2, "2^4 / ln 1000");
        assert_eq!(likeliest(1e9, 4.0, 1000), 1);
        assert_eq!(likeliest(0.5, -3.0, 1000), 1);
    }

    /// Version 2 word for word, in 64 bits: the support, and the bound after each token of it.
    #[test]
    fn version_2_keeps_what_is_not_too_surprising_and_moves_its_bound() {
        let logits: Vec<f32> = (0..200u32)
            .map(|i| (i.wrapping_mul(2_654_435_761) >> 12) as f32 / 2e5)
            .collect();
        for tau in [0.3f32, 1.5, 3.0, 40.0] {
            let sampling = mirostat(Mirostat::V2, tau);
            let mut history = History::new(&sampling, &[]);
            let mut mu = 2.0 * f64::from(tau);
            let scratch = &mut Scratch::default();
            for position in 0..60 {
                let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
                let bits = |l: f32| (total / f64::from(l).exp()).log2();
                let top = logits.iter().copied().fold(f32::MIN, f32::max);
                let stays = |l: f32| bits(l) <= mu || l == top;
                let near = logits.iter().any(|&l| (bits(l) - mu).abs() < 1e-4);
                assert!(!near, "no token is where rounding decides");
                let probs = token_probs(&sampling, &history, position, None, &logits, scratch);
                let kept: f64 = logits
                    .iter()
                    .filter(|l| stays(**l))
                    .map(|&l| f64::from(l).exp())
                    .sum();
                assert_eq!(probs.len(), logits.iter().filter(|l| stays(**l)).count());
                for (token, prob) in probs {
                    let want = f64::from(logits[token as usize]).exp() / kept;
                    assert!(stays(logits[token as usize]) && (f64::from(prob) - want).abs() < 1e-5);
                }
                let token = choose(&sampling, &history, position, &logits, scratch);
                observe(&sampling, &mut history, position, &logits, token, scratch);
                let surprise = (kept / f64::from(logits[token as usize]).exp()).log2();
                mu -= 0.1 * (surprise - f64::from(tau));
                assert!(
                    (f64::from(history.bound()) - mu).abs() < 1e-3,
                    "{tau} {position}"
                );
            }
        }
    }

    #[test]
    fn texts_become_as_surprising_as_asked_for() {
        let logits = zipf(5000, 1.1);
        for version in [Mirostat::V1, Mirostat::V2] {
            for tau in [2.0f32, 4.0] {
                let sampling = mirostat(version, tau);
                let mut history = History::new(&sampling, &[]);
                let scratch = &mut Scratch::default();
                let mut sum = 0.0;
                for position in 0..2000 {
                    let before = history.bound();
                    let token = choose(&sampling, &history, position, &logits, scratch);
                    observe(&sampling, &mut history, position, &logits, token, scratch);
                    sum += f64::from((before - history.bound()) / 0.1 + tau);
                }
                let mean = sum / 2000.0;
                assert!(
                    (mean - f64::from(tau)).abs() < 0.15,
                    "{version:?} {tau}: {mean}"
                );
            }
        }
    }

    #[test]
    fn other_truncation_counts_for_nothing_and_greedy_texts_have_no_bound() {
        let logits = zipf(300, 1.0);
        let plain = mirostat(Mirostat::V2, 3.0);
        let other = Sampling {
            top_k: 1,
            top_p: 0.1,
            min_p: 0.9,
            typical_p: 0.1,
            top_n_sigma: 0.1,
            xtc_probability: 1.0,
            dynatemp_range: 0.9,
            ..plain.clone()
        };
        let scratch = &mut Scratch::default();
        let history = History::new(&plain, &[]);
        for position in 0..50 {
            let noise = Noise::new(plain.seed, position);
            let token = choose(&plain, &history, position, &logits, scratch);
            assert_eq!(choose(&other, &history, position, &logits, scratch), token);
            assert_eq!(
                support(&plain, &history, position, &logits, scratch).choose(&noise),
                token
            );
        }
        let greedy = Sampling {
            temperature: 0.0,
            ..plain
        };
        let mut history = History::new(&greedy, &[]);
        assert_eq!(choose(&greedy, &history, 0, &logits, scratch), 0);
        observe(&greedy, &mut history, 0, &logits, 0, scratch);
        assert_eq!(history.bound(), 6.0);
        assert!(greedy.is_plain_greedy() && greedy.on_device(3).is_some());
    }
}
