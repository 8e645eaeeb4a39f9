//! Many rows in tiles: some columns of a panel are unpacked once for all of them.
//!
//! ```text
//! for each PANELS panels, each ROWS rows:
//!   for each DEPTH columns:                       8 KiB of codes a panel, as bytes
//!     unpack the panels' codes
//!     for each 16 rows, each panel:
//!       for each group: product ─▶ pending sums ─▶ (PRODUCT_DELAY groups later) y
//! ```

use crate::arch::{self, Bytes, Lanes, TILE_ROWS as M, TileKernel, TileRegisters, store};
use crate::matmul::activations::TILE_FACTORS;
use crate::matmul::quantized::{
    AFFINE4, AFFINE8, CodeKind, LEVEL4, LEVEL8, QuantizedWork, TABLE4, biased, pairs,
};
use crate::microkernel::PREFETCH_DISTANCE;
use backend::math::Float;
use std::mem::MaybeUninit;
use std::ops::Range;

/// Columns that are worked on at a time: 8 KiB of codes and as many of activations stay in the
/// first-level cache.
const DEPTH: usize = 512;

/// Panels that are worked on at a time.
const PANELS: usize = 2;

/// Rows whose sums are kept beside the codes of some columns.
const ROWS: usize = 256;

/// Groups between a product and the outputs of its sums: sums take about three times as long to
/// leave a tile as the work on them.
const PRODUCT_DELAY: usize = 2;

/// Groups whose sums are kept: those of group `g` lie in stage `g % STAGES`.
const STAGES: usize = 4;

/// The vectors beside the tiles.
type LanesOf<T> = <<T as TileRegisters>::Bytes as Bytes>::Lanes;

/// Codes as bytes, of [`DEPTH`] columns, in the places of their pages where the activations of the
/// same groups lie.
#[repr(C, align(4096))]
struct Unpacked([[u8; 64]; DEPTH / 4]);

/// Sums on their way from tiles to outputs, page-aligned like [`Unpacked`].
#[repr(C, align(4096))]
struct PendingSums([[[i32; 16]; M]; STAGES]);

/// Outputs that some columns have been added to.
#[repr(C, align(64))]
struct Outputs([[[f32; 16]; ROWS]; PANELS]);

/// Some groups of one panel, unpacked.
#[derive(Clone, Copy)]
struct PanelGroups {
    panel: usize,
    /// The first group, and the one after the last.
    groups: (usize, usize),
    /// The codes as bytes.
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
    /// Multiplies all panels and rows, some at a time.
    #[inline(always)]
    fn rows<T: TileRegisters, const KIND: CodeKind>(&self, tiles: &T) {
        let (x, group) = (self.x, self.w.group);
        assert!(
            (DEPTH / STAGES).is_multiple_of(group) && x.cols.is_multiple_of(group),
            "whole groups in every part"
        );
        let mut pending = PendingSums([[[0; 16]; M]; STAGES]);
        for p in self.range.clone().step_by(PANELS) {
            let panels = p..(p + PANELS).min(self.range.end);
            for row in (0..x.rows).step_by(ROWS) {
                let rows = row..(row + ROWS).min(x.rows);
                self.many::<T, KIND>(tiles, panels.clone(), rows, &mut pending);
            }
        }
    }

    /// Multiplies up to `PANELS` panels with up to `ROWS` rows.
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
        let mut unpacked = [const { MaybeUninit::<Unpacked>::uninit() }; PANELS];
        let mut outputs = MaybeUninit::<Outputs>::uninit();
        let outputs = outputs.as_mut_ptr();
        for first in (0..groups).step_by(DEPTH / group) {
            let end = (first + DEPTH / group).min(groups);
            // No closures: they would be compiled without the instruction set.
            for (r, panel) in panels.clone().enumerate() {
                let mut to = unpacked[r].as_mut_ptr().cast::<[u8; 64]>();
                for g in first..end {
                    // SAFETY: memory for `DEPTH` columns.
                    unsafe {
                        self.unpack::<T::Bytes, KIND>(panel, g, to);
                        to = to.add(group / 4);
                    }
                }
            }
            for row in rows.clone().step_by(M) {
                for (r, panel) in panels.clone().enumerate() {
                    let mut y = [LanesOf::<T>::splat(0.0); M];
                    let some = PanelGroups {
                        panel,
                        groups: (first, end),
                        codes: unpacked[r].as_ptr().cast(),
                    };
                    // SAFETY: the outputs of a block's rows, written before they are
                    // read; the groups' codes are unpacked.
                    unsafe {
                        let at = (&raw mut (*outputs).0[r]).cast::<[f32; 16]>();
                        let at = at.add(row - rows.start);
                        if first > 0 {
                            for (m, y) in y.iter_mut().enumerate() {
                                *y = LanesOf::<T>::load(&*at.add(m));
                            }
                        }
                        self.add_groups::<T, KIND>(tiles, some, row, &mut y, pending);
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

    /// The super-block of group `g` of a panel, and the group's place in it.
    #[inline(always)]
    fn superblock(&self, panel: usize, g: usize) -> (&[u8], usize) {
        let (at, j) = self.w.place(g);
        let start = (panel - self.range.start) * self.w.panel_bytes + at * self.w.superblock_bytes;
        (&self.data[start..start + self.w.superblock_bytes], j)
    }

    /// Writes the codes of group `g` as bytes, those of levels as the levels.
    ///
    /// # Safety
    ///
    /// Memory for `group / 4` vectors.
    #[inline(always)]
    unsafe fn unpack<B: Bytes, const KIND: CodeKind>(
        &self,
        panel: usize,
        g: usize,
        mut to: *mut [u8; 64],
    ) {
        let vectors = self.w.vectors();
        let (superblock, j) = self.superblock(panel, g);
        let levels = B::load(&std::array::from_fn(|i| self.w.levels[i % 16] as u8));
        for codes in &superblock.as_chunks::<64>().0[j * vectors..(j + 1) * vectors] {
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
            for line in superblock[self.w.code_bytes..].chunks(64) {
                B::Lanes::prefetch(line.as_ptr().wrapping_add(PREFETCH_DISTANCE));
            }
        }
    }

    /// Adds some groups of one panel to the outputs `y` of the 16 rows from `row`.
    ///
    /// # Safety
    ///
    /// The codes of the groups are readable.
    #[inline(always)]
    unsafe fn add_groups<T: TileRegisters, const KIND: CodeKind>(
        &self,
        tiles: &T,
        some: PanelGroups,
        row: usize,
        y: &mut [LanesOf<T>; M],
        pending: &mut PendingSums,
    ) {
        let (x, group) = (self.x, self.w.group);
        let groups = x.cols / group;
        let (first, end) = some.groups;
        let q = &x.q[row * x.cols..(row + M) * x.cols];
        let factors = &x.factors[row * TILE_FACTORS * groups..(row + M) * TILE_FACTORS * groups];
        assert!(end <= groups, "groups of the row");
        // Two steps of each group, `PRODUCT_DELAY` groups apart: products, outputs.
        for step in first..end + PRODUCT_DELAY {
            if step < end {
                // SAFETY: a group of a block of activations and of the unpacked codes.
                unsafe {
                    let codes = some.codes.add((step - first) * 16 * group);
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
            let (superblock, j) = self.superblock(some.panel, g);
            // SAFETY: the super-block of the group, whose scales follow its codes.
            let (scale, bias): (LanesOf<T>, LanesOf<T>) = unsafe {
                self.w
                    .load_scales::<_, KIND>(superblock[self.w.code_bytes..].as_ptr(), j)
            };
            let exact = &pending.0[g % STAGES];
            for m in 0..M {
                // SAFETY: the factors of each group and row of the block, sliced above.
                let (d, d_sum) = unsafe {
                    let at = factors.as_ptr().add(TILE_FACTORS * (g * M + m));
                    (LanesOf::<T>::splat(*at), LanesOf::<T>::splat(*at.add(1)))
                };
                let exact = T::Bytes::float(T::Bytes::load_sums(&exact[m]));
                y[m] = (exact * scale).mul_add(d, y[m]);
                if biased(KIND) {
                    y[m] = bias.mul_add(d_sum, y[m]);
                }
            }
        }
    }
}
