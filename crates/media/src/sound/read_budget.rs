//! A file of which a container may read only so much at a time.
//!
//! Tags of a sound take fifty times their bytes once they are read, and one after the other are kept
//! until the first sample. A container that reads on and on without giving sound is stopped.

use std::io::{Error, Read, Result, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use symphonia::core::io::MediaSource;

use crate::deadline::Timed;
use crate::error::check;
use crate::{Bound, MediaError};

/// Bytes that may be read until the next packet of sound: headers, tags and pictures.
const BYTES: u64 = 2 << 20;

/// How much has been read since the last packet.
#[derive(Clone, Debug, Default)]
pub(super) struct ReadBudget(Arc<AtomicU64>);

impl ReadBudget {
    /// `file`, which can be read as far as the budget allows.
    pub(super) fn limit<'a>(&self, file: Timed<'a>) -> BudgetedFile<'a> {
        let budget = self.clone();
        BudgetedFile { file, budget }
    }

    /// Allows the container to read on: it has given a packet.
    pub(super) fn renew(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    /// Refuses to go on if more was to be read than allowed.
    pub(super) fn check(&self) -> std::result::Result<(), MediaError> {
        check(Bound::Tags, BYTES, self.0.load(Ordering::Relaxed))
    }
}

/// A file of which a [`ReadBudget`] says how much may be read.
pub(super) struct BudgetedFile<'a> {
    file: Timed<'a>,
    budget: ReadBudget,
}

impl Read for BudgetedFile<'_> {
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        let read = self.file.read(out)?;
        // A read at the end of the file counts, too.
        self.budget
            .0
            .fetch_add(read.max(1) as u64, Ordering::Relaxed);
        match self.budget.check() {
            Ok(()) => Ok(read),
            Err(error) => Err(Error::other(error)),
        }
    }
}

impl Seek for BudgetedFile<'_> {
    fn seek(&mut self, to: SeekFrom) -> Result<u64> {
        self.file.seek(to)
    }
}

impl MediaSource for BudgetedFile<'_> {
    fn is_seekable(&self) -> bool {
        true
    }

    fn byte_len(&self) -> Option<u64> {
        Some(self.file.len() as u64)
    }
}
