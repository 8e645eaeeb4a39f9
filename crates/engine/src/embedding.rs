//! Embeddings: what a request asks for that wants vectors of its prompt instead of text.
//!
//! ```text
//! hidden rows ─ pooling ─→ vectors in f64 ─ first dimensions ─ norm ─ rounding ─→ vectors in f32
//! ```
//!
//! There is one rounding, at the end. Models are language models: nothing here makes an embedder
//! of them that has learned to put texts of one meaning close together.

use speculate::Pooling;

/// Which vectors a request wants of its prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Embedding {
    /// Which vectors are made of the prompt's hidden rows.
    pub pooling: Pooling,
    /// Whether each vector gets a length (L2 norm) of 1. One of zeros stays as it is.
    pub normalize: bool,
    /// How many of the first numbers of a vector are kept, 1 to the model's hidden size; all if
    /// absent. The norm is that of the numbers which are kept.
    pub dimensions: Option<usize>,
}

impl Default for Embedding {
    /// The last row, normalized, in full.
    fn default() -> Self {
        Embedding {
            pooling: Pooling::default(),
            normalize: true,
            dimensions: None,
        }
    }
}

impl Embedding {
    /// Whether the prompt may begin with rows from the prefix cache.
    pub(crate) fn may_reuse(&self) -> bool {
        !self.pooling.needs_every_row()
    }

    /// The vector that a client gets of a pooled one.
    pub(crate) fn finish(&self, mut pooled: Vec<f64>) -> Vec<f32> {
        pooled.truncate(self.dimensions.unwrap_or(pooled.len()));
        let norm = pooled.iter().map(|x| x * x).sum::<f64>().sqrt();
        let divisor = if self.normalize && norm > 0.0 {
            norm
        } else {
            1.0
        };
        pooled.into_iter().map(|x| (x / divisor) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(vector: &[f64], normalize: bool, dimensions: Option<usize>) -> Vec<f32> {
        let embedding = Embedding {
            normalize,
            dimensions,
            ..Embedding::default()
        };
        embedding.finish(vector.to_vec())
    }

    #[test]
    fn vectors_get_a_norm_of_one_after_they_are_cut() {
        assert_eq!(finished(&[3.0, -4.0], true, None), [0.6, -0.8]);
        assert_eq!(finished(&[3.0, -4.0, 12.0], true, Some(2)), [0.6, -0.8]);
        assert_eq!(finished(&[3.0, -4.0, 12.0], false, Some(2)), [3.0, -4.0]);
        // Squares of these are no f32.
        assert_eq!(finished(&[3e30, 4e30], true, None), [0.6, 0.8]);
        assert_eq!(finished(&[3e-40, 4e-40], true, None), [0.6, 0.8]);
    }

    #[test]
    fn a_vector_of_zeros_stays_one() {
        assert_eq!(finished(&[0.0, -0.0], true, None), [0.0, 0.0]);
        assert_eq!(finished(&[0.0, 5.0], true, Some(1)), [0.0]);
    }
}
