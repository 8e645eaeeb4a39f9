"""The gated delta rule on the Triton kernels of flash-linear-attention, if it is installed.

`rule()` returns a function with the arguments of `qwen3_5.gated_delta`, or None
where the package is missing or its result or a gradient is not that of the plain
form. Six times less memory traffic than the plain form; values in bf16.

Triton 3.4 to 3.7.0 compiles one kernel of the backward pass wrongly on Hopper, and
the package refuses to run it there. Per chunk, with cumulative log₂ decay `G` and
`D_ij = 2^(G_i − G_j)` for `j ≤ i`, it is

    dP = scale·(dO·V'ᵀ ⊙ D);   dW = −dV·Sᵀ
    dQ = scale·2^G·(dO·Sᵀ) + dP·K;   dK = 2^(G_C − G)·(V'·dSᵀ) + dPᵀ·Q
    dG = Σ dQ·Q − Σ dK·K;   dG_C += 2^(G_C)·Σ S·dS + Σ 2^(G_C − G)·(V'·dSᵀ)·K

which `products` computes with batched products instead.
"""

import torch

try:
    from fla.ops.gated_delta_rule import chunk as fla
except ImportError:
    fla = None

CHUNK = 64
TOLERANCE = 0.05  # bf16 operands; a wrong kernel is off by more than one


def into_chunks(x):
    """`[B, T, n, ..] → [B, N, n, C, ..]`."""
    return x.unflatten(1, (-1, CHUNK)).transpose(2, 3)


def from_chunks(x):
    return x.transpose(2, 3).flatten(1, 2)


@torch.compile(dynamic=False, disable=not torch.cuda.is_available())
def products(q, k, v, do, h, dh, g, dv, scale):
    """`(dq, dk, dw, dg)` of the rows `[B, T, n, d]`; states `h, dh [B, N, n, d, d]`."""
    q, k, v, do, dv = map(into_chunks, (q, k, v, do, dv))
    g = into_chunks(g[..., None])  # [B, N, n, C, 1]
    last = g[..., -1:, :]
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=q.device).tril()
    decay = torch.where(lower, g - g.mT, float("-inf")).exp2() * scale
    dp = ((do @ v.mT).float() * decay).to(q.dtype)
    dw = -(dv @ h.mT)
    dq = (do @ h.mT).float() * g.exp2() * scale + (dp @ k).float()
    faded = (v @ dh.mT).float() * (last - g).exp2()
    dk = faded + (dp.mT @ q).float()
    dg = (dq * q).sum(-1) - (dk * k).sum(-1)
    ends = last[..., 0, 0].exp2() * (h.float() * dh.float()).sum((-1, -2)) + (faded * k).sum((-1, -2))
    dg = torch.cat([dg[..., :-1], dg[..., -1:] + ends[..., None]], -1)
    return from_chunks(dq.to(q.dtype)), from_chunks(dk.to(q.dtype)), from_chunks(dw), from_chunks(dg)


def replacement(q, k, v, do, h, dh, w=None, g=None, dv=None, scale=None, **_):
    return tuple(x.contiguous() for x in products(q, k, v, do, h, dh, g, dv, scale))


@torch.library.custom_op("paceline::delta", mutates_args=())
def delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows `[B, T, n, d]`, `g, beta [B, T, n]`: the output, and what the backward pass needs."""
    total, out, inverse, *_ = fla.chunk_gated_delta_rule_fwd(q, k, v, g, beta, 1.0, None, False)
    return out, total, inverse


@delta.register_fake
def _(q, k, v, g, beta):
    inverse = q.new_empty(*g.shape, CHUNK)
    return torch.empty_like(v), torch.empty_like(g), inverse


@torch.library.custom_op("paceline::delta_backward", mutates_args=())
def delta_backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    total: torch.Tensor,
    beta: torch.Tensor,
    inverse: torch.Tensor,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dq, dk, dv, db, dg, *_ = fla.chunk_gated_delta_rule_bwd(
        q, k, v, total, beta, inverse, 1.0, None, grad.contiguous(), None
    )
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dg.float(), db.float()


@delta_backward.register_fake
def _(q, k, v, total, beta, inverse, grad):
    like = torch.empty_like
    return like(q), like(k), like(v), like(total), like(beta)


def keep(ctx, inputs, output):
    q, k, v, _, beta = inputs
    _, total, inverse = output
    ctx.save_for_backward(q, k, v, total, beta, inverse)


def gradients(ctx, grad, *_):
    q, k, v, total, beta, inverse = ctx.saved_tensors
    return delta_backward(q, k, v, total, beta, inverse, grad)


delta.register_autograd(gradients, setup_context=keep)


def gated_delta(q, k, v, g, beta):
    """As `qwen3_5.gated_delta`: heads before rows; any number of rows."""
    T = q.shape[2]
    pad = -T % CHUNK
    rows = lambda x: torch.nn.functional.pad(x.transpose(1, 2), (0, 0) * (x.dim() - 2) + (0, pad))
    q, k, v = (rows(x).to(torch.bfloat16).contiguous() for x in (q, k, v))
    g, beta = (rows(x).float().contiguous() for x in (g, beta))
    return delta(q, k, v, g, beta)[0].transpose(1, 2)[:, :, :T].float()


def agrees(plain, device):
    """Whether the kernels' output and gradients are those of `plain`, within rounding."""
    random = torch.Generator(device=device).manual_seed(1)
    normal = lambda *shape: torch.randn(shape, generator=random, device=device)
    unit = lambda x: x / x.norm(dim=-1, keepdim=True)
    shape = (8, 8, 512, 64)
    q, k, v = unit(normal(*shape)) * 0.125, unit(normal(*shape)), normal(*shape)
    g, beta = -normal(*shape[:3]).abs() * 0.1, torch.sigmoid(normal(*shape[:3]))
    grad, results = normal(*shape), []
    for rule in (plain, gated_delta):
        inputs = [x.clone().requires_grad_(True) for x in (q, k, v, g, beta)]
        out = rule(*inputs)
        out.backward(grad)
        results.append([out.detach(), *(x.grad for x in inputs)])
    errors = [((a - b).norm() / a.norm()).item() for a, b in zip(*results)]
    return max(errors) < TOLERANCE, errors


def rule(plain, device, log):
    """The kernels' rule, or None."""
    if fla is None or not str(device).startswith("cuda"):
        return None
    fla.chunk_bwd_dqkwg = replacement
    try:
        fine, errors = agrees(plain, device)
    except Exception as error:  # a kernel that does not compile must not end a training run
        log(f"delta kernels are not used: {type(error).__name__}: {str(error)[:300]}")
        return None
    log("delta kernels: relative errors " + " ".join(f"{e:.4f}" for e in errors))
    return gated_delta if fine else None
