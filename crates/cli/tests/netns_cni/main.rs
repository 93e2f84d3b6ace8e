//! The CNI plugin with a daemon and namespaces of its own: what a runtime meets when something isn't as it should be.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

mod capabilities;

use std::{
    fs,
    io::Write,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use sandwire_testlab::{
    lab::{self, Lab},
    sandwire::{self, Daemon},
};
use serde_json::{Value, json};

struct World {
    daemon: Daemon,
    plugin: PathBuf,
}

impl World {
    fn start(lab: &Lab) -> Self {
        let executable = sandwire::executable().unwrap();
        let daemon = Daemon::start(&executable, lab.folder(), "instance = \"lab\"\n").unwrap();
        let plugin = lab.folder().join("sandwire-cni");
        symlink(&executable, &plugin).unwrap();
        let pool = json!({
            "name": "boxes",
            "kind": "container",
            "data_path": "ebpf",
            "size": 2,
            "quarantine_seconds": 0,
            "addresses": { "plan": "prefix", "ipv4": "10.64.0.0/24", "ipv6": "fd00:c10e::/112" },
        });
        daemon.create_pool(&pool).unwrap();
        Self { daemon, plugin }
    }

    /// Carries out a verb on a container whose namespace has its name; the answer, or the error.
    fn run(&self, verb: &str, container: &str, more: &Value) -> Result<Value, Value> {
        let netns = format!("/run/netns/{container}");
        self.run_in(verb, container, Path::new(&netns), more)
    }

    fn run_in(
        &self,
        verb: &str,
        container: &str,
        netns: &Path,
        more: &Value,
    ) -> Result<Value, Value> {
        self.run_for(verb, (container, "eth0"), netns, more)
    }

    fn run_for(
        &self,
        verb: &str,
        (container, interface): (&str, &str),
        netns: &Path,
        more: &Value,
    ) -> Result<Value, Value> {
        let mut config = json!({
            "cniVersion": "1.1.0", "name": "blue", "pool": "boxes", "socket": self.daemon.socket(),
        });
        for (key, value) in more.as_object().unwrap() {
            config[key] = value.clone();
        }
        let mut child = Command::new(&self.plugin)
            .env("CNI_COMMAND", verb)
            .env("CNI_CONTAINERID", container)
            .env("CNI_NETNS", netns)
            .env("CNI_IFNAME", interface)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut input = child.stdin.take().unwrap();
        input.write_all(config.to_string().as_bytes()).unwrap();
        drop(input);
        let output = child.wait_with_output().unwrap();
        let said = serde_json::from_slice(&output.stdout).unwrap_or(Value::Null);
        if output.status.success() {
            Ok(said)
        } else {
            assert_eq!(output.status.code(), Some(1));
            Err(said)
        }
    }

    fn leases(&self) -> usize {
        self.daemon.json("list").unwrap().as_array().unwrap().len()
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_check_sees_what_became_of_the_interface_and_a_collection_ends_it() {
    lab::run(|lab| {
        let world = World::start(lab);
        let namespace = lab.namespace("c1");
        let before = lab.snapshot();
        assert_eq!(world.run("STATUS", "c1", &json!({})), Ok(Value::Null));
        let result = world.run("ADD", "c1", &json!({ "mtu": 1400 })).unwrap();
        let shown: Value =
            serde_json::from_str(&namespace.run("ip -j address show eth0").unwrap()).unwrap();
        assert_eq!(shown[0]["address"], result["interfaces"][1]["mac"]);
        assert_eq!(
            (&shown[0]["mtu"], &result["interfaces"][1]["mtu"]),
            (&json!(1400), &json!(1400))
        );
        let address = result["ips"][0]["address"].as_str().unwrap();
        assert_eq!(
            shown[0]["addr_info"][0]["local"],
            address.trim_end_matches("/32")
        );

        let config = json!({ "mtu": 1400, "prevResult": result });
        assert_eq!(world.run("CHECK", "c1", &config), Ok(Value::Null));
        namespace
            .run(&format!("ip address delete {address} dev eth0"))
            .unwrap();
        let told = world.run("CHECK", "c1", &config).unwrap_err();
        assert_eq!(told["code"], 103);
        assert!(
            told["details"].as_str().unwrap().contains(address),
            "{told}"
        );

        let stale =
            json!({ "cni.dev/valid-attachments": [{ "containerID": "c2", "ifname": "eth0" }] });
        assert_eq!(world.run("GC", "c1", &stale), Ok(Value::Null));
        assert_eq!(world.run("CHECK", "c1", &config).unwrap_err()["code"], 3);
        assert_eq!(world.leases(), 0);
        before.wait_unchanged(Duration::from_secs(60)).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn what_can_not_be_added_leaves_nothing() {
    lab::run(|lab| {
        let mut world = World::start(lab);
        let taken = lab.namespace("taken");
        taken
            .run("ip link add eth0 type veth peer name eth1")
            .unwrap();
        let before = lab.snapshot();
        fs::write(lab.folder().join("file"), "").unwrap();
        let own = format!("/proc/{}/ns/net", std::process::id());
        for (netns, code, word) in [
            (Path::new("/run/netns/none"), 3, "no network namespace"),
            (Path::new("/run/netns/taken"), 100, "eth0"),
            (Path::new(&own), 7, "the host's own"),
            (lab.folder().join("file").as_path(), 7, "attach.netns"),
        ] {
            let error = world.run_in("ADD", "c1", netns, &json!({})).unwrap_err();
            assert_eq!(error["code"], code, "{error}");
            assert!(error["details"].as_str().unwrap().contains(word), "{error}");
            // As every runtime does after an `ADD` that failed.
            world.run_in("DEL", "c1", netns, &json!({})).unwrap();
            assert_eq!(world.leases(), 0);
        }
        let other = json!({ "pool": "none" });
        assert_eq!(world.run("ADD", "taken", &other).unwrap_err()["code"], 7);
        assert_eq!(
            world.run("STATUS", "taken", &other).unwrap_err()["code"],
            50
        );
        before.wait_unchanged(Duration::from_secs(60)).unwrap();

        world.daemon.kill().unwrap();
        for verb in ["ADD", "DEL"] {
            assert_eq!(
                world.run(verb, "taken", &json!({})).unwrap_err()["code"],
                11
            );
        }
        assert_eq!(
            world.run("STATUS", "taken", &json!({})).unwrap_err()["code"],
            50
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_container_is_checked_in_its_own_namespace() {
    lab::run(|lab| {
        let world = World::start(lab);
        let _namespaces = ["c1", "c2"].map(|name| lab.namespace(name));
        let result = world.run("ADD", "c1", &json!({})).unwrap();
        let config = json!({ "prevResult": result });
        let check =
            |netns: &str, config: &Value| world.run_in("CHECK", "c1", Path::new(netns), config);
        symlink("/run/netns/c1", lab.folder().join("link")).unwrap();
        let link = lab.folder().join("link").display().to_string();
        for same in ["/run/netns/c1", &link] {
            assert_eq!(check(same, &config), Ok(Value::Null), "{same}");
        }
        assert_eq!(check("/run/netns/none", &config).unwrap_err()["code"], 3);
        let elsewhere = config.to_string().replace("netns/c1", "netns/c2");
        let elsewhere: Value = serde_json::from_str(&elsewhere).unwrap();
        for (netns, config) in [
            ("/run/netns/c2", &config),
            ("/run/netns/c1", &elsewhere),
            ("/run/netns/c2", &elsewhere),
        ] {
            let told = check(netns, config).unwrap_err();
            assert_eq!(told["code"], 103, "{told}");
            let details = told["details"].as_str().unwrap();
            assert!(details.contains("/run/netns/c2"), "{told}");
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_second_add_is_told_of_the_first_whatever_it_asks_for() {
    lab::run(|lab| {
        let world = World::start(lab);
        let _namespaces = ["c1", "c2"].map(|name| lab.namespace(name));
        let result = world.run("ADD", "c1", &json!({})).unwrap();
        let mac = json!({ "runtimeConfig": { "mac": "06:00:00:00:00:99" } });
        for (netns, more) in [
            ("/run/netns/c1", &json!({})),
            ("/run/netns/c2", &json!({})),
            ("/run/netns/c1", &mac),
        ] {
            let second = world.run_in("ADD", "c1", Path::new(netns), more);
            let told = second.unwrap_err();
            assert_eq!(told["code"], 102, "{told}");
        }
        let config = json!({ "prevResult": result });
        assert_eq!(world.run("CHECK", "c1", &config), Ok(Value::Null));
    });
}

/// With a bandwidth of 1 Mbit/s in a pod's annotations.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn bursts_that_runtimes_ask_for_at_any_rate_are_taken() {
    lab::run(|lab| {
        let world = World::start(lab);
        let [containerd, crio] = [u64::from(u32::MAX), u64::from(u32::MAX) * 8 - 1];
        for (container, bandwidth) in [
            (
                "c1",
                json!({ "ingressRate": 1_000_000, "ingressBurst": crio, "egressRate": 8000, "egressBurst": crio }),
            ),
            (
                "c2",
                json!({ "IngressRate": 1_000_000, "IngressBurst": containerd, "EgressRate": 0, "EgressBurst": 0 }),
            ),
        ] {
            let _namespace = lab.namespace(container);
            let mut config = json!({ "runtimeConfig": { "bandwidth": bandwidth } });
            config["prevResult"] = world.run("ADD", container, &config).unwrap();
            assert_eq!(world.run("CHECK", container, &config), Ok(Value::Null));
        }
        for lease in world.daemon.json("list").unwrap().as_array().unwrap() {
            let name = lease["name"].as_str().unwrap();
            let shown = world.daemon.json(&format!("show {name}")).unwrap();
            let ingress = &shown["policy"]["limits"]["ingress"];
            assert_eq!(ingress["bits_per_second"], 1_000_000);
            assert_eq!(ingress["burst_bytes"], 450_000_000, "an hour's worth");
        }
    });
}

/// Everything goes by one of them.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_second_network_of_a_container_is_told_to_leave_out_the_routes_of_the_first() {
    lab::run(|lab| {
        let world = World::start(lab);
        let namespace = lab.namespace("c1");
        let before = lab.snapshot();
        world.run("ADD", "c1", &json!({})).unwrap();
        let second = |verb: &str, more: &Value| {
            let mut config = json!({ "name": "red" });
            for (key, value) in more.as_object().unwrap() {
                config[key] = value.clone();
            }
            let netns = Path::new("/run/netns/c1");
            world.run_for(verb, ("c1", "eth1"), netns, &config)
        };
        let refused = second("ADD", &json!({})).unwrap_err();
        assert_eq!(refused["code"], 100, "{refused}");
        let details = refused["details"].as_str().unwrap();
        for word in ["route 0.0.0.0/0", "/run/netns/c1", "`routes`"] {
            assert!(details.contains(word), "no {word} in {details}");
        }
        namespace.run("ip link show eth1").unwrap_err();
        assert_eq!(second("DEL", &json!({})), Ok(Value::Null));

        let mut config = json!({ "routes": [] });
        config["prevResult"] = Value::Null;
        let result = second("ADD", &config).unwrap();
        config["prevResult"] = result;
        assert_eq!(second("CHECK", &config), Ok(Value::Null));
        let routes = namespace.run("ip -j route show default").unwrap();
        let routes: Value = serde_json::from_str(&routes).unwrap();
        assert_eq!(routes.as_array().unwrap().len(), 1);
        assert_eq!(routes[0]["dev"], "eth0");
        assert_eq!(second("DEL", &json!({})), Ok(Value::Null));
        assert_eq!(world.leases(), 1);
        world.run("DEL", "c1", &json!({})).unwrap();
        before.wait_unchanged(Duration::from_secs(60)).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_container_that_is_gone_with_its_namespace_is_deleted_all_the_same() {
    lab::run(|lab| {
        let world = World::start(lab);
        let before = lab.snapshot();
        let namespace = lab.namespace("c1");
        world.run("ADD", "c1", &json!({})).unwrap();
        let again = world.run("ADD", "c1", &json!({})).unwrap_err();
        assert_eq!(again["code"], 102, "{again}");
        drop(namespace);
        for _ in 0..2 {
            assert_eq!(world.run("DEL", "c1", &json!({})), Ok(Value::Null));
        }
        assert_eq!(world.leases(), 0);
        before.wait_unchanged(Duration::from_secs(60)).unwrap();
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_network_of_macvlan_children_is_told_of_as_it_is() {
    lab::run(|lab| {
        let world = World::start(lab);
        let wire = lab.namespace("wire");
        lab.run("ip link add up0 type veth peer name eth0 netns wire");
        lab.run("ip address add 192.0.2.1/24 dev up0");
        lab.run("ip link set up0 up");
        wire.run("ip address add 192.0.2.2/24 dev eth0").unwrap();
        wire.run("ip link set eth0 up").unwrap();
        let pool = json!({
            "name": "lan", "kind": "container", "device": "macvlan", "parent": {"interface": "up0"},
            "size": 1, "quarantine_seconds": 0, "policy": {"uplink": "route"},
            "addresses": {"plan": "prefix", "ipv4": "192.0.2.64/26"},
        });
        world.daemon.create_pool(&pool).unwrap();
        let patience = Duration::from_secs(60);
        world.daemon.wait_pool("lan", 1, patience).unwrap();
        let namespace = lab.namespace("c1");
        let result = world.run("ADD", "c1", &json!({ "pool": "lan" })).unwrap();
        // No interface of the host is the container's, and this network has no gateway.
        let interfaces = result["interfaces"].as_array().unwrap();
        assert_eq!(interfaces.len(), 1, "{result}");
        assert_eq!(interfaces[0]["sandbox"], "/run/netns/c1");
        let address = result["ips"][0]["address"].as_str().unwrap();
        assert!(address.ends_with("/24"), "{result}");
        assert_eq!(result["ips"][0].get("gateway"), None, "{result}");
        assert_eq!(result["routes"], json!([]), "{result}");
        namespace.run("ping -n -q -c 1 -W 10 192.0.2.2").unwrap();
        let config = json!({ "pool": "lan", "prevResult": result });
        assert_eq!(world.run("CHECK", "c1", &config), Ok(Value::Null));
        assert_eq!(world.run("DEL", "c1", &config), Ok(Value::Null));
        assert!(!namespace.run("ip -o link").unwrap().contains("eth0"));
        assert_eq!(world.leases(), 0);
    });
}

/// What was there stays whole, and what can't be whole isn't there.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn an_installation_on_a_full_disk_leaves_no_part_of_a_file() {
    lab::run(|lab| {
        let disk = lab.folder().join("disk");
        fs::create_dir(&disk).unwrap();
        lab.run(&format!(
            "mount -t tmpfs -o size=64k disk {}",
            disk.display()
        ));
        let (bin, conf) = (disk.join("bin"), disk.join("conf"));
        for folder in [&bin, &conf] {
            fs::create_dir(folder).unwrap();
        }
        let given = lab.folder().join("20-mine.conflist");
        fs::write(&given, "x".repeat(6000)).unwrap();
        fs::write(conf.join("20-mine.conflist"), "the old one").unwrap();
        fs::write(bin.join("sandwire-cni"), "the old one").unwrap();
        let install = |options: &str| {
            let mut command = Command::new(sandwire::executable().unwrap());
            let line = format!("cni install {options}");
            command.args(line.split_whitespace());
            command
                .arg("--bin-dir")
                .arg(&bin)
                .arg("--conf-dir")
                .arg(&conf);
            command.output().unwrap()
        };
        let refused = |options: &str| {
            let output = install(options);
            assert_eq!(output.status.code(), Some(2), "{options}");
            let said = String::from_utf8(output.stderr).unwrap();
            assert!(said.contains("No space left"), "{options}: {said}");
        };
        let listed = |folder: &Path| {
            let entries = fs::read_dir(folder).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        let is_old = |path: PathBuf| fs::read_to_string(path).unwrap() == "the old one";

        // The executable is larger than the disk.
        refused("--copy");
        assert!(is_old(bin.join("sandwire-cni")));
        assert_eq!((listed(&bin).len(), listed(&conf).len()), (1, 1));

        // So that nothing is left to be done for the plugin, which would make room.
        fs::remove_file(bin.join("sandwire-cni")).unwrap();
        symlink(sandwire::executable().unwrap(), bin.join("sandwire-cni")).unwrap();
        let rest = disk.join("rest");
        lab.shell(&format!("cat /dev/zero >{} || true", rest.display()));
        refused("");
        assert_eq!(listed(&conf), ["20-mine.conflist"], "a part of the example");
        refused(&format!("--conflist {}", given.display()));
        assert_eq!(listed(&conf), ["20-mine.conflist"]);
        assert!(is_old(conf.join("20-mine.conflist")));

        fs::remove_file(rest).unwrap();
        assert!(install("").status.success());
        assert_eq!(listed(&conf), ["10-sandwire.conflist", "20-mine.conflist"]);
        assert_eq!(listed(&bin), ["sandwire-cni"]);
        let example = fs::read(conf.join("10-sandwire.conflist")).unwrap();
        assert!(serde_json::from_slice::<Value>(&example).is_ok());
    });
}
