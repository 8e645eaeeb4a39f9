//! Whether two subschemas can be proven to have no value in common.
//!
//! `oneOf` asks for exactly one of its subschemas. A grammar can only say "one of them, or
//! more", which is the same where no two of them have a value in common.

use serde_json::{Map, Value};

use super::references;

/// How many subschemas a proof may look at.
const WORK_MAX: usize = 20_000;
/// How deep a proof may go.
const DEPTH_MAX: usize = 24;

/// Bits of the types of JSON; a number that is no integer has the second bit of the two.
const NULL: u8 = 1;
const BOOLEAN: u8 = 2;
const INTEGER: u8 = 4;
const FRACTION: u8 = 8;
const STRING: u8 = 16;
const ARRAY: u8 = 32;
const OBJECT: u8 = 64;
const ANY: u8 = 127;

/// A search for a proof in the original schema `root`.
pub(super) struct Proof<'a> {
    root: &'a Value,
    work: usize,
}

/// What is known of the values of a subschema; each subschema in `parts` holds for all of them.
struct Facts<'a> {
    types: u8,
    values: Option<Vec<&'a Value>>,
    parts: Vec<&'a Map<String, Value>>,
}

impl<'a> Proof<'a> {
    pub(super) fn new(root: &'a Value) -> Self {
        Self { root, work: 0 }
    }

    /// Whether no value is valid under both `a` and `b`. `false` where that is not known.
    pub(super) fn apart(&mut self, a: &'a Value, b: &'a Value) -> bool {
        self.apart_within(a, b, DEPTH_MAX)
    }

    fn apart_within(&mut self, a: &'a Value, b: &'a Value, depth: usize) -> bool {
        self.work += 1;
        let Some(depth) = depth.checked_sub(1).filter(|_| self.work <= WORK_MAX) else {
            return false;
        };
        let (Some(fa), Some(fb)) = (self.facts(a, depth), self.facts(b, depth)) else {
            // One of them has no value at all.
            return true;
        };
        let common = fa.types & fb.types;
        if common == 0 || values_apart(&fa, &fb) {
            return true;
        }
        let numeric = INTEGER | FRACTION;
        if common & !numeric == 0 && bounds_apart(&fa, &fb) {
            return true;
        }
        if common == OBJECT && self.objects_apart(&fa, &fb, depth) {
            return true;
        }
        self.options_apart(&fa, b, depth) || self.options_apart(&fb, a, depth)
    }

    /// What is known of `schema`; `None` if it has no value.
    fn facts(&mut self, schema: &'a Value, depth: usize) -> Option<Facts<'a>> {
        let mut facts = Facts {
            types: ANY,
            values: None,
            parts: Vec::new(),
        };
        let mut open = vec![(schema, depth)];
        while let Some((schema, depth)) = open.pop() {
            let map = match schema {
                Value::Bool(false) => return None,
                Value::Object(map) => map,
                _ => continue,
            };
            self.work += 1;
            facts.parts.push(map);
            if let Some(types) = map.get("type") {
                facts.types &= types_of(types);
            }
            let values = match (map.get("const"), map.get("enum")) {
                (Some(value), _) => Some(vec![value]),
                (None, Some(Value::Array(values))) => Some(values.iter().collect()),
                _ => None,
            };
            if let Some(values) = values {
                facts.types &= values.iter().fold(0, |types, value| types | type_of(value));
                facts.values.get_or_insert(values);
            }
            let Some(depth) = depth.checked_sub(1) else {
                continue;
            };
            let all = map.get("allOf").and_then(Value::as_array);
            open.extend(all.into_iter().flatten().map(|schema| (schema, depth)));
            if let Some(reference) = map.get("$ref").and_then(Value::as_str)
                && let Some(pointer) = references::pointer(self.root, reference)
                && let Some(target) = references::resolve(self.root, &pointer)
            {
                open.push((target, depth));
            }
        }
        (facts.types != 0).then_some(facts)
    }

    /// Whether a property that both or one must have is of values that are apart.
    fn objects_apart(&mut self, a: &Facts<'a>, b: &Facts<'a>, depth: usize) -> bool {
        let names = |facts: &Facts<'a>| {
            let lists = facts.parts.iter();
            let lists = lists.filter_map(|part| part.get("required")?.as_array());
            lists
                .flatten()
                .filter_map(Value::as_str)
                .collect::<Vec<_>>()
        };
        let required = [names(a), names(b)].concat();
        required.into_iter().any(|name| {
            if has_no(a, name) || has_no(b, name) {
                return true;
            }
            let (of_a, of_b) = (properties(a, name), properties(b, name));
            let mut pairs = of_a.iter().flat_map(|a| of_b.iter().map(move |b| (a, b)));
            pairs.any(|(a, b)| self.apart_within(a, b, depth))
        })
    }

    /// Whether every alternative of one of the subschemas is apart from `other`.
    fn options_apart(&mut self, facts: &Facts<'a>, other: &'a Value, depth: usize) -> bool {
        let keys = ["anyOf", "oneOf"];
        let lists = facts.parts.iter();
        let lists = lists.flat_map(|part| keys.iter().filter_map(|key| part.get(*key)?.as_array()));
        let lists: Vec<_> = lists.collect();
        lists.into_iter().any(|options| {
            let mut options = options.iter();
            options.all(|option| self.apart_within(option, other, depth))
        })
    }
}

/// Whether objects of `facts` cannot have the property `name`.
fn has_no(facts: &Facts<'_>, name: &str) -> bool {
    facts.parts.iter().any(|part| {
        let listed = part.get("properties").and_then(|all| all.get(name));
        part.get("additionalProperties") == Some(&Value::Bool(false))
            && listed.is_none()
            && part.get("patternProperties").is_none()
    })
}

/// The subschemas that `facts` lists for the property `name`.
fn properties<'a>(facts: &Facts<'a>, name: &str) -> Vec<&'a Value> {
    let parts = facts.parts.iter();
    parts
        .filter_map(|part| part.get("properties")?.get(name))
        .collect()
}

/// Whether one of two subschemas lists its values, and none of them can be the other's.
fn values_apart(a: &Facts<'_>, b: &Facts<'_>) -> bool {
    let within = |value: &Value, facts: &Facts<'_>| {
        facts.types & type_of(value) != 0
            && facts
                .values
                .as_ref()
                .is_none_or(|all| all.iter().any(|other| equal(value, other)))
    };
    let all_outside = |values: &Option<Vec<&Value>>, facts: &Facts<'_>| {
        let values = values.as_ref();
        values.is_some_and(|values| values.iter().all(|value| !within(value, facts)))
    };
    // Lists of different lengths: the shorter one decides as well.
    match (&a.values, &b.values) {
        (Some(x), Some(y)) if x.len().saturating_mul(y.len()) > 1 << 18 => false,
        _ => all_outside(&a.values, b) || all_outside(&b.values, a),
    }
}

/// Whether the numbers of one end before those of the other begin.
fn bounds_apart(a: &Facts<'_>, b: &Facts<'_>) -> bool {
    let bound = |facts: &Facts<'_>, keys: [&str; 2], pick: fn(f64, f64) -> f64, from: f64| {
        let parts = facts.parts.iter();
        let bounds = parts.flat_map(|part| keys.iter().filter_map(|key| part.get(*key)?.as_f64()));
        bounds.fold(from, pick)
    };
    let range = |facts: &Facts<'_>| {
        let low = ["minimum", "exclusiveMinimum"];
        let high = ["maximum", "exclusiveMaximum"];
        (
            bound(facts, low, f64::max, f64::NEG_INFINITY),
            bound(facts, high, f64::min, f64::INFINITY),
        )
    };
    let ((a_low, a_high), (b_low, b_high)) = (range(a), range(b));
    a_high < b_low || b_high < a_low
}

/// The types that the value of a `type` keyword names.
fn types_of(value: &Value) -> u8 {
    let one = |name: &str| match name {
        "null" => NULL,
        "boolean" => BOOLEAN,
        "integer" => INTEGER,
        "number" => INTEGER | FRACTION,
        "string" => STRING,
        "array" => ARRAY,
        "object" => OBJECT,
        _ => ANY,
    };
    match value {
        Value::String(name) => one(name),
        Value::Array(names) => {
            let names = names.iter().filter_map(Value::as_str);
            names.fold(0, |types, name| types | one(name))
        }
        _ => ANY,
    }
}

fn type_of(value: &Value) -> u8 {
    match value {
        Value::Null => NULL,
        Value::Bool(_) => BOOLEAN,
        Value::Number(number) => match number.as_f64() {
            Some(number) if number.fract() == 0.0 => INTEGER,
            _ => FRACTION,
        },
        Value::String(_) => STRING,
        Value::Array(_) => ARRAY,
        Value::Object(_) => OBJECT,
    }
}

/// Equality as JSON Schema defines it: `1` and `1.0` are equal.
pub(super) fn equal(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a == b || a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b))
        }
        (Value::Object(a), Value::Object(b)) => {
            let same = |(key, a)| b.get(key).is_some_and(|b| equal(a, b));
            a.len() == b.len() && a.iter().all(same)
        }
        _ => a == b,
    }
}
