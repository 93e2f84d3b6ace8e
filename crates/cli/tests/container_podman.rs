//! Containers by podman, which starts the CNI plugin as any runtime does: real processes in namespaces that podman made.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{
    fs,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::Result;
use sandwire_testlab::{
    host::{self, Beyond},
    http,
    lab::{self, Lab},
    podman::Podman,
    sandwire::{self, Daemon},
    snapshot::Snapshot,
};
use serde_json::{Value, json};

const MINUTE: Duration = Duration::from_secs(60);

/// A host with a daemon, a pool for containers and podman.
struct World {
    daemon: Daemon,
    beyond: Beyond,
    podman: Podman,
}

impl World {
    fn start(lab: &Lab) -> Self {
        let beyond = Beyond::attach().unwrap();
        let folder = lab.folder().join("daemon");
        fs::create_dir(&folder).unwrap();
        let executable = sandwire::executable().unwrap();
        let daemon = Daemon::start(&executable, &folder, "instance = \"lab\"\n").unwrap();
        let podman = Podman::prepare(lab).unwrap();
        let world = Self {
            daemon,
            beyond,
            podman,
        };
        world.install();
        world
    }

    /// The plugin, by its own verb, and a network of ours.
    fn install(&self) {
        let conflist = self.podman.rootfs().join("../10-blue.conflist");
        fs::write(&conflist, network(&self.daemon, "blue").to_string()).unwrap();
        let command = &mut self.daemon.command("--json cni install");
        let output = command
            .arg("--bin-dir")
            .arg(self.podman.plugins())
            .arg("--conf-dir")
            .arg(self.podman.networks())
            .arg("--conflist")
            .arg(&conflist)
            .output()
            .unwrap();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["conflist_written"], true, "{said}");
    }

    /// A network with a chain of plugins.
    fn add_network(&self, name: &str, plugins: &[Value]) {
        let conflist = json!({ "cniVersion": "1.0.0", "name": name, "plugins": plugins });
        let path = self.podman.networks().join(format!("20-{name}.conflist"));
        fs::write(path, conflist.to_string()).unwrap();
    }

    fn create_pool(&self) {
        let pool = json!({
            "name": "containers",
            "kind": "container",
            "data_path": "ebpf",
            "size": 4,
            "quarantine_seconds": 0,
            "addresses": { "plan": "prefix", "ipv4": "10.64.0.0/24", "ipv6": "fd00:c10e::/112" },
        });
        self.daemon.create_pool(&pool).unwrap();
    }

    /// Lets the pool's containers talk, or not.
    fn let_talk(&self, talk: bool) {
        let change = json!({ "policy": { "clone_to_clone": talk } });
        self.daemon
            .call("PATCH", "/v1/pools/containers", Some(&change))
            .unwrap();
    }

    /// A web server that says hello, on the network `blue`.
    fn start_web(&self, name: &str, flags: &str) {
        self.start_web_on("blue", name, flags);
    }

    fn start_web_on(&self, network: &str, name: &str, flags: &str) {
        fs::write(self.podman.rootfs().join("www/index.html"), "hello").unwrap();
        let flags = format!("--network {network} {flags}");
        self.podman
            .start(name, &flags, "/bin/httpd -f -p 80 -h /www")
            .unwrap();
        self.wait_serving(name);
    }

    /// Waits until a container gets its own page: podman has it started before its program listens.
    fn wait_serving(&self, name: &str) {
        let deadline = Instant::now() + MINUTE;
        while !self.reaches(name, "127.0.0.1") {
            assert!(Instant::now() < deadline, "{name} doesn't serve");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// A container's IPv4 and IPv6 address, as podman knows them from the plugin.
    fn addresses(&self, name: &str) -> (String, String) {
        let network = &self.podman.networks_of(name).unwrap()["blue"];
        let text = |key: &str| network[key].as_str().unwrap().to_owned();
        (text("IPAddress"), text("GlobalIPv6Address"))
    }

    /// Whether a container gets another one's page.
    fn reaches(&self, from: &str, address: &str) -> bool {
        let line = format!("exec {from} /bin/get {address} 80 2");
        let output = self.podman.output(&line).unwrap();
        output.status.success() && output.stdout.ends_with(b"hello")
    }

    /// What the world beyond the host gets of the host's port.
    fn fetch_from_beyond(&self, port: u16) -> Result<String> {
        self.beyond.inside(|| {
            let host = host::HOST_IPV4.into();
            let answer = http::request(host, port, "GET", "/", None, Duration::from_secs(20))?;
            Ok(answer.body)
        })
    }

    fn leases(&self) -> Vec<Value> {
        let leases = self.daemon.json("list").unwrap();
        leases.as_array().unwrap().clone()
    }

    fn wait_no_leases(&self) {
        let deadline = Instant::now() + MINUTE;
        while !self.leases().is_empty() {
            assert!(Instant::now() < deadline, "{:?}", self.leases());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Wants the host to be as it was before the first container came.
    fn assert_vanished(&self, before: &Snapshot) {
        self.wait_no_leases();
        before.wait_unchanged(MINUTE).unwrap();
    }
}

fn network(daemon: &Daemon, name: &str) -> Value {
    json!({
        "cniVersion": "1.0.0",
        "name": name,
        "plugins": [{
            "type": "sandwire-cni",
            "pool": "containers",
            "socket": daemon.socket(),
            "capabilities": { "portMappings": true, "ips": true, "mac": true, "bandwidth": true },
        }],
    })
}

#[test]
#[ignore = "needs root and podman: cargo xtask test container"]
fn two_containers_reach_each_other_when_policy_says_so_and_not_before() {
    lab::run_within(5 * MINUTE, |lab| {
        let world = World::start(lab);
        world.create_pool();
        let before = lab.snapshot();
        world.start_web("a", "");
        world.start_web("b", "");
        let leases = world.leases();
        assert_eq!(leases.len(), 2, "{leases:?}");
        let (ipv4, ipv6) = world.addresses("a");
        for lease in &leases {
            let name = lease["name"].as_str().unwrap();
            assert!(name.starts_with("cni-"), "{name}");
        }
        assert!(!world.reaches("b", &ipv4) && !world.reaches("b", &ipv6));
        world.let_talk(true);
        assert!(world.reaches("b", &ipv4) && world.reaches("b", &ipv6));
        world.let_talk(false);
        assert!(!world.reaches("b", &ipv4) && !world.reaches("b", &ipv6));
        // Out of the host, behind its address.
        let get = format!("exec a /bin/get {} 80 20", host::BEYOND_IPV4);
        let said = world.podman.run(&get).unwrap();
        assert!(said.contains(&host::HOST_IPV4.to_string()), "{said}");

        world.podman.run("rm -f -t 0 a b").unwrap();
        world.assert_vanished(&before);
    });
}

#[test]
#[ignore = "needs root and podman: cargo xtask test container"]
fn a_port_is_published_for_as_long_as_the_container_lives() {
    lab::run_within(5 * MINUTE, |lab| {
        let world = World::start(lab);
        world.create_pool();
        let before = lab.snapshot();
        world.start_web("a", "-p 8080:80");
        assert_eq!(world.fetch_from_beyond(8080).unwrap(), "hello");
        // The port is taken: the container doesn't come up, and leaves nothing.
        let refused = world
            .podman
            .start("b", "--network blue -p 8080:80", "/bin/true");
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("port 8080"), "{refused}");
        assert_eq!(world.leases().len(), 1);
        world.podman.run("rm -f -t 0 a").unwrap();
        world.podman.output("rm -f -t 0 b").unwrap();
        assert!(world.fetch_from_beyond(8080).is_err());
        world.assert_vanished(&before);
    });
}

#[test]
#[ignore = "needs root and podman: cargo xtask test container"]
fn a_container_has_the_address_and_the_mac_that_were_asked_for() {
    lab::run_within(5 * MINUTE, |lab| {
        let world = World::start(lab);
        world.create_pool();
        world.start_web("a", "--ip 10.64.0.33 --mac-address 06:00:00:00:00:33");
        assert_eq!(world.addresses("a").0, "10.64.0.33");
        let inside = world
            .podman
            .run("exec a /bin/ip address show eth0")
            .unwrap();
        assert!(inside.contains("10.64.0.33/32"), "{inside}");
        assert!(inside.contains("06:00:00:00:00:33"), "{inside}");
        world.let_talk(true);
        world.start_web("b", "");
        assert!(world.reaches("b", "10.64.0.33"));
        let taken = world
            .podman
            .start("c", "--network blue --ip 10.64.0.33", "/bin/true");
        let taken = taken.unwrap_err().to_string();
        assert!(taken.contains("10.64.0.33 is in use"), "{taken}");
        world.podman.run("rm -f -t 0 a b").unwrap();
        world.wait_no_leases();
    });
}

#[test]
#[ignore = "needs root and podman: cargo xtask test container"]
fn containers_go_on_without_the_daemon_and_what_was_missed_is_collected() {
    lab::run_within(5 * MINUTE, |lab| {
        let mut world = World::start(lab);
        world.create_pool();
        let before = lab.snapshot();
        world.let_talk(true);
        for name in ["a", "b", "c"] {
            world.start_web(name, "");
        }
        let (ipv4, _) = world.addresses("a");
        world.daemon.kill().unwrap();
        assert!(world.reaches("b", &ipv4));
        // Nobody hears of the end of this one.
        world.podman.output("rm -f -t 0 c").unwrap();
        let refused = world.podman.start("d", "--network blue", "/bin/true");
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("try again later"), "{refused}");

        world.daemon.restart().unwrap();
        assert!(world.reaches("b", &ipv4));
        let valid: Vec<Value> = ["a", "b"]
            .iter()
            .map(|name| {
                let id = world
                    .podman
                    .run(&format!("inspect --format {{{{.Id}}}} {name}"));
                json!({ "containerID": id.unwrap().trim(), "ifname": "eth0" })
            })
            .collect();
        let mut config = network(&world.daemon, "blue")["plugins"][0].clone();
        config["cniVersion"] = "1.1.0".into();
        config["name"] = "blue".into();
        config["cni.dev/valid-attachments"] = valid.into();
        plugin(&world, "GC", &config);
        assert_eq!(world.leases().len(), 2);
        assert!(world.reaches("b", &ipv4));
        world.podman.run("rm -f -t 0 a b").unwrap();
        world.assert_vanished(&before);
    });
}

#[test]
#[ignore = "needs root and podman: cargo xtask test container"]
fn chains_with_the_reference_plugins_hold() {
    lab::run_within(5 * MINUTE, |lab| {
        let world = World::start(lab);
        world.create_pool();
        world.let_talk(true);
        let ours = network(&world.daemon, "blue")["plugins"][0].clone();
        let tuning = json!({ "type": "tuning", "sysctl": { "net.core.somaxconn": "499" } });
        world.add_network("tuned", &[ours.clone(), tuning]);
        let ranges = json!([[{ "subnet": "10.1.0.0/24" }]]);
        let folder = world.podman.rootfs().join("../host-local");
        let bridge = json!({
            "type": "bridge", "bridge": "cni0", "isGateway": true,
            "ipam": { "type": "host-local", "dataDir": folder, "ranges": ranges,
                "routes": [{ "dst": "0.0.0.0/0" }] },
        });
        let mut later = ours;
        later["interface"] = "net1".into();
        later["routes"] = json!([{ "dst": "10.64.0.0/24" }]);
        later["capabilities"] = json!({});
        world.add_network("both", &[bridge, later]);

        world.start_web_on("tuned", "first", "");
        let backlog = world
            .podman
            .run("exec first /bin/cat /proc/sys/net/core/somaxconn");
        assert_eq!(backlog.unwrap().trim(), "499");
        let address = world.podman.networks_of("first").unwrap()["tuned"]["IPAddress"].clone();
        let address = address.as_str().unwrap();

        world
            .podman
            .start("second", "--network both", "/bin/sleep 1000")
            .unwrap();
        let routes = world.podman.run("exec second /bin/ip route").unwrap();
        assert!(routes.contains("default via 10.1.0.1 dev eth0"), "{routes}");
        assert!(
            routes.contains("10.64.0.0/24 via 169.254.1.1 dev net1"),
            "{routes}"
        );
        assert!(world.reaches("second", address));
        world.podman.run("rm -f -t 0 first second").unwrap();
        world.wait_no_leases();
    });
}

/// Runs the plugin itself, as a runtime that has the verb.
fn plugin(world: &World, verb: &str, config: &Value) {
    let mut child = Command::new(world.podman.plugins().join("sandwire-cni"))
        .env("CNI_COMMAND", verb)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = child.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, config.to_string().as_bytes()).unwrap();
    drop(input);
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
}
