//! Gemma 4's sound tower (`specs/gemma4.md` §15): a conformer over mel features of 10 ms.
//!
//! ```text
//! z = relu(norm(conv(relu(norm(conv(f))))))     3 × 3 points, every other frame and band: a row is 40 ms
//! x = Σ_band z[band] P[band]
//! x = x + ½ rms(ffn(rms(x)))                    ffn(h) = silu(h A) B
//! x = x + rms(near(rms(x)) O)
//! x = x + lconv(rms(x))
//! x = x + ½ rms(ffn(rms(x)))
//! x = rms(x)
//! e = rms(x W + b) E                            the target's embedding
//! ```
//!
//! `near` attends to a row and the 11 before it; a score is `50 tanh(q·(k + r) / 50)`, where `r` is the
//! key of the distance, a projection of sines and cosines of it. `lconv(h)` gates a linear's first half by the
//! second, sums over time by column (`taps` rows, the last one the row's own), and goes on with
//! `silu(rms(·)) C`. A linear may clip its input and its output; rows are bounded before norms.
//! Letters: `n` rows, `T` frames, `F` bands, `C` channels of a convolution, `D` hidden size.

use crate::layers::{ClippedLinear, LayerNorm, Loader};
use crate::media::{
    MelRule, SOUND_RATE, SOUND_SECONDS_MAX, SoundError, SoundKind, SoundOutline, SoundTokens,
    SoundTower, matrix_of, project_sound, sound_projection, sound_tokens,
};
use crate::{ModelError, parse, require, require_sizes};
use backend::{Activation, Backend, Batch, Matrix, MediaRow, NEAR_ROWS_MAX, NearAttention, Tensor};
use serde::Deserialize;
use serde_json::Value;
use weights::Checkpoint;

pub(crate) const TOWER: SoundKind = SoundKind {
    name: "gemma4_audio",
    load: |b, checkpoint, config| Ok(Box::new(Gemma4Audio::load(b, checkpoint, config)?)),
    outline: |checkpoint| Ok(Config::read(checkpoint)?.outline()),
};

/// What norms add to a mean square where the configuration has no say, as in the reference.
const NORM_EPS: f32 = 1e-6;

/// Bands of the features.
const BANDS: usize = 128;

/// Frames, and bands, of which a convolution makes one.
const STRIDE: usize = 2;

/// The longest period of the sines that tell distances.
const LONGEST: f64 = 10_000.0;

/// `audio_config`.
#[derive(Clone, Debug, Deserialize)]
struct Config {
    #[serde(default = "default_hidden")]
    hidden_size: usize,
    #[serde(default = "default_layers")]
    num_hidden_layers: usize,
    #[serde(default = "default_heads")]
    num_attention_heads: usize,
    #[serde(default)]
    hidden_act: Option<String>,
    #[serde(default = "default_channels")]
    subsampling_conv_channels: [usize; 2],
    #[serde(default = "default_taps")]
    conv_kernel_size: usize,
    #[serde(default = "default_residual")]
    residual_weight: f32,
    #[serde(default = "default_chunk")]
    attention_chunk_size: usize,
    #[serde(default = "default_left")]
    attention_context_left: usize,
    #[serde(default)]
    attention_context_right: usize,
    #[serde(default = "default_cap")]
    attention_logit_cap: f32,
    #[serde(default = "default_clips")]
    use_clipped_linears: bool,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
    #[serde(default = "default_bound")]
    gradient_clipping: f32,
    #[serde(default = "default_output")]
    output_proj_dims: usize,
}

fn default_hidden() -> usize {
    1024
}

fn default_layers() -> usize {
    12
}

fn default_heads() -> usize {
    8
}

fn default_channels() -> [usize; 2] {
    [128, 32]
}

fn default_taps() -> usize {
    5
}

fn default_residual() -> f32 {
    0.5
}

fn default_chunk() -> usize {
    12
}

fn default_left() -> usize {
    13
}

fn default_cap() -> f32 {
    50.0
}

fn default_clips() -> bool {
    true
}

fn default_eps() -> f32 {
    NORM_EPS
}

fn default_bound() -> f32 {
    1e10
}

fn default_output() -> usize {
    1536
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config: Config = parse(&checkpoint.config()["audio_config"])?;
        let [first, second] = config.subsampling_conv_channels;
        let sizes = [
            ("audio_config.hidden_size", config.hidden_size),
            (
                "audio_config.num_attention_heads",
                config.num_attention_heads,
            ),
            ("audio_config.subsampling_conv_channels", first),
            ("audio_config.subsampling_conv_channels", second),
            ("audio_config.conv_kernel_size", config.conv_kernel_size),
            ("audio_config.output_proj_dims", config.output_proj_dims),
        ];
        require_sizes(config.num_hidden_layers, &sizes)?;
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        require(
            hidden.is_multiple_of(heads) && hidden.is_multiple_of(2),
            || {
                format!(
                    "{hidden} columns of the sound tower are no {heads} heads with sines and cosines"
                )
            },
        )?;
        let unlike = |feature: String| Err(ModelError::Unsupported { feature });
        match config.hidden_act.as_deref() {
            None | Some("silu" | "swish") => {}
            Some(other) => return unlike(format!("a sound tower with the activation `{other}`")),
        }
        // Distances of other chunks would be told by other sines.
        let window = config.attention_context_left.saturating_sub(1);
        if config.attention_context_right != 0
            || config.attention_chunk_size != window
            || !(1..=NEAR_ROWS_MAX).contains(&window)
        {
            return unlike(format!(
                "a sound tower whose chunks of {} rows see {} before and {} after",
                config.attention_chunk_size,
                config.attention_context_left,
                config.attention_context_right
            ));
        }
        Ok(config)
    }

    /// Rows that a row attends to, its own included.
    fn window(&self) -> usize {
        self.attention_context_left - 1
    }

    fn outline(&self) -> SoundOutline {
        let [first, second] = self.subsampling_conv_channels;
        let (bands, hidden) = (BANDS / STRIDE, self.hidden_size);
        // Rows of the first convolution before and after their norm, and their points; what a point of
        // the second one is summed of.
        let conv = STRIDE * bands * (9 + 2 * first) + bands / STRIDE * (first + 3 * second);
        SoundOutline {
            name: TOWER.name,
            layers: self.num_hidden_layers,
            hidden_size: hidden,
            samples_a_row: 640,
            row_numbers: conv.max(12 * hidden),
        }
    }

    fn attention(&self) -> NearAttention {
        NearAttention {
            heads: self.num_attention_heads,
            window: self.window(),
            cap: self.attention_logit_cap,
        }
    }

    /// `x` within the bounds of rows before norms.
    fn bounded(&self, b: &dyn Backend, x: Tensor) -> Tensor {
        b.clamp(x, -self.gradient_clipping, self.gradient_clipping)
    }

    /// A copy of `x` within the bounds.
    fn bounded_copy(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        self.bounded(b, b.columns(x, 0, x.cols()))
    }

    /// Sines, then cosines of the distances `0..window`: `[window, D]`.
    fn distances(&self) -> Vec<f32> {
        let half = self.hidden_size / 2;
        let step = LONGEST.ln() / half.saturating_sub(1).max(1) as f64;
        let angle = |d: usize, i: usize| d as f64 * (-step * i as f64).exp();
        let row = |d: usize| {
            let sines = (0..half).map(move |i| angle(d, i).sin() as f32);
            sines.chain((0..half).map(move |i| angle(d, i).cos() as f32))
        };
        (0..self.window()).flat_map(row).collect()
    }
}

/// A row of zeros as wide as `x`.
fn zeros(b: &dyn Backend, cols: usize) -> Tensor {
    b.upload(1, cols, &vec![0.0; cols])
}

fn norm(b: &dyn Backend, x: &Tensor, weight: &Tensor, eps: f32) -> Tensor {
    b.rms_norm(x, Some(weight), weight.cols(), eps)
}

/// `½ rms(ffn(rms(x)))`
struct FeedForward {
    before: Tensor,
    up: ClippedLinear,
    down: ClippedLinear,
    after: Tensor,
}

impl FeedForward {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (hidden, clips) = (config.hidden_size, config.use_clipped_linears);
        Ok(FeedForward {
            before: at.vector("pre_layer_norm", hidden)?,
            up: ClippedLinear::plain(at, "ffw_layer_1", (4 * hidden, hidden), clips)?,
            down: ClippedLinear::plain(at, "ffw_layer_2", (hidden, 4 * hidden), clips)?,
            after: at.vector("post_layer_norm", hidden)?,
        })
    }

    /// `x: [n, D] → x + ½ rms(ffn(rms(x)))`
    fn forward(&self, b: &dyn Backend, x: &Tensor, config: &Config) -> Tensor {
        let h = norm(b, &config.bounded_copy(b, x), &self.before, NORM_EPS);
        let inner = b.activate(self.up.forward(b, &h), Activation::Silu); // [n, 4 D]
        let y = config.bounded(b, self.down.forward(b, &inner));
        let y = norm(b, &y, &self.after, NORM_EPS);
        b.add(b.scale(y, config.residual_weight), x)
    }
}

/// `near(h) O`
struct Near {
    q: ClippedLinear,
    k: ClippedLinear,
    v: ClippedLinear,
    out: ClippedLinear,
    relative: Matrix,
    /// What the columns of queries are multiplied by.
    q_scale: Tensor,
}

impl Near {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (hidden, clips) = (config.hidden_size, config.use_clipped_linears);
        let head_dim = hidden / config.num_attention_heads;
        let linear = |name| ClippedLinear::plain(at, name, (hidden, hidden), clips);
        let learned = at.bare("per_dim_scale", head_dim)?;
        let is_gguf = at
            .checkpoint
            .is_from_gguf(&at.at("q_proj").name_of("linear"));
        let scale = |learned: &f32| {
            let learned = f64::from(*learned);
            // A GGUF file has what softplus makes of it.
            let positive = if is_gguf {
                learned
            } else {
                learned.exp().ln_1p()
            };
            (positive / (head_dim as f64).sqrt() / std::f64::consts::LN_2) as f32
        };
        let of_head: Vec<f32> = learned.iter().map(scale).collect();
        Ok(Near {
            q: linear("q_proj")?,
            k: linear("k_proj")?,
            v: linear("v_proj")?,
            out: linear("post")?,
            relative: at.matrix("relative_k_proj", hidden, hidden)?,
            q_scale: at
                .b
                .upload(1, hidden, &of_head.repeat(config.num_attention_heads)),
        })
    }

    /// `h: [n, D] → [n, D]`
    fn forward(&self, b: &dyn Backend, h: &Tensor, distances: &Tensor, config: &Config) -> Tensor {
        let k_scale = (1.0f64.exp().ln_1p() / std::f64::consts::LN_2) as f32;
        let zeros = zeros(b, h.cols());
        let q = b.affine(self.q.forward(b, h), Some(&self.q_scale), &zeros);
        let k = b.scale(self.k.forward(b, h), k_scale);
        let v = self.v.forward(b, h);
        let relative = b.matmul(distances, &self.relative); // [window, D]
        let a = b.attend_near(&q, &k, &v, &relative, &config.attention());
        self.out.forward(b, &a)
    }
}

/// `lconv(rms(x))`
struct LightConv {
    before: Tensor,
    start: ClippedLinear,
    /// By tap, the weights of all columns.
    taps: Vec<Tensor>,
    after: Tensor,
    end: ClippedLinear,
}

impl LightConv {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (hidden, clips) = (config.hidden_size, config.use_clipped_linears);
        let n = config.conv_kernel_size;
        // `[D, 1, taps]`, and in other files `[D, taps, 1]` or `[D, taps]`.
        let weights = at.stored("depthwise_conv1d", hidden, n)?.to_f32();
        let tap = |tap: usize| {
            let of_tap: Vec<f32> = weights.iter().skip(tap).step_by(n).copied().collect();
            at.b.upload(1, hidden, &of_tap)
        };
        Ok(LightConv {
            before: at.vector("pre_layer_norm", hidden)?,
            start: ClippedLinear::plain(at, "linear_start", (2 * hidden, hidden), clips)?,
            taps: (0..n).map(tap).collect(),
            after: at.vector("conv_norm", hidden)?,
            end: ClippedLinear::plain(at, "linear_end", (hidden, hidden), clips)?,
        })
    }

    /// `x: [n, D] → x + lconv(rms(x))`
    fn forward(&self, b: &dyn Backend, x: &Tensor, config: &Config) -> Tensor {
        let (n, cols, eps) = (x.rows(), x.cols(), config.rms_norm_eps);
        let gated = {
            let h = self.start.forward(b, &norm(b, x, &self.before, eps)); // [n, 2 D]
            let gate = b.columns(&h, cols, cols);
            b.glu(gate, &b.columns(&h, 0, cols), Activation::Sigmoid)
        };
        // Silence before the first row.
        let before = self.taps.len() - 1;
        let silence = b.upload(before + n, cols, &vec![0.0; (before + n) * cols]);
        let media = (0..n as u32).map(|row| MediaRow {
            row: before as u32 + row,
            source: 0,
            embedding: row,
        });
        let batch = Batch {
            media: media.collect(),
            ..Batch::default()
        };
        let padded = b.replace_rows(silence, &gated, 0, &batch);
        let zeros = zeros(b, cols);
        let tap = |tap: usize| {
            let rows: Vec<usize> = (tap..tap + n).collect();
            b.affine(b.gather(&padded, &rows), Some(&self.taps[tap]), &zeros)
        };
        let sum = (1..self.taps.len()).fold(tap(0), |sum, i| b.add(sum, &tap(i)));
        let h = norm(b, &config.bounded(b, sum), &self.after, eps);
        let y = self.end.forward(b, &b.activate(h, Activation::Silu));
        b.add(y, x)
    }
}

struct Layer {
    first: FeedForward,
    before_attention: Tensor,
    attention: Near,
    after_attention: Tensor,
    conv: LightConv,
    second: FeedForward,
    after: Tensor,
}

impl Layer {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let vector = |name| at.vector(name, config.hidden_size);
        Ok(Layer {
            first: FeedForward::load(&at.at("feed_forward1"), config)?,
            before_attention: vector("norm_pre_attn")?,
            attention: Near::load(&at.at("self_attn"), config)?,
            after_attention: vector("norm_post_attn")?,
            conv: LightConv::load(&at.at("lconv1d"), config)?,
            second: FeedForward::load(&at.at("feed_forward2"), config)?,
            after: vector("norm_out")?,
        })
    }

    fn forward(&self, b: &dyn Backend, x: &Tensor, distances: &Tensor, config: &Config) -> Tensor {
        let x = self.first.forward(b, x, config);
        let x = {
            let h = norm(
                b,
                &config.bounded_copy(b, &x),
                &self.before_attention,
                NORM_EPS,
            );
            let a = config.bounded(b, self.attention.forward(b, &h, distances, config));
            b.add(norm(b, &a, &self.after_attention, NORM_EPS), &x)
        };
        let x = self.conv.forward(b, &x, config);
        let x = self.second.forward(b, &x, config);
        norm(b, &config.bounded(b, x), &self.after, NORM_EPS)
    }
}

/// Frames and bands of points, band by band: point `(frame, band)` is row `band * frames + frame`.
#[derive(Clone, Copy, Debug)]
struct Plane {
    frames: usize,
    bands: usize,
}

impl Plane {
    /// What a convolution makes of it.
    fn halved(self) -> Plane {
        Plane {
            frames: self.frames.div_ceil(STRIDE),
            bands: self.bands.div_ceil(STRIDE),
        }
    }

    /// The row of the point that tap `(i, j)` of the convolution reads for each point that it makes; `outside`
    /// for one that does not exist.
    fn read_by(self, (i, j): (usize, usize), outside: usize) -> Vec<usize> {
        let made = self.halved();
        let within = |at: usize, n: usize| at.checked_sub(1).filter(|at| *at < n);
        let points = (0..made.bands).flat_map(|band| (0..made.frames).map(move |t| (t, band)));
        let row = |(t, band): (usize, usize)| {
            let t = within(STRIDE * t + i, self.frames)?;
            let band = within(STRIDE * band + j, self.bands)?;
            Some(band * self.frames + t)
        };
        points.map(|point| row(point).unwrap_or(outside)).collect()
    }
}

/// The nine points of a convolution, by frame and then by band.
fn taps() -> impl Iterator<Item = (usize, usize)> {
    (0..9).map(|tap| (tap / 3, tap % 3))
}

/// Two convolutions, and what makes rows of their points.
struct Subsampling {
    /// `[C, 9]`
    first: Matrix,
    first_norm: LayerNorm,
    /// By tap: `[C', C]`.
    second: Vec<Matrix>,
    second_norm: LayerNorm,
    /// By band: `[D, C']`.
    rows: Vec<Matrix>,
}

impl Subsampling {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (b, [first, second]) = (at.b, config.subsampling_conv_channels);
        let layers = [at.at("layer0"), at.at("layer1")];
        let norm = |layer: usize, n: usize| {
            Ok::<_, ModelError>(LayerNorm {
                weight: layers[layer].vector("norm", n)?,
                bias: zeros(b, n),
                eps: config.rms_norm_eps,
            })
        };
        // Channels before points, or in MLX files behind them.
        let name = layers[1].name_of("conv");
        let shape = at.checkpoint.shape(&name).unwrap_or_default();
        let is_last = shape.last() == Some(&first) && shape.get(1) != Some(&first);
        let stored = layers[1].stored("conv", second, 9 * first)?;
        let tap = |tap: usize| {
            let pick = |channel| match is_last {
                true => tap * first + channel,
                false => channel * 9 + tap,
            };
            matrix_of(b, &stored, first, pick)
        };
        let bands = BANDS.div_ceil(STRIDE).div_ceil(STRIDE);
        let rows = at.stored("input_proj_linear", config.hidden_size, bands * second)?;
        let band = |band: usize| matrix_of(b, &rows, second, |c| band * second + c);
        Ok(Subsampling {
            first: layers[0].matrix("conv", first, 9)?,
            first_norm: norm(0, first)?,
            second: (0..9).map(tap).collect(),
            second_norm: norm(1, second)?,
            rows: (0..bands).map(band).collect(),
        })
    }

    /// `features: [T, F]`, on the host, `→ [T / 4, D]`
    fn forward(&self, b: &dyn Backend, features: &[f32]) -> Tensor {
        let plane = Plane {
            frames: features.len() / BANDS,
            bands: BANDS,
        };
        let relu = |x: Tensor, norm: &LayerNorm| b.clamp(norm.forward(b, &x), 0.0, f32::INFINITY);
        let half = plane.halved();
        let points = half.frames * half.bands;
        let x = {
            // One more point, of silence: it stays 0, and stands for those that do not exist.
            let mut read = vec![0.0; (points + 1) * 9];
            for (tap, at) in taps().enumerate() {
                let rows = plane.read_by(at, usize::MAX);
                for (point, row) in rows
                    .into_iter()
                    .enumerate()
                    .filter(|(_, r)| *r < usize::MAX)
                {
                    let (band, frame) = (row / plane.frames, row % plane.frames);
                    read[point * 9 + tap] = features[frame * BANDS + band];
                }
            }
            let read = b.upload(points + 1, 9, &read);
            relu(b.matmul(&read, &self.first), &self.first_norm)
        };
        let quarter = half.halved();
        let z = {
            let tap = |(at, w): ((usize, usize), &Matrix)| {
                b.matmul(&b.gather(&x, &half.read_by(at, points)), w)
            };
            let mut products = taps().zip(&self.second).map(tap);
            let first = products.next().expect("nine taps");
            relu(
                products.fold(first, |sum, y| b.add(sum, &y)),
                &self.second_norm,
            )
        };
        let band = |(band, w): (usize, &Matrix)| {
            let rows: Vec<usize> = (band * quarter.frames..(band + 1) * quarter.frames).collect();
            b.matmul(&b.gather(&z, &rows), w)
        };
        let mut products = self.rows.iter().enumerate().map(band);
        let first = products.next().expect("bands");
        products.fold(first, |sum, y| b.add(sum, &y))
    }
}

/// The sound tower of Gemma 4 E2B and E4B.
pub(crate) struct Gemma4Audio {
    config: Config,
    mel: MelRule,
    tokens: Option<SoundTokens>,
    subsampling: Subsampling,
    layers: Vec<Layer>,
    distances: Tensor,
    output: Matrix,
    output_bias: Tensor,
    projection: Matrix,
}

impl Gemma4Audio {
    pub(crate) fn load(
        b: &dyn Backend,
        checkpoint: &Checkpoint,
        extractor: &Value,
    ) -> Result<Self, ModelError> {
        let config = Config::read(checkpoint)?;
        let load = Loader::new(b, checkpoint);
        let at = load.at("audio_tower");
        let layer = |i| Layer::load(&at.at("layers").at(i), &config);
        let (hidden, out) = (config.hidden_size, config.output_proj_dims);
        Ok(Gemma4Audio {
            mel: MelRule::default().read(extractor),
            tokens: sound_tokens(checkpoint.config()),
            subsampling: Subsampling::load(&at.at("subsample_conv_projection"), &config)?,
            layers: (0..config.num_hidden_layers)
                .map(layer)
                .collect::<Result<_, _>>()?,
            distances: b.upload(config.window(), hidden, &config.distances()),
            output: at.matrix("output_proj", out, hidden)?,
            output_bias: at.bias("output_proj", out)?,
            projection: sound_projection(&load, out)?,
            config,
        })
    }
}

impl SoundTower for Gemma4Audio {
    fn outline(&self) -> SoundOutline {
        self.config.outline()
    }

    fn embedding_size(&self) -> usize {
        self.projection.rows
    }

    fn tokens(&self) -> Option<SoundTokens> {
        self.tokens
    }

    fn rows(&self, samples: usize) -> Result<usize, SoundError> {
        if samples > (SOUND_RATE * SOUND_SECONDS_MAX) as usize {
            return Err(SoundError::TooLong { samples });
        }
        match self.mel.frames(samples) {
            0 => Err(SoundError::TooShort {
                samples,
                least: self.mel.least(),
            }),
            frames => Ok(frames.div_ceil(STRIDE).div_ceil(STRIDE)),
        }
    }

    fn embed(&self, b: &dyn Backend, samples: &[f32]) -> Tensor {
        let features = self.mel.features(samples);
        assert!(!features.is_empty(), "a sound for the tower");
        let x = self.subsampling.forward(b, &features); // [n, D]
        b.note(format_args!("audio.embed"), &x);
        x
    }

    fn layer(&self, b: &dyn Backend, layer: usize, x: &Tensor) -> Tensor {
        let x = self.layers[layer].forward(b, x, &self.distances, &self.config);
        b.note(format_args!("audio.layers.{layer}.out"), &x);
        x
    }

    fn reach(&self) -> usize {
        // Rows before that attention sees, and that the convolution behind it sums.
        self.config.window() - 1 + self.config.conv_kernel_size - 1
    }

    fn project(&self, b: &dyn Backend, x: &Tensor) -> Tensor {
        let x = b.affine(b.matmul(x, &self.output), None, &self.output_bias);
        project_sound(b, &x, &self.projection, self.config.rms_norm_eps)
    }
}
