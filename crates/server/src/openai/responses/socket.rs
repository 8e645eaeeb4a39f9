//! The Responses API over a WebSocket: `GET /v1/responses` with an upgrade.
//!
//! ```text
//! client   {"type": "response.create", …}   the fields of a request, without those of HTTP
//! server   the events of a stream, each a message, up to the last one of the response
//!          {"type": "error", "status": 404, "error": {…}} where there is no response
//! ```
//!
//! Responses are written one after another. The conversation that the last one ended is kept for
//! the next one on the same socket, also where the request has `store` off.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::{Body, Bytes};
use axum::extract::ws::{CloseFrame, Message, Utf8Bytes, WebSocket, WebSocketUpgrade, close_code};
use axum::extract::{FromRequestParts, Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Response, header};
use http_body_util::BodyExt;
use serde_json::{Map, Value, json};
use tokio::time::{Instant, sleep_until};
use tracing::Instrument;

use super::store::Stored;
use super::{PREVIOUS, Respond};
use crate::arrival::Received;
use crate::connection::{Stage, Tenure};
use crate::dialect::{Endpoint, answer_asked};
use crate::errors::ApiError;
use crate::limits::{
    SOCKET_CONVERSATION_BYTES_MAX, SOCKET_LIFE, SOCKET_MESSAGE_BYTES_MAX, SOCKET_WAITING_MAX,
};
use crate::server::Server;

/// The type of the message that asks for a response.
const CREATE: &str = "response.create";

/// The conversation that the last response on a socket ended.
#[derive(Debug, Default)]
pub(super) struct Latest(Mutex<Vec<Arc<Stored>>>);

impl Latest {
    fn state(&self) -> MutexGuard<'_, Vec<Arc<Stored>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps `last`, which goes on from `before`, in place of what was kept; nothing if they take
    /// more than [`SOCKET_CONVERSATION_BYTES_MAX`].
    pub(super) fn keep(&self, before: &[Arc<Stored>], last: &Arc<Stored>) {
        let all = before.iter().chain([last]);
        let bytes: usize = all.clone().map(|stored| stored.bytes()).sum();
        let mut state = self.state();
        state.clear();
        if bytes <= SOCKET_CONVERSATION_BYTES_MAX {
            state.extend(all.cloned());
        }
    }

    /// The conversation that ends with the response `id`, the earliest response first, if it is
    /// the one that is kept.
    pub(super) fn conversation(&self, id: &str) -> Option<Vec<Arc<Stored>>> {
        let state = self.state();
        let is_last = state.last().is_some_and(|last| last.id == id);
        is_last.then(|| state.clone())
    }

    /// Forgets the conversation that ends with the response `id`.
    fn forget(&self, id: &str) {
        if self.conversation(id).is_some() {
            self.state().clear();
        }
    }
}

/// `GET /v1/responses`: makes the connection a WebSocket.
///
/// # Errors
///
/// 405 for a request that asks for none; 503 once a shutdown has begun.
pub(crate) async fn connect(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    server.refuse_late()?;
    let (mut head, _) = request.into_parts();
    let upgrade = WebSocketUpgrade::from_request_parts(&mut head, &server).await;
    let upgrade = upgrade.map_err(|_| ApiError::method("POST or a WebSocket", "GET"))?;
    let tenure = head.extensions.get::<Tenure>().cloned();
    let tenure = tenure.expect("every connection has one");
    // Each message is JSON, whatever the handshake says of its own body, which is empty.
    let json = HeaderValue::from_static("application/json");
    head.headers.insert(header::CONTENT_TYPE, json);
    head.headers.remove(header::CONTENT_LENGTH);
    head.headers.remove(header::CONTENT_ENCODING);
    let talk = Talk {
        server,
        head,
        latest: Arc::default(),
        waiting: VecDeque::new(),
    };
    let limit = SOCKET_MESSAGE_BYTES_MAX;
    let upgrade = upgrade.max_message_size(limit).max_frame_size(limit);
    let span = tracing::Span::current();
    Ok(upgrade.on_upgrade(move |socket| talk.run(socket, tenure).instrument(span)))
}

/// One client on a WebSocket.
struct Talk {
    server: Arc<Server>,
    /// The handshake.
    head: Parts,
    latest: Arc<Latest>,
    /// Messages that came while a response was being written.
    waiting: VecDeque<Utf8Bytes>,
}

/// Why a client is no longer talked to.
enum Over {
    /// It has gone, or does not speak the protocol.
    Gone,
    /// The server shuts down.
    Shutdown,
    /// The socket has been open for as long as it may.
    Expired,
}

impl Talk {
    /// Serves the socket to its end.
    async fn run(mut self, mut socket: WebSocket, mut tenure: Tenure) {
        let end = Instant::now() + SOCKET_LIFE;
        let over = loop {
            let message = match self.waiting.pop_front() {
                Some(message) => message,
                None => match next(&mut socket, &mut tenure, end).await {
                    Ok(message) => message,
                    Err(over) => break over,
                },
            };
            if let Err(over) = self.turn(&message, &mut socket).await {
                break over;
            }
        };
        let (code, reason) = match over {
            Over::Gone => return,
            Over::Shutdown => (close_code::AWAY, "the server is shutting down"),
            Over::Expired => {
                let _ = socket
                    .send(error_message(&ApiError::socket_expired()))
                    .await;
                (close_code::NORMAL, "the connection has reached its limit")
            }
        };
        let reason = Utf8Bytes::from_static(reason);
        let close = Message::Close(Some(CloseFrame { code, reason }));
        let _ = socket.send(close).await;
    }

    /// Answers one message.
    async fn turn(&mut self, message: &str, socket: &mut WebSocket) -> Result<(), Over> {
        let mut previous = None;
        let failure = match self.ask(message, &mut previous).await {
            Ok(response) => match self.send(response.into_body(), socket).await? {
                true => return Ok(()),
                false => None,
            },
            Err(error) => Some(error),
        };
        // A client that could not go on from a response starts anew.
        if let Some(previous) = previous {
            self.latest.forget(&previous);
        }
        match failure {
            Some(error) => send(socket, error_message(&error)).await,
            None => Ok(()),
        }
    }

    /// Starts the response that a message asks for, as a stream; notes in `previous` which one it
    /// goes on from.
    async fn ask(
        &self,
        message: &str,
        previous: &mut Option<String>,
    ) -> Result<Response<Body>, ApiError> {
        let body = Body::from(Bytes::copy_from_slice(message.as_bytes()));
        let limit = SOCKET_MESSAGE_BYTES_MAX.min(Respond::body_bytes(&self.server.config.limits));
        let request = Request::from_parts(self.head.clone(), body);
        let Received {
            head,
            mut object,
            worker,
            app,
        } = Received::new(&self.server, request, limit).await?;
        *previous = object
            .get(PREVIOUS)
            .and_then(Value::as_str)
            .map(str::to_owned);
        open(&mut object)?;
        let latest = Some(self.latest.clone());
        let (mut asked, respond) = Respond::read_on(object, &head.headers, &app, latest)?;
        asked.options.timeout = Some(app.time_left(asked.options.timeout));
        answer_asked(&app, &head, worker, asked, respond).await
    }

    /// Sends the events of a stream as messages, and keeps those that come meanwhile. Returns
    /// whether the response has not failed.
    async fn send(&mut self, mut body: Body, socket: &mut WebSocket) -> Result<bool, Over> {
        let mut is_whole = true;
        loop {
            tokio::select! {
                biased;
                frame = body.frame() => {
                    let Some(frame) = frame else {
                        return Ok(is_whole);
                    };
                    let Ok(Ok(data)) = frame.map(|frame| frame.into_data()) else {
                        return Ok(false);
                    };
                    let events = str::from_utf8(&data).expect("frames are text");
                    for line in events.lines() {
                        if line == "event: response.failed" {
                            is_whole = false;
                        } else if let Some(event) = line.strip_prefix("data: ") {
                            send(socket, Message::text(event)).await?;
                        } else if line.starts_with(':') {
                            send(socket, Message::Ping(Bytes::new())).await?;
                        }
                    }
                }
                // One that sends more than is kept waits until a response has ended.
                received = socket.recv(), if self.waiting.len() < SOCKET_WAITING_MAX => {
                    self.waiting.extend(text_of(received)?);
                }
            }
        }
    }
}

/// Waits for a message.
async fn next(
    socket: &mut WebSocket,
    tenure: &mut Tenure,
    end: Instant,
) -> Result<Utf8Bytes, Over> {
    loop {
        tokio::select! {
            received = socket.recv() => if let Some(text) = text_of(received)? {
                return Ok(text);
            },
            _ = tenure.stage.wait_for(|&stage| stage > Stage::Serving) => return Err(Over::Shutdown),
            () = sleep_until(end) => return Err(Over::Expired),
        }
    }
}

/// The text of what was received, if it is a message; bytes count as the text that they spell.
fn text_of(received: Option<Result<Message, axum::Error>>) -> Result<Option<Utf8Bytes>, Over> {
    match received {
        Some(Ok(Message::Text(text))) => Ok(Some(text)),
        Some(Ok(Message::Binary(bytes))) => match Utf8Bytes::try_from(bytes) {
            Ok(text) => Ok(Some(text)),
            Err(_) => Err(Over::Gone),
        },
        Some(Ok(Message::Ping(_) | Message::Pong(_))) => Ok(None),
        Some(Ok(Message::Close(_)) | Err(_)) | None => Err(Over::Gone),
    }
}

/// Sends a message.
async fn send(socket: &mut WebSocket, message: Message) -> Result<(), Over> {
    socket.send(message).await.map_err(|_| Over::Gone)
}

/// Makes a message the request that it is over HTTP.
fn open(object: &mut Map<String, Value>) -> Result<(), ApiError> {
    match object.remove("type") {
        Some(Value::String(kind)) if kind == CREATE => {}
        _ => return Err(ApiError::field("type", format!("must be {CREATE}"))),
    }
    for name in ["stream_options", "background"] {
        object.remove(name);
    }
    object.insert("stream".to_owned(), json!(true));
    // A client that only prepares its next turn wants nothing to be written.
    if object.remove("generate") == Some(json!(false)) {
        object.insert("max_output_tokens".to_owned(), json!(0));
    }
    Ok(())
}

/// The message that tells of an error.
fn error_message(error: &ApiError) -> Message {
    let document = json!({
        "type": "error",
        "status": error.status().as_u16(),
        "error": {
            "type": error.kind,
            "code": error.label(),
            "message": error.message,
            "param": error.param,
        },
    });
    Message::text(document.to_string())
}
