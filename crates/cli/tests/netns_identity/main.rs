//! Identities as a user makes them, by the executable alone.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

mod configuration;

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::{IpAddr, UdpSocket},
    os::unix::process::CommandExt,
    path::Path,
    process::{Child, Command, Output, Stdio},
    time::Duration,
};

use sandwire_testlab::{
    cgroup::Cgroup,
    fake_guest::FakeGuest,
    host::{Beyond, HOST_IPV4},
    lab::{self, Lab},
    openmetrics,
    sandwire::{self, Daemon, Lease},
};
use serde_json::Value;

const DEADLINE: Duration = Duration::from_secs(600);

fn identity(arguments: &[&str]) -> Output {
    let executable = sandwire::executable().unwrap();
    let mut command = Command::new(executable);
    command.arg("identity").args(arguments).output().unwrap()
}

/// The answer of one that must succeed, as JSON.
fn done(arguments: &[&str]) -> Value {
    let output = identity(&[arguments, &["--json"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {error}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Standard error of one that must be refused.
fn refused(arguments: &[&str]) -> String {
    let output = identity(arguments);
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {error}");
    error
}

/// Which source address a process of the cgroup has towards an address of the host.
fn source(lab: &Lab, cgroup: &Cgroup) -> String {
    let script = format!(
        "echo 0 > {}/cgroup.procs; exec python3 -c 'import socket; s = socket.socket(type=socket.SOCK_DGRAM); \
         s.connect((\"192.0.2.1\", 9)); print(s.getsockname()[0])'",
        cgroup.path()
    );
    lab.shell(&script).trim().to_owned()
}

/// The program that calls of `connect` go by, of the kernel's.
fn connect4(lab: &Lab, cgroup: &Cgroup) -> Option<Value> {
    let shown = lab.run(&format!("bpftool -j cgroup show {}", cgroup.path()));
    let shown: Vec<Value> = serde_json::from_str(&shown).unwrap();
    let found = shown.iter().find(|hook| hook["name"] == "on_connect4");
    found.map(|hook| hook["id"].clone())
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_identity_from_add_to_remove() {
    lab::run_within(DEADLINE, |lab| {
        lab.run("ip addr add 192.0.2.1/32 dev lo");
        let cgroup = Cgroup::create().unwrap();
        assert_eq!(source(lab, &cgroup), "192.0.2.1");
        let name = ["--name", "web"];
        let address = ["--address", "10.77.0.1", "--address", "fd77::1"];
        let added = done(&[&["add", cgroup.path()][..], &name, &address].concat());
        assert_eq!(added["name"], "web");
        assert_eq!(added["loopback"][0], "127.1.0.1");
        assert_eq!(source(lab, &cgroup), "10.77.0.1");
        let listed = done(&["list"]);
        assert_eq!(listed[0]["addresses"][1], "fd77::1");
        let shown = done(&["show", "web"]);
        assert_eq!(shown["state"], "active");
        assert_eq!(shown["cgroup"], cgroup.path());
        let text = identity(&["show", "web"]).stdout;
        assert!(String::from_utf8(text).unwrap().contains("127.1.0.1"));

        let before = connect4(lab, &cgroup);
        assert_eq!(done(&["renew"]), serde_json::json!({ "identities": 1 }));
        let after = connect4(lab, &cgroup);
        assert!(after.is_some() && after != before, "{after:?}");
        assert_eq!(source(lab, &cgroup), "10.77.0.1");

        let again = refused(&["add", cgroup.path(), "--address", "10.77.0.2"]);
        assert!(again.contains("has an identity already, web"), "{again}");
        let nowhere = refused(&["add", "/nowhere", "--address", "10.77.0.2"]);
        assert!(nowhere.contains("is no cgroup"), "{nowhere}");
        let missing = refused(&["remove", "other"]);
        assert!(missing.contains("sandwire identity list"), "{missing}");

        assert_eq!(done(&["remove", "web"])["name"], "web");
        assert_eq!(done(&["list"]), serde_json::json!([]));
        assert_eq!(source(lab, &cgroup), "192.0.2.1");
    });
}

/// Waits for something that the kernel does by and by.
fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if is_so() {
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("never: {what}");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_policy_is_shown_set_and_reset() {
    lab::run_within(DEADLINE, |lab| {
        let cgroup = Cgroup::create().unwrap();
        let file = tempfile::NamedTempFile::new().unwrap();
        let path = file.path().to_str().unwrap();
        fs::write(path, "cloud_metadata = true\n").unwrap();
        let add = [
            "add",
            cgroup.path(),
            "--name",
            "web",
            "--prefix",
            "10.77.0.0/24",
        ];
        assert_eq!(
            done(&[&add[..], &["--policy", path]].concat())["addresses"][0],
            "10.77.0.1"
        );
        assert_eq!(done(&["policy", "show", "web"])["cloud_metadata"], true);
        fs::write(
            path,
            "[egress]\ndefault = \"deny\"\n[[egress.rules]]\naction = \"allow\"\nprefixes = [\"10.77.0.0/24\"]\n",
        )
        .unwrap();
        done(&["policy", "set", "web", "--file", path]);
        let text = String::from_utf8(identity(&["policy", "show", "web"]).stdout).unwrap();
        assert!(text.contains("10.77.0.0/24"), "{text}");
        lab.run("ip addr add 192.0.2.1/32 dev lo");
        let dial = format!(
            "echo 0 > {}/cgroup.procs; python3 -c 'import socket; socket.create_connection((\"192.0.2.1\", 9))' 2>&1 || true",
            cgroup.path()
        );
        assert!(lab.shell(&dial).contains("Operation not permitted"));
        let counted = done(&["show", "web"]);
        assert_eq!(counted["counters"]["refused"]["policy"], 1, "{counted}");
        fs::write(path, "uplink = \"deny\"\n").unwrap();
        let error = refused(&["policy", "set", "web", "--file", path]);
        assert!(error.contains("unknown field `uplink`"), "{error}");
        assert_eq!(
            done(&["policy", "reset", "web"])["egress"]["default"],
            "allow"
        );
        assert!(lab.shell(&dial).contains("refused"));
        done(&["remove", "web"]);
    });
}

fn run(parent: &Cgroup, arguments: &[&str]) -> Command {
    let mut command = Command::new(sandwire::executable().unwrap());
    command.args(["--json", "run", "--no-netns", "--cgroup", parent.path()]);
    command.args(arguments);
    command
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_command_runs_with_an_identity_and_nothing_is_left_of_it() {
    lab::run_within(DEADLINE, |lab| {
        let parent = Cgroup::create().unwrap();
        let before = lab.run("ip -o addr show dev lo");
        let address = ["--name", "job", "--address", "10.77.0.1"];
        let script = "sleep 1000 & cat /proc/self/cgroup >&2; echo $SANDWIRE_ADDRESSES >&2; exit 7";
        let arguments = [&address[..], &["--", "sh", "-c", script]].concat();
        let output = run(&parent, &arguments).output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(7), "{said}");
        assert!(
            said.contains("/sandwire-run-job") && said.contains("10.77.0.1"),
            "{said}"
        );
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["exit_status"], 7);
        assert_eq!(report["identity"]["name"], "job");
        let is_clean = || {
            let folders = fs::read_dir(parent.path()).unwrap().flatten();
            let mut folders = folders.filter(|entry| entry.path().is_dir());
            folders.next().is_none() && lab.run("ip -o addr show dev lo") == before
        };
        assert!(is_clean());
        assert_eq!(done(&["list"]), serde_json::json!([]));
        let output = run(&parent, &[&address[..], &["--", "/nowhere"]].concat()).output();
        assert_eq!(output.unwrap().status.code(), Some(127));
        assert!(is_clean());

        // Killed, it leaves the command running, and what is left when that ends is taken away by the next.
        let arguments = [
            &address[..],
            &["--", "sh", "-c", "echo begun >&2; read line"],
        ]
        .concat();
        let mut killed = run(&parent, &arguments)
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(killed.stderr.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "begun");
        let mut input = killed.stdin.take().unwrap();
        killed.kill().unwrap();
        killed.wait().unwrap();
        assert_eq!(done(&["list"])[0]["name"], "job");
        let second = run(&parent, &[&address[..], &["--", "true"]].concat()).output();
        assert_eq!(second.unwrap().status.code(), Some(1), "the name is taken");
        writeln!(input, "end").unwrap();
        until("the command ends", || lines.next().is_none());
        until("the next call cleans up", || {
            done(&["list"]) == serde_json::json!([])
        });
        assert!(is_clean());
        let output = run(&parent, &[&address[..], &["--", "true"]].concat()).output();
        assert!(output.unwrap().status.success());
        assert!(is_clean());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_server_that_needs_tcp_alone_is_reached_and_counted() {
    const SERVER: &str = "python3 -c 'import socket; socket.socket(type=socket.SOCK_DGRAM)' 2>&1 | tail -1 >&2; \
         exec python3 -m http.server --bind :: 8000";
    lab::run_within(DEADLINE, |lab| {
        let executable = sandwire::executable().unwrap();
        let config = "instance = \"identities\"\n";
        let mut daemon = Daemon::start(&executable, lab.folder(), config).unwrap();
        let parent = Cgroup::create().unwrap();
        let identity_of = ["--name", "web", "--tcp-only"];
        let addresses = ["--address", "10.77.0.1", "--address", "fd77::1"];
        let command = ["--", "sh", "-c", SERVER];
        let arguments = [&identity_of[..], &addresses, &command].concat();
        let mut server = run(&parent, &arguments)
            .current_dir(lab.folder())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(server.stderr.take().unwrap()).lines();
        let refused = lines.next().unwrap().unwrap();
        assert!(refused.contains("Protocol not supported"), "{refused}");
        fs::write(lab.folder().join("file"), vec![b'x'; 100_000]).unwrap();
        for address in ["10.77.0.1", "[fd77::1]"] {
            let fetch = format!(
                "curl -sf --retry 30 --retry-connrefused http://{address}:8000/file | wc -c"
            );
            assert_eq!(lab.shell(&fetch).trim(), "100000");
        }
        let shown = done(&["show", "web"]);
        assert_eq!(shown["tcp_only"], true);
        let bytes = shown["counters"]["egress"]["bytes"].as_u64().unwrap();
        assert!((200_000..210_000).contains(&bytes), "{bytes}");
        let text = String::from_utf8(identity(&["show", "web"]).stdout).unwrap();
        assert!(text.contains("tcp only"), "{text}");
        let metrics = daemon.http("GET", "/metrics", None).unwrap().body;
        let figure = "sandwire_identity_bytes_total{identity=\"web\",direction=\"egress\"} ";
        let told = metrics
            .split(figure)
            .nth(1)
            .and_then(|rest| rest.lines().next());
        let told: u64 = told.unwrap().parse().unwrap();
        assert!((bytes..210_000).contains(&told), "{told}");
        let main = fs::read_to_string(parent.path().to_owned() + "/sandwire-run-web/cgroup.procs")
            .unwrap();
        lab.run(&format!("kill {}", main.lines().next().unwrap()));
        server.wait().unwrap();
        assert_eq!(done(&["list"]), serde_json::json!([]));
        daemon.kill().unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn options_of_an_identity_are_for_commands_without_a_namespace() {
    let output = Command::new(sandwire::executable().unwrap())
        .args(["run", "--address", "10.77.0.1", "--", "true"])
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(error.contains("--no-netns"), "{error}");
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_daemon_tells_of_identities_and_takes_away_those_that_have_ended() {
    lab::run_within(DEADLINE, |lab| {
        let before = lab.run("ip -o addr show dev lo");
        let executable = sandwire::executable().unwrap();
        let config = "instance = \"identities\"\n";
        let mut daemon = Daemon::start(&executable, lab.folder(), config).unwrap();
        let listed = |daemon: &Daemon| daemon.call("GET", "/v1/identities", None).unwrap();
        assert_eq!(listed(&daemon), serde_json::json!([]));
        let cgroup = Cgroup::create().unwrap();
        let add = [
            "add",
            cgroup.path(),
            "--name",
            "web",
            "--address",
            "10.77.0.1",
        ];
        let added = done(&add);
        assert_eq!(listed(&daemon)[0], added);
        let metrics = daemon.http("GET", "/metrics", None).unwrap();
        let metrics = metrics.body;
        let figure = "sandwire_identity_packets_total{identity=\"web\",direction=\"egress\"} 0";
        assert!(metrics.contains(figure), "{metrics}");
        let families = openmetrics::families(&metrics).unwrap();
        assert!(
            families.contains("sandwire_identity_packets"),
            "{families:?}"
        );
        // It outlives the daemon.
        daemon.kill().unwrap();
        assert_eq!(done(&["list"])[0]["name"], "web");
        let before_restart = connect4(lab, &cgroup);
        daemon.restart().unwrap();
        until("the programs are those of this daemon's version", || {
            // None while bpftool looks at one that is being exchanged.
            let now = connect4(lab, &cgroup);
            now.is_some() && now != before_restart
        });
        fs::remove_dir(cgroup.path()).unwrap();
        until("the daemon takes its address away", || {
            lab.run("ip -o addr show dev lo") == before
        });
        fs::create_dir(cgroup.path()).unwrap();
    });
}

/// Answers each datagram at port 7000, on the wildcard of both families, as it was bound and no other way.
const ECHO: &str = r#"
import socket

both = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
both.bind(("::", 7000))
print("ready", flush=True)
while True:
    data, caller = both.recvfrom(4096)
    both.sendto(data, caller)
"#;

/// Whether it answers at an address, from where it was asked: a connected socket hears nobody else.
fn echoes(beyond: &Beyond, address: &str) -> bool {
    let address: IpAddr = address.parse().unwrap();
    let any = match address {
        IpAddr::V4(_) => "0.0.0.0:0",
        IpAddr::V6(_) => "[::]:0",
    };
    let asked = beyond.inside(|| {
        let socket = UdpSocket::bind(any)?;
        socket.connect((address, 7000))?;
        socket.set_read_timeout(Some(Duration::from_secs(1)))?;
        socket.send(b"hello")?;
        let mut answer = [0; 16];
        Ok(socket
            .recv(&mut answer)
            .is_ok_and(|length| &answer[..length] == b"hello"))
    });
    asked.unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn with_a_daemon_udp_on_the_wildcard_is_at_all_addresses() {
    const ADDRESSES: [&str; 4] = ["10.77.0.1", "10.77.0.9", "fd77::1", "fd77::9"];
    const DNS: &str = "dnsmasq --keep-in-foreground --no-resolv --no-hosts --conf-file=/dev/null --user=root --pid-file \
         --port=5353 --address=/marker.example/203.0.113.9";
    lab::run_within(DEADLINE, |lab| {
        let beyond = Beyond::attach().unwrap();
        for prefix in ["10.77.0.0/24", "fd77::/64"] {
            beyond.route_through_host(prefix).unwrap();
        }
        let executable = sandwire::executable().unwrap();
        let config = "instance = \"identities\"\n";
        let mut daemon = Daemon::start(&executable, lab.folder(), config).unwrap();
        let cgroup = Cgroup::create().unwrap();
        let addresses = ADDRESSES.map(|address| ["--address", address]);
        let add = ["add", cgroup.path(), "--name", "dns"];
        done(&[&add[..], addresses.as_flattened()].concat());
        let inside = format!("echo 0 > {}/cgroup.procs; exec ", cgroup.path());
        let start = |script: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-ec", &format!("{inside}{script}"), ECHO]);
            Server(shell.stdout(Stdio::piped()).spawn().unwrap())
        };

        // One that says from where it answers, and one that doesn't.
        let name_server = start(DNS);
        let echo = start("python3 -c \"$0\"");
        for address in ADDRESSES {
            let ask = format!("dig +short +tries=1 +time=2 -p 5353 @{address} marker.example");
            until("the name server answers", || {
                beyond
                    .run(&ask)
                    .is_ok_and(|said| said.trim() == "203.0.113.9")
            });
            until("the echo", || echoes(&beyond, address));
        }

        daemon.kill().unwrap();
        for address in ADDRESSES {
            until("the echo without a daemon", || echoes(&beyond, address));
        }
        drop(echo);
        let echo = start("python3 -c \"$0\"");
        until("the first address needs none", || {
            echoes(&beyond, "10.77.0.1")
        });
        assert!(!echoes(&beyond, "10.77.0.9") && !echoes(&beyond, "fd77::1"));
        daemon.restart().unwrap();
        for address in ADDRESSES {
            until("it receives there from now on", || echoes(&beyond, address));
        }
        drop((name_server, echo));
        until("nobody receives", || {
            done(&["show", "dns"])["listeners"] == 0
        });
        done(&["remove", "dns"]);
    });
}

/// Answers at port 8080 in both families and at 8081 in IPv4, on the wildcard.
const SERVER: &str = r#"
import socket, threading

def serve(listener):
    while True:
        caller = listener.accept()[0]
        caller.recv(4096)
        caller.sendall(b"HTTP/1.0 200 OK\r\n\r\nan identity")
        caller.close()

both = socket.create_server(("", 8080), family=socket.AF_INET6, dualstack_ipv6=True)
one = socket.create_server(("", 8081))
threading.Thread(target=serve, args=(both,), daemon=True).start()
print("ready", flush=True)
serve(one)
"#;

/// A [`SERVER`] in a cgroup, until it is dropped.
struct Server(Child);

impl Server {
    fn start(cgroup: &str) -> Self {
        let script = format!("echo 0 > {cgroup}/cgroup.procs; exec python3 -c \"$0\"");
        let mut child = Command::new("sh")
            .args(["-ec", &script, SERVER])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        assert_eq!(lines.next().unwrap().unwrap(), "ready");
        Self(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

/// A daemon with a pool of which user 1000 may publish ports of its leases.
fn daemon_for_a_user(lab: &Lab) -> Daemon {
    let config = "instance = \"identities\"\nsocket_mode = \"0666\"\n";
    let executable = sandwire::executable().unwrap();
    let daemon = Daemon::start(&executable, lab.folder(), config).unwrap();
    let pool = serde_json::json!({
        "name": "web",
        "kind": "host",
        "data_path": "ebpf",
        "size": 1,
        "addresses": {"plan": "prefix", "ipv4": "10.64.0.0/24", "ipv6": "fd00:c10e::/64"},
        "access": [{"verbs": ["acquire", "publish"], "uids": [1000]}],
    });
    daemon.create_pool(&pool).unwrap();
    daemon
}

fn as_user(daemon: &Daemon, verb: &str) -> Output {
    daemon.command(verb).uid(1000).gid(1000).output().unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_published_port_leaves_connections_to_identities_alone() {
    lab::run_within(DEADLINE, |lab| {
        let beyond = Beyond::attach().unwrap();
        let daemon = daemon_for_a_user(lab);
        for prefix in ["10.77.0.0/24", "fd77::/64"] {
            beyond.route_through_host(prefix).unwrap();
        }
        let cgroup = Cgroup::create().unwrap();
        let addresses = ["10.77.0.1", "10.77.0.2", "fd77::1"].map(|address| ["--address", address]);
        done(
            &[
                &["add", cgroup.path(), "--name", "web"][..],
                addresses.as_flattened(),
            ]
            .concat(),
        );
        let server = Server::start(cgroup.path());

        let acquired = as_user(&daemon, "--json acquire web mine");
        let lease = Lease::read(&serde_json::from_slice(&acquired.stdout).unwrap()).unwrap();
        let guest = FakeGuest::attach(&lease.path, &lease.tap).unwrap();
        let gateway = IpAddr::from(guest.network().ipv4_gateway);
        guest.ping(gateway, Duration::from_secs(60)).unwrap();
        for ports in ["8080:80", "8081:80"] {
            let output = as_user(&daemon, &format!("publish mine {ports}"));
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{ports}: {error}");
        }
        let taken = as_user(&daemon, "publish mine 8082:80 --host-address 10.77.0.2");
        let error = String::from_utf8(taken.stderr).unwrap();
        assert!(error.contains("an identity's address"), "{error}");

        let curl = |target: &str| format!("curl -gsS -m 20 http://{target}/");
        for target in [
            "10.77.0.1:8080",
            "10.77.0.2:8080",
            "[fd77::1]:8080",
            "10.77.0.1:8081",
            "10.77.0.2:8081",
        ] {
            assert_eq!(
                beyond.run(&curl(target)).unwrap(),
                "an identity",
                "{target}"
            );
            assert_eq!(
                lab.run(&curl(target)),
                "an identity",
                "{target} from the host"
            );
        }
        for target in ["[::1]:8080", "127.0.0.1:8080", "127.0.0.1:8081"] {
            let inside = format!("echo 0 > {}/cgroup.procs; {}", cgroup.path(), curl(target));
            assert_eq!(lab.shell(&inside), "an identity", "{target}");
        }
        for port in [8080, 8081] {
            let page = beyond.run(&curl(&format!("{HOST_IPV4}:{port}"))).unwrap();
            assert_ne!(page, "an identity", "of the host's address, port {port}");
        }

        let late = Cgroup::create().unwrap();
        done(&[
            "add",
            late.path(),
            "--name",
            "late",
            "--address",
            "10.77.0.9",
        ]);
        let late_server = Server::start(late.path());
        until("an identity that has come since is left alone", || {
            beyond
                .run(&curl("10.77.0.9:8080"))
                .is_ok_and(|page| page == "an identity")
        });
        drop((server, late_server));
        for name in ["web", "late"] {
            done(&["remove", name]);
        }
    });
}
