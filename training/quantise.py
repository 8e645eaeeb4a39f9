#!/usr/bin/env python3
"""Converts a bf16 Hugging Face checkpoint to an MLX-format quantised one.

    python quantise.py SOURCE TARGET [--bits 8] [--group 64] [--beside FOLDER]

A row of `n` weights becomes `n/group` groups. Group `g` keeps a scale `s_g` and
a bias `b_g` in bf16 and unsigned codes `c` of `bits` bits:

    w ≈ s_g·c + b_g

The end of the group that lies farther from zero is stored exactly (it is the
bias), and the scale is chosen so that zero is a code too. Codes are picked
after the scale has been rounded to bf16; an error is at most half a code, and
one code more at the near end, where both roundings may shorten the range.

Quantised: linear matrices, stacked experts and embeddings whose last dimension
is a multiple of the group. Left alone: norms, convolutions, `A_log`, `dt_bias`,
`layer_scalar`, `mtp.fc`, routers, the centroid head, vectors.

An MLX file of a Qwen model also differs in layout, and one tensor decides for
all: `conv1d.weight` is `[C, K, 1]`, and the zero-centred norms hold `1 + w`.

`--beside FOLDER` is for a checkpoint that only adds to another, as a centroid head
adds to an assistant and a picture tower to a text model: what FOLDER holds is a link to
its file, the rest a second shard. A SOURCE in codes already keeps its bits.
Deliberately absent: any format but affine, any framework but numpy.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

import numpy as np

from checkpoint import Tensor, bf16, read_file, read_folder, write_file

# Norms of Qwen 3.5 that multiply by `1 + w`; `linear_attn.norm` does not.
OFFSET_NORMS = (
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
    "self_attn.q_norm.weight",
    "self_attn.k_norm.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
    "mtp.pre_fc_norm_hidden.weight",
)

# Matrices that stay in bf16: small, and read by code that expects them plain.
KEPT = (
    "mtp.fc.weight",
    "conv1d.weight",
    "masked_embedding.centroids.weight",
    "router.proj.weight",
    "mlp.gate.weight",
    "shared_expert_gate.weight",
    "confidence_head.proj.weight",
)

# Tables of a Markov head: their rows are short, and one group each.
MARKOV = ("markov_head.markov_w1", "markov_head.markov_w2")

# Fused expert tensors and the stacked MLX modules they become.
EXPERT_ROOMS = {"gemma": "experts.switch_glu", "qwen": "switch_mlp"}


def quantise_rows(values, bits, group):
    """Returns `(packed words u32, scales, biases)` of `values [..., n]`."""
    shape = values.shape
    groups = values.reshape(*shape[:-1], shape[-1] // group, group)
    low, high = groups.min(-1), groups.max(-1)
    n_codes = (1 << bits) - 1
    step = np.maximum((high - low) / n_codes, 1e-7)
    # The bias is the end farther from zero; codes then count towards the other.
    from_low = np.abs(low) > np.abs(high)
    edge = np.where(from_low, low, high)
    step = np.where(from_low, step, -step)
    to_zero = np.round(edge / step)
    step = np.where(to_zero == 0, step, edge / np.where(to_zero == 0, 1, to_zero))
    bias = np.where(to_zero == 0, 0, edge)
    scales, biases = bf16(step), bf16(bias)
    codes = np.round((groups - biases.float32()[..., None]) / scales.float32()[..., None])
    codes = np.clip(codes, 0, n_codes).astype(np.uint32).reshape(shape)
    per_word = 32 // bits
    lanes = codes.reshape(*shape[:-1], shape[-1] // per_word, per_word)
    shifts = (np.arange(per_word) * bits).astype(np.uint32)
    words = np.bitwise_or.reduce(lanes << shifts, axis=-1).astype(np.uint32)
    return Tensor("U32", words), scales, biases


def dequantise_rows(words, scales, biases, bits, group):
    """The inverse, in float32: `s_g·c + b_g`."""
    per_word = 32 // bits
    shifts = (np.arange(per_word) * bits).astype(np.uint32)
    codes = (words.bits[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    codes = codes.reshape(*words.shape[:-1], -1).astype(np.float32)
    spread = lambda t: np.repeat(t.float32(), group, axis=-1)
    return codes * spread(scales) + spread(biases)


def family_of(config):
    """Whose layout an MLX file has: heads of Qwen 3's layers, too, are stored as they are."""
    return "qwen" if "qwen3_5" in config.get("model_type", "") else "gemma"


def groups_of(module, entry):
    """The bits and group of a module, by an entry `quantization` with or without one of its own."""
    own = entry.get(module, entry)
    return own["bits"], own["group_size"]


def has_offset(name):
    """Whether tensor `name` of a Qwen checkpoint is a zero-centred norm."""
    return name == "model.norm.weight" or name.endswith(OFFSET_NORMS)


def to_mlx_layout(tensors, family):
    """Renames, splits and folds what an MLX file stores differently."""
    out = {}
    for name, tensor in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            room = name[: -len("experts.gate_up_proj")] + EXPERT_ROOMS[family]
            half = tensor.shape[1] // 2
            out[f"{room}.gate_proj.weight"] = Tensor(tensor.dtype, tensor.bits[:, :half])
            out[f"{room}.up_proj.weight"] = Tensor(tensor.dtype, tensor.bits[:, half:])
        elif name.endswith("experts.down_proj"):
            room = name[: -len("experts.down_proj")] + EXPERT_ROOMS[family]
            out[f"{room}.down_proj.weight"] = tensor
        elif family == "qwen" and name.endswith("conv1d.weight"):
            out[name] = Tensor(tensor.dtype, tensor.bits.transpose(0, 2, 1))
        elif family == "qwen" and has_offset(name):
            out[name] = bf16(1 + tensor.float32())
        else:
            out[name] = tensor
    return out


def plain(tensors, config):
    """The inverse: `tensors` of an MLX file as a bf16 checkpoint has them, float32 where they were codes."""
    entry = config.get("quantization")
    if entry is None:
        return tensors
    family = family_of(config)
    out = {}
    for name, tensor in tensors.items():
        module = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{module}.scales" in tensors:
            scales, biases = tensors[f"{module}.scales"], tensors[f"{module}.biases"]
            values = dequantise_rows(tensor, scales, biases, *groups_of(module, entry))
            out[name] = Tensor("F32", values)
        elif family == "qwen" and name.endswith("conv1d.weight"):
            out[name] = Tensor(tensor.dtype, tensor.bits.transpose(0, 2, 1))
        elif family == "qwen" and has_offset(name):
            out[name] = bf16(tensor.float32() - 1)
        else:
            out[name] = tensor
    room = f".{EXPERT_ROOMS[family]}."
    for name in [n for n in out if room in n and n.endswith(".gate_proj.weight")]:
        before = name.removesuffix(f"{EXPERT_ROOMS[family]}.gate_proj.weight")
        part = lambda which: out.pop(f"{before}{EXPERT_ROOMS[family]}.{which}_proj.weight").float32()
        gate, up, down = part("gate"), part("up"), part("down")
        out[f"{before}experts.gate_up_proj"] = Tensor("F32", np.concatenate([gate, up], 1))
        out[f"{before}experts.down_proj"] = Tensor("F32", down)
    return out


def is_quantised(name, tensor, group):
    """Whether `name` is a matrix that the quantised checkpoint stores as codes."""
    return (
        name.endswith(".weight")
        and len(tensor.shape) >= 2
        and tensor.shape[-1] % group == 0
        and not name.endswith(KEPT)
    )


def write_shards(target, tensors, beside):
    """Writes what `tensors` adds to the file of the folder `beside`, and links to that file."""
    common = read_file(beside / "model.safetensors")
    for name, tensor in common.items():
        if name not in tensors or not np.array_equal(tensor.bits, tensors[name].bits):
            raise ValueError(f"{beside} has another {name}")
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (target / shards[0]).unlink(missing_ok=True)
    (target / shards[0]).symlink_to(os.path.relpath(beside / "model.safetensors", target))
    added = {name: tensor for name, tensor in tensors.items() if name not in common}
    write_file(target / shards[1], added, {"format": "mlx"})
    index = {
        "metadata": {"total_size": sum(t.bits.nbytes for t in tensors.values())},
        "weight_map": {name: shards[name in added] for name in tensors},
    }
    (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    return (target / shards[1]).stat().st_size


def entry_for(config, bits, group):
    """The entry `quantization` of a checkpoint with `config`."""
    entry = {"group_size": group, "bits": bits, "mode": "affine"}
    rank = config.get("markov_rank", 0)
    if 32 <= rank < group:
        entry |= {module: {"group_size": rank, "bits": bits} for module in MARKOV}
    return entry


def stored_tensors(tensors, family, entry):
    """The tensors of a bf16 checkpoint as an MLX file with the entry `quantization` has them,
    and the worst relative error of a matrix."""
    out, worst = {}, 0.0
    for name, tensor in to_mlx_layout(tensors, family).items():
        module = name.removesuffix(".weight")
        bits, group_size = groups_of(module, entry)
        if not is_quantised(name, tensor, group_size):
            out[name] = tensor
            continue
        values = tensor.float32()
        words, scales, biases = quantise_rows(values, bits, group_size)
        error = dequantise_rows(words, scales, biases, bits, group_size) - values
        worst = max(worst, float(np.linalg.norm(error) / np.linalg.norm(values)))
        out |= {name: words, f"{module}.scales": scales, f"{module}.biases": biases}
    return out, worst


def quantise_checkpoint(source, target, bits, group, beside=None):
    """Writes `target`, a folder like `source` with quantised tensors; returns the worst
    relative error of a matrix and the bytes written."""
    source, target = Path(source), Path(target)
    target.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    family = family_of(config)
    if entry := config.get("quantization"):
        # In codes already: only laid out, the decoder under the names that its own file has.
        tensors = {n.replace("model.language_model.", "model.", 1): t for n, t in read_folder(source).items()}
        worst = 0.0
    else:
        entry = entry_for(config, bits, group)
        tensors, worst = stored_tensors(read_folder(source), family, entry)
    if beside:
        size = write_shards(target, tensors, Path(beside))
    else:
        write_file(target / "model.safetensors", tensors, {"format": "mlx"})
        size = (target / "model.safetensors").stat().st_size
    config["quantization"] = config["quantization_config"] = entry
    (target / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    for path in source.iterdir():
        if path.suffix == ".safetensors" or path.name in ("config.json", "model.safetensors.index.json"):
            continue
        if path.name == "tokenizer.json":
            # Indented and with merges as pairs, it is more than twice as large. No token has a space.
            tokenizer = json.loads(path.read_text())
            merges = tokenizer["model"]["merges"]
            tokenizer["model"]["merges"] = [m if isinstance(m, str) else " ".join(m) for m in merges]
            compact = json.dumps(tokenizer, ensure_ascii=False, separators=(",", ":"))
            (target / path.name).write_text(compact + "\n")
        else:
            shutil.copyfile(path, target / path.name)
    return worst, size


def main():
    parser = argparse.ArgumentParser(description="bf16 checkpoint to MLX-affine codes")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--bits", type=int, choices=(2, 4, 8), default=8)
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="a quantised checkpoint to link to")
    args = parser.parse_args()
    worst, size = quantise_checkpoint(args.source, args.target, args.bits, args.group, args.beside)
    print(f"{args.target}: {size / 1e6:.1f} MB, worst relative error of a matrix {worst:.4f}")


if __name__ == "__main__":
    main()
