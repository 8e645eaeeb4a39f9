//! Where a `$ref` leads, and whether following all of them ends.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::{Error, Limits};

/// `pointer` with one segment more, escaped as in a URI fragment.
pub(super) fn join(pointer: &str, segment: &str) -> String {
    let segment = segment.replace('~', "~0").replace('/', "~1");
    format!("{pointer}/{}", segment.replace('%', "%25"))
}

/// The canonical pointer (`#`, `#/a/0`) of what `reference` leads to; `None` if it leads out of
/// the document.
pub(super) fn pointer(root: &Value, reference: &str) -> Option<String> {
    let id = root.get("$id").and_then(Value::as_str).unwrap_or_default();
    let id = id.strip_suffix('#').unwrap_or(id);
    let fragment = match reference.split_once('#') {
        Some((document, fragment)) if document.is_empty() || document == id => fragment,
        None if !id.is_empty() && reference == id => "",
        _ => return None,
    };
    if fragment.is_empty() || fragment == "/" && root.get("").is_none() {
        return Some("#".to_owned());
    }
    if !fragment.starts_with('/') {
        return anchor(root, fragment, "#", 64);
    }
    let mut out = "#".to_owned();
    for segment in fragment[1..].split('/') {
        out = join(&out, &decode(segment)?);
    }
    Some(out)
}

/// The subschema at a canonical `pointer`.
pub(super) fn resolve<'a>(root: &'a Value, pointer: &str) -> Option<&'a Value> {
    let mut here = root;
    for segment in pointer.split('/').skip(1) {
        let segment = decode(segment)?;
        here = match here {
            Value::Array(items) => items.get(segment.parse::<usize>().ok()?)?,
            Value::Object(map) => map.get(&segment)?,
            _ => return None,
        };
    }
    Some(here)
}

/// A segment of a URI fragment without its escapes.
fn decode(segment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(segment.len());
    let mut rest = segment.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        bytes.push((digit()? * 16 + digit()?) as u8);
    }
    let segment = String::from_utf8(bytes).ok()?;
    Some(segment.replace("~1", "/").replace("~0", "~"))
}

/// The pointer of the subschema with the `$anchor` or `$id` fragment `name`.
fn anchor(here: &Value, name: &str, pointer: &str, depth: usize) -> Option<String> {
    let depth = depth.checked_sub(1)?;
    match here {
        Value::Object(map) => {
            let named = |key, text: &str| map.get(key).and_then(Value::as_str) == Some(text);
            if named("$anchor", name) || named("$id", &format!("#{name}")) {
                return Some(pointer.to_owned());
            }
            // What these hold is data and no schema.
            let mut inner = map
                .iter()
                .filter(|(key, _)| *key != "enum" && *key != "const");
            inner.find_map(|(key, value)| anchor(value, name, &join(pointer, key), depth))
        }
        Value::Array(items) => {
            let mut items = items.iter().enumerate();
            items.find_map(|(i, item)| anchor(item, name, &format!("{pointer}/{i}"), depth))
        }
        _ => None,
    }
}

/// Refuses a rewritten schema that leads from `$ref` to `$ref` too deeply, that comes back to
/// the same value without end, or that no finite value satisfies.
pub(super) fn check(
    root: &Value,
    definitions: &Map<String, Value>,
    limits: &Limits,
) -> Result<(), Error> {
    let graph = Graph { root, definitions };
    graph.check_depth(limits.reference_depth)?;
    graph.check_loops()?;
    graph.check_finite()
}

struct Graph<'a> {
    root: &'a Value,
    definitions: &'a Map<String, Value>,
}

/// The name of the definition that a rewritten `$ref` leads to.
fn target(schema: &Value) -> Option<&str> {
    schema.get("$ref")?.as_str()?.strip_prefix("#/$defs/")
}

/// The subschemas of a rewritten `schema` about the same value.
fn in_place(schema: &Value) -> impl Iterator<Item = &Value> {
    let lists = ["allOf", "anyOf"].into_iter();
    let lists = lists.filter_map(|key| schema.get(key)?.as_array());
    lists.flatten()
}

/// The subschemas of a rewritten `schema` about the values inside its value.
fn inside(schema: &Value) -> impl Iterator<Item = &Value> {
    let maps = ["properties", "patternProperties"].into_iter();
    let maps = maps.filter_map(|key| schema.get(key)?.as_object());
    let single = ["additionalProperties", "items"].into_iter();
    let list = schema.get("prefixItems").and_then(Value::as_array);
    maps.flat_map(Map::values)
        .chain(single.filter_map(|key| schema.get(key)))
        .chain(list.into_iter().flatten())
}

impl<'a> Graph<'a> {
    /// Follows every `$ref` where it is first met, as the grammar engine does, and measures how
    /// deep that goes.
    fn check_depth(&self, limit: usize) -> Result<(), Error> {
        let mut seen = HashSet::new();
        let mut open: Vec<(&'a Value, usize)> = vec![(self.root, 0)];
        while let Some((schema, depth)) = open.pop() {
            if depth > limit {
                return Err(Error::TooLarge {
                    what: "nesting of the schema through `$ref` in levels",
                    limit: limit as u64,
                });
            }
            if let Some(name) = target(schema)
                && seen.insert(name)
            {
                open.extend(self.definitions.get(name).map(|schema| (schema, depth + 1)));
            }
            let inner = in_place(schema).chain(inside(schema));
            open.extend(inner.map(|schema| (schema, depth + 1)));
        }
        Ok(())
    }

    /// Refuses a `$ref` that comes back to itself about the same value.
    fn check_loops(&self) -> Result<(), Error> {
        // 1: on the path from where the search began, 2: done.
        let mut marks: std::collections::HashMap<&str, u8> = Default::default();
        for start in self.definitions.keys() {
            let mut path: Vec<(&str, Vec<&str>)> = Vec::new();
            if marks.contains_key(&**start) {
                continue;
            }
            marks.insert(start, 1);
            path.push((start, self.same_value(start)));
            while let Some((name, next)) = path.last_mut() {
                let Some(other) = next.pop() else {
                    marks.insert(name, 2);
                    path.pop();
                    continue;
                };
                match marks.get(other) {
                    Some(1) => {
                        return Err(Error::InvalidSchema {
                            reason: "a `$ref` leads back to itself".to_owned(),
                            pointer: "#".to_owned(),
                        });
                    }
                    Some(_) => {}
                    None => {
                        marks.insert(other, 1);
                        path.push((other, self.same_value(other)));
                    }
                }
            }
        }
        Ok(())
    }

    /// The definitions that the definition `name` applies to its own value.
    fn same_value(&self, name: &str) -> Vec<&'a str> {
        let mut out = Vec::new();
        let mut open: Vec<&Value> = self.definitions.get(name).into_iter().collect();
        while let Some(schema) = open.pop() {
            out.extend(target(schema));
            open.extend(in_place(schema));
        }
        out
    }

    /// Refuses a schema whose every value would contain another one without end.
    fn check_finite(&self) -> Result<(), Error> {
        let mut finite: HashSet<&str> = HashSet::new();
        // Each round but the last adds a definition.
        loop {
            let before = finite.len();
            for (name, schema) in self.definitions {
                if !finite.contains(&**name) && is_finite(schema, &finite) {
                    finite.insert(name);
                }
            }
            if is_finite(self.root, &finite) {
                return Ok(());
            }
            if finite.len() == before {
                return Err(Error::Unsatisfiable {
                    what: "JSON schema",
                    reason: "it contains itself, and every value would be endless".to_owned(),
                });
            }
        }
    }
}

/// Whether a value of `schema` may be finite, where the definitions `finite` may be.
fn is_finite(schema: &Value, finite: &HashSet<&str>) -> bool {
    if target(schema).is_some_and(|name| !finite.contains(name)) {
        return false;
    }
    let ok = |schema: &Value| is_finite(schema, finite);
    if let Some(options) = schema.get("anyOf").and_then(Value::as_array)
        && !options.iter().any(ok)
    {
        return false;
    }
    if let Some(all) = schema.get("allOf").and_then(Value::as_array)
        && !all.iter().all(ok)
    {
        return false;
    }
    let of_type = |name: &str| match schema.get("type") {
        Some(Value::String(only)) => only == name,
        _ => false,
    };
    let required = schema.get("required").and_then(Value::as_array);
    let mut required = required.into_iter().flatten().filter_map(Value::as_str);
    let endless = |name: &str| {
        let property = schema.get("properties").and_then(|all| all.get(name));
        property.is_some_and(|property| !ok(property))
    };
    if of_type("object") && required.any(endless) {
        return false;
    }
    let min_items = schema.get("minItems").and_then(Value::as_u64).unwrap_or(0);
    let prefix = schema.get("prefixItems").and_then(Value::as_array);
    let n_prefix = prefix.map_or(0, Vec::len) as u64;
    let mut first = prefix.into_iter().flatten().take(min_items as usize);
    let items = schema.get("items").is_none_or(ok);
    !(of_type("array") && (first.any(|item| !ok(item)) || (min_items > n_prefix && !items)))
}
