//! A request of the Messages API, whether it asks for an answer or for the number of tokens.

use std::sync::Arc;

use engine::GrammarSpec;
use serde_json::{Map, Value};

use super::{tables, tools, turns};
use crate::app::App;
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::grammar::AnswerGrammar;
use crate::openai;
use crate::options::{Names, Options};
use crate::request::{Asked, Continue, Conversation, Prompt};
use crate::template::template_uses;
use crate::thinking::Thinking;

/// The names of options in which this API differs from others.
const NAMES: &Names = &Names {
    max_tokens: &["max_tokens"],
    stop: "stop_sequences",
    ..openai::NAMES
};

/// Whether a request must say how long the answer may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Length {
    Required,
    Optional,
}

/// A request that has been read.
pub(super) struct Read {
    pub(super) asked: Asked,
    /// The model's name in the answer.
    pub(super) model: String,
}

/// Reads a request.
///
/// # Errors
///
/// 400 for a field that is wrong, missing, or asks for what is not implemented.
pub(super) fn read(
    mut object: Map<String, Value>,
    app: &Arc<App>,
    length: Length,
) -> Result<Read, ApiError> {
    let text = app.engine.text();
    let [system, messages] = ["system", "messages"].map(|name| object.remove(name));
    let fields = Fields::new(&object, &tables::MESSAGES);
    let model = app.check_model(&fields)?;
    fields.refuse()?;
    // Accepted anywhere, and without a word: clients add it to nearly everything.
    fields.get("cache_control");
    let mut options = Options::read(&fields, app, NAMES, None)?;
    if length == Length::Required && fields.get("max_tokens").is_none() {
        return Err(fields.error("max_tokens", "is missing"));
    }
    thread(&fields)?;
    let config = output_config(&fields)?;
    let thinking = Thinking::read_messages(&fields, config.effort)?;
    let mut arguments = Map::new();
    options.reasoning_budget = thinking.tell(&mut arguments, |name| template_uses(text, name));
    app.settings.defaults.fill(&mut arguments);
    options.splits_reasoning = true;
    options.grammar = config.format;
    let offer = tools::read(&fields, app)?;
    let told = options.offer(offer, tools::FIELDS, text)?;
    let (messages, unread) = turns::read(system, messages, text)?;
    fields.note_ignored(unread);
    let mut conversation = Conversation {
        messages,
        arguments,
        tools: told,
        end: None,
    };
    conversation.go_on(Continue::IfLast, "messages", text)?;
    let asked = Asked {
        prompt: Prompt::Conversation(conversation),
        options,
        ignored: ignored_header(&fields),
    };
    Ok(Read { asked, model })
}

/// Refuses to go on from a conversation that the server was to keep. To begin one asks for nothing
/// yet: the request has all of the messages.
fn thread(fields: &Fields<'_>) -> Result<(), ApiError> {
    const NAME: &str = "thread";
    let Some(thread) = fields.object(NAME)? else {
        return Ok(());
    };
    let inner = fields.inside(thread, "thread.");
    inner.string("previous_message_id")?;
    match inner.string("type")? {
        Some("create") => {}
        Some("continue") => return Err(ApiError::no_thread(NAME)),
        _ => return Err(inner.error("type", "must be one of create, continue")),
    }
    fields.note_ignored(inner.ignored());
    Ok(())
}

/// What `output_config` and the older `output_format` say.
struct OutputConfig<'a> {
    effort: Option<&'a str>,
    format: Option<AnswerGrammar>,
}

fn output_config<'a>(fields: &Fields<'a>) -> Result<OutputConfig<'a>, ApiError> {
    const CONFIG: &str = "output_config";
    const FORMAT: &str = "output_format";
    let older = match fields.object(FORMAT)? {
        Some(format) => grammar(fields, format, "output_format.")?,
        None => None,
    };
    let Some(config) = fields.object(CONFIG)? else {
        return Ok(OutputConfig {
            effort: None,
            format: older,
        });
    };
    let inner = fields.inside(config, "output_config.");
    let effort = inner.string("effort")?;
    let format = match inner.object("format")? {
        Some(format) => grammar(fields, format, "output_config.format.")?,
        None => None,
    };
    fields.note_ignored(inner.ignored());
    if older.is_some() && format.is_some() {
        let message = "is the older name of `output_config.format`; send one of the two";
        return Err(fields.error(FORMAT, message));
    }
    Ok(OutputConfig {
        effort,
        format: format.or(older),
    })
}

/// What an answer of this `format`, which stands at `prefix`, has to follow.
fn grammar<'a>(
    fields: &Fields<'a>,
    format: &'a Map<String, Value>,
    prefix: &'static str,
) -> Result<Option<AnswerGrammar>, ApiError> {
    let inner = fields.inside(format, prefix);
    match inner.string("type")? {
        Some("json_schema") => {}
        Some(_) => return Err(inner.error("type", "must be json_schema")),
        None => return Err(inner.error("type", "is missing")),
    }
    let schema = match inner.get("schema") {
        Some(schema @ (Value::Object(_) | Value::Bool(_))) => schema.clone(),
        Some(_) => return Err(inner.error("schema", "must be a JSON schema, which is an object")),
        None => return Err(inner.error("schema", "is missing")),
    };
    fields.note_ignored(inner.ignored());
    Ok(Some(AnswerGrammar {
        field: format!("{prefix}schema"),
        spec: GrammarSpec::JsonSchema(schema),
    }))
}
