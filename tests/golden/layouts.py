"""Small checkpoints in exactly the layouts that public tools write, and the text that public tools make of them.

    hf          transformers, save_pretrained; Qwen's with the `mtp.*` tensors of releases, which transformers leaves out
    hf-fused    the same with experts stacked, which transformers wrote one by one
    mlx-…       mlx-lm's conversion of hf; mlx-vlm-… that of mlx-vlm, of which only the configuration and the shapes of the
                picture tower are kept where the rest has the bytes of mlx-lm's file, and that rest's SHA-256 where it
                has no such file beside it: `tests/layouts.rs` makes its codes again
    gguf        llama.cpp's conversion of hf to q8_0
    assistant…  drafters: transformers, and their conversion by llama.cpp and mlx-vlm
    mtp-…       Qwen's head taken out by mlx-vlm
    eagle3…     a head of the speculators package, and its conversion by llama.cpp

Of an `hf` file only the header is kept, byte for byte: its weights are seeded (`seeded`), and `tests/layouts.rs` writes the
file again, of which `expected.json` has SHA-256. There are also the prompt (ids) and the greedy tokens after it: by
transformers, or by mlx-lm for its own files, in float32 on the stored values. The q8_0 file's are those of transformers
on weights rounded so, which have to be those of the weights before, and llama.cpp, given `--server`, has to choose them too. Seeds are the first ones whose two best logits are apart everywhere.

    .venv/bin/pip install -r tests/golden/requirements.txt mlx-lm==0.32.2 mlx[cpu]==0.32.4 pillow
    .venv/bin/pip install --no-deps mlx-vlm==0.7.10 speculators==0.9.0
    .venv/bin/python tests/golden/layouts.py --llama llama.cpp --server llama-server          # all, in minutes
    .venv/bin/python tests/golden/layouts.py --llama llama.cpp --server llama-server e2b 31b  # some
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import numpy as np
import torch
import transformers

import oracle
import store

HERE = Path(__file__).parent.resolve()
OUT = HERE / "layouts"
PROMPT = [2, 7, 33, 12, 40, 5, 21, 9, 18, 30, 3, 44]
N_TOKENS = 16
# Below these gaps of the two best logits rounding would choose: of float32, and of 8-bit weights and activations.
GAP_MIN = {"hf": 0.05, "mlx": 0.01, "q8_0": 0.01}
SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
EOS = 1

ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "global_head_dim": 16,
    "patch_size": 2,
    "position_embedding_size": 4,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 1,
    "patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 4,
    "spatial_merge_size": 1,
}


def gemma(**changes):
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_global_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "attention_k_eq_v": True,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "rope_parameters": ROPE,
        "max_position_embeddings": 512,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    } | changes


PLE = {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 64,
    "num_kv_shared_layers": 2,
    "attention_k_eq_v": False,
    "num_global_key_value_heads": None,
}
# Routers have 8 bits in groups of 64.
GEMMA_EXPERTS = {"enable_moe_block": True, "num_experts": 3, "top_k_experts": 2, "moe_intermediate_size": 32, "hidden_size": 64}
QWEN_EXPERTS = {
    "num_experts": 3,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "hidden_size": 64,
}


def qwen(**changes):
    return {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "layer_types": [LINEAR, FULL],
        "full_attention_interval": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
    } | changes


def four_bits():
    return {"group_size": 32, "bits": 4}


CENTROIDS = {"use_ordered_embeddings": True, "num_centroids": 8, "centroid_intermediate_top_k": 2}

# What each family is converted to: of mlx-lm, and of mlx-vlm; with the options of a file of mlx-lm, whose tensors it has
# then beside those of its tower; and of mlx-vlm alone, of which codes are not kept.
FAMILIES = {
    "e2b": {
        "kind": "gemma4",
        "text": gemma(**PLE | {"use_double_wide_mlp": True}),
        "mlx": {"mlx-4bit": four_bits()},
        "vlm_like": {"mlx-vlm-4bit": "mlx-4bit"},
        "assistant": ([SLIDING, FULL], CENTROIDS),
    },
    "e4b": {
        "kind": "gemma4",
        "text": gemma(**PLE | {"num_key_value_heads": 2}),
        "mlx": {"mlx-mixed": four_bits() | {"recipe": "mixed_3_6"}},
        "vlm_made": {"mlx-vlm-4bit": four_bits()},
        "assistant": ([FULL], CENTROIDS),
        "assistant_gguf": False,
        "eagle3": "gguf",
    },
    "12b": {
        "kind": "gemma4_unified",
        "text": gemma(num_key_value_heads=2),
        "mlx": {"mlx-8bit": {"group_size": 32, "bits": 8}},
        "vlm": {"mlx-vlm-4bit": four_bits()},
        "assistant": ([FULL], {}),
    },
    "26b-a4b": {
        "kind": "gemma4",
        "text": gemma(**GEMMA_EXPERTS),
        "mlx": {"mlx-4bit": four_bits()},
        "vlm_like": {"mlx-vlm-4bit": "mlx-4bit"},
        "assistant": ([FULL], {}),
        "assistant_gguf": False,
    },
    "31b": {
        "kind": "gemma4",
        "text": gemma(num_attention_heads=4, num_key_value_heads=2),
        "mlx": {"mlx-mxfp4": four_bits() | {"mode": "mxfp4"}},
        "vlm_like": {"mlx-vlm-mxfp4": "mlx-mxfp4"},
        "assistant": ([FULL], {}),
        "assistant_gguf": False,
    },
    "qwen-dense": {
        "kind": "qwen3_5",
        "text": qwen(),
        "mlx": {"mlx-4bit": four_bits()},
        "vlm_like": {"mlx-vlm-4bit": "mlx-4bit"},
        "mtp": ["mtp-mlx-vlm"],
        "eagle3": "speculators",
    },
    "qwen-moe": {
        "kind": "qwen3_5_moe",
        "text": qwen(**QWEN_EXPERTS),
        "mlx": {"mlx-4bit": four_bits()},
        "vlm_like": {"mlx-vlm-4bit": "mlx-4bit"},
        "mtp": [],
    },
}


# ---- seeded weights ----


def spread(name, shape, centre):
    """Where a tensor's values lie: middle and largest distance from it. `centre` is that of the family's norms."""
    if name.endswith("layer_scalar"):
        return 0.9, 0.05
    if len(shape) > 1:
        # Large embeddings would make every token its own successor.
        most = 1.0 if name.endswith("embed_tokens.weight") else 2.5
        return 0.0, most / np.sqrt(np.float64(shape[-1]))
    if "norm" in name:
        return (1.0 if "linear_attn" in name else centre), 0.3
    if name.endswith("scale"):
        return 1.0, 0.3
    return 0.0, 0.5


def seeded(name, shape, seed, centre):
    """Values from splitmix64 over the name: the same in `tests/layouts.rs`."""
    key = 0xCBF29CE484222325
    for byte in name.encode():
        key = (key ^ byte) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    with np.errstate(over="ignore"):
        z = np.arange(1, int(np.prod(shape, dtype=np.int64)) + 1, dtype=np.uint64)
        z = np.uint64(key ^ seed) + z * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    unit = ((z >> np.uint64(48)).astype(np.float32) - np.float32(32768)) / np.float32(32768)
    middle, most = spread(name, shape, centre)
    return (np.float32(middle) + np.float32(most) * unit).reshape(shape)


def special(name, shape):
    """Integer tensors: which tokens a centroid has, which tokens a head drafts."""
    if name.endswith("token_ordering"):
        return (np.arange(shape[0]) * 5 % shape[0]).astype(np.int64)
    if name == "d2t":
        return np.arange(shape[0], dtype=np.int64)
    if name == "t2d":
        return np.arange(shape[0]) % 2 == 0
    return None


def header_of(file):
    return store.header(file.read_bytes())


def fill(folder, header, seed, centre):
    """Writes the file with this header and seeded values; SHA-256 of it."""
    entries = json.loads(header)
    entries.pop("__metadata__", None)
    data = bytearray(max(entry["data_offsets"][1] for entry in entries.values()))
    for name, entry in entries.items():
        values = special(name, entry["shape"])
        if values is None:
            values = seeded(name, entry["shape"], seed, centre)
        begin, end = entry["data_offsets"]
        data[begin:end] = store.ENCODE[entry["dtype"]](values).tobytes()
    whole = len(header).to_bytes(8, "little") + header + bytes(data)
    (folder / "model.safetensors").write_bytes(whole)
    return hashlib.sha256(whole).hexdigest()


# ---- Hugging Face ----


def text_model(kind, text):
    """The released class of a family, with the smallest senses beside the text."""
    if kind == "gemma4":
        config = transformers.Gemma4Config(text_config=text, vision_config=VISION, audio_config=None, vocab_size=64)
        return transformers.Gemma4ForConditionalGeneration(config)
    if kind == "gemma4_unified":
        config = transformers.Gemma4UnifiedConfig(text_config=text, audio_config=None, vision_config=None, vocab_size=64)
        return transformers.Gemma4UnifiedForConditionalGeneration(config)
    vision = QWEN_VISION | {"out_hidden_size": text["hidden_size"]}
    if kind == "qwen3_5":
        return transformers.Qwen3_5ForConditionalGeneration(transformers.Qwen3_5Config(text_config=text, vision_config=vision))
    config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
    return transformers.Qwen3_5MoeForConditionalGeneration(config)


def assistant_model(kind, text, layers, changes):
    own = text | {
        "hidden_size": 32,
        "num_hidden_layers": len(layers),
        "layer_types": layers,
        "num_kv_shared_layers": len(layers),
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
    }
    unified = "Unified" if kind == "gemma4_unified" else ""
    make = getattr(transformers, f"Gemma4{unified}AssistantConfig")
    config = make(text_config=own, backbone_hidden_size=text["hidden_size"], **changes)
    return getattr(transformers, f"Gemma4{unified}AssistantForCausalLM")(config)


def eagle3_model(target, text):
    """An EAGLE-3 head of the speculators package. Of targets with two layers it reads every residual row; else it does not
    say which, as llama.cpp's converter writes 2, L/2 and L - 3 whatever a head says."""
    import oracle_eagle3
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = transformers.LlamaConfig(
        vocab_size=text["vocab_size"],
        hidden_size=text["hidden_size"],
        intermediate_size=text["hidden_size"],
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        rms_norm_eps=1e-6,
        max_position_embeddings=512,
    )
    verifier = VerifierConfig(name_or_path=None, architectures=json.loads((target / "config.json").read_text())["architectures"])
    proposal = GreedyTokenProposalConfig(speculative_tokens=3)
    config = oracle_eagle3.Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=text["vocab_size"] // 2,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[0, 1, 2] if text["num_hidden_layers"] == 2 else None,
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
        ),
    )
    return oracle_eagle3.core.Eagle3DraftModel(config)


def mtp_entries(text):
    """Names and shapes of the head in Qwen's releases, where experts lie one by one."""
    H, I, d = text["hidden_size"], text["intermediate_size"], text["head_dim"]
    heads, kv = text["num_attention_heads"], text["num_key_value_heads"]
    at = "mtp.layers.0."
    shapes = {"mtp.fc.weight": [H, 2 * H]}
    shapes |= {f"mtp.{name}.weight": [H] for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    shapes |= {f"{at}{name}_layernorm.weight": [H] for name in ("input", "post_attention")}
    shapes |= {f"{at}self_attn.{name}_norm.weight": [d] for name in "qk"}
    shapes |= {f"{at}self_attn.{name}_proj.weight": [kv * d, H] for name in "kv"}
    shapes |= {f"{at}self_attn.q_proj.weight": [2 * heads * d, H], f"{at}self_attn.o_proj.weight": [H, heads * d]}

    def mlp(pre, inner):
        return {f"{pre}{name}_proj.weight": [inner, H] for name in ("gate", "up")} | {f"{pre}down_proj.weight": [H, inner]}

    if "num_experts" not in text:
        return shapes | mlp(f"{at}mlp.", I)
    for e in range(text["num_experts"]):
        shapes |= mlp(f"{at}mlp.experts.{e}.", text["moe_intermediate_size"])
    shapes |= mlp(f"{at}mlp.shared_expert.", text["shared_expert_intermediate_size"])
    return shapes | {f"{at}mlp.gate.weight": [text["num_experts"], H], f"{at}mlp.shared_expert_gate.weight": [1, H]}


def with_entries(header, shapes):
    """A header with more bf16 tensors behind the others."""
    entries = json.loads(header)
    at = max(entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__")
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8)


def save(model, folder):
    """`save_pretrained` in bf16; the header of the file."""
    model.to(torch.bfloat16).save_pretrained(folder)
    for path in folder.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()
    return header_of(folder / "model.safetensors")


def greedy(logits_of):
    """The greedy tokens after PROMPT and the smallest gap; `logits_of` maps ids to the last row's logits."""
    ids, gap = list(PROMPT), float("inf")
    for _ in range(N_TOKENS):
        best = torch.topk(logits_of(ids), 2)
        gap = min(gap, float(best.values[0] - best.values[1]))
        ids.append(int(best.indices[0]))
    return ids[len(PROMPT) :], gap


def transformers_text(folder, cls, change=lambda name, tensor: tensor):
    """Of the weights in `folder`, each as `change` makes it."""
    model, report = cls.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    unread = [name for name in report["unexpected_keys"] if not name.startswith("mtp.")]
    assert not unread, unread
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(change(name, tensor))
        return greedy(lambda ids: model.eval()(input_ids=torch.tensor([ids])).logits[0, -1].float())


# ---- MLX ----


def mlx_text(folder):
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.set_dtype(mx.float32)

    def logits_of(ids):
        out = model(mx.array([ids]), cache=make_prompt_cache(model))
        return torch.tensor(out[0, -1].astype(mx.float32).tolist())

    return greedy(logits_of)


def released(source, folder, text):
    """A copy of `source` with the fields that releases have and this transformers writes as `per_layer_config` or leaves
    out: converters know these only."""
    shutil.copytree(source, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    keys = ("global_head_dim", "num_global_key_value_heads")
    config["text_config"] |= {key: text[key] for key in keys if text.get(key) is not None}
    if "sliding_window" in text:
        config["text_config"].setdefault("moe_intermediate_size", None)
    file.write_text(json.dumps(config))
    return folder


def mlx_lm_convert(source, target, group_size=None, bits=None, mode="affine", recipe=None):
    """mlx-lm's conversion, without the tokenizer that its command asks for."""
    import mlx.core as mx
    from mlx.utils import tree_map_with_path
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    model, config = load_model(source)
    # As its own `convert`: every float becomes the dtype of the configuration.
    cast = getattr(model, "cast_predicate", lambda _: True)
    as_bf16 = lambda k, v: v.astype(mx.bfloat16) if cast(k) and mx.issubdtype(v.dtype, mx.floating) else v
    model.update(tree_map_with_path(as_bf16, model.parameters()))
    if bits:
        predicate = getattr(model, "quant_predicate", None)
        if recipe:
            predicate = mixed_quant_predicate_builder(recipe, model, group_size)
        model, config = quantize_model(model, config, group_size, bits, mode=mode, quant_predicate=predicate)
    target.mkdir(parents=True)
    save_model(target, model)
    save_config(config, target / "config.json")
    (target / "model.safetensors.index.json").unlink(missing_ok=True)


def mlx_vlm_convert(source, target, group_size, bits, mode="affine"):
    """mlx-vlm's conversion, without the processor that its command asks for."""
    import importlib

    from mlx_vlm.utils import load_config, load_model

    tool = importlib.import_module("mlx_vlm.convert")

    class NoProcessor:
        def save_pretrained(self, _):
            pass

    tool.fetch_from_hub = lambda path, **_: (load_model(path), load_config(path), NoProcessor())
    tool.get_model_path = lambda path, **_: Path(path)
    tool.convert(str(source), mlx_path=str(target), quantize=True, q_group_size=group_size, q_bits=bits, q_mode=mode, dtype="bfloat16")
    for path in target.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            path.unlink()


def with_patches(source, target):
    """A copy of `source` with larger patches: mlx-vlm takes the smallest ones of a mixture for its own order of axes."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    config["vision_config"]["patch_size"] = 4
    (target / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    name = next(name for name in tensors if name.endswith("patch_embed.proj.weight"))
    tensors[name] = torch.zeros(*tensors[name].shape[:3], 4, 4, dtype=torch.bfloat16)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def mlx_vlm_tower(folder, layout, options, source):
    """mlx-vlm's file, of which the configuration stays: what is to be expected of it, and the tensors of its text."""
    mlx_vlm_convert(source, folder / layout, **options)
    tokens, gap = mlx_text(folder / layout)
    text = tensors_of(folder / layout)
    tower = {name: text.pop(name) for name in sorted(text) if not name.startswith("language_model.")}
    assert all(dtype == "BF16" for dtype, *_ in tower.values()), layout
    tower = {name: shape for name, (_, shape, _) in tower.items()}
    (folder / layout / "model.safetensors").unlink()
    return {"tokens": tokens, "gap": round(gap, 4)}, {"tower": tower}, text


def tensors_of(folder):
    file = folder / "model.safetensors"
    data = file.read_bytes()[8 + len(header_of(file)) :]
    entries = json.loads(header_of(file))
    entries.pop("__metadata__", None)
    return {name: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for name, e in entries.items()}


def mlx_vlm_like(family, source, folder, layouts):
    """mlx-vlm's files that have all tensors of mlx-lm's, byte for byte: kept are the configuration and what stands beside
    them."""
    for layout, like in family.get("vlm_like", {}).items():
        expected, tower, text = mlx_vlm_tower(folder, layout, family["mlx"][like], source)
        same = text == tensors_of(folder / like) and expected["tokens"] == layouts[like]["tokens"]
        assert same, f"{layout} is not like {like}"
        layouts[layout] = expected | {"like": like} | tower


def mlx_vlm_made(family, source, folder, layouts):
    """mlx-vlm's files whose text the test makes again: kept are the configuration, the hash of all names and bytes of the
    text, and what stands beside it."""
    for layout, options in family.get("vlm_made", {}).items():
        expected, tower, text = mlx_vlm_tower(folder, layout, options, source)
        if expected["gap"] < GAP_MIN["mlx"]:
            return False
        all_bytes = b"".join(name.encode() + data for name, (_, _, data) in sorted(text.items()))
        layouts[layout] = expected | {"sha256": hashlib.sha256(all_bytes).hexdigest(), "made_of": "hf"} | tower
    return True


# ---- llama.cpp ----


class Llama:
    """Its converter and its server."""

    def __init__(self, checkout, server):
        self.checkout, self.server = checkout.resolve(), server and server.resolve()
        sys.path[:0] = [str(self.checkout), str(self.checkout / "gguf-py")]
        cwd = os.getcwd()
        os.chdir(self.checkout)
        from conversion import base, gemma, llama, qwen

        import convert_hf_to_gguf

        os.chdir(cwd)
        self.tool = convert_hf_to_gguf

        # Tokens of no tokenizer, so that a server starts.
        def set_vocab(model):
            writer = model.gguf_writer
            writer.add_tokenizer_model("gpt2")
            writer.add_tokenizer_pre("qwen2")
            writer.add_token_list([f"t{i}".encode() for i in range(64)])
            writer.add_token_types([1] * 64)
            writer.add_token_merges(["t 1"])
            writer.add_bos_token_id(2)
            writer.add_eos_token_id(EOS)

        for model in (base.TextModel, gemma.Gemma3Model, gemma.Gemma4Model, qwen.Qwen3Model, llama.LlamaModel):
            model.set_vocab = set_vocab

    def convert(self, source, target, outtype, *options):
        read = transformers.AutoConfig.from_pretrained

        def no_config(*_, **__):
            raise ValueError("read config.json")

        # Some versions of transformers rename fields that the converter asks for.
        transformers.AutoConfig.from_pretrained = no_config
        tokenizer = source / "tokenizer.json"
        tokenizer.write_text(json.dumps({"model": {"vocab": {f"t{i}": i for i in range(64)}}, "added_tokens": []}))
        target.parent.mkdir(parents=True, exist_ok=True)
        sys.argv = ["convert", str(source), "--outfile", str(target), "--outtype", outtype, "--model-name", "tiny", *options]
        self.tool.main()
        tokenizer.unlink()
        transformers.AutoConfig.from_pretrained = read

    def text(self, file):
        """The greedy tokens after PROMPT; None without a server."""
        if self.server is None:
            return None
        port = "8971"
        command = [self.server, "-m", file, "--port", port, "-c", "128", "-ngl", "0", "-t", "1", "--no-warmup"]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            try:
                for _ in range(100):
                    time.sleep(0.2)
                    try:
                        urllib.request.urlopen(f"http://127.0.0.1:{port}/health").read()
                        break
                    except OSError:
                        if process.poll() is not None:
                            log.seek(0)
                            raise SystemExit(f"llama-server: {log.read()[-3000:].decode()}") from None
                body = {"prompt": PROMPT, "n_predict": N_TOKENS, "temperature": 0, "return_tokens": True, "ignore_eos": True}
                request = urllib.request.Request(f"http://127.0.0.1:{port}/completion", json.dumps(body).encode())
                request.add_header("Content-Type", "application/json")
                return json.loads(urllib.request.urlopen(request).read())["tokens"]
            finally:
                process.kill()
                process.wait()


# ---- all of a family ----


def stack_experts(source, target):
    """The same weights with experts stacked that lay one by one, as in the first releases."""
    target.mkdir()
    shutil.copy(source / "config.json", target)
    file = source / "model.safetensors"
    data = file.read_bytes()[8 + len(header_of(file)) :]
    tensors, single = {}, {}
    for name, entry in json.loads(header_of(file)).items():
        if name == "__metadata__":
            continue
        values = data[slice(*entry["data_offsets"])], entry["shape"], entry["dtype"]
        at, _, part = name.partition(".experts.")
        if part:
            e, matrix = part.removesuffix(".weight").split(".")
            single.setdefault(at, {}).setdefault(matrix, {})[int(e)] = values
        else:
            tensors[name] = values
    for at, matrices in single.items():
        ordered = {matrix: [piece for _, piece in sorted(pieces.items())] for matrix, pieces in matrices.items()}
        both = b"".join(g[0] + u[0] for g, u in zip(ordered["gate_proj"], ordered["up_proj"]))
        (rows, cols), down = ordered["gate_proj"][0][1], ordered["down_proj"]
        tensors[f"{at}.experts.gate_up_proj"] = both, [len(down), 2 * rows, cols], "BF16"
        tensors[f"{at}.experts.down_proj"] = b"".join(d[0] for d in down), [len(down), *down[0][1]], "BF16"
    header, begin, blobs = {"__metadata__": {"format": "pt"}}, 0, []
    for name, (blob, shape, dtype) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + len(blob)]}
        begin += len(blob)
        blobs.append(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    (target / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def make(name, llama):
    family = FAMILIES[name]
    kind, text = family["kind"], family["text"]
    centre = 1.0 if kind.startswith("gemma") else 0.0
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        model = text_model(kind, text)
        header = save(model, work / "hf")
        if "mtp" in family:
            header = with_entries(header, mtp_entries(text))
            config = json.loads((work / "hf/config.json").read_text())
            config["text_config"] |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
            (work / "hf/config.json").write_text(json.dumps(config, indent=1))
        expected = {"prompt": PROMPT, "norms": centre, "layouts": {}}
        layouts = expected["layouts"]
        for seed in range(200):
            sha256 = fill(work / "hf", header, seed, centre)
            tokens, gap = transformers_text(work / "hf", type(model))
            if gap < GAP_MIN["hf"] or len(set(tokens)) < 4 or EOS in tokens:
                continue
            layouts.clear()
            layouts["hf"] = {"sha256": sha256, "tokens": tokens, "gap": round(gap, 4)}
            shutil.rmtree(folder, ignore_errors=True)
            if all(step(family, name, llama, work, folder, layouts) for step in (gguf, mlx)):
                break
        else:
            raise SystemExit(f"{name}: no seed gives clear choices")
        expected["seed"] = seed
        keep(work / "hf", folder / "hf", header)
        if "num_experts" in text and "mtp" in family:
            stack_experts(work / "hf", work / "hf-fused")
            keep(work / "hf-fused", folder / "hf-fused", header_of(work / "hf-fused/model.safetensors"))
            (folder / "hf-fused/config.json").unlink()
            whole = (work / "hf-fused/model.safetensors").read_bytes()
            layouts["hf-fused"] = {"sha256": hashlib.sha256(whole).hexdigest(), "tokens": tokens}
        drafters(family, work, folder, llama, seed)
    for path in folder.rglob("*.json"):
        if path.name == "config.json":
            path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")) + "\n")
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in layouts.items())
    rest = json.dumps({k: v for k, v in expected.items() if k != "layouts"})
    (folder / "expected.json").write_text(f'{rest[:-1]}, "layouts": {{\n{lines}\n}}}}\n')
    print(f"{name}: seed {seed}, {layouts}", flush=True)


def keep(source, target, header):
    """The header and the configuration of a file that the test makes."""
    target.mkdir(parents=True)
    shutil.copy(source / "config.json", target)
    (target / "header.json").write_bytes(header)


def to_q8_0(name, tensor):
    """What the converter rounds, rounded."""
    from gguf import GGMLQuantizationType, quants

    whole = tensor.dim() < 2 or tensor.shape[-1] % 32
    if whole or "language_model" not in name or any(part in name for part in ("router", "mlp.gate.", "shared_expert_gate", "conv1d")):
        return tensor
    rows = np.ascontiguousarray(tensor.numpy().reshape(-1, tensor.shape[-1]))
    kind = GGMLQuantizationType.Q8_0
    return torch.from_numpy(quants.dequantize(quants.quantize(rows, kind), kind).reshape(tensor.shape))


def gguf(family, name, llama, work, folder, layouts):
    source = work / "gguf-source"
    shutil.rmtree(source, ignore_errors=True)
    released(work / "hf", source, family["text"])
    llama.convert(source, folder / "gguf.gguf", "q8_0")
    tokens, gap = transformers_text(work / "hf", type(text_model(family["kind"], family["text"])), to_q8_0)
    found = llama.text(folder / "gguf.gguf")
    layouts["gguf.gguf"] = {"tokens": tokens, "gap": round(gap, 4), "llama.cpp": "equal" if found else "not asked"}
    return tokens == layouts["hf"]["tokens"] and gap >= GAP_MIN["q8_0"] and found in (None, tokens)


def mlx(family, name, llama, work, folder, layouts):
    source = work / "mlx-source"
    shutil.rmtree(source, ignore_errors=True)
    released(work / "hf", source, family["text"])
    if family["kind"] == "qwen3_5_moe":
        # mlx-lm reads stacked experts only.
        shutil.rmtree(work / "mlx-fused", ignore_errors=True)
        stack_experts(source, work / "mlx-fused")
        source = work / "mlx-fused"
    for layout, options in family["mlx"].items():
        mlx_lm_convert(source, folder / layout, **options)
    for layout, options in family.get("vlm", {}).items():
        mlx_vlm_convert(source, folder / layout, **options)
    for layout in [*family["mlx"], *family.get("vlm", {})]:
        tokens, gap = mlx_text(folder / layout)
        if gap < GAP_MIN["mlx"]:
            return False
        layouts[layout] = {"tokens": tokens, "gap": round(gap, 4)}
    if family["kind"] == "qwen3_5_moe":
        shutil.rmtree(work / "patches", ignore_errors=True)
        source = with_patches(source, work / "patches")
    mlx_vlm_like(family, source, folder, layouts)
    return mlx_vlm_made(family, source, folder, layouts)


def drafters(family, work, folder, llama, seed):
    text, kind = family["text"], family["kind"]
    if "assistant" in family:
        with oracle.kv_exported():
            header = save(assistant_model(kind, text, *family["assistant"]), work / "assistant")
        fill(work / "assistant", header, seed + 1000, 1.0)
        keep(work / "assistant", folder / "assistant", header)
        # A file for every family would tell nothing new.
        if family.get("assistant_gguf", True):
            source = released(work / "assistant", work / "assistant-released", text)
            llama.convert(source, folder / "assistant.gguf", "bf16")
    if "eagle3" in family:
        header = save(eagle3_model(work / "hf", text), work / "eagle3")
        fill(work / "eagle3", header, seed + 2000, 1.0)
        keep(work / "eagle3", folder / "eagle3", header)
        if family["eagle3"] == "gguf":
            llama.convert(work / "eagle3", folder / "eagle3.gguf", "bf16", "--target-model-dir", str(work / "gguf-source"))
    for layout in family.get("mtp", []):
        from mlx_vlm.split_mtp import split_mtp

        split_mtp(str(work / "hf"), str(folder / layout))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", type=Path, required=True, help="a checkout of llama.cpp")
    parser.add_argument("--server", type=Path, help="its llama-server")
    parser.add_argument("names", nargs="*", default=[])
    args = parser.parse_args()
    transformers.utils.logging.disable_progress_bar()
    llama = Llama(args.llama, args.server)
    for name in args.names or FAMILIES:
        make(name, llama)


if __name__ == "__main__":
    main()
