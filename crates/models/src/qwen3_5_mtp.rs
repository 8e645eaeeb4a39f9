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

use crate::census::{self, Census};
use crate::layers::Loader;
use crate::qwen3_5::{Config, FULL, FullLayer};
use crate::{ChainedHead, HeadLogits, ModelError, Qwen35, Scored, Shortlist, Target};
use backend::{Backend, Batch, Matrix, Tensor};
use cache::{GroupPlan, Memory, MemoryPlan};
use weights::Checkpoint;

/// What every head has beside its block; any of them is a sign of one.
const HEAD_TENSORS: &[&str] = &["fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"];

/// A multi-token-prediction head, paired with its target.
pub struct Qwen35Mtp {
    fc: Matrix,
    embedding_norm: Tensor,
    hidden_norm: Tensor,
    layer: FullLayer,
    norm: Tensor,
    contract: Contract,
    /// What enters the target's final norm, if the head reads that.
    taps: Vec<usize>,
    shortlist: Option<Shortlist>,
    kv_layer: (usize, usize),
    eps: f32,
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
    /// checkpoint was stripped, and would draft nothing.
    pub fn is_in(checkpoint: &Checkpoint) -> Result<bool, ModelError> {
        let promised = Config::read(checkpoint)?.mtp_num_hidden_layers;
        let present = HEAD_TENSORS
            .iter()
            .any(|name| checkpoint.has(&format!("mtp.{name}.weight")));
        match (promised, present) {
            (0, false) => Ok(false),
            (1, true) => Ok(true),
            (0, true) => Err(ModelError::MissingHead(
                "the checkpoint has `mtp.*` tensors, but its config.json has no `mtp_num_hidden_layers`, \
                 which is 1 where the head is this model's"
                    .into(),
            )),
            (n, false) => Err(ModelError::MissingHead(format!(
                "config.json promises `mtp_num_hidden_layers: {n}`, but the checkpoint has no `mtp.*` tensors: \
                 a conversion has dropped the head"
            ))),
            (n, true) => Err(ModelError::Unsupported { feature: format!("a head of {n} MTP layers") }),
        }
    }

    /// Counts the tensors of the head of `checkpoint`, which was made for a target
    /// of this configuration.
    ///
    /// # Errors
    ///
    /// If the configuration cannot be read.
    pub fn census(checkpoint: &Checkpoint, target: &dyn Target) -> Result<Census, ModelError> {
        let config = &paired(target)?.config;
        let mut names: Vec<String> = HEAD_TENSORS
            .iter()
            .map(|n| format!("mtp.{n}.weight"))
            .collect();
        names.extend(FullLayer::tensors(checkpoint, "mtp.layers.0", config));
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
        let at = Loader::new(b, checkpoint).at("mtp");
        let head = Qwen35Mtp {
            fc: at.matrix("fc", hidden, 2 * hidden)?,
            embedding_norm: at.offset_norm("pre_fc_norm_embedding", hidden)?,
            hidden_norm: at.offset_norm("pre_fc_norm_hidden", hidden)?,
            layer: FullLayer::load(&at.at("layers").at(0), config)?,
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
                layers: vec![self.kv_layer],
            }],
            delta: Vec::new(),
        }
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

    /// From rows `(token x_{p+1}, hidden h_p)` to `m: [n, H]`, or to what enters `norm` where a
    /// chain goes on from that.
    fn forward(
        &self,
        b: &dyn Backend,
        target: &dyn Target,
        hidden: &Tensor,
        media: &[&Tensor],
        batch: &Batch,
        memory: &mut Memory,
    ) -> Tensor {
        let norm = |x: &Tensor, w: &Tensor| b.rms_norm(x, Some(w), w.cols(), self.eps);
        let token = norm(&target.inputs(b, batch, media), &self.embedding_norm); // [n, H]
        let h = norm(hidden, &self.hidden_norm); // [n, H]
        let both = match self.contract.hidden_first {
            true => b.concat(&h, &token),
            false => b.concat(&token, &h),
        }; // [n, 2 H]
        let u = b.matmul(&both, &self.fc); // [n, H]
        let y = self
            .layer
            .forward(b, format_args!("mtp"), u, batch, &mut memory.kv[FULL][0]);
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
