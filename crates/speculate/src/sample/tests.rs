//! The sampler against its definition, word for word, and against its own statistics.

use super::*;
use crate::noise;
use backend::math::{ln, mass};
use proptest::prelude::*;
use proptest::sample::select;
use support::Support;

/// The definition, word for word: the support in order, from token lists, with
/// a full sort and running sums.
fn naive(
    sampling: &Sampling,
    (prompt, output): (&[u32], &[u32]),
    ids: &[u32],
    logits: &[f32],
) -> Vec<(f32, u32)> {
    let edited = ids.iter().zip(logits).map(|(&id, &l)| {
        let n_output = output.iter().filter(|&&token| token == id).count();
        let mut l = l;
        if n_output > 0 || prompt.contains(&id) {
            let r = sampling.repetition_penalty;
            l = if l > 0.0 { l / r } else { l * r };
        }
        if n_output > 0 {
            l -= sampling.presence_penalty + sampling.frequency_penalty * n_output as f32;
        }
        for &(token, bias) in &sampling.logit_bias {
            l += if token == id { bias } else { 0.0 };
        }
        let is_dead = sampling.suppress.contains(&id) || l.is_nan();
        (if is_dead { f32::NEG_INFINITY } else { l }, id)
    });
    let mut row: Vec<(f32, u32)> = edited.collect();
    let order = |a: &(f32, u32), b: &(f32, u32)| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1));
    row.sort_by(order);
    let scale = 1.0 / sampling.temperature;
    let top = row[0].0 * scale;
    if sampling.temperature == 0.0 || !top.is_finite() {
        return row[..1].to_vec();
    }
    row.iter_mut().for_each(|(z, _)| *z *= scale);
    row.sort_by(order);
    row.retain(|&(z, _)| z > f32::NEG_INFINITY);
    if sampling.top_k > 0 {
        row.truncate(sampling.top_k);
    }
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
    );
    let tokens = || proptest::collection::vec(0u32..200, 0..4);
    let biases = proptest::collection::vec((0u32..200, select(vec![-5.0, 2.0, 100.0])), 0..3);
    (truncation, penalties, biases, tokens(), any::<u64>()).prop_map(
        |(truncation, penalties, logit_bias, suppress, seed)| {
            let (temperature, top_k, top_p, min_p) = truncation;
            let (repetition_penalty, presence_penalty, frequency_penalty) = penalties;
            Sampling {
                temperature,
                top_k,
                top_p,
                min_p,
                repetition_penalty,
                presence_penalty,
                frequency_penalty,
                logit_bias,
                suppress,
                seed,
            }
        },
    )
}

/// How likely each token is to be chosen, the likeliest first.
fn distribution(
    sampling: &Sampling,
    history: &History,
    logits: &[f32],
    scratch: &mut Scratch,
) -> TokenProbs {
    let mut support = support(sampling, history, logits, scratch);
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
        prompt in proptest::collection::vec(0u32..200, 0..9),
        output in proptest::collection::vec(0u32..200, 0..9),
        position in any::<u64>(),
    ) {
        let mut sampling = sampling;
        sampling.suppress.retain(|&token| (token as usize) < n);
        sampling.logit_bias.retain(|&(token, _)| (token as usize) < n);
        sampling.validate(n).unwrap();
        let logits = row(kind, seed, n);
        let history = history(&sampling, &prompt, &output);
        let ids: Vec<u32> = (0..n as u32).collect();
        let support = naive(&sampling, (&prompt, &output), &ids, &logits);

        let fresh = &mut Scratch::default();
        let dirty = &mut Scratch::default();
        choose(&sampling, &history, 0, &row(1, seed, 3000), dirty);
        choose_among(&sampling, &history, 0, &[7, 3], &[0.5, 0.5], dirty);
        for scratch in [fresh, dirty] {
            let shares = distribution(&sampling, &history, &logits, scratch);
            let tokens: Vec<u32> = shares.iter().map(|&(token, _)| token).collect();
            let expected: Vec<u32> = support.iter().map(|&(_, token)| token).collect();
            prop_assert_eq!(tokens, expected);
            let total: f64 = shares.iter().map(|&(_, share)| f64::from(share)).sum();
            prop_assert!((total - 1.0).abs() < 1e-5);
            for position in (0..4).map(|i| position.wrapping_add(i)) {
                let chosen = choose(&sampling, &history, position, &logits, scratch);
                let support = gives_token(&logits).then_some(&support[..]);
                prop_assert_eq!(chosen, naive_choice(&sampling, position, support));
            }
        }
    }

    #[test]
    fn among_some_tokens_is_as_if_the_others_were_suppressed(
        sampling in samplings(),
        (kind, seed, n) in (0usize..6, any::<u64>(), 201usize..700),
        share in 1u32..5,
        output in proptest::collection::vec(0u32..200, 0..9),
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
        let support = naive(&sampling, (&[5, 6], &output), &ids, &logits);
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
        },
    ];
    let n = 200_000u64;
    let scratch = &mut Scratch::default();
    for sampling in settings {
        let history = history(&sampling, &[4, 5, 6], &[6, 9, 9]);
        let shares = distribution(&sampling, &history, &logits, scratch);
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
        let mut shares = distribution(&keyed, &history, logits, scratch);
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
        let support = naive(&sampling, (&[], &[]), &ids, &logits);
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
    let support = naive(&sampling, (&[], &[]), &ids, &logits);
    let history = History::new(&sampling, &[]);
    let shares = distribution(&sampling, &history, &logits, &mut Scratch::default());
    assert!(support.len() > 1);
    assert_eq!(shares.len(), support.len());
}
