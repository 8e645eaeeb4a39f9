//! Loading an EAGLE-3 head: which tensors a checkpoint holds, and of which shapes
//! (`specs/eagle3.md`).

use super::config::{Config, check_pair, taps};
use super::{Eagle3, Layer, NAMES};
use crate::head_config::{LayerConfig, draft_ids, remember, unpaired};
use crate::layers::{GatedMlp, Loader};
use crate::{ModelError, Target};
use backend::{Activation, Attention, Backend, TokenList};
use weights::Checkpoint;

impl Eagle3 {
    /// Loads the head of `checkpoint` for `target`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Unpaired`] if it was made for another target, else as
    /// [`crate::load_target`].
    pub fn load(
        b: &dyn Backend,
        checkpoint: &Checkpoint,
        target: &dyn Target,
    ) -> Result<Self, ModelError> {
        let found = checkpoint.architecture()?;
        if !NAMES.contains(&found) {
            return Err(ModelError::MissingHead(format!(
                "architecture `{found}` is no EAGLE-3 head; known are {}",
                NAMES.join(", ")
            )));
        }
        let (config, layer) = Config::read(checkpoint)?;
        check_pair(&config, &layer, target)?;
        let taps = taps(&config, target)?;

        let load = Loader::new(b, checkpoint);
        let (hidden, width) = (layer.hidden_size, target.hidden_size());
        let (plan, attention) = remember(&layer)?;
        let first = if checkpoint.has("midlayer.hidden_norm.weight") {
            load.at("midlayer")
        } else {
            load.at("layers").at(0)
        };
        let mut layers = Vec::with_capacity(attention.len());
        for (i, (attention, kv)) in attention.into_iter().enumerate() {
            let ordinary = load.at("layers").at(i);
            let (at, width) = match i {
                0 => (&first, 2 * hidden),
                _ => (&ordinary, hidden),
            };
            layers.push(Layer::load(at, &layer, width, attention, kv)?);
        }
        let has_embed = checkpoint.has("embed_tokens.weight");
        if !has_embed && hidden != width {
            return Err(unpaired(
                "hidden size, without embeddings of its own,",
                hidden,
                width,
            ));
        }
        let n_draft = config.draft_vocab_size.unwrap_or(layer.vocab_size);
        let ids = draft_ids(checkpoint, n_draft, layer.vocab_size)?;
        let fc_norm = load.at("fc_norm");
        let tap_norm = |i: usize| fc_norm.vector(&i.to_string(), width);
        Ok(Eagle3 {
            tap_norms: if config.fc_norm {
                (0..taps.len()).map(tap_norm).collect::<Result<_, _>>()?
            } else {
                Vec::new()
            },
            fused_norm: if config.norm_before_fc {
                Some(load.vector("input_norm", taps.len() * width)?)
            } else {
                None
            },
            fc: load.matrix("fc", hidden, taps.len() * width)?,
            embed: if has_embed {
                Some(load.matrix("embed_tokens", layer.vocab_size, hidden)?)
            } else {
                None
            },
            hidden_norm: first.vector("hidden_norm", hidden)?,
            norm_before_residual: config.norm_before_residual,
            norm: load.vector("norm", hidden)?,
            norm_output: config.norm_output,
            lm_head: load.matrix("lm_head", n_draft, hidden)?,
            list: ids.map(|ids| TokenList::new(b, ids)),
            rope: layer.rope()?,
            eps: layer.rms_norm_eps,
            taps,
            layers,
            plan,
        })
    }
}

impl Layer {
    pub(super) fn load(
        at: &Loader<'_>,
        config: &LayerConfig,
        width: usize,
        attention: Attention,
        kv: usize,
    ) -> Result<Self, ModelError> {
        let (hidden, e) = (config.hidden_size, config.head_dim());
        let (q_out, kv_out) = (config.num_attention_heads * e, config.kv_heads() * e);
        let own = at.at("self_attn");
        // Some writers leave the model type out; the tensors tell.
        let normed = at.checkpoint.has(&own.name_of("q_norm"));
        Ok(Layer {
            q: own.matrix("q_proj", q_out, width)?,
            k: own.matrix("k_proj", kv_out, width)?,
            v: own.matrix("v_proj", kv_out, width)?,
            o: own.matrix("o_proj", hidden, q_out)?,
            head_norms: if normed || config.model_type.as_deref() == Some("qwen3") {
                Some([own.vector("q_norm", e)?, own.vector("k_norm", e)?])
            } else {
                None
            },
            attention,
            kv,
            input_norm: at.vector("input_layernorm", hidden)?,
            post_norm: at.vector("post_attention_layernorm", hidden)?,
            mlp: GatedMlp::load(
                &at.at("mlp"),
                hidden,
                config.intermediate_size,
                Activation::Silu,
            )?,
        })
    }
}
