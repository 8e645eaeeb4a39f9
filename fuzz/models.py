"""Writes models/NAME.json for the target `config`: configurations of models as small as can be, and their tensors' shapes.

    .venv/bin/python fuzz/models.py     # the environment of tests/golden/requirements.txt
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests/golden"))
import checkpoints as cp

# What no loader reads: an edit of it is an edit lost.
UNREAD = (
    "attention_bias", "attention_dropout", "bos_token_id", "dtype", "eos_token_id", "hidden_act", "hidden_activation",
    "initializer_range", "mamba_ssm_dtype", "mrope_interleaved", "mrope_section", "mtp_use_dedicated_embeddings",
    "pad_token_id", "use_cache",
)  # fmt: skip

GEMMA = cp.gemma4_config(
    vocab_size=6,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=2,
    layer_types=[cp.SLIDING, cp.FULL],
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=2,
    global_head_dim=4,
)
MIXTURE = GEMMA | dict(enable_moe_block=True, num_experts=2, top_k_experts=1, moe_intermediate_size=2)
SHARED = GEMMA | dict(
    num_hidden_layers=4,
    layer_types=[cp.SLIDING, cp.FULL] * 2,
    num_kv_shared_layers=2,
    use_double_wide_mlp=True,
    hidden_size_per_layer_input=2,
    vocab_size_per_layer_input=6,
)
ASSISTANT = cp.assistant_config(SHARED, use_ordered_embeddings=True, num_centroids=2, centroid_intermediate_top_k=1)
ASSISTANT["text_config"] |= dict(hidden_size=2, intermediate_size=2, num_hidden_layers=2, layer_types=[cp.SLIDING, cp.FULL])
ASSISTANT["text_config"] |= dict(num_kv_shared_layers=2)
QWEN = cp.qwen3_5_config(
    vocab_size=6,
    hidden_size=4,
    intermediate_size=4,
    num_hidden_layers=2,
    layer_types=[cp.LINEAR, cp.FULL],
    full_attention_interval=2,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=2,
    linear_value_head_dim=2,
)
QWEN_MIXTURE = QWEN | dict(
    architectures=["Qwen3_5MoeForCausalLM"],
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=2,
    shared_expert_intermediate_size=2,
)
LAYER = dict(hidden_size=4, intermediate_size=4, head_dim=2, num_attention_heads=2, num_key_value_heads=1)
EAGLE3 = cp.eagle3_config(GEMMA, [0, 1, 2], 4, layers=LAYER)

MODELS = {
    "gemma4-moe": (MIXTURE, cp.gemma4_shapes(MIXTURE)),
    "gemma4-ple": (SHARED, cp.gemma4_shapes(SHARED)),
    "gemma4-assistant": (ASSISTANT, cp.assistant_shapes(ASSISTANT)),
    "qwen3_5": (QWEN, cp.qwen3_5_shapes(QWEN)),
    "qwen3_5-moe": (QWEN_MIXTURE, cp.qwen3_5_shapes(QWEN_MIXTURE)),
    "eagle3": (EAGLE3, cp.eagle3_shapes(EAGLE3, True) | {"d2t": (4,)}),
}


def without(config, names):
    if not isinstance(config, dict):
        return config
    return {k: without(v, names) for k, v in config.items() if k not in names and v is not None}


(HERE / "models").mkdir(exist_ok=True)
for name, (config, shapes) in MODELS.items():
    model = {"config": without(config, UNREAD), "tensors": shapes}
    (HERE / "models" / f"{name}.json").write_text(json.dumps(model, separators=(",", ":")) + "\n")
