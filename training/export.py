"""Writes trained models as Hugging Face checkpoints in bf16.

A target's folder has everything a loader needs: weights, config, tokenizer, chat
template, generation config. Tied heads are not stored twice.
"""

import json
import shutil
from pathlib import Path

import torch

import centroids
from checkpoint import Tensor, bf16, write_file

TEMPLATES = Path(__file__).parent / "templates"
# Centroid heads: clusters, and how many of them are read.
CENTROIDS, CENTROID_TOP = 256, 32
DRAFT_LENGTH = 3


def tensors(state):
    """The tensors of a state dict, floats rounded to bf16."""
    out = {}
    for name, value in state.items():
        value = value.detach().cpu()
        if value.is_floating_point():
            out[name] = bf16(value.float().numpy())
        elif value.dtype == torch.bool:
            out[name] = Tensor("BOOL", value.numpy().astype("u1"))
        else:
            out[name] = Tensor("I64", value.numpy())
    return out


def save(folder, state, config, **files):
    """Writes one checkpoint folder; `files` are JSON files by stem."""
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "model.safetensors", tensors(state), {"format": "pt"})
    for stem, content in {"config": config, **files}.items():
        (folder / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")


def save_target(out, name, model, state, tokenizer):
    """The target `name` with its tokenizer and chat template."""
    family = model.family
    ids = json.loads(Path(tokenizer).read_text())["added_tokens"]
    ids = {t["content"]: t["id"] for t in ids}
    if family == "gemma":
        # A model hands over to a tool by opening the response.
        generation = {
            "eos_token_id": [ids["<eos>"], ids["<turn|>"], ids["<|tool_response>"]],
            "bos_token_id": 2,
            "pad_token_id": 0,
        }
        special = {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>"}
    else:
        generation = {
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        }
        special = {"bos_token": None, "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    folder = out / name
    special = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model.c["max_position_embeddings"],
        **special,
    }
    save(folder, state, model.c, generation_config=generation, tokenizer_config=special)
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    shutil.copyfile(TEMPLATES / f"{family}.jinja", folder / "chat_template.jinja")


def save_assistant(out, kind, drafter, state):
    state = dict(state)
    if drafter.c["use_ordered_embeddings"]:
        state["masked_embedding.centroids.weight"] = drafter.centroids
        state["masked_embedding.token_ordering"] = drafter.ordering
    generation = {"is_assistant": True, "num_assistant_tokens": DRAFT_LENGTH}
    save(out / kind, state, drafter.c, generation_config=generation)


def save_eagle3(out, drafter):
    save(out / "eagle3", {**drafter.state_dict(), **drafter.mapping()}, drafter.c)


@torch.no_grad()
def collect_states(drafter, target, rows, device, n_rows=64):
    ids = torch.from_numpy(rows[:n_rows, :513].astype("int64")).to(device)
    out = target(ids[:, :-1])
    states = drafter.states(target, ids, out, DRAFT_LENGTH)
    return torch.cat([z.flatten(0, 1) for z in states]).float()


def add_centroids(drafter, target, rows, device):
    """Fits a centroid head to a trained assistant and switches it on."""
    z = collect_states(drafter, target, rows, device)
    head = drafter.model.embed_tokens.stored().detach().float()
    found, ordering = centroids.fit(z, head, CENTROIDS)
    drafter.set_centroids(found.to(torch.bfloat16).float(), ordering, CENTROID_TOP)
    return drafter
