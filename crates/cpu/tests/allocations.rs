//! A step allocates nothing once its sizes have been seen, on any worker.
//!
//! The ops of dense layers and of mixtures of experts, full attention over plain and
//! compressed keys and values, and gated delta; a choice of tokens is returned to the
//! caller, so `argmax` is not among them.

use backend::{
    Activation, Attention, Backend, Batch, BatchSeq, Delta, DeltaSpec, DeltaWeights, Expert,
    Experts, Kv, KvFormat, KvSpec, Matrix, Rope, Row, Tensor,
};
use cpu::{Cpu, CpuOptions};
use quant::{Mapping, Scalar, Stored};
use std::alloc::{GlobalAlloc, Layout, System};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does it; what else there is calls these two.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const HIDDEN: usize = 256;
const INNER: usize = 512;
const HEADS: usize = 4;
const EXPERTS: usize = 8;
const DELTA: DeltaSpec = DeltaSpec {
    slots: 1,
    key_heads: 2,
    value_heads: 4,
    key_dim: 64,
    value_dim: 64,
    conv_taps: 4,
};

struct Model {
    embed: Matrix,
    square: Matrix,
    channels: Matrix,
    gates: Matrix,
    up: Matrix,
    down: Matrix,
    router: Matrix,
    experts: Experts,
    norm: Tensor,
    head_norm: Tensor,
    rope: Rope,
    attention: Attention,
    delta: DeltaWeights,
}

fn noise(n: usize) -> Vec<f32> {
    (0..n)
        .map(|i| ((i * 7919 % 2003) as f32 - 1001.0) / 900.0)
        .collect()
}

/// Codes in memory, in which matrices stay or not.
#[derive(Debug)]
struct File(Vec<u8>, bool);

impl Mapping for File {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
    fn release(&self, _: Range<usize>) {}
    fn stays(&self) -> bool {
        self.1
    }
    fn stay(&self, _: bool) {}
}

fn matrix(b: &dyn Backend, rows: usize, cols: usize) -> Matrix {
    stored(b, "q4_0", rows, cols)
}

/// Matrices with more rows than columns stay in their file.
fn stored(b: &dyn Backend, format: &str, rows: usize, cols: usize) -> Matrix {
    let format = quant::format(format).expect("a format");
    let owned = quant::encode(format, &noise(rows * cols), cols, Scalar::F16);
    let file: Arc<dyn Mapping> = Arc::new(File(owned.codes.clone(), rows > cols));
    let stored = Stored {
        codes: file.bytes(),
        mapping: Some(&file),
        ..owned.view()
    };
    let matrix = b.matrix(&[stored]);
    assert_eq!(matrix.bytes == 0, rows > cols);
    matrix
}

impl Model {
    fn new(b: &dyn Backend) -> Self {
        let head_dim = HIDDEN / HEADS;
        let (nv, channels) = (DELTA.value_heads, DELTA.channels());
        Model {
            embed: matrix(b, 1024, HIDDEN),
            square: matrix(b, HIDDEN, HIDDEN),
            channels: matrix(b, channels, HIDDEN),
            gates: matrix(b, nv, HIDDEN),
            up: matrix(b, INNER, HIDDEN),
            down: matrix(b, HIDDEN, INNER),
            router: matrix(b, EXPERTS, HIDDEN),
            experts: Experts {
                // Formats whose panels differ in size.
                experts: (0..EXPERTS)
                    .map(|e| {
                        let format = ["q4_0", "q8_0"][e % 2];
                        Expert {
                            gate_up: stored(b, format, 2 * INNER, HIDDEN),
                            down: stored(b, format, HIDDEN, INNER),
                        }
                    })
                    .collect(),
                top_k: 2,
                scale: None,
                activation: Activation::Silu,
            },
            norm: b.upload(1, HIDDEN, &noise(HIDDEN)),
            head_norm: b.upload(1, head_dim, &noise(head_dim)),
            rope: Rope {
                head_dim,
                pair_offset: head_dim / 2,
                frequencies: noise(head_dim / 2),
                axes: Vec::new(),
            },
            attention: Attention {
                group: 0,
                heads: HEADS,
                scale: 0.125,
                window: None,
            },
            delta: DeltaWeights {
                conv: b.upload(
                    channels,
                    DELTA.conv_taps,
                    &noise(channels * DELTA.conv_taps),
                ),
                decay: b.upload(1, nv, &vec![-0.5; nv]),
                dt_bias: b.upload(1, nv, &vec![0.1; nv]),
            },
        }
    }

    fn step(&self, b: &dyn Backend, batch: &Batch, kv: &mut Kv, state: &mut Delta) -> Tensor {
        let x = b.embed(&self.embed, &batch.tokens, 1.0);
        let h = b.rms_norm(&x, Some(&self.norm), HIDDEN, 1e-6);
        let [q, k, v] = b.matmul_many(&h, [&self.square, &self.square, &self.square]);
        let norm = |x: &Tensor| b.rms_norm(x, Some(&self.norm), HIDDEN, 1e-6);
        let head = |x: &Tensor| {
            let x = b.rms_norm(x, Some(&self.head_norm), self.rope.head_dim, 1e-6);
            b.rope(x, &self.rope, batch)
        };
        let (q, k) = (head(&q), head(&k));
        b.kv_append(kv, &k, &v, 0, batch);
        let mixed = b.attend(&q, kv, &self.attention, batch);
        let x = b.scale(b.add(norm(&mixed), &x), 0.5);
        let h = norm(&x);
        let [qkv, beta, a] = b.matmul_many(&h, [&self.channels, &self.gates, &self.gates]);
        let mixed = b.gated_delta(state, &self.delta, &qkv, &beta, &a, batch);
        let x = b.add(x, &mixed);
        let h = norm(&x);
        let [gate, up] = b.matmul_many(&h, [&self.up, &self.up]);
        let inner = b.glu(gate, &up, Activation::Silu);
        let x = b.add(x, &b.matmul(&inner, &self.down));
        let mixed = b.moe(&x, &b.matmul(&x, &self.router), &self.experts);
        let x = b.add(x, &mixed);
        let last = b.gather(&x, &[x.rows() - 1]);
        let both = b.concat(&last, &last);
        b.softcap(b.matmul(&b.columns(&both, 0, HIDDEN), &self.embed), 30.0)
    }
}

/// `n` rows of one sequence, all but the first tentative, after `first` others.
fn batch(first: usize, n: usize) -> Batch {
    let row = |i: usize| Row::text(i as u32);
    Batch {
        tokens: (0..n as u32).collect(),
        media: Vec::new(),
        rows: (first..first + n).map(row).collect(),
        seqs: vec![BatchSeq {
            rows: 0..n,
            slot: 0,
            is_new: first == 0,
            kept: 0,
            certain: 1,
            tables: std::iter::once(0..1).collect(),
        }],
        tables: vec![0],
    }
}

#[test]
fn a_step_allocates_nothing_once_its_sizes_have_been_seen() {
    for (threads, kv) in [
        (1, "bf16"),
        (2, "bf16"),
        (1, "q8_0"),
        (2, "q4_0"),
        (1, "rot-q5_0"),
        (2, "turbo3"),
    ] {
        let cpu = Cpu::new(CpuOptions {
            threads,
            ..CpuOptions::default()
        })
        .expect("the best instruction set is there");
        let b: &dyn Backend = &cpu;
        let model = Model::new(b);
        let format = quant::kv_format(kv).expect("a format");
        let mut kv = b.kv(KvSpec {
            pages: 1,
            rows: 64,
            heads: HEADS,
            head_dim: HIDDEN / HEADS,
            format: KvFormat::both(format),
        });
        let mut state = b.delta(DELTA);
        let batches = [batch(0, 1), batch(1, 4), batch(2, 8), batch(3, 12)];
        let mut round = || {
            for batch in &batches {
                model.step(b, batch, &mut kv, &mut state);
            }
        };
        let counted = || ALLOCATIONS.load(Relaxed);
        let before = counted();
        round();
        assert!(counted() > before, "the first steps make room");
        round();
        let before = counted();
        (0..5).for_each(|_| round());
        let n = counted() - before;
        assert_eq!(n, 0, "with {threads} threads and {}", format.name);
    }
}
