//! What people do without this project: Firecracker's document "Network Connectivity for Clones", by
//! `ip` and `iptables`, command for command.
//!
//! Each command is started directly rather than by a shell, which only makes the recipe faster.

use std::net::Ipv4Addr;

use anyhow::{Context, Result, bail};

use crate::private_host;

/// The document's addresses for one clone.
struct Plan {
    namespace: String,
    host_interface: String,
    host_address: String,
    inner_address: String,
    clone_address: String,
}

/// Slots from which on the document's addresses meet its own guest's subnet.
pub(crate) const SLOTS_MAX: u32 = 7230;

impl Plan {
    fn new(index: u32) -> Self {
        let (third, fourth) = (index / 30, (index % 30) * 8);
        Self {
            namespace: format!("fc{index}"),
            host_interface: format!("veth{}", index + 1),
            host_address: format!("10.{third}.{fourth}.1"),
            inner_address: format!("10.{third}.{fourth}.2"),
            clone_address: format!("192.168.{third}.{}", fourth + 3),
        }
    }

    /// The document's commands, in its order. `host` is what the document calls `1`.
    fn commands(&self, host: &str) -> Vec<String> {
        let Self {
            namespace,
            host_interface,
            host_address,
            inner_address,
            clone_address,
        } = self;
        let inside = format!("ip netns exec {namespace}");
        vec![
            format!("ip netns add {namespace}"),
            format!("{inside} ip tuntap add name vmtap0 mode tap"),
            format!("{inside} ip addr add 192.168.241.1/29 dev vmtap0"),
            format!("{inside} ip link set vmtap0 up"),
            format!("{inside} ip link add {host_interface} type veth peer name veth0"),
            format!("{inside} ip link set {host_interface} netns {host}"),
            format!("{inside} ip addr add {inner_address}/24 dev veth0"),
            format!("{inside} ip link set dev veth0 up"),
            format!("ip addr add {host_address}/24 dev {host_interface}"),
            format!("ip link set dev {host_interface} up"),
            format!("{inside} ip route add default via {host_address}"),
            format!(
                "{inside} iptables -t nat -A POSTROUTING -o veth0 -s 192.168.241.2 -j SNAT --to {clone_address}"
            ),
            format!(
                "{inside} iptables -t nat -A PREROUTING -i veth0 -d {clone_address} -j DNAT --to 192.168.241.2"
            ),
            format!("ip route add {clone_address} via {inner_address}"),
        ]
    }
}

/// Builds one slot.
pub(crate) fn build(index: u32) -> Result<()> {
    for command in Plan::new(index).commands("1") {
        let mut words = command.split(' ');
        let program = words.next().unwrap_or_default();
        private_host::run(program, &words.collect::<Vec<_>>())?;
    }
    Ok(())
}

/// Builds one slot whose host is the namespace of this name. Returns the clone's address, the slot's
/// namespace, and the names of the veth's ends on the host and in the slot.
pub(crate) fn build_in(host: &str, index: u32) -> Result<Built> {
    let plan = Plan::new(index);
    for command in plan.commands(host) {
        let mut words = command.split(' ');
        let program = words.next().unwrap_or_default();
        let output = crate::world::command_in(host, program)
            .args(words)
            .output()
            .with_context(|| format!("cannot start `{command}`"))?;
        if !output.status.success() {
            let problem = String::from_utf8_lossy(&output.stderr);
            bail!("`{command}` failed: {}", problem.trim());
        }
    }
    Ok(Built {
        clone_address: plan.clone_address.parse().context("a clone address")?,
        inner_address: plan.inner_address.parse().context("an address")?,
        host_address: plan.host_address.parse().context("an address")?,
        namespace: plan.namespace,
        host_interface: plan.host_interface,
    })
}

/// A slot that the recipe has built.
#[derive(Debug)]
pub(crate) struct Built {
    /// By which the world knows the clone.
    pub(crate) clone_address: Ipv4Addr,
    /// The slot's address on its veth.
    pub(crate) inner_address: Ipv4Addr,
    /// The host's address on that veth.
    pub(crate) host_address: Ipv4Addr,
    /// The slot's namespace.
    pub(crate) namespace: String,
    /// The host's end of the veth.
    pub(crate) host_interface: String,
}

/// Removes one slot: its interfaces and the host's route go with the namespace.
pub(crate) fn remove(index: u32) -> Result<()> {
    private_host::run("ip", &["netns", "del", &Plan::new(index).namespace])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_clone_has_the_addresses_of_the_document() {
        let commands = Plan::new(0).commands("1");
        for command in [
            "ip netns add fc0",
            "ip netns exec fc0 ip link add veth1 type veth peer name veth0",
            "ip netns exec fc0 ip addr add 10.0.0.2/24 dev veth0",
            "ip addr add 10.0.0.1/24 dev veth1",
            "ip netns exec fc0 ip route add default via 10.0.0.1",
            "ip route add 192.168.0.3 via 10.0.0.2",
        ] {
            assert!(commands.iter().any(|ours| ours == command), "{command}");
        }
        assert_eq!(commands.len(), 14);
    }

    #[test]
    fn later_clones_count_on_as_in_the_document() {
        let plan = Plan::new(199);
        assert_eq!(plan.host_address, "10.6.152.1");
        assert_eq!(plan.clone_address, "192.168.6.155");
        assert_eq!(plan.host_interface, "veth200");
    }

    #[test]
    fn the_range_ends_where_the_guests_subnet_begins() {
        assert!(
            !Plan::new(SLOTS_MAX - 1)
                .clone_address
                .starts_with("192.168.241.")
        );
        assert!(
            Plan::new(SLOTS_MAX)
                .clone_address
                .starts_with("192.168.241.")
        );
    }
}
