//! Which room may know which: arrows point down only (`ARCHITECTURE.md`).

use std::collections::BTreeSet;
use std::path::Path;
use suites::repository;

/// Each crate and the crates of this workspace that it may depend on.
const ARROWS: &[(&str, &[&str])] = &[
    ("quant", &[]),
    ("backend", &["quant"]),
    ("cpu", &["backend", "quant"]),
    ("fusion", &["backend"]),
    ("cuda", &["backend", "fusion", "quant"]),
    ("weights", &["quant"]),
    ("cache", &["backend", "quant"]),
    ("models", &["backend", "cache", "quant", "weights"]),
    ("text", &[]),
    ("constrain", &[]),
    ("convert", &["models", "quant", "text", "weights"]),
    ("speculate", &["backend", "cache", "models"]),
    (
        "engine",
        &[
            "backend",
            "cache",
            "constrain",
            "convert",
            "media",
            "models",
            "quant",
            "speculate",
            "text",
            "weights",
        ],
    ),
    ("trace", &["speculate"]),
    ("fetch", &[]),
    ("hub", &["fetch"]),
    ("media", &[]),
    ("server", &["engine", "fetch", "text"]),
    (
        "cli",
        &[
            "backend", "convert", "cpu", "cuda", "engine", "hub", "models", "quant", "server",
            "text", "trace", "weights",
        ],
    ),
];

/// The keys of `[dependencies]` in a manifest.
fn dependencies(manifest: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(manifest).unwrap();
    let lines = text
        .lines()
        .skip_while(|l| l.trim() != "[dependencies]")
        .skip(1);
    let own = lines.take_while(|l| !l.starts_with('['));
    own.filter_map(|l| l.split(['.', '=', ' ']).next())
        .map(str::to_owned)
        .collect()
}

#[test]
fn arrows_point_down_only() {
    let rooms: BTreeSet<&str> = ARROWS.iter().map(|(room, _)| *room).collect();
    let found: BTreeSet<String> = std::fs::read_dir(repository("crates"))
        .unwrap()
        .map(|e| e.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(
        found.iter().map(String::as_str).collect::<BTreeSet<_>>(),
        rooms,
        "every room has its arrows"
    );
    for (room, allowed) in ARROWS {
        let known = dependencies(&repository(format!("crates/{room}/Cargo.toml")));
        let up: Vec<_> = known
            .iter()
            .filter(|d| rooms.contains(&***d) && !allowed.contains(&&***d))
            .collect();
        assert!(up.is_empty(), "{room} must not know {up:?}");
    }
}

#[test]
fn unsafe_code_stays_in_its_rooms() {
    for (room, _) in ARROWS {
        let root = if *room == "cli" { "main.rs" } else { "lib.rs" };
        let text =
            std::fs::read_to_string(repository(format!("crates/{room}/src/{root}"))).unwrap();
        let forbids = text.contains("#![forbid(unsafe_code)]");
        let may = matches!(*room, "cpu" | "cuda" | "weights");
        assert!(forbids || may, "{room} forbids unsafe code");
    }
}
