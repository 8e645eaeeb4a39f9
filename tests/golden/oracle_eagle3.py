"""The speculators package, run on the written EAGLE-3 heads, giving the same names as `reference.py`.

Only the package itself is needed (`pip install --no-deps`): what it imports for training and serving is replaced by
empty modules. One thing has to be corrected: it trains with windows, where a drafted row sees those of the row it
started from; in a draft, a row's window ends at its own position.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types

import numpy as np

VERSION = importlib.metadata.version("speculators")
ABSENT = "openai datasets deepspeed wandb httpx aiohttp rich loguru accelerate vllm psutil setproctitle typer click"
ABSENT += " pydantic_settings hs_connectors torchmetrics tensorboard trackio"


class Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules that are not installed."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] in ABSENT.split():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(Finder())

import torch
from safetensors.torch import load_file
from speculators.models.eagle3 import core
from speculators.models.eagle3.config import Eagle3SpeculatorConfig

torch.set_grad_enabled(False)
torch.set_num_threads(1)


def array(tensor):
    return tensor.detach().float().numpy().astype(np.float64)


def load(folder, table):
    """The package's model of a folder; a head without embeddings takes `table`."""
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    model = core.Eagle3DraftModel(config).eval()
    state = load_file(folder / "model.safetensors")
    state.setdefault("embed_tokens.weight", torch.from_numpy(np.array(table, np.float32)))
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [n for n in missing if not n.startswith("verifier_")]
    if missing or unexpected:
        raise ValueError(f"{folder.name}: not read as meant: missing {missing}, unexpected {unexpected}")
    return model


def extend(mask, n_rows):
    """The package's mask with the columns of one more drafted row each, windows moved on to that row."""
    original = core_extend(mask, n_rows)
    step = original.shape[-1] // n_rows - 1
    first = int((mask[0, 0, n_rows - 1, :n_rows] == 0).nonzero()[0])
    if first > 0:
        window, rows = n_rows - first + step - 1, torch.arange(n_rows)
        gone = rows[None] <= rows[:, None] - (window - step)
        original[0, 0, :, :n_rows].masked_fill_(gone, float("-inf"))
    return original


core_extend = core.extend_dense_mask_for_draft_tokens
core.extend_dense_mask_for_draft_tokens = extend


def eagle3(folder, table, taps, tokens, n_true, n_drafts):
    """Intermediates of `n_true` rows and of the chain that follows the last of them.

    Row p reads `tokens[p]` and the target's rows `taps` at p. The package runs a chain from every row, fed with the
    tokens that follow it; the chain wanted is the last row's.
    """
    model = load(folder, table)
    seen = {"layers": [[] for _ in model.layers], "norm": [], "logits": [], "feature": []}
    take = lambda name: lambda module, inputs, output: seen[name].append(array(output[0]))
    for i, layer in enumerate(model.layers):
        layer.register_forward_hook(lambda module, inputs, output, i=i: seen["layers"][i].append(array(output[0])))
    model.fc.register_forward_hook(take("feature"))
    model.norm.register_forward_hook(take("norm"))
    model.lm_head.register_forward_hook(take("logits"))

    # Rows after the true ones only supply their tokens: no true row sees them.
    n_rows = n_true + n_drafts
    ids = torch.tensor([[*map(int, tokens[:n_rows])]])
    rows = np.zeros((n_rows, sum(a.shape[1] for a in taps)), np.float32)
    rows[:n_true] = np.concatenate(taps, -1)
    model(
        hidden_states=torch.from_numpy(rows)[None],
        input_ids=ids,
        document_ids=torch.zeros(1, n_rows, dtype=torch.long),
        ttt_steps=n_drafts,
    )
    hidden = seen["norm"] if model.config.norm_output else seen["layers"][-1]
    trace = {"draft.prefill.feature": seen["feature"][0][:n_true]}
    for i, out in enumerate(seen["layers"]):
        trace[f"draft.prefill.layers.{i}.out"] = out[0][:n_true]
    trace["draft.prefill.hidden"], trace["draft.prefill.logits"] = hidden[0][:n_true], seen["logits"][0][:n_true]
    last = n_true - 1
    for step in range(n_drafts):
        trace[f"draft.{step}.hidden"], trace[f"draft.{step}.logits"] = hidden[step][last], seen["logits"][step][last]
        for i, out in enumerate(seen["layers"]):
            if step:
                trace[f"draft.{step}.layers.{i}.out"] = out[step][last : last + 1]
    return trace
