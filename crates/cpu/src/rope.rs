//! Rotary position embedding.

use crate::arch::{Kernel, Lanes, load, store};
use crate::device::Device;
use crate::memory::values_mut;
use crate::pool::{DisjointSlice, WORK_RANGE, worker_scratch};
use backend::{Batch, Rope, Row, Tensor, math};

/// Rotates the heads of some rows. Sines and cosines are computed once a row.
struct Rotate<'a> {
    rope: &'a Rope,
    rows: &'a [Row],
    cols: usize,
    x: &'a mut [f32],
    /// Scratch memory for the sines and cosines of all pairs.
    angles: &'a mut [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let Rope {
            head_dim,
            pair_offset,
            ref frequencies,
            ref axes,
        } = *self.rope;
        let pairs = frequencies.len();
        let (sines, cosines) = self.angles.split_at_mut(pairs);
        for (row, x) in self.rows.iter().zip(self.x.chunks_exact_mut(self.cols)) {
            let by_axis = row.position.axes().map(|position| position as f32);
            let is_text = by_axis.iter().all(|position| *position == by_axis[0]);
            let mut position = L::splat(by_axis[0]);
            let places = sines.chunks_mut(16).zip(cosines.chunks_mut(16));
            for (i, (f, (sin, cos))) in frequencies.chunks(16).zip(places).enumerate() {
                if !is_text && !axes.is_empty() {
                    let mut by_pair = [0.0; 16];
                    for (position, &axis) in by_pair.iter_mut().zip(&axes[16 * i..]) {
                        *position = by_axis[usize::from(axis)];
                    }
                    position = load::<L>(&by_pair);
                }
                let (s, c) = math::sin_cos(position * load::<L>(f));
                store(s, sin);
                store(c, cos);
            }
            for head in x.chunks_exact_mut(head_dim) {
                let (low, high) = head.split_at_mut(pair_offset);
                let pairs = low[..pairs]
                    .chunks_mut(16)
                    .zip(high[..pairs].chunks_mut(16));
                let angles = sines.chunks(16).zip(cosines.chunks(16));
                for ((low, high), (sin, cos)) in pairs.zip(angles) {
                    let (a, b) = (load::<L>(low), load::<L>(high));
                    let (sin, cos) = (load::<L>(sin), load::<L>(cos));
                    store(b.negate().mul_add(sin, a * cos), low);
                    store(a.mul_add(sin, b * cos), high);
                }
            }
        }
    }
}

/// Rotates every head of every row by the row's position.
///
/// # Panics
///
/// If `x` does not have a row for each of the step's, or rows are not whole heads.
pub(crate) fn rope(device: &Device, mut x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
    let cols = x.cols();
    let pairs = rope.frequencies.len();
    assert_eq!(x.rows(), batch.n_rows(), "a row for each of the step's");
    assert!(cols.is_multiple_of(rope.head_dim), "whole heads");
    rope.check();
    // Workers share no cache line.
    let len = (2 * pairs).next_multiple_of(16);
    let mut angles = device.tensor(device.pool.n_workers(), len);
    let (out, angles) = (
        DisjointSlice::new(values_mut(&mut x)),
        DisjointSlice::new(values_mut(&mut angles)),
    );
    device.pool.each(
        batch.n_rows(),
        WORK_RANGE.div_ceil(cols.max(1)),
        |worker, range| {
            // SAFETY: ranges of rows are disjoint, and a worker's scratch memory is its own.
            let (x, angles) = unsafe {
                (
                    out.part(range.start * cols..range.end * cols),
                    worker_scratch(&angles, worker, len),
                )
            };
            device.isa.run(Rotate {
                rope,
                rows: &batch.rows[range],
                cols,
                x,
                angles: &mut angles[..2 * pairs],
            });
        },
    );
    x
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::values;
    use crate::{Cpu, CpuOptions};
    use backend::{Ops, Position, Store};

    #[test]
    fn position_zero_rotates_nothing() {
        let cpu = Cpu::new(CpuOptions::default()).unwrap();
        let x: Vec<f32> = (0..48).map(|i| i as f32 - 20.0).collect();
        let rotary = Rope {
            head_dim: 24,
            pair_offset: 12,
            frequencies: vec![0.5; 5],
            axes: Vec::new(),
        };
        let batch = Batch {
            rows: vec![Row {
                position: Position::text(0),
                ..Row::text(3)
            }],
            ..Batch::default()
        };
        let y = cpu.rope(cpu.upload(1, 48, &x), &rotary, &batch);
        assert_eq!(values(&y), x);
    }
}
