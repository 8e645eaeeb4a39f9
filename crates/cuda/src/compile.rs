//! CUDA C++ to machine code with NVRTC: no toolkit, no headers, no GPU needed.
//!
//! Code is kept in a folder, in files named by a hash of everything that goes
//! into it.

use crate::constants::{self, ATTENTION_WGMMA, GEMM_WGMMA};
use crate::machine::{Kernel, lock};
use cudarc::nvrtc::{result as rtc, sys};
use rayon::prelude::*;
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::ffi::{CStr, CString};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Text with which files of kernels start, in the order in which they need it.
const HEADERS: &[(&str, &str)] = &[
    ("common.cuh", include_str!("../kernels/common.cuh")),
    ("math.cuh", include_str!("../kernels/math.cuh")),
    ("mbarrier.cuh", include_str!("../kernels/mbarrier.cuh")),
    ("rows.cuh", include_str!("../kernels/rows.cuh")),
    ("moe.cuh", include_str!("../kernels/moe.cuh")),
    ("moe_choose.cuh", include_str!("../kernels/moe_choose.cuh")),
    ("hadamard.cuh", include_str!("../kernels/hadamard.cuh")),
    ("kv_format.cuh", include_str!("../kernels/kv_format.cuh")),
    ("attention.cuh", include_str!("../kernels/attention.cuh")),
    (
        "kv_fragment.cuh",
        include_str!("../kernels/kv_fragment.cuh"),
    ),
    (
        "weight_tile.cuh",
        include_str!("../kernels/weight_tile.cuh"),
    ),
    ("wgmma.cuh", include_str!("../kernels/wgmma.cuh")),
    ("gemm_wgmma.cuh", include_str!("../kernels/gemm_wgmma.cuh")),
    (
        "gemv_epilogue.cuh",
        include_str!("../kernels/gemv_epilogue.cuh"),
    ),
    (
        "delta_chunk.cuh",
        include_str!("../kernels/delta_chunk.cuh"),
    ),
    (
        "gemv_pipelined.cuh",
        include_str!("../kernels/gemv_pipelined.cuh"),
    ),
];

/// The [`HEADERS`] of a file, beside `common.cuh`, which all have.
fn headers(file: &str) -> &'static [&'static str] {
    match file {
        "elementwise" | "row_norm" | "run_norm" | "moe_combine" => &["math", "mbarrier", "rows"],
        "delta" => &["math", "mbarrier", "rows", "delta_chunk"],
        "moe_route" => &["math", "mbarrier", "rows", "moe", "moe_choose"],
        "choose" => &["math"],
        "embed" => &["mbarrier", "weight_tile"],
        "gemv" => &["mbarrier", "weight_tile", "gemv_epilogue"],
        "gemv_pipelined" => &["mbarrier", "weight_tile", "gemv_pipelined"],
        "moe_gemv" => &[
            "math",
            "mbarrier",
            "rows",
            "moe",
            "moe_choose",
            "weight_tile",
            "gemv_epilogue",
            "gemv_pipelined",
        ],
        "moe_gemv_glu" => &["math", "moe", "mbarrier", "weight_tile", "gemv_pipelined"],
        "gated_projection" => &["math", "mbarrier", "rows", "weight_tile"],
        "gemm" => &["mbarrier", "weight_tile"],
        GEMM_WGMMA => &["moe", "mbarrier", "weight_tile", "wgmma", "gemm_wgmma"],
        "kv_append" => &[
            "math",
            "mbarrier",
            "rows",
            "hadamard",
            "kv_format",
            "attention",
        ],
        "kv_rotate" => &["hadamard"],
        "attention" => &[
            "math",
            "mbarrier",
            "hadamard",
            "kv_format",
            "attention",
            "kv_fragment",
        ],
        ATTENTION_WGMMA => &["mbarrier", "kv_format", "attention", "wgmma"],
        _ => &[],
    }
}

/// Every file of kernels.
const SOURCES: &[(&str, &str)] = &[
    ("elementwise", include_str!("../kernels/elementwise.cu")),
    ("row_norm", include_str!("../kernels/row_norm.cu")),
    ("run_norm", include_str!("../kernels/run_norm.cu")),
    ("embed", include_str!("../kernels/embed.cu")),
    ("gemv", include_str!("../kernels/gemv.cu")),
    (
        "gemv_pipelined",
        include_str!("../kernels/gemv_pipelined.cu"),
    ),
    (
        "gated_projection",
        include_str!("../kernels/gated_projection.cu"),
    ),
    ("gemv_f32", include_str!("../kernels/gemv_f32.cu")),
    ("gemm", include_str!("../kernels/gemm.cu")),
    (GEMM_WGMMA, include_str!("../kernels/gemm_wgmma.cu")),
    ("kv_append", include_str!("../kernels/kv_append.cu")),
    ("kv_rotate", include_str!("../kernels/kv_rotate.cu")),
    ("attention", include_str!("../kernels/attention.cu")),
    (
        ATTENTION_WGMMA,
        include_str!("../kernels/attention_wgmma.cu"),
    ),
    ("delta", include_str!("../kernels/delta.cu")),
    ("moe_route", include_str!("../kernels/moe_route.cu")),
    ("moe_gemv", include_str!("../kernels/moe_gemv.cu")),
    ("moe_gemv_glu", include_str!("../kernels/moe_gemv_glu.cu")),
    ("moe_combine", include_str!("../kernels/moe_combine.cu")),
    ("choose", include_str!("../kernels/choose.cu")),
];

/// Whether the compiler's library can be found.
pub(crate) fn is_present() -> bool {
    // SAFETY: only tries to open the library.
    unsafe { sys::is_culib_present() }
}

/// A file and what it is compiled with.
type Key = (&'static str, Vec<(&'static str, usize)>);

fn key(kernel: &Kernel) -> Key {
    (kernel.file, kernel.defines.clone())
}

/// Compiled code of one file, by its definitions.
type Modules = HashMap<Key, Arc<Vec<u8>>>;

/// Compiles for one architecture.
pub(crate) struct Compiler {
    arch: u32,
    folder: Option<PathBuf>,
    sources: Option<PathBuf>,
    modules: Mutex<Modules>,
}

impl Compiler {
    /// Keeps code in `folder`; files in `sources` stand for those of their name.
    pub(crate) fn new(arch: u32, folder: Option<PathBuf>, sources: Option<PathBuf>) -> Self {
        Compiler {
            arch,
            folder,
            sources,
            modules: Mutex::default(),
        }
    }

    /// Compiles the files of those `kernels` that are not compiled yet, on all cores.
    pub(crate) fn compile_all(&self, kernels: Vec<Kernel>) {
        let missing: HashMap<_, _> = {
            let modules = lock(&self.modules);
            let keyed = kernels.into_iter().map(|kernel| (key(&kernel), kernel));
            keyed
                .filter(|(key, _)| !modules.contains_key(key))
                .collect()
        };
        // Whoever launches a kernel that cannot be compiled meets the error again.
        missing
            .par_iter()
            .for_each(|(_, kernel)| drop(self.code(kernel)));
    }

    /// Machine code of the kernel's file, compiled with its definitions.
    pub(crate) fn code(&self, kernel: &Kernel) -> Result<Arc<Vec<u8>>, String> {
        let key = key(kernel);
        if let Some(code) = lock(&self.modules).get(&key) {
            return Ok(code.clone());
        }
        let options = options(self.arch, kernel);
        let source = source(kernel.file, self.sources.as_deref());
        let mut hash = Sha256::new();
        hash.update(version());
        options.iter().for_each(|o| hash.update(o));
        hash.update(&source);
        let name = hash
            .finalize()
            .iter()
            .take(16)
            .fold(kernel.file.to_owned() + "-", |name, b| {
                format!("{name}{b:02x}")
            });
        let file = self.folder.as_ref().map(|f| f.join(name + ".cubin"));
        let kept = file.as_ref().and_then(|f| std::fs::read(f).ok());
        let code = match kept {
            Some(code) => code,
            None => {
                let (code, _) =
                    compile(&source, &options).map_err(|log| format!("{kernel}: {log}"))?;
                if let Some(file) = &file {
                    write_whole(file, &code);
                }
                code
            }
        };
        let code = Arc::new(code);
        lock(&self.modules).insert(key, code.clone());
        Ok(code)
    }
}

/// Writes a whole file or nothing, also if several threads write the same one; a cache that cannot be written is none.
pub(crate) fn write_whole(file: &Path, bytes: &[u8]) {
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let part = file.with_extension(format!("{}-{number}.part", std::process::id()));
    let written = file
        .parent()
        .map(std::fs::create_dir_all)
        .transpose()
        .and_then(|_| std::fs::write(&part, bytes))
        .and_then(|()| std::fs::rename(&part, file));
    if written.is_err() {
        let _ = std::fs::remove_file(&part);
    }
}

fn source(file: &str, sources: Option<&Path>) -> String {
    let (_, text) = SOURCES
        .iter()
        .find(|(name, _)| *name == file)
        .expect("a file of kernels");
    let read = |name: &str, text: &str| {
        let other = sources.and_then(|s| std::fs::read_to_string(s.join(name)).ok());
        let text = other.unwrap_or_else(|| text.to_owned());
        format!("#line 1 \"{name}\"\n{text}\n")
    };
    let mut all: String = HEADERS
        .iter()
        .filter(|(name, _)| {
            let stem = name.trim_end_matches(".cuh");
            stem == "common" || headers(file).contains(&stem)
        })
        .map(|(name, text)| read(name, text))
        .collect();
    all += &read(&format!("{file}.cu"), text);
    all
}

fn options(arch: u32, kernel: &Kernel) -> Vec<String> {
    let own = match kernel.file {
        GEMM_WGMMA | ATTENTION_WGMMA => "a",
        _ => "",
    };
    let mut options = vec![
        format!("--gpu-architecture=sm_{arch}{own}"),
        "--std=c++17".into(),
        "--fmad=false".into(),
        "-default-device".into(),
        "--ptxas-options=-v".into(),
    ];
    let defines = kernel.defines.iter().copied();
    let defines = defines.chain(constants::of(kernel.file));
    options.extend(defines.map(|(name, value)| format!("-D{name}={value}")));
    options
}

/// The version of NVRTC, such as `13.0`.
pub(crate) fn version() -> String {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: two integers to write.
    let _ = unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) };
    format!("{major}.{minor}")
}

/// Machine code and the assembler's report.
fn compile(source: &str, options: &[String]) -> Result<(Vec<u8>, String), String> {
    let source = CString::new(source).expect("sources have no zeros");
    let program = rtc::create_program(&source, None).map_err(|e| e.to_string())?;
    // SAFETY: the program is alive until the end of this function.
    let done = unsafe { rtc::compile_program(program, options) };
    // SAFETY: as above.
    let log = unsafe { rtc::get_program_log(program) }.unwrap_or_default();
    let log: Vec<u8> = log.iter().map(|&c| c as u8).collect();
    let log = CStr::from_bytes_until_nul(&log).unwrap_or_default();
    let log = log.to_string_lossy().into_owned();
    let mut code = Err(log.clone());
    if done.is_ok() {
        let mut n = 0;
        // SAFETY: one integer to write.
        let sized = unsafe { sys::nvrtcGetCUBINSize(program, &raw mut n) }.result();
        let mut bytes = vec![0u8; n];
        // SAFETY: as many bytes as the compiler said.
        let got = unsafe { sys::nvrtcGetCUBIN(program, bytes.as_mut_ptr().cast()) }.result();
        code = match sized.and(got) {
            Ok(()) => Ok((bytes, log)),
            Err(e) => Err(e.to_string()),
        };
    }
    // SAFETY: not used after this.
    let _ = unsafe { rtc::destroy_program(program) };
    code
}

/// What the assembler says of one kernel.
#[cfg(test)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Usage {
    /// Registers of a thread.
    pub(crate) registers: usize,
    /// Bytes a thread keeps in memory, for want of registers or to index what has none: a
    /// kernel's arguments, if so, are copied by each thread before all else.
    pub(crate) stack: usize,
    /// Bytes of shared memory that it declares.
    pub(crate) shared: usize,
    /// Instructions of its code.
    pub(crate) instructions: usize,
}

/// Instructions of each kernel of a cubin, an ELF file with a section `.text.NAME` for
/// each; 16 bytes an instruction.
#[cfg(test)]
fn instructions(code: &[u8]) -> HashMap<String, usize> {
    let number = |at: usize, bytes: usize| {
        let bytes = code[at..at + bytes].iter().rev();
        bytes.fold(0, |n, &byte| n << 8 | usize::from(byte))
    };
    // Where the table of sections is, how long an entry, how many, which has the names.
    let (table, entry) = (number(0x28, 8), number(0x3a, 2));
    let (count, names) = (number(0x3c, 2), number(0x3e, 2));
    let names = number(table + names * entry + 0x18, 8);
    let section = |i: usize| {
        let at = table + i * entry;
        let name = CStr::from_bytes_until_nul(&code[names + number(at, 4)..]).ok()?;
        let kernel = name.to_str().ok()?.strip_prefix(".text.")?;
        Some((kernel.to_owned(), number(at + 0x20, 8) / 16))
    };
    (0..count).filter_map(section).collect()
}

/// Compiles a kernel's file and returns the report, by name.
#[cfg(test)]
pub(crate) fn report(arch: u32, kernel: &Kernel) -> Result<Vec<(String, Usage)>, String> {
    let mut options = options(arch, kernel);
    // What NVRTC has compiled before, in a test beside this one, it reports nothing of.
    options.push("--no-cache".into());
    let (code, log) = compile(&source(kernel.file, None), &options)
        .map_err(|log| format!("{kernel} for sm_{arch}: {log}"))?;
    let mut all: Vec<(String, Usage)> = Vec::new();
    let number = |text: &str| text.trim().rsplit(' ').next().and_then(|n| n.parse().ok());
    for line in log.lines() {
        if let Some((_, name)) = line.split_once("Compiling entry function '") {
            let name = name.split('\'').next().unwrap_or_default();
            all.push((name.to_owned(), Usage::default()));
        }
        let Some((_, usage)) = all.last_mut() else {
            continue;
        };
        if let Some((bytes, _)) = line.split_once(" bytes stack frame") {
            usage.stack += number(bytes).unwrap_or(0);
        }
        if let Some((registers, _)) = line.split_once(" registers") {
            usage.registers = number(registers).unwrap_or(0);
        }
        if let Some((bytes, _)) = line.split_once(" bytes smem") {
            usage.shared = number(bytes).unwrap_or(0);
        }
    }
    let instructions = instructions(&code);
    for (name, usage) in &mut all {
        usage.instructions = instructions[name];
    }
    Ok(all)
}

/// Compiles a kernel's file with assertions that the structs of [`args`](crate::args) which it
/// has lie as there, and returns their names.
#[cfg(test)]
pub(crate) fn check_layouts(arch: u32, kernel: &Kernel) -> Result<Vec<&'static str>, String> {
    let mut source = source(kernel.file, None);
    let mut found = Vec::new();
    for (name, size, fields) in crate::args::layouts() {
        if !source.contains(&format!("struct {name} {{")) {
            continue;
        }
        source += &format!("static_assert(sizeof({name}) == {size}, \"size of {name}\");\n");
        for (field, offset) in fields {
            // What the compiler's `offsetof` is made of, for there are no headers.
            source += &format!(
                "static_assert(__INTADDR__(&(({name} *) 0)->{field}) == {offset}, \"{name}.{field}\");\n"
            );
        }
        found.push(name);
    }
    if !found.is_empty() {
        compile(&source, &options(arch, kernel)).map_err(|log| format!("{kernel}: {log}"))?;
    }
    Ok(found)
}
