//! The f16 copies that matrix products read: made by the kernel that makes the values where
//! it can, else by one of their own, once.

use crate::rewrite::Match;
use crate::rules::Rule;
use crate::{Kind, Op, OpList, Operand, Value};

/// Products read copies.
pub(crate) const INPUTS: Rule = Rule {
    name: "f16_inputs",
    pattern: "y = x wᵀ, of weights that are multiplied in f16",
    replacement: "x' = to_f16(x), unless there is one; y = x' wᵀ",
    example: || {
        let mut list = OpList::default();
        let x = list.value(3, 8);
        let weights = vec![Operand(1)];
        let y = list.make(Kind::Product { weights }, &[x], 3, 4);
        list.keep(y);
        list
    },
    rewritten: "v0' = to_f16 (v0)\nv1[3x4] = product (v0')\n",
    starts_at: reads_rows,
    rewrite: inputs,
};

/// Values for products to come.
pub(crate) const KEPT: Rule = Rule {
    name: "f16_kept",
    pattern: "y = rms(x) w or activation(gate) x, needed after the list",
    replacement: "y, y' = …, for a product of the next list may read it",
    example: || {
        let mut list = OpList::default();
        let [gate, x] = [list.value(3, 8), list.value(3, 8)];
        let activation = backend::Activation::Silu;
        let y = list.make(Kind::Glu { activation }, &[gate, x], 3, 8);
        list.keep(y);
        list
    },
    rewritten: "v2'[3x8] = glu Silu (v0, v1)\n",
    starts_at: writes_always,
    rewrite: kept,
};

/// Copies written by the kernel that makes the values.
pub(crate) const EPILOGUE: Rule = Rule {
    name: "f16_epilogue",
    pattern: "y = …; y' = to_f16(y)",
    replacement: "y, y' = …",
    example: || {
        let mut list = OpList::default();
        let [x, y] = [list.value(3, 8), list.value(3, 8)];
        let post = list.value(1, 8);
        let kind = Kind::RmsNorm {
            width: 8,
            eps: 1e-6,
            is_weighted: true,
        };
        let y = list.make(kind, &[y, post], 3, 8);
        let sum = list.make(Kind::Add, &[y, x], 3, 8);
        let weights = vec![Operand(1)];
        let z = list.make(Kind::Product { weights }, &[sum], 3, 4);
        list.keep(z);
        list
    },
    rewritten: "v4'[3x8] = residual_norm post norms=0 (v0, v1, v2)\nv5[3x4] = product (v4')\n",
    starts_at: |kind| matches!(kind, Kind::ToF16),
    rewrite: epilogue,
};

/// Whether an op of this kind multiplies its first input with weights.
fn reads_rows(kind: &Kind) -> bool {
    matches!(
        kind,
        Kind::Product { .. }
            | Kind::ChosenProduct { .. }
            | Kind::Experts { .. }
            | Kind::ExpertsBeside { .. }
            | Kind::GatedProjection { .. }
    )
}

/// Whether kernels of this kind have the values in registers, so that a copy costs little.
fn writes_always(kind: &Kind) -> bool {
    matches!(
        kind,
        Kind::RmsNorm { .. }
            | Kind::Glu { .. }
            | Kind::GluColumns { .. }
            | Kind::NormGlu { .. }
            | Kind::DeltaNormGlu { .. }
            | Kind::ExpertsBeside { .. }
            | Kind::Attend { .. }
            | Kind::ResidualNorm { norms: 1.., .. }
    )
}

/// Whether the op can write the f16 copy of its output `y`.
fn can_write(m: &Match<'_>, at: usize, y: Value) -> bool {
    let op = m.op(at);
    if op.f16_of(y).is_some() {
        return false;
    }
    match op.kind {
        Kind::RmsNorm { .. } => {
            let [_, cols] = m.list.shape(y);
            matches!(op.kind, Kind::RmsNorm { width, is_weighted: true, .. }
                if width == cols && width <= m.device.row_width())
        }
        Kind::Glu { .. } | Kind::GluColumns { .. } => op.outputs[0] == y,
        Kind::NormGlu { .. } => op.outputs[1] == y,
        Kind::DeltaNormGlu { .. } | Kind::ExpertsBeside { .. } => op.outputs[2] == y,
        Kind::Attend { writes_f16, .. } => writes_f16,
        // Norms of the sum, or the sum if there are none.
        Kind::ResidualNorm { norms, .. } => (op.outputs[0] == y) == (norms == 0),
        _ => false,
    }
}

/// Has the op at `at` write a copy of `y`.
fn write(m: &mut Match<'_>, at: usize, y: Value) -> Value {
    let [rows, cols] = m.list.shape(y);
    let copy = m.list.value(rows, cols);
    m.list.ops[at].f16_outputs.push((y, copy));
    copy
}

fn inputs(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let op = m.op(at);
    let reads = match &op.kind {
        Kind::Product { weights } => weights.iter().any(|&w| m.device.reads_f16(w)),
        Kind::ChosenProduct { weights } => m.device.reads_f16(*weights),
        Kind::GatedProjection { gate, .. } => m.device.reads_f16(*gate),
        Kind::Experts { experts, .. } | Kind::ExpertsBeside { experts, .. } => {
            m.device.reads_f16(*experts)
        }
        _ => false,
    };
    if !reads || op.f16_input.is_some() {
        return None;
    }
    let x = op.inputs[0];
    let before = m.list.ops[..at].iter().find_map(|op| match op.kind {
        Kind::ToF16 if op.inputs[0] == x => op.f16_outputs.first().map(|&(_, copy)| copy),
        _ => op.f16_of(x),
    });
    if let Some(copy) = before.or(m.list.f16_before(x)) {
        m.list.ops[at].f16_input = Some(copy);
        return Some(at + 1);
    }
    let [rows, cols] = m.list.shape(x);
    let copy = m.list.value(rows, cols);
    m.list.ops[at].f16_input = Some(copy);
    let mut convert = Op::new(Kind::ToF16, vec![x], Vec::new());
    convert.f16_outputs.push((x, copy));
    m.list.ops.insert(at, convert);
    Some(at + 2)
}

fn kept(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let outputs = m.op(at).outputs.clone();
    let wanted = |y: &Value| {
        let converts = |op: &Op| op.kind == Kind::ToF16 && op.inputs[0] == *y;
        m.list.is_kept(*y) && can_write(m, at, *y) && !m.list.ops.iter().any(converts)
    };
    let y = outputs.into_iter().find(wanted)?;
    write(m, at, y);
    Some(at)
}

fn epilogue(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let (x, copy) = m.op(at).f16_outputs[0];
    let maker = m.maker(x)?;
    if !can_write(m, maker, x) {
        return None;
    }
    m.list.ops[maker].f16_outputs.push((x, copy));
    m.list.ops.remove(at);
    Some(at)
}
