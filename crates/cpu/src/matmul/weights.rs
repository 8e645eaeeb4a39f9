//! A matrix as the kernels want it, and how it is made from stored rows.

use super::pack::{PanelLayout, PanelSource};
use super::plain::PlainPanels;
use super::quantized::QuantizedPanels;
use crate::device::{Activations, Cpu};
use backend::Matrix;
use quant::Stored;
use std::sync::atomic::Ordering::Relaxed;

/// A matrix as the kernels want it.
pub(crate) enum PackedWeights {
    Plain(PlainPanels),
    QuantizedPanels(QuantizedPanels),
}

impl PackedWeights {
    /// How its panels are laid out, and where they come from.
    pub(crate) fn packing(&self) -> &dyn PanelLayout {
        match self {
            PackedWeights::Plain(w) => w,
            PackedWeights::QuantizedPanels(w) => w,
        }
    }
}

/// Packs `parts` as one matrix, or leaves them where they lie.
pub(crate) fn matrix(cpu: &Cpu, parts: &[Stored<'_>]) -> Matrix {
    let cols = parts[0].cols;
    assert!(parts.iter().all(|p| p.cols == cols), "parts of one width");
    let rows = parts.iter().map(|p| p.rows).sum::<usize>();
    let coded = match cpu.activations {
        Activations::Int8 => QuantizedPanels::pack(cpu, parts),
        Activations::F32 => None,
    };
    let weights = coded.map_or_else(
        || PackedWeights::Plain(PlainPanels::pack(cpu, parts)),
        PackedWeights::QuantizedPanels,
    );
    let packing = weights.packing();
    let bytes = packing.n_panels() * packing.panel_bytes();
    let held = match packing.source() {
        PanelSource::Packed(_) => bytes,
        PanelSource::Mapped(_) => {
            cpu.left.fetch_add(bytes as u64, Relaxed);
            0
        }
    };
    Matrix::new(rows, cols, parts[0].format.name, held, Box::new(weights))
}
