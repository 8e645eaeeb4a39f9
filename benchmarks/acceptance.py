#!/usr/bin/env python3
"""Measures how many drafts are accepted with and without pictures: python3 benchmarks/acceptance.py http://127.0.0.1:8080 [LENGTH]

The server has one of the bundled vision models. Asks the questions of `tests/golden/captions.json`, greedily, each with its
picture or clip and without it, with drafts of LENGTH tokens (3 if not given), and prints for each kind of prompt:
tokens written, tokens a round, and by position the share of rounds whose draft was accepted up to there
(`vllm:spec_decode_num_accepted_tokens_per_pos_total` divided by `vllm:spec_decode_num_drafts_total`). Needs numpy.
"""

import json
import pathlib
import re
import sys
import urllib.request

import png

GOLDEN = pathlib.Path(__file__).resolve().parent.parent / "tests" / "golden"
sys.path.insert(0, str(GOLDEN))
from scenes import draw  # noqa: E402


def shown(scene, fps):
    """The part of a message that shows a scene."""
    height, width = scene["size"]
    drawn = (draw(scene["size"], scene["ground"], marks) for marks in scene["frames"])
    frames = [png.address(width, height, (row.tobytes() for row in picture)) for picture in drawn]
    if len(frames) == 1:
        return {"type": "image_url", "image_url": {"url": frames[0]}}
    return {"type": "video", "video": frames, "fps": fps}


def ask(base, content, length):
    """Tokens of the answer."""
    body = {
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 64,
        "speculation": {"draft_fixed": length},
    }
    request = urllib.request.Request(
        base + "/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["usage"]["completion_tokens"]


def counts(base):
    """Rounds with drafts, and accepted drafts by position."""
    with urllib.request.urlopen(base + "/metrics") as response:
        text = response.read().decode()
    rounds = re.search(r"^vllm:spec_decode_num_drafts_total(?:\{.*\})? (\d+)", text, re.M)
    by_position = re.findall(
        r'^vllm:spec_decode_num_accepted_tokens_per_pos_total\{.*position="(\d+)".*\} (\d+)', text, re.M
    )
    return int(rounds[1]), {int(position): int(n) for position, n in by_position}


def measure(base, name, contents, length):
    rounds, accepted = counts(base)
    written = sum(ask(base, content, length) for content in contents)
    rounds_after, accepted_after = counts(base)
    rounds = rounds_after - rounds
    accepted = {p: n - accepted.get(p, 0) for p, n in sorted(accepted_after.items())}
    shares = " ".join(f"{n / rounds:.2f}" for n in accepted.values() if n)
    print(f"| {name} | {len(contents)} | {written} | {1 + sum(accepted.values()) / rounds:.2f} | {shares} |")


def main():
    base, length = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 3
    golden = json.loads((GOLDEN / "captions.json").read_text())
    kinds = {"pictures": [], "clips": []}
    for scene in golden["scenes"]:
        kinds["pictures" if len(scene["frames"]) == 1 else "clips"].append(scene)
    print("| prompts | questions | tokens | tokens a round | accepted by position |")
    print("| --- | ---: | ---: | ---: | --- |")
    for name, scenes in kinds.items():
        asked = [{"type": "text", "text": scene["question"]} for scene in scenes]
        measure(base, name, [[shown(scene, golden["fps"]), text] for scene, text in zip(scenes, asked)], length)
        measure(base, f"the same questions, no {name}", [[text] for text in asked], length)


main()
