//! Tokens that the host chooses of a round's rows, several rows at a time where it has the threads that
//! compute the model.
//!
//! A row behind a token that was rejected is never asked for. So rows are chosen in waves, as many at a time as
//! there are threads, the first rows of all streams before the second ones, and a stream whose draft has failed
//! takes part no more.

use crate::logprobs::LogprobsOf;
use crate::sample::{self, History, Sampling, Scratch};
use crate::stream::Stream;
use backend::Backend;
use std::sync::atomic::{AtomicU32, Ordering};

/// Logits from which on choosing is worth the threads' attention.
const LEAST_LOGITS: usize = 1 << 14;

/// A choice that depends on one row of logits alone.
pub(crate) struct RowChoice<'a> {
    pub(crate) sampling: &'a Sampling,
    pub(crate) history: &'a History,
    /// Tokens before the one that is chosen.
    pub(crate) position: u64,
    /// The tokens that the logits are of, if not all.
    pub(crate) ids: Option<&'a [u32]>,
    pub(crate) logits: &'a [f32],
}

impl RowChoice<'_> {
    fn choose(&self) -> u32 {
        let RowChoice {
            sampling,
            history,
            position,
            ids,
            logits,
        } = *self;
        let scratch = &mut Scratch::default();
        match ids {
            None => sample::choose(sampling, history, position, logits, scratch),
            Some(ids) => sample::choose_among(sampling, history, position, ids, logits, scratch),
        }
    }
}

/// Whether threads are worth having for `n` choices among `cols` logits each.
pub(crate) fn are_worthwhile(b: &dyn Backend, n: usize, cols: usize) -> bool {
    n > 1 && b.host_threads() > 1 && n * cols >= LEAST_LOGITS
}

/// The token of each of `choices`, chosen by the device's threads on the host.
pub(crate) fn choose_each(b: &dyn Backend, choices: &[RowChoice<'_>]) -> Vec<u32> {
    let tokens: Vec<AtomicU32> = choices.iter().map(|_| AtomicU32::new(0)).collect();
    b.host_each(choices.len(), &|i| {
        tokens[i].store(choices[i].choose(), Ordering::Relaxed);
    });
    tokens.into_iter().map(AtomicU32::into_inner).collect()
}

/// The rows of a stream after which the host chooses, and what it has chosen so far.
pub(crate) struct OpenRows<'a> {
    /// The choices made so far, the device's first; none where one is open.
    pub(crate) made: Vec<Option<u32>>,
    /// The logits of each row where the host chooses; empty of others.
    pub(crate) logits: Vec<&'a [f32]>,
}

impl OpenRows<'_> {
    /// The first row from `from` on after which the host is to choose; none where a token of `draft` has
    /// failed before.
    fn next(&self, draft: &[u32], from: usize) -> Option<usize> {
        let row = (from..self.made.len()).find(|&row| self.made[row].is_none())?;
        let stays = |i: usize| self.made[i].is_none_or(|token| draft.get(i) == Some(&token));
        (0..row).all(stays).then_some(row)
    }
}

/// The rows of streams that have `n_rows` rows each: `made` are the device's choices, those of one stream after
/// those of the other, and `scores` the rows of `cols` logits where it has made none.
pub(crate) fn open_rows<'a>(
    n_rows: impl Iterator<Item = usize>,
    made: &[Option<u32>],
    (scores, cols): (&'a [f32], usize),
) -> Vec<OpenRows<'a>> {
    let mut made = made.iter();
    let mut scores = scores.chunks_exact(cols.max(1));
    let of = |n| {
        let made: Vec<Option<u32>> = made.by_ref().take(n).copied().collect();
        let logits = made.iter().map(|token| match token {
            Some(_) => &[][..],
            None => scores.next().expect("logits where no choice is made"),
        });
        let logits = logits.collect();
        OpenRows { made, logits }
    };
    n_rows.map(of).collect()
}

/// Whether each choice of `stream` depends on one row of logits alone, and nothing is wanted of it but the token.
fn chooses_by_row(stream: &Stream) -> bool {
    let options = &stream.options;
    stream.finish.is_none()
        && !stream.rejects()
        && options.logprobs_of(LogprobsOf::Choice).is_none()
        && options.sampling.depends_on_row_alone()
}

/// Has the device's threads choose after `open` rows of `cols` logits of `streams`, as far as their drafts hold.
pub(crate) fn choose_ahead(
    b: &dyn Backend,
    streams: &[&Stream],
    open: &mut [OpenRows<'_>],
    cols: usize,
) {
    let n_open = |&i: &usize| open[i].made.iter().filter(|token| token.is_none()).count();
    let able: Vec<usize> = (0..streams.len())
        .filter(|&i| chooses_by_row(streams[i]))
        .collect();
    if !are_worthwhile(b, able.iter().map(n_open).sum(), cols) {
        return;
    }
    let drafts: Vec<&[u32]> = streams.iter().map(|stream| &stream.draft[..]).collect();
    let mut from = vec![0; streams.len()];
    loop {
        let wave = wave(open, &drafts, &able, &mut from, b.host_threads());
        if wave.is_empty() {
            return;
        }
        let choice = |&(i, row): &(usize, usize)| {
            let stream = streams[i];
            RowChoice {
                sampling: &stream.options.sampling,
                history: &stream.history,
                position: (stream.tokens.len() + row) as u64,
                ids: None,
                logits: open[i].logits[row],
            }
        };
        let choices: Vec<RowChoice<'_>> = wave.iter().map(choice).collect();
        let tokens = choose_each(b, &choices);
        for ((i, row), token) in wave.into_iter().zip(tokens) {
            open[i].made[row] = Some(token);
        }
    }
}

/// The next rows to choose after, `most` at most, as stream and row: one of each of the streams `able`, then a
/// second one of each, and so on. `from` are the streams' rows that were never in a wave.
fn wave(
    open: &[OpenRows<'_>],
    drafts: &[&[u32]],
    able: &[usize],
    from: &mut [usize],
    most: usize,
) -> Vec<(usize, usize)> {
    let mut wave = Vec::new();
    loop {
        let n = wave.len();
        for &i in able {
            if wave.len() < most
                && let Some(row) = open[i].next(drafts[i], from[i])
            {
                from[i] = row + 1;
                wave.push((i, row));
            }
        }
        if wave.len() == n {
            return wave;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_taken_in_turns_until_a_draft_fails() {
        let rows = [[0.0; 2]; 7];
        let scores = rows.as_flattened();
        // Streams of 3, 1 and 4 rows; the device has chosen after the first row of the last one.
        let made = [&[None; 4][..], &[Some(5)], &[None; 3]].concat();
        let mut open = open_rows([3, 1, 4].into_iter(), &made, (scores, 2));
        assert_eq!(
            open[2].logits.iter().map(|l| l.len()).collect::<Vec<_>>(),
            [0, 2, 2, 2]
        );
        let drafts: [&[u32]; 3] = [&[7, 8], &[], &[5, 6, 9]];
        let mut from = [0; 3];
        let all = [0, 1, 2];
        assert_eq!(
            wave(&open, &drafts, &all, &mut from, 4),
            [(0, 0), (1, 0), (2, 1), (0, 1)]
        );
        open[0].made[..2].copy_from_slice(&[Some(7), Some(0)]);
        open[1].made[0] = Some(3);
        open[2].made[1] = Some(6);
        // The second token of the first stream's draft has failed.
        assert_eq!(wave(&open, &drafts, &all, &mut from, 4), [(2, 2), (2, 3)]);
        assert_eq!(wave(&open, &drafts, &all, &mut from, 4), []);
        let mut from = [0; 3];
        assert_eq!(wave(&open, &drafts, &[1], &mut from, 4), []);
    }
}
