//! `POST /v1/responses/compact`: a conversation that becomes a summary of itself.
//!
//! The model is asked for the summary as by a last message of the user's. The answer is one item
//! of the type `compaction`, with which clients begin their next request in place of the
//! conversation. Its text is not encrypted: nobody but the client keeps it.

use std::sync::Arc;

use axum::http::HeaderMap;
use engine::RequestOutcome;
use serde_json::{Map, Value, json};

use super::document::Usage;
use super::items::{self, COMPACTION, INPUT, SEALED};
use super::{PREVIOUS, Respond};
use crate::app::App;
use crate::dialect::{Answer, Endpoint};
use crate::errors::ApiError;
use crate::generation::Piece;
use crate::ids;
use crate::limits::Limits;
use crate::openai::bytes;
use crate::request::Asked;
use crate::sse::{Frames, StreamFormat};

/// What the model is asked for.
const REQUEST: &str = "Summarize this conversation so that it can go on without its text: \
    what was asked for, what was found out and decided, and what is left to do. \
    Write the summary only.";
/// Tokens of a summary, where the request does not say how many.
const SUMMARY_TOKENS: usize = 1024;

/// A conversation to summarize.
pub(crate) struct Compact(Respond);

impl Endpoint for Compact {
    fn body_bytes(limits: &Limits) -> usize {
        limits.chat_body_bytes
    }

    fn read(
        mut object: Map<String, Value>,
        headers: &HeaderMap,
        app: &Arc<App>,
    ) -> Result<(Asked, Self), ApiError> {
        if object.get("stream").is_some_and(|stream| stream != false) {
            let hint = ": a summary comes whole; send it as `false` or leave it out";
            return Err(ApiError::unsupported("stream", hint));
        }
        let input = match object.remove(INPUT) {
            // All of the conversation may be stored here.
            None | Some(Value::Null) if object.contains_key(PREVIOUS) => Vec::new(),
            input => items::list(input.unwrap_or_default())?,
        };
        let input = input.into_iter().map(Value::Object);
        let request = json!({"role": "user", "content": REQUEST});
        object.insert(INPUT.to_owned(), input.chain([request]).collect());
        object.insert("store".to_owned(), json!(false));
        let limit = object.entry("max_output_tokens");
        limit.or_insert(json!(SUMMARY_TOKENS));
        let (asked, respond) = Respond::read(object, headers, app)?;
        Ok((asked, Compact(respond)))
    }

    fn begin(&mut self, _prompt_tokens: usize) {}

    fn document(&self, answers: &[Answer]) -> Vec<u8> {
        let summary = self.0.written(&answers[0]).text();
        let item = json!({
            "type": COMPACTION,
            "id": format!("cmp_{}", ids::unique()),
            "encrypted_content": format!("{SEALED}{summary}"),
        });
        bytes(&json!({
            "id": self.0.echo.id,
            "object": "response.compaction",
            "created_at": self.0.echo.created_at,
            "output": [item],
            "usage": Usage::new(&answers[0].outcome),
        }))
    }
}

/// A summary is never sent as a stream.
impl StreamFormat for Compact {
    fn open(&mut self, _frames: &mut Frames) {}

    fn text(&mut self, _piece: &Piece, _frames: &mut Frames) {}

    fn end(&mut self, _outcome: &RequestOutcome, _frames: &mut Frames) {}

    fn refuse(_error: &ApiError, _frames: &mut Frames) {}
}
