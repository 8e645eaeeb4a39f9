//! Products of bytes, summed exactly in 32 bits.

use super::lanes::Lanes;

/// A function over any way of multiplying bytes, inlined like a [`Kernel`](super::Kernel).
pub(crate) trait ByteKernel {
    type Output;
    fn run<B: Bytes>(self) -> Self::Output;
}

/// A way of multiplying bytes: 64 codes, four to a lane, with four activations of -127 to 127, into
/// exact sums in 16 lanes of 32 bits.
///
/// Only kernels may use it, inside [`Detected::run_bytes`](super::Detected::run_bytes) and its
/// like, which know that the CPU has the instructions.
pub(crate) trait Bytes: 'static {
    /// The lanes that sums are converted to.
    type Lanes: Lanes;
    /// 64 unsigned codes: four of each lane.
    type Codes: Copy;
    /// 16 signed 32-bit sums.
    type Sums: Copy;

    /// Runs `kernel` with these bytes as a function of its own, for the reason of [`Lanes::call`].
    fn call<K: ByteKernel>(kernel: K) -> K::Output;

    fn load(codes: &[u8; 64]) -> Self::Codes;
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "no other architecture has tiles")
    )]
    fn store(codes: Self::Codes, to: &mut [u8; 64]);
    /// What is added to signed codes, by [`Bytes::signed`] and [`Bytes::table`], where the CPU
    /// multiplies unsigned bytes only: their sums are too high by `OFFSET Σ x`.
    const OFFSET: i32;
    /// A table for [`Bytes::lookup`]: the levels, each plus [`Bytes::OFFSET`].
    #[inline(always)]
    fn table(levels: &[i8; 16]) -> Self::Codes {
        let mut table = [0; 64];
        for (i, to) in table.iter_mut().enumerate() {
            *to = levels[i % 16].wrapping_add(Self::OFFSET as i8) as u8;
        }
        Self::load(&table)
    }
    /// `table[code]` for each code, all of which are below 16.
    fn lookup(table: Self::Codes, codes: Self::Codes) -> Self::Codes;
    /// Signed codes, each plus [`Bytes::OFFSET`].
    fn signed(codes: Self::Codes) -> Self::Codes;
    /// Adds `Σ codes[j] x[j]` of each lane's four codes, which [`Bytes::lookup`] or
    /// [`Bytes::signed`] made.
    fn add_signed(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums;
    /// Whether two rows are multiplied faster at once, by [`Bytes::add_pair`].
    const PAIRED: bool = false;
    /// Puts the sums of two rows in the order in which [`Bytes::add_pair`] keeps them.
    #[inline(always)]
    fn pair(sums: [Self::Sums; 2]) -> [Self::Sums; 2] {
        sums
    }
    /// Puts sums in the order of [`Bytes::add_pair`] back to those of each row.
    #[inline(always)]
    fn unpair(sums: [Self::Sums; 2]) -> [Self::Sums; 2] {
        sums
    }
    /// Adds, as [`Bytes::add`] or, if `SIGNED`, [`Bytes::add_signed`] do, the products of two
    /// vectors of codes with eight columns of a row, and with those of the next row. Codes below
    /// 16 may be taken as signed ones.
    ///
    /// # Safety
    ///
    /// Four values of `x` are readable: two of this row and two of the next.
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
                // SAFETY: one of the four readable values.
                let x = unsafe { *x.add(2 * row + i) };
                *sum = match SIGNED {
                    true => Self::add_signed(*sum, codes, x),
                    false => Self::add(*sum, codes, x),
                };
            }
        }
        sums
    }
    /// Sums that all are `at`.
    fn start(at: i32) -> Self::Sums;
    /// Loads sums.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        allow(dead_code, reason = "no other architecture has tiles")
    )]
    fn load_sums(sums: &[i32; 16]) -> Self::Sums;
    /// The lower four bits of each code.
    fn low(codes: Self::Codes) -> Self::Codes;
    /// The upper four bits of each code.
    fn high(codes: Self::Codes) -> Self::Codes;
    /// Bits 3 of the bytes of three vectors as the lower four bits, bits 7 as the upper four: the
    /// first vector's is the lowest.
    fn spare(a: Self::Codes, b: Self::Codes, c: Self::Codes) -> Self::Codes;
    /// The lower six bits of each byte.
    fn six(codes: Self::Codes) -> Self::Codes;
    /// Codes of six bits less 32, plus [`Bytes::OFFSET`]: signed codes.
    fn less_32(codes: Self::Codes) -> Self::Codes;
    /// The upper two bits of the bytes of three vectors as six bits, the first vector's the lowest.
    fn spare_six(a: Self::Codes, b: Self::Codes, c: Self::Codes) -> Self::Codes;
    /// Sums that all are 0.
    fn zero() -> Self::Sums;
    /// Adds `Σ codes[j] x[j]` of each lane's four codes, each below 16.
    fn add_small(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums;
    /// Adds `Σ codes[j] x[j]` of each lane's four codes.
    fn add(sums: Self::Sums, codes: Self::Codes, x: [i8; 4]) -> Self::Sums;
    /// The sums as `f32`, exactly: they are below 2²⁴.
    fn float(sums: Self::Sums) -> Self::Lanes;
}

/// Four bytes as one word. Written without a closure, like all that a kernel does for each
/// vector: where the linker does not optimize, a closure may stay a call.
#[inline(always)]
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, reason = "scalar code takes them one by one")
)]
pub(super) fn word([a, b, c, d]: [i8; 4]) -> i32 {
    i32::from_ne_bytes([a as u8, b as u8, c as u8, d as u8])
}
