//! A machine that runs nothing: memory has made-up addresses, launches are written down,
//! what is read is zeros.
//!
//! It shows what a GPU would be asked to do where there is none, and costs nothing.

use crate::args::{Address, Args};
use crate::machine::{Facts, Graph, Grid, Kernel, Machine, OutOfMemory, lock};
use std::collections::{HashMap, HashSet};
use std::fmt::Write;
use std::sync::{Arc, Mutex};

/// A device that a dry run pretends to be. The default is an H100.
#[derive(Clone, Copy, Debug)]
pub struct DryRun {
    /// Compute capability.
    pub capability: (u32, u32),
    /// Streaming multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of shared memory that a block can have.
    pub shared_memory: usize,
}

impl Default for DryRun {
    fn default() -> Self {
        DryRun {
            capability: (9, 0),
            multiprocessors: 132,
            shared_memory: 227 << 10,
        }
    }
}

impl DryRun {
    pub(crate) fn facts(self) -> Facts {
        Facts {
            name: "dry run".into(),
            ordinal: 0,
            sms: self.multiprocessors,
            shared: self.shared_memory,
            arch: 10 * self.capability.0 + self.capability.1,
        }
    }

    /// Blocks of a cluster, at most.
    fn most_cluster_blocks(self) -> usize {
        match self.capability.0 {
            ..9 => 1,
            9 | 10 => 16,
            _ => 8,
        }
    }
}

/// Bytes of shared memory, at most, that kernels declare themselves, by how their names start; 512
/// for others. A test holds what is compiled to it.
const DECLARED_SHARED: &[(&str, usize)] = &[
    ("delta_conv", 32_768),
    ("delta_prepare", 22_016),
    ("delta_rule", 24_832),
    ("delta_fused_cluster", 44_048),
    ("delta_fused", 41_760),
    ("gated_projection", 17_920),
    ("moe_dense_norm", 640),
    ("moe_gemv_pipelined", 512),
    ("moe_gemv_glu", 512),
    ("moe_gemv_routed", 16_512),
    ("moe_gemv_16", 32_768),
    ("moe_gemv", 16_384),
    // Exactly so many: its blocks are spread by it.
    ("gemv_pipelined", 128),
    ("gemv", 8192),
    ("attention_merge", 4608),
    ("attention_wgmma", 256),
    ("attention_all", 3328),
    ("attention_decode", 3328),
    ("choose_", 3328),
];

/// Bytes of shared memory that kernel `name` declares, at most.
pub(crate) fn declared_shared(name: &str) -> usize {
    let found = DECLARED_SHARED
        .iter()
        .find(|(start, _)| name.starts_with(start));
    found.map_or(512, |(_, bytes)| *bytes)
}

/// Where made-up addresses start: no number that is not one is as large.
const FIRST: Address = 0xa5a5_0000_0000_0000;

/// What a dry run has written down.
#[derive(Default)]
pub(crate) struct Log {
    /// A line for each launch since the last time that somebody asked.
    pub(crate) launches: Vec<String>,
    /// A line for each op that was launched, after fusion.
    pub(crate) ops: Vec<String>,
    /// Kernels that were ever launched.
    pub(crate) kernels: HashSet<Kernel>,
    /// Bytes ever allocated, whether freed or not.
    pub(crate) allocated: u64,
    /// Bytes that are not freed, by address.
    pub(crate) held: HashMap<Address, u64>,
    /// Bytes that may be held at once; no limit if absent.
    pub(crate) limit: Option<u64>,
}

/// Writes launches down instead of running them. One that asks for more than the device has is an
/// error, as it is on a GPU.
pub(crate) struct Dry {
    pub(crate) log: Arc<Mutex<Log>>,
    device: DryRun,
}

impl Dry {
    pub(crate) fn new(device: DryRun) -> Self {
        Dry {
            log: Arc::default(),
            device,
        }
    }

    /// What a launch asks for that the device does not have.
    fn lacks(&self, kernel: &Kernel, grid: Grid) -> Option<String> {
        let (x, y) = grid.blocks;
        let most = self.device.shared_memory;
        let shared = grid.shared + declared_shared(kernel.name);
        if shared > most {
            return Some(format!("{shared} bytes of shared memory of {most}"));
        }
        let threads = match self.device.capability.0 {
            // Without clusters a block has the threads of all of them.
            ..9 => grid.threads * grid.cluster,
            _ => grid.threads,
        };
        if !(1..=1024).contains(&threads) {
            return Some(format!("blocks of {threads} threads"));
        }
        let most = self.device.most_cluster_blocks();
        if self.device.capability.0 >= 9 && grid.cluster > most {
            return Some(format!("clusters of {} blocks of {most}", grid.cluster));
        }
        let is_fine = (1..1 << 31).contains(&x) && (1..1 << 16).contains(&y);
        (!is_fine).then(|| format!("{x} by {y} blocks"))
    }
}

/// `file::kernel DEFINES <<<blocks, threads, shared memory, cluster>>> (arguments)`. An
/// address is `@`, for where memory lies says nothing of what is done.
fn line(kernel: &Kernel, grid: Grid, args: &Args) -> String {
    let (x, y) = grid.blocks;
    let mut line = format!("{kernel} <<<{x}x{y}, {}", grid.threads);
    let _ = write!(line, ", {}, {}>>> (", grid.shared, grid.cluster);
    for (i, words) in args.each().enumerate() {
        line += if i > 0 { ", " } else { "" };
        for (j, &word) in words.iter().enumerate() {
            line += if j > 0 { " " } else { "" };
            if (FIRST..FIRST + (1 << 48)).contains(&word) {
                line.push('@');
            } else {
                let _ = write!(line, "{word:x}");
            }
        }
    }
    line + ")"
}

impl Machine for Dry {
    fn make_current(&self) {}

    fn compiler(&self) -> String {
        "none".into()
    }

    fn memory(&self) -> (usize, usize) {
        (1 << 40, 1 << 40)
    }

    fn allocate(&self, bytes: usize) -> Result<Result<Address, OutOfMemory>, String> {
        let mut log = lock(&self.log);
        let bytes = bytes.next_multiple_of(256) as u64;
        let held: u64 = log.held.values().sum();
        if log.limit.is_some_and(|limit| held + bytes > limit) {
            return Ok(Err(OutOfMemory));
        }
        let address = FIRST + log.allocated;
        log.allocated += bytes;
        log.held.insert(address, bytes);
        Ok(Ok(address))
    }

    fn free(&self, address: Address) {
        lock(&self.log).held.remove(&address);
    }

    fn zero(&self, _: Address, _: usize) -> Result<(), String> {
        Ok(())
    }

    fn write(&self, _: Address, _: &[u8]) -> Result<(), String> {
        Ok(())
    }

    fn fill(&self, _: Address, n: usize, fill: &mut dyn FnMut(&mut [u8])) -> Result<(), String> {
        fill(&mut vec![0; n]);
        Ok(())
    }

    fn read(&self, to: &mut [u8], _: Address) -> Result<(), String> {
        to.fill(0);
        Ok(())
    }

    fn copy(&self, _: Address, _: Address, _: usize) -> Result<(), String> {
        Ok(())
    }

    fn wait(&self) -> Result<(), String> {
        Ok(())
    }

    /// As if threads had 128 registers, and clusters could have any multiprocessors.
    fn clusters_at_once(&self, kernel: &Kernel, grid: Grid) -> Result<usize, String> {
        if grid.cluster > self.device.most_cluster_blocks() {
            return Ok(0);
        }
        let shared = grid.shared + declared_shared(kernel.name) + 1024;
        let of_one = ((self.device.shared_memory + 1024) / shared).min(512 / grid.threads.max(1));
        Ok(self.device.multiprocessors * of_one / grid.cluster)
    }

    fn launch(&self, kernel: &Kernel, grid: Grid, args: &Args) -> Result<(), String> {
        if let Some(what) = self.lacks(kernel, grid) {
            return Err(format!("{kernel}: {what}"));
        }
        let mut log = lock(&self.log);
        log.launches.push(line(kernel, grid, args));
        if !log.kernels.contains(kernel) {
            log.kernels.insert(kernel.clone());
        }
        Ok(())
    }

    fn compile(&self, _: Vec<Kernel>) {}

    fn begin_recording(&self) -> Result<(), String> {
        Ok(())
    }

    fn end_recording(&self) -> Result<Option<Graph>, String> {
        Ok(Some(Box::new(())))
    }

    fn replay(&self, _: &Graph) -> Result<(), String> {
        Ok(())
    }

    fn profile(&self, _: bool) -> Result<(), String> {
        Ok(())
    }

    fn globals(&self, _: &str) -> Vec<(String, Vec<u8>)> {
        Vec::new()
    }
}
