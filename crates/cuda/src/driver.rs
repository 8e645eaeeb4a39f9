//! What everything on the device goes through: memory, copies, launches and graphs, on one stream.
//!
//! Nothing here returns an error to an op. The first one is kept; from then on
//! every call does nothing until [`Driver::take_error`]. A [`Machine`] carries calls out:
//! a GPU, or a dry run.

use crate::CudaOptions;
use crate::args::{Address, Args};
use crate::dry::{Dry, DryRun, Log};
use crate::gpu::Gpu;
use crate::machine::{CudaError, Facts, Graph, Grid, Kernel, Machine, lock};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

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
    /// Blocks of a cluster, at most, where the device takes so many. Tests ask for fewer.
    pub(crate) max_cluster: usize,
    /// How many clusters of a kernel fit at once, by the blocks of a cluster, and the threads and bytes of shared memory of
    /// a block.
    clusters: Mutex<HashMap<(Kernel, [usize; 3]), usize>>,
    /// Bytes of memory in all.
    pub(crate) total_memory: usize,
    /// Counts what all kernels before and after are apart by: copies, clears, replays, and both ends of a record.
    epoch: AtomicU64,
    error: Mutex<Option<String>>,
    failed: AtomicBool,
    /// Whether launches are recorded; then the host cannot take part.
    recording: AtomicBool,
    /// Whether the host had to, so that the record is of no use.
    spoiled: AtomicBool,
    /// Whether some thread's launches are collected.
    is_collecting: AtomicBool,
    /// The thread whose launches are collected instead of launched, and their kernels.
    collected: Mutex<Option<(ThreadId, HashSet<Kernel>)>>,
}

impl Driver {
    /// Opens a GPU.
    pub(crate) fn new(options: CudaOptions) -> Result<Self, CudaError> {
        let (gpu, facts) = Gpu::open(options)?;
        Ok(Driver::on(Box::new(gpu), facts))
    }

    /// Drives a machine that runs nothing and writes down what it is asked for.
    pub(crate) fn dry(device: DryRun) -> Self {
        let dry = Dry::new(device);
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
        machine.make_current();
        let (_, total_memory) = machine.memory();
        Driver {
            machine,
            total_memory,
            log: None,
            name,
            ordinal,
            sms,
            shared,
            arch,
            max_cluster: 16,
            clusters: Mutex::default(),
            epoch: AtomicU64::new(1),
            error: Mutex::default(),
            failed: AtomicBool::new(false),
            recording: AtomicBool::new(false),
            spoiled: AtomicBool::new(false),
            is_collecting: AtomicBool::new(false),
            collected: Mutex::default(),
        }
    }

    /// The number of the current epoch. As long as one thread launches, a kernel starts after all kernels of earlier
    /// epochs have ended. Kernels of its own epoch may still run then, where kernels start early (programmatic dependent
    /// launch).
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch.load(Ordering::Relaxed)
    }

    /// Starts another epoch. All kernels before have ended, or what was just asked for waits for them and all kernels
    /// after wait for it.
    fn start_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
    }

    /// As [`Driver::keep`], of work that waits for all kernels before, and that all kernels after wait for.
    fn keep_in_order(&self, result: Result<(), String>) {
        if self.keep(result).is_some() {
            self.start_epoch();
        }
    }

    /// Whether launches are recorded.
    pub(crate) fn is_recording(&self) -> bool {
        self.recording.load(Ordering::Relaxed)
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

    /// `bytes` of memory; `None` if there is not so much, which is no error.
    pub(crate) fn try_allocate(&self, bytes: usize) -> Option<Address> {
        if bytes == 0 || !self.ready() {
            return None;
        }
        self.keep(self.machine.allocate(bytes))?.ok()
    }

    /// `bytes` of memory, or 0 and an error that says what they were for.
    pub(crate) fn allocate(&self, bytes: usize, what: &str) -> Address {
        let address = self.try_allocate(bytes);
        if address.is_none() && bytes > 0 && !self.has_failed() {
            let (free, total) = self.memory();
            let mib = |n: usize| n.div_ceil(1 << 20);
            self.fail(format!(
                "out of memory: {what} needs {} MiB, {} of {} MiB are free; \
                 a smaller --context, --parallel or --chunk, a smaller --kv format, or a model in fewer bits needs less",
                mib(bytes),
                mib(free),
                mib(total)
            ));
        }
        address.unwrap_or(0)
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
            self.keep_in_order(self.machine.zero(address, bytes));
        }
    }

    /// Copies to the device; `from` may be used again at once.
    pub(crate) fn write<T: Number>(&self, to: Address, from: &[T]) {
        if to != 0 && !from.is_empty() && self.alone() {
            self.keep_in_order(self.machine.write(to, bytes(from)));
        }
    }

    /// Copies what `fill` writes to `bytes` of the device's memory, which may go on after this returns.
    pub(crate) fn fill(&self, to: Address, bytes: usize, fill: impl FnOnce(&mut [u8])) {
        if to != 0 && bytes > 0 && self.alone() {
            let mut fill = Some(fill);
            let mut once = |bytes: &mut [u8]| fill.take().expect("called once")(bytes);
            self.keep_in_order(self.machine.fill(to, bytes, &mut once));
        }
    }

    /// Copies from the device once all before has run.
    pub(crate) fn read<T: Number>(&self, to: &mut [T], from: Address) {
        if self.is_collecting() {
            bytes_mut(to).fill(0);
            return;
        }
        if from != 0 && !to.is_empty() && self.alone() {
            self.keep_in_order(self.machine.read(bytes_mut(to), from));
        }
    }

    pub(crate) fn copy(&self, to: Address, from: Address, bytes: usize) {
        if to != 0 && from != 0 && bytes > 0 && self.ready() {
            self.keep_in_order(self.machine.copy(to, from, bytes));
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

    /// How many clusters of a launch the device has room for at once. Compiles the kernel when it is first asked about,
    /// and remembers the answer.
    pub(crate) fn clusters_at_once(&self, kernel: &Kernel, grid: Grid) -> usize {
        if grid.cluster > self.max_cluster {
            return 0;
        }
        let key = (kernel.clone(), [grid.cluster, grid.threads, grid.shared]);
        if let Some(&clusters) = lock(&self.clusters).get(&key) {
            return clusters;
        }
        if !self.ready() {
            return 0;
        }
        let found = self.keep(self.machine.clusters_at_once(kernel, grid));
        if let Some(clusters) = found {
            lock(&self.clusters).insert(key, clusters);
        }
        found.unwrap_or(0)
    }

    /// `grid` with so much shared memory, beyond the `declared` bytes of its kernel, that a multiprocessor takes no more
    /// than its share of the blocks.
    ///
    /// A kernel that starts early (programmatic dependent launch, from compute capability 9.0 on) gets its blocks placed
    /// where those of the kernel before end first. Without this some multiprocessors take several, and others none.
    pub(crate) fn spread(&self, grid: Grid, declared: usize) -> Grid {
        if self.arch < 90 {
            return grid;
        }
        // A multiprocessor has 1024 bytes more than a block can have. The system takes as many of each block's, and sizes
        // are multiples of 128.
        let share = (grid.blocks.0 * grid.blocks.1).div_ceil(self.sms);
        let one_too_many = ((self.shared + 1024) / (share + 1) + 1).next_multiple_of(128);
        Grid {
            shared: grid
                .shared
                .max(one_too_many.saturating_sub(1024 + declared)),
            ..grid
        }
    }

    /// [`Driver::spread`] where blocks do not outnumber multiprocessors. Of more blocks some share a multiprocessor anyway,
    /// and start earlier beside what is left of the kernel before.
    pub(crate) fn spread_few(&self, grid: Grid, declared: usize) -> Grid {
        if grid.blocks.0 * grid.blocks.1 > self.sms {
            return grid;
        }
        self.spread(grid, declared)
    }

    /// Starts a kernel after everything before it.
    pub(crate) fn launch(&self, kernel: &Kernel, grid: Grid, args: Args) {
        if grid.blocks.0 == 0 || grid.blocks.1 == 0 {
            return;
        }
        let collected = self.collecting(|kernels| {
            if !kernels.contains(kernel) {
                kernels.insert(kernel.clone());
            }
        });
        if collected.is_none() && self.ready() {
            self.keep(self.machine.launch(kernel, grid, &args));
        }
    }

    /// Whether kernels may be compiled ahead: not in a dry run, not after an error, and not while others are.
    pub(crate) fn compiles(&self) -> bool {
        self.log.is_none() && !self.has_failed() && !self.is_collecting.load(Ordering::Relaxed)
    }

    /// Whether this thread's launches are collected.
    pub(crate) fn is_collecting(&self) -> bool {
        self.collecting(|_| ()).is_some()
    }

    /// Gives the kernels that this thread has collected to `look`; nothing, if its launches are launched.
    fn collecting<T>(&self, look: impl FnOnce(&mut HashSet<Kernel>) -> T) -> Option<T> {
        if !self.is_collecting.load(Ordering::Relaxed) {
            return None;
        }
        match &mut *lock(&self.collected) {
            Some((by, kernels)) if *by == thread::current().id() => Some(look(kernels)),
            _ => None,
        }
    }

    /// Runs `work` without launching its kernels, and compiles them instead, several at a time. What `work` reads
    /// from the device is zeros.
    pub(crate) fn compile_ahead(&self, work: impl FnOnce()) {
        // Launches are launched again afterwards, even if `work` panics.
        struct Collecting<'a>(&'a Driver);
        impl Drop for Collecting<'_> {
            fn drop(&mut self) {
                self.0.is_collecting.store(false, Ordering::Relaxed);
            }
        }
        *lock(&self.collected) = Some((thread::current().id(), HashSet::new()));
        self.is_collecting.store(true, Ordering::Relaxed);
        let collecting = Collecting(self);
        work();
        drop(collecting);
        let collected = lock(&self.collected).take();
        if let Some((_, kernels)) = collected {
            self.machine.compile(kernels.into_iter().collect());
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
        // Recording puts nothing into the stream that kernels after it would wait for.
        self.keep(self.machine.wait());
        self.keep(self.machine.begin_recording());
        self.start_epoch();
        self.spoiled.store(false, Ordering::Relaxed);
        self.recording.store(true, Ordering::Relaxed);
        let made = work();
        self.recording.store(false, Ordering::Relaxed);
        self.start_epoch();
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
            self.keep_in_order(self.machine.replay(graph));
        }
    }
}
