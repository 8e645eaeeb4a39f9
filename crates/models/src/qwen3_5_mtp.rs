//! Qwen 3.5's multi-token-prediction head (`specs/qwen3_5.md` §8).
//!
//! ```text
//! u = [ rms1(E[x_{p+1}]) | rms1(h_p) ] Wfc
//! m = rms1( full-attention layer(u) )
//! logits of x_{p+2} = m Wᵀ              the trunk's head
//! ```
//!
//! `h_p` is the trunk's hidden row after its final norm; chained on itself, the
//! head takes `m` instead. It keeps keys and values of its own, one row for each
//! `p`. Embeddings and output head are the target's. Writers of some heads ask for rows
//! before these norms, or for `h_p` on the left ([`Contract`]).
//!
//! A head of several layers has `Wfc` and the norms once. Layer `i` guesses the token `i` places
//! further: in row `p` it reads `x_{p+i+1}`, and what layer `i - 1` has made of row `p` in the place of
//! `h_p` (`Qwen3_5MultiTokenPredictor` and the multi-module speculator of vLLM, `MtpModel` of transformers).

use crate::census::{self, Census};
use crate::layers::Loader;
use crate::qwen3_5::{Config, FULL, FullLayer};
use crate::{ChainedHead, HeadLogits, ModelError, Qwen35, Scored, Shortlist, Target};
use backend::{Backend, Batch, Matrix, Tensor};
use cache::{GroupPlan, KvLayer, Memory, MemoryPlan};
use weights::Checkpoint;

/// What every head has beside its block; any of them is a sign of one.
const HEAD_TENSORS: &[&str] = &["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"];

/// Layers of a head, at most: drafts are as long in practice, and each row is run by all of them.
const MAX_LAYERS: usize = 8;

/// A multi-token-prediction head, paired with its target.
pub struct Qwen35Mtp {
    fc: Matrix,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    layers: Vec<FullLayer>,
    norm: Tensor,
    contract: Contract,
    /// What enters the target's final norm, if the head reads that.
    taps: Vec<usize>,
    shortlist: Option<Shortlist>,
    kv_layer: KvLayer,
    eps: f32,
}

/// Layers of the head of `checkpoint`: those of its tensors, and of its configuration if that knows.
fn n_layers(checkpoint: &Checkpoint) -> Result<usize, ModelError> {
    let layer = |name: &str| -> Option<usize> {
        let (layer, _) = name.strip_prefix("mtp.layers.")?.split_once('.')?;
        layer.parse().ok()
    };
    let last = checkpoint.names().filter_map(layer).max();
    let found = last.map_or(1, |last| last.saturating_add(1));
    let said = checkpoint.text_config()["mtp_num_hidden_layers"].as_u64();
    let n = match said.and_then(|said| usize::try_from(said).ok()) {
        None | Some(0) => found,
        Some(said) if said < found => {
            let feature = format!(
                "an MTP head with {found} layers where config.json has `mtp_num_hidden_layers: {said}`"
            );
            return Err(ModelError::Unsupported { feature });
        }
        Some(said) => said,
    };
    if n > MAX_LAYERS {
        let feature = format!("a head of {n} MTP layers, more than {MAX_LAYERS},");
        return Err(ModelError::Unsupported { feature });
    }
    Ok(n)
}

/// What layer `layer` of the head of `checkpoint` has once more, as GGUF files say it: the name of what
/// all layers share, and of the copy.
fn copies(checkpoint: &Checkpoint, layer: usize) -> impl Iterator<Item = (String, String)> {
    let named = move |name: &&str| {
        let copy = format!("mtp.layers.{layer}.{name}.weight");
        (format!("mtp.{name}.weight"), copy)
    };
    let all = HEAD_TENSORS.iter().map(named);
    all.filter(|(_, copy)| checkpoint.has(copy))
}

/// `target` as the family that has such heads.
fn paired(target: &dyn Target) -> Result<&Qwen35, ModelError> {
    let any: &dyn std::any::Any = target;
    any.downcast_ref::<Qwen35>()
        .ok_or_else(|| ModelError::Unpaired {
            what: "family",
            drafter: "qwen3_5 MTP head".into(),
            target: target.family().into(),
        })
}

/// Which rows a head reads and hands on, and in which order it reads them, as its writer has
/// trained it (`specs/checkpoints.md` §2.5).
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Contract {
    /// Reads the target's rows as they enter its final norm, not as they leave it.
    reads_before_norm: bool,
    /// Chained, goes on from its own row as it enters `norm`, not as it leaves it.
    chains_before_norm: bool,
    /// Reads the hidden row left of the token's embedding.
    hidden_first: bool,
}

impl Contract {
    /// The contract of the head in `checkpoint`. Values that nobody knows mean nothing.
    fn read(checkpoint: &Checkpoint) -> Self {
        let asks = |key: &str, value: &str| checkpoint.mtp_contract(key) == Some(value);
        Contract {
            reads_before_norm: asks("base_hidden_variant", "pre_norm"),
            chains_before_norm: asks("hidden_variant", "pre_norm"),
            hidden_first: asks("concat_order", "hidden_embedding"),
        }
    }
}

impl Qwen35Mtp {
    /// Whether `checkpoint` has a head: its configuration and its tensors must
    /// agree.
    ///
    /// # Errors
    ///
    /// [`ModelError::MissingHead`] if one has it and the other has not: such a
    /// checkpoint was stripped, and would draft nothing. [`ModelError::Unsupported`] if they
    /// disagree about its layers, or these are too many.
    pub fn is_in(checkpoint: &Checkpoint) -> Result<bool, ModelError> {
        let promised = Config::read(checkpoint)?.mtp_num_hidden_layers;
        let present = HEAD_TENSORS
            .iter()
            .any(|name| checkpoint.has(&format!("mtp.{name}.weight")));
        match (promised, present) {
            (0, false) => Ok(false),
            (1.., true) => Ok(n_layers(checkpoint)? > 0),
            (0, true) => Err(ModelError::MissingHead(
                "the checkpoint has `mtp.*` tensors, but its config.json has no `mtp_num_hidden_layers`, \
                 which is 1 where the head is this model's"
                    .into(),
            )),
            (n, false) => Err(ModelError::MissingHead(format!(
                "config.json promises `mtp_num_hidden_layers: {n}`, but the checkpoint has no `mtp.*` tensors: \
                 a conversion has dropped the head"
            ))),
        }
    }

    /// Counts the tensors of the head of `checkpoint`, which was made for a target
    /// of this configuration.
    ///
    /// # Errors
    ///
    /// [`ModelError::Unpaired`] for another family's target, [`ModelError::Unsupported`] for layers
    /// that the configuration does not have, or too many.
    pub fn census(checkpoint: &Checkpoint, target: &dyn Target) -> Result<Census, ModelError> {
        let config = &paired(target)?.config;
        let mut names: Vec<String> = HEAD_TENSORS
            .iter()
            .map(|n| format!("mtp.{n}.weight"))
            .collect();
        for layer in 0..n_layers(checkpoint)? {
            let at = format!("mtp.layers.{layer}");
            names.extend(copies(checkpoint, layer).map(|(_, copy)| copy));
            names.extend(FullLayer::tensors(checkpoint, &at, config));
        }
        Ok(Census::take(checkpoint, "mtp.", &names))
    }

    /// Loads the head of `checkpoint` for `target`; they may be two checkpoints.
    ///
    /// # Errors
    ///
    /// [`ModelError::Unpaired`] for another family's target,
    /// [`ModelError::IncompleteHead`] and [`ModelError::UnreadPart`] if the head is
    /// not whole, else as [`crate::load_target`].
    pub fn load(
        b: &dyn Backend,
        checkpoint: &Checkpoint,
        target: &dyn Target,
    ) -> Result<Self, ModelError> {
        let target = paired(target)?;
        let contract = Contract::read(checkpoint);
        Self::census(checkpoint, target)?.complete("MTP head")?;
        let config = &target.config;
        let hidden = config.hidden_size;
        let n_layers = n_layers(checkpoint)?;
        for (name, copy) in (0..n_layers).flat_map(|layer| copies(checkpoint, layer)) {
            if !checkpoint.is_copy(&copy, &name)? {
                let feature = format!("an MTP layer with `{copy}` other than `{name}`");
                return Err(ModelError::Unsupported { feature });
            }
        }
        let at = Loader::new(b, checkpoint).at("mtp");
        let head = Qwen35Mtp {
            fc: at.matrix("fc", hidden, 2 * hidden)?,
            embedding_norm: at.offset_norm("pre_fc_norm_embedding", hidden)?,
            hidden_norm: at.offset_norm("pre_fc_norm_hidden", hidden)?,
            layers: (0..n_layers)
                .map(|i| FullLayer::load(&at.at("layers").at(i), config))
                .collect::<Result<_, _>>()?,
            norm: at.offset_norm("norm", hidden)?,
            taps: match contract.reads_before_norm {
                true => vec![target.n_layers()],
                false => Vec::new(),
            },
            contract,
            shortlist: None,
            kv_layer: config.kv_layer(),
            eps: config.rms_norm_eps,
        };
        census::all_parts_read(checkpoint, "mtp.")?;
        Ok(head)
    }

    /// Lets it score `ids`, which ascend, apart from all other tokens, with copies of
    /// their rows of the output matrix of `target`, loaded from `checkpoint`.
    ///
    /// # Errors
    ///
    /// As [`Qwen35Mtp::load`].
    pub fn with_shortlist(
        self,
        b: &dyn Backend,
        checkpoint: &Checkpoint,
        target: &dyn Target,
        ids: &[u32],
    ) -> Result<Self, ModelError> {
        let name = paired(target)?.output_matrix();
        let (rows, cols) = (target.vocab_size(), target.hidden_size());
        let output = Loader::new(b, checkpoint).stored(name, rows, cols)?;
        Ok(Qwen35Mtp {
            shortlist: Some(Shortlist::new(b, &output, ids)),
            ..self
        })
    }
}

impl ChainedHead for Qwen35Mtp {
    fn name(&self) -> &'static str {
        "mtp"
    }

    fn taps(&self) -> &[usize] {
        &self.taps
    }

    fn plan(&self) -> MemoryPlan {
        MemoryPlan {
            groups: vec![GroupPlan {
                window: None,
                layers: vec![self.kv_layer; self.layers.len()],
            }],
            delta: Vec::new(),
        }
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    /// The target's hidden rows as they are, after or before its final norm.
    fn feature_cols(&self) -> usize {
        self.fc.rows
    }

    fn features(
        &self,
        b: &dyn Backend,
        hidden: &Tensor,
        taps: &[Tensor],
        rows: &[usize],
    ) -> Tensor {
        b.gather(taps.first().unwrap_or(hidden), rows)
    }

    fn follows_grid(&self) -> bool {
        true
    }

    fn forward(
        &self,
        b: &dyn Backend,
        target: &dyn Target,
        hidden: &Tensor,
        media: &[&Tensor],
        batch: &Batch,
        memory: &mut Memory,
    ) -> Tensor {
        let inputs: Vec<&Tensor> = [hidden].into_iter().chain(media.iter().copied()).collect();
        self.forward_layer(0, b, target, &inputs, batch, memory)
    }

    /// From rows `(token x_{p+1}, hidden h_p)` to `m: [n, H]`, or to what enters `norm` where a
    /// chain goes on from that.
    fn forward_layer(
        &self,
        layer: usize,
        b: &dyn Backend,
        target: &dyn Target,
        inputs: &[&Tensor],
        batch: &Batch,
        memory: &mut Memory,
    ) -> Tensor {
        let (hidden, media) = (inputs[0], &inputs[1..]);
        let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), w.cols(), self.eps);
        let token = norm(&target.inputs(b, batch, media), &self.embedding_norm); // [n, H]
        let h = norm(hidden, &self.hidden_norm); // [n, H]
        let both = match self.contract.hidden_first {
            true => b.concat(&h, &token),
            false => b.concat(&token, &h),
        }; // [n, 2 H]
        let u = b.matmul(&both, &self.fc); // [n, H]
        let kv = &mut memory.kv[FULL][layer];
        let y = match layer {
            0 => self.layers[0].forward(b, format_args!("mtp"), u, batch, kv, None),
            i => self.layers[i].forward(b, format_args!("mtp.layers.{i}"), u, batch, kv, None),
        }; // [n, H]
        let m = match self.contract.chains_before_norm {
            true => y,
            false => norm(&y, &self.norm),
        };
        b.note(format_args!("draft.hidden"), &m);
        m
    }

    fn shortlist(&self) -> Option<&Shortlist> {
        self.shortlist.as_ref()
    }

    fn listed_logits(&self, b: &dyn Backend, m: &Tensor) -> Option<HeadLogits<'_>> {
        let list = self.shortlist.as_ref()?;
        Some(match self.contract.chains_before_norm {
            true => list.logits(b, &self.normed(b, m)),
            false => list.logits(b, m),
        })
    }

    /// The trunk's head.
    fn logits(&self, b: &dyn Backend, target: &dyn Target, m: &Tensor) -> HeadLogits<'_> {
        HeadLogits {
            logits: match self.contract.chains_before_norm {
                true => target.logits(b, &self.normed(b, m)),
                false => target.logits(b, m),
            },
            scored: Scored::All,
        }
    }
}

impl Qwen35Mtp {
    /// `rms1(y)`: `[n, H]`
    fn normed(&self, b: &dyn Backend, y: &Tensor) -> Tensor {
        b.rms_norm(y, Some(&self.norm), self.norm.cols(), self.eps)
    }
}
