//! Which rows go to which experts.

use backend::{Choice, ExpertMarks};
use std::ops::Range;
use std::thread::{self, ThreadId};

/// The experts of a step's rows, and the rows of its experts, in memory that the next step uses
/// again.
///
/// The results of all experts for all of their rows have *places*: numbers in order of experts,
/// and then of rows.
#[derive(Default)]
pub(crate) struct Routing {
    /// The experts that each row has chosen, by rank; may be longer than the step has rows.
    pub(super) choices: Vec<Choice>,
    /// Scratch memory of each worker for [`backend::Experts::choose_into`].
    pub(super) orders: Vec<Vec<usize>>,
    /// The places of expert `e` are `offsets[e]..offsets[e + 1]`.
    offsets: Vec<usize>,
    /// The next free place of each expert, while rows get theirs.
    next: Vec<usize>,
    /// Experts with at least one row, ascending.
    pub(super) chosen: Vec<usize>,
    /// The places of each of the experts `chosen`.
    pub(super) runs: Vec<Range<usize>>,
    /// The row of each place.
    pub(super) rows: Vec<usize>,
    /// By row and rank: an expert's weight, and where its result starts in the results of all
    /// places.
    pub(super) terms: Vec<(f32, usize)>,
    /// The thread whose choices are noted, if any are.
    noting: Option<ThreadId>,
    noted: ExpertMarks,
}

impl Routing {
    /// Notes what this thread's rows choose from now on.
    pub(crate) fn begin_noting(&mut self) {
        self.noting = Some(thread::current().id());
        self.noted.clear();
    }

    /// Notes no more, and makes `marks` what was noted; false if that was not for this thread.
    pub(crate) fn take_noted(&mut self, marks: &mut ExpertMarks) -> bool {
        let is_own = self.noting == Some(thread::current().id());
        if is_own {
            self.noting = None;
            std::mem::swap(&mut self.noted, marks);
        }
        is_own
    }

    /// Notes the choices of the first `n_rows` rows among `n_experts` experts, if this thread's are to be.
    pub(super) fn note(&mut self, n_rows: usize, n_experts: usize) {
        if self.noting == Some(thread::current().id()) {
            self.noted.push(n_experts, &self.choices[..n_rows]);
        }
    }

    /// Gives places to the choices of the first `n_rows` rows among `n_experts` experts, whose
    /// results are `hidden` values wide: a counting sort.
    pub(super) fn sort(&mut self, n_rows: usize, n_experts: usize, hidden: usize) {
        let choices = &self.choices[..n_rows];
        let offsets = &mut self.offsets;
        offsets.clear();
        offsets.resize(n_experts + 1, 0);
        for &(expert, _) in choices.iter().flatten() {
            offsets[expert + 1] += 1;
        }
        for e in 0..n_experts {
            offsets[e + 1] += offsets[e];
        }
        let has_rows = |&e: &usize| offsets[e] < offsets[e + 1];
        self.chosen.clear();
        self.chosen.extend((0..n_experts).filter(has_rows));
        let places = |&e: &usize| offsets[e]..offsets[e + 1];
        self.runs.clear();
        self.runs.extend(self.chosen.iter().map(places));
        self.rows.clear();
        self.rows.resize(offsets[n_experts], 0);
        self.terms.clear();
        self.next.clone_from(offsets);
        for (row, choice) in choices.iter().enumerate() {
            for &(expert, weight) in choice {
                let place = self.next[expert];
                self.rows[place] = row;
                self.terms.push((weight, place * hidden));
                self.next[expert] += 1;
            }
        }
    }
}
