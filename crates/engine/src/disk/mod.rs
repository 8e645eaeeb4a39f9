//! Ended texts on disk: written before they make room for others and when the engine stops, read
//! when a prompt begins like one of them and memory has less of it.
//!
//! ```text
//! engine's thread   round │ a piece or two │ round │ …          pieces are copied between rounds,
//! a file's thread          write, or read and check              files are its own business
//! ```
//!
//! A round may be followed by pieces for a share of its own time ([`WRITE_SHARE`], [`READ_SHARE`]), so
//! running requests wait for that and one piece, whatever the disk does. A text is written once:
//! not when its request ends, since the next turn of a conversation makes it part of a longer one, but
//! when memory is short, those of least worth first; the others when the engine stops.
//!
//! A file is used where its identity is the engine's ([`Identity`]): then its bytes are those that the
//! rows would have if they ran. One that is damaged is removed and told to the log; no request fails
//! for it.

mod folder;
mod identity;
mod threads;

pub use folder::CacheFolder;
pub(crate) use identity::{Identity, Parts};

use crate::counters::Counters;
use cache::{Entry, Namespace, PrefixIndex, RowKey};
use speculate::saved::file::{FileError, Head};
use speculate::saved::{NextPiece, Restored, SavedText, Saving};
use speculate::{Parked, Prompt, Speculator, Stream};
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError};
use std::time::{Duration, Instant};

/// Share of a round's time that writing may take after it.
const WRITE_SHARE: f64 = 1.0 / 16.0;

/// Share of a round's time that reading may take after it: a request waits for it.
const READ_SHARE: f64 = 1.0 / 4.0;

/// Seconds that may be saved up for pieces.
const SPARE_MAX: f64 = 0.05;

/// Fewest rows that are worth a file.
const LEAST_ROWS: usize = 64;

/// Rows more than memory has that are worth reading a file.
const LEAST_GAIN: usize = 64;

/// How often a request looks for a file that others replace at the same time.
const LOOKS: usize = 3;

/// How long the engine's thread waits for a piece when nothing runs, before it looks for requests.
const PATIENCE: Duration = Duration::from_millis(10);

/// How long a request may wait for texts to be written, if nothing runs.
const HURRY: Duration = Duration::from_millis(20);

/// How long an engine that stops goes on writing what only memory has.
const STOP_TIME: Duration = Duration::from_secs(20);

/// A saved text that can be read.
struct Known {
    name: String,
    /// The sum of the file's head.
    sum: [u8; 32],
    bytes: u64,
    text: SavedText,
}

/// A text that is being written.
struct Writing {
    saving: Saving,
    /// A piece that its thread had no room for.
    next: Option<Vec<u8>>,
    pieces: SyncSender<Vec<u8>>,
    thread: threads::Writer,
}

/// A text whose last piece its thread has.
struct Closing {
    namespace: Namespace,
    keys: Vec<RowKey>,
    text: SavedText,
    thread: threads::Writer,
}

/// A text that is being read.
struct Reading {
    entry: Entry,
    pieces: Receiver<Result<Vec<u8>, FileError>>,
    /// What the request that waits for it looks at.
    is_over: Arc<AtomicBool>,
}

/// The folder of saved texts as the engine's thread uses it.
pub(crate) struct Disk {
    folder: CacheFolder,
    identity: Identity,
    /// Texts of the folder, by their tags there.
    index: PrefixIndex,
    known: HashMap<Entry, Known>,
    writing: Option<Writing>,
    closing: Option<Closing>,
    reading: Option<Reading>,
    /// Whether a file could not be written, so that none is any more.
    is_failing: bool,
    /// Seconds that pieces may take before the next round.
    spare: f64,
    counters: Arc<Counters>,
}

impl Disk {
    /// What `folder` has for an engine of this `identity`, whose texts `speculator` can restore.
    pub(crate) fn open(
        folder: CacheFolder,
        identity: Identity,
        speculator: &Speculator,
        counters: Arc<Counters>,
    ) -> Disk {
        let mut disk = Disk {
            folder,
            identity,
            index: PrefixIndex::new(),
            known: HashMap::new(),
            writing: None,
            closing: None,
            reading: None,
            is_failing: false,
            spare: 0.0,
            counters,
        };
        disk.folder.sweep();
        let start = Instant::now();
        for listed in disk.folder.list().into_iter().rev() {
            disk.take_up(&listed.name, listed.bytes, speculator);
        }
        disk.count();
        let (files, ms) = (disk.known.len(), start.elapsed().as_millis());
        tracing::debug!(files, ms, "prefix cache on disk");
        disk
    }

    /// Adds the file called `name` to those that are known, if it is of this engine. One that is
    /// damaged or of another form is removed.
    fn take_up(&mut self, name: &str, bytes: u64, speculator: &Speculator) {
        let (sum, head) = match threads::open(&self.folder.file(name)) {
            Ok((reader, head)) => (reader.sum(), head),
            Err(error) => {
                if !matches!(error, FileError::Io(_)) {
                    let _ = std::fs::remove_file(self.folder.file(name));
                }
                return self.discarded(name, &error);
            }
        };
        // Files of other models stay, and so do those for a longer context than this one's.
        let is_own = head.identity == self.identity.0 && speculator.fits(&head.text, &head.keys);
        if is_own {
            let known = Known {
                name: name.to_owned(),
                sum,
                bytes,
                text: head.text,
            };
            let entry = self.index.insert(head.namespace, head.keys);
            self.known.insert(entry, known);
        }
    }

    /// Whether there is something to do while no request runs.
    pub(crate) fn is_busy(&self, speculator: &Speculator) -> bool {
        let is_writing = self.writing.is_some() || self.closing.is_some();
        self.reading.is_some() || is_writing || self.should_write(speculator)
    }

    fn should_write(&self, speculator: &Speculator) -> bool {
        !self.is_failing && speculator.is_short_of_room() && !speculator.unsaved().is_empty()
    }

    /// Begins to read the text that has most rows for a stream after `prompt`, if memory and the
    /// streams `running` have clearly less of it; `drafts` says whether the stream will be drafted
    /// for. Returns what tells that the text is there, or that it will not be. While another text is
    /// read, the request has to ask again ([`Fetch::Later`]).
    pub(crate) fn fetch(
        &mut self,
        speculator: &mut Speculator,
        prompt: &Prompt,
        running: &[&Stream],
        drafts: bool,
    ) -> Fetch {
        let gain = |disk: &Disk| {
            let best = disk.best(speculator, prompt, drafts);
            best.filter(|&(_, rows)| rows >= speculator.found(prompt, running, drafts) + LEAST_GAIN)
        };
        let mut best = gain(self);
        if best.is_some() && self.reading.is_some() {
            return Fetch::Later;
        }
        for _ in 0..LOOKS {
            match best {
                Some((entry, _)) if self.look_again(entry, speculator) => best = gain(self),
                _ => break,
            }
        }
        let Some((entry, rows)) = best else {
            return Fetch::Nothing;
        };
        let known = &self.known[&entry];
        let (_, keys) = self.index.text(entry);
        let namespace = prompt.namespace();
        let Ok(wanted) = speculator.restore(&known.text, rows, namespace, keys) else {
            return Fetch::Nothing;
        };
        let (folder, name) = (self.folder.clone(), known.name.clone());
        let pieces = match threads::read(folder, name, known.sum, wanted) {
            Ok(pieces) => pieces,
            Err(error) => {
                tracing::warn!(%error, "no thread to read the prefix cache with");
                speculator.stop_restoring();
                return Fetch::Nothing;
            }
        };
        let is_over = Arc::new(AtomicBool::new(false));
        self.reading = Some(Reading {
            entry,
            pieces,
            is_over: is_over.clone(),
        });
        Fetch::Begun(is_over)
    }

    /// Opens the file of `entry` once more. Whether it is no longer the one that is known: another server has
    /// written the same text, with what its own drafter remembers, or has removed it.
    fn look_again(&mut self, entry: Entry, speculator: &Speculator) -> bool {
        let known = &self.known[&entry];
        let name = known.name.clone();
        let path = self.folder.file(&name);
        let sum = threads::open(&path).map(|(reader, _)| reader.sum());
        if sum.is_ok_and(|sum| sum == known.sum) {
            return false;
        }
        self.remove(entry);
        let bytes = std::fs::metadata(&path).map_or(0, |file| file.len());
        self.take_up(&name, bytes, speculator);
        self.count();
        true
    }

    /// The text in which a stream after `prompt` finds most rows, and how many.
    fn best(
        &self,
        speculator: &Speculator,
        prompt: &Prompt,
        drafts: bool,
    ) -> Option<(Entry, usize)> {
        let tag = self.folder.tag(prompt.namespace());
        let mut best: Option<(Entry, usize)> = None;
        for found in self.index.matches(tag, &prompt.keys()) {
            // The others have fewer rows alike.
            if best.is_some_and(|(_, rows)| rows >= found.rows) {
                break;
            }
            let text = &self.known[&found.entry].text;
            let rows = speculator.restorable(text, found.rows, prompt, drafts);
            if best.is_none_or(|(_, most)| rows > most) {
                best = Some((found.entry, rows));
            }
        }
        best
    }

    /// Does what there is to do between two rounds, the first of which took `round`.
    pub(crate) fn beside(&mut self, speculator: &mut Speculator, round: Duration) {
        let share = match self.reading {
            Some(_) => READ_SHARE,
            None => WRITE_SHARE,
        };
        self.spare = (self.spare + share * round.as_secs_f64()).min(SPARE_MAX);
        while self.spare > 0.0 {
            let start = Instant::now();
            let did = self.step(speculator, Duration::ZERO);
            self.spare -= start.elapsed().as_secs_f64();
            if !did {
                break;
            }
        }
    }

    /// Does one thing that there is to do while nothing runs.
    pub(crate) fn idle(&mut self, speculator: &mut Speculator) {
        self.spare = 0.0;
        self.step(speculator, PATIENCE);
    }

    /// Gets on with what is being written before a request starts beside which nothing runs, and which
    /// may want the room of the texts that are not written yet.
    pub(crate) fn hurry(&mut self, speculator: &mut Speculator) {
        let start = Instant::now();
        let is_due = |disk: &Disk, speculator: &Speculator| {
            disk.reading.is_none() && (disk.writing.is_some() || disk.should_write(speculator))
        };
        while start.elapsed() < HURRY && is_due(self, speculator) {
            self.step(speculator, PATIENCE);
        }
    }

    /// Takes or gives a piece, and waits for its thread as long as `patience`. Returns whether it did
    /// anything.
    fn step(&mut self, speculator: &mut Speculator, patience: Duration) -> bool {
        self.close(speculator, patience);
        if self.reading.is_some() {
            return self.read(speculator, patience);
        }
        if self.writing.is_none() && self.closing.is_none() && self.should_write(speculator) {
            let least = speculator.unsaved().into_iter().next();
            least
                .into_iter()
                .for_each(|text| self.begin(speculator, text));
            return true;
        }
        self.write(speculator, patience)
    }

    /// Loads a piece of the text that is being read.
    fn read(&mut self, speculator: &mut Speculator, patience: Duration) -> bool {
        let Some(Reading { entry, pieces, .. }) = &self.reading else {
            return false;
        };
        let entry = *entry;
        let message = match patience {
            Duration::ZERO => pieces.try_recv(),
            patience => pieces.recv_timeout(patience).map_err(|error| match error {
                RecvTimeoutError::Timeout => TryRecvError::Empty,
                RecvTimeoutError::Disconnected => TryRecvError::Disconnected,
            }),
        };
        match message {
            Err(TryRecvError::Empty) => return false,
            Ok(Ok(bytes)) => {
                let n_bytes = &self.counters.disk_read_bytes;
                n_bytes.fetch_add(bytes.len() as u64, Ordering::Relaxed);
                match speculator.load_piece(&bytes) {
                    Restored::Partly => return true,
                    Restored::Whole(_) => {
                        self.counters.disk_hits.fetch_add(1, Ordering::Relaxed);
                    }
                    Restored::Evicted => {}
                    Restored::Misfit => {
                        let wrong = FileError::Damaged("a piece is not what the device has saved");
                        self.forget(entry, &wrong);
                    }
                }
            }
            Ok(Err(error)) => self.forget(entry, &error),
            // Its thread has sent all that was wanted, or panicked.
            Err(TryRecvError::Disconnected) => {}
        }
        speculator.stop_restoring();
        if let Some(reading) = self.reading.take() {
            reading.is_over.store(true, Ordering::Release);
        }
        true
    }

    /// Begins to write a text, unless there is a file from which all can be had.
    fn begin(&mut self, speculator: &mut Speculator, text: Parked) {
        let Some(saving) = speculator.save(text) else {
            return;
        };
        let tag = self.folder.tag(saving.namespace);
        let is_there = |known: (&Entry, &Known)| {
            let (namespace, keys) = self.index.text(*known.0);
            namespace == tag
                && keys.starts_with(&saving.keys)
                && speculator.has_all_of(&known.1.text, &saving.text)
        };
        if saving.text.target.rows < LEAST_ROWS || self.known.iter().any(is_there) {
            speculator.mark_saved(text);
            return;
        }
        let head = Head {
            identity: self.identity.0,
            namespace: tag,
            keys: saving.keys.clone(),
            text: saving.text.clone(),
        };
        let (pieces, thread) = match threads::write(self.folder.clone(), head) {
            Ok(begun) => begun,
            Err(error) => {
                tracing::warn!(%error, "no thread to write the prefix cache with");
                self.is_failing = true;
                return;
            }
        };
        self.writing = Some(Writing {
            saving,
            next: None,
            pieces,
            thread,
        });
    }

    /// Gives a piece of the text that is being written to its thread.
    fn write(&mut self, speculator: &mut Speculator, patience: Duration) -> bool {
        let Some(mut writing) = self.writing.take() else {
            return false;
        };
        let piece = match writing.next.take() {
            Some(bytes) => NextPiece::Bytes(bytes),
            None => speculator.save_piece(&mut writing.saving),
        };
        let bytes = match piece {
            NextPiece::Bytes(bytes) => bytes,
            // Without the others, the thread leaves no file.
            NextPiece::Gone => return true,
            NextPiece::End => {
                speculator.mark_saved(writing.saving.parked());
                let Saving {
                    namespace,
                    keys,
                    text,
                    ..
                } = writing.saving;
                self.closing = Some(Closing {
                    namespace,
                    keys,
                    text,
                    thread: writing.thread,
                });
                return true;
            }
        };
        match writing.pieces.try_send(bytes) {
            Ok(()) => self.writing = Some(writing),
            Err(TrySendError::Full(bytes)) => {
                std::thread::sleep(patience / 10);
                writing.next = Some(bytes);
                self.writing = Some(writing);
                return !patience.is_zero();
            }
            // The thread has failed, or the file would be larger than all may be together.
            Err(TrySendError::Disconnected(_)) => {
                let Writing { saving, thread, .. } = writing;
                speculator.mark_saved(saving.parked());
                self.ended(thread);
            }
        }
        true
    }

    /// Notes a file whose thread has ended, or will within `patience`.
    fn close(&mut self, speculator: &Speculator, patience: Duration) {
        let Some(closing) = &self.closing else { return };
        if !closing.thread.is_finished() {
            std::thread::sleep(patience / 10);
        }
        if !closing.thread.is_finished() {
            return;
        }
        let Some(closing) = self.closing.take() else {
            return;
        };
        let Some(written) = self.ended(closing.thread) else {
            return;
        };
        let n_bytes = &self.counters.disk_written_bytes;
        n_bytes.fetch_add(written.bytes, Ordering::Relaxed);
        let is_gone =
            |known: &Known| known.name == written.name || written.removed.contains(&known.name);
        let gone = self.known.iter().filter(|(_, known)| is_gone(known));
        let gone: Vec<Entry> = gone.map(|(&entry, _)| entry).collect();
        gone.into_iter().for_each(|entry| self.remove(entry));
        let tag = self.folder.tag(closing.namespace);
        // Texts that are a part of it, which everyone can have from it.
        let is_part = |part: &(&Entry, &Known)| {
            let (namespace, keys) = self.index.text(*part.0);
            namespace == tag
                && closing.keys.starts_with(keys)
                && speculator.has_all_of(&closing.text, &part.1.text)
        };
        let parts = self.known.iter().filter(is_part);
        let parts: Vec<(Entry, String)> =
            parts.map(|(&e, known)| (e, known.name.clone())).collect();
        for (entry, name) in parts {
            let _ = std::fs::remove_file(self.folder.file(&name));
            self.remove(entry);
        }
        let entry = self.index.insert(tag, closing.keys);
        let known = Known {
            name: written.name,
            sum: written.sum,
            bytes: written.bytes,
            text: closing.text,
        };
        self.known.insert(entry, known);
        self.count();
    }

    /// What a thread has written, if anything. The first failure is told to the log, and is the last:
    /// no more is written.
    fn ended(&mut self, thread: threads::Writer) -> Option<threads::Written> {
        match thread.join() {
            Ok(Ok(written)) => written,
            Ok(Err(error)) => {
                tracing::warn!(%error, "cannot write the prefix cache to disk; no more is written");
                self.is_failing = true;
                None
            }
            // Its message has been printed.
            Err(_) => {
                self.is_failing = true;
                None
            }
        }
    }

    /// Writes what only memory has, the texts of most worth first, as far as there is time.
    pub(crate) fn finish(&mut self, speculator: &mut Speculator) {
        let deadline = Instant::now() + STOP_TIME;
        self.reading = None;
        speculator.stop_restoring();
        while Instant::now() < deadline {
            if self.writing.is_some() || self.closing.is_some() {
                self.close(speculator, PATIENCE);
                self.write(speculator, PATIENCE);
                continue;
            }
            match speculator.unsaved().pop().filter(|_| !self.is_failing) {
                None => return,
                Some(text) => self.begin(speculator, text),
            }
        }
        tracing::warn!("there was no time to write all of the prefix cache to disk");
    }

    /// Forgets a text whose file cannot be read.
    fn forget(&mut self, entry: Entry, error: &FileError) {
        let name = self.known.get(&entry).map(|known| known.name.clone());
        self.remove(entry);
        self.discarded(&name.unwrap_or_default(), error);
        self.count();
    }

    fn remove(&mut self, entry: Entry) {
        if self.known.remove(&entry).is_some() {
            self.index.remove(entry);
        }
    }

    /// Says that a file is not used.
    fn discarded(&self, name: &str, error: &FileError) {
        if matches!(error, FileError::Io(_)) {
            // Another server has removed it.
            tracing::debug!(%error, file = name, "a saved text is gone");
            return;
        }
        let discarded = &self.counters.disk_discarded_files;
        discarded.fetch_add(1, Ordering::Relaxed);
        tracing::warn!(%error, file = name, "removed a file of the prefix cache on disk");
    }

    fn count(&self) {
        let (files, bytes) = (&self.counters.disk_files, &self.counters.disk_bytes);
        files.store(self.known.len(), Ordering::Relaxed);
        let sum: u64 = self.known.values().map(|known| known.bytes).sum();
        bytes.store(
            usize::try_from(sum).unwrap_or(usize::MAX),
            Ordering::Relaxed,
        );
    }
}

/// Whether a text for a request is being read.
pub(crate) enum Fetch {
    /// Nothing on disk is worth it.
    Nothing,
    /// Another one is being read first.
    Later,
    /// A file is being read; the flag becomes true when that is over.
    Begun(Arc<AtomicBool>),
}
