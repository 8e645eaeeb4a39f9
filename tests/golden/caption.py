"""What transformers says of generated pictures and clips: `python tests/golden/caption.py [--check]`.

Scenes are those of `training/pictures.py`, made from a seed that no training used, with the questions that it asks of
them. `captions.json` holds them as lists of marks in whole pixels, and what the bundled vision models answer, greedily,
in float32, through the library's own processors. `tests/captions.rs` draws the same pixels and compares its texts. A
mark is one of `scenes.py`.

An answer counts only if each of its tokens is likelier than the next likeliest by `MARGIN` in logits: closer ones depend
on the order of sums. Scenes of which a model gives another answer are left out, and counted in the file.
"""

import argparse
import json
import pathlib
import random
import sys

import numpy as np
import torch
import transformers

import vision

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent.parent / "training"))
import pictures  # noqa: E402
from scenes import draw  # noqa: E402

FILE = HERE / "captions.json"
SEED = 20_261_126
MARGIN = 1e-3
PICTURES, CLIPS = 110, 24
TOKENS = 40
# Rows and columns of cells, and pixels of a cell: as in training, and of other sizes and shapes.
SIZES = [((8, 8), 32), ((8, 8), 48), ((8, 8), 27), ((6, 9), 32), ((9, 7), 40)]
FRAMES, FPS = 8, 4


def whole(mark, cell):
    """A mark in whole pixels."""
    kind, x, y, w, h, *rgb = mark
    w, h = (max(1, round(n * cell)) for n in (w, h))
    left, top = round(x * cell - w / 2), round(y * cell - h / 2)
    return [kind, left, top, w, h, *(min(255, max(0, round(c))) for c in rgb)]


def scene(r, n_frames):
    """A description of a picture or a clip, and a question about it."""
    grid, cell = r.choice(SIZES) if n_frames == 1 else SIZES[0]
    frames, asked = pictures.example(grid, r, n_frames, "pictures")
    _, question, answer = asked[0]
    return {
        "size": [grid[0] * cell, grid[1] * cell],
        "ground": [int(c) for c in frames[0].ground],
        "frames": [[whole(mark, cell) for mark in frame.marks] for frame in frames],
        "question": question,
        "right": answer,
    }


class Captioner:
    def __init__(self, folder):
        self.processor, self.model = vision.processor_of(folder), vision.load(folder)
        self.ends = self.model.generation_config.eos_token_id
        config = json.loads((folder / "generation_config.json").read_text())
        self.ends = config["eos_token_id"]

    def given(self, scene, frames):
        if len(frames) > 1:
            content = [{"type": "video"}, {"type": "text", "text": scene["question"]}]
            return vision.read_video(self.processor, content, frames, float(FPS))
        content = [{"type": "image"}, {"type": "text", "text": scene["question"]}]
        text = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
        )
        return self.processor(
            text=[text], images=[frames[0]], return_tensors="pt", add_special_tokens=False
        )

    def answer(self, scene):
        """The text, and by how much its closest token is the likeliest."""
        frames = np.stack([draw(scene["size"], scene["ground"], marks) for marks in scene["frames"]])
        given = self.given(scene, frames)
        out = self.model.generate(
            **given, do_sample=False, max_new_tokens=TOKENS, eos_token_id=self.ends,
            return_dict_in_generate=True, output_logits=True,
        )
        best = torch.stack(out.logits)[:, 0].topk(2).values
        ids = out.sequences[0, given["input_ids"].shape[1] :]
        return self.processor.tokenizer.decode(ids, skip_special_tokens=True), float((best[:, 0] - best[:, 1]).min())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare with what is here")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    folders = {name: HERE.parent.parent / "models" / name for name in vision.BUNDLED}
    captioners = {name: Captioner(folder) for name, folder in folders.items()}
    r, kept, close = random.Random(SEED), [], 0
    for n_frames, most in ((1, PICTURES), (FRAMES, CLIPS)):
        of_kind = []
        while len(of_kind) < most:
            made = scene(r, n_frames)
            answers = {name: captioner.answer(made) for name, captioner in captioners.items()}
            if min(margin for _, margin in answers.values()) < MARGIN:
                close += 1
                continue
            of_kind.append(made | {"answers": {name: text for name, (text, _) in answers.items()}})
        kept += of_kind
        for name in folders:
            right = sum(s["answers"][name] == s["right"] for s in of_kind)
            print(f"{name}: {right} of {most} right, {n_frames} frames", flush=True)
    head = {"made_by": f"transformers {transformers.__version__} in float32", "seed": SEED, "fps": FPS, "close": close}
    lines = ",\n".join(json.dumps(s, separators=(",", ":")) for s in kept)
    text = json.dumps(head)[:-1] + ',\n"scenes": [\n' + lines + "\n]}\n"
    if not args.check:
        FILE.write_text(text)
        print(f"{len(kept)} scenes, {close} too close, {len(text)} bytes")
    elif FILE.read_text() != text:
        sys.exit("caption.py: another text")


if __name__ == "__main__":
    main()
