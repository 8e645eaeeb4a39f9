"""The target's own answers, for its drafters to learn from.

A drafter meets the text that its target writes, which is not the text that people
wrote. So a part of a drafter's rows are conversations of the corpus and of the
generator whose last turn the target has written, half of them greedily.
"""

import random
from pathlib import Path

import numpy as np

import chat
import conversations
import data
import evaluate

LONGEST_PROMPT = 224
LONGEST_ANSWER = 128
AT_ONCE = 8192
TEMPERATURES = (0.0, 0.8)
# Parts of the prompts: real talk, real questions and stories, generated ones.
SHARES = (("talk", 0.5), ("question", 0.25), ("synthetic", 0.25))


def opened(messages, r):
    """The messages up to a turn of the assistant, that one excluded, or None."""
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant" and i]
    return messages[: r.choice(turns)] if turns else None


def prompts(corpus, text, n, r):
    """`n` prompts as ids, those of a kind together."""
    kinds = {"talk": [], "question": []}
    for record in data.read_records(Path(corpus) / "train.jsonl.xz"):
        if record["set"] == "tinystories":
            kinds["question"].append(data.told(record, r))
        elif record["set"] in data.EPOCHS and "text" not in record:
            kinds["talk" if "turns" in record else "question"].append(record)
    found = []
    for kind, share in SHARES:
        wanted = len(found) + int(share * n)
        while len(found) < wanted:
            record = conversations.generate(r) if kind == "synthetic" else r.choice(kinds[kind])
            talk = chat.as_conversation(record)
            messages = opened(talk["messages"], r)
            if messages is None:
                continue
            ids = text.prompt({**talk, "messages": messages})
            if len(ids) <= LONGEST_PROMPT:
                found.append(ids)
    return found


def documents(model, corpus, tokenizer, n, device, seed=0):
    """`n` conversations that the target has answered, as ids."""
    r = random.Random(seed)
    text = evaluate.Text(model.family, tokenizer)
    asked = prompts(corpus, text, n, r)
    r.shuffle(asked)
    found = []
    for i, temperature in enumerate(TEMPERATURES):
        part = asked[i :: len(TEMPERATURES)]
        written = evaluate.generate(
            model, part, LONGEST_ANSWER, text.ends, temperature, seed, device, at_once=AT_ONCE
        )
        found += [np.array(p + a, np.uint16) for p, a in zip(part, written)]
    return found
