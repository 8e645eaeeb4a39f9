//! A dense block, or an expert that all rows share, beside routed experts: neither waits for
//! the other, so both run in the same kernels.

use crate::rewrite::Match;
use crate::rules::Rule;
use crate::{Kind, Op, OpList, Operand};
use backend::Activation;

/// A gate, and a product of it.
pub(crate) const GATE: Rule = Rule {
    name: "beside_experts",
    pattern: "y = activation(gate) up; z = y wᵀ; parts, weights = experts(x, scores)",
    replacement: "parts, weights, y, z = experts_beside(x, scores, gate, up), without z if \
                  its product does not fit theirs",
    example: || {
        let mut list = OpList::default();
        let [gate, up, x, scores] = [128, 128, 64, 4].map(|cols| list.value(3, cols));
        let activation = Activation::Silu;
        let y = list.make(Kind::Glu { activation }, &[gate, up], 3, 128);
        let weights = vec![Operand(1)];
        let z = list.make(Kind::Product { weights }, &[y], 3, 64);
        let kind = Kind::Experts {
            experts: Operand(0),
            top_k: 2,
        };
        let [parts, weights] = [list.value(6, 64), list.value(3, 2)];
        list.push(kind, vec![x, scores], vec![parts, weights]);
        for v in [z, parts, weights] {
            list.keep(v);
        }
        list
    },
    rewritten: "v2' = to_f16 (v2)\n\
                v6[6x64], v7[3x2], v4[3x128], v5[3x64] = experts_beside top_k=2 product \
                (v2', v3, v0, v1)\n",
    starts_at: |kind| matches!(kind, Kind::Experts { .. }),
    rewrite: gate,
};

fn gate(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let Kind::Experts { experts, top_k } = m.op(at).kind else {
        return None;
    };
    let [rows, _] = m.list.shape(m.op(at).inputs[1]);
    if !m.device.gates_beside_experts(rows) {
        return None;
    }
    let is_glu = |&i: &usize| {
        matches!(m.op(i).kind, Kind::Glu { .. }) && m.list.shape(m.op(i).outputs[0])[0] == rows
    };
    let glu = (0..at).rev().find(is_glu)?;
    let Kind::Glu { activation } = m.op(glu).kind else {
        return None;
    };
    let y = m.op(glu).outputs[0];
    // The product of it, if that fits.
    let product = m
        .reader_between(y, glu, at)
        .and_then(|i| match &m.op(i).kind {
            Kind::Product { weights } if m.is_only_read_once(y) => match weights[..] {
                [w] if m.device.joins_experts(experts, top_k, w, rows) => Some((i, w)),
                _ => None,
            },
            _ => None,
        });
    let mut inputs = m.op(at).inputs.clone();
    inputs.extend(&m.op(glu).inputs);
    let mut outputs = m.op(at).outputs.clone();
    outputs.push(y);
    let with = |product| Kind::ExpertsBeside {
        experts,
        top_k,
        activation,
        product,
    };
    if let Some((i, w)) = product {
        let mut outputs = outputs.clone();
        outputs.push(m.op(i).outputs[0]);
        let op = Op::new(with(Some(w)), inputs.clone(), outputs);
        if let Some(next) = m.replace(&[glu, i, at], op) {
            return Some(next + 1);
        }
    }
    let next = m.replace(&[glu, at], Op::new(with(None), inputs, outputs));
    next.map(|next| next + 1)
}
