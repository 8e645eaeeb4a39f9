//! What carries out the calls of a [`Driver`](crate::driver::Driver): a GPU, or a dry run; and what it is
//! asked to launch.

use crate::args::{Address, Args};
use std::any::Any;
use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

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

/// A file of kernels and the numbers it is compiled with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Kernel {
    pub(crate) file: &'static str,
    pub(crate) name: &'static str,
    pub(crate) defines: Vec<(&'static str, usize)>,
}

impl Kernel {
    pub(crate) fn new(file: &'static str, name: &'static str) -> Self {
        Kernel {
            file,
            name,
            defines: Vec::new(),
        }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}::{}", self.file, self.name)?;
        self.defines
            .iter()
            .try_for_each(|(name, value)| write!(f, " {name}={value}"))
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

/// A recorded step, as its machine keeps it.
pub(crate) type Graph = Box<dyn Any + Send>;

/// A machine has too little memory for what was asked of it.
pub(crate) struct OutOfMemory;

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
    /// Copies the `bytes` that `fill` writes, which is called once. The copy may end after this returns, but before
    /// what is asked for next.
    fn fill(
        &self,
        to: Address,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), String>;
    /// Copies from the device once all before has run.
    fn read(&self, to: &mut [u8], from: Address) -> Result<(), String>;
    fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<(), String>;
    /// Waits for everything.
    fn wait(&self) -> Result<(), String>;
    /// How many clusters of a launch the device has room for at once.
    fn clusters_at_once(&self, kernel: &Kernel, grid: Grid) -> Result<usize, String>;
    fn launch(&self, kernel: &Kernel, grid: Grid, args: &Args) -> Result<(), String>;
    /// Compiles those of `kernels` that are not compiled yet, side by side. An error shows when the kernel is
    /// launched.
    fn compile(&self, kernels: Vec<Kernel>);
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
