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

mod config;
mod load;

pub(crate) use config::Config;

use crate::layers::GatedMlp;
use crate::taps::Cut;
use crate::{Family, MediaRows, Taps, Target};
use backend::{
    Activation, Attention, Backend, Batch, Delta, DeltaWeights, Experts, Kv, Matrix, Rope, Tensor,
};
use cache::{Memory, MemoryPlan};
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
    /// `(softmax(q·kᵀ/√e) v * sigmoid(gate)) Wo`, of the rows of `cut` alone if there is one; the keys and values of all
    /// rows are remembered.
    fn forward(
        &self,
        b: &dyn Backend,
        name: std::fmt::Arguments<'_>,
        x: Tensor,
        batch: &Batch,
        kv: &mut Kv,
        cut: Option<&Cut>,
    ) -> Tensor {
        let readers = cut.map_or(batch, |cut| &cut.batch);
        let head = |x: Tensor, norm: &Tensor, batch: &Batch| {
            let x = b.rms_norm(&x, Some(norm), self.rope.head_dim, self.eps);
            b.rope(x, &self.rope, batch)
        };
        let gated = {
            let [q, gate, k, v] = {
                let x = x;
                match cut {
                    None => b.matmul_many(&x, [&self.q, &self.gate, &self.k, &self.v]),
                    Some(cut) => {
                        let [k, v] = b.matmul_many(&x, [&self.k, &self.v]);
                        let x = cut.gather(b, &x);
                        let [q, gate] = b.matmul_many(&x, [&self.q, &self.gate]);
                        [q, gate, k, v]
                    }
                }
            };
            let q = head(q, &self.q_norm, readers); // [n, h e]
            let k = head(k, &self.k_norm, batch); // [n, K e]
            b.note(format_args!("{name}.q"), &q);
            b.note(format_args!("{name}.k"), &k);
            b.note(format_args!("{name}.v"), &v);
            b.kv_append(kv, &k, &v, FULL, batch);
            let o = b.attend(&q, kv, &self.attention, readers); // [n, h e]
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
    /// `(rms(delta(x)) * silu(z)) Wo`, of the rows of `cut` alone if there is one.
    fn forward(
        &self,
        b: &dyn Backend,
        i: usize,
        x: Tensor,
        batch: &Batch,
        state: &mut Delta,
        cut: Option<&Cut>,
    ) -> Tensor {
        let gated = {
            let [qkv, z, beta, a] = {
                let x = x;
                b.matmul_many(&x, [&self.qkv, &self.z, &self.beta, &self.a])
            };
            let o = b.gated_delta(state, &self.weights, &qkv, &beta, &a, batch); // [n, nv dv]
            b.note(format_args!("layers.{i}.delta"), &o);
            let (o, z) = match cut {
                None => (o, z),
                Some(cut) => (cut.gather(b, &o), cut.gather(b, &z)),
            };
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
    fn input(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        b.rms_norm(x, Some(&self.input_norm), x.cols(), self.eps)
    }

    /// `x + mixed`, then `+ mlp(rms1(·))`; of a cut `mixed` has its rows alone, and `x` all.
    fn output(
        &self,
        b: &dyn Backend,
        name: std::fmt::Arguments<'_>,
        (x, cut): (Tensor, Option<&Cut>),
        mixed: Tensor,
    ) -> Tensor {
        b.note(format_args!("{name}.attn_out"), &mixed);
        let x = match cut {
            None => x,
            Some(cut) => cut.gather(b, &x),
        };
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
    /// The layer's rows after all rows `x: [n, H]` are remembered; of the rows of `cut` alone if there is one.
    pub(crate) fn forward(
        &self,
        b: &dyn Backend,
        name: std::fmt::Arguments<'_>,
        x: Tensor,
        batch: &Batch,
        kv: &mut Kv,
        cut: Option<&Cut>,
    ) -> Tensor {
        let h = self.block.input(b, &x);
        let mixed = self.attention.forward(b, name, h, batch, kv, cut);
        self.block.output(b, name, (x, cut), mixed)
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

    fn chosen_experts(&self) -> f64 {
        match self.config.num_experts {
            0 => 1.0,
            all => self.config.num_experts_per_tok as f64 / all as f64,
        }
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
        self.config.max_context()
    }

    fn plan(&self) -> MemoryPlan {
        self.plan.clone()
    }

    fn embed(&self, b: &dyn Backend, tokens: &[u32]) -> Tensor {
        b.embed(&self.embed, tokens, 1.0)
    }

    fn media_rows(&self) -> MediaRows {
        MediaRows {
            has_grid: true,
            see_their_span: false,
        }
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
        let cut = taps.cut(self.layers.len().saturating_sub(1), batch);
        for (i, layer) in self.layers.iter().enumerate() {
            taps.see(b, i, &x);
            let name = format_args!("layers.{i}");
            let cut = cut.as_ref().filter(|cut| cut.layer == i);
            x = match layer {
                Layer::Delta(mixer, block, at) => {
                    let (h, state) = (block.input(b, &x), &mut memory.delta[*at]);
                    let mixed = mixer.forward(b, i, h, batch, state, cut);
                    block.output(b, name, (x, cut), mixed)
                }
                Layer::Full(layer, at) => {
                    layer.forward(b, name, x, batch, &mut memory.kv[FULL][*at], cut)
                }
            };
        }
        taps.see(b, self.layers.len(), &x);
        if let Some(cut) = cut.filter(|cut| cut.layer == self.layers.len()) {
            x = cut.gather(b, &x);
        }
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
