//! FewRows rows in tiles: unpacking, products and outputs of different steps side by side.

use crate::arch::{self, Bytes, Lanes, TILE_ROWS as M, TileKernel, TileRegisters};
use crate::matmul::activations::GROUP_FACTORS;
use crate::matmul::quantized::{
    CodeKind, LEVEL4, LoadScales, QuantizedWork, TABLE4, biased, pairs,
};
use crate::microkernel::PREFETCH_DISTANCE;
use backend::math::Float;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Groups whose sums are on their way from the tiles, which takes about three times
/// as long as the work on them.
const PRODUCT_DELAY: usize = 2;

/// Steps in flight at most: a step's codes and sums lie in place `step % STAGES`.
const STAGES: usize = 4;

/// Turns after which sums leave their tile.
const TURNS: usize = 2;

/// Steps between a product and the outputs of its sums: neither the stores of this step
/// nor those of the last go to the places of a page that its loads come from.
const OUTPUT_DELAY: usize = 4;

/// The vectors beside the tiles.
type LanesOf<T> = <<T as TileRegisters>::Bytes as Bytes>::Lanes;

/// Codes as bytes and sums of [`STAGES`] steps of few rows; likewise.
#[repr(C, align(4096))]
struct StageBuffers {
    codes: [[[u8; 64]; 32]; STAGES],
    sums: [[[i32; 16]; M]; STAGES],
}

/// RowBlocks of `B` rows for `R` panels at a time, a panel a step, without a pause between them. A step's tile is of one
/// group of `GROUP` columns, or of two groups of 32: activations then have each row twice,
/// with the columns of one group and with those of the other, and zeros beside.
///
/// Sizes are known when this is compiled, and all sums stay in registers: with sizes from
/// memory it took up to twice as long (Sapphire Rapids).
pub(super) struct FewRows<
    'a,
    S,
    const KIND: CodeKind,
    const GROUP: usize,
    const SPAN: usize,
    const B: usize,
    const R: usize,
>(pub(super) QuantizedWork<'a>, pub(super) PhantomData<S>);

impl<S, const KIND: CodeKind, const GROUP: usize, const SPAN: usize, const B: usize, const R: usize>
    TileKernel for FewRows<'_, S, KIND, GROUP, SPAN, B, R>
where
    S: LoadScales,
{
    type Output = ();

    /// Unpacking, products and outputs are of different steps, so that they fill each
    /// other's gaps: where each waited for the one before, 8 rows would take 1.4 times as
    /// long (Sapphire Rapids).
    #[inline(always)]
    fn run<T: TileRegisters>(self) {
        let QuantizedWork { w, data, x, .. } = self.0;
        let (line, groups, panel) = (Self::LINE, x.cols / GROUP, w.panel);
        let (units, last) = (x.cols / line, self.0.range.len() - 1);
        let blocks = x.rows.div_ceil(B);
        let n = self.0.range.len().div_ceil(R) * blocks * units;
        assert_eq!(
            (x.cols % line, groups % SPAN, groups / SPAN * Self::UNIT),
            (0, 0, panel),
            "groups of this size fill the row"
        );
        assert_eq!(
            (x.q.len(), x.factors.len()),
            (
                blocks * B * groups * line,
                blocks * B * groups * GROUP_FACTORS
            ),
            "all rows of the blocks"
        );
        let data = &data[..(last + 1) * panel];
        // SAFETY: entered through `run_tiles`, which is where tiles may be made.
        let tiles = unsafe { T::configure(B * Self::SHARED, arch::TILE_DEPTH) };
        let mut room = MaybeUninit::<StageBuffers>::uninit();
        let room = room.as_mut_ptr();
        let (q, factors) = (x.q.as_ptr(), x.factors.as_ptr());
        let levels = T::Bytes::load(&std::array::from_fn(|i| w.levels[i % 16] as u8));
        let mut y = [[LanesOf::<T>::splat(0.0); R]; B];
        let [mut unpacking, mut multiplying, mut adding] = [Cursor::default(); 3];
        let mut turn = 0;
        // Panel `$r` at `$place`, the last again where there are not as many. No closures: they
        // may be compiled without the instruction set.
        macro_rules! panel {
            ($place:ident, $r:literal) => {
                data.as_ptr().add(($place.panel + $r).min(last) * panel)
            };
        }
        // A loop over the panels would not always be unrolled, and its sums lie in memory.
        macro_rules! step {
            ($round:ident, $r:literal) => {
                if $r < R {
                    let step = $round * R + $r;
                    let (codes, sums) = (&raw mut (*room).codes, &raw mut (*room).sums);
                    let (codes, sums) = (codes.cast::<u8>(), sums.cast::<[[i32; 16]; M]>());
                    let product = step.wrapping_sub(PRODUCT_DELAY);
                    // Sums of steps that there are not push out those of the last.
                    if product < n * R + TURNS {
                        let x = multiplying.row * groups + multiplying.unit * Self::SHARED * B;
                        let x = q.add(x * line);
                        if $r == 0 || GROUP > arch::TILE_DEPTH {
                            tiles.load(x, line);
                        }
                        let codes = match pairs(KIND) {
                            true => codes.add(product % STAGES * line * 16).cast_const(),
                            false => {
                                panel!(multiplying, $r).add(Self::codes_at(multiplying.unit, 0))
                            }
                        };
                        let to = sums.add(product.wrapping_sub(TURNS) % STAGES).cast();
                        match (const { !biased(KIND) }, const { GROUP > arch::TILE_DEPTH }) {
                            (false, false) => {
                                tiles.multiply_in_turn::<false, false>(turn, x, line, codes, to);
                            }
                            (false, true) => {
                                tiles.multiply_in_turn::<false, true>(turn, x, line, codes, to);
                            }
                            (true, false) => {
                                tiles.multiply_in_turn::<true, false>(turn, x, line, codes, to);
                            }
                            (true, true) => {
                                tiles.multiply_in_turn::<true, true>(turn, x, line, codes, to);
                            }
                        }
                        turn = if turn == TURNS { 0 } else { turn + 1 };
                    }
                    if $round < n && pairs(KIND) {
                        for g in 0..Self::SHARED {
                            let from = panel!(unpacking, $r).add(Self::codes_at(unpacking.unit, g));
                            let to = codes.add(step % STAGES * line * 16 + g * GROUP * 16);
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
                    if $round >= (PRODUCT_DELAY + OUTPUT_DELAY) / R {
                        // Where a panel ends, its stream goes on `R` panels later.
                        let ahead = unpacking.unit * Self::STREAM + PREFETCH_DISTANCE;
                        let ahead = ahead + if ahead < panel { 0 } else { (R - 1) * panel };
                        let ahead = panel!(unpacking, $r).wrapping_add(ahead);
                        for g in 0..Self::SHARED {
                            let group = adding.unit * Self::SHARED + g;
                            let scales = group / SPAN * Self::UNIT + Self::UNIT_CODES;
                            let scales = panel!(adding, $r).add(scales);
                            let (scale, bias): (LanesOf<T>, LanesOf<T>) =
                                S::lanes::<_, KIND>(scales, SPAN, group % SPAN);
                            let done = (step - (PRODUCT_DELAY + OUTPUT_DELAY)) % STAGES;
                            let exact = sums.add(done).cast::<[i32; 16]>().add(g * B);
                            let factors =
                                factors.add((adding.row * groups + group * B) * GROUP_FACTORS);
                            for m in 0..B {
                                // FewRows lines at a time: many would wait for free buffers, and
                                // the arithmetic with them.
                                if unpacking.row == 0 {
                                    for each in 0..Self::LINES.div_ceil(Self::SHARED * B) {
                                        let line = g * B + m + Self::SHARED * B * each;
                                        if line < Self::LINES {
                                            LanesOf::<T>::prefetch(ahead.wrapping_add(64 * line));
                                        }
                                    }
                                }
                                let exact = T::Bytes::float(T::Bytes::load_sums(&*exact.add(m)));
                                let d = LanesOf::<T>::splat(*factors.add(GROUP_FACTORS * m));
                                y[m][$r] = (exact * scale).mul_add(d, y[m][$r]);
                                if biased(KIND) {
                                    let e =
                                        LanesOf::<T>::splat(*factors.add(GROUP_FACTORS * m + 1));
                                    y[m][$r] = bias.mul_add(e, y[m][$r]);
                                }
                            }
                        }
                    }
                }
            };
        }
        for round in 0..n + (PRODUCT_DELAY + OUTPUT_DELAY) / R {
            // SAFETY: places are of panels and rows that there are, of the sizes asserted
            // above; a ring of codes and of sums.
            unsafe {
                step!(round, 0);
                step!(round, 1);
            }
            if round + 1 < n {
                unpacking = unpacking.next(units, B, x.rows, R);
            }
            if (PRODUCT_DELAY / R..n - 1 + PRODUCT_DELAY / R).contains(&round) {
                multiplying = multiplying.next(units, B, x.rows, R);
            }
            if round >= (PRODUCT_DELAY + OUTPUT_DELAY) / R {
                if adding.unit + 1 == units {
                    // Through memory: sums that are asked for by a number that is not known
                    // when this is compiled would be kept there all the while.
                    let mut out = [[[0.0; 16]; R]; B];
                    for m in 0..B {
                        for r in 0..R {
                            y[m][r].store(&mut out[m][r]);
                            y[m][r] = LanesOf::<T>::splat(0.0);
                        }
                    }
                    self.put(&out, adding, last);
                }
                adding = adding.next(units, B, x.rows, R);
            }
        }
    }
}

/// Where the steps of few rows are.
#[derive(Clone, Copy, Default)]
struct Cursor {
    /// The first of the panels, counted from the piece's.
    panel: usize,
    /// The first row of the block.
    row: usize,
    /// The tile of columns.
    unit: usize,
}

impl Cursor {
    /// The next of `units` tiles, of all blocks of `block` of `rows` rows, `panels` at a time.
    #[inline(always)]
    fn next(self, units: usize, block: usize, rows: usize, panels: usize) -> Self {
        let Cursor { panel, row, unit } = self;
        if unit + 1 < units {
            Cursor {
                unit: unit + 1,
                ..self
            }
        } else if row + block < rows {
            Cursor {
                panel,
                row: row + block,
                unit: 0,
            }
        } else {
            Cursor {
                panel: panel + panels,
                row: 0,
                unit: 0,
            }
        }
    }
}

impl<S, const KIND: CodeKind, const GROUP: usize, const SPAN: usize, const B: usize, const R: usize>
    FewRows<'_, S, KIND, GROUP, SPAN, B, R>
where
    S: LoadScales,
{
    /// Groups of a step, and their columns.
    const SHARED: usize = if GROUP < arch::TILE_DEPTH {
        arch::TILE_DEPTH / GROUP
    } else {
        1
    };
    const LINE: usize = GROUP * Self::SHARED;
    /// Bytes of the codes of a group, and of a unit's.
    const CODES: usize = 16 * GROUP / if pairs(KIND) { 2 } else { 1 };
    const UNIT_CODES: usize = SPAN * Self::CODES;
    const UNIT: usize = {
        let (shared, own) = S::BYTES;
        let scales = 16 * (shared + SPAN * own) * if biased(KIND) { 2 } else { 1 };
        (Self::UNIT_CODES + scales).next_multiple_of(64)
    };
    /// Bytes that a step reads, and the lines of memory.
    const STREAM: usize = Self::UNIT * Self::SHARED / SPAN;
    const LINES: usize = Self::STREAM.div_ceil(64);

    /// Where in a panel the codes of group `g` of a tile of columns are.
    #[inline(always)]
    fn codes_at(unit: usize, g: usize) -> usize {
        let g = unit * Self::SHARED + g;
        g / SPAN * Self::UNIT + g % SPAN * Self::CODES
    }

    /// Keeps the outputs of the rows and panels at `place` that there are.
    fn put(&self, out: &[[[f32; 16]; R]; B], place: Cursor, last: usize) {
        let rows = B.min(self.0.x.rows - place.row);
        for (m, out) in out[..rows].iter().enumerate() {
            for (r, out) in out[..R.min(last + 1 - place.panel)].iter().enumerate() {
                let panel = self.0.range.start + place.panel + r;
                // SAFETY: this worker alone has the panel.
                let to = unsafe { self.0.out(place.row + m, panel) };
                to.copy_from_slice(&out[..to.len()]);
            }
        }
    }
}
