//! Whether stored norms hold `w` or `1 + w` (`checkpoints.md` §2.4 and §2.5).
//!
//! Qwen's offset norms compute `x/rms(x) · (1 + w)`. Hugging Face files store
//! `w`, centred on 0 (raw); converted files store the effective scale `1 + w`
//! (folded). Nothing in a norm's own name or shape tells them apart, and the
//! wrong choice gives fluent nonsense or a head that is never accepted, so it is
//! made once a part, from signs of who wrote the file, and checked by value.

use crate::Checkpoint;
use crate::LoadError;
use crate::checkpoint::Writer;
use crate::names;

/// What the stored numbers of a part's offset norms are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Folding {
    /// `w`.
    Raw,
    /// `1 + w`.
    Folded,
}

/// The parts of a checkpoint that may come from different writers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Trunk,
    Mtp,
}

impl Part {
    pub(crate) fn of(name: &str) -> Part {
        if name.starts_with(names::MTP) {
            Part::Mtp
        } else {
            Part::Trunk
        }
    }

    fn name(self) -> &'static str {
        match self {
            Part::Trunk => "trunk",
            Part::Mtp => "MTP head",
        }
    }
}

/// Two facts that cannot both hold.
#[derive(Clone, Debug)]
pub(crate) struct Disagreement {
    part: Part,
    one: String,
    other: String,
}

impl From<Disagreement> for LoadError {
    fn from(d: Disagreement) -> LoadError {
        LoadError::NormsDisagree {
            part: d.part.name(),
            one: d.one,
            other: d.other,
        }
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
/// Where the mean of scales lies.
const SCALE_MEAN: std::ops::Range<f64> = 0.5..2.0;
/// Values of one norm that are looked at; wider than any hidden size.
const MAX_LOOKED_AT: usize = 1 << 16;

/// Decides for one part, from who wrote it, and checks by value.
pub(crate) fn decide(checkpoint: &Checkpoint, part: Part) -> Result<Folding, Disagreement> {
    let (folding, sign) = written_by(checkpoint, part)?;
    let (mut n, mut sum, mut not_positive) = (0usize, 0f64, 0usize);
    for (name, tensor) in checkpoint.tensors() {
        if Part::of(name) != part || !names::is_offset_norm(name) {
            continue;
        }
        let Some(scalar) = tensor.entry.dtype.scalar() else {
            continue;
        };
        let bytes = checkpoint.data(tensor);
        for i in 0..tensor.entry.elements().min(MAX_LOOKED_AT) {
            let value = scalar.get(bytes, i);
            n += 1;
            sum += f64::from(value);
            not_positive += usize::from(value <= 0.0 || value.is_nan());
        }
    }
    let (mean, share) = (sum / n.max(1) as f64, not_positive as f64 / n.max(1) as f64);
    let fits = match folding {
        Folding::Folded => share <= FOLDED_NOT_POSITIVE_MAX,
        Folding::Raw => share >= RAW_NOT_POSITIVE_MIN || !SCALE_MEAN.contains(&mean),
    };
    if n > 0 && !fits {
        let other = format!(
            "their values have mean {mean:.2} and {:.1} % of them are not positive",
            100.0 * share
        );
        return Err(Disagreement {
            part,
            one: sign,
            other,
        });
    }
    Ok(folding)
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
        .filter(|(name, _)| names::is_conv(name))
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
