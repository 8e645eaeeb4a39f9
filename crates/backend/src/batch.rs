//! One step's rows: which sequence and position each belongs to, and where its
//! cache rows lie. Made by `cache`, read by every op that looks at memory.

use std::ops::Range;

/// Rows of a page of keys and values, and keys of one attention tile.
pub const PAGE_ROWS: usize = 64;

/// Rows of one sequence in one step that may still be rolled back, at most.
pub const MAX_TENTATIVE: usize = 16;

/// A page table's entry for rows that have left every window.
pub const NO_PAGE: u32 = u32::MAX;

/// One row of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// The newest cache row this row may see: its own, for a row that appends.
    pub index: u32,
    /// Position for rotary embedding and for the window's far edge.
    pub position: u32,
}

/// One sequence's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSeq {
    /// Its rows, consecutive and ascending in position.
    pub rows: Range<usize>,
    /// Where its recurrent state lies.
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
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Place of each row.
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
        self.rows.clear();
        self.seqs.clear();
        self.tables.clear();
    }

    /// Rows in the step.
    pub fn n_rows(&self) -> usize {
        self.rows.len()
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
