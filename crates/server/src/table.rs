//! Tables of fields: what a dialect does with each field that its requests may have.
//!
//! A table is the only list of a request's field names. It says which fields handlers may read
//! and of what type (a debug build asserts both), which are refused, and which are ignored without
//! a warning. `docs/server.md` and `/openapi.json` are written from it. A name in no table is
//! ignored, and the response header `x-ignored-fields` and the log name it.

use std::borrow::Borrow;
use std::fmt::Write;

use engine::SAMPLER_NUMBERS;
use serde_json::Value;

/// JSON types that a field's value may have. `null` is the same as a field that is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Several types; the field's description says which.
    Any,
    Bool,
    /// A whole number; `3.0` counts as one.
    Integer,
    Number,
    Text,
    /// A list of strings.
    Texts,
    /// A string or a list of strings.
    TextOrTexts,
    Object,
    List,
}

impl Kind {
    /// Whether a field of this kind may be read as one of `asked`.
    pub(crate) fn admits(self, asked: Kind) -> bool {
        self == asked || matches!(self, Kind::Any) || matches!(asked, Kind::Any)
    }
}

/// A field that is honored.
#[derive(Debug)]
pub(crate) struct Known {
    /// The field's name; inside an object, after the object's path.
    pub(crate) field: &'static str,
    /// The type of its value.
    pub(crate) kind: Kind,
    /// What it does; one line of Markdown.
    pub(crate) about: &'static str,
}

/// An entry of a list of honored fields, in one line.
pub(crate) const fn known(field: &'static str, kind: Kind, about: &'static str) -> Known {
    Known { field, kind, about }
}

/// A field that is ignored, and known to change nothing.
#[derive(Debug)]
pub(crate) struct Harmless {
    /// The path of the field.
    pub(crate) field: &'static str,
    /// Why it changes nothing; one line of Markdown.
    pub(crate) why: &'static str,
}

/// An entry of a list of harmless fields, in one line.
pub(crate) const fn harmless(field: &'static str, why: &'static str) -> Harmless {
    Harmless { field, why }
}

/// A field that changes what is written and is not implemented.
#[derive(Debug)]
pub(crate) struct Unsupported {
    /// The name of the field.
    pub(crate) field: &'static str,
    /// A JSON list of the values that ask for nothing; `null` always does.
    pub(crate) neutral: &'static str,
}

/// An entry of a list of unsupported fields, in one line.
pub(crate) const fn unless(field: &'static str, neutral: &'static str) -> Unsupported {
    Unsupported { field, neutral }
}

impl Unsupported {
    /// The values that ask for nothing, beside `null`.
    pub(crate) fn neutral(&self) -> Vec<Value> {
        serde_json::from_str(self.neutral).expect("the tables are JSON")
    }

    /// Whether `value` asks for nothing.
    pub(crate) fn is_neutral(&self, value: &Value) -> bool {
        let is_same = |a: &Value| match (a.as_f64(), value.as_f64()) {
            (Some(a), Some(b)) => a == b,
            _ => a == value,
        };
        value.is_null() || self.neutral().iter().any(is_same)
    }

    /// The values that ask for nothing, in Markdown.
    pub(crate) fn accepted(&self) -> String {
        let values = self.neutral().into_iter().map(|v| format!("`{v}`"));
        let values: Vec<String> = values.chain(["`null`".to_owned()]).collect();
        values.join(", ")
    }
}

/// What is done with a field.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Treatment {
    /// Read; what it does.
    Honored(&'static str),
    /// Read as OpenAI's requests have it, which say what it does.
    Shared(&'static str),
    /// Refused, with the field to send in its place.
    Renamed(&'static str),
    /// Refused, with the object that it belongs in.
    Misplaced(&'static str),
    /// Refused, but for the values that ask for nothing.
    Refused(&'static Unsupported),
    /// Ignored without a warning; why.
    Ignored(&'static str),
}

/// A field of a table.
#[derive(Debug)]
pub(crate) struct Entry {
    /// Where the field is in a request: names joined by dots, `[]` after a list.
    pub(crate) path: String,
    /// The type of its value, where it is read.
    pub(crate) kind: Kind,
    pub(crate) treatment: Treatment,
    /// Whether the documentation has the field in the table of another dialect.
    is_elsewhere: bool,
}

impl Entry {
    /// Whether a handler may read the field.
    fn is_read(&self) -> bool {
        !matches!(self.treatment, Treatment::Ignored(_))
    }

    /// What the field does, in Markdown, where it is honored.
    pub(crate) fn about(&self) -> Option<&'static str> {
        match self.treatment {
            Treatment::Honored(about) | Treatment::Shared(about) => Some(about),
            _ => None,
        }
    }
}

/// The fields that requests of one kind may have, each treated in one way.
#[derive(Debug)]
pub(crate) struct Table {
    /// What such a request is called in `/openapi.json`.
    name: &'static str,
    /// Fields without which there is nothing to answer.
    required: &'static [&'static str],
    entries: Vec<Entry>,
}

impl Table {
    /// A table without fields, of requests that `/openapi.json` calls `name`. Without the fields
    /// `required` there is nothing to answer.
    pub(crate) const fn new(name: &'static str, required: &'static [&'static str]) -> Self {
        Table {
            name,
            required,
            entries: Vec::new(),
        }
    }

    /// What such a request is called in `/openapi.json`.
    pub(crate) fn name(&self) -> &'static str {
        self.name
    }

    /// Fields without which there is nothing to answer.
    pub(crate) fn required(&self) -> &'static [&'static str] {
        self.required
    }

    /// Adds a field.
    ///
    /// # Panics
    ///
    /// Panics if the table has it.
    fn add(&mut self, path: String, kind: Kind, treatment: Treatment, is_elsewhere: bool) {
        assert!(
            self.entry(&path).is_none(),
            "`{path}` is treated in two ways"
        );
        self.entries.push(Entry {
            path,
            kind,
            treatment,
            is_elsewhere,
        });
    }

    /// Adds honored fields of the object at `at`, a path with a dot, or of the request.
    pub(crate) fn honors(
        mut self,
        at: &str,
        fields: impl IntoIterator<Item = impl Borrow<Known>>,
    ) -> Self {
        for known in fields {
            let &Known { field, kind, about } = known.borrow();
            self.add(
                format!("{at}{field}"),
                kind,
                Treatment::Honored(about),
                false,
            );
        }
        self
    }

    /// Adds the numbers of the sampler.
    pub(crate) fn honors_sampler_numbers(mut self) -> Self {
        for number in SAMPLER_NUMBERS {
            let treatment = Treatment::Honored(number.about);
            self.add(number.name.to_owned(), Kind::Number, treatment, false);
        }
        self
    }

    /// Adds the numbers of the sampler in the object at `at`, as OpenAI's requests have them.
    pub(crate) fn shares_sampler_numbers(mut self, at: &str) -> Self {
        for number in SAMPLER_NUMBERS {
            let path = format!("{at}{}", number.name);
            let treatment = Treatment::Shared(number.about);
            self.add(path, Kind::Number, treatment, false);
        }
        self
    }

    /// Adds the fields `names` of the object at `at`, which are read as `other` has them.
    ///
    /// # Panics
    ///
    /// Panics if `other` does not honor one of them.
    pub(crate) fn shares<'a>(
        mut self,
        at: &str,
        other: &Table,
        names: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        for name in names {
            let entry = other.entry(name);
            let Some((kind, about)) = entry.and_then(|e| Some((e.kind, e.about()?))) else {
                panic!("`{name}` is not honored by the table that it is shared with");
            };
            self.add(format!("{at}{name}"), kind, Treatment::Shared(about), false);
        }
        self
    }

    /// Adds fields of other APIs, each with the field that this one has in its place.
    pub(crate) fn renames(
        mut self,
        names: impl IntoIterator<Item = (&'static str, &'static str)>,
    ) -> Self {
        for (name, instead) in names {
            let treatment = Treatment::Renamed(instead);
            self.add(name.to_owned(), Kind::Any, treatment, false);
        }
        self
    }

    /// Adds fields that belong in the object at `place`, but for those that the table has and
    /// those with a dot.
    pub(crate) fn belong_in<'a>(
        mut self,
        place: &'static str,
        names: impl IntoIterator<Item = &'a str>,
    ) -> Self {
        for name in names {
            if !name.contains('.') && self.entry(name).is_none() {
                let treatment = Treatment::Misplaced(place);
                self.add(name.to_owned(), Kind::Any, treatment, true);
            }
        }
        self
    }

    /// Adds refused fields of the object at `at`.
    pub(crate) fn refuses(mut self, at: &str, fields: &'static [Unsupported]) -> Self {
        for entry in fields {
            let path = format!("{at}{}", entry.field);
            self.add(path, Kind::Any, Treatment::Refused(entry), false);
        }
        self
    }

    /// Adds fields of the object at `at` that another dialect refuses, but for those that the
    /// table has.
    pub(crate) fn refuses_as_elsewhere(mut self, at: &str, fields: &'static [Unsupported]) -> Self {
        for entry in fields {
            let path = format!("{at}{}", entry.field);
            if self.entry(&path).is_none() {
                self.add(path, Kind::Any, Treatment::Refused(entry), true);
            }
        }
        self
    }

    /// Adds ignored fields.
    pub(crate) fn ignores(mut self, fields: &'static [Harmless]) -> Self {
        for &Harmless { field, why } in fields {
            self.add(field.to_owned(), Kind::Any, Treatment::Ignored(why), false);
        }
        self
    }

    /// Adds fields that another dialect ignores, but for those that the table has.
    pub(crate) fn ignores_as_elsewhere(mut self, fields: &'static [Harmless]) -> Self {
        for &Harmless { field, why } in fields {
            if self.entry(field).is_none() {
                self.add(field.to_owned(), Kind::Any, Treatment::Ignored(why), true);
            }
        }
        self
    }

    /// All fields, in the order in which they were added.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The field at `path`.
    pub(crate) fn entry(&self, path: &str) -> Option<&Entry> {
        self.entries.iter().find(|entry| entry.path == path)
    }

    /// Whether a handler may read the field at `path` as one of `kind`.
    pub(crate) fn may_read(&self, path: &str, kind: Kind) -> bool {
        self.entry(path)
            .is_some_and(|entry| entry.is_read() && entry.kind.admits(kind))
    }

    /// Whether ignoring the field at `path` needs no warning.
    pub(crate) fn is_harmless(&self, path: &str) -> bool {
        self.entry(path).is_some_and(|entry| !entry.is_read())
    }

    /// Fields of the object at `at` that are refused: name and treatment.
    pub(crate) fn refused(&self, at: &str) -> impl Iterator<Item = (&str, Treatment)> {
        self.entries.iter().filter_map(move |entry| {
            let name = entry.path.strip_prefix(at)?;
            let is_refused = matches!(
                entry.treatment,
                Treatment::Refused(_) | Treatment::Renamed(_) | Treatment::Misplaced(_)
            );
            (is_refused && !name.contains(['.', '['])).then_some((name, entry.treatment))
        })
    }
}

/// One table of Markdown over the fields of `tables`: path, treatment, and what it does, why, or
/// what it is accepted with. Fields that are read as OpenAI's requests have them share a row, with
/// `shared` behind it.
pub(crate) fn markdown(tables: &[&Table], shared: &str) -> String {
    let mut page =
        String::from("| field | treatment | what, why, or accepted with |\n| --- | --- | --- |\n");
    let mut seen: Vec<(&str, Option<&str>)> = Vec::new();
    let own = tables
        .iter()
        .flat_map(|table| table.entries())
        .filter(|entry| !entry.is_elsewhere)
        .filter(|entry| {
            let row = (entry.path.as_str(), entry.about());
            let is_new = !seen.contains(&row);
            seen.push(row);
            is_new
        });
    let own: Vec<&Entry> = own.collect();
    for entry in &own {
        if let Treatment::Honored(about) = entry.treatment {
            let _ = writeln!(page, "| `{}` | honored | {about} |", entry.path);
        }
    }
    let is_shared = |entry: &&&Entry| matches!(entry.treatment, Treatment::Shared(_));
    let names = own.iter().filter(is_shared);
    let names: Vec<String> = names.map(|entry| format!("`{}`", entry.path)).collect();
    if !names.is_empty() {
        let _ = writeln!(page, "| {} | honored | {shared} |", names.join(", "));
    }
    for entry in &own {
        let _ = match entry.treatment {
            Treatment::Refused(refused) => {
                let accepted = refused.accepted();
                writeln!(page, "| `{}` | refused | {accepted} |", entry.path)
            }
            Treatment::Renamed(instead) => {
                writeln!(page, "| `{}` | refused | send `{instead}` |", entry.path)
            }
            _ => Ok(()),
        };
    }
    for entry in &own {
        if let Treatment::Ignored(why) = entry.treatment {
            let _ = writeln!(page, "| `{}` | ignored | {why} |", entry.path);
        }
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{anthropic, llama, ollama, openai};

    /// What is honored by OpenAI's paths is never ignored by those of another dialect.
    #[test]
    fn what_openai_s_requests_honor_is_read_or_refused_in_every_dialect() {
        let chat: &[&Table] = &[&openai::tables::CHAT];
        let both: &[&Table] = &[&openai::tables::CHAT, &openai::tables::COMPLETIONS];
        let plain: &[&Table] = &[&openai::tables::COMPLETIONS];
        // Streams of other dialects always have the usage; `verbose` adds llama-server's document.
        let elsewhere = ["stream_options", "verbose"];
        for (dialect, table, there) in [
            ("Responses", &*openai::responses::tables::RESPONSES, chat),
            ("Messages", &anthropic::tables::MESSAGES, both),
            ("llama-server", &llama::tables::TEXT, plain),
            ("Ollama", &ollama::tables::CHAT, chat),
            ("Ollama", &ollama::tables::GENERATE, both),
        ] {
            let honored = there.iter().flat_map(|table| table.entries());
            let honored = honored.filter(|entry| entry.about().is_some());
            let paths: Vec<&str> = honored.map(|entry| entry.path.as_str()).collect();
            let is_missed = |path: &&&str| {
                let is_inside = path.contains(['.', '[']);
                !is_inside && table.entry(path).is_none() && !elsewhere.contains(*path)
            };
            let missed: Vec<&&str> = paths.iter().filter(is_missed).collect();
            assert!(missed.is_empty(), "{dialect} would ignore {missed:?}");
            assert!(paths.len() > 60, "{}", paths.len());
        }
    }

    #[test]
    #[should_panic(expected = "`a` is treated in two ways")]
    fn a_field_is_treated_in_one_way() {
        const HARMLESS: &[Harmless] = &[harmless("a", "does nothing")];
        let known = known("a", Kind::Bool, "does something");
        let _ = Table::new("Odd", &[])
            .honors("", [&known])
            .ignores(HARMLESS);
    }

    #[test]
    fn unsupported_fields_pass_with_a_neutral_value() {
        let entry = unless("n", "[1]");
        for (value, is_neutral) in [
            ("null", true),
            ("1", true),
            ("1.0", true),
            ("2", false),
            ("\"1\"", false),
        ] {
            let value: Value = serde_json::from_str(value).unwrap();
            assert_eq!(entry.is_neutral(&value), is_neutral, "{value}");
        }
        assert_eq!(entry.accepted(), "`1`, `null`");
    }
}
