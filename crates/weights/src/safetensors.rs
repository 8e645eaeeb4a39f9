//! The safetensors container (`checkpoints.md` §1).
//!
//! ```text
//! u64 n | n bytes of JSON | data area
//! {"NAME": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]}, …, "__metadata__": {"format": "mlx"}}
//! ```
//!
//! Offsets count from the start of the data area. Entries must lie inside the
//! file and apart from each other; bytes that belong to no entry are allowed.
//!
//! An own reader rather than the `safetensors` crate: its header cap is fixed at
//! 100 MB, its errors name neither tensor nor place, it takes the last of two
//! equal names in silence, and it refuses gaps that other tools write.

use crate::LoadError;
use crate::container::{Contents, Dtype, Entry};
use crate::error::printable;
use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use std::borrow::Cow;
use std::fmt;

/// A header of a real file takes 0.1 KB a tensor.
pub(crate) const MAX_HEADER_BYTES: u64 = 16 << 20;
/// The largest mixture with one tensor an expert and matrix has fewer a file.
pub(crate) const MAX_TENSORS: usize = 1 << 16;
/// Axes of a tensor; the deepest known one (a video patch embedding) has 5.
pub(crate) const MAX_AXES: usize = 8;
/// Bytes of a tensor's name.
pub(crate) const MAX_NAME_BYTES: usize = 512;

/// Bytes in front of the header, which hold its length.
const PREFIX: usize = 8;

/// Reads and proves the header of `bytes`, a whole file called `file`.
pub(crate) fn parse(bytes: &[u8], file: &str) -> Result<Contents, LoadError> {
    let truncated = |needed| LoadError::Truncated {
        found: bytes.len() as u64,
        needed,
        file: file.into(),
    };
    let (prefix, rest) = bytes
        .split_first_chunk::<PREFIX>()
        .ok_or_else(|| truncated(PREFIX as u64))?;
    let header_len = u64::from_le_bytes(*prefix);
    if header_len > MAX_HEADER_BYTES {
        return Err(LoadError::TooLarge {
            what: "header length in bytes",
            found: header_len,
            limit: MAX_HEADER_BYTES,
            file: file.into(),
        });
    }
    // Fits: the limit above is far below any usize.
    let (header, data) = rest
        .split_at_checked(header_len as usize)
        .ok_or_else(|| truncated(PREFIX as u64 + header_len))?;
    let bad = |reason: &str| LoadError::BadHeader {
        reason: printable(reason),
        file: file.into(),
    };

    let mut raw = RawHeader::default();
    let mut json = serde_json::Deserializer::from_slice(header);
    let parsed = raw.deserialize(&mut json).and_then(|()| json.end());
    if raw.is_full {
        return Err(LoadError::TooLarge {
            what: "number of tensors",
            found: MAX_TENSORS as u64 + 1,
            limit: MAX_TENSORS as u64,
            file: file.into(),
        });
    }
    parsed.map_err(|e| bad(&e.to_string()))?;

    // Everything is proven on what borrows from the header: a bad file costs some
    // hundred bytes a tensor and is gone before a name is copied.
    let mut entries = raw.entries;
    for (name, entry) in &entries {
        prove(name, entry, data.len() as u64, file)?;
    }
    entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
    if let Some(pair) = entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
        return Err(bad(&format!("two entries called `{}`", &*pair[0].0)));
    }
    entries.sort_unstable_by_key(|(_, entry)| entry.data_offsets[0]);
    let overlaps =
        |pair: &&[(Name<'_>, RawEntry<'_>)]| pair[1].1.data_offsets[0] < pair[0].1.data_offsets[1];
    if let Some([(first, _), (second, _)]) = entries.windows(2).find(overlaps) {
        return Err(LoadError::Overlap {
            first: first.to_string(),
            second: second.to_string(),
            file: file.into(),
        });
    }

    let data_start = PREFIX + header_len as usize;
    // The casts are lossless: `begin <= end <= data.len()`, and the product of the
    // axes, hence each of them, is at most eight times that.
    let entries = entries.into_iter().map(|(name, raw)| Entry {
        name: name.0.into_owned(),
        dtype: Dtype::named(&raw.dtype).expect("proven above"),
        shape: raw.shape.0.iter().map(|&axis| axis as usize).collect(),
        range: data_start + raw.data_offsets[0] as usize..data_start + raw.data_offsets[1] as usize,
    });
    Ok(Contents {
        entries: entries.collect(),
        says_mlx: raw.says_mlx,
    })
}

/// Holds what the header claims of a tensor against the length of the data.
fn prove(name: &str, raw: &RawEntry<'_>, data_len: u64, file: &str) -> Result<(), LoadError> {
    let bad = |reason: String| LoadError::BadTensor {
        name: name.into(),
        reason,
        file: file.into(),
    };
    let dtype = Dtype::named(&raw.dtype)
        .ok_or_else(|| bad(format!("has the unknown type `{}`", printable(&raw.dtype))))?;
    let shape = &raw.shape.0;
    if shape.contains(&0) {
        return Err(bad(format!(
            "has shape {shape:?}, with an axis of no elements"
        )));
    }
    let bits = shape
        .iter()
        .try_fold(dtype.bits as u64, |n, &axis| n.checked_mul(axis))
        .ok_or_else(|| bad(format!("has shape {shape:?}, more than any file can hold")))?;
    let [begin, end] = raw.data_offsets;
    let len = end
        .checked_sub(begin)
        .ok_or_else(|| bad(format!("ends at byte {end}, before it begins at {begin}")))?;
    if !bits.is_multiple_of(8) || len != bits / 8 {
        let (name, needed) = (dtype.name, bits.div_ceil(8));
        return Err(bad(format!(
            "has {len} bytes of data, but {name} of shape {shape:?} take {needed}"
        )));
    }
    if end > data_len {
        return Err(LoadError::OutOfFile {
            name: name.into(),
            end,
            len: data_len,
            file: file.into(),
        });
    }
    Ok(())
}

/// The header as written. Fills itself while reading, so that a limit ends the
/// reading and not only the loading.
#[derive(Default)]
struct RawHeader<'a> {
    entries: Vec<(Name<'a>, RawEntry<'a>)>,
    says_mlx: bool,
    /// There are more entries than [`MAX_TENSORS`].
    is_full: bool,
}

#[derive(serde::Deserialize)]
struct RawEntry<'a> {
    #[serde(borrow)]
    dtype: Cow<'a, str>,
    shape: Axes,
    data_offsets: [u64; 2],
}

#[derive(serde::Deserialize)]
struct Metadata<'a> {
    #[serde(borrow)]
    format: Option<Cow<'a, str>>,
}

impl<'a> RawHeader<'a> {
    fn deserialize<D: de::Deserializer<'a>>(&mut self, json: D) -> Result<(), D::Error> {
        DeserializeSeed::deserialize(self, json)
    }
}

impl<'de> DeserializeSeed<'de> for &mut RawHeader<'de> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut RawHeader<'de> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Name<'de>>()? {
            if &*name == "__metadata__" {
                let metadata: Option<Metadata<'de>> = map.next_value()?;
                self.says_mlx = metadata.and_then(|m| m.format).is_some_and(|f| f == "mlx");
                continue;
            }
            if self.entries.len() == MAX_TENSORS {
                // Before there is more memory for them.
                self.is_full = true;
                return Err(de::Error::custom("too many tensors"));
            }
            self.entries.push((name, map.next_value()?));
        }
        Ok(())
    }
}

/// A tensor's name, short and free of control characters, so that it can stand
/// in a message.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name<'a>(pub(crate) Cow<'a, str>);

impl std::ops::Deref for Name<'_> {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl<'de> de::Deserialize<'de> for Name<'de> {
    fn deserialize<D: de::Deserializer<'de>>(json: D) -> Result<Name<'de>, D::Error> {
        struct Text;
        fn check<E: de::Error>(name: Cow<'_, str>) -> Result<Name<'_>, E> {
            if name.is_empty() || name.len() > MAX_NAME_BYTES || name.chars().any(char::is_control)
            {
                return Err(E::invalid_value(
                    de::Unexpected::Other("another name"),
                    &Text,
                ));
            }
            Ok(Name(name))
        }
        impl<'de> Visitor<'de> for Text {
            type Value = Name<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a printable name of 1 to {MAX_NAME_BYTES} bytes")
            }

            fn visit_borrowed_str<E: de::Error>(self, name: &'de str) -> Result<Name<'de>, E> {
                check(Cow::Borrowed(name))
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<Name<'de>, E> {
                check(Cow::Owned(name.into()))
            }
        }
        json.deserialize_str(Text)
    }
}

/// A shape of at most [`MAX_AXES`] axes.
struct Axes(Box<[u64]>);

impl<'de> de::Deserialize<'de> for Axes {
    fn deserialize<D: de::Deserializer<'de>>(json: D) -> Result<Axes, D::Error> {
        struct List;
        impl<'de> Visitor<'de> for List {
            type Value = Axes;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a shape of at most {MAX_AXES} axes")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Axes, A::Error> {
                let mut axes = Vec::with_capacity(2);
                while axes.len() < MAX_AXES {
                    match seq.next_element()? {
                        Some(axis) => axes.push(axis),
                        None => return Ok(Axes(axes.into())),
                    }
                }
                match seq.next_element::<IgnoredAny>()? {
                    Some(_) => Err(de::Error::invalid_length(MAX_AXES + 1, &self)),
                    None => Ok(Axes(axes.into())),
                }
            }
        }
        json.deserialize_seq(List)
    }
}
