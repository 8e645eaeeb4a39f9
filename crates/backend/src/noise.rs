//! Keyed noise: one Gumbel variable for every (seed, position, token).
//!
//! ```text
//! x = Philox4x32-10(counter = (token / 4, position lo, position hi, stream), key = seed)
//! d = x[token mod 4] >> 9                                  a draw: 23 bits
//! u = (d + 1/2) 2^-23                                      never 0, never 1, exact
//! g = -ln(-ln u)
//! ```
//!
//! `argmax(z + g)` over tokens is distributed as `softmax(z)` (Gumbel 1954). The
//! noise is a function, not a state: target and drafter, one row and eight, draw
//! the same `g` for a token at a position in any order, and rollback has nothing
//! to restore.
//!
//! Philox: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as
//! 1, 2, 3". The logarithm is [`ln`], so the bits are the same on
//! every machine.

use crate::math::ln;

// Multipliers and key increments of Philox4x32 (Salmon et al. 2011, §4.2).
const M0: u32 = 0xd251_1f53;
const M1: u32 = 0xcd9e_8d57;
const W0: u32 = 0x9e37_79b9;
const W1: u32 = 0xbb67_ae85;
const ROUNDS: u32 = 10;

/// Fourth counter word of [`gumbel`]; each use of a seed has a word of its own.
const STREAM_GUMBEL: u32 = 0;
/// Fourth counter word of [`Noise::recovering`].
const STREAM_RECOVERING: u32 = 1;
/// Fourth counter word of [`coin`].
const STREAM_COIN: u32 = 2;
/// Fourth counter word of [`xtc_coin`].
const STREAM_XTC: u32 = 3;

/// Bits of a draw: a draw and a half is exact in an `f32`.
const DRAW_BITS: u32 = 23;

/// The largest value of [`gumbel`]: `u = 1 - 2^-24`, `g = 24 ln 2`.
pub const MAX_GUMBEL: f32 = 16.635_532;

/// The smallest value of [`gumbel`]: `u = 2^-24`, `g = -ln(24 ln 2)`.
pub const MIN_GUMBEL: f32 = -2.811_540_8;

/// Tokens of a [`Noise::block`].
pub const BLOCK: usize = 64;

/// Draws of [`BLOCK`] consecutive tokens: token `i` of the block has the draw
/// `draws[i % 4][i / 4]`.
pub type Draws = [[u32; BLOCK / 4]; 4];

/// Philox4x32-10: four random words, a function of `counter` and `key` alone.
#[inline]
pub fn philox(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    philox_wide(counter.map(u64::from), key).map(|x| x as u32)
}

/// Philox4x32-10 on words in the low halves of 64-bit lanes. The high halves carry
/// garbage that no product reads, which saves a vector unit all of its shuffles.
#[inline(always)]
fn philox_wide(counter: [u64; 4], key: [u32; 2]) -> [u64; 4] {
    const LOW: u64 = 0xffff_ffff;
    let mut c = counter;
    for round in 0..ROUNDS {
        let k0 = u64::from(key[0].wrapping_add(W0.wrapping_mul(round)));
        let k1 = u64::from(key[1].wrapping_add(W1.wrapping_mul(round)));
        let p0 = (c[0] & LOW) * u64::from(M0);
        let p1 = (c[2] & LOW) * u64::from(M1);
        c = [(p1 >> 32) ^ c[1] ^ k0, p1, (p0 >> 32) ^ c[3] ^ k1, p0];
    }
    c
}

/// The noise of one seed at one position, for any token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    key: [u32; 2],
    position: [u32; 2],
    stream: u32,
}

/// The two words of a counter or a key.
fn words(x: u64) -> [u32; 2] {
    [x as u32, (x >> 32) as u32]
}

impl Noise {
    /// The noise of `seed` at `position`.
    pub fn new(seed: u64, position: u64) -> Self {
        Noise {
            key: words(seed),
            position: words(position),
            stream: STREAM_GUMBEL,
        }
    }

    /// Noise that is independent of [`Noise::new`], for the token that takes the place of
    /// a rejected one.
    pub fn recovering(seed: u64, position: u64) -> Self {
        Noise {
            stream: STREAM_RECOVERING,
            ..Noise::new(seed, position)
        }
    }

    /// The draw of one token: `DRAW_BITS` random bits.
    #[inline]
    pub fn draw(&self, token: u32) -> u32 {
        let [lo, hi] = self.position;
        let x = philox([token / 4, lo, hi, self.stream], self.key);
        x[(token % 4) as usize] >> (32 - DRAW_BITS)
    }

    /// The Gumbel variable of one token.
    pub fn gumbel(&self, token: u32) -> f32 {
        gumbel_of(self.draw(token))
    }

    /// The draws of the [`BLOCK`] tokens from `block * BLOCK` on, four from a counter: the
    /// fast way to walk a whole vocabulary.
    #[inline]
    #[allow(
        clippy::needless_range_loop,
        reason = "one index for the counter and four lanes"
    )]
    pub fn block(&self, block: u32) -> Draws {
        let [lo, hi] = self.position.map(u64::from);
        let first = u64::from(block) * (BLOCK as u64 / 4);
        let mut draws = [[0; BLOCK / 4]; 4];
        for i in 0..BLOCK / 4 {
            let counter = [first + i as u64, lo, hi, u64::from(self.stream)];
            let x = philox_wide(counter, self.key).map(|x| x as u32 >> (32 - DRAW_BITS));
            (draws[0][i], draws[1][i], draws[2][i], draws[3][i]) = (x[0], x[1], x[2], x[3]);
        }
        draws
    }
}

/// The Gumbel variable of `token` at `position`.
pub fn gumbel(seed: u64, position: u64, token: u32) -> f32 {
    Noise::new(seed, position).gumbel(token)
}

/// A number between 0 and 1, neither of them, independent of the noise at `position`: whether
/// residual acceptance keeps a drafted token.
pub fn coin(seed: u64, position: u64) -> f32 {
    uniform_at(seed, position, STREAM_COIN)
}

/// A number between 0 and 1, neither of them, independent of the noise and of [`coin`] at
/// `position`: whether XTC acts there.
pub fn xtc_coin(seed: u64, position: u64) -> f32 {
    uniform_at(seed, position, STREAM_XTC)
}

fn uniform_at(seed: u64, position: u64, stream: u32) -> f32 {
    let [lo, hi] = words(position);
    let x = philox([0, lo, hi, stream], words(seed))[0];
    uniform(x >> (32 - DRAW_BITS))
}

/// `(draw + 1/2) 2^-23`: between 0 and 1, neither of them.
fn uniform(draw: u32) -> f32 {
    (draw as f32 + 0.5) * (1.0 / (1 << DRAW_BITS) as f32)
}

/// The Gumbel variable of a draw, `-ln(-ln((draw + 1/2) 2^-23))`.
#[inline]
pub fn gumbel_of(draw: u32) -> f32 {
    -ln(-ln(uniform(draw)))
}

/// A bound without a logarithm: at least [`gumbel_of`] of `draw` and of every smaller draw.
///
/// `-ln u >= 1 - u`, so `g <= -ln(1 - u) = ln 2 (23 - log2 t)` with
/// `t = 2^23 - 1/2 - draw`. The bits of `t`, read as an integer, are
/// `2^23 (127 + log2 t)` with a straight line between powers of two, which lies
/// below the logarithm by at most 0.086.
#[inline(always)]
pub fn gumbel_ceiling(draw: u32) -> f32 {
    // Covers the rounding of the bits to an f32 (2^-17) and of `ln` (1e-6).
    const SLACK: f32 = 1e-4;
    let t = ((1 << DRAW_BITS) as f32 - 0.5) - draw as f32;
    let log2 = t.to_bits() as f32 * (1.0 / (1 << 23) as f32);
    ((127 + DRAW_BITS) as f32 - log2) * std::f32::consts::LN_2 + SLACK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_vectors() {
        // Random123, kat_vectors, "philox4x32 10".
        let zeros = philox([0; 4], [0; 2]);
        assert_eq!(zeros, [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        let ones = philox([u32::MAX; 4], [u32::MAX; 2]);
        assert_eq!(ones, [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        let pi = philox(
            [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
            [0xa409_3822, 0x299f_31d0],
        );
        assert_eq!(pi, [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]);
    }

    #[test]
    fn the_counter_is_laid_out_as_stated() {
        let (seed, position) = (0x1122_3344_5566_7788, 0x99aa_bbcc_ddee_ff00);
        let counter = [77, 0xddee_ff00, 0x99aa_bbcc, 0];
        let x = philox(counter, [0x5566_7788, 0x1122_3344]);
        for lane in 0..4 {
            let draw = x[lane as usize] >> 9;
            assert_eq!(Noise::new(seed, position).draw(4 * 77 + lane), draw);
            assert_eq!(gumbel(seed, position, 4 * 77 + lane), gumbel_of(draw));
        }
    }

    #[test]
    fn a_block_holds_the_draws_of_its_tokens() {
        let noise = Noise::new(5, u64::MAX - 1);
        for block in [0, 1, 4095, u32::MAX / BLOCK as u32] {
            let draws = noise.block(block);
            for i in 0..BLOCK {
                let token = block * BLOCK as u32 + i as u32;
                assert_eq!(draws[i % 4][i / 4], noise.draw(token));
            }
        }
    }

    /// Every draw there is.
    #[test]
    fn bounds_hold_for_every_draw() {
        assert_eq!(gumbel_of(0), MIN_GUMBEL);
        assert_eq!(gumbel_of((1 << DRAW_BITS) - 1), MAX_GUMBEL);
        let mut before = f32::NEG_INFINITY;
        for draw in 0..1 << DRAW_BITS {
            let (g, ceiling) = (gumbel_of(draw), gumbel_ceiling(draw));
            assert!((MIN_GUMBEL..=MAX_GUMBEL).contains(&g), "{draw}: {g}");
            assert!(g <= ceiling, "{draw}: {g} over {ceiling}");
            assert!(before <= ceiling, "{draw}: not ascending");
            before = ceiling;
        }
    }

    #[test]
    fn gumbel_is_as_exact_as_an_f32() {
        for draw in (0..1 << DRAW_BITS).step_by(997) {
            let u = (f64::from(draw) + 0.5) / f64::from(1 << DRAW_BITS);
            let exact = -(-u.ln()).ln();
            let error = (f64::from(gumbel_of(draw)) - exact).abs();
            assert!(error < 2e-6, "{draw}: {error}");
        }
    }

    #[test]
    fn mean_and_variance_are_gumbels() {
        let n = 200_000;
        let values: Vec<f64> = (0..n)
            .map(|i| f64::from(gumbel(1, i / 64, (i % 64) as u32)))
            .collect();
        let n = n as f64;
        let mean = values.iter().sum::<f64>() / n;
        let variance = values.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / n;
        // Euler's constant and π²/6, kurtosis 5.4: four standard errors.
        let exact = std::f64::consts::PI.powi(2) / 6.0;
        assert!((mean - 0.577_215_664_9).abs() < 4.0 * (exact / n).sqrt());
        assert!((variance - exact).abs() < 4.0 * exact * (4.4 / n).sqrt());
    }

    #[test]
    fn coins_are_even_and_have_nothing_to_do_with_each_other() {
        let n = 100_000;
        let heads = |pair: fn(u64) -> bool| (0..n).filter(|&i| pair(i)).count() as f64 / n as f64;
        assert!((0..n).all(|i| (f32::MIN_POSITIVE..1.0).contains(&xtc_coin(7, i))));
        // Four standard errors.
        let near = |share: f64, exact: f64| (share - exact).abs() < 4.0 * (0.25 / n as f64).sqrt();
        assert!(near(heads(|i| xtc_coin(7, i) < 0.3), 0.3));
        assert!(near(
            heads(|i| (xtc_coin(7, i) < 0.5) == (coin(7, i) < 0.5)),
            0.5
        ));
        assert!(near(
            heads(|i| (xtc_coin(7, i) < 0.5) == (xtc_coin(8, i) < 0.5)),
            0.5
        ));
        // -ln ln 2, the median of Gumbel variables.
        assert!(near(
            heads(|i| (xtc_coin(7, i) < 0.5) == (gumbel(7, i, 0) > 0.366_513)),
            0.5
        ));
    }
}
