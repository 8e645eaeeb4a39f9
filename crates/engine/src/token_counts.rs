//! How often the tokens of a vocabulary occur in some texts, and the file that says so.
//!
//! ```json
//! {"format": "token counts", "version": 1, "vocabulary_sha256": "…", "tokens": 9, "counts": [[17, 6], [4, 3]]}
//! ```
//!
//! Counts are of tokens by id, the most frequent first. The hash is of the vocabulary's entries in
//! order, so that counts of another vocabulary, whose ids mean other tokens, are refused.

use crate::error::EngineError;
use crate::hashes::sha256;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;
use text::Tokenizer;

/// What a file of counts says of itself.
const FORMAT: &str = "token counts";
/// The version of the format.
const VERSION: u32 = 1;
/// Largest file: a million tokens of 20 bytes each.
const FILE_BYTES_MAX: u64 = 20 << 20;

/// How often each token of a vocabulary occurs in some texts.
#[derive(Clone, Debug)]
pub struct TokenCounts {
    vocabulary: String,
    counts: BTreeMap<u32, u64>,
}

/// A file of counts.
#[derive(Deserialize, Serialize)]
struct CountsFile {
    format: String,
    version: u32,
    vocabulary_sha256: String,
    /// Tokens counted, all together.
    tokens: u64,
    counts: Vec<(u32, u64)>,
}

impl TokenCounts {
    /// No tokens of the vocabulary of `tokenizer`.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        TokenCounts {
            vocabulary: vocabulary_hash(tokenizer),
            counts: BTreeMap::new(),
        }
    }

    /// Counts the tokens of a text.
    pub fn add(&mut self, ids: &[u32]) {
        for &id in ids {
            *self.counts.entry(id).or_default() += 1;
        }
    }

    /// Tokens counted, all together.
    pub fn tokens(&self) -> u64 {
        self.counts.values().sum()
    }

    /// Tokens counted at least once.
    pub fn distinct(&self) -> usize {
        self.counts.len()
    }

    /// The tokens that were counted, the most frequent first; of equally frequent ones, the
    /// smallest id.
    pub fn by_frequency(&self) -> Vec<(u32, u64)> {
        let mut counts: Vec<(u32, u64)> = self.counts.iter().map(|(&id, &n)| (id, n)).collect();
        counts.sort_by_key(|&(id, n)| (std::cmp::Reverse(n), id));
        counts
    }

    /// The contents of a file of these counts: one JSON object.
    pub fn to_json(&self) -> String {
        let file = CountsFile {
            format: FORMAT.into(),
            version: VERSION,
            vocabulary_sha256: self.vocabulary.clone(),
            tokens: self.tokens(),
            counts: self.by_frequency(),
        };
        serde_json::to_string(&file).expect("numbers and texts")
    }

    /// Reads the counts in `file`, which are of the vocabulary of `tokenizer`.
    ///
    /// # Errors
    ///
    /// [`EngineError::DraftVocabulary`] if the file cannot be read, holds something else, or
    /// counts tokens of another vocabulary.
    pub fn read(file: &Path, tokenizer: &Tokenizer) -> Result<Self, EngineError> {
        let parsed = parse(file).and_then(|parsed| {
            let own = vocabulary_hash(tokenizer);
            if parsed.vocabulary_sha256 == own {
                return Ok(parsed);
            }
            Err("it counts tokens of another vocabulary".into())
        });
        let parsed = parsed.map_err(|reason| EngineError::DraftVocabulary {
            file: file.into(),
            reason,
        })?;
        Ok(TokenCounts {
            vocabulary: parsed.vocabulary_sha256,
            counts: parsed.counts.into_iter().collect(),
        })
    }
}

fn parse(file: &Path) -> Result<CountsFile, String> {
    let meta = std::fs::metadata(file).map_err(|e| e.to_string())?;
    if !meta.is_file() || meta.len() > FILE_BYTES_MAX {
        return Err(format!(
            "it is no file of {} MB at most",
            FILE_BYTES_MAX >> 20
        ));
    }
    let bytes = std::fs::read(file).map_err(|e| e.to_string())?;
    let parsed: CountsFile = serde_json::from_slice(&bytes)
        .map_err(|e| format!("it is no file of token counts ({e})"))?;
    match (parsed.format == FORMAT, parsed.version) {
        (true, VERSION) => Ok(parsed),
        (true, version) => Err(format!(
            "it has version {version} of the format, and this program reads version {VERSION}"
        )),
        (false, _) => Err("it is no file of token counts".into()),
    }
}

/// The hash of all entries of a vocabulary, in order.
fn vocabulary_hash(tokenizer: &Tokenizer) -> String {
    let mut entries = Vec::new();
    for id in 0..tokenizer.vocab_size() as u32 {
        let entry = tokenizer.entry(id).unwrap_or_default();
        entries.extend((entry.len() as u32).to_le_bytes());
        entries.extend(entry.as_bytes());
    }
    sha256(&entries)
}
