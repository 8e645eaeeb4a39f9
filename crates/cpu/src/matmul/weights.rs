//! Packed weights: what a [`Matrix`] of this backend holds.

use super::pack::{PanelLayout, PanelSource};
use super::pack_buffer::PackBuffer;
use super::plain::PlainPanels;
use super::quantized::QuantizedPanels;
use crate::ahead::Successor;
use crate::device::{Activations, Device};
use crate::tuning::WeightKind;
use backend::Matrix;
use quant::Stored;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};

/// A matrix in panels of 16 rows.
pub(crate) struct PackedWeights {
    pub(crate) panels: Panels,
    /// What is multiplied after a product that begins with this matrix.
    pub(crate) successor: Arc<Successor>,
}

/// The panels of a matrix.
pub(crate) enum Panels {
    Plain(PlainPanels),
    Quantized(QuantizedPanels),
}

impl PackedWeights {
    /// The kind of weights whose tuning is used.
    pub(crate) fn kind(&self) -> WeightKind {
        match &self.panels {
            Panels::Plain(_) => WeightKind::Plain,
            Panels::Quantized(w) => w.weight_kind(),
        }
    }

    /// How the panels are laid out, and where they come from.
    pub(crate) fn layout(&self) -> &dyn PanelLayout {
        match &self.panels {
            Panels::Plain(w) => w,
            Panels::Quantized(w) => w,
        }
    }
}

/// Packs `parts` as one matrix, or leaves them in their file if all are to stay there and adds
/// the bytes that their panels would take to `left_in_files`.
///
/// # Panics
///
/// If the parts have different numbers of columns.
pub(crate) fn matrix(
    device: &Device,
    buffers: &[Mutex<PackBuffer>],
    left_in_files: &AtomicU64,
    parts: &[Stored<'_>],
) -> Matrix {
    let cols = parts[0].cols;
    assert!(parts.iter().all(|p| p.cols == cols), "parts of one width");
    let rows = parts.iter().map(|p| p.rows).sum::<usize>();
    let quantized = match device.activations {
        Activations::Int8 => QuantizedPanels::pack(device, buffers, parts),
        Activations::F32 => None,
    };
    let panels = quantized.map_or_else(
        || Panels::Plain(PlainPanels::pack(device, buffers, parts)),
        Panels::Quantized,
    );
    let weights = PackedWeights {
        panels,
        successor: Arc::default(),
    };
    let layout = weights.layout();
    let bytes = layout.n_panels() * layout.panel_bytes();
    let held = match layout.source() {
        PanelSource::Packed(_) => bytes,
        PanelSource::Mapped(_) => {
            left_in_files.fetch_add(bytes as u64, Relaxed);
            0
        }
    };
    Matrix::new(rows, cols, parts[0].format.name, held, Box::new(weights))
}
