//! Traces, written: a thread of its own behind a bounded queue.
//!
//! A disk may be slow, and an engine does not wait for it: a line that does not fit into the queue is
//! counted and lost.

use crate::schema::{Delivery, Header, Line, Model, Round, SCHEMA, Summary, VERSION};
use speculate::StepRecord;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Instant, SystemTime};

/// Lines that wait for the disk, at most: seconds of a fast engine, in less than 10 MB.
const QUEUE: usize = 4096;

/// What the thread is told.
enum Message {
    Line(Box<Line>),
    End,
}

/// Writes a trace. Dropping it ends the trace.
pub struct Writer {
    start: Instant,
    messages: SyncSender<Message>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// Lines that did not fit into the queue.
    lost: Arc<AtomicU64>,
    models: AtomicUsize,
}

impl Writer {
    /// Creates the file `path`, or empties it, and writes the header.
    ///
    /// # Errors
    ///
    /// If the file cannot be created or written.
    ///
    /// # Panics
    ///
    /// If the system cannot start a thread.
    pub fn create(path: &Path) -> io::Result<Self> {
        let file = File::create(path)?;
        Self::start(BufWriter::new(file), path.display().to_string(), QUEUE)
    }

    /// Writes to `out`, called `name` where it cannot be written, and lets `queue` lines wait.
    fn start(mut out: impl Write + Send + 'static, name: String, queue: usize) -> io::Result<Self> {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let header = Header {
            schema: SCHEMA.to_owned(),
            version: VERSION,
            paceline: env!("CARGO_PKG_VERSION").to_owned(),
            started: now.map_or(0, |since| since.as_secs()),
        };
        write_line(&mut out, &Line::Header(header))?;
        out.flush()?;
        let (messages, inbox) = sync_channel(queue);
        let lost = Arc::new(AtomicU64::new(0));
        let start = Instant::now();
        let mut thread = Thread {
            out,
            name,
            start,
            failed: false,
            summary: Summary::default(),
            lost: lost.clone(),
        };
        let thread = std::thread::Builder::new()
            .name("trace".into())
            .spawn(move || thread.run(&inbox));
        Ok(Writer {
            start,
            messages,
            thread: Mutex::new(Some(thread.expect("the trace's thread starts"))),
            lost,
            models: AtomicUsize::new(0),
        })
    }

    /// Writes of a model that was loaded; the number by which [`Writer::round`] names it. Waits for
    /// the disk: not for an engine's thread.
    pub fn model(&self, model: Model) -> usize {
        let number = self.models.fetch_add(1, Ordering::Relaxed);
        let line = Line::Model(Model {
            model: number,
            ..model
        });
        // The thread ends with the writer, and not before.
        let _ = self.messages.send(Message::Line(Box::new(line)));
        number
    }

    /// Writes what a step of the model number `model` did, whose streams are of `requests`, and how
    /// long `delivery` took if that went on beside drafting. Never waits.
    pub fn round(
        &self,
        model: usize,
        requests: &[u64],
        step: &StepRecord,
        delivery: Option<Delivery>,
    ) {
        let t_ms = self.start.elapsed().as_secs_f64() * 1e3;
        let round = Round::new(model, t_ms, requests, step);
        let line = Line::Round(match delivery {
            Some(delivery) => round.with_delivery(delivery),
            None => round,
        });
        if self
            .messages
            .try_send(Message::Line(Box::new(line)))
            .is_err()
        {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Writes what waits and the last line. Nothing is written after it.
    pub fn finish(&self) {
        let lock = PoisonError::into_inner;
        let Some(thread) = self.thread.lock().unwrap_or_else(lock).take() else {
            return;
        };
        let _ = self.messages.send(Message::End);
        // A panic of the thread has been printed; there is nobody to tell here.
        let _ = thread.join();
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.finish();
    }
}

/// The thread that writes.
struct Thread<W> {
    out: W,
    /// What messages call the file.
    name: String,
    start: Instant,
    /// Whether the file could not be written, which is said once.
    failed: bool,
    summary: Summary,
    lost: Arc<AtomicU64>,
}

impl<W: Write> Thread<W> {
    fn run(&mut self, inbox: &Receiver<Message>) {
        loop {
            let message = match inbox.try_recv() {
                Err(TryRecvError::Empty) => {
                    // Whoever follows the file sees all there is.
                    self.attempt(Write::flush);
                    inbox.recv().unwrap_or(Message::End)
                }
                message => message.unwrap_or(Message::End),
            };
            match message {
                Message::Line(line) => self.write(&line),
                Message::End => break,
            }
        }
        let summary = Summary {
            t_ms: self.start.elapsed().as_secs_f64() * 1e3,
            lost: self.lost.load(Ordering::Relaxed),
            ..self.summary.clone()
        };
        self.attempt(|out| {
            write_line(out, &Line::Summary(summary))?;
            out.flush()
        });
    }

    fn write(&mut self, line: &Line) {
        if self.attempt(|out| write_line(out, line)) {
            if let Line::Round(round) = line {
                self.summary.add(round);
            }
        } else {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Does something with the file, unless it has failed before; whether that went well.
    fn attempt(&mut self, act: impl FnOnce(&mut W) -> io::Result<()>) -> bool {
        if !self.failed
            && let Err(error) = act(&mut self.out)
        {
            self.failed = true;
            tracing::error!(%error, file = self.name, "the trace cannot be written any more; requests go on");
        }
        !self.failed
    }
}

/// Writes a line with one call, so that a file that is cut off is cut off at the end of one, as a rule.
fn write_line(out: &mut impl Write, line: &Line) -> io::Result<()> {
    let mut text = serde_json::to_vec(line)?;
    text.push(b'\n');
    out.write_all(&text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read::Trace;
    use speculate::length::{Expectation, HeadTimes, Longest};
    use std::sync::Condvar;
    use std::time::Duration;

    /// A file in memory that can be made to wait or to fail.
    #[derive(Clone, Default)]
    struct Disk(Arc<(Mutex<State>, Condvar)>);

    #[derive(Default)]
    struct State {
        bytes: Vec<u8>,
        is_stuck: bool,
        is_full: bool,
        /// How often it was told to write while stuck or full.
        refused: usize,
    }

    impl Disk {
        fn set(&self, change: impl FnOnce(&mut State)) {
            change(&mut self.0.0.lock().unwrap());
            self.0.1.notify_all();
        }

        fn wait_until(&self, is_so: impl Fn(&State) -> bool) {
            let state = self.0.0.lock().unwrap();
            let limit = Duration::from_secs(60);
            let changed = &self.0.1;
            let waited = changed.wait_timeout_while(state, limit, |s| !is_so(s));
            assert!(!waited.unwrap().1.timed_out());
        }

        fn trace(&self) -> Trace {
            Trace::read(&self.0.0.lock().unwrap().bytes[..]).unwrap()
        }
    }

    impl Write for Disk {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let mut state = self.0.0.lock().unwrap();
            if state.is_stuck || state.is_full {
                state.refused += 1;
                self.0.1.notify_all();
            }
            if state.is_full {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let mut state = self.0.1.wait_while(state, |s| s.is_stuck).unwrap();
            state.bytes.extend(bytes);
            self.0.1.notify_all();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn step() -> StepRecord {
        StepRecord {
            rows: 4,
            experts: None,
            drafts: Longest::default(),
            verify: Duration::from_millis(4),
            draft: Duration::from_millis(1),
            by_head: HeadTimes::default(),
            expected: Expectation::default(),
            streams: Vec::new(),
        }
    }

    fn writer(disk: &Disk, queue: usize) -> Writer {
        Writer::start(disk.clone(), "x".into(), queue).unwrap()
    }

    #[test]
    fn a_trace_ends_with_what_it_has_come_to() {
        let disk = Disk::default();
        let writer = writer(&disk, 64);
        let model = writer.model(Model::default());
        let delivery = Delivery {
            took: Duration::from_millis(3),
            waited: Duration::from_millis(1),
        };
        (0..3).for_each(|_| writer.round(model, &[], &step(), None));
        (0..2).for_each(|_| writer.round(model, &[], &step(), Some(delivery)));
        writer.finish();
        // Nothing comes after the end.
        writer.round(model, &[], &step(), None);
        drop(writer);
        let trace = disk.trace();
        assert_eq!((trace.models.len(), trace.models[0].rounds.len()), (1, 5));
        let summary = trace.summary.unwrap();
        assert_eq!((summary.rounds, summary.lost), (5, 0));
        assert_eq!((summary.verify_ms, summary.draft_ms), (20.0, 5.0));
        assert_eq!(summary.overlap_saved_ms, 4.0);
    }

    #[test]
    fn a_slow_disk_loses_lines_and_holds_nobody_up() {
        let disk = Disk::default();
        let writer = writer(&disk, 4);
        let model = writer.model(Model::default());
        disk.set(|state| state.is_stuck = true);
        writer.round(model, &[], &step(), None);
        disk.wait_until(|state| state.refused > 0);
        // The thread holds one line, and four wait; or the model's line was the one it held.
        (0..100).for_each(|_| writer.round(model, &[], &step(), None));
        disk.set(|state| state.is_stuck = false);
        writer.finish();
        let summary = disk.trace().summary.unwrap();
        assert_eq!(summary.rounds + summary.lost, 101);
        assert!((95..=97).contains(&summary.lost), "{summary:?}");
    }

    #[test]
    fn a_full_disk_ends_the_trace_and_nothing_else() {
        let disk = Disk::default();
        let writer = writer(&disk, 64);
        let model = writer.model(Model::default());
        disk.wait_until(|state| state.bytes.iter().filter(|b| **b == b'\n').count() == 2);
        disk.set(|state| state.is_full = true);
        (0..3).for_each(|_| writer.round(model, &[], &step(), None));
        disk.wait_until(|state| state.refused > 0);
        disk.set(|state| state.is_full = false);
        writer.round(model, &[], &step(), None);
        writer.finish();
        let trace = disk.trace();
        assert!(trace.models[0].rounds.is_empty() && trace.summary.is_none());
        let start = Writer::start(FullDisk, "x".into(), 4);
        assert_eq!(start.err().unwrap().kind(), io::ErrorKind::StorageFull);
    }

    struct FullDisk;

    impl Write for FullDisk {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
