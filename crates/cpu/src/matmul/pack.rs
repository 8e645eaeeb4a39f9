//! From stored rows to panels of 16 rows: once for all products, or anew for each.
//!
//! A matrix is packed when it is loaded. One that is to stay in its mapped file
//! ([`quant::Stored::keep`]) is packed two panels at a time, by the worker that multiplies them
//! and into its pack buffer: kernels and bits are the same, nothing but the file's pages is
//! held, and a product takes as long as packing does.

use super::pack_buffer::PackBuffer;
use crate::arch::{Kernel, Lanes};
use crate::device::Device;
use crate::memory::Region;
use crate::pool::DisjointSlice;
use quant::{Kept, Stored};
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Panels packed at a time for a product.
const PACKED_AT_ONCE: usize = 2;

/// Bytes of panels that a worker packs at a time when a matrix is loaded; then it gives back the
/// memory of the file that it has read.
const LOAD_RANGE_BYTES: usize = 1 << 20;

/// Where panels come from.
pub(crate) enum PanelSource {
    /// Packed when the matrix was loaded.
    Packed(Region),
    /// To be packed from these parts, rows in order.
    Mapped(Vec<Kept>),
}

/// The stored parts of a matrix, rows in order.
#[derive(Clone, Copy)]
enum MatrixParts<'a> {
    Stored(&'a [Stored<'a>]),
    Kept(&'a [Kept]),
}

/// A row of a stored part.
#[derive(Clone, Copy)]
pub(crate) struct StoredRow<'a> {
    pub(crate) part: Stored<'a>,
    pub(crate) row: usize,
}

impl<'a> MatrixParts<'a> {
    /// Finds row `row` of the whole matrix.
    fn find(self, mut row: usize) -> StoredRow<'a> {
        let mut is_in = |rows: usize| {
            let found = row < rows;
            if !found {
                row -= rows;
            }
            found
        };
        let part = match self {
            MatrixParts::Stored(parts) => parts.iter().find(|p| is_in(p.rows)).copied(),
            MatrixParts::Kept(parts) => parts.iter().find(|p| is_in(p.rows)).map(Kept::view),
        };
        let part = part.expect("rows are those of the parts");
        StoredRow { part, row }
    }
}

/// The super-blocks that a panel is made of: each has some arrays of 16 elements, one element for
/// each lane, and then padding.
pub(crate) struct SuperblockLayout {
    /// Bytes of a super-block, padding included.
    pub(crate) bytes: usize,
    /// The arrays in order: how many there are of a kind, and the bytes of their elements.
    pub(crate) arrays: [(usize, usize); 3],
}

impl SuperblockLayout {
    /// Where each array of a super-block starts, and the bytes of its elements.
    fn each(&self) -> impl Iterator<Item = (usize, usize)> {
        let mut start = 0;
        let arrays = self.arrays.into_iter();
        let sizes = arrays.flat_map(|(n, size)| std::iter::repeat_n(size, n));
        sizes.map(move |size| {
            start += 16 * size;
            (start - 16 * size, size)
        })
    }

    /// Copies lane `lane` of panel `from` to lane `to_lane` of panel `to`.
    fn copy_lane(&self, from: &[u8], lane: usize, to: &mut [u8], to_lane: usize) {
        let superblocks = to.chunks_exact_mut(self.bytes);
        for (to, from) in superblocks.zip(from.chunks_exact(self.bytes)) {
            for (start, size) in self.each() {
                let from = &from[start + lane * size..][..size];
                to[start + to_lane * size..][..size].copy_from_slice(from);
            }
        }
    }

    /// Writes zeros to the lanes from `lane` on.
    fn clear(&self, lane: usize, panel: &mut [u8]) {
        for superblock in panel.chunks_exact_mut(self.bytes) {
            for (start, size) in self.each() {
                superblock[start + lane * size..start + 16 * size].fill(0);
            }
        }
    }
}

/// A way to lay out panels, and where those of one matrix come from.
pub(crate) trait PanelLayout: Sync {
    /// Rows of the matrix.
    fn rows(&self) -> usize;

    /// Bytes of a panel.
    fn panel_bytes(&self) -> usize;

    /// Where the panels come from.
    fn source(&self) -> &PanelSource;

    /// What a panel is made of.
    fn superblocks(&self) -> SuperblockLayout;

    /// Writes 16 rows to a panel, a row a lane.
    fn put_rows(&self, rows: &[StoredRow<'_>; 16], buffer: &mut PackBuffer, panel: &mut [u8]);

    /// The number of panels, the last of which may have fewer rows.
    fn n_panels(&self) -> usize {
        self.rows().div_ceil(16)
    }
}

/// Writes 16 rows to a panel, compiled for the instruction set.
struct Put<'a, P> {
    to: &'a P,
    rows: [StoredRow<'a>; 16],
    buffer: &'a mut PackBuffer,
    panel: &'a mut [u8],
}

impl<P: PanelLayout> Kernel for Put<'_, P> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.to.put_rows(&self.rows, self.buffer, self.panel);
    }
}

/// Writes `rows` of the matrix, at most 16, to the lanes of `panel`, and zeros to the lanes
/// left.
fn fill<P: PanelLayout>(
    device: &Device,
    to: &P,
    parts: MatrixParts<'_>,
    rows: impl ExactSizeIterator<Item = usize>,
    buffer: &mut PackBuffer,
    panel: &mut [u8],
) {
    let n = rows.len();
    let mut stored = rows.map(|row| parts.find(row));
    let Some(mut last) = stored.next() else {
        return panel.fill(0);
    };
    // Missing rows are filled with the last one again, which costs less than a branch for each.
    let rows = std::array::from_fn(|lane| {
        if lane > 0 {
            last = stored.next().unwrap_or(last);
        }
        last
    });
    device.isa.run(Put {
        to,
        rows,
        buffer,
        panel,
    });
    if n < 16 {
        to.superblocks().clear(n, panel);
    }
}

/// The rows of panel `p`.
fn rows_of(to: &impl PanelLayout, p: usize) -> Range<usize> {
    16 * p..(16 * p + 16).min(to.rows())
}

/// The panels of `parts` in the layout `to`: mapped if all parts are to stay in their file, else
/// packed.
pub(crate) fn source<P: PanelLayout>(
    device: &Device,
    buffers: &[Mutex<PackBuffer>],
    to: &P,
    parts: &[Stored<'_>],
) -> PanelSource {
    let kept: Option<Vec<_>> = parts.iter().map(Stored::keep).collect();
    let all = MatrixParts::Stored(parts);
    // Any worker may pack any panel in a step, so all allocate their buffers now, those for unpacked
    // rows too.
    for buffer in buffers {
        let buffer = &mut *lock(buffer);
        let mut panels = buffer.take(PACKED_AT_ONCE * to.panel_bytes());
        if kept.is_some() {
            let panel = &mut panels.elements_mut::<u8>()[..to.panel_bytes()];
            fill(device, to, all, 0..to.rows().min(1), buffer, panel);
        }
        buffer.panels = Some(panels);
    }
    match kept {
        Some(kept) => PanelSource::Mapped(kept),
        None => PanelSource::Packed(pack_all(device, buffers, to, parts)),
    }
}

/// Packs all panels, on all workers.
fn pack_all<P: PanelLayout>(
    device: &Device,
    buffers: &[Mutex<PackBuffer>],
    to: &P,
    parts: &[Stored<'_>],
) -> Region {
    let (n, bytes) = (to.n_panels(), to.panel_bytes());
    let mut data = Region::zeroed(n * bytes);
    let all = DisjointSlice::new(data.elements_mut::<u8>());
    // Ranges as large as what is given back at a time, but several for each worker; of a small matrix one for each, so
    // that all of a mixture's experts do not come to lie near the first workers.
    let n_workers = device.pool.n_workers();
    let fair = n / (8 * n_workers);
    let least = n.div_ceil(n_workers).clamp(1, 4);
    let chunk = (LOAD_RANGE_BYTES / bytes.max(1)).min(fair).max(least);
    device.pool.each(n, chunk, |worker, range| {
        let buffer = &mut *lock(&buffers[worker]);
        let parts_of = MatrixParts::Stored(parts);
        for p in range.clone() {
            // SAFETY: every panel is visited once.
            let panel = unsafe { all.part(p * bytes..(p + 1) * bytes) };
            fill(device, to, parts_of, rows_of(to, p), buffer, panel);
        }
        release(parts, 16 * range.start..16 * range.end);
    });
    data
}

/// Gives back the memory of `rows` of the whole matrix, which have been copied.
fn release(parts: &[Stored<'_>], rows: Range<usize>) {
    let mut first = 0;
    for part in parts {
        let clamp = |row: usize| row.clamp(first, first + part.rows) - first;
        let own = clamp(rows.start)..clamp(rows.end);
        if !own.is_empty() {
            part.release(own);
        }
        first += part.rows;
    }
}

/// A worker's pack buffer, which nobody else uses.
fn lock(buffer: &Mutex<PackBuffer>) -> MutexGuard<'_, PackBuffer> {
    buffer.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `work(range, bytes)` for the panels of `range`: once if they are packed, else for some
/// at a time.
pub(crate) fn each<P: PanelLayout>(
    device: &Device,
    of: &P,
    buffer: &Mutex<PackBuffer>,
    range: Range<usize>,
    mut work: impl FnMut(Range<usize>, &[u8]),
) {
    let bytes = of.panel_bytes();
    let kept = match of.source() {
        PanelSource::Packed(data) => {
            return work(
                range.clone(),
                &data.elements()[range.start * bytes..range.end * bytes],
            );
        }
        PanelSource::Mapped(kept) => kept,
    };
    let mut buffer = lock(buffer);
    let mut panels = buffer.take(PACKED_AT_ONCE * bytes);
    for start in range.clone().step_by(PACKED_AT_ONCE) {
        let two = start..(start + PACKED_AT_ONCE).min(range.end);
        for (p, panel) in two
            .clone()
            .zip(panels.elements_mut::<u8>().chunks_exact_mut(bytes))
        {
            fill(
                device,
                of,
                MatrixParts::Kept(kept),
                rows_of(of, p),
                &mut buffer,
                panel,
            );
        }
        work(two.clone(), &panels.elements()[..two.len() * bytes]);
    }
    buffer.panels = Some(panels);
}

/// Calls `work` with a panel of rows `ids`, at most 16.
pub(crate) fn selected<P: PanelLayout>(
    device: &Device,
    of: &P,
    buffer: &Mutex<PackBuffer>,
    ids: &[u32],
    work: impl FnOnce(&[u8]),
) {
    let bytes = of.panel_bytes();
    let start = |id: u32| id as usize / 16 * bytes;
    let follow = ids.iter().zip(ids[0]..).all(|(&id, next)| id == next);
    if let PanelSource::Packed(data) = of.source()
        && ids[0].is_multiple_of(16)
        && follow
    {
        return work(&data.elements()[start(ids[0])..][..bytes]);
    }
    let mut buffer = lock(buffer);
    let mut panels = buffer.take(PACKED_AT_ONCE * bytes);
    let panel = &mut panels.elements_mut::<u8>()[..bytes];
    match of.source() {
        PanelSource::Packed(data) => {
            let superblocks = of.superblocks();
            for (lane, &id) in ids.iter().enumerate() {
                let from = &data.elements()[start(id)..][..bytes];
                superblocks.copy_lane(from, id as usize % 16, panel, lane);
            }
        }
        PanelSource::Mapped(kept) => {
            let rows = ids.iter().map(|&id| id as usize);
            fill(
                device,
                of,
                MatrixParts::Kept(kept),
                rows,
                &mut buffer,
                panel,
            );
        }
    }
    work(panel);
    buffer.panels = Some(panels);
}

/// Dequantizes row `row` of a matrix that is not packed, times `factor`.
pub(crate) fn row(kept: &[Kept], row: usize, factor: f32, out: &mut [f32]) {
    let StoredRow { part, row } = MatrixParts::Kept(kept).find(row);
    part.decode_row(row, out);
    out.iter_mut().for_each(|x| *x *= factor);
}
