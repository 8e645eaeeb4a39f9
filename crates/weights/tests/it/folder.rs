//! Which files make a checkpoint.

use crate::common::*;

const CONFIG: (&str, &[u8]) = ("config.json", b"{\"model_type\": \"tiny\"}");
const INDEX: &str = "model.safetensors.index.json";

fn one(name: &str, value: f32) -> Vec<u8> {
    file(None, &[filled(name, 1, value)])
}

fn value(folder: &Folder, name: &str) -> f32 {
    folder.open().unwrap().vector(name, 1).unwrap()[0]
}

#[test]
fn the_index_decides_where_tensors_lie() {
    let both = file(
        None,
        &[filled("model.a", 1, 1.0), filled("model.b", 1, 2.0)],
    );
    let index = br#"{"metadata": {}, "weight_map": {"model.a": "2.safetensors", "model.b": "1.safetensors"}}"#;
    let folder = Folder::new(&[
        CONFIG,
        (INDEX, index),
        ("1.safetensors", &both),
        ("2.safetensors", &one("model.a", 5.0)),
        ("stray.safetensors", b"never opened"),
    ]);
    assert_eq!((value(&folder, "a"), value(&folder, "b")), (5.0, 2.0));
    assert_eq!(
        folder.open().unwrap().files().collect::<Vec<_>>(),
        ["1.safetensors", "2.safetensors"]
    );
}

#[test]
fn a_lone_file_needs_no_index() {
    let folder = Folder::new(&[CONFIG, ("model.safetensors", &one("model.a", 3.0))]);
    assert_eq!(value(&folder, "a"), 3.0);
    assert_eq!(
        folder.open().unwrap().bytes(),
        one("model.a", 3.0).len() as u64
    );
}

#[test]
fn a_head_beside_the_weights_is_found_and_goes_before_theirs() {
    let trunk = file(
        None,
        &[filled("model.a", 1, 0.0), filled("mtp.fc.weight", 1, 4.0)],
    );
    let index = br#"{"weight_map": {"model.a": "model.safetensors", "mtp.fc.weight": "model.safetensors"}}"#;
    let files: [(&str, Vec<u8>); 3] = [
        ("mtp.safetensors", one("mtp.fc.weight", 1.0)),
        ("model-mtp.safetensors", one("model.mtp.fc.weight", 2.0)),
        ("mtp/model.safetensors", one("fc.weight", 3.0)),
    ];
    for first in 0..=files.len() {
        for with_index in [false, true] {
            let mut list = vec![CONFIG, ("model.safetensors", &trunk[..])];
            if with_index {
                list.push((INDEX, index));
            }
            list.extend(
                files[first..]
                    .iter()
                    .map(|(name, bytes)| (*name, &bytes[..])),
            );
            let folder = Folder::new(&list);
            assert_eq!(value(&folder, "mtp.fc.weight"), (first + 1) as f32);
            let unused = folder.open().unwrap().unused();
            assert_eq!(unused.len(), 2 + files.len() - first, "{unused:?}");
            if first < files.len() {
                assert!(
                    unused.contains(&"mtp.fc.weight in model.safetensors".into()),
                    "{unused:?}"
                );
            }
        }
    }
}

#[test]
fn a_bad_folder_is_refused_in_one_line() {
    let a = one("a", 1.0);
    let index = |map: &str| format!(r#"{{"weight_map": {map}}}"#).into_bytes();
    type Files = Vec<(&'static str, Vec<u8>)>;
    let cases: Vec<(Files, &str)> = vec![
        (
            vec![("model.safetensors", a.clone())],
            "no `config.json` in `",
        ),
        (
            vec![("config.json", b"{}".to_vec())],
            "no `model.safetensors` or `model.safetensors.index.json` in `",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                ("mtp.safetensors", a.clone()),
            ],
            "no `model.safetensors` or",
        ),
        (
            vec![
                ("config.json", b"[1]".to_vec()),
                ("model.safetensors", a.clone()),
            ],
            "no object in `config.json`",
        ),
        (
            vec![
                ("config.json", b"{\n\"a\": }".to_vec()),
                ("model.safetensors", a.clone()),
            ],
            "expected value at line 2 column 6 in `config.json`",
        ),
        (
            vec![("config.json", b"{}".to_vec()), (INDEX, b"{}".to_vec())],
            "missing field `weight_map` at line 1 column 2 in `model.safetensors.index.json`",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                (INDEX, index(r#"{"a": "gone.safetensors"}"#)),
            ],
            "the index puts tensor `a` into `gone.safetensors`, which does not exist",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                (INDEX, index(r#"{"b": "1.safetensors"}"#)),
                ("1.safetensors", a.clone()),
            ],
            "the index puts tensor `b` into `1.safetensors`, which does not contain it",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                (
                    INDEX,
                    index(r#"{"a": "1.safetensors", "a": "2.safetensors"}"#),
                ),
            ],
            "two entries for `a` in `model.safetensors.index.json`",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                (INDEX, index(r#"{"\u0061": "1.safetensors"}"#)),
            ],
            "a tensor's name with escapes",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                (INDEX, index(r#"{"a": "../1.safetensors"}"#)),
            ],
            "the index names `../1.safetensors`, which is no safetensors file inside the folder",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                (INDEX, index(r#"{"a": "/etc/1.safetensors"}"#)),
            ],
            "the index names `/etc/1.safetensors`",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                (INDEX, index(r#"{"a": "config.json"}"#)),
            ],
            "the index names `config.json`",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                (INDEX, index(r#"{"a": "x\ny.safetensors"}"#)),
            ],
            "the index names `x\\ny.safetensors`",
        ),
        (
            vec![
                ("config.json", b"{}".to_vec()),
                ("model.safetensors", vec![]),
            ],
            "the file ends after 0 bytes, its header needs 8, in `model.safetensors`",
        ),
    ];
    for (files, start) in cases {
        let files: Vec<(&str, &[u8])> = files
            .iter()
            .map(|(name, bytes)| (*name, &bytes[..]))
            .collect();
        let message = Folder::new(&files).refusal();
        assert!(
            message.starts_with(start) && !message.contains('\n'),
            "{message}"
        );
    }
}

#[test]
fn the_same_index_is_obeyed_in_memory() {
    let index = br#"{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}"#.to_vec();
    let message = load(
        "{}",
        &[(INDEX, index.clone()), ("1.safetensors", one("a", 1.0))],
    )
    .unwrap_err()
    .to_string();
    assert_eq!(
        message,
        "the index puts tensor `b` into `2.safetensors`, which does not exist"
    );
    let checkpoint = load(
        "{}",
        &[
            ("2.safetensors", one("b", 2.0)),
            (INDEX, index),
            ("1.safetensors", one("a", 1.0)),
        ],
    )
    .unwrap();
    assert_eq!(
        checkpoint.files().collect::<Vec<_>>(),
        ["1.safetensors", "2.safetensors"]
    );
}

#[test]
fn a_config_of_absurd_length_is_not_read() {
    let folder = Folder::new(&[("config.json", b""), ("model.safetensors", &one("a", 1.0))]);
    std::fs::File::options()
        .write(true)
        .open(folder.path().join("config.json"))
        .unwrap()
        .set_len(1 << 40)
        .unwrap();
    let message = folder.refusal();
    assert!(
        message
            .starts_with("config length in bytes is 1099511627776, more than the limit of 4194304"),
        "{message}"
    );
}

#[test]
#[cfg(unix)]
fn links_are_followed_and_folders_are_no_files() {
    let real = Folder::new(&[("blob", &one("a", 6.0))]);
    let folder = Folder::new(&[CONFIG]);
    let link = folder.path().join("model.safetensors");
    std::os::unix::fs::symlink(real.path().join("blob"), &link).unwrap();
    assert_eq!(value(&folder, "a"), 6.0);
    std::fs::remove_file(&link).unwrap();
    std::fs::create_dir(&link).unwrap();
    assert!(
        folder.refusal().ends_with("not a regular file"),
        "{}",
        folder.refusal()
    );
}
