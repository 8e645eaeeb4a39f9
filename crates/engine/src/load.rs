//! From files to a model that is ready to write.
//!
//! ```text
//! open      checkpoint, tokenizer and template
//! place     weights on the device, packed or in their files; the KV cache's size
//! pair      a drafter that was made for the target
//! remember  the memory of both
//! try       the promises, on these weights and this device
//! ```

mod trials;

use crate::calibration;
use crate::disk::{Identity, Parts};
use crate::drafters;
use crate::drafters::ASSISTANT;
use crate::drafters::pairing::{Found, Pairing, fits};
use crate::error::EngineError;
use crate::footprint::Planned;
use crate::hashes::Hashes;
use crate::info::{KvLayersInfo, Model, ModelInfo};
use crate::memory_plan::{Room, longest_context, planned_size, smaller};
use crate::multimodal::{Hearing, OwnFile, Senses, Sight, TowerFile, Vision};
use crate::options::LoadOptions;
use crate::placement::{self, Budget, Placed};
use crate::preflight::{self, Key};
use crate::source::{Source, quantized};
use crate::stored::Stored;
use crate::warm_up;
use backend::Backend;
use cache::{KvPlan, MANY_QUERY_HEADS, Memory, MemorySize};
use models::{ModelError, Target};
use speculate::Speculator;
use std::num::NonZeroUsize;
use std::sync::Arc;
use text::Text;
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
    options.check()?;
    options.progress.report("files", 0.0);
    let mut opened = open(source, options)?;
    let tower = std::mem::take(&mut opened.tower);
    let mut sight = Sight::plan(source, &opened.checkpoint, tower, options);
    let mut target = std::thread::scope(|scope| {
        let (checkpoint, hashes) = (&opened.checkpoint, &mut opened.hashes);
        // Hashing takes one core, and both read the same files.
        let hash = (options.hashes()).then(|| scope.spawn(|| source.hash(checkpoint, hashes)));
        let target = place(&*b, checkpoint, &opened.text, &mut sight, options);
        opened.sha256 = hash.map(|hash| hash.join().expect("hashing does not panic"));
        target
    })?;
    options.progress.report("drafter", 0.85);
    let (found, hashes) = loop {
        match pair(&*b, source, &mut opened, &target, options) {
            // The plan knows of no head before one is found.
            Err(EngineError::TooLarge(too_large)) => {
                let smaller = smaller(&target.size, options);
                target.size = smaller.ok_or(EngineError::TooLarge(too_large))?;
            }
            paired => break paired?,
        }
    };
    let mut facts = Facts::new(&*b, source, &opened.checkpoint, &target, &found, options);
    facts.vision = sight.vision(&b, &opened.text);
    facts.hearing = sight.hearing(&b, &opened.text);
    require_asked_tower(&facts, options)?;
    options.progress.report("cache", 0.9);
    let remembered = remember(b, target, found, options)?;
    options.progress.report("self-test", 0.93);
    attempt(remembered, opened.text, facts, hashes, options)
}

/// An error if a tower's file was asked for and the model neither sees nor hears with it.
fn require_asked_tower(facts: &Facts, options: &LoadOptions) -> Result<(), EngineError> {
    match (&options.tower, &facts.vision, &facts.hearing) {
        (TowerFile::At(file), Err(reason), Err(_)) if options.pictures => {
            Err(EngineError::NoTower {
                file: file.clone(),
                reason: reason.clone(),
            })
        }
        _ => Ok(()),
    }
}

/// The files of a model, opened.
struct Opened {
    checkpoint: Checkpoint,
    text: Text,
    hashes: Hashes,
    /// The content hash of the checkpoint, where the model is to be tried.
    sha256: Option<String>,
    /// The tower's own file.
    tower: OwnFile,
}

/// Opens a target's checkpoint, its tokenizer and its template.
fn open(source: &Source, options: &LoadOptions) -> Result<Opened, EngineError> {
    let checkpoint = source.checkpoint()?;
    let architecture = checkpoint.architecture().map_err(ModelError::from)?;
    if let Some(drafter) = drafters::head_of(architecture) {
        return Err(EngineError::IsDrafter { drafter });
    }
    let checkpoint = quantized(checkpoint, options.quantize.as_ref())?;
    // After the check above: a drafter has no tokenizer to complain about.
    let mut text = source.text(&checkpoint, options.chat_template.as_deref())?;
    text.allow_special_tokens = options.allow_special_tokens;
    let mut hashes = Hashes::open(options.probing.cache());
    let (checkpoint, tower) = with_tower(source, checkpoint, &mut hashes, options)?;
    Ok(Opened {
        checkpoint,
        text,
        hashes,
        sha256: None,
        tower,
    })
}

/// `checkpoint` with the tower's own file, if it has one and pictures are wanted, and that file.
fn with_tower(
    source: &Source,
    mut checkpoint: Checkpoint,
    hashes: &mut Hashes,
    options: &LoadOptions,
) -> Result<(Checkpoint, OwnFile), EngineError> {
    if !options.pictures {
        return Ok((checkpoint, OwnFile::default()));
    }
    let path = source.attach_tower(&mut checkpoint, &options.tower)?;
    let tower = match path {
        Some(path) => OwnFile::new(&path, options.identify.then_some(hashes))?,
        None => OwnFile::default(),
    };
    Ok((checkpoint, tower))
}

/// A target on its device.
struct PlacedTarget {
    target: Box<dyn Target>,
    weights: Placed,
    /// Prompt rows that a request may run in one step, but for a picture that has more.
    chunk: usize,
    size: MemorySize,
    budget: Budget,
}

/// Brings a target's weights to the device, and checks that its KV cache can be had.
fn place(
    b: &dyn Backend,
    checkpoint: &Checkpoint,
    text: &Text,
    sight: &mut Sight,
    options: &LoadOptions,
) -> Result<PlacedTarget, EngineError> {
    let device = b.capabilities();
    let chunk = |target: &dyn Target| {
        let rows = || device.prompt_rows.of(target.row_weights(checkpoint));
        options.chunk.unwrap_or_else(rows)
    };
    let most_rows = sight.most_rows();
    let outlook = drafters::outlook(b, options);
    let beside = outlook.as_ref().map(|outlook| &outlook.planned);
    let size = |target: &dyn Target, chunk: usize, room| {
        // A step takes all rows of a picture that see each other.
        let span_rows = match target.media_rows().see_their_span {
            true => most_rows,
            false => 0,
        };
        planned_size(target, beside, chunk.max(span_rows), room, options)
    };
    let least = |target: &dyn Target| size(target, chunk(target), Room::Least);
    let (target, weights) =
        placement::load_target(b, checkpoint, options, sight, outlook.as_ref(), least)?;
    if text.tokenizer.vocab_size() > target.vocab_size() {
        return Err(EngineError::OtherTokenizer {
            tokenizer: text.tokenizer.vocab_size(),
            model: target.vocab_size(),
        });
    }
    let bytes = checkpoint.bytes();
    let (packed, mapped) = match (weights.mapped, device.own_memory) {
        (true, _) => (0, bytes),
        (false, false) => (bytes, 0),
        // A device's weights are allocated already: what is free is free beside them.
        (false, true) => (0, 0),
    };
    let budget = Budget {
        limit: match device.own_memory {
            true => b.free_memory(),
            false => options.memory_limit,
        },
        weights: packed,
        tower: sight.step_bytes(),
        own_memory: device.own_memory,
    };
    let of_drafter = match (&outlook, weights.mapped) {
        (Some(outlook), false) => outlook.weights,
        _ => 0,
    };
    let room = Room::within(b, &budget, (mapped, of_drafter), options);
    check_formats(b, &*target, options)?;
    let fitting = |chunk: usize| {
        let size = size(&*target, chunk, room)?;
        budget.check(&[Planned::target(&*target)], &size)?;
        Ok(size)
    };
    let least = options
        .chunk
        .map_or(device.prompt_rows.least, |_| usize::MAX);
    let (chunk, size) = most_that_fit(chunk(&*target), least, fitting)?;
    Ok(PlacedTarget {
        target,
        weights,
        chunk,
        size,
        budget,
    })
}

/// `rows` of a step, or half as many, a quarter and so on, but not less than `least`, for which there is memory, and what
/// they take: sliding windows hold the rows of a step.
fn most_that_fit<T>(
    mut rows: usize,
    least: usize,
    fitting: impl Fn(usize) -> Result<T, EngineError>,
) -> Result<(usize, T), EngineError> {
    loop {
        match fitting(rows) {
            Err(EngineError::TooLarge(_)) if rows / 2 >= least => rows /= 2,
            size => return Ok((rows, size?)),
        }
    }
}

/// Checks that the target knows so many tokens, and that device and heads have the formats.
pub(crate) fn check_formats(
    b: &dyn Backend,
    target: &dyn Target,
    options: &LoadOptions,
) -> Result<(), EngineError> {
    let most = target.max_context();
    if let Some(asked) = options.context.filter(|&context| context > most) {
        return Err(EngineError::ContextTooLong { asked, most });
    }
    fits(b, &target.plan(), &options.kv_format)
}

/// Finds a drafter for the target. What the hashes' file does not know yet is written there.
fn pair(
    b: &dyn Backend,
    source: &Source,
    opened: &mut Opened,
    placed: &PlacedTarget,
    options: &LoadOptions,
) -> Result<(Found, TrialHashes), EngineError> {
    let target = &*placed.target;
    let chosen = options.draft_vocab.ids(target.vocab_size(), &opened.text)?;
    let draft_vocab = chosen.as_ref().and_then(|chosen| chosen.hash.clone());
    let mut found = drafters::find(&mut Pairing {
        b,
        source,
        checkpoint: &opened.checkpoint,
        target,
        tokenizer: &opened.text.tokenizer,
        options,
        mapped: placed.weights.mapped,
        shortlist: chosen.map(|chosen| chosen.ids),
        size: placed.size,
        budget: placed.budget,
        beside: Vec::new(),
        hashes: &mut opened.hashes,
    })?;
    let preflight = &mut found.preflight;
    preflight.note_norms(target.norm_facts(&opened.checkpoint));
    preflight.target_sha256 = opened.sha256.take();
    preflight
        .warnings
        .extend(coarse_keys(target, &options.kv_format));
    let hashes = TrialHashes {
        target: preflight.target_sha256.clone().unwrap_or_default(),
        drafter: preflight.drafter_sha256.clone(),
        draft_vocab,
        text: match preflight.target_sha256 {
            Some(_) => source.text_hash(&mut opened.hashes),
            None => String::new(),
        },
    };
    opened.hashes.save();
    Ok((found, hashes))
}

/// A warning if keys that many query heads share are coarse.
fn coarse_keys(target: &dyn Target, kv: &KvPlan) -> Option<String> {
    let (layers, query_heads) = target.plan().coarse_shared_keys(kv)?;
    let layers = match layers {
        1 => "1 layer".to_owned(),
        n => format!("{n} layers"),
    };
    Some(format!(
        "keys of {layers} are coarser than q8_0 though {query_heads} query heads share each, and so an error in it; \
         gqa={MANY_QUERY_HEADS} in the format of the KV cache keeps them in q8_0"
    ))
}

/// Hashes of what the result of a trial depends on.
struct TrialHashes {
    target: String,
    drafter: Option<String>,
    /// The hash of the tokens that a file has chosen for the draft head.
    draft_vocab: Option<String>,
    text: String,
}

/// What is known of a model before it is tried.
struct Facts {
    name: String,
    weight_bytes: u64,
    step_bytes: u64,
    weights: (&'static str, String),
    unused_tensors: Vec<String>,
    stored: Stored,
    device: String,
    own_memory: bool,
    chunk: usize,
    /// What the model looks at pictures and clips with, or why it takes none.
    vision: Result<Arc<Vision>, String>,
    /// What the model hears with, or why it takes no sounds.
    hearing: Result<Arc<Hearing>, String>,
}

impl Facts {
    /// Everything that has to be read while the checkpoint is open.
    fn new(
        b: &dyn Backend,
        source: &Source,
        checkpoint: &Checkpoint,
        placed: &PlacedTarget,
        found: &Found,
        options: &LoadOptions,
    ) -> Facts {
        let mut unused_tensors = checkpoint.unused();
        unused_tensors.extend(found.unused.iter().cloned());
        let place = if placed.weights.mapped {
            "mapped"
        } else {
            "packed"
        };
        Facts {
            name: source.name(),
            weight_bytes: checkpoint.bytes(),
            step_bytes: placed.target.step_bytes(checkpoint),
            weights: (place, (options.words.weights)(&placed.weights.reason)),
            unused_tensors,
            stored: Stored::new(checkpoint),
            device: b.name(),
            own_memory: b.capabilities().own_memory,
            chunk: placed.chunk,
            vision: Err(String::new()),
            hearing: Err(String::new()),
        }
    }
}

/// Target, drafter and what both remember.
struct Remembered {
    speculator: Speculator,
    size: MemorySize,
    budget: Budget,
    /// The target's plan, and those of the drafters that have memories.
    plans: Vec<Planned>,
    /// What is known of the drafters, which have moved into the speculator.
    found: Found,
}

/// Allocates the memory of the target.
fn remember(
    b: Arc<dyn Backend>,
    placed: PlacedTarget,
    mut found: Found,
    options: &LoadOptions,
) -> Result<Remembered, EngineError> {
    let PlacedTarget {
        target,
        size,
        budget,
        ..
    } = placed;
    let mut plans = vec![Planned::target(&*target)];
    plans.append(&mut found.plans);
    let memory = Memory::new(&*b, target.plan(), size);
    b.finish()?;
    let drafters = std::mem::take(&mut found.drafters);
    let speculator = Speculator::new(b, target, memory, drafters).accepting(options.accept);
    Ok(Remembered {
        speculator,
        size,
        budget,
        plans,
        found,
    })
}

/// Tries the model, and leaves the drafter out if it is dead and was not asked for by name.
fn attempt(
    mut remembered: Remembered,
    text: Text,
    facts: Facts,
    hashes: TrialHashes,
    options: &LoadOptions,
) -> Result<Model, EngineError> {
    let size = remembered.size;
    let mut preflight = std::mem::take(&mut remembered.found.preflight);
    let kv_format = size.kv_format.to_string();
    let key = Key {
        model: &facts.name,
        target: &hashes.target,
        drafter: hashes.drafter.as_deref(),
        drafter_kind: remembered.speculator.drafter(),
        text: &hashes.text,
        backend: &facts.device,
        kv_format: &kv_format,
        chunk: size.step_rows,
        draft_max: options.draft_max,
        draft_vocab: remembered.found.shortlist,
        draft_vocab_sha256: hashes.draft_vocab.as_deref(),
        draft_window: options.draft_window.map(NonZeroUsize::get),
    };
    let speculator = &mut remembered.speculator;
    preflight.trial = preflight::run(speculator, &text, &options.probing, 0, &key)?;
    remembered.settle(&mut preflight, options)?;
    remembered.try_others(&mut preflight, &text, options, key)?;
    // Added after the trials, which ask what each head alone guesses right.
    if options.draft.adds_ngrams() && remembered.speculator.drafter().is_some() {
        remembered.speculator.add_ngrams();
    }
    let speculator = &mut remembered.speculator;
    let drafter_hash = remembered.found.hashes(hashes.drafter.as_deref());
    let key = Key {
        drafter: drafter_hash.as_deref(),
        ..key
    };
    let calibration = calibration::run(speculator, &text, options, (&key, facts.weights.0))?;
    warm_up::run(speculator, &text, options, options.draft_max)?;
    let Remembered {
        speculator,
        budget,
        plans,
        found,
        ..
    } = remembered;
    let drafter_reason = (options.words.drafter)(&found.reason);
    if options.draft_window.is_some() && !speculator.drafters().contains(&ASSISTANT) {
        let drafter = speculator.drafter().unwrap_or("none");
        preflight.warnings.push(format!(
            "the draft window has no effect on the drafter {drafter}: only an assistant reads the \
             target's rows"
        ));
    }
    for warning in &preflight.warnings {
        tracing::warn!("{warning}");
    }
    // The program says the same in its own words.
    tracing::trace!(
        drafter = speculator.drafter().unwrap_or("none"),
        reason = drafter_reason,
        preflight = preflight.summary(),
        "loaded"
    );
    let identity = options.identify.then(|| {
        Identity::of(&Parts {
            target: &hashes.target,
            quantize: format!("{:?}", options.quantize),
            drafter: heads_of(&speculator),
            drafter_hash: drafter_hash.as_deref(),
            kv_format: &kv_format,
            device: speculator.backend().numerics(),
        })
    });
    let target = speculator.target();
    let info = ModelInfo {
        name: facts.name,
        family: target.family(),
        backend: facts.device,
        context: size.context,
        context_max: target.max_context(),
        vocab_size: target.vocab_size(),
        hidden_size: target.hidden_size(),
        layers: target.n_layers(),
        parameters: facts.stored.parameters,
        weight_format: facts.stored.format,
        container: facts.stored.container,
        own_memory: facts.own_memory,
        sequences: size.sequences,
        weight_bytes: facts.weight_bytes,
        drafter_weight_bytes: found.weight_bytes,
        weights: facts.weights.0,
        weights_reason: facts.weights.1,
        step_bytes: facts.step_bytes,
        memory_bytes: Planned::all_bytes(&plans, &size),
        kv_token_bytes: Planned::token_bytes(&plans, &size),
        kv_tokens: size.running_tokens(),
        context_fits: longest_context(&budget, &plans, &size, target.max_context()),
        kv_format,
        kv_layers: KvLayersInfo::of(&plans, &size),
        vision: facts.vision.as_ref().ok().map(|vision| vision.info()),
        vision_reason: facts.vision.as_ref().err().cloned().unwrap_or_default(),
        hearing: facts.hearing.as_ref().ok().map(|hearing| hearing.info()),
        hearing_reason: facts.hearing.as_ref().err().cloned().unwrap_or_default(),
        drafter: speculator.drafter(),
        drafters: speculator.drafters(),
        drafter_reason,
        draft_max: options.draft_max,
        draft_vocab: found.shortlist,
        accept: options.accept.name(),
        preflight,
        calibration,
        unused_tensors: facts.unused_tensors,
    };
    Ok(Model {
        speculator,
        text: Arc::new(text),
        senses: Senses {
            vision: facts.vision.ok(),
            hearing: facts.hearing.ok(),
        },
        info,
        chunk: facts.chunk,
        plans,
        identity,
        budget,
    })
}

/// The names of the heads of `speculator`, or of whoever else drafts, as users type them.
fn heads_of(speculator: &Speculator) -> Option<String> {
    let n = speculator.n_heads().max(1);
    let names: Vec<&str> = speculator.drafters().into_iter().take(n).collect();
    (!names.is_empty()).then(|| names.join("+"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::TooLarge;

    #[test]
    fn a_step_has_fewer_rows_where_memory_is_short() {
        let with_room_for = |most: usize| {
            move |rows: usize| match rows <= most {
                true => Ok(rows),
                false => Err(EngineError::TooLarge(TooLarge {
                    weights: 0,
                    remembered: rows as u64,
                    limit: most as u64,
                    sequences: 1,
                    context: 1,
                    shared: false,
                    own_memory: true,
                })),
            }
        };
        let found = |room, least| most_that_fit(8192, least, with_room_for(room)).ok();
        assert_eq!(found(10_000, 1024), Some((8192, 8192)));
        assert_eq!(found(3000, 1024), Some((2048, 2048)));
        assert_eq!(found(1000, 1024), None, "not even the least");
        assert_eq!(found(3000, usize::MAX), None, "so many were asked for");
        let other = most_that_fit(8192, 1024, |_| -> Result<(), _> {
            Err(EngineError::ContextTooLong { asked: 2, most: 1 })
        });
        assert!(other.is_err(), "that is no matter of memory");
    }
}
