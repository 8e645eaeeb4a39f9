//! A request for text: a conversation (`/api/chat`) or a prompt (`/api/generate`).

use std::collections::VecDeque;
use std::sync::Arc;

use engine::GrammarSpec;
use serde_json::{Map, Value, json};
use text::Text;

use super::{KEEP_ALIVE, can_reason, model_name, tables};
use crate::app::App;
use crate::errors::{ApiError, excerpt};
use crate::fields::{Fields, ignored_header, whole};
use crate::grammar::AnswerGrammar;
use crate::ids;
use crate::llama::completion::end_at_marks;
use crate::media::{self, Image, Media};
use crate::offer::ToolChoice;
use crate::openai;
use crate::openai::completions::with_suffix;
use crate::openai::tools::{Spelling, offer};
use crate::options::{Names, Options};
use crate::request::{Asked, Conversation, Message, Part, Prompt, Role};
use crate::template::template_uses;
use crate::thinking::Thinking;

/// The names of options in which this API differs from others.
const NAMES: &Names = &Names {
    max_tokens: &["num_predict"],
    ..openai::NAMES
};

/// Reads a request, and the model's name in the answer.
///
/// # Errors
///
/// 400 for a field that is wrong, missing, or asks for what is not implemented; 404 for the name
/// of another model, where names are strict.
pub(super) fn read(
    mut object: Map<String, Value>,
    app: &Arc<App>,
    is_chat: bool,
) -> Result<(Asked, String), ApiError> {
    let text = app.engine.text();
    let settings = settings(&mut object)?;
    let mut take = |name: &str| object.remove(name);
    let (mut messages, prompt, images) = match is_chat {
        true => (take("messages"), None, None),
        false => (None, take("prompt"), take("images")),
    };
    let shown = match &mut messages {
        Some(messages) => pictures_of(messages)?,
        None => vec![media::read_list("images", images.unwrap_or_default())?],
    };
    name_kinds(&mut object);
    let table = if is_chat {
        &tables::CHAT
    } else {
        &tables::GENERATE
    };
    let fields = Fields::new(&object, table);
    let model = model_name(app, fields.string("model")?)?;
    // It was read when the request came.
    fields.get(KEEP_ALIVE);
    fields.refuse()?;
    let inner = fields.inside(&settings, tables::OPTIONS);
    inner.refuse()?;
    let mut options = Options::read(&inner, app, NAMES, None)?;
    fields.note_ignored(inner.ignored());
    options.stream = fields.bool("stream")?.unwrap_or(true);
    options.splits_reasoning = true;
    let thinking = Thinking::read_think(&fields)?.or(app.settings.reasoning);
    if fields.get("think") == Some(&Value::Bool(true)) && !can_reason(app) {
        let message = format!(
            "cannot be true: \"{}\" does not support thinking",
            excerpt(&model)
        );
        return Err(fields.error("think", message));
    }
    let mut arguments = Map::new();
    options.reasoning_budget = thinking.tell(&mut arguments, |name| template_uses(text, name));
    app.settings.defaults.fill(&mut arguments);
    options.grammar = format(&fields)?;
    let prompt = match messages {
        Some(messages) => {
            let offer = offer(&fields, app, "tools", ToolChoice::Auto)?;
            let tools = options.offer(offer, Spelling::Tools.fields(), text)?;
            let (mut messages, unread) = openai::messages::read(for_openai(messages, text), text)?;
            for (message, shown) in messages.iter_mut().zip(shown) {
                show(message, shown);
            }
            fields.note_ignored(unread);
            Prompt::Conversation(Conversation {
                messages,
                arguments,
                tools,
                end: None,
            })
        }
        None => match suffix(&fields, is_chat)? {
            Some(suffix) => {
                end_at_marks(&mut options, app);
                // What fills a gap is no turn of a conversation.
                (options.splits_reasoning, options.reasoning_budget) = (false, None);
                filling(&fields, prompt, suffix, shown.into_iter().flatten(), app)?
            }
            None => written(
                &fields,
                prompt,
                shown.into_iter().flatten(),
                arguments,
                text,
            )?,
        },
    };
    let asked = Asked {
        prompt,
        options,
        ignored: ignored_header(&fields),
    };
    Ok((asked, model))
}

/// Takes the object `options` out of a request, with Ollama's special values as other APIs have
/// them.
fn settings(object: &mut Map<String, Value>) -> Result<Map<String, Value>, ApiError> {
    let mut settings = match object.remove("options") {
        None | Some(Value::Null) => Map::new(),
        Some(Value::Object(settings)) => settings,
        Some(_) => return Err(ApiError::field("options", "must be an object")),
    };
    if let Some(speculation) = object.remove("speculation") {
        settings.entry("speculation").or_insert(speculation);
    }
    // -2 is "until the context is full", which is what no limit means here.
    if settings.get("num_predict").and_then(whole) == Some(-2) {
        settings.insert("num_predict".into(), json!(-1));
    }
    // -1 is "any".
    if settings.get("seed").and_then(whole) == Some(-1) {
        settings.insert("seed".into(), json!(ids::random_seed()));
    }
    Ok(settings)
}

/// Gives tools without a type the only one there is.
fn name_kinds(object: &mut Map<String, Value>) {
    let tools = object.get_mut("tools").and_then(Value::as_array_mut);
    let tools = tools.into_iter().flatten();
    for tool in tools.filter_map(Value::as_object_mut) {
        tool.entry("type").or_insert(json!("function"));
    }
}

/// What the answer has to follow.
fn format(fields: &Fields<'_>) -> Result<Option<AnswerGrammar>, ApiError> {
    const NAME: &str = "format";
    let spec = match fields.get(NAME) {
        None => return Ok(None),
        Some(Value::String(word)) if word.is_empty() => return Ok(None),
        Some(Value::String(word)) if word == "json" => GrammarSpec::JsonObject,
        Some(schema @ Value::Object(_)) => GrammarSpec::JsonSchema(schema.clone()),
        Some(_) => return Err(fields.error(NAME, "must be \"json\" or a JSON schema")),
    };
    Ok(Some(AnswerGrammar {
        field: NAME.to_owned(),
        spec,
    }))
}

/// The text behind the gap that the answer of `/api/generate` is to fill, if it is to fill one.
fn suffix<'a>(fields: &Fields<'a>, is_chat: bool) -> Result<Option<&'a str>, ApiError> {
    match is_chat {
        true => Ok(None),
        false => Ok(fields.string("suffix")?.filter(|text| !text.is_empty())),
    }
}

/// The prompt of what fills the gap between `prompt` and `suffix`. No other words stand around it.
fn filling(
    fields: &Fields<'_>,
    prompt: Option<Value>,
    suffix: &str,
    mut images: impl Iterator<Item = Image>,
    app: &App,
) -> Result<Prompt, ApiError> {
    let Some(Value::String(prompt)) = prompt else {
        return Err(ApiError::field("prompt", "must be a string"));
    };
    let with = "cannot come with `suffix`: what stands around a gap is its whole prompt";
    if fields.bool("raw")?.unwrap_or(false) {
        return Err(fields.error("raw", with));
    }
    if fields
        .string("system")?
        .is_some_and(|words| !words.is_empty())
    {
        return Err(fields.error("system", with));
    }
    if let Some(first) = images.next() {
        return Err(ApiError::field(&*first.path, with));
    }
    with_suffix(Prompt::Text(prompt), suffix, app)
}

/// The prompt of `/api/generate`: as it is if it is to be raw or the model has no template, else
/// a message of the user, after `system`.
fn written(
    fields: &Fields<'_>,
    prompt: Option<Value>,
    images: impl Iterator<Item = Image>,
    arguments: Map<String, Value>,
    text: &Text,
) -> Result<Prompt, ApiError> {
    let Some(Value::String(prompt)) = prompt else {
        return Err(ApiError::field("prompt", "must be a string"));
    };
    let is_raw = fields.bool("raw")?.unwrap_or(false);
    let system = fields.string("system")?.filter(|words| !words.is_empty());
    if is_raw && system.is_some() {
        return Err(fields.error("system", "cannot be part of a prompt that is `raw`"));
    }
    let images: Vec<Image> = images.collect();
    if is_raw || text.template.is_none() && system.is_none() {
        if let Some(first) = images.first() {
            let message = "needs the model's template, which a `raw` prompt and a model without one leave out";
            return Err(ApiError::field(&*first.path, message));
        }
        return Ok(Prompt::Text(prompt));
    }
    let message = |role, words: String| Message {
        role,
        content: vec![Part::Text(words)],
        others: Map::new(),
    };
    let system = system.map(|words| message(Role::System, words.to_owned()));
    let mut asked = message(Role::User, prompt);
    show(&mut asked, images);
    let messages = system.into_iter().chain([asked]);
    Ok(Prompt::Conversation(Conversation {
        messages: messages.collect(),
        arguments,
        tools: None,
        end: None,
    }))
}

/// Takes the pictures out of `messages`: those of each.
fn pictures_of(messages: &mut Value) -> Result<Vec<Vec<Image>>, ApiError> {
    let list = messages.as_array_mut().into_iter().flatten().enumerate();
    let take = |(i, message): (usize, &mut Value)| {
        let images = message.as_object_mut().and_then(|m| m.remove("images"));
        let path = format!("messages[{i}].images");
        media::read_list(&path, images.unwrap_or_default())
    };
    list.map(take).collect()
}

/// Puts `images` before what `message` says, as Ollama does.
fn show(message: &mut Message, images: Vec<Image>) {
    message.content.splice(
        ..0,
        images
            .into_iter()
            .map(|image| Part::Media(Media::Picture(image))),
    );
}

/// Messages as OpenAI's API spells them. Results of tools that say nothing of their calls answer
/// them in order.
fn for_openai(mut messages: Value, text: &Text) -> Value {
    let reads_thinking = template_uses(text, "reasoning_content");
    let mut unanswered: VecDeque<String> = VecDeque::new();
    let list = messages.as_array_mut().into_iter().flatten();
    for (i, message) in list.enumerate() {
        let Some(message) = message.as_object_mut() else {
            continue;
        };
        if reads_thinking && let Some(thinking) = message.remove("thinking") {
            message.entry("reasoning_content").or_insert(thinking);
        }
        let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
        let calls = calls.into_iter().flatten().filter_map(Value::as_object_mut);
        for (j, call) in calls.enumerate() {
            if let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) {
                function.remove("index");
            }
            let id = call
                .entry("id")
                .or_insert_with(|| json!(format!("call_{i}_{j}")));
            unanswered.extend(id.as_str().map(str::to_owned));
        }
        if message.get("role").is_none_or(|role| role != "tool") {
            continue;
        }
        if let Some(name) = message.remove("tool_name") {
            message.entry("name").or_insert(name);
        }
        let id = message.get("tool_call_id").and_then(Value::as_str);
        match id.map(str::to_owned) {
            Some(id) => unanswered.retain(|waiting| *waiting != id),
            None => {
                if let Some(id) = unanswered.pop_front() {
                    message.insert("tool_call_id".into(), Value::String(id));
                }
            }
        }
    }
    messages
}
