//! What one worker packs with.

use crate::memory::Region;

/// One row taken apart, and put together for a panel.
#[derive(Default)]
pub(crate) struct RowParts {
    pub(crate) codes: Vec<u8>,
    pub(crate) scales: Vec<f32>,
    pub(crate) biases: Vec<f32>,
    pub(crate) integers: [Vec<i8>; 2],
}

/// What one worker packs with.
#[derive(Default)]
pub(crate) struct Room {
    pub(crate) rows: [RowParts; 16],
    pub(crate) values: Vec<f32>,
    pub(crate) panels: Option<Region>,
}

impl Room {
    /// Room for `len` bytes of panels, taken out to be put back.
    pub(crate) fn take(&mut self, len: usize) -> Region {
        let fits = |region: &Region| region.of::<u8>().len() >= len;
        let old = self.panels.take().filter(fits);
        old.unwrap_or_else(|| Region::zeroed(len))
    }
}
