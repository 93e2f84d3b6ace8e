//! Pools that change their data path under leases.

use super::*;
use crate::pool::{Claim, SlotState};

impl Host {
    /// Data paths of the slots in the kernel, by number, with whether eBPF lets their packets pass.
    fn data_paths(&self) -> Vec<(u32, DataPath, bool)> {
        let kernel = self.kernel.lock();
        let slots = kernel.slots.values();
        let mut found: Vec<_> = slots
            .map(|slot| (slot.number, slot.data_path, slot.tenancy.is_some()))
            .collect();
        found.sort_unstable_by_key(|(number, ..)| *number);
        found
    }
}

fn is_settled(state: &State) -> bool {
    state.pools[&name("web")].moving.is_none()
}

#[test]
fn leased_slots_move_and_ready_ones_are_built_anew() {
    let (host, slots) = Host::with_pool(2);
    let lease = slots
        .acquire(ROOT, &request_of("web:a"))
        .unwrap()
        .lease
        .slot;
    slots.await_ready("web", 2);
    for (data_path, passes) in [(DataPath::Ebpf, true), (DataPath::Nft, false)] {
        for _ in 0..2 {
            let pool = slots.move_pool(&name("web"), data_path).unwrap();
            assert_eq!(pool.spec.data_path, data_path);
        }
        slots.await_quiet();
        host.advance_until(&slots, "the move is done", is_settled);
        slots.await_ready("web", 2);
        for (number, found, is_active) in host.data_paths() {
            assert_eq!((found, is_active), (data_path, passes && number == lease));
        }
        slots.acquire(ROOT, &request_of("web:b")).unwrap();
        slots.give_back("b").unwrap();
        slots.await_quiet();
    }
    host.advance_until(&slots, "no policy is left", |_| {
        host.kernel.lock().policies.is_empty()
    });
    host.kernel.assert_unviolated();
}

#[test]
fn a_move_that_was_cut_off_goes_on_after_the_start() {
    for steps in 1..12 {
        let (host, slots) = Host::with_pool(1);
        let held = [1, 2].map(|number| {
            let lease = slots.acquire(ROOT, &request_of(&format!("web:l{number}")));
            slots.await_ready("web", 1);
            lease.unwrap().lease.slot
        });
        drop(slots);
        let power = Power::unlimited();
        let slots = host.start_with(&power).unwrap();
        slots.await_quiet();
        power.set(steps);
        let moved = slots.move_pool(&name("web"), DataPath::Ebpf).is_ok();
        power.cut();
        drop(slots);

        let slots = host.start();
        slots.await_quiet();
        host.advance_until(&slots, "the move is done", is_settled);
        slots.await_quiet();
        let data_path = slots.pool_spec(&name("web")).unwrap().data_path;
        assert!(!moved || data_path == DataPath::Ebpf, "the answer said so");
        for (number, found, is_active) in host.data_paths() {
            assert_eq!(found, data_path, "slot {number} after {steps} steps");
            assert_eq!(is_active, found == DataPath::Ebpf && held.contains(&number));
        }
        host.kernel.assert_unviolated();
    }
}

#[test]
fn a_move_that_cannot_be_is_refused() {
    let (host, slots) = Host::with_pool(1);
    let refused = slots.move_pool(&name("web"), DataPath::Xdp);
    assert_eq!(code(refused), ErrorCode::Unsupported);
    host.kernel.fail("change pool", true);
    let refused = slots.move_pool(&name("web"), DataPath::Ebpf);
    assert_eq!(code(refused), ErrorCode::Internal);
    host.kernel.fail("change pool", false);
    assert_eq!(
        slots.pool_spec(&name("web")).unwrap().data_path,
        DataPath::Nft
    );
    slots.move_pool(&name("web"), DataPath::Ebpf).unwrap();
    let mut request = request_of("web:a");
    request.policy = serde_json::from_str(r#"{"uplink":"deny"}"#).unwrap();
    slots.await_quiet();
    host.advance_until(&slots, "the move is done", is_settled);
    slots.await_ready("web", 1);
    slots.acquire(ROOT, &request).unwrap();
    let refused = slots.move_pool(&name("web"), DataPath::Nft);
    assert_eq!(code(refused), ErrorCode::Conflict);
}

#[test]
fn a_policy_of_a_lease_keeps_its_pool_from_nft_whatever_other_leases_there_are() {
    let host = Host::new();
    let slots = host.start();
    let mut web = spec("web", 21);
    web.data_path = DataPath::Ebpf;
    let addresses = r#"{"plan":"prefix","ipv4":"10.64.0.0/26","ipv6":"fd00:c10e::/64"}"#;
    web.addresses = serde_json::from_str(addresses).unwrap();
    slots.create_pool(&web).unwrap();
    slots.await_ready("web", 21);
    for number in 0..20 {
        let request = format!(r#"web:run-{number} "process": true"#);
        slots.take(&request).unwrap();
    }
    let own = r#"web:own "policy": {"uplink": "deny"}"#;
    slots.take(own).unwrap();
    let refused = slots.move_pool(&web.name, DataPath::Nft);
    assert_eq!(code(refused), ErrorCode::Conflict);
    slots.set_policy(ROOT, None, &name("own"), None).unwrap();
    slots.move_pool(&web.name, DataPath::Nft).unwrap();
    host.kernel.assert_unviolated();
}

#[test]
fn the_configuration_moves_a_pool_and_changes_its_policy() {
    let (host, slots) = Host::with_pool(1);
    slots.acquire(ROOT, &request_of("web:a")).unwrap();
    let mut wanted = slots.pool_spec(&name("web")).unwrap();
    wanted.data_path = DataPath::Ebpf;
    wanted.policy.group = Some(name("team"));
    assert_eq!(slots.ensure_pool(&wanted).unwrap().spec, wanted);
    host.advance_until(&slots, "the move is done", is_settled);
    wanted.data_path = DataPath::Nft;
    wanted.policy.group = None;
    assert_eq!(slots.ensure_pool(&wanted).unwrap().spec, wanted);
    assert_eq!(slots.leases(ROOT).len(), 1);
    host.kernel.assert_unviolated();
}

#[test]
fn a_certain_address_is_handed_out_while_its_pool_moves() {
    let (host, slots) = Host::with_pool(0);
    let number = SlotNumber(0);
    for (data_path, passes) in [(DataPath::Ebpf, true), (DataPath::Nft, false)] {
        let gate = host.kernel.builds_gate.lock().unwrap();
        let acquired = std::thread::scope(|scope| {
            let acquired = scope.spawn(|| slots.take(r#"web:a "clone_address": "10.64.0.2""#));
            slots.wait_until("its slot is being built", |state| {
                let state = state.pools[&name("web")].pool.state(number);
                state == Some(&SlotState::Building { reserved: true })
            });
            slots.move_pool(&name("web"), data_path).unwrap();
            drop(gate);
            acquired.join().unwrap()
        });
        assert_eq!(acquired.unwrap().lease.slot, number.0);
        assert_eq!(host.data_paths(), [(number.0, data_path, passes)]);
        slots.give_back("a").unwrap();
        host.advance_until(&slots, "the move is done", is_settled);
    }
    host.kernel.assert_unviolated();
}

#[test]
fn a_slot_that_waits_for_who_asked_for_it_does_not_stay_on_the_old_data_path() {
    let (host, slots) = Host::with_pool(0);
    let web = name("web");
    let mut state = slots.shared.lock();
    let pool = &mut state.pool_mut(&web).unwrap().pool;
    assert_eq!(pool.claim(SlotNumber(0), None), Claim::Building);
    drop(state);
    slots.shared.build_work.notify_one();
    slots.wait_until("it is built", |state| {
        state.pools[&web].pool.state(SlotNumber(0)) == Some(&SlotState::Reserved)
    });
    slots.move_pool(&web, DataPath::Ebpf).unwrap();
    slots.await_quiet();
    assert_eq!(host.data_paths(), []);
}

/// While a slot is moved the host's rules alone judge its packets, not those of its own policy.
#[test]
fn each_slot_of_before_is_moved_once_and_no_other() {
    let (host, slots) = Host::with_pool(2);
    let mut other = spec("db", 1);
    other.data_path = DataPath::Ebpf;
    let addresses = r#"{"plan":"prefix","ipv4":"10.65.0.0/28","ipv6":"fd00:db::/64"}"#;
    other.addresses = serde_json::from_str(addresses).unwrap();
    slots.create_pool(&other).unwrap();
    let [first, second] = ["web:a", "web:b"].map(|request| slots.take(request).unwrap());
    slots.await_ready("web", 2);
    slots.take("web:c").unwrap();
    // The first is moved, and somebody works on the second.
    let key = ROOT.lease_key(None, &name("b"));
    slots.shared.lock().set_busy(&key, true);
    let (web, shared) = (name("web"), &slots.shared);
    assert!(shared.begin_move(&web, DataPath::Ebpf).unwrap());
    shared.build_work.notify_all();
    shared.tear_down_work.notify_all();
    // Handed out anew, by the new data path and from another pool.
    slots.give_back("c").unwrap();
    slots.await_ready("db", 1);
    slots.take("db:c").unwrap();
    slots.await_ready("web", 2);
    slots.take("web:d").unwrap();
    for _ in 0..2 {
        shared.move_slots(&web, Duration::ZERO);
    }
    let netns = |lease: &Acquired| lease.lease.netns_name.clone().unwrap();
    assert_eq!(host.kernel.lock().moved, [netns(&first)]);
    shared.lock().set_busy(&key, false);
    host.advance_until(&slots, "the move is done", is_settled);
    assert_eq!(host.kernel.lock().moved, [netns(&first), netns(&second)]);
    host.kernel.assert_unviolated();
}

#[test]
fn a_move_ends_however_busy_its_pool_is() {
    let (host, slots) = Host::with_pool(1);
    let web = name("web");
    // One that waits is torn down, and the one that is built instead takes its time.
    let gate = host.kernel.builds_gate.lock().unwrap();
    slots.move_pool(&web, DataPath::Ebpf).unwrap();
    slots.wait_until("another is being built", |state| {
        state.pools[&web].pool.counts().building == 1
    });
    host.advance_until(&slots, "the move is done", is_settled);
    drop(gate);
    slots.await_ready("web", 1);
    // What has the new data path can't be torn down.
    slots.take("web:a").unwrap();
    let key = ROOT.lease_key(None, &name("a"));
    slots.shared.lock().set_busy(&key, true);
    assert!(slots.shared.begin_move(&web, DataPath::Nft).unwrap());
    slots.shared.wake_all();
    slots.wait_until("what waited is built anew", |state| {
        let counts = state.pools[&web].pool.counts();
        counts.ready == 1 && counts.tearing_down == 0
    });
    slots.take("web:b").unwrap();
    host.kernel.fail("tear down", true);
    slots.give_back("b").unwrap();
    slots.shared.lock().set_busy(&key, false);
    host.advance_until(&slots, "the move is done", is_settled);
    host.kernel.assert_unviolated();
}

#[test]
fn a_move_does_not_end_before_what_was_built_for_the_data_path_before_is_gone() {
    let (host, slots) = Host::with_pool(1);
    let web = name("web");
    slots.take("web:a").unwrap();
    slots.await_ready("web", 1);
    // The lease ends before its slot is moved, and one is being built.
    let gate = host.kernel.builds_gate.lock().unwrap();
    let key = ROOT.lease_key(None, &name("a"));
    slots.shared.lock().set_busy(&key, true);
    slots.resize_pool(&web, 2).unwrap();
    slots.wait_until("one is being built", |state| {
        state.pools[&web].pool.counts().building == 1
    });
    host.kernel.fail("tear down", true);
    assert!(slots.shared.begin_move(&web, DataPath::Ebpf).unwrap());
    slots.shared.lock().set_busy(&key, false);
    slots.give_back("a").unwrap();
    slots.shared.move_slots(&web, Duration::ZERO);
    assert!(!is_settled(&slots.shared.lock()));
    host.kernel.fail("tear down", false);
    host.advance_until(&slots, "what was there is gone", |state| {
        state.pools[&web].pool.counts().tearing_down == 0
    });
    slots.shared.move_slots(&web, Duration::ZERO);
    assert!(!is_settled(&slots.shared.lock()));
    drop(gate);
    host.advance_until(&slots, "the move is done", is_settled);
    host.kernel.assert_unviolated();
}
