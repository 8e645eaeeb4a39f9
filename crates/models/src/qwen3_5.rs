//! Qwen 3.5 and 3.6 decoder, dense or with a mixture of experts
//! (`specs/qwen3_5.md`).
//!
//! ```text
//! x = E[id]
//! x = x + mixer(rms1(x))      gated delta rule, or gated full attention
//! x = x + mlp(rms1(x))        SwiGLU, or routed experts and a shared one
//! logits = rms1(x) Wᵀ
//! ```
//!
//! `rms1` multiplies by `1 + w`; the sum is made when the weights are loaded.
//! Letters: `n` rows, `H` hidden size, `h` query heads, `K` key/value heads, `e`
//! head size, `nv` value heads of size `dv`.

use crate::layers::{ExpertShape, GatedMlp, Loader, frequencies};
use crate::{Family, ModelError, Taps, Target, parse, require, require_sizes};
use backend::{
    Activation, Attention, Backend, Batch, Delta, DeltaSpec, DeltaWeights, Experts, Kv, Matrix,
    Rope, Tensor, math,
};
use cache::{GroupPlan, Memory, MemoryPlan};
use serde::Deserialize;
use weights::{Checkpoint, NormFacts};

pub(crate) const FAMILY: Family = Family {
    names: &[
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "qwen3_5_text",
        "qwen3_5",
        "qwen3_5_moe_text",
        "qwen3_5_moe",
    ],
    load: |b, checkpoint| Ok(Box::new(Qwen35::load(b, checkpoint)?)),
};

/// The only memory group: full attention.
pub(crate) const FULL: usize = 0;

#[derive(Clone, Debug, Default, Deserialize)]
struct RopeConfig {
    rope_theta: Option<f64>,
    partial_rotary_factor: Option<f64>,
}

/// The text part of `config.json` (`specs/qwen3_5.md` §1).
#[derive(Clone, Debug, Deserialize)]
pub(crate) struct Config {
    pub(crate) vocab_size: usize,
    pub(crate) hidden_size: usize,
    /// Absent where every layer is a mixture.
    #[serde(default)]
    intermediate_size: usize,
    pub(crate) num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: usize,
    #[serde(default = "default_head_dim")]
    head_dim: usize,
    #[serde(default)]
    layer_types: Option<Vec<LayerType>>,
    #[serde(default = "default_interval")]
    full_attention_interval: usize,
    #[serde(default = "default_key_heads")]
    linear_num_key_heads: usize,
    #[serde(default = "default_value_heads")]
    linear_num_value_heads: usize,
    #[serde(default = "default_linear_dim")]
    linear_key_head_dim: usize,
    #[serde(default = "default_linear_dim")]
    linear_value_head_dim: usize,
    #[serde(default = "default_taps")]
    linear_conv_kernel_dim: usize,
    #[serde(default)]
    rope_parameters: RopeConfig,
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default)]
    partial_rotary_factor: Option<f64>,
    #[serde(default = "default_eps")]
    pub(crate) rms_norm_eps: f32,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default = "default_true")]
    attn_output_gate: bool,
    #[serde(default)]
    pub(crate) mtp_num_hidden_layers: usize,
    #[serde(default)]
    num_experts: usize,
    #[serde(default)]
    num_experts_per_tok: usize,
    #[serde(default)]
    moe_intermediate_size: usize,
    #[serde(default)]
    shared_expert_intermediate_size: usize,
    #[serde(default = "default_context")]
    max_position_embeddings: usize,
}

fn default_head_dim() -> usize {
    256
}
fn default_interval() -> usize {
    4
}
fn default_key_heads() -> usize {
    16
}
fn default_value_heads() -> usize {
    32
}
fn default_linear_dim() -> usize {
    128
}
fn default_taps() -> usize {
    4
}
fn default_eps() -> f32 {
    1e-6
}
fn default_true() -> bool {
    true
}
fn default_context() -> usize {
    32_768
}

#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
enum LayerType {
    #[serde(rename = "linear_attention")]
    Delta,
    #[serde(rename = "full_attention")]
    Full,
}

impl Config {
    pub(crate) fn read(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config: Config = parse(checkpoint.text_config())?;
        if !config.attn_output_gate {
            return Err(ModelError::Unsupported {
                feature: "Qwen 3.5 without the attention output gate".into(),
            });
        }
        let experts = |size: usize| if config.num_experts == 0 { 1 } else { size };
        let sizes = [
            ("vocab_size", config.vocab_size),
            ("hidden_size", config.hidden_size),
            (
                "intermediate_size",
                config
                    .intermediate_size
                    .max(usize::from(config.num_experts > 0)),
            ),
            ("num_attention_heads", config.num_attention_heads),
            ("num_key_value_heads", config.num_key_value_heads),
            ("head_dim", config.head_dim),
            ("linear_num_key_heads", config.linear_num_key_heads),
            ("linear_num_value_heads", config.linear_num_value_heads),
            ("linear_key_head_dim", config.linear_key_head_dim),
            ("linear_value_head_dim", config.linear_value_head_dim),
            ("linear_conv_kernel_dim", config.linear_conv_kernel_dim),
            ("num_experts", experts(config.num_experts)),
            (
                "moe_intermediate_size",
                experts(config.moe_intermediate_size),
            ),
            (
                "shared_expert_intermediate_size",
                experts(config.shared_expert_intermediate_size),
            ),
            ("max_position_embeddings", config.max_position_embeddings),
        ];
        require_sizes(config.num_hidden_layers, &sizes)?;
        let heads = |n: usize, of: usize, what| {
            require(n.is_multiple_of(of), || {
                format!("{n} {what} heads cannot share {of}")
            })
        };
        heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            "query",
        )?;
        heads(
            config.linear_num_value_heads,
            config.linear_num_key_heads,
            "value",
        )?;
        require(config.linear_conv_kernel_dim > 1, || {
            "linear_conv_kernel_dim must be 2 or more".into()
        })?;
        require(config.full_attention_interval > 0, || {
            "full_attention_interval must not be 0".into()
        })?;
        Ok(config)
    }

    fn layer_types(&self) -> Result<Vec<LayerType>, ModelError> {
        let n = self.num_hidden_layers;
        let every = self.full_attention_interval;
        let types = self.layer_types.clone().unwrap_or_else(|| {
            (1..=n)
                .map(|i| {
                    if i % every == 0 {
                        LayerType::Full
                    } else {
                        LayerType::Delta
                    }
                })
                .collect()
        });
        require(types.len() == n && n > 0, || {
            format!("layer_types has {} entries for {n} layers", types.len())
        })?;
        Ok(types)
    }

    /// Which layers are full attention.
    pub(crate) fn full_layers(&self) -> Result<Vec<bool>, ModelError> {
        let is_full = |t| t == LayerType::Full;
        Ok(self.layer_types()?.into_iter().map(is_full).collect())
    }

    /// Turns the first quarter of each head, as the file says (§4).
    fn rope(&self) -> Result<Rope, ModelError> {
        let theta = self
            .rope_parameters
            .rope_theta
            .or(self.rope_theta)
            .unwrap_or(1e7);
        let share = self
            .rope_parameters
            .partial_rotary_factor
            .or(self.partial_rotary_factor)
            .unwrap_or(0.25);
        let turned = (self.head_dim as f64 * share) as usize;
        require(turned.is_multiple_of(2) && turned <= self.head_dim, || {
            format!("{turned} rotary columns of {}", self.head_dim)
        })?;
        Ok(Rope {
            head_dim: self.head_dim,
            pair_offset: turned / 2,
            frequencies: frequencies(theta, turned, turned / 2),
            axes: Vec::new(),
        })
    }

    pub(crate) fn delta(&self) -> DeltaSpec {
        DeltaSpec {
            slots: 0,
            key_heads: self.linear_num_key_heads,
            value_heads: self.linear_num_value_heads,
            key_dim: self.linear_key_head_dim,
            value_dim: self.linear_value_head_dim,
            conv_taps: self.linear_conv_kernel_dim,
        }
    }

    /// Key/value heads and head size of a full layer.
    pub(crate) fn kv_layer(&self) -> (usize, usize) {
        (self.num_key_value_heads, self.head_dim)
    }
}

/// Full attention with an output gate (§4).
struct FullAttention {
    q: Matrix,
    gate: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    q_norm: Tensor,
    k_norm: Tensor,
    rope: Rope,
    attention: Attention,
    eps: f32,
}

impl FullAttention {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (heads, e, hidden) = (
            config.num_attention_heads,
            config.head_dim,
            config.hidden_size,
        );
        let kv = config.num_key_value_heads * e;
        // Stored by head: `e` rows of the query, then `e` rows of its gate.
        let both = at.stored("q_proj", 2 * heads * e, hidden)?;
        let half = |gate: usize| {
            let head = |h: usize| both.slice((2 * h + gate) * e..(2 * h + gate + 1) * e);
            at.b.matrix(&(0..heads).map(head).collect::<Vec<_>>())
        };
        Ok(FullAttention {
            q: half(0),
            gate: half(1),
            k: at.matrix("k_proj", kv, hidden)?,
            v: at.matrix("v_proj", kv, hidden)?,
            o: at.matrix("o_proj", hidden, heads * e)?,
            q_norm: at.offset_norm("q_norm", e)?,
            k_norm: at.offset_norm("k_norm", e)?,
            rope: config.rope()?,
            attention: Attention {
                group: FULL,
                heads,
                scale: (e as f32).sqrt().recip(),
                window: None,
            },
            eps: config.rms_norm_eps,
        })
    }

    /// `(softmax(q·kᵀ/√e) v * sigmoid(gate)) Wo`
    fn forward(
        &self,
        b: &dyn Backend,
        name: std::fmt::Arguments<'_>,
        x: Tensor,
        batch: &Batch,
        kv: &mut Kv,
    ) -> Tensor {
        let head = |x: Tensor, norm: &Tensor| {
            let x = b.rms_norm(&x, Some(norm), self.rope.head_dim, self.eps);
            b.rope(x, &self.rope, batch)
        };
        let gated = {
            let [q, gate, k, v] = {
                let x = x;
                b.matmul_many(&x, [&self.q, &self.gate, &self.k, &self.v])
            };
            let q = head(q, &self.q_norm); // [n, h e]
            let k = head(k, &self.k_norm); // [n, K e]
            b.note(format_args!("{name}.q"), &q);
            b.note(format_args!("{name}.k"), &k);
            b.note(format_args!("{name}.v"), &v);
            b.kv_append(kv, &k, &v, FULL, batch);
            let o = b.attend(&q, kv, &self.attention, batch); // [n, h e]
            b.glu(gate, &o, Activation::Sigmoid)
        };
        b.matmul(&gated, &self.o)
    }
}

/// The gated delta rule between its projections (§5).
struct DeltaMixer {
    qkv: Matrix,
    z: Matrix,
    beta: Matrix,
    a: Matrix,
    weights: DeltaWeights,
    norm: Tensor,
    out: Matrix,
    eps: f32,
}

impl DeltaMixer {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let spec = config.delta();
        let (hidden, nv, channels) = (config.hidden_size, spec.value_heads, spec.channels());
        let conv = at
            .checkpoint
            .vector(&at.name_of("conv1d"), channels * spec.conv_taps)?;
        let decay: Vec<f32> = at
            .bare("A_log", nv)?
            .into_iter()
            .map(|a| -math::exp(a))
            .collect();
        Ok(DeltaMixer {
            qkv: at.matrix("in_proj_qkv", channels, hidden)?,
            z: at.matrix("in_proj_z", nv * spec.value_dim, hidden)?,
            beta: at.matrix("in_proj_b", nv, hidden)?,
            a: at.matrix("in_proj_a", nv, hidden)?,
            weights: DeltaWeights {
                conv: at.b.upload(channels, spec.conv_taps, &conv),
                decay: at.b.upload(1, nv, &decay),
                dt_bias: at.b.upload(1, nv, &at.bare("dt_bias", nv)?),
            },
            norm: at.vector("norm", spec.value_dim)?,
            out: at.matrix("out_proj", hidden, nv * spec.value_dim)?,
            eps: config.rms_norm_eps,
        })
    }

    /// `(rms(delta(x)) * silu(z)) Wo`
    fn forward(
        &self,
        b: &dyn Backend,
        i: usize,
        x: Tensor,
        batch: &Batch,
        state: &mut Delta,
    ) -> Tensor {
        let gated = {
            let [qkv, z, beta, a] = {
                let x = x;
                b.matmul_many(&x, [&self.qkv, &self.z, &self.beta, &self.a])
            };
            let o = b.gated_delta(state, &self.weights, &qkv, &beta, &a, batch); // [n, nv dv]
            b.note(format_args!("layers.{i}.delta"), &o);
            let o = b.rms_norm(&o, Some(&self.norm), self.norm.cols(), self.eps);
            b.glu(z, &o, Activation::Silu)
        };
        b.matmul(&gated, &self.out)
    }
}

/// A layer's feed-forward part.
enum FeedForward {
    Dense(GatedMlp),
    Mixture(Box<Mixture>),
}

/// Routed experts and one that every row takes, behind a gate (§6).
struct Mixture {
    router: Matrix,
    experts: Experts,
    shared: GatedMlp,
    shared_gate: Matrix,
}

impl FeedForward {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let hidden = config.hidden_size;
        if config.num_experts == 0 {
            let mlp = GatedMlp::load(at, hidden, config.intermediate_size, Activation::Silu)?;
            return Ok(FeedForward::Dense(mlp));
        }
        let shape = ExpertShape {
            count: config.num_experts,
            top_k: config.num_experts_per_tok,
            hidden,
            inner: config.moe_intermediate_size,
            activation: Activation::Silu,
        };
        let shared = config.shared_expert_intermediate_size;
        Ok(FeedForward::Mixture(Box::new(Mixture {
            router: at.matrix("gate", shape.count, hidden)?,
            experts: shape.load(at, "switch_mlp", None)?,
            shared: GatedMlp::load(&at.at("shared_expert"), hidden, shared, Activation::Silu)?,
            shared_gate: at.matrix("shared_expert_gate", 1, hidden)?,
        })))
    }

    fn forward(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        match self {
            FeedForward::Dense(mlp) => mlp.forward(b, x),
            FeedForward::Mixture(m) => {
                let [scores, gate] = b.matmul_many(x, [&m.router, &m.shared_gate]); // [n, E], [n, 1]
                let shared = m.shared.forward(b, x);
                let routed = b.moe(x, &scores, &m.experts);
                b.add(routed, &b.gate_rows(&shared, &gate, Activation::Sigmoid))
            }
        }
    }
}

/// What follows a mixer, and the norms around both (§3).
struct Block {
    input_norm: Tensor,
    post_norm: Tensor,
    mlp: FeedForward,
    eps: f32,
}

impl Block {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        Ok(Block {
            input_norm: at.offset_norm("input_layernorm", config.hidden_size)?,
            post_norm: at.offset_norm("post_attention_layernorm", config.hidden_size)?,
            mlp: FeedForward::load(&at.at("mlp"), config)?,
            eps: config.rms_norm_eps,
        })
    }

    fn input(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        b.rms_norm(x, Some(&self.input_norm), x.cols(), self.eps)
    }

    /// `x + mixed`, then `+ mlp(rms1(·))`
    fn output(
        &self,
        b: &dyn Backend,
        name: std::fmt::Arguments<'_>,
        x: Tensor,
        mixed: Tensor,
    ) -> Tensor {
        b.note(format_args!("{name}.attn_out"), &mixed);
        let x = b.add(x, &mixed);
        let h = b.rms_norm(&x, Some(&self.post_norm), x.cols(), self.eps);
        let m = self.mlp.forward(b, &h);
        b.note(format_args!("{name}.mlp_out"), &m);
        let x = b.add(x, &m);
        b.note(format_args!("{name}.out"), &x);
        x
    }
}

/// A full-attention decoder layer: one of the trunk's, or the MTP head's.
pub(crate) struct FullLayer {
    attention: FullAttention,
    block: Block,
}

impl FullLayer {
    /// Names of the tensors that [`FullLayer::load`] reads at `at`. Experts are
    /// those of the layout that `checkpoint` has, the stacked one if it has none.
    pub(crate) fn tensors(checkpoint: &Checkpoint, at: &str, config: &Config) -> Vec<String> {
        let mut modules: Vec<String> = [
            "input_layernorm",
            "post_attention_layernorm",
            "self_attn.q_proj",
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.o_proj",
            "self_attn.q_norm",
            "self_attn.k_norm",
        ]
        .map(str::to_owned)
        .into();
        let mlp = |of: &str| ["gate_proj", "up_proj", "down_proj"].map(|m| format!("mlp.{of}{m}"));
        if config.num_experts == 0 {
            modules.extend(mlp(""));
        } else {
            modules.extend(["mlp.gate".into(), "mlp.shared_expert_gate".into()]);
            modules.extend(mlp("shared_expert."));
        }
        let mut names: Vec<String> = modules
            .iter()
            .map(|module| format!("{at}.{module}.weight"))
            .collect();
        if config.num_experts > 0 {
            let experts = ExpertShape::tensors(
                checkpoint,
                &format!("{at}.mlp."),
                "switch_mlp",
                config.num_experts,
            );
            names.extend(experts);
        }
        names
    }

    pub(crate) fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        Ok(FullLayer {
            attention: FullAttention::load(&at.at("self_attn"), config)?,
            block: Block::load(at, config)?,
        })
    }

    pub(crate) fn forward(
        &self,
        b: &dyn Backend,
        name: std::fmt::Arguments<'_>,
        x: Tensor,
        batch: &Batch,
        kv: &mut Kv,
    ) -> Tensor {
        let mixed = self
            .attention
            .forward(b, name, self.block.input(b, &x), batch, kv);
        self.block.output(b, name, x, mixed)
    }
}

/// One layer and where its memory lies.
enum Layer {
    /// Gated delta; the layer's number among the recurrent ones.
    Delta(DeltaMixer, Block, usize),
    /// Full attention; the layer's number among those.
    Full(FullLayer, usize),
}

/// A Qwen 3.5 target.
pub struct Qwen35 {
    pub(crate) config: Config,
    embed: Matrix,
    head: Option<Matrix>,
    layers: Vec<Layer>,
    norm: Tensor,
    plan: MemoryPlan,
}

impl Qwen35 {
    fn load(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let mut config = Config::read(checkpoint)?;
        // The whole file's word on tying outweighs its text part's (§1).
        if let Some(tied) = checkpoint
            .config()
            .get("tie_word_embeddings")
            .and_then(serde_json::Value::as_bool)
        {
            config.tie_word_embeddings = tied;
        }
        let load = Loader::new(b, checkpoint);
        let (hidden, vocab) = (config.hidden_size, config.vocab_size);
        let mut plan = MemoryPlan {
            groups: vec![GroupPlan {
                window: None,
                layers: Vec::new(),
            }],
            delta: Vec::new(),
        };
        let mut layers = Vec::with_capacity(config.num_hidden_layers);
        for (i, layer_type) in config.layer_types()?.into_iter().enumerate() {
            let at = load.at("layers").at(i);
            layers.push(match layer_type {
                LayerType::Delta => {
                    plan.delta.push(config.delta());
                    let mixer = DeltaMixer::load(&at.at("linear_attn"), &config)?;
                    Layer::Delta(mixer, Block::load(&at, &config)?, plan.delta.len() - 1)
                }
                LayerType::Full => {
                    plan.groups[FULL].layers.push(config.kv_layer());
                    Layer::Full(
                        FullLayer::load(&at, &config)?,
                        plan.groups[FULL].layers.len() - 1,
                    )
                }
            });
        }
        Ok(Qwen35 {
            embed: load.matrix("embed_tokens", vocab, hidden)?,
            head: if config.tie_word_embeddings {
                None
            } else {
                Some(load.matrix("lm_head", vocab, hidden)?)
            },
            norm: load.offset_norm("norm", hidden)?,
            layers,
            plan,
            config,
        })
    }

    /// The module whose weights turn a hidden row into logits.
    pub(crate) fn output_matrix(&self) -> &'static str {
        match self.head {
            Some(_) => "lm_head",
            None => "embed_tokens",
        }
    }
}

impl Target for Qwen35 {
    fn family(&self) -> &'static str {
        "qwen3_5"
    }

    fn draft_heads(&self) -> &'static [&'static str] {
        &["mtp"]
    }

    fn norm_facts(&self, checkpoint: &Checkpoint) -> Vec<NormFacts> {
        checkpoint.norm_facts()
    }

    fn hidden_size(&self) -> usize {
        self.config.hidden_size
    }

    fn vocab_size(&self) -> usize {
        self.config.vocab_size
    }

    fn n_layers(&self) -> usize {
        self.layers.len()
    }

    fn max_context(&self) -> usize {
        self.config.max_position_embeddings
    }

    fn plan(&self) -> MemoryPlan {
        self.plan.clone()
    }

    fn embed(&self, b: &dyn Backend, tokens: &[u32]) -> Tensor {
        b.embed(&self.embed, tokens, 1.0)
    }

    fn forward_inputs(
        &self,
        b: &dyn Backend,
        inputs: Tensor,
        batch: &Batch,
        memory: &mut Memory,
        taps: &mut Taps,
    ) -> Tensor {
        let mut x = inputs; // [n, H]
        b.note(format_args!("embed"), &x);
        for (i, layer) in self.layers.iter().enumerate() {
            taps.see(b, i, &x);
            let name = format_args!("layers.{i}");
            x = match layer {
                Layer::Delta(mixer, block, at) => {
                    let mixed =
                        mixer.forward(b, i, block.input(b, &x), batch, &mut memory.delta[*at]);
                    block.output(b, name, x, mixed)
                }
                Layer::Full(layer, at) => {
                    layer.forward(b, name, x, batch, &mut memory.kv[FULL][*at])
                }
            };
        }
        taps.see(b, self.layers.len(), &x);
        let hidden = b.rms_norm(&x, Some(&self.norm), x.cols(), self.config.rms_norm_eps);
        b.note(format_args!("hidden"), &hidden);
        hidden
    }

    fn logits(&self, b: &dyn Backend, hidden: &Tensor) -> Tensor {
        let logits = b.matmul(hidden, self.head.as_ref().unwrap_or(&self.embed)); // [n, V]
        b.note(format_args!("logits"), &logits);
        logits
    }
}
