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
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Response, header};
use engine::RequestOutcome;
use futures_util::future::try_join_all;
use serde_json::{Map, Value};
use text::{PromptEnd, Text, TextError};
use tokio::time::timeout;

use crate::app::App;
use crate::arrival::{Arrival, Parsed, Received};
use crate::auth;
use crate::errors::ApiError;
use crate::generation::{Generation, Piece};
use crate::grammar::AnswerGrammar;
use crate::lanes::Worker;
use crate::limits::Limits;
use crate::media::{self, Encoded, Media};
use crate::options::Options;
use crate::registry::Keep;
use crate::request::{Asked, Prompt};
use crate::run::Run;
use crate::server::Server;
use crate::sources::Place;
use crate::sse::{self, StreamFormat};
use crate::turns::Client;

/// Header that lists the request's fields that changed nothing.
pub(crate) const X_IGNORED_FIELDS: &str = "x-ignored-fields";

/// What all paths of an API have in common.
pub(crate) struct Dialect {
    /// Whose API it is.
    pub(crate) name: &'static str,
    /// The JSON document that tells a client of an error of the request with this id.
    pub(crate) error: fn(&ApiError, &str) -> String,
    /// The header in which the API's clients look for the id of their request, beside
    /// `x-request-id`.
    pub(crate) id_header: Option<&'static str>,
}

impl Dialect {
    /// Gives a response that says there is an error the document for it; `id` is the request's.
    pub(crate) fn spell_error(&self, response: &mut Response<Body>, id: &str) {
        if let Some(error) = response.extensions_mut().remove::<ApiError>() {
            *response.body_mut() = Body::from((self.error)(&error, id));
            response.headers_mut().remove(header::CONTENT_LENGTH);
        }
    }
}

/// One path of a dialect that writes text: what one request asks for, and how its answer is
/// spelled, whole or as a stream.
pub(crate) trait Endpoint: StreamFormat + Sized {
    /// Bytes that the body of a request may have.
    fn body_bytes(limits: &Limits) -> usize;

    /// Reads a request with these headers, and how its answer is to be spelled.
    ///
    /// # Errors
    ///
    /// 400 for a field that is wrong, missing, or asks for what is not implemented.
    fn read(
        object: Map<String, Value>,
        headers: &HeaderMap,
        app: &Arc<App>,
    ) -> Result<(Asked, Self), ApiError>;

    /// Whether an answer is a stream where the request does not say.
    const STREAMS: bool = false;

    /// How long the model is to stay loaded after the request.
    ///
    /// # Errors
    ///
    /// 400 for a field that is wrong.
    fn keep(_object: &Map<String, Value>) -> Result<Keep, ApiError> {
        Ok(Keep::Default)
    }

    /// The answer to a request that only wants the model `model` to be unloaded, if it is one.
    ///
    /// # Errors
    ///
    /// 400 for a field that is wrong.
    fn unload(
        _object: &Map<String, Value>,
        _server: &Server,
        _model: usize,
    ) -> Result<Option<Vec<u8>>, ApiError> {
        Ok(None)
    }

    /// The answer to a request that asks for no text, such as one that only wants the model to
    /// be loaded.
    ///
    /// # Errors
    ///
    /// 404 for a model that is not served, where names are strict.
    fn at_once(_object: &Map<String, Value>, _app: &App) -> Result<Option<Vec<u8>>, ApiError> {
        Ok(None)
    }

    /// Spells each of `n` answers, in their order. Only a dialect that reads requests for several
    /// is asked for more than one.
    fn choices(self, n: usize) -> Vec<Self> {
        assert_eq!(n, 1, "the dialect reads no request for several answers");
        vec![self]
    }

    /// Notes how many tokens the prompt has, before anything of the answer is spelled.
    fn begin(&mut self, prompt_tokens: usize);

    /// Notes the tokens of the prompt, for a dialect whose answers repeat it.
    fn note_prompt(&mut self, _prompt: &[u32]) {}

    /// Notes where it can be seen how far the request is.
    fn note_run(&mut self, _run: &Arc<Run>) {}

    /// All answers as one JSON document; called on the first of [`choices`](Endpoint::choices).
    fn document(&self, answers: &[Answer]) -> Vec<u8>;
}

/// A whole answer.
pub(crate) struct Answer {
    pub(crate) whole: Piece,
    pub(crate) outcome: Box<RequestOutcome>,
}

/// Handles a request for text of any dialect.
pub(crate) async fn answer<E: Endpoint>(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let limit = E::body_bytes(&server.config.limits);
    answer_parsed::<E>(Parsed::new(&server, request, limit).await?).await
}

/// Handles a request for text whose body has been read, once its model is loaded. While that takes
/// long, a stream has signs of life.
pub(crate) async fn answer_parsed<E: Endpoint>(parsed: Parsed) -> Result<Response<Body>, ApiError> {
    let (server, model) = (parsed.server().clone(), parsed.model);
    if let Some(document) = E::unload(&parsed.object, &server, model)? {
        server.registry.unload(model);
        return Ok(json(document));
    }
    let keep = E::keep(&parsed.object)?;
    let waiting = match parsed.arrive(keep) {
        Arrival::Ready(received) => return answer_received::<E>(received).await,
        Arrival::Waits(waiting) => waiting,
    };
    if !waiting.stream.unwrap_or(E::STREAMS) {
        return answer_received::<E>(waiting.ready().await?).await;
    }
    let (name, watch) = (waiting.model(), waiting.watch());
    let quiet = server.config.limits.keep_alive;
    let mut answer = Box::pin(async { answer_received::<E>(waiting.ready().await?).await });
    match timeout(quiet, &mut answer).await {
        Ok(answer) => answer,
        Err(_) => Ok(sse::respond_later::<E>(answer, quiet, move |frames| {
            E::waits(&name, &watch(), frames);
        })),
    }
}

/// Handles a request for text whose body has been read.
pub(crate) async fn answer_received<E: Endpoint>(
    received: Received,
) -> Result<Response<Body>, ApiError> {
    let Received {
        head,
        object,
        worker,
        app,
    } = received;
    if let Some(document) = E::at_once(&object, &app)? {
        return Ok(json(document));
    }
    let (mut asked, endpoint) = E::read(object, &head.headers, &app)?;
    asked.options.timeout = Some(app.time_left(asked.options.timeout));
    answer_asked(&app, &head, worker, asked, endpoint).await
}

/// Handles a request for text that has been read.
pub(crate) async fn answer_asked<E: Endpoint>(
    app: &Arc<App>,
    head: &Parts,
    worker: Worker,
    asked: Asked,
    endpoint: E,
) -> Result<Response<Body>, ApiError> {
    let Asked {
        prompt,
        mut options,
        ignored,
    } = asked;
    let caller = auth::caller(&app.server.config.keys, &head.headers);
    options.keep_apart(caller);
    let requests = requests(app, worker, prompt, &mut options).await?;
    let client = head.extensions.get::<Arc<Client>>();
    let client = client.map_or(0, |client| client.number(caller.as_ref()));
    let mut choices = endpoint.choices(requests.len());
    let mut generations = Vec::with_capacity(requests.len());
    for (choice, mut request) in choices.iter_mut().zip(requests) {
        choice.begin(request.prompt.len());
        choice.note_prompt(&request.prompt);
        request.client = client;
        let (wants, timeout) = (options.wants, options.timeout);
        let generation = Generation::start(app, &head.extensions, request, wants, timeout)?;
        choice.note_run(generation.run());
        generations.push(generation);
    }
    let mut response = if options.stream {
        sse::respond(generations, choices)
    } else {
        let answers = generations.into_iter().map(Generation::collect);
        let answers = try_join_all(answers).await?.into_iter();
        let answers = answers.map(|(whole, outcome)| Answer { whole, outcome });
        json(choices[0].document(&answers.collect::<Vec<_>>()))
    };
    if let Some(ignored) = ignored {
        response.headers_mut().insert(X_IGNORED_FIELDS, ignored);
    }
    Ok(response)
}

/// The engine's requests for all answers to `prompt`, those to one prompt of several after each
/// other.
///
/// # Errors
///
/// 400 for a prompt or a grammar that the model cannot take, and for more answers than run and wait
/// at once.
pub(crate) async fn requests(
    app: &Arc<App>,
    worker: Worker,
    prompt: Prompt,
    options: &mut Options,
) -> Result<Vec<engine::Request>, ApiError> {
    let continues = match &prompt {
        Prompt::Conversation(conversation) => conversation.continues(),
        _ => None,
    };
    let is_begun = continues.is_some();
    if options.grammar.is_some() && !is_begun && is_without_reasoning(app, &prompt) {
        options.reasoning_budget = Some(0);
    }
    let (worker, grammar) = compile(app, worker, options.grammar.take()).await?;
    let prompts = encode(app, worker, prompt, app.engine.info().context).await?;
    let n = prompts.len() * options.n;
    let most = app.engine.places_max();
    if n > most {
        let message = format!("asks for {n} answers in all, and this server takes {most} at once");
        return Err(ApiError::field("n", message));
    }
    let of_prompt = |prompt: &Encoded, i| {
        let tokens = prompt.tokens.clone();
        let request = options.request_of(i, tokens, grammar.clone(), continues);
        engine::Request {
            media: prompt.media.clone(),
            ..request
        }
    };
    let all = prompts.iter();
    let all = all.flat_map(|prompt| (0..options.n).map(move |i| (prompt, i)));
    Ok(all.map(|(prompt, i)| of_prompt(prompt, i)).collect())
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

/// The tokens and the media of each prompt, unless a rough bound shows that the text of one has
/// more than `limit` tokens.
pub(crate) async fn encode(
    app: &App,
    worker: Worker,
    prompt: Prompt,
    limit: usize,
) -> Result<Vec<Encoded>, ApiError> {
    let mut prompts = match prompt {
        Prompt::Tokens(tokens) => return Ok(vec![tokens.into()]),
        Prompt::Several(prompts) => prompts,
        one => vec![one],
    };
    let shown: Vec<_> = prompts.iter_mut().map(Prompt::take_media).collect();
    if shown.iter().any(|shown| !shown.is_empty()) {
        return encode_seen(app, worker, prompts, shown, limit).await;
    }
    app.text_work(worker, move |text| {
        let prompts = prompts.into_iter();
        let encode = |one| Ok(encode_one(text, one, limit)?.into());
        prompts.map(encode).collect()
    })
    .await
}

/// The tokens and media of prompts that `shown` were taken out of, those of each.
async fn encode_seen(
    app: &App,
    worker: Worker,
    prompts: Vec<Prompt>,
    shown: Vec<Vec<Media>>,
    limit: usize,
) -> Result<Vec<Encoded>, ApiError> {
    let numbers: Vec<usize> = shown.iter().map(Vec::len).collect();
    let shown = shown.into_iter().flatten().collect::<Vec<_>>();
    media::admit(&shown, app.engine.info())?;
    let senses = app.engine.senses().clone();
    let (worker, shown, place) = bring(app, worker, shown).await?;
    let encode = move |text: &Text| {
        let _place = place;
        let mut shown = shown.into_iter();
        let mut encoded = Vec::with_capacity(prompts.len());
        for (prompt, n) in prompts.into_iter().zip(numbers) {
            let items = match media::decode(&senses, shown.by_ref().take(n)) {
                Ok(items) => items,
                Err(error) => return Ok(Err(error)),
            };
            let prompt = match &senses.vision {
                Some(vision) => prompt.with_places(vision.placeholder()),
                None => prompt,
            };
            let tokens = encode_one(text, prompt, limit)?;
            match senses.place(tokens, items, &text.tokenizer) {
                Ok((tokens, media)) => encoded.push(Encoded { tokens, media }),
                Err(error) => return Ok(Err(ApiError::request(error.to_string()))),
            }
        }
        Ok(Ok(encoded))
    };
    app.text_work(worker, encode).await?
}

/// Reads the media that a request names. Who waits for other machines takes no worker's place.
async fn bring(
    app: &App,
    worker: Worker,
    shown: Vec<Media>,
) -> Result<(Worker, Vec<Media>, Option<Place>), ApiError> {
    if !media::are_named(&shown) {
        return Ok((worker, shown, None));
    }
    drop(worker);
    let (shown, place) = media::bring(&app.server.config.media, shown).await?;
    let worker = app.server.lanes.enter(media::held(&shown)).await;
    Ok((worker, shown, Some(place)))
}

/// The tokens of a prompt that has no more than `limit` by a rough bound.
fn encode_one(text: &Text, prompt: Prompt, limit: usize) -> Result<Vec<u32>, TextError> {
    match prompt {
        Prompt::Conversation(mut conversation) => {
            let tools = conversation.tools.take();
            let end = conversation.end.unwrap_or(PromptEnd::Turn);
            let (messages, arguments) = conversation.for_template();
            text.encode_chat_within(&messages, tools.as_deref(), end, &arguments, limit)
        }
        Prompt::Text(prompt) => text.encode_prompt_within(&prompt, limit),
        Prompt::Tokens(prompt) => Ok(prompt),
        Prompt::Mixed(parts) => encode_mixed(text, parts, limit),
        Prompt::Infill(infill) => {
            let prompt = text.encode_infill(&infill)?;
            Ok(prompt.expect("checked to have marks when the request was read"))
        }
        Prompt::Several(_) => unreachable!("no list holds lists of prompts"),
        Prompt::Pictured(_) => unreachable!("its pictures have their places"),
    }
}

/// The tokens of parts that follow each other: a first text begins as a prompt does.
fn encode_mixed(text: &Text, parts: Vec<Prompt>, limit: usize) -> Result<Vec<u32>, TextError> {
    let mut tokens = Vec::new();
    for (i, part) in parts.into_iter().enumerate() {
        match part {
            Prompt::Text(part) if i > 0 => tokens.extend(text.tokenizer.encode(&part, false)?),
            part => tokens.extend(encode_one(text, part, limit)?),
        }
    }
    Ok(tokens)
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
