//! Which kernel multiplies, and how its work is cut into blocks: choices that change the speed of products and never
//! their bits.
//!
//! GPUs differ in how many multiprocessors they have, how much shared memory each of these has, and how long their memory
//! takes to answer. The defaults are what was fastest on an H200, and, of kernels that an H200 does not use, what leaves
//! enough warps on a multiprocessor. A [trial](crate::trial) times others on the GPU that is there; results are kept in a
//! file beside compiled kernels.

use crate::compile::write_whole;
use crate::driver::Driver;
use crate::launch::Device;
use crate::machine::lock;
use crate::matmul::{GEMV_ROWS, has_pipelines};
use crate::pack::Packing;
use crate::{gemm, trial};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

/// Changes when what is timed does, so that old results do not count.
const VERSION: u32 = 1;

/// Name of the file of results in the folder of compiled kernels.
const FILE: &str = "product-tuning.json";

/// Bytes that the file of results may have.
const FILE_BYTES: u64 = 1 << 20;

/// Results that are kept, of several GPUs and kinds of weights; each takes about 400 bytes.
const RESULTS: usize = 256;

/// Bytes of a matrix from which on its model is taken to be large enough for a trial.
const MATRIX_BYTES: usize = 4 << 20;

/// How products with one kind of weights are computed on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProductTuning {
    /// Whether products of up to 16 rows stream their weights through pipelines in shared memory. Only GPUs of compute
    /// capability 9.0 and up, with 225 KB of shared memory, can.
    pub pipelines: bool,
    /// Row tiles, of 16 outputs each, that a block with pipelines multiplies at once, at most: 1, 2 or 4. Wide weights
    /// have room for less.
    pub row_tiles_at_once: usize,
    /// Tiles, of 64 inputs each, by which the loop of a block without pipelines is unrolled: so many loads of weights are
    /// under way for each warp. 1, 2 or 4.
    pub unroll: usize,
    /// Row tiles for each multiprocessor from which on a block without pipelines takes two of them.
    pub two_row_tiles_from: usize,
    /// When products are a GEMM, which reads weights once, and not a GEMV, which reads them again for every 16 rows of
    /// activations.
    pub gemm_from: GemmFrom,
}

/// When products are a GEMM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GemmFrom {
    /// From so many rows of activations on.
    Rows(usize),
    /// On GPUs with warpgroups (compute capability 9.0): of more than 64 rows, or if a GEMV would read again so many KiB of
    /// weights for each multiprocessor. It takes about as long to set a GEMM up: activations are brought to an order of
    /// their own, and sums of slices meet in memory.
    KibAgain(usize),
}

impl ProductTuning {
    /// What is used where nothing was timed.
    pub(crate) fn default_of(driver: &Driver, packing: Packing) -> Self {
        ProductTuning {
            pipelines: has_pipelines(driver),
            row_tiles_at_once: 4,
            unroll: unroll_of(packing),
            two_row_tiles_from: 4,
            gemm_from: match gemm::warpgroups(driver) {
                true => GemmFrom::KibAgain(160),
                false => GemmFrom::Rows(2 * GEMV_ROWS + 1),
            },
        }
    }

    /// Whether a trial on this device could have found it: what is read from a file may be anything.
    fn is_possible(&self, driver: &Driver) -> bool {
        let gemm = match self.gemm_from {
            GemmFrom::Rows(rows) => (1..=1024).contains(&rows),
            GemmFrom::KibAgain(kib) => gemm::warpgroups(driver) && kib <= 1 << 20,
        };
        let tiles = [self.row_tiles_at_once, self.unroll];
        gemm && tiles.iter().all(|n| [1, 2, 4].contains(n))
            && (!self.pipelines || has_pipelines(driver))
    }
}

/// [`ProductTuning::unroll`] where nothing was timed: about as many bytes for each packing.
pub(crate) fn unroll_of(packing: Packing) -> usize {
    match packing {
        Packing::Plain | Packing::Codes { bits: 5.., .. } => 2,
        Packing::Codes { .. } | Packing::E4m3 { .. } | Packing::Rotated { .. } => 4,
    }
}

impl fmt::Display for ProductTuning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.pipelines, self.two_row_tiles_from) {
            (true, _) => write!(f, "pipelines, {} row tiles at once", self.row_tiles_at_once),
            (false, NEVER) => write!(f, "{} tiles ahead, 1 row tile a block", self.unroll),
            (false, from) => write!(
                f,
                "{} tiles ahead, 2 row tiles a block from {from} a multiprocessor",
                self.unroll
            ),
        }?;
        match self.gemm_from {
            GemmFrom::Rows(rows) => write!(f, ", GEMM from {rows} rows"),
            GemmFrom::KibAgain(kib) => {
                write!(f, ", GEMM from {kib} KiB read again a multiprocessor")
            }
        }
    }
}

/// In [`ProductTuning::two_row_tiles_from`]: blocks take one row tile each, however many there are.
pub(crate) const NEVER: usize = usize::MAX;

/// What a trial has found for one kind of weights on one GPU.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TriedProducts {
    /// The kind of weights, such as `4 bits in groups of 64` columns.
    pub weights: String,
    /// The fastest way to compute products with them.
    pub tuning: ProductTuning,
    /// The time of the default way over that of the fastest; 1 where the default is the fastest.
    pub speedup: f64,
    /// Bytes of weights a second that products of one row read.
    pub bytes_per_second: f64,
    /// Milliseconds that the trial took, compiling included.
    pub took_ms: f64,
}

/// How products with each kind of weights are computed on one GPU.
pub(crate) struct Tunings {
    /// Whether to time what no file has.
    trials: bool,
    /// The file of results; absent without a cache.
    file: Option<PathBuf>,
    known: Mutex<HashMap<Packing, ProductTuning>>,
}

impl Tunings {
    /// Keeps results in the folder `cache`, and makes `trials` for what is not there.
    pub(crate) fn new(cache: Option<&Path>, trials: bool) -> Self {
        Tunings {
            trials,
            file: cache.map(|folder| folder.join(FILE)),
            known: Mutex::default(),
        }
    }

    /// The results of all GPUs by [`key`]; none if there is no file of results.
    fn results(&self) -> BTreeMap<String, TriedProducts> {
        let file = self.file.as_ref().filter(|file| {
            let size = file.metadata().map(|file| file.len());
            size.is_ok_and(|size| size <= FILE_BYTES)
        });
        let text = file.and_then(|file| std::fs::read(file).ok());
        let results = text.and_then(|text| serde_json::from_slice(&text).ok());
        results.unwrap_or_default()
    }
}

/// What all results of a GPU depend on: this program, the GPU and the compiler.
fn prefix(driver: &Driver) -> String {
    format!(
        "{} ({VERSION}): {}, {} multiprocessors, sm_{}, NVRTC {}; ",
        env!("CARGO_PKG_VERSION"),
        driver.name,
        driver.sms,
        driver.arch,
        driver.compiler()
    )
}

/// The key of a result in the file: all that it depends on.
fn key(driver: &Driver, packing: Packing) -> String {
    format!("{}{packing}", prefix(driver))
}

impl Device {
    /// How products with weights of `packing` are computed.
    pub(crate) fn tuning(&self, packing: Packing) -> ProductTuning {
        let known = lock(&self.tunings.known).get(&packing).copied();
        known.unwrap_or_else(|| ProductTuning::default_of(&self.driver, packing))
    }

    /// Computes products with weights of `packing` as `tuning` says from now on.
    pub(crate) fn set_tuning(&self, packing: Packing, tuning: ProductTuning) {
        lock(&self.tunings.known).insert(packing, tuning);
    }

    /// Looks up, or times, how products with weights of `packing` are fastest, once they are known to have a matrix of
    /// `bytes`. To be called before a step is recorded.
    pub(crate) fn prepare(&self, packing: Packing, bytes: usize) {
        let is_known = lock(&self.tunings.known).contains_key(&packing);
        if is_known || !self.tunings.trials || bytes < MATRIX_BYTES {
            return;
        }
        let key = key(&self.driver, packing);
        let kept = self.tunings.results().remove(&key).map(|kept| kept.tuning);
        let kept = kept.filter(|tuning| tuning.is_possible(&self.driver));
        let tuning = kept.or_else(|| self.try_products(packing).map(|tried| tried.tuning));
        let default = || ProductTuning::default_of(&self.driver, packing);
        self.set_tuning(packing, tuning.unwrap_or_else(default));
    }

    /// Times how products with weights of `packing` are fastest, and remembers it; `None` if that cannot be done.
    pub(crate) fn try_products(&self, packing: Packing) -> Option<TriedProducts> {
        let tried = trial::products(self, packing)?;
        self.remember(packing, &tried);
        Some(tried)
    }

    /// Keeps a result in the file.
    pub(crate) fn remember(&self, packing: Packing, tried: &TriedProducts) {
        let Some(file) = &self.tunings.file else {
            return;
        };
        let mut results = self.tunings.results();
        if results.len() >= RESULTS {
            results.clear();
        }
        results.insert(key(&self.driver, packing), tried.clone());
        let text = serde_json::to_vec_pretty(&results).expect("numbers and texts");
        write_whole(file, &text);
    }

    /// The results that are kept for this GPU.
    pub(crate) fn tried_products(&self) -> Vec<TriedProducts> {
        let prefix = prefix(&self.driver);
        let results = self.tunings.results().into_iter();
        let own = results.filter(|(key, _)| key.starts_with(&prefix));
        own.map(|(_, tried)| tried).collect()
    }
}
