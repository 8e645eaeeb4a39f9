//! Tokens of a support as keys that sort: top-k, top-p and min-p over them, and the choice
//! among what is left.

use super::Sampling;
use crate::noise::{self, Noise, gumbel_ceiling, gumbel_of};
use backend::math::mass;

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

/// Applies top-k, top-p and min-p to `keys`: how many of them stay, at the front.
/// `total` is the mass that top-p is a share of, if it is not that of the keys
/// that top-k leaves.
pub(super) fn truncate(
    sampling: &Sampling,
    top: f32,
    total: Option<u64>,
    keys: &mut [Key],
) -> usize {
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

/// The least `z` that min-p keeps, `top` being the largest; never -inf.
pub(super) fn min_p_cut(sampling: &Sampling, top: f32) -> f32 {
    (top + sampling.ln_min_p()).max(f32::MIN)
}

/// The mass that the prefix of top-p must hold, of `total`.
pub(super) fn prefix_mass(sampling: &Sampling, total: u64) -> u64 {
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
