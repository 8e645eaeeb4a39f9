//! Which models `serve` knows: those that the command line names, those of a folder, and those that
//! have a section in `paceline.toml`.

use crate::args::ServeArgs;
use crate::config::Layered;
use crate::{bundled, resolve, templates};
use anyhow::{Context, Result, anyhow, bail};
use std::collections::HashSet;
use std::ffi::OsString;
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// A model that may be served.
pub(super) struct Known {
    /// The model's names, the one that responses carry first.
    pub(super) names: Vec<String>,
    /// What `-m` would take for it.
    pub(super) what: String,
    /// The options for this model, those of its section among them.
    pub(super) args: ServeArgs,
}

/// A model that was found, without its options.
struct Found {
    name: String,
    what: String,
    /// The section of `paceline.toml` that is about it.
    section: Option<String>,
}

/// Every model that is to be served, in the order in which they are listed.
///
/// # Errors
///
/// If one is not there, two have the same name, or an option of a section is wrong.
pub(super) fn all(args: &ServeArgs, layered: &Layered, line: &[OsString]) -> Result<Vec<Known>> {
    let mut known: Vec<Known> = Vec::new();
    let mut taken = HashSet::new();
    for Found {
        name,
        what,
        section,
    } in found(args, layered)?
    {
        let mut own = match section {
            Some(section) => layered.serve_args(&section, line)?,
            None => args.clone(),
        };
        if let Some(template) = &own.chat_template {
            own.load.chat_template = Some(templates::source(template)?);
        }
        own.defaults
            .check()
            .map_err(|reason| anyhow!("{name}: {reason}"))?;
        own.load.kv_memory = own.kv_memory;
        own.load.identify = own.cache_dir.is_some() && !own.no_prefix_cache;
        let names = match &own.alias[..] {
            [] => vec![name],
            alias => alias.to_vec(),
        };
        for name in &names {
            if !taken.insert(name.clone()) {
                bail!(
                    "two models are called `{name}`: give each a section [models.\"NAME\"] in paceline.toml, with `path` and `alias`"
                );
            }
        }
        known.push(Known {
            names,
            what,
            args: own,
        });
    }
    let most = args.models.models_max.map_or(usize::MAX, NonZeroUsize::get);
    let n = NonZeroUsize::new(known.len().min(most));
    known.iter_mut().for_each(|k| k.args.load.shared_by = n);
    Ok(known)
}

fn found(args: &ServeArgs, layered: &Layered) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for what in &args.models.model {
        // Told from now on that it is not there, and not when somebody asks for it.
        let name = resolve::source(what)?.name();
        let sections = layered.sections();
        let section = sections.into_iter().find(|s| *s == what || *s == name);
        found.push(Found {
            name: section.map_or(name, str::to_owned),
            what: what.clone(),
            section: section.map(str::to_owned),
        });
    }
    if let Some(folder) = &args.models.models_dir {
        for (name, path) in in_folder(folder)? {
            let section = layered.sections().contains(&name.as_str());
            found.push(Found {
                what: path.to_string_lossy().into_owned(),
                section: section.then(|| name.clone()),
                name,
            });
        }
    }
    for section in layered.sections() {
        let is_new = found
            .iter()
            .all(|one| one.section.as_deref() != Some(section));
        if is_new {
            let what = layered.path_of(section).unwrap_or(section);
            resolve::source(what).with_context(|| format!("[models.\"{section}\"]"))?;
            found.push(Found {
                name: section.to_owned(),
                what: what.to_owned(),
                section: Some(section.to_owned()),
            });
        }
    }
    if found.is_empty() {
        if let Some(folder) = &args.models.models_dir {
            bail!(
                "there is no model in `{}`: a model is a folder with config.json and safetensors, or a .gguf file",
                folder.display()
            );
        }
        found.push(Found {
            name: bundled::DEFAULT.to_owned(),
            what: bundled::DEFAULT.to_owned(),
            section: None,
        });
    }
    Ok(found)
}

/// The models in a folder, by name: each folder in it that holds one, and each GGUF file. Draft heads,
/// projectors and the later parts of a split file are none.
fn in_folder(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let cannot = || format!("cannot read the folder of models `{}`", folder.display());
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).with_context(cannot)? {
        paths.push(entry.with_context(cannot)?.path());
    }
    paths.sort();
    let mut found = Vec::new();
    for path in paths {
        let name = |part: Option<&std::ffi::OsStr>| Some(part?.to_str()?.to_owned());
        let model = if path.is_dir() {
            name(path.file_name()).zip(in_model_folder(&path))
        } else if resolve::is_gguf_name(&path) {
            let file = name(path.file_name()).filter(|file| is_model_file(file));
            file.and_then(|_| name(path.file_stem())).zip(Some(path))
        } else {
            None
        };
        found.extend(model.filter(|(name, _)| !name.starts_with('.')));
    }
    Ok(found)
}

/// The model in a folder of its own, if there is one.
fn in_model_folder(folder: &Path) -> Option<PathBuf> {
    if folder.join("config.json").is_file() {
        return (!resolve::is_head(folder)).then(|| folder.to_owned());
    }
    let names = hub::files_of(folder);
    let mut files: Vec<&String> = names.iter().filter(|name| is_model_file(name)).collect();
    files.sort();
    Some(folder.join(files.first()?))
}

/// Whether a file of this name is a GGUF model, or the first part of one.
fn is_model_file(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let is_later_part = name.contains("-of-") && !name.contains("-00001-of-");
    name.ends_with(".gguf") && !name.contains("mmproj") && !is_later_part
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_of_a_folder_are_told_from_their_parts() {
        for (name, is_model) in [
            ("a.gguf", true),
            ("A.GGUF", true),
            ("a-00001-of-00003.gguf", true),
            ("a-00002-of-00003.gguf", false),
            ("mmproj-a.gguf", false),
            ("a.bin", false),
        ] {
            assert_eq!(is_model_file(name), is_model, "{name}");
        }
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
        let found = in_folder(&models).unwrap();
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert!(
            names.contains(&"tiny-gemma4") && names.contains(&"tiny-qwen3.5"),
            "{names:?}"
        );
        assert!(!names.contains(&"tiny-gemma4-assistant"), "{names:?}");
    }
}
