//! What a GPU is asked to do for the end of a layer: `cargo run -p cuda --example launches`.
//!
//! Needs no GPU, for a dry run computes nothing; if there is one, its facts are shown too.

use backend::Backend;
use cuda::{Cuda, CudaOptions, DryRun};

fn main() {
    match Cuda::new(CudaOptions::default()) {
        Ok(gpu) => println!("{:#?}", gpu.facts()),
        Err(e) => println!("no GPU here: {e}"),
    }
    let cuda = Cuda::dry_run(DryRun::default());
    let b: &dyn Backend = &cuda;
    let (rows, hidden) = (1, 2560);
    let ones = |rows: usize| b.upload(rows, hidden, &vec![1.0; rows * hidden]);
    let (x, y, post, next) = (ones(rows), ones(rows), ones(1), ones(1));
    let w = cuda.random_matrix(10_240, hidden, &quant::BF16);
    cuda.take_launches();
    // x' = x + rms(y) post; z = (rms(x') next) wᵀ
    let x = b.add(b.rms_norm(&y, Some(&post), hidden, 1e-6), &x);
    let z = b.matmul(&b.rms_norm(&x, Some(&next), hidden, 1e-6), &w);
    println!("ops after fusion:");
    cuda.take_ops().iter().for_each(|op| println!("  {op}"));
    println!("launches:");
    cuda.take_launches()
        .iter()
        .for_each(|launch| println!("  {launch}"));
    drop((x, z));
}
