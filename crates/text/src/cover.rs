//! A lower bound of the number of tokens in a text, without encoding it.
//!
//! Encoding takes half a second a megabyte, which is too long for a text that no context
//! holds. Where the bytes of the tokens, end to end, are the text, its encoding is one way
//! to divide it into entries of the vocabulary, so it has no fewer tokens than the division
//! with the fewest. That number is bounded from below: `n` tokens end no later than
//!
//! ```text
//! reach(n) = max over i ≤ reach(n − 1) of i + (longest entry that the text has at i)
//! ```
//!
//! Only stretches of ASCII count, which normalizers leave alone: without the last
//! character, since a combining mark may follow it, and without as many first bytes as the
//! longest token has, since a token may reach in from before.

use serde_json::Value;

use crate::pieces::Pieces;

/// The vocabulary, sorted to find the longest entry that a text begins with.
#[derive(Debug)]
pub(crate) struct Cover {
    /// Ids of the entries that are not empty, sorted by their bytes.
    sorted: Vec<u32>,
    /// Bytes of the longest entry.
    longest: usize,
}

impl Cover {
    /// Sorts the vocabulary.
    pub(crate) fn new(pieces: &Pieces) -> Self {
        let ids = 0..u32::try_from(pieces.len()).unwrap_or(u32::MAX);
        let mut sorted: Vec<u32> = ids.filter(|&id| !pieces.get(id).is_empty()).collect();
        sorted.sort_unstable_by(|&a, &b| pieces.get(a).cmp(pieces.get(b)));
        let lengths = sorted.iter().map(|&id| pieces.get(id).len());
        let longest = lengths.max().unwrap_or(0);
        Cover { sorted, longest }
    }

    /// A lower bound of the number of tokens in `text`; the count ends at `enough`.
    pub(crate) fn tokens(&self, pieces: &Pieces, text: &str, enough: usize) -> usize {
        let mut n = 0;
        for stretch in text.as_bytes().split(|byte| !byte.is_ascii()) {
            let stretch = &stretch[..stretch.len().saturating_sub(1)];
            let (mut seen, mut reach, mut furthest) = (0, self.longest, self.longest);
            while reach < stretch.len() {
                for at in seen..=reach {
                    furthest = furthest.max(at + self.longest_at(pieces, &stretch[at..]));
                }
                // Every byte is an entry, see `keeps_ascii`; never stand still.
                (seen, reach) = (reach + 1, furthest.max(reach + 1));
                n += 1;
                if n >= enough {
                    return n;
                }
            }
        }
        n
    }

    /// Bytes of the longest entry that `text` begins with; the length of `text` if it is
    /// itself the beginning of an entry.
    fn longest_at(&self, pieces: &Pieces, text: &[u8]) -> usize {
        let (mut ids, mut longest) = (&self.sorted[..], 0);
        for (at, byte) in text.iter().enumerate() {
            // All of `ids` begin with `text[..at]`; none at `at` sorts first.
            let from = ids.partition_point(|&id| pieces.get(id).get(at) < Some(byte));
            let n = ids[from..].partition_point(|&id| pieces.get(id).get(at) == Some(byte));
            ids = &ids[from..from + n];
            match ids.first() {
                None => return longest,
                Some(&id) if pieces.get(id).len() == at + 1 => longest = at + 1,
                Some(_) => {}
            }
        }
        text.len()
    }
}

/// Whether a normalizer or pre-tokenizer leaves ASCII text as it is, except for writing `▁`
/// instead of a space.
pub(crate) fn is_kept(step: &Value) -> bool {
    match step["type"].as_str() {
        None => step.is_null(),
        Some("NFC") => true,
        Some("Replace") => step["pattern"]["String"] == " " && step["content"] == "▁",
        Some("ByteLevel") => step["add_prefix_space"] == false,
        Some("Split") => step["behavior"] != "Removed",
        Some("Sequence") => ["normalizers", "pretokenizers"]
            .iter()
            .filter_map(|steps| step[steps].as_array())
            .all(|steps| steps.iter().all(is_kept)),
        Some(_) => false,
    }
}
