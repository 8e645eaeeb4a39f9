//! What a block drafter's `config.json` says, in the layouts of z-lab (flat, with a
//! `dflash_config`), DeepSpec (flat) and the library speculators (with a
//! `transformer_layer_config`).

use super::layer::Shape;
use crate::head_config::{SpeculatorsConfig, unpaired};
use crate::{ModelError, Target, parse, require, require_sizes};
use serde::Deserialize;
use serde_json::Value;
use weights::Checkpoint;

/// How a Markov head makes a bias of the previous token.
#[derive(Clone, Copy)]
pub(super) enum MarkovType {
    Vanilla,
    Gated,
    Rnn,
}

/// What `config.json` says of the head.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    pub(super) block_size: usize,
    mask_token_id: Option<u32>,
    /// Layers whose outputs are tapped; -1 for the embedding.
    target_layer_ids: Option<Vec<i64>>,
    /// Layers whose inputs are tapped, as the library speculators counts them.
    aux_hidden_state_layer_ids: Option<Vec<usize>>,
    pub(super) target_hidden_size: Option<usize>,
    pub(super) draft_vocab_size: Option<usize>,
    pub(super) speculators_config: Option<SpeculatorsConfig>,
    /// Whether row 0 of a block guesses the token after the pending one.
    pub(super) sample_from_anchor: Option<bool>,
    is_causal: Option<bool>,
    causal: Option<bool>,
    #[serde(default)]
    sliding_window_non_causal: bool,
    #[serde(default)]
    use_swa: bool,
    swa_window_size: Option<usize>,
    pub(super) input_embedding_scale: Option<f32>,
    pub(super) output_multiplier: Option<f32>,
    pub(super) final_logit_softcapping: Option<f32>,
    #[serde(default)]
    pub(super) markov_rank: usize,
    markov_head_type: Option<String>,
    conv_kernel_size: Option<usize>,
    conv_group_size: Option<usize>,
    selector_rank: Option<usize>,
    selector_top_k: Option<usize>,
    #[serde(default)]
    pub(super) enable_confidence_head: bool,
    #[serde(default)]
    pub(super) confidence_head_with_markov: bool,
}

impl Config {
    /// Reads what `checkpoint`'s configuration says of the head and of its layers.
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<(Self, Shape), ModelError> {
        let mut whole = checkpoint.config().clone();
        if let Some(Value::Object(own)) = whole.get("dflash_config").cloned()
            && let Some(all) = whole.as_object_mut()
        {
            for (key, value) in own {
                all.entry(key).or_insert(value);
            }
        }
        let config: Config = parse(&whole)?;
        let part = whole.get("transformer_layer_config");
        let part = part.filter(|v| v.is_object()).unwrap_or(&whole);
        let window = config.use_swa.then_some(config.swa_window_size);
        let shape = Shape::read(part, window)?;
        require_sizes(1, &[("block_size", config.block_size)])?;
        require(config.block_size >= 2, || {
            "a block of one row guesses nothing".into()
        })?;
        if config.markov_rank > 0 {
            config.markov_type()?;
        }
        let reads_previous = config.enable_confidence_head && config.confidence_head_with_markov;
        require(!reads_previous || config.markov_rank > 0, || {
            "confidence_head_with_markov needs a markov_rank".into()
        })?;
        Ok((config, shape))
    }

    /// Rows of a kernel and columns of a group of its convolutions, and rank and candidates of
    /// its selector, of a DFlash 2 head.
    pub(super) fn dflash2(&self) -> Result<[usize; 4], ModelError> {
        let size = |value: Option<usize>, name: &str| {
            value.filter(|&n| n > 0).ok_or_else(|| ModelError::Config {
                message: format!("{name} is missing, which a DFlash 2 head needs"),
            })
        };
        Ok([
            size(self.conv_kernel_size, "conv_kernel_size")?,
            size(self.conv_group_size, "conv_group_size")?,
            size(self.selector_rank, "selector_rank")?,
            size(self.selector_top_k, "selector_top_k")?,
        ])
    }

    /// The type of its Markov head, if it has one.
    pub(super) fn markov_type(&self) -> Result<MarkovType, ModelError> {
        let named = self.markov_head_type.as_deref().unwrap_or("vanilla");
        match named.to_lowercase().as_str() {
            "vanilla" => Ok(MarkovType::Vanilla),
            "gated" => Ok(MarkovType::Gated),
            "rnn" => Ok(MarkovType::Rnn),
            _ => Err(ModelError::Unsupported {
                feature: format!(
                    "a DSpark head with markov_head_type `{named}` (known are vanilla, gated and rnn)"
                ),
            }),
        }
    }

    /// Whether rows of a block see no later ones in a layer with or without a window.
    pub(super) fn is_causal(&self, has_window: bool) -> bool {
        let by_window = has_window && !self.sliding_window_non_causal;
        self.is_causal.or(self.causal).unwrap_or(by_window)
    }

    /// The token that stands for those to be guessed.
    pub(super) fn mask_token(&self, vocab_size: usize) -> Result<u32, ModelError> {
        let token = self.mask_token_id.ok_or_else(|| ModelError::Config {
            message: "a block drafter without a mask_token_id".into(),
        })?;
        require((token as usize) < vocab_size, || {
            format!("mask_token_id is {token}, of {vocab_size} tokens")
        })?;
        Ok(token)
    }

    /// The layers of `target` whose inputs are tapped; the number of layers for the output of
    /// the last one.
    pub(super) fn taps(&self, target: &dyn Target) -> Result<Vec<usize>, ModelError> {
        let n = target.n_layers();
        let entered = |&id: &i64| usize::try_from(id.saturating_add(1)).unwrap_or(usize::MAX);
        let taps: Vec<usize> = match (&self.aux_hidden_state_layer_ids, &self.target_layer_ids) {
            (Some(ids), _) => ids.clone(),
            (None, Some(ids)) => ids.iter().map(entered).collect(),
            (None, None) => Vec::new(),
        };
        require(!taps.is_empty() && taps.len() <= n + 1, || {
            format!("{} tapped layers of {n}", taps.len())
        })?;
        match taps.iter().find(|&&j| j > n) {
            Some(&j) => Err(unpaired("number of layers, at least,", j, n)),
            None => Ok(taps),
        }
    }
}
