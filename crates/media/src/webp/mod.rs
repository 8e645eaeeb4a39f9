//! What the pixels of a WebP ask for, before its decoder sees it.
//!
//! A lossy picture with a transparency of its own has as many pixels as its frame says, which the decoder takes for granted.
//!
//! A lossless picture is cut into blocks, and each block says by which of up to 65,536 sets of Huffman codes its
//! pixels are written. A set takes twenty kilobytes once it is read, and fifty bytes in the file: five
//! megabytes may ask for more than one gigabyte, whatever the size of the picture is. Here the numbers of
//! the sets are read, which are a small picture before the large one.

mod lossless;

use crate::deadline::Deadline;
use crate::decode::check_size;
use crate::{Limits, MediaError};
use lossless::Bits;

/// Sets of Huffman codes of a picture, at most: the reference encoder writes at most 2600.
const SETS_MAX: u32 = 4096;

/// Refuses a WebP file in which a lossy picture has another size than its frame, or a lossless one asks for too many sets
/// of Huffman codes.
pub(crate) fn check(file: &[u8], limits: &Limits, deadline: Deadline) -> Result<(), MediaError> {
    let chunks = file.get(12..).unwrap_or_default();
    check_chunks(chunks, [0; 2], limits, deadline)
}

/// Checks the pictures in `chunks`; one whose header has no size has `size`, width and height.
fn check_chunks(
    mut chunks: &[u8],
    mut size: [u32; 2],
    limits: &Limits,
    deadline: Deadline,
) -> Result<(), MediaError> {
    while let Some((head, rest)) = chunks.split_first_chunk::<8>() {
        deadline.check()?;
        let length = u32::from_le_bytes(head[4..].try_into().expect("4 of 8 bytes")) as usize;
        let data = rest.get(..length).unwrap_or(rest);
        match &head[..4] {
            b"VP8X" => size = sizes(data, 4).unwrap_or(size),
            b"ANMF" => {
                let size = sizes(data, 6).unwrap_or_default();
                check_chunks(data.get(16..).unwrap_or_default(), size, limits, deadline)?;
            }
            // One byte says how it is compressed: 1 is lossless, without a header.
            b"ALPH" if data.first().is_some_and(|how| how & 3 == 1) => {
                check_sets(&mut Bits::new(&data[1..], deadline), size, limits)?;
            }
            b"VP8L" => {
                let mut bits = Bits::new(data, deadline);
                let size = bits.size().ok_or_else(unreadable)?;
                check_sets(&mut bits, size, limits)?;
            }
            b"VP8 " if lossy_size(data).is_some_and(|own| size != [0; 2] && own != size) => {
                return Err(MediaError::Broken(
                    "a picture has another size than its frame".to_owned(),
                ));
            }
            _ => {}
        }
        // Chunks begin at even places.
        chunks = rest.get(length.next_multiple_of(2)..).unwrap_or_default();
    }
    Ok(())
}

/// Width and height that begin at byte `at`: both less one, in three bytes.
fn sizes(data: &[u8], at: usize) -> Option<[u32; 2]> {
    let number = |at: usize| {
        let bytes = data.get(at..at + 3)?;
        Some(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]) + 1)
    };
    Some([number(at)?, number(at + 3)?])
}

/// Width and height of a lossy picture, 14 bits each behind its tag and start code.
fn lossy_size(data: &[u8]) -> Option<[u32; 2]> {
    let bytes = data.get(6..10)?;
    let number = |at: usize| u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]) & 0x3fff);
    Some([number(0), number(2)])
}

/// Checks the picture of `size` that `bits` are.
fn check_sets(bits: &mut Bits<'_>, size: [u32; 2], limits: &Limits) -> Result<(), MediaError> {
    check_size(size[0], size[1], limits)?;
    match bits.sets(size) {
        Some(sets) if sets > SETS_MAX => Err(MediaError::Broken(format!(
            "its pixels have {sets} sets of Huffman codes"
        ))),
        // Cut off or odd, or time is up.
        None => Err(unreadable()),
        Some(_) => Ok(()),
    }
}

fn unreadable() -> MediaError {
    MediaError::Broken("its pixels cannot be read".to_owned())
}
