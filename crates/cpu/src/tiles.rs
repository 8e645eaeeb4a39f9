//! Products of coded weights with more than a few rows, in tiles of 16 x 16 sums.
//!
//! The codes of a group are a tile as they lie in a panel, once they are bytes; so
//! a panel is unpacked once for all rows. Sums of a group leave the tile for
//! memory and are added to the outputs of [`coded::dot`](crate::coded::dot) in its
//! order: only the integers are summed elsewhere.

use crate::Cpu;
use crate::arch::{self, Bytes, Lanes, TILE as M, TileKernel, Tiles, store};
use crate::coded::{
    AFFINE4, AFFINE8, Coded, FACTORS, Factors, Integers, Kind, LEVEL4, LEVEL8, Piece, Scales,
    TABLE4, biased, pairs,
};
use crate::tile::AHEAD;
use backend::math::Float;
use half::{bf16, f16};
use quant::Scalar;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Kernels for few rows: the codes, columns of a group, groups of a unit and factors that
/// each is for, and from how many rows on it is faster than vectors (Sapphire Rapids,
/// weights from memory): where codes take a byte, memory is what vectors wait for, too.
macro_rules! few {
    ($($kind:ident, $group:tt, $span:tt, $factors:pat => $scales:ty, from $rows:literal;)*) => {
        /// Rows from which on tiles multiply blocks of few faster than vectors do.
        fn from(w: &Coded) -> Option<usize> {
            match (w.kind, w.group, w.span, w.factors) {
                $(($kind, $group, $span, $factors) => Some($rows),)*
                _ => None,
            }
        }

        /// Multiplies blocks of few rows.
        fn few(cpu: &Cpu, piece: Piece<'_>) {
            match (piece.w.kind, piece.w.group, piece.w.span, piece.w.factors) {
                $(($kind, $group, $span, $factors) => {
                    few!(@$group, cpu, piece, ($kind, $span, $scales));
                })*
                other => unreachable!("no kernel for {other:?}"),
            }
        }
    };
    (@32, $($to:tt)*) => { few!(@@ 32, (8, 2), $($to)*) };
    (@64, $($to:tt)*) => { few!(@@ 64, (8, 2) (16, 1), $($to)*) };
    (@128, $($to:tt)*) => { few!(@@ 128, (16, 1), $($to)*) };
    (@@ $group:tt, $(($block:tt, $panels:tt))*, $cpu:ident, $piece:ident, $of:tt) => {
        match $piece.x.block {
            $($block => $cpu.isa.run_tiles(few!(@@@ $group, $block, $panels, $piece, $of)),)*
            other => unreachable!("no kernel for blocks of {other} rows"),
        }
    };
    (@@@ $group:tt, $block:tt, $panels:tt, $piece:ident, ($kind:ident, $span:tt, $scales:ty)) => {
        Few::<$scales, $kind, $group, $span, $block, $panels>($piece, PhantomData)
    };
}

few! {
    LEVEL4, 32, 2, Factors::Own(Scalar::F16) => f16, from 8;
    TABLE4, 32, 2, Factors::Own(Scalar::F16) => f16, from 8;
    LEVEL8, 32, 2, Factors::Own(Scalar::F16) => f16, from 14;
    AFFINE4, 32, 8, Factors::Integers => Integers, from 8;
    AFFINE8, 32, 8, Factors::Integers => Integers, from 14;
    AFFINE4, 32, 1, Factors::Own(Scalar::Bf16) => bf16, from 8;
    AFFINE4, 64, 1, Factors::Own(Scalar::Bf16) => bf16, from 8;
    AFFINE8, 64, 1, Factors::Own(Scalar::Bf16) => bf16, from 14;
    AFFINE4, 128, 1, Factors::Own(Scalar::Bf16) => bf16, from 14;
    AFFINE8, 128, 1, Factors::Own(Scalar::Bf16) => bf16, from 14;
}

/// Rows of a block where tiles multiply `rows` rows with `w` faster than vectors do. A tile
/// takes as long however many of its rows there are, so at most an eighth may be missing.
pub(crate) fn block(w: &Coded, rows: usize) -> Option<usize> {
    let wide = w.group >= arch::DEPTH;
    let whole = w.cols.is_multiple_of(w.group.max(arch::DEPTH));
    let block = if wide && rows > FEW { M } else { FEW };
    match from(w) {
        _ if wide && rows > M => Some(M),
        Some(from) if rows >= from && whole => {
            (rows.next_multiple_of(block) * 7 <= rows * 8).then_some(block)
        }
        _ => None,
    }
}

/// Multiplies in tiles.
pub(crate) fn multiply(cpu: &Cpu, piece: Piece<'_>) {
    match piece.x.rows > M && piece.x.block == M {
        true => cpu.isa.run_tiles(piece),
        false => few(cpu, piece),
    }
}

/// Rows of which two groups of 32 columns share a tile.
const FEW: usize = M / 2;

/// Columns worked on at a time where rows fill several tiles: 8 KiB of codes and as
/// many of activations stay in the first cache.
const DEPTH: usize = 512;

/// Panels at a time, for rows that fill several tiles.
const WIDE: usize = 2;

/// Rows whose sums are kept beside the codes of some columns.
const ROWS: usize = 256;

/// Groups whose sums are on their way from the tiles, which takes about three times
/// as long as the work on them.
const UNDERWAY: usize = 2;

/// Steps in flight at most: a step's codes and sums lie in place `step % RING`.
const RING: usize = 4;

/// Turns after which sums leave their tile.
const TURNS: usize = 2;

/// Steps between a product and the outputs of its sums: neither the stores of this step
/// nor those of the last go to the places of a page that its loads come from.
const WAITED: usize = 4;

/// The vectors beside the tiles.
type LanesOf<T> = <<T as Tiles>::Bytes as Bytes>::Lanes;

/// Codes as bytes, of [`DEPTH`] columns or of [`RING`] groups; in the places of
/// their pages where the activations of the same groups lie.
#[repr(C, align(4096))]
struct Unpacked([[u8; 64]; DEPTH / 4]);

/// Where sums wait; likewise.
#[repr(C, align(4096))]
struct Waiting([[[i32; 16]; M]; RING]);

/// Codes as bytes and sums of [`RING`] steps of few rows; likewise.
#[repr(C, align(4096))]
struct Room {
    codes: [[[u8; 64]; 32]; RING],
    sums: [[[i32; 16]; M]; RING],
}

/// Outputs under way.
#[repr(C, align(64))]
struct Outputs([[[f32; 16]; ROWS]; WIDE]);

/// Some groups of one panel.
#[derive(Clone, Copy)]
struct Strip {
    panel: usize,
    groups: (usize, usize),
    /// Where the codes lie as bytes.
    codes: *const u8,
}

/// Blocks of `B` rows for `R` panels at a time, a panel a step, without a pause between them. A step's tile is of one
/// group of `GROUP` columns, or of two groups of 32: activations then have each row twice,
/// with the columns of one group and with those of the other, and zeros beside.
///
/// Sizes are known when this is compiled, and all sums stay in registers: with sizes from
/// memory it took up to twice as long (Sapphire Rapids).
struct Few<
    'a,
    S,
    const KIND: Kind,
    const GROUP: usize,
    const SPAN: usize,
    const B: usize,
    const R: usize,
>(Piece<'a>, PhantomData<S>);

impl<S, const KIND: Kind, const GROUP: usize, const SPAN: usize, const B: usize, const R: usize>
    TileKernel for Few<'_, S, KIND, GROUP, SPAN, B, R>
where
    S: Scales,
{
    type Output = ();

    /// Unpacking, products and outputs are of different steps, so that they fill each
    /// other's gaps: where each waited for the one before, 8 rows would take 1.4 times as
    /// long (Sapphire Rapids).
    #[inline(always)]
    fn run<T: Tiles>(self) {
        let Piece { w, data, x, .. } = self.0;
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
            (blocks * B * groups * line, blocks * B * groups * FACTORS),
            "all rows of the blocks"
        );
        let data = &data[..(last + 1) * panel];
        // SAFETY: entered through `run_tiles`, which is where tiles may be made.
        let tiles = unsafe { T::configure(B * Self::SHARED, arch::DEPTH) };
        let mut room = MaybeUninit::<Room>::uninit();
        let room = room.as_mut_ptr();
        let (q, factors) = (x.q.as_ptr(), x.factors.as_ptr());
        let levels = T::Bytes::load(&std::array::from_fn(|i| w.levels[i % 16] as u8));
        let mut y = [[LanesOf::<T>::splat(0.0); R]; B];
        let [mut unpacking, mut multiplying, mut adding] = [Place::default(); 3];
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
                    let product = step.wrapping_sub(UNDERWAY);
                    // Sums of steps that there are not push out those of the last.
                    if product < n * R + TURNS {
                        let x = multiplying.row * groups + multiplying.unit * Self::SHARED * B;
                        let x = q.add(x * line);
                        if $r == 0 || GROUP > arch::DEPTH {
                            tiles.load(x, line);
                        }
                        let codes = match pairs(KIND) {
                            true => codes.add(product % RING * line * 16).cast_const(),
                            false => {
                                panel!(multiplying, $r).add(Self::codes_at(multiplying.unit, 0))
                            }
                        };
                        let to = sums.add(product.wrapping_sub(TURNS) % RING).cast();
                        match (const { !biased(KIND) }, const { GROUP > arch::DEPTH }) {
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
                            let to = codes.add(step % RING * line * 16 + g * GROUP * 16);
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
                    if $round >= (UNDERWAY + WAITED) / R {
                        // Where a panel ends, its stream goes on `R` panels later.
                        let ahead = unpacking.unit * Self::STREAM + AHEAD;
                        let ahead = ahead + if ahead < panel { 0 } else { (R - 1) * panel };
                        let ahead = panel!(unpacking, $r).wrapping_add(ahead);
                        for g in 0..Self::SHARED {
                            let group = adding.unit * Self::SHARED + g;
                            let scales = group / SPAN * Self::UNIT + Self::UNIT_CODES;
                            let scales = panel!(adding, $r).add(scales);
                            let (scale, bias): (LanesOf<T>, LanesOf<T>) =
                                S::lanes::<_, KIND>(scales, SPAN, group % SPAN);
                            let done = (step - (UNDERWAY + WAITED)) % RING;
                            let exact = sums.add(done).cast::<[i32; 16]>().add(g * B);
                            let factors = factors.add((adding.row * groups + group * B) * FACTORS);
                            for m in 0..B {
                                // Few lines at a time: many would wait for free buffers, and
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
                                let d = LanesOf::<T>::splat(*factors.add(FACTORS * m));
                                y[m][$r] = (exact * scale).mul_add(d, y[m][$r]);
                                if biased(KIND) {
                                    let e = LanesOf::<T>::splat(*factors.add(FACTORS * m + 1));
                                    y[m][$r] = bias.mul_add(e, y[m][$r]);
                                }
                            }
                        }
                    }
                }
            };
        }
        for round in 0..n + (UNDERWAY + WAITED) / R {
            // SAFETY: places are of panels and rows that there are, of the sizes asserted
            // above; a ring of codes and of sums.
            unsafe {
                step!(round, 0);
                step!(round, 1);
            }
            if round + 1 < n {
                unpacking = unpacking.next(units, B, x.rows, R);
            }
            if (UNDERWAY / R..n - 1 + UNDERWAY / R).contains(&round) {
                multiplying = multiplying.next(units, B, x.rows, R);
            }
            if round >= (UNDERWAY + WAITED) / R {
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
struct Place {
    /// The first of the panels, counted from the piece's.
    panel: usize,
    /// The first row of the block.
    row: usize,
    /// The tile of columns.
    unit: usize,
}

impl Place {
    /// The next of `units` tiles, of all blocks of `block` of `rows` rows, `panels` at a time.
    #[inline(always)]
    fn next(self, units: usize, block: usize, rows: usize, panels: usize) -> Self {
        let Place { panel, row, unit } = self;
        if unit + 1 < units {
            Place {
                unit: unit + 1,
                ..self
            }
        } else if row + block < rows {
            Place {
                panel,
                row: row + block,
                unit: 0,
            }
        } else {
            Place {
                panel: panel + panels,
                row: 0,
                unit: 0,
            }
        }
    }
}

impl<S, const KIND: Kind, const GROUP: usize, const SPAN: usize, const B: usize, const R: usize>
    Few<'_, S, KIND, GROUP, SPAN, B, R>
where
    S: Scales,
{
    /// Groups of a step, and their columns.
    const SHARED: usize = if GROUP < arch::DEPTH {
        arch::DEPTH / GROUP
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
    fn put(&self, out: &[[[f32; 16]; R]; B], place: Place, last: usize) {
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

impl TileKernel for Piece<'_> {
    type Output = ();

    #[inline(always)]
    fn run<T: Tiles>(self) {
        assert_eq!(self.x.block, M, "rows of a tile");
        // SAFETY: entered through `run_tiles`, which is where tiles may be made.
        let tiles = unsafe { T::configure(M, arch::DEPTH) };
        match self.w.kind {
            AFFINE4 => self.rows::<T, AFFINE4>(&tiles),
            AFFINE8 => self.rows::<T, AFFINE8>(&tiles),
            LEVEL4 | TABLE4 => self.rows::<T, TABLE4>(&tiles),
            _ => self.rows::<T, LEVEL8>(&tiles),
        }
    }
}

impl Piece<'_> {
    #[inline(always)]
    fn rows<T: Tiles, const KIND: Kind>(&self, tiles: &T) {
        let (x, group) = (self.x, self.w.group);
        assert!(
            (DEPTH / RING).is_multiple_of(group) && x.cols.is_multiple_of(group),
            "whole groups in every part"
        );
        let mut waiting = Waiting([[[0; 16]; M]; RING]);
        for p in self.range.clone().step_by(WIDE) {
            let panels = p..(p + WIDE).min(self.range.end);
            for row in (0..x.rows).step_by(ROWS) {
                let rows = row..(row + ROWS).min(x.rows);
                self.many::<T, KIND>(tiles, panels.clone(), rows, &mut waiting);
            }
        }
    }

    /// Up to `WIDE` panels for up to `ROWS` rows.
    #[inline(always)]
    fn many<T: Tiles, const KIND: Kind>(
        &self,
        tiles: &T,
        panels: Range<usize>,
        rows: Range<usize>,
        waiting: &mut Waiting,
    ) {
        let group = self.w.group;
        let groups = self.x.cols / group;
        let mut unpacked = [const { MaybeUninit::<Unpacked>::uninit() }; WIDE];
        let mut outputs = MaybeUninit::<Outputs>::uninit();
        let outputs = outputs.as_mut_ptr();
        for first in (0..groups).step_by(DEPTH / group) {
            let end = (first + DEPTH / group).min(groups);
            // No closures: they would be compiled without the instruction set.
            for (r, panel) in panels.clone().enumerate() {
                let mut to = unpacked[r].as_mut_ptr().cast::<[u8; 64]>();
                for g in first..end {
                    // SAFETY: there is room for `DEPTH` columns.
                    unsafe {
                        self.unpack::<T::Bytes, KIND>(panel, g, to);
                        to = to.add(group / 4);
                    }
                }
            }
            for row in rows.clone().step_by(M) {
                for (r, panel) in panels.clone().enumerate() {
                    let mut y = [LanesOf::<T>::splat(0.0); M];
                    let strip = Strip {
                        panel,
                        groups: (first, end),
                        codes: unpacked[r].as_ptr().cast(),
                    };
                    // SAFETY: the outputs of a block's rows, written before they are
                    // read; the strip's codes are there.
                    unsafe {
                        let at = (&raw mut (*outputs).0[r]).cast::<[f32; 16]>();
                        let at = at.add(row - rows.start);
                        if first > 0 {
                            for (m, y) in y.iter_mut().enumerate() {
                                *y = LanesOf::<T>::load(&*at.add(m));
                            }
                        }
                        self.strip::<T, KIND>(tiles, strip, row, &mut y, waiting);
                        if end < groups {
                            for (m, y) in y.iter().enumerate() {
                                y.store(&mut *at.add(m));
                            }
                        } else {
                            for (m, &y) in y[..(rows.end - row).min(M)].iter().enumerate() {
                                store(y, self.out(row + m, panel));
                            }
                        }
                    }
                }
            }
        }
    }

    /// The outputs of a row and a panel.
    ///
    /// # Safety
    ///
    /// One at a time, and no other worker has the panel.
    #[inline(always)]
    #[expect(clippy::mut_from_ref, reason = "the contract forbids overlap")]
    unsafe fn out(&self, row: usize, panel: usize) -> &mut [f32] {
        let start = row * self.n_out + panel * 16;
        // SAFETY: as promised.
        unsafe {
            self.y
                .part(start..start + (self.n_out - panel * 16).min(16))
        }
    }

    /// Where group `g` of a panel lies: its unit, and its place in it.
    #[inline(always)]
    fn place(&self, panel: usize, g: usize) -> (&[u8], usize) {
        let (at, j) = self.w.place(g);
        let start = (panel - self.range.start) * self.w.panel + at * self.w.unit;
        (&self.data[start..start + self.w.unit], j)
    }

    /// Writes a group's codes as bytes, those of levels as the levels.
    ///
    /// # Safety
    ///
    /// There is room for `group / 4` vectors.
    #[inline(always)]
    unsafe fn unpack<B: Bytes, const KIND: Kind>(
        &self,
        panel: usize,
        g: usize,
        mut to: *mut [u8; 64],
    ) {
        let vectors = self.w.vectors();
        let (unit, j) = self.place(panel, g);
        let levels = B::load(&std::array::from_fn(|i| self.w.levels[i % 16] as u8));
        for codes in &unit.as_chunks::<64>().0[j * vectors..(j + 1) * vectors] {
            B::Lanes::prefetch(codes.as_ptr().wrapping_add(AHEAD));
            let codes = B::load(codes);
            // SAFETY: a vector for each of the group's, two where codes lie in pairs.
            unsafe {
                if pairs(KIND) {
                    let (mut low, mut high) = (B::low(codes), B::high(codes));
                    if !biased(KIND) {
                        (low, high) = (B::lookup(levels, low), B::lookup(levels, high));
                    }
                    B::store(low, &mut *to);
                    B::store(high, &mut *to.add(1));
                    to = to.add(2);
                } else {
                    B::store(codes, &mut *to);
                    to = to.add(1);
                }
            }
        }
        if j == 0 {
            for line in unit[self.w.codes..].chunks(64) {
                B::Lanes::prefetch(line.as_ptr().wrapping_add(AHEAD));
            }
        }
    }

    /// Adds the groups of `strip` to the outputs `y` of the block from `row`.
    ///
    /// # Safety
    ///
    /// The strip's codes are readable.
    #[inline(always)]
    unsafe fn strip<T: Tiles, const KIND: Kind>(
        &self,
        tiles: &T,
        strip: Strip,
        row: usize,
        y: &mut [LanesOf<T>; M],
        waiting: &mut Waiting,
    ) {
        let (x, group) = (self.x, self.w.group);
        let groups = x.cols / group;
        let (first, end) = strip.groups;
        let q = &x.q[row * x.cols..(row + M) * x.cols];
        let factors = &x.factors[row * FACTORS * groups..(row + M) * FACTORS * groups];
        assert!(end <= groups, "groups of the row");
        // Two steps of each group, `UNDERWAY` groups apart: products, outputs.
        for step in first..end + UNDERWAY {
            if step < end {
                // SAFETY: a group of a block of activations and of the strip's codes.
                unsafe {
                    let codes = strip.codes.add((step - first) * 16 * group);
                    let x = q.as_ptr().add(step * group * M);
                    let sums = waiting.0[step % RING].as_mut_ptr();
                    if biased(KIND) {
                        tiles.multiply::<false>(x, group, codes, group > 64, sums);
                    } else {
                        tiles.multiply::<true>(x, group, codes, group > 64, sums);
                    }
                }
            }
            if step < first + UNDERWAY {
                continue;
            }
            let g = step - UNDERWAY;
            let (unit, j) = self.place(strip.panel, g);
            // SAFETY: the unit of the group, whose factors follow its codes.
            let (scale, bias): (LanesOf<T>, LanesOf<T>) =
                unsafe { self.w.lanes::<_, KIND>(unit[self.w.codes..].as_ptr(), j) };
            let exact = &waiting.0[g % RING];
            for m in 0..M {
                // SAFETY: the factors of each group and row of the block, sliced above.
                let (d, e) = unsafe {
                    let at = factors.as_ptr().add(FACTORS * (g * M + m));
                    (LanesOf::<T>::splat(*at), LanesOf::<T>::splat(*at.add(1)))
                };
                let exact = T::Bytes::float(T::Bytes::load_sums(&exact[m]));
                y[m] = (exact * scale).mul_add(d, y[m]);
                if biased(KIND) {
                    y[m] = bias.mul_add(e, y[m]);
                }
            }
        }
    }
}
