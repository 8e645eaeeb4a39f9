"""Writes `outputs/qwen3_5-dense-mtp-layers.safetensors`: `python tests/golden/mtp_layers.py [--check]`.

What an MTP head of two and of three layers drafts after the prompt of `qwen3_5-dense`. No such head is published, so
layer `i` is that of the checkpoint with the rows of every tensor moved down by `i` (`suites::files` does the same), and
`fc` and the norms are shared. A layer runs over all rows at once, without a cache, in float64:

    layer i, row p:  token p + i + 1, and what layer i - 1 made of row p   (the target's hidden row for layer 0)

and its last row drafts the next token. transformers' generic MTP module (float32) has to agree. It ends with one token
a layer; a longer draft goes on here with what each layer made of the last row as the next rows of layer 0.
"""

import argparse
import pathlib
import sys

import numpy as np

import make
import reference
import store

PATH = make.HERE / "outputs" / "qwen3_5-dense-mtp-layers.safetensors"
LAYERS = (2, 3)


def with_layers(tensors, n):
    """`tensors` with a head of `n` layers."""
    first = "mtp.layers.0."
    own = {name: a for name, a in tensors.items() if name.startswith(first)}
    more = {
        name.replace(first, f"mtp.layers.{i}."): np.roll(a, i, axis=0) for i in range(1, n) for name, a in own.items()
    }
    return tensors | more


def draft(c, W, n, text, hidden, n_drafts, run):
    """`n_drafts` tokens after `text`, whose last one is pending, and what drafted each: `run(layer, tokens, rows)`."""
    text, features, drafts, made = list(text), list(hidden), [], []
    while True:
        rows, last = np.array(features), []
        for layer in range(n):
            tokens = np.array(text[layer + 1 : layer + 1 + len(rows)])
            rows = run(layer, tokens, rows)
            last.append(rows[-1])
            logits = reference.qwen3_5_logits(c, W, rows[-1])
            drafts.append(make.pick(logits, f"{n} layers: draft {len(drafts)}"))
            made.append(rows[-1])
            text.append(drafts[-1])
            if len(drafts) == n_drafts:
                return drafts, np.array(made)
        features += last


def drafted(target, n):
    """The stored tensors of a head of `n` layers."""
    import oracle
    import torch

    c, tensors = target.config, with_layers(target.tensors, n)
    W = make.wide(tensors)
    h = reference.qwen3_5(c, W, target.tokens, cache={})
    pending = make.pick(reference.qwen3_5_logits(c, W, h[-1:])[0], f"{n} layers: pending")
    text, ran = [*map(int, target.tokens), pending], []

    def ours(layer, tokens, rows):
        made = reference.mtp(c, W, tokens, rows, np.arange(len(rows)), {}, reference.Nowhere(), layer)
        ran.append((layer, tokens, rows, made))
        return made

    drafts, made = draft(c, W, n, text, h, 2 * n + 1, ours)
    agree = make.Agreement(f"{n} layers")

    def check(folder):
        model = oracle.load(folder)
        head = oracle.mtp_head(model, {name: a for name, a in tensors.items() if name.startswith("mtp.")}, n)
        for layer, tokens, rows, made in ran:
            rows = torch.from_numpy(rows.astype(np.float32))[None]
            # The library counts each layer's rows from its first token; attention is relative.
            at = torch.arange(layer + 1, layer + 1 + len(tokens))[None]
            library = head.forward_layer(layer, rows, at, None, input_ids=torch.from_numpy(tokens)[None])
            agree({f"layer {layer}": made}, {f"layer {layer}": oracle.array(library[0])})
        hidden = torch.from_numpy(h.astype(np.float32))[None]
        at = torch.arange(1, len(text))[None]
        theirs, *_ = head(torch.tensor([text[1:]]), hidden, None, at, None)
        if theirs[0].tolist() != drafts[:n]:
            make.fail(f"{n} layers draft {drafts[:n]}, in the library {theirs[0].tolist()}")

    make.with_oracle(target.files(), check)
    agree.report(f", drafts {drafts}")
    named = {"tokens": target.tokens, "pending": np.array([pending]), "drafts": np.array(drafts), "hidden": made}
    return {f"{n}.{name}": a for name, a in named.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, compare with what is there")
    check = parser.parse_args().check
    target = next(case for case in make.catalogue() if case.name == "qwen3_5-dense")
    out = {name: a for n in LAYERS for name, a in drafted(target, n).items()}
    import oracle

    notes = {
        "checkpoint": target.name,
        "source": "float64 reference",
        "checked_against": f"transformers {oracle.VERSION} (generic MTP module)",
    }
    data = store.encode(out, notes)
    if not check:
        PATH.write_bytes(data)
    elif difference := make.same(PATH, data):
        sys.exit(f"{PATH.name} {difference}")


if __name__ == "__main__":
    main()
