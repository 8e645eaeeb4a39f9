//! `paceline convert`: another format, another size, a head taken out or put in.

use crate::args::{Container, ConvertArgs, OutputArgs};
use crate::{model, progress, resolve};
use anyhow::{Context, Result, bail};
use models::{Growth, Quantize};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use text::TextFiles;
use text::gguf::Vocabulary;
use weights::{Checkpoint, Recipe};

/// Runs the command.
pub(crate) fn run(args: &ConvertArgs, output: OutputArgs) -> Result<ExitCode> {
    if args.format == Container::Gguf && !resolve::is_gguf_name(&args.out) {
        bail!(
            "a GGUF file is known by its name: let it end in .gguf, unlike `{}`",
            args.out.display()
        );
    }
    let source = resolve::source(&args.source)?;
    let checkpoint = source.checkpoint()?;
    let files = match &args.tokenizer {
        Some(model) => resolve::source(model)?.side_files()?,
        None => source.side_files()?,
    };
    let architecture = checkpoint.architecture()?;
    let is_drafter = models::DRAFT_HEADS
        .iter()
        .any(|head| head.architectures.contains(&architecture));
    if files.is_empty() && checkpoint.metadata().is_some() && !is_drafter {
        bail!(
            "the tokenizer of a GGUF file cannot be taken out of it: name the model that it belongs to with --tokenizer MODEL"
        );
    }
    let write = |recipe: &Recipe<'_>, to: &Path, files: &[(String, Vec<u8>)]| -> Result<()> {
        let mut bar = progress::ByteBar::new(&format!("writing {}", to.display()), !output.quiet);
        let mut progress = |done, total| bar.set(done, total);
        match args.format {
            Container::Safetensors => recipe.write(to, files, &mut progress)?,
            Container::Gguf => {
                let vocabulary = vocabulary(recipe, files)?;
                recipe.write_gguf(to, &engine::vocabulary_keys(&vocabulary), &mut progress)?;
            }
        }
        bar.clear();
        if !output.quiet {
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
    if let Some(parameters) = args.inflate {
        let mut growth = Growth::to(&checkpoint, parameters)?;
        growth.layers = args.layers.unwrap_or(growth.layers);
        growth.vocab = args.vocab.unwrap_or(growth.vocab);
        let grown =
            |checkpoint: &'_ Checkpoint, to: &Path, files: &[(String, Vec<u8>)]| -> Result<()> {
                write(
                    &quantized(models::inflate(checkpoint, &growth)?, args),
                    to,
                    files,
                )
            };
        grown(&checkpoint, &args.out, &files)?;
        // A drafter fits only a target that was grown with it, and has its tokenizer.
        if let Some(assistant) = source.assistant_beside() {
            let files = match args.format {
                Container::Safetensors => assistant.side_files()?,
                Container::Gguf => files,
            };
            grown(&assistant.checkpoint()?, &beside(&args.out), &files)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let head = args
        .attach_head
        .as_deref()
        .map(resolve::source)
        .transpose()?;
    let head = head.map(|source| source.checkpoint()).transpose()?;
    let mut recipe = quantized(models::convert(&checkpoint)?, args);
    let is_head = |name: &str| name.starts_with("mtp.");
    if args.extract_head {
        recipe.items.retain(|item| is_head(&item.name));
        if recipe.items.is_empty() {
            bail!("`{}` has no MTP head to take out", args.source);
        }
        write(&recipe, &args.out, &[])?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(head) = &head {
        let mut items = quantized(models::convert(head)?, args).items;
        items.retain(|item| is_head(&item.name));
        if items.is_empty() {
            bail!("there is no MTP head to put in");
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
    Ok(ExitCode::SUCCESS)
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
        .context("a GGUF file holds its tokenizer, and the source has none: name the model that it belongs to with --tokenizer MODEL")?;
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
