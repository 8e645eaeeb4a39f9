#!/usr/bin/env python3
"""Measures a running server's streams: python3 benchmarks/serving.py http://127.0.0.1:8080 [--clients 1 8] [--tokens N] [--rounds N]

For each number of clients at once: tokens per second of all of them together, as the clients see them (from the first
token to the last), the same as the engine counts it for one request (`timings.predicted_per_second`), and how both
compare. Rounds go through all numbers of clients in turn; medians are printed. Prompts differ, so that nothing
is shared but the template.
"""

import argparse
import json
import statistics
import threading
import time
import urllib.request

SUBJECTS = "rabbit kite river garden stone apple winter house bird tree road fox moon boat cake drum".split()


def stream(base, number, tokens, out):
    """Writes `tokens` tokens: (first token's time, last token's time, tokens, engine's rate, drafted, accepted)."""
    subject, other = SUBJECTS[number % 16], SUBJECTS[(number * 7 + 3) % 16]
    body = {
        "messages": [{"role": "user", "content": f"Tell me a story about a {subject} and a {other}, number {number}."}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
    }
    request = urllib.request.Request(
        base + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    first = last = None
    timings = {}
    with urllib.request.urlopen(request) as response:
        for line in response:
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                timings = event.get("timings") or timings
                delta = event["choices"][0]["delta"] if event.get("choices") else {}
                # The first event has the role alone, and comes before the prompt has run.
                if delta.get("content") or delta.get("reasoning_content"):
                    last = time.monotonic()
                    first = first or last
    out.append((first, last, timings))


def measure(base, clients, tokens, number):
    """Tokens per second of `clients` at once, and of the engine for one of them."""
    out = []
    threads = [threading.Thread(target=stream, args=(base, number + i, tokens, out)) for i in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(out) == clients, "a request failed"
    # The time begins with the first token of each text, which the prompt has brought.
    written = sum(timings["predicted_n"] - 1 for _, _, timings in out)
    seconds = max(last for _, last, _ in out) - min(first for first, _, _ in out)
    engine = statistics.median(timings["predicted_per_second"] for _, _, timings in out)
    drafted = sum(timings.get("draft_n", 0) for _, _, timings in out)
    accepted = sum(timings.get("draft_n_accepted", 0) for _, _, timings in out)
    return written / seconds, engine, accepted / drafted if drafted else 0.0


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    measure(options.base, 1, 8, 1)
    found = {clients: [] for clients in options.clients}
    number = 10
    for _ in range(options.rounds):
        for clients in options.clients:
            found[clients].append(measure(options.base, clients, options.tokens, number))
            number += clients
    print("| clients | tokens/s | x first row | engine, one request | accepted |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    base = None
    for clients, rounds in found.items():
        total, engine, accepted = (statistics.median(values) for values in zip(*rounds))
        base = base or total
        print(f"| {clients} | {total:.1f} | {total / base:.2f} | {engine:.1f} | {accepted:.0%} |")
        if clients == 1:
            ratio = statistics.median(total / engine for total, engine, _ in rounds)
            print(f"| | | | streamed / engine: {ratio:.1%} | |")


main()
