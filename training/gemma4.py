"""Gemma 4: the decoder and its assistant, with the tensor names of the checkpoints.

A layer, with `n_i` RMS norms of their own:

    x = x + n₂(attention(n₁(x)))
    x = x + n₄(mlp(n₃(x)))                      (with experts: see `Layer`)
    x = x + n₅(project(g(gate(x)) · ple))       (per-layer embeddings)
    x = x · layer_scalar

Queries and keys are normed, so scores have no 1/√d; values are normed without a
weight. In full layers values come from the key projection. Trailing layers may
read the keys and values of earlier ones.
"""

import math

import torch
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
    gelu_tanh,
    heads,
    rope,
    rope_table,
    top_k_weights,
)

SLIDING, FULL = "sliding_attention", "full_attention"
SOFTCAP = 30.0


def config(layer_types, hidden=512, width=768, vocab=8192, **more):
    """A `config.json` of the text decoder."""
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": len(layer_types),
        "layer_types": list(layer_types),
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "global_head_dim": 128,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "sliding_window": 128,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "final_logit_softcapping": SOFTCAP,
        "use_bidirectional_attention": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pad_token_id": 0,
        "bos_token_id": 2,
        "eos_token_id": [1, 5],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
        },
        **more,
    }


def frequencies(c, kind, device):
    """Inverse rotary frequencies `[d/2]`; zero where nothing is rotated."""
    rule = c["rope_parameters"][kind]
    d = c["global_head_dim"] if kind == FULL else c["head_dim"]
    j = torch.arange(d // 2, device=device, dtype=torch.float32)
    f = rule["rope_theta"] ** (-2 * j / d)
    turned = int(rule.get("partial_rotary_factor", 1.0) * d // 2)
    return torch.where(j < turned, f, 0.0)


class Attention(nn.Module):
    """`kv` is None for layers that own keys and values."""

    def __init__(self, c, index, storage, query_only=False):
        super().__init__()
        self.full = c["layer_types"][index] == FULL
        k_eq_v = c["attention_k_eq_v"] and self.full
        self.d = c["global_head_dim"] if self.full else c["head_dim"]
        self.n = c["num_attention_heads"]
        self.m = c["num_global_key_value_heads"] if k_eq_v else c["num_key_value_heads"]
        self.window = None if self.full else c["sliding_window"]
        H = c["hidden_size"]
        # Scores have no 1/√d, so the two norms start at d^(-1/4) each.
        start = self.d**-0.25
        self.q_proj = Linear(self.n * self.d, H, storage=storage)
        self.q_norm = Norm(self.d, init=start)
        self.o_proj = Linear(H, self.n * self.d, storage=storage)
        self.owns = not query_only
        if self.owns:
            self.k_proj = Linear(self.m * self.d, H, storage=storage)
            self.k_norm = Norm(self.d, init=start)
            self.v_proj = None if k_eq_v else Linear(self.m * self.d, H, storage=storage)
        self.v_norm = Norm(None)

    def forward(self, x, table, kv=None, cache=None, past_only=False):
        """Returns the output and the keys and values that were read."""
        q = rope(self.q_norm(heads(self.q_proj(x), self.n, self.d)), table)
        if kv is None:
            raw = heads(self.k_proj(x), self.m, self.d)
            k = rope(self.k_norm(raw), table)
            v = self.v_norm(raw if self.v_proj is None else heads(self.v_proj(x), self.m, self.d))
            if cache is not None:
                k, v = cache.append(k, v, self.window)
        else:
            k, v = kv
        if cache is not None:
            out = attend_cached(q, k, v, 1.0)
        else:
            out = attend(q, k, v, 1.0, self.window, past_only)
        return self.o_proj(out.transpose(1, 2).flatten(2)), (k, v)


class Router(nn.Module):
    """Expert weights of a token: `softmax(proj(x / rms · scale / √H))`, top k."""

    def __init__(self, c):
        super().__init__()
        E, H = c["num_experts"], c["hidden_size"]
        self.proj = Linear(E, H)
        self.scale = nn.Parameter(torch.ones(H))
        self.per_expert_scale = nn.Parameter(torch.ones(E))
        self.norm = Norm(None)
        self.k, self.factor = c["top_k_experts"], H**-0.5

    def forward(self, x):
        r = self.norm(x).float() * self.scale * self.factor
        p = torch.softmax(r @ self.proj.stored().float().t(), -1)
        return top_k_weights(p, self.k) * self.per_expert_scale, p


class Layer(nn.Module):
    def __init__(self, c, index, storage, query_only=False):
        super().__init__()
        H = c["hidden_size"]
        # Branches start small: 2·L of them add up to the size of the embedding.
        small = (2 * c["num_hidden_layers"]) ** -0.5
        shared = index >= c["num_hidden_layers"] - c["num_kv_shared_layers"]
        self.self_attn = Attention(c, index, storage, query_only or shared)
        width = c["intermediate_size"] * (2 if shared and c["use_double_wide_mlp"] else 1)
        self.mlp = GatedMlp(H, width, gelu_tanh, storage)
        self.input_layernorm = Norm(H)
        self.post_attention_layernorm = Norm(H, init=small)
        self.pre_feedforward_layernorm = Norm(H)
        self.post_feedforward_layernorm = Norm(H, init=small)
        self.layer_scalar = nn.Parameter(torch.ones(1))
        self.moe = bool(c["enable_moe_block"])
        if self.moe:
            self.router = Router(c)
            self.experts = Experts(c["num_experts"], H, c["moe_intermediate_size"], gelu_tanh, storage)
            self.pre_feedforward_layernorm_2 = Norm(H)
            self.post_feedforward_layernorm_1 = Norm(H)
            self.post_feedforward_layernorm_2 = Norm(H)
        P = c["hidden_size_per_layer_input"]
        self.ple = bool(P)
        if P:
            self.per_layer_input_gate = Linear(P, H, storage=storage)
            self.per_layer_projection = Linear(H, P, storage=storage)
            self.post_per_layer_input_norm = Norm(H, init=small)
        self.balance = None

    def forward(self, x, table, kv=None, ple=None, cache=None, past_only=False):
        a, kv = self.self_attn(self.input_layernorm(x), table, kv, cache, past_only)
        x = x + self.post_attention_layernorm(a)
        m = self.mlp(self.pre_feedforward_layernorm(x))
        if self.moe:
            weights, p = self.router(x)
            self.balance = balance_loss(p, weights)
            e = self.experts(self.pre_feedforward_layernorm_2(x), weights)
            m = self.post_feedforward_layernorm_1(m) + self.post_feedforward_layernorm_2(e)
        x = x + self.post_feedforward_layernorm(m)
        if self.ple:
            p = self.per_layer_projection(gelu_tanh(self.per_layer_input_gate(x)) * ple)
            x = x + self.post_per_layer_input_norm(p)
        return x * self.layer_scalar.to(x.dtype), kv


def balance_loss(p, weights):
    """`E·Σ_e share_e·mean p_e`: one when experts are used evenly."""
    used = (weights.detach() > 0).float().flatten(0, -2).mean(0)
    return p.shape[-1] * (used / used.sum() * p.flatten(0, -2).mean(0)).sum()


class Decoder(nn.Module):
    """Embedding, layers, final norm; `model.` of the checkpoints."""

    def __init__(self, c, storage, query_only=False):
        super().__init__()
        H, L, P = c["hidden_size"], c["num_hidden_layers"], c["hidden_size_per_layer_input"]
        self.c = c
        self.embed_tokens = Matrix(c["vocab_size"], H, storage=storage)
        self.layers = nn.ModuleList([Layer(c, i, storage, query_only) for i in range(L)])
        self.norm = Norm(H)
        if P:
            self.embed_tokens_per_layer = Matrix(c["vocab_size_per_layer_input"], L * P, storage=storage)
            self.per_layer_model_projection = Linear(L * P, H, storage=storage)
            self.per_layer_projection_norm = Norm(P)

    def tables(self, positions):
        kinds = set(self.c["layer_types"])
        return {k: rope_table(positions, frequencies(self.c, k, positions.device)) for k in kinds}

    def per_layer(self, ids, e):
        """Per-layer inputs `[B, T, L, P]`, or None."""
        P, L = self.c["hidden_size_per_layer_input"], self.c["num_hidden_layers"]
        if not P:
            return None
        token = nn.functional.embedding(ids, self.embed_tokens_per_layer.stored().to(e.dtype)) * P**0.5
        context = self.per_layer_model_projection(e) * self.c["hidden_size"] ** -0.5
        context = self.per_layer_projection_norm(context.unflatten(-1, (L, P)))
        return (context + token.unflatten(-1, (L, P))) * 2**-0.5


class Gemma4(nn.Module):
    """`forward(ids [B, T])` returns a dict of `hidden`, `logits`, `kv`, `taps`."""

    family = "gemma"

    def __init__(self, c, storage=None, dtype=torch.bfloat16):
        super().__init__()
        self.c, self.dtype = c, dtype
        self.model = Decoder(c, storage)
        self.factor = torch.tensor(math.sqrt(c["hidden_size"]), dtype=torch.bfloat16, device="cpu").item()

    def embed(self, ids):
        """Scaled embeddings; the factor is rounded to bf16 as in the reference."""
        return nn.functional.embedding(ids, self.model.embed_tokens.stored().to(self.dtype)) * self.factor

    def head(self, hidden):
        """Capped logits of a final hidden state."""
        logits = nn.functional.linear(hidden, self.model.embed_tokens.stored().to(hidden.dtype)).float()
        return SOFTCAP * torch.tanh(logits / SOFTCAP)

    def forward(self, ids, caches=None, offset=0, logits=True, x=None):
        """`x` stands in for the embeddings of `ids` where some rows are of a picture."""
        c = self.c
        x = self.embed(ids) if x is None else x
        ple = self.model.per_layer(ids, x)
        tables = self.model.tables(torch.arange(offset, offset + ids.shape[1], device=ids.device))
        kv, taps = {}, [x]
        for i, layer in enumerate(self.model.layers):
            kind = c["layer_types"][i]
            given = None if layer.self_attn.owns else kv[kind]
            cache = None if caches is None else caches[i]
            inputs = None if ple is None else ple[:, :, i]
            x, kv[kind] = layer(x, tables[kind], given, inputs, cache)
            taps.append(x)
        hidden = self.model.norm(x)
        return {"hidden": hidden, "logits": self.head(hidden) if logits else None, "kv": kv, "taps": taps}

    def caches(self):
        return [KvCache() for _ in self.model.layers]

    def step(self, ids, caches, position):
        """Logits `[B, V]` after one more token `ids [B]`."""
        return self.forward(ids[:, None], caches, position)["logits"][:, 0]

    def balance(self):
        losses = [layer.balance for layer in self.model.layers if layer.moe]
        return sum(losses) / len(losses) if losses else 0.0


def assistant_config(target, hidden=256, width=768, centroids=None, top=None):
    """A `config.json` of an assistant for the target's `config`."""
    text = {
        **target,
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": 4,
        "layer_types": [SLIDING] * 3 + [FULL],
        "num_attention_heads": max(4, target["num_key_value_heads"]),
        "num_kv_shared_layers": 4,
        "final_logit_softcapping": None,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "use_double_wide_mlp": False,
    }
    for key in ("architectures", "dtype", "quantization", "quantization_config"):
        # Of the target's file, and of one in codes.
        text.pop(key, None)
    c = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "bfloat16",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": centroids is not None,
        "tie_word_embeddings": True,
        "text_config": text,
    }
    if centroids:
        c.update(num_centroids=centroids, centroid_intermediate_top_k=top)
    return c


class Assistant(nn.Module):
    """The drafter that reads the target's keys and values.

    All steps of a draft keep the position of the first: row `q` of a batch drafts
    after tokens `0..q+1` and sees the keys of `0..q`.
    """

    def __init__(self, c, storage=None):
        super().__init__()
        text = c["text_config"]
        B, H = c["backbone_hidden_size"], text["hidden_size"]
        self.c = c
        self.pre_projection = Linear(H, 2 * B, storage=storage)
        self.post_projection = Linear(B, H, storage=storage)
        # Every layer reads the target: no layer owns keys, and none is counted as shared twice.
        self.model = Decoder({**text, "num_kv_shared_layers": 0}, storage, query_only=True)

    def step(self, embedding, hidden, kv, tables):
        """One step for all rows: `(z [B, T, H], next hidden [B, T, B])`."""
        x = self.pre_projection(torch.cat([embedding, hidden], -1))
        for layer, kind in zip(self.model.layers, self.model.c["layer_types"]):
            x, _ = layer(x, tables[kind], kv[kind], past_only=True)
        z = self.model.norm(x)
        return z, self.post_projection(z)

    def set_centroids(self, centroids, ordering, top):
        """Switches to the centroid head (`centroids.py`)."""
        self.register_buffer("centroids", centroids, persistent=False)
        self.register_buffer("ordering", ordering, persistent=False)
        self.top = top
        self.c.update(
            use_ordered_embeddings=True, num_centroids=len(centroids), centroid_intermediate_top_k=top
        )

    def head(self, z):
        """Logits over the vocabulary; tokens outside the best clusters get a floor."""
        logits = nn.functional.linear(z, self.model.embed_tokens.stored().to(z.dtype)).float()
        if not self.c["use_ordered_embeddings"]:
            return logits
        best = (z.float() @ self.centroids.t()).topk(self.top, -1).indices
        seen = torch.zeros(*z.shape[:-1], len(self.centroids), dtype=torch.bool, device=z.device)
        seen = seen.scatter(-1, best, True).repeat_interleave(len(self.ordering) // len(self.centroids), -1)
        by_token = torch.empty_like(self.ordering)
        by_token[self.ordering] = torch.arange(len(self.ordering), device=z.device)
        return logits.masked_fill(~seen[..., by_token], -1e4)

    def states(self, target, ids, out, depth):
        """The final states `z [B, T, H]` of every step of a draft."""
        T = ids.shape[1] - 1
        e, hidden, states = target.embed(ids), out["hidden"], []
        tables = self.model.tables(torch.arange(1, T + 1, device=ids.device))
        for k in range(depth):
            z, hidden = self.step(torch.cat([e[:, 1 + k :], e[:, :k]], 1), hidden, out["kv"], tables)
            states.append(z)
        return states

    def unroll(self, target, ids, out, depth):
        """Draft logits of each step, `[B, T, V]` each, rows as in `ids[:, :T]`.

        `ids [B, T + 1]`; `out` is the target's forward over `ids[:, :T]`. Step `k`
        of row `q` reads token `q + 1 + k` and predicts token `q + 2 + k`.
        """
        return [self.head(z) for z in self.states(target, ids, out, depth)]
