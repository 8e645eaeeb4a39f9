"""Checks of the checkpoint tools that need no GPU: `python -m unittest` here."""

import json
import tempfile
import unittest
from pathlib import Path

import numpy as np

from checkpoint import Tensor, bf16, read_file, read_folder, write_file
from quantise import dequantise_rows, plain, quantise_checkpoint, quantise_rows, to_mlx_layout


class Quantise(unittest.TestCase):
    def test_error_is_at_most_half_a_code_and_one_more_at_the_near_end(self):
        rows = np.random.default_rng(0).normal(size=(32, 256)).astype(np.float32)
        rows = bf16(rows).float32()
        for bits in (4, 8):
            words, scales, biases = quantise_rows(rows, bits, 64)
            self.assertEqual(words.shape, (32, 256 * bits // 32))
            back = dequantise_rows(words, scales, biases, bits, 64)
            step = np.repeat(np.abs(scales.float32()), 64, axis=-1)
            error = np.abs(back - rows) / step
            self.assertLess(float(np.median(error)), 0.3)
            self.assertLessEqual(float(error.max()), 1.51)

    def test_zeros_come_back_as_zeros(self):
        words, scales, biases = quantise_rows(np.zeros((2, 64), np.float32), 8, 64)
        self.assertEqual(float(np.abs(dequantise_rows(words, scales, biases, 8, 64)).max()), 0.0)

    def test_codes_fill_words_from_the_low_bits(self):
        # 0, 1, .., 63 scaled: the far end is the bias, so codes count downwards.
        row = np.arange(64, dtype=np.float32)[None]
        words, scales, biases = quantise_rows(row, 8, 64)
        first = [(int(words.bits[0, 0]) >> shift) & 255 for shift in (0, 8, 16, 24)]
        values = [scales.float32()[0, 0] * c + biases.float32()[0, 0] for c in first]
        np.testing.assert_allclose(values, [0, 1, 2, 3], atol=0.25)

    def test_a_quantised_checkpoint_becomes_plain_again(self):
        r = np.random.default_rng(1)
        shapes = {
            "model.norm.weight": (4,),
            "model.layers.0.linear_attn.conv1d.weight": (6, 1, 4),
            "model.layers.0.mlp.gate.weight": (8, 64),
            "model.layers.0.mlp.experts.gate_up_proj": (2, 6, 64),
            "model.layers.0.mlp.experts.down_proj": (2, 64, 64),
            "model.embed_tokens.weight": (8, 128),
        }
        before = {name: bf16(r.normal(size=shape).astype(np.float32)) for name, shape in shapes.items()}
        with tempfile.TemporaryDirectory() as folder:
            source, target = Path(folder) / "source", Path(folder) / "target"
            source.mkdir()
            write_file(source / "model.safetensors", before, {"format": "pt"})
            (source / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe_text"}))
            quantise_checkpoint(source, target, 8, 64)
            config = json.loads((target / "config.json").read_text())
            after = plain(read_file(target / "model.safetensors"), config)
        self.assertEqual(set(after), set(before))
        for name, tensor in before.items():
            self.assertEqual(after[name].shape, tensor.shape, name)
            # One more is added to a norm and taken off again, each time rounded.
            np.testing.assert_allclose(after[name].float32(), tensor.float32(), atol=0.03, err_msg=name)

    def test_qwen_norms_gain_one_and_convolutions_turn(self):
        tensors = {
            "model.norm.weight": bf16(np.zeros(4)),
            "model.layers.0.linear_attn.norm.weight": bf16(np.ones(4)),
            "model.layers.0.linear_attn.conv1d.weight": bf16(np.arange(8).reshape(2, 1, 4)),
            "mtp.pre_fc_norm_hidden.weight": bf16(np.full(4, 0.5)),
        }
        out = to_mlx_layout(tensors, "qwen")
        np.testing.assert_array_equal(out["model.norm.weight"].float32(), np.ones(4))
        np.testing.assert_array_equal(out["model.layers.0.linear_attn.norm.weight"].float32(), np.ones(4))
        np.testing.assert_array_equal(out["mtp.pre_fc_norm_hidden.weight"].float32(), np.full(4, 1.5))
        self.assertEqual(out["model.layers.0.linear_attn.conv1d.weight"].shape, (2, 4, 1))

    def test_what_another_checkpoint_holds_is_linked(self):
        r = np.random.default_rng(2)
        draw = lambda *shape: bf16(r.normal(size=shape).astype(np.float32))
        dense = {"model.norm.weight": draw(4), "pre_projection.weight": draw(8, 64)}
        more = {**dense, "masked_embedding.centroids.weight": draw(2, 64)}
        other = {**more, "model.norm.weight": draw(4)}
        with tempfile.TemporaryDirectory() as folder:
            for name, tensors in {"dense": dense, "more": more, "other": other}.items():
                (Path(folder) / name).mkdir()
                write_file(Path(folder) / name / "model.safetensors", tensors, {"format": "pt"})
                (Path(folder) / name / "config.json").write_text('{"model_type": "gemma4_assistant"}')
            stored = Path(folder) / "stored"
            quantise_checkpoint(Path(folder) / "dense", stored, 4, 64)
            quantise_checkpoint(Path(folder) / "more", Path(folder) / "whole", 4, 64)
            quantise_checkpoint(Path(folder) / "more", Path(folder) / "linked", 4, 64, stored)
            whole, linked = read_folder(Path(folder) / "whole"), read_folder(Path(folder) / "linked")
            self.assertEqual(set(linked), set(whole))
            for name, tensor in whole.items():
                np.testing.assert_array_equal(linked[name].bits, tensor.bits)
            added = read_file(Path(folder) / "linked/model-00002-of-00002.safetensors")
            self.assertEqual(list(added), ["masked_embedding.centroids.weight"])
            with self.assertRaisesRegex(ValueError, "another model.norm.weight"):
                quantise_checkpoint(Path(folder) / "other", Path(folder) / "x", 4, 64, stored)

    def test_a_source_in_codes_keeps_its_bits(self):
        r = np.random.default_rng(3)
        draw = lambda *shape: bf16(r.normal(size=shape).astype(np.float32))
        text = {"model.layers.0.mlp.up_proj.weight": draw(8, 64), "model.norm.weight": draw(4)}
        tower = {"model.visual.merger.norm.weight": draw(4)}
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            for name in ("text", "seen"):
                (folder / name).mkdir()
                (folder / name / "config.json").write_text('{"model_type": "gemma4_text"}')
            write_file(folder / "text/model.safetensors", text, {"format": "pt"})
            quantise_checkpoint(folder / "text", folder / "stored", 4, 64)
            stored, config = read_folder(folder / "stored"), (folder / "stored/config.json").read_text()
            inner = {n.replace("model.", "model.language_model.", 1): t for n, t in stored.items()}
            write_file(folder / "seen/model.safetensors", inner | tower, {"format": "mlx"})
            (folder / "seen/config.json").write_text(config)
            quantise_checkpoint(folder / "seen", folder / "linked", 8, 32, folder / "stored")
            linked = read_folder(folder / "linked")
            self.assertTrue((folder / "linked/model-00001-of-00002.safetensors").is_symlink())
            added = read_file(folder / "linked/model-00002-of-00002.safetensors")
            self.assertEqual(json.loads((folder / "linked/config.json").read_text()), json.loads(config))
        self.assertEqual(list(added), list(tower))
        for name, tensor in (stored | tower).items():
            np.testing.assert_array_equal(linked[name].bits, tensor.bits)

    def test_a_written_file_reads_back(self):
        tensors = {
            "a": bf16(np.linspace(-1, 1, 6).reshape(2, 3)),
            "b": Tensor("U32", np.arange(3, dtype=np.uint32)),
        }
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "x.safetensors"
            write_file(path, tensors, {"format": "mlx"})
            back = read_file(path)
        for name, tensor in tensors.items():
            self.assertEqual(back[name].dtype, tensor.dtype)
            np.testing.assert_array_equal(back[name].bits, tensor.bits)


if __name__ == "__main__":
    unittest.main()
