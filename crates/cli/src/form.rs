//! `--format`, `--schema`, `--grammar` and `--regex` → what constrains a reply.

use crate::args::{FormArgs, TextForm};
use anyhow::{Context, Result, anyhow, bail};
use engine::{Engine, Grammar, GrammarSpec, Request};
use serde_json::{Map, Value};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Largest schema or grammar, as in the API.
const SOURCE_BYTES_MAX: u64 = 1 << 20;

/// What the replies of a command have to follow.
pub(crate) struct Constraint {
    grammar: Grammar,
    /// Whether the model answers without reasoning first.
    is_without_reasoning: bool,
}

impl Constraint {
    /// Compiles `form`, for replies to prompts that the chat template writes with `arguments`.
    ///
    /// # Errors
    ///
    /// If something in the schema or grammar is wrong, or cannot be enforced.
    pub(crate) fn new(
        engine: &Engine,
        form: Form,
        arguments: Option<&Map<String, Value>>,
    ) -> Result<Self> {
        let Form { option, spec } = form;
        let grammar = engine.compile(&spec);
        let grammar =
            grammar.map_err(|error| anyhow!("the model cannot follow {option}: {error}"))?;
        let none = Map::new();
        let template = engine.text().template.as_ref();
        let is_without_reasoning = template
            .is_some_and(|template| template.turns_reasoning_off(arguments.unwrap_or(&none)));
        Ok(Constraint {
            grammar,
            is_without_reasoning,
        })
    }

    /// Has the reply to `request` follow this.
    pub(crate) fn hold(&self, request: &mut Request) {
        request.grammar = Some(self.grammar.clone());
        if self.is_without_reasoning {
            request.reasoning_budget = Some(0);
        }
    }
}

/// A form that an option asks for.
pub(crate) struct Form {
    option: &'static str,
    spec: GrammarSpec,
}

/// The form that `args` ask for; `None` for any text.
///
/// # Errors
///
/// If two options disagree, or a file cannot be read or has no JSON where a schema should be.
pub(crate) fn read(args: &FormArgs) -> Result<Option<Form>> {
    let form = |option, spec| Ok(Some(Form { option, spec }));
    if let Some(pattern) = &args.regex {
        return form("--regex", GrammarSpec::Regex(pattern.clone()));
    }
    if let Some(path) = &args.grammar {
        let source = source(path)?;
        let is_lark = path
            .extension()
            .is_some_and(|extension| extension == "lark");
        let spec = match is_lark {
            true => GrammarSpec::Lark(source),
            false => GrammarSpec::Gbnf(source),
        };
        return form("--grammar", spec);
    }
    match (&args.schema, args.format) {
        (Some(_), Some(TextForm::Text)) => {
            bail!("--schema asks for JSON and --format for text: leave one of them out")
        }
        (Some(schema), _) => form("--schema", GrammarSpec::JsonSchema(json(schema)?)),
        (None, Some(TextForm::Json)) => form("--format json", GrammarSpec::JsonObject),
        (None, Some(TextForm::Text) | None) => Ok(None),
    }
}

/// The schema in a file, or the one that stands in the option itself.
fn json(schema: &str) -> Result<Value> {
    if schema.trim_start().starts_with('{') {
        return serde_json::from_str(schema).context("--schema is not JSON");
    }
    let source = source(Path::new(schema))?;
    serde_json::from_str(&source).with_context(|| format!("there is no JSON in `{schema}`"))
}

/// The text of a file.
fn source(path: &Path) -> Result<String> {
    let cannot = || format!("cannot read `{}`", path.display());
    let mut text = String::new();
    let file = File::open(path).with_context(cannot)?;
    file.take(SOURCE_BYTES_MAX + 1)
        .read_to_string(&mut text)
        .with_context(cannot)?;
    if text.len() as u64 > SOURCE_BYTES_MAX {
        bail!(
            "a schema or grammar has at most {SOURCE_BYTES_MAX} bytes, there are more in `{}`",
            path.display()
        );
    }
    Ok(text)
}
