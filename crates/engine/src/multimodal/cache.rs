//! Embeddings of media by content, as many as there is room for.

use std::collections::HashMap;
use std::sync::Arc;

/// Embeddings by the hashes of what they are of; what was used longest ago makes room.
pub(super) struct Embeddings {
    bytes_max: usize,
    bytes: usize,
    /// Uses so far.
    uses: u64,
    kept: HashMap<[u8; 16], Kept>,
}

struct Kept {
    rows: Arc<[f32]>,
    /// The number of its last use.
    used: u64,
}

impl Embeddings {
    /// Room for `bytes_max` bytes.
    pub(super) fn new(bytes_max: usize) -> Self {
        Embeddings {
            bytes_max,
            bytes: 0,
            uses: 0,
            kept: HashMap::new(),
        }
    }

    /// The embeddings of what has this hash.
    pub(super) fn get(&mut self, hash: &[u8; 16]) -> Option<Arc<[f32]>> {
        let kept = self.kept.get_mut(hash)?;
        self.uses += 1;
        kept.used = self.uses;
        Some(kept.rows.clone())
    }

    /// Keeps `rows`, unless they are larger than all the room.
    pub(super) fn put(&mut self, hash: [u8; 16], rows: Arc<[f32]>) {
        let bytes = size_of_val(&*rows);
        if bytes > self.bytes_max {
            return;
        }
        self.uses += 1;
        let used = self.uses;
        self.bytes += bytes;
        if let Some(before) = self.kept.insert(hash, Kept { rows, used }) {
            self.bytes -= size_of_val(&*before.rows);
        }
        while self.bytes > self.bytes_max {
            let oldest = self.kept.iter().min_by_key(|(_, kept)| kept.used);
            let oldest = *oldest.expect("bytes are of what is kept").0;
            let gone = self.kept.remove(&oldest).expect("it was found");
            self.bytes -= size_of_val(&*gone.rows);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_used_longest_ago_makes_room() {
        let rows = |n: usize| -> Arc<[f32]> { vec![n as f32; n].into() };
        let mut kept = Embeddings::new(4 * 10);
        kept.put([1; 16], rows(4));
        kept.put([2; 16], rows(4));
        assert_eq!(kept.get(&[1; 16]), Some(rows(4)));
        kept.put([3; 16], rows(5));
        assert_eq!(kept.get(&[2; 16]), None, "the first was used since");
        assert!(kept.get(&[1; 16]).is_some() && kept.get(&[3; 16]).is_some());
        // Too large for all the room: nothing else goes.
        kept.put([4; 16], rows(11));
        assert!(kept.get(&[4; 16]).is_none() && kept.get(&[1; 16]).is_some());
        // The same again takes no more room.
        kept.put([3; 16], rows(5));
        assert_eq!(kept.bytes, 4 * 9);
        kept.put([5; 16], rows(10));
        assert_eq!((kept.bytes, kept.kept.len()), (40, 1));
    }
}
