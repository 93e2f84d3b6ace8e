//! The CNI plugin under `cnitool`, the program of CNI's reference library: every verb as that library calls it.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

use std::{fs, os::unix::fs::symlink, path::PathBuf, process::Command, time::Duration};

use sandwire_testlab::{
    lab::{self, Lab},
    sandwire::{self, Daemon},
};
use serde_json::{Value, json};

/// The network that `sandwire cni install` writes.
const SHIPPED: &str = "sandwire";
/// One of two plugins of ours.
const CHAINED: &str = "chained";

struct World {
    daemon: Daemon,
    plugins: PathBuf,
    networks: PathBuf,
}

impl World {
    fn start(lab: &Lab) -> Self {
        // Where the library keeps what ADD answered.
        lab.run("mount -t tmpfs none /var/lib");
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
        // The network that is shipped names none.
        fs::create_dir_all("/run/sandwire").unwrap();
        symlink(daemon.socket(), "/run/sandwire/sandwire.sock").unwrap();
        let world = Self {
            daemon,
            plugins: lab.folder().join("plugins"),
            networks: lab.folder().join("networks"),
        };
        world.install();
        world
    }

    fn install(&self) {
        for folder in [&self.plugins, &self.networks] {
            fs::create_dir(folder).unwrap();
        }
        let mut install = self.daemon.command("cni install");
        install.arg("--bin-dir").arg(&self.plugins);
        install.arg("--conf-dir").arg(&self.networks);
        let output = install.output().unwrap();
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{errors}");
        let chained = json!({
            "cniVersion": "1.1.0",
            "name": CHAINED,
            "plugins": [
                { "type": "sandwire-cni", "pool": "containers" },
                { "type": "sandwire-cni", "pool": "containers", "interface": "net1", "routes": [] },
            ],
        });
        let path = self.networks.join("20-chained.conflist");
        fs::write(path, chained.to_string()).unwrap();
    }

    /// Carries out a verb; what was printed, or why not.
    fn run(&self, verb: &str, network: &str, namespace: &str) -> Result<String, String> {
        let output = Command::new("cnitool")
            .args([verb, network, &format!("/run/netns/{namespace}")])
            .env("CNI_PATH", &self.plugins)
            .env("NETCONFPATH", &self.networks)
            .output()
            .unwrap();
        let text = |bytes| String::from_utf8(bytes).unwrap();
        match output.status.success() {
            true => Ok(text(output.stdout)),
            false => Err(text(output.stderr)),
        }
    }

    fn add(&self, network: &str, namespace: &str) -> Value {
        let printed = self.run("add", network, namespace).unwrap();
        serde_json::from_str(&printed).unwrap()
    }

    fn leases(&self) -> usize {
        self.daemon.json("list").unwrap().as_array().unwrap().len()
    }
}

#[test]
#[ignore = "needs root and cnitool: cargo xtask test cnitool"]
fn the_network_that_is_shipped_serves_every_verb() {
    lab::run(|lab| {
        let mut world = World::start(lab);
        let spaces = ["c1", "c2"].map(|name| lab.namespace(name));
        let before = lab.snapshot();
        world.run("status", SHIPPED, "c1").unwrap();
        let result = world.add(SHIPPED, "c1");
        assert_eq!(result["cniVersion"], "1.1.0");
        let address = result["ips"][0]["address"].as_str().unwrap();
        let shown = spaces[0].run("ip -o address show eth0").unwrap();
        assert!(shown.contains(address), "{shown}");
        world.run("check", SHIPPED, "c1").unwrap();

        world.add(SHIPPED, "c2");
        let delete = format!("ip address delete {address} dev eth0");
        spaces[0].run(&delete).unwrap();
        let told = world.run("check", SHIPPED, "c1").unwrap_err();
        assert!(told.contains(address), "{told}");
        world.run("del", SHIPPED, "c1").unwrap();
        world.run("del", SHIPPED, "c1").unwrap();
        assert_eq!(world.leases(), 1);

        // It deletes what it knows of, and then asks to collect without a list, which we refuse.
        let told = world.run("gc", SHIPPED, "c2").unwrap_err();
        assert!(told.contains("cni.dev/valid-attachments"), "{told}");
        before.wait_unchanged(Duration::from_secs(60)).unwrap();
        assert_eq!(world.leases(), 0);

        world.daemon.kill().unwrap();
        let told = world.run("status", SHIPPED, "c1").unwrap_err();
        assert!(told.contains("sandwire.sock"), "{told}");
    });
}

#[test]
#[ignore = "needs root and cnitool: cargo xtask test cnitool"]
fn a_chain_is_added_checked_collected_and_deleted_as_a_whole() {
    lab::run(|lab| {
        let world = World::start(lab);
        let space = lab.namespace("c1");
        for ending in ["del", "gc"] {
            world.run("status", CHAINED, "c1").unwrap();
            let result = world.add(CHAINED, "c1");
            assert_eq!(world.leases(), 2);
            let shown = space.run("ip -o link").unwrap();
            assert!(shown.contains("eth0") && shown.contains("net1"), "{shown}");
            let of_both = result["ips"].as_array().unwrap();
            assert_eq!(of_both.len(), 4, "{result}");
            world.run("check", CHAINED, "c1").unwrap();
            let ended = world.run(ending, CHAINED, "c1");
            assert_eq!(ended.is_ok(), ending == "del", "{ended:?}");
            assert_eq!(world.leases(), 0, "after {ending}");
        }
    });
}
