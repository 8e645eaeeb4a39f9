//! Edits of logits: what penalties, biases and suppression do to the logits of some tokens before
//! one is chosen.

/// What is done to one logit `l`, in f32, each operation rounded on its own.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Edit {
    /// `l / r` if `l > 0`, else `l r`: a repetition penalty `r`.
    Divide(f32),
    /// `l + x`.
    Add(f32),
    /// -inf: the token is never chosen.
    Suppress,
}

impl Edit {
    /// The logit after the edit.
    pub fn apply(self, logit: f32) -> f32 {
        match self {
            Edit::Divide(by) if logit > 0.0 => logit / by,
            Edit::Divide(by) => logit * by,
            Edit::Add(x) => logit + x,
            Edit::Suppress => f32::NEG_INFINITY,
        }
    }
}

/// The edits of one row of logits, by column.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RowEdits {
    edits: Vec<(u32, Edit)>,
}

impl RowEdits {
    /// Columns and what is done to their logits. Edits of one column are done in this order; those
    /// of different columns have nothing to do with each other.
    ///
    /// ```
    /// use backend::{Edit, RowEdits};
    ///
    /// let edits = RowEdits::new(vec![(2, Edit::Divide(2.0)), (0, Edit::Suppress), (2, Edit::Add(0.5))]);
    /// let mut row = [1.0, 2.0, -3.0];
    /// edits.apply(&mut row);
    /// assert_eq!(row, [f32::NEG_INFINITY, 2.0, -5.5]);
    /// ```
    pub fn new(mut edits: Vec<(u32, Edit)>) -> Self {
        edits.sort_by_key(|&(column, _)| column);
        RowEdits { edits }
    }

    /// The edits by ascending column, those of one column in their order.
    pub fn as_slice(&self) -> &[(u32, Edit)] {
        &self.edits
    }

    /// Whether the row stays as it is.
    pub fn is_empty(&self) -> bool {
        self.edits.is_empty()
    }

    /// Edits `row` in place. A logit that is NaN or +inf stays as it is, so that a row which
    /// [gives no token](crate::gives_token) because of it gives none afterwards.
    ///
    /// # Panics
    ///
    /// If an edit is of a column that the row does not have.
    pub fn apply(&self, row: &mut [f32]) {
        for edits in self.edits.chunk_by(|a, b| a.0 == b.0) {
            let logit = &mut row[edits[0].0 as usize];
            if *logit < f32::INFINITY {
                *logit = edits.iter().fold(*logit, |l, (_, edit)| edit.apply(l));
            }
        }
    }

    /// [`RowEdits::apply`] for each row of `logits`, of `cols` logits each.
    ///
    /// # Panics
    ///
    /// If there are not edits for each row, or one is of a column that rows do not have.
    pub fn apply_all(edits: &[RowEdits], cols: usize, logits: &mut [f32]) {
        assert_eq!(edits.len() * cols, logits.len(), "edits for each row");
        let rows = logits.chunks_exact_mut(cols.max(1));
        rows.zip(edits).for_each(|(row, edits)| edits.apply(row));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_of_a_column_are_done_in_their_order() {
        let (add, halve) = (Edit::Add(-1.0), Edit::Divide(2.0));
        for (edits, want) in [
            (vec![halve, add], 2.0),
            (vec![add, halve], 2.5),
            (vec![add, Edit::Suppress, add], f32::NEG_INFINITY),
            (vec![], 6.0),
        ] {
            let others = edits
                .iter()
                .flat_map(|&edit| [(2, edit), (1, Edit::Add(1.0))]);
            let mut row = [6.0, 0.0, 6.0];
            RowEdits::new(others.collect()).apply(&mut row);
            assert_eq!(row, [6.0, edits.len() as f32, want]);
        }
    }

    #[test]
    fn a_logit_that_is_no_number_outlives_every_edit() {
        let edits = RowEdits::new(vec![(0, Edit::Suppress), (1, Edit::Suppress)]);
        let mut row = [f32::NAN, f32::INFINITY];
        edits.apply(&mut row);
        assert!(row[0].is_nan() && row[1] == f32::INFINITY);
        let mut row = [f32::NEG_INFINITY];
        RowEdits::new(vec![(0, Edit::Add(9.0))]).apply(&mut row);
        assert_eq!(row, [f32::NEG_INFINITY]);
    }
}
