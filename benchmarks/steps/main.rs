//! What a step of a large model costs on a GPU: random weights at true shapes.
//!
//! A checkpoint of the right names and sizes is a file with holes; its weights are
//! never read, for the backend makes random ones of the wanted format on the
//! device. Norms and other parameters are ones. Keys and values are those of no
//! text, which costs the same. One line of JSON a figure, on stdout; first the memory's
//! ceiling, and what it takes to choose tokens on the device and on the host; a draft is
//! timed as a step of its own, and as chains of one and of four tokens.
//!
//! `steps FOLDER [--formats FORMAT,…] [--trials] [--quick] [--load] [--ops ROWS] [--trace ROWS] [--kv PLANS] [--prompts ROWS] [--texts STEPS] [MODEL …]`: FOLDER is
//! where the files with holes go, formats are `affine4-g64,bf16` unless named. With `--quick`, there is
//! one short context and no prefill. With `--ops`, a step of that many rows is run once, as it
//! comes and not recorded, for a profiler that shows what each kernel takes:
//! `ncu --profile-from-start off --metrics gpu__time_duration.sum steps FOLDER --ops 1 MODEL`.
//! With `--trace ROWS`, recorded steps of that many rows run with the kernels that
//! `trace.py instrument` made, and what their blocks wrote down is left in
//! `FOLDER/MODEL-FORMAT.trace` for `trace.py draw`. With `--kv PLANS`, such as `bf16,q8_0+turbo4`, steps and drafts of
//! three tokens run at contexts from 1,000 to 100,000 tokens in each of these formats of the KV cache, and nothing else: drafts of the MTP
//! head, or of the assistant of `gemma4-31b`.
//!
//! With `--load`, a model is loaded three times from its file, in 4 bits or bf16 whose values are zeros, and nothing else: the first time the file's
//! pages come to be in the page cache.
//!
//! With `--trials`, how products are fastest is timed for each format before its steps, unless an earlier run has kept a result; all results of the GPU are lines of their own.
//!
//! With `--prompts 1024,2048`, a prompt of 8,192 tokens is read in steps of 1,024 rows, then in steps of 2,048, and nothing else.
//!
//! With `--texts 8x4,8x5`, steps of 8 texts run that have 4 rows and 5 rows of each, and nothing else.
//!
//! `steps --cpu CHECKPOINT [--assistant CHECKPOINT] [--threads N] --kv PLANS` times the same steps and drafts on the CPU, with a real checkpoint's
//! weights and a cache that is written before it is read.

mod head;
mod host;
mod random;
mod shapes;
mod texts;

use backend::{Batch, Record, Sample, StepKey, Store};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use cuda::{Cuda, CudaOptions};
use head::Head;
use random::Random;
use serde_json::json;
use shapes::{shape, write};
use speculate::Sampling;
use speculate::noise::gumbel;
use speculate::sample::{History, Scratch, choose};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;
use texts::{Text, extend, median, time_kv, time_texts, token};
use weights::Checkpoint;

fn gpu_options(trials: bool) -> CudaOptions {
    CudaOptions {
        trials,
        cache: Some(std::env::temp_dir().join("paceline-cuda-tests")),
        kernels: std::env::var_os("CUDA_KERNELS").map(Into::into),
        ..CudaOptions::default()
    }
}

/// Rows of a prompt in a step, unless `--prompts` says otherwise.
const PROMPT_ROWS: usize = 2048;

/// What is left of a kernel's blocks in `benchmarks/trace.py`.
const TRACE: &str = "trace_records";

/// What is measured of a model.
#[derive(Clone)]
enum Measure {
    /// Prefill and steps; one short context and no prefill, if `quick`.
    Times { quick: bool },
    /// Steps and drafts by context with each of these formats of the KV cache.
    Kv(Vec<KvPlan>),
    /// A prompt, read in steps of so many rows.
    Prompts(Vec<usize>),
    /// Steps of so many texts, with so many rows of each.
    Texts(Vec<(usize, usize)>),
    /// A step of so many rows that is only shown to a profiler.
    Ops(usize),
    /// Recorded steps of so many rows, traced by their kernels.
    Trace(usize),
    /// Loading.
    Load,
}

/// Loads a model of the shape from its file, three times.
fn load(options: &CudaOptions, folder: &Path, name: &str, format: &'static quant::Format) {
    let folder = folder.join(format!("{name}-{}", format.name));
    write(&folder, &shape(name), format);
    for time in 1..=3 {
        let b = Cuda::new(options.clone()).unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let start = Instant::now();
        let target = models::load_target(&b, &checkpoint).unwrap();
        b.finish().unwrap();
        let (s, gb) = (
            start.elapsed().as_secs_f64(),
            checkpoint.bytes() as f64 / 1e9,
        );
        drop(target);
        println!(
            "{}",
            json!({"model": name, "format": format.name, "what": "load", "time": time, "s": s, "gb": gb, "gb_per_s": gb / s})
        );
    }
}

fn run(
    options: &CudaOptions,
    folder: &Path,
    name: &str,
    format: &'static quant::Format,
    ceiling: f64,
    measure: &Measure,
) {
    if let Measure::Load = measure {
        return load(options, folder, name, format);
    }
    let shape = shape(name);
    let folder = folder.join(name);
    write(&folder, &shape, &quant::BF16);
    let b = Random {
        inner: Cuda::new(options.clone()).unwrap(),
        format,
        experts: shape.experts,
        table: shape.table,
        bytes: Mutex::default(),
    };
    let checkpoint = Checkpoint::open(&folder).unwrap();
    let start = Instant::now();
    let target = models::load_target(&b, &checkpoint).unwrap();
    b.finish().unwrap();
    let load = start.elapsed().as_secs_f64();
    for tried in b.inner.tried_products() {
        println!(
            "{}",
            json!({"what": "trial", "weights": tried.weights, "tuning": tried.tuning, "speedup": tried.speedup,
                "gb_per_s": tried.bytes_per_second / 1e9, "took_ms": tried.took_ms})
        );
    }
    let (mut dense, experts) = *b.bytes.lock().unwrap();
    if name.starts_with("qwen") {
        // The input embeddings are looked up only.
        let h = target.hidden_size();
        dense -= b.inner.random_matrix(1 << 14, h, format).bytes * target.vocab_size() / (1 << 14);
    }
    let is_for_kv = matches!(measure, Measure::Kv(_));
    let assistant = shapes::assistant(name).filter(|_| is_for_kv);
    let beside = assistant.map(|shape| {
        let folder = folder.join("assistant");
        write(&folder, &shape, &quant::BF16);
        Checkpoint::open(&folder).unwrap()
    });
    let head = Head::load(&b, &checkpoint, beside.as_ref(), &*target);
    if let Measure::Kv(plans) = &measure {
        let of = json!({"model": name, "format": format.name});
        return time_kv(&b, &*target, head.as_ref(), plans, &of);
    }
    let prompts = match measure {
        Measure::Prompts(rows) => rows.clone(),
        Measure::Times { quick: false } => vec![PROMPT_ROWS],
        _ => Vec::new(),
    };
    let size = MemorySize {
        sequences: 1,
        context: 33_000,
        step_rows: match measure {
            Measure::Ops(rows) => PROMPT_ROWS.max(*rows),
            _ => prompts.iter().copied().max().unwrap_or(PROMPT_ROWS),
        },
        kv_format: backend::KvFormat::both(&quant::kv::BF16).into(),
        running_pages: None,
        kept: KeptSize::default(),
    };
    if let Measure::Texts(steps) = measure {
        let size = MemorySize {
            sequences: steps.iter().map(|step| step.0).max().unwrap_or(1),
            context: 2048,
            ..size
        };
        let mut memory = Memory::new(&b, target.plan(), size);
        for &(n, rows) in steps {
            let mut texts: Vec<_> = (0..n).map(|_| memory.open().unwrap()).collect();
            for text in &mut texts {
                extend(&mut memory, text, 1024);
            }
            let key = StepKey::fresh();
            let (seconds, _) = time_texts(&b, &*target, (&mut memory, &mut texts), rows, key);
            println!(
                "{}",
                json!({"model": name, "format": format.name, "what": "step", "context": 1024, "texts": n, "rows": n * rows, "ms": seconds * 1e3})
            );
            texts.into_iter().for_each(|text| memory.close(text));
        }
        return;
    }
    let mut memory = Memory::new(&b, target.plan(), size);
    let mut batch = Batch::default();
    let key = StepKey::fresh();
    let plan_of_head = head.as_ref().and_then(Head::plan);
    let mut head_memory = plan_of_head.map(|plan| Memory::new(&b, plan, size));
    b.finish().unwrap();
    // The rows of 8192 tokens, then as many more as the context needs, unread.
    let mut sequence = memory.open().unwrap();
    let prefill = |memory: &mut Memory, sequence: &mut cache::Sequence, rows: usize| {
        let mut batch = Batch::default();
        for first in (0..8192).step_by(rows) {
            batch.clear();
            let tokens: Vec<u32> = (first..first + rows).map(token).collect();
            memory
                .push(&mut batch, sequence, &tokens, tokens.len())
                .unwrap();
            // As in a round, nobody reads other hidden rows than the last.
            let kept = (rows > backend::MAX_RECORDED_ROWS).then(|| vec![rows - 1]);
            let mut taps = models::Taps::new(&[]).with_outputs(kept);
            drop(target.forward_tapped(&b, &batch, memory, &mut taps));
            b.finish().unwrap();
            let len = sequence.len();
            memory.truncate(sequence, len);
        }
    };
    if let Measure::Ops(rows) = *measure {
        extend(&mut memory, &mut sequence, 1024);
        let tokens: Vec<u32> = (0..rows).map(token).collect();
        // More rows than a verification has are a prompt's.
        let certain = if rows > 16 { rows } else { 0 };
        memory
            .push(&mut batch, &mut sequence, &tokens, certain)
            .unwrap();
        let step = |memory: &mut Memory| {
            let hidden = target.forward(&b, &batch, memory);
            if certain == 0 {
                b.argmax(&target.logits(&b, &hidden));
            }
        };
        // Compiles everything first.
        step(&mut memory);
        b.inner.profiled(|| step(&mut memory));
        return b.finish().unwrap();
    }
    if let Measure::Trace(rows) = *measure {
        extend(&mut memory, &mut sequence, 1024);
        for turn in 0..24 {
            let tokens: Vec<u32> = (0..rows).map(|i| token(turn * 8 + i)).collect();
            batch.clear();
            memory.push(&mut batch, &mut sequence, &tokens, 0).unwrap();
            let (target, memory, batch) = (&*target, &mut memory, &batch);
            let made = b.step(key, batch, &[], &mut |_| {
                let hidden = target.forward(&b, batch, memory);
                let logits = target.logits(&b, &hidden);
                vec![hidden, logits]
            });
            b.argmax(&made[1]);
            b.finish().unwrap();
            memory.truncate(&mut sequence, 1024);
        }
        let path = folder.with_file_name(format!("{name}-{}.trace", format.name));
        let mut file = std::fs::File::create(path).unwrap();
        for (kernel, bytes) in b.inner.kernel_globals(TRACE) {
            writeln!(file, "{}\t{kernel}", bytes.len()).unwrap();
            file.write_all(&bytes).unwrap();
        }
        return;
    }
    let quick = matches!(measure, Measure::Times { quick: true });
    // A first turn compiles.
    for (turn, &rows) in prompts.iter().flat_map(|rows| [(0, rows), (1, rows)]) {
        memory.close(sequence);
        sequence = memory.open().unwrap();
        let start = Instant::now();
        prefill(&mut memory, &mut sequence, rows);
        let seconds = start.elapsed().as_secs_f64();
        if turn == 1 {
            println!(
                "{}",
                json!({"model": name, "format": format.name, "what": "prefill", "rows": 8192, "step_rows": rows, "seconds": seconds, "tokens_per_s": 8192.0 / seconds, "tflops": 2.0 * shape.active * 8192.0 / seconds / 1e12, "load_s": load})
            );
        }
    }
    if let Measure::Prompts(_) = measure {
        return;
    }
    let contexts = [1024usize, 8192, 32_000];
    for &context in &contexts[..if quick { 1 } else { 3 }] {
        memory.close(sequence);
        sequence = memory.open().unwrap();
        extend(&mut memory, &mut sequence, context);
        let mut first = 0.0;
        for m in [1usize, 2, 3, 4, 8] {
            let mut text = Text {
                memory: &mut memory,
                sequence: &mut sequence,
                key,
            };
            let (whole, host) = text.time_step(&b, &*target, m);
            if m == 1 {
                first = whole;
            }
            // Rows choose at random: how many experts any of them does.
            let n = shape.n_experts.max(1) as f64;
            let touched = n * (1.0 - (1.0 - shape.top_k as f64 / n).powi(m as i32));
            let bytes = dense as f64 + experts as f64 * touched / n;
            println!(
                "{}",
                json!({"model": name, "format": format.name, "what": "step", "context": context, "rows": m, "ms": whole * 1e3, "host_us": host * 1e6, "against_one": whole / first, "gb": bytes / 1e9, "of_ceiling": bytes / whole / ceiling})
            );
        }
    }
    memory.close(sequence);
    if let (Some(head), Some(memory)) = (&head, &mut head_memory) {
        let mut sequence = memory.open().unwrap();
        while sequence.len() < 1024 {
            batch.clear();
            let tokens: Vec<u32> = (0..1024).map(token).collect();
            memory
                .push(&mut batch, &mut sequence, &tokens, tokens.len())
                .unwrap();
            let len = sequence.len();
            memory.truncate(&mut sequence, len);
        }
        let key = StepKey::fresh();
        let mut all = Vec::new();
        let hidden = b.upload(1, target.hidden_size(), &vec![0.5; target.hidden_size()]);
        for turn in 0..24 {
            let start = Instant::now();
            batch.clear();
            memory
                .push(&mut batch, &mut sequence, &[token(turn)], 0)
                .unwrap();
            let (target, memory, batch) = (&*target, &mut *memory, &batch);
            let made = b.step(key, batch, &[&hidden], &mut |x| {
                let (z, _) = head.guess(&b, target, x[0], batch, memory);
                vec![head.logits(&b, target, &z)]
            });
            b.argmax(&made[0]);
            b.finish().unwrap();
            if turn > 3 {
                all.push(start.elapsed().as_secs_f64());
            }
            memory.truncate(&mut sequence, 1024);
        }
        println!(
            "{}",
            json!({"model": name, "format": format.name, "what": "draft", "context": 1024, "ms": median(all) * 1e3})
        );
        let top_p = Sampling {
            temperature: 1.0,
            top_p: 0.9,
            ..Sampling::default()
        };
        for (what, sampling) in [("greedy", Sampling::default()), ("top-p 0.9", top_p)] {
            for tokens in [1, 4] {
                let mut text = Text {
                    memory,
                    sequence: &mut sequence,
                    key: key.part(what),
                };
                let seconds = text.time_draft(&b, &*target, head, &hidden, &sampling, tokens);
                println!(
                    "{}",
                    json!({"model": name, "format": format.name, "what": format!("draft of {tokens}, {what}"), "context": 1024, "ms": seconds * 1e3})
                );
            }
        }
    }
}

/// What it takes to choose tokens of logits that lie on the device, there and on the host.
fn choices(b: &Cuda) {
    const VOCAB: usize = 262_144;
    let some = Sampling {
        temperature: 1.0,
        ..Sampling::default()
    };
    let samplings = [
        ("greedy", Sampling::default()),
        ("all", some.clone()),
        (
            "top-p 0.9",
            Sampling {
                top_p: 0.9,
                ..some.clone()
            },
        ),
        (
            "top-k 40, top-p 0.95",
            Sampling {
                top_k: 40,
                top_p: 0.95,
                ..some
            },
        ),
    ];
    let mut scratch = Scratch::default();
    for rows in [1, 8] {
        let logit = |i| 2.0 * gumbel(1, 0, i as u32);
        let logits: Vec<f32> = (0..rows * VOCAB).map(logit).collect();
        let x = b.upload(rows, VOCAB, &logits);
        for (what, sampling) in &samplings {
            let choice = |row| sampling.on_device(row as u64).expect("no logit is edited");
            let choices: Vec<_> = (0..rows).map(choice).collect();
            let history = History::new(sampling, &[]);
            let (mut device, mut host) = (Vec::new(), Vec::new());
            for _ in 0..12 {
                let start = Instant::now();
                let there = b.choose_tokens(&x, None, &choices);
                device.push(start.elapsed().as_secs_f64());
                let start = Instant::now();
                let scores = b.download(&x);
                let rows = scores.chunks_exact(VOCAB).enumerate();
                let here: Vec<u32> = rows
                    .map(|(row, l)| choose(sampling, &history, row as u64, l, &mut scratch))
                    .collect();
                host.push(start.elapsed().as_secs_f64());
                assert_eq!(there, Some(here), "{what}");
            }
            let (device, host) = (median(device), median(host));
            println!(
                "{}",
                json!({"what": "choose", "sampling": what, "rows": rows, "ms": device * 1e3, "host_ms": host * 1e3})
            );
        }
    }
    b.finish().unwrap();
}

/// Plans of the KV cache, as `--kv` lists them.
fn kv_plans(list: Option<String>) -> Vec<KvPlan> {
    let list = list.expect("plans of the KV cache after --kv");
    let plan = |text| KvPlan::parse(text, '+').expect("a plan of the KV cache");
    list.split(',').map(plan).collect()
}

/// The steps of a list such as `8x4,8x5`: how many texts, and how many rows of each.
fn text_steps(list: Option<String>) -> Vec<(usize, usize)> {
    let list = list.expect("steps such as 8x4 after --texts");
    let step = |text: &str| {
        let (texts, rows) = text.split_once('x')?;
        Some((texts.parse().ok()?, rows.parse().ok()?))
    };
    let steps = list.split(',').map(|text| step(text).expect("TEXTSxROWS"));
    steps.collect()
}

fn main() {
    let mut args = std::env::args().skip(1).peekable();
    if args.next_if(|a| a == "--cpu").is_some() {
        return host::run(args);
    }
    let folder = PathBuf::from(args.next().expect("a folder for files with holes"));
    let formats = args.next_if(|a| a == "--formats").map(|_| args.next());
    let formats = formats.map_or("affine4-g64,bf16".to_owned(), |f| {
        f.expect("names of formats after --formats")
    });
    let trials = args.next_if(|a| a == "--trials").is_some();
    let quick = args.next_if(|a| a == "--quick").is_some();
    let is_load = args.next_if(|a| a == "--load").is_some();
    let mut rows_after = |name: &str| {
        args.next_if(|a| a == name).map(|_| {
            let rows = args.next().and_then(|rows| rows.parse().ok());
            rows.unwrap_or_else(|| panic!("a number of rows after {name}"))
        })
    };
    let mut measure = match (rows_after("--ops"), rows_after("--trace")) {
        (Some(rows), _) => Measure::Ops(rows),
        (None, Some(rows)) => Measure::Trace(rows),
        (None, None) if is_load => Measure::Load,
        (None, None) => Measure::Times { quick },
    };
    if args.next_if(|a| a == "--kv").is_some() {
        measure = Measure::Kv(kv_plans(args.next()));
    }
    if args.next_if(|a| a == "--prompts").is_some() {
        let rows = args.next().expect("rows of a step after --prompts");
        let rows = rows.split(',').map(|rows| rows.parse().expect("a number"));
        let rows: Vec<usize> = rows.collect();
        let whole = rows.iter().all(|rows| 8192 % rows == 0);
        assert!(whole, "rows of which 8192 are a multiple");
        measure = Measure::Prompts(rows);
    }
    if args.next_if(|a| a == "--texts").is_some() {
        measure = Measure::Texts(text_steps(args.next()));
    }
    let mut wanted: Vec<String> = args.collect();
    if wanted.is_empty() {
        wanted = [
            "gemma4-31b",
            "gemma4-26b-a4b",
            "gemma4-e4b",
            "qwen3.5-27b",
            "qwen3.5-35b-a3b",
        ]
        .map(str::to_owned)
        .to_vec();
    }
    let options = gpu_options(trials);
    let b = Cuda::new(options.clone()).unwrap();
    let ceiling = b.read_ceiling();
    println!("{}", json!({"what": "ceiling", "gb_per_s": ceiling / 1e9}));
    if let Measure::Times { .. } = measure {
        choices(&b);
    }
    drop(b);
    for name in &wanted {
        for format in formats.split(',') {
            let format = quant::format(format).expect("a format");
            run(&options, &folder, name, format, ceiling, &measure);
        }
    }
}
