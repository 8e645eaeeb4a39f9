//! Tile registers: one instruction adds up products of bytes into 16 x 16 sums.

use super::bytes::Bytes;

/// The most rows of a tile.
pub(crate) const TILE_ROWS: usize = 16;

/// The most columns of a tile of bytes.
pub(crate) const TILE_DEPTH: usize = 64;

/// A function over tile registers, inlined like a [`Kernel`](super::Kernel).
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "no other architecture has tiles")
)]
pub(crate) trait TileKernel {
    type Output;
    fn run<T: TileRegisters>(self) -> Self::Output;
}

/// Tile registers that are configured: products of up to 16 rows of activations with 16 rows of
/// codes.
#[cfg_attr(
    not(target_arch = "x86_64"),
    allow(dead_code, reason = "no other architecture has tiles")
)]
pub(crate) trait TileRegisters: Sized {
    /// The vectors that kernels use beside the tiles.
    type Bytes: Bytes;

    /// Makes tiles for `rows` rows of activations and products over `depth`
    /// columns, at most 16 and 64.
    ///
    /// # Safety
    ///
    /// Call this only inside [`Detected::run_tiles`](super::Detected::run_tiles), and drop the
    /// value before the next is made.
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
    /// All rows of the tile are readable.
    unsafe fn load(&self, x: *const i8, x_stride: usize);

    /// Multiplies the rows loaded from `x` as [`multiply`](TileRegisters::multiply) does, over the
    /// columns of two tiles if `TWICE`, which loads those of the second. In turns 0, 1, 2,
    /// 0, …; what leaves to `sums` is that of the turn before last, because its own would
    /// be waited for as long as three products take.
    ///
    /// # Safety
    ///
    /// The rows of `x`, the codes and the sums are as [`multiply`](TileRegisters::multiply)
    /// needs them.
    unsafe fn multiply_in_turn<const SIGNED: bool, const TWICE: bool>(
        &self,
        turn: usize,
        x: *const i8,
        x_stride: usize,
        codes: *const u8,
        sums: *mut [i32; 16],
    );

    /// The lower and the upper four bits of each code; if `SIGNED` 16 times those less 8.
    fn halves<const SIGNED: bool>(
        codes: <Self::Bytes as Bytes>::Codes,
    ) -> [<Self::Bytes as Bytes>::Codes; 2];
}
