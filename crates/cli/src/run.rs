//! `paceline run`: one prompt, one text.
//!
//! The text is all that goes to stdout, as it comes; with `--json`, one object
//! at the end. Everything said about it goes to stderr, and so does what the model
//! writes before it answers.

use crate::args::{OutputArgs, RunArgs};
use crate::form::{self, Constraint};
use crate::interrupts::Interrupts;
use crate::reply::{Reply, TextOut};
use crate::traced::Traced;
use crate::{media, model, prompt, reply, words};
use anyhow::Result;
use engine::{Engine, EngineOptions, FinishReason, MediaItem, ModelInfo, Request, Sampling, Text};
use serde_json::{Map, Value, json};
use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Instant;

/// Runs the command.
pub(crate) fn run(args: &RunArgs, output: OutputArgs) -> Result<ExitCode> {
    let prompt = prompt::read(args, output)?;
    reply::check(&args.text)?;
    // Before a model is loaded for it.
    let form = form::read(&args.form)?;
    let traced = Traced::create(&args.trace)?;
    let interrupts = Interrupts::of_all()?;
    let start = Instant::now();
    // Nothing is lost if loading is interrupted, and it may take long.
    let model =
        interrupts.while_idle(|| model::load(&args.model.model, &args.load, &args.draft, 1))?;
    let options = EngineOptions {
        step_sink: traced.sink(&model.info),
        overlap: !args.overlap.no_overlap,
        ..EngineOptions::default()
    };
    let engine = Engine::start(model, options);
    let load_ms = start.elapsed().as_secs_f64() * 1e3;
    if output.verbose > 0 {
        say!(
            "{}\nloaded in {load_ms:.0} ms",
            model::describe(engine.info())
        );
    }
    let pictures = args.image.iter().map(|file| media::picture(&engine, file));
    let videos = args.video.iter().map(|file| media::video(&engine, file));
    let sounds = args.audio.iter().map(|file| media::sound(&engine, file));
    let items = pictures.chain(videos).chain(sounds);
    let items = items.collect::<Result<Vec<_>>>()?;
    let ids = encode(engine.text(), args, &items, &prompt)?;
    let (ids, placed) = media::place(&engine, ids, items)?;
    let sampling = reply::sampling_for(&args.text, &engine)?;
    let mut request = Request::new(ids.clone());
    request.media = placed;
    request.sampling = sampling.clone();
    request.max_tokens = Some(args.text.max_tokens);
    request.stop = args.text.stop.clone();
    request.ignore_eos = args.text.ignore_eos;
    request.splits_reasoning = !args.raw;
    let arguments = args.text.chat_template_kwargs.as_ref();
    if let Some(form) = form {
        Constraint::new(&engine, form, arguments)?.hold(&mut request);
    }

    let mut stdout = TextOut::stdout();
    let reply = if args.json {
        let reply = reply::stream(
            &engine,
            request,
            &interrupts,
            !output.quiet,
            (&mut io::sink(), &mut io::sink()),
        )
        .map_err(words::request_error)?;
        writeln!(
            stdout,
            "{}",
            record(&reply, &ids, &sampling, engine.info(), load_ms)
        )?;
        reply
    } else {
        let mut reasoning = TextOut::reasoning(!output.quiet);
        reply::stream(
            &engine,
            request,
            &interrupts,
            !output.quiet,
            (&mut stdout, &mut reasoning),
        )
        .map_err(words::request_error)?
    };
    stdout.end_line()?;
    if !output.quiet {
        let seed = if sampling.temperature > 0.0 {
            format!(" · seed {}", sampling.seed)
        } else {
            String::new()
        };
        say!(
            "{}{seed}",
            reply::summary(
                &reply.outcome,
                args.text.max_tokens,
                engine.info().draft_max
            )
        );
    }
    Ok(if reply.outcome.finish == FinishReason::Cancelled {
        interrupts.exit_code().into()
    } else {
        ExitCode::SUCCESS
    })
}

/// The prompt's tokens.
fn encode(text: &Text, args: &RunArgs, items: &[MediaItem], prompt: &str) -> Result<Vec<u32>> {
    if args.raw {
        return Ok(text.encode_prompt(prompt)?);
    }
    let mut messages = Vec::new();
    if let Some(system) = &args.text.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    messages.push(json!({"role": "user", "content": media::content(items, prompt)}));
    model::encode_chat(text, messages, args.text.chat_template_kwargs.as_ref())
}

/// The object that `--json` prints.
fn record(
    reply: &Reply,
    prompt_ids: &[u32],
    sampling: &Sampling,
    info: &ModelInfo,
    load_ms: f64,
) -> Value {
    let outcome = &reply.outcome;
    let (finish, stop_string) = match &outcome.finish {
        FinishReason::Stop => ("stop", None),
        FinishReason::StopString(text) => ("stop_string", Some(text)),
        FinishReason::ToolCalls => ("tool_calls", None),
        FinishReason::Length => ("length", None),
        FinishReason::Cancelled => ("cancelled", None),
    };
    let mut timings = Map::from_iter([("load_ms".to_owned(), json!(load_ms))]);
    timings.insert("first_text_ms".into(), json!(reply.first_text_ms));
    if let Value::Object(map) = json!(outcome.timings) {
        timings.extend(map);
    }
    let mut record = json!({
        "text": reply.text,
        "reasoning": reply.reasoning,
        "finish": finish,
        "stop_string": stop_string,
        "usage": outcome.usage,
        "timings": timings,
        "speculation": outcome.speculation,
        "sampling": {"temperature": sampling.temperature, "seed": (sampling.temperature > 0.0).then_some(sampling.seed)},
        "model": info,
        "prompt_token_ids": prompt_ids,
        "token_ids": reply.tokens,
    });
    round(&mut record);
    record
}

/// Rounds fractions to a thousandth: no clock here is better than that.
fn round(value: &mut Value) {
    match value {
        Value::Number(number) if number.is_f64() => {
            let rounded = number.as_f64().map(|x| (x * 1e3).round() / 1e3);
            *value = json!(rounded);
        }
        Value::Array(list) => list.iter_mut().for_each(round),
        Value::Object(map) => map.values_mut().for_each(round),
        _ => {}
    }
}
