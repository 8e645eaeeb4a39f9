//! A model's tensors on disk, by canonical name.

use crate::LoadError;
use crate::container::Dtype;
use crate::folding::Norms;
use crate::gguf::{Edit, Metadata, Place, Sizes};
use crate::names;
use crate::tensor::{File, Tensor, Writer};
use quant::Mapping;
use serde_json::Value;
use std::collections::{BTreeMap, btree_map};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
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
    /// How many of the last files are a tower's own.
    pub(crate) tower_files: usize,
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
    /// Who follows how much is read, if anyone does.
    pub(crate) follower: OnceLock<Follower>,
}

/// Whoever is told, with each tensor that is read, of the bytes read so far.
pub(crate) struct Follower {
    read: AtomicU64,
    tell: Box<dyn Fn(u64) + Send + Sync>,
}

impl Checkpoint {
    /// A checkpoint without tensors.
    pub(crate) fn empty(config: Value, config_bytes: Vec<u8>, files: Vec<File>) -> Checkpoint {
        Checkpoint {
            config,
            config_bytes,
            manifest: None,
            files,
            tower_files: 0,
            tensors: BTreeMap::new(),
            shadowed: Vec::new(),
            metadata: None,
            sizes: Sizes::default(),
            norms: Norms::default(),
            hash: OnceLock::new(),
            handed_out: AtomicUsize::new(0),
            follower: OnceLock::new(),
        }
    }

    /// Adds a tensor under its canonical name.
    ///
    /// # Errors
    ///
    /// If another tensor has the name, unless both are copies of one tied head.
    pub(crate) fn insert(&mut self, name: String, tensor: Tensor) -> Result<(), LoadError> {
        let describe = |t: &Tensor| format!("`{}` in `{}`", t.entry.name, self.files[t.file].name);
        match self.tensors.entry(name) {
            btree_map::Entry::Vacant(place) => {
                place.insert(tensor);
                Ok(())
            }
            btree_map::Entry::Occupied(first) => {
                let same = first.get().entry.shape == tensor.entry.shape
                    && first.get().entry.dtype == tensor.entry.dtype
                    && names::DUPLICATES.iter().any(|d| first.key().starts_with(d));
                let bytes = |t: &Tensor| &self.files[t.file].bytes[t.entry.range.clone()];
                if same && bytes(first.get()) == bytes(&tensor) {
                    return Ok(());
                }
                Err(LoadError::NameClash {
                    name: first.key().clone(),
                    first: describe(first.get()),
                    second: describe(&tensor),
                })
            }
        }
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
            .filter(|(name, t)| !t.is_used() && !names::is_of_activations(name))
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
    /// mapped files ([`quant::Stored::keep`]), on devices that can leave them there.
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
            Some(counts && weight.is_used())
        };
        let unread = self.tensors.iter().filter(|(name, tensor)| {
            name.starts_with(prefix) && !tensor.is_used() && of_read_weight(name) == Some(true)
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

    /// Whether tensor `name` lies in a GGUF file. A tower's file can be one where the model's own
    /// files are not.
    pub fn is_from_gguf(&self, name: &str) -> bool {
        let tensor = self.tensors.get(name);
        tensor.is_some_and(|tensor| self.writer(tensor) == Writer::Gguf)
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

    /// Whether tensor `name` has the bytes, the type and the shape of tensor `of`. Marks it used.
    ///
    /// # Errors
    ///
    /// If one of them is missing.
    pub fn is_copy(&self, name: &str, of: &str) -> Result<bool, LoadError> {
        let original = self.tensors.get(of).ok_or_else(|| self.missing(of))?;
        let copy = self.tensor(name)?;
        let (a, b) = (&copy.entry, &original.entry);
        let alike = (a.dtype, &a.shape) == (b.dtype, &b.shape);
        Ok(alike && self.data(copy) == self.data(original))
    }

    /// Has `tell` called with each tensor that is read from now on: with the bytes of all that were
    /// read since. The first follower stays.
    pub fn follow(&self, tell: impl Fn(u64) + Send + Sync + 'static) {
        let follower = Follower {
            read: AtomicU64::new(0),
            tell: Box::new(tell),
        };
        let _ = self.follower.set(follower);
    }

    /// Finds `name` and marks it used.
    pub(crate) fn tensor(&self, name: &str) -> Result<&Tensor, LoadError> {
        let tensor = self.tensors.get(name).ok_or_else(|| self.missing(name))?;
        tensor.mark_used();
        if let Some(Follower { read, tell }) = self.follower.get() {
            let bytes = tensor.entry.range.len() as u64;
            tell(read.fetch_add(bytes, Relaxed) + bytes);
        }
        Ok(tensor)
    }

    /// Why there is no `name`.
    fn missing(&self, name: &str) -> LoadError {
        if let Some(orphan) = self.orphan(name) {
            return orphan;
        }
        let module = name.strip_suffix("weight").unwrap_or(name);
        let foreign = names::FOREIGN
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

    /// Why there is no weight `name`, if a companion of it is there.
    pub(crate) fn orphan(&self, name: &str) -> Option<LoadError> {
        let module = name.strip_suffix("weight").unwrap_or(name);
        let own = names::COMPANIONS.iter().map(|end| format!("{name}{end}"));
        let mlx = ["scales", "biases"].map(|end| format!("{module}{end}"));
        let found = own.chain(mlx).find(|n| self.find(n).is_some())?;
        Some(self.without(name, &found))
    }

    /// The error of a tensor `missing` without which `of` means nothing.
    pub(crate) fn without(&self, missing: &str, of: &str) -> LoadError {
        LoadError::MissingCompanion {
            name: missing.into(),
            of: of.into(),
        }
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
