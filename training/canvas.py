"""Draws the scenes of `pictures.py`, a batch at a time, on whatever device they are."""

import functools

import torch

from pictures import MARKS, SIDE, atlas


@functools.cache
def atlas_on(device):
    return torch.from_numpy(atlas()).flatten().to(device)


@torch.compile(dynamic=False, disable=not torch.cuda.is_available())
def paint(canvas, masks, mark, x, y):
    """`canvas [n, 3, height, width]` with one mark `[n, 8]` of every picture over it."""
    kind, cx, cy, w, h = (m[:, None, None] for m in mark[:, :5].unbind(-1))
    u = ((x - cx) / w.clamp_min(1e-3) + 0.5) * SIDE
    v = ((y - cy) / h.clamp_min(1e-3) + 0.5) * SIDE
    inside = (u >= 0) & (u < SIDE) & (v >= 0) & (v < SIDE)
    at = (v.clamp(0, SIDE - 1).long() * SIDE + u.clamp(0, SIDE - 1).long()) + kind.long() * SIDE * SIDE
    alpha = (masks[at] * inside)[:, None]
    return canvas + alpha * ((mark[:, 5:8] / 255)[:, :, None, None] - canvas)


def draw(marks, grounds, grid, cell, used=MARKS):
    """Pictures `[n, 3, rows·cell, columns·cell]` in [0, 1]; only the first `used` marks."""
    device = marks.device
    rows, columns = grid
    masks = atlas_on(str(device))
    y = ((torch.arange(rows * cell, device=device) + 0.5) / cell)[None, :, None]
    x = ((torch.arange(columns * cell, device=device) + 0.5) / cell)[None, None, :]
    canvas = (grounds / 255)[:, :, None, None].repeat(1, 1, rows * cell, columns * cell)
    for mark in marks[:, :used].unbind(1):
        canvas = paint(canvas, masks, mark, x, y)
    return canvas.clamp(0, 1)
