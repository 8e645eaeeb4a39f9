//! What a request takes beside the weights.

use crate::Model;
use cache::{KeptSize, Memory, MemorySize};

/// Bytes that one request's KV cache and recurrent state take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestBytes {
    /// Bytes of the target's.
    pub target: u64,
    /// Bytes of the drafter's, 0 where it has none.
    pub drafter: u64,
}

impl Model {
    /// What one request of `context` tokens takes, alone on this model.
    pub fn request_bytes(&self, context: usize) -> RequestBytes {
        let size = MemorySize {
            sequences: 1,
            context,
            step_rows: self.chunk,
            kv_format: self.speculator.memory().size().kv_format,
            running_pages: None,
            kept: KeptSize::default(),
        };
        let mut bytes = self.plans.iter().map(|p| Memory::bytes(p, &size) as u64);
        RequestBytes {
            target: bytes.next().unwrap_or(0),
            drafter: bytes.sum(),
        }
    }
}
