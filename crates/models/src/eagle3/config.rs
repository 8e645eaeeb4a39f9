//! What an EAGLE-3 head's `config.json` says, checked, also against the head's target
//! (`specs/eagle3.md`).

use crate::layers::frequencies;
use crate::{ModelError, TARGETS, Target, parse, require, require_sizes};
use backend::Rope;
use serde::Deserialize;
use serde_json::Value;
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
    /// Where flat configurations have the ids.
    eagle_config: Option<EagleConfig>,
    speculators_config: Option<SpeculatorsConfig>,
}

/// Where flat configurations name the tapped layers.
#[derive(Debug, Deserialize)]
struct EagleConfig {
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
}

/// Where configurations of the library `speculators` name the target.
#[derive(Debug, Deserialize)]
struct SpeculatorsConfig {
    verifier: Option<Verifier>,
}

/// The target that the head was trained for.
#[derive(Debug, Deserialize)]
struct Verifier {
    architectures: Option<Vec<String>>,
}

/// What `config.json` says of the head's layers: in a part of its own, or beside the rest.
#[derive(Debug, Deserialize)]
pub(super) struct LayerConfig {
    pub(super) model_type: Option<String>,
    pub(super) vocab_size: usize,
    pub(super) hidden_size: usize,
    pub(super) intermediate_size: usize,
    #[serde(default = "one")]
    num_hidden_layers: usize,
    pub(super) num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default = "default_eps")]
    pub(super) rms_norm_eps: f32,
    rope_theta: Option<f64>,
    rope_parameters: Option<RopeConfig>,
    rope_scaling: Option<Value>,
    layer_types: Option<Vec<LayerType>>,
    sliding_window: Option<usize>,
    /// Off turns the windows of `layer_types` off.
    use_sliding_window: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct RopeConfig {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
    partial_rotary_factor: Option<f64>,
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
enum LayerType {
    #[serde(rename = "full_attention")]
    Full,
    #[serde(rename = "sliding_attention")]
    Sliding,
}

fn one() -> usize {
    1
}

fn default_eps() -> f32 {
    1e-6
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

impl LayerConfig {
    fn check(&self) -> Result<(), ModelError> {
        let unsupported = |feature: String| Err(ModelError::Unsupported { feature });
        match self.model_type.as_deref() {
            None | Some("llama" | "qwen3") => {}
            Some(other) => {
                return unsupported(format!("an EAGLE-3 head of `{other}` layers"));
            }
        }
        if self.attention_bias || self.mlp_bias {
            return unsupported("an EAGLE-3 head with biases".into());
        }
        if !matches!(self.hidden_act.as_deref(), None | Some("silu")) {
            return unsupported(format!(
                "an EAGLE-3 head with hidden_act `{}`",
                self.hidden_act.as_deref().unwrap_or_default()
            ));
        }
        let sizes = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", self.kv_heads()),
            ("head_dim", self.head_dim()),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ];
        require_sizes(self.num_hidden_layers, &sizes)?;
        let (heads, kv_heads) = (self.num_attention_heads, self.kv_heads());
        require(heads.is_multiple_of(kv_heads), || {
            format!("{heads} query heads cannot share {kv_heads} key/value heads")
        })
    }

    pub(super) fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    pub(super) fn head_dim(&self) -> usize {
        let whole = self.hidden_size.checked_div(self.num_attention_heads);
        self.head_dim.or(whole).unwrap_or(0)
    }

    pub(super) fn rope(&self) -> Result<Rope, ModelError> {
        let own = self.rope_parameters.as_ref();
        let scaling = self.rope_scaling.as_ref();
        let type_of = |v: &Value| {
            let named = ["rope_type", "type"].iter().find_map(|key| v.get(*key));
            named.and_then(Value::as_str).unwrap_or("?").to_owned()
        };
        let kind = scaling
            .filter(|v| !v.is_null())
            .map(type_of)
            .or_else(|| own.and_then(|r| r.rope_type.clone()));
        if let Some(kind) = kind.filter(|kind| kind != "default") {
            return Err(ModelError::Unsupported {
                feature: format!("an EAGLE-3 head with rope_type `{kind}`"),
            });
        }
        let theta = own.and_then(|r| r.rope_theta).or(self.rope_theta);
        let share = own.and_then(|r| r.partial_rotary_factor).unwrap_or(1.0);
        let head_dim = self.head_dim();
        let turned = (head_dim as f64 * share) as usize;
        require(turned.is_multiple_of(2) && turned <= head_dim, || {
            format!("{turned} rotary columns of {head_dim}")
        })?;
        Ok(Rope {
            head_dim,
            pair_offset: turned / 2,
            frequencies: frequencies(theta.unwrap_or(1e4), turned, turned / 2),
            axes: Vec::new(),
        })
    }

    /// How many newest rows each layer sees; `None` for all of them.
    pub(super) fn windows(&self) -> Result<Vec<Option<usize>>, ModelError> {
        let n = self.num_hidden_layers;
        let Some(types) = &self.layer_types else {
            return Ok(vec![None; n]);
        };
        require(types.len() == n, || {
            format!("layer_types has {} entries for {n} layers", types.len())
        })?;
        let off = self.use_sliding_window == Some(false);
        let window = |t: &LayerType| match (t, self.sliding_window) {
            (LayerType::Full, _) => Ok(None),
            (LayerType::Sliding, _) if off => Ok(None),
            (LayerType::Sliding, Some(w)) if w > 0 => Ok(Some(w)),
            (LayerType::Sliding, _) => Err(ModelError::Config {
                message: "sliding layers without a sliding_window".into(),
            }),
        };
        types.iter().map(window).collect()
    }
}

pub(super) fn unpaired<T: std::fmt::Debug>(
    what: &'static str,
    drafter: T,
    target: T,
) -> ModelError {
    ModelError::Unpaired {
        what,
        drafter: format!("{drafter:?}"),
        target: format!("{target:?}"),
    }
}

/// The head reads the target's rows and writes its tokens.
pub(super) fn check_pair(
    config: &Config,
    layer: &LayerConfig,
    target: &dyn Target,
) -> Result<(), ModelError> {
    let width = config.target_hidden_size.unwrap_or(layer.hidden_size);
    if width != target.hidden_size() {
        let what = "hidden size of the target";
        return Err(unpaired(what, width, target.hidden_size()));
    }
    if layer.vocab_size != target.vocab_size() {
        let what = "vocabulary size";
        return Err(unpaired(what, layer.vocab_size, target.vocab_size()));
    }
    let verifier = config.speculators_config.as_ref();
    let verifier = verifier
        .and_then(|s| s.verifier.as_ref()?.architectures.as_deref())
        .unwrap_or_default();
    let family = TARGETS
        .iter()
        .find(|f| f.names.contains(&target.family()))
        .map_or(&[][..], |f| f.names);
    match verifier.first() {
        Some(name) if !family.contains(&name.as_str()) => Err(ModelError::Unpaired {
            what: "target's architecture",
            drafter: name.clone(),
            target: target.family().into(),
        }),
        _ => Ok(()),
    }
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
