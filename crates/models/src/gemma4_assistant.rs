//! Gemma 4's assistant: a draft head that reads the target's keys and values
//! (`specs/gemma4-assistant.md`).
//!
//! ```text
//! x  = [ E_target(token) √B | h ] W_pre
//! x  = Gemma 4 layers, queries only, over the target's keys and values
//! z  = rms(x)
//! h' = z W_post            takes h's place in the next step
//! logits = z E_draftᵀ      of every token, or of the tokens of a few centroids
//! ```
//!
//! It remembers nothing: every step of one draft stands at the same position.
//! Letters: `n` sequences, `B` the target's hidden size, `H` its own.

use crate::census::{self, Census};
use crate::gemma4::{Config, FULL, LayerType, QueryAttention, SLIDING};
use crate::layers::{GatedMlp, Loader};
use crate::{Gemma4, HeadLogits, ModelError, Scored, Shortlist, Target, parse, require};
use backend::{Activation, Backend, Batch, Matrix, Tensor, TokenGroups};
use cache::Memory;
use serde::Deserialize;
use weights::Checkpoint;

pub(crate) const NAMES: &[&str] = &[
    "Gemma4AssistantForCausalLM",
    "Gemma4UnifiedAssistantForCausalLM",
    "gemma4_assistant",
    "gemma4_unified_assistant",
];

/// What each layer has beside its `layer_scalar`.
const LAYER_MODULES: &[&str] = &[
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
    "self_attn.q_proj",
    "self_attn.q_norm",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

#[derive(Deserialize)]
struct AssistantConfig {
    backbone_hidden_size: usize,
    #[serde(default)]
    use_ordered_embeddings: bool,
    #[serde(default = "default_centroids")]
    num_centroids: usize,
    #[serde(default = "default_top_k")]
    centroid_intermediate_top_k: usize,
}

fn default_centroids() -> usize {
    2048
}
fn default_top_k() -> usize {
    32
}

struct Layer {
    attention: QueryAttention,
    group: usize,
    mlp: GatedMlp,
    input_norm: Tensor,
    post_attention_norm: Tensor,
    pre_mlp_norm: Tensor,
    post_mlp_norm: Tensor,
    scalar: f32,
}

impl Layer {
    fn load(at: &Loader<'_>, config: &Config, layer_type: LayerType) -> Result<Self, ModelError> {
        let (hidden, inner) = (config.hidden_size, config.intermediate_size);
        Ok(Layer {
            attention: QueryAttention::load(&at.at("self_attn"), config, layer_type)?,
            group: if layer_type == LayerType::Full {
                FULL
            } else {
                SLIDING
            },
            mlp: GatedMlp::load(&at.at("mlp"), hidden, inner, Activation::GeluTanh)?,
            input_norm: at.vector("input_layernorm", hidden)?,
            post_attention_norm: at.vector("post_attention_layernorm", hidden)?,
            pre_mlp_norm: at.vector("pre_feedforward_layernorm", hidden)?,
            post_mlp_norm: at.vector("post_feedforward_layernorm", hidden)?,
            scalar: at.bare("layer_scalar", 1)?[0],
        })
    }
}

/// Scores the tokens of the best centroids only (§5).
struct Centroids {
    centroids: Matrix,
    groups: TokenGroups,
}

impl Centroids {
    fn load(
        load: &Loader<'_>,
        assistant: &AssistantConfig,
        config: &Config,
    ) -> Result<Self, ModelError> {
        let (n, vocab) = (assistant.num_centroids, config.vocab_size);
        require(n > 0 && vocab.is_multiple_of(n), || {
            format!("{vocab} tokens cannot be shared by {n} centroids")
        })?;
        let part = load.at("masked_embedding");
        let ordering = load
            .checkpoint
            .integers("masked_embedding.token_ordering", vocab)?;
        require(ordering.iter().all(|&id| (id as usize) < vocab), || {
            "masked_embedding.token_ordering names a token outside the vocabulary".into()
        })?;
        let top_k = assistant.centroid_intermediate_top_k.min(n);
        Ok(Centroids {
            centroids: part.matrix("centroids", n, config.hidden_size)?,
            groups: TokenGroups::new(load.b, ordering, vocab / n, top_k),
        })
    }
}

/// A Gemma 4 assistant, paired with its target.
pub struct Gemma4Assistant {
    pre: Matrix,
    post: Matrix,
    layers: Vec<Layer>,
    norm: Tensor,
    embed: Matrix,
    centroids: Option<Centroids>,
    shortlist: Option<Shortlist>,
    eps: f32,
}

impl Gemma4Assistant {
    /// Counts the tensors of the assistant in `checkpoint`.
    ///
    /// # Errors
    ///
    /// If its configuration cannot be read.
    pub fn census(checkpoint: &Checkpoint) -> Result<Census, ModelError> {
        let assistant: AssistantConfig = parse(checkpoint.config())?;
        let layers = Config::read(checkpoint)?.layer_types()?.len();
        let mut names: Vec<String> = ["pre_projection", "post_projection", "embed_tokens", "norm"]
            .map(|name| format!("{name}.weight"))
            .into();
        for i in 0..layers {
            names.push(format!("layers.{i}.layer_scalar"));
            names.extend(
                LAYER_MODULES
                    .iter()
                    .map(|m| format!("layers.{i}.{m}.weight")),
            );
        }
        if assistant.use_ordered_embeddings {
            names.push("masked_embedding.centroids.weight".into());
            names.push("masked_embedding.token_ordering".into());
        }
        Ok(Census::take(checkpoint, "", &names))
    }

    /// Loads the assistant of `checkpoint` for `target`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Unpaired`] if it was made for another target,
    /// [`ModelError::IncompleteHead`] and [`ModelError::UnreadPart`] if it is not
    /// whole, else as [`crate::load_target`].
    pub fn load(
        b: &dyn Backend,
        checkpoint: &Checkpoint,
        target: &dyn Target,
    ) -> Result<Self, ModelError> {
        let found = checkpoint.architecture()?;
        if !NAMES.contains(&found) {
            return Err(ModelError::UnknownArchitecture {
                found: found.to_owned(),
            });
        }
        let any: &dyn std::any::Any = target;
        let target = any
            .downcast_ref::<Gemma4>()
            .ok_or_else(|| ModelError::Unpaired {
                what: "family",
                drafter: "gemma4_assistant".into(),
                target: target.family().into(),
            })?;
        let assistant: AssistantConfig = parse(checkpoint.config())?;
        let config = Config::read(checkpoint)?;
        check_pair(&assistant, &config, &target.config)?;
        Self::census(checkpoint)?.complete("assistant")?;
        let load = Loader::new(b, checkpoint);
        let (hidden, backbone) = (config.hidden_size, assistant.backbone_hidden_size);
        let types = config.layer_types()?.into_iter().enumerate();
        let layers =
            types.map(|(i, layer_type)| Layer::load(&load.at("layers").at(i), &config, layer_type));
        let layers = layers.collect::<Result<Vec<_>, _>>()?;
        let centroids = if assistant.use_ordered_embeddings {
            Some(Centroids::load(&load, &assistant, &config)?)
        } else {
            None
        };
        let head = Gemma4Assistant {
            pre: load.matrix("pre_projection", hidden, 2 * backbone)?,
            post: load.matrix("post_projection", backbone, hidden)?,
            norm: load.vector("norm", hidden)?,
            embed: load.matrix("embed_tokens", config.vocab_size, hidden)?,
            layers,
            centroids,
            shortlist: None,
            eps: config.rms_norm_eps,
        };
        census::all_parts_read(checkpoint, "")?;
        Ok(head)
    }

    /// Lets it score `ids`, which ascend, apart from all other tokens, with copies of
    /// their rows of its own output matrix, from the `checkpoint` that it was loaded
    /// from. A head with centroids chooses among tokens itself and stays as it is.
    ///
    /// # Errors
    ///
    /// As [`Gemma4Assistant::load`].
    pub fn with_shortlist(
        self,
        b: &dyn Backend,
        checkpoint: &Checkpoint,
        ids: &[u32],
    ) -> Result<Self, ModelError> {
        if self.centroids.is_some() {
            return Ok(self);
        }
        let (rows, cols) = (self.embed.rows, self.embed.cols);
        let output = Loader::new(b, checkpoint).stored("embed_tokens", rows, cols)?;
        Ok(Gemma4Assistant {
            shortlist: Some(Shortlist::new(b, &output, ids)),
            ..self
        })
    }

    /// Lets it read the newest `rows` rows of the target alone, and not all. What it guesses may
    /// change; a step of a long text reads less.
    #[must_use]
    pub fn with_window(mut self, rows: usize) -> Self {
        let layers = self.layers.iter_mut();
        layers.for_each(|layer| layer.attention.narrow(rows));
        self
    }

    /// The tokens that it can score apart, from what [`Gemma4Assistant::step`] gives
    /// to be scored.
    pub fn shortlist(&self) -> Option<&Shortlist> {
        self.shortlist.as_ref()
    }

    /// Whether it scores the tokens of a few centroids, others after each row, and not all.
    pub fn scores_some(&self) -> bool {
        self.centroids.is_some()
    }

    /// [`Gemma4Assistant::logits`] for the steps of a [`backend::Chain`]: the scores and,
    /// where they are of others after each row, the tokens.
    pub fn chained_logits(&self, b: &dyn Backend, z: &Tensor) -> (Tensor, Option<Tensor>) {
        let Some(c) = &self.centroids else {
            return (self.logits(b, z).logits, None);
        };
        let scores = b.matmul(z, &c.centroids); // [n, C]
        let [logits, ids] = b.matmul_groups(z, &self.embed, &scores, &c.groups);
        (logits, Some(ids))
    }

    /// One step of a draft: from the newest token and hidden row of each
    /// sequence, `hidden: [n, B]`, to `(z: [n, H], h': [n, B])`.
    ///
    /// `batch` holds a reading row for each sequence ([`Memory::peek`]).
    pub fn step(
        &self,
        b: &dyn Backend,
        target: &dyn Target,
        hidden: &Tensor,
        batch: &Batch,
        memory: &Memory,
    ) -> (Tensor, Tensor) {
        let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), w.cols(), self.eps);
        let token = target.embed(b, &batch.tokens); // [n, B]
        let mut x = b.matmul(&b.concat(&token, hidden), &self.pre); // [n, H]
        for layer in &self.layers {
            let kv = memory.kv[layer.group].last().expect("checked when paired");
            let h = norm(&x, &layer.input_norm);
            let a = layer.attention.forward(b, &h, kv, batch);
            x = b.add(norm(&a, &layer.post_attention_norm), &x);
            let m = layer.mlp.forward(b, &norm(&x, &layer.pre_mlp_norm));
            x = b.add(norm(&m, &layer.post_mlp_norm), &x);
            x = b.scale(x, layer.scalar);
        }
        let z = norm(&x, &self.norm);
        let hidden = b.matmul(&z, &self.post); // [n, B]
        b.note(format_args!("draft.hidden"), &hidden);
        (z, hidden)
    }

    /// Scores of the next token from `z: [n, H]`.
    pub fn logits(&self, b: &dyn Backend, z: &Tensor) -> HeadLogits<'_> {
        let head = match &self.centroids {
            None => HeadLogits {
                logits: b.matmul(z, &self.embed),
                scored: Scored::All,
            },
            Some(c) => {
                let scores = b.matmul(z, &c.centroids); // [n, C]
                let ids: Vec<Vec<u32>> = b
                    .download(&scores)
                    .chunks_exact(scores.cols())
                    .map(|row| c.groups.best(row))
                    .collect();
                HeadLogits {
                    logits: b.matmul_rows(z, &self.embed, &ids),
                    scored: Scored::ByRow(ids),
                }
            }
        };
        b.note(format_args!("draft.logits"), &head.logits);
        head
    }
}

/// The drafter's view of the target's keys and values must be the target's own.
fn check_pair(
    assistant: &AssistantConfig,
    drafter: &Config,
    target: &Config,
) -> Result<(), ModelError> {
    fn same<T: PartialEq + std::fmt::Debug>(
        what: &'static str,
        drafter: T,
        target: T,
    ) -> Result<(), ModelError> {
        if drafter == target {
            return Ok(());
        }
        Err(ModelError::Unpaired {
            what,
            drafter: format!("{drafter:?}"),
            target: format!("{target:?}"),
        })
    }
    require(
        drafter.per_layer_width().is_none() && !drafter.enable_moe_block,
        || "an assistant has neither per-layer embeddings nor experts".into(),
    )?;
    same(
        "backbone hidden size",
        assistant.backbone_hidden_size,
        target.hidden_size,
    )?;
    same("vocabulary size", drafter.vocab_size, target.vocab_size)?;
    let types = drafter.layer_types()?;
    for layer_type in [LayerType::Sliding, LayerType::Full] {
        // What is said of layers that it has not says nothing.
        if !types.contains(&layer_type) {
            continue;
        }
        same(
            "head size and key/value heads",
            drafter.heads(layer_type),
            target.heads(layer_type),
        )?;
        same(
            "rotary embedding",
            drafter.rope(layer_type)?,
            target.rope(layer_type)?,
        )?;
    }
    same(
        "sliding window",
        drafter.sliding_window,
        target.sliding_window,
    )?;
    let sliding = |c: &Config| Ok::<_, ModelError>(c.layer_types()?.contains(&LayerType::Sliding));
    if sliding(drafter)? {
        same("use of sliding layers", true, sliding(target)?)?;
    }
    Ok(())
}
