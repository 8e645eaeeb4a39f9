//! Dialects: the APIs by which requests come, one folder each.
//!
//! ```text
//! path ─ Route ─→ Dialect ─→ Endpoint::read ─→ Asked ─→ engine
//!                    │                                     │
//!                    └─→ errors     Endpoint::document ←───┤
//!                                   StreamFormat       ←───┘
//! ```
//!
//! A dialect is the only one that knows its API's JSON: it reads a request into [`Asked`] and
//! spells what the engine has written. [`answer`] is the way between, the same for all.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Response, header};
use engine::RequestOutcome;
use serde_json::{Map, Value};

use crate::App;
use crate::errors::ApiError;
use crate::generation::{Generation, Piece};
use crate::lanes::Worker;
use crate::limits::Limits;
use crate::options::AnswerGrammar;
use crate::request::{Asked, Prompt};
use crate::sse::{self, StreamFormat};

/// Header that lists the request's fields that changed nothing.
const X_IGNORED_FIELDS: &str = "x-ignored-fields";

/// What all paths of an API have in common.
pub(crate) struct Dialect {
    /// The JSON document that tells a client of an error.
    pub(crate) error: fn(&ApiError) -> String,
}

impl Dialect {
    /// Gives a response that says there is an error the document for it.
    pub(crate) fn spell_error(&self, response: &mut Response<Body>) {
        if let Some(error) = response.extensions_mut().remove::<ApiError>() {
            *response.body_mut() = Body::from((self.error)(&error));
            response.headers_mut().remove(header::CONTENT_LENGTH);
        }
    }
}

/// One path of a dialect that writes text: what one request asks for, and how its answer is
/// spelled, whole or as a stream.
pub(crate) trait Endpoint: StreamFormat + Sized {
    /// Bytes that the body of a request may have.
    fn body_bytes(limits: &Limits) -> usize;

    /// Reads a request, and how its answer is to be spelled.
    ///
    /// # Errors
    ///
    /// 400 for a field that is wrong, missing, or asks for what is not implemented.
    fn read(object: Map<String, Value>, app: &Arc<App>) -> Result<(Asked, Self), ApiError>;

    /// Notes how many tokens the prompt has, before anything of the answer is spelled.
    fn begin(&mut self, prompt_tokens: usize);

    /// The whole answer as one JSON document.
    fn document(&self, whole: &Piece, outcome: &RequestOutcome) -> Vec<u8>;
}

/// Handles a request for text of any dialect.
pub(crate) async fn answer<E: Endpoint>(
    State(app): State<Arc<App>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    app.refuse_late()?;
    let (head, body) = request.into_parts();
    let limit = E::body_bytes(&app.config.limits);
    let (object, worker) = app.read_object(&head.headers, body, limit).await?;
    let (asked, mut endpoint) = E::read(object, &app)?;
    let Asked {
        prompt,
        mut options,
        ignored,
    } = asked;
    if options.grammar.is_some() && is_without_reasoning(&app, &prompt) {
        options.reasoning_budget = Some(0);
    }
    let (worker, grammar) = compile(&app, worker, options.grammar.take()).await?;
    let prompt = encode(&app, worker, prompt).await?;
    endpoint.begin(prompt.len());
    let streams = options.stream;
    let generation = Generation::start(&app, &head.extensions, options.request(prompt, grammar))?;
    let mut response = if streams {
        sse::respond(generation, endpoint)
    } else {
        let (whole, outcome) = generation.collect().await?;
        json(endpoint.document(&whole, &outcome))
    };
    if let Some(ignored) = ignored {
        response.headers_mut().insert(X_IGNORED_FIELDS, ignored);
    }
    Ok(response)
}

/// Compiles what the answer has to follow.
async fn compile(
    app: &Arc<App>,
    worker: Worker,
    grammar: Option<AnswerGrammar>,
) -> Result<(Worker, Option<engine::Grammar>), ApiError> {
    let Some(AnswerGrammar { field, spec }) = grammar else {
        return Ok((worker, None));
    };
    let of = app.clone();
    let compiled = tokio::task::spawn_blocking(move || (worker, of.engine.compile(&spec)));
    // A panic in there is that request's end, and only its.
    match compiled.await.map_err(|_| ApiError::internal())? {
        (worker, Ok(grammar)) => Ok((worker, Some(grammar))),
        (_, Err(error)) => Err(ApiError::grammar(field, &error)),
    }
}

/// The tokens of a prompt.
async fn encode(app: &App, worker: Worker, prompt: Prompt) -> Result<Vec<u32>, ApiError> {
    let context = app.engine.info().context;
    match prompt {
        Prompt::Conversation(mut conversation) => {
            app.text_work(worker, move |text| {
                let tools = conversation.tools.take();
                let (messages, arguments) = conversation.for_template();
                text.encode_chat_within(&messages, tools.as_deref(), true, &arguments, context)
            })
            .await
        }
        Prompt::Text(prompt) => {
            app.text_work(worker, move |text| {
                text.encode_prompt_within(&prompt, context)
            })
            .await
        }
        Prompt::Tokens(prompt) => {
            drop(worker);
            Ok(prompt)
        }
    }
}

/// A JSON document as a response.
pub(crate) fn json(document: Vec<u8>) -> Response<Body> {
    let mut response = Response::new(Body::from(document));
    response.headers_mut().insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    response
}

/// Whether the model's template is told to leave reasoning out.
fn is_without_reasoning(app: &App, prompt: &Prompt) -> bool {
    let Prompt::Conversation(conversation) = prompt else {
        return false;
    };
    let template = app.engine.text().template.as_ref();
    template.is_some_and(|template| template.turns_reasoning_off(&conversation.arguments))
}
