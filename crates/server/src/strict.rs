//! Strict JSON: a request's object, read once, within limits of memory and without
//! doubled names.
//!
//! `serde_json` takes the last of two equal names in silence, and an object of one name
//! takes some 470 bytes of memory for 5 bytes of text. So values are weighed while they
//! are read, and a name that comes twice is an error with its path.

use std::cell::{Cell, RefCell};
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::errors::{ApiError, excerpt};
use crate::limits::{
    JSON_DEPTH_MAX, JSON_WEIGHT_MAX, MESSAGES_WEIGHT_MAX, OTHER_WEIGHT_MAX, TOOLS_WEIGHT_MAX,
};

/// Fields that carry what a model is to read, with the weight that each may have.
const LARGE_FIELDS: &[(&str, usize)] = &[
    ("messages", MESSAGES_WEIGHT_MAX),
    ("input", MESSAGES_WEIGHT_MAX),
    ("prompt", JSON_WEIGHT_MAX),
    ("tokens", JSON_WEIGHT_MAX),
    ("content", JSON_WEIGHT_MAX),
    ("tools", TOOLS_WEIGHT_MAX),
    ("functions", TOOLS_WEIGHT_MAX),
];

/// Weight of a value, 72 bytes: [`Value`] itself.
const VALUE: usize = 1;
/// Weight of an object beside its names: room for four is allocated at once.
const OBJECT: usize = 5;
/// Weight of a name beside its value.
const NAME: usize = 2;

/// Reads `bytes` as one JSON object.
pub(crate) fn parse_object(bytes: &[u8]) -> Result<Map<String, Value>, ApiError> {
    check_shape(bytes)?;
    let refusal = RefCell::default();
    let mut text = serde_json::Deserializer::from_slice(bytes);
    let reader = Reader {
        refusal: &refusal,
        at: &At::Top,
        weight: &Weight::up_to(OTHER_WEIGHT_MAX),
    };
    let parsed = reader
        .deserialize(&mut text)
        .and_then(|value| text.end().map(|()| value));
    match parsed {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(ApiError::request("the body must be a JSON object")),
        Err(error) => Err(refusal.take().unwrap_or_else(|| {
            ApiError::request(format!(
                "the body is not valid JSON (line {}, column {})",
                error.line(),
                error.column()
            ))
        })),
    }
}

/// Bounds nesting and weight, whether or not the rest is JSON.
fn check_shape(bytes: &[u8]) -> Result<(), ApiError> {
    let (mut depth, mut weight) = (0_usize, VALUE);
    let (mut in_string, mut escaped) = (false, false);
    for &byte in bytes {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' => {
                depth += 1;
                weight += VALUE;
            }
            b'{' => {
                depth += 1;
                weight += VALUE + OBJECT;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' => weight += VALUE,
            b':' => weight += NAME,
            _ => {}
        }
        if depth > JSON_DEPTH_MAX {
            return Err(ApiError::request(format!(
                "the body nests deeper than {JSON_DEPTH_MAX} levels"
            )));
        }
        if weight > JSON_WEIGHT_MAX {
            return Err(ApiError::request(format!(
                "the body has too many values: {JSON_WEIGHT_MAX} numbers or {} objects at most",
                JSON_WEIGHT_MAX / (VALUE + OBJECT + NAME)
            )));
        }
    }
    Ok(())
}

/// Weight of the values of one large field, or of all others, so far and at most.
struct Weight {
    spent: Cell<usize>,
    most: usize,
}

impl Weight {
    fn up_to(most: usize) -> Self {
        Weight {
            spent: Cell::new(0),
            most,
        }
    }
}

/// Where a value is.
enum At<'a> {
    Top,
    Field(&'a At<'a>, &'a str),
    Item(&'a At<'a>, usize),
}

impl fmt::Display for At<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            At::Top => Ok(()),
            At::Field(At::Top, name) => f.write_str(&excerpt(name)),
            At::Field(outer, name) => write!(f, "{outer}.{}", excerpt(name)),
            At::Item(outer, i) => write!(f, "{outer}[{i}]"),
        }
    }
}

/// Reads one value.
struct Reader<'a> {
    /// Why the request is refused, if it is JSON.
    refusal: &'a RefCell<Option<ApiError>>,
    at: &'a At<'a>,
    weight: &'a Weight,
}

impl Reader<'_> {
    /// Ends the reading.
    fn refuse<E: Error>(&self, refusal: ApiError) -> E {
        self.refusal.replace(Some(refusal));
        E::custom("refused")
    }

    fn weigh<E: Error>(&self, weight: usize) -> Result<(), E> {
        let Weight { spent, most } = self.weight;
        spent.set(spent.get() + weight);
        if spent.get() <= *most {
            return Ok(());
        }
        let mut field = self.at;
        while let At::Field(outer, _) | At::Item(outer, _) = field
            && !matches!(outer, At::Top)
        {
            field = outer;
        }
        let field = field.to_string();
        let objects = most / (VALUE + OBJECT + NAME);
        let beside = match LARGE_FIELDS.iter().any(|(name, _)| *name == field) {
            true => "",
            false => ", with all other fields but messages, input, prompt and tools",
        };
        Err(self.refuse(ApiError::field(
            field,
            format!("has too many values: {most} numbers or {objects} objects at most{beside}"),
        )))
    }
}

impl<'de> DeserializeSeed<'de> for Reader<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, json: D) -> Result<Value, D::Error> {
        json.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Reader<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E: Error>(self) -> Result<Value, E> {
        self.weigh(VALUE)?;
        Ok(Value::Null)
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Value, E> {
        self.weigh(VALUE)?;
        Ok(Value::Bool(value))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Value, E> {
        self.weigh(VALUE)?;
        Ok(Value::from(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Value, E> {
        self.weigh(VALUE)?;
        Ok(Value::from(value))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Value, E> {
        self.weigh(VALUE)?;
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Value, E> {
        self.visit_string(value.to_owned())
    }

    fn visit_string<E: Error>(self, value: String) -> Result<Value, E> {
        self.weigh(VALUE)?;
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut json: A) -> Result<Value, A::Error> {
        self.weigh(VALUE)?;
        let mut list = Vec::new();
        loop {
            let at = At::Item(self.at, list.len());
            let item = Reader { at: &at, ..self };
            match json.next_element_seed(item)? {
                Some(item) => list.push(item),
                None => return Ok(Value::Array(list)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut json: A) -> Result<Value, A::Error> {
        self.weigh(VALUE + OBJECT)?;
        let mut map = Map::new();
        while let Some(name) = json.next_key::<String>()? {
            let at = At::Field(self.at, &name);
            if map.contains_key(&name) {
                let twice = ApiError::field(at.to_string(), "is there twice; send it once");
                return Err(self.refuse(twice));
            }
            let large = LARGE_FIELDS.iter().find(|(large, _)| *large == name);
            let large = large.filter(|_| matches!(self.at, At::Top));
            let large = large.map(|&(_, most)| Weight::up_to(most));
            let field = Reader {
                refusal: self.refusal,
                at: &at,
                weight: large.as_ref().unwrap_or(self.weight),
            };
            field.weigh(NAME)?;
            let value = json.next_value_seed(field)?;
            map.insert(name, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(text: &str) -> Result<Map<String, Value>, ApiError> {
        parse_object(text.as_bytes())
    }

    #[test]
    fn depth_and_values_are_bounded_and_strings_do_not_count() {
        let nested = |n| format!("{{\"a\": {}{}}}", "[".repeat(n - 1), "]".repeat(n - 1));
        assert!(parse_object(nested(JSON_DEPTH_MAX).as_bytes()).is_ok());
        assert!(parse_object(nested(JSON_DEPTH_MAX + 1).as_bytes()).is_err());
        assert!(check_shape(&[b'['; 1 << 20]).is_err());
        let many = format!("{{\"a\": [0{}]}}", ",0".repeat(JSON_WEIGHT_MAX));
        assert!(parse_object(many.as_bytes()).is_err());
        let text = format!("{{\"a\": \"{}\\\"[[\"}}", "[{,".repeat(JSON_WEIGHT_MAX));
        assert!(parse_object(text.as_bytes()).is_ok());
    }

    #[test]
    fn anything_but_an_object_is_refused() {
        for bad in [
            "",
            "[]",
            "1",
            "null",
            "{",
            "{}{}",
            "{\"a\":\"\\ud800\"}",
            "\u{feff}{}",
            "{'a':1}",
        ] {
            assert!(parse_object(bad.as_bytes()).is_err(), "{bad}");
        }
        assert!(parse_object(b"{\"a\":\"\xff\"}").is_err());
        assert!(parse_object(b" {} ").is_ok());
    }

    #[test]
    fn values_are_those_of_serde_json() {
        let text = r#" {"a": [null, true, -1, 18446744073709551615, 1.5, 1e3, -0.0, "x\n\u00e9"], "b": {"c": {}}} "#;
        let expected: Value = serde_json::from_str(text).unwrap();
        assert_eq!(Value::Object(parse(text).unwrap()), expected);
        assert!(parse(r#"{"a": 1e999}"#).is_err());
    }

    #[test]
    fn a_name_that_comes_twice_is_refused_with_its_path() {
        for (text, path) in [
            (r#"{"seed": 1, "seed": 2}"#, "seed"),
            (r#"{"seed": 1, "s\u0065ed": 2}"#, "seed"),
            (
                r#"{"messages": [{}, {"role": "user", "role": "system"}]}"#,
                "messages[1].role",
            ),
            (r#"{"a": {"b": {"c": 1, "c": 1}}}"#, "a.b.c"),
        ] {
            let error = parse(text).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(path), "{text}");
        }
        assert!(parse(r#"{"a": {"b": 1}, "b": [{"b": 1}, {"b": 1}]}"#).is_ok());
    }

    #[test]
    fn objects_weigh_what_they_take_and_only_large_fields_may_be_heavy() {
        let objects = |field: &str, n: usize| {
            let list = vec![r#"{"":0}"#; n].join(",");
            parse(&format!(r#"{{"{field}": [{list}]}}"#))
        };
        let each = VALUE + OBJECT + NAME + VALUE;
        let most = OTHER_WEIGHT_MAX / each - 2;
        for field in ["zz", "logit_bias"] {
            assert!(objects(field, most).is_ok());
            let error = objects(field, most + 4).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(field));
        }
        for (field, weight) in LARGE_FIELDS {
            assert!(objects(field, weight / each - 2).is_ok());
            assert!(objects(field, weight / each + 4).is_err());
        }
        // It is what all of them take together that counts.
        let half = vec!["0"; OTHER_WEIGHT_MAX / 2].join(",");
        assert!(parse(&format!(r#"{{"a": [{half}]}}"#)).is_ok());
        assert!(parse(&format!(r#"{{"a": [{half}], "b": [{half}]}}"#)).is_err());
        assert_eq!(json!(parse(r#"{"b": 1}"#).unwrap()), json!({"b": 1}));
    }
}
