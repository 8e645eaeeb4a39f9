//! The GGUF container (`checkpoints.md` §3).
//!
//! ```text
//! "GGUF" | u32 version | u64 tensors | u64 keys
//! key:    string | u32 type | value
//! tensor: string | u32 axes | u64 axis[axes], innermost first | u32 type | u64 offset
//! padding to the alignment, then the data area, from which offsets count
//! ```
//!
//! Everything is proven where it lies before a tensor's name is copied, so a bad
//! header costs some ten megabytes at most, however large it is.

use super::value::{Kind, Metadata, Place};
use super::{ALIGNMENT, MAGIC, MAX_AXES, VERSION};
use crate::LoadError;
use crate::container::{Dtype, Entry};
use crate::error::printable;
use crate::safetensors::MAX_NAME_BYTES;
use std::collections::BTreeMap;

/// Everything in front of the data. A vocabulary of 262 144 entries with its
/// merges takes 20 MB.
pub(crate) const MAX_HEADER_BYTES: usize = 64 << 20;
/// Keys of one file; real ones have some 60.
pub(crate) const MAX_KEYS: u64 = 1 << 12;
/// Tensors of one file; experts are stacked, so the largest model has some 2000.
pub(crate) const MAX_TENSORS: u64 = 1 << 15;
/// Texts of one array; the largest vocabulary has 262 144 and twice as many merges.
const MAX_TEXTS: u64 = 1 << 20;
/// Bytes of a key; the format allows 65 535.
const MAX_KEY_BYTES: usize = 512;
/// The largest `general.alignment`.
const MAX_ALIGNMENT: u64 = 1 << 16;

/// What a file says of itself, proven.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) places: BTreeMap<String, Place>,
    /// In the order of their data.
    pub(crate) entries: Vec<Entry>,
}

/// Types with numbers that are known but that nothing here can read.
const UNREADABLE: &[(u32, &str)] = &[
    (16, "iq2_xxs"),
    (17, "iq2_xs"),
    (18, "iq3_xxs"),
    (19, "iq1_s"),
    (21, "iq3_s"),
    (22, "iq2_s"),
    (29, "iq1_m"),
    (34, "tq1_0"),
    (35, "tq2_0"),
];

/// Numbers from here on mean different types to different programs, so a tensor's
/// length must confirm the meaning.
const FORKED: u32 = 41;

/// The element type that files call `number`.
fn dtype(number: u32) -> Option<Dtype> {
    let plain = |name| Dtype::named(name);
    match number {
        0 => plain("F32"),
        1 => plain("F16"),
        24 => plain("I8"),
        25 => plain("I16"),
        26 => plain("I32"),
        27 => plain("I64"),
        28 => plain("F64"),
        30 => plain("BF16"),
        _ => quant::gguf_format(number).map(Dtype::blocks),
    }
}

/// A tensor as the header lists it.
struct Raw<'a> {
    name: &'a str,
    axes: [u64; MAX_AXES],
    n_axes: usize,
    number: u32,
    offset: u64,
}

impl Raw<'_> {
    /// Outermost axis first.
    fn shape(&self) -> &[u64] {
        &self.axes[..self.n_axes]
    }
}

/// Reads and proves the header of `bytes`, a whole file called `file`.
pub(crate) fn parse(bytes: &[u8], file: &str) -> Result<Header, LoadError> {
    let mut cursor = Cursor { bytes, at: 0, file };
    if cursor.take(4)? != MAGIC {
        return Err(cursor.bad("it does not begin with `GGUF`"));
    }
    let version = cursor.u32()?;
    if version != VERSION && version != 2 {
        return Err(cursor.bad(&if version.swap_bytes() == VERSION {
            "it is in big-endian order".into()
        } else {
            format!("version {version}, known are 2 and {VERSION}")
        }));
    }
    let n_tensors = cursor.count("number of tensors", MAX_TENSORS)?;
    let n_keys = cursor.count("number of keys", MAX_KEYS)?;
    let mut places = BTreeMap::new();
    for _ in 0..n_keys {
        let key = cursor.name("key", MAX_KEY_BYTES)?.to_owned();
        let place = cursor.place(&key)?;
        if places.insert(key.clone(), place).is_some() {
            return Err(cursor.bad(&format!("two keys called `{key}`")));
        }
    }
    let mut raw = Vec::new();
    for _ in 0..n_tensors {
        raw.push(cursor.tensor()?);
    }
    let metadata = Metadata {
        places: &places,
        bytes,
    };
    let alignment = match metadata.scalar("general.alignment") {
        None => ALIGNMENT as u64,
        Some(value) => value
            .as_u64()
            .filter(|a| a.is_power_of_two() && *a <= MAX_ALIGNMENT)
            .ok_or_else(|| cursor.bad("`general.alignment` is no power of two up to 65536"))?,
    };
    let start = (cursor.at as u64).next_multiple_of(alignment);
    // A file without tensors may end before the padding does.
    let data_len = (bytes.len() as u64).saturating_sub(start);
    let entries = prove(raw, start, data_len, alignment, file)?;
    Ok(Header { places, entries })
}

/// Holds what the header claims of the tensors against the data and each other.
fn prove(
    mut raw: Vec<Raw<'_>>,
    start: u64,
    data_len: u64,
    alignment: u64,
    file: &str,
) -> Result<Vec<Entry>, LoadError> {
    raw.sort_unstable_by_key(|raw| raw.name);
    if let Some(pair) = raw.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(LoadError::BadHeader {
            reason: format!("two tensors called `{}`", pair[0].name),
            file: file.into(),
        });
    }
    raw.sort_by_key(|raw| raw.offset);
    let mut before: Option<(&Raw<'_>, u64)> = None;
    for (i, raw_i) in raw.iter().enumerate() {
        let next = raw.get(i + 1).map_or(data_len, |next| next.offset);
        let end = prove_one(raw_i, next, data_len, alignment, file)?;
        if let Some((before, before_end)) = before
            && raw_i.offset < before_end
        {
            return Err(LoadError::Overlap {
                first: before.name.into(),
                second: raw_i.name.into(),
                file: file.into(),
            });
        }
        before = Some((raw_i, end));
    }
    let entry = |raw: &Raw<'_>| {
        let (dtype, len) = size(raw).expect("proven above");
        // The casts are lossless: all are at most the length of the file.
        let begin = (start + raw.offset) as usize;
        Entry {
            name: raw.name.into(),
            dtype,
            shape: raw.shape().iter().map(|&axis| axis as usize).collect(),
            range: begin..begin + len as usize,
        }
    };
    Ok(raw.iter().map(entry).collect())
}

/// Where the tensor `raw`, before one that begins at `next`, ends in the data.
fn prove_one(
    raw: &Raw<'_>,
    next: u64,
    data_len: u64,
    alignment: u64,
    file: &str,
) -> Result<u64, LoadError> {
    let bad = |reason: String| LoadError::BadTensor {
        name: raw.name.into(),
        reason,
        file: file.into(),
    };
    let (dtype, len) = size(raw).map_err(bad)?;
    if !raw.offset.is_multiple_of(alignment) {
        return Err(bad(format!(
            "begins at byte {}, no multiple of {alignment}",
            raw.offset
        )));
    }
    let end = raw.offset.checked_add(len).filter(|end| *end <= data_len);
    let end = end.ok_or_else(|| LoadError::OutOfFile {
        end: raw.offset.saturating_add(len),
        len: data_len,
        name: raw.name.into(),
        file: file.into(),
    })?;
    if raw.number >= FORKED && next > end.next_multiple_of(alignment) {
        return Err(bad(format!(
            "has type number {}, which as {} takes {len} bytes, but {} lie there: another program's type",
            raw.number,
            dtype.name,
            next - raw.offset
        )));
    }
    Ok(end)
}

/// A tensor's type, and the bytes that its shape takes.
fn size(raw: &Raw<'_>) -> Result<(Dtype, u64), String> {
    let dtype = dtype(raw.number).ok_or_else(|| {
        match UNREADABLE.iter().find(|(number, _)| *number == raw.number) {
            Some((_, name)) => format!("is stored as {name}, which cannot be read"),
            None => format!("has the unknown type number {}", raw.number),
        }
    })?;
    let shape = raw.shape();
    if shape.contains(&0) {
        return Err(format!("has shape {shape:?}, with an axis of no elements"));
    }
    let (block, bytes) = dtype.block();
    let (cols, rows) = shape.split_last().map_or((1, &[][..]), |(c, r)| (*c, r));
    if !cols.is_multiple_of(block as u64) {
        return Err(format!(
            "has rows of {cols}, but {} wants a multiple of {block}",
            dtype.name
        ));
    }
    let row = (cols / block as u64).checked_mul(bytes as u64);
    // The product of the axes must fit too: it is asked for.
    let fits = shape.iter().try_fold(1u64, |n, &axis| n.checked_mul(axis));
    let len = row.and_then(|row| rows.iter().try_fold(row, |n, &axis| n.checked_mul(axis)));
    match (len, fits) {
        (Some(len), Some(_)) => Ok((dtype, len)),
        _ => Err(format!("has shape {shape:?}, more than any file can hold")),
    }
}

/// A place in the header.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
    file: &'a str,
}

impl<'a> Cursor<'a> {
    fn bad(&self, reason: &str) -> LoadError {
        LoadError::BadHeader {
            reason: printable(reason),
            file: self.file.into(),
        }
    }

    fn too_large(&self, what: &'static str, found: u64, limit: u64) -> LoadError {
        LoadError::TooLarge {
            what,
            found,
            limit,
            file: self.file.into(),
        }
    }

    /// The next `n` bytes.
    fn take(&mut self, n: usize) -> Result<&'a [u8], LoadError> {
        let end = self.at.saturating_add(n);
        if end > MAX_HEADER_BYTES {
            return Err(self.too_large(
                "header length in bytes",
                end as u64,
                MAX_HEADER_BYTES as u64,
            ));
        }
        let taken = self.bytes.get(self.at..end).ok_or(LoadError::Truncated {
            found: self.bytes.len() as u64,
            needed: end as u64,
            file: self.file.into(),
        })?;
        self.at = end;
        Ok(taken)
    }

    fn u32(&mut self) -> Result<u32, LoadError> {
        Ok(u32::from_le_bytes(
            self.take(4)?.try_into().expect("four bytes"),
        ))
    }

    fn u64(&mut self) -> Result<u64, LoadError> {
        Ok(u64::from_le_bytes(
            self.take(8)?.try_into().expect("eight bytes"),
        ))
    }

    fn count(&mut self, what: &'static str, limit: u64) -> Result<u64, LoadError> {
        let n = self.u64()?;
        if n > limit {
            return Err(self.too_large(what, n, limit));
        }
        Ok(n)
    }

    fn text(&mut self) -> Result<&'a str, LoadError> {
        let at = self.at;
        let len = self.u64()?;
        let bytes = self.take(usize::try_from(len).unwrap_or(usize::MAX))?;
        std::str::from_utf8(bytes)
            .map_err(|_| self.bad(&format!("the text at byte {at} is not UTF-8")))
    }

    /// A short text that can stand in a message.
    fn name(&mut self, what: &str, limit: usize) -> Result<&'a str, LoadError> {
        let at = self.at;
        let name = self.text()?;
        if name.is_empty() || name.len() > limit || name.chars().any(char::is_control) {
            return Err(self.bad(&format!(
                "the {what} at byte {at} is no printable name of 1 to {limit} bytes"
            )));
        }
        Ok(name)
    }

    fn kind(&mut self, key: &str) -> Result<Kind, LoadError> {
        let number = self.u32()?;
        Kind::numbered(number)
            .ok_or_else(|| self.bad(&format!("`{key}` has the unknown type {number}")))
    }

    /// Walks over the value of `key`.
    fn place(&mut self, key: &str) -> Result<Place, LoadError> {
        let mut kind = self.kind(key)?;
        let mut count = None;
        if kind == Kind::Array {
            kind = self.kind(key)?;
            if kind == Kind::Array {
                return Err(self.bad(&format!("`{key}` is an array of arrays")));
            }
            let n = self.count("number of elements", MAX_HEADER_BYTES as u64)?;
            count = Some(n as usize);
        }
        let place = Place {
            kind,
            count,
            at: self.at,
        };
        let n = count.unwrap_or(1);
        match kind.size() {
            Some(size) => {
                let values = self.take(n * size)?;
                if kind == Kind::Bool && values.iter().any(|&v| v > 1) {
                    return Err(self.bad(&format!("`{key}` holds a truth value above 1")));
                }
            }
            None => {
                if n as u64 > MAX_TEXTS {
                    return Err(self.too_large("number of texts", n as u64, MAX_TEXTS));
                }
                for _ in 0..n {
                    self.text()?;
                }
            }
        }
        Ok(place)
    }

    fn tensor(&mut self) -> Result<Raw<'a>, LoadError> {
        let name = self.name("tensor", MAX_NAME_BYTES)?;
        let n_axes = self.u32()? as usize;
        if n_axes > MAX_AXES {
            return Err(LoadError::BadTensor {
                reason: format!("has {n_axes} axes, more than {MAX_AXES}"),
                name: name.into(),
                file: self.file.into(),
            });
        }
        let mut axes = [1; MAX_AXES];
        for axis in axes[..n_axes].iter_mut().rev() {
            *axis = self.u64()?;
        }
        Ok(Raw {
            name,
            axes,
            n_axes,
            number: self.u32()?,
            offset: self.u64()?,
        })
    }
}
