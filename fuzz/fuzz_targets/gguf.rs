//! A model of one GGUF file: refused, or every key and tensor of it can be read.
//!
//! An input that begins with `GGUF` is a file of any bytes. Any other says what stands
//! in one, since a fuzzer guesses neither names nor lengths of eight bytes: names by
//! number, sizes mostly good ones, and the data.

#![no_main]

use fuzz::Bytes;
use libfuzzer_sys::fuzz_target;
use std::borrow::Cow;
use weights::Checkpoint;
use weights::gguf::Value;

const ARCHITECTURES: &[&str] = &[
    "gemma4",
    "gemma4-assistant",
    "gemma4_assistant",
    "qwen35",
    "qwen35moe",
    "eagle3",
    "llama",
];

/// Keys that readers know; those of an architecture begin with a point.
const KEYS: &[&str] = &[
    ".block_count",
    ".nextn_predict_layers",
    ".embedding_length",
    ".embedding_length_out",
    ".embedding_length_per_layer_input",
    ".feed_forward_length",
    ".context_length",
    ".attention.head_count",
    ".attention.head_count_kv",
    ".attention.key_length",
    ".attention.key_length_swa",
    ".attention.shared_kv_layers",
    ".attention.sliding_window",
    ".attention.sliding_window_pattern",
    ".attention.layer_norm_rms_epsilon",
    ".rope.freq_base",
    ".rope.dimension_count",
    ".ssm.inner_size",
    ".ssm.time_step_rank",
    ".ssm.group_count",
    ".ssm.state_size",
    ".full_attention_interval",
    ".expert_count",
    ".target_layers",
    ".norm_before_residual",
    ".centroid_top_k",
    "general.alignment",
    "general.architecture",
    "split.no",
    "split.count",
    "tokenizer.ggml.bos_token_id",
    "a.key.nobody.knows",
];

/// Tensors that readers know; those of a block begin with a point.
const TENSORS: &[&str] = &[
    ".attn_q.weight",
    ".attn_k.weight",
    ".attn_v.weight",
    ".attn_q.scale",
    ".attn_q.input_scale",
    ".attn_q_norm.weight",
    ".attn_norm.weight",
    ".attn_norm_2.weight",
    ".post_attention_norm.weight",
    ".attn_qkv.weight",
    ".attn_qkv.scale",
    ".attn_gate.weight",
    ".ssm_beta.weight",
    ".ssm_a",
    ".ssm_dt.bias",
    ".ssm_conv1d.weight",
    ".ssm_norm.weight",
    ".ssm_out.weight",
    ".ssm_out.scale",
    ".ffn_gate_inp.weight",
    ".ffn_gate_inp.scale",
    ".ffn_up_exps.weight",
    ".ffn_up_exps.scale",
    ".ffn_down_exps.weight",
    ".ffn_down_exps.scale",
    ".ffn_gate_up_exps.weight",
    ".layer_output_scale.weight",
    ".nextn.eh_proj.weight",
    ".nextn.enorm.weight",
    "token_embd.weight",
    "per_layer_token_embd.weight",
    "output.weight",
    "output.scale",
    "output_norm.weight",
    "rope_freqs.weight",
    "masked_embd_centroids.weight",
    "masked_embd_ordering",
    "mtp.token_ordering",
    "fc.weight",
    "d2t",
    "a.tensor.nobody.knows",
];

const AXES: &[u64] = &[1, 2, 3, 4, 8, 16, 32, 64, 128, 256, 768];
const ALIGNMENT: u64 = 32;
/// A longer one tells nothing new.
const MAX_DATA: u64 = 1 << 15;

fuzz_target!(|data: &[u8]| {
    let bytes = match data.starts_with(b"GGUF") {
        true => data.to_vec(),
        false => file(&mut Bytes(data)),
    };
    if let Ok(to) = std::env::var("FUZZ_SHOW") {
        std::fs::write(to, &bytes).expect("a file for what the input stands for");
    }
    let files = vec![("model.gguf".to_string(), Cow::Owned(bytes))];
    if let Ok(checkpoint) = Checkpoint::from_bytes("", files) {
        read_all(&checkpoint);
    }
});

/// The file that an input describes; what the input does not say is 0.
fn file(input: &mut Bytes<'_>) -> Vec<u8> {
    let mut byte = || input.next().unwrap_or(0);
    let architecture = ARCHITECTURES[usize::from(byte()) % ARCHITECTURES.len()];
    let blocks = u32::from(byte() % 5);
    let (n_keys, n_tensors) = (byte() % 16, byte() % 16);
    let mut out = b"GGUF\x03\0\0\0".to_vec();
    out.extend(u64::from(n_tensors).to_le_bytes());
    out.extend((u64::from(n_keys) + 2).to_le_bytes());
    text(&mut out, "general.architecture");
    value(&mut out, &architecture.into());
    text(&mut out, &format!("{architecture}.block_count"));
    value(&mut out, &Value::U32(blocks));
    for _ in 0..n_keys {
        let name = KEYS[usize::from(byte()) % KEYS.len()];
        match name.starts_with('.') {
            true => text(&mut out, &format!("{architecture}{name}")),
            false => text(&mut out, name),
        }
        let kind = byte();
        let one = |byte: &mut dyn FnMut() -> u8| match kind % 8 {
            0..3 => Value::U32(byte().into()),
            3 => Value::F32(byte().into()),
            4 => Value::Bool(byte() & 1 == 1),
            5 => Value::I64(-i64::from(byte())),
            6 => Value::U64(u64::from_le_bytes(std::array::from_fn(|_| byte()))),
            _ => Value::String(["", "a", "gemma4"][usize::from(byte()) % 3].into()),
        };
        let first = one(&mut byte);
        match kind / 8 % 3 {
            0 => {
                let more = (0..byte() % 8).map(|_| one(&mut byte));
                let items: Vec<_> = more.collect();
                value(&mut out, &Value::Array(first.kind(), items));
            }
            _ => value(&mut out, &first),
        }
    }
    let mut end = 0;
    for _ in 0..n_tensors {
        let (name, block) = (TENSORS[usize::from(byte()) % TENSORS.len()], byte() % 6);
        match name.starts_with('.') {
            true => text(&mut out, &format!("blk.{block}{name}")),
            false => text(&mut out, name),
        }
        let n_axes = byte() % 6;
        out.extend(u32::from(n_axes).to_le_bytes());
        let mut elements = 1u64;
        for _ in 0..n_axes {
            let which = byte();
            let axis = match AXES.get(usize::from(which) % 16) {
                Some(axis) => *axis,
                None if which < 240 => u64::from(which % 32),
                None => u64::from_le_bytes(std::array::from_fn(|_| byte())),
            };
            out.extend(axis.to_le_bytes());
            elements = elements.saturating_mul(axis);
        }
        let number = u32::from(byte() % 64);
        out.extend(number.to_le_bytes());
        let offset = match byte() {
            bad @ 250.. => u64::from(bad - 250) * 16,
            _ => end,
        };
        out.extend(offset.to_le_bytes());
        let size = match quant::gguf_format(number) {
            Some(format) => (elements / format.block as u64)
                .saturating_mul(format.code_bytes(format.block) as u64),
            None => elements.saturating_mul(8),
        };
        end = end
            .saturating_add(size)
            .min(MAX_DATA)
            .next_multiple_of(ALIGNMENT);
    }
    out.resize(out.len().next_multiple_of(ALIGNMENT as usize), 0);
    let rest = if input.0.is_empty() { &[0x3c] } else { input.0 };
    out.extend(rest.iter().cycle().take(end as usize));
    out
}

fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// A value behind its type.
fn value(out: &mut Vec<u8>, value: &Value<'_>) {
    out.extend((value.kind() as u32).to_le_bytes());
    match value {
        Value::U32(v) => out.extend(v.to_le_bytes()),
        Value::F32(v) => out.extend(v.to_le_bytes()),
        Value::Bool(v) => out.push((*v).into()),
        Value::I64(v) => out.extend(v.to_le_bytes()),
        Value::U64(v) => out.extend(v.to_le_bytes()),
        Value::String(v) => text(out, v),
        Value::Array(kind, items) => {
            out.extend((*kind as u32).to_le_bytes());
            out.extend((items.len() as u64).to_le_bytes());
            for item in items {
                let mut whole = Vec::new();
                crate::value(&mut whole, item);
                out.extend(&whole[4..]);
            }
        }
        other => unreachable!("{other:?} is not made here"),
    }
}

/// Asks for everything in every way.
fn read_all(checkpoint: &Checkpoint) {
    let metadata = checkpoint.metadata().expect("a GGUF file has metadata");
    for key in metadata.keys() {
        assert!(metadata.get(key).is_some());
    }
    let names: Vec<&str> = checkpoint.names().collect();
    for name in &names {
        let shape = checkpoint.shape(name).expect("nothing is packed in words");
        let n: usize = shape.iter().product();
        let cols = shape.last().copied().unwrap_or(1);
        for (rows, cols) in [(n / cols, cols), (1, n), (n, 1)] {
            if let Ok(matrix) = checkpoint.matrix(name, rows, cols) {
                assert_eq!(matrix.to_f32().len(), n);
            }
        }
        if let Ok(values) = checkpoint.vector(name, n) {
            assert_eq!(values.len(), n);
        }
        if let Ok(values) = checkpoint.integers(name, n) {
            assert_eq!(values.len(), n);
        }
        for norm in ["norm.weight", "mtp.norm.weight"] {
            let _ = checkpoint.norm(norm, n); // a wrong answer is not a crash
        }
    }
    assert!(checkpoint.unused().len() <= names.len());
    assert!(checkpoint.config().is_object());
}
