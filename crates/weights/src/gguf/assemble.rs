//! A checkpoint of one GGUF model: the tensors of its parts together, under canonical
//! names.

use super::edit::{Edit, Sizes};
use super::read::{Header, parse};
use super::{FileView, Metadata, check_parts};
use crate::LoadError;
use crate::checkpoint::Checkpoint;
use crate::container::Entry;
use crate::error::printable;
use crate::families::{Family, Towers};
use crate::mapped::Bytes;
use crate::tensor::{File, Tensor, Writer};
use quant::Scalar;
use serde_json::Value;
use std::collections::BTreeMap;

/// Elements of a tensor that a configuration follows from: longer than any list of
/// divisors.
const MAX_FLOATS: usize = 1 << 16;

/// The checkpoint of `parts`, files by name, in order.
pub(crate) fn assemble(parts: Vec<(String, Bytes)>) -> Result<Checkpoint, LoadError> {
    let headers = parts
        .iter()
        .map(|(name, bytes)| parse(bytes, name))
        .collect::<Result<Vec<_>, _>>()?;
    let metadata = |i: usize| Metadata {
        places: &headers[i].places,
        bytes: &parts[i].1,
    };
    check_parts((0..parts.len()).map(|i| (parts[i].0.as_str(), metadata(i))))?;
    let (names, config) = describe(&parts, &headers, metadata(0))?;
    let factors = factors(&names, &headers);
    let (mut places, mut stored) = (None, Vec::new());
    for header in headers {
        places.get_or_insert(header.places);
        stored.extend(header.entries);
    }
    let files = parts.into_iter().map(|(name, bytes)| File {
        name,
        bytes,
        writer: Writer::Gguf,
    });
    let mut checkpoint = Checkpoint::empty(config, Vec::new(), files.collect());
    checkpoint.metadata = places;
    checkpoint.sizes = Sizes::of(checkpoint.text_config());
    for ((file, name), entry) in names.into_iter().zip(stored) {
        let Some((name, edit)) = name else { continue };
        let tensor = Tensor::new(file, entry, edit);
        let factor = factors.get(&format!("{name}_scale_2"));
        let checked = prove_factor(&tensor, factor.map(String::as_str))
            .and_then(|()| prove_edit(&tensor, &checkpoint.sizes));
        checked.map_err(|reason| LoadError::BadTensor {
            name: tensor.entry.name.clone(),
            reason,
            file: checkpoint.file_name(&tensor).to_owned(),
        })?;
        checkpoint.insert(name, tensor)?;
    }
    Ok(checkpoint)
}

/// A tensor's file, and its canonical name and edit; none where the configuration
/// replaces it.
type Named = (usize, Option<(String, Edit)>);

/// What the tensors are called, in the order of the files and of their data, and the
/// configuration.
fn describe(
    parts: &[(String, Bytes)],
    headers: &[Header],
    metadata: Metadata<'_>,
) -> Result<(Vec<Named>, Value), LoadError> {
    let first = &parts[0].0;
    let bad = |reason: String| LoadError::BadHeader {
        reason,
        file: first.clone(),
    };
    let architecture = metadata.text("general.architecture");
    let architecture =
        architecture.ok_or_else(|| bad("`general.architecture` is missing".into()))?;
    let family = Family::named(&architecture).ok_or_else(|| LoadError::UnknownArchitecture {
        found: printable(&architecture),
        known: Family::all(),
        file: first.clone(),
    })?;
    let entries = by_name(parts, headers)?;
    let is_f32 = |entry: &Entry| entry.dtype.scalar() == Some(Scalar::F32);
    let view = FileView {
        metadata,
        family,
        architecture: &architecture,
        shape: &|name| Some(entries.get(name)?.1.shape.clone()),
        is_f32: &|name| entries.get(name).is_some_and(|(_, entry)| is_f32(entry)),
        floats: &|name| {
            let (file, entry) = entries.get(name)?;
            let bytes = &parts[*file].1[entry.range.clone()];
            let floats = is_f32(entry) && entry.elements() <= MAX_FLOATS;
            floats.then(|| {
                (0..entry.elements())
                    .map(|i| Scalar::F32.get(bytes, i))
                    .collect()
            })
        },
    };
    if family.is_tower() {
        let towers = Towers::of(&view).map_err(bad)?;
        let config = towers.config(&view).map_err(bad)?;
        let names = headers.iter().enumerate().flat_map(|(file, header)| {
            let canonical = |entry: &Entry| (towers.canonical(&entry.name), Edit::Same);
            (header.entries.iter()).map(move |entry| (file, Some(canonical(entry))))
        });
        return Ok((names.collect(), config));
    }
    let (layers, config) = (view.layers().map_err(bad)?, view.config().map_err(bad)?);
    let names = headers.iter().enumerate().flat_map(|(file, header)| {
        let has = |name: &str| entries.contains_key(name);
        let canonical = move |name: &str| family.canonical(name, layers, has);
        (header.entries.iter()).map(move |entry| (file, canonical(&entry.name)))
    });
    Ok((names.collect(), config))
}

/// All tensors by their name in the files, with the file.
fn by_name<'h>(
    parts: &[(String, Bytes)],
    headers: &'h [Header],
) -> Result<BTreeMap<&'h str, (usize, &'h Entry)>, LoadError> {
    let mut entries = BTreeMap::new();
    for (file, header) in headers.iter().enumerate() {
        for entry in &header.entries {
            if let Some((other, _)) = entries.insert(entry.name.as_str(), (file, entry)) {
                return Err(LoadError::NameClash {
                    name: entry.name.clone(),
                    first: format!("once in `{}`", parts[other].0),
                    second: format!("once in `{}`", parts[file].0),
                });
            }
        }
    }
    Ok(entries)
}

/// The tensors that are factors of another one's scales: name in the file by canonical
/// name.
fn factors(names: &[Named], headers: &[Header]) -> BTreeMap<String, String> {
    let entries = headers.iter().flat_map(|header| &header.entries);
    let named = names.iter().zip(entries);
    named
        .filter_map(|((_, name), entry)| Some((name.as_ref()?.0.clone(), entry.name.clone())))
        .filter(|(name, _)| name.ends_with("_scale_2"))
        .collect()
}

/// What is wrong with `tensor`, whose scales have the factor `factor`, if one.
fn prove_factor(tensor: &Tensor, factor: Option<&str>) -> Result<(), String> {
    match factor {
        Some(factor) if tensor.entry.dtype.name != "nvfp4" => Err(format!(
            "is {}, and has a factor `{factor}` that only nvfp4 can have",
            tensor.entry.dtype.name
        )),
        _ => Ok(()),
    }
}

/// What is wrong with `tensor` if the edit of its writer cannot be undone.
fn prove_edit(tensor: &Tensor, sizes: &Sizes) -> Result<(), String> {
    if !tensor.edit.changes(sizes) {
        return Ok(());
    }
    let dtype = tensor.entry.dtype;
    if dtype.format.is_none() && dtype.scalar().is_none() {
        return Err("is of integers".into());
    }
    let (rows, cols) = tensor.natural();
    tensor.edit.fits(sizes, rows, cols)
}
