//! Names in GGUF files and canonical names, in both directions (`checkpoints.md` §4):
//! how the tables of a [`Family`] are read.

use super::edit::Edit::{self, *};
use crate::families::{FUSED, Family, Name};

/// Tensors whose values follow from the configuration.
const DERIVED: &[&str] = &["rope_freqs.weight"];

/// Ends of the names of what belongs to a weight, in the file and canonical behind
/// the name of the weight's module: the factor of an `nvfp4`'s scales, and a scale
/// of activations.
const COMPANIONS: &[(&str, &str)] = &[
    (".scale", ".weight_scale_2"),
    (".input_scale", ".input_scale"),
];

impl Family {
    /// Canonical name and edit of the tensor that a file calls `stored`, in a model
    /// whose trunk has `layers` blocks; `has` says what else the file holds. A name
    /// that is not of the family stays, and shows up as unused.
    ///
    /// `None` for a tensor that the configuration replaces.
    pub(crate) fn canonical(
        &self,
        stored: &str,
        layers: usize,
        has: impl Fn(&str) -> bool,
    ) -> Option<(String, Edit)> {
        if DERIVED.contains(&stored) {
            return None;
        }
        let companion = |(end, canonical): &(&str, &str)| {
            let weight = format!("{}.weight", stored.strip_suffix(end)?);
            let (name, _) = self.known(&weight, layers, &has)?;
            let module = name.strip_suffix(".weight").unwrap_or(&name);
            Some((format!("{module}{canonical}"), Same))
        };
        // Some architectures have a name of their own for what ends like a companion.
        let known = self.known(stored, layers, &has);
        let known = known.or_else(|| COMPANIONS.iter().find_map(companion));
        Some(known.unwrap_or_else(|| (stored.to_owned(), Same)))
    }

    /// [`Family::canonical`] of a name that the tables have.
    fn known(
        &self,
        stored: &str,
        layers: usize,
        has: &impl Fn(&str) -> bool,
    ) -> Option<(String, Edit)> {
        let find = |names: &[Name], stored: &str| {
            let found = names.iter().find(|(name, ..)| *name == stored);
            found.map(|(_, canonical, edit)| (*canonical, *edit))
        };
        let Some((block, name)) = split(stored, "blk.") else {
            return find(self.whole, stored).map(|(name, edit)| (name.into(), edit));
        };
        let fused = has(&format!("blk.{block}.{FUSED}"));
        let found = fused.then(|| find(self.fused, name)).flatten();
        let found = found.or_else(|| find(self.block, name));
        match (found, block.checked_sub(layers)) {
            (Some((name, edit)), None) => Some((format!("layers.{block}.{name}"), edit)),
            (Some((name, edit)), Some(head)) => Some((format!("mtp.layers.{head}.{name}"), edit)),
            (None, Some(head)) => {
                let (name, edit) = find(self.head, name)?;
                Some(match head {
                    0 => (name.into(), edit),
                    // Each layer of a head has a copy of what they share.
                    _ => (copy_of(name, head)?, edit),
                })
            }
            (None, None) => None,
        }
    }

    /// The inverse of [`Family::canonical`]: name in the file and edit of the
    /// tensor `canonical`; `None` if the family has no such tensor. Where experts
    /// lie one by one, also which of the file's stack it is.
    pub(crate) fn stored(
        &self,
        canonical: &str,
        layers: usize,
    ) -> Option<(String, Edit, Option<usize>)> {
        let find = |names: &[Name], canonical: &str| {
            let found = names.iter().find(|(_, name, _)| *name == canonical);
            found.map(|(stored, _, edit)| (*stored, *edit))
        };
        if let Some((stored, edit)) = find(self.whole, canonical) {
            return Some((stored.into(), edit, None));
        }
        if let Some((stored, edit)) = find(self.head, canonical) {
            return Some((format!("blk.{layers}.{stored}"), edit, None));
        }
        let (layer, name) = match split(canonical, "mtp.layers.") {
            Some((head, name)) if !self.head.is_empty() => (layers.checked_add(head)?, name),
            // The one layer of some EAGLE-3 heads.
            _ => split(canonical, "layers.")
                .or_else(|| Some((0, canonical.strip_prefix("midlayer.")?)))?,
        };
        let one = self.experts.and_then(|(one, stacked)| {
            let (expert, name) = split(name, one)?;
            Some((expert, format!("{stacked}{name}")))
        });
        let (expert, name) = match &one {
            Some((expert, name)) => (Some(*expert), name.as_str()),
            None => (None, name),
        };
        let found = find(self.block, name).or_else(|| find(self.fused, name));
        found.map(|(stored, edit)| (format!("blk.{layer}.{stored}"), edit, expert))
    }

    /// Names under which a file has the tensor `canonical` once more, in a model whose trunk has
    /// `layers` blocks and whose head has `heads`: each of these has what they share.
    pub(crate) fn copies(&self, canonical: &str, layers: usize, heads: usize) -> Vec<String> {
        let shared = self.head.iter().find(|(_, name, _)| *name == canonical);
        let name = shared.map(|(stored, ..)| stored);
        let blocks = layers.saturating_add(1)..layers.saturating_add(heads);
        name.map_or_else(Vec::new, |name| {
            blocks.map(|block| format!("blk.{block}.{name}")).collect()
        })
    }
}

/// What the copy of `shared` that layer `head` of an MTP head has is called.
fn copy_of(shared: &str, head: usize) -> Option<String> {
    let name = shared.strip_prefix(crate::names::MTP)?;
    Some(format!("mtp.layers.{head}.{name}"))
}

/// `i` and `rest` of `{prefix}{i}.{rest}`.
fn split<'n>(name: &'n str, prefix: &str) -> Option<(usize, &'n str)> {
    let (number, rest) = name.strip_prefix(prefix)?.split_once('.')?;
    // As written: `07` is another name than `7`.
    let block: usize = number.parse().ok()?;
    (block.to_string() == number).then_some((block, rest))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::families::FAMILIES;

    fn family(architecture: &str) -> &'static Family {
        Family::named(architecture).unwrap()
    }

    #[test]
    fn what_is_written_is_read_under_the_same_name() {
        for family in FAMILIES {
            let blocks = family.block.iter().chain(family.fused);
            let canonical = (family.whole.iter().chain(family.head))
                .map(|(_, name, _)| (*name).to_owned())
                .chain(
                    blocks
                        .clone()
                        .map(|(_, name, _)| format!("layers.3.{name}")),
                )
                .chain(
                    blocks
                        .filter(|_| !family.head.is_empty())
                        .map(|(_, name, _)| format!("mtp.layers.0.{name}")),
                );
            for name in canonical {
                let (stored, edit, expert) = family.stored(&name, 8).unwrap();
                assert_eq!(expert, None);
                let fused =
                    name.contains("experts.gate_up_proj") || name.contains("experts.down_proj");
                let back = family.canonical(&stored, 8, |other| fused && other.ends_with(FUSED));
                assert_eq!(back, Some((name, edit)));
            }
        }
    }

    #[test]
    fn an_expert_of_its_own_is_one_of_a_stack() {
        assert_eq!(
            family("qwen35moe").stored("mtp.layers.0.mlp.experts.7.up_proj.weight", 4),
            Some(("blk.4.ffn_up_exps.weight".into(), Same, Some(7)))
        );
    }

    #[test]
    fn each_layer_of_a_head_has_a_copy_of_what_they_share() {
        let family = family("qwen35");
        let names = family.copies("mtp.norm.weight", 8, 3);
        let [second, third] =
            ["blk.9", "blk.10"].map(|b| format!("{b}.nextn.shared_head_norm.weight"));
        assert_eq!(names, [second.clone(), third]);
        let read = family.canonical(&second, 8, |_| false);
        assert_eq!(read, Some(("mtp.layers.1.norm.weight".into(), Folded)));
        assert!(family.copies("mtp.norm.weight", 8, 1).is_empty());
        assert!(
            family
                .copies("mtp.layers.0.mlp.up_proj.weight", 8, 3)
                .is_empty()
        );
        assert!(family.copies("norm.weight", 8, 3).is_empty());
    }

    #[test]
    fn what_belongs_to_a_weight_is_called_like_it() {
        for (stored, canonical) in [
            (
                "blk.1.attn_q.scale",
                "layers.1.self_attn.q_proj.weight_scale_2",
            ),
            (
                "blk.1.attn_q.input_scale",
                "layers.1.self_attn.q_proj.input_scale",
            ),
            ("blk.2.nextn.eh_proj.scale", "mtp.fc.weight_scale_2"),
            ("output.scale", "lm_head.weight_scale_2"),
        ] {
            let found = family("qwen35").canonical(stored, 2, |_| false);
            assert_eq!(found, Some((canonical.into(), Same)), "{stored}");
        }
        let own = family("gemma4").canonical("blk.0.ffn_down_exps.scale", 2, |_| false);
        assert_eq!(own.unwrap().0, "layers.0.router.per_expert_scale");
    }

    #[test]
    fn names_of_no_family_stay() {
        for name in [
            "blk.0.unheard_of",
            "blk.x.attn_q.weight",
            "blk.07.attn_q.weight",
            "v.blk.0.ln1",
            "blk.1",
        ] {
            assert_eq!(
                family("gemma4").canonical(name, 2, |_| false),
                Some((name.into(), Same))
            );
        }
        assert_eq!(
            family("gemma4").canonical("rope_freqs.weight", 2, |_| false),
            None
        );
        assert_eq!(
            family("gemma4")
                .canonical("blk.0.x.scale", 2, |_| false)
                .unwrap()
                .0,
            "blk.0.x.scale"
        );
        assert_eq!(family("qwen35").stored("visual.pos_embed.weight", 2), None);
        assert_eq!(
            family("gemma4").stored("mtp.layers.0.mlp.up_proj.weight", 2),
            None
        );
    }
}
