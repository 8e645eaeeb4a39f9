//! What is chosen against what is fixed: whether `auto` is as fast as the best fixed draft length, and never slower than
//! plain decoding.

use super::length::BenchLength;
use super::runs::Run;
use serde::Serialize;

/// One class of prompts at one temperature: rates in tokens a second.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Summary {
    pub(super) class: String,
    pub(super) temperature: f32,
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
    let fixed = |run: &Run| match run.draft {
        BenchLength::Fixed(n) if run.class == auto.class && run.temperature == auto.temperature => {
            Some((n, run.tok_s))
        }
        _ => None,
    };
    let rates: Vec<(usize, f64)> = runs.iter().filter_map(fixed).collect();
    let best = rates.iter().max_by(|a, b| a.1.total_cmp(&b.1));
    // Texts of one token have no rate.
    let &(best_fixed, best_fixed_tok_s) = best.filter(|(_, rate)| *rate > 0.0)?;
    let none = rates.iter().find(|(n, rate)| *n == 0 && *rate > 0.0);
    Some(Summary {
        class: auto.class.clone(),
        temperature: auto.temperature,
        none_tok_s: none.map(|(_, rate)| *rate),
        best_fixed,
        best_fixed_tok_s,
        auto_tok_s: auto.tok_s,
        auto_over_best_fixed: auto.tok_s / best_fixed_tok_s,
        auto_over_none: none.map(|(_, rate)| auto.tok_s / rate),
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
        let told = |s: &Summary| (s.best_fixed, s.auto_over_best_fixed, s.auto_over_none);
        let told: Vec<_> = found.iter().map(told).collect();
        assert_eq!(told, [(3, 1.25, Some(2.5)), (3, 0.8, None)]);
    }
}
