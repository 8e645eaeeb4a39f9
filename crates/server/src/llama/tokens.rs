//! `POST /tokenize`, `POST /detokenize` and `POST /apply-template`: what a prompt is made of.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Response};
use serde_json::{Value, json};
use text::{PromptEnd, Specials, Text, TextError};

use super::prompt;
use super::tables::{TOKENIZER, VLLM_TOKENIZER};
use crate::arrival::Received;
use crate::dialect::{self, X_IGNORED_FIELDS};
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::openai::{self, chat, completions};
use crate::request::Prompt;
use crate::server::Server;

/// What llama-server's requests call a text.
const CONTENT: &str = "content";
/// What vLLM's requests call a text, and a conversation.
const PROMPT: &str = "prompt";
const MESSAGES: &str = "messages";
/// What vLLM's requests ask for the texts of tokens by.
const RETURN_TOKEN_STRS: &str = "return_token_strs";

/// How a text becomes tokens.
#[derive(Clone, Copy)]
struct Tokenizing {
    add_special: bool,
    parse_special: bool,
}

/// `POST /tokenize`: the tokens of a text, which may be longer than the context.
pub(crate) async fn tokenize(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let received = Received::new(&server, request, server.config.limits.body_bytes).await?;
    if !received.object.contains_key(CONTENT)
        && (received.object.contains_key(PROMPT) || received.object.contains_key(MESSAGES))
    {
        return tokenize_as_vllm(received).await;
    }
    let Received {
        mut object,
        worker,
        app,
        ..
    } = received;
    let content = match object.remove(CONTENT) {
        None | Some(Value::Null) => return Err(ApiError::field(CONTENT, "is missing")),
        Some(Value::Object(_)) => {
            let message = "must be a text, or a list of texts and token ids";
            return Err(ApiError::field(CONTENT, message));
        }
        Some(content) => prompt::read_one(CONTENT, content)?,
    };
    let fields = Fields::new(&object, &TOKENIZER);
    let how = Tokenizing {
        add_special: fields.bool("add_special")?.unwrap_or(false),
        parse_special: fields.bool("parse_special")?.unwrap_or(true),
    };
    let with_pieces = fields.bool("with_pieces")?.unwrap_or(false);
    let ignored = ignored_header(&fields);
    let vocab_size = app.engine.info().vocab_size;
    let tokens = app
        .text_work(worker, move |text| how.tokens(text, content))
        .await?;
    check(CONTENT, &tokens, vocab_size)?;
    let tokenizer = &app.engine.text().tokenizer;
    let piece = |&id: &u32| {
        let bytes = tokenizer.token_bytes(id);
        let piece = std::str::from_utf8(bytes).map_or_else(|_| json!(bytes), |text| json!(text));
        json!({"id": id, "piece": piece})
    };
    let document = match with_pieces {
        true => json!({"tokens": tokens.iter().map(piece).collect::<Vec<_>>()}),
        false => json!({"tokens": tokens}),
    };
    Ok(answer(&document, ignored))
}

/// The tokens of a text or of a conversation, in vLLM's form, as routers of vLLM servers ask for
/// them.
async fn tokenize_as_vllm(received: Received) -> Result<Response<Body>, ApiError> {
    let Received {
        mut object,
        worker,
        app,
        ..
    } = received;
    let with_pieces = match object.remove(RETURN_TOKEN_STRS) {
        None | Some(Value::Null) => false,
        Some(Value::Bool(wanted)) => wanted,
        Some(_) => return Err(ApiError::field(RETURN_TOKEN_STRS, "must be true or false")),
    };
    let (prompt, ignored) = if object.contains_key(PROMPT) {
        let fields = Fields::new(&object, &VLLM_TOKENIZER);
        let begins = fields.bool("add_special_tokens")?.unwrap_or(true);
        let text = fields.string(PROMPT)?.unwrap_or_default();
        let prompt = match begins {
            true => Prompt::Text(text.to_owned()),
            false => {
                let tokens = app.engine.text().tokenizer.encode(text, false);
                Prompt::Tokens(tokens.map_err(|_| ApiError::internal())?)
            }
        };
        (prompt, ignored_header(&fields))
    } else {
        let (asked, _) = chat::read(object, &app, chat::Turns::Any)?;
        (asked.prompt, asked.ignored)
    };
    let tokens = dialect::encode(&app, worker, prompt, usize::MAX).await?;
    let tokens: Vec<u32> = tokens
        .into_iter()
        .flat_map(|prompt| prompt.tokens)
        .collect();
    let tokenizer = &app.engine.text().tokenizer;
    let piece = |&id: &u32| String::from_utf8_lossy(tokenizer.token_bytes(id)).into_owned();
    let pieces: Option<Vec<String>> = with_pieces.then(|| tokens.iter().map(piece).collect());
    let document = json!({
        "count": tokens.len(),
        "max_model_len": app.engine.info().context,
        "tokens": tokens,
        "token_strs": pieces,
    });
    Ok(answer(&document, ignored))
}

/// A response of `document`, with the header for what was ignored.
fn answer(document: &Value, ignored: Option<HeaderValue>) -> Response<Body> {
    let mut response = dialect::json(openai::bytes(document));
    if let Some(ignored) = ignored {
        response.headers_mut().insert(X_IGNORED_FIELDS, ignored);
    }
    response
}

impl Tokenizing {
    /// The tokens of `content`; a first text may begin as a prompt does.
    fn tokens(self, text: &Text, content: Prompt) -> Result<Vec<u32>, TextError> {
        let parts = match content {
            Prompt::Mixed(parts) => parts,
            one => vec![one],
        };
        let mut tokens = Vec::new();
        for (i, part) in parts.into_iter().enumerate() {
            match part {
                Prompt::Text(part) => tokens.extend(self.text_tokens(text, &part, i == 0)?),
                Prompt::Tokens(ids) => tokens.extend(ids),
                _ => unreachable!("a list has texts and token ids"),
            }
        }
        Ok(tokens)
    }

    fn text_tokens(self, text: &Text, part: &str, is_first: bool) -> Result<Vec<u32>, TextError> {
        let begins = self.add_special && is_first;
        match (begins, self.parse_special) {
            (true, true) => text.encode_prompt(part),
            (false, true) => text.tokenizer.encode(part, false),
            (false, false) => text.tokenizer.encode_as_text(part),
            (true, false) => {
                let mut tokens = text.encode_prompt("")?;
                tokens.extend(text.tokenizer.encode_as_text(part)?);
                Ok(tokens)
            }
        }
    }
}

/// `POST /detokenize`: the text of tokens, with special ones as they are spelled.
pub(crate) async fn detokenize(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    const TOKENS: &str = "tokens";
    let received = Received::new(&server, request, server.config.limits.body_bytes).await?;
    let list = match received.object.get(TOKENS) {
        Some(Value::Array(list)) => list,
        None | Some(Value::Null) => return Err(ApiError::field(TOKENS, "is missing")),
        Some(_) => return Err(ApiError::field(TOKENS, "must be a list of token ids")),
    };
    let Some(Prompt::Tokens(tokens)) = completions::tokens(list) else {
        return Err(ApiError::field(TOKENS, "must be a list of token ids"));
    };
    let app = received.app;
    check(TOKENS, &tokens, app.engine.info().vocab_size)?;
    let work = move |text: &Text| Ok(text.tokenizer.detokenize(&tokens, Specials::Show));
    let content = app.text_work(received.worker, work).await?;
    // The second is vLLM's name for it.
    let document = json!({"content": content, "prompt": content});
    Ok(answer(&document, None))
}

/// Refuses ids in the field `name` that are in no vocabulary of this size.
fn check(name: &str, tokens: &[u32], vocab_size: usize) -> Result<(), ApiError> {
    match tokens.iter().find(|&&id| id as usize >= vocab_size) {
        None => Ok(()),
        Some(id) => {
            let message = format!("has a token outside the vocabulary of {vocab_size}: {id}");
            Err(ApiError::field(name, message))
        }
    }
}

/// `POST /apply-template`: the prompt of a request for a chat completion, as text.
pub(crate) async fn apply_template(
    State(server): State<Arc<Server>>,
    request: Request,
) -> Result<Response<Body>, ApiError> {
    let received = Received::new(&server, request, server.config.limits.chat_body_bytes).await?;
    let app = received.app;
    let (asked, _) = chat::read(received.object, &app, chat::Turns::Any)?;
    let Prompt::Conversation(mut conversation) = asked.prompt else {
        unreachable!("chats are conversations");
    };
    let tools = conversation.tools.take();
    let end = conversation.end.unwrap_or(PromptEnd::Turn);
    let (messages, arguments) = conversation.for_template();
    let work = move |text: &Text| text.render_chat(&messages, tools.as_deref(), end, &arguments);
    let prompt = app.text_work(received.worker, work).await?;
    Ok(answer(&json!({"prompt": prompt}), asked.ignored))
}
