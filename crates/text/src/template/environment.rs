//! The interpreter that templates run in: the names they may call, and how values print.

use std::borrow::Cow;
use std::time::SystemTime;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::ValueKind;
use minijinja::{Environment, ErrorKind, Output, State, Value as Jinja};

use super::errors::{Raised, refuse};
use super::hooks;
use super::limits::{FUEL, RECURSION_MAX};
use super::tojson::tojson;
use crate::python_json::python_float;
use crate::strftime::{self, strftime};

/// An interpreter with the names that `transformers` gives to templates, and with the hooks of
/// the sandbox.
pub(super) fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build();
    env.set_syntax(syntax.expect("the default delimiters are valid"));
    env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(RECURSION_MAX);
    env.set_unknown_method_callback(method);
    env.set_formatter(print);
    hooks::add_hooks(&mut env);
    env.add_filter("tojson", tojson);
    env.add_test("sequence", is_sequence);
    env.add_function(
        "raise_exception",
        |message: Cow<'_, str>| -> Result<Jinja, minijinja::Error> {
            Err(
                minijinja::Error::new(ErrorKind::InvalidOperation, "refused by the template")
                    .with_source(Raised(message.into_owned())),
            )
        },
    );
    env.add_function("strftime_now", |format: Cow<'_, str>| {
        if format.len() > strftime::FORMAT_BYTES_MAX {
            return Err(refuse("strftime_now: the format is too long"));
        }
        let now = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        Ok(strftime(&format, now.as_secs() as i64))
    });
    env
}

/// Prints a value as Python does; the interpreter itself would print floats without an
/// exponent.
fn print(out: &mut Output, state: &mut State, value: &Jinja) -> Result<(), minijinja::Error> {
    if value.kind() == ValueKind::Number && !value.is_integer() {
        let x = f64::try_from(value.clone())?;
        return out
            .write_str(&python_float(x))
            .map_err(|_| ErrorKind::WriteFailure.into());
    }
    hooks::write(out, state, value)
}

/// The test `sequence` of Jinja2: everything with a length and an index, strings and mappings
/// included.
fn is_sequence(value: &Jinja) -> bool {
    matches!(
        value.kind(),
        ValueKind::Seq | ValueKind::String | ValueKind::Map
    )
}

/// Calls a Python method that templates use and the interpreter lacks, such as
/// `text.removeprefix('a')`.
fn method(
    state: &mut State,
    value: &Jinja,
    name: &str,
    args: &[Jinja],
) -> Result<Jinja, minijinja::Error> {
    hooks::method(state, value, name, args)?;
    if let (Some(text), [arg]) = (value.as_str(), args)
        && let Some(affix) = arg.as_str()
    {
        match name {
            "removeprefix" => return Ok(text.strip_prefix(affix).unwrap_or(text).into()),
            "removesuffix" => return Ok(text.strip_suffix(affix).unwrap_or(text).into()),
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}
