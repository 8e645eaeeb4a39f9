"""Writes gguf/blocks.txt: blocks of every GGUF type with the values they stand for.

    decode NAME BLOCKS VALUES      random blocks, as the `gguf` package dequantises them
    encode NAME VALUES BLOCKS      values, as the `gguf` package quantises them

Numbers are hexadecimal little-endian bytes, values f32. The two rotated types are not in the package; their values are
computed here from their definition.

    python3 -m venv .venv && .venv/bin/pip install gguf==0.19.0
    .venv/bin/python tests/golden/gguf_blocks.py
"""

from pathlib import Path

import gguf
import numpy as np

# Blocks of each type, and where its half-precision numbers lie.
DECODE = {
    "Q4_0": (4, [0]), "Q4_1": (4, [0, 2]), "Q5_0": (4, [0]), "Q5_1": (4, [0, 2]), "Q8_0": (4, [0]),
    "Q2_K": (1, [80, 82]), "Q3_K": (1, [108]), "Q4_K": (1, [0, 2]), "Q5_K": (1, [0, 2]), "Q6_K": (1, [208]),
    "IQ4_NL": (4, [0]), "IQ4_XS": (1, [0]), "MXFP4": (4, []), "NVFP4": (2, []),
}
ENCODE = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"]

LEVELS = {
    "TQ3_1S": [-1.996684, -1.291398, -0.740341, -0.247508, 0.230106, 0.725222, 1.277503, 1.988943],
    "TQ4_1S": [s * x for s, xs in [(-1, [2.732590, 2.069017, 1.618046, 1.256231, 0.942340, 0.656759, 0.388048, 0.128395]),
                                   (1, [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590])]
               for x in xs],
}


def rotated(name, blocks):
    """Levels times scales, through a Hadamard butterfly of 32, with fixed signs."""
    out = []
    for block in blocks:
        codes = int.from_bytes(block[4:].tobytes(), "little")
        bits = 3 if name == "TQ3_1S" else 4
        d = block[:4].view(np.float16).astype(np.float32)
        y = np.array([LEVELS[name][codes >> bits * j & (1 << bits) - 1] for j in range(32)], np.float32)
        y *= np.repeat(d, 16)
        step = 1
        while step < 32:
            pairs = y.reshape(-1, 2, step)
            y = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(32)
            step *= 2
        signs = np.array([-1 if i * 0.6180339887 % 1 >= 0.5 else 1 for i in range(32)], np.float32)
        out.append(y * (np.float32(1) / np.sqrt(np.float32(32)) * signs))
    return np.concatenate(out)


def random_blocks(rng, n, size, halves):
    blocks = rng.integers(0, 256, (n, size), np.uint8)
    for at in halves:
        blocks[:, at : at + 2] = rng.normal(0, 0.02, n).astype(np.float16).view(np.uint8).reshape(n, 2)
    return blocks


def main():
    rng = np.random.default_rng(20)
    lines = []
    for name, (n, halves) in DECODE.items():
        kind = gguf.GGMLQuantizationType[name]
        blocks = random_blocks(rng, n, gguf.GGML_QUANT_SIZES[kind][1], halves)
        if name == "MXFP4":
            blocks[:, 0] = [0, 1, 120, 130]
        if name == "NVFP4":
            blocks[0, :4] = [0, 0x7F, 0x86, 0x33]
        values = gguf.quants.dequantize(blocks, kind).astype("<f4")
        lines.append(("decode", name, blocks, values))
    for name, size in [("TQ3_1S", 16), ("TQ4_1S", 20)]:
        blocks = random_blocks(rng, 2, size, [0, 2])
        lines.append(("decode", name, blocks, rotated(name, blocks)))
    values = rng.normal(0, 0.02, (4, 32)).astype("<f4")
    values[1] = 0
    values[2] *= 1000
    values[3, :16] += 0.1
    for name in ENCODE:
        lines.append(("encode", name, values, gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])))
    text = "".join(f"{kind} {name.lower()} {a.tobytes().hex()} {b.tobytes().hex()}\n" for kind, name, a, b in lines)
    path = Path(__file__).parent / "gguf" / "blocks.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)


main()
