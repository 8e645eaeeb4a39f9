//! The machine behind a [`Driver`](crate::driver::Driver) where there is a GPU: a context, one
//! stream, compiled code, launches and graphs, all by calls of the CUDA driver. Here and in
//! `compile` is the crate's unsafe code.

use crate::CudaOptions;
use crate::args::{Address, Args};
use crate::compile;
use crate::machine::{CudaError, Facts, Graph, Grid, Kernel, Machine, OutOfMemory, lock};
use cudarc::driver::{result, sys};
use std::collections::HashMap;
use std::ffi::{CString, c_void};
use std::sync::Mutex;

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

/// Says what was being done when the driver refused.
fn while_doing<T>(doing: &str, done: Result<T, result::DriverError>) -> Result<T, String> {
    done.map_err(|e| format!("{doing}: {}", describe(e.0)))
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

/// An executable CUDA graph.
struct Executable {
    exec: sys::CUgraphExec,
}

// SAFETY: a handle that the driver lets any thread use, one at a time: launches
// come from the backend's one stream.
unsafe impl Send for Executable {}

impl Drop for Executable {
    fn drop(&mut self) {
        // SAFETY: made by `end_recording` and not used any more.
        let _ = unsafe { result::graph::exec_destroy(self.exec) };
    }
}

/// Bytes of each half of the [`Staging`] memory.
pub(crate) const STAGE_BYTES: usize = 16 << 20;

/// Memory of the host that the device copies from by itself, in two halves: one is written while the other is
/// copied.
struct Staging {
    halves: [*mut u8; 2],
    /// When the last copy from each half has ended.
    copied: [sys::CUevent; 2],
    /// How many copies there were.
    turn: usize,
}

// SAFETY: memory and handles that the driver lets any thread use, one at a time.
unsafe impl Send for Staging {}

impl Staging {
    fn new() -> Result<Self, result::DriverError> {
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let copied = [event()?, event()?];
        // SAFETY: the context is set.
        let memory: *mut u8 = unsafe { result::malloc_host(2 * STAGE_BYTES, 0) }?.cast();
        Ok(Staging {
            // SAFETY: within the memory.
            halves: [memory, unsafe { memory.add(STAGE_BYTES) }],
            copied,
            turn: 0,
        })
    }

    /// Copies `bytes` that `fill` writes, STAGE_BYTES at most, to the device.
    fn copy(
        &mut self,
        to: Address,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]),
        stream: sys::CUstream,
    ) -> Result<(), result::DriverError> {
        let (half, copied) = (self.halves[self.turn % 2], self.copied[self.turn % 2]);
        self.turn += 1;
        // SAFETY: an event of this context; one that was never recorded is no wait.
        unsafe { result::event::synchronize(copied) }?;
        // SAFETY: as many bytes, which nobody else reads or writes: the last copy from here has ended.
        let host = unsafe { std::slice::from_raw_parts_mut(half, bytes) };
        fill(host);
        // SAFETY: the caller owns `bytes` from `to` on; the host's stay as they are until the event has come.
        unsafe {
            result::memcpy_htod_async(to, host, stream)?;
            result::event::record(copied, stream)
        }
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // SAFETY: made by `new` and not used any more: the device has ended its copies.
        unsafe {
            for copied in self.copied {
                let _ = result::event::synchronize(copied);
                let _ = result::event::destroy(copied);
            }
            let _ = result::free_host(self.halves[0].cast());
        }
    }
}

/// One GPU.
pub(crate) struct Gpu {
    context: sys::CUcontext,
    device: sys::CUdevice,
    stream: sys::CUstream,
    /// Whether launches have attributes, clusters among them: from capability 9.0 on.
    has_clusters: bool,
    compiler: compile::Compiler,
    functions: Mutex<HashMap<Kernel, Function>>,
    /// Allocated when it is first needed; nothing inside, if that has failed.
    staging: Mutex<Option<Option<Staging>>>,
}

// SAFETY: the handles may be used by any thread once its context is set, which
// `make_current` does before every other call.
unsafe impl Send for Gpu {}
// SAFETY: as above; mutable state is behind a lock.
unsafe impl Sync for Gpu {}

thread_local! {
    static CURRENT: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

impl Gpu {
    /// Opens a device, and says what it is.
    pub(crate) fn open(options: CudaOptions) -> Result<(Self, Facts), CudaError> {
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
        let gpu = Gpu {
            context,
            device,
            stream,
            has_clusters: arch >= 90,
            compiler: compile::Compiler::new(arch, options.cache, options.kernels),
            functions: Mutex::default(),
            staging: Mutex::default(),
        };
        let facts = Facts {
            name,
            ordinal,
            sms: sms as usize,
            shared: shared as usize,
            arch,
        };
        Ok((gpu, facts))
    }

    fn function(&self, kernel: &Kernel) -> Result<Function, String> {
        let mut functions = lock(&self.functions);
        if let Some(f) = functions.get(kernel) {
            return Ok(*f);
        }
        let code = self.compiler.code(kernel)?;
        // Loaded for each kernel of the file that is used: modules are small and few.
        // SAFETY: `code` is a whole image made by the compiler for this device.
        let loaded = unsafe { result::module::load_data(code.as_ptr().cast()) };
        let loaded = loaded.and_then(|module| {
            let name = CString::new(kernel.name).expect("names of kernels have no zeros");
            // SAFETY: the module was just loaded; it stays for good.
            let entry = unsafe { result::module::get_function(module, name) }?;
            self.allow_shared_memory(entry)?;
            self.allow_large_clusters(entry);
            Ok(Function { entry, module })
        });
        let function = while_doing(&format!("loading kernel {kernel}"), loaded)?;
        functions.insert(kernel.clone(), function);
        Ok(function)
    }

    /// Lets launches of a kernel have clusters of more blocks than the 8 that every device with clusters takes.
    fn allow_large_clusters(&self, entry: sys::CUfunction) {
        use sys::CUfunction_attribute_enum as A;
        if self.has_clusters {
            // SAFETY: the function is loaded. A device that has no such clusters refuses; launches do not ask for any then.
            let _ = unsafe {
                result::function::set_function_attribute(
                    entry,
                    A::CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                    1,
                )
            };
        }
    }

    /// Lets launches of a kernel ask for all the shared memory that its own leaves of a block's. Without this, both
    /// together may be 48 KB.
    fn allow_shared_memory(&self, entry: sys::CUfunction) -> Result<(), result::DriverError> {
        use sys::CUdevice_attribute_enum as D;
        use sys::CUfunction_attribute_enum as A;
        // SAFETY: the device comes from the driver, and the function is loaded.
        unsafe {
            let all = result::device::get_attribute(
                self.device,
                D::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN,
            )?;
            let own = result::function::get_function_attribute(
                entry,
                A::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES,
            )?;
            result::function::set_function_attribute(
                entry,
                A::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                all - own,
            )
        }
    }

    /// Gives `run` the configuration of a launch.
    fn with_config<T>(&self, grid: Grid, run: impl FnOnce(*const sys::CUlaunchConfig) -> T) -> T {
        let whole = if self.has_clusters { 1 } else { grid.cluster };
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
            numAttrs: match (self.has_clusters, grid.cluster) {
                (false, _) => 0,
                (true, 1) => 1,
                (true, _) => 2,
            },
        };
        run(&raw const config)
    }
}

impl Machine for Gpu {
    fn clusters_at_once(&self, kernel: &Kernel, grid: Grid) -> Result<usize, String> {
        if !self.has_clusters {
            return Ok(0);
        }
        let entry = self.function(kernel)?.entry;
        let mut clusters = 0;
        let found = self.with_config(grid, |config| {
            // SAFETY: one integer to write; the function is loaded and the configuration is whole.
            unsafe { sys::cuOccupancyMaxActiveClusters(&raw mut clusters, entry, config) }
        });
        // An error says that the device has no clusters of this size.
        let found = found.result().ok().map(|()| clusters);
        Ok(found.map_or(0, |clusters| clusters.max(0) as usize))
    }

    fn make_current(&self) {
        CURRENT.with(|current| {
            if current.get() != self.context as usize {
                // SAFETY: retained for as long as `self` lives.
                if unsafe { result::ctx::set_current(self.context) }.is_ok() {
                    current.set(self.context as usize);
                }
            }
        });
    }

    fn compiler(&self) -> String {
        compile::version()
    }

    fn memory(&self) -> (usize, usize) {
        result::mem_get_info().unwrap_or((0, 0))
    }

    fn allocate(&self, bytes: usize) -> Result<Result<Address, OutOfMemory>, String> {
        // SAFETY: the context is set.
        match unsafe { result::malloc_sync(bytes) } {
            Ok(address) => Ok(Ok(address)),
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY => Ok(Err(OutOfMemory)),
            Err(e) => Err(format!("allocating {bytes} bytes: {}", describe(e.0))),
        }
    }

    fn free(&self, address: Address) {
        // SAFETY: from `allocate`, and freed once, by its owner. Waits for the device.
        let _ = unsafe { result::free_sync(address) };
    }

    fn zero(&self, address: Address, bytes: usize) -> Result<(), String> {
        // SAFETY: the caller owns `bytes` from `address` on.
        let done = unsafe { result::memset_d8_async(address, 0, bytes, self.stream) };
        while_doing("clearing memory", done)
    }

    fn write(&self, to: Address, from: &[u8]) -> Result<(), String> {
        // SAFETY: the caller owns as many bytes from `to` on. The driver has copied
        // pageable memory, or staged it, when this returns.
        let done = unsafe { result::memcpy_htod_async(to, from, self.stream) };
        while_doing("copying to the device", done)
    }

    fn fill(
        &self,
        to: Address,
        bytes: usize,
        fill: &mut dyn FnMut(&mut [u8]),
    ) -> Result<(), String> {
        let doing = "copying to the device";
        let mut staging = lock(&self.staging);
        // Without memory of this kind it takes longer.
        match staging.get_or_insert_with(|| Staging::new().ok()) {
            Some(staging) if bytes <= STAGE_BYTES => {
                while_doing(doing, staging.copy(to, bytes, fill, self.stream))
            }
            _ => {
                let mut host = vec![0; bytes];
                fill(&mut host);
                self.write(to, &host)
            }
        }
    }

    fn read(&self, to: &mut [u8], from: Address) -> Result<(), String> {
        // SAFETY: the caller owns as many bytes from `from` on; waited for below.
        let done = unsafe { result::memcpy_dtoh_async(to, from, self.stream) };
        while_doing("copying from the device", done).and(self.wait())
    }

    fn copy(&self, to: Address, from: Address, bytes: usize) -> Result<(), String> {
        // SAFETY: the caller owns both ranges.
        let done = unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) };
        while_doing("copying on the device", done)
    }

    fn wait(&self) -> Result<(), String> {
        // SAFETY: the stream is ours.
        let done = unsafe { result::stream::synchronize(self.stream) };
        while_doing("running", done)
    }

    fn launch(&self, kernel: &Kernel, grid: Grid, args: &Args) -> Result<(), String> {
        let function = self.function(kernel)?;
        let mut pointers: Vec<*mut c_void> = args
            .each()
            .map(|words| words.as_ptr().cast_mut().cast())
            .collect();
        self.with_config(grid, |config| {
            // SAFETY: the arguments are those of the kernel's signature, in order, each in
            // words of its own; the kernel keeps to the tensors whose addresses it gets,
            // which outlive it because memory is reused in the order of the one stream.
            unsafe {
                sys::cuLaunchKernelEx(
                    config,
                    function.entry,
                    pointers.as_mut_ptr(),
                    std::ptr::null_mut(),
                )
            }
        })
        .result()
        .map_err(|e| format!("launching {kernel}: {}", describe(e.0)))
    }

    fn compile(&self, kernels: Vec<Kernel>) {
        self.compiler.compile_all(kernels);
    }

    fn begin_recording(&self) -> Result<(), String> {
        // Relaxed: memory for the record may be taken while it is made.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is ours.
        let begun = unsafe { result::stream::begin_capture(self.stream, mode) };
        while_doing("recording a step", begun)
    }

    fn end_recording(&self) -> Result<Option<Graph>, String> {
        // SAFETY: the stream is ours.
        let ended = unsafe { result::stream::end_capture(self.stream) };
        let graph = while_doing("recording a step", ended)?;
        if graph.is_null() {
            return Ok(None);
        }
        let mut exec = std::ptr::null_mut();
        // SAFETY: `graph` was just recorded.
        let done = unsafe { sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0) }.result();
        // SAFETY: the executable is a copy.
        let _ = unsafe { result::graph::destroy(graph) };
        while_doing("preparing a recorded step", done)?;
        Ok(Some(Box::new(Executable { exec })))
    }

    fn replay(&self, graph: &Graph) -> Result<(), String> {
        let graph = graph.downcast_ref::<Executable>();
        let graph = graph.expect("a graph of this machine");
        // SAFETY: both are alive.
        let done = unsafe { result::graph::launch(graph.exec, self.stream) };
        while_doing("replaying a step", done)
    }

    fn profile(&self, on: bool) -> Result<(), String> {
        let (doing, done) = match on {
            true => ("starting the profiler", cudarc::driver::profiler_start()),
            false => ("stopping the profiler", cudarc::driver::profiler_stop()),
        };
        while_doing(doing, done)
    }

    fn globals(&self, name: &str) -> Vec<(String, Vec<u8>)> {
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
            self.read(&mut bytes, address).ok()?;
            Some((kernel.to_string(), bytes))
        };
        functions.iter().filter_map(read).collect()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        self.make_current();
        // SAFETY: the stream is ours; what runs on it ends first.
        let _ = unsafe { result::stream::synchronize(self.stream) };
        drop(lock(&self.staging).take());
        // SAFETY: nothing uses the stream any more.
        let _ = unsafe { result::stream::destroy(self.stream) };
        // SAFETY: retained once, in `open`.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}
