"""Vectors of the bundled models' hidden rows: `paceline`'s embeddings before they are normalized.

    h = rows after the final norm, [T, H]    last = h[T − 1]    mean = Σ h / T    cls = h[0]

In float64 by `reference.py` from the exact values of the stored weights; the rows are asserted to agree with
transformers in float32 before anything is stored. The prompts are the first of the greedy files.
"""

import json

import numpy as np

NAMES = ["tiny-gemma4-pooled", "tiny-qwen3.5-pooled"]
N_PROMPTS = 2


def make(name, models, here, agreement):
    import greedy
    import oracle
    import reference
    import store

    bundled = name.removesuffix("-pooled")
    folder = models / bundled
    config = json.loads((folder / "config.json").read_text())
    tensors = store.read_folder(folder)
    W = {n: a.astype(np.float64) for n, a in tensors.items()}
    forward = {"gemma4_text": reference.gemma4, "qwen3_5_text": reference.qwen3_5}[config["model_type"]]
    model, agree, out = greedy.load(config, tensors), agreement(name), {}
    stored = json.loads((here / f"greedy/{bundled}.json").read_text())
    for i, record in enumerate(stored["prompts"][:N_PROMPTS]):
        tokens = record["prompt"]
        hidden = forward(config, W, np.array(tokens))
        agree({f"{i}.hidden": hidden}, {f"{i}.hidden": oracle.logits(model, tokens)[1]}, must_have=[f"{i}.hidden"])
        out |= {f"{i}.tokens": np.array(tokens), f"{i}.last": hidden[-1], f"{i}.mean": hidden.mean(0), f"{i}.cls": hidden[0]}
    agree.report()
    notes = {"model": bundled, "source": "float64 reference", "checked_against": f"transformers {oracle.VERSION}"}
    return {f"outputs/{name}.safetensors": store.encode(out, notes)}
