//! Many rows in tiles: some columns of a panel are unpacked once for all of them.

use crate::arch::{self, Bytes, Lanes, TILE_ROWS as M, TileKernel, TileRegisters, store};
use crate::matmul::activations::GROUP_FACTORS;
use crate::matmul::quantized::{
    AFFINE4, AFFINE8, CodeKind, LEVEL4, LEVEL8, QuantizedWork, TABLE4, biased, pairs,
};
use crate::microkernel::PREFETCH_DISTANCE;
use backend::math::Float;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Columns worked on at a time where rows fill several tiles: 8 KiB of codes and as
/// many of activations stay in the first cache.
const DEPTH: usize = 512;

/// PlainPanels at a time, for rows that fill several tiles.
const WIDE: usize = 2;

/// Rows whose sums are kept beside the codes of some columns.
const ROWS: usize = 256;

/// Groups whose sums are on their way from the tiles, which takes about three times
/// as long as the work on them.
const PRODUCT_DELAY: usize = 2;

/// Steps in flight at most: a step's codes and sums lie in place `step % STAGES`.
const STAGES: usize = 4;

/// The vectors beside the tiles.
type LanesOf<T> = <<T as TileRegisters>::Bytes as Bytes>::Lanes;

/// Codes as bytes, of [`DEPTH`] columns or of [`STAGES`] groups; in the places of
/// their pages where the activations of the same groups lie.
#[repr(C, align(4096))]
struct Unpacked([[u8; 64]; DEPTH / 4]);

/// Where sums wait; likewise.
#[repr(C, align(4096))]
struct PendingSums([[[i32; 16]; M]; STAGES]);

/// Outputs under way.
#[repr(C, align(64))]
struct Outputs([[[f32; 16]; ROWS]; WIDE]);

/// Some groups of one panel.
#[derive(Clone, Copy)]
struct PanelGroups {
    panel: usize,
    groups: (usize, usize),
    /// Where the codes lie as bytes.
    codes: *const u8,
}

impl TileKernel for QuantizedWork<'_> {
    type Output = ();

    #[inline(always)]
    fn run<T: TileRegisters>(self) {
        assert_eq!(self.x.block, M, "rows of a tile");
        // SAFETY: entered through `run_tiles`, which is where tiles may be made.
        let tiles = unsafe { T::configure(M, arch::TILE_DEPTH) };
        match self.w.kind {
            AFFINE4 => self.rows::<T, AFFINE4>(&tiles),
            AFFINE8 => self.rows::<T, AFFINE8>(&tiles),
            LEVEL4 | TABLE4 => self.rows::<T, TABLE4>(&tiles),
            _ => self.rows::<T, LEVEL8>(&tiles),
        }
    }
}

impl QuantizedWork<'_> {
    #[inline(always)]
    fn rows<T: TileRegisters, const KIND: CodeKind>(&self, tiles: &T) {
        let (x, group) = (self.x, self.w.group);
        assert!(
            (DEPTH / STAGES).is_multiple_of(group) && x.cols.is_multiple_of(group),
            "whole groups in every part"
        );
        let mut pending = PendingSums([[[0; 16]; M]; STAGES]);
        for p in self.range.clone().step_by(WIDE) {
            let panels = p..(p + WIDE).min(self.range.end);
            for row in (0..x.rows).step_by(ROWS) {
                let rows = row..(row + ROWS).min(x.rows);
                self.many::<T, KIND>(tiles, panels.clone(), rows, &mut pending);
            }
        }
    }

    /// Up to `WIDE` panels for up to `ROWS` rows.
    #[inline(always)]
    fn many<T: TileRegisters, const KIND: CodeKind>(
        &self,
        tiles: &T,
        panels: Range<usize>,
        rows: Range<usize>,
        pending: &mut PendingSums,
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
                    let strip = PanelGroups {
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
                        self.strip::<T, KIND>(tiles, strip, row, &mut y, pending);
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
    unsafe fn unpack<B: Bytes, const KIND: CodeKind>(
        &self,
        panel: usize,
        g: usize,
        mut to: *mut [u8; 64],
    ) {
        let vectors = self.w.vectors();
        let (unit, j) = self.place(panel, g);
        let levels = B::load(&std::array::from_fn(|i| self.w.levels[i % 16] as u8));
        for codes in &unit.as_chunks::<64>().0[j * vectors..(j + 1) * vectors] {
            B::Lanes::prefetch(codes.as_ptr().wrapping_add(PREFETCH_DISTANCE));
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
                B::Lanes::prefetch(line.as_ptr().wrapping_add(PREFETCH_DISTANCE));
            }
        }
    }

    /// Adds the groups of `strip` to the outputs `y` of the block from `row`.
    ///
    /// # Safety
    ///
    /// The strip's codes are readable.
    #[inline(always)]
    unsafe fn strip<T: TileRegisters, const KIND: CodeKind>(
        &self,
        tiles: &T,
        strip: PanelGroups,
        row: usize,
        y: &mut [LanesOf<T>; M],
        pending: &mut PendingSums,
    ) {
        let (x, group) = (self.x, self.w.group);
        let groups = x.cols / group;
        let (first, end) = strip.groups;
        let q = &x.q[row * x.cols..(row + M) * x.cols];
        let factors = &x.factors[row * GROUP_FACTORS * groups..(row + M) * GROUP_FACTORS * groups];
        assert!(end <= groups, "groups of the row");
        // Two steps of each group, `PRODUCT_DELAY` groups apart: products, outputs.
        for step in first..end + PRODUCT_DELAY {
            if step < end {
                // SAFETY: a group of a block of activations and of the strip's codes.
                unsafe {
                    let codes = strip.codes.add((step - first) * 16 * group);
                    let x = q.as_ptr().add(step * group * M);
                    let sums = pending.0[step % STAGES].as_mut_ptr();
                    if biased(KIND) {
                        tiles.multiply::<false>(x, group, codes, group > 64, sums);
                    } else {
                        tiles.multiply::<true>(x, group, codes, group > 64, sums);
                    }
                }
            }
            if step < first + PRODUCT_DELAY {
                continue;
            }
            let g = step - PRODUCT_DELAY;
            let (unit, j) = self.place(strip.panel, g);
            // SAFETY: the unit of the group, whose factors follow its codes.
            let (scale, bias): (LanesOf<T>, LanesOf<T>) =
                unsafe { self.w.lanes::<_, KIND>(unit[self.w.codes..].as_ptr(), j) };
            let exact = &pending.0[g % STAGES];
            for m in 0..M {
                // SAFETY: the factors of each group and row of the block, sliced above.
                let (d, e) = unsafe {
                    let at = factors.as_ptr().add(GROUP_FACTORS * (g * M + m));
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
