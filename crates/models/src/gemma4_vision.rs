//! Gemma 4's vision tower (`specs/gemma4.md` §11).
//!
//! ```text
//! x = (2 p - 1) W + X[column] + Y[row]      p a patch's pixels, 0 to 1
//! x = x + rms(attention(rms(x)))            all patches of a frame, scores unscaled
//! x = x + rms(mlp(rms(x)))                  GELU-gated
//! v = √Hv · mean of k × k patches           then (v - bias) * scale, in towers that have them
//! e = rms(v) P                              the target's embedding
//! ```
//!
//! The first half of a head turns by the patch's column, the second by its row, each by pairs of
//! its own halves. A linear may clip its input and its output. Letters: `n` patches, `Hv` hidden
//! size, `h` heads of size `e`, `H` the target's hidden size.

use crate::layers::{ClippedLinear, Loader, frequencies};
use crate::media::{
    Cut, FrameAttention, Frames, MediaError, MediaGrid, MediaTokens, PatchOrder, Patches, SizeRule,
    Tower, TowerKind, TowerLayers, TowerOutline, TowerPlan, VideoRule, channel_first, in_order,
    require_sides, tokens,
};
use crate::{ModelError, parse, require, require_sizes};
use backend::{Activation, Backend, Batch, Matrix, Rope, Tensor};
use serde::Deserialize;
use std::ops::Range;
use weights::Checkpoint;

pub(crate) const TOWER: TowerKind = TowerKind {
    names: &["gemma4_vision"],
    load: |b, checkpoint| Ok(Box::new(Gemma4Vision::load(b, checkpoint)?)),
    plan: |checkpoint| Ok(Config::read(checkpoint)?.plan()),
};

/// The texts of the tokens around a picture, and in it.
pub(crate) const TOKEN_TEXTS: [&str; 4] = ["<|image>", "<image|>", "<|image|>", "<|video|>"];

/// Rows of a frame of a video where nothing else is said.
pub(crate) const VIDEO_ROWS: usize = 70;

/// Frames of a video, and rows of each, where nothing else is said.
pub(crate) const VIDEO: VideoRule = VideoRule::Even {
    frames: 32,
    rows: VIDEO_ROWS,
    fps: None,
};

/// Quarters of a head as they are kept: those that turn by the column first in each half, so that
/// pairs are as far apart as in any other head.
const QUARTERS: [usize; 4] = [0, 2, 1, 3];

/// Rows of a picture where nothing else is said.
const DEFAULT_ROWS: usize = 280;

/// `vision_config` (`specs/gemma4.md` §11).
#[derive(Clone, Debug, Deserialize)]
struct Config {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: usize,
    #[serde(default = "default_patch")]
    patch_size: usize,
    #[serde(default = "default_pooling")]
    pooling_kernel_size: usize,
    #[serde(default = "default_positions")]
    position_embedding_size: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
    #[serde(default)]
    rope_parameters: RopeConfig,
    #[serde(default)]
    use_clipped_linears: bool,
    #[serde(default)]
    standardize: bool,
    #[serde(default)]
    default_output_length: Option<usize>,
    #[serde(default)]
    hidden_activation: Option<String>,
    #[serde(default)]
    attention_bias: Option<bool>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct RopeConfig {
    rope_theta: Option<f64>,
    rope_type: Option<String>,
}

fn default_patch() -> usize {
    16
}

fn default_pooling() -> usize {
    3
}

fn default_positions() -> usize {
    10_240
}

fn default_eps() -> f32 {
    1e-6
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config: Config = parse(&checkpoint.config()["vision_config"])?;
        let sizes = [
            ("vision_config.hidden_size", config.hidden_size),
            ("vision_config.intermediate_size", config.intermediate_size),
            (
                "vision_config.num_attention_heads",
                config.num_attention_heads,
            ),
            ("vision_config.num_key_value_heads", config.kv_heads()),
            ("vision_config.head_dim", config.head_dim),
            ("vision_config.patch_size", config.patch_size),
            (
                "vision_config.pooling_kernel_size",
                config.pooling_kernel_size,
            ),
            (
                "vision_config.position_embedding_size",
                config.position_embedding_size,
            ),
        ];
        require_sizes(config.num_hidden_layers, &sizes)?;
        require_sides(config.patch_size, config.pooling_kernel_size)?;
        let (heads, kv_heads) = (config.num_attention_heads, config.kv_heads());
        require(heads.is_multiple_of(kv_heads), || {
            format!(
                "{heads} query heads of the vision tower cannot share {kv_heads} key/value heads"
            )
        })?;
        require(config.head_dim.is_multiple_of(4), || {
            format!(
                "a head of {} has no pairs that turn by row and column",
                config.head_dim
            )
        })?;
        let unlike = |feature: String| Err(ModelError::Unsupported { feature });
        match config.hidden_activation.as_deref() {
            None | Some("gelu_pytorch_tanh") => {}
            Some(other) => return unlike(format!("a vision tower with the activation `{other}`")),
        }
        match config.rope_parameters.rope_type.as_deref() {
            None | Some("default" | "axial") => {}
            Some(other) => return unlike(format!("a vision tower with rope_type `{other}`")),
        }
        if config.attention_bias == Some(true) {
            return unlike("a vision tower of Gemma 4 with biases".into());
        }
        Ok(config)
    }

    fn kv_heads(&self) -> usize {
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    fn outline(&self) -> TowerOutline {
        TowerOutline {
            name: TOWER.names[0],
            layers: self.num_hidden_layers,
            hidden_size: self.hidden_size,
            inner_size: self.intermediate_size,
            patch: self.patch_size,
            merge: self.pooling_kernel_size,
            frames_a_run: 1,
        }
    }

    fn plan(&self) -> TowerPlan {
        TowerPlan {
            outline: self.outline(),
            picture: self.size_rule(None),
            video: VIDEO,
            frames: self.size_rule(Some(VIDEO_ROWS)),
        }
    }

    fn size_rule(&self, rows: Option<usize>) -> SizeRule {
        SizeRule::Rows {
            side: self.patch_size * self.pooling_kernel_size,
            most: rows.or(self.default_output_length).unwrap_or(DEFAULT_ROWS),
        }
    }

    fn patches(&self) -> Patches {
        Patches {
            size: self.patch_size,
            merge: self.pooling_kernel_size,
            positions: self.position_embedding_size,
            order: PatchOrder::Rows,
            // 2 (p - ½)
            scale: [[2.0, -1.0]; 3],
        }
    }

    /// The rotation of heads whose quarters lie as [`QUARTERS`].
    fn rope(&self) -> Rope {
        let half = self.head_dim / 2;
        let theta = self.rope_parameters.rope_theta.unwrap_or(100.0);
        let of_axis = frequencies(theta, half, half / 2);
        let (columns, rows) = (vec![2; half / 2], vec![1; half / 2]);
        Rope {
            head_dim: self.head_dim,
            pair_offset: half,
            frequencies: [&of_axis[..], &of_axis[..]].concat(),
            axes: [columns, rows].concat(),
        }
    }
}

struct Layer {
    q: ClippedLinear,
    k: ClippedLinear,
    v: ClippedLinear,
    o: ClippedLinear,
    q_norm: Tensor,
    k_norm: Tensor,
    gate: ClippedLinear,
    up: ClippedLinear,
    down: ClippedLinear,
    input_norm: Tensor,
    post_attention_norm: Tensor,
    pre_mlp_norm: Tensor,
    post_mlp_norm: Tensor,
}

impl Layer {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (hidden, inner, e) = (
            config.hidden_size,
            config.intermediate_size,
            config.head_dim,
        );
        let (heads, kv_heads) = (config.num_attention_heads, config.kv_heads());
        let clips = config.use_clipped_linears;
        let (attention, mlp) = (at.at("self_attn"), at.at("mlp"));
        let plain = |at, name, rows, cols| ClippedLinear::plain(at, name, (rows, cols), clips);
        let turned = |name, heads: usize| {
            let shape = (heads * e, hidden);
            ClippedLinear::load(&attention, name, shape, clips, |w| {
                let quarter = |q: usize| w.slice(q * e / 4..(q + 1) * e / 4);
                let of_head = |head: usize| QUARTERS.map(|q| quarter(4 * head + q));
                (0..heads).flat_map(of_head).collect()
            })
        };
        let head_norm = |name| {
            let stored = attention.checkpoint.vector(&attention.name_of(name), e)?;
            let values = QUARTERS
                .map(|q| &stored[q * e / 4..(q + 1) * e / 4])
                .concat();
            Ok::<_, ModelError>(at.b.upload(1, e, &values))
        };
        Ok(Layer {
            q: turned("q_proj", heads)?,
            k: turned("k_proj", kv_heads)?,
            v: plain(&attention, "v_proj", kv_heads * e, hidden)?,
            o: plain(&attention, "o_proj", hidden, heads * e)?,
            q_norm: head_norm("q_norm")?,
            k_norm: head_norm("k_norm")?,
            gate: plain(&mlp, "gate_proj", inner, hidden)?,
            up: plain(&mlp, "up_proj", inner, hidden)?,
            down: plain(&mlp, "down_proj", hidden, inner)?,
            input_norm: at.vector("input_layernorm", hidden)?,
            post_attention_norm: at.vector("post_attention_layernorm", hidden)?,
            pre_mlp_norm: at.vector("pre_feedforward_layernorm", hidden)?,
            post_mlp_norm: at.vector("post_feedforward_layernorm", hidden)?,
        })
    }

    /// Queries, keys and values of rows `x`.
    fn heads(
        &self,
        b: &dyn Backend,
        x: &Tensor,
        (rope, batch): (&Rope, &Batch),
        eps: f32,
    ) -> [Tensor; 3] {
        let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), w.cols(), eps);
        let head = |x: Tensor, w: &Tensor| b.rope(norm(&x, w), rope, batch);
        let h = norm(x, &self.input_norm);
        let q = head(self.q.forward(b, &h), &self.q_norm); // [n, h e]
        let k = head(self.k.forward(b, &h), &self.k_norm);
        let v = b.rms_norm(&self.v.forward(b, &h), None, rope.head_dim, eps);
        [q, k, v]
    }

    /// What follows attention `a` of rows `x`.
    fn mix(&self, b: &dyn Backend, x: Tensor, a: Tensor, eps: f32) -> Tensor {
        let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), w.cols(), eps);
        let x = {
            let a = self.o.forward(b, &a); // [n, Hv]
            b.add(norm(&a, &self.post_attention_norm), &x)
        };
        let h = norm(&x, &self.pre_mlp_norm);
        let inner = b.glu(
            self.gate.forward(b, &h),
            &self.up.forward(b, &h),
            Activation::GeluTanh,
        );
        let m = self.down.forward(b, &inner);
        b.add(norm(&m, &self.post_mlp_norm), &x)
    }
}

/// What is learned of the pooled rows' mean and spread.
struct Standard {
    /// `-bias`
    shift: Tensor,
    scale: Tensor,
    zero: Tensor,
}

/// The vision tower of Gemma 4 E2B, E4B, 26B and 31B.
pub(crate) struct Gemma4Vision {
    config: Config,
    tokens: Option<MediaTokens>,
    input: Matrix,
    /// By column, then by row.
    positions: Matrix,
    layers: Vec<Layer>,
    rope: Rope,
    standard: Option<Standard>,
    projection: Matrix,
}

impl Gemma4Vision {
    pub(crate) fn load(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = Config::read(checkpoint)?;
        let load = Loader::new(b, checkpoint);
        let at = load.at("vision_tower");
        let embedder = at.at("patch_embedder");
        let hidden = config.hidden_size;
        let layer = |i| Layer::load(&at.at("encoder.layers").at(i), &config);
        let standard = || {
            let bias = at.bare("std_bias", hidden)?;
            let shift: Vec<f32> = bias.iter().map(|x| -x).collect();
            Ok::<_, ModelError>(Standard {
                shift: b.upload(1, hidden, &shift),
                scale: b.upload(1, hidden, &at.bare("std_scale", hidden)?),
                zero: b.upload(1, hidden, &vec![0.0; hidden]),
            })
        };
        let rows = 2 * config.position_embedding_size;
        let input = embedder.stored("input_proj", hidden, config.patches().width())?;
        let input = match checkpoint.metadata() {
            // Of a GGUF file: channel by channel.
            Some(_) => b.matrix(&[in_order(&input, channel_first(config.patch_size)).view()]),
            None => b.matrix(&[input]),
        };
        Ok(Gemma4Vision {
            tokens: tokens(checkpoint.config(), "boi_token_id", "eoi_token_id"),
            input,
            positions: embedder.bare_matrix("position_embedding_table", rows, hidden)?,
            layers: (0..config.num_hidden_layers)
                .map(layer)
                .collect::<Result<_, _>>()?,
            rope: config.rope(),
            standard: config.standardize.then(standard).transpose()?,
            projection: projection(&load, hidden)?,
            config,
        })
    }

    /// `√Hv` times the mean of each `k × k` patches, of pooled rows `rows` of runs of `grid`, row-major:
    /// `[n, Hv]`.
    fn pool(&self, b: &dyn Backend, x: &Tensor, grid: MediaGrid, rows: Range<usize>) -> Tensor {
        let k = self.config.pooling_kernel_size;
        let cols = grid.width * k;
        let corner = |i: usize| {
            let (row, col) = (i / grid.width, i % grid.width);
            row * k * cols + col * k
        };
        let nth = |patch: usize| {
            let offset = patch / k * cols + patch % k;
            let rows: Vec<usize> = rows.clone().map(|i| corner(i) + offset).collect();
            b.gather(x, &rows)
        };
        let sum = (1..k * k).fold(nth(0), |sum, patch| b.add(sum, &nth(patch)));
        b.scale(
            sum,
            (self.config.hidden_size as f32).sqrt() / (k * k) as f32,
        )
    }
}

impl Tower for Gemma4Vision {
    fn outline(&self) -> TowerOutline {
        self.config.outline()
    }

    fn embedding_size(&self) -> usize {
        self.projection.rows
    }

    fn tokens(&self) -> Option<MediaTokens> {
        self.tokens
    }

    fn token_texts(&self) -> [&'static str; 4] {
        TOKEN_TEXTS
    }

    fn size_rule(&self, rows: Option<usize>) -> SizeRule {
        self.config.size_rule(rows)
    }

    fn grid(&self, frames: &Frames<'_>) -> Result<MediaGrid, MediaError> {
        self.config.patches().grid(frames)
    }

    fn places(&self, grid: MediaGrid) -> Vec<[usize; 2]> {
        self.config.patches().places(grid)
    }

    fn embed(
        &self,
        b: &dyn Backend,
        frames: &Frames<'_>,
        places: &[[usize; 2]],
        rows: Range<usize>,
    ) -> Tensor {
        let patches = self.config.patches();
        let first_row = self.config.position_embedding_size;
        let Cut { values, places } = patches.cut(frames, places, rows);
        let by = |place: &dyn Fn(&[usize; 2]) -> usize| {
            let ids: Vec<u32> = places.iter().map(|at| place(at) as u32).collect();
            b.embed(&self.positions, &ids, 1.0)
        };
        let x = {
            let p = b.upload(places.len(), patches.width(), &values);
            drop(values);
            b.matmul(&p, &self.input) // [n, Hv]
        };
        let x = b.add(x, &by(&|&[_, column]| column));
        let x = b.add(x, &by(&|&[row, _]| first_row + row));
        b.note(format_args!("vision.embed"), &x);
        x
    }

    fn layers(&self) -> Option<&dyn TowerLayers> {
        Some(self)
    }

    fn merge(&self, b: &dyn Backend, x: &Tensor, grid: MediaGrid, rows: Range<usize>) -> Tensor {
        let mut v = self.pool(b, x, grid, rows); // [n, Hv]
        if let Some(Standard { shift, scale, zero }) = &self.standard {
            // Not one product and sum: the difference is of large numbers.
            v = b.affine(b.affine(v, None, shift), Some(scale), zero);
        }
        b.note(format_args!("vision.pooled"), &v);
        project(b, &v, &self.projection, self.config.rms_norm_eps)
    }
}

impl TowerLayers for Gemma4Vision {
    fn attention(&self) -> FrameAttention {
        FrameAttention {
            heads: self.config.num_attention_heads,
            kv_heads: self.config.kv_heads(),
            head_dim: self.config.head_dim,
            scale: 1.0,
        }
    }

    fn heads(&self, b: &dyn Backend, layer: usize, x: &Tensor, batch: &Batch) -> [Tensor; 3] {
        self.layers[layer].heads(b, x, (&self.rope, batch), self.config.rms_norm_eps)
    }

    fn mix(&self, b: &dyn Backend, layer: usize, x: Tensor, a: Tensor) -> Tensor {
        let x = self.layers[layer].mix(b, x, a, self.config.rms_norm_eps);
        b.note(format_args!("vision.layers.{layer}.out"), &x);
        x
    }
}

/// The projection to the target's hidden size from rows of `hidden` columns.
pub(crate) fn projection(load: &Loader<'_>, hidden: usize) -> Result<Matrix, ModelError> {
    let target = load.checkpoint.text_config().get("hidden_size");
    let target = target.and_then(serde_json::Value::as_u64).unwrap_or(0) as usize;
    require_sizes(1, &[("hidden_size", target)])?;
    load.at("embed_vision")
        .matrix("embedding_projection", target, hidden)
}

/// `rms(v) P`: `[rows, H]`.
pub(crate) fn project(b: &dyn Backend, v: &Tensor, projection: &Matrix, eps: f32) -> Tensor {
    let e = b.matmul(&b.rms_norm(v, None, v.cols(), eps), projection);
    b.note(format_args!("vision.rows"), &e);
    e
}
