"""Greedy text of the bundled models by transformers: float32 arithmetic, K/V cache on.

Weights are the exact values of the stored codes, in float32.

    tokens[s] = argmax(logits[s]),  gap[s] = best logit − second best logit

Exactly N_TOKENS tokens a prompt; the end-of-turn token does not stop it. Where a gap is within rounding, another
correct implementation may go another way, and every later token with it. The float64 reference reads the same text
afterwards: it must make the same choices, and the gaps stored are its own, which do not depend on the machine.
"""

import json
import os
import pathlib
import tempfile

import numpy as np

NAMES = ["tiny-gemma4", "tiny-gemma4-e", "tiny-gemma4-moe", "tiny-qwen3.5", "tiny-qwen3.5-moe"]
N_PROMPTS, N_TOKENS = 20, 64
GAP_TOLERANCE = 2e-4  # between the library's gaps and the reference's; a smaller gap may choose another token


def default_models(here):
    return pathlib.Path(os.environ.get("PACELINE_MODELS", here.parent.parent / "models"))


def prompt_ids(folder, prompts):
    """[(category, ids)] of N_PROMPTS chat prompts spread over the categories, in the model's own template."""
    from tokenizers import Tokenizer
    from transformers.utils.chat_template_utils import render_jinja_template

    by_category = {}
    for line in prompts.read_text().splitlines():
        record = json.loads(line)
        if "messages" in record:
            by_category.setdefault(record["category"], []).append(record)
    order = [(turn, record) for records in by_category.values() for turn, record in enumerate(records)]
    order.sort(key=lambda pair: pair[0])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = (folder / "chat_template.jinja").read_text()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    special = {k: v for k, v in settings.items() if k.endswith("_token")}
    rows = []
    for _, record in order[:N_PROMPTS]:
        text = render_jinja_template(
            [record["messages"]],
            tools=record.get("tools"),
            chat_template=template,
            add_generation_prompt=True,
            **special,
        )[0][0]
        rows.append((record["category"], tokenizer.encode(text, add_special_tokens=False).ids))
    return rows


def continue_greedily(model, ids):
    import torch
    from transformers import DynamicCache

    cache, tokens, gaps = DynamicCache(config=model.config), [], []
    step = torch.tensor([ids])
    for _ in range(N_TOKENS):
        best = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        step = best.indices[None, :1]
    return tokens, gaps


def reference_gaps(config, W, ids, tokens, gaps):
    """The gaps by the float64 reference on the same text, which must agree with the library's."""
    import reference

    # The experts are not stored; a choice that hung on rounding would show in the gaps.
    reference.MIN_TOP_K_GAP = 0.0
    forward, head = {
        "gemma4_text": (reference.gemma4, reference.gemma4_logits),
        "qwen3_5_text": (reference.qwen3_5, reference.qwen3_5_logits),
        "qwen3_5_moe_text": (reference.qwen3_5, reference.qwen3_5_logits),
    }[config["model_type"]]
    logits = head(config, W, forward(config, W, np.array(ids + tokens[:-1]))[len(ids) - 1 :])
    best = np.sort(logits, -1)
    exact = best[:, -1] - best[:, -2]
    wrong = (np.abs(exact - gaps) > GAP_TOLERANCE) | (logits.argmax(-1) != tokens) & (exact > GAP_TOLERANCE)
    if wrong.any():
        raise ValueError(f"the float64 reference disagrees with the library at step {int(wrong.argmax())}")
    return exact


def load(config, tensors):
    """The library's model of these float32 weights."""
    import oracle
    import store

    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder) / "checkpoint"
        folder.mkdir()
        plain = {k: v for k, v in config.items() if not k.startswith("quantization")}
        (folder / "config.json").write_text(json.dumps(plain))
        (folder / "model.safetensors").write_bytes(store.encode(tensors, {"format": "pt"}))
        return oracle.load(folder)


def make(name, models, prompts, here):
    import oracle
    import store

    folder = models / name
    if not (folder / "config.json").exists():
        raise SystemExit(f"make.py: no bundled model, name its parent with --models or PACELINE_MODELS: {folder}")
    config = json.loads((folder / "config.json").read_text())
    form, file = "bf16", f"greedy/{name}.json"
    if "quantization" in config:
        bits, group = config["quantization"]["bits"], config["quantization"]["group_size"]
        form = f"affine {bits} bits, groups of {group}"
    if prompts is not None:
        rows = prompt_ids(folder, prompts)
    else:
        stored = here / file
        if not stored.exists():
            raise SystemExit(f"make.py: no prompts stored yet, choose some with --prompts: {stored}")
        stored = json.loads(stored.read_text())
        rows = [(p["category"], p["prompt"]) for p in stored["prompts"]]
    tensors = store.read_folder(folder)
    W = {n: a.astype(np.float64) for n, a in tensors.items()}
    model, out, worst = load(config, tensors), [], 0.0
    for category, ids in rows:
        tokens, gaps = continue_greedily(model, ids)
        exact = reference_gaps(config, W, ids, tokens, gaps)
        worst = max(worst, float(np.max(np.abs(exact - gaps))))
        out.append({"category": category, "prompt": ids, "tokens": tokens, "gaps": [round(float(g), 4) for g in exact]})
    smallest = min(g for p in out for g in p["gaps"])
    print(f"{file}: {len(out)} prompts, smallest gap {smallest:.4f}, float32 within {worst:.1e} of float64", flush=True)
    head = {"model": name, "weights": form, "source": f"transformers {oracle.VERSION}, float32"}
    head |= {"n_tokens": N_TOKENS, "stops_at_eos": False}
    lines = ",\n".join(json.dumps(p, separators=(",", ":")) for p in out)
    return {file: (json.dumps(head)[:-1] + ', "prompts": [\n' + lines + "\n]}\n").encode()}
