#!/usr/bin/env python3
"""Measures what a grammar costs: the speed of answers under a schema divided by that of free ones.

    paceline serve -m qwen-2b.gguf --parallel 1 &
    python3 benchmarks/structured_speed.py http://127.0.0.1:8080

Three kinds of requests take turns, each with speculation off and on, so that drift of the machine
falls on all of them alike: `free` without a grammar; `same` with the grammar `(.|\\n)*`, which
allows every text, so that its answers are those of `free` and the ratio is the price of masks
alone; `schema` with a strict JSON schema. Printed are medians over the requests of a kind: tokens
a second, rounds a second, tokens a round, and the ratios to `free`. Answers of `same` that differ
from `free` are counted: a special token other than the end is no text, so the grammar rules it out.

Needs Python 3.9.
"""
import argparse
import json
import statistics
import urllib.request

PROMPTS = ["Describe a friend as JSON.", "List some animals as JSON.", "Tell of a day as JSON.", "Describe a town as JSON."]
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "is_friend": {"type": "boolean"},
        "kind": {"enum": ["person", "animal", "thing"]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 2, "maxItems": 4},
    },
    "required": ["name", "age", "is_friend", "kind", "notes"],
    "additionalProperties": False,
}
SCHEMA = {"type": "object", "properties": {"people": {"type": "array", "items": PERSON, "minItems": 40}}, "required": ["people"], "additionalProperties": False}
KINDS = {
    "free": {},
    "same": {"structured_outputs": {"regex": "(.|\\n)*"}},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": SCHEMA}}},
}


def ask(args, kind, speculation, prompt, seed):
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": args.tokens,
        "min_tokens": args.tokens if kind in ("free", "same") else 0,
        "temperature": args.temperature,
        "seed": seed,
        "enable_thinking": False,
        "speculation": speculation,
        **KINDS[kind],
    }
    request = urllib.request.Request(args.url.rstrip("/") + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as response:
        return json.load(response)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("url")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.8)
    args = parser.parse_args()
    kept = {}
    for kind in KINDS:  # compiles the grammars
        ask(args, kind, "off", PROMPTS[0], 0)
    differs = 0
    for turn in range(args.turns):
        prompt = PROMPTS[turn % len(PROMPTS)]
        for speculation in ("off", "auto"):
            texts = {}
            for kind in KINDS:
                answer = ask(args, kind, speculation, prompt, turn)
                tokens, seconds = answer["usage"]["completion_tokens"], answer["timings"]["predicted_ms"] / 1e3
                rounds = answer["speculation"]["rounds"] or tokens
                texts[kind] = answer["choices"][0]["message"]
                kept.setdefault((speculation, kind), []).append((tokens / seconds, rounds / seconds, tokens / rounds))
            differs += texts["same"] != texts["free"]
    print(f"{'speculation':11} {'kind':7} {'tok/s':>8} {'÷ free':>7} {'rounds/s':>9} {'÷ free':>7} {'tok/round':>9}")
    for (speculation, kind), rows in kept.items():
        ratios = [statistics.median(a[i] / b[i] for a, b in zip(rows, kept[speculation, "free"])) for i in range(2)]
        speed, rounds, length = (statistics.median(row[i] for row in rows) for i in range(3))
        print(f"{speculation:11} {kind:7} {speed:8.1f} {ratios[0]:7.3f} {rounds:9.1f} {ratios[1]:7.3f} {length:9.2f}")
    print(f"{differs} of {2 * args.turns} answers under the grammar that allows every text differ from free ones")


if __name__ == "__main__":
    main()
