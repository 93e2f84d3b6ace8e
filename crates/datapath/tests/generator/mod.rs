//! Packets of every kind that the data path must tell apart, from one seed.
//!
//! A [`Case`] says how things stand, and one or more [`Step`]s. Everything in it follows from the
//! seed of the run, the name of the class and a number, so a case that failed is made again from
//! what the failure prints.

pub(crate) mod child;
pub(crate) mod egress;
pub(crate) mod fragments;
pub(crate) mod frames;
pub(crate) mod ingress;
pub(crate) mod odd;
pub(crate) mod random;
pub(crate) mod scene;
pub(crate) mod situations;

use crate::model::{
    Hook, Origin,
    answers::{Flow, Via},
    world::{Credit, Meter},
};
use random::Random;

/// A test of one flow or a few packets.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// What entries 0 and 1 of `nics` are like; see [`scene::HOST_SLOT`] and those after it.
    pub(crate) variant: usize,
    /// Policy of entry 0.
    pub(crate) policy: usize,
    pub(crate) learn: bool,
    /// Whether the host's stack translates ports to entry 0.
    pub(crate) published: bool,
    /// Answers that are known.
    pub(crate) answers: Vec<Known>,
    /// Meters that have something on them.
    pub(crate) meters: Vec<MeterAt>,
    /// How many neighbours entry 0 has had the host look for a moment ago.
    pub(crate) asked: usize,
    pub(crate) steps: Vec<Step>,
}

/// What has come in before.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    pub(crate) flow: Flow,
    /// In nanoseconds.
    pub(crate) age: u64,
    pub(crate) via: Via,
    /// Whether the guest might send there by itself then.
    pub(crate) own: bool,
    pub(crate) by_last_lease: bool,
}

/// A meter, in nanoseconds from now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MeterAt {
    pub(crate) nic: usize,
    pub(crate) ingress: bool,
    pub(crate) bytes: u64,
    pub(crate) packets: u64,
    /// What is paid ahead, not from now.
    pub(crate) credit: Credit,
}

impl MeterAt {
    pub(crate) fn filled(&self, now: u64) -> Meter {
        Meter {
            bytes: now + self.bytes,
            packets: now + self.packets,
            credit: self.credit,
        }
    }
}

/// One frame, and what is done before it comes.
#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) hook: Hook,
    pub(crate) to_this_host: bool,
    pub(crate) origin: Origin,
    pub(crate) frame: Vec<u8>,
    pub(crate) gso_size: u32,
    /// How many segments the kernel knows of. Of what comes from a TAP it doesn't: zero.
    pub(crate) gso_segs: u32,
    pub(crate) change: Option<Change>,
}

/// Something that the daemon does between two packets.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Change {
    /// Another policy for entry 0.
    Policy(usize),
    /// Nothing but a new generation.
    Generation,
    /// The sandbox at [`scene::NEIGHBOUR`] loses its lease.
    Release,
}

impl Step {
    pub(crate) fn new(hook: Hook, frame: Vec<u8>) -> Self {
        Self {
            hook,
            to_this_host: true,
            origin: Origin::Host,
            frame,
            gso_size: 0,
            gso_segs: 0,
            change: None,
        }
    }
}

impl Case {
    /// A case of a dual-stack host slot where everything is allowed.
    pub(crate) fn new(steps: Vec<Step>) -> Self {
        Self {
            variant: 0,
            policy: 0,
            learn: false,
            published: false,
            answers: Vec::new(),
            meters: Vec::new(),
            asked: 0,
            steps,
        }
    }
}

/// Makes one case.
pub(crate) type Make = fn(&mut Random) -> Case;

/// Every class by name.
pub(crate) const CLASSES: &[(&str, Make)] = &[
    ("arp", odd::arp),
    ("arp-spoofed", odd::arp_spoofed),
    ("neighbour-solicitation", odd::neighbour_solicitation),
    ("neighbour-others", odd::neighbour_others),
    ("tcp", egress::tcp),
    ("udp", egress::udp),
    ("udp-no-checksum", egress::udp_without_checksum),
    ("echo4", egress::echo4),
    ("echo6", egress::echo6),
    ("icmp-error", egress::icmp_error),
    ("icmp6-error", egress::icmp6_error),
    ("icmp-error-cut-off", egress::icmp_error_cut_off),
    ("other-transports", egress::other_transports),
    ("fragment-first", fragments::first),
    ("fragment-later", fragments::later),
    ("super-fragment", fragments::super_fragment),
    ("fragment-tiny", fragments::tiny),
    ("fragment-offset-1", fragments::offset_one),
    ("ipv4-options", fragments::options),
    ("ipv6-extension-one", fragments::one_extension),
    ("ipv6-extension-chain", fragments::extension_chain),
    ("ipv6-extension-bad", fragments::bad_extensions),
    ("vlan", odd::vlan),
    ("ethertype", odd::ethertype),
    ("truncated", odd::truncated),
    ("mutated", odd::mutated),
    ("spoofed-mac", odd::spoofed_mac),
    ("spoofed-address", odd::spoofed_address),
    ("rogue-dhcp", odd::rogue_dhcp),
    ("rogue-ra", odd::rogue_ra),
    ("link-chatter", odd::link_chatter),
    ("gateway", odd::gateway),
    ("multicast-and-reserved", odd::reserved),
    ("not-leased", odd::not_leased),
    ("process", odd::process),
    ("policy", situations::policy),
    ("policy-change", situations::policy_change),
    ("host-service", situations::host_service),
    ("metadata", situations::metadata),
    ("groups", situations::groups),
    ("released", situations::released),
    ("answer", situations::answer),
    ("answer-after-question", situations::answer_after_question),
    ("published", situations::published),
    ("byte-limit", situations::byte_limit),
    ("packet-limit", situations::packet_limit),
    ("neighbour-limit", situations::neighbour_limit),
    ("ttl", situations::ttl),
    ("mtu", situations::mtu),
    ("segments", situations::segments),
    ("sctp-super-packet", situations::sctp_super_packet),
    ("same-flow", situations::same_flow),
    ("from-uplink", ingress::from_uplink),
    ("from-uplink-not-ours", ingress::not_ours),
    ("from-uplink-spoofed", ingress::spoofed),
    ("from-uplink-fragments", ingress::fragments),
    ("from-uplink-mutated", ingress::mutated),
    ("from-host", ingress::from_host),
    ("from-host-mutated", ingress::from_host_mutated),
    ("ingress-icmp-error", ingress::icmp_error),
    ("ingress-limit", ingress::limit),
    ("ingress-mtu", ingress::mtu),
    ("ingress-sctp-super-packet", ingress::sctp_super_packet),
    ("child-link", child::link),
    ("child-egress", child::egress),
    ("child-fragments", child::parts),
    ("child-super-packet", child::super_packet),
    ("child-broken", child::broken),
    ("child-policy", child::policy),
    ("child-answer", child::answer),
    ("child-limit", child::limit),
    ("child-ingress", child::ingress),
    ("child-sibling", child::sibling),
    ("child-neighbours", child::neighbours),
    ("child-redirect", child::redirect),
];

/// The random numbers of a case.
pub(crate) fn random_of(run: u64, class: &str, number: u64) -> Random {
    let mut random = Random::new(run);
    for byte in class.bytes() {
        random.stir(u64::from(byte));
    }
    random.stir(number);
    random
}
