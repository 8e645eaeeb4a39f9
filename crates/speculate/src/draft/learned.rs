//! From which rows of a text another one can begin, where a head has read some of them and others
//! wait as features.
//!
//! A head of several layers makes the last rows that it has read of tokens further on, which another
//! text need not have ([`super::layered`]). With so many features of the rows before a place it can
//! begin there all the same: at the end of a text, whose last rows wait, and at its [`Mark`]s.

use std::ops::Range;
use std::sync::Arc;

/// A place inside a text from which another one can begin: a draft head's features of the rows just
/// before it.
#[derive(Clone, Debug, PartialEq)]
pub struct Mark {
    /// Rows before the place.
    pub rows: usize,
    /// Features of the last of these rows: as many as the head has to run again, or all.
    pub features: Arc<[f32]>,
}

/// What a head has learned of a text.
pub(super) struct Learned<'a> {
    /// Rows in the head's memory.
    pub(super) read: usize,
    /// Rows after these that wait, as features.
    pub(super) n_unread: usize,
    /// Rows before the end of a text that the head runs again when it goes on.
    pub(super) lookahead: usize,
    pub(super) marks: &'a [Mark],
}

/// Where another text begins.
pub(super) struct Start<'a> {
    /// Rows that it begins with.
    pub(super) rows: usize,
    /// Rows of the beginning that are taken from the head's memory; the others wait.
    pub(super) read: usize,
    /// The place, if it is one inside the text.
    mark: Option<&'a Mark>,
}

impl Learned<'_> {
    /// The most rows, `rows` at most, that another text can begin with, whose tokens up to the one after
    /// these rows are the same. `forkable` says as much of the rows in the head's memory.
    pub(super) fn start(&self, rows: usize, forkable: impl Fn(usize) -> usize) -> Start<'_> {
        let end = rows.min(self.read + self.n_unread);
        let least = match self.read {
            0 => 0,
            read => read + self.lookahead,
        };
        if end >= least && forkable(self.read) == self.read {
            return Start {
                rows: end,
                read: self.read,
                mark: None,
            };
        }
        if self.lookahead == 0 {
            let rows = forkable(rows);
            return Start {
                rows,
                read: rows,
                mark: None,
            };
        }
        let read = |mark: &Mark| mark.rows - self.lookahead.min(mark.rows);
        let mut marks = self.marks.iter().rev();
        let mark = marks.find(|m| m.rows <= rows && forkable(read(m)) == read(m));
        Start {
            rows: mark.map_or(0, |mark| mark.rows),
            read: mark.map_or(0, read),
            mark,
        }
    }
}

impl Start<'_> {
    /// Rows that wait.
    pub(super) fn n_unread(&self) -> usize {
        self.rows - self.read
    }

    /// Their features, of `cols` values each, where `unread` are those of the rows after the ones that
    /// the head has read.
    pub(super) fn features(&self, unread: &[f32], cols: usize) -> Vec<f32> {
        match self.mark {
            Some(mark) => mark.features.to_vec(),
            None => unread[..self.n_unread() * cols].to_vec(),
        }
    }
}

/// Whether `marks` can be those of a text of `rows` rows, for a head with features of `cols` values that
/// runs `lookahead` rows again.
pub(super) fn are_marks(marks: &[Mark], rows: usize, (cols, lookahead): (usize, usize)) -> bool {
    let is_whole = |mark: &Mark| {
        let n = lookahead.min(mark.rows);
        mark.rows <= rows && n.checked_mul(cols) == Some(mark.features.len())
    };
    let ascend = marks.windows(2).all(|pair| pair[0].rows < pair[1].rows);
    ascend && marks.iter().all(is_whole) && (lookahead > 0 || marks.is_empty())
}

/// Adds marks at `places`, which ascend, as far as `features` of `cols` values, those of the rows
/// `known`, have what they need. Marks anywhere else go.
pub(super) fn renew(
    marks: &mut Vec<Mark>,
    places: &[usize],
    lookahead: usize,
    known: Range<usize>,
    (features, cols): (&[f32], usize),
) {
    marks.retain(|mark| places.contains(&mark.rows));
    for &rows in places {
        let first = rows - lookahead.min(rows);
        let is_there = marks.iter().any(|mark| mark.rows == rows);
        if !is_there && known.start <= first && rows <= known.end {
            let own = (first - known.start) * cols..(rows - known.start) * cols;
            let features = features[own].into();
            marks.push(Mark { rows, features });
        }
    }
    marks.sort_by_key(|mark| mark.rows);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn features(rows: Range<usize>) -> Vec<f32> {
        rows.flat_map(|row| [row as f32, -(row as f32)]).collect()
    }

    /// A text of 40 rows, of which a head of three layers keeps two for later.
    fn learned(marks: &[Mark]) -> Learned<'_> {
        Learned {
            read: 38,
            n_unread: 2,
            lookahead: 2,
            marks,
        }
    }

    #[test]
    fn a_text_begins_at_the_end_of_another_or_at_a_mark() {
        let mut marks = Vec::new();
        let known = |rows: Range<usize>| (rows.clone(), features(rows));
        let (rows, values) = known(0..20);
        renew(&mut marks, &[1, 16, 30], 2, rows, (&values, 2));
        let (rows, values) = known(18..40);
        renew(&mut marks, &[1, 16, 30], 2, rows, (&values, 2));
        let at: Vec<usize> = marks.iter().map(|mark| mark.rows).collect();
        assert_eq!(at, [1, 16, 30]);
        assert!(are_marks(&marks, 40, (2, 2)));
        assert!(!are_marks(&marks, 29, (2, 2)) && !are_marks(&marks, 40, (2, 1)));
        let unread = features(38..40);
        for (rows, want, read) in [
            (50, 40, 38),
            (40, 40, 38),
            (39, 30, 28),
            (16, 16, 14),
            (15, 1, 0),
            (0, 0, 0),
        ] {
            let learned = learned(&marks);
            let start = learned.start(rows, |rows| rows);
            assert_eq!((start.rows, start.read), (want, read), "{rows}");
            let got = start.features(&unread, 2);
            assert_eq!(got, features(read..want), "{rows}");
        }
        // Where pages are gone, from an earlier place.
        assert_eq!(learned(&marks).start(40, |rows| rows.min(20)).rows, 16);
        renew(&mut marks, &[16], 2, 0..0, (&[], 2));
        assert_eq!(marks.len(), 1);
    }

    #[test]
    fn a_text_as_short_as_what_is_run_again_begins_anywhere() {
        let short = Learned {
            read: 0,
            n_unread: 2,
            lookahead: 2,
            marks: &[],
        };
        for rows in 0..4 {
            let start = short.start(rows, |rows| rows);
            assert_eq!((start.rows, start.read), (rows.min(2), 0));
        }
    }

    #[test]
    fn a_head_of_one_layer_begins_wherever_it_has_read() {
        let learned = Learned {
            read: 20,
            n_unread: 3,
            lookahead: 0,
            marks: &[],
        };
        for (rows, want) in [(30, 23), (22, 22), (20, 20), (7, 7)] {
            assert_eq!(learned.start(rows, |rows| rows).rows, want);
        }
        assert_eq!(learned.start(22, |rows| rows.min(16)).rows, 16);
    }
}
