//! Gated linear units with what they read.

use crate::rewrite::Match;
use crate::rules::Rule;
use crate::{Kind, Op, OpList};
use backend::Activation;

/// The norm of heads that a gate is for.
pub(crate) const NORM: Rule = Rule {
    name: "norm_glu",
    pattern: "n = rms(x) w, over heads of whole tiles; y = activation(gate) n",
    replacement: "n, y = norm_glu(x, w, gate)",
    example: || {
        let mut list = OpList::default();
        let [x, w, gate] = [(3, 128), (1, 64), (3, 128)].map(|(r, c)| list.value(r, c));
        let kind = Kind::RmsNorm {
            width: 64,
            eps: 1e-6,
            is_weighted: true,
        };
        let n = list.make(kind, &[x, w], 3, 128);
        let activation = Activation::Silu;
        let y = list.make(Kind::Glu { activation }, &[gate, n], 3, 128);
        list.keep(y);
        list
    },
    rewritten: "v3[3x128], v4'[3x128] = norm_glu Silu (v0, v1, v2)\n",
    starts_at: |kind| matches!(kind, Kind::Glu { .. }),
    rewrite: norm,
};

/// Columns of a wider tensor.
pub(crate) const COLUMNS: Rule = Rule {
    name: "glu_columns",
    pattern: "c = columns(x); y = activation(gate) c",
    replacement: "y, c = glu_columns(gate, x), without c if nobody else reads it",
    example: || {
        let mut list = OpList::default();
        let [x, gate] = [list.value(3, 12), list.value(3, 4)];
        let c = list.make(Kind::Columns { first: 8 }, &[x], 3, 4);
        let activation = Activation::GeluTanh;
        let y = list.make(Kind::Glu { activation }, &[gate, c], 3, 4);
        list.keep(y);
        list
    },
    rewritten: "v3'[3x4] = glu_columns GeluTanh from 8 (v1, v0)\n",
    starts_at: |kind| matches!(kind, Kind::Glu { .. }),
    rewrite: columns,
};

fn norm(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let Kind::Glu { activation } = m.op(at).kind else {
        return None;
    };
    let [gate, n] = [m.op(at).inputs[0], m.op(at).inputs[1]];
    let norm = m.maker(n)?;
    let Kind::RmsNorm {
        width,
        eps,
        is_weighted,
    } = m.op(norm).kind
    else {
        return None;
    };
    let [_, cols] = m.list.shape(n);
    let tile = m.device.f16_tile();
    if width == cols || width > m.device.row_width() || !width.is_multiple_of(tile) {
        return None;
    }
    let mut inputs = m.op(norm).inputs.clone();
    inputs.push(gate);
    let outputs = vec![n, m.op(at).outputs[0]];
    let kind = Kind::NormGlu {
        width,
        eps,
        is_weighted,
        activation,
    };
    m.replace(&[norm, at], Op::new(kind, inputs, outputs))
}

fn columns(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let Kind::Glu { activation } = m.op(at).kind else {
        return None;
    };
    let [gate, c] = [m.op(at).inputs[0], m.op(at).inputs[1]];
    let columns = m.maker(c)?;
    let Kind::Columns { first } = m.op(columns).kind else {
        return None;
    };
    let mut outputs = m.op(at).outputs.clone();
    outputs.extend((!m.is_only_read_once(c)).then_some(c));
    let inputs = vec![gate, m.op(columns).inputs[0]];
    let kind = Kind::GluColumns { activation, first };
    m.replace(&[columns, at], Op::new(kind, inputs, outputs))
}
