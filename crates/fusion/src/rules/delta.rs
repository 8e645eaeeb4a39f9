//! The gated delta rule and what its heads go through before they are projected.

use crate::rewrite::Match;
use crate::rules::Rule;
use crate::{Kind, Op, OpList, Operand};
use backend::Activation;

/// A norm of the heads and a gate.
pub(crate) const NORM_GLU: Rule = Rule {
    name: "delta_norm_glu",
    pattern: "o = delta(…); n = rms(o) w, over heads; y = activation(gate) n",
    replacement: "o, n, y = delta_norm_glu(…, w, gate)",
    example: || {
        let mut list = OpList::default();
        let [qkv, b, a, gate] = [512, 2, 2, 128].map(|cols| list.value(3, cols));
        let [conv, decay, bias, w] =
            [(512, 4), (1, 2), (1, 2), (1, 64)].map(|(r, c)| list.value(r, c));
        let kind = Kind::Delta {
            state: Operand(0),
            batch: Operand(1),
            value_dim: 64,
            is_single: true,
        };
        let o = list.make(kind, &[qkv, b, a, conv, decay, bias], 3, 128);
        let kind = Kind::RmsNorm {
            width: 64,
            eps: 1e-6,
            is_weighted: true,
        };
        let n = list.make(kind, &[o, w], 3, 128);
        let activation = Activation::Silu;
        let y = list.make(Kind::Glu { activation }, &[gate, n], 3, 128);
        list.keep(y);
        list
    },
    rewritten: "v8[3x128], v9[3x128], v10'[3x128] = delta_norm_glu Silu \
                (v0, v1, v2, v4, v5, v6, v7, v3)\n",
    starts_at: |kind| matches!(kind, Kind::Glu { .. }),
    rewrite: norm_glu,
};

fn norm_glu(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let Kind::Glu { activation } = m.op(at).kind else {
        return None;
    };
    let [gate, n] = [m.op(at).inputs[0], m.op(at).inputs[1]];
    let norm = m.maker(n)?;
    let Kind::RmsNorm {
        width,
        eps,
        is_weighted: true,
    } = m.op(norm).kind
    else {
        return None;
    };
    let o = m.op(norm).inputs[0];
    let delta = m.maker(o)?;
    let Kind::Delta {
        state,
        batch,
        value_dim,
        is_single: true,
    } = m.op(delta).kind
    else {
        return None;
    };
    if width != value_dim || !width.is_multiple_of(m.device.f16_tile()) {
        return None;
    }
    let mut inputs = m.op(delta).inputs.clone();
    inputs.extend([m.op(norm).inputs[1], gate]);
    let outputs = vec![o, n, m.op(at).outputs[0]];
    let kind = Kind::DeltaNormGlu {
        state,
        batch,
        value_dim,
        eps,
        activation,
    };
    m.replace(&[delta, norm, at], Op::new(kind, inputs, outputs))
}
