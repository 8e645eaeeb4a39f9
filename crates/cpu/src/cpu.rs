//! The CPU as a backend: the device, what ops keep between calls, and the ops by their traits.

use crate::arch::Isa;
use crate::device::{Activations, CpuError, CpuOptions, Device};
use crate::memory::{values, values_mut};
use crate::{attention, delta, elementwise, kv, matmul, moe, near, norm, rope, rows};
use backend::{
    Activation, Attention, Backend, Batch, Capabilities, Delta, DeltaSpec, DeltaWeights,
    DeviceError, ExpertMarks, Experts, Kv, KvSpec, Matrix, NearAttention, Ops, Record, Rope,
    RowEdits, Sample, Store, Tensor, TokenMask,
};
use quant::Stored;
use std::borrow::Cow;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The CPU as a [`Backend`]: an instruction set, a pool of threads, and what ops keep between calls.
pub struct Cpu {
    device: Device,
    /// The tasks of the last attention.
    attention_plan: Mutex<attention::Plan>,
    /// The choices of the last mixture of experts.
    routing: Mutex<moe::Routing>,
    /// An encoder for each worker.
    encoders: Vec<Mutex<kv::RowEncoder>>,
    /// A pack buffer for each worker.
    pack_buffers: Vec<Mutex<matmul::PackBuffer>>,
    /// Bytes that the panels of matrices which stay in their files would take.
    left_in_files: AtomicU64,
    /// Why the last step, or what was asked for since, has failed.
    failure: Mutex<Option<DeviceError>>,
}

impl Cpu {
    /// Starts the threads.
    ///
    /// # Errors
    ///
    /// If this CPU lacks the instruction set, the threads are too many, or they are to
    /// be bound to cores and cannot be.
    pub fn new(options: CpuOptions) -> Result<Self, CpuError> {
        Device::new(options).map(Cpu::on)
    }

    /// The backend of a device.
    pub(crate) fn on(device: Device) -> Self {
        let n_workers = device.pool.n_workers();
        Cpu {
            device,
            attention_plan: Mutex::default(),
            routing: Mutex::default(),
            encoders: (0..n_workers).map(|_| Mutex::default()).collect(),
            pack_buffers: (0..n_workers).map(|_| Mutex::default()).collect(),
            left_in_files: AtomicU64::new(0),
            failure: Mutex::default(),
        }
    }

    /// Notes that the system has no memory for `what`, which has none then.
    fn lacks_memory(&self, what: &str) {
        let device = self.name();
        let message = format!("the system has too little memory for {what}");
        lock(&self.failure).get_or_insert(DeviceError { device, message });
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.device.isa.isa()
    }

    /// Threads in use, the calling one included.
    pub fn threads(&self) -> usize {
        self.device.pool.n_workers()
    }

    /// Whether threads are bound to cores.
    pub fn is_pinned(&self) -> bool {
        self.device.is_pinned
    }

    /// Multiplies bytes in registers as fast as the CPU can, on all threads, and returns the
    /// operations, a product and a sum being two: the peak rate of a product with 8-bit
    /// activations. With `tiles` in AMX tiles; `None` where there are none.
    pub fn saturate(&self, tiles: bool, steps: usize) -> Option<u64> {
        matmul::saturate(&self.device, tiles, steps)
    }
}

/// Locks what an op keeps between calls; a panic of an earlier call leaves it usable.
fn lock<T>(kept: &Mutex<T>) -> MutexGuard<'_, T> {
    kept.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Backend for Cpu {
    fn name(&self) -> String {
        let threads = self.threads();
        let s = if threads == 1 { "" } else { "s" };
        let pinned = if self.is_pinned() { ", pinned" } else { "" };
        let activations = match self.device.activations {
            Activations::Int8 => "",
            Activations::F32 => ", f32 activations",
        };
        format!(
            "cpu ({}, {threads} thread{s}{pinned}{activations})",
            self.isa().name()
        )
    }

    fn numerics(&self) -> String {
        format!("cpu {:?}", self.device.activations)
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            mapped_weights: true,
            masks: true,
            experts: true,
            ..Capabilities::default()
        }
    }
}

impl Store for Cpu {
    fn matrix(&self, parts: &[Stored<'_>]) -> Matrix {
        matmul::matrix(&self.device, &self.pack_buffers, &self.left_in_files, parts)
    }

    fn left_in_files(&self) -> u64 {
        self.left_in_files.swap(0, Relaxed)
    }

    fn upload(&self, rows: usize, cols: usize, from: &[f32]) -> Tensor {
        let mut x = self.device.tensor(rows, cols);
        values_mut(&mut x).copy_from_slice(from);
        x
    }

    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
        Cow::Borrowed(values(x))
    }

    fn kv(&self, spec: KvSpec) -> Kv {
        let none = KvSpec { pages: 0, ..spec };
        let kv = kv::kv(spec).or_else(|| {
            self.lacks_memory("keys and values");
            kv::kv(none)
        });
        kv.expect("memory for nothing")
    }

    fn delta(&self, spec: DeltaSpec) -> Delta {
        let none = DeltaSpec { slots: 0, ..spec };
        let delta = delta::delta(spec).or_else(|| {
            self.lacks_memory("recurrent states");
            delta::delta(none)
        });
        delta.expect("memory for nothing")
    }

    fn kv_copy(&self, kv: &mut Kv, from: usize, to: usize) {
        kv::copy_page(kv, from, to);
    }

    fn kv_save(&self, kv: &Kv, page: usize) -> Vec<u8> {
        kv::save_page(kv, page)
    }

    fn kv_load(&self, kv: &mut Kv, page: usize, bytes: &[u8]) -> bool {
        kv::load_page(kv, page, bytes)
    }

    fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize) {
        delta::copy(delta, from, to);
    }

    fn delta_save(&self, delta: &Delta, slot: usize) -> Vec<u8> {
        delta::save(delta, slot)
    }

    fn delta_load(&self, delta: &mut Delta, slot: usize, bytes: &[u8]) -> bool {
        delta::load(delta, slot, bytes)
    }

    fn read(&self, w: &Matrix) -> Option<u64> {
        Some(matmul::read(&self.device, w))
    }

    fn scratch(&self, rows: usize, cols: usize) -> Tensor {
        self.device.tensor(rows, cols)
    }
}

impl Ops for Cpu {
    fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
        matmul::embed(&self.device, table, tokens, scale)
    }

    fn replace_rows(&self, x: Tensor, embeddings: &Tensor, source: u32, batch: &Batch) -> Tensor {
        rows::replace(x, embeddings, source, batch)
    }

    fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
        matmul::matmul_into(&self.device, &self.pack_buffers, x, w, y);
    }

    fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
        matmul::matmul_rows(&self.device, &self.pack_buffers, x, w, ids)
    }

    fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor {
        norm::rms_norm(&self.device, x, weight, width, eps)
    }

    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Tensor {
        norm::layer_norm(&self.device, x, weight, bias, eps)
    }

    fn affine(&self, x: Tensor, factor: Option<&Tensor>, shift: &Tensor) -> Tensor {
        elementwise::affine(&self.device, x, factor, shift)
    }

    fn activate(&self, x: Tensor, activation: Activation) -> Tensor {
        elementwise::activate(&self.device, x, activation)
    }

    fn clamp(&self, x: Tensor, low: f32, high: f32) -> Tensor {
        let clamp = elementwise::Clamp { low, high };
        elementwise::apply(&self.device, clamp, x, None)
    }

    fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
        elementwise::apply(&self.device, elementwise::Add, x, Some(y))
    }

    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        elementwise::apply(&self.device, elementwise::Scale(factor), x, None)
    }

    fn glu(&self, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
        elementwise::glu(&self.device, gate, x, activation)
    }

    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        elementwise::apply(&self.device, elementwise::Softcap(cap), x, None)
    }

    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        rows::gather(&self.device, x, rows)
    }

    fn columns(&self, x: &Tensor, first: usize, cols: usize) -> Tensor {
        rows::columns(&self.device, x, first, cols)
    }

    fn concat(&self, a: &Tensor, b: &Tensor) -> Tensor {
        rows::concat(&self.device, a, b)
    }

    fn rope(&self, x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
        rope::rope(&self.device, x, rope, batch)
    }

    fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch) {
        kv::append(&self.device, &self.encoders, kv, (k, v), group, batch);
    }

    fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor {
        attention::attend(
            &self.device,
            &mut lock(&self.attention_plan),
            q,
            kv,
            attention,
            batch,
        )
    }

    fn attend_near(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        relative: &Tensor,
        attention: &NearAttention,
    ) -> Tensor {
        near::attend(&self.device, [q, k, v], relative, attention)
    }

    fn gated_delta(
        &self,
        state: &mut Delta,
        weights: &DeltaWeights,
        qkv: &Tensor,
        b: &Tensor,
        a: &Tensor,
        batch: &Batch,
    ) -> Tensor {
        delta::gated_delta(&self.device, state, weights, qkv, b, a, batch)
    }

    fn moe(&self, x: &Tensor, scores: &Tensor, experts: &Experts) -> Tensor {
        moe::moe(
            &self.device,
            &self.pack_buffers,
            &mut lock(&self.routing),
            x,
            scores,
            experts,
        )
    }

    fn gate_rows(&self, x: &Tensor, gate: &Tensor, activation: Activation) -> Tensor {
        moe::gate_rows(&self.device, x, gate, activation)
    }
}

impl Sample for Cpu {
    fn confidences(&self, x: &Tensor) -> Vec<f32> {
        rows::confidences(&self.device, x)
    }

    fn argmax(&self, x: &Tensor) -> Vec<u32> {
        rows::argmax(&self.device, x)
    }

    fn mask_logits(&self, mut x: Tensor, masks: &[Option<TokenMask>]) -> Tensor {
        TokenMask::apply(masks, x.cols(), values_mut(&mut x));
        x
    }

    fn edit_logits(&self, mut x: Tensor, edits: &[RowEdits]) -> Tensor {
        RowEdits::apply_all(edits, x.cols(), values_mut(&mut x));
        x
    }
}

impl Record for Cpu {
    fn host_threads(&self) -> usize {
        self.device.pool.n_workers()
    }

    fn host_each(&self, n: usize, work: &(dyn Fn(usize) + Sync)) {
        self.device.pool.each(n, 1, |_, range| range.for_each(work));
    }

    fn note_experts(&self) {
        lock(&self.routing).begin_noting();
    }

    fn take_experts(&self, marks: &mut ExpertMarks) -> bool {
        lock(&self.routing).take_noted(marks)
    }

    fn finish(&self) -> Result<(), DeviceError> {
        lock(&self.failure).take().map_or(Ok(()), Err)
    }
}
