//! What is chosen against what is fixed: whether `auto` is as fast as the best fixed draft length, and never slower than
//! plain decoding.

use super::length::BenchLength;
use super::runs::Run;
use serde::Serialize;

/// One class of prompts at one temperature.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    pub(super) class: String,
    pub(super) temperature: f32,
    #[serde(flatten)]
    pub(super) chosen: Chosen,
}

/// Chosen lengths against fixed ones: rates in tokens a second.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Chosen {
    /// Rate without drafts, if that was run.
    pub(super) none_tok_s: Option<f64>,
    /// The fixed length with the highest rate, 0 included, and that rate.
    pub(super) best_fixed: usize,
    pub(super) best_fixed_tok_s: f64,
    /// Rate with lengths that are chosen.
    pub(super) auto_tok_s: f64,
    pub(super) auto_over_best_fixed: f64,
    pub(super) auto_over_none: Option<f64>,
}

/// A summary of each class and temperature that was run both with lengths that are chosen and with fixed ones.
pub(super) fn summaries(runs: &[Run]) -> Vec<Summary> {
    let autos = runs.iter().filter(|run| run.draft == BenchLength::Auto);
    autos.filter_map(|auto| summary(auto, runs)).collect()
}

fn summary(auto: &Run, runs: &[Run]) -> Option<Summary> {
    let of_auto = |run: &&Run| run.class == auto.class && run.temperature == auto.temperature;
    let rates = runs.iter().filter(of_auto);
    Some(Summary {
        class: auto.class.clone(),
        temperature: auto.temperature,
        chosen: chosen(rates.map(|run| (run.draft, run.tok_s)))?,
    })
}

/// Chosen lengths against fixed ones, by the rates of all lengths; none if either has no rate.
pub(super) fn chosen(rates: impl Iterator<Item = (BenchLength, f64)>) -> Option<Chosen> {
    let mut auto_tok_s = None;
    let mut fixed: Vec<(usize, f64)> = Vec::new();
    // Texts of one token have no rate.
    for (length, rate) in rates.filter(|(_, rate)| *rate > 0.0) {
        match length {
            BenchLength::Auto => auto_tok_s = Some(rate),
            BenchLength::Fixed(n) => fixed.push((n, rate)),
        }
    }
    let auto_tok_s = auto_tok_s?;
    let best = fixed.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    let &(best_fixed, best_fixed_tok_s) = best?;
    let none = fixed.iter().find(|(n, _)| *n == 0);
    Some(Chosen {
        none_tok_s: none.map(|(_, rate)| *rate),
        best_fixed,
        best_fixed_tok_s,
        auto_tok_s,
        auto_over_best_fixed: auto_tok_s / best_fixed_tok_s,
        auto_over_none: none.map(|(_, rate)| auto_tok_s / rate),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_set_against_the_best_fixed_length_of_its_class_and_temperature() {
        let run = |class: &str, draft, tok_s| Run {
            class: class.into(),
            draft,
            tok_s,
            ..Run::default()
        };
        let runs = [
            run("a", BenchLength::Fixed(0), 10.0),
            run("a", BenchLength::Fixed(3), 20.0),
            run("a", BenchLength::Auto, 25.0),
            run("b", BenchLength::Fixed(3), 50.0),
            run("b", BenchLength::Auto, 40.0),
            run("c", BenchLength::Auto, 5.0),
        ];
        let found = summaries(&runs);
        let told = |s: &Summary| {
            let chosen = &s.chosen;
            let shares = (chosen.auto_over_best_fixed, chosen.auto_over_none);
            (chosen.best_fixed, shares.0, shares.1)
        };
        let told: Vec<_> = found.iter().map(told).collect();
        assert_eq!(told, [(3, 1.25, Some(2.5)), (3, 0.8, None)]);
    }
}
