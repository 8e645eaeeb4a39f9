//! Shapes of large models, and checkpoints of these shapes without weights.

use serde_json::{Map, Value, json};
use std::io::Write;
use std::path::Path;

/// Names and shapes of a checkpoint's tensors.
type Tensors = Vec<(String, Vec<usize>)>;

/// A model's shape: configuration and tensors.
pub(crate) struct Shape {
    pub(crate) config: Value,
    pub(crate) tensors: Tensors,
    pub(crate) experts: [(usize, usize); 2],
    pub(crate) n_experts: usize,
    pub(crate) top_k: usize,
    pub(crate) table: Option<(usize, usize)>,
    /// Weights that one row's products take, the head included.
    pub(crate) active: f64,
}

fn count(tensors: &Tensors, keep: impl Fn(&str) -> bool) -> f64 {
    let kept = tensors.iter().filter(|(name, _)| keep(name));
    kept.map(|(_, shape)| shape.iter().product::<usize>() as f64)
        .sum()
}

/// Gemma 4: hidden, layers, inner, heads, key heads of sliding and full layers,
/// window, shared layers, width of per-layer embeddings, and experts.
#[derive(Clone, Copy)]
struct Gemma {
    h: usize,
    l: usize,
    f: usize,
    heads: usize,
    kv: (usize, usize),
    window: usize,
    shared: usize,
    ple: usize,
    k_eq_v: bool,
    experts: Option<(usize, usize, usize)>,
}

/// What layer `i` of a Gemma 4 and of its assistant both have: widths of its rows and of its MLP, query heads and their
/// columns.
fn gemma_layer(t: &mut Tensors, i: usize, (h, f): (usize, usize), (heads, e): (usize, usize)) {
    let mut put =
        |name: &str, shape: &[usize]| t.push((format!("model.layers.{i}.{name}"), shape.to_vec()));
    for norm in [
        "input",
        "post_attention",
        "pre_feedforward",
        "post_feedforward",
    ] {
        put(&format!("{norm}_layernorm.weight"), &[h]);
    }
    put("layer_scalar", &[1]);
    put("self_attn.q_proj.weight", &[heads * e, h]);
    put("self_attn.o_proj.weight", &[h, heads * e]);
    put("self_attn.q_norm.weight", &[e]);
    put("mlp.gate_proj.weight", &[f, h]);
    put("mlp.up_proj.weight", &[f, h]);
    put("mlp.down_proj.weight", &[h, f]);
}

fn gemma(g: Gemma) -> Shape {
    let v = 262_144;
    let mut t: Tensors = vec![
        ("model.embed_tokens.weight".into(), vec![v, g.h]),
        ("model.norm.weight".into(), vec![g.h]),
    ];
    if g.ple > 0 {
        t.push((
            "model.embed_tokens_per_layer.weight".into(),
            vec![v, g.l * g.ple],
        ));
        t.push((
            "model.per_layer_model_projection.weight".into(),
            vec![g.l * g.ple, g.h],
        ));
        t.push(("model.per_layer_projection_norm.weight".into(), vec![g.ple]));
    }
    for i in 0..g.l {
        let full = i % 6 == 5 || i + 1 == g.l;
        let (e, k) = if full { (512, g.kv.1) } else { (256, g.kv.0) };
        gemma_layer(&mut t, i, (g.h, g.f), (g.heads, e));
        let mut put = |name: &str, shape: &[usize]| {
            t.push((format!("model.layers.{i}.{name}"), shape.to_vec()))
        };
        if i < g.l - g.shared {
            put("self_attn.k_proj.weight", &[k * e, g.h]);
            put("self_attn.k_norm.weight", &[e]);
            if !(full && g.k_eq_v) {
                put("self_attn.v_proj.weight", &[k * e, g.h]);
            }
        }
        if g.ple > 0 {
            put("per_layer_input_gate.weight", &[g.ple, g.h]);
            put("per_layer_projection.weight", &[g.h, g.ple]);
            put("post_per_layer_input_norm.weight", &[g.h]);
        }
        if let Some((n, _, inner)) = g.experts {
            put("router.proj.weight", &[n, g.h]);
            put("router.scale", &[g.h]);
            put("router.per_expert_scale", &[n]);
            put("experts.gate_up_proj", &[n, 2 * inner, g.h]);
            put("experts.down_proj", &[n, g.h, inner]);
            for norm in [
                "pre_feedforward_layernorm_2",
                "post_feedforward_layernorm_1",
                "post_feedforward_layernorm_2",
            ] {
                put(&format!("{norm}.weight"), &[g.h]);
            }
        }
    }
    let (n, k, inner) = g.experts.unwrap_or((0, 0, 0));
    let types: Vec<&str> = (0..g.l)
        .map(|i| {
            if i % 6 == 5 || i + 1 == g.l {
                "full_attention"
            } else {
                "sliding_attention"
            }
        })
        .collect();
    let config = json!({
        "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "dtype": "bfloat16",
        "vocab_size": v, "hidden_size": g.h, "intermediate_size": g.f, "num_hidden_layers": g.l,
        "num_attention_heads": g.heads, "num_key_value_heads": g.kv.0, "head_dim": 256, "global_head_dim": 512,
        "num_global_key_value_heads": g.kv.1, "layer_types": types, "sliding_window": g.window,
        "attention_k_eq_v": g.k_eq_v, "num_kv_shared_layers": g.shared,
        "hidden_size_per_layer_input": g.ple, "vocab_size_per_layer_input": v,
        "enable_moe_block": n > 0, "num_experts": n, "top_k_experts": k, "moe_intermediate_size": inner,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
            "full_attention": {"rope_theta": 1e6, "rope_type": "proportional", "partial_rotary_factor": 0.25},
        },
        "final_logit_softcapping": 30.0, "max_position_embeddings": 131_072,
    });
    let dense = count(&t, |n| {
        !n.contains("experts.") && !n.contains("per_layer.weight")
    });
    let routed = count(&t, |n| {
        n.contains("experts.gate_up") || n.contains("experts.down")
    });
    Shape {
        config,
        experts: [(2 * inner, g.h), (g.h, inner)],
        n_experts: n,
        top_k: k,
        table: (g.ple > 0).then_some((v, g.l * g.ple)),
        active: dense + routed * k as f64 / n.max(1) as f64,
        tensors: t,
    }
}

/// The assistant of a Gemma 4: four layers of its own size that read the target's keys and values.
fn gemma_assistant(g: Gemma) -> Shape {
    let (v, h, f) = (262_144, 1024, 8192);
    let types = [
        "sliding_attention",
        "sliding_attention",
        "sliding_attention",
        "full_attention",
    ];
    let mut t: Tensors = vec![
        ("pre_projection.weight".into(), vec![h, 2 * g.h]),
        ("post_projection.weight".into(), vec![g.h, h]),
        ("model.embed_tokens.weight".into(), vec![v, h]),
        ("model.norm.weight".into(), vec![h]),
    ];
    for (i, layer) in types.iter().enumerate() {
        let e = if *layer == "full_attention" { 512 } else { 256 };
        gemma_layer(&mut t, i, (h, f), (g.heads, e));
    }
    let mut text = gemma(g).config;
    let own = json!({
        "hidden_size": h, "intermediate_size": f, "num_hidden_layers": types.len(), "layer_types": types,
        "num_kv_shared_layers": types.len(), "final_logit_softcapping": null,
    });
    let fields = text.as_object_mut().expect("a configuration");
    fields.extend(own.as_object().expect("fields").clone());
    fields.remove("architectures");
    let config = json!({
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "dtype": "bfloat16",
        "backbone_hidden_size": g.h, "use_ordered_embeddings": false, "tie_word_embeddings": true, "text_config": text,
    });
    Shape {
        config,
        experts: [(0, 0); 2],
        n_experts: 0,
        top_k: 0,
        table: None,
        active: count(&t, |_| true),
        tensors: t,
    }
}

/// Qwen 3.5: hidden, layers, inner, heads, key heads, value heads of the delta
/// rule, and experts.
#[derive(Clone, Copy)]
struct Qwen {
    h: usize,
    l: usize,
    f: usize,
    heads: usize,
    kv: usize,
    nv: usize,
    experts: Option<(usize, usize, usize)>,
}

fn qwen(q: Qwen) -> Shape {
    let (v, e, nk, d) = (248_320, 256, 16, 128);
    let mut t: Tensors = vec![
        ("model.embed_tokens.weight".into(), vec![v, q.h]),
        ("lm_head.weight".into(), vec![v, q.h]),
        ("model.norm.weight".into(), vec![q.h]),
        ("mtp.fc.weight".into(), vec![q.h, 2 * q.h]),
        ("mtp.pre_fc_norm_embedding.weight".into(), vec![q.h]),
        ("mtp.pre_fc_norm_hidden.weight".into(), vec![q.h]),
        ("mtp.norm.weight".into(), vec![q.h]),
    ];
    for i in 0..=q.l {
        let at = if i == q.l {
            "mtp.layers.0".to_owned()
        } else {
            format!("model.layers.{i}")
        };
        let mut put =
            |name: &str, shape: &[usize]| t.push((format!("{at}.{name}"), shape.to_vec()));
        put("input_layernorm.weight", &[q.h]);
        put("post_attention_layernorm.weight", &[q.h]);
        if i % 4 == 3 || i == q.l {
            put("self_attn.q_proj.weight", &[2 * q.heads * e, q.h]);
            put("self_attn.k_proj.weight", &[q.kv * e, q.h]);
            put("self_attn.v_proj.weight", &[q.kv * e, q.h]);
            put("self_attn.o_proj.weight", &[q.h, q.heads * e]);
            put("self_attn.q_norm.weight", &[e]);
            put("self_attn.k_norm.weight", &[e]);
        } else {
            let c = 2 * nk * d + q.nv * d;
            put("linear_attn.in_proj_qkv.weight", &[c, q.h]);
            put("linear_attn.in_proj_z.weight", &[q.nv * d, q.h]);
            put("linear_attn.in_proj_b.weight", &[q.nv, q.h]);
            put("linear_attn.in_proj_a.weight", &[q.nv, q.h]);
            put("linear_attn.conv1d.weight", &[c, 1, 4]);
            put("linear_attn.A_log", &[q.nv]);
            put("linear_attn.dt_bias", &[q.nv]);
            put("linear_attn.norm.weight", &[d]);
            put("linear_attn.out_proj.weight", &[q.h, q.nv * d]);
        }
        let dense = |put: &mut dyn FnMut(&str, &[usize]), at: &str, f: usize| {
            put(&format!("{at}gate_proj.weight"), &[f, q.h]);
            put(&format!("{at}up_proj.weight"), &[f, q.h]);
            put(&format!("{at}down_proj.weight"), &[q.h, f]);
        };
        match q.experts {
            None => dense(&mut put, "mlp.", q.f),
            Some((n, _, inner)) => {
                put("mlp.gate.weight", &[n, q.h]);
                put("mlp.shared_expert_gate.weight", &[1, q.h]);
                put("mlp.experts.gate_up_proj", &[n, 2 * inner, q.h]);
                put("mlp.experts.down_proj", &[n, q.h, inner]);
                dense(&mut put, "mlp.shared_expert.", inner);
            }
        }
    }
    let (n, k, inner) = q.experts.unwrap_or((0, 0, 0));
    let config = json!({
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "dtype": "bfloat16",
        "vocab_size": v, "hidden_size": q.h, "intermediate_size": q.f, "num_hidden_layers": q.l,
        "num_attention_heads": q.heads, "num_key_value_heads": q.kv, "head_dim": e,
        "linear_num_key_heads": nk, "linear_num_value_heads": q.nv,
        "linear_key_head_dim": d, "linear_value_head_dim": d, "linear_conv_kernel_dim": 4,
        "rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": false, "mtp_num_hidden_layers": 1, "max_position_embeddings": 262_144,
        "num_experts": n, "num_experts_per_tok": k, "moe_intermediate_size": inner, "shared_expert_intermediate_size": inner,
    });
    let dense = count(&t, |n| {
        !n.contains("mlp.experts.") && !n.contains("embed_tokens") && !n.starts_with("mtp")
    });
    let routed = count(&t, |n| n.contains("mlp.experts.") && !n.starts_with("mtp"));
    Shape {
        config,
        experts: [(2 * inner, q.h), (q.h, inner)],
        n_experts: n,
        top_k: k,
        table: None,
        active: dense + routed * k as f64 / n.max(1) as f64,
        tensors: t,
    }
}

const GEMMA_31B: Gemma = Gemma {
    h: 5376,
    l: 60,
    f: 21504,
    heads: 32,
    kv: (16, 4),
    window: 1024,
    shared: 0,
    ple: 0,
    k_eq_v: true,
    experts: None,
};

/// The shape of the assistant that is timed with the model `name`, if one is.
pub(crate) fn assistant(name: &str) -> Option<Shape> {
    (name == "gemma4-31b").then(|| gemma_assistant(GEMMA_31B))
}

/// The shape of the model `name`.
pub(crate) fn shape(name: &str) -> Shape {
    let base = GEMMA_31B;
    match name {
        "gemma4-31b" => gemma(base),
        "gemma4-26b-a4b" => gemma(Gemma {
            h: 2816,
            l: 30,
            f: 2112,
            heads: 16,
            kv: (8, 2),
            experts: Some((128, 8, 704)),
            ..base
        }),
        "gemma4-e4b" => gemma(Gemma {
            h: 2560,
            l: 42,
            f: 10240,
            heads: 8,
            kv: (2, 2),
            window: 512,
            shared: 18,
            ple: 256,
            k_eq_v: false,
            ..base
        }),
        "qwen3.5-27b" => qwen(Qwen {
            h: 5120,
            l: 64,
            f: 17408,
            heads: 24,
            kv: 4,
            nv: 48,
            experts: None,
        }),
        "qwen3.5-35b-a3b" => qwen(Qwen {
            h: 2048,
            l: 40,
            f: 0,
            heads: 16,
            kv: 2,
            nv: 32,
            experts: Some((256, 8, 512)),
        }),
        _ => panic!("no such model: {name}"),
    }
}

/// Writes a checkpoint whose tensors are a hole, its matrices in bf16 or affine codes.
pub(crate) fn write(folder: &Path, shape: &Shape, format: &quant::Format) {
    std::fs::create_dir_all(folder).unwrap();
    let (mut config, mut header, mut at) = (shape.config.clone(), Map::new(), 0usize);
    let mut put = |name: &str, kind: &str, shape: &[usize]| {
        let bytes = shape.iter().product::<usize>() * if kind == "U32" { 4 } else { 2 };
        let offsets = [at, at + bytes];
        let tensor = json!({"dtype": kind, "shape": shape, "data_offsets": offsets});
        header.insert(name.to_owned(), tensor);
        at += bytes;
    };
    let codes = format.codes();
    if let Some(codes) = codes {
        config["quantization"] = json!({"group_size": codes.group, "bits": codes.bits});
    }
    for (name, shape) in &shape.tensors {
        match (&shape[..], codes, name.strip_suffix(".weight")) {
            (&[rows, cols], Some(codes), Some(stem)) if cols.is_multiple_of(codes.group) => {
                put(name, "U32", &[rows, cols * usize::from(codes.bits) / 32]);
                for factors in ["scales", "biases"] {
                    let name = format!("{stem}.{factors}");
                    put(&name, "BF16", &[rows, cols / codes.group]);
                }
            }
            _ => put(name, "BF16", shape),
        }
    }
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    let mut header = serde_json::to_string(&header).unwrap();
    while !header.len().is_multiple_of(8) {
        header.push(' ');
    }
    let mut file = std::fs::File::create(folder.join("model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes())
        .unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + at) as u64).unwrap();
}
