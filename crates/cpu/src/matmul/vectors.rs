//! Quantized products in vectors: the microkernels of every instruction set.

use super::activations::GROUP_FACTORS;
use super::quantized::{
    AFFINE4, AFFINE8, CodeKind, LEVEL4, LEVEL8, QuantizedWork, TABLE4, biased, pairs,
};
use crate::arch::{Bytes, Lanes, store};
use crate::device::Cpu;
use crate::microkernel::PREFETCH_DISTANCE;
use backend::math::Float;

/// A kernel for each kind of codes, in a module of its own: the largest of all, they take
/// the compiler longest, which works on modules side by side.
macro_rules! kernels {
    ($($kind:ident in $module:ident,)*) => {
        $(mod $module {
            use super::{$kind, QuantizedWork};
            use crate::arch::{ByteKernel, Bytes};

            pub(super) struct Of<'a>(pub(super) QuantizedWork<'a>);

            impl ByteKernel for Of<'_> {
                type Output = ();

                #[inline(always)]
                fn run<B: Bytes>(self) {
                    self.0.panels::<B, $kind>();
                }
            }
        })*

        impl QuantizedWork<'_> {
            /// Multiplies with vectors.
            pub(crate) fn multiply(self, cpu: &Cpu) {
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

impl QuantizedWork<'_> {
    #[inline(always)]
    fn panels<B: Bytes, const KIND: CodeKind>(&self) {
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
    fn block<B: Bytes, const KIND: CodeKind, const M: usize, const R: usize, const S: usize>(
        &self,
        row: usize,
        p: usize,
    ) {
        let (cols, group, unit, panel) = (self.x.cols, self.w.group, self.w.unit, self.w.panel);
        let (vectors, span, groups) = (self.w.vectors(), self.w.span, cols / group);
        let data = &self.data[(p - self.range.start) * panel..][..R * panel];
        let q = self.x.q[row * cols..(row + M) * cols].as_chunks::<8>().0;
        let factors =
            &self.x.factors[row * GROUP_FACTORS * groups..(row + M) * GROUP_FACTORS * groups];
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
                    let factors = factors.as_ptr().add(GROUP_FACTORS * g * M);
                    if !biased(KIND) {
                        // Levels are seen higher than they are: less that much of each.
                        for m in 0..M {
                            let start = factors.add(GROUP_FACTORS * m).cast::<i32>();
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
                    let ahead = PREFETCH_DISTANCE
                        + if at + PREFETCH_DISTANCE < panel {
                            0
                        } else {
                            skip
                        };
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
                            let own = factors.add(GROUP_FACTORS * m);
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
