//! Puts hooks around the costly instructions of a compiled template; `sandbox` says why.

use std::collections::HashSet;

use minijinja::machinery::{Instruction, Instructions};
use minijinja::{Error, Value};

use super::cost;
use super::errors::refuse;
use super::hooks::{
    ADD, ASSIGN, BUILT, CAPTURED, CLOSURE, COMPARE, CONCAT, CONTAINS, FILTER, INCLUDE, ITEM, KEYS,
    LISTED, LOOK, REPEAT, SAME, SHORT_BYTES, SLICE, START, TEST, UNPACK,
};

/// A program with hooks, while it is written.
struct Rewriter<'s> {
    /// The instructions so far, each with its line of the source.
    code: Vec<(Instruction<'s>, u16)>,
    /// The line of the instructions that come next.
    line: u16,
}

impl<'s> Rewriter<'s> {
    /// Adds an instruction.
    fn push(&mut self, instruction: Instruction<'s>) {
        self.code.push((instruction, self.line));
    }

    /// Adds a call of the hook `name` with the topmost `n` values, which its result replaces.
    fn hook(&mut self, name: &'static str, n: u16) {
        self.push(Instruction::ApplyFilter(name, Some(n), !0));
    }

    /// Has the hook `name` look at the topmost `n` values and put them back.
    fn check(&mut self, name: &'static str, n: u16) {
        self.hook(name, n);
        self.push(Instruction::UnpackList(n.into()));
    }

    /// Has the hook `name` look at the name of what is `called` and at the topmost `n` values,
    /// and put the values back.
    fn check_call(&mut self, name: &'static str, called: &str, n: u16) -> Result<(), Error> {
        let n_args = n.checked_add(1).ok_or_else(too_many)?;
        self.push(Instruction::LoadConst(Value::from(called)));
        self.hook(name, n_args);
        self.push(Instruction::UnpackList(n.into()));
        Ok(())
    }

    /// Adds the hooks that look at the operands of `instruction`. `operand` is the topmost
    /// operand if it is a constant.
    ///
    /// # Errors
    ///
    /// If no template may use the instruction.
    fn check_operands(
        &mut self,
        instruction: &Instruction<'s>,
        operand: Option<&Value>,
    ) -> Result<(), Error> {
        use Instruction as I;
        match instruction {
            I::Add => self.check(ADD, 2),
            I::Mul => self.check(REPEAT, 2),
            I::StringConcat => self.check(CONCAT, 2),
            I::Slice => self.check(SLICE, 4),
            I::Eq | I::Ne | I::Lt | I::Lte | I::Gt | I::Gte if !operand.is_some_and(is_short) => {
                self.check(COMPARE, 2);
            }
            I::CompareAndPreserve(_) => {
                self.check(CONTAINS, 2);
                self.check(COMPARE, 2);
            }
            I::In => self.check(CONTAINS, 2),
            I::GetItem if !operand.is_some_and(|key| is_short(key) && key.as_str().is_some()) => {
                self.check(ITEM, 2);
            }
            I::BuildMap(n) => self.check(KEYS, u16::try_from(*n * 2).map_err(|_| too_many())?),
            I::ApplyFilter(SAME, ..) => {}
            I::ApplyFilter(name, n, _) => self.check_call(FILTER, name, counted(*n)?)?,
            I::PerformTest(name, n, _) if !cost::CHEAP_TESTS.contains(name) => {
                self.check_call(TEST, name, counted(*n)?)?;
            }
            I::CallFunction(_, n) | I::CallObject(n) => drop(counted(*n)?),
            I::CallMethod(name, n) => {
                let n = counted(*n)?;
                if *name == "changed" {
                    self.check(LOOK, n);
                }
            }
            I::SetAttr(_) => self.check(ASSIGN, 2),
            I::UnpackList(_) => self.check(UNPACK, 1),
            I::BuildMacro(..) => {
                self.hook(CLOSURE, 0);
                self.push(I::DiscardTop);
            }
            I::Include(_) | I::LoadBlocks => self.hook(INCLUDE, 1),
            I::UnpackLists(_) | I::MergeKwargs(_) => {
                return Err(refuse("a chat template cannot unpack lists with `*`"));
            }
            _ => {}
        }
        Ok(())
    }
}

/// The error for a call with more arguments than a hook can take.
fn too_many() -> Error {
    refuse("the template passes too many arguments")
}

/// The number of arguments of a call.
///
/// # Errors
///
/// If it is not known before the template runs.
fn counted(n: Option<u16>) -> Result<u16, Error> {
    n.ok_or_else(|| refuse("a chat template cannot unpack arguments with `*`"))
}

/// Returns `code` with hooks around its costly instructions. With `input`, it starts a
/// rendering whose arguments take so many bytes; a block goes on with the budget that it finds.
///
/// # Errors
///
/// If it has an instruction that no template may use.
pub(super) fn with_hooks<'s>(
    code: &Instructions<'s>,
    input: Option<usize>,
) -> Result<Instructions<'s>, Error> {
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
        if let I::EmitRaw(text) = instruction {
            to.push(I::LoadConst(Value::from(*text)));
            to.push(I::Emit);
        } else {
            // A constant operand, if it is always this one.
            let operand = match before {
                Some(I::LoadConst(value)) if !targets.contains(&index) => Some(value),
                _ => None,
            };
            to.check_operands(instruction, operand)?;
            to.push(instruction.clone());
            if let Some(name) = counted_by(instruction) {
                to.hook(name, 1);
            }
        }
        before = Some(instruction);
    }
    starts.push(to.code.len() as u32);

    let mut out = Instructions::new(code.name(), code.source());
    for (mut instruction, line) in to.code {
        if let Some(target) = target_mut(&mut instruction) {
            *target = starts[*target as usize];
        }
        out.add_with_line(instruction, line);
    }
    Ok(out)
}

/// The hook that counts the value made by `instruction`; `None` if the value is never large.
fn counted_by(instruction: &Instruction<'_>) -> Option<&'static str> {
    use Instruction as I;
    match instruction {
        I::Add | I::Mul | I::StringConcat | I::Slice => Some(LISTED),
        I::BuildMap(_) | I::BuildList(_) | I::BuildTuple(_) => Some(BUILT),
        I::ApplyFilter(SAME, ..) => None,
        I::ApplyFilter(name, ..) if cost::PASSING.contains(name) => None,
        I::ApplyFilter(name, ..) if cost::FLAT.contains(name) => Some(LISTED),
        I::ApplyFilter(..) => Some(BUILT),
        // A range is lazy and holds no other list.
        I::CallFunction("range", _) => Some(LISTED),
        I::CallFunction(..) | I::CallObject(_) | I::EndCapture => Some(CAPTURED),
        // A macro of a namespace writes; a method of a text does not.
        I::CallMethod(..) => Some(BUILT),
        _ => None,
    }
}

/// Whether a constant is cheap to compare: neither a list nor a text of more than
/// [`SHORT_BYTES`].
fn is_short(value: &Value) -> bool {
    match value.as_str() {
        Some(text) => text.len() <= SHORT_BYTES,
        None => value.as_object().is_none(),
    }
}

/// The number of the instruction that may come after `instruction` instead of the next one.
fn target(instruction: &Instruction<'_>) -> Option<u32> {
    target_mut(&mut instruction.clone()).copied()
}

/// The number of the instruction that may come after `instruction` instead of the next one, to
/// be changed.
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
