//! Pooling: a text is read and none is written; vectors are made of the target's hidden rows.
//!
//! ```text
//! h_0 .. h_{n-1}     the rows of a prompt after the final norm, which the output head would read: [n, H]
//!
//! last   h_{n-1}
//! mean   (h_0 + h_1 + .. + h_{n-1}) / n
//! cls    h_0
//! none   h_0, h_1, .., h_{n-1}: a vector a row
//! ```
//!
//! A stream that pools is a prompt in the round as any other, in chunks and beside streams that
//! write; no token is chosen after it, and no drafter reads it. A sum runs in `f64` over ascending
//! rows, so a vector has the same bits whatever the chunks and the company of its rows.
//!
//! Normalization and rounding are deliberately absent.

use crate::draft::HiddenRows;
use crate::length::DraftLength;
use crate::round::{RoundError, StreamRows};
use crate::speculator::Speculator;
use crate::stream::{Finish, Stream};
use std::ops::Range;

/// Which vectors are made of the hidden rows of a text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pooling {
    /// The last row: in a model whose rows see only rows before them, the one that has seen all.
    #[default]
    Last,
    /// The mean of all rows.
    Mean,
    /// The first row, where models that see in both directions put their `[CLS]` token. A causal
    /// model's first row has seen the first token only.
    Cls,
    /// No pooling: every row is a vector of its own.
    None,
}

impl Pooling {
    /// Every kind of pooling.
    pub const ALL: [Pooling; 4] = [Pooling::Last, Pooling::Mean, Pooling::Cls, Pooling::None];

    /// The name that options and requests have for it.
    pub fn name(self) -> &'static str {
        match self {
            Pooling::Last => "last",
            Pooling::Mean => "mean",
            Pooling::Cls => "cls",
            Pooling::None => "none",
        }
    }

    /// The kind of pooling called `name`.
    pub fn named(name: &str) -> Option<Pooling> {
        Pooling::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Whether rows are needed that the prefix cache could stand in for: it keeps their keys and
    /// values, and no hidden rows.
    pub fn needs_every_row(self) -> bool {
        self != Pooling::Last
    }
}

/// What a stream has pooled of its rows so far.
#[derive(Debug)]
pub(crate) struct Pool {
    pooling: Pooling,
    /// The rows that are vectors, one after the other; empty for a mean.
    rows: Vec<f32>,
    /// The sum of the rows so far, `[H]`; empty unless a mean is asked for.
    sum: Vec<f64>,
    /// Rows in the sum.
    n: usize,
}

impl Pool {
    fn new(pooling: Pooling) -> Self {
        Pool {
            pooling,
            rows: Vec::new(),
            sum: Vec::new(),
            n: 0,
        }
    }

    /// A pool of the same kind that has taken no rows.
    pub(crate) fn afresh(&self) -> Self {
        Pool::new(self.pooling)
    }

    /// Whether it needs rows that the prefix cache could stand in for.
    pub(crate) fn needs_every_row(&self) -> bool {
        self.pooling.needs_every_row()
    }

    /// Which of a text's rows `step`, of which it has `n` in all, are needed.
    fn wanted(&self, step: Range<usize>, n: usize) -> Range<usize> {
        let all = match self.pooling {
            Pooling::Last => n - 1..n,
            Pooling::Cls => 0..1,
            Pooling::Mean | Pooling::None => 0..n,
        };
        let first = all.start.clamp(step.start, step.end);
        first..all.end.clamp(first, step.end)
    }

    /// Takes the next rows of those that are needed, of `width` numbers each.
    fn take(&mut self, rows: &[f32], width: usize) {
        if self.pooling != Pooling::Mean {
            self.rows.extend_from_slice(rows);
            return;
        }
        self.sum.resize(width, 0.0);
        for row in rows.chunks_exact(width) {
            for (sum, &x) in self.sum.iter_mut().zip(row) {
                *sum += f64::from(x);
            }
            self.n += 1;
        }
    }

    /// The vectors, of `width` numbers each.
    fn vectors(&self, width: usize) -> impl Iterator<Item = Vec<f64>> {
        let mean = (self.n > 0).then(|| self.sum.iter().map(|sum| sum / self.n as f64).collect());
        let rows = self.rows.chunks_exact(width);
        let rows = rows.map(|row| row.iter().copied().map(f64::from).collect());
        mean.into_iter().chain(rows)
    }
}

impl Stream {
    /// Has the stream read its prompt and pool the hidden rows, instead of writing: it ends with
    /// [`Finish::Length`] once all rows have run, and leaves its vectors to
    /// [`Speculator::vectors`]. The prompt may fill the context.
    ///
    /// # Panics
    ///
    /// If a row of the prompt has run already, or was found in the prefix cache although
    /// `pooling` [needs it](Pooling::needs_every_row).
    pub fn pool(&mut self, pooling: Pooling) {
        assert!(
            self.n_prefilled() == self.n_reused() && self.output().is_empty(),
            "a stream pools from its first row"
        );
        assert!(
            self.n_reused() == 0 || !pooling.needs_every_row(),
            "rows from the prefix cache have no hidden rows"
        );
        self.pool = Some(Pool::new(pooling));
        self.options.draft = DraftLength::UpTo(0);
        self.finish = None;
        // Nobody goes on from the text, so a snapshot would only cost a step.
        self.snapshots_due.clear();
        self.snapshots.clear();
    }

    /// Whether the stream pools its rows and writes nothing.
    pub fn pools(&self) -> bool {
        self.pool.is_some()
    }
}

impl Speculator {
    /// The vectors that `stream` has pooled, of `H` numbers each: one, or one a row of its prompt
    /// for [`Pooling::None`]. None before the stream has ended, and none of one that writes.
    pub fn vectors<'a>(&self, stream: &'a Stream) -> impl Iterator<Item = Vec<f64>> + use<'a> {
        let width = self.target.hidden_size();
        let pool = stream.pool.as_ref();
        let pool = pool.filter(|_| stream.finish == Some(Finish::Length));
        pool.into_iter().flat_map(move |pool| pool.vectors(width))
    }

    /// Adds the round's rows of `hidden` to what streams pool, and ends those whose prompt
    /// has been read.
    pub(crate) fn pool_rows(
        &mut self,
        streams: &mut [&mut Stream],
        rows: &[StreamRows],
        hidden: &HiddenRows,
    ) -> Result<(), RoundError> {
        let mut wanted: Vec<usize> = Vec::new();
        for (stream, rows) in streams.iter().zip(rows) {
            let Some(pool) = &stream.pool else { continue };
            let needed = pool.wanted(rows.of_text(), stream.n_prompt());
            wanted.extend(needed.map(|row| rows.in_batch(row)));
        }
        let width = hidden.tensor().cols();
        let values = match wanted.is_empty() {
            true => Vec::new(),
            false => {
                let gathered = hidden.gather(&*self.b, &wanted);
                self.b.download(&gathered).into_owned()
            }
        };
        self.b.finish()?;
        let mut rest = &values[..];
        for (stream, rows) in streams.iter_mut().zip(rows) {
            let n = stream.n_prompt();
            let Some(pool) = &mut stream.pool else {
                continue;
            };
            let needed = pool.wanted(rows.of_text(), n);
            let own = rest.split_off(..needed.len() * width);
            let own = own.expect("a row of values for each that was gathered");
            if !own.iter().all(|x| x.is_finite()) {
                stream.finish = Some(Finish::NoToken);
                continue;
            }
            pool.take(own, width);
            if rows.of_text().end == n {
                stream.finish = Some(Finish::Length);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three rows of two numbers.
    const ROWS: [f32; 6] = [1.0, 2.0, 3.0, 4.0, 8.0, 0.0];

    /// The vectors of [`ROWS`] in steps that end after so many rows.
    fn pooled(pooling: Pooling, ends: &[usize]) -> Vec<Vec<f64>> {
        let mut pool = Pool::new(pooling);
        let mut begin = 0;
        for &end in ends {
            let wanted = pool.wanted(begin..end, 3);
            assert!(begin <= wanted.start && wanted.end <= end, "{wanted:?}");
            pool.take(&ROWS[2 * wanted.start..2 * wanted.end], 2);
            begin = end;
        }
        pool.vectors(2).collect()
    }

    #[test]
    fn rows_are_pooled_the_same_in_any_steps() {
        for ends in [&[3][..], &[1, 3], &[2, 3], &[1, 2, 3]] {
            assert_eq!(pooled(Pooling::Last, ends), [[8.0, 0.0]], "{ends:?}");
            assert_eq!(pooled(Pooling::Mean, ends), [[4.0, 2.0]], "{ends:?}");
            assert_eq!(pooled(Pooling::Cls, ends), [[1.0, 2.0]], "{ends:?}");
            let all = [[1.0, 2.0], [3.0, 4.0], [8.0, 0.0]];
            assert_eq!(pooled(Pooling::None, ends), all, "{ends:?}");
        }
    }

    #[test]
    fn a_sum_of_many_rows_loses_no_small_ones() {
        let mut pool = Pool::new(Pooling::Mean);
        pool.take(&[1e8], 1);
        (0..1000).for_each(|_| pool.take(&[1.0], 1));
        let mean: Vec<_> = pool.vectors(1).collect();
        assert_eq!(mean, [[(1e8 + 1000.0) / 1001.0]]);
    }

    #[test]
    fn kinds_are_found_by_their_names() {
        for kind in Pooling::ALL {
            assert_eq!(Pooling::named(kind.name()), Some(kind));
        }
        assert_eq!(Pooling::named("rank"), None);
    }
}
