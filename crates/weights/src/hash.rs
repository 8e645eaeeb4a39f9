//! The content hash of a checkpoint: equal for equal models, wherever they lie.

use crate::Checkpoint;
use sha2::{Digest, Sha256};

impl Checkpoint {
    /// SHA-256 over the config and the hashes of the files, in hexadecimal: equal
    /// for equal models, wherever they lie. The first call reads every byte.
    pub fn content_hash(&self) -> String {
        self.content_hash_with(|_, bytes| sha256(bytes))
    }

    /// [`Checkpoint::content_hash`] from the SHA-256 of each file in hexadecimal, as
    /// `hash_of` gives it for the file's name and bytes: a caller that remembers it
    /// saves reading the file.
    pub fn content_hash_with(&self, mut hash_of: impl FnMut(&str, &[u8]) -> String) -> String {
        let mut compute = || {
            let mut parts = vec![sha256(&self.config_bytes)];
            let own = &self.files[..self.files.len() - self.tower_files];
            parts.extend(own.iter().map(|f| {
                let hash = hash_of(&f.name, &f.bytes);
                f.bytes.release();
                hash
            }));
            sha256(parts.concat().as_bytes())
        };
        self.hash.get_or_init(&mut compute).clone()
    }
}

/// SHA-256 in hexadecimal.
fn sha256(bytes: &[u8]) -> String {
    let digest = Sha256::digest(bytes);
    digest.iter().map(|byte| format!("{byte:02x}")).collect()
}
