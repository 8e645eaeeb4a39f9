//! Rules do what they say, and change no bit.

use crate::interpret::{Bound, Machine};
use crate::rewrite::Device;
use crate::{Kind, OpList, Operand, RULES, Rope, Value, fuse};
use backend::{
    Activation, Batch, BatchSeq, DeltaSpec, Expert, Experts, KvFormat, KvSpec, Matrix, MediaRow,
    Ops, Position, Reference, Row, Store,
};
use proptest::prelude::*;
use quant::Scalar;
use std::collections::HashMap;

/// A device for which everything fits.
struct Ample;

impl Device for Ample {
    fn row_width(&self) -> usize {
        1024
    }
    fn head_width(&self) -> usize {
        512
    }
    fn f16_tile(&self) -> usize {
        8
    }
    fn reads_f16(&self, _: Operand) -> bool {
        true
    }
    fn gates_beside_experts(&self, rows: usize) -> bool {
        rows <= 16
    }
    fn joins_experts(&self, _: Operand, _: usize, _: Operand, _: usize) -> bool {
        true
    }
    fn projects_gates(&self, _: Operand, _: Operand, _: usize) -> bool {
        true
    }
}

/// Numbers of no pattern in `-1 .. 1`.
fn noise(seed: u32, n: usize) -> Vec<f32> {
    let number = |i: u32| {
        let x = i.wrapping_mul(0x9e37_79b9) ^ seed.wrapping_mul(0x85eb_ca6b);
        let x = (x ^ x >> 16).wrapping_mul(0x7feb_352d);
        let x = (x ^ x >> 15).wrapping_mul(0x846c_a68b);
        (x >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n as u32).map(number).collect()
}

fn matrix(seed: u32, rows: usize, cols: usize) -> Matrix {
    let w = quant::encode(&quant::F32, &noise(seed, rows * cols), cols, Scalar::F32);
    Reference.matrix(&[w.view()])
}

/// Three rows of one sequence.
fn batch() -> Batch {
    let row = |i| Row {
        position: Position::text(i + 5),
        ..Row::text(i)
    };
    Batch {
        tokens: vec![1, 2, 3],
        rows: (0..3).map(row).collect(),
        media: Vec::new(),
        seqs: vec![BatchSeq {
            rows: 0..3,
            slot: 0,
            is_new: true,
            kept: 0,
            certain: 3,
            tables: std::iter::once(0..1).collect(),
        }],
        tables: vec![0],
    }
}

/// The values that `list` reads and does not make.
fn inputs(list: &OpList) -> Vec<Value> {
    let made: Vec<Value> = list.ops.iter().flat_map(|op| op.makes()).collect();
    let read = list.ops.iter().flat_map(|op| op.reads());
    read.filter(|x| !made.contains(x)).collect()
}

/// The values that `before` keeps, as `list` computes them from noise.
fn kept(before: &OpList, list: &OpList, operands: HashMap<u32, Bound>) -> Vec<Vec<u32>> {
    let mut machine = Machine {
        operands,
        values: HashMap::new(),
    };
    for x in inputs(before) {
        let [rows, cols] = before.shape(x);
        machine.values.insert(x, noise(x.0, rows * cols));
    }
    machine.run(list);
    let bits = |x: &Vec<f32>| x.iter().map(|x| x.to_bits()).collect();
    before
        .kept()
        .iter()
        .map(|y| bits(&machine.values[y]))
        .collect()
}

/// The operands of the rules' examples.
fn operands(rule: &str) -> HashMap<u32, Bound> {
    let list = match rule {
        "norm_rope" | "append" => {
            let kv = Reference.kv(KvSpec {
                pages: 1,
                rows: 64,
                heads: 2,
                head_dim: 8,
                format: KvFormat::both(&quant::kv::F32),
            });
            let rope = backend::Rope {
                head_dim: 8,
                pair_offset: 4,
                frequencies: noise(90, 4),
                axes: Vec::new(),
            };
            vec![Bound::Rope(rope), Bound::Batch(batch()), Bound::Kv(kv)]
        }
        "delta_norm_glu" => {
            let delta = Reference.delta(DeltaSpec {
                slots: 1,
                key_heads: 2,
                value_heads: 2,
                key_dim: 96,
                value_dim: 64,
                conv_taps: 4,
            });
            vec![Bound::Delta(delta), Bound::Batch(batch())]
        }
        "beside_experts" => {
            let expert = |i| Expert {
                gate_up: matrix(50 + i, 64, 64),
                down: matrix(60 + i, 64, 32),
            };
            let experts = Experts {
                experts: (0u32..4).map(expert).collect(),
                top_k: 2,
                scale: None,
                activation: Activation::Silu,
            };
            vec![Bound::Experts(experts), Bound::Matrix(matrix(70, 64, 128))]
        }
        "gated_projection" => vec![
            Bound::Rows(Vec::new()),
            Bound::Matrix(matrix(70, 4, 8)),
            Bound::Matrix(matrix(71, 8, 4)),
        ],
        _ => vec![Bound::Rows(Vec::new()), Bound::Matrix(matrix(70, 4, 8))],
    };
    (0..).zip(list).collect()
}

#[test]
fn every_rule_rewrites_its_example_and_changes_no_bit() {
    for rule in RULES {
        let before = (rule.example)();
        let mut after = before.clone();
        let applied = fuse(&mut after, &Ample);
        assert!(applied.contains(&rule.name), "{}: {applied:?}", rule.name);
        assert_eq!(after.to_string(), rule.rewritten, "{}", rule.name);
        let want = kept(&before, &before, operands(rule.name));
        let got = kept(&before, &after, operands(rule.name));
        assert!(!want.is_empty() && want == got, "{}: bits", rule.name);
    }
}

#[test]
fn no_rule_takes_away_what_is_needed_later() {
    // Whatever an example makes is kept: each rule leaves it there.
    for rule in RULES {
        let mut before = (rule.example)();
        let made: Vec<Value> = before
            .ops
            .iter()
            .flat_map(|op| op.outputs.clone())
            .collect();
        made.into_iter().for_each(|y| before.keep(y));
        let mut after = before.clone();
        fuse(&mut after, &Ample);
        let want = kept(&before, &before, operands(rule.name));
        let got = kept(&before, &after, operands(rule.name));
        assert!(want == got, "{}\n{after}", rule.name);
    }
}

#[test]
fn names_of_rules_are_their_own() {
    let names: std::collections::HashSet<&str> = RULES.iter().map(|rule| rule.name).collect();
    assert_eq!(names.len(), RULES.len());
}

/// Ops on `[3, 16]` tensors that read what is there, one after the other.
fn random_list(steps: &[(u8, u8, u8, bool)]) -> OpList {
    let mut list = OpList::default();
    let mut rows: Vec<Value> = (0..3).map(|_| list.value(3, 16)).collect();
    let weight = list.value(1, 16);
    let head_weight = list.value(1, 8);
    let parts = list.value(6, 16);
    let pair_weights = list.value(3, 2);
    let gates = list.value(3, 1);
    let row = list.value(3, 32);
    for &(kind, a, b, keep) in steps {
        let pick = |at: u8| rows[rows.len() - 1 - at as usize % rows.len().min(4)];
        let (a, b) = (pick(a), pick(b));
        let norm = |width| Kind::RmsNorm {
            width,
            eps: 1e-6,
            is_weighted: true,
        };
        let activation = Activation::Silu;
        let rope = Rope {
            table: Operand(0),
            head_dim: 8,
            batch: Operand(1),
        };
        let product = Kind::Product {
            weights: vec![Operand(4)],
        };
        let (kind, inputs) = match kind % 14 {
            0 | 1 => (Kind::Add, vec![a, b]),
            2 | 3 => (norm(16), vec![a, weight]),
            4 => (norm(8), vec![a, head_weight]),
            5 => (Kind::Scale { factor: 0.75 }, vec![a]),
            6 => (Kind::Glu { activation }, vec![a, b]),
            7 => (Kind::Combine { top_k: 2 }, vec![parts, pair_weights]),
            8 => (Kind::GateRows { activation }, vec![a, gates]),
            9 => (Kind::Rope(rope), vec![a]),
            10 => (Kind::Columns { first: 8 }, vec![row]),
            11 | 12 => (product, vec![a]),
            _ => (
                Kind::ReplaceRows {
                    pairs: Operand(3),
                    n: 2,
                },
                vec![a, b],
            ),
        };
        let y = list.make(kind, &inputs, 3, 16);
        rows.push(y);
        if keep {
            list.keep(y);
        }
    }
    let last = rows[rows.len() - 1];
    let weights = vec![Operand(2)];
    let y = list.make(Kind::Product { weights }, &[last], 3, 4);
    list.keep(y);
    list
}

#[test]
fn rows_are_replaced_as_the_reference_does_it() {
    let mut list = OpList::default();
    let (x, embeddings) = (list.value(3, 16), list.value(2, 16));
    let kind = Kind::ReplaceRows {
        pairs: Operand(0),
        n: 2,
    };
    let y = list.make(kind, &[x, embeddings], 3, 16);
    list.keep(y);
    let pairs = HashMap::from([(0, Bound::Rows(vec![0, 1, 2, 0]))]);
    let replaced = kept(&list, &list, pairs);
    let mut batch = batch();
    batch.media = [(0, 1), (2, 0)]
        .map(|(row, embedding)| MediaRow {
            row,
            source: 7,
            embedding,
        })
        .into();
    let tensor = |x: Value, rows| Reference.upload(rows, 16, &noise(x.0, rows * 16));
    let want = Reference.replace_rows(tensor(x, 3), &tensor(embeddings, 2), 7, &batch);
    let want = Reference.download(&want);
    assert_eq!(
        replaced,
        [want.iter().map(|x| x.to_bits()).collect::<Vec<_>>()]
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn rules_change_no_bit_of_any_list(steps in prop::collection::vec((0u8..14, 0u8..4, 0u8..4, prop::bool::weighted(0.2)), 1..24)) {
        let before = random_list(&steps);
        let mut after = before.clone();
        fuse(&mut after, &Ample);
        let products = before.ops.iter().filter(|op| matches!(op.kind, Kind::Product { .. })).count();
        prop_assert!(after.ops.len() <= before.ops.len() + products, "one conversion to f16 a product at most");
        let operands = || {
            let rope = backend::Rope { head_dim: 8, pair_offset: 4, frequencies: noise(90, 4), axes: Vec::new() };
            let bound = [Bound::Rope(rope), Bound::Batch(batch()), Bound::Matrix(matrix(70, 4, 16)), Bound::Rows(vec![0, 2, 1, 0]), Bound::Matrix(matrix(71, 16, 16))];
            (0..).zip(bound).collect::<HashMap<u32, Bound>>()
        };
        prop_assert_eq!(kept(&before, &before, operands()), kept(&before, &after, operands()), "{}\n{}", before, after);
    }
}
