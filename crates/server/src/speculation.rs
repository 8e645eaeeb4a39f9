//! What a request says of speculation: the field `speculation`, in all dialects.

use engine::{Accept, DraftLength, Guessers, ModelInfo};
use serde_json::{Map, Value};

use crate::errors::ApiError;
use crate::fields::Fields;

const NAME: &str = "speculation";
/// Names of the longest draft, of which a request sends one.
const LONGEST: [&str; 2] = ["draft_max", "max_draft"];
const FIXED: &str = "draft_fixed";
const DRAFTERS: &str = "drafters";
const ACCEPT: &str = "accept";

/// What a request says of its drafts; the server's own choice where it says nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Speculation {
    /// How long drafts are.
    pub(crate) draft: Option<DraftLength>,
    /// Who may guess.
    pub(crate) drafters: Guessers,
    /// Which drafted tokens stay.
    pub(crate) accept: Option<Accept>,
}

impl Speculation {
    /// Reads `"auto"`, `"off"`, or an object.
    ///
    /// # Errors
    ///
    /// 400 for anything else, for lengths beyond the model's, drafters that it lacks, rules that there are not.
    pub(crate) fn read(fields: &Fields<'_>, info: &ModelInfo) -> Result<Self, ApiError> {
        match fields.get(NAME) {
            None => Ok(Speculation::default()),
            Some(Value::String(word)) if word == "auto" => Ok(Speculation::default()),
            Some(Value::String(word)) if word == "off" => Ok(Speculation {
                draft: Some(DraftLength::UpTo(0)),
                ..Speculation::default()
            }),
            Some(Value::Object(map)) => Speculation::of_object(map, fields, info),
            Some(_) => Err(wrong(fields)),
        }
    }

    fn of_object(
        map: &Map<String, Value>,
        fields: &Fields<'_>,
        info: &ModelInfo,
    ) -> Result<Self, ApiError> {
        let known = |key: &str| LONGEST.contains(&key) || [FIXED, DRAFTERS, ACCEPT].contains(&key);
        if !map.keys().all(|key| known(key)) {
            return Err(wrong(fields));
        }
        let inner = fields.inside(map, "speculation.");
        let limit = i64::try_from(info.draft_max).unwrap_or(i64::MAX);
        let length = |key| Ok::<_, ApiError>(inner.integer(key, 0..=limit)?.map(|n| n as usize));
        let [longest, other] = [length(LONGEST[0])?, length(LONGEST[1])?];
        if longest.is_some() && other.is_some() {
            let message = format!("says the same as `{}`; send one of the two", LONGEST[0]);
            return Err(inner.error(LONGEST[1], message));
        }
        let draft = match (longest.or(other), length(FIXED)?) {
            (Some(_), Some(_)) => return Err(wrong(fields)),
            (longest, fixed) => longest
                .map(DraftLength::UpTo)
                .or(fixed.map(DraftLength::Fixed)),
        };
        let drafters = match inner.get(DRAFTERS) {
            None => Guessers::default(),
            Some(names) => {
                drafters(names, info).map_err(|message| inner.error(DRAFTERS, message))?
            }
        };
        let accept = inner.get(ACCEPT).map(accept).transpose();
        Ok(Speculation {
            draft,
            drafters,
            accept: accept.map_err(|message| inner.error(ACCEPT, message))?,
        })
    }
}

/// What the field may be.
fn wrong(fields: &Fields<'_>) -> ApiError {
    let expected =
        "must be \"auto\", \"off\" or an object of draft_max or draft_fixed, drafters and accept";
    fields.error(NAME, expected)
}

/// The drafters of the list `names`; what is wrong with it, if it names none or others than the model has.
fn drafters(names: &Value, info: &ModelInfo) -> Result<Guessers, String> {
    let names = names.as_array().filter(|names| !names.is_empty());
    let names =
        names.ok_or("must be a list of drafters; \"speculation\": \"off\" turns them off")?;
    let guesser = |name: &Value| name.as_str().and_then(|name| info.guesser(name));
    let guessers: Option<Guessers> = names.iter().map(guesser).collect();
    guessers.ok_or_else(|| match &info.drafters[..] {
        [] => format!("nobody drafts for this model: {}", info.drafter_reason),
        known => format!(
            "may name the drafters of this model alone: {}",
            known.join(", ")
        ),
    })
}

/// The rule that `name` names; what is wrong, if there is no such rule.
fn accept(name: &Value) -> Result<Accept, String> {
    let rule = Accept::ALL.into_iter().find(|rule| name == rule.name());
    let choices = || Accept::ALL.map(|rule| format!("\"{}\"", rule.name()));
    rule.ok_or_else(|| format!("must be {}", choices().join(" or ")))
}
