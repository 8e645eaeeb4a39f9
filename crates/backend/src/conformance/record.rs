//! Steps and chains that a device may record: a record does what its ops do, with other numbers.

use super::{Noise, same, stored};
use crate::{
    Backend, Batch, Chain, Link, Matrix, Row, StepKey, Tensor, TokenChoice, TokenGroups, TokenList,
    TokenMask,
};
use quant::BF16;

const COLS: usize = 64;
const VOCAB: usize = 1000;
const ROWS: usize = 3;

/// Rows of some tokens, which no op of these cases looks at more closely.
fn batch(tokens: [u32; ROWS]) -> Batch {
    Batch {
        tokens: tokens.into(),
        rows: vec![Row::text(0); ROWS],
        ..Batch::default()
    }
}

fn matrix(b: &dyn Backend, noise: &mut Noise, rows: usize) -> Matrix {
    b.matrix(&[stored(noise, &BF16, rows, COLS).view()])
}

/// A step's key that comes again, with other tokens and inputs, has the results of its ops.
pub(super) fn steps_follow_their_batch(b: &dyn Backend) {
    let mut noise = Noise(41);
    let (table, w) = (matrix(b, &mut noise, VOCAB), matrix(b, &mut noise, COLS));
    let weight = b.upload(1, COLS, &noise.values(COLS, 1.0));
    let key = StepKey::fresh();
    // Run, recorded, replayed.
    for turn in 0..4 {
        let batch = batch([turn, 7 * turn, VOCAB as u32 - 1 - turn]);
        let values = noise.values(ROWS * COLS, 1.0);
        let work = |x: &Tensor| {
            let sum = b.add(b.embed(&table, &batch.tokens, 1.0), x);
            let y = b.matmul(&b.rms_norm(&sum, Some(&weight), COLS, 1e-6), &w);
            vec![b.add(y, &sum), sum]
        };
        let x = b.upload(ROWS, COLS, &values);
        let mut made = b.step(key, &batch, &[&x], &mut |inputs| work(inputs[0]));
        let got: Vec<Vec<f32>> = made.iter().map(|y| b.download(y).into_owned()).collect();
        let want = work(&b.upload(ROWS, COLS, &values));
        let case = format!("turn {turn}");
        for (got, want) in got.iter().zip(&want) {
            same("step", &case, COLS, got, &b.download(want));
        }
        // What a step has made may be masked where it lies.
        let odd = Some(TokenMask::new(COLS, (1..COLS as u32).step_by(2)));
        let masks = [odd.clone(), None, odd];
        let masked = b.mask_logits(made.remove(0), &masks);
        let mut want = got[0].clone();
        TokenMask::apply(&masks, COLS, &mut want);
        same("step", &case, COLS, &b.download(&masked), &want);
        same("step", &case, COLS, &b.download(&made[0]), &got[1]);
    }
}

/// Chosen groups of a matrix' rows have the products of [`crate::Ops::matmul_rows`].
pub(super) fn groups_are_chosen_rows(b: &dyn Backend) {
    let mut noise = Noise(42);
    let w = matrix(b, &mut noise, VOCAB);
    let ids: Vec<u32> = (0..800).map(|i| (i * 7 % VOCAB) as u32).collect();
    let groups = TokenGroups::new(b, ids, 8, 32);
    let mut scores = noise.values(ROWS * 100, 1.0);
    // Not a number, equal ones, and a zero of the other sign.
    scores[7] = f32::NAN;
    (scores[40], scores[41], scores[90]) = (0.9, 0.9, -0.0);
    let x = b.upload(ROWS, COLS, &noise.values(ROWS * COLS, 1.0));
    let by_row: Vec<Vec<u32>> = scores.chunks(100).map(|row| groups.best(row)).collect();
    let want = b.matmul_rows(&x, &w, &by_row);
    let made = b.matmul_groups(&x, &w, &b.upload(ROWS, 100, &scores), &groups);
    let [got, ids] = made.map(|x| b.download(&x).into_owned());
    let want = b.download(&want);
    for (row, want_ids) in by_row.iter().enumerate() {
        let part = row * want_ids.len()..(row + 1) * want_ids.len();
        let pairs = ids[part.clone()].iter().map(|id| id.to_bits());
        let mut pairs: Vec<(u32, f32)> = pairs.zip(got[part.clone()].iter().copied()).collect();
        pairs.sort_unstable_by_key(|pair| pair.0);
        let (ids, got): (Vec<u32>, Vec<f32>) = pairs.into_iter().unzip();
        assert_eq!(
            &ids, want_ids,
            "matmul_groups (row {row}): rows of the matrix"
        );
        let case = format!("row {row}");
        same("matmul_groups", &case, ids.len(), &got, &want[part]);
    }
}

/// The tokens of a chain, if the device has chains, are those of its steps one by one.
pub(super) fn chains_choose_what_single_steps_do(b: &dyn Backend) {
    let mut noise = Noise(43);
    let steps = 4;
    let table = matrix(b, &mut noise, VOCAB);
    let odd: Vec<u32> = (0..VOCAB as u32 / 2).map(|i| 2 * i + 1).rev().collect();
    for (scale, top_p, top_k) in [
        (0.0, 1.0, 0),
        (0.5, 1.0, 0),
        (0.5, 0.9, 0),
        (0.3, 0.8, 20),
        (0.01, 1.0, 600),
    ] {
        for list in [None, Some(TokenList::new(b, odd.clone()))] {
            let head_rows = list.as_ref().map_or(VOCAB, |list| list.ids().len());
            let head = matrix(b, &mut noise, head_rows);
            let key = StepKey::fresh();
            // Run, recorded, replayed.
            for turn in 0..4 {
                let link = |batch: &Batch, x: &Tensor| {
                    let next = b.add(b.embed(&table, &batch.tokens, 1.0), x);
                    (b.matmul(&next, &head), next)
                };
                let choice = |step: u64, row: u64| TokenChoice {
                    seed: turn,
                    position: step << 32 | row,
                    scale,
                    top_p,
                    ln_min_p: [f32::NEG_INFINITY, -2.0][row as usize % 2],
                    top_k,
                    floor: f32::MIN,
                };
                let step = |i| (0..ROWS as u64).map(|row| choice(i, row)).collect();
                let choices: Vec<Vec<TokenChoice>> = (0..steps as u64).map(step).collect();
                let mut batch = batch([turn as u32, 7, VOCAB as u32 - 1]);
                let start = noise.values(ROWS * COLS, 1.0);
                let chain = Chain {
                    key,
                    batches: &vec![batch.clone(); steps],
                    choices: &choices,
                    list: list.as_ref(),
                    wants_confidences: true,
                };
                let mut x = b.upload(ROWS, COLS, &start);
                let made = b.chain(&chain, &x, &mut |_, batch, x| {
                    let (logits, next) = link(batch, x);
                    Link {
                        logits,
                        ids: None,
                        next: Some(next),
                    }
                });
                let Some(made) = made else { return };
                for (step, (choices, got)) in choices.iter().zip(&made.tokens).enumerate() {
                    let (logits, next) = link(&batch, &x);
                    let want = b.choose_tokens(&logits, list.as_ref(), choices);
                    let case = format!("{scale} {top_p} {top_k}, turn {turn}");
                    assert_eq!(Some(got), want.as_ref(), "chain ({case}): tokens");
                    let told = &made.confidences[step];
                    let rows = b.download(&logits);
                    for (told, row) in told.iter().zip(rows.chunks_exact(logits.cols())) {
                        let want = crate::confidence(row);
                        assert!(
                            (told - want).abs() < 1e-3,
                            "chain ({case}): confidence {told} of {want}"
                        );
                    }
                    assert_eq!(*told, b.confidences(&logits), "chain ({case}): confidences");
                    (batch.tokens, x) = (got.clone(), next);
                }
                let next = made.next.expect("every link passes something on");
                same(
                    "chain",
                    "passed on",
                    COLS,
                    &b.download(&next),
                    &b.download(&x),
                );
            }
        }
    }
}
