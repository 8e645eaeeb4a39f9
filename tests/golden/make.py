"""Writes the golden files: `python tests/golden/make.py [--check] [NAME…]`.

Without names it makes everything; `--check` writes nothing and compares what it would write with what is there
(checkpoints by the byte, outputs to CHECK_TOLERANCE). Every stored number comes from `reference.py` in float64; every
one the library can produce is asserted to agree with the library (float32) to LIBRARY_TOLERANCE before it is stored.
"""

import argparse
import pathlib
import sys
import tempfile

import numpy as np

import checkpoints as cp
import reference
import store

HERE = pathlib.Path(__file__).resolve().parent
LIBRARY_TOLERANCE = 1e-4  # of max(1, largest magnitude of the tensor)
CHECK_TOLERANCE = 1e-6  # the same, between two runs of the reference
MIN_GAP = 2e-3  # between the two best logits wherever a greedy choice is stored
N_DRAFTS = 4

# Checkpoints with the weights of another one, which tests fill in: only headers are kept.
DERIVED = ("checkpoints/gemma4-dense-bf16/", "checkpoints/gemma4-dense-f16/", "-multimodal/")

# Outputs of a checkpoint that only changes the storage format: enough to name the layer.
SHORT = ("embed", "layers.*.out", "hidden", "logits")


def telling(trace):
    """Without what is wide and tells no more than an earlier layer's of its width: convolutions and queries."""
    seen, kept = set(), {}
    for name, array in trace.items():
        kind = name.rsplit(".", 1)[-1]
        if kind in ("conv", "q"):
            if (kind, array.shape) in seen:
                continue
            seen.add((kind, array.shape))
        kept[name] = array
    return kept


def fail(message):
    sys.exit(f"make.py: {message}")


def wide(tensors):
    """float64 copies of the weights."""
    return {name: a if a.dtype.kind == "i" else a.astype(np.float64) for name, a in tensors.items()}


def prompt(n_tokens, seed):
    """Token ids below every placeholder id of the multimodal layouts."""
    return np.random.RandomState(seed).randint(3, 64, n_tokens)


def pick(logits, what):
    """The greedy token of one row, which must not hang on rounding."""
    order = np.argsort(-logits)
    gap = logits[order[0]] - logits[order[1]]
    if gap < MIN_GAP:
        fail(f"{what}: the two best logits are {gap:.1e} apart, choose another seed")
    return int(order[0])


class Agreement:
    """Compares a trace with the library's and remembers the worst relative difference."""

    def __init__(self, name):
        self.name, self.worst, self.where, self.count = name, 0.0, "", 0

    def __call__(self, ours, theirs, must_have=()):
        missing = [n for n in must_have if n not in theirs]
        if missing:
            fail(f"{self.name}: the library gave no {missing}")
        for name, a in ours.items():
            if name not in theirs:
                continue
            b = np.asarray(theirs[name])
            a = np.asarray(a)
            if name.endswith(("moe_ids", "moe_weights")):
                # Order among the chosen is not part of the contract.
                a, b = np.sort(a, -1), np.sort(b, -1)
            if a.shape != b.shape:
                fail(f"{self.name}: {name} has shape {a.shape}, the library {b.shape}")
            error = float(np.max(np.abs(a - b)) / max(1.0, np.max(np.abs(b))))
            self.count += 1
            if error > self.worst:
                self.worst, self.where = error, name
            if not error <= LIBRARY_TOLERANCE:
                fail(f"{self.name}: {name} differs from the library by {error:.2e}")

    def report(self, note=""):
        agree = f"{self.count} tensors agree with the library, worst {self.worst:.1e} ({self.where})"
        print(f"{self.name}: {agree}{note}", flush=True)


def with_oracle(files, run):
    """Runs `run(folder)` on a folder as it will be on disk."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder) / "checkpoint"
        folder.mkdir()
        for name, data in files.items():
            (folder / name).write_bytes(data)
        return run(folder)


FORWARD = {
    "gemma4": (reference.gemma4, reference.gemma4_logits),
    "qwen3_5": (reference.qwen3_5, reference.qwen3_5_logits),
}


class Target:
    """One tiny target: configuration, weights, prompt; the parents of drafters and of other layouts.

    `retyped`: the weights of a case above, rounded to another type.
    """

    def __init__(self, name, family, config, shapes, seed, n_tokens, layout=cp.single_file, retyped=None, like=None):
        self.name, self.family, self.config, self.retyped, self.like = name, family, config, retyped, like
        if retyped:
            self.config = config | {"dtype": retyped}
        self.tensors = cp.weights(family, shapes, seed, self.config["dtype"])
        self.tokens = prompt(n_tokens, seed)
        self.layout, self.stored = layout, self.tensors

    def files(self):
        return self.layout(self.config, self.stored)

    def weights(self):
        return wide(self.tensors)

    def trace(self):
        forward, head = FORWARD[self.family]
        trace, W = {}, self.weights()
        trace["logits"] = head(self.config, W, forward(self.config, W, self.tokens, trace=trace))
        return trace

    def make(self):
        import oracle

        files, trace, agree = self.files(), self.trace(), Agreement(self.name)

        def run(folder):
            model = oracle.load(folder)
            library, _ = oracle.target(model, self.tokens)
            agree(trace, library, must_have=trace)

        with_oracle(files, run)
        agree.report()
        out = {f"checkpoints/{self.name}/{file}": data for file, data in files.items()}
        if self.like is None:
            kept = telling(trace)
            if self.retyped:
                kept = {n: a for n, a in trace.items() if n in SHORT or n.endswith(".out")}
            kept = {"tokens": self.tokens} | kept
            notes = {
                "checkpoint": self.name,
                "source": "float64 reference",
                "checked_against": f"transformers {oracle.VERSION}",
            }
            out[f"outputs/{self.name}.safetensors"] = store.encode(kept, notes)
        return out


def verify(target, W, n_prompt_cache, pending, drafts):
    """The target's rows over the pending token and the draft, on top of a cache with the prompt."""
    forward, head = FORWARD[target.family]
    tokens = np.array([pending] + drafts)
    hidden = forward(target.config, W, tokens, cache=n_prompt_cache)
    return {"verify.tokens": tokens, "verify.hidden": hidden, "verify.logits": head(target.config, W, hidden)}


def check_verify(agree, oracle, model, target, out):
    logits, hidden = oracle.logits(model, list(target.tokens) + list(out["verify.tokens"]))
    n = len(target.tokens)
    agree(out, {"verify.logits": logits[n:], "verify.hidden": hidden[n:]})


class Assistant:
    """An assistant drafter and its target: N_DRAFTS chained greedy drafts after the prompt."""

    def __init__(self, name, target, seed, **changes):
        self.name, self.target, self.family = name, target, "gemma4"
        self.config = cp.assistant_config(target.config, **changes)
        self.tensors = cp.weights("gemma4", cp.assistant_shapes(self.config), seed, self.config["dtype"])

    def make(self):
        import oracle
        from transformers import Gemma4AssistantForCausalLM

        files = cp.single_file(self.config, self.tensors, generation={"num_assistant_tokens": 3, "is_assistant": True})
        c, W, AW, t = self.target.config, self.target.weights(), wide(self.tensors), self.target
        cache = {}
        h = reference.gemma4(c, W, t.tokens, cache=cache)
        pending = pick(reference.gemma4_logits(c, W, h[-1:])[0], f"{self.name}: pending")
        last = {kind: max(i for i in cache if c["layer_types"][i] == kind) for kind in set(c["layer_types"])}
        kv = {kind: cache[i] for kind, i in last.items()}
        out, steps, token, hidden = {"tokens": t.tokens, "pending": np.array([pending])}, [], pending, h[-1]
        for step in range(N_DRAFTS):
            trace = {}
            embedding = W["model.embed_tokens.weight"][token] * reference.embed_scale(c, c["hidden_size"])
            logits, hidden = reference.assistant_step(self.config, AW, embedding, hidden, kv, trace)
            token = pick(logits, f"{self.name}: draft {step}")
            trace |= {"hidden": hidden, "logits": logits, "token": np.array([token])}
            steps.append(trace)
            out |= {f"draft.{step}.{name}": a for name, a in trace.items()}
        out |= verify(t, W, cache, pending, [int(s["token"][0]) for s in steps])
        agree = Agreement(self.name)

        def run(folder):
            with oracle.kv_exported():
                model = with_oracle(t.files(), oracle.load)
                drafter = oracle.load(folder, Gemma4AssistantForCausalLM)
                for ours, theirs in zip(steps, oracle.assistant(model, drafter, t.tokens, pending, N_DRAFTS)):
                    skip = ("embed", "candidate_ids", "candidate_logits")  # the library has them inside `logits`
                    agree(ours, theirs, must_have=[n for n in ours if n not in skip])
                check_verify(agree, oracle, model, t, out)

        with_oracle(files, run)
        agree.report(f", drafts {[int(s['token'][0]) for s in steps]}")
        notes = {
            "checkpoint": self.name,
            "target": t.name,
            "source": "float64 reference",
            "checked_against": f"transformers {oracle.VERSION}, corrected: all-shared assistants accepted, "
            "target K/V exported, sliding layers see keys k > n - W (the release keeps two more)",
        }
        result = {f"checkpoints/{self.name}/{file}": data for file, data in files.items()}
        return result | {f"outputs/{self.name}.safetensors": store.encode(out, notes)}


class Mtp:
    """The MTP head inside a Qwen target: prefilled with the prompt, then chained on its own normed output."""

    def __init__(self, name, target):
        self.name, self.target, self.family = name, target, "qwen3_5"

    def make(self):
        import oracle
        import torch

        t = self.target
        c, W, T = t.config, t.weights(), len(t.tokens)
        cache, rows = {}, {}
        h = reference.qwen3_5(c, W, t.tokens, cache=cache)
        pending = pick(reference.qwen3_5_logits(c, W, h[-1:])[0], f"{self.name}: pending")
        out = {"tokens": t.tokens, "pending": np.array([pending])}
        # Row p: token x_{p+1} at position p + 1, hidden of position p. The last row is the first draft.
        trace = {}
        tokens = np.append(t.tokens[1:], pending)
        m = reference.mtp(c, W, tokens, h, np.arange(1, T + 1), rows, trace)
        out |= {f"draft.prefill.{name}": a for name, a in trace.items()} | {"draft.prefill.hidden": m}
        drafts, used_tokens, used_hidden = [], list(map(int, tokens)), [*h]
        for step in range(N_DRAFTS):
            if step:
                trace = {}
                used_tokens.append(drafts[-1])
                used_hidden.append(m[-1])
                m = reference.mtp(c, W, np.array(drafts[-1:]), m[-1:], np.array([T + step]), rows, trace)
                out |= {f"draft.{step}.{name}": a for name, a in trace.items()}
            logits = reference.qwen3_5_logits(c, W, m[-1])
            drafts.append(pick(logits, f"{self.name}: draft {step}"))
            made = {"hidden": m[-1], "logits": logits, "token": np.array(drafts[-1:])}
            out |= {f"draft.{step}.{name}": a for name, a in made.items()}
        out |= verify(t, W, cache, pending, drafts)
        agree = Agreement(self.name)

        def run(folder):
            model = oracle.load(folder)
            head = oracle.mtp_head(model, {n: a for n, a in t.tensors.items() if n.startswith("mtp.")})
            hidden = torch.from_numpy(np.array(used_hidden, np.float32))
            library = oracle.mtp(head, used_tokens, hidden, list(range(1, len(used_tokens) + 1)))
            seen = {f"draft.prefill.{name}": a[:T] for name, a in library.items()}
            for step in range(N_DRAFTS):
                row = T - 1 + step
                seen |= {f"draft.{step}.{name}": a[row : row + 1] for name, a in library.items()}
                seen |= {f"draft.{step}.{name}": library[name][row] for name in ("hidden", "logits")}
            must = [n for n in out if n.startswith("draft.") and not n.endswith(".token")]
            agree(out, seen, must_have=must)
            check_verify(agree, oracle, model, t, out)

        with_oracle(t.files(), run)
        agree.report(f", drafts {drafts}")
        notes = {
            "checkpoint": t.name,
            "target": t.name,
            "source": "float64 reference",
            "checked_against": f"transformers {oracle.VERSION} (generic MTP module)",
        }
        return {f"outputs/{self.name}.safetensors": store.encode(out, notes)}


class Eagle3:
    """An EAGLE-3 head and its target: prefilled with the prompt, then chained on its own rows."""

    def __init__(self, name, target, seed, *config, own_embeddings=True, **changes):
        self.name, self.target, self.family = name, target, target.family
        self.config = cp.eagle3_config(target.config, *config, **changes)
        self.tensors = cp.weights("eagle3", cp.eagle3_shapes(self.config, own_embeddings), seed, self.config["dtype"])
        self.vocabulary = cp.draft_vocabulary(self.config, seed)

    def make(self):
        import oracle_eagle3 as oracle

        files = cp.single_file(self.config, self.tensors | self.vocabulary, generation={})
        del files["generation_config.json"]
        t, c, W = self.target, self.config, wide(self.tensors)
        forward, head = FORWARD[t.family]
        TW, T, inside = t.weights(), len(t.tokens), {}
        h = forward(t.config, TW, t.tokens, trace=inside)
        pending = pick(head(t.config, TW, h[-1:])[0], f"{self.name}: pending")
        table = W.get("embed_tokens.weight", TW["model.embed_tokens.weight"])
        ids = np.arange(c["draft_vocab_size"]) + self.vocabulary.get("d2t", 0)
        taps = [inside[f"layers.{j - 1}.out" if j else "embed"] for j in cp.tapped(c, t.config)]
        features = reference.eagle3_features(c, W, taps)

        out = {"tokens": t.tokens, "pending": np.array([pending])}
        # Row p: token x_{p+1} at position p, the target's rows at p. The last row is the first draft.
        tokens, cache, trace = np.append(t.tokens[1:], pending), {}, {}
        x, logits = reference.eagle3(c, W, table, tokens, features, np.arange(T), cache, trace)
        trace |= {"feature": features, "hidden": x, "logits": logits}
        out |= {f"draft.prefill.{name}": a for name, a in trace.items()}
        drafts = []
        for step in range(N_DRAFTS):
            trace = {}
            if step:
                at = np.array([T - 1 + step])
                x, logits = reference.eagle3(c, W, table, np.array(drafts[-1:]), x[-1:], at, cache, trace)
            drafts.append(int(ids[pick(logits[-1], f"{self.name}: draft {step}")]))
            trace |= {"hidden": x[-1], "logits": logits[-1], "token": np.array(drafts[-1:])}
            out |= {f"draft.{step}.{name}": a for name, a in trace.items()}
        agree = Agreement(self.name)

        def run(folder):
            library = oracle.eagle3(folder, table, taps, [*tokens, *drafts], T, N_DRAFTS)
            agree(out, library, must_have=[n for n in out if n.startswith("draft.") and not n.endswith(".token")])

        with_oracle(files, run)
        agree.report(f", drafts {drafts}")
        notes = {
            "checkpoint": self.name,
            "target": t.name,
            "source": "float64 reference",
            "checked_against": f"speculators {oracle.VERSION}, corrected: a drafted row's window ends at its own position",
        }
        result = {f"checkpoints/{self.name}/{file}": data for file, data in files.items()}
        return result | {f"outputs/{self.name}.safetensors": store.encode(out, notes)}


def catalogue():
    """Every golden case, parents first."""
    dense = ("gemma4", cp.GEMMA_DENSE, cp.gemma4_shapes(cp.GEMMA_DENSE), 1, 40)
    gemma_dense = Target("gemma4-dense", *dense)
    gemma_ple = Target("gemma4-ple", "gemma4", cp.GEMMA_PLE, cp.gemma4_shapes(cp.GEMMA_PLE), 2, 40)
    hybrid = ("qwen3_5", cp.QWEN_DENSE, cp.qwen3_5_shapes(cp.QWEN_DENSE), 29, 70)
    qwen_dense = Target("qwen3_5-dense", *hybrid)
    qwen_moe = Target("qwen3_5-moe", "qwen3_5", cp.QWEN_MOE, cp.qwen3_5_shapes(cp.QWEN_MOE), 5, 24)
    qwen_moe.stored = cp.split_mtp_experts(qwen_moe.tensors)
    centroids = {"use_ordered_embeddings": True, "num_centroids": 12, "centroid_intermediate_top_k": 3}
    windowed = {"num_hidden_layers": 2, "layer_types": [cp.FULL, cp.SLIDING]}
    windowed |= {"sliding_window": 8, "use_sliding_window": True}
    fused = {"norm_before_residual": True, "norm_before_fc": True}
    vision = lambda layout: lambda config, tensors: layout(config, tensors, 6)
    return [
        gemma_dense,
        Target("gemma4-dense-bf16", *dense, retyped="bfloat16"),
        Target("gemma4-dense-f16", *dense, retyped="float16"),
        Target("gemma4-multimodal", *dense, layout=vision(cp.gemma4_multimodal), like="gemma4-dense"),
        Assistant("gemma4-dense-assistant", gemma_dense, 7),
        Eagle3("gemma4-dense-eagle3", gemma_dense, 9, [1, 2, 3], 40, norm_before_residual=True),
        gemma_ple,
        Assistant("gemma4-ple-assistant", gemma_ple, 8, **centroids),
        Eagle3("gemma4-ple-eagle3", gemma_ple, 10, [0, 2, 5], 96, fc_norm=True, norm_output=True),
        Target("gemma4-moe", "gemma4", cp.GEMMA_MOE, cp.gemma4_shapes(cp.GEMMA_MOE), 3, 24),
        qwen_dense,
        Target("qwen3_5-multimodal", *hybrid, layout=vision(cp.qwen3_5_multimodal), like="qwen3_5-dense"),
        Mtp("qwen3_5-dense-mtp", qwen_dense),
        Eagle3("qwen3_5-dense-eagle3", qwen_dense, 11, [1, 2, 4], 48, "qwen3", windowed, own_embeddings=False, **fused),
        qwen_moe,
        Mtp("qwen3_5-moe-mtp", qwen_moe),
        Eagle3("qwen3_5-moe-eagle3", qwen_moe, 12, None, 32, norm_before_residual=True),
    ]


def manifest(cases):
    """`cases.json`: which checkpoint, target and outputs belong together."""
    rows = []
    for case in cases:
        kind = {Target: "target", Assistant: "assistant", Mtp: "mtp", Eagle3: "eagle3"}[type(case)]
        row = {"name": case.name, "kind": kind, "family": case.family}
        if kind == "target":
            row |= {"checkpoint": case.name, "outputs": f"outputs/{case.like or case.name}.safetensors"}
        else:
            drafter = case.target.name if kind == "mtp" else case.name
            row |= {"checkpoint": drafter, "target": case.target.name, "outputs": f"outputs/{case.name}.safetensors"}
        rows.append(row)
    return {"cases.json": cp.text_bytes(rows)}


def same(path, data):
    """None, or how the file differs from `data`."""
    if not path.exists():
        return "is missing"
    if path.parent.name != "outputs":
        return None if path.read_bytes() == data else "differs"
    with tempfile.NamedTemporaryFile() as new:
        new.write(data)
        new.flush()
        (ours, notes), (theirs, old_notes) = store.read(new.name), store.read(path)
    if list(ours) != list(theirs):
        return "has other tensors"
    for name, a in ours.items():
        b = theirs[name]
        if a.shape != b.shape or np.max(np.abs(a - b)) > CHECK_TOLERANCE * max(1.0, np.max(np.abs(b))):
            return f"has another {name}"
    return None


def main():
    cases = catalogue()
    import greedy
    import pooled

    names = [case.name for case in cases] + greedy.NAMES + pooled.NAMES
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to make (default: all): {', '.join(names)}")
    parser.add_argument("--check", action="store_true", help="compare with the files instead of writing them")
    models = greedy.default_models(HERE)
    parser.add_argument("--models", type=pathlib.Path, default=models, help="folder with the bundled models")
    prompts_help = "JSON lines of chat prompts for the greedy files (default: the ids already stored)"
    parser.add_argument("--prompts", type=pathlib.Path, help=prompts_help)
    options = parser.parse_args()
    unknown = [n for n in options.names if n not in names]
    if unknown:
        fail(f"no such golden: {', '.join(unknown)}; there are: {', '.join(names)}")
    wanted = options.names or names
    jobs = [lambda: manifest(cases)] + [case.make for case in cases if case.name in wanted]
    text = lambda name: lambda: greedy.make(name, options.models, options.prompts, HERE)
    jobs += [text(name) for name in greedy.NAMES if name in wanted]
    vectors = lambda name: lambda: pooled.make(name, options.models, HERE, Agreement)
    jobs += [vectors(name) for name in pooled.NAMES if name in wanted]
    n_files = n_bytes = n_wrong = 0
    for job in jobs:
        for name, data in job().items():
            if any(part in name for part in DERIVED) and name.endswith(".safetensors"):
                name, data = f"{name}.header", store.header(data)
            path = HERE / name
            n_files, n_bytes = n_files + 1, n_bytes + len(data)
            if options.check:
                difference = same(path, data)
                if difference:
                    n_wrong += 1
                    print(f"{name} {difference}")
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    print(f"{n_files} files, {n_bytes / 1e6:.2f} MB, {'compared' if options.check else 'written'}, {n_wrong} wrong")
    sys.exit(1 if n_wrong else 0)


if __name__ == "__main__":
    main()
