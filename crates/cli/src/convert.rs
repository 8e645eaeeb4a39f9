//! `paceline convert`: another format, another size, a head taken out or put in.

use crate::args::{Container as Kind, ConvertArgs, OutputArgs};
use crate::{model, progress, resolve};
use ::convert::{Container, ConvertError, Growth, Pins, Quantize, Recipe, convert, inflate};
use anyhow::{Result, anyhow, bail};
use engine::Source;
use quant::Format;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use weights::Checkpoint;

/// Names in a message of matrices that keep their format.
const MISFITS_SHOWN: usize = 4;

/// Runs the command.
pub(crate) fn run(args: &ConvertArgs, output: OutputArgs) -> Result<ExitCode> {
    let container = container(args)?;
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
    let is_drafter = draft_kind(checkpoint.architecture()?).is_some();
    if files.is_empty() && checkpoint.metadata().is_some() && !is_drafter {
        bail!(
            "the tokenizer cannot be taken out of a GGUF file: name a model with the same tokenizer with --tokenizer MODEL"
        );
    }
    let job = Job {
        args,
        container,
        quantize: args.quant.map(|format| Quantize {
            format,
            own: args.tensor.clone(),
            pins: args.pin.unwrap_or_else(|| Pins::of(format)),
        }),
        quiet: output.quiet,
    };
    // A drafter fits only the target that it was made for, so the two stay together.
    let assistant = match args.extract_head || args.no_drafter || is_drafter {
        true => None,
        false => job.assistant(&source, &files)?,
    };
    if let Some(parameters) = args.inflate {
        let mut growth = Growth::to(&checkpoint, parameters)?;
        growth.layers = args.layers.unwrap_or(growth.layers);
        growth.vocab = args.vocab.unwrap_or(growth.vocab);
        job.write(inflate(&checkpoint, &growth)?, &args.out, &files)?;
        if let Some((assistant, files)) = &assistant {
            let recipe = inflate(assistant, &growth)?;
            job.write(recipe, &beside(&args.out), files)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let head = args.attach_head.as_deref().map(resolve::source);
    let head = head
        .transpose()?
        .map(|head| head.checkpoint())
        .transpose()?;
    let mut recipe = convert(&checkpoint)?;
    if args.extract_head {
        recipe.keep_head();
        if recipe.items.is_empty() {
            bail!("`{}` has no MTP head to extract", args.source);
        }
        job.write(recipe, &args.out, &[])?;
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(head) = &head {
        let head = convert(head)?;
        if !head.has_head() {
            bail!(
                "`{}` has no MTP head to attach",
                args.attach_head.as_deref().unwrap_or_default()
            );
        }
        recipe.attach_head(head);
    }
    let has_head = recipe.has_head();
    job.write(recipe, &args.out, &files)?;
    if let Some((assistant, files)) = &assistant {
        job.write(convert(assistant)?, &beside(&args.out), files)?;
    }
    if !output.quiet && !is_drafter {
        say!("{}", drafting(args, &source, has_head, assistant.is_some()));
    }
    Ok(ExitCode::SUCCESS)
}

/// Files beside a checkpoint's weights: name and contents.
type SideFiles = Vec<(String, Vec<u8>)>;

/// What all checkpoints that one command writes have in common.
struct Job<'a> {
    args: &'a ConvertArgs,
    container: Container,
    quantize: Option<Quantize>,
    quiet: bool,
}

impl Job<'_> {
    /// The assistant beside `source` and the files that go with it, if there is one.
    fn assistant(
        &self,
        source: &Source,
        files: &[(String, Vec<u8>)],
    ) -> Result<Option<(Checkpoint, SideFiles)>> {
        let Some(assistant) = source.assistant_beside() else {
            return Ok(None);
        };
        let out = beside(&self.args.out);
        if out.symlink_metadata().is_ok() {
            bail!(
                "the assistant of `{}` goes to `{}`, which exists already: remove it, choose another OUT, or add --no-drafter",
                self.args.source,
                out.display()
            );
        }
        let files = match self.container {
            Container::Safetensors => assistant.side_files()?,
            // A GGUF file has a vocabulary, and a drafter's is its target's.
            Container::Gguf => files.to_vec(),
        };
        Ok(Some((assistant.checkpoint()?, files)))
    }

    /// Writes `recipe` in the formats asked for, and says what was written.
    fn write(&self, mut recipe: Recipe<'_>, to: &Path, files: &[(String, Vec<u8>)]) -> Result<()> {
        let (mut kept, mut pinned) = (None, None);
        let has_tower = self.container == Container::Gguf && recipe.leave_towers_out();
        let recipe = match &self.quantize {
            Some(quantize) => {
                kept = misfits(quantize, &recipe);
                pinned = pinned_as(quantize, &recipe);
                quantize.apply(recipe)
            }
            None => recipe,
        };
        let mut bar = progress::ByteBar::new(&format!("writing {}", to.display()), !self.quiet);
        let written = self
            .container
            .write(&recipe, to, files, &mut |done, total| bar.set(done, total));
        written.map_err(with_remedy)?;
        bar.clear();
        if self.quiet {
            return Ok(());
        }
        for (from, to) in self.container.replaced(&recipe) {
            say!("GGUF has no {from}: these matrices are stored as {to}");
        }
        if has_tower {
            say!(
                "the tower for pictures and sounds is left out: GGUF models have it in a file of its own, an mmproj, which is not written here (--mmproj FILE uses one)"
            );
        }
        for line in [pinned, kept].into_iter().flatten() {
            say!("{line}");
        }
        let weights: usize = recipe.items.iter().map(|i| i.rows() * i.cols()).sum();
        say!(
            "{}: {} weights in {} tensors",
            to.display(),
            model::amount(weights as u64),
            recipe.items.len()
        );
        Ok(())
    }
}

/// The kind of files to write, as `--format` or the name of OUT says.
fn container(args: &ConvertArgs) -> Result<Container> {
    match (args.format, resolve::is_gguf_name(&args.out)) {
        (Some(Kind::Gguf), false) => bail!(
            "the name of a GGUF file must end in .gguf, unlike `{}`",
            args.out.display()
        ),
        (Some(Kind::Safetensors), true) => bail!(
            "--format safetensors writes a folder, whose name must not end in .gguf, unlike `{}`",
            args.out.display()
        ),
        (_, true) => Ok(Container::Gguf),
        (_, false) => Ok(Container::Safetensors),
    }
}

/// The matrices of `recipe` that keep their format, in one line, if there are any.
fn misfits(quantize: &Quantize, recipe: &Recipe<'_>) -> Option<String> {
    let misfits = quantize.misfits(recipe);
    let (_, format) = misfits.first()?;
    let shown: Vec<&str> = misfits
        .iter()
        .take(MISFITS_SHOWN)
        .map(|(name, _)| *name)
        .collect();
    let more = match misfits.len() - shown.len() {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let matrices = match misfits.len() {
        1 => "1 matrix keeps its format, for its rows are".to_owned(),
        n => format!("{n} matrices keep their format, for their rows are"),
    };
    Some(format!(
        "{matrices} not whole blocks of {} ({}): {}{more}",
        format.block,
        format.name,
        shown.join(", ")
    ))
}

/// How many matrices of `recipe` are pinned and how they are stored, in one line, if there are any.
fn pinned_as(quantize: &Quantize, recipe: &Recipe<'_>) -> Option<String> {
    let pinned = quantize.pinned(recipe);
    let formats: BTreeSet<_> = pinned.iter().map(|(_, format)| format.name).collect();
    let formats: Vec<_> = formats.into_iter().collect();
    let matrices = match pinned.len() {
        0 => return None,
        1 => "1 matrix is".to_owned(),
        n => format!("{n} matrices are"),
    };
    Some(format!(
        "{matrices} stored finer, as {} (--pin {})",
        formats.join(" and "),
        quantize.pins.name
    ))
}

/// What can be done about `error` with the options of the command.
fn with_remedy(error: ConvertError) -> anyhow::Error {
    match error {
        ConvertError::NoTokenizer => {
            anyhow!("{error}: name a model with the same tokenizer with --tokenizer MODEL")
        }
        error => error.into(),
    }
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
    match container {
        _ if container.holds(format) => None,
        Container::Safetensors => Some(format!(
            "only GGUF files hold this format; use {instead}, or let OUT end in .gguf"
        )),
        Container::Gguf => Some(format!("GGUF files do not hold this format; use {instead}")),
    }
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
