//! The end of the time that decoding may take, and a file that cannot be read after it.
//!
//! A thread cannot be stopped from outside. Every decoder reads its file little by little, so that one
//! whose file ends with an error soon stops by itself.

use std::io::{BufRead, Error, ErrorKind, Read, Result, Seek, SeekFrom};
use std::time::{Duration, Instant};

use crate::MediaError;

/// Bytes that are read between two looks at the clock. A JPEG may call for millions of blocks of
/// pixels in so many bytes, which take some ten milliseconds.
const INTERVAL: usize = 64;
/// Bytes that a decoder sees at a time. Deflate makes a thousand times as many of them.
const WINDOW: usize = 4096;

/// When decoding has to have ended.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    end: Instant,
    time: Duration,
}

impl Deadline {
    /// A deadline that is `time` from now.
    pub(crate) fn after(time: Duration) -> Deadline {
        Deadline {
            end: Instant::now() + time,
            time,
        }
    }

    /// How much time is left.
    pub(crate) fn left(&self) -> Duration {
        self.end.saturating_duration_since(Instant::now())
    }

    /// Refuses to go on once time is up.
    pub(crate) fn check(&self) -> std::result::Result<(), MediaError> {
        match Instant::now() < self.end {
            true => Ok(()),
            false => Err(MediaError::TooSlow(self.time)),
        }
    }

    /// What `work` gives, unless time is up by then: what a decoder makes of a file that it could not
    /// read to its end is neither a picture nor what is wrong with the file.
    pub(crate) fn keep<T>(
        &self,
        work: impl FnOnce() -> std::result::Result<T, MediaError>,
    ) -> std::result::Result<T, MediaError> {
        self.check()?;
        let done = work();
        self.check()?;
        done
    }
}

/// The bytes of a file, which can be read until a [`Deadline`].
#[derive(Debug)]
pub(crate) struct Timed<'a> {
    bytes: &'a [u8],
    at: usize,
    deadline: Deadline,
    /// Bytes that may be read before the next look at the clock.
    unlooked: usize,
}

impl<'a> Timed<'a> {
    /// A reader of `bytes` from their start.
    pub(crate) fn new(bytes: &'a [u8], deadline: Deadline) -> Timed<'a> {
        Timed {
            bytes,
            at: 0,
            deadline,
            unlooked: 0,
        }
    }

    /// Bytes of the file.
    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    fn look(&mut self) -> Result<()> {
        if self.unlooked == 0 {
            if self.deadline.check().is_err() {
                return Err(Error::new(ErrorKind::TimedOut, "time is up"));
            }
            self.unlooked = INTERVAL;
        }
        Ok(())
    }

    fn rest(&self) -> &'a [u8] {
        self.bytes.get(self.at..).unwrap_or_default()
    }
}

impl Read for Timed<'_> {
    #[inline]
    fn read(&mut self, out: &mut [u8]) -> Result<usize> {
        self.look()?;
        let rest = self.rest();
        let n = rest.len().min(out.len());
        out[..n].copy_from_slice(&rest[..n]);
        self.consume(n);
        Ok(n)
    }
}

impl BufRead for Timed<'_> {
    #[inline]
    fn fill_buf(&mut self) -> Result<&[u8]> {
        self.look()?;
        let rest = self.rest();
        Ok(&rest[..rest.len().min(WINDOW)])
    }

    #[inline]
    fn consume(&mut self, n: usize) {
        self.at += n;
        // A read at the end of the file counts, too: some decoders go on there.
        self.unlooked = self.unlooked.saturating_sub(n.max(1));
    }
}

impl Seek for Timed<'_> {
    fn seek(&mut self, to: SeekFrom) -> Result<u64> {
        let (from, by) = match to {
            SeekFrom::Start(at) => (0, i128::from(at)),
            SeekFrom::Current(by) => (self.at, i128::from(by)),
            SeekFrom::End(by) => (self.bytes.len(), i128::from(by)),
        };
        let at = usize::try_from(from as i128 + by);
        let before = |_| Error::new(ErrorKind::InvalidInput, "a seek to before the start");
        self.at = at.map_err(before)?;
        Ok(self.at as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_reads_as_its_bytes_until_time_is_up() {
        let bytes: Vec<u8> = (0..10_000).map(|i| (i * 7) as u8).collect();
        let mut file = Timed::new(&bytes, Deadline::after(Duration::from_secs(600)));
        let mut head = [0; 100];
        file.read_exact(&mut head).unwrap();
        assert_eq!(head, bytes[..100]);
        assert!(file.fill_buf().unwrap().len() <= WINDOW);
        let mut rest = Vec::new();
        file.read_to_end(&mut rest).unwrap();
        assert_eq!(rest, bytes[100..]);
        assert_eq!(file.seek(SeekFrom::End(-1)).unwrap(), 9_999);
        assert_eq!(file.fill_buf().unwrap(), &bytes[9_999..]);
        assert!(file.seek(SeekFrom::Current(-10_000)).is_err());
        assert_eq!(file.seek(SeekFrom::Start(20_000)).unwrap(), 20_000);
        assert_eq!(file.read(&mut head).unwrap(), 0);
        file.rewind().unwrap();
        file.deadline = Deadline::after(Duration::ZERO);
        // What was not yet looked at the clock for may still be read.
        let mut read = 0;
        while let Ok(n) = file.read(&mut head[..1]) {
            read += n;
            assert!(read <= INTERVAL, "{read} bytes after the deadline");
        }
        assert!(file.fill_buf().is_err());
    }

    #[test]
    fn the_end_of_a_file_counts_as_reading() {
        let mut file = Timed::new(&[], Deadline::after(Duration::from_secs(600)));
        assert_eq!(file.read(&mut [0]).unwrap(), 0);
        file.deadline = Deadline::after(Duration::ZERO);
        let reads = (0..1000).take_while(|_| file.read(&mut [0]).is_ok());
        assert!(reads.count() <= INTERVAL);
    }
}
