//! Products of weights in memory that are read in any way, to be timed.

use super::activations::{QuantizedActivations, RowBlocks};
use super::dispatch::panels_of_range;
use super::measure::read_bytes;
use super::pack_buffer::PackBuffer;
use super::plain::PlainWork;
use super::quantized::QuantizedWork;
use super::weights::{PackedWeights, Panels, matrix};
use crate::device::{Activations, CpuError, CpuOptions, Device};
use crate::memory::{Region, elements, values, values_mut};
use crate::pool::DisjointSlice;
use crate::tuning::{WeightKind, WeightReads};
use backend::{Matrix, Tensor};
use half::bf16;
use quant::Scalar;
use std::hint::black_box;
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;

/// Columns of the weights.
const COLS: usize = 4096;

/// The most rows of activations.
const ROWS: usize = 8;

/// The byte that weights are made of. As a scale, an element or half of one it is part of a normal
/// number, so no product has to do with numbers that some processors are slow with.
const BYTE: u8 = 0x3c;

/// Products with weights that are in memory and in no cache, read as a caller says: what to time
/// for a [`Tuning`](crate::Tuning). Weights are more than caches hold, and each call takes the next part of
/// them. The crate has no clock, so the caller times the calls.
pub struct Trial {
    device: Device,
    /// What all weights are made of.
    memory: Region,
    /// Bytes of a part, and where the next one starts.
    part: usize,
    next: usize,
    /// A panel of each kind of weights, for its layout.
    panels: [Matrix; WeightKind::ALL.len()],
    x: Tensor,
    y: Tensor,
}

impl Trial {
    /// Starts the threads that `options` ask for and fills `bytes` of weights, of which each call takes
    /// 2 MiB a thread, but 4 MiB at least and an eighth at most. `None` if the system has no such memory.
    ///
    /// # Errors
    ///
    /// As [`Cpu::new`](crate::Cpu::new).
    pub fn new(options: CpuOptions, bytes: usize) -> Result<Option<Self>, CpuError> {
        let device = Device::new(CpuOptions {
            activations: Activations::Int8,
            ..options
        })?;
        let Some(mut memory) = Region::sparse(bytes) else {
            return Ok(None);
        };
        let all = DisjointSlice::new(memory.elements_mut::<u8>());
        device.pool.each(bytes, 1 << 20, |_, range| {
            // SAFETY: ranges are disjoint.
            unsafe { all.part(range) }.fill(BYTE);
        });
        let buffers: Vec<Mutex<PackBuffer>> = (0..device.pool.n_workers())
            .map(|_| Mutex::default())
            .collect();
        let panels = WeightKind::ALL.map(|kind| {
            let format = quant::format(kind.example()).expect("a known format");
            let stored = quant::encode(format, &[0.5; 16 * COLS], COLS, Scalar::Bf16);
            matrix(&device, &buffers, &AtomicU64::new(0), &[stored.view()])
        });
        let part = (device.pool.n_workers() << 21).max(4 << 20).min(bytes / 8) / 64 * 64;
        let mut x = device.tensor(ROWS, COLS);
        values_mut(&mut x).fill(0.5);
        // Panels of 4-bit codes are the smallest.
        let y = device.tensor(ROWS, part / (COLS / 2));
        Ok(Some(Trial {
            device,
            memory,
            part,
            next: 0,
            panels,
            x,
            y,
        }))
    }

    /// Threads in use, the calling one included.
    pub fn threads(&self) -> usize {
        self.device.pool.n_workers()
    }

    /// Bytes of weights that each call takes.
    pub fn part_bytes(&self) -> usize {
        self.part
    }

    /// The part of the weights that is read next.
    fn take(&mut self) -> Range<usize> {
        if self.next + self.part > self.memory.elements::<u8>().len() {
            self.next = 0;
        }
        self.next += self.part;
        self.next - self.part..self.next
    }

    /// Reads the next part of the weights and does nothing with it: what a product cannot be faster
    /// than.
    pub fn read(&mut self) {
        let part = self.take();
        black_box(read_bytes(&self.device, &self.memory.elements()[part]));
    }

    /// Multiplies `rows` rows of activations with the next part of the weights, taken to be of `kind`
    /// and read as `reads` says. Returns the outputs, `[rows, outputs]`.
    ///
    /// # Panics
    ///
    /// If there are no rows, or more than 8.
    pub fn multiply(&mut self, kind: WeightKind, rows: usize, reads: WeightReads) -> &[f32] {
        assert!((1..=ROWS).contains(&rows), "1 to {ROWS} rows");
        let part = self.take();
        let (device, weights) = (&self.device, &self.memory.elements::<u8>()[part]);
        let packed = self.panels[kind as usize].storage::<PackedWeights>();
        let bytes = packed.layout().panel_bytes();
        let n_panels = weights.len() / bytes;
        let n_out = 16 * n_panels;
        let chunk = panels_of_range(device, n_panels, bytes, reads.of_rows(rows));
        let y = &mut values_mut(&mut self.y)[..rows * n_out];
        let out = DisjointSlice::new(y);
        let each = |work: &(dyn Fn(Range<usize>, &[u8]) + Sync)| {
            device.pool.each(n_panels, chunk, |_, range| {
                let data = &weights[range.start * bytes..range.end * bytes];
                work(range, data);
            });
        };
        match &packed.panels {
            Panels::Quantized(w) => {
                let blocks = RowBlocks::vectors(device.isa, rows);
                let (run, groups) = (0..rows, (w.group, w.rotated));
                let run = std::slice::from_ref(&run);
                let x = QuantizedActivations::new(device, &self.x, groups, blocks, run);
                each(&|range, data| {
                    let work = QuantizedWork {
                        w,
                        data,
                        n_out,
                        x: x.view(0..rows),
                        range,
                        y: &out,
                        reads,
                    };
                    work.multiply(device);
                });
            }
            Panels::Plain(_) => each(&|range, data| {
                device.isa.run(PlainWork::<bf16> {
                    x: &values(&self.x)[..rows * COLS],
                    rows,
                    cols: COLS,
                    weights: elements(data),
                    n_out,
                    range,
                    y: &out,
                    reads,
                });
            }),
        }
        &values(&self.y)[..rows * n_out]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::tuning::PrefetchHint;

    #[test]
    fn every_way_of_reading_weights_gives_the_same_bits() {
        for isa in Isa::available() {
            let options = CpuOptions {
                threads: 2,
                isa: Some(isa),
                ..CpuOptions::default()
            };
            let trial = Trial::new(options, 8 << 20).expect("an instruction set of this CPU");
            let mut trial = trial.expect("little memory");
            for kind in WeightKind::ALL {
                for rows in 1..=ROWS {
                    let want = trial.multiply(kind, rows, WeightReads::default()).to_vec();
                    assert!(want[0].is_normal() && want.iter().all(|y| *y == want[0]));
                    for (panels, hint) in [2, 4, 8]
                        .into_iter()
                        .flat_map(|panels| PrefetchHint::ALL.map(|hint| (panels, hint)))
                    {
                        let reads = WeightReads {
                            panels,
                            panels_of_few_rows: panels.min(4),
                            distance: 512 * panels,
                            hint,
                        };
                        let got = trial.multiply(kind, rows, reads);
                        assert_eq!(got, want, "{kind:?}, {rows} rows, {reads} on {isa:?}");
                    }
                }
            }
        }
    }
}
