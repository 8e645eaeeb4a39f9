//! Graphics cards that are not here, for dry runs.

use backend::Batch;
use cache::{Memory, Sequence};
use cuda::DryRun;

/// A card.
#[derive(Clone, Copy, Debug)]
pub struct Card {
    /// What it is called.
    pub name: &'static str,
    /// What a dry run has to know of it.
    pub device: DryRun,
}

const fn card(
    name: &'static str,
    capability: (u32, u32),
    multiprocessors: usize,
    shared_kib: usize,
) -> Card {
    Card {
        name,
        device: DryRun {
            capability,
            multiprocessors,
            shared_memory: shared_kib << 10,
        },
    }
}

/// Cards of each compute capability that kernels are written for: multiprocessors, and KiB of shared
/// memory that a block can have, as the CUDA programming guide lists them.
pub const CARDS: &[Card] = &[
    card("A100", (8, 0), 108, 163),
    card("RTX 3090", (8, 6), 82, 99),
    card("RTX 3050", (8, 6), 20, 99),
    card("Jetson Orin", (8, 7), 16, 163),
    card("RTX 4090", (8, 9), 128, 99),
    card("H200", (9, 0), 132, 227),
    card("B200", (10, 0), 148, 227),
    card("RTX 5090", (12, 0), 170, 99),
    card("DGX Spark", (12, 1), 48, 99),
];

/// The batch of `n` rows of a new sequence, a prompt's if they are more than 16.
pub fn rows_of_step(memory: &mut Memory, n: usize) -> (Batch, Sequence) {
    let mut batch = Batch::default();
    let mut sequence = memory.open().unwrap();
    let tokens: Vec<u32> = (0..n as u32).map(|i| 1 + i % 32).collect();
    let certain = if n > 16 { n } else { 1 };
    memory
        .push(&mut batch, &mut sequence, &tokens, certain)
        .unwrap();
    (batch, sequence)
}
