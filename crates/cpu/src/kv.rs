//! How keys and values lie in memory, and how attention reads them.
//!
//! A page holds, for each key/value head, a *unit* of 64 rows. The keys of a unit are four blocks
//! of 16 keys, transposed: `[e][16]`. The values are rows, `[64][e]`, padded to a multiple of 16
//! columns. Plain formats have their elements in this order; formats with codes and `f16` scales
//! have the bytes of their codes in it, and all scales of the unit behind them. Kernels read a part of a unit
//! as `f32` ([`KvView::keys`], [`KvView::values`]), once for all queries; only this module knows
//! the formats.

mod codes;
mod encode;
mod view;

pub(crate) use encode::{RowEncoder, STRIP};
pub(crate) use view::{Codes, Decode, KvView, UseCodes};

use crate::arch::{Element, Kernel, Lanes, load, with_element};
use crate::device::Device;
use crate::memory::{Region, values};
use crate::pool::{DisjointSlice, WORK_RANGE};
use backend::{Batch, Kv, KvSpec, PAGE_ROWS, Tensor};
use encode::KeysOrValues;
use half::f16;
use quant::{KvLayout, KvRowFormat, Scalar, turbo};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// How many keys a transposed block has.
pub(crate) const BLOCK: usize = 16;

/// One layer's keys and values.
pub(crate) struct KvPages {
    /// Columns of a value row, padding included.
    pub(crate) width: usize,
    pub(crate) k: KvStore,
    pub(crate) v: KvStore,
}

/// The keys or the values of one layer: a *unit* for each page and head.
pub(crate) struct KvStore {
    kind: KeysOrValues,
    format: &'static KvRowFormat,
    layout: UnitLayout,
    /// Columns of a row, padding included.
    cols: usize,
    region: Region,
}

/// How a unit lies in memory. Keys lie in blocks of 16, column after column; values in rows.
#[derive(Clone, Copy, PartialEq)]
enum UnitLayout {
    /// Elements of this type.
    Plain(Scalar),
    /// Codes ([`codes`]), and behind all of them the scales in `f16`, `[cols / group][64]`:
    /// `value = scale (code - offset)`.
    Coded {
        /// Bits of a code: 8, 5 or 4.
        bits: u8,
        /// Columns that share a scale.
        group: usize,
        /// What a code is more than its level.
        offset: f32,
    },
    /// Indices of levels, as codes lie, and behind all of them the scales in `f16`,
    /// `[groups][64]`.
    Levels {
        /// Bits of an index: 4, 3 or 2.
        bits: u8,
    },
}

impl UnitLayout {
    /// The layout of units of a format.
    fn of(format: &KvRowFormat) -> Self {
        match format.layout {
            KvLayout::Plain(scalar) => UnitLayout::Plain(scalar),
            KvLayout::Coded {
                bits,
                group,
                offset,
            } => UnitLayout::Coded {
                bits,
                group: group.into(),
                offset: offset.into(),
            },
            KvLayout::Levels { bits } => UnitLayout::Levels { bits },
        }
    }

    /// Bytes of a unit's codes or elements, and of the whole unit.
    fn bytes(self, cols: usize) -> (usize, usize) {
        match self {
            UnitLayout::Plain(scalar) => {
                let bytes = PAGE_ROWS * cols * scalar.bytes();
                (bytes, bytes)
            }
            UnitLayout::Coded { bits, group, .. } => {
                let codes = PAGE_ROWS * cols * usize::from(bits) / 8;
                (codes, codes + cols / group * PAGE_ROWS * size_of::<f16>())
            }
            UnitLayout::Levels { bits } => {
                let codes = PAGE_ROWS * cols * usize::from(bits) / 8;
                let groups = cols.div_ceil(turbo::GROUP);
                (codes, codes + groups * PAGE_ROWS * size_of::<f16>())
            }
        }
    }
}

impl KvStore {
    /// `units` of `cols` columns; none where there is no memory for so many.
    fn new(
        kind: KeysOrValues,
        format: &'static KvRowFormat,
        units: usize,
        cols: usize,
    ) -> Option<Self> {
        let layout = UnitLayout::of(format);
        let region = Region::sparse(units.checked_mul(layout.bytes(cols).1)?)?;
        Some(KvStore {
            kind,
            format,
            layout,
            cols,
            region,
        })
    }

    /// Where page `page` of a layer of `heads` heads lies, in bytes.
    fn page(&self, heads: usize, page: usize) -> Range<usize> {
        let bytes = heads * self.layout.bytes(self.cols).1;
        page * bytes..(page + 1) * bytes
    }

    pub(crate) fn view(&self) -> KvView<'_> {
        KvView {
            layout: self.layout,
            cols: self.cols,
            bytes: self.region.elements(),
        }
    }
}

/// Allocates the keys and values of one layer; none where there is no memory for them.
pub(crate) fn kv(spec: KvSpec) -> Option<Kv> {
    let width = spec.head_dim.next_multiple_of(16);
    let units = spec.pages.checked_mul(spec.heads)?;
    let pages = KvPages {
        width,
        k: KvStore::new(KeysOrValues::Keys, spec.format.k, units, spec.head_dim)?,
        v: KvStore::new(KeysOrValues::Values, spec.format.v, units, width)?,
    };
    Some(Kv {
        spec,
        storage: Box::new(pages),
    })
}

/// Makes page `to` of a layer what page `from` is.
pub(crate) fn copy_page(kv: &mut Kv, from: usize, to: usize) {
    let heads = kv.spec.heads;
    let pages = kv.storage.downcast_mut::<KvPages>();
    let pages = pages.expect("memory of this backend");
    for store in [&mut pages.k, &mut pages.v] {
        let (from, to) = (store.page(heads, from), store.page(heads, to));
        let bytes = store.region.elements_mut::<u8>();
        bytes.copy_within(from, to.start);
    }
}

/// The bytes of page `page` of a layer: its keys, then its values.
pub(crate) fn save_page(kv: &Kv, page: usize) -> Vec<u8> {
    let pages = kv.storage.downcast_ref::<KvPages>();
    let pages = pages.expect("memory of this backend");
    let bytes = |store: &KvStore| {
        let page = store.page(kv.spec.heads, page);
        store.region.elements::<u8>()[page].to_vec()
    };
    [bytes(&pages.k), bytes(&pages.v)].concat()
}

/// Makes page `page` of a layer what [`save_page`] has saved, if `bytes` are as many.
pub(crate) fn load_page(kv: &mut Kv, page: usize, bytes: &[u8]) -> bool {
    let heads = kv.spec.heads;
    let pages = kv.storage.downcast_mut::<KvPages>();
    let pages = pages.expect("memory of this backend");
    let (k, v) = (pages.k.page(heads, page), pages.v.page(heads, page));
    if bytes.len() != k.len() + v.len() {
        return false;
    }
    let (keys, values) = bytes.split_at(k.len());
    pages.k.region.elements_mut::<u8>()[k].copy_from_slice(keys);
    pages.v.region.elements_mut::<u8>()[v].copy_from_slice(values);
    true
}

/// Where element or byte `i` of row `row` lies in a unit whose rows have `n` of them.
fn place(kind: KeysOrValues, row: usize, n: usize, i: usize) -> usize {
    match kind {
        KeysOrValues::Keys => (row / BLOCK * n + i) * BLOCK + row % BLOCK,
        KeysOrValues::Values => row * n + i,
    }
}

/// Writes one head of one row as elements.
struct Append<'a, W> {
    from: &'a [f32],
    to: &'a DisjointSlice<'a, W>,
    /// Where the unit starts.
    start: usize,
    kind: KeysOrValues,
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
                // SAFETY: no two rows share an element, and this row is written once.
                unsafe { self.to.write(at, x) };
            }
        }
    }
}

impl KvStore {
    /// Writes `x: [n, K e]` with `heads` heads to the cache rows of the step's rows, by the page
    /// tables of `group`.
    fn append(
        &mut self,
        device: &Device,
        encoders: &[Mutex<RowEncoder>],
        x: &Tensor,
        (heads, group): (usize, usize),
        batch: &Batch,
    ) {
        let head_dim = x.cols() / heads;
        let (x, n) = (values(x), batch.n_rows());
        let (kind, format, layout, cols) = (self.kind, self.format, self.layout, self.cols);
        let (codes_len, unit_len) = layout.bytes(cols);
        let chunk = WORK_RANGE.div_ceil(4 * heads * head_dim);
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
        // Each worker has an encoder of its own, so none ever waits for it.
        let encoder = |worker: usize| {
            let encoder = encoders[worker].lock();
            encoder.unwrap_or_else(PoisonError::into_inner)
        };
        match layout {
            UnitLayout::Plain(scalar) => with_element!(scalar, W => {
                let to = DisjointSlice::new(self.region.elements_mut::<W>());
                device.pool.each(n, chunk, |_, rows| {
                    for r in rows {
                        each(r, &mut |unit, row, from| {
                            let start = unit * PAGE_ROWS * cols;
                            device.isa.run(Append { from, to: &to, start, kind, row, cols });
                        });
                    }
                });
            }),
            UnitLayout::Coded { .. } | UnitLayout::Levels { .. } => {
                let to = DisjointSlice::new(self.region.elements_mut::<u8>());
                let bytes = codes_len / PAGE_ROWS;
                device.pool.each(n, chunk, |worker, rows| {
                    let encoder = &mut *encoder(worker);
                    for r in rows {
                        each(r, &mut |unit, row, from| {
                            match layout {
                                UnitLayout::Coded { bits, group, .. } => encoder.encode_codes(
                                    device.isa,
                                    (format, kind),
                                    from,
                                    (bits, group),
                                ),
                                UnitLayout::Levels { bits } => {
                                    encoder.encode_levels(device.isa, kind, from, bits);
                                }
                                UnitLayout::Plain(_) => unreachable!("matched above"),
                            }
                            let start = unit * unit_len;
                            for (i, &code) in encoder.packed[..bytes].iter().enumerate() {
                                // SAFETY: no two rows share a byte, and this row is written once.
                                unsafe { to.write(start + place(kind, row, bytes, i), code) };
                            }
                            for (g, &scale) in encoder.scales.iter().enumerate() {
                                let at = start + codes_len + 2 * (g * PAGE_ROWS + row);
                                let [low, high] = f16::from_f32(scale).to_ne_bytes();
                                // SAFETY: no two rows share a scale, and this row is written once.
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

/// Writes `k, v: [n, K e]` to the cache rows of the step's rows.
///
/// # Panics
///
/// If the shapes of `k` or `v` differ from these.
pub(crate) fn append(
    device: &Device,
    encoders: &[Mutex<RowEncoder>],
    kv: &mut Kv,
    (k, v): (&Tensor, &Tensor),
    group: usize,
    batch: &Batch,
) {
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
    pages.k.append(device, encoders, k, (heads, group), batch);
    pages.v.append(device, encoders, v, (heads, group), batch);
}
