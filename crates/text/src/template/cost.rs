//! The cost of filters, tests and methods, bounded from their arguments before they run.

use minijinja::Value;
use minijinja::value::ValueKind;

use super::errors::refuse;
use super::meter::{ITEM_BYTES, Meter, OBJECT_BYTES};

/// The first character of every hook's name; no template can spell it in a word.
pub(super) const HOOK: char = '\0';
/// Filters whose result existed before: an item, a number or the value itself.
pub(super) const PASSING: &[&str] = &[
    "attr", "d", "default", "first", "last", "max", "min", "abs", "bool", "float", "int", "length",
    "count", "round",
];
/// Filters that look at the items of a list but not into them.
const SHALLOW: &[&str] = &[
    "batch",
    "chain",
    "items",
    "list",
    "map",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "slice",
    "zip",
];
/// Filters that return a list whose items another list holds already.
pub(super) const FLAT: &[&str] = &[
    "lines",
    "list",
    "reject",
    "rejectattr",
    "reverse",
    "select",
    "selectattr",
    "sort",
    "split",
    "unique",
];
/// Tests that take the same time for values of every size.
pub(super) const CHEAP_TESTS: &[&str] = &[
    "boolean",
    "defined",
    "divisibleby",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "int",
    "integer",
    "iterable",
    "mapping",
    "none",
    "number",
    "odd",
    "safe",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
];

/// Whether the budget suffices.
type Checked = Result<(), minijinja::Error>;

/// The largest whole number among `args`, keyword arguments included; 0 if there is none.
fn largest(args: &[Value]) -> usize {
    let number = |value: &Value| value.as_usize().unwrap_or(0);
    args.iter()
        .map(|arg| match arg.as_object() {
            Some(object) if arg.is_kwargs() => object
                .try_iter_pairs()
                .into_iter()
                .flatten()
                .map(|(_, value)| number(&value))
                .max()
                .unwrap_or(0),
            _ => number(arg),
        })
        .max()
        .unwrap_or(0)
}

/// An upper bound of the bytes that a format string makes of arguments that print as `printed`
/// bytes and whose largest number is `largest`.
fn formatted(format: &str, printed: usize, largest: usize) -> usize {
    let mut widths: usize = 0;
    let mut run: usize = 0;
    for byte in format.bytes() {
        if byte.is_ascii_digit() {
            run = run.saturating_mul(10).saturating_add((byte - b'0').into());
        } else {
            widths = widths.saturating_add(run);
            run = 0;
        }
    }
    widths = widths.saturating_add(run);
    let n_fields = format.bytes().filter(|byte| b"%{".contains(byte)).count();
    let n_stars = format.bytes().filter(|byte| b"*{".contains(byte)).count();
    // A width counts characters, of four bytes where the fill is one of those.
    widths
        .saturating_add(n_stars.saturating_mul(largest))
        .saturating_mul(4)
        .saturating_add(n_fields.saturating_mul(printed.saturating_add(700)))
        .saturating_add(format.len())
}

/// The bytes of `text` with each `from` replaced by `to`, or more.
fn replaced(text: &str, from: &str, to: &str) -> usize {
    let n = match from {
        "" => text.len() + 1,
        _ => text.matches(from).count(),
    };
    n.saturating_mul(to.len()).saturating_add(text.len())
}

/// The argument at `index` if it is a text, else an empty text.
fn text(args: &[Value], index: usize) -> &str {
    args.get(index).and_then(Value::as_str).unwrap_or("")
}

/// Checks the call of the filter `name` with `args`, the filtered value first.
pub(super) fn filter(meter: &mut Meter, name: &str, args: &[Value]) -> Checked {
    let Some(value) = args.first() else {
        return Ok(());
    };
    if name.starts_with(HOOK) {
        return Err(refuse("no such filter"));
    }
    if PASSING.contains(&name) && !matches!(name, "min" | "max") {
        let n = value.as_str().map_or(0, str::len);
        if name == "attr" {
            args.get(1).map_or(Ok(()), |key| meter.key(key))?;
        }
        return meter.pass(n);
    }
    let sub = text(args, 1);
    if SHALLOW.contains(&name) {
        let n = meter.items(value)?;
        let others: usize = args[1..].iter().map(|arg| arg.len().unwrap_or(0)).sum();
        let largest = largest(args);
        meter.work(others)?;
        let paths: usize = others.min(1 << 20).saturating_mul(n);
        meter.pass(paths)?;
        let slots = match name {
            "batch" => n.saturating_add(largest),
            "slice" => n.saturating_add(largest.saturating_mul(4)),
            "chain" => n.saturating_add(others),
            "zip" => n.saturating_mul(args.len().saturating_add(2)),
            "items" => n.saturating_mul(4),
            _ => n,
        };
        meter.room(slots.saturating_mul(ITEM_BYTES))?;
        return each(meter, name, sub, args, n);
    }
    called(meter, name, args)
}

/// Checks what `map`, `select` and their kind do with each of `n` items: they call the filter
/// or test `sub`.
fn each(meter: &mut Meter, name: &str, sub: &str, args: &[Value], n: usize) -> Checked {
    let rest = match name {
        "map" | "select" | "reject" => args.get(2..),
        "selectattr" | "rejectattr" => args.get(3..),
        _ => return Ok(()),
    };
    let sub = if name.ends_with("attr") {
        text(args, 2)
    } else {
        sub
    };
    if sub.is_empty() || n == 0 {
        return Ok(());
    }
    if name == "map" && SHALLOW.contains(&sub) && matches!(sub, "map" | "select" | "reject") {
        return Err(refuse("map: a filter that applies filters"));
    }
    for item in args[0].try_iter()?.checked() {
        let item = item?;
        let item = match name {
            "selectattr" | "rejectattr" => text(args, 1)
                .split('.')
                .fold(item, |item, key| item.get_attr(key).unwrap_or_default()),
            _ => item,
        };
        let mut args = vec![item];
        args.extend(rest.unwrap_or_default().iter().cloned());
        if name == "map" {
            filter(meter, sub, &args)?;
            // The results live together, and none is looked at before all are there.
            let bytes: usize = args.iter().filter_map(Value::as_str).map(str::len).sum();
            meter.object(bytes.min(1 << 10))?;
        } else {
            test(meter, sub, &args)?;
        }
    }
    Ok(())
}

/// Checks the call of the test `name` with `args`, the tested value first.
pub(super) fn test(meter: &mut Meter, name: &str, args: &[Value]) -> Checked {
    match (args, name) {
        ([a, b], "in") => contains(meter, b, a),
        ([a, b], _) => meter.compare(a, b),
        ([a], _) => meter.pass(a.as_str().map_or(0, str::len)),
        _ => Ok(()),
    }
}

/// Checks `item in list`.
pub(super) fn contains(meter: &mut Meter, list: &Value, item: &Value) -> Checked {
    match (list.as_str(), item.as_str()) {
        (Some(list), _) => meter.pass(list.len()),
        (None, _) if list.kind() == ValueKind::Map => meter.key(item),
        (None, Some(text)) => {
            let n = list.len().unwrap_or(0);
            meter.work(n)?;
            meter.pass(n.saturating_mul(text.len()))
        }
        (None, None) if item.as_object().is_some() => {
            meter.look(item)?;
            meter.look(list).map(drop)
        }
        (None, None) => meter.work(list.len().unwrap_or(0)),
    }
}

/// Checks the call of the method `name` with `args`, the object first.
pub(super) fn method(meter: &mut Meter, name: &str, args: &[Value]) -> Checked {
    match (args, name) {
        ([_, key, ..], "get") => meter.key(key),
        ([value], "items" | "keys" | "values") => {
            let n = meter.items(value)?;
            meter.room(n.saturating_mul(4 * ITEM_BYTES))
        }
        ([value], "split" | "splitlines") => called(meter, name, std::slice::from_ref(value)),
        // `separator.join(list)` and `list|join(separator)`.
        ([separator, list], "join") => called(meter, name, &[list.clone(), separator.clone()]),
        _ => called(meter, name, args),
    }
}

/// Checks the call of a filter or method that looks at all of its arguments.
fn called(meter: &mut Meter, name: &str, args: &[Value]) -> Checked {
    let (mut nodes, mut printed) = (0_usize, 0_usize);
    for arg in args {
        match arg.as_str() {
            Some(text) => printed = printed.saturating_add(text.len()),
            None => {
                let size = meter.look(arg)?;
                nodes = nodes.saturating_add(size.nodes);
                printed = printed.saturating_add(size.printed.saturating_mul(6));
            }
        }
    }
    let largest = largest(args);
    let first = text(args, 0);
    meter.pass(printed)?;
    let bytes = match name {
        "indent" => {
            let widest = largest.max(text(args, 1).len()).max(4);
            let n_lines = first.matches('\n').count() + 1;
            n_lines
                .saturating_mul(widest)
                .saturating_add(first.len().saturating_mul(2))
        }
        "replace" => replaced(first, text(args, 1), text(args, 2)),
        "format" => formatted(first, printed, largest),
        "join" => {
            let n = match args.first() {
                Some(list) => meter.items(list)?,
                None => 0,
            };
            let separator = args
                .iter()
                .skip(1)
                .map(|arg| meter.printed(arg))
                .sum::<Result<usize, _>>()?;
            n.saturating_mul(separator).saturating_add(printed)
        }
        "split" | "lines" | "splitlines" => {
            let n = match text(args, 1) {
                "" if name == "split" => first.bytes().filter(u8::is_ascii_whitespace).count(),
                "" => first.bytes().filter(|&byte| byte == b'\n').count(),
                separator => first.matches(separator).count(),
            };
            (n + 1)
                .saturating_mul(ITEM_BYTES + OBJECT_BYTES)
                .saturating_add(printed)
        }
        "sum" | "sort" | "unique" | "groupby" | "dictsort" | "min" | "max" => {
            let n = match args.first() {
                Some(list) => meter.items(list)?,
                None => 0,
            };
            let rounds = match name {
                "sum" => n,
                _ => n.checked_ilog2().unwrap_or(0) as usize + 2,
            };
            meter.work(nodes.saturating_mul(rounds))?;
            meter.pass(printed.saturating_mul(rounds))?;
            n.saturating_mul(4 * ITEM_BYTES).saturating_add(printed)
        }
        // A set of characters is searched for each character.
        "strip" | "lstrip" | "rstrip" | "trim" => {
            meter.pass(first.len().saturating_mul(text(args, 1).len()))?;
            first.len()
        }
        // Each node has a line with an indentation of up to four times the nesting.
        "pprint" => printed.saturating_add(nodes.saturating_mul(800)),
        "string" | "tojson" | "safe" => printed,
        "escape" | "e" => printed.saturating_mul(6),
        _ => printed.saturating_mul(3),
    };
    meter.room(bytes)
}
