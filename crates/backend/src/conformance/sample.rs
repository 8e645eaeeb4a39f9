//! What rows of logits say of tokens.

use super::{Noise, same};
use crate::{Backend, TokenMask};

/// Rows of logits, some of them with equal values and such that are not numbers.
pub(super) fn odd_logits(noise: &mut Noise) -> Vec<Vec<f32>> {
    let (inf, nan) = (f32::INFINITY, f32::NAN);
    let mut rows: Vec<Vec<f32>> = vec![
        vec![1.0],
        vec![-inf; 40],
        vec![-0.0, 0.0, -0.0],
        vec![0.0, -0.0],
        vec![nan, 1.0, 2.0],
        vec![1.0, nan, 2.0, nan, 2.0],
        vec![-1.0, inf, inf],
        [vec![0.0; 1000], vec![1.0; 1000]].concat(),
    ];
    for n in [5, 16, 33, 300, 70_001] {
        let mut row = noise.values(n, 1.0);
        rows.push(row.clone());
        // The largest value several times, the first of them anywhere.
        for _ in 0..3 {
            row[noise.below(n)] = 2.0;
        }
        rows.push(row);
    }
    rows
}

pub(super) fn argmax_equals(got: &dyn Backend, want: &dyn Backend) {
    let mut noise = Noise(10);
    let mut rows = odd_logits(&mut noise);
    // Rows that give no token, wherever the reason is.
    for n in [1, 5, 16, 33, 300, 2049, 70_001] {
        rows.push(vec![f32::NEG_INFINITY; n]);
        for value in [f32::NAN, -f32::NAN, f32::INFINITY] {
            for at in [0, n - 1, noise.below(n)] {
                let mut row = noise.values(n, 1.0);
                row[at] = value;
                rows.push(row);
            }
        }
    }
    for row in rows {
        let values = [row.clone(), row.iter().rev().copied().collect()].concat();
        let run = |b: &dyn Backend| b.argmax(&b.upload(2, row.len(), &values));
        assert_eq!(
            run(got),
            run(want),
            "argmax of {} values from {:?} on",
            row.len(),
            &row[..row.len().min(5)]
        );
    }
}

pub(super) fn likeliest_equals(got: &dyn Backend, want: &dyn Backend) {
    let mut noise = Noise(19);
    for row in odd_logits(&mut noise) {
        let m = row.len();
        // Far apart, so that many of them weigh nothing.
        let apart = row.iter().rev().map(|x| x * 30.0);
        let values: Vec<f32> = row.iter().copied().chain(apart).collect();
        let mut any = || noise.below(m) as u32;
        let asked = [(1, 0), (0, m as u32 - 1), (1, any()), (0, any())];
        for n in [0, 1, 3, 20] {
            let run = |b: &dyn Backend| b.likeliest(&b.upload(2, m, &values), &asked, n);
            assert_eq!(
                run(got),
                run(want),
                "likeliest {n} of {m} values from {:?} on",
                &row[..m.min(5)]
            );
        }
    }
}

pub(super) fn moments_equal(got: &dyn Backend, want: &dyn Backend) {
    let mut noise = Noise(24);
    for row in odd_logits(&mut noise) {
        let m = row.len();
        // Far apart, so that distances are as large as they count; and with some that are -inf.
        let apart = row.iter().map(|x| x * 3000.0);
        let some = row.iter().enumerate();
        let some = some.map(|(i, &x)| {
            if i % 3 == 1 {
                f32::NEG_INFINITY
            } else {
                x * 20.0
            }
        });
        let values: Vec<f32> = row.iter().copied().chain(apart).chain(some).collect();
        for rows in [vec![0, 1, 2], vec![2], vec![1, 0, 1], vec![]] {
            let run = |b: &dyn Backend| b.moments(&b.upload(3, m, &values), &rows);
            let case = format!("rows {rows:?} of {m} values from {:?} on", &row[..m.min(5)]);
            assert_eq!(run(got), run(want), "moments ({case})");
        }
    }
}

/// Rows of a vocabulary of `n_tokens`, with some that are not numbers, with each kind of mask.
fn masked_rows(noise: &mut Noise, n_tokens: usize) -> Vec<(Vec<f32>, Option<TokenMask>)> {
    let mask = |allowed: &mut dyn Iterator<Item = u32>| Some(TokenMask::new(n_tokens, allowed));
    let all = || 0..n_tokens as u32;
    let masks = [
        mask(&mut all().filter(|_| noise.below(3) == 0)),
        None,
        mask(&mut [].into_iter()),
        mask(&mut all()),
        mask(&mut all().skip(n_tokens - 1)),
        mask(&mut all().filter(|token| token / 32 % 2 == 1)),
    ];
    let odd = [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0];
    let mut rows = Vec::new();
    for mask in masks {
        let sound = noise.values(n_tokens, 1.0);
        let mut row = sound.clone();
        for value in odd {
            row[noise.below(n_tokens)] = value;
        }
        rows.extend([(sound, mask.clone()), (row, mask)]);
    }
    rows
}

pub(super) fn masked_logits_equal(got: &dyn Backend, want: &dyn Backend) {
    let mut noise = Noise(20);
    // Whole words of 32 tokens, lines of 1024 and parts of a GPU's blocks, and one more or less.
    for m in [
        1, 3, 31, 32, 33, 64, 65, 1000, 1024, 1025, 2047, 2048, 2049, 4128, 70_001,
    ] {
        let rows = masked_rows(&mut noise, m);
        // Together, those with a mask, those without, and one.
        let with: Vec<_> = rows.iter().filter(|(_, mask)| mask.is_some()).collect();
        let without: Vec<_> = rows.iter().filter(|(_, mask)| mask.is_none()).collect();
        for rows in [rows.iter().collect(), with.clone(), without, vec![with[0]]] {
            let masks: Vec<_> = rows.iter().map(|(_, mask)| mask.clone()).collect();
            let values: Vec<f32> = rows.iter().flat_map(|(row, _)| row).copied().collect();
            let run = |b: &dyn Backend| {
                let x = b.mask_logits(b.upload(rows.len(), m, &values), &masks);
                (b.download(&x).into_owned(), b.argmax(&x))
            };
            let (got, want) = (run(got), run(want));
            let case = format!("{} rows of {m} tokens", rows.len());
            same("mask_logits", &case, m, &got.0, &want.0);
            assert_eq!(got.1, want.1, "mask_logits ({case}): tokens");
            // What the masks say, without the reference.
            let by_row = got.0.chunks_exact(m).zip(rows);
            for (got, (logits, mask)) in by_row {
                let masked = |token| mask.as_ref().is_some_and(|mask| !mask.allows(token));
                let logit = |(token, &x)| if masked(token) { f32::NEG_INFINITY } else { x };
                let want: Vec<f32> = (0..).zip(logits).map(logit).collect();
                same("mask_logits", &case, m, got, &want);
            }
        }
    }
}
