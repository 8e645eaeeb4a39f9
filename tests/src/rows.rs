//! Rows that a draft head makes of a short text, beside those of its target.

use backend::{Backend, Batch, Tensor};
use cache::{Memory, MemorySize};
use models::{ChainedHead, Taps, Target};

/// What a target and a draft head that follows it make of a text.
pub struct HeadRows {
    /// The target's last hidden rows, `[n, H]`.
    pub hidden: Tensor,
    /// What the head makes of them and of the rows that it taps.
    pub features: Tensor,
    /// The head's own rows.
    pub rows: Tensor,
}

/// What `target` makes of a text of 16 tokens and `head` of its rows, each with the token that follows
/// it. Both remember it in memories of `size`.
///
/// # Panics
///
/// If the text does not fit.
pub fn head_rows(
    b: &dyn Backend,
    head: &dyn ChainedHead,
    target: &dyn Target,
    size: MemorySize,
) -> HeadRows {
    let tokens: Vec<u32> = (3..20).collect();
    let n = tokens.len() - 1;
    let mut memory = Memory::new(b, target.plan(), size);
    let mut own = Memory::new(b, head.plan(), size);
    let (mut batch, mut following) = (Batch::default(), Batch::default());
    let push = |memory: &mut Memory, batch: &mut Batch, tokens: &[u32]| {
        let mut sequence = memory.open().expect("room for a sequence");
        let pushed = memory.push(batch, &mut sequence, tokens, n);
        pushed.expect("room for a short text");
        sequence
    };
    let _held = [
        push(&mut memory, &mut batch, &tokens[..n]),
        push(&mut own, &mut following, &tokens[1..]),
    ];
    let mut taps = Taps::new(head.taps());
    let hidden = target.forward_tapped(b, &batch, &mut memory, &mut taps);
    let rows: Vec<usize> = (0..n).collect();
    let features = head.features(b, &hidden, &taps.into_rows(), &rows);
    let rows = head.forward(b, target, &features, &[], &following, &mut own);
    HeadRows {
        hidden,
        features,
        rows,
    }
}
