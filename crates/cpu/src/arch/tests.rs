//! Every instruction set against the definition, bit by bit.

use super::*;
use backend::math::{self, Float};
use half::{bf16, f16};

/// Values of every kind: signs, zeros, subnormals, infinities, NaN.
fn samples() -> Vec<[f32; 16]> {
    let mut seed = 7u64;
    let mut out: Vec<[f32; 16]> = (0..4000)
        .map(|i| {
            std::array::from_fn(|_| {
                seed = seed
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                let bits = (seed >> 32) as u32;
                if i % 2 == 0 {
                    f32::from_bits(bits)
                } else {
                    (bits as i32 as f32) / 2f32.powi(20 + i % 17)
                }
            })
        })
        .collect();
    out.push([
        0.0,
        -0.0,
        1.0,
        -1.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::NAN,
        1e-45,
        -1e-45,
        65504.0,
        65520.0,
        0.5,
        1.5,
        2.5,
        88.0,
        -87.0,
    ]);
    let mut rotated = *out.last().unwrap();
    rotated.rotate_left(1);
    out.push(rotated);
    out
}

/// Computes every function of [`Lanes`] on one pair of samples.
struct All<'a>(&'a [f32; 16], &'a [f32; 16]);
impl Kernel for All<'_> {
    type Output = Vec<(&'static str, [f32; 16])>;
    #[inline(always)]
    fn run<L: Lanes>(self) -> Self::Output {
        let (a, b) = (L::load(self.0), L::load(self.1));
        let mut half = [f16::ZERO; 16];
        a.store_f16(&mut half);
        let mut brain = [bf16::ZERO; 16];
        a.store_bf16(&mut brain);
        let finite = a.maximum(L::splat(-100.0)).minimum(L::splat(100.0));
        let mut bytes = [0; 16];
        finite.round_even().store_i8(&mut bytes);
        let mut part = [7.0; 16];
        L::load_part(&self.0[..5]).store_part(&mut part[..9]);
        vec![
            ("add", (a + b).to_array()),
            ("sub", (a - b).to_array()),
            ("mul", (a * b).to_array()),
            ("div", (a / b).to_array()),
            ("mul_add", a.mul_add(b, a).to_array()),
            ("maximum", a.maximum(b).to_array()),
            ("minimum", a.minimum(b).to_array()),
            ("round_even", a.round_even().to_array()),
            ("root", a.root().to_array()),
            (
                "exp2_integer",
                finite.round_even().exp2_integer().to_array(),
            ),
            ("if_below", a.if_below(b, a, b).to_array()),
            ("negate", a.negate().to_array()),
            ("f16", L::load_f16(&half).to_array()),
            ("bf16", L::load_bf16(&brain).to_array()),
            ("i8", bytes.map(f32::from)),
            ("u8", L::load_u8(&bytes.map(|b: i8| b as u8)).to_array()),
            ("load_i8", L::load_i8(&bytes).to_array()),
            (
                "lookup",
                L::lookup(self.0, &bytes.map(|b| b as u8 % 16)).to_array(),
            ),
            ("sum", [finite.sum(); 16]),
            ("max_lane", [finite.max_lane(); 16]),
            ("part", part),
            ("exp", math::exp(a).to_array()),
            ("sin", math::sin_cos(finite).0.to_array()),
            ("gelu_tanh", math::gelu_tanh(a).to_array()),
            ("gelu", math::gelu(a).to_array()),
        ]
    }
}

/// The definition that instruction sets are compared with: `f32` and the `half` crate.
fn expected(a: &[f32; 16], b: &[f32; 16]) -> Vec<[f32; 16]> {
    let each = |f: &dyn Fn(f32, f32) -> f32| std::array::from_fn(|i| f(a[i], b[i]));
    let finite = |a: f32| Float::minimum(Float::maximum(a, -100.0), 100.0);
    let lanes = a.map(finite);
    vec![
        each(&|a, b| a + b),
        each(&|a, b| a - b),
        each(&|a, b| a * b),
        each(&|a, b| a / b),
        each(&|a, b| a.mul_add(b, a)),
        each(&|a, b| Float::maximum(a, b)),
        each(&|a, b| Float::minimum(a, b)),
        each(&|a, _| a.round_even()),
        each(&|a, _| a.root()),
        each(&|a, _| finite(a).round_even().exp2_integer()),
        each(&|a, b| a.if_below(b, a, b)),
        each(&|a, _| -a),
        each(&|a, _| f16::from_f32(a).to_f32()),
        each(&|a, _| bf16::from_f32(a).to_f32()),
        each(&|a, _| f32::from(finite(a).round_even() as i8)),
        each(&|a, _| f32::from(finite(a).round_even() as i8 as u8)),
        each(&|a, _| f32::from(finite(a).round_even() as i8)),
        each(&|x, _| a[usize::from(finite(x).round_even() as i8 as u8 % 16)]),
        [math::sum_tree(lanes); 16],
        [lanes.into_iter().fold(f32::NEG_INFINITY, f32::max); 16],
        std::array::from_fn(|i| {
            if i < 5 {
                a[i]
            } else if i < 9 {
                0.0
            } else {
                7.0
            }
        }),
        each(&|a, _| math::exp(a)),
        each(&|a, _| math::sin_cos(finite(a)).0),
        each(&|a, _| math::gelu_tanh(a)),
        each(&|a, _| math::gelu(a)),
    ]
}

#[test]
fn every_instruction_set_computes_the_same_bits() {
    let samples = samples();
    for isa in Isa::available() {
        let isa = Detected::new(isa).unwrap();
        for (a, b) in samples.iter().zip(samples.iter().cycle().skip(1)) {
            for ((name, got), want) in isa.run(All(a, b)).into_iter().zip(expected(a, b)) {
                for i in 0..16 {
                    let same = got[i].to_bits() == want[i].to_bits()
                        || got[i].is_nan() && want[i].is_nan();
                    assert!(
                        same,
                        "{isa:?} {name}({:?}, {:?}) = {:?}, not {:?}",
                        a[i], b[i], got[i], want[i]
                    );
                }
            }
        }
    }
}

/// The levels of a table, -128 and 127 among them.
const LEVELS: [i8; 16] = [
    -128, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 127,
];

/// Adds up products of a few vectors of codes in each way of [`Bytes`].
struct Sums<'a>(&'a [[u8; 64]], &'a [[i8; 4]]);
impl ByteKernel for Sums<'_> {
    type Output = [[f32; 16]; 8];
    #[inline(always)]
    fn run<B: Bytes>(self) -> Self::Output {
        let (mut all, mut low, mut high) = (B::zero(), B::zero(), B::zero());
        let mut spare = B::zero();
        let total: i32 = self.1.as_flattened().iter().map(|&x| i32::from(x)).sum();
        // What each lane's sums of signed codes start from.
        let start = B::start(-B::OFFSET * total);
        let (mut signed, mut levels) = (start, start);
        let (mut six, mut spare_six) = (start, start);
        let table = B::table(&LEVELS);
        for (i, &x) in self.1.iter().enumerate() {
            let codes = B::load(&self.0[i]);
            let [b, c] = [1, 2].map(|by| B::load(&self.0[(i + by) % self.0.len()]));
            spare = B::add(spare, B::spare(codes, b, c), x);
            six = B::add_signed(six, B::less_32(B::six(codes)), x);
            let of_spare = B::less_32(B::spare_six(codes, b, c));
            spare_six = B::add_signed(spare_six, of_spare, x);
            signed = B::add_signed(signed, B::signed(codes), x);
            levels = B::add_signed(levels, B::lookup(table, B::low(codes)), x);
            all = B::add(all, codes, x);
            low = B::add_small(low, B::low(codes), x);
            high = B::add_small(high, B::high(codes), x);
        }
        [all, low, high, signed, levels, six, spare, spare_six].map(|s| B::float(s).to_array())
    }
}

/// Adds up products of an even number of vectors of codes with two rows at once: the codes as
/// they are, as signed ones, and their lower halves as signed ones.
struct PairedSums<'a>(&'a [[u8; 64]], &'a [[[i8; 4]; 4]]);
impl ByteKernel for PairedSums<'_> {
    type Output = Option<[[[f32; 16]; 2]; 3]>;
    #[inline(always)]
    fn run<B: Bytes>(self) -> Self::Output {
        if !B::PAIRED {
            return None;
        }
        let zero = B::pair([B::zero(); 2]);
        let (mut all, mut signed, mut low) = (zero, zero, zero);
        for (codes, x) in self.0.as_chunks::<2>().0.iter().zip(self.1) {
            let [a, b] = [B::load(&codes[0]), B::load(&codes[1])];
            // SAFETY: four values.
            unsafe {
                all = B::add_pair::<false>(all, a, b, x.as_ptr());
                signed = B::add_pair::<true>(signed, B::signed(a), B::signed(b), x.as_ptr());
                low = B::add_pair::<true>(low, B::low(a), B::low(b), x.as_ptr());
            }
        }
        let sums = [all, signed, low].map(B::unpair);
        Some(sums.map(|rows| rows.map(|s| B::float(s).to_array())))
    }
}

#[test]
fn byte_sums_are_exact() {
    // The extremes first: 16-bit intermediate sums would saturate.
    let mut codes = [[255u8; 64], [255; 64], [128; 64], [128; 64]].repeat(2);
    let mut x = [
        [-127i8; 4],
        [127; 4],
        [-127, 127, -127, -127],
        [127, -127, 127, 127],
    ]
    .repeat(2);
    let mut seed = 3u32;
    for _ in 0..40 {
        let mut next = || {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (seed >> 24) as u8
        };
        codes.push(std::array::from_fn(|_| next()));
        x.push(std::array::from_fn(|_| (next() as i8).max(-127)));
    }
    let seen: [fn(u8) -> i32; 6] = [
        i32::from,
        |code| i32::from(code & 15),
        |code| i32::from(code >> 4),
        |code| i32::from(code as i8),
        |code| i32::from(LEVELS[usize::from(code & 15)]),
        |code| i32::from(code & 63) - 32,
    ];
    let want = seen.map(|seen| {
        std::array::from_fn(|lane| {
            let products = codes.iter().zip(&x).flat_map(|(codes, x)| {
                (0..4).map(move |j| seen(codes[4 * lane + j]) * i32::from(x[j]))
            });
            products.sum::<i32>() as f32
        })
    });
    // What lies in spare bits of three vectors: the lanes' sums, given the code of the three bytes.
    let of_three = |code: fn([i32; 3]) -> i32| {
        std::array::from_fn(|lane| {
            let products = (0..x.len()).flat_map(|i| {
                let (codes, x) = (&codes, &x);
                (0..4).map(move |j| {
                    let byte = |by: usize| i32::from(codes[(i + by) % codes.len()][4 * lane + j]);
                    code([0, 1, 2].map(byte)) * i32::from(x[i][j])
                })
            });
            products.sum::<i32>() as f32
        })
    };
    // Bits 3 and 7.
    let spare = of_three(|[a, b, c]| {
        let bits = |at: i32| (a >> at & 1) | (b >> at & 1) << 1 | (c >> at & 1) << 2;
        bits(3) + 16 * bits(7)
    });
    // Bits 6 and 7.
    let spare_six = of_three(|[a, b, c]| (a >> 6 | b >> 6 << 2 | c >> 6 << 4) - 32);
    let want: Vec<[f32; 16]> = want.into_iter().chain([spare, spare_six]).collect();
    for isa in Isa::available() {
        for variant in Detected::variants(isa) {
            let got: [[f32; 16]; 8] = variant.run_bytes(Sums(&codes, &x));
            assert_eq!(got[..], want, "{variant:?}");
            // The second row has the words of the first in another order. Nothing is added to
            // signed codes where rows are paired.
            let (firsts, _) = x.as_chunks::<2>();
            let rows: Vec<_> = firsts.iter().map(|&[a, b]| [a, b, b, a]).collect();
            let turned: Vec<_> = firsts.iter().flat_map(|&[a, b]| [b, a]).collect();
            let second: [[f32; 16]; 8] = variant.run_bytes(Sums(&codes, &turned));
            if let Some(got) = variant.run_bytes(PairedSums(&codes, &rows)) {
                let want = [0, 3, 1].map(|kind| [want[kind], second[kind]]);
                assert_eq!(got, want, "{variant:?}");
            }
        }
    }
}

#[test]
fn an_instruction_set_of_another_cpu_is_refused() {
    let other = if cfg!(target_arch = "aarch64") {
        Isa::Avx2
    } else {
        Isa::Neon
    };
    assert!(Detected::new(other).is_none());
}
