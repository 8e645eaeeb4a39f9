//! The typed values of a GGUF file's metadata.

use std::borrow::Cow;
use std::collections::BTreeMap;

/// The type of a value, by its number in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the types' own names
pub enum Kind {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl Kind {
    /// The type with this number.
    pub(crate) fn numbered(n: u32) -> Option<Kind> {
        use Kind::*;
        let all = [
            U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64,
        ];
        all.get(n as usize).copied()
    }

    /// Bytes of a value; `None` where they vary.
    pub(crate) fn size(self) -> Option<usize> {
        match self {
            Kind::U8 | Kind::I8 | Kind::Bool => Some(1),
            Kind::U16 | Kind::I16 => Some(2),
            Kind::U32 | Kind::I32 | Kind::F32 => Some(4),
            Kind::U64 | Kind::I64 | Kind::F64 => Some(8),
            Kind::String | Kind::Array => None,
        }
    }
}

/// One value. Integers may be stored in any width, so read them through
/// [`Value::as_u64`] and its companions.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // one a type
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(Cow<'a, str>),
    /// Values of one type, which is no array.
    Array(Kind, Vec<Value<'a>>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl Value<'_> {
    /// The value's type.
    pub fn kind(&self) -> Kind {
        match self {
            Value::U8(_) => Kind::U8,
            Value::I8(_) => Kind::I8,
            Value::U16(_) => Kind::U16,
            Value::I16(_) => Kind::I16,
            Value::U32(_) => Kind::U32,
            Value::I32(_) => Kind::I32,
            Value::F32(_) => Kind::F32,
            Value::Bool(_) => Kind::Bool,
            Value::String(_) => Kind::String,
            Value::Array(..) => Kind::Array,
            Value::U64(_) => Kind::U64,
            Value::I64(_) => Kind::I64,
            Value::F64(_) => Kind::F64,
        }
    }

    /// The value, if it is an integer of any width that fits.
    pub fn as_i64(&self) -> Option<i64> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => return v.try_into().ok(),
            Value::I64(v) => v,
            _ => return None,
        })
    }

    /// The value, if it is an integer of any width that is not negative.
    pub fn as_u64(&self) -> Option<u64> {
        match *self {
            Value::U64(v) => Some(v),
            _ => self.as_i64()?.try_into().ok(),
        }
    }

    /// The value, if it is a float of any width.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is a truth value.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            Value::Bool(v) => Some(v),
            _ => None,
        }
    }

    /// The value, if it is a text.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Value::String(v) => Some(v),
            _ => None,
        }
    }

    /// The elements, if the value is an array.
    pub fn as_array(&self) -> Option<&[Self]> {
        match self {
            Value::Array(_, items) => Some(items),
            _ => None,
        }
    }
}

impl<'a> From<&'a str> for Value<'a> {
    fn from(text: &'a str) -> Self {
        Value::String(text.into())
    }
}

/// Where a value lies in its file, proven to be whole and, if text, UTF-8.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    /// The type of the value; of an array's elements.
    pub(crate) kind: Kind,
    /// Elements, if it is an array.
    pub(crate) count: Option<usize>,
    /// The first byte of the value; of an array, of its first element.
    pub(crate) at: usize,
}

/// The metadata of a GGUF file, left where it lies.
#[derive(Clone, Copy)]
pub struct Metadata<'a> {
    pub(crate) places: &'a BTreeMap<String, Place>,
    pub(crate) bytes: &'a [u8],
}

impl<'a> Metadata<'a> {
    /// All keys, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &'a str> {
        self.places.keys().map(String::as_str)
    }

    /// The value of `key`, if it is there.
    pub fn get(&self, key: &str) -> Option<Value<'a>> {
        let place = self.places.get(key)?;
        let mut at = place.at;
        Some(match place.count {
            None => self.read(place.kind, &mut at),
            Some(n) => {
                let items = (0..n).map(|_| self.read(place.kind, &mut at)).collect();
                Value::Array(place.kind, items)
            }
        })
    }

    /// The value of `key`, if it is there and no array: an array may be as long as the
    /// file.
    pub fn scalar(&self, key: &str) -> Option<Value<'a>> {
        let place = self.places.get(key)?;
        place.count.is_none().then(|| self.get(key))?
    }

    /// Elements of the array `key`; `None` if there is none.
    pub fn count(&self, key: &str) -> Option<usize> {
        self.places.get(key)?.count
    }

    /// The text of `key`.
    pub fn text(&self, key: &str) -> Option<Cow<'a, str>> {
        match self.scalar(key)? {
            Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// The value of type `kind` at `at`, which is moved behind it.
    fn read(&self, kind: Kind, at: &mut usize) -> Value<'a> {
        fn take<'a, const N: usize>(bytes: &'a [u8], at: &mut usize) -> [u8; N] {
            let bytes: &'a [u8] = &bytes[*at..*at + N];
            *at += N;
            bytes.try_into().expect("as many bytes")
        }
        let bytes = self.bytes;
        match kind {
            Kind::U8 => Value::U8(u8::from_le_bytes(take(bytes, at))),
            Kind::I8 => Value::I8(i8::from_le_bytes(take(bytes, at))),
            Kind::U16 => Value::U16(u16::from_le_bytes(take(bytes, at))),
            Kind::I16 => Value::I16(i16::from_le_bytes(take(bytes, at))),
            Kind::U32 => Value::U32(u32::from_le_bytes(take(bytes, at))),
            Kind::I32 => Value::I32(i32::from_le_bytes(take(bytes, at))),
            Kind::F32 => Value::F32(f32::from_le_bytes(take(bytes, at))),
            Kind::Bool => Value::Bool(take::<1>(bytes, at) != [0]),
            Kind::U64 => Value::U64(u64::from_le_bytes(take(bytes, at))),
            Kind::I64 => Value::I64(i64::from_le_bytes(take(bytes, at))),
            Kind::F64 => Value::F64(f64::from_le_bytes(take(bytes, at))),
            Kind::String => {
                let len = u64::from_le_bytes(take(bytes, at)) as usize;
                // Proven when the header was read, but the file may have changed
                // since (`mapped.rs`).
                let text = bytes.get(*at..at.saturating_add(len)).unwrap_or(&[]);
                *at += text.len();
                Value::String(String::from_utf8_lossy(text))
            }
            Kind::Array => unreachable!("no array of arrays is let in"),
        }
    }
}
