//! Names in GGUF files, by architecture (`checkpoints.md` §4).
//!
//! One table for both directions: a line is a name in the file, the canonical
//! name, and what the file's writer does to the values (`edit.rs`). Names of a
//! block follow `blk.{i}.` in the file and `layers.{i}.` otherwise; an MTP head is
//! the block behind the trunk's.

use super::edit::Edit::{self, *};

/// A name in the file, its canonical name, and what the writer does.
type Name = (&'static str, &'static str, Edit);

/// One architecture.
#[derive(Debug)]
pub(crate) struct Family {
    /// `general.architecture`; the first is written.
    pub(crate) architectures: &'static [&'static str],
    /// Names that occur once.
    whole: &'static [Name],
    /// Names of a block.
    block: &'static [Name],
    /// Names of a block with experts in one matrix, where it has
    /// [`FUSED`]; they go before `block`.
    fused: &'static [Name],
    /// Names of the MTP block that are not those of any block.
    head: &'static [Name],
    /// How canonical names of experts begin, one by one and stacked.
    experts: Option<(&'static str, &'static str)>,
}

/// Tensors whose values follow from the configuration.
const DERIVED: &[&str] = &["rope_freqs.weight"];

/// Ends of the names of what belongs to a weight, in the file and canonical behind
/// the name of the weight's module: the factor of an `nvfp4`'s scales, and a scale
/// of activations.
const COMPANIONS: &[(&str, &str)] = &[
    (".scale", ".weight_scale_2"),
    (".input_scale", ".input_scale"),
];

/// The name that shows experts with gate and up in one matrix.
const FUSED: &str = "ffn_gate_up_exps.weight";

const GEMMA4: Family = Family {
    architectures: &["gemma4"],
    whole: &[
        ("token_embd.weight", "embed_tokens.weight", Same),
        ("output_norm.weight", "norm.weight", Same),
        (
            "per_layer_token_embd.weight",
            "embed_tokens_per_layer.weight",
            Same,
        ),
        (
            "per_layer_model_proj.weight",
            "per_layer_model_projection.weight",
            Same,
        ),
        (
            "per_layer_proj_norm.weight",
            "per_layer_projection_norm.weight",
            Same,
        ),
    ],
    block: GEMMA4_BLOCK,
    fused: &[
        (FUSED, "experts.gate_up_proj", Same),
        ("ffn_down_exps.weight", "experts.down_proj", Same),
    ],
    head: &[],
    experts: Some(("experts.", "experts.switch_glu.")),
};

const GEMMA4_BLOCK: &[Name] = &[
    ("attn_norm.weight", "input_layernorm.weight", Same),
    ("attn_q.weight", "self_attn.q_proj.weight", Same),
    ("attn_k.weight", "self_attn.k_proj.weight", Same),
    ("attn_v.weight", "self_attn.v_proj.weight", Same),
    ("attn_q_norm.weight", "self_attn.q_norm.weight", Same),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", Same),
    ("attn_output.weight", "self_attn.o_proj.weight", Same),
    (
        "post_attention_norm.weight",
        "post_attention_layernorm.weight",
        Same,
    ),
    ("ffn_norm.weight", "pre_feedforward_layernorm.weight", Same),
    ("ffn_gate.weight", "mlp.gate_proj.weight", Same),
    ("ffn_up.weight", "mlp.up_proj.weight", Same),
    ("ffn_down.weight", "mlp.down_proj.weight", Same),
    (
        "post_ffw_norm.weight",
        "post_feedforward_layernorm.weight",
        Same,
    ),
    ("layer_output_scale.weight", "layer_scalar", Same),
    ("inp_gate.weight", "per_layer_input_gate.weight", Same),
    ("proj.weight", "per_layer_projection.weight", Same),
    ("post_norm.weight", "post_per_layer_input_norm.weight", Same),
    ("ffn_gate_inp.weight", "router.proj.weight", Same),
    ("ffn_gate_inp.scale", "router.scale", Same),
    ("ffn_down_exps.scale", "router.per_expert_scale", Same),
    (
        "pre_ffw_norm_2.weight",
        "pre_feedforward_layernorm_2.weight",
        Same,
    ),
    (
        "post_ffw_norm_1.weight",
        "post_feedforward_layernorm_1.weight",
        Same,
    ),
    (
        "post_ffw_norm_2.weight",
        "post_feedforward_layernorm_2.weight",
        Same,
    ),
    (
        "ffn_gate_exps.weight",
        "experts.switch_glu.gate_proj.weight",
        Same,
    ),
    (
        "ffn_up_exps.weight",
        "experts.switch_glu.up_proj.weight",
        Same,
    ),
    (
        "ffn_down_exps.weight",
        "experts.switch_glu.down_proj.weight",
        Same,
    ),
];

const GEMMA4_ASSISTANT: Family = Family {
    architectures: &["gemma4-assistant", "gemma4_assistant"],
    whole: &[
        ("token_embd.weight", "embed_tokens.weight", Same),
        ("output_norm.weight", "norm.weight", Same),
        ("nextn.pre_projection.weight", "pre_projection.weight", Same),
        (
            "nextn.post_projection.weight",
            "post_projection.weight",
            Same,
        ),
        (
            "masked_embd_centroids.weight",
            "masked_embedding.centroids.weight",
            Same,
        ),
        (
            "masked_embd_ordering",
            "masked_embedding.token_ordering",
            Same,
        ),
        // An older layout.
        ("mtp.pre_projection.weight", "pre_projection.weight", Same),
        ("mtp.post_projection.weight", "post_projection.weight", Same),
        (
            "mtp.centroids.weight",
            "masked_embedding.centroids.weight",
            Same,
        ),
        (
            "mtp.token_ordering",
            "masked_embedding.token_ordering",
            Same,
        ),
        (
            "mtp.token_ordering.weight",
            "masked_embedding.token_ordering",
            Same,
        ),
        (
            "masked_embd_ordering.weight",
            "masked_embedding.token_ordering",
            Same,
        ),
    ],
    block: GEMMA4_BLOCK,
    fused: &[],
    head: &[],
    experts: None,
};

const QWEN35: Family = Family {
    architectures: &["qwen35"],
    whole: QWEN35_WHOLE,
    block: QWEN35_BLOCK,
    fused: QWEN35_FUSED,
    head: QWEN35_HEAD,
    experts: Some(("mlp.experts.", "mlp.switch_mlp.")),
};

const QWEN35MOE: Family = Family {
    architectures: &["qwen35moe"],
    whole: QWEN35_WHOLE,
    block: QWEN35_BLOCK,
    fused: QWEN35_FUSED,
    head: QWEN35_HEAD,
    experts: Some(("mlp.experts.", "mlp.switch_mlp.")),
};

const QWEN35_WHOLE: &[Name] = &[
    ("token_embd.weight", "embed_tokens.weight", Same),
    ("output_norm.weight", "norm.weight", Folded),
    ("output.weight", "lm_head.weight", Same),
];

const QWEN35_BLOCK: &[Name] = &[
    ("attn_norm.weight", "input_layernorm.weight", Folded),
    (
        "post_attention_norm.weight",
        "post_attention_layernorm.weight",
        Folded,
    ),
    ("attn_q.weight", "self_attn.q_proj.weight", Same),
    ("attn_k.weight", "self_attn.k_proj.weight", Same),
    ("attn_v.weight", "self_attn.v_proj.weight", Same),
    ("attn_q_norm.weight", "self_attn.q_norm.weight", Folded),
    ("attn_k_norm.weight", "self_attn.k_norm.weight", Folded),
    ("attn_output.weight", "self_attn.o_proj.weight", Same),
    (
        "attn_qkv.weight",
        "linear_attn.in_proj_qkv.weight",
        MixedRows,
    ),
    (
        "attn_gate.weight",
        "linear_attn.in_proj_z.weight",
        ValueRows,
    ),
    ("ssm_beta.weight", "linear_attn.in_proj_b.weight", HeadRows),
    ("ssm_alpha.weight", "linear_attn.in_proj_a.weight", HeadRows),
    ("ssm_a", "linear_attn.A_log", Decay),
    ("ssm_dt.bias", "linear_attn.dt_bias", HeadRows),
    ("ssm_conv1d.weight", "linear_attn.conv1d.weight", MixedRows),
    ("ssm_norm.weight", "linear_attn.norm.weight", Same),
    (
        "ssm_out.weight",
        "linear_attn.out_proj.weight",
        ValueColumns,
    ),
    ("ffn_gate.weight", "mlp.gate_proj.weight", Same),
    ("ffn_up.weight", "mlp.up_proj.weight", Same),
    ("ffn_down.weight", "mlp.down_proj.weight", Same),
    ("ffn_gate_inp.weight", "mlp.gate.weight", Same),
    (
        "ffn_gate_inp_shexp.weight",
        "mlp.shared_expert_gate.weight",
        Same,
    ),
    (
        "ffn_gate_shexp.weight",
        "mlp.shared_expert.gate_proj.weight",
        Same,
    ),
    (
        "ffn_up_shexp.weight",
        "mlp.shared_expert.up_proj.weight",
        Same,
    ),
    (
        "ffn_down_shexp.weight",
        "mlp.shared_expert.down_proj.weight",
        Same,
    ),
    (
        "ffn_gate_exps.weight",
        "mlp.switch_mlp.gate_proj.weight",
        Same,
    ),
    ("ffn_up_exps.weight", "mlp.switch_mlp.up_proj.weight", Same),
    (
        "ffn_down_exps.weight",
        "mlp.switch_mlp.down_proj.weight",
        Same,
    ),
];

const QWEN35_FUSED: &[Name] = &[
    (FUSED, "mlp.experts.gate_up_proj", Same),
    ("ffn_down_exps.weight", "mlp.experts.down_proj", Same),
];

const QWEN35_HEAD: &[Name] = &[
    ("nextn.eh_proj.weight", "mtp.fc.weight", Same),
    (
        "nextn.enorm.weight",
        "mtp.pre_fc_norm_embedding.weight",
        Folded,
    ),
    (
        "nextn.hnorm.weight",
        "mtp.pre_fc_norm_hidden.weight",
        Folded,
    ),
    ("nextn.shared_head_norm.weight", "mtp.norm.weight", Folded),
];

const EAGLE3: Family = Family {
    architectures: &["eagle3"],
    whole: &[
        ("token_embd.weight", "embed_tokens.weight", Same),
        ("output_norm.weight", "norm.weight", Same),
        ("output.weight", "lm_head.weight", Same),
        ("fc.weight", "fc.weight", Same),
        ("d2t", "d2t", Absolute),
    ],
    block: &[
        ("attn_norm.weight", "input_layernorm.weight", Same),
        ("attn_norm_2.weight", "hidden_norm.weight", Same),
        ("attn_q.weight", "self_attn.q_proj.weight", QueryPairs),
        ("attn_k.weight", "self_attn.k_proj.weight", KeyPairs),
        ("attn_v.weight", "self_attn.v_proj.weight", Same),
        ("attn_output.weight", "self_attn.o_proj.weight", Same),
        ("ffn_norm.weight", "post_attention_layernorm.weight", Same),
        ("ffn_gate.weight", "mlp.gate_proj.weight", Same),
        ("ffn_up.weight", "mlp.up_proj.weight", Same),
        ("ffn_down.weight", "mlp.down_proj.weight", Same),
    ],
    fused: &[],
    head: &[],
    experts: None,
};

/// Every architecture that can be read and written.
pub(crate) const FAMILIES: &[&Family] = &[&GEMMA4, &GEMMA4_ASSISTANT, &QWEN35, &QWEN35MOE, &EAGLE3];

impl Family {
    /// The family that files call `architecture`.
    pub(crate) fn named(architecture: &str) -> Option<&'static Family> {
        FAMILIES
            .iter()
            .copied()
            .find(|f| f.architectures.contains(&architecture))
    }

    /// The architectures that are known, for a message.
    pub(crate) fn all() -> String {
        let names = FAMILIES.iter().map(|f| f.architectures[0]);
        names.collect::<Vec<_>>().join(", ")
    }

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
            (None, Some(0)) => find(self.head, name).map(|(name, edit)| (name.into(), edit)),
            (None, _) => None,
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
            QWEN35MOE.stored("mtp.layers.0.mlp.experts.7.up_proj.weight", 4),
            Some(("blk.4.ffn_up_exps.weight".into(), Same, Some(7)))
        );
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
            let found = QWEN35.canonical(stored, 2, |_| false);
            assert_eq!(found, Some((canonical.into(), Same)), "{stored}");
        }
        let own = GEMMA4.canonical("blk.0.ffn_down_exps.scale", 2, |_| false);
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
                GEMMA4.canonical(name, 2, |_| false),
                Some((name.into(), Same))
            );
        }
        assert_eq!(GEMMA4.canonical("rope_freqs.weight", 2, |_| false), None);
        assert_eq!(
            GEMMA4.canonical("blk.0.x.scale", 2, |_| false).unwrap().0,
            "blk.0.x.scale"
        );
        assert_eq!(QWEN35.stored("visual.pos_embed.weight", 2), None);
        assert_eq!(GEMMA4.stored("mtp.layers.0.mlp.up_proj.weight", 2), None);
    }
}
