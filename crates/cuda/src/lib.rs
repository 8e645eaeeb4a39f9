//! An NVIDIA GPU as a backend: own kernels, compiled when they are first used.
//!
//! Nothing of CUDA is needed to build this. The driver and NVRTC, the compiler, are
//! loaded at run time; where they are missing, [`Cuda::new`] says so.
//!
//! # Bits
//!
//! A row has the same bits whatever is computed with it, as everywhere. Unlike the
//! CPU's, the sums of products, norms, attention and the delta rule have orders of
//! their own, stated at their kernels, so they differ from [`backend::Reference`]
//! by rounding; all else has its bits. Products see activations and weights in f16, scaled by
//! powers of two, and sum in f32; that moves a product by about 3e-4 of its size. Scales and
//! biases of codes are in f16 also where rows are looked up.
//!
//! No files but the cache of compiled code and of what trials have found, no models, no law of a token's choice:
//! [`backend::TokenChoice`] has it, and kernels return the same tokens.

mod args;
mod attention;
mod batch;
mod choose;
mod compile;
mod constants;
mod delta;
mod driver;
mod dry;
mod elementwise;
mod gated_projection;
mod gemm;
mod gpu;
mod kv;
mod launch;
mod machine;
mod matmul;
mod memory;
mod moe;
mod ops;
mod pack;
mod record;
mod step;
#[cfg(test)]
mod tests;
mod trial;
mod tuning;

pub use dry::DryRun;
pub use gpu::device_count;
pub use machine::CudaError;
pub use tuning::{GemmFrom, ProductTuning, TriedProducts};

use args::{Address, Args};
use backend::moments::Moments;
use backend::{
    Backend, Batch, Capabilities, Chain, Chained, Delta, DeltaSpec, DeviceError, Kv, KvSpec,
    Likeliest, Link, Matrix, PromptRows, Record, RowEdits, Sample, StepKey, Store, Tensor,
    TokenChoice, TokenList, TokenMask,
};
use driver::Driver;
use launch::Device;
use machine::{Grid, Kernel, lock};
use memory::{Arena, Block, Buffer, Cell, tensor};
use quant::Stored;
use record::Recorder;
use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;
use tuning::Tunings;

/// How to use a GPU.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Which of the machine's devices.
    pub ordinal: usize,
    /// The folder that keeps compiled code and the results of trials; nothing is kept, if absent.
    pub cache: Option<PathBuf>,
    /// Whether to time how products are fastest, for each kind of weights of which there is a matrix of 4 MiB or more, and
    /// no result in `cache`. Takes a few seconds, most of them to compile what is compared, and never changes a bit.
    pub trials: bool,
    /// Files of kernels here stand for those of the same name in this crate: whoever
    /// works on them need not build it again.
    pub kernels: Option<PathBuf>,
}

/// Ops of [`backend::conformance`] whose results have the reference's bits on a GPU.
pub const EQUAL_OPS: &[&str] = &[
    "elementwise",
    "affine",
    "moves",
    "rope",
    "argmax",
    "choose_tokens",
    "likeliest",
    "moments",
    "mask_logits",
    "edit_logits",
];

/// Rows of a prompt in a step of the largest models: more are not faster.
const LEAST_PROMPT_ROWS: usize = 1024;

/// Rows of a prompt in a step of the smallest models, on a GPU with so many bytes of memory: one for each 16 MB, rounded
/// down to a power of two. In a mixture of 26 billion weights a row takes 0.3 MB, for pairs of rows and experts, and
/// 0.2 MB more in the sliding windows of each of the requests that may run at once.
fn most_prompt_rows(memory: usize) -> usize {
    let rows = 1 << (memory / 16_000_000).max(1).ilog2();
    rows.clamp(LEAST_PROMPT_ROWS, 8192)
}

/// What a GPU is, and which kernels it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The device's name, such as `NVIDIA H200`.
    pub name: String,
    /// Compute capability, such as `(9, 0)`.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of memory, in all and free.
    pub memory: (u64, u64),
    /// How products of a few rows read their weights.
    pub products: &'static str,
    /// Version of the compiler, NVRTC.
    pub compiler: String,
}

/// One GPU.
pub struct Cuda {
    // Before `device`: what it holds is freed first.
    state: Mutex<State>,
    /// Ops that were asked for and are not launched yet.
    recorder: Mutex<Recorder>,
    /// Where recorded steps find their rows.
    recorded_batch: Block,
    device: Device,
}

/// What the ops of a step share.
#[derive(Default)]
struct State {
    /// The last step's rows, and where they lie.
    batch: Option<(Batch, Arc<Buffer>)>,
    /// Rotary frequencies and axes of positions, by their bits.
    frequencies: HashMap<Vec<u32>, Block>,
    /// The step that is being recorded.
    recording: Option<step::Recording>,
    steps: HashMap<step::Shape, step::Known>,
    /// Classes of steps whose kernels were compiled before the first of them ran.
    compiled: HashSet<step::Shape>,
    /// Whether a step since somebody asked was not the replay of a record that there was before.
    has_first_runs: bool,
}

impl Cuda {
    /// Opens a device.
    ///
    /// # Errors
    ///
    /// [`CudaError`]: no driver, no compiler, no such device, or one too old.
    pub fn new(options: CudaOptions) -> Result<Self, CudaError> {
        let tunings = Tunings::new(options.cache.as_deref(), options.trials);
        Ok(Cuda::on(Driver::new(options)?, tunings))
    }

    /// A backend without a GPU: nothing is computed, what is read is zeros, and
    /// [`Cuda::take_launches`] says what a GPU would have been asked to do.
    pub fn dry_run(device: DryRun) -> Self {
        Cuda::on(Driver::dry(device), Tunings::new(None, false))
    }

    /// What a dry run has launched since the last call, a line each: the kernel with its
    /// definitions, blocks, threads, bytes of shared memory and blocks of a cluster, and
    /// arguments, of which an address is `@`. Nothing on a GPU.
    pub fn take_launches(&self) -> Vec<String> {
        self.flush();
        let log = self.device.driver.log.as_deref();
        log.map_or(Vec::new(), |log| std::mem::take(&mut lock(log).launches))
    }

    /// The ops that a dry run has launched since the last call, a line each, as the rules of
    /// [`fusion`] left them. Nothing on a GPU.
    pub fn take_ops(&self) -> Vec<String> {
        self.flush();
        let log = self.device.driver.log.as_deref();
        log.map_or(Vec::new(), |log| std::mem::take(&mut lock(log).ops))
    }

    /// Bytes that a dry run has allocated so far, weights included. A step's buffers are
    /// used again, so what a step adds is the most that its tensors take at once. 0 on a GPU.
    pub fn allocated(&self) -> u64 {
        let log = self.device.driver.log.as_deref();
        log.map_or(0, |log| lock(log).allocated)
    }

    fn on(driver: Driver, tunings: Tunings) -> Self {
        let driver = Arc::new(driver);
        Cuda {
            state: Mutex::default(),
            recorder: Mutex::default(),
            recorded_batch: Block::new(&driver, step::BATCH_BYTES, "a step's rows"),
            device: Device {
                arrivals: Block::zeroed(&driver, launch::ARRIVALS_BYTES, "counters"),
                arena: Arena::new(driver.clone()),
                driver,
                tunings,
            },
        }
    }

    /// What this device is.
    pub fn facts(&self) -> Facts {
        let (free, total) = self.device.driver.memory();
        Facts {
            name: self.device.driver.name.clone(),
            capability: (self.device.driver.arch / 10, self.device.driver.arch % 10),
            multiprocessors: self.device.driver.sms,
            memory: (total as u64, free as u64),
            products: match matmul::has_pipelines(&self.device.driver) {
                true => "fed through shared memory",
                false => "portable",
            },
            compiler: self.device.driver.compiler(),
        }
    }

    /// Times how products with weights stored in `format` are fastest on this device, and keeps the result, which counts
    /// when the device is opened again. `None` for formats that are not packed, such as `f32`, if the device has
    /// too little free memory, or if times were not steady because something else ran on it.
    pub fn try_products(&self, format: &'static quant::Format) -> Option<TriedProducts> {
        self.device.try_products(matmul::packing_of(format)?)
    }

    /// What trials on this device have found and the cache has kept.
    pub fn tried_products(&self) -> Vec<TriedProducts> {
        self.device.tried_products()
    }

    /// A matrix of random weights stored in `format`, not `f32`, made on the device:
    /// for measurements.
    pub fn random_matrix(
        &self,
        rows: usize,
        cols: usize,
        format: &'static quant::Format,
    ) -> Matrix {
        matmul::random_matrix(self, rows, cols, format)
    }

    /// Bytes a second that this device's memory can be read at: what a step whose
    /// weights must all be read could reach at best.
    pub fn read_ceiling(&self) -> f64 {
        const BYTES: usize = 2 << 30;
        const TIMES: usize = 20;
        let block = Block::zeroed(&self.device.driver, BYTES + 256, "measuring the memory");
        let read = |times| {
            let start = Instant::now();
            for _ in 0..times {
                let args = Args::default()
                    .ptr(block.address)
                    .long(BYTES / 16)
                    .ptr(block.address + BYTES as u64);
                let grid = Grid::new(4 * self.device.driver.sms, 512);
                self.device
                    .launch(&Kernel::new("elementwise", "read_all"), grid, args);
            }
            self.device.driver.wait();
            start.elapsed().as_secs_f64()
        };
        read(2);
        (BYTES * TIMES) as f64 / (read(TIMES + 1) - read(1))
    }

    /// Runs `work` and shows what it launches to a profiler that waits for
    /// `cudaProfilerStart`, such as `ncu --profile-from-start off`.
    pub fn profiled<T>(&self, work: impl FnOnce() -> T) -> T {
        self.flush();
        self.device.driver.profiled(|| {
            let made = work();
            self.flush();
            made
        })
    }

    /// Bytes of the global variable `name` of every kernel in use that declares one, with
    /// the kernel's name: what kernels of [`CudaOptions::kernels`] that were instrumented
    /// for a measurement have written there.
    pub fn kernel_globals(&self, name: &str) -> Vec<(String, Vec<u8>)> {
        self.device.driver.globals(name)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Where the step's tokens lie, if it is being recorded and they are `tokens`.
    fn recorded_tokens(&self, tokens: &[u32]) -> Option<record::Tokens> {
        let state = self.state();
        let recording = state.recording.as_ref()?;
        (recording.batch.tokens == tokens).then_some(recording.tokens())
    }

    /// Where the step's rows lie on the device, and the memory, if that is no record's.
    fn batch(&self, batch: &Batch) -> (Address, Option<Arc<Buffer>>) {
        let mut state = self.state();
        if let Some(recording) = &state.recording {
            assert_eq!(
                &recording.batch, batch,
                "the rows of the step that is recorded"
            );
            return (recording.at, None);
        }
        if let Some((last, buffer)) = &state.batch
            && last == batch
        {
            return (buffer.address, Some(buffer.clone()));
        }
        let buffer = Arc::new(self.device.arena.of(&batch::words(batch)));
        state.batch = Some((batch.clone(), buffer.clone()));
        (buffer.address, Some(buffer))
    }
}

impl Backend for Cuda {
    fn name(&self) -> String {
        format!(
            "cuda:{} ({})",
            self.device.driver.ordinal, self.device.driver.name
        )
    }

    fn numerics(&self) -> String {
        let driver = &self.device.driver;
        let (name, arch) = (&driver.name, driver.arch);
        format!("cuda {name} sm_{arch} nvrtc {}", compile::version())
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            kv: kv::formats(),
            prompt_rows: PromptRows {
                least: LEAST_PROMPT_ROWS,
                most: most_prompt_rows(self.device.driver.total_memory),
            },
            masks: true,
            edits: true,
            records: true,
            own_memory: true,
            ..Capabilities::default()
        }
    }
}

impl Store for Cuda {
    fn matrix(&self, parts: &[Stored<'_>]) -> Matrix {
        matmul::matrix(self, parts)
    }

    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Tensor {
        assert_eq!(values.len(), rows * cols, "one value an element");
        let cell = Cell::f32(rows, cols);
        let address = cell.address(&self.device.arena);
        self.device.driver.write(address, values);
        tensor(cell)
    }

    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
        let mut values = vec![0.0; x.rows() * x.cols()];
        self.device.driver.read(&mut values, self.address(x));
        values.into()
    }

    fn free_memory(&self) -> Option<u64> {
        let (free, total) = self.device.driver.memory();
        (total > 0).then_some(free as u64)
    }

    fn kv(&self, spec: KvSpec) -> Kv {
        kv::kv(self, spec)
    }

    fn delta(&self, spec: DeltaSpec) -> Delta {
        delta::delta(self, spec)
    }

    fn kv_copy(&self, kv: &mut Kv, from: usize, to: usize) {
        kv::copy(self, kv, from, to);
    }

    fn kv_save(&self, kv: &Kv, page: usize) -> Vec<u8> {
        kv::save(self, kv, page)
    }

    fn kv_load(&self, kv: &mut Kv, page: usize, bytes: &[u8]) -> bool {
        kv::load(self, kv, page, bytes)
    }

    fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize) {
        delta::copy(self, delta, from, to);
    }

    fn delta_save(&self, delta: &Delta, slot: usize) -> Vec<u8> {
        delta::save(self, delta, slot)
    }

    fn delta_load(&self, delta: &mut Delta, slot: usize, bytes: &[u8]) -> bool {
        delta::load(self, delta, slot, bytes)
    }

    fn scratch(&self, rows: usize, cols: usize) -> Tensor {
        tensor(Cell::f32(rows, cols))
    }
}

impl Sample for Cuda {
    fn argmax(&self, x: &Tensor) -> Vec<u32> {
        choose::argmax(self, x)
    }

    fn choose_tokens(
        &self,
        x: &Tensor,
        list: Option<&TokenList>,
        choices: &[TokenChoice],
    ) -> Option<Vec<u32>> {
        choose::choose_tokens(self, x, list, choices)
    }

    fn mask_logits(&self, x: Tensor, masks: &[Option<TokenMask>]) -> Tensor {
        choose::mask_logits(self, x, masks)
    }

    fn edit_logits(&self, x: Tensor, edits: &[RowEdits]) -> Tensor {
        choose::edit_logits(self, x, edits)
    }

    fn moments(&self, x: &Tensor, rows: &[usize]) -> Vec<Moments> {
        choose::moments(self, x, rows)
    }

    fn confidences(&self, x: &Tensor) -> Vec<f32> {
        choose::confidences_of(self, x)
    }

    fn likeliest(&self, x: &Tensor, asked: &[(usize, u32)], n: usize) -> Vec<Likeliest> {
        choose::likeliest(self, x, asked, n)
    }
}

impl Record for Cuda {
    fn finish(&self) -> Result<(), DeviceError> {
        self.flush();
        self.device.driver.wait();
        match self.device.driver.take_error() {
            None => Ok(()),
            Some(message) => Err(DeviceError {
                device: self.name(),
                message,
            }),
        }
    }

    fn is_recorded(&self, key: StepKey, rows: usize, sequences: usize) -> bool {
        step::is_recorded(self, key, rows, sequences)
    }

    fn take_first_runs(&self) -> bool {
        std::mem::take(&mut self.state().has_first_runs)
    }

    fn step(
        &self,
        key: StepKey,
        batch: &Batch,
        inputs: &[&Tensor],
        work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>,
    ) -> Vec<Tensor> {
        step::step(self, key, batch, inputs, work)
    }

    fn chain(
        &self,
        chain: &Chain<'_>,
        x: &Tensor,
        work: &mut dyn FnMut(usize, &Batch, &Tensor) -> Link,
    ) -> Option<Chained> {
        step::chain(self, chain, x, work)
    }
}
