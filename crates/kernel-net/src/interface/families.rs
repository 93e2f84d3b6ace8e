//! Settings of an interface that belong to one IP version each.

use super::{Change, Writer};
use crate::{ipv6, netlink::attribute::Attributes, number::narrow};

const IFLA_INET_CONF: u16 = 1;
const IPV4_DEVCONF_FORWARDING: u16 = 1;
const IPV4_DEVCONF_ARPFILTER: u16 = 13;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const IN6_ADDR_GEN_MODE_NONE: u8 = 1;

impl Change<'_> {
    /// Whether anything is to be written for a version.
    pub(super) fn has_families(&self) -> bool {
        self.ipv4_forwarding.is_some() || self.arp_filter || self.no_generated_addresses
    }

    pub(super) fn write_families(&self, families: &mut Writer<'_>) {
        self.write_known_families(families, ipv6::is_known());
    }

    fn write_known_families(&self, families: &mut Writer<'_>, has_ipv6: bool) {
        if self.ipv4_forwarding.is_some() || self.arp_filter {
            families.nest(narrow(libc::AF_INET), |inet| {
                inet.nest(IFLA_INET_CONF, |settings| {
                    if let Some(forwarding) = self.ipv4_forwarding {
                        settings.put_u32(IPV4_DEVCONF_FORWARDING, u32::from(forwarding));
                    }
                    if self.arp_filter {
                        settings.put_u32(IPV4_DEVCONF_ARPFILTER, 1);
                    }
                });
            });
        }
        // A kernel that doesn't know the version refuses the whole change, and makes no such addresses.
        if self.no_generated_addresses && has_ipv6 {
            families.nest(narrow(libc::AF_INET6), |inet6| {
                inet6.put_u8(IFLA_INET6_ADDR_GEN_MODE, IN6_ADDR_GEN_MODE_NONE);
            });
        }
    }
}

/// Whether an interface, by the attributes that tell of it, gets IPv6 addresses by itself. Without IPv6 it doesn't.
pub(super) fn makes_addresses(attributes: &Attributes<'_>) -> bool {
    let families = attributes.nested(libc::IFLA_AF_SPEC);
    let ipv6 = families.nested(narrow(libc::AF_INET6));
    let mode = ipv6.find(IFLA_INET6_ADDR_GEN_MODE);
    mode.is_some_and(|mode| mode != [IN6_ADDR_GEN_MODE_NONE])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_is_left_out_where_the_kernel_has_none() {
        let change = Change {
            name: "one",
            ipv4_forwarding: Some(true),
            no_generated_addresses: true,
            ..Change::default()
        };
        for has_ipv6 in [true, false] {
            let mut buffer = Vec::new();
            change.write_known_families(&mut Writer::new(&mut buffer), has_ipv6);
            let families = Attributes::new(&buffer);
            let ipv4 = families.nested(narrow(libc::AF_INET));
            let forwarding = ipv4.nested(IFLA_INET_CONF).find(IPV4_DEVCONF_FORWARDING);
            assert_eq!(forwarding, Some(&1u32.to_ne_bytes()[..]));
            let ipv6 = families.nested(narrow(libc::AF_INET6));
            let mode = ipv6.find(IFLA_INET6_ADDR_GEN_MODE);
            assert_eq!(mode.is_some(), has_ipv6);
        }
    }
}
