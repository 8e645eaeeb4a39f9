//! The pack buffer: a worker's memory for packing, kept from product to product.

use crate::memory::Region;

/// One stored row, unpacked: a code a byte, and the numbers that its scales and biases are.
#[derive(Default)]
pub(crate) struct UnpackedRow {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<f32>,
    pub(crate) biases: Vec<f32>,
    /// Numbers that scales and biases are products of.
    pub(crate) integers: [Vec<i8>; 2],
}

/// What one worker packs with.
#[derive(Default)]
pub(crate) struct PackBuffer {
    /// The rows of the panel that is packed.
    pub(crate) rows: [UnpackedRow; 16],
    /// Dequantized rows, `[16, cols]`.
    pub(crate) values: Vec<f32>,
    /// Packed panels of a matrix that stays in its file.
    pub(crate) panels: Option<Region>,
}

impl PackBuffer {
    /// At least `len` bytes for panels, taken out of the buffer to be put back by the caller.
    pub(crate) fn take(&mut self, len: usize) -> Region {
        let fits = |region: &Region| region.elements::<u8>().len() >= len;
        let old = self.panels.take().filter(fits);
        old.unwrap_or_else(|| Region::zeroed(len))
    }
}
