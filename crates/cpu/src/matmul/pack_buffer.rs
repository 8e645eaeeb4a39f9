//! What one worker packs with.

use crate::memory::Region;

/// One row taken apart, and put together for a panel.
#[derive(Default)]
pub(crate) struct UnpackedRow {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<f32>,
    pub(crate) biases: Vec<f32>,
    pub(crate) integers: [Vec<i8>; 2],
}

/// What one worker packs with.
#[derive(Default)]
pub(crate) struct PackBuffer {
    pub(crate) rows: [UnpackedRow; 16],
    pub(crate) values: Vec<f32>,
    pub(crate) panels: Option<Region>,
}

impl PackBuffer {
    /// PackBuffer for `len` bytes of panels, taken out to be put back.
    pub(crate) fn take(&mut self, len: usize) -> Region {
        let fits = |region: &Region| region.of::<u8>().len() >= len;
        let old = self.panels.take().filter(fits);
        old.unwrap_or_else(|| Region::zeroed(len))
    }
}
