//! Names of kernel objects, and back.
//!
//! Names of instances and pools have neither dots nor colons ([`sandwire_api::name::Name`]), so a
//! name made here is read back in one way only.

use sandwire_api::pool::PoolSpec;

use super::SlotNumber;
use crate::error::PlanError;

/// Folder that `ip netns` and jailers look into.
pub const NETNS_FOLDER: &str = "/run/netns";
/// Name of the veth's end inside each slot.
pub const SLOT_INTERFACE: &str = "uplink0";

/// `IFNAMSIZ` less the closing zero.
const INTERFACE_NAME_BYTES_MAX: usize = 15;
const INTERFACE_PREFIX: &str = "sw";
const WITHDRAWN_PREFIX: &str = "sx";
const NETNS_PREFIX: &str = "sandwire";
/// Five bits each; no letter is easily taken for another.
const TAG_ALPHABET: &[u8; 32] = b"abcdefghijkmnpqrstuvwxyz23456789";
const TAG_CHARACTERS: usize = 6;

/// Six characters that stand for an instance in interface names.
#[must_use]
pub fn instance_tag(instance: &str) -> String {
    tag(&[instance])
}

/// Six characters that stand for a pool of an instance in interface names.
#[must_use]
pub fn pool_tag(instance: &str, pool: &str) -> String {
    tag(&[instance, pool])
}

/// The number that a pool's tag writes, below 2^30.
#[must_use]
pub fn pool_number(instance: &str, pool: &str) -> u32 {
    u32::try_from(hash(&[instance, pool]) >> 34).expect("30 bits are left")
}

/// Name of the interface that holds the host's own address of each clone prefix.
#[must_use]
pub fn shared_interface(instance: &str) -> String {
    format!("{INTERFACE_PREFIX}{}", instance_tag(instance))
}

/// Name of an interface that leads to a slot, from its pool's tag. In pools of netns slots the number
/// is the slot's; in pools of host slots it counts interfaces.
#[must_use]
pub fn host_interface(pool_tag: &str, number: SlotNumber) -> String {
    format!("{INTERFACE_PREFIX}{pool_tag}-{number}")
}

/// Name that a host slot's TAP gets when it is withdrawn: nobody looks for it there.
#[must_use]
pub fn withdrawn(tap: &str) -> String {
    let rest = tap.strip_prefix(INTERFACE_PREFIX).unwrap_or(tap);
    format!("{WITHDRAWN_PREFIX}{rest}")
}

/// Pool tag and number of a host end, if the name has that form.
#[must_use]
pub fn parse_host_interface(name: &str) -> Option<(&str, SlotNumber)> {
    let (tag, number) = name.strip_prefix(INTERFACE_PREFIX)?.split_once('-')?;
    let known = tag.len() == TAG_CHARACTERS && tag.bytes().all(|byte| TAG_ALPHABET.contains(&byte));
    known.then_some(())?;
    Some((tag, parse_number(number)?))
}

/// Name of a slot's network namespace: the file under [`NETNS_FOLDER`].
#[must_use]
pub fn netns(instance: &str, pool: &str, number: SlotNumber) -> String {
    format!("{NETNS_PREFIX}.{instance}.{pool}.{number}")
}

/// Instance, pool and number of a namespace, if the name has that form.
#[must_use]
pub fn parse_netns(name: &str) -> Option<(&str, &str, SlotNumber)> {
    let mut parts = name.split('.');
    let known = parts.next()? == NETNS_PREFIX;
    let (instance, pool, number) = (parts.next()?, parts.next()?, parts.next()?);
    (known && parts.next().is_none()).then_some(())?;
    Some((instance, pool, parse_number(number)?))
}

/// Alias of a slot's host end, from which its owner can be told.
#[must_use]
pub fn host_alias(instance: &str, pool: &str, number: SlotNumber) -> String {
    format!("{NETNS_PREFIX}:{instance}:{pool}:{number}")
}

/// Instance, pool and number of an alias, if it has that form.
#[must_use]
pub fn parse_alias(alias: &str) -> Option<(&str, &str, SlotNumber)> {
    let mut parts = alias.split(':');
    let known = parts.next()? == NETNS_PREFIX;
    let (instance, pool, number) = (parts.next()?, parts.next()?, parts.next()?);
    (known && parts.next().is_none()).then_some(())?;
    Some((instance, pool, parse_number(number)?))
}

/// Names of a slot's TAPs: the pool's name, and for further interfaces its number counted on.
pub(super) fn taps(spec: &PoolSpec) -> Result<Vec<String>, PlanError> {
    let first = &spec.tap.name;
    check_tap(first)?;
    if spec.nics <= 1 {
        return Ok(vec![first.clone()]);
    }
    let stem = first.trim_end_matches(|last: char| last.is_ascii_digit());
    let digits = &first[stem.len()..];
    let from: u32 = digits
        .parse()
        .map_err(|_| refuse_tap(first, "must end in a number if a sandbox has several"))?;
    let width = digits.len();
    (0..u32::from(spec.nics))
        .map(|nic| {
            let number = from
                .checked_add(nic)
                .ok_or_else(|| refuse_tap(first, "ends in a number that is too large"))?;
            let name = format!("{stem}{number:0width$}");
            check_tap(&name).map(|()| name)
        })
        .collect()
}

/// What the kernel's `dev_valid_name` takes, less what would mean something else to it or to us.
fn check_tap(name: &str) -> Result<(), PlanError> {
    let refuse = |reason| Err(refuse_tap(name, reason));
    if name.is_empty() || name.len() > INTERFACE_NAME_BYTES_MAX {
        return refuse("must have 1 to 15 bytes");
    }
    if name.bytes().any(|byte| !byte.is_ascii_graphic()) {
        return refuse("must be printable ASCII without spaces");
    }
    if name.contains(['/', ':', '%', '"', '\\']) {
        return refuse("must not contain '/', ':', '%', '\"' or '\\'");
    }
    // The kernel keeps per-interface settings in folders beside ones called `all` and `default`.
    if [".", "..", "lo", "all", "default", SLOT_INTERFACE].contains(&name) {
        return refuse("has a meaning of its own");
    }
    Ok(())
}

fn refuse_tap(name: &str, reason: &'static str) -> PlanError {
    PlanError::TapName {
        name: name.chars().take(40).collect(),
        reason,
    }
}

/// A number in the one way that we write it.
fn parse_number(text: &str) -> Option<SlotNumber> {
    let number = SlotNumber(text.parse().ok()?);
    (number.to_string() == text).then_some(number)
}

/// FNV-1a, which never changes.
fn hash(parts: &[&str]) -> u64 {
    const OFFSET_BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let mut hash = OFFSET_BASIS;
    for part in parts {
        // The closing zero keeps ("ab", "c") apart from ("a", "bc").
        for byte in part.bytes().chain([0]) {
            hash = (hash ^ u64::from(byte)).wrapping_mul(PRIME);
        }
    }
    hash
}

/// Hashes the parts and writes 30 bits of the result: FNV's high bits mix best.
fn tag(parts: &[&str]) -> String {
    let hash = hash(parts);
    (0..TAG_CHARACTERS)
        .map(|place| {
            let five_bits = (hash >> (64 - 5 * (place + 1))) & 31;
            char::from(TAG_ALPHABET[usize::try_from(five_bits).unwrap_or_default()])
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_never_change() {
        // Kernel objects of a running daemon bear these; a new version must find them again.
        assert_eq!(instance_tag("default"), "vdk2gt");
        assert_eq!(pool_tag("default", "web"), "j67hu4");
        assert_ne!(pool_tag("a", "bc"), pool_tag("ab", "c"));
        // Five bits a letter, `j` being number 9.
        assert_eq!(pool_number("default", "web") >> 25, 9);
    }

    #[test]
    fn names_read_back() {
        let number = SlotNumber(999_999);
        let tag = pool_tag("default", "web");
        let interface = host_interface(&tag, number);
        assert!(interface.len() <= INTERFACE_NAME_BYTES_MAX, "{interface}");
        assert_eq!(parse_host_interface(&interface), Some((&*tag, number)));
        let name = netns("default", "web", number);
        assert_eq!(parse_netns(&name), Some(("default", "web", number)));
    }

    #[test]
    fn foreign_names_are_not_ours() {
        for name in [
            "",
            "sandwire",
            "sandwire.a.b",
            "sandwire.a.b.c",
            "sandwire.a.b.01",
            "sandwire.a.b.+1",
            "sandwire.a.b.1.2",
            "other.a.b.1",
        ] {
            assert_eq!(parse_netns(name), None, "{name:?}");
        }
        for name in [
            "",
            "sw",
            "swabcdef",
            "swabcdef-",
            "swabcdef-01",
            "swabcde-1",
            "eth0-1",
        ] {
            assert_eq!(parse_host_interface(name), None, "{name:?}");
        }
    }
}
