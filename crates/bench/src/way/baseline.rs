//! What ours is compared with: the kernel's forwarding, and the recipe.
//!
//! The recipe's neighbours are made permanent here, and so are the kernel's: at a thousand guests the
//! kernel's table for neighbours found by ARP would be full, and packets would be lost to that.

use std::{
    fmt::Write,
    net::{IpAddr, Ipv4Addr},
};

use anyhow::{Context, Result};
use sandwire_kernel_net::{
    interface::{self, InterfaceIndex},
    neighbour::Neighbour,
    netlink::{Request, Socket},
};

use super::{Place, Sandbox, Way};
use crate::{
    packet::Mac,
    recipe,
    world::{self, World},
};

/// Ethernet address of the gateways of the kernel's TAPs.
const GATEWAY_MAC: Mac = [0x02, 0x73, 0x77, 0, 0, 0x01];
/// Ethernet address of the guests.
const GUEST_MAC: Mac = [0x06, 0x00, 0xc0, 0xa8, 0xf1, 0x02];
/// Where the addresses of the kernel's guests begin; each has four of them.
const FIRST: u32 = u32::from_be_bytes([10, 128, 0, 0]);
/// The address that conntrack gives the only guest of [`Way::KernelNat`].
const TRANSLATED: Ipv4Addr = Ipv4Addr::new(192, 168, 200, 3);
/// TAP and addresses of the document's guests.
const RECIPE_TAP: &str = "vmtap0";
const RECIPE_GUEST: Ipv4Addr = Ipv4Addr::new(192, 168, 241, 2);
const RECIPE_GATEWAY: Ipv4Addr = Ipv4Addr::new(192, 168, 241, 1);

/// TAPs in the host's namespace, each with an address and a guest of its own.
pub(super) fn kernel(way: Way, slots: u32) -> Result<Place> {
    let world = World::create(way.name())?;
    let sandboxes: Vec<Sandbox> = (0..slots).map(|slot| guest(world.name(), slot)).collect();
    let mut lines = String::new();
    for sandbox in &sandboxes {
        let Sandbox {
            tap,
            gateway,
            guest,
            ..
        } = sandbox;
        let _ = writeln!(
            lines,
            "tuntap add name {tap} mode tap vnet_hdr
            link set {tap} address {} up
            address add {gateway}/30 dev {tap}
            neighbour add {guest} lladdr {} dev {tap} nud permanent",
            text(GATEWAY_MAC),
            text(GUEST_MAC),
        );
    }
    world::batch(world.name(), lines.trim())?;
    let mut place = Place {
        sandboxes,
        daemon: None,
        note: None,
        world,
    };
    if way == Way::KernelNat {
        translate(&mut place)?;
    }
    Ok(place)
}

fn guest(namespace: &str, slot: u32) -> Sandbox {
    let base = FIRST + slot * 4;
    Sandbox {
        namespace: namespace.to_owned(),
        tap: format!("tap{slot}"),
        has_offloads: true,
        mac: GUEST_MAC,
        gateway_mac: GATEWAY_MAC,
        guest: Ipv4Addr::from(base + 2),
        gateway: Ipv4Addr::from(base + 1),
        prefix_length: 30,
        clone: Ipv4Addr::from(base + 2),
    }
}

/// Source address of the first guest by conntrack, and the way back.
fn translate(place: &mut Place) -> Result<()> {
    let name = place.world.name();
    let sandbox = place.sandboxes.first_mut().context("no guest")?;
    let guest = sandbox.guest;
    let rules = format!(
        "table ip bench {{
            chain out {{
                type nat hook postrouting priority srcnat
                ip saddr {guest} oifname \"out-*\" snat to {TRANSLATED}
            }}
            chain in {{
                type nat hook prerouting priority dstnat
                ip daddr {TRANSLATED} dnat to {guest}
            }}
        }}"
    );
    world::nft(name, &rules)?;
    sandbox.clone = TRANSLATED;
    Ok(())
}

/// The document's slots; with [`Way::RecipeTwice`], the host translates too.
pub(super) fn recipe(way: Way, slots: u32, progress: impl Fn(u32)) -> Result<Place> {
    let world = World::create(way.name())?;
    // The document's names of namespaces are the same on every host: there is room for two hosts.
    let first = if way == Way::Recipe {
        0
    } else {
        recipe::SLOTS_MAX / 2
    };
    let mut host = world::netlink_of(world.name())?;
    let mut sandboxes = Vec::new();
    for index in first..first + slots {
        let built = recipe::build_in(world.name(), index)?;
        sandboxes.push(settle(&mut host, &built)?);
        progress(index - first + 1);
    }
    if way == Way::RecipeTwice {
        world::nft(
            world.name(),
            "table ip bench {
                chain out {
                    type nat hook postrouting priority srcnat
                    ip saddr 192.168.0.0/16 oifname \"out-*\" snat to 198.18.0.1
                }
            }",
        )?;
        for sandbox in &mut sandboxes {
            sandbox.clone = world::HOST_ADDRESS;
        }
    }
    Ok(Place {
        sandboxes,
        daemon: None,
        note: None,
        world,
    })
}

/// Lets the slot forward, which the document takes for granted, and makes its neighbours permanent.
fn settle(host: &mut Socket, built: &recipe::Built) -> Result<Sandbox> {
    let outer = index_and_mac(host, &built.host_interface)?;
    let (gateway_mac, inner_mac) = world::inside(&built.namespace, || {
        world::set("ipv4/ip_forward", "1")?;
        let mut socket = Socket::route()?;
        let tap = index_and_mac(&mut socket, RECIPE_TAP)?;
        let inner = index_and_mac(&mut socket, "veth0")?;
        let mut request = Request::new();
        neighbour(&mut request, tap.0, RECIPE_GUEST, GUEST_MAC);
        neighbour(&mut request, inner.0, built.host_address, outer.1);
        socket.execute(request)?;
        Ok((tap.1, inner.1))
    })?;
    let mut request = Request::new();
    neighbour(&mut request, outer.0, built.inner_address, inner_mac);
    host.execute(request)?;
    Ok(Sandbox {
        namespace: built.namespace.clone(),
        tap: RECIPE_TAP.to_owned(),
        has_offloads: true,
        mac: GUEST_MAC,
        gateway_mac,
        guest: RECIPE_GUEST,
        gateway: RECIPE_GATEWAY,
        prefix_length: 29,
        clone: built.clone_address,
    })
}

fn index_and_mac(socket: &mut Socket, name: &str) -> Result<(InterfaceIndex, Mac)> {
    let found = interface::find(socket, name)?;
    let found = found.with_context(|| format!("there is no interface {name}"))?;
    let mac = found
        .mac
        .with_context(|| format!("{name} has no address"))?;
    Ok((found.index, mac))
}

fn neighbour(request: &mut Request, interface: InterfaceIndex, address: Ipv4Addr, mac: Mac) {
    let address = IpAddr::V4(address);
    Neighbour {
        interface,
        address,
        mac,
    }
    .add(request);
}

/// An Ethernet address as `ip` writes it.
pub(crate) fn text(mac: Mac) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guests_of_the_kernel_have_a_subnet_each() {
        let guests: Vec<Sandbox> = (0..3000).map(|slot| guest("kernel", slot)).collect();
        assert_eq!(guests[0].guest, Ipv4Addr::new(10, 128, 0, 2));
        assert_eq!(guests[2999].gateway, Ipv4Addr::new(10, 128, 46, 221));
        assert!(guests.iter().all(|guest| u32::from(guest.gateway) % 4 == 1));
    }

    #[test]
    fn an_address_is_written_as_ip_reads_it() {
        assert_eq!(text(GUEST_MAC), "06:00:c0:a8:f1:02");
    }
}
