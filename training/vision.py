"""The picture towers of both families, with the tensor names of the checkpoints.

Gemma 4, on patches `p` of 16×16 pixels at column `x` and row `y`:

    h = W·(2p − 1) + table₀[x] + table₁[y]
    h = h + n₂(attention(n₁(h)));  h = h + n₄(mlp(n₃(h)))
    soft = projection(rms(√H·mean of 3×3 patches))

Half of a head is turned by the column, half by the row; queries and keys are normed,
values too, and scores have no 1/√d. Qwen 3.5, on 16×16 pixels of two frames:

    h = W·p + b + grid of positions, bilinear
    h = h + proj(attention(LN(h)));  h = h + fc₂(gelu(fc₁(LN(h))))
    soft = fc₂(gelu(fc₁([LN(h)] of 2×2 patches)))

All pictures of a batch have one size, so nothing is padded.
Deliberately absent: resizing, prompts, the decoder.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

from layers import GatedMlp, Linear, Matrix, Norm, gelu_tanh, heads

PATCH = 16
POOL = 3  # patches of Gemma that become one soft token, each way
MERGE = 2  # the same of Qwen
PAIR = 2  # frames of one Qwen patch


def gemma_config(hidden=128, width=256, depth=5, head=32, positions=216):
    """A `vision_config` of Gemma; `positions` are the most patches in a row or column."""
    return {
        "model_type": "gemma4_vision",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": depth,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // head,
        "head_dim": head,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "axial", "rope_theta": 100.0},
        "pooling_kernel_size": POOL,
        "patch_size": PATCH,
        "position_embedding_size": positions,
        "default_output_length": 70,
        "use_clipped_linears": False,
        "standardize": False,
    }


def qwen_config(out, hidden=128, width=256, depth=5, head=32, positions=256):
    """A `vision_config` of Qwen; `positions` is the square of a grid's side."""
    return {
        "model_type": "qwen3_5_vision",
        "depth": depth,
        "hidden_size": hidden,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": width,
        "num_heads": hidden // head,
        "in_channels": 3,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": PAIR,
        "out_hidden_size": out,
        "num_position_embeddings": positions,
    }


def turn(x, table):
    """Rotates whole heads `x [B, n, P, d]`; NeoX pairing inside every table's width."""
    cos, sin = (t.to(x.dtype) for t in table)
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def angles(positions, n, theta):
    """`[P, n]` angles `position · theta^(−j/n)`."""
    j = torch.arange(n, device=positions.device, dtype=torch.float32)
    return positions.float()[:, None] * theta ** (-j / n)


def cos_sin(turned):
    turned = torch.cat([turned, turned], -1)
    return turned.cos(), turned.sin()


class Inner(nn.Module):
    """A linear layer whose weight is called `linear.weight`, as where Gemma may clip."""

    def __init__(self, out, into, storage):
        super().__init__()
        self.linear = Linear(out, into, storage=storage)

    def forward(self, x):
        return self.linear(x)


class Biased(Linear):
    def __init__(self, out, into, storage, std=0.02):
        super().__init__(out, into, storage=storage, std=std)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x):
        return F.linear(x, self.stored().to(x.dtype), self.bias.to(x.dtype))


class GemmaAttention(nn.Module):
    def __init__(self, c, storage):
        super().__init__()
        H, self.n, self.d = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Inner(H, H, storage) for _ in range(4))
        self.q_norm, self.k_norm = (Norm(self.d, init=self.d**-0.25) for _ in range(2))
        self.v_norm = Norm(None)

    def forward(self, x, across, down):
        half = self.d // 2
        split = lambda t: heads(t, self.n, self.d)
        both = lambda t: torch.cat([turn(t[..., :half], across), turn(t[..., half:], down)], -1)
        q, k = both(self.q_norm(split(self.q_proj(x)))), both(self.k_norm(split(self.k_proj(x))))
        out = F.scaled_dot_product_attention(q, k, self.v_norm(split(self.v_proj(x))), scale=1.0)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class InnerMlp(nn.Module):
    def __init__(self, H, width, storage):
        super().__init__()
        self.gate_proj, self.up_proj = Inner(width, H, storage), Inner(width, H, storage)
        self.down_proj = Inner(H, width, storage)

    forward = GatedMlp.forward
    act = staticmethod(gelu_tanh)


class GemmaLayer(nn.Module):
    def __init__(self, c, storage):
        super().__init__()
        H, small = c["hidden_size"], (2 * c["num_hidden_layers"]) ** -0.5
        self.self_attn = GemmaAttention(c, storage)
        self.mlp = InnerMlp(H, c["intermediate_size"], storage)
        self.input_layernorm, self.pre_feedforward_layernorm = Norm(H), Norm(H)
        self.post_attention_layernorm, self.post_feedforward_layernorm = Norm(H, init=small), Norm(
            H, init=small
        )

    def forward(self, x, across, down):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), across, down))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class PatchEmbedder(nn.Module):
    def __init__(self, c, storage):
        super().__init__()
        H = c["hidden_size"]
        self.input_proj = Linear(H, 3 * PATCH * PATCH, storage=storage)
        # Zero, not random: positions beyond those of training must do no harm.
        self.position_embedding_table = nn.Parameter(torch.zeros(2, c["position_embedding_size"], H))


class GemmaTower(nn.Module):
    """`forward(pictures [n, 3, height, width])` returns soft tokens `[n, rows·columns, H]`."""

    family = "gemma"
    cell = PATCH * POOL  # pixels of a soft token, each way
    frames = 1  # of one set of soft tokens
    prefix = "model."

    def __init__(self, c, out, storage=None, dtype=torch.bfloat16):
        super().__init__()
        self.c, self.dtype = c, dtype
        self.vision_tower = nn.Module()
        self.vision_tower.patch_embedder = PatchEmbedder(c, storage)
        self.vision_tower.encoder = nn.Module()
        self.layers = [GemmaLayer(c, storage) for _ in range(c["num_hidden_layers"])]
        self.vision_tower.encoder.layers = nn.ModuleList(self.layers)
        self.embed_vision = nn.Module()
        self.embed_vision.embedding_projection = Linear(out, c["hidden_size"], storage=storage)
        self.norm = Norm(None)

    def start_at(self, rms):
        """Makes soft tokens start at the size `rms` of the decoder's own embeddings."""
        with torch.no_grad():
            self.embed_vision.embedding_projection.weight.normal_(std=rms * self.c["hidden_size"] ** -0.5)

    def forward(self, pictures):
        n, _, height, width = pictures.shape
        rows, columns = height // PATCH, width // PATCH
        patches = pictures.unflatten(2, (rows, PATCH)).unflatten(4, (columns, PATCH))
        patches = patches.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)  # row, column, (pixel, RGB)
        embedder = self.vision_tower.patch_embedder
        x = torch.arange(columns, device=pictures.device).repeat(rows)
        y = torch.arange(rows, device=pictures.device).repeat_interleave(columns)
        table = embedder.position_embedding_table.to(self.dtype)
        h = embedder.input_proj((2 * patches - 1).to(self.dtype)) + table[0][x] + table[1][y]
        theta, quarter = self.c["rope_parameters"]["rope_theta"], self.c["head_dim"] // 4
        across, down = (cos_sin(angles(p, quarter, theta)) for p in (x, y))
        for layer in self.layers:
            h = layer(h, across, down)
        h = h.unflatten(1, (rows // POOL, POOL, columns // POOL, POOL)).float().mean((2, 4)).flatten(1, 2)
        h = self.norm(h * self.c["hidden_size"] ** 0.5).to(self.dtype)
        return self.embed_vision.embedding_projection(h)


class QwenBlock(nn.Module):
    def __init__(self, c, storage):
        super().__init__()
        H = c["hidden_size"]
        self.n = c["num_heads"]
        self.norm1, self.norm2 = nn.LayerNorm(H, eps=1e-6), nn.LayerNorm(H, eps=1e-6)
        self.attn, self.mlp = nn.Module(), nn.Module()
        self.attn.qkv, self.attn.proj = Biased(3 * H, H, storage), Biased(H, H, storage)
        width = c["intermediate_size"]
        self.mlp.linear_fc1, self.mlp.linear_fc2 = Biased(width, H, storage), Biased(H, width, storage)

    def forward(self, x, table):
        y = layer_norm(self.norm1, x)
        q, k, v = (heads(t, self.n, t.shape[-1] // self.n) for t in self.attn.qkv(y).chunk(3, -1))
        out = F.scaled_dot_product_attention(turn(q, table), turn(k, table), v)
        x = x + self.attn.proj(out.transpose(1, 2).flatten(2))
        return x + self.mlp.linear_fc2(gelu_tanh(self.mlp.linear_fc1(layer_norm(self.norm2, x))))


def layer_norm(norm, x):
    """In float32, back in the dtype of `x`."""
    return norm(x.float()).to(x.dtype)


class QwenTower(nn.Module):
    """`forward(pictures [n, 3, height, width] or pairs [n, 2, 3, height, width])` returns
    soft tokens `[n, rows·columns, H]`; a still picture is a pair of itself."""

    family = "qwen"
    cell = PATCH * MERGE
    frames = PAIR
    prefix = "model."

    def __init__(self, c, out, storage=None, dtype=torch.bfloat16):
        super().__init__()
        self.c, self.dtype = c, dtype
        H, merged = c["hidden_size"], c["hidden_size"] * MERGE**2
        self.visual = nn.Module()
        self.visual.patch_embed = nn.Module()
        self.visual.patch_embed.proj = Biased(H, 3 * PAIR * PATCH * PATCH, storage)
        self.visual.pos_embed = Matrix(c["num_position_embeddings"], H)
        self.layers = [QwenBlock(c, storage) for _ in range(c["depth"])]
        self.visual.blocks = nn.ModuleList(self.layers)
        self.visual.merger = nn.Module()
        self.visual.merger.norm = nn.LayerNorm(H, eps=1e-6)
        self.visual.merger.linear_fc1 = Biased(merged, merged, storage)
        self.visual.merger.linear_fc2 = Biased(out, merged, storage)

    def start_at(self, rms):
        # The activations before it are about a quarter of unit size at the start.
        with torch.no_grad():
            self.visual.merger.linear_fc1.weight.normal_(
                std=self.visual.merger.linear_fc1.weight.shape[1] ** -0.5
            )
            last = self.visual.merger.linear_fc2.weight
            last.normal_(std=1.7 * rms * last.shape[1] ** -0.5)

    def positions(self, rows, columns, device):
        """The learned grid, sampled corner to corner, `[rows·columns, H]`."""
        side = math.isqrt(self.c["num_position_embeddings"])
        grid = self.visual.pos_embed.weight.unflatten(0, (side, side)).permute(2, 0, 1)[None]
        sampled = F.interpolate(grid, (rows, columns), mode="bilinear", align_corners=True)
        return sampled[0].permute(1, 2, 0).flatten(0, 1)

    def forward(self, pictures):
        if pictures.dim() == 4:
            pictures = pictures[:, None].expand(-1, PAIR, -1, -1, -1)
        rows, columns = pictures.shape[-2] // PATCH, pictures.shape[-1] // PATCH
        # Blocks of 2×2 patches in reading order, patches of a block in reading order.
        order = torch.arange(rows * columns, device=pictures.device)
        order = order.view(rows // MERGE, MERGE, columns // MERGE, MERGE).transpose(1, 2).flatten()
        patches = pictures.unflatten(3, (rows, PATCH)).unflatten(5, (columns, PATCH))
        patches = (
            patches.permute(0, 3, 5, 2, 1, 4, 6).flatten(3).flatten(1, 2)[:, order]
        )  # (RGB, frame, pixel)
        h = self.visual.patch_embed.proj((2 * patches - 1).to(self.dtype))
        h = h + self.positions(rows, columns, pictures.device)[order].to(self.dtype)
        quarter = self.c["hidden_size"] // self.c["num_heads"] // 4
        row, column = (angles(p, quarter, 10000.0) for p in (order // columns, order % columns))
        table = cos_sin(torch.cat([row, column], -1))
        for layer in self.layers:
            h = layer(h, table)
        merger = self.visual.merger
        h = layer_norm(merger.norm, h).unflatten(1, (-1, MERGE**2)).flatten(2)
        return merger.linear_fc2(F.gelu(merger.linear_fc1(h)))


def tower(family, c, out, storage=None, dtype=torch.bfloat16):
    """The tower of a family for a decoder of hidden size `out`; `c` is a `vision_config` or None."""
    if family == "gemma":
        return GemmaTower(c or gemma_config(), out, storage, dtype)
    return QwenTower(c or qwen_config(out), out, storage, dtype)
