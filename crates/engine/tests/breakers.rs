//! The breakers of DRY as tokens of a real vocabulary.

use engine::{Engine, EngineOptions, LoadOptions, Source, sequence_breakers};
use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

fn engine(model: &str) -> Engine {
    let backend = cpu::Cpu::new(cpu::CpuOptions::default()).unwrap();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../models")
        .join(model);
    let options = LoadOptions {
        context: Some(256),
        ..LoadOptions::default()
    };
    let model = engine::load(Arc::new(backend), &Source::Folder(folder), &options).unwrap();
    Engine::start(model, EngineOptions::default())
}

#[test]
fn a_breaker_is_every_token_that_has_it_and_every_way_to_begin_it() {
    for model in ["tiny-qwen3.5", "tiny-gemma4"] {
        let engine = engine(model);
        let tokenizer = &engine.text().tokenizer;
        let strings = ["\n", "the king", "é"];
        let breakers = sequence_breakers(&engine, &strings).unwrap();
        let found: HashSet<Vec<u32>> = breakers.sequences().collect();
        let (mut n_whole, mut n_begun) = (0, 0);
        for token in 0..tokenizer.vocab_size() as u32 {
            let bytes = tokenizer.token_bytes(token);
            let spelled = String::from_utf8_lossy(bytes);
            let is_breaker = strings.iter().any(|string| spelled.contains(string));
            assert_eq!(
                found.contains(&vec![token]),
                is_breaker,
                "{model}: {spelled:?}"
            );
            n_whole += usize::from(is_breaker);
            let king = strings[1];
            for from in 1..king.len() {
                if spelled.ends_with(&king[..from]) && !is_breaker {
                    let rest = tokenizer.encode(&king[from..], false).unwrap();
                    assert!(
                        found.contains(&[vec![token], rest].concat()),
                        "{model}: {spelled:?}"
                    );
                    n_begun += 1;
                }
            }
        }
        assert!(n_whole > 0 && n_begun > 10, "{model}: {n_whole}, {n_begun}");
        for sequence in &found {
            let bytes: Vec<u8> = sequence
                .iter()
                .flat_map(|&t| tokenizer.token_bytes(t))
                .copied()
                .collect();
            let spelled = String::from_utf8_lossy(&bytes);
            assert!(
                strings.iter().any(|s| spelled.contains(s)),
                "{model}: {spelled:?}"
            );
        }
        assert!(
            sequence_breakers(&engine, &[""])
                .unwrap()
                .sequences()
                .next()
                .is_none()
        );
    }
}
