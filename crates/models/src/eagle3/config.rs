//! What an EAGLE-3 head's `config.json` says, checked, also against the head's target
//! (`specs/eagle3.md`).

use crate::head_config::{LayerConfig, SpeculatorsConfig, check_target};
use crate::{ModelError, Target, parse, require};
use serde::Deserialize;
use weights::Checkpoint;

/// What `config.json` says of the head (§1). Flags that a file lacks are off.
#[derive(Debug, Deserialize)]
pub(super) struct Config {
    pub(super) draft_vocab_size: Option<usize>,
    #[serde(default)]
    pub(super) norm_before_residual: bool,
    #[serde(default)]
    pub(super) norm_before_fc: bool,
    #[serde(default)]
    pub(super) fc_norm: bool,
    #[serde(default)]
    pub(super) norm_output: bool,
    target_hidden_size: Option<usize>,
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    /// How many layers are tapped.
    num_aux_hidden_states: Option<usize>,
    /// Where flat configurations have the ids.
    eagle_config: Option<EagleConfig>,
    speculators_config: Option<SpeculatorsConfig>,
}

/// Where flat configurations name the tapped layers.
#[derive(Debug, Deserialize)]
struct EagleConfig {
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
}

impl Config {
    /// Reads what `checkpoint`'s configuration says of the head and of its layers.
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<(Self, LayerConfig), ModelError> {
        let whole = checkpoint.config();
        let config: Config = parse(whole)?;
        let part = whole
            .get("transformer_layer_config")
            .filter(|v| v.is_object());
        let layer: LayerConfig = parse(part.unwrap_or(whole))?;
        layer.check()?;
        require(!(config.norm_before_fc && config.fc_norm), || {
            "norm_before_fc and fc_norm exclude each other".into()
        })?;
        Ok((config, layer))
    }
}

/// The head reads the target's rows and writes its tokens.
pub(super) fn check_pair(
    config: &Config,
    layer: &LayerConfig,
    target: &dyn Target,
) -> Result<(), ModelError> {
    let width = config.target_hidden_size.unwrap_or(layer.hidden_size);
    let named = config.speculators_config.as_ref();
    check_target(width, layer.vocab_size, named, target)
}

/// The tapped layers: those of the configuration, or the second, the middle and the
/// last but two, as trainers choose where they say nothing (§1).
pub(super) fn taps(config: &Config, target: &dyn Target) -> Result<Vec<usize>, ModelError> {
    let n = target.n_layers();
    let flat = config.eagle_config.as_ref();
    let flat = flat.and_then(|e| e.eagle_aux_hidden_state_layer_ids.clone());
    let taps = match (&config.eagle_aux_hidden_state_layer_ids, flat) {
        (Some(ids), _) => ids.clone(),
        // Of the two conventions in such files, the one that counts layers left, not
        // entered, begins with 1 (§3).
        (None, Some(ids)) if ids.first() == Some(&1) => {
            ids.iter().map(|id| id.saturating_add(1)).collect()
        }
        (None, Some(ids)) => ids,
        (None, None) => vec![2, n / 2, n.saturating_sub(3)],
    };
    let wanted = config.num_aux_hidden_states.unwrap_or(taps.len());
    require(wanted == taps.len(), || {
        format!(
            "num_aux_hidden_states is {wanted}, and there are {} tapped layers: name them all in \
             eagle_aux_hidden_state_layer_ids",
            taps.len()
        )
    })?;
    require(!taps.is_empty() && taps.len() <= n + 1, || {
        format!("{} tapped layers of {n}", taps.len())
    })?;
    match taps.iter().find(|&&j| j > n) {
        Some(&j) => Err(ModelError::Unpaired {
            what: "tapped layer",
            drafter: j.to_string(),
            target: format!("one of {n} layers"),
        }),
        None => Ok(taps),
    }
}
