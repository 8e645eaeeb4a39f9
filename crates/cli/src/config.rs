//! Where an option's value comes from.
//!
//! ```text
//! command line  >  PACELINE_… in the environment  >  ./paceline.toml  >  $XDG_CONFIG_HOME/paceline/paceline.toml  >  built-in default
//! ```
//!
//! A file's values become the defaults of the command line's flags, and each
//! flag gets its environment variable, before anything is parsed. So one parser
//! checks values wherever they come from, and a new flag needs no line here.
//!
//! A key is a flag's long name. At the top of a file it holds for every command
//! that has such a flag, in a table `[run]`, `[chat]`, … for that command alone. A table
//! `[models."NAME"]` holds for one of the models of `serve`; see [`sections`].

mod sections;

use crate::args::Cli;
use anyhow::{Context, Result, anyhow, bail};
use clap::builder::BoolishValueParser;
use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, CommandFactory};
use sections::Section;
use std::collections::{HashMap, HashSet};
use std::ffi::{OsStr, OsString};
use std::io::Read;
use std::path::{Path, PathBuf};

/// The file's name.
pub(crate) const FILE: &str = "paceline.toml";
/// How the options' variables begin.
const PREFIX: &str = "PACELINE_";
/// Largest file; every option set once takes 2 KB.
const FILE_BYTES_MAX: u64 = 64 << 10;
/// Commands that options are for.
const COMMANDS: &[&str] = &[
    "run",
    "chat",
    "serve",
    "launch",
    "inspect",
    "bench",
    "perplexity",
    "count",
    "conformance",
];
/// The command that sections of single models are for.
const SERVE: &str = "serve";
/// Options whose values are not printed.
const SECRETS: &[&str] = &["api-key"];

/// One value of one file.
struct Setting {
    file: PathBuf,
    /// The table it stands in, if any.
    command: Option<String>,
    key: String,
    values: Vec<String>,
}

/// The command line with all defaults in place.
pub(crate) struct Layered {
    /// Parses.
    pub(crate) command: clap::Command,
    /// Files that were read.
    pub(crate) files: Vec<PathBuf>,
    /// What files say of single models.
    sections: Vec<Section>,
    /// Command and option → the file its default is from.
    from_file: HashMap<(String, String), PathBuf>,
}

/// Reads the files and prepares the command line.
///
/// # Errors
///
/// If a file cannot be read, is no TOML, or sets something that is no option.
pub(crate) fn load() -> Result<Layered> {
    let (mut settings, mut sections, mut files) = (Vec::new(), Vec::new(), Vec::new());
    for path in paths() {
        if let Some(text) = read(&path)? {
            let parsed = parse(&path, &text).with_context(|| path.display().to_string())?;
            settings.extend(parsed.0);
            sections::merge(&mut sections, parsed.1);
            files.push(path);
        }
    }
    layer(files, settings, sections)
}

/// The files, the one that counts less first.
fn paths() -> Vec<PathBuf> {
    let variable = |name| {
        std::env::var_os(name)
            .filter(|v| !v.is_empty())
            .map(PathBuf::from)
    };
    let home =
        variable("XDG_CONFIG_HOME").or_else(|| variable("HOME").map(|home| home.join(".config")));
    let user = home.map(|home| home.join("paceline").join(FILE));
    user.into_iter().chain([FILE.into()]).collect()
}

/// The text of a file, if there is one.
fn read(path: &Path) -> Result<Option<String>> {
    use std::io::ErrorKind::{NotADirectory, NotFound};
    let mut text = String::new();
    let read = std::fs::File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text));
    match read {
        Ok(_) if text.len() as u64 > FILE_BYTES_MAX => {
            bail!("{} has more than {FILE_BYTES_MAX} bytes", path.display())
        }
        Ok(_) => Ok(Some(text)),
        Err(e) if matches!(e.kind(), NotFound | NotADirectory) => Ok(None),
        Err(e) => Err(e).with_context(|| format!("cannot read {}", path.display())),
    }
}

/// The settings of one file, those of the top first, then those of its tables; and what it says of
/// single models.
fn parse(file: &Path, text: &str) -> Result<(Vec<Setting>, Vec<Section>)> {
    let whole: toml::Table = text.parse().map_err(|e: toml::de::Error| {
        let line = e
            .span()
            .map_or(0, |span| text[..span.start].lines().count().max(1));
        anyhow!("line {line}: {}", e.message())
    })?;
    let (tables, top): (Vec<_>, Vec<_>) =
        whole.into_iter().partition(|(_, value)| value.is_table());
    let setting = |command: Option<&str>, key: String, value| {
        let values = strings(&value)
            .ok_or_else(|| anyhow!("{key}: expected a string, a number, true or false"))?;
        Ok(Setting {
            file: file.into(),
            command: command.map(str::to_owned),
            key,
            values,
        })
    };
    let mut settings: Vec<Setting> = top
        .into_iter()
        .map(|(key, value)| setting(None, key, value))
        .collect::<Result<_>>()?;
    let mut sections = Vec::new();
    for (command, table) in tables {
        if command == sections::TABLE {
            sections = sections::parse(table, |key, value| setting(Some(SERVE), key, value))?;
            continue;
        }
        if !COMMANDS.contains(&command.as_str()) {
            bail!(
                "there is no command `{command}` with options; known are {}",
                COMMANDS.join(", ")
            );
        }
        let toml::Value::Table(table) = table else {
            unreachable!("partitioned above")
        };
        for (key, value) in table {
            settings.push(setting(Some(&command), key, value)?);
        }
    }
    Ok((settings, sections))
}

/// A value as the command line would have it.
fn strings(value: &toml::Value) -> Option<Vec<String>> {
    Some(match value {
        toml::Value::String(text) => vec![text.clone()],
        toml::Value::Integer(number) => vec![number.to_string()],
        toml::Value::Float(number) => vec![number.to_string()],
        toml::Value::Boolean(flag) => vec![flag.to_string()],
        toml::Value::Array(list) => {
            let each = list
                .iter()
                .map(|v| strings(v).filter(|_| !v.is_array()))
                .collect::<Option<Vec<_>>>()?;
            each.concat()
        }
        toml::Value::Datetime(_) | toml::Value::Table(_) => return None,
    })
}

/// Whether `arg` is an option that has a key and a variable.
fn is_option(arg: &Arg) -> bool {
    arg.get_long().is_some()
        && !arg.is_global_set()
        && !matches!(arg.get_id().as_str(), "help" | "version")
}

/// Puts variables and file values onto the flags.
fn layer(files: Vec<PathBuf>, settings: Vec<Setting>, sections: Vec<Section>) -> Result<Layered> {
    let mut command = Cli::command();
    for name in COMMANDS {
        command = command.mut_subcommand(*name, |c| {
            c.mut_args(|arg| {
                if !is_option(&arg) {
                    return arg;
                }
                let long = arg
                    .get_long()
                    .expect("options have names")
                    .to_uppercase()
                    .replace('-', "_");
                let arg = arg.env(format!("{PREFIX}{long}")).hide_env(true);
                // The flag's own parser knows `true` and `false` only; variables are often `1`.
                if matches!(arg.get_action(), ArgAction::SetTrue) {
                    arg.value_parser(BoolishValueParser::new())
                } else {
                    arg
                }
            })
        });
    }
    let mut from_file = HashMap::new();
    for setting in &settings {
        let of = setting.command.as_deref();
        let mut is_known = false;
        for name in COMMANDS
            .iter()
            .filter(|name| of.is_none_or(|of| of == **name))
        {
            let set;
            (command, set) = set_default(command, name, setting)?;
            if let Some(id) = set {
                is_known = true;
                from_file.insert(((*name).to_owned(), id), setting.file.clone());
            }
        }
        if !is_known {
            let place = of.map_or_else(|| "any command".to_owned(), |of| format!("`{of}`"));
            let Setting { file, key, .. } = setting;
            bail!("{}: `{key}` is not an option of {place}", file.display());
        }
    }
    sections::check(&command, &sections)?;
    Ok(Layered {
        command,
        files,
        sections,
        from_file,
    })
}

/// Makes a setting the default of the command called `name`, with the id of its flag if it has one.
fn set_default(
    command: clap::Command,
    name: &str,
    setting: &Setting,
) -> Result<(clap::Command, Option<String>)> {
    let Setting {
        file, key, values, ..
    } = setting;
    let found = command
        .find_subcommand(name)
        .and_then(|c| c.get_arguments().find(|a| named(a, key)));
    let Some(arg) = found.filter(|arg| is_option(arg)) else {
        return Ok((command, None));
    };
    check(arg, values).map_err(|reason| anyhow!("{}: {key}: {reason}", file.display()))?;
    let id = arg.get_id().clone();
    // Not `mut_arg`, which would move the flag to the end of the help.
    let command = command.mut_subcommand(name, |c| {
        c.mut_args(|arg| {
            if *arg.get_id() == id {
                arg.default_values(values.clone())
            } else {
                arg
            }
        })
    });
    Ok((command, Some(id.to_string())))
}

fn named(arg: &Arg, key: &str) -> bool {
    arg.get_long() == Some(key)
}

/// Has the flag's own parser look at `values`.
fn check(arg: &Arg, values: &[String]) -> Result<(), String> {
    let takes_many = matches!(arg.get_action(), ArgAction::Append);
    if values.len() != 1 && !takes_many {
        return Err(format!("expected one value, found {}", values.len()));
    }
    let name = arg.get_long().expect("options have names").to_owned();
    // A copy without relations to other flags, which takes a value even if it is a switch.
    let mut alone = Arg::new("value")
        .long(name.clone())
        .value_parser(arg.get_value_parser().clone());
    if let Some(delimiter) = arg.get_value_delimiter() {
        alone = alone.value_delimiter(delimiter).num_args(1..);
    }
    for value in values {
        let line = [OsString::from(format!("--{name}={value}"))];
        let parsed = clap::Command::new("")
            .no_binary_name(true)
            .arg(alone.clone())
            .try_get_matches_from(line);
        parsed.map_err(|e| {
            let text = e.render().to_string();
            let text = text
                .split("\n\nFor more")
                .next()
                .unwrap_or(&text)
                .trim_start_matches("error: ");
            text.split_whitespace().collect::<Vec<_>>().join(" ")
        })?;
    }
    Ok(())
}

/// One option's value and where it is from.
struct Value {
    name: String,
    values: Vec<String>,
    is_switch: bool,
    takes_many: bool,
    source: Source,
}

enum Source {
    BuiltIn,
    File(PathBuf),
    Variable(String),
    Line,
}

impl Layered {
    /// The `names` that look like an option's variable and belong to no option.
    pub(crate) fn unknown_variables(&self, names: impl Iterator<Item = OsString>) -> Vec<OsString> {
        let commands = self.command.get_subcommands();
        let known: HashSet<&OsStr> = commands
            .flat_map(clap::Command::get_arguments)
            .filter_map(Arg::get_env)
            .collect();
        let is_ours = |name: &OsString| name.to_str().is_some_and(|n| n.starts_with(PREFIX));
        names
            .filter(|name| is_ours(name) && !known.contains(name.as_os_str()))
            .collect()
    }

    /// The environment variable of the option `--long`, if it has one.
    pub(crate) fn variable(&self, long: &str) -> Option<String> {
        let mut commands = self.command.get_subcommands();
        // Some commands have options of the same name that no variable sets.
        let env = commands.find_map(|c| c.get_arguments().find(|a| named(a, long))?.get_env())?;
        Some(env.to_str()?.to_owned())
    }

    /// Prints what the command of `line` would run with, or every command.
    pub(crate) fn show(&self, line: &[OsString], as_command: bool) -> Result<String> {
        let known = |name: &OsStr| COMMANDS.iter().find(|c| name == **c);
        let lines: Vec<Vec<OsString>> = match line.first() {
            None => COMMANDS.iter().map(|c| vec![OsString::from(c)]).collect(),
            Some(name) if known(name).is_some() => vec![line.to_vec()],
            Some(name) => bail!(
                "`{}` is not a command with options; known are {}",
                name.display(),
                COMMANDS.join(", ")
            ),
        };
        let mut out = String::new();
        if !as_command {
            for file in paths() {
                let state = if self.files.contains(&file) {
                    "read"
                } else {
                    "not there"
                };
                out += &format!("# {}: {state}\n", file.display());
            }
        }
        for line in lines {
            let name = line[0].to_string_lossy().into_owned();
            let whole = std::iter::once("paceline".into()).chain(line);
            // What a command works on is no option, and nobody names it here.
            let matches = self
                .command
                .clone()
                .mut_subcommand(&name, |c| c.mut_args(|arg| arg.required(false)))
                .try_get_matches_from(whole)
                .unwrap_or_else(|e| e.exit());
            let matches = matches
                .subcommand_matches(&name)
                .expect("the line names the command");
            let values = self.values(&name, matches);
            if as_command {
                out += &as_line(&name, &values);
            } else {
                out += &as_table(&name, &values);
            }
        }
        Ok(out)
    }

    fn values(&self, name: &str, matches: &ArgMatches) -> Vec<Value> {
        let command = self
            .command
            .find_subcommand(name)
            .expect("listed in COMMANDS");
        let value = |arg: &Arg| {
            let id = arg.get_id().as_str();
            let raw = matches.get_raw(id).unwrap_or_default();
            let source = match matches.value_source(id) {
                Some(ValueSource::CommandLine) => Source::Line,
                Some(ValueSource::EnvVariable) => Source::Variable(
                    arg.get_env()
                        .unwrap_or_default()
                        .to_string_lossy()
                        .into_owned(),
                ),
                _ => match self.from_file.get(&(name.to_owned(), id.to_owned())) {
                    Some(file) => Source::File(file.clone()),
                    None => Source::BuiltIn,
                },
            };
            let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
            let values = if is_switch {
                vec![matches.get_flag(id).to_string()]
            } else {
                raw.map(|v| v.to_string_lossy().into_owned()).collect()
            };
            let takes_many = matches!(arg.get_action(), ArgAction::Append);
            Value {
                name: arg.get_long().expect("options have names").to_owned(),
                values,
                is_switch,
                takes_many,
                source,
            }
        };
        let is_shown = |arg: &Arg| {
            // What is hidden from the help shows up once it is used.
            is_option(arg)
                && (!arg.is_hide_set() || matches.value_source(arg.get_id().as_str()).is_some())
        };
        command
            .get_arguments()
            .filter(|a| is_shown(a))
            .map(value)
            .collect()
    }
}

/// The values as a table of `paceline.toml`.
fn as_table(name: &str, values: &[Value]) -> String {
    let mut out = format!("\n[{name}]\n");
    for value in values {
        let source = match &value.source {
            Source::BuiltIn => String::new(),
            Source::File(file) => format!("  # {}", file.display()),
            Source::Variable(variable) => format!("  # {variable}"),
            Source::Line => "  # command line".into(),
        };
        out += &match &value.values[..] {
            [] => format!("# {} is not set\n", value.name),
            _ if SECRETS.contains(&value.name.as_str()) => {
                format!("# {} is set, and not shown{source}\n", value.name)
            }
            [one] if !value.takes_many => format!("{} = {}{source}\n", value.name, literal(one)),
            many => {
                let list: Vec<String> = many.iter().map(|v| literal(v)).collect();
                format!("{} = [{}]{source}\n", value.name, list.join(", "))
            }
        };
    }
    out
}

/// `text` as TOML: bare if TOML would read the same text back, else a string.
fn literal(text: &str) -> String {
    let table: Option<toml::Table> = format!("x = {text}")
        .parse()
        .ok()
        .filter(|_| !text.contains('\n'));
    let bare = table
        .as_ref()
        .and_then(|t| t.get("x"))
        .filter(|v| !v.is_str() && !v.is_array());
    match bare.and_then(strings) {
        Some(same) if same == [text] => text.to_owned(),
        _ => toml::Value::String(text.to_owned()).to_string(),
    }
}

/// The values that are not built in, as a command line.
fn as_line(name: &str, values: &[Value]) -> String {
    let mut out = format!("paceline {name}");
    for value in values
        .iter()
        .filter(|v| !matches!(v.source, Source::BuiltIn))
    {
        if SECRETS.contains(&value.name.as_str()) {
            continue;
        }
        for text in &value.values {
            match (value.is_switch, text.as_str()) {
                (true, "true") => out += &format!(" --{}", value.name),
                (true, _) => {}
                (false, text) => out += &format!(" --{}={}", value.name, quoted(text)),
            }
        }
    }
    out.push('\n');
    out
}

/// `text` as one word of a shell.
fn quoted(text: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=,+@%".contains(c);
    if !text.is_empty() && text.chars().all(is_plain) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn layered(text: &str) -> Result<Layered> {
        let file = PathBuf::from("test.toml");
        let (settings, sections) = parse(&file, text).context("test.toml")?;
        layer(vec![file], settings, sections)
    }

    pub(super) fn message(text: &str) -> String {
        format!("{:#}", layered(text).err().expect("refused"))
    }

    #[test]
    fn a_table_counts_more_than_the_top() {
        let layered =
            layered("draft-max = 5\n[chat]\ndraft-max = 6\nstop = ['a', \"it's\"]\n").unwrap();
        let shown = layered
            .show(&["run".into(), "--kv=f16".into()], true)
            .unwrap();
        assert_eq!(shown, "paceline run --kv=f16 --draft-max=5\n");
        let shown = layered.show(&["chat".into()], true).unwrap();
        assert_eq!(
            shown,
            "paceline chat --stop=a --stop='it'\\''s' --draft-max=6\n"
        );
    }

    #[test]
    fn what_is_shown_can_be_read_again() {
        let text = "[run]\ntemperature = 0.5\nlogit-bias = [\"4=-1\"]\nstop = [\"1\", \"\\n\", \"x = y\"]\nraw = true\n";
        let first = layered(text).unwrap();
        let shown = first.show(&["run".into()], false).unwrap();
        let second = layered(&shown).unwrap();
        let line = first.show(&["run".into()], true).unwrap();
        for flag in [
            "--temperature=0.5",
            "--logit-bias=4=-1",
            "--stop=1",
            "--stop='\n'",
            "--stop='x = y'",
            "--raw",
        ] {
            assert!(line.contains(flag), "{line}");
        }
        // In the second file every option is written down, so compare what is in force.
        let values = |l: &Layered| {
            as_table("run", &l.values("run", &matches(l))).replace("  # test.toml", "")
        };
        assert_eq!(values(&first), values(&second));
    }

    fn matches(layered: &Layered) -> ArgMatches {
        let matches = layered
            .command
            .clone()
            .try_get_matches_from(["paceline", "run"])
            .unwrap();
        matches.subcommand_matches("run").unwrap().clone()
    }

    #[test]
    fn mistakes_name_the_file_and_the_key() {
        assert_eq!(
            message("drift = 1"),
            "test.toml: `drift` is not an option of any command"
        );
        assert_eq!(
            message("[serve]\nraw = true"),
            "test.toml: `raw` is not an option of `serve`"
        );
        assert_eq!(
            message("[walk]\nraw = true"),
            "test.toml: there is no command `walk` with options; known are run, chat, serve, launch, inspect, bench, perplexity, count, conformance"
        );
        assert_eq!(
            message("a = 1\nb = \n"),
            "test.toml: line 2: string values must be quoted, expected literal string"
        );
        assert_eq!(
            message("model = 1979-05-27"),
            "test.toml: model: expected a string, a number, true or false"
        );
        assert_eq!(
            message("draft-max = [1, 2]"),
            "test.toml: draft-max: expected one value, found 2"
        );
        assert!(
            message("draft-max = -1")
                .starts_with("test.toml: draft-max: invalid value '-1' for '--draft-max")
        );
        assert!(message("raw = 'perhaps'").starts_with("test.toml: raw: invalid value 'perhaps'"));
        assert!(message("kv = 'f8'").contains("`f8` is none of bf16, f16, f32, q8_0, q5_0, q4_0"));
    }

    #[test]
    fn every_command_with_a_model_is_configurable() {
        for command in Cli::command().get_subcommands() {
            let has_model = command.get_arguments().any(|a| named(a, "model"));
            assert_eq!(
                has_model,
                COMMANDS.contains(&command.get_name()),
                "{}",
                command.get_name()
            );
        }
    }

    #[test]
    fn every_option_has_a_variable() {
        let layered = layered("").unwrap();
        for name in COMMANDS {
            let command = layered.command.find_subcommand(name).unwrap();
            for arg in command.get_arguments().filter(|a| is_option(a)) {
                assert!(arg.get_env().is_some(), "{name} {}", arg.get_id());
            }
        }
    }
}
