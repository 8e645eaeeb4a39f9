//! Server-sent events: a generation as a stream of frames.
//!
//! ```text
//! opening   at once, before the prompt has run
//! text      a round's text, or several rounds' if the client is slow
//! : …       a comment every 10 s without a frame, with the progress
//! end | error
//! ```
//!
//! The body ends with the last frame: clients read until it does, also after
//! they have seen everything.

use std::convert::Infallible;
use std::fmt::Write;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, Response, header};
use engine::RequestOutcome;
use futures_util::stream;
use serde::Serialize;

use crate::errors::ApiError;
use crate::generation::{Generation, Piece, Progress, Step};

/// How an API spells a stream.
pub(crate) trait StreamFormat: Send + 'static {
    /// Writes what comes before the text; may be nothing.
    fn open(&mut self, frames: &mut Frames);
    /// Writes a piece of text, or tokens that left none; not empty.
    fn text(&mut self, piece: &Piece, frames: &mut Frames);
    /// Writes what comes after the text.
    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames);
    /// Writes what comes instead of the rest.
    fn fail(&mut self, error: &ApiError, frames: &mut Frames);
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

    /// Adds one line of data; JSON has no raw line breaks.
    pub(crate) fn raw(&mut self, line: &str) {
        let _ = write!(self.0, "data: {line}\n\n");
    }

    /// Adds a document as an event of this name, for APIs whose streams name events.
    pub(crate) fn event(&mut self, name: &str, document: &impl Serialize) {
        let _ = writeln!(self.0, "event: {name}");
        self.data(document);
    }

    fn comment(&mut self, progress: Progress) {
        let _ = match progress {
            Progress::Queued => write!(self.0, ": queued\n\n"),
            Progress::Prefill(done, total) => write!(self.0, ": prefill {done}/{total}\n\n"),
            Progress::Decode => write!(self.0, ": decode\n\n"),
        };
    }
}

/// Where a stream is.
enum At<F> {
    Opening(Generation, F),
    Running(Generation, F),
    Ended,
}

/// Sends a generation as it comes.
pub(crate) fn respond<F: StreamFormat>(generation: Generation, format: F) -> Response<Body> {
    let frames = stream::unfold(At::Opening(generation, format), async |at| {
        let (frames, at) = advance(at).await?;
        Some((Ok::<_, Infallible>(Bytes::from(frames.0)), at))
    });
    let mut response = Response::new(Body::from_stream(frames));
    let headers = response.headers_mut();
    let mut set = |name, value| headers.insert(name, HeaderValue::from_static(value));
    set(header::CONTENT_TYPE, "text/event-stream; charset=utf-8");
    set(header::CACHE_CONTROL, "no-cache");
    // Asks nginx not to collect the stream before passing it on.
    set(header::HeaderName::from_static("x-accel-buffering"), "no");
    response
}

async fn advance<F: StreamFormat>(at: At<F>) -> Option<(Frames, At<F>)> {
    let mut frames = Frames::default();
    let (mut generation, mut format) = match at {
        At::Ended => return None,
        At::Opening(generation, mut format) => {
            format.open(&mut frames);
            // An empty chunk would end the body.
            if !frames.0.is_empty() {
                return Some((frames, At::Running(generation, format)));
            }
            (generation, format)
        }
        At::Running(generation, format) => (generation, format),
    };
    let is_over = match generation.next().await {
        Step::Text(piece) => {
            format.text(&piece, &mut frames);
            false
        }
        Step::Quiet(progress) => {
            frames.comment(progress);
            false
        }
        Step::End(outcome) => {
            format.end(&outcome, &mut frames);
            true
        }
        Step::Failed(error) => {
            format.fail(&error, &mut frames);
            true
        }
    };
    Some((
        frames,
        if is_over {
            At::Ended
        } else {
            At::Running(generation, format)
        },
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_one_line_whatever_it_carries() {
        let mut frames = Frames::default();
        frames.data(&"a\r\nb\u{2028}");
        frames.comment(Progress::Prefill(1, 2));
        frames.event("ping", &1);
        assert_eq!(
            frames.0,
            "data: \"a\\r\\nb\u{2028}\"\n\n: prefill 1/2\n\nevent: ping\ndata: 1\n\n"
        );
    }
}
