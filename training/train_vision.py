#!/usr/bin/env python3
"""Trains a picture tower for a finished language model, which stays as it is.

    python train_vision.py FOLDER --out DIR [--minutes M]

`FOLDER` is a text checkpoint of `quantise.py`; `DIR` receives the same model in the
multimodal layout (`export.save_multimodal`), with the codes of its decoder untouched,
`report.json` and the log on standard output. The tower learns from the answers to
questions about generated pictures (`pictures.py`), through the frozen decoder:

    loss = CE(answer | picture, question) + 0.3·CE(what every cell holds | its soft token)

Every picture is asked several questions, which share its soft tokens. The second term has a linear probe of its own that is thrown away. Matrices of the
tower end on the 4-bit grid, as everywhere (`train.py`).
"""

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import canvas
import delta_kernels
import evaluate
import export
import load
import pictures
import qwen3_5
import train
import vision
from layers import Storage

PROBE_WEIGHT = 0.3
EMPTY_WEIGHT = 0.1  # of cells that hold nothing, which most do
NOISE = 0.02
# Grids of soft tokens that pictures of 1:1, 4:3 and 3:4 get, and how often they are drawn.
GRIDS = {"gemma": ((8, 8), (7, 9), (9, 7)), "qwen": ((8, 8), (6, 9), (9, 6))}
GRID_SHARES = (3, 1, 1)
# One round of batches by frames a picture; rows of each have one length.
ROUND = (1, 1, 2, 1, 1, 4, 1)
LENGTHS = {"gemma": {1: 128, 2: 192, 4: 352}, "qwen": {1: 128, 2: 128, 4: 192}}
RATES = (1, 2, 8, 24)  # frames a second of clips
MROPE_SECTION = [3, 3, 2]
PAD = 0
CASES = 2000  # of evaluation, for each split


class Prompts:
    """Pictures and questions as rows of ids, in a family's wire form."""

    def __init__(self, family, tokenizer):
        self.family, self.text, self.known = family, evaluate.Text(family, tokenizer), {}
        marks = ("<|image|>", "<|video|>") if family == "gemma" else ("<|image_pad|>", "<|video_pad|>")
        self.holders = [self.text.tokenizer.token_to_id(m) for m in marks]
        if family == "gemma":
            self.fence = list(export.GEMMA_FENCE)
            self.parts = ("<bos><|turn>user\n", "<turn|>\n<|turn>model\n", "<turn|>")
        else:
            self.fence = [self.text.tokenizer.token_to_id(m) for m in ("<|vision_start|>", "<|vision_end|>")]
            after = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
            self.parts = ("<|im_start|>user\n", after, "<|im_end|>")

    def ids(self, text):
        if text not in self.known:
            self.known[text] = self.text.ids(text)
        return self.known[text]

    def before(self, grid, n_frames, rate):
        """Ids up to the question, and where the soft tokens stand."""
        if n_frames == 1:
            labels = [""]
        elif self.family == "gemma":
            times = [f // rate for f in range(n_frames)]
            labels = [f"{' ' if i else ''}{t // 60:02d}:{t % 60:02d} " for i, t in enumerate(times)]
        else:
            labels = [f"<{(f + 0.5) / rate:.1f} seconds>" for f in range(0, n_frames, vision.PAIR)]
        ids, where = list(self.ids(self.parts[0])), []
        n = grid[0] * grid[1]
        for label in labels:
            ids += self.ids(label) if label else []
            where += range(len(ids) + 1, len(ids) + 1 + n)
            ids += [self.fence[0], *[self.holders[n_frames > 1]] * n, self.fence[1]]
        return ids, where

    def positions(self, where, grid, length):
        """`[3, length]` rotary positions in time, rows and columns; text counts in all."""
        cells, out, at, i = grid[0] * grid[1], np.zeros((3, length), np.int64), 0, 0
        starts = set(where[::cells])
        while i < length:
            if i in starts:
                run = np.arange(cells)
                out[:, i : i + cells] = at + np.stack([0 * run, run // grid[1], run % grid[1]])
                i, at = i + cells, at + max(grid)
            else:
                out[:, i] = at
                i, at = i + 1, at + 1
        return out

    def rows(self, head, asks, length):
        """`[(ids, where the answer starts)]` of questions, or None if one is longer than `length`."""
        found = []
        for _, question, answer in asks:
            asked = head + self.ids(question) + self.ids(self.parts[1])
            found.append((asked + self.ids(answer) + self.ids(self.parts[2]), len(asked)))
        return found if max(len(row) for row, _ in found) <= length else None

    def batch(self, n_pictures, n_frames, grid, r, split="train", n_asks=1):
        """Arrays of one batch; `n_pictures` go through the tower at once, and every still
        or clip of them has `n_asks` rows."""
        together = vision.PAIR if self.family == "qwen" and n_frames > 1 else 1
        n, length = n_pictures * together // n_frames * n_asks, LENGTHS[self.family][n_frames]
        head, where = self.before(grid, n_frames, r.choice(RATES))
        ids = np.full((n, length), PAD, np.int64)
        scenes, kinds, before, lengths = [], [], [], []
        while len(kinds) < n:
            frames, asks = pictures.example(grid, r, n_frames, split, n_asks)
            rows = self.rows(head, asks, length)
            if rows is None:
                continue
            for (kind, *_), (row, start) in zip(asks, rows):
                at = len(kinds) * length
                ids.reshape(-1)[at : at + len(row)] = row
                before += range(at + start - 1, at + len(row) - 1)
                lengths.append(len(row) - start)
                kinds.append(kind if n_frames == 1 else f"clip: {kind}")
            scenes += frames
        marks, grounds, facts = pictures.arrays(scenes)
        arrays = {"ids": ids, "before": np.array(before), "marks": marks, "grounds": grounds, "facts": facts}
        arrays["where"] = np.array(where)
        arrays["positions"] = self.positions(where, grid, length)
        used = max(len(s.marks) for s in scenes)
        more = {"grid": grid, "frames": n_frames, "used": used, "asks": n_asks}
        return {**arrays, **more, "kinds": kinds, "lengths": lengths}


class Source(torch.utils.data.IterableDataset):
    """Endless batches; workers draw from different seeds."""

    def __init__(self, family, tokenizer, n_pictures, seed):
        self.family, self.tokenizer, self.n, self.seed = family, tokenizer, n_pictures, seed

    def __iter__(self):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        info = torch.utils.data.get_worker_info()
        worker = info.id if info else 0
        prompts = Prompts(self.family, self.tokenizer)
        r = pictures.rng(self.seed * 1009 + worker)
        while True:
            for n_frames in ROUND:
                grids = GRIDS[self.family]
                grid = r.choices(grids, GRID_SHARES)[0] if n_frames == 1 else grids[0]
                yield prompts.batch(self.n, n_frames, grid, r, n_asks=pictures.ASKS)


def shown(batch, tower, noise=0.0):
    """Draws the pictures of a batch for a tower, `[n, 3, ..]` or pairs of frames."""
    with torch.no_grad():
        drawn = canvas.draw(batch["marks"], batch["grounds"], batch["grid"], tower.cell, batch["used"])
        if noise:
            drawn = (drawn + noise * torch.randn_like(drawn)).clamp(0, 1)
    if batch["frames"] > 1 and tower.frames > 1:
        drawn = drawn.unflatten(0, (-1, tower.frames))
    return drawn


def hidden(model, soft, batch):
    """The decoder's final states with soft tokens in their places."""
    ids = batch["ids"]
    x = model.embed(ids)
    soft = soft.reshape(len(ids) // batch["asks"], -1, soft.shape[-1]).to(x.dtype)
    x = x.index_copy(1, batch["where"], soft.repeat_interleave(batch["asks"], 0))
    more = {"positions": batch["positions"]} if model.family == "qwen" else {}
    return model(ids, x=x, logits=False, **more)["hidden"]


def answers(model, soft, batch):
    """Logits and ids of every answer token, `[n, V]` and `[n]`."""
    states = hidden(model, soft, batch).flatten(0, 1)[batch["before"]]
    return model.head(states), batch["ids"].flatten()[batch["before"] + 1]


class Probe(nn.Module):
    """Reads from a soft token what its cell holds in each frame (`pictures.arrays`)."""

    def __init__(self, size, frames):
        super().__init__()
        self.frames, self.sizes = frames, (pictures.KINDS, 1 + len(pictures.NAMES), pictures.MORE)
        self.head = nn.Linear(size, frames * sum(self.sizes))

    def loss(self, soft, facts):
        """`facts [frames of the batch, cells, 3]`; still pictures stand for all frames of a pair."""
        logits = self.head(F.rms_norm(soft.float(), soft.shape[-1:])).unflatten(-1, (self.frames, -1))
        if len(facts) == len(soft):
            facts = facts[:, None].expand(-1, self.frames, -1, -1)
        else:
            facts = facts.unflatten(0, (-1, self.frames))
        logits, facts, total = logits.transpose(1, 2).flatten(0, 2), facts.flatten(0, 2), 0.0
        for part, want in zip(logits.split(self.sizes, -1), facts.unbind(-1)):
            weight = torch.ones(part.shape[-1], device=part.device)
            weight[0] = EMPTY_WEIGHT
            total = total + F.cross_entropy(part, want, weight)
        return total


def has_tower(folder):
    """Whether a checkpoint is of the multimodal layout."""
    return "vision_config" in json.loads((folder / "config.json").read_text())


def on(device, batch):
    def move(array):
        # From pinned memory, so that nothing waits for the step before.
        tensor = torch.from_numpy(array)
        return tensor.pin_memory().to(device, non_blocking=True) if device == "cuda" else tensor.to(device)

    return {k: move(v) if isinstance(v, np.ndarray) else v for k, v in batch.items()}


def as_it_is(batch):
    return batch


@evaluate.plainly
@torch.no_grad()
def accuracy(model, tower, tokenizer, n_cases, device, size=64):
    """Shares of held-out questions answered word for word, `{split: {kind: (right, cases)}}`.

    A greedy answer equals the expected one exactly if every token of it, its end
    included, is the decoder's first choice after the ones before.
    """
    prompts, r, result = Prompts(model.family, tokenizer), pictures.rng(evaluate.HELD_OUT_SEED), {}
    grids = GRIDS[model.family]
    for split in ("pictures", "phrasing", "combination"):
        counts, done = result.setdefault(split, {}), 0
        while done < n_cases:
            n_frames = ROUND[r.randrange(len(ROUND))]
            grid = r.choice(grids) if n_frames == 1 else grids[0]
            batch = on(device, prompts.batch(size, n_frames, grid, r, split))
            logits, wanted = answers(model, tower(shown(batch, tower)), batch)
            hits = [bool(h.all()) for h in (logits.argmax(-1) == wanted).cpu().split(batch["lengths"])]
            done += len(hits)
            for kind, hit in zip(batch["kinds"], hits):
                right, cases = counts.get(kind, (0, 0))
                counts[kind] = (right + hit, cases + 1)
    return result


def main():
    parser = argparse.ArgumentParser(description="train a picture tower for a finished model")
    parser.add_argument("folder", type=Path, help="a text checkpoint of quantise.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=128, help="pictures at once")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument(
        "--minutes", type=float, default=5.0, help="from start to end of training, compiling included"
    )
    parser.add_argument("--steps", type=int, default=0, help="instead of minutes")
    parser.add_argument("--workers", type=int, default=4, help="processes that invent scenes")
    parser.add_argument("--cases", type=int, default=CASES, help="of evaluation, for each of three splits")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.time()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    log = lambda text: print(f"[{args.out.name} {time.time() - began:6.1f}s] {text}", flush=True)

    model = load.load(args.folder, device)
    tokenizer = args.folder / "tokenizer.json"
    if model.family == "qwen":
        model.c["rope_parameters"]["mrope_section"] = MROPE_SECTION
        kernels = delta_kernels.rule(qwen3_5.gated_delta, device, log)
        qwen3_5.GatedDelta.rule = staticmethod(kernels or qwen3_5.gated_delta)
    config = json.loads((args.folder / "config.json").read_text())
    storage = Storage(4, config["quantization"]["group_size"], device)
    size = model.c["hidden_size"]
    with torch.device(device):
        tower = vision.tower(model.family, None, size, storage, model.dtype)
        probe = Probe(size, tower.frames)
    tower.start_at(model.embed(torch.arange(1000, 3000, device=device)).float().pow(2).mean().sqrt().item())
    log(f"tower: {sum(p.numel() for p in tower.parameters()) / 1e6:.2f} M parameters")
    source = Source(model.family, tokenizer, args.batch, args.seed)
    more = {"multiprocessing_context": "fork", "prefetch_factor": 4} if args.workers else {}
    loader = torch.utils.data.DataLoader(
        source, batch_size=None, num_workers=args.workers, collate_fn=as_it_is, **more
    )
    batches = (on(device, batch) for batch in loader)

    def loss_of(batch):
        soft = tower(shown(batch, tower, NOISE))
        loss = F.cross_entropy(*answers(model, soft, batch))
        return loss + PROBE_WEIGHT * probe.loss(soft, batch["facts"]), loss.detach()

    train.compile_layers([*model.model.layers, *tower.layers])
    if device == "cuda":
        # Every shape once, so that the clock measures training.
        prompts, r = Prompts(model.family, tokenizer), pictures.rng(1)
        for n_frames in sorted(set(ROUND)):
            for grid in GRIDS[model.family][: 3 if n_frames == 1 else 1]:
                batch = prompts.batch(args.batch, n_frames, grid, r, n_asks=pictures.ASKS)
                loss_of(on(device, batch))[0].backward()
                log(f"compiled {n_frames} of {grid}")
        tower.zero_grad(set_to_none=True)
        probe.zero_grad(set_to_none=True)
    clock = train.Clock(args.minutes - (time.time() - began) / 60, args.steps)
    rate, steps = train.run_stage(
        "tower",
        loss_of,
        [tower, probe],
        [storage],
        batches,
        args.lr,
        clock,
        log,
        count=lambda batch: len(batch["marks"]),
        unit="pictures",
    )
    export.save_multimodal(args.out, args.folder, tower, storage, MROPE_SECTION)
    train.bake(tower)
    log("saved")
    report = {"tower": {"pictures_per_second": rate, "steps": steps, "batch": args.batch}}
    report["eval"] = {"pictures": accuracy(model, tower, tokenizer, args.cases, device)}
    report["minutes"] = (time.time() - began) / 60
    (args.out / "report.json").write_text(json.dumps(report, indent=1))
    print("\n".join(evaluate.picture_table(report["eval"]["pictures"])), flush=True)
    log("done")


if __name__ == "__main__":
    main()
