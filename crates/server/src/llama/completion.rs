//! `POST /completion` and `POST /infill`: a prompt is continued, or a gap filled.

use std::marker::PhantomData;
use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, Response};
use axum::response::IntoResponse;
use engine::{Channel, RequestOutcome};
use serde_json::{Map, Value, json};

use super::document::{Note, Spelling};
use super::media::{self, IMAGE_DATA};
use super::{DIALECT, prompt, request, tables};
use crate::app::App;
use crate::arrival::Parsed;
use crate::dialect::{Answer, Endpoint, answer_parsed};
use crate::errors::ApiError;
use crate::generation::{Piece, Prefill};
use crate::limits::Limits;
use crate::openai::{self, completions};
use crate::options::Options;
use crate::request::{Asked, Prompt};
use crate::run::Run;
use crate::server::Server;
use crate::sse::{Frames, StreamFormat};

/// The prefix of paths that OpenAI's API has.
const V1: &str = "/v1/";

/// What a request has for a prompt.
pub(crate) trait Kind: Send + 'static {
    /// Whether the text is to fill a gap.
    const FILLS_GAP: bool;

    /// Takes the prompt out of a request.
    fn take(object: &mut Map<String, Value>, app: &App) -> Result<Prompt, ApiError>;
}

/// A prompt to continue.
pub(crate) struct Continued;

impl Kind for Continued {
    const FILLS_GAP: bool = false;

    fn take(object: &mut Map<String, Value>, _: &App) -> Result<Prompt, ApiError> {
        let prompt = prompt::read(object.remove("prompt").unwrap_or_default())?;
        media::with_images(prompt, object.remove(IMAGE_DATA).unwrap_or_default())
    }
}

/// A gap to fill.
pub(crate) struct Filled;

impl Kind for Filled {
    const FILLS_GAP: bool = true;

    fn take(object: &mut Map<String, Value>, app: &App) -> Result<Prompt, ApiError> {
        check_infill(app, "input_prefix")?;
        let images = object.remove(IMAGE_DATA).unwrap_or_default();
        if !images.is_null() && images != json!([]) {
            let message = "cannot be used: a gap is filled from text alone";
            return Err(ApiError::field(IMAGE_DATA, message));
        }
        let room = app.engine.info().context;
        prompt::read_infill(object, room).map(Prompt::Infill)
    }
}

/// Refuses the field `name`, which asks to fill a gap, where the vocabulary has no marks for one.
pub(crate) fn check_infill(app: &App, name: &str) -> Result<(), ApiError> {
    match app.engine.text().infill {
        Some(_) => Ok(()),
        None => Err(ApiError::field(
            name,
            "cannot be used: this model fills no gaps, since its vocabulary has no tokens that mark one",
        )),
    }
}

/// Has a text that fills a gap end at every mark of gaps and files.
pub(crate) fn end_at_marks(options: &mut Options, app: &App) {
    let marks = app.engine.text().infill.as_ref();
    options
        .stop_token_ids
        .extend(marks.into_iter().flat_map(|marks| marks.ends()));
}

/// A continuation, or what fills a gap, whole or as a stream.
pub(crate) struct Completion<K> {
    spelling: Arc<Spelling>,
    /// Number of the answer.
    index: usize,
    /// What becomes known of each answer's request, by the answer's number.
    notes: Arc<Vec<Note>>,
    kind: PhantomData<K>,
}

impl<K: Kind> Completion<K> {
    fn note(&self) -> &Note {
        &self.notes[self.index]
    }
}

impl<K: Kind> Endpoint for Completion<K> {
    fn body_bytes(limits: &Limits) -> usize {
        limits.body_bytes
    }

    fn read(
        mut object: Map<String, Value>,
        _: &HeaderMap,
        app: &Arc<App>,
    ) -> Result<(Asked, Self), ApiError> {
        let mut prompt = K::take(&mut object, app)?;
        let request::Read {
            mut options,
            spelling,
            ignored,
        } = request::read(object, app, K::FILLS_GAP)?;
        if let Prompt::Infill(infill) = &mut prompt {
            // A text of any length needs room for one token at least, and half of the context
            // is left to the prompt however long the text may be.
            let most = options
                .max_tokens
                .unwrap_or(0)
                .clamp(1, (infill.room / 2).max(1));
            infill.room -= most;
            end_at_marks(&mut options, app);
        }
        let completion = Completion {
            spelling: Arc::new(spelling),
            index: 0,
            notes: Arc::default(),
            kind: PhantomData,
        };
        let asked = Asked {
            prompt,
            options,
            ignored,
        };
        Ok((asked, completion))
    }

    fn choices(self, n: usize) -> Vec<Self> {
        let notes = Arc::new(vec![Note::default(); n]);
        let choice = |index| Completion {
            spelling: self.spelling.clone(),
            index,
            notes: notes.clone(),
            kind: PhantomData,
        };
        (0..n).map(choice).collect()
    }

    fn begin(&mut self, _: usize) {}

    fn note_prompt(&mut self, prompt: &[u32]) {
        self.note().prompt.get_or_init(|| prompt.to_vec());
    }

    fn note_run(&mut self, run: &Arc<Run>) {
        self.note().run.get_or_init(|| run.clone());
    }

    fn document(&self, answers: &[Answer]) -> Vec<u8> {
        let texts = answers.iter();
        let texts: Vec<_> = texts
            .map(|answer| answer.whole.text(Channel::Answer))
            .collect();
        let documents = answers.iter().zip(&texts).enumerate();
        let documents = documents.map(|(i, (answer, text))| {
            let whole = Some(&answer.whole);
            self.spelling
                .last(i, &self.notes[i], text, whole, &answer.outcome)
        });
        let documents: Vec<_> = documents.collect();
        match &documents[..] {
            [only] => openai::bytes(only),
            all => openai::bytes(&all),
        }
    }
}

impl<K: Kind> StreamFormat for Completion<K> {
    /// The API has no chunk without text but for progress; the headers are the sign of life.
    fn open(&mut self, _: &mut Frames) {}

    fn text(&mut self, piece: &Piece, frames: &mut Frames) {
        let text = piece.text(Channel::Answer);
        let mut chunk = self.spelling.chunk(self.index, self.note());
        if !self.spelling.has_probabilities() {
            chunk.content = &text;
            chunk.tokens = piece.tokens().map(|token| token.id).collect();
            frames.data(&chunk);
            return;
        }
        // Clients read the probabilities of one token from each chunk.
        let mut rest = &*text;
        let n = piece.tokens().count();
        for (i, token) in piece.tokens().enumerate() {
            let own = match i + 1 == n {
                true => rest,
                false => rest
                    .get(..token.text.len())
                    .filter(|own| **own == token.text)
                    .unwrap_or(""),
            };
            rest = &rest[own.len()..];
            let probability = self.spelling.probability(piece, i);
            let mut chunk = self.spelling.chunk(self.index, self.note());
            chunk.content = own;
            chunk.tokens = vec![token.id];
            chunk.completion_probabilities = probability.map(|one| vec![one]);
            frames.data(&chunk);
        }
        if !rest.is_empty() {
            chunk.content = rest;
            frames.data(&chunk);
        }
    }

    fn prefill(&mut self, prefill: Prefill, frames: &mut Frames) {
        let chunk = self.spelling.progress(self.index, self.note(), prefill);
        frames.data(&chunk);
    }

    fn end(&mut self, outcome: &RequestOutcome, frames: &mut Frames) {
        let last = self
            .spelling
            .last(self.index, self.note(), "", None, outcome);
        frames.data(&last);
    }

    fn refuse(error: &ApiError, frames: &mut Frames) {
        frames.raw(&super::error(error));
    }
}

/// `POST /completions`, which OpenAI's API and this one share: a body that only this one can have
/// is answered by it, unless the path begins with `/v1`, which is OpenAI's alone.
pub(crate) async fn completions(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let is_openai_s = request.uri().path().starts_with(V1);
    let limit = server.config.limits.body_bytes;
    let parsed = Parsed::new(&server, request, limit).await?;
    if is_openai_s || !tables::is_native(&parsed.object) {
        return answer_parsed::<completions::Completion>(parsed).await;
    }
    let answered = answer_parsed::<Completion<Continued>>(parsed).await;
    Ok(answered.unwrap_or_else(|error| {
        // The path's own dialect would spell it otherwise.
        let mut response = error.into_response();
        DIALECT.spell_error(&mut response, "");
        response
    }))
}
