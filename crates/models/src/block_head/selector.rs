//! The candidate selector of DFlash 2: which of the tokens with the best scores follows the token
//! before it.
//!
//! ```text
//! score(c) = logit(c) + Σ_r pred[previous token] (z Wᵀ) succ[c]     of the k best candidates c
//! ```

use super::conv::product;
use crate::layers::Loader;
use crate::{HeadLogits, ModelError, Scored, require};
use backend::{Backend, Matrix, Tensor};

/// `hidden: [r, H]`, `predecessors` and `successors: [V, r]`.
pub(super) struct Selector {
    hidden: Matrix,
    predecessors: Matrix,
    successors: Matrix,
    top_k: usize,
}

impl Selector {
    pub(super) fn load(
        at: &Loader<'_>,
        [rank, top_k]: [usize; 2],
        [hidden, vocab]: [usize; 2],
    ) -> Result<Self, ModelError> {
        require(rank > 0 && (1..=vocab).contains(&top_k), || {
            format!("selector_rank {rank} and selector_top_k {top_k} of {vocab} tokens")
        })?;
        Ok(Selector {
            hidden: at.matrix("hidden_projection", rank, hidden)?,
            predecessors: at.bare_matrix("predecessor_codebook", vocab, rank)?,
            successors: at.bare_matrix("successor_codebook", vocab, rank)?,
            top_k,
        })
    }

    /// Scores of the candidates of each row of `logits: [n, V]`, guesses of `z: [n, H]`, after the
    /// tokens `previous`.
    pub(super) fn select(
        &self,
        b: &dyn Backend,
        logits: &Tensor,
        z: &Tensor,
        previous: &[u32],
    ) -> HeadLogits<'static> {
        let all = b.download(logits);
        let ids: Vec<Vec<u32>> = all
            .chunks_exact(logits.cols())
            .map(|row| self.best(row))
            .collect();
        let own = ids.iter().zip(all.chunks_exact(logits.cols()));
        let own: Vec<f32> = own
            .flat_map(|(ids, row)| ids.iter().map(move |&id| row[id as usize]))
            .collect();
        let e = b.embed(&self.predecessors, previous, 1.0); // [n, r]
        let e = product(b, e, &b.matmul(z, &self.hidden));
        let edges = b.matmul_rows(&e, &self.successors, &ids); // [n, k]
        HeadLogits {
            logits: b.add(edges, &b.upload(ids.len(), self.top_k, &own)),
            scored: Scored::ByRow(ids),
        }
    }

    /// The tokens with the best scores of `row`, the best first; of equal ones the lower first.
    fn best(&self, row: &[f32]) -> Vec<u32> {
        let order =
            |&i: &u32, &j: &u32| row[j as usize].total_cmp(&row[i as usize]).then(i.cmp(&j));
        let mut ids: Vec<u32> = (0..row.len() as u32).collect();
        if self.top_k < ids.len() {
            ids.select_nth_unstable_by(self.top_k - 1, order);
            ids.truncate(self.top_k);
        }
        ids.sort_unstable_by(order);
        ids
    }
}
