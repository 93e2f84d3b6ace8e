//! Edge apps between real kernels: what kernel sockets send arrives intact, and the kernels find nothing wrong.

#![expect(clippy::unwrap_used, reason = "helpers of tests")]

mod offloads;
mod streams;
mod world;

use std::time::Duration;

use sandwire_testlab::lab;

use world::{EDGES, Edge, Forwarder, LEFT, RIGHT, World};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn every_pair_of_edge_apps_carries_what_kernels_send() {
    lab::run_within(Duration::from_secs(300), |_lab| {
        for left in EDGES {
            for right in EDGES {
                for offloads in [true, false] {
                    carry(left, right, offloads);
                }
            }
        }
    });
}

/// Streams and datagrams both ways, IPv4 and IPv6.
fn carry(left: &Edge, right: &Edge, offloads: bool) {
    println!("{} - {}, offloads: {offloads}", left.name, right.name);
    let world = World::new(left, right);
    world.set_offloads(offloads);
    let forwarder = Forwarder::between(left, right);
    for (from, to, address) in [
        (&world.left, &world.right, [RIGHT.four, RIGHT.six]),
        (&world.right, &world.left, [LEFT.four, LEFT.six]),
    ] {
        for address in address {
            streams::datagrams(from, to, address);
            streams::stream(from, to, address);
        }
    }
    assert_eq!(world.receive_errors(), Vec::<String>::new());
    let reports = forwarder.stop();
    assert_eq!(reports.drops(), Vec::<String>::new());
    for (side, edge) in [(LEFT, left), (RIGHT, right)] {
        if edge.sees_offloads {
            let cut = reports.figure(side.name, "cut");
            let completed = reports.figure(side.name, "checksums_completed");
            assert_eq!(
                (cut > 0, completed > 0),
                (offloads, offloads),
                "{cut} {completed}"
            );
        }
    }
}
