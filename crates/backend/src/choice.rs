//! How a token is chosen, as a device needs to know it.

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
