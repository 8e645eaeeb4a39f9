//! How a [`KvPlan`] is written: `turbo4,turbo3,protect=2,window=q8_0,gqa=6`.
//!
//! ```text
//! plan    = start *("," rule)
//! start   = preset | format | format "," format          one for both, or that of keys and that of values
//! rule    = "protect=" ("off" | ("auto" | number) [":" pair])
//!         | "window=" ("off" | pair)
//!         | "gqa=" ("off" | number)
//! pair    = format | format "/" format
//! ```
//!
//! A rule after a preset takes the place of the preset's own. [`KvPlan`]'s `Display` writes every rule that is in
//! force and nothing else, so that plans that differ have texts that differ.

use super::{Ends, KvPlan, Protect, finer};
use backend::KvFormat;
use quant::kv::Q8_0;
use std::fmt;

/// Names of plans, and what they stand for.
pub const KV_PRESETS: &[(&str, &str)] = &[
    ("turbo-safe", "q8_0,turbo4,window=q8_0"),
    ("turbo", "turbo4,turbo3,protect=auto,window=q8_0,gqa=6"),
];

/// What protected layers have if nothing else is said.
const PROTECTED: KvFormat = KvFormat::both(&Q8_0);

/// Why a text is no [`KvPlan`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum KvPlanError {
    /// A format that does not exist.
    #[error(
        "`{name}` is none of {}; keys and values may differ, as in q8_0{separator}turbo4, and {} are \
         names of plans",
        names(quant::KV_FORMATS.iter().map(|f| f.name), ", "),
        names(KV_PRESETS.iter().map(|(name, _)| *name), " and ")
    )]
    Format {
        /// What was written.
        name: String,
        /// What parts formats and rules.
        separator: char,
    },
    /// A rule that does not exist, or that is not written as it has to be.
    #[error(
        "`{rule}` is no rule of a KV cache: rules are protect=N, protect=auto and protect=N:FORMAT for the first \
         and last attention layers, window=FORMAT for sliding windows, gqa=N for keys that N query heads share, \
         each also =off; another format of values comes after a slash, as in window=q8_0/turbo4"
    )]
    Rule {
        /// What was written.
        rule: String,
    },
    /// A rule that is given twice.
    #[error("`{name}` is given twice")]
    Twice {
        /// The rule's name.
        name: String,
    },
    /// A rule that changes nothing.
    #[error(
        "`{rule}` has no effect: {finest} is no finer than {base}; name a finer format or leave the rule out"
    )]
    NoEffect {
        /// What was written.
        rule: String,
        /// The formats of the rule.
        finest: String,
        /// The formats of the other layers.
        base: String,
    },
}

fn names<'a>(names: impl Iterator<Item = &'a str>, between: &str) -> String {
    names.collect::<Vec<_>>().join(between)
}

impl KvPlan {
    /// Reads a plan whose parts have `separator` between them, a comma if it stands alone.
    ///
    /// # Errors
    ///
    /// [`KvPlanError`].
    pub fn parse(text: &str, separator: char) -> Result<KvPlan, KvPlanError> {
        let format = |name: &str| {
            quant::kv_format(name).ok_or_else(|| KvPlanError::Format {
                name: name.to_owned(),
                separator,
            })
        };
        let mut parts = text.split(separator).peekable();
        let first = parts.next().unwrap_or_default();
        let preset = KV_PRESETS.iter().find(|(name, _)| *name == first);
        let mut plan = match preset {
            Some((_, meaning)) => KvPlan::parse(meaning, ',')?,
            None => {
                let k = format(first)?;
                let v = parts.next_if(|part| !part.contains('='));
                KvPlan::pair(KvFormat {
                    k,
                    v: v.map_or(Ok(k), format)?,
                })
            }
        };
        let mut seen = Vec::new();
        for part in parts {
            let unknown = || KvPlanError::Rule {
                rule: part.to_owned(),
            };
            let (name, value) = part.split_once('=').ok_or_else(unknown)?;
            if seen.contains(&name) {
                let name = name.to_owned();
                return Err(KvPlanError::Twice { name });
            }
            seen.push(name);
            let number = |text: &str| match text.parse() {
                Ok(n) if n > 0 => Ok(n),
                _ => Err(unknown()),
            };
            let pair = |text: &str| {
                let (k, v) = text.split_once('/').unwrap_or((text, text));
                Ok::<_, KvPlanError>(KvFormat {
                    k: format(k)?,
                    v: format(v)?,
                })
            };
            let raised = match (name, value) {
                ("protect", "off") => {
                    plan.protect = None;
                    continue;
                }
                ("window", "off") => {
                    plan.window = None;
                    continue;
                }
                ("gqa", "off") => {
                    plan.gqa = None;
                    continue;
                }
                ("protect", value) => {
                    let (layers, own) = match value.split_once(':') {
                        Some((layers, own)) => (layers, Some(own)),
                        None => (value, None),
                    };
                    let layers = match layers {
                        "auto" => Ends::Auto,
                        n => Ends::Exactly(number(n)?),
                    };
                    let format = own.map_or(Ok(PROTECTED), pair)?;
                    plan.protect = Some(Protect { layers, format });
                    format
                }
                ("window", value) => *plan.window.insert(pair(value)?),
                ("gqa", value) => {
                    plan.gqa = Some(number(value)?);
                    let v = plan.base.v;
                    KvFormat { k: &Q8_0, v }
                }
                _ => return Err(unknown()),
            };
            if finer(plan.base, raised) == plan.base {
                return Err(KvPlanError::NoEffect {
                    rule: part.to_owned(),
                    finest: match name {
                        "gqa" => Q8_0.name.to_owned(),
                        _ => raised.to_string(),
                    },
                    base: match name {
                        "gqa" => plan.base.k.name.to_owned(),
                        _ => plan.base.to_string(),
                    },
                });
            }
        }
        Ok(plan)
    }
}

/// A pair as rules have it.
struct Slashed(KvFormat);

impl fmt::Display for Slashed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KvFormat { k, v } = self.0;
        match k == v {
            true => f.write_str(k.name),
            false => write!(f, "{}/{}", k.name, v.name),
        }
    }
}

impl fmt::Display for KvPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.base)?;
        if let Some(Protect { layers, format }) = self.protect {
            match layers {
                Ends::Auto => f.write_str(",protect=auto")?,
                Ends::Exactly(n) => write!(f, ",protect={n}")?,
            }
            if format != PROTECTED {
                write!(f, ":{}", Slashed(format))?;
            }
        }
        if let Some(format) = self.window {
            write!(f, ",window={}", Slashed(format))?;
        }
        match self.gqa {
            Some(many) => write!(f, ",gqa={many}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> String {
        KvPlan::parse(text, ',').unwrap().to_string()
    }

    #[test]
    fn a_plan_is_written_as_it_is_read() {
        for text in [
            "bf16",
            "q8_0,turbo4",
            "turbo4,turbo3,protect=2",
            "turbo4,turbo3,protect=auto",
            "turbo3,protect=1:q8_0/turbo4",
            "turbo3,protect=12:bf16",
            "q4_0,window=q8_0",
            "q4_0,window=q8_0/q5_0,gqa=4",
            "turbo4,turbo3,protect=auto:f16,window=q8_0,gqa=6",
        ] {
            assert_eq!(read(text), text);
            let listed = text.replace(',', "+");
            assert_eq!(KvPlan::parse(&listed, '+').unwrap().to_string(), text);
        }
    }

    #[test]
    fn presets_are_plans_whose_rules_can_be_replaced() {
        assert_eq!(read("turbo-safe"), "q8_0,turbo4,window=q8_0");
        assert_eq!(
            read("turbo"),
            "turbo4,turbo3,protect=auto,window=q8_0,gqa=6"
        );
        for (name, meaning) in KV_PRESETS {
            assert_eq!(read(name), *meaning);
        }
        assert_eq!(
            read("turbo,protect=off,gqa=off"),
            "turbo4,turbo3,window=q8_0"
        );
        assert_eq!(read("turbo,window=off"), "turbo4,turbo3,protect=auto,gqa=6");
        assert_eq!(
            read("turbo,window=rot-q8_0/turbo4,protect=3,gqa=4"),
            "turbo4,turbo3,protect=3,window=rot-q8_0/turbo4,gqa=4"
        );
        assert_eq!(
            read("turbo-safe,protect=2,window=off"),
            "q8_0,turbo4,protect=2"
        );
        let listed = KvPlan::parse("turbo+protect=1", '+').unwrap();
        assert_eq!(listed, KvPlan::parse("turbo,protect=1", ',').unwrap());
    }

    #[test]
    fn other_texts_are_errors_that_say_what_is_wrong() {
        let error = |text| KvPlan::parse(text, ',').unwrap_err();
        for text in ["", "f8", "q4_k", "bf16,", ",f16", "q8_0,turbo", "turbo5"] {
            assert!(matches!(error(text), KvPlanError::Format { .. }), "{text}");
        }
        for text in ["q4_0,window=f8", "q4_0,protect=1:", "q4_0,window=q8_0/"] {
            assert!(matches!(error(text), KvPlanError::Format { .. }), "{text}");
        }
        for text in [
            "bf16,f16,f32",
            "turbo,q8_0",
            "q4_0,protect=0",
            "q4_0,protect=-1",
            "q4_0,protect=",
            "q4_0,gqa=x",
            "q4_0,gqa=0",
            "q4_0,layers=1",
        ] {
            assert!(matches!(error(text), KvPlanError::Rule { .. }), "{text}");
        }
        let twice = error("q4_0,gqa=6,gqa=off");
        assert_eq!(twice.to_string(), "`gqa` is given twice");
        for text in [
            "bf16,protect=2",
            "q8_0,window=q5_0",
            "q8_0,turbo4,gqa=6",
            "q5_0,protect=1:q4_0/q5_0",
        ] {
            let error = error(text);
            assert!(matches!(error, KvPlanError::NoEffect { .. }), "{error}");
        }
        assert!(
            error("bf16,protect=2")
                .to_string()
                .contains("q8_0 is no finer than bf16")
        );
        let listed = KvPlan::parse("turbo5", '+').unwrap_err().to_string();
        assert!(listed.contains("as in q8_0+turbo4"), "{listed}");
    }
}
