//! What happens to packets while there is no daemon.

use std::thread;

use sandwire_testlab::lab;
use serde_json::json;

use crate::{
    assert_in_touch,
    ebpf::{HERE, POOLS, SECOND, World, assert_none_lost, ping},
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
        let pingers = [
            ping(HERE.as_ref(), guests[0].0.ipv4),
            ping(HERE.as_ref(), guests[1].0.ipv6),
            ping(&world.beyond.path(), guests[0].0.ipv6),
            ping(&world.beyond.path(), guests[1].0.ipv4),
        ];
        thread::sleep(SECOND);
        world.daemon.kill().unwrap();
        thread::sleep(SECOND);
        world.daemon.restart().unwrap();
        thread::sleep(SECOND);
        // The new version's executable lies where the old one's lay, and the unit is restarted.
        assert!(world.daemon.terminate().unwrap().success());
        world.daemon.restart().unwrap();
        thread::sleep(SECOND);
        for pinger in pingers {
            assert_none_lost(pinger, "while the daemon went and came");
        }
        for (lease, guest) in &guests {
            assert_in_touch(lease, guest);
            assert_eq!(world.detail(lease)["defects"], json!([]));
        }
    });
}
