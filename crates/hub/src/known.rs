//! The table of targets and their drafters, and how a name is looked up in it.
//!
//! Names only suggest: loading a drafter proves the pair by its type, shapes
//! and vocabulary. Conversions keep the target's name and add to it
//! (`gemma-4-E4B-it-4bit`, `Qwen3.6-27B-MLX-8bit`), so a repository is looked up by
//! the longest name of the table that its own begins with.

/// What a drafter is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A Gemma 4 assistant: a checkpoint of its own.
    Assistant,
    /// An MTP head: the `mtp.*` tensors of the original, which conversions drop.
    MtpOfOriginal,
    /// An MTP head published alone, or in a conversion that has kept it.
    MtpHead,
    /// An EAGLE-3 speculator: a checkpoint of its own.
    Eagle3,
}

/// One line of the table.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// What the target's name on the hub begins with, without its organization.
    pub target: &'static str,
    /// What drafts for it.
    pub kind: Kind,
    /// Where it is.
    pub repository: &'static str,
}

const fn line(target: &'static str, kind: Kind, repository: &'static str) -> Known {
    Known {
        target,
        kind,
        repository,
    }
}

/// Every known pair; of one target, the best drafter first.
pub const KNOWN: &[Known] = &[
    line(
        "gemma-4-E2B-it",
        Kind::Assistant,
        "google/gemma-4-E2B-it-assistant",
    ),
    line(
        "gemma-4-E4B-it",
        Kind::Assistant,
        "google/gemma-4-E4B-it-assistant",
    ),
    line(
        "gemma-4-12B-it",
        Kind::Assistant,
        "google/gemma-4-12B-it-assistant",
    ),
    line(
        "gemma-4-26B-A4B-it",
        Kind::Assistant,
        "google/gemma-4-26B-A4B-it-assistant",
    ),
    line(
        "gemma-4-31B-it",
        Kind::Assistant,
        "google/gemma-4-31B-it-assistant",
    ),
    line(
        "gemma-4-31B-it",
        Kind::Eagle3,
        "RedHatAI/gemma-4-31B-it-speculator.eagle3",
    ),
    line("Qwen3.5-0.8B", Kind::MtpOfOriginal, "Qwen/Qwen3.5-0.8B"),
    line("Qwen3.5-2B", Kind::MtpOfOriginal, "Qwen/Qwen3.5-2B"),
    line("Qwen3.5-4B", Kind::MtpOfOriginal, "Qwen/Qwen3.5-4B"),
    line("Qwen3.5-9B", Kind::MtpOfOriginal, "Qwen/Qwen3.5-9B"),
    line("Qwen3.5-27B", Kind::MtpOfOriginal, "Qwen/Qwen3.5-27B"),
    line(
        "Qwen3.5-35B-A3B",
        Kind::MtpOfOriginal,
        "Qwen/Qwen3.5-35B-A3B",
    ),
    line(
        "Qwen3.5-122B-A10B",
        Kind::MtpOfOriginal,
        "Qwen/Qwen3.5-122B-A10B",
    ),
    line(
        "Qwen3.5-397B-A17B",
        Kind::MtpOfOriginal,
        "Qwen/Qwen3.5-397B-A17B",
    ),
    line("Qwen3.6-27B", Kind::MtpOfOriginal, "Qwen/Qwen3.6-27B"),
    line(
        "Qwen3.6-27B",
        Kind::MtpHead,
        "Youssofal/Qwen3.6-27B-MTPLX-Optimized-Speed",
    ),
    line(
        "Qwen3.6-35B-A3B",
        Kind::MtpOfOriginal,
        "Qwen/Qwen3.6-35B-A3B",
    ),
];

/// The drafters of the target called `name`, with or without its organization.
pub fn drafters(name: &str) -> Vec<&'static Known> {
    let model = name.rsplit('/').next().unwrap_or(name).to_lowercase();
    let fits = |known: &&Known| {
        let target = known.target.to_lowercase();
        // A whole word: `Qwen3.5-2B` is not the beginning of `Qwen3.5-2B5`.
        let rest = model.strip_prefix(&*target);
        rest.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphanumeric()))
            // A drafter is no target.
            && !model.contains("-assistant")
            && !model.contains("speculator")
    };
    let longest = KNOWN.iter().filter(fits).map(|k| k.target.len()).max();
    KNOWN
        .iter()
        .filter(fits)
        .filter(|k| Some(k.target.len()) == longest)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RepoId;

    #[test]
    fn conversions_find_the_drafter_of_their_original() {
        for (name, drafter) in [
            ("google/gemma-4-E4B-it", "google/gemma-4-E4B-it-assistant"),
            (
                "mlx-community/gemma-4-e4b-it-4bit",
                "google/gemma-4-E4B-it-assistant",
            ),
            (
                "unsloth/gemma-4-26B-A4B-it-GGUF",
                "google/gemma-4-26B-A4B-it-assistant",
            ),
            ("mlx-community/Qwen3.6-27B-4bit", "Qwen/Qwen3.6-27B"),
            ("Qwen3.6-35B-A3B-FP8", "Qwen/Qwen3.6-35B-A3B"),
        ] {
            let found = drafters(name);
            assert_eq!(found.first().map(|k| k.repository), Some(drafter), "{name}");
        }
        for name in [
            "google/gemma-4-E4B-it-assistant",
            "Qwen/Qwen3.5-2B5",
            "gemma-4-E4B",
            "x/y",
        ] {
            assert!(drafters(name).is_empty(), "{name}");
        }
        assert_eq!(drafters("google/gemma-4-31B-it").len(), 2);
    }

    #[test]
    fn every_line_names_a_repository() {
        for known in KNOWN {
            RepoId::parse(known.repository).unwrap();
        }
    }
}
