//! Logits after penalties, biases and suppression.

use super::{Noise, same};
use crate::{Backend, Edit, RowEdits};

/// Numbers that edits are made of: some of common sizes, some that are rounded or overflow.
const NUMBERS: &[f32] = &[
    1.1,
    1.0,
    0.3,
    1.2,
    3.0,
    0.7,
    1e-3,
    16_777_217.0,
    1e30,
    1e-40,
    3.4e38,
];

/// Any edit.
fn any_edit(noise: &mut Noise) -> Edit {
    let x = NUMBERS[noise.below(NUMBERS.len())];
    match noise.below(5) {
        0 => Edit::Suppress,
        1 | 2 => Edit::Divide(x),
        3 => Edit::Add(-x),
        _ => Edit::Add(x),
    }
}

/// Edits of rows of `cols` logits, of each kind.
fn rows_of_edits(noise: &mut Noise, cols: usize) -> Vec<Vec<(u32, Edit)>> {
    let last = cols as u32 - 1;
    // Of several edits of a column each has to see the result of the one before.
    let chain = [
        Edit::Divide(3.0),
        Edit::Add(-0.7),
        Edit::Add(1e-3),
        Edit::Divide(1.1),
    ];
    let far_apart = [last, 0, last / 2, 0, last, last / 2, 0, last];
    let edit = |(i, column): (usize, u32)| (column, chain[i % 4]);
    let mut some = |n: usize| -> Vec<(u32, Edit)> {
        let one = |_| (noise.below(cols) as u32, any_edit(noise));
        (0..n).map(one).collect()
    };
    vec![
        some(cols.min(50)),
        vec![],
        far_apart.into_iter().enumerate().map(edit).collect(),
        some(3 * cols.min(2000)),
        (0..=last)
            .map(|column| (column, Edit::Divide(3.0)))
            .collect(),
        (0..=last).map(|column| (column, Edit::Suppress)).collect(),
        vec![(last, Edit::Add(-0.1))],
        some(1),
    ]
}

/// The definition once more, a logit at a time, by looking through all edits.
fn naive(logits: &[f32], edits: &[(u32, Edit)]) -> Vec<f32> {
    let edited = logits.iter().enumerate().map(|(column, &logit)| {
        if logit.is_nan() || logit == f32::INFINITY {
            return logit;
        }
        let mut l = logit;
        for &(_, edit) in edits.iter().filter(|(c, _)| *c as usize == column) {
            l = match edit {
                Edit::Divide(r) => {
                    if l > 0.0 {
                        l / r
                    } else {
                        l * r
                    }
                }
                Edit::Add(x) => l + x,
                Edit::Suppress => f32::NEG_INFINITY,
            };
        }
        l
    });
    edited.collect()
}

pub(super) fn edited_logits_equal(got: &dyn Backend, want: &dyn Backend) {
    let mut noise = Noise(23);
    let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 1e-40];
    // One block of a GPU's threads and one more or less, among them.
    for cols in [1, 3, 64, 255, 256, 257, 1000, 70_001] {
        let of_rows = rows_of_edits(&mut noise, cols);
        let mut values = noise.values(of_rows.len() * cols, 9.0);
        // Some rows with logits that are not numbers, the one without edits and the one that is
        // suppressed among them.
        for (row, logits) in values.chunks_exact_mut(cols).enumerate() {
            for value in odd.into_iter().filter(|_| row % 4 < 2) {
                logits[noise.below(cols)] = value;
            }
        }
        let edits: Vec<RowEdits> = of_rows.iter().cloned().map(RowEdits::new).collect();
        // Together, and each alone.
        let alone = (0..edits.len()).map(|row| row..row + 1);
        for rows in std::iter::once(0..edits.len()).chain(alone) {
            let values = &values[rows.start * cols..rows.end * cols];
            let edits = &edits[rows.clone()];
            let run = |b: &dyn Backend| {
                let x = b.edit_logits(b.upload(rows.len(), cols, values), edits);
                assert_eq!(
                    (x.rows(), x.cols()),
                    (rows.len(), cols),
                    "edit_logits: shape"
                );
                (b.download(&x).into_owned(), b.argmax(&x))
            };
            let (got, want) = (run(got), run(want));
            let case = format!("rows {rows:?} of {cols} tokens");
            same("edit_logits", &case, cols, &got.0, &want.0);
            assert_eq!(got.1, want.1, "edit_logits ({case}): tokens");
            if cols > 1000 && rows.len() > 1 {
                continue;
            }
            // What the definition says, without the reference.
            let by_row = got.0.chunks_exact(cols).zip(values.chunks_exact(cols));
            for ((got, logits), edits) in by_row.zip(&of_rows[rows.clone()]) {
                if edits.len() * cols < 1_000_000 {
                    same("edit_logits", &case, cols, got, &naive(logits, edits));
                }
            }
        }
    }
}
