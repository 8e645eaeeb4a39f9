//! Writes a [`Recipe`] as a folder of safetensors (`checkpoints.md` §1 and §2).
//!
//! One `model.safetensors`, a few rows in memory at a time. Quantized matrices
//! become `weight`, `scales` and `biases`, and `config.json` says how they are
//! stored. The folder appears whole or not at all: it is written under another
//! name and renamed.

use crate::ConvertError;
use crate::error::io_error;
use crate::partial::whole_or_nothing;
use crate::recipe::{Data, Item, Recipe};
use quant::{Format, Owned, Scalar, WeightLayout};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::Path;
use weights::Checkpoint;

/// Values that are made at once, by one thread.
const PIECE: usize = 1 << 20;

impl Recipe<'_> {
    /// Writes the folder `to`, with `files` (name, contents) beside the weights.
    /// Calls `progress` with the bytes written and their total.
    ///
    /// # Errors
    ///
    /// [`ConvertError`]; a folder that exists is one.
    pub fn write(
        &self,
        to: &Path,
        files: &[(String, Vec<u8>)],
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), ConvertError> {
        whole_or_nothing(to, |folder| {
            let put = |name: &str, bytes: &[u8]| {
                let path = folder.join(name);
                fs::write(&path, bytes).map_err(|source| ConvertError::Io { path, source })
            };
            fs::create_dir(folder).map_err(|source| io_error(folder, source))?;
            let parts = self.parts()?;
            let config = serde_json::to_string_pretty(&self.described())
                .expect("JSON has no maps of other keys");
            put("config.json", config.as_bytes())?;
            for (name, bytes) in files {
                put(name, bytes)?;
            }
            let path = folder.join("model.safetensors");
            let written = File::create(&path).and_then(|mut file| {
                write_tensors(&mut file, &self.items, &parts, self.is_mlx, progress)
            });
            written.map_err(|source| io_error(&path, source))
        })
    }

    /// Writes the checkpoint in memory, ready to be loaded.
    ///
    /// # Errors
    ///
    /// [`ConvertError`], and what [`Checkpoint::from_bytes`] finds wrong.
    pub fn checkpoint(
        &self,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Checkpoint, ConvertError> {
        let mut file = io::Cursor::new(Vec::new());
        write_tensors(
            &mut file,
            &self.items,
            &self.parts()?,
            self.is_mlx,
            progress,
        )
        .map_err(|source| io_error(Path::new("memory"), source))?;
        let files = vec![("model.safetensors".to_owned(), file.into_inner().into())];
        Ok(Checkpoint::from_bytes(
            &self.described().to_string(),
            files,
        )?)
    }

    /// The configuration, with how its matrices are stored.
    fn described(&self) -> Value {
        let mut settings: BTreeMap<String, (usize, Value)> = BTreeMap::new();
        let modules = || {
            self.items.iter().filter_map(|item| match &item.data {
                Data::Matrix {
                    format:
                        Format {
                            layout: WeightLayout::Affine { bits, group },
                            ..
                        },
                    ..
                } => {
                    let module = stored_name(&item.name);
                    let module = module.strip_suffix(".weight").unwrap_or(&module).to_owned();
                    Some((
                        module,
                        item.rows() * item.cols(),
                        json!({"group_size": group, "bits": bits, "mode": "affine"}),
                    ))
                }
                _ => None,
            })
        };
        for (_, size, setting) in modules() {
            settings
                .entry(setting.to_string())
                .or_insert((0, setting))
                .0 += size;
        }
        let mut config = self.config.clone();
        let Some(object) = config.as_object_mut() else {
            return config;
        };
        object.remove("quantization");
        object.remove("quantization_config");
        // What most weights have is the default, the others are named.
        if let Some((_, default)) = settings.into_values().max_by_key(|(size, _)| *size) {
            let mut all: Map<String, Value> = default.as_object().cloned().unwrap_or_default();
            all.extend(
                modules()
                    .filter(|(.., setting)| *setting != default)
                    .map(|(name, _, setting)| (name, setting)),
            );
            object.insert("quantization".into(), Value::Object(all.clone()));
            object.insert("quantization_config".into(), Value::Object(all));
        }
        config
    }

    fn parts(&self) -> Result<Vec<Part>, ConvertError> {
        let mut parts = Vec::new();
        for (item, i) in self.items.iter().zip(0..) {
            let name = stored_name(&item.name);
            let (rows, cols) = (item.rows(), item.cols());
            let mut push =
                |name: String, dtype: &'static str, width: Option<usize>, bytes: usize| {
                    let mut shape = item.shape.clone();
                    if let (Some(last), Some(width)) = (shape.last_mut(), width) {
                        *last = width;
                    }
                    parts.push(Part {
                        item: i,
                        name,
                        dtype,
                        shape,
                        bytes,
                    });
                };
            match &item.data {
                Data::Raw { dtype, bytes } => push(name, dtype, None, bytes.len()),
                Data::Matrix { format, scale, .. } => match format.layout {
                    WeightLayout::Plain(scalar) => {
                        push(name, dtype(scalar), None, rows * format.code_bytes(cols))
                    }
                    WeightLayout::Affine { .. } => {
                        let module = name.strip_suffix(".weight").unwrap_or(&name);
                        let (words, groups) = (format.code_bytes(cols) / 4, format.scales(cols));
                        push(
                            format!("{module}.weight"),
                            "U32",
                            Some(words),
                            rows * words * 4,
                        );
                        for end in ["scales", "biases"] {
                            push(
                                format!("{module}.{end}"),
                                dtype(*scale),
                                Some(groups),
                                rows * groups * scale.bytes(),
                            );
                        }
                    }
                    WeightLayout::Block { .. } | WeightLayout::Scaled { .. } => {
                        return Err(ConvertError::Format {
                            name,
                            format: format.name,
                            container: "safetensors",
                            remedy: match format.ggml {
                                Some(_) => {
                                    "another format, such as affine8-g64, or write a GGUF file"
                                }
                                None => "another format, such as affine8-g64",
                            },
                        });
                    }
                },
            }
        }
        Ok(parts)
    }
}

/// One entry of the header.
struct Part {
    /// The item that it is a part of; the parts of one follow each other.
    item: usize,
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: usize,
}

/// The name in the file: trunk tensors lie under `model.`.
fn stored_name(canonical: &str) -> String {
    let is_trunk = ["layers.", "embed_tokens", "norm."]
        .iter()
        .any(|start| canonical.starts_with(start));
    if is_trunk {
        format!("model.{canonical}")
    } else {
        canonical.to_owned()
    }
}

fn dtype(scalar: Scalar) -> &'static str {
    match scalar {
        Scalar::F32 => "F32",
        Scalar::F16 => "F16",
        Scalar::Bf16 => "BF16",
    }
}

fn write_tensors(
    file: &mut (impl Write + Seek),
    items: &[Item<'_>],
    parts: &[Part],
    is_mlx: bool,
    progress: &mut dyn FnMut(u64, u64),
) -> io::Result<()> {
    let mut header = Map::new();
    if is_mlx {
        header.insert("__metadata__".into(), json!({"format": "mlx"}));
    }
    let mut offsets = Vec::with_capacity(parts.len());
    let mut end = 0;
    for part in parts {
        offsets.push(end);
        header.insert(part.name.clone(), json!({"dtype": part.dtype, "shape": part.shape, "data_offsets": [end, end + part.bytes]}));
        end += part.bytes;
    }
    let mut header = serde_json::to_vec(&header)?;
    // Tensors start at a multiple of eight bytes, as other writers have it.
    header.resize(header.len().next_multiple_of(8), b' ');
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let start = 8 + header.len();
    let mut written = 0;
    let mut rest = parts.iter().zip(&offsets).peekable();
    for (i, item) in items.iter().enumerate() {
        let mut at = Vec::with_capacity(3);
        while let Some((_, offset)) = rest.next_if(|(part, _)| part.item == i) {
            at.push((start + offset) as u64);
        }
        let mut put = |part: usize, bytes: &[u8]| -> io::Result<()> {
            if !bytes.is_empty() {
                file.seek(SeekFrom::Start(at[part]))?;
                file.write_all(bytes)?;
                at[part] += bytes.len() as u64;
                written += bytes.len() as u64;
                progress(written, end as u64);
            }
            Ok(())
        };
        match &item.data {
            Data::Raw { bytes, .. } => put(0, bytes)?,
            Data::Matrix { .. } => in_pieces(item, &|rows| rows, &mut |rows| {
                put(0, &rows.codes)?;
                put(1, &rows.scales)?;
                put(2, &rows.biases)
            })?,
        }
    }
    file.flush()
}

/// Makes the rows of `item` on all cores, changed by `edit`, and hands them over
/// in order, some at a time.
pub(crate) fn in_pieces(
    item: &Item<'_>,
    edit: &(dyn Fn(Owned) -> Owned + Sync),
    sink: &mut dyn FnMut(&Owned) -> io::Result<()>,
) -> io::Result<()> {
    let Data::Matrix { rows: make, .. } = &item.data else {
        return Ok(());
    };
    let (rows, step) = (item.rows(), PIECE.div_ceil(item.cols()));
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    for first in (0..rows).step_by(step * threads) {
        let ranges = (0..threads)
            .map(|t| first + t * step)
            .take_while(|&at| at < rows);
        let ranges: Vec<Range<usize>> = ranges.map(|at| at..(at + step).min(rows)).collect();
        let made: Vec<Owned> = std::thread::scope(|scope| {
            let others: Vec<_> = ranges[1..]
                .iter()
                .map(|r| scope.spawn(|| edit(make(r.clone()))))
                .collect();
            let mut made = vec![edit(make(ranges[0].clone()))];
            made.extend(others.into_iter().map(|t| {
                t.join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }));
            made
        });
        made.iter().try_for_each(&mut *sink)?;
    }
    Ok(())
}
