"""Writes gguf/rotated.txt: values, and the blocks of tq3_1s and tq4_1s that they become.

    encode NAME VALUES BLOCKS      hexadecimal little-endian bytes, values f32

Blocks are computed here from the definition, in the order in which sums are rounded: by `quantize_row_tq3_1s_ref` and
`quantize_row_tq4_1s_ref` of the llama.cpp fork AtomicBot-ai/atomic-llama-cpp-turboquant (a6f3d363,
ggml/src/ggml-turbo-quant.c), whose bytes, compiled with `-ffp-contract=off`, are the same. `--reference PROGRAM`
compares: the program is called with `3` or `4`, reads one row of values and writes its blocks.

    python3 -m venv .venv && .venv/bin/pip install numpy
    .venv/bin/python tests/golden/rotated_blocks.py
"""

import argparse
import subprocess
from pathlib import Path

import numpy as np

F = np.float32
LEVELS = {
    3: [-1.996684, -1.291398, -0.740341, -0.247508, 0.230106, 0.725222, 1.277503, 1.988943],
    4: [s * x for s, xs in [(-1, [2.732590, 2.069017, 1.618046, 1.256231, 0.942340, 0.656759, 0.388048, 0.128395]),
                            (1, [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590])]
        for x in xs],
}
BOUNDS = {
    3: [-1.644041, -1.015870, -0.493925, -0.008701, 0.477664, 1.001363, 1.633223],
    4: [-2.400804, -1.843532, -1.437139, -1.099286, -0.799550, -0.522404, -0.258222, 0,
        0.258222, 0.522404, 0.799550, 1.099286, 1.437139, 1.843532, 2.400804],
}
SIGNS = np.array([-1 if i * 0.6180339887 % 1 >= 0.5 else 1 for i in range(32)], F)


def rotate(x):
    y, step = x * SIGNS, 1
    while step < 32:
        pairs = y.reshape(-1, 2, step)
        y = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(32)
        step *= 2
    return y * (F(1) / np.sqrt(F(32)))


def total(values, start=F(0)):
    """A sum that is rounded after each value."""
    for value in values:
        start = F(start + value)
    return start


def block(bits, x):
    levels, bounds = np.array(LEVELS[bits], F), np.array(BOUNDS[bits], F)
    inverse = lambda d: F(1) / d if d > F(1e-10) else F(0)
    codes = lambda y, d: (y[:, None] * inverse(d) >= bounds).sum(1)
    y = rotate(x).reshape(2, 16)
    rms = [np.sqrt(total(half * half) / F(16)) for half in y]
    d, least = rms, F(1e30)
    for part in [0.6, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.35, 1.5]:
        tried = [r * F(part) for r in rms]
        error = F(0)
        for half, scale in zip(y, tried):
            off = half - levels[codes(half, scale)] * scale
            error = total(off * off, error)
        if error < least:
            d, least = tried, error
    d = list(d)
    for h in range(2):
        for _ in range(6):
            level = levels[codes(y[h], d[h])]
            square = total(level * level)
            if square > F(1e-10):
                d[h] = total(y[h] * level) / square
    packed = 0
    for h in range(2):
        for j, code in enumerate(codes(y[h], d[h])):
            packed |= int(code) << bits * (16 * h + j)
    return np.array(d).astype("<f2").tobytes() + packed.to_bytes(4 * bits, "little")


def rows():
    rng = np.random.default_rng(31)
    normal = lambda n, by: rng.normal(0, by, n)
    yield normal(256, 0.02)
    outliers = normal(64, 0.02)
    outliers[[3, 17, 40]] = [1.5, -2.25, 0.75]
    yield outliers
    yield np.zeros(32)
    yield normal(32, 1e-6)
    yield normal(32, 1e-12)
    yield normal(32, 1e-30)
    yield normal(32, 10000)
    yield -np.abs(normal(64, 0.05))
    yield np.full(32, 0.25)
    yield np.full(32, -1.0)
    one = np.zeros(32)
    one[11] = -3
    yield one
    i = np.arange(128)
    yield ((37 * i * i + 11 * i + 5) % 251 - 125) / 64 * np.where(i % 29 == 3, 6, 1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--reference", metavar="PROGRAM")
    program = parser.parse_args().reference
    lines = []
    for bits, name in [(3, "tq3_1s"), (4, "tq4_1s")]:
        for values in rows():
            values = values.astype("<f4")
            coded = b"".join(block(bits, x) for x in values.reshape(-1, 32))
            if program:
                reference = subprocess.run([program, str(bits)], input=values.tobytes(), capture_output=True, check=True)
                assert reference.stdout == coded, (name, values)
            lines.append(f"encode {name} {values.tobytes().hex()} {coded.hex()}\n")
    (Path(__file__).parent / "gguf" / "rotated.txt").write_text("".join(lines))


main()
