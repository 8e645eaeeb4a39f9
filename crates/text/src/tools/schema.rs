//! The tools that a request offers, and the types that their schemas allow.
//!
//! Only as much of JSON Schema is read as says whether an argument may be a string: `type`,
//! `enum`, `const`, `anyOf`, `oneOf`, `allOf` and `$ref` inside the same schema. What cannot
//! be read allows everything.

use std::collections::HashMap;

use serde_json::Value;

use super::json;

/// Schemas looked at for one argument, at most; what is beyond allows everything.
const SCHEMAS_MAX: usize = 256;

/// The types that a value may have, as a set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Types(u8);

impl Types {
    /// Strings alone.
    pub(super) const TEXT: Types = Types(1);
    pub(super) const NULL: Types = Types(2);
    /// Strings and null.
    pub(super) const TEXT_OR_NULL: Types = Types(3);
    /// No type.
    pub(super) const NONE: Types = Types(0);
    const BOOL: Types = Types(4);
    const NUMBER: Types = Types(8);
    const LIST: Types = Types(16);
    const OBJECT: Types = Types(32);
    /// Every type.
    pub(super) const ANY: Types = Types(63);

    pub(super) fn named(name: &str) -> Types {
        match name {
            "string" => Types::TEXT,
            "null" => Types::NULL,
            "boolean" => Types::BOOL,
            "integer" | "number" => Types::NUMBER,
            "array" => Types::LIST,
            "object" => Types::OBJECT,
            _ => Types::ANY,
        }
    }

    /// Whether none of the types is one of `others`.
    pub(super) fn excludes(self, others: Types) -> bool {
        self.0 & others.0 == 0
    }

    /// Whether all of the types are among `others`.
    pub(super) fn within(self, others: Types) -> bool {
        self.0 & !others.0 == 0
    }

    /// The union with `others`.
    pub(super) fn or(self, others: Types) -> Types {
        Types(self.0 | others.0)
    }

    /// The type of `value`.
    pub(super) fn of(value: &Value) -> Types {
        match value {
            Value::Null => Types::NULL,
            Value::Bool(_) => Types::BOOL,
            Value::Number(_) => Types::NUMBER,
            Value::String(_) => Types::TEXT,
            Value::Array(_) => Types::LIST,
            Value::Object(_) => Types::OBJECT,
        }
    }

    /// The types that `schema` allows, a part of `root`; `left` schemas may still be looked at.
    pub(super) fn allowed(schema: &Value, root: &Value, left: &mut usize) -> Types {
        let Some(map) = schema.as_object() else {
            return Types::ANY;
        };
        if *left == 0 {
            return Types::ANY;
        }
        *left -= 1;
        let union = |types: &mut dyn Iterator<Item = Types>| types.fold(0, |all, t| all | t.0);
        let mut types = match map.get("type") {
            Some(Value::String(name)) => Types::named(name).0,
            Some(Value::Array(names)) => {
                union(&mut names.iter().map(|n| Types::named(n.as_str().unwrap_or(""))))
            }
            _ => Types::ANY.0,
        };
        if let Some(value) = map.get("const") {
            types &= Types::of(value).0;
        }
        if let Some(Value::Array(values)) = map.get("enum") {
            types &= union(&mut values.iter().map(Types::of));
        }
        for name in ["anyOf", "oneOf"] {
            if let Some(Value::Array(list)) = map.get(name) {
                types &= union(&mut list.iter().map(|s| Types::allowed(s, root, left)));
            }
        }
        if let Some(Value::Array(list)) = map.get("allOf") {
            for schema in list {
                types &= Types::allowed(schema, root, left).0;
            }
        }
        if let Some(path) = map.get("$ref").and_then(Value::as_str)
            && let Some(target) = path.strip_prefix('#').and_then(|path| root.pointer(path))
        {
            types &= Types::allowed(target, root, left).0;
        }
        match types {
            0 => Types::ANY,
            types => Types(types),
        }
    }

    /// Writes a value that a model has spelled without saying its type: `text` is a string, or
    /// JSON.
    pub(super) fn write(self, text: &str, out: &mut String) {
        let trimmed = text.trim();
        let word = match trimmed {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            word => word,
        };
        let may_be_text = self.0 & Types::TEXT.0 != 0;
        // A word of Python is a string wherever that is possible.
        let word = if may_be_text { trimmed } else { word };
        let mut json = String::new();
        let mut value = json::Value::new();
        let mut last = json::Read::More;
        for c in word.chars() {
            if last != json::Read::More {
                last = json::Read::Bad;
                break;
            }
            last = value.push(c, &mut json);
        }
        // A number ends with the character after it.
        let is_json = match last {
            json::Read::Done => true,
            json::Read::More => json::is_number(word),
            json::Read::DoneBefore | json::Read::Bad => false,
        };
        let own = match word.as_bytes().first() {
            Some(b'{') => Types::OBJECT,
            Some(b'[') => Types::LIST,
            Some(b'"') => Types::TEXT,
            Some(b't' | b'f') => Types::BOOL,
            Some(b'n') => Types::NULL,
            _ => Types::NUMBER,
        };
        let fits = self.0 & own.0 != 0 && own != Types::TEXT;
        if is_json && (fits || !may_be_text) {
            out.push_str(&json);
        } else {
            json::string_onto(out, text);
        }
    }
}

/// The tools that a request offers to the model.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    /// The types of each tool's arguments by name.
    tools: HashMap<String, HashMap<String, Types>>,
}

impl Tools {
    /// Reads a list of tools, each `{"type": "function", "function": {name, parameters}}` or
    /// its inner object alone. What has another shape is passed over.
    pub fn new(tools: &Value) -> Self {
        let list = tools.as_array().map(Vec::as_slice).unwrap_or_default();
        let tools = list.iter().filter_map(|tool| {
            let function = tool.get("function").unwrap_or(tool);
            let name = function["name"].as_str()?.to_owned();
            let root = &function["parameters"];
            let types = root["properties"].as_object().into_iter().flatten();
            let types = types.map(|(key, schema)| {
                let mut left = SCHEMAS_MAX;
                (key.clone(), Types::allowed(schema, root, &mut left))
            });
            Some((name, types.collect()))
        });
        Tools {
            tools: tools.collect(),
        }
    }

    /// The types that the argument `key` of the tool `name` may have.
    pub(super) fn types(&self, name: &str, key: &str) -> Types {
        let types = self.tools.get(name).and_then(|types| types.get(key));
        types.copied().unwrap_or(Types::ANY)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_say_whether_an_argument_is_a_string() {
        let root = json!({"$defs": {"s": {"type": "string"}, "loop": {"$ref": "#/$defs/loop"}}});
        let types = |schema: Value| Types::allowed(&schema, &root, &mut SCHEMAS_MAX.clone());
        for schema in [
            json!({"type": "string", "pattern": "x"}),
            json!({"enum": ["a", "b"]}),
            json!({"const": "a"}),
            json!({"anyOf": [{"type": "string"}, {"enum": ["x"]}]}),
            json!({"$ref": "#/$defs/s"}),
            json!({"allOf": [{"type": ["string", "null"]}, {"type": "string"}]}),
        ] {
            assert_eq!(types(schema.clone()), Types::TEXT, "{schema}");
        }
        for schema in [
            json!({}),
            json!(true),
            json!(1),
            json!({"$ref": "#/$defs/loop"}),
            json!({"type": "string", "enum": [1]}),
        ] {
            assert_eq!(types(schema.clone()), Types::ANY, "{schema}");
        }
        assert_eq!(types(json!({"type": ["string", "null"]})), Types(3));
        assert_eq!(
            types(json!({"oneOf": [{"type": "integer"}, {"type": "array"}]})),
            Types(24)
        );
    }

    #[test]
    fn a_value_is_json_where_its_type_allows() {
        let write = |types: Types, text: &str| {
            let mut out = String::new();
            types.write(text, &mut out);
            out
        };
        for (types, text, json) in [
            (Types::NUMBER, " 5 ", "5"),
            (Types::NUMBER, "five", "\"five\""),
            (Types::BOOL, "True", "true"),
            (Types::NULL, "None", "null"),
            (Types::LIST, "[1,\n 2]", "[1,\n 2]"),
            (Types::OBJECT, "{\"a\": }", "\"{\\\"a\\\": }\""),
            (Types::NUMBER, "[1]", "[1]"),
            (Types(3), "null", "null"),
            (Types(3), "5", "\"5\""),
            (Types(3), "\"5\"", "\"\\\"5\\\"\""),
            (Types(9), "5", "5"),
            (Types(9), "5x", "\"5x\""),
            (Types::ANY, "true", "true"),
            (Types::ANY, "True", "\"True\""),
            (Types::ANY, "", "\"\""),
            (Types::ANY, "1 2", "\"1 2\""),
            (Types::ANY, "1e", "\"1e\""),
        ] {
            assert_eq!(write(types, text), json, "{types:?} {text:?}");
        }
    }
}
