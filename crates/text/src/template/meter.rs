//! The budget of one rendering: work, memory and text.
//!
//! No clock: work is counted in steps that take some ten nanoseconds each, so that a slow
//! machine renders what a fast one renders.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use minijinja::value::ValueKind;
use minijinja::{ErrorKind, Value};

use super::errors::refuse;
use super::limits::{COUNTED_BYTES_MAX, RENDERED_BYTES_MAX};

/// Bytes that the values of a template may take, in addition to [`INPUT_SHARE`] times its
/// input.
pub(super) const VALUE_BYTES_MAX: usize = 8 << 20;
/// How many copies of its input a template may hold: a message is trimmed, split, joined and
/// wrapped, some five copies that live at the same time.
const INPUT_SHARE: usize = 16;
/// Steps of work in addition to one for each byte of input.
const WORK: usize = 4_000_000;
/// Bytes of unfinished text (the prompt, macros, captures), in addition to [`INPUT_SHARE`] times
/// the input.
const WRITTEN_BYTES_MAX: usize = RENDERED_BYTES_MAX + (64 << 10);
/// Most lists and maps inside each other; the JSON of a request has at most 128.
const NESTING_MAX: usize = 200;
/// Most items of one list.
const ITEMS_MAX: usize = 1 << 20;
/// Bytes that are compared, copied or searched in one step of work.
const STEP_BYTES: usize = 64;
/// Longest string that the interpreter keeps inside a value, in bytes.
const INLINE_BYTES: usize = 22;
/// Bytes that a string takes beside its text: counters, pointers and our note of it.
const STRING_BYTES: usize = 64;
/// Bytes of a list or map without its items.
pub(super) const OBJECT_BYTES: usize = 96;
/// Bytes of a value in a list, or of half an entry of a map.
pub(super) const ITEM_BYTES: usize = 32;
/// Bytes of the longest number as text: 309 digits of a float, a sign and a fraction.
const NUMBER_BYTES: usize = 330;

/// The budget of one rendering: what is used, and what is allowed.
pub(super) struct Meter {
    /// Steps of work that are left.
    work: usize,
    /// Most bytes of all values.
    value_bytes_max: usize,
    /// Most bytes of unfinished text.
    written_max: usize,
    /// Bytes of lists and maps that were made; they count until the end.
    objects: usize,
    /// The strings that a template has made or met, by address.
    strings: HashMap<usize, Weak<str>>,
    /// Bytes of these strings when they were last counted.
    string_bytes: usize,
    /// Bytes written to the prompt or into captures that have not ended.
    written: usize,
}

/// The size of a value with all within it.
#[derive(Clone, Copy, Default)]
pub(super) struct Size {
    /// Number of values: itself, items, keys.
    pub nodes: usize,
    /// An upper bound of its text in bytes.
    pub printed: usize,
}

/// Whether a value is a list, a map or another object of the interpreter.
fn is_object(value: &Value) -> bool {
    value.as_object().is_some()
}

impl Meter {
    /// The budget of a rendering whose arguments take `input` bytes.
    pub(super) fn new(input: usize) -> Self {
        let share = input.saturating_mul(INPUT_SHARE);
        Self {
            work: WORK.saturating_add(input),
            value_bytes_max: VALUE_BYTES_MAX.saturating_add(share),
            written_max: WRITTEN_BYTES_MAX
                .saturating_add(share)
                .min(COUNTED_BYTES_MAX),
            objects: 0,
            strings: HashMap::new(),
            string_bytes: 0,
            written: 0,
        }
    }

    /// Counts `steps` of work.
    ///
    /// # Errors
    ///
    /// If that many are not left.
    pub(super) fn work(&mut self, steps: usize) -> Result<(), minijinja::Error> {
        match self.work.checked_sub(steps) {
            Some(left) => {
                self.work = left;
                Ok(())
            }
            None => Err(minijinja::Error::from(ErrorKind::OutOfFuel)),
        }
    }

    /// Counts the work of a pass over `bytes`.
    pub(super) fn pass(&mut self, bytes: usize) -> Result<(), minijinja::Error> {
        self.work(bytes / STEP_BYTES)
    }

    /// Checks that there is room for values of `bytes`, and counts the work of making them.
    pub(super) fn room(&mut self, bytes: usize) -> Result<(), minijinja::Error> {
        let fits = |meter: &Self| {
            let used = meter.objects.saturating_add(meter.string_bytes);
            used.saturating_add(bytes) <= meter.value_bytes_max
        };
        if fits(self) {
            return self.pass(bytes);
        }
        // Strings that nothing refers to any more are counted until here.
        self.work(self.strings.len())?;
        self.strings.retain(|_, string| string.strong_count() > 0);
        self.string_bytes = self.strings.values().map(note_bytes).sum();
        if fits(self) {
            return self.pass(bytes);
        }
        Err(refuse("the template needs too much memory"))
    }

    /// Counts a list or map of `bytes` that is made.
    pub(super) fn object(&mut self, bytes: usize) -> Result<(), minijinja::Error> {
        self.room(bytes)?;
        self.objects += bytes;
        Ok(())
    }

    /// Counts a string for as long as something refers to it.
    pub(super) fn string(&mut self, value: &Value) -> Result<(), minijinja::Error> {
        let Some(text) = value.as_str().filter(|text| text.len() > INLINE_BYTES) else {
            return Ok(());
        };
        let address = text.as_ptr() as usize;
        if self.strings.contains_key(&address) {
            return Ok(());
        }
        self.room(text.len() + STRING_BYTES)?;
        if let Some(text) = value.to_str() {
            let note: Weak<str> = Arc::downgrade(&text);
            self.string_bytes += note_bytes(&note);
            self.strings.insert(address, note);
        }
        Ok(())
    }

    /// Counts text of `bytes` that is written.
    pub(super) fn write(&mut self, bytes: usize) -> Result<(), minijinja::Error> {
        self.pass(bytes)?;
        self.written = self.written.saturating_add(bytes);
        if self.written > self.written_max {
            return Err(refuse("the template writes too much text"));
        }
        Ok(())
    }

    /// Stops counting `bytes` of a capture as unfinished text: it has become a value.
    pub(super) fn captured(&mut self, bytes: usize) {
        self.written = self.written.saturating_sub(bytes);
    }

    /// Looks at all of `value`, counting the work and the strings; returns its size.
    pub(super) fn look(&mut self, value: &Value) -> Result<Size, minijinja::Error> {
        let mut size = Size::default();
        self.descend(value, NESTING_MAX, &mut size, None)?;
        Ok(size)
    }

    /// Counts the strings of `value` and checks how deeply it is nested.
    ///
    /// # Errors
    ///
    /// If `container`, which is to hold it, is within it.
    pub(super) fn keep(
        &mut self,
        value: &Value,
        container: Option<&Value>,
    ) -> Result<(), minijinja::Error> {
        self.descend(value, NESTING_MAX, &mut Size::default(), container)
    }

    /// Adds `value` and all within it, at most `levels` deep, to `size`.
    fn descend(
        &mut self,
        value: &Value,
        levels: usize,
        size: &mut Size,
        container: Option<&Value>,
    ) -> Result<(), minijinja::Error> {
        self.work(1)?;
        size.nodes += 1;
        if let Some(text) = value.as_str() {
            size.printed = size.printed.saturating_add(text.len() + 4);
            return self.string(value);
        }
        let Some(object) = value.as_object() else {
            size.printed = size.printed.saturating_add(NUMBER_BYTES);
            return Ok(());
        };
        if container.is_some_and(|container| is_same(container, value)) {
            return Err(refuse("a namespace cannot contain itself"));
        }
        let Some(levels) = levels.checked_sub(1) else {
            return Err(refuse("the template nests values too deeply"));
        };
        size.printed = size.printed.saturating_add(64);
        if value.kind() == ValueKind::Map {
            for (key, value) in object.try_iter_pairs().into_iter().flatten() {
                // `"key": ` of the one, the whole of the other.
                self.descend(&key, levels, size, container)?;
                self.descend(&value, levels, size, container)?;
                size.printed = size.printed.saturating_add(8);
            }
        } else {
            for item in object.try_iter().into_iter().flatten() {
                self.descend(&item, levels, size, container)?;
                size.printed = size.printed.saturating_add(4);
            }
        }
        Ok(())
    }

    /// An upper bound of the bytes that printing `value` makes; counts the work of finding it.
    pub(super) fn printed(&mut self, value: &Value) -> Result<usize, minijinja::Error> {
        match value.as_str() {
            Some(text) => Ok(text.len()),
            None if !is_object(value) => Ok(NUMBER_BYTES),
            // Within lists, strings are quoted; `\u{10ffff}` is the longest escape of a
            // character, and ASCII has shorter ones.
            None => Ok(self.look(value)?.printed.saturating_mul(6)),
        }
    }

    /// Counts the comparison of `a` and `b`.
    pub(super) fn compare(&mut self, a: &Value, b: &Value) -> Result<(), minijinja::Error> {
        match (a.as_str(), b.as_str()) {
            (Some(a), Some(b)) => self.pass(a.len().min(b.len())),
            _ if is_object(a) && is_object(b) => {
                let sizes = [self.look(a)?, self.look(b)?];
                self.pass(sizes[0].printed.min(sizes[1].printed))
            }
            _ => Ok(()),
        }
    }

    /// Counts the hashing of a key, which takes time in proportion to its size.
    pub(super) fn key(&mut self, key: &Value) -> Result<(), minijinja::Error> {
        match key.as_str() {
            Some(text) => self.pass(text.len()),
            None if is_object(key) => self.look(key).map(drop),
            None => Ok(()),
        }
    }

    /// The number of items of a list or a map, or of bytes of a text; counts a step for each.
    pub(super) fn items(&mut self, value: &Value) -> Result<usize, minijinja::Error> {
        let n = match value.as_str() {
            Some(text) => text.len(),
            None => value.len().unwrap_or(0),
        };
        self.work(n)?;
        Ok(n)
    }

    /// Turns a lazy `value`, which gives items one after another, into a list, so that no
    /// chain of lazy values is ever longer than one.
    pub(super) fn collect(&mut self, value: Value) -> Result<Value, minijinja::Error> {
        if value.kind() != ValueKind::Iterable {
            return Ok(value);
        }
        let mut items = Vec::new();
        for item in value.try_iter()?.checked() {
            let item = item?;
            self.work(1)?;
            self.object(ITEM_BYTES)?;
            self.string(&item)?;
            items.push(item);
        }
        self.object(OBJECT_BYTES)?;
        Ok(Value::make_object_iterable(items, |items| {
            Box::new(items.iter().cloned())
        }))
    }

    /// Counts a list of `items` that is to be made, with `bytes` for the items.
    pub(super) fn list(&mut self, items: usize, bytes: usize) -> Result<(), minijinja::Error> {
        if items > ITEMS_MAX {
            return Err(refuse("the template makes a list that is too long"));
        }
        self.object(OBJECT_BYTES + bytes)
    }
}

/// Bytes that a string takes with the note of it.
fn note_bytes(note: &Weak<str>) -> usize {
    // A string that is gone has no length to ask for; it is counted as its note alone.
    note.upgrade()
        .map_or(STRING_BYTES, |text| text.len() + STRING_BYTES)
}

/// Whether `a` and `b` are one and the same list, map or namespace.
fn is_same(a: &Value, b: &Value) -> bool {
    minijinja::tests::is_sameas(a, b)
}
