//! Texts are the same however many threads compute and choose.

mod bundled;

use engine::{DraftChoice, DraftLength, Engine, EngineOptions, Request, Sampling};

/// Ways to choose that the host's threads may share, and others that they may not.
fn samplings() -> Vec<Sampling> {
    let sampled = Sampling {
        temperature: 0.9,
        seed: 3,
        ..Sampling::default()
    };
    vec![
        sampled.clone(),
        Sampling {
            top_p: 0.8,
            logit_bias: vec![(300, 2.0)],
            ..sampled.clone()
        },
        Sampling {
            typical_p: 0.7,
            ..sampled.clone()
        },
        Sampling {
            repetition_penalty: 1.2,
            ..sampled
        },
    ]
}

fn texts(name: &str, threads: usize) -> Vec<(String, Vec<u32>)> {
    let model = bundled::load(name, DraftChoice::Auto, threads);
    let engine = Engine::start(model, EngineOptions::default());
    let prompt = engine.text().encode_prompt("Once upon a time").unwrap();
    let write = |sampling: Sampling| {
        let request = Request {
            sampling,
            max_tokens: Some(60),
            draft: Some(DraftLength::Fixed(3)),
            ..Request::new(prompt.clone())
        };
        let (text, tokens, outcome) = engine.complete(request).unwrap();
        assert!(outcome.speculation.accepted > 0, "{name}: {text}");
        (text, tokens)
    };
    // Beside one another, and alone.
    let together = std::thread::scope(|scope| {
        let each = samplings().into_iter();
        let running: Vec<_> = each.map(|s| scope.spawn(|| write(s))).collect();
        let each = running.into_iter();
        each.map(|text| text.join().unwrap()).collect::<Vec<_>>()
    });
    let alone: Vec<_> = samplings().into_iter().map(write).collect();
    assert_eq!(together, alone, "{name}, {threads} threads");
    alone
}

#[test]
fn texts_do_not_depend_on_the_number_of_threads() {
    for name in ["tiny-gemma4", "tiny-qwen3.5"] {
        assert_eq!(texts(name, 1), texts(name, 4), "{name}");
    }
}
