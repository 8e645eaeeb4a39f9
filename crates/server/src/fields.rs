//! The fields of a request, read by name.
//!
//! Absent and `null` mean the same. A value of the wrong type or out of range
//! is an error that names the field; there is no silent default.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use axum::http::HeaderValue;
use serde_json::{Map, Value};

use crate::errors::ApiError;
use crate::limits::{ECHO_CHARS_MAX, IGNORED_FIELDS_MAX};
use crate::table::{Kind, Table, Treatment};

/// A request's fields. Remembers which were asked for.
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    table: &'static Table,
    /// Where the map is in the request, with a trailing dot; empty at its top.
    prefix: &'static str,
    read: RefCell<Vec<&'static str>>,
    /// Paths of ignored fields of the objects inside.
    inner: RefCell<Vec<String>>,
}

impl<'a> Fields<'a> {
    /// The fields of a whole request.
    pub(crate) fn new(map: &'a Map<String, Value>, table: &'static Table) -> Self {
        Fields {
            map,
            table,
            prefix: "",
            read: RefCell::default(),
            inner: RefCell::default(),
        }
    }

    /// The fields of an object inside a request, at `prefix`.
    pub(crate) fn inside(&self, map: &'a Map<String, Value>, prefix: &'static str) -> Self {
        Fields {
            prefix,
            ..Fields::new(map, self.table)
        }
    }

    /// A field's value, unless it is absent or null.
    pub(crate) fn get(&self, name: &'static str) -> Option<&'a Value> {
        self.get_as(name, Kind::Any)
    }

    /// A field's value, unless it is absent or null. The caller takes it for one of `kind`.
    fn get_as(&self, name: &'static str, kind: Kind) -> Option<&'a Value> {
        debug_assert!(
            cfg!(test) || self.table.may_read(&format!("{}{name}", self.prefix), kind),
            "the table of fields does not list `{}{name}` as {kind:?}",
            self.prefix
        );
        self.read.borrow_mut().push(name);
        self.map.get(name).filter(|value| !value.is_null())
    }

    /// An error that names the field.
    pub(crate) fn error(&self, name: &str, message: impl Into<String>) -> ApiError {
        ApiError::field(format!("{}{name}", self.prefix), message)
    }

    pub(crate) fn bool(&self, name: &'static str) -> Result<Option<bool>, ApiError> {
        let wrong = || self.error(name, "must be true or false");
        self.get_as(name, Kind::Bool)
            .map(|value| value.as_bool().ok_or_else(wrong))
            .transpose()
    }

    pub(crate) fn string(&self, name: &'static str) -> Result<Option<&'a str>, ApiError> {
        let wrong = || self.error(name, "must be a string");
        self.get_as(name, Kind::Text)
            .map(|value| value.as_str().ok_or_else(wrong))
            .transpose()
    }

    pub(crate) fn object(
        &self,
        name: &'static str,
    ) -> Result<Option<&'a Map<String, Value>>, ApiError> {
        let wrong = || self.error(name, "must be an object");
        self.get_as(name, Kind::Object)
            .map(|value| value.as_object().ok_or_else(wrong))
            .transpose()
    }

    /// A number in `range`.
    pub(crate) fn number(
        &self,
        name: &'static str,
        range: RangeInclusive<f64>,
    ) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get_as(name, Kind::Number) else {
            return Ok(None);
        };
        let number = value.as_f64().filter(|x| range.contains(x));
        let wrong = || {
            let (low, high) = (range.start(), range.end());
            self.error(name, format!("must be a number from {low} to {high}"))
        };
        number.map(Some).ok_or_else(wrong)
    }

    /// A whole number in `range`; `3.0` counts as one.
    pub(crate) fn integer(
        &self,
        name: &'static str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get_as(name, Kind::Integer) else {
            return Ok(None);
        };
        let wrong = || {
            let (low, high) = (range.start(), range.end());
            self.error(name, format!("must be a whole number from {low} to {high}"))
        };
        whole(value)
            .filter(|x| range.contains(x))
            .map(Some)
            .ok_or_else(wrong)
    }

    /// Refuses the fields that the table refuses, unless they ask for nothing.
    ///
    /// # Errors
    ///
    /// 400 for the first of them.
    pub(crate) fn refuse(&self) -> Result<(), ApiError> {
        for (name, treatment) in self.table.refused(self.prefix) {
            let Some(value) = self.get(name) else {
                continue;
            };
            match treatment {
                Treatment::Renamed(instead) => {
                    let message = format!("is a field of another API; send `{instead}`");
                    return Err(self.error(name, message));
                }
                Treatment::Misplaced(place) => {
                    return Err(self.error(name, format!("belongs in `{place}`")));
                }
                Treatment::Refused(entry) if !entry.is_neutral(value) => {
                    let hint = match entry.neutral().first() {
                        Some(value) => format!(", or send {value}"),
                        None => String::new(),
                    };
                    let path = format!("{}{name}", self.prefix);
                    return Err(ApiError::unsupported(path, &hint));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Adds `paths` of fields inside objects to what the request has and nobody reads.
    pub(crate) fn note_ignored(&self, paths: impl IntoIterator<Item = String>) {
        self.inner.borrow_mut().extend(paths);
    }

    /// Paths of fields that the request has and that nobody has asked for, in order.
    /// Only plain ones, so that they can stand in a header and in a log.
    pub(crate) fn ignored(&self) -> Vec<String> {
        let read = self.read.borrow();
        let own = self.map.iter().filter(|(_, value)| !value.is_null());
        let own = own.filter(|(name, _)| !name.is_empty() && !read.contains(&name.as_str()));
        let own = own.map(|(name, _)| format!("{}{name}", self.prefix));
        let mut paths: Vec<String> = own.chain(self.inner.borrow().iter().cloned()).collect();
        paths.retain(|path| is_plain(path));
        paths.truncate(IGNORED_FIELDS_MAX);
        paths.sort_unstable();
        paths
    }
}

/// The header for what of a request changes nothing. The log names it too, but for what
/// is known to be harmless.
pub(crate) fn ignored_header(fields: &Fields<'_>) -> Option<HeaderValue> {
    let paths = fields.ignored();
    let odd = paths.iter().filter(|path| !fields.table.is_harmless(path));
    let odd: Vec<&str> = odd.map(String::as_str).collect();
    if !odd.is_empty() {
        tracing::warn!(fields = odd.join(", "), "unknown request fields ignored");
    }
    let header = (!paths.is_empty()).then(|| HeaderValue::from_str(&paths.join(", ")));
    header?.ok()
}

/// Whether a path can stand in a header and in a log as it is.
fn is_plain(path: &str) -> bool {
    (1..=ECHO_CHARS_MAX).contains(&path.len())
        && path
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"_-.[]".contains(&b))
}

/// A whole number, however it is spelled.
pub(crate) fn whole(value: &Value) -> Option<i64> {
    let exact = |x: f64| (x.fract() == 0.0 && x.abs() < 9e15).then_some(x as i64);
    value.as_i64().or_else(|| value.as_f64().and_then(exact))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::table::{Unsupported, unless};
    use serde_json::json;
    use std::sync::LazyLock;

    static ANY: LazyLock<Table> = LazyLock::new(|| Table::new("Any", &[]));

    #[test]
    fn values_are_read_or_named() {
        let value = json!({"a": 1, "b": 1.5, "c": "x", "d": null, "e": 3.0, "f": true, "g": 1e300});
        let fields = Fields::new(value.as_object().unwrap(), &ANY);
        assert_eq!(fields.integer("a", 0..=1).unwrap(), Some(1));
        assert_eq!(fields.integer("e", 0..=9).unwrap(), Some(3));
        assert_eq!(fields.number("b", 0.0..=2.0).unwrap(), Some(1.5));
        assert_eq!(fields.bool("d").unwrap(), None);
        assert_eq!(fields.bool("absent").unwrap(), None);
        assert!(fields.bool("f").unwrap().unwrap());
        for error in [
            fields.integer("a", 2..=3).unwrap_err(),
            fields.integer("b", 0..=3).unwrap_err(),
            fields.integer("g", 0..=i64::MAX).unwrap_err(),
            fields.number("g", 0.0..=2.0).unwrap_err(),
            fields.number("c", 0.0..=2.0).unwrap_err(),
            fields.bool("a").unwrap_err(),
            fields.string("a").unwrap_err(),
            fields.object("c").unwrap_err(),
        ] {
            assert_eq!(error.status(), 400);
        }
    }

    #[test]
    fn refused_fields_say_what_to_do() {
        static TABLE: LazyLock<Table> = LazyLock::new(|| {
            const REFUSED: &[Unsupported] = &[unless("n", "[1]"), unless("grammar", "[]")];
            Table::new("Odd", &[])
                .refuses("", REFUSED)
                .renames([("messages", "input")])
                .belong_in("options", ["seed"])
        });
        let check = |value: Value| Fields::new(value.as_object().unwrap(), &TABLE).refuse();
        for good in [
            json!({}),
            json!({"n": 1}),
            json!({"n": 1.0}),
            json!({"n": null, "grammar": null, "messages": null, "seed": null}),
        ] {
            assert!(check(good).is_ok());
        }
        for (bad, hint) in [
            (json!({"n": 2}), "or send 1"),
            (json!({"n": "1"}), "or send 1"),
            (json!({"grammar": ""}), "leave it out"),
            (json!({"messages": []}), "send `input`"),
            (json!({"seed": 1}), "belongs in `options`"),
        ] {
            let message = check(bad).unwrap_err().message;
            assert!(message.contains(hint), "{message}");
        }
    }

    #[test]
    fn ignored_fields_are_listed_if_they_fit_a_header() {
        let value = json!({"a": 1, "user": "u", "temprature": 1, "x\r\ny": 1, "": 1, "z": null});
        let fields = Fields::new(value.as_object().unwrap(), &ANY);
        let _ = fields.get("a");
        assert_eq!(fields.ignored(), ["temprature", "user"]);
        fields.note_ignored(["messages[0].b".to_owned(), "messages[0].\n".to_owned()]);
        assert_eq!(fields.ignored(), ["messages[0].b", "temprature", "user"]);
        let inner = fields.inside(value.as_object().unwrap(), "o.");
        let _ = inner.get("user");
        assert_eq!(inner.ignored(), ["o.a", "o.temprature"]);
    }
}
