//! Which model a command loads, and how.

use super::kv::{help as kv_help, plan as kv_plan};
use super::values::{count, load_format};
use clap::{Args, ValueEnum};
use engine::{KvPlan, TowerFile};
use quant::Format;
use std::num::NonZeroUsize;
use std::path::PathBuf;

/// Which model.
#[derive(Debug, Args)]
pub(crate) struct ModelArg {
    /// A folder with config.json and safetensors, a GGUF file, ORG/NAME of a model in the hub cache
    /// (`paceline pull` fetches it), or the name of a bundled model
    #[arg(short, long, value_name = "MODEL", default_value = crate::bundled::DEFAULT, help_heading = "Model")]
    pub(crate) model: String,
}

/// How the model is loaded.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model")]
pub(crate) struct LoadArgs {
    /// Context length: tokens of prompt and reply together, such as 4096 or 32k [default: the
    /// model's limit, at most 8k]
    #[arg(short = 'c', long, visible_alias = "ctx-size", value_name = "TOKENS", value_parser = count)]
    pub(crate) context: Option<usize>,
    #[arg(long, value_name = "FORMAT", help = kv_help(), default_value = quant::KV_FORMATS[0].name, value_parser = kv_plan)]
    pub(crate) kv: KvPlan,
    /// Quantize weights while they are loaded: q4, q5, q6, q8 or a name such as affine4-g32
    #[arg(long, value_name = "FORMAT", value_parser = load_format)]
    pub(crate) quant: Option<&'static Format>,
    /// Where weights are kept: packed copies them to memory, which is fast; mapped leaves them in
    /// memory-mapped files (mmap), which is slower and takes less memory; auto packs them if they fit
    /// the free memory
    #[arg(long, value_name = "WHERE", default_value = "auto")]
    pub(crate) weights: Weights,
    /// Memory that weights and KV cache may take together on a CPU, such as 12GB; a model that needs
    /// more is not started [default: what is free]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) memory: Option<u64>,
    /// Memory of the prefix cache, such as 2GB, beyond what running requests leave free of their KV
    /// cache
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub(crate) prefix_cache_memory: Option<u64>,
    /// Prompt tokens of one prefill step, at most [default: 256; on a GPU 1024, up to 8192 for models
    /// of few active weights where there is much memory]
    #[arg(long, value_name = "TOKENS", value_parser = count)]
    pub(crate) chunk: Option<usize>,
    /// Device to run on: cpu, cuda, cuda:N, or auto, which takes a GPU if there is one
    #[arg(long, value_name = "DEVICE", default_value = "auto", value_parser = device)]
    pub(crate) device: Device,
    /// CPU threads to compute with [default: one per core]
    #[arg(short = 't', long, value_name = "N", value_parser = threads)]
    pub(crate) threads: Option<NonZeroUsize>,
    /// Bind each thread but the first to a core of its own
    #[arg(long)]
    pub(crate) pin_threads: bool,
    /// Format of the activations that quantized weights are multiplied with: rounded to 8 bits, or
    /// kept in f32, which takes four bytes per weight
    #[arg(long, value_name = "FORMAT", default_value = "int8")]
    pub(crate) activations: Activations,
    /// Read control tokens that a message, a tool or a template argument spells, such as
    /// `<|im_end|>`, as control tokens: whoever writes them can end a turn and begin another
    #[arg(long)]
    pub(crate) allow_special_tokens: bool,
    /// File of the vision tower, an `mmproj` of GGUF [default: the one beside the model, if there is one]
    #[arg(long, value_name = "FILE", conflicts_with = "no_pictures")]
    pub(crate) mmproj: Option<PathBuf>,
    /// Leave the vision tower of a model that has one out of memory; pictures and video are refused then
    #[arg(long, visible_alias = "no-mmproj")]
    pub(crate) no_pictures: bool,
    /// Skip the self-test after loading, which checks that batched and single steps agree bit for
    /// bit and that drafts are accepted. Its result is remembered, so only the first start takes longer
    #[arg(long)]
    pub(crate) no_probe: bool,
    /// Memory of the KV cache of running requests, which only `serve` has an option for.
    #[arg(skip)]
    pub(crate) kv_memory: Option<KvShare>,
    /// Models that share the memory, which only `serve` may have several of.
    #[arg(skip)]
    pub(crate) shared_by: Option<NonZeroUsize>,
    /// Whether files are hashed though the model is not tried, as `serve --cache-dir` asks for.
    #[arg(skip)]
    pub(crate) identify: bool,
    /// A chat template in place of the model's own, which only `serve` has an option for.
    #[arg(skip)]
    pub(crate) chat_template: Option<String>,
    /// Instruction set to compute with, to measure or to find a fault
    #[arg(long, hide = true, value_parser = isa)]
    pub(crate) isa: Option<cpu::Isa>,
}

impl LoadArgs {
    /// Which file the vision tower comes from.
    pub(crate) fn tower(&self) -> TowerFile {
        self.mmproj.clone().map_or(TowerFile::Beside, TowerFile::At)
    }
}

/// Devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Device {
    /// A GPU if there is one that can be used, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The GPU of this number.
    Cuda(usize),
}

/// Where weights are kept, as `--weights` has it.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Weights {
    Auto,
    Packed,
    Mapped,
}

/// Formats of what quantized weights are multiplied with.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Activations {
    Int8,
    F32,
}

impl Activations {
    /// The format as users type it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Activations::Int8 => "int8",
            Activations::F32 => "f32",
        }
    }
}

fn device(text: &str) -> Result<Device, String> {
    let ordinal = |n: &str| n.parse().ok().map(Device::Cuda);
    let device = match text {
        "auto" => Some(Device::Auto),
        "cpu" => Some(Device::Cpu),
        "cuda" => Some(Device::Cuda(0)),
        _ => text.strip_prefix("cuda:").and_then(ordinal),
    };
    device.ok_or_else(|| "devices are auto, cpu, cuda and cuda:N, such as cuda:1".into())
}

/// Threads wait for each other all the time: one that has no core stalls them all.
fn threads(text: &str) -> Result<NonZeroUsize, String> {
    let most = std::thread::available_parallelism().map_or(usize::MAX, NonZeroUsize::get);
    match text.parse::<NonZeroUsize>() {
        Ok(n) if n.get() > most => Err(format!("this machine runs {most} at once")),
        parsed => parsed.map_err(|_| "expected a number from 1 on".into()),
    }
}

fn isa(text: &str) -> Result<cpu::Isa, String> {
    let available = cpu::Isa::available();
    let names = || {
        available
            .iter()
            .map(|isa| isa.name())
            .collect::<Vec<_>>()
            .join(", ")
    };
    available
        .iter()
        .copied()
        .find(|isa| isa.name() == text)
        .ok_or_else(|| format!("this CPU has {}", names()))
}

/// The memory of the KV cache of running requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KvShare {
    /// What the machine has to spare.
    Auto,
    /// So many bytes.
    Bytes(u64),
}

/// Reads a [`KvShare`].
pub(super) fn kv_memory(text: &str) -> Result<KvShare, String> {
    match text.trim() {
        "auto" => Ok(KvShare::Auto),
        text => size(text).map(KvShare::Bytes),
    }
}

/// Bytes, such as `12GB`, `800MB` or `1.5T`.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let upper = text.trim().to_ascii_uppercase();
    let digits = upper.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit = match upper[digits.len()..].trim_end_matches('B') {
        "" => 1.0,
        "K" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        _ => f64::NAN,
    };
    let bytes = digits.trim().parse::<f64>().unwrap_or(f64::NAN) * unit;
    if (1.0..1e18).contains(&bytes) {
        Ok(bytes as u64)
    } else {
        Err("expected a size such as 12GB or 800MB".into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_memory_have_units() {
        assert_eq!(size("12GB"), Ok(12_000_000_000));
        assert_eq!(size("1.5 g"), Ok(1_500_000_000));
        assert_eq!(size("800m"), Ok(800_000_000));
        assert_eq!(size("1000"), Ok(1000));
        for bad in [
            "",
            "GB",
            "-1GB",
            "0",
            "nan",
            "inf",
            "12XB",
            "1e30",
            "12 gigabytes",
        ] {
            assert!(size(bad).is_err(), "{bad}");
        }
    }
}
