"""Models and drafters from checkpoint folders, bf16 ones and those of `quantise.py`.

Codes become the values they stand for, and what an MLX file lays out differently
is turned back, so that a module's state dict has the tensor names of training.
Deliberately absent: other people's layouts; the engine reads those.
"""

import json
from pathlib import Path

import numpy as np
import torch

import dspark
import eagle3
import gemma4
import qwen3_5
import vision
from checkpoint import read_folder
from quantise import plain


def torch_tensor(tensor):
    if tensor.dtype in ("I64", "BOOL"):
        return torch.from_numpy(tensor.bits.astype(np.int64))
    return torch.from_numpy(np.ascontiguousarray(tensor.float32()))


def state_of(folder, config):
    """`{name: tensor}`; the decoder of the multimodal layout gets its names of the text one."""
    stored = {n.replace("model.language_model.", "model.", 1): t for n, t in read_folder(folder).items()}
    return {name: torch_tensor(t) for name, t in plain(stored, config).items()}


def dtype_on(device):
    return torch.bfloat16 if str(device).startswith("cuda") else torch.float32


def is_of_tower(name):
    return name.startswith(("model.vision_tower.", "model.embed_vision.", "model.visual."))


def load_tower(folder, device="cpu"):
    """The picture tower of a folder of the multimodal layout, frozen."""
    config = json.loads((Path(folder) / "config.json").read_text())
    family = "qwen" if "qwen" in config["model_type"] else "gemma"
    size, dtype = config["text_config"]["hidden_size"], dtype_on(device)
    module = vision.tower(family, config["vision_config"], size, dtype=dtype)
    state = {n: t for n, t in state_of(folder, config).items() if is_of_tower(n)}
    module.load_state_dict({n.removeprefix(module.prefix): t for n, t in state.items()})
    return module.to(device).eval().requires_grad_(False)


def load(folder, device="cpu"):
    """The module of a folder, frozen: a target (without its tower), an assistant, an EAGLE-3
    head or a DSpark head."""
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text())
    state = {n: t for n, t in state_of(folder, config).items() if not is_of_tower(n)}
    dtype = dtype_on(device)
    config = config if "vision_config" not in config else config["text_config"]
    centroids = None
    if config.get("speculators_model_type") == "eagle3":
        kept = state.pop("d2t")
        state.pop("t2d")
        module = eagle3.Eagle3(config, kept + torch.arange(len(kept)))
    elif "markov_rank" in config:
        module = dspark.Dspark(config)
    elif config["model_type"] == "gemma4_assistant":
        centroids = [state.pop(f"masked_embedding.{n}", None) for n in ("centroids.weight", "token_ordering")]
        module = gemma4.Assistant(config)
    elif config["model_type"] == "gemma4_text":
        module = gemma4.Gemma4(config, dtype=dtype)
    else:
        module = qwen3_5.Qwen35(config, dtype=dtype)
    module.load_state_dict(state)
    module = module.to(device).eval().requires_grad_(False)
    if centroids and centroids[0] is not None:
        found, ordering = (x.to(device) for x in centroids)
        module.set_centroids(found, ordering, config["centroid_intermediate_top_k"])
    return module
