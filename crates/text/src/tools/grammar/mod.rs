//! Grammars of calls: what a model may write where a call must come, or must fit its schema.
//!
//! A grammar is a text in llguidance's variant of the Lark language, with control tokens as
//! `<[ID]>` and JSON values as `@NAME`, each under a schema that stands beside it. This module
//! writes them; it compiles none.
//!
//! **What a grammar accepts, [`ToolCalls`](super::ToolCalls) reads back as calls whose arguments
//! are valid under the schemas.** The reverse has exceptions: properties come in one order, only
//! those that a schema names, and a string in Qwen's form has no `</parameter>`. A keyword that
//! has no exact form in the model's way of writing is an error that names it.

mod gemma;
mod qwen;

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use super::schema::Types;
use super::{ToolFormat, ToolMark};

/// Keywords that say nothing of what a value may be, or that only allow more than a grammar
/// writes.
const QUIET: &[&str] = &[
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "nullable",
    "additionalProperties",
    "unevaluatedProperties",
    "$schema",
    "$id",
    "$comment",
    "$defs",
    "definitions",
];

/// What a grammar makes a model write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want<'a> {
    /// Calls and nothing else, at least one.
    Required,
    /// One call of the tool of this name and nothing else.
    Named(&'a str),
    /// Text, and calls where the model likes. Those of the tools that are marked here, in the
    /// order of the tools, fit their schemas.
    Strict(&'a [bool]),
}

/// A grammar, and the schemas of the JSON values in it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CallGrammar {
    /// The grammar, beginning at `start`.
    pub lark: String,
    /// Schemas by name; `@NAME` in the grammar is a JSON value under one.
    pub schemas: Vec<(String, Value)>,
}

/// Why calls of a tool cannot be forced into its schema.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{keyword}` is not supported in the arguments of this model's calls: {reason} (tool `{tool}`, at `{pointer}`)"
)]
pub struct Unsupported {
    /// The keyword.
    pub keyword: String,
    /// What is wrong with it.
    pub reason: &'static str,
    /// The name of the tool.
    pub tool: String,
    /// Where in the tool's `parameters` it stands, as a JSON pointer.
    pub pointer: String,
}

/// Writes the grammar of calls in `format` of `tools`, a list of
/// `{"type": "function", "function": {name, parameters}}`, with `calls_max` calls at most.
///
/// # Errors
///
/// [`Unsupported`] names the first keyword that has no form.
pub fn grammar(
    format: &ToolFormat,
    tools: &Value,
    want: Want<'_>,
    calls_max: Option<usize>,
) -> Result<CallGrammar, Unsupported> {
    let mut writer = Writer {
        format: *format,
        tool: String::new(),
        root: Value::Null,
        out: CallGrammar::default(),
        n_rules: 0,
        n_schemas: 0,
        n_bytes: 0,
    };
    let list = tools.as_array().map(Vec::as_slice).unwrap_or_default();
    let mut calls = Vec::new();
    for (i, tool) in list.iter().enumerate() {
        let function = tool.get("function").unwrap_or(tool);
        let name = function["name"].as_str().unwrap_or_default();
        let is_strict = match want {
            Want::Required => true,
            Want::Named(named) if named != name => continue,
            Want::Named(_) => true,
            Want::Strict(strict) => strict.get(i).copied().unwrap_or(false),
        };
        let parameters = function.get("parameters").unwrap_or(&Value::Null);
        calls.push(writer.call(name, parameters, want, is_strict)?);
    }
    writer.start(&calls, want, calls_max);
    Ok(writer.out)
}

/// Writes one grammar.
struct Writer {
    format: ToolFormat,
    /// The tool that is being written, and its parameters.
    tool: String,
    root: Value,
    out: CallGrammar,
    n_rules: usize,
    n_schemas: usize,
    /// Bytes of all schemas.
    n_bytes: usize,
}

impl Writer {
    /// Writes the rule `start`, over the rules of all calls.
    fn start(&mut self, calls: &[String], want: Want<'_>, calls_max: Option<usize>) {
        let call = format!("({})", calls.join(" | "));
        let most = match want {
            Want::Named(_) => Some(1),
            _ => calls_max,
        };
        let between = match self.format.name() {
            "gemma4" => String::new(),
            _ => literal("\n"),
        };
        let start = match (want, most) {
            (Want::Strict(_), most) if self.format.id(ToolMark::Open).is_none() => {
                // A text goes on until a mark that ends it, so the mark is part of it.
                let open = regex(self.format.spelling(ToolMark::Open).unwrap_or_default());
                let opened = self.until(&open);
                let last = self.terminal(&format!("/(?s:.+)/ & ~/(?s:.*){open}(?s:.*)/"));
                match most {
                    Some(1) => format!("{opened} {call} | {last}?"),
                    Some(n) => format!("({opened} {call}){{0,{}}} {last}?", n.max(1)),
                    None => format!("({opened} {call})* {last}?"),
                }
            }
            (Want::Strict(_), most) => {
                let text = self.terminal("/(?s:.+)/");
                match most {
                    Some(1) => format!("{text}? {call}?"),
                    Some(n) => format!("({text}? {call}){{0,{}}} {text}?", n.max(1)),
                    None => format!("({text}? {call})* {text}?"),
                }
            }
            (_, Some(0 | 1)) => call,
            (_, Some(n)) => format!("{call} ({between} {call}){{0,{}}}", n - 1),
            (_, None) => format!("{call} ({between} {call})*"),
        };
        let lark = std::mem::take(&mut self.out.lark);
        self.out.lark = format!("start: {start}\n{lark}");
    }

    /// Writes the rule of a text that ends at the first `mark`, a regular expression; its name.
    fn until(&mut self, mark: &str) -> String {
        self.n_rules += 1;
        let name = format!("r{}", self.n_rules);
        let _ = writeln!(self.out.lark, "{name}[lazy]: /(?s:.*){mark}/");
        name
    }

    /// Writes the rule of a call of the tool `name`; its name.
    fn call(
        &mut self,
        name: &str,
        parameters: &Value,
        want: Want<'_>,
        is_strict: bool,
    ) -> Result<String, Unsupported> {
        self.tool = name.to_owned();
        self.root = match parameters {
            Value::Object(_) => parameters.clone(),
            _ => json!({"type": "object", "properties": {}, "additionalProperties": false}),
        };
        let open = match (want, self.format.id(ToolMark::Open)) {
            // The text before the call ends with the mark.
            (Want::Strict(_), None) => String::new(),
            _ => self.mark(ToolMark::Open),
        };
        let close = self.mark(ToolMark::Close);
        let root = self.root.clone();
        let (head, body) = match self.format.name() {
            "gemma4" => {
                let body = match is_strict {
                    true => format!("{} {close}", self.gemma(&root)?),
                    false => format!("{} {}", literal("{"), self.loose()),
                };
                (format!("call:{name}"), body)
            }
            "qwen3.5" => {
                let end = literal("</function>\n");
                let body = match is_strict {
                    true => format!("{} {end} {close}", self.qwen(&root)?),
                    false => self.loose(),
                };
                (format!("\n<function={name}>\n"), body)
            }
            _ => {
                let schema = match is_strict {
                    true => root,
                    false => json!({"type": "object"}),
                };
                let body = format!("{} {} {close}", self.schema(schema, "")?, literal("}\n"));
                let name = Value::from(name);
                (format!("\n{{\"name\": {name}, \"arguments\": "), body)
            }
        };
        Ok(self.rule(&format!("{open} {} {body}", literal(&head))))
    }

    /// Anything up to the closing mark, and the mark.
    fn loose(&mut self) -> String {
        let Some(close) = self.format.id(ToolMark::Close) else {
            let close = regex(self.format.spelling(ToolMark::Close).unwrap_or_default());
            return self.until(&close);
        };
        let text = self.terminal("/(?s:.+)/");
        match self.format.id(ToolMark::Quote) {
            Some(quote) => format!("({text} | <[{quote}]>)* <[{close}]>"),
            None => format!("{text}? <[{close}]>"),
        }
    }

    /// A mark, as a token or as text.
    fn mark(&self, mark: ToolMark) -> String {
        match self.format.id(mark) {
            Some(id) => format!("<[{id}]>"),
            None => literal(self.format.spelling(mark).unwrap_or_default()),
        }
    }

    /// Writes a rule; its name.
    fn rule(&mut self, body: &str) -> String {
        self.n_rules += 1;
        let name = format!("r{}", self.n_rules);
        // Writing to a string does not fail.
        let _ = writeln!(self.out.lark, "{name}: {body}");
        name
    }

    /// Writes a terminal; its name.
    fn terminal(&mut self, body: &str) -> String {
        self.n_rules += 1;
        let name = format!("T{}", self.n_rules);
        let _ = writeln!(self.out.lark, "{name}: {body}");
        name
    }

    /// A JSON value under `schema`, the part at `at` of the tool's parameters.
    fn schema(&mut self, mut schema: Value, at: &str) -> Result<String, Unsupported> {
        if has_reference(&schema)
            && let Some(map) = schema.as_object_mut()
        {
            for name in ["$defs", "definitions"] {
                if let Some(definitions) = self.root.get(name) {
                    map.entry(name).or_insert_with(|| definitions.clone());
                }
            }
        }
        self.n_bytes += schema.to_string().len();
        if self.n_bytes > SCHEMA_BYTES_MAX {
            return Err(self.unsupported("$ref", at, "the tools' schemas become too large"));
        }
        let name = format!("s{}", self.n_schemas);
        self.n_schemas += 1;
        self.out.schemas.push((name.clone(), schema));
        Ok(format!("@{name}"))
    }

    /// The schema that `schema` stands for: where a `$ref` leads, or the only one of `allOf`.
    /// The number of steps is limited, so that a `$ref` to itself is an error.
    fn resolved(&self, schema: &Value, at: &str) -> Result<Map<String, Value>, Unsupported> {
        let mut schema = schema;
        for _ in 0..32 {
            let map = match schema {
                Value::Object(map) => map,
                Value::Bool(true) => return Ok(Map::new()),
                _ => return Err(self.unsupported("false", at, "nothing is valid under it")),
            };
            let loud = |name: &str| !QUIET.contains(&name);
            let alone = map.keys().filter(|key| loud(key)).count() == 1;
            let target = match (map.get("$ref"), map.get("allOf")) {
                (Some(path), _) if alone => {
                    let path = path.as_str().and_then(|path| path.strip_prefix('#'));
                    let target = path.and_then(|path| self.root.pointer(path));
                    target.ok_or_else(|| {
                        self.unsupported("$ref", at, "it must lead to a part of `parameters`")
                    })?
                }
                (None, Some(Value::Array(list))) if alone && list.len() == 1 => &list[0],
                (None, None) => return Ok(map.clone()),
                (Some(_), _) => {
                    return Err(self.unsupported("$ref", at, "other keywords stand beside it"));
                }
                (None, Some(_)) => {
                    return Err(self.unsupported("allOf", at, "it must have one schema, alone"));
                }
            };
            schema = target;
        }
        Err(self.unsupported("$ref", at, "it leads back to itself"))
    }

    /// Refuses keywords of `schema` beside the `known` ones.
    fn only(
        &self,
        schema: &Map<String, Value>,
        known: &[&str],
        at: &str,
    ) -> Result<(), Unsupported> {
        let unknown =
            |key: &&String| !known.contains(&key.as_str()) && !QUIET.contains(&key.as_str());
        match schema.keys().find(unknown) {
            None => Ok(()),
            Some(key) => Err(self.unsupported(key, at, "it has no form here")),
        }
    }

    /// The values of `enum` or `const` in `schema` that are of its type; `None` if it has
    /// neither.
    fn listed(
        &self,
        schema: &Map<String, Value>,
        at: &str,
    ) -> Result<Option<Vec<Value>>, Unsupported> {
        let (key, values) = match (schema.get("enum"), schema.get("const")) {
            (Some(Value::Array(values)), _) => ("enum", values.clone()),
            (Some(_), _) => return Err(self.unsupported("enum", at, "it must be a list")),
            (None, Some(value)) => ("const", vec![value.clone()]),
            (None, None) => return Ok(None),
        };
        self.only(schema, &["type", key], at)?;
        let is_of = |value: &Value, name: &str| match name {
            "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
            name => Types::of(value).within(Types::named(name)),
        };
        let is_typed = |value: &Value| match schema.get("type") {
            Some(Value::String(name)) => is_of(value, name),
            Some(Value::Array(names)) => {
                let mut names = names.iter().filter_map(Value::as_str);
                names.any(|name| is_of(value, name))
            }
            _ => true,
        };
        let values: Vec<Value> = values.into_iter().filter(is_typed).collect();
        match values.is_empty() {
            true => Err(self.unsupported(key, at, "it has no value of the type")),
            false => Ok(Some(values)),
        }
    }

    fn unsupported(&self, keyword: &str, at: &str, reason: &'static str) -> Unsupported {
        Unsupported {
            keyword: keyword.to_owned(),
            reason,
            tool: self.tool.clone(),
            pointer: at.to_owned(),
        }
    }

    /// The whole number that is the keyword `name` of `schema`.
    fn count(
        &self,
        schema: &Map<String, Value>,
        name: &str,
        at: &str,
    ) -> Result<Option<u64>, Unsupported> {
        match schema.get(name) {
            None => Ok(None),
            Some(value) => match value.as_u64().filter(|&n| n <= COUNT_MAX) {
                Some(n) => Ok(Some(n)),
                None => Err(self.unsupported(name, at, "it must be a whole number up to 10,000")),
            },
        }
    }

    /// The properties of `schema`, an object, each with whether it must be there.
    fn properties(
        &self,
        schema: &Map<String, Value>,
        at: &str,
    ) -> Result<Vec<(String, Value, bool)>, Unsupported> {
        self.only(schema, &["type", "properties", "required"], at)?;
        let none = Map::new();
        let properties = match schema.get("properties") {
            None => &none,
            Some(Value::Object(properties)) => properties,
            Some(_) => return Err(self.unsupported("properties", at, "it must be an object")),
        };
        let required = schema.get("required").and_then(Value::as_array);
        let required: Vec<&str> = required
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        if required.iter().any(|name| !properties.contains_key(*name)) {
            let reason = "it has a name that `properties` does not have";
            return Err(self.unsupported("required", at, reason));
        }
        let all = properties.iter();
        let all = all.map(|(key, schema)| (key, schema, required.contains(&key.as_str())));
        Ok(all
            .map(|(key, schema, is)| (key.clone(), schema.clone(), is))
            .collect())
    }
}

/// Rules and terminals of one grammar, at most. A schema may mention another one many times, and
/// that one a third.
const RULES_MAX: usize = 20_000;
/// Bytes of the schemas of one grammar as JSON, at most.
const SCHEMA_BYTES_MAX: usize = 1 << 20;

/// Whether there is a `$ref` in `schema`.
fn has_reference(schema: &Value) -> bool {
    match schema {
        Value::Object(map) => map.contains_key("$ref") || map.values().any(has_reference),
        Value::Array(list) => list.iter().any(has_reference),
        _ => false,
    }
}

/// Largest count in a schema: of characters, or of items.
const COUNT_MAX: u64 = 10_000;

/// `text` as a Lark string.
fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// A regular expression that matches `text`, as it stands between slashes.
fn regex(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            c if c.is_ascii_alphanumeric() || !c.is_ascii() || c == ' ' || c == '<' || c == '>' => {
                out.push(c);
            }
            c if c.is_ascii_punctuation() => {
                out.push('\\');
                out.push(c);
            }
            c => {
                let _ = write!(out, "\\x{{{:x}}}", c as u32);
            }
        }
    }
    out
}

/// A repetition count of a regular expression: `{least,most}`.
fn times(least: Option<u64>, most: Option<u64>) -> String {
    match (least.unwrap_or(0), most) {
        (0, None) => "*".to_owned(),
        (least, None) => format!("{{{least},}}"),
        (least, Some(most)) => format!("{{{least},{most}}}"),
    }
}
