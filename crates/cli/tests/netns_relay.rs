//! Leases whose traffic is relayed: of every data path, with the daemon's own names for senders.

#![allow(clippy::unwrap_used, reason = "a test may fail where it likes")]

mod ebpf;

use std::{
    fs,
    net::{IpAddr, SocketAddr},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use ebpf::{SECOND, World, pool, prefixes, wait_until};
use sandwire_testlab::{
    command,
    host::{ECHO_PORT, HTTP_PORT},
    lab,
    namespace::command_in,
    sandwire,
};
use serde_json::json;

const PATIENCE: Duration = Duration::from_secs(60);
/// Beyond, and by routes alone: what isn't relayed arrives there too.
const DESTINATIONS: [&str; 2] = ["198.51.100.7", "2001:db8:5::7"];

/// A process that is ended with its owner.
struct Process(Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn configure(folder: &Path, world: &World, pools: usize) {
    let keys = Command::new(sandwire::executable().unwrap())
        .args(["relay", "keys"])
        .arg(folder)
        .args(["host.example", "peer.example"])
        .status();
    assert!(keys.unwrap().success());
    let path = folder.display();
    let common = |name: &str| {
        format!(
            "folder = \"{path}/{name}\"\nreport = \"{path}/{name}.report\"\n[tls]\ncertificate = \"{path}/{name}.example.pem\"\n\
             key = \"{path}/{name}.example.key\"\nauthorities = \"{path}/authority.pem\"\n"
        )
    };
    let from: Vec<String> = (0..pools).flat_map(prefixes).collect();
    let host = format!(
        "{}[egress]\ndaemon = \"{}\"\n[[peer]]\nname = \"beyond\"\naddress = \"203.0.113.2:4433\"\n\
         server_name = \"peer.example\"\n[[redirect]]\nfrom = {from:?}\n\
         to = [\"198.51.100.0/24\", \"2001:db8:5::/64\"]\nvia = \"beyond\"\n",
        common("host"),
        world.daemon.socket().display()
    );
    let peer = format!(
        "{}[deliver]\nlisten = [\"203.0.113.2:4433\"]\nclients = [\"host.example\"]\n\
         allow = [\"198.51.100.0/24\", \"2001:db8:5::/64\"]\n",
        common("peer")
    );
    fs::write(folder.join("host.toml"), host).unwrap();
    fs::write(folder.join("peer.toml"), peer).unwrap();
}

fn start(folder: &Path, name: &str, namespace: Option<&Path>) -> Process {
    let executable = sandwire::executable().unwrap();
    let mut command = match namespace {
        None => Command::new(&executable),
        Some(path) => command_in(path, executable.to_str().unwrap()),
    };
    let log = folder.join(format!("{name}.log"));
    let config = folder.join(format!("{name}.toml"));
    command.args(["relay", "serve", "--config"]).arg(config);
    command
        .stdout(Stdio::null())
        .stderr(fs::File::create(&log).unwrap());
    let process = Process(command.spawn().unwrap());
    wait_until("the relay is ready", PATIENCE, || {
        fs::read_to_string(&log).is_ok_and(|text| text.contains("the relay is ready"))
    });
    process
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn leases_of_every_data_path_are_relayed_by_name() {
    lab::run_within(Duration::from_secs(600), |lab| {
        let world = World::without_pools(lab);
        for (address, version) in [("198.51.100.7/32", ""), ("2001:db8:5::7/128", "-6 ")] {
            let line = format!("ip {version}address add {address} dev lo");
            world.beyond.run(&line).unwrap();
        }
        // Where packets arrive beyond, whichever way they took on the host.
        let counting = "table inet leaks { chain arrivals { type filter hook prerouting priority -300;
            ip daddr 198.51.100.0/24 iifname \"eth0\" counter; ip6 daddr 2001:db8:5::/64 iifname \"eth0\" counter; }; }";
        let mut nft = command_in(&world.beyond.path(), "nft");
        command::output_of(nft.arg(counting)).unwrap();
        let kinds = [("netns", "ebpf"), ("host", "ebpf"), ("netns", "nft")];
        for (number, (kind, data_path)) in kinds.into_iter().enumerate() {
            let name = format!("pool{number}");
            let mut spec = pool(&name, kind, number, 2, &json!({"uplink": "route"}));
            spec["data_path"] = json!(data_path);
            world.daemon.create_pool(&spec).unwrap();
            world.route_back(number);
        }
        let folder = lab.folder().join("relay");
        configure(&folder, &world, kinds.len());
        let _peer = start(&folder, "peer", Some(&world.beyond.path()));
        let host = start(&folder, "host", None);
        let mut guests = Vec::new();
        for number in 0..kinds.len() {
            let (_, guest) = world.guest(&format!("pool{number}"), &format!("lease{number}"));
            for destination in DESTINATIONS {
                let destination: IpAddr = destination.parse().unwrap();
                let page = guest.fetch(SocketAddr::new(destination, HTTP_PORT), PATIENCE);
                assert!(page.unwrap().contains("hello"));
                wait_until("datagrams come back", PATIENCE, || {
                    let server = SocketAddr::new(destination, ECHO_PORT);
                    guest
                        .exchange_udp(server, b"relayed", 3 * SECOND)
                        .is_ok_and(|answer| answer == b"relayed")
                });
            }
            guests.push(guest);
        }
        drop(host);
        for guest in &guests {
            for destination in DESTINATIONS {
                let destination: IpAddr = destination.parse().unwrap();
                let page = guest.fetch(SocketAddr::new(destination, HTTP_PORT), 2 * SECOND);
                assert!(page.is_err(), "it left without the relay");
            }
        }
        let inside = world.beyond.run("nft -j list table inet leaks").unwrap();
        let document: serde_json::Value = serde_json::from_str(&inside).unwrap();
        let packets: u64 = counters(&document);
        assert_eq!(packets, 0, "packets left in the clear");
        wait_until("the report has all of them", PATIENCE, || {
            let report = fs::read_to_string(folder.join("peer.report")).unwrap_or_default();
            (0..kinds.len()).all(|number| {
                report.contains(&format!("\"sender\":\"pool{number}/lease{number}\""))
            })
        });
        lab.run(&format!(
            "{} relay clear",
            sandwire::executable().unwrap().display()
        ));
    });
}

/// What the counters of a table have together.
fn counters(document: &serde_json::Value) -> u64 {
    let items = document["nftables"].as_array().unwrap().iter();
    items
        .filter_map(|item| item["rule"]["expr"].as_array())
        .flatten()
        .filter_map(|expression| expression["counter"]["packets"].as_u64())
        .sum()
}
