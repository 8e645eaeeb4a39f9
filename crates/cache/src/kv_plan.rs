//! Which layers keep their keys and values in which formats.
//!
//! A [`KvPlan`] is one pair of formats and rules that keep some layers finer. It says nothing of a model;
//! [`KvPlan::of`] applies it to a layer.
//!
//! | rule | which layers | what it raises |
//! | --- | --- | --- |
//! | [`KvPlan::protect`] | the first and the last attention layers | keys and values |
//! | [`KvPlan::window`] | those with a sliding window, which a long context takes no more of | keys and values |
//! | [`KvPlan::gqa`] | those in which many query heads share a key head, and so an error in a key | keys, to `q8_0` |
//!
//! A rule never makes a format coarser: where two apply, the finer one holds. A format is finer than another if it
//! takes more bits a number.
//!
//! Deliberately absent: which formats a device has, and which of them a head's length fits.

mod spelling;

pub use spelling::{KV_PRESETS, KvPlanError};

use crate::MemoryPlan;
use backend::KvFormat;
use quant::KvRowFormat;
use quant::kv::Q8_0;
use std::cmp::Ordering;

/// Query heads that share a key head from which on [presets](KV_PRESETS) keep keys finer.
///
/// llama.cpp's forks with these formats draw the same line: models with four query heads a key head bore keys of
/// four bits and less, one with seven did not.
pub const MANY_QUERY_HEADS: usize = 6;

/// Attention layers at each end of a model that [`Ends::Auto`] protects, at most.
const PROTECTED: usize = 2;

/// Keys or values of one attention layer, and what of the layer decides their format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvLayer {
    /// Key/value heads `K`.
    pub heads: usize,
    /// Head size `e`.
    pub head_dim: usize,
    /// Query heads that share a key head.
    pub query_heads: usize,
    /// Where in its model the layer stands. Absent in a draft head, whose few layers are no ends of a model.
    pub edge: Option<Edge>,
}

/// How near an end of its model an attention layer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Edge {
    /// Attention layers between it and the nearer end.
    pub distance: usize,
    /// Attention layers of the model.
    pub layers: usize,
}

impl Edge {
    /// Layer `index` of a model's `layers` attention layers.
    pub fn of(index: usize, layers: usize) -> Edge {
        Edge {
            distance: index.min(layers.saturating_sub(index + 1)),
            layers,
        }
    }

    /// The place of keys and values that both this layer and the one at `other` read.
    #[must_use]
    pub fn nearer(self, other: Edge) -> Edge {
        Edge {
            distance: self.distance.min(other.distance),
            ..self
        }
    }
}

/// The formats of all layers' keys and values.
///
/// ```
/// let plan = cache::KvPlan::parse("turbo4,turbo3,protect=2,window=q8_0", ',').unwrap();
/// assert_eq!(plan.base.to_string(), "turbo4,turbo3");
/// assert_eq!(plan.to_string(), "turbo4,turbo3,protect=2,window=q8_0");
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvPlan {
    /// The pair of formats of layers that no rule is about.
    pub base: KvFormat,
    /// The first and last attention layers.
    pub protect: Option<Protect>,
    /// Layers with a sliding window: at least in these formats.
    pub window: Option<KvFormat>,
    /// From so many query heads a key head on, keys are at least in `q8_0`.
    pub gqa: Option<usize>,
}

/// The first and last attention layers of a model, and the formats that they have at least.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Protect {
    /// How many.
    pub layers: Ends,
    /// Their formats.
    pub format: KvFormat,
}

/// How many attention layers at each end of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// Two, but a quarter of the model's attention layers at most.
    Auto,
    /// So many, in models of less than twice that all.
    Exactly(usize),
}

impl Ends {
    fn contain(self, edge: Edge) -> bool {
        edge.distance
            < match self {
                Ends::Auto => PROTECTED.min(edge.layers / 4),
                Ends::Exactly(n) => n,
            }
    }
}

/// Layers of one window and one pair of formats.
#[derive(Clone, Debug, PartialEq)]
pub struct KvLayers {
    /// The formats.
    pub format: KvFormat,
    /// Rows that the layers see; all if absent.
    pub window: Option<usize>,
    /// How many layers own such keys and values.
    pub layers: usize,
}

impl KvPlan {
    /// All keys and values of all layers in `format`.
    pub const fn both(format: &'static KvRowFormat) -> KvPlan {
        KvPlan::pair(KvFormat::both(format))
    }

    /// All layers in the pair `base`.
    pub const fn pair(base: KvFormat) -> KvPlan {
        KvPlan {
            base,
            protect: None,
            window: None,
            gqa: None,
        }
    }

    /// The formats of `layer`, which sees `window` rows; all if absent.
    pub fn of(&self, layer: &KvLayer, window: Option<usize>) -> KvFormat {
        let ends = self.protect.zip(layer.edge);
        let ends = ends.filter(|(protect, edge)| protect.layers.contain(*edge));
        let gqa = self.gqa.filter(|&many| layer.query_heads >= many);
        let rules = [
            ends.map(|(protect, _)| protect.format),
            window.and(self.window),
            gqa.map(|_| KvFormat {
                k: &Q8_0,
                v: self.base.v,
            }),
        ];
        rules.into_iter().flatten().fold(self.base, finer)
    }
}

impl From<KvFormat> for KvPlan {
    fn from(base: KvFormat) -> KvPlan {
        KvPlan::pair(base)
    }
}

/// The finer format of keys, and that of values.
fn finer(a: KvFormat, b: KvFormat) -> KvFormat {
    let finer = |a, b| match compare(a, b) {
        Ordering::Less => b,
        _ => a,
    };
    KvFormat {
        k: finer(a.k, b.k),
        v: finer(a.v, b.v),
    }
}

/// By bits a number, the coarser one first.
fn compare(a: &KvRowFormat, b: &KvRowFormat) -> Ordering {
    // Columns that are whole blocks of every format.
    const COLUMNS: usize = 128;
    a.row_bytes(COLUMNS).cmp(&b.row_bytes(COLUMNS))
}

impl MemoryPlan {
    /// How many layers have which formats by `kv`, in the order of groups and layers.
    pub fn kv_layers(&self, kv: &KvPlan) -> Vec<KvLayers> {
        let mut all: Vec<KvLayers> = Vec::new();
        for group in &self.groups {
            for layer in &group.layers {
                let (format, window) = (kv.of(layer, group.window), group.window);
                match all
                    .iter_mut()
                    .find(|l| (l.format, l.window) == (format, window))
                {
                    Some(alike) => alike.layers += 1,
                    None => all.push(KvLayers {
                        format,
                        window,
                        layers: 1,
                    }),
                }
            }
        }
        all
    }

    /// Layers whose keys are coarser than `q8_0` by `kv` though [many](MANY_QUERY_HEADS) query heads share each,
    /// and the most query heads that do.
    pub fn coarse_shared_keys(&self, kv: &KvPlan) -> Option<(usize, usize)> {
        let layers = self.groups.iter().flat_map(|group| {
            let layers = group.layers.iter();
            layers.filter(|layer| {
                let is_coarse = compare(kv.of(layer, group.window).k, &Q8_0).is_lt();
                is_coarse && layer.query_heads >= MANY_QUERY_HEADS
            })
        });
        let heads: Vec<usize> = layers.map(|layer| layer.query_heads).collect();
        Some((heads.len(), *heads.iter().max()?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GroupPlan;

    fn plan(text: &str) -> KvPlan {
        KvPlan::parse(text, ',').unwrap()
    }

    /// Layer `index` of `layers`.
    fn layer(index: usize, layers: usize, query_heads: usize) -> KvLayer {
        KvLayer {
            heads: 1,
            head_dim: 128,
            query_heads,
            edge: Some(Edge::of(index, layers)),
        }
    }

    fn formats(text: &str, layers: usize) -> Vec<String> {
        let plan = plan(text);
        let formats = (0..layers).map(|i| plan.of(&layer(i, layers, 1), None).to_string());
        formats.collect()
    }

    #[test]
    fn ends_are_finer_and_the_middle_is_not() {
        let [fine, coarse] = ["q8_0", "turbo4,turbo3"];
        let one = formats("turbo4,turbo3,protect=1", 5);
        assert_eq!(one, [fine, coarse, coarse, coarse, fine]);
        let two = formats("turbo4,turbo3,protect=2", 5);
        assert_eq!(two, [fine, fine, coarse, fine, fine]);
        assert_eq!(formats("turbo4,turbo3,protect=2", 3), [fine; 3]);
        let values = formats("q8_0,turbo2,protect=1", 3);
        assert_eq!(values, [fine, "q8_0,turbo2", fine]);
    }

    #[test]
    fn a_quarter_of_the_layers_at_most_is_an_end() {
        let protected = |layers| {
            let formats = formats("turbo4,turbo3,protect=auto", layers);
            formats.iter().filter(|f| *f == "q8_0").count()
        };
        let numbers = [1, 2, 3, 4, 7, 8, 9, 40].map(protected);
        assert_eq!(numbers, [0, 0, 0, 2, 2, 4, 4, 4]);
    }

    #[test]
    fn no_rule_makes_a_format_coarser() {
        let of = |text, window| plan(text).of(&layer(0, 8, 8), window).to_string();
        assert_eq!(of("turbo4,turbo3,window=q8_0", None), "turbo4,turbo3");
        assert_eq!(of("turbo4,turbo3,window=q8_0", Some(64)), "q8_0");
        assert_eq!(of("turbo4,turbo3,gqa=8", None), "q8_0,turbo3");
        assert_eq!(of("turbo4,turbo3,gqa=9", None), "turbo4,turbo3");
        assert_eq!(of("turbo4,q8_0,protect=1:q8_0/turbo4", None), "q8_0");
        assert_eq!(of("turbo4,bf16,protect=1", None), "q8_0,bf16");
        let all = "q4_0,protect=1:q5_0,window=rot-q8_0/q4_0,gqa=2";
        assert_eq!(of(all, Some(64)), "rot-q8_0,q5_0");
        assert_eq!(of(all, None), "q8_0,q5_0");
    }

    #[test]
    fn a_draft_head_has_no_ends() {
        let head = KvLayer {
            edge: None,
            ..layer(0, 1, 8)
        };
        let plan = plan("turbo4,turbo3,protect=1,gqa=6");
        assert_eq!(plan.of(&head, None).to_string(), "q8_0,turbo3");
        assert_eq!(plan.of(&layer(0, 1, 1), None).to_string(), "q8_0");
    }

    #[test]
    fn keys_that_many_layers_read_are_as_near_an_end_as_the_nearest() {
        let shared = Edge::of(3, 10).nearer(Edge::of(9, 10));
        assert_eq!(
            shared,
            Edge {
                distance: 0,
                layers: 10
            }
        );
        assert_eq!(Edge::of(1, 10).nearer(Edge::of(5, 10)), Edge::of(1, 10));
    }

    fn windowed_and_full() -> MemoryPlan {
        let group = |window, layers| GroupPlan { window, layers };
        MemoryPlan {
            groups: vec![
                group(
                    Some(64),
                    vec![layer(0, 5, 2), layer(1, 5, 2), layer(3, 5, 2)],
                ),
                group(None, vec![layer(2, 5, 8), layer(4, 5, 8)]),
            ],
            delta: vec![],
        }
    }

    #[test]
    fn layers_are_counted_by_window_and_formats() {
        let of = |text| {
            let layers = windowed_and_full().kv_layers(&plan(text));
            let layers = layers.iter();
            let row = |l: &KvLayers| format!("{} {:?} {}", l.layers, l.window, l.format);
            layers.map(row).collect::<Vec<_>>()
        };
        assert_eq!(of("f16"), ["3 Some(64) f16", "2 None f16"]);
        assert_eq!(
            of("turbo4,turbo3,protect=1"),
            [
                "1 Some(64) q8_0",
                "2 Some(64) turbo4,turbo3",
                "1 None turbo4,turbo3",
                "1 None q8_0"
            ]
        );
    }

    #[test]
    fn coarse_keys_of_many_query_heads_are_found() {
        let found = |text| windowed_and_full().coarse_shared_keys(&plan(text));
        assert_eq!(found("turbo4,turbo3"), Some((2, 8)));
        assert_eq!(found("turbo4,turbo3,protect=1"), Some((1, 8)));
        assert_eq!(found("turbo"), None);
        assert_eq!(found("q8_0,turbo3"), None);
    }
}
