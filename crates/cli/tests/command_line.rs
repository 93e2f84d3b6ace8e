//! The executable as a shell sees it: exit status, what goes to which output, help, completion.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    io::Read,
    process::{Command, Output, Stdio},
};

use serde_json::Value;

const EXECUTABLE: &str = env!("CARGO_BIN_EXE_sandwire");
const NO_DAEMON: &str = "/nonexistent/sandwire.sock";

fn sandwire(line: &str) -> Output {
    Command::new(EXECUTABLE)
        .args(line.split_whitespace())
        .env("SANDWIRE_SOCKET", NO_DAEMON)
        .stdin(Stdio::null())
        .output()
        .unwrap()
}

fn status(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

const VERBS: &[&str] = &[
    "daemon",
    "pool",
    "pool create",
    "pool list",
    "pool show",
    "pool set",
    "pool resize",
    "pool delete",
    "acquire",
    "release",
    "list",
    "show",
    "policy show",
    "policy set",
    "policy reset",
    "top",
    "trace",
    "publish",
    "run",
    "exec",
    "doctor",
    "cleanup",
    "completion",
    "bench",
    "bench slots",
    "bench report",
];

#[test]
fn every_verb_has_help() {
    for verb in VERBS {
        let output = sandwire(&format!("{verb} --help"));
        assert_eq!(status(&output), 0, "{verb}");
        let text = stdout(&output);
        assert!(
            text.contains(&format!("Usage: sandwire {verb}")),
            "{verb}:\n{text}"
        );
        assert!(text.contains("--json"), "{verb}:\n{text}");
    }
}

#[test]
fn the_version_is_told() {
    let output = sandwire("--version");
    assert_eq!(
        (status(&output), stdout(&output)),
        (0, format!("sandwire {}\n", env!("CARGO_PKG_VERSION")))
    );
}

/// Command lines that can't be meant; none of them reaches a daemon.
const WRONG: &[&str] = &[
    "",
    "nonsense",
    "acquire",
    "acquire Web",
    "acquire web --ttl never",
    "acquire web --clone-address here",
    "release",
    "publish a1",
    "publish a1 80:80:80",
    "publish --list --withdraw",
    "pool create web",
    "pool create web --ipv4 10.64.0.0/33",
    "pool create web --kind cloud --ipv4 10.64.0.0/16",
    "pool create web --file /nonexistent/pool.toml",
    "pool resize web many",
    "run",
    "completion powershell",
    "cleanup --instance a.b",
];

#[test]
fn a_wrong_command_line_is_refused_with_1() {
    for line in WRONG {
        let output = sandwire(line);
        assert_eq!(
            status(&output),
            1,
            "'{line}' ended otherwise: {}",
            stderr(&output)
        );
        assert!(!stderr(&output).is_empty(), "'{line}' said nothing");
        assert_eq!(stdout(&output), "", "'{line}'");
    }
}

#[test]
fn a_refusal_in_json_is_one_document() {
    for line in WRONG.iter().filter(|line| !line.is_empty()) {
        let output = sandwire(&format!("--json {line}"));
        assert_eq!(status(&output), 1, "'{line}'");
        let document: Value = serde_json::from_str(&stdout(&output)).unwrap_or_else(|error| {
            panic!("'{line}' printed no JSON ({error}): {}", stdout(&output))
        });
        assert_eq!(document["error"]["code"], "invalid_request", "'{line}'");
        assert_eq!(document["error"]["exit_status"], 1, "'{line}'");
    }
}

#[test]
fn a_json_flag_of_the_command_is_not_ours() {
    let output = sandwire("run --pool Web -- jq --json");
    assert_eq!((status(&output), stdout(&output)), (1, String::new()));
}

/// Verbs that need the daemon.
const TALKING: &[&str] = &[
    "pool list",
    "pool show web",
    "pool resize web 3",
    "pool delete web",
    "pool create web --ipv4 10.64.0.0/16",
    "acquire web",
    "release a1",
    "list",
    "show a1",
    "publish a1 80:80",
    "publish a1 80 --withdraw",
    "publish --list",
];

#[test]
fn without_a_daemon_the_verbs_fail_with_2_and_say_what_to_do() {
    for line in TALKING {
        let output = sandwire(line);
        let message = stderr(&output);
        assert_eq!(status(&output), 2, "'{line}': {message}");
        assert!(
            message.starts_with("sandwire: cannot "),
            "'{line}': {message}"
        );
        assert!(
            message.contains(NO_DAEMON) && message.contains("sandwire daemon"),
            "'{line}': {message}"
        );
        assert_eq!(message.lines().count(), 1, "'{line}': {message}");
    }
}

#[test]
fn without_a_daemon_json_is_still_one_document() {
    for line in TALKING {
        let output = sandwire(&format!("{line} --json"));
        let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(
            (status(&output), &document["error"]["exit_status"]),
            (2, &Value::from(2)),
            "'{line}'"
        );
    }
}

#[test]
fn several_releases_that_fail_are_all_reported() {
    let output = sandwire("release a1 a2 --json");
    assert_eq!(status(&output), 2);
    let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(document["failures"].as_array().unwrap().len(), 2);
}

#[test]
fn a_socket_that_is_named_wins_over_the_environment() {
    let output = sandwire("--socket /nonexistent/other.sock list");
    assert!(stderr(&output).contains("/nonexistent/other.sock"));
}

#[test]
fn completion_scripts_know_the_verbs() {
    for (shell, sign) in [
        ("bash", "complete -F"),
        ("zsh", "#compdef sandwire"),
        ("fish", "complete -c sandwire"),
    ] {
        let output = sandwire(&format!("completion {shell}"));
        let script = stdout(&output);
        assert_eq!(status(&output), 0);
        for word in [sign, "acquire", "clone-address", "doctor"] {
            assert!(script.contains(word), "{shell} lacks {word}");
        }
    }
}

#[test]
fn bash_takes_the_completion_script() {
    let script = stdout(&sandwire("completion bash"));
    let probe = format!(
        "{script}\nCOMP_WORDS=(sandwire rele); COMP_CWORD=1; _sandwire sandwire rele sandwire; echo \"${{COMPREPLY[@]}}\""
    );
    // Longer than an argument may be.
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("probe");
    std::fs::write(&file, probe).unwrap();
    let output = Command::new("bash").arg("-eu").arg(file).output().unwrap();
    assert_eq!(stdout(&output).trim(), "release", "{}", stderr(&output));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    for line in ["completion bash", "--help"] {
        let mut child = Command::new(EXECUTABLE)
            .args(line.split_whitespace())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let mut said = String::new();
        child
            .stderr
            .take()
            .unwrap()
            .read_to_string(&mut said)
            .unwrap();
        assert_eq!(
            (child.wait().unwrap().code(), said),
            (Some(0), String::new()),
            "{line}"
        );
    }
}

#[test]
fn the_doctor_answers_without_any_rights_in_one_document() {
    let output = sandwire("doctor --json");
    assert!([0, 2].contains(&status(&output)), "{}", stderr(&output));
    let report: Value = serde_json::from_str(&stdout(&output)).unwrap();
    assert_eq!(report["works"], status(&output) == 0);
    for name in [
        "TUN/TAP",
        "veth",
        "TCX",
        "netkit",
        "cgroup v2",
        "KVM",
        "firecracker",
    ] {
        let findings = report["findings"].as_array().unwrap();
        assert!(
            findings.iter().any(|finding| finding["name"] == name),
            "{name} is missing"
        );
    }
}

#[test]
fn the_doctor_prints_no_colour_into_a_pipe() {
    let text = stdout(&sandwire("doctor"));
    assert!(
        text.contains("essential") && !text.contains('\x1b'),
        "{text}"
    );
}
