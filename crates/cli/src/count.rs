//! `paceline count`: how often a model writes each token of its vocabulary, in a file by which
//! `--draft-vocab` chooses the tokens that a draft head scores.
//!
//! What counts are texts of the user, or answers that the model itself writes: the first to each
//! prompt greedy, the others sampled with a seed each. Only the answers are counted then, not the
//! prompts, since only what is written is drafted.

use crate::args::{CountArgs, DraftArgs, OutputArgs};
use crate::bench::{read, wordings};
use crate::{model, perplexity};
use anyhow::{Context, Result, bail};
use engine::{Engine, EngineOptions, Request, Sampling, TokenCounts};
use std::process::ExitCode;

/// Probability that samples are cut to.
const TOP_P: f32 = 0.95;

/// Runs the command.
pub(crate) fn run(args: &CountArgs, output: OutputArgs) -> Result<ExitCode> {
    let texts = args.texts.iter().map(|path| Ok((path, read(path)?)));
    let texts = texts.collect::<Result<Vec<_>>>()?;
    let asked = args.prompts.as_deref().map(read).transpose()?;
    let draft = match texts.is_empty() {
        true => DraftArgs::default(),
        false => DraftArgs::none(),
    };
    let model = model::load(&args.model.model, &args.load, &draft, 1)?;
    let mut counts = TokenCounts::new(&model.text.tokenizer);
    for (path, text) in &texts {
        for ids in perplexity::texts(path, text, None, &model.text)? {
            counts.add(&ids);
        }
    }
    if texts.is_empty() {
        let wordings = wordings(args.prompts.as_deref(), asked.as_deref())?;
        let prompts = wordings
            .iter()
            .map(|wording| Ok(wording.encode(&model.text, "")?.ids));
        let prompts = prompts.collect::<Result<_>>()?;
        count_answers(
            args,
            Engine::start(model, EngineOptions::default()),
            prompts,
            &mut counts,
        )?;
    }
    if counts.tokens() == 0 {
        bail!("there is nothing to count: the texts have no tokens");
    }
    std::fs::write(&args.out, counts.to_json())
        .with_context(|| format!("cannot write `{}`", args.out.display()))?;
    if !output.quiet {
        say!(
            "{} tokens, {} of them different: `--draft-vocab {}`",
            counts.tokens(),
            counts.distinct(),
            args.out.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// Counts the tokens of the model's answers to `prompts`.
fn count_answers(
    args: &CountArgs,
    engine: Engine,
    prompts: Vec<Vec<u32>>,
    counts: &mut TokenCounts,
) -> Result<()> {
    for prompt in prompts {
        for seed in 0..args.answers {
            let mut request = Request::new(prompt.clone());
            request.max_tokens = Some(args.max_tokens);
            if seed > 0 {
                request.sampling = Sampling {
                    temperature: 1.0,
                    top_p: TOP_P,
                    seed,
                    ..Sampling::default()
                };
            }
            let (_, ids, _) = engine.complete(request)?;
            counts.add(&ids);
        }
    }
    Ok(())
}
