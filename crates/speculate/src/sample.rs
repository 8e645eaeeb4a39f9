//! Sampling: which token follows, given logits, history and noise.
//!
//! ```text
//! l_i    logits, then in this order
//!        l_i / r if l_i > 0, else l_i r      repetition r, for i in prompt or output
//!        l_i - (a + f c_i)                   presence a, frequency f; i is c_i > 0 times in the output
//!        l_i + b_i                           bias
//!        -inf                                if i is suppressed
//! T = 0  token = argmax l
//! T > 0  z_i  = l_i (1/T)
//!        S    = {i: z_i > -inf}, then in this order
//!        top-k   the k first by z
//!        top-p   the shortest prefix by z whose mass is at least p times that of S
//!        min-p   those with z_i >= max z + ln(min_p)
//!        token = argmax over S of z_i + g_i,  g = noise(seed, position)
//! ```
//!
//! Of equal values the lower token id comes first, everywhere. Logits of which one is NaN, or
//! the largest not finite, give no token ([`backend::NO_TOKEN`]). If edits leave S empty the
//! token is the lowest id. If `max z` is
//! infinite, S is `argmax l` alone. A mass is `exp(z - max z)`, rounded to a multiple of
//! 2^-40, so that masses add up exactly in any order ([`backend::math::mass`]).
//!
//! `g` is keyed by token id ([`crate::noise`]): two rows of similar logits choose
//! the same token more often than not, which is what drafting lives on.
//!
//! # Without sorting the vocabulary
//!
//! A first pass keeps the largest logit of each block of 64 tokens. What follows
//! skips every block that cannot matter:
//!
//! - The k-th largest block maximum is at most the k-th largest value.
//! - Blocks 29 below the maximum have no mass. Let `M` be the mass of all `n` and
//!   `c = max z - ln(n / ((1-p) M))`: tokens below `c` hold less than `(1-p) M`, so
//!   the top-p prefix ends above `c`. It is found by partitioning, not by sorting.
//! - A token wins only with `z_i + g_i` at least the best score yet. That rules
//!   out most blocks before their noise is drawn, by `MAX_GUMBEL`, and nearly all of
//!   the rest before a logarithm is taken, by the ceiling of their largest draw.
//!
//! Pure functions: no model, no cache, no clock, no state but [`Scratch`], which
//! changes no result.

use crate::noise::{self, BLOCK, Noise, gumbel_ceiling, gumbel_of};
use backend::math::{MASS_ONE, NO_MASS, exp, ln, mass};
use backend::{NO_TOKEN, TokenChoice, gives_token};
use std::collections::HashMap;

/// Tokens a request may bias, and tokens it may suppress.
pub const MAX_LISTED_TOKENS: usize = 16_384;

/// Largest vocabulary: masses of this many tokens add up in 64 bits.
pub const MAX_VOCAB: usize = 1 << 23;

/// How tokens are chosen. The default is greedy with everything else off.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Most likely tokens to keep; 0 keeps all.
    pub top_k: usize,
    /// Mass to keep; 1 keeps all.
    pub top_p: f32,
    /// Least probability to keep, as a share of the largest; 0 keeps all,
    /// and so does a number too small to be normal.
    pub min_p: f32,
    /// Factor against tokens of prompt and output; 1 is none.
    pub repetition_penalty: f32,
    /// Subtracted from tokens of the output; 0 is none.
    pub presence_penalty: f32,
    /// Subtracted for each time in the output; 0 is none.
    pub frequency_penalty: f32,
    /// Added to the logits of tokens.
    pub logit_bias: Vec<(u32, f32)>,
    /// Tokens never to choose.
    pub suppress: Vec<u32>,
    /// Key of the noise.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Sampling {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            suppress: Vec::new(),
            seed: 0,
        }
    }
}

/// Why a request's sampling is refused.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum SamplingError {
    /// A number is not allowed.
    #[error("{name} must be {allowed}, got {value}")]
    OutOfRange {
        /// The field.
        name: &'static str,
        /// What it may be.
        allowed: &'static str,
        /// What it is.
        value: f32,
    },
    /// A list is too long.
    #[error("{name} has {found} tokens, at most {MAX_LISTED_TOKENS} are allowed")]
    TooManyTokens {
        /// The field.
        name: &'static str,
        /// Its length.
        found: usize,
    },
    /// A list names a token that does not exist.
    #[error("{name} has token {token}, but the vocabulary ends at {vocab}")]
    UnknownToken {
        /// The field.
        name: &'static str,
        /// The token.
        token: u32,
        /// Tokens of the vocabulary.
        vocab: usize,
    },
}

impl Sampling {
    /// Checks what came from outside against a vocabulary of `vocab` tokens.
    ///
    /// # Errors
    ///
    /// [`SamplingError`] for the first field that is not allowed.
    pub fn validate(&self, vocab: usize) -> Result<(), SamplingError> {
        let t = self.temperature;
        let numbers = [
            // A smaller one has no finite reciprocal.
            (
                "temperature",
                "0 or at least 1.2e-38",
                t,
                t == 0.0 || (t >= f32::MIN_POSITIVE && t.is_finite()),
            ),
            (
                "top_p",
                "above 0 and at most 1",
                self.top_p,
                self.top_p > 0.0 && self.top_p <= 1.0,
            ),
            (
                "min_p",
                "at least 0 and at most 1",
                self.min_p,
                (0.0..=1.0).contains(&self.min_p),
            ),
            (
                "repetition_penalty",
                "positive",
                self.repetition_penalty,
                self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite(),
            ),
            (
                "presence_penalty",
                "finite",
                self.presence_penalty,
                self.presence_penalty.is_finite(),
            ),
            (
                "frequency_penalty",
                "finite",
                self.frequency_penalty,
                self.frequency_penalty.is_finite(),
            ),
        ];
        let biases = self.logit_bias.iter();
        let biases = biases.map(|&(_, bias)| ("logit_bias", "finite", bias, bias.is_finite()));
        for (name, allowed, value, is_allowed) in numbers.into_iter().chain(biases) {
            if !is_allowed {
                return Err(SamplingError::OutOfRange {
                    name,
                    allowed,
                    value,
                });
            }
        }
        let biased = self.logit_bias.iter().map(|&(token, _)| token).collect();
        for (name, tokens) in [("logit_bias", &biased), ("suppress", &self.suppress)] {
            let found = Vec::len(tokens);
            if found > MAX_LISTED_TOKENS {
                return Err(SamplingError::TooManyTokens { name, found });
            }
            if let Some(&token) = tokens.iter().find(|&&token| token as usize >= vocab) {
                return Err(SamplingError::UnknownToken { name, token, vocab });
            }
        }
        Ok(())
    }

    /// Whether the token is the argmax of the logits as they are, which a device
    /// can tell without sending them.
    pub fn is_plain_greedy(&self) -> bool {
        self.temperature == 0.0 && !self.edits_logits()
    }

    /// The choice of the token after `position` others as a device can make it, unless
    /// that depends on more than the logits.
    pub fn on_device(&self, position: u64) -> Option<TokenChoice> {
        let scale = match self.temperature {
            0.0 => 0.0,
            temperature => 1.0 / temperature,
        };
        (!self.edits_logits()).then_some(TokenChoice {
            seed: self.seed,
            position,
            scale,
            top_p: self.top_p,
            ln_min_p: ln_min_p(self),
            top_k: u32::try_from(self.top_k).unwrap_or(0),
        })
    }

    fn edits_logits(&self) -> bool {
        self.counts_tokens() || !self.logit_bias.is_empty() || !self.suppress.is_empty()
    }

    fn counts_tokens(&self) -> bool {
        self.counts_prompt() || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }

    fn counts_prompt(&self) -> bool {
        self.repetition_penalty != 1.0
    }
}

/// How often a token has been seen.
#[derive(Clone, Copy, Debug, Default)]
struct Count {
    in_prompt: bool,
    n_output: u32,
}

/// The tokens of prompt and output, as far as penalties need them.
///
/// Rows under verification push what was drafted and pop it again.
#[derive(Clone, Debug)]
pub struct History {
    is_needed: bool,
    counts: HashMap<u32, Count>,
    /// What `pop` undoes.
    output: Vec<u32>,
}

impl History {
    /// The history before the first token of output. Without penalties in
    /// `sampling` it stays empty and nothing costs anything.
    pub fn new(sampling: &Sampling, prompt: &[u32]) -> Self {
        let counted = if sampling.counts_prompt() {
            prompt
        } else {
            &[]
        };
        let seen = Count {
            in_prompt: true,
            n_output: 0,
        };
        History {
            is_needed: sampling.counts_tokens(),
            counts: counted.iter().map(|&token| (token, seen)).collect(),
            output: Vec::new(),
        }
    }

    /// Appends a token of output.
    pub fn push(&mut self, token: u32) {
        if self.is_needed {
            self.counts.entry(token).or_default().n_output += 1;
            self.output.push(token);
        }
    }

    /// Undoes the last [`History::push`].
    ///
    /// # Panics
    ///
    /// If there is none, and there are penalties.
    pub fn pop(&mut self) {
        if self.is_needed {
            let token = self.output.pop().expect("a push for every pop");
            let count = self.counts.get_mut(&token).expect("counted when pushed");
            count.n_output -= 1;
        }
    }
}

/// Buffers that calls reuse, so that none allocates once they have grown.
#[derive(Clone, Debug, Default)]
pub struct Scratch {
    /// Logits after penalties, bias and suppression.
    edited: Vec<f32>,
    /// The largest logit of each block.
    maxima: Vec<f32>,
    /// `maxima` again, to be partitioned.
    ranked: Vec<f32>,
    /// Tokens of the support.
    keys: Vec<Key>,
    /// Token id to its place among the ids of `choose_among`, plus one.
    places: Vec<u32>,
}

/// The next token, `logits[i]` being that of token `i`; [`NO_TOKEN`] if they
/// [give none](gives_token). `position` is the number of tokens before it.
///
/// # Panics
///
/// If there are no logits, or more than [`MAX_VOCAB`].
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
    let row = Row::new(
        sampling,
        history,
        logits,
        &mut scratch.edited,
        &mut scratch.maxima,
    );
    let Some(scale) = row.scale(sampling) else {
        return row.argmax();
    };
    let noise = Noise::new(sampling.seed, position);
    if truncates(sampling, logits.len()) {
        let keys = row.support(sampling, scale, &mut scratch.ranked, &mut scratch.keys);
        best_of_keys(keys, &noise)
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
    match support_among(sampling, history, ids, logits, scratch) {
        Support::One(token) => token,
        Support::Keys(keys) => best_of_keys(keys, &Noise::new(sampling.seed, position)),
    }
}

/// What noise decides between.
enum Support<'a> {
    /// Nothing: this token is chosen.
    One(u32),
    /// These, in no order.
    Keys(&'a mut [Key]),
}

/// The support of [`choose_among`].
fn support_among<'a>(
    sampling: &Sampling,
    history: &History,
    ids: &[u32],
    logits: &[f32],
    scratch: &'a mut Scratch,
) -> Support<'a> {
    assert_eq!(ids.len(), logits.len(), "a logit for each id");
    assert!((1..=MAX_VOCAB).contains(&ids.len()), "a vocabulary");
    let Scratch {
        edited,
        keys,
        places,
        ..
    } = scratch;
    let mut row = logits;
    if sampling.edits_logits() {
        let n_places = *ids.iter().max().expect("at least one") as usize + 1;
        if places.len() < n_places {
            places.resize(n_places, 0);
        }
        for (place, &id) in (1..).zip(ids) {
            places[id as usize] = place;
        }
        edited.clear();
        edited.extend_from_slice(logits);
        edit(sampling, history, edited, |token| {
            let place = *places.get(token as usize)?;
            (place as usize).checked_sub(1)
        });
        for &id in ids {
            places[id as usize] = 0;
        }
        row = edited;
    }
    let fill = |keys: &mut Vec<Key>, scale: f32| {
        keys.clear();
        let scaled = row.iter().zip(ids).map(|(&l, &id)| (l * scale, id));
        // Neither -inf nor what is not a number.
        keys.extend(scaled.filter(|&(z, _)| z >= f32::MIN).map(Key::new));
        keys.iter().min().copied()
    };
    let Some(first) = fill(keys, 1.0) else {
        return Support::One(*ids.iter().min().expect("at least one"));
    };
    let scale = scale_of(sampling, first.z());
    let Some(scale) = scale else {
        return Support::One(first.id());
    };
    let Some(first) = fill(keys, scale) else {
        return Support::One(first.id());
    };
    let keep = truncate(sampling, first.z(), None, keys);
    Support::Keys(&mut keys[..keep])
}

/// How likely each token is to be chosen; the others are not. The shares add up to 1.
pub type Law = Vec<(u32, f32)>;

/// The law of [`choose`], the likeliest token first. Greedy is one token of share 1.
///
/// # Panics
///
/// As [`choose`].
pub fn distribution(
    sampling: &Sampling,
    history: &History,
    logits: &[f32],
    scratch: &mut Scratch,
) -> Law {
    match support(sampling, history, logits, scratch) {
        Support::One(token) => vec![(token, 1.0)],
        Support::Keys(keys) => {
            keys.sort_unstable();
            shares(keys)
        }
    }
}

/// The law of [`choose`], or of [`choose_among`] `ids`, in no order.
///
/// # Panics
///
/// As [`choose`] and [`choose_among`].
pub fn law(
    sampling: &Sampling,
    history: &History,
    ids: Option<&[u32]>,
    logits: &[f32],
    scratch: &mut Scratch,
) -> Law {
    let support = match ids {
        None => support(sampling, history, logits, scratch),
        Some(ids) => support_among(sampling, history, ids, logits, scratch),
    };
    match support {
        Support::One(token) => vec![(token, 1.0)],
        Support::Keys(keys) => shares(keys),
    }
}

/// The support of [`choose`].
fn support<'a>(
    sampling: &Sampling,
    history: &History,
    logits: &[f32],
    scratch: &'a mut Scratch,
) -> Support<'a> {
    let Scratch {
        edited,
        maxima,
        ranked,
        keys,
        ..
    } = scratch;
    let row = Row::new(sampling, history, logits, edited, maxima);
    match row.scale(sampling) {
        None => Support::One(row.argmax()),
        Some(scale) => Support::Keys(row.support(sampling, scale, ranked, keys)),
    }
}

/// `softmax(z)` of `keys`, in their order.
fn shares(keys: &[Key]) -> Law {
    let top = keys.iter().min().expect("a support is not empty").z();
    let masses = keys.iter().map(|key| exp(key.z() - top));
    let total: f64 = masses.clone().map(f64::from).sum();
    let shares = masses.map(|mass| (f64::from(mass) / total) as f32);
    keys.iter().map(|key| key.id()).zip(shares).collect()
}

/// Whether anything but noise decides about a row of `n` logits.
fn truncates(sampling: &Sampling, n: usize) -> bool {
    (1..n).contains(&sampling.top_k) || sampling.top_p < 1.0 || sampling.min_p > 0.0
}

/// `1/T`, unless the largest logit decides alone.
fn scale_of(sampling: &Sampling, top: f32) -> Option<f32> {
    let scale = 1.0 / sampling.temperature;
    (sampling.temperature != 0.0 && (top * scale).is_finite()).then_some(scale)
}

/// Penalties, bias, suppression; `place(token)` is where the token's logit is.
fn edit(
    sampling: &Sampling,
    history: &History,
    row: &mut [f32],
    place: impl Fn(u32) -> Option<usize>,
) {
    // Each entry concerns its own token, so their order does not show.
    for (&token, count) in &history.counts {
        let Some(i) = place(token) else { continue };
        let l = &mut row[i];
        if count.in_prompt || count.n_output > 0 {
            *l = if *l > 0.0 {
                *l / sampling.repetition_penalty
            } else {
                *l * sampling.repetition_penalty
            };
        }
        if count.n_output > 0 {
            *l -= sampling.presence_penalty + sampling.frequency_penalty * count.n_output as f32;
        }
    }
    for &(token, bias) in &sampling.logit_bias {
        if let Some(i) = place(token) {
            row[i] += bias;
        }
    }
    for &token in &sampling.suppress {
        if let Some(i) = place(token) {
            row[i] = f32::NEG_INFINITY;
        }
    }
}

/// A row of logits over the whole vocabulary, edited, with its block maxima.
struct Row<'a> {
    logits: &'a [f32],
    /// -inf where a block has no number.
    maxima: &'a [f32],
    top: f32,
}

impl<'a> Row<'a> {
    fn new(
        sampling: &Sampling,
        history: &History,
        logits: &'a [f32],
        edited: &'a mut Vec<f32>,
        maxima: &'a mut Vec<f32>,
    ) -> Self {
        assert!((1..=MAX_VOCAB).contains(&logits.len()), "a vocabulary");
        let mut logits = logits;
        if sampling.edits_logits() {
            edited.clear();
            edited.extend_from_slice(logits);
            let n = edited.len();
            edit(sampling, history, edited, |token| {
                Some(token as usize).filter(|&i| i < n)
            });
            logits = edited;
        }
        maxima.clear();
        maxima.extend(logits.chunks(BLOCK).map(maximum));
        let top = maximum(maxima);
        Row {
            logits,
            maxima,
            top,
        }
    }

    fn scale(&self, sampling: &Sampling) -> Option<f32> {
        scale_of(sampling, self.top)
    }

    fn argmax(&self) -> u32 {
        if self.top == f32::NEG_INFINITY {
            return 0;
        }
        let block = self.maxima.iter().position(|&m| m == self.top);
        let block = block.expect("the largest of them");
        let i = self.block(block).iter().position(|&l| l == self.top);
        (block * BLOCK + i.expect("the largest of its block")) as u32
    }

    fn block(&self, block: usize) -> &'a [f32] {
        let first = block * BLOCK;
        &self.logits[first..self.logits.len().min(first + BLOCK)]
    }

    /// Blocks with a `z` of at least `cut`. Scaling keeps the order, rounded or not.
    fn blocks_from(&self, cut: f32, scale: f32) -> impl Iterator<Item = (usize, &'a [f32])> {
        let maxima = self.maxima.iter().enumerate();
        maxima
            .filter(move |&(_, &m)| m * scale >= cut)
            .map(|(block, _)| (block, self.block(block)))
    }

    /// The token of the largest `z + g`. There is one: `top` is finite.
    fn best(&self, scale: f32, noise: &Noise) -> u32 {
        let mut id = self.argmax();
        let mut best = self.top * scale + noise.gumbel(id);
        for (block, (logits, &m)) in self.logits.chunks(BLOCK).zip(self.maxima).enumerate() {
            if m * scale + noise::MAX_GUMBEL < best {
                continue;
            }
            let draws = noise.block(block as u32);
            if m * scale + gumbel_ceiling(largest(&draws)) < best {
                continue;
            }
            for (i, &l) in logits.iter().enumerate() {
                let draw = draws[i % 4][i / 4];
                let z = l * scale;
                if z + gumbel_ceiling(draw) >= best {
                    let (score, token) = (z + gumbel_of(draw), (block * BLOCK + i) as u32);
                    if score > best || (score == best && token < id) {
                        (best, id) = (score, token);
                    }
                }
            }
        }
        id
    }

    /// The support, in no order. It is not empty: `top` is finite.
    fn support<'k>(
        &self,
        sampling: &Sampling,
        scale: f32,
        ranked: &mut Vec<f32>,
        keys: &'k mut Vec<Key>,
    ) -> &'k mut [Key] {
        let n = self.logits.len();
        let top = self.top * scale;
        let mut mass = None;
        if (1..n).contains(&sampling.top_k) {
            // As many blocks have a value that large.
            let cut = if sampling.top_k <= self.maxima.len() {
                ranked.clear();
                ranked.extend_from_slice(self.maxima);
                let (_, kth, _) =
                    ranked.select_nth_unstable_by(sampling.top_k - 1, |a, b| b.total_cmp(a));
                *kth * scale
            } else {
                f32::MIN
            };
            self.gather(cut, scale, keys);
        } else {
            let least = min_p_cut(sampling, top);
            if sampling.top_p < 1.0 {
                let total = self.mass(scale);
                mass = Some(total);
                let rest = (1.0 - f64::from(sampling.top_p)) * total as f64 / MASS_ONE;
                let cut = (top - ln((n as f64 / rest) as f32)).max(least);
                self.gather(cut, scale, keys);
                // The bound is on exact masses; rounded ones can exceed it when
                // top-p is within 1e-7 of 1.
                if cut > least && total_mass(keys, top) < prefix_mass(sampling, total) {
                    self.gather(least, scale, keys);
                }
            } else {
                self.gather(least, scale, keys);
            }
        }
        let keep = truncate(sampling, top, mass, keys);
        &mut keys[..keep]
    }

    /// Collects the tokens with `z >= cut`.
    fn gather(&self, cut: f32, scale: f32, keys: &mut Vec<Key>) {
        // Never -inf.
        let cut = cut.max(f32::MIN);
        keys.clear();
        let mut found = [Key(0); BLOCK];
        for (block, logits) in self.blocks_from(cut, scale) {
            let mut n_found = 0;
            for (token, &l) in (block * BLOCK..).zip(logits) {
                // No branch: in a block that is half in, it would be mispredicted.
                let z = l * scale;
                found[n_found] = Key::new((z, token as u32));
                n_found += usize::from(z >= cut);
            }
            keys.extend_from_slice(&found[..n_found]);
        }
    }

    /// The mass of all tokens.
    fn mass(&self, scale: f32) -> u64 {
        let top = self.top * scale;
        self.blocks_from(top - NO_MASS, scale)
            .map(|(_, logits)| logits.iter().map(|&l| mass(l * scale - top)).sum::<u64>())
            .sum()
    }
}

/// A token of the support. Ascending keys are descending `z`, then ascending ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key(u64);

impl Key {
    #[inline(always)]
    fn new((z, id): (f32, u32)) -> Self {
        // -0 becomes 0. The bits of floats ascend from 0 up and from -0 down.
        let bits = (z + 0.0).to_bits();
        let descending = if bits >> 31 == 0 {
            bits ^ 0x7fff_ffff
        } else {
            bits
        };
        Key(u64::from(descending) << 32 | u64::from(id))
    }

    #[inline(always)]
    fn z(self) -> f32 {
        let descending = (self.0 >> 32) as u32;
        f32::from_bits(if descending >> 31 == 0 {
            descending ^ 0x7fff_ffff
        } else {
            descending
        })
    }

    fn id(self) -> u32 {
        self.0 as u32
    }
}

/// Applies top-k, top-p and min-p to `keys`: how many of them stay, at the front.
/// `total` is the mass that top-p is a share of, if it is not that of the keys
/// that top-k leaves.
fn truncate(sampling: &Sampling, top: f32, total: Option<u64>, keys: &mut [Key]) -> usize {
    let mut keys = keys;
    if (1..keys.len()).contains(&sampling.top_k) {
        keys.select_nth_unstable(sampling.top_k - 1);
        keys = &mut keys[..sampling.top_k];
    }
    if sampling.top_p < 1.0 {
        let total = total.unwrap_or_else(|| total_mass(keys, top));
        let n = prefix(keys, top, prefix_mass(sampling, total));
        keys = &mut keys[..n];
    }
    let least = min_p_cut(sampling, top);
    let mut n = 0;
    for i in 0..keys.len() {
        if keys[i].z() >= least {
            keys.swap(n, i);
            n += 1;
        }
    }
    n
}

fn min_p_cut(sampling: &Sampling, top: f32) -> f32 {
    (top + ln_min_p(sampling)).max(f32::MIN)
}

fn ln_min_p(sampling: &Sampling) -> f32 {
    if sampling.min_p >= f32::MIN_POSITIVE {
        ln(sampling.min_p)
    } else {
        f32::NEG_INFINITY
    }
}

/// What the prefix of top-p must hold.
fn prefix_mass(sampling: &Sampling, total: u64) -> u64 {
    (f64::from(sampling.top_p) * total as f64).ceil() as u64
}

/// Partitions the shortest prefix of mass `wanted` to the front: its length, or
/// all if they hold less.
fn prefix(keys: &mut [Key], top: f32, wanted: u64) -> usize {
    // The prefix contains `..from`, whose mass is `before`, and ends by `to`.
    let (mut from, mut to, mut before) = (0, keys.len(), 0);
    while to - from > 1 {
        let half = (to - from) / 2;
        keys[from..to].select_nth_unstable(half);
        let mass = total_mass(&keys[from..from + half], top);
        if before + mass >= wanted {
            to = from + half;
        } else {
            before += mass;
            from += half;
        }
    }
    to
}

/// The token of the largest `z + g`.
fn best_of_keys(keys: &[Key], noise: &Noise) -> u32 {
    let first = keys.iter().min().expect("a support is not empty");
    let mut id = first.id();
    let mut best = first.z() + noise.gumbel(id);
    for key in keys {
        if key.z() + noise::MAX_GUMBEL < best {
            continue;
        }
        let draw = noise.draw(key.id());
        if key.z() + gumbel_ceiling(draw) >= best {
            let score = key.z() + gumbel_of(draw);
            if score > best || (score == best && key.id() < id) {
                (best, id) = (score, key.id());
            }
        }
    }
    id
}

/// The largest, -inf if there is none; not a number never is.
fn maximum(values: &[f32]) -> f32 {
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = values.chunks_exact(16);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = larger(*lane, x);
        }
    }
    lanes
        .iter()
        .chain(rest)
        .fold(f32::NEG_INFINITY, |a, &b| larger(a, b))
}

/// The largest draw of a block.
fn largest(draws: &noise::Draws) -> u32 {
    let mut lanes = draws[0];
    for draws in &draws[1..] {
        for (lane, &draw) in lanes.iter_mut().zip(draws) {
            *lane = (*lane).max(draw);
        }
    }
    lanes.into_iter().fold(0, u32::max)
}

fn total_mass(keys: &[Key], top: f32) -> u64 {
    keys.iter().map(|key| mass(key.z() - top)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use proptest::sample::select;

    /// The definition, word for word: the support in order, from token lists, with
    /// a full sort and running sums.
    fn naive(
        sampling: &Sampling,
        (prompt, output): (&[u32], &[u32]),
        ids: &[u32],
        logits: &[f32],
    ) -> Vec<(f32, u32)> {
        let edited = ids.iter().zip(logits).map(|(&id, &l)| {
            let n_output = output.iter().filter(|&&token| token == id).count();
            let mut l = l;
            if n_output > 0 || prompt.contains(&id) {
                let r = sampling.repetition_penalty;
                l = if l > 0.0 { l / r } else { l * r };
            }
            if n_output > 0 {
                l -= sampling.presence_penalty + sampling.frequency_penalty * n_output as f32;
            }
            for &(token, bias) in &sampling.logit_bias {
                l += if token == id { bias } else { 0.0 };
            }
            let is_dead = sampling.suppress.contains(&id) || l.is_nan();
            (if is_dead { f32::NEG_INFINITY } else { l }, id)
        });
        let mut row: Vec<(f32, u32)> = edited.collect();
        let order =
            |a: &(f32, u32), b: &(f32, u32)| b.0.partial_cmp(&a.0).unwrap().then(a.1.cmp(&b.1));
        row.sort_by(order);
        let scale = 1.0 / sampling.temperature;
        let top = row[0].0 * scale;
        if sampling.temperature == 0.0 || !top.is_finite() {
            return row[..1].to_vec();
        }
        row.iter_mut().for_each(|(z, _)| *z *= scale);
        row.sort_by(order);
        row.retain(|&(z, _)| z > f32::NEG_INFINITY);
        if sampling.top_k > 0 {
            row.truncate(sampling.top_k);
        }
        if sampling.top_p < 1.0 {
            let masses: Vec<u64> = row.iter().map(|&(z, _)| mass(z - top)).collect();
            let wanted = f64::from(sampling.top_p) * masses.iter().sum::<u64>() as f64;
            let mut sum = 0;
            let reaches = |&m: &u64| {
                sum += m;
                sum as f64 >= wanted
            };
            let last = masses.iter().position(reaches).unwrap();
            row.truncate(last + 1);
        }
        if sampling.min_p >= f32::MIN_POSITIVE {
            let least = top + ln(sampling.min_p);
            row.retain(|&(z, _)| z >= least);
        }
        row
    }

    /// `support` is absent for logits that give no token.
    fn naive_choice(sampling: &Sampling, position: u64, support: Option<&[(f32, u32)]>) -> u32 {
        let Some(support) = support else {
            return NO_TOKEN;
        };
        let scores = support
            .iter()
            .map(|&(z, id)| (z + noise::gumbel(sampling.seed, position, id), id));
        let best = scores.reduce(|a, b| {
            if b.0 > a.0 || (b.0 == a.0 && b.1 < a.1) {
                b
            } else {
                a
            }
        });
        best.unwrap().1
    }

    /// A row of `n` logits; each kind meets another part of the search.
    fn row(kind: usize, seed: u64, n: usize) -> Vec<f32> {
        let g = |lane: u64, i: usize| noise::gumbel(seed, lane, i as u32);
        let logit = |i| match kind {
            // Ties.
            0 => (g(0, i) * 2.0).round(),
            // A bell.
            1 => 3.0 * (g(0, i) - g(1, i)),
            // A few tokens have it all.
            2 => 8.0 * g(0, i) - 30.0,
            // All the same.
            3 => -0.0,
            // So large that scores and bounds round to quarters.
            4 => 2_097_152.0 + g(0, i),
            // What should not be.
            _ => match noise::Noise::new(seed, 2).draw(i as u32) % 16 {
                0 => f32::NAN,
                1 => f32::NEG_INFINITY,
                2 if seed.is_multiple_of(4) => f32::INFINITY,
                3 if seed % 4 == 1 => f32::MAX,
                4 if seed % 4 == 2 => -0.0,
                5 if seed % 4 == 2 => 0.0,
                _ if seed % 16 == 3 => f32::NEG_INFINITY,
                _ => g(0, i),
            },
        };
        (0..n).map(logit).collect()
    }

    fn samplings() -> impl Strategy<Value = Sampling> {
        let truncation = (
            select(vec![0.0, 1.2e-38, 1e-3, 0.3, 0.7, 1.0, 1.0, 2.5]),
            select(vec![0, 0, 0, 1, 2, 5, 40, 300, 5000]),
            select(vec![1.0, 1.0, 1e-9, 0.25, 0.5, 0.9, 0.999_999]),
            select(vec![0.0, 0.0, 1e-40, 0.01, 0.5, 1.0]),
        );
        let penalties = (
            select(vec![1.0, 1.0, 1.3, 0.5]),
            select(vec![0.0, 0.0, 1.5]),
            select(vec![0.0, 0.0, 0.25, -0.5]),
        );
        let tokens = || proptest::collection::vec(0u32..200, 0..4);
        let biases = proptest::collection::vec((0u32..200, select(vec![-5.0, 2.0, 100.0])), 0..3);
        (truncation, penalties, biases, tokens(), any::<u64>()).prop_map(
            |(truncation, penalties, logit_bias, suppress, seed)| {
                let (temperature, top_k, top_p, min_p) = truncation;
                let (repetition_penalty, presence_penalty, frequency_penalty) = penalties;
                Sampling {
                    temperature,
                    top_k,
                    top_p,
                    min_p,
                    repetition_penalty,
                    presence_penalty,
                    frequency_penalty,
                    logit_bias,
                    suppress,
                    seed,
                }
            },
        )
    }

    fn history(sampling: &Sampling, prompt: &[u32], output: &[u32]) -> History {
        let mut history = History::new(sampling, prompt);
        for &token in output {
            // A draft that was rejected.
            let rejected = [token + 1, 3, 3];
            rejected.iter().for_each(|&token| history.push(token));
            rejected.iter().for_each(|_| history.pop());
            history.push(token);
        }
        history
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn every_path_gives_what_a_full_sort_gives(
            sampling in samplings(),
            (kind, seed, n) in (0usize..6, any::<u64>(), prop_oneof![1usize..200, 1usize..6000]),
            prompt in proptest::collection::vec(0u32..200, 0..9),
            output in proptest::collection::vec(0u32..200, 0..9),
            position in any::<u64>(),
        ) {
            let mut sampling = sampling;
            sampling.suppress.retain(|&token| (token as usize) < n);
            sampling.logit_bias.retain(|&(token, _)| (token as usize) < n);
            sampling.validate(n).unwrap();
            let logits = row(kind, seed, n);
            let history = history(&sampling, &prompt, &output);
            let ids: Vec<u32> = (0..n as u32).collect();
            let support = naive(&sampling, (&prompt, &output), &ids, &logits);

            let fresh = &mut Scratch::default();
            let dirty = &mut Scratch::default();
            choose(&sampling, &history, 0, &row(1, seed, 3000), dirty);
            choose_among(&sampling, &history, 0, &[7, 3], &[0.5, 0.5], dirty);
            for scratch in [fresh, dirty] {
                let shares = distribution(&sampling, &history, &logits, scratch);
                let tokens: Vec<u32> = shares.iter().map(|&(token, _)| token).collect();
                let expected: Vec<u32> = support.iter().map(|&(_, token)| token).collect();
                prop_assert_eq!(tokens, expected);
                let total: f64 = shares.iter().map(|&(_, share)| f64::from(share)).sum();
                prop_assert!((total - 1.0).abs() < 1e-5);
                for position in (0..4).map(|i| position.wrapping_add(i)) {
                    let chosen = choose(&sampling, &history, position, &logits, scratch);
                    let support = gives_token(&logits).then_some(&support[..]);
                    prop_assert_eq!(chosen, naive_choice(&sampling, position, support));
                }
            }
        }

        #[test]
        fn among_some_tokens_is_as_if_the_others_were_suppressed(
            sampling in samplings(),
            (kind, seed, n) in (0usize..6, any::<u64>(), 201usize..700),
            share in 1u32..5,
            output in proptest::collection::vec(0u32..200, 0..9),
            position in any::<u64>(),
        ) {
            let all = row(kind, seed, n);
            let history = history(&sampling, &[5, 6], &output);
            let (mut ids, others): (Vec<u32>, Vec<u32>) = (0..n as u32)
                .partition(|&id| id == 0 || noise::Noise::new(seed, 9).draw(id) % 4 < share);
            // Heads list clusters, in no order.
            ids.sort_by_key(|&id| noise::Noise::new(seed, 10).draw(id));
            let logits: Vec<f32> = ids.iter().map(|&id| all[id as usize]).collect();
            let mut narrow = sampling.clone();
            narrow.suppress.extend(others);
            let scratch = &mut Scratch::default();
            let support = naive(&sampling, (&[5, 6], &output), &ids, &logits);
            // Another head's ids leave nothing behind.
            let other_ids: Vec<u32> = (0..n as u32).rev().collect();
            choose_among(&sampling, &history, position, &other_ids, &all, scratch);
            for _ in 0..2 {
                let chosen = choose_among(&sampling, &history, position, &ids, &logits, scratch);
                let support = gives_token(&logits).then_some(&support[..]);
                prop_assert_eq!(chosen, naive_choice(&sampling, position, support));
                prop_assert_eq!(chosen, choose(&narrow, &history, position, &all, scratch));
            }
        }
    }

    /// A chi-square bound that chance exceeds once in a thousand times (Wilson and
    /// Hilferty 1931).
    fn chi_square_bound(degrees: usize) -> f64 {
        let d = degrees as f64;
        let normal = 3.0902;
        d * (1.0 - 2.0 / (9.0 * d) + normal * (2.0 / (9.0 * d)).sqrt()).powi(3)
    }

    #[test]
    fn choices_are_distributed_as_stated() {
        let logits = row(1, 3, 150);
        let base = Sampling {
            temperature: 2.0,
            seed: 11,
            ..Sampling::default()
        };
        let settings = [
            base.clone(),
            Sampling {
                temperature: 9.0,
                seed: 12,
                ..base.clone()
            },
            Sampling {
                temperature: 3.0,
                top_p: 0.9,
                ..base.clone()
            },
            Sampling {
                temperature: 4.0,
                top_k: 20,
                ..base.clone()
            },
            Sampling {
                temperature: 5.0,
                min_p: 0.02,
                seed: u64::MAX,
                ..base.clone()
            },
            Sampling {
                temperature: 5.0,
                top_k: 100,
                top_p: 0.95,
                min_p: 0.001,
                repetition_penalty: 1.2,
                presence_penalty: 0.5,
                frequency_penalty: 0.2,
                logit_bias: vec![(7, 3.0)],
                suppress: vec![1],
                seed: 13,
            },
        ];
        let n = 200_000u64;
        let scratch = &mut Scratch::default();
        for sampling in settings {
            let history = history(&sampling, &[4, 5, 6], &[6, 9, 9]);
            let shares = distribution(&sampling, &history, &logits, scratch);
            let mut counts = vec![0u64; logits.len()];
            for position in 0..n {
                counts[choose(&sampling, &history, position, &logits, scratch) as usize] += 1;
            }
            // Cells of fewer than 10 expected choices are one cell.
            let (mut chi_square, mut degrees) = (0.0, 0);
            let mut few = (0.0, 0);
            let mut cell = |expected: f64, found: u64| {
                chi_square += (found as f64 - expected).powi(2) / expected;
                degrees += 1;
            };
            for (token, share) in shares {
                let expected = f64::from(share) * n as f64;
                let found = std::mem::take(&mut counts[token as usize]);
                if expected < 10.0 {
                    few = (few.0 + expected, few.1 + found);
                } else {
                    cell(expected, found);
                }
            }
            if few.0 >= 10.0 {
                cell(few.0, few.1);
            }
            assert_eq!(
                counts.iter().sum::<u64>(),
                0,
                "tokens outside of the support"
            );
            assert!(
                chi_square < chi_square_bound(degrees - 1),
                "{chi_square} with {degrees} cells: {sampling:?}"
            );
        }
    }

    #[test]
    fn close_rows_agree_more_often_with_the_same_noise() {
        let target = row(1, 5, 100);
        let drafter: Vec<f32> = target
            .iter()
            .zip(row(1, 6, 100))
            .map(|(l, e)| l + 0.1 * e)
            .collect();
        let keyed = Sampling {
            temperature: 1.0,
            seed: 1,
            ..Sampling::default()
        };
        let other = Sampling {
            seed: 2,
            ..keyed.clone()
        };
        let history = History::new(&keyed, &[]);
        let scratch = &mut Scratch::default();
        let n = 20_000;
        let mut agreement = |draft: &Sampling| {
            let agrees = |&position: &u64| {
                choose(&keyed, &history, position, &target, scratch)
                    == choose(draft, &history, position, &drafter, scratch)
            };
            (0..n).filter(agrees).count() as f64 / n as f64
        };
        let (with_key, without) = (agreement(&keyed), agreement(&other));
        let mut shares = |logits: &[f32]| {
            let mut shares = distribution(&keyed, &history, logits, scratch);
            shares.sort_by_key(|&(token, _)| token);
            shares
        };
        let pairs = shares(&target).into_iter().zip(shares(&drafter));
        let distance: f64 = pairs
            .map(|((_, p), (_, q))| f64::from((p - q).abs()))
            .sum::<f64>()
            / 2.0;
        // Daliri, Musco, Suresh 2024, arXiv:2408.07978: at least (1-d)/(1+d).
        let bound = (1.0 - distance) / (1.0 + distance);
        assert!(with_key > bound - 0.01, "{with_key} below {bound}");
        assert!(with_key > without + 0.3, "{with_key} against {without}");
    }

    #[test]
    fn the_largest_vocabularies_take_the_same_paths() {
        let ids: Vec<u32> = (0..262_144).collect();
        let scratch = &mut Scratch::default();
        for (kind, temperature, top_k, top_p) in [
            (1, 1.0, 0, 1.0),
            (1, 0.7, 0, 0.9),
            (2, 0.7, 0, 0.9),
            (0, 1.0, 40, 0.5),
            (3, 1.0, 0, 0.5),
        ] {
            let sampling = Sampling {
                temperature,
                top_k,
                top_p,
                ..Sampling::default()
            };
            let logits = row(kind, 1, ids.len());
            let history = History::new(&sampling, &[]);
            let support = naive(&sampling, (&[], &[]), &ids, &logits);
            let chosen = choose(&sampling, &history, 77, &logits, scratch);
            assert_eq!(chosen, naive_choice(&sampling, 77, Some(&support)));
        }
    }

    #[test]
    fn a_tail_of_rounded_masses_is_not_lost() {
        // Each of the tail is 0.6 units, which rounds to 1.
        let mut logits = vec![-28.237; 100_000];
        logits[500] = 0.0;
        let sampling = Sampling {
            temperature: 1.0,
            top_p: 0.999_999_94,
            ..Sampling::default()
        };
        let ids: Vec<u32> = (0..100_000).collect();
        let support = naive(&sampling, (&[], &[]), &ids, &logits);
        let history = History::new(&sampling, &[]);
        let shares = distribution(&sampling, &history, &logits, &mut Scratch::default());
        assert!(support.len() > 1);
        assert_eq!(shares.len(), support.len());
    }

    #[test]
    fn plain_greedy_needs_nothing_but_an_argmax() {
        let greedy = Sampling::default();
        assert!(greedy.is_plain_greedy());
        assert!(
            Sampling {
                top_k: 4,
                seed: 3,
                ..greedy.clone()
            }
            .is_plain_greedy()
        );
        for other in [
            Sampling {
                temperature: 0.1,
                ..greedy.clone()
            },
            Sampling {
                repetition_penalty: 1.1,
                ..greedy.clone()
            },
            Sampling {
                presence_penalty: 0.1,
                ..greedy.clone()
            },
            Sampling {
                frequency_penalty: 0.1,
                ..greedy.clone()
            },
            Sampling {
                logit_bias: vec![(0, 1.0)],
                ..greedy.clone()
            },
            Sampling {
                suppress: vec![0],
                ..greedy
            },
        ] {
            assert!(!other.is_plain_greedy());
        }
    }

    #[test]
    fn what_is_out_of_range_is_refused_by_name() {
        let good = Sampling::default();
        let refused = |bad: Sampling| bad.validate(100).unwrap_err().to_string();
        assert_eq!(
            refused(Sampling {
                temperature: f32::NAN,
                ..good.clone()
            }),
            "temperature must be 0 or at least 1.2e-38, got NaN"
        );
        assert_eq!(
            refused(Sampling {
                top_p: 0.0,
                ..good.clone()
            }),
            "top_p must be above 0 and at most 1, got 0"
        );
        assert_eq!(
            refused(Sampling {
                logit_bias: vec![(1, f32::INFINITY)],
                ..good.clone()
            }),
            "logit_bias must be finite, got inf"
        );
        assert_eq!(
            refused(Sampling {
                suppress: vec![99, 100],
                ..good.clone()
            }),
            "suppress has token 100, but the vocabulary ends at 100"
        );
        assert_eq!(
            refused(Sampling {
                suppress: vec![0; MAX_LISTED_TOKENS + 1],
                ..good.clone()
            }),
            "suppress has 16385 tokens, at most 16384 are allowed"
        );
        for bad in [
            Sampling {
                temperature: -1.0,
                ..good.clone()
            },
            Sampling {
                temperature: f32::INFINITY,
                ..good.clone()
            },
            Sampling {
                temperature: 1e-40,
                ..good.clone()
            },
            Sampling {
                top_p: 1.1,
                ..good.clone()
            },
            Sampling {
                min_p: -0.1,
                ..good.clone()
            },
            Sampling {
                min_p: f32::NAN,
                ..good.clone()
            },
            Sampling {
                repetition_penalty: 0.0,
                ..good.clone()
            },
            Sampling {
                presence_penalty: f32::NAN,
                ..good.clone()
            },
            Sampling {
                frequency_penalty: f32::INFINITY,
                ..good.clone()
            },
            Sampling {
                logit_bias: vec![(100, 0.0)],
                ..good.clone()
            },
        ] {
            assert!(bad.validate(100).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn keys_order_by_value_then_token() {
        let ascending = [
            (f32::INFINITY, 3),
            (2.0, 1),
            (1e-40, 9),
            (0.0, 4),
            (-0.0, 5),
            (-1e-40, 0),
            (-2.0, 0),
            (f32::MIN, 0),
        ];
        assert!(ascending.map(Key::new).is_sorted());
        assert_eq!(Key::new((-0.0, 1)), Key::new((0.0, 1)));
        for (z, id) in ascending {
            assert_eq!((Key::new((z, id)).z(), Key::new((z, id)).id()), (z, id));
        }
    }
}
