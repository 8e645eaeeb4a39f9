//! What stands in the place of a vision tower in Gemma 4 12B (`specs/gemma4.md` §13).
//!
//! ```text
//! u = norm1(p)                              p a patch's pixels, 0 to 1
//! u = norm2(u W + b)
//! u = norm3(u + T[column, 0] + T[row, 1])
//! e = rms(u) P                              the target's embedding
//! ```
//!
//! `norm1` to `norm3` are layer norms. Rows do not see each other. Letters: `n` patches, `D`
//! width, `H` the target's hidden size.

use crate::gemma4_vision::{TOKEN_TEXTS, VIDEO, VIDEO_ROWS, project, projection};
use crate::layers::{LayerNorm, Loader};
use crate::media::{
    Cut, Frames, MediaError, MediaGrid, MediaTokens, PatchOrder, Patches, SizeRule, Tower,
    TowerKind, TowerLayers, TowerOutline, TowerPlan, channel_first, gathered, in_order,
    require_sides, tokens,
};
use crate::{ModelError, parse, require_sizes};
use backend::{Backend, Matrix, Tensor};
use serde::Deserialize;
use std::ops::Range;
use weights::Checkpoint;

pub(crate) const TOWER: TowerKind = TowerKind {
    names: &["gemma4_unified_vision"],
    load: |b, checkpoint| Ok(Box::new(Gemma4Unified::load(b, checkpoint)?)),
    plan: |checkpoint| Ok(Config::read(checkpoint)?.plan()),
};

/// What layer norms add to a variance, as in the reference.
const NORM_EPS: f32 = 1e-5;

/// Rows of a picture where nothing else is said.
const DEFAULT_ROWS: usize = 280;

/// `vision_config`.
#[derive(Clone, Debug, Deserialize)]
struct Config {
    #[serde(default = "default_patch")]
    patch_size: usize,
    #[serde(default = "default_pooling")]
    pooling_kernel_size: usize,
    #[serde(default = "default_width")]
    mm_embed_dim: usize,
    #[serde(default = "default_positions")]
    mm_posemb_size: usize,
    #[serde(default = "default_eps")]
    rms_norm_eps: f32,
    #[serde(default)]
    default_output_length: Option<usize>,
}

fn default_patch() -> usize {
    16
}

fn default_pooling() -> usize {
    3
}

fn default_width() -> usize {
    3840
}

fn default_positions() -> usize {
    1120
}

fn default_eps() -> f32 {
    1e-6
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config: Config = parse(&checkpoint.config()["vision_config"])?;
        let sizes = [
            ("vision_config.patch_size", config.patch_size),
            (
                "vision_config.pooling_kernel_size",
                config.pooling_kernel_size,
            ),
            ("vision_config.mm_embed_dim", config.mm_embed_dim),
            ("vision_config.mm_posemb_size", config.mm_posemb_size),
        ];
        require_sizes(1, &sizes)?;
        require_sides(config.patch_size, config.pooling_kernel_size)?;
        Ok(config)
    }

    /// Pixels of a patch's side: of what the towers of other sizes pool.
    fn side(&self) -> usize {
        self.patch_size * self.pooling_kernel_size
    }

    fn outline(&self) -> TowerOutline {
        TowerOutline {
            name: TOWER.names[0],
            layers: 0,
            hidden_size: self.mm_embed_dim,
            inner_size: 0,
            patch: self.side(),
            merge: 1,
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
            side: self.side(),
            most: rows.or(self.default_output_length).unwrap_or(DEFAULT_ROWS),
        }
    }

    fn patches(&self) -> Patches {
        Patches {
            size: self.side(),
            merge: 1,
            positions: self.mm_posemb_size,
            order: PatchOrder::Rows,
            scale: [[1.0, 0.0]; 3],
        }
    }
}

/// The vision front end of Gemma 4 12B.
pub(crate) struct Gemma4Unified {
    config: Config,
    tokens: Option<MediaTokens>,
    pixel_norm: LayerNorm,
    dense: Matrix,
    bias: Tensor,
    dense_norm: LayerNorm,
    positions: Matrix,
    /// Whether `positions` has those of all columns, then those of all rows, and not both for each
    /// number in turn.
    by_axis: bool,
    position_norm: LayerNorm,
    projection: Matrix,
}

impl Gemma4Unified {
    pub(crate) fn load(b: &dyn Backend, checkpoint: &Checkpoint) -> Result<Self, ModelError> {
        let config = Config::read(checkpoint)?;
        let load = Loader::new(b, checkpoint);
        let at = load.at("vision_embedder");
        let (width, pixels) = (config.mm_embed_dim, config.patches().width());
        // A GGUF file has numbers of a patch channel by channel, and positions of columns before
        // those of rows.
        let is_gguf = checkpoint.is_from_gguf(&at.name_of("patch_dense"));
        let number: &dyn Fn(usize) -> usize = &channel_first(config.side());
        let number = if is_gguf { number } else { &|i| i };
        let dense = at.stored("patch_dense", width, pixels)?;
        let of_pixels = |values: Vec<f32>| {
            let values: Vec<f32> = (0..pixels).map(|i| values[number(i)]).collect();
            b.upload(1, pixels, &values)
        };
        let (ln1, ln1_bias) = (at.name_of("patch_ln1"), at.bare("patch_ln1.bias", pixels)?);
        Ok(Gemma4Unified {
            tokens: tokens(checkpoint.config(), "boi_token_id", "eoi_token_id"),
            pixel_norm: LayerNorm {
                weight: of_pixels(checkpoint.vector(&ln1, pixels)?),
                bias: of_pixels(ln1_bias),
                eps: NORM_EPS,
            },
            dense: match is_gguf {
                true => b.matrix(&[in_order(&dense, number).view()]),
                false => b.matrix(&[dense]),
            },
            bias: at.bias("patch_dense", width)?,
            dense_norm: LayerNorm::load(&at, "patch_ln2", width, NORM_EPS)?,
            positions: at.bare_matrix("pos_embedding", 2 * config.mm_posemb_size, width)?,
            position_norm: LayerNorm::load(&at, "pos_norm", width, NORM_EPS)?,
            projection: projection(&load, width)?,
            by_axis: is_gguf,
            config,
        })
    }
}

impl Tower for Gemma4Unified {
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
        let Cut { values, places } = patches.cut(frames, places, rows);
        let position = |ids: &dyn Fn(&[usize; 2]) -> usize| {
            let ids: Vec<u32> = places.iter().map(|at| ids(at) as u32).collect();
            b.embed(&self.positions, &ids, 1.0)
        };
        let p = b.upload(places.len(), patches.width(), &values);
        let u = self.pixel_norm.forward(b, &p);
        let u = b.affine(b.matmul(&u, &self.dense), None, &self.bias); // [n, D]
        let u = self.dense_norm.forward(b, &u);
        b.note(format_args!("vision.embed"), &u);
        let (each, rows) = match self.by_axis {
            true => (1, self.config.mm_posemb_size),
            false => (2, 1),
        };
        let u = b.add(u, &position(&|&[_, column]| each * column));
        let u = b.add(u, &position(&|&[row, _]| each * row + rows));
        self.position_norm.forward(b, &u)
    }

    fn layers(&self) -> Option<&dyn TowerLayers> {
        None
    }

    fn merge(&self, b: &dyn Backend, x: &Tensor, _: MediaGrid, rows: Range<usize>) -> Tensor {
        let project = |u: &Tensor| project(b, u, &self.projection, self.config.rms_norm_eps);
        match rows.len() == x.rows() {
            true => project(x),
            false => project(&gathered(b, x, rows)),
        }
    }
}
