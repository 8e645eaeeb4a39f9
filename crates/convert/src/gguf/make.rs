//! A [`Recipe`] as one GGUF file.
//!
//! Vectors are written in `f32`. A matrix in a format that GGUF has not becomes one
//! that is near: affine groups of up to 4 bits `q4_1`, the others `q8_0`.

use super::{Store, TensorInfo, Writer};
use crate::ConvertError;
use crate::error::io_error;
use crate::partial::whole_or_nothing;
use crate::recipe::{Data, Item, Recipe};
use crate::safetensors::in_pieces;
use quant::{Format, Owned, Scalar, WeightLayout};
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;
use weights::gguf::{Export, Rewrite, Value};

impl Recipe<'_> {
    /// Writes the file `to`, with `keys` beside those of the configuration: the
    /// vocabulary's.
    ///
    /// # Errors
    ///
    /// [`ConvertError`]; a family that has no such files is one.
    pub fn write_gguf(
        &self,
        to: &Path,
        keys: &[(&str, Value<'_>)],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), ConvertError> {
        let text = self.config.get("text_config").filter(|c| c.is_object());
        let export = Export::of_config(&self.config, text.unwrap_or(&self.config));
        let export = export.ok_or_else(|| {
            ConvertError::Gguf(format!(
                "GGUF has no name for models of type {}",
                self.config["model_type"]
            ))
        })?;
        if let Some(field) = export.lacks() {
            return Err(ConvertError::Gguf(format!(
                "a {} file has no field for {field}, which this model needs: keep it as safetensors",
                export.architecture()
            )));
        }
        let metadata = export.metadata();
        let own = metadata
            .iter()
            .map(|(key, value)| (key.as_str(), value.clone()));
        let keys: Vec<_> = own.chain(keys.iter().cloned()).collect();
        let (parts, mut infos) = self.gguf_parts(&export)?;
        let derived = export.derived();
        infos.extend(derived.iter().map(|(name, values)| TensorInfo {
            name: (*name).into(),
            shape: vec![values.len()],
            store: Store::Numbers(&quant::F32),
        }));
        let total: usize = infos.iter().map(TensorInfo::bytes).sum();
        whole_or_nothing(to, |path| {
            let written = (|| -> io::Result<()> {
                let file = BufWriter::with_capacity(1 << 20, File::create(path)?);
                let mut writer = Writer::new(file, &keys, infos.clone())?;
                let mut done = 0;
                for ((item, rewrite), info) in parts.iter().zip(&infos) {
                    put(item, rewrite, info.store, &mut |bytes| {
                        done += bytes.len() as u64;
                        progress(done, total as u64);
                        writer.write(bytes)
                    })?;
                }
                for value in derived.iter().flat_map(|(_, values)| values) {
                    writer.write(&value.to_le_bytes())?;
                }
                writer.finish()?;
                Ok(())
            })();
            written.map_err(|source| io_error(path, source))
        })
    }

    /// Every tensor that a file has a place for, what happens to its values, and how it
    /// is stored.
    fn gguf_parts(
        &self,
        export: &Export,
    ) -> Result<(Vec<Part<'_>>, Vec<TensorInfo>), ConvertError> {
        let (mut parts, mut infos) = (Vec::new(), Vec::new());
        let heads = self.head_layers();
        for item in self.items.iter().filter(|item| !export.drops(&item.name)) {
            let named = export
                .name(&item.name)
                .filter(|(_, rewrite)| rewrite.expert().is_none());
            let (name, rewrite) = named.ok_or_else(|| {
                ConvertError::Gguf(format!(
                    "`{}` has no place in a {} file",
                    item.name,
                    export.architecture()
                ))
            })?;
            let store = store(item)?;
            let is_moved = !rewrite.is_nothing() && !rewrite.is_norm();
            match store {
                // Rows or columns that change places are encoded anew.
                Store::Numbers(format) if is_moved && !format.can_encode() => {
                    return Err(refused(item, format.name));
                }
                _ => {}
            }
            for name in [name].into_iter().chain(export.copies(&item.name, heads)) {
                infos.push(TensorInfo {
                    name,
                    shape: shape(item),
                    store,
                });
                parts.push((item, rewrite));
            }
        }
        Ok((parts, infos))
    }
}

/// A tensor, and what happens to its values on the way into a file.
type Part<'a> = (&'a Item<'a>, Rewrite);

/// The shape in the file: a convolution's channels are rows of taps.
fn shape(item: &Item<'_>) -> Vec<usize> {
    match &item.shape[..] {
        [channels, taps, 1] => vec![*channels, *taps],
        shape => shape.to_vec(),
    }
}

fn refused(item: &Item<'_>, format: &'static str) -> ConvertError {
    ConvertError::Format {
        name: item.name.clone(),
        format,
        container: "GGUF",
        remedy: "another format, such as q8_0",
    }
}

fn store(item: &Item<'_>) -> Result<Store, ConvertError> {
    let refused = |format| refused(item, format);
    Ok(match &item.data {
        Data::Raw {
            dtype: "I32" | "U32",
            ..
        } => Store::I32,
        Data::Raw { dtype: "I64", .. } => Store::I64,
        Data::Raw { dtype, .. } => return Err(refused(dtype)),
        Data::Matrix { .. } if item.shape.len() == 1 || item.shape.ends_with(&[1]) => {
            Store::Numbers(&quant::F32)
        }
        Data::Matrix { format, .. } => {
            Store::Numbers(stored_as(format).ok_or_else(|| refused(format.name))?)
        }
    })
}

/// The format in which a GGUF file holds matrices of `format`: the same one where GGUF
/// has it, else one that comes close; `None` where there is none.
///
/// ```
/// use convert::gguf::stored_as;
/// let name = |format| stored_as(quant::format(format)?).map(|f| f.name);
/// assert_eq!(name("q6_k"), Some("q6_k"));
/// assert_eq!(name("affine4-g64"), Some("q4_1"));
/// assert_eq!(name("fp8"), None);
/// ```
pub fn stored_as(format: &'static Format) -> Option<&'static Format> {
    match format.layout {
        _ if format.ggml.is_some() => Some(format),
        WeightLayout::Affine { bits, .. } => quant::format(if bits <= 4 { "q4_1" } else { "q8_0" }),
        _ => None,
    }
}

/// Writes the data of `item` as the file has it.
fn put(
    item: &Item<'_>,
    rewrite: &Rewrite,
    store: Store,
    sink: &mut dyn FnMut(&[u8]) -> io::Result<()>,
) -> io::Result<()> {
    let (
        Store::Numbers(format),
        Data::Matrix {
            format: stored,
            rows,
            ..
        },
    ) = (store, &item.data)
    else {
        let Data::Raw { bytes, .. } = &item.data else {
            unreachable!("`store` looks at the data");
        };
        if store != Store::I64 {
            return sink(bytes);
        }
        let values = bytes
            .chunks_exact(8)
            .map(|b| b.try_into().expect("eight bytes"));
        let mut values: Vec<i64> = values.map(i64::from_le_bytes).collect();
        rewrite.apply_integers(&mut values);
        let bytes: Vec<u8> = values.into_iter().flat_map(i64::to_le_bytes).collect();
        return sink(&bytes);
    };
    if rewrite.is_nothing() || rewrite.is_norm() {
        // A recipe's norms hold `1 + w`.
        let encoded = |rows: Owned| match format == *stored {
            true => rows,
            false => quant::encode(format, &rows.view().to_f32(), rows.cols, Scalar::F32),
        };
        return in_pieces(item, &encoded, &mut |rows| sink(&rows.codes));
    }
    // Rows or columns change places: all of the matrix at once.
    let mut values = rows(0..item.rows()).view().to_f32();
    let shape = shape(item);
    let (count, cols) = (shape[0], values.len() / shape[0]);
    rewrite
        .apply(&mut values, count, cols)
        .map_err(io::Error::other)?;
    sink(
        &quant::encode(
            format,
            &values,
            shape.last().copied().unwrap_or(1),
            Scalar::F32,
        )
        .codes,
    )
}
