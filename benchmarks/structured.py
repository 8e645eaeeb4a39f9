#!/usr/bin/env python3
"""Drives a server with JSON schemas and checks every answer with the package `jsonschema`.

    paceline serve -m tiny-qwen3.5 --parallel 8 &
    python3 benchmarks/structured.py http://127.0.0.1:8080 --schemas 150

Each schema is asked for with and without reasoning, at several temperatures, many requests at
once, with speculation on and off. Counted are: answers that are no valid JSON or do not fit
their schema, responses that are no 200, texts that differ from those without speculation,
answers that were cut off by `max_tokens`, tokens a round, and drafted tokens that were forced.
`--suite FOLDER` adds the schemas of the JSON Schema Test Suite (its folder `tests/draft2020-12`);
those that the server refuses by name are counted by keyword.

Needs Python 3.9 and `jsonschema`; the exit status says whether everything held.
"""
import argparse
import collections
import concurrent.futures
import json
import pathlib
import random
import statistics
import sys
import time
import urllib.error
import urllib.request

import jsonschema

NAMES = ["name", "age", "city", "kind", "is_open", "items", "price", "tags", "owner", "color", "notes", "id"]
WORDS = ["red", "green", "blue", "small", "large", "cat", "dog", "Monday", "yes", "no"]


def scalar(rng):
    """A schema of a short value."""
    kind = rng.randrange(12)
    if kind == 0:
        return {"enum": rng.sample(WORDS, rng.randint(1, 4))}
    if kind == 1:
        return {"const": rng.choice([7, "fixed", True, None, "a \"quoted\" text"])}
    if kind == 2:
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == 3:
        return {"type": "boolean"}
    if kind == 4:
        return {"type": "null"}
    if kind == 5:
        return {"type": "string", "pattern": rng.choice(["^[A-Z][a-z]{2,8}$", "^\\d{3}-\\d{4}$", "^(ab|cd)+e{1,3}$"]), "maxLength": 20}
    if kind == 6:
        return {"type": "string", "format": rng.choice(["date", "uuid", "ipv4"])}
    if kind == 7:
        return {"type": "number", "minimum": 0, "exclusiveMaximum": 10}
    if kind == 8:
        return {"type": ["string", "null"], "maxLength": 10}
    low = rng.randint(0, 3)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(1, 16)}


def schema(rng, depth):
    """A schema all of whose values are short."""
    kind = rng.randrange(10)
    if depth == 0 or kind < 3:
        return scalar(rng)
    if kind < 7:
        names = rng.sample(NAMES, rng.randint(1, 5))
        required = [name for name in names if rng.random() < 0.8]
        return {
            "type": "object",
            "properties": {name: schema(rng, depth - 1) for name in names},
            "required": required,
            "additionalProperties": False,
        }
    if kind < 9:
        least = rng.randint(0, 2)
        return {"type": "array", "items": schema(rng, depth - 1), "minItems": least, "maxItems": least + rng.randint(0, 2)}
    return {"anyOf": [scalar(rng), schema(rng, depth - 1)]}


def own(n, seed):
    """`n` schemas of objects; every fifth one has definitions."""
    rng = random.Random(seed)
    for i in range(n):
        names = rng.sample(NAMES, rng.randint(2, 6))
        whole = {
            "type": "object",
            "properties": {name: schema(rng, 2) for name in names},
            "required": names,
            "additionalProperties": False,
        }
        if i % 5 == 0:
            whole["$defs"] = {"part": schema(rng, 1)}
            whole["properties"][names[0]] = {"$ref": "#/$defs/part"}
            whole["properties"][names[1]] = {"type": "array", "items": {"$ref": "#/$defs/part"}, "maxItems": 2}
        yield f"own-{i}", whole


def suite(folder):
    """The schemas of the JSON Schema Test Suite."""
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        for i, case in enumerate(json.loads(path.read_text())):
            yield f"{path.stem}-{i}", case["schema"]


class Counts:
    def __init__(self):
        self.cells = collections.Counter()
        self.refused = collections.Counter()
        self.faults = []
        self.rounds = self.drafted = self.accepted = self.forced = self.tokens = 0
        self.ms = []


def post(url, body):
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=600) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(args, name, schema, thinking, temperature, speculation):
    body = {
        "messages": [{"role": "user", "content": "Describe something as JSON."}],
        "max_tokens": args.max_tokens,
        "temperature": temperature,
        "seed": 11,
        "speculation": speculation,
        "enable_thinking": thinking,
        "thinking_budget": 32,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }
    return post(args.url.rstrip("/") + "/v1/chat/completions", body)


def check(args, counts, cell):
    name, schema, thinking, temperature = cell
    what = f"{name} thinking={thinking} T={temperature}"
    start = time.perf_counter()
    status, on = ask(args, *cell, "auto")
    counts.ms.append(1e3 * (time.perf_counter() - start))
    if status == 400 and not name.startswith("own-"):
        message = on["error"]["message"]
        keyword = message.split("`")[3] if message.count("`") > 3 else message
        counts.refused[keyword] += 1
        return
    counts.cells["requests"] += 1
    if status != 200:
        counts.faults.append((what, "status", status, on))
        return
    choice, record = on["choices"][0], on["speculation"]
    for field in ("rounds", "drafted", "accepted"):
        setattr(counts, field, getattr(counts, field) + record[field])
    counts.forced += record.get("forced", 0)
    counts.tokens += on["usage"]["completion_tokens"]
    counts.cells["engaged"] += record["engaged"]
    text = choice["message"]["content"] or ""
    if choice["finish_reason"] == "length":
        counts.cells["cut off"] += 1
    else:
        try:
            value = json.loads(text)
            validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
            errors = list(validator.iter_errors(value))
        except ValueError as error:
            errors = [error]
        if errors:
            counts.faults.append((what, "invalid", str(errors[0])[:200], text, json.dumps(schema)))
    status, off = ask(args, *cell, "off")
    if status != 200 or off["choices"] != on["choices"]:
        counts.faults.append((what, "differs", text, off))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--schemas", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--suite")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0, 0.8, 1.5])
    parser.add_argument("--thinking", choices=["both", "on", "off"], default="both")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--max-tokens", type=int, default=600)
    args = parser.parse_args()
    schemas = list(own(args.schemas, args.seed))
    if args.suite:
        schemas += suite(args.suite)
    thinking = {"both": [False, True], "on": [True], "off": [False]}[args.thinking]
    held = True
    for width in args.concurrency:
        counts = Counts()
        cells = [(n, s, t, temp) for n, s in schemas for t in thinking for temp in args.temperatures]
        # Every width takes its share of the cells, so that all widths together take each once.
        share = cells[args.concurrency.index(width):: len(args.concurrency)]
        start = time.perf_counter()
        with concurrent.futures.ThreadPoolExecutor(width) as pool:
            list(pool.map(lambda cell: check(args, counts, cell), share))
        seconds = time.perf_counter() - start
        kinds = collections.Counter(fault[1] for fault in counts.faults)
        print(
            f"{width} at once: {dict(counts.cells)}, faults {dict(kinds)}, "
            f"{(counts.accepted + counts.rounds) / max(counts.rounds, 1):.2f} tokens a round, "
            f"{counts.accepted} of {counts.drafted} drafted tokens accepted, {counts.forced} forced, "
            f"median {statistics.median(counts.ms):.0f} ms a request, {seconds:.0f} s"
        )
        if counts.refused:
            print("  refused by keyword:", dict(counts.refused.most_common()))
        for fault in counts.faults[:5]:
            print("  ", *(str(part)[:300] for part in fault))
        held &= not counts.faults
    sys.exit(0 if held else 1)


if __name__ == "__main__":
    main()
