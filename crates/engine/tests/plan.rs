//! Plans of memory: how long the context is, how many pages requests share, and what is refused.

use cpu::{Cpu, CpuOptions};
use engine::{
    DraftChoice, EngineError, KvMemory, LoadOptions, ModelInfo, Placement, Probing, Source,
    TooLarge, load,
};
use std::path::Path;
use std::sync::Arc;

/// The bundled models' own limit.
const MOST: usize = 8192;
/// The shortest context that is planned where nobody asks for one.
const LEAST_CONTEXT: usize = 512;

fn options(sequences: usize, memory_limit: u64) -> LoadOptions {
    LoadOptions {
        probing: Probing::Skip {
            reason: "a test".into(),
        },
        weights: Placement::Packed,
        sequences,
        memory_limit: Some(memory_limit),
        kv_memory: KvMemory::Spare { models: 1 },
        ..LoadOptions::default()
    }
}

fn plan(model: &str, options: &LoadOptions) -> Result<ModelInfo, EngineError> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let cpu = Cpu::new(CpuOptions::default()).unwrap();
    let source = Source::Folder(folder.join(model));
    load(Arc::new(cpu), &source, options).map(|model| model.info)
}

fn refused(model: &str, options: &LoadOptions) -> TooLarge {
    match plan(model, options) {
        Err(EngineError::TooLarge(too_large)) => too_large,
        Err(other) => panic!("{other}"),
        Ok(info) => panic!("{model} takes {} bytes", info.memory_bytes),
    }
}

#[test]
fn enough_memory_holds_what_all_requests_can_need() {
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        let info = plan(model, &options(4, 1 << 40)).unwrap();
        assert_eq!(info.context, MOST, "{model}");
        assert_eq!(info.context_fits, MOST, "{model}");
        assert_eq!(info.kv_tokens, 4 * MOST, "{model}");
    }
}

#[test]
fn many_requests_share_half_of_what_weights_leave() {
    // Recurrent states take more than keys and values of short texts.
    for (model, n) in [("tiny-gemma4", 60), ("tiny-qwen3.5", 20)] {
        let limit = 400 << 20;
        let info = |models| {
            let options = LoadOptions {
                draft: DraftChoice::None,
                kv_memory: KvMemory::Spare { models },
                ..options(n, limit)
            };
            plan(model, &options).unwrap()
        };
        let (one, two) = (info(1), info(2));
        let spare = limit - one.weight_bytes;
        for (info, share) in [(&one, spare / 2), (&two, spare / 4)] {
            let (taken, tokens) = (info.memory_bytes as u64, info.kv_tokens);
            assert_eq!(info.context, MOST, "{model}");
            assert!(taken <= share, "{model}: {taken} of {share}");
            assert!(taken > share / 10 * 9, "{model}: {taken} of {share}");
            assert!((MOST..n * MOST).contains(&tokens), "{model}: {tokens}");
        }
    }
}

#[test]
fn the_context_is_what_fits_where_nobody_asks_for_one() {
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        for draft in [DraftChoice::None, DraftChoice::Auto] {
            let with = |extra| LoadOptions {
                draft: draft.clone(),
                ..options(1, extra)
            };
            // What refuses a limit of nothing says what the weights are, and the least that is remembered.
            let least = refused(model, &with(0));
            assert!(least.shared, "{model}");
            assert_eq!(least.context, LEAST_CONTEXT, "{model}");
            let floor = least.weights + least.remembered;
            let tight = plan(model, &with(floor + (2 << 20))).unwrap();
            assert!(
                (LEAST_CONTEXT..MOST).contains(&tight.context),
                "{model}: {}",
                tight.context
            );
            assert!(tight.context <= tight.context_fits, "{model}");
            let taken = least.weights + tight.memory_bytes as u64;
            assert!(taken <= floor + (2 << 20), "{model}");
            // Who asks for more gets all there is, or is refused.
            let longer = LoadOptions {
                context: Some(tight.context_fits),
                ..with(floor + (2 << 20))
            };
            assert!(plan(model, &longer).is_ok(), "{model}");
            let longest = LoadOptions {
                context: Some(MOST),
                ..with(floor + (2 << 20))
            };
            assert_eq!(refused(model, &longest).context, MOST, "{model}");
        }
    }
}

#[test]
fn no_number_of_requests_is_more_than_refused() {
    for model in ["tiny-gemma4", "tiny-qwen3.5"] {
        for sequences in [1 << 24, 1 << 40, usize::MAX] {
            let too_large = refused(model, &options(sequences, 8 << 30));
            assert_eq!(too_large.sequences, sequences, "{model}");
        }
    }
}

#[test]
fn bytes_bound_the_context_too() {
    let within = |bytes| {
        let options = LoadOptions {
            draft: DraftChoice::None,
            kv_memory: KvMemory::Bytes(bytes),
            ..options(2, 1 << 40)
        };
        plan("tiny-gemma4", &options)
    };
    let short = within(4 << 20).unwrap();
    assert!((LEAST_CONTEXT..MOST).contains(&short.context));
    assert!(short.memory_bytes <= 4 << 20);
    assert_eq!(within(1 << 30).unwrap().context, MOST);
    assert!(matches!(
        within(1000),
        Err(EngineError::KvTooSmall { asked: 1000, .. })
    ));
}
