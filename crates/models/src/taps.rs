//! Taps: which rows a step of a target keeps.

use backend::{Backend, Batch, Tensor};

/// Rows that a step of a target is to keep: residual rows inside it, and which of its hidden rows.
///
/// Layer `j` stands for what enters decoder layer `j`: the embedding for 0, the
/// last layer's output for the number of layers (`specs/eagle3.md` §3).
#[derive(Debug)]
pub struct Taps {
    layers: Vec<usize>,
    rows: Vec<Option<Tensor>>,
    outputs: Option<Vec<usize>>,
}

impl Taps {
    /// Keeps what enters each of `layers`; without any, a step costs nothing more.
    pub fn new(layers: &[usize]) -> Self {
        Taps {
            layers: layers.to_vec(),
            rows: layers.iter().map(|_| None).collect(),
            outputs: None,
        }
    }

    /// Keeps the hidden rows of `rows` of the step alone, if that is given. Other rows end once the last layer that writes a KV cache or
    /// a state has written what they leave there, or, if a later layer is tapped, once they enter that. Rows have the same
    /// bits either way.
    ///
    /// # Panics
    ///
    /// If `rows` is empty. The step panics if they do not ascend, or it has fewer.
    #[must_use]
    pub fn with_outputs(self, rows: Option<Vec<usize>>) -> Self {
        let is_empty = rows.as_ref().is_some_and(Vec::is_empty);
        assert!(!is_empty, "a row whose hidden row is kept");
        Taps {
            outputs: rows,
            ..self
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

    /// Where a step of `batch` goes on with fewer rows, if fewer are wanted: in layer `writer`, the last one that writes a
    /// KV cache or a state, or in a later one that is tapped.
    pub(crate) fn cut(&self, writer: usize, batch: &Batch) -> Option<Cut> {
        let rows = self.outputs.as_ref().filter(|r| r.len() < batch.n_rows())?;
        let tapped = self.layers.iter().copied().max();
        Some(Cut {
            layer: tapped.map_or(writer, |tapped| tapped.max(writer)),
            rows: rows.clone(),
            batch: batch.of_rows(rows),
        })
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

/// Where a step goes on with the rows alone whose hidden rows are kept.
pub(crate) struct Cut {
    /// The layer that all rows enter and only those rows leave; the number of layers if all leave the last one.
    pub(crate) layer: usize,
    /// Numbers of the rows in the step.
    pub(crate) rows: Vec<usize>,
    /// The step of those rows.
    pub(crate) batch: Batch,
}

impl Cut {
    /// The cut's rows of `x: [n, C]`.
    pub(crate) fn gather(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        b.gather(x, &self.rows)
    }
}
