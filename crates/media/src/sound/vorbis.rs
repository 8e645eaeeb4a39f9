//! What the codebooks of a Vorbis file would take.
//!
//! A codebook of twenty bytes may ask for 131,072 vectors of 32 numbers, and a file may have 256 of them:
//! gigabytes, before a sample is there. Their headers are read here first.

use crate::MediaError;

/// Bytes of the identification header, which comes before the one with the codebooks.
const IDENTIFICATION_BYTES: usize = 30;
/// How the header with the codebooks begins.
const SETUP: &[u8] = b"\x05vorbis";
/// How a codebook begins.
const SYNC: u32 = 0x56_4342;
/// Entries of all codebooks, at most. Those of the reference encoder have some ten thousand.
const ENTRIES_MAX: u64 = 1 << 18;
/// Numbers of all vectors of codebooks, at most: 16 MB.
const NUMBERS_MAX: u64 = 1 << 22;

/// Refuses codebooks that would take too much memory, by the `setup` of the codec: the identification
/// header and the setup header. What ends early or is odd is left to the decoder, which refuses it.
pub(super) fn check_codebooks(setup: &[u8]) -> Result<(), MediaError> {
    let header = setup.get(IDENTIFICATION_BYTES..).unwrap_or_default();
    let Some(books) = header.strip_prefix(SETUP) else {
        return Ok(());
    };
    let mut bits = Bits {
        bytes: books,
        at: 0,
    };
    let (mut entries, mut numbers) = (0, 0);
    let count = bits.take(8).unwrap_or_default() + 1;
    for _ in 0..count {
        let Some(book) = Book::read(&mut bits) else {
            break;
        };
        entries += book.entries;
        numbers += book.numbers;
    }
    match entries <= ENTRIES_MAX && numbers <= NUMBERS_MAX {
        true => Ok(()),
        false => Err(MediaError::Broken(format!(
            "its codebooks have {entries} entries with {numbers} numbers"
        ))),
    }
}

/// What a codebook asks for.
struct Book {
    entries: u64,
    numbers: u64,
}

impl Book {
    /// Reads over a codebook; nothing if it is cut off or odd.
    fn read(bits: &mut Bits<'_>) -> Option<Book> {
        if bits.take(24)? != SYNC {
            return None;
        }
        let (dimensions, entries) = (bits.take(16)?, bits.take(24)?);
        let asked = |has_vectors: bool| Book {
            entries: u64::from(entries),
            numbers: u64::from(has_vectors) * u64::from(entries) * u64::from(dimensions),
        };
        match bits.take(1)? == 1 {
            true => skip_ordered(bits, entries)?,
            false => match bits.take(1)? == 1 {
                true => {
                    for _ in 0..entries {
                        if bits.take(1)? == 1 {
                            bits.skip(5);
                        }
                    }
                }
                false => bits.skip(5 * u64::from(entries)),
            },
        }
        let kind = bits.take(4)?;
        if kind == 0 {
            return Some(asked(false));
        }
        bits.skip(64);
        let width = bits.take(4)? + 1;
        bits.skip(1);
        let values = match kind {
            1 => root(entries, dimensions),
            _ => u64::from(entries) * u64::from(dimensions),
        };
        bits.skip(values * u64::from(width));
        Some(asked(true))
    }
}

/// Reads over the lengths of `entries` code words that come in the order of their lengths.
fn skip_ordered(bits: &mut Bits<'_>, entries: u32) -> Option<()> {
    bits.skip(5);
    let mut left = entries;
    while left > 0 {
        left = left.checked_sub(bits.take(32 - left.leading_zeros())?)?;
    }
    Some(())
}

/// The largest number whose power of `dimensions` is at most `entries`.
fn root(entries: u32, dimensions: u32) -> u64 {
    let fits = |n: u64| {
        let power = n.checked_pow(dimensions);
        power.is_some_and(|power| power <= u64::from(entries))
    };
    match dimensions {
        0 => 0,
        _ => (1..).take_while(|n| fits(*n)).last().unwrap_or_default(),
    }
}

/// Bits, the lowest of each byte first.
struct Bits<'a> {
    bytes: &'a [u8],
    at: u64,
}

impl Bits<'_> {
    /// The next `n` bits, at most 32; nothing if there are fewer.
    fn take(&mut self, n: u32) -> Option<u32> {
        let mut value = 0;
        for i in 0..n {
            let byte = self.bytes.get(usize::try_from(self.at / 8).ok()?)?;
            value |= u32::from(byte >> (self.at % 8) & 1) << i;
            self.at += 1;
        }
        Some(value)
    }

    fn skip(&mut self, n: u64) {
        self.at = self.at.saturating_add(n);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_the_largest_number_whose_power_fits() {
        for (entries, dimensions, expected) in [
            (0, 1, 0),
            (1, 32, 1),
            (81, 4, 3),
            (80, 4, 2),
            (6561, 8, 3),
            (131_072, 1, 131_072),
            (625, 4, 5),
            (9, 0, 0),
        ] {
            assert_eq!(
                root(entries, dimensions),
                expected,
                "{entries}, {dimensions}"
            );
        }
    }
}
