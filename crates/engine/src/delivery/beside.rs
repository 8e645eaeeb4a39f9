//! Delivery beside drafting: a thread turns what a round has brought into text and sends it, while
//! the engine drafts the next tokens.
//!
//! ```text
//! engine     verify ─ accept ─┬─ draft ────────────────┬─ requests that have ended leave
//! delivery                    └─ detokenize ─ send ────┘
//! ```
//!
//! Replies move to the thread and back, so nobody shares one. A round ends when both have: a stop
//! string ends its text in the round that has completed it, as it does without the thread.

use super::{End, HERE, News, Reply, Running};
use crate::steps::DeliveryTimes;
use speculate::Stream;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use text::Text;

/// Where [`Beside`] takes a request's reply from and puts it back.
pub(crate) struct Slot<'a>(&'a mut Option<Box<Reply>>);

impl Running {
    /// The stream, and where its reply is.
    pub(crate) fn parts(&mut self) -> (&mut Stream, Slot<'_>) {
        (&mut self.stream, Slot(&mut self.reply))
    }
}

/// A reply, and what it is to deliver.
type Job = (Box<Reply>, News);

/// Replies that have delivered, each with how its request ends if it does.
struct Delivered {
    replies: Vec<(Box<Reply>, Option<End>)>,
    took: Duration,
}

/// The thread that delivers beside drafting.
pub(crate) struct Beside {
    jobs: Option<Sender<Vec<Job>>>,
    delivered: Receiver<Delivered>,
    thread: Option<JoinHandle<()>>,
    /// Whether the thread has replies.
    is_busy: bool,
}

impl Beside {
    /// Starts the thread, which writes in the tokens of `text`.
    ///
    /// # Panics
    ///
    /// If the system cannot start a thread.
    pub(crate) fn start(text: Arc<Text>) -> Self {
        let (jobs, inbox) = channel::<Vec<Job>>();
        let (outbox, delivered) = channel();
        let work = move || {
            while let Ok(jobs) = inbox.recv() {
                let start = Instant::now();
                let each = jobs.into_iter().map(|(mut reply, news)| {
                    let end = reply.deliver(&text, news);
                    (reply, end)
                });
                let replies = each.collect();
                let took = start.elapsed();
                if outbox.send(Delivered { replies, took }).is_err() {
                    return;
                }
            }
        };
        let thread = std::thread::Builder::new().name("delivery".into());
        Beside {
            jobs: Some(jobs),
            delivered,
            thread: Some(thread.spawn(work).expect("the delivery thread starts")),
            is_busy: false,
        }
    }

    /// Has the thread deliver what a round has brought `streams`, whose replies are in `slots`.
    pub(crate) fn begin(&mut self, streams: &mut [&mut Stream], slots: &mut [Slot<'_>]) {
        let pairs = streams.iter_mut().zip(slots);
        let jobs = pairs.map(|(stream, slot)| {
            let reply = slot.0.take().expect(HERE);
            let news = reply.news(stream);
            (reply, news)
        });
        let jobs = jobs.collect();
        let sent = self.jobs.as_ref().map(|to| to.send(jobs));
        assert!(matches!(sent, Some(Ok(()))), "the delivery thread runs");
        self.is_busy = true;
    }

    /// Waits for the thread and puts the replies back: how each of `running` ends if it does, and the times.
    /// Nothing if the thread has no replies.
    pub(crate) fn end(
        &mut self,
        running: &mut [Running],
    ) -> Option<(Vec<Option<End>>, DeliveryTimes)> {
        if !std::mem::take(&mut self.is_busy) {
            return None;
        }
        let start = Instant::now();
        let Delivered { replies, took } = self.delivered.recv().expect("the delivery thread runs");
        let times = DeliveryTimes {
            took,
            waited: start.elapsed(),
        };
        let pairs = running.iter_mut().zip(replies);
        let ends = pairs.map(|(running, (reply, end))| {
            running.reply = Some(reply);
            end
        });
        Some((ends.collect(), times))
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        drop(self.jobs.take());
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Err(_)) = ended {
            tracing::error!("the delivery thread has panicked");
        }
    }
}
