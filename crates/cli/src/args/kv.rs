//! How `--kv` and its like are spelled: formats of keys and values, and the layers that are kept finer.

use engine::{KV_PRESETS, KvPlan};

/// The help of `--kv`.
pub(super) fn help() -> String {
    let names: Vec<&str> = quant::KV_FORMATS.iter().map(|format| format.name).collect();
    let presets = KV_PRESETS.iter();
    let presets: Vec<String> = presets
        .map(|(name, meaning)| format!("{name} is {meaning}"))
        .collect();
    format!(
        "Format of the KV cache, or of keys and values apart as K,V: {}. Names with rot- are rotated \
         first, turbo is TurboQuant. Rules after it keep some layers finer: protect=N the first and last N attention \
         layers, in q8_0 or as protect=N:FORMAT, window=FORMAT those with a sliding window, gqa=N keys that N query \
         heads share, in q8_0. {}",
        any_of(&names),
        presets.join("; ")
    )
}

/// `a, b or c`
fn any_of(names: &[&str]) -> String {
    match names {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        names => names.concat(),
    }
}

/// Formats and rules with commas between them.
pub(super) fn plan(text: &str) -> Result<KvPlan, String> {
    KvPlan::parse(text, ',').map_err(|error| error.to_string())
}

/// An entry of a list, in which commas part entries: formats and rules with plus signs between them.
pub(super) fn entry(text: &str) -> Result<KvPlan, String> {
    KvPlan::parse(text, '+').map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_may_be_that_of_keys_of_values_and_of_both() {
        for format in quant::KV_FORMATS {
            let name = format.name;
            assert_eq!(plan(name).unwrap(), KvPlan::both(format));
            for both in [format!("f32,{name}"), format!("{name},f16")] {
                let (k, v) = both.split_once(',').unwrap();
                let want = if k == v { k } else { &both };
                assert_eq!(plan(&both).unwrap().to_string(), want);
            }
            assert!(help().contains(name), "{name}");
        }
    }

    #[test]
    fn entries_of_lists_are_the_same_plans_with_plus_signs() {
        for both in [
            "f16",
            "q8_0,turbo4",
            "turbo",
            "turbo4,turbo3,protect=2:q8_0/turbo4,window=q8_0,gqa=off",
        ] {
            assert_eq!(entry(&both.replace(',', "+")), plan(both), "{both}");
        }
        for bad in ["", "f8", "bf16+", "+f16", "q8_0,q4_0", "bf16+f16+f32"] {
            assert!(entry(bad).is_err(), "{bad}");
        }
        let error = entry("turbo5").unwrap_err();
        assert!(
            error.contains("as in q8_0+turbo4, and turbo-safe and turbo"),
            "{error}"
        );
    }
}
