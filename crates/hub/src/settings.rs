//! The address of the hub, its cache and the token, from the environment variables that
//! other tools read too.

use crate::HubError;
use std::ffi::OsString;
use std::path::PathBuf;

/// The hub that is used by default.
const ENDPOINT: &str = "https://huggingface.co";
/// Most bytes of an organization's or a model's name.
const MAX_NAME: usize = 96;
/// Most bytes of a token in a file.
const MAX_TOKEN: usize = 4096;

/// The address of the hub, its cache, and the token to ask with.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The folder of the cache: `HF_HUB_CACHE`, else `HF_HOME/hub`, else
    /// `~/.cache/huggingface/hub`.
    pub cache: PathBuf,
    /// The address of the hub, without a slash at the end: `HF_ENDPOINT`.
    pub endpoint: String,
    /// The access token: `HF_TOKEN`, else the contents of the file `HF_TOKEN_PATH` or
    /// `HF_HOME/token`.
    pub token: Option<String>,
    /// Whether only the cache may be used: `HF_HUB_OFFLINE`.
    pub offline: bool,
}

impl Settings {
    /// Reads the settings from the variables that `variable` looks up, so that only the caller
    /// knows the environment.
    pub fn from_variables(variable: impl Fn(&str) -> Option<OsString>) -> Settings {
        let path = |name: &str| variable(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let text = |name: &str| {
            let value = variable(name)?.into_string().ok()?;
            Some(value.trim().to_owned()).filter(|v| !v.is_empty())
        };
        let home = path("HF_HOME").unwrap_or_else(|| {
            let cache = path("XDG_CACHE_HOME")
                .or_else(|| Some(path("HOME").or_else(|| path("USERPROFILE"))?.join(".cache")));
            cache.unwrap_or_default().join("huggingface")
        });
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let from_file = || {
            let token = std::fs::read_to_string(token_file).ok()?;
            let token = token.trim();
            (!token.is_empty() && token.len() <= MAX_TOKEN).then(|| token.to_owned())
        };
        let is_yes = |value: String| ["1", "true", "yes", "on"].contains(&&*value.to_lowercase());
        Settings {
            cache: path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")),
            endpoint: text("HF_ENDPOINT")
                .unwrap_or_else(|| ENDPOINT.to_owned())
                .trim_end_matches('/')
                .to_owned(),
            token: text("HF_TOKEN").or_else(from_file),
            offline: text("HF_HUB_OFFLINE").is_some_and(is_yes),
        }
    }
}

/// The name of a repository of models, `ORG/NAME`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RepoId(String);

impl RepoId {
    /// Parses the name of a repository.
    ///
    /// # Errors
    ///
    /// [`HubError::BadId`] if it is not `ORG/NAME` of letters, digits, `-`, `_` and
    /// `.`, which is all the hub allows.
    pub fn parse(name: &str) -> Result<RepoId, HubError> {
        let is_part = |part: &str| {
            !part.is_empty()
                && part.len() <= MAX_NAME
                && !part.starts_with(['.', '-'])
                && !part.contains("..")
                // The cache folder separates the two with it.
                && !part.contains("--")
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        };
        match name.split_once('/') {
            Some((org, model)) if is_part(org) && is_part(model) => Ok(RepoId(name.to_owned())),
            _ => Err(HubError::BadId {
                name: name.to_owned(),
            }),
        }
    }

    /// The whole name, `ORG/NAME`.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The name of the model, `NAME`.
    pub fn model(&self) -> &str {
        self.0.split_once('/').map_or(&*self.0, |(_, model)| model)
    }

    /// The name of the repository's folder in the cache.
    pub fn folder(&self) -> String {
        format!("models--{}", self.0.replace('/', "--"))
    }

    /// The repository whose folder in the cache has this `name`; `None` if no repository has.
    pub fn of_folder(name: &str) -> Option<RepoId> {
        let (org, model) = name.strip_prefix("models--")?.split_once("--")?;
        RepoId::parse(&format!("{org}/{model}")).ok()
    }
}

impl std::fmt::Display for RepoId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(variables: &[(&str, &str)]) -> Settings {
        Settings::from_variables(|name| {
            let found = variables.iter().find(|(n, _)| *n == name);
            found.map(|(_, value)| value.into())
        })
    }

    #[test]
    fn variables_count_in_the_order_of_other_tools() {
        let plain = settings(&[("HOME", "/h")]);
        assert_eq!(plain.cache, PathBuf::from("/h/.cache/huggingface/hub"));
        assert_eq!(plain.endpoint, "https://huggingface.co");
        assert!(!plain.offline && plain.token.is_none());
        let xdg = settings(&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")]);
        assert_eq!(xdg.cache, PathBuf::from("/x/huggingface/hub"));
        let home = settings(&[("HOME", "/h"), ("HF_HOME", "/m"), ("HF_TOKEN", " t\n")]);
        assert_eq!(home.cache, PathBuf::from("/m/hub"));
        assert_eq!(home.token.as_deref(), Some("t"));
        let all = settings(&[
            ("HF_HOME", "/m"),
            ("HF_HUB_CACHE", "/c"),
            ("HF_ENDPOINT", "http://localhost:1/"),
            ("HF_HUB_OFFLINE", "True"),
        ]);
        assert_eq!(all.cache, PathBuf::from("/c"));
        assert_eq!(all.endpoint, "http://localhost:1");
        assert!(all.offline);
        assert!(!settings(&[("HF_HUB_OFFLINE", "0")]).offline);
    }

    #[test]
    fn only_names_of_the_hub_become_paths() {
        for good in ["google/gemma-4-E4B-it", "a/b", "Org_1/x.y-z"] {
            let repo = RepoId::parse(good).unwrap();
            assert_eq!(RepoId::of_folder(&repo.folder()), Some(repo));
        }
        for bad in [
            "", "a", "a/", "/b", "a/b/c", "../b", "a/..", "a/.b", "a b/c", "a/b\0", "a\\b/c",
            "a--b/c", "-a/b",
        ] {
            assert!(RepoId::parse(bad).is_err(), "{bad}");
        }
    }
}
