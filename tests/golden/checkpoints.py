"""The tiny checkpoints: configurations, seeded weights, file layouts.

Every parameter is random, norms and scalars included, so that no term of an equation can hide behind a one or a zero.
A tensor's values depend on the checkpoint's seed and the tensor's name only, and are rounded to the type it is stored in:
adding a tensor changes no other, and whoever computes does so from exactly what the file holds.
"""

import json
import zlib

import numpy as np

import reference
import store

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"

# `dtype` of a configuration -> what its floats are stored as.
STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Beside bf16, the published files of Qwen 3.5 hold these in f32; those of Qwen 3.6 do not.
ALWAYS_WIDE = ("linear_attn.A_log", "linear_attn.norm.weight")

GEMMA_ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}


def gemma4_config(**changes):
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "dtype": "bfloat16",
        "vocab_size": 101,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "layer_types": [SLIDING, SLIDING, FULL, SLIDING, FULL],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_global_key_value_heads": 1,
        "head_dim": 16,
        "global_head_dim": 32,
        "sliding_window": 8,
        "attention_k_eq_v": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_kv_shared_layers": 0,
        "use_double_wide_mlp": False,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "enable_moe_block": False,
        "num_experts": None,
        "top_k_experts": None,
        "moe_intermediate_size": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": GEMMA_ROPE,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        # Small, so that leaving the softcap out is visible: random weights do not reach logits near 30.
        "final_logit_softcapping": 3.0,
        "use_bidirectional_attention": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    } | changes


def assistant_config(target, **changes):
    """A drafter whose K/V geometry is the target's and whose own widths are not."""
    return {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "dtype": "bfloat16",
        "backbone_hidden_size": target["hidden_size"],
        "use_ordered_embeddings": False,
        "tie_word_embeddings": True,
        "text_config": target
        | {
            "architectures": None,
            "dtype": "bfloat16",
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "layer_types": [SLIDING, SLIDING, SLIDING, FULL],
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 0,
            "final_logit_softcapping": None,
        },
    } | changes


def qwen3_5_config(**changes):
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
        "full_attention_interval": 4,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "attn_output_gate": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
        "mamba_ssm_dtype": "float32",
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": False,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": 1,
        "pad_token_id": None,
    } | changes


def eagle3_config(target, taps, n_draft, model_type="llama", layers=None, **changes):
    """An EAGLE-3 head in the layout of the speculators package; `layers` changes its layers' part."""
    n_layers = (layers or {}).get("num_hidden_layers", 1)
    qwen = {"layer_types": [FULL] * n_layers, "sliding_window": None, "use_sliding_window": False}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "draft_vocab_size": n_draft,
        "eagle_aux_hidden_state_layer_ids": taps,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
            ],
            "verifier": {"name_or_path": None, "architectures": target["architectures"]},
        },
        "transformer_layer_config": {
            "model_type": model_type,
            "vocab_size": target["vocab_size"],
            "hidden_size": target["hidden_size"],
            "intermediate_size": 48,
            "num_hidden_layers": n_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "hidden_act": "silu",
            "attention_bias": False,
            "rms_norm_eps": 1e-06,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "max_position_embeddings": 4096,
            "tie_word_embeddings": False,
            "pad_token_id": 0,
        }
        | (qwen if model_type == "qwen3" else {"mlp_bias": False})
        | (layers or {}),
    } | changes


GEMMA_DENSE = gemma4_config(dtype="float32")
GEMMA_PLE = gemma4_config(
    vocab_size=96,
    intermediate_size=32,
    num_key_value_heads=1,
    num_global_key_value_heads=None,
    attention_k_eq_v=False,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=96,
    final_logit_softcapping=5.0,
)
GEMMA_MOE = gemma4_config(
    dtype="float32",
    num_hidden_layers=3,
    layer_types=[SLIDING, SLIDING, FULL],
    intermediate_size=32,
    enable_moe_block=True,
    num_experts=6,
    top_k_experts=2,
    moe_intermediate_size=16,
    final_logit_softcapping=30.0,
)
QWEN_DENSE = qwen3_5_config()
QWEN_MOE = qwen3_5_config(
    architectures=["Qwen3_5MoeForCausalLM"],
    model_type="qwen3_5_moe_text",
    vocab_size=64,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=16,
    linear_num_value_heads=4,
    norm_topk_prob=True,
)
del QWEN_MOE["intermediate_size"]


# ---- shapes ----


def gemma4_shapes(c, owns_kv=True):
    """Tensor names (text-only naming) and shapes. `owns_kv=False`: an assistant, whose layers have queries only."""
    H, I, V, P = c["hidden_size"], c["intermediate_size"], c["vocab_size"], c["hidden_size_per_layer_input"]
    L, heads = c["num_hidden_layers"], c["num_attention_heads"]
    s = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    if P:
        s["model.embed_tokens_per_layer.weight"] = (c["vocab_size_per_layer_input"], L * P)
        s["model.per_layer_model_projection.weight"] = (L * P, H)
        s["model.per_layer_projection_norm.weight"] = (P,)
    for i in range(L):
        pre = f"model.layers.{i}."
        full, d, n_kv = reference.gemma4_geometry(c, i)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            s[f"{pre}{name}_layernorm.weight"] = (H,)
        s[pre + "self_attn.q_proj.weight"] = (heads * d, H)
        s[pre + "self_attn.q_norm.weight"] = (d,)
        s[pre + "self_attn.o_proj.weight"] = (H, heads * d)
        if owns_kv:  # K/V tensors of layers that share another's are in released files too: dead weight
            s[pre + "self_attn.k_proj.weight"] = (n_kv * d, H)
            s[pre + "self_attn.k_norm.weight"] = (d,)
            if not (full and c["attention_k_eq_v"]):
                s[pre + "self_attn.v_proj.weight"] = (n_kv * d, H)
        wide = I * (2 if c["use_double_wide_mlp"] and i >= L - c["num_kv_shared_layers"] else 1)
        s[pre + "mlp.gate_proj.weight"] = s[pre + "mlp.up_proj.weight"] = (wide, H)
        s[pre + "mlp.down_proj.weight"] = (H, wide)
        s[pre + "layer_scalar"] = (1,)
        if P:
            s[pre + "per_layer_input_gate.weight"] = (P, H)
            s[pre + "per_layer_projection.weight"] = (H, P)
            s[pre + "post_per_layer_input_norm.weight"] = (H,)
        if c["enable_moe_block"]:
            E, width = c["num_experts"], c["moe_intermediate_size"]
            s[pre + "router.proj.weight"] = (E, H)
            s[pre + "router.scale"] = (H,)
            s[pre + "router.per_expert_scale"] = (E,)
            s[pre + "experts.gate_up_proj"] = (E, 2 * width, H)
            s[pre + "experts.down_proj"] = (E, H, width)
            for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2"):
                s[f"{pre}{name}.weight"] = (H,)
    return s


def assistant_shapes(c):
    t, B = c["text_config"], c["backbone_hidden_size"]
    H = t["hidden_size"]
    s = {"pre_projection.weight": (H, 2 * B), "post_projection.weight": (B, H)} | gemma4_shapes(t, owns_kv=False)
    if c["use_ordered_embeddings"]:
        s["masked_embedding.centroids.weight"] = (c["num_centroids"], H)
        s["masked_embedding.token_ordering"] = (t["vocab_size"],)
    return s


def qwen3_5_shapes(c):
    H, V = c["hidden_size"], c["vocab_size"]
    nk, nv, dk, dv = reference.delta_geometry(c)
    C, d, heads, n_kv = 2 * nk * dk + nv * dv, c["head_dim"], c["num_attention_heads"], c["num_key_value_heads"]

    def layer(pre, kind):
        s = {pre + "input_layernorm.weight": (H,), pre + "post_attention_layernorm.weight": (H,)}
        if kind == LINEAR:
            s |= {
                pre + "linear_attn.in_proj_qkv.weight": (C, H),
                pre + "linear_attn.in_proj_z.weight": (nv * dv, H),
                pre + "linear_attn.in_proj_b.weight": (nv, H),
                pre + "linear_attn.in_proj_a.weight": (nv, H),
                pre + "linear_attn.conv1d.weight": (C, 1, c["linear_conv_kernel_dim"]),
                pre + "linear_attn.A_log": (nv,),
                pre + "linear_attn.dt_bias": (nv,),
                pre + "linear_attn.norm.weight": (dv,),
                pre + "linear_attn.out_proj.weight": (H, nv * dv),
            }
        else:
            s |= {
                pre + "self_attn.q_proj.weight": (2 * heads * d, H),
                pre + "self_attn.k_proj.weight": (n_kv * d, H),
                pre + "self_attn.v_proj.weight": (n_kv * d, H),
                pre + "self_attn.o_proj.weight": (H, heads * d),
                pre + "self_attn.q_norm.weight": (d,),
                pre + "self_attn.k_norm.weight": (d,),
            }
        if c.get("num_experts"):
            E, I, shared = c["num_experts"], c["moe_intermediate_size"], c["shared_expert_intermediate_size"]
            return s | {
                pre + "mlp.gate.weight": (E, H),
                pre + "mlp.experts.gate_up_proj": (E, 2 * I, H),
                pre + "mlp.experts.down_proj": (E, H, I),
                pre + "mlp.shared_expert.gate_proj.weight": (shared, H),
                pre + "mlp.shared_expert.up_proj.weight": (shared, H),
                pre + "mlp.shared_expert.down_proj.weight": (H, shared),
                pre + "mlp.shared_expert_gate.weight": (1, H),
            }
        I = c["intermediate_size"]
        return s | {
            pre + "mlp.gate_proj.weight": (I, H),
            pre + "mlp.up_proj.weight": (I, H),
            pre + "mlp.down_proj.weight": (H, I),
        }

    s = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
    if not c["tie_word_embeddings"]:
        s["lm_head.weight"] = (V, H)
    for i, kind in enumerate(c["layer_types"]):
        s |= layer(f"model.layers.{i}.", kind)
    if c["mtp_num_hidden_layers"]:
        s |= {f"mtp.{name}.weight": (H,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
        s |= {"mtp.fc.weight": (H, 2 * H)} | layer("mtp.layers.0.", FULL)
    return s


def eagle3_shapes(c, own_embeddings):
    t, A = c["transformer_layer_config"], len(c["eagle_aux_hidden_state_layer_ids"] or range(3))
    H, I, d = t["hidden_size"], t["intermediate_size"], t["head_dim"]
    s = {"embed_tokens.weight": (t["vocab_size"], H)} if own_embeddings else {}
    s |= {"fc.weight": (H, A * H), "norm.weight": (H,), "lm_head.weight": (c["draft_vocab_size"], H)}
    s["layers.0.hidden_norm.weight"] = (H,)
    if c["norm_before_fc"]:
        s["input_norm.weight"] = (A * H,)
    if c["fc_norm"]:
        s |= {f"fc_norm.{j}.weight": (H,) for j in range(A)}
    for i in range(t["num_hidden_layers"]):
        pre, width = f"layers.{i}.", H if i else 2 * H
        for name, heads in (("q", "attention"), ("k", "key_value"), ("v", "key_value")):
            s[f"{pre}self_attn.{name}_proj.weight"] = (t[f"num_{heads}_heads"] * d, width)
        s[pre + "self_attn.o_proj.weight"] = (H, t["num_attention_heads"] * d)
        if t["model_type"] == "qwen3":
            s[pre + "self_attn.q_norm.weight"] = s[pre + "self_attn.k_norm.weight"] = (d,)
        s[pre + "input_layernorm.weight"] = s[pre + "post_attention_layernorm.weight"] = (H,)
        s[pre + "mlp.gate_proj.weight"] = s[pre + "mlp.up_proj.weight"] = (I, H)
        s[pre + "mlp.down_proj.weight"] = (H, I)
    return s


def tapped(c, target):
    """The layers of the target whose entering rows the head reads: early, middle and late if it does not say."""
    n = target["num_hidden_layers"]
    return c["eagle_aux_hidden_state_layer_ids"] or [2, n // 2, n - 3]


def draft_vocabulary(c, seed):
    """Which of the target's tokens the head drafts, both ways; nothing if it drafts them all."""
    n, V = c["draft_vocab_size"], c["transformer_layer_config"]["vocab_size"]
    if n == V:
        return {}
    ids = np.sort(np.random.RandomState(seed).permutation(V)[:n])
    return {"d2t": (ids - np.arange(n)).astype(np.int64), "t2d": np.isin(np.arange(V), ids)}


# ---- values ----


def draw(family, name, shape, seed):
    """Seeded values of one tensor. `RandomState` because its stream is frozen for good."""
    random = np.random.RandomState((zlib.crc32(name.encode()) ^ (seed * 0x9E3779B1)) & 0xFFFFFFFF)
    uniform = lambda low, high: random.uniform(low, high, shape)
    if name.endswith("token_ordering"):
        return random.permutation(shape[0]).astype(np.int64)
    if name.endswith(("A_log", "dt_bias")):
        value = uniform(-1.5, 1.5)
    elif name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
        value = uniform(0.5, 1.5)
    elif family == "qwen3_5" and name.endswith("norm.weight") and "linear_attn" not in name or "pre_fc_norm" in name:
        value = random.standard_normal(shape) * 0.3  # offset norms, stored around zero
    elif family == "gemma4" and name.endswith(("q_norm.weight", "k_norm.weight")):
        value = uniform(0.3, 1.1)  # the scores have no 1/√d: keep the softmax from saturating
    elif len(shape) == 1:
        value = uniform(0.5, 1.5)
    elif "embed_tokens" in name or name.startswith("lm_head"):
        value = random.standard_normal(shape) * (0.35 if family == "gemma4" else 1.0)
    elif name.endswith("conv1d.weight"):
        value = random.standard_normal(shape) * 1.5  # large: the norm of a delta output near 0 is ill-conditioned
    elif name.endswith("router.proj.weight"):
        value = random.standard_normal(shape)  # its input is scaled by 1/√H
    else:
        value = random.standard_normal(shape) * 1.3 / np.sqrt(shape[-1])
    return value.astype(np.float32)


def stored(dtype, name):
    """What a checkpoint of this `dtype` stores the floats of `name` as."""
    return "F32" if name.endswith(ALWAYS_WIDE) else STORED[dtype]


def weights(family, shapes, seed, dtype="float32"):
    """name -> float32 values, each as a checkpoint of this `dtype` stores it."""
    values = {name: draw(family, name, shape, seed) for name, shape in shapes.items()}
    return {n: a if a.dtype.kind == "i" else store.rounded(a, stored(dtype, n)) for n, a in values.items()}


# ---- layouts ----


def text_bytes(value):
    return (json.dumps(value, indent=2) + "\n").encode()


def generation_config(config):
    return {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if config.get(k) is not None}


def single_file(config, tensors, generation=None):
    """file name -> bytes of an unsharded folder, floats in the `dtype` of the configuration."""
    generation = generation_config(config) if generation is None else generation
    return {
        "config.json": text_bytes(config),
        "generation_config.json": text_bytes(generation),
        "model.safetensors": store.encode(tensors, {"format": "pt"}, lambda name: stored(config["dtype"], name)),
    }


def sharded(config, tensors, n_shards, generation):
    """In f32: `n_shards` files and an index, split by bytes as the library does: in order, when one is full."""
    files = {"config.json": text_bytes(config), "generation_config.json": text_bytes(generation)}
    total = sum(4 * array.size for array in tensors.values())
    shards, seen = [{} for _ in range(n_shards)], 0
    for name, array in tensors.items():
        shards[min(n_shards - 1, seen * n_shards // total)][name] = array
        seen += 4 * array.size
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = f"model-{i:05}-of-{n_shards:05}.safetensors"
        files[file] = store.encode(shard, {"format": "pt"})
        weight_map |= {name: file for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return files | {"model.safetensors.index.json": text_bytes(index)}


def multimodal_tensors(tensors, vision):
    """Text tensors under `model.language_model.`, beside the vision part; `mtp.*` and `lm_head` keep their names."""
    rename = lambda name: name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name
    return {rename(name): array for name, array in tensors.items()} | vision


def gemma4_multimodal(config, tensors, seed):
    """`Gemma4ForConditionalGeneration` in two shards, with the newer spelling of per-layer geometry."""
    dropped = ("architectures", "global_head_dim", "num_global_key_value_heads")
    text = {k: v for k, v in config.items() if k not in dropped}
    full = {"head_dim": config["global_head_dim"], "num_key_value_heads": config["num_global_key_value_heads"]}
    text["per_layer_config"] = {str(i): full for i, kind in enumerate(config["layer_types"]) if kind == FULL}
    vision = {
        "model_type": "gemma4_vision",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "pooling_kernel_size": 3,
        "patch_size": 4,
        "position_embedding_size": 16,
        "default_output_length": 4,
        "use_clipped_linears": False,
        "standardize": False,
    }
    top = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "dtype": "float32",
        "text_config": text,
        "vision_config": vision,
        "audio_config": None,
        "image_token_id": 94,
        "video_token_id": 95,
        "audio_token_id": 96,
        "boi_token_id": 97,
        "eoi_token_id": 98,
        "boa_token_id": 99,
        "eoa_token_index": 100,
        "eos_token_id": [1],
        "tie_word_embeddings": True,
    }
    stray = {
        "model.vision_tower.patch_embedder.input_proj.weight": (16, 48),
        "model.vision_tower.patch_embedder.position_embedding_table": (2, 16, 16),
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight": (16, 16),
        "model.embed_vision.embedding_projection.weight": (config["hidden_size"], 16),
    }
    tensors = multimodal_tensors(tensors, weights("gemma4", stray, seed))
    return sharded(top, tensors, 2, generation_config(config))


def qwen3_5_multimodal(config, tensors, seed):
    """`Qwen3_5ForConditionalGeneration` in one file of f32; `layer_types` left to `full_attention_interval`."""
    dropped = ("architectures", "layer_types")
    text = {k: v for k, v in config.items() if k not in dropped} | {"dtype": "float32"}
    vision = {
        "model_type": "qwen3_5_vision",
        "depth": 1,
        "hidden_size": 16,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 16,
        "num_heads": 1,
        "in_channels": 3,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": config["hidden_size"],
        "num_position_embeddings": 16,
    }
    top = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "dtype": "float32",
        "text_config": text,
        "vision_config": vision,
        "image_token_id": 93,
        "video_token_id": 94,
        "vision_start_token_id": 95,
        "vision_end_token_id": 96,
        "tie_word_embeddings": False,
    }
    stray = {
        "model.visual.patch_embed.proj.weight": (16, 3, 2, 4, 4),
        "model.visual.patch_embed.proj.bias": (16,),
        "model.visual.pos_embed.weight": (16, 16),
        "model.visual.blocks.0.norm1.weight": (16,),
    }
    tensors = multimodal_tensors(tensors, weights("qwen3_5", stray, seed))
    return single_file(top, tensors, generation=generation_config(config))


def split_mtp_experts(tensors):
    """Stores the MTP layer's experts one by one, as Qwen 3.5 releases do; the trunk's stay fused."""
    out = {}
    for name, array in tensors.items():
        pre, fused, kind = name.partition("experts.")
        if not (name.startswith("mtp.") and fused):
            out[name] = array
            continue
        for e, expert in enumerate(array):
            parts = {"down_proj": expert}
            if kind == "gate_up_proj":
                parts = dict(zip(("gate_proj", "up_proj"), np.split(expert, 2)))
            out |= {f"{pre}experts.{e}.{part}.weight": values for part, values in parts.items()}
    return out
