"""Layers that both families share, and the quantisation that training foresees.

Letters: `B` rows of a batch, `T` positions, `H` hidden size, `d` head size.

A matrix is trained for the storage it will have. With `share` in [0, 1],

    w' = w + share·(Q(w) − w)      (gradient of Q taken as the identity)

where `Q` is the affine grid of `quantise.py`: `share` is 0 for most of a run and
1 at its end, so that the 4-bit checkpoint is what was trained.
Deliberately absent: families, losses, optimisers.
"""

import copy

import torch
import torch.nn.functional as F
from torch import nn


def round_trip(w, bits, group):
    """`Q(w)`: `w [.., n]` through codes of `bits` bits in groups of `group`."""
    groups = w.to(torch.bfloat16).float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    n_codes = (1 << bits) - 1
    step = ((high - low) / n_codes).clamp_min(1e-7)
    from_low = low.abs() > high.abs()
    edge = torch.where(from_low, low, high)
    step = torch.where(from_low, step, -step)
    to_zero = torch.round(edge / step)
    step = torch.where(to_zero == 0, step, edge / torch.where(to_zero == 0, 1.0, to_zero))
    bias = torch.where(to_zero == 0, 0.0, edge).to(torch.bfloat16).float()
    step = step.to(torch.bfloat16).float()
    codes = torch.round((groups - bias) / step).clamp(0, n_codes)
    return (step * codes + bias).flatten(-2)


class Storage:
    """How matrices will be stored: bits, group, and the share of it in force."""

    def __init__(self, bits=4, group=64, device="cpu"):
        self.bits, self.group = bits, group
        self.share = torch.zeros((), device=device)

    def of_group(self, group):
        """The same storage with another group where that is smaller; both have one share."""
        other = copy.copy(self)
        other.group = min(group, self.group)
        return other


class Matrix(nn.Module):
    """A weight `[out, in]` (or `[E, out, in]`) that knows its storage."""

    def __init__(self, *shape, storage=None, std=0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) * std)
        # Rows that are not whole groups are stored as they are.
        storage = storage if storage and shape[-1] % storage.group == 0 else None
        self.bits = storage.bits if storage else None
        if storage:
            self.group = storage.group
            self.register_buffer("share", storage.share, persistent=False)

    def stored(self):
        """The weight as the storage in force will have it."""
        if self.bits is None:
            return self.weight
        delta = round_trip(self.weight.detach(), self.bits, self.group) - self.weight.detach()
        return self.weight + self.share * delta

    def bake(self):
        """Replaces the weight by its stored value, for evaluation."""
        if self.bits is not None:
            self.weight.data = round_trip(self.weight.data, self.bits, self.group)
            self.bits = None


class Linear(Matrix):
    """`x @ Wᵀ` in the dtype of `x`."""

    def forward(self, x):
        return F.linear(x, self.stored().to(x.dtype))


class Norm(nn.Module):
    """`x / rms(x) · (offset + w)` in float32; no weight if `n` is None."""

    def __init__(self, n, offset=0.0, init=1.0, eps=1e-6):
        super().__init__()
        self.offset, self.eps = offset, eps
        self.weight = nn.Parameter(torch.full((n,), init - offset)) if n else None

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            y = y * (self.offset + self.weight)
        return y.to(x.dtype)


def rope_table(positions, inverse_frequencies):
    """`(cos, sin)`, each `[T, d]`, for NeoX pairing."""
    angles = positions.float()[:, None] * inverse_frequencies[None]
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


def rope(x, table):
    """Rotates the first `cos.shape[-1]` dimensions of `x [B, heads, T, d]`."""
    cos, sin = (t.to(x.dtype) for t in table)
    n = cos.shape[-1]
    turned, kept = x[..., :n], x[..., n:]
    half = torch.cat([-turned[..., n // 2 :], turned[..., : n // 2]], -1)
    turned = turned * cos + half * sin
    return torch.cat([turned, kept], -1) if kept.shape[-1] else turned


def heads(x, n, d):
    """`[B, T, n·d] → [B, n, T, d]`."""
    return x.unflatten(-1, (n, d)).transpose(1, 2)


def share_heads(x, n):
    """Repeats key or value heads so that each of `n` query heads has its own."""
    return x.repeat_interleave(n // x.shape[1], 1) if x.shape[1] != n else x


def attend(q, k, v, scale, window=None, past_only=False):
    """Causal attention of `q [B, n, T, d]` over `k, v [B, m, T, d]`.

    Row `i` sees keys `j ≤ i`, and with a window those with `j > i − window`. With
    `past_only` the query stands one position later than its newest key, so a
    window shows one key less.
    """
    k, v = share_heads(k, q.shape[1]), share_heads(v, q.shape[1])
    if window is None or q.shape[2] <= window and not past_only:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return banded(q, k, v, scale, window, int(past_only))


def banded(q, k, v, scale, window, late):
    """A window as blocks of `window` queries over two blocks of keys."""
    B, n, T, d = q.shape
    pad = -T % window
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
    blocks = (T + pad) // window
    split = lambda x: x.unflatten(2, (blocks, window)).transpose(1, 2)  # [B, blocks, n, W, d]
    before = lambda x: torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    q, k, v = split(q), split(k), split(v)
    k, v = torch.cat([before(k), k], 3), torch.cat([before(v), v], 3)
    i = torch.arange(window, device=q.device)[:, None]
    j = torch.arange(2 * window, device=q.device)[None] - window
    seen = (j <= i) & (j > i - window + late)
    first = torch.arange(blocks, device=q.device)[:, None, None] == 0
    seen = seen[None] & ~(first & (j < 0)[None])  # [blocks, W, 2W]
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
    bias = bias[None, :, None].expand(B, -1, n, -1, -1).flatten(0, 1)
    out = F.scaled_dot_product_attention(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), attn_mask=bias, scale=scale
    )
    return out.unflatten(0, (B, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :T]


class KvCache:
    """Keys and values of one layer while text is generated one token at a time."""

    def __init__(self):
        self.k = self.v = None

    def append(self, k, v, window):
        """Adds one row; returns the rows that the newest query may see."""
        self.k = k if self.k is None else torch.cat([self.k, k], 2)
        self.v = v if self.v is None else torch.cat([self.v, v], 2)
        if window is None:
            return self.k, self.v
        return self.k[:, :, -window:], self.v[:, :, -window:]


def attend_cached(q, k, v, scale):
    """Attention of one query row over all given keys."""
    return F.scaled_dot_product_attention(
        q, share_heads(k, q.shape[1]), share_heads(v, q.shape[1]), scale=scale
    )


def attend_unrolled(q, keys, values, scale):
    """Attention of a drafter's step `s` over its own cache, as in use.

    `keys[0]` are the true rows, seen causally; `keys[1..s]` are the rows that
    each draft itself has added, of which a query sees only those of its own
    position.
    """
    T, s = q.shape[2], len(keys)
    n = q.shape[1]
    i = torch.arange(T, device=q.device)
    own = i[:, None] == i[None]
    seen = torch.cat([i[:, None] >= i[None]] + [own] * (s - 1), 1)
    k = share_heads(torch.cat(keys, 2), n)
    v = share_heads(torch.cat(values, 2), n)
    bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, float("-inf"))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=scale)


class GatedMlp(nn.Module):
    """`down(act(gate(x)) · up(x))`."""

    def __init__(self, hidden, width, act, storage):
        super().__init__()
        self.gate_proj = Linear(width, hidden, storage=storage)
        self.up_proj = Linear(width, hidden, storage=storage)
        self.down_proj = Linear(hidden, width, storage=storage)
        self.act = act

    def forward(self, x):
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


def gelu_tanh(x):
    return F.gelu(x, approximate="tanh")


class Experts(nn.Module):
    """Fused expert matrices; every expert is computed and weighted.

    A few small experts cost less this way than sorting tokens would.
    `weights [.., E]` are zero for experts that a token does not use.
    """

    def __init__(self, n, hidden, width, act, storage):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(n, 2 * width, hidden) * 0.02)
        self.down_proj = nn.Parameter(torch.randn(n, hidden, width) * 0.02)
        self.act, self.width = act, width
        self.bits = storage.bits if storage else None
        if storage:
            self.group = storage.group
            self.register_buffer("share", storage.share, persistent=False)

    def stored(self, w):
        if self.bits is None:
            return w
        return w + self.share * (round_trip(w.detach(), self.bits, self.group) - w.detach())

    def bake(self):
        if self.bits is not None:
            for w in (self.gate_up_proj, self.down_proj):
                w.data = round_trip(w.data, self.bits, self.group)
            self.bits = None

    def forward(self, x, weights):
        # One product for all experts: their rows lie one after another.
        gate_up = F.linear(x, self.stored(self.gate_up_proj).to(x.dtype).flatten(0, 1))
        gate, up = gate_up.unflatten(-1, (-1, 2, self.width)).unbind(-2)
        inner = self.act(gate) * up * weights[..., None].to(x.dtype)
        down = self.stored(self.down_proj).to(x.dtype).transpose(0, 1).flatten(1)
        return F.linear(inner.flatten(-2), down)


def top_k_weights(probabilities, k):
    """Keeps the `k` largest of `[.., E]`, the first of equal ones, and renormalises them to sum one."""
    p, n = probabilities.detach(), torch.arange(probabilities.shape[-1], device=probabilities.device)
    one, other = p[..., :, None], p[..., None, :]
    before = (other > one) | (other == one) & (n < n[:, None])
    kept = torch.where(before.sum(-1) < k, probabilities, 0.0)
    return kept / kept.sum(-1, keepdim=True)
