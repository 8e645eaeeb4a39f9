//! Prompts: tokens, and which of them stand for rows of pictures, video or sound.

use backend::{Batch, MediaRow, Position};
use cache::{Namespace, RowKey};
use models::MediaRows;
use std::ops::Range;
use std::sync::Arc;

/// What a stream goes on from. Made of tokens alone by `Prompt::from(tokens)`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) spans: Spans,
    /// Whose texts it may begin like.
    pub(crate) namespace: Namespace,
    /// Rows after which later prompts may part from it, ascending.
    pub(crate) marks: Vec<usize>,
}

/// Rows of a prompt that one picture, frame or sound is encoded as. Where they see each other
/// ([`MediaRows::see_their_span`], and the span is not causal), a step takes all of them or none.
#[derive(Clone, Debug, PartialEq)]
pub struct MediaSpan {
    /// The rows; their tokens are placeholders.
    pub rows: Range<usize>,
    /// The first 16 bytes of a cryptographic hash of what is encoded, and of everything that
    /// its encoding depends on.
    pub hash: [u8; 16],
    /// Rows of what is encoded from top to bottom, and from left to right: as many as `rows` in
    /// all, row-major. Sound is one line.
    pub grid: [usize; 2],
    /// Whether its rows see those before them alone in every target, as rows of sound do.
    pub is_causal: bool,
    /// What the target reads in the place of the placeholders' embeddings, `[rows, H]`
    /// ([`models::encode`]); nothing if these are to be read.
    pub embeddings: Arc<[f32]>,
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Prompt {
            tokens,
            ..Prompt::default()
        }
    }
}

impl Prompt {
    /// A prompt of `tokens`, of which those of each of `media` are placeholders.
    ///
    /// # Panics
    ///
    /// If a span is empty or reaches past the tokens, spans overlap or do not ascend, or a grid has
    /// another number of rows than its span.
    pub fn with_media(tokens: Vec<u32>, media: Vec<MediaSpan>) -> Self {
        let mut free = 0;
        for MediaSpan { rows, grid, .. } in &media {
            assert_eq!(grid[0] * grid[1], rows.len(), "a grid of the span's rows");
            assert!(
                free <= rows.start && rows.start < rows.end && rows.end <= tokens.len(),
                "spans of media ascend within the prompt; {rows:?} does not"
            );
            free = rows.end;
        }
        Prompt {
            tokens,
            spans: Spans(media),
            ..Prompt::default()
        }
    }

    /// The prompt of a text that only prompts of the same `namespace` find.
    #[must_use]
    pub fn in_namespace(mut self, namespace: Namespace) -> Self {
        self.namespace = namespace;
        self
    }

    /// The prompt with the rows after which a message of it ends, ascending: where a later
    /// prompt that begins like it is likely to part from it.
    #[must_use]
    pub fn with_marks(mut self, marks: Vec<usize>) -> Self {
        self.marks = marks;
        self
    }

    /// Whose texts it may begin like.
    pub fn namespace(&self) -> Namespace {
        self.namespace
    }

    /// One token a row.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Time, height and width of each row, in targets whose positions have these axes.
    pub fn positions(&self) -> Vec<[u32; 3]> {
        let rows = 0..self.tokens.len();
        rows.map(|row| self.spans.position(row)).collect()
    }

    /// What each row is computed from.
    pub fn keys(&self) -> Vec<RowKey> {
        let mut keys: Vec<RowKey> = self.tokens.iter().copied().map(RowKey::Token).collect();
        for MediaSpan { rows, hash, .. } in &self.spans.0 {
            for (row, key) in (0..).zip(&mut keys[rows.clone()]) {
                *key = RowKey::Media { hash: *hash, row };
            }
        }
        keys
    }
}

/// The media spans of a prompt, ascending.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Spans(Vec<MediaSpan>);

impl Spans {
    /// Gives `batch` what the target reads and sees in the rows of tokens `tokens`, which begin
    /// with its row `first`: embeddings, of which `values` takes the numbers, positions and rows
    /// ahead, by the target's `rule`.
    pub(crate) fn place(
        &self,
        batch: &mut Batch,
        first: usize,
        tokens: Range<usize>,
        rule: MediaRows,
        values: &mut Vec<f32>,
    ) {
        if self.0.is_empty() {
            return;
        }
        self.embed(batch, first, tokens.clone(), values);
        if rule.has_grid {
            for (row, token) in batch.rows[first..].iter_mut().zip(tokens.clone()) {
                row.position = Position::new(self.position(token));
            }
        }
        if rule.see_their_span {
            for (row, token) in batch.rows[first..].iter_mut().zip(tokens) {
                if let Some(span) = self.around(token).filter(|span| !span.is_causal) {
                    row.sees.end = span.rows.end as u32;
                }
            }
        }
    }

    /// [`Spans::place`] for the rows of a draft head that read tokens `tokens`: row `p` reads token
    /// `p + 1`, and stands one before it. Positions are those of the target if the head
    /// `follows_grid`.
    pub(crate) fn place_following(
        &self,
        batch: &mut Batch,
        first: usize,
        tokens: Range<usize>,
        follows_grid: bool,
        values: &mut Vec<f32>,
    ) {
        if self.0.is_empty() {
            return;
        }
        self.embed(batch, first, tokens.clone(), values);
        if follows_grid {
            for (row, token) in batch.rows[first..].iter_mut().zip(tokens) {
                let before = self.position(token).map(|axis| axis.saturating_sub(1));
                row.position = Position::new(before);
            }
        }
    }

    /// Notes in `batch` which of its rows from `first` on, those of tokens `tokens`, have
    /// embeddings, and appends these to `values`, which has those of all media rows before.
    fn embed(&self, batch: &mut Batch, first: usize, tokens: Range<usize>, values: &mut Vec<f32>) {
        for span in &self.0 {
            let (rows, n) = (&span.rows, span.rows.len());
            let read = rows.start.max(tokens.start)..rows.end.min(tokens.end);
            if span.embeddings.is_empty() || read.is_empty() {
                continue;
            }
            let width = span.embeddings.len() / n;
            let own = (read.start - rows.start) * width..(read.end - rows.start) * width;
            values.extend_from_slice(&span.embeddings[own]);
            for token in read {
                batch.media.push(MediaRow {
                    row: (first + token - tokens.start) as u32,
                    source: 0,
                    embedding: batch.media.len() as u32,
                });
            }
        }
    }

    /// Time, height and width of the row of `token` in targets with such positions: a span's rows
    /// are at one time, and their places in its grid count from it; what follows goes on after the
    /// longer side.
    fn position(&self, token: usize) -> [u32; 3] {
        // Rows that have no number of their own, up to here.
        let mut without = 0;
        for span in self.0.iter().take_while(|span| span.rows.start <= token) {
            let [height, width] = span.grid;
            if span.rows.contains(&token) {
                let (start, row) = (span.rows.start - without, token - span.rows.start);
                return [start, start + row / width, start + row % width].map(|at| at as u32);
            }
            without += span.rows.len() - height.max(width);
        }
        [(token - without) as u32; 3]
    }

    /// The span that the row of `token` belongs to.
    fn around(&self, token: usize) -> Option<&MediaSpan> {
        self.0.iter().find(|span| span.rows.contains(&token))
    }

    /// Whether the embeddings of all spans are rows of `width`, where there are any.
    pub(crate) fn are_as_wide_as(&self, width: usize) -> bool {
        let fits = |span: &MediaSpan| span.embeddings.len() == span.rows.len() * width;
        let mut spans = self.0.iter().filter(|span| !span.embeddings.is_empty());
        spans.all(fits)
    }

    /// Rows of the longest span whose rows may see each other; 0 without any.
    pub(crate) fn longest(&self) -> usize {
        let spans = self.0.iter().filter(|span| !span.is_causal);
        spans.map(|span| span.rows.len()).max().unwrap_or(0)
    }

    /// The span that has rows on both sides of a cut before row `at`.
    fn cut_by(&self, at: usize) -> Option<&MediaSpan> {
        let mut spans = self.0.iter();
        spans.find(|span| span.rows.start < at && at < span.rows.end)
    }

    /// The row behind the last span; `None` without spans.
    pub(crate) fn end(&self) -> Option<usize> {
        self.0.iter().map(|span| span.rows.end).max()
    }

    /// Whether a cut before row `at` leaves every span whole.
    pub(crate) fn can_cut(&self, at: usize) -> bool {
        self.cut_by(at).is_none()
    }

    /// Rows of a chunk that begins with row `first` and should have `n`: fewer, so that it ends
    /// before a span that it would cut, or more, if that span is all it has. Causal spans may be cut.
    pub(crate) fn whole_chunk(&self, first: usize, n: usize) -> usize {
        match self.cut_by(first + n).filter(|span| !span.is_causal) {
            None => n,
            Some(MediaSpan { rows, .. }) if rows.start > first => rows.start - first,
            Some(MediaSpan { rows, .. }) => rows.end - first,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt() -> Prompt {
        let span = |rows, hash, grid| MediaSpan {
            rows,
            hash: [hash; 16],
            grid,
            is_causal: false,
            embeddings: Arc::default(),
        };
        let spans = vec![span(10..30, 1, [4, 5]), span(30..45, 2, [3, 5])];
        Prompt::with_media(vec![7; 60], spans)
    }

    #[test]
    fn text_goes_on_after_the_longer_side_of_a_picture() {
        let spans = prompt().spans;
        for (token, at) in [
            (0, [0, 0, 0]),
            (9, [9, 9, 9]),
            (10, [10, 10, 10]),
            (14, [10, 10, 14]),
            (15, [10, 11, 10]),
            (29, [10, 13, 14]),
            // The first picture takes 5 of 20 positions, the second 5 of 15.
            (30, [15, 15, 15]),
            (44, [15, 17, 19]),
            (45, [20, 20, 20]),
            (70, [45, 45, 45]),
        ] {
            assert_eq!(spans.position(token), at, "token {token}");
        }
    }

    #[test]
    fn rows_of_a_step_get_their_embeddings_and_see_their_span() {
        let span = |rows: Range<usize>, from: f32| MediaSpan {
            grid: [1, rows.len()],
            is_causal: false,
            embeddings: (0..2 * rows.len()).map(|i| from + i as f32).collect(),
            hash: [0; 16],
            rows,
        };
        let media = vec![span(2..4, 10.0), span(5..8, 20.0)];
        let spans = Prompt::with_media(vec![7; 9], media).spans;
        let mut batch = Batch {
            rows: (0..8).map(backend::Row::text).collect(),
            ..Batch::default()
        };
        let (mut values, rule) = (
            Vec::new(),
            MediaRows {
                has_grid: false,
                see_their_span: true,
            },
        );
        // Rows 1.. of the batch are those of tokens 0..7.
        spans.place(&mut batch, 1, 0..7, rule, &mut values);
        let media = |row, embedding| MediaRow {
            row,
            source: 0,
            embedding,
        };
        assert_eq!(
            batch.media,
            [media(3, 0), media(4, 1), media(6, 2), media(7, 3)]
        );
        assert_eq!(values, [10.0, 11.0, 12.0, 13.0, 20.0, 21.0, 22.0, 23.0]);
        let ends: Vec<u32> = batch.rows.iter().map(|row| row.sees.end).collect();
        assert_eq!(ends, [1, 2, 3, 4, 4, 6, 8, 8]);
        // A head's rows 3.. read tokens 4..: the second picture from its second row on.
        let (mut batch, mut values) = (Batch::default(), Vec::new());
        batch.rows = (0..4).map(backend::Row::text).collect();
        spans.place_following(&mut batch, 0, 6..10, true, &mut values);
        assert_eq!(batch.media, [media(0, 0), media(1, 1)]);
        assert_eq!(values, [22.0, 23.0, 24.0, 25.0]);
        let width = |row: &backend::Row| row.position.axes()[2];
        assert_eq!(
            batch.rows.iter().map(width).collect::<Vec<_>>(),
            [5, 6, 7, 8]
        );
    }

    #[test]
    fn keys_of_placeholders_are_those_of_the_media() {
        let keys = prompt().keys();
        assert_eq!((keys[9], keys[45]), (RowKey::Token(7), RowKey::Token(7)));
        let media = |hash, row| RowKey::Media {
            hash: [hash; 16],
            row,
        };
        assert_eq!((keys[10], keys[29]), (media(1, 0), media(1, 19)));
        assert_eq!((keys[30], keys[44]), (media(2, 0), media(2, 14)));
    }

    #[test]
    fn a_chunk_ends_at_the_edges_of_spans() {
        let spans = prompt().spans;
        for (first, n, whole) in [
            (0, 10, 10),
            (0, 11, 10),
            (0, 29, 10),
            (0, 30, 30),
            (0, 44, 30),
            (0, 45, 45),
            (10, 1, 20),
            (10, 20, 20),
            (10, 25, 20),
            (30, 3, 15),
            (45, 8, 8),
        ] {
            assert_eq!(spans.whole_chunk(first, n), whole, "{n} rows from {first}");
        }
        assert_eq!(spans.longest(), 20);
    }

    #[test]
    fn a_causal_span_sees_nothing_ahead_and_may_be_cut() {
        let mut prompt = prompt();
        prompt.spans.0[1].is_causal = true;
        let spans = prompt.spans;
        let mut batch = Batch {
            rows: (0..60).map(backend::Row::text).collect(),
            ..Batch::default()
        };
        let rule = MediaRows {
            has_grid: false,
            see_their_span: true,
        };
        spans.place(&mut batch, 0, 0..60, rule, &mut Vec::new());
        let ends = |rows: Range<usize>| rows.map(|i| batch.rows[i].sees.end).collect::<Vec<_>>();
        assert_eq!(ends(10..12), [30, 30]);
        assert_eq!(ends(30..33), [31, 32, 33]);
        assert_eq!(
            (spans.whole_chunk(0, 29), spans.whole_chunk(0, 44)),
            (10, 44)
        );
        // Later prompts do not begin within it all the same.
        assert!(!spans.can_cut(44) && spans.can_cut(45));
        assert_eq!(spans.longest(), 20);
    }

    #[test]
    #[should_panic(expected = "spans of media ascend")]
    fn spans_do_not_overlap() {
        let span = |rows: Range<usize>| MediaSpan {
            grid: [1, rows.len()],
            is_causal: false,
            rows,
            hash: [0; 16],
            embeddings: Arc::default(),
        };
        Prompt::with_media(vec![7; 60], vec![span(10..30), span(29..45)]);
    }
}
