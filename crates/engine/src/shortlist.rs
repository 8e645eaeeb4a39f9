//! Which part of a large vocabulary draft heads score.
//!
//! Scoring 250,000 tokens takes a drafter longer than all else it does, and nearly all
//! text is written with a fraction of them. Vocabularies are in the order in which
//! they were learned, the most frequent tokens of the tokenizer's own texts first; control tokens
//! stand apart. Counts of a model's own text ([`TokenCounts`]) choose better (Zhao et al. 2025,
//! arXiv:2502.14856).

use crate::error::EngineError;
use crate::hashes::sha256;
use crate::token_counts::TokenCounts;
use std::path::PathBuf;
use std::str::FromStr;
use text::Text;

/// Tokens that are enough for most text.
const USUAL: usize = 32 << 10;

/// How many tokens a draft head scores, and which.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum DraftVocabulary {
    /// 32,768 of a vocabulary of at least four times as many, else all.
    #[default]
    Auto,
    /// All entries of the vocabulary.
    Whole,
    /// The first so many, and those that are added to the learned ones.
    First(usize),
    /// The most frequent ones by the [`TokenCounts`] in a file, then the first ones, and those that
    /// are added to the learned ones.
    Counted {
        /// The file.
        file: PathBuf,
        /// How many; 32,768 if absent.
        most: Option<usize>,
    },
}

impl FromStr for DraftVocabulary {
    type Err = String;

    fn from_str(s: &str) -> Result<Self, String> {
        const EXTENSION: &str = ".json";
        let positive = |s: &str| s.parse().ok().filter(|&n: &usize| n > 0);
        match s {
            "auto" => return Ok(DraftVocabulary::Auto),
            "all" => return Ok(DraftVocabulary::Whole),
            _ => {}
        }
        if let Some(n) = positive(s) {
            return Ok(DraftVocabulary::First(n));
        }
        let (file, most) = match s.rsplit_once(':') {
            Some((file, n)) if positive(n).is_some() => (file, positive(n)),
            _ => (s, None),
        };
        match file.strip_suffix(EXTENSION) {
            Some(stem) if !stem.is_empty() => Ok(DraftVocabulary::Counted {
                file: file.into(),
                most,
            }),
            _ => Err(format!(
                "`{s}` is neither auto nor all, nor a number of tokens, nor a {EXTENSION} file of \
                 token counts, which :N may follow"
            )),
        }
    }
}

/// Tokens that a draft head scores, ascending.
pub(crate) struct Shortlisted {
    pub(crate) ids: Vec<u32>,
    /// The hash of the tokens, where a file has chosen them.
    pub(crate) hash: Option<String>,
}

impl DraftVocabulary {
    /// The tokens to score of a vocabulary of `size`; none if all.
    ///
    /// # Errors
    ///
    /// [`EngineError::DraftVocabulary`] if the file of counts does not serve.
    pub(crate) fn ids(&self, size: usize, text: &Text) -> Result<Option<Shortlisted>, EngineError> {
        let (counted, most) = match self {
            DraftVocabulary::Auto if size >= 4 * USUAL => (None, USUAL),
            DraftVocabulary::First(n) => (None, *n),
            DraftVocabulary::Auto | DraftVocabulary::Whole => return Ok(None),
            DraftVocabulary::Counted { file, most } => {
                let counts = TokenCounts::read(file, &text.tokenizer)?;
                (Some(counts), most.unwrap_or(USUAL))
            }
        };
        if most >= size {
            return Ok(None);
        }
        let frequent = counted.iter().flat_map(TokenCounts::by_frequency);
        let mut ids: Vec<u32> = frequent.map(|(id, _)| id).take(most).collect();
        let mut chosen = vec![false; size];
        let is_one = |id: &u32| (*id as usize) < size;
        let choose = |id: u32, chosen: &mut Vec<bool>| {
            if let Some(place) = chosen.get_mut(id as usize) {
                *place = true;
            }
        };
        ids.retain(is_one);
        ids.iter().for_each(|&id| choose(id, &mut chosen));
        let missing = most - ids.len();
        let others = (0..size as u32).filter(|&id| !chosen[id as usize]);
        let others: Vec<u32> = others.take(missing).collect();
        let added = text.tokenizer.added().iter().chain(text.stop_tokens.ids());
        others
            .iter()
            .chain(added)
            .for_each(|&id| choose(id, &mut chosen));
        let ids: Vec<u32> = (0..size as u32).filter(|&id| chosen[id as usize]).collect();
        let bytes = || {
            ids.iter()
                .flat_map(|id| id.to_le_bytes())
                .collect::<Vec<u8>>()
        };
        Ok(Some(Shortlisted {
            hash: counted.is_some().then(|| sha256(&bytes())),
            ids,
        }))
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

    fn ids_of(vocabulary: &DraftVocabulary, size: usize, text: &Text) -> Option<Vec<u32>> {
        let shortlisted = vocabulary.ids(size, text).unwrap();
        shortlisted.map(|chosen| chosen.ids)
    }

    #[test]
    fn what_is_said_is_what_is_meant() {
        let parse = |s: &str| s.parse::<DraftVocabulary>();
        assert_eq!(parse("auto"), Ok(DraftVocabulary::Auto));
        assert_eq!(parse("all"), Ok(DraftVocabulary::Whole));
        assert_eq!(parse("4096"), Ok(DraftVocabulary::First(4096)));
        let counted = |file: &str, most| DraftVocabulary::Counted {
            file: file.into(),
            most,
        };
        assert_eq!(parse("a:b/c.json"), Ok(counted("a:b/c.json", None)));
        assert_eq!(parse("c.json:512"), Ok(counted("c.json", Some(512))));
        for wrong in ["0", "-1", "some", "", ".json", "c.json:0", "c.txt"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn control_tokens_are_never_left_out() {
        let text = text();
        let ids = ids_of(&DraftVocabulary::First(100), 8192, &text).unwrap();
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
        assert_eq!(ids_of(&DraftVocabulary::Auto, 8192, &text), None);
        assert_eq!(ids_of(&DraftVocabulary::First(8192), 8192, &text), None);
        assert_eq!(ids_of(&DraftVocabulary::Whole, 262_144, &text), None);
        let ids = ids_of(&DraftVocabulary::Auto, 262_144, &text).unwrap();
        assert_eq!(ids.len(), USUAL);
    }

    #[test]
    fn counts_choose_the_tokens_and_belong_to_a_vocabulary() {
        let text = text();
        let folder = std::env::temp_dir().join(format!("paceline-counts-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let file = folder.join("counts.json");
        let mut counts = TokenCounts::new(&text.tokenizer);
        counts.add(&[7000, 7000, 6000, 5000, 5000, 5000]);
        std::fs::write(&file, counts.to_json()).unwrap();
        let counted = |most| DraftVocabulary::Counted {
            file: file.clone(),
            most: Some(most),
        };
        let ids = |most| ids_of(&counted(most), 8192, &text).unwrap();
        let plain = |n: usize| ids_of(&DraftVocabulary::First(n), 8192, &text).unwrap();
        let has = |ids: &[u32], id: u32| ids.binary_search(&id).is_ok();
        let two = ids(2);
        assert!(has(&two, 5000) && has(&two, 7000) && !has(&two, 6000) && !has(&two, 0));
        assert_eq!(two.len(), plain(2).len(), "as many as without counts");
        let five = ids(5);
        assert!(has(&five, 6000) && has(&five, 0) && has(&five, 1) && !has(&five, 2));
        assert_eq!(ids_of(&counted(8192), 8192, &text), None);

        let other = counts.to_json().replace("sha256\":\"", "sha256\":\"0");
        for (contents, reason) in [
            (other, "another vocabulary"),
            ("[1]".into(), "no file of token counts"),
            (
                counts.to_json().replace("\"version\":1", "\"version\":9"),
                "has version 9",
            ),
        ] {
            std::fs::write(&file, contents).unwrap();
            let error = counted(2).ids(8192, &text).err().unwrap().to_string();
            assert!(error.contains(reason), "{error}");
        }
        std::fs::remove_dir_all(&folder).unwrap();
        let error = counted(2).ids(8192, &text).err().unwrap().to_string();
        assert!(error.contains("counts.json"), "{error}");
    }
}
