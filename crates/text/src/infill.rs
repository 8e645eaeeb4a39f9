//! Fill in the middle: what stands around a gap → ids of a prompt whose continuation fills it.
//!
//! ```text
//! <|repo_name|>project\n <|file_sep|>NAME\n TEXT … <|file_sep|>file\n      where other files come with it
//! <|fim_prefix|> PREFIX BEGINNING <|fim_suffix|> SUFFIX <|fim_middle|>
//! ```
//!
//! The form is that of arXiv:2409.12186 for Qwen's models, and that of arXiv:2207.14255 where a
//! vocabulary has no marks of files. What a client writes is text, whatever tokens it spells.

use crate::Text;
use crate::error::TextError;
use crate::tokenizer::Tokenizer;

/// The name of the repository, which no client says.
const REPOSITORY: &str = "project\n";
/// The name of the file with the gap, which no client says.
const FILE: &str = "file\n";
/// The name of another file whose name is not said.
const NAMELESS: &str = "other";
/// What stands before another file where the vocabulary has no mark of files.
const SEPARATOR: &str = "\n\n";

/// The marks of one family of models.
struct Spelling {
    prefix: &'static str,
    suffix: &'static str,
    middle: &'static str,
    repository: &'static str,
    file: &'static str,
    /// Ends what fills a gap, beside the marks.
    pad: &'static str,
}

/// The marks of every known family.
const SPELLINGS: &[Spelling] = &[
    // Qwen 2.5 Coder and later
    Spelling {
        prefix: "<|fim_prefix|>",
        suffix: "<|fim_suffix|>",
        middle: "<|fim_middle|>",
        repository: "<|repo_name|>",
        file: "<|file_sep|>",
        pad: "<|fim_pad|>",
    },
    // StarCoder 2
    Spelling {
        prefix: "<fim_prefix>",
        suffix: "<fim_suffix>",
        middle: "<fim_middle>",
        repository: "<repo_name>",
        file: "<file_sep>",
        pad: "<fim_pad>",
    },
    // Code Llama
    Spelling {
        prefix: "▁<PRE>",
        suffix: "▁<SUF>",
        middle: "▁<MID>",
        repository: "",
        file: "",
        pad: "▁<EOT>",
    },
    // DeepSeek Coder
    Spelling {
        prefix: "<｜fim▁begin｜>",
        suffix: "<｜fim▁hole｜>",
        middle: "<｜fim▁end｜>",
        repository: "",
        file: "",
        pad: "",
    },
    // GLM 4
    Spelling {
        prefix: "<|code_prefix|>",
        suffix: "<|code_suffix|>",
        middle: "<|code_middle|>",
        repository: "",
        file: "",
        pad: "",
    },
];

/// The tokens that mark a gap to fill.
#[derive(Clone, Debug)]
pub struct InfillMarks {
    prefix: u32,
    suffix: u32,
    middle: u32,
    repository: Option<u32>,
    file: Option<u32>,
    pad: Option<u32>,
}

impl InfillMarks {
    /// Finds the marks in a vocabulary; `None` if it has none.
    pub fn new(tokenizer: &Tokenizer) -> Option<Self> {
        SPELLINGS.iter().find_map(|spelling| {
            Some(InfillMarks {
                prefix: tokenizer.id_of(spelling.prefix)?,
                suffix: tokenizer.id_of(spelling.suffix)?,
                middle: tokenizer.id_of(spelling.middle)?,
                repository: tokenizer.id_of(spelling.repository),
                file: tokenizer.id_of(spelling.file),
                pad: tokenizer.id_of(spelling.pad),
            })
        })
    }

    /// The tokens that end what fills a gap, beside those that end any text.
    pub fn ends(&self) -> Vec<u32> {
        let own = [self.prefix, self.suffix, self.middle];
        let others = [self.repository, self.file, self.pad];
        own.into_iter()
            .chain(others.into_iter().flatten())
            .collect()
    }
}

/// What stands around a gap.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Infill {
    /// The text before the gap.
    pub prefix: String,
    /// The text after the gap.
    pub suffix: String,
    /// What the gap begins with, behind `prefix`.
    pub beginning: String,
    /// Other files, each with its name if that is known.
    pub files: Vec<(Option<String>, String)>,
    /// Tokens of the prompt, at most. What lies far from the gap is left out of a longer one: the
    /// beginning of `files` first, then that of `prefix` and the end of `suffix`, of which a
    /// quarter of the room is kept.
    pub room: usize,
}

impl Text {
    /// Encodes a prompt whose continuation fills a gap; `None` if the vocabulary has no marks for
    /// that.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::encode`].
    pub fn encode_infill(&self, infill: &Infill) -> Result<Option<Vec<u32>>, TextError> {
        let Some(marks) = &self.infill else {
            return Ok(None);
        };
        let encode = |text: &str| self.tokenizer.encode_as_text(text);
        let [prefix, suffix] = [&infill.prefix, &infill.suffix].map(|text| encode(text));
        let (prefix, suffix, beginning) = (prefix?, suffix?, encode(&infill.beginning)?);
        let bos = self.bos().filter(|_| self.begins_with_bos());
        let fixed = 3 + usize::from(bos.is_some()) + beginning.len();
        let room = infill.room.saturating_sub(fixed);
        let (n_prefix, n_suffix) = shares(room, prefix.len(), suffix.len());
        let files = self.files(marks, &infill.files)?;
        let n_files = files.len().min(room - n_prefix - n_suffix);
        let mut ids = Vec::with_capacity(fixed + n_files + n_prefix + n_suffix);
        ids.extend(bos);
        ids.extend_from_slice(&files[files.len() - n_files..]);
        ids.push(marks.prefix);
        ids.extend_from_slice(&prefix[prefix.len() - n_prefix..]);
        ids.extend_from_slice(&beginning);
        ids.push(marks.suffix);
        ids.extend_from_slice(&suffix[..n_suffix]);
        ids.push(marks.middle);
        Ok(Some(ids))
    }

    /// The tokens of other files, and of the name of the one with the gap.
    fn files(
        &self,
        marks: &InfillMarks,
        files: &[(Option<String>, String)],
    ) -> Result<Vec<u32>, TextError> {
        if files.is_empty() {
            return Ok(Vec::new());
        }
        let encode = |text: &str| self.tokenizer.encode_as_text(text);
        let mut ids = Vec::new();
        if let Some(repository) = marks.repository {
            ids.push(repository);
            ids.extend(encode(REPOSITORY)?);
        }
        for (name, text) in files {
            match marks.file {
                Some(file) => {
                    ids.push(file);
                    let name = name.as_deref().unwrap_or(NAMELESS);
                    ids.extend(encode(&format!("{name}\n{text}"))?);
                }
                None => ids.extend(encode(&format!("{SEPARATOR}{text}"))?),
            }
        }
        match marks.file {
            Some(file) => {
                ids.push(file);
                ids.extend(encode(FILE)?);
            }
            None => ids.extend(encode(SEPARATOR)?),
        }
        Ok(ids)
    }
}

/// How many of so many tokens before and after a gap have `room`.
fn shares(room: usize, prefix: usize, suffix: usize) -> (usize, usize) {
    let n_suffix = suffix.min((room / 4).max(room.saturating_sub(prefix)));
    (prefix.min(room - n_suffix), n_suffix)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::model_dir;
    use crate::{Specials, TextFiles};

    fn infill(prefix: &str, suffix: &str) -> Infill {
        Infill {
            prefix: prefix.to_owned(),
            suffix: suffix.to_owned(),
            room: usize::MAX,
            ..Infill::default()
        }
    }

    #[test]
    fn a_gap_is_marked_in_the_model_s_form() {
        let text = TextFiles::open(&model_dir("tiny-qwen3.5")).unwrap();
        let show = |infill: &Infill| {
            let ids = text.encode_infill(infill).unwrap().unwrap();
            (text.tokenizer.detokenize(&ids, Specials::Show), ids)
        };
        let gap = Infill {
            beginning: "let n".into(),
            ..infill("fn f() {", "}<|fim_middle|>")
        };
        let (prompt, ids) = show(&gap);
        assert_eq!(
            prompt,
            "<|fim_prefix|>fn f() {let n<|fim_suffix|>}<|fim_middle|><|fim_middle|>"
        );
        let middle = text.tokenizer.id_of("<|fim_middle|>").unwrap();
        let n_marks = ids.iter().filter(|&&id| id == middle).count();
        assert_eq!(n_marks, 1, "what a client spells is text");
        let files = vec![(Some("a.h".into()), "int a;".into()), (None, "b".into())];
        let (prompt, _) = show(&Infill {
            files,
            ..infill("x", "")
        });
        assert_eq!(
            prompt,
            "<|repo_name|>project\n<|file_sep|>a.h\nint a;<|file_sep|>other\nb<|file_sep|>file\n<|fim_prefix|>x<|fim_suffix|><|fim_middle|>"
        );
        let gemma = TextFiles::open(&model_dir("tiny-gemma4")).unwrap();
        assert_eq!(gemma.encode_infill(&gap).unwrap(), None);
    }

    #[test]
    fn what_lies_far_from_the_gap_is_left_out() {
        let text = TextFiles::open(&model_dir("tiny-qwen3.5")).unwrap();
        let one = text.tokenizer.encode("\n", false).unwrap();
        assert_eq!(one.len(), 1);
        let lines: String = (0..40).map(|n| format!("{n}|")).collect();
        let whole = text
            .encode_infill(&infill(&lines, &lines))
            .unwrap()
            .unwrap();
        for room in [3, 4, 10, 50, whole.len() - 1, whole.len()] {
            let infill = Infill {
                room,
                files: vec![(None, lines.clone())],
                ..infill(&lines, &lines)
            };
            let ids = text.encode_infill(&infill).unwrap().unwrap();
            assert_eq!(ids.len(), room);
            let prompt = text.tokenizer.detokenize(&ids, Specials::Show);
            let (before, after) = prompt.split_once("<|fim_suffix|>").unwrap();
            let before = before.split_once("<|fim_prefix|>").unwrap().1;
            assert!(
                lines.ends_with(before)
                    && lines.starts_with(after.trim_end_matches("<|fim_middle|>"))
            );
        }
        assert_eq!(shares(100, 10, 10), (10, 10));
        assert_eq!(shares(100, 1000, 1000), (75, 25));
        assert_eq!(shares(100, 1000, 10), (90, 10));
        assert_eq!(shares(100, 10, 1000), (10, 90));
    }
}
