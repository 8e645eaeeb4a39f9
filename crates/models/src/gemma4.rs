//! Gemma 4 decoder: dense, with per-layer embeddings, or with a mixture of
//! experts (`specs/gemma4.md`).
//!
//! ```text
//! x = E[id] √H
//! x = x + rms(attention(rms(x)))          sliding window or full, scores unscaled
//! x = x + rms(mlp(rms(x)))                GELU-gated
//!     or rms(rms(mlp(rms(x))) + rms(experts(rms(x))))
//! x = x + rms(P (gelu(G x) * ple))        models with per-layer embeddings
//! x = x * layer_scalar
//! logits = cap tanh(rms(x) Eᵀ / cap)
//! ```
//!
//! Full layers may take their values from the key projection (`k = v`); trailing
//! layers may read another layer's keys and values. Letters: `n` rows, `H`
//! hidden size, `h` query heads, `K` key/value heads, `e` head size.

mod config;
mod load;

pub(crate) use config::{Config, LayerType};

use crate::layers::GatedMlp;
use crate::{Family, MediaRows, Taps, Target};
use backend::{Activation, Attention, Backend, Batch, Experts, Matrix, Rope, Tensor};
use cache::{Memory, MemoryPlan};

pub(crate) const FAMILY: Family = Family {
    names: &[
        "Gemma4ForCausalLM",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForCausalLM",
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_text",
        "gemma4",
        "gemma4_unified_text",
        "gemma4_unified",
    ],
    load: |b, checkpoint| Ok(Box::new(Gemma4::load(b, checkpoint)?)),
};

/// The memory group of sliding layers.
pub(crate) const SLIDING: usize = 0;

/// The memory group of full layers.
pub(crate) const FULL: usize = 1;

/// Query side of an attention layer: all of it, for a layer without keys and
/// values of its own.
pub(crate) struct QueryAttention {
    q: Matrix,
    q_norm: Tensor,
    o: Matrix,
    pub(crate) rope: Rope,
    attention: Attention,
    eps: f32,
}

impl QueryAttention {
    /// `rope(rms(x Wq))`: `[n, h e]`
    fn query(&self, b: &dyn Backend, q: Tensor, batch: &Batch) -> Tensor {
        let q = b.rms_norm(&q, Some(&self.q_norm), self.rope.head_dim, self.eps);
        b.rope(q, &self.rope, batch)
    }

    /// Hides from each row all keys but the newest `rows` before its own, where its window does not
    /// hide as many.
    pub(crate) fn narrow(&mut self, rows: usize) {
        let window = rows.saturating_add(1);
        let own = self.attention.window;
        self.attention.window = Some(own.map_or(window, |own| own.min(window)));
    }

    /// Attention over what the layer's keys and values hold: `[n, H]`.
    pub(crate) fn read(
        &self,
        b: &dyn Backend,
        q: &Tensor,
        kv: &backend::Kv,
        batch: &Batch,
    ) -> Tensor {
        b.matmul(&b.attend(q, kv, &self.attention, batch), &self.o)
    }

    /// Query projection and attention of a layer that owns no keys and values.
    pub(crate) fn forward(
        &self,
        b: &dyn Backend,
        x: &Tensor,
        kv: &backend::Kv,
        batch: &Batch,
    ) -> Tensor {
        let q = self.query(b, b.matmul(x, &self.q), batch);
        self.read(b, &q, kv, batch)
    }
}

/// Keys and values of a layer that owns them.
struct OwnKv {
    k: Matrix,
    /// Absent where values come from the key projection.
    v: Option<Matrix>,
    k_norm: Tensor,
}

/// A layer's gate on its token's own embedding (§7).
struct PerLayerGate {
    gate: Matrix,
    projection: Matrix,
    norm: Tensor,
}

/// The model's per-layer embeddings (§7).
struct PerLayerInputs {
    table: Matrix,
    table_scale: f32,
    projection: Matrix,
    norm: Tensor,
    width: usize,
}

/// The routed experts beside a layer's dense block (§8).
struct Mixture {
    router: Matrix,
    /// The router's scale with `1/√H`, as the norm's weight.
    router_scale: Tensor,
    experts: Experts,
    pre_norm: Tensor,
    post_dense_norm: Tensor,
    post_experts_norm: Tensor,
}

impl Mixture {
    /// `rms(mlp(h)) + rms(Σ w expert(rms(x)))`; the router reads the residual stream `x` itself.
    fn forward(
        &self,
        b: &dyn Backend,
        i: usize,
        x: &Tensor,
        (mlp, h): (&GatedMlp, &Tensor),
        eps: f32,
    ) -> Tensor {
        let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), w.cols(), eps);
        let scores = b.matmul(&norm(x, &self.router_scale), &self.router); // [n, E]
        let dense = mlp.forward(b, h); // [n, H]
        b.note(format_args!("layers.{i}.mlp_out"), &dense);
        let routed = b.moe(&norm(x, &self.pre_norm), &scores, &self.experts); // [n, H]
        b.note(format_args!("layers.{i}.moe_out"), &routed);
        b.add(
            norm(&dense, &self.post_dense_norm),
            &norm(&routed, &self.post_experts_norm),
        )
    }
}

struct Layer {
    attention: QueryAttention,
    own: Option<OwnKv>,
    /// Where its keys and values lie: group, and layer within the group.
    kv: (usize, usize),
    mlp: GatedMlp,
    mixture: Option<Mixture>,
    input_norm: Tensor,
    post_attention_norm: Tensor,
    pre_mlp_norm: Tensor,
    post_mlp_norm: Tensor,
    per_layer: Option<PerLayerGate>,
    scalar: f32,
}

/// A Gemma 4 target.
pub struct Gemma4 {
    pub(crate) config: Config,
    embed: Matrix,
    embed_scale: f32,
    layers: Vec<Layer>,
    norm: Tensor,
    per_layer: Option<PerLayerInputs>,
    /// Whether rows that see their span do so in sliding layers alone (§5).
    full_are_causal: bool,
    plan: MemoryPlan,
}

impl Gemma4 {
    /// One token's inputs to every layer: `[n, L P]`, layer after layer.
    fn per_layer_inputs(
        &self,
        b: &dyn Backend,
        inputs: &PerLayerInputs,
        batch: &Batch,
        x: &Tensor,
    ) -> Tensor {
        let own = if batch.media.is_empty() {
            b.embed(&inputs.table, &batch.tokens, inputs.table_scale) // [n, L P]
        } else {
            // A row of media has no token of its own; that of padding stands for it.
            let mut tokens = batch.tokens.clone();
            let media = batch.media.iter().map(|media| media.row as usize);
            media.for_each(|row| tokens[row] = self.config.pad_token_id);
            b.embed(&inputs.table, &tokens, inputs.table_scale)
        };
        let scale = (self.config.hidden_size as f32).sqrt().recip();
        let context = b.scale(b.matmul(x, &inputs.projection), scale); // [n, L P]
        let context = b.rms_norm(
            &context,
            Some(&inputs.norm),
            inputs.width,
            self.config.rms_norm_eps,
        );
        b.scale(b.add(context, &own), std::f32::consts::FRAC_1_SQRT_2)
    }
}

impl Target for Gemma4 {
    fn family(&self) -> &'static str {
        "gemma4"
    }

    fn draft_heads(&self) -> &'static [&'static str] {
        &["assistant"]
    }

    fn chosen_experts(&self) -> f64 {
        match (self.config.top_k_experts, self.config.num_experts) {
            (Some(chosen), Some(all)) => chosen as f64 / all.max(1) as f64,
            _ => 1.0,
        }
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
        b.embed(&self.embed, tokens, self.embed_scale)
    }

    fn embed_scale(&self) -> f32 {
        self.embed_scale
    }

    fn media_rows(&self) -> MediaRows {
        MediaRows {
            has_grid: false,
            see_their_span: self.config.sees_spans(),
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
        let eps = self.config.rms_norm_eps;
        let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), w.cols(), eps);
        let mut x = inputs; // [n, H]
        b.note(format_args!("embed"), &x);
        let mut per_layer = self
            .per_layer
            .as_ref()
            .map(|p| (p.width, self.per_layer_inputs(b, p, batch, &x)));
        let causal = |batch: &Batch| {
            (batch.rows_ahead() > 0 && self.full_are_causal).then(|| batch.causal())
        };
        let of_full = causal(batch);
        let (mut batch, mut full) = (batch, of_full.as_ref().unwrap_or(batch));
        let writer = self.layers.iter().rposition(|layer| layer.own.is_some());
        let cut = taps.cut(writer.unwrap_or(0), batch);
        let of_cut = cut.as_ref().and_then(|cut| causal(&cut.batch));
        for (i, layer) in self.layers.iter().enumerate() {
            taps.see(b, i, &x);
            x = {
                let mut h = norm(&x, &layer.input_norm);
                let is_full = layer.kv.0 == FULL;
                let a = match cut.as_ref().filter(|cut| cut.layer == i) {
                    None => {
                        let batch = if is_full { full } else { batch };
                        layer.attend(b, i, &h, batch, memory, eps) // [n, H]
                    }
                    Some(cut) => {
                        layer.remember(b, &h, if is_full { full } else { batch }, memory, eps);
                        x = cut.gather(b, &x); // [m, H]
                        h = cut.gather(b, &h);
                        per_layer = per_layer.map(|(width, x)| (width, cut.gather(b, &x)));
                        (batch, full) = (&cut.batch, of_cut.as_ref().unwrap_or(&cut.batch));
                        layer.read(b, &h, if is_full { full } else { batch }, memory) // [m, H]
                    }
                };
                b.note(format_args!("layers.{i}.attn_out"), &a);
                b.add(norm(&a, &layer.post_attention_norm), &x)
            };
            x = {
                let m = layer.feed_forward(b, i, &x, eps); // [n, H]
                b.add(norm(&m, &layer.post_mlp_norm), &x)
            };
            if let (Some(gate), Some((width, inputs))) = (&layer.per_layer, &per_layer) {
                let own = b.columns(inputs, i * width, *width); // [n, P]
                let p = b.glu(b.matmul(&x, &gate.gate), &own, Activation::GeluTanh);
                x = b.add(norm(&b.matmul(&p, &gate.projection), &gate.norm), &x);
            }
            x = b.scale(x, layer.scalar);
            b.note(format_args!("layers.{i}.out"), &x);
        }
        taps.see(b, self.layers.len(), &x);
        if let Some(cut) = cut.filter(|cut| cut.layer == self.layers.len()) {
            x = cut.gather(b, &x);
        }
        let hidden = norm(&x, &self.norm);
        b.note(format_args!("hidden"), &hidden);
        hidden
    }

    fn logits(&self, b: &dyn Backend, hidden: &Tensor) -> Tensor {
        let logits = self.uncapped_logits(b, hidden);
        let logits = match self.config.final_logit_softcapping {
            Some(cap) => b.softcap(logits, cap),
            None => logits,
        };
        b.note(format_args!("logits"), &logits);
        logits
    }

    fn uncapped_logits(&self, b: &dyn Backend, hidden: &Tensor) -> Tensor {
        b.matmul(hidden, &self.embed) // [n, V]
    }
}

impl Layer {
    /// `mlp(rms(x))`, or that and the routed experts.
    fn feed_forward(&self, b: &dyn Backend, i: usize, x: &Tensor, eps: f32) -> Tensor {
        let h = b.rms_norm(x, Some(&self.pre_mlp_norm), x.cols(), eps); // [n, H]
        if let Some(mixture) = &self.mixture {
            return mixture.forward(b, i, x, (&self.mlp, &h), eps);
        }
        let m = self.mlp.forward(b, &h);
        b.note(format_args!("layers.{i}.mlp_out"), &m);
        m
    }

    /// Remembers the keys and values of rows `x: [n, H]`, where the layer owns them.
    fn remember(&self, b: &dyn Backend, x: &Tensor, batch: &Batch, memory: &mut Memory, eps: f32) {
        let Some(own) = &self.own else { return };
        let (key, value) = match &own.v {
            Some(wv) => {
                let [key, value] = b.matmul_many(x, [&own.k, wv]);
                (key, Some(value))
            }
            None => (b.matmul(x, &own.k), None),
        };
        let (k, v) = self.keys_and_values(b, own, (key, value), batch, eps);
        let (group, layer) = self.kv;
        b.kv_append(&mut memory.kv[group][layer], &k, &v, group, batch);
    }

    /// `softmax(q·kᵀ) v Wo` of rows `x: [n, H]`, whose keys and values are remembered.
    fn read(&self, b: &dyn Backend, x: &Tensor, batch: &Batch, memory: &Memory) -> Tensor {
        let (group, layer) = self.kv;
        self.attention
            .forward(b, x, &memory.kv[group][layer], batch)
    }

    /// Keys and values from what the layer's projections give; without a `value`, it is made of the `key`.
    fn keys_and_values(
        &self,
        b: &dyn Backend,
        own: &OwnKv,
        (key, value): (Tensor, Option<Tensor>),
        batch: &Batch,
        eps: f32,
    ) -> (Tensor, Tensor) {
        let rope = &self.attention.rope;
        let k = b.rms_norm(&key, Some(&own.k_norm), rope.head_dim, eps);
        let k = b.rope(k, rope, batch); // [n, K e]
        let v = b.rms_norm(value.as_ref().unwrap_or(&key), None, rope.head_dim, eps); // [n, K e]
        (k, v)
    }

    /// `softmax(q·kᵀ) v Wo`; remembers `k` and `v` where the layer owns them.
    fn attend(
        &self,
        b: &dyn Backend,
        i: usize,
        x: &Tensor,
        batch: &Batch,
        memory: &mut Memory,
        eps: f32,
    ) -> Tensor {
        let (group, layer) = self.kv;
        let a = &self.attention;
        let Some(own) = &self.own else {
            return self.read(b, x, batch, memory);
        };
        let (q, key, value);
        match &own.v {
            Some(wv) => {
                let [of_q, of_k, of_v] = b.matmul_many(x, [&a.q, &own.k, wv]);
                (q, key, value) = (of_q, of_k, Some(of_v));
            }
            None => {
                [q, key] = b.matmul_many(x, [&a.q, &own.k]);
                value = None;
            }
        }
        let q = a.query(b, q, batch); // [n, h e]
        let (k, v) = self.keys_and_values(b, own, (key, value), batch, eps);
        b.note(format_args!("layers.{i}.q"), &q);
        b.note(format_args!("layers.{i}.k"), &k);
        b.note(format_args!("layers.{i}.v"), &v);
        b.kv_append(&mut memory.kv[group][layer], &k, &v, group, batch);
        a.read(b, &q, &memory.kv[group][layer], batch)
    }
}
