//! The logical vector: 16 lanes of `f32`, on whatever the CPU has.
//!
//! A kernel is one generic function over [`Lanes`]. [`Isa::run`] enters it
//! through a function compiled for that instruction set, so everything below is
//! inlined into it; the choice is made once per op or per job, never per row.
//! Results have equal bits on all of them: lanes round alike, and sums over
//! lanes go through [`backend::math::sum_tree`]'s order.

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod amx;
mod scalar;
#[cfg(target_arch = "x86_64")]
mod x86_64;

use backend::math::Float;
use half::{bf16, f16};
#[cfg(target_arch = "x86_64")]
use x86_64::{ByteVariants, Variants};

use crate::memory::Plain;

/// An instruction set that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Whatever the compiler assumes.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// 64-bit Arm.
    Neon,
}

impl Isa {
    /// Every instruction set of this CPU, the best last.
    pub fn available() -> Vec<Isa> {
        #[allow(unused_mut, reason = "other architectures add nothing")]
        let mut all = vec![Isa::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            if is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
            {
                all.push(Isa::Avx2);
                if is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
                {
                    all.push(Isa::Avx512);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if std::arch::is_aarch64_feature_detected!("neon") {
            all.push(Isa::Neon);
        }
        all
    }

    /// The best instruction set of this CPU.
    pub fn detect() -> Isa {
        *Isa::available()
            .last()
            .expect("scalar code runs everywhere")
    }

    /// The name users see.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        }
    }
}

/// How bytes are multiplied: an [`Isa`] has several ways, by age of the CPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(dead_code, reason = "each architecture makes its own")]
enum Products {
    Scalar,
    /// AVX2's pairs of 16-bit sums.
    Avx2,
    /// `vpdpbusd` on 32 bytes.
    AvxVnni,
    /// `vpdpbusd` on 64 bytes.
    Avx512Vnni,
    /// `vpdpbusd` on 64 bytes for few rows, AMX tiles for more.
    Amx,
    /// Widening products.
    Neon,
    /// `sdot`.
    NeonDot,
    /// `sdot` for one row, `smmla` and `usmmla` for two at once.
    NeonMatrix,
}

/// An [`Isa`] that was found on this CPU: the right to enter its kernels.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Detected {
    isa: Isa,
    products: Products,
}

impl Detected {
    pub(crate) fn new(isa: Isa) -> Option<Self> {
        Self::variants(isa).pop()
    }

    /// `isa` with each way of multiplying bytes that this CPU has, the best last.
    pub(crate) fn variants(isa: Isa) -> Vec<Self> {
        if !Isa::available().contains(&isa) {
            return Vec::new();
        }
        #[allow(unused_mut, reason = "depends on the architecture")]
        let mut all = match isa {
            Isa::Scalar => vec![Products::Scalar],
            Isa::Avx2 | Isa::Avx512 => vec![Products::Avx2],
            Isa::Neon => vec![Products::Neon],
        };
        #[cfg(target_arch = "x86_64")]
        {
            if isa != Isa::Scalar && is_x86_feature_detected!("avxvnni") {
                all.push(Products::AvxVnni);
            }
            if isa == Isa::Avx512 && is_x86_feature_detected!("avx512vnni") {
                all.push(Products::Avx512Vnni);
                if amx::granted() {
                    all.push(Products::Amx);
                }
            }
        }
        #[cfg(target_arch = "aarch64")]
        if isa == Isa::Neon && std::arch::is_aarch64_feature_detected!("dotprod") {
            all.push(Products::NeonDot);
            if std::arch::is_aarch64_feature_detected!("i8mm") {
                all.push(Products::NeonMatrix);
            }
        }
        all.into_iter()
            .map(|products| Detected { isa, products })
            .collect()
    }

    pub(crate) fn isa(self) -> Isa {
        self.isa
    }

    /// How the kernels take `rows` rows of activations in vectors.
    pub(crate) fn vectors(self, rows: usize) -> Blocks {
        let most = match (self.isa, self.products) {
            (Isa::Scalar, _) => 1,
            (_, Products::Avx512Vnni | Products::Amx) => 8,
            _ => 4,
        };
        Blocks {
            rows: even(rows, most),
            tiles: false,
        }
    }

    /// Runs `kernel` compiled for this instruction set.
    #[inline]
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.isa {
            Isa::Scalar => kernel.run::<scalar::Scalar>(),
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { kernel.avx2() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { kernel.avx512() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { aarch64::neon(kernel) },
            #[allow(unreachable_patterns, reason = "depends on the architecture")]
            _ => unreachable!("`variants` found it on this CPU"),
        }
    }

    /// Whether there are tiles.
    pub(crate) fn has_tiles(self) -> bool {
        self.products == Products::Amx
    }

    /// Runs `kernel` on tiles; only where [`Detected::has_tiles`].
    #[inline]
    #[allow(unused_variables, reason = "other architectures have no tiles")]
    pub(crate) fn run_tiles<K: TileKernel>(self, kernel: K) -> K::Output {
        match self.products {
            // SAFETY: `variants` found the features on this CPU and the registers granted.
            #[cfg(target_arch = "x86_64")]
            Products::Amx => unsafe { x86_64::avx512_tiles::<amx::Amx, K>(kernel) },
            _ => unreachable!("there are no tiles"),
        }
    }

    /// Runs `kernel` compiled for this way of multiplying bytes.
    #[inline]
    pub(crate) fn run_bytes<K: ByteKernel>(self, kernel: K) -> K::Output {
        match self.products {
            Products::Scalar => kernel.run::<scalar::Bytes>(),
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            Products::Avx2 => unsafe { kernel.avx2_bytes() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            Products::AvxVnni => unsafe { kernel.avx_vnni_bytes() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "x86_64")]
            Products::Avx512Vnni | Products::Amx => unsafe { kernel.avx512_vnni_bytes() },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "aarch64")]
            Products::Neon => unsafe { aarch64::neon_bytes(kernel) },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "aarch64")]
            Products::NeonDot => unsafe { aarch64::neon_dot_bytes(kernel) },
            // SAFETY: `variants` found the features on this CPU.
            #[cfg(target_arch = "aarch64")]
            Products::NeonMatrix => unsafe { aarch64::neon_matrix_bytes(kernel) },
            #[allow(unreachable_patterns, reason = "depends on the architecture")]
            _ => unreachable!("`variants` found it on this CPU"),
        }
    }
}

/// Rows of a tile.
pub(crate) const TILE: usize = 16;

/// Columns of a tile.
pub(crate) const DEPTH: usize = 64;

/// Rows of rounded activations in blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Rows of a block, in tiles at most [`TILE`]; the last may have fewer.
    pub(crate) rows: usize,
    /// In tiles, each row's columns of a group together, in a line of [`DEPTH`] where
    /// smaller groups have places of their own; else all rows' eights.
    pub(crate) tiles: bool,
}

impl Blocks {
    /// Each row on its own, for vectors.
    pub(crate) const SINGLE: Blocks = Blocks {
        rows: 1,
        tiles: false,
    };

    /// Bytes that a row's columns of a group of `group` take.
    pub(crate) fn line(self, group: usize) -> usize {
        if self.tiles { group.max(DEPTH) } else { group }
    }
}

/// `n` things in as few and as even parts of at most `most` as can be: the size
/// of a part.
pub(crate) fn even(n: usize, most: usize) -> usize {
    n.div_ceil(n.div_ceil(most).max(1)).max(1)
}

/// A function over tiles; as [`Kernel`].
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "no other architecture has tiles")
)]
pub(crate) trait TileKernel {
    type Output;
    fn run<T: Tiles>(self) -> Self::Output;
}

/// Registers of 16 x 16 sums.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "no other architecture has tiles")
)]
pub(crate) trait Tiles: Sized {
    /// Vectors beside the tiles.
    type Bytes: Bytes;

    /// Makes tiles for `rows` rows of activations and products over `depth`
    /// columns, at most 16 and 64.
    ///
    /// # Safety
    ///
    /// Only inside [`Detected::run_tiles`], and one at a time.
    unsafe fn configure(rows: usize, depth: usize) -> Self;

    /// Multiplies registers with each other: `4 * steps` whole tiles.
    fn saturate(&self, steps: usize);

    /// Writes `sums[m][lane] = Σ x[m][j] codes[j / 4][lane][j % 4]`, codes being
    /// signed if `SIGNED`, over the columns `j` of one tile or, if `twice`, of two that follow each other.
    ///
    /// # Safety
    ///
    /// The rows of `x` lie `x_stride` bytes apart; all of them and all codes are
    /// readable, all sums writable.
    unsafe fn multiply<const SIGNED: bool>(
        &self,
        x: *const i8,
        x_stride: usize,
        codes: *const u8,
        twice: bool,
        sums: *mut [i32; 16],
    );

    /// Loads rows of activations, `x_stride` bytes apart.
    ///
    /// # Safety
    ///
    /// All of them are readable.
    unsafe fn load(&self, x: *const i8, x_stride: usize);

    /// Multiplies the rows loaded from `x` as [`multiply`](Tiles::multiply) does, over the
    /// columns of two tiles if `TWICE`, which loads those of the second. In turns 0, 1, 2,
    /// 0, …; what leaves to `sums` is that of the turn before last, because its own would
    /// be waited for as long as three products take.
    ///
    /// # Safety
    ///
    /// As there.
    unsafe fn multiply_in_turn<const SIGNED: bool, const TWICE: bool>(
        &self,
        turn: usize,
        x: *const i8,
        x_stride: usize,
        codes: *const u8,
        sums: *mut [i32; 16],
    );

    /// The lower and the upper four bits of each code, less 8 if `SIGNED`.
    fn halves<const SIGNED: bool>(
        codes: <Self::Bytes as Bytes>::Codes,
    ) -> [<Self::Bytes as Bytes>::Codes; 2];
}

/// A function over any way of multiplying bytes; as [`Kernel`].
pub(crate) trait ByteKernel {
    type Output;
    fn run<B: Bytes>(self) -> Self::Output;
}

/// 16 sums of products of four bytes each, exact in 32 bits.
pub(crate) trait Bytes: 'static {
    /// What the sums become.
    type Lanes: Lanes;
    /// 64 unsigned codes: four of each lane.
    type Codes: Copy;
    /// 16 signed 32-bit sums.
    type Sums: Copy;

    fn load(codes: &[u8; 64]) -> Self::Codes;
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "no other architecture has tiles")
    )]
    fn store(codes: Self::Codes, to: &mut [u8; 64]);
    /// What signed codes are seen higher by than they are.
    const OFFSET: i32;
    /// Levels for [`Bytes::lookup`].
    #[inline(always)]
    fn table(levels: &[i8; 16]) -> Self::Codes {
        let mut table = [0; 64];
        for (i, to) in table.iter_mut().enumerate() {
            *to = levels[i % 16].wrapping_add(Self::OFFSET as i8) as u8;
        }
        Self::load(&table)
    }
    /// The table's entries at codes below 16.
    fn lookup(table: Self::Codes, codes: Self::Codes) -> Self::Codes;
    /// Signed codes as they are seen.
    fn signed(codes: Self::Codes) -> Self::Codes;
    /// Adds as [`Bytes::add`] does, of codes from a table or signed ones.
    fn add_signed(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums;
    /// Whether two rows are worth multiplying at once, with [`Bytes::add_pair`].
    const PAIRED: bool = false;
    /// Sums of two rows in the order in which [`Bytes::add_pair`] keeps them.
    #[inline(always)]
    fn pair(sums: [Self::Sums; 2]) -> [Self::Sums; 2] {
        sums
    }
    /// The sums of each row again.
    #[inline(always)]
    fn unpair(sums: [Self::Sums; 2]) -> [Self::Sums; 2] {
        sums
    }
    /// Adds, as [`Bytes::add`] or [`Bytes::add_signed`] do, the products of two vectors
    /// of codes with eight columns of a row, and with those of the next row.
    ///
    /// # Safety
    ///
    /// 16 values of `x` are readable.
    #[inline(always)]
    unsafe fn add_pair<const SIGNED: bool>(
        sums: [Self::Sums; 2],
        first: Self::Codes,
        second: Self::Codes,
        x: *const [i8; 4],
    ) -> [Self::Sums; 2] {
        let mut sums = sums;
        for (row, sum) in sums.iter_mut().enumerate() {
            for (i, codes) in [first, second].into_iter().enumerate() {
                // SAFETY: as promised.
                let x = unsafe { *x.add(2 * row + i) };
                *sum = match SIGNED {
                    true => Self::add_signed(*sum, codes, x),
                    false => Self::add(*sum, codes, x),
                };
            }
        }
        sums
    }
    /// The same number in all sums.
    fn start(at: i32) -> Self::Sums;
    /// Sums from memory.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "no other architecture has tiles")
    )]
    fn load_sums(sums: &[i32; 16]) -> Self::Sums;
    /// The lower four bits of each code.
    fn low(codes: Self::Codes) -> Self::Codes;
    /// The upper four bits of each code.
    fn high(codes: Self::Codes) -> Self::Codes;
    fn zero() -> Self::Sums;
    /// Adds `Σ codes[j] x[j]` of each lane's four codes, each below 16.
    fn add_small(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums;
    /// Adds `Σ codes[j] x[j]` of each lane's four codes.
    fn add(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums;
    /// The sums, which are below 2²⁴, as numbers.
    fn float(sums: Self::Sums) -> Self::Lanes;
}

/// Four bytes as one word. Like all that a kernel does for each vector, without a closure:
/// where the linker does not optimise, it may stay a call.
#[inline(always)]
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, reason = "scalar code takes them one by one")
)]
fn word([a, b, c, d]: [i8; 4]) -> i32 {
    i32::from_ne_bytes([a as u8, b as u8, c as u8, d as u8])
}

/// A function over any kind of lanes. `run` and all it calls with `L` must be
/// `#[inline(always)]`, or they are compiled without the instruction set.
pub(crate) trait Kernel {
    type Output;
    fn run<L: Lanes>(self) -> Self::Output;
}

/// 16 lanes.
///
/// Values may be made only inside [`Detected::run`], which is why these
/// functions are safe to call.
pub(crate) trait Lanes: Float + Send + Sync + 'static {
    /// Sums that fit the registers next to their operands; 1 where nothing fits,
    /// and small code is what counts.
    const SUMS: usize;

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
    /// Bytes as numbers.
    #[inline(always)]
    fn load_u8(x: &[u8; 16]) -> Self {
        let mut wide = [0.0; 16];
        for (to, &x) in wide.iter_mut().zip(x) {
            *to = f32::from(x);
        }
        Self::load(&wide)
    }
    /// The table's numbers at codes below 16.
    #[inline(always)]
    fn lookup(table: &[f32; 16], codes: &[u8; 16]) -> Self {
        let mut found = [0.0; 16];
        for (to, &code) in found.iter_mut().zip(codes) {
            *to = table[usize::from(code & 15)];
        }
        Self::load(&found)
    }
    /// Flips the sign, of zeros too.
    fn negate(self) -> Self;
    /// Asks for the cache line at `p`.
    fn prefetch(p: *const u8);

    /// [`backend::math::sum_tree`] of the lanes.
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

    /// The first lanes from `x`, zeros behind them.
    #[inline(always)]
    fn load_part(x: &[f32]) -> Self {
        let mut lanes = [0.0; 16];
        lanes[..x.len()].copy_from_slice(x);
        Self::load(&lanes)
    }

    /// Stores the first lanes, as many as fit.
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

/// Up to 16 values, zeros behind them.
#[inline(always)]
pub(crate) fn load<L: Lanes>(x: &[f32]) -> L {
    match x.first_chunk::<16>() {
        Some(x) => L::load(x),
        None => L::load_part(x),
    }
}

/// Stores as many lanes as fit.
#[inline(always)]
pub(crate) fn store<L: Lanes>(lanes: L, to: &mut [f32]) {
    match to.first_chunk_mut::<16>() {
        Some(to) => lanes.store(to),
        None => lanes.store_part(to),
    }
}

// `f` of the following is a few instructions: a closure with more may not be inlined,
// and what is not inlined has none of its caller's instruction set.

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

/// `to = f(x)`
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

/// `to = f(x, y)`
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

/// `x = f(x)`
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

/// A number that loads as `f32` lanes.
pub(crate) trait Element: Plain + Default {
    fn load<L: Lanes>(x: &[Self; 16]) -> L;
    fn store<L: Lanes>(x: L, to: &mut [Self; 16]);
    fn widen(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn load<L: Lanes>(x: &[f32; 16]) -> L {
        L::load(x)
    }
    #[inline(always)]
    fn store<L: Lanes>(x: L, to: &mut [f32; 16]) {
        x.store(to);
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self
    }
}

impl Element for bf16 {
    #[inline(always)]
    fn load<L: Lanes>(x: &[bf16; 16]) -> L {
        L::load_bf16(x)
    }
    #[inline(always)]
    fn store<L: Lanes>(x: L, to: &mut [bf16; 16]) {
        x.store_bf16(to);
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<L: Lanes>(x: &[f16; 16]) -> L {
        L::load_f16(x)
    }
    #[inline(always)]
    fn store<L: Lanes>(x: L, to: &mut [f16; 16]) {
        x.store_f16(to);
    }
    #[inline(always)]
    fn widen(self) -> f32 {
        self.to_f32()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use backend::math;

    /// Values of every kind: signs, zeros, subnormals, infinities, NaN.
    fn samples() -> Vec<[f32; 16]> {
        let mut seed = 7u64;
        let mut out: Vec<[f32; 16]> = (0..4000)
            .map(|i| {
                std::array::from_fn(|_| {
                    seed = seed
                        .wrapping_mul(6_364_136_223_846_793_005)
                        .wrapping_add(1_442_695_040_888_963_407);
                    let bits = (seed >> 32) as u32;
                    if i % 2 == 0 {
                        f32::from_bits(bits)
                    } else {
                        (bits as i32 as f32) / 2f32.powi(20 + i % 17)
                    }
                })
            })
            .collect();
        out.push([
            0.0,
            -0.0,
            1.0,
            -1.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            1e-45,
            -1e-45,
            65504.0,
            65520.0,
            0.5,
            1.5,
            2.5,
            88.0,
            -87.0,
        ]);
        let mut rotated = *out.last().unwrap();
        rotated.rotate_left(1);
        out.push(rotated);
        out
    }

    /// Every function of the trait on one pair of samples.
    struct All<'a>(&'a [f32; 16], &'a [f32; 16]);
    impl Kernel for All<'_> {
        type Output = Vec<(&'static str, [f32; 16])>;
        #[inline(always)]
        fn run<L: Lanes>(self) -> Self::Output {
            let (a, b) = (L::load(self.0), L::load(self.1));
            let mut half = [f16::ZERO; 16];
            a.store_f16(&mut half);
            let mut brain = [bf16::ZERO; 16];
            a.store_bf16(&mut brain);
            let finite = a.maximum(L::splat(-100.0)).minimum(L::splat(100.0));
            let mut bytes = [0; 16];
            finite.round_even().store_i8(&mut bytes);
            let mut part = [7.0; 16];
            L::load_part(&self.0[..5]).store_part(&mut part[..9]);
            vec![
                ("add", (a + b).to_array()),
                ("sub", (a - b).to_array()),
                ("mul", (a * b).to_array()),
                ("div", (a / b).to_array()),
                ("mul_add", a.mul_add(b, a).to_array()),
                ("maximum", a.maximum(b).to_array()),
                ("minimum", a.minimum(b).to_array()),
                ("round_even", a.round_even().to_array()),
                ("root", a.root().to_array()),
                (
                    "exp2_integer",
                    finite.round_even().exp2_integer().to_array(),
                ),
                ("if_below", a.if_below(b, a, b).to_array()),
                ("negate", a.negate().to_array()),
                ("f16", L::load_f16(&half).to_array()),
                ("bf16", L::load_bf16(&brain).to_array()),
                ("i8", bytes.map(f32::from)),
                ("u8", L::load_u8(&bytes.map(|b: i8| b as u8)).to_array()),
                ("load_i8", L::load_i8(&bytes).to_array()),
                ("sum", [finite.sum(); 16]),
                ("max_lane", [finite.max_lane(); 16]),
                ("part", part),
                ("exp", math::exp(a).to_array()),
                ("sin", math::sin_cos(finite).0.to_array()),
                ("gelu_tanh", math::gelu_tanh(a).to_array()),
            ]
        }
    }

    /// The same on the definition: `f32` and the `half` crate.
    fn expected(a: &[f32; 16], b: &[f32; 16]) -> Vec<[f32; 16]> {
        let each = |f: &dyn Fn(f32, f32) -> f32| std::array::from_fn(|i| f(a[i], b[i]));
        let finite = |a: f32| Float::minimum(Float::maximum(a, -100.0), 100.0);
        let lanes = a.map(finite);
        vec![
            each(&|a, b| a + b),
            each(&|a, b| a - b),
            each(&|a, b| a * b),
            each(&|a, b| a / b),
            each(&|a, b| a.mul_add(b, a)),
            each(&|a, b| Float::maximum(a, b)),
            each(&|a, b| Float::minimum(a, b)),
            each(&|a, _| a.round_even()),
            each(&|a, _| a.root()),
            each(&|a, _| finite(a).round_even().exp2_integer()),
            each(&|a, b| a.if_below(b, a, b)),
            each(&|a, _| -a),
            each(&|a, _| f16::from_f32(a).to_f32()),
            each(&|a, _| bf16::from_f32(a).to_f32()),
            each(&|a, _| f32::from(finite(a).round_even() as i8)),
            each(&|a, _| f32::from(finite(a).round_even() as i8 as u8)),
            each(&|a, _| f32::from(finite(a).round_even() as i8)),
            [math::sum_tree(lanes); 16],
            [lanes.into_iter().fold(f32::NEG_INFINITY, f32::max); 16],
            std::array::from_fn(|i| {
                if i < 5 {
                    a[i]
                } else if i < 9 {
                    0.0
                } else {
                    7.0
                }
            }),
            each(&|a, _| math::exp(a)),
            each(&|a, _| math::sin_cos(finite(a)).0),
            each(&|a, _| math::gelu_tanh(a)),
        ]
    }

    #[test]
    fn every_instruction_set_computes_the_same_bits() {
        let samples = samples();
        for isa in Isa::available() {
            let isa = Detected::new(isa).unwrap();
            for (a, b) in samples.iter().zip(samples.iter().cycle().skip(1)) {
                for ((name, got), want) in isa.run(All(a, b)).into_iter().zip(expected(a, b)) {
                    for i in 0..16 {
                        let same = got[i].to_bits() == want[i].to_bits()
                            || got[i].is_nan() && want[i].is_nan();
                        assert!(
                            same,
                            "{isa:?} {name}({:?}, {:?}) = {:?}, not {:?}",
                            a[i], b[i], got[i], want[i]
                        );
                    }
                }
            }
        }
    }

    /// Levels of a table, the extremes among them.
    const LEVELS: [i8; 16] = [
        -128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127,
    ];

    /// Sums of a few vectors of codes.
    struct Sums<'a>(&'a [[u8; 64]], &'a [[i8; 4]]);
    impl ByteKernel for Sums<'_> {
        type Output = [[f32; 16]; 5];
        #[inline(always)]
        fn run<B: Bytes>(self) -> Self::Output {
            let (mut all, mut low, mut high) = (B::zero(), B::zero(), B::zero());
            let total: i32 = self.1.as_flattened().iter().map(|&x| i32::from(x)).sum();
            // What each lane's sums of signed codes start from.
            let start = B::start(-B::OFFSET * total);
            let (mut signed, mut levels) = (start, start);
            let table = B::table(&LEVELS);
            for (codes, &x) in self.0.iter().zip(self.1) {
                let codes = B::load(codes);
                signed = B::add_signed(signed, B::signed(codes), x);
                levels = B::add_signed(levels, B::lookup(table, B::low(codes)), x);
                all = B::add(all, codes, x);
                low = B::add_small(low, B::low(codes), x);
                high = B::add_small(high, B::high(codes), x);
            }
            [all, low, high, signed, levels].map(|s| B::float(s).to_array())
        }
    }

    #[test]
    fn byte_sums_are_exact() {
        // The extremes first: 16-bit intermediate sums would saturate.
        let mut codes = vec![[255u8; 64]; 8];
        let mut x = [[-127i8; 4], [127; 4], [-128; 4], [127, -127, 127, 127]].repeat(2);
        let mut seed = 3u32;
        for _ in 0..40 {
            let mut next = || {
                seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (seed >> 24) as u8
            };
            codes.push(std::array::from_fn(|_| next()));
            x.push(std::array::from_fn(|_| next() as i8));
        }
        let seen: [fn(u8) -> i32; 5] = [
            i32::from,
            |code| i32::from(code & 15),
            |code| i32::from(code >> 4),
            |code| i32::from(code as i8),
            |code| i32::from(LEVELS[usize::from(code & 15)]),
        ];
        let want = seen.map(|seen| {
            std::array::from_fn(|lane| {
                let products = codes.iter().zip(&x).flat_map(|(codes, x)| {
                    (0..4).map(move |j| seen(codes[4 * lane + j]) * i32::from(x[j]))
                });
                products.sum::<i32>() as f32
            })
        });
        for isa in Isa::available() {
            for variant in Detected::variants(isa) {
                let got: [[f32; 16]; 5] = variant.run_bytes(Sums(&codes, &x));
                assert_eq!(got, want, "{variant:?}");
            }
        }
    }

    #[test]
    fn an_instruction_set_of_another_cpu_is_refused() {
        let other = if cfg!(target_arch = "aarch64") {
            Isa::Avx2
        } else {
            Isa::Neon
        };
        assert!(Detected::new(other).is_none());
    }
}
