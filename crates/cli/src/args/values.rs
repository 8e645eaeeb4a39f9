//! How values of more than one option are spelled: numbers of things and formats of weights.

use quant::Format;

/// A number of things: digits, with `k` or `m` for 1024 or 1024².
pub(super) fn count(text: &str) -> Result<usize, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'k' | b'K') => (&text[..text.len() - 1], 1 << 10),
        Some(b'm' | b'M') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let number: Option<usize> = digits.parse().ok().and_then(|n: usize| n.checked_mul(unit));
    number.ok_or_else(|| "expected a number such as 4096 or 4k".into())
}

/// A number of things of which there is at least one.
pub(super) fn some(text: &str) -> Result<usize, String> {
    match count(text) {
        Ok(n) if n > 0 => Ok(n),
        _ => Err("expected a number from 1 on".into()),
    }
}

/// Short names of formats.
const SHORT_FORMATS: &[(&str, &str)] = &[
    ("q2", "affine2-g64"),
    ("q3", "affine3-g64"),
    ("q4", "affine4-g64"),
    ("q5", "affine5-g64"),
    ("q6", "affine6-g64"),
    ("q8", "affine8-g64"),
];

/// The format called `name`, in full or in short.
fn named_format(name: &str) -> Option<&'static Format> {
    let long = SHORT_FORMATS.iter().find(|(short, _)| *short == name);
    quant::format(long.map_or(name, |(_, long)| long))
}

/// The names of formats that folders of safetensors can have.
fn folder_formats() -> String {
    let short = SHORT_FORMATS.iter().map(|(short, _)| *short);
    let long = convert::Container::Safetensors.formats().map(|f| f.name);
    short.chain(long).collect::<Vec<_>>().join(", ")
}

/// A format that weights are written in.
pub(super) fn weight_format(name: &str) -> Result<&'static Format, String> {
    named_format(name).ok_or_else(|| {
        let in_folders = |f: &&'static Format| convert::Container::Safetensors.holds(f);
        let others = convert::Container::Gguf
            .formats()
            .filter(|f| !in_folders(f));
        let others: Vec<_> = others.map(|f| f.name).collect();
        format!(
            "known are {}; GGUF files can also have {}",
            folder_formats(),
            others.join(", ")
        )
    })
}

/// A format that weights are brought to in memory.
pub(super) fn load_format(name: &str) -> Result<&'static Format, String> {
    match named_format(name) {
        Some(format) if convert::Container::Safetensors.holds(format) => Ok(format),
        Some(_) => Err(
            "weights are loaded as q2 to q8, affineN-gM, bf16, f16 or f32; `paceline convert` writes the others".into(),
        ),
        None => Err(format!("known are {}", folder_formats())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_have_units() {
        assert_eq!(count("4096"), Ok(4096));
        assert_eq!(count("32k"), Ok(32 << 10));
        assert_eq!(count("1M"), Ok(1 << 20));
        for bad in [
            "",
            "k",
            "4.5",
            "-1",
            "99999999999999999999",
            "9999999999999999m",
        ] {
            assert!(count(bad).is_err() && some(bad).is_err(), "{bad}");
        }
        assert_eq!((count("0"), some("8")), (Ok(0), Ok(8)));
        assert!(some("0").is_err());
    }

    #[test]
    fn formats_have_short_names() {
        assert!(load_format("q8").is_ok() && load_format("bf16").is_ok());
        assert!(load_format("q4_0").unwrap_err().contains("convert"));
    }
}
