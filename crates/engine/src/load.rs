//! The load plan: which files, which drafter, how much memory.

use crate::error::EngineError;
use crate::finder::{Finder, Found, fits, ngram};
use crate::hashes::Hashes;
use crate::info::{Model, ModelInfo};
use crate::options::{DEFAULT_CONTEXT, DRAFT_MAX, LoadOptions};
use crate::placement::{self, Budget};
use crate::preflight::{self, Key, Probing, TrialResult};
use crate::source::{Source, quantized};
use backend::{Backend, KvFormats};
use cache::{Memory, MemorySize};
use models::{ModelError, Target};
use speculate::Speculator;
use std::sync::Arc;
use weights::Checkpoint;

/// Loads a model and its drafter.
///
/// # Errors
///
/// [`EngineError`]; a drafter that is asked for by name and cannot be had is one.
pub fn load(
    b: Arc<dyn Backend>,
    source: &Source,
    options: &LoadOptions,
) -> Result<Model, EngineError> {
    let bad = |message: String| Err(EngineError::BadOption(message));
    if options.draft_max > DRAFT_MAX {
        return bad(format!(
            "--draft-max {} is more than {DRAFT_MAX}",
            options.draft_max
        ));
    }
    if options.sequences == 0 || options.chunk == Some(0) || options.context == Some(0) {
        return bad("--parallel, --chunk and --context must be at least 1".into());
    }
    let checkpoint = source.checkpoint()?;
    let architecture = checkpoint.architecture().map_err(ModelError::from)?;
    if let Some(head) = models::DRAFT_HEADS
        .iter()
        .find(|h| h.architectures.contains(&architecture))
    {
        return bad(format!(
            "this checkpoint is a drafter: name its target with -m, and it with --draft {}:PATH",
            head.name
        ));
    }
    let checkpoint = quantized(checkpoint, options)?;
    // After the check above: a drafter has no tokenizer to complain about.
    let mut text = source.text(&checkpoint)?;
    text.allow_special_tokens = options.allow_special_tokens;
    // Before the weights are there a second time.
    let mut hashes = Hashes::open(options.probing.cache());
    let hashed = matches!(options.probing, Probing::Run { .. });
    let target_sha256 = hashed.then(|| source.hash(&checkpoint, &mut hashes));
    let device = b.capabilities();
    let chunk = options.chunk.unwrap_or(device.prompt_rows);
    let size = |target: &dyn Target| MemorySize {
        sequences: options.sequences,
        context: options
            .context
            .unwrap_or(DEFAULT_CONTEXT)
            .min(target.max_context()),
        step_rows: chunk,
        kv_format: options.kv_format,
    };
    let (target, placed) = placement::load_target(&*b, &checkpoint, options, size)?;
    if text.tokenizer.vocab_size() > target.vocab_size() {
        return bad(format!(
            "the tokenizer has {} tokens, the model {}: they do not belong together",
            text.tokenizer.vocab_size(),
            target.vocab_size()
        ));
    }
    let most = target.max_context();
    if let Some(context) = options.context.filter(|&context| context > most) {
        return bad(format!(
            "--context {context} is more than the {most} tokens that this model knows"
        ));
    }
    let size = size(&*target);
    if size.kv_format.k.is_rotated() {
        return bad(format!(
            "--kv {}: {} keeps values only",
            size.kv_format, size.kv_format.k.name
        ));
    }
    if !device.kv.contains(size.kv_format) {
        return bad(format!(
            "--kv {}: {} keeps {}",
            size.kv_format,
            b.name(),
            kept_formats(&device.kv)
        ));
    }
    fits(&target.plan(), size.kv_format)?;
    let budget = Budget {
        // A device with memory of its own says by itself when it is full.
        limit: options.memory_limit.filter(|_| !device.own_memory),
        weights: if placed.mapped { 0 } else { checkpoint.bytes() },
    };
    budget.check(&[target.plan()], &size)?;
    let mut finder = Finder {
        b: &*b,
        source,
        checkpoint: &checkpoint,
        target: &*target,
        options,
        mapped: placed.mapped,
        shortlist: options.draft_vocab.ids(target.vocab_size(), &text),
        size,
        budget,
        hashes,
        refused: Vec::new(),
        remedy: None,
    };
    let mut found = if options.draft_max == 0 {
        Found::nobody("--draft-max is 0")
    } else {
        finder.find()?
    };
    let Finder { mut hashes, .. } = finder;
    let drafter = found.reason.clone();
    if let Some(n) = found.shortlist {
        let all = target.vocab_size();
        found.reason += &format!(", scoring {n} of {all} tokens");
    }
    let mut preflight = std::mem::take(&mut found.preflight);
    if target.family() == "qwen3_5" {
        preflight.note_norms(checkpoint.norm_facts());
    }
    preflight.target_sha256 = target_sha256;
    let text_hash = if hashed {
        source.text_hash(&mut hashes)
    } else {
        String::new()
    };
    hashes.save();

    let mut unused = checkpoint.unused();
    unused.append(&mut found.unused);
    let mut plans = vec![target.plan()];
    plans.extend(found.plan.take());
    let memory = Memory::new(&*b, target.plan(), size);
    b.finish()?;
    let (family, vocab_size, backend) = (target.family(), target.vocab_size(), b.name());
    let mut speculator =
        Speculator::new(b, target, memory, found.drafter.take()).accepting(options.accept);
    let kv_format = size.kv_format.to_string();
    let name = source.name();
    let key = Key {
        model: &name,
        target: preflight.target_sha256.as_deref().unwrap_or_default(),
        drafter: preflight.drafter_sha256.as_deref(),
        drafter_kind: speculator.drafter(),
        text: &text_hash,
        backend: &backend,
        kv_format: &kv_format,
        chunk,
        draft_max: options.draft_max,
        draft_vocab: found.shortlist,
    };
    preflight.trial = preflight::run(&mut speculator, &text, &options.probing, &key)?;
    if let (Some(result), Some(name)) = (preflight.result(), speculator.drafter()) {
        if let Some(refusal) = result.refusal(name, &drafter) {
            if let Some(asked) = options.draft.asked() {
                return Err(EngineError::NoDrafter {
                    asked,
                    reason: refusal,
                });
            }
            let replacement = (!result.is_inexact() && name != "ngram").then(ngram);
            speculator.replace_drafter(replacement);
            plans.truncate(1);
            (found.shortlist, found.weight_bytes) = (None, 0);
            found.reason = refusal;
        }
        preflight
            .warnings
            .extend(preflight.result().and_then(TrialResult::warning));
    }
    for warning in &preflight.warnings {
        tracing::warn!("{warning}");
    }
    // The program says the same in its own words.
    tracing::trace!(
        drafter = speculator.drafter().unwrap_or("none"),
        reason = found.reason,
        preflight = preflight.summary(),
        "loaded"
    );
    let info = ModelInfo {
        name,
        family,
        backend,
        context: size.context,
        context_max: most,
        vocab_size,
        sequences: size.sequences,
        weight_bytes: checkpoint.bytes(),
        drafter_weight_bytes: found.weight_bytes,
        weights: if placed.mapped { "mapped" } else { "packed" },
        weights_reason: placed.reason,
        step_bytes: step_bytes(&checkpoint),
        memory_bytes: Memory::all_bytes(&plans, &size),
        kv_format: size.kv_format.to_string(),
        drafter: speculator.drafter(),
        drafter_reason: found.reason,
        draft_max: options.draft_max,
        draft_vocab: found.shortlist,
        accept: options.accept.name(),
        preflight,
        unused_tensors: unused,
    };
    Ok(Model {
        speculator,
        text: Arc::new(text),
        info,
        chunk,
        plans,
    })
}

/// What a device keeps, for people.
fn kept_formats(kept: &KvFormats) -> String {
    let list = |formats: &[&quant::Format]| {
        let names: Vec<&str> = formats.iter().map(|f| f.name).collect();
        match names.split_last() {
            Some((last, [])) => (*last).to_owned(),
            Some((last, rest)) => format!("{} or {last}", rest.join(", ")),
            None => "no format".to_owned(),
        }
    };
    if kept.same {
        return format!("keys and values in {}, both alike", list(&kept.keys));
    }
    format!(
        "keys in {}, values in {}",
        list(&kept.keys),
        list(&kept.values)
    )
}

/// Bytes of the weights that a step of one row reads: not the draft head, not
/// what reads images, and a table of embeddings only where it is the head too.
/// Experts count whole, though a row reads few of them.
fn step_bytes(checkpoint: &Checkpoint) -> u64 {
    let head_apart = checkpoint.has("lm_head.weight");
    let is_read = |name: &str| {
        let is_table = name.starts_with("embed_tokens_per_layer.")
            || head_apart && name.starts_with("embed_tokens.");
        !is_table
            && ["layers.", "norm.", "lm_head.", "embed_tokens."]
                .iter()
                .any(|start| name.starts_with(start))
    };
    checkpoint
        .sizes()
        .filter(|(name, _)| is_read(name))
        .map(|(_, bytes)| bytes as u64)
        .sum()
}
