//! Arguments in Gemma's form: bare names, strings between quote tokens, numbers as in JSON.

use serde_json::{Map, Value, json};

use super::super::gemma::is_bare;
use super::super::schema::Types;
use super::super::{DEPTH_MAX, ToolMark};
use super::{RULES_MAX, Unsupported, Writer, literal, times};

/// Deepest nesting of a schema; a `$ref` that leads back to itself ends here.
const SCHEMA_DEPTH_MAX: usize = DEPTH_MAX / 4;

impl Writer {
    /// The arguments of a call.
    pub(super) fn gemma(&mut self, root: &Value) -> Result<String, Unsupported> {
        let schema = self.resolved(root, "")?;
        self.object(&schema, "", 0)
    }

    /// An object. Properties are in the order in which templates sort them.
    fn object(
        &mut self,
        schema: &Map<String, Value>,
        at: &str,
        depth: usize,
    ) -> Result<String, Unsupported> {
        let mut properties = self.properties(schema, at)?;
        properties.sort_by_key(|(key, ..)| key.to_lowercase());
        // Rules from the last property to the first: what may follow one, and what may come
        // first.
        let (mut rest, mut first) = (String::new(), literal("}"));
        rest.push_str(&first);
        for (key, schema, is_required) in properties.into_iter().rev() {
            let at = format!("{at}/properties/{key}");
            let fits = key.chars().all(|c| is_bare(c) && !c.is_control());
            if key.is_empty() || key.trim() != key || !fits {
                let reason = "a name cannot be empty or have brackets, quotes, colons or commas";
                return Err(self.unsupported("properties", &at, reason));
            }
            let value = self.gemma_value(&schema, &at, depth + 1)?;
            let own = self.rule(&format!("{} {value}", literal(&format!("{key}:"))));
            let after = self.rule(&rest);
            let (next, begin) = match is_required {
                true => (format!("\",\" {own} {after}"), format!("{own} {after}")),
                false => (
                    format!("\",\" {own} {after} | {after}"),
                    format!("{own} {after} | {first}"),
                ),
            };
            rest = next;
            first = self.rule(&begin);
        }
        Ok(self.rule(&format!("{} {first}", literal("{"))))
    }

    /// A value.
    fn gemma_value(
        &mut self,
        schema: &Value,
        at: &str,
        depth: usize,
    ) -> Result<String, Unsupported> {
        if depth > SCHEMA_DEPTH_MAX {
            return Err(self.unsupported("$ref", at, "it leads back to itself, or nests too deep"));
        }
        if self.n_rules > RULES_MAX {
            return Err(self.unsupported("properties", at, "the tools' schemas become too large"));
        }
        let own = self.resolved(schema, at)?;
        if let Some(values) = self.listed(&own, at)? {
            return self.one_of(&values, at);
        }
        for key in ["anyOf", "oneOf"] {
            let Some(list) = own.get(key).and_then(Value::as_array) else {
                continue;
            };
            self.only(&own, &[key], at)?;
            let mut seen = Types::NONE;
            let mut all = Vec::new();
            for (i, branch) in list.iter().enumerate() {
                let at = format!("{at}/{key}/{i}");
                let types = Types::allowed(branch, &self.root, &mut 256);
                if key == "oneOf" && !types.excludes(seen) {
                    let reason = "two of its schemas allow the same type";
                    return Err(self.unsupported(key, &at, reason));
                }
                seen = seen.or(types);
                all.push(self.gemma_value(branch, &at, depth + 1)?);
            }
            return Ok(self.rule(&all.join(" | ")));
        }
        match own.get("type") {
            Some(Value::String(name)) => self.typed(&own, &name.clone(), at, depth),
            Some(Value::Array(names)) => {
                let mut all = Vec::new();
                for name in names.iter().filter_map(Value::as_str) {
                    let mut one = own.clone();
                    // A keyword counts for its own type alone.
                    one.retain(|key, _| {
                        QUIET_FOR_OTHERS
                            .iter()
                            .all(|(k, of)| k != key || *of == name)
                    });
                    all.push(self.typed(&one, name, at, depth)?);
                }
                Ok(self.rule(&all.join(" | ")))
            }
            _ if own.contains_key("properties") => self.object(&own, at, depth),
            _ => {
                self.only(&own, &[], at)?;
                let text = self.quoted(None, None);
                let number = self.schema(json!({"type": "number"}), at)?;
                Ok(self.rule(&format!(
                    "{text} | {number} | \"true\" | \"false\" | \"null\""
                )))
            }
        }
    }

    /// A value of the type `name`.
    fn typed(
        &mut self,
        schema: &Map<String, Value>,
        name: &str,
        at: &str,
        depth: usize,
    ) -> Result<String, Unsupported> {
        match name {
            "string" => {
                self.only(schema, &["type", "minLength", "maxLength"], at)?;
                let least = self.count(schema, "minLength", at)?;
                let most = self.count(schema, "maxLength", at)?;
                Ok(self.quoted(least, most))
            }
            "integer" | "number" => {
                let mut schema = schema.clone();
                schema.insert("type".to_owned(), name.into());
                self.schema(Value::Object(schema), at)
            }
            "boolean" => {
                self.only(schema, &["type"], at)?;
                Ok("(\"true\" | \"false\")".to_owned())
            }
            "null" => {
                self.only(schema, &["type"], at)?;
                Ok(literal("null"))
            }
            "array" => {
                self.only(schema, &["type", "items", "minItems", "maxItems"], at)?;
                let least = self.count(schema, "minItems", at)?.unwrap_or(0);
                let most = self.count(schema, "maxItems", at)?;
                if most.is_some_and(|most| most < least) {
                    return Err(self.unsupported("maxItems", at, "it is less than `minItems`"));
                }
                let any = Value::Bool(true);
                let items = schema.get("items").unwrap_or(&any);
                let item = self.gemma_value(items, &format!("{at}/items"), depth + 1)?;
                let others = match (least.saturating_sub(1), most.map(|n| n.saturating_sub(1))) {
                    (_, Some(0)) => String::new(),
                    (least, most) => format!("(\",\" {item}){}", times(Some(least), most)),
                };
                Ok(self.rule(&match (least, most) {
                    (_, Some(0)) => literal("[]"),
                    (0, _) => format!("\"[\" ({item} {others})? \"]\""),
                    _ => format!("\"[\" {item} {others} \"]\""),
                }))
            }
            "object" => self.object(schema, at, depth),
            _ => Err(self.unsupported("type", at, "it is not a type of JSON")),
        }
    }

    /// One of some values.
    fn one_of(&mut self, values: &[Value], at: &str) -> Result<String, Unsupported> {
        let mut all = Vec::new();
        for value in values {
            all.push(match value {
                Value::String(text) => {
                    let quote = self.mark(ToolMark::Quote);
                    match text.is_empty() {
                        true => format!("{quote} {quote}"),
                        false => format!("{quote} {} {quote}", literal(text)),
                    }
                }
                Value::Array(_) | Value::Object(_) => {
                    return Err(self.unsupported(
                        "enum",
                        at,
                        "one of its values is a list or an object",
                    ));
                }
                plain => literal(&plain.to_string()),
            });
        }
        Ok(self.rule(&all.join(" | ")))
    }

    /// A string of `least` to `most` characters.
    fn quoted(&mut self, least: Option<u64>, most: Option<u64>) -> String {
        let quote = self.mark(ToolMark::Quote);
        if most == Some(0) {
            return format!("({quote} {quote})");
        }
        let text = self.terminal(&format!(
            "/(?s:.){}/",
            times(Some(least.unwrap_or(1).max(1)), most)
        ));
        match least.unwrap_or(0) {
            0 => format!("({quote} {text}? {quote})"),
            _ => format!("({quote} {text} {quote})"),
        }
    }
}

/// Keywords that count for one type alone.
const QUIET_FOR_OTHERS: &[(&str, &str)] = &[
    ("minLength", "string"),
    ("maxLength", "string"),
    ("items", "array"),
    ("minItems", "array"),
    ("maxItems", "array"),
    ("properties", "object"),
    ("required", "object"),
];
