//! A model's tensors on disk, by canonical name.

use crate::LoadError;
use crate::assemble::assemble;
use crate::container::{Dtype, Entry};
use crate::error::printable;
use crate::folder;
use crate::gguf::{self, Edit, Metadata, Place, Sizes};
use crate::index::{INDEX, Index};
use crate::mapped::Bytes;
use crate::names;
use crate::norms::Norms;
use crate::quantized::{self, Derived};
use quant::{Mapping, Owned, Scalar, Stored};
use serde_json::Value;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, OnceLock};

/// Bytes handed out before the memory of what was mapped is given back.
const MAX_HANDED_OUT: usize = 32 << 20;

/// The named tensors of a model, mapped from its files.
///
/// Names are canonical (`names.rs`), whatever tool wrote the files. Asking for
/// a tensor marks it used, from any thread; [`Checkpoint::unused`] lists the
/// rest, so that a loader can say what it left out.
///
/// ```
/// # use weights::Checkpoint;
/// let header = br#"{"model.norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
/// let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// file.extend(header);
/// file.extend([1.0f32, 0.5].map(f32::to_le_bytes).concat());
/// let checkpoint = Checkpoint::from_bytes(r#"{"model_type": "tiny"}"#, vec![("model.safetensors".into(), file.into())])?;
/// assert_eq!(checkpoint.vector("norm.weight", 2)?, [1.0, 0.5]);
/// assert!(checkpoint.unused().is_empty());
/// # Ok::<(), weights::LoadError>(())
/// ```
pub struct Checkpoint {
    pub(crate) config: Value,
    /// The text of `config.json`; empty for a GGUF file.
    pub(crate) config_bytes: Vec<u8>,
    /// How the writer of an MTP head's own file wants the head to be used.
    pub(crate) manifest: Option<Value>,
    pub(crate) files: Vec<File>,
    /// Tensors by canonical name.
    pub(crate) tensors: BTreeMap<String, Tensor>,
    /// Tensors of an MTP head that are not used, since another file supplies the head.
    pub(crate) shadowed: Vec<String>,
    /// Where the metadata of a GGUF file lie, in the first of its parts.
    pub(crate) metadata: Option<BTreeMap<String, Place>>,
    /// Sizes that edits of GGUF files depend on.
    pub(crate) sizes: Sizes,
    pub(crate) norms: Norms,
    pub(crate) hash: OnceLock<String>,
    /// Bytes handed out since memory was last given back.
    pub(crate) handed_out: AtomicUsize,
}

/// A file of weights.
pub(crate) struct File {
    /// Relative to the folder.
    pub(crate) name: String,
    pub(crate) bytes: Bytes,
    pub(crate) writer: Writer,
}

/// Whose conventions a file follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Writer {
    HuggingFace,
    Mlx,
    Gguf,
}

/// A stored tensor, and what has been made of it.
pub(crate) struct Tensor {
    /// The file, by its place in [`Checkpoint::files`].
    pub(crate) file: usize,
    pub(crate) entry: Entry,
    used: AtomicBool,
    derived: OnceLock<Derived>,
    /// What the file's writer did to the values; `undone` holds them without it.
    pub(crate) edit: Edit,
    undone: OnceLock<Owned>,
}

impl Tensor {
    pub(crate) fn new(file: usize, entry: Entry, edit: Edit) -> Tensor {
        Tensor {
            file,
            entry,
            used: AtomicBool::new(false),
            derived: OnceLock::new(),
            edit,
            undone: OnceLock::new(),
        }
    }
}

impl Checkpoint {
    /// Opens a folder or a GGUF file. Weights are mapped, not read.
    ///
    /// A folder has `config.json`, weights in `model.safetensors` or in the files of
    /// `model.safetensors.index.json`, and an MTP head in a file of its own if there is
    /// one. A part of a split GGUF file stands for all of them.
    ///
    /// # Errors
    ///
    /// If a file is missing, cannot be mapped, or is malformed.
    pub fn open(path: &Path) -> Result<Checkpoint, LoadError> {
        if path.is_file() {
            let name = |path: &Path| {
                let name = path.file_name().unwrap_or_default();
                printable(&name.to_string_lossy())
            };
            let parts = gguf::parts(path)?;
            let files = parts
                .iter()
                .map(|path| Ok((name(path), Bytes::map(path)?)))
                .collect::<Result<_, LoadError>>()?;
            return gguf::assemble(files);
        }
        let folder = folder::open(path)?;
        let mut checkpoint = assemble(folder.config, folder.index, folder.files)?;
        checkpoint.manifest = folder.manifest;
        Ok(checkpoint)
    }

    /// Reads a checkpoint from memory: `config` is the text of `config.json`, `files`
    /// are names relative to the folder and contents, an index among them or not. Of a
    /// GGUF file, `files` are all parts in order, and `config` does not count.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::open`].
    pub fn from_bytes(
        config: &str,
        files: Vec<(String, Cow<'static, [u8]>)>,
    ) -> Result<Checkpoint, LoadError> {
        if files.iter().any(|(name, _)| name.ends_with(gguf::SUFFIX)) {
            let files = files.into_iter();
            return gguf::assemble(files.map(|(name, b)| (name, Bytes::Memory(b))).collect());
        }
        let mut index = None;
        let mut weights = Vec::new();
        for (name, bytes) in files {
            if name == INDEX {
                index = Some(Index::parse(bytes)?);
            } else {
                weights.push((name, Bytes::Memory(bytes)));
            }
        }
        weights.sort_by(|a, b| a.0.cmp(&b.0));
        assemble(config.into(), index, weights)
    }

    /// The metadata of a GGUF file; `None` for a folder.
    pub fn metadata(&self) -> Option<Metadata<'_>> {
        let places = self.metadata.as_ref()?;
        let bytes = &self.files.first()?.bytes;
        Some(Metadata { places, bytes })
    }

    /// The whole `config.json`, or what a GGUF file's metadata make of it.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// The language model's part of the configuration: `text_config`, or all of it where
    /// a text-only model has no such part.
    pub fn text_config(&self) -> &Value {
        self.config
            .get("text_config")
            .filter(|c| c.is_object())
            .unwrap_or(&self.config)
    }

    /// The name by which a registry finds the model: `architectures[0]`, or
    /// `model_type` where that is missing.
    pub fn architecture(&self) -> Result<&str, LoadError> {
        let listed = self.config.get("architectures").and_then(|a| a.get(0));
        let name = listed
            .or_else(|| self.config.get("model_type"))
            .and_then(Value::as_str);
        name.ok_or(LoadError::MissingField {
            field: "`architectures` or `model_type`",
        })
    }

    /// Whether tensor `name` is stored, as itself or packed.
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.tensors.contains_key(&format!("{name}_packed"))
    }

    /// The names of all stored tensors, sorted; scales and biases of quantized matrices
    /// have names of their own. [`Checkpoint::weight_names`] lists whole weights.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// The logical shape of `name`: of a quantized matrix `[…, out, in]`, not
    /// its packed words.
    ///
    /// `None` if there is no such tensor, or if it is quantized and its width
    /// cannot be told: 4 bits in groups of 32 and 2 bits in groups of 64 pack to
    /// the same shapes, and only `quantization` in the config, which may be wrong,
    /// separates them. [`Checkpoint::matrix`] is told the width and has no such
    /// doubt.
    pub fn shape(&self, name: &str) -> Option<Vec<usize>> {
        if let Some(shape) = self.quantized_shape(name) {
            return Some(shape);
        }
        let tensor = self.tensors.get(name)?;
        let mut shape = tensor.entry.shape.clone();
        if let Some((module, scales)) = self.scales_of(name) {
            let (words, groups) = (*shape.last()?, *scales.entry.shape.last()?);
            *shape.last_mut()? = self.packed_width(module, tensor, words, groups)?;
        }
        Some(shape)
    }

    /// Tensor `name` as a matrix `[rows, cols]`, the bytes where they lie.
    ///
    /// Plain elements, GGUF's blocks, or codes where scales are stored beside it
    /// (`quantized` has the layouts): bits and group follow from the shapes, whatever
    /// the config says. Where a GGUF file's writer moved rows or columns, they are
    /// moved back into memory of their own, kept until the checkpoint is dropped.
    /// Stacked and convolution weights count as matrices if their leading axes
    /// multiply to `rows` and the others to `cols`. Marks the tensor and its scales
    /// used.
    ///
    /// # Errors
    ///
    /// If it is missing, of another shape (none has no rows or no columns), or in a
    /// format that is no [`quant::Format`].
    pub fn matrix(&self, name: &str, rows: usize, cols: usize) -> Result<Stored<'_>, LoadError> {
        if rows == 0 || cols == 0 {
            return Err(LoadError::WrongShape {
                name: name.into(),
                expected: vec![rows, cols],
                found: self.tensor(name)?.entry.shape.clone(),
            });
        }
        if let Some(quantized) = self.quantized(name, rows, cols)? {
            return Ok(quantized);
        }
        let tensor = self.tensor(name)?;
        if tensor.entry.dtype.name == "U32" {
            // Packed codes, whose scales some writer has dropped.
            let module = name.strip_suffix("weight").unwrap_or(name);
            return Err(LoadError::MissingTensor {
                name: format!("{module}scales"),
            });
        }
        let shape = &tensor.entry.shape;
        // Blocks lie in rows of the innermost axis.
        let blocks = tensor.entry.dtype.block().0;
        if !splits_into(shape, rows, cols) || !cols.is_multiple_of(blocks) {
            return Err(LoadError::WrongShape {
                name: name.into(),
                expected: vec![rows, cols],
                found: shape.clone(),
            });
        }
        let stored = self.stored(name, tensor)?;
        Ok(Stored {
            rows,
            cols,
            ..stored
        })
    }

    /// A tensor of one piece with its natural rows, edits undone.
    fn stored<'a>(&'a self, name: &str, tensor: &'a Tensor) -> Result<Stored<'a>, LoadError> {
        let (rows, cols) = tensor.natural();
        let as_written = match tensor.entry.dtype.format {
            Some(format) => Stored::new(format, rows, cols, self.data(tensor)),
            None => Stored::plain(self.scalar(name, tensor)?, rows, cols, self.data(tensor)),
        };
        let as_written = Stored {
            mapping: self.mapping(tensor),
            ..as_written
        };
        let factor = format!("{name}_scale_2");
        let has_factor = as_written.format.name == "nvfp4" && self.find(&factor).is_some();
        let moves = tensor.edit.changes(&self.sizes);
        if !has_factor && !moves {
            return Ok(as_written);
        }
        let shape = &tensor.entry.shape;
        let count = shape[..shape.len().saturating_sub(2)].iter().product();
        let factors = self.factors(tensor, has_factor.then_some(&factor), count, f64::from)?;
        let undo = || {
            let undo = |stored: &Stored<'_>| tensor.edit.undo(&self.sizes, stored);
            if !has_factor {
                return undo(&as_written);
            }
            let each = &factors.factors;
            let times = quant::nvfp4_times(&as_written, |row| each[row * each.len() / rows]);
            if moves { undo(&times.view()) } else { times }
        };
        Ok(tensor.undone.get_or_init(undo).view())
    }

    /// Tensor `name` of `n` elements in all, whatever its axes, as `f32`. Marks
    /// it used.
    ///
    /// # Errors
    ///
    /// If it is missing, has another number of elements, or is not f32, f16 or
    /// bf16.
    pub fn vector(&self, name: &str, n: usize) -> Result<Vec<f32>, LoadError> {
        let tensor = self.tensor(name)?;
        self.scalar(name, tensor)?;
        tensor.has_elements(name, n)?;
        Ok(self.stored(name, tensor)?.to_f32())
    }

    /// Tensor `name` of `n` integers, none negative. Marks it used.
    ///
    /// # Errors
    ///
    /// If it is missing, has another number of elements, is not i64, i32, u32, u8
    /// or bool, or holds a number that does not fit.
    pub fn integers(&self, name: &str, n: usize) -> Result<Vec<u32>, LoadError> {
        self.integers_of(name, self.tensor(name)?, n)
    }

    /// [`Checkpoint::integers`] of a tensor that was found.
    pub(crate) fn integers_of(
        &self,
        name: &str,
        tensor: &Tensor,
        n: usize,
    ) -> Result<Vec<u32>, LoadError> {
        let bytes = self.data(tensor);
        let four = |b: &[u8]| <[u8; 4]>::try_from(b).expect("four bytes");
        let values: Box<dyn Iterator<Item = i64> + '_> = match tensor.entry.dtype.name {
            "I64" => Box::new(
                bytes
                    .chunks_exact(8)
                    .map(|b| i64::from_le_bytes(b.try_into().expect("eight bytes"))),
            ),
            "I32" => Box::new(
                bytes
                    .chunks_exact(4)
                    .map(move |b| i32::from_le_bytes(four(b)).into()),
            ),
            "U32" => Box::new(
                bytes
                    .chunks_exact(4)
                    .map(move |b| u32::from_le_bytes(four(b)).into()),
            ),
            "U8" | "BOOL" => Box::new(bytes.iter().map(|&b| b.into())),
            found => {
                return Err(LoadError::WrongType {
                    name: name.into(),
                    found: found.into(),
                    wanted: "i64, i32, u32, u8 or bool",
                });
            }
        };
        tensor.has_elements(name, n)?;
        let absolute = tensor.edit == Edit::Absolute;
        let checked = |(at, value): (usize, i64)| {
            let value = if absolute {
                value.saturating_sub(at as i64)
            } else {
                value
            };
            u32::try_from(value).map_err(|_| LoadError::NotUnsigned {
                name: name.into(),
                at,
                value,
            })
        };
        values.enumerate().map(checked).collect()
    }

    /// Names never asked for, sorted, and stored heads that another file
    /// replaces, with the file they lie in. Without scales of activations and of
    /// cached keys and values, which change no weight: activations are not rounded
    /// here as their writer rounded them.
    pub fn unused(&self) -> Vec<String> {
        let unused = self
            .tensors
            .iter()
            .filter(|(name, t)| !t.used.load(Relaxed) && !names::is_of_activations(name))
            .map(|(name, _)| name.clone());
        unused.chain(self.shadowed.iter().cloned()).collect()
    }

    /// The files of weights, relative to the folder, sorted.
    pub fn files(&self) -> impl Iterator<Item = &str> {
        self.files.iter().map(|f| f.name.as_str())
    }

    /// Bytes of all files of weights together.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.bytes.len() as u64).sum()
    }

    /// Whether a file of weights is mapped, and not in memory.
    pub fn is_mapped(&self) -> bool {
        self.mappings().next().is_some()
    }

    /// Whether matrices that are asked for from now on are to stay where they lie in
    /// mapped files ([`Stored::keep`]), on devices that can leave them there.
    pub fn keep_mapped(&self, keep: bool) {
        self.mappings().for_each(|mapping| mapping.stay(keep));
    }

    fn mappings(&self) -> impl Iterator<Item = &Arc<dyn Mapping>> {
        self.files.iter().filter_map(|file| file.bytes.mapping())
    }

    /// Every stored tensor's name and bytes, scales and biases on their own.
    pub fn sizes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.tensors()
            .map(|(name, tensor)| (name, self.data(tensor).len()))
    }

    /// Names that nothing has read although the weight of their module was: scales,
    /// zero points or biases without which the weight is another one. Activation
    /// scales, which change no weight, do not count.
    pub fn unread_companions(&self, prefix: &str) -> Vec<&str> {
        let of_read_weight = |name: &str| {
            let (module, part) = name.rsplit_once('.')?;
            let weight = self.tensors.get(&format!("{module}.weight"))?;
            let counts = !names::INERT_PARTS.iter().any(|inert| part.contains(inert));
            Some(counts && weight.used.load(Relaxed))
        };
        let unread = self.tensors.iter().filter(|(name, tensor)| {
            name.starts_with(prefix)
                && !tensor.used.load(Relaxed)
                && of_read_weight(name) == Some(true)
        });
        unread.map(|(name, _)| name.as_str()).collect()
    }

    pub(crate) fn tensors(&self) -> impl Iterator<Item = (&str, &Tensor)> {
        self.tensors
            .iter()
            .map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The bytes of `tensor`. A loader makes something else of them, so what was handed
    /// out before is soon two copies: now and then the mapped one is given back.
    pub(crate) fn data(&self, tensor: &Tensor) -> &[u8] {
        let bytes = &self.files[tensor.file].bytes[tensor.entry.range.clone()];
        if self.handed_out.fetch_add(bytes.len(), Relaxed) > MAX_HANDED_OUT {
            self.handed_out.store(0, Relaxed);
            self.files.iter().for_each(|file| file.bytes.release());
        }
        bytes
    }

    /// The mapping that `tensor` lies in, if its file is mapped.
    pub(crate) fn mapping(&self, tensor: &Tensor) -> Option<&Arc<dyn Mapping>> {
        self.files[tensor.file].bytes.mapping()
    }

    pub(crate) fn file_name(&self, tensor: &Tensor) -> &str {
        &self.files[tensor.file].name
    }

    pub(crate) fn writer(&self, tensor: &Tensor) -> Writer {
        self.files[tensor.file].writer
    }

    /// Finds `name` as stored.
    pub(crate) fn find(&self, name: &str) -> Option<&Tensor> {
        self.tensors.get(name)
    }

    /// Bytes, type and shape of `name` as stored. Marks it used.
    pub(crate) fn raw(&self, name: &str) -> Result<(&[u8], Dtype, Vec<usize>), LoadError> {
        let tensor = self.tensor(name)?;
        let entry = &tensor.entry;
        Ok((self.data(tensor), entry.dtype, entry.shape.clone()))
    }

    /// Finds `name` and marks it used.
    pub(crate) fn tensor(&self, name: &str) -> Result<&Tensor, LoadError> {
        let tensor = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        tensor.used.store(true, Relaxed);
        Ok(tensor)
    }

    /// Why there is no `name`.
    fn missing(&self, name: &str) -> LoadError {
        if let Some(orphan) = self.orphan(name) {
            return orphan;
        }
        let module = name.strip_suffix("weight").unwrap_or(name);
        let foreign = quantized::FOREIGN
            .iter()
            .find(|(end, _)| self.has(&format!("{module}{end}")));
        match foreign {
            Some((_, format)) => LoadError::UnknownFormat {
                name: name.into(),
                format,
            },
            None => LoadError::MissingTensor { name: name.into() },
        }
    }

    fn scalar(&self, name: &str, tensor: &Tensor) -> Result<Scalar, LoadError> {
        let dtype = tensor.entry.dtype;
        dtype.scalar().ok_or_else(|| LoadError::WrongType {
            name: name.into(),
            found: dtype.name.into(),
            wanted: "f32, f16 or bf16",
        })
    }

    /// Module path and scales of `name` if it is quantized.
    fn scales_of<'n>(&self, name: &'n str) -> Option<(&'n str, &Tensor)> {
        let module = name.strip_suffix(".weight")?;
        Some((module, self.tensors.get(&format!("{module}.scales"))?))
    }

    /// The columns of a quantized tensor, from its own entry or the default in
    /// the config's `quantization`, where the shapes confirm it.
    fn packed_width(
        &self,
        module: &str,
        tensor: &Tensor,
        words: usize,
        groups: usize,
    ) -> Option<usize> {
        let config = ["quantization", "quantization_config"]
            .iter()
            .find_map(|key| self.config.get(key))?;
        let stored = tensor.entry.name.strip_suffix(".weight")?;
        [config.get(stored), config.get(module), Some(config)]
            .into_iter()
            .flatten()
            .find_map(|settings| {
                let setting = |key| {
                    settings
                        .get(key)
                        .and_then(Value::as_u64)
                        .and_then(|v| usize::try_from(v).ok())
                };
                let (bits, group) = (setting("bits")?, setting("group_size")?);
                quant::affine(bits, group)?;
                let cols = groups.checked_mul(group)?;
                (cols.checked_mul(bits)? == words.checked_mul(32)?).then_some(cols)
            })
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let files: Vec<&str> = self.files().collect();
        f.debug_struct("Checkpoint")
            .field("files", &files)
            .field("n_tensors", &self.tensors.len())
            .finish_non_exhaustive()
    }
}

impl Tensor {
    /// What is derived from the codes here, once.
    pub(crate) fn derived(&self, derive: impl FnOnce() -> Derived) -> &Derived {
        self.derived.get_or_init(derive)
    }

    /// Rows and columns: the outermost axis and the others, of blocks the innermost
    /// axis and the others.
    pub(crate) fn natural(&self) -> (usize, usize) {
        let shape = &self.entry.shape;
        let split = match self.entry.dtype.format {
            Some(_) => shape.len() - 1,
            None => shape.len().min(1),
        };
        (
            shape[..split].iter().product(),
            shape[split..].iter().product(),
        )
    }

    fn has_elements(&self, name: &str, n: usize) -> Result<(), LoadError> {
        if self.entry.elements() != n {
            return Err(LoadError::WrongShape {
                name: name.into(),
                expected: vec![n],
                found: self.entry.shape.clone(),
            });
        }
        Ok(())
    }
}

/// Whether some leading axes multiply to `rows` and the rest to `cols`.
fn splits_into(shape: &[usize], rows: usize, cols: usize) -> bool {
    (0..=shape.len()).any(|at| {
        shape[..at].iter().product::<usize>() == rows
            && shape[at..].iter().product::<usize>() == cols
    })
}
