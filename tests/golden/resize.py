"""Checksums of pictures that torchvision has resized: `crates/media/tests/resize.tsv`.

Pictures are drawn by a rule that the test follows too, so that the file has only sizes and the
FNV-1a hash of the result. `PYTHONPATH= python3 tests/golden/resize.py` needs torch and torchvision.
"""

import random
from pathlib import Path

import torch
from torchvision.transforms.v2 import functional as F

OUT = Path(__file__).parents[2] / "crates/media/tests/resize.tsv"

#: Sizes that models ask for, and odd ones: one pixel, one row, much smaller, a little larger.
SIZES = [
    (1, 1, 16, 16),
    (1, 100, 32, 32),
    (100, 1, 48, 96),
    (2, 2, 3, 3),
    (3, 5, 4, 4),
    (64, 64, 64, 64),
    (64, 64, 63, 65),
    (64, 48, 64, 96),
    (48, 64, 96, 64),
    (480, 640, 32, 32),
    (1000, 30, 96, 96),
    (333, 517, 336, 528),
]


def picture(height, width):
    """A picture of noise, lines and flat parts."""
    state, values = height * 65537 + width, []
    for i in range(height * width * 3):
        state = (state * 1664525 + 1013904223) % 2**32
        x = i // 3 % width
        values.append(255 if x % 7 == 0 else 0 if x % 11 == 0 else state >> 24)
    return torch.tensor(values, dtype=torch.uint8).reshape(height, width, 3)


def fnv(values):
    hash = 0xCBF29CE484222325
    for byte in values:
        hash = (hash ^ byte) * 0x100000001B3 % 2**64
    return hash


def main():
    rng = random.Random(7)
    sizes = list(SIZES)
    while len(sizes) < 80:
        height, width = rng.randint(2, 260), rng.randint(2, 260)
        sizes.append((height, width, 16 * rng.randint(1, 12), 16 * rng.randint(1, 12)))
    lines = []
    for height, width, to_height, to_width in sizes:
        image = picture(height, width).permute(2, 0, 1)
        resized = F.resize(image, [to_height, to_width], F.InterpolationMode.BICUBIC, antialias=True)
        assert resized.dtype == torch.uint8
        hash = fnv(resized.permute(1, 2, 0).flatten().tolist())
        lines.append(f"{height}\t{width}\t{to_height}\t{to_width}\t{hash:016x}\n")
    OUT.write_text("".join(lines))


main()
