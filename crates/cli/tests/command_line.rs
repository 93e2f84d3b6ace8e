//! The executable as a shell sees it: exit status, what goes to which output, help, completion.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs,
    io::{Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixListener, UnixStream},
        process::CommandExt,
    },
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::mpsc::{Sender, channel},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

const EXECUTABLE: &str = env!("CARGO_BIN_EXE_sandwire");
const NO_DAEMON: &str = "/nonexistent/sandwire.sock";
/// A user without rights, where tests are run by root.
const NOBODY: u32 = 65_534;

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
    "health",
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
    "health",
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
        assert_eq!(document["error"]["code"], "unavailable", "'{line}'");
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
fn a_wrong_value_is_told_how_it_is_written() {
    for (line, wanted) in [
        (
            "pool create web --ipv4 10.64.0.0",
            "write an address with its prefix length, as 10.64.0.0/16",
        ),
        (
            "pool create web --ipv6 fd00::/64 --guest-ipv6 fd00::2",
            "as fd00:5eed::2/64",
        ),
        ("acquire web a --netns b --route 10.0.0.0", "as 10.0.0.0/8"),
        ("policy set a", "give what is to be other"),
    ] {
        let output = sandwire(line);
        assert_eq!(status(&output), 1, "{line}");
        let told = stderr(&output);
        assert!(told.contains(wanted), "{line}: {told}");
        assert!(
            !told.contains("invalid IP address syntax"),
            "{line}: {told}"
        );
    }
}

#[test]
fn who_lacks_rights_is_told_to_be_root() {
    let folder = tempfile::tempdir().unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let write = |name: &str, text: &str| {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let state = folder.path().join("state");
    fs::create_dir(&state).unwrap();
    let config = format!("instance = \"rights\"\nstate_dir = {state:?}\n");
    let config = write("sandwire.toml", &config);
    let lab = write("lab.toml", "[host.a]\n");
    for line in [
        format!("daemon --config {config}"),
        "cleanup --dry-run --instance rights".to_owned(),
        "relay clear".to_owned(),
        format!("lab up {lab}"),
        "lab down rights".to_owned(),
    ] {
        let mut command = Command::new(EXECUTABLE);
        if rustix::process::geteuid().is_root() {
            command.uid(NOBODY).gid(NOBODY);
        }
        let output = command
            .args(line.split_whitespace())
            .env("SANDWIRE_SOCKET", NO_DAEMON)
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let told = stderr(&output);
        assert_ne!(status(&output), 0, "{line}");
        assert!(
            told.contains("needs root") && told.contains("as root"),
            "{line}: {told}"
        );
    }
}

#[test]
fn a_socket_that_is_named_wins_over_the_environment() {
    let output = sandwire("--socket /nonexistent/other.sock list");
    assert!(stderr(&output).contains("/nonexistent/other.sock"));
}

#[test]
fn what_keeps_a_relay_from_its_start_is_told_by_the_check() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().display();
    let keys = sandwire(&format!("relay keys {path} host.example"));
    assert_eq!(status(&keys), 0, "{}", stderr(&keys));
    let config = format!(
        "[tls]\ncertificate = \"{path}/host.example.pem\"\nkey = \"{path}/host.example.key\"\n\
         authorities = \"{path}/authority.pem\"\n[egress]\ndaemon = \"{NO_DAEMON}\"\n\
         [[peer]]\nname = \"beyond\"\naddress = \"203.0.113.9:4433\"\nserver_name = \"peer.example\"\n\
         [[redirect]]\nfrom = [\"10.64.0.0/16\"]\nto = [\"198.51.100.0/24\"]\nvia = \"beyond\"\n"
    );
    let file = folder.path().join("relay.toml");
    fs::write(&file, &config).unwrap();
    let check = || sandwire(&format!("relay check --config {}", file.display()));
    let right = check();
    assert_eq!(status(&right), 0, "{}", stderr(&right));
    let said = stdout(&right);
    assert!(
        said.starts_with("ok\n") && said.contains(NO_DAEMON),
        "{said}"
    );
    let assert_wrong = |reason: &str| {
        let wrong = check();
        assert_eq!(status(&wrong), 1, "{}", stdout(&wrong));
        let said = stderr(&wrong);
        assert!(said.contains(reason), "{said}");
    };
    let no_cgroup = format!("[[sender]]\nname = \"batch\"\ncgroup = \"{path}\"\n");
    fs::write(&file, format!("{config}{no_cgroup}")).unwrap();
    assert_wrong("no cgroup of version 2");
    fs::write(&file, config).unwrap();
    fs::remove_file(folder.path().join("host.example.key")).unwrap();
    assert_wrong("host.example.key");
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

const TRACE_HEAD: &str = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n";
const TRACE_BEGIN: &str = r#"{"event":"begin"}"#;
const TRACED: &str = r#"{"event":"packet","time":1,"nic":0,"direction":"egress","verdict":"drop","stage":"policy","reason":"metadata","target":null,"length":14,"segments":1,"frame":"0273770000010600c0a8f1020800"}"#;

/// A daemon of one socket, which serves each connection by a function.
fn daemon(folder: &Path, serve: impl Fn(UnixStream) + Send + 'static) -> PathBuf {
    let path = folder.join("socket");
    let listener = UnixListener::bind(&path).unwrap();
    thread::spawn(move || {
        for stream in listener.incoming() {
            serve(stream.unwrap());
        }
    });
    path
}

fn read_head(stream: &mut UnixStream) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).ok()?;
        head.extend(byte);
    }
    String::from_utf8(head).ok()
}

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

/// A daemon whose traces have packets without end, as long as somebody reads them. Sends word of each that begins.
fn tracing_daemon(folder: &Path, begun: Sender<()>) -> PathBuf {
    daemon(folder, move |mut stream| {
        read_head(&mut stream).unwrap();
        let lines = format!("{TRACED}\n").repeat(100);
        let first = format!("{TRACE_HEAD}{}", chunk(&format!("{TRACE_BEGIN}\n")));
        stream.write_all(first.as_bytes()).unwrap();
        begun.send(()).unwrap();
        while stream.write_all(chunk(&lines).as_bytes()).is_ok() {}
    })
}

#[test]
fn a_trace_that_the_daemon_cuts_off_is_still_one_document() {
    let folder = tempfile::tempdir().unwrap();
    let socket = daemon(folder.path(), |mut stream| {
        read_head(&mut stream).unwrap();
        let lines = chunk(&format!("{TRACE_BEGIN}\n{TRACED}\n"));
        // Without the chunk that is the last.
        stream
            .write_all(format!("{TRACE_HEAD}{lines}").as_bytes())
            .unwrap();
    });
    let output = sandwire(&format!("--json --socket {} trace a7", socket.display()));
    assert_eq!(status(&output), 2, "{}", stderr(&output));
    let packets: Value = serde_json::from_str(&stdout(&output))
        .unwrap_or_else(|error| panic!("{error}: {}", stdout(&output)));
    assert_eq!(packets.as_array().unwrap().len(), 1);
    assert_eq!(packets[0]["reason"], "metadata");
    let said = stderr(&output);
    assert!(said.contains("cannot trace lease a7"), "{said}");
}

/// As a probe takes it: the status says it, and the answer why.
#[test]
fn a_daemon_that_is_not_ready_ends_health_with_2() {
    let folder = tempfile::tempdir().unwrap();
    let body = |ready: bool| {
        format!(
            r#"{{"ready":{ready},"version":"1","instance":"default","problems":[{{"subject":"pool web","message":"why","blocking":{}}}]}}"#,
            !ready
        )
    };
    for (code, ready, expected, kind) in [(200, true, 0, "warning"), (503, false, 2, "error")] {
        let folder = folder.path().join(code.to_string());
        fs::create_dir(&folder).unwrap();
        let socket = daemon(&folder, move |mut stream| {
            let head = read_head(&mut stream).unwrap();
            assert!(head.starts_with("GET /healthz "), "{head}");
            let body = body(ready);
            let head = format!(
                "HTTP/1.1 {code} X\r\ncontent-length: {}\r\n\r\n",
                body.len()
            );
            stream
                .write_all(format!("{head}{body}").as_bytes())
                .unwrap();
        });
        let output = sandwire(&format!("--socket {} health", socket.display()));
        let said = stdout(&output);
        assert_eq!(status(&output), expected, "{said}{}", stderr(&output));
        assert!(
            said.contains(&format!("\n{kind}: pool web: why\n")),
            "{said}"
        );
        let output = sandwire(&format!("--json --socket {} health", socket.display()));
        let document: Value = serde_json::from_str(&stdout(&output)).unwrap();
        assert_eq!(
            (status(&output), &document["ready"]),
            (expected, &ready.into())
        );
    }
}

/// Waits for the end of a process, and ends it where it doesn't come.
fn end_of(mut child: Child) -> Option<Output> {
    let deadline = Instant::now() + Duration::from_secs(20);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > deadline {
            child.kill().unwrap();
            child.wait().unwrap();
            return None;
        }
        thread::sleep(Duration::from_millis(10));
    }
    Some(child.wait_with_output().unwrap())
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill")
        .args(["-s", name, &child.id().to_string()])
        .status();
    assert!(sent.unwrap().success());
}

#[test]
fn a_trace_that_nobody_reads_can_be_ended() {
    let folder = tempfile::tempdir().unwrap();
    let fifo = folder.path().join("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let (begun, begins) = channel();
    let socket = tracing_daemon(folder.path(), begun);
    for (line, name) in [
        ("trace a7".to_owned(), "TERM"),
        ("--json trace a7".to_owned(), "INT"),
        ("trace a7 -w -".to_owned(), "TERM"),
        (format!("trace a7 -w {}", fifo.display()), "INT"),
    ] {
        // A pipe that is full before long; nobody opens the other.
        let child = Command::new(EXECUTABLE)
            .args(line.split_whitespace())
            .env("SANDWIRE_SOCKET", &socket)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        begins.recv_timeout(Duration::from_secs(20)).unwrap();
        thread::sleep(Duration::from_millis(300));
        signal(&child, name);
        let output = end_of(child).unwrap_or_else(|| panic!("'{line}' did not end by SIG{name}"));
        let said = stderr(&output);
        assert_eq!(status(&output), 2, "'{line}': {said}");
        assert!(said.contains("cannot trace lease a7"), "'{line}': {said}");
    }
}

/// Leases with long names and many limits, so that a row of them takes several lines of a small terminal.
fn traffic_of(leases: usize) -> String {
    let limit = r#"{"bits_per_second":100000000,"burst_bytes":65536,"packets_per_second":20000,"burst_packets":64}"#;
    let rows: Vec<String> = (0..leases)
        .map(|number| {
            format!(
                r#"{{"name":"a-lease-with-a-long-name-{number}","pool":"a-pool-of-many","owner_uid":1000,"slot":{number},"kind":"host","data_path":"ebpf","limits":{{"egress":{limit},"ingress":{limit}}},"traffic":{{"egress":{{"packets":3,"bytes":4000,"segments":5}},"ingress":{{"packets":0,"bytes":0,"segments":0}},"drops":{{"arp":2,"metadata":7,"policy":9}}}}}}"#
            )
        })
        .collect();
    format!("[{}]", rows.join(","))
}

/// Answers each request of a connection with the traffic of so many leases, at most so many times.
fn answer_with_traffic(mut stream: UnixStream, leases: usize, times: usize) {
    let body = traffic_of(leases);
    for _ in 0..times {
        if read_head(&mut stream).is_none() {
            return;
        }
        let length = body.len();
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {length}\r\n\r\n{body}");
        stream.write_all(answer.as_bytes()).unwrap();
    }
}

#[test]
fn a_live_table_stays_while_the_daemon_is_started_anew() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let place = socket.clone();
    let listener = UnixListener::bind(&place).unwrap();
    thread::spawn(move || {
        answer_with_traffic(listener.accept().unwrap().0, 1, 2);
        fs::remove_file(&place).unwrap();
        drop(listener);
        thread::sleep(Duration::from_millis(2500));
        let listener = UnixListener::bind(&place).unwrap();
        answer_with_traffic(listener.accept().unwrap().0, 2, usize::MAX);
    });
    let line = format!(
        "stty rows 24 cols 200; timeout --foreground 8 {EXECUTABLE} --socket {} top",
        socket.display()
    );
    let output = Command::new("script")
        .args(["-qc", &line, "/dev/null"])
        .stdin(Stdio::null())
        .output()
        .expect("script is installed");
    let text = stdout(&output);
    let screens: Vec<&str> = text.split("\x1b[H\x1b[J").collect();
    let (away, there): (Vec<&str>, Vec<&str>) = screens[2..]
        .iter()
        .copied()
        .partition(|screen| screen.contains("no answer from the daemon"));
    assert!(!away.is_empty(), "{text}");
    for screen in &away {
        assert!(screen.contains("long-name-0"), "the last table: {screen}");
    }
    assert!(!there[0].contains("long-name-1"), "{text}");
    assert!(there.last().unwrap().contains("long-name-1"), "{text}");
}

#[test]
fn a_live_table_fits_the_terminal_with_its_head() {
    let folder = tempfile::tempdir().unwrap();
    let socket = daemon(folder.path(), |stream| {
        answer_with_traffic(stream, 60, usize::MAX);
    });
    // A terminal that doesn't know its size is taken for one of 24 lines.
    for (rows, columns, lines_min, lines_max) in [
        (24, 80, 10, 23),
        (24, 200, 15, 23),
        (50, 80, 30, 49),
        (0, 0, 15, 23),
    ] {
        let line = format!(
            "stty rows {rows} cols {columns}; timeout --foreground 3 {EXECUTABLE} --socket {} top",
            socket.display()
        );
        let output = Command::new("script")
            .args(["-qc", &line, "/dev/null"])
            .stdin(Stdio::null())
            .output()
            .expect("script is installed");
        let text = stdout(&output);
        let screens: Vec<&str> = text.split("\x1b[H\x1b[J").collect();
        assert!(screens.len() >= 3, "{rows} x {columns}: {text}");
        // The first says that it measures.
        let screen = screens[2];
        let head = screen.lines().next().unwrap_or_default();
        assert!(head.starts_with("LEASE"), "{rows} x {columns}: {screen}");
        let lines = screen.matches('\n').count();
        assert!(
            (lines_min..=lines_max).contains(&lines),
            "{rows} x {columns}: {lines} lines\n{screen}"
        );
        assert!(screen.contains(" more"), "{rows} x {columns}: {screen}");
    }
}
