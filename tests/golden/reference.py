"""The equations of Gemma 4, its assistant drafter, Qwen 3.5, its MTP head and EAGLE-3, in float64 numpy.

One sequence, no batch, no speed. Written from the architecture specifications, not from library code; `oracle.py`
runs the library on the same weights and `make.py` asserts that every named intermediate agrees. float64 so that the
stored numbers carry no rounding of their own: whoever compares sees only their own error.

Letters: `T` rows of this step, `H` hidden size, `d` head size, `S` recurrent state. `W` maps tensor names (text-only
naming, `model.…`) to arrays; `trace` maps intermediate names to arrays and may be None.
"""

import numpy as np

import store


class Nowhere(dict):
    """A trace that forgets."""

    def __setitem__(self, name, value):
        pass


def rms(x, eps, w=1.0):
    """`x / sqrt(mean(x²) + eps) · w`"""
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * w


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def gelu(x):
    """The tanh form."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rope(x, positions, freqs):
    """Rotates pair (j, j + n) of the first 2n dims by `position · freqs[j]`; x: [T, heads, d]."""
    n = len(freqs)
    angle = positions[:, None, None] * freqs
    a, b = x[..., :n], x[..., n : 2 * n]
    turned = [a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)]
    return np.concatenate(turned + [x[..., 2 * n :]], -1)


def attend(q, k, v, visible, scale):
    """`softmax(q·kᵀ·scale + mask)·v`; q: [T, heads, d], k, v: [rows, n_kv, d], visible: [T, rows] -> [T, heads·d]"""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, 1), np.repeat(v, group, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) * scale
    p = softmax(np.where(visible, scores, -np.inf))
    return np.einsum("hqk,khd->qhd", p, v).reshape(len(q), -1)


MIN_TOP_K_GAP = 1e-4  # at the edge of a top-k whose indices are stored


def top_k(x, k):
    """Indices of the k largest, largest first; refuses to decide between near equals."""
    order = np.argsort(-x, -1, kind="stable")[..., : k + 1]
    best = np.take_along_axis(x, order, -1)
    if best.shape[-1] > k and np.min(best[..., k - 1] - best[..., k]) < MIN_TOP_K_GAP:
        raise ValueError("a top-k choice of this seed hangs on rounding, choose another")
    return order[..., :k]


def flat(x):
    return x.reshape(len(x), -1)


# ---- Gemma 4 ----


def gemma4_geometry(c, i):
    """(is full attention, head size, K/V heads) of layer i."""
    full = c["layer_types"][i] == "full_attention"
    n_kv = c["num_key_value_heads"]
    if full and c["attention_k_eq_v"] and c["num_global_key_value_heads"]:
        n_kv = c["num_global_key_value_heads"]
    return full, c["global_head_dim"] if full else c["head_dim"], n_kv


def gemma4_kv_source(c, i):
    """The layer whose K/V layer i reads: itself, or the last owner of its type."""
    owners = c["num_hidden_layers"] - c["num_kv_shared_layers"]
    if i < owners:
        return i
    return max(j for j in range(owners) if c["layer_types"][j] == c["layer_types"][i])


def gemma4_freqs(c, full, d):
    """Sliding: all pairs. Full: the first quarter; exponents run over the whole head size."""
    p = c["rope_parameters"]["full_attention" if full else "sliding_attention"]
    freqs = p["rope_theta"] ** (-2.0 * np.arange(d // 2) / d)
    if p["rope_type"] == "proportional":
        freqs[int(p["partial_rotary_factor"] * d // 2) :] = 0
    return freqs


def gemma4_mlp(W, pre, x):
    return (gelu(x @ W[pre + "gate_proj.weight"].T) * (x @ W[pre + "up_proj.weight"].T)) @ W[pre + "down_proj.weight"].T


def gemma4_experts(c, W, pre, x, trace):
    """Routed experts; both the router and the experts read the residual stream after attention."""
    eps, k, width = c["rms_norm_eps"], c["top_k_experts"], c["moe_intermediate_size"]
    routed = rms(x, eps) * W[pre + "router.scale"] * c["hidden_size"] ** -0.5
    p = softmax(routed @ W[pre + "router.proj.weight"].T)
    ids = top_k(p, k)
    w = np.take_along_axis(p, ids, -1)
    w = w / w.sum(-1, keepdims=True) * W[pre + "router.per_expert_scale"][ids]
    trace["moe_ids"], trace["moe_weights"] = ids, w
    h = rms(x, eps, W[pre + "pre_feedforward_layernorm_2.weight"])
    out = np.zeros_like(h)
    for t in range(len(h)):
        for e, share in zip(ids[t], w[t]):
            gate_up = W[pre + "experts.gate_up_proj"][e] @ h[t]
            out[t] += share * (W[pre + "experts.down_proj"][e] @ (gelu(gate_up[:width]) * gate_up[width:]))
    return out


class Layer(dict):
    """The part of a trace that belongs to one layer."""

    def __init__(self, trace, prefix):
        self.trace, self.prefix = trace, prefix

    def __setitem__(self, name, value):
        self.trace[self.prefix + name] = value


def embed_scale(c, width):
    """`√width`, rounded to the embedding's type as the library rounds it when it runs in that type."""
    scale = np.sqrt(width)
    return float(store.from_bf16(store.to_bf16(np.array([scale], np.float32)))[0]) if c.get("dtype") == "bfloat16" else scale


def gemma4(c, W, tokens, cache=None, trace=None):
    """Post-final-norm hidden rows [T, H] of `tokens`, which follow what `cache` (layer -> (K, V)) already holds."""
    trace = Nowhere() if trace is None else trace
    cache = {} if cache is None else cache
    eps, T, H, width = c["rms_norm_eps"], len(tokens), c["hidden_size"], c["hidden_size_per_layer_input"]
    first = len(cache[0][0]) if cache else 0
    at = np.arange(first, first + T)
    x = W["model.embed_tokens.weight"][tokens] * embed_scale(c, H)
    trace["embed"] = x
    if width:
        token = W["model.embed_tokens_per_layer.weight"][tokens] * embed_scale(c, width)
        context = (x @ W["model.per_layer_model_projection.weight"].T * H**-0.5).reshape(T, -1, width)
        context = rms(context, eps, W["model.per_layer_projection_norm.weight"])
        ple = (context + token.reshape(context.shape)) * 2**-0.5
        trace["ple"] = flat(ple)
    for i in range(c["num_hidden_layers"]):
        pre, note = f"model.layers.{i}.", Layer(trace, f"layers.{i}.")
        norm = lambda x, name: rms(x, eps, W[f"{pre}{name}.weight"])
        full, d, n_kv = gemma4_geometry(c, i)
        freqs, source = gemma4_freqs(c, full, d), gemma4_kv_source(c, i)
        h = norm(x, "input_layernorm")
        q = (h @ W[pre + "self_attn.q_proj.weight"].T).reshape(T, -1, d)
        q = rope(norm(q, "self_attn.q_norm"), at, freqs)
        note["q"] = flat(q)
        if source == i:
            raw_k = (h @ W[pre + "self_attn.k_proj.weight"].T).reshape(T, n_kv, d)
            raw_v = raw_k
            if not (full and c["attention_k_eq_v"]):
                raw_v = (h @ W[pre + "self_attn.v_proj.weight"].T).reshape(T, n_kv, d)
            k, v = rope(norm(raw_k, "self_attn.k_norm"), at, freqs), rms(raw_v, eps)
            note["k"], note["v"] = flat(k), flat(v)
            old = cache.get(i)
            cache[i] = (k, v) if old is None else (np.concatenate([old[0], k]), np.concatenate([old[1], v]))
        k, v = cache[source]
        keys = np.arange(len(k))
        visible = keys <= at[:, None]
        if not full:
            visible &= keys > at[:, None] - c["sliding_window"]
        a = attend(q, k, v, visible, 1.0) @ W[pre + "self_attn.o_proj.weight"].T
        note["attn_out"] = a
        x = x + norm(a, "post_attention_layernorm")
        m = gemma4_mlp(W, pre + "mlp.", norm(x, "pre_feedforward_layernorm"))
        note["mlp_out"] = m
        if c["enable_moe_block"]:
            y = gemma4_experts(c, W, pre, x, note)
            note["moe_out"] = y
            m = norm(m, "post_feedforward_layernorm_1") + norm(y, "post_feedforward_layernorm_2")
        x = x + norm(m, "post_feedforward_layernorm")
        if width:
            p = gelu(x @ W[pre + "per_layer_input_gate.weight"].T) * ple[:, i]
            p = p @ W[pre + "per_layer_projection.weight"].T
            note["ple_out"] = p
            x = x + norm(p, "post_per_layer_input_norm")
        x = x * W[pre + "layer_scalar"]
        note["out"] = x
    h = rms(x, eps, W["model.norm.weight"])
    trace["hidden"] = h
    return h


def gemma4_logits(c, W, h):
    cap = c["final_logit_softcapping"]
    logits = h @ W["model.embed_tokens.weight"].T
    return cap * np.tanh(logits / cap) if cap else logits


def assistant_step(c, W, embedding, hidden, kv, trace):
    """One drafter step at position n: `embedding`, `hidden` [B] -> (logits [V], projected hidden [B]).

    `kv` maps a layer type to the target's (K, V), n rows; a sliding layer sees keys `k > n - W`.
    """
    t = c["text_config"]
    eps = t["rms_norm_eps"]
    x = (W["pre_projection.weight"] @ np.concatenate([embedding, hidden]))[None]
    trace["embed"] = x
    for i in range(t["num_hidden_layers"]):
        pre, note = f"model.layers.{i}.", Layer(trace, f"layers.{i}.")
        norm = lambda x, name: rms(x, eps, W[f"{pre}{name}.weight"])
        full, d, _ = gemma4_geometry(t, i)
        k, v = kv[t["layer_types"][i]]
        n = len(k)
        q = (norm(x, "input_layernorm") @ W[pre + "self_attn.q_proj.weight"].T).reshape(1, -1, d)
        q = rope(norm(q, "self_attn.q_norm"), np.array([n]), gemma4_freqs(t, full, d))
        note["q"] = flat(q)
        visible = np.ones((1, n), bool) if full else np.arange(n)[None] > n - t["sliding_window"]
        a = attend(q, k, v, visible, 1.0) @ W[pre + "self_attn.o_proj.weight"].T
        note["attn_out"] = a
        x = x + norm(a, "post_attention_layernorm")
        m = gemma4_mlp(W, pre + "mlp.", norm(x, "pre_feedforward_layernorm"))
        note["mlp_out"] = m
        x = (x + norm(m, "post_feedforward_layernorm")) * W[pre + "layer_scalar"]
        note["out"] = x
    z = rms(x, eps, W["model.norm.weight"])[0]
    table = W["model.embed_tokens.weight"]
    if c["use_ordered_embeddings"]:
        chosen = top_k(W["masked_embedding.centroids.weight"] @ z, c["centroid_intermediate_top_k"])
        ids = W["masked_embedding.token_ordering"].reshape(c["num_centroids"], -1)[chosen].reshape(-1)
        scores = table[ids] @ z
        trace["candidate_ids"], trace["candidate_logits"] = ids, scores
        logits = np.full(len(table), scores.min() - 1)
        logits[ids] = scores
    else:
        logits = table @ z
    return logits, W["post_projection.weight"] @ z


# ---- Qwen 3.5 ----


def rms1(x, eps, w):
    """The stored weight is an offset from one."""
    return rms(x, eps, 1 + w)


def qwen3_5_attention(c, W, pre, x, at, cache, note):
    """Full attention with an output gate: `(softmax(q·kᵀ/√d)·v · sigmoid(gate))·Woᵀ`"""
    T, d, eps, p = len(x), c["head_dim"], c["rms_norm_eps"], c["rope_parameters"]
    r = int(p["partial_rotary_factor"] * d)
    freqs = p["rope_theta"] ** (-np.arange(0, r, 2) / r)
    q_gate = (x @ W[pre + "q_proj.weight"].T).reshape(T, -1, 2, d)
    q, gate = q_gate[:, :, 0], flat(q_gate[:, :, 1])
    k = (x @ W[pre + "k_proj.weight"].T).reshape(T, -1, d)
    v = (x @ W[pre + "v_proj.weight"].T).reshape(T, -1, d)
    q = rope(rms1(q, eps, W[pre + "q_norm.weight"]), at, freqs)
    k = rope(rms1(k, eps, W[pre + "k_norm.weight"]), at, freqs)
    note["q"], note["k"], note["v"] = flat(q), flat(k), flat(v)
    old = cache.get("kv")
    first = 0
    if old is not None:
        first = len(old[0])
        k, v = np.concatenate([old[0], k]), np.concatenate([old[1], v])
    cache["kv"] = k, v
    visible = np.arange(len(k)) <= np.arange(first, first + T)[:, None]
    o = attend(q, k, v, visible, d**-0.5)
    return (o * sigmoid(gate)) @ W[pre + "o_proj.weight"].T


def delta_geometry(c):
    """(key heads, value heads, key size, value size)"""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    return tuple(c[f"linear_{name}"] for name in names)


def qwen3_5_delta(c, W, pre, x, cache, note):
    """Gated delta rule, recurrent form: `S ← S·exp(g)`, `δ = (v − Sᵀk)·β`, `S ← S + k·δᵀ`, `o = Sᵀq`"""
    T, K = len(x), c["linear_conv_kernel_dim"]
    nk, nv, dk, dv = delta_geometry(c)
    qkv = x @ W[pre + "in_proj_qkv.weight"].T
    z = (x @ W[pre + "in_proj_z.weight"].T).reshape(T, nv, dv)
    beta = sigmoid(x @ W[pre + "in_proj_b.weight"].T)
    g = -np.exp(W[pre + "A_log"]) * np.logaddexp(0, x @ W[pre + "in_proj_a.weight"].T + W[pre + "dt_bias"])
    rows = np.concatenate([cache.get("conv", np.zeros((K - 1, qkv.shape[1]))), qkv])
    taps = W[pre + "conv1d.weight"][:, 0]
    y = silu(sum(rows[j : j + T] * taps[:, j] for j in range(K)))
    cache["conv"] = rows[-(K - 1) :]
    q, k, v = np.split(y, [nk * dk, 2 * nk * dk], -1)
    unit = lambda a: a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6)
    q = np.repeat(unit(q.reshape(T, nk, dk)) * dk**-0.5, nv // nk, 1)
    k = np.repeat(unit(k.reshape(T, nk, dk)), nv // nk, 1)
    v = v.reshape(T, nv, dv)
    S = cache.get("state", np.zeros((nv, dk, dv)))
    o = np.zeros((T, nv, dv))
    for t in range(T):
        S = S * np.exp(g[t])[:, None, None]
        delta = (v[t] - np.einsum("hkv,hk->hv", S, k[t])) * beta[t][:, None]
        S = S + k[t][:, :, None] * delta[:, None]
        o[t] = np.einsum("hkv,hk->hv", S, q[t])
    cache["state"] = S
    note["conv"], note["conv_state"], note["delta"], note["state"] = y, cache["conv"], flat(o), S
    o = rms(o, c["rms_norm_eps"], W[pre + "norm.weight"]) * silu(z)
    return flat(o) @ W[pre + "out_proj.weight"].T


def swiglu(W, pre, x):
    return (silu(x @ W[pre + "gate_proj.weight"].T) * (x @ W[pre + "up_proj.weight"].T)) @ W[pre + "down_proj.weight"].T


def qwen3_5_moe(c, W, pre, x, note):
    """Routed experts with renormalised weights, plus a shared expert behind a sigmoid gate."""
    width = c["moe_intermediate_size"]
    p = softmax(x @ W[pre + "gate.weight"].T)
    ids = top_k(p, c["num_experts_per_tok"])
    w = np.take_along_axis(p, ids, -1)
    w = w / w.sum(-1, keepdims=True)
    note["moe_ids"], note["moe_weights"] = ids, w
    out = sigmoid(x @ W[pre + "shared_expert_gate.weight"].T) * swiglu(W, pre + "shared_expert.", x)
    for t in range(len(x)):
        for e, share in zip(ids[t], w[t]):
            gate_up = W[pre + "experts.gate_up_proj"][e] @ x[t]
            out[t] += share * (W[pre + "experts.down_proj"][e] @ (silu(gate_up[:width]) * gate_up[width:]))
    return out


def qwen3_5_layer(c, W, pre, kind, x, at, cache, note):
    """`h = x + mixer(norm(x))`, `y = h + ffn(norm(h))`"""
    norm = lambda x, name: rms1(x, c["rms_norm_eps"], W[f"{pre}{name}.weight"])
    h = norm(x, "input_layernorm")
    if kind == "linear_attention":
        a = qwen3_5_delta(c, W, pre + "linear_attn.", h, cache, note)
    else:
        a = qwen3_5_attention(c, W, pre + "self_attn.", h, at, cache, note)
    note["attn_out"] = a
    x = x + a
    h = norm(x, "post_attention_layernorm")
    m = qwen3_5_moe(c, W, pre + "mlp.", h, note) if c.get("num_experts") else swiglu(W, pre + "mlp.", h)
    note["mlp_out"] = m
    x = x + m
    note["out"] = x
    return x


def qwen3_5(c, W, tokens, cache=None, trace=None):
    """Post-final-norm hidden rows [T, H]; `cache` is {"rows": n, layer: state}."""
    trace = Nowhere() if trace is None else trace
    cache = {} if cache is None else cache
    first = cache.get("rows", 0)
    cache["rows"] = first + len(tokens)
    at = np.arange(first, first + len(tokens))
    x = W["model.embed_tokens.weight"][tokens]
    trace["embed"] = x
    for i, kind in enumerate(c["layer_types"]):
        memory, note = cache.setdefault(i, {}), Layer(trace, f"layers.{i}.")
        x = qwen3_5_layer(c, W, f"model.layers.{i}.", kind, x, at, memory, note)
    h = rms1(x, c["rms_norm_eps"], W["model.norm.weight"])
    trace["hidden"] = h
    return h


def qwen3_5_logits(c, W, h):
    name = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return h @ W[name].T


def mtp(c, W, tokens, hidden, positions, cache, trace, layer=0):
    """MTP rows: row r is built from token `tokens[r]` at `positions[r]` and the hidden of the position before it."""
    eps = c["rms_norm_eps"]
    e = rms1(W["model.embed_tokens.weight"][tokens], eps, W["mtp.pre_fc_norm_embedding.weight"])
    h = rms1(hidden, eps, W["mtp.pre_fc_norm_hidden.weight"])
    x = np.concatenate([e, h], -1) @ W["mtp.fc.weight"].T
    trace["embed"] = x
    x = qwen3_5_layer(c, W, f"mtp.layers.{layer}.", "full_attention", x, positions, cache, Layer(trace, "layers.0."))
    return rms1(x, eps, W["mtp.norm.weight"])


# ---- EAGLE-3 ----


def eagle3_features(c, W, taps):
    """What the head is fed for true rows, from the target's residual rows at its tapped layers."""
    eps = c["transformer_layer_config"]["rms_norm_eps"]
    if c["fc_norm"]:
        taps = [rms(a, eps, W[f"fc_norm.{i}.weight"]) for i, a in enumerate(taps)]
    x = np.concatenate(taps, -1)
    if c["norm_before_fc"]:
        x = rms(x, eps, W["input_norm.weight"])
    return x @ W["fc.weight"].T


def eagle3_layer(t, W, pre, i, x, inputs, at, cache):
    """`h = x + attention(inputs)`, `y = h + mlp(norm(h))`; `at` are the rows' positions, and cache row r is at r."""
    T, d, eps = len(x), t["head_dim"], t["rms_norm_eps"]
    freqs = t["rope_parameters"]["rope_theta"] ** (-np.arange(0, d, 2) / d)
    q, k, v = ((inputs @ W[f"{pre}self_attn.{n}_proj.weight"].T).reshape(T, -1, d) for n in "qkv")
    if t["model_type"] == "qwen3":
        q, k = rms(q, eps, W[pre + "self_attn.q_norm.weight"]), rms(k, eps, W[pre + "self_attn.k_norm.weight"])
    q, k = rope(q, at, freqs), rope(k, at, freqs)
    if i in cache:
        k, v = np.concatenate([cache[i][0], k]), np.concatenate([cache[i][1], v])
    cache[i] = k, v
    keys = np.arange(len(k))
    visible = keys <= at[:, None]
    if t.get("layer_types", [""] * (i + 1))[i] == "sliding_attention":
        visible &= keys > at[:, None] - t["sliding_window"]
    x = x + attend(q, k, v, visible, d**-0.5) @ W[pre + "self_attn.o_proj.weight"].T
    return x + swiglu(W, pre + "mlp.", rms(x, eps, W[pre + "post_attention_layernorm.weight"]))


def eagle3(c, W, table, tokens, features, at, cache, trace):
    """Rows of tokens `x_{p+1}` and features of `p`, at positions `p`: what the next row is fed, and draft logits."""
    t = c["transformer_layer_config"]
    norm = lambda x, name: rms(x, t["rms_norm_eps"], W[f"{name}.weight"])
    u = norm(features, "layers.0.hidden_norm")
    x = u if c["norm_before_residual"] else features
    for i in range(t["num_hidden_layers"]):
        pre = f"layers.{i}."
        inputs = norm(x, pre + "input_layernorm") if i else None
        if i == 0:
            inputs = np.concatenate([norm(table[tokens], pre + "input_layernorm"), u], -1)
        x = eagle3_layer(t, W, pre, i, x, inputs, at, cache)
        trace[f"layers.{i}.out"] = x
    n = norm(x, "norm")
    return (n if c["norm_output"] else x), n @ W["lm_head.weight"].T
