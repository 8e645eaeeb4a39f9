//! Growing a small checkpoint to the size of a large one that writes the same.
//!
//! Speed depends on shapes, acceptance on what a model has learnt. A small
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
//! experts, per-layer embeddings, shared keys or centroids.

use crate::{ConvertError, Data, Item, Recipe};
use models::{Outline, OutlineFamily as Family};
use quant::{Owned, Scalar, Stored, WeightLayout};
use serde_json::{Value, json};
use weights::Checkpoint;

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
/// Sizes of released models' vocabularies.
const VOCABULARY: [(&str, usize); 2] = [("gemma4", 262_144), ("qwen3_5", 248_320)];

/// The size to grow to. All but `layers` is at least what the model has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Times as many heads of every kind.
    pub heads: usize,
    /// Columns of the feed-forward blocks.
    pub inner: usize,
    /// Columns of the feed-forward blocks of a drafter of its own.
    pub drafter_inner: usize,
    /// Layers.
    pub layers: usize,
    /// Tokens.
    pub vocab: usize,
}

impl Growth {
    /// The shape of a real model with at most `parameters` weights: feed-forward
    /// blocks three times as wide as the hidden rows, the vocabulary of released
    /// models, and as many layers as fit.
    ///
    /// # Errors
    ///
    /// If `checkpoint` cannot be grown, or has more weights than that without a
    /// single new layer.
    pub fn to(checkpoint: &Checkpoint, parameters: u64) -> Result<Growth, ConvertError> {
        let shape = Shape::read(checkpoint)?;
        let hidden = shape.hidden * WIDER;
        let vocab = VOCABULARY
            .iter()
            .find(|(family, _)| *family == shape.family.name());
        let mut growth = Growth {
            heads: WIDER,
            inner: 3 * hidden,
            drafter_inner: 2048,
            layers: shape.types.len(),
            vocab: vocab.map_or(shape.vocab, |v| v.1).max(shape.vocab),
        };
        let size = |growth: &Growth| -> Result<u64, ConvertError> {
            let recipe = inflate(checkpoint, growth)?;
            Ok(recipe
                .items
                .iter()
                .map(|item| (item.rows() * item.cols()) as u64)
                .sum())
        };
        let least = size(&growth)?;
        require(least <= parameters, || {
            format!(
                "grown to the width of a real model it has {least} weights, more than {parameters}"
            )
        })?;
        let period = shape.period();
        let more = Growth {
            layers: growth.layers + period,
            ..growth
        };
        growth.layers += ((parameters - least) / (size(&more)? - least)) as usize * period;
        Ok(growth)
    }
}

/// What of a configuration decides how a model grows.
struct Shape {
    family: Family,
    hidden: usize,
    /// Of the target, for an assistant.
    backbone: usize,
    inner: usize,
    vocab: usize,
    /// Whether a layer is of its family's rarer kind.
    types: Vec<bool>,
    /// Rows of the gated delta rule: key heads, value heads, their sizes.
    delta: (usize, usize, usize, usize),
    tied: bool,
}

impl Shape {
    fn read(checkpoint: &Checkpoint) -> Result<Shape, ConvertError> {
        let outline = Outline::read(checkpoint)?;
        let refuse = |feature: &str| Err(unsupported(feature));
        let shares = checkpoint.text_config().get("num_kv_shared_layers");
        let shares = shares.and_then(Value::as_u64).unwrap_or(0) > 0;
        match outline.family {
            Family::Qwen35 if outline.has_experts => return refuse("experts"),
            _ if outline.has_experts || outline.has_per_layer_embeddings => {
                return refuse("experts and per-layer embeddings");
            }
            Family::Gemma4 if shares => return refuse("layers that share keys and values"),
            Family::Gemma4 | Family::Gemma4Assistant
                if checkpoint.has("masked_embedding.centroids.weight") =>
            {
                return refuse("a head with centroids");
            }
            _ => {}
        }
        let delta = outline.delta.map_or((0, 0, 0, 0), |delta| {
            (
                delta.key_heads,
                delta.value_heads,
                delta.key_dim,
                delta.value_dim,
            )
        });
        Ok(Shape {
            family: outline.family,
            hidden: outline.hidden_size,
            backbone: outline.backbone_hidden_size,
            inner: outline.intermediate_size,
            vocab: outline.vocab_size,
            types: outline.full_attention,
            delta,
            tied: outline.tie_word_embeddings,
        })
    }

    /// Layers after which their types repeat.
    fn period(&self) -> usize {
        let n = self.types.len();
        let repeats = |p: &usize| (0..n).all(|i| self.types[i] == self.types[i % p]);
        (1..n)
            .filter(|p| n.is_multiple_of(*p))
            .find(repeats)
            .unwrap_or(n)
    }
}

/// Where a row or column of a grown matrix comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// The same of the small matrix.
    Old(usize),
    /// Padding; a copy of this, where nothing reads it.
    Pad(usize),
    /// The band that carries the constant: padding too.
    Band,
}

type Axis = Vec<Slot>;

fn old(n: usize) -> Axis {
    (0..n).map(Slot::Old).collect()
}

/// `n` old ones, then copies.
fn grown(n: usize, to: usize) -> Axis {
    (0..to)
        .map(|i| {
            if i < n {
                Slot::Old(i)
            } else {
                Slot::Pad(i % n)
            }
        })
        .collect()
}

/// As [`grown`], with the band behind the old ones.
fn banded(n: usize, to: usize) -> Axis {
    let band = |i: usize| (n..n + BAND).contains(&i);
    grown(n, to)
        .into_iter()
        .enumerate()
        .map(|(i, slot)| if band(i) { Slot::Band } else { slot })
        .collect()
}

/// `first`, then the same for what lies `offset` behind it in the small matrix.
fn and(mut first: Axis, second: &Axis, offset: usize) -> Axis {
    first.extend(second.iter().map(|slot| match *slot {
        Slot::Old(i) => Slot::Old(i + offset),
        Slot::Pad(i) => Slot::Pad(i + offset),
        Slot::Band => Slot::Band,
    }));
    first
}

/// `heads` as an axis of heads of `size` each.
fn of_size(heads: &Axis, size: usize) -> Axis {
    let each = |slot: &Slot| {
        let slot = *slot;
        (0..size).map(move |i| match slot {
            Slot::Old(h) => Slot::Old(h * size + i),
            Slot::Pad(h) => Slot::Pad(h * size + i),
            Slot::Band => Slot::Band,
        })
    };
    heads.iter().flat_map(each).collect()
}

/// How one matrix grows.
struct Rule {
    rows: Axis,
    cols: Axis,
    /// Factors of the left and the right half of the old columns.
    gain: [f32; 2],
    /// Factors of padding rows and columns; 0 where something reads them.
    copy: [f32; 2],
    /// The band's columns in old rows, in padding rows and in its own rows.
    band: [f32; 3],
}

impl Rule {
    fn new(rows: Axis, cols: Axis) -> Rule {
        Rule {
            rows,
            cols,
            gain: [1.0; 2],
            copy: [0.0; 2],
            band: [0.0; 3],
        }
    }

    /// Padding is a copy: nothing reads it.
    fn free(self) -> Rule {
        Rule {
            copy: [1.0; 2],
            ..self
        }
    }

    fn gain(self, gain: f32) -> Rule {
        Rule {
            gain: [gain; 2],
            ..self
        }
    }

    /// Row `row` of the grown matrix, behind those in `out`.
    fn push(&self, from: &Stored<'_>, row: usize, out: &mut Owned) {
        let slot = self.rows[row];
        let (Slot::Old(source) | Slot::Pad(source)) = slot else {
            return self.push_band(out);
        };
        let is_old = matches!(slot, Slot::Old(_));
        let stored = from.row(source);
        let unit = from.format.block;
        let bytes = from.format.code_bytes(unit);
        for group in self.cols.chunks_exact(unit) {
            let (at, copy) = match group[0] {
                Slot::Old(c) => (c, 1.0),
                Slot::Pad(c) => (c, self.copy[1]),
                Slot::Band => {
                    constant(out, unit, self.band[usize::from(!is_old)]);
                    continue;
                }
            };
            let gain =
                self.gain[2 * at / from.cols] * copy * if is_old { 1.0 } else { self.copy[0] };
            match from.format.layout {
                _ if gain == 0.0 => constant(out, unit, 0.0),
                WeightLayout::Plain(scalar) => {
                    put(&mut out.codes, scalar, scalar.get(stored.codes, at) * gain)
                }
                _ => {
                    let g = at / unit;
                    out.codes
                        .extend_from_slice(&stored.codes[g * bytes..][..bytes]);
                    put(
                        &mut out.scales,
                        from.scale,
                        from.scale.get(stored.scales, g) * gain,
                    );
                    put(
                        &mut out.biases,
                        from.scale,
                        from.scale.get(stored.biases, g) * gain,
                    );
                }
            }
        }
        out.rows += 1;
    }

    /// A row of the band: it reads the first band of the columns.
    fn push_band(&self, out: &mut Owned) {
        let first = self
            .cols
            .iter()
            .position(|&slot| slot == Slot::Band)
            .unwrap_or(0);
        let unit = out.format.block;
        for at in (0..self.cols.len()).step_by(unit) {
            let is_first = (first..first + BAND).contains(&at);
            constant(out, unit, if is_first { self.band[2] } else { 0.0 });
        }
        out.rows += 1;
    }
}

/// One group of columns that all hold `value`.
fn constant(out: &mut Owned, cols: usize, value: f32) {
    match out.format.layout {
        WeightLayout::Plain(scalar) => (0..cols).for_each(|_| put(&mut out.codes, scalar, value)),
        _ => {
            let bytes = out.codes.len() + out.format.code_bytes(cols);
            out.codes.resize(bytes, 0);
            put(&mut out.scales, out.scale, 1.0);
            put(&mut out.biases, out.scale, value);
        }
    }
}

fn put(bytes: &mut Vec<u8>, scalar: Scalar, value: f32) {
    let at = bytes.len();
    bytes.resize(at + scalar.bytes(), 0);
    scalar.put(&mut bytes[at..], 0, value);
}

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
        let is_offset =
            is_qwen && name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight");
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
        let mut config = self.checkpoint.config().clone();
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
