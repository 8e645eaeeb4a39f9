//! Sampling: which token follows, given logits, history and noise.
//!
//! ```text
//! l_i    logits, then in this order
//!        l_i / r if l_i > 0, else l_i r      repetition r, for i in prompt or output
//!        l_i - (a + f c_i)                   presence a, frequency f; i is c_i > 0 times in the output
//!        l_i - m b^(length(i) - n)           DRY: multiplier m, base b; if i would repeat length(i) >= n
//!                                            tokens of the text (`dry.rs`)
//!        l_i + b_i                           bias
//!        -inf                                if i is suppressed, or ends a text that is too short
//! T = 0  token = argmax l
//! T > 0  z_i  = l_i (1/T)                    dynamic temperature: T is
//!                                            low + (high - low) (H(l) / ln n)^exponent
//!        S    = {i: z_i > -inf}, then in this order
//!        top-n-sigma  those with z_i >= max z - n sigma(l) / T
//!        top-k        the k first by z
//!        typical-p    of those that have a mass, the shortest prefix by |max z - z_i - D|
//!                     whose mass exceeds p times that of S; D is the mean of max z - z
//!        top-p        the shortest prefix by z whose mass is at least p times that of S
//!        min-p        those with z_i >= max z + ln(min_p)
//!        XTC          by a coin: without those that have at least a share t of the mass of S,
//!                     but for the last of them by z
//!        token = argmax over S of z_i + g_i,  g = noise(seed, position)
//! ```
//!
//! Mirostat stands for all of what truncates, and for dynamic temperature (`mirostat.rs`). Penalties look
//! at the last tokens of the text only where a number of them is given.
//!
//! The definitions are llama.cpp's, and so is the order but for two: temperature comes before
//! truncation here, and bias after penalties. So H(l), the entropy at T = 1, is that of all `n`
//! tokens with `l_i > -inf`, and low and high are `T` less and more `dynatemp_range`. Sigma is the
//! standard deviation of those `l`. Typical-p compares surprises, `ln M - (z_i - max z)`, with
//! the entropy, `ln M + D`: the mass `M` cancels.
//!
//! XTC's coin is a function of seed and position, of a stream of its own: target and drafter
//! see the same, and a text with speculation is the text without. Length and breakers of DRY are
//! functions of the tokens before.
//!
//! Where no option needs more than the logits, edited or not, this is [`backend::RowEdits`] and
//! [`backend::TokenChoice`], which devices carry out too.
//!
//! Of equal values the lower token id comes first, everywhere. Logits of which one is NaN, or
//! the largest not finite, give no token ([`backend::NO_TOKEN`]). If edits leave S empty the
//! token is the lowest id. If `max z` is infinite, S is `argmax l` alone. A mass is
//! `exp(z - max z)`, rounded to a multiple of 2^-40, so that masses add up exactly in any
//! order ([`backend::math::mass`]). What else is summed up, for D, H and sigma, is rounded to
//! integers too ([`backend::moments`]).
//!
//! `g` is keyed by token id ([`crate::noise`]): two rows of similar logits choose
//! the same token more often than not, which is what drafting lives on.
//!
//! Pure functions: no model, no cache, no clock, no state but [`Scratch`], which
//! changes no result.

mod dry;
mod edits;
mod history;
mod key;
mod mirostat;
mod row;
mod sampling;
mod support;
#[cfg(test)]
mod tests;

pub use dry::Breakers;
pub use history::History;
pub use mirostat::{Mirostat, observe};
pub(crate) use sampling::ByDevice;
pub use sampling::{MAX_LISTED_TOKENS, Sampling, SamplingError};

use crate::noise::Noise;
use backend::{NO_TOKEN, gives_token};
use dry::Repeats;
use key::{Key, best_of_keys};
use row::Row;
use support::{support, support_among};

/// Largest vocabulary: masses of this many tokens add up in 64 bits.
pub const MAX_VOCAB: usize = 1 << 23;

/// Buffers that calls reuse, so that none allocates once they have grown. They change no
/// result.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// Logits after penalties, bias and suppression.
    edited: Vec<f32>,
    /// Repetitions in the text.
    repeats: Repeats,
    /// The largest logit of each block.
    maxima: Vec<f32>,
    /// `maxima` again, to be partitioned.
    ranked: Vec<f32>,
    /// Tokens of the support.
    keys: Vec<Key>,
    /// Token id to its place among the ids of `choose_among`, plus one.
    places: Vec<u32>,
}

/// How likely each token is to be chosen. Tokens that are not listed cannot be; the
/// probabilities add up to 1.
pub type TokenProbs = Vec<(u32, f32)>;

/// Chooses the next token, `logits[i]` being that of token `i`; [`NO_TOKEN`] if they
/// [give none](gives_token). `position` is the number of tokens before it.
///
/// # Panics
///
/// If there are no logits, or more than [`MAX_VOCAB`].
///
/// ```
/// use speculate::sample::{History, Sampling, Scratch, choose};
///
/// let sampling = Sampling { temperature: 0.8, top_k: 2, seed: 7, ..Sampling::default() };
/// let (history, scratch) = (History::new(&sampling, &[]), &mut Scratch::default());
/// let logits = [1.0, 3.0, -2.0, 2.5];
/// let chosen = choose(&sampling, &history, 0, &logits, scratch);
/// assert!([1, 3].contains(&chosen), "one of the two likeliest");
/// // The same seed and position choose the same token again.
/// assert_eq!(choose(&sampling, &history, 0, &logits, scratch), chosen);
/// ```
pub fn choose(
    sampling: &Sampling,
    history: &History,
    position: u64,
    logits: &[f32],
    scratch: &mut Scratch,
) -> u32 {
    if !gives_token(logits) && !logits.is_empty() {
        return NO_TOKEN;
    }
    let Scratch {
        edited,
        repeats,
        maxima,
        ranked,
        keys,
        ..
    } = scratch;
    let row = Row::new(sampling, history, logits, edited, repeats, maxima);
    let Some(scale) = row.scale(sampling) else {
        return row.argmax();
    };
    let noise = Noise::new(sampling.seed, position);
    if sampling.truncates(logits.len()) {
        let support = row.support(sampling, position, scale, ranked, keys);
        best_of_keys(support, &noise)
    } else {
        row.best(scale, &noise)
    }
}

/// [`choose`] among some tokens only, `logits[i]` being that of token `ids[i]`.
/// The others count as suppressed. A token has the noise it has in [`choose`].
///
/// # Panics
///
/// If there are no ids, or more than [`MAX_VOCAB`], or not as many as logits.
pub fn choose_among(
    sampling: &Sampling,
    history: &History,
    position: u64,
    ids: &[u32],
    logits: &[f32],
    scratch: &mut Scratch,
) -> u32 {
    if !gives_token(logits) && !logits.is_empty() {
        return NO_TOKEN;
    }
    let noise = Noise::new(sampling.seed, position);
    support_among(sampling, history, position, ids, logits, scratch).choose(&noise)
}

/// How likely [`choose`], or [`choose_among`] `ids`, is to choose each token after `position`
/// others, in no order. What XTC does there is part of it; noise is not.
///
/// # Panics
///
/// As [`choose`] and [`choose_among`].
pub fn token_probs(
    sampling: &Sampling,
    history: &History,
    position: u64,
    ids: Option<&[u32]>,
    logits: &[f32],
    scratch: &mut Scratch,
) -> TokenProbs {
    match ids {
        None => support(sampling, history, position, logits, scratch).probs(),
        Some(ids) => support_among(sampling, history, position, ids, logits, scratch).probs(),
    }
}
