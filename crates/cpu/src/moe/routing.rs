//! Which rows go to which experts.

use backend::Choice;
use std::ops::Range;

/// What a step works out about its rows, in memory that the next one uses again.
#[derive(Default)]
pub(crate) struct Routing {
    /// The experts that each row has chosen.
    pub(super) choices: Vec<Choice>,
    /// Scratch memory of each worker.
    pub(super) orders: Vec<Vec<usize>>,
    /// Where an expert's places end.
    pub(super) ends: Vec<usize>,
    pub(super) next: Vec<usize>,
    /// Experts with rows, and their places.
    pub(super) chosen: Vec<usize>,
    pub(super) runs: Vec<Range<usize>>,
    /// The row of each place.
    pub(super) rows: Vec<usize>,
    /// By row and rank: the weight, and where the expert's result starts.
    pub(super) places: Vec<(f32, usize)>,
}
