//! The convolutions of DFlash 2 around attention and feed-forward blocks: over a row and the one
//! before it in its block, with kernels that the row itself adds to.
//!
//! ```text
//! d      = h Wᵀ                                       [n, 2 · 2 · H/g]: sides, taps, groups of g columns
//! y_i    = (base_s0 + d_s0) x_i + (base_s1 + d_s1) x_{i-1}     x = 0 before a block
//! ```
//!
//! Side `s = 0` is applied to `h`, what goes into the sublayer, and `s = 1` to what comes out.

use crate::layers::Loader;
use crate::{ModelError, require};
use backend::{Activation, Backend, Matrix, Tensor};
use quant::{Scalar, Stored};
use std::sync::Arc;

/// Rows that a kernel is over.
const TAPS: usize = 2;

/// What convolutions of all layers have in common.
#[derive(Clone)]
pub(super) struct ConvShape {
    hidden: usize,
    groups: usize,
    /// A column's group, as a matrix of zeros and ones: `[H, groups]`.
    spread: Arc<Matrix>,
}

impl ConvShape {
    /// Convolutions of `taps` rows over `hidden` columns in groups of `size`.
    pub(super) fn new(
        b: &dyn Backend,
        hidden: usize,
        taps: usize,
        size: usize,
    ) -> Result<Self, ModelError> {
        if taps != TAPS {
            return Err(ModelError::Unsupported {
                feature: format!("a DFlash 2 head with conv_kernel_size {taps} (known is {TAPS})"),
            });
        }
        require(size > 0 && hidden.is_multiple_of(size), || {
            format!("hidden_size {hidden} is not whole groups of conv_group_size {size}")
        })?;
        let groups = hidden / size;
        let one = |i: usize| f32::from(u8::from(i / groups / size == i % groups));
        let spread: Vec<u8> = (0..hidden * groups)
            .flat_map(|i| one(i).to_le_bytes())
            .collect();
        let spread = Stored::plain(Scalar::F32, hidden, groups, &spread);
        Ok(ConvShape {
            hidden,
            groups,
            spread: Arc::new(b.matrix(&[spread])),
        })
    }
}

/// The convolutions before and after a sublayer.
pub(super) struct Convolution {
    shape: ConvShape,
    /// By side and tap, `[1, H]` each.
    base: Vec<Tensor>,
    projection: Matrix,
}

/// The rows before each row of some blocks.
pub(super) struct Before<'a> {
    /// Each row's number less one.
    pub(super) rows: &'a [usize],
    /// A gate that is shut for the first row of a block: `[n, 1]`.
    pub(super) gate: &'a Tensor,
}

/// `x y` by element, of equal shapes: `silu(x) y + silu(-x) (-y)`.
pub(super) fn product(b: &dyn Backend, x: Tensor, y: &Tensor) -> Tensor {
    let minus = |x: &Tensor| b.scale(b.columns(x, 0, x.cols()), -1.0);
    let second = b.glu(minus(&x), &minus(y), Activation::Silu);
    b.add(b.glu(x, y, Activation::Silu), &second)
}

impl Convolution {
    pub(super) fn load(at: &Loader<'_>, shape: &ConvShape) -> Result<Self, ModelError> {
        let (hidden, rows) = (shape.hidden, 2 * TAPS);
        let base = at.bare_values("base_kernel", rows, hidden)?;
        let base = base.chunks_exact(hidden);
        Ok(Convolution {
            shape: shape.clone(),
            base: base.map(|kernel| at.b.upload(1, hidden, kernel)).collect(),
            projection: at.matrix("kernel_projection", rows * shape.groups, hidden)?,
        })
    }

    /// `h: [n, H]` as it goes into the sublayer, and what the rows add to the kernels.
    pub(super) fn before(
        &self,
        b: &dyn Backend,
        h: &Tensor,
        rows: &Before<'_>,
    ) -> (Tensor, Tensor) {
        let added = b.matmul(h, &self.projection);
        (self.convolve(b, h, &added, 0, rows), added)
    }

    /// `y: [n, H]` as it comes out of the sublayer, with what [`Convolution::before`] gave.
    pub(super) fn after(
        &self,
        b: &dyn Backend,
        y: &Tensor,
        added: &Tensor,
        rows: &Before<'_>,
    ) -> Tensor {
        self.convolve(b, y, added, 1, rows)
    }

    fn convolve(
        &self,
        b: &dyn Backend,
        x: &Tensor,
        added: &Tensor,
        side: usize,
        rows: &Before<'_>,
    ) -> Tensor {
        let kernel = |tap: usize| {
            let (i, groups) = (side * TAPS + tap, self.shape.groups);
            let added = b.columns(added, i * groups, groups);
            b.affine(b.matmul(&added, &self.shape.spread), None, &self.base[i]) // [n, H]
        };
        let previous = b.gather(x, rows.rows);
        let previous = b.gate_rows(&previous, rows.gate, Activation::Sigmoid);
        b.add(product(b, kernel(0), x), &product(b, kernel(1), &previous))
    }
}
