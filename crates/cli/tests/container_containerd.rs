//! Pods by containerd, asked for as a kubelet does: the plugin and the network are what `sandwire cni install` puts on a node.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs,
    net::IpAddr,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use sandwire_testlab::{
    containerd::Containerd,
    host::{self, BEYOND_IPV4, Beyond, HOST_IPV4},
    http,
    lab::{self, Lab},
    namespace,
    podman::REFERENCE_PLUGINS,
    sandwire::{self, Daemon},
    snapshot::Snapshot,
};
use serde_json::{Value, json};

const MINUTE: Duration = Duration::from_secs(60);
/// How long those wait who are to be reached, and those who are not.
const LONG: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_secs(2);

/// A node with a daemon, a pool for pods and containerd.
struct World {
    daemon: Daemon,
    beyond: Beyond,
    containerd: Containerd,
    before: Snapshot,
}

/// A running pod with a web server in its network.
struct Web {
    number: String,
    namespace: PathBuf,
    ips: Vec<IpAddr>,
}

impl World {
    fn start(lab: &Lab) -> Self {
        let beyond = Beyond::attach().unwrap();
        let executable = sandwire::executable().unwrap();
        let daemon = Daemon::start(&executable, lab.folder(), "instance = \"lab\"\n").unwrap();
        let pool = json!({
            "name": "containers",
            "kind": "container",
            "data_path": "ebpf",
            "size": 4,
            "quarantine_seconds": 0,
            "addresses": { "plan": "prefix", "ipv4": "10.64.0.0/24", "ipv6": "fd00:c10e::/112" },
        });
        daemon.create_pool(&pool).unwrap();
        // The network that is shipped names no socket.
        fs::create_dir_all("/run/sandwire").unwrap();
        symlink(daemon.socket(), "/run/sandwire/sandwire.sock").unwrap();
        let [plugins, networks] = ["plugins", "networks"].map(|name| lab.folder().join(name));
        let mut install = daemon.command("cni install");
        install.arg("--bin-dir").arg(&plugins);
        install.arg("--conf-dir").arg(&networks);
        let output = install.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        // Which containerd calls besides, for each pod.
        let loopback = Path::new(REFERENCE_PLUGINS).join("loopback");
        symlink(loopback, plugins.join("loopback")).unwrap();
        let containerd = Containerd::start(lab, &plugins, &networks).unwrap();
        Self {
            daemon,
            beyond,
            containerd,
            before: lab.snapshot(),
        }
    }

    fn start_web(&self, name: &str, more: &[&str]) -> Web {
        let number = self.containerd.run_pod(name, more).unwrap();
        let pod = self.containerd.pod(&number).unwrap();
        let namespace = PathBuf::from(format!("/proc/{}/ns/net", pod.pid));
        namespace::inside(&namespace, || host::serve_tcp(80, host::answer_http)).unwrap();
        Web {
            number,
            namespace,
            ips: pod.ips.iter().map(|ip| ip.parse().unwrap()).collect(),
        }
    }

    fn end(&self, number: &str) {
        self.containerd.stop_pod(number).unwrap();
        self.containerd.remove_pod(number).unwrap();
    }

    fn leases(&self) -> Vec<Value> {
        let leases = self.daemon.json("list").unwrap();
        leases.as_array().unwrap().clone()
    }

    /// Wants the node to be as it was before the first pod came.
    fn assert_vanished(&self) {
        let deadline = Instant::now() + MINUTE;
        while !self.leases().is_empty() {
            assert!(Instant::now() < deadline, "{:?}", self.leases());
            std::thread::sleep(Duration::from_millis(20));
        }
        self.before.wait_unchanged(MINUTE).unwrap();
    }
}

/// As whom a server answers who calls from a namespace, if it does.
fn caller(namespace: &Path, server: IpAddr, patience: Duration) -> Option<String> {
    let answer = namespace::inside(namespace, || {
        http::request(server, 80, "GET", "/", None, patience)
    });
    let body = answer.ok()?.body;
    Some(body.trim().rsplit(' ').next()?.to_owned())
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test container"]
fn pods_have_their_network_from_the_kubelets_call_to_its_last_and_reach_whom_policy_says() {
    lab::run_within(5 * MINUTE, |lab| {
        let world = World::start(lab);
        let (a, b) = (world.start_web("a", &[]), world.start_web("b", &[]));
        let families: Vec<bool> = a.ips.iter().map(IpAddr::is_ipv4).collect();
        assert_eq!(families, [true, false], "{:?}", a.ips);
        let names = world.leases();
        let names: Vec<&str> = names
            .iter()
            .filter_map(|lease| lease["name"].as_str())
            .collect();
        assert!(names.len() == 2 && names.iter().all(|name| name.starts_with("cni-")));

        for ip in &a.ips {
            assert_eq!(caller(&b.namespace, *ip, SHORT), None, "{ip}");
        }
        let change = json!({ "policy": { "clone_to_clone": true } });
        let patched = world
            .daemon
            .call("PATCH", "/v1/pools/containers", Some(&change));
        patched.unwrap();
        for (own, ip) in b.ips.iter().zip(&a.ips) {
            let seen = caller(&b.namespace, *ip, LONG);
            assert_eq!(seen, Some(own.to_string()), "{ip}");
        }
        // Out of the node, behind its address.
        let seen = caller(&b.namespace, BEYOND_IPV4.into(), LONG);
        assert_eq!(seen, Some(HOST_IPV4.to_string()));
        world.end(&a.number);
        world.end(&b.number);
        world.assert_vanished();
    });
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test container"]
fn ports_and_bandwidth_of_a_pod_are_what_the_kubelet_asks_for() {
    lab::run_within(5 * MINUTE, |lab| {
        let world = World::start(lab);
        let bandwidth = "kubernetes.io/egress-bandwidth=20M";
        let web = world.start_web("a", &["8080:80", bandwidth]);
        let lease = world.leases()[0]["name"].as_str().unwrap().to_owned();
        let shown = world.daemon.json(&format!("policy show {lease}")).unwrap();
        assert_eq!(
            shown["policy"]["limits"]["egress"]["bits_per_second"], 20_000_000,
            "{shown}"
        );
        let fetch = |patience| {
            world
                .beyond
                .inside(|| http::request(HOST_IPV4.into(), 8080, "GET", "/", None, patience))
        };
        assert!(
            fetch(LONG)
                .unwrap()
                .body
                .ends_with(&format!("{BEYOND_IPV4}\n"))
        );
        // The port is taken: that pod doesn't come up, and leaves nothing.
        let refused = world.containerd.run_pod("b", &["8080:80"]).unwrap_err();
        assert!(format!("{refused:#}").contains("port 8080"), "{refused:#}");
        assert_eq!(world.leases().len(), 1);
        world.end(&web.number);
        assert!(fetch(SHORT).is_err());
        world.assert_vanished();
    });
}

#[test]
#[ignore = "needs root and containerd: cargo xtask test container"]
fn a_pod_that_ends_while_the_daemon_is_down_is_ended_by_the_kubelets_next_call() {
    lab::run_within(5 * MINUTE, |lab| {
        let mut world = World::start(lab);
        let (a, b) = (world.start_web("a", &[]), world.start_web("b", &[]));
        let change = json!({ "policy": { "clone_to_clone": true } });
        let patched = world
            .daemon
            .call("PATCH", "/v1/pools/containers", Some(&change));
        patched.unwrap();
        world.daemon.kill().unwrap();
        assert!(caller(&b.namespace, a.ips[0], LONG).is_some());
        let refused = world.containerd.stop_pod(&a.number).unwrap_err();
        assert!(
            format!("{refused:#}").contains("try again later"),
            "{refused:#}"
        );
        let refused = world.containerd.run_pod("c", &[]).unwrap_err();
        assert!(
            format!("{refused:#}").contains("try again later"),
            "{refused:#}"
        );
        world.daemon.restart().unwrap();
        world.end(&a.number);
        assert_eq!(world.leases().len(), 1);
        // With the one that couldn't be started, of which containerd knows as long as it couldn't tell the plugin.
        for pod in world.containerd.pods().unwrap() {
            world.end(&pod);
        }
        world.assert_vanished();
    });
}
