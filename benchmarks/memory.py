"""The memory plan of `paceline inspect` beside what a server that has used all of its context holds.

    python3 benchmarks/memory.py --paceline target/release/paceline --context 2048 [--weights mapped] MODEL …

Plan: files of the weights, the drafter's where it has its own, keys, values and states of one request. Held and most:
VmRSS and VmHWM of the process after a prompt that fills the context; of the held, what is a file's pages (RssFile), which the
system can have back, and what is not (RssAnon). The rest is what the program is made of, its tables, and room that threads
and steps work in. Linux only; the machine may be busy, memory does not mind.
"""

import argparse
import json
import re
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

MB = 1 << 20


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    return json.loads(urllib.request.urlopen(request, timeout=600).read())


def plan(paceline, model, context):
    """Bytes of weights and of all that one request remembers, drafter included."""
    command = [paceline, "-q", "inspect", model, "--no-probe", "--json", "--context", str(context)]
    record = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    row = next(row for row in record["memory"] if row["context"] == record["model"]["context"])
    return record["file_bytes"], row["bytes"], row["with_weights"], record["model"]["drafter_reason"]


def held(paceline, model, context, weights):
    """Sizes of a server whose context is full, by their names in its status, and how many tokens it has read."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [paceline, "-q", "serve", "-m", model, "--no-probe", "--port", str(port), "--context", str(context)]
    command += ["--weights", weights]
    process = subprocess.Popen(command)
    try:
        url = f"http://127.0.0.1:{port}"
        while process.poll() is None:
            try:
                ask(f"{url}/v1/models")
                break
            except urllib.error.URLError:
                time.sleep(0.2)
        words = context
        while True:
            try:
                answer = ask(f"{url}/v1/completions", {"prompt": "a b c d " * (words // 4), "max_tokens": 8})
                break
            except urllib.error.HTTPError as error:
                if error.code != 400:
                    raise
                words = words * 9 // 10  # more than the context
        status = Path(f"/proc/{process.pid}/status").read_text()
        size = {name: int(kb) << 10 for name, kb in re.findall(r"(\w+):\s+(\d+) kB", status)}
        return size, answer["usage"]["prompt_tokens"]
    finally:
        process.terminate()
        process.wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--paceline", default="target/release/paceline")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--weights", default="packed")
    parser.add_argument("models", nargs="+")
    args = parser.parse_args()
    columns = ["model", "context used", "weights", "remembered", "plan", "held", "of a file", "of none", "most"]
    print("|", " | ".join([*columns, "most ÷ plan"]), "|")
    print("|", " | ".join(["---"] * 10), "|")
    for model in args.models:
        weights, remembered, whole, _ = plan(args.paceline, model, args.context)
        size, tokens = held(args.paceline, model, args.context, args.weights)
        sizes = [weights, remembered, whole, size["VmRSS"], size["RssFile"], size["RssAnon"], size["VmHWM"]]
        cells = [Path(model).name, tokens, *(f"{size / MB:.0f}" for size in sizes), f"{size['VmHWM'] / whole:.2f}"]
        print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
