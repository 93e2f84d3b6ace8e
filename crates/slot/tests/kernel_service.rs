//! The whole service on a real kernel with the eBPF data path: leases, policies, traces, moves, and a
//! start after another.

#![allow(clippy::unwrap_used, reason = "a test that can't go on fails")]

mod fixture;

use std::{
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use fixture::{EBPF_KINDS, INSTANCE, IPV4, IPV6, ebpf_pool};
use sandwire_api::{
    drop_reason::DropReason,
    lease::{AcquireLease, Lease, ReleaseOutcome},
    name::Name,
    slot::DataPath,
    trace::Verdict,
};
use sandwire_slot::{
    clock::SystemClock,
    kernel::KernelNetwork,
    service::{Caller, Settings, Slots, Traced},
};
use sandwire_testlab::{
    fake_guest::FakeGuest,
    host::{BEYOND_IPV4, Beyond, ECHO_PORT},
    lab::{self, Lab},
};

const PATIENCE: Duration = Duration::from_secs(60);
const IN_VAIN: Duration = Duration::from_millis(300);
const ROOT: Caller = Caller {
    uid: 0,
    gid: 0,
    privileged: true,
};

fn name(text: &str) -> Name {
    text.parse().unwrap()
}

fn open(lab: &Lab) -> Arc<Slots> {
    let settings = Settings {
        instance: name(INSTANCE),
        state_dir: lab.folder().join("state"),
        builders: 2,
        audit_interval: Duration::from_secs(2),
    };
    let network = Arc::new(KernelNetwork::open(INSTANCE).unwrap());
    Slots::open(settings, network, Arc::new(SystemClock)).unwrap()
}

fn acquire(slots: &Slots, text: &str) -> Lease {
    let request: AcquireLease = serde_json::from_str(text).unwrap();
    let deadline = Instant::now() + PATIENCE;
    loop {
        match slots.acquire(ROOT, &request) {
            Ok(acquired) => return acquired.lease,
            Err(error) => assert!(Instant::now() < deadline, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn attach(lease: &Lease) -> FakeGuest {
    let netns = lease.netns.as_deref().unwrap_or("/proc/self/ns/net");
    let guest = FakeGuest::attach(netns.as_ref(), &lease.nics[0].tap).unwrap();
    guest
        .ping(guest.network().ipv4_gateway.into(), PATIENCE)
        .unwrap();
    guest
}

fn speaks(guest: &FakeGuest, patience: Duration) -> bool {
    let server = SocketAddr::new(BEYOND_IPV4.into(), ECHO_PORT);
    guest.exchange_udp(server, b"ping", patience).is_ok()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn leases_keep_their_packets_and_policies_from_daemon_to_daemon() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        for kind in EBPF_KINDS {
            let mut spec = ebpf_pool(kind, kind, "{}", IPV4, IPV6).spec;
            spec.size = 2;
            let slots = open(lab);
            slots.create_pool(&spec).unwrap();
            let open_one = acquire(&slots, &format!(r#"{{"pool":"{kind}","name":"open"}}"#));
            let closed = acquire(
                &slots,
                &format!(
                    r#"{{"pool":"{kind}","name":"closed","policy":{{"egress":{{"rules":[
                        {{"action":"deny","prefixes":["203.0.113.0/24"],"ports":["udp/7"]}}]}}}}}}"#
                ),
            );
            let (free, bound) = (attach(&open_one), attach(&closed));
            for _ in 0..2 {
                assert!(speaks(&free, PATIENCE), "{kind}");
                assert!(!speaks(&bound, IN_VAIN), "{kind}");
                bound.ping(BEYOND_IPV4.into(), PATIENCE).unwrap();
            }
            let traffic = slots.traffic(ROOT);
            let drops = &traffic[0].traffic.as_ref().unwrap().drops;
            assert!(
                traffic[0].name == closed.name && drops[&DropReason::Policy] >= 2,
                "{drops:?}"
            );

            // Somebody watches, and sees both what passes and what doesn't.
            let trace = slots.trace(ROOT, None, &name("closed")).unwrap();
            assert!(!speaks(&bound, IN_VAIN));
            let deadline = Instant::now() + PATIENCE;
            loop {
                assert!(Instant::now() < deadline, "the drop is not traced");
                if let Traced::Packet(packet) = trace.next(PATIENCE)
                    && packet.verdict == Verdict::Drop
                {
                    assert_eq!(packet.reason, Some(DropReason::Policy));
                    assert!(packet.frame.0.ends_with(b"ping"));
                    break;
                }
            }
            drop(trace);

            drop(slots);
            assert!(speaks(&free, PATIENCE), "nobody is needed for packets");
            let slots = open(lab);
            assert!(speaks(&free, PATIENCE), "{kind}");
            assert!(!speaks(&bound, IN_VAIN), "{kind}");
            slots.set_policy(ROOT, None, &name("closed"), None).unwrap();
            assert!(speaks(&bound, PATIENCE));
            // Old policies go after a while, and nothing is damaged.
            std::thread::sleep(Duration::from_secs(4));
            assert!(speaks(&free, PATIENCE) && speaks(&bound, PATIENCE));
            let health = slots.health();
            assert!(health.ready && health.problems.is_empty(), "{health:?}");
            for (lease, guest) in [("open", free), ("closed", bound)] {
                let held = slots.release(ROOT, None, &name(lease)).unwrap();
                assert_eq!(held.outcome, ReleaseOutcome::Held);
                assert!(speaks(&guest, PATIENCE), "its sandbox runs on");
                guest.detach().unwrap();
            }
            let deadline = Instant::now() + PATIENCE;
            while !slots.leases(ROOT).is_empty() {
                assert!(Instant::now() < deadline, "{:?}", slots.leases(ROOT));
                std::thread::sleep(Duration::from_millis(50));
            }
            slots.delete_pool(&name(kind)).unwrap();
            assert!(
                !lab.run("ip -o link").contains("sw"),
                "{}",
                lab.run("ip -o link")
            );
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn a_pool_moves_under_its_leases() {
    lab::run(|lab| {
        let _beyond = Beyond::attach().unwrap();
        let slots = open(lab);
        let mut spec = fixture::pool("web", "{}").spec;
        spec.size = 2;
        slots.create_pool(&spec).unwrap();
        let lease = acquire(&slots, r#"{"pool":"web","name":"a"}"#);
        let guest = attach(&lease);
        for data_path in [DataPath::Ebpf, DataPath::Nft, DataPath::Ebpf] {
            assert!(speaks(&guest, PATIENCE));
            slots.move_pool(&name("web"), data_path).unwrap();
            assert!(speaks(&guest, PATIENCE), "{data_path:?}");
            let detail = slots.lease_detail(ROOT, None, &name("a")).unwrap();
            assert_eq!(detail.defects, [], "{data_path:?}");
            assert_eq!(detail.data_path, data_path);
            assert_eq!(detail.traffic.is_some(), data_path == DataPath::Ebpf);
            let address: IpAddr = lease.nics[0].clone_addresses().next().unwrap();
            lab.run(&format!("ping -c 1 -W 2 {address}"));
            // Ready slots are of the new kind.
            let other = acquire(&slots, r#"{"pool":"web","name":"b"}"#);
            let second = attach(&other);
            assert!(speaks(&second, PATIENCE), "{data_path:?}");
            drop(second);
            slots.release(ROOT, None, &name("b")).unwrap();
            std::thread::sleep(Duration::from_millis(1500));
        }
        let health = slots.health();
        assert!(health.ready, "{health:?}");
    });
}
