//! Threads that write and read the files of saved texts, so that the engine's thread never waits for
//! a disk: one thread a file.

use super::folder::{CacheFolder, name};
use speculate::saved::file::{FileError, FileReader, FileWriter, Head};
use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::{Builder, JoinHandle};
use std::time::SystemTime;

/// Pieces that wait between two threads, at most.
const PIECES_MAX: usize = 4;

/// Bytes of a buffer before a file.
const BUFFER_BYTES: usize = 1 << 18;

/// A file that is there.
pub(super) struct Written {
    pub(super) name: String,
    /// The sum of its head.
    pub(super) sum: [u8; 32],
    pub(super) bytes: u64,
    /// The names of files that made room for it.
    pub(super) removed: Vec<String>,
}

/// A file that is being written.
pub(super) type Writer = JoinHandle<Result<Option<Written>, FileError>>;

/// Writes a file of `head`, whose pieces the sender takes. Without all of them there will be none, nor
/// if there is no room for it.
///
/// # Errors
///
/// If the system cannot start a thread.
pub(super) fn write(folder: CacheFolder, head: Head) -> io::Result<(SyncSender<Vec<u8>>, Writer)> {
    let (pieces, inbox) = sync_channel(PIECES_MAX);
    let thread = Builder::new().name("cache-write".into());
    let thread = thread.spawn(move || write_file(&folder, &head, &inbox))?;
    Ok((pieces, thread))
}

fn write_file(
    folder: &CacheFolder,
    head: &Head,
    pieces: &Receiver<Vec<u8>>,
) -> Result<Option<Written>, FileError> {
    let name = name(head);
    let (part, file) = folder.begin(&name)?;
    let written = write_pieces(folder, head, pieces, file).and_then(|written| {
        let Some((sum, bytes)) = written else {
            return Ok(None);
        };
        let removed = folder.make_room(&name, bytes);
        fs::rename(&part, folder.file(&name))?;
        Ok(Some(Written {
            name,
            sum,
            bytes,
            removed,
        }))
    });
    if !matches!(written, Ok(Some(_))) {
        let _ = fs::remove_file(&part);
    }
    written
}

/// Writes head and pieces; returns the sum of the head and the bytes in all, or nothing if the file
/// is none.
fn write_pieces(
    folder: &CacheFolder,
    head: &Head,
    pieces: &Receiver<Vec<u8>>,
    file: File,
) -> Result<Option<([u8; 32], u64)>, FileError> {
    let to = BufWriter::with_capacity(BUFFER_BYTES, file);
    let mut writer = FileWriter::new(to, head)?;
    let mut n_pieces = 0;
    for piece in pieces {
        writer.piece(&piece)?;
        n_pieces += 1;
        if writer.bytes() > folder.bytes_max() {
            return Ok(None);
        }
    }
    let (sum, bytes) = (writer.sum(), writer.bytes());
    writer.finish()?;
    Ok((n_pieces == head.text.all_pieces()).then_some((sum, bytes)))
}

/// Reads the pieces that are `wanted` of the file called `name`, whose head should have the sum
/// `sum`. An error is the last message. A file that is damaged is removed.
///
/// # Errors
///
/// If the system cannot start a thread.
pub(super) fn read(
    folder: CacheFolder,
    name: String,
    sum: [u8; 32],
    wanted: Vec<bool>,
) -> io::Result<Receiver<Result<Vec<u8>, FileError>>> {
    let (pieces, inbox) = sync_channel(PIECES_MAX);
    let thread = Builder::new().name("cache-read".into());
    thread.spawn(move || {
        let path = folder.file(&name);
        if let Err(error) = read_file(&path, sum, &wanted, &pieces) {
            if matches!(error, FileError::Damaged(_) | FileError::Other) {
                let _ = fs::remove_file(&path);
            }
            // Nobody waits any more if the receiver is gone.
            let _ = pieces.send(Err(error));
        }
    })?;
    Ok(inbox)
}

fn read_file(
    path: &Path,
    sum: [u8; 32],
    wanted: &[bool],
    pieces: &SyncSender<Result<Vec<u8>, FileError>>,
) -> Result<(), FileError> {
    let (mut reader, _) = open(path)?;
    if reader.sum() != sum {
        let changed = "another server has written it anew";
        return Err(FileError::Io(io::Error::other(changed)));
    }
    // A text that is asked for is worth more.
    let _ = File::open(path).and_then(|file| file.set_modified(SystemTime::now()));
    let last = wanted.iter().rposition(|&wanted| wanted);
    for &wanted in &wanted[..last.map_or(0, |last| last + 1)] {
        if let Some(bytes) = reader.piece(wanted)?
            && pieces.send(Ok(bytes)).is_err()
        {
            break;
        }
    }
    Ok(())
}

/// Opens the file at `path` and reads its head.
pub(super) fn open(path: &Path) -> Result<(FileReader<BufReader<File>>, Head), FileError> {
    FileReader::open(BufReader::with_capacity(BUFFER_BYTES, File::open(path)?))
}
