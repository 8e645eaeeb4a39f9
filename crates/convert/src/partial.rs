//! Files and folders that appear whole or not at all.
//!
//! What is being written to `OUT` lies in a folder beside it until it is complete:
//!
//! ```text
//! OUT.partial-PID/LOCK    locked for as long as the process writes
//! OUT.partial-PID/OUT     renamed to OUT at the end
//! ```
//!
//! A process that was killed leaves its folder, but not its lock: the next one that writes
//! beside it removes the folder. Folders whose lock is held, or that have none, stay.

use crate::ConvertError;
use crate::error::io_error;
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

/// The file that a process locks.
const LOCK: &str = "paceline.lock";
/// Times that a folder is made anew after another process took it for one left behind.
const MAX_TRIES: usize = 8;

/// Makes `to` by calling `make` with another path, and renames it if that went well.
pub(crate) fn whole_or_nothing(
    to: &Path,
    make: impl FnOnce(&Path) -> Result<(), ConvertError>,
) -> Result<(), ConvertError> {
    let parent = to.parent().filter(|p| !p.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    if let Err(source) = fs::metadata(parent) {
        return Err(io_error(parent, source));
    }
    sweep(parent);
    // A link that leads nowhere is in the way too.
    if to.symlink_metadata().is_ok() {
        return Err(ConvertError::Exists(to.into()));
    }
    let folder = Folder::new(to).map_err(|source| io_error(to, source))?;
    let inside = folder.path.join(to.file_name().unwrap_or_default());
    make(&inside).and_then(|()| fs::rename(&inside, to).map_err(|source| io_error(to, source)))
}

/// The folder in which this process writes; removed when dropped.
struct Folder {
    path: PathBuf,
    _lock: File,
}

impl Folder {
    fn new(to: &Path) -> io::Result<Folder> {
        let mut name = to.file_name().unwrap_or_default().to_owned();
        name.push(format!(".partial-{}", std::process::id()));
        let path = to.with_file_name(name);
        for _ in 0..MAX_TRIES {
            fs::create_dir(&path)?;
            let locked = File::create(path.join(LOCK));
            if let Ok(lock) = &locked {
                // File systems without locks: then nothing can be swept there either.
                let _ = lock.lock();
            }
            match locked {
                // Between the two steps another process may have swept the folder.
                Ok(lock) if path.join(LOCK).exists() => return Ok(Folder { path, _lock: lock }),
                Err(e) if e.kind() != io::ErrorKind::NotFound => {
                    let _ = fs::remove_dir(&path);
                    return Err(e);
                }
                _ => {}
            }
        }
        Err(io::Error::other("its temporary folder keeps disappearing"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        // What is left in it is ours, and an error of `make` is what counts.
        let _ = fs::remove_dir_all(&self.path);
    }
}

/// Removes what processes that are gone have left in `parent`.
fn sweep(parent: &Path) {
    let Ok(entries) = fs::read_dir(parent) else {
        return;
    };
    for entry in entries.filter_map(Result::ok) {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let id = name.rsplit_once(".partial-").map_or("", |(_, id)| id);
        let is_named_so = !id.is_empty() && id.bytes().all(|b| b.is_ascii_digit());
        if !is_named_so || !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let folder = entry.path();
        let lock = File::options().append(true).open(folder.join(LOCK));
        if lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
            // What cannot be removed is in nobody's way.
            let _ = fs::remove_dir_all(&folder);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        let id = std::process::id();
        let path = std::env::temp_dir().join(format!("paceline-partial-{name}-{id}"));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("a folder");
        path
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let name = |e: io::Result<fs::DirEntry>| e.expect("an entry").file_name();
        let mut names: Vec<String> = entries
            .map(|e| name(e).to_string_lossy().into_owned())
            .collect();
        names.sort();
        names
    }

    fn write(path: &Path) -> Result<(), ConvertError> {
        fs::write(path, "whole").map_err(|source| io_error(path, source))
    }

    #[test]
    fn what_killed_processes_left_is_removed_and_nothing_else() {
        let folder = folder("sweep");
        let to = folder.join("out.gguf");
        let make = |name: &str, files: &[&str]| {
            let path = folder.join(name);
            fs::create_dir(&path).expect("a folder");
            for file in files {
                fs::write(path.join(file), "half").expect("a file");
            }
            path
        };
        make("out.gguf.partial-11", &[LOCK, "out.gguf"]);
        make("other.partial-12", &[LOCK, "other"]);
        let running = make("out.gguf.partial-13", &[LOCK, "out.gguf"]);
        let lock = File::open(running.join(LOCK)).expect("a lock");
        lock.lock().expect("locked");
        make("out.gguf.partial-14", &["mine.txt"]);
        make("out.gguf.partial-x", &[LOCK]);
        fs::write(folder.join("out.partial-15"), "mine").expect("a file");
        whole_or_nothing(&to, write).expect("written");
        let kept = [
            "out.gguf",
            "out.gguf.partial-13",
            "out.gguf.partial-14",
            "out.gguf.partial-x",
            "out.partial-15",
        ];
        assert_eq!(names(&folder), kept);
        drop(lock);
        fs::remove_file(&to).expect("removed");
        whole_or_nothing(&to, write).expect("written");
        assert!(!running.exists());
        fs::remove_dir_all(folder).expect("removed");
    }

    #[test]
    fn a_failure_leaves_nothing() {
        let folder = folder("failure");
        let to = folder.join("out");
        let error = whole_or_nothing(&to, |path| {
            write(path)?;
            Err(ConvertError::Gguf("full".into()))
        });
        assert_eq!(error.expect_err("a failure").to_string(), "full");
        assert_eq!(names(&folder), [] as [&str; 0]);
        let nowhere = folder.join("none").join("out");
        let error = whole_or_nothing(&nowhere, write).expect_err("a failure");
        let none = folder.join("none").display().to_string();
        assert!(error.to_string().contains(&format!("`{none}`")), "{error}");
        fs::remove_dir_all(folder).expect("removed");
    }
}
