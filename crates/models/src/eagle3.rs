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

mod config;
mod load;

use crate::layers::GatedMlp;
use crate::{ChainedHead, HeadLogits, Scored, Target, with_media};
use backend::{Attention, Backend, Batch, Matrix, Rope, Tensor, TokenList};
use cache::{Memory, MemoryPlan};

pub(crate) const NAMES: &[&str] = &[
    "Eagle3Speculator",
    "Eagle3DraftModel",
    "LlamaForCausalLMEagle3",
];

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
    fn norm(&self, b: &dyn Backend, x: &Tensor, weight: &Tensor) -> Tensor {
        b.rms_norm(x, Some(weight), weight.cols(), self.eps)
    }

    /// `rms(E[token])`, of the unscaled table (§2), or of a row of media where that fits the
    /// table: `[n, H]`.
    fn token(
        &self,
        b: &dyn Backend,
        target: &dyn Target,
        batch: &Batch,
        media: &[&Tensor],
    ) -> Tensor {
        let weight = &self.layers[0].input_norm;
        match &self.embed {
            Some(table) => {
                let token = b.embed(table, &batch.tokens, 1.0);
                let fits = target.hidden_size() == table.cols;
                let media = if fits { media } else { &[] };
                self.norm(b, &with_media(b, token, batch, media), weight)
            }
            None => {
                // A factor passes the norm if `eps` grows with its square.
                let eps = self.eps * target.embed_scale().powi(2);
                let token = target.inputs(b, batch, media);
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

    fn feature_cols(&self) -> usize {
        self.fc.rows
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
        media: &[&Tensor],
        batch: &Batch,
        memory: &mut Memory,
    ) -> Tensor {
        let e = self.token(b, target, batch, media); // [n, H]
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
