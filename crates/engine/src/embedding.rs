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
    /// By what each vector is divided. One of zeros stays as it is.
    pub norm: Norm,
    /// How many of the first numbers of a vector are kept, 1 to the model's hidden size; all if
    /// absent. The norm is that of the numbers which are kept.
    pub dimensions: Option<usize>,
}

impl Default for Embedding {
    /// The last row, normalized, in full.
    fn default() -> Self {
        Embedding {
            pooling: Pooling::default(),
            norm: Norm::default(),
            dimensions: None,
        }
    }
}

/// By what a vector is divided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norm {
    /// Not divided: the numbers are those of the model.
    None,
    /// By its largest absolute value over so much, which that becomes: 32,760 for 16-bit integers.
    Max(u16),
    /// By its p-norm, of this p from 1 on: 1 for the sum of absolute values, 2 for the length.
    Power(u16),
}

impl Default for Norm {
    /// The length.
    fn default() -> Self {
        Norm::Power(2)
    }
}

impl Norm {
    /// What `vector` is divided by: 1 where all of it is 0.
    fn of(self, vector: &[f64]) -> f64 {
        let absolute = vector.iter().map(|x| x.abs());
        let norm = match self {
            Norm::None => 1.0,
            Norm::Max(to) => absolute.fold(0.0, f64::max) / f64::from(to),
            Norm::Power(1) => absolute.sum(),
            Norm::Power(2) => vector.iter().map(|x| x * x).sum::<f64>().sqrt(),
            Norm::Power(p) => {
                // Divided by the largest first: powers of it may be no f64.
                let most = absolute.clone().fold(f64::MIN_POSITIVE, f64::max);
                let p = f64::from(p);
                let sum: f64 = absolute.map(|x| (x / most).powf(p)).sum();
                most * sum.powf(1.0 / p)
            }
        };
        if norm > 0.0 { norm } else { 1.0 }
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
        let divisor = self.norm.of(&pooled);
        pooled.into_iter().map(|x| (x / divisor) as f32).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finished(vector: &[f64], norm: Norm, dimensions: Option<usize>) -> Vec<f32> {
        let embedding = Embedding {
            norm,
            dimensions,
            ..Embedding::default()
        };
        embedding.finish(vector.to_vec())
    }

    const LENGTH: Norm = Norm::Power(2);

    #[test]
    fn vectors_get_a_norm_of_one_after_they_are_cut() {
        assert_eq!(finished(&[3.0, -4.0], LENGTH, None), [0.6, -0.8]);
        assert_eq!(finished(&[3.0, -4.0, 12.0], LENGTH, Some(2)), [0.6, -0.8]);
        assert_eq!(
            finished(&[3.0, -4.0, 12.0], Norm::None, Some(2)),
            [3.0, -4.0]
        );
        // Squares of these are no f32.
        assert_eq!(finished(&[3e30, 4e30], LENGTH, None), [0.6, 0.8]);
        assert_eq!(finished(&[3e-40, 4e-40], LENGTH, None), [0.6, 0.8]);
    }

    #[test]
    fn norms_are_of_every_power_and_of_the_largest() {
        let vector = [3.0, -4.0, 1.0];
        assert_eq!(
            finished(&vector, Norm::Power(1), None),
            [0.375, -0.5, 0.125]
        );
        assert_eq!(
            finished(&vector, Norm::Max(32_760), None),
            [24_570.0, -32_760.0, 8_190.0]
        );
        let cubed = finished(&vector, Norm::Power(3), None);
        let sum: f64 = cubed.iter().map(|&x| f64::from(x).abs().powi(3)).sum();
        assert!((sum - 1.0).abs() < 1e-6, "{cubed:?}");
        // Powers of these are no f64.
        assert_eq!(
            finished(&[3.0, -5.0], Norm::Power(60_000), None),
            [0.6, -1.0]
        );
    }

    #[test]
    fn a_vector_of_zeros_stays_one() {
        for norm in [LENGTH, Norm::Power(1), Norm::Power(7), Norm::Max(9)] {
            assert_eq!(finished(&[0.0, -0.0], norm, None), [0.0, 0.0]);
            assert_eq!(finished(&[0.0, 5.0], norm, Some(1)), [0.0]);
        }
    }
}
