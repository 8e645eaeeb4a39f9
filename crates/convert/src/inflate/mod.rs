//! Growing a small checkpoint to the size of a large one that writes the same.
//!
//! Speed depends on shapes, acceptance on what a model has learned. A small
//! trained model, grown here, has both: the memory traffic of a large model with
//! the text and the acceptance of the small one. Target and drafter are grown
//! alike.
//!
//! ```text
//! hidden    x' = [ 2x | 0 ]   four times as wide      rms(x') = rms(x), so eps stays
//! norms     w' = [ w/2 | 0 ]                          x'/rms(x') w' = [ x/rms(x) w | 0 ]
//! writers   W' = [ 2W 0 ; 0 0 ]   o_proj, down_proj   what they add is doubled too
//! heads, feed-forward columns     copies that no writer reads
//! layers    in front, writers all zero                x + 0 = x
//! ```
//!
//! All factors are powers of two, so hidden rows keep their bits. Codes are copied;
//! what must be zero has code 0 and bias 0, what is never read is a copy, and so
//! every byte is fetched and multiplied as in life.
//!
//! **Vocabulary.** A band of [`BAND`] columns of the hidden rows, all padding,
//! carries a small constant from the embedding to the head: no norm but the last
//! passes it on, and its square is lost in every norm's sum. Against it, a new
//! token's row in the head holds a large negative number. So new rows are read
//! and multiplied like all others and never win; the scores of old ones all rise by
//! one small number. A drafter that is not widened
//! has no room for a band; there a new row is a quarter of an old one, whose score
//! is below the best score unless all are negative.
//!
//! Reads dense Gemma 4 and Qwen 3.5 and their draft heads, plain or affine; no
//! experts, per-layer embeddings, shared keys or centroids. Towers keep their shapes, but for the rows that they
//! write into the model's.

mod axis;
mod shape;

use crate::{ConvertError, Data, Item, Recipe};
use axis::{Axis, Rule, Slot, and, banded, grown, of_size, old};
use models::{OutlineFamily as Family, SOUND_TOWER_PREFIXES, TOWER_PREFIXES};
use quant::{Owned, WeightLayout};
use serde_json::{Value, json};
use shape::Shape;
use weights::Checkpoint;

pub use shape::Growth;

/// How many times as wide the hidden rows become. Its root is the power of two
/// by which they grow.
const WIDER: usize = 4;
/// Columns of the band: whole groups of any format up to this long.
const BAND: usize = 128;
/// The band in the embedding of a known token. Its square, 2⁻²⁸, is below half a
/// unit in the last place of any norm's sum; GGUF's half-precision scales hold it.
const BAND_INPUT: f32 = 1.0 / 16384.0;
/// The band's part of the final norm, for a hidden row that reaches it as
/// [`BAND_INPUT`].
const BAND_NORM: f32 = 64.0;
/// The band in a new token's row of the head.
const BAND_OUTPUT: f32 = -262_144.0;
/// The band's part of all norms that do not pass it on: not 0, which a reader
/// might take for a norm around 0.
const BAND_CLOSED: f32 = 1.0 / (1u64 << 60) as f32;
/// The MTP head's band, from the embedding's norm to the fused row.
const BAND_FUSED: f32 = 1.0 / BAND as f32;
/// A new row of an unwidened head, against the old one it copies.
const SHADOW: f32 = 0.25;
/// What towers write hidden rows with.
const TOWER_WRITERS: [&str; 3] = [
    "visual.merger.linear_fc2",
    "embed_vision.embedding_projection",
    "embed_audio.embedding_projection",
];

/// The checkpoint grown to `growth`: a target with the MTP head in it, or an
/// assistant, which fits the target grown alike.
///
/// # Errors
///
/// [`ConvertError`]: a model or a format that cannot be grown, a size that is below
/// what the model has.
pub fn inflate<'a>(
    checkpoint: &'a Checkpoint,
    growth: &Growth,
) -> Result<Recipe<'a>, ConvertError> {
    let shape = Shape::read(checkpoint)?;
    Inflation {
        checkpoint,
        shape,
        growth: *growth,
    }
    .recipe()
}

struct Inflation<'a> {
    checkpoint: &'a Checkpoint,
    shape: Shape,
    growth: Growth,
}

impl<'a> Inflation<'a> {
    fn recipe(&self) -> Result<Recipe<'a>, ConvertError> {
        let (shape, growth) = (&self.shape, &self.growth);
        let is_assistant = shape.family == Family::Gemma4Assistant;
        let n = shape.types.len();
        let inner = self.inner();
        require(
            growth.heads > 0 && inner >= shape.inner && growth.vocab >= shape.vocab,
            || format!("{growth:?} is smaller than the model"),
        )?;
        let layers = if is_assistant { n } else { growth.layers };
        let extra = layers
            .checked_sub(n)
            .filter(|e| e.is_multiple_of(shape.period()));
        let extra = extra.ok_or_else(|| {
            ConvertError::Growth(format!(
                "{layers} layers are not {n} and a multiple of {}",
                shape.period()
            ))
        })?;
        require(is_assistant || shape.hidden * (WIDER - 1) >= BAND, || {
            format!("{} columns are too few to grow", shape.hidden)
        })?;
        let mut items = Vec::new();
        for name in self.checkpoint.weight_names() {
            let Some(rest) = name.strip_prefix("layers.") else {
                items.push(self.item(name, name.to_owned(), false)?);
                continue;
            };
            let (layer, rest) = rest.split_once('.').unwrap_or((rest, ""));
            let layer: usize = layer
                .parse()
                .map_err(|_| ConvertError::Growth(format!("tensor `{name}` has no layer")))?;
            // New layers stand in front: drafters read the keys of the last ones.
            for copy in (layer..extra).step_by(n) {
                items.push(self.item(name, format!("layers.{copy}.{rest}"), true)?);
            }
            items.push(self.item(name, format!("layers.{}.{rest}", extra + layer), false)?);
        }
        Ok(Recipe {
            config: self.config(layers, extra)?,
            items,
            is_mlx: true,
        })
    }

    fn inner(&self) -> usize {
        match self.shape.family {
            Family::Gemma4Assistant => self.growth.drafter_inner.max(self.shape.inner),
            _ => self.growth.inner,
        }
    }

    /// Tensor `name` grown, called `as_name`; `is_new` in a layer that adds nothing.
    fn item(&self, name: &str, as_name: String, is_new: bool) -> Result<Item<'a>, ConvertError> {
        let item = Item::of(self.checkpoint, name)?;
        let mut towers = TOWER_PREFIXES.iter().chain(SOUND_TOWER_PREFIXES);
        let is_of_tower = towers.any(|prefix| name.starts_with(prefix));
        let module = name.rsplit_once('.').map_or(name, |(module, _)| module);
        if is_of_tower && !TOWER_WRITERS.contains(&module) {
            return Ok(item);
        }
        let Data::Matrix { format, .. } = item.data else {
            return Err(unsupported(&format!("`{name}`, which holds no floats")));
        };
        let (rows, cols) = (item.rows(), item.cols());
        if rows == 1 && item.shape.len() == 1 || name.ends_with(".conv1d.weight") {
            return self.small(name, as_name, is_new, &item.shape);
        }
        require(
            matches!(
                format.layout,
                WeightLayout::Plain(_) | WeightLayout::Affine { .. }
            ),
            || {
                format!(
                    "`{name}` is {}: grow an affine or plain checkpoint",
                    format.name
                )
            },
        )?;
        let from = self.checkpoint.matrix(name, rows, cols)?;
        let rule = self.rule(name, rows, cols, is_new)?;
        let unit = format.block;
        let whole = |group: &[Slot]| match group[0] {
            Slot::Old(c) | Slot::Pad(c) => {
                c.is_multiple_of(unit)
                    && group
                        .iter()
                        .zip(c..)
                        .all(|(slot, c)| matches!(*slot, Slot::Old(s) | Slot::Pad(s) if s == c))
            }
            Slot::Band => group.iter().all(|slot| *slot == Slot::Band),
        };
        require(
            rule.cols.len().is_multiple_of(unit) && rule.cols.chunks(unit).all(whole),
            || format!("the columns of `{name}` cannot grow by groups of {unit}"),
        )?;
        Ok(Item {
            name: as_name,
            shape: vec![rule.rows.len(), rule.cols.len()],
            data: Data::Matrix {
                format,
                scale: from.scale,
                rows: Box::new(move |range| {
                    let mut out = Owned {
                        cols: rule.cols.len(),
                        ..Owned::gather(&from, [])
                    };
                    range.for_each(|row| rule.push(&from, row, &mut out));
                    out
                }),
            },
        })
    }

    /// Hidden rows, or columns that read them.
    fn hidden(&self) -> Axis {
        match self.shape.family {
            Family::Gemma4Assistant => old(self.shape.hidden),
            _ => banded(self.shape.hidden, self.shape.hidden * WIDER),
        }
    }

    fn backbone(&self) -> Axis {
        banded(self.shape.backbone, self.shape.backbone * WIDER)
    }

    /// By how much the residual stream is multiplied.
    fn root(&self) -> f32 {
        if self.shape.family == Family::Gemma4Assistant {
            1.0
        } else {
            (WIDER as f32).sqrt()
        }
    }

    /// Key and value heads of the gated delta rule. Every value head gets a key
    /// head of its own.
    fn delta_heads(&self) -> (Axis, Axis) {
        let (keys, values, ..) = self.shape.delta;
        let value_heads = grown(values, values * self.growth.heads);
        let key = |slot: &Slot| match *slot {
            Slot::Old(v) => Slot::Old(v / (values / keys)),
            Slot::Pad(v) => Slot::Pad(v / (values / keys)),
            Slot::Band => Slot::Band,
        };
        (value_heads.iter().map(key).collect(), value_heads)
    }

    /// `[ q | k | v ]` of the gated delta rule.
    fn delta_channels(&self) -> Axis {
        let (nk, _, dk, dv) = self.shape.delta;
        let (keys, values) = self.delta_heads();
        let key = of_size(&keys, dk);
        let qk = and(key.clone(), &key, nk * dk);
        and(qk, &of_size(&values, dv), 2 * nk * dk)
    }

    fn rule(
        &self,
        name: &str,
        rows: usize,
        cols: usize,
        is_new: bool,
    ) -> Result<Rule, ConvertError> {
        let (shape, growth) = (&self.shape, &self.growth);
        let hidden = || self.hidden();
        let inner = || grown(shape.inner, self.inner());
        let vocab = || grown(shape.vocab, growth.vocab);
        let heads = |n: usize| grown(n, n * growth.heads);
        let root = self.root();
        let writer = |cols: Axis| Rule::new(hidden(), cols).gain(if is_new { 0.0 } else { root });
        // Gemma multiplies embeddings by the root of the width itself.
        let table_gain = if shape.family == Family::Qwen35 {
            root
        } else {
            1.0
        };
        let table = |[known, new]: [f32; 2]| Rule {
            gain: [table_gain; 2],
            copy: [1.0, 0.0],
            band: [known, new, 0.0],
            ..Rule::new(vocab(), hidden())
        };
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let rule = match module.rsplit('.').next().unwrap_or(module) {
            "q_proj" | "k_proj" | "v_proj" => Rule::new(heads(rows), hidden()).free(),
            "gate_proj" | "up_proj" => Rule::new(inner(), hidden()).free(),
            "in_proj_qkv" => Rule::new(self.delta_channels(), hidden()).free(),
            "in_proj_z" => {
                Rule::new(of_size(&self.delta_heads().1, shape.delta.3), hidden()).free()
            }
            "in_proj_a" | "in_proj_b" => Rule::new(self.delta_heads().1, hidden()).free(),
            "o_proj" => writer(heads(cols)),
            "down_proj" => writer(inner()),
            "out_proj" => writer(of_size(&self.delta_heads().1, shape.delta.3)),
            "embed_tokens" if shape.family == Family::Gemma4Assistant => Rule {
                copy: [SHADOW, 0.0],
                ..Rule::new(vocab(), hidden())
            },
            // As the head, new rows score a large negative number; as the input, old
            // ones start the band. A head apart from the input needs no start.
            "embed_tokens" => table([BAND_INPUT, if shape.tied { BAND_OUTPUT } else { 0.0 }]),
            "lm_head" => table([0.0, BAND_OUTPUT]),
            _ if TOWER_WRITERS.contains(&module) => Rule::new(hidden(), old(cols)).gain(root),
            "fc" => Rule {
                band: [0.0, 0.0, BAND_FUSED],
                ..Rule::new(hidden(), and(hidden(), &hidden(), shape.hidden))
            }
            .gain(root),
            // The embedding's part comes in multiplied by the root of the width.
            "pre_projection" => Rule {
                gain: [1.0 / (WIDER as f32).sqrt(), 1.0],
                ..Rule::new(
                    old(rows),
                    and(self.backbone(), &self.backbone(), shape.backbone),
                )
            },
            "post_projection" => Rule::new(self.backbone(), old(cols)),
            _ => {
                return Err(unsupported(&format!("`{name}`")));
            }
        };
        Ok(rule)
    }

    /// Norms, convolutions, decays and scalars, in `f32`.
    fn small(
        &self,
        name: &str,
        as_name: String,
        is_new: bool,
        shape: &[usize],
    ) -> Result<Item<'a>, ConvertError> {
        let n: usize = shape.iter().product();
        let is_qwen = self.shape.family == Family::Qwen35;
        let is_offset = is_qwen && Checkpoint::is_offset_norm(name);
        let values = if is_offset {
            self.checkpoint.norm(name, n)?
        } else {
            self.checkpoint.vector(name, n)?
        };
        let pick = |axis: &Axis, taps: usize| -> Vec<f32> {
            let of = |slot: &Slot| match *slot {
                Slot::Old(i) | Slot::Pad(i) => i,
                Slot::Band => 0,
            };
            axis.iter()
                .flat_map(|slot| values[of(slot) * taps..(of(slot) + 1) * taps].to_vec())
                .collect()
        };
        let norm = |axis: Axis, gain: f32, band: f32| -> Vec<f32> {
            let value = |slot: Slot| match slot {
                // Padding is multiplied with 0.
                Slot::Old(i) | Slot::Pad(i) => values[i] * gain,
                Slot::Band => band,
            };
            axis.into_iter().map(value).collect()
        };
        let root = self.root();
        let taps = n / self.old_channels().max(1);
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let values = match module {
            "norm" | "mtp.norm" if is_qwen => norm(
                self.hidden(),
                1.0 / (root * root),
                if module == "norm" {
                    BAND_NORM
                } else {
                    BAND_NORM / 16.0
                },
            ),
            "norm" => norm(self.hidden(), 1.0 / root, BAND_NORM / self.band_gain()?),
            "mtp.pre_fc_norm_embedding" => norm(self.hidden(), 1.0 / root, 1.0),
            _ if name
                .strip_suffix(".bias")
                .is_some_and(|module| TOWER_WRITERS.contains(&module)) =>
            {
                let value = |slot: &Slot| match *slot {
                    Slot::Old(i) => values[i] * root,
                    Slot::Pad(_) | Slot::Band => 0.0,
                };
                self.hidden().iter().map(value).collect()
            }
            _ => match module.rsplit('.').next().unwrap_or(module) {
                // What they read is doubled, and so must be what they give.
                "post_attention_layernorm" | "post_feedforward_layernorm" if !is_qwen => {
                    norm(self.hidden(), 1.0, BAND_CLOSED)
                }
                "input_layernorm"
                | "post_attention_layernorm"
                | "pre_feedforward_layernorm"
                | "pre_fc_norm_hidden" => norm(self.hidden(), 1.0 / root, BAND_CLOSED),
                "layer_scalar" if is_new => vec![1.0; n],
                "conv1d" => pick(&self.delta_channels(), taps),
                "A_log" | "dt_bias" => pick(&self.delta_heads().1, 1),
                "q_norm" | "k_norm" | "norm" | "layer_scalar" => values,
                _ => {
                    return Err(unsupported(&format!("`{name}`")));
                }
            },
        };
        let shape = match shape {
            [_] => vec![values.len()],
            _ => vec![values.len() / taps, taps, 1],
        };
        Ok(Item::vector(as_name, shape, values))
    }

    fn old_channels(&self) -> usize {
        let (nk, nv, dk, dv) = self.shape.delta;
        2 * nk * dk + nv * dv
    }

    /// What happens to Gemma's band between the embedding and the final norm, to
    /// the nearest power of two.
    fn band_gain(&self) -> Result<f32, ConvertError> {
        let mut gain = ((self.shape.hidden * WIDER) as f32).sqrt();
        for i in 0..self.shape.types.len() {
            gain *= self
                .checkpoint
                .vector(&format!("layers.{i}.layer_scalar"), 1)?[0];
        }
        require(gain.is_normal(), || {
            "the product of all layer_scalar is 0".into()
        })?;
        Ok(gain.abs().log2().round().exp2().copysign(gain))
    }

    fn config(&self, layers: usize, extra: usize) -> Result<Value, ConvertError> {
        let (shape, growth) = (&self.shape, &self.growth);
        let mut config = self.checkpoint.whole_config();
        let is_assistant = shape.family == Family::Gemma4Assistant;
        if is_assistant {
            config["backbone_hidden_size"] = json!(shape.backbone * WIDER);
        }
        let nested = config.get("text_config").is_some_and(Value::is_object);
        let text = if nested {
            &mut config["text_config"]
        } else {
            &mut config
        };
        for key in [
            "num_attention_heads",
            "num_key_value_heads",
            "num_global_key_value_heads",
        ] {
            if let Some(n) = text.get(key).and_then(Value::as_u64) {
                text[key] = json!(n * growth.heads as u64);
            }
        }
        if shape.family == Family::Qwen35 {
            let heads = shape.delta.1 * growth.heads;
            text["linear_num_key_heads"] = json!(heads);
            text["linear_num_value_heads"] = json!(heads);
        }
        if !is_assistant {
            text["hidden_size"] = json!(shape.hidden * WIDER);
            text["num_hidden_layers"] = json!(layers);
            if let Some(types) = text.get("layer_types").and_then(Value::as_array).cloned() {
                let n = types.len();
                let types: Vec<Value> = (0..extra)
                    .map(|i| types[i % n].clone())
                    .chain(types.iter().cloned())
                    .collect();
                text["layer_types"] = Value::Array(types);
            }
        }
        text["intermediate_size"] = json!(self.inner());
        text["vocab_size"] = json!(growth.vocab);
        // What Qwen's tower writes; Gemma's writes what the model has.
        if let Some(hidden) = config["vision_config"]["out_hidden_size"].as_u64() {
            config["vision_config"]["out_hidden_size"] = json!(hidden * WIDER as u64);
        }
        Ok(config)
    }
}

fn unsupported(what: &str) -> ConvertError {
    ConvertError::Growth(format!("growing {what} is not supported"))
}

/// An error unless `ok`.
fn require(ok: bool, message: impl FnOnce() -> String) -> Result<(), ConvertError> {
    match ok {
        true => Ok(()),
        false => Err(ConvertError::Growth(message())),
    }
}
