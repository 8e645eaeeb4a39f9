//! The hooks of a template in the sandbox: they check operands, count values and refuse what
//! no template may do.

use std::fmt::Write;

use minijinja::value::{Rest, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, Output, State, Value};

use super::cost;
use super::errors::refuse;
use super::meter::{ITEM_BYTES, Meter, OBJECT_BYTES};

/// The hook that gives a rendering its budget.
pub(super) const START: &str = "\0start";
/// The hook that checks the operands of `+`.
pub(super) const ADD: &str = "\0add";
/// The hook that checks the operands of `*`.
pub(super) const REPEAT: &str = "\0repeat";
/// The hook that checks the operands of `~`.
pub(super) const CONCAT: &str = "\0concat";
/// The hook that checks the operands of a comparison.
pub(super) const COMPARE: &str = "\0compare";
/// The hook that checks the operands of `in`.
pub(super) const CONTAINS: &str = "\0contains";
/// The hook that checks the value and the bounds of a slice.
pub(super) const SLICE: &str = "\0slice";
/// The hook that checks a list and the index or key of an item.
pub(super) const ITEM: &str = "\0item";
/// The hook that checks the keys of a new map.
pub(super) const KEYS: &str = "\0keys";
/// The hook that checks the call of a filter.
pub(super) const FILTER: &str = "\0filter";
/// The hook that checks the call of a test.
pub(super) const TEST: &str = "\0test";
/// The hook that counts a look at all of some values.
pub(super) const LOOK: &str = "\0look";
/// The hook that checks a value that a namespace is to hold.
pub(super) const ASSIGN: &str = "\0assign";
/// The hook that counts the closure of a macro.
pub(super) const CLOSURE: &str = "\0closure";
/// The hook that checks a list that is to be unpacked.
pub(super) const UNPACK: &str = "\0unpack";
/// The hook that counts a new value and all within it.
pub(super) const BUILT: &str = "\0built";
/// The hook that counts a new text, or a list whose items other lists hold already.
pub(super) const LISTED: &str = "\0listed";
/// The hook that counts a value that was written as text.
pub(super) const CAPTURED: &str = "\0captured";
/// The hook that refuses to load another template.
pub(super) const INCLUDE: &str = "\0include";

/// Bytes that the closure of a macro takes.
const CLOSURE_BYTES: usize = 1 << 10;
/// Longest constant text whose comparison is not checked, in bytes.
pub(super) const SHORT_BYTES: usize = 64;

/// The name of a filter that returns its value unchanged (`source` says what for).
pub(super) const SAME: &str = "same_value";

/// The budget of the running rendering.
fn meter<'a>(state: &'a mut State) -> Result<&'a mut Meter, Error> {
    state
        .get_extension_mut::<Meter>()
        .ok_or_else(|| refuse("rendering has no budget"))
}

/// All arguments of a hook.
type Args = Rest<ValueOrKwargs>;

/// Adds the hook `name`, which has `check` look at values and puts them back.
fn add_check(
    env: &mut Environment<'static>,
    name: &'static str,
    check: fn(&mut Meter, &[Value]) -> Result<(), Error>,
) {
    env.add_filter(name, move |state: &mut State, args: Args| {
        let mut args = args.into_values();
        check(meter(state)?, &args)?;
        // Unpacking pushes the first item last.
        args.reverse();
        Ok::<_, Error>(Value::from(args))
    });
}

/// Adds the hook `name`, which has `check` look at the name of what is called and at its
/// arguments, and puts the arguments back.
fn add_call_check(
    env: &mut Environment<'static>,
    name: &'static str,
    check: fn(&mut Meter, &str, &[Value]) -> Result<(), Error>,
) {
    env.add_filter(name, move |state: &mut State, args: Args| {
        let mut args = args.into_values();
        let called = args.pop().unwrap_or_default();
        check(meter(state)?, called.as_str().unwrap_or(""), &args)?;
        args.reverse();
        Ok::<_, Error>(Value::from(args))
    });
}

/// Adds the hook `name`, which has `count` count a value and puts it back.
fn add_made(
    env: &mut Environment<'static>,
    name: &'static str,
    count: fn(&mut Meter, Value) -> Result<Value, Error>,
) {
    env.add_filter(name, move |state: &mut State, value: ValueOrKwargs| {
        count(meter(state)?, value.into_value())
    });
}

/// Adds all hooks to an interpreter.
pub(super) fn add_hooks(env: &mut Environment<'static>) {
    env.remove_global("debug");
    env.add_filter(SAME, |value: ValueOrKwargs| value.into_value());
    env.add_filter(START, |state: &mut State, input: usize| {
        state.get_or_insert_extension_with(|| Meter::new(input));
    });
    env.add_filter(CLOSURE, |state: &mut State, _: Args| {
        meter(state)?.object(CLOSURE_BYTES)
    });
    env.add_filter(INCLUDE, |_: Value| -> Result<Value, Error> {
        Err(refuse("a chat template cannot load another"))
    });
    add_check(env, ADD, add);
    add_check(env, REPEAT, repeat);
    add_check(env, CONCAT, |meter, args| {
        let bytes = [meter.printed(&args[0])?, meter.printed(&args[1])?];
        meter.room(bytes[0].saturating_add(bytes[1]))
    });
    add_check(env, COMPARE, |meter, args| {
        meter.compare(&args[0], &args[1])
    });
    add_check(env, CONTAINS, |meter, args| {
        cost::contains(meter, &args[1], &args[0])
    });
    add_check(env, SLICE, |meter, args| {
        let n = match args[0].as_str() {
            Some(text) => text.len(),
            None => meter.items(&args[0])?.saturating_mul(ITEM_BYTES),
        };
        // Backwards, a text is first cut into characters of four bytes.
        meter.room(n.saturating_mul(4))
    });
    add_check(env, ITEM, |meter, args| {
        meter.pass(args[0].as_str().map_or(0, str::len))?;
        if args[0].kind() == ValueKind::Iterable {
            meter.items(&args[0])?;
        }
        meter.key(&args[1])
    });
    add_check(env, KEYS, |meter, args| {
        meter.object(OBJECT_BYTES + args.len() * 2 * ITEM_BYTES)?;
        args.iter().step_by(2).try_for_each(|key| meter.key(key))
    });
    add_check(env, LOOK, |meter, args| {
        args.iter().try_for_each(|arg| meter.look(arg).map(drop))
    });
    add_check(env, UNPACK, |meter, args| {
        let n = meter.items(&args[0])?;
        meter.room(n.saturating_mul(ITEM_BYTES))
    });
    add_check(env, ASSIGN, |meter, args| {
        meter.object(OBJECT_BYTES)?;
        // The namespace is on top, the value below it.
        meter.keep(&args[0], Some(&args[1]))
    });
    add_call_check(env, FILTER, cost::filter);
    add_call_check(env, TEST, cost::test);
    add_made(env, LISTED, listed);
    add_made(env, BUILT, built);
    add_made(env, CAPTURED, |meter, value| {
        meter.captured(value.as_str().map_or(0, str::len));
        built(meter, value)
    });
}

/// Whether a value is a list, or gives items one after another.
fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

/// Checks `a + b`: two texts or two lists become a longer one.
fn add(meter: &mut Meter, args: &[Value]) -> Result<(), Error> {
    let (a, b) = (&args[0], &args[1]);
    match (a.as_str(), b.as_str()) {
        (Some(a), Some(b)) => meter.room(a.len().saturating_add(b.len())),
        _ if is_list(a) && is_list(b) => {
            let n = meter.items(a)?.saturating_add(meter.items(b)?);
            meter.list(n, 0)
        }
        _ => Ok(()),
    }
}

/// Checks `a * n` of a text or a list.
fn repeat(meter: &mut Meter, args: &[Value]) -> Result<(), Error> {
    let (value, times) = match (args[0].as_usize(), args[1].as_usize()) {
        (None, Some(times)) => (&args[0], times),
        (Some(times), None) => (&args[1], times),
        _ => return Ok(()),
    };
    if let Some(text) = value.as_str() {
        meter.room(text.len().saturating_mul(times))
    } else if is_list(value) {
        let n = meter.items(value)?.saturating_mul(times);
        meter.list(n, n.saturating_mul(ITEM_BYTES))
    } else {
        Ok(())
    }
}

/// Counts a new text, or a new list whose items other lists hold already.
fn listed(meter: &mut Meter, value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        // A short text is kept inside the value: it takes no memory of its own.
        if text.len() <= SHORT_BYTES / 4 && !value.is_safe() {
            return Ok(Value::from(text));
        }
        meter.string(&value)?;
        return Ok(value);
    }
    let n = match value.kind() {
        ValueKind::Iterable => return meter.collect(value),
        ValueKind::Seq => value.len().unwrap_or(0),
        _ => return Ok(value),
    };
    meter.object(OBJECT_BYTES + n * ITEM_BYTES)?;
    for item in value.try_iter()? {
        meter.string(&item)?;
    }
    Ok(value)
}

/// Counts a new value and all within it.
fn built(meter: &mut Meter, value: Value) -> Result<Value, Error> {
    let value = listed(meter, value)?;
    if value.as_object().is_some() && !value.is_kwargs() {
        meter.keep(&value, None)?;
        if value.kind() == ValueKind::Map {
            let n = value.len().unwrap_or(0);
            meter.object(OBJECT_BYTES + n * 2 * ITEM_BYTES)?;
        }
    }
    Ok(value)
}

/// Checks the call of the method `name` of `value`.
pub(super) fn method(
    state: &mut State,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<(), Error> {
    let mut all = vec![value.clone()];
    all.extend(args.iter().cloned());
    cost::method(meter(state)?, name, &all)
}

/// Counts a look at all of a value that is to be written as JSON.
pub(super) fn look(state: &mut State, value: &Value) -> Result<(), Error> {
    meter(state)?.look(value).map(drop)
}

/// Prints a value and counts the text.
pub(super) fn write(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let bytes = meter(state)?.printed(value)?;
    if let Some(text) = value.as_str() {
        meter(state)?.write(bytes)?;
        if matches!(state.auto_escape(), AutoEscape::None) {
            return out.write_str(text).map_err(Error::from);
        }
        return minijinja::escape_formatter(out, state, value);
    }
    if value.as_object().is_none() || !matches!(state.auto_escape(), AutoEscape::None) {
        meter(state)?.write(bytes)?;
        return minijinja::escape_formatter(out, state, value);
    }
    meter(state)?.room(bytes)?;
    let mut text = String::new();
    write!(text, "{value}")?;
    meter(state)?.write(text.len())?;
    out.write_str(&text).map_err(Error::from)
}
