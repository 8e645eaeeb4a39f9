//! Which samplers act: `samplers`, as llama-server has it.
//!
//! A list of samplers leaves those out that it does not name. Their order here is fixed, and but
//! for the temperature it is llama-server's own; a list in another order is refused, since it would
//! ask for another text.

use engine::{Mirostat, Sampling};
use serde_json::Value;

use crate::errors::{ApiError, excerpt};
use crate::fields::Fields;

const NAME: &str = "samplers";
/// The sampler of llama-server that this server does not have.
const INFILL: &str = "infill";
/// The path under which it is named where it is passed over.
const INFILL_PATH: &str = "samplers.infill";

/// One sampler.
struct Sampler {
    /// llama-server's names for it, the one in its responses first.
    names: &'static [&'static str],
    /// llama-server's letter for it.
    letter: char,
    /// Whether it may stand anywhere in a list.
    is_anywhere: bool,
    /// Has it do nothing.
    turn_off: fn(&mut Sampling),
}

/// Every sampler, in the order in which they act.
const SAMPLERS: &[Sampler] = &[
    Sampler {
        names: &["penalties"],
        letter: 'e',
        is_anywhere: false,
        turn_off: |s| {
            let none = Sampling::default();
            s.repetition_penalty = none.repetition_penalty;
            s.presence_penalty = none.presence_penalty;
            s.frequency_penalty = none.frequency_penalty;
        },
    },
    Sampler {
        names: &["dry"],
        letter: 'd',
        is_anywhere: false,
        turn_off: |s| s.dry_multiplier = 0.0,
    },
    Sampler {
        names: &["temperature", "temp"],
        letter: 't',
        is_anywhere: true,
        turn_off: |s| {
            s.temperature = 1.0;
            s.dynatemp_range = 0.0;
        },
    },
    Sampler {
        names: &["top_n_sigma", "top-n-sigma"],
        letter: 's',
        is_anywhere: false,
        turn_off: |s| s.top_n_sigma = 0.0,
    },
    Sampler {
        names: &["top_k", "top-k"],
        letter: 'k',
        is_anywhere: false,
        turn_off: |s| s.top_k = 0,
    },
    Sampler {
        names: &["typ_p", "typical_p", "typical-p", "typical", "typ-p", "typ"],
        letter: 'y',
        is_anywhere: false,
        turn_off: |s| s.typical_p = 1.0,
    },
    Sampler {
        names: &["top_p", "top-p", "nucleus"],
        letter: 'p',
        is_anywhere: false,
        turn_off: |s| s.top_p = 1.0,
    },
    Sampler {
        names: &["min_p", "min-p"],
        letter: 'm',
        is_anywhere: false,
        turn_off: |s| s.min_p = 0.0,
    },
    Sampler {
        names: &["xtc"],
        letter: 'x',
        is_anywhere: false,
        turn_off: |s| s.xtc_probability = 0.0,
    },
];

/// The names of all samplers, in the order in which they act.
pub(crate) fn names() -> impl Iterator<Item = &'static str> {
    SAMPLERS.iter().map(|sampler| sampler.names[0])
}

/// Turns the samplers off that `fields` do not list, if they list any. Where `passes_infill` is
/// set, llama-server's sampler of that name is passed over, and named as ignored.
///
/// # Errors
///
/// 400 for a sampler that is not known, and for another order.
pub(crate) fn read(
    fields: &Fields<'_>,
    sampling: &mut Sampling,
    passes_infill: bool,
) -> Result<(), ApiError> {
    let Some(value) = fields.get(NAME) else {
        return Ok(());
    };
    let mut listed = Vec::new();
    for name in listed_names(fields, value)? {
        if passes_infill && (name == INFILL || name == "i") {
            fields.note_ignored([INFILL_PATH.to_owned()]);
            continue;
        }
        let is_called = |s: &Sampler| {
            let mut letter = [0; 4];
            s.names.contains(&name.as_str()) || *name == *s.letter.encode_utf8(&mut letter)
        };
        let Some(place) = SAMPLERS.iter().position(is_called) else {
            let all = names().collect::<Vec<_>>().join(", ");
            let message = format!("has `{}`, and the samplers are {all}", excerpt(&name));
            return Err(fields.error(NAME, message));
        };
        listed.push(place);
    }
    let fixed = listed.iter().filter(|&&place| !SAMPLERS[place].is_anywhere);
    if !fixed.is_sorted() {
        let order = names().filter(|name| *name != "temperature");
        let order = order.collect::<Vec<_>>().join(", ");
        let message = format!("asks for another order than {order}; list them in this one");
        return Err(fields.error(NAME, message));
    }
    // It stands for all of them.
    if sampling.mirostat == Mirostat::Off {
        let left_out = (0..SAMPLERS.len()).filter(|place| !listed.contains(place));
        left_out.for_each(|place| (SAMPLERS[place].turn_off)(sampling));
    }
    Ok(())
}

/// The names in a list, or in a string with `;` between them; or the letters of a string.
fn listed_names(fields: &Fields<'_>, value: &Value) -> Result<Vec<String>, ApiError> {
    let wrong = || fields.error(NAME, "must be a list of names, or a string of letters");
    match value {
        Value::String(text) => {
            let is_name = SAMPLERS.iter().any(|s| s.names.contains(&text.as_str()));
            Ok(match is_name || text.contains(';') {
                true => text
                    .split(';')
                    .filter(|name| !name.is_empty())
                    .map(str::to_owned)
                    .collect(),
                false => text.chars().map(String::from).collect(),
            })
        }
        Value::Array(list) => {
            let names = list.iter().map(|name| name.as_str().map(str::to_owned));
            names.collect::<Option<_>>().ok_or_else(wrong)
        }
        _ => Err(wrong()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::openai::tables::CHAT;
    use serde_json::json;

    fn set() -> Sampling {
        Sampling {
            temperature: 0.7,
            top_k: 5,
            top_p: 0.5,
            min_p: 0.1,
            typical_p: 0.9,
            top_n_sigma: 1.0,
            xtc_probability: 0.5,
            dry_multiplier: 1.0,
            repetition_penalty: 1.1,
            ..Sampling::default()
        }
    }

    fn read_from(value: Value, passes_infill: bool) -> Result<(Sampling, Vec<String>), String> {
        let body = json!({"samplers": value});
        let fields = Fields::new(body.as_object().unwrap(), &CHAT);
        let mut sampling = set();
        read(&fields, &mut sampling, passes_infill).map_err(|e| e.message.clone())?;
        Ok((sampling, fields.ignored()))
    }

    #[test]
    fn samplers_that_are_not_listed_do_nothing() {
        let some = Sampling {
            top_k: 5,
            top_p: 0.5,
            temperature: 0.7,
            ..Sampling::default()
        };
        for value in [
            json!(["top_k", "top_p", "temperature"]),
            json!(["temp", "top-k", "nucleus"]),
            json!("kpt"),
            json!("top_k;top_p;temperature"),
        ] {
            assert_eq!(read_from(value.clone(), false).unwrap().0, some, "{value}");
        }
        let all = json!([
            "penalties",
            "dry",
            "top_n_sigma",
            "top_k",
            "typ_p",
            "top_p",
            "min_p",
            "xtc",
            "temperature"
        ]);
        assert_eq!(read_from(all, false).unwrap().0, set());
        assert_eq!(read_from(json!("edskypmxt"), false).unwrap().0, set());
        let none = read_from(json!([]), false).unwrap().0;
        assert_eq!(
            none,
            Sampling {
                temperature: 1.0,
                ..Sampling::default()
            }
        );
        assert_eq!(read_from(json!("top_k"), false).unwrap().0.top_k, 5);
    }

    #[test]
    fn other_samplers_and_other_orders_are_refused() {
        for (value, told) in [
            (
                json!(["top_p", "top_k"]),
                "another order than penalties, dry, top_n_sigma",
            ),
            (json!("pk"), "another order"),
            (
                json!(["top_a"]),
                "has `top_a`, and the samplers are penalties, dry",
            ),
            (json!(["infill"]), "has `infill`"),
            (json!([1]), "must be a list of names"),
            (json!(7), "must be a list of names"),
        ] {
            let error = read_from(value.clone(), false).unwrap_err();
            assert!(error.contains(told), "{value}: {error}");
        }
        let (sampling, ignored) = read_from(json!(["top_k", "infill"]), true).unwrap();
        assert_eq!((sampling.top_k, sampling.top_p), (5, 1.0));
        assert_eq!(ignored, ["samplers.infill"]);
    }
}
