//! The eBPF data path under a running daemon: what its restarts, its uplinks and other people's programs
//! do to packets. The guests are threads; real ones are in `guest_ebpf.rs`.

#![allow(
    clippy::unwrap_used,
    reason = "a test ends at the first thing that fails"
)]

mod cleanup;
#[path = "../ebpf/mod.rs"]
mod ebpf;
mod forbidden;
mod groups;
mod kernels;
mod limits;
mod migrations;
mod moves;
mod prefixes;
mod processors;
mod programs;
mod restarts;
mod room;
mod sizes;
mod tables;
mod taps;
mod tenants;
mod trace;
mod tunnels;
mod uplinks;

use std::net::IpAddr;

use ebpf::{POOLS, SECOND, World};
use sandwire_testlab::{
    command,
    fake_guest::FakeGuest,
    host::{BEYOND_IPV4, BEYOND_IPV6},
    lab::Lab,
    sandwire::Lease,
};
use serde_json::json;

/// What every gateway has.
const GATEWAY_MAC: [u8; 6] = [0x02, 0x73, 0x77, 0x00, 0x00, 0x01];

/// Both directions in both families work. Outward first: smoltcp loses an answer while it asks for its
/// gateway, which a restored guest knows.
#[track_caller]
fn assert_in_touch(lease: &Lease, guest: &FakeGuest) {
    for server in [IpAddr::from(BEYOND_IPV4), BEYOND_IPV6.into()] {
        guest.ping(server, 5 * SECOND).unwrap();
    }
    for address in [lease.ipv4, lease.ipv6] {
        command::run(&format!("ping -n -q -c 1 -W 5 {address}")).unwrap();
    }
}

/// A guest on a lease of each pool, in touch.
#[track_caller]
fn guests_in_touch(world: &World) -> Vec<(Lease, FakeGuest)> {
    let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
    for (lease, guest) in &guests {
        assert_in_touch(lease, guest);
    }
    guests
}

/// A world with maps for few interfaces, and its guests.
#[track_caller]
fn with_small_maps(lab: &Lab) -> (World, Vec<(Lease, FakeGuest)>) {
    let world = World::with_config(lab, "nics_max = 128");
    world.add_pools(1, &json!({"uplink": "route"}));
    let guests = guests_in_touch(&world);
    (world, guests)
}
