//! What happens to packets while there is no daemon.

use std::thread;

use sandwire_testlab::lab;
use serde_json::json;

use crate::{
    assert_in_touch,
    ebpf::{POOLS, Pings, SECOND, World},
};

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn killing_restarting_and_upgrading_the_daemon_loses_no_packet() {
    lab::run(|lab| {
        let mut world = World::start(lab, "route", 1);
        let guests: Vec<_> = POOLS.iter().map(|pool| world.guest(pool, pool)).collect();
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
        }
        // Four thousand packets a second on two processors leave little for a daemon that starts.
        let seconds = 60;
        let pings = [
            Pings::start(guests[0].0.ipv4, seconds),
            Pings::start(guests[1].0.ipv6, seconds),
            Pings::start_beyond(&world.beyond, guests[0].0.ipv6, seconds),
            Pings::start_beyond(&world.beyond, guests[1].0.ipv4, seconds),
        ];
        thread::sleep(SECOND);
        world.daemon.kill().unwrap();
        thread::sleep(SECOND);
        world.daemon.restart().unwrap();
        thread::sleep(SECOND);
        // The new version's executable lies where the old one's lay, and the unit is restarted.
        assert!(world.daemon.terminate().unwrap().success());
        world.daemon.restart().unwrap();
        for ping in &pings {
            assert!(
                ping.go_on(),
                "the pings were over before the daemon was back"
            );
        }
        for ping in pings {
            ping.assert_none_lost();
        }
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
            assert_eq!(world.detail(lease)["defects"], json!([]));
        }
    });
}
