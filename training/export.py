"""Writes trained models as Hugging Face checkpoints in bf16.

A target's folder has everything a loader needs: weights, config, tokenizer, chat
template, generation config. Tied heads are not stored twice.
"""

import json
import shutil
from pathlib import Path

import torch

import centroids
from checkpoint import Tensor, bf16, read_folder, write_file
from layers import Matrix
from quantise import quantise_rows, stored_tensors

TEMPLATES = Path(__file__).parent / "templates"
# Centroid heads: clusters, and how many of them are read.
CENTROIDS, CENTROID_TOP = 256, 32
DRAFT_LENGTH = 3
# Ids of Gemma's tokens around a picture.
GEMMA_FENCE = (19, 20)
SOFT_TOKENS = 70  # most of a picture of Gemma
QWEN_PIXELS = 65_536  # of a picture of Qwen
CLIP_FRAMES = 4


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
            "do_sample": False,
            "eos_token_id": [ids["<eos>"], ids["<turn|>"], ids["<|tool_response>"]],
            "bos_token_id": 2,
            "pad_token_id": 0,
        }
        special = {"bos_token": "<bos>", "eos_token": "<turn|>", "pad_token": "<pad>"}
    else:
        generation = {
            "do_sample": False,
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


def save_head(out, folder, state):
    """The stored target `folder` with the tensors of `state`, its multi-token head trained
    anew, in place of those it has; all others keep their bits."""
    out.mkdir(parents=True, exist_ok=True)
    stored, entry = read_folder(folder), json.loads((folder / "config.json").read_text())["quantization"]
    coded, _ = stored_tensors(tensors(state), "qwen", entry)
    if not coded.keys() <= stored.keys():
        raise ValueError(f"{folder} has no {sorted(coded.keys() - stored.keys())}")
    write_file(out / "model.safetensors", stored | coded, {"format": "mlx"})
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            shutil.copyfile(path, out / path.name)


def tower_tensors(tower, storage):
    """The tensors of a tower, matrices in codes as `quantise.py` writes them."""
    coded = {f"{n}.weight" for n, m in tower.named_modules() if isinstance(m, Matrix) and m.bits}
    out = {}
    for name, tensor in tensors(tower.state_dict()).items():
        name, full = tower.prefix + name, name
        out[name] = tensor
        if full in coded:
            module = name.removesuffix(".weight")
            parts = quantise_rows(tensor.float32(), storage.bits, storage.group)
            out |= dict(zip((name, f"{module}.scales", f"{module}.biases"), parts))
    return out


def save_multimodal(out, folder, tower, storage, mrope_section):
    """The text checkpoint `folder` and its tower as one checkpoint of the multimodal layout.

    The decoder's stored tensors are copied bit for bit under `model.language_model.`.
    """
    out.mkdir(parents=True, exist_ok=True)
    text = json.loads((folder / "config.json").read_text())
    entry, family = text.pop("quantization"), tower.family
    text.pop("quantization_config", None)
    text.pop("architectures")
    rename = lambda n: n.replace("model.", "model.language_model.", 1) if n.startswith("model.") else n
    stored = {rename(n): t for n, t in read_folder(folder).items()} | tower_tensors(tower, storage)
    write_file(out / "model.safetensors", stored, {"format": "mlx"})
    tokenizer = (folder / "tokenizer.json").read_text()
    names = json.loads((folder / "tokenizer_config.json").read_text())
    top = {"dtype": "bfloat16", "text_config": text, "vision_config": tower.c, "tie_word_embeddings": True}
    if family == "gemma":
        marks = {"image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>"}
        names |= {"extra_special_tokens": marks, **marks}
        top |= {
            "architectures": ["Gemma4ForConditionalGeneration"],
            "model_type": "gemma4",
            "audio_config": None,
            "image_token_id": 16,
            "audio_token_id": 17,
            "video_token_id": 18,
            "boi_token_id": GEMMA_FENCE[0],
            "eoi_token_id": GEMMA_FENCE[1],
            "eos_token_id": text["eos_token_id"],
        }
        patches = {"patch_size": 16, "pooling_kernel_size": 3, "max_soft_tokens": SOFT_TOKENS}
        common = {
            **patches,
            "do_resize": True,
            "do_rescale": True,
            "do_normalize": False,
            "rescale_factor": 1 / 255,
        }
        images = {"image_processor_type": "Gemma4ImageProcessor", "image_seq_length": SOFT_TOKENS, **common}
        videos = {"video_processor_type": "Gemma4VideoProcessor", "num_frames": CLIP_FRAMES, **common}
        processor = {"processor_class": "Gemma4Processor", "image_seq_length": SOFT_TOKENS}
    else:
        text["rope_parameters"] |= {"mrope_section": mrope_section, "mrope_interleaved": True}
        ids = {t["content"]: t["id"] for t in json.loads(tokenizer)["added_tokens"]}
        top |= {
            "architectures": ["Qwen3_5ForConditionalGeneration"],
            "model_type": "qwen3_5",
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }
        half = [0.5] * 3
        patches = {"patch_size": 16, "merge_size": 2, "temporal_patch_size": 2}
        common = {**patches, "image_mean": half, "image_std": half, "do_convert_rgb": True}
        size = lambda frames: {"shortest_edge": frames * QWEN_PIXELS, "longest_edge": frames * QWEN_PIXELS}
        images = {"image_processor_type": "Qwen2VLImageProcessorFast", "size": size(1), **common}
        videos = {"video_processor_type": "Qwen3VLVideoProcessor", "size": size(CLIP_FRAMES), **common}
        videos |= {"fps": 2, "min_frames": CLIP_FRAMES, "max_frames": CLIP_FRAMES}
        processor = {"processor_class": "Qwen3VLProcessor"}
    top |= {"quantization": entry, "quantization_config": entry}
    files = {"config": top, "preprocessor_config": images, "video_preprocessor_config": videos}
    files |= {"processor_config": processor, "tokenizer_config": names}
    for stem, content in files.items():
        (out / f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")
    (out / "tokenizer.json").write_text(tokenizer)
    shutil.copyfile(folder / "generation_config.json", out / "generation_config.json")
    shutil.copyfile(TEMPLATES / f"{family}.jinja", out / "chat_template.jinja")


def save_assistant(out, kind, drafter, state):
    state = dict(state)
    if drafter.c["use_ordered_embeddings"]:
        state["masked_embedding.centroids.weight"] = drafter.centroids
        state["masked_embedding.token_ordering"] = drafter.ordering
    generation = {"is_assistant": True, "num_assistant_tokens": DRAFT_LENGTH}
    save(out / kind, state, drafter.c, generation_config=generation)


def save_eagle3(out, drafter):
    save(out / "eagle3", {**drafter.state_dict(), **drafter.mapping()}, drafter.c)


def save_dspark(out, drafter):
    save(out / "dspark", drafter.state_dict(), drafter.c)


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
