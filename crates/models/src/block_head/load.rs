//! Loading a block drafter: which tensors a checkpoint holds, and of which shapes.

use super::config::Config;
use super::conv::ConvShape;
use super::markov::{Confidence, Markov};
use super::selector::Selector;
use super::{BlockHead, BlockKind};
use crate::census;
use crate::head_config::{check_target, draft_ids, unpaired};
use crate::layers::Loader;
use crate::{ModelError, Target, require};
use backend::{Backend, TokenList};
use weights::Checkpoint;

/// The architecture of DFlash 2 heads.
pub(super) const DFLASH2: &str = "DFlash2DraftModel";

/// Tensors of training that a draft does without: copies of the target's, and which of the
/// target's tokens are drafted, which `d2t` says, too.
const UNREAD: &[&str] = &["t2d", "verifier_lm_head.weight", "verifier_norm.weight"];

impl BlockHead {
    /// Loads the head of `checkpoint`, a `kind` of block drafter, for `target`.
    ///
    /// # Errors
    ///
    /// [`ModelError::Unpaired`] if it was made for another target,
    /// [`ModelError::UnknownHeadTensor`] if it has a tensor that is not implemented, else as
    /// [`crate::load_target`].
    pub fn load(
        b: &dyn Backend,
        checkpoint: &Checkpoint,
        target: &dyn Target,
        kind: BlockKind,
    ) -> Result<Self, ModelError> {
        check_kind(checkpoint.architecture()?, kind)?;
        let (config, shape) = Config::read(checkpoint)?;
        let (hidden, vocab) = (shape.hidden_size(), shape.vocab_size());
        let width = config.target_hidden_size.unwrap_or(hidden);
        let named = config.speculators_config.as_ref();
        check_target(width, vocab, named, target)?;
        let taps = config.taps(target)?;
        let load = Loader::new(b, checkpoint);
        let [has_embed, has_output] =
            ["embed_tokens", "lm_head"].map(|name| checkpoint.has(&load.name_of(name)));
        if hidden != width && !(has_embed && has_output) {
            let what = "hidden size, without embeddings and output matrix of its own,";
            return Err(unpaired(what, hidden, width));
        }
        let second = checkpoint.architecture()? == DFLASH2;
        let second = second.then(|| config.dflash2()).transpose()?;
        let convolutions = second.map(|[taps, size, ..]| ConvShape::new(b, hidden, taps, size));
        let convolutions = convolutions.transpose()?;
        let (layers, plan) = shape.load(&load.at("layers"), convolutions.as_ref(), |window| {
            config.is_causal(window)
        })?;
        let n_draft = config.draft_vocab_size.unwrap_or(vocab);
        let ids = draft_ids(checkpoint, n_draft, vocab)?;
        require(
            second.is_none() || ids.is_none() && config.markov_rank == 0,
            || "a DFlash 2 head with a draft vocabulary or a Markov head".into(),
        )?;
        let selector = second.map(|[.., rank, top_k]| {
            let at = load.at("candidate_selector");
            Selector::load(&at, [rank, top_k], [hidden, vocab])
        });
        let optional = |is: bool, name: &str, rows: usize| {
            let matrix = is.then(|| load.matrix(name, rows, hidden));
            matrix.transpose()
        };
        let own_scale = if has_embed { shape.embed_scale() } else { 1.0 };
        let head = BlockHead {
            kind,
            fc: load.matrix("fc", hidden, taps.len() * width)?,
            hidden_norm: load.vector("hidden_norm", hidden)?,
            layers,
            norm: load.vector("norm", hidden)?,
            embed: optional(has_embed, "embed_tokens", vocab)?,
            input_scale: config.input_embedding_scale.unwrap_or(own_scale),
            // A draft vocabulary of its own has scores of its own.
            lm_head: optional(has_output || ids.is_some(), "lm_head", n_draft)?,
            list: ids.map(|ids| TokenList::new(b, ids)),
            output_scale: config.output_multiplier.unwrap_or(1.0),
            softcap: config.final_logit_softcapping,
            markov: Markov::load(&load.at("markov_head"), &config, [hidden, vocab, n_draft])?,
            confidence: Confidence::load(&load.at("confidence_head"), &config, hidden)?,
            selector: selector.transpose()?,
            block_rows: config.block_size,
            from_anchor: config
                .sample_from_anchor
                .unwrap_or(kind == BlockKind::Dspark),
            mask_token: config.mask_token(vocab)?,
            plan,
            eps: shape.eps(),
            taps,
        };
        census::all_parts_read(checkpoint, "")?;
        all_known(checkpoint)?;
        Ok(head)
    }
}

/// An error unless heads of architecture `found` are of `kind`.
fn check_kind(found: &str, kind: BlockKind) -> Result<(), ModelError> {
    let known = kind.head();
    if !known.architectures.contains(&found) {
        let (name, all) = (known.name, known.architectures.join(", "));
        return Err(ModelError::MissingHead(format!(
            "architecture `{found}` is no {name} head; known are {all}"
        )));
    }
    Ok(())
}

/// An error if a tensor was left unread that would change what is guessed.
fn all_known(checkpoint: &Checkpoint) -> Result<(), ModelError> {
    let mut unread = checkpoint.unused().into_iter();
    match unread.find(|name| !UNREAD.contains(&name.as_str())) {
        Some(name) => Err(ModelError::UnknownHeadTensor { name }),
        None => Ok(()),
    }
}
