//! Few rows in tiles: a software pipeline of unpacking, products and outputs.
//!
//! A step is one tile of columns of one panel. While the codes of step `s` are unpacked, the
//! tile of an earlier step is multiplied, and the sums of a still earlier one are added to the
//! outputs, so that they fill each other's gaps: where each waited for the one before, 8 rows
//! would take 1.4 times as long (Sapphire Rapids).
//!
//! ```text
//! step               s                 s - 2                  s - 6
//!           codes ─ unpack ─▶ codes ─ multiply ─▶ sums ─ add (scales) ─▶ y
//!                           [s % 4]              [s % 4]
//! ```

use crate::arch::{self, Bytes, Lanes, TILE_ROWS as M, TileKernel, TileRegisters};
use crate::matmul::activations::TILE_FACTORS;
use crate::matmul::quantized::{
    CodeKind, LEVEL4, LoadScales, QuantizedWork, TABLE4, biased, pairs,
};
use crate::microkernel::PREFETCH_DISTANCE;
use backend::math::Float;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Steps between unpacking and the product: sums take about three times as long to leave a tile
/// as the work on them.
const PRODUCT_DELAY: usize = 2;

/// Steps between a product and the outputs of its sums: neither the stores of this step
/// nor those of the last go to the places of a page that its loads come from.
const OUTPUT_DELAY: usize = 4;

/// Steps whose codes and sums are kept: those of step `s` lie in stage `s % STAGES`.
const STAGES: usize = 4;

/// Products after which sums leave their tile.
const TURNS: usize = 2;

/// The vectors beside the tiles.
type LanesOf<T> = <<T as TileRegisters>::Bytes as Bytes>::Lanes;

/// Memory for the unpacked codes and the sums of each stage, in the places of their pages where the
/// activations of the same groups lie. A kernel's stages are as large as it needs them and follow
/// each other closely: what they take of the first-level cache is taken from activations.
#[repr(C, align(4096))]
struct StageBuffers {
    codes: [[[u8; 64]; 32]; STAGES],
    sums: [[[i32; 16]; 2 * M]; STAGES],
}

/// Blocks of `B` rows for `R` panels at a time, a panel a step, without a pause between them. A
/// step has one group of `GROUP` columns, or two groups of 32. Of eight rows these share a tile:
/// the activations then have each row twice, with the columns of one group and with those of the
/// other, and zeros beside. Of sixteen rows each has a product of its own.
///
/// Sizes are constants, and all sums stay in registers: with sizes from memory the kernel took up
/// to twice as long (Sapphire Rapids).
pub(super) struct FewRows<
    'a,
    S,
    const KIND: CodeKind,
    const GROUP: usize,
    const SPAN: usize,
    const B: usize,
    const R: usize,
>(pub(super) QuantizedWork<'a>, pub(super) PhantomData<S>);

/// What all steps read and write.
struct Steps<'a> {
    /// The panels of the work range.
    data: &'a [u8],
    panel_bytes: usize,
    /// The number of the last panel.
    last: usize,
    q: *const i8,
    factors: *const f32,
    /// Rounds: steps of `R` panels.
    n: usize,
    /// Tiles of columns of a panel.
    units: usize,
    /// Rows of activations.
    rows: usize,
    /// [`StageBuffers::codes`]
    codes: *mut u8,
    /// [`StageBuffers::sums`]
    sums: *mut [i32; 16],
}

/// Which block of rows, panels and tile of columns a stage of the pipeline works on.
#[derive(Clone, Copy)]
struct Cursor<const R: usize> {
    /// The first of the panels, counted from that of the work range.
    panel: usize,
    /// Where the panels start, the last one of the range in the place of those that there are not.
    panels: [*const u8; R],
    /// The first row of the block.
    row: usize,
    /// The tile of columns.
    unit: usize,
    /// Tiles of columns of the rows from the first on: blocks follow each other.
    from_first: usize,
}

impl<const R: usize> Cursor<R> {
    /// At the first tile of the panels from `panel` on.
    #[inline(always)]
    fn at(panel: usize, steps: &Steps<'_>) -> Self {
        let mut panels = [steps.data.as_ptr(); R];
        for (r, start) in panels.iter_mut().enumerate() {
            *start = start.wrapping_add((panel + r).min(steps.last) * steps.panel_bytes);
        }
        Cursor {
            panel,
            panels,
            row: 0,
            unit: 0,
            from_first: 0,
        }
    }

    /// Goes on to the next tile, of all blocks of `block` rows and then of the next panels.
    #[inline(always)]
    fn advance(&mut self, block: usize, steps: &Steps<'_>) {
        self.unit += 1;
        self.from_first += 1;
        if self.unit == steps.units {
            self.unit = 0;
            self.row += block;
            if self.row >= steps.rows {
                *self = Cursor::at(self.panel + R, steps);
            }
        }
    }
}

/// What each stage of the pipeline works on.
#[derive(Clone, Copy)]
struct Cursors<const R: usize> {
    unpacking: Cursor<R>,
    multiplying: Cursor<R>,
    adding: Cursor<R>,
}

impl<S, const KIND: CodeKind, const GROUP: usize, const SPAN: usize, const B: usize, const R: usize>
    TileKernel for FewRows<'_, S, KIND, GROUP, SPAN, B, R>
where
    S: LoadScales,
{
    type Output = ();

    #[inline(always)]
    fn run<T: TileRegisters>(self) {
        let mut buffers = MaybeUninit::<StageBuffers>::uninit();
        let steps = self.steps(&mut buffers);
        let n = steps.n;
        // SAFETY: entered through `run_tiles`, which is where tiles may be made.
        let tiles = unsafe { T::configure(B * Self::JOINED, Self::DEPTH) };
        let levels = T::Bytes::load(&std::array::from_fn(|i| self.0.w.levels[i % 16] as u8));
        let mut y = [[LanesOf::<T>::splat(0.0); R]; B];
        let start = Cursor::at(0, &steps);
        let mut cursors = Cursors {
            unpacking: start,
            multiplying: start,
            adding: start,
        };
        let mut turn = 0;
        for round in 0..n + (PRODUCT_DELAY + OUTPUT_DELAY) / R {
            // A loop over the panels would not always be unrolled, and its sums lie in memory.
            // SAFETY: cursors are of panels and rows that there are, of the sizes that `steps`
            // has checked.
            unsafe {
                Self::step::<T, 0>(&tiles, &steps, levels, round, cursors, &mut turn, &mut y);
                if R > 1 {
                    Self::step::<T, 1>(&tiles, &steps, levels, round, cursors, &mut turn, &mut y);
                }
            }
            if round + 1 < n {
                cursors.unpacking.advance(B, &steps);
            }
            if (PRODUCT_DELAY / R..n - 1 + PRODUCT_DELAY / R).contains(&round) {
                cursors.multiplying.advance(B, &steps);
            }
            if round >= (PRODUCT_DELAY + OUTPUT_DELAY) / R {
                if cursors.adding.unit + 1 == steps.units {
                    self.finish::<T>(&mut y, cursors.adding, steps.last);
                }
                cursors.adding.advance(B, &steps);
            }
        }
    }
}

impl<
    'a,
    S,
    const KIND: CodeKind,
    const GROUP: usize,
    const SPAN: usize,
    const B: usize,
    const R: usize,
> FewRows<'a, S, KIND, GROUP, SPAN, B, R>
where
    S: LoadScales,
{
    /// Groups of a step.
    const SHARED: usize = if GROUP < arch::TILE_DEPTH {
        arch::TILE_DEPTH / GROUP
    } else {
        1
    };
    /// Groups of a step that share a tile.
    const JOINED: usize = if B * Self::SHARED > M {
        1
    } else {
        Self::SHARED
    };
    /// Products of a step.
    const PRODUCTS: usize = Self::SHARED / Self::JOINED;
    /// Columns of a step.
    const LINE: usize = GROUP * Self::SHARED;
    /// Bytes of a row of a product's activations, which a tile takes in two parts if they are more
    /// than `DEPTH`.
    const X_LINE: usize = GROUP * Self::JOINED;
    const DEPTH: usize = if Self::X_LINE < arch::TILE_DEPTH {
        Self::X_LINE
    } else {
        arch::TILE_DEPTH
    };
    /// Bytes of a step's activations.
    const X_STEP: usize = Self::SHARED * B * Self::X_LINE;
    /// Steps from a product to the one in which its sums leave their tile.
    const LEAVING: usize = TURNS / Self::PRODUCTS;
    /// Bytes of the codes of a group.
    const CODES: usize = 16 * GROUP / if pairs(KIND) { 2 } else { 1 };
    /// Bytes of the codes of a super-block.
    const SUPERBLOCK_CODES: usize = SPAN * Self::CODES;
    /// Bytes of a super-block.
    const SUPERBLOCK: usize = {
        let (shared, own) = S::BYTES;
        let scales = 16 * (shared + SPAN * own) * if biased(KIND) { 2 } else { 1 };
        (Self::SUPERBLOCK_CODES + scales).next_multiple_of(64)
    };
    /// Bytes that a step reads of its panel, and the cache lines.
    const STREAM: usize = Self::SUPERBLOCK * Self::SHARED / SPAN;
    const LINES: usize = Self::STREAM.div_ceil(64);

    /// Checks that the work range has the sizes that the kernel is compiled for.
    ///
    /// # Panics
    ///
    /// If it has not.
    #[inline(always)]
    fn steps(&self, buffers: &mut MaybeUninit<StageBuffers>) -> Steps<'a> {
        let QuantizedWork { w, data, x, .. } = self.0;
        let (line, groups, panel) = (Self::LINE, x.cols / GROUP, w.panel_bytes);
        let units = x.cols / line;
        let last = self.0.range.len() - 1;
        let blocks = x.rows.div_ceil(B);
        assert_eq!(
            (
                x.cols % line,
                groups % SPAN,
                groups / SPAN * Self::SUPERBLOCK
            ),
            (0, 0, panel),
            "groups of this size fill the row"
        );
        assert_eq!(
            (x.q.len(), x.factors.len()),
            (
                blocks * units * Self::X_STEP,
                blocks * B * groups * TILE_FACTORS
            ),
            "all rows of the blocks"
        );
        let buffers = buffers.as_mut_ptr();
        // SAFETY: the buffers' fields, which are written before they are read.
        let (codes, sums) = unsafe { (&raw mut (*buffers).codes, &raw mut (*buffers).sums) };
        Steps {
            data: &data[..(last + 1) * panel],
            panel_bytes: panel,
            last,
            q: x.q.as_ptr(),
            factors: x.factors.as_ptr(),
            n: self.0.range.len().div_ceil(R) * blocks * units,
            units,
            rows: x.rows,
            codes: codes.cast(),
            sums: sums.cast(),
        }
    }

    /// One step of every stage, of panel `PANEL` of round `round`.
    ///
    /// # Safety
    ///
    /// `steps` is of this kernel, and the cursors are of panels and rows that there are.
    #[inline(always)]
    unsafe fn step<T: TileRegisters, const PANEL: usize>(
        tiles: &T,
        steps: &Steps<'_>,
        levels: <T::Bytes as Bytes>::Codes,
        round: usize,
        cursors: Cursors<R>,
        turn: &mut usize,
        y: &mut [[LanesOf<T>; R]; B],
    ) {
        let step = round * R + PANEL;
        let product = step.wrapping_sub(PRODUCT_DELAY);
        // SAFETY: `steps` and cursors are of this kernel, as promised; a stage is read only by steps
        // after the one that wrote it.
        unsafe {
            // The products of steps that there are not push out the sums of the last.
            if product < steps.n * R + Self::LEAVING {
                Self::multiply::<T, PANEL>(tiles, steps, product, cursors.multiplying, turn);
            }
            if round < steps.n && pairs(KIND) {
                Self::unpack::<T, PANEL>(steps, levels, step, cursors.unpacking);
            }
            if round >= (PRODUCT_DELAY + OUTPUT_DELAY) / R {
                Self::add_outputs::<T, PANEL>(steps, step, cursors, y);
            }
        }
    }

    /// Multiplies the codes of step `product` with the block's activations.
    ///
    /// # Safety
    ///
    /// `steps` is of this kernel, and the cursors are of panels and rows that there are.
    #[inline(always)]
    unsafe fn multiply<T: TileRegisters, const PANEL: usize>(
        tiles: &T,
        steps: &Steps<'_>,
        product: usize,
        at: Cursor<R>,
        turn: &mut usize,
    ) {
        let line = Self::X_LINE;
        for i in 0..Self::PRODUCTS {
            // SAFETY: the activations of a tile of columns, its codes, and the sums of a stage.
            unsafe {
                let x = steps.q.add(at.from_first * Self::X_STEP + i * B * line);
                if PANEL == 0 || Self::PRODUCTS > 1 || GROUP > arch::TILE_DEPTH {
                    tiles.load(x, line);
                }
                let codes = match pairs(KIND) {
                    true => steps
                        .codes
                        .add(product % STAGES * Self::LINE * 16)
                        .cast_const(),
                    false => at.panels[PANEL].add(Self::codes_at(at.unit, 0)),
                };
                let codes = codes.add(i * Self::JOINED * GROUP * 16);
                let to = product.wrapping_sub(Self::LEAVING) % STAGES * Self::SHARED * B;
                let to = steps.sums.add(to + i * Self::JOINED * B);
                Self::multiply_tile(tiles, *turn, (x, line), codes, to);
            }
            *turn = if *turn == TURNS { 0 } else { *turn + 1 };
        }
    }

    /// [`TileRegisters::multiply_in_turn`] for these codes.
    ///
    /// # Safety
    ///
    /// As there.
    #[inline(always)]
    unsafe fn multiply_tile<T: TileRegisters>(
        tiles: &T,
        turn: usize,
        (x, line): (*const i8, usize),
        codes: *const u8,
        to: *mut [i32; 16],
    ) {
        // SAFETY: as promised.
        unsafe {
            match (const { !biased(KIND) }, const { GROUP > arch::TILE_DEPTH }) {
                (false, false) => tiles.multiply_in_turn::<false, false>(turn, x, line, codes, to),
                (false, true) => tiles.multiply_in_turn::<false, true>(turn, x, line, codes, to),
                (true, false) => tiles.multiply_in_turn::<true, false>(turn, x, line, codes, to),
                (true, true) => tiles.multiply_in_turn::<true, true>(turn, x, line, codes, to),
            }
        }
    }

    /// Writes the codes of step `step` as bytes: those of [`LEVEL4`] as 16 times their levels, those of
    /// other levels as the levels.
    ///
    /// # Safety
    ///
    /// `steps` is of this kernel, and the cursors are of panels and rows that there are.
    #[inline(always)]
    unsafe fn unpack<T: TileRegisters, const PANEL: usize>(
        steps: &Steps<'_>,
        levels: <T::Bytes as Bytes>::Codes,
        step: usize,
        at: Cursor<R>,
    ) {
        // SAFETY: the codes of the groups of a tile, and memory for as many bytes in its stage.
        unsafe {
            for g in 0..Self::SHARED {
                let from = at.panels[PANEL].add(Self::codes_at(at.unit, g));
                let to = step % STAGES * Self::LINE * 16 + g * GROUP * 16;
                let to = steps.codes.add(to);
                for v in 0..Self::CODES / 64 {
                    let codes = T::Bytes::load(&*from.add(64 * v).cast());
                    let [mut low, mut high] = match KIND {
                        LEVEL4 => T::halves::<true>(codes),
                        _ => T::halves::<false>(codes),
                    };
                    if KIND == TABLE4 {
                        low = T::Bytes::lookup(levels, low);
                        high = T::Bytes::lookup(levels, high);
                    }
                    T::Bytes::store(low, &mut *to.add(128 * v).cast());
                    T::Bytes::store(high, &mut *to.add(128 * v + 64).cast());
                }
            }
        }
    }

    /// Adds the sums that are ready at step `step` to the outputs of panel `PANEL`, and prefetches
    /// what is unpacked later.
    ///
    /// # Safety
    ///
    /// `steps` is of this kernel, and the cursors are of panels and rows that there are.
    #[inline(always)]
    #[expect(
        clippy::needless_range_loop,
        reason = "an index names the same row in several arrays"
    )]
    unsafe fn add_outputs<T: TileRegisters, const PANEL: usize>(
        steps: &Steps<'_>,
        step: usize,
        Cursors {
            unpacking, adding, ..
        }: Cursors<R>,
        y: &mut [[LanesOf<T>; R]; B],
    ) {
        // Where a panel ends, its stream goes on `R` panels later.
        let panel = steps.panel_bytes;
        let ahead = unpacking.unit * Self::STREAM + PREFETCH_DISTANCE;
        let ahead = ahead + if ahead < panel { 0 } else { (R - 1) * panel };
        let ahead = unpacking.panels[PANEL].wrapping_add(ahead);
        for g in 0..Self::SHARED {
            let group = adding.unit * Self::SHARED + g;
            // SAFETY: the group's scales, the sums of its stage and the factors of the block.
            let (scale, bias, exact, factors): (LanesOf<T>, LanesOf<T>, _, _) = unsafe {
                let scales = group / SPAN * Self::SUPERBLOCK + Self::SUPERBLOCK_CODES;
                let scales = adding.panels[PANEL].add(scales);
                let (scale, bias) = S::load_scales::<_, KIND>(scales, SPAN, group % SPAN);
                let done = (step - (PRODUCT_DELAY + OUTPUT_DELAY)) % STAGES;
                let exact = steps.sums.add((done * Self::SHARED + g) * B);
                let factors = (adding.from_first * Self::SHARED + g) * B;
                (
                    scale,
                    bias,
                    exact,
                    steps.factors.add(factors * TILE_FACTORS),
                )
            };
            // Sums of 16 times the levels. No bit is lost: the sums are below 2²⁴, and the scales far
            // above the smallest numbers.
            let scale = match KIND {
                LEVEL4 => scale * LanesOf::<T>::splat(1.0 / 16.0),
                _ => scale,
            };
            for m in 0..B {
                // Few lines at a time: many would wait for free buffers, and the arithmetic with
                // them.
                if unpacking.row == 0 {
                    for each in 0..Self::LINES.div_ceil(Self::SHARED * B) {
                        let line = g * B + m + Self::SHARED * B * each;
                        if line < Self::LINES {
                            LanesOf::<T>::prefetch(ahead.wrapping_add(64 * line));
                        }
                    }
                }
                // SAFETY: row `m` of the block's sums and factors.
                let (exact, d, d_sum) = unsafe {
                    let own = factors.add(TILE_FACTORS * m);
                    (T::Bytes::load_sums(&*exact.add(m)), *own, *own.add(1))
                };
                let (d, d_sum) = (LanesOf::<T>::splat(d), LanesOf::<T>::splat(d_sum));
                y[m][PANEL] = (T::Bytes::float(exact) * scale).mul_add(d, y[m][PANEL]);
                if biased(KIND) {
                    y[m][PANEL] = bias.mul_add(d_sum, y[m][PANEL]);
                }
            }
        }
    }

    /// Where in a panel the codes of group `g` of tile `unit` are.
    #[inline(always)]
    fn codes_at(unit: usize, g: usize) -> usize {
        let g = unit * Self::SHARED + g;
        g / SPAN * Self::SUPERBLOCK + g % SPAN * Self::CODES
    }

    /// Writes the outputs of the rows and panels at `cursor`, and starts the next from zero.
    #[inline(always)]
    fn finish<T: TileRegisters>(
        &self,
        y: &mut [[LanesOf<T>; R]; B],
        cursor: Cursor<R>,
        last: usize,
    ) {
        // Through memory: sums that are asked for by a number that is not a constant would be
        // kept there all the while.
        let mut out = [[[0.0; 16]; R]; B];
        for m in 0..B {
            for r in 0..R {
                y[m][r].store(&mut out[m][r]);
                y[m][r] = LanesOf::<T>::splat(0.0);
            }
        }
        self.write(&out, cursor, last);
    }

    /// Writes the outputs of those rows and panels at `cursor` that there are.
    fn write(&self, out: &[[[f32; 16]; R]; B], cursor: Cursor<R>, last: usize) {
        let rows = B.min(self.0.x.rows - cursor.row);
        for (m, out) in out[..rows].iter().enumerate() {
            for (r, out) in out[..R.min(last + 1 - cursor.panel)].iter().enumerate() {
                let panel = self.0.range.start + cursor.panel + r;
                // SAFETY: this worker alone has the panel.
                let to = unsafe { self.0.out(cursor.row + m, panel) };
                to.copy_from_slice(&out[..to.len()]);
            }
        }
    }
}
