//! Rotations of cached rows: a Hadamard transform with fixed signs, group by group.
//!
//! ```text
//! R = D(s2) H/√n D(s1)        H the Hadamard butterfly of n columns, D fixed signs
//! q · k = R q · R k           so scores need queries rotated and keys as they were stored
//! Σ p v = R⁻¹ Σ p R v         so sums of rotated values are rotated back, once a head
//! ```
//!
//! Rotated, a few large columns of a row are spread over its whole group, so that no
//! column decides the scale of its neighbors. A row is cut into groups of `n` columns; in
//! [`Rotation::Groups128`] the last one may have 64.

/// Columns of a group of [`Rotation::Groups128`]; the last of a row may have half of them.
pub(super) const GROUP: usize = 128;

/// The shortest group.
pub(super) const HALF: usize = GROUP / 2;

/// Column `i` changes its sign before the butterfly where bit `i` is set, …
const BEFORE: [u32; 4] = [0xE46A_0359, 0x42F8_5949, 0xA4C6_3BBB, 0x49F2_50A9];
/// … and after it.
const AFTER: [u32; 4] = [0x16AC_EE90, 0x3F62_8FDC, 0xB7A5_357A, 0xBEA5_6562];

/// How rows are rotated before they are rounded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rotation {
    /// In groups of 64 columns: a large column is spread over few others.
    Groups64,
    /// In groups of 128 columns, and one of 64 at the end if need be.
    Groups128,
}

impl Rotation {
    /// Rotates every group of a row in place: `R x`.
    ///
    /// # Panics
    ///
    /// If the row is not whole groups.
    #[inline(always)]
    pub fn rotate(self, row: &mut [f32]) {
        self.turn(row, &BEFORE, &AFTER);
    }

    /// Undoes [`Self::rotate`] for every group of a row in place: `R⁻¹ y`.
    ///
    /// # Panics
    ///
    /// If the row is not whole groups.
    #[inline(always)]
    pub fn undo(self, row: &mut [f32]) {
        self.turn(row, &AFTER, &BEFORE);
    }

    #[inline(always)]
    fn turn(self, row: &mut [f32], before: &[u32; 4], after: &[u32; 4]) {
        let (large, small) = match self {
            Rotation::Groups128 => row.as_chunks_mut::<GROUP>(),
            Rotation::Groups64 => (&mut [][..], row),
        };
        for group in large {
            turn_group::<GROUP, 8>(group, before, after);
        }
        let (groups, rest) = small.as_chunks_mut::<HALF>();
        assert!(rest.is_empty(), "whole groups");
        for group in groups {
            turn_group::<HALF, 4>(group, before, after);
        }
    }
}

/// One group as `V` vectors of 16: steps of 1 to 8 columns within a vector, then larger ones
/// between vectors, so that compilers can keep lanes together.
#[inline(always)]
fn turn_group<const N: usize, const V: usize>(
    x: &mut [f32; N],
    before: &[u32; 4],
    after: &[u32; 4],
) {
    let scale = 1.0 / (N as f32).sqrt();
    let x: &mut [[f32; 16]; V] = match x.as_chunks_mut().0.try_into() {
        Ok(x) => x,
        Err(_) => unreachable!("{V} vectors"),
    };
    for (v, x) in x.iter_mut().enumerate() {
        sign(x, before[v / 2] >> (v % 2 * 16), 1.0);
        within::<1>(x);
        within::<2>(x);
        within::<4>(x);
        within::<8>(x);
    }
    let mut step = 1;
    while step < V {
        for v in 0..V {
            if v & step == 0 {
                let (a, b) = (x[v], x[v + step]);
                for i in 0..16 {
                    x[v][i] = a[i] + b[i];
                    x[v + step][i] = a[i] - b[i];
                }
            }
        }
        step *= 2;
    }
    for (v, x) in x.iter_mut().enumerate() {
        sign(x, after[v / 2] >> (v % 2 * 16), scale);
    }
}

/// Times `scale`, with another sign where a bit is set.
#[inline(always)]
fn sign(x: &mut [f32; 16], bits: u32, scale: f32) {
    for (i, x) in x.iter_mut().enumerate() {
        let flip = (bits >> i & 1) << 31;
        *x = f32::from_bits((*x * scale).to_bits() ^ flip);
    }
}

/// Sums and differences of columns `STEP` apart.
#[inline(always)]
fn within<const STEP: usize>(x: &mut [f32; 16]) {
    let old = *x;
    for (i, x) in x.iter_mut().enumerate() {
        let (own, other) = (old[i], old[i ^ STEP]);
        *x = if i & STEP == 0 {
            own + other
        } else {
            other - own
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of both signs that do not repeat.
    fn row(cols: usize, step: usize) -> Vec<f32> {
        let value = |c: usize| ((c * c * step + 11 * c) % 251) as f32 / 31.0 - 4.0;
        (0..cols).map(value).collect()
    }

    fn dot(a: &[f32], b: &[f32]) -> f64 {
        a.iter().zip(b).map(|(a, b)| f64::from(a * b)).sum()
    }

    #[test]
    fn rotations_keep_lengths_and_angles_and_can_be_undone() {
        for rotation in [Rotation::Groups64, Rotation::Groups128] {
            for cols in [64, 128, 192, 256, 512] {
                let (a, b) = (row(cols, 37), row(cols, 53));
                let (mut x, mut y) = (a.clone(), b.clone());
                rotation.rotate(&mut x);
                rotation.rotate(&mut y);
                let size = (dot(&a, &a) * dot(&b, &b)).sqrt();
                assert!((dot(&x, &y) - dot(&a, &b)).abs() < 1e-4 * size);
                rotation.undo(&mut x);
                assert!(x.iter().zip(&a).all(|(x, a)| (x - a).abs() < 1e-5));
            }
        }
    }

    #[test]
    fn one_large_column_is_spread_evenly_over_its_group() {
        for (rotation, group) in [(Rotation::Groups64, 64), (Rotation::Groups128, 128)] {
            let mut spike = vec![0.0; 256];
            spike[130] = 8.0;
            rotation.rotate(&mut spike);
            let even = 8.0 / (group as f32).sqrt();
            for (c, x) in spike.iter().enumerate() {
                let want = if (128..128 + group).contains(&c) {
                    even
                } else {
                    0.0
                };
                assert!((x.abs() - want).abs() < 1e-6, "column {c}");
            }
        }
    }
}
