//! `paceline ps`, `stop` and `launch`: servers that run, and clients that use them.

use crate::{Server, bad, folder, good, paceline, text};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;

/// The servers that `ps` knows.
fn listed(folder: &Path) -> Vec<Value> {
    let (stdout, _) = good(paceline(folder, &["ps", "--json"]));
    let list: Value = serde_json::from_str(&stdout).unwrap();
    list["servers"].as_array().unwrap().clone()
}

#[test]
fn servers_are_listed_and_stopped() {
    let folder = folder("servers");
    assert_eq!(listed(&folder), Vec::<Value>::new());
    let (_, stderr) = good(paceline(&folder, &["ps"]));
    assert!(stderr.contains("no server runs"), "{stderr}");
    assert!(bad(paceline(&folder, &["stop"])).contains("no server runs"));

    let mut first = Server::start(&folder, &["--alias", "one", "--no-probe"]);
    let mut second = Server::start(&folder, &["--alias", "two", "--api-key", "k", "--no-probe"]);
    let servers = listed(&folder);
    let of = |name: &str| servers.iter().find(|s| s["model"] == name).unwrap();
    assert_eq!(servers.len(), 2);
    assert_eq!(of("one")["url"], format!("http://{}", first.address));
    assert_eq!(of("one")["status"], "ok");
    assert_eq!(of("two")["pid"], second.child.id());
    assert_eq!(
        (&of("one")["needs_key"], &of("two")["needs_key"]),
        (&Value::Bool(false), &Value::Bool(true))
    );
    let (table, _) = good(paceline(&folder, &["ps"]));
    assert!(
        table.starts_with("PID ") && table.contains(&second.address),
        "{table}"
    );

    assert!(bad(paceline(&folder, &["stop"])).contains("2 servers run"));
    assert!(bad(paceline(&folder, &["stop", "three"])).contains("`three`"));
    let (_, stderr) = good(paceline(&folder, &["stop", "two"]));
    assert!(stderr.contains("stopped two"), "{stderr}");
    assert!(second.child.wait().unwrap().success());
    assert_eq!(listed(&folder).len(), 1);
    good(paceline(&folder, &["stop"]));
    assert!(first.child.wait().unwrap().success());

    // One that could not take its file along is forgotten.
    let mut gone = Server::start(&folder, &["--no-probe"]);
    assert_eq!(listed(&folder).len(), 1);
    gone.child.kill().unwrap();
    gone.child.wait().unwrap();
    assert_eq!(listed(&folder), Vec::<Value>::new());
    assert_eq!(
        fs::read_dir(folder.join("paceline/servers"))
            .unwrap()
            .count(),
        0
    );
}

/// Puts a program called `name` into `folder` that writes its arguments and environment, and asks
/// the server for its models.
fn client(folder: &Path, name: &str) {
    let script = "#!/bin/sh\nprintf 'argument %s\\n' \"$@\"\nenv\nexit 7\n";
    // Another process writes it: what this one has open for writing, a process that another test starts meanwhile has
    // open as well, and what is open for writing cannot be run.
    let write = Command::new("sh")
        .args(["-c", "printf %s \"$1\" > \"$0\" && chmod 755 \"$0\""])
        .args([folder.join(name).as_os_str(), script.as_ref()])
        .status();
    assert!(write.unwrap().success());
}

#[test]
fn a_client_is_told_of_a_server() {
    let folder = folder("launch");
    client(&folder, "claude");
    client(&folder, "codex");
    let launch = |args: &[&str]| {
        let mut command = paceline(&folder, &[&["launch"], args].concat());
        let paths = std::env::var("PATH").unwrap();
        command.env("PATH", format!("{}:{paths}", folder.display()));
        command
    };
    // A server is started and ends with the client, whose exit code counts.
    let output = launch(&["claude", "--no-probe", "--", "-p", "two words"])
        .output()
        .unwrap();
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(7), "{stderr}");
    assert!(
        stdout.starts_with("argument -p\nargument two words\n"),
        "{stdout}"
    );
    assert!(
        stdout.contains("\nANTHROPIC_BASE_URL=http://127.0.0.1:"),
        "{stdout}"
    );
    assert!(
        stdout.contains("\nANTHROPIC_MODEL=tiny-gemma4\n"),
        "{stdout}"
    );
    assert!(
        stderr.contains("claude uses tiny-gemma4 at http://127.0.0.1:"),
        "{stderr}"
    );
    assert!(bad(launch(&["codex", "--print"])).contains("`paceline serve`"));

    // One that runs is used.
    let server = Server::start(
        &folder,
        &["--alias", "mine", "--api-key", "k", "--no-probe"],
    );
    assert!(bad(launch(&["codex"])).contains("--api-key"));
    let (lines, _) = good(launch(&["codex", "--api-key", "k", "--print"]));
    assert!(
        lines.contains(&format!("http://{}/v1", server.address)),
        "{lines}"
    );
    assert!(lines.contains("export PACELINE_LAUNCH_KEY=k\n"), "{lines}");
    let output = launch(&["codex", "--api-key", "k", "-q", "--", "exec"])
        .output()
        .unwrap();
    assert_eq!(text(&output.stderr), "");
    let stdout = text(&output.stdout);
    assert!(
        stdout.contains("argument model=\"mine\"\n") && stdout.contains("argument exec\n"),
        "{stdout}"
    );
    let error = bad(launch(&["opencode", "--api-key", "k"]));
    assert!(error.contains("npm install -g opencode-ai"), "{error}");
}
