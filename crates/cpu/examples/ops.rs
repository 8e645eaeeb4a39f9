//! What the ops beside the products cost: attention by context, the gated delta
//! rule and experts by rows.
//!
//! `cargo run --release -p cpu --example ops [attention|prefill|delta|moe|small] [threads]`
//!
//! Memory rotates over more than the caches. All cases of a shape take turns, so
//! that ratios hold when the machine's memory does not: `M / 1` is what verifying
//! `M` rows costs against decoding one, `read` the time of a plain read of the
//! bytes that one row must see. With one thread the time is the processor's, so
//! that neighbors count less.

mod clock;

use backend::{
    Activation, Attention, Backend, Batch, BatchSeq, Delta, DeltaSpec, DeltaWeights, Expert,
    Experts, Kv, KvFormat, KvSpec, Matrix, PAGE_ROWS, Rope, Row, Store, Tensor,
};
use clock::now;
use cpu::{Cpu, CpuOptions};
use quant::{Owned, Scalar, Stored};
use std::hint::black_box;

/// Rounds of all cases; medians are shown.
const ROUNDS: usize = 9;

/// Bytes that memory rotates over.
const ROTATED: usize = 192 << 20;

/// Rows of a step.
const ROWS: [usize; 4] = [1, 2, 4, 8];

/// Name, query heads, key/value heads, head size.
const HEADS: [(&str, usize, usize, usize); 4] = [
    ("tiny-qwen3.5", 8, 2, 64),
    ("Qwen 3.5 2B", 8, 2, 256),
    ("Qwen 3.5 27B", 24, 4, 256),
    ("Gemma 4 E2B", 8, 1, 512),
];

const KV_FORMATS: [[&str; 2]; 8] = [
    ["bf16"; 2],
    ["q8_0"; 2],
    ["q4_0"; 2],
    ["q8_0", "turbo4"],
    ["q8_0", "turbo3"],
    ["turbo4"; 2],
    ["turbo4", "turbo3"],
    ["rot-q4_0"; 2],
];

const CONTEXTS: [usize; 4] = [1 << 10, 4 << 10, 16 << 10, 32 << 10];

fn noise(n: usize, seed: u64, scale: f32) -> Vec<f32> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as i32 as f32 / 2f32.powi(31) * scale
    };
    (0..n).map(|_| next()).collect()
}

/// Microseconds of each case, medians of rounds in which all take turns.
fn turns(cpu: &Cpu, cases: &mut [Box<dyn FnMut() + '_>]) -> Vec<f64> {
    let mut times = vec![Vec::new(); cases.len()];
    for round in 0..=ROUNDS {
        for (case, times) in cases.iter_mut().zip(&mut times) {
            let start = now(cpu);
            case();
            if round > 0 {
                times.push(now(cpu) - start);
            }
        }
    }
    times
        .iter_mut()
        .map(|times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect()
}

/// A matrix of as many bytes, to read.
fn block(b: &dyn Backend, bytes: usize) -> Matrix {
    let (rows, cols) = (bytes.div_ceil(4096).max(16), 1024);
    let values = vec![1.0; rows * cols];
    b.matrix(&[quant::encode(&quant::F32, &values, cols, Scalar::F32).view()])
}

/// Rows `first .. first + n` of one sequence.
fn step(first: usize, n: usize, certain: usize, kept: usize) -> Batch {
    let pages = (first + n).div_ceil(PAGE_ROWS);
    let row = |i: usize| Row::text(i as u32);
    Batch {
        tokens: vec![0; n],
        media: Vec::new(),
        rows: (first..first + n).map(row).collect(),
        seqs: vec![BatchSeq {
            rows: 0..n,
            slot: 0,
            is_new: first == 0,
            kept,
            certain,
            tables: std::iter::once(0..pages).collect(),
        }],
        tables: (0..pages as u32).collect(),
    }
}

/// Memory filled with `context` rows.
fn filled(b: &dyn Backend, spec: KvSpec, context: usize) -> Kv {
    let mut kv = b.kv(spec);
    let cols = spec.heads * spec.head_dim;
    let values = b.upload(512, cols, &noise(512 * cols, 5, 1.0));
    for first in (0..context).step_by(512) {
        b.kv_append(&mut kv, &values, &values, 0, &step(first, 512, 512, 0));
    }
    kv
}

fn spec(context: usize, heads: usize, head_dim: usize, format: KvFormat) -> KvSpec {
    KvSpec {
        pages: context.div_ceil(PAGE_ROWS) + 8,
        rows: context + 8 * PAGE_ROWS,
        heads,
        head_dim,
        format,
    }
}

fn kv_format(names: [&str; 2]) -> KvFormat {
    let [k, v] = names.map(|name| quant::kv_format(name).expect("a format"));
    KvFormat { k, v }
}

fn attending(heads: usize, head_dim: usize) -> Attention {
    Attention {
        group: 0,
        heads,
        scale: (head_dim as f32).sqrt().recip(),
        window: None,
    }
}

fn attention(cpu: &Cpu) {
    let b: &dyn Backend = cpu;
    println!("| heads | kv | context | read µs | 1 row µs | read / 1 | 2 / 1 | 4 / 1 | 8 / 1 |");
    println!("|---|---|---|---|---|---|---|---|---|");
    for (name, heads, kv_heads, head_dim) in HEADS {
        for (context, format) in CONTEXTS
            .into_iter()
            .flat_map(|c| KV_FORMATS.map(|names| (c, kv_format(names))))
        {
            let bytes = context * kv_heads * format.row_bytes(head_dim);
            let count = (ROTATED / bytes).clamp(1, 64);
            let spec = spec(context, kv_heads, head_dim, format);
            let layers: Vec<Kv> = (0..count).map(|_| filled(b, spec, context)).collect();
            let plain: Vec<Matrix> = (0..count).map(|_| block(b, bytes)).collect();
            let attending = attending(heads, head_dim);
            let cols = heads * head_dim;
            let mut cases: Vec<Box<dyn FnMut()>> = vec![Box::new(|| {
                for w in &plain {
                    black_box(cpu.read(w));
                }
            })];
            for n in ROWS {
                let q = b.upload(n, cols, &noise(n * cols, 3, 4.0));
                let batch = step(context - n, n, n, 0);
                let (layers, attending) = (&layers, &attending);
                cases.push(Box::new(move || {
                    for kv in layers {
                        black_box(b.attend(&q, kv, attending, &batch));
                    }
                }));
            }
            let t = turns(cpu, &mut cases);
            println!(
                "| {name}, {heads} on {kv_heads} of {head_dim} | {format} | {context} | {:.1} | {:.1} | {:.2} | {:.2} | {:.2} | {:.2} |",
                t[0] / count as f64,
                t[1] / count as f64,
                t[0] / t[1],
                t[2] / t[1],
                t[3] / t[1],
                t[4] / t[1],
            );
        }
    }
}

fn prefill(cpu: &Cpu) {
    const CHUNK: usize = 512;
    let b: &dyn Backend = cpu;
    println!("| heads, bf16 | rows | after | µs a row | Gflop/s |");
    println!("|---|---|---|---|---|");
    for (name, heads, kv_heads, head_dim) in HEADS {
        for before in [0, 1 << 10, 4 << 10] {
            let spec = spec(before + CHUNK, kv_heads, head_dim, kv_format(["bf16"; 2]));
            let kv = filled(b, spec, before + CHUNK);
            let cols = heads * head_dim;
            let q = b.upload(CHUNK, cols, &noise(CHUNK * cols, 3, 4.0));
            let batch = step(before, CHUNK, CHUNK, 0);
            let attending = attending(heads, head_dim);
            let t = turns(
                cpu,
                &mut [Box::new(|| {
                    black_box(b.attend(&q, &kv, &attending, &batch));
                })],
            )[0];
            let keys = (CHUNK * before + CHUNK * (CHUNK + 1) / 2) as f64;
            println!(
                "| {name}, {heads} on {kv_heads} of {head_dim} | {CHUNK} | {before} | {:.1} | {:.0} |",
                t / CHUNK as f64,
                4.0 * keys * cols as f64 / t / 1e3,
            );
        }
    }
}

fn delta(cpu: &Cpu) {
    const CASES: [(usize, usize); 8] = [
        (1, 0),
        (1, 1),
        (1, 3),
        (1, 7),
        (1, 15),
        (4, 0),
        (64, 0),
        (512, 0),
    ];
    let b: &dyn Backend = cpu;
    println!(
        "| state | read µs | 1 row µs | read / 1 | 1 + 1 | 1 + 3 | 1 + 7 | 1 + 15 | 4 | 64, µs a row | 512, µs a row |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|");
    for (name, key_heads, value_heads, dim) in [
        ("tiny-qwen3.5", 4, 8, 64),
        ("Qwen 3.5 2B", 16, 16, 128),
        ("Qwen 3.5 27B", 16, 48, 128),
    ] {
        let spec = DeltaSpec {
            slots: 1,
            key_heads,
            value_heads,
            key_dim: dim,
            value_dim: dim,
            conv_taps: 4,
        };
        let bytes = 4 * value_heads * dim * dim;
        let count = (ROTATED / bytes).clamp(1, 48);
        let channels = spec.channels();
        let weights = DeltaWeights {
            conv: b.upload(channels, 4, &noise(4 * channels, 2, 0.5)),
            decay: b.upload(1, value_heads, &vec![-0.5; value_heads]),
            dt_bias: b.upload(1, value_heads, &vec![0.0; value_heads]),
        };
        let plain: Vec<Matrix> = (0..count).map(|_| block(b, bytes)).collect();
        // Each case has its own memory, so that none warms another's.
        let layers = CASES.map(|(certain, tentative)| {
            let n = certain + tentative;
            let count = if n < 64 { count } else { 1 };
            let mut layers: Vec<Delta> = (0..count).map(|_| b.delta(spec)).collect();
            let x = b.upload(n, channels, &noise(n * channels, 4, 1.0));
            let gate = b.upload(n, value_heads, &noise(n * value_heads, 6, 1.0));
            for state in &mut layers {
                b.gated_delta(state, &weights, &x, &gate, &gate, &step(0, n, certain, 0));
            }
            (layers, x, gate, step(1, n, certain, tentative / 2))
        });
        let mut cases: Vec<Box<dyn FnMut()>> = vec![Box::new(|| {
            for w in &plain {
                black_box(cpu.read(w));
            }
        })];
        for (mut layers, x, gate, batch) in layers {
            let weights = &weights;
            cases.push(Box::new(move || {
                for state in &mut layers {
                    black_box(b.gated_delta(state, weights, &x, &gate, &gate, &batch));
                }
            }));
        }
        let t = turns(cpu, &mut cases);
        println!(
            "| {name}, {value_heads} of {dim} x {dim} | {:.1} | {:.1} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
            t[0] / count as f64,
            t[1] / count as f64,
            t[0] / t[1],
            t[2] / t[1],
            t[3] / t[1],
            t[4] / t[1],
            t[5] / t[1],
            t[6] / t[1],
            t[7] / 64.0,
            t[8] / 512.0,
        );
    }
}

/// A 4-bit matrix of noise.
fn weights(b: &dyn Backend, rows: usize, cols: usize, seed: u64) -> Matrix {
    let format = quant::format("affine4-g64").expect("a format");
    let codes: Vec<u8> = noise(rows * format.code_bytes(cols), seed, 1.0)
        .iter()
        .map(|x| x.to_bits() as u8)
        .collect();
    let filled = |value: f32| {
        let n = rows * format.scales(cols);
        let mut out = vec![0; 2 * n];
        (0..n).for_each(|i| Scalar::Bf16.put(&mut out, i, value));
        out
    };
    let stored = Owned {
        format,
        rows,
        cols,
        scale: Scalar::Bf16,
        codes,
        scales: filled(0.01),
        biases: filled(-0.07),
        width: 0,
        factors: Vec::new(),
    };
    let view: Stored<'_> = stored.view();
    b.matrix(&[view])
}

fn moe(cpu: &Cpu) {
    let b: &dyn Backend = cpu;
    println!("| experts, 4 bit | rows | touched | read µs | µs | read / µs | to one row |");
    println!("|---|---|---|---|---|---|---|");
    for (name, count, top_k, hidden, inner) in [
        ("tiny-gemma4-moe", 8, 2, 256, 128),
        ("Qwen 3.6 35B-A3B", 128, 8, 2048, 512),
        ("Gemma 4 26B-A4B", 64, 8, 2816, 704),
    ] {
        let expert = |i: usize| Expert {
            gate_up: weights(b, 2 * inner, hidden, 3 * i as u64 + 1),
            down: weights(b, hidden, inner, 3 * i as u64 + 2),
        };
        let experts = Experts {
            experts: (0..count).map(expert).collect(),
            top_k,
            scale: None,
            activation: Activation::Silu,
        };
        let mut one = 0.0;
        for n in [1, 2, 4, 8, 64, 512] {
            let x = b.upload(n, hidden, &noise(n * hidden, 7, 1.0));
            // Each round scores anew, so that one row's experts are not warm.
            let scores: Vec<Tensor> = (0..=ROUNDS as u64)
                .map(|r| b.upload(n, count, &noise(n * count, 90 + r * 7919, 3.0)))
                .collect();
            let touched: Vec<Vec<usize>> = scores
                .iter()
                .map(|s| {
                    let mut all: Vec<usize> = b
                        .download(s)
                        .chunks_exact(count)
                        .flat_map(|row| experts.choose(row))
                        .map(|(e, _)| e)
                        .collect();
                    all.sort_unstable();
                    all.dedup();
                    all
                })
                .collect();
            let (mut read, mut run) = (0..touched.len(), 0..touched.len());
            let t = turns(
                cpu,
                &mut [
                    Box::new(|| {
                        // Those of another round.
                        let i = (read.next().expect("a round") + 5) % touched.len();
                        for &e in &touched[i] {
                            let e = &experts.experts[e];
                            black_box((cpu.read(&e.gate_up), cpu.read(&e.down)));
                        }
                    }),
                    Box::new(|| {
                        let scores = &scores[run.next().expect("a round")];
                        black_box(b.moe(&x, scores, &experts));
                    }),
                ],
            );
            if n == 1 {
                one = t[1];
            }
            let mean = touched.iter().map(Vec::len).sum::<usize>() as f64 / touched.len() as f64;
            println!(
                "| {name}, {top_k} of {count}, {hidden} x {inner} | {n} | {mean:.1} | {:.1} | {:.1} | {:.2} | {:.2} |",
                t[0],
                t[1],
                t[0] / t[1],
                t[1] / one,
            );
        }
    }
}

fn small(cpu: &Cpu) {
    const TIMES: usize = 200;
    let b: &dyn Backend = cpu;
    println!("| op, µs | 1 row | 4 rows | 8 rows |");
    println!("|---|---|---|---|");
    let (cols, vocab) = (2048, 152_064);
    let weight = b.upload(1, cols, &noise(cols, 3, 1.0));
    let rope = Rope {
        head_dim: 256,
        pair_offset: 32,
        frequencies: noise(32, 9, 1.0),
        axes: Vec::new(),
    };
    type Op<'a> = (&'a str, Box<dyn Fn(&Tensor, &Tensor, &Batch) + 'a>);
    let ops: [Op<'_>; 5] = [
        (
            "rms_norm of 2048",
            Box::new(|x, _, _| {
                black_box(b.rms_norm(x, Some(&weight), cols, 1e-6));
            }),
        ),
        (
            "rope of 8 heads of 256",
            Box::new(|x, _, batch| {
                let y = b.columns(x, 0, cols);
                black_box(b.rope(y, &rope, batch));
            }),
        ),
        (
            "glu of 2048",
            Box::new(|x, _, _| {
                let y = b.columns(x, 0, cols);
                black_box(b.glu(y, x, Activation::Silu));
            }),
        ),
        (
            "softcap of 152064",
            Box::new(|_, wide, _| {
                let y = b.columns(wide, 0, vocab);
                black_box(b.softcap(y, 30.0));
            }),
        ),
        (
            "argmax of 152064",
            Box::new(|_, wide, _| {
                black_box(b.argmax(wide));
            }),
        ),
    ];
    for (name, op) in &ops {
        let mut cases: Vec<Box<dyn FnMut()>> = Vec::new();
        for n in [1, 4, 8] {
            let x = b.upload(n, cols, &noise(n * cols, 5, 1.0));
            let wide = b.upload(n, vocab, &noise(n * vocab, 5, 20.0));
            let batch = step(100, n, n, 0);
            cases.push(Box::new(move || {
                for _ in 0..TIMES {
                    op(&x, &wide, &batch);
                }
            }));
        }
        let t = turns(cpu, &mut cases);
        let per = |i: usize| t[i] / TIMES as f64;
        println!("| {name} | {:.2} | {:.2} | {:.2} |", per(0), per(1), per(2));
    }
}

fn main() {
    let mut args = std::env::args().skip(1);
    let table = args.next().unwrap_or_else(|| "all".into());
    let threads = args.next().map_or(0, |n| n.parse().expect("a number"));
    let cpu = Cpu::new(CpuOptions {
        threads,
        ..CpuOptions::default()
    })
    .expect("the best instruction set is there");
    println!("{}", (&cpu as &dyn Backend).name());
    type Table = fn(&Cpu);
    let tables: [(&str, Table); 5] = [
        ("attention", attention),
        ("prefill", prefill),
        ("delta", delta),
        ("moe", moe),
        ("small", small),
    ];
    for (name, print) in tables {
        if table == "all" || table == name {
            println!("\n## {name}\n");
            print(&cpu);
        }
    }
}
