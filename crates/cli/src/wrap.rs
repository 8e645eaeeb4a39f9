//! Wraps streamed text at the width of a terminal, between words.
//!
//! A terminal breaks a full line in the middle of a word. Here a word is held back until it is
//! whole, and begins a new line if it does not fit. Fenced code is not wrapped, so that it can
//! be copied.

/// The state of the line that is being written.
#[derive(Debug, Default)]
pub(crate) struct Wrap {
    /// Columns of the terminal; 0 does not wrap.
    width: usize,
    /// Columns of the line that are written.
    column: usize,
    /// Spaces that are held back, for a line break would replace them.
    spaces: String,
    /// The word that is held back until it ends.
    word: String,
    /// The first characters of the line, as many as a fence has.
    start: String,
    /// Whether the line is in a block of code.
    in_fence: bool,
}

/// The mark that begins and ends a block of code.
const FENCE: &str = "```";

impl Wrap {
    /// Wraps at `width` columns; 0 does not wrap.
    pub(crate) fn new(width: usize) -> Self {
        Wrap {
            width,
            ..Wrap::default()
        }
    }

    /// Takes the next piece of text; returns what can be written now.
    pub(crate) fn push(&mut self, text: &str) -> String {
        let mut out = String::new();
        for c in text.chars() {
            if c == '\n' {
                self.place(&mut out);
                out.push_str(&std::mem::take(&mut self.spaces));
                out.push('\n');
                if self.start == FENCE {
                    self.in_fence = !self.in_fence;
                }
                self.start.clear();
                self.column = 0;
                continue;
            }
            if self.start.len() < FENCE.len() {
                self.start.push(c);
            }
            if self.in_fence || self.start == FENCE {
                self.place(&mut out);
                out.push_str(&std::mem::take(&mut self.spaces));
                out.push(c);
            } else if c.is_whitespace() {
                self.place(&mut out);
                self.spaces.push(c);
            } else {
                self.word.push(c);
            }
        }
        out
    }

    /// Ends the text; returns what was held back.
    pub(crate) fn finish(&mut self) -> String {
        let mut out = String::new();
        self.place(&mut out);
        out.push_str(&std::mem::take(&mut self.spaces));
        self.column = 0;
        self.start.clear();
        self.in_fence = false;
        out
    }

    /// Adds the word that has ended, if there is one, to `out`: on this line, or on the next if
    /// it does not fit.
    fn place(&mut self, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let columns = |text: &str| console::measure_text_width(text);
        let (spaces, word) = (columns(&self.spaces), columns(&self.word));
        let fits = self.width == 0 || self.column + spaces + word <= self.width;
        if fits || self.column == 0 {
            out.push_str(&self.spaces);
            self.column += spaces + word;
        } else {
            out.push('\n');
            self.column = word;
        }
        self.spaces.clear();
        out.push_str(&std::mem::take(&mut self.word));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `text` in pieces of `n` characters.
    fn wrapped(width: usize, text: &str, n: usize) -> String {
        let mut wrap = Wrap::new(width);
        let chars: Vec<char> = text.chars().collect();
        let pieces = chars
            .chunks(n)
            .map(|piece| wrap.push(&String::from_iter(piece)));
        let mut out: String = pieces.collect();
        out.push_str(&wrap.finish());
        out
    }

    #[test]
    fn lines_break_between_words_however_text_comes() {
        let cases = [
            (10, "one two three four", "one two\nthree four"),
            (10, "0123456789 a", "0123456789\na"),
            // A word that fits no line stays whole, and the terminal breaks it.
            (4, "a 0123456789 b", "a\n0123456789\nb"),
            (6, "a\n\n  bc  de fg\n", "a\n\n  bc\nde fg\n"),
            (5, "ab cd ", "ab cd "),
            (0, "nothing is wrapped here", "nothing is wrapped here"),
            (
                9,
                "see this:\n```\nlet x = 1 + 2 + 3;\n```\nand that too",
                "see this:\n```\nlet x = 1 + 2 + 3;\n```\nand that\ntoo",
            ),
        ];
        for (width, text, want) in cases {
            for n in [1, 2, 3, 7, 100] {
                assert_eq!(wrapped(width, text, n), want, "{text:?} by {n}");
            }
        }
    }

    #[test]
    fn a_word_is_held_back_until_it_ends() {
        let mut wrap = Wrap::new(10);
        assert_eq!(wrap.push("Hello wor"), "Hello");
        assert_eq!(wrap.push("ld"), "");
        assert_eq!(wrap.push("!\n"), "\nworld!\n");
        assert_eq!(wrap.finish(), "");
    }
}
