//! Tables, products and norms.

use super::{PRODUCT, SUM, close, fp8, fp8_noise, gpu, gpu_with, noise};
use crate::Cuda;
use backend::{Backend, NearAttention, Record, Reference, Store};
use quant::Scalar;

#[test]
fn gpu_tables_hold_what_they_were_given() {
    let Some(cuda) = gpu() else { return };
    // Of these, mxfp4 becomes f16.
    for name in [
        "f32",
        "f16",
        "bf16",
        "affine3-g32",
        "affine4-g64",
        "affine8-g128",
        "q4_0",
        "q5_1",
        "q4_k",
        "q6_k",
        "mxfp4",
        "tq3_1s",
        "tq4_1s",
    ] {
        let format = quant::format(name).unwrap();
        let (rows, cols) = (50, 512);
        let w = quant::encode(format, &noise(1, rows * cols), cols, Scalar::F16);
        let y = |b: &dyn Backend| b.embed(&b.matrix(&[w.view()]), &[0, 49, 17, 17, 8], 16.0);
        close(
            name,
            &cuda,
            &y(&cuda),
            &y(&Reference),
            // Scales or levels of more bits than f16 has.
            if ["q4_k", "q6_k", "mxfp4", "tq3_1s", "tq4_1s"].contains(&name) {
                PRODUCT
            } else {
                0.0
            },
        );
    }
    cuda.finish().unwrap();
}

#[test]
fn gpu_products_are_close_to_the_reference() {
    let Some(cuda) = gpu() else { return };
    // Each width of code and each kind of scale: a format takes seconds to compile.
    for name in [
        "f32",
        "f16",
        "bf16",
        "affine2-g64",
        "affine3-g32",
        "affine4-g32",
        "affine4-g64",
        "affine5-g128",
        "affine6-g64",
        "affine8-g32",
        "tq3_1s",
        "tq4_1s",
    ] {
        let format = quant::format(name).unwrap();
        for (rows, cols, n) in [
            (5, 128, 1),
            (100, 768, 3),
            (33, 4096, 8),
            (300, 1280, 17),
            (64, 9216, 40),
        ] {
            let cols = cols + if format.block == 1 { 7 } else { 0 };
            let w = quant::encode(format, &noise(1, rows * cols), cols, Scalar::Bf16);
            let x = noise(2, n * cols);
            let y = |b: &dyn Backend| b.matmul(&b.upload(n, cols, &x), &b.matrix(&[w.view()]));
            let what = format!("{} [{rows}, {cols}] by {n}", format.name);
            close(&what, &cuda, &y(&cuda), &y(&Reference), PRODUCT);
        }
    }
    cuda.finish().unwrap();
}

// Split by format: each takes minutes under compute-sanitizer.

#[test]
fn gpu_small_streamed_products_of_bf16_have_the_bits_of_simple_ones() {
    streamed_products_have_the_bits_of_simple_ones(&["bf16"]);
}

#[test]
fn gpu_small_streamed_products_of_4_bits_have_the_bits_of_simple_ones() {
    streamed_products_have_the_bits_of_simple_ones(&["affine4-g64"]);
}

#[test]
fn gpu_small_streamed_products_of_6_and_8_bits_have_the_bits_of_simple_ones() {
    streamed_products_have_the_bits_of_simple_ones(&["affine6-g64", "affine8-g32"]);
}

#[test]
fn gpu_small_streamed_products_of_5_bits_and_turbo_weights_have_the_bits_of_simple_ones() {
    streamed_products_have_the_bits_of_simple_ones(&["affine5-g32", "tq3_1s", "tq4_1s"]);
}

/// Compares the kernels that stream weights of `formats` through shared memory with the simple
/// ones for devices with little of it.
fn streamed_products_have_the_bits_of_simple_ones(formats: &[&str]) {
    // A GEMM takes its weights straight to registers where there is no shared memory to spare, and through shared memory
    // where there is just enough.
    let with = |shared| gpu_with(|driver| driver.shared = shared);
    let (Some(cuda), Some(simple), Some(medium)) = (gpu(), with(0), with(114 << 10)) else {
        return;
    };
    for &name in formats {
        let format = quant::format(name).unwrap();
        // Rows of tiles that blocks share unevenly, of three matrices; few and many slices.
        let mut shapes = vec![
            ([40, 5, 700], 192),
            ([2100, 40, 2300], 1088),
            ([4, 20, 900], 8256),
        ];
        // Enough weights for a GEMM of few rows: split into slices, and as many blocks of row tiles as a GPU has room for
        // besides.
        match name {
            "affine4-g64" => shapes.extend([
                ([4600, 40, 5], 8256),
                ([36_000, 700, 40], 1088),
                ([24_000, 700, 40], 1088),
            ]),
            "bf16" => shapes.extend([([1300, 40, 5], 8256), ([6400, 700, 40], 1088)]),
            // And for blocks of few rows that multiply several row tiles at once.
            "affine6-g64" | "affine8-g32" => shapes.push(([19_200, 700, 40], 1088)),
            _ => {}
        }
        for (rows, cols) in shapes {
            let stored =
                rows.map(|rows| quant::encode(format, &noise(1, rows * cols), cols, Scalar::Bf16));
            let mut widest: [Vec<f32>; 3] = Default::default();
            for n in [1, 3, 8, 9, 16, 20, 32, 33, 64, 200, 570] {
                let x = noise(2, n * cols);
                let y = |cuda: &Cuda| {
                    let b: &dyn Backend = cuda;
                    let w = stored.each_ref().map(|w| b.matrix(&[w.view()]));
                    let x = b.upload(n, cols, &x);
                    b.matmul_many(&x, w.each_ref())
                        .map(|y| b.download(&y).into_owned())
                };
                let made = y(&cuda);
                let what = format!("{name} {rows:?} by {cols}, {n} rows");
                assert!(made == y(&simple), "{what}");
                if n > 16 {
                    assert!(made == y(&medium), "{what}: weights through shared memory");
                }
                for (made, before) in made.iter().zip(&widest) {
                    assert!(made.starts_with(before), "{what}: those of fewer");
                }
                widest = made;
            }
        }
    }
    cuda.finish().unwrap();
    simple.finish().unwrap();
}

/// Floats of 8 bits, which others write: products of any kind and looked up rows.
#[test]
fn gpu_small_products_of_e4m3_are_close_to_the_reference() {
    let (Some(cuda), Some(simple)) = (gpu(), gpu_with(|driver| driver.shared = 0)) else {
        return;
    };
    for (tile, rows, cols) in [(32, 100, 352), (128, 40, 4096), (8320, 33, 8320)] {
        let [codes, scales] = fp8_noise(1, [rows, cols], tile);
        let w = fp8(rows, cols, tile, &codes, &scales);
        for n in [1, 3, 8, 9, 40] {
            let x = noise(2, n * cols);
            let y = |b: &dyn Backend| b.matmul(&b.upload(n, cols, &x), &b.matrix(&[w]));
            let what = format!("[{rows}, {cols}] by {n}");
            close(&what, &cuda, &y(&cuda), &y(&Reference), PRODUCT);
            assert!(
                cuda.download(&y(&cuda)) == simple.download(&y(&simple)),
                "{what}"
            );
        }
        let ids = [0, 17, 31, 2];
        // Of scales with no more bits than f16 has.
        let short = |s: &[u8]| [0, 0, s[2], s[3]];
        let scales: Vec<u8> = scales.chunks(4).flat_map(short).collect();
        let table = fp8(rows, cols, tile, &codes, &scales);
        let y = |b: &dyn Backend| b.embed(&b.matrix(&[table]), &ids, 1.0);
        close("rows", &cuda, &y(&cuda), &y(&Reference), 0.0);
        let x = noise(4, cols);
        let chosen = |b: &dyn Backend| {
            b.matmul_rows(&b.upload(1, cols, &x), &b.matrix(&[w]), &[ids.to_vec()])
        };
        close(
            "chosen",
            &cuda,
            &chosen(&cuda),
            &chosen(&Reference),
            PRODUCT,
        );
    }
    cuda.finish().unwrap();
    simple.finish().unwrap();
}

#[test]
fn gpu_norms_are_close_to_the_reference() {
    let Some(cuda) = gpu() else { return };
    for (width, runs) in [(1, 3), (128, 5), (5376, 1)] {
        let x = noise(3, 4 * runs * width);
        let weight = noise(4, width);
        let y = |b: &dyn Backend| {
            let weight = b.upload(1, width, &weight);
            b.rms_norm(&b.upload(4, runs * width, &x), Some(&weight), width, 1e-6)
        };
        close("rms_norm", &cuda, &y(&cuda), &y(&Reference), SUM);
    }
    for cols in [1, 128, 1152, 6912] {
        let x = noise(3, 4 * cols);
        let (weight, bias) = (noise(4, cols), noise(5, cols));
        let y = |b: &dyn Backend| {
            let (weight, bias) = (b.upload(1, cols, &weight), b.upload(1, cols, &bias));
            b.layer_norm(&b.upload(4, cols, &x), &weight, &bias, 1e-6)
        };
        close("layer_norm", &cuda, &y(&cuda), &y(&Reference), SUM);
    }
    cuda.finish().unwrap();
}

#[test]
fn gpu_attention_to_near_rows_is_close_to_the_reference() {
    let Some(cuda) = gpu() else { return };
    for (heads, head_dim, window, n) in [
        (1, 5, 1, 3),
        (2, 16, 3, 9),
        (8, 128, 12, 40),
        (3, 80, 32, 70),
    ] {
        let (cols, cap) = (heads * head_dim, 50.0);
        let attention = NearAttention { heads, window, cap };
        let [q, k, v] = [6, 7, 8].map(|seed| noise(seed, n * cols));
        let relative = noise(9, window * cols);
        let y = |b: &dyn Backend| {
            let [q, k, v] = [&q, &k, &v].map(|x| b.upload(n, cols, x));
            let relative = b.upload(window, cols, &relative);
            b.attend_near(&q, &k, &v, &relative, &attention)
        };
        close("attend_near", &cuda, &y(&cuda), &y(&Reference), SUM);
    }
    cuda.finish().unwrap();
}
