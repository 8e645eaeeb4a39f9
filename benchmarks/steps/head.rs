//! The draft heads whose drafts are timed.

use backend::{Backend, Batch, Tensor};
use cache::{Memory, MemoryPlan, Sequence};
use models::{ChainedHead, Gemma4Assistant, Qwen35Mtp, Target};
use weights::Checkpoint;

/// A draft head of a target.
pub(crate) enum Head {
    /// Qwen's MTP head, which remembers a text of its own.
    Mtp(Box<Qwen35Mtp>),
    /// Gemma's assistant, which reads the target's keys and values.
    Assistant(Box<Gemma4Assistant>),
}

impl Head {
    /// The MTP head of `checkpoint`, or the head of `assistant`.
    pub(crate) fn load(
        b: &dyn Backend,
        checkpoint: &Checkpoint,
        assistant: Option<&Checkpoint>,
        target: &dyn Target,
    ) -> Option<Self> {
        if let Some(assistant) = assistant {
            let head = Gemma4Assistant::load(b, assistant, target);
            return Some(Head::Assistant(Box::new(head.unwrap())));
        }
        let head = Qwen35Mtp::load(b, checkpoint, target).ok();
        head.map(|head| Head::Mtp(Box::new(head)))
    }

    /// What it remembers of a text; `None` where it reads the target's memory.
    pub(crate) fn plan(&self) -> Option<MemoryPlan> {
        match self {
            Head::Mtp(head) => Some(head.plan()),
            Head::Assistant(_) => None,
        }
    }

    /// Adds the row of a guess after `token` to `batch`.
    pub(crate) fn push(
        &self,
        memory: &mut Memory,
        batch: &mut Batch,
        sequence: &mut Sequence,
        token: u32,
    ) {
        match self {
            Head::Mtp(_) => memory.push(batch, sequence, &[token], 0).unwrap(),
            Head::Assistant(_) => memory.peek(batch, sequence, token),
        }
    }

    /// Runs the head after `x`: what [`Head::logits`] scores, and what the next guess follows.
    pub(crate) fn guess(
        &self,
        b: &dyn Backend,
        target: &dyn Target,
        x: &Tensor,
        batch: &Batch,
        memory: &mut Memory,
    ) -> (Tensor, Option<Tensor>) {
        match self {
            Head::Mtp(head) => (head.forward(b, target, x, &[], batch, memory), None),
            Head::Assistant(head) => {
                let (z, next) = head.step(b, target, x, batch, memory);
                (z, Some(next))
            }
        }
    }

    /// Scores of the next token.
    pub(crate) fn logits(&self, b: &dyn Backend, target: &dyn Target, z: &Tensor) -> Tensor {
        match self {
            Head::Mtp(_) => target.logits(b, z),
            Head::Assistant(head) => head.logits(b, z).logits,
        }
    }
}
