//! The logical vector: 16 lanes of `f32`, and loops over slices of them.

use crate::tuning::PrefetchHint;
use backend::math::Float;
use half::{bf16, f16};

/// A function over any kind of lanes.
///
/// `run`, and every function with lanes that it calls, must be `#[inline(always)]`: what is not
/// inlined into [`Detected::run`](super::Detected::run)'s function is compiled without the
/// instruction set. No closure that uses lanes is given to functions like `array::map`, which may not be
/// inlined: each of its instructions would be a call. Microkernels are called by [`Lanes::call`].
pub(crate) trait Kernel {
    type Output;
    fn run<L: Lanes>(self) -> Self::Output;
}

/// How many sums of 16 lanes the vector registers hold beside their operands, which decides how
/// many rows and vectors a microkernel takes at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Registers {
    /// Up to 24: AVX-512 has 32 registers of 16 lanes.
    Wide,
    /// Up to 6: AVX2 has 16 registers of 8 lanes, NEON 32 of 4.
    Narrow,
    /// One: scalar code, of which no sum fits the registers, and which is to be small.
    One,
}

impl Registers {
    /// The most rows that a block takes.
    pub(crate) const fn most_rows(self) -> usize {
        match self {
            Registers::Wide => 8,
            Registers::Narrow => 4,
            Registers::One => 1,
        }
    }
}

/// A vector of 16 lanes of `f32`.
///
/// Only kernels may use it, inside [`Detected::run`](super::Detected::run) and its like, which
/// know that the CPU has the instructions. That is why no function here is `unsafe`.
pub(crate) trait Lanes: Float + Send + Sync + 'static {
    /// How many sums the vector registers hold.
    const REGISTERS: Registers;

    /// Runs `kernel` with these lanes as a function of its own. A kernel that has many microkernels calls them so: what is
    /// all inlined into one function takes the compiler minutes.
    fn call<K: Kernel>(kernel: K) -> K::Output;

    fn load(x: &[f32; 16]) -> Self;
    fn load_bf16(x: &[bf16; 16]) -> Self;
    fn load_f16(x: &[f16; 16]) -> Self;
    fn load_i8(x: &[i8; 16]) -> Self;
    fn store(self, to: &mut [f32; 16]);
    /// Rounds to nearest even; a NaN becomes quiet and keeps its upper bits.
    fn store_bf16(self, to: &mut [bf16; 16]);
    /// Rounds to nearest even; a NaN becomes quiet and keeps its upper bits.
    fn store_f16(self, to: &mut [f16; 16]);
    /// Stores integers in `-128..=127`.
    fn store_i8(self, to: &mut [i8; 16]);
    /// Loads bytes as the numbers 0 to 255.
    #[inline(always)]
    fn load_u8(x: &[u8; 16]) -> Self {
        let mut wide = [0.0; 16];
        for (to, &x) in wide.iter_mut().zip(x) {
            *to = f32::from(x);
        }
        Self::load(&wide)
    }
    /// `table[code]` for each code, all of which are below 16.
    #[inline(always)]
    fn lookup(table: &[f32; 16], codes: &[u8; 16]) -> Self {
        let mut found = [0.0; 16];
        for (to, &code) in found.iter_mut().zip(codes) {
            *to = table[usize::from(code & 15)];
        }
        Self::load(&found)
    }
    /// Flips the sign of each lane, zeros and NaN included.
    fn negate(self) -> Self;
    /// Prefetches the cache line at `p`, which may be any address, as the [`PrefetchHint`] whose
    /// number is `HINT` says.
    fn prefetch_to<const HINT: u8>(p: *const u8);

    /// Prefetches the cache line at `p`, which may be any address, to [`PrefetchHint::DEFAULT`].
    #[inline(always)]
    fn prefetch(p: *const u8) {
        Self::prefetch_to::<{ PrefetchHint::DEFAULT as u8 }>(p);
    }

    /// The sum of the lanes, in the order of [`backend::math::sum_tree`].
    #[inline(always)]
    fn sum(self) -> f32 {
        backend::math::sum_tree(self.to_array())
    }

    #[inline(always)]
    fn to_array(self) -> [f32; 16] {
        let mut lanes = [0.0; 16];
        self.store(&mut lanes);
        lanes
    }

    /// The largest lane; none may be NaN.
    #[inline(always)]
    fn max_lane(self) -> f32 {
        self.to_array()
            .into_iter()
            .fold(f32::NEG_INFINITY, |m, x| if x > m { x } else { m })
    }

    /// Loads up to 16 values into the first lanes, and zeros into the others.
    #[inline(always)]
    fn load_part(x: &[f32]) -> Self {
        let mut lanes = [0.0; 16];
        lanes[..x.len()].copy_from_slice(x);
        Self::load(&lanes)
    }

    /// Stores the first `to.len()` lanes, of which there are at most 16.
    #[inline(always)]
    fn store_part(self, to: &mut [f32]) {
        let lanes = self.to_array();
        to.copy_from_slice(&lanes[..to.len()]);
    }

    /// 0, 1, … 15.
    #[inline(always)]
    fn iota() -> Self {
        Self::load(&[
            0., 1., 2., 3., 4., 5., 6., 7., 8., 9., 10., 11., 12., 13., 14., 15.,
        ])
    }
}

/// Loads the first 16 values of `x`, with zeros for those that it lacks.
#[inline(always)]
pub(crate) fn load<L: Lanes>(x: &[f32]) -> L {
    match x.first_chunk::<16>() {
        Some(x) => L::load(x),
        None => L::load_part(x),
    }
}

/// Stores the lanes to the first 16 values of `to`, or as many as it has.
#[inline(always)]
pub(crate) fn store<L: Lanes>(lanes: L, to: &mut [f32]) {
    match to.first_chunk_mut::<16>() {
        Some(to) => lanes.store(to),
        None => lanes.store_part(to),
    }
}

// The closures `f` that these functions take are a few instructions long: longer ones might not
// be inlined, and what is not inlined is compiled without the caller's instruction set.

/// Calls `f` with all of `x`, 16 values at a time, zeros behind the last.
#[inline(always)]
pub(crate) fn for_each<L: Lanes>(x: &[f32], mut f: impl FnMut(L)) {
    let (whole, rest) = x.as_chunks::<16>();
    for x in whole {
        f(L::load(x));
    }
    if !rest.is_empty() {
        f(L::load_part(rest));
    }
}

/// `to = f(x)` for each value, 16 at a time.
#[inline(always)]
pub(crate) fn map<L: Lanes>(x: &[f32], to: &mut [f32], f: impl Fn(L) -> L) {
    debug_assert_eq!(x.len(), to.len(), "as many values");
    let ((x, x_rest), (to, rest)) = (x.as_chunks::<16>(), to.as_chunks_mut::<16>());
    for (x, to) in x.iter().zip(to) {
        f(L::load(x)).store(to);
    }
    if !rest.is_empty() {
        f(L::load_part(x_rest)).store_part(rest);
    }
}

/// `to = f(x, y)` for each value, 16 at a time.
#[inline(always)]
pub(crate) fn map_two<L: Lanes>(x: &[f32], y: &[f32], to: &mut [f32], f: impl Fn(L, L) -> L) {
    debug_assert_eq!((x.len(), y.len()), (to.len(), to.len()), "as many values");
    let ((x, x_rest), (y, y_rest)) = (x.as_chunks::<16>(), y.as_chunks::<16>());
    let (to, rest) = to.as_chunks_mut::<16>();
    for ((x, y), to) in x.iter().zip(y).zip(to) {
        f(L::load(x), L::load(y)).store(to);
    }
    if !rest.is_empty() {
        f(L::load_part(x_rest), L::load_part(y_rest)).store_part(rest);
    }
}

/// `x = f(x, y)` for each value, 16 at a time.
#[inline(always)]
pub(crate) fn update_one<L: Lanes>(x: &mut [f32], y: &[f32], f: impl Fn(L, L) -> L) {
    debug_assert_eq!(x.len(), y.len(), "as many values");
    let ((x, rest), (y, y_rest)) = (x.as_chunks_mut::<16>(), y.as_chunks::<16>());
    for (x, y) in x.iter_mut().zip(y) {
        f(L::load(x), L::load(y)).store(x);
    }
    if !rest.is_empty() {
        f(L::load_part(rest), L::load_part(y_rest)).store_part(rest);
    }
}

/// `x = f(x, y, z)` for each value, 16 at a time.
#[inline(always)]
pub(crate) fn update_two<L: Lanes>(x: &mut [f32], y: &[f32], z: &[f32], f: impl Fn(L, L, L) -> L) {
    debug_assert_eq!((y.len(), z.len()), (x.len(), x.len()), "as many values");
    let ((y, y_rest), (z, z_rest)) = (y.as_chunks::<16>(), z.as_chunks::<16>());
    let (x, rest) = x.as_chunks_mut::<16>();
    for ((x, y), z) in x.iter_mut().zip(y).zip(z) {
        f(L::load(x), L::load(y), L::load(z)).store(x);
    }
    if !rest.is_empty() {
        f(
            L::load_part(rest),
            L::load_part(y_rest),
            L::load_part(z_rest),
        )
        .store_part(rest);
    }
}

/// `x = f(x)` for each value, 16 at a time.
#[inline(always)]
pub(crate) fn update<L: Lanes>(x: &mut [f32], f: impl Fn(L) -> L) {
    let (x, rest) = x.as_chunks_mut::<16>();
    for x in x {
        f(L::load(x)).store(x);
    }
    if !rest.is_empty() {
        f(L::load_part(rest)).store_part(rest);
    }
}
