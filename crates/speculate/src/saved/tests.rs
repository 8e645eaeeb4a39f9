//! Files of saved texts: what is written is read, and nothing else is taken for it.

use super::file::{FileError, FileReader, FileWriter, Head};
use super::{SavedHead, SavedText};
use crate::draft::{Mark, SavedDraft};
use cache::{Namespace, Outline, RowKey, SnapshotOutline};
use std::io::Cursor;

fn head() -> Head {
    let outline = |rows: usize| Outline {
        rows,
        n_pages: vec![2, 1],
        tables: vec![vec![0, 1], vec![u32::MAX, 0]],
        snapshots: vec![SnapshotOutline {
            base: 70,
            len: 72,
            has_state: true,
            windows: vec![(0, vec![]), (1, vec![0])],
        }],
    };
    let media = |row| RowKey::Media { hash: [9; 16], row };
    let keys = (0..98).map(RowKey::Token).chain((0..3).map(media));
    Head {
        identity: [1; 32],
        namespace: Namespace([2; 32]),
        keys: keys.collect(),
        text: SavedText {
            target: outline(100),
            n_pieces: 2,
            heads: vec![
                SavedHead {
                    draft: Some(SavedDraft {
                        outline: outline(98),
                        n_unread: 2,
                        unread: vec![0.5, -1.0, 3.0, f32::MIN],
                        marks: vec![Mark {
                            rows: 64,
                            features: [2.5, -0.25].into(),
                        }],
                    }),
                    n_pieces: 1,
                },
                SavedHead::default(),
                SavedHead {
                    draft: Some(SavedDraft {
                        outline: outline(60),
                        ..SavedDraft::default()
                    }),
                    n_pieces: 1,
                },
            ],
        },
    }
}

/// A file of [`head`], and its pieces.
fn file() -> (Vec<u8>, Vec<Vec<u8>>) {
    let pieces: Vec<Vec<u8>> = (0..4u8).map(|i| vec![i; 10 * usize::from(i)]).collect();
    let mut writer = FileWriter::new(Vec::new(), &head()).unwrap();
    pieces.iter().for_each(|piece| writer.piece(piece).unwrap());
    let (sum, n_bytes) = (writer.sum(), writer.bytes());
    let bytes = writer.finish().unwrap();
    assert_eq!(n_bytes, bytes.len() as u64);
    assert_eq!(FileReader::open(Cursor::new(&bytes)).unwrap().0.sum(), sum);
    (bytes, pieces)
}

/// All that is in a file.
fn read(bytes: &[u8]) -> Result<(Head, Vec<Vec<u8>>), FileError> {
    let (mut reader, head) = FileReader::open(Cursor::new(bytes))?;
    let mut pieces = Vec::new();
    for _ in 0..head.text.all_pieces() {
        pieces.extend(reader.piece(true)?);
    }
    match reader.is_at_end() {
        true => Ok((head, pieces)),
        false => Err(FileError::Damaged("something follows")),
    }
}

#[test]
fn what_is_written_is_read_and_what_is_not_wanted_is_left_out() {
    let (bytes, pieces) = file();
    let (read_head, read_pieces) = read(&bytes).unwrap();
    assert_eq!((read_head, &read_pieces), (head(), &pieces));
    let (mut reader, _) = FileReader::open(Cursor::new(&bytes)).unwrap();
    for (i, piece) in pieces.iter().enumerate() {
        let got = reader.piece(i % 2 == 1).unwrap();
        assert_eq!(got.as_ref(), (i % 2 == 1).then_some(piece));
    }
    assert!(reader.is_at_end());
}

#[test]
fn every_cut_and_every_flipped_bit_is_noticed() {
    let (bytes, _) = file();
    for n in 0..bytes.len() {
        assert!(read(&bytes[..n]).is_err(), "{n} of {} bytes", bytes.len());
    }
    assert!(read(&[&bytes[..], &[0]].concat()).is_err());
    for bit in 0..8 * bytes.len() {
        let mut flipped = bytes.clone();
        flipped[bit / 8] ^= 1 << (bit % 8);
        assert!(
            read(&flipped).is_err(),
            "bit {bit} of {} bytes",
            bytes.len()
        );
    }
}

#[test]
fn lengths_that_are_no_file_s_take_no_memory() {
    let (bytes, _) = file();
    // The head's length, then that of the first piece.
    let length = u32::from_le_bytes(bytes[12..16].try_into().unwrap()) as usize;
    for at in [12, 16 + length + 32] {
        let mut long = bytes.clone();
        long[at..at + 4].copy_from_slice(&u32::MAX.to_le_bytes());
        assert!(matches!(read(&long), Err(FileError::Damaged(_))));
    }
    let mut other = bytes;
    other[8] += 1;
    assert!(matches!(read(&other), Err(FileError::Other)));
}
