//! Bicubic resizing of 8-bit pictures, with PyTorch's bits.
//!
//! One axis at a time, columns first. An output pixel is a weighted sum of a run of input pixels; the
//! weights are computed in f64, divided by their sum, and rounded to 16-bit integers with as many bits
//! after the point as the largest weight has room for. The sum is rounded to the nearest, and bounded
//! to 0 to 255:
//!
//! ```text
//! out = clamp((1/2 + Σ weight · in) >> bits, 0, 255)
//! ```

/// The `a` of the cubic kernel.
const A: f64 = -0.5;
/// Input pixels from the center of a kernel to its end.
const REACH: f64 = 2.0;
/// Most bits after the point of a weight.
const BITS_MAX: u32 = 22;

/// Colors of a pixel.
const COLORS: usize = 3;

/// `rgb`, of `[height, width]` pixels, resized to `to`.
pub(crate) fn resize(rgb: &[u8], from: [usize; 2], to: [usize; 2]) -> Vec<u8> {
    let ([from_height, from_width], [height, width]) = (from, to);
    let wide = match from_width == width {
        true => rgb.to_vec(),
        false => {
            let taps = Taps::new(from_width, width);
            let mut wide = vec![0; from_height * width * COLORS];
            let rows = rgb.chunks_exact(from_width * COLORS);
            for (row, out) in rows.zip(wide.chunks_exact_mut(width * COLORS)) {
                taps.columns(row, out);
            }
            wide
        }
    };
    if from_height == height {
        return wide;
    }
    let taps = Taps::new(from_height, height);
    let mut out = vec![0; height * width * COLORS];
    for (y, row) in out.chunks_exact_mut(width * COLORS).enumerate() {
        taps.row(y, &wide, row);
    }
    out
}

/// The weights of one axis.
struct Taps {
    /// For each output pixel, its first input pixel and how many weights it has.
    runs: Vec<(usize, usize)>,
    /// Weights of output pixel `i` from `i * stride` on.
    weights: Vec<i32>,
    stride: usize,
    /// Bits after the point of a weight.
    bits: u32,
}

impl Taps {
    /// The weights that take `from` pixels to `to`.
    fn new(from: usize, to: usize) -> Taps {
        let scale = from as f64 / to as f64;
        // A kernel is as wide as an output pixel where there are fewer of them than inputs.
        let widened = scale.max(1.0);
        let reach = REACH * widened;
        let stride = reach.ceil() as usize * 2 + 1;
        let mut exact = vec![0.0; to * stride];
        let mut runs = Vec::with_capacity(to);
        let mut largest = 0.0f64;
        for (i, weights) in exact.chunks_exact_mut(stride).enumerate() {
            let center = scale * (i as f64 + 0.5);
            // Both ends are truncated toward zero, as in a cast.
            let first = ((center - reach + 0.5) as i64).max(0) as usize;
            let end = ((center + reach + 0.5) as i64).clamp(0, from as i64) as usize;
            let n = end.saturating_sub(first).min(stride);
            let inverse = 1.0 / widened;
            let mut sum = 0.0;
            for (j, weight) in weights[..n].iter_mut().enumerate() {
                *weight = cubic(((j + first) as f64 - center + 0.5) * inverse);
                sum += *weight;
            }
            for weight in &mut weights[..n] {
                if sum != 0.0 {
                    *weight /= sum;
                }
                largest = largest.max(*weight);
            }
            runs.push((first, n));
        }
        let bits = bits(largest);
        let one = f64::from(1u32 << bits);
        let round = |weight: &f64| {
            let scaled = weight * one;
            let half = if *weight < 0.0 { -0.5 } else { 0.5 };
            (scaled + half) as i32
        };
        Taps {
            runs,
            weights: exact.iter().map(round).collect(),
            stride,
            bits,
        }
    }

    /// The first input pixel and the weights of output pixel `i`.
    fn of(&self, i: usize) -> (usize, &[i32]) {
        let (first, n) = self.runs[i];
        (first, &self.weights[i * self.stride..][..n])
    }

    /// A sum as a pixel.
    fn pixel(&self, sum: i32) -> u8 {
        (sum >> self.bits).clamp(0, 255) as u8
    }

    /// Half of the last bit that stays.
    fn half(&self) -> i32 {
        1 << (self.bits - 1)
    }

    /// Resizes the pixels of a row.
    fn columns(&self, row: &[u8], out: &mut [u8]) {
        for (x, pixel) in out.chunks_exact_mut(COLORS).enumerate() {
            let (first, weights) = self.of(x);
            let mut sums = [self.half(); COLORS];
            let taken = row[first * COLORS..].chunks_exact(COLORS);
            for (input, &weight) in taken.zip(weights) {
                for (sum, &color) in sums.iter_mut().zip(input) {
                    *sum += weight * i32::from(color);
                }
            }
            for (color, sum) in pixel.iter_mut().zip(sums) {
                *color = self.pixel(sum);
            }
        }
    }

    /// Output row `y` of a picture whose rows are as long as `out`.
    fn row(&self, y: usize, rows: &[u8], out: &mut [u8]) {
        let (first, weights) = self.of(y);
        let mut sums = vec![self.half(); out.len()];
        let taken = rows.chunks_exact(out.len()).skip(first);
        for (input, &weight) in taken.zip(weights) {
            for (sum, &color) in sums.iter_mut().zip(input) {
                *sum += weight * i32::from(color);
            }
        }
        for (color, sum) in out.iter_mut().zip(sums) {
            *color = self.pixel(sum);
        }
    }
}

/// As many bits after the point as keep the largest weight within 16 bits.
fn bits(largest: f64) -> u32 {
    let fits = |bits: &u32| (0.5 + largest * f64::from(1u32 << (bits + 1))) < f64::from(1 << 15);
    (0..BITS_MAX).take_while(fits).count() as u32
}

/// The cubic kernel at distance `x`.
fn cubic(x: f64) -> f64 {
    let x = x.abs();
    if x < 1.0 {
        ((A + 2.0) * x - (A + 3.0)) * x * x + 1.0
    } else if x < 2.0 {
        (((x - 5.0) * x + 8.0) * x - 4.0) * A
    } else {
        0.0
    }
}
