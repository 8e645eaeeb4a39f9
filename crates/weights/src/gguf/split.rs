//! Models in several files, `NAME-00001-of-0000N.gguf`.

use super::value::Metadata;
use crate::LoadError;
use crate::container::MAX_FILES;
use std::path::{Path, PathBuf};

/// The end of a file's name.
pub(crate) const SUFFIX: &str = ".gguf";

/// The files that `path`, any of them, belongs to, in order; itself if its name
/// is no part's.
pub(crate) fn parts(path: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let name = path
        .file_name()
        .and_then(|n| n.to_str())
        .unwrap_or_default();
    let Some((stem, count)) = part(name) else {
        return Ok(vec![path.into()]);
    };
    if count > MAX_FILES {
        return Err(LoadError::TooLarge {
            what: "number of files",
            found: count as u64,
            limit: MAX_FILES as u64,
            file: name.into(),
        });
    }
    let all =
        (1..=count).map(|i| path.with_file_name(format!("{stem}-{i:05}-of-{count:05}{SUFFIX}")));
    let all: Vec<PathBuf> = all.collect();
    match all.iter().find(|path| !path.exists()) {
        None => Ok(all),
        Some(missing) => Err(LoadError::MissingPart {
            part: missing.clone(),
            of: count,
        }),
    }
}

/// Stem and number of parts, if `name` is that of a part.
fn part(name: &str) -> Option<(&str, usize)> {
    let (rest, count) = name.strip_suffix(SUFFIX)?.rsplit_once("-of-")?;
    let (stem, number) = rest.rsplit_once('-')?;
    let five = |digits: &str| digits.len() == 5 && digits.bytes().all(|b| b.is_ascii_digit());
    let count = (five(number) && five(count)).then(|| count.parse().ok())?;
    count.map(|count| (stem, count))
}

/// Holds what the files say of the split against their number and order.
pub(crate) fn check_parts<'a>(
    files: impl ExactSizeIterator<Item = (&'a str, Metadata<'a>)>,
) -> Result<(), LoadError> {
    let count = files.len() as u64;
    for (i, (file, metadata)) in files.enumerate() {
        let says = |key| metadata.scalar(key).and_then(|v| v.as_u64());
        let (no, of) = (says("split.no").unwrap_or(i as u64), says("split.count"));
        // A whole file may say that it is one of none.
        let of = of.filter(|n| *n > 0).unwrap_or(1);
        if (no, of) != (i as u64, count) {
            return Err(LoadError::BadHeader {
                reason: format!(
                    "it is part {} of {of}, but read as part {} of {count}",
                    no.saturating_add(1),
                    i + 1
                ),
                file: file.into(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_five_digits_are_parts() {
        assert_eq!(part("a-b-00002-of-00004.gguf"), Some(("a-b", 4)));
        for name in [
            "a.gguf",
            "a-2-of-4.gguf",
            "a-00001-of-00002.safetensors",
            "-of-.gguf",
            "a-+0001-of-00002.gguf",
        ] {
            assert_eq!(part(name), None, "{name}");
        }
    }
}
