//! The filter `tojson`, which writes JSON as Python does.

use std::io;

use minijinja::value::{Kwargs, Rest};
use minijinja::{ErrorKind, State, Value as Jinja};
use serde::Serialize;

use super::errors::refuse;
use super::hooks;
use super::limits::RENDERED_BYTES_MAX;
use crate::python_json::{INDENT_MAX, PythonFormatter, Style};

/// The filter `tojson(value, ensure_ascii=False, indent=None, separators=None,
/// sort_keys=False)`.
///
/// # Errors
///
/// If an option is unusable, the value has no form in JSON, or the output is too long.
pub(super) fn tojson(
    state: &mut State,
    value: &Jinja,
    args: Rest<Jinja>,
    kwargs: Kwargs,
) -> Result<Jinja, minijinja::Error> {
    const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
    if value.is_undefined() {
        return Err(refuse("tojson: the value is undefined"));
    }
    if args.len() > NAMES.len() {
        return Err(ErrorKind::TooManyArguments.into());
    }
    let option = |i: usize| -> Result<Option<Jinja>, minijinja::Error> {
        let value: Option<Jinja> = match args.get(i) {
            Some(value) => Some(value.clone()),
            None => kwargs.get(NAMES[i])?,
        };
        Ok(value.filter(|value| !value.is_none()))
    };
    let indent = match option(1)? {
        None => None,
        Some(value) => match value.as_usize() {
            Some(indent) if indent <= INDENT_MAX => Some(indent),
            _ => return Err(refuse("tojson: unusable indent")),
        },
    };
    let mut style = Style::new(option(0)?.is_some_and(|value| value.is_true()), indent);
    if let Some(separators) = option(2)? {
        let pair: Vec<String> = separators
            .try_iter()?
            .map(|separator| separator.as_str().map(str::to_owned))
            .collect::<Option<_>>()
            .ok_or(refuse("tojson: separators must be strings"))?;
        let [item, key]: [String; 2] = pair
            .try_into()
            .map_err(|_| refuse("tojson: separators must be two"))?;
        (style.item_separator, style.key_separator) = (item, key);
    }
    let sort_keys = option(3)?.is_some_and(|value| value.is_true());
    kwargs.assert_all_used()?;

    hooks::look(state, value)?;
    let mut out = Capped {
        bytes: Vec::new(),
        limit: RENDERED_BYTES_MAX,
    };
    let mut serializer =
        serde_json::Serializer::with_formatter(&mut out, PythonFormatter::new(&style));
    let result = if sort_keys {
        let mut json = serde_json::to_value(value).map_err(cannot_serialize)?;
        json.sort_all_objects();
        json.serialize(&mut serializer)
    } else {
        value.serialize(&mut serializer)
    };
    result.map_err(cannot_serialize)?;
    String::from_utf8(out.bytes)
        .map(Jinja::from)
        .map_err(|err| refuse("tojson: not text").with_source(err))
}

/// The error for a value that has no form in JSON.
fn cannot_serialize(err: serde_json::Error) -> minijinja::Error {
    minijinja::Error::new(
        ErrorKind::BadSerialization,
        "tojson: cannot write this value",
    )
    .with_source(err)
}

/// A buffer of at most `limit` bytes; beyond it, writing fails.
struct Capped {
    bytes: Vec<u8>,
    limit: usize,
}

impl io::Write for Capped {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.bytes.len().saturating_add(bytes.len()) > self.limit {
            return Err(io::Error::other("output is over its limit"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
