//! The table of targets and their drafters, and how a name is looked up in it.
//!
//! Names only suggest: loading a drafter proves the pair by its type, shapes
//! and vocabulary. Conversions keep the target's name and add to it
//! (`gemma-4-E4B-it-4bit`, `Qwen3.6-27B-MLX-8bit`), so a repository is looked up by
//! the longest name of the table that its own begins with.

/// Which part of a repository drafts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of it: a draft head published alone, or a conversion of the target that has kept its
    /// head.
    Whole,
    /// The `mtp.*` tensors of the original model, which conversions drop.
    Head,
}

/// A pair of a target and a drafter.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    /// What the target's name on the hub begins with, without its organization.
    pub target: &'static str,
    /// The repository of the drafter.
    pub repository: &'static str,
    /// Which part of the repository drafts.
    pub part: Part,
    /// Whether it is recommended and fetched; one that is not is used where it is already there.
    pub is_advised: bool,
}

/// A recommended drafter with a repository of its own.
const fn whole(target: &'static str, repository: &'static str) -> Known {
    Known {
        target,
        repository,
        part: Part::Whole,
        is_advised: true,
    }
}

/// A drafter with a repository of its own that is used only where it is already there.
const fn spare(target: &'static str, repository: &'static str) -> Known {
    Known {
        is_advised: false,
        ..whole(target, repository)
    }
}

/// The head of the original model.
const fn head(target: &'static str, repository: &'static str) -> Known {
    Known {
        part: Part::Head,
        ..whole(target, repository)
    }
}

/// Every known pair; of one target, the best drafter first.
pub const KNOWN: &[Known] = &[
    whole("gemma-4-E2B-it", "google/gemma-4-E2B-it-assistant"),
    whole("gemma-4-E4B-it", "google/gemma-4-E4B-it-assistant"),
    whole("gemma-4-12B-it", "google/gemma-4-12B-it-assistant"),
    whole("gemma-4-26B-A4B-it", "google/gemma-4-26B-A4B-it-assistant"),
    whole("gemma-4-31B-it", "google/gemma-4-31B-it-assistant"),
    spare(
        "gemma-4-31B-it",
        "RedHatAI/gemma-4-31B-it-speculator.eagle3",
    ),
    head("Qwen3.5-0.8B", "Qwen/Qwen3.5-0.8B"),
    head("Qwen3.5-2B", "Qwen/Qwen3.5-2B"),
    head("Qwen3.5-4B", "Qwen/Qwen3.5-4B"),
    head("Qwen3.5-9B", "Qwen/Qwen3.5-9B"),
    head("Qwen3.5-27B", "Qwen/Qwen3.5-27B"),
    head("Qwen3.5-35B-A3B", "Qwen/Qwen3.5-35B-A3B"),
    head("Qwen3.5-122B-A10B", "Qwen/Qwen3.5-122B-A10B"),
    head("Qwen3.5-397B-A17B", "Qwen/Qwen3.5-397B-A17B"),
    head("Qwen3.6-27B", "Qwen/Qwen3.6-27B"),
    whole("Qwen3.6-27B", "Youssofal/Qwen3.6-27B-MTPLX-Optimized-Speed"),
    head("Qwen3.6-35B-A3B", "Qwen/Qwen3.6-35B-A3B"),
    head("Qwen3.8-27B", "Qwen/Qwen3.8-27B"),
    spare("Qwen3.8-27B", "mlx-community/Qwen3.8-27B-MTP-4bit"),
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
            && !model.contains("-mtp-")
            && !model.ends_with("-mtp")
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
            ("mlx-community/Qwen3.8-27B-8bit", "Qwen/Qwen3.8-27B"),
        ] {
            let found = drafters(name);
            assert_eq!(found.first().map(|k| k.repository), Some(drafter), "{name}");
        }
        for name in [
            "google/gemma-4-E4B-it-assistant",
            "mlx-community/Qwen3.8-27B-MTP-4bit",
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
