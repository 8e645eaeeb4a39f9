"""The transformers library, run on the written checkpoints, giving the same names as `reference.py`.

Three things of release 5.23 have to be worked around, each where it happens: it rejects an assistant whose layers all
share K/V, it exports no K/V for a target without K/V sharing, and its assistant sees `W + 1` keys of a sliding layer.
"""

import contextlib
import re
import types

import numpy as np
import torch
import transformers
from transformers import DynamicCache, Gemma4TextConfig, Gemma4UnifiedTextConfig
from transformers.modeling_layers import MtpModel
from transformers.models.gemma4 import modeling_gemma4
from transformers.models.gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.qwen3_5 import modeling_qwen3_5
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe

torch.set_grad_enabled(False)
# Two busy-waiting threads on a loaded machine are ten times slower than one; the models are too small to gain.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
VERSION = transformers.__version__


def array(tensor):
    return tensor.detach().float().numpy().astype(np.float64)


def rows(tensor):
    """[1, heads, T, d] -> [T, heads·d]"""
    return array(tensor[0].transpose(0, 1).reshape(tensor.shape[2], -1))


@contextlib.contextmanager
def watch(model, trace):
    """Fills `trace` with the intermediates of every decoder layer that runs inside."""
    undo = []
    layer_of = {}

    def hook(module, name, pick=lambda output: output):
        def note(module, inputs, output):
            value = pick(output)
            trace[name] = array(value[0] if value.dim() == 3 else value)

        undo.append(module.register_forward_hook(note).remove)

    for i, layer in enumerate(model.layers):
        pre = f"layers.{i}."
        if hasattr(layer, "self_attn"):
            layer_of[layer.self_attn] = pre
            hook(layer.self_attn, pre + "attn_out", lambda output: output[0])
        else:
            hook(layer.linear_attn, pre + "attn_out")

            def before_norm(module, inputs, pre=pre, heads=layer.linear_attn.num_v_heads):
                trace[pre + "delta"] = array(inputs[0].reshape(-1, heads * inputs[0].shape[-1]))

            undo.append(layer.linear_attn.norm.register_forward_pre_hook(before_norm).remove)
        hook(layer.mlp, pre + "mlp_out", lambda output: output[0] if isinstance(output, tuple) else output)
        if getattr(layer, "enable_moe_block", False):
            hook(layer.experts, pre + "moe_out")
            hook(layer.router, pre + "moe_weights", lambda output: output[1])
            hook(layer.router, pre + "moe_ids", lambda output: output[2])
        if hasattr(layer.mlp, "shared_expert"):
            hook(layer.mlp.gate, pre + "moe_weights", lambda output: output[1])
            hook(layer.mlp.gate, pre + "moe_ids", lambda output: output[2])
        if hasattr(layer, "per_layer_projection"):
            hook(layer.per_layer_projection, pre + "ple_out")
        hook(layer, pre + "out", lambda output: output[0] if isinstance(output, tuple) else output)

    def wrap(module, name, before):
        original = getattr(module, name)

        def wrapped(*args, **kwargs):
            output = original(*args, **kwargs)
            before(args, kwargs, output)
            return output

        setattr(module, name, wrapped)
        undo.append(lambda: setattr(module, name, original))

    def note_attention(args, kwargs, output):
        module, q, k, v = args[:4]
        pre = layer_of.get(module)
        if pre is not None:
            trace[pre + "q"] = rows(q)
            if not getattr(module, "is_kv_shared_layer", False):
                trace[pre + "k"], trace[pre + "v"] = rows(k), rows(v)

    def note_conv(args, kwargs, output):
        done = sum(name.endswith(".conv") for name in trace)
        i = [i for i, layer in enumerate(model.layers) if hasattr(layer, "linear_attn")][done]
        trace[f"layers.{i}.conv"] = array(output[0].T)

    for module in (modeling_gemma4, modeling_qwen3_5, modeling_qwen3_5_moe):
        wrap(module, "eager_attention_forward", note_attention)
        if hasattr(module, "causal_conv1d_fn"):
            wrap(module, "causal_conv1d_fn", note_conv)
    try:
        yield
    finally:
        for step in reversed(undo):
            step()


def load(folder, cls=None):
    """The library's model of a folder; refuses a layout that leaves text weights unset or unread."""
    with kv_exported():
        cls = cls or getattr(transformers, transformers.AutoConfig.from_pretrained(folder).architectures[0])
        model, info = cls.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    vision = re.compile(r"visual|vision")
    left = [n for n in info["missing_keys"] if not vision.search(n)]
    extra = [n for n in info["unexpected_keys"] if not n.startswith("mtp.") and not vision.search(n)]
    wrong = list(info["mismatched_keys"])
    if left or extra or wrong:
        raise ValueError(f"{folder.name}: not read as meant: missing {left}, unexpected {extra}, mismatched {wrong}")
    stored = getattr(transformers.AutoConfig.from_pretrained(folder), "dtype", None)
    for module in model.modules():
        if stored == torch.bfloat16 and hasattr(module, "embed_scale"):
            # Run in bf16, as such a file is meant to, the library rounds the factor; in float32 it does not.
            module.embed_scale.copy_(module.embed_scale.to(torch.bfloat16))
    return model.eval()


@contextlib.contextmanager
def kv_exported():
    """Lets a layer stack share all its K/V, and a target without sharing export its last K/V of each type."""
    classes = Gemma4TextConfig, Gemma4UnifiedTextConfig
    originals = [cls.kv_sharing_modes for cls in classes]

    def modes(self):
        n, shared = self.num_hidden_layers, self.num_kv_shared_layers
        if shared == n:
            return ["reuse"] * n
        out = [None if i < n - shared else "reuse" for i in range(n)]
        for kind in set(self.layer_types):
            out[max(i for i in range(n - shared) if self.layer_types[i] == kind)] = "store"
        return out

    for cls in classes:
        cls.kv_sharing_modes = property(modes)
    try:
        yield
    finally:
        for cls, original in zip(classes, originals):
            cls.kv_sharing_modes = original


def target(model, tokens):
    """All intermediates of one forward over `tokens`."""
    trace = {}
    decoder = model.get_decoder()
    ids = torch.tensor([list(map(int, tokens))])
    gemma = hasattr(decoder.layers[0], "layer_scalar")
    hooks = []
    for i, layer in enumerate(decoder.layers):
        def take(module, args, kwargs, i=i):
            if i == 0:
                trace["embed"] = array(args[0][0])
            if gemma and decoder.hidden_size_per_layer_input:
                trace.setdefault("ple", []).append(array(args[1][0]))
        hooks.append(layer.register_forward_pre_hook(take, with_kwargs=True))
    cache = DynamicCache(config=model.config)
    kwargs = {"return_shared_kv_states": True} if gemma else {}
    with watch(decoder, trace):
        out = model(ids, past_key_values=cache, use_cache=True, output_hidden_states=True, **kwargs)
    for hook in hooks:
        hook.remove()
    if "ple" in trace:
        trace["ple"] = np.concatenate(trace["ple"], -1)
    trace["hidden"], trace["logits"] = array(out.hidden_states[-1][0]), array(out.logits[0])
    for i, layer in enumerate(decoder.layers):
        if hasattr(layer, "linear_attn"):
            trace[f"layers.{i}.state"] = array(cache.get_recurrent_state(i, state_idx=0)[0])
            n_old = layer.linear_attn.conv_kernel_size - 1
            trace[f"layers.{i}.conv_state"] = array(cache.get_conv_state(i, state_idx=0)[0].T[-n_old:])
    return trace, out


def logits(model, tokens):
    """Logits of one uncached forward."""
    out = model(torch.tensor([list(map(int, tokens))]), use_cache=False, output_hidden_states=True)
    return array(out.logits[0]), array(out.hidden_states[-1][0])


def assistant(model, drafter, tokens, bonus, n_steps):
    """Greedy drafts after `tokens` and `bonus`: a trace for each step."""
    _, out = target(model, tokens)
    kv, n = out.shared_kv_states, len(tokens)
    hidden, token = out.hidden_states[-1][:, -1:], torch.tensor([[bonus]])
    window = drafter.config.text_config.sliding_window

    def masks(inputs_embeds, attention_mask, shared_kv_states):
        """Keys `k > n - W` in sliding layers; the library's own mask keeps two more."""
        keys = torch.arange(n)
        out = {}
        for kind, visible in (("full_attention", keys >= 0), ("sliding_attention", keys > n - window)):
            out[kind] = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None, None]
        return out

    drafter.create_attention_masks = masks
    steps = []
    for _ in range(n_steps):
        trace = {}
        with watch(drafter.model, trace):
            step = drafter(
                inputs_embeds=torch.cat([model.get_input_embeddings()(token), hidden], -1),
                position_ids=torch.tensor([[n]]),
                shared_kv_states=kv,
                use_cache=False,
            )
        token, hidden = step.logits.argmax(-1), step.last_hidden_state
        trace |= {"logits": array(step.logits[0, 0]), "hidden": array(hidden[0, 0]), "token": np.array([int(token)])}
        steps.append(trace)
    return steps


MTP_NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "post_norm.",
}


def mtp_head(model, weights, n=1):
    """The library's generic MTP module with the `mtp.*` tensors (fused experts) of a head of `n` layers."""
    text = model.config.get_text_config()
    text.num_mtp_layers, text.mtp_layer_types = n, ["full_attention"] * n
    head = MtpModel(model, n).eval()
    head.config._attn_implementation = "eager"
    for i, layer in enumerate(head.layers):
        renamed = {}
        for name, values in weights.items():
            for ours, theirs in (MTP_NAMES | {f"mtp.layers.{i}.": "mtp_block."}).items():
                if name.startswith(ours):
                    renamed[name.replace(ours, theirs, 1)] = torch.from_numpy(np.array(values, np.float32))
        layer.load_state_dict(renamed, strict=True)
    return head


def mtp(head, tokens, hidden, positions):
    """Intermediates of the head's rows: row r from `tokens[r]` and the hidden `hidden[r]` of the position before."""
    trace, layer = {}, head.layers[0]
    embed = lambda module, inputs, output: trace.update(embed=array(output[0]))
    hook = layer.eh_proj.register_forward_hook(embed)
    with watch(types.SimpleNamespace(layers=[layer.mtp_block]), trace):
        out = head.forward_layer(0, hidden[None], torch.tensor([positions]), None, input_ids=torch.tensor([tokens]))
    hook.remove()
    return trace | {"hidden": array(out[0]), "logits": array(head.shared_head(out)[0])}
