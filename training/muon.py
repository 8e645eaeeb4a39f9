"""The optimisers: Muon for matrices, AdamW for everything else.

Muon replaces the momentum `M` of a matrix by its nearest semi-orthogonal one, by
five steps of a Newton–Schulz iteration (Jordan et al. 2024), scaled to the size
of an Adam update: `W ← W·(1 − lr·decay) − lr·0.2·√max(a, b)·O`, `O ≈ UVᵀ` of
`M = UΣVᵀ` (Liu et al. 2025, arXiv:2502.16982). Matrices of one shape share one
batched iteration.
"""

import torch

# Quintic whose iterates push singular values in (0, 1] towards one.
QUINTIC = (3.4445, -4.7750, 2.0315)


@torch.compile(disable=not torch.cuda.is_available())
def orthogonal(m):
    """Semi-orthogonal matrices near `m [n, a, b]`, in bf16."""
    x = m.to(torch.bfloat16)
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = QUINTIC
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    def __init__(self, parameters, lr, momentum=0.95, weight_decay=0.1):
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            by_shape = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                state["m"].lerp_(p.grad, 1 - group["momentum"])
                # Stacked experts are as many matrices.
                by_shape.setdefault(p.shape[-2:], []).append(p)
            for shape, parameters in by_shape.items():
                ahead = [p.grad.lerp(self.state[p]["m"], group["momentum"]) for p in parameters]
                updates = orthogonal(torch.cat([x.reshape(-1, *shape) for x in ahead]))
                size = 0.2 * max(shape) ** 0.5 * group["lr"]
                parts = updates.split([p.numel() // (shape[0] * shape[1]) for p in parameters])
                for p, part in zip(parameters, parts):
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(part.view_as(p).to(p.dtype), alpha=-size)


# Parts of names of tables that are looked up or slid, not multiplied.
TABLES = ("embed_tokens", "markov_w1", "conv1d", "position_embedding_table", "pos_embed")


def optimisers(modules, lr):
    """Muon and AdamW over the trainable parameters of `modules`."""
    matrices, rest = [], []
    for module in modules:
        for name, p in module.named_parameters():
            if p.requires_grad:
                # A matrix of one row, such as a gate, is a vector.
                is_matrix = p.dim() >= 2 and p.shape[-2] > 1 and not any(table in name for table in TABLES)
                (matrices if is_matrix else rest).append(p)
    adam = torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=rest[0].is_cuda)
    return [Muon(matrices, lr), adam]
