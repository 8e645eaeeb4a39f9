//! Products of bytes, summed exactly in 32 bits.

use super::lanes::Lanes;

/// A function over any way of multiplying bytes; as [`Kernel`](super::Kernel).
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
    /// Sums that all begin at `at`.
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
/// where the linker does not optimize, it may stay a call.
#[inline(always)]
#[cfg_attr(
    not(any(target_arch = "x86_64", target_arch = "aarch64")),
    allow(dead_code, reason = "scalar code takes them one by one")
)]
pub(super) fn word([a, b, c, d]: [i8; 4]) -> i32 {
    i32::from_ne_bytes([a as u8, b as u8, c as u8, d as u8])
}
