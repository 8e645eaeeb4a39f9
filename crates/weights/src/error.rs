//! Why a checkpoint could not be loaded.

use std::path::PathBuf;

/// Why a checkpoint could not be loaded. Each message is one line and names the
/// tensor or file at fault; nothing of it was loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// A file exists but cannot be read.
    #[error("cannot read `{path}`: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: std::io::Error,
    },
    /// The folder has no `config.json`, or is none.
    #[error("no `config.json` in `{folder}`")]
    MissingConfig {
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// The folder has a `config.json` but no weights that can be read.
    #[error("no `model.safetensors` or `model.safetensors.index.json` in `{folder}`")]
    MissingWeights {
        /// Where they were looked for.
        folder: PathBuf,
    },
    /// A JSON file is not what it should be.
    #[error("{reason} in `{file}`")]
    BadJson {
        /// What is wrong, with line and column where known.
        reason: String,
        /// The file.
        file: String,
    },
    /// `config.json` lacks a field.
    #[error("`config.json` has no {field}")]
    MissingField {
        /// The field, or the fields of which one is needed.
        field: &'static str,
    },
    /// A file, or a list in it, is longer than any real one.
    #[error("{what} is {found}, more than the limit of {limit}, in `{file}`")]
    TooLarge {
        /// What is too large, and its unit.
        what: &'static str,
        /// The size found.
        found: u64,
        /// The limit.
        limit: u64,
        /// The file.
        file: String,
    },
    /// One of the files of a split model does not exist.
    #[error("the model is in {of} files, of which `{part}` does not exist")]
    MissingPart {
        /// The missing file.
        part: PathBuf,
        /// How many there should be.
        of: usize,
    },
    /// A GGUF file holds a model of a kind that is not known.
    #[error("`{file}` is of architecture `{found}`; known are {known}")]
    UnknownArchitecture {
        /// `general.architecture`.
        found: String,
        /// What can be read.
        known: String,
        /// The file.
        file: String,
    },
    /// The index names a file that would lie outside the folder or is no
    /// safetensors file.
    #[error("the index names `{shard}`, which is no safetensors file inside the folder")]
    BadShardName {
        /// The name as written, escaped.
        shard: String,
    },
    /// The index names a file that does not exist.
    #[error("the index puts tensor `{name}` into `{shard}`, which does not exist")]
    MissingShard {
        /// One of its tensors.
        name: String,
        /// The missing file.
        shard: String,
    },
    /// The index puts a tensor into a file that does not contain it.
    #[error("the index puts tensor `{name}` into `{shard}`, which does not contain it")]
    NotInShard {
        /// The tensor.
        name: String,
        /// The file.
        shard: String,
    },
    /// A file ends before its header does.
    #[error("the file ends after {found} bytes, its header needs {needed}, in `{file}`")]
    Truncated {
        /// Bytes the file has.
        found: u64,
        /// Bytes that the eight-byte length and the header take.
        needed: u64,
        /// The file.
        file: String,
    },
    /// A header cannot be read.
    #[error("malformed header: {reason}, in `{file}`")]
    BadHeader {
        /// What is wrong, with the column, which is the byte of the header.
        reason: String,
        /// The file.
        file: String,
    },
    /// One entry of a header makes no sense.
    #[error("tensor `{name}` {reason}, in `{file}`")]
    BadTensor {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        reason: String,
        /// The file.
        file: String,
    },
    /// A tensor's data lies outside its file.
    #[error(
        "tensor `{name}` ends at byte {end} of {len}: the file is cut short or its header wrong, in `{file}`"
    )]
    OutOfFile {
        /// The tensor.
        name: String,
        /// Where its data would end in the data area.
        end: u64,
        /// How long the data area is.
        len: u64,
        /// The file.
        file: String,
    },
    /// Two tensors of one file share bytes.
    #[error("tensors `{first}` and `{second}` overlap, in `{file}`")]
    Overlap {
        /// The one that begins first.
        first: String,
        /// The other.
        second: String,
        /// The file.
        file: String,
    },
    /// Two stored tensors have the same meaning.
    #[error("`{name}` is stored twice: {first} and {second}")]
    NameClash {
        /// The canonical name.
        name: String,
        /// Stored name and file of the first.
        first: String,
        /// Stored name and file of the second.
        second: String,
    },
    /// The model needs a tensor that the checkpoint lacks.
    #[error("tensor `{name}` is missing")]
    MissingTensor {
        /// The canonical name.
        name: String,
    },
    /// One of the tensors that make a weight together is missing.
    #[error("tensor `{name}` is missing, without which `{of}` means nothing")]
    MissingCompanion {
        /// The canonical name.
        name: String,
        /// What is there.
        of: String,
    },
    /// Scales cover no known part of their matrix.
    #[error(
        "tensor `{name}` has shape {found:?}, but a matrix {of:?} needs one scale, one a row, one for some columns of a row, or one for each block of {block:?}"
    )]
    WrongScales {
        /// The canonical name.
        name: String,
        /// Shape of the scales.
        found: Vec<usize>,
        /// Rows and columns of the matrix.
        of: Vec<usize>,
        /// Rows and columns of a block.
        block: Vec<usize>,
    },
    /// A factor of scales is zero, infinite or no number.
    #[error("element {at} of tensor `{name}` is {value}, which cannot be a factor of scales")]
    BadFactor {
        /// The canonical name.
        name: String,
        /// Which element.
        at: usize,
        /// The value found.
        value: f32,
    },
    /// The model needs a tensor that is stored in a format that cannot be read.
    #[error("tensor `{name}` is stored in {format} format, which cannot be read")]
    UnknownFormat {
        /// The canonical name.
        name: String,
        /// The format its companions belong to.
        format: &'static str,
    },
    /// A tensor has another shape than the config implies.
    #[error("tensor `{name}` has shape {found:?}, expected {expected:?}")]
    WrongShape {
        /// The canonical name.
        name: String,
        /// What the model asked for.
        expected: Vec<usize>,
        /// What is stored.
        found: Vec<usize>,
    },
    /// Packed codes and scales do not fit the matrix the model asked for.
    #[error(
        "tensor `{name}` packs words {words:?} with scales {scales:?}, which is no known form of {expected:?}"
    )]
    WrongGroups {
        /// The canonical name.
        name: String,
        /// `[rows, cols]` the model asked for.
        expected: Vec<usize>,
        /// Shape of the packed words.
        words: Vec<usize>,
        /// Shape of the scales.
        scales: Vec<usize>,
    },
    /// A tensor's element type cannot be used where the model wants it.
    #[error("tensor `{name}` is stored as {found}, but {wanted} is needed here")]
    WrongType {
        /// The canonical name.
        name: String,
        /// The stored type.
        found: String,
        /// What would do.
        wanted: &'static str,
    },
    /// An integer is negative or too large for a token id.
    #[error("element {at} of tensor `{name}` is {value}, which is no 32-bit unsigned number")]
    NotUnsigned {
        /// The canonical name.
        name: String,
        /// Which element.
        at: usize,
        /// The value found.
        value: i64,
    },
    /// Whether norms hold `w` or `1 + w` cannot be told: two signs disagree.
    /// Guessing would give fluent but wrong output.
    #[error(
        "cannot tell whether the norms of the {part} hold `w` or `1 + w`: {one}, but {other}; convert the original again"
    )]
    NormsDisagree {
        /// The part of the model: trunk or MTP head.
        part: &'static str,
        /// The first fact.
        one: String,
        /// The fact that contradicts it.
        other: String,
    },
}

/// Text of a stranger made fit for one line of a message: control characters
/// escaped, the end cut off.
pub(crate) fn printable(text: &str) -> String {
    const MAX_CHARS: usize = 200;
    let mut out: String = text
        .chars()
        .take(MAX_CHARS)
        .flat_map(|c| {
            if c.is_control() {
                c.escape_default().collect::<Vec<_>>()
            } else {
                vec![c]
            }
        })
        .collect();
    if text.chars().nth(MAX_CHARS).is_some() {
        out.push('…');
    }
    out
}
