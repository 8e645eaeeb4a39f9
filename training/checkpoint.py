"""Reading and writing safetensors with numpy alone.

A file is `u64 n`, `n` bytes of JSON, then the data area; the JSON maps each
tensor to its dtype, shape and byte range in the data area. bf16 has no numpy
type: it is held as `uint16` bits and widened to float32 on request.

Deliberately absent: torch, models, training. Everything here runs on a laptop.
"""

import json
import struct
from pathlib import Path

import numpy as np

# safetensors dtype name -> the numpy type that holds its bits.
STORAGE = {
    "BF16": np.dtype("<u2"),
    "F16": np.dtype("<f2"),
    "F32": np.dtype("<f4"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "U8": np.dtype("u1"),
    "U32": np.dtype("<u4"),
    "BOOL": np.dtype("u1"),
}


class Tensor:
    """A named dtype and the bits of one tensor."""

    def __init__(self, dtype, bits):
        self.dtype = dtype
        self.bits = bits

    @property
    def shape(self):
        return self.bits.shape

    def float32(self):
        """The values as float32 (exact for bf16, f16 and f32)."""
        if self.dtype == "BF16":
            return (self.bits.astype(np.uint32) << 16).view(np.float32)
        return self.bits.astype(np.float32)


def bf16(values):
    """Rounds float32 `values` to bf16, to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return Tensor("BF16", (rounded >> 16).astype(np.uint16))


def read_file(path):
    """Returns `{name: Tensor}` of one safetensors file, in stored order."""
    raw = Path(path).read_bytes()
    (n_header,) = struct.unpack_from("<Q", raw)
    header = json.loads(raw[8 : 8 + n_header])
    header.pop("__metadata__", None)
    data = memoryview(raw)[8 + n_header :]
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(data[begin:end], STORAGE[entry["dtype"]])
        tensors[name] = Tensor(entry["dtype"], bits.reshape(entry["shape"]))
    return tensors


def read_folder(folder):
    """Returns the tensors of every `*.safetensors` file of a checkpoint."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        tensors.update(read_file(path))
    if not tensors:
        raise FileNotFoundError(f"no safetensors file in `{folder}`")
    return tensors


def write_file(path, tensors, metadata):
    """Writes `tensors` to one safetensors file, data aligned to 8 bytes."""
    header, offset = {"__metadata__": metadata}, 0
    for name, tensor in tensors.items():
        end = offset + tensor.bits.nbytes
        header[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)))
        out.write(text)
        for tensor in tensors.values():
            out.write(np.ascontiguousarray(tensor.bits).tobytes())
