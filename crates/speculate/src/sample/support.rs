//! The support: the tokens that noise decides between, found without sorting the
//! vocabulary.
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

use super::edit::edit;
use super::sampling::ln_min_p;
use super::{History, MAX_VOCAB, Sampling, Scratch};
use crate::noise::{self, BLOCK, Noise, gumbel_ceiling, gumbel_of};
use backend::math::{MASS_ONE, NO_MASS, ln, mass};

/// What noise decides between.
pub(super) enum Support<'a> {
    /// Nothing: this token is chosen.
    One(u32),
    /// These, in no order.
    Keys(&'a mut [Key]),
}

/// The support of [`choose`].
pub(super) fn support<'a>(
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

/// The support of [`choose_among`].
pub(super) fn support_among<'a>(
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

/// Whether anything but noise decides about a row of `n` logits.
pub(super) fn truncates(sampling: &Sampling, n: usize) -> bool {
    (1..n).contains(&sampling.top_k) || sampling.top_p < 1.0 || sampling.min_p > 0.0
}

/// `1/T`, unless the largest logit decides alone.
fn scale_of(sampling: &Sampling, top: f32) -> Option<f32> {
    let scale = 1.0 / sampling.temperature;
    (sampling.temperature != 0.0 && (top * scale).is_finite()).then_some(scale)
}

/// A row of logits over the whole vocabulary, edited, with its block maxima.
pub(super) struct Row<'a> {
    logits: &'a [f32],
    /// -inf where a block has no number.
    maxima: &'a [f32],
    top: f32,
}

impl<'a> Row<'a> {
    pub(super) fn new(
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

    pub(super) fn scale(&self, sampling: &Sampling) -> Option<f32> {
        scale_of(sampling, self.top)
    }

    pub(super) fn argmax(&self) -> u32 {
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

    /// The support, in no order. It is not empty: `top` is finite.
    pub(super) fn support<'k>(
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
pub(super) struct Key(u64);

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
    pub(super) fn z(self) -> f32 {
        let descending = (self.0 >> 32) as u32;
        f32::from_bits(if descending >> 31 == 0 {
            descending ^ 0x7fff_ffff
        } else {
            descending
        })
    }

    pub(super) fn id(self) -> u32 {
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
pub(super) fn best_of_keys(keys: &[Key], noise: &Noise) -> u32 {
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
