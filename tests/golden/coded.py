"""Writes coded/NAME: tiny checkpoints whose weights are codes under scales, and what the codes stand for.

    ct        compressed-tensors, a scheme a module, packed and unpacked by that package
    fp8       E4M3 under blocks of 128 x 128, one scale, one a row: by definition, values by torch
    modelopt  NVFP4 as ModelOpt packs it: by definition
    mlx       every mode of mlx-lm in one file, packed and unpacked by mlx
    mlx-moe   experts of NVFP4 with a factor each, by the same

`values.json` has SHA-256 of each weight's values, f32, -0 as +0, by canonical name. Scales are widened to f32 before
they are multiplied, so that nothing is rounded to a model's type.

    python3 -m venv .venv && .venv/bin/pip install -r tests/golden/requirements-coded.txt
    .venv/bin/python tests/golden/coded.py
"""

import copy
import hashlib
import json
from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import save_file

import checkpoints

HERE = Path(__file__).parent
LINEAR, FULL = checkpoints.LINEAR, checkpoints.FULL

# Widths are whole groups of 32; 160 is more than one block of 128, and no whole number of them.
DENSE = checkpoints.qwen3_5_config(
    dtype="bfloat16",
    vocab_size=96,
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=2,
    layer_types=[LINEAR, FULL],
    full_attention_interval=2,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
MOE = DENSE | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "norm_topk_prob": True,
    "mtp_num_hidden_layers": 0,
}
del MOE["intermediate_size"]

# Scheme and compressor of each kind of module in turn.
SCHEMES = [
    ("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=32)),
    ("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=64)),
    ("pack-quantized", dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)),
    ("pack-quantized", dict(num_bits=4, type="int", strategy="channel")),
    ("pack-quantized", dict(num_bits=8, type="int", strategy="group", group_size=32)),
    ("pack-quantized", dict(num_bits=8, type="int", strategy="channel", symmetric=False)),
    ("int-quantized", dict(num_bits=8, type="int", strategy="channel")),
    ("float-quantized", dict(num_bits=8, type="float", strategy="channel")),
    ("float-quantized", dict(num_bits=8, type="float", strategy="tensor")),
    ("float-quantized", dict(num_bits=8, type="float", strategy="block", block_structure=[128, 128])),
    ("nvfp4-pack-quantized", dict(num_bits=4, type="float", strategy="tensor_group", group_size=16)),
    ("mxfp4-pack-quantized", dict(num_bits=4, type="float", strategy="group", group_size=32)),
    ("mxfp8-quantized", dict(num_bits=8, type="float", strategy="group", group_size=32)),
]


def base(config, seed):
    shapes = checkpoints.qwen3_5_shapes(config)
    tensors = checkpoints.weights("qwen3_5", shapes, seed)
    return {name: torch.from_numpy(array) for name, array in tensors.items()}


def is_linear(name, tensor):
    return name.endswith("proj.weight") and tensor.ndim == 2 or name == "mtp.fc.weight"


def tiles(w, rows, cols):
    """`w` padded with zeros to whole tiles, as [down, rows, across, cols]."""
    down, across = -(-w.shape[0] // rows), -(-w.shape[1] // cols)
    padded = torch.zeros(down * rows, across * cols)
    padded[: w.shape[0], : w.shape[1]] = w
    return padded.reshape(down, rows, across, cols)


def spread(scale, shape, rows, cols):
    """One scale a tile to one an element."""
    return scale.float().repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(cols, 1)[:, : shape[1]]


def tile_of(args, shape):
    match args["strategy"]:
        case "tensor":
            return shape
        case "channel":
            return 1, shape[1]
        case "block":
            return args["block_structure"]
        case _:
            return 1, args["group_size"]


def compress(w, kind, args):
    """A module's stored tensors and its values."""
    shape = tuple(w.shape)
    rows, cols = tile_of(args, shape)
    cut = tiles(w, rows, cols)
    low, high = cut.amin((1, 3)), cut.amax((1, 3))
    top = {("int", 4): 7, ("int", 8): 127, ("float", 8): 448.0, ("float", 4): 6.0}[args["type"], args["num_bits"]]
    state = {"weight": w}
    scale = torch.maximum(-low, high) / top
    if args.get("symmetric") is False:
        scale = ((high.clamp(min=0) - low.clamp(max=0)) / (2 ** args["num_bits"] - 1)).bfloat16()
        zero = (-(top + 1) - low.clamp(max=0) / scale.float()).round()
        state["weight_zero_point"] = zero.clamp(-top - 1, top).to(torch.int8)
    elif kind.startswith("mx"):
        args = args | {"scale_dtype": torch.uint8}
        scale = torch.exp2(torch.floor(torch.log2(torch.maximum(-low, high))) - (2 if args["num_bits"] == 4 else 8))
    elif kind.startswith("nv"):
        args = args | {"scale_dtype": torch.float8_e4m3fn}
        state["weight_global_scale"] = torch.tensor([448 * 6 / w.abs().max()])
        scale = (scale * state["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    else:
        scale = scale.bfloat16()
    state["weight_scale"] = scale.float().reshape(1) if args["strategy"] == "tensor" else scale.float()
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    compressor = BaseCompressor.get_value_from_registry(kind)
    stored = compressor.compress(state, scheme)
    values = compressor.decompress(stored, scheme)["weight"]
    if kind.startswith("nv"):  # rounded to bf16 by the line above: once more with its own parts
        wide = unpack_fp4_from_uint8(stored["weight_packed"], *shape, dtype=torch.float32)
        rounded, factor = values, stored["weight_global_scale"]
        values = dequantize(x_q=wide, scale=stored["weight_scale"].float(), args=scheme.weights, global_scale=factor)
        assert (values.bfloat16() == rounded).all()
    values = values.float()
    if stored["weight_scale"].dtype == torch.float32 and not kind.startswith("int"):
        narrow = stored["weight_scale"].bfloat16()
        assert (narrow.float() == stored["weight_scale"]).all()
        stored["weight_scale"] = narrow
    return stored, values


def compressed_tensors():
    config, stored, values, groups, ignored = copy.deepcopy(DENSE), {}, {}, {}, []
    turn = 0
    for name, w in base(config, 50).items():
        module = name.removesuffix(".weight")
        if not is_linear(name, w):
            stored[name] = values[name] = w.bfloat16()
            if w.ndim == 2:
                ignored.append(module)
            continue
        kind, args = SCHEMES[turn % len(SCHEMES)]
        parts, values[name] = compress(w, kind, args)
        stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
        group = groups.setdefault(turn % len(SCHEMES), {"targets": [], "weights": args, "format": kind})
        group["targets"].append(module)
        if kind == "float-quantized":
            stored[f"{module}.input_scale"] = torch.tensor([0.25])
        turn += 1
    assert turn >= len(SCHEMES)
    stored["model.layers.1.self_attn.k_scale"] = torch.tensor([0.5])
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": {f"group_{i}": group for i, group in groups.items()},
        "ignore": ignored + ["re:.*router.*"],
        "kv_cache_scheme": None,
    }
    return config, stored, values


def to_e4m3(w, rows, cols, dtype):
    """Codes under tiles, scales of type `dtype`, and values."""
    scale = (tiles(w, rows, cols).abs().amax((1, 3)) / 448).to(dtype)
    each = spread(scale, w.shape, rows, cols)
    codes = (w / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, scale, codes.float() * each


def fp8():
    config, stored, values = copy.deepcopy(DENSE), {}, {}
    for turn, (name, w) in enumerate(base(config, 51).items()):
        if not is_linear(name, w):
            stored[name] = values[name] = w.bfloat16()
            continue
        dtype = [torch.float32, torch.bfloat16][turn % 2]
        if name.startswith("mtp."):  # one scale for all, or one a row
            rows = [1, w.shape[0]][turn % 2]
            stored[name], scale, values[name] = to_e4m3(w, rows, w.shape[1], dtype)
            stored[f"{name}_scale"] = scale.reshape(()) if rows > 1 else scale
        else:
            stored[name], stored[f"{name}_scale_inv"], values[name] = to_e4m3(w, 128, 128, dtype)
    config["quantization_config"] = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    return config, stored, values


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def modelopt():
    config, stored, values = copy.deepcopy(DENSE), {}, {}
    for name, w in base(config, 52).items():
        if not is_linear(name, w):
            stored[name] = values[name] = w.bfloat16()
            continue
        module = name.removesuffix(".weight")
        factor = w.abs().max() / (6 * 448)
        scale = (tiles(w, 1, 16).abs().amax((1, 3)) / 6 / factor).to(torch.float8_e4m3fn)
        each = spread(scale.float() * factor, w.shape, 1, 16)
        codes = (w.unsqueeze(-1) / each.unsqueeze(-1) - FP4).abs().argmin(-1).to(torch.uint8)
        stored[name] = codes[:, ::2] | codes[:, 1::2] << 4
        stored[f"{module}.weight_scale"], stored[f"{module}.weight_scale_2"] = scale, factor
        stored[f"{module}.input_scale"] = torch.tensor(0.125)
        values[name] = FP4[codes.long()] * each
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["lm_head", "mtp*", "model.embed_tokens"],
    }
    return config, stored, values


MODES = [
    dict(mode="mxfp4", bits=4, group_size=32),
    dict(mode="nvfp4", bits=4, group_size=16),
    dict(mode="mxfp8", bits=8, group_size=32),
    dict(mode="affine", bits=6, group_size=32),
    dict(mode="affine", bits=3, group_size=64),
    False,
]


def mlx(folder, config, seed, predicate, **options):
    """Converts as `mlx_lm.convert` does, without the tokenizer; the values."""
    tensors = {n: t.bfloat16() for n, t in base(config, seed).items() if not n.startswith("mtp.")}
    folder.mkdir(parents=True, exist_ok=True)
    config = config | {"model_type": config["model_type"].removesuffix("_text"), "mtp_num_hidden_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    model, config = mlx_lm.utils.load_model(folder)
    model, config = mlx_lm.utils.quantize_model(model, config, None, None, quant_predicate=predicate, **options)
    (folder / "model.safetensors").unlink()
    mlx_lm.utils.save_model(folder, model)
    (folder / "model.safetensors.index.json").unlink()
    mlx_lm.utils.save_config(config, folder / "config.json")
    values = {}
    for name, module in model.named_modules():
        if "scales" in module:
            wide = lambda part: module[part].astype(mx.float32) if module.get(part) is not None else None
            affine = module.mode == "affine"
            args = [module.weight, wide("scales") if affine else module.scales, wide("biases")]
            args += [module.group_size, module.bits, module.mode]
            factors = module.get("global_scale")
            if factors is None:
                value = mx.dequantize(*args, dtype=mx.float32)
            else:
                experts = [[a[e] for a in args[:2]] + [None] + args[3:] for e in range(len(factors))]
                value = mx.stack([mx.dequantize(*a, f, dtype=mx.float32) for a, f in zip(experts, factors)])
            values[f"{name}.weight"] = torch.from_numpy(np.array(value))
        elif "weight" in module:
            values[f"{name}.weight"] = torch.from_numpy(np.array(module.weight.astype(mx.float32)))
    return values


def digest(value):
    value = np.ascontiguousarray(value.float().numpy().astype("<f4") + np.float32(0))
    return {"shape": list(value.shape), "sha256": hashlib.sha256(value.tobytes()).hexdigest()}


def canonical(name):
    for prefix in ("model.language_model.", "language_model.model.", "language_model.", "model."):
        name = name.removeprefix(prefix)
    return name


def write_values(folder, values):
    lines = {canonical(n): digest(v) for n, v in sorted(values.items()) if v.ndim > 1 and "conv1d" not in n}
    text = ",\n".join(f"  {json.dumps(n)}: {json.dumps(v)}" for n, v in lines.items())
    (folder / "values.json").write_text("{\n" + text + "\n}\n")


def main():
    mx.set_default_device(mx.cpu)
    for name, make in [("ct", compressed_tensors), ("fp8", fp8), ("modelopt", modelopt)]:
        folder = HERE / "coded" / name
        folder.mkdir(parents=True, exist_ok=True)
        config, stored, values = make()
        (folder / "config.json").write_bytes(checkpoints.text_bytes(config))
        save_file(stored, folder / "model.safetensors", {"format": "pt"})
        write_values(folder, values)
    turns = {}

    def in_turn(path, module):
        mode = turns.setdefault(path, MODES[len(turns) % len(MODES)])
        return mode and module.weight.shape[-1] % mode["group_size"] == 0 and mode

    folder = HERE / "coded" / "mlx"
    write_values(folder, mlx(folder, DENSE, 53, in_turn, mode="mxfp4"))
    folder = HERE / "coded" / "mlx-moe"
    write_values(folder, mlx(folder, MOE, 54, None, mode="nvfp4", global_scale=True))


main()
