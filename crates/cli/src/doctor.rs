//! `paceline doctor`: this machine, its caches, and whether its kernels compute what
//! they should.
//!
//! The self-test runs the cases that every backend must pass
//! (`backend::conformance`) on this processor and on every GPU: each op against its
//! definition (on a GPU, those that have its bits), and each row against itself among
//! other rows. Exit code 1 if one fails.

use crate::args::DoctorArgs;
use crate::gpu::{self, Gpu};
use crate::model::bytes;
use crate::{bundled, machine, places};
use anyhow::{Result, bail};
use backend::conformance::{EQUAL_CASES, INVARIANCE_CASES};
use backend::{Record, Reference};
use cpu::{Activations, Cpu, CpuOptions, Isa};
use engine::PastTrial;
use hub::Cache;
use serde::Deserialize as _;
use serde_json::{Value, json};
use std::io::{self, Write as _};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

/// Trials that are shown; `--json` has all.
const SHOWN: usize = 20;

/// Runs the command.
pub(crate) fn run(args: &DoctorArgs) -> Result<ExitCode> {
    let gpus = gpu::all();
    let record = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "processor": processor()?,
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

fn processor() -> Result<Value> {
    let cpu = Cpu::new(CpuOptions::default())?;
    let isas: Vec<&str> = Isa::available().iter().map(|isa| isa.name()).collect();
    Ok(json!({
        "architecture": std::env::consts::ARCH,
        "instruction_sets": isas,
        "used": cpu.isa().name(),
        "threads": cpu.threads(),
        "pinned": cpu.is_pinned(),
    }))
}

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

/// The folder that remembers trials, and what came out of them, the latest first.
fn results() -> Value {
    let cache = places::cache();
    let trials = cache.as_deref().map(engine::past_trials);
    json!({
        "cache": cache.map(|folder| folder.join("preflight")),
        "results": trials.unwrap_or_default(),
    })
}

/// A trial that [`results`] has, in one line.
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

/// A case in words.
fn failed_case(case: &Value) -> String {
    format!("{} of {} on {}", case["kind"], case["op"], case["device"]).replace('"', "")
}

/// Every case: the device, the op, what is asked, and the failure if there is one.
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

/// Runs a case; its panic is the failure.
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

/// The record for people.
fn report(record: &Value) -> String {
    let text = |value: &Value| value.as_str().unwrap_or("none").to_owned();
    let list = |value: &Value| -> Vec<String> {
        value.as_array().into_iter().flatten().map(text).collect()
    };
    let number = |value: &Value| value.as_u64().unwrap_or(0);
    let (cpu, hub, trials) = (&record["processor"], &record["hub"], &record["preflight"]);
    let memory = match &record["memory"] {
        Value::Null => "this system does not say".to_owned(),
        ram => format!(
            "{}, {} free: models that take more stay in their files (--weights)",
            bytes(number(&ram["total"])),
            bytes(number(&ram["available"]))
        ),
    };
    let incomplete = match list(&hub["incomplete"]) {
        names if names.is_empty() => String::new(),
        names => format!(", not complete: {}", names.join(", ")),
    };
    let yes = |value: &Value, yes: &str, no: &str| {
        if *value == json!(true) {
            yes.to_owned()
        } else {
            no.to_owned()
        }
    };
    let cases = record["self_test"]
        .as_array()
        .map_or(&[][..], Vec::as_slice);
    let past = trials["results"].as_array().map_or(&[][..], Vec::as_slice);
    let failed: Vec<&Value> = cases.iter().filter(|c| !c["failure"].is_null()).collect();
    let mut lines = vec![
        ("paceline", text(&record["version"])),
        (
            "processor",
            format!(
                "{}, uses {} (available: {}), {} threads, {}",
                text(&cpu["architecture"]),
                text(&cpu["used"]),
                list(&cpu["instruction_sets"]).join(", "),
                number(&cpu["threads"]),
                match cpu["pinned"] == true {
                    true => "pinned",
                    false => "not pinned to cores (--pin-threads)",
                }
            ),
        ),
        ("memory", memory),
    ];
    for gpu in record["gpus"].as_array().into_iter().flatten() {
        let line = format!(
            "{} {}, compute capability {}, {} multiprocessors, {}, {} free, products {}, NVRTC {}",
            text(&gpu["device"]),
            text(&gpu["name"]),
            text(&gpu["compute_capability"]),
            number(&gpu["multiprocessors"]),
            bytes(number(&gpu["memory"]["total"])),
            bytes(number(&gpu["memory"]["free"])),
            text(&gpu["products"]),
            text(&gpu["nvrtc"])
        );
        lines.push(("gpu", line));
    }
    lines.extend(
        list(&record["gpus_not_used"])
            .into_iter()
            .map(|why| ("gpu", format!("not used: {why}"))),
    );
    lines.extend([
        ("bundled", text(&record["bundled"])),
        (
            "hub cache",
            format!(
                "{}: {} models, {}{incomplete}",
                text(&hub["cache"]),
                number(&hub["models"]),
                bytes(number(&hub["bytes"]))
            ),
        ),
        (
            "hub",
            format!(
                "{}, {}{}",
                text(&hub["endpoint"]),
                yes(&hub["has_token"], "with a token", "without a token"),
                yes(&hub["offline"], ", offline", "")
            ),
        ),
        (
            "trials",
            match past.len() {
                n if n > SHOWN => format!("{}: {n}, the last {SHOWN}", text(&trials["cache"])),
                n => format!("{}: {n}", text(&trials["cache"])),
            },
        ),
    ]);
    lines.extend(past.iter().take(SHOWN).map(|of| ("", trial(of))));
    lines.push((
        "self-test",
        format!(
            "{} of {} cases hold",
            cases.len() - failed.len(),
            cases.len()
        ),
    ));
    for case in failed {
        lines.push((
            "",
            format!("{}: {}", failed_case(case), text(&case["failure"])),
        ));
    }
    lines
        .iter()
        .map(|(label, value)| format!("{label:<14} {value}\n"))
        .collect()
}
