//! Limits that count from the first line break of a text: editors that complete code ask for one
//! block, and soon.

use std::time::{Duration, Instant};

/// Limits of a text that count from its first line break.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineLimits {
    /// Spaces and tabs that every line but the first has to begin with. The text ends before the
    /// first other character of a line that begins with fewer, a line break among them.
    pub indent: usize,
    /// Time from the first token after which a text that has a line break ends.
    pub time: Option<Duration>,
}

/// A text under [`LineLimits`].
#[derive(Debug, Default)]
pub(crate) struct Lines {
    limits: LineLimits,
    /// When the text has begun, if it has.
    begun: Option<Instant>,
    has_break: bool,
    /// Spaces and tabs at the beginning of a line after the first, as long as there is nothing
    /// else in it.
    indent: Option<usize>,
}

impl Lines {
    /// A text of which nothing is written yet.
    pub(crate) fn new(limits: LineLimits) -> Self {
        Lines {
            limits,
            ..Lines::default()
        }
    }

    /// Takes the next piece of the text; how many bytes of it are the text's last, if it ends.
    pub(crate) fn push(&mut self, piece: &str) -> Option<usize> {
        let LineLimits { indent, time } = self.limits;
        if indent == 0 && time.is_none() {
            return None;
        }
        let begun = *self.begun.get_or_insert_with(Instant::now);
        for (at, c) in piece.char_indices() {
            match self.indent {
                Some(n) if c == ' ' || c == '\t' => self.indent = Some(n + 1),
                Some(n) if n < indent => return Some(at),
                _ => self.indent = None,
            }
            if c == '\n' {
                self.has_break = true;
                self.indent = Some(0);
            }
        }
        let is_late = time.is_some_and(|time| begun.elapsed() > time);
        (self.has_break && is_late).then_some(piece.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The text that is left of `pieces`, and whether it was ended.
    fn kept(limits: LineLimits, pieces: &[&str]) -> (String, bool) {
        let (mut lines, mut text) = (Lines::new(limits), String::new());
        for piece in pieces {
            match lines.push(piece) {
                None => text.push_str(piece),
                Some(n) => {
                    text.push_str(&piece[..n]);
                    return (text, true);
                }
            }
        }
        (text, false)
    }

    #[test]
    fn a_text_ends_before_a_line_that_is_less_indented() {
        let indent = |indent, text: &str| {
            let limits = LineLimits { indent, time: None };
            let chars: Vec<String> = text.chars().map(String::from).collect();
            let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
            let whole = kept(limits, &[text]);
            assert_eq!(kept(limits, &chars), whole, "however it comes in pieces");
            whole
        };
        for (n, text, left) in [
            (0, "a\nb", None),
            (2, "a\n  b\n\tc", Some("a\n  b\n\t")),
            (2, "a\n  b\n\t\tc\n ", None),
            (2, "a\n \n", Some("a\n ")),
            (1, "a", None),
            (1, "a\n}", Some("a\n")),
            (1, "}", None),
        ] {
            assert_eq!(
                indent(n, text),
                (left.unwrap_or(text).to_owned(), left.is_some())
            );
        }
    }

    #[test]
    fn a_late_text_ends_once_it_has_a_line_break() {
        let limits = LineLimits {
            indent: 0,
            time: Some(Duration::ZERO),
        };
        let pieces = ["a", "b", "c\n", "d"];
        assert_eq!(kept(limits, &pieces), ("abc\n".to_owned(), true));
        let later = LineLimits {
            time: Some(Duration::from_secs(3600)),
            ..limits
        };
        assert_eq!(kept(later, &pieces), ("abc\nd".to_owned(), false));
    }
}
