//! The mirror of `bpf/lib/abi.h`: each struct as the bytes that maps hold.
//!
//! A test compares names, offsets and sizes with what clang made of the header. Fields are read and written one by
//! one, in the machine's own byte order; addresses are in network order.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

macro_rules! structs {
    ($($(#[$meta:meta])* $name:ident = $text:literal, $size:literal bytes { $($field:ident: $offset:literal, $length:literal;)+ })+) => {
        $(
            $(#[$meta])*
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $name(pub [u8; $size]);

            impl Default for $name {
                fn default() -> Self {
                    Self([0; $size])
                }
            }

            #[allow(dead_code, reason = "some fields are only written by programs")]
            impl $name {
                $(
                    #[doc = concat!("Where `", stringify!($field), "` is.")]
                    pub const fn $field() -> Place {
                        Place { offset: $offset, size: $length }
                    }
                )+

                /// The bytes of a field.
                #[must_use]
                pub fn get(&self, place: Place) -> &[u8] {
                    &self.0[place.offset..place.offset + place.size]
                }

                /// The bytes of a field, to be written.
                pub fn get_mut(&mut self, place: Place) -> &mut [u8] {
                    &mut self.0[place.offset..place.offset + place.size]
                }

                /// A field of four bytes.
                #[must_use]
                pub fn word(&self, place: Place) -> u32 {
                    u32::from_ne_bytes(self.get(place).try_into().expect("four bytes"))
                }

                /// Writes a field of four bytes.
                pub fn set_word(&mut self, place: Place, value: u32) {
                    self.get_mut(place).copy_from_slice(&value.to_ne_bytes());
                }

                /// Writes a field of two bytes.
                pub fn set_half(&mut self, place: Place, value: u16) {
                    self.get_mut(place).copy_from_slice(&value.to_ne_bytes());
                }

                /// A field of eight bytes.
                #[must_use]
                pub fn long(&self, place: Place) -> u64 {
                    u64::from_ne_bytes(self.get(place).try_into().expect("eight bytes"))
                }

                /// Writes a field of eight bytes.
                pub fn set_long(&mut self, place: Place, value: u64) {
                    self.get_mut(place).copy_from_slice(&value.to_ne_bytes());
                }
            }
        )+

        /// Every struct: name, size, and its fields by name.
        #[cfg(test)]
        pub(crate) const STRUCTS: &[(&str, usize, &[(&str, Place)])] = &[
            $(($text, $size, &[$((stringify!($field), $name::$field()),)+]),)+
        ];
    };
}

/// A range of bytes in a struct.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Where it begins.
    pub offset: usize,
    /// How many bytes it has.
    pub size: usize,
}

structs! {
    /// `struct identity`.
    IdentityValue = "identity", 56 bytes {
        netns: 0, 8;
        number: 8, 4;
        flags: 12, 4;
        ipv4: 16, 4;
        loopback4: 20, 4;
        ipv6: 24, 16;
        loopback6: 40, 16;
    }
    /// `struct owner`.
    Owner = "owner", 8 bytes {
        number: 0, 4;
        flags: 4, 4;
    }
    /// `struct record`.
    Record = "record", 872 bytes {
        netns: 0, 8;
        state: 8, 4;
        number: 12, 4;
        identity_flags: 16, 4;
        flags: 20, 4;
        interface: 24, 4;
        address_count: 28, 4;
        ours: 32, 4;
        declared_by: 36, 4;
        addresses: 40, 256;
        name: 296, 64;
        path: 360, 512;
    }
    /// `struct counters`.
    CountersValue = "counters", 160 bytes {
        egress: 0, 16;
        ingress: 16, 16;
        refusals: 32, 128;
    }
    /// `struct port_rule`.
    PortRule = "port_rule", 8 bytes {
        protocol: 0, 1;
        allows: 1, 1;
        first: 2, 2;
        last: 4, 2;
        padding: 6, 2;
    }
    /// `struct policy`.
    Policy = "policy", 216 bytes {
        index: 0, 4;
        flags: 4, 4;
        group: 8, 4;
        talk_count: 12, 4;
        service_count: 16, 4;
        padding: 20, 4;
        talks: 24, 64;
        services: 88, 128;
    }
    /// `struct prefix_key`.
    PrefixKey = "prefix_key", 24 bytes {
        prefix_length: 0, 4;
        policy: 4, 4;
        address: 8, 16;
    }
    /// `struct prefix`.
    Prefix = "prefix", 8 bytes {
        list: 0, 4;
        allows: 4, 2;
        metadata: 6, 2;
    }
    /// `struct part_key`.
    PartKey = "part_key", 8 bytes {
        policy: 0, 4;
        part: 4, 4;
    }
    /// `struct rule_list`.
    RuleList = "rule_list", 264 bytes {
        count: 0, 4;
        padding: 4, 4;
        rules: 8, 256;
    }
    /// `struct tally`.
    Tally = "tally", 16 bytes {
        listeners: 0, 8;
        host_service: 8, 8;
    }
    /// `struct dialer`.
    Dialer = "dialer", 16 bytes {
        cookie: 0, 8;
        number: 8, 4;
        padding: 12, 4;
    }
    /// `struct tcp_tally`.
    TcpTally = "tcp_tally", 48 bytes {
        traffic: 0, 32;
        dialers: 32, 8;
        ingress_loopback: 40, 8;
    }
}

/// Addresses of a record.
pub const RECORD_ADDRESSES_MAX: usize = 16;
/// Bytes of a name.
pub const RECORD_NAME_MAX: usize = 64;
/// Bytes of a path.
pub const RECORD_PATH_MAX: usize = 512;
/// Reasons for which there is room.
pub const REFUSALS_MAX: usize = 16;
/// Rules of one list.
pub const RULES_MAX: usize = 32;
/// Host services of one policy.
pub const SERVICES_MAX: usize = 16;
/// Groups that one policy may name.
pub const TALKS_MAX: usize = 16;
/// Bytes of a part of a text.
pub const TEXT_PART: usize = 2048;
/// Sockets of one identity that may listen at the same time, UDP's receivers among them.
pub const LISTENERS_OF_ONE_MAX: usize = 1024;
/// Bytes of `struct dialer_key`.
pub const DIALER_KEY: usize = 36;
/// Bytes of the key of a socket that listens or receives.
pub const LISTENER_KEY: usize = 24;
/// Where the number of its identity is in it.
pub const LISTENER_KEY_NUMBER: usize = 16;

/// `enum identity_flag`.
pub mod identity_flag {
    /// The entry holds.
    pub const ACTIVE: u32 = 1;
    /// Sockets other than TCP and UDP may be made.
    pub const ALLOW_OTHER: u32 = 2;
    /// Everybody on the host may reach the loopback.
    pub const ALLOW_LOOPBACK: u32 = 4;
    /// Ports that nobody listens to lead to the host's services.
    pub const ALLOW_HOST: u32 = 8;
    /// No sockets but TCP's.
    pub const TCP_ONLY: u32 = 16;
    /// Sockets of IPv6 begin with `IPV6_V6ONLY`.
    pub const V6ONLY: u32 = 32;
    /// It has several addresses, and UDP.
    pub const SEVERAL: u32 = 64;
}

/// `enum owner_flag`.
pub mod owner_flag {
    /// It is a loopback address.
    pub const LOOPBACK: u32 = 1;
    /// As [`super::identity_flag::ALLOW_HOST`].
    pub const ALLOW_HOST: u32 = 2;
    /// As [`super::identity_flag::TCP_ONLY`].
    pub const TCP_ONLY: u32 = 4;
    /// As [`super::identity_flag::ALLOW_LOOPBACK`].
    pub const ALLOW_LOOPBACK: u32 = 8;
    /// As [`super::identity_flag::SEVERAL`].
    pub const SEVERAL: u32 = 16;
}

/// `enum record_state`.
pub mod record_state {
    /// Being added.
    pub const BUILDING: u32 = 1;
    /// In use.
    pub const COMPLETE: u32 = 2;
    /// Being removed.
    pub const REMOVING: u32 = 3;
    /// Another cgroup has the identity now, and sockets of this one are open.
    pub const FORMER: u32 = 4;
}

/// `enum record_flag`.
pub mod record_flag {
    /// The loopback address for IPv6 was put on an interface.
    pub const LOOPBACK6: u32 = 1;
    /// The cgroup was made for it, and goes with it.
    pub const OWN_CGROUP: u32 = 2;
}

/// `enum policy_flag`.
pub mod policy_flag {
    /// What no rule covers may be reached.
    pub const ALLOW: u32 = 1;
    /// There are prefixes to look up.
    pub const PREFIXES: u32 = 2;
    /// All services of the host.
    pub const HOST_ALL: u32 = 4;
    /// Pings of the host.
    pub const HOST_ICMP: u32 = 8;
    /// Identities of the same group.
    pub const SAME_GROUP: u32 = 16;
}

/// The enums of the header whose numbers are above, and the names of the refusals.
#[cfg(test)]
pub(crate) const ENUMS: &[(&str, u32)] = &[
    ("IDENTITY_ACTIVE", identity_flag::ACTIVE),
    ("IDENTITY_ALLOW_OTHER", identity_flag::ALLOW_OTHER),
    ("IDENTITY_ALLOW_LOOPBACK", identity_flag::ALLOW_LOOPBACK),
    ("IDENTITY_ALLOW_HOST", identity_flag::ALLOW_HOST),
    ("IDENTITY_TCP_ONLY", identity_flag::TCP_ONLY),
    ("IDENTITY_V6ONLY", identity_flag::V6ONLY),
    ("IDENTITY_SEVERAL", identity_flag::SEVERAL),
    ("OWNER_LOOPBACK", owner_flag::LOOPBACK),
    ("OWNER_ALLOW_HOST", owner_flag::ALLOW_HOST),
    ("OWNER_TCP_ONLY", owner_flag::TCP_ONLY),
    ("OWNER_ALLOW_LOOPBACK", owner_flag::ALLOW_LOOPBACK),
    ("OWNER_SEVERAL", owner_flag::SEVERAL),
    ("RECORD_BUILDING", record_state::BUILDING),
    ("RECORD_COMPLETE", record_state::COMPLETE),
    ("RECORD_REMOVING", record_state::REMOVING),
    ("RECORD_FORMER", record_state::FORMER),
    ("RECORD_LOOPBACK6", record_flag::LOOPBACK6),
    ("RECORD_OWN_CGROUP", record_flag::OWN_CGROUP),
    ("POLICY_ALLOW", policy_flag::ALLOW),
    ("POLICY_PREFIXES", policy_flag::PREFIXES),
    ("POLICY_HOST_ALL", policy_flag::HOST_ALL),
    ("POLICY_HOST_ICMP", policy_flag::HOST_ICMP),
    ("POLICY_SAME_GROUP", policy_flag::SAME_GROUP),
];

/// An address as `struct address`: 16 bytes in network order, IPv4 as `::ffff:a.b.c.d`.
#[must_use]
pub fn address_bytes(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// The address in `struct address`.
#[must_use]
pub fn address_of(bytes: [u8; 16]) -> IpAddr {
    let address = Ipv6Addr::from(bytes);
    match address.to_ipv4_mapped() {
        Some(address) => IpAddr::V4(address),
        None => IpAddr::V6(address),
    }
}

impl IdentityValue {
    /// Writes an IPv4 address.
    pub fn set_ipv4(&mut self, place: Place, address: Ipv4Addr) {
        self.get_mut(place).copy_from_slice(&address.octets());
    }

    /// Writes an IPv6 address.
    pub fn set_ipv6(&mut self, place: Place, address: Ipv6Addr) {
        self.get_mut(place).copy_from_slice(&address.octets());
    }
}

#[cfg(test)]
mod tests;
