//! Times products as a [`ProductTuning`] may have them computed, on the GPU that is there.
//!
//! One thing after the other is changed. All choices of it multiply the same matrices of random weights, which are more
//! than caches hold and as unequal in size as those of a layer, in turns; [`clear_choice`] decides. Launches are recorded
//! and replayed, as those of a step are.

use crate::launch::Device;
use crate::machine::Graph;
use crate::matmul::{self, GEMV_ROWS, Tiles, Weights, has_pipelines};
use crate::memory::{Buffer, Cell};
use crate::pack::{self, Packing, TILE_ROWS};
use crate::tuning::{GemmFrom, NEVER, ProductTuning, TriedProducts};
use backend::trial::{clear_choice, quartiles};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Columns of the matrices.
const COLS: usize = 4096;

/// Row tiles of the matrices for each multiprocessor.
const ROW_TILES: [usize; 4] = [2, 4, 8, 16];

/// Bytes of weights, at least: several times the largest L2 cache.
const WEIGHT_BYTES: usize = 256 << 20;

/// Part of the free memory that weights may take.
const MEMORY_SHARE: usize = 4;

/// Bytes of weights that are read between two looks at the clock, at least.
const TIMED_BYTES: usize = 1 << 30;

/// The time of one comparison, and the least and most rounds of it.
const LIMIT: Duration = Duration::from_millis(40);
const ROUNDS: std::ops::RangeInclusive<usize> = 5..=21;

/// How many times as fast as a slow round a fast one may be (their quarters).
const STEADY: f64 = 1.6;

/// Rows of activations of plain decoding and of steps with drafts.
const FEW_ROWS: [usize; 3] = [1, 4, 8];

/// Rows of activations at which a GEMV and a GEMM are about as fast.
const MORE_ROWS: [usize; 3] = [24, 40, 56];

/// Products to be timed.
struct Products<'a> {
    device: &'a Device,
    tiles: Tiles,
    matrices: Vec<Weights>,
    x: Arc<Cell>,
    y: Buffer,
}

/// Times how products with weights of `packing` are fastest; `None` in a dry run, without the memory for it, or if times
/// were not steady.
pub(crate) fn products(device: &Device, packing: Packing) -> Option<TriedProducts> {
    let start = Instant::now();
    let driver = &device.driver;
    if !driver.compiles() {
        return None;
    }
    let products = Products::new(device, packing)?;
    let default = ProductTuning::default_of(driver, packing);
    // All kernels that are compared, several at a time.
    driver.compile_ahead(|| {
        for field in Field::ALL {
            let others = field.others(device, packing, default);
            let choices = std::iter::once(default).chain(others);
            choices.for_each(|tuning| products.launch(tuning, field.rows()));
        }
    });
    let tried = products.compare(packing, default);
    // Whoever loads a model does so without a trial, too.
    let failed = driver.has_failed() && driver.take_error().is_some();
    let (tuning, speedup, bytes_per_second) = tried.filter(|_| !failed)?;
    Some(TriedProducts {
        weights: packing.to_string(),
        tuning,
        speedup,
        bytes_per_second,
        took_ms: start.elapsed().as_secs_f64() * 1e3,
    })
}

/// A field of a [`ProductTuning`], in the order in which fields are varied.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Field {
    Pipelines,
    RowTilesAtOnce,
    Unroll,
    TwoRowTilesFrom,
    GemmFrom,
}

impl Field {
    pub(crate) const ALL: [Field; 5] = [
        Field::Pipelines,
        Field::RowTilesAtOnce,
        Field::Unroll,
        Field::TwoRowTilesFrom,
        Field::GemmFrom,
    ];

    /// Rows of activations of the products that show what the field is worth.
    fn rows(self) -> &'static [usize] {
        match self {
            Field::GemmFrom => &MORE_ROWS,
            _ => &FEW_ROWS,
        }
    }

    /// `of` with each other value of this field; none, where the field does not count.
    pub(crate) fn others(
        self,
        device: &Device,
        packing: Packing,
        of: ProductTuning,
    ) -> Vec<ProductTuning> {
        let with = |set: &dyn Fn(&mut ProductTuning, usize), values: &[usize]| {
            let changed = values.iter().map(|&value| {
                let mut other = of;
                set(&mut other, value);
                other
            });
            changed.filter(|other| *other != of).collect()
        };
        match self {
            Field::Pipelines if has_pipelines(&device.driver) => {
                let pipelines = !of.pipelines;
                vec![ProductTuning { pipelines, ..of }]
            }
            Field::RowTilesAtOnce if of.pipelines => {
                let most = matmul::most_stage_row_tiles(packing, 1);
                let fewer: Vec<usize> = [1, 2].into_iter().filter(|&n| n < most).collect();
                with(&|of, n| of.row_tiles_at_once = n, &fewer)
            }
            Field::Unroll if !of.pipelines => with(&|of, n| of.unroll = n, &[1, 2, 4]),
            Field::TwoRowTilesFrom if !of.pipelines => {
                with(&|of, n| of.two_row_tiles_from = n, &[1, 2, 4, 8, NEVER])
            }
            Field::GemmFrom => match of.gemm_from {
                GemmFrom::Rows(_) => with(
                    &|of, passes| of.gemm_from = GemmFrom::Rows(passes * GEMV_ROWS + 1),
                    &[1, 2, 3, 4],
                ),
                GemmFrom::KibAgain(_) => with(
                    &|of, kib| of.gemm_from = GemmFrom::KibAgain(kib),
                    &[40, 80, 160, 320, 640],
                ),
            },
            Field::Pipelines | Field::RowTilesAtOnce | Field::Unroll | Field::TwoRowTilesFrom => {
                Vec::new()
            }
        }
    }
}

impl<'a> Products<'a> {
    /// Random weights, if there is memory for them.
    fn new(device: &'a Device, packing: Packing) -> Option<Self> {
        let driver = &device.driver;
        let rows = ROW_TILES.map(|n| n * driver.sms * TILE_ROWS);
        let bytes = |rows| pack::bytes(packing, rows, COLS);
        let of_set: usize = rows.iter().map(|&rows| bytes(rows).0 + bytes(rows).1).sum();
        let sets = WEIGHT_BYTES.div_ceil(of_set);
        if sets * of_set > driver.memory().0 / MEMORY_SHARE {
            return None;
        }
        let all = std::iter::repeat_n(rows, sets).flatten();
        let most = MORE_ROWS.into_iter().max().expect("some");
        let widest = rows.into_iter().max().expect("some");
        let products = Products {
            device,
            tiles: Tiles::new(packing, COLS),
            matrices: all
                .map(|rows| Weights::random(device, packing, rows, COLS))
                .collect(),
            x: Cell::f16(most, COLS),
            y: device.arena.buffer(4 * most * widest),
        };
        driver.wait();
        Some(products)
    }

    /// Launches products of so many `rows` of activations with each matrix.
    fn launch(&self, tuning: ProductTuning, rows: &[usize]) {
        let x = self.x.activations(&self.device.arena);
        for &n in rows {
            for w in &self.matrices {
                matmul::multiply(
                    self.device,
                    (n, &x),
                    self.tiles,
                    &[(w, self.y.address)],
                    tuning,
                );
            }
        }
    }

    /// Bytes of weights that the products of `rows` read, at least.
    fn bytes(&self, rows: &[usize]) -> usize {
        rows.len() * self.matrices.iter().map(Weights::bytes).sum::<usize>()
    }

    /// The fastest tuning, how many times as fast it is as the default, over all numbers of rows, and the bytes a second
    /// that products of one row read with it. `None` if something failed or times were not steady.
    fn compare(
        &self,
        packing: Packing,
        default: ProductTuning,
    ) -> Option<(ProductTuning, f64, f64)> {
        let mut best = default;
        for field in Field::ALL {
            if let Field::GemmFrom = field
                && best != default
            {
                // All changes for few rows together have to be worth it.
                let choices = [default, best];
                best = choices[self.fastest(&FEW_ROWS, &choices)?.0];
            }
            let others = field.others(self.device, packing, best);
            if !others.is_empty() {
                let choices = [vec![best], others].concat();
                best = choices[self.fastest(field.rows(), &choices)?.0];
            }
        }
        let rows = [&FEW_ROWS[..], &MORE_ROWS[..]].concat();
        let speeds = match best == default {
            true => vec![1.0; 2],
            false => self.fastest(&rows, &[default, best])?.1,
        };
        let of_one = self.fastest(&[1], &[best])?.1[0];
        Some((best, speeds[1] / speeds[0], of_one))
    }

    /// Which of `choices` is clearly the fastest for so many `rows`, the first one if none is, and the bytes a second of
    /// each: medians of rounds in which all take turns. `None` if something failed, or if the first choice was not
    /// steady: something else runs on the GPU.
    fn fastest(&self, rows: &[usize], choices: &[ProductTuning]) -> Option<(usize, Vec<f64>)> {
        let times = TIMED_BYTES.div_ceil(self.bytes(rows));
        let mut speeds = vec![Vec::new(); choices.len()];
        let recorded: Option<Vec<Graph>> = choices
            .iter()
            .map(|&tuning| self.record(rows, tuning, times))
            .collect();
        let recorded = recorded?;
        let driver = &self.device.driver;
        let start = Instant::now();
        // A first round wakes the clocks.
        for round in 0..=*ROUNDS.end() {
            if round > *ROUNDS.start() && start.elapsed() > LIMIT {
                break;
            }
            for (graph, speeds) in recorded.iter().zip(&mut speeds) {
                let start = Instant::now();
                driver.replay(graph);
                driver.wait();
                let seconds = start.elapsed().as_secs_f64().max(1e-9);
                if round > 0 {
                    speeds.push((times * self.bytes(rows)) as f64 / seconds);
                }
            }
        }
        // Unit tests run beside each other on one GPU, where times are never steady.
        let is_steady = cfg!(test) || is_steady(&speeds[0]);
        (is_steady && !driver.has_failed()).then(|| clear_choice(&speeds))
    }

    /// Records so many `times` the products of `rows`; `None` if that failed.
    fn record(&self, rows: &[usize], tuning: ProductTuning, times: usize) -> Option<Graph> {
        // Loads kernels and allocates buffers before.
        self.launch(tuning, rows);
        let work = || (0..times).for_each(|_| self.launch(tuning, rows));
        self.device.driver.record(work).map(|(graph, ())| graph)
    }
}

/// Whether rounds of these speeds had the GPU for themselves.
pub(crate) fn is_steady(speeds: &[f64]) -> bool {
    let [slow, _, fast] = quartiles(&mut speeds.to_vec());
    fast <= STEADY * slow
}

/// Launches each of `all` as a trial does, and says whether there was memory for it.
#[cfg(test)]
pub(crate) fn launch_all(device: &Device, packing: Packing, all: &[ProductTuning]) -> bool {
    let rows = [&FEW_ROWS[..], &[GEMV_ROWS], &MORE_ROWS[..]].concat();
    let products = Products::new(device, packing);
    let launched = products.map(|p| all.iter().for_each(|&tuning| p.launch(tuning, &rows)));
    launched.is_some()
}
