//! One subschema, keyword by keyword.

use serde_json::{Map, Number, Value, json};

use super::references::join;
use super::{Normalizer, formats, overlap};
use crate::{Error, pattern};

/// Keywords that say nothing about which values are valid.
const ANNOTATIONS: &[&str] = &[
    "$anchor",
    "$comment",
    "$defs",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "$schema",
    "$vocabulary",
    "contentEncoding",
    "contentMediaType",
    "contentSchema",
    "default",
    "definitions",
    "deprecated",
    "description",
    // OpenAPI: which alternative of a `oneOf` is meant, for readers.
    "discriminator",
    "example",
    "examples",
    "externalDocs",
    "id",
    "readOnly",
    "title",
    "writeOnly",
    "xml",
];

/// Keywords that apply to the values that other keywords of the same subschema have not seen.
const IN_PLACE: &[&str] = &["$ref", "allOf", "anyOf", "oneOf"];

const TYPES: &[&str] = &[
    "null", "boolean", "integer", "number", "string", "array", "object",
];

/// The largest integer up to which a double holds every one.
const INTEGER_MAX: f64 = 9_007_199_254_740_991.0;

/// A subschema while it is rewritten.
pub(super) struct Rewrite<'n, 'r, 's> {
    normalizer: &'n mut Normalizer<'r>,
    schema: &'s Map<String, Value>,
    pointer: &'s str,
    depth: usize,
    /// Keywords about the value itself.
    out: Map<String, Value>,
    /// Subschemas that must hold too.
    all: Vec<Value>,
}

impl<'n, 'r, 's> Rewrite<'n, 'r, 's> {
    pub(super) fn new(
        normalizer: &'n mut Normalizer<'r>,
        schema: &'s Map<String, Value>,
        pointer: &'s str,
        depth: usize,
    ) -> Self {
        Self {
            normalizer,
            schema,
            pointer,
            depth,
            out: Map::new(),
            all: Vec::new(),
        }
    }

    /// The rewritten subschema. The keywords about the value itself come first, since the
    /// engine reads `properties` and `additionalProperties` together only if nothing stands
    /// between them.
    pub(super) fn run(mut self) -> Result<Value, Error> {
        for (key, value) in self.schema {
            self.keyword(key, value)?;
        }
        if !self.all.is_empty() {
            self.out.insert("allOf".to_owned(), Value::Array(self.all));
        }
        Ok(Value::Object(self.out))
    }

    fn keyword(&mut self, key: &str, value: &'s Value) -> Result<(), Error> {
        match key {
            "type" => self.types(value),
            "const" => self.values(key, std::slice::from_ref(value)),
            "enum" => match value.as_array() {
                Some(values) if !values.is_empty() => self.values(key, values),
                _ => self.invalid(key, "`enum` is a list of at least one value"),
            },
            "$ref" => match value.as_str() {
                Some(reference) => {
                    let pointer = join(self.pointer, key);
                    let reference = self.normalizer.reference(reference, &pointer)?;
                    self.all.push(json!({"$ref": reference}));
                    Ok(())
                }
                None => self.invalid(key, "`$ref` is a string"),
            },
            "allOf" => {
                let all = self.list(key, value)?;
                self.all.extend(all);
                Ok(())
            }
            "anyOf" => {
                let options = self.list(key, value)?;
                self.all.push(json!({"anyOf": options}));
                Ok(())
            }
            "oneOf" => self.one_of(key, value),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
                self.number(key, value)
            }
            "minLength" | "minItems" => self.least(key, value).map(drop),
            "minProperties" => self.min_properties(key, value),
            "maxLength" | "maxItems" | "maxProperties" => self.most(key, value),
            "pattern" => match value.as_str() {
                Some(text) => {
                    let text = self.pattern(key, text)?;
                    self.all.push(json!({"pattern": text}));
                    Ok(())
                }
                None => self.invalid(key, "`pattern` is a string"),
            },
            "format" => self.format(key, value),
            "properties" => {
                let map = self.map(key, value)?;
                self.put(key, Value::Object(map))
            }
            "patternProperties" => self.pattern_properties(key, value),
            "additionalProperties" => self.single(key, key, value),
            "unevaluatedProperties" => self.unevaluated(key, "additionalProperties", value),
            "propertyNames" => self.property_names(key, value),
            "required" => match value.as_array() {
                Some(names) if names.iter().all(Value::is_string) => self.put(key, value.clone()),
                _ => self.invalid(key, "`required` is a list of strings"),
            },
            "items" if value.is_array() => {
                let items = self.array(key, value)?;
                self.put("prefixItems", Value::Array(items))
            }
            "items" => self.single(key, key, value),
            "prefixItems" if self.schema.get("items").is_some_and(Value::is_array) => {
                self.invalid(key, "beside `prefixItems`, `items` is no list")
            }
            "prefixItems" => {
                let items = self.array(key, value)?;
                self.put(key, Value::Array(items))
            }
            "additionalItems" => match self.schema.get("items") {
                Some(Value::Array(_)) => self.single(key, "items", value),
                _ => Ok(()),
            },
            "unevaluatedItems" => self.unevaluated(key, "items", value),
            _ => self.other(key, value),
        }
    }

    /// Keywords that only say something in other forms than those that can be enforced.
    fn other(&mut self, key: &str, value: &Value) -> Result<(), Error> {
        let says_nothing = match key {
            "uniqueItems" => {
                *value == Value::Bool(false)
                    || self
                        .schema
                        .get("maxItems")
                        .and_then(Value::as_u64)
                        .is_some_and(|n| n <= 1)
            }
            "nullable" => *value == Value::Bool(false),
            "dependencies" | "dependentRequired" | "dependentSchemas" => {
                value.as_object().is_some_and(Map::is_empty)
            }
            "then" | "else" => !self.schema.contains_key("if"),
            "minContains" | "maxContains" => !self.schema.contains_key("contains"),
            "not" => *value == Value::Bool(false),
            "$id" => self.pointer == "#" || value.as_str().is_some_and(|id| id.starts_with('#')),
            _ => ANNOTATIONS.contains(&key) || key.starts_with("x-"),
        };
        if says_nothing {
            return Ok(());
        }
        let reason = match key {
            "uniqueItems" => "a grammar cannot compare the items of a list",
            "nullable" => "it is no keyword of JSON Schema; add `null` to `type`",
            "not" | "if" | "then" | "else" | "contains" | "minContains" | "maxContains"
            | "dependencies" | "dependentRequired" | "dependentSchemas" | "$dynamicRef"
            | "$recursiveRef" => "it is not supported",
            "$id" => "only the whole schema may have one",
            _ => "it is no keyword that is known",
        };
        self.unsupported(key, reason)
    }

    fn unsupported<T>(&self, keyword: &str, reason: impl Into<String>) -> Result<T, Error> {
        Err(Error::UnsupportedKeyword {
            keyword: keyword.to_owned(),
            reason: reason.into(),
            pointer: join(self.pointer, keyword),
        })
    }

    fn invalid<T>(&self, keyword: &str, reason: &str) -> Result<T, Error> {
        Err(Error::InvalidSchema {
            reason: reason.to_owned(),
            pointer: join(self.pointer, keyword),
        })
    }

    /// Sets a keyword of the rewritten subschema, or adds it as a further condition.
    fn put(&mut self, key: &str, value: Value) -> Result<(), Error> {
        match self.out.contains_key(key) {
            true => self.all.push(json!({key: value})),
            false => _ = self.out.insert(key.to_owned(), value),
        }
        Ok(())
    }

    /// Rewrites the subschema `value` at `pointer`.
    fn inner(&mut self, value: &Value, pointer: &str) -> Result<Value, Error> {
        self.normalizer.subschema(value, pointer, self.depth)
    }

    fn single(&mut self, key: &str, out: &str, value: &Value) -> Result<(), Error> {
        let schema = self.inner(value, &join(self.pointer, key))?;
        self.put(out, schema)
    }

    fn array(&mut self, key: &str, value: &Value) -> Result<Vec<Value>, Error> {
        let Some(items) = value.as_array() else {
            return self.invalid(key, &format!("`{key}` is a list of schemas"));
        };
        let pointer = join(self.pointer, key);
        let items = items.iter().enumerate();
        items
            .map(|(i, item)| self.inner(item, &format!("{pointer}/{i}")))
            .collect()
    }

    /// A list of at least one subschema.
    fn list(&mut self, key: &str, value: &Value) -> Result<Vec<Value>, Error> {
        match value.as_array().is_some_and(|list| !list.is_empty()) {
            true => self.array(key, value),
            false => self.invalid(key, &format!("`{key}` is a list of at least one schema")),
        }
    }

    fn map(&mut self, key: &str, value: &Value) -> Result<Map<String, Value>, Error> {
        let Some(map) = value.as_object() else {
            return self.invalid(key, &format!("`{key}` is an object of schemas"));
        };
        let pointer = join(self.pointer, key);
        let map = map.iter();
        map.map(|(name, schema)| Ok((name.clone(), self.inner(schema, &join(&pointer, name))?)))
            .collect()
    }

    fn types(&mut self, value: &Value) -> Result<(), Error> {
        let known = |value: &Value| value.as_str().is_some_and(|name| TYPES.contains(&name));
        let ok = match value {
            Value::Array(names) => !names.is_empty() && names.iter().all(known),
            one => known(one),
        };
        match ok {
            true => self.put("type", value.clone()),
            false => self.invalid("type", "`type` is one of the seven types or a list of them"),
        }
    }

    fn values(&mut self, key: &str, values: &[Value]) -> Result<(), Error> {
        for value in values {
            self.value(key, value, self.depth)?;
        }
        let value = match key {
            "const" => values[0].clone(),
            _ => Value::Array(values.to_vec()),
        };
        self.all.push(json!({key: value}));
        Ok(())
    }

    /// Refuses a value that the engine would not write exactly.
    fn value(&mut self, key: &str, value: &Value, depth: usize) -> Result<(), Error> {
        self.normalizer.count()?;
        let Some(depth) = depth.checked_sub(1) else {
            return self.unsupported(key, "a value is nested too deeply");
        };
        match value {
            Value::Number(number) => self.exact(key, number).map(drop),
            Value::String(text) => match text.chars().any(|ch| unwritable(ch)) {
                true => {
                    self.unsupported(key, "a string has a control character that is not written")
                }
                false => Ok(()),
            },
            Value::Array(items) => items
                .iter()
                .try_for_each(|item| self.value(key, item, depth)),
            Value::Object(map) => map
                .values()
                .try_for_each(|item| self.value(key, item, depth)),
            _ => Ok(()),
        }
    }

    /// `number` as a double, if that is exact.
    fn exact(&self, key: &str, number: &Number) -> Result<f64, Error> {
        match number.as_f64() {
            Some(value) if value.is_finite() && (value.abs() <= INTEGER_MAX) => Ok(value),
            _ => self.unsupported(key, "a number has more than 53 bits"),
        }
    }

    fn one_of(&mut self, key: &str, value: &'s Value) -> Result<(), Error> {
        let options = self.list(key, value)?;
        let originals = value.as_array().map(Vec::as_slice).unwrap_or_default();
        let mut proof = overlap::Proof::new(self.normalizer.root);
        for (i, a) in originals.iter().enumerate() {
            for (j, b) in originals.iter().enumerate().skip(i + 1) {
                if !proof.apart(a, b) {
                    return self.unsupported(
                        key,
                        format!(
                            "a value may be valid under both of the alternatives {i} and {j}; use \
                             `anyOf`, or give each a required property with another `const`"
                        ),
                    );
                }
            }
        }
        self.all.push(json!({"anyOf": options}));
        Ok(())
    }

    fn number(&mut self, key: &str, value: &Value) -> Result<(), Error> {
        let exclusive = match key {
            "exclusiveMinimum" => Some("minimum"),
            "exclusiveMaximum" => Some("maximum"),
            _ => None,
        };
        // Draft 4 marked the bound beside it as exclusive.
        let value = match (value, exclusive) {
            (Value::Bool(false), Some(_)) => return Ok(()),
            (Value::Bool(true), Some(bound)) => match self.schema.get(bound) {
                Some(bound) => bound,
                None => return Ok(()),
            },
            (value, _) => value,
        };
        let Value::Number(number) = value else {
            return self.invalid(key, &format!("`{key}` is a number"));
        };
        let number = self.exact(key, number)?;
        if key == "multipleOf" && number <= 0.0 {
            return self.invalid(key, "`multipleOf` is above 0");
        }
        self.put(key, value.clone())
    }

    /// A count of at least 0, written as an integer or as `2.0`.
    fn counted(&self, key: &str, value: &Value) -> Result<u64, Error> {
        let count = value.as_u64().or_else(|| {
            let value = value.as_f64()?;
            (value >= 0.0 && value.fract() == 0.0 && value <= INTEGER_MAX).then_some(value as u64)
        });
        match count {
            Some(count) => Ok(count),
            None => self.invalid(key, &format!("`{key}` is an integer of at least 0")),
        }
    }

    fn least(&mut self, key: &str, value: &Value) -> Result<u64, Error> {
        let count = self.counted(key, value)?;
        let limit = self.normalizer.limits.repetitions;
        if count > limit {
            return Err(Error::TooLarge {
                what: "least length of a string or list",
                limit,
            });
        }
        self.put(key, count.into())?;
        Ok(count)
    }

    /// An upper bound. Lengths over the limit are never written, which is stricter.
    fn most(&mut self, key: &str, value: &Value) -> Result<(), Error> {
        let count = self.counted(key, value)?;
        self.put(key, count.min(self.normalizer.limits.repetitions).into())
    }

    /// Properties that the schema does not name may be written twice and then count once.
    fn min_properties(&mut self, key: &str, value: &Value) -> Result<(), Error> {
        let count = self.least(key, value)?;
        let required = self.schema.get("required").and_then(Value::as_array);
        let mut names: Vec<&str> = required
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        names.sort_unstable();
        names.dedup();
        let named_only = self.schema.get("additionalProperties") == Some(&Value::Bool(false))
            && !self.schema.contains_key("patternProperties");
        match count <= names.len() as u64 + 1 || named_only {
            true => Ok(()),
            false => self.unsupported(
                key,
                "it is more than one above the properties in `required`",
            ),
        }
    }

    fn pattern(&self, key: &str, text: &str) -> Result<String, Error> {
        let translated = pattern::to_schema(text, self.normalizer.limits);
        translated.or_else(|reason| self.unsupported(key, reason))
    }

    fn format(&mut self, key: &str, value: &Value) -> Result<(), Error> {
        let Some(name) = value.as_str() else {
            return self.invalid(key, "`format` is a string");
        };
        match formats::lookup(name) {
            Some(formats::Format::Pattern(text)) => {
                self.all.push(json!({"pattern": format!("^(?:{text})$")}));
                Ok(())
            }
            Some(formats::Format::Length(text, max)) => {
                let text = format!("^(?:{text})$");
                self.all.push(json!({"pattern": text}));
                self.all.push(json!({"maxLength": max}));
                Ok(())
            }
            Some(formats::Format::Range(min, max)) => {
                self.all.push(json!({"minimum": min, "maximum": max}));
                Ok(())
            }
            Some(formats::Format::Anything) => Ok(()),
            None => self.unsupported(key, format!("the format `{name}` is not known")),
        }
    }

    fn pattern_properties(&mut self, key: &str, value: &Value) -> Result<(), Error> {
        let map = self.map(key, value)?;
        let mut out = Map::new();
        for (name, schema) in map {
            let name = self.pattern(key, &name)?;
            let schema = match out.remove(&name) {
                Some(other) => json!({"allOf": [other, schema]}),
                None => schema,
            };
            out.insert(name, schema);
        }
        self.put(key, Value::Object(out))
    }

    /// Where nothing else has looked at the properties or items, the keyword is `same`.
    fn unevaluated(&mut self, key: &str, same: &str, value: &Value) -> Result<(), Error> {
        let alone = !self.schema.contains_key(same)
            && !IN_PLACE.iter().any(|key| self.schema.contains_key(*key))
            && !(same == "items" && self.schema.contains_key("contains"));
        match value {
            Value::Bool(true) => Ok(()),
            _ if self.schema.contains_key(same)
                && !self.schema.get("items").is_some_and(Value::is_array) =>
            {
                // The other keyword has looked at all of them.
                Ok(())
            }
            value if alone => self.single(key, same, value),
            _ => self.unsupported(key, "it stands beside `$ref`, `allOf`, `anyOf` or `oneOf`"),
        }
    }

    /// Names from a list or of a pattern, where no property is named otherwise.
    fn property_names(&mut self, key: &str, value: &Value) -> Result<(), Error> {
        if *value == Value::Bool(true) || value.as_object().is_some_and(Map::is_empty) {
            return Ok(());
        }
        let others = ["properties", "patternProperties", "unevaluatedProperties"];
        let alone = !others.iter().any(|key| self.schema.contains_key(*key));
        let name_schema = value.as_object().filter(|_| alone);
        let root = self.normalizer.root;
        let name_schema = name_schema.and_then(|schema| match schema.get("$ref") {
            None => Some(schema),
            Some(reference) => {
                let target = super::references::pointer(root, reference.as_str()?)?;
                super::references::resolve(root, &target)?.as_object()
            }
        });
        let Some(names) = name_schema else {
            return self.unsupported(
                key,
                "it is not supported beside other keywords about properties",
            );
        };
        let only = |key: &str| {
            let known =
                |name: &String| name == key || name == "type" || ANNOTATIONS.contains(&&**name);
            names.keys().all(known) && names.get("type").is_none_or(|name| name == "string")
        };
        let each = self
            .schema
            .get("additionalProperties")
            .cloned()
            .unwrap_or(true.into());
        let pointer = join(self.pointer, key);
        if let (Some(Value::Array(list)), true) = (names.get("enum"), only("enum")) {
            let mut properties = Map::new();
            for name in list.iter().filter_map(Value::as_str) {
                properties.insert(name.to_owned(), self.inner(&each, &pointer)?);
            }
            self.all
                .push(json!({"properties": properties, "additionalProperties": false}));
            return Ok(());
        }
        if let (Some(Value::String(text)), true) = (names.get("pattern"), only("pattern")) {
            let text = self.pattern(key, text)?;
            let each = self.inner(&each, &pointer)?;
            self.all
                .push(json!({"patternProperties": {text: each}, "additionalProperties": false}));
            return Ok(());
        }
        self.unsupported(key, "only `enum` or `pattern` is supported for names")
    }
}

/// Whether `ch` could be written in a string only as `\u…`.
fn unwritable(ch: char) -> bool {
    (ch < ' ' && !matches!(ch, '\u{8}' | '\t' | '\n' | '\u{c}' | '\r')) || ch == '\u{7f}'
}
