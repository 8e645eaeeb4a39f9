#!/usr/bin/env python3
"""Measures what a picture costs those who write beside it: python3 benchmarks/pictures.py http://127.0.0.1:8080
[--texts N] [--size PIXELS] [--lead S] [--rounds N] [--poll S]

The server runs one more request than there are texts (`serve --parallel 8` for 7) and has a model that sees. In each
round the same texts are written twice. The first time, S seconds after all have begun, a question about a new picture
of PIXELS by PIXELS comes, then a second one about the same picture. The second time no picture comes. Texts written
elsewhere or later differ in how well they are drafted, so only the same seconds of the same texts are compared:
printed are the 50th and 99th percentile of the time between two pieces of a text, while the tower looked at the
picture and during as many seconds without it; how long the tower took, by the clock and by the server's own count; and
the time to the first token of both questions. The same questions about another picture follow without texts beside
them. The server's counters are read every S seconds of --poll, which is how exactly the end of the tower is known. Each look
takes processor time from whoever writes: 0.5 if a model runs on few cores, 0.01 if it runs on a GPU.
"""

import argparse
import json
import random
import statistics
import threading
import time
import urllib.error
import urllib.request

import png

SUBJECTS = "rabbit kite river garden stone apple winter house bird tree road fox moon boat cake drum".split()


def drawn(size, seed):
    """The address of a picture of stripes and spots that differ by seed."""
    rng = random.Random(seed)
    a, b, c = (rng.randrange(1, 9) for _ in range(3))
    spots = [(rng.randrange(size), rng.randrange(size), rng.randrange(size // 8 + 1, size // 4 + 2)) for _ in range(5)]
    rows = []
    for y in range(size):
        row = bytearray((v for x in range(size) for v in ((a * x + y) & 255, (x + b * y) & 255, (c * (x ^ y)) & 255)))
        for u, v, r in spots:
            if abs(y - v) < r:
                left, right = max(0, u - r), min(size, u + r)
                row[3 * left : 3 * right] = bytes((u & 255, v & 255, r & 255)) * (right - left)
        rows.append(row)
    return png.address(size, size, rows)


def pieces(base, content, tokens, stop=None):
    """The times at which the pieces of an answer come."""
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        base + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        for line in response:
            if stop is not None and stop.is_set():
                return
            if line.startswith(b"data: {"):
                event = json.loads(line[6:])
                delta = event["choices"][0]["delta"] if event.get("choices") else {}
                if delta.get("content") or delta.get("reasoning_content"):
                    yield time.monotonic()


class Texts:
    """Texts that stream until they are stopped."""

    def __init__(self, base, count, number):
        self.stop, self.times = threading.Event(), [[] for _ in range(count)]
        self.threads = [threading.Thread(target=self.run, args=(base, i, number)) for i in range(count)]
        for thread in self.threads:
            thread.start()

    def run(self, base, i, number):
        while not self.stop.is_set():
            subject, other = SUBJECTS[(i + number) % 16], SUBJECTS[(7 * i + number + 3) % 16]
            said = f"Tell me a story about a {subject} and a {other}, number {number + i}."
            self.times[i].extend([None])
            for at in pieces(base, said, 1_000_000, self.stop):
                self.times[i].append(at)
            number += 100

    def wait(self):
        """Until all write."""
        while any(len(times) < 4 for times in self.times):
            time.sleep(0.01)

    def gaps(self, start, end):
        """Seconds between two pieces of a text, where the later one came between `start` and `end`."""
        pairs = [pair for times in self.times for pair in zip(list(times), list(times)[1:])]
        return [b - a for a, b in pairs if a is not None and b is not None and start <= b <= end]

    def end(self):
        self.stop.set()
        for thread in self.threads:
            thread.join()


def is_ready(base):
    """Whether the model is loaded."""
    try:
        with urllib.request.urlopen(base + "/health"):
            return True
    except urllib.error.HTTPError:
        return False


def counters(base):
    """Pictures that the tower has encoded, and the seconds that it took."""
    with urllib.request.urlopen(base + "/metrics") as response:
        lines = response.read().decode().splitlines()
    found = dict.fromkeys(("paceline:media_encoded_total", "paceline:tower_seconds_total"), 0.0)
    for line in lines:
        name = line.split("{")[0].split(" ")[0]
        if name in found:
            found[name] += float(line.rsplit(" ", 1)[1])
    return tuple(found.values())


def ask(base, poll, picture, question, tokens=8):
    """Seconds to the first token of an answer about the picture at this address, and when the tower was done if it worked."""
    content = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": question}]
    encoded, _ = counters(base)
    start, times = time.monotonic(), []
    thread = threading.Thread(target=lambda: times.extend(pieces(base, content, tokens)))
    thread.start()
    seen = None
    while thread.is_alive():
        if seen is None and counters(base)[0] > encoded:
            seen = time.monotonic()
        thread.join(poll)
    assert times, "the question was not answered: does the model see?"
    if seen is None and counters(base)[0] > encoded:
        # Between two looks.
        seen = times[0]
    return start, seen, times[0] - start


def percentiles(gaps):
    gaps = sorted(gaps)
    return [1e3 * gaps[min(len(gaps) - 1, int(len(gaps) * share))] for share in (0.5, 0.99)]


def measure(base, options, number):
    """One round: its figures by name."""
    found = {}
    picture, texts = drawn(options.size, number), Texts(base, options.texts, number)
    texts.wait()
    time.sleep(options.lead)
    _, tower = counters(base)
    start, seen, found["first token"] = ask(base, options.poll, picture, "What is this?")
    found["tower, its own time"] = counters(base)[1] - tower
    found["tower, by the clock"] = seen - start
    beside = texts.gaps(start, seen)
    _, known, found["second question"] = ask(base, options.poll, picture, "Which colors do you see?")
    assert known is None, "the tower looked again"
    texts.end()
    time.sleep(0.5)

    texts = Texts(base, options.texts, number)
    texts.wait()
    time.sleep(options.lead)
    start = time.monotonic()
    while time.monotonic() < start + found["tower, by the clock"]:
        counters(base)
        time.sleep(options.poll)
    alone = texts.gaps(start, time.monotonic())
    texts.end()
    for name, gaps in (("with", beside), ("without", alone)):
        found[f"p50 {name}"], found[f"p99 {name}"] = percentiles(gaps)
        found[f"pieces {name}"] = len(gaps)
    time.sleep(0.5)
    picture = drawn(options.size, number + 1)
    _, _, found["first token, alone"] = ask(base, options.poll, picture, "What is this?")
    _, _, found["second question, alone"] = ask(base, options.poll, picture, "Which colors do you see?")
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("base")
    parser.add_argument("--texts", type=int, default=7)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--lead", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--poll", type=float, default=0.5)
    options = parser.parse_args()
    while not is_ready(options.base):
        time.sleep(0.5)
    # What happens once, such as compiling kernels, is not measured.
    ask(options.base, options.poll, drawn(options.size, 999_983), "What is this?")
    seed = random.randrange(1 << 30)
    rounds = [measure(options.base, options, seed + 10 * i) for i in range(options.rounds)]
    of = {name: statistics.median(found[name] for found in rounds) for name in rounds[0]}
    print(f"{options.texts} texts, a picture of {options.size} x {options.size}, medians of {options.rounds} rounds")
    print("| between pieces of a text, ms | p50 | p99 | pieces |\n| --- | ---: | ---: | ---: |")
    for name in ("without", "with"):
        print(f"| {name} the picture | {of['p50 ' + name]:.1f} | {of['p99 ' + name]:.1f} | {of['pieces ' + name]:.0f} |")
    p50, p99 = (statistics.median(f[f"{p} with"] / f[f"{p} without"] for f in rounds) for p in ("p50", "p99"))
    print(f"| with / without | {p50:.2f} | {p99:.2f} | |")
    clock, own = of["tower, by the clock"], of["tower, its own time"]
    print(f"tower: {own:.2f} s within {clock:.2f} s")
    for name, suffix in (("beside texts", ""), ("alone", ", alone")):
        first, second = of["first token" + suffix], of["second question" + suffix]
        print(f"{name}: first token after {1e3 * first:.0f} ms, of a second question after {1e3 * second:.0f} ms, "
              f"{100 * second / first:.1f} %")


if __name__ == "__main__":
    main()
