//! Matrices whose bytes stay in the file that they were read from.

use crate::{Format, Scalar, Stored, Tiles};
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Arc;

/// A file's bytes, mapped into memory.
pub trait Mapping: Debug + Send + Sync {
    /// The bytes of the whole file.
    fn bytes(&self) -> &[u8];

    /// Gives the memory of `part` back to the operating system; what is touched again is
    /// read again.
    fn release(&self, part: Range<usize>);

    /// Whether matrices are to stay in the mapped file instead of being copied.
    fn stays(&self) -> bool;

    /// Sets what [`Mapping::stays`] says from now on.
    fn stay(&self, stays: bool);
}

/// Where `part` lies in `whole`, if it does.
fn within(whole: &[u8], part: &[u8]) -> Option<Range<usize>> {
    let start = (part.as_ptr() as usize).checked_sub(whole.as_ptr() as usize)?;
    let end = start.checked_add(part.len())?;
    (end <= whole.len()).then_some(start..end)
}

/// Bytes in a mapping, or a copy of others.
#[derive(Clone, Debug)]
enum Part {
    Mapped(Range<usize>),
    Copied(Vec<u8>),
}

impl Part {
    fn new(whole: &[u8], part: &[u8]) -> Part {
        within(whole, part).map_or_else(|| Part::Copied(part.to_vec()), Part::Mapped)
    }

    fn of<'a>(&'a self, whole: &'a [u8]) -> &'a [u8] {
        match self {
            Part::Mapped(part) => &whole[part.clone()],
            Part::Copied(bytes) => bytes,
        }
    }
}

/// A matrix like [`Stored`] whose codes lie in a [`Mapping`] that it keeps alive.
#[derive(Clone, Debug)]
pub struct Kept {
    mapping: Arc<dyn Mapping>,
    format: &'static Format,
    /// Rows of the matrix.
    pub rows: usize,
    cols: usize,
    scale: Scalar,
    codes: Range<usize>,
    scales: Part,
    biases: Part,
    tiles: Tiles<'static>,
    factors: Vec<f64>,
}

impl Kept {
    /// Borrows the matrix.
    pub fn view(&self) -> Stored<'_> {
        let bytes = self.mapping.bytes();
        Stored {
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            codes: &bytes[self.codes.clone()],
            scale: self.scale,
            scales: self.scales.of(bytes),
            biases: self.biases.of(bytes),
            tiles: Tiles {
                factors: &self.factors,
                ..self.tiles
            },
            mapping: Some(&self.mapping),
        }
    }
}

impl Stored<'_> {
    /// Keeps the matrix where it lies in a mapped file; `None` if it lies in none, or is
    /// not to stay there. Scales and biases that lie elsewhere are copied.
    pub fn keep(&self) -> Option<Kept> {
        let mapping = self.mapping.filter(|mapping| mapping.stays())?;
        let whole = mapping.bytes();
        Some(Kept {
            mapping: mapping.clone(),
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            scale: self.scale,
            codes: within(whole, self.codes)?,
            scales: Part::new(whole, self.scales),
            biases: Part::new(whole, self.biases),
            tiles: Tiles {
                factors: &[],
                ..self.tiles
            },
            factors: self.tiles.factors.to_vec(),
        })
    }

    /// Gives the memory of the codes of `rows`, which have been copied, back to the
    /// operating system. Does nothing if they lie in no mapped file, or stay there.
    ///
    /// # Panics
    ///
    /// If the range reaches past the last row.
    pub fn release(&self, rows: Range<usize>) {
        let Some(mapping) = self.mapping.filter(|mapping| !mapping.stays()) else {
            return;
        };
        let row = self.format.code_bytes(self.cols);
        let codes = &self.codes[rows.start * row..rows.end * row];
        if let Some(part) = within(mapping.bytes(), codes) {
            mapping.release(part);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

    /// A file in memory that remembers what was released.
    #[derive(Debug)]
    struct File {
        bytes: Vec<u8>,
        stays: AtomicBool,
        released: Mutex<Vec<Range<usize>>>,
    }

    impl Mapping for File {
        fn bytes(&self) -> &[u8] {
            &self.bytes
        }
        fn release(&self, part: Range<usize>) {
            self.released.lock().unwrap().push(part);
        }
        fn stays(&self) -> bool {
            self.stays.load(Relaxed)
        }
        fn stay(&self, stays: bool) {
            self.stays.store(stays, Relaxed);
        }
    }

    fn file() -> Arc<File> {
        Arc::new(File {
            bytes: (0..=255).cycle().take(4096).collect(),
            stays: AtomicBool::new(false),
            released: Mutex::default(),
        })
    }

    #[test]
    fn what_is_kept_is_what_was_stored() {
        let mapping: Arc<dyn Mapping> = file();
        mapping.stay(true);
        let bytes = mapping.bytes();
        let elsewhere = bytes[2048..2048 + 16].to_vec();
        let stored = Stored {
            format: crate::affine(4, 32).unwrap(),
            rows: 4,
            cols: 64,
            codes: &bytes[512..640],
            scale: Scalar::F16,
            scales: &bytes[1024..1040],
            biases: &elsewhere,
            tiles: Tiles::of_rows(0),
            mapping: Some(&mapping),
        };
        let kept = stored.slice(1..3).keep().unwrap();
        assert_eq!(kept.view().to_f32(), stored.slice(1..3).to_f32());
        let copied = elsewhere.repeat(8);
        let codes = Stored {
            codes: &copied,
            ..stored
        };
        assert!(
            codes.keep().is_none(),
            "codes that lie elsewhere stay there"
        );
    }

    #[test]
    fn rows_are_released_once_they_are_copied_and_only_then() {
        for stays in [false, true] {
            let file = file();
            let mapping: Arc<dyn Mapping> = file.clone();
            mapping.stay(stays);
            let stored = Stored {
                mapping: Some(&mapping),
                ..Stored::plain(Scalar::F32, 8, 16, &mapping.bytes()[64..64 + 512])
            };
            assert_eq!(stored.keep().is_some(), stays);
            stored.slice(2..8).release(1..3);
            let released = file.released.lock().unwrap().pop();
            assert_eq!(released, (!stays).then_some(256..384));
        }
    }
}
