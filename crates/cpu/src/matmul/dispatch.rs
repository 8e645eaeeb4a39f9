//! Products: from the op to work ranges, and from a work range to its kernel.
//!
//! A product is cut in ranges of some panels each, which workers claim; several matrices of one
//! input are one job. Each range goes to the kernel of its weights: [`plain`], quantized in
//! vector registers ([`QuantizedWork::multiply`]) or in tiles ([`amx`]).

use super::activations::{QuantizedActivations, RowBlocks};
use super::pack::PanelSource;
use super::pack_buffer::PackBuffer;
use super::quantized::{QuantizedPanels, QuantizedWork};
use super::weights::{PackedWeights, Panels};
use super::{amx, pack, plain};
use crate::ahead::{self, MAX_MATRICES};
use crate::arch::{Detected, Kernel, Lanes};
use crate::device::Device;
use crate::memory::{values, values_mut};
use crate::pool::DisjointSlice;
use crate::shares::{piece_of, piece_of_equal};
use backend::{Matrix, Tensor};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// Bytes of weights that one worker claims at a time.
pub(crate) const WORK_RANGE_BYTES: usize = 128 << 10;

/// Multiply-adds below which handing out work costs more than it saves.
const MIN_PARALLEL: usize = 96 << 10;

/// The blocks in which kernels take `rows` rows of activations: for tiles where those are faster.
fn row_blocks(w: &QuantizedPanels, isa: Detected, rows: usize) -> RowBlocks {
    let in_tiles = amx::block(w, rows).filter(|_| isa.has_tiles());
    in_tiles.map_or_else(
        || RowBlocks::vectors(isa, rows),
        |rows| RowBlocks { rows, tiles: true },
    )
}

/// One input, quantized at most once for each size of group and kind of blocks.
struct Inputs<'a, F> {
    x: &'a Tensor,
    blocks: F,
    quantized: [Option<QuantizedActivations>; MAX_MATRICES],
}

impl<'a, F: Fn(&QuantizedPanels) -> RowBlocks> Inputs<'a, F> {
    /// Quantizes each of `runs` of rows as each of `weights` needs it, in the blocks that
    /// `blocks` names.
    fn new<'w>(
        device: &Device,
        x: &'a Tensor,
        blocks: F,
        runs: &[Range<usize>],
        weights: impl Iterator<Item = &'w PackedWeights>,
    ) -> Self {
        let mut quantized = [const { None::<QuantizedActivations> }; MAX_MATRICES];
        let mut n = 0;
        for weights in weights {
            let Panels::Quantized(w) = &weights.panels else {
                continue;
            };
            let wanted = blocks(w);
            let mut made = quantized[..n].iter().flatten();
            let groups = (w.group, w.rotated);
            if !made.any(|q| q.is_for(groups, wanted)) {
                quantized[n] = Some(QuantizedActivations::new(device, x, groups, wanted, runs));
                n += 1;
            }
        }
        Inputs {
            x,
            blocks,
            quantized,
        }
    }

    /// The activations as `w` needs them.
    fn quantized(&self, w: &QuantizedPanels) -> &QuantizedActivations {
        let blocks = (self.blocks)(w);
        let mut all = self.quantized.iter().flatten();
        all.find(|q| q.is_for((w.group, w.rotated), blocks))
            .expect("quantized for every matrix")
    }
}

/// How many panels of `bytes` a worker claims at a time, of `n_panels` of which kernels read `at_once`
/// side by side.
pub(crate) fn panels_of_range(
    device: &Device,
    n_panels: usize,
    bytes: usize,
    at_once: usize,
) -> usize {
    // A few ranges for each worker at least.
    let fair = n_panels.div_ceil(4 * device.pool.n_workers()).max(1);
    let chunk = (WORK_RANGE_BYTES / bytes.max(1)).clamp(1, fair);
    chunk.next_multiple_of(if at_once >= 8 && fair >= 8 { 8 } else { 4 })
}

/// The product of one matrix and some rows of the input, as part of a job.
struct Product<'a> {
    weights: &'a PackedWeights,
    /// Rows of the input.
    rows: Range<usize>,
    n_panels: usize,
    /// Panels of a work range.
    chunk: usize,
    y: DisjointSlice<'a, f32>,
}

impl<'a> Product<'a> {
    /// `y = x wᵀ` for `rows` of `x`.
    fn new(device: &Device, w: &'a Matrix, rows: Range<usize>, y: DisjointSlice<'a, f32>) -> Self {
        let weights = w.storage::<PackedWeights>();
        let layout = weights.layout();
        let (n_panels, bytes) = (layout.n_panels(), layout.panel_bytes());
        let at_once = device.tuning.of(weights.kind()).of_rows(rows.len());
        Product {
            weights,
            rows,
            n_panels,
            chunk: panels_of_range(device, n_panels, bytes, at_once),
            y,
        }
    }

    fn n_ranges(&self) -> usize {
        self.n_panels.div_ceil(self.chunk)
    }

    /// Multiplies work range `i`, with a worker's pack buffer.
    fn run<F: Fn(&QuantizedPanels) -> RowBlocks>(
        &self,
        device: &Device,
        buffer: &Mutex<PackBuffer>,
        inputs: &Inputs<'_, F>,
        i: usize,
    ) {
        let start = i * self.chunk;
        let range = start..(start + self.chunk).min(self.n_panels);
        match &self.weights.panels {
            Panels::Plain(w) => {
                let cols = inputs.x.cols();
                let x = &values(inputs.x)[self.rows.start * cols..self.rows.end * cols];
                plain::multiply(device, buffer, w, x, self.rows.len(), range, &self.y);
            }
            Panels::Quantized(w) => {
                let (x, rows) = (inputs.quantized(w), self.rows.clone());
                multiply_quantized(device, buffer, w, x, rows, range, &self.y);
            }
        }
    }
}

/// What idle workers prefetch after `products`, which are to begin now: what was multiplied after
/// them the last time.
fn ahead_of(device: &Device, products: &[Option<Product<'_>>]) -> Option<Arc<ahead::Weights>> {
    let first = products.first()?.as_ref()?;
    let mut own = Some(ahead::Weights::new(device.isa));
    for product in products.iter().flatten() {
        let layout = product.weights.layout();
        match (layout.source(), &mut own) {
            (PanelSource::Packed(data), Some(own)) => {
                own.push(data.elements(), product.chunk * layout.panel_bytes());
            }
            _ => own = None,
        }
    }
    device.sequence.next(own, &first.weights.successor)
}

/// Calls `work(worker, i)` for each of `n` work ranges, on one thread if the products take few
/// multiply-adds. After work of several threads, those that are idle prefetch what `ahead` returns.
fn each_range(
    device: &Device,
    n: usize,
    multiply_adds: usize,
    ahead: impl FnOnce() -> Option<Arc<ahead::Weights>>,
    work: impl Fn(usize, usize) + Sync,
) {
    if multiply_adds < MIN_PARALLEL || device.pool.n_workers() == 1 {
        (0..n).for_each(|i| work(0, i));
    } else {
        let each = |worker, range: Range<usize>| range.for_each(|i| work(worker, i));
        device.pool.each_then_prefetch(ahead(), n, 1, each);
    }
}

/// `y = x wᵀ` for each `w`, as one job.
///
/// # Panics
///
/// If there is not one output of the product's shape for each matrix.
pub(crate) fn matmul_into(
    device: &Device,
    buffers: &[Mutex<PackBuffer>],
    x: &Tensor,
    w: &[&Matrix],
    y: &mut [Tensor],
) {
    assert_eq!(w.len(), y.len(), "an output for each matrix");
    let rows = x.rows();
    for (w, y) in w.chunks(MAX_MATRICES).zip(y.chunks_mut(MAX_MATRICES)) {
        let inputs = Inputs::new(
            device,
            x,
            |w: &QuantizedPanels| row_blocks(w, device.isa, rows),
            std::slice::from_ref(&(0..rows)),
            w.iter().map(|w| w.storage()),
        );
        let (mut multiply_adds, mut n_ranges) = (0, [0; MAX_MATRICES]);
        let mut y = y.iter_mut();
        let products: [Option<Product<'_>>; MAX_MATRICES] = std::array::from_fn(|i| {
            let w = w.get(i)?;
            let y = y.next().expect("as many as matrices");
            assert_eq!(
                (w.cols, w.rows, rows),
                (x.cols(), y.cols(), y.rows()),
                "shapes of a product"
            );
            multiply_adds += rows * w.rows * w.cols;
            let product = Product::new(device, w, 0..rows, DisjointSlice::new(values_mut(y)));
            n_ranges[i] = product.n_ranges();
            Some(product)
        });
        let n = n_ranges.iter().sum();
        let order = device.pool.piece_order(n);
        let ahead = || ahead_of(device, &products);
        each_range(device, n, multiply_adds, ahead, |worker, i| {
            let (which, i) = piece_of(i, order, n_ranges.iter().copied());
            let product = products[which].as_ref().expect("a matrix with work ranges");
            product.run(device, &buffers[worker], &inputs, i);
        });
    }
}

/// `y[r] = x[r] wᵀ` with the matrix `w(i)` for run `i` of rows, as one job. The runs
/// follow each other and cover `x`; the matrices are of one shape.
///
/// # Panics
///
/// If shapes differ.
pub(crate) fn matmul_runs<'a>(
    device: &Device,
    buffers: &[Mutex<PackBuffer>],
    x: &Tensor,
    runs: &[Range<usize>],
    w: impl Fn(usize) -> &'a Matrix + Sync,
) -> Tensor {
    let all = || (0..runs.len()).map(&w);
    let (rows, cols) = all().next().map_or((0, 0), |w| (w.rows, w.cols));
    let alike = |w: &Matrix| (w.rows, w.cols) == (rows, x.cols());
    assert!(all().all(alike), "shapes of a product");
    let longest = runs.iter().map(Range::len).max().unwrap_or(0);
    let blocks = |_: &QuantizedPanels| RowBlocks::vectors(device.isa, longest);
    let inputs = Inputs::new(device, x, blocks, runs, all().map(|w| w.storage()));
    let mut y = device.tensor(x.rows(), rows);
    {
        let out = DisjointSlice::new(values_mut(&mut y));
        let product = |i: usize| {
            let run = runs[i].clone();
            let y = out.after(run.start * rows);
            Product::new(device, w(i), run, y)
        };
        // As many ranges for each, of which formats with smaller panels need fewer.
        let most = (0..runs.len()).map(|i| product(i).n_ranges()).max();
        let most = most.unwrap_or(0);
        let n = runs.len() * most;
        let order = device.pool.piece_order(n);
        each_range(
            device,
            n,
            x.rows() * rows * cols,
            || None,
            |worker, i| {
                let (which, i) = piece_of_equal(i, order, runs.len(), most);
                let product = product(which);
                if i < product.n_ranges() {
                    product.run(device, &buffers[worker], &inputs, i);
                }
            },
        );
    }
    y
}

/// `y[r][i] = x[r] · w[ids[r][i]]`.
///
/// # Panics
///
/// If shapes differ, rows have different numbers of ids, or an id is not a row of the matrix.
pub(crate) fn matmul_rows(
    device: &Device,
    buffers: &[Mutex<PackBuffer>],
    x: &Tensor,
    w: &Matrix,
    ids: &[Vec<u32>],
) -> Tensor {
    assert_eq!(
        (w.cols, x.rows()),
        (x.cols(), ids.len()),
        "shapes of a product"
    );
    let n_ids = ids.first().map_or(0, Vec::len);
    assert!(ids.iter().all(|i| i.len() == n_ids), "as many for each row");
    let known = |&id: &u32| (id as usize) < w.rows;
    assert!(ids.iter().flatten().all(known), "rows of the matrix");
    let weights = w.storage::<PackedWeights>();
    let inputs = Inputs::new(
        device,
        x,
        |_: &QuantizedPanels| RowBlocks::SINGLE,
        std::slice::from_ref(&(0..x.rows())),
        std::iter::once(weights),
    );
    let mut y = device.tensor(x.rows(), n_ids);
    let panels = n_ids.div_ceil(16);
    let out = DisjointSlice::new(values_mut(&mut y));
    let chunk = (MIN_PARALLEL / 4 / (16 * w.cols).max(1)).max(1);
    let n_panels = ids.len() * panels;
    device.pool.each(n_panels, chunk, |worker, range| {
        let buffer = &buffers[worker];
        for i in range {
            let (row, at) = (i / panels, i % panels * 16);
            let ids = &ids[row][at..(at + 16).min(n_ids)];
            // SAFETY: every panel of outputs is visited once.
            let y = unsafe { out.part(row * n_ids + at..row * n_ids + at + ids.len()) };
            match &weights.panels {
                Panels::Plain(w) => {
                    let x = &values(inputs.x)[row * x.cols()..][..x.cols()];
                    plain::multiply_selected(device, buffer, w, x, ids, y);
                }
                Panels::Quantized(w) => {
                    let x = inputs.quantized(w);
                    multiply_selected_quantized(device, buffer, w, x, row, ids, y);
                }
            }
        }
    });
    y
}

/// Rows `tokens` of `table`, dequantized, times `scale`.
///
/// # Panics
///
/// If a token is not a row of the table.
pub(crate) fn embed(device: &Device, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
    let weights = table.storage::<PackedWeights>();
    let cols = table.cols;
    let mut y = device.tensor(tokens.len(), cols);
    let out = DisjointSlice::new(values_mut(&mut y));
    // A row is read 16 times as wide as it is, so few are worth sharing.
    let chunk = (MIN_PARALLEL / 16 / cols.max(1)).max(1);
    device.pool.each(tokens.len(), chunk, |_, range| {
        for i in range {
            let token = tokens[i] as usize;
            assert!(token < table.rows, "row {token} of {}", table.rows);
            // SAFETY: every row is visited once.
            let y = unsafe { out.part(i * cols..(i + 1) * cols) };
            match &weights.panels {
                Panels::Plain(w) => w.row(token, scale, y),
                Panels::Quantized(w) => device.isa.run(Dequantize { w, token, scale, y }),
            }
        }
    });
    y
}

/// Dequantizes row `token` of `w`, times `scale`, to `y`: with a fused multiply-add of the processor, if it has one.
struct Dequantize<'a> {
    w: &'a QuantizedPanels,
    token: usize,
    scale: f32,
    y: &'a mut [f32],
}

impl Kernel for Dequantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        self.w.row(self.token, self.scale, self.y);
    }
}

/// Multiplies panels `range` of `w` with rows `run` of `x`. `buffer` is where a worker packs
/// panels that are not packed already.
fn multiply_quantized(
    device: &Device,
    buffer: &Mutex<PackBuffer>,
    w: &QuantizedPanels,
    x: &QuantizedActivations,
    run: Range<usize>,
    range: Range<usize>,
    y: &DisjointSlice<'_, f32>,
) {
    debug_assert_eq!((w.group, w.cols), (x.group, x.cols));
    pack::each(device, w, buffer, range, |range, data| {
        let work = QuantizedWork {
            w,
            data,
            n_out: w.rows,
            x: x.view(run.clone()),
            range,
            y,
            reads: device.tuning.of(w.weight_kind()),
        };
        match x.blocks.tiles {
            true => amx::multiply(device, work),
            false => work.multiply(device),
        }
    });
}

/// Multiplies up to 16 selected rows of `w` with row `row` of `x`. `buffer` is where a worker
/// packs rows that do not lie in one panel.
fn multiply_selected_quantized(
    device: &Device,
    buffer: &Mutex<PackBuffer>,
    w: &QuantizedPanels,
    x: &QuantizedActivations,
    row: usize,
    ids: &[u32],
    y: &mut [f32],
) {
    let n_out = y.len();
    let y = &DisjointSlice::new(y);
    pack::selected(device, w, buffer, ids, |data| {
        let work = QuantizedWork {
            w,
            data,
            n_out,
            x: x.view(row..row + 1),
            range: 0..1,
            y,
            reads: device.tuning.of(w.weight_kind()),
        };
        work.multiply(device);
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Cpu;
    use crate::device::{Activations, CpuOptions};
    use backend::{Ops, Store};

    #[test]
    fn a_product_leads_to_the_one_that_came_after_it_the_last_time() {
        let options = CpuOptions {
            threads: 2,
            activations: Activations::F32,
            ..CpuOptions::default()
        };
        let b = Cpu::new(options).expect("two threads");
        let matrix = |rows: usize| {
            let format = quant::format("f32").expect("a plain format");
            let values = vec![0.5; rows * 512];
            let owned = quant::encode(format, &values, 512, quant::Scalar::F32);
            b.matrix(&[owned.view()])
        };
        let [first, second, third, few] = [512, 512, 512, 16].map(matrix);
        let x = b.upload(1, 512, &[1.0; 512]);
        let successor = |w: &Matrix| {
            let weights = w.storage::<PackedWeights>();
            weights.successor.lock().expect("no panic").clone()
        };
        let leads_to = |w: &Matrix, next: &Matrix| {
            let PanelSource::Packed(data) = next.storage::<PackedWeights>().layout().source()
            else {
                panic!("weights in memory");
            };
            let noted = successor(w).expect("a product after it");
            noted.begins_with(data.elements())
        };
        let multiply = |w: &[&Matrix]| {
            let mut y: Vec<Tensor> = w.iter().map(|w| b.scratch(1, w.rows)).collect();
            b.matmul_into(&x, w, &mut y);
        };
        multiply(&[&first, &few]);
        multiply(&[&few]);
        multiply(&[&second]);
        assert!(leads_to(&first, &second), "past a product of one thread");
        multiply(&[&first]);
        multiply(&[&third, &second]);
        assert!(leads_to(&first, &third) && leads_to(&second, &first));
        assert!(successor(&few).is_none() && successor(&third).is_none());
    }
}
