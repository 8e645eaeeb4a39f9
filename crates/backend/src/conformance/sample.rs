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

pub(super) fn masked_logits_equal(got: &dyn Backend, want: &dyn Backend) {
    let mut noise = Noise(20);
    for row in odd_logits(&mut noise) {
        let m = row.len();
        let some = (0..m as u32)
            .filter(|_| noise.below(3) == 0)
            .collect::<Vec<_>>();
        let last = TokenMask::new(m, [m as u32 - 1]);
        // Some tokens, no mask, none, the last one.
        let masks = [
            Some(TokenMask::new(m, some)),
            None,
            Some(TokenMask::new(m, [])),
            Some(last),
        ];
        let values = row.repeat(masks.len());
        let run = |b: &dyn Backend| {
            let x = b.mask_logits(b.upload(masks.len(), m, &values), &masks);
            (b.download(&x).into_owned(), b.argmax(&x))
        };
        let (got, want) = (run(got), run(want));
        let case = format!("{m} tokens");
        same("mask_logits", &case, m, &got.0, &want.0);
        assert_eq!(got.1, want.1, "mask_logits ({case}): tokens");
        for (values, mask) in got.0.chunks_exact(m).zip(&masks) {
            let is_closed = |(token, &x): (u32, &f32)| {
                mask.as_ref().is_none_or(|mask| mask.allows(token)) || x == f32::NEG_INFINITY
            };
            assert!(
                (0..).zip(values).all(is_closed),
                "mask_logits ({case}): closed tokens"
            );
        }
    }
}
