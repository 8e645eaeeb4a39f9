//! Files of one folder.

use crate::error::FileError;
use percent_encoding::percent_decode_str;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

/// A folder whose files may be read, and nothing else.
#[derive(Clone, Debug)]
pub struct Folder {
    /// The folder, without links in its path.
    root: PathBuf,
}

impl Folder {
    /// The folder at `path`.
    ///
    /// # Errors
    ///
    /// If there is none.
    pub fn open(path: &Path) -> io::Result<Folder> {
        let root = path.canonicalize()?;
        match root.is_dir() {
            true => Ok(Folder { root }),
            false => Err(io::ErrorKind::NotADirectory.into()),
        }
    }

    /// Reads the regular file that `name` means, of at most `bytes_max` bytes: a path, absolute or
    /// from the folder, or a URL such as `file:///media/cat.png` or `file://cat.png`. Links are
    /// followed within the folder.
    ///
    /// # Errors
    ///
    /// [`FileError`]; a message follows the words for the file, such as "the picture".
    pub fn read(&self, name: &str, bytes_max: usize) -> Result<Vec<u8>, FileError> {
        let path = path_of(name).ok_or(FileError::NoFile)?;
        let path = self.root.join(path).canonicalize();
        let path = path.map_err(|_| FileError::NoFile)?;
        let inside = path
            .strip_prefix(&self.root)
            .map_err(|_| FileError::NoFile)?;
        let file = open(&self.root, inside).map_err(|_| FileError::NoFile)?;
        let meta = file.metadata().map_err(|_| FileError::NoFile)?;
        if !meta.is_file() {
            return Err(FileError::NoFile);
        }
        if meta.len() > bytes_max as u64 {
            return Err(FileError::TooLarge(bytes_max));
        }
        let mut bytes = Vec::new();
        // A file that grows meanwhile is too large, too.
        let read = file.take(bytes_max as u64 + 1).read_to_end(&mut bytes);
        match read {
            Ok(_) if bytes.len() > bytes_max => Err(FileError::TooLarge(bytes_max)),
            Ok(_) => Ok(bytes),
            Err(_) => Err(FileError::NoFile),
        }
    }
}

/// The path that `name` means.
fn path_of(name: &str) -> Option<PathBuf> {
    const SCHEME: &str = "file:";
    let scheme = name.get(..SCHEME.len());
    if !scheme.is_some_and(|scheme| scheme.eq_ignore_ascii_case(SCHEME)) {
        return Some(name.into());
    }
    let rest = &name[SCHEME.len()..];
    let rest = rest.strip_prefix("//").unwrap_or(rest);
    let rest = match rest.strip_prefix("localhost/") {
        Some(_) => &rest["localhost".len()..],
        None => rest,
    };
    let path = percent_decode_str(rest).decode_utf8().ok()?;
    Some(path.into_owned().into())
}

/// Opens the file at `inside`, a path without links, below the folder `root`. A link that has come to
/// be there since the path was found is an error, as is a folder.
#[cfg(unix)]
fn open(root: &Path, inside: &Path) -> io::Result<File> {
    use rustix::fs::{Mode, OFlags, openat};
    let mut at = File::open(root)?;
    let mut parts = inside.components().peekable();
    while let Some(part) = parts.next() {
        let Component::Normal(name) = part else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        let kind = match parts.peek() {
            Some(_) => OFlags::DIRECTORY,
            // A pipe would wait for somebody who writes.
            None => OFlags::NONBLOCK,
        };
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | kind;
        at = openat(&at, name, flags, Mode::empty())?.into();
    }
    Ok(at)
}

#[cfg(not(unix))]
fn open(root: &Path, inside: &Path) -> io::Result<File> {
    File::open(root.join(inside))
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    /// `media` with files and links, beside `secret`, in a folder of its own for the test `name`.
    fn made(name: &str) -> (Folder, PathBuf) {
        let temp = std::env::temp_dir().canonicalize().unwrap();
        let above = temp.join(format!("fetch-{name}-{}", std::process::id()));
        let media = above.join("media");
        fs::create_dir_all(media.join("cats")).unwrap();
        fs::write(media.join("a b.png"), "own").unwrap();
        fs::write(media.join("cats/c.png"), "cat").unwrap();
        fs::write(above.join("secret"), "secret").unwrap();
        fs::create_dir_all(above.join("media-other")).unwrap();
        fs::write(above.join("media-other/x"), "secret").unwrap();
        symlink("cats/c.png", media.join("inside")).unwrap();
        symlink("../secret", media.join("outside")).unwrap();
        symlink(above.join("secret"), media.join("far")).unwrap();
        symlink(&above, media.join("up")).unwrap();
        symlink("round", media.join("round")).unwrap();
        (Folder::open(&media).unwrap(), above)
    }

    #[test]
    fn files_of_the_folder_are_read_by_every_name() {
        let (folder, above) = made("names");
        let whole = above.join("media").display().to_string();
        for (name, text) in [
            ("a b.png".to_owned(), "own"),
            ("./cats/../a b.png".to_owned(), "own"),
            ("cats/c.png".to_owned(), "cat"),
            ("inside".to_owned(), "cat"),
            (format!("{whole}/cats/c.png"), "cat"),
            (format!("file://{whole}/a%20b.png"), "own"),
            (format!("FILE://localhost{whole}/cats/c.png"), "cat"),
            (format!("file:{whole}/cats/c.png"), "cat"),
            ("file://cats/c.png".to_owned(), "cat"),
        ] {
            assert_eq!(
                folder.read(&name, 3),
                Ok(text.as_bytes().to_vec()),
                "{name}"
            );
        }
        assert_eq!(folder.read("cats/c.png", 2), Err(FileError::TooLarge(2)));
        fs::remove_dir_all(above).unwrap();
    }

    #[test]
    fn nothing_else_is_read_and_nothing_is_told_of_it() {
        let (folder, above) = made("others");
        let fifo = above.join("media/pipe");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status();
        assert!(made.unwrap().success());
        let whole = above.display().to_string();
        for name in [
            "",
            ".",
            "cats",
            "none.png",
            "outside",
            "far",
            "up/secret",
            "round",
            "pipe",
            "../secret",
            "cats/../../secret",
            "a b.png/",
            "a b.png/x",
            "a\0b",
            "/etc/passwd",
            "/dev/zero",
            "../media-other/x",
            "file:///etc/passwd",
            "file://../secret",
            "file://%2e%2e/secret",
            "file://..%2fsecret",
            "file://%00",
            "file://%ff",
            "file://other-host/etc/passwd",
            &format!("{whole}/secret"),
            &format!("file://{whole}/media-other/x"),
            &format!("file://{whole}/media/../secret"),
            &"x/".repeat(100_000),
        ] {
            assert_eq!(folder.read(name, 100), Err(FileError::NoFile), "{name:.80}");
        }
        assert!(Folder::open(&above.join("secret")).is_err());
        assert!(Folder::open(&above.join("none")).is_err());
        fs::remove_dir_all(above).unwrap();
    }

    #[test]
    fn a_link_that_comes_between_check_and_opening_is_not_followed() {
        let (_, above) = made("race");
        let root = above.join("media");
        assert!(open(&root, Path::new("cats/c.png")).is_ok());
        for name in ["outside", "inside", "up/secret", "../secret", "/etc/passwd"] {
            assert!(open(&root, Path::new(name)).is_err(), "{name}");
        }
        fs::remove_dir_all(above).unwrap();
    }
}
