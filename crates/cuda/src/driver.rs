//! The driver and the compiler: a context, one stream, compiled code, launches,
//! graphs. Here and in `compile` is the crate's unsafe code.
//!
//! Nothing here returns an error to an op. The first one is kept; from then on
//! every call does nothing until [`Driver::take_error`].

use crate::CudaOptions;
use crate::args::KernelStruct;
use crate::compile::{self, Kernel};
use crate::fuse::Deferred;
use cudarc::driver::{result, sys};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

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
        /// Its name.
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

fn driver_error(doing: &'static str) -> impl FnOnce(result::DriverError) -> CudaError {
    move |e| CudaError::Driver {
        doing,
        message: describe(e.0),
    }
}

fn describe(code: sys::CUresult) -> String {
    let e = result::DriverError(code);
    match e.error_string() {
        Ok(text) => text.to_string_lossy().into_owned(),
        Err(_) => format!("{code:?}"),
    }
}

/// How many devices there are; 0 without a driver.
pub fn device_count() -> usize {
    // SAFETY: only tries to open the library.
    if !unsafe { sys::is_culib_present() } || result::init().is_err() {
        return 0;
    }
    result::device::get_count().map_or(0, |n| n.max(0) as usize)
}

/// A kernel ready to launch, and the module that holds its code.
#[derive(Clone, Copy)]
struct Function {
    entry: sys::CUfunction,
    module: sys::CUmodule,
}

// SAFETY: handles that the driver lets any thread use.
unsafe impl Send for Function {}

/// A recorded step.
pub(crate) struct Graph {
    exec: sys::CUgraphExec,
}

// SAFETY: a handle that the driver lets any thread use, one at a time: launches
// come from the backend's one stream.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made by `end_capture` and not used any more.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
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

/// One device.
pub(crate) struct Driver {
    context: sys::CUcontext,
    device: sys::CUdevice,
    stream: sys::CUstream,
    pub(crate) name: String,
    pub(crate) ordinal: usize,
    pub(crate) sms: usize,
    /// Bytes of shared memory that a block can have.
    pub(crate) shared: usize,
    /// `sm_` number, such as 90.
    pub(crate) arch: u32,
    compiler: compile::Compiler,
    functions: Mutex<HashMap<Kernel, Function>>,
    error: Mutex<Option<String>>,
    failed: AtomicBool,
    /// What may still become part of the next launch.
    deferred: Mutex<Option<Deferred>>,
    /// Whether launches are recorded; then the host cannot take part.
    recording: AtomicBool,
    /// Whether the host had to, so that the record is of no use.
    spoilt: AtomicBool,
}

// SAFETY: the handles may be used by any thread once its context is set, which
// every method does first.
unsafe impl Send for Driver {}
// SAFETY: as above; mutable state is behind locks.
unsafe impl Sync for Driver {}

thread_local! {
    static CURRENT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl Driver {
    pub(crate) fn new(options: CudaOptions) -> Result<Self, CudaError> {
        let ordinal = options.ordinal;
        // SAFETY: only tries to open the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        if !compile::is_present() {
            return Err(CudaError::NoCompiler);
        }
        result::init().map_err(driver_error("cannot start the driver"))?;
        let count = device_count();
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let device =
            result::device::get(ordinal as i32).map_err(driver_error("cannot open the device"))?;
        let name =
            result::device::get_name(device).map_err(driver_error("cannot name the device"))?;
        let attribute = |which| {
            // SAFETY: `device` comes from the driver.
            unsafe { result::device::get_attribute(device, which) }
                .map_err(driver_error("cannot read what the device can do"))
        };
        use sys::CUdevice_attribute as A;
        let major = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let sms = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        if major < 8 {
            return Err(CudaError::TooOld {
                device: name,
                major,
                minor,
            });
        }
        // SAFETY: `device` comes from the driver.
        let context = unsafe { result::primary_ctx::retain(device) }
            .map_err(driver_error("cannot use the device"))?;
        // SAFETY: retained above.
        unsafe { result::ctx::set_current(context) }
            .map_err(driver_error("cannot use the device"))?;
        let stream = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(driver_error("cannot make a stream"))?;
        let arch = (10 * major + minor) as u32;
        Ok(Driver {
            context,
            device,
            stream,
            name,
            ordinal,
            sms: sms as usize,
            shared: shared as usize,
            arch,
            compiler: compile::Compiler::new(arch, options.cache, options.kernels),
            functions: Mutex::default(),
            error: Mutex::default(),
            failed: AtomicBool::new(false),
            deferred: Mutex::default(),
            recording: AtomicBool::new(false),
            spoilt: AtomicBool::new(false),
        })
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

    /// Makes the context this thread's, and says whether to go on.
    fn ready(&self) -> bool {
        if self.has_failed() {
            return false;
        }
        CURRENT.with(|current| {
            if current.get() != self.context as usize {
                // SAFETY: retained for as long as `self` lives.
                if unsafe { result::ctx::set_current(self.context) }.is_ok() {
                    current.set(self.context as usize);
                }
            }
        });
        true
    }

    /// Whether the host may take part; what is being recorded is spoilt if it had to.
    fn alone(&self) -> bool {
        self.flush();
        let recording = self.recording.load(Ordering::Relaxed);
        if recording {
            self.spoilt.store(true, Ordering::Relaxed);
        }
        !recording && self.ready()
    }

    fn keep(&self, doing: &str, result: Result<(), result::DriverError>) {
        if let Err(e) = result {
            self.fail(format!("{doing}: {}", describe(e.0)));
        }
    }

    /// Free and total bytes.
    pub(crate) fn memory(&self) -> (usize, usize) {
        self.ready();
        result::mem_get_info().unwrap_or((0, 0))
    }

    /// `bytes` of memory, or 0 and an error that says what they were for.
    pub(crate) fn allocate(&self, bytes: usize, what: &str) -> Address {
        if bytes == 0 || !self.ready() {
            return 0;
        }
        // SAFETY: the context is set.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => address,
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => {
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
            Err(e) => {
                self.fail(format!("allocating {bytes} bytes: {}", describe(e.0)));
                0
            }
        }
    }

    /// Takes back what was deferred last.
    pub(crate) fn take_deferred(&self) -> Option<Deferred> {
        lock(&self.deferred).take()
    }

    /// Keeps ops back until something else is to be done, whatever that is, unless an
    /// op takes them back to do them together with its own.
    pub(crate) fn defer(&self, ops: Deferred) {
        self.flush();
        *lock(&self.deferred) = Some(ops);
    }

    /// Launches what was deferred.
    fn flush(&self) {
        for (kernel, grid, args) in self.take_deferred().map_or(Vec::new(), Deferred::launches) {
            self.start(&kernel, grid, args);
        }
    }

    /// Gives memory back; what still runs with it ends first.
    pub(crate) fn free(&self, address: Address) {
        self.flush();
        if address != 0 {
            self.ready();
            // SAFETY: from `allocate`, and freed once, by its owner. Waits for the device.
            let _ = unsafe { result::free_sync(address) };
        }
    }

    pub(crate) fn zero(&self, address: Address, bytes: usize) {
        self.flush();
        if address != 0 && self.ready() {
            // SAFETY: the caller owns `bytes` from `address` on.
            let done = unsafe { result::memset_d8_async(address, 0, bytes, self.stream) };
            self.keep("clearing memory", done);
        }
    }

    /// Copies to the device; `from` may be used again at once.
    pub(crate) fn write<T: Copy>(&self, to: Address, from: &[T]) {
        if to != 0 && !from.is_empty() && self.alone() {
            // SAFETY: the caller owns as many bytes from `to` on. The driver has copied
            // pageable memory, or staged it, when this returns.
            let done = unsafe { result::memcpy_htod_async(to, from, self.stream) };
            self.keep("copying to the device", done);
        }
    }

    /// Copies from the device once all before has run.
    pub(crate) fn read<T: Copy>(&self, to: &mut [T], from: Address) {
        if from != 0 && !to.is_empty() && self.alone() {
            // SAFETY: the caller owns as many bytes from `from` on; waited for below.
            let done = unsafe { result::memcpy_dtoh_async(to, from, self.stream) };
            self.keep("copying from the device", done);
            self.wait();
        }
    }

    pub(crate) fn copy(&self, to: Address, from: Address, bytes: usize) {
        self.flush();
        if to != 0 && from != 0 && bytes > 0 && self.ready() {
            // SAFETY: the caller owns both ranges.
            let done = unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) };
            self.keep("copying on the device", done);
        }
    }

    /// Waits for everything.
    pub(crate) fn wait(&self) {
        if self.alone() {
            // SAFETY: the stream is ours.
            let done = unsafe { result::stream::synchronize(self.stream) };
            self.keep("running", done);
        }
    }

    fn function(&self, kernel: &Kernel) -> Option<Function> {
        let mut functions = lock(&self.functions);
        if let Some(f) = functions.get(kernel) {
            return Some(*f);
        }
        let code = match self.compiler.code(kernel) {
            Ok(code) => code,
            Err(message) => {
                self.fail(message);
                return None;
            }
        };
        // Loaded for each kernel of the file that is used: modules are small and few.
        // SAFETY: `code` is a whole image made by the compiler for this device.
        let loaded = unsafe { result::module::load_data(code.as_ptr().cast()) };
        let loaded = loaded.and_then(|module| {
            let name = CString::new(kernel.name).expect("names of kernels have no zeros");
            // SAFETY: the module was just loaded; it stays for good.
            let entry = unsafe { result::module::get_function(module, name) }?;
            Ok(Function { entry, module })
        });
        match loaded {
            Ok(function) => {
                functions.insert(kernel.clone(), function);
                Some(function)
            }
            Err(e) => {
                self.fail(format!("loading kernel {}: {}", kernel, describe(e.0)));
                None
            }
        }
    }

    /// Bytes of the global variable `name` in the module of every kernel that was used and
    /// declares one, with the kernel's name. Waits for the device.
    pub(crate) fn globals(&self, name: &str) -> Vec<(String, Vec<u8>)> {
        self.wait();
        let name = CString::new(name).expect("a name without zeros");
        let functions = lock(&self.functions);
        let read = |(kernel, function): (&Kernel, &Function)| {
            let (mut address, mut size) = (0, 0);
            // SAFETY: the module is loaded, and the driver writes an address and a size.
            let found = unsafe {
                sys::cuModuleGetGlobal_v2(
                    &raw mut address,
                    &raw mut size,
                    function.module,
                    name.as_ptr(),
                )
            };
            found.result().ok()?;
            let mut bytes = vec![0u8; size];
            self.read(&mut bytes, address);
            Some((kernel.to_string(), bytes))
        };
        functions.iter().filter_map(read).collect()
    }

    /// Starts a kernel after everything before it.
    pub(crate) fn launch(&self, kernel: &Kernel, grid: Grid, args: Args) {
        self.flush();
        self.start(kernel, grid, args);
    }

    fn start(&self, kernel: &Kernel, grid: Grid, args: Args) {
        if grid.blocks.0 == 0 || grid.blocks.1 == 0 || !self.ready() {
            return;
        }
        let Some(function) = self.function(kernel) else {
            return;
        };
        let mut pointers: Vec<*mut c_void> = args
            .starts
            .iter()
            .map(|&i| (&raw const args.words[i]).cast_mut().cast())
            .collect();
        let has_clusters = self.arch >= 90;
        let whole = if has_clusters { 1 } else { grid.cluster };
        // SAFETY: plain numbers; all zeros is a value.
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let [dependent, cluster] = &mut attributes;
        dependent.id =
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        dependent.value.programmaticStreamSerializationAllowed = 1;
        cluster.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        cluster.value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
            x: grid.cluster as u32,
            y: 1,
            z: 1,
        };
        let config = sys::CUlaunchConfig {
            gridDimX: (grid.blocks.0 / whole) as u32,
            gridDimY: grid.blocks.1 as u32,
            gridDimZ: 1,
            blockDimX: (grid.threads * whole) as u32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared as u32,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: match (has_clusters, grid.cluster) {
                (false, _) => 0,
                (true, 1) => 1,
                (true, _) => 2,
            },
        };
        if grid.shared > 48 << 10 {
            // SAFETY: the function is loaded.
            let done = unsafe {
                result::function::set_function_attribute(
                    function.entry,
                    sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                    grid.shared as i32,
                )
            };
            self.keep("asking for shared memory", done);
        }
        // SAFETY: the arguments are those of the kernel's signature, in order, each in
        // words of its own; the kernel keeps to the tensors whose addresses it gets,
        // which outlive it because memory is reused in the order of the one stream.
        let done = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                function.entry,
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        if let Err(e) = done.result() {
            self.fail(format!("launching {kernel}: {}", describe(e.0)));
        }
    }

    /// Records what `work` launches instead of running it; nothing, if the host had
    /// to take part.
    pub(crate) fn record<T>(&self, work: impl FnOnce() -> T) -> Option<(Graph, T)> {
        self.flush();
        if !self.ready() {
            return None;
        }
        // Relaxed: memory for the record may be taken while it is made.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is ours.
        let begun = unsafe { result::stream::begin_capture(self.stream, mode) };
        self.keep("recording a step", begun);
        self.spoilt.store(false, Ordering::Relaxed);
        self.recording.store(true, Ordering::Relaxed);
        let made = work();
        self.flush();
        self.recording.store(false, Ordering::Relaxed);
        // SAFETY: the stream is ours.
        let graph = match unsafe { result::stream::end_capture(self.stream) } {
            Ok(graph) if !graph.is_null() => graph,
            Ok(_) => return None,
            Err(e) => {
                self.fail(format!("recording a step: {}", describe(e.0)));
                return None;
            }
        };
        let mut exec = std::ptr::null_mut();
        // SAFETY: `graph` was just recorded.
        let done = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) }.result();
        // SAFETY: the executable is a copy.
        let _ = unsafe { result::graph::destroy(graph) };
        self.keep("preparing a recorded step", done);
        let graph = done.is_ok().then_some(Graph { exec })?;
        (!self.spoilt.load(Ordering::Relaxed)).then_some((graph, made))
    }

    /// Runs `work` between the marks that profilers look for.
    pub(crate) fn profiled<T>(&self, work: impl FnOnce() -> T) -> T {
        self.wait();
        self.keep("starting the profiler", cudarc::driver::profiler_start());
        let made = work();
        self.wait();
        self.keep("stopping the profiler", cudarc::driver::profiler_stop());
        made
    }

    pub(crate) fn replay(&self, graph: &Graph) {
        self.flush();
        if self.ready() {
            // SAFETY: both are alive.
            let done = unsafe { result::graph::launch(graph.exec, self.stream) };
            self.keep("replaying a step", done);
        }
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        self.failed.store(false, Ordering::Relaxed);
        self.wait();
        // SAFETY: nothing uses them any more.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}
