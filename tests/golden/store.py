"""Reading and writing safetensors files, byte for byte reproducible.

    file = u64 header length | JSON header | data
    header = {"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}, ...}

The official writer keeps its metadata in a hash map, so two runs give two files. This one writes names in the order
given, metadata sorted, and pads the header to 8 bytes.
"""

import json
import struct

import numpy as np


def to_bf16(values):
    """Codes (u16) of float32 values, rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(codes):
    """float32 values of bfloat16 codes (u16)."""
    return (codes.astype(np.uint32) << 16).view(np.float32)


# What an array becomes on disk: dtype name -> (array -> little-endian array).
ENCODE = {
    "F32": lambda a: a.astype("<f4"),
    "F16": lambda a: a.astype("<f2"),
    "BF16": lambda a: to_bf16(a).astype("<u2"),
    "I64": lambda a: a.astype("<i8"),
    "BOOL": lambda a: a.astype("u1"),
}
DECODE = {
    "F32": lambda b: np.frombuffer(b, "<f4"),
    "F16": lambda b: np.frombuffer(b, "<f2").astype(np.float32),
    "BF16": lambda b: from_bf16(np.frombuffer(b, "<u2")),
    "I64": lambda b: np.frombuffer(b, "<i8"),
    "U32": lambda b: np.frombuffer(b, "<u4"),
    "BOOL": lambda b: np.frombuffer(b, "u1").astype(bool),
}


def rounded(values, dtype):
    """The float32 values that a reader finds where `values` were stored as `dtype`."""
    return DECODE[dtype](ENCODE[dtype](values).tobytes()).reshape(values.shape)


def encode(tensors, metadata, dtype_of=lambda name: "F32"):
    """The bytes of a file. Integer arrays become I64, booleans BOOL, all others what `dtype_of` says of their name."""
    header, blobs, begin = {"__metadata__": dict(sorted(metadata.items()))}, [], 0
    for name, array in tensors.items():
        array = np.asarray(array)
        kind = {"i": "I64", "u": "I64", "b": "BOOL"}.get(array.dtype.kind) or dtype_of(name)
        blob = np.ascontiguousarray(ENCODE[kind](array)).tobytes()
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, begin + len(blob)]}
        blobs.append(blob)
        begin += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


def header(data):
    """The JSON header in the bytes of a file."""
    return data[8 : 8 + struct.unpack("<Q", data[:8])[0]]


def read(path):
    """(name -> array, metadata); float formats are widened to float32."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    metadata = header.pop("__metadata__", {})
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = DECODE[entry["dtype"]](data[begin:end]).reshape(entry["shape"])
    return tensors, metadata


def read_folder(folder):
    """name -> float32 array of a checkpoint folder, sharded or not, in Hugging Face layout and convention.

    MLX folders are undone: `w = scale·code + bias` a group, `conv1d.weight` back to [C, 1, K], and one taken off the
    offset norms of Qwen, which such files store as `1 + w` (not those of its tower). Experts are fused again.
    """
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    tensors, is_mlx = {}, False
    for name in names:
        part, metadata = read(folder / name)
        tensors |= part
        is_mlx |= metadata.get("format") == "mlx"
    if not is_mlx:
        return tensors
    config = json.loads((folder / "config.json").read_text())
    is_qwen, out = config["model_type"].startswith("qwen3_5"), {}
    for name, a in tensors.items():
        if name.endswith((".scales", ".biases")):
            continue
        if a.dtype == np.uint32:
            module = name.removesuffix(".weight")
            scales, biases = (tensors[f"{module}.{part}"][..., None] for part in ("scales", "biases"))
            bits = config["quantization"]["bits"]
            codes = a[..., None] >> np.arange(0, 32, bits, dtype=np.uint32) & (2**bits - 1)
            codes = codes.reshape(*scales.shape[:-1], -1).astype(np.float32)
            a = (scales * codes + biases).reshape(*a.shape[:-1], -1)
        elif name.endswith("conv1d.weight"):
            a = a.transpose(0, 2, 1)
        elif is_qwen and a.ndim == 1 and "norm" in name and not any(p in name for p in ("linear_attn", "visual")):
            a = a - 1
        out[name] = a
    return fused(out)


def fused(tensors):
    """Stacked MLX experts as the fused tensors of Hugging Face."""
    out = dict(tensors)
    for name in tensors:
        for stack, experts in ((".switch_glu.", "."), (".switch_mlp.", ".experts.")):
            room, found, part = name.partition(stack)
            if found and part == "gate_proj.weight":
                gate, up, down = (out.pop(f"{room}{stack}{p}_proj.weight") for p in ("gate", "up", "down"))
                out[f"{room}{experts}gate_up_proj"] = np.concatenate([gate, up], 1)
                out[f"{room}{experts}down_proj"] = down
    return out
