//! The sampler against its definition, word for word, and against its own statistics.

use super::*;
use crate::noise;
use backend::math::{MASS_ONE, exp, ln, mass};
use backend::moments::Moments;
use proptest::prelude::*;
use proptest::sample::select;
use std::collections::HashMap;
use support::Support;

/// How many tokens each token would repeat, by looking at every passage.
fn naive_repeats(sampling: &Sampling, text: &[u32]) -> HashMap<u32, usize> {
    let n = text
        .len()
        .min(sampling.dry_penalty_last_n.unwrap_or(usize::MAX));
    let text = &text[text.len() - n..];
    let breakers: Vec<Vec<u32>> = sampling.dry_breakers.sequences().collect();
    let after = |first: usize| {
        let found = breakers.iter().filter(|b| text[first..].starts_with(b));
        found.map(|b| n - first - b.len()).min()
    };
    let limit = (0..n).rev().find_map(after).unwrap_or(n);
    let mut lengths = HashMap::new();
    for next in 1..n {
        let repeats = |&k: &usize| text[next - 1 - k] == text[n - 1 - k];
        let length = (0..next).take_while(repeats).count().min(limit);
        if length >= sampling.dry_allowed_length && !breakers.contains(&vec![text[next]]) {
            let longest = lengths.entry(text[next]).or_insert(0);
            *longest = length.max(*longest);
        }
    }
    lengths
}

/// The logits of `ids` after edits, -inf for what is not a number.
fn naive_edits(
    sampling: &Sampling,
    (prompt, output): (&[u32], &[u32]),
    ids: &[u32],
    logits: &[f32],
) -> Vec<(f32, u32)> {
    let repeats = match sampling.dry_multiplier {
        0.0 => HashMap::new(),
        _ => naive_repeats(sampling, &[prompt, output].concat()),
    };
    let last = sampling.repeat_last_n.unwrap_or(usize::MAX);
    let of_output = &output[output.len() - output.len().min(last)..];
    let last = last - of_output.len();
    let of_prompt = &prompt[prompt.len() - prompt.len().min(last)..];
    let edited = ids.iter().zip(logits).map(|(&id, &l)| {
        let n_output = of_output.iter().filter(|&&token| token == id).count();
        let mut l = l;
        if n_output > 0 || of_prompt.contains(&id) {
            let r = sampling.repetition_penalty;
            l = if l > 0.0 { l / r } else { l * r };
        }
        if n_output > 0 {
            l -= sampling.presence_penalty + sampling.frequency_penalty * n_output as f32;
        }
        if let Some(length) = repeats.get(&id) {
            // Bases of the tests are such that no product is rounded.
            let power = f64::from(sampling.dry_base)
                .powi((length - sampling.dry_allowed_length).try_into().unwrap());
            l -= (f64::from(sampling.dry_multiplier) * power).min(f64::from(f32::MAX)) as f32;
        }
        for &(token, bias) in &sampling.logit_bias {
            l += if token == id { bias } else { 0.0 };
        }
        let is_early = output.len() < sampling.min_tokens && sampling.end_tokens.contains(&id);
        let is_dead = sampling.suppress.contains(&id) || is_early || l.is_nan();
        (if is_dead { f32::NEG_INFINITY } else { l }, id)
    });
    edited.collect()
}

/// Mass and mean distance from `top` of the tokens of the logits `z`.
fn naive_mean(top: f32, z: impl Iterator<Item = f32>) -> (u64, f32) {
    let terms = z.map(|z| {
        let distance = (f64::from(top - z) * 2f64.powi(20)).floor();
        let m = mass(z - top);
        let product = if m == 0 { 0.0 } else { distance * m as f64 };
        (m, (product / 2f64.powi(20)).floor() as u64)
    });
    let (masses, distances): (Vec<u64>, Vec<u64>) = terms.unzip();
    let (mass, distance): (u64, u64) = (masses.iter().sum(), distances.iter().sum());
    (mass, (distance as f64 / mass as f64) as f32)
}

/// The temperature at logits in descending order, of which the first is finite.
fn naive_temperature(sampling: &Sampling, row: &[(f32, u32)]) -> f32 {
    let t = sampling.temperature;
    let numbers = row.iter().filter(|(l, _)| *l > f32::NEG_INFINITY);
    let n = numbers.clone().count();
    if sampling.dynatemp_range == 0.0 || n == 1 {
        return t;
    }
    let (total, mean) = naive_mean(row[0].0, numbers.map(|&(l, _)| l));
    let entropy = ln((total as f64 / MASS_ONE) as f32) + mean;
    let share = (entropy / ln(n as f32)).clamp(0.0, 1.0);
    let e = sampling.dynatemp_exponent;
    let power = match share {
        _ if e == 0.0 => 1.0,
        share if share < f32::MIN_POSITIVE => 0.0,
        share => exp(e * ln(share)),
    };
    let (low, high) = (
        (t - sampling.dynatemp_range).max(0.0),
        t + sampling.dynatemp_range,
    );
    low + (high - low) * power
}

/// The standard deviation of the logits above -inf, of which the first is the largest.
fn naive_sigma(row: &[(f32, u32)]) -> f64 {
    let distance =
        |&(l, _): &(f32, u32)| ((f64::from(row[0].0 - l) * 4096.0).floor() as i128).min(1 << 24);
    let numbers = row.iter().filter(|(l, _)| *l > f32::NEG_INFINITY);
    let distances: Vec<i128> = numbers.map(distance).collect();
    let (n, sum) = (distances.len() as i128, distances.iter().sum::<i128>());
    let squares: i128 = distances.iter().map(|d| d * d).sum();
    ((n * squares - sum * sum) as f64).sqrt() / (n as f64 * 4096.0)
}

/// The definition, word for word: the support in order, from token lists, with
/// a full sort and running sums.
fn naive(
    sampling: &Sampling,
    text: (&[u32], &[u32]),
    position: u64,
    ids: &[u32],
    logits: &[f32],
) -> Vec<(f32, u32)> {
    let mut row = naive_edits(sampling, text, ids, logits);
    let order = |a: &(f32, u32), b: &(f32, u32)| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1));
    row.sort_by(order);
    if sampling.temperature == 0.0 || !row[0].0.is_finite() {
        return row[..1].to_vec();
    }
    let temperature = naive_temperature(sampling, &row);
    let scale = 1.0 / temperature;
    let top = row[0].0 * scale;
    if temperature < f32::MIN_POSITIVE || !top.is_finite() {
        return row[..1].to_vec();
    }
    let sigma = naive_sigma(&row);
    row.iter_mut().for_each(|(z, _)| *z *= scale);
    row.sort_by(order);
    row.retain(|&(z, _)| z > f32::NEG_INFINITY);
    if sampling.top_n_sigma > 0.0 {
        let distance = f64::from(sampling.top_n_sigma) * sigma * f64::from(scale);
        row.retain(|&(z, _)| z >= (f64::from(top) - distance) as f32);
    }
    if sampling.top_k > 0 {
        row.truncate(sampling.top_k);
    }
    if sampling.typical_p < 1.0 {
        let (_, mean) = naive_mean(top, row.iter().map(|&(z, _)| z));
        row.retain(|&(z, _)| mass(z - top) > 0);
        // Tokens of equal deviation stay in their order.
        row.sort_by(|a, b| {
            let deviation = |z: f32| ((top - z) - mean).abs();
            deviation(a.0).partial_cmp(&deviation(b.0)).unwrap()
        });
        let masses: Vec<u64> = row.iter().map(|&(z, _)| mass(z - top)).collect();
        let wanted = f64::from(sampling.typical_p) * masses.iter().sum::<u64>() as f64;
        let sums = masses.iter().scan(0, |sum, m| {
            *sum += m;
            Some(*sum)
        });
        let n = sums.take_while(|&sum| sum as f64 <= wanted).count();
        row.truncate(n + 1);
        row.sort_by(order);
    }
    let top = row[0].0;
    if sampling.top_p < 1.0 {
        let masses: Vec<u64> = row.iter().map(|&(z, _)| mass(z - top)).collect();
        let wanted = f64::from(sampling.top_p) * masses.iter().sum::<u64>() as f64;
        let mut sum = 0;
        let reaches = |&m: &u64| {
            sum += m;
            sum as f64 >= wanted
        };
        let last = masses.iter().position(reaches).unwrap();
        row.truncate(last + 1);
    }
    if sampling.min_p >= f32::MIN_POSITIVE {
        let least = top + ln(sampling.min_p);
        row.retain(|&(z, _)| z >= least);
    }
    if noise::xtc_coin(sampling.seed, position) < sampling.xtc_probability {
        let total: u64 = row.iter().map(|&(z, _)| mass(z - top)).sum();
        let least = f64::from(sampling.xtc_threshold) * total as f64;
        let is_top = |&&(z, _): &&(f32, u32)| mass(z - top) as f64 >= least;
        let n = row.iter().take_while(is_top).count();
        row.drain(..n.saturating_sub(1));
    }
    row
}

/// `support` is absent for logits that give no token.
fn naive_choice(sampling: &Sampling, position: u64, support: Option<&[(f32, u32)]>) -> u32 {
    let Some(support) = support else {
        return NO_TOKEN;
    };
    let scores = support
        .iter()
        .map(|&(z, id)| (z + noise::gumbel(sampling.seed, position, id), id));
    let best = scores.reduce(|a, b| {
        if b.0 > a.0 || (b.0 == a.0 && b.1 < a.1) {
            b
        } else {
            a
        }
    });
    best.unwrap().1
}

/// A row of `n` logits; each kind meets another part of the search.
fn row(kind: usize, seed: u64, n: usize) -> Vec<f32> {
    let g = |lane: u64, i: usize| noise::gumbel(seed, lane, i as u32);
    let logit = |i| match kind {
        // Ties.
        0 => (g(0, i) * 2.0).round(),
        // A bell.
        1 => 3.0 * (g(0, i) - g(1, i)),
        // A few tokens have it all.
        2 => 8.0 * g(0, i) - 30.0,
        // All the same.
        3 => -0.0,
        // So large that scores and bounds round to quarters.
        4 => 2_097_152.0 + g(0, i),
        // What should not be.
        _ => match noise::Noise::new(seed, 2).draw(i as u32) % 16 {
            0 => f32::NAN,
            1 => f32::NEG_INFINITY,
            2 if seed.is_multiple_of(4) => f32::INFINITY,
            3 if seed % 4 == 1 => f32::MAX,
            4 if seed % 4 == 2 => -0.0,
            5 if seed % 4 == 2 => 0.0,
            _ if seed % 16 == 3 => f32::NEG_INFINITY,
            _ => g(0, i),
        },
    };
    (0..n).map(logit).collect()
}

fn samplings() -> impl Strategy<Value = Sampling> {
    let truncation = (
        select(vec![0.0, 1.2e-38, 1e-3, 0.3, 0.7, 1.0, 1.0, 2.5]),
        select(vec![0, 0, 0, 1, 2, 5, 40, 300, 5000]),
        select(vec![1.0, 1.0, 1e-9, 0.25, 0.5, 0.9, 0.999_999]),
        select(vec![0.0, 0.0, 1e-40, 0.01, 0.5, 1.0]),
    );
    let penalties = (
        select(vec![1.0, 1.0, 1.3, 0.5]),
        select(vec![0.0, 0.0, 1.5]),
        select(vec![0.0, 0.0, 0.25, -0.5]),
        select(vec![None, None, Some(0), Some(1), Some(6), Some(20)]),
    );
    let shapes = (
        select(vec![0.0, 0.0, 0.3, 1.0, 3.0]),
        select(vec![1.0, 1.0, 0.0, 0.5, 2.0]),
        select(vec![0.0, 0.0, -1.0, 0.5, 1.0, 3.0]),
        select(vec![1.0, 1.0, 1.0, 0.0, 0.2, 0.5, 0.9, 0.999_999]),
        select(vec![0.0, 0.0, 0.5, 1.0]),
        select(vec![0.1, 0.0, 1e-4, 0.02, 0.4, 1.0]),
    );
    // Tokens of texts that repeat themselves are below 4.
    let breaker = proptest::collection::vec(0u32..5, 1..4);
    let dry = (
        select(vec![0.0, 0.0, 0.75, 4.0, f32::MAX]),
        select(vec![1.0, 1.75, 2.0]),
        select(vec![0usize, 1, 2, 2, 5]),
        select(vec![None, None, Some(0), Some(1), Some(7), Some(100)]),
        proptest::collection::vec(breaker, 0..3),
    );
    let tokens = || proptest::collection::vec(0u32..200, 0..4);
    let ends = (select(vec![0usize, 0, 1, 5, 40]), tokens());
    let biases = proptest::collection::vec((0u32..200, select(vec![-5.0, 2.0, 100.0])), 0..3);
    let ours = (truncation, penalties, biases, tokens(), any::<u64>());
    (ours, shapes, dry, ends).prop_map(|(ours, shapes, dry, ends)| {
        let (truncation, penalties, logit_bias, suppress, seed) = ours;
        let (temperature, top_k, top_p, min_p) = truncation;
        let (repetition_penalty, presence_penalty, frequency_penalty, repeat_last_n) = penalties;
        let (dynatemp_range, dynatemp_exponent, top_n_sigma, typical_p, xtc, xtc_threshold) =
            shapes;
        let (dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, breakers) = dry;
        Sampling {
            temperature,
            dynatemp_range,
            dynatemp_exponent,
            top_n_sigma,
            top_k,
            typical_p,
            top_p,
            min_p,
            xtc_probability: xtc,
            xtc_threshold,
            mirostat: Mirostat::Off,
            mirostat_tau: 5.0,
            mirostat_eta: 0.1,
            repetition_penalty,
            presence_penalty,
            frequency_penalty,
            repeat_last_n,
            dry_multiplier,
            dry_base,
            dry_allowed_length,
            dry_penalty_last_n,
            dry_breakers: Breakers::new(breakers),
            logit_bias,
            suppress,
            min_tokens: ends.0,
            end_tokens: ends.1,
            seed,
        }
    })
}

/// Some tokens, of many kinds or of few, which repeat themselves.
fn texts() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![
        proptest::collection::vec(0u32..200, 0..9),
        proptest::collection::vec(0u32..4, 0..40),
        proptest::collection::vec(0u32..2, 0..9),
    ]
}

/// How likely each token is to be chosen, the likeliest first.
fn distribution(
    sampling: &Sampling,
    history: &History,
    position: u64,
    logits: &[f32],
    scratch: &mut Scratch,
) -> TokenProbs {
    let mut support = support(sampling, history, position, logits, scratch);
    if let Support::Keys(keys) = &mut support {
        keys.sort_unstable();
    }
    support.probs()
}

fn history(sampling: &Sampling, prompt: &[u32], output: &[u32]) -> History {
    let mut history = History::new(sampling, prompt);
    for &token in output {
        // A draft that was rejected.
        let rejected = [token + 1, 3, 3];
        rejected.iter().for_each(|&token| history.push(token));
        rejected.iter().for_each(|_| history.pop());
        history.push(token);
    }
    history
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]
    #[test]
    fn every_path_gives_what_a_full_sort_gives(
        sampling in samplings(),
        (kind, seed, n) in (0usize..6, any::<u64>(), prop_oneof![1usize..200, 1usize..6000]),
        prompt in texts(),
        output in texts(),
        position in any::<u64>(),
    ) {
        let mut sampling = sampling;
        sampling.suppress.retain(|&token| (token as usize) < n);
        sampling.logit_bias.retain(|&(token, _)| (token as usize) < n);
        sampling.end_tokens.retain(|&token| (token as usize) < n);
        sampling.validate(n.max(5)).unwrap();
        let logits = row(kind, seed, n);
        let history = history(&sampling, &prompt, &output);
        let ids: Vec<u32> = (0..n as u32).collect();

        let fresh = &mut Scratch::default();
        let dirty = &mut Scratch::default();
        choose(&sampling, &history, 0, &row(1, seed, 3000), dirty);
        choose_among(&sampling, &history, 0, &[7, 3], &[0.5, 0.5], dirty);
        for scratch in [fresh, dirty] {
            for position in (0..4).map(|i| position.wrapping_add(i)) {
                let support = naive(&sampling, (&prompt, &output), position, &ids, &logits);
                let shares = distribution(&sampling, &history, position, &logits, scratch);
                let tokens: Vec<u32> = shares.iter().map(|&(token, _)| token).collect();
                let expected: Vec<u32> = support.iter().map(|&(_, token)| token).collect();
                prop_assert_eq!(tokens, expected);
                let total: f64 = shares.iter().map(|&(_, share)| f64::from(share)).sum();
                prop_assert!((total - 1.0).abs() < 1e-5);
                let chosen = choose(&sampling, &history, position, &logits, scratch);
                let support = gives_token(&logits).then_some(&support[..]);
                prop_assert_eq!(chosen, naive_choice(&sampling, position, support));
            }
        }
    }

    #[test]
    fn without_edits_the_choice_is_that_of_a_device(
        drawn in samplings(),
        (kind, seed, n) in (0usize..6, any::<u64>(), 1usize..700),
        position in any::<u64>(),
    ) {
        let (temperature, top_k, top_p, min_p) =
            (drawn.temperature, drawn.top_k, drawn.top_p, drawn.min_p);
        let plain = Sampling::default();
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed: drawn.seed, ..plain };
        let choice = sampling.on_device(position).expect("no more than the logits count");
        let (logits, history) = (row(kind, seed, n), history(&sampling, &[], &[]));
        let scratch = &mut Scratch::default();
        let chosen = choose(&sampling, &history, position, &logits, scratch);
        prop_assert_eq!(chosen, choice.choose(&logits, None));
        let ids: Vec<u32> = (0..n as u32).rev().map(|i| 2 * i + 1).collect();
        let chosen = choose_among(&sampling, &history, position, &ids, &logits, scratch);
        prop_assert_eq!(chosen, choice.choose(&logits, Some(&ids)));
    }

    #[test]
    fn edits_and_a_choice_by_a_device_give_the_hosts_token(
        drawn in samplings(),
        (kind, seed, n) in (0usize..6, any::<u64>(), 1usize..700),
        prompt in texts(),
        output in texts(),
        position in any::<u64>(),
    ) {
        let sampling = Sampling { typical_p: 1.0, ..drawn };
        let (logits, history) = (row(kind, seed, n), history(&sampling, &prompt, &output));
        let scratch = &mut Scratch::default();
        let column = |token: u32| Some(token).filter(|&token| (token as usize) < n);
        // Columns of every other token, in descending order.
        let ids: Vec<u32> = (0..n as u32).rev().map(|i| 2 * i).collect();
        let listed = |token: u32| ids.iter().position(|&id| id == token).map(|i| i as u32);
        for position in (0..4).map(|i| position.wrapping_add(i)) {
            let plan = sampling.by_device(position);
            if plan == ByDevice::Nothing {
                prop_assert!(sampling.excludes_top(position));
                continue;
            }
            for ids in [None, Some(&ids[..])] {
                let edits = match ids {
                    None => sampling.edits(&history, scratch, column),
                    Some(_) => sampling.edits(&history, scratch, listed),
                };
                let mut edited = logits.clone();
                edits.apply(&mut edited);
                let choice = match plan {
                    ByDevice::Choice(choice) => choice,
                    _ => sampling.of_row(position, &Moments::of(&edited)),
                };
                let token = choice.choose(&edited, ids);
                let want = match ids {
                    None => choose(&sampling, &history, position, &logits, scratch),
                    Some(ids) => choose_among(&sampling, &history, position, ids, &logits, scratch),
                };
                // What an edited row does not tell, the host does.
                if token != NO_TOKEN {
                    prop_assert_eq!(token, want);
                } else if want != NO_TOKEN {
                    let top = edited.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    prop_assert!(!edits.is_empty() && !top.is_finite());
                }
            }
        }
    }

    #[test]
    fn among_some_tokens_is_as_if_the_others_were_suppressed(
        sampling in samplings(),
        (kind, seed, n) in (0usize..6, any::<u64>(), 201usize..700),
        share in 1u32..5,
        output in texts(),
        position in any::<u64>(),
    ) {
        let all = row(kind, seed, n);
        let history = history(&sampling, &[5, 6], &output);
        let (mut ids, others): (Vec<u32>, Vec<u32>) = (0..n as u32)
            .partition(|&id| id == 0 || noise::Noise::new(seed, 9).draw(id) % 4 < share);
        // Heads list clusters, in no order.
        ids.sort_by_key(|&id| noise::Noise::new(seed, 10).draw(id));
        let logits: Vec<f32> = ids.iter().map(|&id| all[id as usize]).collect();
        let mut narrow = sampling.clone();
        narrow.suppress.extend(others);
        let scratch = &mut Scratch::default();
        let support = naive(&sampling, (&[5, 6], &output), position, &ids, &logits);
        // Another head's ids leave nothing behind.
        let other_ids: Vec<u32> = (0..n as u32).rev().collect();
        choose_among(&sampling, &history, position, &other_ids, &all, scratch);
        for _ in 0..2 {
            let chosen = choose_among(&sampling, &history, position, &ids, &logits, scratch);
            let support = gives_token(&logits).then_some(&support[..]);
            prop_assert_eq!(chosen, naive_choice(&sampling, position, support));
            // A NaN gives no token even where it is suppressed.
            if gives_token(&all) {
                prop_assert_eq!(chosen, choose(&narrow, &history, position, &all, scratch));
            }
        }
    }
}

/// A chi-square bound that chance exceeds once in a thousand times (Wilson and
/// Hilferty 1931).
fn chi_square_bound(degrees: usize) -> f64 {
    let d = degrees as f64;
    let normal = 3.0902;
    d * (1.0 - 2.0 / (9.0 * d) + normal * (2.0 / (9.0 * d)).sqrt()).powi(3)
}

#[test]
fn choices_are_distributed_as_stated() {
    let logits = row(1, 3, 150);
    let base = Sampling {
        temperature: 2.0,
        seed: 11,
        ..Sampling::default()
    };
    let settings = [
        base.clone(),
        Sampling {
            temperature: 9.0,
            seed: 12,
            ..base.clone()
        },
        Sampling {
            temperature: 3.0,
            top_p: 0.9,
            ..base.clone()
        },
        Sampling {
            temperature: 4.0,
            top_k: 20,
            ..base.clone()
        },
        Sampling {
            temperature: 5.0,
            min_p: 0.02,
            seed: u64::MAX,
            ..base.clone()
        },
        Sampling {
            temperature: 5.0,
            top_k: 100,
            top_p: 0.95,
            min_p: 0.001,
            repetition_penalty: 1.2,
            presence_penalty: 0.5,
            frequency_penalty: 0.2,
            logit_bias: vec![(7, 3.0)],
            suppress: vec![1],
            seed: 13,
            ..base.clone()
        },
        Sampling {
            temperature: 4.0,
            top_n_sigma: 2.0,
            typical_p: 0.95,
            seed: 14,
            ..base.clone()
        },
        Sampling {
            temperature: 3.0,
            dynatemp_range: 2.5,
            dynatemp_exponent: 1.5,
            xtc_probability: 0.4,
            xtc_threshold: 0.05,
            dry_multiplier: 1.0,
            dry_allowed_length: 1,
            seed: 15,
            ..base.clone()
        },
    ];
    let n = 200_000u64;
    let scratch = &mut Scratch::default();
    for sampling in settings {
        let history = history(&sampling, &[4, 5, 6], &[6, 9, 9]);
        // XTC acts on some positions; its coin decides nothing else.
        let acts = sampling.xtc_probability;
        let mut shares = vec![0.0; logits.len()];
        for (xtc_probability, weight) in [(0.0, 1.0 - acts), (1.0, acts)] {
            let sampling = Sampling {
                xtc_probability,
                ..sampling.clone()
            };
            for (token, share) in distribution(&sampling, &history, 0, &logits, scratch) {
                shares[token as usize] += weight * share;
            }
        }
        let shares = (0..).zip(shares).filter(|&(_, share)| share > 0.0);
        let mut counts = vec![0u64; logits.len()];
        for position in 0..n {
            counts[choose(&sampling, &history, position, &logits, scratch) as usize] += 1;
        }
        // Cells of fewer than 10 expected choices are one cell.
        let (mut chi_square, mut degrees) = (0.0, 0);
        let mut few = (0.0, 0);
        let mut cell = |expected: f64, found: u64| {
            chi_square += (found as f64 - expected).powi(2) / expected;
            degrees += 1;
        };
        for (token, share) in shares {
            let expected = f64::from(share) * n as f64;
            let found = std::mem::take(&mut counts[token as usize]);
            if expected < 10.0 {
                few = (few.0 + expected, few.1 + found);
            } else {
                cell(expected, found);
            }
        }
        if few.0 >= 10.0 {
            cell(few.0, few.1);
        }
        assert_eq!(
            counts.iter().sum::<u64>(),
            0,
            "tokens outside of the support"
        );
        assert!(
            chi_square < chi_square_bound(degrees - 1),
            "{chi_square} with {degrees} cells: {sampling:?}"
        );
    }
}

#[test]
fn close_rows_agree_more_often_with_the_same_noise() {
    let target = row(1, 5, 100);
    let drafter: Vec<f32> = target
        .iter()
        .zip(row(1, 6, 100))
        .map(|(l, e)| l + 0.1 * e)
        .collect();
    let keyed = Sampling {
        temperature: 1.0,
        seed: 1,
        ..Sampling::default()
    };
    let other = Sampling {
        seed: 2,
        ..keyed.clone()
    };
    let history = History::new(&keyed, &[]);
    let scratch = &mut Scratch::default();
    let n = 20_000;
    let mut agreement = |draft: &Sampling| {
        let agrees = |&position: &u64| {
            choose(&keyed, &history, position, &target, scratch)
                == choose(draft, &history, position, &drafter, scratch)
        };
        (0..n).filter(agrees).count() as f64 / n as f64
    };
    let (with_key, without) = (agreement(&keyed), agreement(&other));
    let mut shares = |logits: &[f32]| {
        let mut shares = distribution(&keyed, &history, 0, logits, scratch);
        shares.sort_by_key(|&(token, _)| token);
        shares
    };
    let pairs = shares(&target).into_iter().zip(shares(&drafter));
    let distance: f64 = pairs
        .map(|((_, p), (_, q))| f64::from((p - q).abs()))
        .sum::<f64>()
        / 2.0;
    // Daliri, Musco, Suresh 2024, arXiv:2408.07978: at least (1-d)/(1+d).
    let bound = (1.0 - distance) / (1.0 + distance);
    assert!(with_key > bound - 0.01, "{with_key} below {bound}");
    assert!(with_key > without + 0.3, "{with_key} against {without}");
}

#[test]
fn the_largest_vocabularies_take_the_same_paths() {
    let ids: Vec<u32> = (0..262_144).collect();
    let scratch = &mut Scratch::default();
    for (kind, temperature, top_k, top_p) in [
        (1, 1.0, 0, 1.0),
        (1, 0.7, 0, 0.9),
        (2, 0.7, 0, 0.9),
        (0, 1.0, 40, 0.5),
        (3, 1.0, 0, 0.5),
    ] {
        let sampling = Sampling {
            temperature,
            top_k,
            top_p,
            ..Sampling::default()
        };
        let logits = row(kind, 1, ids.len());
        let history = History::new(&sampling, &[]);
        let support = naive(&sampling, (&[], &[]), 77, &ids, &logits);
        let chosen = choose(&sampling, &history, 77, &logits, scratch);
        assert_eq!(chosen, naive_choice(&sampling, 77, Some(&support)));
    }
}

#[test]
fn a_tail_of_rounded_masses_is_not_lost() {
    // Each of the tail is 0.6 units, which rounds to 1.
    let mut logits = vec![-28.237; 100_000];
    logits[500] = 0.0;
    let sampling = Sampling {
        temperature: 1.0,
        top_p: 0.999_999_94,
        ..Sampling::default()
    };
    let ids: Vec<u32> = (0..100_000).collect();
    let support = naive(&sampling, (&[], &[]), 77, &ids, &logits);
    let history = History::new(&sampling, &[]);
    let shares = distribution(&sampling, &history, 77, &logits, &mut Scratch::default());
    assert!(support.len() > 1);
    assert_eq!(shares.len(), support.len());
}

/// `softmax(l / t)` as textbooks have it, the likeliest token first.
fn softmax(logits: &[f32], t: f64) -> Vec<(u32, f64)> {
    let terms = (0..).zip(logits.iter().map(|&l| (f64::from(l) / t).exp()));
    let terms: Vec<(u32, f64)> = terms.collect();
    let total: f64 = terms.iter().map(|(_, term)| term).sum();
    let mut probs: Vec<_> = terms
        .into_iter()
        .map(|(token, x)| (token, x / total))
        .collect();
    probs.sort_by(|a, b| b.1.total_cmp(&a.1));
    probs
}

fn entropy(probs: &[(u32, f64)]) -> f64 {
    -probs.iter().map(|(_, p)| p * p.ln()).sum::<f64>()
}

#[test]
fn supports_are_those_of_the_published_formulas() {
    let scratch = &mut Scratch::default();
    let history = History::new(&Sampling::default(), &[]);
    let mut sizes = [0; 3];
    for seed in 0..50 {
        let logits: Vec<f32> = row(1, seed, 400).iter().map(|l| l * 0.4).collect();
        let probs = softmax(&logits, 1.25);
        let base = Sampling {
            temperature: 1.25,
            seed,
            ..Sampling::default()
        };
        let mut support = |sampling: Sampling| {
            let shares = distribution(&sampling, &history, 3, &logits, scratch);
            let mut tokens: Vec<u32> = shares.iter().map(|&(token, _)| token).collect();
            tokens.sort_unstable();
            tokens
        };
        let sorted = |tokens: &mut dyn Iterator<Item = u32>| {
            let mut tokens: Vec<u32> = tokens.collect();
            tokens.sort_unstable();
            tokens
        };
        // Meister et al. 2023, arXiv:2202.00666.
        let h = entropy(&probs);
        let mut by_surprise = probs.clone();
        by_surprise.sort_by(|a, b| {
            let distance = |p: f64| (-p.ln() - h).abs();
            distance(a.1).total_cmp(&distance(b.1))
        });
        let mut sum = 0.0;
        let n = by_surprise.iter().take_while(|(_, p)| {
            let goes_on = sum <= 0.4;
            sum += p;
            goes_on
        });
        let typical = sorted(&mut n.map(|&(token, _)| token));
        sizes[0] += typical.len();
        assert_eq!(
            support(Sampling {
                typical_p: 0.4,
                ..base.clone()
            }),
            typical
        );
        // Tang et al. 2024, arXiv:2411.07641.
        let n = logits.len() as f64;
        let mean = logits.iter().map(|&l| f64::from(l)).sum::<f64>() / n;
        let variance = logits
            .iter()
            .map(|&l| (f64::from(l) - mean).powi(2))
            .sum::<f64>()
            / n;
        let top = f64::from(logits.iter().copied().fold(f32::MIN, f32::max));
        let cut = top - 1.3 * variance.sqrt();
        let sigma = sorted(&mut (0..400u32).filter(|&i| f64::from(logits[i as usize]) >= cut));
        sizes[1] += sigma.len();
        assert_eq!(
            support(Sampling {
                top_n_sigma: 1.3,
                ..base.clone()
            }),
            sigma
        );
        // All of the likely tokens but the least likely of them go.
        let likely = probs.iter().take_while(|(_, p)| *p >= 0.01).count();
        let rest = probs[likely.saturating_sub(1)..].iter();
        let xtc = sorted(&mut rest.map(|&(token, _)| token));
        sizes[2] += 400 - xtc.len();
        let sampling = Sampling {
            xtc_probability: 1.0,
            xtc_threshold: 0.01,
            ..base.clone()
        };
        assert_eq!(support(sampling), xtc);
    }
    assert!(sizes.iter().all(|&n| n > 100), "{sizes:?}");
}

#[test]
fn dynamic_temperature_follows_the_entropy() {
    let scratch = &mut Scratch::default();
    let history = History::new(&Sampling::default(), &[]);
    for (seed, spread) in (0..30).map(|i| (i, 0.05 + 0.1 * i as f32)) {
        let logits: Vec<f32> = row(1, seed, 300).iter().map(|l| l * spread).collect();
        let sampling = Sampling {
            temperature: 1.0,
            dynatemp_range: 0.75,
            dynatemp_exponent: 1.5,
            ..Sampling::default()
        };
        let share = entropy(&softmax(&logits, 1.0)) / 300f64.ln();
        let temperature = 0.25 + 1.5 * share.powf(1.5);
        let expected = softmax(&logits, temperature);
        let found = distribution(&sampling, &history, 0, &logits, scratch);
        for ((_, p), (_, q)) in expected.into_iter().zip(found).take(20) {
            assert!((p - f64::from(q)).abs() < 1e-5 * (1.0 + p), "{p} and {q}");
        }
    }
}
