//! Gated linear units with what they read.

use crate::rewrite::Match;
use crate::rules::Rule;
use crate::{Kind, Op, OpList, Operand};
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

/// A narrow gate between two products.
pub(crate) const PROJECTION: Rule = Rule {
    name: "gated_projection",
    pattern: "g = x gateᵀ; y = activation(g) c; z = y wᵀ; c is v or columns of it, and nobody else reads g, y or \
              those columns",
    replacement: "z = gated_projection(x, v)",
    example: || {
        let mut list = OpList::default();
        let [x, v] = [list.value(3, 8), list.value(3, 12)];
        let weights = vec![Operand(1)];
        let gate = list.make(Kind::Product { weights }, &[x], 3, 4);
        let (activation, first) = (Activation::GeluTanh, 8);
        let y = list.make(Kind::GluColumns { activation, first }, &[gate, v], 3, 4);
        let weights = vec![Operand(2)];
        let z = list.make(Kind::Product { weights }, &[y], 3, 8);
        list.keep(z);
        list
    },
    rewritten: "v0' = to_f16 (v0)\nv4[3x8] = gated_projection GeluTanh from 8 (v0', v1)\n",
    starts_at: |kind| matches!(kind, Kind::Product { .. }),
    rewrite: projection,
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

fn projection(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let single = |kind: &Kind| match kind {
        Kind::Product { weights } => match weights[..] {
            [w] => Some(w),
            _ => None,
        },
        _ => None,
    };
    let projection = single(&m.op(at).kind)?;
    let glu = m.private_maker(m.op(at).inputs[0])?;
    let (activation, first) = match m.op(glu).kind {
        Kind::Glu { activation } => (activation, 0),
        Kind::GluColumns { activation, first } if m.op(glu).outputs.len() == 1 => {
            (activation, first)
        }
        _ => return None,
    };
    let [g, v] = [m.op(glu).inputs[0], m.op(glu).inputs[1]];
    let product = m.private_maker(g)?;
    let gate = single(&m.op(product).kind)?;
    let x = m.op(product).inputs[0];
    let [rows, _] = m.list.shape(x);
    if !m.device.projects_gates(gate, projection, rows) {
        return None;
    }
    let kind = Kind::GatedProjection {
        gate,
        activation,
        first,
        projection,
    };
    let outputs = m.op(at).outputs.clone();
    m.replace(&[product, glu, at], Op::new(kind, vec![x, v], outputs))
}
