//! What draft heads of EAGLE-3 and of blocks have in common in their checkpoints: the
//! configuration of their layers, the target that they name, and draft vocabularies.

use crate::layers::frequencies;
use crate::{MAX_LAYERS, ModelError, TARGETS, Target, require, require_sizes};
use backend::{Attention, Rope};
use cache::{GroupPlan, KvLayer, MemoryPlan};
use serde::Deserialize;
use serde_json::Value;
use weights::Checkpoint;

/// Where configurations of the library `speculators` name the target.
#[derive(Debug, Deserialize)]
pub(crate) struct SpeculatorsConfig {
    verifier: Option<Verifier>,
}

/// The target that the head was trained for.
#[derive(Debug, Deserialize)]
struct Verifier {
    architectures: Option<Vec<String>>,
}

/// What `config.json` says of the head's layers: in a part of its own, or beside the rest.
#[derive(Debug, Deserialize)]
pub(crate) struct LayerConfig {
    pub(crate) model_type: Option<String>,
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    pub(crate) intermediate_size: usize,
    #[serde(default = "one")]
    pub(crate) num_hidden_layers: usize,
    pub(crate) num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default = "default_eps")]
    pub(crate) rms_norm_eps: f32,
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

impl LayerConfig {
    pub(crate) fn check(&self) -> Result<(), ModelError> {
        let unsupported = |feature: String| Err(ModelError::Unsupported { feature });
        match self.model_type.as_deref() {
            None | Some("llama" | "qwen3") => {}
            Some(other) => {
                return unsupported(format!("a draft head of `{other}` layers"));
            }
        }
        if self.attention_bias || self.mlp_bias {
            return unsupported("a draft head with biases".into());
        }
        if !matches!(self.hidden_act.as_deref(), None | Some("silu")) {
            return unsupported(format!(
                "a draft head with hidden_act `{}`",
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

    /// Gives its sliding layers, or all layers where it names no types, windows of `rows` rows, if
    /// it has none.
    pub(crate) fn slide(&mut self, rows: Option<usize>) {
        self.sliding_window = self.sliding_window.or(rows);
        self.use_sliding_window = Some(true);
        let n = self.num_hidden_layers.min(MAX_LAYERS);
        self.layer_types
            .get_or_insert_with(|| vec![LayerType::Sliding; n]);
    }

    pub(crate) fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    pub(crate) fn head_dim(&self) -> usize {
        let whole = self.hidden_size.checked_div(self.num_attention_heads);
        self.head_dim.or(whole).unwrap_or(0)
    }

    pub(crate) fn rope(&self) -> Result<Rope, ModelError> {
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
                feature: format!("a draft head with rope_type `{kind}`"),
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
    pub(crate) fn windows(&self) -> Result<Vec<Option<usize>>, ModelError> {
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

pub(crate) fn unpaired<T: std::fmt::Debug>(
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

/// An error if the head names another width, vocabulary or architecture than those of `target`.
pub(crate) fn check_target(
    width: usize,
    vocab_size: usize,
    named: Option<&SpeculatorsConfig>,
    target: &dyn Target,
) -> Result<(), ModelError> {
    if width != target.hidden_size() {
        let what = "hidden size of the target";
        return Err(unpaired(what, width, target.hidden_size()));
    }
    if vocab_size != target.vocab_size() {
        let what = "vocabulary size";
        return Err(unpaired(what, vocab_size, target.vocab_size()));
    }
    let verifier = named
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

/// The head's memory, and how each layer attends with its place in it. Layers that
/// see the same rows are one group.
pub(crate) fn remember(
    config: &LayerConfig,
) -> Result<(MemoryPlan, Vec<(Attention, usize)>), ModelError> {
    let mut groups: Vec<GroupPlan> = Vec::new();
    let mut layers = Vec::new();
    for window in config.windows()? {
        let group = match groups.iter().position(|g| g.window == window) {
            Some(group) => group,
            None => {
                groups.push(GroupPlan {
                    window,
                    layers: Vec::new(),
                });
                groups.len() - 1
            }
        };
        let attention = Attention {
            group,
            heads: config.num_attention_heads,
            scale: (config.head_dim() as f32).sqrt().recip(),
            window,
        };
        layers.push((attention, groups[group].layers.len()));
        groups[group].layers.push(KvLayer {
            heads: config.kv_heads(),
            head_dim: config.head_dim(),
            query_heads: config.num_attention_heads / config.kv_heads().max(1),
            edge: None,
        });
    }
    let delta = Vec::new();
    Ok((MemoryPlan { groups, delta }, layers))
}

/// The target's token of each of `n` draft tokens: stored as what is to be added to
/// the draft token, and told a second time by which of the target's `vocab` tokens
/// are drafted (§2).
pub(crate) fn draft_ids(
    checkpoint: &Checkpoint,
    n: usize,
    vocab: usize,
) -> Result<Option<Vec<u32>>, ModelError> {
    require((1..=vocab).contains(&n), || {
        format!("a draft vocabulary of {n} of {vocab} tokens")
    })?;
    if n == vocab && !checkpoint.has("d2t") {
        return Ok(None);
    }
    let mut ids = checkpoint.integers("d2t", n)?;
    for (i, id) in ids.iter_mut().enumerate() {
        let token = u64::from(*id) + i as u64;
        require(token < vocab as u64, || {
            format!("d2t: draft token {i} is token {token} of {vocab}")
        })?;
        *id = token as u32;
    }
    if checkpoint.has("t2d") {
        let drafted = checkpoint.integers("t2d", vocab)?;
        let same = drafted.iter().filter(|&&d| d != 0).count() == n
            && ids.iter().all(|&id| drafted[id as usize] != 0);
        require(same, || "d2t and t2d name different tokens".into())?;
    }
    Ok(Some(ids))
}
