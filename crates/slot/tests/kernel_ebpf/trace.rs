//! Traces that nobody reads any more.

use std::{
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use sandwire_api::trace::Verdict;
use sandwire_slot::{
    kernel::KernelNetwork,
    network::{Network, TracedPacket},
    plan::{Plan, SlotPlan},
};
use sandwire_testlab::{fake_guest::frame, lab};

use crate::fixture::{
    EBPF_KINDS, prepare,
    sandbox::{GATEWAY_MAC, Sandbox, tenancy},
    talk::PATIENCE,
    tear_down, web,
};

/// How long nothing must come that is on its way already.
const QUIET: Duration = Duration::from_millis(300);
/// For thousands of packets.
const A_WHILE: Duration = Duration::from_millis(100);

/// A sandbox that is traced, and has sent.
fn traced_sandbox(network: &KernelNetwork, plan: &Plan) -> (Sandbox, IpAddr) {
    let sandbox = Sandbox::start(network, plan, 0);
    let gateway = sandbox.slot.nics[0].ipv4.unwrap().gateway.into();
    network.set_trace(&sandbox.slot, true).unwrap();
    sandbox.guest.ping(gateway, PATIENCE).unwrap();
    (sandbox, gateway)
}

fn clean_up(network: &KernelNetwork, plan: &Plan, sandbox: Sandbox) {
    let Sandbox { slot, guest } = sandbox;
    guest.detach().unwrap();
    tear_down(network, &[slot]);
    network.remove_pool(plan).unwrap();
}

/// The first packet that a new reader is told of within the time, as a watcher is who begins now.
fn first_traced(
    network: &KernelNetwork,
    slot: &SlotPlan,
    within: Duration,
) -> Option<TracedPacket> {
    let mut events = network.trace_events().unwrap();
    let deadline = Instant::now() + within;
    while Instant::now() < deadline {
        let traced = events.next_event(Duration::from_millis(50)).unwrap();
        let is_its =
            |traced: &TracedPacket| (traced.pool, traced.slot) == (slot.pool_number, slot.number.0);
        if let Some(traced) = traced.filter(is_its) {
            return Some(traced);
        }
    }
    None
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_trace_doesn_t_begin_with_what_an_earlier_one_left() {
    lab::run(|_| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let (sandbox, _) = traced_sandbox(&network, &plan);
            let slot = &sandbox.slot;
            // Its reader has gone before it saw that.
            network.set_trace(slot, false).unwrap();
            assert_eq!(first_traced(&network, slot, QUIET), None, "{kind}");
            clean_up(&network, &plan, sandbox);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_trace_ends_with_the_daemon() {
    lab::run(|_| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let before = prepare(&plan);
            let (sandbox, gateway) = traced_sandbox(&before, &plan);
            let slot = &sandbox.slot;
            drop(before);

            let after = prepare(&plan);
            after.adopt(slot, Some(&tenancy(&after, &plan))).unwrap();
            let mut events = after.trace_events().unwrap();
            sandbox.guest.ping(gateway, PATIENCE).unwrap();
            let traced = events.next_event(QUIET).unwrap();
            assert_eq!(traced, None, "nobody watches {kind}");
            assert_eq!(after.inspect(slot).defects, []);
            clean_up(&after, &plan, sandbox);
        }
    });
}

/// Nobody reads meanwhile, as when the reader can't keep up with the flood.
#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_flooded_trace_leaves_others_whole() {
    lab::run(|_| {
        for kind in EBPF_KINDS {
            let plan = web(kind, "{}");
            let network = prepare(&plan);
            let mut events = network.trace_events().unwrap();
            let flooded = Sandbox::start(&network, &plan, 0);
            let quiet = Sandbox::start(&network, &plan, 1);
            for sandbox in [&flooded, &quiet] {
                network.set_trace(&sandbox.slot, true).unwrap();
            }
            let own = flooded.guest.network();
            let source = SocketAddr::new(own.ipv4.0.into(), 4000);
            let target = SocketAddr::new(own.ipv4_gateway.into(), 4000);
            let udp = frame::udp(own.mac, GATEWAY_MAC, source, target, b"one of many");
            let deadline = Instant::now() + PATIENCE;
            while network.trace_lost(&flooded.slot) == 0 {
                assert!(Instant::now() < deadline, "{kind}: all found room");
                flooded.guest.flood(vec![udp.clone()], A_WHILE).unwrap();
            }
            let gateway = quiet.guest.network().ipv4_gateway.into();
            for _ in 0..5 {
                quiet.guest.ping(gateway, PATIENCE).unwrap();
            }
            assert_eq!(network.trace_lost(&quiet.slot), 0, "{kind}");
            let mut seen = 0;
            while let Some(traced) = events.next_event(Duration::ZERO).unwrap() {
                let is_ping = traced.packet.verdict == Verdict::Answered
                    && traced.slot == quiet.slot.number.0;
                seen += u32::from(is_ping);
            }
            assert!(seen >= 5, "{kind}: {seen} pings of the other one");
            for Sandbox { slot, guest } in [quiet, flooded] {
                guest.detach().unwrap();
                tear_down(&network, &[slot]);
            }
            network.remove_pool(&plan).unwrap();
        }
    });
}
