//! How tokens are chosen, as a device needs to know it.

use crate::{Backend, Batch, StepKey, Tensor};

/// The choice of one token, all logits as they are. `speculate::sample` defines it, and
/// `speculate::noise` the noise; whoever carries it out returns the same token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenChoice {
    /// Key of the noise.
    pub seed: u64,
    /// Tokens before the chosen one.
    pub position: u64,
    /// The reciprocal of the temperature; 0 is greedy.
    pub scale: f32,
    /// Mass to keep; 1 keeps all.
    pub top_p: f32,
    /// Logarithm of the least probability to keep, as a share of the largest; -inf keeps
    /// all.
    pub ln_min_p: f32,
    /// Most likely tokens to keep; 0 keeps all.
    pub top_k: u32,
}

/// The tokens that the columns of some logits stand for.
#[derive(Debug)]
pub struct TokenList {
    ids: Vec<u32>,
    on_device: Tensor,
}

/// The bits of `ids` as those of numbers, `[1, m]`.
fn upload(b: &dyn Backend, ids: &[u32]) -> Tensor {
    let bits: Vec<f32> = ids.iter().map(|&id| f32::from_bits(id)).collect();
    b.upload(1, bits.len(), &bits)
}

impl TokenList {
    /// A column for each of `ids`.
    pub fn new(b: &dyn Backend, ids: Vec<u32>) -> Self {
        TokenList {
            on_device: upload(b, &ids),
            ids,
        }
    }

    /// The tokens, by column.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// The same where a device can read them: their bits, `[1, m]`.
    pub fn on_device(&self) -> &Tensor {
        &self.on_device
    }
}

/// Tokens in groups of one size, the best of which are scored.
#[derive(Debug)]
pub struct TokenGroups {
    list: TokenList,
    size: usize,
    top: usize,
}

impl TokenGroups {
    /// Groups of `size`, one after the other in `ids`; the `top` best of them count.
    ///
    /// # Panics
    ///
    /// If there are not so many whole groups.
    pub fn new(b: &dyn Backend, ids: Vec<u32>, size: usize, top: usize) -> Self {
        assert!(ids.len().is_multiple_of(size) && top * size <= ids.len());
        let list = TokenList::new(b, ids);
        TokenGroups { list, size, top }
    }

    /// The tokens, group after group.
    pub fn list(&self) -> &TokenList {
        &self.list
    }

    /// Tokens of a group.
    pub fn size(&self) -> usize {
        self.size
    }

    /// How many groups count.
    pub fn top(&self) -> usize {
        self.top
    }

    /// The tokens of the groups with the largest `scores`, the lower of equal ones, in
    /// ascending order.
    pub fn best(&self, scores: &[f32]) -> Vec<u32> {
        let mut order: Vec<usize> = (0..scores.len()).collect();
        let better = |&a: &usize, &b: &usize| scores[b].total_cmp(&scores[a]).then(a.cmp(&b));
        if self.top < order.len() {
            order.select_nth_unstable_by(self.top, better);
            order.truncate(self.top);
        }
        let group = |g: usize| &self.list.ids[g * self.size..(g + 1) * self.size];
        let mut ids: Vec<u32> = order.into_iter().flat_map(group).copied().collect();
        ids.sort_unstable();
        ids
    }
}

/// Steps of which each is about the tokens that the one before it has chosen.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    /// Whose work it is, as in [`Backend::step`].
    pub key: StepKey,
    /// The rows of each step. Only the first one's tokens are known; a first step without
    /// rows does nothing but score what the chain starts from.
    pub batches: &'a [Batch],
    /// By step, how each row's token is chosen.
    pub choices: &'a [Vec<TokenChoice>],
    /// The tokens that are scored, if not all.
    pub list: Option<&'a TokenList>,
}

/// What a step of a [`Chain`] makes.
#[derive(Debug)]
pub struct Link {
    /// Scores of the next token after each row.
    pub logits: Tensor,
    /// Each row's tokens, where they depend on the row, as [`Backend::matmul_groups`]
    /// returns them.
    pub ids: Option<Tensor>,
    /// What the next step starts from, if not from the same as this one.
    pub next: Option<Tensor>,
}

/// What a [`Chain`] makes.
#[derive(Debug)]
pub struct Chained {
    /// By step, each row's token.
    pub tokens: Vec<Vec<u32>>,
    /// The last of [`Link::next`]; lasts until the next step or chain of the same key.
    pub next: Option<Tensor>,
}
