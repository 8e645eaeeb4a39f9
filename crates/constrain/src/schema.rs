//! JSON Schemas, checked and rewritten so that the grammar engine enforces them exactly.
//!
//! The engine compiles schemas itself, but ignores keywords that it does not know, and reads a
//! few differently from the specification. So a schema is rewritten here into the part that it
//! reads exactly, and whatever has no exact form is an error that names the keyword and its
//! place. Drafts 6 to 2020-12 are read alike.
//!
//! **A text that follows the grammar is valid under the schema.** The reverse has exceptions,
//! as a grammar writes *one* way of saying a value:
//!
//! - Properties come in the order of `properties`, then those of `required` that it does not
//!   list, then others.
//! - White space is at most one space after each `,` and `:`, and none elsewhere: compact JSON
//!   as programs and models write it. So no text is blank for ever, and names and punctuation
//!   are forced, which makes them free to draft.
//! - A character in a string is escaped only where JSON demands it, as `\"`, `\\`, `\b`, `\f`,
//!   `\n`, `\r` or `\t`; other control characters cannot be written. So each string has one
//!   spelling, and no property can be named twice by two spellings.
//! - Numbers with bounds or `multipleOf` have no exponent, integers no fraction, and multiples
//!   of a fraction all of its digits (`0.50` for `multipleOf: 0.25`). Integers in `const`,
//!   `enum` and bounds have at most 53 bits.
//! - Formats are the strict forms of their standards; see [`formats`].
//! - Beside `$ref` other keywords count, also in drafts where they did not.

pub mod formats;
mod keywords;
mod overlap;
mod references;

use std::collections::HashMap;

use serde_json::{Map, Value, json};

use crate::{Error, Limits};

/// What stands between two items of a list or two properties, a regular expression.
const BETWEEN_ITEMS: &str = r",\x20?";
/// What stands between the name and the value of a property, a regular expression.
const AFTER_NAME: &str = r":\x20?";
/// Characters that may follow a backslash in a string.
const ESCAPES: &str = "nrbtf\\\"";

/// Rewrites `schema` for the grammar engine.
///
/// # Errors
///
/// [`Error::UnsupportedKeyword`], [`Error::InvalidSchema`], [`Error::Unsatisfiable`] or
/// [`Error::TooLarge`].
pub(crate) fn normalize(schema: &Value, limits: &Limits) -> Result<Value, Error> {
    let mut normalizer = Normalizer {
        root: schema,
        limits,
        targets: Vec::new(),
        numbers: HashMap::new(),
        n_nodes: 0,
        work: 0,
    };
    let root = normalizer.subschema(schema, "#", limits.depth)?;
    let mut definitions = Map::new();
    let mut done = 0;
    while let Some(pointer) = normalizer.targets.get(done).cloned() {
        let target = references::resolve(schema, &pointer).ok_or_else(|| unresolved(&pointer))?;
        let target = normalizer.subschema(target, &pointer, limits.depth)?;
        definitions.insert(done.to_string(), target);
        done += 1;
    }
    references::check(&root, &mut definitions, limits)?;
    let mut root = match root {
        Value::Object(root) => root,
        Value::Bool(true) => Map::new(),
        _ => {
            return Err(Error::Unsatisfiable {
                what: "JSON schema",
                reason: "it is `false`".to_owned(),
            });
        }
    };
    root.insert("$defs".to_owned(), Value::Object(definitions));
    root.insert(
        "x-guidance".to_owned(),
        json!({
            "item_separator": BETWEEN_ITEMS,
            "key_separator": AFTER_NAME,
            "whitespace_flexible": false,
            "json_allowed_escapes": ESCAPES,
        }),
    );
    Ok(Value::Object(root))
}

/// The error for a `$ref` that leads nowhere.
fn unresolved(pointer: &str) -> Error {
    Error::InvalidSchema {
        reason: "a `$ref` leads to nothing here".to_owned(),
        pointer: pointer.to_owned(),
    }
}

/// A schema while it is rewritten.
struct Normalizer<'a> {
    root: &'a Value,
    limits: &'a Limits,
    /// Pointers of the subschemas that a `$ref` leads to, in the order in which they were met.
    /// The subschemas become `#/$defs/0` and so on.
    targets: Vec<String>,
    /// The number of each pointer in `targets`.
    numbers: HashMap<String, usize>,
    n_nodes: usize,
    /// The squares of the numbers of properties of the objects so far, added up: what the engine
    /// needs to compile them grows so.
    work: u64,
}

/// Most of [`Normalizer::work`], about half a second. One object can have 1,000 properties.
const WORK_MAX: u64 = 1_000_000;

impl Normalizer<'_> {
    /// Counts a node of the schema.
    fn count(&mut self) -> Result<(), Error> {
        self.n_nodes += 1;
        match self.n_nodes <= self.limits.schema_nodes {
            true => Ok(()),
            false => Err(Error::TooLarge {
                what: "number of subschemas, properties and enum entries",
                limit: self.limits.schema_nodes as u64,
            }),
        }
    }

    /// Counts an object with `n` properties.
    fn count_properties(&mut self, n: usize) -> Result<(), Error> {
        self.work += (n as u64).saturating_mul(n as u64);
        match self.work <= WORK_MAX {
            true => Ok(()),
            false => Err(Error::TooLarge {
                what: "sum of the squares of the numbers of properties",
                limit: WORK_MAX,
            }),
        }
    }

    /// Rewrites the subschema at `pointer`.
    fn subschema(&mut self, schema: &Value, pointer: &str, depth: usize) -> Result<Value, Error> {
        self.count()?;
        let Some(depth) = depth.checked_sub(1) else {
            return Err(Error::TooLarge {
                what: "nesting of the schema in levels",
                limit: self.limits.depth as u64,
            });
        };
        match schema {
            Value::Bool(_) => Ok(schema.clone()),
            Value::Object(schema) => keywords::Rewrite::new(self, schema, pointer, depth).run(),
            _ => Err(Error::InvalidSchema {
                reason: "a schema is an object or a boolean".to_owned(),
                pointer: pointer.to_owned(),
            }),
        }
    }

    /// The `$ref` of the rewritten schema that leads where `reference` leads in the original.
    fn reference(&mut self, reference: &str, pointer: &str) -> Result<String, Error> {
        let target =
            references::pointer(self.root, reference).ok_or_else(|| Error::UnsupportedKeyword {
                keyword: "$ref".to_owned(),
                reason: "it must lead to `#`, `#/…` or an `$anchor` of this schema".to_owned(),
                pointer: pointer.to_owned(),
            })?;
        if references::resolve(self.root, &target).is_none() {
            return Err(unresolved(pointer));
        }
        let next = self.targets.len();
        let number = *self.numbers.entry(target.clone()).or_insert(next);
        if number == next {
            self.targets.push(target);
        }
        Ok(format!("#/$defs/{number}"))
    }
}
