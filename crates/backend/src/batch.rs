//! One step's rows: which sequence each belongs to, what it writes and sees there, and
//! where the cache rows lie. Made by `cache`, read by every op that looks at memory.

use std::ops::Range;

/// Rows of a page of keys and values, and keys of one attention tile.
pub const PAGE_ROWS: usize = 64;

/// Rows of one sequence in one step that may still be rolled back, at most.
pub const MAX_TENTATIVE: usize = 16;

/// A page table's entry for rows that have left every window.
pub const NO_PAGE: u32 = u32::MAX;

/// Consecutive cache rows of one sequence, `start..end`: a [`Range`] that can be copied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheRows {
    /// The first one.
    pub start: u32,
    /// One more than the last.
    pub end: u32,
}

/// Axes of a [`Position`].
pub const POSITION_AXES: usize = 3;

/// Where a row stands for rotary embeddings. Text has one number; of an image or a video,
/// time, height and width differ ([`crate::Rope::axes`] says which pairs read which).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position([u32; POSITION_AXES]);

impl Position {
    /// A position of one number by axis.
    pub const fn new(axes: [u32; POSITION_AXES]) -> Self {
        Position(axes)
    }

    /// A position of text: one number on every axis.
    pub const fn text(position: u32) -> Self {
        Position([position; POSITION_AXES])
    }

    /// The numbers, by axis.
    #[inline]
    pub const fn axes(self) -> [u32; POSITION_AXES] {
        self.0
    }
}

/// One row of a step: what it writes, what it sees and where it stands.
///
/// Along a sequence's rows, neither end of what they see may decrease, so the first row's
/// start and the last row's end enclose what all of them see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The cache row that it writes; none if it only reads.
    pub at: Option<u32>,
    /// The cache rows that it may see, at least one; an attention's window can leave fewer
    /// ([`crate::Attention::visible`]). They may go beyond `at`, to the end of an image whose
    /// rows see each other: all rows of a step are written before one of them is read.
    pub sees: CacheRows,
    /// The row's position for rotary embeddings.
    pub position: Position,
}

impl Row {
    /// The row of a token of text: written as cache row `at`, it sees the rows up to itself,
    /// and its position is `at`.
    pub const fn text(at: u32) -> Self {
        Row {
            at: Some(at),
            sees: CacheRows {
                start: 0,
                end: at + 1,
            },
            position: Position::text(at),
        }
    }

    /// A row that reads the first `n` cache rows and writes none; its position is the next
    /// one, `n`.
    pub const fn reader(n: u32) -> Self {
        Row {
            at: None,
            sees: CacheRows { start: 0, end: n },
            position: Position::text(n),
        }
    }

    /// The cache row from which windows count back: its own, or the one after all that it
    /// reads.
    #[inline]
    pub const fn own(self) -> u32 {
        match self.at {
            Some(at) => at,
            None => self.sees.end,
        }
    }
}

/// A row whose input is no token's embedding but comes from elsewhere, such as a vision
/// tower ([`Ops::replace_rows`](crate::Ops::replace_rows)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MediaRow {
    /// The row of the step.
    pub row: u32,
    /// Which of the step's tensors of embeddings has its input.
    pub source: u32,
    /// The row of that tensor.
    pub embedding: u32,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSeq {
    /// The sequence's rows in the batch, consecutive and ascending in position.
    pub rows: Range<usize>,
    /// The slot of the sequence's recurrent state.
    pub slot: usize,
    /// Whether the recurrent state starts from zero.
    pub is_new: bool,
    /// How many of the previous step's tentative rows turned out to stay.
    pub kept: usize,
    /// Leading rows of this step that will never be rolled back.
    pub certain: usize,
    /// Where its page tables start in [`Batch::tables`], by group.
    pub tables: Vec<Range<usize>>,
}

/// One step over rows of several sequences.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Batch {
    /// Token of each row; of a [`MediaRow`], the token that stands for it in the text.
    pub tokens: Vec<u32>,
    /// The rows whose inputs are not their tokens' embeddings, ascending.
    pub media: Vec<MediaRow>,
    /// What each row writes and sees.
    pub rows: Vec<Row>,
    /// Sequences, covering the rows in order without gaps.
    pub seqs: Vec<BatchSeq>,
    /// Page tables, one after the other: entry `i` holds cache rows
    /// `i * PAGE_ROWS ..`.
    pub tables: Vec<u32>,
}

impl Batch {
    /// Makes it empty, keeping its allocations.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.media.clear();
        self.rows.clear();
        self.seqs.clear();
        self.tables.clear();
    }

    /// Rows in the step.
    pub fn n_rows(&self) -> usize {
        self.rows.len()
    }

    /// Cache rows beyond its own that any row sees, at most: 0 for text.
    pub fn rows_ahead(&self) -> usize {
        let ahead = |row: &Row| row.sees.end.saturating_sub(row.own() + 1);
        self.rows.iter().map(ahead).max().unwrap_or(0) as usize
    }

    /// This batch with rows that see nothing beyond their own, for layers that are causal
    /// whatever [`Row::sees`] allows.
    #[must_use]
    pub fn causal(&self) -> Batch {
        let mut causal = self.clone();
        for row in &mut causal.rows {
            row.sees.end = row.sees.end.min(row.own() + 1);
        }
        causal
    }

    /// The step of some of this one's `rows`, ascending, as ops see it that read the caches and write nothing: what each
    /// row sees stays. Sequences without any of the rows are left out.
    ///
    /// # Panics
    ///
    /// If the rows do not ascend, or the batch has fewer.
    #[must_use]
    pub fn of_rows(&self, rows: &[usize]) -> Batch {
        assert!(rows.is_sorted_by(|a, b| a < b), "rows that ascend");
        let of = |range: &Range<usize>| {
            let number = |row| rows.partition_point(|&r| r < row);
            number(range.start)..number(range.end)
        };
        let seqs = self.seqs.iter().map(|seq| BatchSeq {
            rows: of(&seq.rows),
            ..seq.clone()
        });
        let media = self.media.iter().filter_map(|media| {
            let row = rows.binary_search(&(media.row as usize)).ok()?;
            Some(MediaRow {
                row: row as u32,
                ..*media
            })
        });
        Batch {
            tokens: rows.iter().map(|&row| self.tokens[row]).collect(),
            media: media.collect(),
            rows: rows.iter().map(|&row| self.rows[row]).collect(),
            seqs: seqs.filter(|seq| !seq.rows.is_empty()).collect(),
            tables: self.tables.clone(),
        }
    }

    /// The page of `group` that holds cache row `index` of sequence `seq`.
    ///
    /// # Panics
    ///
    /// If the row has no page: `cache` gave none, or it left the window.
    #[inline]
    pub fn page(&self, seq: usize, group: usize, index: usize) -> usize {
        let table = &self.tables[self.seqs[seq].tables[group].clone()];
        let page = table[index / PAGE_ROWS];
        assert_ne!(page, NO_PAGE, "cache row {index} has left the window");
        page as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three texts of 3, 2 and 1 rows, two rows of which are rows of media.
    fn batch() -> Batch {
        let seq = |rows: Range<usize>, slot| BatchSeq {
            rows,
            slot,
            is_new: false,
            kept: 0,
            certain: 1,
            tables: std::iter::once(slot..slot + 1).collect(),
        };
        let media = |row| MediaRow {
            row,
            source: 0,
            embedding: 10 + row,
        };
        Batch {
            tokens: (20..26).collect(),
            media: vec![media(1), media(4)],
            rows: (30..36).map(Row::text).collect(),
            seqs: vec![seq(0..3, 0), seq(3..5, 1), seq(5..6, 2)],
            tables: vec![7, 8, 9],
        }
    }

    #[test]
    fn some_rows_of_a_step_see_what_they_saw() {
        let all = batch();
        let some = all.of_rows(&[0, 2, 4]);
        assert_eq!(some.tokens, [20, 22, 24]);
        assert_eq!(some.rows, [0, 2, 4].map(|row| all.rows[row]));
        let seqs: Vec<_> = some.seqs.iter().map(|s| (s.rows.clone(), s.slot)).collect();
        assert_eq!(seqs, [(0..2, 0), (2..3, 1)]);
        assert_eq!(some.page(1, 0, 5), all.page(1, 0, 5));
        let media: Vec<_> = some.media.iter().map(|m| (m.row, m.embedding)).collect();
        assert_eq!(media, [(2, 14)]);
        assert_eq!(all.of_rows(&[0, 1, 2, 3, 4, 5]), all);
    }

    #[test]
    #[should_panic(expected = "rows that ascend")]
    fn some_rows_of_a_step_ascend() {
        drop(batch().of_rows(&[2, 1]));
    }
}
