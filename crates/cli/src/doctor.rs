//! `paceline doctor`: this machine, its caches, and whether its kernels compute what
//! they should.
//!
//! The self-test runs the cases that every backend must pass (`backend::conformance`)
//! on this processor and on every GPU. Each op is compared with the reference (on a GPU
//! only the ops that have its bits), and each row with the same row among others. The exit
//! code is 1 if a case fails.

use crate::args::DoctorArgs;
use crate::gpu::{self, Gpu};
use crate::model::bytes;
use crate::report::{Report, list, number};
use crate::tuning::Measured;
use crate::{bundled, machine, places, tuning};
use anyhow::{Result, bail};
use backend::conformance::{EQUAL_CASES, INVARIANCE_CASES};
use backend::{Record, Reference};
use cpu::{Activations, Cpu, CpuOptions, Isa, WeightReads};
use engine::PastTrial;
use hub::Cache;
use serde::Deserialize as _;
use serde_json::{Value, json};
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// Most trials that are shown to people; `--json` has all.
const SHOWN: usize = 20;

/// Runs `paceline doctor`.
pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let gpus = gpu::all(args.recalibrate);
    let record = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "processor": processor(args)?,
        "gpus": gpus.iter().flatten().map(|gpu| gpu.facts.clone()).collect::<Vec<_>>(),
        "gpus_not_used": gpus.iter().filter_map(|gpu| Some(gpu.as_ref().err()?.to_string())).collect::<Vec<_>>(),
        "memory": machine::ram().map(|ram| json!({"total": ram.total, "available": ram.available})),
        "hub": hub_facts(),
        "preflight": results(),
        "bundled": bundled::names(),
        "self_test": self_test(gpus.iter().flatten())?,
    });
    let failed: Vec<String> = record["self_test"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|case| !case["failure"].is_null())
        .map(failed_case)
        .collect();
    let mut stdout = io::stdout().lock();
    if args.json {
        writeln!(stdout, "{record}")?;
    } else {
        stdout.write_all(report(&record).as_bytes())?;
    }
    if failed.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    bail!(
        "what is computed is not what should be: {}",
        failed.join(", ")
    )
}

/// The processor, the kernels that are used on it and how they read weights, as JSON.
fn processor(args: &DoctorArgs) -> Result<Value> {
    let options = CpuOptions::default();
    let measured = match args.recalibrate {
        true => tuning::measure(options)?,
        false => tuning::known(options),
    };
    let used = measured.as_ref().map(|m| m.applied_to(options));
    let cpu = Cpu::new(used.unwrap_or(options))?;
    let isas: Vec<&str> = Isa::available().iter().map(|isa| isa.name()).collect();
    Ok(json!({
        "architecture": std::env::consts::ARCH,
        "instruction_sets": isas,
        "used": cpu.isa().name(),
        "threads": cpu.threads(),
        "cores": cpu::cores().cores,
        "memory_nodes": cpu::memory_nodes(),
        "hardware_threads": cpu::cores().threads,
        "pinned": cpu.is_pinned(),
        "tuning": measured,
    }))
}

/// The hub and its cache, as JSON.
fn hub_facts() -> Value {
    let settings = places::hub();
    let cache = Cache::new(&settings.cache);
    let (models, error) = match cache.list() {
        Ok(models) => (models, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let incomplete: Vec<&str> = models
        .iter()
        .filter(|m| m.incomplete.is_some())
        .map(|m| &*m.id)
        .collect();
    json!({
        "cache": cache.root(),
        "models": models.len(),
        "bytes": models.iter().map(|m| m.bytes).sum::<u64>(),
        "incomplete": incomplete,
        "endpoint": settings.endpoint,
        "has_token": settings.token.is_some(),
        "offline": settings.offline,
        "error": error,
    })
}

/// The folder that keeps the results of trials, and these results, the latest first, as JSON.
fn results() -> Value {
    let cache = places::cache();
    let trials = cache.as_deref().map(engine::past_trials);
    json!({
        "cache": cache.map(|folder| folder.join("preflight")),
        "results": trials.unwrap_or_default(),
    })
}

/// A past trial in one line.
fn trial(of: &Value) -> String {
    let Ok(PastTrial {
        tried,
        model,
        drafter,
        backend,
        result,
        ..
    }) = PastTrial::deserialize(of)
    else {
        unreachable!("written as one")
    };
    let expected = result.guesses.and_then(|g| g.expected);
    let expected = expected.map(|share| format!(", expected at least {:.0} %", 100.0 * share));
    format!(
        "{tried} {model} with {} on {backend}: {result}{}",
        drafter.as_deref().unwrap_or("no drafter"),
        expected.unwrap_or_default()
    )
}

/// A failed case of the self-test in words.
fn failed_case(case: &Value) -> String {
    format!("{} of {} on {}", case["kind"], case["op"], case["device"]).replace('"', "")
}

/// Runs every case of the self-test: device, kind, op, and the failure if there is one.
fn self_test<'a>(gpus: impl Iterator<Item = &'a Gpu>) -> Result<Vec<Value>> {
    let cpu = |activations| {
        Cpu::new(CpuOptions {
            activations,
            ..CpuOptions::default()
        })
    };
    let (exact, rounded) = (cpu(Activations::F32)?, cpu(Activations::Int8)?);
    let mut cases = Vec::new();
    for (op, case) in EQUAL_CASES {
        cases.push(outcome("cpu", "definition", op, || {
            case(&exact, &Reference)
        }));
    }
    for (op, case) in INVARIANCE_CASES {
        cases.push(outcome("cpu", "rows", op, || case(&rounded)));
    }
    exact.finish()?;
    rounded.finish()?;
    for gpu in gpus {
        let (device, backend) = (gpu.facts["device"].as_str().unwrap_or("gpu"), &*gpu.backend);
        for (op, case) in EQUAL_CASES {
            if gpu.equal_ops.contains(op) {
                let case = || case(backend, &Reference);
                cases.push(outcome(device, "definition", op, case));
            }
        }
        for (op, case) in INVARIANCE_CASES {
            cases.push(outcome(device, "rows", op, || case(backend)));
        }
        backend.finish()?;
    }
    Ok(cases)
}

/// Runs one case of the self-test; a panic is its failure.
fn outcome(device: &str, kind: &str, op: &str, case: impl FnOnce()) -> Value {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = catch_unwind(AssertUnwindSafe(case));
    std::panic::set_hook(hook);
    let failure = result.err().map(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        text.unwrap_or("a panic").to_owned()
    });
    json!({"device": device, "kind": kind, "op": op, "failure": failure})
}

/// A text of the record; `none` where there is none.
fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("none")
}

/// The texts of a list of the record.
fn texts(value: &Value) -> Vec<&str> {
    list(value).iter().map(text).collect()
}

/// The whole record for people.
fn report(record: &Value) -> String {
    let mut out = Report::default();
    out.line("paceline", text(&record["version"]));
    report_machine(record, &mut out);
    out.line("bundled", text(&record["bundled"]));
    report_hub(&record["hub"], &mut out);
    report_trials(&record["preflight"], &mut out);
    report_self_test(list(&record["self_test"]), &mut out);
    out.into_text()
}

/// Processor, memory and GPUs, for people.
fn report_machine(record: &Value, out: &mut Report) {
    let cpu = &record["processor"];
    let pinned = match cpu["pinned"] == true {
        true => "pinned",
        false => "not pinned to cores (--pin-threads)",
    };
    let nodes = match number(&cpu["memory_nodes"]) {
        0 | 1 => String::new(),
        nodes => format!(" near {nodes} memory nodes"),
    };
    out.line(
        "processor",
        format_args!(
            "{}, uses {} (available: {}), {} threads on {} cores{nodes}, {pinned}",
            text(&cpu["architecture"]),
            text(&cpu["used"]),
            texts(&cpu["instruction_sets"]).join(", "),
            number(&cpu["threads"]),
            number(&cpu["cores"]),
        ),
    );
    report_tuning(&cpu["tuning"], out);
    match &record["memory"] {
        Value::Null => out.line("memory", "this system does not say"),
        ram => out.line(
            "memory",
            format_args!(
                "{}, {} free: models that take more stay in their files (--weights)",
                bytes(number(&ram["total"])),
                bytes(number(&ram["available"]))
            ),
        ),
    }
    for gpu in list(&record["gpus"]) {
        out.line(
            "gpu",
            format_args!(
                "{} {}, compute capability {}, {} multiprocessors, {}, {} free, products {}, NVRTC {}",
                text(&gpu["device"]),
                text(&gpu["name"]),
                text(&gpu["compute_capability"]),
                number(&gpu["multiprocessors"]),
                bytes(number(&gpu["memory"]["total"])),
                bytes(number(&gpu["memory"]["free"])),
                text(&gpu["products"]),
                text(&gpu["nvrtc"])
            ),
        );
        for of in list(&gpu["tuning"]) {
            report_products(of, out);
        }
    }
    for why in texts(&record["gpus_not_used"]) {
        out.line("gpu", format_args!("not used: {why}"));
    }
}

/// How products with one kind of weights are computed on a GPU, for people.
fn report_products(of: &Value, out: &mut Report) {
    let float = |field: &str| of[field].as_f64().unwrap_or(0.0);
    let speedup = match float("speedup") {
        speedup if speedup > 1.0 => format!("{speedup:.2} times as fast as by default"),
        _ => "as by default".into(),
    };
    out.line(
        "",
        format_args!(
            "{}: one row reads {:.0} GB/s, {} ({speedup}, measured in {:.1} s)",
            text(&of["weights"]),
            float("bytes_per_second") / 1e9,
            text(&of["summary"]),
            float("took_ms") / 1e3,
        ),
    );
}

/// How products read weights, for people.
fn report_tuning(tuning: &Value, out: &mut Report) {
    let Ok(measured) = Measured::deserialize(tuning) else {
        return out.line(
            "weights",
            "read as by default; measured when the first large model is loaded, or by --recalibrate",
        );
    };
    let percent = |share: f64| format!("{:.0} %", 100.0 * share);
    out.line(
        "weights",
        format_args!(
            "measured in {:.0} ms with {} threads, which read {:.1} GB/s",
            measured.took_ms,
            measured.threads,
            measured.read_bytes_per_second / 1e9
        ),
    );
    for of in measured.kinds {
        let changed = match of.reads == WeightReads::default() {
            true => "the default".to_owned(),
            false => format!("{}, by default {}", of.reads, percent(of.default_share)),
        };
        out.line(
            "",
            format_args!(
                "{}: one row at {} of that, {changed}",
                of.kind.example(),
                percent(of.share)
            ),
        );
    }
}

/// The hub and its cache, for people.
fn report_hub(hub: &Value, out: &mut Report) {
    let incomplete = match texts(&hub["incomplete"]) {
        names if names.is_empty() => String::new(),
        names => format!(", not complete: {}", names.join(", ")),
    };
    out.line(
        "hub cache",
        format_args!(
            "{}: {} models, {}{incomplete}",
            text(&hub["cache"]),
            number(&hub["models"]),
            bytes(number(&hub["bytes"]))
        ),
    );
    let token = match hub["has_token"] == true {
        true => "with a token",
        false => "without a token",
    };
    let offline = match hub["offline"] == true {
        true => ", offline",
        false => "",
    };
    out.line(
        "hub",
        format_args!("{}, {token}{offline}", text(&hub["endpoint"])),
    );
}

/// The latest trials, for people.
fn report_trials(trials: &Value, out: &mut Report) {
    let past = list(&trials["results"]);
    let cache = text(&trials["cache"]);
    match past.len() {
        n if n > SHOWN => out.line("trials", format_args!("{cache}: {n}, the last {SHOWN}")),
        n => out.line("trials", format_args!("{cache}: {n}")),
    }
    for of in past.iter().take(SHOWN) {
        out.line("", trial(of));
    }
}

/// The number of cases of the self-test that hold, and each case that does not, for people.
fn report_self_test(cases: &[Value], out: &mut Report) {
    let failed: Vec<&Value> = cases.iter().filter(|c| !c["failure"].is_null()).collect();
    out.line(
        "self-test",
        format_args!(
            "{} of {} cases hold",
            cases.len() - failed.len(),
            cases.len()
        ),
    );
    for case in failed {
        let failure = text(&case["failure"]);
        out.line("", format_args!("{}: {failure}", failed_case(case)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpus_products_are_shown_below_it() {
        let of = |speedup: f64, summary: &str| {
            json!({"weights": "4 bits in groups of 32", "summary": summary, "speedup": speedup,
                "bytes_per_second": 2.9e12, "took_ms": 1714.0})
        };
        let gpu = json!({"device": "cuda:0", "name": "Some GPU",
            "tuning": [of(1.0, "pipelines"), of(1.21, "GEMM from 65 rows")]});
        let mut out = Report::default();
        report_machine(&json!({"gpus": [gpu]}), &mut out);
        let text = out.into_text();
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        let at = lines.iter().position(|line| line.contains("Some GPU"));
        let below = &lines[at.expect("the GPU") + 1..][..2];
        assert_eq!(
            below,
            [
                "4 bits in groups of 32: one row reads 2900 GB/s, pipelines (as by default, measured in 1.7 s)",
                "4 bits in groups of 32: one row reads 2900 GB/s, GEMM from 65 rows (1.21 times as fast as by default, measured in 1.7 s)",
            ]
        );
    }
}
