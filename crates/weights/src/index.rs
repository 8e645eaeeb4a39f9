//! `model.safetensors.index.json`: which file holds which tensor.
//!
//! A stranger's index may have any number of entries, so one takes eight bytes: where
//! its name stands in the text, and the number of its file.

use crate::LoadError;
use crate::container::MAX_FILES;
use crate::error::printable;
use crate::safetensors::Name;
use serde::de::{self, DeserializeSeed, MapAccess, Visitor};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Component, Path};

/// The file's name.
pub(crate) const INDEX: &str = "model.safetensors.index.json";
/// An index takes 0.1 KB a tensor.
pub(crate) const MAX_INDEX_BYTES: u64 = 32 << 20;
/// Tensors of an index; the largest known mixture of experts has some 200 000.
const MAX_ENTRIES: usize = 1 << 18;

/// Objects and lists of an index, which has two.
const MAX_OPENED: usize = 1 << 16;
/// Bytes of a file's name.
const MAX_FILE_NAME: usize = 4096;

/// The `weight_map` of an index. Every name in it is fit for a message and occurs once,
/// every file lies inside the folder.
pub(crate) struct Index {
    text: Cow<'static, [u8]>,
    /// Sorted by name.
    entries: Vec<Entry>,
    files: Vec<String>,
}

#[derive(Clone, Copy)]
struct Entry {
    /// Where its name begins in the text.
    at: u32,
    len: u16,
    file: u16,
}

impl Entry {
    fn name(self, text: &[u8]) -> &str {
        std::str::from_utf8(self.bytes(text)).expect("a part of a text that was parsed")
    }

    /// The name's bytes, which have the same order as names.
    fn bytes(self, text: &[u8]) -> &[u8] {
        &text[self.at as usize..][..usize::from(self.len)]
    }
}

impl Index {
    /// Reads the text of an index.
    pub(crate) fn parse(text: Cow<'static, [u8]>) -> Result<Index, LoadError> {
        let too_large = |what, found: usize, limit: u64| LoadError::TooLarge {
            what,
            found: found as u64,
            limit,
            file: INDEX.into(),
        };
        if text.len() as u64 > MAX_INDEX_BYTES {
            return Err(too_large(
                "index length in bytes",
                text.len(),
                MAX_INDEX_BYTES,
            ));
        }
        // What is passed over takes a byte a level.
        let opened = text.iter().filter(|b| matches!(**b, b'{' | b'[')).count();
        if opened > MAX_OPENED {
            return Err(too_large(
                "number of JSON lists and objects",
                opened,
                MAX_OPENED as u64,
            ));
        }
        let colons = text.iter().filter(|b| **b == b':').count();
        let mut map = Map {
            text: &text,
            entries: Vec::with_capacity(colons.min(MAX_ENTRIES)),
            files: BTreeMap::new(),
            found: false,
        };
        let mut json = serde_json::Deserializer::from_slice(&text);
        let read = Whole(&mut map)
            .deserialize(&mut json)
            .and_then(|()| json.end());
        let Map {
            mut entries,
            files: numbers,
            ..
        } = map;
        if numbers.len() > MAX_FILES {
            return Err(too_large(
                "number of files",
                numbers.len(),
                MAX_FILES as u64,
            ));
        }
        let bad = |reason: &str| LoadError::BadJson {
            reason: printable(reason),
            file: INDEX.into(),
        };
        read.map_err(|e| bad(&e.to_string()))?;
        let mut files = vec![String::new(); numbers.len()];
        for (file, number) in numbers {
            let outside = |c| !matches!(c, Component::Normal(_));
            if Path::new(&file).components().any(outside)
                || !file.ends_with(".safetensors")
                || file.chars().any(|c| c.is_control() || c == '\\')
            {
                return Err(LoadError::BadShardName {
                    shard: printable(&file),
                });
            }
            files[usize::from(number)] = file;
        }
        entries.sort_unstable_by_key(|entry| entry.bytes(&text));
        let twice = entries
            .windows(2)
            .find(|p| p[0].bytes(&text) == p[1].bytes(&text));
        if let Some(pair) = twice {
            return Err(bad(&format!("two entries for `{}`", pair[0].name(&text))));
        }
        Ok(Index {
            text,
            entries,
            files,
        })
    }

    /// The files of the index, by number.
    pub(crate) fn files(&self) -> &[String] {
        &self.files
    }

    /// Name of every tensor and number of its file, sorted by name.
    pub(crate) fn entries(&self) -> impl ExactSizeIterator<Item = (&str, usize)> {
        let pair = |entry: &Entry| (entry.name(&self.text), usize::from(entry.file));
        self.entries.iter().map(pair)
    }

    /// Where the tensor `name` stands among [`Index::entries`], and its file.
    pub(crate) fn find(&self, name: &str) -> Option<(usize, &str)> {
        let found = self
            .entries
            .binary_search_by(|entry| entry.bytes(&self.text).cmp(name.as_bytes()));
        let at = found.ok()?;
        Some((at, &self.files[usize::from(self.entries[at].file)]))
    }
}

/// A file's name as written.
#[derive(serde::Deserialize)]
struct File<'a>(#[serde(borrow)] Cow<'a, str>);

/// The whole file, of which all but the map is passed over.
struct Whole<'a, 't>(&'a mut Map<'t>);

/// What has been read of the map.
struct Map<'t> {
    text: &'t [u8],
    entries: Vec<Entry>,
    /// By name, so that none has two numbers.
    files: BTreeMap<String, u16>,
    found: bool,
}

impl<'de> DeserializeSeed<'de> for Whole<'_, '_> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Whole<'_, '_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with a `weight_map`")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(field) = map.next_key::<Cow<'de, str>>()? {
            if field != "weight_map" {
                map.next_value::<de::IgnoredAny>()?;
            } else if std::mem::replace(&mut self.0.found, true) {
                return Err(de::Error::duplicate_field("weight_map"));
            } else {
                map.next_value_seed(&mut *self.0)?;
            }
        }
        if !self.0.found {
            return Err(de::Error::missing_field("weight_map"));
        }
        Ok(())
    }
}

impl<'de> DeserializeSeed<'de> for &mut Map<'_> {
    type Value = ();

    fn deserialize<D: de::Deserializer<'de>>(self, json: D) -> Result<(), D::Error> {
        json.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for &mut Map<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of file names")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        while let Some(name) = map.next_key::<Name<'de>>()? {
            let Name(Cow::Borrowed(name)) = name else {
                return Err(de::Error::custom("a tensor's name with escapes"));
            };
            if self.entries.len() == MAX_ENTRIES {
                return Err(de::Error::custom(format!(
                    "more than {MAX_ENTRIES} tensors"
                )));
            }
            let File(file) = map.next_value()?;
            if file.len() > MAX_FILE_NAME {
                return Err(de::Error::custom(format!(
                    "a file's name of {} bytes",
                    file.len()
                )));
            }
            let next = self.files.len() as u16;
            let number = match self.files.get(&*file) {
                Some(number) => *number,
                None => *self.files.entry(file.to_string()).or_insert(next),
            };
            if self.files.len() > MAX_FILES {
                return Err(de::Error::custom("too many files"));
            }
            self.entries.push(Entry {
                // It is borrowed from the text, which is shorter than 4 GB.
                at: (name.as_ptr().addr() - self.text.as_ptr().addr()) as u32,
                len: name.len() as u16,
                file: number,
            });
        }
        Ok(())
    }
}
