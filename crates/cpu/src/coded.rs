//! Products of coded weights with 8-bit activations.
//!
//! Weights keep their codes: `w[c] = scale_g code[c] + bias_g`, or
//! `w[c] = scale_g level[code[c]]`, for the columns of group `g`. The activations of
//! a row are rounded in the same groups,
//!
//! ```text
//! d_g = max |x| / 127        q[c] = round(x[c] 127 / max |x|)
//! ```
//!
//! (`d_g` is NaN if an `x` is not finite: codes would hide that a model computes nothing.)
//!
//! and a product is, for ascending groups and from `y = 0`,
//!
//! ```text
//! y = fma(scale_g Σ code[c] q[c], d_g, y)        the sum is an exact integer
//! y = fma(bias_g, d_g Σ q[c], y)                 only where there are biases
//! ```
//!
//! with `level[code[c]]` for `code[c]` where codes stand for levels. [`dot`] is this
//! definition. A panel holds, group after group, the codes of 16 rows, four columns
//! of each row to a vector of 64 bytes (codes of up to 4 bits in pairs, eight
//! columns), and after one or several groups what makes their scales and biases:
//! one stream. Codes of 2 and 3 bits take the room of 4, those of 5 and 6 bits
//! that of 8.

mod pack;

pub(crate) use pack::Parts;

use crate::Cpu;
use crate::arch::{Blocks, Bytes, Detected, Element, Kernel, Lanes, store};
use crate::elementwise::PIECE;
use crate::matmul::with_element;
use crate::memory::{bytes, bytes_mut, values, values_mut};
use crate::packing::{self, Source};
use crate::pool::Split;
use crate::tile::AHEAD;
use crate::tiles;
use backend::Tensor;
use backend::math::Float;
use half::f16;
use quant::{Format, Row, Scalar, Zero};
use std::ops::Range;

/// Rounds one group of activations to `q`; returns `d` and `Σ q`.
fn round_group(x: &[f32], q: &mut [i8]) -> (f32, f32) {
    let top = x
        .iter()
        .fold(0.0, |top, &x| Float::maximum(Float::maximum(x, -x), top));
    let inverse = if top > 0.0 { 127.0 / top } else { 0.0 };
    let mut sum = 0.0;
    for (q, x) in q.iter_mut().zip(x) {
        // The bounds matter for infinities only.
        let rounded = Float::minimum((x * inverse).round_even(), 127.0);
        let rounded = Float::maximum(rounded, -127.0);
        *q = rounded as i8;
        sum += rounded;
    }
    // Nothing is added unless a value is not finite.
    let poison = x.iter().fold(0.0, |poison, &x| poison + x * 0.0);
    (top / 127.0 + poison, sum)
}

/// The product of one stored row with activations rounded to 8 bits: what
/// [`crate::Activations::Int8`] computes for every output, in this order.
///
/// # Panics
///
/// If the format has no codes, or `x` is not as wide as the row.
pub fn dot(format: &Format, row: Row<'_>, x: &[f32]) -> f32 {
    let view = format.codes().expect("a format with codes");
    let groups = x.len() / view.group;
    let mut codes = vec![0; x.len()];
    let (mut scales, mut biases) = (vec![0.0; groups], vec![0.0; groups]);
    format.unpack(row, &mut codes, &mut scales, &mut biases);
    let mut y = 0.0f32;
    let mut q = vec![0; view.group];
    for (g, x) in x.chunks_exact(view.group).enumerate() {
        let (d, sum) = round_group(x, &mut q);
        let codes = &codes[g * view.group..(g + 1) * view.group];
        let level = |code: u8| match view.zero {
            Zero::Bias => i32::from(code),
            Zero::Levels(levels) => i32::from(levels[usize::from(code)]),
        };
        let products = codes.iter().zip(&q).map(|(&c, &q)| level(c) * i32::from(q));
        let exact: i32 = products.sum();
        y = (exact as f32 * scales[g]).mul_add(d, y);
        if view.zero == Zero::Bias {
            y = biases[g].mul_add(d * sum, y);
        }
    }
    y
}

/// Activations in 8 bits, by group.
///
/// Rows come in blocks, as many as a kernel takes at once, in the order in which it
/// reads them. The last block of a run may have fewer; in tiles there is one run,
/// and its last block keeps the room of all rows, whose factors are zeros.
pub(crate) struct Rounded {
    group: usize,
    cols: usize,
    pub(crate) blocks: Blocks,
    /// From the first page boundary on, of each block: `[cols / 8, rows, 8]` bytes,
    /// in tiles `[groups, rows, line]`, of [`Blocks::line`].
    q: Tensor,
    /// Of each block: `[groups, rows, FACTORS]`.
    factors: Tensor,
}

/// What is known of a group of a row: `d`, `d Σ q`, and the integers `−8 Σ q` and
/// `−128 Σ q`.
pub(crate) const FACTORS: usize = 4;

/// Where tiles of activations start. Sums leave their tiles for the same places
/// of a page: a load waits for every store on its way to the same place of another.
const PAGE: usize = 4096;

/// The bytes of `storage` from the first page boundary on.
fn from_page(storage: &[i8]) -> usize {
    storage.as_ptr().align_offset(PAGE)
}

/// Values that one worker rounds at a time.
const ROUNDED: usize = 4 << 10;

/// Rounds some columns of one block of rows.
struct Round<'a> {
    /// The rows from their first.
    x: &'a [f32],
    cols: usize,
    /// Groups of the columns.
    groups: Range<usize>,
    /// Rows that there is room for.
    rows: usize,
    group: usize,
    blocks: Blocks,
    q: &'a mut [i8],
    factors: &'a mut [f32],
}

impl Kernel for Round<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (rows, group, line) = (self.rows, self.group, self.blocks.line(self.group));
        let q = self.q.as_chunks_mut::<8>().0;
        // From one eight of a row to its next, and to the next row's.
        let (along, down) = if self.blocks.tiles {
            (1, line / 8)
        } else {
            (rows, 1)
        };
        if line > group {
            q.fill([0; 8]);
        }
        if self.x.len() < rows * self.cols {
            self.factors.fill(0.0);
        }
        for (m, x) in self.x.chunks_exact(self.cols).enumerate() {
            let x = &x[self.groups.start * group..self.groups.end * group];
            for (g, x) in x.chunks_exact(group).enumerate() {
                let x = x.as_chunks::<16>().0;
                let mut top = L::splat(0.0);
                let mut poison = L::splat(0.0);
                for x in x {
                    let x = L::load(x);
                    top = x.maximum(x.negate()).maximum(top);
                    poison = poison + x * L::splat(0.0);
                }
                let top = top.max_lane();
                let inverse = L::splat(if top > 0.0 { 127.0 / top } else { 0.0 });
                // Whole numbers far below 2²⁴: exact in any order.
                let mut sum = L::splat(0.0);
                for (i, x) in x.iter().enumerate() {
                    let rounded = (L::load(x) * inverse).round_even();
                    let rounded = rounded.minimum(L::splat(127.0)).maximum(L::splat(-127.0));
                    let mut bytes = [0; 16];
                    rounded.store_i8(&mut bytes);
                    let (halves, _) = bytes.as_chunks::<8>();
                    let place = (self.groups.start + g) * group % line / 8;
                    let eight = g * line / 8 * rows + m * down + (place + 2 * i) * along;
                    q[eight] = halves[0];
                    q[eight + along] = halves[1];
                    sum = sum + rounded;
                }
                let (d, sum) = (top / 127.0 + poison.sum(), sum.sum());
                let bits = |times: i32| f32::from_bits((times * sum as i32) as u32);
                self.factors[FACTORS * (g * rows + m)..][..FACTORS].copy_from_slice(&[
                    d,
                    d * sum,
                    bits(-8),
                    bits(-128),
                ]);
            }
        }
    }
}

impl Rounded {
    /// Rounds each of `runs` of `x`; in tiles, the only one.
    pub(crate) fn new(
        cpu: &Cpu,
        x: &Tensor,
        group: usize,
        blocks: Blocks,
        runs: &[Range<usize>],
    ) -> Self {
        let (rows, cols, block) = (x.rows(), x.cols(), blocks.rows);
        let groups = cols / group;
        let room = match blocks.tiles {
            true => rows.next_multiple_of(block),
            false => rows,
        };
        let line = blocks.line(group);
        let mut q = cpu.tensor(1, (room * groups * line + PAGE).div_ceil(4));
        let mut factors = cpu.tensor(room, FACTORS * groups);
        {
            let x = values(x);
            let q = bytes_mut::<i8>(values_mut(&mut q));
            let start = from_page(q);
            let q = Split::new(&mut q[start..]);
            let factors = Split::new(values_mut(&mut factors));
            // Some groups of one block.
            let round = |range: Range<usize>, part: Range<usize>| {
                let n = range.len();
                let of = |each: usize| {
                    let first = range.start * groups * each;
                    first + part.start * n * each..first + part.end * n * each
                };
                // SAFETY: every part of every block is visited once.
                let (q, factors) = unsafe { (q.part(of(line)), factors.part(of(FACTORS))) };
                cpu.isa.run(Round {
                    x: &x[range.start * cols..range.end.min(rows) * cols],
                    cols,
                    groups: part,
                    rows: n,
                    group,
                    blocks,
                    q,
                    factors,
                });
            };
            match runs {
                [only] => {
                    let part = cpu.pool.even(groups, ROUNDED / (block * group));
                    let parts = groups.div_ceil(part);
                    let n = only.len().div_ceil(block);
                    cpu.pool.each(n * parts, 1, |_, range| {
                        for i in range {
                            let start = only.start + i / parts * block;
                            let end = if blocks.tiles { room } else { only.end };
                            let first = i % parts * part;
                            round(
                                start..(start + block).min(end),
                                first..(first + part).min(groups),
                            );
                        }
                    });
                }
                _ => {
                    let chunk = PIECE.div_ceil(cols * block);
                    cpu.pool.each(runs.len(), chunk, |_, range| {
                        for run in &runs[range] {
                            for start in run.clone().step_by(block) {
                                round(start..(start + block).min(run.end), 0..groups);
                            }
                        }
                    });
                }
            }
        }
        Rounded {
            group,
            cols,
            blocks,
            q,
            factors,
        }
    }

    /// Whether this is what `w` wants in `blocks`.
    pub(crate) fn is_for(&self, w: &Coded, blocks: Blocks) -> bool {
        (self.group, self.blocks) == (w.group, blocks)
    }

    /// Rows `run`, one of the runs or rows rounded in blocks of one.
    fn view(&self, run: Range<usize>) -> Input<'_> {
        let room = match self.blocks.tiles {
            true => run.len().next_multiple_of(self.blocks.rows),
            false => run.len(),
        };
        let groups = self.cols / self.group;
        let part = |n: usize| run.start * groups * n..(run.start + room) * groups * n;
        let q = bytes(values(&self.q));
        Input {
            cols: self.cols,
            rows: run.len(),
            block: self.blocks.rows,
            q: &q[from_page(q)..][part(self.blocks.line(self.group))],
            factors: &values(&self.factors)[part(FACTORS)],
        }
    }
}

/// Rounded rows as the kernels read them: see [`Rounded`].
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    pub(crate) cols: usize,
    pub(crate) rows: usize,
    pub(crate) block: usize,
    pub(crate) q: &'a [i8],
    pub(crate) factors: &'a [f32],
}

/// How codes lie in a panel and what they stand for: a parameter of kernels.
pub(crate) type Kind = u8;
/// Pairs, with biases.
pub(crate) const AFFINE4: Kind = 0;
/// Bytes, with biases.
pub(crate) const AFFINE8: Kind = 1;
/// Pairs; a code is its level and 8.
pub(crate) const LEVEL4: Kind = 2;
/// Pairs that stand for levels of a table.
pub(crate) const TABLE4: Kind = 3;
/// Signed bytes, the levels themselves.
pub(crate) const LEVEL8: Kind = 4;

/// Whether codes lie in pairs.
pub(crate) const fn pairs(kind: Kind) -> bool {
    matches!(kind, AFFINE4 | LEVEL4 | TABLE4)
}

/// Whether groups have biases.
pub(crate) const fn biased(kind: Kind) -> bool {
    matches!(kind, AFFINE4 | AFFINE8)
}

/// What the scales and biases of a panel are made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Factors {
    /// Each group's own: its scale, then its bias if there are any.
    Own(Scalar),
    /// Integers of each group times a number of all of a unit: `d` (and `m`) in
    /// half precision, then `s` (and `t`) of each group in bytes.
    Integers,
}

/// [`Factors`] as a type: a parameter of kernels. Elements are each group's own.
pub(crate) trait Scales {
    /// Bytes of a number that all groups of a unit share, and of one of a group's own.
    const BYTES: (usize, usize);

    /// Scales and biases, zeros if there are none, of group `j` of a unit of `span` whose
    /// factors start at `scales`.
    ///
    /// # Safety
    ///
    /// They are readable, and there is such a group.
    unsafe fn lanes<L: Lanes, const KIND: Kind>(scales: *const u8, span: usize, j: usize)
    -> (L, L);
}

impl<S: Element> Scales for S {
    const BYTES: (usize, usize) = (0, size_of::<S>());

    #[inline(always)]
    unsafe fn lanes<L: Lanes, const KIND: Kind>(scales: *const u8, _: usize, j: usize) -> (L, L) {
        let at = scales.cast::<[S; 16]>();
        // SAFETY: arrays of 16 elements, as `arrays` says.
        unsafe {
            match const { biased(KIND) } {
                true => (S::load(&*at.add(2 * j)), S::load(&*at.add(2 * j + 1))),
                false => (S::load(&*at.add(j)), L::splat(0.0)),
            }
        }
    }
}

/// [`Factors::Integers`].
pub(crate) struct Integers;

impl Scales for Integers {
    const BYTES: (usize, usize) = (2, 1);

    #[inline(always)]
    unsafe fn lanes<L: Lanes, const KIND: Kind>(
        scales: *const u8,
        span: usize,
        j: usize,
    ) -> (L, L) {
        let two = const { biased(KIND) };
        let own = scales.cast::<[f16; 16]>();
        // SAFETY: arrays of 16 elements, as `arrays` says.
        unsafe {
            let integers = own.add(if two { 2 } else { 1 }).cast::<[i8; 16]>();
            let scale = L::load_f16(&*own) * L::load_i8(&*integers.add(j));
            let bias = match two {
                true => L::load_f16(&*own.add(1)) * L::load_i8(&*integers.add(span + j)),
                false => L::splat(0.0),
            };
            (scale, bias)
        }
    }
}

/// A matrix in panels of codes.
pub(crate) struct Coded {
    rows: usize,
    pub(crate) cols: usize,
    pub(crate) group: usize,
    pub(crate) kind: Kind,
    /// What codes of a table stand for; for pairs without biases what any does.
    pub(crate) levels: [i8; 16],
    pub(crate) factors: Factors,
    /// Groups of a unit: their codes, then what makes their scales. A power of two.
    pub(crate) span: usize,
    /// Bytes of a unit's codes, of a unit and of a panel; known once, because
    /// kernels ask for each group.
    pub(crate) codes: usize,
    pub(crate) unit: usize,
    pub(crate) panel: usize,
    /// What turns a stored code into that of the panel: by adding, where it can.
    map: Box<[u8; 256]>,
    shift: Option<u8>,
    source: Source,
}

impl Coded {
    /// Vectors of codes of one group.
    pub(crate) fn vectors(&self) -> usize {
        self.group / if pairs(self.kind) { 8 } else { 4 }
    }

    /// How the kernels take `rows` rows of activations: in tiles from as many on as they
    /// are faster with.
    pub(crate) fn blocks(&self, isa: Detected, rows: usize) -> Blocks {
        let tiles = tiles::block(self, rows).filter(|_| isa.has_tiles());
        tiles.map_or_else(|| isa.vectors(rows), |rows| Blocks { rows, tiles: true })
    }

    /// Arrays of 16 elements, one a row, that make a unit's scales: how many of
    /// how many bytes, in order.
    fn arrays(&self) -> [(usize, usize); 2] {
        let each = if biased(self.kind) { 2 } else { 1 };
        match self.factors {
            Factors::Own(scalar) => [(0, 0), (each * self.span, scalar.bytes())],
            Factors::Integers => [(each, 2), (each * self.span, 1)],
        }
    }

    /// Group `g`'s unit, and its place there.
    #[inline(always)]
    pub(crate) fn place(&self, g: usize) -> (usize, usize) {
        (g >> self.span.trailing_zeros(), g & (self.span - 1))
    }

    /// Scale and bias of group `j` of a unit whose factors are `scales`.
    fn factors_of(&self, scales: &[u8], j: usize, lane: usize) -> (f32, f32) {
        let two = biased(self.kind);
        match self.factors {
            Factors::Own(scalar) => {
                let at = 16 * j * if two { 2 } else { 1 } + lane;
                let bias = if two {
                    scalar.get(scales, at + 16)
                } else {
                    0.0
                };
                (scalar.get(scales, at), bias)
            }
            Factors::Integers => {
                let n = self.arrays()[0].0;
                let integer = |at: usize| f32::from(scales[32 * n + 16 * at + lane] as i8);
                let scale = Scalar::F16.get(scales, lane) * integer(j);
                let bias = match two {
                    true => Scalar::F16.get(scales, 16 + lane) * integer(self.span + j),
                    false => 0.0,
                };
                (scale, bias)
            }
        }
    }

    /// Scales and biases, zeros if there are none, of group `j` of a unit whose
    /// factors start at `scales`.
    ///
    /// # Safety
    ///
    /// They are readable, and there is such a group.
    #[inline(always)]
    pub(crate) unsafe fn lanes<L: Lanes, const KIND: Kind>(
        &self,
        scales: *const u8,
        j: usize,
    ) -> (L, L) {
        // SAFETY: as promised.
        unsafe {
            match self.factors {
                Factors::Own(scalar) => {
                    with_element!(scalar, S => S::lanes::<L, KIND>(scales, self.span, j))
                }
                Factors::Integers => Integers::lanes::<L, KIND>(scales, self.span, j),
            }
        }
    }

    /// Row `row` dequantized, times `factor`.
    pub(crate) fn row(&self, row: usize, factor: f32, out: &mut [f32]) {
        let data = match &self.source {
            Source::Packed(data) => data.of::<u8>(),
            Source::Mapped(kept) => return packing::row(kept, row, factor, out),
        };
        let panel = &data[row / 16 * self.panel..][..self.panel];
        let lane = row % 16;
        let units = panel.chunks_exact(self.unit);
        for (unit, out) in units.zip(out.chunks_exact_mut(self.span * self.group)) {
            let (vectors, scales) = unit.split_at(self.codes);
            for (j, out) in out.chunks_exact_mut(self.group).enumerate() {
                let (scale, bias) = self.factors_of(scales, j, lane);
                let vectors = &vectors[j * self.vectors() * 64..];
                for (c, out) in out.iter_mut().enumerate() {
                    let byte = |at: usize| vectors[at * 64 + lane * 4 + c % 4];
                    let code = match pairs(self.kind) {
                        true => byte(c / 8) >> (c % 8 / 4 * 4) & 15,
                        false => byte(c / 4),
                    };
                    let value = match self.kind {
                        AFFINE4 | AFFINE8 => scale.mul_add(f32::from(code), bias),
                        LEVEL8 => scale * f32::from(code as i8),
                        _ => scale * f32::from(self.levels[usize::from(code)]),
                    };
                    *out = value * factor;
                }
            }
        }
    }
}

/// One worker's piece of a product: some panels for all rows.
pub(crate) struct Piece<'a> {
    pub(crate) w: &'a Coded,
    /// Panels `range`.
    pub(crate) data: &'a [u8],
    /// Rows of the output: `w`'s, or as many as are wanted of one panel.
    pub(crate) n_out: usize,
    pub(crate) x: Input<'a>,
    pub(crate) range: Range<usize>,
    pub(crate) y: &'a Split<'a, f32>,
}

/// Panels `range` of `w` for rows `run` of `x`, as `worker`.
pub(crate) fn piece(
    cpu: &Cpu,
    worker: usize,
    w: &Coded,
    x: &Rounded,
    run: Range<usize>,
    range: Range<usize>,
    y: &Split<'_, f32>,
) {
    debug_assert_eq!((w.group, w.cols), (x.group, x.cols));
    packing::each(cpu, w, worker, range, |range, data| {
        let piece = Piece {
            w,
            data,
            n_out: w.rows,
            x: x.view(run.clone()),
            range,
            y,
        };
        match x.blocks.tiles {
            true => tiles::multiply(cpu, piece),
            false => piece.multiply(cpu),
        }
    });
}

/// Up to 16 chosen rows of `w` for one row of `x`, as `worker`.
pub(crate) fn chosen(
    cpu: &Cpu,
    worker: usize,
    w: &Coded,
    x: &Rounded,
    row: usize,
    ids: &[u32],
    y: &mut [f32],
) {
    let n_out = y.len();
    let y = &Split::new(y);
    packing::chosen(cpu, w, worker, ids, |data| {
        let piece = Piece {
            w,
            data,
            n_out,
            x: x.view(row..row + 1),
            range: 0..1,
            y,
        };
        piece.multiply(cpu);
    });
}

/// A kernel for each kind of codes, in a module of its own: the largest of all, they take
/// the compiler longest, which works on modules side by side.
macro_rules! kernels {
    ($($kind:ident in $module:ident,)*) => {
        $(mod $module {
            use super::{$kind, Piece};
            use crate::arch::{ByteKernel, Bytes};

            pub(super) struct Of<'a>(pub(super) Piece<'a>);

            impl ByteKernel for Of<'_> {
                type Output = ();

                #[inline(always)]
                fn run<B: Bytes>(self) {
                    self.0.panels::<B, $kind>();
                }
            }
        })*

        impl Piece<'_> {
            /// Multiplies with vectors.
            fn multiply(self, cpu: &Cpu) {
                match self.w.kind {
                    $($kind => cpu.isa.run_bytes($module::Of(self)),)*
                    kind => unreachable!("no matrix has codes of kind {kind}"),
                }
            }
        }
    };
}

kernels! {
    AFFINE4 in affine4,
    AFFINE8 in affine8,
    LEVEL4 in level4,
    TABLE4 in table4,
    LEVEL8 in level8,
}

impl Piece<'_> {
    #[inline(always)]
    fn panels<B: Bytes, const KIND: Kind>(&self) {
        let sums = <B::Lanes as Lanes>::SUMS;
        let mut p = self.range.start;
        while p < self.range.end {
            // Several panels at once keep more sums under way, and share what is loaded
            // of the activations. They are streams to memory, too, of which a core reads
            // four 1.1 times as fast as two, and those 1.2 times as fast as one
            // (Sapphire Rapids). Three and four rows have registers for the outputs of
            // four panels but for the sums of two, so those take turns; more rows have not.
            let left = self.range.end - p;
            let r = match (sums, self.x.rows) {
                (24, 1..=4) if left >= 4 => 4,
                (24, _) if left >= 2 => 2,
                _ => 1,
            };
            for row in (0..self.x.rows).step_by(self.x.block) {
                match (sums, r, (self.x.rows - row).min(self.x.block)) {
                    (24, 4, 1) => self.block::<B, KIND, 1, 4, 4>(row, p),
                    (24, 4, 2) => self.block::<B, KIND, 2, 4, 4>(row, p),
                    (24, 4, 3) => self.block::<B, KIND, 3, 4, 2>(row, p),
                    (24, 4, _) => self.block::<B, KIND, 4, 4, 2>(row, p),
                    (24, 2, 1) => self.block::<B, KIND, 1, 2, 2>(row, p),
                    (24, 2, 2) => self.block::<B, KIND, 2, 2, 2>(row, p),
                    (24, 2, 3) => self.block::<B, KIND, 3, 2, 2>(row, p),
                    (24, 2, 4) => self.block::<B, KIND, 4, 2, 2>(row, p),
                    (24, 2, 5) => self.block::<B, KIND, 5, 2, 2>(row, p),
                    (24, 2, 6) => self.block::<B, KIND, 6, 2, 2>(row, p),
                    (24, 2, 7) => self.block::<B, KIND, 7, 2, 2>(row, p),
                    (24, 2, _) => self.block::<B, KIND, 8, 2, 2>(row, p),
                    (24, _, 8) => self.block::<B, KIND, 8, 1, 1>(row, p),
                    (24, _, 7) => self.block::<B, KIND, 7, 1, 1>(row, p),
                    (24, _, 6) => self.block::<B, KIND, 6, 1, 1>(row, p),
                    (24, _, 5) => self.block::<B, KIND, 5, 1, 1>(row, p),
                    (24 | 6, _, 4) => self.block::<B, KIND, 4, 1, 1>(row, p),
                    (24 | 6, _, 3) => self.block::<B, KIND, 3, 1, 1>(row, p),
                    (24 | 6, _, 2) => self.block::<B, KIND, 2, 1, 1>(row, p),
                    _ => self.block::<B, KIND, 1, 1, 1>(row, p),
                }
            }
            p += r;
        }
    }

    /// The block of `M` rows from `row`, `R` panels from `p`, the sums of `S` at a time.
    #[inline(always)]
    #[expect(
        clippy::needless_range_loop,
        reason = "an index names the same row or panel in several arrays"
    )]
    fn block<B: Bytes, const KIND: Kind, const M: usize, const R: usize, const S: usize>(
        &self,
        row: usize,
        p: usize,
    ) {
        let (cols, group, unit, panel) = (self.x.cols, self.w.group, self.w.unit, self.w.panel);
        let (vectors, span, groups) = (self.w.vectors(), self.w.span, cols / group);
        let data = &self.data[(p - self.range.start) * panel..][..R * panel];
        let q = self.x.q[row * cols..(row + M) * cols].as_chunks::<8>().0;
        let factors = &self.x.factors[row * FACTORS * groups..(row + M) * FACTORS * groups];
        // Vectors of eight columns.
        let wide = if pairs(KIND) { 1 } else { 2 };
        assert_eq!(
            (vectors * 8, groups * group, groups / span * span),
            (wide * group, cols, groups),
            "vectors fill the row"
        );
        assert!(
            vectors.is_multiple_of(2 * wide) && unit >= span * vectors * 64,
            "vectors come in pairs of eights"
        );
        let table = B::table(&self.w.levels);
        // Rows that are multiplied two at once.
        let paired = if B::PAIRED { M / 2 * 2 } else { 0 };
        let mut y = [[B::Lanes::splat(0.0); R]; M];
        for g in 0..groups {
            let (at, j) = self.w.place(g);
            let at = at * unit;
            for first in (0..R).step_by(S) {
                let mut sums = [[B::zero(); S]; M];
                // SAFETY: the slices above hold `R` panels of `groups / span` units, each
                // with `vectors` vectors a group and its factors behind them, and `M` rows
                // of `groups * group / 8` eights and `groups` factors.
                unsafe {
                    let factors = factors.as_ptr().add(FACTORS * g * M);
                    if !biased(KIND) {
                        // Levels are seen higher than they are: less that much of each.
                        for m in 0..M {
                            let start = factors.add(FACTORS * m).cast::<i32>();
                            for r in 0..S {
                                if KIND == LEVEL4 {
                                    sums[m][r] = B::start(*start.add(2));
                                } else if B::OFFSET > 0 {
                                    sums[m][r] = B::start(*start.add(3));
                                }
                            }
                        }
                    }
                    for m in (0..paired).step_by(2) {
                        for r in 0..S {
                            [sums[m][r], sums[m + 1][r]] = B::pair([sums[m][r], sums[m + 1][r]]);
                        }
                    }
                    let mut codes = data.as_ptr().add(at).cast::<[u8; 64]>().add(j * vectors);
                    let mut x = q.as_ptr().add(g * (group / 8) * M).cast::<[i8; 4]>();
                    let stride = panel / 64;
                    // Where a panel ends, its stream goes on `R` panels later.
                    let skip = (R - 1) * panel;
                    let ahead = AHEAD + if at + AHEAD < panel { 0 } else { skip };
                    for _ in 0..vectors / (2 * wide) {
                        for eight in 0..2 {
                            let mut both = [(table, table); S];
                            for r in 0..S {
                                let codes = codes.add((first + r) * stride + eight * wide);
                                // One line for each that is read, never many at once: a
                                // burst waits for free buffers, and arithmetic with it.
                                if row == 0 {
                                    for line in 0..wide {
                                        let line = codes.wrapping_add(line).cast::<u8>();
                                        B::Lanes::prefetch(line.wrapping_add(ahead));
                                    }
                                }
                                let line = B::load(&*codes);
                                both[r] = match KIND {
                                    TABLE4 => (
                                        B::lookup(table, B::low(line)),
                                        B::lookup(table, B::high(line)),
                                    ),
                                    AFFINE4 | LEVEL4 => (B::low(line), B::high(line)),
                                    LEVEL8 => (B::signed(line), B::signed(B::load(&*codes.add(1)))),
                                    _ => (line, B::load(&*codes.add(1))),
                                };
                            }
                            let x = x.add(2 * eight * M);
                            for m in (0..paired).step_by(2) {
                                for r in 0..S {
                                    let (two, (first, second)) =
                                        ([sums[m][r], sums[m + 1][r]], both[r]);
                                    let x = x.add(2 * m);
                                    [sums[m][r], sums[m + 1][r]] = match KIND {
                                        TABLE4 | LEVEL8 => {
                                            B::add_pair::<true>(two, first, second, x)
                                        }
                                        _ => B::add_pair::<false>(two, first, second, x),
                                    };
                                }
                            }
                            for m in paired..M {
                                let x = x.add(2 * m);
                                for r in 0..S {
                                    let mut sum = sums[m][r];
                                    for (codes, x) in [(both[r].0, *x), (both[r].1, *x.add(1))] {
                                        sum = match KIND {
                                            AFFINE4 | LEVEL4 => B::add_small(sum, codes, x),
                                            AFFINE8 => B::add(sum, codes, x),
                                            _ => B::add_signed(sum, codes, x),
                                        };
                                    }
                                    sums[m][r] = sum;
                                }
                            }
                        }
                        codes = codes.add(2 * wide);
                        x = x.add(4 * M);
                    }
                    for m in (0..paired).step_by(2) {
                        for r in 0..S {
                            [sums[m][r], sums[m + 1][r]] = B::unpair([sums[m][r], sums[m + 1][r]]);
                        }
                    }
                    for r in 0..S {
                        let r = first + r;
                        let scales = data.as_ptr().add(r * panel + at + span * vectors * 64);
                        if row == 0 && j == 0 {
                            for line in (span * vectors * 64..unit).step_by(64) {
                                let line = data.as_ptr().wrapping_add(r * panel + at + line);
                                B::Lanes::prefetch(line.wrapping_add(ahead));
                            }
                        }
                        let (scale, bias): (B::Lanes, B::Lanes) =
                            self.w.lanes::<_, KIND>(scales, j);
                        for m in 0..M {
                            let own = factors.add(FACTORS * m);
                            let d = B::Lanes::splat(*own);
                            y[m][r] = (B::float(sums[m][r - first]) * scale).mul_add(d, y[m][r]);
                            if biased(KIND) {
                                y[m][r] = bias.mul_add(B::Lanes::splat(*own.add(1)), y[m][r]);
                            }
                        }
                    }
                }
            }
        }
        for (m, y) in y.into_iter().enumerate() {
            for (r, y) in y.into_iter().enumerate() {
                let first = (p + r) * 16;
                let at = (row + m) * self.n_out + first;
                // SAFETY: these panels' outputs are this piece's.
                store(y, unsafe {
                    self.y.part(at..at + (self.n_out - first).min(16))
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn rounding_keeps_the_largest_value_and_its_sign() {
        let mut q = [0; 4];
        assert_eq!(round_group(&[0.0; 4], &mut q), (0.0, 0.0));
        let (d, sum) = round_group(&[0.5, -2.0, 1.0, 0.0], &mut q);
        assert_eq!((q, d, sum), ([32, -127, 64, 0], 2.0 / 127.0, -31.0));
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(round_group(&[0.5, odd, 1.0, 0.0], &mut q).0.is_nan());
        }
    }
}
