"""Qwen 3.5: the hybrid decoder and its multi-token head, named as in the checkpoints.

    x = x + mixer(n₁(x));  x = x + mlp(n₂(x))

The mixer is gated full attention in every fourth layer and a gated delta rule
elsewhere. Per value head, with a state `S [dk, dv]`, decay `α = exp(g)`:

    S ← α·S;   d = β·(v − Sᵀk);   S ← S + k·dᵀ;   o = Sᵀq

Training uses the chunked form. Over a chunk of `C` rows with cumulative log decay
`G`, `D_ij = exp(G_i − G_j)` for `j ≤ i`, and `A = strict_lower(diag(β)·KKᵀ ⊙ D)`:

    X = (I + A)⁻¹;  W = X·diag(β·exp G)·K;  U = X·diag(β)·V
    S' = (exp(G_C)·I − K̃ᵀW)·S + K̃ᵀU,   K̃ = diag(exp(G_C − G))·K
    O = diag(exp G)·Q·S + (QKᵀ ⊙ D)·(U − W·S)

Only the middle line runs chunk by chunk. `A` is nilpotent: of a block of `C` rows,
`(I + A)⁻¹` is the product of `(I − A)` and `log₂ C − 1` terms `(I + A^(2^i))`.
"""

import torch
import torch.nn.functional as F
from torch import nn

from layers import (
    Experts,
    GatedMlp,
    KvCache,
    Linear,
    Matrix,
    Norm,
    attend,
    attend_cached,
    attend_unrolled,
    heads,
    rope,
    rope_table,
    top_k_weights,
)

LINEAR, FULL = "linear_attention", "full_attention"
CHUNK = 64
BASE = 16  # rows of a chunk that are inverted at once


def config(layer_types, hidden=512, width=768, vocab=8192, **more):
    """A `config.json` of the text decoder."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "mtp_num_hidden_layers": 1,
        "partial_rotary_factor": 0.25,
        "bos_token_id": None,
        "pad_token_id": None,
        "eos_token_id": 8162,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        **more,
    }


def offset_norm(n):
    """`x / rms(x) · (1 + w)`, with `w` stored centred on zero."""
    return Norm(n, offset=1.0)


class Attention(nn.Module):
    """Full attention with a sigmoid gate on its output."""

    def __init__(self, c, storage):
        super().__init__()
        self.n, self.m, self.d, H = (
            c["num_attention_heads"],
            c["num_key_value_heads"],
            c["head_dim"],
            c["hidden_size"],
        )
        self.q_proj = Linear(2 * self.n * self.d, H, storage=storage)
        self.k_proj = Linear(self.m * self.d, H, storage=storage)
        self.v_proj = Linear(self.m * self.d, H, storage=storage)
        self.o_proj = Linear(H, self.n * self.d, storage=storage)
        self.q_norm, self.k_norm = offset_norm(self.d), offset_norm(self.d)

    def forward(self, x, table, cache=None, drafts=None):
        """`drafts` is the pair of lists of keys and values of an unrolled draft."""
        q, gate = self.q_proj(x).unflatten(-1, (self.n, 2 * self.d)).chunk(2, -1)
        q = rope(self.q_norm(q.transpose(1, 2)), table)
        k = rope(self.k_norm(heads(self.k_proj(x), self.m, self.d)), table)
        v = heads(self.v_proj(x), self.m, self.d)
        scale = self.d**-0.5
        if cache is not None:
            out = attend_cached(q, *cache.append(k, v, None), scale)
        elif drafts is not None:
            drafts[0].append(k)
            drafts[1].append(v)
            out = attend_unrolled(q, *drafts, scale) if len(drafts[0]) > 1 else attend(q, k, v, scale)
        else:
            out = attend(q, k, v, scale)
        return self.o_proj(out.transpose(1, 2).flatten(2) * torch.sigmoid(gate.flatten(2)))


def product(x, y):
    """`x @ y` of small matrices in full float32, whatever matrix units round to."""
    return (x[..., :, :, None] * y[..., None, :, :]).sum(-2)


class UnitLowerInverse(torch.autograd.Function):
    """`X = (I + A)⁻¹` for strictly lower triangular `A [.., C, C]`; `dA = −Xᵀ·dX·Xᵀ`.

    Blocks of `BASE` rows by the product over powers, larger ones from halves:
    `[[X₁, 0], [−X₂·A₂₁·X₁, X₂]]`. Powers of the whole `A` would do as well on
    paper, but where keys repeat they grow like binomials and cancel.
    """

    @staticmethod
    def forward(ctx, a):
        size, n = BASE, a.shape[-1] // BASE
        cut = lambda i, j, s: a[..., i * s : (i + 1) * s, j * s : (j + 1) * s]
        d = torch.stack([cut(i, i, size) for i in range(n)], -3)
        x, power = torch.eye(size, dtype=a.dtype, device=a.device) - d, d
        for _ in range(BASE.bit_length() - 2):
            power = product(power, power)
            x = x + product(x, power)
        while n > 1:
            n //= 2
            below = torch.stack([cut(2 * i + 1, 2 * i, size) for i in range(n)], -3)
            first, second = x[..., 0::2, :, :], x[..., 1::2, :, :]
            corner = -(second @ below @ first)
            top = torch.cat([first, torch.zeros_like(first)], -1)
            x = torch.cat([top, torch.cat([corner, second], -1)], -2)
            size *= 2
        x = x[..., 0, :, :]
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return -(x.mT @ grad @ x.mT).tril(-1)


def gated_delta(q, k, v, g, beta):
    """The chunked rule. `q, k [B, n, T, dk]` (normed), `v [B, n, T, dv]`, `g, beta [B, n, T]`."""
    T, C = q.shape[2], CHUNK
    pad = -T % C
    if pad:
        q, k, v = (F.pad(x, (0, 0, 0, pad)) for x in (q, k, v))
        g, beta = F.pad(g, (0, pad)), F.pad(beta, (0, pad))
    split = lambda x: x.unflatten(2, (-1, C))  # [B, n, N, C, ..]
    q, k, v, g, beta = map(split, (q, k, v, g, beta))
    total = g.cumsum(-1)
    lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    # The difference is masked before the exponential: above the diagonal it may overflow.
    decay = torch.where(lower, total[..., :, None] - total[..., None, :], float("-inf")).exp()
    kb = k * beta[..., None]
    x = UnitLowerInverse.apply(((kb @ k.mT) * decay).tril(-1))
    w = x @ (kb * total.exp()[..., None])
    u = x @ (v * beta[..., None])
    last = total[..., -1:]
    faded = k * (last - total).exp()[..., None]
    step = torch.diag_embed(last.exp().expand(*last.shape[:-1], k.shape[-1])) - faded.mT @ w
    new = faded.mT @ u
    state, states = torch.zeros_like(new[:, :, 0]), []
    for i in range(q.shape[2]):
        states.append(state)
        state = step[:, :, i] @ state + new[:, :, i]
    state = torch.stack(states, 2)
    out = (q * total.exp()[..., None]) @ state + ((q @ k.mT) * decay) @ (u - w @ state)
    return out.flatten(2, 3)[:, :, :T]


class LinearCache:
    """Convolution history and recurrent state of one layer during generation."""

    def __init__(self):
        self.rows = self.state = None


class GatedDelta(nn.Module):
    # What computes the rule over whole rows; `delta_kernels.py` has a faster one.
    rule = staticmethod(gated_delta)

    def __init__(self, c, storage):
        super().__init__()
        H = c["hidden_size"]
        self.nk, self.nv = c["linear_num_key_heads"], c["linear_num_value_heads"]
        self.dk, self.dv = c["linear_key_head_dim"], c["linear_value_head_dim"]
        self.taps = c["linear_conv_kernel_dim"]
        channels = 2 * self.nk * self.dk + self.nv * self.dv
        self.in_proj_qkv = Linear(channels, H, storage=storage)
        self.in_proj_z = Linear(self.nv * self.dv, H, storage=storage)
        self.in_proj_a = Linear(self.nv, H, storage=storage)
        self.in_proj_b = Linear(self.nv, H, storage=storage)
        self.out_proj = Linear(H, self.nv * self.dv, storage=storage)
        self.conv1d = Matrix(channels, 1, self.taps, std=0.3)
        # Decays from a few tokens to a few hundred.
        self.A_log = nn.Parameter(torch.empty(self.nv).uniform_(1, 8).log())
        step = torch.empty(self.nv).uniform_(-6.9, -2.3).exp()
        self.dt_bias = nn.Parameter(torch.log(torch.expm1(step)))
        self.norm = Norm(self.dv, init=1.0)

    def forward(self, x, cache=None):
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x)
        if cache is not None:
            before = torch.zeros_like(qkv).expand(-1, self.taps - 1, -1) if cache.rows is None else cache.rows
            rows = torch.cat([before, qkv], 1)
            cache.rows = rows[:, 1:]
        else:
            rows = F.pad(qkv, (0, 0, self.taps - 1, 0))
        kernel = self.conv1d.weight[:, 0].to(x.dtype)
        T = qkv.shape[1]
        mixed = F.silu(sum(rows[:, j : j + T] * kernel[:, j] for j in range(self.taps)))
        q, k, v = mixed.split([self.nk * self.dk, self.nk * self.dk, self.nv * self.dv], -1)
        q, k = (heads(t, self.nk, self.dk).float() for t in (q, k))
        v = heads(v, self.nv, self.dv).float()
        unit = lambda t: t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-6)
        repeat = self.nv // self.nk
        q = (unit(q) * self.dk**-0.5).repeat_interleave(repeat, 1)
        k = unit(k).repeat_interleave(repeat, 1)
        beta = torch.sigmoid(self.in_proj_b(x).float()).transpose(1, 2)
        g = -self.A_log.float().exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)
        g = g.transpose(1, 2)
        if cache is not None:
            out = self.recur(q, k, v, g, beta, cache)
        else:
            out = self.rule(q, k, v, g, beta)
        out = out.transpose(1, 2)  # [B, T, nv, dv]
        out = self.norm(out) * F.silu(z.float()).unflatten(-1, (self.nv, self.dv))
        return self.out_proj(out.flatten(2).to(x.dtype))

    @staticmethod
    def recur(q, k, v, g, beta, cache):
        """One token of the recurrent form."""
        q, k, v, g, beta = q[:, :, 0], k[:, :, 0], v[:, :, 0], g[:, :, 0], beta[:, :, 0]
        if cache.state is None:
            cache.state = torch.zeros(*k.shape, v.shape[-1], dtype=torch.float32, device=k.device)
        state = cache.state * g.exp()[..., None, None]
        d = (v - (state * k[..., None]).sum(2)) * beta[..., None]
        cache.state = state + k[..., None] * d[:, :, None]
        return (cache.state * q[..., None]).sum(2)[:, :, None]


class Moe(nn.Module):
    """Routed experts and one shared expert behind a sigmoid gate."""

    def __init__(self, c, storage):
        super().__init__()
        H = c["hidden_size"]
        self.gate = Linear(c["num_experts"], H)
        self.experts = Experts(c["num_experts"], H, c["moe_intermediate_size"], F.silu, storage)
        self.shared_expert = GatedMlp(H, c["shared_expert_intermediate_size"], F.silu, storage)
        self.shared_expert_gate = Linear(1, H)
        self.k = c["num_experts_per_tok"]
        self.balance = None

    def forward(self, x):
        p = torch.softmax(self.gate(x).float(), -1)
        weights = top_k_weights(p, self.k)
        used = (weights.detach() > 0).float().flatten(0, -2).mean(0)
        self.balance = p.shape[-1] * (used / used.sum() * p.flatten(0, -2).mean(0)).sum()
        return self.experts(x, weights) + torch.sigmoid(self.shared_expert_gate(x)) * self.shared_expert(x)


class Layer(nn.Module):
    def __init__(self, c, kind, storage):
        super().__init__()
        H = c["hidden_size"]
        self.kind = kind
        self.input_layernorm, self.post_attention_layernorm = offset_norm(H), offset_norm(H)
        if kind == FULL:
            self.self_attn = Attention(c, storage)
        else:
            self.linear_attn = GatedDelta(c, storage)
        self.moe = "num_experts" in c
        self.mlp = Moe(c, storage) if self.moe else GatedMlp(H, c["intermediate_size"], F.silu, storage)

    def forward(self, x, table, cache=None, drafts=None):
        y = self.input_layernorm(x)
        x = x + (self.self_attn(y, table, cache, drafts) if self.kind == FULL else self.linear_attn(y, cache))
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c, storage):
        super().__init__()
        self.embed_tokens = Matrix(c["vocab_size"], c["hidden_size"], storage=storage)
        self.layers = nn.ModuleList([Layer(c, kind, storage) for kind in c["layer_types"]])
        self.norm = offset_norm(c["hidden_size"])


class Mtp(nn.Module):
    """The multi-token head: a full-attention layer behind a fusion of the token's
    embedding and the hidden state of the position before it. It shares embedding
    and head with the trunk, starts from the trunk's state after the final norm,
    and goes on from its own normed output."""

    def __init__(self, c, storage):
        super().__init__()
        H = c["hidden_size"]
        self.fc = Linear(H, 2 * H)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = offset_norm(H), offset_norm(H)
        self.layers = nn.ModuleList([Layer(c, FULL, storage)])
        self.norm = offset_norm(H)

    def forward(self, embedding, hidden, table, drafts):
        fused = torch.cat([self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden)], -1)
        return self.norm(self.layers[0](self.fc(fused), table, drafts=drafts))


class Qwen35(nn.Module):
    """`forward(ids [B, T])` returns a dict of `hidden`, `logits`, `taps`."""

    family = "qwen"

    def __init__(self, c, storage=None, dtype=torch.bfloat16):
        super().__init__()
        self.c, self.dtype = c, dtype
        self.model = Decoder(c, storage)
        self.mtp = Mtp(c, storage)

    def table(self, positions):
        """For positions `[T]`, or `[3, T]` in time, rows and columns of a picture: frequency
        `j` turns by the axis `j mod 3`, as far as `mrope_section` goes, else by time."""
        rule, d = self.c["rope_parameters"], int(self.c["head_dim"] * self.c["partial_rotary_factor"])
        j = torch.arange(0, d, 2, device=positions.device, dtype=torch.float32)
        f = rule["rope_theta"] ** (-j / d)
        if positions.dim() == 1:
            return rope_table(positions, f)
        axis = [0] * len(f)
        for a in (1, 2):
            axis[a : 3 * rule["mrope_section"][a] : 3] = [a] * len(axis[a : 3 * rule["mrope_section"][a] : 3])
        turned = positions.float()[torch.tensor(axis, device=positions.device)].t() * f
        turned = torch.cat([turned, turned], -1)
        return turned.cos(), turned.sin()

    def embed(self, ids):
        return F.embedding(ids, self.model.embed_tokens.stored().to(self.dtype))

    def head(self, hidden):
        return F.linear(hidden, self.model.embed_tokens.stored().to(hidden.dtype)).float()

    def forward(self, ids, caches=None, offset=0, logits=True, x=None, positions=None):
        """`x` stands in for the embeddings of `ids` where some rows are of a picture, and
        `positions` for consecutive ones."""
        x = self.embed(ids) if x is None else x
        if positions is None:
            positions = torch.arange(offset, offset + ids.shape[1], device=ids.device)
        table = self.table(positions)
        taps = [x]
        for i, layer in enumerate(self.model.layers):
            x = layer(x, table, None if caches is None else caches[i])
            taps.append(x)
        hidden = self.model.norm(x)
        return {"hidden": hidden, "logits": self.head(hidden) if logits else None, "taps": taps}

    def caches(self):
        return [KvCache() if kind == FULL else LinearCache() for kind in self.c["layer_types"]]

    def step(self, ids, caches, position):
        """Logits `[B, V]` after one more token `ids [B]`."""
        return self.forward(ids[:, None], caches, position)["logits"][:, 0]

    def unroll(self, ids, out, depth, exact):
        """Draft logits of each step of the multi-token head, `[B, T, V]` each.

        `ids [B, T + 1]`; `out` is the forward over `ids[:, :T]`. Step `k` of row `p`
        reads token `p + 1 + k` and predicts token `p + 2 + k`. With `exact` a step
        sees the true rows and its own drafts, as in use; without, it sees the rows
        of its own step, which is cheaper and close enough for joint training.
        """
        T = ids.shape[1] - 1
        e, hidden, logits, drafts = self.embed(ids), out["hidden"], [], ([], [])
        for k in range(depth):
            step_e = torch.cat([e[:, 1 + k :], e[:, :k]], 1)
            table = self.table(torch.arange(1 + k, T + 1 + k, device=ids.device))
            hidden = self.mtp(step_e, hidden, table, drafts if exact else ([], []))
            logits.append(self.head(hidden))
        return logits

    def balance(self):
        losses = [layer.mlp.balance for layer in self.model.layers if layer.moe]
        return sum(losses) / len(losses) if losses else 0.0
