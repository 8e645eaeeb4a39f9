//! `paceline convert`: another format, another size, a head taken out or put in.

use crate::args::{Container, ConvertArgs, OutputArgs};
use crate::{model, progress, resolve};
use ::convert::gguf::stored_as;
use ::convert::{Data, Growth, Quantize, Recipe};
use anyhow::{Context, Result, bail};
use engine::Source;
use quant::{Format, WeightLayout};
use serde_json::json;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use text::TextFiles;
use text::gguf::Vocabulary;
use weights::Checkpoint;

/// Runs the command.
pub(crate) fn run(args: &ConvertArgs, output: OutputArgs) -> Result<ExitCode> {
    let is_gguf_name = resolve::is_gguf_name(&args.out);
    let container = match (args.format, is_gguf_name) {
        (Some(Container::Gguf), false) => bail!(
            "the name of a GGUF file must end in .gguf, unlike `{}`",
            args.out.display()
        ),
        (Some(Container::Safetensors), true) => bail!(
            "--format safetensors writes a folder, whose name must not end in .gguf, unlike `{}`",
            args.out.display()
        ),
        (_, true) => Container::Gguf,
        (_, false) => Container::Safetensors,
    };
    for (option, format) in formats(args) {
        if let Some(why) = refusal(format, container) {
            bail!("{option}: {why}");
        }
    }
    let source = resolve::source(&args.source)?;
    let checkpoint = source.checkpoint()?;
    let files = match &args.tokenizer {
        Some(model) => resolve::source(model)?.side_files()?,
        None => source.side_files()?,
    };
    let architecture = checkpoint.architecture()?;
    let is_drafter = draft_kind(architecture).is_some();
    if files.is_empty() && checkpoint.metadata().is_some() && !is_drafter {
        bail!(
            "the tokenizer cannot be taken out of a GGUF file: name a model with the same tokenizer with --tokenizer MODEL"
        );
    }
    let write = |recipe: &Recipe<'_>, to: &Path, files: &[(String, Vec<u8>)]| -> Result<()> {
        let mut bar = progress::ByteBar::new(&format!("writing {}", to.display()), !output.quiet);
        let mut progress = |done, total| bar.set(done, total);
        match container {
            Container::Safetensors => recipe.write(to, files, &mut progress)?,
            Container::Gguf => {
                let vocabulary = vocabulary(recipe, files)?;
                recipe.write_gguf(to, &::convert::vocabulary_keys(&vocabulary), &mut progress)?;
            }
        }
        bar.clear();
        if !output.quiet {
            if container == Container::Gguf {
                for (from, to) in replaced(recipe) {
                    say!("GGUF has no {from}: these matrices are stored as {to}");
                }
            }
            let weights: usize = recipe.items.iter().map(|i| i.rows() * i.cols()).sum();
            say!(
                "{}: {} weights in {} tensors",
                to.display(),
                model::amount(weights as u64),
                recipe.items.len()
            );
        }
        Ok(())
    };
    // A drafter fits only the target that it was made for, so the two stay together.
    let assistant = match args.extract_head || args.no_drafter || is_drafter {
        true => None,
        false => source.assistant_beside(),
    };
    let assistant_out = beside(&args.out);
    if assistant.is_some() && assistant_out.symlink_metadata().is_ok() {
        bail!(
            "the assistant of `{}` goes to `{}`, which exists already: remove it, choose another OUT, or add --no-drafter",
            args.source,
            assistant_out.display()
        );
    }
    let assistant_files = |assistant: &Source| match container {
        Container::Safetensors => assistant.side_files(),
        // A GGUF file has a vocabulary, and a drafter's is its target's.
        Container::Gguf => Ok(files.clone()),
    };
    if let Some(parameters) = args.inflate {
        let mut growth = Growth::to(&checkpoint, parameters)?;
        growth.layers = args.layers.unwrap_or(growth.layers);
        growth.vocab = args.vocab.unwrap_or(growth.vocab);
        let grown =
            |checkpoint: &'_ Checkpoint, to: &Path, files: &[(String, Vec<u8>)]| -> Result<()> {
                write(
                    &quantized(::convert::inflate(checkpoint, &growth)?, args),
                    to,
                    files,
                )
            };
        grown(&checkpoint, &args.out, &files)?;
        if let Some(assistant) = &assistant {
            let files = assistant_files(assistant)?;
            grown(&assistant.checkpoint()?, &assistant_out, &files)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let head = args
        .attach_head
        .as_deref()
        .map(resolve::source)
        .transpose()?;
    let head = head.map(|source| source.checkpoint()).transpose()?;
    let mut recipe = quantized(::convert::convert(&checkpoint)?, args);
    let is_head = |name: &str| name.starts_with("mtp.");
    if args.extract_head {
        recipe.items.retain(|item| is_head(&item.name));
        if recipe.items.is_empty() {
            bail!("`{}` has no MTP head to extract", args.source);
        }
        write(&recipe, &args.out, &[])?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(head) = &head {
        let mut items = quantized(::convert::convert(head)?, args).items;
        items.retain(|item| is_head(&item.name));
        if items.is_empty() {
            bail!(
                "`{}` has no MTP head to attach",
                args.attach_head.as_deref().unwrap_or_default()
            );
        }
        recipe.items.retain(|item| !is_head(&item.name));
        recipe.items.extend(items);
        let nested = recipe
            .config
            .get("text_config")
            .is_some_and(|c| c.is_object());
        let config = if nested {
            &mut recipe.config["text_config"]
        } else {
            &mut recipe.config
        };
        config["mtp_num_hidden_layers"] = json!(1);
    }
    write(&recipe, &args.out, &files)?;
    if let Some(assistant) = &assistant {
        let checkpoint = assistant.checkpoint()?;
        let recipe = quantized(::convert::convert(&checkpoint)?, args);
        write(&recipe, &assistant_out, &assistant_files(assistant)?)?;
    }
    if !output.quiet && !is_drafter {
        let has_head = recipe.items.iter().any(|item| is_head(&item.name));
        say!("{}", drafting(args, &source, has_head, assistant.is_some()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Who drafts for the model that was written, in one line.
fn drafting(args: &ConvertArgs, source: &Source, has_head: bool, has_assistant: bool) -> String {
    if has_head {
        return "drafter: the MTP head, written with the model".into();
    }
    if has_assistant {
        let place = beside(&args.out);
        return format!(
            "drafter: the assistant in {}, found as long as it lies beside the model",
            place.display()
        );
    }
    let elsewhere = resolve::drafters_of(source)
        .into_iter()
        .find_map(|drafter| {
            let checkpoint = drafter.checkpoint().ok()?;
            let kind = draft_kind(checkpoint.architecture().ok()?)?;
            Some(format!("{kind}:{}", drafter.name()))
        });
    let beside = source.assistant_beside();
    let left_behind = beside.map(|assistant| format!("assistant:{}", assistant.name()));
    match left_behind.or(elsewhere) {
        Some(drafter) => format!("drafter: none is written; use --draft {drafter}"),
        None => "drafter: none is written, and none is known for this model; only repetition in the text will be drafted".into(),
    }
}

/// The kind of draft head that `architecture` is, as `--draft` names it.
fn draft_kind(architecture: &str) -> Option<&'static str> {
    let mut kinds = models::DRAFT_HEADS.iter();
    let kind = kinds.find(|head| head.architectures.contains(&architecture))?;
    Some(kind.name)
}

/// The formats that `args` asks for, each with its option.
fn formats(args: &ConvertArgs) -> impl Iterator<Item = (String, &'static Format)> {
    let quant = args.quant.map(|f| (format!("--quant {}", f.name), f));
    let own = args.tensor.iter().filter_map(|(pattern, format)| {
        let format = (*format)?;
        Some((format!("--tensor {pattern}={}", format.name), format))
    });
    quant.into_iter().chain(own)
}

/// Why matrices cannot be stored as `format` in `container`, and what to use instead.
fn refusal(format: &'static Format, container: Container) -> Option<String> {
    let instead = match container {
        Container::Safetensors => "q8, q6, q4 or bf16",
        Container::Gguf => "q8_0, q6_k, q4_k or bf16",
    };
    if !format.can_encode() {
        return Some(format!(
            "paceline reads this format but does not write it; use {instead}"
        ));
    }
    let holds = match container {
        Container::Safetensors => {
            matches!(
                format.layout,
                WeightLayout::Plain(_) | WeightLayout::Affine { .. }
            )
        }
        Container::Gguf => stored_as(format).is_some(),
    };
    match container {
        _ if holds => None,
        Container::Safetensors => Some(format!(
            "only GGUF files hold this format; use {instead}, or let OUT end in .gguf"
        )),
        Container::Gguf => Some(format!("GGUF files do not hold this format; use {instead}")),
    }
}

/// Formats of `recipe` that GGUF does not have, each with the one that takes its place.
fn replaced(recipe: &Recipe<'_>) -> BTreeMap<&'static str, &'static str> {
    let matrices = recipe.items.iter().filter(|item| item.shape.len() > 1);
    let formats = matrices.filter_map(|item| match &item.data {
        Data::Matrix { format, .. } => Some(*format),
        Data::Raw { .. } => None,
    });
    let pairs = formats.filter_map(|from| Some((from.name, stored_as(from)?.name)));
    pairs.filter(|(from, to)| from != to).collect()
}

/// Where the assistant of the target `out` is looked for: `OUT-assistant`, with
/// the file's ending behind it.
fn beside(out: &Path) -> PathBuf {
    let ending = out
        .extension()
        .filter(|e| *e == "gguf")
        .map_or("", |_| ".gguf");
    let whole = if ending.is_empty() {
        out.to_owned()
    } else {
        out.with_extension("")
    };
    let mut name = whole.into_os_string();
    name.push("-assistant");
    name.push(ending);
    name.into()
}

/// The vocabulary of a GGUF file, a token for every row of the embeddings.
fn vocabulary(recipe: &Recipe<'_>, files: &[(String, Vec<u8>)]) -> Result<Vocabulary<'static>> {
    let file = |name: &str| {
        files
            .iter()
            .find(|(n, _)| n == name)
            .map(|(_, bytes)| &bytes[..])
    };
    let text = ["text_config", "transformer_layer_config"]
        .iter()
        .find_map(|part| recipe.config.get(part).filter(|c| c.is_object()));
    let size = text.unwrap_or(&recipe.config)["vocab_size"]
        .as_u64()
        .unwrap_or(0);
    let tokenizer = file("tokenizer.json")
        .context("a GGUF file needs a tokenizer, and the source has none: name a model with the same tokenizer with --tokenizer MODEL")?;
    let files = TextFiles {
        tokenizer,
        tokenizer_config: file("tokenizer_config.json"),
        chat_template: file("chat_template.jinja"),
        generation_config: file("generation_config.json"),
        config: None,
    };
    Ok(Vocabulary::from_files(&files, size as usize)?)
}

/// `recipe` in the formats asked for.
fn quantized<'a>(recipe: Recipe<'a>, args: &ConvertArgs) -> Recipe<'a> {
    match args.quant {
        Some(format) => Quantize {
            format,
            own: args.tensor.clone(),
        }
        .apply(recipe),
        None => recipe,
    }
}
