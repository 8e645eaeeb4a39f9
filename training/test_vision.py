"""Drawing, towers and their checkpoints: `python -m unittest` here, needs torch and no GPU."""

import json
import tempfile
import time
import unittest
from pathlib import Path

import numpy as np

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest("needs torch") from error

import canvas
import evaluate
import export
import gemma4
import load
import pictures
import train
import train_vision
import vision
from checkpoint import bf16, read_file, write_file
from layers import Storage


class Drawing(unittest.TestCase):
    def test_a_circle_is_round_and_where_it_was_put(self):
        scene = pictures.Scene((8, 8), pictures.rng(0))
        scene.ground = np.array([255, 255, 255], np.float32)
        scene.add(1 + pictures.SHAPES.index("circle"), 2.0, 5.0, 3.0, 3.0, (255, 0, 0), 1, 5)
        marks, grounds, facts = pictures.arrays([scene])
        picture = canvas.draw(torch.from_numpy(marks), torch.from_numpy(grounds), (8, 8), 16)[0]
        self.assertEqual(picture.shape, (3, 128, 128))
        self.assertEqual(picture[:, 80, 32].tolist(), [1, 0, 0])
        self.assertEqual(picture[:, 80 - 22, 32 - 22].tolist(), [1, 1, 1])  # a corner of its box
        self.assertEqual(facts[0, 5 * 8 + 2].tolist(), [1, 1, 5])
        area = (picture[1] < 0.5).sum().item() / 16**2
        self.assertAlmostEqual(area, np.pi * 1.5**2 * 0.98, delta=0.2)


class Towers(unittest.TestCase):
    def test_soft_tokens_are_one_a_cell(self):
        for family, grid in (("gemma", (2, 3)), ("qwen", (3, 2))):
            tower = vision.tower(family, None, 64, dtype=torch.float32)
            pictures_ = torch.rand(2, 3, grid[0] * tower.cell, grid[1] * tower.cell)
            self.assertEqual(tower(pictures_).shape, (2, 6, 64))
        pairs = pictures_[:, None].expand(-1, 2, -1, -1, -1)
        torch.testing.assert_close(tower(pictures_), tower(pairs))

    def test_questions_about_one_picture_share_its_soft_tokens(self):
        class Echo:
            family, embed = "gemma", staticmethod(lambda ids: torch.zeros(*ids.shape, 1))

            def __call__(self, ids, x, logits):
                return {"hidden": x}

        batch = {"ids": torch.zeros(6, 5, dtype=torch.long), "where": torch.tensor([1, 2]), "asks": 3}
        states = train_vision.hidden(Echo(), torch.tensor([[[1.0], [2.0]], [[3.0], [4.0]]]), batch)
        self.assertEqual(states[:, :, 0].tolist(), 3 * [[0, 1, 2, 0, 0]] + 3 * [[0, 3, 4, 0, 0]])

    def test_positions_of_a_picture_run_in_rows_and_columns(self):
        prompts = train_vision.Prompts.__new__(train_vision.Prompts)
        where = [2, 3, 4, 5, 6, 7]
        positions = prompts.positions(where, (2, 3), 10)
        self.assertEqual(positions[0].tolist(), [0, 1, 2, 2, 2, 2, 2, 2, 5, 6])
        self.assertEqual(positions[1].tolist(), [0, 1, 2, 2, 2, 3, 3, 3, 5, 6])
        self.assertEqual(positions[2].tolist(), [0, 1, 2, 3, 4, 2, 3, 4, 5, 6])

    def test_a_saved_tower_is_the_baked_one_and_the_decoder_is_untouched(self):
        text = {
            "model_type": "gemma4_text",
            "hidden_size": 64,
            "eos_token_id": [1],
            "architectures": ["Gemma4ForCausalLM"],
            "quantization": {"group_size": 64, "bits": 4, "mode": "affine"},
        }
        storage = Storage(4, 64)
        tower = vision.tower("gemma", None, 64, storage, torch.float32)
        picture = torch.rand(1, 3, 96, 96)
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "source", Path(folder) / "target"
            source.mkdir()
            norm = bf16(np.linspace(-1, 1, 64))
            write_file(source / "model.safetensors", {"model.norm.weight": norm}, {"format": "mlx"})
            names = {"config": text, "tokenizer_config": {}, "generation_config": {}}
            for stem, content in names.items():
                (source / f"{stem}.json").write_text(json.dumps(content))
            (source / "tokenizer.json").write_text("{}")
            export.save_multimodal(target, source, tower, storage, None)
            stored = read_file(target / "model.safetensors")
            back = load.load_tower(target)
        np.testing.assert_array_equal(stored["model.language_model.norm.weight"].bits, norm.bits)
        train.bake(tower)
        # Norms and tables are rounded to bf16 in the file.
        torch.testing.assert_close(back(picture), tower(picture), atol=0.02, rtol=0.02)


class Heads(unittest.TestCase):
    def test_a_head_trained_anew_replaces_itself_alone(self):
        norm, old = bf16(np.linspace(-1, 1, 64)), bf16(np.ones(64))
        stored = {"model.norm.weight": norm, "mtp.norm.weight": old}
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "source", Path(folder) / "target"
            source.mkdir()
            write_file(source / "model.safetensors", stored, {"format": "mlx"})
            entry = {"group_size": 64, "bits": 4, "mode": "affine"}
            (source / "config.json").write_text(json.dumps({"quantization": entry}))
            export.save_head(target, source, {"mtp.norm.weight": torch.full((64,), 0.5)})
            new = read_file(target / "model.safetensors")
            with self.assertRaises(ValueError):
                export.save_head(target, source, {"mtp.other.weight": torch.ones(64)})
        self.assertEqual(list(new), list(stored))
        np.testing.assert_array_equal(new["model.norm.weight"].bits, norm.bits)
        # Stored as an MLX file has it: one is added to a norm centred on zero.
        np.testing.assert_array_equal(new["mtp.norm.weight"].float32(), np.full(64, 1.5, np.float32))

    def test_an_assistant_of_a_stored_target_is_not_stored_the_same_way_yet(self):
        entry = {"quantization": {"bits": 4}, "quantization_config": {"bits": 4}}
        plain = gemma4.config([gemma4.SLIDING, gemma4.FULL], hidden=64)
        self.assertEqual(gemma4.assistant_config(plain | entry), gemma4.assistant_config(plain))


class Clocks(unittest.TestCase):
    def test_a_stage_that_starts_late_is_shortened(self):
        now = time.time()
        for until, least, most in ((None, 5, 5), (now + 60, 0.9, 1), (now - 60, 0, 0.01)):
            clock = train.Clock(5, 0, until)
            clock.tick()
            self.assertTrue(least <= clock.minutes <= most, clock.minutes)


class Table(unittest.TestCase):
    def test_shares_and_their_total(self):
        counts = {
            "pictures": {"count": (3, 4), "word": (1, 4)},
            "phrasing": {"word": (0, 2)},
            "combination": {},
        }
        counts["combination"] = {"count": (1, 1)}
        lines = evaluate.picture_table(counts)
        self.assertIn("| count | 75.0 % of 4 |  | 100.0 % of 1 |", lines)
        self.assertIn("| **together** | 50.0 % of 8 | 0.0 % of 2 | 100.0 % of 1 |", lines)


if __name__ == "__main__":
    unittest.main()
