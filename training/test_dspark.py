"""Checks of DSpark heads on a tiny target: `python -m unittest` here. Skipped without torch."""

import json
import tempfile
import unittest
from pathlib import Path

import numpy as np

from checkpoint import bf16, read_folder, write_file
from quantise import plain, quantise_checkpoint

try:
    import torch

    import calibration
    import dspark
    import qwen3_5
    from muon import optimisers
except ImportError:
    torch = None


class Stored(unittest.TestCase):
    def test_markov_tables_have_groups_of_their_own(self):
        random = np.random.default_rng(0)
        shapes = {
            "fc.weight": (8, 128),
            "norm.weight": (128,),
            "markov_head.markov_w1.weight": (40, 32),
            "confidence_head.proj.weight": (1, 128),
        }
        before = {n: bf16(random.normal(size=s).astype(np.float32)) for n, s in shapes.items()}
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "a", Path(folder) / "b"
            source.mkdir()
            write_file(source / "model.safetensors", before, {"format": "pt"})
            config = {"model_type": "qwen3", "markov_rank": 32}
            (source / "config.json").write_text(json.dumps(config))
            quantise_checkpoint(source, target, 4, 128)
            config, stored = json.loads((target / "config.json").read_text()), read_folder(target)
        self.assertEqual(stored["fc.scales"].shape, (8, 1))
        self.assertEqual(stored["markov_head.markov_w1.scales"].shape, (40, 1))
        self.assertEqual(config["quantization"]["markov_head.markov_w1"], {"group_size": 32, "bits": 4})
        after = plain(stored, config)
        for name in ("norm.weight", "confidence_head.proj.weight"):
            self.assertTrue(np.array_equal(after[name].bits, before[name].bits), name)
        for name in ("fc.weight", "markov_head.markov_w1.weight"):
            self.assertEqual(after[name].dtype, "F32")
            error = np.linalg.norm(after[name].float32() - before[name].float32())
            self.assertLess(error, 0.2 * np.linalg.norm(before[name].float32()), name)


@unittest.skipIf(torch is None, "needs torch")
class Head(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        kinds = [qwen3_5.LINEAR, qwen3_5.FULL] * 2
        c = qwen3_5.config(kinds, hidden=64, width=64, vocab=96, num_key_value_heads=1)
        self.target = qwen3_5.Qwen35(c, dtype=torch.float32).eval().requires_grad_(False)
        own = dspark.config(c, (1, 2, 4), width=64, n_heads=2, mask=95)
        self.head = dspark.Dspark({**own, "num_key_value_heads": 1})
        self.ids = torch.randint(0, 95, (2, 41))
        self.out = self.target(self.ids[:, :-1])

    def hidden(self, ids, anchors):
        with torch.no_grad():
            out = self.target(ids[:, :-1])
            return self.head.hidden(self.target, ids, out, torch.tensor(anchors))

    def test_a_block_sees_the_rows_before_its_anchor_and_itself(self):
        alone, together = self.hidden(self.ids, [20]), self.hidden(self.ids, [9, 20, 24])
        self.assertLess((alone[:, 0] - together[:, 1]).abs().max().item(), 1e-5)
        for at, changes in ((21, False), (20, True), (19, True), (0, True)):
            ids = self.ids.clone()
            ids[:, at] = (ids[:, at] + 1) % 95
            found = (self.hidden(ids, [20]) - alone).abs().amax((0, 1, 3))
            self.assertEqual(bool((found > 1e-6).all()), changes, f"token {at}: {found}")
            self.assertEqual(bool((found > 1e-6).any()), changes, f"token {at}: {found}")

    def test_a_row_follows_the_token_before_it(self):
        with torch.no_grad():
            anchors = torch.tensor([20])
            before, _ = self.head.blocks(self.target, self.ids, self.out, anchors)
            ids = self.ids.clone()
            ids[:, 22] = (ids[:, 22] + 1) % 95
            after, _ = self.head.blocks(self.target, ids, self.out, anchors)
        changed = (after - before).abs().amax((0, 1, 3)) > 0
        self.assertEqual(changed.tolist(), [k == 2 for k in range(dspark.BLOCK)])

    def test_drafts_of_whole_texts_are_those_of_the_blocks(self):
        with torch.no_grad():
            drafts = self.head.unroll(self.target, self.ids, self.out, dspark.BLOCK)
            logits, _ = self.head.blocks(self.target, self.ids, self.out, torch.tensor([20]))
        self.assertEqual([d.shape[1] for d in drafts], [40] * dspark.BLOCK)
        for k, draft in enumerate(drafts):
            self.assertLess((draft[:, 19] - logits[:, 0, k]).abs().max().item(), 1e-4)

    def test_training_lowers_the_loss(self):
        steppers = optimisers([self.head], 3e-3)
        losses = []
        for _ in range(25):
            loss = self.head.training_loss(self.target, self.ids, self.out, dspark.block_loss)
            loss.backward()
            for o in steppers:
                o.step()
                o.zero_grad(set_to_none=True)
            losses.append(loss.item())
        # An untrained target is nearly uniform: most of the loss is its entropy.
        self.assertLess(sum(losses[-5:]) / 5, sum(losses[:5]) / 5 - 0.2, losses)

    def test_confidences_are_weighed_by_what_was_kept_before(self):
        confidence = torch.tensor([[0.8, 0.6], [0.8, 0.6], [0.8, 0.6], [0.8, 0.6]])
        kept = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
        found = calibration.scores([(confidence, kept)], [1])
        # The last row has nothing after it, and the one before it one token.
        self.assertEqual(found["by_position"][0]["guesses"], 3)
        self.assertEqual(found["by_position"][1]["guesses"], 1)
        self.assertAlmostEqual(found["by_position"][0]["kept"], 2 / 3)
        self.assertAlmostEqual(found["by_position"][1]["brier"], 0.36, places=5)

    def test_a_walk_ends_drafts_by_the_product_of_confidences(self):
        found = torch.full((4, 2), 0.7), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [0.0, 0.0]])
        short, whole = (calibration.walk([found], [1], t) for t in (0.5, 0.4))
        self.assertEqual(short, {"tokens": 1.5, "guesses": 1.0})
        self.assertEqual(whole, {"tokens": 1.5, "guesses": 1.5})


if __name__ == "__main__":
    unittest.main()
