//! Folders outside the current one, from the environment.

use std::ffi::OsString;
use std::path::PathBuf;

/// The address of the hub, and its cache, which other tools share.
pub(crate) fn hub() -> hub::Settings {
    hub::Settings::from_variables(|name| std::env::var_os(name))
}

/// The folder for what can be made again (results of trials, hashes, compiled GPU code):
/// `$XDG_CACHE_HOME/paceline`. `None` without a home folder.
pub(crate) fn cache() -> Option<PathBuf> {
    under("XDG_CACHE_HOME", ".cache")
}

/// The folder for draft heads that were fetched without their checkpoint:
/// `$XDG_DATA_HOME/paceline/heads`. `None` without a home folder.
pub(crate) fn heads() -> Option<PathBuf> {
    Some(under("XDG_DATA_HOME", ".local/share")?.join("heads"))
}

/// The folder for what is remembered of runs (the history of `chat`, which servers run):
/// `$XDG_STATE_HOME/paceline`. `None` without a home folder.
pub(crate) fn state() -> Option<PathBuf> {
    under("XDG_STATE_HOME", ".local/state")
}

/// The folder `paceline` in the folder that `variable` names, else in `in_home` of the home
/// folder.
fn under(variable: &str, in_home: &str) -> Option<PathBuf> {
    let path = |name| {
        let value: Option<OsString> = std::env::var_os(name);
        value.filter(|v| !v.is_empty()).map(PathBuf::from)
    };
    let root = path(variable).or_else(|| Some(path("HOME")?.join(in_home)))?;
    Some(root.join("paceline"))
}
