//! KV events: what the prefix cache holds, told over ZeroMQ to routers that send a request to the
//! server which knows most of its prompt.
//!
//! ```text
//! PUB     topic · number, 8 bytes big-endian · batch of events
//! ROUTER  asked with the first number that is wanted, answers with the messages from there on,
//!         and with one of number −1
//! ```
//!
//! Messages, numbers and replay are vLLM's. A subscriber that is too slow loses messages, sees a gap
//! in the numbers and asks for them again. What is told never changes a text: a router that is wrong
//! costs time.

mod wire;

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::body::Bytes;
use engine::{PageChange, PageSink};
use futures_util::{Stream, StreamExt};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use zeromq::{
    PubSocket, RouterSocket, Socket, SocketEvent, SocketRecv, SocketSend, ZmqError, ZmqMessage,
};

pub use self::wire::EventEncoding;

/// Messages that can be asked for again.
const REPLAYED_MAX: usize = 10_000;
/// The number of the last message of a replay.
const END: i64 = -1;
/// Time between attempts to reach a subscriber that is not there.
const RETRY: Duration = Duration::from_secs(1);

/// Where KV events go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvEvents {
    /// `tcp://ADDRESS:PORT`. With `*` for the address the server waits for subscribers there,
    /// else it connects to the one that waits there.
    pub endpoint: String,
    /// Where messages can be asked for again: `tcp://ADDRESS:PORT`, on which the server waits.
    pub replay: Option<String>,
    /// How events are spelled.
    pub encoding: EventEncoding,
}

/// Why events cannot be published.
#[derive(Debug, thiserror::Error)]
#[error("cannot publish KV events at {endpoint}: {source}")]
pub struct KvEventsError {
    endpoint: String,
    source: ZmqError,
}

/// Publishes KV events until it and all of its sinks are dropped.
#[derive(Clone, Debug)]
pub struct Publisher(UnboundedSender<Batch>);

/// Changes of one model's prefix cache.
#[derive(Debug)]
struct Batch {
    topic: Bytes,
    changes: Vec<PageChange>,
}

impl Publisher {
    /// Starts to publish, in a task of the runtime that this is called in.
    ///
    /// # Errors
    ///
    /// [`KvEventsError`] if an endpoint is malformed or taken.
    pub async fn start(events: KvEvents) -> Result<Publisher, KvEventsError> {
        let at = |endpoint: &str| {
            let endpoint = endpoint.to_owned();
            move |source| KvEventsError { endpoint, source }
        };
        let replay = match &events.replay {
            None => None,
            Some(endpoint) => {
                let mut socket = RouterSocket::new();
                let place = everywhere(endpoint);
                socket.bind(&place).await.map_err(at(endpoint))?;
                Some(socket)
            }
        };
        let subscribers = Subscribers::start(&events.endpoint).await;
        let subscribers = subscribers.map_err(at(&events.endpoint))?;
        let (sender, inbox) = unbounded_channel();
        let log = Log {
            encoding: events.encoding,
            next: 0,
            messages: VecDeque::new(),
        };
        tokio::spawn(publish(inbox, log, subscribers, replay));
        Ok(Publisher(sender))
    }

    /// The sink for the prefix cache of one model, whose messages have this topic.
    pub fn sink(&self, topic: &str) -> PageSink {
        let topic = Bytes::copy_from_slice(topic.as_bytes());
        let sender = self.0.clone();
        PageSink(Arc::new(move |changes| {
            let topic = topic.clone();
            // Without a task there is no runtime any more, and nobody to tell.
            let _ = sender.send(Batch { topic, changes });
        }))
    }
}

/// `endpoint` with the address that stands for all addresses.
fn everywhere(endpoint: &str) -> String {
    endpoint.replace("//*:", "//0.0.0.0:")
}

/// A socket that has reached the subscriber, and what becomes of the connection.
struct Connected {
    socket: PubSocket,
    events: Pin<Box<dyn Stream<Item = SocketEvent> + Send>>,
}

/// The socket of the subscribers.
enum Subscribers {
    /// A socket on which the server waits for subscribers.
    Bound(PubSocket),
    /// A subscriber that waits at an endpoint for the server to connect.
    Connected {
        endpoint: String,
        socket: Option<Connected>,
        /// Sockets that have reached the subscriber.
        reached: UnboundedReceiver<PubSocket>,
        reach: UnboundedSender<PubSocket>,
    },
}

impl Subscribers {
    async fn start(endpoint: &str) -> Result<Subscribers, ZmqError> {
        if endpoint.contains("//*:") {
            let mut socket = PubSocket::new();
            socket.bind(&everywhere(endpoint)).await?;
            return Ok(Subscribers::Bound(socket));
        }
        // An endpoint is malformed now or never.
        let _: zeromq::Endpoint = endpoint.parse()?;
        let (reach, reached) = unbounded_channel();
        let subscribers = Subscribers::Connected {
            endpoint: endpoint.to_owned(),
            socket: None,
            reached,
            reach,
        };
        subscribers.connect();
        Ok(subscribers)
    }

    /// Begins to look for the subscriber that waits for the server.
    fn connect(&self) {
        let Subscribers::Connected {
            endpoint, reach, ..
        } = self
        else {
            return;
        };
        let (endpoint, reach) = (endpoint.clone(), reach.clone());
        tokio::spawn(async move {
            loop {
                let mut socket = PubSocket::new();
                match socket.connect(&endpoint).await {
                    Ok(()) => {
                        tracing::info!(endpoint, "KV events: connected");
                        let _ = reach.send(socket);
                        return;
                    }
                    Err(error) => tracing::debug!(endpoint, %error, "KV events: not connected"),
                }
                if reach.is_closed() {
                    return;
                }
                tokio::time::sleep(RETRY).await;
            }
        });
    }

    /// Waits for a change of the connection, and deals with it.
    async fn keep(&mut self) {
        match self {
            Subscribers::Bound(_) => std::future::pending().await,
            Subscribers::Connected {
                socket, reached, ..
            } => {
                let lost = async {
                    let Some(Connected { events, .. }) = socket else {
                        return std::future::pending().await;
                    };
                    while let Some(event) = events.next().await {
                        if matches!(event, SocketEvent::Disconnected(_)) {
                            return;
                        }
                    }
                };
                tokio::select! {
                    Some(mut new) = reached.recv() => {
                        let events = Box::pin(new.monitor());
                        *socket = Some(Connected { socket: new, events });
                    }
                    () = lost => {
                        *socket = None;
                        self.connect();
                    }
                }
            }
        }
    }

    /// Sends a message to whoever is there.
    async fn send(&mut self, message: ZmqMessage) {
        let socket = match self {
            Subscribers::Bound(socket) => Some(socket),
            Subscribers::Connected { socket, .. } => socket.as_mut().map(|it| &mut it.socket),
        };
        if let Some(socket) = socket
            && let Err(error) = socket.send(message).await
        {
            tracing::debug!(%error, "KV events: a message is lost");
        }
    }
}

/// What was published, to be asked for again.
struct Log {
    encoding: EventEncoding,
    /// The number of the next batch.
    next: i64,
    /// The newest messages: topic, number and batch.
    messages: VecDeque<(Bytes, i64, Bytes)>,
}

impl Log {
    /// The message of a batch.
    fn message(&mut self, batch: Batch) -> ZmqMessage {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let seconds = now.map_or(0.0, |time| time.as_secs_f64());
        let payload = Bytes::from(wire::batch(seconds, batch.changes, self.encoding));
        let number = self.next;
        self.next += 1;
        if self.messages.len() == REPLAYED_MAX {
            self.messages.pop_front();
        }
        let kept = (batch.topic.clone(), number, payload.clone());
        self.messages.push_back(kept);
        message([batch.topic, frame(number), payload])
    }

    /// The answers to a request for a replay, `[client, delimiter, first number]`; nothing to
    /// anything else.
    fn replay(&self, request: &ZmqMessage) -> Vec<ZmqMessage> {
        let (Some(client), 3) = (request.get(0), request.len()) else {
            return Vec::new();
        };
        let first = request.get(2).map(|bytes| <[u8; 8]>::try_from(&bytes[..]));
        let Some(Ok(first)) = first else {
            return Vec::new();
        };
        let first = i64::from_be_bytes(first);
        let wanted = self.messages.iter();
        let wanted = wanted.filter(|(_, number, _)| *number >= first);
        let last = (Bytes::new(), END, Bytes::new());
        let answer = |(topic, number, payload): &(Bytes, i64, Bytes)| {
            let (delimiter, number) = (Bytes::new(), frame(*number));
            message([
                client.clone(),
                delimiter,
                topic.clone(),
                number,
                payload.clone(),
            ])
        };
        wanted.chain([&last]).map(answer).collect()
    }
}

/// A number as a frame.
fn frame(number: i64) -> Bytes {
    Bytes::copy_from_slice(&number.to_be_bytes())
}

/// The message of `frames`.
fn message<const N: usize>(frames: [Bytes; N]) -> ZmqMessage {
    ZmqMessage::try_from(Vec::from(frames)).expect("a message has frames")
}

/// Publishes what comes in and answers who asks for it again, until nothing can come in any more.
async fn publish(
    mut inbox: UnboundedReceiver<Batch>,
    mut log: Log,
    mut subscribers: Subscribers,
    mut replay: Option<RouterSocket>,
) {
    loop {
        let asked = async {
            match &mut replay {
                Some(socket) => socket.recv().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            batch = inbox.recv() => match batch {
                Some(batch) => subscribers.send(log.message(batch)).await,
                None => return,
            },
            asked = asked => {
                let Ok(request) = asked else { continue };
                for answer in log.replay(&request) {
                    if let Some(socket) = &mut replay
                        && let Err(error) = socket.send(answer).await
                    {
                        tracing::debug!(%error, "KV events: a replay ends early");
                        break;
                    }
                }
            }
            () = subscribers.keep() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn removed(hash: u64) -> Batch {
        Batch {
            topic: Bytes::from_static(b"kv"),
            changes: vec![PageChange::Removed {
                group: engine::PageGroup::default(),
                hash,
            }],
        }
    }

    fn log() -> Log {
        Log {
            encoding: EventEncoding::Map,
            next: 0,
            messages: VecDeque::new(),
        }
    }

    #[test]
    fn batches_are_numbered_and_come_again_from_the_one_that_is_asked_for() {
        let mut log = log();
        for number in 0..3 {
            let sent = log.message(removed(number));
            assert_eq!(sent.get(0).unwrap(), &b"kv"[..]);
            assert_eq!(sent.get(1).unwrap(), &number.to_be_bytes()[..]);
        }
        let ask = |first: i64| message([Bytes::from_static(b"id"), Bytes::new(), frame(first)]);
        let numbers = |first| -> Vec<Bytes> {
            let answers = log.replay(&ask(first)).into_iter();
            answers
                .map(|answer| answer.get(3).unwrap().clone())
                .collect()
        };
        assert_eq!(numbers(1), [frame(1), frame(2), frame(END)]);
        assert_eq!(numbers(9), [frame(END)]);
        let odd = message([Bytes::from_static(b"id"), Bytes::from_static(b"x")]);
        assert_eq!(log.replay(&odd).len(), 0);
        let short = message([
            Bytes::from_static(b"id"),
            Bytes::new(),
            Bytes::from_static(b"x"),
        ]);
        assert_eq!(log.replay(&short).len(), 0);
    }

    #[test]
    fn old_batches_are_forgotten() {
        let mut log = log();
        for number in 0..REPLAYED_MAX as u64 + 5 {
            log.message(removed(number));
        }
        assert_eq!(log.messages.len(), REPLAYED_MAX);
        assert_eq!(log.messages.front().unwrap().1, 5);
    }
}
