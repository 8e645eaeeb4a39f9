//! A whole row of logits, searched without sorting the vocabulary.
//!
//! A first pass keeps the largest logit of each block of 64 tokens. What follows
//! skips every block that cannot matter:
//!
//! - Top-n-sigma leaves nothing below its cut, which one more pass finds.
//! - The k-th largest block maximum is at most the k-th largest value.
//! - Blocks 29 below the maximum have no mass. Let `M` be the mass of all `n` and
//!   `c = max z - ln(n / ((1-p) M))`: tokens below `c` hold less than `(1-p) M`, so
//!   the top-p prefix ends above `c`. It is found by partitioning, not by sorting.
//! - A token wins only with `z_i + g_i` at least the best score yet. That rules
//!   out most blocks before their noise is drawn, by `MAX_GUMBEL`, and nearly all of
//!   the rest before a logarithm is taken, by the ceiling of their largest draw.

use super::dry::Repeats;
use super::key::{Key, min_p_cut, prefix_mass, total_mass, truncate};
use super::mirostat::{Mirostat, bound};
use super::{History, MAX_VOCAB, Sampling};
use crate::noise::{self, BLOCK, Noise, gumbel_ceiling, gumbel_of};
use backend::math::{MASS_ONE, NO_MASS, ln, mass};
use backend::moments::{Deviation, Surprise};

/// A row of logits over the whole vocabulary, edited, with its block maxima.
pub(super) struct Row<'a> {
    logits: &'a [f32],
    /// The largest logit of each block; -inf where a block has no number.
    maxima: &'a [f32],
    /// The largest logit.
    top: f32,
    /// The bound of mirostat.
    bound: f32,
}

impl<'a> Row<'a> {
    /// Edits `logits` into `buffer`, if `sampling` edits any, and finds the block maxima.
    pub(super) fn new(
        sampling: &Sampling,
        history: &History,
        logits: &'a [f32],
        buffer: &'a mut Vec<f32>,
        repeats: &mut Repeats,
        maxima: &'a mut Vec<f32>,
    ) -> Self {
        assert!((1..=MAX_VOCAB).contains(&logits.len()), "a vocabulary");
        let n = logits.len();
        let logits = sampling.edited(history, logits, buffer, repeats, |token| {
            Some(token as usize).filter(|&i| i < n)
        });
        maxima.clear();
        maxima.extend(logits.chunks(BLOCK).map(maximum));
        let top = maximum(maxima);
        Row {
            logits,
            maxima,
            top,
            bound: history.bound(),
        }
    }

    /// `1/T`, unless the largest logit decides alone.
    pub(super) fn scale(&self, sampling: &Sampling) -> Option<f32> {
        sampling.scale(self.top, || {
            let is_number = |l: &&f32| **l > f32::NEG_INFINITY;
            let n = self.logits.iter().filter(is_number).count();
            let mut surprise = Surprise::default();
            for (_, logits) in self.blocks_from(self.top - NO_MASS, 1.0) {
                surprise.extend(self.top, logits.iter().copied());
            }
            (n, surprise)
        })
    }

    /// The token of the largest logit; 0 if every logit is -inf or NaN.
    pub(super) fn argmax(&self) -> u32 {
        if self.top == f32::NEG_INFINITY {
            return 0;
        }
        let block = self.maxima.iter().position(|&m| m == self.top);
        let block = block.expect("the largest of them");
        let i = self.block(block).iter().position(|&l| l == self.top);
        (block * BLOCK + i.expect("the largest of its block")) as u32
    }

    /// The logits of one block.
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
    pub(super) fn best(&self, scale: f32, noise: &Noise) -> u32 {
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

    /// The support at `position`, in no order. It is not empty: `top` is finite.
    pub(super) fn support<'k>(
        &self,
        sampling: &Sampling,
        position: u64,
        scale: f32,
        ranked: &mut Vec<f32>,
        keys: &'k mut Vec<Key>,
    ) -> &'k mut [Key] {
        let n = self.logits.len();
        let top = self.top * scale;
        if sampling.mirostat != Mirostat::Off {
            self.gather(top - NO_MASS, scale, keys);
            let keep = bound(sampling, self.bound, n, top, keys);
            return &mut keys[..keep];
        }
        let mut mass = None;
        let floor = sampling.sigma_cut(top, scale, || {
            Deviation::of(self.top, self.logits.iter().copied()).sigma()
        });
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
            self.gather(cut.max(floor), scale, keys);
        } else if sampling.typical_p < 1.0 {
            self.gather(floor.max(top - NO_MASS), scale, keys);
        } else if floor > f32::MIN {
            self.gather(floor, scale, keys);
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
        let keep = truncate(sampling, position, top, mass, keys);
        &mut keys[..keep]
    }

    /// Collects the tokens with `z >= cut`.
    fn gather(&self, cut: f32, scale: f32, keys: &mut Vec<Key>) {
        // Never -inf.
        let cut = cut.max(f32::MIN);
        keys.clear();
        let mut found = [Key::default(); BLOCK];
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
