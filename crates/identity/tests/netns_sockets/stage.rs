//! Two identities on a host, a host process beside them, and a peer on the wire, each with an application.

use std::{
    fs,
    io::{BufRead, BufReader, Write},
    net::IpAddr,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, SystemTime},
};

use sandwire_identity::{Allowed, Identities, IdentityPolicy, NewIdentity};
use sandwire_testlab::{lab::Lab, namespace::Namespace};

/// Where cgroup v2 is, with or without cgroup v1 beside it.
fn hierarchy() -> &'static Path {
    let beside = Path::new("/sys/fs/cgroup/unified");
    if beside.is_dir() {
        beside
    } else {
        Path::new("/sys/fs/cgroup")
    }
}

/// Cgroups of a test alone, removed at its end.
pub(crate) struct Cgroups {
    root: PathBuf,
    made: Vec<PathBuf>,
}

impl Cgroups {
    pub(crate) fn new() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let root = hierarchy().join(format!("sandwire-test-{}", now.unwrap().as_nanos()));
        fs::create_dir(&root).unwrap();
        Self {
            made: vec![root.clone()],
            root,
        }
    }

    #[allow(dead_code, reason = "one of the tests has it")]
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn make(&mut self, name: &str) -> PathBuf {
        let path = self.root.join(name);
        fs::create_dir(&path).unwrap();
        self.made.push(path.clone());
        path
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        // A process that has just ended is in its cgroup for a moment longer.
        for _ in 0..200 {
            self.made
                .retain(|path| path.exists() && fs::remove_dir(path).is_err());
            self.made.reverse();
            if self.made.is_empty() {
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        eprintln!("left over: {:?}", self.made);
    }
}

/// An application that does what it is told.
pub(crate) struct Application {
    child: Child,
    requests: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Application {
    pub(crate) fn start(cgroup: Option<&Path>, namespace: Option<&str>) -> Self {
        let mut script = String::new();
        if let Some(cgroup) = cgroup {
            script.push_str(&format!("echo 0 > {}/cgroup.procs; ", cgroup.display()));
        }
        let enter = namespace.map_or_else(String::new, |name| format!("ip netns exec {name} "));
        script.push_str(&format!("exec {enter}python3 -c \"$APPLICATION\""));
        let mut child = Command::new("sh")
            .args(["-e", "-c", &script])
            .env("APPLICATION", include_str!("application.py"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let requests = child.stdin.take().unwrap();
        let answers = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            requests,
            answers,
        }
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Whether it ends by itself, as by a signal; waits for that.
    #[allow(dead_code, reason = "one of the tests has it")]
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.wait().is_ok_and(|status| !status.success())
    }

    fn send(&mut self, request: &serde_json::Value) -> serde_json::Value {
        writeln!(self.requests, "{request}").unwrap();
        let mut line = String::new();
        self.answers.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"))
    }

    /// Runs a line; the answer is what it left in `r`, or the name of an error.
    pub(crate) fn run(&mut self, code: &str) -> serde_json::Value {
        self.send(&serde_json::Value::from(code))
    }

    /// Closes all sockets.
    pub(crate) fn reset(&mut self) {
        self.send(&serde_json::Value::Null);
    }
}

impl Drop for Application {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Everybody. Applications end before the cgroups go.
pub(crate) struct Stage {
    pub(crate) applications: Vec<(&'static str, Application)>,
    pub(crate) cgroups: Cgroups,
    _wire: Namespace,
}

pub(crate) fn addresses(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

pub(crate) fn new_identity(cgroup: &Path, texts: &[&str]) -> NewIdentity {
    NewIdentity {
        cgroup: cgroup.to_owned(),
        name: None,
        addresses: addresses(texts),
        interface: "lo".to_owned(),
        existing: false,
        allowed: Allowed::default(),
        tcp_only: false,
        policy: IdentityPolicy::default(),
        prefixes: Vec::new(),
        own_cgroup: false,
        declared_by: None,
    }
}

/// A policy that is in nobody's way.
pub(crate) const OPEN: &str =
    r#"{"group": "all", "clone_to_clone": true, "host_services": ["all"]}"#;

pub(crate) fn policy(text: &str) -> IdentityPolicy {
    serde_json::from_str(text).unwrap()
}

pub(crate) fn folder() -> &'static Path {
    Path::new("/sys/fs/bpf/identity")
}

/// A peer on the wire that knows its way to the identities.
pub(crate) fn wire(lab: &Lab) -> Namespace {
    let peer = lab.namespace("peer");
    lab.run("ip link add uplink type veth peer name wire netns peer");
    trust_addresses(lab, &peer, "uplink");
    for (address, device) in [("192.0.2.1/24", "uplink"), ("2001:db8::1/64", "uplink")] {
        let nodad = if address.contains(':') { " nodad" } else { "" };
        lab.run(&format!("ip addr add {address} dev {device}{nodad}"));
    }
    lab.run("ip link set uplink up");
    for line in [
        "ip addr add 192.0.2.2/24 dev wire",
        "ip addr add 2001:db8::2/64 dev wire nodad",
        "ip link set wire up",
        "ip route add 10.77.0.0/24 via 192.0.2.1",
        "ip -6 route add fd77::/64 via 2001:db8::1",
    ] {
        peer.run(line).unwrap();
    }
    peer
}

/// Spares a wire the search for others that have its ends' link-local addresses. Until that ends, an end asks for no neighbour
/// on behalf of an address that it hasn't itself, and after three seconds gives up.
pub(crate) fn trust_addresses(lab: &Lab, peer: &Namespace, device: &str) {
    lab.run(&format!("sysctl -q net.ipv6.conf.{device}.accept_dad=0"));
    peer.run("sysctl -q net.ipv6.conf.wire.accept_dad=0")
        .unwrap();
}

/// Has what leaves by the wire carry the host's address.
pub(crate) fn masquerade(lab: &Lab) {
    lab.shell(
        "nft -f - <<'EOF'
table inet masked {
    chain leaving {
        type nat hook postrouting priority srcnat
        oif uplink masquerade
    }
}
EOF",
    );
}

impl Stage {
    pub(crate) fn set(lab: &Lab) -> Self {
        Self::set_with(lab, false)
    }

    /// The same with identities that have TCP only, if so.
    pub(crate) fn set_with(lab: &Lab, tcp_only: bool) -> Self {
        let wire = wire(lab);
        let mut cgroups = Cgroups::new();
        let (a, b, only4) = (cgroups.make("a"), cgroups.make("b"), cgroups.make("only4"));
        let inner = cgroups.make("a/inner");
        let identities = Identities::new(folder());
        let all = [
            (&a, &["10.77.0.1", "10.77.0.9", "fd77::1", "fd77::9"][..]),
            (&b, &["10.77.0.2", "fd77::2"][..]),
            (&only4, &["10.77.0.3"][..]),
        ];
        for (cgroup, texts) in all {
            let mut new = new_identity(cgroup, texts);
            new.policy = policy(OPEN);
            new.tcp_only = tcp_only;
            identities.add(&new).unwrap();
        }
        let applications = vec![
            ("a", Application::start(Some(&a), None)),
            ("inner", Application::start(Some(&inner), None)),
            ("b", Application::start(Some(&b), None)),
            ("only4", Application::start(Some(&only4), None)),
            ("host", Application::start(None, None)),
            ("peer", Application::start(None, Some("peer"))),
        ];
        Self {
            applications,
            cgroups,
            _wire: wire,
        }
    }

    pub(crate) fn run(&mut self, who: &str, code: &str) -> serde_json::Value {
        let found = self.applications.iter_mut().find(|(name, _)| *name == who);
        found.unwrap().1.run(code)
    }

    /// As `run`; "daemon" is what a daemon does that is told of UDP sockets.
    #[allow(dead_code, reason = "one of the tests has it")]
    pub(crate) fn step(&mut self, who: &str, code: &str) -> serde_json::Value {
        if (who, code) == ("daemon", "look") {
            Identities::new(folder()).enter_receivers().unwrap();
            return serde_json::Value::Null;
        }
        self.run(who, code)
    }

    pub(crate) fn reset(&mut self) {
        for (_, application) in &mut self.applications {
            application.reset();
        }
    }
}
