//! What `paceline.toml` says of single models of `serve`.
//!
//! ```toml
//! [models."writer"]
//! path = "/models/gemma-4-E4B-it"     # what -m takes; the section's name if it is left out
//! context = "16k"                     # and any option of `serve` that is about one model
//! ```
//!
//! A section's values are defaults as those of `[serve]` are, and count more than these; the command
//! line and the environment count more than either.

use super::{Layered, Setting, is_option, named, set_default};
use crate::args::{Cli, Command, ServeArgs};
use anyhow::{Result, bail};
use clap::{Arg, FromArgMatches};
use std::ffi::OsString;

/// The table whose tables are sections.
pub(super) const TABLE: &str = "models";
/// The key of what `-m` would take.
const PATH: &str = "path";
/// Parts of the help whose options are about one model.
const HEADINGS: &[&str] = &["Model", "Speculative decoding", "Defaults of requests"];
/// Options of other parts that are about one model too.
const OTHERS: &[&str] = &[
    "parallel",
    "queue",
    "tower-share",
    "no-prefix-cache",
    "alias",
    "chat-template",
    "reasoning",
    "no-prefill-assistant",
    "kv-events-topic",
    "cache-dir",
    "cache-disk",
    "pooling",
    "kv-memory",
];
/// Options of those parts that are about all models.
const OF_ALL: &[&str] = &[
    "model",
    "models-dir",
    "models-max",
    "models-memory",
    "idle-unload",
];

/// What files say of one model.
pub(super) struct Section {
    name: String,
    path: Option<String>,
    settings: Vec<Setting>,
}

/// The sections of the table `models`; `setting` reads a key of one.
pub(super) fn parse(
    table: toml::Value,
    setting: impl Fn(String, toml::Value) -> Result<Setting>,
) -> Result<Vec<Section>> {
    let toml::Value::Table(table) = table else {
        unreachable!("told to be a table");
    };
    let mut sections = Vec::new();
    for (name, table) in table {
        let toml::Value::Table(table) = table else {
            bail!("models.{name}: expected a section, [models.\"{name}\"]");
        };
        let mut section = Section {
            name,
            path: None,
            settings: Vec::new(),
        };
        for (key, value) in table {
            match (key.as_str(), value) {
                (PATH, toml::Value::String(path)) => section.path = Some(path),
                (PATH, _) => bail!("models.{}.path: expected a string", section.name),
                (_, value) => section.settings.push(setting(key, value)?),
            }
        }
        sections.push(section);
    }
    Ok(sections)
}

/// Adds the sections of a file that counts more.
pub(super) fn merge(sections: &mut Vec<Section>, more: Vec<Section>) {
    for section in more {
        match sections.iter_mut().find(|s| s.name == section.name) {
            Some(known) => {
                known.path = section.path.or(known.path.take());
                known.settings.extend(section.settings);
            }
            None => sections.push(section),
        }
    }
}

/// Whether an option of `serve` is about one model.
fn is_of_one(arg: &Arg) -> bool {
    let long = arg.get_long().unwrap_or_default();
    let is_in = arg
        .get_help_heading()
        .is_some_and(|h| HEADINGS.contains(&h));
    (is_in || OTHERS.contains(&long)) && !OF_ALL.contains(&long)
}

/// Checks every key and value of `sections`.
pub(super) fn check(command: &clap::Command, sections: &[Section]) -> Result<()> {
    let serve = command.find_subcommand(super::SERVE);
    let serve = serve.expect("listed in COMMANDS");
    for Section { name, settings, .. } in sections {
        for setting in settings {
            let Setting {
                file, key, values, ..
            } = setting;
            let mut args = serve.get_arguments().filter(|arg| is_option(arg));
            let place = format!("{}: models.{name}: ", file.display());
            match args.find(|arg| named(arg, key)) {
                Some(arg) if is_of_one(arg) => {
                    let checked = super::check(arg, values);
                    checked.map_err(|reason| anyhow::anyhow!("{place}{key}: {reason}"))?;
                }
                Some(_) => bail!("{place}`{key}` is about the whole server: it belongs in [serve]"),
                None => bail!("{place}`{key}` is not an option of `serve`"),
            }
        }
    }
    Ok(())
}

impl Layered {
    /// The names of all models that files say something of.
    pub(crate) fn sections(&self) -> Vec<&str> {
        self.sections.iter().map(|section| &*section.name).collect()
    }

    /// What `-m` would take for the model called `name`, where its section says.
    pub(crate) fn path_of(&self, name: &str) -> Option<&str> {
        self.sections
            .iter()
            .find(|s| s.name == name)?
            .path
            .as_deref()
    }

    /// The options of the command `line`, of `serve`, for the model called `name`.
    ///
    /// # Errors
    ///
    /// If its section and the line do not go together.
    pub(crate) fn serve_args(&self, name: &str, line: &[OsString]) -> Result<ServeArgs> {
        let mut command = self.command.clone();
        let section = self.sections.iter().find(|s| s.name == name);
        for setting in section.iter().flat_map(|section| &section.settings) {
            (command, _) = set_default(command, super::SERVE, setting)?;
        }
        let matches = command.try_get_matches_from(line)?;
        match Cli::from_arg_matches(&matches)?.command {
            Command::Serve(args) => Ok(*args),
            _ => unreachable!("the line is one of `serve`"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{layered, message};

    #[test]
    fn a_section_counts_more_than_serve_and_less_than_the_line() {
        let text = "[serve]\ncontext = 100\nparallel = 2\n[models.\"a b\"]\npath = \"x\"\ncontext = 200\nalias = [\"c\", \"d\"]\n";
        let layered = layered(text).unwrap();
        assert_eq!(layered.sections(), ["a b"]);
        assert_eq!(layered.path_of("a b"), Some("x"));
        let args = |line: &[&str]| {
            let line: Vec<_> = line.iter().map(std::ffi::OsString::from).collect();
            layered.serve_args("a b", &line).unwrap()
        };
        let own = args(&["paceline", "serve"]);
        assert_eq!((own.load.context, own.parallel), (Some(200), 2));
        assert_eq!(own.alias, ["c", "d"]);
        let typed = args(&["paceline", "serve", "-c", "300"]);
        assert_eq!(typed.load.context, Some(300));
    }

    #[test]
    fn mistakes_in_a_section_name_it() {
        for (text, told) in [
            (
                "port = 1",
                "test.toml: models.a: `port` is about the whole server",
            ),
            ("model = 'x'", "`model` is about the whole server"),
            (
                "raw = true",
                "test.toml: models.a: `raw` is not an option of `serve`",
            ),
            (
                "context = 'x'",
                "test.toml: models.a: context: invalid value",
            ),
            ("path = 1", "models.a.path: expected a string"),
        ] {
            let message = message(&format!("[models.a]\n{text}\n"));
            assert!(message.contains(told), "{message}");
        }
        assert!(message("[models]\na = 1\n").contains("[models.\"a\"]"));
    }
}
