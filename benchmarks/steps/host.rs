//! What a step of a real checkpoint costs on the CPU.

use crate::head::Head;
use crate::kv_plans;
use crate::texts::time_kv;
use backend::{Backend, Record};
use cpu::{Cpu, CpuOptions};
use serde_json::json;
use std::path::PathBuf;
use weights::Checkpoint;

/// Runs `CHECKPOINT [--assistant CHECKPOINT] [--threads N] --kv PLANS`.
pub(crate) fn run(mut args: impl Iterator<Item = String>) {
    let path = PathBuf::from(args.next().expect("a checkpoint after --cpu"));
    let (mut options, mut plans, mut beside) = (CpuOptions::default(), None, None);
    while let Some(option) = args.next() {
        match option.as_str() {
            "--threads" => {
                let threads = args.next().and_then(|n| n.parse().ok());
                options.threads = threads.expect("a number after --threads");
            }
            "--assistant" => {
                let path = PathBuf::from(args.next().expect("a checkpoint after --assistant"));
                beside = Some(Checkpoint::open(&path).unwrap());
            }
            "--kv" => plans = Some(kv_plans(args.next())),
            _ => panic!("{option} is no option of --cpu"),
        }
    }
    let plans = plans.expect("--kv, which is all that --cpu times");
    let b = Cpu::new(options).unwrap();
    let checkpoint = Checkpoint::open(&path).unwrap();
    let target = models::load_target(&b, &checkpoint).unwrap();
    let head = Head::load(&b, &checkpoint, beside.as_ref(), &*target);
    b.finish().unwrap();
    let name = path.file_stem().expect("a checkpoint's name");
    let of = json!({"model": name.to_string_lossy(), "device": b.name()});
    time_kv(&b, &*target, head.as_ref(), &plans, &of);
}
