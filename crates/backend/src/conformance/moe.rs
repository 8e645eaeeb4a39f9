//! Mixtures of experts.

use super::{Noise, Pair, independent, stored};
use crate::{Activation, Backend, Choice, Expert, ExpertMarks, Experts};
use quant::{BF16, F32, Format, Owned};

/// A shape of experts.
pub(super) struct MoeCase {
    count: usize,
    top_k: usize,
    hidden: usize,
    inner: usize,
    format: &'static Format,
    activation: Activation,
    is_scaled: bool,
}

pub(super) fn moe_cases() -> Vec<MoeCase> {
    let affine = |bits, group| quant::affine(bits, group).expect("a format that exists");
    vec![
        MoeCase {
            count: 5,
            top_k: 2,
            hidden: 24,
            inner: 20,
            format: &BF16,
            activation: Activation::GeluTanh,
            is_scaled: true,
        },
        MoeCase {
            count: 8,
            top_k: 3,
            hidden: 128,
            inner: 64,
            format: affine(4, 64),
            activation: Activation::Silu,
            is_scaled: false,
        },
        MoeCase {
            count: 3,
            top_k: 3,
            hidden: 64,
            inner: 160,
            format: affine(8, 32),
            activation: Activation::Silu,
            is_scaled: true,
        },
        MoeCase {
            count: 40,
            top_k: 1,
            hidden: 33,
            inner: 17,
            format: &F32,
            activation: Activation::GeluTanh,
            is_scaled: false,
        },
    ]
}

impl MoeCase {
    fn name(&self, n: usize) -> String {
        format!(
            "{n} rows, {} of {} experts, {} x {} in {}",
            self.top_k, self.count, self.hidden, self.inner, self.format.name
        )
    }

    fn load(&self, noise: &mut Noise) -> impl Fn(&dyn Backend) -> Experts {
        let (hidden, inner) = (self.hidden, self.inner);
        let weights: Vec<[Owned; 2]> = (0..self.count)
            .map(|_| {
                [
                    stored(noise, self.format, 2 * inner, hidden),
                    stored(noise, self.format, hidden, inner),
                ]
            })
            .collect();
        let scale = self.is_scaled.then(|| noise.values(self.count, 1.0));
        let (top_k, activation) = (self.top_k, self.activation);
        move |b| Experts {
            experts: weights
                .iter()
                .map(|[gate_up, down]| Expert {
                    gate_up: b.matrix(&[gate_up.view()]),
                    down: b.matrix(&[down.view()]),
                })
                .collect(),
            top_k,
            scale: scale.clone(),
            activation,
        }
    }

    /// Scores of `n` rows; some rows like several experts equally.
    fn scores(&self, noise: &mut Noise, n: usize) -> Vec<f32> {
        let mut scores = noise.values(n * self.count, 4.0);
        for row in scores.chunks_exact_mut(self.count).step_by(3) {
            row.iter_mut().for_each(|s| *s = s.round());
        }
        scores
    }
}

pub(super) fn moe_equals(got: &dyn Backend, want: &dyn Backend) {
    let pair = Pair { got, want };
    let mut noise = Noise(17);
    for case in moe_cases() {
        let experts = pair.each(case.load(&mut noise));
        for n in [1, 2, 4, 9, 70] {
            let x = noise.values(n * case.hidden, 2.0);
            let scores = case.scores(&mut noise, n);
            let run = |b: &dyn Backend, experts: &Experts| {
                b.moe(
                    &b.upload(n, case.hidden, &x),
                    &b.upload(n, case.count, &scores),
                    experts,
                )
            };
            got.note_experts();
            let of_got = run(got, &experts.0);
            let mut marks = ExpertMarks::default();
            let told = got.take_experts(&mut marks);
            assert_eq!(told, got.capabilities().experts, "whether experts are told");
            if told {
                let rows = scores.chunks_exact(case.count);
                let choices: Vec<Choice> = rows.map(|row| experts.1.choose(row)).collect();
                let mut chosen = ExpertMarks::default();
                chosen.push(case.count, &choices);
                assert_eq!(marks, chosen, "experts told of {}", case.name(n));
            }
            pair.compare_tensors("moe", &case.name(n), &of_got, &run(want, &experts.1));
            let gate = noise.values(n, 8.0);
            for activation in [Activation::Sigmoid, case.activation] {
                let name = format!("{n} rows of {}, {activation:?}", case.hidden);
                pair.compare("gate_rows", &name, |b| {
                    let x = b.upload(n, case.hidden, &x);
                    b.gate_rows(&x, &b.upload(n, 1, &gate), activation)
                });
            }
        }
    }
}

pub(super) fn moe_rows_are_independent(b: &dyn Backend) {
    let mut noise = Noise(18);
    for case in moe_cases() {
        let experts = case.load(&mut noise)(b);
        let n = 37;
        let x = noise.values(n * case.hidden, 2.0);
        let scores = case.scores(&mut noise, n);
        independent("moe", &case.name(n), b, n, |r| {
            let part = |values: &[f32], cols: usize| {
                b.upload(r.len(), cols, &values[r.start * cols..r.end * cols])
            };
            b.moe(&part(&x, case.hidden), &part(&scores, case.count), &experts)
        });
    }
}
