//! The name of a model to its files in a local cache, without network.
//!
//! ```sh
//! cargo run -p hub --example cached_model
//! ```

use std::error::Error;
use std::fs;

use hub::{Cache, Client, HubError, Incomplete, RepoId, Settings, known};

fn main() -> Result<(), Box<dyn Error>> {
    let root = std::env::temp_dir().join(format!("hub-example-{}", std::process::id()));
    let repo = RepoId::parse("Qwen/Qwen3.5-2B")?;

    // The layout of `huggingface_hub`: a branch names a commit, a commit has a folder.
    let commit = "0123456789abcdef0123456789abcdef01234567";
    let folder = root.join("models--Qwen--Qwen3.5-2B");
    fs::create_dir_all(folder.join("refs"))?;
    fs::create_dir_all(folder.join("blobs"))?;
    fs::create_dir_all(folder.join("snapshots").join(commit))?;
    fs::write(folder.join("refs/main"), commit)?;

    // Nothing has been downloaded yet.
    let cache = Cache::new(&root);
    let snapshot = cache.snapshot(&repo, "main");
    let missing = cache.incomplete(&repo, snapshot.as_deref());
    assert_eq!(missing, Some(Incomplete::Nothing));

    // Now it has: the name of the model leads to a folder that is complete.
    let snapshot = snapshot.ok_or("the branch names a commit")?;
    fs::write(snapshot.join("config.json"), "{}")?;
    fs::write(snapshot.join("model.safetensors"), "weights")?;
    assert_eq!(cache.incomplete(&repo, Some(&snapshot)), None);
    for model in cache.list()? {
        println!("{} is in {:?}", model.id, model.snapshot);
    }

    // The table of drafters knows conversions by the name of their original.
    for drafter in known::drafters("mlx-community/Qwen3.5-2B-4bit") {
        println!("{} drafts for {}", drafter.repository, drafter.target);
    }

    // Offline, a client fetches nothing and says so.
    let client = Client::new(Settings {
        cache: root.clone(),
        endpoint: "https://huggingface.co".to_owned(),
        token: None,
        offline: true,
    });
    let refused = client.info(&RepoId::parse("Qwen/Qwen3.5-4B")?, "main");
    assert!(matches!(refused, Err(HubError::Offline { .. })));

    fs::remove_dir_all(root)?;
    Ok(())
}
