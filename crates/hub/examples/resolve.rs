//! Resolves the name of a model in a cache folder, and says which drafter is known for it. Nothing
//! is fetched.
//!
//! ```sh
//! cargo run -p hub --example resolve -- [ORG/NAME] [CACHE]
//! ```

use hub::{Cache, RepoId, known};
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next();
    let name = name.as_deref().unwrap_or("google/gemma-4-E4B-it");
    let repo = RepoId::parse(name)?;
    let named = arguments.next().map(PathBuf::from);
    let is_made_up = named.is_none();
    let root = named.map_or_else(|| made_up(&repo), Ok)?;

    let cache = Cache::new(&root);
    for model in cache.list()? {
        println!("in the cache: {}, {} bytes", model.id, model.bytes);
    }
    let snapshot = cache.snapshot(&repo, "main");
    match (&snapshot, cache.incomplete(&repo, snapshot.as_deref())) {
        (None, _) => println!("`{repo}` is not in `{}`", root.display()),
        (Some(_), Some(why)) => println!("the download of `{repo}` is incomplete: {why}"),
        (Some(folder), None) => {
            println!(
                "`{repo}` is `{}` with {:?}",
                folder.display(),
                hub::files_of(folder)
            );
        }
    }
    for drafter in known::drafters(name) {
        println!("known drafter: {} ({:?})", drafter.repository, drafter.part);
    }
    if is_made_up {
        fs::remove_dir_all(root)?;
    }
    Ok(())
}

/// A cache with one small snapshot, laid out as the hub's tools do.
fn made_up(repo: &RepoId) -> std::io::Result<PathBuf> {
    let root = std::env::temp_dir().join(format!("hub-example-{}", std::process::id()));
    let folder = root.join(repo.folder());
    let snapshot = folder.join("snapshots").join("0123abc");
    fs::create_dir_all(&snapshot)?;
    fs::create_dir_all(folder.join("refs"))?;
    fs::write(folder.join("refs/main"), "0123abc")?;
    write(&snapshot, "config.json", "{}")?;
    write(&snapshot, "model.safetensors", "not really weights")?;
    Ok(root)
}

fn write(folder: &Path, name: &str, text: &str) -> std::io::Result<()> {
    fs::write(folder.join(name), text)
}
