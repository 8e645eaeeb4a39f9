//! Products and looked up rows.

use super::{Noise, Pair, formats, independent, same, stored, width};
use crate::{Backend, Matrix, Tensor};
use quant::{Format, Owned};

pub(super) fn embed_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(1);
    for format in formats() {
        for (rows, cols) in [(1, 1), (17, 33), (50, 100)] {
            let cols = width(format, cols);
            let parts = [
                stored(&mut noise, format, rows, cols),
                stored(&mut noise, format, 3, cols),
            ];
            let tables = pair.each(|b| b.matrix(&parts.each_ref().map(Owned::view)));
            for n in [1, 5] {
                let tokens: Vec<u32> = (0..n).map(|_| noise.below(rows + 3) as u32).collect();
                for scale in [1.0, 16.0, 0.3] {
                    let case = format!(
                        "{} [{rows} + 3, {cols}], tokens {tokens:?} times {scale}",
                        format.name
                    );
                    let (x, y) = (
                        got.embed(&tables.0, &tokens, scale),
                        want.embed(&tables.1, &tokens, scale),
                    );
                    pair.compare_tensors("embed", &case, &x, &y);
                }
            }
        }
    }
}

pub(super) fn matmul_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(2);
    // Rows of x against each shape of weights; wide ones cross any blocking.
    let mut shapes = vec![
        (1, 1, vec![1, 3]),
        (17, 7, vec![2]),
        (50, 33, (1..=17).collect()),
        (130, 100, vec![1, 8]),
    ];
    shapes.extend([(16, 600, vec![1, 4, 9]), (40, 1030, vec![1, 2, 20, 37])]);
    for format in formats() {
        for (rows, cols, ns) in &shapes {
            let cols = width(format, *cols);
            let w = stored(&mut noise, format, *rows, cols);
            let w = pair.each(|b| b.matrix(&[w.view()]));
            for &n in ns {
                let x = noise.values(n * cols, 2.0);
                let case = format!("{} [{rows}, {cols}] by {n} rows", format.name);
                let y = (
                    got.matmul(&got.upload(n, cols, &x), &w.0),
                    want.matmul(&want.upload(n, cols, &x), &w.1),
                );
                pair.compare_tensors("matmul", &case, &y.0, &y.1);
            }
        }
    }
    // Several matrices of one input, of different formats, some in parts.
    let cols = 256;
    let parts: Vec<Owned> = formats()
        .iter()
        .map(|f| stored(&mut noise, f, 1 + noise_rows(f), cols))
        .collect();
    let load = |b: &dyn Backend| -> Vec<Matrix> {
        parts
            .iter()
            .map(|p| b.matrix(&[p.view()]))
            .chain([
                b.matrix(&[parts[3].view(), parts[3].view()]),
                b.matrix(&[parts[0].view(), parts[2].view()]),
            ])
            .collect()
    };
    let w = pair.each(load);
    for n in [1, 2, 11] {
        let x = noise.values(n * cols, 2.0);
        let run = |b: &dyn Backend, w: &[Matrix]| {
            let mut y: Vec<Tensor> = w.iter().map(|w| b.scratch(n, w.rows)).collect();
            b.matmul_into(
                &b.upload(n, cols, &x),
                &w.iter().collect::<Vec<_>>(),
                &mut y,
            );
            y
        };
        for (i, (x, y)) in run(got, &w.0).iter().zip(&run(want, &w.1)).enumerate() {
            pair.compare_tensors("matmul", &format!("matrix {i} of a group, {n} rows"), x, y);
        }
    }
}

/// Some number of rows that differs between formats.
pub(super) fn noise_rows(format: &Format) -> usize {
    format.name.bytes().map(usize::from).sum::<usize>() % 70
}

pub(super) fn matmul_rows_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(3);
    for format in formats() {
        let (rows, cols) = (90, width(format, 40));
        let w = stored(&mut noise, format, rows, cols);
        let w = pair.each(|b| b.matrix(&[w.view()]));
        for (n, m) in [(1, 1), (3, 16), (2, 37)] {
            let x = noise.values(n * cols, 2.0);
            let scattered = (0..n)
                .map(|_| (0..m).map(|_| noise.below(rows) as u32).collect())
                .collect();
            let neighbours = (0..n)
                .map(|i| (0..m as u32).map(|id| 16 * i as u32 + id).collect())
                .collect();
            for ids in [scattered, neighbours] as [Vec<Vec<u32>>; 2] {
                let case = format!("{} [{rows}, {cols}], rows {ids:?}", format.name);
                let x = pair.each(|b| b.upload(n, cols, &x));
                let y = (
                    got.matmul_rows(&x.0, &w.0, &ids),
                    want.matmul_rows(&x.1, &w.1, &ids),
                );
                pair.compare_tensors("matmul_rows", &case, &y.0, &y.1);
            }
        }
    }
}

pub(super) fn matmul_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(11);
    for format in formats() {
        for (rows, cols) in [(50, 100), (40, 600), (300, 70)] {
            let cols = width(format, cols);
            let w = b.matrix(&[stored(&mut noise, format, rows, cols).view()]);
            let n = 21;
            let x = noise.values(n * cols, 2.0);
            let case = format!("{} [{rows}, {cols}]", format.name);
            independent("matmul", &case, b, n, |r| {
                b.matmul(
                    &b.upload(r.len(), cols, &x[r.start * cols..r.end * cols]),
                    &w,
                )
            });
            // Chosen rows are those of the whole product.
            let y = b.matmul(&b.upload(n, cols, &x), &w);
            let ids: Vec<Vec<u32>> = (0..n)
                .map(|_| (0..20).map(|_| noise.below(rows) as u32).collect())
                .collect();
            let some = b.matmul_rows(&b.upload(n, cols, &x), &w, &ids);
            let all = b.download(&y);
            let picked: Vec<f32> = ids
                .iter()
                .enumerate()
                .flat_map(|(r, ids)| ids.iter().map(move |&id| r * rows + id as usize))
                .map(|i| all[i])
                .collect();
            same("matmul_rows", &case, 20, &b.download(&some), &picked);
        }
    }
}
