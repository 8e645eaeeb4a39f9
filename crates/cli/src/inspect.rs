//! `paceline inspect`: what a checkpoint holds, whether it runs, which drafter it
//! has, and how much memory it takes.
//!
//! Facts that need no loading come first, so that a checkpoint that does not load
//! still shows them; the reason comes last, as the error.

use crate::args::{InspectArgs, OutputArgs};
use crate::model::{amount, bytes};
use crate::report::{Report, list, number};
use crate::{machine, model, progress, resolve};
use anyhow::{Result, anyhow, bail};
use engine::{CostOf, CostPoint, KvLayersInfo, Model, RequestBytes, Source, Text};
use serde_json::{Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write as _};
use std::process::ExitCode;
use text::{ContentForm, SystemPlace};
use weights::Checkpoint;

/// Contexts of the memory table in tokens, up to the model's own.
const CONTEXTS: &[usize] = &[2 << 10, 8 << 10, 32 << 10, 128 << 10, 256 << 10];
/// Most unused tensors that are listed to people; `-v` and `--json` list all.
const UNUSED_SHOWN: usize = 8;

/// A class of tensors: what people call it, and whether a canonical name belongs to it.
type Class = (&'static str, fn(&str) -> bool);

/// The classes of tensors. A name belongs to the first that it fits.
const CLASSES: &[Class] = &[
    ("vision and audio", |name| {
        models::TOWER_PREFIXES
            .iter()
            .chain(models::SOUND_TOWER_PREFIXES)
            .any(|p| name.starts_with(p))
    }),
    ("mtp head", |name| name.starts_with("mtp.")),
    ("norms, scales", |name| {
        name.contains("norm") || name.ends_with("layer_scalar")
    }),
    ("embedding", |name| name.starts_with("embed_tokens")),
    ("output head", |name| name.starts_with("lm_head.")),
    ("attention", |name| name.contains(".self_attn.")),
    ("gated delta", |name| name.contains(".linear_attn.")),
    ("experts", |name| {
        name.contains(".experts.") || name.contains(".router.") || name.contains(".switch_mlp.")
    }),
    ("feed-forward", |name| name.contains(".mlp.")),
    ("other", |_| true),
];

/// Counts of the tensors of one class.
#[derive(Default)]
struct ClassFacts {
    tensors: usize,
    parameters: u64,
    /// Bytes as stored.
    bytes: u64,
    /// Number formats that occur.
    formats: BTreeSet<&'static str>,
}

/// Runs `paceline inspect`.
pub(crate) fn run(args: &InspectArgs, output: OutputArgs) -> Result<ExitCode> {
    if args.load.quant.is_some() {
        bail!("inspect shows weights as they are stored: --quant is for commands that load them");
    }
    let name = args.positional.as_ref().unwrap_or(&args.model.model);
    let source = resolve::source(name)?;
    let cannot = |e: engine::EngineError| anyhow!(e).context(format!("cannot open `{name}`"));
    let mut checkpoint = source.checkpoint().map_err(cannot)?;
    let architecture = checkpoint.architecture().ok();
    let head = models::DRAFT_HEADS
        .iter()
        .find(|head| architecture.is_some_and(|a| head.architectures.contains(&a)));
    let has_eyes = head.is_none() && !args.load.no_pictures;
    if has_eyes {
        let tower = args.load.tower();
        let attached = source.attach_tower(&mut checkpoint, &tower);
        attached.map_err(cannot)?;
    }
    let loaded = model::load(name, &args.load, &args.draft, 1);
    // The load has hashed the files, or knows their hashes from an earlier one.
    let known = loaded
        .as_ref()
        .ok()
        .and_then(|m| m.info.preflight.target_sha256.clone());
    let hash =
        known.unwrap_or_else(|| progress::patiently("hashing", || checkpoint.content_hash()));
    let mut record = facts(&source, &checkpoint, &hash);
    if let Some(tower) = has_eyes.then(|| tower(&checkpoint)).flatten() {
        record["tower"] = tower;
    }
    if let Some(tower) = has_eyes.then(|| sound_tower(&checkpoint)).flatten() {
        record["sound_tower"] = tower;
    }
    let failure = match &loaded {
        Ok(model) => {
            record["runs"] = json!(true);
            record["model"] = json!(model.info);
            record["model"]["preflight"]["summary"] = json!(model.info.preflight.summary());
            record["memory"] = memory(model);
            record["machine"] = json!(machine::ram().map(|ram| ram.total));
            record["text"] = text_facts(&model.text);
            None
        }
        // A draft head does not run alone, and need not.
        Err(_) if let Some(head) = head => {
            record["runs"] = json!(false);
            record["drafts_as"] = json!(head.name);
            None
        }
        Err(error) => {
            record["runs"] = json!(false);
            record["error"] = json!(crate::one_line(error));
            loaded.err()
        }
    };
    let mut stdout = io::stdout().lock();
    if args.json {
        writeln!(stdout, "{record}")?;
    } else {
        stdout.write_all(report(&record, output.verbose > 0).as_bytes())?;
    }
    failure.map_or(Ok(ExitCode::SUCCESS), Err)
}

/// The part of the record that needs no loading: name, files, and tensors by class.
fn facts(source: &Source, checkpoint: &Checkpoint, hash: &str) -> Value {
    let mut classes: BTreeMap<usize, ClassFacts> = BTreeMap::new();
    let mut parameters = 0;
    for name in checkpoint
        .names()
        .filter(|name| !is_companion(checkpoint, name))
    {
        let class = CLASSES
            .iter()
            .position(|(_, fits)| fits(name))
            .expect("the last class takes all");
        let facts = classes.entry(class).or_default();
        facts.tensors += 1;
        let Some(shape) = checkpoint.shape(name) else {
            continue;
        };
        let n: u64 = shape.iter().map(|&d| d as u64).product();
        facts.parameters += n;
        parameters += n;
        let (cols, rows) = shape
            .split_last()
            .map_or((1, 1), |(&cols, rows)| (cols, rows.iter().product()));
        if let Ok(stored) = checkpoint.matrix(name, rows, cols) {
            facts.bytes += (stored.codes.len() + stored.scales.len() + stored.biases.len()) as u64;
            facts.formats.insert(stored.format.name);
        }
    }
    let class = |(class, facts): (usize, ClassFacts)| {
        json!({
            "class": CLASSES[class].0,
            "tensors": facts.tensors,
            "parameters": facts.parameters,
            "bytes": facts.bytes,
            "formats": facts.formats,
        })
    };
    json!({
        "name": source.name(),
        "source": match source {
            Source::Folder(path) => path.display().to_string(),
            Source::Files(_) => "bundled".to_owned(),
        },
        "architecture": checkpoint.architecture().ok(),
        "sha256": hash,
        "files": checkpoint.files().collect::<Vec<_>>(),
        "file_bytes": checkpoint.bytes(),
        "parameters": parameters,
        "tensors": classes.into_iter().map(class).collect::<Vec<_>>(),
    })
}

/// What reads pictures, as JSON: its sizes, or why there is nothing in a checkpoint whose configuration
/// has it; nothing for a model of text alone.
fn tower(checkpoint: &Checkpoint) -> Option<Value> {
    let is_gguf = checkpoint.metadata().is_some();
    if !is_gguf && !checkpoint.config()["vision_config"].is_object() {
        return None;
    }
    let plan = match models::tower_plan(checkpoint) {
        Ok(plan) => plan,
        Err(error) => return Some(json!({ "missing": error.to_string() })),
    };
    let (outline, rule) = (plan.outline, plan.picture);
    let (parameters, bytes) = size_of(checkpoint, models::TOWER_PREFIXES);
    Some(json!({
        "architecture": outline.name,
        "file": checkpoint.tower_file(),
        "layers": outline.layers,
        "hidden_size": outline.hidden_size,
        "parameters": parameters,
        "bytes": bytes,
        "patch_pixels": outline.patch,
        "patches_a_side": outline.merge,
        "frames_a_span": outline.frames_a_run,
        "most_rows": rule.most_rows(),
        "most_frames": plan.video.most_frames(),
        "step_bytes": outline.step_bytes(rule.most_rows()),
    }))
}

/// Numbers and bytes of the tensors of `checkpoint` whose names begin with one of `prefixes`.
fn size_of(checkpoint: &Checkpoint, prefixes: &[&str]) -> (u64, u64) {
    let is_one = |name: &&str| prefixes.iter().any(|prefix| name.starts_with(prefix));
    let weights = checkpoint.weight_names().filter(is_one);
    let shapes = weights.filter_map(|name| checkpoint.shape(name));
    let numbers = shapes.map(|shape| shape.iter().map(|&n| n as u64).product::<u64>());
    let bytes = checkpoint.sizes().filter(|(name, _)| is_one(name));
    (numbers.sum(), bytes.map(|(_, bytes)| bytes as u64).sum())
}

/// What hears, as JSON: its sizes, or why there is nothing in a checkpoint whose configuration has it;
/// nothing for a model that does not.
fn sound_tower(checkpoint: &Checkpoint) -> Option<Value> {
    if !checkpoint.config()["audio_config"].is_object() {
        return None;
    }
    let outline = match models::sound_outline(checkpoint) {
        Ok(outline) => outline,
        Err(error) => return Some(json!({ "missing": error.to_string() })),
    };
    let (parameters, bytes) = size_of(checkpoint, models::SOUND_TOWER_PREFIXES);
    Some(json!({
        "architecture": outline.name,
        "layers": outline.layers,
        "hidden_size": outline.hidden_size,
        "parameters": parameters,
        "bytes": bytes,
        "samples_a_row": outline.samples_a_row,
        "most_seconds": models::SOUND_SECONDS_MAX,
        "most_rows": outline.rows_max(),
        "step_bytes": outline.step_bytes(outline.rows_max()),
    }))
}

/// The sound tower for people.
fn report_sound_tower(tower: &Value, out: &mut Report) {
    if let Some(reason) = tower["missing"].as_str() {
        out.line("sound", format_args!("none: {reason}"));
    } else if tower.is_object() {
        let number = |key: &str| number(&tower[key]);
        let layers = match number("layers") {
            0 => "no layers".to_owned(),
            n => format!("{n} layers"),
        };
        out.line(
            "sound",
            format_args!(
                "{}: {layers} of {} columns, {} in {}",
                text(&tower["architecture"]),
                number("hidden_size"),
                amount(number("parameters")),
                bytes(number("bytes")),
            ),
        );
        out.line(
            "",
            format_args!(
                "up to {} seconds, {} rows, which takes {}",
                number("most_seconds"),
                number("most_rows"),
                bytes(number("step_bytes")),
            ),
        );
    }
}

/// The tower for people.
fn report_tower(tower: &Value, out: &mut Report) {
    if let Some(reason) = tower["missing"].as_str() {
        out.line("vision", format_args!("none: {reason}"));
    } else if tower.is_object() {
        let number = |key: &str| number(&tower[key]);
        let side = number("patches_a_side");
        let layers = match number("layers") {
            0 => "no layers".to_owned(),
            n => format!("{n} layers"),
        };
        out.line(
            "vision",
            format_args!(
                "{}: {layers} of {} columns, {} in {}{}",
                text(&tower["architecture"]),
                number("hidden_size"),
                amount(number("parameters")),
                bytes(number("bytes")),
                tower["file"]
                    .as_str()
                    .map_or_else(String::new, |file| format!(" of {file}")),
            ),
        );
        out.line(
            "",
            format_args!(
                "patches of {} pixels, {side}×{side} a row, up to {} rows a picture, which takes {}, up to {} frames a video",
                number("patch_pixels"),
                number("most_rows"),
                bytes(number("step_bytes")),
                number("most_frames"),
            ),
        );
    }
}

/// Whether `name` holds the scales or biases of a quantized matrix.
fn is_companion(checkpoint: &Checkpoint, name: &str) -> bool {
    let module = name
        .strip_suffix(".scales")
        .or_else(|| name.strip_suffix(".biases"));
    module.is_some_and(|module| checkpoint.has(&format!("{module}.weight")))
}

/// The memory of one request by context, in addition to the weights, and whether both together
/// fit this machine.
pub(crate) fn memory(model: &Model) -> Value {
    let most = model.speculator.target().max_context();
    let contexts: BTreeSet<usize> = CONTEXTS
        .iter()
        .copied()
        .filter(|&c| c < most)
        .chain([most, model.info.context])
        .collect();
    let ram = machine::ram();
    let at = |context| {
        let RequestBytes { target, drafter } = model.request_bytes(context);
        let weights = model.info.weight_bytes + model.info.drafter_weight_bytes;
        let all = weights + target + drafter;
        json!({
            "context": context,
            "bytes": target + drafter,
            "drafter_bytes": drafter,
            "with_weights": all,
            "fits": ram.map(|ram| all <= ram.total),
        })
    };
    contexts.into_iter().map(at).collect()
}

/// The tokenizer, the chat template and the recommended sampling, as JSON.
fn text_facts(text: &Text) -> Value {
    let token = |id: u32| json!({"id": id, "text": text.tokenizer.entry(id)});
    let template = text.template.as_ref().map(|template| {
        let form = |form| match form {
            ContentForm::Text => "text",
            ContentForm::Parts => "parts",
            ContentForm::Either => "text or parts",
        };
        let reads = template.reads();
        let place = match reads.place {
            SystemPlace::Anywhere => "where they stand",
            SystemPlace::First => "at the start, later ones in a user turn",
            SystemPlace::Nowhere => "in a user turn",
        };
        json!({
            "bytes": template.source().len(),
            "content": {
                "system": form(reads.system),
                "user": form(reads.user),
                "assistant": form(reads.assistant),
                "tool": form(reads.tool),
            },
            "system_messages": place,
            "special_tokens_in_messages": if text.allow_special_tokens { "control" } else { "text" },
        })
    });
    let advice = &text.sampling;
    json!({
        "vocabulary": text.tokenizer.vocab_size(),
        "bos": text.bos().map(token),
        "stop_tokens": text.stop_tokens.ids().iter().copied().map(token).collect::<Vec<_>>(),
        "template": template,
        "recommended": {
            "do_sample": advice.do_sample,
            "temperature": advice.temperature,
            "top_k": advice.top_k,
            "top_p": advice.top_p,
            "min_p": advice.min_p,
            "repetition_penalty": advice.repetition_penalty,
        },
    })
}

/// The forms of content that a template takes, for people: by role if they differ.
fn forms(content: &Value) -> String {
    let forms = content.as_object().into_iter().flatten();
    let forms: Vec<_> = forms
        .map(|(role, form)| (role, form.as_str().unwrap_or_default()))
        .collect();
    match forms.first() {
        Some((_, first)) if forms.iter().all(|(_, form)| form == first) => (*first).to_owned(),
        _ => {
            let all = forms.iter().map(|(role, form)| format!("{form} ({role})"));
            all.collect::<Vec<_>>().join(", ")
        }
    }
}

/// The checks before a model is called ready, for people: a label and a text for each.
fn checks(preflight: &Value) -> Vec<(&'static str, String)> {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut lines = Vec::new();
    if let Some(head) = preflight["head"].as_object() {
        let extra = head["extra"].as_array().map_or(0, Vec::len);
        let unread = if extra == 0 {
            String::new()
        } else {
            format!(", {extra} more that nobody reads")
        };
        lines.push((
            "head",
            format!("all of its {} tensors{unread}", head["expected"]),
        ));
    }
    for norms in preflight["norms"].as_array().into_iter().flatten() {
        let line = format!(
            "{} holds `{}`: {}",
            text(&norms["part"]),
            text(&norms["holds"]),
            text(&norms["sign"])
        );
        lines.push(("norms", line));
    }
    lines.push(("checked", text(&preflight["summary"])));
    for warning in preflight["warnings"].as_array().into_iter().flatten() {
        lines.push(("warning", text(warning)));
    }
    lines
}

/// The times of steps by rows and of drafts by tokens in short contexts, for people.
fn round_times(calibration: &Value, drafters: &[&str]) -> Option<String> {
    let times: Vec<CostPoint> = serde::Deserialize::deserialize(&calibration["times"]).ok()?;
    let shortest = times.iter().map(|t| t.octave).min()?;
    let of = |of: CostOf, head: usize| {
        let own = times
            .iter()
            .filter(|t| (t.of, t.head, t.octave) == (of, head, shortest) && t.count > 0)
            // Of one text: a GPU's steps are timed for more of them, too.
            .filter(|t| t.streams <= 1);
        let all = own.map(|t| format!("{} {:.3}", t.count, t.ms()));
        all.collect::<Vec<_>>().join(", ")
    };
    let steps = of(CostOf::Verify, 0);
    let mut line = format!("milliseconds of a step by rows: {steps}");
    let n_heads = times.iter().map(|t| t.head + 1).max().unwrap_or(0);
    for head in 0..n_heads {
        let drafts = of(CostOf::Draft, head);
        if drafts.is_empty() {
            continue;
        }
        let whose = match drafters.get(head).filter(|_| n_heads > 1) {
            Some(name) => format!(" by {name}"),
            None => String::new(),
        };
        line += &format!("; of a draft{whose} by tokens: {drafts}");
    }
    let expert = of(CostOf::Expert, 0);
    if let Some((_, ms)) = expert.split_once(' ') {
        line += &format!("; of an expert: {ms}");
    }
    if calibration["cached"] == true {
        line += " (remembered from an earlier start)";
    }
    Some(line)
}

/// A text of the record; a question mark where there is none.
fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("?")
}

/// The whole record for people. `is_verbose` lists all unused tensors.
fn report(record: &Value, is_verbose: bool) -> String {
    let mut out = Report::default();
    report_checkpoint(record, &mut out);
    if let Some(head) = record["drafts_as"].as_str() {
        out.line(
            "runs",
            format_args!("as a drafter: its target with -m, and it with --draft {head}:PATH"),
        );
    } else if record["runs"] != json!(true) {
        out.line("runs", "no");
    } else {
        report_model(&record["model"], &mut out);
        report_context(&record["model"], &mut out);
        report_memory(record, &mut out);
        report_text(&record["text"], &mut out);
        report_unused(&record["model"]["unused_tensors"], is_verbose, &mut out);
    }
    out.into_text()
}

/// Name, size and tensors of a checkpoint, for people.
fn report_checkpoint(record: &Value, out: &mut Report) {
    out.line(
        "model",
        format_args!("{} ({})", text(&record["name"]), text(&record["source"])),
    );
    let family = record["model"]["family"].as_str();
    let family = family.map_or_else(String::new, |f| format!(", family {f}"));
    out.line(
        "architecture",
        format_args!("{}{family}", text(&record["architecture"])),
    );
    let size = bytes(number(&record["file_bytes"]));
    out.line(
        "parameters",
        format_args!("{} in {size}", amount(number(&record["parameters"]))),
    );
    report_tower(&record["tower"], out);
    report_sound_tower(&record["sound_tower"], out);
    out.line("sha256", text(&record["sha256"]));
    out.line(
        "tensors",
        format_args!(
            "{:<16} {:>6} {:>11} {:>9}  formats",
            "class", "number", "parameters", "size"
        ),
    );
    for class in list(&record["tensors"]) {
        let formats: Vec<&str> = list(&class["formats"]).iter().map(text).collect();
        out.line(
            "",
            format_args!(
                "{:<16} {:>6} {:>11} {:>9}  {}",
                text(&class["class"]),
                number(&class["tensors"]),
                amount(number(&class["parameters"])),
                bytes(number(&class["bytes"])),
                formats.join(", ")
            ),
        );
    }
}

/// The drafter of a loaded model, the checks that it passed, and where it runs, for people.
fn report_model(model: &Value, out: &mut Report) {
    let drafter = model["drafter"].as_str().unwrap_or("none");
    out.line(
        "drafter",
        format_args!("{drafter}: {}", text(&model["drafter_reason"])),
    );
    for (label, value) in checks(&model["preflight"]) {
        out.line(label, value);
    }
    let drafters = model["drafters"].as_array().into_iter().flatten();
    let drafters: Vec<&str> = drafters.map(text).collect();
    if let Some(times) = round_times(&model["calibration"], &drafters) {
        out.line("times", times);
    }
    out.line("runs on", text(&model["backend"]));
    let reason = text(&model["weights_reason"]);
    out.line(
        "weights",
        format_args!("{}: {reason}", text(&model["weights"])),
    );
}

/// The memory of one request by context, for people.
fn report_memory(record: &Value, out: &mut Report) {
    let model = &record["model"];
    for (i, row) in list(&record["memory"]).iter().enumerate() {
        let label = if i == 0 { "memory" } else { "" };
        let mark = if row["context"] == model["context"] {
            "  ← this context"
        } else {
            ""
        };
        let fits = match row["fits"].as_bool() {
            Some(true) => ", fits",
            Some(false) => ", does NOT fit this machine",
            None => "",
        };
        let of_drafter = match number(&row["drafter_bytes"]) {
            0 => String::new(),
            n => format!(" (the drafter's {})", bytes(n)),
        };
        out.line(
            label,
            format_args!(
                "{:>7} tokens {:>9}{of_drafter} as {}, {} a token, {} with weights{fits}{mark}",
                number(&row["context"]),
                bytes(number(&row["bytes"])),
                text(&model["kv_format"]),
                bytes(number(&model["kv_token_bytes"])),
                bytes(number(&row["with_weights"])),
            ),
        );
    }
    let layers: Vec<KvLayersInfo> =
        serde_json::from_value(model["kv_layers"].clone()).unwrap_or_default();
    if let Some(layers) = model::kv_layers(&layers) {
        out.line("kv layers", layers);
    }
}

/// The context, what of it memory has room for, and what the model knows, for people.
fn report_context(model: &Value, out: &mut Report) {
    let [context, fits, most] =
        ["context", "context_fits", "context_max"].map(|key| number(&model[key]));
    out.line(
        "context",
        format_args!("{context} tokens; {fits} fit the memory, the model knows {most}"),
    );
}

/// The tokenizer, the chat template and the recommended sampling, for people.
fn report_text(words: &Value, out: &mut Report) {
    let token = |token: &Value| format!("{} {}", number(&token["id"]), text(&token["text"]));
    let stops: Vec<String> = list(&words["stop_tokens"]).iter().map(token).collect();
    out.line(
        "vocabulary",
        format_args!("{} tokens", number(&words["vocabulary"])),
    );
    out.line("stop tokens", stops.join(", "));
    let template = &words["template"];
    if template.is_null() {
        out.line(
            "template",
            "none: continues text with `run --raw`, cannot chat",
        );
    } else {
        out.line(
            "template",
            format_args!(
                "{}, takes {}; system messages {}; special tokens in messages are {}",
                bytes(number(&template["bytes"])),
                forms(&template["content"]),
                text(&template["system_messages"]),
                text(&template["special_tokens_in_messages"]),
            ),
        );
    }
    if let Some(advice) = words["recommended"].as_object() {
        let given = advice.iter().filter(|(_, value)| !value.is_null());
        let given: Vec<String> = given.map(|(key, value)| format!("{key} {value}")).collect();
        match given.is_empty() {
            true => out.line("recommended", "no settings"),
            false => out.line("recommended", given.join(", ")),
        }
    }
}

/// The tensors that nobody reads, for people: [`UNUSED_SHOWN`] of them, all if `is_verbose`.
fn report_unused(unused: &Value, is_verbose: bool, out: &mut Report) {
    let unused = list(unused);
    let n_shown = if is_verbose {
        unused.len()
    } else {
        unused.len().min(UNUSED_SHOWN)
    };
    match unused.len() {
        0 => out.line("unused tensors", "none"),
        n => out.line("unused tensors", n),
    }
    for name in &unused[..n_shown] {
        out.line("", text(name));
    }
    if n_shown < unused.len() {
        let n_more = unused.len() - n_shown;
        out.line("", format_args!("… and {n_more} more, with -v"));
    }
}
