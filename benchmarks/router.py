#!/usr/bin/env python3
"""Measures a router before two servers: python3 benchmarks/router.py ROUTER SERVER OTHER, all as http://ADDRESS:PORT

Prints how much of the prompts of conversations that go on was found in the prefix cache, and, while the first server is
busy with requests that came to it directly, how many requests of twelve the router sent to the other one.
"""

import json
import random
import sys
import threading
import time
import urllib.request

WORDS = "rabbit kite garden story river moon little happy friend tree song stone".split()


def complete(base, prompt, tokens):
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(
        base + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["usage"]


def answered(base):
    """Completions that the server has answered."""
    with urllib.request.urlopen(base + "/metrics") as response:
        lines = response.read().decode().splitlines()
    mine = [line for line in lines if line.startswith("paceline:http_responses_total") and '"/v1/completions"' in line]
    return sum(float(line.split()[-1]) for line in mine)


def words(rng, n):
    return " ".join(rng.choice(WORDS) for _ in range(n))


def prefixes(router, rng):
    """Six conversations of four turns, in random order: the share of later prompts that was cached."""
    texts = [words(rng, 400) for _ in range(6)]
    prompts = cached = 0
    for turn in range(4):
        for i in rng.sample(range(6), 6):
            texts[i] += " and then " + words(rng, 20)
            usage = complete(router, texts[i], 2)
            if turn:
                prompts += usage["prompt_tokens"]
                cached += usage["prompt_tokens_details"]["cached_tokens"]
    return cached / prompts


def queue(router, busy, idle, rng):
    """Requests of twelve that go to the idle server."""
    direct = [threading.Thread(target=complete, args=(busy, words(rng, 9), 300)) for _ in range(12)]
    for thread in direct:
        thread.start()
    time.sleep(1.5)
    before = answered(idle)
    for _ in range(12):
        complete(router, words(rng, 9), 20)
    after = answered(idle)
    for thread in direct:
        thread.join()
    return after - before


if __name__ == "__main__":
    ROUTER, FIRST, SECOND = sys.argv[1:4]
    with urllib.request.urlopen(FIRST + "/v1/models") as answer:
        MODEL = json.load(answer)["data"][0]["id"]
    RNG = random.Random(time.time_ns())
    print(f"found in the prefix cache: {prefixes(ROUTER, RNG):.1%} of later turns")
    print(f"sent to the idle server: {queue(ROUTER, FIRST, SECOND, RNG):.0f} of 12")
