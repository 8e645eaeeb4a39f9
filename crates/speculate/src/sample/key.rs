//! Tokens of a support as keys that sort: top-k, typical-p, top-p, min-p and XTC over them, and
//! the choice among what is left.

use super::Sampling;
use crate::noise::{self, Noise, gumbel_ceiling, gumbel_of};
use backend::math::mass;
use backend::moments::Surprise;
use std::cmp::Ordering;

/// A token of the support. Ascending keys are descending `z`, then ascending ids.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key(u64);

impl Key {
    /// The key of token `id` with the scaled logit `z`, which is a number.
    #[inline(always)]
    pub(super) fn new((z, id): (f32, u32)) -> Self {
        // -0 becomes 0. The bits of floats ascend from 0 up and from -0 down.
        let bits = (z + 0.0).to_bits();
        let descending = if bits >> 31 == 0 {
            bits ^ 0x7fff_ffff
        } else {
            bits
        };
        Key(u64::from(descending) << 32 | u64::from(id))
    }

    /// The scaled logit, -0 being 0.
    #[inline(always)]
    pub(super) fn z(self) -> f32 {
        let descending = (self.0 >> 32) as u32;
        f32::from_bits(if descending >> 31 == 0 {
            descending ^ 0x7fff_ffff
        } else {
            descending
        })
    }

    /// The token.
    pub(super) fn id(self) -> u32 {
        self.0 as u32
    }
}

/// Applies top-k, typical-p, top-p, min-p and XTC to `keys`, which noise at `position` decides
/// between: how many of them stay, at the front. `top` is the largest `z`. `total` is the mass
/// that top-p is a share of, if it is not that of the keys that are left then.
pub(super) fn truncate(
    sampling: &Sampling,
    position: u64,
    top: f32,
    total: Option<u64>,
    keys: &mut [Key],
) -> usize {
    let (mut top, mut keys) = (top, keys);
    if (1..keys.len()).contains(&sampling.top_k) {
        keys.select_nth_unstable(sampling.top_k - 1);
        keys = &mut keys[..sampling.top_k];
    }
    if sampling.typical_p < 1.0 {
        let n = typical(sampling, top, keys);
        keys = &mut keys[..n];
        top = keys.iter().min().expect("a token stays").z();
    }
    if sampling.top_p < 1.0 {
        let total = total.unwrap_or_else(|| total_mass(keys, top));
        let n = prefix(keys, top, prefix_mass(sampling, total), Key::cmp);
        keys = &mut keys[..n];
    }
    let least = min_p_cut(sampling, top);
    let n = retain(keys, |key| key.z() >= least);
    if sampling.excludes_top(position) {
        return exclude_top(sampling, top, &mut keys[..n]);
    }
    n
}

/// Moves the keys that `stays` to the front: how many there are.
pub(super) fn retain(keys: &mut [Key], stays: impl Fn(&Key) -> bool) -> usize {
    let mut n = 0;
    for i in 0..keys.len() {
        if stays(&keys[i]) {
            keys.swap(n, i);
            n += 1;
        }
    }
    n
}

/// Applies typical-p: how many of `keys` stay, at the front. One does.
fn typical(sampling: &Sampling, top: f32, keys: &mut [Key]) -> usize {
    let n = retain(keys, |key| mass(key.z() - top) > 0);
    let keys = &mut keys[..n];
    let mut surprise = Surprise::default();
    surprise.extend(top, keys.iter().map(|key| key.z()));
    let mean = surprise.mean();
    let deviation = |key: &Key| ((top - key.z()) - mean).abs();
    let wanted = f64::from(sampling.typical_p) * surprise.mass() as f64;
    // The mass must exceed what is wanted, that of top-p need only reach it.
    prefix(keys, top, wanted.floor() as u64 + 1, |a, b| {
        deviation(a).total_cmp(&deviation(b)).then(a.cmp(b))
    })
}

/// Applies XTC: how many of `keys` stay, at the front. One does.
fn exclude_top(sampling: &Sampling, top: f32, keys: &mut [Key]) -> usize {
    let wanted = f64::from(sampling.xtc_threshold) * total_mass(keys, top) as f64;
    let is_top = |key: &&Key| mass(key.z() - top) as f64 >= wanted;
    match keys.iter().filter(is_top).max().copied() {
        Some(last) => retain(keys, |&key| key >= last),
        None => keys.len(),
    }
}

/// The least `z` that min-p keeps, `top` being the largest; never -inf.
pub(super) fn min_p_cut(sampling: &Sampling, top: f32) -> f32 {
    (top + sampling.ln_min_p()).max(f32::MIN)
}

/// The mass that the prefix of top-p must hold, of `total`.
pub(super) fn prefix_mass(sampling: &Sampling, total: u64) -> u64 {
    (f64::from(sampling.top_p) * total as f64).ceil() as u64
}

/// Partitions the shortest prefix of mass `wanted` by the order `compare` to the front: its
/// length, or all if they hold less.
fn prefix(
    keys: &mut [Key],
    top: f32,
    wanted: u64,
    compare: impl Fn(&Key, &Key) -> Ordering,
) -> usize {
    // The prefix contains `..from`, whose mass is `before`, and ends by `to`.
    let (mut from, mut to, mut before) = (0, keys.len(), 0);
    while to - from > 1 {
        let half = (to - from) / 2;
        keys[from..to].select_nth_unstable_by(half, &compare);
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

/// The mass of `keys`, `top` being the largest `z` of the support.
pub(super) fn total_mass(keys: &[Key], top: f32) -> u64 {
    keys.iter().map(|key| mass(key.z() - top)).sum()
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
