#!/usr/bin/env python3
"""Measures a model and its drafters, and prints the table of a model card.

    python evaluate.py DIR --corpus DIR [--assistant DIR] [--eagle3 DIR] [--dspark DIR] [--out report.json]

- Loss in nats a token, by set of the held-out corpus, documents one by one.
- Sums, reading questions and tool calls, generated from seeds that training has
  not seen, answered greedily and checked exactly.
- Acceptance, synthetic and real apart. *Teacher-forced*: over held-out text, how
  often the k-th drafted token is the target's own choice after the same prefix.
  *Generated*: over the target's own answers to the benchmark's prompts, where
  rounds are walked as an engine walks them, so tokens a round are exact. For a
  temperature the figure is `Σ min(p, q)`, the acceptance of rejection sampling.
- The answers themselves, unedited.
"""

import argparse
import functools
import json
import random
import re
import sys
from pathlib import Path

import torch

import chat
import conversations
import data
import exercises
import load

# Sets of the corpus by class; the rest is `other`.
CLASSES = {
    "synthetic": ("synthetic",),
    "dialogue": ("self_dialogue", "topical_chat", "synthetic_persona_chat"),
    "stories": (
        "tinystories",
        "fairytaleqa_stories",
        "grimm_hunt",
        "africanstorybook",
        "prathambooks",
        "aesop_children",
        "oz",
        "fairy_lcats",
    ),
}
# Benchmark categories that were generated; all others are real text.
SYNTHETIC_CATEGORIES = (
    "story-synthetic",
    "chat-synthetic",
    "arithmetic",
    "code-synthetic",
    "structured",
    "tool-call",
    "engine-qa",
)
GROUPS = ("synthetic", "real", "dialogue", "all")
TEMPERATURES = (0.7, 1.0)
DRAFTERS = ("assistant", "centroid", "mtp", "eagle3", "dspark")
GREEDY = "own greedy answers"
DEPTH = 3
MAX_LENGTH = 1024
HELD_OUT_SEED = 987_654_321
ANSWER_PROMPTS = [
    "Tell me a story about a rabbit and a kite.",
    "Tell me a story about Anna and a red balloon.",
    "Write a short story about a mouse named Pip who learns to share.",
    "Hello! Who are you?",
    "What is 47 + 38?",
    "Tom has 12 apples and gives 5 to Lily. How many apples are left?",
    "What is speculative decoding?",
    "Write a Python function that reverses a string.",
    "I had a bad day.",
    "Do you like movies?",
]


def class_of(name):
    return next((c for c, sets in CLASSES.items() if name in sets), "other")


class Text:
    """Texts to ids and back, for one family."""

    def __init__(self, family, path):
        from tokenizers import Tokenizer

        self.family, self.tokenizer = family, Tokenizer.from_file(str(path))
        ends = (
            ("<eos>", "<turn|>", "<|tool_response>") if family == "gemma" else ("<|im_end|>", "<|endoftext|>")
        )
        self.ends = [self.tokenizer.token_to_id(t) for t in ends]

    def ids(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def prompt(self, talk):
        return self.ids(chat.RENDER[self.family](talk["messages"], talk["tools"], talk["thinking"], True))

    def text(self, ids):
        while ids and ids[-1] in self.ends:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)


def plainly(function):
    """`function` without compiled layers (`train.compile_layers`), which would be compiled
    anew for every length."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with torch.compiler.set_stance("force_eager"):
            return function(*args, **kwargs)

    return run


@plainly
@torch.no_grad()
def generate(model, prompts, limit, ends, temperature=0.0, seed=0, device="cuda", at_once=256):
    """Answers to `prompts` (lists of ids), all rows in lockstep, token by token.

    A row that is still inside its prompt is fed the prompt, so prompts of
    different lengths need no padding. Returns lists of ids without the prompts.
    """
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers = [[] for _ in prompts]
    for chunk in (order[i : i + at_once] for i in range(0, len(order), at_once)):
        rows = [prompts[i] for i in chunk]
        longest = max(map(len, rows))
        source = torch.zeros(len(rows), longest, dtype=torch.long)
        for r, row in enumerate(rows):
            source[r, : len(row)] = torch.tensor(row)
        source = source.to(device)
        lengths = torch.tensor([len(row) for row in rows], device=device)
        random_bits = torch.Generator(device=device).manual_seed(seed)
        stop = torch.tensor(ends, device=device)
        done = torch.zeros(len(rows), dtype=torch.bool, device=device)
        caches, token, written = model.caches(), source[:, 0], []
        for position in range(longest + limit - 1):
            logits = model.step(token, caches, position)
            if temperature:
                p = torch.softmax(logits / temperature, -1)
                choice = torch.multinomial(p, 1, generator=random_bits)[:, 0]
            else:
                choice = logits.argmax(-1)
            inside = position + 1 < lengths
            if position + 1 < longest:
                choice = torch.where(inside, source[:, position + 1], choice)
            written.append(choice)
            done |= ~inside & torch.isin(choice, stop)
            token = choice
            if position % 32 == 31 and bool(done.all()):
                break
        written = torch.stack(written, 1).tolist()
        for r, i in enumerate(chunk):
            answer = written[r][len(prompts[i]) - 1 :][:limit]
            cut = next((j + 1 for j, t in enumerate(answer) if t in ends), len(answer))
            answers[i] = answer[:cut]
    return answers


def padded(sequences, device):
    """`[n, longest]` ids and the mask of true ones."""
    longest = max(map(len, sequences))
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    real = torch.zeros(len(sequences), longest, dtype=torch.bool)
    for i, s in enumerate(sequences):
        ids[i, : len(s)] = torch.tensor(s)
        real[i, : len(s)] = True
    return ids.to(device), real.to(device)


def in_batches(sequences, size=32):
    """Sequences of like lengths together; yields lists of indices."""
    order = sorted(
        (i for i in range(len(sequences)) if len(sequences[i]) > 2), key=lambda i: len(sequences[i])
    )
    return (order[i : i + size] for i in range(0, len(order), size))


@plainly
@torch.no_grad()
def losses(model, documents, device):
    """Nats a token by set, over `[(set, ids)]`."""
    total, count = {}, {}
    for chunk in in_batches([d[1] for d in documents]):
        ids, real = padded([documents[i][1] for i in chunk], device)
        logits = model(ids[:, :-1])["logits"]
        nats = (
            torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            * real[:, 1:]
        )
        for r, i in enumerate(chunk):
            name = documents[i][0]
            total[name] = total.get(name, 0.0) + nats[r].sum().item()
            count[name] = count.get(name, 0) + int(real[r, 1:].sum())
    return {name: (total[name] / count[name], count[name]) for name in sorted(total)}


@plainly
@torch.no_grad()
def agreement(model, unroll, sequences, device, temperatures=()):
    """What every draft is worth: for each sequence a bool array `[T, depth]`, whether
    draft `k` of the round whose newest token is `p + 1` is the target's greedy choice;
    and for each temperature the overlap `Σ min(p, q)` of the same drafts, `[T, depth]`."""
    hits = [None] * len(sequences)
    overlaps = {t: [None] * len(sequences) for t in temperatures}
    for chunk in in_batches(sequences):
        ids, _ = padded([sequences[i] for i in chunk], device)
        out = model(ids[:, :-1])
        drafts = unroll(ids, out)
        logits, own = out["logits"], out["logits"].argmax(-1)
        T, depth = own.shape[1], len(drafts)
        match = torch.zeros(len(chunk), T, depth, dtype=torch.bool, device=device)
        kept = {t: torch.zeros(len(chunk), T, depth, device=device) for t in temperatures}
        for k, draft in enumerate(drafts[: T - 1]):
            draft = draft[:, : T - 1 - k]
            match[:, : T - 1 - k, k] = draft.argmax(-1) == own[:, 1 + k :]
            for t in temperatures:
                p, q = torch.softmax(logits[:, 1 + k :] / t, -1), torch.softmax(draft / t, -1)
                kept[t][:, : T - 1 - k, k] = torch.minimum(p, q).sum(-1)
        for r, i in enumerate(chunk):
            hits[i] = match[r, : len(sequences[i]) - 1].cpu().numpy()
            for t in temperatures:
                overlaps[t][i] = kept[t][r, : len(sequences[i]) - 1].cpu().numpy()
    return hits, overlaps


def by_position(worth, starts=None):
    """The mean of each draft at positions 1, 2, …, each on its own."""
    depth = next((h.shape[1] for h in worth if h is not None), 0)
    right, seen = [0] * depth, [0] * depth
    for i, h in enumerate(worth):
        if h is None:
            continue
        first = (starts[i] if starts else 1) - 1
        for k in range(depth):
            # Rows whose answer lies beyond the text have nothing to agree with.
            rows = h[first : max(len(h) - 1 - k, 0), k]
            right[k] += float(rows.sum())
            seen[k] += len(rows)
    return [r / max(s, 1) for r, s in zip(right, seen)]


def tokens_a_round(hits, starts, depth):
    """Walks every generated answer in rounds: drafts, keeps the agreeing prefix, goes on."""
    rounds = tokens = 0
    for i, h in enumerate(hits):
        if h is None:
            continue
        # Row p drafts what follows token p + 1; the first round follows the first answer token.
        p, end = starts[i] - 1, len(h) - 1
        while p < end:
            kept = 0
            while kept < min(depth, end - p) and h[p, kept]:
                kept += 1
            rounds += 1
            tokens += min(kept + 1, end - p)
            p += kept + 1
    return tokens / max(rounds, 1)


def numbers(text):
    return re.findall(r"-?\d+", text)


def sums(text, r, n):
    """Two-digit sums: `(prompt ids, check)`."""
    jobs = []
    for _ in range(n):
        a, b = r.randint(10, 99), r.randint(10, 99)
        ask = r.choice([f"What is {a} + {b}?", f"What is {a} plus {b}?", f"{a} + {b} = ?"])
        talk = conversations.conversation([conversations.user(ask)])
        jobs.append((text.prompt(talk), lambda out, want=str(a + b): (numbers(out) or [""])[-1] == want))
    return jobs


def plain(answer):
    return re.sub(r"[^a-z0-9 ]", "", answer.lower()).strip()


def reading(text, r, n):
    """Questions about a story that is given, checked word for word."""
    jobs = []
    for _ in range(n):
        record = exercises.reading(r)
        talk = conversations.conversation([conversations.user(record["prompt"])])
        jobs.append((text.prompt(talk), lambda out, want=record["response"]: plain(out) == plain(want)))
    return jobs


def lookups(text, r, n):
    """One question about a short list of facts, checked word for word."""
    jobs = []
    for _ in range(n):
        talk = conversations.lookups(r, 1)
        want = talk["messages"].pop()["content"]
        jobs.append((text.prompt(talk), lambda out, want=want: plain(out) == plain(want)))
    return jobs


def parse_call(out, family):
    """`(name, {key: text})` of a tool call in a family's wire form, or None."""
    if family == "qwen":
        found = re.search(r"<tool_call>\n<function=(\w+)>\n(.*?)</function>\n</tool_call>", out, re.S)
        if not found:
            return None
        pairs = re.findall(r"<parameter=(\w+)>\n(.*?)\n</parameter>\n", found[2], re.S)
        return found[1], dict(pairs)
    found = re.search(r"<\|tool_call>call:(\w+)\{(.*?)\}<tool_call\|>", out, re.S)
    if not found:
        return None
    pairs = re.findall(r'(\w+):(?:<\|"\|>(.*?)<\|"\|>|([^,]*))(?:,|$)', found[2], re.S)
    return found[1], {key: quoted or bare for key, quoted, bare in pairs}


def fits(value, kind):
    if kind == "integer":
        return re.fullmatch(r"-?\d+", value) is not None
    if kind == "number":
        return re.fullmatch(r"-?\d+(\.\d+)?", value) is not None
    if kind == "boolean":
        return value in ("true", "false")
    return True


def check_call(out, family, talk, want):
    """`(valid, right)`: parses and fits its schema; and is the expected call."""
    found = parse_call(out, family)
    if not found:
        return False, False
    name, arguments = found
    schema = next((t["function"] for t in talk["tools"] if t["function"]["name"] == name), None)
    if schema is None:
        return False, False
    fields = schema["parameters"]["properties"]
    valid = set(schema["parameters"]["required"]) <= set(arguments) <= set(fields)
    valid = valid and all(fits(v, fields[k]["type"]) for k, v in arguments.items())
    expected = {k: chat.qwen_value(v) for k, v in want["arguments"].items()}
    return valid, valid and name == want["name"] and arguments == expected


def tool_jobs(text, r, n):
    jobs = []
    while len(jobs) < n:
        talk = conversations.tool(r)
        at = next(i for i, m in enumerate(talk["messages"]) if m.get("tool_calls"))
        want = talk["messages"][at]["tool_calls"][0]
        talk["messages"], talk["thinking"] = talk["messages"][:at], False
        jobs.append((text.prompt(talk), talk, want))
    return jobs


def in_group(kind, category):
    """Whether a category of the benchmark belongs to a group of the table."""
    if kind == "dialogue":
        return category == "chat-real"
    return kind == "all" or (kind == "synthetic") == (category in SYNTHETIC_CATEGORIES)


def bench_talks(corpus):
    """The benchmark's prompts as `(category, conversation or raw text)`."""
    for record in data.read_records(Path(corpus) / "bench_prompts.jsonl"):
        if "raw" in record:
            yield record["category"], record["raw"]
        else:
            tools = [chat.plain_tool(t) for t in record.get("tools", [])]
            yield record["category"], conversations.conversation(record["messages"], tools)


def unrolled(model, name, drafter):
    """What drafts with `drafter` over whole texts, as `agreement` wants it."""
    if name == "mtp":
        return lambda ids, out: model.unroll(ids, out, DEPTH, exact=True)
    depth = drafter.n_rows if name == "dspark" else DEPTH
    return lambda ids, out: drafter.unroll(model, ids, out, depth)


def of_target(model, text, documents, n, device, log):
    """What the target is worth without drafters: losses, `n` cases of each task, answers."""
    result = {"loss": losses(model, documents, device), "cases": n}
    log("loss: " + ", ".join(f"{k} {v[0]:.3f}" for k, v in result["loss"].items()))
    by_class = {}
    for name, (nats, seen) in result["loss"].items():
        t, m = by_class.get(class_of(name), (0.0, 0))
        by_class[class_of(name)] = (t + nats * seen, m + seen)
    result["loss_by_class"] = {k: t / m for k, (t, m) in by_class.items()}
    log(f"loss by class: {result['loss_by_class']}")
    for name, make, limit in (("sums", sums, 60), ("reading", reading, 60), ("lookups", lookups, 60)):
        jobs = make(text, random.Random(HELD_OUT_SEED + 1), n)
        answers = generate(model, [j[0] for j in jobs], min(limit, 1000), text.ends, device=device)
        answers = [text.text(a) for a in answers]
        right = [j[1](a) for j, a in zip(jobs, answers)]
        result[name] = sum(right) / n
        wrong = [(text.text(j[0])[-120:], a) for j, a, ok in zip(jobs, answers, right) if not ok][:3]
        log(f"{name}: {result[name]:.3f}  wrong: {wrong}")
    jobs = tool_jobs(text, random.Random(HELD_OUT_SEED + 2), n)
    answers = [text.text(a) for a in generate(model, [j[0] for j in jobs], 90, text.ends, device=device)]
    checks = [check_call(a, model.family, j[1], j[2]) for j, a in zip(jobs, answers)]
    result["tool_calls_valid"] = sum(c[0] for c in checks) / n
    result["tool_calls_right"] = sum(c[1] for c in checks) / n
    log(f"tool calls: valid {result['tool_calls_valid']:.3f}, right {result['tool_calls_right']:.3f}")
    asks = [conversations.conversation([conversations.user(a)]) for a in ANSWER_PROMPTS]
    answers = generate(model, [text.prompt(t) for t in asks], 400, text.ends, device=device)
    result["answers"] = [(a, text.text(x), len(x)) for a, x in zip(ANSWER_PROMPTS, answers)]
    for ask, answer, length in result["answers"]:
        log(f"--- {ask} ({length} tokens)\n{answer}")
    return result


def own_answers(model, text, talks, temperatures, device):
    """`{temperature: (prompts with the target's answers, where the answers start)}`. The first
    round follows the first token of an answer."""
    prompts = [
        text.ids(("<bos>" if model.family == "gemma" else "") + t) if isinstance(t, str) else text.prompt(t)
        for _, t in talks
    ]
    found = {}
    for temperature in temperatures:
        answers = generate(model, prompts, 160, text.ends, temperature, device=device)
        found[temperature] = [p + a for p, a in zip(prompts, answers)], [len(p) for p in prompts]
    return found


def of_drafters(model, drafters, documents, talks, answered, device, log):
    """Acceptance of each drafter, over the target's answers to `talks` and over held-out text."""
    groups = {kind: [i for i, (c, _) in enumerate(talks) if in_group(kind, c)] for kind in GROUPS}
    result = {"prompts": {kind: len(pick) for kind, pick in groups.items()}}
    for name, drafter in drafters.items():
        unroll, found = unrolled(model, name, drafter), {}
        for temperature, (whole, starts) in answered.items():
            # Only greedy text tells what the target itself would have chosen next.
            sampled = (temperature,) if temperature else ()
            hits, overlaps = agreement(model, unroll, whole, device, sampled)
            worth, rows = overlaps[temperature] if temperature else hits, {}
            for kind, pick in groups.items():
                w, s = [worth[i] for i in pick], [starts[i] for i in pick]
                rows[kind] = {"by_position": by_position(w, s)}
                if not temperature:
                    lengths = range(1, len(rows[kind]["by_position"]) + 1)
                    by_length = [tokens_a_round(w, s, n) for n in lengths]
                    rows[kind] |= {"tokens_a_round": by_length[-1], "by_length": by_length}
            found[f"generated T={temperature}"] = rows
            log(f"{name} T={temperature} {rows}")
        rows = {}
        for kind in ("synthetic", "dialogue", "stories", "other"):
            pick = [ids for s, ids in documents if class_of(s) == kind]
            if pick:
                hits, _ = agreement(model, unroll, pick, device)
                rows[kind] = {"by_position": by_position(hits)}
        log(f"{name} teacher-forced {rows}")
        result[name] = {**found, "teacher-forced": rows}
    return result


def report(model, drafters, corpus, tokenizer, log, quick=False, with_target=True):
    """All figures of a model card as one dict; `drafters` maps names to modules. Those of the
    target itself are left out if `with_target` is off."""
    # Here, as it imports this module.
    import calibration

    device = str(next(model.parameters()).device)
    text = Text(model.family, tokenizer)
    records = data.read_records(Path(corpus) / "eval.jsonl.xz")
    fresh = random.Random(HELD_OUT_SEED)
    held_out = [{**conversations.generate(fresh), "set": "synthetic"} for _ in range(150)]
    records = [x for x in records if x["set"] not in ("synthetic", "gpteacher")] + held_out
    if quick:
        records = records[::8]
    documents = [(x["set"], text.ids(chat.document(x, model.family))[:MAX_LENGTH]) for x in records]
    result = of_target(model, text, documents, 40 if quick else 250, device, log) if with_target else {}
    talks = list(bench_talks(corpus))
    talks = talks[::6] if quick else talks
    answered = own_answers(model, text, talks, (0.0,) if quick else (0.0, *TEMPERATURES), device)
    result |= of_drafters(model, drafters, documents, talks, answered, device, log)
    if "dspark" in drafters:
        result["calibration"] = calibration.report(model, drafters["dspark"], answered, device)
        log(f"calibration {result['calibration']}")
    return result


def share(x):
    return f"{100 * x:.1f} %"


def acceptance(rows_of, tokens):
    """Rows of a table: a text, its means by position, its tokens a round."""
    depth = len(rows_of[0][1]["by_position"])
    positions = " | ".join(str(k + 1) for k in range(depth))
    lines = [f"| text | position {positions} | tokens a round |", "|---|" + "---|" * (depth + 1)]
    for group, rows in rows_of:
        means = " | ".join(f"{mean:.3f}" for mean in rows["by_position"])
        rounds = f"{rows['tokens_a_round']:.2f}" if tokens in group else ""
        lines.append(f"| {group} | {means} | {rounds} |")
    return lines


SPLITS = {"pictures": "new pictures", "phrasing": "new phrasing", "combination": "new combinations"}


def picture_table(counts):
    """Accuracy on pictures as rows of a table: kinds of question down, splits across."""
    lines = ["| question about a generated picture, word for word | " + " | ".join(SPLITS.values()) + " |"]
    lines.append("|---|" + "---|" * len(SPLITS))
    total = {s: [sum(c[i] for c in counts[s].values()) for i in (0, 1)] for s in SPLITS}
    rows = [(k, [counts[s].get(k) for s in SPLITS]) for k in sorted({k for s in SPLITS for k in counts[s]})]
    rows += [("**together**", [total[s] for s in SPLITS])]
    for kind, cells in rows:
        lines.append(
            f"| {kind} | " + " | ".join(f"{share(c[0] / c[1])} of {c[1]}" if c else "" for c in cells) + " |"
        )
    return lines


def table(result):
    """All figures of `report` as Markdown."""
    lines = []
    if "loss" in result:  # not in reports of a drafter alone
        lines += ["| held-out set | nats a token |", "|---|---|"]
        lines += [f"| {k} | {v[0]:.3f} |" for k, v in result["loss"].items()]
        lines += [f"| **{k}, together** | **{v:.3f}** |" for k, v in result["loss_by_class"].items()]
        lines += ["", f"| task, greedy, {result['cases']} cases of unseen seeds | right |", "|---|---|"]
        lines += [
            f"| two-digit sums | {share(result['sums'])} |",
            f"| questions about a given story, word for word | {share(result['reading'])} |",
            f"| tool calls that parse and fit their schema | {share(result['tool_calls_valid'])} |",
            f"| tool calls with the expected name and arguments | {share(result['tool_calls_right'])} |",
        ]
    if "lookups" in result:  # not in reports of older runs
        lines.append(f"| look-ups in a list of facts, word for word | {share(result['lookups'])} |")
    if "pictures" in result:
        lines += ["", *picture_table(result["pictures"])]
    for drafter in DRAFTERS:
        if drafter in result:
            heading = f"## Acceptance with the drafter `{drafter}`"
            lines += ["", heading, "", *drafter_table(result[drafter])]
    return "\n".join(lines)


def drafter_table(found):
    """Acceptance of one drafter as rows of a table."""
    rows = []
    for key, groups in found.items():
        if key == "teacher-forced":
            what = "held-out text"
        else:
            t = key.removeprefix("generated T=")
            what = GREEDY if float(t) == 0 else f"own answers at T = {t}"
        rows += [(f"{what}, {group}", values) for group, values in groups.items()]
    return acceptance(rows, GREEDY)


def main():
    # Here, as it imports this module.
    import train_vision

    parser = argparse.ArgumentParser(description="measure a model and its drafters")
    parser.add_argument("model", type=Path, help="a folder, bf16 or of quantise.py")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--assistant", type=Path, help="folder of a drafter of a Gemma model")
    parser.add_argument("--eagle3", type=Path, help="folder of an EAGLE-3 head")
    parser.add_argument("--dspark", type=Path, help="folder of a DSpark head")
    parser.add_argument("--drafters-only", action="store_true", help="no figures of the target itself")
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    parser.add_argument("--quick", action="store_true", help="an eighth of the documents, 40 cases")
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load.load(args.model, device)
    drafters = {"mtp": model.mtp} if model.family == "qwen" else {}
    for name in ("assistant", "eagle3", "dspark"):
        if getattr(args, name):
            drafters[name] = load.load(getattr(args, name), device)
    log = lambda text: print(text, file=sys.stderr, flush=True)
    tokenizer, with_target = args.model / "tokenizer.json", not args.drafters_only
    result = report(model, drafters, args.corpus, tokenizer, log, args.quick, with_target)
    if with_target and train_vision.has_tower(args.model):
        tower = load.load_tower(args.model, device)
        n_cases = 200 if args.quick else train_vision.CASES
        result["pictures"] = train_vision.accuracy(
            model, tower, args.model / "tokenizer.json", n_cases, device
        )
    if args.out:
        args.out.write_text(json.dumps({"eval": result}, indent=1, ensure_ascii=False))
    print(table(result))


if __name__ == "__main__":
    main()
