//! Whether stored norms hold `w` or `1 + w` (`checkpoints.md` §2.4 and §2.5).
//!
//! Qwen's offset norms compute `x/rms(x) · (1 + w)`. Hugging Face files store
//! `w`, centered on 0 (raw); converted files store the effective scale `1 + w`
//! (folded). Nothing in a norm's own name or shape tells them apart, and the
//! wrong choice gives fluent nonsense or a head that is never accepted, so it is
//! made once a part, from signs of who wrote the file, and checked by value.

use crate::families::{is_convolution, is_offset_norm};
use crate::folding::{Disagreement, Folding, Part};
use crate::tensor::Writer;
use crate::{Checkpoint, LoadError};

impl Checkpoint {
    /// The effective scale `1 + w` of the offset norm `name`, of `n` elements. Files that
    /// store `w` and files that store `1 + w` give the same. Marks the tensor used.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::vector`], and if signs of what is stored disagree.
    ///
    /// # Panics
    ///
    /// If `name` is no offset norm ([`Checkpoint::is_offset_norm`]): a norm without
    /// offset is a [`Checkpoint::vector`].
    pub fn norm(&self, name: &str, n: usize) -> Result<Vec<f32>, LoadError> {
        assert!(is_offset_norm(name), "`{name}` is no offset norm");
        let mut scale = self.vector(name, n)?;
        let part = Part::of(name);
        if self.norms.folding(part, || decide(self, part))? == Folding::Raw {
            scale.iter_mut().for_each(|w| *w += 1.0);
        }
        Ok(scale)
    }

    /// Whether the canonical `name` is that of a norm that computes with `1 + w` in
    /// families that have such norms, so that [`Checkpoint::norm`] may read it.
    pub fn is_offset_norm(name: &str) -> bool {
        is_offset_norm(name)
    }

    /// What the offset norms of the trunk and of the MTP head hold, for the parts
    /// that have any.
    pub fn norm_facts(&self) -> Vec<NormFacts> {
        facts(self)
    }
}

/// Folded norms are scales, and trained scales are positive: with a larger share
/// of values that are not, norms are not folded. `models/tiny-qwen3.5` has no
/// such value; its raw form has 80 % in the trunk and 46 % in the head.
const FOLDED_NOT_POSITIVE_MAX: f64 = 0.2;
/// Raw norms are offsets, of both signs: with a smaller share of values that are
/// not positive and a mean in [`SCALE_MEAN`], norms are not raw. The mean is
/// asked too because fresh norms are all `w = 0`, and a head may scale up every
/// channel. Means of `models/tiny-qwen3.5`: 0.81 and 1.01 folded, -0.19 and 0.01
/// raw.
const RAW_NOT_POSITIVE_MIN: f64 = 1e-3;
/// Trained scales lie on both sides of 1. Every scale of `models/tiny-qwen3.5`'s
/// head folded twice is above 1; folded once, 45 % are not.
const FOLDED_AT_MOST_ONE_MIN: f64 = 1e-3;
/// Where the mean of scales lies.
const SCALE_MEAN: std::ops::Range<f64> = 0.5..2.0;
/// Values of one norm that are looked at; wider than any hidden size.
const MAX_LOOKED_AT: usize = 1 << 16;

/// What the offset norms of the trunk or of the MTP head hold, and how that is known.
#[derive(Clone, Debug, PartialEq)]
pub struct NormFacts {
    /// The part of the model: `trunk` or `MTP head`.
    pub part: &'static str,
    /// `w` or `1 + w`; what contradicts the sign, if anything does.
    pub holds: Result<&'static str, String>,
    /// The sign that tells who wrote the part.
    pub sign: String,
    /// Mean of the stored values.
    pub mean: f64,
    /// Whether nearly no value is below 1 where the values are scales: trained
    /// scales have some, and scales to which 1 was added twice have none.
    pub may_be_folded_twice: bool,
}

/// The stored values of a part's offset norms, as far as they tell who wrote them.
#[derive(Default)]
struct Values {
    n: usize,
    sum: f64,
    not_positive: usize,
    at_most_one: usize,
}

impl Values {
    fn of(checkpoint: &Checkpoint, part: Part) -> Values {
        let mut values = Values::default();
        for (name, tensor) in checkpoint.tensors() {
            if Part::of(name) != part || !is_offset_norm(name) {
                continue;
            }
            let Some(scalar) = tensor.entry.dtype.scalar() else {
                continue;
            };
            let bytes = checkpoint.data(tensor);
            for i in 0..tensor.entry.elements().min(MAX_LOOKED_AT) {
                let value = scalar.get(bytes, i);
                values.n += 1;
                values.sum += f64::from(value);
                values.not_positive += usize::from(value <= 0.0 || value.is_nan());
                values.at_most_one += usize::from(value <= 1.0);
            }
        }
        values
    }

    fn share(&self, n: usize) -> f64 {
        n as f64 / self.n.max(1) as f64
    }

    fn mean(&self) -> f64 {
        self.sum / self.n.max(1) as f64
    }

    /// What speaks against `folding`, if anything does.
    fn against(&self, folding: Folding) -> Option<String> {
        let (mean, share) = (self.mean(), self.share(self.not_positive));
        let fits = match folding {
            Folding::Folded => share <= FOLDED_NOT_POSITIVE_MAX,
            Folding::Raw => share >= RAW_NOT_POSITIVE_MIN || !SCALE_MEAN.contains(&mean),
        };
        (self.n > 0 && !fits).then(|| {
            format!(
                "their values have mean {mean:.2} and {:.1} % of them are not positive",
                100.0 * share
            )
        })
    }
}

/// Decides for one part, from who wrote it, and checks by value.
fn decide(checkpoint: &Checkpoint, part: Part) -> Result<Folding, Disagreement> {
    let (folding, one) = written_by(checkpoint, part)?;
    match Values::of(checkpoint, part).against(folding) {
        Some(other) => Err(Disagreement { part, one, other }),
        None => Ok(folding),
    }
}

/// The facts of every part with offset norms.
fn facts(checkpoint: &Checkpoint) -> Vec<NormFacts> {
    let facts = |part: Part| {
        let values = Values::of(checkpoint, part);
        let (holds, sign, folding) = match written_by(checkpoint, part) {
            Err(d) => (Err(d.other), d.one, Folding::Raw),
            Ok((folding, sign)) => {
                let holds = match folding {
                    Folding::Raw => "w",
                    Folding::Folded => "1 + w",
                };
                (
                    values.against(folding).map_or(Ok(holds), Err),
                    sign,
                    folding,
                )
            }
        };
        (values.n > 0).then(|| NormFacts {
            part: part.name(),
            holds,
            sign,
            mean: values.mean(),
            may_be_folded_twice: folding == Folding::Folded
                && values.share(values.at_most_one) < FOLDED_AT_MOST_ONE_MIN,
        })
    };
    [Part::Trunk, Part::Mtp]
        .into_iter()
        .filter_map(facts)
        .collect()
}

/// Who wrote the part, and the sign that tells.
fn written_by(checkpoint: &Checkpoint, part: Part) -> Result<(Folding, String), Disagreement> {
    let from_sidecar = part == Part::Mtp && checkpoint.mtp_is_apart();
    if !from_sidecar && let Some(sign) = by_convolution(checkpoint, part)? {
        return Ok(sign);
    }
    for (name, tensor) in checkpoint
        .tensors()
        .filter(|(name, _)| Part::of(name) == part)
    {
        let file = checkpoint.file_name(tensor);
        let sign = match checkpoint.writer(tensor) {
            Writer::HuggingFace => None,
            Writer::Mlx => Some(format!("the metadata of `{file}` says `mlx`")),
            Writer::Gguf => Some(format!("`{file}` is a GGUF file")),
        };
        if let Some(sign) = sign {
            return Ok((Folding::Folded, format!("{sign}, which means `1 + w`")));
        }
        if name.ends_with(".scales") {
            return Ok((
                Folding::Folded,
                format!("`{name}` shows a converted file, which means `1 + w`"),
            ));
        }
    }
    Ok((
        Folding::Raw,
        "neither `mlx` metadata nor scales show a converted file, which means `w`".into(),
    ))
}

/// Hugging Face stores the depthwise convolution as `[C, 1, K]`, converted
/// files as `[C, K, 1]`.
fn by_convolution(
    checkpoint: &Checkpoint,
    part: Part,
) -> Result<Option<(Folding, String)>, Disagreement> {
    let mut found: Option<(Folding, String)> = None;
    for (name, tensor) in checkpoint
        .tensors()
        .filter(|(name, _)| is_convolution(name))
    {
        let shape = &tensor.entry.shape;
        let (folding, means) = match shape[..] {
            [_, 1, taps] if taps != 1 => (Folding::Raw, "w"),
            [_, taps, 1] if taps != 1 => (Folding::Folded, "1 + w"),
            _ => continue, // one tap, or no convolution: says nothing
        };
        let sign = format!("`{name}` has shape {shape:?}, which means `{means}`");
        match &found {
            Some((first, one)) if *first != folding => {
                return Err(Disagreement {
                    part,
                    one: one.clone(),
                    other: sign,
                });
            }
            Some(_) => {}
            None => found = Some((folding, sign)),
        }
    }
    Ok(found)
}
