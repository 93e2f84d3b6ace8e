//! Whose an address or a cgroup's place is: asked for each datagram, so made once with the configuration.
//!
//! The longest prefix that has an address decides, and of two senders with the same one the first in the file. A look-up takes as
//! many steps as there are different lengths, however many prefixes there are.

use std::{
    collections::{BTreeSet, HashMap},
    net::IpAddr,
};

use ipnet::IpNet;

use super::{Origin, Sender};

/// Senders by what they are known by, each by its place in [`super::Egress::senders`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Owners {
    prefixes: HashMap<IpNet, usize>,
    /// Lengths of these, the longest first, of IPv4 and of IPv6.
    lengths: [Vec<u8>; 2],
    cgroups: HashMap<u16, usize>,
}

impl Owners {
    pub(super) fn new(senders: &[Sender]) -> Self {
        let mut owners = Self::default();
        let mut lengths = [BTreeSet::new(), BTreeSet::new()];
        for (index, sender) in senders.iter().enumerate() {
            for prefix in sender.origin.prefixes() {
                owners.prefixes.entry(prefix.trunc()).or_insert(index);
                lengths[family(prefix.addr())].insert(prefix.prefix_len());
            }
            if let Origin::Cgroup { place, .. } = &sender.origin {
                owners.cgroups.entry(*place).or_insert(index);
            }
        }
        owners.lengths = lengths.map(|lengths| lengths.into_iter().rev().collect());
        owners
    }

    pub(super) fn of_address(&self, address: IpAddr) -> Option<usize> {
        let mut lengths = self.lengths[family(address)].iter();
        lengths.find_map(|length| {
            let prefix = IpNet::new(address, *length).ok()?.trunc();
            self.prefixes.get(&prefix).copied()
        })
    }

    pub(super) fn of_place(&self, place: u16) -> Option<usize> {
        self.cgroups.get(&place).copied()
    }
}

fn family(address: IpAddr) -> usize {
    usize::from(address.is_ipv6())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sender(name: &str, origin: Origin) -> Sender {
        Sender {
            name: name.into(),
            origin,
        }
    }

    fn prefixes(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    #[test]
    fn the_longest_prefix_decides_and_then_the_file_s_order() {
        let senders = [
            sender("wide", Origin::Forwarded(prefixes(&["10.0.0.0/8", "::/0"]))),
            sender(
                "one",
                Origin::Identity(prefixes(&["10.64.0.5/32", "2001:db8::/64"])),
            ),
            sender("batch", {
                let path = "/sys/fs/cgroup/batch".into();
                Origin::Cgroup { path, place: 3 }
            }),
            sender(
                "late",
                Origin::Forwarded(prefixes(&["10.64.0.0/16", "10.64.0.5/32", "10.0.0.0/8"])),
            ),
        ];
        let owners = Owners::new(&senders);
        for (address, owner) in [
            ("10.64.0.5", Some(1)),
            ("10.64.0.6", Some(3)),
            ("10.65.0.1", Some(0)),
            ("192.0.2.1", None),
            ("2001:db8::1", Some(1)),
            ("2001:db9::1", Some(0)),
        ] {
            assert_eq!(
                owners.of_address(address.parse().unwrap()),
                owner,
                "{address}"
            );
        }
        assert_eq!(
            [0, 1, 2, 3].map(|place| owners.of_place(place)),
            [None, None, None, Some(2)]
        );
        let nobody = Owners::new(&[]);
        assert_eq!(nobody.of_address("10.64.0.5".parse().unwrap()), None);
    }
}
