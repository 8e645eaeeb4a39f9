//! A request for text, but for its prompt.

use std::sync::Arc;
use std::time::Duration;

use axum::http::HeaderValue;
use engine::{LineLimits, LogprobsOf, MAX_TOP_LOGPROBS};
use serde_json::{Map, Value};

use super::document::{Shape, Spelling};
use super::tables;
use crate::app::App;
use crate::errors::ApiError;
use crate::fields::{Fields, ignored_header};
use crate::generation::Wants;
use crate::ids;
use crate::openai::{self, structured};
use crate::options::{Names, Options, answers};

/// The names of options in which this API differs from others.
const NAMES: Names = Names {
    max_tokens: &["n_predict", "max_completion_tokens", "max_tokens"],
    ..openai::NAMES
};
/// The names of options where a gap is filled.
const INFILL_NAMES: Names = Names {
    passes_infill: true,
    ..NAMES
};
/// Seeds that stand for a new one.
const NEW_SEEDS: [i64; 2] = [-1, u32::MAX as i64];
/// Most milliseconds of a limit.
const MS_MAX: i64 = u32::MAX as i64;
/// Most spaces and tabs of a limit.
const INDENT_MAX: i64 = 1 << 16;
/// Most fields that a response can be asked for.
const RESPONSE_FIELDS_MAX: usize = 128;

/// A request that has been read.
pub(super) struct Read {
    pub(super) options: Options,
    pub(super) spelling: Spelling,
    pub(super) ignored: Option<HeaderValue>,
}

/// Reads what a request says beside its prompt. `fills_gap` where the text is to fill one.
///
/// # Errors
///
/// 400 for a field that is wrong, or asks for what is not implemented.
pub(super) fn read(
    mut object: Map<String, Value>,
    app: &Arc<App>,
    fills_gap: bool,
) -> Result<Read, ApiError> {
    let seed = object.get("seed").and_then(Value::as_i64);
    if seed.is_some_and(|seed| NEW_SEEDS.contains(&seed)) {
        object.insert("seed".to_owned(), ids::random_seed().into());
    }
    let fields = Fields::new(&object, &tables::TEXT);
    let model = app.check_model(&fields)?;
    fields.refuse()?;
    let names = match fills_gap {
        true => &INFILL_NAMES,
        false => &NAMES,
    };
    let mut options = Options::read(&fields, app, names, None)?;
    options.n = answers(&fields)?;
    options.grammar = structured::read(&fields)?;
    options.lines = lines(&fields)?;
    let most = MAX_TOP_LOGPROBS as i64;
    let n_probs = match fields.integer("n_probs", 0..=most)? {
        None => fields.integer("logprobs", 0..=most)?,
        n_probs => n_probs,
    };
    options.logprobs = n_probs.filter(|&n| n > 0).map(|n| n as usize);
    if fields.bool("post_sampling_probs")?.unwrap_or(false) {
        options.logprobs_of = LogprobsOf::Choice;
    }
    let shape = Shape {
        returns_tokens: fields.bool("return_tokens")?.unwrap_or(false),
        has_timings: fields.bool("timings_per_token")?.unwrap_or(false),
        fields: response_fields(&fields)?,
    };
    let has_progress = fields.bool("return_progress")?.unwrap_or(false);
    options.wants = Wants {
        tokens: options.stream || shape.returns_tokens,
        prefill: options.stream && has_progress,
    };
    Ok(Read {
        spelling: Spelling::new(app, model, &options, &object, shape),
        ignored: ignored_header(&fields),
        options,
    })
}

fn lines(fields: &Fields<'_>) -> Result<LineLimits, ApiError> {
    let ms = fields.integer("t_max_predict_ms", -1..=MS_MAX)?;
    let ms = ms
        .and_then(|ms| u64::try_from(ms).ok())
        .filter(|&ms| ms > 0);
    Ok(LineLimits {
        indent: fields.integer("n_indent", 0..=INDENT_MAX)?.unwrap_or(0) as usize,
        time: ms.map(Duration::from_millis),
    })
}

/// The fields that the last document is to have; all if there are none.
fn response_fields(fields: &Fields<'_>) -> Result<Vec<String>, ApiError> {
    const NAME: &str = "response_fields";
    let wrong = || {
        let message = format!("must be a list of up to {RESPONSE_FIELDS_MAX} strings");
        fields.error(NAME, message)
    };
    let Some(value) = fields.get(NAME) else {
        return Ok(Vec::new());
    };
    let list = value.as_array().ok_or_else(wrong)?;
    let names = list.iter().map(|name| name.as_str().map(str::to_owned));
    let names: Vec<String> = names.collect::<Option<_>>().ok_or_else(wrong)?;
    match names.len() > RESPONSE_FIELDS_MAX {
        true => Err(wrong()),
        false => Ok(names),
    }
}
