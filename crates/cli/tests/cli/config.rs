//! The configuration: files, the environment and the command line.

use crate::{PROMPT, bad, folder, good, paceline, run_json, text};
use std::fs;
use std::path::Path;
use std::process::Command;

#[test]
fn variables_that_set_nothing_are_named() {
    let folder = folder("variables");
    let mut command = paceline(&folder, &["serve", "--dry-run"]);
    command
        .env("PACELINE_TEMPRATURE", "0")
        .env("PACELINE_API_KEY", "");
    let output = command.output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(stderr.contains("an API key may not be empty"), "{stderr}");
    let mut command = paceline(&folder, &["list"]);
    command
        .env("PACELINE_TEMPRATURE", "0")
        .env("PACELINE_DRAFT_MAX", "2");
    let (_, stderr) = good(command);
    assert!(stderr.contains("`PACELINE_TEMPRATURE`"), "{stderr}");
    assert!(!stderr.contains("DRAFT_MAX"), "{stderr}");
}

#[test]
fn the_command_line_counts_more_than_the_environment_and_that_more_than_files() {
    let folder = folder("config");
    fs::create_dir_all(folder.join("paceline")).unwrap();
    let user = folder.join("paceline/paceline.toml");
    fs::write(&user, "draft-max = 1\nmax-tokens = 3\nseed = 4\n").unwrap();
    fs::write(
        folder.join("paceline.toml"),
        "draft-max = 2\n[run]\nseed = 5\nstop = [\"x\"]\n",
    )
    .unwrap();
    let line = |command: &mut Command| text(&command.output().unwrap().stdout);
    let show = |args: &[&str]| {
        paceline(
            &folder,
            &[&["config", "show", "--as-command"], args].concat(),
        )
    };
    assert_eq!(
        line(&mut show(&["run"])),
        "paceline run --seed=5 --max-tokens=3 --stop=x --draft-max=2\n"
    );
    assert_eq!(
        line(&mut show(&["chat"])),
        "paceline chat --seed=4 --max-tokens=3 --draft-max=2\n"
    );
    let mut command = show(&["run", "--draft-max=4"]);
    command
        .env("PACELINE_DRAFT_MAX", "3")
        .env("PACELINE_SEED", "6")
        .env("PACELINE_RAW", "1");
    let expected = "paceline run --raw --seed=6 --max-tokens=3 --stop=x --draft-max=4\n";
    assert_eq!(line(&mut command), expected);

    // It is what `run` does, too.
    let record = run_json(&folder, &[PROMPT]);
    assert_eq!(record["usage"]["completion_tokens"], 3);
    assert_eq!(record["model"]["draft_max"], 2);

    // Configuration → command → the same configuration; and → file → the same.
    let shown = |folder: &Path, args: &[&str]| {
        let (stdout, _) = good(paceline(folder, &[&["config", "show"], args].concat()));
        let lines = stdout
            .lines()
            .filter(|l| !l.starts_with("# ") || l.ends_with("is not set"));
        lines
            .map(|l| l.split("  # ").next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let here = shown(&folder, &["run"]);
    let elsewhere = self::folder("config-elsewhere");
    let command = line(&mut show(&["run"]));
    let words: Vec<&str> = command.split_whitespace().skip(1).collect();
    assert_eq!(shown(&elsewhere, &words), here);
    let (stdout, _) = good(paceline(&folder, &["config", "show"]));
    fs::write(elsewhere.join("paceline.toml"), stdout).unwrap();
    assert_eq!(shown(&elsewhere, &[]), shown(&folder, &[]));

    // Keys are not shown.
    let mut command = paceline(&elsewhere, &["config", "show", "serve"]);
    command.env("PACELINE_API_KEY", "sesame");
    let (stdout, _) = good(command);
    assert!(stdout.contains("# api-key is set, and not shown") && !stdout.contains("sesame"));
}

#[test]
fn a_broken_configuration_names_file_and_key_but_leaves_the_help() {
    let folder = folder("config-broken");
    fs::write(folder.join("paceline.toml"), "drift = 1\n").unwrap();
    assert_eq!(
        bad(paceline(&folder, &["run", PROMPT])),
        "paceline: paceline.toml: `drift` is not an option of any command"
    );
    assert!(
        good(paceline(&folder, &["run", "--help"]))
            .0
            .contains("Usage")
    );
    assert!(
        good(paceline(&folder, &["completions", "bash"]))
            .0
            .contains("paceline")
    );
    fs::write(folder.join("paceline.toml"), "kv = 'f8'\n").unwrap();
    let error = bad(paceline(&folder, &["run", PROMPT]));
    assert!(
        error.starts_with("paceline: paceline.toml: kv: invalid value 'f8'"),
        "{error}"
    );
}
