//! Where this kernel says whether its routes depend on ports, by the types that it tells of itself
//! (`CONFIG_DEBUG_INFO_BTF`).

use crate::{abi::NetnsPlaces, btf::Btf};

const BYTE: u32 = 8;
const POINTER: u32 = 64;
const COUNT: u32 = 32;

/// `None` where the kernel says nothing that is understood: a kernel without rules or several next hops lacks the
/// fields.
pub(crate) fn places_by(types: &Btf) -> Option<NetnsPlaces> {
    let place = |path: &[(&str, &str)], width| place_of(types, path, width);
    let of_ipv4 = |field, width| place(&[("net", "ipv4"), ("netns_ipv4", field)], width);
    let of_ipv6 = |path: &[(&str, &str)], width| {
        let path = [&[("net", "ipv6")], path].concat();
        place_of(types, &path, width)
    };
    Some(NetnsPlaces {
        device: place(&[("sk_buff", "dev")], POINTER)?,
        // A struct with nothing but a pointer.
        netns: place(&[("net_device", "nd_net")], POINTER)?,
        rules4: of_ipv4("fib_rules_require_fldissect", COUNT)?,
        rules6: of_ipv6(&[("netns_ipv6", "fib6_rules_require_fldissect")], COUNT)?,
        multipath4: of_ipv4("sysctl_fib_multipath_hash_policy", BYTE)?,
        multipath6: of_ipv6(
            &[
                ("netns_ipv6", "sysctl"),
                ("netns_sysctl_ipv6", "multipath_hash_policy"),
            ],
            BYTE,
        )?,
    })
}

/// Offset in bytes of a field in the first struct of a path, by structs inside structs. The last field has so many
/// bits.
fn place_of(types: &Btf, path: &[(&str, &str)], width: u32) -> Option<u16> {
    let fields = path
        .iter()
        .map(|(name, field)| types.bits(name, field))
        .collect::<Option<Vec<_>>>()?;
    let position = fields
        .iter()
        .try_fold(0_u32, |sum, field| sum.checked_add(field.position))?;
    let fits = fields.last()?.width == width && position.is_multiple_of(BYTE);
    u16::try_from(position / BYTE).ok().filter(|_| fits)
}

#[cfg(test)]
mod tests {
    use super::{Btf, NetnsPlaces, places_by};

    const SOUND: &str = "
        struct net;
        typedef struct { struct net *net; } possible_net_t;
        struct net_device { long others[3]; possible_net_t nd_net; };
        struct sk_buff { union { struct { void *next, *prev; struct net_device *dev; }; long tree[3]; }; };
        struct netns_ipv4 { int many[5]; unsigned fib_rules_require_fldissect;
            unsigned char other, sysctl_fib_multipath_hash_policy; };
        struct netns_sysctl_ipv6 { int table; unsigned char multipath_hash_policy; };
        struct netns_ipv6 { struct netns_sysctl_ipv6 sysctl; unsigned fib6_rules_require_fldissect; };
        struct net { long first; struct netns_ipv4 ipv4; struct netns_ipv6 ipv6; };
        struct sk_buff packet;
        struct net_device device;
        struct net netns;
    ";

    #[test]
    fn fields_are_counted_from_the_struct_that_a_pointer_leads_to() {
        let expected = NetnsPlaces {
            device: 16,
            netns: 24,
            rules4: 8 + 20,
            rules6: 8 + 28 + 8,
            multipath4: 8 + 25,
            multipath6: 8 + 28 + 4,
        };
        assert_eq!(places_by(&Btf::compiled(SOUND)), Some(expected));
    }

    #[test]
    fn what_is_not_as_expected_is_not_used() {
        for (part, other) in [
            ("*dev", "*device"),
            ("{ struct net *net; }", "{ struct net *net; int more; }"),
            ("unsigned fib_rules", "unsigned char fib_rules"),
            ("fib6_rules_require_fldissect", "fib6_rules"),
            ("unsigned char multipath", "unsigned multipath"),
            ("unsigned char other, sysctl", "unsigned other: 1, sysctl"),
            ("long first", "long first[65536]"),
        ] {
            let changed = SOUND.replace(part, other);
            assert_ne!(changed, SOUND);
            assert_eq!(places_by(&Btf::compiled(&changed)), None, "{part}");
        }
    }
}
