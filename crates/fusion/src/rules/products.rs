//! Products of one input.

use crate::rewrite::Match;
use crate::rules::Rule;
use crate::{Kind, Op, OpList, Operand};

/// Matrices that one kernel multiplies with one input, at most.
pub const MAX_MATRICES: usize = 4;

/// Products of one input that are asked for one after the other.
pub(crate) const SAME_INPUT: Rule = Rule {
    name: "same_input",
    pattern: "y1 = x w1ᵀ; y2 = x w2ᵀ",
    replacement: "y1, y2 = product(x, w1, w2)",
    example: || {
        let mut list = OpList::default();
        let x = list.value(3, 8);
        for _ in 0..2 {
            let weights = vec![Operand(1)];
            let y = list.make(Kind::Product { weights }, &[x], 3, 4);
            list.keep(y);
        }
        list
    },
    rewritten: "v0' = to_f16 (v0)\nv1[3x4], v2[3x4] = product x2 (v0')\n",
    starts_at: |kind| matches!(kind, Kind::Product { .. }),
    rewrite: same_input,
};

fn same_input(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let Kind::Product { weights } = &m.op(at).kind else {
        return None;
    };
    let x = m.op(at).inputs[0];
    let mut before = (0..at).rev();
    let first =
        before.find(|&i| matches!(m.op(i).kind, Kind::Product { .. }) && m.op(i).inputs[0] == x)?;
    let Kind::Product { weights: of_first } = &m.op(first).kind else {
        return None;
    };
    let weights = [&of_first[..], weights].concat();
    if weights.len() > MAX_MATRICES {
        return None;
    }
    let outputs = [&m.op(first).outputs[..], &m.op(at).outputs].concat();
    let op = Op::new(Kind::Product { weights }, vec![x], outputs);
    m.replace(&[first, at], op)
}
