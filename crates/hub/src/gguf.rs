//! Which GGUF files of a repository are one model.
//!
//! A repository holds the same model in many formats, each one file or several parts,
//! in the root or in a folder of its own; only names tell them apart. `Q4_K_M` chooses
//! `model-Q4_K_M.gguf`, `model.Q4_K_M-00001-of-00002.gguf` and its other parts, or
//! `Q4_K_M/model.gguf`, in either case.

use crate::HubError;
use crate::error::line;
use std::collections::BTreeSet;

/// The ending of a GGUF file's name.
const SUFFIX: &str = ".gguf";
/// The formats to choose from if nobody asks for one, the best first, as in other programs.
const DEFAULTS: &[&str] = &["Q4_K_M", "Q8_0"];
/// Beginnings of the names of files that are not models: image projectors, statistics for
/// quantization, draft heads.
const NO_MODELS: &[&str] = &["mmproj", "imatrix", "mtp-"];
/// The beginning of the names of files of vision towers.
const TOWER: &str = "mmproj";
/// Formats of vision towers, the one first that is taken where there are several.
const TOWER_FORMATS: &[&str] = &["bf16", "f16", "f32", "q8_0"];
/// Most models that a message lists.
const LISTED: usize = 12;

/// Chooses the files of one model among `names`: the model in the format `quant`, or if none is
/// asked for the only model, or the one in a usual format. The files are in the order of their
/// parts. `what` names the repository for errors.
///
/// # Errors
///
/// [`HubError::NoQuant`] with the models that there are, if none fits or several do.
pub fn files<'n>(
    names: impl IntoIterator<Item = &'n str>,
    quant: Option<&str>,
    what: &str,
) -> Result<Vec<&'n str>, HubError> {
    let mut names: Vec<&str> = names.into_iter().filter(|name| is_model(name)).collect();
    names.sort_unstable();
    let models: BTreeSet<&str> = names.iter().map(|name| model(name)).collect();
    let in_format = |quant: &str| -> Vec<&str> {
        let has = |model: &&&str| formats(model).any(|word| word.eq_ignore_ascii_case(quant));
        models.iter().filter(has).copied().collect()
    };
    let found = match quant {
        Some(quant) => in_format(quant),
        None if models.len() == 1 => models.iter().copied().collect(),
        None => {
            let usual = DEFAULTS.iter().map(|quant| in_format(quant));
            usual
                .into_iter()
                .find(|found| !found.is_empty())
                .unwrap_or_default()
        }
    };
    let &[one] = &found[..] else {
        let listed: Vec<String> = models
            .iter()
            .take(LISTED)
            .map(|m| format!("`{}`", line(m)))
            .collect();
        return Err(HubError::NoQuant {
            what: what.to_owned(),
            wanted: match quant {
                Some(quant) => format!("the format `{}`", line(quant)),
                None => format!("the usual formats {}", DEFAULTS.join(" and ")),
            },
            found: found.len(),
            known: listed.join(", "),
        });
    };
    names.retain(|name| model(name) == one);
    Ok(names)
}

/// The file of the vision tower, `mmproj`, among `names` that goes with the model whose first file is
/// `model`: one in its folder before one in the root, in the format that most towers are published
/// in before others.
pub fn tower<'n>(names: impl IntoIterator<Item = &'n str>, model: &str) -> Option<&'n str> {
    let folder = |name: &str| {
        name.rsplit_once('/')
            .map_or("", |(folder, _)| folder)
            .to_owned()
    };
    let (own, root) = (folder(model), String::new());
    let is_tower = |name: &&str| {
        let file = name.rsplit('/').next().unwrap_or(name).to_lowercase();
        file.ends_with(SUFFIX) && file.starts_with(TOWER)
    };
    let rank = |name: &str| {
        let stem = &name[..name.len() - SUFFIX.len()];
        let formats: Vec<String> = formats(stem).map(str::to_lowercase).collect();
        let known = TOWER_FORMATS.iter();
        let place = known
            .clone()
            .position(|known| formats.iter().any(|f| f == known));
        place.unwrap_or(known.len())
    };
    let towers = names.into_iter().filter(is_tower);
    let towers = towers.filter(|name| [&own, &root].contains(&&folder(name)));
    towers.min_by_key(|name| (folder(name) != own, rank(name), *name))
}

/// Whether a file is a GGUF model or a part of one.
fn is_model(name: &str) -> bool {
    let file = name.rsplit('/').next().unwrap_or(name).to_lowercase();
    file.ends_with(SUFFIX) && !NO_MODELS.iter().any(|begin| file.starts_with(begin))
}

/// The name of the model that a file belongs to: without its ending and the number of its part.
fn model(name: &str) -> &str {
    let stem = &name[..name.len() - SUFFIX.len()];
    let part = |stem: &'_ str| -> Option<usize> {
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (begin, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        (digits(number) && digits(count)).then_some(begin.len())
    };
    part(stem).map_or(stem, |end| &stem[..end])
}

/// The words in the name of a model that may be its format: its folders, and what follows each
/// `-` or `.` of the file's name.
fn formats(model: &str) -> impl Iterator<Item = &str> {
    let file = model.rsplit('/').next().unwrap_or(model);
    let ends = file
        .match_indices(['-', '.'])
        .map(move |(at, _)| &file[at + 1..]);
    let folders = model.split('/').rev().skip(1);
    ends.chain([file]).chain(folders)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &[&str] = &[
        "README.md",
        "imatrix.gguf",
        "mmproj-model-f16.gguf",
        "model-Q4_K_M.gguf",
        "model-Q4_K_S.gguf",
        "model-UD-Q4_K_XL.gguf",
        "model.q8_0-00001-of-00002.gguf",
        "model.q8_0-00002-of-00002.gguf",
        "BF16/model-00001-of-00002.gguf",
        "BF16/model-00002-of-00002.gguf",
    ];

    fn chosen(names: &[&'static str], quant: Option<&str>) -> Result<Vec<&'static str>, String> {
        files(names.iter().copied(), quant, "`org/model`").map_err(|e| e.to_string())
    }

    #[test]
    fn a_format_names_all_parts_of_one_model() {
        for (quant, expected) in [
            ("Q4_K_M", &["model-Q4_K_M.gguf"][..]),
            ("q4_k_m", &["model-Q4_K_M.gguf"]),
            ("UD-Q4_K_XL", &["model-UD-Q4_K_XL.gguf"]),
            ("Q4_K_XL", &["model-UD-Q4_K_XL.gguf"]),
            (
                "Q8_0",
                &[
                    "model.q8_0-00001-of-00002.gguf",
                    "model.q8_0-00002-of-00002.gguf",
                ],
            ),
            (
                "bf16",
                &[
                    "BF16/model-00001-of-00002.gguf",
                    "BF16/model-00002-of-00002.gguf",
                ],
            ),
        ] {
            assert_eq!(chosen(NAMES, Some(quant)).unwrap(), expected, "{quant}");
        }
        assert_eq!(chosen(NAMES, None).unwrap(), ["model-Q4_K_M.gguf"]);
        assert_eq!(chosen(&["any.gguf"], None).unwrap(), ["any.gguf"]);
    }

    #[test]
    fn a_model_has_the_tower_of_its_folder_or_of_the_root() {
        let names = [
            "README.md",
            "mmproj-F32.gguf",
            "mmproj-F16.gguf",
            "mmproj-BF16.gguf",
            "small/mmproj-model.gguf",
            "small/x-Q4_K_M.gguf",
            "large/x-Q4_K_M.gguf",
        ];
        let tower = |model| super::tower(names, model);
        assert_eq!(tower("x-Q4_K_M.gguf"), Some("mmproj-BF16.gguf"));
        assert_eq!(
            tower("small/x-Q4_K_M.gguf"),
            Some("small/mmproj-model.gguf")
        );
        assert_eq!(tower("large/x-Q4_K_M.gguf"), Some("mmproj-BF16.gguf"));
        assert_eq!(
            super::tower(["mmproj.gguf"], "a/b.gguf"),
            Some("mmproj.gguf")
        );
        assert_eq!(
            super::tower(["other/mmproj.gguf", "a.gguf"], "a.gguf"),
            None
        );
    }

    #[test]
    fn what_names_no_model_says_what_there_is() {
        let error = chosen(NAMES, Some("Q4_K")).unwrap_err();
        assert!(
            error.contains(
                "`org/model` has no GGUF model in the format `Q4_K`: add one format to the name"
            ),
            "{error}"
        );
        assert!(
            error.contains("`model-Q4_K_S`") && !error.contains("mmproj"),
            "{error}"
        );
        let twice = ["a-Q6_K.gguf", "b-Q6_K.gguf"];
        let error = chosen(&twice, Some("Q6_K")).unwrap_err();
        assert!(error.contains("has 2 GGUF models in the format"), "{error}");
        let error = chosen(&twice, None).unwrap_err();
        assert!(
            error.contains("in the usual formats Q4_K_M and Q8_0"),
            "{error}"
        );
        let error = chosen(&[], None).unwrap_err();
        assert_eq!(error, "`org/model` has no GGUF model");
    }
}
