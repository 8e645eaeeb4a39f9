//! The end of a layer before and after fusion: `cargo run -p fusion --example fuse`.

use fusion::{Device, Kind, OpList, Operand, fuse};

/// A GPU that keeps rows of 6144 columns in registers and multiplies in f16.
struct Gpu;

impl Device for Gpu {
    fn row_width(&self) -> usize {
        6144
    }
    fn head_width(&self) -> usize {
        512
    }
    fn f16_tile(&self) -> usize {
        64
    }
    fn reads_f16(&self, _weights: Operand) -> bool {
        true
    }
    fn gates_beside_experts(&self, rows: usize) -> bool {
        rows <= 16
    }
    fn joins_experts(&self, _: Operand, _: usize, _: Operand, _: usize) -> bool {
        false
    }
    fn projects_gates(&self, _: Operand, _: Operand, _: usize) -> bool {
        false
    }
}

fn main() {
    // x' = (x + rms(y) post) 0.5; h = rms(x') next; z = h wᵀ
    let mut list = OpList::default();
    let [x, y] = [list.value(1, 2560), list.value(1, 2560)];
    let [post, next] = [list.value(1, 2560), list.value(1, 2560)];
    let norm = Kind::RmsNorm {
        width: 2560,
        eps: 1e-6,
        is_weighted: true,
    };
    let normed = list.make(norm.clone(), &[y, post], 1, 2560);
    let sum = list.make(Kind::Add, &[normed, x], 1, 2560);
    let sum = list.make(Kind::Scale { factor: 0.5 }, &[sum], 1, 2560);
    let h = list.make(norm, &[sum, next], 1, 2560);
    let weights = vec![Operand(0)];
    let z = list.make(Kind::Product { weights }, &[h], 1, 10_240);
    list.keep(sum);
    list.keep(z);
    println!("as the model writes it:\n{list}");
    let applied = fuse(&mut list, &Gpu);
    println!("as it is launched:\n{list}");
    println!("rules: {}", applied.join(", "));
}
