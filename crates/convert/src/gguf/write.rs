//! Writing GGUF files, version 3, as a stream.

use quant::Format;
use std::io::{Error, ErrorKind, Result, Write};
use weights::gguf::{ALIGNMENT, Kind, MAGIC, MAX_AXES, VERSION, Value};

/// One tensor that a [`Writer`] is to write.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// The name in the file, such as `blk.0.attn_q.weight`.
    pub name: String,
    /// The shape, outermost axis first, `[rows, cols]`: the file has the axes the other
    /// way round.
    pub shape: Vec<usize>,
    /// How the tensor's rows are stored.
    pub store: Store,
}

/// What the elements of a tensor in a GGUF file are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Store {
    /// Numbers in a format that GGUF has ([`Format::ggml`]).
    Numbers(&'static Format),
    /// 32-bit integers.
    I32,
    /// 64-bit integers.
    I64,
}

impl Store {
    /// The type's number in files; `None` for a format that GGUF has not.
    pub fn ggml(self) -> Option<u32> {
        match self {
            Store::Numbers(format) => format.ggml,
            Store::I32 => Some(26),
            Store::I64 => Some(27),
        }
    }
}

impl TensorInfo {
    /// Bytes of the tensor's data, without padding.
    pub fn bytes(&self) -> usize {
        let (cols, rows) = self.shape.split_last().map_or((1, 1), |(cols, rows)| {
            (*cols, rows.iter().product::<usize>())
        });
        match self.store {
            Store::Numbers(format) => rows * format.code_bytes(cols),
            Store::I32 => 4 * rows * cols,
            Store::I64 => 8 * rows * cols,
        }
    }
}

/// Writes a file: all metadata and the list of tensors at once, then the tensors'
/// bytes in the same order, in pieces of any size.
///
/// ```
/// # use convert::gguf::{Store, TensorInfo, Writer};
/// let tensors = vec![TensorInfo {
///     name: "output_norm.weight".into(),
///     shape: vec![2],
///     store: Store::Numbers(&quant::F32),
/// }];
/// let mut writer = Writer::new(Vec::new(), &[("general.architecture", "gemma4".into())], tensors)?;
/// writer.write(&1f32.to_le_bytes())?;
/// writer.write(&2f32.to_le_bytes())?;
/// let file = writer.finish()?;
/// assert!(file.starts_with(b"GGUF"));
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Writer<W> {
    out: W,
    tensors: Vec<TensorInfo>,
    /// The tensor whose bytes come next, and how many of them are written.
    next: usize,
    written: usize,
}

impl<W: Write> Writer<W> {
    /// Writes everything but the tensors' bytes. A key `general.alignment` must
    /// not be among the metadata: files have the default.
    ///
    /// # Errors
    ///
    /// What `out` says, and `InvalidInput` for a tensor in a format that GGUF has
    /// not, with more axes than it allows, or whose rows are not whole blocks.
    pub fn new(
        mut out: W,
        metadata: &[(&str, Value<'_>)],
        tensors: Vec<TensorInfo>,
    ) -> Result<Self> {
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        header.extend((tensors.len() as u64).to_le_bytes());
        header.extend((metadata.len() as u64).to_le_bytes());
        for (key, value) in metadata {
            write_text(&mut header, key);
            header.extend((value.kind() as u32).to_le_bytes());
            write_value(&mut header, value);
        }
        let mut offset = 0u64;
        for tensor in &tensors {
            let ggml = prove(tensor)?;
            write_text(&mut header, &tensor.name);
            header.extend((tensor.shape.len() as u32).to_le_bytes());
            for &axis in tensor.shape.iter().rev() {
                header.extend((axis as u64).to_le_bytes());
            }
            header.extend(ggml.to_le_bytes());
            header.extend(offset.to_le_bytes());
            offset += tensor.bytes().next_multiple_of(ALIGNMENT) as u64;
        }
        header.resize(header.len().next_multiple_of(ALIGNMENT), 0);
        out.write_all(&header)?;
        Ok(Writer {
            out,
            tensors,
            next: 0,
            written: 0,
        })
    }

    /// The tensor whose bytes come next.
    pub fn expects(&self) -> Option<&TensorInfo> {
        self.tensors.get(self.next)
    }

    /// Writes the next `bytes` of the tensors' data. A call may end within a
    /// tensor but not reach into the following one.
    ///
    /// # Errors
    ///
    /// What the output says, and `InvalidInput` if the bytes are more than the
    /// tensor has left.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let Some(tensor) = self.tensors.get(self.next) else {
            return Err(refused("bytes after the last tensor".into()));
        };
        let len = tensor.bytes();
        if bytes.len() > len - self.written {
            return Err(refused(format!(
                "tensor `{}` has {len} bytes, given are {} after {}",
                tensor.name,
                bytes.len(),
                self.written
            )));
        }
        self.out.write_all(bytes)?;
        self.written += bytes.len();
        if self.written == len {
            let padding = len.next_multiple_of(ALIGNMENT) - len;
            self.out.write_all(&[0; ALIGNMENT][..padding])?;
            (self.next, self.written) = (self.next + 1, 0);
        }
        Ok(())
    }

    /// Ends the file and gives the output back.
    ///
    /// # Errors
    ///
    /// What the output says when it is flushed, and `InvalidInput` if bytes of a
    /// tensor are missing.
    pub fn finish(mut self) -> Result<W> {
        if let Some(tensor) = self.expects() {
            return Err(refused(format!("tensor `{}` is not whole", tensor.name)));
        }
        self.out.flush()?;
        Ok(self.out)
    }
}

/// The number of the tensor's type, if a file can hold it.
fn prove(tensor: &TensorInfo) -> Result<u32> {
    let cols = tensor.shape.last().copied().unwrap_or(1);
    if tensor.shape.len() > MAX_AXES || tensor.shape.contains(&0) {
        return Err(refused(format!(
            "tensor `{}` of shape {:?}: 1 to {} axes that are not 0 can be written",
            tensor.name, tensor.shape, MAX_AXES
        )));
    }
    if let Store::Numbers(format) = tensor.store
        && !cols.is_multiple_of(format.block)
    {
        return Err(refused(format!(
            "tensor `{}` has rows of {cols}, {} wants a multiple of {}",
            tensor.name, format.name, format.block
        )));
    }
    tensor.store.ggml().ok_or_else(|| {
        refused(format!(
            "tensor `{}` is stored as {:?}, which GGUF has no type for",
            tensor.name, tensor.store
        ))
    })
}

fn write_value(out: &mut Vec<u8>, value: &Value<'_>) {
    match value {
        Value::U8(v) => out.push(*v),
        Value::I8(v) => out.extend(v.to_le_bytes()),
        Value::U16(v) => out.extend(v.to_le_bytes()),
        Value::I16(v) => out.extend(v.to_le_bytes()),
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::I32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push((*v).into()),
        Value::String(v) => write_text(out, v),
        Value::Array(kind, items) => {
            out.extend((*kind as u32).to_le_bytes());
            out.extend((items.len() as u64).to_le_bytes());
            for item in items {
                assert!(
                    item.kind() == *kind && *kind != Kind::Array,
                    "an array of one type"
                );
                write_value(out, item);
            }
        }
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::F64(v) => out.extend(v.to_le_bytes()),
    }
}

fn write_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn refused(reason: String) -> Error {
    Error::new(ErrorKind::InvalidInput, reason)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(name: &str, shape: &[usize], store: Store) -> TensorInfo {
        TensorInfo {
            name: name.into(),
            shape: shape.into(),
            store,
        }
    }

    #[test]
    fn every_tensor_begins_at_a_multiple_of_the_alignment() {
        let tensors = vec![
            tensor("a", &[3], Store::Numbers(&quant::F32)),
            tensor("b", &[2], Store::I64),
        ];
        let mut writer = Writer::new(Vec::new(), &[], tensors).unwrap();
        writer.write(&[1; 5]).unwrap();
        writer.write(&[1; 7]).unwrap();
        assert_eq!(writer.expects().unwrap().name, "b");
        writer.write(&[2; 16]).unwrap();
        let file = writer.finish().unwrap();
        let header = 4 + 4 + 8 + 8 + 2 * (8 + 1 + 4 + 8 + 4 + 8);
        let data = &file[usize::next_multiple_of(header, 32)..];
        assert_eq!(data[..12], [1; 12]);
        assert_eq!(data[12..32], [0; 20]);
        assert_eq!(data[32..48], [2; 16]);
        assert_eq!(data.len(), 64);
    }

    #[test]
    fn what_a_file_cannot_hold_is_refused() {
        let affine = quant::affine(4, 64).unwrap();
        for (bad, says) in [
            (tensor("a", &[2, 64], Store::Numbers(affine)), "no type for"),
            (tensor("b", &[2, 0], Store::I32), "axes"),
            (tensor("c", &[1; 5], Store::I32), "axes"),
            (
                tensor(
                    "d",
                    &[4, 33],
                    Store::Numbers(quant::format("q8_0").unwrap()),
                ),
                "multiple of 32",
            ),
        ] {
            let error = Writer::new(Vec::new(), &[], vec![bad]).err().unwrap();
            assert!(error.to_string().contains(says), "{error}");
        }
        let one = || vec![tensor("a", &[2], Store::I32)];
        let mut writer = Writer::new(Vec::new(), &[], one()).unwrap();
        assert!(writer.write(&[0; 9]).is_err());
        assert!(writer.finish().is_err());
        let mut writer = Writer::new(Vec::new(), &[], one()).unwrap();
        writer.write(&[0; 8]).unwrap();
        assert!(writer.write(&[0]).is_err());
        assert!(writer.finish().is_ok());
    }
}
