//! What a step of a large model costs on a GPU: random weights at true shapes.
//!
//! A checkpoint of the right names and sizes is a file with holes; its weights are
//! never read, for the backend makes random ones of the wanted format on the
//! device. Norms and other parameters are ones. Keys and values are those of no
//! text, which costs the same. One line of JSON a figure, on stdout; first the memory's
//! ceiling, and what it takes to choose tokens on the device and on the host; a draft is
//! timed as a step of its own, and as chains of one and of four tokens.
//!
//! `steps FOLDER [--formats FORMAT,…] [--quick] [--ops ROWS] [--trace ROWS] [--kv PLANS] [MODEL …]`: FOLDER is
//! where the files with holes go, formats are `affine4-g64,bf16` unless named. With `--quick`, there is
//! one short context and no prefill. With `--ops`, a step of that many rows is run once, as it
//! comes and not recorded, for a profiler that shows what each kernel takes:
//! `ncu --profile-from-start off --metrics gpu__time_duration.sum steps FOLDER --ops 1 MODEL`.
//! With `--trace ROWS`, recorded steps of that many rows run with the kernels that
//! `trace.py instrument` made, and what their blocks wrote down is left in
//! `FOLDER/MODEL-FORMAT.trace` for `trace.py draw`. With `--kv PLANS`, such as `bf16,q8_0+turbo4`, steps and drafts of
//! three tokens run at contexts from 1,024 to 100,000 tokens in each of these formats of the KV cache, and nothing else.

use backend::{
    Activation, Attention, Backend, Batch, Capabilities, Chain, Chained, Delta, DeltaSpec,
    DeltaWeights, DeviceError, Experts, Kv, KvSpec, Link, Matrix, NearAttention, Ops, Record, Rope,
    Sample, StepKey, Store, Tensor, TokenChoice, TokenMask,
};
use cache::{KeptSize, KvPlan, Memory, MemorySize};
use cuda::{Cuda, CudaOptions};
use models::{ChainedHead, Qwen35Mtp};
use quant::Stored;
use serde_json::{Value, json};
use speculate::Sampling;
use speculate::noise::gumbel;
use speculate::sample::{History, Scratch, choose};
use std::borrow::Cow;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Instant;
use weights::Checkpoint;

/// A GPU whose weights are random.
struct Random {
    inner: Cuda,
    format: &'static quant::Format,
    /// Shapes of an expert's matrices.
    experts: [(usize, usize); 2],
    /// Rows of tables that are looked up, not multiplied, unless tied.
    table: Option<(usize, usize)>,
    /// Bytes that every step reads, and those of all experts.
    bytes: Mutex<(usize, usize)>,
}

macro_rules! delegate {
    ($($name:ident($($arg:ident: $type:ty),*) $(-> $out:ty)?;)*) => {
        $(fn $name(&self, $($arg: $type),*) $(-> $out)? { self.inner.$name($($arg),*) })*
    };
}

impl Backend for Random {
    delegate! {
        name() -> String;
        capabilities() -> Capabilities;
    }
}

impl Store for Random {
    fn matrix(&self, parts: &[Stored<'_>]) -> Matrix {
        let cols = parts[0].cols;
        let rows = parts.iter().map(|p| p.rows).sum();
        let fits = cols.is_multiple_of(self.format.block);
        let format = if fits { self.format } else { &quant::BF16 };
        let w = self.inner.random_matrix(rows, cols, format);
        let mut bytes = self.bytes.lock().unwrap();
        if self.experts.contains(&(rows, cols)) {
            bytes.1 += w.bytes;
        } else if self.table != Some((rows, cols)) {
            bytes.0 += w.bytes;
        }
        w
    }
    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Tensor {
        if values.iter().all(|v| *v == 0.0) {
            return self.inner.upload(rows, cols, &vec![1.0; values.len()]);
        }
        self.inner.upload(rows, cols, values)
    }
    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
        self.inner.download(x)
    }
    delegate! {
        kv(spec: KvSpec) -> Kv;
        delta(spec: DeltaSpec) -> Delta;
        delta_copy(delta: &mut Delta, from: usize, to: usize);
        kv_copy(kv: &mut Kv, from: usize, to: usize);
        kv_save(kv: &Kv, page: usize) -> Vec<u8>;
        kv_load(kv: &mut Kv, page: usize, bytes: &[u8]) -> bool;
        delta_save(delta: &Delta, slot: usize) -> Vec<u8>;
        delta_load(delta: &mut Delta, slot: usize, bytes: &[u8]) -> bool;
        scratch(rows: usize, cols: usize) -> Tensor;
    }
}

impl Ops for Random {
    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        self.inner
            .scale(x, if factor == 0.0 { 1.0 } else { factor })
    }
    delegate! {
        embed(table: &Matrix, tokens: &[u32], scale: f32) -> Tensor;
        replace_rows(x: Tensor, embeddings: &Tensor, source: u32, batch: &Batch) -> Tensor;
        matmul_into(x: &Tensor, w: &[&Matrix], y: &mut [Tensor]);
        matmul_rows(x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor;
        rms_norm(x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor;
        layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Tensor;
        affine(x: Tensor, factor: Option<&Tensor>, shift: &Tensor) -> Tensor;
        activate(x: Tensor, activation: Activation) -> Tensor;
        clamp(x: Tensor, low: f32, high: f32) -> Tensor;
        add(x: Tensor, y: &Tensor) -> Tensor;
        glu(gate: Tensor, x: &Tensor, activation: Activation) -> Tensor;
        softcap(x: Tensor, cap: f32) -> Tensor;
        gather(x: &Tensor, rows: &[usize]) -> Tensor;
        columns(x: &Tensor, first: usize, cols: usize) -> Tensor;
        concat(a: &Tensor, b: &Tensor) -> Tensor;
        rope(x: Tensor, rope: &Rope, batch: &Batch) -> Tensor;
        kv_append(kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch);
        attend(q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor;
        attend_near(q: &Tensor, k: &Tensor, v: &Tensor, relative: &Tensor, attention: &NearAttention) -> Tensor;
        gated_delta(state: &mut Delta, weights: &DeltaWeights, qkv: &Tensor, b: &Tensor, a: &Tensor, batch: &Batch) -> Tensor;
        moe(x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor;
        gate_rows(x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor;
    }
}

impl Sample for Random {
    delegate! {
        argmax(x: &Tensor) -> Vec<u32>;
        mask_logits(x: Tensor, masks: &[Option<TokenMask>]) -> Tensor;
    }
}

impl Record for Random {
    delegate! {
        finish() -> Result<(), DeviceError>;
        step(key: StepKey, batch: &Batch, inputs: &[&Tensor], work: &mut dyn FnMut(&[&Tensor]) -> Vec<Tensor>) -> Vec<Tensor>;
        chain(chain: &Chain<'_>, x: &Tensor, work: &mut dyn FnMut(usize, &Batch, &Tensor) -> Link) -> Option<Chained>;
    }
}

/// Names and shapes of a checkpoint's tensors.
type Tensors = Vec<(String, Vec<usize>)>;

/// A model's shape: configuration and tensors.
struct Shape {
    config: Value,
    tensors: Tensors,
    experts: [(usize, usize); 2],
    n_experts: usize,
    top_k: usize,
    table: Option<(usize, usize)>,
    /// Weights that one row's products take, the head included.
    active: f64,
}

fn count(tensors: &Tensors, keep: impl Fn(&str) -> bool) -> f64 {
    let kept = tensors.iter().filter(|(name, _)| keep(name));
    kept.map(|(_, shape)| shape.iter().product::<usize>() as f64)
        .sum()
}

/// Gemma 4: hidden, layers, inner, heads, key heads of sliding and full layers,
/// window, shared layers, width of per-layer embeddings, and experts.
#[derive(Clone, Copy)]
struct Gemma {
    h: usize,
    l: usize,
    f: usize,
    heads: usize,
    kv: (usize, usize),
    window: usize,
    shared: usize,
    ple: usize,
    k_eq_v: bool,
    experts: Option<(usize, usize, usize)>,
}

fn gemma(g: Gemma) -> Shape {
    let v = 262_144;
    let mut t: Tensors = vec![
        ("model.embed_tokens.weight".into(), vec![v, g.h]),
        ("model.norm.weight".into(), vec![g.h]),
    ];
    if g.ple > 0 {
        t.push((
            "model.embed_tokens_per_layer.weight".into(),
            vec![v, g.l * g.ple],
        ));
        t.push((
            "model.per_layer_model_projection.weight".into(),
            vec![g.l * g.ple, g.h],
        ));
        t.push(("model.per_layer_projection_norm.weight".into(), vec![g.ple]));
    }
    for i in 0..g.l {
        let full = i % 6 == 5 || i + 1 == g.l;
        let (e, k) = if full { (512, g.kv.1) } else { (256, g.kv.0) };
        let mut put = |name: &str, shape: &[usize]| {
            t.push((format!("model.layers.{i}.{name}"), shape.to_vec()))
        };
        for norm in [
            "input",
            "post_attention",
            "pre_feedforward",
            "post_feedforward",
        ] {
            put(&format!("{norm}_layernorm.weight"), &[g.h]);
        }
        put("layer_scalar", &[1]);
        put("self_attn.q_proj.weight", &[g.heads * e, g.h]);
        put("self_attn.o_proj.weight", &[g.h, g.heads * e]);
        put("self_attn.q_norm.weight", &[e]);
        if i < g.l - g.shared {
            put("self_attn.k_proj.weight", &[k * e, g.h]);
            put("self_attn.k_norm.weight", &[e]);
            if !(full && g.k_eq_v) {
                put("self_attn.v_proj.weight", &[k * e, g.h]);
            }
        }
        put("mlp.gate_proj.weight", &[g.f, g.h]);
        put("mlp.up_proj.weight", &[g.f, g.h]);
        put("mlp.down_proj.weight", &[g.h, g.f]);
        if g.ple > 0 {
            put("per_layer_input_gate.weight", &[g.ple, g.h]);
            put("per_layer_projection.weight", &[g.h, g.ple]);
            put("post_per_layer_input_norm.weight", &[g.h]);
        }
        if let Some((n, _, inner)) = g.experts {
            put("router.proj.weight", &[n, g.h]);
            put("router.scale", &[g.h]);
            put("router.per_expert_scale", &[n]);
            put("experts.gate_up_proj", &[n, 2 * inner, g.h]);
            put("experts.down_proj", &[n, g.h, inner]);
            for norm in [
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
            ] {
                put(&format!("{norm}.weight"), &[g.h]);
            }
        }
    }
    let (n, k, inner) = g.experts.unwrap_or((0, 0, 0));
    let types: Vec<&str> = (0..g.l)
        .map(|i| {
            if i % 6 == 5 || i + 1 == g.l {
                "full_attention"
            } else {
                "sliding_attention"
            }
        })
        .collect();
    let config = json!({
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16",
        "vocab_size": v, "hidden_size": g.h, "intermediate_size": g.f, "num_hidden_layers": g.l,
        "num_attention_heads": g.heads, "num_key_value_heads": g.kv.0, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": g.kv.1, "layer_types": types, "sliding_window": g.window,
        "attention_k_eq_v": g.k_eq_v, "num_kv_shared_layers": g.shared,
        "hidden_size_per_layer_input": g.ple, "vocab_size_per_layer_input": v,
        "enable_moe_block": n > 0, "num_experts": n, "top_k_experts": k, "moe_intermediate_size": inner,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
        "final_logit_softcapping": 30.0, "max_position_embeddings": 131_072,
    });
    let dense = count(&t, |n| {
        !n.contains("experts.") && !n.contains("per_layer.weight")
    });
    let routed = count(&t, |n| {
        n.contains("experts.gate_up") || n.contains("experts.down")
    });
    Shape {
        config,
        experts: [(2 * inner, g.h), (g.h, inner)],
        n_experts: n,
        top_k: k,
        table: (g.ple > 0).then_some((v, g.l * g.ple)),
        active: dense + routed * k as f64 / n.max(1) as f64,
        tensors: t,
    }
}

/// Qwen 3.5: hidden, layers, inner, heads, key heads, value heads of the delta
/// rule, and experts.
#[derive(Clone, Copy)]
struct Qwen {
    h: usize,
    l: usize,
    f: usize,
    heads: usize,
    kv: usize,
    nv: usize,
    experts: Option<(usize, usize, usize)>,
}

fn qwen(q: Qwen) -> Shape {
    let (v, e, nk, d) = (248_320, 256, 16, 128);
    let mut t: Tensors = vec![
        ("model.embed_tokens.weight".into(), vec![v, q.h]),
        ("lm_head.weight".into(), vec![v, q.h]),
        ("model.norm.weight".into(), vec![q.h]),
        ("mtp.fc.weight".into(), vec![q.h, 2 * q.h]),
        ("mtp.pre_fc_norm_embedding.weight".into(), vec![q.h]),
        ("mtp.pre_fc_norm_hidden.weight".into(), vec![q.h]),
        ("mtp.norm.weight".into(), vec![q.h]),
    ];
    for i in 0..=q.l {
        let at = if i == q.l {
            "mtp.layers.0".to_owned()
        } else {
            format!("model.layers.{i}")
        };
        let mut put =
            |name: &str, shape: &[usize]| t.push((format!("{at}.{name}"), shape.to_vec()));
        put("input_layernorm.weight", &[q.h]);
        put("post_attention_layernorm.weight", &[q.h]);
        if i % 4 == 3 || i == q.l {
            put("self_attn.q_proj.weight", &[2 * q.heads * e, q.h]);
            put("self_attn.k_proj.weight", &[q.kv * e, q.h]);
            put("self_attn.v_proj.weight", &[q.kv * e, q.h]);
            put("self_attn.o_proj.weight", &[q.h, q.heads * e]);
            put("self_attn.q_norm.weight", &[e]);
            put("self_attn.k_norm.weight", &[e]);
        } else {
            let c = 2 * nk * d + q.nv * d;
            put("linear_attn.in_proj_qkv.weight", &[c, q.h]);
            put("linear_attn.in_proj_z.weight", &[q.nv * d, q.h]);
            put("linear_attn.in_proj_b.weight", &[q.nv, q.h]);
            put("linear_attn.in_proj_a.weight", &[q.nv, q.h]);
            put("linear_attn.conv1d.weight", &[c, 1, 4]);
            put("linear_attn.A_log", &[q.nv]);
            put("linear_attn.dt_bias", &[q.nv]);
            put("linear_attn.norm.weight", &[d]);
            put("linear_attn.out_proj.weight", &[q.h, q.nv * d]);
        }
        let dense = |put: &mut dyn FnMut(&str, &[usize]), at: &str, f: usize| {
            put(&format!("{at}gate_proj.weight"), &[f, q.h]);
            put(&format!("{at}up_proj.weight"), &[f, q.h]);
            put(&format!("{at}down_proj.weight"), &[q.h, f]);
        };
        match q.experts {
            None => dense(&mut put, "mlp.", q.f),
            Some((n, _, inner)) => {
                put("mlp.gate.weight", &[n, q.h]);
                put("mlp.shared_expert_gate.weight", &[1, q.h]);
                put("mlp.experts.gate_up_proj", &[n, 2 * inner, q.h]);
                put("mlp.experts.down_proj", &[n, q.h, inner]);
                dense(&mut put, "mlp.shared_expert.", inner);
            }
        }
    }
    let (n, k, inner) = q.experts.unwrap_or((0, 0, 0));
    let config = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16",
        "vocab_size": v, "hidden_size": q.h, "intermediate_size": q.f, "num_hidden_layers": q.l,
        "num_attention_heads": q.heads, "num_key_value_heads": q.kv, "head_dim": e,
        "linear_num_key_heads": nk, "linear_num_value_heads": q.nv,
        "linear_key_head_dim": d, "linear_value_head_dim": d, "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": false, "mtp_num_hidden_layers": 1, "max_position_embeddings": 262_144,
        "num_experts": n, "num_experts_per_tok": k, "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner,
    });
    let dense = count(&t, |n| {
        !n.contains("mlp.experts.") && !n.contains("embed_tokens") && !n.starts_with("mtp")
    });
    let routed = count(&t, |n| n.contains("mlp.experts.") && !n.starts_with("mtp"));
    Shape {
        config,
        experts: [(2 * inner, q.h), (q.h, inner)],
        n_experts: n,
        top_k: k,
        table: None,
        active: dense + routed * k as f64 / n.max(1) as f64,
        tensors: t,
    }
}

fn shape(name: &str) -> Shape {
    let base = Gemma {
        h: 5376,
        l: 60,
        f: 21504,
        heads: 32,
        kv: (16, 4),
        window: 1024,
        shared: 0,
        ple: 0,
        k_eq_v: true,
        experts: None,
    };
    match name {
        "gemma4-31b" => gemma(base),
        "gemma4-26b-a4b" => gemma(Gemma {
            h: 2816,
            l: 30,
            f: 2112,
            heads: 16,
            kv: (8, 2),
            experts: Some((128, 8, 704)),
            ..base
        }),
        "gemma4-e4b" => gemma(Gemma {
            h: 2560,
            l: 42,
            f: 10240,
            heads: 8,
            kv: (2, 2),
            window: 512,
            shared: 18,
            ple: 256,
            k_eq_v: false,
            ..base
        }),
        "qwen3.5-27b" => qwen(Qwen {
            h: 5120,
            l: 64,
            f: 17408,
            heads: 24,
            kv: 4,
            nv: 48,
            experts: None,
        }),
        "qwen3.5-35b-a3b" => qwen(Qwen {
            h: 2048,
            l: 40,
            f: 0,
            heads: 16,
            kv: 2,
            nv: 32,
            experts: Some((256, 8, 512)),
        }),
        _ => panic!("no such model: {name}"),
    }
}

/// Writes a checkpoint whose tensors are a hole.
fn write(folder: &Path, shape: &Shape) {
    std::fs::create_dir_all(folder).unwrap();
    std::fs::write(folder.join("config.json"), shape.config.to_string()).unwrap();
    let mut header = serde_json::Map::new();
    let mut at = 0usize;
    for (name, shape) in &shape.tensors {
        let end = at + 2 * shape.iter().product::<usize>();
        header.insert(
            name.clone(),
            json!({"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}),
        );
        at = end;
    }
    let mut header = serde_json::to_string(&header).unwrap();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = std::fs::File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + at) as u64).unwrap();
}

fn gpu_options() -> CudaOptions {
    CudaOptions {
        cache: Some(std::env::temp_dir().join("paceline-cuda-tests")),
        kernels: std::env::var_os("CUDA_KERNELS").map(Into::into),
        ..CudaOptions::default()
    }
}

fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all[all.len() / 2]
}

/// What is left of a kernel's blocks in `benchmarks/trace.py`.
const TRACE: &str = "trace_records";

/// What is measured of a model.
#[derive(Clone)]
enum Measure {
    /// Prefill and steps; one short context and no prefill, if `quick`.
    Times { quick: bool },
    /// Steps and drafts by context with each of these formats of the KV cache.
    Kv(Vec<KvPlan>),
    /// A step of so many rows that is only shown to a profiler.
    Ops(usize),
    /// Recorded steps of so many rows, traced by their kernels.
    Trace(usize),
}

/// A token that differs from its neighbors.
fn token(i: usize) -> u32 {
    (i.wrapping_mul(2_654_435_761) % 200_000) as u32
}

/// Lengthens `sequence` to `context` rows without computing them.
fn extend(memory: &mut Memory, sequence: &mut cache::Sequence, context: usize) {
    let mut batch = Batch::default();
    while sequence.len() < context {
        batch.clear();
        let tokens: Vec<u32> = (sequence.len()..context.min(sequence.len() + 2048))
            .map(token)
            .collect();
        memory
            .push(&mut batch, sequence, &tokens, tokens.len())
            .unwrap();
        let len = sequence.len();
        memory.truncate(sequence, len);
    }
}

/// A text and the memory that it lies in.
struct Text<'a> {
    memory: &'a mut Memory,
    sequence: &'a mut cache::Sequence,
    key: StepKey,
}

impl Text<'_> {
    /// Medians of the seconds that a recorded step of `rows` rows takes at the text's end, and of those until it is
    /// launched.
    fn time_step(&mut self, b: &Random, target: &dyn models::Target, rows: usize) -> (f64, f64) {
        let (mut whole, mut host) = (Vec::new(), Vec::new());
        let (mut batch, context) = (Batch::default(), self.sequence.len());
        for turn in 0..24 {
            let tokens: Vec<u32> = (0..rows).map(|i| token(turn * 8 + i)).collect();
            let start = Instant::now();
            batch.clear();
            let memory = &mut *self.memory;
            memory.push(&mut batch, self.sequence, &tokens, 0).unwrap();
            let batch = &batch;
            let made = b.step(self.key, batch, &[], &mut |_| {
                let hidden = target.forward(b, batch, memory);
                let logits = target.logits(b, &hidden);
                vec![hidden, logits]
            });
            let launched = start.elapsed().as_secs_f64();
            b.argmax(&made[1]);
            b.finish().unwrap();
            if turn > 3 {
                whole.push(start.elapsed().as_secs_f64());
                host.push(launched);
            }
            self.memory.truncate(self.sequence, context);
        }
        (median(whole), median(host))
    }

    /// The median of the seconds that a chain of `tokens` guesses of `head` takes, the text being the head's own.
    fn time_draft(
        &mut self,
        b: &Random,
        target: &dyn models::Target,
        head: &Qwen35Mtp,
        hidden: &Tensor,
        sampling: &Sampling,
        tokens: usize,
    ) -> f64 {
        let (mut all, context) = (Vec::new(), self.sequence.len());
        for turn in 0..24 {
            let start = Instant::now();
            let memory = &mut *self.memory;
            let mut batches = vec![Batch::default(); tokens];
            for batch in &mut batches {
                let token = [token(turn)];
                memory.push(batch, self.sequence, &token, 0).unwrap();
            }
            let choice = |i| vec![sampling.on_device(i).expect("no logit is edited")];
            let choices: Vec<Vec<TokenChoice>> = (0..tokens as u64).map(choice).collect();
            let chain = Chain {
                key: self.key,
                batches: &batches,
                choices: &choices,
                list: None,
                wants_confidences: false,
            };
            let made = b.chain(&chain, hidden, &mut |_, batch, x| {
                let m = head.forward(b, target, x, &[], batch, memory);
                Link {
                    logits: target.logits(b, &m),
                    ids: None,
                    next: Some(m),
                }
            });
            assert_eq!(made.map(|m| m.tokens.len()), Some(tokens));
            b.finish().unwrap();
            if turn > 3 {
                all.push(start.elapsed().as_secs_f64());
            }
            self.memory.truncate(self.sequence, context);
        }
        median(all)
    }
}

/// Times steps, and drafts of three tokens, by context and format of the KV cache.
fn time_kv(
    b: &Random,
    target: &dyn models::Target,
    head: Option<&Qwen35Mtp>,
    plans: &[KvPlan],
    of: &Value,
) {
    for &plan in plans {
        let size = MemorySize {
            sequences: 1,
            context: 101_000,
            step_rows: 2048,
            kv_format: plan,
            running_pages: None,
            kept: KeptSize::default(),
        };
        let mut memory = Memory::new(b, target.plan(), size);
        let mut head_memory = head.map(|h| Memory::new(b, h.plan(), size));
        b.finish().unwrap();
        for context in [1_000, 8_000, 32_000, 100_000] {
            let print = |what: String, of_it: Value| {
                let mut line = of.clone();
                let line_of = line.as_object_mut().unwrap();
                line_of.insert("what".into(), what.into());
                line_of.insert("kv".into(), plan.to_string().into());
                line_of.insert("context".into(), context.into());
                line_of.extend(of_it.as_object().unwrap().clone());
                println!("{line}");
            };
            let mut sequence = memory.open().unwrap();
            extend(&mut memory, &mut sequence, context);
            let key = StepKey::fresh();
            let mut text = Text {
                memory: &mut memory,
                sequence: &mut sequence,
                key,
            };
            let mut first = 0.0;
            for rows in [1, 2, 4, 8] {
                let (whole, _) = text.time_step(b, target, rows);
                if rows == 1 {
                    first = whole;
                }
                print(
                    "step".into(),
                    json!({"rows": rows, "ms": whole * 1e3, "against_one": whole / first,
                        "kv_bytes_a_token": target.plan().token_bytes(&plan)}),
                );
            }
            memory.close(sequence);
            let (Some(head), Some(memory)) = (head, &mut head_memory) else {
                continue;
            };
            let mut sequence = memory.open().unwrap();
            extend(memory, &mut sequence, context);
            let hidden = b.upload(1, target.hidden_size(), &vec![0.5; target.hidden_size()]);
            let mut text = Text {
                memory,
                sequence: &mut sequence,
                key: StepKey::fresh(),
            };
            let ms = text.time_draft(b, target, head, &hidden, &Sampling::default(), 3) * 1e3;
            print("draft of 3".into(), json!({ "ms": ms }));
            memory.close(sequence);
        }
    }
}

fn run(folder: &Path, name: &str, format: &'static quant::Format, ceiling: f64, measure: &Measure) {
    let shape = shape(name);
    let folder = folder.join(name);
    write(&folder, &shape);
    let b = Random {
        inner: Cuda::new(gpu_options()).unwrap(),
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
    let (mut dense, experts) = *b.bytes.lock().unwrap();
    if name.starts_with("qwen") {
        // The input embeddings are looked up only.
        let h = target.hidden_size();
        dense -= b.inner.random_matrix(1 << 14, h, format).bytes * target.vocab_size() / (1 << 14);
    }
    let head = Qwen35Mtp::load(&b, &checkpoint, &*target).ok();
    if let Measure::Kv(plans) = &measure {
        let of = json!({"model": name, "format": format.name});
        return time_kv(&b, &*target, head.as_ref(), plans, &of);
    }
    let size = MemorySize {
        sequences: 1,
        context: 33_000,
        step_rows: 2048,
        kv_format: backend::KvFormat::both(&quant::kv::BF16).into(),
        running_pages: None,
        kept: KeptSize::default(),
    };
    let mut memory = Memory::new(&b, target.plan(), size);
    let mut batch = Batch::default();
    let key = StepKey::fresh();
    let mut head_memory = head.as_ref().map(|h| Memory::new(&b, h.plan(), size));
    b.finish().unwrap();
    // The rows of 8192 tokens, then as many more as the context needs, unread.
    let mut sequence = memory.open().unwrap();
    let prefill = |memory: &mut Memory, sequence: &mut cache::Sequence| {
        let mut batch = Batch::default();
        for first in (0..8192).step_by(2048) {
            batch.clear();
            let tokens: Vec<u32> = (first..first + 2048).map(token).collect();
            memory
                .push(&mut batch, sequence, &tokens, tokens.len())
                .unwrap();
            drop(target.forward(&b, &batch, memory));
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
    for turn in 0..if quick { 0 } else { 2 } {
        if turn == 1 {
            memory.close(sequence);
            sequence = memory.open().unwrap();
        }
        let start = Instant::now();
        prefill(&mut memory, &mut sequence);
        let seconds = start.elapsed().as_secs_f64();
        if turn == 1 {
            println!(
                "{}",
                json!({"model": name, "format": format.name, "what": "prefill", "rows": 8192, "seconds": seconds, "tokens_per_s": 8192.0 / seconds, "tflops": 2.0 * shape.active * 8192.0 / seconds / 1e12, "load_s": load})
            );
        }
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
                let m = head.forward(&b, target, x[0], &[], batch, memory);
                vec![target.logits(&b, &m)]
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

fn main() {
    let mut args = std::env::args().skip(1).peekable();
    let folder = PathBuf::from(args.next().expect("a folder for files with holes"));
    let formats = args.next_if(|a| a == "--formats").map(|_| args.next());
    let formats = formats.map_or("affine4-g64,bf16".to_owned(), |f| {
        f.expect("names of formats after --formats")
    });
    let quick = args.next_if(|a| a == "--quick").is_some();
    let mut rows_after = |name: &str| {
        args.next_if(|a| a == name).map(|_| {
            let rows = args.next().and_then(|rows| rows.parse().ok());
            rows.unwrap_or_else(|| panic!("a number of rows after {name}"))
        })
    };
    let mut measure = match (rows_after("--ops"), rows_after("--trace")) {
        (Some(rows), _) => Measure::Ops(rows),
        (None, Some(rows)) => Measure::Trace(rows),
        (None, None) => Measure::Times { quick },
    };
    if args.next_if(|a| a == "--kv").is_some() {
        let plans = args.next().expect("plans of the KV cache after --kv");
        let plan = |text| KvPlan::parse(text, '+').expect("a plan of the KV cache");
        measure = Measure::Kv(plans.split(',').map(plan).collect());
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
    let b = Cuda::new(gpu_options()).unwrap();
    let ceiling = b.read_ceiling();
    println!("{}", json!({"what": "ceiling", "gb_per_s": ceiling / 1e9}));
    if let Measure::Times { .. } = measure {
        choices(&b);
    }
    drop(b);
    for name in &wanted {
        for format in formats.split(',') {
            let format = quant::format(format).expect("a format");
            run(&folder, name, format, ceiling, &measure);
        }
    }
}
