//! Bad input: a clear refusal, nothing changed, and the daemon goes on.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    time::Duration,
};

use sandwire_testlab::{
    lab::{self, Lab},
    sandwire::{self, Daemon},
};
use serde_json::{Value, json};

const CONFIG: &str = r#"
instance = "refusals"
[[pool]]
name = "web"
size = 2
addresses = { plan = "prefix", ipv4 = "10.64.0.0/24", ipv6 = "fd00:c10e::/64" }
"#;

/// A request to create a pool, the code of the refusal, and words that its message must have.
const POOLS: &[(&str, &str, &[&str])] = &[
    (
        r#"{"name":"web","size":1,"addresses":{"plan":"prefix","ipv4":"10.65.0.0/24","ipv6":"fd00:2::/64"}}"#,
        "conflict",
        &["web"],
    ),
    (
        r#"{"name":"b","addresses":{"plan":"prefix","ipv4":"10.64.0.128/25","ipv6":"fd00:2::/64"}}"#,
        "conflict",
        &["10.64.0.128/25", "web"],
    ),
    (
        r#"{"name":"b","addresses":{"plan":"prefix","ipv4":"10.65.0.0/32","ipv6":"fd00:2::/64"}}"#,
        "invalid_request",
        &["10.65.0.0/32"],
    ),
    (
        r#"{"name":"b","addresses":{"plan":"prefix","ipv4":"10.77.0.0/24","ipv6":"fd00:2::/64"}}"#,
        "conflict",
        &["10.77.0.0/16"],
    ),
    (
        r#"{"name":"b","addresses":{"plan":"prefix","ipv4":"192.168.241.0/24","ipv6":"fd00:2::/64"}}"#,
        "invalid_request",
        &["192.168.241.0"],
    ),
    (
        r#"{"name":"b","tap":{"name":"a-name-of-16-byte"},"addresses":{"plan":"prefix","ipv4":"10.65.0.0/24","ipv6":"fd00:2::/64"}}"#,
        "invalid_request",
        &["15"],
    ),
    (
        r#"{"name":"b","nics":9,"addresses":{"plan":"prefix","ipv4":"10.65.0.0/24","ipv6":"fd00:2::/64"}}"#,
        "invalid_request",
        &["9"],
    ),
    (
        r#"{"name":"b","kind":"host","data_path":"nft","addresses":{"plan":"prefix","ipv4":"10.65.0.0/24","ipv6":"fd00:2::/64"}}"#,
        "unsupported",
        &["ebpf"],
    ),
    (
        r#"{"name":"b","data_path":"xdp","addresses":{"plan":"prefix","ipv4":"10.65.0.0/24","ipv6":"fd00:2::/64"}}"#,
        "unsupported",
        &["xdp"],
    ),
    (
        r#"{"name":"../b","addresses":{"plan":"prefix","ipv4":"10.65.0.0/24"}}"#,
        "invalid_request",
        &["../b"],
    ),
    (
        r#"{"name":"b","sise":1,"addresses":{"plan":"prefix","ipv4":"10.65.0.0/24","ipv6":"fd00:2::/64"}}"#,
        "invalid_request",
        &["sise"],
    ),
    (r#"{"name":"b""#, "invalid_request", &["line 1"]),
    ("", "invalid_request", &[]),
];

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_pool_that_cannot_work_is_refused_and_changes_nothing() {
    lab::run(|lab| {
        lab.shell(
            "ip link add dev0 type bridge; ip link set dev0 up; ip route add 10.77.0.0/16 dev dev0",
        );
        let daemon = start(lab);
        let before = lab.snapshot();
        for (body, code, words) in POOLS {
            let (status, error) = post(&daemon, "/v1/pools", body);
            assert!(
                (400..500).contains(&status) || status == 501,
                "{body}: {status} {error}"
            );
            assert_eq!(error["code"], *code, "{body}: {error}");
            let message = error["message"].as_str().unwrap();
            for word in *words {
                assert!(
                    message.contains(word),
                    "{body}: '{message}' doesn't name {word}"
                );
            }
        }
        lab.assert_unchanged(&before);
        assert_eq!(
            daemon.json("pool list").unwrap().as_array().unwrap().len(),
            1
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn unknown_names_are_told_apart_from_failures() {
    lab::run(|lab| {
        let daemon = start(lab);
        for verb in [
            "show nobody",
            "release nobody",
            "acquire nowhere a",
            "pool show nowhere",
            "publish nobody 80:80",
        ] {
            let output = daemon.output(verb).unwrap();
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{verb}: {stderr}");
            assert!(stderr.contains("no"), "{verb}: {stderr}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn floods_of_the_socket_leave_the_daemon_in_service() {
    lab::run(|lab| {
        let daemon = start(lab);
        let big = vec![b'x'; 10 << 20];
        let mut stream = UnixStream::connect(daemon.socket()).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        write!(stream, "POST /v1/leases HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", big.len()).unwrap();
        // The daemon may stop reading in the middle.
        let _ = stream.write_all(&big);
        let mut answer = [0; 16];
        let length = stream.read(&mut answer).unwrap_or(0);
        assert!(
            length == 0 || answer.starts_with(b"HTTP/1.1 413"),
            "{:?}",
            String::from_utf8_lossy(&answer)
        );
        let silent: Vec<_> = (0..1000)
            .filter_map(|_| UnixStream::connect(daemon.socket()).ok())
            .collect();
        assert_eq!(silent.len(), 1000);
        assert_eq!(daemon.http("GET", "/healthz", None).unwrap().status, 200);
        daemon.json("acquire web a").unwrap();
        drop(silent);
        daemon.json("release a").unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_second_daemon_on_one_state_folder_is_refused() {
    lab::run(|lab| {
        let daemon = start(lab);
        let config = lab.folder().join("second.toml");
        let text = format!(
            "socket = {:?}\nstate_dir = {:?}\ninstance = \"others\"\n",
            lab.folder().join("second.sock"),
            daemon.state_folder()
        );
        fs::write(&config, text).unwrap();
        let output = daemon
            .command("daemon --config")
            .arg(&config)
            .output()
            .unwrap();
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success());
        assert!(
            stderr.contains(daemon.state_folder().to_str().unwrap()),
            "{stderr}"
        );
        assert_eq!(daemon.http("GET", "/healthz", None).unwrap().status, 200);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_wrong_configuration_is_refused_with_its_line() {
    lab::run(|lab| {
        let executable = sandwire::executable().unwrap();
        for (text, line, word) in [
            ("instance = \"a\"\nbuilderz = 3\n", ":2", "builderz"),
            ("instance = 7\n", ":1", "string"),
            ("\n\n[[pool]]\nname = \"UPPER\"\n", ":4", "UPPER"),
        ] {
            let config = lab.folder().join("wrong.toml");
            fs::write(&config, text).unwrap();
            let output = std::process::Command::new(&executable)
                .args(["daemon", "--config"])
                .arg(&config)
                .output()
                .unwrap();
            let stderr = String::from_utf8(output.stderr).unwrap();
            assert_eq!(output.status.code(), Some(1), "{text}: {stderr}");
            assert!(
                stderr.contains(&format!("wrong.toml{line}")),
                "{text}: {stderr}"
            );
            assert!(stderr.contains(word), "{text}: {stderr}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_full_disk_refuses_the_acquire_and_keeps_the_slot() {
    lab::run(|lab| {
        let state = lab.folder().join("state");
        fs::create_dir(&state).unwrap();
        lab.run(&format!(
            "mount -t tmpfs -o size=1m tmpfs {}",
            state.display()
        ));
        let daemon = start(lab);
        let filler = state.join("filler");
        // `dd` ends with an error when the file system is full: that is what we want of it.
        lab.shell(&format!(
            "dd if=/dev/zero of={} bs=4k 2>/dev/null || true",
            filler.display()
        ));
        let mut refusal = None;
        for number in 0..100 {
            let (status, answer) = post(
                &daemon,
                "/v1/leases",
                &json!({"pool": "web", "name": format!("a{number}")}).to_string(),
            );
            if status >= 500 && answer["code"] == "internal" {
                refusal = Some(answer);
                break;
            }
            daemon.json(&format!("release a{number}")).ok();
        }
        let refusal = refusal.expect("a full disk is noticed");
        let message = refusal["message"].as_str().unwrap();
        assert!(message.contains("journal"), "{message}");
        fs::remove_file(&filler).unwrap();
        let lease = daemon.json("acquire web after").unwrap();
        assert_eq!(lease["state"], "active");
    });
}

fn start(lab: &Lab) -> Daemon {
    let executable = sandwire::executable().unwrap();
    let daemon = Daemon::start(&executable, lab.folder(), CONFIG).unwrap();
    daemon.wait_pool("web", 2, Duration::from_secs(60)).unwrap();
    daemon
}

fn post(daemon: &Daemon, path: &str, body: &str) -> (u16, Value) {
    let answer = sandwire_testlab::http::request_unix(
        &daemon.socket(),
        "POST",
        path,
        Some(body),
        Duration::from_secs(30),
    )
    .unwrap();
    let value = answer
        .json()
        .unwrap_or_else(|_| panic!("{body}: not JSON: {}", answer.body));
    (answer.status, value)
}
