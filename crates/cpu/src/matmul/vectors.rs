//! Quantized products in vector registers: the microkernels of every instruction set.
//!
//! A microkernel makes the outputs of `M` rows and `R` panels. For each group of columns it
//! multiplies codes with rounded activations into exact integer sums, a panel's 16 rows being
//! the lanes, and adds the sums to the outputs with the group's scales:
//!
//! ```text
//!   panel r: 64 bytes = 4 codes of each of 16 rows      row m: 4 activations, splat
//!                      └──────────── add ────────────────┘
//!                         sums[m][r] += Σ code q                (start: less 8 or 128 Σ q)
//!   y[m][r] = fma(float(sums[m][r]) scale, d, y[m][r])          (scale_group)
//!   y[m][r] = fma(bias, d Σ q, y[m][r])                         where there are biases
//! ```

use super::activations::GROUP_FACTORS;
use super::quantized::{
    AFFINE4, AFFINE6, AFFINE8, CodeKind, LEVEL4, LEVEL6, LEVEL8, QuantizedPanels, QuantizedWork,
    TABLE3, TABLE4, biased, pairs, sixes,
};
use crate::arch::{Bytes, Lanes, Registers, store};
use crate::device::Device;
use crate::microkernel::microkernels;
use crate::tuning::PrefetchHint;
use backend::math::Float;

/// The microkernels of a kind of codes.
trait Microkernels {
    /// Calls [`QuantizedWork::block`] as a function of its own.
    fn block<B: Bytes, const M: usize, const R: usize, const S: usize, const HINT: u8>(
        work: &QuantizedWork<'_>,
        row: usize,
        p: usize,
    );
}

/// A kernel for each kind of codes, in a module of its own: they are the largest of all and
/// take the compiler longest, which works on modules side by side.
macro_rules! kernels {
    ($($kind:ident in $module:ident,)*) => {
        $(mod $module {
            use super::{$kind, Microkernels, QuantizedWork};
            use crate::arch::{ByteKernel, Bytes};

            pub(super) struct Multiply<'a>(pub(super) QuantizedWork<'a>);

            impl ByteKernel for Multiply<'_> {
                type Output = ();

                #[inline(always)]
                fn run<B: Bytes>(self) {
                    self.0.multiply_panels::<B, Self>();
                }
            }

            struct Block<'a, const M: usize, const R: usize, const S: usize, const HINT: u8> {
                work: &'a QuantizedWork<'a>,
                row: usize,
                p: usize,
            }

            impl<const M: usize, const R: usize, const S: usize, const HINT: u8> ByteKernel
                for Block<'_, M, R, S, HINT>
            {
                type Output = ();

                #[inline(always)]
                fn run<B: Bytes>(self) {
                    self.work.block::<B, $kind, M, R, S, HINT>(self.row, self.p);
                }
            }

            impl Microkernels for Multiply<'_> {
                #[inline(always)]
                fn block<B: Bytes, const M: usize, const R: usize, const S: usize, const HINT: u8>(
                    work: &QuantizedWork<'_>,
                    row: usize,
                    p: usize,
                ) {
                    B::call(Block::<M, R, S, HINT> { work, row, p });
                }
            }
        })*

        impl QuantizedWork<'_> {
            /// Multiplies in vector registers.
            pub(crate) fn multiply(self, device: &Device) {
                match self.w.kind {
                    $($kind => device.isa.run_bytes($module::Multiply(self)),)*
                    kind => unreachable!("no matrix has codes of kind {kind}"),
                }
            }
        }
    };
}

kernels! {
    AFFINE4 in affine4,
    AFFINE6 in affine6,
    AFFINE8 in affine8,
    LEVEL4 in level4,
    TABLE4 in table4,
    LEVEL6 in level6,
    LEVEL8 in level8,
    TABLE3 in table3,
}

/// Does some work for each row of a block, of eight at most, one copy of the code after the other. A loop over eight
/// rows may be too long for the compiler to unroll, and then sums stay in memory: 8 rows took a quarter longer a step.
macro_rules! unrolled_rows {
    ($m:ident in $rows:expr => $work:block) => {
        unrolled_rows!(@ $m $rows, $work 0 1 2 3 4 5 6 7)
    };
    (@ $m:ident $rows:expr, $work:block $($row:literal)*) => {
        $(if $rows.contains(&$row) {
            let $m = $row;
            $work
        })*
    };
}

/// Panels whose sums a block of `rows` rows and `panels` panels keeps in registers at once.
/// Three and four rows have registers for the outputs of four panels but for the sums of two,
/// so those take turns.
const fn sums_at_once(rows: usize, panels: usize) -> usize {
    if panels == 4 && rows > 2 { 2 } else { panels }
}

impl QuantizedWork<'_> {
    /// Multiplies all panels, as many at a time as registers hold.
    #[inline(always)]
    fn multiply_panels<B: Bytes, K: Microkernels>(&self) {
        let registers = <B::Lanes as Lanes>::REGISTERS;
        let mut p = self.range.start;
        while p < self.range.end {
            // Several panels at once keep more sums under way, share what is loaded of the
            // activations, and are as many streams of memory. More than four rows have no
            // registers for four.
            let left = self.range.end - p;
            let most = self.reads.of_rows(self.x.rows);
            let r = match registers {
                Registers::Wide if left >= 8 && most >= 8 => 8,
                Registers::Wide if left >= 4 && most >= 4 => 4,
                Registers::Wide if left >= 2 => 2,
                _ => 1,
            };
            for row in (0..self.x.rows).step_by(self.x.block) {
                let m = (self.x.rows - row).min(self.x.block);
                if m == 1
                    && self.reads.hint != PrefetchHint::DEFAULT
                    && self.one_row::<B, K>(row, p, r)
                {
                    continue;
                }
                microkernels! {
                    (<B::Lanes as Lanes>::REGISTERS, m, r) => |M, R| {
                        K::block::<B, M, R, { sums_at_once(M, R) }, { PrefetchHint::DEFAULT as u8 }>(self, row, p)
                    };
                    Wide:
                        (1, 8) (1, 4) (2, 4) (3, 4) (4, 4)
                        (1, 2) (2, 2) (3, 2) (4, 2) (5, 2) (6, 2) (7, 2) (8, 2)
                        (1, 1) (2, 1) (3, 1) (4, 1) (5, 1) (6, 1) (7, 1) (8, 1);
                    Narrow: (1, 1) (2, 1) (3, 1) (4, 1);
                }
            }
            p += r;
        }
    }

    /// Multiplies row `row` with the `r` panels from `p`, with another hint than the default. Returns
    /// whether it has: not where there are so few panels that it does not matter.
    #[inline(always)]
    fn one_row<B: Bytes, K: Microkernels>(&self, row: usize, p: usize, r: usize) -> bool {
        macro_rules! hints {
            ($($registers:ident $r:literal: $($hint:ident)*;)*) => {
                // Blocks of other registers are not even compiled.
                $(if const { matches!(<B::Lanes as Lanes>::REGISTERS, Registers::$registers) } {
                    match (r, self.reads.hint) {
                        $(($r, PrefetchHint::$hint) => {
                            K::block::<B, 1, $r, $r, { PrefetchHint::$hint as u8 }>(self, row, p);
                            return true;
                        })*
                        _ => {}
                    }
                })*
            };
        }
        hints! {
            Wide 8: None L1 L2 Once;
            Wide 4: None L1 L2 Once;
            Narrow 1: None L1 L2 Once;
        }
        false
    }

    /// Multiplies the `M` rows from `row` with the `R` panels from `p`, the sums of `S` panels
    /// at a time. `HINT` is the number of a [`PrefetchHint`].
    #[inline(always)]
    fn block<
        B: Bytes,
        const KIND: CodeKind,
        const M: usize,
        const R: usize,
        const S: usize,
        const HINT: u8,
    >(
        &self,
        row: usize,
        p: usize,
    ) {
        let block = Block::<KIND, M, R>::new(self, row, p);
        let table = B::table(&self.w.levels);
        let mut y = [[B::Lanes::splat(0.0); R]; M];
        for g in 0..block.groups {
            for first in (0..R).step_by(S) {
                let mut sums = [[B::zero(); S]; M];
                // SAFETY: group `g` of the block's, and `S` of its `R` panels.
                unsafe {
                    block.start::<B, S>(g, &mut sums);
                    block.multiply_group::<B, S, HINT>(g, first, table, &mut sums);
                    block.scale_group::<B, S, HINT>(g, first, &sums, &mut y);
                }
            }
        }
        for (m, y) in y.into_iter().enumerate() {
            for (r, y) in y.into_iter().enumerate() {
                // SAFETY: this worker alone has these panels, and one output at a time.
                store(y, unsafe { self.out(row + m, p + r) });
            }
        }
    }
}

/// The operands of one microkernel call, whose sizes [`Block::new`] has checked.
struct Block<'a, const KIND: CodeKind, const M: usize, const R: usize> {
    w: &'a QuantizedPanels,
    /// `R` panels.
    data: &'a [u8],
    /// `M` rows: `[cols / 8, M]` eights.
    q: &'a [[i8; 8]],
    /// `[groups, M, GROUP_FACTORS]`
    factors: &'a [f32],
    groups: usize,
    /// Whether these are the first rows, which prefetch the panels for all others.
    is_first: bool,
    /// Bytes between what is read and what is prefetched.
    distance: usize,
}

impl<'a, const KIND: CodeKind, const M: usize, const R: usize> Block<'a, KIND, M, R> {
    /// Vectors of a panel that hold eight columns.
    const VECTORS_PER_EIGHT: usize = if pairs(KIND) { 1 } else { 2 };

    /// The `M` rows from `row` and the `R` panels from `p`.
    ///
    /// # Panics
    ///
    /// If the groups do not fill rows and panels as the kernels need it.
    #[inline(always)]
    fn new(work: &QuantizedWork<'a>, row: usize, p: usize) -> Self {
        let (w, cols) = (work.w, work.x.cols);
        let (group, span, panel) = (w.group, w.span, w.panel_bytes);
        let (vectors, groups) = (w.vectors(), cols / group);
        let wide = Self::VECTORS_PER_EIGHT;
        assert_eq!(
            (vectors * 8, groups * group, groups / span * span),
            (wide * group, cols, groups),
            "vectors fill the row"
        );
        assert!(
            vectors.is_multiple_of(2 * wide) && w.code_bytes == w.bytes_of_codes(),
            "vectors come in pairs of eights"
        );
        assert!(
            KIND != TABLE3 || (group, span) == (16, 2),
            "the codes of two groups lie together"
        );
        assert!(
            !sixes(KIND) || group.is_multiple_of(16),
            "16 columns are three vectors"
        );
        Block {
            w,
            data: &work.data[(p - work.range.start) * panel..][..R * panel],
            q: work.x.q[row * cols..(row + M) * cols].as_chunks().0,
            factors: &work.x.factors[row * GROUP_FACTORS * groups..][..M * GROUP_FACTORS * groups],
            groups,
            is_first: row == 0,
            distance: work.reads.distance,
        }
    }

    /// How many of the rows, from the first on, are multiplied two at a time.
    #[inline(always)]
    fn paired<B: Bytes>() -> usize {
        if B::PAIRED { M / 2 * 2 } else { 0 }
    }

    /// The factors of group `g`: of each row [`GROUP_FACTORS`].
    ///
    /// # Safety
    ///
    /// There is such a group.
    #[inline(always)]
    unsafe fn group_factors(&self, g: usize) -> *const f32 {
        // SAFETY: `factors` has `groups` times as many.
        unsafe { self.factors.as_ptr().add(GROUP_FACTORS * g * M) }
    }

    /// How many bytes ahead to prefetch, from a super-block `at` bytes into its panel. Past the end
    /// of a panel comes the one that is `R` panels further on, which is read next.
    #[inline(always)]
    fn ahead(&self, at: usize) -> usize {
        let panel = self.w.panel_bytes;
        let ends = at + self.distance >= panel;
        self.distance + if ends { (R - 1) * panel } else { 0 }
    }

    /// Sets the sums of group `g` to what they start from. Codes of levels are multiplied with 8 or
    /// [`Bytes::OFFSET`] added, so sums start that many times `Σ q` below zero.
    ///
    /// # Safety
    ///
    /// There is such a group.
    #[inline(always)]
    unsafe fn start<B: Bytes, const S: usize>(&self, g: usize, sums: &mut [[B::Sums; S]; M]) {
        if biased(KIND) {
            return;
        }
        for (m, sums) in sums.iter_mut().enumerate() {
            // SAFETY: the integers among the factors of row `m`, see `GROUP_FACTORS`.
            let (eight, offset) = unsafe {
                let start = self.group_factors(g).add(GROUP_FACTORS * m).cast::<i32>();
                (*start.add(2), *start.add(3))
            };
            for sum in sums {
                if KIND == LEVEL4 {
                    *sum = B::start(eight);
                } else if B::OFFSET > 0 {
                    *sum = B::start(offset);
                }
            }
        }
    }

    /// Adds the products of group `g` and the `S` panels from the block's panel `first`.
    ///
    /// # Safety
    ///
    /// There are such a group and panels.
    #[inline(always)]
    #[expect(
        clippy::needless_range_loop,
        reason = "an index names the same row or panel in several arrays"
    )]
    unsafe fn multiply_group<B: Bytes, const S: usize, const HINT: u8>(
        &self,
        g: usize,
        first: usize,
        table: B::Codes,
        sums: &mut [[B::Sums; S]; M],
    ) {
        const { assert!(M <= 8, "as many rows as `unrolled_rows` has code for") };
        let (wide, vectors) = (Self::VECTORS_PER_EIGHT, self.w.vectors());
        let stride = self.w.panel_bytes / 64;
        let (at, j) = self.w.place(g);
        let at = at * self.w.superblock_bytes;
        let ahead = self.ahead(at);
        let paired = Self::paired::<B>();
        for m in (0..paired).step_by(2) {
            for r in 0..S {
                [sums[m][r], sums[m + 1][r]] = B::pair([sums[m][r], sums[m + 1][r]]);
            }
        }
        // SAFETY: `new` has checked that each panel holds `vectors` vectors of every group, an
        // even number of eights, and `q` as many eights of each row; of `TABLE3`, one less of
        // every other group, and of `sixes` three for each four that `vectors` counts.
        unsafe {
            let mut codes = self.data.as_ptr().add(at).cast::<[u8; 64]>();
            let of_group = if sixes(KIND) {
                vectors / 4 * 3
            } else {
                vectors
            };
            codes = codes.add(j * of_group + first * stride);
            let mut x = self
                .q
                .as_ptr()
                .add(g * (self.w.group / 8) * M)
                .cast::<[i8; 4]>();
            for _ in 0..vectors / (2 * wide) {
                for eight in 0..2 {
                    let mut both = [(table, table); S];
                    for r in 0..S {
                        let codes = codes.add(r * stride + eight * wide);
                        // One line for each that is read, never many at once: a burst waits
                        // for free buffers, and arithmetic with it.
                        let spare = match KIND {
                            TABLE3 => j + eight == 2,
                            LEVEL6 | AFFINE6 => eight == 1,
                            _ => false,
                        };
                        // Spare bits lie in lines that were read.
                        let lines = wide - usize::from(spare);
                        if self.is_first {
                            for line in 0..lines {
                                let line = codes.wrapping_add(line).cast::<u8>();
                                B::Lanes::prefetch_to::<HINT>(line.wrapping_add(ahead));
                            }
                        }
                        both[r] = Self::unpack_eight::<B>(codes, spare, table);
                    }
                    let x = x.add(2 * eight * M);
                    for m in (0..paired).step_by(2) {
                        for r in 0..S {
                            let (two, (low, high)) = ([sums[m][r], sums[m + 1][r]], both[r]);
                            let x = x.add(2 * m);
                            [sums[m][r], sums[m + 1][r]] = match KIND {
                                AFFINE6 | AFFINE8 => B::add_pair::<false>(two, low, high, x),
                                _ => B::add_pair::<true>(two, low, high, x),
                            };
                        }
                    }
                    unrolled_rows!(m in (paired..M) => {
                        let x = x.add(2 * m);
                        for r in 0..S {
                            let mut sum = sums[m][r];
                            for (codes, x) in [(both[r].0, *x), (both[r].1, *x.add(1))] {
                                sum = match KIND {
                                    AFFINE4 | LEVEL4 => B::add_small(sum, codes, x),
                                    AFFINE6 | AFFINE8 => B::add(sum, codes, x),
                                    _ => B::add_signed(sum, codes, x),
                                };
                            }
                            sums[m][r] = sum;
                        }
                    });
                }
                codes = codes.add(if sixes(KIND) { 3 } else { 2 * wide });
                x = x.add(4 * M);
            }
        }
        for m in (0..paired).step_by(2) {
            for r in 0..S {
                [sums[m][r], sums[m + 1][r]] = B::unpair([sums[m][r], sums[m + 1][r]]);
            }
        }
    }

    /// Eight columns of a panel as two vectors of codes, four columns each.
    ///
    /// # Safety
    ///
    /// The vectors of eight columns are readable at `codes`, or, if these are in `spare` bits of
    /// three vectors, those before it; of [`sixes`] in `spare` bits, the vector at `codes` and the two before.
    #[inline(always)]
    unsafe fn unpack_eight<B: Bytes>(
        codes: *const [u8; 64],
        spare: bool,
        table: B::Codes,
    ) -> (B::Codes, B::Codes) {
        let line = if KIND == TABLE3 && spare {
            // SAFETY: the three vectors before, as promised.
            unsafe {
                let (a, b, c) = (&*codes.sub(3), &*codes.sub(2), &*codes.sub(1));
                B::spare(B::load(a), B::load(b), B::load(c))
            }
        } else {
            // SAFETY: the first vector of eight columns, as promised.
            B::load(unsafe { &*codes })
        };
        match KIND {
            TABLE3 | TABLE4 => (
                B::lookup(table, B::low(line)),
                B::lookup(table, B::high(line)),
            ),
            AFFINE4 | LEVEL4 => (B::low(line), B::high(line)),
            LEVEL6 | AFFINE6 => {
                let second = match spare {
                    // SAFETY: the two vectors before, as promised.
                    true => unsafe {
                        let (a, b) = (&*codes.sub(2), &*codes.sub(1));
                        B::spare_six(B::load(a), B::load(b), line)
                    },
                    // SAFETY: the second vector of eight columns, as promised.
                    false => B::six(B::load(unsafe { &*codes.add(1) })),
                };
                let first = B::six(line);
                match KIND {
                    LEVEL6 => (B::less_32(first), B::less_32(second)),
                    _ => (first, second),
                }
            }
            // SAFETY: codes take a byte each, so eight columns are two vectors, as promised.
            LEVEL8 => (
                B::signed(line),
                B::signed(B::load(unsafe { &*codes.add(1) })),
            ),
            // SAFETY: codes take a byte each, so eight columns are two vectors, as promised.
            _ => (line, B::load(unsafe { &*codes.add(1) })),
        }
    }

    /// Adds the sums of group `g` to the outputs of the `S` panels from `first`, times scales.
    ///
    /// # Safety
    ///
    /// There are such a group and panels.
    #[inline(always)]
    unsafe fn scale_group<B: Bytes, const S: usize, const HINT: u8>(
        &self,
        g: usize,
        first: usize,
        sums: &[[B::Sums; S]; M],
        y: &mut [[B::Lanes; R]; M],
    ) {
        let (at, j) = self.w.place(g);
        let at = at * self.w.superblock_bytes;
        let codes = self.w.code_bytes;
        for r in first..first + S {
            let start = r * self.w.panel_bytes + at;
            if self.is_first && j == 0 {
                for line in (codes..self.w.superblock_bytes).step_by(64) {
                    let line = self.data.as_ptr().wrapping_add(start + line);
                    B::Lanes::prefetch_to::<HINT>(line.wrapping_add(self.ahead(at)));
                }
            }
            // SAFETY: the scales of a super-block follow its codes.
            let (scale, bias): (B::Lanes, B::Lanes) = unsafe {
                let scales = self.data.as_ptr().add(start + codes);
                self.w.load_scales::<_, KIND>(scales, j)
            };
            for m in 0..M {
                // SAFETY: the factors of row `m`.
                let (d, d_sum) = unsafe {
                    let own = self.group_factors(g).add(GROUP_FACTORS * m);
                    (*own, *own.add(1))
                };
                let exact = B::float(sums[m][r - first]) * scale;
                y[m][r] = exact.mul_add(B::Lanes::splat(d), y[m][r]);
                if biased(KIND) {
                    y[m][r] = bias.mul_add(B::Lanes::splat(d_sum), y[m][r]);
                }
            }
        }
    }
}
