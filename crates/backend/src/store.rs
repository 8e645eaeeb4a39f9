//! Storage: weights, activations and what sequences remember, in a device's memory.

use crate::{Delta, DeltaSpec, Kv, KvSpec, Matrix, Tensor};
use quant::Stored;
use std::borrow::Cow;

/// Device memory: how values get there, what layers remember there, how values come back.
pub trait Store: Send + Sync {
    /// Loads a matrix. Several parts of equal width become one matrix, rows in
    /// order.
    fn matrix(&self, parts: &[Stored<'_>]) -> Matrix;

    /// Bytes that the matrices loaded since the last call would take, had the device
    /// not left them in their mapped files as [`Stored::keep`] asks: 0 on a device without
    /// [`Capabilities::mapped_weights`](crate::Capabilities::mapped_weights).
    fn left_in_files(&self) -> u64 {
        0
    }

    /// Bytes that are free of a device's own memory
    /// ([`Capabilities::own_memory`](crate::Capabilities::own_memory)); none where the device has none, or does not say.
    fn free_memory(&self) -> Option<u64> {
        None
    }

    /// Loads activations or a vector of parameters, `[rows, cols]`.
    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Tensor;

    /// The values of `x`, row-major. Waits for the device.
    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]>;

    /// A tensor of unspecified content, for ops that take their output.
    fn scratch(&self, rows: usize, cols: usize) -> Tensor;

    /// Memory for one attention layer, in a format among
    /// [`Capabilities::kv`](crate::Capabilities::kv).
    fn kv(&self, spec: KvSpec) -> Kv;

    /// Memory for one gated-delta layer.
    fn delta(&self, spec: DeltaSpec) -> Delta;

    /// Makes page `to` of an attention layer what page `from` is.
    fn kv_copy(&self, kv: &mut Kv, from: usize, to: usize);

    /// The bytes of page `page` of an attention layer, in an order of the device's own.
    /// Waits for the device.
    fn kv_save(&self, kv: &Kv, page: usize) -> Vec<u8>;

    /// Makes page `page` of an attention layer what [`Store::kv_save`] has saved on the same
    /// kind of device. Returns false, and changes nothing, if `bytes` are not as many as a page
    /// has.
    fn kv_load(&self, kv: &mut Kv, page: usize, bytes: &[u8]) -> bool;

    /// Makes slot `to` of a gated-delta layer what slot `from` is: its state, what is remembered of the
    /// tentative rows of its last step, and the rows before the convolution.
    fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize);

    /// The bytes of slot `slot` of a gated-delta layer, in an order of the device's own. Waits for
    /// the device.
    fn delta_save(&self, delta: &Delta, slot: usize) -> Vec<u8>;

    /// Makes slot `slot` of a gated-delta layer what [`Store::delta_save`] has saved on the same
    /// kind of device. Returns false, and changes nothing, if `bytes` cannot be those of a slot.
    fn delta_load(&self, delta: &mut Delta, slot: usize, bytes: &[u8]) -> bool;

    /// Reads every byte of `w` once and computes next to nothing, as fast as the
    /// device can: how long this takes is the floor of a product with `w`. Returns
    /// something that depends on all of them, or `None` where there is no such
    /// measure.
    fn read(&self, _w: &Matrix) -> Option<u64> {
        None
    }
}
