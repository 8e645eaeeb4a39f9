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

`--tools N` asks for calls of N lists of tools too, in four modes: `required` (some tool, one
call), `named` (one tool), `parallel` (some tools, up to several calls) and `strict` (the model may
call or not). Each call's arguments must fit the schema of the tool that it names. A bias on the
token that opens a call makes calls in the last two modes frequent, whatever the model would do; it knows Gemma 4's and Qwen's tokens.

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
# How much likelier a family's opening of a call becomes, and the end of its turn less likely.
CALL_OFTEN = {
    "gemma": {"<|tool_call>": 16, "<turn|>": -12, "<|tool_response>": -12, "<eos>": -12},
    "qwen": {"<tool_call>": 16, "<|im_end|>": -12},
}
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


def tool_value(rng, depth):
    """A schema of an argument that the wire forms of all families can spell."""
    kind = rng.randrange(9 if depth else 7)
    if kind == 0:
        return {"type": "string"}
    if kind == 1:
        low = rng.randint(0, 3)
        return {"type": "string", "minLength": low, "maxLength": low + rng.randint(1, 16)}
    if kind == 2:
        return {"enum": rng.sample(WORDS, rng.randint(1, 4))}
    if kind == 3:
        low = rng.randint(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 300)}
    if kind == 4:
        return {"type": "boolean"}
    if kind == 5:
        return {"type": ["string", "null"]}
    if kind == 6:
        return {"type": "number", "minimum": 0}
    if kind == 7:
        return {"type": "array", "items": tool_value(rng, 0), "minItems": 1, "maxItems": 3}
    return parameters(rng, depth - 1)


def parameters(rng, depth):
    names = rng.sample(NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: tool_value(rng, depth) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def offers(n, seed, often):
    """`n` lists of tools, each in every mode: a name, and the fields of the request; `often` is a
    bias that makes calls frequent."""
    rng = random.Random(seed + 1)
    for i in range(n):
        names = rng.sample(["search", "write_file", "weather", "send", "run", "lookup"], rng.randint(1, 4))
        tools = [
            {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": parameters(rng, 2)}}
            for name in names
        ]
        strict = json.loads(json.dumps(tools))
        for tool in strict:
            tool["function"]["strict"] = True
        named = {"type": "function", "function": {"name": rng.choice(names)}}
        yield f"required-{i}", {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
        yield f"named-{i}", {"tools": tools, "tool_choice": named}
        yield f"parallel-{i}", {"tools": tools, "tool_choice": "required", "logit_bias": often}
        yield f"strict-{i}", {"tools": strict, "tool_choice": "auto", "logit_bias": often}


def suite(folder):
    """The schemas of the JSON Schema Test Suite."""
    for path in sorted(pathlib.Path(folder).glob("*.json")):
        for i, case in enumerate(json.loads(path.read_text())):
            yield f"suite-{path.stem}-{i}", case["schema"]


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


def call_often(url):
    with urllib.request.urlopen(url.rstrip("/") + "/v1/models") as response:
        model = json.load(response)["data"][0]["id"]
    return CALL_OFTEN["gemma" if "gemma" in model.lower() else "qwen"]


def wants(schema):
    """The field that asks for an answer under `schema`."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}


def ask(args, name, fields, thinking, temperature, speculation):
    what = "Describe something as JSON." if "response_format" in fields else "Use a tool."
    body = {
        "messages": [{"role": "user", "content": what}],
        "max_tokens": args.max_tokens,
        "temperature": temperature,
        "seed": 11,
        "speculation": speculation,
        "enable_thinking": thinking,
        "thinking_budget": 32,
        **fields,
    }
    return post(args.url.rstrip("/") + "/v1/chat/completions", body)


def errors_of(text, schema):
    """What is wrong with a JSON text under `schema`."""
    try:
        validator = jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker())
        return [str(error) for error in validator.iter_errors(json.loads(text))]
    except ValueError as error:
        return [str(error)]


def faults_of(choice, fields, counts):
    """What is wrong with an answer to a request with `fields`; of one that was cut off, with its
    calls before the last."""
    is_whole = choice["finish_reason"] != "length"
    if "response_format" in fields:
        if not is_whole:
            return []
        schema = fields["response_format"]["json_schema"]["schema"]
        return errors_of(choice["message"]["content"] or "", schema)
    calls = choice["message"].get("tool_calls") or []
    calls = calls if is_whole else calls[:-1]
    counts.cells["calls"] += len(calls)
    counts.cells["several calls"] += len(calls) > 1
    faults = []
    if is_whole and not calls and fields["tool_choice"] != "auto":
        faults.append("no call")
    if len(calls) > 1 and (fields.get("parallel_tool_calls") is False or isinstance(fields["tool_choice"], dict)):
        faults.append(f"{len(calls)} calls")
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in fields["tools"]}
    if isinstance(fields["tool_choice"], dict):
        name = fields["tool_choice"]["function"]["name"]
        schemas = {name: schemas[name]}
    for call in calls:
        function = call["function"]
        if function["name"] not in schemas:
            faults.append(f"calls {function['name']}")
        else:
            faults += errors_of(function["arguments"], schemas[function["name"]])
    return faults


def without_ids(answer):
    """The choices of an answer; calls are numbered at random."""
    for choice in answer["choices"]:
        for call in choice["message"].get("tool_calls") or []:
            del call["id"]
    return answer["choices"]


def check(args, counts, cell):
    name, fields, thinking, temperature = cell
    what = f"{name} thinking={thinking} T={temperature}"
    start = time.perf_counter()
    status, on = ask(args, *cell, "auto")
    counts.ms.append(1e3 * (time.perf_counter() - start))
    if status == 400 and name.startswith("suite-"):
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
    if choice["finish_reason"] == "length":
        counts.cells["cut off"] += 1
    faults = faults_of(choice, fields, counts)
    if faults:
        counts.faults.append((what, "invalid", faults[0][:200], choice["message"], json.dumps(fields)))
    status, off = ask(args, *cell, "off")
    if status != 200 or without_ids(off) != without_ids(on):
        counts.faults.append((what, "differs", choice, off))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--schemas", type=int, default=150)
    parser.add_argument("--tools", type=int, default=0)
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
    asked = [(name, wants(schema)) for name, schema in schemas] + list(offers(args.tools, args.seed, call_often(args.url)))
    thinking = {"both": [False, True], "on": [True], "off": [False]}[args.thinking]
    held = True
    for width in args.concurrency:
        counts = Counts()
        cells = [(name, fields, t, temp) for name, fields in asked for t in thinking for temp in args.temperatures]
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
