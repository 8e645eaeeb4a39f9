//! What rounds cost is measured when a model is loaded, and remembered for the next start.

use engine::{
    Calibration, CostOf, DraftChoice, Engine, EngineOptions, LoadOptions, Model, Probing, Request,
    Source,
};
use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{env, fs, process};

fn load(name: &str, draft: DraftChoice, probing: Probing) -> Model {
    let b = std::sync::Arc::new(cpu::Cpu::new(cpu::CpuOptions::default()).unwrap());
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let options = LoadOptions {
        draft,
        probing,
        context: Some(256),
        ..LoadOptions::default()
    };
    engine::load(b, &Source::Folder(folder.join(name)), &options).unwrap()
}

fn keeping(cache: &Path) -> Probing {
    Probing::Run {
        cache: Some(cache.to_owned()),
    }
}

/// A folder that goes with the test.
struct Cache(PathBuf);

impl Cache {
    fn new(name: &str) -> Self {
        let folder = env::temp_dir().join(format!("paceline-times-{name}-{}", process::id()));
        let _ = fs::remove_dir_all(&folder);
        Cache(folder)
    }

    fn files(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.0.join("round-times")).unwrap();
        all.map(|entry| entry.unwrap().path()).collect()
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Counts whose times are known.
fn counts(calibration: &Calibration, of: CostOf) -> Vec<usize> {
    let times = calibration.times.iter();
    times.filter(|t| t.of == of).map(|t| t.count).collect()
}

fn reply(model: Model) -> String {
    let prompt = model.text.encode_prompt("Once upon a time").unwrap();
    let engine = Engine::start(model, EngineOptions::default());
    let mut request = Request::new(prompt);
    request.max_tokens = Some(40);
    engine.complete(request).unwrap().0
}

#[test]
fn rounds_are_timed_once_and_the_times_are_remembered() {
    let cache = Cache::new("once");
    let first = load("tiny-qwen3.5", DraftChoice::Auto, keeping(&cache.0));
    let measured = first.info.calibration.clone().unwrap();
    assert!(!measured.cached && measured.took_ms > 0.0);
    // Drafts of 0, 1, 3, 7 and 15 tokens, each after a pending token.
    for rows in [1, 2, 4, 8, 16] {
        assert!(
            counts(&measured, CostOf::Verify).contains(&rows),
            "{measured:?}"
        );
    }
    for drafted in [1, 3, 7, 15] {
        assert!(
            counts(&measured, CostOf::Draft).contains(&drafted),
            "{measured:?}"
        );
    }
    assert!(first.speculator.costs().plain_step(50, 1).is_some());
    assert_eq!(
        first.speculator.memory().pages_used().0,
        0,
        "every page is back"
    );

    let second = load("tiny-qwen3.5", DraftChoice::Auto, keeping(&cache.0));
    let remembered = second.info.calibration.clone().unwrap();
    assert!(remembered.cached);
    assert_eq!(remembered.times, measured.times);
    assert_eq!(second.speculator.costs().points(), measured.times);
    for streams in [1, 4] {
        let plain = |model: &Model| model.speculator.costs().plain_step(50, streams).unwrap();
        let (now, before) = (plain(&second), plain(&first));
        // Times are remembered in whole nanoseconds.
        assert!(
            (now - before).abs() < 1e-5,
            "{now} of {before}, {streams} texts"
        );
    }
    assert_eq!(reply(first), reply(second));

    // Another drafter takes another time.
    let ngram = DraftChoice::Named("ngram", None);
    let other = load("tiny-qwen3.5", ngram, keeping(&cache.0));
    assert!(!other.info.calibration.unwrap().cached);
    assert_eq!(cache.files().len(), 2);
}

#[test]
fn a_mixture_is_timed_with_the_experts_that_its_steps_touch() {
    let cache = Cache::new("mixture");
    let load = || load("tiny-qwen3.5-moe", DraftChoice::Auto, keeping(&cache.0));
    let first = load();
    let measured = first.info.calibration.clone().unwrap();
    let steps = measured.times.iter().filter(|t| t.of == CostOf::Verify);
    // Four mixtures of eight experts, of which a row chooses two.
    for step in steps {
        let most = 32.min(8 * step.count);
        assert!(step.experts >= 8 && step.experts <= most, "{step:?}");
        assert!(step.count > 1 || step.experts == 8, "{step:?}");
    }
    let others = measured.times.iter().filter(|t| t.of != CostOf::Verify);
    assert!(
        others
            .into_iter()
            .all(|t| t.experts == usize::from(t.of == CostOf::Expert))
    );
    assert_eq!(
        first.speculator.memory().pages_used().0,
        0,
        "every page is back"
    );
    let second = load();
    assert!(second.info.calibration.as_ref().unwrap().cached);
    let (now, before) = (second.speculator.costs(), first.speculator.costs());
    assert_eq!(now.points(), measured.times);
    assert!((now.expert_ms() - before.expert_ms()).abs() < 1e-5);
    assert_eq!(reply(first), reply(second));
}

#[test]
fn a_target_without_a_head_is_timed_with_drafts_of_any_tokens() {
    let model = load(
        "tiny-gemma4",
        DraftChoice::Named("ngram", None),
        Probing::default(),
    );
    let times = model.info.calibration.clone().unwrap();
    for rows in [1, 2, 4, 8, 16] {
        assert!(counts(&times, CostOf::Verify).contains(&rows), "{times:?}");
    }
    assert_eq!(
        model.speculator.memory().pages_used().0,
        0,
        "every page is back"
    );
}

#[test]
fn remembered_times_that_cannot_be_are_measured_again() {
    let cache = Cache::new("damaged");
    let load = || load("tiny-gemma4", DraftChoice::Auto, keeping(&cache.0));
    assert!(!load().info.calibration.unwrap().cached);
    let file = cache.files().remove(0);
    let sound = fs::read_to_string(&file).unwrap();
    for damaged in [
        "[]".to_owned(),
        sound[..sound.len() / 2].to_owned(),
        sound.replacen("\"ns\":", "\"ns\":-", 1),
    ] {
        fs::write(&file, damaged).unwrap();
        assert!(!load().info.calibration.unwrap().cached);
        assert!(load().info.calibration.unwrap().cached);
    }
}

#[test]
fn nothing_is_timed_where_nobody_drafts_or_nothing_is_tried() {
    let none = load("tiny-gemma4", DraftChoice::None, Probing::default());
    assert!(none.info.calibration.is_none());
    let reason = "a test".to_owned();
    let skipped = load("tiny-gemma4", DraftChoice::Auto, Probing::Skip { reason });
    assert!(skipped.info.calibration.is_none());
    assert!(skipped.speculator.costs().points().is_empty());
}

#[test]
fn timing_ends_soon_and_leaves_the_context_be() {
    let mut model = load("tiny-gemma4", DraftChoice::Auto, Probing::default());
    let prompt = vec![5; 20];
    let one = model.speculator.calibrate(&prompt, 16, Duration::ZERO);
    assert_eq!(one.unwrap(), 0);
    let all = model.speculator.calibrate(&prompt, 16, Duration::MAX);
    assert_eq!(all.unwrap(), 16);
    let short = model.speculator.calibrate(&prompt, 3, Duration::MAX);
    assert_eq!(short.unwrap(), 10);
    // A text that fills the context ends.
    let context = model.info.context;
    let full = vec![5; context - 2];
    let few = model
        .speculator
        .calibrate(&full, 16, Duration::MAX)
        .unwrap();
    assert!(few <= 3, "{few}");
    assert_eq!(
        model.speculator.memory().pages_used().0,
        0,
        "every page is back"
    );
}
