//! The folders that a user's programs share, from the environment.

use std::ffi::OsString;
use std::path::PathBuf;

/// The settings of the hub: its endpoint, its cache folder and the token.
pub(crate) fn hub() -> hub::Settings {
    hub::Settings::from_variables(|name| std::env::var_os(name))
}

/// What can be made again: results of trials, hashes, code for GPUs. `$XDG_CACHE_HOME/paceline`.
pub(crate) fn cache() -> Option<PathBuf> {
    under("XDG_CACHE_HOME", ".cache")
}

/// Draft heads that were fetched without their checkpoint. `$XDG_DATA_HOME/paceline/heads`.
pub(crate) fn heads() -> Option<PathBuf> {
    Some(under("XDG_DATA_HOME", ".local/share")?.join("heads"))
}

fn under(variable: &str, in_home: &str) -> Option<PathBuf> {
    let path = |name| {
        let value: Option<OsString> = std::env::var_os(name);
        value.filter(|v| !v.is_empty()).map(PathBuf::from)
    };
    let root = path(variable).or_else(|| Some(path("HOME")?.join(in_home)))?;
    Some(root.join("paceline"))
}
