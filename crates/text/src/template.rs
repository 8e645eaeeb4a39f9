//! Chat templates: messages → the text that the model was trained on.
//!
//! A template is a Jinja program from the checkpoint, so it is code from
//! outside. It runs in an interpreter without files, modules or Python
//! objects, on a budget of instructions, nesting and output. What it may call
//! is what `transformers` offers: `raise_exception`, `strftime_now`, and a
//! `tojson` that writes like Python.
//!
//! Whitespace rules (`trim_blocks`, `lstrip_blocks`) are those of
//! `transformers` too, since one stray line break is another prompt. Its
//! `{% generation %}` block, which marks training targets, is an empty scope
//! here.
//!
//! What one instruction costs is metered too (`cage`): a template that doubles
//! a string forty times ends with an error when its values have 8 MiB and
//! sixteen times the bytes of its input. The budgets are counts, never times, so that a slow machine
//! renders what a fast one renders.

mod cage;
mod cost;
mod meter;
mod nesting;

use std::borrow::Cow;
use std::io;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::value::{Kwargs, Rest};
use minijinja::{Environment, ErrorKind, Output, State, Value as Jinja};
use serde::Serialize;
use serde_json::{Map, Value, json};

use crate::error::{TextError, contain, within};
use crate::messages::{ContentForm, Reads, SystemPlace, normalize};
use crate::probe::probe;
use crate::python_json::{INDENT_MAX, PythonFormatter, Style, python_float};
use crate::stop::token_content;
use crate::strftime;

/// Longest template; the largest in use have 40 KB.
pub const TEMPLATE_BYTES_MAX: usize = 128 << 10;
/// Arithmetic characters (`+ - * / % ~`) of one template, in text or code.
///
/// Compiling a chain of operators takes time quadratic in its length: 64
/// thousand took 108 s, and this many take 2 s (unoptimized). Tags count too;
/// a template of 40 KB has about 3000.
pub const OPERATORS_MAX: usize = 8192;
/// Named templates of one checkpoint.
pub const TEMPLATES_MAX: usize = 16;
/// Longest rendered prompt.
pub const RENDERED_BYTES_MAX: usize = 8 << 20;
/// How far a prompt that is too long is rendered on, to say how long it is: twice the
/// longest conversation that the server reads.
const COUNTED_BYTES_MAX: usize = 64 << 20;
/// Instructions of one rendering: a tool schema of 512 KB or a conversation of
/// several thousand messages stays below a tenth of it.
pub const FUEL: u64 = 5_000_000;
/// Nested macro calls and blocks. Each takes native stack.
pub const RECURSION_MAX: usize = 64;

/// Stack of the thread that compiles or renders.
///
/// A stack overflow cannot be caught, so whatever recurses has a limit: chains of the
/// source (`nesting`), blocks and brackets (the compiler), macros ([`RECURSION_MAX`]) and
/// nested values (`meter`).
pub const STACK_BYTES: usize = 16 << 20;

/// Names that a request may not pass: what the server passes itself, and
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

const DEFAULT: &str = "default";
const TOOL_USE: &str = "tool_use";

/// A checkpoint's chat template, compiled.
#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    sources: Vec<(String, String)>,
    /// `bos_token` and its kind.
    tokens: Map<String, Value>,
    reads: Reads,
}

impl ChatTemplate {
    /// Compiles the template of a checkpoint: the text of `chat_template.jinja`
    /// if there is one, else `chat_template` in `tokenizer_config.json` (a
    /// string, or a list of `{name, template}`).
    ///
    /// # Errors
    ///
    /// [`TextError::NoTemplate`] if there is none, or the reason why it does
    /// not compile.
    pub fn new(jinja: Option<&str>, tokenizer_config: &Value) -> Result<Self, TextError> {
        let mut sources = Vec::new();
        match (jinja, &tokenizer_config["chat_template"]) {
            (Some(text), _) => sources.push((DEFAULT.to_owned(), text.to_owned())),
            (None, Value::String(text)) => sources.push((DEFAULT.to_owned(), text.clone())),
            (None, Value::Array(list)) => {
                within("chat templates", list.len(), TEMPLATES_MAX)?;
                for entry in list {
                    let (Some(name), Some(text)) =
                        (entry["name"].as_str(), entry["template"].as_str())
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
        if sources.is_empty() {
            return Err(TextError::NoTemplate);
        }
        let mut env = environment();
        for (name, source) in &sources {
            within("chat template bytes", source.len(), TEMPLATE_BYTES_MAX)?;
            let n_operators = source
                .bytes()
                .filter(|byte| b"+-*/%~".contains(byte))
                .count();
            within("chat template operators", n_operators, OPERATORS_MAX)?;
            let source = without_generation(source).into_owned();
            let (chain, n_elifs) = nesting::measure(&env, &source);
            within("chat template words in a chain", chain, nesting::CHAIN_MAX)?;
            within("chat template `elif` tags", n_elifs, nesting::ELIFS_MAX)?;
            let source = nesting::without_repeated_constants(&env, source);
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
        };
        template.reads = probe(&template);
        Ok(template)
    }

    /// Renders a conversation.
    ///
    /// `messages` and `tools` are as a client sends them; `extra` holds
    /// template arguments such as `enable_thinking`.
    ///
    /// # Errors
    ///
    /// If the messages have no shape that the template reads, it refuses them,
    /// it fails or it exceeds a limit.
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

    /// The source of the template that is used without tools.
    pub fn source(&self) -> &str {
        let source = self.sources.iter().find(|(name, _)| name == DEFAULT);
        &source.unwrap_or(&self.sources[0]).1
    }

    /// The sources of all templates of the checkpoint.
    pub(crate) fn sources(&self) -> impl Iterator<Item = &str> {
        self.sources.iter().map(|(_, source)| source.as_str())
    }

    /// What the template was found to read.
    pub fn reads(&self) -> &Reads {
        &self.reads
    }

    fn is_reserved(&self, name: &str) -> bool {
        RESERVED_ARGUMENTS.contains(&name) || self.tokens.contains_key(name)
    }

    /// Renders messages that are in the template's form already.
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
            let (text, result) = cage::render(&self.env, name, &context);
            within("rendered prompt bytes", text.len(), RENDERED_BYTES_MAX)?;
            result.map_err(|err| explain(&err))?;
            Ok(text)
        })
    }
}

/// An interpreter with the names that `transformers` gives to templates.
fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    env.set_syntax(syntax.expect("the default delimiters are valid"));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION_MAX);
    env.set_unknown_method_callback(method);
    env.set_formatter(print);
    cage::add_hooks(&mut env);
    env.add_filter("tojson", tojson);
    env.add_test("sequence", is_sequence);
    env.add_function(
        "raise_exception",
        |message: Cow<'_, str>| -> Result<Jinja, minijinja::Error> {
            Err(
                minijinja::Error::new(ErrorKind::InvalidOperation, "refused by the template")
                    .with_source(Raised(message.into_owned())),
            )
        },
    );
    env.add_function("strftime_now", |format: Cow<'_, str>| {
        if format.len() > strftime::FORMAT_BYTES_MAX {
            return Err(invalid("strftime_now: the format is too long"));
        }
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Ok(strftime::strftime(&format, now.as_secs() as i64))
    });
    env
}

/// Runs `work` on a thread of its own with [`STACK_BYTES`], panics contained.
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

/// What a template passed to `raise_exception`.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Raised(String);

fn invalid(reason: &'static str) -> minijinja::Error {
    minijinja::Error::new(ErrorKind::InvalidOperation, reason)
}

/// Prints as Python does; the interpreter's own floats know no exponent.
fn print(out: &mut Output, state: &mut State, value: &Jinja) -> Result<(), minijinja::Error> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        let x = f64::try_from(value.clone())?;
        return out
            .write_str(&python_float(x))
            .map_err(|_| ErrorKind::WriteFailure.into());
    }
    cage::write(out, state, value)
}

/// Jinja's `sequence` is whatever has a length and an index: strings and
/// mappings too.
fn is_sequence(value: &Jinja) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::String | ValueKind::Map
    )
}

/// Python methods that templates use and the interpreter lacks.
fn method(
    state: &mut State,
    value: &Jinja,
    name: &str,
    args: &[Jinja],
) -> Result<Jinja, minijinja::Error> {
    cage::method(state, value, name, args)?;
    if let (Some(text), [arg]) = (value.as_str(), args)
        && let Some(affix) = arg.as_str()
    {
        match name {
            "removeprefix" => return Ok(text.strip_prefix(affix).unwrap_or(text).into()),
            "removesuffix" => return Ok(text.strip_suffix(affix).unwrap_or(text).into()),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// `tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False)`
fn tojson(
    state: &mut State,
    value: &Jinja,
    args: Rest<Jinja>,
    kwargs: Kwargs,
) -> Result<Jinja, minijinja::Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if value.is_undefined() {
        return Err(invalid("tojson: the value is undefined"));
    }
    if args.len() > NAMES.len() {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let option = |i: usize| -> Result<Option<Jinja>, minijinja::Error> {
        let value: Option<Jinja> = match args.get(i) {
            Some(value) => Some(value.clone()),
            None => kwargs.get(NAMES[i])?,
        };
        Ok(value.filter(|value| !value.is_none()))
    };
    let indent = match option(1)? {
        None => None,
        Some(value) => match value.as_usize() {
            Some(indent) if indent <= INDENT_MAX => Some(indent),
            _ => return Err(invalid("tojson: unusable indent")),
        },
    };
    let mut style = Style::new(option(0)?.is_some_and(|value| value.is_true()), indent);
    if let Some(separators) = option(2)? {
        let pair: Vec<String> = separators
            .try_iter()?
            .map(|separator| separator.as_str().map(str::to_owned))
            .collect::<Option<_>>()
            .ok_or(invalid("tojson: separators must be strings"))?;
        let [item, key]: [String; 2] = pair
            .try_into()
            .map_err(|_| invalid("tojson: separators must be two"))?;
        (style.item_separator, style.key_separator) = (item, key);
    }
    let sort_keys = option(3)?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;

    cage::look(state, value)?;
    let mut out = Capped::new(RENDERED_BYTES_MAX, RENDERED_BYTES_MAX);
    let mut serializer =
        serde_json::Serializer::with_formatter(&mut out, PythonFormatter::new(&style));
    let result = if sort_keys {
        let mut json = serde_json::to_value(value).map_err(cannot_serialize)?;
        json.sort_all_objects();
        json.serialize(&mut serializer)
    } else {
        value.serialize(&mut serializer)
    };
    result.map_err(cannot_serialize)?;
    String::from_utf8(out.bytes)
        .map(Jinja::from)
        .map_err(|err| invalid("tojson: not text").with_source(err))
}

fn cannot_serialize(err: serde_json::Error) -> minijinja::Error {
    minijinja::Error::new(
        ErrorKind::BadSerialization,
        "tojson: cannot write this value",
    )
    .with_source(err)
}

/// Bytes up to a limit. More are counted up to another limit; beyond it, writing fails.
struct Capped {
    bytes: Vec<u8>,
    limit: usize,
    found: usize,
    found_max: usize,
}

impl Capped {
    fn new(limit: usize, found_max: usize) -> Self {
        Self {
            bytes: Vec::new(),
            limit,
            found: 0,
            found_max,
        }
    }
}

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.found = self.found.saturating_add(bytes.len());
        if self.found <= self.limit {
            self.bytes.extend_from_slice(bytes);
        } else if self.found > self.found_max {
            return Err(io::Error::other("output is over its limit"));
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Every `…_token` of a tokenizer configuration, as text.
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

/// Turns `{% generation %}` into `{% with %}`: the same scope, no meaning.
fn without_generation(source: &str) -> Cow<'_, str> {
    if !source.contains("generation") {
        return Cow::Borrowed(source);
    }
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        out.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let inside = &tag[..end];
        let word = inside
            .trim_start_matches(['-', '+'])
            .trim_end_matches(['-', '+'])
            .trim();
        let new = match word {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        out.push_str(&inside.replacen(word, new, 1));
        rest = &tag[end..];
    }
    out.push_str(rest);
    Cow::Owned(out)
}

/// Our error for one of the interpreter's.
fn explain(err: &minijinja::Error) -> TextError {
    if err.kind() == ErrorKind::OutOfFuel {
        return TextError::OutOfFuel { fuel: FUEL };
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(err);
    while let Some(inner) = cause {
        if let Some(Raised(message)) = inner.downcast_ref() {
            return TextError::Refused {
                message: message.chars().take(1000).collect(),
            };
        }
        if let Some(inner) = inner.downcast_ref::<minijinja::Error>()
            && inner.kind() == ErrorKind::OutOfFuel
        {
            return TextError::OutOfFuel { fuel: FUEL };
        }
        cause = inner.source();
    }
    let reason: String = match err.detail() {
        Some(detail) => format!("{}: {detail}", err.kind()),
        None => err.kind().to_string(),
    };
    TextError::Template {
        line: err.line().unwrap_or(0),
        reason: reason.chars().take(1000).collect(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::new(
            Some(source),
            &json!({"bos_token": "<bos>", "eos_token": null}),
        )
        .unwrap()
    }

    fn render(source: &str) -> Result<String, TextError> {
        template(source).render(
            &json!([{"role": "user", "content": "hi"}]),
            None,
            true,
            &Map::new(),
        )
    }

    #[test]
    fn endless_templates_run_out_of_fuel() {
        for bomb in [
            "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
            "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = j %}{% endfor %}{% endfor %}",
            "{% macro f() %}{% for i in range(9999) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(50) }}",
            "{% for a in messages recursive %}{{ loop(messages) }}{% endfor %}",
        ] {
            let started = Instant::now();
            let result = render(bomb);
            assert!(
                matches!(
                    result,
                    Err(TextError::OutOfFuel { .. } | TextError::Template { .. })
                ),
                "{bomb}: {result:?}"
            );
            // Three renderings (two of them probes) of an unoptimized build;
            // the limit only has to tell seconds from for ever.
            assert!(
                started.elapsed().as_secs() < 60,
                "{bomb}: {:?}",
                started.elapsed()
            );
        }
    }

    #[test]
    fn huge_values_are_refused() {
        for bomb in [
            "{% for i in range(1000000000) %}{% endfor %}",
            "{{ 'a' * 1000000000 }}",
            "{{ 'a' * 10000000 }}",
            "{{ range(90000) | list | tojson(indent=1000000) }}",
            "{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}",
            "{{ 2 ** 100000 }}",
        ] {
            let result = render(bomb);
            assert!(
                matches!(
                    result,
                    Err(TextError::TooLarge { .. } | TextError::Template { .. })
                ),
                "{bomb}: {:?}",
                result.map(|text| text.len())
            );
        }
        assert!(matches!(
            render("{% for i in range(90000) %}{{ 'a' * 1000 }}{% endfor %}"),
            Err(TextError::TooLarge {
                limit: RENDERED_BYTES_MAX,
                ..
            })
        ));
    }

    #[test]
    fn a_prompt_that_is_too_long_says_how_long() {
        let template = ChatTemplate::new(Some("<{{ messages[0].content }}>"), &Value::Null);
        let template = template.unwrap();
        let render = |n: usize| {
            let messages = json!([{"role": "user", "content": "a".repeat(n)}]);
            template.render(&messages, None, true, &Map::new())
        };
        assert_eq!(
            render(RENDERED_BYTES_MAX - 2).unwrap().len(),
            RENDERED_BYTES_MAX
        );
        assert_eq!(
            render(RENDERED_BYTES_MAX + 90).unwrap_err().to_string(),
            "8388700 rendered prompt bytes are too many: at most 8388608 are allowed"
        );
    }

    #[test]
    fn deep_nesting_ends_as_an_error() {
        assert!(matches!(
            render("{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}"),
            Err(TextError::Template { .. })
        ));
        let fill = |start: &str, link: &str, end: &str| {
            let n_operators = link.bytes().filter(|byte| b"+-*/%~".contains(byte)).count();
            let n = ((TEMPLATE_BYTES_MAX - 200) / link.len())
                .min((OPERATORS_MAX - 8) / n_operators.max(1));
            format!("{start}{}{end}", link.repeat(n))
        };
        for deep in ["(", "[", "not ", "-", "{1:", "f(", "a if ", "a[", "a|d("] {
            let source = fill("{{ ", deep, " }}");
            assert!(
                ChatTemplate::new(Some(&source), &Value::Null).is_err(),
                "{deep}"
            );
        }
        for link in [
            "{%if a%}",
            "{%for a in a%}",
            "{%macro a()%}",
            "{%filter a%}",
            "{%set a%}",
        ] {
            assert!(
                ChatTemplate::new(Some(&fill("", link, "")), &Value::Null).is_err(),
                "{link}"
            );
        }
        let many = format!("{{{{ 1{} }}}}", "+1".repeat(OPERATORS_MAX + 1));
        assert!(matches!(
            ChatTemplate::new(Some(&many), &Value::Null),
            Err(TextError::TooLarge {
                limit: OPERATORS_MAX,
                ..
            })
        ));
        // Chains are no nesting to the parser; they compile or fail, and end.
        for link in [
            "+1",
            "-1",
            "%1",
            ".b",
            "|d",
            "[0]",
            "()",
            "~a",
            " or a",
            " and a",
            " is a",
            "**1",
            "<1",
            " if a else a",
            " in a",
        ] {
            let _ = ChatTemplate::new(Some(&fill("{{ a", link, " }}")), &Value::Null);
        }
        let _ = ChatTemplate::new(
            Some(&fill("{%if a%}", "{%elif a%}", "{%endif%}")),
            &Value::Null,
        );
    }

    #[test]
    fn values_nested_without_end_are_refused() {
        for nest in ["[ns.x]", "{'a': ns.x}", "(ns.x,)", "namespace(x=ns.x)"] {
            for after in [
                "",
                "{{ ns.x }}",
                "{{ ns.x | tojson }}",
                "{{ ns.x | string | length }}",
                "{{ ns.x == ns.y }}",
            ] {
                let source = format!(
                    "{{% set ns = namespace(x=[], y=[]) %}}{{% for i in range(9000) %}}{{% for j in range(9) %}}\
                     {{% set ns.y = ns.x %}}{{% set ns.x = {nest} %}}{{% endfor %}}{{% endfor %}}{after}"
                );
                let _ = render(&source);
            }
        }
        for nest in ["[ns.x]", "{'a': ns.x}"] {
            let bomb = format!(
                "{{% set ns = namespace(x=[]) %}}{{% for i in range(99999) %}}{{% for j in range(99999) %}}\
                 {{% set ns.x = {nest} %}}{{% endfor %}}{{% endfor %}}"
            );
            assert!(matches!(
                render(&bomb),
                Err(TextError::Template { reason, .. }) if reason.contains("too deeply")
            ));
        }
    }

    #[test]
    fn a_long_conversation_stays_far_from_the_limits() {
        let source = "{%- for m in messages -%}{%- set t = m.content | trim -%}            {%- if m.role == 'user' and t is string -%}{{- '<u>' + t -}}{%- else -%}{{- '<a>' ~ t -}}{%- endif -%}{%- endfor -%}";
        let message = json!({"role": "user", "content": "x".repeat(500)});
        let messages = Value::Array(vec![message; 8000]);
        let text = template(source)
            .render(&messages, None, false, &Map::new())
            .unwrap();
        assert_eq!(text.len(), 8000 * 503);
    }

    #[test]
    fn nothing_can_be_included_or_reached() {
        for source in [
            "{% include '/etc/passwd' %}",
            "{% import '/etc/passwd' as x %}{{ x }}",
            "{% extends 'other' %}",
            "{{ ''.__class__.__mro__ }}",
            "{{ cycler.__init__.__globals__ }}",
        ] {
            let result = render(source);
            assert!(
                result.as_deref().unwrap_or_default().is_empty(),
                "{source}: {result:?}"
            );
        }
    }

    #[test]
    fn a_refusal_carries_the_templates_words() {
        assert!(matches!(
            render("{% macro f() %}{{ raise_exception('no ' ~ 'way') }}{% endmacro %}{{ f() }}"),
            Err(TextError::Refused { message }) if message == "no way"
        ));
    }

    #[test]
    fn errors_name_the_line() {
        assert!(matches!(
            render("a\nb\n{{ 1 + 'x' }}"),
            Err(TextError::Template { line: 3, .. })
        ));
        assert!(matches!(
            ChatTemplate::new(Some("a\n{% if %}"), &Value::Null),
            Err(TextError::Template { line: 2, .. })
        ));
    }

    #[test]
    fn requests_cannot_replace_the_template_or_its_tokens() {
        let template = template("{{ bos_token }}{{ mood }}");
        let render = |name: &str| {
            let extra = Map::from_iter([(name.to_owned(), json!("x"))]);
            template.render(&json!([]), None, true, &extra)
        };
        assert_eq!(render("mood").unwrap(), "<bos>x");
        for name in RESERVED_ARGUMENTS {
            assert!(
                matches!(render(name), Err(TextError::ReservedArgument { .. })),
                "{name}"
            );
        }
    }

    #[test]
    fn named_templates_are_chosen_by_tools() {
        let list = json!([{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]);
        let template = ChatTemplate::new(None, &json!({"chat_template": list})).unwrap();
        let render = |tools: Value| {
            template
                .render(&json!([]), Some(&tools), true, &Map::new())
                .unwrap()
        };
        assert_eq!(render(json!([{"type": "function"}])), "tools");
        assert_eq!(render(json!([])), "plain");
        assert_eq!(render(Value::Null), "plain");
        assert_eq!(template.source(), "plain");
        let one = ChatTemplate::new(None, &json!({"chat_template": "one"})).unwrap();
        assert_eq!(one.source(), "one");
        let file = ChatTemplate::new(Some("file"), &json!({"chat_template": "one"})).unwrap();
        assert_eq!(file.source(), "file");
        assert!(matches!(
            ChatTemplate::new(None, &json!({})),
            Err(TextError::NoTemplate)
        ));
        assert!(ChatTemplate::new(None, &json!({"chat_template": [1]})).is_err());
        let long = " ".repeat(TEMPLATE_BYTES_MAX + 1);
        assert!(ChatTemplate::new(Some(&long), &Value::Null).is_err());
    }

    #[test]
    fn the_form_of_content_is_found_out() {
        let form = |source: &str| template(source).reads().user;
        assert_eq!(
            form("{% for m in messages %}{{ m.content }}{% endfor %}"),
            ContentForm::Text
        );
        assert_eq!(
            form(
                "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}"
            ),
            ContentForm::Parts
        );
        assert_eq!(
            form(
                "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
            ),
            ContentForm::Either
        );
        assert_eq!(
            form("{% for m in messages %}{{ m.content | tojson }}{% endfor %}"),
            ContentForm::Text
        );
    }

    #[test]
    fn schemas_keep_the_order_of_their_keys() {
        let tools: Value = serde_json::from_str(r#"[{"z": 1, "a": {"y": 2, "b": 3}}]"#).unwrap();
        let text =
            template("{{ tools | tojson }}").render(&json!([]), Some(&tools), true, &Map::new());
        assert_eq!(text.unwrap(), r#"[{"z": 1, "a": {"y": 2, "b": 3}}]"#);
    }

    #[test]
    fn dates_can_be_asked_for() {
        let text = render("{{ strftime_now('%Y') }}").unwrap();
        assert!(text.parse::<u32>().is_ok_and(|year| year >= 2024), "{text}");
        assert!(render("{{ strftime_now('x' * 1000) }}").is_err());
    }

    #[test]
    fn generation_marks_are_scopes() {
        assert_eq!(
            without_generation(
                "{%- generation -%} {% set generation = 1 %} {%endgeneration%} {% broken"
            ),
            "{%- with -%} {% set generation = 1 %} {%endwith%} {% broken"
        );
    }

    proptest::proptest! {
        #[test]
        fn any_source_compiles_or_fails(source in "[ -~\n]{0,60}|(\\{%|%\\}|\\{\\{|\\}\\}|[a-z]{1,3}|[ '|.()\\[\\]0-9-]){0,24}") {
            if let Ok(template) = ChatTemplate::new(Some(&source), &Value::Null) {
                let _ = template.render(&json!([{"role": "user"}]), None, true, &Map::new());
            }
        }
    }
}
