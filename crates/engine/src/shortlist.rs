//! Which part of a large vocabulary draft heads score.
//!
//! Scoring 250,000 tokens takes a drafter longer than all else it does, and nearly all
//! text is written with a fraction of them. Vocabularies are in the order in which
//! they were learned, the most frequent tokens first; control tokens stand apart.

use std::str::FromStr;
use text::Text;

/// Tokens that are enough for most text.
const USUAL: usize = 32 << 10;

/// How many tokens a draft head scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DraftVocabulary {
    /// 32,768 of a vocabulary of at least four times as many, else all.
    #[default]
    Auto,
    /// All of them.
    Whole,
    /// The first so many, and those that are added to the learned ones.
    First(usize),
}

impl FromStr for DraftVocabulary {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        match s {
            "auto" => Ok(DraftVocabulary::Auto),
            "all" => Ok(DraftVocabulary::Whole),
            _ => match s.parse() {
                Ok(n) if n > 0 => Ok(DraftVocabulary::First(n)),
                _ => Err(format!(
                    "`{s}` is neither auto nor all nor a number of tokens"
                )),
            },
        }
    }
}

impl DraftVocabulary {
    /// The tokens to score of a vocabulary of `size`, ascending; none if all.
    pub(crate) fn ids(self, size: usize, text: &Text) -> Option<Vec<u32>> {
        let first = match self {
            DraftVocabulary::Auto if size >= 4 * USUAL => USUAL,
            DraftVocabulary::First(n) if n < size => n,
            _ => return None,
        };
        let mut ids: Vec<u32> = (0..first as u32)
            .chain(text.tokenizer.added().iter().copied())
            .chain(text.stop_tokens.ids().iter().copied())
            .filter(|&id| (id as usize) < size)
            .collect();
        ids.sort_unstable();
        ids.dedup();
        Some(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use text::TextFiles;

    fn text() -> Text {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
        TextFiles::open(&models.join("tiny-qwen3.5")).unwrap()
    }

    #[test]
    fn what_is_said_is_what_is_meant() {
        let parse = |s: &str| s.parse::<DraftVocabulary>();
        assert_eq!(parse("auto"), Ok(DraftVocabulary::Auto));
        assert_eq!(parse("all"), Ok(DraftVocabulary::Whole));
        assert_eq!(parse("4096"), Ok(DraftVocabulary::First(4096)));
        for wrong in ["0", "-1", "some", ""] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn control_tokens_are_never_left_out() {
        let text = text();
        let ids = DraftVocabulary::First(100).ids(8192, &text).unwrap();
        assert!(ids.is_sorted_by(|a, b| a < b));
        let end = text.tokenizer.id_of("<|im_end|>").unwrap();
        assert!(end > 100, "stands apart");
        let stops = text.stop_tokens.ids();
        for id in text.tokenizer.added().iter().chain(stops).chain(&[0, 99]) {
            assert!(ids.binary_search(id).is_ok(), "{id}");
        }
        assert!(ids.len() < 200);
    }

    #[test]
    fn small_vocabularies_are_scored_whole() {
        let text = text();
        assert_eq!(DraftVocabulary::Auto.ids(8192, &text), None);
        assert_eq!(DraftVocabulary::First(8192).ids(8192, &text), None);
        assert_eq!(DraftVocabulary::Whole.ids(262_144, &text), None);
        let ids = DraftVocabulary::Auto.ids(262_144, &text).unwrap();
        assert_eq!(ids.len(), USUAL);
    }
}
