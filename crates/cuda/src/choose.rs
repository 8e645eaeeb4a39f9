//! Tokens chosen where their logits are (kernels/choose.cu).

use crate::driver::{Args, Grid, two};
use crate::memory::address;
use crate::{Cuda, Kernel};
use backend::{Tensor, TokenChoice};

/// Threads of a row's block.
const THREADS: usize = 1024;

/// `TokenChoice` in kernels/choose.cu.
fn words(c: &TokenChoice) -> [u64; 4] {
    [
        c.seed,
        c.position,
        two(c.scale.to_bits() as usize, c.top_p.to_bits() as usize),
        two(c.ln_min_p.to_bits() as usize, c.top_k as usize),
    ]
}

pub(crate) fn choose_tokens(cuda: &Cuda, x: &Tensor, choices: &[TokenChoice]) -> Vec<u32> {
    let (rows, cols) = (x.rows(), x.cols());
    assert_eq!(choices.len(), rows, "a choice a row");
    let all: Vec<u64> = choices.iter().flat_map(words).collect();
    let all = cuda.arena.of(&all);
    // Tokens that a cut may go through, with what orders them.
    let cuts = |c: &TokenChoice| c.top_k > 0 || c.top_p < 1.0;
    let keys = if choices.iter().any(cuts) {
        8 * rows * cols
    } else {
        0
    };
    let keys = cuda.arena.buffer(keys);
    let chosen = cuda.arena.buffer(4 * rows);
    let args = Args::default()
        .ptr(address(x))
        .ptr(all.address)
        .ptr(keys.address)
        .ptr(chosen.address)
        .int(cols);
    let kernel = Kernel::new("choose", "choose_tokens");
    cuda.launch(&kernel, Grid::new(rows, THREADS), args);
    let mut found = vec![0u32; rows];
    cuda.driver.read(&mut found, chosen.address);
    found
}
