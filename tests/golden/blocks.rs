//! Block drafters against the public implementations of z-lab, DeepSpec and speculators: a seeded
//! head in each layout (`tests/golden/blocks.py`), and what becomes of files that are not as they
//! should be.

use super::{BACKENDS, Golden, size};
use backend::{Backend, Batch, Ops, Reference, Sample, Store};
use cache::Memory;
use models::{BlockHead, BlockKind, Target, load_target};
use serde_json::json;
use suites::blocks::{SeededBlock, uniform};
use suites::{Recorder, golden, repository};
use weights::Checkpoint;
use weights::gguf::Value;

/// Rows of the target before the block, and the pending token.
const ROWS: usize = 12;
const PENDING: u32 = 21;

/// `z` of the block after [`ROWS`] rows of seeded taps, which are remembered `chunk` at a time; each
/// of the block's rows sees `ahead` rows beyond its own, at most.
fn block(
    b: &dyn Backend,
    head: &BlockHead,
    target: &dyn Target,
    chunk: usize,
    ahead: u32,
) -> backend::Tensor {
    let width = target.hidden_size();
    let taps: Vec<_> = (0..head.taps().len())
        .map(|i| b.upload(ROWS, width, &uniform(&format!("tap.{i}"), ROWS * width)))
        .collect();
    let mut memory = Memory::new(b, head.plan(), size());
    let mut sequence = memory.open().unwrap();
    let rows: Vec<usize> = (0..ROWS).collect();
    for rows in rows.chunks(chunk) {
        let mut batch = Batch::default();
        let tokens = vec![0; rows.len()];
        memory
            .push(&mut batch, &mut sequence, &tokens, rows.len())
            .unwrap();
        let features = head.features(b, &taps, rows);
        head.remember(b, &features, &batch, &mut memory);
    }
    let mut tokens = vec![head.mask_token(); head.block_rows()];
    tokens[0] = PENDING;
    let mut batch = Batch::default();
    memory.push(&mut batch, &mut sequence, &tokens, 0).unwrap();
    let end = sequence.len() as u32;
    for row in &mut batch.rows {
        row.sees.end = end.min(row.sees.end + ahead);
    }
    let starts = head.starts(b, batch.n_rows(), &[0]);
    head.forward(b, target, &batch, starts.as_ref(), &mut memory)
}

#[test]
fn block_drafters_agree_with_the_public_implementations() {
    let want = Golden::open(&repository("tests/golden/outputs/blocks.safetensors"));
    for new in BACKENDS {
        for name in [
            "dflash",
            "deepspec",
            "speculators",
            "gemma",
            "gemma_dflash",
            "gated",
            "rnn",
            "dflash2",
        ] {
            let b = Recorder::new(new());
            let seeded = SeededBlock::new(name);
            let target = load_target(&b, &golden(&seeded.target)).unwrap();
            let head = BlockHead::load(&b, &seeded.checkpoint(), &*target, seeded.kind).unwrap();
            let of = |what: &str| format!("{name}.{what}");
            for chunk in [ROWS, 5] {
                let z = block(&b, &head, &*target, chunk, u32::MAX / 2);
                want.assert_close(name, &of("hidden"), &b.download(&z));
                let tokens = &want.integers[&of("tokens")];
                let first = head.first_guess();
                assert_eq!(tokens.len() + first, head.block_rows());
                let guessing: Vec<usize> = (first..head.block_rows()).collect();
                let z = b.gather(&z, &guessing);
                let logits = head.logits(&b, &*target, &z);
                let (mut after, mut confidences, mut previous) = (vec![], vec![], PENDING);
                let mut carried = head.start(&b, 1);
                for (i, &token) in tokens.iter().enumerate() {
                    let (row, z) = (b.gather(&logits, &[i]), b.gather(&z, &[i]));
                    let (scored, next) = head.after(&b, row, &z, &[previous], carried.as_ref());
                    carried = next;
                    if head.has_confidences() {
                        confidences.extend(head.confidences(&b, &z, &[previous]));
                    }
                    let best = b.argmax(&scored.logits)[0];
                    previous = scored.scored.ids(0).map_or(best, |ids| ids[best as usize]);
                    assert_eq!(previous, token, "{name}: guess {i}");
                    after.extend_from_slice(&b.download(&scored.logits));
                }
                want.assert_close(name, &of("after"), &after);
                if head.has_confidences() {
                    want.assert_close(name, &of("confidence"), &confidences);
                }
            }
        }
    }
}

/// Rows of a block of `head`, the tokens that it guesses greedily, and all that it scores them by.
fn guesses(b: &dyn Backend, head: &BlockHead, target: &dyn Target) -> (Vec<u32>, Vec<Vec<f32>>) {
    let z = block(b, head, target, ROWS, u32::MAX / 2);
    let (mut all, mut tokens) = (vec![b.download(&z).into_owned()], vec![PENDING]);
    let guessing: Vec<usize> = (head.first_guess()..head.block_rows()).collect();
    let z = b.gather(&z, &guessing);
    let logits = head.logits(b, target, &z);
    let mut carried = head.start(b, 1);
    for i in 0..guessing.len() {
        let (row, z) = (b.gather(&logits, &[i]), b.gather(&z, &[i]));
        let previous = [*tokens.last().unwrap()];
        if head.has_confidences() {
            all.push(head.confidences(b, &z, &previous));
        }
        let (scored, next) = head.after(b, row, &z, &previous, carried.as_ref());
        carried = next;
        let best = b.argmax(&scored.logits)[0];
        let ids = scored.scored.ids(0);
        tokens.push(ids.map_or(best, |ids| ids[best as usize]));
        all.push(b.download(&scored.logits).into_owned());
    }
    (tokens, all)
}

#[test]
fn a_block_drafter_guesses_the_same_from_a_gguf_file() {
    for new in BACKENDS {
        let b = new();
        for name in ["dflash", "deepspec", "speculators", "dflash2"] {
            let seeded = SeededBlock::new(name);
            let target = load_target(&*b, &golden(&seeded.target)).unwrap();
            let of = |checkpoint: &Checkpoint| {
                let head = BlockHead::load(&*b, checkpoint, &*target, seeded.kind).unwrap();
                guesses(&*b, &head, &*target)
            };
            let (want, got) = (of(&seeded.checkpoint()), of(&seeded.gguf_checkpoint()));
            assert_eq!(want, got, "{name}");
        }
    }
}

/// The library speculators has what the head adds to a drafter at the top of its configuration, and
/// the sizes of its layers in a part of it.
#[test]
fn a_dflash_2_head_guesses_the_same_in_the_layout_of_speculators() {
    let b = Reference;
    let seeded = SeededBlock::new("dflash2");
    let target = load_target(&b, &golden(&seeded.target)).unwrap();
    let of = |seeded: &SeededBlock| {
        let head = BlockHead::load(&b, &seeded.checkpoint(), &*target, seeded.kind);
        head.map(|head| guesses(&b, &head, &*target))
    };
    let mut other = seeded.clone();
    let mut layers = seeded.config.clone();
    let own = layers.as_object_mut().unwrap();
    own.retain(|key, _| {
        !["architectures", "block_size", "is_causal", "dflash_config"].contains(&&**key)
    });
    let vocab = layers["vocab_size"].clone();
    other.config = json!({
        "architectures": ["DFlash2DraftModel"],
        "speculators_model_type": "dflash2",
        "speculators_version": "0.9.0",
        "block_size": seeded.config["block_size"],
        "draft_vocab_size": vocab,
        // Layers entered, where z-lab counts layers left.
        "aux_hidden_state_layer_ids": [1, 3],
        "target_hidden_size": null,
        "sample_from_anchor": false,
        "sliding_window_non_causal": true,
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "dflash2",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"architectures": ["Gemma4ForCausalLM"], "name_or_path": null},
        },
    });
    let whole = other.config.as_object_mut().unwrap();
    for (key, value) in seeded.config["dflash_config"].as_object().unwrap() {
        if key != "target_layer_ids" {
            whole.insert(key.clone(), value.clone());
        }
    }
    assert_eq!(of(&other).unwrap(), of(&seeded).unwrap());
    other.config["speculators_config"]["verifier"]["architectures"] = json!(["Qwen3ForCausalLM"]);
    let error = of(&other).err().unwrap().to_string();
    assert!(
        error.contains("its target's architecture is Qwen3ForCausalLM"),
        "{error}"
    );
}

#[test]
fn a_gguf_file_of_a_block_drafter_says_what_is_wrong_with_it() {
    let b = Reference;
    type Metadata = Vec<(String, Value<'static>)>;
    let error = |name: &str, of: &dyn Fn(&mut Metadata)| {
        let seeded = SeededBlock::new(name);
        let mut metadata = seeded.metadata();
        of(&mut metadata);
        let files = vec![("head.gguf".to_owned(), seeded.gguf(&metadata).into())];
        let target = load_target(&b, &golden(&seeded.target)).unwrap();
        let head = match Checkpoint::from_bytes("", files) {
            Ok(checkpoint) => BlockHead::load(&b, &checkpoint, &*target, seeded.kind),
            Err(error) => return error.to_string(),
        };
        head.err().expect("an error").to_string()
    };
    let drop = |key: &'static str| move |m: &mut Vec<_>| m.retain(|(k, _): &(String, _)| k != key);
    for (got, want) in [
        (
            error("dflash", &drop("dflash.block_size")),
            "`dflash.block_size` is missing",
        ),
        (
            error("dflash", &drop("dflash.target_layers")),
            "`dflash.target_layers` is missing",
        ),
        (
            error("dflash", &drop("tokenizer.ggml.mask_token_id")),
            "a block drafter without a mask_token_id",
        ),
        (
            error("dflash2", &drop("dflash.conv_group_size")),
            "conv_group_size is missing, which a DFlash 2 head needs",
        ),
        (
            error("dflash", &|m| {
                m.push(("dflash.rope.scaling.type".into(), "yarn".into()));
            }),
            "a draft head with rope_type `yarn` is not supported",
        ),
    ] {
        assert!(got.contains(want), "`{got}` is not `{want}`");
    }
}

/// The golden is one that a causal block does not meet, and one that sees a row too few.
#[test]
fn rows_of_a_block_see_each_other() {
    let want = Golden::open(&repository("tests/golden/outputs/blocks.safetensors"));
    let b = Reference;
    let seeded = SeededBlock::new("deepspec");
    let target = load_target(&b, &golden(&seeded.target)).unwrap();
    let head = BlockHead::load(&b, &seeded.checkpoint(), &*target, seeded.kind).unwrap();
    for (ahead, agrees) in [(0, false), (5, false), (6, true)] {
        let z = block(&b, &head, &*target, ROWS, ahead);
        let z = b.download(&z);
        let far = z
            .iter()
            .zip(&want.values["deepspec.hidden"])
            .any(|(a, b)| (a - b).abs() > 1e-3);
        assert_eq!(!far, agrees, "{ahead} rows ahead");
    }
}

#[test]
fn a_block_drafter_that_cannot_draft_is_refused_by_what_is_wrong() {
    type Change = fn(&mut SeededBlock);
    let wrong: &[(&str, Change, &str)] = &[
        (
            "dflash",
            |s| {
                drop(
                    s.tensors
                        .insert("layers.0.attention_conv.base_kernel".into(), vec![2, 2, 32]),
                )
            },
            "the draft head has `layers.0.attention_conv.base_kernel`, which is not supported",
        ),
        (
            "deepspec",
            |s| {
                drop(
                    s.tensors
                        .insert("layers.1.self_attn.q_proj.bias".into(), vec![64]),
                )
            },
            "`layers.1.self_attn.q_proj.bias`",
        ),
        (
            "deepspec",
            |s| s.config["markov_rank"] = json!(0),
            "confidence_head_with_markov needs a markov_rank",
        ),
        (
            "speculators",
            |s| s.config["markov_rank"] = json!(0),
            "the draft head has `markov_head.markov_w1.weight`, which is not supported",
        ),
        (
            "deepspec",
            |s| s.config["markov_head_type"] = json!("lstm"),
            "a DSpark head with markov_head_type `lstm` (known are vanilla, gated and rnn) is not supported",
        ),
        (
            "gated",
            |s| s.config["markov_head_type"] = json!("vanilla"),
            "the draft head has `markov_head.gate_proj.bias`, which is not supported",
        ),
        (
            "deepspec",
            |s| s.config["markov_head_type"] = json!("rnn"),
            "`markov_head.joint_proj.weight` is missing",
        ),
        (
            "gemma",
            |s| s.config["layer_types"] = json!(["sliding_attention", "full_attention"]),
            "a block drafter of Gemma 4's layers with sliding windows is not supported",
        ),
        (
            "gemma",
            |s| s.config["hidden_size_per_layer_input"] = json!(8),
            "a block drafter of Gemma 4's layers with per-layer embeddings is not supported",
        ),
        (
            "gemma",
            |s| s.config["attention_k_eq_v"] = json!(false),
            "`layers.0.self_attn.k_proj.weight`",
        ),
        (
            "gemma_dflash",
            |s| s.kind = BlockKind::Dflash,
            "architecture `Gemma4DSparkModel` is no dflash head; known are",
        ),
        (
            "deepspec",
            |s| s.kind = BlockKind::Dflash,
            "architecture `Qwen3DSparkModel` is no dflash head; known are DFlashDraftModel, DFlashSpeculator, DFlash2DraftModel",
        ),
        (
            "deepspec",
            |s| s.target = "gemma4-dense".into(),
            "its vocabulary size is 97, the target's is 101",
        ),
        (
            "speculators",
            |s| {
                s.config["speculators_config"]["verifier"]["architectures"] =
                    json!(["Qwen3ForCausalLM"])
            },
            "its target's architecture is Qwen3ForCausalLM, the target's is gemma4",
        ),
        (
            "dflash2",
            |s| {
                drop(
                    s.config["dflash_config"]
                        .as_object_mut()
                        .unwrap()
                        .remove("selector_rank"),
                )
            },
            "selector_rank is missing, which a DFlash 2 head needs",
        ),
        (
            "dflash2",
            |s| s.config["dflash_config"]["conv_kernel_size"] = json!(3),
            "a DFlash 2 head with conv_kernel_size 3 (known is 2) is not supported",
        ),
        (
            "dflash2",
            |s| s.config["dflash_config"]["conv_group_size"] = json!(5),
            "hidden_size 32 is not whole groups of conv_group_size 5",
        ),
        (
            "dflash2",
            |s| drop(s.tensors.remove("layers.0.mlp_conv.base_kernel")),
            "`layers.0.mlp_conv.base_kernel` is missing",
        ),
        (
            "dflash",
            |s| s.config["dflash_config"]["target_layer_ids"] = json!([0, 2, 5]),
            "its number of layers, at least, is 6, the target's is 5",
        ),
        (
            "dflash",
            |s| s.config["dflash_config"] = json!({"target_layer_ids": [0, 2, 4]}),
            "a block drafter without a mask_token_id",
        ),
        (
            "dflash",
            |s| drop(s.tensors.remove("hidden_norm.weight")),
            "`hidden_norm.weight` is missing",
        ),
    ];
    let b = Reference;
    for (name, change, message) in wrong {
        let mut seeded = SeededBlock::new(name);
        change(&mut seeded);
        let target = load_target(&b, &golden(&seeded.target)).unwrap();
        let error = match BlockHead::load(&b, &seeded.checkpoint(), &*target, seeded.kind) {
            Ok(_) => panic!("{message}: loaded"),
            Err(error) => error.to_string(),
        };
        assert!(error.contains(message), "`{error}` is not `{message}`");
    }
}
