//! Chat templates: messages → the prompt in the form that the model was trained on.
//!
//! A template is a Jinja program from the checkpoint, so it is code from
//! outside. It runs in a sandbox: an interpreter without files, modules or Python
//! objects, on a budget of instructions, nesting, memory and output. What it may call
//! is what `transformers` offers: `raise_exception`, `strftime_now`, and a
//! `tojson` that writes like Python.
//!
//! Whitespace rules (`trim_blocks`, `lstrip_blocks`) are those of
//! `transformers` too, since one stray line break is another prompt. Its
//! `{% generation %}` block, which marks training targets, is an empty scope
//! here.
//!
//! | room | what it does |
//! | --- | --- |
//! | `limits` | what a template may take |
//! | `source` | checks a source before it is compiled |
//! | `environment` | the interpreter, and the names that a template may call |
//! | `tojson` | JSON as Python writes it |
//! | `sandbox` | one rendering, with the cost of every instruction counted |
//! | `rewrite` | puts hooks around costly instructions of a compiled template |
//! | `hooks` | what these hooks check and count |
//! | `cost` | the cost of filters, tests and methods |
//! | `meter` | the budget of one rendering |
//! | `errors` | errors of the interpreter, and ours for them |

mod cost;
mod environment;
mod errors;
mod hooks;
mod limits;
mod meter;
mod rewrite;
mod sandbox;
mod source;
mod tojson;

use minijinja::Environment;
use serde_json::{Map, Value, json};

use crate::error::{TextError, contain, within};
use crate::messages::{ContentForm, Reads, SystemPlace, normalize};
use crate::probe::probe;
use crate::stop::token_content;

use environment::environment;
use errors::explain;

pub use limits::{
    FUEL, OPERATORS_MAX, RECURSION_MAX, RENDERED_BYTES_MAX, STACK_BYTES, TEMPLATE_BYTES_MAX,
    TEMPLATES_MAX,
};

/// Names of template arguments that a request may not set: those that the server sets, and
/// `chat_template`, which would be a program.
pub const RESERVED_ARGUMENTS: &[&str] = &[
    "add_generation_prompt",
    "bos_token",
    "chat_template",
    "eos_token",
    "messages",
    "raise_exception",
    "strftime_now",
    "tools",
];

/// The argument that turns reasoning on or off.
const ENABLE_THINKING: &str = "enable_thinking";

/// The name of the template that is used without tools.
const DEFAULT: &str = "default";
/// The name of the template that is used with tools, if the checkpoint has one.
const TOOL_USE: &str = "tool_use";

/// The compiled chat template of a checkpoint, or several under different names.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    /// The name and the source of each template.
    sources: Vec<(String, String)>,
    /// The arguments `bos_token`, `eos_token` and so on.
    tokens: Map<String, Value>,
    /// The form of messages that the template reads.
    reads: Reads,
    /// Whether a prompt that says nothing of `enable_thinking` has the model reason; `None` if
    /// the argument changes no prompt.
    reasons_unasked: Option<bool>,
}

impl ChatTemplate {
    /// Compiles the template of a checkpoint: the text of `chat_template.jinja`
    /// if there is one, else `chat_template` in `tokenizer_config.json` (a
    /// string, or a list of `{name, template}`).
    ///
    /// # Errors
    ///
    /// [`TextError::NoTemplate`] if the checkpoint has none; [`TextError::TooLarge`] or
    /// [`TextError::Template`] if one is over a limit or does not compile.
    pub fn new(jinja: Option<&str>, tokenizer_config: &Value) -> Result<Self, TextError> {
        let sources = sources(jinja, tokenizer_config)?;
        if sources.is_empty() {
            return Err(TextError::NoTemplate);
        }
        let mut env = environment();
        for (name, source) in &sources {
            let source = source::prepare(&env, source)?;
            on_a_deep_stack("the template compiler", || {
                env.add_template_owned(name.clone(), source)
                    .map_err(|err| explain(&err))
            })?;
        }
        let tokens = special_tokens(tokenizer_config);
        let mut template = Self {
            env,
            sources,
            tokens,
            reads: Reads::all(ContentForm::Either, SystemPlace::First),
            reasons_unasked: None,
        };
        template.reads = probe(|messages| template.run(messages, None, false, &Map::new()));
        template.reasons_unasked = template.reasons_unasked();
        Ok(template)
    }

    /// Renders a conversation to a prompt.
    ///
    /// `messages` and `tools` are as a client sends them; `add_generation_prompt` ends the
    /// prompt with the beginning of the model's turn; `extra` holds template arguments such
    /// as `enable_thinking`.
    ///
    /// # Errors
    ///
    /// If the messages have no shape that the template reads, if the template refuses them
    /// or fails, or if a limit is exceeded.
    pub fn render(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, TextError> {
        let messages = self.prepare(messages, extra)?;
        self.run(&messages, tools, add_generation_prompt, extra)
    }

    /// Brings `messages` to the form that the template reads, and checks the names of
    /// template arguments.
    ///
    /// # Errors
    ///
    /// If the messages have no shape that the template reads, or a name is reserved.
    pub(crate) fn prepare(
        &self,
        messages: &Value,
        extra: &Map<String, Value>,
    ) -> Result<Value, TextError> {
        if let Some(name) = extra.keys().find(|key| self.is_reserved(key)) {
            return Err(TextError::ReservedArgument {
                name: name.chars().take(64).collect(),
            });
        }
        normalize(messages, &self.reads)
    }

    /// Whether `extra` has the model answer without reasoning: `enable_thinking` is false, or is
    /// left out of a template that takes its absence for false.
    pub fn turns_reasoning_off(&self, extra: &Map<String, Value>) -> bool {
        let asked = extra.get(ENABLE_THINKING).and_then(Value::as_bool);
        self.reasons_unasked
            .is_some_and(|unasked| !asked.unwrap_or(unasked))
    }

    /// Finds [`reasons_unasked`](Self::reasons_unasked) by rendering a small conversation.
    fn reasons_unasked(&self) -> Option<bool> {
        let messages = normalize(&json!([{"role": "user", "content": "Hi"}]), &self.reads).ok()?;
        let prompt = |extra: Value| {
            let extra = extra.as_object()?;
            self.run(&messages, None, true, extra).ok()
        };
        let [on, off] = [true, false].map(|on| prompt(json!({ENABLE_THINKING: on})));
        match (prompt(json!({}))?, on?, off?) {
            (_, on, off) if on == off => None,
            (unasked, on, _) => Some(unasked == on),
        }
    }

    /// The source of the template that is used without tools.
    pub fn source(&self) -> &str {
        let source = self.sources.iter().find(|(name, _)| name == DEFAULT);
        &source.unwrap_or(&self.sources[0]).1
    }

    /// The sources of all templates of the checkpoint.
    pub(crate) fn sources(&self) -> impl Iterator<Item = &str> {
        self.sources.iter().map(|(_, source)| source.as_str())
    }

    /// The forms of messages that the template was found to read.
    pub fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Whether no request may set the template argument `name`.
    fn is_reserved(&self, name: &str) -> bool {
        RESERVED_ARGUMENTS.contains(&name) || self.tokens.contains_key(name)
    }

    /// Renders messages that [`prepare`](Self::prepare) has brought to the template's form.
    pub(crate) fn run(
        &self,
        messages: &Value,
        tools: Option<&Value>,
        add_generation_prompt: bool,
        extra: &Map<String, Value>,
    ) -> Result<String, TextError> {
        // An empty list means no tools; templates test only for presence.
        let tools = tools.filter(|tools| tools.as_array().is_none_or(|list| !list.is_empty()));
        let has = |name: &str| self.sources.iter().any(|(known, _)| known == name);
        let name = match tools {
            Some(tools) if !tools.is_null() && has(TOOL_USE) => TOOL_USE,
            _ if has(DEFAULT) => DEFAULT,
            _ => &self.sources[0].0,
        };
        let mut context = self.tokens.clone();
        context.extend(extra.clone());
        context.insert("messages".to_owned(), messages.clone());
        context.insert("tools".to_owned(), tools.cloned().unwrap_or(Value::Null));
        context.insert(
            "add_generation_prompt".to_owned(),
            json!(add_generation_prompt),
        );
        context.insert(
            "documents".to_owned(),
            extra.get("documents").cloned().unwrap_or_default(),
        );

        on_a_deep_stack("the chat template", || {
            let (text, result) = sandbox::render(&self.env, name, &context);
            within("rendered prompt bytes", text.len(), RENDERED_BYTES_MAX)?;
            result.map_err(|err| explain(&err))?;
            Ok(text)
        })
    }
}

/// The names and sources of a checkpoint's templates: `jinja` is `chat_template.jinja`, if
/// there is one.
fn sources(
    jinja: Option<&str>,
    tokenizer_config: &Value,
) -> Result<Vec<(String, String)>, TextError> {
    let mut sources = Vec::new();
    match (jinja, &tokenizer_config["chat_template"]) {
        (Some(text), _) => sources.push((DEFAULT.to_owned(), text.to_owned())),
        (None, Value::String(text)) => sources.push((DEFAULT.to_owned(), text.clone())),
        (None, Value::Array(list)) => {
            within("chat templates", list.len(), TEMPLATES_MAX)?;
            for entry in list {
                let (Some(name), Some(text)) = (entry["name"].as_str(), entry["template"].as_str())
                else {
                    return Err(TextError::BadField {
                        file: "tokenizer_config.json",
                        field: "chat_template",
                        reason: "expected a string or a list of {name, template}",
                    });
                };
                sources.push((name.to_owned(), text.to_owned()));
            }
        }
        _ => {}
    }
    Ok(sources)
}

/// Runs `work` on a thread of its own with a stack of [`STACK_BYTES`]; a panic becomes an
/// error. `what` names the work.
fn on_a_deep_stack<T: Send>(
    what: &'static str,
    work: impl FnOnce() -> Result<T, TextError> + Send,
) -> Result<T, TextError> {
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .name("template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || contain(what, work))
            .map_err(|source| TextError::NoThread { source })?
            .join()
            .unwrap_or(Err(TextError::Panicked { what }))
    })
}

/// The template arguments that name special tokens: every `…_token` of a tokenizer
/// configuration, as text.
fn special_tokens(config: &Value) -> Map<String, Value> {
    let named = config.as_object().into_iter().flatten();
    let extra = config["extra_special_tokens"]
        .as_object()
        .into_iter()
        .flatten();
    named
        .chain(extra)
        .filter(|(name, _)| name.ends_with("_token"))
        .filter_map(|(name, token)| Some((name.clone(), json!(token_content(token)?))))
        .collect()
}

#[cfg(test)]
mod tests;
