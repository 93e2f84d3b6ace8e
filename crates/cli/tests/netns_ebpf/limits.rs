//! Limits under a flood: what comes through is what the limit says, and the rest is told as its drops.

use std::{
    net::SocketAddr,
    thread,
    time::{Duration, Instant},
};

use sandwire_testlab::{
    fake_guest::{FakeGuest, frame},
    host::{BEYOND_IPV4, BEYOND_IPV6},
    lab,
    sandwire::Lease,
    traffic::{self, Tally},
};
use serde_json::{Value, json};

use crate::{
    GATEWAY_MAC, assert_in_touch,
    ebpf::{POOLS, SECOND, World},
};

/// Where a flood is sent to. No guest listens there.
const PORT: u16 = 5000;
const PAYLOAD: usize = 1000;
/// How long a guest sends at full speed, and how long it doesn't.
const BURST: Duration = Duration::from_millis(1);
const PAUSE: Duration = Duration::from_millis(80);
/// Ethernet, IPv4 or IPv6, and UDP.
const HEADERS: [usize; 2] = [14 + 20 + 8, 14 + 40 + 8];

/// What a lease is limited by, in one direction.
struct Limit {
    /// As drops by it are called.
    reason: &'static str,
    settings: fn() -> Value,
    /// Frames a second and at once, given a frame's length.
    frames: fn(f64) -> (f64, f64),
}

const LIMITS: [Limit; 2] = [
    Limit {
        reason: "bit_limit",
        settings: || json!({"bits_per_second": 4_000_000, "burst_bytes": 125_000}),
        frames: |length| (500_000.0 / length, 125_000.0 / length),
    },
    Limit {
        reason: "packet_limit",
        settings: || json!({"packets_per_second": 500, "burst_packets": 250}),
        frames: |_| (500.0, 250.0),
    },
];

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn of_a_flood_as_much_comes_through_as_the_limit_says() {
    lab::run(|lab| {
        let world = World::start(lab, "route", 1);
        let tally = world.beyond.inside(|| Tally::start(PORT)).unwrap();
        for pool in POOLS {
            let (lease, guest) = world.guest(pool, pool);
            assert_in_touch(&lease, &guest);
            let place = Place {
                world: &world,
                tally: &tally,
                lease: &lease,
                guest: &guest,
            };
            for limit in &LIMITS {
                for (family, headers) in HEADERS.into_iter().enumerate() {
                    place.assert_holds(limit, "egress", headers, || place.flood_out(family));
                    place.assert_holds(limit, "ingress", headers, || place.flood_in(family));
                }
            }
            // Lifted, all of it comes through that the way itself can carry.
            world
                .daemon
                .set_policy(&lease.name, &json!({"uplink": "route"}))
                .unwrap();
            assert_in_touch(&lease, &guest);
        }
    });
}

/// A guest under a flood.
struct Place<'a> {
    world: &'a World,
    tally: &'a Tally,
    lease: &'a Lease,
    guest: &'a FakeGuest,
}

/// How many frames were sent in which time, and came.
#[derive(Clone, Copy, Debug)]
struct Flood {
    sent: u64,
    took: Duration,
    came: u64,
}

impl Place<'_> {
    fn assert_holds(
        &self,
        limit: &Limit,
        direction: &str,
        headers: usize,
        flood: impl FnOnce() -> Flood,
    ) {
        let limits = json!({direction: (limit.settings)()});
        let policy = json!({"uplink": "route", "limits": limits});
        self.world
            .daemon
            .set_policy(&self.lease.name, &policy)
            .unwrap();
        let before = self.drops();
        let flood = flood();
        let after = self.drops();
        let length = u32::try_from(headers + PAYLOAD).unwrap();
        let (rate, burst) = (limit.frames)(length.into());
        let what = format!(
            "{} of {direction} of {}, {length} bytes: {flood:?}",
            limit.reason, self.lease.name
        );
        let expected = rate * flood.took.as_secs_f64() + burst;
        let came = f64::from(u32::try_from(flood.came).unwrap());
        assert!(
            0.5 * expected <= came && came <= 1.5 * expected,
            "{what}, not about {expected}"
        );
        for reason in LIMITS.map(|limit| limit.reason) {
            let dropped = count(&after, reason) - count(&before, reason);
            match reason == limit.reason {
                true => assert!(
                    dropped >= flood.sent / 4 && dropped + flood.came <= flood.sent,
                    "{what}: {dropped} dropped"
                ),
                false => assert_eq!(dropped, 0, "{what}: {reason}"),
            }
        }
    }

    /// From the guest to a socket beyond the uplink.
    fn flood_out(&self, family: usize) -> Flood {
        let own = self.guest.network();
        let (source, target) = [
            (own.ipv4.0.into(), BEYOND_IPV4.into()),
            (own.ipv6.0.into(), BEYOND_IPV6.into()),
        ][family];
        let frame = frame::udp(
            own.mac,
            GATEWAY_MAC,
            SocketAddr::new(source, PORT),
            SocketAddr::new(target, PORT),
            &[0; PAYLOAD],
        );
        let before = self.tally.settled();
        let started = Instant::now();
        let mut sent = 0;
        while started.elapsed() < SECOND {
            // In bursts, as `traffic::flood` has them.
            sent += self.guest.flood(vec![frame.clone()], BURST).unwrap();
            thread::sleep(PAUSE);
        }
        Flood {
            sent,
            took: started.elapsed(),
            came: self.tally.settled() - before,
        }
    }

    /// From a socket beyond the uplink to the guest.
    fn flood_in(&self, family: usize) -> Flood {
        let target = [self.lease.ipv4, self.lease.ipv6][family];
        let target = SocketAddr::new(target, PORT);
        drop(self.guest.received_frames().unwrap());
        let send = || traffic::flood(target, PAYLOAD, SECOND);
        let started = Instant::now();
        let sent = self.world.beyond.inside(send).unwrap();
        let took = started.elapsed();
        thread::sleep(Duration::from_millis(200));
        let frames = self.guest.received_frames().unwrap();
        let length = HEADERS[family] + PAYLOAD;
        let came = frames.iter().filter(|frame| frame.len() == length).count();
        Flood {
            sent,
            took,
            came: came.try_into().unwrap(),
        }
    }

    /// Drops as `show` tells them.
    fn drops(&self) -> Value {
        let shown = self.world.daemon.json(&format!("show {}", self.lease.name));
        shown.unwrap()["traffic"]["drops"].take()
    }
}

fn count(drops: &Value, reason: &str) -> u64 {
    drops[reason].as_u64().unwrap_or(0)
}
