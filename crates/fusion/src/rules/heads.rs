//! Heads of queries, keys and values: their norms, their rotation, and the KV cache.

use crate::rewrite::Match;
use crate::rules::Rule;
use crate::{HeadJob, HeadRole, Kind, Op, OpList, Operand, Rope, Value};

/// Tensors of which one kernel makes heads, at most.
pub const MAX_JOBS: usize = 3;

/// A norm of heads and their rotation.
pub(crate) const NORM_ROPE: Rule = Rule {
    name: "norm_rope",
    pattern: "y = rope(rms(x) w), over heads",
    replacement: "y = norm_rope(x, w)",
    example: || {
        let mut list = OpList::default();
        let [x, w] = [list.value(3, 16), list.value(1, 8)];
        let y = list.make(norm(true), &[x, w], 3, 16);
        let y = list.make(Kind::Rope(rope()), &[y], 3, 16);
        list.keep(y);
        list
    },
    rewritten: "v3[3x16] = norm_rope (v0, v1)\n",
    starts_at: |kind| matches!(kind, Kind::Rope(_)),
    rewrite: norm_rope,
};

/// Norms of heads, and keys and values to the cache.
pub(crate) const APPEND: Rule = Rule {
    name: "append",
    pattern: "q = norm_rope(…); k = norm_rope(…); v = rms(…) or as it is; kv_append(k, v)",
    replacement: "q, k, v = heads_append(…)",
    example: || {
        let mut list = OpList::default();
        let [q, k, v] = [32, 16, 16].map(|cols| list.value(3, cols));
        let [q_norm, k_norm] = [(); 2].map(|()| list.value(1, 8));
        let turned = |list: &mut OpList, x, w, cols| {
            let y = list.make(norm(true), &[x, w], 3, cols);
            list.make(Kind::Rope(rope()), &[y], 3, cols)
        };
        let q = turned(&mut list, q, q_norm, 32);
        let k = turned(&mut list, k, k_norm, 16);
        let v = list.make(norm(false), &[v], 3, 16);
        let kind = Kind::KvAppend {
            kv: Operand(2),
            group: 0,
            heads: 2,
            head_dim: 8,
            batch: Operand(1),
        };
        list.push(kind, vec![k, v], Vec::new());
        for y in [q, k, v] {
            list.keep(y);
        }
        list
    },
    rewritten: "v6[3x32], v8[3x16], v9[3x16] = heads_append Query+norm+rope Key+norm+rope \
                Value+norm (v0, v3, v1, v4, v2)\n",
    starts_at: |kind| matches!(kind, Kind::KvAppend { .. }),
    rewrite: append,
};

/// The norm of heads of 8 columns, for examples.
fn norm(is_weighted: bool) -> Kind {
    Kind::RmsNorm {
        width: 8,
        eps: 1e-6,
        is_weighted,
    }
}

/// A rotation, for examples.
fn rope() -> Rope {
    Rope {
        table: Operand(0),
        head_dim: 8,
        batch: Operand(1),
    }
}

fn norm_rope(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let Kind::Rope(rope) = m.op(at).kind else {
        return None;
    };
    let norm = m.private_maker(m.op(at).inputs[0])?;
    let Kind::RmsNorm {
        width,
        eps,
        is_weighted: true,
    } = m.op(norm).kind
    else {
        return None;
    };
    if width != rope.head_dim || width > m.device.head_width() {
        return None;
    }
    let inputs = m.op(norm).inputs.clone();
    let outputs = m.op(at).outputs.clone();
    m.replace(
        &[norm, at],
        Op::new(Kind::NormRope { rope, eps }, inputs, outputs),
    )
}

/// Heads that a norm makes: what becomes of them but for their role, `eps` and the rotation.
fn job_of(m: &Match<'_>, at: usize, head_dim: usize) -> Option<(HeadJob, f32, Option<Rope>)> {
    let op = m.op(at);
    let (eps, is_weighted, rope) = match op.kind {
        Kind::RmsNorm {
            width,
            eps,
            is_weighted,
        } if width == head_dim => (eps, is_weighted, None),
        Kind::NormRope { rope, eps } if rope.head_dim == head_dim => (eps, true, Some(rope)),
        _ => return None,
    };
    let [_, cols] = m.list.shape(op.outputs[0]);
    let job = HeadJob {
        is_normed: true,
        is_weighted,
        is_rotated: rope.is_some(),
        heads: cols / head_dim,
        role: HeadRole::Query,
    };
    Some((job, eps, rope))
}

fn append(m: &mut Match<'_>, at: usize) -> Option<usize> {
    let Kind::KvAppend {
        kv,
        group,
        heads,
        head_dim,
        batch,
    } = m.op(at).kind
    else {
        return None;
    };
    let [k, v] = [m.op(at).inputs[0], m.op(at).inputs[1]];
    let k_maker = m.maker(k)?;
    let (k_job, eps, rope) = job_of(m, k_maker, head_dim)?;
    let fits = |of: &(HeadJob, f32, Option<Rope>)| of.1 == eps && (of.2.is_none() || of.2 == rope);
    if head_dim > m.device.head_width() || rope.is_some_and(|r| r.batch != batch) {
        return None;
    }
    let key = HeadJob {
        role: HeadRole::Key,
        ..k_job
    };
    let mut jobs = vec![(Some(k_maker), m.op(k_maker).inputs.clone(), key)];
    let v_maker = m.maker(v).filter(|&i| i != k_maker);
    let v_made = v_maker.and_then(|i| job_of(m, i, head_dim).filter(fits).map(|made| (i, made)));
    jobs.push(match v_made {
        Some((i, (job, ..))) => {
            let job = HeadJob {
                role: HeadRole::Value,
                ..job
            };
            (Some(i), m.op(i).inputs.clone(), job)
        }
        None => {
            let job = HeadJob {
                is_normed: false,
                is_weighted: false,
                is_rotated: false,
                heads,
                role: HeadRole::Value,
            };
            (None, vec![v], job)
        }
    });
    // The queries of the same rows, if they are not read before.
    let [rows, _] = m.list.shape(k);
    let is_query = |i: &usize| {
        let made = job_of(m, *i, head_dim).filter(fits);
        let y = m.op(*i).outputs.first().copied();
        jobs.iter().all(|job| job.0 != Some(*i))
            && made.is_some_and(|(job, ..)| job.is_rotated == rope.is_some())
            && y.is_some_and(|y| {
                m.list.shape(y)[0] == rows && m.reader_between(y, *i, at).is_none()
            })
    };
    if let Some(i) = (0..at).rev().find(is_query) {
        let (job, ..) = job_of(m, i, head_dim)?;
        jobs.insert(0, (Some(i), m.op(i).inputs.clone(), job));
    }
    let mut parts: Vec<usize> = jobs.iter().filter_map(|job| job.0).collect();
    parts.push(at);
    let inputs: Vec<Value> = jobs.iter().flat_map(|job| job.1.clone()).collect();
    let makers = jobs.iter().filter_map(|job| job.0);
    let outputs = makers.map(|i| m.op(i).outputs[0]).collect();
    let kind = Kind::HeadsAppend {
        kv,
        group,
        head_dim,
        batch,
        rope,
        eps,
        jobs: jobs.into_iter().map(|job| job.2).collect(),
    };
    m.replace(&parts, Op::new(kind, inputs, outputs))
}
