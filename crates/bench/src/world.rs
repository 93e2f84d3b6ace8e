//! A played host of its own for each way of connecting guests, so that they can stand side by side
//! without one's firewall or routes costing another anything.
//!
//! Each has two ways out: a veth to a namespace beyond it, where real sockets are, and a TAP, whose
//! frames the benchmark reads itself. Next hops are permanent neighbours: nobody waits for ARP.

use std::{
    fs,
    io::Write,
    net::Ipv4Addr,
    process::{Command, Stdio},
    thread,
};

use anyhow::{Context, Result, anyhow, bail, ensure};
use sandwire_kernel_net::{
    netlink::Socket,
    netns::{self, Home},
    tap::{self, Offloads, Opened},
};
use tempfile::NamedTempFile;

use crate::packet::Mac;

/// The veth that leads out.
pub(crate) const VETH: &str = "out-veth";
/// The TAP that leads out.
pub(crate) const TAP: &str = "out-tap";
/// What the configuration of a daemon on such a host says: its uplinks, and to look at its slots when
/// nothing is being measured.
pub(crate) const DAEMON_SETTINGS: &str =
    "uplinks = [\"out-veth\", \"out-tap\"]\naudit_seconds = 3600\n";
/// The host's address on the veth.
pub(crate) const HOST_ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 1);
/// Who is beyond the veth.
pub(crate) const BEYOND_VETH: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 2);
/// Who is beyond the TAP.
pub(crate) const BEYOND_TAP: Ipv4Addr = Ipv4Addr::new(198, 19, 0, 2);
/// First of the addresses that are reached by way of it.
pub(crate) const FAR_TAP: Ipv4Addr = Ipv4Addr::new(198, 19, 128, 0);
/// How many these are.
pub(crate) const FAR_COUNT: u32 = 32_768;
const HOST_MAC: &str = "02:be:10:00:00:01";
/// Ethernet address of who is beyond.
pub(crate) const BEYOND_MAC: Mac = [0x02, 0xbe, 0x10, 0, 0, 0x02];
const BEYOND_MAC_TEXT: &str = "02:be:10:00:00:02";

/// A played host and what is beyond its uplink. Its namespaces go with it.
#[derive(Debug)]
pub(crate) struct World {
    name: String,
    beyond: String,
}

impl World {
    /// A host in a namespace of its own.
    pub(crate) fn create(name: &str) -> Result<Self> {
        let world = Self {
            name: name.to_owned(),
            beyond: format!("{name}-beyond"),
        };
        let Self { name, beyond } = &world;
        run_line(&format!("ip netns add {name}"))?;
        run_line(&format!("ip netns add {beyond}"))?;
        batch(
            name,
            &format!(
                "link set lo up
                link add {VETH} address {HOST_MAC} type veth peer name eth0 address {BEYOND_MAC_TEXT} netns {beyond}
                address add {HOST_ADDRESS}/24 dev {VETH}
                link set {VETH} up
                neighbour add {BEYOND_VETH} lladdr {BEYOND_MAC_TEXT} dev {VETH} nud permanent
                tuntap add name {TAP} mode tap vnet_hdr
                address add 198.19.0.1/24 dev {TAP}
                link set {TAP} up
                neighbour add {BEYOND_TAP} lladdr {BEYOND_MAC_TEXT} dev {TAP} nud permanent
                route add {FAR_TAP}/17 via {BEYOND_TAP}
                route add default via {BEYOND_VETH}"
            ),
        )?;
        batch(
            beyond,
            &format!(
                "link set lo up
                address add {BEYOND_VETH}/24 dev eth0
                link set eth0 up
                neighbour add {HOST_ADDRESS} lladdr {HOST_MAC} dev eth0 nud permanent
                route add default via {HOST_ADDRESS}"
            ),
        )?;
        inside(name, || {
            set("ipv4/ip_forward", "1")?;
            set("ipv4/conf/all/send_redirects", "0")?;
            set("ipv4/conf/default/send_redirects", "0")?;
            quiet(&[VETH, TAP])
        })?;
        inside(beyond, || quiet(&["eth0"]))?;
        Ok(world)
    }

    /// Name of the host's namespace.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// Name of the namespace beyond the uplink.
    pub(crate) fn beyond(&self) -> &str {
        &self.beyond
    }

    /// Lets the veth take frames that XDP sends into it: its far end then reads them by NAPI.
    pub(crate) fn take_xdp(&self) -> Result<()> {
        let object = write_object(PASS)?;
        let path = object.path().display();
        ip_in(
            &self.beyond,
            &format!("link set dev eth0 xdp object {path} section xdp"),
        )
    }

    /// Opens the TAP that leads out, as a driver that takes everything.
    pub(crate) fn open_tap(&self) -> Result<Opened> {
        open_tap(&self.name, TAP, true)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Whatever this leaves ends with the namespaces of the benchmark.
        for namespace in [&self.beyond, &self.name] {
            let _ = run_line(&format!("ip netns delete {namespace}"));
        }
    }
}

/// Opens a TAP in a namespace, with the virtio header and all offloads, or as plain Ethernet.
pub(crate) fn open_tap(namespace: &str, name: &str, vnet_header: bool) -> Result<Opened> {
    let options = tap::Options {
        vnet_header,
        multi_queue: false,
        owner: None,
        group: None,
    };
    let opened = inside(namespace, || Ok(tap::open(name, options)?))?;
    let opened = opened.with_context(|| format!("somebody else has the TAP {name} open"))?;
    opened.set_offloads(Offloads {
        checksum: vnet_header,
        segmentation: vnet_header,
    })?;
    Ok(opened)
}

/// Runs `work` on a thread in a named namespace.
pub(crate) fn inside<T: Send>(
    namespace: &str,
    work: impl FnOnce() -> Result<T> + Send,
) -> Result<T> {
    thread::scope(|scope| {
        let worker = scope.spawn(move || {
            let _inside = Home::here()?.enter(namespace)?;
            work()
        });
        let done = worker.join();
        done.map_err(|_| anyhow!("a thread in the namespace {namespace} panicked"))?
    })
}

/// A socket for questions about a namespace's interfaces.
pub(crate) fn netlink_of(namespace: &str) -> Result<Socket> {
    inside(namespace, || Ok(Socket::route()?))
}

/// A command that will run in a network namespace; its mounts stay ours.
pub(crate) fn command_in(namespace: &str, program: &str) -> Command {
    let mut command = Command::new("nsenter");
    command
        .arg(format!("--net={}", netns::path_of(namespace).display()))
        .args(["--", program])
        .stdin(Stdio::null());
    command
}

/// Writes a setting below `/proc/sys/net` of the calling thread's namespace.
pub(crate) fn set(name: &str, value: &str) -> Result<()> {
    let path = format!("/proc/sys/net/{name}");
    fs::write(&path, value).with_context(|| format!("cannot write {path}"))
}

/// Nothing but the benchmark's packets: no IPv6 autoconfiguration on these interfaces.
fn quiet(interfaces: &[&str]) -> Result<()> {
    let mut off = interfaces.iter();
    off.try_for_each(|name| set(&format!("ipv6/conf/{name}/disable_ipv6"), "1"))
}

/// Runs lines of `ip` commands in a namespace, all by one process.
pub(crate) fn batch(namespace: &str, lines: &str) -> Result<()> {
    feed(&["ip", "-n", namespace, "-batch", "-"], lines)
}

/// Loads rules by `nft` in a namespace.
pub(crate) fn nft(namespace: &str, rules: &str) -> Result<()> {
    let path = format!("--net={}", netns::path_of(namespace).display());
    feed(&["nsenter", &path, "--", "nft", "-f", "-"], rules)
}

/// Runs `ip` in a namespace, with words without spaces in them.
pub(crate) fn ip_in(namespace: &str, words: &str) -> Result<()> {
    let output = command_in(namespace, "ip")
        .args(words.split_whitespace())
        .output()
        .context("cannot start ip")?;
    let problem = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "`ip {words}` failed: {}",
        problem.trim()
    );
    Ok(())
}

/// Writes a compiled program where other programs find it.
pub(crate) fn write_object(bytes: &[u8]) -> Result<NamedTempFile> {
    let mut file = NamedTempFile::new_in("/run").context("cannot write a program")?;
    file.write_all(bytes).context("cannot write a program")?;
    Ok(file)
}

const PASS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/pass.o"));

/// Runs a command of words without spaces in them.
pub(crate) fn run_line(line: &str) -> Result<()> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let (program, arguments) = words.split_first().context("an empty command line")?;
    crate::private_host::run(program, arguments)
}

fn feed(command: &[&str], text: &str) -> Result<()> {
    let mut child = Command::new(command[0])
        .args(&command[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", command[0]))?;
    let lines: Vec<&str> = text.lines().map(str::trim).collect();
    let mut input = child.stdin.take().context("a pipe was asked for")?;
    // The other side's own words, below, say more than a broken pipe.
    let _ = input.write_all((lines.join("\n") + "\n").as_bytes());
    drop(input);
    let output = child.wait_with_output().context("cannot wait")?;
    if !output.status.success() {
        let problem = String::from_utf8_lossy(&output.stderr);
        bail!("`{}` failed: {}", command.join(" "), problem.trim());
    }
    Ok(())
}
