//! Every kernel compiles within its budget, and has its arguments where they are put. No GPU is needed.

use super::attention::format_of;
use crate::args;
use crate::attention::{MOST_RESULTS, Prompts};
use crate::compile;
use crate::constants::ATTENTION_WGMMA;
use crate::delta;
use crate::dry::declared_shared;
use crate::elementwise::{ROW_FOLD, row_kernel, run_kernel};
use crate::gated_projection;
use crate::gemm::{Simple, Warpgroups};
use crate::kv::format_defines;
use crate::machine::Kernel;
use crate::matmul::{Tiles, most_stage_row_tiles};
use crate::moe::gemv_kernel;
use crate::pack::Packing;
use crate::tuning::unroll_of;
use backend::{DeltaSpec, KvFormat};
use rayon::prelude::*;
use std::collections::HashSet;

fn with(file: &'static str, defines: &[(&'static str, usize)]) -> Kernel {
    Kernel {
        file,
        name: "",
        defines: defines.to_vec(),
    }
}

/// Files of attention for keys and values in `format` and heads of `head` columns, 0 if tensor cores do not
/// take them.
fn attention(first: bool, file: &'static str, format: KvFormat, head: usize) -> Kernel {
    let stages = match head {
        0 => 0,
        _ if !head.is_multiple_of(256) => 0,
        _ if first => 4,
        _ => 2,
    };
    let is_packed = |f: &quant::KvRowFormat| !matches!(f.layout, quant::KvLayout::Plain(_));
    let both = is_packed(format.k) && is_packed(format.v);
    let blocks = |tiles| 1 + usize::from(both && tiles * head <= MOST_RESULTS);
    let mut kernel = with(file, &format_defines(format));
    kernel.defines.extend([
        ("TENSOR_CORES", usize::from(head > 0)),
        ("HEAD_DIM", head),
        ("HEAD_COLUMNS", head),
        ("BLOCKS_1", blocks(1)),
        ("BLOCKS_2", blocks(2)),
        ("STAGES", stages),
    ]);
    kernel
}

/// Attention of prompts by warpgroups, with the memory of compute capability 9.0.
fn prompts(format: &str, head: usize, pages_only: bool) -> Kernel {
    let mut kernel = attention(true, ATTENTION_WGMMA, format_of(format), head);
    kernel.defines.pop();
    let prompts = Prompts::new(head, 227 << 10, pages_only).expect("room for it");
    kernel.defines.extend(prompts.defines());
    kernel
}

fn delta_spec(key_dim: usize, value_dim: usize) -> DeltaSpec {
    DeltaSpec {
        slots: 1,
        key_heads: 1,
        value_heads: 1,
        key_dim,
        value_dim,
        conv_taps: 4,
    }
}

/// The delta rule for heads of so many columns of keys and of values.
fn delta(key_dim: usize, value_dim: usize) -> Kernel {
    delta::kernel(&delta_spec(key_dim, value_dim), "")
}

/// Every file of kernels with the numbers that models need; for other
/// architectures than the first, those of common formats. Pipelined products start at
/// compute capability 9.0.
fn variants(first: bool, pipelined: bool) -> Vec<Kernel> {
    let codes = |bits, group| Packing::Codes { bits, group };
    let alone = [
        "elementwise",
        "gemv_f32",
        "moe_route",
        "choose",
        "kv_rotate",
    ];
    let mut all: Vec<Kernel> = alone.map(|file| with(file, &[])).into();
    all.extend([64, 128, 256].map(|width| run_kernel("", width)));
    // One, two and three pairs of columns for each thread of a row, the last pair in only some of them.
    let widths = [2048, 2816, 5376, 2560, 6144];
    for width in widths.into_iter().take(if first { 5 } else { 1 }) {
        for file in ["row_norm", "moe_combine"] {
            all.extend([1, ROW_FOLD].map(|fold| row_kernel(file, "", width, fold)));
        }
    }
    for file in ["kv_append", "attention"] {
        let attention = |format, head| attention(first, file, format_of(format), head);
        all.extend([
            attention("f32", 0),
            attention("bf16", 256),
            attention("q8_0,turbo4", 256),
        ]);
        if first {
            let more = [
                ("f16", 128),
                ("bf16", 64),
                ("bf16", 512),
                ("q8_0", 64),
                ("q8_0,bf16", 256),
                ("f32,turbo3", 0),
                ("turbo4,turbo3", 128),
                ("turbo3,turbo2", 256),
                ("turbo4,q5_0", 512),
                ("q5_0,q4_0", 256),
                ("rot-q5_0,rot-q8_0", 64),
            ];
            all.extend(more.map(|(format, head)| attention(format, head)));
        }
    }
    all.push(delta(128, 128));
    let mut packings = vec![Packing::Plain, codes(4, 64)];
    if first {
        all.extend([
            prompts("bf16", 256, true),
            prompts("bf16", 256, false),
            prompts("f16", 512, false),
        ]);
        all.extend([delta(64, 256), delta(24, 80), delta(256, 64)]);
        packings.push(Packing::E4m3 { group: 64 });
        packings.extend([3, 4].map(|bits| Packing::Rotated { bits }));
        packings.extend([2, 3, 4, 5, 6, 8].map(|bits| codes(bits, 32)));
    }
    for packing in packings {
        let tiles = Tiles::new(packing, 4096);
        all.extend(["embed", "moe_gemv_glu"].map(|file| tiles.kernel(file, "")));
        let most = if packing == codes(4, 32) { 512 } else { 256 };
        all.push(gemv_kernel(tiles, most, ""));
        if packing == codes(4, 64) {
            // 16 slices, twice the shared memory.
            all.push(gemv_kernel(Tiles::new(packing, 8192), most, ""));
        }
        // What a trial may choose, too.
        let default = unroll_of(packing);
        let unrolls = [1, 2, 4].map(|unroll| ("UNROLL", unroll));
        let tried = first && matches!(packing, Packing::Plain | Packing::Codes { bits: 4, .. });
        let unrolls = unrolls.into_iter().filter(|&(_, n)| tried || n == default);
        all.extend(unrolls.map(|unroll| {
            let mut kernel = tiles.kernel("gemv", "");
            kernel.defines.push(unroll);
            kernel
        }));
        if pipelined && !tiles.is_rotated() {
            let tiles = Tiles::new(packing, 2560);
            all.extend([16, 8].map(|blocks| gated_projection::kernel(tiles, blocks)));
            if first {
                // One slice.
                all.push(gated_projection::kernel(Tiles::new(packing, 192), 8));
            }
        }
        if pipelined {
            let mut at_once = [8, 16].map(|n| most_stage_row_tiles(packing, n)).to_vec();
            at_once.extend(first.then_some(1));
            at_once.sort_unstable();
            at_once.dedup();
            all.extend(at_once.into_iter().map(|at_once| {
                let mut kernel = tiles.kernel("gemv_pipelined", "");
                kernel.defines.push(("STAGE_ROW_TILES", at_once));
                kernel
            }));
        }
        // With much shared memory and little.
        let mut kinds = vec![Simple::new(packing, 163 << 10), Simple::new(packing, 0)];
        kinds.truncate(if packing == Packing::Plain { 1 } else { 2 });
        all.extend(kinds.into_iter().map(|simple| simple.kernel("")));
        if first {
            all.extend([32, 64, 128, 192].map(|rows| Warpgroups::new(packing, rows).kernel("")));
        }
    }
    all
}

/// Registers of a thread and instructions, at most, by how a kernel's name starts; 40 and
/// 1000 for others. More registers mean fewer threads at once, or spills. Instructions may
/// grow by a fifth or so; more is a loop unrolled by mistake. Look before you raise one.
const BUDGETS: &[(&str, usize, usize)] = &[
    ("gated_projection", 96, 2900),
    ("gemm", 255, 3200),
    ("moe_gemv_8", 128, 1450),
    ("moe_gemv_16", 128, 1450),
    ("moe_gemm_wgmma", 168, 2000),
    ("moe_gemv_glu", 176, 4600),
    ("moe_gemv_pipelined", 128, 6800),
    ("moe_gemv_routed", 128, 5500),
    ("gemv_pipelined", 128, 4600),
    ("gemv", 112, 2200),
    ("choose_cut", 64, 3800),
    ("choose_noise", 40, 2700),
    ("choose_best", 40, 1300),
    ("attend_near", 48, 700),
    ("undo_rotations", 40, 1600),
    ("attention_decode_pages", 168, 2900),
    ("attention_decode", 232, 5500),
    ("attention_pipelined", 200, 7400),
    ("attention_wgmma", 168, 9000),
    ("attention", 204, 5500),
    ("delta_prepare", 80, 1200),
    ("delta_rule", 128, 2400),
    ("delta_fused_cluster", 128, 4900),
    ("delta_fused", 128, 4900),
    ("delta_conv", 42, 1500),
    ("add_norm", 64, 2600),
    ("rms_norm_glu", 64, 2750),
    ("rms_norm", 40, 1400),
    ("moe_shared_norm", 64, 3200),
    ("moe_dense_norm", 64, 3400),
    ("glu_rows", 48, 3400),
    ("glu", 40, 2600),
    ("norm_rope_append_rows", 64, 2200),
    ("norm_rope_append", 48, 2200),
    ("norm_append_values", 128, 8000),
    ("group", 56, 2000),
    ("route", 40, 4200),
];

/// Most registers and instructions of kernels that unpack keys or values of fewer bits than 8, or rotate and round them;
/// these count before [`BUDGETS`].
const PACKED_BUDGETS: &[(&str, usize, usize)] = &[
    ("kv_append", 48, 2800),
    ("norm_rope_append", 64, 3200),
    ("attention_decode_pages", 168, 3800),
    ("attention_decode", 232, 6800),
    ("attention_pipelined", 240, 6800),
    ("attention_all", 248, 8400),
];

/// Most registers and instructions of kernels whose threads stand for several of a row's; these count before [`BUDGETS`].
const FOLDED_BUDGETS: &[(&str, usize, usize)] = &[
    ("add_norm", 128, 4200),
    ("rms_norm_glu", 112, 7800),
    ("rms_norm", 72, 2000),
    ("moe_shared_norm", 144, 7800),
    ("moe_dense_norm", 160, 8200),
];

/// Most registers and instructions of the delta rule where keys have 256 columns.
const WIDE_KEY_BUDGETS: &[(&str, usize, usize)] = &[
    ("delta_prepare", 100, 1200),
    ("delta_rule", 200, 2600),
    ("delta_fused", 168, 4900),
];

/// The budget of kernel `name` of `kernel`.
fn budget(kernel: &Kernel, name: &str) -> (usize, usize) {
    let packed = |&(what, bits)| {
        matches!(what, "KEY_BITS" | "VALUE_BITS") && bits < 8
            || matches!(what, "KEY_ROTATION" | "VALUE_ROTATION") && bits > 0
    };
    let more = if kernel.defines.iter().any(packed) {
        PACKED_BUDGETS
    } else if kernel.defines.contains(&("ROW_FOLD", ROW_FOLD)) {
        FOLDED_BUDGETS
    } else if kernel.defines.contains(&("DK", 256)) {
        WIDE_KEY_BUDGETS
    } else {
        &[]
    };
    let found = more
        .iter()
        .chain(BUDGETS)
        .find(|(start, ..)| name.starts_with(start));
    found.map_or((40, 1000), |b| (b.1, b.2))
}

/// Kernels of a file that are over their budgets, and by how much.
fn over_budget(arch: u32, kernel: &Kernel) -> Vec<String> {
    let report = compile::report(arch, kernel).unwrap();
    assert!(!report.is_empty(), "{kernel} has kernels");
    let mut over = Vec::new();
    for (name, usage) in report {
        let (registers, instructions) = budget(kernel, &name);
        // What its warps give up and take (setmaxnreg) adds up to its budget and no less.
        let takes_all = name != "attention_wgmma" || usage.registers == registers;
        let few = usage.registers <= registers && usage.instructions <= instructions;
        let two_blocks = kernel.defines.contains(&("BLOCKS_2", 2));
        let stack = match name.as_str() {
            // Of heads of 512 columns, two values wait there while a split is read.
            "attention_wgmma" => 8,
            // With half of the registers, what is used once a split waits there; two
            // blocks a multiprocessor are still faster than one.
            "attention_pipelined_2" if two_blocks => 32,
            // Where three blocks fit a multiprocessor, four values wait there while the state is multiplied. For many
            // blocks that is still faster than two.
            "delta_fused" if (90..120).contains(&arch) => 16,
            // Two values of the loop over rows wait there, for six blocks a multiprocessor.
            "delta_conv" if arch == 120 => 8,
            _ => 0,
        };
        let declared = declared_shared(&name);
        // Blocks of these are spread by what is declared, no more and no less.
        let is_exact = !name.starts_with("gemv_pipelined") || usage.shared == declared;
        if !few || !takes_all || !is_exact || usage.stack > stack || usage.shared > declared {
            over.push(format!("{kernel}{name} for sm_{arch}: {usage:?}"));
        }
    }
    over
}

/// Needs no GPU, and so no name by which the tests of one are chosen.
#[test]
fn every_kernel_compiles_within_its_budget() {
    if !compile::is_present() {
        eprintln!("!!! SKIPPED, no kernel is compiled: NVRTC is not on LD_LIBRARY_PATH");
        return;
    }
    let mut all = Vec::new();
    for arch in [90, 80, 86, 89, 100, 120] {
        let kernels = variants(arch == 90, arch >= 90);
        all.extend(kernels.into_iter().map(|kernel| (arch, kernel)));
    }
    let over: Vec<String> = all
        .par_iter()
        .flat_map_iter(|(arch, kernel)| over_budget(*arch, kernel))
        .collect();
    assert!(over.is_empty(), "over their budgets:\n{}", over.join("\n"));
}

/// Blocks of both kernels of few rows are spread by what these declare. Needs no GPU either.
#[test]
fn the_delta_rule_of_few_rows_declares_what_its_blocks_are_spread_by() {
    if !compile::is_present() {
        eprintln!("!!! SKIPPED, no kernel is compiled: NVRTC is not on LD_LIBRARY_PATH");
        return;
    }
    for (key_dim, value_dim) in [(128, 128), (64, 256), (24, 80)] {
        let spec = delta_spec(key_dim, value_dim);
        let report = compile::report(90, &delta::kernel(&spec, "")).unwrap();
        let of_fused = delta::DECLARED_BY_FUSED;
        // Where the compiler puts both flags behind one another, 16 less.
        let mut kernels = vec![("delta_fused", [of_fused, of_fused - 16])];
        if value_dim % 64 == 0 {
            kernels.push((
                "delta_fused_cluster",
                [delta::declared_by_fused_cluster(&spec); 2],
            ));
        }
        for (kernel, declared) in kernels {
            let found = report.iter().find(|(name, _)| name == kernel);
            let (_, usage) = found.expect("a kernel for few rows");
            let fits = declared.contains(&usage.shared);
            assert!(fits, "{kernel}, {spec:?}: {declared:?} for {usage:?}");
        }
    }
}

/// Needs no GPU either.
#[test]
fn every_argument_has_the_layout_of_its_kernels() {
    if !compile::is_present() {
        eprintln!("!!! SKIPPED, no layout is checked: NVRTC is not on LD_LIBRARY_PATH");
        return;
    }
    // One variant of each file.
    let (mut files, mut found) = (HashSet::new(), HashSet::new());
    for kernel in variants(true, true) {
        if files.insert(kernel.file) {
            found.extend(compile::check_layouts(90, &kernel).unwrap());
        }
    }
    for (name, ..) in args::layouts() {
        assert!(found.contains(name), "no kernel has a struct {name}");
    }
}

/// Levels and signs are written down in the kernels once more.
#[test]
fn kernels_have_the_levels_and_the_rotation_of_the_formats() {
    let text = include_str!("../../kernels/kv_format.cuh");
    for bits in [2, 3, 4] {
        let levels = &quant::turbo::levels(bits)[1 << (bits - 1)..1 << bits];
        let levels: Vec<String> = levels.iter().map(|level| format!("{level:.6}f")).collect();
        assert!(text.contains(&levels.join(", ")), "{levels:?}");
    }
    let text = include_str!("../../kernels/hadamard.cuh");
    // The transform of the first column has the signs behind it, times the first of those before, and the
    // other way round.
    let rotation = quant::kv::Rotation::Groups128;
    let turned = |turn: &dyn Fn(&mut [f32]), first: f32| {
        let mut x = [0.0f32; 128];
        x[0] = first;
        turn(&mut x);
        let words = x.chunks(32).map(|x| {
            let bit = |(i, x): (usize, &f32)| u32::from(*x < 0.0) << i;
            format!("{:#010x}", x.iter().enumerate().map(bit).sum::<u32>())
        });
        (x[0].signum(), words.collect::<Vec<_>>().join(", "))
    };
    let has = |first_before| {
        let (first_after, after) = turned(&|x| rotation.rotate(x), first_before);
        let (_, before) = turned(&|x| rotation.undo(x), first_after);
        text.contains(&format!("BEFORE[4] = {{{before}}}"))
            && text.contains(&format!("AFTER[4] = {{{after}}}"))
    };
    // With every sign of both turned, the rotation is the same.
    assert!(has(1.0) || has(-1.0), "signs of the rotation");
}
