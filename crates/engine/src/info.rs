//! What is known of a loaded model.

use crate::preflight::Preflight;
use cache::MemoryPlan;
use serde::Serialize;
use speculate::Speculator;
use std::sync::Arc;
use text::Text;

/// What is known of a loaded model.
#[derive(Clone, Debug, Serialize)]
pub struct ModelInfo {
    /// What users call it.
    pub name: String,
    /// Family.
    pub family: &'static str,
    /// Where it runs.
    pub backend: String,
    /// Tokens of a sequence.
    pub context: usize,
    /// Tokens of the longest sequence that the model knows.
    pub context_max: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Requests at once.
    pub sequences: usize,
    /// Bytes of the checkpoint's files.
    pub weight_bytes: u64,
    /// Bytes of the drafter's files, where it has its own.
    pub drafter_weight_bytes: u64,
    /// Where weights are: `packed` in memory, or `mapped`, in their files.
    pub weights: &'static str,
    /// Why.
    pub weights_reason: String,
    /// Bytes of the weights that a step of one row reads.
    pub step_bytes: u64,
    /// Bytes of keys, values and states, at most.
    pub memory_bytes: usize,
    /// Format of keys and values.
    pub kv_format: String,
    /// Who drafts.
    pub drafter: Option<&'static str>,
    /// Why this one, or why nobody.
    pub drafter_reason: String,
    /// Longest draft.
    pub draft_max: usize,
    /// Tokens that its draft head scores, unless all.
    pub draft_vocab: Option<usize>,
    /// Which drafted tokens stay.
    pub accept: &'static str,
    /// What was checked.
    pub preflight: Preflight,
    /// Tensors of the files that nothing has read.
    pub unused_tensors: Vec<String>,
}

/// A model ready to write.
pub struct Model {
    /// Target, drafter and their memory.
    pub speculator: Speculator,
    /// Tokenizer, template, stop tokens.
    pub text: Arc<Text>,
    /// What is known of it.
    pub info: ModelInfo,
    /// Prompt rows a request may run in one step.
    pub chunk: usize,
    /// What the target and, if it has a memory, the drafter remember.
    pub plans: Vec<MemoryPlan>,
}
