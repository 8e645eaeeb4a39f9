//! GGUF files: what they hold is what the folder they were made from holds.

use convert::gguf::{Store, TensorInfo, Writer};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use weights::gguf::{Export, Value};
use weights::{Checkpoint, LoadError};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/golden")
        .join(name)
}

/// A folder that is removed with the value.
struct Folder(PathBuf);

impl Folder {
    fn new(files: &[(&str, &[u8])]) -> Folder {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let id = (std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("gguf-{}-{}", id.0, id.1));
        std::fs::create_dir_all(&folder).unwrap();
        for (name, bytes) in files {
            std::fs::write(folder.join(name), bytes).unwrap();
        }
        Folder(folder)
    }

    fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // a leftover in the build folder harms nobody
    }
}

fn from_gguf(files: Vec<(&str, Vec<u8>)>) -> Result<Checkpoint, LoadError> {
    let files = files.into_iter();
    Checkpoint::from_bytes(
        "",
        files
            .map(|(name, bytes)| (name.into(), Cow::Owned(bytes)))
            .collect(),
    )
}

/// The values of `name` and their natural rows, whatever it is.
fn values(checkpoint: &Checkpoint, name: &str) -> (usize, Vec<f32>) {
    let shape = checkpoint
        .shape(name)
        .unwrap_or_else(|| panic!("{name} has no shape"));
    let n: usize = shape.iter().product();
    if let Ok(integers) = checkpoint.integers(name, n) {
        return (n, integers.iter().map(|&i| i as f32).collect());
    }
    let norm = name.contains("norm") && !name.contains("linear_attn") && is_qwen(checkpoint);
    let values = match norm {
        true => checkpoint.norm(name, n),
        false => checkpoint.vector(name, n),
    };
    (shape[0], values.unwrap())
}

fn is_qwen(checkpoint: &Checkpoint) -> bool {
    checkpoint.architecture().unwrap().starts_with("Qwen")
}

/// `checkpoint` as a GGUF file of `f32`, but for the table of tokens: its type is the
/// model's, and says what that is.
fn exported(checkpoint: &Checkpoint) -> Vec<u8> {
    let export = Export::of(checkpoint).unwrap();
    let mut tensors: Vec<TensorInfo> = Vec::new();
    let mut data: Vec<Vec<u8>> = Vec::new();
    let mut add = |name: String, shape: Vec<usize>, store: Store, bytes: Vec<u8>| {
        tensors.push(TensorInfo { name, shape, store });
        data.push(bytes);
    };
    /// Experts of one stack: shape and bytes by number.
    type Stack = BTreeMap<usize, (Vec<usize>, Vec<u8>)>;
    let mut stacks: BTreeMap<String, Stack> = BTreeMap::new();
    let bytes = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
    for (name, values) in export.derived() {
        add(
            name.into(),
            vec![values.len()],
            Store::Numbers(&quant::F32),
            bytes(&values),
        );
    }
    for name in checkpoint.names() {
        let Some((stored, rewrite)) = export.name(name) else {
            panic!("{name} has no place in a GGUF file");
        };
        let shape = checkpoint.shape(name).unwrap();
        if let Ok(integers) = checkpoint.integers(name, shape.iter().product()) {
            let bytes = integers.iter().flat_map(|i| i.to_le_bytes()).collect();
            add(stored, shape, Store::I32, bytes);
            continue;
        }
        let (rows, mut values) = values(checkpoint, name);
        let cols = values.len() / rows;
        rewrite.apply(&mut values, rows, cols).unwrap();
        let shape = if shape.len() > 1 && name.contains("conv1d") {
            vec![rows, cols]
        } else {
            shape
        };
        match rewrite.expert() {
            Some(expert) => {
                let stack = stacks.entry(stored).or_default();
                stack.insert(expert, (shape, bytes(&values)));
            }
            None if stored == "token_embd.weight"
                && checkpoint.text_config()["dtype"] == "bfloat16" =>
            {
                let table = quant::encode(&quant::BF16, &values, cols, quant::Scalar::F32);
                add(stored, shape, Store::Numbers(&quant::BF16), table.codes);
            }
            None => add(stored, shape, Store::Numbers(&quant::F32), bytes(&values)),
        }
    }
    for (name, stack) in stacks {
        let shape = [vec![stack.len()], stack[&0].0.clone()].concat();
        let bytes = stack.into_values().flat_map(|(_, bytes)| bytes).collect();
        add(name, shape, Store::Numbers(&quant::F32), bytes);
    }
    let metadata = export.metadata();
    let metadata: Vec<(&str, Value<'_>)> = metadata
        .iter()
        .map(|(k, v)| (k.as_str(), v.clone()))
        .collect();
    let mut writer = Writer::new(Vec::new(), &metadata, tensors).unwrap();
    for bytes in data {
        writer.write(&bytes).unwrap();
    }
    writer.finish().unwrap()
}

/// Every tensor of `folder` is in `file`, with its values; `but` are missing.
fn same_tensors(folder: &Checkpoint, file: &Checkpoint, but: &[&str]) {
    for name in folder.names() {
        if but.iter().any(|b| name.contains(b)) {
            continue;
        }
        let (_, expected) = values(folder, name);
        if let Some((layer, rest)) = name.split_once("mlp.experts.")
            && let Some((expert, rest)) = rest.split_once('.')
        {
            let (experts, stack) = values(file, &format!("{layer}mlp.switch_mlp.{rest}"));
            let expert: usize = expert.parse().unwrap();
            let one = stack.len() / experts;
            assert_eq!(stack[expert * one..][..one], expected, "{name}");
            continue;
        }
        assert!(
            file.has(name),
            "{name} is missing; there are {:?}",
            file.names().collect::<Vec<_>>()
        );
        let (_, found) = values(file, name);
        for (i, (f, e)) in found.iter().zip(&expected).enumerate() {
            // The logarithm of an exponential is exact to half a step.
            let close = if name.ends_with("A_log") {
                (f - e).abs() <= 1.3e-7
            } else {
                f.to_bits() == e.to_bits()
            };
            assert!(close, "{name}[{i}] is {f}, expected {e}");
        }
        assert_eq!(found.len(), expected.len(), "{name}");
    }
}

const FOLDERS: &[&str] = &[
    "gemma4-dense",
    "gemma4-dense-assistant",
    "gemma4-moe",
    "gemma4-ple",
    "gemma4-ple-assistant",
    "qwen3_5-dense",
    "qwen3_5-moe",
];

#[test]
fn a_folder_survives_the_way_through_a_file() {
    for name in FOLDERS {
        let folder = Checkpoint::open(&golden("checkpoints").join(name)).unwrap();
        let file = from_gguf(vec![("model.gguf", exported(&folder))]).unwrap();
        same_tensors(&folder, &file, &[]);
        // A field that is made has the value it had.
        let fields = file.text_config().as_object().unwrap();
        for (field, found) in fields {
            let expected = &folder.text_config()[field];
            let equal = match (found.as_f64(), expected.as_f64()) {
                (Some(found), Some(expected)) => found as f32 == expected as f32,
                _ => found == expected || expected.is_null(),
            };
            let spelled =
                ["rope_parameters", "vocab_size_per_layer_input"].contains(&field.as_str());
            assert!(
                equal || spelled,
                "{name}: {field} is {found}, expected {expected}"
            );
        }
    }
}

/// Files of the public converter (`tests/golden/gguf_models.py`), with matrices in
/// bf16.
#[test]
fn what_the_public_converter_wrote_is_what_the_folder_holds() {
    for name in [
        "gemma4-moe",
        "gemma4-ple",
        "gemma4-ple-assistant",
        "qwen3_5-moe",
    ] {
        let folder = Checkpoint::open(&golden("checkpoints").join(name)).unwrap();
        let file = Checkpoint::open(&golden("gguf").join(format!("{name}.gguf"))).unwrap();
        // The converter leaves an assistant's centroids out.
        let rounded: Vec<&str> = folder
            .names()
            .filter(|n| !n.contains("masked_embedding"))
            .collect();
        for tensor in rounded {
            let (_, mut expected) = values(&folder, tensor);
            let found = values_in(&file, tensor);
            if file.shape(tensor).is_none_or(|shape| shape.len() > 1) && !same(&found, &expected) {
                expected =
                    quant::encode(&quant::BF16, &expected, expected.len(), quant::Scalar::F32)
                        .view()
                        .to_f32();
            }
            for (i, (f, e)) in found.iter().zip(&expected).enumerate() {
                let close = if tensor.ends_with("A_log") {
                    (f - e).abs() <= 2e-7
                } else {
                    f.to_bits() == e.to_bits()
                };
                assert!(close, "{name}: {tensor}[{i}] is {f}, expected {e}");
            }
            assert_eq!(found.len(), expected.len(), "{name}: {tensor}");
        }
        for (field, expected) in folder.text_config().as_object().unwrap() {
            let Some(found) = file.text_config().get(field) else {
                continue;
            };
            let equal = match (found.as_f64(), expected.as_f64()) {
                (Some(found), Some(expected)) => found as f32 == expected as f32,
                _ => found == expected || expected.is_null(),
            };
            let spelled = ["rope_parameters", "dtype", "vocab_size_per_layer_input"];
            assert!(
                equal || spelled.contains(&field.as_str()),
                "{name}: {field} is {found}, expected {expected}"
            );
        }
        // What would be written of the folder is what the converter wrote.
        let metadata = file.metadata().unwrap();
        let export = Export::of(&folder).unwrap().metadata();
        for (key, written) in &export {
            let Some(theirs) = metadata.get(key) else {
                continue;
            };
            let numbers = |value: &Value<'_>| match value {
                Value::Array(_, items) => items.iter().map(|i| i.as_i64()).collect(),
                one => vec![one.as_i64()],
            };
            let equal = *written == theirs
                || written.as_i64().is_some() && numbers(written) == numbers(&theirs);
            assert!(equal, "{name}: {key} is {written:?}, theirs {theirs:?}");
        }
        let prefix = format!("{}.", export[0].1.as_str().unwrap());
        for key in metadata.keys().filter(|key| key.starts_with(&prefix)) {
            assert!(
                export.iter().any(|(k, _)| k == key),
                "{name}: {key} would not be written"
            );
        }
        assert_eq!(file.architecture().unwrap(), folder.architecture().unwrap());
        assert_eq!(
            file.config().get("backbone_hidden_size"),
            folder.config().get("backbone_hidden_size")
        );
    }
}

fn same(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The values of `tensor`, also where `file` has experts in another form.
fn values_in(file: &Checkpoint, tensor: &str) -> Vec<f32> {
    if file.has(tensor) {
        return values(file, tensor).1;
    }
    let (layer, rest) = tensor
        .split_once("mlp.experts.")
        .unwrap_or_else(|| panic!("{tensor} is missing"));
    let stack = |name: &str| {
        let (experts, values) = values(file, &format!("{layer}mlp.switch_mlp.{name}.weight"));
        let one = values.len() / experts;
        values.chunks(one).map(<[f32]>::to_vec).collect::<Vec<_>>()
    };
    match rest.split('.').collect::<Vec<_>>()[..] {
        ["down_proj"] => stack("down_proj").concat(),
        ["gate_up_proj"] => {
            let (gate, up) = (stack("gate_proj"), stack("up_proj"));
            gate.into_iter()
                .zip(up)
                .flat_map(|(gate, up)| [gate, up].concat())
                .collect()
        }
        [expert, name, "weight"] => stack(name).swap_remove(expert.parse().unwrap()),
        _ => panic!("{tensor} is missing"),
    }
}

/// A small file with every kind of thing in it.
fn sample() -> Vec<u8> {
    let tensor = |name: &str, shape: &[usize], format| TensorInfo {
        name: name.into(),
        shape: shape.into(),
        store: Store::Numbers(format),
    };
    let q4_k = quant::format("q4_k").unwrap();
    let tensors = vec![
        tensor("token_embd.weight", &[3, 256], q4_k),
        tensor("output_norm.weight", &[4], &quant::F32),
        tensor(
            "blk.0.attn_q.weight",
            &[2, 32],
            quant::format("q8_0").unwrap(),
        ),
        tensor("rope_freqs.weight", &[4], &quant::F32),
    ];
    let words = Value::Array(weights::gguf::Kind::String, vec!["a".into(), "bc".into()]);
    let keys = [
        ("general.architecture", "gemma4".into()),
        ("gemma4.block_count", Value::U32(1)),
        (
            "gemma4.attention.sliding_window_pattern",
            Value::Array(weights::gguf::Kind::Bool, vec![Value::Bool(false)]),
        ),
        ("gemma4.rope.freq_base", Value::F32(1e6)),
        ("tokenizer.ggml.tokens", words),
    ];
    let mut writer = Writer::new(Vec::new(), &keys, tensors).unwrap();
    while let Some(tensor) = writer.expects() {
        let bytes = vec![0x3c; tensor.bytes()];
        writer.write(&bytes).unwrap();
    }
    writer.finish().unwrap()
}

/// Opens a file and asks for everything.
fn exercise(bytes: &[u8]) -> Result<(), LoadError> {
    let checkpoint = from_gguf(vec![("model.gguf", bytes.to_vec())])?;
    let metadata = checkpoint.metadata().unwrap();
    for key in metadata.keys() {
        assert!(metadata.get(key).is_some());
    }
    for name in checkpoint.names() {
        let shape = checkpoint.shape(name).unwrap();
        let n: usize = shape.iter().product();
        let cols = shape.last().copied().unwrap_or(1);
        for (rows, cols) in [(n / cols, cols), (1, n), (n, 1)] {
            if let Ok(matrix) = checkpoint.matrix(name, rows, cols) {
                assert_eq!(matrix.to_f32().len(), n);
            }
        }
        let _ = checkpoint.vector(name, n);
        let _ = checkpoint.integers(name, n);
    }
    Ok(())
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = sample();
    exercise(&whole).unwrap();
    // The last tensor's padding is nobody's.
    let end = whole.len() - 16;
    for len in 0..end {
        let message = exercise(&whole[..len]).unwrap_err().to_string();
        assert!(message.ends_with("in `model.gguf`"), "{len}: {message}");
    }
    exercise(&whole[..end]).unwrap();
}

#[test]
fn any_changed_byte_is_refused_or_read() {
    let whole = sample();
    for at in 0..whole.len() {
        for change in [1, 0x40, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= change;
            let _ = exercise(&bytes); // whatever it says
        }
    }
}

/// A header of these numbers, keys and tensors as they stand.
fn header(version: u32, n_tensors: u64, n_keys: u64, rest: &[&[u8]]) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(version.to_le_bytes());
    out.extend(n_tensors.to_le_bytes());
    out.extend(n_keys.to_le_bytes());
    rest.iter().for_each(|part| out.extend(*part));
    out
}

fn text(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn key(name: &str, kind: u32, value: &[u8]) -> Vec<u8> {
    [&text(name)[..], &kind.to_le_bytes(), value].concat()
}

/// A tensor's entry, axes innermost first.
fn entry(name: &str, axes: &[u64], kind: u32, offset: u64) -> Vec<u8> {
    let axes_bytes: Vec<u8> = axes.iter().flat_map(|a| a.to_le_bytes()).collect();
    [
        &text(name)[..],
        &(axes.len() as u32).to_le_bytes(),
        &axes_bytes,
        &kind.to_le_bytes(),
        &offset.to_le_bytes(),
    ]
    .concat()
}

#[test]
fn every_lie_of_a_header_is_named() {
    let arch = key("general.architecture", 8, &text("gemma4"));
    let blocks = key("gemma4.block_count", 4, &1u32.to_le_bytes());
    let with = |tensors: &[Vec<u8>], data: usize| {
        let mut file = header(3, tensors.len() as u64, 2, &[&arch, &blocks]);
        tensors.iter().for_each(|t| file.extend(t));
        file.resize(file.len().next_multiple_of(32) + data, 0);
        file
    };
    let huge = 1u64 << 60;
    let array =
        |kind: u32, n: u64, rest: &[u8]| [&kind.to_le_bytes()[..], &n.to_le_bytes(), rest].concat();
    for (file, expected) in [
        (b"GGML".to_vec(), "does not begin with `GGUF`"),
        (header(1, 0, 0, &[]), "version 1, known are 2 and 3"),
        (header(3u32.swap_bytes(), 0, 0, &[]), "big-endian"),
        (header(3, huge, 0, &[]), "number of tensors is"),
        (header(3, 0, huge, &[]), "number of keys is"),
        (
            header(3, 0, 1, &[&huge.to_le_bytes()]),
            "header length in bytes is",
        ),
        (
            header(3, 0, 1, &[&key("a", 13, &[])]),
            "`a` has the unknown type 13",
        ),
        (
            header(3, 0, 1, &[&key("a\n", 0, &[1])]),
            "no printable name",
        ),
        (header(3, 0, 1, &[&key("", 0, &[1])]), "no printable name"),
        (
            header(3, 0, 1, &[&key("a", 7, &[2])]),
            "truth value above 1",
        ),
        (
            header(3, 0, 1, &[&key("a", 9, &array(9, 1, &[]))]),
            "an array of arrays",
        ),
        (
            header(3, 0, 1, &[&key("a", 9, &array(8, huge, &[]))]),
            "number of elements is",
        ),
        (
            header(3, 0, 1, &[&key("a", 9, &array(0, 1 << 25, &[]))]),
            "the file ends after",
        ),
        (
            header(3, 0, 1, &[&key("a", 9, &array(10, 1 << 25, &[]))]),
            "header length in bytes is",
        ),
        (
            header(
                3,
                0,
                1,
                &[&key("a", 8, &[2, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xfe])],
            ),
            "is not UTF-8",
        ),
        (
            header(3, 0, 2, &[&blocks, &blocks]),
            "two keys called `gemma4.block_count`",
        ),
        (
            header(
                3,
                0,
                1,
                &[&key("general.alignment", 4, &3u32.to_le_bytes())],
            ),
            "no power of two",
        ),
        (
            header(
                3,
                0,
                1,
                &[&key("general.alignment", 4, &0u32.to_le_bytes())],
            ),
            "no power of two",
        ),
        (header(3, 0, 0, &[]), "`general.architecture` is missing"),
        (
            header(3, 0, 1, &[&key("general.architecture", 8, &text("mamba"))]),
            "is of architecture `mamba`; known are gemma4,",
        ),
        (header(3, 0, 1, &[&arch]), "`gemma4.block_count` is missing"),
        (
            with(&[entry("t", &[4; 5], 0, 0)], 64),
            "has 5 axes, more than 4",
        ),
        (
            with(&[entry("t", &[0], 0, 0)], 64),
            "an axis of no elements",
        ),
        (
            with(&[entry("t", &[u64::MAX, 2], 0, 0)], 64),
            "more than any file can hold",
        ),
        (
            with(&[entry("t", &[1 << 40, 1 << 40], 2, 0)], 64),
            "more than any file can hold",
        ),
        (
            with(&[entry("t", &[33], 8, 0)], 64),
            "has rows of 33, but q8_0 wants a multiple of 32",
        ),
        (
            with(&[entry("t", &[256], 16, 0)], 64),
            "is stored as iq2_xxs, which cannot be read",
        ),
        (
            with(&[entry("t", &[256], 99, 0)], 64),
            "has the unknown type number 99",
        ),
        (
            with(&[entry("t", &[4], 0, 8)], 64),
            "begins at byte 8, no multiple of 32",
        ),
        (
            with(&[entry("t", &[17], 0, 0)], 64),
            "ends at byte 68 of 64",
        ),
        (
            with(&[entry("t", &[4], 0, u64::MAX - 31)], 64),
            "the file is cut short or its header wrong",
        ),
        (
            with(&[entry("t", &[4], 0, 0), entry("t", &[4], 0, 32)], 64),
            "two tensors called `t`",
        ),
        (
            with(&[entry("t", &[9], 0, 0), entry("u", &[4], 0, 32)], 64),
            "tensors `t` and `u` overlap",
        ),
        (
            with(&[entry("t", &[32], 46, 0), entry("u", &[4], 0, 64)], 96),
            "another program's type",
        ),
        (
            with(
                &[
                    entry("token_embd.weight", &[64], 8, 0),
                    entry("token_embd.scale", &[1], 0, 96),
                ],
                128,
            ),
            "is q8_0, and has a factor `token_embd.scale` that only nvfp4 can have",
        ),
    ] {
        let message = exercise(&file).unwrap_err().to_string();
        assert!(
            message.contains(expected) && message.contains("`model.gguf`"),
            "{message}, expected {expected}"
        );
    }
    exercise(&with(
        &[entry("t", &[32], 46, 0), entry("u", &[4], 0, 32)],
        64,
    ))
    .unwrap();
}

#[test]
fn parts_are_read_together_and_in_order() {
    let part = |no: u16, count: u16, names: &[&str]| {
        let keys = [
            ("general.architecture", "gemma4".into()),
            ("gemma4.block_count", Value::U32(1)),
            ("split.no", Value::U16(no)),
            ("split.count", Value::U16(count)),
        ];
        let tensors: Vec<TensorInfo> = names
            .iter()
            .map(|name| TensorInfo {
                name: (*name).into(),
                shape: vec![1],
                store: Store::Numbers(&quant::F32),
            })
            .collect();
        let mut writer = Writer::new(Vec::new(), &keys, tensors).unwrap();
        while writer.expects().is_some() {
            writer.write(&f32::from(no).to_le_bytes()).unwrap();
        }
        writer.finish().unwrap()
    };
    let (one, two) = (
        part(0, 2, &["output_norm.weight"]),
        part(1, 2, &["blk.0.attn_norm.weight"]),
    );
    let names = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
    let whole = Folder::new(&[(names[0], &one), (names[1], &two)]);
    for name in names {
        let checkpoint = Checkpoint::open(&whole.path().join(name)).unwrap();
        assert_eq!(checkpoint.vector("norm.weight", 1).unwrap(), [0.0]);
        assert_eq!(
            checkpoint
                .vector("layers.0.input_layernorm.weight", 1)
                .unwrap(),
            [1.0]
        );
        assert_eq!(checkpoint.files().collect::<Vec<_>>(), names);
    }
    let half = Folder::new(&[(names[0], &one)]);
    let refusal = |path: &Path| Checkpoint::open(path).unwrap_err().to_string();
    let message = refusal(&half.path().join(names[0]));
    assert!(
        message.contains("in 2 files") && message.contains("00002-of-00002"),
        "{message}"
    );
    let swapped = Folder::new(&[(names[0], &two), (names[1], &one), ("m.gguf", &two)]);
    let message = refusal(&swapped.path().join(names[0]));
    assert!(
        message.contains("it is part 2 of 2, but read as part 1 of 2"),
        "{message}"
    );
    let message = refusal(&swapped.path().join("m.gguf"));
    assert!(
        message.contains("it is part 2 of 2, but read as part 1 of 1"),
        "{message}"
    );
    let message = from_gguf(vec![
        ("a.gguf", one.clone()),
        ("b.gguf", part(1, 2, &["output_norm.weight"])),
    ])
    .unwrap_err()
    .to_string();
    assert!(
        message.contains("stored twice: once in `a.gguf` and once in `b.gguf`"),
        "{message}"
    );
}

/// EAGLE-3 files name the target's token, others the distance to it; and the rotary
/// pairs of their heads lie beside each other.
#[test]
fn an_eagle3_file_is_read_as_its_folder_would_be() {
    let keys = [
        ("general.architecture", "eagle3".into()),
        ("eagle3.block_count", Value::U32(1)),
        ("eagle3.attention.head_count", Value::U32(2)),
        ("eagle3.attention.head_count_kv", Value::U32(1)),
        ("eagle3.attention.key_length", Value::U32(4)),
    ];
    let tensor = |name: &str, shape: &[usize], store| TensorInfo {
        name: name.into(),
        shape: shape.into(),
        store,
    };
    let file = |ids: [i64; 3]| {
        let tensors = vec![
            tensor("d2t", &[3], Store::I64),
            tensor("blk.0.attn_k.weight", &[4, 1], Store::Numbers(&quant::F32)),
        ];
        let mut writer = Writer::new(Vec::new(), &keys, tensors).unwrap();
        ids.iter()
            .for_each(|id| writer.write(&id.to_le_bytes()).unwrap());
        // Rows 0, 2, 1, 3 of the head.
        [0f32, 2.0, 1.0, 3.0]
            .iter()
            .for_each(|v| writer.write(&v.to_le_bytes()).unwrap());
        from_gguf(vec![("model.gguf", writer.finish().unwrap())]).unwrap()
    };
    let checkpoint = file([0, 5, 9]);
    assert_eq!(checkpoint.integers("d2t", 3).unwrap(), [0, 4, 7]);
    let keys = checkpoint
        .matrix("layers.0.self_attn.k_proj.weight", 4, 1)
        .unwrap();
    assert_eq!(keys.to_f32(), [0.0, 1.0, 2.0, 3.0]);
    assert!(file([0, 0, 9]).integers("d2t", 3).is_err());
}

#[test]
fn an_eagle3_file_with_layers_that_no_target_has_is_refused_by_name() {
    let config = |ids: [i32; 3]| {
        let ids = ids.into_iter().map(Value::I32).collect();
        let keys = [
            ("general.architecture", "eagle3".into()),
            ("eagle3.block_count", Value::U32(1)),
            (
                "eagle3.target_layers",
                Value::Array(weights::gguf::Kind::I32, ids),
            ),
        ];
        let file = Writer::new(Vec::new(), &keys, Vec::new()).unwrap();
        let checkpoint = from_gguf(vec![("model.gguf", file.finish().unwrap())])?;
        Ok::<_, LoadError>(checkpoint.config()["eagle_aux_hidden_state_layer_ids"].clone())
    };
    assert_eq!(config([2, 0, 5]).unwrap(), serde_json::json!([2, 0, 5]));
    let error = config([2, -1, 5]).unwrap_err();
    let error = format!("{error:?}");
    assert!(error.contains("`eagle3.target_layers`"), "{error}");
}

/// A factor beside `nvfp4` multiplies the weights, for all of a tensor or for each of a
/// stack, moved or not.
#[test]
fn an_nvfp4_tensor_has_its_factor() {
    let keys = [
        ("general.architecture", "qwen35moe".into()),
        ("qwen35moe.block_count", Value::U32(1)),
        ("qwen35moe.ssm.group_count", Value::U32(2)),
        ("qwen35moe.ssm.time_step_rank", Value::U32(4)),
        ("qwen35moe.ssm.inner_size", Value::U32(256)),
        ("qwen35moe.ssm.state_size", Value::U32(8)),
    ];
    let nvfp4 = quant::format("nvfp4").unwrap();
    let (stack, moved) = ("blk.0.ffn_up_exps", "blk.0.ssm_out");
    let blocks = |n: usize| -> Vec<u8> { (0..36 * n).map(|i| (i * 89 % 253) as u8).collect() };
    let file = |factors: &[f32; 3], with_factors: bool| {
        let tensor = |name: &str, end: &str, shape: &[usize], format| TensorInfo {
            name: format!("{name}.{end}"),
            shape: shape.into(),
            store: Store::Numbers(format),
        };
        let mut tensors = vec![
            tensor(stack, "weight", &[2, 3, 128], nvfp4),
            tensor(moved, "weight", &[3, 256], nvfp4),
        ];
        if with_factors {
            tensors.push(tensor(stack, "scale", &[2], &quant::F32));
            tensors.push(tensor(moved, "scale", &[1], &quant::F32));
            tensors.push(tensor(moved, "input_scale", &[1], &quant::F32));
        }
        let mut writer = Writer::new(Vec::new(), &keys, tensors).unwrap();
        writer.write(&blocks(12)).unwrap();
        writer.write(&blocks(12)).unwrap();
        if with_factors {
            for values in [&factors[..2], &factors[2..], &factors[2..]] {
                let bytes: Vec<u8> = values.iter().flat_map(|f| f.to_le_bytes()).collect();
                writer.write(&bytes).unwrap();
            }
        }
        from_gguf(vec![("model.gguf", writer.finish().unwrap())]).unwrap()
    };
    let read = |checkpoint: &Checkpoint| {
        let one = |name: &str, rows, cols| checkpoint.matrix(name, rows, cols).map(|m| m.to_f32());
        Ok::<_, LoadError>([
            one("layers.0.mlp.switch_mlp.up_proj.weight", 6, 128)?,
            one("layers.0.linear_attn.out_proj.weight", 3, 256)?,
        ])
    };
    let factors = [0.37, -3.1, 1.7e-3];
    let with = file(&factors, true);
    let ([stacked, moved], [plain_stack, plain_moved]) =
        (read(&with).unwrap(), read(&file(&factors, false)).unwrap());
    let close = |got: f32, want: f32| (got - want).abs() <= 2e-7 * want.abs();
    for (i, (got, plain)) in stacked.iter().zip(&plain_stack).enumerate() {
        assert!(
            close(*got, plain * factors[i / 384]),
            "{i}: {got} of {plain}"
        );
    }
    for (i, (got, plain)) in moved.iter().zip(&plain_moved).enumerate() {
        assert!(close(*got, plain * factors[2]), "{i}: {got} of {plain}");
    }
    assert!(stacked.iter().filter(|v| **v != 0.0).count() > 300);
    assert_eq!(with.unused(), Vec::<String>::new());
    let error = read(&file(&[1.0, f32::NAN, 1.0], true)).unwrap_err();
    assert!(
        matches!(&error, LoadError::BadFactor { name, at: 1, .. } if name.ends_with("up_proj.weight_scale_2")),
        "{error}"
    );
}

/// A file whose heads are not those of its sizes must not be moved about.
#[test]
fn heads_that_do_not_fit_their_sizes_are_refused() {
    let keys = [
        ("general.architecture", "qwen35".into()),
        ("qwen35.block_count", Value::U32(1)),
        ("qwen35.ssm.group_count", Value::U32(2)),
        ("qwen35.ssm.time_step_rank", Value::U32(4)),
        ("qwen35.ssm.inner_size", Value::U32(32)),
        ("qwen35.ssm.state_size", Value::U32(8)),
    ];
    let file = |name: &str, rows: usize| {
        let tensor = TensorInfo {
            name: name.into(),
            shape: vec![rows],
            store: Store::Numbers(&quant::F32),
        };
        let mut writer = Writer::new(Vec::new(), &keys, vec![tensor]).unwrap();
        writer.write(&vec![0; 4 * rows]).unwrap();
        writer.finish().unwrap()
    };
    exercise(&file("blk.0.ssm_dt.bias", 4)).unwrap();
    let message = exercise(&file("blk.0.ssm_dt.bias", 5))
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("`blk.0.ssm_dt.bias` has 5 rows, its heads have 4"),
        "{message}"
    );
}
