//! Loads the model that `-m` and other options ask for, and encodes conversations for it.

use crate::args::{Activations, Device, DraftArgs, KvShare, LoadArgs, ServeArgs, Weights};
use crate::resolve::{self, Resolved};
use crate::{gpu, machine, places, progress, tuning, words};
use anyhow::{Result, anyhow, bail};
use backend::Backend;
use cpu::{Cpu, CpuOptions};
use engine::{
    DraftChoice, Engine, EngineError, KvLayersInfo, KvMemory, LoadOptions, LoadProgress, Model,
    ModelInfo, Placement, Probing, Source, Text,
};
use serde_json::{Map, Value};
use server::Loading;
use std::fmt;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The device that `args` ask for, for models of at most `model_bytes` of weights.
pub(crate) fn backend(args: &LoadArgs, model_bytes: u64) -> Result<Arc<dyn Backend>> {
    match args.device {
        Device::Cpu => cpu(args, model_bytes),
        Device::Cuda(ordinal) => Ok(gpu::open(ordinal)?),
        Device::Auto => match gpu::open(0) {
            Ok(gpu) => Ok(gpu),
            Err(reason) => {
                if gpu::count() > 0 {
                    say!("paceline: the GPU is not used: {reason}");
                }
                cpu(args, model_bytes)
            }
        },
    }
}

fn cpu(args: &LoadArgs, model_bytes: u64) -> Result<Arc<dyn Backend>> {
    let options = CpuOptions {
        threads: args.threads.map_or(0, NonZeroUsize::get),
        isa: args.isa,
        activations: match args.activations {
            Activations::Int8 => cpu::Activations::Int8,
            Activations::F32 => cpu::Activations::F32,
        },
        pin: args.pin_threads,
        ..CpuOptions::default()
    };
    let options = tuning::tuned(options, model_bytes)?;
    Ok(Arc::new(Cpu::new(options)?))
}

/// Loads a model for `sequences` requests at once.
pub(crate) fn load(
    name: &str,
    args: &LoadArgs,
    draft: &DraftArgs,
    sequences: usize,
) -> Result<Model> {
    let resolved = resolve::model(name)?;
    let options = options(args, draft, sequences, &resolved)?;
    load_with(name, args, &resolved, &options)
}

/// Loads the model called `name` from where it was found, with the engine's `options`.
pub(crate) fn load_with(
    name: &str,
    args: &LoadArgs,
    resolved: &Resolved,
    options: &LoadOptions,
) -> Result<Model> {
    let backend = backend(args, bytes_of(&resolved.source))?;
    progress::patiently(&format!("loading {name}"), || {
        engine::load(backend, &resolved.source, options)
    })
    .map_err(|e| words::load_error(e).context(format!("cannot load `{name}`")))
}

/// Bytes of a model's weights in its files; 0 of one that is part of the program.
pub(crate) fn bytes_of(source: &Source) -> u64 {
    let Source::Folder(path) = source else {
        return 0;
    };
    let size = |path: PathBuf| path.metadata().map_or(0, |file| file.len());
    if path.is_file() {
        return size(path.clone());
    }
    let names = hub::files_of(path);
    let names = names
        .iter()
        .filter(|n| Path::new(n).extension().is_some_and(|e| e == "safetensors"));
    names.map(|name| size(path.join(name))).sum()
}

/// The drafter that an option asks for, with its place found.
pub(crate) fn drafter(choice: &DraftChoice) -> Result<DraftChoice> {
    Ok(match choice {
        DraftChoice::Named(name, Some(Source::Folder(path))) => {
            DraftChoice::Named(name, Some(resolve::drafter(path)?))
        }
        DraftChoice::WithNgrams(name, Some(Source::Folder(path))) => {
            DraftChoice::WithNgrams(name, Some(resolve::drafter(path)?))
        }
        DraftChoice::Several { heads, ngrams } => {
            let found = |(name, source): &(&'static str, Option<Source>)| {
                Ok(match source {
                    Some(Source::Folder(path)) => (*name, Some(resolve::drafter(path)?)),
                    other => (*name, other.clone()),
                })
            };
            DraftChoice::Several {
                heads: heads.iter().map(found).collect::<Result<_>>()?,
                ngrams: *ngrams,
            }
        }
        other => other.clone(),
    })
}

/// A model that needs more memory than there is; the message says of what.
#[derive(Debug)]
pub(crate) struct Oversized(String);

impl fmt::Display for Oversized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Oversized {}

/// Loads the model that `-m` calls `what` on `backend`, as `args` say, and reports how far it is.
///
/// # Errors
///
/// [`Oversized`] if other models would have to make room.
pub(crate) fn load_on(
    backend: Arc<dyn Backend>,
    what: &str,
    args: &ServeArgs,
    loading: &Loading,
) -> Result<Model> {
    let resolved = resolve::model(what)?;
    let mut options = options(&args.load, &args.draft, args.parallel, &resolved)?;
    let room = loading.room();
    options.memory_limit = options.memory_limit.into_iter().chain(room).min();
    if let (Placement::Auto(free), Some(room)) = (&mut options.weights, room) {
        *free = room.min(*free);
    }
    let followed = loading.clone();
    options.progress = LoadProgress(Some(Arc::new(move |stage, fraction| {
        followed.report(stage, fraction);
    })));
    let loaded = progress::patiently(&format!("loading {what}"), || {
        engine::load(backend, &resolved.source, &options)
    });
    loaded.map_err(|error| {
        let is_too_large = matches!(error, EngineError::TooLarge(_));
        let error = words::load_error(error).context(format!("cannot load `{what}`"));
        match is_too_large {
            true => anyhow!(Oversized(crate::one_line(&error))),
            false => error,
        }
    })
}

/// The engine's options for `args`.
pub(crate) fn options(
    args: &LoadArgs,
    draft: &DraftArgs,
    sequences: usize,
    resolved: &Resolved,
) -> Result<LoadOptions> {
    let memory = args.memory.or(machine::ram().map(|ram| ram.available));
    Ok(LoadOptions {
        draft: drafter(&draft.drafter.draft)?,
        drafters: resolved.drafters.clone(),
        advice: resolved.advice.clone(),
        words: words::WORDS,
        probing: if args.no_probe {
            Probing::Skip {
                reason: "--no-probe".into(),
            }
        } else {
            Probing::Run {
                cache: places::cache(),
            }
        },
        machine: machine::processor(),
        identify: args.identify,
        draft_max: draft.draft_max,
        draft_vocab: draft.drafter.draft_vocab.clone(),
        draft_window: draft.drafter.draft_window,
        accept: draft.drafter.accept,
        context: args.context,
        sequences,
        chunk: args.chunk,
        kv_format: args.kv,
        quantize: args.quant.map(convert::Quantize::new),
        weights: match (args.weights, memory) {
            (Weights::Mapped, _) => Placement::Mapped,
            (Weights::Auto, Some(bytes)) => Placement::Auto(bytes),
            (Weights::Packed, _) | (Weights::Auto, None) => Placement::Packed,
        },
        memory_limit: memory,
        kv_memory: match args.kv_memory {
            None => KvMemory::Whole,
            Some(KvShare::Bytes(bytes)) => KvMemory::Bytes(bytes),
            Some(KvShare::Auto) => KvMemory::Spare {
                models: args.shared_by.map_or(1, NonZeroUsize::get),
            },
        },
        prefix_cache_memory: args.prefix_cache_memory.unwrap_or(0),
        pictures: !args.no_pictures,
        tower: args.tower(),
        allow_special_tokens: args.allow_special_tokens,
        chat_template: args.chat_template.clone(),
        progress: LoadProgress::default(),
    })
}

/// The model of an engine that has done its work.
///
/// # Errors
///
/// If the engine has failed.
pub(crate) fn given_back(engine: Engine) -> Result<Model> {
    let model = engine.into_model();
    model.ok_or_else(|| anyhow!("the engine has failed; what it said is above"))
}

/// A loaded model in four lines: weights, memory, drafter and self-test.
pub(crate) fn describe(info: &ModelInfo) -> String {
    let mapped = match info.weights {
        "mapped" => format!(", mapped: {}", info.weights_reason),
        _ => String::new(),
    };
    let of_drafter = match info.drafter_weight_bytes {
        0 => String::new(),
        n => format!(", {} of weights", bytes(n)),
    };
    let of_limit = match info.context_max {
        most if most > info.context => format!(" of {most}"),
        _ => String::new(),
    };
    let together = match (info.sequences, info.kv_tokens) {
        (1, _) => String::new(),
        (n, tokens) => format!(", {tokens} tokens for {n} requests together"),
    };
    format!(
        "{}: {} on {}, {} of weights{mapped}\n{} tokens of context{of_limit}, KV cache of {} as {}{}, {} a token{together}\n{}: {}{of_drafter}\nself-test: {}",
        info.name,
        info.family,
        info.backend,
        bytes(info.weight_bytes),
        info.context,
        bytes(info.memory_bytes as u64),
        info.kv_format,
        kv_layers(&info.kv_layers).map_or_else(String::new, |layers| format!(" ({layers})")),
        bytes(info.kv_token_bytes as u64),
        drafters(info),
        info.drafter_reason,
        info.preflight.summary(),
    )
}

/// Which layers have which formats, where they are not alike: `4 layers q8_0, 12 turbo4,turbo3`.
pub(crate) fn kv_layers(layers: &[KvLayersInfo]) -> Option<String> {
    let mut counts: Vec<(&str, usize)> = Vec::new();
    for KvLayersInfo { format, layers, .. } in layers {
        match counts.iter_mut().find(|(alike, _)| alike == format) {
            Some((_, n)) => *n += layers,
            None => counts.push((format, *layers)),
        }
    }
    if counts.len() < 2 {
        return None;
    }
    let parts = counts.iter().enumerate().map(|(i, (format, n))| {
        let noun = match (i, n) {
            (0, 1) => " layer",
            (0, _) => " layers",
            _ => "",
        };
        format!("{n}{noun} {format}")
    });
    Some(parts.collect::<Vec<_>>().join(", "))
}

/// Who drafts, in words.
pub(crate) fn drafters(info: &ModelInfo) -> String {
    match &info.drafters[..] {
        [] => "no drafter".to_owned(),
        names => format!("drafter {}", names.join(" and ")),
    }
}

/// Refuses a model that only continues text.
pub(crate) fn check_chats(text: &Text) -> Result<()> {
    if text.template.is_none() {
        bail!(
            "the model has no chat template: it continues text with `run --raw`, and cannot chat"
        );
    }
    Ok(())
}

/// Encodes a conversation up to the beginning of the model's answer. `arguments` go to the chat
/// template.
pub(crate) fn encode_chat(
    text: &Text,
    messages: Vec<Value>,
    arguments: Option<&Map<String, Value>>,
) -> Result<Vec<u32>> {
    check_chats(text)?;
    let none = Map::new();
    let arguments = arguments.unwrap_or(&none);
    Ok(text.encode_chat(&Value::Array(messages), None, true, arguments)?)
}

/// Encodes a conversation that has ended.
pub(crate) fn encode_conversation(text: &Text, messages: Vec<Value>) -> Result<Vec<u32>> {
    Ok(text.encode_chat(&Value::Array(messages), None, false, &Map::new())?)
}

/// A number of bytes for people, in powers of 1000.
pub(crate) fn bytes(n: u64) -> String {
    scaled(n as f64, &["B", "KB", "MB", "GB", "TB"])
}

/// A number for people, in powers of 1000.
pub(crate) fn amount(n: u64) -> String {
    scaled(n as f64, &["", "K", "M", "B", "T"])
        .trim_end()
        .to_owned()
}

/// `x` in the unit that leaves at most three digits before the point.
fn scaled(mut x: f64, units: &[&str]) -> String {
    let mut unit = 0;
    // 999.95 would be written as 1000.0.
    while x >= 999.95 && unit + 1 < units.len() {
        x /= 1000.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{x} {}", units[0])
    } else {
        format!("{x:.1} {}", units[unit])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_short() {
        assert_eq!(
            [0, 999, 1000, 999_949, 999_950, 15_234_567].map(bytes),
            ["0 B", "999 B", "1.0 KB", "999.9 KB", "1.0 MB", "15.2 MB"]
        );
        assert_eq!(
            [7, 14_100_000, 4_000_000_000].map(amount),
            ["7", "14.1 M", "4.0 B"]
        );
    }
}
