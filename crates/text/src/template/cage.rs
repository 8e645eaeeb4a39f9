//! Hooks around the instructions that can make something large.
//!
//! The interpreter counts instructions, not what one costs: `x ~ x` is one, whether `x`
//! has ten bytes or a gigabyte. So the compiled program is rewritten before it runs.
//! Before an instruction that can be costly stands a hook that looks at the operands and
//! puts them back; after one that makes a value stands a hook that counts it:
//!
//! ```text
//! Add        →  ApplyFilter(check +, 2)  UnpackList(2)  Add  ApplyFilter(made, 1)
//! EmitRaw(s) →  LoadConst(s)  Emit
//! ```
//!
//! A hook is a filter whose name no template can spell. What an honest template computes
//! is computed by the same instructions as without hooks.

use std::collections::{BTreeMap, HashSet};
use std::fmt::Write;

use minijinja::machinery::{
    Instruction, Instructions, eval, get_compiled_template, make_string_output,
};
use minijinja::value::{Rest, Serde, ValueKind, ValueOrKwargs};
use minijinja::{AutoEscape, Environment, Error, Output, State, Value};
use serde_json::Map;

use super::cost;
use super::meter::{ITEM_BYTES, Meter, OBJECT_BYTES, refuse};
use super::nesting::SAME;

const START: &str = "\0start";
const ADD: &str = "\0add";
const REPEAT: &str = "\0repeat";
const CONCAT: &str = "\0concat";
const COMPARE: &str = "\0compare";
const CONTAINS: &str = "\0contains";
const SLICE: &str = "\0slice";
const ITEM: &str = "\0item";
const KEYS: &str = "\0keys";
const FILTER: &str = "\0filter";
const TEST: &str = "\0test";
const LOOK: &str = "\0look";
const ASSIGN: &str = "\0assign";
const CLOSURE: &str = "\0closure";
const UNPACK: &str = "\0unpack";
const BUILT: &str = "\0built";
const LISTED: &str = "\0listed";
const CAPTURED: &str = "\0captured";
const INCLUDE: &str = "\0include";

/// What a macro's closure takes.
const CLOSURE_BYTES: usize = 1 << 10;
/// Longest constant operand that a comparison is not checked for.
const SHORT_BYTES: usize = 64;

/// Renders the template `name`: the text so far, and why it ended early.
pub(super) fn render(
    env: &Environment<'_>,
    name: &str,
    context: &Map<String, serde_json::Value>,
) -> (String, Result<(), Error>) {
    let mut text = String::new();
    let result = (|| {
        let template = env.get_template(name)?;
        let compiled = get_compiled_template(&template);
        let code = caged(&compiled.instructions, Some(input_bytes(context)))?;
        let blocks: BTreeMap<_, _> = compiled
            .blocks
            .iter()
            .map(|(name, code)| Ok((*name, caged(code, None)?)))
            .collect::<Result<_, Error>>()?;
        let root = Value::from(Serde(context));
        let mut out = make_string_output(&mut text);
        eval(env, &code, root, &blocks, &mut out, AutoEscape::None).map(drop)
    })();
    (text, result)
}

/// What the context of a rendering takes, about.
fn input_bytes(context: &Map<String, serde_json::Value>) -> usize {
    fn bytes(value: &serde_json::Value) -> usize {
        const NODE: usize = 64;
        match value {
            serde_json::Value::String(text) => NODE + text.len(),
            serde_json::Value::Array(items) => NODE + items.iter().map(bytes).sum::<usize>(),
            serde_json::Value::Object(map) => {
                let entries = map
                    .iter()
                    .map(|(key, value)| NODE + key.len() + bytes(value));
                NODE + entries.sum::<usize>()
            }
            _ => NODE,
        }
    }
    context.values().map(bytes).sum()
}

/// A program with hooks, under construction.
struct Rewriter<'s> {
    code: Vec<(Instruction<'s>, u16)>,
    line: u16,
}

impl<'s> Rewriter<'s> {
    fn push(&mut self, instruction: Instruction<'s>) {
        self.code.push((instruction, self.line));
    }

    fn hook(&mut self, name: &'static str, n: u16) {
        self.push(Instruction::ApplyFilter(name, Some(n), !0));
    }

    /// Has the hook `name` look at the topmost `n` values.
    fn check(&mut self, name: &'static str, n: u16) {
        self.hook(name, n);
        self.push(Instruction::UnpackList(n.into()));
    }

    /// Has the hook `name` look at what is called and at the topmost `n` values.
    fn check_call(&mut self, name: &'static str, called: &str, n: u16) -> Result<(), Error> {
        let n_args = n.checked_add(1).ok_or_else(too_many)?;
        self.push(Instruction::LoadConst(Value::from(called)));
        self.hook(name, n_args);
        self.push(Instruction::UnpackList(n.into()));
        Ok(())
    }
}

fn too_many() -> Error {
    refuse("the template passes too many arguments")
}

fn counted(n: Option<u16>) -> Result<u16, Error> {
    n.ok_or_else(|| refuse("a chat template cannot unpack arguments with `*`"))
}

/// `code` with hooks. `input` starts a rendering with so many bytes of input.
fn caged<'s>(code: &Instructions<'s>, input: Option<usize>) -> Result<Instructions<'s>, Error> {
    use Instruction as I;
    let all = || (0..).map_while(|index| code.get(index));
    let targets: HashSet<u32> = all().filter_map(target).collect();
    let mut to = Rewriter {
        code: Vec::new(),
        line: 0,
    };
    if let Some(input) = input {
        to.push(I::LoadConst(Value::from(input)));
        to.hook(START, 1);
        to.push(I::DiscardTop);
    }
    // Where each instruction of `code` starts now.
    let mut starts = Vec::new();
    let mut before: Option<&I> = None;
    for (index, instruction) in (0..).zip(all()) {
        starts.push(to.code.len() as u32);
        to.line = code.get_line(index).unwrap_or(0) as u16;
        // A constant operand, if it is always this one.
        let operand = match before {
            Some(I::LoadConst(value)) if !targets.contains(&index) => Some(value),
            _ => None,
        };
        let is_short = operand.is_some_and(|value| match value.as_str() {
            Some(text) => text.len() <= SHORT_BYTES,
            None => value.as_object().is_none(),
        });
        let made: Option<&'static str> = match instruction {
            I::EmitRaw(text) => {
                to.push(I::LoadConst(Value::from(*text)));
                to.push(I::Emit);
                before = Some(instruction);
                continue;
            }
            I::Add => {
                to.check(ADD, 2);
                Some(LISTED)
            }
            I::Mul => {
                to.check(REPEAT, 2);
                Some(LISTED)
            }
            I::StringConcat => {
                to.check(CONCAT, 2);
                Some(LISTED)
            }
            I::Slice => {
                to.check(SLICE, 4);
                Some(LISTED)
            }
            I::Eq | I::Ne | I::Lt | I::Lte | I::Gt | I::Gte => {
                if !is_short {
                    to.check(COMPARE, 2);
                }
                None
            }
            I::CompareAndPreserve(_) => {
                to.check(CONTAINS, 2);
                to.check(COMPARE, 2);
                None
            }
            I::In => {
                to.check(CONTAINS, 2);
                None
            }
            I::GetItem => {
                if !operand.is_some_and(|key| is_short && key.as_str().is_some()) {
                    to.check(ITEM, 2);
                }
                None
            }
            I::BuildMap(n) => {
                let n = u16::try_from(*n * 2).map_err(|_| too_many())?;
                to.check(KEYS, n);
                Some(BUILT)
            }
            I::BuildList(_) | I::BuildTuple(_) => Some(BUILT),
            I::ApplyFilter(SAME, ..) => None,
            I::ApplyFilter(name, n, _) => {
                to.check_call(FILTER, name, counted(*n)?)?;
                if cost::PASSING.contains(name) {
                    None
                } else if cost::FLAT.contains(name) {
                    Some(LISTED)
                } else {
                    Some(BUILT)
                }
            }
            I::PerformTest(name, n, _) => {
                if !cost::CHEAP_TESTS.contains(name) {
                    to.check_call(TEST, name, counted(*n)?)?;
                }
                None
            }
            I::CallFunction(name, n) => {
                counted(*n)?;
                // A range is lazy and holds no other list.
                Some(if *name == "range" { LISTED } else { CAPTURED })
            }
            I::CallObject(n) => {
                counted(*n)?;
                Some(CAPTURED)
            }
            I::CallMethod(name, n) => {
                let n = counted(*n)?;
                if *name == "changed" {
                    to.check(LOOK, n);
                }
                // A macro of a namespace writes; a method of a text does not.
                Some(BUILT)
            }
            I::EndCapture => Some(CAPTURED),
            I::SetAttr(_) => {
                to.check(ASSIGN, 2);
                None
            }
            I::UnpackList(_) => {
                to.check(UNPACK, 1);
                None
            }
            I::BuildMacro(..) => {
                to.hook(CLOSURE, 0);
                to.push(I::DiscardTop);
                None
            }
            I::Include(_) | I::LoadBlocks => {
                to.hook(INCLUDE, 1);
                None
            }
            I::UnpackLists(_) | I::MergeKwargs(_) => {
                return Err(refuse("a chat template cannot unpack lists with `*`"));
            }
            _ => None,
        };
        to.push(instruction.clone());
        if let Some(name) = made {
            to.hook(name, 1);
        }
        before = Some(instruction);
    }
    starts.push(to.code.len() as u32);

    let mut caged = Instructions::new(code.name(), code.source());
    for (mut instruction, line) in to.code {
        if let Some(target) = target_mut(&mut instruction) {
            *target = starts[*target as usize];
        }
        caged.add_with_line(instruction, line);
    }
    Ok(caged)
}

fn target(instruction: &Instruction<'_>) -> Option<u32> {
    target_mut(&mut instruction.clone()).copied()
}

/// Where an instruction may go on instead of the next one.
fn target_mut<'a>(instruction: &'a mut Instruction<'_>) -> Option<&'a mut u32> {
    match instruction {
        Instruction::Iterate(target)
        | Instruction::Jump(target)
        | Instruction::JumpIfFalse(target)
        | Instruction::JumpIfFalseOrPop(target)
        | Instruction::JumpIfTrueOrPop(target)
        | Instruction::BuildMacro(_, target, _) => Some(target),
        _ => None,
    }
}

/// The budget of a rendering.
fn meter<'a>(state: &'a mut State) -> Result<&'a mut Meter, Error> {
    state
        .get_extension_mut::<Meter>()
        .ok_or_else(|| refuse("rendering has no budget"))
}

type Args = Rest<ValueOrKwargs>;

/// Adds a hook that looks at values and puts them back.
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

/// Adds a hook that looks at the name of what is called, on top of its arguments.
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

/// Adds a hook that counts a value and gives it back.
fn add_made(
    env: &mut Environment<'static>,
    name: &'static str,
    count: fn(&mut Meter, Value) -> Result<Value, Error>,
) {
    env.add_filter(name, move |state: &mut State, value: ValueOrKwargs| {
        count(meter(state)?, value.into_value())
    });
}

/// Adds the hooks to an interpreter.
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

fn is_list(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
}

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

/// Counts a text, or a list whose items were in other lists.
fn listed(meter: &mut Meter, value: Value) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        // Short texts are kept within a value, of whatever kind they were made.
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

/// Checks the call of a method.
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

/// Checks the serialization of a value.
pub(super) fn look(state: &mut State, value: &Value) -> Result<(), Error> {
    meter(state)?.look(value).map(drop)
}

/// Writes `value` as `text` has it, counted.
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
