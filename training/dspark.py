"""A DSpark drafter for any of our targets, in the layout of DeepSpec with layers of Qwen 3.

A block of `n` rows stands for the newest token, the anchor, and those after it. Its rows see
each other, and what the target has made of the rows before the anchor:

    c = n₀(W·[tap₁; …; tap_A])                 of every row of the target
    x = [E(anchor); E(mask); …];  x = x + attention(n₁(x), [c; x]);  x = x + mlp(n₂(x))
    z = n₃(x);  logits_i = E·z_i + W₂·w₁(token before);  confidence_i = σ(v·[z_i; w₁(token before)] + b)

Row `i` predicts the token after the one it stands for. `w₁` and `W₂` are the Markov head, which
tells a row which token was chosen before; a confidence is how likely the target keeps a guess if
it kept those before. Embedding and output matrix are the target's and not stored.

The loss of position `i` has the weight `e^(−i/4)`, for `q` the draft's and `p` the target's
distribution, `kept = Σ min(p, q)`:

    CE(p, q) + 0.3·CE(argmax p, q) + 0.9·Σ|p − q| + BCE(confidence, kept)

Letters: `A` anchors of a row, `n` rows of a block, `r` rank of the Markov head.
"""

import torch
import torch.nn.functional as F
from torch import nn

from layers import GatedMlp, Linear, Matrix, Norm, heads, rope, rope_table, share_heads

# By the target's family: width, attention heads, and the token that stands for those to come.
SIZES = {
    "gemma": {"width": 256, "n_heads": 4, "mask": 4},
    "qwen": {"width": 256, "n_heads": 4, "mask": 8179},  # <mask>, <|fim_pad|>
}
BLOCK = 8
LAYERS = 2
RANK = 32
DECAY = 4.0
ARGMAX_WEIGHT = 0.3
L1_WEIGHT = 0.9
ANCHORS = 64  # of a row in a step of training
AT_ONCE = 64  # anchors that are measured at once


def config(target, taps, width, n_heads, mask):
    """A `config.json` in the layout of DeepSpec for a target's `config`. Tap `j` is the
    residual stream that enters layer `j`."""
    softcap = target.get("final_logit_softcapping")
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "vocab_size": target["vocab_size"],
        "hidden_size": target["hidden_size"],
        "intermediate_size": width,
        "num_hidden_layers": LAYERS,
        "layer_types": ["full_attention"] * LAYERS,
        "num_attention_heads": n_heads,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": target["max_position_embeddings"],
        "tie_word_embeddings": False,
        "num_target_layers": target["num_hidden_layers"],
        "target_layer_ids": [j - 1 for j in taps],
        "block_size": BLOCK,
        "mask_token_id": mask,
        "num_anchors": ANCHORS,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        **({"final_logit_softcapping": softcap} if softcap else {}),
    }


class Attention(nn.Module):
    def __init__(self, c, storage):
        super().__init__()
        H, self.n, self.m = c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"]
        self.d = c["head_dim"]
        self.q_proj = Linear(self.n * self.d, H, storage=storage)
        self.k_proj = Linear(self.m * self.d, H, storage=storage)
        self.v_proj = Linear(self.m * self.d, H, storage=storage)
        self.o_proj = Linear(H, self.n * self.d, storage=storage)
        self.q_norm, self.k_norm = Norm(self.d), Norm(self.d)

    def forward(self, x, c, tables, seen):
        """`x [B, A·n, H]` over `c [B, T, H]` and itself; `seen [A·n, T + A·n]`."""
        rows = torch.cat([c, x], 1)
        whole, own = tables
        q = rope(self.q_norm(heads(self.q_proj(x), self.n, self.d)), own)
        k = rope(self.k_norm(heads(self.k_proj(rows), self.m, self.d)), whole)
        v = heads(self.v_proj(rows), self.m, self.d)
        k, v = share_heads(k, self.n), share_heads(v, self.n)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=self.d**-0.5)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, c, storage):
        super().__init__()
        H = c["hidden_size"]
        self.input_layernorm, self.post_attention_layernorm = Norm(H), Norm(H)
        self.self_attn = Attention(c, storage)
        self.mlp = GatedMlp(H, c["intermediate_size"], F.silu, storage)

    def forward(self, x, c, tables, seen):
        x = x + self.self_attn(self.input_layernorm(x), c, tables, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Markov(nn.Module):
    """What a token says about the one after it; rows of both tables are one group each."""

    def __init__(self, vocab, rank, storage):
        super().__init__()
        storage = storage and storage.of_group(rank)
        self.markov_w1 = Matrix(vocab, rank, storage=storage)
        self.markov_w2 = Linear(vocab, rank, storage=storage)

    def embed(self, ids, dtype):
        return F.embedding(ids, self.markov_w1.stored().to(dtype))


class Confidence(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.proj = nn.Linear(n, 1)

    def forward(self, z, before):
        """Scores whose sigmoid is the confidence."""
        return self.proj(torch.cat([z, before], -1).float())[..., 0]


class Dspark(nn.Module):
    def __init__(self, c, storage=None):
        super().__init__()
        H, r = c["hidden_size"], c["markov_rank"]
        self.c, self.n_rows = c, c["block_size"]
        self.fc = Linear(H, len(c["target_layer_ids"]) * H, storage=storage)
        self.hidden_norm = Norm(H)
        self.layers = nn.ModuleList([Layer(c, storage) for _ in range(c["num_hidden_layers"])])
        self.norm = Norm(H)
        self.markov_head = Markov(c["vocab_size"], r, storage)
        self.confidence_head = Confidence(H + r)

    def table(self, positions):
        d = self.c["head_dim"]
        j = torch.arange(0, d, 2, device=positions.device, dtype=torch.float32)
        return rope_table(positions, self.c["rope_theta"] ** (-j / d))

    def hidden(self, target, ids, out, anchors):
        """`z [B, A, n, H]` of the blocks whose anchors are at the positions `anchors [A]`."""
        taps = [out["taps"][j + 1] for j in self.c["target_layer_ids"]]
        c = self.hidden_norm(self.fc(torch.cat(taps, -1)))
        (B, T), A, n = c.shape[:2], len(anchors), self.n_rows
        tokens = torch.full((B, A, n), self.c["mask_token_id"], device=ids.device)
        tokens[:, :, 0] = ids[:, anchors]
        x = F.embedding(tokens, target.model.embed_tokens.stored().to(target.dtype)).flatten(1, 2)
        past = torch.arange(T, device=ids.device)
        own = (anchors[:, None] + torch.arange(n, device=ids.device)).flatten()
        block = torch.arange(A, device=ids.device).repeat_interleave(n)
        before = past[None] < anchors.repeat_interleave(n)[:, None]
        seen = torch.cat([before, block[:, None] == block[None]], 1)
        tables = self.table(torch.cat([past, own])), self.table(own)
        for layer in self.layers:
            x = layer(x, c, tables, seen)
        return self.norm(x).unflatten(1, (A, n))

    def scores(self, target, z, before):
        """Logits `[B, A, n, V]` and scores of confidence `[B, A, n]` after the tokens
        `before [B, A, n]`."""
        logits = F.linear(z, target.model.embed_tokens.stored().to(z.dtype)).float()
        if softcap := self.c.get("final_logit_softcapping"):
            logits = torch.tanh(logits / softcap) * softcap
        e = self.markov_head.embed(before, z.dtype)
        return logits + self.markov_head.markov_w2(e).float(), self.confidence_head(z, e)

    def blocks(self, target, ids, out, anchors):
        """`scores` of the blocks at `anchors`, each row after the true token before it.
        Beyond the end of `ids [B, T + 1]` that is token 0."""
        at = anchors[:, None] + torch.arange(self.n_rows, device=ids.device)
        before = F.pad(ids, (0, self.n_rows))[:, at]
        return self.scores(target, self.hidden(target, ids, out, anchors), before)

    def training_loss(self, target, ids, out, loss):
        """`loss` of blocks at random anchors, the same of every row of the batch."""
        T = ids.shape[1] - 1
        most = T - self.n_rows
        anchors = torch.randperm(most, device=ids.device)[:ANCHORS].sort().values + 1
        logits, confidence = self.blocks(target, ids, out, anchors)
        at = anchors[:, None] + torch.arange(self.n_rows, device=ids.device)
        return loss(logits, out["logits"][:, at], confidence)

    def unroll(self, target, ids, out, depth):
        """Draft logits of each position over the whole vocabulary, `[B, T, V]` each: those of
        row `p` are of the block whose anchor is token `p + 1`."""
        parts, _ = self.every_block(target, ids, out)
        return [torch.cat([p[:, :, k] for p in parts], 1) for k in range(depth)]

    def every_block(self, target, ids, out):
        """`blocks` of each row but the first as anchor, in parts."""
        anchors = torch.arange(1, ids.shape[1], device=ids.device)
        found = [self.blocks(target, ids, out, part) for part in anchors.split(AT_ONCE)]
        return [logits for logits, _ in found], torch.cat([scores for _, scores in found], 1)


def block_loss(logits, wanted, confidence):
    """The loss of draft `logits` for the target's `wanted`, `[B, A, n, V]` each, and of the
    scores of `confidence [B, A, n]`."""
    wanted = wanted.detach()
    logp, p = F.log_softmax(logits, -1), F.softmax(wanted, -1)
    kept = torch.minimum(p, logp.exp()).sum(-1)
    own = logp.gather(-1, wanted.argmax(-1, keepdim=True))[..., 0]
    each = -(p * logp).sum(-1) - ARGMAX_WEIGHT * own + 2 * L1_WEIGHT * (1 - kept)
    each = each + F.binary_cross_entropy_with_logits(confidence, kept.detach(), reduction="none")
    weights = torch.exp(-torch.arange(logits.shape[2], device=logits.device) / DECAY)
    return (each * weights).sum(-1).mean() / weights.sum()
