"""Golden files of the vision towers: `python tests/golden/vision.py [--check] [--models DIR]`.

Pictures of pixels that a formula gives go through the library's own processors (sizes are such that nothing is resized),
towers and language models, in float32: what is stored is theirs, rounded nowhere else. Bundled models are read as the
values that their codes stand for; the seeded checkpoints here are of variants that no bundled model has.

    pixel[frame, y, x, channel] = (7 x + 13 y + 50 channel + 31 frame + x y / 5) mod 256

A prompt is text, a picture, text, a second picture, text, so that a second picture is not the first one's copy.

`video-NAME.safetensors` is of a conversation with a clip, as the library's processor of a bundled model reads it: which
frames are looked at and resized to what, the prompt's ids with the times of frames, positions, and the last logits.
"""

import argparse
import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers

import oracle  # noqa: F401  (one thread, no gradients, quiet)
import store

HERE = pathlib.Path(__file__).resolve().parent
CHECK_TOLERANCE = 1e-5
LAST = 2  # rows of a prompt whose logits are stored


def pixels(frames, height, width):
    f, y, x, c = np.ogrid[:frames, :height, :width, :3]
    return ((7 * x + 13 * y + 50 * c + 31 * f + x * y // 5) % 256).astype(np.uint8)


def array(tensor):
    return tensor.detach().float().numpy()


def watch(module, trace, name, pick=lambda output: output):
    def note(module, inputs, output):
        value = array(pick(output))
        trace[name] = value.reshape(-1, value.shape[-1])

    return module.register_forward_hook(note)


def watch_ends(layers, trace):
    """The first and the last layer."""
    return [watch(layers[i], trace, f"layers.{i}.out") for i in sorted({0, len(layers) - 1})]


class Gemma:
    """Pictures of Gemma 4, towers and the encoder-free kind."""

    def __init__(self, model):
        self.model = model
        self.vision = model.config.vision_config
        self.unified = "Unified" in type(model).__name__
        side = self.side = self.vision.patch_size * self.vision.pooling_kernel_size
        self.sizes, self.clip = [(2 * side, 3 * side), (4 * side, 2 * side)], (3, 2 * side, 2 * side)
        self.end = model.config.eoi_token_id
        self.begin = model.config.boi_token_id

    def patches(self, frame):
        """One frame as the library's processor cuts it; padding removed."""
        side = self.side if self.unified else self.vision.patch_size
        height, width = frame.shape[:2]
        image = torch.from_numpy(frame.transpose(2, 0, 1).copy()).float() / 255
        if self.unified:
            from transformers.models.gemma4_unified import image_processing_gemma4_unified as processing
        else:
            from transformers.models.gemma4 import image_processing_gemma4 as processing
        cut = processing.convert_image_to_patches(image, self.vision.patch_size)[None]
        grid = np.meshgrid(*(np.arange(n // self.vision.patch_size) for n in (width, height)), indexing="xy")
        places = torch.from_numpy(np.stack(grid, -1).reshape(1, -1, 2))
        if self.unified:
            k = self.vision.pooling_kernel_size
            cut, places = processing.patches_merge(cut, places, cut.shape[1] // k**2)
        assert cut.shape[1] == height * width // side**2
        return cut, places

    def rows(self, frames, trace=None):
        made = []
        for frame in frames:
            cut, places = self.patches(frame)
            hooks = []
            if trace is not None and not self.unified:
                tower = self.model.model.vision_tower
                hooks = [watch(tower.patch_embedder, trace, "embed")]
                hooks += watch_ends(tower.encoder.layers, trace)
            out = self.model.model.get_image_features(cut, places, return_dict=True).pooler_output
            made.append(array(out if torch.is_tensor(out) else torch.cat(out)).reshape(-1, out[0].shape[-1]))
            [hook.remove() for hook in hooks]
        return np.concatenate(made)

    def logits(self, ids, kinds, pictures):
        cut, places = zip(*(self.patches(p[0]) for p in pictures))
        most = max(c.shape[1] for c in cut)
        pad = lambda x, value: torch.nn.functional.pad(x, (0, 0, 0, most - x.shape[1]), value=value)
        out = self.model(
            input_ids=ids,
            mm_token_type_ids=kinds,
            pixel_values=torch.cat([pad(c, 0) for c in cut]),
            image_position_ids=torch.cat([pad(p, -1) for p in places]),
        )
        return out.logits


class Qwen:
    """Pictures of Qwen 3.5."""

    sizes, clip = [(64, 96), (128, 64)], (3, 64, 64)

    def __init__(self, model):
        self.model = model
        self.begin, self.end = model.config.vision_start_token_id, model.config.vision_end_token_id

    def patches(self, frames):
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

        height, width = frames.shape[1:3]
        frames = np.concatenate([frames, frames[-1:]]) if len(frames) > 1 and len(frames) % 2 else frames
        grid = torch.tensor([[max(1, len(frames) // 2), height // 16, width // 16]])
        processor = Qwen2VLImageProcessorPil(
            patch_size=16, temporal_patch_size=2, merge_size=2, image_mean=[0.5] * 3, image_std=[0.5] * 3,
            do_resize=False, size={"shortest_edge": 1, "longest_edge": 1 << 24},
        )
        if len(frames) == 1:
            made = processor(images=[frames[0]], return_tensors="pt")
            assert made["image_grid_thw"].tolist() == grid.tolist()
            return made["pixel_values"], grid
        # A pair of frames: the halves of patches that the processor makes of each frame alone.
        single = [processor(images=[f], return_tensors="pt")["pixel_values"] for f in frames]
        halves = [s.reshape(len(s), 3, 2, -1)[:, :, :1] for s in single]
        pairs = [torch.cat(halves[i : i + 2], 2) for i in range(0, len(halves), 2)]
        return torch.cat(pairs).reshape(-1, single[0].shape[-1]), grid

    def rows(self, frames, trace=None):
        cut, grid = self.patches(frames)
        hooks, visual = [], self.model.model.visual
        if trace is not None:
            hooks = watch_ends(visual.blocks, trace)
        made = visual(cut, grid)
        [hook.remove() for hook in hooks]
        return array(made.pooler_output)

    def logits(self, ids, kinds, pictures):
        cut, grids = zip(*(self.patches(p) for p in pictures))
        out = self.model(
            input_ids=ids, mm_token_type_ids=kinds, pixel_values=torch.cat(cut), image_grid_thw=torch.cat(grids)
        )
        return out.logits


def outputs(model):
    """The named arrays of a model's pictures and of its prompt."""
    family = (Gemma if "gemma" in model.config.model_type else Qwen)(model)
    made = {}
    pictures = [pixels(1, *size) for size in family.sizes]
    for name, frames in zip("ab", pictures):
        trace = {} if name == "a" else None
        rows = family.rows(frames, trace)
        made |= {f"{name}.{key}": value for key, value in (trace or {}).items()}
        made[f"{name}.rows"] = rows
    made["clip.rows"] = family.rows(pixels(*family.clip))
    rng, ids, kinds = np.random.RandomState(5), [], []

    def text(*tokens):
        ids.extend(tokens)
        kinds.extend([0] * len(tokens))

    for name in "ab":
        text(*rng.randint(30, 90, 5), family.begin)
        n = len(made[f"{name}.rows"])
        ids += [model.config.image_token_id] * n
        kinds += [1] * n
        text(family.end)
    text(*rng.randint(30, 90, 4))
    logits = family.logits(torch.tensor([ids]), torch.tensor([kinds]), pictures)
    made["tokens"] = np.array(ids)
    made["logits"] = array(logits[0, -LAST:])
    return made


CLIP = dict(frames=10, height=90, width=130, fps=5.0)
ASKED = [{"type": "text", "text": "Look: "}, {"type": "video"}, {"type": "text", "text": " What moves?"}]


def processor_of(folder):
    processor = transformers.AutoProcessor.from_pretrained(folder)
    if "Gemma4" in type(processor).__name__:
        # Release 5.23 asks for tokens of sound where there is none.
        processor.audio_token = processor.boa_token = processor.eoa_token = "<|audio|>"
    return processor


def read_video(processor, content, frames, fps):
    """What a model is given for a question with a clip."""
    text = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    metadata = [{"fps": fps, "total_num_frames": len(frames)}]
    return processor(
        text=[text], videos=[frames], video_metadata=metadata, return_tensors="pt", add_special_tokens=False
    )


def video_outputs(folder, model):
    """The named arrays of a conversation with a clip."""
    frames = pixels(CLIP["frames"], CLIP["height"], CLIP["width"])
    given = read_video(processor_of(folder), ASKED, frames, CLIP["fps"])
    made = {"tokens": given["input_ids"][0].numpy()}
    if "video_grid_thw" in given:
        positions, _ = model.model.get_rope_index(
            given["input_ids"], given["mm_token_type_ids"], video_grid_thw=given["video_grid_thw"]
        )
        made["positions"] = positions[:, 0].numpy()
    made["logits"] = array(model(**given).logits[0, -1:])
    return made


TEXT = dict(
    vocab_size=97, hidden_size=32, intermediate_size=40, num_attention_heads=4, head_dim=16, rms_norm_eps=1e-6,
    pad_token_id=0, final_logit_softcapping=30.0, sliding_window=10, max_position_embeddings=512,
    tie_word_embeddings=True, global_head_dim=32, vocab_size_per_layer_input=97,
)
ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LARGE = dict(
    num_hidden_layers=4, num_key_value_heads=2, num_global_key_value_heads=1, attention_k_eq_v=True,
    hidden_size_per_layer_input=0, layer_types=["sliding_attention", "full_attention"] * 2,
    use_bidirectional_attention="vision",
)
SMALL = dict(
    num_hidden_layers=6, num_key_value_heads=1, attention_k_eq_v=False, hidden_size_per_layer_input=8,
    num_kv_shared_layers=3, use_double_wide_mlp=True,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
)
VISION = dict(
    hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, head_dim=16,
    position_embedding_size=64, pooling_kernel_size=3, patch_size=8, rms_norm_eps=1e-6,
)
TOKENS = dict(image_token_id=25, video_token_id=26, audio_token_id=27, boi_token_id=28, eoi_token_id=29)


def seeded(name):
    """The library's model of a seeded variant, its values rounded to bf16."""
    t = transformers
    rope = {"rope_parameters": json.loads(json.dumps(ROPE))}
    if name == "gemma4-unified":
        text = t.Gemma4UnifiedTextConfig(**TEXT, **LARGE, **rope)
        from transformers.models.gemma4_unified import Gemma4UnifiedVisionConfig

        vision = Gemma4UnifiedVisionConfig(
            mm_embed_dim=40, output_proj_dims=40, mm_posemb_size=64, patch_size=4, pooling_kernel_size=3
        )
        config = t.Gemma4UnifiedConfig(text_config=text, vision_config=vision, audio_config=None, **TOKENS)
        model = t.Gemma4UnifiedForConditionalGeneration(config)
    else:
        size, kind = {
            "gemma4-vision-clipped": (SMALL, dict(use_clipped_linears=True)),
            "gemma4-vision-standard": (LARGE, dict(standardize=True)),
        }[name]
        text = t.Gemma4TextConfig(**TEXT, **size, **rope)
        vision = t.Gemma4VisionConfig(**VISION, **kind)
        config = t.Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **TOKENS)
        model = t.Gemma4ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(3)
    rounded = lambda x: x.to(torch.bfloat16).float()
    for key, p in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith(("input_min", "output_min")):
            p.fill_(-1.5)
        elif key.endswith(("input_max", "output_max")):
            p.fill_(1.25)
        elif p.dtype.is_floating_point and "inv_freq" not in key and "embed_scale" not in key:
            one = p.ndim < 2
            random = torch.rand(p.shape, generator=generator) if one else torch.randn(p.shape, generator=generator)
            p.copy_(rounded(0.5 + random if one else 0.15 * random))
    return model.eval()


def write_checkpoint(model, folder):
    """`config.json` and `model.safetensors` under the names that the library's writer gives."""
    with tempfile.TemporaryDirectory() as written:
        model.save_pretrained(written)
        tensors, _ = store.read(pathlib.Path(written) / "model.safetensors")
        config = json.loads((pathlib.Path(written) / "config.json").read_text())
    folder.mkdir(parents=True, exist_ok=True)
    config["dtype"] = config["text_config"]["dtype"] = "float32"
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    data = store.encode(dict(sorted(tensors.items())), {"format": "pt"}, lambda _: "BF16")
    (folder / "model.safetensors").write_bytes(data)


def load(folder):
    """The library's model of a folder, quantized or not."""
    config = json.loads((folder / "config.json").read_text())
    tensors = store.read_folder(folder)
    # The decoder of bundled models is a link to the file of the model for text alone.
    text = "model.language_model."
    inside = (text, "model.vision", "model.embed_vision", "model.visual", "mtp.", "lm_head.")
    tensors = {n if n.startswith(inside) else n.replace("model.", text, 1): a for n, a in tensors.items()}
    for name, a in tensors.items():
        if name.endswith("patch_embed.proj.weight"):
            tensors[name] = a.reshape(len(a), 3, 2, 16, 16)
    with tempfile.TemporaryDirectory() as plain:
        plain = pathlib.Path(plain)
        config = {k: v for k, v in config.items() if not k.startswith("quantization")}
        (plain / "config.json").write_text(json.dumps(config))
        (plain / "model.safetensors").write_bytes(store.encode(tensors, {"format": "pt"}))
        family = getattr(transformers, config["architectures"][0])
        model, info = family.from_pretrained(plain, dtype=torch.float32, output_loading_info=True)
    strange = [k for k in info["unexpected_keys"] if not k.startswith("mtp.")]
    missing = [k for k in info["missing_keys"] if k != "lm_head.weight"]
    if strange or missing:
        sys.exit(f"vision.py: {folder.name}: unexpected {strange[:4]}, missing {missing[:4]}")
    for module in model.modules():
        if config.get("dtype") == "bfloat16" and hasattr(module, "embed_scale"):
            # Run in bf16, as such a file is meant to, the library rounds the factor.
            module.embed_scale.copy_(module.embed_scale.to(torch.bfloat16))
    return model.eval()


SEEDED = ["gemma4-vision-clipped", "gemma4-vision-standard", "gemma4-unified"]
BUNDLED = ["tiny-gemma4-vision", "tiny-qwen3.5-vision"]


def keep_or_check(name, made, check):
    """Writes a file of arrays, or compares it with what is there."""
    file = HERE / "outputs" / f"{name}.safetensors"
    if not check:
        metadata = {"made_by": f"transformers {transformers.__version__} in float32"}
        file.write_bytes(store.encode(made, metadata))
        print(f"{name}: {len(made)} arrays, {file.stat().st_size} bytes")
        return
    stored, _ = store.read(file)
    for key, a in made.items():
        worst = np.abs(stored[key] - a).max() / max(1, np.abs(a).max())
        if stored[key].shape != a.shape or worst > CHECK_TOLERANCE:
            sys.exit(f"vision.py: {name}: {key} differs by {worst:.1e}")
    print(f"{name}: {len(made)} arrays agree")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare with what is here")
    parser.add_argument("--models", type=pathlib.Path, default=HERE.parent.parent / "models")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    for name in SEEDED + BUNDLED:
        folder = args.models / name
        if name in SEEDED:
            folder = HERE / "checkpoints" / name
            if not args.check:
                write_checkpoint(seeded(name), folder)
        model = load(folder)
        keep_or_check(f"vision-{name}", outputs(model), args.check)
        if name in BUNDLED:
            keep_or_check(f"video-{name}", video_outputs(folder, model), args.check)


if __name__ == "__main__":
    main()
