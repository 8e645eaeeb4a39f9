"""Golden files of the sound towers: `python tests/golden/audio.py [--check]`.

Sounds of samples that a formula gives go through the library's own feature extractors, towers and language models, in
float32 (features in float64, rounded at the end): what is stored is theirs, rounded nowhere else.

    sample[i] = ((7 i i + 13 i + 50 k) mod 1009 / 1009 - 1/2) (i // 1600 mod 5) / 4        k the number of the sound

A prompt is text, a sound, text, a second sound, text; the library's processor has padded the shorter sound. A model that
sees has a picture of `vision.py` after them.
"""

import argparse
import pathlib
import sys

import numpy as np
import torch
import transformers as t

import store
import vision

HERE = pathlib.Path(__file__).resolve().parent
FRAMES = 8  # of this many frames one is stored with its features


def samples(n, number):
    i = np.arange(n)
    return ((7 * i * i + 13 * i + 50 * number) % 1009 / 1009 - 0.5) * (i // 1600 % 5) / 4


TOKENS = vision.TOKENS | dict(boa_token_id=22, eoa_token_index=23)
AUDIO = dict(
    hidden_size=16, num_hidden_layers=2, num_attention_heads=2, subsampling_conv_channels=[128, 2], output_proj_dims=24,
)
TEXT = vision.TEXT | dict(intermediate_size=12, num_attention_heads=2, global_head_dim=24)
SMALL = vision.SMALL | dict(num_hidden_layers=3, num_kv_shared_layers=1, hidden_size_per_layer_input=4)
SMALL["layer_types"] = ["sliding_attention", "full_attention", "full_attention"]
LARGE = vision.LARGE | dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])


def seeded(name):
    """The library's model of a seeded variant, its values rounded to bf16."""
    rope = {"rope_parameters": {key: dict(value) for key, value in vision.ROPE.items()}}
    if name == "gemma4-audio":
        text = t.Gemma4TextConfig(**TEXT, **SMALL, **rope)
        audio = t.Gemma4AudioConfig(**AUDIO)
        config = t.Gemma4Config(text_config=text, vision_config=None, audio_config=audio, **TOKENS)
        model = t.Gemma4ForConditionalGeneration(config)
    else:
        from transformers.models.gemma4_unified import Gemma4UnifiedAudioConfig, Gemma4UnifiedVisionConfig

        text = t.Gemma4UnifiedTextConfig(**TEXT, **LARGE, **rope)
        pictures = Gemma4UnifiedVisionConfig(
            mm_embed_dim=16, output_proj_dims=16, mm_posemb_size=16, patch_size=2, pooling_kernel_size=3
        )
        audio = Gemma4UnifiedAudioConfig(audio_embed_dim=64)
        config = t.Gemma4UnifiedConfig(text_config=text, vision_config=pictures, audio_config=audio, **TOKENS)
        model = t.Gemma4UnifiedForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(4)
    rounded = lambda x: x.to(torch.bfloat16).float()
    constant = ("inv_freq", "embed_scale", "inv_timescales", "softcap")
    for key, p in [*model.named_parameters(), *model.named_buffers()]:
        if key.endswith(("input_min", "output_min")):
            p.fill_(-1.5)
        elif key.endswith(("input_max", "output_max")):
            p.fill_(1.25)
        elif p.dtype.is_floating_point and not any(part in key for part in constant):
            one = p.ndim < 2
            random = torch.rand(p.shape, generator=generator) if one else torch.randn(p.shape, generator=generator)
            p.copy_(rounded(0.5 + random if one else 0.15 * random))
    return model.eval()


class Sounds:
    """Sounds of a model."""

    def __init__(self, model):
        self.model = model
        self.unified = "Unified" in type(model).__name__
        if self.unified:
            from transformers.models.gemma4_unified.feature_extraction_gemma4_unified import (
                Gemma4UnifiedAudioFeatureExtractor as Extractor,
            )

            size = model.config.audio_config.audio_embed_dim
            self.extractor = Extractor(feature_size=size, audio_samples_per_token=size)
            self.lengths = [1500, 450]
        else:
            self.extractor = t.Gemma4AudioFeatureExtractor()
            self.lengths = [20_877, 3_000]

    def features(self, sounds):
        made = self.extractor(sounds, return_tensors="np")
        return made["input_features"], made["input_features_mask"]

    def rows(self, sound, trace=None):
        features, mask = self.features([sound])
        hooks = []
        if trace is not None and not self.unified:
            trace["features"] = features[0][mask[0]][::FRAMES].astype(np.float32)
            tower = self.model.model.audio_tower
            hooks.append(vision.watch(tower.subsample_conv_projection, trace, "embed", lambda output: output[0]))
            hooks += vision.watch_ends(tower.layers, trace)
        features, mask = torch.tensor(features, dtype=torch.float32), torch.tensor(mask)
        made = self.model.model.get_audio_features(features, mask, return_dict=True)
        [hook.remove() for hook in hooks]
        n = int(made.attention_mask.sum())
        for name in trace or {}:
            if name != "features":
                trace[name] = trace[name][:n]
        return vision.array(made.pooler_output[0, :n])


def outputs(model):
    """The named arrays of a model's sounds and of its prompt."""
    family = Sounds(model)
    sounds = [samples(n, number) for number, n in enumerate(family.lengths)]
    made = {}
    for name, sound in zip("ab", sounds):
        trace = {} if name == "a" else None
        rows = family.rows(sound, trace)
        made |= {f"{name}.{key}": value for key, value in (trace or {}).items()}
        made[f"{name}.rows"] = rows
    rng, ids, kinds = np.random.RandomState(6), [], []
    config, more = model.config, {}

    def text(*tokens):
        ids.extend(tokens)
        kinds.extend([0] * len(tokens))

    for name in "ab":
        text(*rng.randint(30, 90, 5), config.boa_token_id)
        n = len(made[f"{name}.rows"])
        ids += [config.audio_token_id] * n
        kinds += [3] * n
        text(config.eoa_token_index)
    if family.unified:
        pictures = vision.Gemma(model)
        frame = vision.pixels(1, 2 * pictures.side, 3 * pictures.side)
        made["picture.rows"] = pictures.rows(frame)
        text(*rng.randint(30, 90, 3), config.boi_token_id)
        ids += [config.image_token_id] * 6
        kinds += [1] * 6
        text(config.eoi_token_id)
        cut, places = pictures.patches(frame[0])
        more = dict(pixel_values=cut, image_position_ids=places)
    text(*rng.randint(30, 90, 4))
    features, mask = family.features(sounds)
    logits = model(
        input_ids=torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([kinds]),
        input_features=torch.tensor(features, dtype=torch.float32),
        input_features_mask=torch.tensor(mask),
        **more,
    ).logits
    made["tokens"] = np.array(ids)
    made["logits"] = vision.array(logits[0, -vision.LAST :])
    return made


def load(folder):
    family = {"gemma4-audio": t.Gemma4ForConditionalGeneration}.get(folder.name)
    family = family or t.Gemma4UnifiedForConditionalGeneration
    model, info = family.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    wrong = [*info["unexpected_keys"], *(k for k in info["missing_keys"] if k != "lm_head.weight")]
    if wrong:
        sys.exit(f"audio.py: {folder.name}: {wrong[:4]}")
    return model.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare with what is here")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    for name in ["gemma4-audio", "gemma4-unified-audio"]:
        folder = HERE / "checkpoints" / name
        if not args.check:
            vision.write_checkpoint(seeded(name), folder)
        made = outputs(load(folder))
        file = HERE / "outputs" / f"{name}.safetensors"
        if not args.check:
            metadata = {"made_by": f"transformers {t.__version__} in float32"}
            file.write_bytes(store.encode(made, metadata))
            print(f"{name}: {len(made)} arrays, {file.stat().st_size} bytes")
            continue
        stored, _ = store.read(file)
        for key, a in made.items():
            worst = np.abs(stored[key] - a).max() / max(1, np.abs(a).max())
            if stored[key].shape != a.shape or worst > vision.CHECK_TOLERANCE:
                sys.exit(f"audio.py: {name}: {key} differs by {worst:.1e}")
        print(f"{name}: {len(made)} arrays agree")


if __name__ == "__main__":
    main()
