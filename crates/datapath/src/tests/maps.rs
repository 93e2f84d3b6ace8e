//! Entries, policies, and what stays when a process ends.

use std::{
    collections::BTreeSet,
    net::Ipv4Addr,
    thread,
    time::{Duration, Instant},
};

use sandwire_api::{
    policy::{CLOUD_METADATA, EgressPolicy, EgressRule, PolicyAction},
    pool::{HostService, PolicySpec},
};
use sandwire_kernel_net::interface::InterfaceIndex;
use sandwire_testlab::lab;

use super::{NOWHERE, clone_of, nic, open, settings};
use crate::{
    Datapath, Error, GROUP_PAIRS_MAX, NicIndex, PolicyIndex, Settings,
    abi::{Address, NicFlag, NicState, Policy, PrefixKey},
    policy,
};

const PREFIXES_FULL: &str = "the map prefixes is full (1000 entries): take prefixes out of policies, or have leases and pools share policies, which \
     are kept once";

/// A policy with so many prefixes, each with a rule for one of a few ports.
fn policy_of(prefixes: u32) -> policy::Compiled {
    let rule = |port: u16| EgressRule {
        action: PolicyAction::Deny,
        prefixes: (0..prefixes)
            .filter(|number| number % 8 == u32::from(port))
            .map(|number| Ipv4Addr::from(0x6440_0000 + number * 2))
            .map(|address| ipnet::IpNet::new(address.into(), 31).unwrap())
            .collect(),
        ports: vec![HostService::Tcp(port + 1, port + 1)],
    };
    let spec = PolicySpec {
        egress: EgressPolicy {
            default: PolicyAction::Allow,
            rules: (0..8).map(rule).collect(),
        },
        ..PolicySpec::default()
    };
    policy::compile(&spec, &[]).unwrap()
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_entries_are_taken_and_given_back() {
    lab::run(|_| {
        let datapath = open(&settings());
        let first = datapath.allocate(1).unwrap();
        assert_eq!(first, NicIndex(1), "entry 0 is never given");
        let pair = datapath.allocate(2).unwrap();
        assert_eq!(pair, NicIndex(2));
        let mut taken = 3;
        while datapath.allocate(8).is_ok() {
            taken += 8;
        }
        assert_eq!(taken, 251);
        let full = datapath.allocate(8).unwrap_err().to_string();
        let expected =
            "the map nics is full (256 entries): raise nics_max in the daemon's configuration";
        assert!(full.starts_with(expected), "{full}");
        datapath.free(pair, 2);
        assert_eq!(datapath.allocate(2).unwrap(), NicIndex(252));
        assert_eq!(datapath.allocate(2).unwrap(), NicIndex(254));
        assert_eq!(
            datapath.allocate(2).unwrap(),
            pair,
            "from the beginning again"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_lease_survives_the_process_that_made_it() {
    lab::run(|_| {
        let settings = settings();
        let datapath = open(&settings);
        let index = datapath.allocate(1).unwrap();
        datapath.write_nic(index, &nic(NOWHERE, NOWHERE, clone_of(1)));
        let policy = datapath.add_policy(&policy_of(100)).unwrap();
        datapath.activate(index, policy, true).unwrap();
        datapath.set_flag(index, NicFlag::Trace, true);
        datapath.set_flag(index, NicFlag::Published, true);
        let before = datapath.nic(index);
        assert_eq!(before.state, NicState::Active.number());
        assert_eq!(
            before.flags,
            NicFlag::Process.number() | NicFlag::Trace.number() | NicFlag::Published.number()
        );
        drop(datapath);

        let datapath = open(&settings);
        assert_eq!(datapath.used(), [(index, before)]);
        assert_eq!(datapath.policies(), [policy]);
        assert_ne!(datapath.allocate(1).unwrap(), index);
        assert_eq!(datapath.clones.entries().unwrap().len(), 1);
        datapath.deactivate(index).unwrap();
        let after = datapath.nic(index);
        assert_eq!(
            (after.state, after.flags, after.policy),
            (NicState::Ready.number(), 0, 0)
        );
        assert_ne!(after.generation, before.generation);
        assert!(datapath.clones.entries().unwrap().is_empty());
        // Nobody of this process wrote the policy.
        datapath.remove_policy(policy);
        assert!(datapath.policies().is_empty());
        assert!(datapath.policies.is_empty().unwrap());
        datapath.free(index, 1);
        assert!(datapath.used().is_empty());
    });
}

/// Leases and gives back a NIC. Whatever comes back of what was said before is seen.
fn lease_again_and_again(datapath: &Datapath, index: NicIndex) {
    let assert_is = |state: NicState, policy: u32| {
        // For some time: another thread may write what it has read before.
        for _ in 0..20 {
            let found = datapath.nic(index);
            assert_eq!((found.state, found.policy), (state.number(), policy));
        }
    };
    for lease in 1..=1000 {
        let (first, second) = (2 * lease, 2 * lease + 1);
        datapath.activate(index, PolicyIndex(first), false).unwrap();
        assert_is(NicState::Active, first);
        datapath.set_policy(index, PolicyIndex(second));
        assert_is(NicState::Active, second);
        datapath.deactivate(index).unwrap();
        assert_is(NicState::Ready, 0);
    }
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_another_shared_interface_undoes_nothing_of_what_happens_meanwhile() {
    lab::run(|_| {
        let datapath = open(&settings());
        let indexes: Vec<NicIndex> = (1..=200)
            .map(|number| {
                let index = datapath.allocate(1).unwrap();
                datapath.write_nic(index, &nic(NOWHERE, NOWHERE, clone_of(number)));
                index
            })
            .collect();
        let leased = indexes[100];
        thread::scope(|scope| {
            let tenants = scope.spawn(|| lease_again_and_again(&datapath, leased));
            for shared in [1, 2].map(InterfaceIndex).into_iter().cycle() {
                datapath.set_shared(shared);
                if tenants.is_finished() {
                    break;
                }
            }
        });
        let before = datapath.nic(leased).generation;
        datapath.set_shared(NOWHERE);
        let told = datapath.used();
        assert_eq!(told.len(), indexes.len());
        assert!(told.iter().all(|(_, nic)| nic.shared_ifindex == NOWHERE.0));
        let after = datapath.nic(leased).generation;
        assert_ne!(after, before, "decisions of before don't hold");
        datapath.set_shared(NOWHERE);
        assert_eq!(datapath.nic(leased).generation, after, "it is the same");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_another_group_makes_nobody_else_decide_anew_before_all_do() {
    lab::run(|_| {
        let datapath = open(&settings());
        let [own, other] = [1, 2].map(|number| {
            let index = datapath.allocate(1).unwrap();
            datapath.write_nic(index, &nic(NOWHERE, NOWHERE, clone_of(number)));
            index
        });
        let generations = || [own, other].map(|index| datapath.nic(index).generation);
        let [before, others] = generations();
        assert!(datapath.set_group(own, 7));
        datapath.set_policy(own, PolicyIndex(1));
        assert!(!datapath.set_group(own, 7), "it is in that group");
        assert_eq!(datapath.nic(own).group, 7);
        assert_eq!(generations(), [before + 1, others]);
        datapath.forget_all_decisions();
        assert_eq!(generations(), [before + 2, others + 1]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_clone_address_has_one_active_owner() {
    lab::run(|_| {
        let datapath = open(&settings());
        let [first, second] = [1, 2].map(|_| datapath.allocate(1).unwrap());
        for index in [first, second] {
            datapath.write_nic(index, &nic(NOWHERE, NOWHERE, clone_of(7)));
        }
        datapath.activate(first, PolicyIndex(0), false).unwrap();
        let text = datapath
            .activate(second, PolicyIndex(0), false)
            .unwrap_err()
            .to_string();
        assert_eq!(text, "10.64.0.7 is the clone address of NIC 1 already");
        assert_eq!(datapath.nic(second).state, NicState::Ready.number());
        let owner = datapath
            .clones
            .get(&Address::from(clone_of(7)))
            .unwrap()
            .unwrap();
        assert_eq!(owner.nic, first.0, "the owner still has it");
        // A process that was killed while it withdrew the lease left the address behind.
        datapath
            .nics
            .write(first.0, &nic(NOWHERE, NOWHERE, clone_of(7)));
        datapath.activate(second, PolicyIndex(0), false).unwrap();
        datapath.deactivate(first).unwrap();
        let owner = datapath
            .clones
            .get(&Address::from(clone_of(7)))
            .unwrap()
            .unwrap();
        assert_eq!(
            owner.nic, second.0,
            "and nobody takes it from the new owner"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_policy_that_does_not_fit_leaves_nothing() {
    lab::run(|_| {
        let small = Settings {
            prefixes_max: 1000,
            ..settings()
        };
        let datapath = open(&small);
        let first = datapath.add_policy(&policy_of(600)).unwrap();
        let before = datapath.policies.sizes().unwrap();
        let text = datapath
            .add_policy(&policy_of(600))
            .unwrap_err()
            .to_string();
        assert_eq!(text, PREFIXES_FULL);
        assert_eq!(datapath.policies.sizes().unwrap(), before);
        assert_eq!(datapath.policies(), [first]);
        let second = datapath.add_policy(&policy_of(300)).unwrap();
        assert_ne!(first, second);
        datapath.remove_policy(first);
        datapath.remove_policy(second);
        assert!(datapath.policies.is_empty().unwrap());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_what_a_killed_process_wrote_of_a_policy_is_removed() {
    lab::run(|_| {
        let settings = settings();
        let datapath = open(&settings);
        let kept = datapath.add_policy(&policy_of(10)).unwrap();
        let before = datapath.policies.sizes().unwrap();
        datapath.policies.write_half(&policy_of(200), 77);
        assert_ne!(datapath.policies.sizes().unwrap(), before);
        drop(datapath);
        let datapath = open(&settings);
        assert_eq!(datapath.policies.sizes().unwrap(), before);
        assert_eq!(datapath.policies(), [kept]);
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_what_can_t_be_removed_of_a_policy_stays_its_own_until_it_can() {
    lab::run(|_| {
        let small = Settings {
            prefixes_max: 1000,
            ..settings()
        };
        let datapath = open(&small);
        let kept = datapath.add_policy(&policy_of(300)).unwrap();
        let before = datapath.policies.sizes().unwrap();
        let removed = datapath.add_policy(&policy_of(300)).unwrap();
        datapath.policies.refuse_removals(true);
        datapath.remove_policy(removed);
        let half_written = datapath.add_policy(&policy_of(600)).unwrap_err();
        assert_eq!(half_written.to_string(), PREFIXES_FULL);
        assert_eq!(datapath.policies(), [kept]);
        let keys = datapath.policies.prefix_keys().unwrap();
        assert_eq!(keys.len(), 1000, "the failure had the map full");
        let refused = datapath.add_policy(&policy_of(10));
        assert!(refused.is_err(), "and full it stays");

        datapath.policies.refuse_removals(false);
        let next = datapath.add_policy(&policy_of(600)).unwrap();
        datapath.remove_policy(next);
        assert_eq!(datapath.policies.sizes().unwrap(), before);
        datapath.remove_policy(kept);
        assert!(datapath.policies.is_empty().unwrap());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_redirects_are_exchanged_beside_policies_and_leave_nothing() {
    lab::run(|_| {
        let settings = settings();
        let mut datapath = open(&settings);
        let policy = datapath.add_policy(&policy_of(10)).unwrap();
        let before = datapath.policies.sizes().unwrap();
        let redirects = |port: u16| {
            [policy::Redirect {
                from: "10.0.0.0/8".parse().unwrap(),
                to: "198.51.100.0/24".parse().unwrap(),
                protocol: Some(6),
                ports: Some((port, port)),
            }]
        };
        datapath.set_redirects(&redirects(1)).unwrap();
        // A source, and a destination with its ports.
        let one = (before.0 + 2, before.1 + 1);
        assert_eq!(datapath.policies.sizes().unwrap(), one);
        for port in 2..9 {
            datapath.set_redirects(&redirects(port)).unwrap();
            // That of before stays for packets that are under way.
            let two = (one.0 + 1, one.1 + 1);
            assert_eq!(datapath.policies.sizes().unwrap(), two);
            if port == 5 {
                drop(datapath);
                datapath = open(&settings);
            }
        }
        assert_eq!(datapath.policies(), [policy]);
        let (prefixes, lists) = datapath.policies.sizes().unwrap();
        let second = datapath.add_policy(&policy_of(20)).unwrap();
        // Its own, and those of cloud metadata.
        let with_both = (prefixes + 20 + CLOUD_METADATA.len(), lists + 8);
        assert_eq!(
            datapath.policies.sizes().unwrap(),
            with_both,
            "nothing is written over"
        );
        datapath.remove_policy(second);
        datapath.remove_policy(policy);
        datapath.set_redirects(&[]).unwrap();
        assert!(datapath.policies.is_empty().unwrap());
        assert_eq!(datapath.policies.read(PolicyIndex(0)), Policy::default());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_policy_that_is_being_removed_denies_while_its_prefixes_are_there() {
    lab::run(|_| {
        let settings = settings();
        let datapath = open(&settings);
        let policy = datapath.add_policy(&policy_of(10)).unwrap();
        assert_ne!(datapath.policies.read(policy), Policy::default());
        datapath.policies.remove_half(policy);
        let left = datapath.policies.read(policy);
        assert_eq!((left.flags, left.uplink), (0, 0), "nothing is allowed");
        assert!(
            !datapath.policies.is_empty().unwrap(),
            "and what it denied is there"
        );
        drop(datapath);
        let datapath = open(&settings);
        assert!(datapath.policies.is_empty().unwrap());
        assert!(datapath.policies().is_empty());
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_a_hundred_thousand_prefixes_are_accepted_in_bounded_time() {
    lab::run(|_| {
        let datapath = open(&settings());
        let compiled = policy_of(100_000);
        let before = Instant::now();
        let policy = datapath.add_policy(&compiled).unwrap();
        let added = before.elapsed();
        let before = Instant::now();
        datapath.remove_policy(policy);
        let removed = before.elapsed();
        assert!(datapath.policies.is_empty().unwrap());
        println!("100,000 prefixes: added in {added:?}, removed in {removed:?}");
        // Measured: a tenth of a second each; a busy machine may need more.
        assert!(added < Duration::from_secs(60), "{added:?}");
        assert!(removed < Duration::from_secs(60), "{removed:?}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_group_pairs_are_exactly_those_that_were_said() {
    lab::run(|_| {
        let datapath = open(&settings());
        for pairs in [&[(1, 2), (2, 1)][..], &[(2, 1), (3, 1)], &[]] {
            let pairs: BTreeSet<(u32, u32)> = pairs.iter().copied().collect();
            datapath.set_group_pairs(&pairs).unwrap();
            let found = datapath.group_pairs.entries().unwrap();
            let found: BTreeSet<(u32, u32)> =
                found.iter().map(|(pair, _)| (pair.from, pair.to)).collect();
            assert_eq!(found, pairs);
        }
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_of_more_group_pairs_than_there_is_room_for_those_are_added_that_fit() {
    lab::run(|_| {
        let datapath = open(&settings());
        let found = || {
            let found = datapath.group_pairs.entries().unwrap().into_iter();
            let pairs = found.map(|(pair, _)| (pair.from, pair.to));
            pairs.collect::<BTreeSet<(u32, u32)>>()
        };
        let most: BTreeSet<(u32, u32)> = (0..GROUP_PAIRS_MAX).map(|group| (group, 7)).collect();
        datapath.set_group_pairs(&most).unwrap();
        assert_eq!(found(), most, "as many as there may be");
        let mut more = most.clone();
        more.extend([(7, 8), (7, 9)]);
        let text = datapath.set_group_pairs(&more).unwrap_err().to_string();
        let expected = "the map group_pairs is full (65536 entries)";
        assert!(text.starts_with(expected), "{text}");
        assert_eq!(found(), most);
        more.remove(&(0, 7));
        datapath.set_group_pairs(&more).unwrap_err();
        assert!(
            !found().contains(&(0, 7)),
            "who may not talk any more doesn't"
        );
        more.remove(&(1, 7));
        datapath.set_group_pairs(&more).unwrap();
        assert_eq!(found(), more);

        // As after a start with maps made anew, by policies of a former version.
        datapath.set_group_pairs(&BTreeSet::new()).unwrap();
        let agreed = (0..GROUP_PAIRS_MAX).flat_map(|group| [(group, 1 << 20), (1 << 20, group)]);
        let agreed: BTreeSet<(u32, u32)> = agreed.collect();
        datapath.set_group_pairs(&agreed).unwrap_err();
        let found = found();
        assert_eq!(found.len(), GROUP_PAIRS_MAX as usize);
        let are_both = |(from, to): &(u32, u32)| found.contains(&(*to, *from));
        assert!(
            found.iter().all(are_both),
            "one direction without the other"
        );
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_without_a_bpffs_the_error_says_what_to_do() {
    lab::run(|lab| {
        lab.shell("umount /sys/fs/bpf 2>/dev/null || true");
        let error = Datapath::open(&Settings {
            mount: false,
            ..settings()
        })
        .unwrap_err();
        assert!(matches!(error, Error::NoBpffs { .. }), "{error}");
        assert_eq!(
            error.to_string(),
            "/sys/fs/bpf/sandwire/test is not on a bpffs; mount one: mount -t bpf bpf /sys/fs/bpf"
        );
        let many = Settings {
            nics_max: 65_537,
            ..settings()
        };
        let text = Datapath::open(&many).unwrap_err().to_string();
        assert_eq!(text, "nics_max is 65537; possible is 2 to 65536");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_where_ebpf_is_forbidden_the_error_says_so() {
    lab::run(|_| {
        let nobody = rustix::thread::CapabilitySets {
            effective: rustix::thread::CapabilitySet::empty(),
            permitted: rustix::thread::CapabilitySet::empty(),
            inheritable: rustix::thread::CapabilitySet::empty(),
        };
        rustix::thread::set_capabilities(None, nobody).unwrap();
        let error = Datapath::open(&settings()).unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("loading a program is forbidden to this process"),
            "{text}"
        );
        assert!(text.contains("or use the data path nft"), "{text}");
    });
}

#[test]
#[ignore = "needs root: cargo xtask test netns"]
fn netns_prefixes_of_one_policy_are_not_anothers() {
    lab::run(|_| {
        let datapath = open(&settings());
        let [first, second] =
            [100, 100].map(|count| datapath.add_policy(&policy_of(count)).unwrap());
        let count = |policy: PolicyIndex| {
            let entries = datapath.policies.prefix_keys().unwrap();
            entries
                .iter()
                .filter(|key: &&PrefixKey| key.policy == policy.0)
                .count()
        };
        let all = 100 + CLOUD_METADATA.len();
        assert_eq!((count(first), count(second)), (all, all));
        datapath.remove_policy(first);
        assert_eq!((count(first), count(second)), (0, all));
    });
}
