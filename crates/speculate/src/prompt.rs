//! Prompts: tokens, and which of them stand for rows of pictures, video or sound.

use cache::{Namespace, RowKey};
use std::ops::Range;

/// What a stream goes on from. Made of tokens alone by `Prompt::from(tokens)`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prompt {
    pub(crate) tokens: Vec<u32>,
    pub(crate) spans: Spans,
    /// Whose texts it may begin like.
    pub(crate) namespace: Namespace,
    /// Rows after which later prompts may part from it, ascending.
    pub(crate) marks: Vec<usize>,
}

/// Rows of a prompt that one picture, video or sound is encoded as. A step takes all of them
/// or none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaSpan {
    /// The rows; their tokens are placeholders.
    pub rows: Range<usize>,
    /// The first 16 bytes of a cryptographic hash of what is encoded, and of everything that
    /// its encoding depends on.
    pub hash: [u8; 16],
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
    /// If a span is empty or reaches past the tokens, or spans overlap or do not ascend.
    pub fn with_media(tokens: Vec<u32>, media: Vec<MediaSpan>) -> Self {
        let mut free = 0;
        for MediaSpan { rows, .. } in &media {
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

    /// What each row is computed from.
    pub fn keys(&self) -> Vec<RowKey> {
        let mut keys: Vec<RowKey> = self.tokens.iter().copied().map(RowKey::Token).collect();
        for MediaSpan { rows, hash } in &self.spans.0 {
            for (row, key) in (0..).zip(&mut keys[rows.clone()]) {
                *key = RowKey::Media { hash: *hash, row };
            }
        }
        keys
    }
}

/// The media spans of a prompt, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Spans(Vec<MediaSpan>);

impl Spans {
    /// Rows of the longest span; 0 without any.
    pub(crate) fn longest(&self) -> usize {
        let lengths = self.0.iter().map(|span| span.rows.len());
        lengths.max().unwrap_or(0)
    }

    /// The span that has rows on both sides of a cut before row `at`.
    fn cut_by(&self, at: usize) -> Option<&Range<usize>> {
        let mut spans = self.0.iter().map(|span| &span.rows);
        spans.find(|rows| rows.start < at && at < rows.end)
    }

    /// Whether a cut before row `at` leaves every span whole.
    pub(crate) fn can_cut(&self, at: usize) -> bool {
        self.cut_by(at).is_none()
    }

    /// Rows of a chunk that begins with row `first` and should have `n`: fewer, so that it ends
    /// before a span that it would cut, or more, if that span is all it has.
    pub(crate) fn whole_chunk(&self, first: usize, n: usize) -> usize {
        match self.cut_by(first + n) {
            None => n,
            Some(span) if span.start > first => span.start - first,
            Some(span) => span.end - first,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt() -> Prompt {
        let span = |rows, hash| MediaSpan {
            rows,
            hash: [hash; 16],
        };
        Prompt::with_media(vec![7; 60], vec![span(10..30, 1), span(30..45, 2)])
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
    #[should_panic(expected = "spans of media ascend")]
    fn spans_do_not_overlap() {
        let span = |rows| MediaSpan {
            rows,
            hash: [0; 16],
        };
        Prompt::with_media(vec![7; 60], vec![span(10..30), span(29..45)]);
    }
}
