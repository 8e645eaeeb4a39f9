//! A stranger's chat template, given to the program in little memory.

#![cfg(target_os = "linux")]

use std::fs;
use std::path::Path;
use std::process::Command;

/// Templates that asked for gigabytes, or for a stack that is not there.
const TEMPLATES: &[&str] = &[
    "{{ 'x' | indent(9999999999) }}",
    "{{ '%999999999d' | format(1) }}",
    "{% set ns = namespace(x='xxxxxxxxxx') %}{% for i in range(64) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{{ messages[0].content * 99999999 }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
    "{{ ('a' * 99999999) ~ ('a' * 99999999) ~ ('a' * 99999999) ~ ('a' * 99999999) ~ ('a' * 99999999) }}",
];

#[test]
fn inspecting_a_checkpoint_survives_its_template() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("template-attacks");
    let _ = fs::remove_dir_all(&folder);
    let model = folder.join("model");
    fs::create_dir_all(&model).unwrap();
    let from = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-gemma4");
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), model.join(entry.file_name())).unwrap();
    }
    for template in TEMPLATES {
        fs::write(model.join("chat_template.jinja"), template).unwrap();
        let output = Command::new("sh")
            // 600 MB of addresses, for the program and all of its threads.
            .args(["-c", "ulimit -v 600000 && exec \"$@\"", "sh"])
            .arg(env!("CARGO_BIN_EXE_paceline"))
            .args(["inspect", "--no-probe", model.to_str().unwrap()])
            .current_dir(&folder)
            .env("HOME", &folder)
            .output()
            .unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(
            output.status.success() && stdout.contains("gemma4"),
            "{template}: {}\n{stdout}{stderr}",
            output.status
        );
    }
}
