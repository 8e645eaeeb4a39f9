#!/usr/bin/env python3
"""Trains the two tokenizers of the bundled models.

    python tokenizer.py --corpus DIR --out DIR [--vocab 8192]

- `qwen.json`: byte-level BPE behind Qwen's splitting pattern, digits one by one;
  special tokens follow the base vocabulary.
- `gemma.json`: BPE over text with `▁` for a space and bytes as a fallback; special
  tokens come first. It is trained on pieces and used without any splitting, as
  Gemma's is, which gives the same tokens but for rare runs of punctuation.

The special tokens are those that the families' chat templates write. The shipped
`tokenizer.json` files were made from an earlier draw of the corpus; a new one
differs in a few merges, and then models must be trained anew.
"""

import argparse
import json
import random
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

import chat
import data

# Megabytes of each set that a tokenizer sees; close to the training mix.
SHOWN = {
    "synthetic": 6,
    "tinystories": 6,
    "africanstorybook": 1,
    "prathambooks": 1,
    "fairytaleqa_stories": 2.5,
    "grimm_hunt": 1,
    "aesop_children": 0.3,
    "oz": 0.2,
    "fairy_lcats": 0.6,
    "short_stories_easy": 4,
    "self_dialogue": 4,
    "synthetic_persona_chat": 1.6,
    "topical_chat": 2,
    "gsm8k_train": 2,
    "tldr_qa": 1.5,
    "factbook_qa": 0.5,
    "python_algorithms": 1.5,
    "python_functions_qa": 0.6,
    "exercism_python": 0.2,
    "wordnet_qa": 1,
    "rust_by_example": 0.4,
    "rasbt_instructions": 0.1,
    "mbpp_train": 0.1,
    "chatterbot": 0.1,
}
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIAL = (
    "<|endoftext|> <|im_start|> <|im_end|> <|object_ref_start|> <|object_ref_end|> <|box_start|> <|box_end|> "
    "<|quad_start|> <|quad_end|> <|vision_start|> <|vision_end|> <|vision_pad|> <|image_pad|> <|video_pad|> "
    "<tool_call> </tool_call> <|fim_prefix|> <|fim_middle|> <|fim_suffix|> <|fim_pad|> <|repo_name|> <|file_sep|> "
    "<tool_response> </tool_response> <think> </think>"
).split()
GEMMA_SPLIT = r"▁?\p{N}|▁?[\p{L}\p{M}'’]+|▁?[^\s▁\p{L}\p{N}]+|▁+|\n+|\t+"
GEMMA_SPECIAL = (
    "<pad> <eos> <bos> <unk> <|turn> <turn|> <|channel> <channel|> <|think|> <|tool> <tool|> <|tool_call> "
    '<tool_call|> <|tool_response> <tool_response|> <|"|> <|image|> <|audio|> <|video|> <|image> <image|>'
).split()
# Special ids before the byte tokens in Gemma, after the vocabulary in Qwen.
N_SPECIAL = 32
GEMMA_ALPHABET = 220


def texts(records, who):
    """Plain turns under role names, up to `SHOWN` of each set."""
    r, by_set = random.Random(0), {}
    for record in records:
        if record["set"] in SHOWN:
            by_set.setdefault(record["set"], []).append(record)
    for name, group in by_set.items():
        r.shuffle(group)
        left = SHOWN[name] * 1e6
        for record in group:
            if left < 0:
                break
            if "text" in record:
                text = record["text"]
            else:
                messages = chat.as_conversation(record)["messages"]
                text = "".join(
                    f"{'user' if m['role'] == 'user' else who}\n{m['content']}\n" for m in messages
                )
            left -= len(text)
            yield text


def qwen(records, vocab):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab - N_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts(records, "assistant"), trainer)
    tokenizer.add_special_tokens([AddedToken(x, special=True, normalized=False) for x in QWEN_SPECIAL])
    return tokenizer


def gemma(records, vocab):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(GEMMA_SPLIT), "isolated")])
    special = GEMMA_SPECIAL + [f"<unused{i}>" for i in range(N_SPECIAL - len(GEMMA_SPECIAL))]
    special += [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=special, limit_alphabet=GEMMA_ALPHABET, show_progress=False
    )
    tokenizer.train_from_iterator(texts(records, "model"), trainer)
    parts = json.loads(tokenizer.to_str())
    parts["pre_tokenizer"] = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    replace = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    parts["decoder"] = {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}, {"type": "Fuse"}]}
    # Byte tokens are plain vocabulary: text that spells one must not become it.
    parts["added_tokens"] = [t for t in parts["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(parts))


def main():
    parser = argparse.ArgumentParser(description="train the tokenizers of the bundled models")
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vocab", type=int, default=8192)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    records = data.read_records(args.corpus / "train.jsonl.xz")
    held_out = [chat.document(x, "qwen") for x in data.read_records(args.corpus / "eval.jsonl.xz")]
    for name, make in (("qwen", qwen), ("gemma", gemma)):
        tokenizer = make(records, args.vocab)
        tokenizer.save(str(args.out / f"{name}.json"))
        ids = [tokenizer.encode(x, add_special_tokens=False).ids for x in held_out]
        back = sum(tokenizer.decode(i, skip_special_tokens=False) == x for i, x in zip(ids, held_out))
        size = sum(len(x.encode()) for x in held_out) / sum(map(len, ids))
        print(
            f"{name}: {tokenizer.get_vocab_size()} entries, {size:.3f} bytes a token, {back} of {len(held_out)} texts come back"
        )


if __name__ == "__main__":
    main()
