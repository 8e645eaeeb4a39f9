//! Saved texts as files.
//!
//! ```text
//! magic 8   version 4   length of the head 4   head   SHA-256 of all of this 32
//! for each piece:   length 4   bytes   SHA-256 of the head's sum, number, length and bytes 32
//! ```
//!
//! Numbers are little-endian. The head says what the bytes depend on ([`Head::identity`]), whose text
//! it is, what its rows were computed from, and what there is of it. Sums tell damage; whoever can
//! write the files can also write right sums, so what the head says is checked as well: here
//! against the file's length, by [`Speculator::fits`](crate::Speculator::fits) against the model.

use super::{SavedHead, SavedText};
use crate::draft::{Mark, SavedDraft};
use cache::{Namespace, Outline, RowKey, SnapshotOutline};
use sha2::{Digest, Sha256};
use std::io::{self, Read, Seek, SeekFrom, Write};

/// How a file begins.
const MAGIC: [u8; 8] = *b"PACEKEPT";

/// The version of the form that this file describes. Files of another one are not read.
const VERSION: u32 = 3;

/// Bytes of a head, at most: those of some three million rows.
const HEAD_BYTES_MAX: u32 = 16 << 20;

/// Bytes of a SHA-256.
const SUM_BYTES: usize = 32;

/// Bytes before the head.
const START_BYTES: usize = MAGIC.len() + 4 + 4;

/// What a file is of.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Head {
    /// A hash of everything that the bytes depend on: weights, formats, device, arithmetic.
    pub identity: [u8; 32],
    /// Whose text it is.
    pub namespace: Namespace,
    /// What its rows, and the one after them, are computed from.
    pub keys: Vec<RowKey>,
    /// What there is of it.
    pub text: SavedText,
}

/// What is wrong with a file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file cannot be read or written.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file has another version of the form, or is something else altogether.
    #[error("it is not of version {VERSION} of this form")]
    Other,
    /// The bytes are not those that were written.
    #[error("{0}")]
    Damaged(&'static str),
}

/// Writes a file.
pub struct FileWriter<W> {
    to: W,
    /// The sum of the head.
    head: [u8; SUM_BYTES],
    n_pieces: u32,
    bytes: u64,
}

impl<W: Write> FileWriter<W> {
    /// Writes `head`.
    ///
    /// # Errors
    ///
    /// [`FileError::Damaged`] if it is longer than heads may be, [`FileError::Io`].
    pub fn new(mut to: W, head: &Head) -> Result<Self, FileError> {
        let body = Encoder::of(head);
        let length = u32::try_from(body.len()).ok();
        let length = length.filter(|&n| n <= HEAD_BYTES_MAX);
        let length = length.ok_or(FileError::Damaged("its head would be too long"))?;
        let mut start = MAGIC.to_vec();
        start.extend(VERSION.to_le_bytes());
        start.extend(length.to_le_bytes());
        start.extend(body);
        let sum: [u8; SUM_BYTES] = Sha256::digest(&start).into();
        to.write_all(&start)?;
        to.write_all(&sum)?;
        Ok(FileWriter {
            to,
            head: sum,
            n_pieces: 0,
            bytes: (start.len() + sum.len()) as u64,
        })
    }

    /// Writes the next piece.
    ///
    /// # Errors
    ///
    /// [`FileError::Damaged`] if it has 4 GiB or more, [`FileError::Io`].
    pub fn piece(&mut self, bytes: &[u8]) -> Result<(), FileError> {
        let length = u32::try_from(bytes.len());
        let length = length.map_err(|_| FileError::Damaged("a piece would be too long"))?;
        self.to.write_all(&length.to_le_bytes())?;
        self.to.write_all(bytes)?;
        self.to.write_all(&sum(&self.head, self.n_pieces, bytes))?;
        self.n_pieces += 1;
        self.bytes += (4 + bytes.len() + SUM_BYTES) as u64;
        Ok(())
    }

    /// The sum of the head: files of equal sums have equal heads.
    pub fn sum(&self) -> [u8; 32] {
        self.head
    }

    /// Bytes written.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Ends the file.
    ///
    /// # Errors
    ///
    /// [`FileError::Io`].
    pub fn finish(mut self) -> Result<W, FileError> {
        self.to.flush()?;
        Ok(self.to)
    }
}

/// Reads a file.
pub struct FileReader<R> {
    from: R,
    /// The sum of the head.
    head: [u8; SUM_BYTES],
    n_pieces: u32,
    /// Bytes after those that were read.
    left: u64,
}

impl<R: Read + Seek> FileReader<R> {
    /// Reads the head of a file.
    ///
    /// # Errors
    ///
    /// [`FileError`].
    pub fn open(mut from: R) -> Result<(Self, Head), FileError> {
        let left = from.seek(SeekFrom::End(0))?;
        from.seek(SeekFrom::Start(0))?;
        let mut reader = FileReader {
            from,
            head: [0; SUM_BYTES],
            n_pieces: 0,
            left,
        };
        let mut all = reader.take(START_BYTES as u64)?;
        let (magic, numbers) = all.split_at(MAGIC.len());
        let (version, length) = numbers.split_at(4);
        if magic != MAGIC || version != VERSION.to_le_bytes() {
            return Err(FileError::Other);
        }
        let length = u32::from_le_bytes(length.try_into().expect("four bytes"));
        if length > HEAD_BYTES_MAX {
            return Err(FileError::Damaged("its head is too long"));
        }
        all.extend(reader.take(length.into())?);
        let sum = reader.take(SUM_BYTES as u64)?;
        reader.head = Sha256::digest(&all).into();
        if sum != reader.head {
            return Err(FileError::Damaged("the sum of its head is wrong"));
        }
        let head = Decoder(&all[START_BYTES..]).head();
        let head = head.ok_or(FileError::Damaged("its head cannot be read"))?;
        Ok((reader, head))
    }

    /// The sum of the head: files of equal sums have equal heads.
    pub fn sum(&self) -> [u8; 32] {
        self.head
    }

    /// The next piece, or nothing of it if it is not `wanted`.
    ///
    /// # Errors
    ///
    /// [`FileError`].
    pub fn piece(&mut self, wanted: bool) -> Result<Option<Vec<u8>>, FileError> {
        let length = self.take(4)?.try_into().expect("four bytes");
        let length = u64::from(u32::from_le_bytes(length));
        let number = self.n_pieces;
        self.n_pieces = number.saturating_add(1);
        if !wanted {
            let all = length + SUM_BYTES as u64;
            if all > self.left {
                return Err(FileError::Damaged("it ends too early"));
            }
            self.left -= all;
            self.from.seek_relative(all as i64)?;
            return Ok(None);
        }
        let bytes = self.take(length)?;
        if self.take(SUM_BYTES as u64)? != sum(&self.head, number, &bytes) {
            return Err(FileError::Damaged("the sum of a piece is wrong"));
        }
        Ok(Some(bytes))
    }

    /// Whether all has been read.
    pub fn is_at_end(&self) -> bool {
        self.left == 0
    }

    /// The next `n` bytes; no more memory is taken than there are bytes in the file.
    fn take(&mut self, n: u64) -> Result<Vec<u8>, FileError> {
        if n > self.left {
            return Err(FileError::Damaged("it ends too early"));
        }
        let mut bytes = vec![0; n as usize];
        self.from.read_exact(&mut bytes)?;
        self.left -= n;
        Ok(bytes)
    }
}

/// The sum of piece `number` of a file whose head has the sum `head`.
fn sum(head: &[u8; SUM_BYTES], number: u32, bytes: &[u8]) -> [u8; SUM_BYTES] {
    let sum = Sha256::new().chain_update(head);
    let sum = sum.chain_update(number.to_le_bytes());
    let sum = sum.chain_update((bytes.len() as u64).to_le_bytes());
    sum.chain_update(bytes).finalize().into()
}

/// Bytes of a head so far.
struct Encoder(Vec<u8>);

impl Encoder {
    fn of(head: &Head) -> Vec<u8> {
        let mut to = Encoder(Vec::new());
        to.0.extend(head.identity);
        to.0.extend(head.namespace.0);
        to.number(head.keys.len());
        for key in &head.keys {
            match key {
                RowKey::Token(token) => {
                    to.0.push(0);
                    to.0.extend(token.to_le_bytes());
                }
                RowKey::Media { hash, row } => {
                    to.0.push(1);
                    to.0.extend(hash);
                    to.0.extend(row.to_le_bytes());
                }
            }
        }
        to.outline(&head.text.target);
        to.number(head.text.n_pieces);
        to.number(head.text.heads.len());
        head.text
            .heads
            .iter()
            .for_each(|saved| to.saved_head(saved));
        to.0
    }

    fn saved_head(&mut self, saved: &SavedHead) {
        self.0.push(saved.draft.is_some().into());
        if let Some(draft) = &saved.draft {
            self.outline(&draft.outline);
            self.number(draft.n_unread);
            self.floats(&draft.unread);
            self.number(draft.marks.len());
            for mark in &draft.marks {
                self.number(mark.rows);
                self.floats(&mark.features);
            }
        }
        self.number(saved.n_pieces);
    }

    fn number(&mut self, n: usize) {
        // Rows and pages have numbers below 2³².
        self.0.extend((n as u32).to_le_bytes());
    }

    fn numbers(&mut self, numbers: &[u32]) {
        self.number(numbers.len());
        numbers.iter().for_each(|n| self.0.extend(n.to_le_bytes()));
    }

    fn floats(&mut self, values: &[f32]) {
        self.number(values.len());
        values.iter().for_each(|v| self.0.extend(v.to_le_bytes()));
    }

    fn outline(&mut self, outline: &Outline) {
        self.number(outline.rows);
        self.number(outline.tables.len());
        for (table, &n_pages) in outline.tables.iter().zip(&outline.n_pages) {
            self.number(n_pages);
            self.numbers(table);
        }
        self.number(outline.snapshots.len());
        for snapshot in &outline.snapshots {
            self.number(snapshot.base);
            self.number(snapshot.len);
            self.0.push(snapshot.has_state.into());
            self.number(snapshot.windows.len());
            for (first, pages) in &snapshot.windows {
                self.number(*first);
                self.numbers(pages);
            }
        }
    }
}

/// Bytes of a head that are still to be read. Nothing grows before there are bytes for it.
struct Decoder<'a>(&'a [u8]);

impl Decoder<'_> {
    /// The head that all of the bytes are.
    fn head(mut self) -> Option<Head> {
        let (identity, namespace) = (self.array()?, Namespace(self.array()?));
        let keys = self.many(|from| {
            Some(match from.array()? {
                [0] => RowKey::Token(from.u32()?),
                [1] => RowKey::Media {
                    hash: from.array()?,
                    row: from.u32()?,
                },
                _ => return None,
            })
        })?;
        let target = self.outline()?;
        let text = SavedText {
            target,
            n_pieces: self.number()?,
            heads: self.many(Decoder::saved_head)?,
        };
        let head = Head {
            identity,
            namespace,
            keys,
            text,
        };
        self.0.is_empty().then_some(head)
    }

    fn saved_head(&mut self) -> Option<SavedHead> {
        let draft = match self.flag()? {
            false => None,
            true => Some(SavedDraft {
                outline: self.outline()?,
                n_unread: self.number()?,
                unread: self.floats()?,
                marks: self.many(|from| {
                    Some(Mark {
                        rows: from.number()?,
                        features: from.floats()?.into(),
                    })
                })?,
            }),
        };
        Some(SavedHead {
            draft,
            n_pieces: self.number()?,
        })
    }

    fn outline(&mut self) -> Option<Outline> {
        let rows = self.number()?;
        let groups = self.many(|from| Some((from.number()?, from.many(Decoder::u32)?)))?;
        let snapshots = self.many(|from| {
            Some(SnapshotOutline {
                base: from.number()?,
                len: from.number()?,
                has_state: from.flag()?,
                windows: from.many(|from| Some((from.number()?, from.many(Decoder::u32)?)))?,
            })
        })?;
        let (n_pages, tables) = groups.into_iter().unzip();
        Some(Outline {
            rows,
            n_pages,
            tables,
            snapshots,
        })
    }

    fn floats(&mut self) -> Option<Vec<f32>> {
        self.many(|from| from.array().map(f32::from_le_bytes))
    }

    /// As many of what `one` reads as a number says.
    fn many<T>(&mut self, mut one: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let n = self.number()?;
        let mut all = Vec::new();
        for _ in 0..n {
            all.push(one(self)?);
        }
        Some(all)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (array, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*array)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn number(&mut self) -> Option<usize> {
        self.u32().map(|n| n as usize)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.array()? {
            [0] => Some(false),
            [1] => Some(true),
            _ => None,
        }
    }
}
