//! The models under test, who drafts for them, and what they are asked.

use crate::{CONTEXT, MAX_TOKENS};
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use suites::files::Files;
use suites::{Rng, repository};
use weights::Checkpoint;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Draft {
    None,
    /// The family's own head.
    Head,
    Eagle3,
    /// A DFlash or DSpark head.
    Block,
    /// A model of its own.
    Model,
    Ngram,
    /// The family's own head and n-grams, of which the likelier one guesses.
    Portfolio,
    /// Several heads, and n-grams if they are among them.
    Several(&'static [Draft]),
    /// The true text with every so many tokens spoilt.
    Oracle,
}

impl Draft {
    /// The family's own head, and one that has a memory of its own and reads rows inside the target.
    pub(crate) const TWO: Draft = Draft::Several(&[Draft::Head, Draft::Eagle3]);

    /// All of those who draft.
    pub(crate) fn all(&self) -> &[Draft] {
        match self {
            Draft::None => &[],
            Draft::Several(all) => all,
            one => std::slice::from_ref(one),
        }
    }

    /// Whether heads of keys and values are smaller than a block of codes.
    pub(crate) fn is_small(&self) -> bool {
        let is_small = |draft: &Draft| matches!(draft, Draft::Eagle3 | Draft::Block);
        self.all().iter().any(is_small)
    }
}

/// A model under test: folders of the target and, for Gemma, its assistant, and of an
/// EAGLE-3 head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Subject {
    pub(crate) target: &'static str,
    pub(crate) assistant: Option<&'static str>,
    pub(crate) eagle3: Option<&'static str>,
    /// A block drafter: one of [`suites::blocks`], or the folder of a DSpark head in `models/`.
    pub(crate) block: Option<&'static str>,
    /// A draft model, which may be the target itself.
    pub(crate) model: Option<&'static str>,
    /// Layers that the target's MTP head is given; those that it has if 0.
    pub(crate) mtp_layers: usize,
    /// Whether every cell of the grid is run, or every fifth.
    pub(crate) whole_grid: bool,
}

impl Subject {
    /// Whether the target drafts for itself, which guesses everything right.
    pub(crate) fn drafts_for_itself(&self) -> bool {
        self.model == Some(self.target)
    }

    pub(crate) fn has_head(&self) -> bool {
        self.assistant.is_some() || self.target.contains("qwen")
    }

    /// Where the target lies.
    pub(crate) fn folder(&self) -> PathBuf {
        static MADE: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
        let stored = repository(self.target);
        if self.mtp_layers == 0 {
            return stored;
        }
        let name = stored.file_name().unwrap().to_str().unwrap();
        let folder = format!("{name}-mtp-{}", self.mtp_layers);
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(folder);
        let mut made = MADE.lock().unwrap();
        if made.insert(folder.clone()) {
            let files = Files::open(name).with_mtp_layers(self.mtp_layers);
            files.save(&folder);
        }
        folder
    }

    /// Whether nobody drafts for the subject in the way of `draft`.
    pub(crate) fn lacks(&self, draft: Draft) -> bool {
        match draft {
            Draft::Head | Draft::Portfolio => !self.has_head(),
            Draft::Eagle3 => self.eagle3.is_none(),
            Draft::Block => self.block.is_none(),
            Draft::Model => self.model.is_none(),
            Draft::Several(all) => all.iter().any(|&draft| self.lacks(draft)),
            _ => false,
        }
    }
}

/// Nobody's head drafts for it.
pub(crate) const ALONE: Subject = Subject {
    target: "",
    assistant: None,
    eagle3: None,
    block: None,
    model: None,
    mtp_layers: 0,
    whole_grid: false,
};

pub(crate) const TINY: &[Subject] = &[
    Subject {
        target: "tests/golden/checkpoints/gemma4-dense",
        assistant: Some("tests/golden/checkpoints/gemma4-dense-assistant"),
        eagle3: Some("tests/golden/checkpoints/gemma4-dense-eagle3"),
        block: Some("speculators"),
        model: Some("tests/golden/checkpoints/gemma4-ple"),
        whole_grid: true,
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/gemma4-ple",
        assistant: Some("tests/golden/checkpoints/gemma4-ple-assistant"),
        eagle3: Some("tests/golden/checkpoints/gemma4-ple-eagle3"),
        model: Some("tests/golden/checkpoints/gemma4-dense"),
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/gemma4-moe",
        eagle3: Some("tests/golden/checkpoints/gemma4-dense-eagle3"),
        block: Some("dflash"),
        model: Some("tests/golden/checkpoints/gemma4-moe"),
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/qwen3_5-dense",
        eagle3: Some("tests/golden/checkpoints/qwen3_5-dense-eagle3"),
        block: Some("deepspec"),
        model: Some("tests/golden/checkpoints/qwen3_5-dense"),
        whole_grid: true,
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/qwen3_5-moe",
        eagle3: Some("tests/golden/checkpoints/qwen3_5-moe-eagle3"),
        model: Some("tests/golden/checkpoints/qwen3_5-dense"),
        ..ALONE
    },
    Subject {
        target: "tests/golden/checkpoints/qwen3_5-dense",
        mtp_layers: 3,
        ..ALONE
    },
    Subject {
        target: "tests/golden/gguf/gemma4-ple.gguf",
        assistant: Some("tests/golden/gguf/gemma4-ple-assistant.gguf"),
        model: Some("tests/golden/gguf/gemma4-ple.gguf"),
        ..ALONE
    },
    Subject {
        target: "tests/golden/gguf/qwen3_5-moe.gguf",
        ..ALONE
    },
];

pub(crate) const TRAINED: &[Subject] = &[
    Subject {
        target: "models/tiny-gemma4",
        assistant: Some("models/tiny-gemma4-assistant"),
        eagle3: Some("models/tiny-gemma4-eagle3"),
        model: Some("models/tiny-gemma4-e"),
        ..ALONE
    },
    Subject {
        target: "models/tiny-gemma4-e",
        assistant: Some("models/tiny-gemma4-e-assistant"),
        model: Some("models/tiny-gemma4-moe"),
        ..ALONE
    },
    Subject {
        target: "models/tiny-qwen3.5",
        eagle3: Some("models/tiny-qwen3.5-eagle3"),
        block: Some("models/tiny-qwen3.5-dspark"),
        model: Some("models/tiny-qwen3.5-moe"),
        ..ALONE
    },
    Subject {
        target: "models/tiny-qwen3.5-moe",
        model: Some("models/tiny-qwen3.5-moe"),
        ..ALONE
    },
];

pub(crate) fn prompts(n: usize, vocab: u32, seed: u64) -> Vec<Vec<u32>> {
    let mut rng = Rng(seed);
    (0..n)
        .map(|_| {
            // Prompts repeat themselves, so that n-grams have something to find.
            let len = 1 + rng.below(150) as usize;
            let period = 1 + rng.below(20) as usize;
            let base: Vec<u32> = (0..period).map(|_| 8 + rng.below(vocab - 16)).collect();
            (0..len)
                .map(|i| {
                    if rng.below(6) == 0 {
                        8 + rng.below(vocab - 16)
                    } else {
                        base[i % period]
                    }
                })
                .collect()
        })
        .collect()
}

/// The prompts of a trained model that fit.
pub(crate) fn greedy_prompts(name: &str) -> Vec<Vec<u32>> {
    let path = repository("tests/golden/greedy").join(format!("{name}.json"));
    let file: serde_json::Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let ids = |v: &serde_json::Value| -> Vec<u32> {
        let ids = v.as_array().unwrap().iter();
        ids.map(|t| t.as_u64().unwrap() as u32).collect()
    };
    let prompts = file["prompts"].as_array().unwrap().iter();
    let prompts = prompts.map(|p| ids(&p["prompt"]));
    prompts
        .filter(|p| p.len() + MAX_TOKENS <= CONTEXT)
        .collect()
}

pub(crate) fn vocab(subject: Subject) -> u32 {
    let checkpoint = Checkpoint::open(&repository(subject.target)).unwrap();
    checkpoint.text_config()["vocab_size"].as_u64().unwrap() as u32
}
