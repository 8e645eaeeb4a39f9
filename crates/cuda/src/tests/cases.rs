//! The conformance suite, and small cases of every kernel.

use super::attention::{AttentionCase, format_of};
use super::delta::delta_steps;
use super::experts::mixture;
use super::{PRODUCT, close, compile_ahead, gpu, noise};
use crate::EQUAL_OPS;
use backend::{Backend, Record, Reference, conformance};
use quant::Scalar;

#[test]
fn gpu_ops_without_long_sums_have_the_bits_of_the_reference() {
    let Some(cuda) = gpu() else { return };
    for (name, case) in conformance::EQUAL_CASES {
        if EQUAL_OPS.contains(name) {
            case(&cuda, &Reference);
        }
    }
    cuda.finish().unwrap();
}

#[test]
fn gpu_rows_do_not_depend_on_their_company() {
    let Some(cuda) = gpu() else { return };
    // Cases that need not look at what comes out.
    let ahead = conformance::INVARIANCE_CASES.iter();
    let ahead = ahead.filter(|(name, _)| ["attend", "matmul", "moe"].contains(name));
    compile_ahead(&cuda, |dry| ahead.clone().for_each(|(_, case)| case(dry)));
    conformance::check_row_invariance(&cuda);
}

/// Small enough for the tools that watch every access; also close to the reference.
#[test]
fn gpu_small_cases_of_every_kernel_are_close_to_the_reference() {
    let Some(cuda) = gpu() else { return };
    for name in ["affine4-g64", "affine5-g32", "affine8-g64", "bf16", "f32"] {
        let format = quant::format(name).unwrap();
        for n in [1, 3, 12, 40] {
            let (rows, cols) = (70, 320);
            let w = quant::encode(format, &noise(1, rows * cols), cols, Scalar::F16);
            let x = noise(2, n * cols);
            let y = |b: &dyn Backend| b.matmul(&b.upload(n, cols, &x), &b.matrix(&[w.view()]));
            close(
                &format!("{name} by {n}"),
                &cuda,
                &y(&cuda),
                &y(&Reference),
                PRODUCT,
            );
        }
        for n in [1, 4, 8, 40, 100] {
            let (got, want) = (mixture(&cuda, format, n), mixture(&Reference, format, n));
            close(
                &format!("experts in {name}, {n} rows"),
                &cuda,
                &got,
                &want,
                2.0 * PRODUCT,
            );
        }
    }
    let delta = [delta_steps(&cuda), delta_steps(&Reference)];
    close("delta rule", &cuda, &delta[0][0], &delta[1][0], 2e-5);
    let heads = AttentionCase {
        heads: 4,
        kv_heads: 2,
        head_dim: 64,
        window: Some(100),
    };
    let long = AttentionCase {
        heads: 8,
        kv_heads: 1,
        head_dim: 256,
        window: None,
    };
    for format in ["bf16", "q8_0", "q8_0,turbo4", "turbo3,q5_0", "rot-q4_0,f32"] {
        let format = format_of(format);
        for (old, new) in [(0, 70), (300, 3)] {
            heads.check(&cuda, old, new, format);
        }
        for (old, new) in [(0, 70), (2100, 1), (2100, 3)] {
            long.check(&cuda, old, new, format);
        }
    }
    cuda.finish().unwrap();
}
