//! Qwen 3.5's vision tower and its merger (`specs/qwen3_5.md` §10).
//!
//! ```text
//! x = p W + b + P(row, column)              P between the four nearest of a learned grid
//! x = x + attention(norm(x))                all patches of a pair of frames
//! x = x + mlp(norm(x))                      GELU
//! e = gelu([norm(x)…] V + c) U + d          of m × m patches side by side, by the error function
//! ```
//!
//! Norms are layer norms, linears have biases. The pixels `p` are those of two frames, a still
//! picture twice. A head's pairs turn by the patch's row, those of its second quarter by its
//! column. Letters: `n` patches, `Hv` hidden size, `h` heads of size `e`, `m` the merge size, `H`
//! the target's hidden size.

use crate::layers::{LayerNorm, Linear, Loader, frequencies};
use crate::media::{
    Cut, FrameAttention, Frames, MediaError, MediaGrid, MediaTokens, PatchOrder, Patches, SizeRule,
    Tower, TowerKind, TowerLayers, TowerOutline, TowerPlan, VideoRule, channel_last, gathered,
    in_order, in_parallel, require_sides, tokens,
};
use crate::{ModelError, parse, qwen3_5, require, require_sizes};
use backend::{Activation, Backend, Batch, Matrix, Rope, Tensor};
use serde::Deserialize;
use std::ops::Range;
use weights::Checkpoint;

pub(crate) const TOWER: TowerKind = TowerKind {
    // The tower's own, and those of models, which early files have.
    names: &[
        "qwen3_5_vision",
        "qwen3_5_moe_vision",
        "qwen3_5",
        "qwen3_5_moe",
    ],
    load: |b, checkpoint| Ok(Box::new(Qwen35Vision::load(b, checkpoint)?)),
    plan: |checkpoint| Ok(Config::read(checkpoint)?.plan()),
};

/// What norms add to a variance, as in the reference.
const EPS: f32 = 1e-6;

/// Frames of a run.
const FRAMES: usize = 2;

/// Pixels of a picture where nobody says how many.
const PIXELS: [usize; 2] = [65_536, 16_777_216];

/// Pixels of all frames of a video, at least and at most, where nothing else is said.
const VIDEO_PIXELS: [usize; 2] = [131_072, 786_432];

/// Frames of a video where nothing else is said.
const VIDEO: VideoRule = VideoRule::Rate {
    fps: 2.0,
    least: 4,
    most: 768,
    frames_a_run: FRAMES,
};

/// Positions of a side beyond those of the learned grid: as many as the positions of rows of a
/// cache can count.
const POSITIONS: usize = 1 << 16;

/// `vision_config`.
#[derive(Clone, Debug, Deserialize)]
struct Config {
    depth: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_heads: usize,
    #[serde(default = "default_patch")]
    patch_size: usize,
    #[serde(default = "default_two")]
    temporal_patch_size: usize,
    #[serde(default = "default_two")]
    spatial_merge_size: usize,
    out_hidden_size: usize,
    num_position_embeddings: usize,
    #[serde(default)]
    hidden_act: Option<String>,
    #[serde(default)]
    deepstack_visual_indexes: Vec<usize>,
    #[serde(default)]
    rope_parameters: RopeConfig,
    /// What is taken from a value of 0 to 1, by channel, and what divides the rest: in a tower's own
    /// file. Elsewhere they are the authors' ½.
    image_mean: Option<[f32; 3]>,
    image_std: Option<[f32; 3]>,
}

#[derive(Clone, Debug, Default, Deserialize)]
struct RopeConfig {
    rope_theta: Option<f64>,
}

fn default_patch() -> usize {
    16
}

fn default_two() -> usize {
    2
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config: Config = parse(&checkpoint.config()["vision_config"])?;
        let sizes = [
            ("vision_config.hidden_size", config.hidden_size),
            ("vision_config.intermediate_size", config.intermediate_size),
            ("vision_config.num_heads", config.num_heads),
            ("vision_config.patch_size", config.patch_size),
            (
                "vision_config.spatial_merge_size",
                config.spatial_merge_size,
            ),
            ("vision_config.out_hidden_size", config.out_hidden_size),
            (
                "vision_config.num_position_embeddings",
                config.num_position_embeddings,
            ),
        ];
        require_sizes(config.depth, &sizes)?;
        require_sides(config.patch_size, config.spatial_merge_size)?;
        let (hidden, heads) = (config.hidden_size, config.num_heads);
        require(hidden.is_multiple_of(heads), || {
            format!("{hidden} columns cannot be {heads} heads")
        })?;
        require(config.head_dim().is_multiple_of(4), || {
            format!(
                "a head of {} has no pairs that turn by row and column",
                config.head_dim()
            )
        })?;
        let positions = config.num_position_embeddings;
        require(config.grid_side().pow(2) == positions, || {
            format!("{positions} position embeddings are no square")
        })?;
        let std = config.image_std.unwrap_or([0.5; 3]);
        require(std.iter().all(|x| *x > 0.0), || {
            "image_std is not positive".into()
        })?;
        let target = checkpoint.text_config().get("hidden_size");
        let target = target.and_then(serde_json::Value::as_u64);
        let out = config.out_hidden_size;
        require(target.is_none_or(|target| target == out as u64), || {
            format!("the vision tower makes rows of {out} columns, which are not the model's")
        })?;
        let unlike = |feature: &str| {
            Err(ModelError::Unsupported {
                feature: feature.into(),
            })
        };
        if config.temporal_patch_size != FRAMES {
            return unlike("a vision tower whose patches are not of two frames");
        }
        if !config.deepstack_visual_indexes.is_empty() {
            return unlike("a vision tower whose layers go to the model's (deepstack)");
        }
        match config.hidden_act.as_deref() {
            None | Some("gelu_pytorch_tanh") => Ok(config),
            Some(other) => unlike(&format!("a vision tower with the activation `{other}`")),
        }
    }

    fn head_dim(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Positions of a side of the learned grid.
    fn grid_side(&self) -> usize {
        self.num_position_embeddings.isqrt()
    }

    fn outline(&self) -> TowerOutline {
        TowerOutline {
            name: TOWER.names[0],
            layers: self.depth,
            hidden_size: self.hidden_size,
            inner_size: self.intermediate_size,
            patch: self.patch_size,
            merge: self.spatial_merge_size,
            frames_a_run: FRAMES,
        }
    }

    fn plan(&self) -> TowerPlan {
        TowerPlan {
            outline: self.outline(),
            picture: self.size_rule(None),
            video: VIDEO,
            frames: self.pixels(VIDEO_PIXELS),
        }
    }

    fn size_rule(&self, rows: Option<usize>) -> SizeRule {
        let side = self.side();
        let [least, most] = PIXELS;
        let most = rows.map_or(most, |rows| rows.saturating_mul(side * side));
        self.pixels([least.min(most), most])
    }

    /// Pixels of the side of what becomes a row.
    fn side(&self) -> usize {
        self.patch_size * self.spatial_merge_size
    }

    fn pixels(&self, [least, most]: [usize; 2]) -> SizeRule {
        SizeRule::Pixels {
            side: self.side(),
            least,
            most,
            frames_a_run: FRAMES,
        }
    }

    fn patches(&self) -> Patches {
        Patches {
            size: self.patch_size,
            merge: self.spatial_merge_size,
            positions: POSITIONS,
            order: PatchOrder::Blocks {
                merge: self.spatial_merge_size,
                frames: FRAMES,
            },
            // (p - mean) / std
            scale: std::array::from_fn(|c| {
                let of = |x: Option<[f32; 3]>| x.map_or(0.5, |x| x[c]);
                let (mean, std) = (of(self.image_mean), of(self.image_std));
                [std.recip(), -mean / std]
            }),
        }
    }

    fn rope(&self) -> Rope {
        let half = self.head_dim() / 2;
        let theta = self.rope_parameters.rope_theta.unwrap_or(1e4);
        let of_axis = frequencies(theta, half, half / 2);
        let (rows, columns) = (vec![1; half / 2], vec![2; half / 2]);
        Rope {
            head_dim: self.head_dim(),
            pair_offset: half,
            frequencies: [&of_axis[..], &of_axis[..]].concat(),
            axes: [rows, columns].concat(),
        }
    }
}

struct Block {
    norm1: LayerNorm,
    norm2: LayerNorm,
    qkv: Linear,
    proj: Linear,
    fc1: Linear,
    fc2: Linear,
}

impl Block {
    fn load(at: &Loader<'_>, config: &Config) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        let (attention, mlp) = (at.at("attn"), at.at("mlp"));
        Ok(Block {
            norm1: LayerNorm::load(at, "norm1", hidden, EPS)?,
            norm2: LayerNorm::load(at, "norm2", hidden, EPS)?,
            qkv: Linear::load(&attention, "qkv", 3 * hidden, hidden)?,
            proj: Linear::load(&attention, "proj", hidden, hidden)?,
            fc1: Linear::load(&mlp, "linear_fc1", inner, hidden)?,
            fc2: Linear::load(&mlp, "linear_fc2", hidden, inner)?,
        })
    }

    /// Queries, keys and values of rows `x`.
    fn heads(&self, b: &dyn Backend, x: &Tensor, rope: &Rope, batch: &Batch) -> [Tensor; 3] {
        let hidden = x.cols();
        let qkv = self.qkv.forward(b, &self.norm1.forward(b, x)); // [n, 3 Hv]
        let part = |i: usize| b.columns(&qkv, i * hidden, hidden);
        let q = b.rope(part(0), rope, batch); // [n, h e]
        let k = b.rope(part(1), rope, batch);
        [q, k, part(2)]
    }

    /// What follows attention `a` of rows `x`.
    fn mix(&self, b: &dyn Backend, x: Tensor, a: Tensor) -> Tensor {
        let x = b.add(self.proj.forward(b, &a), &x);
        drop(a);
        let inner = self.fc1.forward(b, &self.norm2.forward(b, &x));
        let inner = b.activate(inner, Activation::GeluTanh);
        b.add(self.fc2.forward(b, &inner), &x)
    }
}

/// The vision tower of Qwen 3.5 and 3.6.
pub(crate) struct Qwen35Vision {
    config: Config,
    tokens: Option<MediaTokens>,
    input: Linear,
    /// The learned grid, `[side², Hv]`.
    positions: Vec<f32>,
    blocks: Vec<Block>,
    rope: Rope,
    merger_norm: LayerNorm,
    merger_fc1: Linear,
    merger_fc2: Linear,
}

/// The weight of patches, `[Hv, 3 · 2 · size²]`: as it is, with channels last in MLX files, or a tensor
/// for each frame in GGUF files.
fn patch_weight(at: &Loader<'_>, config: &Config) -> Result<Matrix, ModelError> {
    let (hidden, width) = (config.hidden_size, config.patches().width());
    let name = at.name_of("proj");
    if at.checkpoint.has(&format!("{name}.1")) {
        let pixels = config.patch_size.pow(2);
        let frame = |name: &str| at.checkpoint.matrix(name, hidden, width / FRAMES);
        let frames = [
            frame(&name)?.to_f32(),
            frame(&format!("{name}.1"))?.to_f32(),
        ];
        let mut values = Vec::with_capacity(hidden * width);
        for part in (0..hidden * 3).map(|part| part * pixels) {
            frames
                .iter()
                .for_each(|frame| values.extend(&frame[part..part + pixels]));
        }
        let both = quant::encode(&quant::F32, &values, width, quant::Scalar::F32);
        return Ok(at.b.matrix(&[both.view()]));
    }
    let stored = at.stored("proj", hidden, width)?;
    let shape = at.checkpoint.shape(&name).unwrap_or_default();
    let last = shape.len() == 5 && shape[4] == 3 && shape[1] == FRAMES;
    Ok(match last {
        true => {
            let order = channel_last(config.patch_size, FRAMES);
            at.b.matrix(&[in_order(&stored, order).view()])
        }
        false => at.b.matrix(&[stored]),
    })
}

impl Qwen35Vision {
    pub(crate) fn load(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = Config::read(checkpoint)?;
        // A tower's own file says nothing of the model.
        if checkpoint.text_config().get("num_hidden_layers").is_some() {
            qwen3_5::Config::read(checkpoint)?.require_axes()?;
        }
        let at = Loader::new(b, checkpoint).at("visual");
        let merger = at.at("merger");
        let (hidden, positions) = (config.hidden_size, config.num_position_embeddings);
        let merged = hidden * config.spatial_merge_size.pow(2);
        let block = |i| Block::load(&at.at("blocks").at(i), &config);
        let input = at.at("patch_embed");
        Ok(Qwen35Vision {
            tokens: tokens(
                checkpoint.config(),
                "vision_start_token_id",
                "vision_end_token_id",
            ),
            input: Linear {
                weight: patch_weight(&input, &config)?,
                bias: input.bias("proj", hidden)?,
            },
            positions: at.stored("pos_embed", positions, hidden)?.to_f32(),
            blocks: (0..config.depth).map(block).collect::<Result<_, _>>()?,
            rope: config.rope(),
            merger_norm: LayerNorm::load(&merger, "norm", hidden, EPS)?,
            merger_fc1: Linear::load(&merger, "linear_fc1", merged, merged)?,
            merger_fc2: Linear::load(&merger, "linear_fc2", config.out_hidden_size, merged)?,
            config,
        })
    }

    /// `P` of the patches at `places` of a run, of which there are `grid` from side to side, in
    /// order: `[n, Hv]`. The corners of a run are those of the learned grid. A value is the sum of
    /// those at its four neighbors times their weights, from top left by rows, from 0.
    fn position_rows(&self, places: &[[usize; 2]], grid: [usize; 2]) -> Vec<f32> {
        let (side, hidden) = (self.config.grid_side(), self.config.hidden_size);
        // The positions before and after, and how far between them.
        let between = |at: usize, n: usize| {
            let at = at as f32 * ((side - 1) as f32 / n.saturating_sub(1).max(1) as f32);
            let before = at.floor();
            let next = (before as usize + 1).min(side - 1);
            (before as usize, next, at - before)
        };
        let mut rows = vec![0.0; places.len() * hidden];
        in_parallel(&mut rows, hidden, |at, row| {
            let [y, x] = places[at];
            let ((top, bottom, dy), (left, right, dx)) = (between(y, grid[0]), between(x, grid[1]));
            let corners = [
                (top, left, (1.0 - dy) * (1.0 - dx)),
                (top, right, (1.0 - dy) * dx),
                (bottom, left, dy * (1.0 - dx)),
                (bottom, right, dy * dx),
            ];
            for (y, x, weight) in corners {
                let learned = &self.positions[(y * side + x) * hidden..][..hidden];
                for (sum, p) in row.iter_mut().zip(learned) {
                    *sum = weight.mul_add(*p, *sum);
                }
            }
        });
        rows
    }
}

impl Tower for Qwen35Vision {
    fn outline(&self) -> TowerOutline {
        self.config.outline()
    }

    fn embedding_size(&self) -> usize {
        self.config.out_hidden_size
    }

    fn tokens(&self) -> Option<MediaTokens> {
        self.tokens
    }

    fn token_texts(&self) -> [&'static str; 4] {
        [
            "<|vision_start|>",
            "<|vision_end|>",
            "<|image_pad|>",
            "<|video_pad|>",
        ]
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
        let Cut { values, places } = patches.cut(frames, places, rows);
        let x = {
            let p = b.upload(places.len(), patches.width(), &values);
            drop(values);
            self.input.forward(b, &p) // [n, Hv]
        };
        let grid = [frames.height, frames.width].map(|pixels| pixels / self.config.patch_size);
        let positions = self.position_rows(&places, grid);
        let x = b.add(
            x,
            &b.upload(places.len(), self.config.hidden_size, &positions),
        );
        b.note(format_args!("vision.embed"), &x);
        x
    }

    fn layers(&self) -> Option<&dyn TowerLayers> {
        Some(self)
    }

    fn merge(&self, b: &dyn Backend, x: &Tensor, _: MediaGrid, rows: Range<usize>) -> Tensor {
        let each = self.config.spatial_merge_size.pow(2);
        let norm = |x: &Tensor| self.merger_norm.forward(b, x);
        let patches = rows.start * each..rows.end * each;
        let x = match patches.len() == x.rows() {
            true => norm(x),
            false => norm(&gathered(b, x, patches)),
        };
        let nth = |i: usize| {
            let rows: Vec<usize> = (0..rows.len()).map(|row| row * each + i).collect();
            b.gather(&x, &rows)
        };
        let joined = (1..each).fold(nth(0), |joined, i| b.concat(&joined, &nth(i))); // [n, m² Hv]
        let inner = b.activate(self.merger_fc1.forward(b, &joined), Activation::Gelu);
        let e = self.merger_fc2.forward(b, &inner);
        b.note(format_args!("vision.rows"), &e);
        e
    }
}

impl TowerLayers for Qwen35Vision {
    fn attention(&self) -> FrameAttention {
        let head_dim = self.config.head_dim();
        FrameAttention {
            heads: self.config.num_heads,
            kv_heads: self.config.num_heads,
            head_dim,
            scale: (head_dim as f32).sqrt().recip(),
        }
    }

    fn heads(&self, b: &dyn Backend, layer: usize, x: &Tensor, batch: &Batch) -> [Tensor; 3] {
        self.blocks[layer].heads(b, x, &self.rope, batch)
    }

    fn mix(&self, b: &dyn Backend, layer: usize, x: Tensor, a: Tensor) -> Tensor {
        let x = self.blocks[layer].mix(b, x, a);
        b.note(format_args!("vision.layers.{layer}.out"), &x);
        x
    }
}
