//! Sums of the residual stream, with the norms around them: the end of a layer's block and
//! the beginning of the next one in one kernel.

use crate::rewrite::Match;
use crate::rules::Rule;
use crate::{Kind, Op, OpList, SumTerm, Value};

/// Norms of a sum, at most.
pub const MAX_NORMS: usize = 3;

/// A dense block beside experts.
pub(crate) const DENSE_BRANCH: Rule = Rule {
    name: "dense_branch",
    pattern: "s = rms(dense) w1 + rms(combine(parts, weights)) w2; sum = x + rms(s) post",
    replacement: "sum = dense_branch_residual_norm(x, parts, weights, dense, w1, w2, post)",
    example: || {
        let mut list = OpList::default();
        let [parts, weights] = [list.value(6, 8), list.value(3, 2)];
        let [dense, x] = [list.value(3, 8), list.value(3, 8)];
        let [w1, w2, w3] = [0; 3].map(|_| list.value(1, 8));
        let routed = list.make(Kind::Combine { top_k: 2 }, &[parts, weights], 3, 8);
        let dense = list.make(norm(8), &[dense, w1], 3, 8);
        let routed = list.make(norm(8), &[routed, w2], 3, 8);
        let both = list.make(Kind::Add, &[dense, routed], 3, 8);
        let both = list.make(norm(8), &[both, w3], 3, 8);
        let sum = list.make(Kind::Add, &[both, x], 3, 8);
        list.keep(sum);
        list
    },
    rewritten: "v12[3x8] = dense_branch_residual_norm post norms=0 (v3, v0, v1, v2, v4, v5, v6)\n",
    starts_at: |kind| matches!(kind, Kind::Add),
    rewrite: dense_branch,
};

/// A shared expert beside experts.
pub(crate) const SHARED_EXPERT: Rule = Rule {
    name: "shared_expert",
    pattern: "sum = x + (combine(parts, weights) + gate_rows(shared, gate))",
    replacement: "sum = shared_expert_residual_norm(x, parts, weights, shared, gate)",
    example: || {
        let mut list = OpList::default();
        let [parts, weights] = [list.value(6, 8), list.value(3, 2)];
        let [shared, gate, x] = [list.value(3, 8), list.value(3, 1), list.value(3, 8)];
        let activation = backend::Activation::Sigmoid;
        let routed = list.make(Kind::Combine { top_k: 2 }, &[parts, weights], 3, 8);
        let shared = list.make(Kind::GateRows { activation }, &[shared, gate], 3, 8);
        let both = list.make(Kind::Add, &[routed, shared], 3, 8);
        let sum = list.make(Kind::Add, &[x, both], 3, 8);
        list.keep(sum);
        list
    },
    rewritten: "v8[3x8] = shared_expert_residual_norm norms=0 (v4, v0, v1, v2, v3)\n",
    starts_at: |kind| matches!(kind, Kind::Add),
    rewrite: shared_expert,
};

/// The norm of what is added.
pub(crate) const POST_NORM: Rule = Rule {
    name: "post_norm",
    pattern: "sum = x + rms(y) post",
    replacement: "sum = residual_norm(x, y, post)",
    example: || {
        let mut list = OpList::default();
        let [x, y, post] = [list.value(3, 8), list.value(3, 8), list.value(1, 8)];
        let y = list.make(norm(8), &[y, post], 3, 8);
        let sum = list.make(Kind::Add, &[y, x], 3, 8);
        list.keep(sum);
        list
    },
    rewritten: "v4[3x8] = residual_norm post norms=0 (v0, v1, v2)\n",
    starts_at: |kind| matches!(kind, Kind::Add),
    rewrite: post_norm,
};

/// A factor of the sum.
pub(crate) const FACTOR: Rule = Rule {
    name: "factor",
    pattern: "sum = residual_norm(…) f",
    replacement: "sum = residual_norm factor=f (…)",
    example: || {
        let mut list = OpList::default();
        let [x, y, post] = [list.value(3, 8), list.value(3, 8), list.value(1, 8)];
        let y = list.make(norm(8), &[y, post], 3, 8);
        let sum = list.make(Kind::Add, &[y, x], 3, 8);
        let sum = list.make(Kind::Scale { factor: 0.5 }, &[sum], 3, 8);
        list.keep(sum);
        list
    },
    rewritten: "v5[3x8] = residual_norm post factor=0.5 norms=0 (v0, v1, v2)\n",
    starts_at: |kind| matches!(kind, Kind::Scale { .. }),
    rewrite: factor,
};

/// Norms of the sum.
pub(crate) const NEXT_NORM: Rule = Rule {
    name: "next_norm",
    pattern: "sum = x + y or residual_norm(…); n = rms(sum) w",
    replacement: "sum, n = residual_norm(…, w)",
    example: || {
        let mut list = OpList::default();
        let [x, y, w1, w2] = [(3, 8), (3, 8), (1, 8), (1, 8)].map(|(r, c)| list.value(r, c));
        let sum = list.make(Kind::Add, &[x, y], 3, 8);
        let n1 = list.make(norm(8), &[sum, w1], 3, 8);
        let n2 = list.make(norm(8), &[sum, w2], 3, 8);
        for v in [sum, n1, n2] {
            list.keep(v);
        }
        list
    },
    rewritten: "v4[3x8], v5'[3x8], v6'[3x8] = residual_norm norms=2 (v0, v1, v2, v3)\n",
    starts_at: |kind| matches!(kind, Kind::RmsNorm { .. }),
    rewrite: next_norm,
};

/// The norm of whole rows of `width` columns, for examples.
fn norm(width: usize) -> Kind {
    Kind::RmsNorm {
        width,
        eps: 1e-6,
        is_weighted: true,
    }
}

/// A sum and what it replaces.
fn residual(term: SumTerm, has_post: bool, eps: f32) -> Kind {
    Kind::ResidualNorm {
        term,
        has_post,
        factor: 1.0,
        eps,
        norms: 0,
    }
}

/// Both orders of a pair.
fn either([a, b]: [Value; 2]) -> [[Value; 2]; 2] {
    [[a, b], [b, a]]
}

fn pair(op: &Op) -> [Value; 2] {
    [op.inputs[0], op.inputs[1]]
}

fn dense_branch(m: &mut Match<'_>, at: usize) -> Option<usize> {
    either(pair(m.op(at))).into_iter().find_map(|[term, x]| {
        let last = m.private_maker(term)?;
        // A norm of the sum of both, or that sum itself.
        let (post, both) = match m.row_norm(last) {
            Some((both, weight, eps)) => (Some((weight, eps)), both),
            None => (None, term),
        };
        let sum = m
            .private_maker(both)
            .filter(|&i| m.op(i).kind == Kind::Add)?;
        either(pair(m.op(sum)))
            .into_iter()
            .find_map(|[dense, own]| {
                let norms = [m.private_maker(dense)?, m.private_maker(own)?];
                let (dense, dense_weight, eps) = m.row_norm(norms[0])?;
                let (own, own_weight, own_eps) = m.row_norm(norms[1])?;
                let combine = m.private_maker(own)?;
                let Kind::Combine { top_k } = m.op(combine).kind else {
                    return None;
                };
                if own_eps != eps || post.is_some_and(|(_, of_post)| of_post != eps) {
                    return None;
                }
                let mut inputs = vec![x];
                inputs.extend(&m.op(combine).inputs);
                inputs.extend([dense, dense_weight, own_weight]);
                inputs.extend(post.map(|(weight, _)| weight));
                let mut parts = vec![at, sum, norms[0], norms[1], combine];
                parts.extend(post.map(|_| last));
                let kind = residual(SumTerm::DenseBranch { top_k }, post.is_some(), eps);
                let outputs = m.op(at).outputs.clone();
                m.replace(&parts, Op::new(kind, inputs, outputs))
            })
    })
}

fn shared_expert(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let [_, cols] = m.list.shape(m.op(at).outputs[0]);
    if cols > m.device.row_width() {
        return None;
    }
    either(pair(m.op(at))).into_iter().find_map(|[both, x]| {
        let sum = m
            .private_maker(both)
            .filter(|&i| m.op(i).kind == Kind::Add)?;
        either(pair(m.op(sum)))
            .into_iter()
            .find_map(|[routed, gated]| {
                let [combine, gate] = [m.private_maker(routed)?, m.private_maker(gated)?];
                let (Kind::Combine { top_k }, Kind::GateRows { activation }) =
                    (&m.op(combine).kind, &m.op(gate).kind)
                else {
                    return None;
                };
                let term = SumTerm::SharedExpert {
                    top_k: *top_k,
                    activation: *activation,
                };
                let mut inputs = vec![x];
                inputs.extend(&m.op(combine).inputs);
                inputs.extend(&m.op(gate).inputs);
                let outputs = m.op(at).outputs.clone();
                let op = Op::new(residual(term, false, 0.0), inputs, outputs);
                m.replace(&[at, sum, combine, gate], op)
            })
    })
}

fn post_norm(m: &mut Match<'_>, at: usize) -> Option<usize> {
    either(pair(m.op(at))).into_iter().find_map(|[y, x]| {
        let norm = m.private_maker(y)?;
        let (y, weight, eps) = m.row_norm(norm)?;
        let outputs = m.op(at).outputs.clone();
        let kind = residual(SumTerm::Plain, true, eps);
        m.replace(&[norm, at], Op::new(kind, vec![x, y, weight], outputs))
    })
}

fn factor(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let Kind::Scale { factor: own } = m.op(at).kind else {
        return None;
    };
    let sum = m.private_maker(m.op(at).inputs[0])?;
    let mut op = m.op(sum).clone();
    let Kind::ResidualNorm { factor, norms, .. } = &mut op.kind else {
        return None;
    };
    if *factor != 1.0 || *norms > 0 {
        return None;
    }
    *factor = own;
    op.outputs = m.op(at).outputs.clone();
    m.replace(&[sum, at], op)
}

fn next_norm(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let (sum, weight, own_eps) = m.row_norm(at)?;
    let maker = m.maker(sum)?;
    let mut op = m.op(maker).clone();
    if op.kind == Kind::Add {
        op.kind = residual(SumTerm::Plain, false, own_eps);
    }
    let Kind::ResidualNorm {
        term,
        has_post,
        eps,
        norms,
        ..
    } = &mut op.kind
    else {
        return None;
    };
    let has_norm = *has_post || *norms > 0 || matches!(term, SumTerm::DenseBranch { .. });
    if op.outputs[0] != sum || *norms == MAX_NORMS || has_norm && *eps != own_eps {
        return None;
    }
    *eps = own_eps;
    *norms += 1;
    op.inputs.push(weight);
    op.outputs.extend(&m.op(at).outputs);
    m.replace(&[maker, at], op)
}
