//! Why the eBPF data path drops a packet: one list for programs, metrics, API and documentation.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

macro_rules! drop_reasons {
    ($($(#[doc = $text:literal])+ $name:ident = $number:literal,)+) => {
        /// Why a packet was dropped. The numbers are those of `enum drop_reason` in
        /// `crates/datapath/bpf/lib/abi.h`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
        #[serde(rename_all = "snake_case")]
        #[repr(u8)]
        pub enum DropReason {
            $($(#[doc = $text])+ $name = $number,)+
        }

        impl DropReason {
            /// All reasons, by number.
            pub const ALL: &'static [Self] = &[$(Self::$name),+];

            /// What it means, in one sentence.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$name => concat!($($text),+).trim_ascii(),)+
                }
            }
        }
    };
}

drop_reasons! {
    /// The slot is not leased.
    NotLeased = 1,
    /// The frame has a VLAN tag; guests send untagged frames.
    VlanTag = 2,
    /// The frame is neither IPv4, IPv6 nor ARP.
    Ethertype = 3,
    /// A header is cut short or contradicts itself, or a guest leaves it to the host to cut a packet into more than 2048 segments, to cut a fragment, or to write a checksum before where the packet's own is or into what an ICMP error tells of.
    Malformed = 4,
    /// The source MAC address is not the guest's.
    SourceMac = 5,
    /// The source address is not the guest's, an ICMP error is about a packet that the guest can't have received from where it goes, or a packet from beyond an uplink, or from somebody else on the host, claims to be from a sandbox here.
    SourceAddress = 6,
    /// The guest acts as a DHCP server.
    RogueDhcp = 7,
    /// The guest acts as an IPv6 router.
    RogueRa = 8,
    /// An ARP packet that speaks for somebody else, or asks for somebody else than the gateway.
    Arp = 9,
    /// A neighbour discovery packet that speaks for somebody else, or asks for somebody else than the gateway.
    Neighbour = 10,
    /// Harmless announcements that nobody here listens to: gratuitous ARP, duplicate address detection, router solicitations, multicast membership.
    LinkChatter = 11,
    /// Multicast or broadcast.
    Multicast = 12,
    /// The destination is no address that can be routed: unspecified, loopback, IPv6 link-local or reserved.
    Destination = 13,
    /// A service of the gateway address other than echo: there is none.
    GatewayService = 14,
    /// Another sandbox, with whose group this one may not talk.
    OtherSandbox = 15,
    /// A clone address that no sandbox has now.
    NoSuchSandbox = 16,
    /// A rule of the policy, or its default.
    Policy = 17,
    /// Cloud metadata, which the policy does not allow.
    Metadata = 18,
    /// A service of the host that the policy does not allow; or no route leads there, which the kernel does not tell apart.
    HostService = 19,
    /// The policy lets nothing leave the host.
    UplinkDenied = 20,
    /// No way leads there: the route look-up failed, or one of two sandboxes is a child of the host's interface and the other is not.
    NoRoute = 21,
    /// The limit of bits per second.
    BitLimit = 22,
    /// The limit of packets per second.
    PacketLimit = 23,
    /// Larger than the MTU of the guest's interface, where nobody can be told.
    TooBig = 24,
    /// The kernel could not change the packet.
    Helper = 25,
    /// An IPv6 routing header with hops left, or an IPv4 source route.
    RoutingHeader = 26,
    /// More than eight IPv6 extension headers.
    ExtensionHeaders = 27,
    /// An IP version that the pool does not have.
    NoAddress = 28,
    /// It may leave only inside TLS, and nothing takes it there: the interface is a child of the host's.
    NotRelayed = 29,
    /// More new addresses on links of the host's in four seconds than a sandbox's interface may have it look for: 32.
    NeighbourLimit = 30,
}

/// A reason with its meaning.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DropReasonText {
    /// Its name in metrics, the API and documentation.
    pub reason: DropReason,
    /// What it means, in one sentence.
    pub text: String,
}

impl DropReason {
    /// All reasons with their meanings.
    #[must_use]
    pub fn explained() -> Vec<DropReasonText> {
        let explain = |reason: &Self| DropReasonText {
            reason: *reason,
            text: reason.text().to_owned(),
        };
        Self::ALL.iter().map(explain).collect()
    }

    /// The reason with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL
            .iter()
            .copied()
            .find(|reason| *reason as u8 == number)
    }

    /// Its name in metrics, the API and documentation.
    #[must_use]
    pub fn name(self) -> String {
        match serde_json::to_value(self) {
            Ok(serde_json::Value::String(name)) => name,
            _ => unreachable!("a unit variant is written as a string"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_count_up_from_one() {
        for (reason, number) in DropReason::ALL.iter().zip(1..) {
            assert_eq!(*reason as u8, number);
            assert_eq!(DropReason::from_number(number), Some(*reason));
        }
        assert_eq!(DropReason::from_number(0), None);
    }
}
