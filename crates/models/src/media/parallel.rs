//! Host work on rows by several threads: what a device has no op for.

use std::num::NonZeroUsize;

/// Threads, at most: rows come faster than memory takes them with more.
const THREADS: usize = 8;

/// Rows that are worth a thread.
const ROWS: usize = 32;

/// Has `work` fill each row of `cols` of `values`, whose number it is told.
pub(crate) fn in_parallel(
    values: &mut [f32],
    cols: usize,
    work: impl Fn(usize, &mut [f32]) + Sync,
) {
    let n = values.len() / cols;
    let part = |first: usize, rows: &mut [f32]| {
        let rows = rows.chunks_exact_mut(cols);
        (first..).zip(rows).for_each(|(at, row)| work(at, row));
    };
    // How many cores there are is read from files.
    if n <= ROWS {
        return part(0, values);
    }
    let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let each = n.div_ceil(cores.min(THREADS)).max(ROWS);
    std::thread::scope(|scope| {
        for (first, rows) in (0..).step_by(each).zip(values.chunks_mut(each * cols)) {
            let part = &part;
            scope.spawn(move || part(first, rows));
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_row_is_filled_once() {
        for n in [0, 1, 31, 33, 64, 1000] {
            let mut values = vec![0.0; 3 * n];
            in_parallel(&mut values, 3, |at, row| {
                row.iter_mut().for_each(|x| *x += 1.0 + at as f32);
            });
            let want = (0..n).flat_map(|at| [1.0 + at as f32; 3]);
            assert_eq!(values, want.collect::<Vec<_>>());
        }
    }
}
