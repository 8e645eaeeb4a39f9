#!/usr/bin/env python3
"""The training mix: corpus and generator to rows of token ids.

    python data.py --corpus DIR --tokenizer tokenizer.json --family gemma \
        --synthetic 130e6 --out rows.npy

A row has `length + 1` ids and starts where a document starts: a short document
that does not fit is repeated in the next row, a long one is continued there. So
a model meets what it meets in use, a conversation at position 0, and the cost is
a tenth of the tokens. Corpus sets are repeated `EPOCHS` times; the generator
never repeats itself. Deliberately absent: masks; the loss covers every token.
"""

import argparse
import json
import lzma
import multiprocessing
import os
import random
import re
from pathlib import Path

import numpy as np

import chat
import conversations

# How often each set of the corpus is shown. Sets that a small model can learn to
# write (little stories, chat) are shown more often than those it cannot.
EPOCHS = {
    "tinystories": 10,
    "self_dialogue": 7,
    "topical_chat": 7,
    "synthetic_persona_chat": 8,
    "africanstorybook": 8,
    "prathambooks": 8,
    "aesop_children": 6,
    "fairytaleqa_stories": 6,
    "grimm_hunt": 5,
    "fairy_lcats": 4,
    "oz": 4,
    "fairytaleqa_qa": 5,
    "gsm8k_train": 5,
    "tldr_qa": 3,
    "wordnet_qa": 3,
    "factbook_qa": 5,
    "python_algorithms": 3,
    "python_functions_qa": 5,
    "rust_by_example": 3,
    "exercism_python": 3,
    "rasbt_instructions": 5,
    "chatterbot": 5,
    "mbpp_train": 4,
    "short_stories_easy": 1.5,
}
# Share of the little stories that are told as the answer to a question.
TOLD = 0.3
# A cut document shorter than this is not continued in the next row.
MIN_REST = 64


def read_records(path):
    """The records of a `.jsonl` or `.jsonl.xz` file."""
    opener = lzma.open if str(path).endswith(".xz") else open
    with opener(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def told(record, r):
    """A story of the corpus as the answer to a question about it."""
    text = record["text"].strip()
    first = re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0]
    asks = ["Tell me a story.", "Tell me a short story.", "Write a little story.", "Can you tell me a story?"]
    name = re.search(r"\b(?:named|called) ([A-Z][a-z]+)", text[:300])
    if name:
        asks += [f"Tell me a story about {name[1]}.", f"Write a short story about {name[1]}."] * 2
    if len(first) < 160:
        asks += [f"Continue this story: {first}", f"Write a story that begins like this: {first}"]
    return {"prompt": r.choice(asks), "response": text}


def shown(record, r):
    """A corpus record as it is shown this time."""
    if record["set"] == "tinystories" and r.random() < TOLD:
        return told(record, r)
    return record


def corpus_documents(content, family, seed):
    """The texts of `content`'s records, each as often as its set says, times `repeat`."""
    (records, repeat), r = content, random.Random(seed)
    for record in records:
        times = repeat * EPOCHS.get(record["set"], 0)
        for _ in range(int(times) + (r.random() < times % 1)):
            yield chat.document(shown(record, r), family)


def synthetic_documents(n_chars, family, seed):
    """About `n_chars` of generated conversations."""
    r = random.Random(f"{seed} paceline")
    while n_chars > 0:
        text = chat.document(conversations.generate(r), family)
        n_chars -= len(text)
        yield text


def encode(job):
    """Worker: the documents of one job as `(flat ids, lengths)`."""
    from tokenizers import Tokenizer

    kind, family, tokenizer_path, content, seed = job
    documents = {"corpus": corpus_documents, "synthetic": synthetic_documents}[kind]
    tokenizer = Tokenizer.from_file(str(tokenizer_path))
    texts = list(documents(content, family, seed))
    ids = [e.ids for e in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]
    flat = np.concatenate([np.asarray(x, np.uint16) for x in ids])
    return kind, flat, np.array([len(x) for x in ids])


def pack(documents, length, r):
    """Rows of `length + 1` ids that start at document starts."""
    width = length + 1
    rows, row, queue = [], [], list(range(len(documents)))
    r.shuffle(queue)
    fill = 0
    for i in queue:
        rest = documents[i]
        while len(rest):
            part = rest[: width - fill]
            row.append(part)
            fill += len(part)
            if fill < width:
                break
            rows.append(np.concatenate(row))
            row, fill = [], 0
            if len(part) == len(rest):
                break
            # Cut: a document that fits into a row is shown whole, a longer one goes on.
            rest = rest if len(rest) <= width else rest[len(part) :]
            if len(rest) < MIN_REST:
                break
    return np.stack(rows)


def build(corpus, tokenizer_path, family, n_synthetic, length, seed=0, repeat=1.0, workers=None):
    """Returns `(rows [n, length + 1] uint16, tokens by kind)`, shuffled."""
    workers = workers or os.cpu_count()
    records = [x for x in read_records(Path(corpus) / "train.jsonl.xz") if x["set"] in EPOCHS]
    random.Random(seed).shuffle(records)
    jobs = [
        ("corpus", family, tokenizer_path, (records[i :: 4 * workers], repeat), seed + i)
        for i in range(4 * workers)
    ]
    share = n_synthetic / (4 * workers)
    jobs += [("synthetic", family, tokenizer_path, share, seed * 100_003 + i) for i in range(4 * workers)]
    documents, counts = [], {}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with multiprocessing.get_context("fork").Pool(workers) as pool:
        for kind, flat, lengths in pool.imap_unordered(encode, jobs):
            counts[kind] = counts.get(kind, 0) + len(flat)
            documents += np.split(flat, np.cumsum(lengths)[:-1])
    rows = pack(documents, length, random.Random(seed))
    np.random.default_rng(seed).shuffle(rows)
    return rows, counts


def main():
    parser = argparse.ArgumentParser(description="build the rows that a target is trained on")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--family", choices=sorted(chat.RENDER), required=True)
    parser.add_argument("--synthetic", type=float, default=130e6, help="characters to generate")
    parser.add_argument("--repeat", type=float, default=1.0, help="factor on the epochs of the corpus")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rows, counts = build(
        args.corpus, args.tokenizer, args.family, args.synthetic, args.length, args.seed, args.repeat
    )
    # What was packed, for reports.
    args.out.with_suffix(".data.json").write_text(json.dumps({"repeat": args.repeat, "tokens": counts}))
    # Written under another name first: trainers wait for the final one.
    partial = args.out.with_suffix(".part.npy")
    np.save(partial, rows)
    partial.rename(args.out)
    print(f"{args.family}: {len(rows)} rows, {rows.size / 1e6:.0f} M ids, {counts}", flush=True)


if __name__ == "__main__":
    main()
