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
//! No files but the cache of compiled code, no models, no law of a token's choice: that of
//! `speculate::sample` is carried out here with its bits.

mod args;
mod attention;
mod batch;
mod choose;
mod compile;
mod delta;
mod driver;
mod dry;
mod elementwise;
mod fuse;
mod gemm;
mod gpu;
mod matmul;
mod memory;
mod moe;
mod pack;
mod step;
#[cfg(test)]
mod tests;

pub use driver::CudaError;
pub use dry::DryRun;
pub use gpu::device_count;

use backend::{
    Activation, Attention, Backend, Batch, Capabilities, Chain, Chained, Delta, DeltaSpec,
    DeltaWeights, DeviceError, Experts, Kv, KvSpec, Likeliest, Link, Matrix, Ops, Record, Rope,
    Sample, StepKey, Store, Tensor, TokenChoice, TokenGroups, TokenList,
};
use compile::Kernel;
use driver::{Address, Args, Driver, Grid, lock};
use memory::{Arena, Block, address};
use quant::Stored;
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

/// How to use a GPU.
#[derive(Clone, Debug, Default)]
pub struct CudaOptions {
    /// Which of the machine's devices.
    pub ordinal: usize,
    /// Where compiled code is kept; nowhere, if absent.
    pub cache: Option<PathBuf>,
    /// Files of kernels here stand for those of the same name in this crate: whoever
    /// works on them need not build it again.
    pub kernels: Option<PathBuf>,
}

/// Ops of [`backend::conformance`] whose results have the reference's bits on a GPU.
pub const EQUAL_OPS: &[&str] = &["elementwise", "moves", "rope", "argmax", "likeliest"];

/// What a GPU is, and which kernels it gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Facts {
    /// Its name, such as `NVIDIA H200`.
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
    // Before `driver`: what it holds is freed first.
    state: Mutex<State>,
    /// Where recorded steps find their rows.
    recorded_batch: Block,
    /// Zeros, by which blocks of a kernel know who comes last.
    arrivals: Block,
    arena: Arc<Arena>,
    driver: Arc<Driver>,
    /// What a dry run has written down; absent on a GPU.
    log: Option<Arc<Mutex<dry::Log>>>,
}

/// What the ops of a step share.
#[derive(Default)]
struct State {
    /// The last step's rows, and where they lie.
    batch: Option<(Batch, Block)>,
    /// Rotary frequencies, by their bits.
    frequencies: HashMap<Vec<u32>, Block>,
    /// The step that is being recorded.
    recording: Option<step::Recording>,
    steps: HashMap<step::Shape, step::Known>,
}

impl Cuda {
    /// Opens a device.
    ///
    /// # Errors
    ///
    /// [`CudaError`]: no driver, no compiler, no such device, or one too old.
    pub fn new(options: CudaOptions) -> Result<Self, CudaError> {
        Ok(Cuda::on(Driver::new(options)?))
    }

    /// A backend without a GPU: nothing is computed, what is read is zeros, and
    /// [`Cuda::take_launches`] says what a GPU would have been asked to do.
    pub fn dry_run(device: DryRun) -> Self {
        let dry = dry::Dry::default();
        let log = dry.log.clone();
        Cuda {
            log: Some(log),
            ..Cuda::on(Driver::on(Box::new(dry), device.facts()))
        }
    }

    /// What a dry run has launched since the last call, a line each: the kernel with its
    /// definitions, blocks, threads, bytes of shared memory and blocks of a cluster, and
    /// arguments, of which an address is `@`. Nothing on a GPU.
    pub fn take_launches(&self) -> Vec<String> {
        self.driver.wait();
        let log = self.log.as_deref();
        log.map_or(Vec::new(), |log| std::mem::take(&mut lock(log).launches))
    }

    /// Bytes that a dry run has allocated so far, weights included. Buffers of a step are used again,
    /// so the difference that a step makes is what its tensors take at most. 0 on a GPU.
    pub fn allocated(&self) -> u64 {
        self.log.as_deref().map_or(0, |log| lock(log).allocated)
    }

    fn on(driver: Driver) -> Self {
        let driver = Arc::new(driver);
        Cuda {
            state: Mutex::default(),
            recorded_batch: Block::new(&driver, step::BATCH_BYTES, "a step's rows"),
            arrivals: Block::zeroed(&driver, delta::ARRIVALS_BYTES, "counters"),
            arena: Arena::new(driver.clone()),
            driver,
            log: None,
        }
    }

    /// What this device is.
    pub fn facts(&self) -> Facts {
        let (free, total) = self.driver.memory();
        Facts {
            name: self.driver.name.clone(),
            capability: (self.driver.arch / 10, self.driver.arch % 10),
            multiprocessors: self.driver.sms,
            memory: (total as u64, free as u64),
            products: match matmul::feeds(&self.driver) {
                true => "fed through shared memory",
                false => "portable",
            },
            compiler: self.driver.compiler(),
        }
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
        let block = Block::zeroed(&self.driver, BYTES + 256, "measuring the memory");
        let read = |times| {
            let start = Instant::now();
            for _ in 0..times {
                let args = Args::default()
                    .ptr(block.address)
                    .long(BYTES / 16)
                    .ptr(block.address + BYTES as u64);
                let grid = Grid::new(4 * self.driver.sms, 512);
                self.launch(&Kernel::new("elementwise", "read_all"), grid, args);
            }
            self.driver.wait();
            start.elapsed().as_secs_f64()
        };
        read(2);
        (BYTES * TIMES) as f64 / (read(TIMES + 1) - read(1))
    }

    /// Runs `work` and shows what it launches to a profiler that waits for
    /// `cudaProfilerStart`, such as `ncu --profile-from-start off`.
    pub fn profiled<T>(&self, work: impl FnOnce() -> T) -> T {
        self.driver.profiled(work)
    }

    /// Bytes of the global variable `name` of every kernel in use that declares one, with
    /// the kernel's name: what kernels of [`CudaOptions::kernels`] that were instrumented
    /// for a measurement have written there.
    pub fn kernel_globals(&self, name: &str) -> Vec<(String, Vec<u8>)> {
        self.driver.globals(name)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn launch(&self, kernel: &Kernel, grid: Grid, args: Args) {
        self.driver.launch(kernel, grid, args);
    }

    fn tensor(&self, rows: usize, cols: usize) -> Tensor {
        self.arena.tensor(rows, cols)
    }

    /// Where the step's tokens lie, if it is being recorded and they are `tokens`.
    fn recorded_tokens(&self, tokens: &[u32]) -> Option<step::Tokens> {
        let state = self.state();
        let recording = state.recording.as_ref()?;
        (recording.batch.tokens == tokens).then_some(recording.tokens())
    }

    /// The step's rows on the device.
    fn batch(&self, batch: &Batch) -> Address {
        let mut state = self.state();
        if let Some(recording) = &state.recording {
            assert_eq!(
                &recording.batch, batch,
                "the rows of the step that is recorded"
            );
            return recording.at;
        }
        if let Some((last, block)) = &state.batch
            && last == batch
        {
            return block.address;
        }
        let words = batch::words(batch);
        let old = state.batch.take().map(|(_, block)| block);
        let block = match old.filter(|b| b.bytes >= 4 * words.len()) {
            Some(block) => block,
            None => Block::new(
                &self.driver,
                (4 * words.len()).next_power_of_two().max(1 << 16),
                "a step's rows",
            ),
        };
        self.driver.write(block.address, &words);
        let address = block.address;
        state.batch = Some((batch.clone(), block));
        address
    }
}

impl Backend for Cuda {
    fn name(&self) -> String {
        format!("cuda:{} ({})", self.driver.ordinal, self.driver.name)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            kv: attention::formats(),
            prompt_rows: 1024,
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
        let x = self.tensor(rows, cols);
        self.driver.write(address(&x), values);
        x
    }

    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
        let mut values = vec![0.0; x.rows() * x.cols()];
        self.driver.read(&mut values, address(x));
        values.into()
    }

    fn kv(&self, spec: KvSpec) -> Kv {
        attention::kv(self, spec)
    }

    fn delta(&self, spec: DeltaSpec) -> Delta {
        delta::delta(self, spec)
    }

    fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize) {
        delta::copy(self, delta, from, to);
    }

    fn scratch(&self, rows: usize, cols: usize) -> Tensor {
        self.tensor(rows, cols)
    }
}

impl Ops for Cuda {
    fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
        matmul::embed(self, table, tokens, scale)
    }

    fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
        matmul::matmul_into(self, x, w, y);
    }

    fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
        matmul::matmul_rows(self, x, w, ids)
    }

    fn matmul_groups(
        &self,
        x: &Tensor,
        w: &Matrix,
        scores: &Tensor,
        groups: &TokenGroups,
    ) -> [Tensor; 2] {
        matmul::matmul_groups(self, x, w, scores, groups)
    }

    fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor {
        elementwise::rms_norm(self, x, weight, width, eps)
    }

    fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
        elementwise::add(self, x, y)
    }

    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        elementwise::scale(self, "scale", x, factor)
    }

    fn glu(&self, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
        elementwise::glu(self, gate, x, activation)
    }

    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        elementwise::scale(self, "softcap", x, cap)
    }

    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        elementwise::gather(self, x, rows)
    }

    fn columns(&self, x: &Tensor, first: usize, cols: usize) -> Tensor {
        elementwise::columns(self, x, first, cols)
    }

    fn concat(&self, a: &Tensor, b: &Tensor) -> Tensor {
        elementwise::concat(self, a, b)
    }

    fn rope(&self, x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
        elementwise::rope(self, x, rope, batch)
    }

    fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch) {
        attention::append(self, kv, k, v, group, batch);
    }

    fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor {
        attention::attend(self, q, kv, attention, batch)
    }

    fn gated_delta(
        &self,
        state: &mut Delta,
        weights: &DeltaWeights,
        qkv: &Tensor,
        b: &Tensor,
        a: &Tensor,
        batch: &Batch,
    ) -> Tensor {
        delta::gated_delta(self, state, weights, [qkv, b, a], batch)
    }

    fn moe(&self, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
        moe::moe(self, x, scores, experts)
    }

    fn gate_rows(&self, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
        elementwise::gate_rows(self, x, gate, activation)
    }

    fn add_norm(
        &self,
        x: Tensor,
        y: &Tensor,
        post: Option<&Tensor>,
        factor: f32,
        next: &Tensor,
        eps: f32,
    ) -> (Tensor, Tensor) {
        elementwise::add_norm(self, x, y, (post, factor), next, eps)
    }

    fn norm_rope(
        &self,
        x: &Tensor,
        weight: &Tensor,
        rope: &Rope,
        eps: f32,
        batch: &Batch,
    ) -> Tensor {
        elementwise::norm_rope(self, x, weight, rope, eps, batch)
    }
}

impl Sample for Cuda {
    fn argmax(&self, x: &Tensor) -> Vec<u32> {
        elementwise::argmax(self, x)
    }

    fn choose_tokens(
        &self,
        x: &Tensor,
        list: Option<&TokenList>,
        choices: &[TokenChoice],
    ) -> Option<Vec<u32>> {
        choose::choose_tokens(self, x, list, choices)
    }

    fn likeliest(&self, x: &Tensor, asked: &[(usize, u32)], n: usize) -> Vec<Likeliest> {
        choose::likeliest(self, x, asked, n)
    }
}

impl Record for Cuda {
    fn finish(&self) -> Result<(), DeviceError> {
        self.driver.wait();
        match self.driver.take_error() {
            None => Ok(()),
            Some(message) => Err(DeviceError {
                device: self.name(),
                message,
            }),
        }
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
