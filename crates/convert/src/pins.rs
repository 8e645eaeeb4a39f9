//! Sets of matrices that are pinned: stored finer than the others, because a model with few bits
//! needs them most.
//!
//! The sets of pins are those with which GGUF files for speculative decoding are made elsewhere
//! (`qwen36-ud` masks of llama.cpp forks), over canonical names.

use crate::quantize::matches;
use quant::{Format, WeightLayout};

/// Patterns of canonical names, and the bits that tensors which fit have at least.
type Pinned = &'static [(&'static str, u8)];

/// A set of pins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pins {
    /// The name users see and type.
    pub name: &'static str,
    /// What is pinned, in a few words.
    pub about: &'static str,
    pinned: Pinned,
}

/// What drafts are made with, and what decides which rows attention looks at.
const MTP: Pinned = &[
    ("mtp.*", 8),
    ("*.self_attn.q_proj.*", 6),
    ("*.self_attn.k_proj.*", 6),
];

/// The former, and all else that is small or that errors of few bits harm most.
const UDT: Pinned = &[
    ("mtp.*", 8),
    ("embed_tokens.*", 8),
    ("lm_head.*", 8),
    ("*.self_attn.q_proj.*", 6),
    ("*.self_attn.k_proj.*", 6),
    ("*.self_attn.v_proj.*", 6),
    ("*.mlp.down_proj.*", 6),
];

impl Pins {
    /// Nothing is pinned.
    pub const NONE: Pins = Pins {
        name: "none",
        about: "nothing",
        pinned: &[],
    };

    /// Every set, in the order users see them.
    pub const ALL: &[Pins] = &[
        Pins::NONE,
        Pins {
            name: "mtp",
            about: "MTP heads with 8 bits, attention's queries and keys with 6",
            pinned: MTP,
        },
        Pins {
            name: "udt",
            about: "the same, embeddings and the output with 8, values and dense down projections with 6",
            pinned: UDT,
        },
    ];

    /// The set called `name`.
    pub fn named(name: &str) -> Option<Pins> {
        Pins::ALL.iter().find(|pins| pins.name == name).copied()
    }

    /// The set that matrices in `format` have unless another is asked for: `mtp` for formats of
    /// rotated columns, which are those of files with such pins; else `none`.
    pub fn of(format: &Format) -> Pins {
        let rotated = format.codes().is_some_and(|codes| codes.rotated.is_some());
        Pins::ALL[usize::from(rotated)]
    }

    /// The format of the matrix `name` with rows of `cols` columns, of which others are stored as
    /// `format`; none if it is not pinned, or `format` is as fine.
    pub(crate) fn format(
        &self,
        name: &str,
        cols: usize,
        format: &'static Format,
    ) -> Option<&'static Format> {
        let fits = |(pattern, _): &&(&str, u8)| matches(pattern, name);
        let (_, bits) = self.pinned.iter().find(fits)?;
        finer(format, *bits, cols)
    }
}

/// The relative of `format` with 6 or 8 bits, in rows of `cols` columns; none if `format` has as
/// many. Where 6 bits need longer blocks than a row is, it has 8.
pub(crate) fn finer(format: &'static Format, bits: u8, cols: usize) -> Option<&'static Format> {
    match format.layout {
        WeightLayout::Affine { bits: few, group } if few < bits => {
            quant::affine(bits.into(), group.into())
        }
        WeightLayout::Block { cols: n, bytes }
            if 8 * usize::from(bytes) < usize::from(bits) * usize::from(n) =>
        {
            let six =
                quant::format("q6_k").filter(|six| bits == 6 && cols.is_multiple_of(six.block));
            six.or_else(|| quant::format("q8_0"))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_pinned_is_finer_and_nothing_is_coarser() {
        let format = |name| quant::format(name).unwrap();
        let found = |pins: &str, name: &str, cols, base| {
            let pins = Pins::named(pins).unwrap();
            pins.format(name, cols, format(base)).map(|f| f.name)
        };
        let (q, up) = (
            "layers.3.self_attn.q_proj.weight",
            "layers.3.mlp.up_proj.weight",
        );
        let down = "layers.3.mlp.down_proj.weight";
        let head = "mtp.layers.0.self_attn.q_proj.weight";
        for (pins, name, cols, base, expected) in [
            ("mtp", head, 512, "tq3_1s", Some("q8_0")),
            ("mtp", q, 512, "tq3_1s", Some("q6_k")),
            ("mtp", q, 384, "tq3_1s", Some("q8_0")),
            ("mtp", q, 512, "q8_0", None),
            ("mtp", q, 512, "q6_k", None),
            ("mtp", q, 512, "affine4-g64", Some("affine6-g64")),
            ("mtp", head, 512, "affine4-g64", Some("affine8-g64")),
            ("mtp", up, 512, "tq3_1s", None),
            ("mtp", down, 512, "tq3_1s", None),
            ("udt", down, 512, "tq4_1s", Some("q6_k")),
            ("udt", "layers.3.mlp.experts.down_proj", 512, "tq4_1s", None),
            ("udt", "lm_head.weight", 512, "tq4_1s", Some("q8_0")),
            ("none", head, 512, "tq3_1s", None),
        ] {
            assert_eq!(
                found(pins, name, cols, base),
                expected,
                "{pins} {name} {base}"
            );
        }
        for (base, expected) in [
            ("tq3_1s", "mtp"),
            ("tq4_1s", "mtp"),
            ("q4_k", "none"),
            ("bf16", "none"),
        ] {
            assert_eq!(Pins::of(format(base)).name, expected);
        }
    }
}
