//! How keys and values lie in memory, and how attention reads them.
//!
//! A page holds, for each key/value head, a *unit* of 64 rows. Its keys are four
//! blocks of 16 keys transposed, `[e][16]`, its values are rows, `[64][e]` padded
//! to 16 columns. Elements of 2 or 4 bytes lie as they are; of a format with
//! codes and `f16` scales, the codes lie so and the scales behind them. Kernels
//! get a piece of a unit as `f32` ([`Side::keys`], [`Side::values`]), once for
//! all queries: the one place that knows the formats.

use crate::Cpu;
use crate::arch::{Element, Kernel, Lanes, load};
use crate::elementwise::PIECE;
use crate::matmul::with_element;
use crate::memory::{Region, elements, values};
use crate::pool::Split;
use backend::{Batch, Kv, KvSpec, PAGE_ROWS, Tensor};
use half::{bf16, f16};
use quant::{KvLayout, KvRowFormat, Scalar, turbo};
use std::ops::Range;
use std::sync::PoisonError;

/// Keys of a transposed block.
pub(crate) const BLOCK: usize = 16;

/// Columns of values that are converted together.
pub(crate) const STRIP: usize = 32;

/// One layer's keys and values.
pub(crate) struct KvPages {
    /// Columns of a value row, padding included.
    pub(crate) width: usize,
    pub(crate) k: Store,
    pub(crate) v: Store,
}

/// Keys or values of one layer: a *unit* for each page and head.
pub(crate) struct Store {
    kind: Kind,
    format: &'static KvRowFormat,
    lay: Lay,
    /// Columns of a row, padding included.
    cols: usize,
    region: Region,
}

/// Which of the two a store holds.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Keys,
    Values,
}

/// How a unit lies in memory. Keys come in blocks of 16, column after column;
/// values in rows.
#[derive(Clone, Copy, PartialEq)]
enum Lay {
    /// Elements.
    Plain(Scalar),
    /// Codes, and behind all of them the scales in `f16`, `[cols / group][64]`:
    /// `value = scale (code - offset)`.
    Coded {
        /// Two codes a byte, the low one first: of neighbouring columns of a key,
        /// of columns 16 apart of a value.
        pairs: bool,
        group: usize,
        offset: f32,
    },
    /// Values that were rotated: indices of levels, and behind all of them the scales in
    /// `f16`, `[groups][64]`. Of four bits, columns `c` and `c + 16` of 32 share a byte; of
    /// three, the low two of 32 columns take eight bytes ([`put_triples`]), and those of
    /// the row are followed by its third bits.
    Rotated {
        /// Bits of an index.
        bits: u8,
    },
}

impl Lay {
    fn of(format: &KvRowFormat) -> Self {
        match format.layout {
            KvLayout::Plain(scalar) => Lay::Plain(scalar),
            KvLayout::Coded {
                bits,
                group,
                offset,
            } => Lay::Coded {
                pairs: bits <= 4,
                group: group.into(),
                offset: offset.into(),
            },
            KvLayout::Rotated { bits } => Lay::Rotated { bits },
        }
    }

    /// Bytes of a unit's codes or elements, and of all of it.
    fn bytes(self, cols: usize) -> (usize, usize) {
        match self {
            Lay::Plain(scalar) => {
                let bytes = PAGE_ROWS * cols * scalar.bytes();
                (bytes, bytes)
            }
            Lay::Coded { pairs, group, .. } => {
                let codes = PAGE_ROWS * cols / if pairs { 2 } else { 1 };
                (codes, codes + cols / group * PAGE_ROWS * size_of::<f16>())
            }
            Lay::Rotated { bits } => {
                let codes = PAGE_ROWS * cols * usize::from(bits) / 8;
                let groups = cols.div_ceil(turbo::GROUP);
                (codes, codes + groups * PAGE_ROWS * size_of::<f16>())
            }
        }
    }
}

impl Store {
    fn new(kind: Kind, format: &'static KvRowFormat, units: usize, cols: usize) -> Self {
        let lay = Lay::of(format);
        let region = Region::sparse(units * lay.bytes(cols).1);
        Store {
            kind,
            format,
            lay,
            cols,
            region,
        }
    }

    pub(crate) fn side(&self) -> Side<'_> {
        Side {
            lay: self.lay,
            cols: self.cols,
            bytes: self.region.of(),
        }
    }
}

/// Memory for one layer.
pub(crate) fn kv(spec: KvSpec) -> Kv {
    let width = spec.head_dim.next_multiple_of(16);
    let units = spec.pages * spec.heads;
    let pages = KvPages {
        width,
        k: Store::new(Kind::Keys, spec.format.k, units, spec.head_dim),
        v: Store::new(Kind::Values, spec.format.v, units, width),
    };
    Kv {
        spec,
        storage: Box::new(pages),
    }
}

/// Where element or byte `i` of row `row` lies in a unit whose rows have `n`.
fn place(kind: Kind, row: usize, n: usize, i: usize) -> usize {
    match kind {
        Kind::Keys => (row / BLOCK * n + i) * BLOCK + row % BLOCK,
        Kind::Values => row * n + i,
    }
}

/// A worker's room for rows that are encoded, kept from step to step.
#[derive(Default)]
pub(crate) struct Room {
    /// A row in the cache's format.
    stored: Vec<u8>,
    /// A row while it is rotated and rounded.
    rounded: Vec<f32>,
    codes: Vec<u8>,
    scales: Vec<f32>,
    /// Codes as they lie in memory.
    packed: Vec<u8>,
}

impl Room {
    /// Takes `x` apart into codes and the scales of groups of `group`.
    fn unpack(&mut self, format: &KvRowFormat, x: &[f32], group: usize) {
        format.encode(x, &mut self.stored);
        self.codes.resize(x.len(), 0);
        self.scales.resize(x.len() / group, 0.0);
        format.unpack(&self.stored, &mut self.codes, &mut self.scales);
    }

    /// The codes as they lie in memory, in `pairs` or each in a byte.
    fn pack(&mut self, pairs: bool, kind: Kind) {
        let Room { codes, packed, .. } = self;
        packed.clear();
        let pair = |(low, high): (&u8, &u8)| low | high << 4;
        match (pairs, kind) {
            (false, _) => packed.extend_from_slice(codes),
            (true, Kind::Keys) => {
                packed.extend(codes.as_chunks().0.iter().map(|[a, b]| pair((a, b))))
            }
            (true, Kind::Values) => {
                for strip in codes.chunks_exact(STRIP) {
                    let (low, high) = strip.split_at(STRIP / 2);
                    packed.extend(low.iter().zip(high).map(pair));
                }
            }
        }
    }
}

/// Rotates and rounds one head of one row.
struct Rotate<'a> {
    bits: u8,
    room: &'a mut Room,
    from: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Room {
            rounded,
            codes,
            scales,
            packed,
            ..
        } = self.room;
        let cols = self.from.len();
        rounded.clear();
        rounded.extend_from_slice(self.from);
        codes.resize(cols, 0);
        scales.resize(cols.div_ceil(turbo::GROUP), 0.0);
        turbo::round(self.bits, rounded, codes, scales);
        if self.bits == 4 {
            return self.room.pack(true, Kind::Values);
        }
        packed.clear();
        packed.resize(cols / 8 * 3, 0);
        for (strip, codes) in codes.as_chunks::<STRIP>().0.iter().enumerate() {
            put_triples(packed, strip, codes);
        }
    }
}

/// Bytes of the low two bits, and of the third ones, of a strip's indices of three.
const LOW: usize = STRIP / 4;
const THIRD: usize = STRIP / 8;

/// Packs indices of three bits as strip `strip` of `row`.
#[inline(always)]
fn put_triples(row: &mut [u8], strip: usize, codes: &[u8; STRIP]) {
    // Byte `i` has columns `i`, `i + 8`, `i + 16` and `i + 24`.
    for (i, to) in row[strip * LOW..][..LOW].iter_mut().enumerate() {
        let low = |part: usize| (codes[i + 8 * part] & 3) << (2 * part);
        *to = low(0) | low(1) | low(2) | low(3);
    }
    // Byte `i` has columns `i`, `i + 8`, …, and in its upper half `i + 4`, `i + 12`, ….
    let thirds = row.len() / 3 * 2 + strip * THIRD;
    for (i, to) in row[thirds..][..THIRD].iter_mut().enumerate() {
        let third = |part: usize| {
            let at = |c: usize| codes[c + 8 * part] >> 2;
            at(i) << part | at(i + 4) << (part + 4)
        };
        *to = third(0) | third(1) | third(2) | third(3);
    }
}

/// The indices of strip `strip`, 16 columns each.
#[inline(always)]
fn indices(bits: u8, row: &[u8], strip: usize) -> [[u8; 16]; 2] {
    if bits == 4 {
        return nibbles(
            row[strip * 16..]
                .first_chunk()
                .expect("16 bytes of a strip"),
        );
    }
    let low = row[strip * LOW..].first_chunk();
    let low = u64::from_le_bytes(*low.expect("8 bytes of a strip"));
    let thirds = row[row.len() / 3 * 2 + strip * THIRD..].first_chunk();
    let thirds = u64::from(u32::from_le_bytes(*thirds.expect("4 bytes of a strip")));
    // A byte for each of eight columns, a bit for each eight.
    let thirds = thirds & 0x0f0f_0f0f | (thirds & 0xf0f0_f0f0) << 28;
    let eight = |part: usize| {
        let third = (thirds >> part & 0x0101_0101_0101_0101) << 2;
        u128::from(low >> (2 * part) & 0x0303_0303_0303_0303 | third)
    };
    // Put together in a register: what was stored by halves is slow to load.
    [0, 2].map(|part| (eight(part) | eight(part + 1) << 64).to_le_bytes())
}

/// Writes one head of one row as elements.
struct Append<'a, W> {
    from: &'a [f32],
    to: &'a Split<'a, W>,
    /// Where the unit starts.
    start: usize,
    kind: Kind,
    row: usize,
    cols: usize,
}

impl<W: Element> Kernel for Append<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let mut narrow = [W::default(); 16];
        for (i, from) in self.from.chunks(16).enumerate() {
            W::store(load::<L>(from), &mut narrow);
            for (j, &x) in narrow[..from.len()].iter().enumerate() {
                let at = self.start + place(self.kind, self.row, self.cols, 16 * i + j);
                // SAFETY: these elements are this row's, which is written once.
                unsafe { self.to.write(at, x) };
            }
        }
    }
}

impl Store {
    /// Writes `x: [n, K e]` as cache rows.
    fn append(&mut self, cpu: &Cpu, x: &Tensor, heads: usize, group: usize, batch: &Batch) {
        let head_dim = x.cols() / heads;
        let (x, n) = (values(x), batch.n_rows());
        let (kind, format, lay, cols) = (self.kind, self.format, self.lay, self.cols);
        let (codes_len, unit_len) = lay.bytes(cols);
        let chunk = PIECE.div_ceil(4 * heads * head_dim);
        // Unit, row within it, and the values of each head of row `r`.
        let each = |r: usize, write: &mut dyn FnMut(usize, usize, &[f32])| {
            let Some(at) = batch.rows[r].at else { return };
            let index = at as usize;
            let seq = batch.seqs.iter().position(|s| s.rows.contains(&r));
            let page = batch.page(seq.expect("every row is a sequence's"), group, index);
            for head in 0..heads {
                let x = &x[(r * heads + head) * head_dim..][..head_dim];
                write(page * heads + head, index % PAGE_ROWS, x);
            }
        };
        // Each worker has one of its own, so none ever waits.
        let room = |worker: usize| {
            let room = cpu.rooms[worker].lock();
            room.unwrap_or_else(PoisonError::into_inner)
        };
        match lay {
            Lay::Plain(scalar) => with_element!(scalar, W => {
                let to = Split::new(self.region.of_mut::<W>());
                cpu.pool.each(n, chunk, |_, rows| {
                    for r in rows {
                        each(r, &mut |unit, row, from| {
                            let start = unit * PAGE_ROWS * cols;
                            cpu.isa.run(Append { from, to: &to, start, kind, row, cols });
                        });
                    }
                });
            }),
            Lay::Coded { .. } | Lay::Rotated { .. } => {
                let to = Split::new(self.region.of_mut::<u8>());
                let bytes = codes_len / PAGE_ROWS;
                cpu.pool.each(n, chunk, |worker, rows| {
                    let room = &mut *room(worker);
                    for r in rows {
                        each(r, &mut |unit, row, from| {
                            match lay {
                                Lay::Coded { pairs, group, .. } => {
                                    room.unpack(format, from, group);
                                    room.pack(pairs, kind);
                                }
                                Lay::Rotated { bits } => cpu.isa.run(Rotate { bits, room, from }),
                                Lay::Plain(_) => unreachable!("matched above"),
                            }
                            let start = unit * unit_len;
                            for (i, &code) in room.packed[..bytes].iter().enumerate() {
                                // SAFETY: a byte is one row's, which is written once.
                                unsafe { to.write(start + place(kind, row, bytes, i), code) };
                            }
                            for (g, &scale) in room.scales.iter().enumerate() {
                                let at = start + codes_len + 2 * (g * PAGE_ROWS + row);
                                let [low, high] = f16::from_f32(scale).to_ne_bytes();
                                // SAFETY: as above.
                                unsafe {
                                    to.write(at, low);
                                    to.write(at + 1, high);
                                }
                            }
                        });
                    }
                });
            }
        }
    }
}

/// Writes `k, v: [n, K e]` as cache rows.
pub(crate) fn append(cpu: &Cpu, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch) {
    let KvSpec {
        heads, head_dim, ..
    } = kv.spec;
    let cols = heads * head_dim;
    assert_eq!(
        (k.cols(), v.cols()),
        (cols, cols),
        "columns of keys and values"
    );
    assert_eq!(
        (k.rows(), v.rows()),
        (batch.n_rows(), batch.n_rows()),
        "a row for each of the step's"
    );
    let pages = kv
        .storage
        .downcast_mut::<KvPages>()
        .expect("memory of this backend");
    pages.k.append(cpu, k, heads, group, batch);
    pages.v.append(cpu, v, heads, group, batch);
}

/// Keys or values as they lie in memory: all units, or one.
#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    lay: Lay,
    cols: usize,
    pub(crate) bytes: &'a [u8],
}

impl<'a> Side<'a> {
    #[inline(always)]
    pub(crate) fn unit(self, unit: usize) -> Self {
        let (_, len) = self.lay.bytes(self.cols);
        Side {
            bytes: &self.bytes[unit * len..(unit + 1) * len],
            ..self
        }
    }

    /// The bytes of some of a unit's rows, in their order, without scales.
    #[inline(always)]
    pub(crate) fn rows(self, rows: Range<usize>) -> &'a [u8] {
        let row = self.lay.bytes(self.cols).0 / PAGE_ROWS;
        &self.bytes[rows.start * row..rows.end * row]
    }

    /// A unit's elements, if kernels can read them as they are.
    #[inline(always)]
    pub(crate) fn brains(self) -> Option<&'a [bf16]> {
        (self.lay == Lay::Plain(Scalar::Bf16)).then(|| elements(self.bytes))
    }

    /// A unit's scales of group `g`, where it has codes.
    #[inline(always)]
    fn scales(self, g: usize) -> &'a [f16; PAGE_ROWS] {
        let (codes, _) = self.lay.bytes(self.cols);
        let scales = elements::<f16>(&self.bytes[codes..]);
        &scales.as_chunks().0[g]
    }

    /// The same as `f32`.
    #[inline(always)]
    fn wide_scales<L: Lanes>(self, g: usize) -> [f32; PAGE_ROWS] {
        let mut scales = [0.0; PAGE_ROWS];
        let halves = self.scales(g).as_chunks().0;
        for (to, from) in scales.as_chunks_mut().0.iter_mut().zip(halves) {
            L::load_f16(from).store(to);
        }
        scales
    }

    /// Blocks `blocks` of a unit of keys as `f32`, `[blocks, cols, 16]`.
    #[inline(always)]
    pub(crate) fn keys<L: Lanes>(self, blocks: Range<usize>, to: &mut [f32]) {
        let cols = self.cols;
        let to = to.as_chunks_mut::<BLOCK>().0;
        match self.lay {
            Lay::Plain(scalar) => with_element!(scalar, W => {
                let from = elements::<W>(self.bytes).as_chunks().0;
                let from = &from[blocks.start * cols..blocks.end * cols];
                for (to, from) in to.iter_mut().zip(from) {
                    W::load::<L>(from).store(to);
                }
            }),
            Lay::Coded {
                pairs,
                group,
                offset,
            } => {
                let offset = L::splat(offset);
                let codes = self.bytes.as_chunks::<BLOCK>().0;
                let vectors = if pairs { cols / 2 } else { cols };
                let in_group = if pairs { group / 2 } else { group };
                let groups = to.chunks_exact_mut(group);
                for (i, to) in groups.take(blocks.len() * cols / group).enumerate() {
                    let (b, g) = (blocks.start + i / (cols / group), i % (cols / group));
                    let scale = &self.scales(g).as_chunks::<BLOCK>().0[b];
                    let scale = L::load_f16(scale);
                    let codes = &codes[b * vectors + g * in_group..][..in_group];
                    if pairs {
                        for (to, codes) in to.as_chunks_mut::<2>().0.iter_mut().zip(codes) {
                            let [low, high] = nibbles(codes);
                            ((L::load_u8(&low) - offset) * scale).store(&mut to[0]);
                            ((L::load_u8(&high) - offset) * scale).store(&mut to[1]);
                        }
                    } else {
                        for (to, codes) in to.iter_mut().zip(codes) {
                            ((L::load_u8(codes) - offset) * scale).store(to);
                        }
                    }
                }
            }
            Lay::Rotated { .. } => unreachable!("keys are not rotated"),
        }
    }

    /// Columns `first .. first + STRIP` (fewer at the end of a row) of the values
    /// of `keys` as `f32`, `[64, STRIP]`.
    #[inline(always)]
    pub(crate) fn values<L: Lanes>(self, keys: Range<usize>, first: usize, to: &mut [f32]) {
        let cols = self.cols;
        let vectors = (cols - first).min(STRIP) / 16;
        let to = to.as_chunks_mut::<16>().0.chunks_exact_mut(STRIP / 16);
        let rows = to.enumerate().take(keys.end).skip(keys.start);
        match self.lay {
            Lay::Plain(scalar) => with_element!(scalar, W => {
                let from = elements::<W>(self.bytes);
                for (key, to) in rows {
                    let from = from[key * cols + first..][..16 * vectors].as_chunks().0;
                    for (to, from) in to.iter_mut().zip(from) {
                        W::load::<L>(from).store(to);
                    }
                }
            }),
            Lay::Coded {
                pairs,
                group,
                offset,
            } => {
                let offset = L::splat(offset);
                let scales = self.wide_scales::<L>(first / group);
                let codes = self.bytes.as_chunks::<16>().0;
                for (key, to) in rows {
                    let scale = L::splat(scales[key]);
                    let at = (key * cols + first) / 16;
                    if pairs {
                        for (to, low_high) in to.iter_mut().zip(nibbles(&codes[at / 2])) {
                            ((L::load_u8(&low_high) - offset) * scale).store(to);
                        }
                    } else {
                        for (to, codes) in to.iter_mut().zip(&codes[at..at + vectors]) {
                            ((L::load_u8(codes) - offset) * scale).store(to);
                        }
                    }
                }
            }
            Lay::Rotated { bits } => {
                let levels = turbo::levels(bits);
                let scales = self.wide_scales::<L>(first / turbo::GROUP);
                let bytes = cols * usize::from(bits) / 8;
                for (key, to) in rows {
                    let scale = L::splat(scales[key]);
                    let row = &self.bytes[key * bytes..][..bytes];
                    for (to, codes) in to.iter_mut().zip(indices(bits, row, first / STRIP)) {
                        (L::lookup(&levels, &codes) * scale).store(to);
                    }
                }
            }
        }
    }
}

/// Low and high halves of bytes.
#[inline(always)]
fn nibbles(codes: &[u8; 16]) -> [[u8; 16]; 2] {
    let mut halves = [[0; 16]; 2];
    for (i, code) in codes.iter().enumerate() {
        (halves[0][i], halves[1][i]) = (code & 15, code >> 4);
    }
    halves
}
