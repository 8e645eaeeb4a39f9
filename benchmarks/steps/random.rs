//! A GPU that makes random weights of the wanted format where a checkpoint has holes.

use backend::{
    Activation, Attention, Backend, Batch, Capabilities, Chain, Chained, Delta, DeltaSpec,
    DeltaWeights, DeviceError, Experts, Kv, KvSpec, Link, Matrix, NearAttention, Ops, Record, Rope,
    Sample, StepKey, Store, Tensor, TokenMask,
};
use cuda::Cuda;
use quant::Stored;
use std::borrow::Cow;
use std::sync::Mutex;

/// A GPU whose weights are random.
pub(crate) struct Random {
    pub(crate) inner: Cuda,
    pub(crate) format: &'static quant::Format,
    /// Shapes of an expert's matrices.
    pub(crate) experts: [(usize, usize); 2],
    /// Rows of tables that are looked up, not multiplied, unless tied.
    pub(crate) table: Option<(usize, usize)>,
    /// Bytes that every step reads, and those of all experts.
    pub(crate) bytes: Mutex<(usize, usize)>,
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
