//! The folder of saved texts: names, whose texts they are, and how much of it there may be.
//!
//! ```text
//! key                          32 random bytes, from which namespaces get their tags
//! 0f3a…-01999.kept             a text: hash of what it is, rows     speculate::saved::file
//! 0f3a…-01999.kept.PID.part    one that is being written
//! ```
//!
//! Several servers may use one folder: a file is there when it is whole, files of equal names have
//! equal texts, and whoever finds one gone goes without it. Nothing else in the folder is touched.

use cache::{Namespace, RowKey};
use sha2::{Digest, Sha256};
use speculate::saved::file::Head;
use std::collections::hash_map::RandomState;
use std::fmt;
use std::fs::{self, File, OpenOptions};
use std::hash::BuildHasher;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

/// The file of random bytes.
const KEY: &str = "key";

/// How the names of saved texts end.
const SUFFIX: &str = ".kept";

/// How the names of files end that are being written.
const PART: &str = ".part";

/// After how long a file that is being written counts as left behind.
const PART_AGE: Duration = Duration::from_secs(3600);

/// Texts that were used more lately than so are as worth as if they had not been.
const AGE_LEAST: Duration = Duration::from_secs(600);

/// Saved texts at the most: what their rows were computed from is in memory.
const FILES_MAX: usize = 512;

/// Rows whose attention costs as much as everything else in a layer, roughly, as for texts in memory.
const ATTENTION_ROWS: f64 = 8192.0;

/// A folder in which ended texts of the prefix cache outlive the engine. It has files that only their
/// owner can read: they have what users and models wrote, as tokens, keys and values.
#[derive(Clone)]
pub struct CacheFolder {
    path: PathBuf,
    bytes_max: u64,
    /// What makes tags of namespaces.
    key: [u8; 32],
}

impl fmt::Debug for CacheFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (path, bytes_max) = (self.path.display(), self.bytes_max);
        write!(f, "{bytes_max} bytes in {path}")
    }
}

/// A saved text, by what its name and its file say.
#[derive(Clone, Debug)]
pub(super) struct Listed {
    pub(super) name: String,
    rows: usize,
    pub(super) bytes: u64,
    /// When it was last written or read.
    used: SystemTime,
}

impl Listed {
    /// What the text is worth beside others: rows that would have to run again, later ones costing
    /// more, for each byte that it takes and each second that nobody asked for it.
    fn worth(&self, now: SystemTime) -> f64 {
        let rows = self.rows as f64;
        let cost = rows * (1.0 + rows / (2.0 * ATTENTION_ROWS));
        let age = now.duration_since(self.used).unwrap_or_default();
        cost / (self.bytes as f64 + 1.0) / age.max(AGE_LEAST).as_secs_f64()
    }
}

impl CacheFolder {
    /// The folder at `path`, made if needed, for `bytes_max` bytes of files.
    ///
    /// # Errors
    ///
    /// If there is no such folder and none can be made, or its key cannot be read.
    pub fn open(path: &Path, bytes_max: u64) -> io::Result<CacheFolder> {
        make_folder(path)?;
        Ok(CacheFolder {
            path: path.to_owned(),
            bytes_max,
            key: key(path)?,
        })
    }

    /// Bytes of files, at most.
    pub(super) fn bytes_max(&self) -> u64 {
        self.bytes_max
    }

    /// Where the file called `name` is.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The tag of `namespace` on disk: without the folder's key nobody can tell whose it is, or try
    /// whose it could be.
    pub(super) fn tag(&self, namespace: Namespace) -> Namespace {
        let hash = Sha256::new().chain_update(self.key);
        Namespace(hash.chain_update(namespace.0).finalize().into())
    }

    /// Saved texts, the one last used first.
    pub(super) fn list(&self) -> Vec<Listed> {
        let Ok(entries) = fs::read_dir(&self.path) else {
            return Vec::new();
        };
        let listed = |entry: io::Result<fs::DirEntry>| {
            let entry = entry.ok()?;
            let name = entry.file_name().into_string().ok()?;
            let meta = entry.metadata().ok().filter(fs::Metadata::is_file)?;
            Some(Listed {
                rows: rows(&name)?,
                name,
                bytes: meta.len(),
                used: meta.modified().ok()?,
            })
        };
        let mut all: Vec<Listed> = entries.filter_map(listed).collect();
        all.sort_by(|a, b| b.used.cmp(&a.used).then(a.name.cmp(&b.name)));
        all
    }

    /// Removes what writers have left behind that ended long ago.
    pub(super) fn sweep(&self) {
        let entries = fs::read_dir(&self.path).into_iter().flatten().flatten();
        for entry in entries {
            let name = entry.file_name();
            let is_part = name.to_str().is_some_and(|name| {
                let text = name.strip_suffix(PART).and_then(|n| n.rsplit_once('.'));
                text.is_some_and(|(text, _)| rows(text).is_some())
            });
            let modified = entry.metadata().and_then(|meta| meta.modified());
            let age = modified.map(|at| at.elapsed().unwrap_or_default());
            if is_part && age.is_ok_and(|age| age > PART_AGE) {
                let _ = fs::remove_file(entry.path());
            }
        }
    }

    /// A file for the text called `name` that is not there before it is whole.
    pub(super) fn begin(&self, name: &str) -> io::Result<(PathBuf, File)> {
        let path = self
            .path
            .join(format!("{name}.{}{PART}", std::process::id()));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        private(&mut options);
        let file = options.open(&path)?;
        Ok((path, file))
    }

    /// Removes the texts of least worth until there is room for one of `bytes` bytes more. Returns
    /// the names of those that are gone.
    pub(super) fn make_room(&self, name: &str, bytes: u64) -> Vec<String> {
        let now = SystemTime::now();
        let mut all = self.list();
        all.retain(|listed| listed.name != name);
        all.sort_by(|a, b| b.worth(now).total_cmp(&a.worth(now)));
        let mut sum: u64 = bytes + all.iter().map(|listed| listed.bytes).sum::<u64>();
        let mut gone = Vec::new();
        while (sum > self.bytes_max || all.len() >= FILES_MAX)
            && let Some(least) = all.pop()
        {
            let _ = fs::remove_file(self.file(&least.name));
            sum -= least.bytes;
            gone.push(least.name);
        }
        gone
    }
}

/// The name of the file of `head`: texts of equal names are computed from the same, by the same.
pub(super) fn name(head: &Head) -> String {
    let mut hash = Sha256::new();
    hash.update(head.identity);
    hash.update(head.namespace.0);
    for key in &head.keys {
        match key {
            RowKey::Token(token) => hash.update(token.to_le_bytes()),
            RowKey::Media { hash: of, row } => {
                hash.update(of);
                hash.update(row.to_le_bytes());
            }
        }
    }
    let hex = hash.finalize();
    let hex = hex.iter().take(16).map(|byte| format!("{byte:02x}"));
    let hex: String = hex.collect();
    format!("{hex}-{:05}{SUFFIX}", head.text.target.rows)
}

/// The rows of the text whose file is called `name`, if that is one.
fn rows(name: &str) -> Option<usize> {
    let (hash, rows) = name.strip_suffix(SUFFIX)?.split_once('-')?;
    let is_hash = hash.len() == 32 && hash.bytes().all(|b| b.is_ascii_hexdigit());
    rows.parse().ok().filter(|_| is_hash)
}

/// Makes the folder at `path`, if needed, for its owner alone.
fn make_folder(path: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(path)
}

/// Has files that are made with `options` be their owner's alone.
fn private(options: &mut OpenOptions) {
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(options, 0o600);
    #[cfg(not(unix))]
    let _ = options;
}

/// The key of the folder at `path`, made if there is none.
fn key(path: &Path) -> io::Result<[u8; 32]> {
    let file = path.join(KEY);
    if !file.exists() {
        let part = path.join(format!("{KEY}.{}{PART}", std::process::id()));
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        private(&mut options);
        options.open(&part)?.write_all(&random())?;
        // Another server may be faster: the one key that is there counts.
        let linked = fs::hard_link(&part, &file);
        let moved = match linked {
            Err(_) if !file.exists() => fs::rename(&part, &file),
            _ => fs::remove_file(&part),
        };
        moved?;
    }
    let mut key = [0; 32];
    File::open(&file)?.read_exact(&mut key)?;
    Ok(key)
}

/// 32 bytes that nobody can guess.
fn random() -> [u8; 32] {
    let mut hash = Sha256::new();
    // The system's random numbers where there is such a file; the standard library has some too.
    let mut bytes = [0; 32];
    let read = File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    if read.is_ok() {
        hash.update(bytes);
    }
    for salt in 0..8 {
        hash.update(RandomState::new().hash_one(salt).to_le_bytes());
    }
    hash.finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use speculate::saved::SavedText;

    /// A folder of this test's own.
    fn folder(test: &str, bytes_max: u64) -> CacheFolder {
        let path = std::env::temp_dir().join(format!("paceline-{test}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&path);
        CacheFolder::open(&path, bytes_max).unwrap()
    }

    fn name_of(tokens: u32) -> String {
        name(&Head {
            keys: (0..tokens).map(RowKey::Token).collect(),
            text: SavedText::default(),
            ..Head::default()
        })
    }

    #[test]
    fn a_folder_and_its_files_are_their_owners_alone_and_tags_need_the_key() {
        let folder = folder("own", 1000);
        let (path, _) = folder.begin(&name_of(1)).unwrap();
        #[cfg(unix)]
        {
            use std::os::unix::fs::PermissionsExt;
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode(&folder.path), 0o700);
            assert_eq!(mode(&path), 0o600);
            assert_eq!(mode(&folder.file(KEY)), 0o600);
        }
        let other = super::tests::folder("other", 1000);
        let namespace = Namespace([5; 32]);
        let again = CacheFolder::open(&folder.path, 1000).unwrap();
        assert_eq!(again.tag(namespace), folder.tag(namespace));
        assert_ne!(other.tag(namespace), folder.tag(namespace));
        assert_ne!(folder.tag(Namespace([6; 32])), folder.tag(namespace));
        for folder in [folder, other] {
            fs::remove_dir_all(folder.path).unwrap();
        }
    }

    #[test]
    fn what_is_used_least_makes_room_and_other_files_stay() {
        let folder = folder("room", 1000);
        let now = SystemTime::now();
        let names: Vec<String> = (1..5).map(name_of).collect();
        for (age, name) in (1..).zip(&names) {
            fs::write(folder.file(name), [0; 300]).unwrap();
            let file = File::options().write(true).open(folder.file(name)).unwrap();
            file.set_modified(now - Duration::from_secs(1000 * age))
                .unwrap();
        }
        fs::write(folder.file("notes.txt"), [0; 5000]).unwrap();
        let listed: Vec<String> = folder.list().into_iter().map(|l| l.name).collect();
        assert_eq!(listed, names);
        let gone = folder.make_room(&name_of(9), 300);
        assert_eq!(gone, [names[3].clone(), names[2].clone()]);
        assert_eq!(folder.list().len(), 2);
        // One that is written again takes its own place.
        assert_eq!(folder.make_room(&names[0], 600), Vec::<String>::new());
        assert!(folder.file("notes.txt").exists());
        fs::remove_dir_all(folder.path).unwrap();
    }

    #[test]
    fn names_of_other_files_are_no_names() {
        assert_eq!(rows(&name_of(3)), Some(0));
        let hash = "0".repeat(32);
        assert_eq!(rows(&format!("{hash}-12{SUFFIX}")), Some(12));
        for bad in [
            "key",
            "model.kept",
            "../x-3.kept",
            &format!("{hash}-x{SUFFIX}"),
        ] {
            assert_eq!(rows(bad), None, "{bad}");
        }
    }
}
