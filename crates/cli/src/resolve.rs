//! Finds the model that `-m` names, and the drafters it may have.
//!
//! ```text
//! -m      bundled name → folder → ORG/NAME in the hub cache
//! drafter the table `hub::known` by name, then every draft head of the hub cache whose
//!         configuration fits, heads that were fetched alone, and MTP heads in folders beside
//!         the model; MTP heads that are quantized as the model is come first
//! ```
//!
//! Names and configurations only suggest a drafter; whether it fits is proven when it is
//! loaded. Nothing is fetched here: what is missing becomes advice.

use crate::{bundled, places};
use anyhow::{Result, anyhow, bail};
use engine::Source;
use hub::known::{self, Part};
use hub::{Cache, RepoId};
use serde_json::Value;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

/// Largest configuration that is read, in bytes.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// A model, and the drafters it may have.
pub(crate) struct Resolved {
    /// The files of the model.
    pub(crate) source: Source,
    /// Drafters that may fit, the most likely first.
    pub(crate) drafters: Vec<Source>,
    /// A command that would fetch a drafter, as advice to the user.
    pub(crate) advice: Option<String>,
}

/// Finds the model called `name` and the drafters it may have. Bundled names come first, so
/// that a command means the same in every folder; `./NAME` is always the folder.
pub(crate) fn model(name: &str) -> Result<Resolved> {
    let source = source(name)?;
    let Source::Folder(folder) = &source else {
        return Ok(Resolved {
            source,
            drafters: Vec::new(),
            advice: None,
        });
    };
    let (drafters, advice) = drafters(&source.name(), folder);
    Ok(Resolved {
        source,
        drafters,
        advice,
    })
}

/// Finds the model called `name`, without drafters.
pub(crate) fn source(name: &str) -> Result<Source> {
    if let Some(bundled) = bundled::find(name) {
        return Ok(Source::Files(Box::new(bundled.files())));
    }
    let path = Path::new(name);
    if path.is_dir() {
        return Ok(Source::Folder(path.into()));
    }
    if path.is_file() {
        // A damaged one is told what is wrong with it by the parser.
        if is_gguf_name(path) || is_gguf(path) {
            return Ok(Source::Folder(path.into()));
        }
        bail!(
            "a model is a folder with config.json and safetensors, or a .gguf file, and this is neither: `{name}`"
        );
    }
    if is_gguf_name(path) && !name.contains([':', '@']) {
        bail!("there is no file `{name}`");
    }
    match in_cache(name) {
        Some(found) => Ok(Source::Folder(found?)),
        None => bail!(
            "no such model: `{name}` is neither a folder, nor a .gguf file, nor bundled{} (bundled are {}; \
             `paceline pull ORG/NAME` fetches others)",
            nearest(name).map_or_else(String::new, |near| format!("; did you mean {near}?")),
            bundled::names()
        ),
    }
}

/// The bundled model whose name is most similar to `name`; `None` if none is similar.
fn nearest(name: &str) -> Option<&'static str> {
    /// Jaro–Winkler similarity below which names share hardly more than a few letters.
    const ALIKE: f64 = 0.8;
    let names = bundled::BUNDLED.iter().map(|b| b.name);
    let scored = names.map(|n| (strsim::jaro_winkler(n, name), n));
    let best = scored.max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 >= ALIKE).then_some(best.1)
}

/// Whether `name` names a model that is bundled or in the hub cache.
pub(crate) fn is_known(name: &str) -> bool {
    bundled::find(name).is_some() || matches!(in_cache(name), Some(Ok(_)))
}

/// The names of all models on this machine: bundled, or complete in the hub cache.
pub(crate) fn known_names() -> Vec<String> {
    let cached = Cache::new(places::hub().cache).list().unwrap_or_default();
    let cached = cached.into_iter().filter(|m| m.incomplete.is_none());
    let bundled = bundled::BUNDLED.iter().map(|b| b.name.to_owned());
    bundled.chain(cached.map(|m| m.id)).collect()
}

/// Whether a file is GGUF by its name.
pub(crate) fn is_gguf_name(path: &Path) -> bool {
    let extension = path.extension();
    extension.is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// Whether a file is GGUF by its first bytes.
fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut magic));
    read.is_ok() && &magic == b"GGUF"
}

/// Finds the drafter that a user names: a bundled one, a folder or GGUF file, or ORG/NAME in the
/// hub cache. Bundled names come first, as for models.
pub(crate) fn drafter(path: &Path) -> Result<Source> {
    let name = path.to_string_lossy();
    if let Some(files) = bundled::find_drafter(&name) {
        return Ok(Source::Files(Box::new(files)));
    }
    if path.exists() {
        return Ok(Source::Folder(path.to_owned()));
    }
    match in_cache(&name) {
        Some(found) => Ok(Source::Folder(found?)),
        None => bail!(
            "no such drafter: `{name}` is not a folder, a GGUF file, a bundled drafter or ORG/NAME"
        ),
    }
}

/// The drafters that `source` may have, in addition to a head in its own files.
pub(crate) fn drafters_of(source: &Source) -> Vec<Source> {
    match source {
        Source::Folder(folder) => drafters(&source.name(), folder).0,
        Source::Files(_) => Vec::new(),
    }
}

/// Beginnings of a name that was copied from a browser or another tool.
const HUB_PREFIXES: &[&str] = &["https://huggingface.co/", "hf.co/"];

/// Splits `ORG/NAME:FORMAT@REVISION` into repository, GGUF format and revision. Format and
/// revision may be missing.
pub(crate) fn parts(name: &str) -> (&str, Option<&str>, &str) {
    let prefix = HUB_PREFIXES.iter().find_map(|p| name.strip_prefix(p));
    let name = prefix.unwrap_or(name).trim_end_matches('/');
    let (rest, revision) = name.split_once('@').unwrap_or((name, "main"));
    match rest.split_once(':') {
        Some((id, quant)) => (id, Some(quant), revision),
        None => (rest, None, revision),
    }
}

/// The model in a snapshot: the snapshot itself if it has safetensors and no format is named,
/// else the first GGUF file of the model in the format `quant`.
fn in_snapshot(snapshot: PathBuf, quant: Option<&str>, name: &str) -> Result<PathBuf> {
    if quant.is_none() && snapshot.join("config.json").exists() {
        return Ok(snapshot);
    }
    let names = hub::files_of(&snapshot);
    let names = names.iter().map(String::as_str);
    let found = hub::gguf::files(names, quant, &format!("the hub cache's `{name}`"))?;
    Ok(snapshot.join(found[0]))
}

/// The folder or GGUF file in the hub cache that `ORG/NAME:FORMAT@REVISION` names; `None` if
/// `name` has another form.
fn in_cache(name: &str) -> Option<Result<PathBuf>> {
    let (id, quant, revision) = parts(name);
    let repo = RepoId::parse(id).ok()?;
    let settings = places::hub();
    let cache = Cache::new(&settings.cache);
    let snapshot = cache.snapshot(&repo, revision);
    Some(
        match (cache.incomplete(&repo, snapshot.as_deref()), snapshot) {
            (None, Some(snapshot)) => in_snapshot(snapshot, quant, name),
            (Some(why), Some(_)) => Err(anyhow!(
                "the download of `{repo}` is incomplete: {why} (`paceline pull {name}` resumes it)"
            )),
            (_, None) => Err(anyhow!(
                "`{name}` is neither a folder nor in the hub cache `{}` (`paceline pull {name}` fetches it)",
                settings.cache.display()
            )),
        },
    )
}

/// The drafters that the target called `name` in `folder` may have, and advice if the best of
/// them is missing.
fn drafters(name: &str, folder: &Path) -> (Vec<Source>, Option<String>) {
    let cache = Cache::new(places::hub().cache);
    let target = config(folder);
    let (mut found, mut advice): (Vec<PathBuf>, Option<String>) = (Vec::new(), None);
    let mut add = |path: PathBuf| {
        let is_new =
            !found.contains(&path) && path.canonicalize().ok() != folder.canonicalize().ok();
        if is_new {
            found.push(path);
        }
    };
    for known in known::drafters(name) {
        let Ok(repo) = RepoId::parse(known.repository) else {
            continue;
        };
        let whole = complete(&cache, &repo);
        match known.part {
            Part::Whole => match whole {
                Some(snapshot) => add(snapshot),
                None if known.is_advised => {
                    advice.get_or_insert(format!("`paceline pull {repo}` fetches its drafter"));
                }
                None => {}
            },
            Part::Head => {
                let alone = places::heads().map(|root| hub::head::folder(&root, &repo));
                let alone = alone.filter(|f| f.join("model.safetensors").is_file());
                if let Some(head) = alone.or(whole) {
                    add(head);
                } else if name != repo.as_str() {
                    advice.get_or_insert(format!(
                        "`paceline pull {repo} --head-only` fetches the head of the original"
                    ));
                }
            }
        }
    }
    let others = cache.list().unwrap_or_default();
    for other in others.into_iter().filter(|m| m.incomplete.is_none()) {
        if let Some(snapshot) = other.snapshot
            && is_head_for(&config(&snapshot), &target)
        {
            add(snapshot);
        }
    }
    mtp_heads_beside(folder, &target).into_iter().for_each(add);
    let is_matched = |head: &PathBuf| {
        let head = config(head);
        is_mtp(&head) && precision(&head) == precision(&target)
    };
    found.sort_by_cached_key(|head| !is_matched(head));
    (found.into_iter().map(Source::Folder).collect(), advice)
}

/// Folders beside that of a target, called MTP heads by their names and their configurations, of
/// the target's width; by name.
fn mtp_heads_beside(folder: &Path, target: &Value) -> Vec<PathBuf> {
    let whole = folder.canonicalize().ok();
    let entries = whole.as_deref().and_then(Path::parent);
    let entries = entries.and_then(|parent| parent.read_dir().ok());
    let paths = entries.into_iter().flatten().filter_map(Result::ok);
    let is_called_so = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        name.to_lowercase().contains("mtp")
    };
    let mut heads: Vec<PathBuf> = paths.map(|e| e.path()).filter(is_called_so).collect();
    heads.retain(|path| {
        let head = config(path);
        is_mtp(&head) && is_head_for(&head, target)
    });
    heads.sort();
    heads
}

/// Whether a configuration is that of an MTP head published alone.
fn is_mtp(config: &Value) -> bool {
    let model_type = config["model_type"].as_str();
    model_type.is_some_and(|t| t.ends_with("_mtp"))
}

/// How the matrices of a checkpoint are quantized, by its configuration: mode and bits, or nothing
/// of one whose matrices are not.
fn precision(config: &Value) -> Option<(&str, u64)> {
    let own = ["quantization", "quantization_config"];
    let own = own.iter().find_map(|key| config.get(*key))?;
    let mode = own["mode"].as_str().or(own["quant_method"].as_str());
    Some((mode.unwrap_or("affine"), own["bits"].as_u64().unwrap_or(0)))
}

/// Whether the checkpoint in `folder` has an MTP head.
pub(crate) fn has_head(folder: &Path) -> bool {
    let checkpoint = weights::Checkpoint::open(folder);
    checkpoint.is_ok_and(|c| c.names().any(|name| name.starts_with("mtp.")))
}

/// The snapshot of `repo` if it is in the cache and complete.
fn complete(cache: &Cache, repo: &RepoId) -> Option<PathBuf> {
    let snapshot = cache.snapshot(repo, "main")?;
    let incomplete = cache.incomplete(repo, Some(&snapshot));
    incomplete.is_none().then_some(snapshot)
}

/// Whether `head` is the configuration of a draft head with the hidden size of `target`.
fn is_head_for(head: &Value, target: &Value) -> bool {
    let text = |config: &Value, key: &str| -> Option<u64> {
        let nested = config.get("text_config").and_then(|t| t.get(key));
        nested.or_else(|| config.get(key))?.as_u64()
    };
    let width = engine::suggested_width(head);
    width.is_some() && width == text(target, "hidden_size")
}

/// Whether the configuration in `folder` is that of a draft head, which is no model by itself.
pub(crate) fn is_head(folder: &Path) -> bool {
    engine::suggested_width(&config(folder)).is_some()
}

/// The contents of `config.json` in `folder`; `null` if it cannot be read.
fn config(folder: &Path) -> Value {
    let file = folder.join("config.json");
    let fits = file
        .metadata()
        .is_ok_and(|m| m.is_file() && m.len() <= CONFIG_BYTES_MAX);
    let bytes = if fits { std::fs::read(file).ok() } else { None };
    let parsed = bytes.and_then(|b| serde_json::from_slice(&b).ok());
    parsed.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_that_is_quantized_as_the_model_is_comes_first() {
        let root = std::env::temp_dir().join(format!("paceline-heads-{}", std::process::id()));
        let folder = |name: &str, config: Value| {
            let path = root.join(name);
            std::fs::create_dir_all(&path).unwrap();
            std::fs::write(path.join("config.json"), config.to_string()).unwrap();
            path
        };
        let of = |model_type: &str, hidden: u64, quantization: Value| {
            let text = serde_json::json!({"hidden_size": hidden});
            let mut config = serde_json::json!({"model_type": model_type, "text_config": text});
            config["quantization"] = quantization;
            config
        };
        let bits = |n: u64| serde_json::json!({"bits": n, "group_size": 64, "mode": "affine"});
        let target = folder("M-8bit", of("qwen3_5", 64, bits(8)));
        let mut plain = of("qwen3_5_mtp", 64, Value::Null);
        plain.as_object_mut().unwrap().remove("quantization");
        let heads = [
            folder("M-MTP", plain),
            folder("M-MTP-4bit", of("qwen3_5_mtp", 64, bits(4))),
            folder("M-MTP-8bit", of("qwen3_5_mtp", 64, bits(8))),
        ];
        folder("other-mtp", of("qwen3_5_mtp", 32, bits(8)));
        folder("notes-on-mtp", of("qwen3_5", 64, bits(8)));
        let (found, _) = drafters("M-8bit", &target);
        let found: Vec<PathBuf> = found
            .into_iter()
            .filter_map(|source| match source {
                Source::Folder(path) if path.starts_with(root.canonicalize().ok()?) => Some(path),
                _ => None,
            })
            .collect();
        let [whole, four, eight] = heads.map(|path| path.canonicalize().unwrap());
        assert_eq!(found, [eight, whole, four]);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn names_are_near_or_not() {
        assert_eq!(nearest("tiny-qwen"), Some("tiny-qwen3.5"));
        assert_eq!(nearest("tiny-gema4"), Some("tiny-gemma4"));
        assert_eq!(nearest("llama3"), None);
    }

    #[test]
    fn a_bundled_name_is_no_path() {
        assert!(matches!(
            source(bundled::DEFAULT).unwrap(),
            Source::Files(_)
        ));
        assert!(matches!(source("src").unwrap(), Source::Folder(_)));
        let error = source("no-such-model").unwrap_err().to_string();
        assert!(error.contains(bundled::DEFAULT), "{error}");
        let error = source("Cargo.toml").unwrap_err().to_string();
        assert!(error.contains(".gguf"), "{error}");
        let error = source("no-such/model.gguf").unwrap_err().to_string();
        assert!(error.contains("no file"), "{error}");
        let error = source("no-such/model").unwrap_err().to_string();
        assert!(error.contains("paceline pull no-such/model"), "{error}");
        let copied = "https://huggingface.co/org/model:Q4_0/";
        assert_eq!(parts(copied), ("org/model", Some("Q4_0"), "main"));
    }
}
