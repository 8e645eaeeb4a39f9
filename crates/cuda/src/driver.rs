//! What everything on the device goes through: memory, copies, launches and graphs, on one stream.
//!
//! Nothing here returns an error to an op. The first one is kept; from then on
//! every call does nothing until [`Driver::take_error`]. A [`Machine`] carries calls out:
//! a GPU, or a dry run.

use crate::CudaOptions;
use crate::args::KernelStruct;
use crate::compile::Kernel;
use crate::dry::{Dry, DryRun, Log};
use crate::gpu::Gpu;
use std::any::Any;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// An address in the device's memory; 0 is none.
pub(crate) type Address = u64;

/// What a lock guards, after a panic too: nothing stays half done under one.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Why there is no GPU to use.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver on this machine.
    #[error("there is no NVIDIA driver (libcuda) on this machine")]
    NoDriver,
    /// No compiler on this machine.
    #[error(
        "the driver is there, but not NVRTC (libnvrtc), which compiles the kernels: \
         install the CUDA toolkit or `pip install nvidia-cuda-nvrtc`, and put its folder on LD_LIBRARY_PATH"
    )]
    NoCompiler,
    /// No such device.
    #[error("there is no CUDA device {ordinal}; there are {count}")]
    NoDevice {
        /// What was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// Too old.
    #[error("{device} has compute capability {major}.{minor}; 8.0 is the least")]
    TooOld {
        /// The device's name.
        device: String,
        /// Major number.
        major: i32,
        /// Minor number.
        minor: i32,
    },
    /// The driver refused.
    #[error("{doing}: {message}")]
    Driver {
        /// What was tried.
        doing: &'static str,
        /// What it said.
        message: String,
    },
}

/// A recorded step, as its machine keeps it.
pub(crate) type Graph = Box<dyn Any + Send>;

/// A machine has too little memory for what was asked of it.
pub(crate) struct OutOfMemory;

/// A number of a size and layout that host and device share.
///
/// # Safety
///
/// Every pattern of bits is a value, and there is no padding.
pub(crate) unsafe trait Number: Copy {}

macro_rules! numbers {
    ($($number:ty)*) => {$(
        // SAFETY: a primitive number.
        unsafe impl Number for $number {}
    )*};
}
numbers!(u8 u16 u32 u64 f32);

/// The bytes of `values`.
fn bytes<T: Number>(values: &[T]) -> &[u8] {
    // SAFETY: as many bytes, all of them initialized, for a `Number` has no padding.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of `values`, to write.
fn bytes_mut<T: Number>(values: &mut [T]) -> &mut [u8] {
    // SAFETY: as many bytes; whatever is written there is a `Number`.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

/// Arguments of a launch, by value.
#[derive(Clone, Default)]
pub(crate) struct Args {
    words: Vec<u64>,
    /// Where each argument starts in `words`.
    starts: Vec<usize>,
}

impl Args {
    pub(crate) fn ptr(mut self, x: Address) -> Self {
        self.starts.push(self.words.len());
        self.words.push(x);
        self
    }
    pub(crate) fn int(self, x: usize) -> Self {
        assert!(i32::try_from(x).is_ok(), "{x} fits a kernel's int");
        self.ptr(x as u64)
    }
    pub(crate) fn long(self, x: usize) -> Self {
        self.ptr(x as u64)
    }
    pub(crate) fn float(self, x: f32) -> Self {
        self.ptr(u64::from(x.to_bits()))
    }
    pub(crate) fn of(mut self, x: &impl KernelStruct) -> Self {
        self.starts.push(self.words.len());
        self.words.extend(x.words());
        self
    }
    /// The words of each argument, in order.
    pub(crate) fn each(&self) -> impl Iterator<Item = &[u64]> {
        let ends = self
            .starts
            .iter()
            .skip(1)
            .copied()
            .chain([self.words.len()]);
        let ranges = self.starts.iter().copied().zip(ends);
        ranges.map(|(from, to)| &self.words[from..to])
    }
}

/// Blocks and threads of a launch.
#[derive(Clone, Copy)]
pub(crate) struct Grid {
    pub(crate) blocks: (usize, usize),
    pub(crate) threads: usize,
    /// Bytes of shared memory that the kernel does not declare itself.
    pub(crate) shared: usize,
    /// Blocks that do the work of one together, where a device has clusters.
    pub(crate) cluster: usize,
}

impl Grid {
    pub(crate) fn new(blocks: usize, threads: usize) -> Self {
        Grid::rect(blocks, 1, threads)
    }
    pub(crate) fn rect(x: usize, y: usize, threads: usize) -> Self {
        Grid {
            blocks: (x, y),
            threads,
            shared: 0,
            cluster: 1,
        }
    }
    /// A block of `threads` for each of `rows`; of few rows, one that is cut into a cluster,
    /// for a single multiprocessor would take long to issue what so many threads do.
    pub(crate) fn rows(rows: usize, threads: usize) -> Self {
        let cluster = if rows <= 4 && threads >= 512 && threads.is_multiple_of(128) {
            4
        } else {
            1
        };
        Grid {
            cluster,
            ..Grid::new(rows * cluster, threads / cluster)
        }
    }
    /// A thread for each of `n` values.
    pub(crate) fn each(n: usize) -> Self {
        Grid::new(n.div_ceil(256), 256)
    }
}

/// What a device is.
pub(crate) struct Facts {
    pub(crate) name: String,
    pub(crate) ordinal: usize,
    /// Streaming multiprocessors.
    pub(crate) sms: usize,
    /// Bytes of shared memory that a block can have.
    pub(crate) shared: usize,
    /// `sm_` number, such as 90.
    pub(crate) arch: u32,
}

/// Carries out what a [`Driver`] is asked for, in order, and says what went wrong.
///
/// Addresses and sizes are the callers' own and never 0.
pub(crate) trait Machine: Send + Sync {
    /// Prepares the calling thread; comes before every other call.
    fn make_current(&self);
    /// Version of the compiler of kernels.
    fn compiler(&self) -> String;
    /// Free and total bytes.
    fn memory(&self) -> (usize, usize);
    fn allocate(&self, bytes: usize) -> Result<Result<Address, OutOfMemory>, String>;
    /// Gives memory back; what still runs with it ends first.
    fn free(&self, address: Address);
    fn zero(&self, address: Address, bytes: usize) -> Result<(), String>;
    /// Copies to the device; `from` may be used again at once.
    fn write(&self, to: Address, from: &[u8]) -> Result<(), String>;
    /// Copies from the device once all before has run.
    fn read(&self, to: &mut [u8], from: Address) -> Result<(), String>;
    fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<(), String>;
    /// Waits for everything.
    fn wait(&self) -> Result<(), String>;
    fn launch(&self, kernel: &Kernel, grid: Grid, args: &Args) -> Result<(), String>;
    /// Has what follows recorded instead of run.
    fn begin_recording(&self) -> Result<(), String>;
    /// What was recorded; `None` if nothing can be made of it.
    fn end_recording(&self) -> Result<Option<Graph>, String>;
    fn replay(&self, graph: &Graph) -> Result<(), String>;
    /// Starts or stops what a profiler shows.
    fn profile(&self, on: bool) -> Result<(), String>;
    /// Bytes of the global variable `name` of every kernel in use that declares one.
    fn globals(&self, name: &str) -> Vec<(String, Vec<u8>)>;
}

/// One device.
pub(crate) struct Driver {
    machine: Box<dyn Machine>,
    /// What a dry run has written down; absent on a GPU.
    pub(crate) log: Option<Arc<Mutex<Log>>>,
    pub(crate) name: String,
    pub(crate) ordinal: usize,
    pub(crate) sms: usize,
    /// Bytes of shared memory that a block can have.
    pub(crate) shared: usize,
    /// `sm_` number, such as 90.
    pub(crate) arch: u32,
    error: Mutex<Option<String>>,
    failed: AtomicBool,
    /// Whether launches are recorded; then the host cannot take part.
    recording: AtomicBool,
    /// Whether the host had to, so that the record is of no use.
    spoiled: AtomicBool,
}

impl Driver {
    /// Opens a GPU.
    pub(crate) fn new(options: CudaOptions) -> Result<Self, CudaError> {
        let (gpu, facts) = Gpu::open(options)?;
        Ok(Driver::on(Box::new(gpu), facts))
    }

    /// Drives a machine that runs nothing and writes down what it is asked for.
    pub(crate) fn dry(device: DryRun) -> Self {
        let dry = Dry::default();
        let log = Some(dry.log.clone());
        Driver {
            log,
            ..Driver::on(Box::new(dry), device.facts())
        }
    }

    fn on(machine: Box<dyn Machine>, facts: Facts) -> Self {
        let Facts {
            name,
            ordinal,
            sms,
            shared,
            arch,
        } = facts;
        Driver {
            machine,
            log: None,
            name,
            ordinal,
            sms,
            shared,
            arch,
            error: Mutex::default(),
            failed: AtomicBool::new(false),
            recording: AtomicBool::new(false),
            spoiled: AtomicBool::new(false),
        }
    }

    /// Whether calls do nothing because an earlier one failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    pub(crate) fn fail(&self, message: String) {
        let mut error = lock(&self.error);
        error.get_or_insert(message);
        self.failed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn take_error(&self) -> Option<String> {
        self.failed.store(false, Ordering::Relaxed);
        lock(&self.error).take()
    }

    /// Prepares the calling thread, and says whether to go on.
    fn ready(&self) -> bool {
        if self.has_failed() {
            return false;
        }
        self.machine.make_current();
        true
    }

    /// Whether the host may take part; what is being recorded is spoiled if it had to.
    fn alone(&self) -> bool {
        let recording = self.recording.load(Ordering::Relaxed);
        if recording {
            self.spoiled.store(true, Ordering::Relaxed);
        }
        !recording && self.ready()
    }

    fn keep<T>(&self, result: Result<T, String>) -> Option<T> {
        result.map_err(|message| self.fail(message)).ok()
    }

    /// Version of the compiler of kernels.
    pub(crate) fn compiler(&self) -> String {
        self.machine.compiler()
    }

    /// Free and total bytes.
    pub(crate) fn memory(&self) -> (usize, usize) {
        self.ready();
        self.machine.memory()
    }

    /// `bytes` of memory, or 0 and an error that says what they were for.
    pub(crate) fn allocate(&self, bytes: usize, what: &str) -> Address {
        if bytes == 0 || !self.ready() {
            return 0;
        }
        match self.keep(self.machine.allocate(bytes)) {
            Some(Ok(address)) => address,
            Some(Err(OutOfMemory)) => {
                let (free, total) = self.memory();
                let mib = |n: usize| n.div_ceil(1 << 20);
                self.fail(format!(
                    "out of memory: {what} needs {} MiB, {} of {} MiB are free; \
                     a smaller --context, --parallel or --chunk, a smaller --kv format, or a model in fewer bits needs less",
                    mib(bytes),
                    mib(free),
                    mib(total)
                ));
                0
            }
            None => 0,
        }
    }

    /// Gives memory back; what still runs with it ends first.
    pub(crate) fn free(&self, address: Address) {
        if address != 0 {
            self.machine.make_current();
            self.machine.free(address);
        }
    }

    pub(crate) fn zero(&self, address: Address, bytes: usize) {
        if address != 0 && self.ready() {
            self.keep(self.machine.zero(address, bytes));
        }
    }

    /// Copies to the device; `from` may be used again at once.
    pub(crate) fn write<T: Number>(&self, to: Address, from: &[T]) {
        if to != 0 && !from.is_empty() && self.alone() {
            self.keep(self.machine.write(to, bytes(from)));
        }
    }

    /// Copies from the device once all before has run.
    pub(crate) fn read<T: Number>(&self, to: &mut [T], from: Address) {
        if from != 0 && !to.is_empty() && self.alone() {
            self.keep(self.machine.read(bytes_mut(to), from));
        }
    }

    pub(crate) fn copy(&self, to: Address, from: Address, bytes: usize) {
        if to != 0 && from != 0 && bytes > 0 && self.ready() {
            self.keep(self.machine.copy(to, from, bytes));
        }
    }

    /// Waits for everything.
    pub(crate) fn wait(&self) {
        if self.alone() {
            self.keep(self.machine.wait());
        }
    }

    /// Bytes of the global variable `name` in the module of every kernel that was used and
    /// declares one, with the kernel's name. Waits for the device.
    pub(crate) fn globals(&self, name: &str) -> Vec<(String, Vec<u8>)> {
        self.wait();
        self.machine.globals(name)
    }

    /// Starts a kernel after everything before it.
    pub(crate) fn launch(&self, kernel: &Kernel, grid: Grid, args: Args) {
        if grid.blocks.0 != 0 && grid.blocks.1 != 0 && self.ready() {
            self.keep(self.machine.launch(kernel, grid, &args));
        }
    }

    /// Tells a dry run which op the launches that follow are for.
    pub(crate) fn say(&self, op: impl FnOnce() -> String) {
        if let Some(log) = &self.log {
            lock(log).ops.push(op());
        }
    }

    /// Records what `work` launches instead of running it; nothing, if the host had
    /// to take part.
    pub(crate) fn record<T>(&self, work: impl FnOnce() -> T) -> Option<(Graph, T)> {
        if !self.ready() {
            return None;
        }
        self.keep(self.machine.begin_recording());
        self.spoiled.store(false, Ordering::Relaxed);
        self.recording.store(true, Ordering::Relaxed);
        let made = work();
        self.recording.store(false, Ordering::Relaxed);
        let graph = self.keep(self.machine.end_recording())??;
        (!self.spoiled.load(Ordering::Relaxed)).then_some((graph, made))
    }

    /// Runs `work` between the marks that profilers look for.
    pub(crate) fn profiled<T>(&self, work: impl FnOnce() -> T) -> T {
        self.wait();
        self.keep(self.machine.profile(true));
        let made = work();
        self.wait();
        self.keep(self.machine.profile(false));
        made
    }

    pub(crate) fn replay(&self, graph: &Graph) {
        if self.ready() {
            self.keep(self.machine.replay(graph));
        }
    }
}
