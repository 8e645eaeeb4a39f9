//! Taps: what a drafter reads from inside a target.

use backend::{Backend, Tensor};

/// Residual rows that a step of a target is to keep.
///
/// Layer `j` stands for what enters decoder layer `j`: the embedding for 0, the
/// last layer's output for the number of layers (`specs/eagle3.md` §3).
#[derive(Debug)]
pub struct Taps {
    layers: Vec<usize>,
    rows: Vec<Option<Tensor>>,
}

impl Taps {
    /// Keeps what enters each of `layers`; without any, a step costs nothing more.
    pub fn new(layers: &[usize]) -> Self {
        Taps {
            layers: layers.to_vec(),
            rows: layers.iter().map(|_| None).collect(),
        }
    }

    /// Keeps `x: [n, H]`, what enters `layer`, if it is wanted.
    pub(crate) fn see(&mut self, b: &dyn Backend, layer: usize, x: &Tensor) {
        for (_, row) in self
            .layers
            .iter()
            .zip(&mut self.rows)
            .filter(|(l, _)| **l == layer)
        {
            *row = Some(b.columns(x, 0, x.cols()));
        }
    }

    /// The rows kept, `[n, H]` for each layer, in the order asked for.
    ///
    /// # Panics
    ///
    /// If no step has run, or the target has no such layer.
    pub fn into_rows(self) -> Vec<Tensor> {
        let kept = |row: Option<Tensor>| row.expect("the target has the layer");
        self.rows.into_iter().map(kept).collect()
    }
}
