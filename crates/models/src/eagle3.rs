//! EAGLE-3: a draft head that reads residual rows from inside any target
//! (`specs/eagle3.md`; Li et al. 2025, arXiv:2503.01840).
//!
//! ```text
//! g_p = [ a_1 | a_2 | a_3 ] Wfc              tapped rows of the target, once a row
//! u   = rms(h)                               h = g_p; chained: h = the last row's x
//! x   = (u or h) + attention([ rms(E[x_{p+1}]) | u ])
//! x   = x + mlp(rms(x))
//! x   = ordinary layers, if there are more
//! logits of x_{p+2} = rms(x) Wᵀ              of the draft vocabulary
//! ```
//!
//! Variants normalize the tapped rows, one by one or together, or hand on `rms(x)`
//! in place of `x`. The head keeps keys and values of its own, one row for each `p`;
//! rotary embedding is relative, so that row `p` stands at position `p`. Letters: `n`
//! rows, `H` hidden size, `A` taps of width `T`, `h` query heads, `K` key/value
//! heads, `e` head size, `D` draft vocabulary.

use crate::layers::{GatedMlp, Loader, frequencies};
use crate::{
    ChainedHead, HeadLogits, ModelError, Scored, TARGETS, Target, parse, require, require_sizes,
};
use backend::{Activation, Attention, Backend, Batch, Matrix, Rope, Tensor, TokenList};
use cache::{GroupPlan, Memory, MemoryPlan};
use serde::Deserialize;
use serde_json::Value;
use weights::Checkpoint;

pub(crate) const NAMES: &[&str] = &[
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "LlamaForCausalLMEagle3",
];

/// What `config.json` says of the head (§1). Flags that a file lacks are off.
#[derive(Debug, Deserialize)]
struct Config {
    draft_vocab_size: Option<usize>,
    #[serde(default)]
    norm_before_residual: bool,
    #[serde(default)]
    norm_before_fc: bool,
    #[serde(default)]
    fc_norm: bool,
    #[serde(default)]
    norm_output: bool,
    target_hidden_size: Option<usize>,
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
    /// Where flat configurations have the ids.
    eagle_config: Option<EagleConfig>,
    speculators_config: Option<SpeculatorsConfig>,
}

#[derive(Debug, Deserialize)]
struct EagleConfig {
    eagle_aux_hidden_state_layer_ids: Option<Vec<usize>>,
}

#[derive(Debug, Deserialize)]
struct SpeculatorsConfig {
    verifier: Option<Verifier>,
}

/// The target that the head was trained for.
#[derive(Debug, Deserialize)]
struct Verifier {
    architectures: Option<Vec<String>>,
}

/// What it says of the head's layers: in a part of its own, or beside the rest.
#[derive(Debug, Deserialize)]
struct LayerConfig {
    model_type: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    #[serde(default = "one")]
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    hidden_act: Option<String>,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
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

    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn head_dim(&self) -> usize {
        let whole = self.hidden_size.checked_div(self.num_attention_heads);
        self.head_dim.or(whole).unwrap_or(0)
    }

    fn rope(&self) -> Result<Rope, ModelError> {
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

    /// How many newest rows each layer sees; all, where it says nothing.
    fn windows(&self) -> Result<Vec<Option<usize>>, ModelError> {
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

/// One layer; the first reads twice the width.
struct Layer {
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    /// Norms of query and key heads.
    head_norms: Option<[Tensor; 2]>,
    attention: Attention,
    /// The layer's number among those of its memory group.
    kv: usize,
    input_norm: Tensor,
    post_norm: Tensor,
    mlp: GatedMlp,
}

impl Layer {
    fn load(
        at: &Loader<'_>,
        config: &LayerConfig,
        width: usize,
        attention: Attention,
        kv: usize,
    ) -> Result<Self, ModelError> {
        let (hidden, e) = (config.hidden_size, config.head_dim());
        let (q_out, kv_out) = (config.num_attention_heads * e, config.kv_heads() * e);
        let own = at.at("self_attn");
        // Some writers leave the model type out; the tensors tell.
        let normed = at.checkpoint.has(&own.name_of("q_norm"));
        Ok(Layer {
            q: own.matrix("q_proj", q_out, width)?,
            k: own.matrix("k_proj", kv_out, width)?,
            v: own.matrix("v_proj", kv_out, width)?,
            o: own.matrix("o_proj", hidden, q_out)?,
            head_norms: if normed || config.model_type.as_deref() == Some("qwen3") {
                Some([own.vector("q_norm", e)?, own.vector("k_norm", e)?])
            } else {
                None
            },
            attention,
            kv,
            input_norm: at.vector("input_layernorm", hidden)?,
            post_norm: at.vector("post_attention_layernorm", hidden)?,
            mlp: GatedMlp::load(
                &at.at("mlp"),
                hidden,
                config.intermediate_size,
                Activation::Silu,
            )?,
        })
    }

    /// `r + softmax(q·kᵀ/√e) v Wo`, then `+ mlp(rms(·))`: `[n, H]`.
    fn forward(
        &self,
        head: &Eagle3,
        b: &dyn Backend,
        s: &Tensor,
        residual: &Tensor,
        batch: &Batch,
        memory: &mut Memory,
    ) -> Tensor {
        let [q, k, v] = b.matmul_many(s, [&self.q, &self.k, &self.v]);
        let [q, k] = match &self.head_norms {
            None => [q, k],
            Some([q_norm, k_norm]) => [head.norm(b, &q, q_norm), head.norm(b, &k, k_norm)],
        };
        let q = b.rope(q, &head.rope, batch); // [n, h e]
        let k = b.rope(k, &head.rope, batch); // [n, K e]
        let group = self.attention.group;
        let kv = &mut memory.kv[group][self.kv];
        b.kv_append(kv, &k, &v, group, batch);
        let a = b.matmul(&b.attend(&q, kv, &self.attention, batch), &self.o); // [n, H]
        let x = b.add(a, residual);
        let m = self.mlp.forward(b, &head.norm(b, &x, &self.post_norm));
        b.add(m, &x)
    }
}

/// An EAGLE-3 head, paired with its target.
pub struct Eagle3 {
    taps: Vec<usize>,
    /// Norms of the tapped rows, one each.
    tap_norms: Vec<Tensor>,
    /// The norm of all of them together.
    fused_norm: Option<Tensor>,
    fc: Matrix,
    /// Absent where the target's embeddings are used.
    embed: Option<Matrix>,
    hidden_norm: Tensor,
    norm_before_residual: bool,
    layers: Vec<Layer>,
    norm: Tensor,
    /// Whether a chain goes on from the normed row.
    norm_output: bool,
    lm_head: Matrix,
    /// The target's token of each draft token; the same if absent.
    list: Option<TokenList>,
    rope: Rope,
    plan: MemoryPlan,
    eps: f32,
}

impl Eagle3 {
    /// Loads the head of `checkpoint` for `target`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Unpaired`] if it was made for another target, else as
    /// [`crate::load_target`].
    pub fn load(
        b: &dyn Backend,
        checkpoint: &Checkpoint,
        target: &dyn Target,
    ) -> Result<Self, ModelError> {
        let found = checkpoint.architecture()?;
        if !NAMES.contains(&found) {
            return Err(ModelError::MissingHead(format!(
                "architecture `{found}` is no EAGLE-3 head; known are {}",
                NAMES.join(", ")
            )));
        }
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
        check_pair(&config, &layer, target)?;
        let taps = taps(&config, target)?;

        let load = Loader::new(b, checkpoint);
        let (hidden, width) = (layer.hidden_size, target.hidden_size());
        let (plan, attention) = remember(&layer)?;
        let first = if checkpoint.has("midlayer.hidden_norm.weight") {
            load.at("midlayer")
        } else {
            load.at("layers").at(0)
        };
        let mut layers = Vec::with_capacity(attention.len());
        for (i, (attention, kv)) in attention.into_iter().enumerate() {
            let ordinary = load.at("layers").at(i);
            let (at, width) = match i {
                0 => (&first, 2 * hidden),
                _ => (&ordinary, hidden),
            };
            layers.push(Layer::load(at, &layer, width, attention, kv)?);
        }
        let has_embed = checkpoint.has("embed_tokens.weight");
        if !has_embed && hidden != width {
            return Err(unpaired(
                "hidden size, without embeddings of its own,",
                hidden,
                width,
            ));
        }
        let n_draft = config.draft_vocab_size.unwrap_or(layer.vocab_size);
        let ids = draft_ids(checkpoint, n_draft, layer.vocab_size)?;
        let fc_norm = load.at("fc_norm");
        let tap_norm = |i: usize| fc_norm.vector(&i.to_string(), width);
        Ok(Eagle3 {
            tap_norms: if config.fc_norm {
                (0..taps.len()).map(tap_norm).collect::<Result<_, _>>()?
            } else {
                Vec::new()
            },
            fused_norm: if config.norm_before_fc {
                Some(load.vector("input_norm", taps.len() * width)?)
            } else {
                None
            },
            fc: load.matrix("fc", hidden, taps.len() * width)?,
            embed: if has_embed {
                Some(load.matrix("embed_tokens", layer.vocab_size, hidden)?)
            } else {
                None
            },
            hidden_norm: first.vector("hidden_norm", hidden)?,
            norm_before_residual: config.norm_before_residual,
            norm: load.vector("norm", hidden)?,
            norm_output: config.norm_output,
            lm_head: load.matrix("lm_head", n_draft, hidden)?,
            list: ids.map(|ids| TokenList::new(b, ids)),
            rope: layer.rope()?,
            eps: layer.rms_norm_eps,
            taps,
            layers,
            plan,
        })
    }

    fn norm(&self, b: &dyn Backend, x: &Tensor, weight: &Tensor) -> Tensor {
        b.rms_norm(x, Some(weight), weight.cols(), self.eps)
    }

    /// `rms(E[token])`, of the unscaled table (§2): `[n, H]`.
    fn token(&self, b: &dyn Backend, target: &dyn Target, tokens: &[u32]) -> Tensor {
        let weight = &self.layers[0].input_norm;
        match &self.embed {
            Some(table) => self.norm(b, &b.embed(table, tokens, 1.0), weight),
            None => {
                // A factor passes the norm if `eps` grows with its square.
                let eps = self.eps * target.embed_scale().powi(2);
                let token = target.embed(b, tokens);
                b.rms_norm(&token, Some(weight), weight.cols(), eps)
            }
        }
    }
}

impl ChainedHead for Eagle3 {
    fn name(&self) -> &'static str {
        "eagle3"
    }

    fn taps(&self) -> &[usize] {
        &self.taps
    }

    fn plan(&self) -> MemoryPlan {
        self.plan.clone()
    }

    fn features(
        &self,
        b: &dyn Backend,
        _hidden: &Tensor,
        taps: &[Tensor],
        rows: &[usize],
    ) -> Tensor {
        let mut each = taps.iter().enumerate().map(|(i, tap)| {
            let row = b.gather(tap, rows); // [n, T]
            match self.tap_norms.get(i) {
                Some(weight) => self.norm(b, &row, weight),
                None => row,
            }
        });
        let first = each.next().expect("a head has taps");
        let fused = each.fold(first, |all, row| b.concat(&all, &row)); // [n, A T]
        let fused = match &self.fused_norm {
            Some(weight) => self.norm(b, &fused, weight),
            None => fused,
        };
        let g = b.matmul(&fused, &self.fc); // [n, H]
        b.note(format_args!("draft.feature"), &g);
        g
    }

    fn forward(
        &self,
        b: &dyn Backend,
        target: &dyn Target,
        features: &Tensor,
        batch: &Batch,
        memory: &mut Memory,
    ) -> Tensor {
        let e = self.token(b, target, &batch.tokens); // [n, H]
        let u = self.norm(b, features, &self.hidden_norm); // [n, H]
        let s = b.concat(&e, &u); // [n, 2 H]
        let residual = if self.norm_before_residual {
            &u
        } else {
            features
        };
        let mut x = self.layers[0].forward(self, b, &s, residual, batch, memory);
        b.note(format_args!("draft.layers.0.out"), &x);
        for (i, layer) in self.layers.iter().enumerate().skip(1) {
            let s = self.norm(b, &x, &layer.input_norm);
            x = layer.forward(self, b, &s, &x, batch, memory);
            b.note(format_args!("draft.layers.{i}.out"), &x);
        }
        if self.norm_output {
            self.norm(b, &x, &self.norm)
        } else {
            x
        }
    }

    fn list(&self) -> Option<&TokenList> {
        self.list.as_ref()
    }

    fn logits(&self, b: &dyn Backend, _target: &dyn Target, features: &Tensor) -> HeadLogits<'_> {
        let logits = if self.norm_output {
            b.matmul(features, &self.lm_head)
        } else {
            b.matmul(&self.norm(b, features, &self.norm), &self.lm_head)
        }; // [n, D]
        b.note(format_args!("draft.logits"), &logits);
        HeadLogits {
            logits,
            scored: self.list.as_ref().map_or(Scored::All, Scored::Same),
        }
    }
}

/// The head's memory, and how each layer attends with its place in it. Layers that
/// see the same rows are one group.
fn remember(config: &LayerConfig) -> Result<(MemoryPlan, Vec<(Attention, usize)>), ModelError> {
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
        groups[group]
            .layers
            .push((config.kv_heads(), config.head_dim()));
    }
    let delta = Vec::new();
    Ok((MemoryPlan { groups, delta }, layers))
}

fn unpaired<T: std::fmt::Debug>(what: &'static str, drafter: T, target: T) -> ModelError {
    ModelError::Unpaired {
        what,
        drafter: format!("{drafter:?}"),
        target: format!("{target:?}"),
    }
}

/// The head reads the target's rows and writes its tokens.
fn check_pair(config: &Config, layer: &LayerConfig, target: &dyn Target) -> Result<(), ModelError> {
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
fn taps(config: &Config, target: &dyn Target) -> Result<Vec<usize>, ModelError> {
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

/// The target's token of each of `n` draft tokens: stored as what is to be added to
/// the draft token, and told a second time by which of the target's `vocab` tokens
/// are drafted (§2).
fn draft_ids(
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
