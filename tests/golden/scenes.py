"""Draws scenes of marks in whole pixels, as `caption.py` and `benchmarks/acceptance.py` show them to models.

    mark = [kind, left, top, width, height, red, green, blue]     kind as in training/pictures.py

A pixel belongs to a mark by integers alone (`inside`), so that every language draws the same: `tests/captions.rs` does.
"""

import pathlib
import sys

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent.parent / "training"))
import pictures  # noqa: E402

STAR = [(0, 1000), (247, 340), (951, 309), (399, -130), (588, -809), (0, -420), (-588, -809), (-399, -130), (-951, 309)]
STAR += [(-247, 340)]
TRIANGLE = [(0, 950), (949, -900), (-949, -900)]
LETTERS = {1 + len(pictures.SHAPES) + i: pictures.FONT[c] for i, c in enumerate(pictures.LETTERS)}


def in_polygon(corners, u, v, side):
    """Whether `(u, v)`, of -side to side, lies in a polygon of corners of -1000 to 1000."""
    odd = False
    for (ax, ay), (bx, by) in zip(corners, corners[1:] + corners[:1]):
        if (ay * side > v * 1000) == (by * side > v * 1000):
            continue
        # Left of the edge at this height.
        left = (u * 1000 - ax * side) * (by - ay) - (v * 1000 - ay * side) * (bx - ax)
        odd ^= left < 0 if by > ay else left > 0
    return odd


def inside(kind, x, y, width, height):
    """Whether column `x` and row `y` of a mark's box belong to it."""
    # From the middle, in half pixels, y upwards.
    u, v = 2 * x + 1 - width, height - 2 * y - 1
    name = pictures.SHAPES[kind - 1] if 1 <= kind <= len(pictures.SHAPES) else None
    if kind == pictures.BOX:
        return True
    if kind in LETTERS:
        row = int(LETTERS[kind][y * 7 // height], 32)
        return bool(row >> (4 - x * 5 // width) & 1)
    if name == "circle":
        return (u * u + v * v) * 100 < 98 * width * width
    if name == "square":
        return 10 * max(abs(u), abs(v)) < 9 * width
    if name == "cross":
        return 100 * min(abs(u), abs(v)) < 32 * width and 100 * max(abs(u), abs(v)) < 95 * width
    if name == "heart":
        a, b, s = 125 * u, 120 * v, 100 * width
        return (a * a + b * b - s * s) ** 3 < a * a * b * b * b * s
    return in_polygon(STAR if name == "star" else TRIANGLE, u, v, width)


def draw(size, ground, marks):
    height, width = size
    picture = np.empty((height, width, 3), np.uint8)
    picture[:] = ground
    for kind, left, top, w, h, *rgb in marks:
        for y in range(max(0, -top), min(h, height - top)):
            for x in range(max(0, -left), min(w, width - left)):
                if inside(kind, x, y, w, h):
                    picture[top + y, left + x] = rgb
    return picture
