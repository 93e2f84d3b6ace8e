//! A host with a daemon and two pools with the eBPF data path, one of each kind of slot, alike but for
//! their clone addresses.

#![allow(dead_code, reason = "each test executable uses the part that it needs")]

use std::{
    fs,
    io::{Read, Write},
    net::{IpAddr, SocketAddr, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    command, counters,
    fake_guest::FakeGuest,
    host::{BEYOND_IPV4, Beyond, HOST_IPV4},
    lab::Lab,
    namespace::Namespace,
    pinger::Pinger,
    sandwire::{self, Daemon, Lease},
};
use serde_json::{Value, json};

pub(crate) const SECOND: Duration = Duration::from_secs(1);

/// The network namespace that a test runs in.
pub(crate) const HERE: &str = "/proc/self/ns/net";

/// Pools of a [`World`], by the kinds of their slots.
pub(crate) const POOLS: [&str; 2] = ["netns", "host"];

/// A daemon on a host with an uplink.
pub(crate) struct World {
    pub(crate) daemon: Daemon,
    pub(crate) beyond: Beyond,
}

impl World {
    /// Starts the daemon and fills both pools with slots that use the uplink as `uplink` says.
    pub(crate) fn start(lab: &Lab, uplink: &str, size: u32) -> Self {
        let world = Self::without_pools(lab);
        world.add_pools(size, &json!({"uplink": uplink}));
        world
    }

    /// Fills both pools with slots that have a policy.
    pub(crate) fn add_pools(&self, size: u32, policy: &Value) {
        for (number, kind) in POOLS.into_iter().enumerate() {
            let spec = pool(kind, kind, number, size, policy);
            self.daemon.create_pool(&spec).unwrap();
            self.route_back(number);
        }
    }

    /// Starts the daemon alone.
    pub(crate) fn without_pools(lab: &Lab) -> Self {
        Self::with_config(lab, "")
    }

    /// Starts the daemon alone, with more in its configuration.
    pub(crate) fn with_config(lab: &Lab, more: &str) -> Self {
        let beyond = Beyond::attach().unwrap();
        let folder = lab.folder().join("daemon");
        fs::create_dir(&folder).unwrap();
        let executable = sandwire::executable().unwrap();
        let daemon = Daemon::start(&executable, &folder, &config(more)).unwrap();
        Self { daemon, beyond }
    }

    /// Has the daemon start with more in its configuration the next time.
    pub(crate) fn configure(&self, more: &str) {
        self.daemon.configure(&config(more)).unwrap();
    }

    /// Lets the world beyond answer the clone addresses of a pool.
    pub(crate) fn route_back(&self, number: usize) {
        for prefix in prefixes(number) {
            self.beyond.route_through_host(&prefix).unwrap();
        }
    }

    /// A lease of a pool, with a fake guest on it.
    pub(crate) fn guest(&self, pool: &str, name: &str) -> (Lease, FakeGuest) {
        let lease = self.daemon.acquire(pool, name).unwrap();
        let guest = FakeGuest::attach(&lease.path, &lease.tap).unwrap();
        (lease, guest)
    }

    /// What the daemon says of a lease.
    pub(crate) fn detail(&self, lease: &Lease) -> Value {
        let path = format!("/v1/leases/{}", lease.name);
        self.daemon.call("GET", &path, None).unwrap()
    }
}

fn config(more: &str) -> String {
    format!("instance = \"lab\"\naudit_seconds = 2\n{more}\n")
}

/// IPv4 and IPv6 prefix of the clone addresses of the pool with this number.
pub(crate) fn prefixes(number: usize) -> [String; 2] {
    [
        format!("10.{}.0.0/24", 64 + number),
        format!("fd00:c10e:{number}::/64"),
    ]
}

/// A pool with the eBPF data path.
pub(crate) fn pool(name: &str, kind: &str, number: usize, size: u32, policy: &Value) -> Value {
    let [ipv4, ipv6] = prefixes(number);
    json!({
        "name": name,
        "kind": kind,
        "data_path": "ebpf",
        "size": size,
        "addresses": {"plan": "prefix", "ipv4": ipv4, "ipv6": ipv6},
        "policy": policy,
    })
}

/// Counts packets that the host's own stack forwards; there are none when the eBPF path does all.
pub(crate) struct StackWatch;

impl StackWatch {
    pub(crate) fn start() -> Self {
        Self::on("up0")
    }

    /// On another uplink.
    pub(crate) fn on(uplink: &str) -> Self {
        let table = format!(
            "table inet watch {{ chain forward {{ type filter hook forward priority 200;
               iifname \"{uplink}\" counter; oifname \"{uplink}\" counter\n}}\n}}\n"
        );
        command::run_with_input("nft -f -", &table).unwrap();
        Self
    }

    /// Packets from or to the uplink that the stack has forwarded.
    pub(crate) fn packets(&self) -> u64 {
        let text = command::run("nft -j list table inet watch").unwrap();
        counters::packets(&text).unwrap()
    }
}

/// A thousand pings a second from a namespace.
pub(crate) fn ping(netns: &Path, address: IpAddr) -> Pinger {
    Pinger::start(netns, address, Duration::from_millis(1)).unwrap()
}

/// Ends a row of pings of which no packet may be lost. Returns how many there were.
#[track_caller]
pub(crate) fn assert_none_lost(pinger: Pinger, when: &str) -> u32 {
    let pinged = pinger.stop().unwrap();
    assert!(
        pinged.sent > 0 && pinged.lost.is_empty(),
        "{when}: {pinged:?}"
    );
    pinged.sent
}

/// The addresses of a container's lease, without their lengths.
pub(crate) fn addresses_of(lease: &Value) -> Vec<String> {
    let own = lease["attached"]["addresses"].as_array().unwrap();
    own.iter()
        .map(|own| {
            let text = own["address"].as_str().unwrap();
            text.split('/').next().unwrap().to_owned()
        })
        .collect()
}

/// Wants nothing to be wrong with a container's interface.
#[track_caller]
pub(crate) fn assert_sound(world: &World, lease: &str) {
    let path = format!("/v1/leases/{lease}/attached");
    let state = world.daemon.call("GET", &path, None).unwrap();
    assert_eq!(state["defects"], json!([]));
}

/// Pings the world beyond, but not so often that an emulated machine has time for nothing else.
pub(crate) fn ping_slowly(space: &Namespace) -> Pinger {
    Pinger::start(&space.path(), BEYOND_IPV4.into(), Duration::from_millis(20)).unwrap()
}

/// The daemon is killed and comes back while a container sends: not one packet is lost.
#[track_caller]
pub(crate) fn restart_under_ping(world: &mut World, space: &Namespace) {
    let pinger = ping_slowly(space);
    world.daemon.kill().unwrap();
    world.daemon.restart().unwrap();
    assert_none_lost(pinger, "while the daemon came back");
}

#[track_caller]
pub(crate) fn wait_until(what: &str, patience: Duration, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + patience;
    while !happens() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// A port of the host's leads to the echo of a lease's guest.
#[track_caller]
pub(crate) fn assert_a_port_is_published(world: &World, lease: &str) {
    world
        .daemon
        .json(&format!("publish {lease} 8080:7"))
        .unwrap();
    let target = SocketAddr::new(HOST_IPV4.into(), 8080);
    let answer = world.beyond.inside(|| {
        let mut stream = TcpStream::connect_timeout(&target, 20 * SECOND)?;
        stream.set_read_timeout(Some(20 * SECOND))?;
        stream.write_all(b"published")?;
        let mut answer = [0; 9];
        stream.read_exact(&mut answer)?;
        Ok(answer)
    });
    assert_eq!(&answer.unwrap(), b"published");
}
