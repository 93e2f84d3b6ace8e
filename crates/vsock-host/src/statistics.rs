//! Counters of one guest's channel, shared between the worker that counts and whoever asks.
//!
//! All are relaxed atomics: they are sums, nothing is decided by them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use sandwire_api::vsock::{VsockClass, VsockClassTraffic, VsockRefusal, VsockTraffic};

/// Every reason, in the order of the counters.
pub const REFUSALS: [VsockRefusal; 15] = [
    VsockRefusal::Policy,
    VsockRefusal::Cid,
    VsockRefusal::ForgedSource,
    VsockRefusal::Malformed,
    VsockRefusal::Credit,
    VsockRefusal::NoConnection,
    VsockRefusal::TooManyConnections,
    VsockRefusal::TooFast,
    VsockRefusal::Memory,
    VsockRefusal::MessageTooLong,
    VsockRefusal::SeqpacketUnsupported,
    VsockRefusal::Unreachable,
    VsockRefusal::TimedOut,
    VsockRefusal::Handshake,
    VsockRefusal::BadDescriptors,
];

/// What [`VsockTraffic`] says, as it is being counted.
#[derive(Debug, Default)]
pub struct VmCounters {
    /// Whether a VMM is connected now.
    pub attached: AtomicBool,
    /// Packets from the guest, control packets included.
    pub egress_packets: AtomicU64,
    /// Packets to the guest, control packets included.
    pub ingress_packets: AtomicU64,
    /// Bytes buffered for it now.
    pub buffered_bytes: AtomicU64,
    /// Packets that captures had no room for.
    pub capture_dropped_packets: AtomicU64,
    classes: [ClassCounters; VsockClass::ALL.len()],
    refusals: [AtomicU64; REFUSALS.len()],
}

/// What its connections of one class have done.
#[derive(Debug, Default)]
pub struct ClassCounters {
    /// Connections now, those being opened included.
    pub connections: AtomicU64,
    /// Connections that the guest opened and that were accepted.
    pub opened_by_guest: AtomicU64,
    /// Connections that were opened towards the guest and that it accepted.
    pub opened_by_peers: AtomicU64,
    /// Bytes of payload from the guest.
    pub egress_bytes: AtomicU64,
    /// Bytes of payload to the guest.
    pub ingress_bytes: AtomicU64,
}

impl ClassCounters {
    fn snapshot(&self) -> VsockClassTraffic {
        VsockClassTraffic {
            connections: self.connections.load(Relaxed),
            opened_by_guest: self.opened_by_guest.load(Relaxed),
            opened_by_peers: self.opened_by_peers.load(Relaxed),
            egress_bytes: self.egress_bytes.load(Relaxed),
            ingress_bytes: self.ingress_bytes.load(Relaxed),
        }
    }
}

impl VmCounters {
    /// Counts one refusal.
    pub fn refuse(&self, reason: VsockRefusal) {
        self.refusals[reason as usize].fetch_add(1, Relaxed);
    }

    /// How often something was refused for this reason.
    #[must_use]
    pub fn refused(&self, reason: VsockRefusal) -> u64 {
        self.refusals[reason as usize].load(Relaxed)
    }

    /// What counts for connections of this class.
    #[must_use]
    pub fn class(&self, class: VsockClass) -> &ClassCounters {
        &self.classes[class as usize]
    }

    /// The counters as they are now.
    #[must_use]
    pub fn snapshot(&self) -> VsockTraffic {
        let classes = VsockClass::ALL.map(|class| (class, self.class(class).snapshot()));
        let sum = |of: fn(&VsockClassTraffic) -> u64| {
            classes.iter().map(|(_, traffic)| of(traffic)).sum()
        };
        VsockTraffic {
            attached: self.attached.load(Relaxed),
            connections: sum(|traffic| traffic.connections),
            opened_by_guest: sum(|traffic| traffic.opened_by_guest),
            opened_by_peers: sum(|traffic| traffic.opened_by_peers),
            egress_bytes: sum(|traffic| traffic.egress_bytes),
            ingress_bytes: sum(|traffic| traffic.ingress_bytes),
            egress_packets: self.egress_packets.load(Relaxed),
            ingress_packets: self.ingress_packets.load(Relaxed),
            buffered_bytes: self.buffered_bytes.load(Relaxed),
            capture_dropped_packets: self.capture_dropped_packets.load(Relaxed),
            refusals: REFUSALS
                .into_iter()
                .map(|reason| (reason, self.refused(reason)))
                .filter(|&(_, count)| count != 0)
                .collect(),
            classes: classes.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_has_a_counter_of_its_own() {
        let counters = VmCounters::default();
        for (position, reason) in REFUSALS.into_iter().enumerate() {
            assert_eq!(reason as usize, position, "{reason:?}");
            for _ in 0..=position {
                counters.refuse(reason);
            }
        }
        let refusals = counters.snapshot().refusals;
        for (position, reason) in REFUSALS.into_iter().enumerate() {
            assert_eq!(refusals[&reason], position as u64 + 1, "{reason:?}");
        }
    }

    #[test]
    fn each_class_has_counters_of_its_own_and_they_make_up_the_sums() {
        let counters = VmCounters::default();
        for (class, bytes) in VsockClass::ALL.into_iter().zip([1, 10, 100]) {
            counters.class(class).egress_bytes.store(bytes, Relaxed);
        }
        let traffic = counters.snapshot();
        assert_eq!(traffic.egress_bytes, 111);
        assert_eq!(traffic.classes[&VsockClass::HostToGuest].egress_bytes, 10);
        assert_eq!(traffic.classes.len(), 3);
    }

    #[test]
    fn reasons_that_never_occurred_are_absent() {
        assert!(VmCounters::default().snapshot().refusals.is_empty());
    }
}
