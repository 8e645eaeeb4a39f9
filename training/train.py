#!/usr/bin/env python3
"""Trains a target and its drafters, evaluates them and writes the checkpoints.

    python train.py tiny-gemma4 --rows gemma.npy --corpus DIR --tokenizer FILE --out DIR

A run has two stages, each limited by the minutes of its recipe or by steps:

1. The target on the next token. A Qwen target is trained jointly with its
   multi-token head, unrolled three deep.
2. The drafters, with the target frozen and stored as it will be shipped, on rows of
   which a quarter are the target's own answers (`answers.py`). Their loss is
   `Σ_k 0.8^k·(KL(target ‖ draft_k) + 0.3·CE(argmax target, draft_k))`, but for DSpark's,
   which `dspark.py` has.

The learning rate is flat for half a stage and falls to zero. Matrices are put on
the 4-bit grid from two thirds of a stage on (`layers.Storage`).
"""

import argparse
import copy
import json
import random
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import answers
import data
import delta_kernels
import dspark
import eagle3
import evaluate
import export
import gemma4
import load
import qwen3_5
from gemma4 import Assistant, Gemma4
from layers import Matrix, Experts, Storage
from muon import optimisers
from qwen3_5 import Qwen35

DEPTH = 3  # steps that drafters are unrolled in training
DEPTH_DECAY = 0.8
MTP_WEIGHT = 0.1
MTP_SHARE = 4  # one row in so many also trains the multi-token head
ARGMAX_WEIGHT = 0.3
OWN_SHARE = 4  # one row in so many of a drafter's is the target's own answer
# Hidden size and width of an assistant by its target's hidden size.
ASSISTANTS = {192: (128, 384), 256: (128, 384), 384: (256, 128)}
OWN_ANSWERS = 16_384
BALANCE_WEIGHT = 0.01
WARMUP_STEPS = 60
GRAD_CLIP = 1.0
GRADIENT_TOLERANCE = 0.1  # bf16; a wrong kernel is off by more than one

S, G = gemma4.SLIDING, gemma4.FULL
L, Q = qwen3_5.LINEAR, qwen3_5.FULL

# Every bundled model: its class, its config, and the minutes of its target and of
# each drafter: of tiny-qwen3.5 alone on one H200, of the others beside a second model.
RECIPES = {
    "tiny-gemma4": (
        Gemma4,
        gemma4.config([S, S, S, G] * 2, hidden=384),
        {"target": 4.5, "assistant": 4.5, "centroid": 0, "eagle3": 2.5},
    ),
    "tiny-qwen3.5": (
        Qwen35,
        qwen3_5.config([L, L, L, Q] * 2, hidden=384, width=640),
        {"target": 5.5, "mtp": 2.0, "eagle3": 1.6, "dspark": 3.0},
    ),
    "tiny-gemma4-e": (
        Gemma4,
        gemma4.config(
            [S, G] * 2,
            hidden=192,
            width=256,
            num_key_value_heads=1,
            num_kv_shared_layers=2,
            use_double_wide_mlp=True,
            hidden_size_per_layer_input=32,
            vocab_size_per_layer_input=8192,
            attention_k_eq_v=False,
            num_global_key_value_heads=None,
        ),
        {"target": 3.5, "assistant": 1.3, "centroid": 0},
    ),
    "tiny-gemma4-moe": (
        Gemma4,
        gemma4.config(
            [S, S, G] * 2,
            hidden=256,
            width=256,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=2,
            moe_intermediate_size=128,
        ),
        {"target": 3, "assistant": 1.5},
    ),
    "tiny-qwen3.5-moe": (
        Qwen35,
        qwen3_5.config(
            [L, L, L, Q],
            hidden=192,
            num_key_value_heads=1,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            architectures=["Qwen3_5MoeForCausalLM"],
            model_type="qwen3_5_moe_text",
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=64,
            shared_expert_intermediate_size=64,
        ),
        {"target": 2.7, "mtp": 0.7},
    ),
}


class Clock:
    """The share of a stage that is over, by time or by steps. A stage that starts late
    is shortened, to end by the time `until` if there is one."""

    def __init__(self, minutes, steps, until=None):
        self.whole, self.steps, self.until, self.done, self.start = minutes, steps, until, 0, None

    def tick(self):
        # Time starts after the third step: the first ones compile.
        self.done += 1
        if self.done == 3 or self.start is None:
            self.start = time.time()
            left = self.whole if self.until is None else (self.until - self.start) / 60
            self.minutes = max(min(self.whole, left), 0.01)

    def share(self):
        if self.steps:
            return self.done / self.steps
        return 0.0 if self.start is None else (time.time() - self.start) / (60 * self.minutes)


def learning_rate(peak, share, step):
    """Warm-up, flat for the first half, then linear to zero."""
    return peak * min(1.0, (step + 1) / WARMUP_STEPS) * max(0.0, min(1.0, (1 - share) / 0.5))


def storage_share(share):
    """How much of the storage grid is in force: a ramp around two thirds."""
    return min(1.0, max(0.0, (share - 0.62) / 0.06))


def compiled(function):
    """`function` compiled where there is a GPU to compile for."""
    return torch.compile(function, dynamic=False) if torch.cuda.is_available() else function


def compile_layers(layers):
    """Compiles every layer where there is a GPU to compile for. Layers of a kind share
    their code, which takes a fraction of the time that a whole step does."""
    if torch.cuda.is_available():
        # All layers share one cache of compiled forms; a form that fails runs as it is.
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.suppress_errors = True
        for layer in layers:
            layer.compile(dynamic=False)


def gradients(model, ids):
    model.zero_grad(set_to_none=True)
    target_loss(model, ids)[0].backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def difference(some, others):
    """The distance of two sets of gradients as a share of the norm of `others`."""
    total = lambda grads: torch.stack([g.float().norm() for g in grads]).norm()
    return (total([some[k] - g for k, g in others.items()]) / total(others.values())).item()


def trusted_step(model, ids, log):
    """Compiles the step, and takes back what does not give the gradients of the plain
    definitions within rounding: compiled layers, and the kernels of the delta rule."""
    fast = gradients(model, ids)
    log("compiled")
    with torch.compiler.set_stance("force_eager"):
        eager = gradients(model, ids)
        kernel, qwen3_5.GatedDelta.rule = qwen3_5.GatedDelta.rule, staticmethod(qwen3_5.gated_delta)
        plain = gradients(model, ids)
    errors = {"compiled": difference(fast, eager), "kernels": difference(eager, plain)}
    log(f"gradients differ from plain ones by {errors}")
    single = {k: ((fast[k] - g).norm() / g.norm()).item() for k, g in plain.items()}
    worst = sorted(single, key=single.get)[-5:]
    log(
        "worst: "
        + ", ".join(f"{k} {single[k]:.3f} ({fast[k].norm():.1e}, {plain[k].norm():.1e})" for k in worst)
    )
    if not errors["kernels"] < GRADIENT_TOLERANCE:
        log("the plain delta rule is used")
    else:
        qwen3_5.GatedDelta.rule = staticmethod(kernel)
    if not errors["compiled"] < GRADIENT_TOLERANCE:
        log("layers are not compiled")
        torch.compiler.set_stance("force_eager")


@compiled
def cross_entropy(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@compiled
def soft_loss(draft, target, depth_index):
    """`KL(target ‖ draft)` of one step, over rows that have a target; the
    target's entropy is left out, as it has no gradient."""
    wanted, logp = step_rows(draft, target, depth_index)
    return -(F.softmax(wanted, -1) * logp).sum(-1).mean()


@compiled
def step_loss(draft, target, depth_index):
    """`soft_loss`, and what the target's own choice costs."""
    wanted, logp = step_rows(draft, target, depth_index)
    soft = -(F.softmax(wanted, -1) * logp).sum(-1).mean()
    return soft - ARGMAX_WEIGHT * logp.gather(-1, wanted.argmax(-1, keepdim=True)).mean()


def step_rows(draft, target, k):
    """The target's logits and the draft's log-probabilities of step `k`, row by row."""
    wanted, guess = target[:, 1 + k :].detach(), draft[:, : target.shape[1] - 1 - k]
    return wanted, F.log_softmax(guess, -1)


def target_loss(model, ids):
    out = model(ids[:, :-1])
    main = loss = cross_entropy(out["logits"], ids[:, 1:])
    if isinstance(model, Qwen35):
        few = len(ids) // MTP_SHARE
        part = {"hidden": out["hidden"][:few]}
        for k, draft in enumerate(model.unroll(ids[:few], part, DEPTH, exact=False)):
            loss = loss + MTP_WEIGHT * DEPTH_DECAY**k * soft_loss(draft, out["logits"][:few], k)
    return loss + BALANCE_WEIGHT * model.balance(), main.detach()


block_loss = compiled(dspark.block_loss)


def drafter_loss(drafts, target_logits):
    return sum(DEPTH_DECAY**k * step_loss(draft, target_logits, k) for k, draft in enumerate(drafts))


def batches(rows, size, device, seed):
    """Endless batches `[size, T + 1]`, in a new order each epoch."""
    order = np.random.default_rng(seed)
    while True:
        shuffled = order.permutation(len(rows))
        for i in range(0, len(rows) - size + 1, size):
            block = torch.from_numpy(rows[np.sort(shuffled[i : i + size])].astype(np.int64))
            yield block.pin_memory().to(device, non_blocking=True) if device == "cuda" else block


def run_stage(
    name, loss_of, modules, storages, source, lr, clock, log, count=torch.Tensor.numel, unit="tokens"
):
    """Steps the optimisers until the clock has run out; returns `unit`s a second and the
    steps. A batch of `source` holds `count(batch)` of them."""
    steppers = optimisers(modules, lr)
    parameters = [p for o in steppers for g in o.param_groups for p in g["params"]]
    step, seen, began = 0, 0, None
    while clock.share() < 1:
        share = clock.share()
        for o in steppers:
            for g in o.param_groups:
                g["lr"] = learning_rate(lr, share, step)
        for storage in storages:
            storage.share.fill_(storage_share(share))
        batch = next(source)
        loss, shown = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, GRAD_CLIP)
        for o in steppers:
            o.step()
            o.zero_grad(set_to_none=True)
        step += 1
        if step <= 3:
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            began, seen = time.time(), 0
        else:
            seen += count(batch)
        clock.tick()
        if step % 50 == 0 or step in (1, 3, 10):
            rate = seen / max(time.time() - began, 1e-3)
            if not torch.isfinite(shown):
                raise FloatingPointError(f"{name}: loss is {shown.item()} at step {step}")
            log(f"{name} step {step} share {share:.3f} loss {shown.item():.4f} {rate / 1e3:.1f}k {unit}/s")
    for storage in storages:
        storage.share.fill_(1)
    return seen / max(time.time() - began, 1e-3), step


def bake(module):
    for part in module.modules():
        if isinstance(part, (Matrix, Experts)):
            part.bake()


def snapshot(module):
    return {k: v.detach().clone() for k, v in module.state_dict().items()}


def frozen(model):
    model.eval().requires_grad_(False)
    return model


def draft_vocabulary(rows, own, size, vocab):
    """The `size` most frequent ids of packed rows and of the target's own, ascending."""
    counts = sum(np.bincount(x.reshape(-1), minlength=vocab) / x.size for x in (rows[:20_000], own))
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:size]).copy())


def make_drafter(kind, target, kept, storage, device):
    """An assistant, a multi-token head, a DSpark head, or an EAGLE-3 head over the ids `kept`."""
    c = target.c
    with torch.device(device):
        if kind == "mtp":
            return qwen3_5.Mtp(c, storage)
        if kind == "assistant":
            hidden, width = ASSISTANTS[c["hidden_size"]]
            return Assistant(gemma4.assistant_config(c, hidden, width), storage).to(device)
        taps = (2, c["num_hidden_layers"] // 2, c["num_hidden_layers"] - 1)
        if kind == "dspark":
            sizes = dspark.SIZES[target.family]
            return dspark.Dspark(dspark.config(c, taps, **sizes), storage).to(device)
        sizes = eagle3.SIZES[target.family]
        return eagle3.Eagle3(eagle3.config(c, taps, **sizes), kept.to(device), storage).to(device)


def drafter_rows(source, own, device, seed, share=OWN_SHARE):
    """Endless batches of half rows, one in `share` of them the target's own answers.

    A draft needs no long context, and attention over drafts is dense.
    """
    order = np.random.default_rng(seed)
    for x in source:
        half = (x.shape[1] - 1) // 2
        halves = torch.cat([x[:, : half + 1], x[:, half : 2 * half + 1]])
        n = len(halves) // share
        picked = own[order.integers(len(own), size=n)].astype(np.int64)
        yield torch.cat([halves[n:], torch.from_numpy(picked).to(device)])


def answer(model, args, device, log):
    """The target's own answers as documents, ids each."""
    began = time.time()
    found = answers.documents(model, args.corpus, args.tokenizer, args.own_answers, device, args.seed)
    log(f"{len(found)} own answers in {time.time() - began:.0f} s")
    return found


def stage_numbers(parser, pairs, recipe):
    """`STAGE=NUMBER` pairs as a dict in the recipe's order; a bad pair ends the program."""
    wanted = {}
    for pair in pairs:
        stage, _, text = pair.partition("=")
        if stage not in recipe:
            parser.error(f"stage is none of {', '.join(recipe)}: {pair}")
        try:
            wanted[stage] = float(text)
        except ValueError:
            parser.error(f"not a number: {pair}")
    return {stage: wanted[stage] for stage in recipe if stage in wanted}


def main():
    parser = argparse.ArgumentParser(description="train a bundled model and its drafters")
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--rows", type=Path, required=True, help="written by data.py; waited for")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--target-folder", type=Path, help="a finished target to train drafters for, instead of a new one"
    )
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--pace", type=float, default=1.0, help="factor on the recipe's minutes")
    parser.add_argument(
        "--minutes",
        nargs="+",
        metavar="STAGE=MINUTES",
        help="the stages to run, instead of the recipe's; drafters not named are left out",
    )
    parser.add_argument(
        "--until",
        nargs="+",
        default=(),
        metavar="STAGE=SECONDS",
        help="when stages end at the latest, counted from the start of the program",
    )
    parser.add_argument("--steps", type=int, default=0, help="steps of the target instead of minutes")
    parser.add_argument("--draft-steps", type=int, default=0)
    parser.add_argument("--own-answers", type=int, default=OWN_ANSWERS, help="that drafters learn from")
    parser.add_argument("--own-share", type=int, default=OWN_SHARE, help="one row in so many is one of those")
    parser.add_argument(
        "--group", type=int, choices=(32, 64, 128), default=64, help="weights that share a scale"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick-eval", action="store_true")
    parser.add_argument("--drafters-only-eval", action="store_true", help="no figures of the target itself")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    began = time.time()
    args.out.mkdir(parents=True, exist_ok=True)

    def log(text):
        print(f"[{args.name} {time.time() - began:6.1f}s] {text}", flush=True)

    make, config, minutes = RECIPES[args.name]
    until = {s: began + t for s, t in stage_numbers(parser, args.until, minutes).items()}
    if args.minutes:
        minutes = stage_numbers(parser, args.minutes, minutes)
    if args.target_folder:
        minutes = {stage: m for stage, m in minutes.items() if stage != "target"}
    elif "target" not in minutes:
        parser.error("stage target is missing in --minutes")
    minutes = {stage: args.pace * m for stage, m in minutes.items()}
    storage = Storage(4, args.group, device)
    if make is Qwen35:
        kernels = delta_kernels.rule(qwen3_5.gated_delta, device, log)
        qwen3_5.GatedDelta.rule = staticmethod(kernels or qwen3_5.gated_delta)
    if args.target_folder:
        model = load.load(args.target_folder, device)
        config, masters = model.c, None
    else:
        with torch.device(device):
            model = make(config, storage, torch.bfloat16 if device == "cuda" else torch.float32)
    log(f"target: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters")
    compile_layers([*model.model.layers, *(model.mtp.layers if make is Qwen35 else ())])
    if device == "cuda" and not args.target_folder:
        # Compile while the rows are still being packed.
        dummy = torch.randint(20, 8000, (args.batch, 1025), device=device)
        trusted_step(model, dummy, log)
    answered = None
    if args.target_folder:
        # A finished target answers while the rows are still being packed.
        answered = answer(model, args, device, log)
    while not args.rows.exists():
        time.sleep(1)
    rows = np.load(args.rows, mmap_mode="r")
    rows = np.array(rows)
    packed = json.loads(args.rows.with_suffix(".data.json").read_text())
    log(f"{rows.shape} rows")
    source = batches(rows, args.batch, device, args.seed)
    report = {"data": {**packed, "rows": len(rows)}}
    if not args.target_folder:
        clock = Clock(minutes.pop("target"), args.steps, until.get("target"))
        step = lambda ids: target_loss(model, ids)
        rate, steps = run_stage("target", step, [model], [storage], source, args.lr, clock, log)
        length = rows.shape[1] - 1
        report["target"] = {"tokens_per_second": rate, "steps": steps, "batch": args.batch, "length": length}
        torch.cuda.empty_cache() if device == "cuda" else None
        # Checkpoints hold the weights before storage; `bake` overwrites them.
        masters = snapshot(model)
        export.save_target(args.out, args.name, model, masters, args.tokenizer)
        frozen(model)
        bake(model.model)
        torch._dynamo.reset()
    answered = answered or answer(model, args, device, log)
    own_rows = data.pack(answered, (rows.shape[1] - 1) // 2, random.Random(args.seed))
    log(f"{len(own_rows)} rows of own answers")
    size = eagle3.SIZES[model.family]["draft_vocab"]
    kept = draft_vocabulary(rows, own_rows, size, config["vocab_size"])
    halves = drafter_rows(source, own_rows, device, args.seed, args.own_share)
    trained, states = {}, {}
    for kind in minutes:
        own = Storage(4, args.group, device)
        clock = Clock(minutes[kind], args.draft_steps, until.get(kind))
        if kind == "mtp":
            # The head as it is, with a grid of its own to move to.
            state = model.mtp.state_dict()
            drafter = model.mtp = make_drafter(kind, model, kept, own, device)
            drafter.load_state_dict(state)
            unroll = lambda ids, out: model.unroll(ids, out, DEPTH, exact=True)
        elif kind == "centroid":
            # The assistant of this run with another head.
            drafter, unroll = copy.deepcopy(trained["assistant"]), None
        else:
            drafter = make_drafter(kind, model, kept, own, device)
            unroll = lambda ids, out, drafter=drafter: drafter.unroll(model, ids, out, DEPTH)
        log(f"{kind}: {sum(p.numel() for p in drafter.parameters()) / 1e6:.2f} M parameters")
        if unroll is not None:
            compile_layers(drafter.model.layers if kind == "assistant" else drafter.layers)

            def loss_of(ids):
                with torch.no_grad():
                    out = model(ids[:, :-1])
                if kind == "dspark":
                    loss = drafter.training_loss(model, ids, out, block_loss)
                else:
                    loss = drafter_loss(unroll(ids, out), out["logits"])
                return loss, loss.detach()

            rate, steps = run_stage(kind, loss_of, [drafter], [own], halves, args.lr / 2, clock, log)
            report[kind] = {"tokens_per_second": rate, "steps": steps}
        frozen(drafter)
        if kind == "assistant":
            states[kind] = snapshot(drafter)
            export.save_assistant(args.out, kind, drafter, states[kind])
        elif kind == "centroid":
            export.add_centroids(drafter, model, rows, device)
            export.save_assistant(args.out, kind, drafter, states["assistant"])
        elif kind == "mtp":
            state = {f"mtp.{k}": v for k, v in snapshot(drafter).items()}
            if masters is None:
                export.save_head(args.out / args.name, args.target_folder, state)
            else:
                export.save_target(args.out, args.name, model, {**masters, **state}, args.tokenizer)
        elif kind == "dspark":
            export.save_dspark(args.out, drafter)
        else:
            export.save_eagle3(args.out, drafter)
        bake(drafter)
        trained[kind] = drafter
        torch._dynamo.reset()
        torch.cuda.empty_cache() if device == "cuda" else None
    report.update(group=args.group, minutes=(time.time() - began) / 60)
    with_target = not args.drafters_only_eval
    report["eval"] = evaluate.report(
        model, trained, args.corpus, args.tokenizer, log, quick=args.quick_eval, with_target=with_target
    )
    (args.out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False))
    log("done")


if __name__ == "__main__":
    main()
