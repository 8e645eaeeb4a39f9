//! The bytes of one file, mapped or in memory.

use crate::LoadError;
use quant::Mapping;
use std::borrow::Cow;
use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// The bytes of one file.
pub(crate) enum Bytes {
    Mapped(Arc<dyn Mapping>),
    Memory(Cow<'static, [u8]>),
}

/// A mapped file.
#[derive(Debug)]
struct Map {
    bytes: memmap2::Mmap,
    stays: AtomicBool,
}

impl Mapping for Map {
    fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn release(&self, part: Range<usize>) {
        #[cfg(unix)]
        {
            let advice = memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the mapping is of a file and read-only, so its pages hold nothing
            // that the file has not, and slices of it stay valid: the next access reads
            // the file.
            #[allow(unsafe_code)]
            let released = unsafe {
                self.bytes
                    .unchecked_advise_range(advice, part.start, part.len())
            };
            // Advice: if it is not taken, memory stays with us until the end of the load.
            let _ = released;
        }
        #[cfg(not(unix))]
        let _ = part;
    }

    fn stays(&self) -> bool {
        self.stays.load(Relaxed)
    }

    fn stay(&self, stays: bool) {
        self.stays.store(stays, Relaxed);
    }
}

impl Bytes {
    /// Maps the regular file at `path`.
    pub(crate) fn map(path: &Path) -> Result<Bytes, LoadError> {
        let io = |source| LoadError::Io {
            path: path.into(),
            source,
        };
        // Asked before opening: opening a named pipe would wait for a writer.
        let meta = std::fs::metadata(path).map_err(io)?;
        if !meta.is_file() {
            return Err(io(std::io::Error::other("not a regular file")));
        }
        if meta.len() == 0 {
            return Ok(Bytes::Memory(Cow::Borrowed(&[]))); // an empty mapping is an error on some systems
        }
        let file = File::open(path).map_err(io)?;
        // SAFETY: the mapping is read-only and lives as long as the slices taken
        // from it. Nothing here can stop another process from changing the file
        // meanwhile. If it is overwritten, weights change under us: header and
        // offsets are read once, checked, and kept outside the mapping, and every
        // bit pattern is a number, so results are wrong but no access leaves the
        // mapping. If it is truncated, touching a page past its new end is a bus
        // error that ends the process. Every engine that maps weights accepts
        // this; download tools write to a temporary name and rename.
        #[allow(unsafe_code)]
        let map = unsafe { memmap2::Mmap::map(&file) }.map_err(io)?;
        Ok(Bytes::Mapped(Arc::new(Map {
            bytes: map,
            stays: AtomicBool::new(false),
        })))
    }

    /// The mapping, if it is one.
    pub(crate) fn mapping(&self) -> Option<&Arc<dyn Mapping>> {
        match self {
            Bytes::Mapped(map) => Some(map),
            Bytes::Memory(_) => None,
        }
    }

    /// Lets the system have back the memory of a mapping; what is touched again is read
    /// again.
    pub(crate) fn release(&self) {
        if let Bytes::Mapped(map) = self {
            map.release(0..map.bytes().len());
        }
    }
}

impl std::ops::Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Bytes::Mapped(map) => map.bytes(),
            Bytes::Memory(bytes) => bytes,
        }
    }
}
