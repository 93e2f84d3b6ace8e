//! Where a row's server is, and how the wire leads there.
//!
//! Each row has a [`World`]: a host with a veth to the client beyond it. The server has an address behind that host;
//! what is between the host's end of the wire and the server is the row.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    path::{Path, PathBuf},
    process::Command,
    time::SystemTime,
};

use anyhow::{Context, Result};
use clap::ValueEnum;
use rustix::mount::{MountFlags, mount};
use sandwire_api::{lease::AcquireLease, pool::PoolSpec};
use sandwire_identity::{Allowed, Identities, IdentityPolicy, NewIdentity, OwnCgroup};
use sandwire_kernel_net::{netns, process::join_cgroup};
use serde_json::json;
use tempfile::TempDir;

use super::load::stand_in;
use crate::{
    daemon_process::{DaemonProcess, PATIENCE},
    private_host,
    world::{self, World},
};

/// Where the hierarchy of cgroups is in a private host.
const CGROUPS: &str = "/run/cgroup";
/// Where identities are pinned there.
const PINS: &str = "/sys/fs/bpf/bench-identity";
/// The server's address, in all rows but those that share the wire's network.
const ADDRESS: Ipv4Addr = Ipv4Addr::new(198, 20, 0, 1);
/// The same there.
const ON_WIRE: Ipv4Addr = Ipv4Addr::new(198, 18, 0, 3);
/// A further one, of an identity that has several.
const FURTHER: Ipv4Addr = Ipv4Addr::new(198, 20, 0, 2);

/// Rows of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub(crate) enum Case {
    /// In the host's own namespace.
    Bare,
    /// In a cgroup with an identity there.
    Identity,
    /// In a cgroup with an identity that has TCP only.
    IdentityTcp,
    /// In a namespace behind a veth, by the kernel's routing.
    VethKernel,
    /// In a container slot, by our eBPF.
    VethEbpf,
    /// In a namespace with a macvlan on the host's end of the wire.
    Macvlan,
    /// With an ipvlan, mode L2.
    IpvlanL2,
    /// With an ipvlan, mode L3.
    IpvlanL3,
    /// Behind a netkit pair, mode L2, by the kernel's routing.
    NetkitL2,
    /// Behind a netkit pair, mode L3, by the kernel's routing.
    NetkitL3,
}

impl Case {
    /// Its name in records.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Bare => "bare",
            Self::Identity => "identity",
            Self::IdentityTcp => "identity_tcp",
            Self::VethKernel => "veth_kernel",
            Self::VethEbpf => "veth_ebpf",
            Self::Macvlan => "macvlan",
            Self::IpvlanL2 => "ipvlan_l2",
            Self::IpvlanL3 => "ipvlan_l3",
            Self::NetkitL2 => "netkit_l2",
            Self::NetkitL3 => "netkit_l3",
        }
    }
}

/// A row's played host, and where the server is.
pub(super) struct Place {
    /// Namespace of the server.
    namespace: String,
    cgroup: Option<OwnCgroup>,
    /// Where slots are ours, with its folder.
    daemon: Option<(DaemonProcess, TempDir)>,
    address: IpAddr,
    world: World,
}

impl Place {
    pub(super) fn create(case: Case) -> Result<Self> {
        let name = format!("rr-{}", case.name().replace('_', "-"));
        let mut place = Self::on_host(&name)?;
        match case {
            Case::Bare => world::ip_in(&name, &format!("address add {ADDRESS}/32 dev lo"))?,
            Case::Identity => place.cgroup = Some(identity(&name, &[ADDRESS], false)?),
            Case::IdentityTcp => place.cgroup = Some(identity(&name, &[ADDRESS], true)?),
            Case::VethKernel => place.behind_pair("type veth peer name", false)?,
            Case::NetkitL2 => place.behind_pair("type netkit mode l2 peer name", false)?,
            Case::NetkitL3 => place.behind_pair("type netkit mode l3 peer name", true)?,
            Case::Macvlan => place.on_wire("type macvlan mode bridge")?,
            Case::IpvlanL2 => place.on_wire("type ipvlan mode l2")?,
            Case::IpvlanL3 => place.on_wire("type ipvlan mode l3")?,
            Case::VethEbpf => place.in_slot()?,
        }
        Ok(place)
    }

    /// In a cgroup with an identity of two addresses, with a daemon, which UDP there needs. Clients call the further one.
    pub(super) fn of_several_addresses() -> Result<Self> {
        let name = "rr-several";
        let mut place = Self::on_host(name)?;
        place.cgroup = Some(identity(name, &[ADDRESS, FURTHER], false)?);
        place.address = FURTHER.into();
        let folder = tempfile::tempdir_in("/run").context("cannot make a folder")?;
        let settings = format!("identity_folder = {:?}\n", pins(name));
        let daemon = DaemonProcess::start_with(folder.path(), Some(name), &settings)?;
        place.daemon = Some((daemon, folder));
        Ok(place)
    }

    fn on_host(name: &str) -> Result<Self> {
        Ok(Self {
            namespace: name.to_owned(),
            cgroup: None,
            daemon: None,
            address: ADDRESS.into(),
            world: World::create(name)?,
        })
    }

    /// A namespace of the server's, joined to the host by a pair of interfaces, the host routing.
    fn behind_pair(&mut self, kind: &str, is_l3: bool) -> Result<()> {
        let host = self.world.name().to_owned();
        let inner = self.add_namespace()?;
        world::batch(
            &host,
            &format!(
                "link add pair0 {kind} eth0 netns {inner}
                link set pair0 up
                route add {ADDRESS}/32 dev pair0"
            ),
        )?;
        world::batch(
            &inner,
            &format!(
                "address add {ADDRESS}/32 dev eth0
                link set eth0 up
                route add default dev eth0"
            ),
        )?;
        if !is_l3 {
            // Nobody waits for ARP, as in the slots.
            let outer_mac = mac(&host, "pair0")?;
            let inner_mac = mac(&inner, "eth0")?;
            let line = |address: Ipv4Addr, mac: &str, device: &str| {
                format!("neighbour add {address} lladdr {mac} dev {device} nud permanent")
            };
            world::batch(&host, &line(ADDRESS, &inner_mac, "pair0"))?;
            world::batch(&inner, &line(world::BEYOND_VETH, &outer_mac, "eth0"))?;
        }
        Ok(())
    }

    /// A namespace of the server's with an interface on the host's end of the wire.
    fn on_wire(&mut self, kind: &str) -> Result<()> {
        let host = self.world.name().to_owned();
        let inner = self.add_namespace()?;
        let device = world::VETH;
        world::batch(
            &host,
            &format!("link add link {device} name eth0 netns {inner} {kind}"),
        )?;
        world::batch(
            &inner,
            &format!(
                "address add {ON_WIRE}/24 dev eth0
                link set eth0 up"
            ),
        )?;
        let beyond = self.world.beyond();
        let line = |address: Ipv4Addr, mac: &str| {
            format!("neighbour replace {address} lladdr {mac} dev eth0 nud permanent")
        };
        world::batch(beyond, &line(ON_WIRE, &mac(&inner, "eth0")?))?;
        if !kind.ends_with("l3") {
            let far = mac(beyond, "eth0")?;
            world::batch(&inner, &line(world::BEYOND_VETH, &far))?;
        }
        self.address = ON_WIRE.into();
        Ok(())
    }

    /// A namespace of the server's with a container slot's interface in it, by the real daemon.
    fn in_slot(&mut self) -> Result<()> {
        let host = self.world.name().to_owned();
        let inner = self.add_namespace()?;
        let folder = tempfile::tempdir_in("/run").context("cannot make a folder")?;
        let daemon = DaemonProcess::start_in(folder.path(), Some(&host))?;
        let (daemon, _) = self.daemon.insert((daemon, folder));
        let pool: PoolSpec = serde_json::from_value(json!({
            "name": "bench",
            "kind": "container",
            "data_path": "ebpf",
            "addresses": { "plan": "prefix", "ipv4": "198.20.0.0/24" },
            "policy": { "uplink": "route" },
        }))
        .context("the benchmark's pool is not a valid one")?;
        daemon.client().create_pool(&pool)?;
        private_host::wait_until("a slot is ready", PATIENCE, || {
            Ok(daemon.slots(&pool.name)?.ready > 0)
        })?;
        let request: AcquireLease = serde_json::from_value(json!({
            "pool": "bench",
            "attach": { "netns": netns::path_of(&inner) },
        }))
        .context("the benchmark's request is not a valid one")?;
        let lease = daemon.client().acquire(&request)?.lease;
        let nic = lease.nics.first().context("a lease without interface")?;
        let ipv4 = nic.ipv4.as_ref().context("a lease without IPv4")?;
        self.address = ipv4.clone_address.into();
        Ok(())
    }

    fn add_namespace(&mut self) -> Result<String> {
        let inner = format!("{}-in", self.world.name());
        world::run_line(&format!("ip netns add {inner}"))?;
        world::batch(&inner, "link set lo up")?;
        self.namespace.clone_from(&inner);
        Ok(inner)
    }

    /// Where the client calls.
    pub(super) fn target(&self, port: u16) -> SocketAddr {
        SocketAddr::from((self.address, port))
    }

    /// A stand-in where the server is.
    pub(super) fn server_command(&self, words: &str) -> Result<Command> {
        let mut command = stand_in(executable_in(&self.namespace)?, words);
        if let Some(cgroup) = &self.cgroup {
            join_cgroup(&mut command, cgroup.entrance()?);
        }
        Ok(command)
    }

    /// A stand-in in the host's own namespace, without the identity.
    pub(super) fn host_command(&self, words: &str) -> Result<Command> {
        Ok(stand_in(executable_in(self.world.name())?, words))
    }

    /// A stand-in beyond the wire.
    pub(super) fn client_command(&self, words: &str) -> Result<Command> {
        Ok(stand_in(executable_in(self.world.beyond())?, words))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.cgroup.is_some() {
            let name = self.world.name().to_owned();
            let identities = identities(&name);
            // The programs go with the cgroup at the latest.
            let _ = world::inside(&name, move || Ok(identities.remove(IDENTITY)?));
        }
        if self.namespace != self.world.name() {
            let _ = world::run_line(&format!("ip netns delete {}", self.namespace));
        }
    }
}

const IDENTITY: &str = "bench";

fn executable_in(namespace: &str) -> Result<Command> {
    let executable = std::env::current_exe().context("cannot find this executable")?;
    Ok(world::command_in(namespace, &executable.to_string_lossy()))
}

/// Those of a played host: a folder is of one network namespace.
fn identities(host: &str) -> Identities {
    Identities::new(&pins(host))
}

fn pins(host: &str) -> PathBuf {
    PathBuf::from(format!("{PINS}-{host}"))
}

/// A cgroup that goes with the benchmark, however that ends.
pub(super) fn own_cgroup() -> Result<OwnCgroup> {
    // Numbers of processes begin anew in each private host, and cgroups are the machine's.
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let name = format!("bench-{}", now.unwrap_or_default().as_nanos());
    let cgroup = OwnCgroup::create(Some(Path::new(CGROUPS)), &name)?;
    private_host::remove_if_interrupted(cgroup.path());
    Ok(cgroup)
}

fn identity(host: &str, addresses: &[Ipv4Addr], tcp_only: bool) -> Result<OwnCgroup> {
    let cgroup = own_cgroup()?;
    let new = NewIdentity {
        cgroup: cgroup.path().to_owned(),
        name: Some(IDENTITY.parse()?),
        addresses: addresses.iter().copied().map(IpAddr::from).collect(),
        prefixes: Vec::new(),
        interface: "lo".to_owned(),
        existing: false,
        allowed: Allowed::default(),
        tcp_only,
        policy: IdentityPolicy::default(),
        own_cgroup: false,
        declared_by: None,
    };
    let identities = identities(host);
    world::inside(host, move || {
        identities.add(&new)?;
        Ok(())
    })?;
    Ok(cgroup)
}

/// The address of an interface.
fn mac(namespace: &str, interface: &str) -> Result<String> {
    let output = world::command_in(namespace, "cat")
        .arg(format!("/sys/class/net/{interface}/address"))
        .output()
        .context("cannot read an interface's address")?;
    let shown = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !shown.is_empty() {
        return Ok(shown);
    }
    // /sys is of another namespace: the kernel's own answer then.
    let output = world::command_in(namespace, "ip")
        .args(["-json", "link", "show", "dev", interface])
        .output()
        .context("cannot start ip")?;
    let answer: serde_json::Value =
        serde_json::from_slice(&output.stdout).context("ip answers in another form")?;
    let address = answer[0]["address"].as_str();
    address
        .map(str::to_owned)
        .with_context(|| format!("{interface} has no address"))
}

/// Makes the hierarchy of cgroups visible in a private host, whose `/sys` is its own.
pub(super) fn mount_cgroups() -> Result<()> {
    fs::create_dir(CGROUPS).with_context(|| format!("cannot make {CGROUPS}"))?;
    mount("none", CGROUPS, "cgroup2", MountFlags::empty(), None)
        .context("cannot mount cgroups of version 2")
}
