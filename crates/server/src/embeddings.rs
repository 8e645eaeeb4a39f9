//! Embeddings: what the paths of all dialects that answer with vectors have in common.
//!
//! Every input is a request of its own, so that they run together in the engine's batch. A few at
//! a time wait in its queue, and others find room between them.

use std::sync::Arc;
use std::time::Duration;

use axum::http::request::Parts;
use engine::{Embedding, Pooling, RequestOutcome};
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;

use crate::app::App;
use crate::auth;
use crate::dialect;
use crate::errors::ApiError;
use crate::generation::{Generation, Wants};
use crate::lanes::Worker;
use crate::options::owned;
use crate::request::Prompt;
use crate::turns::Client;

/// Inputs of a request, the same as OpenAI's.
pub(crate) const INPUTS_MAX: usize = 2048;

/// The pooling of this server, `serve --pooling`.
pub(crate) fn pooling(app: &App) -> Pooling {
    app.settings.pooling.unwrap_or_default()
}

/// Refuses more inputs than a request may have in the field `name`.
pub(crate) fn check_count(name: &str, n: usize) -> Result<(), ApiError> {
    if n > INPUTS_MAX {
        let message = format!("has {n} inputs, {INPUTS_MAX} at most");
        return Err(ApiError::field(name, message));
    }
    Ok(())
}

/// The tokens of `inputs`, the field `name` of a request; each may fill the context. A longer one is
/// cut at its end if it `truncates`, else it is an error.
///
/// # Errors
///
/// 400 for an input without tokens, and for one that is too long.
pub(crate) async fn encode(
    app: &App,
    worker: Worker,
    name: &str,
    inputs: Vec<Prompt>,
    truncates: bool,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let context = app.engine.info().context;
    let limit = if truncates { usize::MAX } else { context };
    let encoded = dialect::encode(app, worker, Prompt::Several(inputs), limit).await?;
    let mut prompts: Vec<Vec<u32>> = encoded.into_iter().map(|prompt| prompt.tokens).collect();
    if let Some(i) = prompts.iter().position(Vec::is_empty) {
        return Err(ApiError::field(format!("{name}[{i}]"), "is empty"));
    }
    if truncates {
        prompts
            .iter_mut()
            .for_each(|prompt| prompt.truncate(context));
    }
    Ok(prompts)
}

/// Runs a request of this `head` for the `embedding` of each of `prompts`, and gives their outcomes in
/// order.
///
/// # Errors
///
/// What fails of one fails the whole request, and so does the limit of its time.
pub(crate) async fn vectors(
    app: &Arc<App>,
    head: &Parts,
    prompts: Vec<Vec<u32>>,
    embedding: Embedding,
) -> Result<Vec<RequestOutcome>, ApiError> {
    let caller = auth::caller(&app.server.config.keys, &head.headers);
    let client = head.extensions.get::<Arc<Client>>();
    let client = client.map_or(0, |client| client.number(caller.as_ref()));
    let request = |prompt| engine::Request {
        embedding: Some(embedding),
        namespace: owned(engine::Namespace::default(), caller),
        client,
        ..engine::Request::new(prompt)
    };
    let start = |prompt| {
        let wants = Wants::default();
        Generation::start(app, &head.extensions, request(prompt), wants, None)
    };
    let most = app.time_left(None);
    let outcomes = tokio::time::timeout(most, run(app, prompts, start)).await;
    outcomes.map_err(|_| timed_out(app, most))?
}

/// The error of a request that has taken as long as any may, counted.
fn timed_out(app: &App, most: Duration) -> ApiError {
    let error = ApiError::timed_out(most);
    app.metrics.faults.count(error.label());
    error
}

/// Runs all prompts, and gives their outcomes in order. While one runs, another that finds no
/// place in the queue waits for it.
async fn run(
    app: &App,
    prompts: Vec<Vec<u32>>,
    start: impl Fn(Vec<u32>) -> Result<Generation, ApiError>,
) -> Result<Vec<RequestOutcome>, ApiError> {
    let width = 2 * app.engine.info().sequences;
    let mut outcomes: Vec<Option<RequestOutcome>> = vec![None; prompts.len()];
    let mut waiting = prompts.into_iter().enumerate();
    let mut running = FuturesUnordered::new();
    loop {
        while running.is_empty() || running.len() < width && app.engine.places() > 0 {
            let Some((i, prompt)) = waiting.next() else {
                break;
            };
            let generation = start(prompt)?;
            running.push(async move { (i, generation.collect().await) });
        }
        let Some((i, ended)) = running.next().await else {
            break;
        };
        outcomes[i] = Some(*ended?.1);
    }
    Ok(outcomes.into_iter().flatten().collect())
}
