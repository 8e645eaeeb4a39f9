"""An EAGLE-3 drafter for any of our targets (arXiv:2503.01840).

One layer reads the fusion of three residual streams of the target and the
embedding of the next token, and predicts over the draft vocabulary:

    g = W·[tap₁; tap₂; tap₃];   s = [n₁(e); n₂(h)],  h = g for true rows
    x = n₂(h) + attention(s);   x = x + mlp(n₃(x));   logits = head(n₄(x))

A chained step takes `x` in place of `g`. Tap `j` is the residual stream that
enters layer `j`.
"""

import torch
import torch.nn.functional as F
from torch import nn

from layers import GatedMlp, Linear, Norm, attend, attend_unrolled, heads, rope, rope_table

# Of a head: tokens that it can draft, width and attention heads.
SIZES = {
    "gemma": {"draft_vocab": 1792, "width": 128, "n_heads": 4},
    "qwen": {"draft_vocab": 2048, "width": 384, "n_heads": 6},
}


def config(target, taps, draft_vocab, width, n_heads):
    """A `config.json` in the speculators layout for a target's `config`."""
    hidden = target["hidden_size"]
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": draft_vocab,
        "norm_before_residual": True,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": width,
            "num_hidden_layers": 1,
            "num_attention_heads": n_heads,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "vocab_size": target["vocab_size"],
            "tie_word_embeddings": False,
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 3,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"architectures": target["architectures"], "name_or_path": None},
        },
    }


class Attention(nn.Module):
    def __init__(self, H, c, storage):
        super().__init__()
        self.n, self.m, self.d = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        self.q_proj = Linear(self.n * self.d, 2 * H, storage=storage)
        self.k_proj = Linear(self.m * self.d, 2 * H, storage=storage)
        self.v_proj = Linear(self.m * self.d, 2 * H, storage=storage)
        self.o_proj = Linear(H, self.n * self.d, storage=storage)

    def forward(self, s, table, drafts):
        q = rope(heads(self.q_proj(s), self.n, self.d), table)
        drafts[0].append(rope(heads(self.k_proj(s), self.m, self.d), table))
        drafts[1].append(heads(self.v_proj(s), self.m, self.d))
        scale = self.d**-0.5
        if len(drafts[0]) == 1:
            out = attend(q, drafts[0][0], drafts[1][0], scale)
        else:
            out = attend_unrolled(q, *drafts, scale)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, H, c, storage):
        super().__init__()
        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = Norm(H), Norm(H), Norm(H)
        self.self_attn = Attention(H, c, storage)
        self.mlp = GatedMlp(H, c["intermediate_size"], F.silu, storage)

    def forward(self, e, h, table, drafts):
        u = self.hidden_norm(h)
        x = u + self.self_attn(torch.cat([self.input_layernorm(e), u], -1), table, drafts)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3(nn.Module):
    """`kept [Vd]` are the target ids of the draft vocabulary, ascending."""

    def __init__(self, c, kept, storage=None):
        super().__init__()
        t = c["transformer_layer_config"]
        H = t["hidden_size"]
        self.c = c
        self.fc = Linear(H, 3 * H, storage=storage)
        self.layers = nn.ModuleList([Layer(H, t, storage)])
        self.norm = Norm(H)
        self.lm_head = Linear(len(kept), H, storage=storage)
        self.register_buffer("kept", kept, persistent=False)

    def mapping(self):
        """The tensors `d2t` (offsets) and `t2d` (membership) of the checkpoint."""
        kept = self.kept.cpu()
        t2d = torch.zeros(self.c["transformer_layer_config"]["vocab_size"], dtype=torch.bool)
        t2d[kept] = True
        return {"d2t": kept - torch.arange(len(kept)), "t2d": t2d}

    def unroll(self, target, ids, out, depth):
        """Draft logits of each step over the whole vocabulary, `[B, T, V]` each."""
        T = ids.shape[1] - 1
        e = F.embedding(ids, target.model.embed_tokens.stored().to(target.dtype))
        h = self.fc(torch.cat([out["taps"][j] for j in self.c["eagle_aux_hidden_state_layer_ids"]], -1))
        t = self.c["transformer_layer_config"]
        j = torch.arange(0, t["head_dim"], 2, device=ids.device, dtype=torch.float32)
        logits, drafts = [], ([], [])
        for k in range(depth):
            table = rope_table(
                torch.arange(k, T + k, device=ids.device), t["rope_theta"] ** (-j / t["head_dim"])
            )
            h = self.layers[0](torch.cat([e[:, 1 + k :], e[:, :k]], 1), h, table, drafts)
            small = self.lm_head(self.norm(h)).float()
            whole = torch.full((*small.shape[:-1], t["vocab_size"]), -30.0, device=ids.device)
            logits.append(whole.index_copy(-1, self.kept, small))
        return logits
