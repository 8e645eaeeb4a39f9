//! Features of sound: logarithms of the mel spectrum, as the public processors of Gemma 4 have them.
//!
//! ```text
//! x[i, n] = w[n] s[i hop + n - frame / 2]      silence before the first sample; w Hann's window
//! y[i, m] = ln(Σ_k |DFT(x[i])[k]| f[k, m] + floor)
//! ```
//!
//! `f` are triangles between neighbors of frequencies at even distances on the mel scale. A frame
//! counts if the sound reaches to the sample behind it. All is computed in f64 and rounded once.

use serde_json::Value;
use std::f64::consts::PI;

/// The most samples of a frame, and bands of a spectrum, that a configuration may ask for.
const MOST: u64 = 1 << 14;

/// What features are made of.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct MelRule {
    /// Bands `m`.
    bands: usize,
    /// Samples a second.
    rate: u32,
    /// Samples of a frame.
    frame: usize,
    /// Samples from a frame to the next one.
    hop: usize,
    /// Frequencies, in hertz, of the lowest band's begin and the highest band's end.
    ends: [f64; 2],
    floor: f64,
    /// What samples are multiplied by.
    scale: f64,
    /// The share of a sample that is taken from the next one.
    preemphasis: f64,
    /// Whether the first sample of a frame has no sample before it.
    by_frame: bool,
    /// Whether spectra have twice as many frequencies.
    is_fine: bool,
    /// What a band is shifted by and divided by at the end.
    mean: Option<Vec<f64>>,
    spread: Option<Vec<f64>>,
}

impl Default for MelRule {
    /// 128 bands of frames of 20 ms, every 10 ms, at 16 kHz.
    fn default() -> Self {
        MelRule {
            bands: 128,
            rate: 16_000,
            frame: 320,
            hop: 160,
            ends: [0.0, 8000.0],
            floor: 1e-3,
            scale: 1.0,
            preemphasis: 0.0,
            by_frame: true,
            is_fine: false,
            mean: None,
            spread: None,
        }
    }
}

impl MelRule {
    /// The rule with what the configuration of a feature extractor says.
    #[must_use]
    pub(crate) fn read(mut self, config: &Value) -> MelRule {
        let size = |key: &str| config[key].as_u64().filter(|n| (1..=MOST).contains(n));
        let number = |key: &str| config[key].as_f64().filter(|x| x.is_finite());
        let span = |name: &str, rate: u32| {
            let of_time = number(&format!("{name}_ms"));
            let of_time =
                of_time.map(|ms| (f64::from(rate) * ms / 1000.0).round_ties_even() as u64);
            let n = of_time.or(size(name)).filter(|n| (1..=MOST).contains(n));
            n.map(|n| n as usize)
        };
        self.frame = span("frame_length", self.rate).unwrap_or(self.frame);
        self.hop = span("hop_length", self.rate).unwrap_or(self.hop);
        for (key, end) in ["min_frequency", "max_frequency"]
            .into_iter()
            .zip(&mut self.ends)
        {
            *end = number(key).unwrap_or(*end);
        }
        self.floor = number("mel_floor").unwrap_or(self.floor);
        self.scale = number("input_scale_factor").unwrap_or(self.scale);
        self.preemphasis = number("preemphasis").unwrap_or(self.preemphasis);
        let is = |key: &str| config[key].as_bool();
        self.by_frame = is("preemphasis_htk_flavor").unwrap_or(self.by_frame);
        self.is_fine = is("fft_overdrive").unwrap_or(self.is_fine);
        let by_band = |key: &str| {
            let values = config[key].as_array()?.iter().map(Value::as_f64);
            let values: Vec<f64> = values.collect::<Option<_>>()?;
            (values.len() == self.bands).then_some(values)
        };
        let [mean, spread] = ["per_bin_mean", "per_bin_stddev"].map(by_band);
        (self.mean, self.spread) = (mean, spread);
        self
    }

    /// Frames of `samples` samples.
    pub(crate) fn frames(&self, samples: usize) -> usize {
        // As many samples of silence before the first frame as half a frame has, and one behind the last.
        let behind = (samples + self.frame / 2).checked_sub(self.frame + 1);
        behind.map_or(0, |behind| behind / self.hop + 1)
    }

    /// Samples of the shortest sound that has a frame.
    pub(crate) fn least(&self) -> usize {
        self.frame + 1 - self.frame / 2
    }

    /// Features of `samples`, `[frames, bands]`.
    pub(crate) fn features(&self, samples: &[f32]) -> Vec<f32> {
        let (n, before) = (self.frames(samples.len()), self.frame / 2);
        let size = self.frame.next_power_of_two() << usize::from(self.is_fine);
        let (window, dft, bank) = (self.window(), Dft::new(size), self.bank(size));
        let at = |i: usize| match i.checked_sub(before) {
            Some(i) => f64::from(samples[i]) * self.scale,
            None => 0.0,
        };
        let mut out = Vec::with_capacity(n * self.bands);
        let (mut real, mut imaginary) = (vec![0.0; size], vec![0.0; size]);
        for first in (0..n).map(|i| i * self.hop) {
            real.fill(0.0);
            imaginary.fill(0.0);
            for (j, (x, w)) in real.iter_mut().zip(&window).enumerate() {
                *x = self.emphasized(j, |j| at(first + j)) * w;
            }
            dft.run(&mut real, &mut imaginary);
            let size: Vec<f64> = real
                .iter()
                .zip(&imaginary)
                .map(|(a, b)| a.hypot(*b))
                .collect();
            out.extend((0..self.bands).map(|band| self.value(band, &bank[band], &size)));
        }
        out
    }

    /// Sample `j` of a frame, whose samples are `at`.
    fn emphasized(&self, j: usize, at: impl Fn(usize) -> f64) -> f64 {
        match (self.preemphasis, self.by_frame, j) {
            (0.0, ..) => at(j),
            (share, true, 0) => at(0) * (1.0 - share),
            (share, true, _) => at(j) - share * at(j - 1),
            (share, false, _) => at(j + 1) - share * at(j),
        }
    }

    fn value(&self, band: usize, (first, weights): &(usize, Vec<f64>), size: &[f64]) -> f32 {
        let products = weights.iter().zip(&size[*first..]).map(|(w, x)| w * x);
        let mut value = (products.sum::<f64>() + self.floor).ln();
        if let Some(mean) = &self.mean {
            value -= mean[band];
        }
        if let Some(spread) = &self.spread {
            value /= spread[band];
        }
        value as f32
    }

    /// Hann's window, whose period is a frame, in f32 as the processors keep it.
    fn window(&self) -> Vec<f64> {
        let at = |n: usize| 0.5 - 0.5 * (2.0 * PI * n as f64 / self.frame as f64).cos();
        (0..self.frame).map(|n| f64::from(at(n) as f32)).collect()
    }

    /// For each band the first frequency of a spectrum of `size` points that it has, and the weights from
    /// there on.
    fn bank(&self, size: usize) -> Vec<(usize, Vec<f64>)> {
        let mel = |hertz: f64| 2595.0 * (1.0 + hertz / 700.0).log10();
        let hertz = |mel: f64| 700.0 * (10f64.powf(mel / 2595.0) - 1.0);
        let [low, high] = self.ends.map(mel);
        let step = (high - low) / (self.bands + 1) as f64;
        let corner = |i: usize| hertz(low + step * i as f64);
        // The last one as it was given.
        let corners: Vec<f64> = (0..=self.bands).map(corner).chain([hertz(high)]).collect();
        let points = size / 2 + 1;
        let at = |k: usize| f64::from(self.rate / 2) * k as f64 / (points - 1) as f64;
        let band = |m: usize| {
            let (a, b, c) = (corners[m], corners[m + 1], corners[m + 2]);
            let weight = |k: usize| ((at(k) - a) / (b - a)).min((c - at(k)) / (c - b)).max(0.0);
            let first = (0..points).find(|&k| weight(k) > 0.0).unwrap_or(0);
            let weights = (first..points).map(weight).take_while(|w| *w > 0.0);
            (first, weights.collect())
        };
        (0..self.bands).map(band).collect()
    }
}

/// The discrete Fourier transform of a power of two of points.
struct Dft {
    /// `e^(-2πi k / n)`
    turns: Vec<(f64, f64)>,
}

impl Dft {
    fn new(n: usize) -> Self {
        let turn = |k: usize| {
            let (sin, cos) = (2.0 * PI * k as f64 / n as f64).sin_cos();
            (cos, -sin)
        };
        Dft {
            turns: (0..n / 2).map(turn).collect(),
        }
    }

    /// In place: first the order of reversed bits, then sums and differences of ever more distant
    /// points.
    fn run(&self, real: &mut [f64], imaginary: &mut [f64]) {
        let n = real.len();
        let shift = usize::BITS - n.trailing_zeros();
        for i in 0..n {
            let j = i.reverse_bits().checked_shr(shift).unwrap_or(0);
            if i < j {
                real.swap(i, j);
                imaginary.swap(i, j);
            }
        }
        let mut half = 1;
        while half < n {
            let stride = n / (2 * half);
            for start in (0..n).step_by(2 * half) {
                for k in 0..half {
                    let (cos, sin) = self.turns[k * stride];
                    let (a, b) = (start + k, start + k + half);
                    let x = real[b] * cos - imaginary[b] * sin;
                    let y = real[b] * sin + imaginary[b] * cos;
                    (real[b], imaginary[b]) = (real[a] - x, imaginary[a] - y);
                    real[a] += x;
                    imaginary[a] += y;
                }
            }
            half *= 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_transform_is_the_sum_that_defines_it() {
        for n in [1usize, 2, 8, 512] {
            let x: Vec<f64> = (0..n)
                .map(|i| ((i * i * 7 + 3) % 11) as f64 - 5.0)
                .collect();
            let (mut real, mut imaginary) = (x.clone(), vec![0.0; n]);
            Dft::new(n).run(&mut real, &mut imaginary);
            for k in 0..n {
                let sum = x.iter().enumerate().fold((0.0, 0.0), |sum, (i, x)| {
                    let (sin, cos) = (2.0 * PI * (i * k % n) as f64 / n as f64).sin_cos();
                    (sum.0 + x * cos, sum.1 - x * sin)
                });
                let far = (real[k] - sum.0).hypot(imaginary[k] - sum.1);
                assert!(far < 1e-9, "{k} of {n}: {far}");
            }
        }
    }

    #[test]
    fn a_frame_counts_if_the_sound_reaches_behind_it() {
        let rule = MelRule::default();
        for (samples, frames) in [
            (0, 0),
            (160, 0),
            (161, 1),
            (320, 1),
            (321, 2),
            (16_000, 99),
            (480_000, 2999),
        ] {
            assert_eq!(rule.frames(samples), frames, "{samples}");
            let features = rule.features(&vec![0.0; samples.min(16_000)]);
            assert_eq!(features.len(), 128 * rule.frames(samples.min(16_000)));
            let silence = 1e-3f64.ln() as f32;
            assert!(features.iter().all(|x| *x == silence));
        }
    }
}
