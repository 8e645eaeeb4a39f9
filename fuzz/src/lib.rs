//! Edits of JSON that its readers accept.
//!
//! A fuzzer that changes the text of a good file mostly breaks its JSON. These edits
//! keep it, and change what a reader has to decide about: a number, a type, a field
//! that is gone or stands elsewhere.

#![forbid(unsafe_code)]

use serde_json::{Value, json};

/// Edits of one input; more tell nothing new.
const MAX_EDITS: usize = 8;

/// Numbers at which arithmetic goes wrong.
const NUMBERS: &[u64] = &[
    0,
    1,
    1 << 16,
    1 << 31,
    1 << 32,
    1 << 33,
    1 << 48,
    1 << 62,
    1 << 63,
    u64::MAX,
];

/// What is left of an input.
pub struct Bytes<'a>(pub &'a [u8]);

impl Bytes<'_> {
    /// The next byte; `None` at the end.
    #[allow(clippy::should_implement_trait)] // of which nothing else is wanted
    pub fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    /// Two bytes, as a number below `n`.
    fn below(&mut self, n: usize) -> Option<usize> {
        Some(usize::from(u16::from_le_bytes([self.next()?, self.next()?])) % n)
    }

    fn number(&mut self) -> Option<u64> {
        let mut bytes = [0; 8];
        for byte in &mut bytes {
            *byte = self.next()?;
        }
        Some(u64::from_le_bytes(bytes))
    }
}

/// Changes `json` as `data` says. `words` are texts that readers know: names of
/// fields and values.
pub fn edit(json: &mut Value, words: &[&str], data: &[u8]) {
    let mut bytes = Bytes(data);
    for _ in 0..MAX_EDITS {
        if edit_once(json, words, &mut bytes).is_none() {
            return;
        }
    }
}

/// One edit; `None` if the input does not say which.
fn edit_once(json: &mut Value, words: &[&str], bytes: &mut Bytes<'_>) -> Option<()> {
    let places = places(json);
    let place = &places[bytes.below(places.len())?];
    let kind = bytes.next()?;
    let value = match kind % 12 {
        0 => json!(bytes.number()?),
        1 => json!(NUMBERS[bytes.below(NUMBERS.len())?]),
        2 => json!(bytes.next()?),
        3 => json!(-i64::from(bytes.next()?)),
        4 => json!(f64::from_bits(bytes.number()?)),
        5 => Value::Null,
        6 => json!(bytes.next()? & 1 == 1),
        7 => json!(words[bytes.below(words.len())?]),
        8 => json.pointer(&places[bytes.below(places.len())?])?.clone(),
        9 => {
            // A power of two near what is there.
            let old = json.pointer(place)?.as_u64()?;
            json!(old.wrapping_shl(u32::from(bytes.next()? % 64)))
        }
        10 => {
            let word = words[bytes.below(words.len())?];
            let value = json!(NUMBERS[bytes.below(NUMBERS.len())?]);
            json.pointer_mut(place)?
                .as_object_mut()?
                .insert(word.into(), value);
            return Some(());
        }
        _ => {
            let (above, last) = place.rsplit_once('/')?;
            match json.pointer_mut(above)? {
                Value::Object(fields) => drop(fields.remove(last)),
                Value::Array(items) => drop(items.remove(last.parse().ok()?)),
                _ => {}
            }
            return Some(());
        }
    };
    *json.pointer_mut(place)? = value;
    Some(())
}

/// JSON pointers of every value. Names with a slash or a tilde are left out.
fn places(json: &Value) -> Vec<String> {
    fn walk(at: String, value: &Value, out: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                for (name, value) in fields.iter().filter(|(n, _)| !n.contains(['/', '~'])) {
                    walk(format!("{at}/{name}"), value, out);
                }
            }
            Value::Array(items) => {
                for (i, value) in items.iter().enumerate() {
                    walk(format!("{at}/{i}"), value, out);
                }
            }
            _ => {}
        }
        out.push(at);
    }
    let mut out = Vec::new();
    walk(String::new(), json, &mut out);
    out
}
