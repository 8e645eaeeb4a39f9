//! A generation as a stream of frames: server-sent events, or lines of JSON.
//!
//! ```text
//! opening   at once, before the prompt has run
//! text      a round's text, or several rounds' if the client is slow
//! quiet     every 10 s without a frame: a comment with the progress, or an event
//! end | error
//! ```
//!
//! The body ends with the last frame: clients read until it does, also after
//! they have seen everything.

use std::convert::Infallible;
use std::fmt::Write;
use std::future::Future;
use std::time::Duration;

use axum::body::{Body, BodyDataStream, Bytes};
use axum::http::{HeaderValue, Response, header};
use engine::RequestOutcome;
use futures_util::future::select_all;
use futures_util::{StreamExt, stream};
use serde::Serialize;
use tokio::time::timeout;
use tracing::{Instrument, Span};

use crate::errors::ApiError;
use crate::generation::{Generation, Piece, Prefill, Progress, Step};
use crate::registry::Status;

/// How an API spells a stream.
pub(crate) trait StreamFormat: Send + 'static {
    /// The media type of the stream.
    const CONTENT_TYPE: &str = "text/event-stream; charset=utf-8";
    /// Writes what comes before the text; may be nothing.
    fn open(&mut self, frames: &mut Frames);
    /// Writes a piece of text, or tokens that left none; not empty.
    fn text(&mut self, piece: &Piece, frames: &mut Frames);
    /// Writes how far the prompt is, where [`Options::wants`](crate::options::Options::wants) asks
    /// for it.
    fn prefill(&mut self, _prefill: Prefill, _frames: &mut Frames) {}
    /// Writes a sign of life where nothing has been written for a while: a comment with the
    /// progress, unless the API has an event for it.
    fn quiet(&mut self, progress: Progress, frames: &mut Frames) {
        frames.comment(progress);
    }
    /// Writes what comes after the text.
    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames);
    /// Writes what comes after the ends of all texts of a request, whose `outcomes` are in the
    /// order of the texts; called on the first.
    fn close(&mut self, _outcomes: &[Box<RequestOutcome>], _frames: &mut Frames) {}
    /// Writes what comes instead of the rest.
    fn fail(&mut self, error: &ApiError, frames: &mut Frames) {
        Self::refuse(error, frames);
    }
    /// Writes what comes instead of an answer that has not begun.
    fn refuse(error: &ApiError, frames: &mut Frames);
    /// Writes a sign of life while the model called `model` is being loaded, before anything else: a
    /// comment, unless the stream has none.
    fn waits(_model: &str, status: &Status, frames: &mut Frames) {
        frames.note(status);
    }
}

/// Frames that are sent together.
#[derive(Debug, Default)]
pub(crate) struct Frames(String);

impl Frames {
    /// Adds a document.
    pub(crate) fn data(&mut self, document: &impl Serialize) {
        let json = serde_json::to_string(document).expect("responses have string keys");
        self.raw(&json);
    }

    /// Adds a document as a line of its own, for streams of lines of JSON.
    pub(crate) fn line(&mut self, document: &impl Serialize) {
        let json = serde_json::to_string(document).expect("responses have string keys");
        self.0 += &json;
        self.0.push('\n');
    }

    /// Adds one line of data; JSON has no raw line breaks.
    pub(crate) fn raw(&mut self, line: &str) {
        let _ = write!(self.0, "data: {line}\n\n");
    }

    /// Adds a document as an event of this name, for APIs whose streams name events.
    pub(crate) fn event(&mut self, name: &str, document: &impl Serialize) {
        let _ = writeln!(self.0, "event: {name}");
        self.data(document);
    }

    /// Adds a comment about a model that is waited for.
    fn note(&mut self, status: &Status) {
        let _ = match status {
            Status::Loading(progress) => {
                let percent = (100.0 * progress.fraction) as u32;
                write!(self.0, ": loading {} {percent} %\n\n", progress.stage)
            }
            _ => write!(self.0, ": waiting for the model\n\n"),
        };
    }

    fn comment(&mut self, progress: Progress) {
        let _ = match progress {
            Progress::Queued => write!(self.0, ": queued\n\n"),
            Progress::Prefill(Prefill { done, total, .. }) => {
                write!(self.0, ": prefill {done}/{total}\n\n")
            }
            Progress::Decode => write!(self.0, ": decode\n\n"),
        };
    }
}

/// The texts of one request that are being sent.
struct Sending<F> {
    /// Whether nothing has been sent yet.
    is_opening: bool,
    /// Texts that have not ended, each with its place in `formats`.
    generations: Vec<(usize, Generation)>,
    formats: Vec<F>,
    /// How the texts have ended, by place.
    outcomes: Vec<Option<Box<RequestOutcome>>>,
}

/// Sends generations as they come, each in its own format.
pub(crate) fn respond<F: StreamFormat>(
    generations: Vec<Generation>,
    formats: Vec<F>,
) -> Response<Body> {
    let sending = Sending {
        is_opening: true,
        outcomes: formats.iter().map(|_| None).collect(),
        generations: generations.into_iter().enumerate().collect(),
        formats,
    };
    let frames = stream::unfold(sending, async |mut sending| {
        loop {
            let frames = sending.advance().await?;
            // An empty chunk would end the body.
            if !frames.0.is_empty() {
                return Some((Ok::<_, Infallible>(Bytes::from(frames.0)), sending));
            }
        }
    });
    stream_of::<F>(Body::from_stream(frames))
}

/// The time between two signs of life, and what writes one.
type Signs = (Duration, Box<dyn Fn(&mut Frames) + Send>);

/// An answer that has not begun, or the frames of one that has.
enum Later<A> {
    /// The answer is waited for; nothing has been sent yet, if it `is_new`.
    Waits {
        answer: A,
        signs: Signs,
        is_new: bool,
    },
    Begun(BodyDataStream),
}

/// Sends the frames of an `answer` that begins later, and until then signs of life.
pub(crate) fn respond_later<F: StreamFormat>(
    answer: impl Future<Output = Result<Response<Body>, ApiError>> + Unpin + Send + 'static,
    quiet: Duration,
    sign: impl Fn(&mut Frames) + Send + 'static,
) -> Response<Body> {
    let later = Later::Waits {
        answer: answer.instrument(Span::current()),
        signs: (quiet, Box::new(sign)),
        is_new: true,
    };
    let frames = stream::unfold(Some(later), async |later| {
        let (mut answer, signs, is_new) = match later? {
            Later::Begun(frames) => return next_frame(frames).await,
            Later::Waits {
                answer,
                signs,
                is_new,
            } => (answer, signs, is_new),
        };
        let quiet = if is_new { Duration::ZERO } else { signs.0 };
        let mut frames = Frames::default();
        match timeout(quiet, &mut answer).await {
            Ok(Ok(response)) => next_frame(response.into_body().into_data_stream()).await,
            Ok(Err(error)) => {
                F::refuse(&error, &mut frames);
                Some((Ok(Bytes::from(frames.0)), None))
            }
            Err(_) => {
                signs.1(&mut frames);
                let is_new = false;
                let later = Later::Waits {
                    answer,
                    signs,
                    is_new,
                };
                Some((Ok(Bytes::from(frames.0)), Some(later)))
            }
        }
    });
    stream_of::<F>(Body::from_stream(frames))
}

/// What an answer that has begun sends next, and the rest of it.
async fn next_frame<A>(
    mut frames: BodyDataStream,
) -> Option<(Result<Bytes, axum::Error>, Option<Later<A>>)> {
    let frame = frames.next().await?;
    Some((frame, Some(Later::Begun(frames))))
}

/// A stream of frames as a response.
fn stream_of<F: StreamFormat>(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    let mut set = |name, value| headers.insert(name, HeaderValue::from_static(value));
    set(header::CONTENT_TYPE, F::CONTENT_TYPE);
    set(header::CACHE_CONTROL, "no-cache");
    // Asks nginx not to collect the stream before passing it on.
    set(header::HeaderName::from_static("x-accel-buffering"), "no");
    response
}

impl<F: StreamFormat> Sending<F> {
    /// Waits for what any of the texts brings; `None` after the last.
    async fn advance(&mut self) -> Option<Frames> {
        let mut frames = Frames::default();
        if std::mem::take(&mut self.is_opening) {
            self.formats
                .iter_mut()
                .for_each(|format| format.open(&mut frames));
            return Some(frames);
        }
        if self.generations.is_empty() {
            return None;
        }
        let next = self.generations.iter_mut();
        let next = next.map(|(_, generation)| Box::pin(generation.next()));
        // Dropping a wait that is not ready loses nothing: what comes stays in the mailbox.
        let (step, ready, _) = select_all(next).await;
        let place = self.generations[ready].0;
        let format = &mut self.formats[place];
        match step {
            Step::Text(piece) => format.text(&piece, &mut frames),
            Step::Prefill(prefill) => format.prefill(prefill, &mut frames),
            Step::Quiet(progress) => format.quiet(progress, &mut frames),
            Step::End(outcome) => {
                format.end(&outcome, &mut frames);
                self.outcomes[place] = Some(outcome);
                self.generations.remove(ready);
                if self.generations.is_empty() {
                    let outcomes: Vec<_> = self.outcomes.drain(..).flatten().collect();
                    self.formats[0].close(&outcomes, &mut frames);
                }
            }
            Step::Failed(error) => {
                format.fail(&error, &mut frames);
                // One that fails ends all: the error is the last frame.
                self.generations.clear();
            }
        }
        Some(frames)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_one_line_whatever_it_carries() {
        let mut frames = Frames::default();
        frames.data(&"a\r\nb\u{2028}");
        frames.comment(Progress::Prefill(Prefill {
            done: 1,
            total: 2,
            cached: 0,
        }));
        frames.event("ping", &1);
        assert_eq!(
            frames.0,
            "data: \"a\\r\\nb\u{2028}\"\n\n: prefill 1/2\n\nevent: ping\ndata: 1\n\n"
        );
    }
}
