//! Which tokens a device chooses, where it chooses any.

use super::Noise;
use crate::math::ln;
use crate::{Backend, TokenChoice, TokenList};

/// What rows of logits are like; the last kind gives no token.
const KINDS: usize = 8;

/// A row of `n` logits of a kind.
fn logits(noise: &mut Noise, kind: usize, n: usize) -> Vec<f32> {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let mut row = noise.values(n, 1.0);
    match kind {
        // Close together.
        0 => row.iter_mut().for_each(|x| *x *= 0.001),
        // A few tokens have nearly all of the mass.
        1 => row.iter_mut().for_each(|x| *x = *x * *x * *x * 30.0),
        // Many equal ones, and both zeros.
        2 => row.iter_mut().for_each(|x| *x = (*x * 4.0).round()),
        // All equal.
        3 => row.fill(-0.0),
        // The largest several times, and some that are equal only once they are scaled.
        4 => (0..4u32).for_each(|i| {
            row[noise.below(n)] = 12.0;
            row[noise.below(n)] = f32::from_bits(12.0f32.to_bits() - i);
        }),
        // Tokens that a mask took away, all but one of them perhaps.
        5 => {
            let closed = noise.below(4);
            row.iter_mut()
                .filter(|_| closed == 0 || noise.below(4) < closed)
                .for_each(|x| *x = -inf);
            row[noise.below(n)] = 0.5;
        }
        // So large that some are not finite once they are scaled.
        6 => row.iter_mut().for_each(|x| *x *= f32::MAX),
        _ => match noise.below(4) {
            0 => row.fill(-inf),
            odd => row[noise.below(n)] = [inf, nan, -nan][odd - 1],
        },
    }
    row
}

/// Every combination of temperature, top-k, top-p and min-p.
fn choices() -> Vec<TokenChoice> {
    let mut all = Vec::new();
    for temperature in [0.0f32, 0.3, 0.7, 1.0, 2.5, 1.2e-38] {
        for top_k in [0, 1, 5, 40, 3000] {
            for top_p in [1.0, 0.9, 0.5, 0.999_999_9, 1e-6] {
                for ln_min_p in [f32::NEG_INFINITY, ln(0.05), 0.0] {
                    all.push(TokenChoice {
                        seed: 0,
                        position: 0,
                        scale: if temperature > 0.0 {
                            1.0 / temperature
                        } else {
                            0.0
                        },
                        top_p,
                        ln_min_p,
                        top_k,
                        floor: f32::MIN,
                    });
                }
            }
        }
    }
    all
}

/// The least scaled logit to keep of a row: none for two thirds of the rows, else one of its own or
/// something below the largest.
fn floor(noise: &mut Noise, scale: f32, logits: &[f32]) -> f32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max) * scale;
    let any = logits[noise.below(logits.len())] * scale;
    let floor = match noise.below(6) {
        0 => any,
        1 => largest - 0.1 * noise.below(50) as f32,
        _ => f32::MIN,
    };
    if floor <= largest {
        floor.max(f32::MIN)
    } else {
        f32::MIN
    }
}

/// Compares the tokens of rows of `n` logits, a choice and a kind of logits each, among all tokens and
/// among those of a list in no order.
fn compare(
    noise: &mut Noise,
    [got, want]: [&dyn Backend; 2],
    n: usize,
    rows: &[(TokenChoice, usize)],
) {
    let values: Vec<f32> = rows
        .iter()
        .flat_map(|&(_, kind)| logits(noise, kind, n))
        .collect();
    let choices: Vec<TokenChoice> = rows
        .iter()
        .zip(values.chunks_exact(n))
        .map(|(&(choice, _), logits)| TokenChoice {
            seed: noise.next(),
            // Small and large ones.
            position: noise.next() >> noise.below(64),
            floor: floor(noise, choice.scale, logits),
            ..choice
        })
        .collect();
    let mut ids: Vec<u32> = (0..n as u32).map(|i| 3 * i + i % 3).collect();
    ids.rotate_left(n / 3);
    ids[n / 2..].reverse();
    for is_listed in [false, true] {
        let run = |b: &dyn Backend| {
            let list = is_listed.then(|| TokenList::new(b, ids.clone()));
            let x = b.upload(rows.len(), n, &values);
            b.choose_tokens(&x, list.as_ref(), &choices)
        };
        let (got, want) = (run(got), run(want));
        let case = format!("{n} tokens, list: {is_listed}");
        let (Some(got), Some(want)) = (got, want) else {
            panic!("choose_tokens ({case}): not chosen, but other rows are");
        };
        assert_eq!(got.len(), rows.len(), "choose_tokens ({case}): rows");
        for (row, (got, want)) in got.iter().zip(&want).enumerate() {
            let (choice, kind) = (choices[row], rows[row].1);
            assert_eq!(
                got, want,
                "choose_tokens ({case}): row {row} of kind {kind}, {choice:?}"
            );
        }
    }
}

pub(super) fn chosen_tokens_equal(got: &dyn Backend, want: &dyn Backend) {
    let (pair, choices) = ([got, want], choices());
    let probe = |b: &dyn Backend| b.choose_tokens(&b.upload(1, 1, &[0.0]), None, &choices[..1]);
    // A device may leave the choice to whoever asks.
    if pair.into_iter().any(|b| probe(b).is_none()) {
        return;
    }
    let mut noise = Noise(21);
    for n in [1, 5, 33, 300] {
        for kind in 0..KINDS {
            let rows: Vec<_> = choices.iter().map(|&choice| (choice, kind)).collect();
            compare(&mut noise, pair, n, &rows);
        }
    }
    // Each choice with a kind of logits, another one each time; about the ends of a GPU's blocks.
    let kinds = |first: usize| (first..).map(|i| i % KINDS);
    for (i, n) in [2048, 2049, 4099].into_iter().enumerate() {
        let rows: Vec<_> = choices.iter().copied().zip(kinds(3 * i)).collect();
        compare(&mut noise, pair, n, &rows);
    }
    let mut some = || choices[noise.below(choices.len())];
    let rows: Vec<_> = kinds(0)
        .take(3 * KINDS)
        .map(|kind| (some(), kind))
        .collect();
    compare(&mut noise, pair, 70_001, &rows);
    // Where no row of the step needs so much: none is truncated, all are greedy; one row.
    let is_whole = |c: &&TokenChoice| c.top_k == 0 && c.top_p == 1.0;
    let whole: Vec<_> = choices.iter().filter(is_whole).copied().collect();
    let greedy: Vec<_> = choices.iter().filter(|c| c.scale == 0.0).copied().collect();
    for choices in [whole, greedy, vec![choices[200]]] {
        for first in 0..KINDS {
            let rows: Vec<_> = choices.iter().copied().zip(kinds(first)).collect();
            compare(&mut noise, pair, 2500, &rows);
        }
    }
}
