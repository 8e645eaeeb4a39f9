#!/usr/bin/env python3
"""Measures the prefix cache of a running server: python3 benchmarks/prefix.py http://127.0.0.1:8080 [TOKENS]
[--before FILE | --after FILE]

Prints the time to the first token of a first turn of about TOKENS prompt tokens (2,000 if not given), of the
second turn, and of another conversation with the same system prompt; then how much of the prompts of four
requests at once with one new system prompt was computed once.

For a server with --cache-dir: `--before FILE` has only the first turn, and keeps the conversation in FILE; stop
the server, start it again, and `--after FILE` has the second turn, then one of a new conversation of the same
length, which nobody has seen.
"""

import json
import random
import sys
import threading
import time
import urllib.request

WORDS = "the rabbit kite wind hill river garden stone apple winter house little bird tree road".split()


def chat(base, messages, max_tokens=24):
    """One streamed answer: seconds to its first text, its usage and its text."""
    body = {
        "messages": messages,
        "temperature": 0,
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        base + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    start, first, text, usage = time.monotonic(), None, "", None
    with urllib.request.urlopen(request) as response:
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                delta = choice["delta"]
                piece = (delta.get("content") or "") + (delta.get("reasoning_content") or "")
                if piece and first is None:
                    first = time.monotonic() - start
                text += delta.get("content") or ""
    return first, usage, text


def words(seed, n):
    """`n` words that differ by seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(n))


def report(what, seconds, usage):
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    print(f"{what}: first token after {1e3 * seconds:.0f} ms, {cached} of {usage['prompt_tokens']} tokens cached")


def after_restart(base, file):
    """The second turn of the conversation in `file`, and a first turn of the same length."""
    with open(file) as kept:
        messages = json.load(kept)
    chat(base, [{"role": "user", "content": "Hello"}], 4)
    second, usage, _ = chat(base, messages)
    report("second turn after a restart", second, usage)
    new = [dict(message) for message in messages]
    new[0]["content"] = words(7, len(new[0]["content"].split()))
    new[1]["content"] = words(8, len(new[1]["content"].split()))
    cold, usage, _ = chat(base, new)
    report("the same from its start", cold, usage)
    print(f"second turn / from its start: {100 * second / cold:.1f} %")


def main():
    base, *rest = sys.argv[1:]
    files = {rest[i]: rest[i + 1] for i, option in enumerate(rest) if option in ("--before", "--after")}
    tokens = int(rest[0]) if rest and rest[0].isdigit() else 2000
    if "--after" in files:
        return after_restart(base, files["--after"])
    chat(base, [{"role": "user", "content": "Hello"}], 4)
    probe = words(1, 200)
    per_word = chat(base, [{"role": "user", "content": probe}], 1)[1]["prompt_tokens"] / 200
    system = {"role": "system", "content": words(2, int(tokens * 0.9 / per_word))}
    messages = [system, {"role": "user", "content": words(3, int(tokens * 0.1 / per_word))}]
    first, usage, text = chat(base, messages)
    report("first turn", first, usage)
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And what came after that?"}]
    if "--before" in files:
        with open(files["--before"], "w") as kept:
            return json.dump(messages, kept)
    second, usage, _ = chat(base, messages)
    report("second turn", second, usage)
    print(f"second turn / first turn: {100 * second / first:.1f} %")
    other, usage, _ = chat(base, [system, {"role": "user", "content": "What is this about?"}])
    report("same system prompt", other, usage)

    system = {"role": "system", "content": words(4, int(tokens / per_word))}
    answers = [None] * 4

    def ask(i):
        answers[i] = chat(base, [system, {"role": "user", "content": words(10 + i, 8)}])

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    usages = [usage for _, usage, _ in answers]
    prompt = sum(u["prompt_tokens"] for u in usages) / 4
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    print(f"four at once: {cached} of 3 x {prompt:.0f} tokens cached, {100 * cached / (3 * prompt):.1f} %")


if __name__ == "__main__":
    main()
