//! Settings of an interface that belong to one IP version each.

use std::{path::Path, sync::OnceLock};

use super::{Change, Writer};
use crate::number::narrow;

const IFLA_INET_CONF: u16 = 1;
const IPV4_DEVCONF_FORWARDING: u16 = 1;
const IPV4_DEVCONF_ARPFILTER: u16 = 13;
const IFLA_INET6_ADDR_GEN_MODE: u16 = 8;
const IN6_ADDR_GEN_MODE_NONE: u8 = 1;
/// Where the kernel has the settings of each version that it knows.
const SETTINGS: &str = "/proc/sys/net";

impl Change<'_> {
    /// Whether anything is to be written for a version.
    pub(super) fn has_families(&self) -> bool {
        self.ipv4_forwarding.is_some() || self.arp_filter || self.no_generated_addresses
    }

    pub(super) fn write_families(&self, families: &mut Writer<'_>) {
        self.write_known_families(families, has_ipv6());
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

/// Whether the kernel knows IPv6: it may have been built without, or booted with `ipv6.disable=1`. Looked at once.
fn has_ipv6() -> bool {
    static FOUND: OnceLock<bool> = OnceLock::new();
    *FOUND.get_or_init(|| may_know_ipv6(Path::new(SETTINGS)))
}

/// Where no settings are to be seen at all, as in a `/proc` of processes alone, nothing speaks against it.
fn may_know_ipv6(settings: &Path) -> bool {
    !settings.exists() || settings.join("ipv6").exists()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netlink::attribute::Attributes;

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

    #[test]
    fn a_kernel_knows_ipv6_unless_it_shows_settings_of_other_versions_alone() {
        let folder = tempfile::tempdir().unwrap();
        assert!(!may_know_ipv6(folder.path()));
        std::fs::create_dir(folder.path().join("ipv6")).unwrap();
        assert!(may_know_ipv6(folder.path()));
        assert!(may_know_ipv6(&folder.path().join("nowhere")));
    }
}
