//! Crashes at any step of kernel and journal, against a model of what was acknowledged.

use std::collections::BTreeMap;

use sandwire_api::slot::DataPath;

use super::*;

/// What the caller knows of a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Known {
    /// The answer said so.
    Held { slot: u32 },
    /// The answer said that a VMM keeps it.
    Releasing { slot: u32 },
    /// The crash came before the answer.
    Unknown,
}

/// Numbers from a seed (SplitMix64): the same in every run and version.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (mixed ^ (mixed >> 31)) % bound
    }
}

struct Run {
    host: Host,
    dice: Dice,
    known: BTreeMap<String, Known>,
    /// The next service's host ports never clash with those of an answer that was lost.
    next_port: u16,
}

impl Run {
    fn new(seed: u64) -> Self {
        let host = Host::new();
        let slots = host.start();
        let mut spec = spec("web", 3);
        spec.quarantine_seconds = 1;
        if seed % 2 == 1 {
            spec.data_path = DataPath::Ebpf;
        }
        slots.create_pool(&spec).unwrap();
        Self {
            host,
            dice: Dice(seed),
            known: BTreeMap::new(),
            next_port: 1,
        }
    }

    /// Works until the power fails, or is cut.
    fn work_until_crash(&mut self) {
        let power = Power::for_steps(1 + i64::try_from(self.dice.below(150)).unwrap());
        // Without enough power there is no start.
        let Ok(slots) = self.host.start_with(&power) else {
            return;
        };
        for _ in 0..60 {
            if power.is_off() {
                break;
            }
            self.step(&slots, &power);
        }
        power.cut();
    }

    fn step(&mut self, slots: &Slots, power: &Power) {
        let lease = format!("l{}", self.dice.below(8));
        match self.dice.below(12) {
            0..5 => self.acquire(slots, power, &lease),
            5..8 => self.release(slots, power, &lease),
            8 => {
                if let Some(netns) = self.netns_of(&lease) {
                    assert!(self.host.kernel.start_vmm(&netns), "{lease} has no TAP");
                }
            }
            9 => self.stop_vmm(&lease),
            10 => {
                let by = Duration::from_millis(100 + self.dice.below(1500));
                self.host.advance(slots, by);
            }
            _ => self.change_something_else(slots, &lease),
        }
    }

    fn acquire(&mut self, slots: &Slots, power: &Power, lease: &str) {
        // Some leases have a channel, always the same ones.
        let vsock = match lease {
            "l0" | "l3" | "l5" => r#" "vsock": {}"#,
            _ => "",
        };
        let mut request = request_of(&format!("web:{lease}{vsock}"));
        if self.dice.below(4) == 0 {
            let last_byte = u8::try_from(2 + self.dice.below(13)).unwrap();
            request.clone_address = Some(std::net::Ipv4Addr::new(10, 64, 0, last_byte).into());
        }
        let before = self.known.get(lease).cloned();
        match slots.acquire(ROOT, &request) {
            Ok(Acquired { lease: found, new }) => {
                if let Some(Known::Held { slot }) = before {
                    assert!(!new && found.slot == slot, "{lease} was held already");
                }
                let slot = found.slot;
                self.known.insert(lease.to_owned(), Known::Held { slot });
            }
            Err(error) => self.failed(power, lease, &error),
        }
    }

    fn release(&mut self, slots: &Slots, power: &Power, lease: &str) {
        match slots.give_back(lease) {
            Ok(released) if released.outcome == ReleaseOutcome::Held => {
                let slot = released.slot;
                self.known
                    .insert(lease.to_owned(), Known::Releasing { slot });
            }
            Ok(_) => {
                self.known.remove(lease);
            }
            Err(error) => self.failed(power, lease, &error),
        }
    }

    /// A refusal changes nothing. After a failure only the next start can tell.
    fn failed(&mut self, power: &Power, lease: &str, error: &ServiceError) {
        match error.code() {
            ErrorCode::NotFound => match self.known.get(lease) {
                Some(Known::Held { .. }) => panic!("{lease} is lost: {error}"),
                // Its VMM ended, and then the lease.
                _ => drop(self.known.remove(lease)),
            },
            code if code.is_refusal() => {}
            _ if power.is_off() => drop(self.known.insert(lease.to_owned(), Known::Unknown)),
            ErrorCode::PoolEmpty => {}
            _ => panic!("{lease}: {error}"),
        }
    }

    fn change_something_else(&mut self, slots: &Slots, lease: &str) {
        if self.dice.below(2) == 0 {
            let size = u32::try_from(self.dice.below(5)).unwrap();
            // Whether it came to pass makes no difference to any lease.
            let _ = slots.resize_pool(&name("web"), size);
        } else {
            let port = PublishPort {
                protocol: Protocol::Tcp,
                host_address: None,
                host_port: self.next_port,
                clone_port: 80,
                nic: 0,
            };
            self.next_port += 1;
            let _ = slots.publish(ROOT, None, &name(lease), &port, false);
        }
    }

    fn netns_of(&self, lease: &str) -> Option<String> {
        match self.known.get(lease)? {
            Known::Held { slot } => Some(format!("sandwire.test.web.{slot}")),
            _ => None,
        }
    }

    fn stop_vmm(&mut self, lease: &str) {
        let slot = match self.known.get(lease) {
            Some(Known::Held { slot } | Known::Releasing { slot }) => slot,
            _ => return,
        };
        self.host
            .kernel
            .stop_vmm(&format!("sandwire.test.web.{slot}"));
    }

    /// Starts with power that lasts, and compares.
    fn check_after_restart(&mut self) {
        let slots = self.host.start();
        let kernel = Arc::clone(&self.host.kernel);
        slots.wait_until("releases are finished", |state| {
            let leases = state.leases.values();
            leases.filter(|lease| lease.is_releasing()).all(|lease| {
                let netns = format!("sandwire.test.web.{}", lease.record.slot);
                let kernel = kernel.lock();
                kernel.slots.get(&netns).is_some_and(|slot| slot.has_vmm)
            })
        });
        slots.await_quiet();
        let leases = slots.leases(ROOT);
        self.check_leases(&leases);
        self.check_kernel(&slots, &leases);
        self.check_channels(&slots, &leases);
        self.known = leases
            .into_iter()
            .map(|lease| {
                let slot = lease.slot;
                let known = match lease.state {
                    LeaseState::Active => Known::Held { slot },
                    LeaseState::Releasing => Known::Releasing { slot },
                };
                (lease.name.to_string(), known)
            })
            .collect();
    }

    fn check_leases(&self, leases: &[sandwire_api::lease::Lease]) {
        let distinct: BTreeSet<u32> = leases.iter().map(|lease| lease.slot).collect();
        assert_eq!(
            distinct.len(),
            leases.len(),
            "a slot is leased twice: {leases:#?}"
        );
        for (lease, known) in &self.known {
            let found = leases.iter().find(|found| found.name.as_str() == lease);
            let found = found.map(|found| (found.slot, found.state));
            let is_right = match known {
                Known::Held { slot } => found == Some((*slot, LeaseState::Active)),
                Known::Releasing { slot } => {
                    found.is_none_or(|found| found == (*slot, LeaseState::Releasing))
                }
                Known::Unknown => true,
            };
            assert!(is_right, "{lease} should be {known:?}, but is {found:?}");
        }
        for lease in leases {
            let is_known = self.known.contains_key(lease.name.as_str());
            assert!(is_known, "{} was released, or never was", lease.name);
        }
    }

    /// The service has the channels of the leases, and no others.
    fn check_channels(&self, slots: &Slots, leases: &[sandwire_api::lease::Lease]) {
        let leases = leases.iter().filter(|lease| lease.vsock.is_some());
        let mut expected: Vec<String> = leases
            .map(|lease| format!("/run/sandwire/vsock/web.{}", lease.slot))
            .collect();
        expected.sort();
        self.host.advance_until(slots, "the channels fit", |_| {
            let service = self.host.service.lock();
            let mut folders: Vec<_> = service
                .channels
                .values()
                .map(|channel| channel.folder.to_string_lossy().into_owned())
                .collect();
            folders.sort();
            folders == expected && service.folders.len() == expected.len()
        });
    }

    fn check_kernel(&self, slots: &Slots, leases: &[sandwire_api::lease::Lease]) {
        self.host.kernel.assert_unviolated();
        let mut expected: Vec<u32> = leases.iter().map(|lease| lease.slot).collect();
        let mut state = slots.shared.lock();
        let numbers = state.pools[&name("web")].pool.states();
        let ready = numbers.filter(|(_, state)| **state == crate::pool::SlotState::Ready);
        expected.extend(ready.map(|(number, _)| number.0));
        let ports = state.ports_for_kernel();
        drop(state);
        expected.sort_unstable();
        assert_eq!(
            self.host.kernel.numbers("web"),
            expected,
            "the kernel has what is known"
        );
        let kernel = self.host.kernel.lock();
        assert_eq!(kernel.slots.len(), expected.len(), "no pieces are left");
        assert_eq!(kernel.ports, ports);
        for slot in kernel.slots.values() {
            let is_leased = leases.iter().any(|lease| lease.slot == slot.number);
            let passes = slot.tenancy.is_some();
            let wanted = is_leased && slot.data_path == DataPath::Ebpf;
            assert_eq!(passes, wanted, "packets of slot {} pass", slot.number);
        }
        for lease in leases
            .iter()
            .filter(|lease| lease.state == LeaseState::Active)
        {
            assert!(
                kernel.slots[lease.netns_name.as_deref().unwrap()].has_tap,
                "{} has no TAP",
                lease.name
            );
        }
    }
}

#[test]
fn whenever_it_crashes_no_lease_is_lost_or_doubled_and_nothing_is_left_over() {
    for seed in 0..40 {
        println!("seed {seed}");
        let mut run = Run::new(seed);
        for crash in 0..6 {
            println!("  crash {crash}: {:?}", run.known);
            run.work_until_crash();
            run.check_after_restart();
        }
    }
}
