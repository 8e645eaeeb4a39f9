"""Golden files of block drafters, DFlash and DSpark:

    python tests/golden/blocks.py --dflash DIR --deepspec DIR --speculators DIR [--check]

DIRs are checkouts of z-lab/dflash, deepseek-ai/DeepSpec and vllm-project/speculators, whose models are run, each on a
seeded head in its own layout, and DeepSpec's on some more. DFlash 2 is z-lab's DFlash with its convolutions and
selector written here. `blocks.json` has the heads: a configuration, and the shapes of the tensors, whose values
a formula gives, so that the tests make the same files:

    v     = uniform in [-1, 1), 24 bits, from a splitmix64 that starts at the FNV-1a hash of the name
    value = v of a table of embeddings, 1 + v/4 of a norm, 1.5 + v/2 of a bias, else 4 v / 2^ceil(log2(columns) / 2)
    d2t   = i + 3 for draft token i, which is token 2i + 3 of the target

`outputs/blocks.safetensors` has, of the block after 12 rows whose taps are `tap.0`, `tap.1`, … by the same formula
(`v` alone): its rows `hidden`, the scores of each guess `after` the one before it, the `tokens` guessed (greedily),
and the `confidence` in each.
"""

import argparse
import importlib.abc
import importlib.machinery
import importlib.metadata
import json
import math
import pathlib
import sys
import types

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
TOLERANCE = 1e-5
N_ROWS, PENDING = 12, 21
MASK = (1 << 64) - 1
TABLES = ("embed_tokens.weight", "markov_w1.weight")

LAYERS = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}
FULL = ["full_attention"] * 2
DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"],
    **LAYERS,
    "vocab_size": 97,
    "layer_types": FULL,
    "block_size": 7,
    "mask_token_id": 5,
    "target_layer_ids": [-1, 1, 3],
    "num_anchors": 1,
    "markov_rank": 6,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
ONE_LAYER = {"num_hidden_layers": 1, "layer_types": FULL[:1], "target_layer_ids": [1], "block_size": 3}
GEMMA = {
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "dtype": "float32",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_global_key_value_heads": 1,
    "head_dim": 8,
    "global_head_dim": 16,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "enable_moe_block": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1000000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "layer_types": FULL,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": False,
    "block_size": 4,
    "mask_token_id": 4,
    "num_anchors": 1,
}
CASES = {
    "dflash": {
        "target": "gemma4-dense",
        "config": {
            "architectures": ["DFlashDraftModel"],
            **LAYERS,
            "vocab_size": 101,
            "layer_types": FULL,
            "block_size": 8,
            "num_target_layers": 5,
            "dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1, 2], "causal": False},
        },
    },
    "deepspec": {"target": "qwen3_5-dense", "config": DEEPSPEC},
    "speculators": {
        "target": "gemma4-dense",
        "config": {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "draft_vocab_size": 40,
            "block_size": 5,
            "aux_hidden_state_layer_ids": [1, 4],
            "mask_token_id": 4,
            "sample_from_anchor": True,
            "sliding_window_non_causal": False,
            "markov_rank": 6,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": False,
            "transformer_layer_config": {
                **LAYERS,
                "vocab_size": 101,
                # Wider than the context: what it is for here is that its rows see no later ones.
                "layer_types": ["sliding_attention", "full_attention"],
                "use_sliding_window": True,
                "sliding_window": 64,
            },
            "speculators_config": {
                "algorithm": "dspark",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
                "verifier": {"architectures": ["Gemma4ForCausalLM"], "name_or_path": None},
            },
        },
    },
    "gemma": {
        "target": "gemma4-dense",
        "config": {
            **GEMMA,
            "attention_k_eq_v": True,
            "target_layer_ids": [0, 3],
            "markov_rank": 6,
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        },
    },
    "gated": {"target": "qwen3_5-dense", "config": {**DEEPSPEC, **ONE_LAYER, "markov_head_type": "gated"}},
    "rnn": {"target": "qwen3_5-dense", "config": {**DEEPSPEC, **ONE_LAYER, "markov_head_type": "rnn"}},
    "dflash2": {
        "target": "gemma4-dense",
        "config": {
            "architectures": ["DFlash2DraftModel"],
            **LAYERS,
            "vocab_size": 101,
            "num_hidden_layers": 1,
            "layer_types": FULL[:1],
            "block_size": 4,
            "num_target_layers": 5,
            "is_causal": False,
            "dflash_config": {
                "mask_token_id": 4,
                "target_layer_ids": [0, 2],
                "conv_kernel_size": 2,
                "conv_group_size": 8,
                "selector_rank": 6,
                "selector_top_k": 5,
            },
        },
    },
    # DFlash as DeepSpec trains it for Gemma 4: DSpark without its two heads.
    "gemma_dflash": {
        "target": "gemma4-dense",
        "config": {
            **GEMMA,
            "attention_k_eq_v": False,
            "target_layer_ids": [1, 2, 4],
            "markov_rank": 0,
            "enable_confidence_head": False,
        },
    },
}


def uniform(name, shape):
    state = 0xCBF29CE484222325
    for byte in name.encode():
        state = ((state ^ byte) * 0x100000001B3) & MASK
    values = []
    for _ in range(math.prod(shape)):
        state = (state + 0x9E3779B97F4A7C15) & MASK
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        values.append((z ^ (z >> 31)) >> 40)
    return (np.array(values, np.float32) / np.float32(1 << 23) - np.float32(1)).reshape(shape)


def tensor(name, shape):
    if name == "d2t":
        return np.arange(shape[0], dtype=np.int64) + 3
    if name == "t2d":
        return np.isin(np.arange(shape[0]), 2 * np.arange(40) + 3)
    v = uniform(name, shape)
    if name.endswith("bias"):
        return np.float32(1.5) + v / np.float32(2)
    if len(shape) == 1:
        return np.float32(1) + v / np.float32(4)
    if name.endswith(TABLES):
        return v
    return v * np.float32(4) / np.float32(1 << math.ceil(math.log2(shape[1]) / 2))


class Empty(types.ModuleType):
    """A module in which every name is an empty class: for what only training and serving import."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    ABSENT = "openai datasets deepspeed wandb httpx aiohttp rich loguru accelerate vllm psutil setproctitle typer click"
    ABSENT += " pydantic_settings hs_connectors torchmetrics tensorboard trackio matplotlib prettytable"

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in self.ABSENT.split():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())

import torch  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import DynamicCache, Gemma4TextConfig, Qwen3Config  # noqa: E402
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding  # noqa: E402

import store  # noqa: E402

torch.set_grad_enabled(False)
torch.set_num_threads(1)


def fill(model, leave_out=()):
    """Gives a model its tensors; their shapes by name."""
    state = {n: t for n, t in model.state_dict().items() if n not in leave_out}
    shapes = {n: list(t.shape) for n, t in state.items()}
    values = {n: torch.from_numpy(np.array(tensor(n, s))) for n, s in shapes.items()}
    missing, unexpected = model.load_state_dict(values, strict=False)
    assert not unexpected and set(missing) <= set(leave_out), (missing, unexpected)
    return shapes


def taps(n):
    return torch.from_numpy(np.concatenate([uniform(f"tap.{i}", (N_ROWS, 32)) for i in range(n)], -1))[None]


def block(config):
    ids = torch.full((1, config["block_size"]), config["mask_token_id"])
    ids[0, 0] = PENDING
    return ids


def flat(config):
    config = Qwen3Config(**config)
    config._attn_implementation = "eager"
    config.pad_token_id = None
    return config


class Target:
    """What a DFlash head has of its target, a Gemma 4: embeddings as the target reads them, and its scores."""

    def __init__(self, name):
        folder = HERE / "checkpoints" / name
        self.table = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        self.cap = json.loads((folder / "config.json").read_text())["final_logit_softcapping"]

    def embed(self, ids):
        return self.table[ids] * self.table.shape[1] ** 0.5

    def logits(self, hidden):
        return torch.tanh(hidden @ self.table.T / self.cap) * self.cap


def dflash(case, folder):
    sys.path.insert(0, str(folder))
    from dflash.model import DFlashDraftModel

    config = case["config"]
    own = config["dflash_config"]
    model = DFlashDraftModel(flat(config)).eval()
    shapes = fill(model)
    target = Target(case["target"])
    ids = block({**config, **own})
    hidden = model(
        position_ids=torch.arange(N_ROWS + config["block_size"])[None],
        noise_embedding=target.embed(ids),
        target_hidden=taps(len(own["target_layer_ids"])),
        past_key_values=DynamicCache(),
        use_cache=True,
        is_causal=False,
    )[0]
    after = target.logits(hidden[1:])
    return shapes, {"hidden": hidden, "after": after, "tokens": after.argmax(-1)}


class Convolution(torch.nn.Module):
    """Of a row and the one before it: the first side before a sublayer, the second after it."""

    def __init__(self, hidden, size):
        super().__init__()
        self.base_kernel = torch.nn.Parameter(torch.zeros(2, 2, hidden))
        self.kernel_projection = torch.nn.Linear(hidden, 4 * hidden // size, bias=False)

    def side(self, x, i):
        added = self.added[..., i, :, :].repeat_interleave(x.shape[-1] // self.added.shape[-1], -1)
        before = torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        kernel = self.base_kernel[i] + added
        return kernel[..., 0, :] * x + kernel[..., 1, :] * before

    def around(self, sublayer):
        def run(hidden_states, **rest):
            self.added = self.kernel_projection(hidden_states).unflatten(-1, (2, 2, -1))
            y = sublayer(self.side(hidden_states, 0), **rest)
            return (self.side(y[0], 1), *y[1:]) if isinstance(y, tuple) else self.side(y, 1)

        return run


class Selector(torch.nn.Module):
    def __init__(self, hidden, vocab, rank):
        super().__init__()
        self.hidden_projection = torch.nn.Linear(hidden, rank, bias=False)
        self.predecessor_codebook = torch.nn.Parameter(torch.zeros(vocab, rank))
        self.successor_codebook = torch.nn.Parameter(torch.zeros(vocab, rank))

    def walk(self, hidden, logits, top_k):
        previous, tokens, after = PENDING, [], []
        for h, row in zip(self.hidden_projection(hidden), logits):
            own, ids = row.topk(top_k)
            scores = own + self.successor_codebook[ids] @ (self.predecessor_codebook[previous] * h)
            previous = int(ids[scores.argmax()])
            tokens.append(previous)
            after.append(scores)
        return torch.tensor(tokens), torch.stack(after)


def dflash2(case, folder):
    """z-lab's DFlash with what DFlash 2 adds, which z-lab publishes for MLX alone."""
    sys.path.insert(0, str(folder))
    from dflash.model import DFlashDraftModel

    config = case["config"]
    own = config["dflash_config"]
    hidden = config["hidden_size"]
    model = DFlashDraftModel(flat(config)).eval()
    for layer in model.layers:
        layer.attention_conv = Convolution(hidden, own["conv_group_size"])
        layer.mlp_conv = Convolution(hidden, own["conv_group_size"])
        layer.self_attn.forward = layer.attention_conv.around(layer.self_attn.forward)
        layer.mlp.forward = layer.mlp_conv.around(layer.mlp.forward)
    model.candidate_selector = Selector(hidden, config["vocab_size"], own["selector_rank"])
    shapes = fill(model)
    target = Target(case["target"])
    rows = model(
        position_ids=torch.arange(N_ROWS + config["block_size"])[None],
        noise_embedding=target.embed(block({**config, **own})),
        target_hidden=taps(len(own["target_layer_ids"])),
        past_key_values=DynamicCache(),
        use_cache=True,
        is_causal=False,
    )[0]
    tokens, after = model.candidate_selector.walk(rows[1:], target.logits(rows[1:]), own["selector_top_k"])
    return shapes, {"hidden": rows, "after": after, "tokens": tokens}


def deepspec(case, folder):
    sys.path.insert(0, str(folder))
    config = case["config"]
    if config["model_type"] == "qwen3":
        from deepspec.modeling.dspark.qwen3 import Qwen3DSparkModel

        model = Qwen3DSparkModel(flat(config)).eval()
    else:
        from deepspec.modeling.dspark.gemma4 import modeling

        # Newer versions of transformers say some of it by layer instead, and turn by the layer type of a call alone.
        layers = Gemma4TextConfig(**config)
        for key in ("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"):
            layers.__dict__[key] = config[key]
        modeling.Gemma4TextRotaryEmbedding = lambda config, layer_type: Gemma4TextRotaryEmbedding(config)
        model = modeling.Gemma4DSparkModel(layers).eval()
    shapes = fill(model)
    ids = block(config)
    hidden = model._forward_backbone(
        position_ids=torch.arange(N_ROWS + config["block_size"])[None],
        noise_embedding=model.embed_tokens(ids),
        target_hidden_states=taps(len(config["target_layer_ids"])),
        past_key_values=DynamicCache(),
        use_cache=True,
        is_causal=False,
    )
    tokens, after = model.sample_draft_tokens(
        model.compute_logits(hidden), first_prev_token_ids=ids[:, 0], hidden_states=hidden
    )
    trace = {"hidden": hidden[0], "after": after[0], "tokens": tokens[0]}
    if model.confidence_head is None:
        return shapes, trace
    previous = torch.cat([ids[:, :1], tokens[:, :-1]], 1)
    scores = model.predict_confidence_step(hidden, prev_token_ids=previous)
    confidence = scores.reshape(-1).sigmoid()
    return shapes, {**trace, "confidence": confidence}


def speculators(case, folder):
    metadata = importlib.metadata
    version = metadata.version
    metadata.version = lambda name: "0" if name == "speculators" else version(name)
    sys.path.insert(0, str(folder / "src"))
    from speculators.models.dspark.config import DSparkSpeculatorConfig
    from speculators.models.dspark.core import DSparkDraftModel

    config = DSparkSpeculatorConfig.model_validate(case["config"])
    config.transformer_layer_config._attn_implementation = "eager"
    model = DSparkDraftModel(config).eval()
    shapes = fill(model, ("verifier_norm.weight", "verifier_lm_head.weight"))
    n_block = config.block_size
    n = N_ROWS + 2 * n_block
    tokens = torch.full((1, n), 9)
    tokens[0, N_ROWS] = PENDING
    anchor = torch.zeros(1, n)
    anchor[0, N_ROWS] = 1
    rows = torch.zeros(1, n, 64)
    rows[:, :N_ROWS] = taps(2)
    hidden, logits, *_ = model._backbone_forward(
        rows, tokens, anchor, torch.zeros(1, n, 32), torch.zeros(1, n, dtype=torch.long), max_anchors=1
    )
    previous, drafted, after = PENDING, [], []
    for i in range(n_block):
        ids = torch.tensor([[previous]])
        bias = model.markov_head.block_bias(prev_token_ids=ids, hidden_states=hidden[:, i : i + 1])
        scores = (logits[:, i] + bias[:, 0])[0]
        best = int(scores.argmax())
        previous = best + int(model.d2t[best])
        after.append(scores)
        drafted.append(previous)
    confidence = model.confidence_head(hidden)[0].sigmoid()
    trace = {"hidden": hidden[0], "after": torch.stack(after), "tokens": torch.tensor(drafted)}
    return shapes, {**trace, "confidence": confidence}


def main():
    parser = argparse.ArgumentParser()
    projects = {"dflash": dflash, "deepspec": deepspec, "speculators": speculators}
    for project in projects:
        parser.add_argument(f"--{project}", type=pathlib.Path, required=True)
    parser.add_argument("--check", action="store_true", help="write nothing, compare with what is here")
    args = parser.parse_args()
    heads, trace = {}, {}
    for name in CASES:
        project = "dflash" if name == "dflash2" else name if name in projects else "deepspec"
        run = dflash2 if name == "dflash2" else projects[project]
        shapes, out = run(json.loads(json.dumps(CASES[name])), getattr(args, project))
        best = np.sort(out["after"].numpy(), -1)
        assert (best[:, -1] - best[:, -2]).min() > 1e-3, f"{name}: a guess that rounding could change"
        heads[name] = {**CASES[name], "tensors": shapes}
        for key, value in out.items():
            trace[f"{name}.{key}"] = value.numpy()
    text = json.dumps(heads, indent=1) + "\n"
    path = HERE / "outputs" / "blocks.safetensors"
    if args.check:
        assert (HERE / "blocks.json").read_text() == text, "blocks.json differs"
        for name, value in load_file(path).items():
            assert np.abs(value.numpy() - trace[name]).max() <= TOLERANCE, name
        return
    (HERE / "blocks.json").write_text(text)
    path.write_bytes(store.encode(trace, {"torch": torch.__version__}))


main()
