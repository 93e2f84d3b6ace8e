//! A slot's interface in a namespace that somebody else made: what is asked for, and what it came to.

use std::{net::IpAddr, path::PathBuf};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{ObjectBuilder, RefOr, Schema, Type},
};

use crate::{
    prefix,
    slot::{Defect, MacAddress},
};

/// Where the interface of a slot of kind `container` goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Attach {
    /// A network namespace's file as the daemon sees it: `/run/netns/NAME` or `/proc/PID/ns/net`.
    #[schema(value_type = String, example = "/run/netns/blue")]
    pub netns: PathBuf,
    /// The interface's name in there. Default: `eth0`.
    #[serde(default)]
    pub interface: InterfaceName,
    /// MTU in bytes, 1280 to 65521. Default: the pool's.
    #[serde(default)]
    pub mtu: Option<u32>,
    /// Ethernet address. Default: one made of the clone address.
    #[serde(default)]
    pub mac: Option<MacAddress>,
    /// Destinations that lead to the gateway; one that is everything is a default route. Default: everything,
    /// of each family that the pool has. An empty list makes none, as a further interface wants it.
    #[serde(default, deserialize_with = "prefix::optional_list")]
    #[schema(value_type = Option<Vec<String>>)]
    pub routes: Option<Vec<IpNet>>,
    /// A TAP beside it, for a microVM in there that takes the interface's addresses and its MAC. Whatever comes in by
    /// the one goes out by the other. Default: none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<AttachTap>,
}

/// A TAP beside an interface in somebody's namespace: of one queue, with virtio-net headers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct AttachTap {
    /// Its name in there.
    #[schema(example = "tap0")]
    pub name: InterfaceName,
    /// Numeric user that may open it, as by `TUNSETOWNER`. Default: only privileged users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner_uid: Option<u32>,
    /// Numeric group that may open it, as by `TUNSETGROUP`. Default: only privileged users.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner_gid: Option<u32>,
}

/// An interface in somebody's namespace, as it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attached {
    /// The namespace's file that was given.
    #[schema(value_type = String, example = "/run/netns/blue")]
    pub netns: PathBuf,
    /// The interface's name in there.
    pub interface: InterfaceName,
    /// Its Ethernet address.
    pub mac: MacAddress,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Name of the interface of the host that leads to it; of a child that is its parent.
    #[schema(example = "swj67hu4-17")]
    pub host_interface: String,
    /// What kind of interface it is.
    pub device: AttachedDevice,
    /// Why it is that, where the pool left it open.
    #[serde(default)]
    pub device_reason: Option<String>,
    /// Its addresses, each the sandbox's own: no translation is between it and the world.
    pub addresses: Vec<AttachedAddress>,
    /// Its routes.
    pub routes: Vec<AttachedRoute>,
    /// Ethernet address of the gateway, a permanent neighbour in there. None of a child, whose gateway is one of its
    /// parent's network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway_mac: Option<MacAddress>,
    /// The TAP beside it: a guest on it has the interface's addresses, MTU and MAC.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<AttachTap>,
}

/// An address of an attached interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachedAddress {
    /// The address, with 32 or 128 bits: nobody else is on its link. Of a child it has the length of its parent's
    /// subnet, if it is in one.
    #[schema(value_type = String, example = "10.64.0.2/32")]
    pub address: IpNet,
    /// The gateway, link-local and the same in every sandbox. Of a child it is its parent's network's, if there is
    /// one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, example = "169.254.1.1")]
    pub gateway: Option<IpAddr>,
}

/// A route of an attached interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachedRoute {
    /// Where it leads.
    #[schema(value_type = String, example = "0.0.0.0/0")]
    pub destination: IpNet,
    /// By which next hop.
    #[schema(value_type = String, example = "169.254.1.1")]
    pub gateway: IpAddr,
}

/// What kind of interface was attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum AttachedDevice {
    /// One end of a veth pair.
    #[default]
    Veth,
    /// One end of a netkit pair.
    Netkit,
    /// A macvlan child of an interface of the host.
    Macvlan,
    /// An ipvlan child of an interface of the host, in mode `l2`.
    Ipvlan,
}

impl AttachedDevice {
    /// As the kernel names it.
    #[must_use]
    pub fn name(self) -> &'static str {
        DeviceChoice::from(self).name()
    }

    /// Whether it is a child of an interface of the host.
    #[must_use]
    pub fn is_child(self) -> bool {
        DeviceChoice::from(self).is_child()
    }
}

/// The choice that leaves nothing open.
impl From<AttachedDevice> for DeviceChoice {
    fn from(device: AttachedDevice) -> Self {
        match device {
            AttachedDevice::Veth => Self::Veth,
            AttachedDevice::Netkit => Self::Netkit,
            AttachedDevice::Macvlan => Self::Macvlan,
            AttachedDevice::Ipvlan => Self::Ipvlan,
        }
    }
}

/// What kind of interface containers get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum DeviceChoice {
    /// `netkit` where the kernel makes such pairs, and otherwise `veth`; never a child. Decided for each lease, which
    /// tells why.
    Auto,
    /// One end of a veth pair.
    #[default]
    Veth,
    /// One end of a netkit pair; refused where the kernel makes none.
    Netkit,
    /// A macvlan child of the interface that `parent` names: on that interface's network, with an Ethernet address of
    /// its own. Only for containers without the capabilities `CAP_NET_ADMIN` and `CAP_NET_RAW`.
    Macvlan,
    /// The same with ipvlan in its mode `l2`: with the parent's Ethernet address, for networks that take no other from
    /// this host.
    Ipvlan,
}

impl DeviceChoice {
    /// As it is written, and as the kernel names such an interface.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Veth => "veth",
            Self::Netkit => "netkit",
            Self::Macvlan => "macvlan",
            Self::Ipvlan => "ipvlan",
        }
    }

    /// Whether it is a child of an interface of the host.
    #[must_use]
    pub fn is_child(self) -> bool {
        matches!(self, Self::Macvlan | Self::Ipvlan)
    }
}

/// The interface of the host whose children containers get, and what its network is like.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ParentSpec {
    /// Its name, in the daemon's own network namespace.
    #[schema(example = "eth1")]
    pub interface: InterfaceName,
    /// Where the containers' routes lead, one address per family at most. Default: the host's own default gateways by
    /// this interface. A family without one has no default route.
    #[serde(default)]
    #[schema(value_type = Vec<String>)]
    pub gateways: Vec<IpAddr>,
    /// Subnets whose addresses are reached without a gateway. Default: those of the interface's own addresses.
    #[serde(default, deserialize_with = "prefix::list")]
    #[schema(value_type = Vec<String>)]
    pub subnets: Vec<IpNet>,
}

/// Whether an attached interface is as it was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AttachedState {
    /// As it was made.
    pub attached: Attached,
    /// What is not so any more; empty if all is.
    pub defects: Vec<Defect>,
}

/// Name of an interface: 1 to 15 printable bytes that mean nothing else to the kernel.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InterfaceName(String);

impl InterfaceName {
    /// The name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for InterfaceName {
    fn default() -> Self {
        Self("eth0".to_owned())
    }
}

impl std::fmt::Display for InterfaceName {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.pad(&self.0)
    }
}

/// Why a text is no [`InterfaceName`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' can't name an interface: {reason}")]
pub struct ParseInterfaceNameError {
    text: String,
    reason: &'static str,
}

impl std::str::FromStr for InterfaceName {
    type Err = ParseInterfaceNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let reason = if text.is_empty() || text.len() > INTERFACE_NAME_BYTES_MAX {
            "it must have 1 to 15 bytes"
        } else if !text.bytes().all(|byte| byte.is_ascii_graphic()) {
            "it must be printable ASCII without spaces"
        } else if text.contains(['/', ':', '%', '"', '\\']) {
            "it must not contain '/', ':', '%', '\"' or '\\'"
        } else if [".", "..", "lo", "all", "default"].contains(&text) {
            "it has a meaning of its own"
        } else {
            return Ok(Self(text.to_owned()));
        };
        Err(ParseInterfaceNameError {
            text: text.chars().take(40).collect(),
            reason,
        })
    }
}

impl Serialize for InterfaceName {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for InterfaceName {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?
            .parse()
            .map_err(serde::de::Error::custom)
    }
}

impl PartialSchema for InterfaceName {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .schema_type(Type::String)
            .min_length(Some(1))
            .max_length(Some(INTERFACE_NAME_BYTES_MAX))
            .description(Some("Name of an interface."))
            .examples(["eth0"])
            .into()
    }
}

impl ToSchema for InterfaceName {}

/// `IFNAMSIZ` less the closing zero.
const INTERFACE_NAME_BYTES_MAX: usize = 15;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_would_not_take_names_no_interface() {
        for text in [
            "",
            "a-name-of-16-byt",
            "eth 0",
            "eth/0",
            "eth0:1",
            "eth%d",
            ".",
            "..",
            "lo",
            "all",
            "eth\u{e9}",
        ] {
            assert!(text.parse::<InterfaceName>().is_err(), "{text:?} was taken");
        }
        let name: InterfaceName = "net1.100".parse().unwrap();
        assert_eq!(name.to_string(), "net1.100");
    }

    #[test]
    fn a_request_needs_nothing_but_the_namespace() {
        let attach: Attach = serde_json::from_str(r#"{"netns": "/run/netns/blue"}"#).unwrap();
        assert_eq!(attach.interface.as_str(), "eth0");
        assert_eq!((attach.mtu, attach.mac, attach.routes), (None, None, None));
        let unknown = r#"{"netns": "/run/netns/blue", "gateway": "10.0.0.1"}"#;
        assert!(serde_json::from_str::<Attach>(unknown).is_err());
    }
}
