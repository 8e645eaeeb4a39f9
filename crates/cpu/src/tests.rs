//! The conformance suite on every instruction set and several thread counts.

use crate::arch::Detected;
use crate::device::Device;
use crate::{Activations, Cpu, CpuError, CpuOptions, Isa, dot_int8};
use backend::{
    Activation, Attention, Backend, Batch, Delta, DeltaSpec, DeltaWeights, DeviceError, Kv, KvSpec,
    Matrix, NearAttention, Ops, Record, Reference, Rope, Sample, Store, Tensor, conformance,
};
use quant::{Format, Mapping, Owned, Scalar, Stored, WeightLayout, Zero};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

/// Calls `check` for each instruction set and way of multiplying bytes that this CPU has, and for
/// several numbers of threads.
fn each(activations: Activations, check: impl Fn(&Cpu)) {
    for isa in Isa::available() {
        let variants = Detected::variants(isa);
        let last = variants.len() - 1;
        for (i, variant) in variants.into_iter().enumerate() {
            // Older ways of multiplying bytes change products only.
            let threads: &[usize] = if i == last { &[1, 2, 3] } else { &[2] };
            for &threads in threads {
                let device = Device::with(variant, threads, activations);
                device.pool.share_matrices(threads == 3);
                check(&Cpu::on(device));
            }
        }
    }
}

#[test]
fn every_op_has_the_bits_of_the_reference() {
    // The reference is slow. What has the bits of one that has its bits, in the same cases, has them too.
    let best = *Isa::available().last().expect("the portable one");
    let variants = Detected::variants(best);
    let variant = *variants.last().expect("a way to multiply bytes");
    let fast = Cpu::on(Device::with(variant, 2, Activations::F32));
    conformance::check_bits_equal_reference(&fast);
    each(Activations::F32, |cpu| {
        conformance::check_bits_equal(cpu, &fast);
    });
}

#[test]
fn products_of_rounded_activations_have_the_bits_of_their_definition() {
    each(Activations::Int8, |cpu| {
        for (_, case) in conformance::EQUAL_CASES
            .iter()
            .filter(|(name, _)| ["embed", "matmul", "matmul_rows", "moe"].contains(name))
        {
            case(cpu, &Int8Reference);
        }
    });
}

/// 19 random rows of `format`: encoded random values, or, where nothing encodes the format, random
/// bytes of which no number is NaN or infinite.
pub(crate) fn noise(format: &'static Format, cols: usize) -> Owned {
    let mut state = 9u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(3);
        (state >> 33) as u32
    };
    if format.can_encode() {
        let values: Vec<f32> = (0..19 * cols)
            .map(|_| next() as f32 / 2f32.powi(30) - 1.0)
            .collect();
        return quant::encode(format, &values, cols, Scalar::Bf16);
    }
    let codes = (0..19 * format.code_bytes(cols)).map(|_| next() as u8 & 0x77);
    Owned {
        format,
        rows: 19,
        cols,
        scale: Scalar::F32,
        codes: codes.collect(),
        scales: Vec::new(),
        biases: Vec::new(),
        width: 0,
        factors: Vec::new(),
    }
}

/// Formats of which [`noise`] can be made, as one matrix in blocks or by encoding.
pub(crate) fn noisy() -> impl Iterator<Item = &'static Format> {
    let formats = quant::FORMATS.iter().copied().flatten();
    formats.filter(|f| matches!(f.layout, WeightLayout::Block { .. }) || f.can_encode())
}

#[test]
fn products_of_every_format_are_those_of_its_definition_for_any_number_of_rows() {
    let formats = noisy().filter(|format| format.codes().is_some());
    // Several parts of a row, the last one shorter, more rows than are kept under way
    // at once, and for few of them as many panels as are read at once and one.
    for (i, format) in formats.enumerate() {
        let cols = 640usize.next_multiple_of(format.block);
        let w = noise(format, cols);
        let most = if i % 8 == 0 { 300 } else { 40 };
        let rows = [1, 2, 3, 4, 7, 8, 9, 12, 16, 20, 33, most];
        let x: Vec<f32> = (0..most * cols)
            .map(|i| ((i * 7919 % 2003) as f32 - 1001.0) / 700.0)
            .collect();
        let want: Vec<f32> = x
            .chunks_exact(cols)
            .flat_map(|x| {
                (0..19)
                    .map(|row| dot_int8(format, w.view().row(row), x))
                    .collect::<Vec<_>>()
            })
            .collect();
        for isa in Isa::available() {
            for variant in Detected::variants(isa) {
                let cpu = Cpu::on(Device::with(variant, 1, Activations::Int8));
                let matrices = [1, 4].map(|parts| cpu.matrix(&vec![w.view(); parts]));
                for n in rows.into_iter().filter(|&n| n < 64 || isa != Isa::Scalar) {
                    let x = cpu.upload(n, cols, &x[..n * cols]);
                    let (w, parts) = match n {
                        ..=20 => (&matrices[1], 4),
                        _ => (&matrices[0], 1),
                    };
                    let y = (&cpu as &dyn Backend).matmul(&x, w);
                    let want = want
                        .chunks_exact(19)
                        .flat_map(|row| std::iter::repeat_n(row, parts));
                    let same = cpu
                        .download(&y)
                        .iter()
                        .zip(want.flatten())
                        .all(|(a, b)| a.to_bits() == b.to_bits());
                    assert!(same, "{} for {n} rows on {variant:?}", format.name);
                }
            }
        }
    }
}

/// How far a product of rounded activations may be from the exact one with decoded weights, where
/// columns are rotated:
///
/// ```text
/// Σ_g scale_g Σ_c |step level[c] − W[c]| |R x|_c + |level[c]| d_g / 2
/// ```
///
/// what integer levels are off, and what activations are rounded by; and the rounding of sums.
#[test]
fn products_of_rotated_columns_are_near_those_of_decoded_weights() {
    let rotated = noisy().filter(|f| f.codes().is_some_and(|c| c.rotated.is_some()));
    let mut seen = 0;
    for format in rotated {
        let (cols, view) = (640, format.codes().unwrap());
        let turned = view.rotated.unwrap();
        let Zero::Levels(levels) = view.zero else {
            panic!("levels");
        };
        let w = noise(format, cols);
        let values = w.view().to_f32();
        for seed in [7919, 104_729, 31] {
            let x: Vec<f32> = (0..cols)
                .map(|i| ((i * seed % 2003) as f32 - 1001.0) / 700.0)
                .collect();
            let mut steps = x.clone();
            let blocks = steps.as_chunks_mut().0;
            blocks.iter_mut().for_each(|x| turned.turn(x));
            for row in 0..19 {
                let of_row = &values[row * cols..][..cols];
                let exact: f64 = of_row
                    .iter()
                    .zip(&x)
                    .map(|(&w, &x)| f64::from(w) * f64::from(x))
                    .sum();
                let (mut codes, mut scales) = (vec![0; cols], vec![0.0; cols / 16]);
                let mut biases = scales.clone();
                format.unpack(w.view().row(row), &mut codes, &mut scales, &mut biases);
                let (mut bound, mut size) = (0.0, 0.0);
                for (g, x) in steps.chunks_exact(16).enumerate() {
                    let d = x.iter().fold(0.0f32, |top, x| top.max(x.abs())) / 127.0;
                    for (x, &code) in x.iter().zip(&codes[16 * g..]) {
                        let code = usize::from(code);
                        let level = f32::from(levels[code]);
                        let off = (level - turned.levels[code] / turned.step).abs();
                        bound +=
                            f64::from(scales[g].abs() * (off * x.abs() + level.abs() * d / 2.0));
                        size += f64::from((scales[g] * level * x).abs());
                    }
                }
                let got = f64::from(dot_int8(format, w.view().row(row), &x));
                let far = (got - exact).abs();
                assert!(
                    far <= bound + 1e-5 * size,
                    "{}: {far} > {bound}",
                    format.name
                );
                // The bound is no larger than a twentieth of what is added.
                assert!(bound < size / 20.0, "{}: {bound} of {size}", format.name);
                seen += 1;
            }
        }
    }
    assert_eq!(seen, 2 * 3 * 19);
}

/// The bytes of a matrix in memory are those of its file.
#[test]
fn rotated_columns_are_kept_at_their_packed_size() {
    let cpu = Cpu::on(Device::with(
        *Detected::variants(Isa::Scalar).last().unwrap(),
        1,
        Activations::Int8,
    ));
    for (name, bits) in [("tq3_1s", 4), ("tq4_1s", 5)] {
        let format = quant::format(name).unwrap();
        let w = quant::encode(format, &[0.5; 32 * 640], 640, Scalar::F32);
        let matrix = cpu.matrix(&[w.view()]);
        assert_eq!(
            (matrix.bytes, w.codes.len()),
            (32 * 640 * bits / 8, 32 * 640 * bits / 8)
        );
    }
}

#[test]
fn a_row_that_is_not_finite_stays_so_and_touches_no_other() {
    let formats = noisy().filter(|format| format.codes().is_some());
    for (i, format) in formats.enumerate() {
        let cols = 640usize.next_multiple_of(format.block);
        let w = noise(format, cols);
        let odd = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY][i % 3];
        for isa in Isa::available() {
            for variant in Detected::variants(isa) {
                let cpu = Cpu::on(Device::with(variant, 2, Activations::Int8));
                let matrix = cpu.matrix(&[w.view()]);
                for n in [1, 2, 4, 9, 17] {
                    let sound: Vec<f32> = (0..n * cols)
                        .map(|i| ((i * 7919 % 2003) as f32 - 1001.0) / 700.0)
                        .collect();
                    let mut damaged = sound.clone();
                    let at = n / 2;
                    damaged[at * cols + (i * 37 + n) % cols] = odd;
                    let product = |x: &[f32]| {
                        let y = (&cpu as &dyn Backend).matmul(&cpu.upload(n, cols, x), &matrix);
                        cpu.download(&y).into_owned()
                    };
                    let (sound, damaged) = (product(&sound), product(&damaged));
                    for (row, (sound, damaged)) in
                        sound.chunks(19).zip(damaged.chunks(19)).enumerate()
                    {
                        let case = format!("{} row {row} of {n} on {variant:?}", format.name);
                        if row == at {
                            assert!(damaged.iter().all(|y| y.is_nan()), "{case}");
                        } else {
                            assert_eq!(sound, damaged, "{case}");
                        }
                    }
                }
            }
        }
    }
}

/// A file in memory, in which matrices stay.
#[derive(Debug)]
struct File(Vec<u8>);

impl Mapping for File {
    fn bytes(&self) -> &[u8] {
        &self.0
    }
    fn release(&self, _: Range<usize>) {}
    fn stays(&self) -> bool {
        true
    }
    fn stay(&self, _: bool) {}
}

#[test]
fn matrices_that_stay_in_their_file_give_the_bits_of_packed_ones() {
    for format in noisy() {
        let cols = 320usize.next_multiple_of(format.block);
        let owned = noise(format, cols);
        // At an odd place, as headers leave it.
        let mut bytes = vec![0; 3];
        let mut put = |part: &[u8]| {
            bytes.extend(part);
            bytes.len() - part.len()..bytes.len()
        };
        let parts = [&owned.codes, &owned.scales, &owned.biases].map(|p| put(p));
        let file: Arc<dyn Mapping> = Arc::new(File(bytes));
        let [codes, scales, biases] = parts.map(|part| &file.bytes()[part]);
        let stored = Stored {
            codes,
            scales,
            biases,
            mapping: Some(&file),
            ..owned.view()
        };
        let x: Vec<f32> = (0..40 * cols)
            .map(|i| ((i * 7919 % 2003) as f32 - 1001.0) / 700.0)
            .collect();
        let ids = [
            vec![3, 18, 3, 7, 0],
            vec![16, 17, 18, 1, 2],
            (0..5).collect(),
        ];
        for isa in Isa::available() {
            for activations in [Activations::Int8, Activations::F32] {
                let cpu = Cpu::on(Device::with(Detected::new(isa).unwrap(), 2, activations));
                let packed = cpu.matrix(&[owned.view(), owned.view()]);
                assert_eq!(cpu.left_in_files(), 0);
                let mapped = cpu.matrix(&[stored, stored.slice(0..5), stored.slice(5..19)]);
                assert_eq!((mapped.rows, mapped.bytes), (packed.rows, 0));
                assert_eq!(cpu.left_in_files(), packed.bytes as u64);
                for n in [1, 2, 5, 8, 17, 40] {
                    let x = cpu.upload(n, cols, &x[..n * cols]);
                    let y = [&packed, &mapped].map(|w| {
                        let tokens: Vec<u32> = (0..n as u32).map(|i| i * 7 % 38).collect();
                        let ids: Vec<_> = (0..n).map(|i| ids[i % 3].clone()).collect();
                        [
                            (&cpu as &dyn Backend).matmul(&x, w),
                            cpu.matmul_rows(&x, w, &ids),
                            cpu.embed(w, &tokens, 0.3),
                        ]
                    });
                    let bits = |y: &Tensor| -> Vec<u32> {
                        cpu.download(y).iter().map(|y| y.to_bits()).collect()
                    };
                    let [packed, mapped] = y.each_ref().map(|y| y.each_ref().map(bits));
                    let name = format.name;
                    assert!(
                        packed == mapped,
                        "{name}, {n} rows, {isa:?} {activations:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn no_row_depends_on_its_company() {
    each(Activations::Int8, |cpu| {
        conformance::check_row_invariance(cpu);
    });
}

#[test]
fn what_this_cpu_lacks_is_an_error() {
    let wanted = if cfg!(target_arch = "aarch64") {
        Isa::Avx512
    } else {
        Isa::Neon
    };
    let error = Cpu::new(CpuOptions {
        isa: Some(wanted),
        ..CpuOptions::default()
    })
    .err();
    assert!(
        matches!(error, Some(CpuError::MissingIsa { .. })),
        "{error:?}"
    );
}

/// The reference backend, but with [`dot_int8`] for products with matrices of one quantized
/// format.
struct Int8Reference;

/// A matrix of [`Int8Reference`]: the reference's own, and the stored rows if they are quantized.
struct Both {
    plain: Matrix,
    coded: Option<Vec<Owned>>,
}

impl Both {
    fn dot(&self, x: &[f32], row: usize) -> f32 {
        let mut row = row;
        for part in self.coded.as_ref().expect("a quantized matrix") {
            if row < part.rows {
                return dot_int8(part.format, part.view().row(row), x);
            }
            row -= part.rows;
        }
        unreachable!("a row of some part")
    }
}

impl Backend for Int8Reference {
    fn name(&self) -> String {
        "reference with rounded activations".into()
    }
}

impl Store for Int8Reference {
    fn matrix(&self, parts: &[Stored<'_>]) -> Matrix {
        let plain = Reference.matrix(parts);
        let format = parts[0].format;
        let coded = format.codes().is_some() && parts.iter().all(|p| p.format == format);
        let coded = coded.then(|| parts.iter().map(|p| Owned::gather(p, 0..p.rows)).collect());
        let (rows, cols, format, bytes) = (plain.rows, plain.cols, plain.format, plain.bytes);
        Matrix::new(rows, cols, format, bytes, Box::new(Both { plain, coded }))
    }
    fn upload(&self, rows: usize, cols: usize, values: &[f32]) -> Tensor {
        Reference.upload(rows, cols, values)
    }
    fn download<'a>(&self, x: &'a Tensor) -> Cow<'a, [f32]> {
        Reference.download(x)
    }
    fn kv(&self, spec: KvSpec) -> Kv {
        Reference.kv(spec)
    }
    fn delta(&self, spec: DeltaSpec) -> Delta {
        Reference.delta(spec)
    }
    fn kv_copy(&self, kv: &mut Kv, from: usize, to: usize) {
        Reference.kv_copy(kv, from, to);
    }
    fn kv_save(&self, kv: &Kv, page: usize) -> Vec<u8> {
        Reference.kv_save(kv, page)
    }
    fn kv_load(&self, kv: &mut Kv, page: usize, bytes: &[u8]) -> bool {
        Reference.kv_load(kv, page, bytes)
    }
    fn delta_copy(&self, delta: &mut Delta, from: usize, to: usize) {
        Reference.delta_copy(delta, from, to);
    }
    fn delta_save(&self, delta: &Delta, slot: usize) -> Vec<u8> {
        Reference.delta_save(delta, slot)
    }
    fn delta_load(&self, delta: &mut Delta, slot: usize, bytes: &[u8]) -> bool {
        Reference.delta_load(delta, slot, bytes)
    }
    fn scratch(&self, rows: usize, cols: usize) -> Tensor {
        Reference.scratch(rows, cols)
    }
}

impl Ops for Int8Reference {
    fn embed(&self, table: &Matrix, tokens: &[u32], scale: f32) -> Tensor {
        Reference.embed(&table.storage::<Both>().plain, tokens, scale)
    }
    fn replace_rows(&self, x: Tensor, with: &Tensor, source: u32, batch: &Batch) -> Tensor {
        Reference.replace_rows(x, with, source, batch)
    }
    fn matmul_into(&self, x: &Tensor, w: &[&Matrix], y: &mut [Tensor]) {
        for (w, y) in w.iter().zip(y) {
            let both = w.storage::<Both>();
            if both.coded.is_none() {
                Reference.matmul_into(x, &[&both.plain], std::slice::from_mut(y));
                continue;
            }
            let out = y.storage_mut::<Vec<f32>>();
            let x = Reference.download(x);
            for (x, y) in x.chunks_exact(w.cols).zip(out.chunks_exact_mut(w.rows)) {
                for (row, y) in y.iter_mut().enumerate() {
                    *y = both.dot(x, row);
                }
            }
        }
    }
    fn matmul_rows(&self, x: &Tensor, w: &Matrix, ids: &[Vec<u32>]) -> Tensor {
        let both = w.storage::<Both>();
        if both.coded.is_none() {
            return Reference.matmul_rows(x, &both.plain, ids);
        }
        let values = Reference.download(x);
        let rows = values.chunks_exact(w.cols).zip(ids);
        let y: Vec<f32> = rows
            .flat_map(|(x, ids)| ids.iter().map(|&id| both.dot(x, id as usize)))
            .collect();
        Reference.upload(x.rows(), ids.first().map_or(0, Vec::len), &y)
    }
    fn rms_norm(&self, x: &Tensor, weight: Option<&Tensor>, width: usize, eps: f32) -> Tensor {
        Reference.rms_norm(x, weight, width, eps)
    }
    fn layer_norm(&self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f32) -> Tensor {
        Reference.layer_norm(x, weight, bias, eps)
    }
    fn affine(&self, x: Tensor, factor: Option<&Tensor>, shift: &Tensor) -> Tensor {
        Reference.affine(x, factor, shift)
    }
    fn activate(&self, x: Tensor, activation: Activation) -> Tensor {
        Reference.activate(x, activation)
    }
    fn clamp(&self, x: Tensor, low: f32, high: f32) -> Tensor {
        Reference.clamp(x, low, high)
    }
    fn add(&self, x: Tensor, y: &Tensor) -> Tensor {
        Reference.add(x, y)
    }
    fn scale(&self, x: Tensor, factor: f32) -> Tensor {
        Reference.scale(x, factor)
    }
    fn glu(&self, gate: Tensor, x: &Tensor, activation: Activation) -> Tensor {
        Reference.glu(gate, x, activation)
    }
    fn softcap(&self, x: Tensor, cap: f32) -> Tensor {
        Reference.softcap(x, cap)
    }
    fn gather(&self, x: &Tensor, rows: &[usize]) -> Tensor {
        Reference.gather(x, rows)
    }
    fn columns(&self, x: &Tensor, first: usize, cols: usize) -> Tensor {
        Reference.columns(x, first, cols)
    }
    fn concat(&self, a: &Tensor, b: &Tensor) -> Tensor {
        Reference.concat(a, b)
    }
    fn rope(&self, x: Tensor, rope: &Rope, batch: &Batch) -> Tensor {
        Reference.rope(x, rope, batch)
    }
    fn kv_append(&self, kv: &mut Kv, k: &Tensor, v: &Tensor, group: usize, batch: &Batch) {
        Reference.kv_append(kv, k, v, group, batch);
    }
    fn attend(&self, q: &Tensor, kv: &Kv, attention: &Attention, batch: &Batch) -> Tensor {
        Reference.attend(q, kv, attention, batch)
    }
    fn attend_near(
        &self,
        q: &Tensor,
        k: &Tensor,
        v: &Tensor,
        relative: &Tensor,
        attention: &NearAttention,
    ) -> Tensor {
        Reference.attend_near(q, k, v, relative, attention)
    }
    fn gated_delta(
        &self,
        state: &mut Delta,
        weights: &DeltaWeights,
        qkv: &Tensor,
        b: &Tensor,
        a: &Tensor,
        batch: &Batch,
    ) -> Tensor {
        Reference.gated_delta(state, weights, qkv, b, a, batch)
    }
}

impl Sample for Int8Reference {
    fn argmax(&self, x: &Tensor) -> Vec<u32> {
        Reference.argmax(x)
    }
}

impl Record for Int8Reference {
    fn finish(&self) -> Result<(), DeviceError> {
        Reference.finish()
    }
}
