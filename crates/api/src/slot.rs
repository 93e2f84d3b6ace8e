//! A slot as its user sees it: what to plug the sandbox into, and by which addresses it is known.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{Ipv4Net, Ipv6Net};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::error::ParseMacError;

/// Most interfaces of one sandbox.
pub const NICS_MAX: u8 = 8;

/// What the sandbox's interface lives in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SlotKind {
    /// A network namespace of its own, holding a TAP of the snapshot's own name.
    #[default]
    Netns,
    /// A TAP of a unique name in the host's namespace. Needs the `ebpf` or `xdp` data path.
    Host,
    /// An interface that is put into a namespace that somebody else made. Needs the `ebpf` data path.
    Container,
}

/// How packets travel between the slot's TAP and the host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DataPath {
    /// Kernel routing and stateful 1:1 NAT by nftables.
    #[default]
    Nft,
    /// tc eBPF programs, stateless 1:1 NAT.
    Ebpf,
    /// Native XDP programs.
    Xdp,
    /// `ebpf` where the host can, and otherwise, for netns slots, `nft`. Decided when the pool is
    /// created, which then shows what was chosen.
    Auto,
}

/// An Ethernet address, written as six hexadecimal pairs with colons.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ToSchema)]
#[schema(value_type = String, example = "06:00:ac:10:00:02")]
pub struct MacAddress(pub [u8; 6]);

impl std::fmt::Display for MacAddress {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(formatter, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

impl std::str::FromStr for MacAddress {
    type Err = ParseMacError;

    fn from_str(text: &str) -> Result<Self, ParseMacError> {
        let refuse = || ParseMacError {
            text: text.chars().take(40).collect(),
        };
        let mut bytes = [0; 6];
        let mut pairs = text.split(':');
        for byte in &mut bytes {
            let pair = pairs
                .next()
                .filter(|pair| pair.len() == 2)
                .ok_or_else(refuse)?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| refuse())?;
        }
        if pairs.next().is_some() {
            Err(refuse())
        } else {
            Ok(Self(bytes))
        }
    }
}

impl Serialize for MacAddress {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for MacAddress {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

/// One interface of a sandbox: what the VMM opens, what the guest believes, what the world sees.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Nic {
    /// Name of the TAP, the same in every slot of the pool.
    #[schema(example = "vmtap0")]
    pub tap: String,
    /// MTU of the TAP in bytes.
    pub mtu: u32,
    /// Ethernet address that the guest must use.
    pub guest_mac: MacAddress,
    /// Ethernet address of the gateway, the same in every slot of the pool.
    pub gateway_mac: MacAddress,
    /// IPv4 addresses, absent in a pool without IPv4.
    pub ipv4: Option<NicIpv4>,
    /// IPv6 addresses, absent in a pool without IPv6.
    pub ipv6: Option<NicIpv6>,
}

impl Nic {
    /// The addresses by which the rest of the world knows this interface.
    pub fn clone_addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        let v4 = self
            .ipv4
            .as_ref()
            .map(|ipv4| IpAddr::V4(ipv4.clone_address));
        let v6 = self
            .ipv6
            .as_ref()
            .map(|ipv6| IpAddr::V6(ipv6.clone_address));
        v4.into_iter().chain(v6)
    }
}

/// IPv4 side of a [`Nic`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicIpv4 {
    /// Address and prefix length that the guest believes it has; the same in every slot.
    #[schema(value_type = String, example = "192.168.241.2/29")]
    pub guest: Ipv4Net,
    /// The guest's default gateway; the same in every slot.
    #[schema(value_type = String, example = "192.168.241.1")]
    pub gateway: Ipv4Addr,
    /// Address by which the rest of the world knows this clone.
    #[schema(value_type = String, example = "10.64.0.2")]
    pub clone_address: Ipv4Addr,
}

/// IPv6 side of a [`Nic`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NicIpv6 {
    /// Address and prefix length that the guest believes it has; the same in every slot.
    #[schema(value_type = String, example = "fd00:5eed::2/64")]
    pub guest: Ipv6Net,
    /// The guest's default gateway; the same in every slot. `fe80::1` answers too.
    #[schema(value_type = String, example = "fd00:5eed::1")]
    pub gateway: Ipv6Addr,
    /// Address by which the rest of the world knows this clone.
    #[schema(value_type = String, example = "fd00:c10e::2")]
    pub clone_address: Ipv6Addr,
}

/// Something found wrong with a slot's kernel objects, and what was done about it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Defect {
    /// The object, by kind and name: `tap vmtap0`, `interface sw3f2a01-17`, `nft table sandwire`.
    pub object: String,
    /// What is wrong with it.
    pub problem: String,
    /// What the daemon did: `repaired`, `reported`, or `slot retired`.
    pub action: String,
}

/// Whether a VMM sits on a slot's TAP.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TapUse {
    /// Nobody has the TAP open.
    Unused,
    /// A process has it open: the TAP has a carrier.
    Attached,
    /// The TAP is gone.
    Missing,
    /// An interface of that name is there, but it is not the one that we made. A VMM that found none
    /// may have made it (Firecracker as root does); it has no network.
    Foreign,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mac_address_reads_back_as_written() {
        let mac: MacAddress = "06:00:AC:10:00:02".parse().unwrap();
        assert_eq!(mac.to_string(), "06:00:ac:10:00:02");
    }

    #[test]
    fn a_mac_address_of_another_form_is_refused() {
        for text in [
            "",
            "06:00:ac:10:00",
            "06:00:ac:10:00:02:03",
            "6:0:ac:10:0:2",
            "zz:00:ac:10:00:02",
        ] {
            assert!(text.parse::<MacAddress>().is_err(), "{text:?} was taken");
        }
    }
}
