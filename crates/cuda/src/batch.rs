//! A step's rows on the device, as `Batch` in kernels/common.cuh reads them.

use backend::{Batch, POSITION_AXES};

/// Page tables of a sequence that kernels can name.
pub(crate) const MAX_GROUPS: usize = 4;

/// Words before the rows.
const HEADER: usize = 4;
/// Words of a row.
const ROW: usize = 5 + POSITION_AXES;
/// Instead of the cache row that a row writes, if it only reads.
const NO_ROW: u32 = u32::MAX;
/// Words of a sequence.
const SEQ: usize = 6 + MAX_GROUPS + 2;

/// Rows, sequences and page tables, one after the other.
pub(crate) fn words(batch: &Batch) -> Vec<u32> {
    let mut words = Vec::new();
    put(&mut words, std::slice::from_ref(batch));
    words
}

/// Appends the rows and sequences of each of `batches`, one after the other, and all
/// their page tables behind them, equal ones once. Returns where each batch starts: that
/// depends on nothing but how many rows and sequences there are.
pub(crate) fn put(words: &mut Vec<u32>, batches: &[Batch]) -> Vec<usize> {
    let size = |b: &Batch| HEADER + ROW * b.rows.len() + SEQ * b.seqs.len();
    let mut end = words.len();
    let starts = batches.iter().map(|batch| {
        let start = end;
        end += size(batch);
        start
    });
    let starts: Vec<usize> = starts.collect();
    words.resize(end, 0);
    let mut last: Option<(usize, &[u32])> = None;
    for (batch, &start) in batches.iter().zip(&starts) {
        let tables = match last {
            Some((at, tables)) if tables == batch.tables => at,
            _ => words.len(),
        };
        if tables == words.len() {
            words.extend_from_slice(&batch.tables);
        }
        last = Some((tables, &batch.tables));
        fill(
            &mut words[start..start + size(batch)],
            batch,
            tables - start,
        );
    }
    starts
}

/// Rows and sequences of `batch`, whose page tables are `tables` words after `words`.
fn fill(words: &mut [u32], batch: &Batch, tables: usize) {
    let (n_rows, n_seqs) = (batch.rows.len(), batch.seqs.len());
    let rows = HEADER;
    let seqs = rows + ROW * n_rows;
    words[..HEADER].copy_from_slice(&[n_rows as u32, n_seqs as u32, rows as u32, seqs as u32]);
    for (i, row) in batch.rows.iter().enumerate() {
        let token = batch.tokens.get(i).copied().unwrap_or(0);
        let out = &mut words[rows + ROW * i..][..ROW];
        let at = row.at.unwrap_or(NO_ROW);
        out[..4].copy_from_slice(&[token, at, row.sees.start, row.sees.end]);
        out[4..4 + POSITION_AXES].copy_from_slice(&row.position.axes());
    }
    for (s, seq) in batch.seqs.iter().enumerate() {
        for r in seq.rows.clone() {
            words[rows + ROW * r + ROW - 1] = s as u32;
        }
        assert!(
            seq.tables.len() <= MAX_GROUPS,
            "{} groups of layers",
            seq.tables.len()
        );
        let out = &mut words[seqs + SEQ * s..][..SEQ];
        let numbers = [
            seq.rows.start,
            seq.rows.len(),
            seq.slot,
            usize::from(seq.is_new),
            seq.kept,
            seq.certain,
        ];
        let starts = seq.tables.iter().map(|t| tables + t.start);
        for (out, n) in out.iter_mut().zip(numbers.into_iter().chain(starts)) {
            *out = n as u32;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::{BatchSeq, CacheRows, Position, Row};

    #[test]
    fn kernels_find_rows_sequences_and_pages() {
        let row = |at| Row {
            at: Some(at),
            sees: CacheRows {
                start: at - 3,
                end: at + 2,
            },
            position: Position::new([at + 10, at + 20, at + 30]),
        };
        let seq = |rows, slot, tables| BatchSeq {
            rows,
            slot,
            is_new: slot == 3,
            kept: 2,
            certain: 1,
            tables,
        };
        let batch = Batch {
            tokens: vec![7, 8, 9],
            rows: vec![row(4), Row::reader(5), row(70)],
            media: Vec::new(),
            seqs: vec![
                seq(0..2, 3, vec![0..1, 1..3]),
                seq(2..3, 1, vec![3..5, 5..6]),
            ],
            tables: vec![40, 41, 42, 43, 44, 45],
        };
        // Alone, and behind others, one of which has the same tables.
        let mut all = vec![9; 6];
        let other = Batch {
            tables: vec![5, 6],
            ..Batch::default()
        };
        let three = [other, batch.clone(), batch.clone()];
        let starts = put(&mut all, &three);
        assert_eq!(starts[..2], [6, 10]);
        assert_eq!(all[all.len() - 8..], [5, 6, 40, 41, 42, 43, 44, 45]);
        check(&words(&batch));
        check(&all[starts[1]..]);
        check(&all[starts[2]..]);
    }

    fn check(w: &[u32]) {
        assert_eq!(w[..2], [3, 2]);
        let row = |r: usize| &w[w[2] as usize + 8 * r..][..8];
        assert_eq!(row(0), [7, 4, 1, 6, 14, 24, 34, 0]);
        assert_eq!(row(1), [8, NO_ROW, 0, 5, 5, 5, 5, 0]);
        assert_eq!(row(2), [9, 70, 67, 72, 80, 90, 100, 1]);
        let seq = |s: usize| &w[w[3] as usize + 12 * s..];
        assert_eq!(seq(0)[..6], [0, 2, 3, 1, 2, 1]);
        assert_eq!(seq(1)[..6], [2, 1, 1, 0, 2, 1]);
        assert_eq!(w[seq(0)[7] as usize..][..2], [41, 42]);
        assert_eq!(w[seq(1)[6] as usize..][..2], [43, 44]);
    }
}
