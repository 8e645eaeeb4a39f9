//! JSON as Python's `json.dumps` writes it.
//!
//! Templates put tool schemas into the prompt with `tojson`. In training, models saw
//! Python's spacing, escapes and numbers, and every difference is a different prompt;
//! so the output is Python's byte for byte, without escapes for HTML.

use std::io::{self, Write};

use serde_json::ser::Formatter;

/// Most spaces of indentation for each level.
pub(crate) const INDENT_MAX: usize = 32;

/// The options of `json.dumps` that templates use.
#[derive(Clone, Debug)]
pub(crate) struct Style {
    /// Whether everything but ASCII is written as `\uXXXX`.
    pub(crate) ensure_ascii: bool,
    /// Spaces of indentation for each level, with one item a line; `None` writes one line.
    pub(crate) indent: Option<usize>,
    /// The text between two items.
    pub(crate) item_separator: String,
    /// The text between a key and its value.
    pub(crate) key_separator: String,
}

impl Style {
    /// The separators that Python chooses by default.
    pub(crate) fn new(ensure_ascii: bool, indent: Option<usize>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " };
        Self {
            ensure_ascii,
            indent,
            item_separator: item_separator.to_owned(),
            key_separator: ": ".to_owned(),
        }
    }
}

/// Formats one JSON document.
pub(crate) struct PythonFormatter<'a> {
    style: &'a Style,
    /// Lists and objects that are open.
    depth: usize,
    /// Whether the innermost one has an item.
    has_items: bool,
}

impl<'a> PythonFormatter<'a> {
    /// A formatter for a document that has not begun.
    pub(crate) fn new(style: &'a Style) -> Self {
        Self {
            style,
            depth: 0,
            has_items: false,
        }
    }

    /// Begins a list or an object.
    fn open(&mut self, w: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_items = false;
        w.write_all(bracket)
    }

    /// Ends a list or an object.
    fn close(&mut self, w: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_items {
            self.line_break(w)?;
        }
        self.has_items = true;
        w.write_all(bracket)
    }

    /// Begins an item.
    fn item(&mut self, w: &mut (impl Write + ?Sized), is_first: bool) -> io::Result<()> {
        if !is_first {
            w.write_all(self.style.item_separator.as_bytes())?;
        }
        self.line_break(w)
    }

    /// Begins an indented line, if items have lines of their own.
    fn line_break(&self, w: &mut (impl Write + ?Sized)) -> io::Result<()> {
        if let Some(indent) = self.style.indent {
            w.write_all(b"\n")?;
            for _ in 0..self.depth {
                w.write_all(&[b' '; INDENT_MAX][..indent])?;
            }
        }
        Ok(())
    }
}

impl Formatter for PythonFormatter<'_> {
    fn begin_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.open(w, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        self.close(w, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, w: &mut W, first: bool) -> io::Result<()> {
        self.item(w, first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, w: &mut W) -> io::Result<()> {
        w.write_all(self.style.key_separator.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_items = true;
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + Write>(
        &mut self,
        w: &mut W,
        text: &str,
    ) -> io::Result<()> {
        if !self.style.ensure_ascii {
            return w.write_all(text.as_bytes());
        }
        for ch in text.chars() {
            // DEL is ASCII and stays, as in Python.
            if ch.is_ascii() {
                w.write_all(&[ch as u8])?;
            } else {
                for unit in ch.encode_utf16(&mut [0; 2]) {
                    write!(w, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }

    fn write_f32<W: ?Sized + Write>(&mut self, w: &mut W, x: f32) -> io::Result<()> {
        self.write_f64(w, f64::from(x))
    }

    fn write_f64<W: ?Sized + Write>(&mut self, w: &mut W, x: f64) -> io::Result<()> {
        w.write_all(python_float(x).as_bytes())
    }
}

/// Python's `repr(x)`: the shortest digits that read back as `x`, with an exponent below 1e-4
/// and from 1e16 on.
pub(crate) fn python_float(x: f64) -> String {
    let scientific = format!("{x:e}");
    let Some((digits, exponent)) = scientific.split_once('e') else {
        return scientific;
    };
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{x}");
        return if plain.contains('.') {
            plain
        } else {
            plain + ".0"
        };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

#[cfg(test)]
mod tests {
    use serde::Serialize;
    use serde_json::{Value, json};

    use super::*;

    fn dumps(value: &Value, style: &Style) -> String {
        let mut bytes = Vec::new();
        let formatter = PythonFormatter::new(style);
        value
            .serialize(&mut serde_json::Serializer::with_formatter(
                &mut bytes, formatter,
            ))
            .unwrap();
        String::from_utf8(bytes).unwrap()
    }

    /// Expected strings are Python 3's own.
    #[test]
    fn layout_is_pythons() {
        let value =
            json!({"a": [1, {}, [], {"b": null}], "c": true, "d": "<&'\">é👍\u{7f}\u{1}\n"});
        assert_eq!(
            dumps(&value, &Style::new(false, None)),
            "{\"a\": [1, {}, [], {\"b\": null}], \"c\": true, \"d\": \"<&'\\\">é👍\u{7f}\\u0001\\n\"}"
        );
        assert_eq!(
            dumps(&value, &Style::new(true, Some(2))),
            "{\n  \"a\": [\n    1,\n    {},\n    [],\n    {\n      \"b\": null\n    }\n  ],\n  \"c\": true,\n  \"d\": \"<&'\\\">\\u00e9\\ud83d\\udc4d\u{7f}\\u0001\\n\"\n}"
        );
        assert_eq!(
            dumps(&json!([1, 2]), &Style::new(false, Some(0))),
            "[\n1,\n2\n]"
        );
    }

    #[test]
    fn floats_are_pythons() {
        for (x, text) in [
            (1.0, "1.0"),
            (-0.0, "-0.0"),
            (0.1, "0.1"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (5e-324, "5e-324"),
            (123456.789, "123456.789"),
        ] {
            assert_eq!(python_float(x), text);
        }
    }
}
