//! The target's hidden rows of a round.

use backend::{Backend, Tensor};

/// Hidden rows of a round's step: of all its rows, or of some.
pub struct HiddenRows {
    pub(crate) tensor: Tensor,
    /// The rows of the step that `tensor` has, ascending; all if absent.
    pub(crate) of: Option<Vec<usize>>,
}

impl HiddenRows {
    /// The hidden rows that were kept, in the order of the step: `[n, H]`, fewer than the step has rows if some were
    /// left out. [`HiddenRows::gather`] finds a row by its number in the step.
    pub fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// The hidden rows of `rows` of the step: `[m, H]`.
    ///
    /// # Panics
    ///
    /// If one of them was not kept ([`super::Drafter::needs_all_hidden`]).
    pub fn gather(&self, b: &dyn Backend, rows: &[usize]) -> Tensor {
        let Some(of) = &self.of else {
            return b.gather(&self.tensor, rows);
        };
        let at = |row| of.binary_search(row).expect("a hidden row that was kept");
        let kept: Vec<usize> = rows.iter().map(at).collect();
        b.gather(&self.tensor, &kept)
    }
}
