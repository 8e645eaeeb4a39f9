//! Which experts the rows of a step have chosen.
//!
//! An expert's weights are read once a step however many rows chose it, so what a step of a mixture takes depends on
//! how many *different* experts its rows chose: the expert union.

use crate::Choice;
use std::ops::Range;

/// Bits of a word of marks.
const WORD: usize = u64::BITS as usize;

/// Which experts each row of a step has chosen, in one mixture of experts after the other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertMarks {
    n_rows: usize,
    n_mixtures: usize,
    /// Experts of a mixture.
    n_experts: usize,
    /// A bit for each expert, in whole words a row; by mixture, then by row.
    words: Vec<u64>,
    /// Whether mixtures were pushed that differ in rows or experts, of which nothing is told.
    is_uneven: bool,
}

impl ExpertMarks {
    /// Forgets all mixtures, keeping its allocation.
    pub fn clear(&mut self) {
        self.words.clear();
        (self.n_rows, self.n_mixtures, self.n_experts) = (0, 0, 0);
        self.is_uneven = false;
    }

    /// Adds a mixture of `n_experts` experts, and what each row has chosen there.
    ///
    /// # Panics
    ///
    /// If a choice is of an expert that there is not.
    pub fn push(&mut self, n_experts: usize, rows: &[Choice]) {
        if self.n_mixtures == 0 {
            (self.n_rows, self.n_experts) = (rows.len(), n_experts);
        }
        self.is_uneven |= (self.n_rows, self.n_experts) != (rows.len(), n_experts);
        if self.is_uneven {
            return;
        }
        self.n_mixtures += 1;
        for choice in rows {
            let first = self.words.len();
            self.words.resize(first + n_experts.div_ceil(WORD), 0);
            for &(expert, _) in choice {
                assert!(expert < n_experts, "an expert of the mixture");
                self.words[first + expert / WORD] |= 1 << (expert % WORD);
            }
        }
    }

    /// Rows of the step; 0 where no mixture ran, or where mixtures differed in rows or experts.
    pub fn n_rows(&self) -> usize {
        if self.is_uneven { 0 } else { self.n_rows }
    }

    /// Experts of all mixtures together.
    pub fn n_experts(&self) -> usize {
        self.n_mixtures * self.n_experts
    }

    /// The experts that any of `rows` has chosen.
    ///
    /// # Panics
    ///
    /// If there are not so many rows.
    pub fn union(&self, rows: Range<usize>) -> ExpertSet {
        let mut set = ExpertSet::default();
        rows.for_each(|row| set.add_row(self, row));
        set
    }
}

/// Some experts of all mixtures of a model.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExpertSet(Vec<u64>);

impl ExpertSet {
    /// Adds the experts that row `row` has chosen.
    ///
    /// # Panics
    ///
    /// If there is no such row.
    pub fn add_row(&mut self, marks: &ExpertMarks, row: usize) {
        assert!(row < marks.n_rows(), "a row of the step");
        let width = marks.n_experts.div_ceil(WORD);
        self.0.resize(marks.n_mixtures * width, 0);
        for (mixture, words) in self.0.chunks_exact_mut(width).enumerate() {
            let first = (mixture * marks.n_rows + row) * width;
            let row = &marks.words[first..first + width];
            words.iter_mut().zip(row).for_each(|(to, from)| *to |= from);
        }
    }

    /// Adds the experts of `other`, a set of the same model.
    pub fn add(&mut self, other: &ExpertSet) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        let pairs = self.0.iter_mut().zip(&other.0);
        pairs.for_each(|(to, from)| *to |= from);
    }

    /// Experts of the set.
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(experts: &[usize]) -> Choice {
        experts.iter().map(|&e| (e, 0.5)).collect()
    }

    #[test]
    fn an_expert_counts_once_in_each_mixture_however_many_rows_chose_it() {
        let mut marks = ExpertMarks::default();
        let rows = [choice(&[0, 99]), choice(&[99, 64]), choice(&[3, 4])];
        marks.push(100, &rows);
        marks.push(100, &[choice(&[1]), choice(&[1]), choice(&[99])]);
        assert_eq!((marks.n_rows(), marks.n_experts()), (3, 200));
        assert_eq!(marks.union(0..1).len(), 3);
        assert_eq!(marks.union(0..2).len(), 3 + 1);
        assert_eq!(marks.union(0..3).len(), 5 + 2);
        assert!(marks.union(1..1).is_empty());
        let mut both = marks.union(0..1);
        both.add(&marks.union(1..2));
        assert_eq!(both, marks.union(0..2));
        marks.clear();
        assert_eq!((marks.n_rows(), marks.n_experts()), (0, 0));
    }

    #[test]
    fn nothing_is_told_of_mixtures_that_differ() {
        for (n_experts, n_rows) in [(5, 2), (4, 1)] {
            let mut marks = ExpertMarks::default();
            marks.push(4, &[choice(&[0]), choice(&[3])]);
            assert_eq!(marks.n_rows(), 2);
            marks.push(n_experts, &vec![choice(&[0]); n_rows]);
            assert_eq!(marks.n_rows(), 0);
        }
    }
}
