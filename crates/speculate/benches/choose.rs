//! Time of one choice among 262,144 tokens: `cargo bench -p speculate --bench choose`.

use speculate::noise::gumbel;
use speculate::sample::{History, Sampling, Scratch, choose};
use std::time::Instant;

const VOCAB: usize = 262_144;
const ROWS: usize = 16;
const REPEATS: usize = 12;

/// A normal variable (central limit of 4), good enough to have a bell's tails.
fn normal(seed: u64, token: u32) -> f32 {
    let sum: f32 = (0..4)
        .map(|lane| gumbel(seed, lane, token) - gumbel(seed, 9 + lane, token))
        .sum();
    sum / (8.0 * std::f32::consts::PI.powi(2) / 6.0).sqrt()
}

fn main() {
    // `peaked` is what a trained model gives: a bulk far below a few hundred
    // tokens. `flat` is hard: most of the vocabulary matters.
    let peaked = |seed: u64, token: u32| {
        let bulk = -18.0 + 2.5 * normal(seed, token);
        if token.is_multiple_of(997) {
            bulk + 14.0 + 2.0 * gumbel(seed, 20, token)
        } else {
            bulk
        }
    };
    let flat = |seed: u64, token: u32| 2.0 * normal(seed, token);
    let greedy = Sampling::default();
    let settings = [
        ("greedy", greedy.clone()),
        (
            "T=1",
            Sampling {
                temperature: 1.0,
                ..greedy.clone()
            },
        ),
        (
            "T=0.7 top-p 0.9",
            Sampling {
                temperature: 0.7,
                top_p: 0.9,
                ..greedy.clone()
            },
        ),
        (
            "T=0.7 top-k 40",
            Sampling {
                temperature: 0.7,
                top_k: 40,
                ..greedy.clone()
            },
        ),
        (
            "T=1 min-p 0.05",
            Sampling {
                temperature: 1.0,
                min_p: 0.05,
                ..greedy.clone()
            },
        ),
        (
            "T=0.7 top-k 40 top-p 0.9, penalties",
            Sampling {
                temperature: 0.7,
                top_k: 40,
                top_p: 0.9,
                repetition_penalty: 1.1,
                ..greedy.clone()
            },
        ),
        (
            "T=1 typical-p 0.9",
            Sampling {
                temperature: 1.0,
                typical_p: 0.9,
                ..greedy.clone()
            },
        ),
        (
            "T=1 top-n-sigma 1",
            Sampling {
                temperature: 1.0,
                top_n_sigma: 1.0,
                ..greedy.clone()
            },
        ),
        (
            "T=1±0.5 min-p 0.05, XTC",
            Sampling {
                temperature: 1.0,
                dynatemp_range: 0.5,
                min_p: 0.05,
                xtc_probability: 0.5,
                ..greedy.clone()
            },
        ),
        (
            "T=0.7 top-k 40, DRY",
            Sampling {
                temperature: 0.7,
                top_k: 40,
                dry_multiplier: 0.8,
                ..greedy
            },
        ),
    ];
    type Logit<'a> = &'a dyn Fn(u64, u32) -> f32;
    for (name, logit) in [("peaked", &peaked as Logit<'_>), ("flat", &flat)] {
        let rows: Vec<Vec<f32>> = (0..ROWS as u64)
            .map(|seed| (0..VOCAB as u32).map(|token| logit(seed, token)).collect())
            .collect();
        for (setting, sampling) in &settings {
            let prompt: Vec<u32> = (0..1000).map(|i| i * 251).collect();
            let history = History::new(sampling, &prompt);
            let scratch = &mut Scratch::default();
            if *setting == "T=1" {
                // The answer, before the time.
                let scores = (0..)
                    .zip(&rows[0])
                    .map(|(token, l)| (l + gumbel(0, 5, token), token));
                let best = scores
                    .max_by(|a, b| a.0.total_cmp(&b.0))
                    .expect("a vocabulary")
                    .1;
                assert_eq!(choose(sampling, &history, 5, &rows[0], scratch), best);
            }
            let mut micros = Vec::new();
            for i in 0..ROWS * REPEATS {
                let start = Instant::now();
                std::hint::black_box(choose(
                    sampling,
                    &history,
                    i as u64,
                    &rows[i % ROWS],
                    scratch,
                ));
                micros.push(start.elapsed().as_secs_f64() * 1e6);
            }
            micros.sort_by(f64::total_cmp);
            let (least, median) = (micros[0], micros[micros.len() / 2]);
            println!("{name:7} {setting:36} least {least:6.0} µs, median {median:6.0} µs");
        }
    }
}
