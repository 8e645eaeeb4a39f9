#!/usr/bin/env python3
"""Writes a model card from a training run's `report.json`.

    python card.py NAME REPORT --corpus DIR [--quantised SIZE] > README.md

The card lists the data with licences (read from the records themselves), the
recipe, losses, acceptance, limits and the ten answers as they came.
"""

import argparse
import json
from pathlib import Path

import data
import evaluate
import train

DESCRIPTIONS = {
    "tiny-gemma4": "Gemma 4, dense: 8 layers, 3 sliding (window 128) to 1 full, k = v in full layers, proportional rotary, softcap 30.",
    "tiny-qwen3.5": "Qwen 3.5, hybrid: 6 gated-delta and 2 gated full-attention layers, and its multi-token head.",
    "tiny-gemma4-e": "Gemma 4 of the E kind: per-layer embeddings, the last 2 of 4 layers read the keys and values of earlier ones, wider there.",
    "tiny-gemma4-moe": "Gemma 4 with experts: 6 layers, each with a dense branch and 2 of 8 experts.",
    "tiny-qwen3.5-moe": "Qwen 3.5 with experts: 3 gated-delta and 1 full-attention layers, 2 of 8 experts and a shared one, and its multi-token head.",
}
LIMITS = """Very small, and trained for minutes: it knows almost nothing about the world, invents facts, and is wrong
often. English only. It was trained on rows of 1,024 tokens; longer conversations are outside of what it has
seen. {real}
Of the held-out sentences of `aesop_children`, `fairytaleqa_qa`, `fairytaleqa_stories` and `python_functions_qa`, 80 to
87 % also occur in the training text, and 32 % of those of `python_algorithms`: those losses show what was memorised.
Questions and tool calls of the checks come from the generator that training used, with other seeds. It has had no safety training. Use it for demonstrations, tests and measurements of the engine."""
OVERTRAINED = """The real part of the corpus is small, and was shown about ten times: text of its kind that was
held out is predicted worse than in the middle of the run."""
# A run that showed little stories at most this often is not called overtrained.
MODEST_EPOCHS = 6


def licences(corpus):
    """`{set: (source, licence)}` of the sets that training uses."""
    found = {}
    for record in data.read_records(Path(corpus) / "train.jsonl.xz"):
        if record["set"] in data.EPOCHS:
            found.setdefault(record["set"], (record["source"], record["licence"]))
    return found


def card(name, report, corpus, size):
    result, target = report["eval"], report["target"]
    _, config, minutes = train.RECIPES[name]
    # Reports of older runs do not say what was packed; those showed the whole mix about once.
    packed = report.get("data")
    repeat, passes, generated = 1.0, 1.0, "About half"
    if packed:
        tokens = packed["tokens"]
        repeat = packed["repeat"]
        passes = target["steps"] * target["batch"] / packed["rows"]
        generated = f"{100 * tokens['synthetic'] / sum(tokens.values()):.0f} % of the tokens"
    stories = data.EPOCHS["tinystories"] * repeat * passes
    real = OVERTRAINED
    if round(stories) <= MODEST_EPOCHS:
        real = f"The real part of the corpus is small; its little stories were shown {stories:.1f} times."
    lines = [f"# {name}", "", DESCRIPTIONS[name], ""]
    lines += [
        f"Hidden {config['hidden_size']}, vocabulary {config['vocab_size']}, tied embeddings. Stored as MLX-affine 4-bit in groups of {report['group']}"
        + (f" ({size:.1f} MB)" if size else "")
        + "; training ended on that grid, and every figure below is of the stored weights.",
        "",
    ]
    lines += [
        "It calls itself Paceline. System turns, thoughts and tool calls are in the family's wire form; the chat template is in this folder.",
        "",
    ]
    lines += ["## Figures", "", evaluate.table(result), ""]
    lines += [
        f"Draft length 3. *Own greedy answers*: to {result['prompts']['all']} benchmark prompts, walked in rounds as an engine does; positions count each draft on its own, given a right prefix. *Own answers at a temperature*: the acceptance of rejection sampling, `Σ min(p, q)`. *Held-out text*: how often a draft is the target's own choice after the same prefix. Synthetic text comes from the generator of `training/` and is far more predictable than speech, so the two are reported apart.",
        "",
    ]
    lines += [
        "## Recipe",
        "",
        f"`training/reproduce.sh` on one H200{f' with `REPEAT={repeat}`' if packed else ', side by side with others'}: {target['steps']} steps of {target['batch']} rows of {target['length']} tokens at {target['tokens_per_second'] / 1e3:.0f}k tokens a second. "
        + " ".join(
            f"Drafter `{d}`: {report[d]['steps']} steps at {report[d]['tokens_per_second'] / 1e3:.0f}k tokens a second."
            for d in minutes
            if d in report and d != "target"
        )
        + f" Muon for matrices, AdamW for the rest, peak rate 0.003. {report['minutes']:.0f} minutes from start to end.",
        "",
    ]
    lines += [
        "## Data",
        "",
        f"{generated} {'are' if packed else 'is'} generated (our own work, CC0-1.0: `training/stories.py`, `exercises.py`, `facts.py`, `conversations.py`). The rest:",
        "",
        "| set | source | licence | times shown in one pass |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {k} | {source} | {licence} | {data.EPOCHS[k] * repeat:.3g} |"
        for k, (source, licence) in licences(corpus).items()
    ]
    lines += [
        "",
        "Attribution goes to the named sources; CC-BY and CDLA-Sharing ask for it.",
        "",
        "## Limits",
        "",
        LIMITS.format(real=real),
        "",
        "## Ten answers, unedited",
        "",
    ]
    for ask, answer, _ in result["answers"]:
        lines += [f"**{ask}**", "", "\n".join("> " + line for line in answer.strip().split("\n")), ""]
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description="write a model card")
    parser.add_argument("name", choices=sorted(train.RECIPES))
    parser.add_argument("report", type=Path)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--quantised", type=float, default=0.0, help="size of the stored file in MB")
    args = parser.parse_args()
    print(card(args.name, json.loads(args.report.read_text()), args.corpus, args.quantised))


if __name__ == "__main__":
    main()
