//! What is known of a loaded model.

use crate::calibration::Calibration;
use crate::disk::Identity;
use crate::footprint::Planned;
use crate::multimodal::{HearingInfo, Senses, VisionInfo};
use crate::placement::Budget;
use crate::preflight::Preflight;
use cache::{KvLayers, MemorySize};
use serde::{Deserialize, Serialize};
use speculate::draft::NGRAM;
use speculate::{Guesser, Speculator};
use std::sync::Arc;
use text::Text;

/// What is known of a loaded model.
#[derive(Clone, Debug, Serialize)]
pub struct ModelInfo {
    /// The name that users have for the model.
    pub name: String,
    /// The family of models, as the configuration's `model_type` names it.
    pub family: &'static str,
    /// The device's name, such as `cpu (avx512, 2 threads)`.
    pub backend: String,
    /// Tokens that a sequence may have, prompt and output together.
    pub context: usize,
    /// Tokens of the longest sequence that the model knows.
    pub context_max: usize,
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Numbers of a hidden row, and so of an embedding.
    pub hidden_size: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Numbers in the weights of the checkpoint.
    pub parameters: u64,
    /// The name of the number format of most weights, such as `bf16` or `q4_k`.
    pub weight_format: &'static str,
    /// The kind of the checkpoint's files: `safetensors` or `gguf`.
    pub container: &'static str,
    /// Whether weights and memory are in memory of the device's own, which a GPU has.
    pub own_memory: bool,
    /// Requests that run at once.
    pub sequences: usize,
    /// Bytes of the checkpoint's files.
    pub weight_bytes: u64,
    /// Bytes of the drafter's files, where it has its own.
    pub drafter_weight_bytes: u64,
    /// Where weights are: `packed` in memory, or `mapped`, in their files.
    pub weights: &'static str,
    /// Why the weights are there.
    pub weights_reason: String,
    /// Bytes of the weights that a step of one row reads.
    pub step_bytes: u64,
    /// Bytes of keys, values and states, at most.
    pub memory_bytes: usize,
    /// Formats of keys and values, with the rules that keep some layers finer.
    pub kv_format: String,
    /// How many layers have which formats.
    pub kv_layers: Vec<KvLayersInfo>,
    /// Bytes of keys and values that each token of a context takes, the drafter's included, without those of
    /// sliding windows.
    pub kv_token_bytes: usize,
    /// Tokens for which requests that run have keys and values together, which is less than all of their contexts
    /// where they share memory.
    pub kv_tokens: usize,
    /// Tokens of the longest context that memory has room for, for one request beside what each of the others takes
    /// whatever its length.
    pub context_fits: usize,
    /// What the model looks at pictures and clips with; none if it takes none.
    pub vision: Option<VisionInfo>,
    /// Why the model takes no pictures and clips; empty if it does.
    pub vision_reason: String,
    /// What the model hears with; none if it takes no sounds.
    pub hearing: Option<HearingInfo>,
    /// Why the model takes no sounds; empty if it does.
    pub hearing_reason: String,
    /// The name of the drafter, the first of several; none if nothing is drafted.
    pub drafter: Option<&'static str>,
    /// The names of all that may guess, of whom the one that promises most does so in each round.
    pub drafters: Vec<&'static str>,
    /// Why this drafter drafts, or why none does.
    pub drafter_reason: String,
    /// Tokens of the longest draft.
    pub draft_max: usize,
    /// Vocabulary entries that the first draft head scores, unless all.
    pub draft_vocab: Option<usize>,
    /// The rule by which drafted tokens are accepted: `exact` or `residual`.
    pub accept: &'static str,
    /// What was checked before the model was called ready.
    pub preflight: Preflight,
    /// What rounds took when the model was loaded, or at an earlier start; none if that was not measured.
    pub calibration: Option<Calibration>,
    /// Tensors of the files that nothing has read.
    pub unused_tensors: Vec<String>,
}

/// Layers of the target whose keys and values have the same formats.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvLayersInfo {
    /// The format of keys and values, or that of each with a comma between them.
    pub format: String,
    /// How many layers keep keys and values so.
    pub layers: usize,
    /// Rows that a row of these layers sees; none if all.
    pub window: Option<usize>,
}

impl KvLayersInfo {
    /// The formats of the target's layers, whose plan is the first of `plans`, in a memory of `size`.
    pub(crate) fn of(plans: &[Planned], size: &MemorySize) -> Vec<KvLayersInfo> {
        let Some(target) = plans.first() else {
            return Vec::new();
        };
        let layers = target.plan().kv_layers(&size.kv_format).into_iter();
        let info = |l: KvLayers| KvLayersInfo {
            format: l.format.to_string(),
            layers: l.layers,
            window: l.window,
        };
        layers.map(info).collect()
    }
}

impl ModelInfo {
    /// The drafter called `name`, if it is one of [`ModelInfo::drafters`].
    pub fn guesser(&self, name: &str) -> Option<Guesser> {
        let at = self.drafters.iter().position(|&known| known == name)?;
        Some(match name {
            NGRAM => Guesser::Ngram,
            _ => Guesser::Head(at),
        })
    }
}

/// A model ready to write.
pub struct Model {
    /// Target, drafter and the memory of both.
    pub speculator: Speculator,
    /// Tokenizer, template, stop tokens.
    pub text: Arc<Text>,
    /// What the model sees and hears with.
    pub senses: Senses,
    /// What is known of the model.
    pub info: ModelInfo,
    /// Prompt rows that a request may run in one step.
    pub chunk: usize,
    /// What the target and, if it has a memory, the drafter remember.
    pub(crate) plans: Vec<Planned>,
    /// What the bits of keys, values and states depend on, if that was asked for.
    pub(crate) identity: Option<Identity>,
    /// The memory that the model may take.
    pub(crate) budget: Budget,
}
