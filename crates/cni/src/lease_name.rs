//! Names of leases: which network and which container's interface a lease is of can be told from its name alone.
//!
//! `cni-NETWORK-CONTAINER-ALL`: six bytes of the hash of the network's name, the first twelve characters of the
//! container's id for people to recognise, and sixteen bytes of the hash of everything. The daemon keeps nothing but the
//! name, and the plugin keeps nothing at all. It must stay what it is: after an upgrade, `DEL` has to find what `ADD` of the
//! older version has made.

use sandwire_api::name::Name;
use sha2::{Digest, Sha256};

const NETWORK_BYTES: usize = 6;
const CONTAINER_CHARACTERS: usize = 12;
const ALL_BYTES: usize = 16;

/// How the names of all leases of a network begin. `own_interface` is what a later plugin of a chain makes, else empty:
/// such a plugin is a network of its own, which is collected by itself.
pub(crate) fn prefix(network: &str, own_interface: &str) -> String {
    format!("cni-{}-", hash(&[network, own_interface], NETWORK_BYTES))
}

/// Name of a container's lease.
pub(crate) fn of(network: &str, own_interface: &str, container: &str, interface: &str) -> Name {
    let recognised: String = container
        .chars()
        .take(CONTAINER_CHARACTERS)
        .map(|character| match character.to_ascii_lowercase() {
            '.' => '-',
            other => other,
        })
        .collect();
    let all = hash(&[network, own_interface, container, interface], ALL_BYTES);
    let name = format!("{}{recognised}-{all}", prefix(network, own_interface));
    name.parse().expect(
        "identifiers and hexadecimal digits are in the alphabet of names, and 62 are short enough",
    )
}

/// The first bytes of a hash of several texts, in hexadecimal. No two lists of texts without zero bytes are hashed
/// alike.
fn hash(texts: &[&str], bytes: usize) -> String {
    let mut hasher = Sha256::new();
    for text in texts {
        hasher.update(text);
        hasher.update([0]);
    }
    let digest = hasher.finalize();
    digest[..bytes]
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_name_stays_what_it_was_in_the_first_version() {
        let name = of("pods", "", "3F2.a9c81d77e0b45", "eth0");
        assert_eq!(
            name.as_str(),
            "cni-dd49c4a244e0-3f2-a9c81d77-e28e89307795b05795a1a53433202a79"
        );
    }

    proptest! {
        #[test]
        fn every_identifier_makes_a_name_with_the_networks_prefix(
            network in "[a-zA-Z0-9][a-zA-Z0-9_.-]{0,80}",
            container in "[a-zA-Z0-9][a-zA-Z0-9_.-]{0,200}",
            interface in "[a-z0-9.@-]{1,15}",
        ) {
            let name = of(&network, "", &container, &interface);
            prop_assert!(name.as_str().starts_with(&prefix(&network, "")));
            prop_assert_ne!(&name, &of(&network, "net1", &container, &interface));
            prop_assert_ne!(&name, &of(&network, "", &format!("{container}0"), &interface));
            prop_assert_ne!(&name, &of(&format!("{network}0"), "", &container, &interface));
        }
    }

    #[test]
    fn texts_that_are_alike_put_together_are_told_apart() {
        let names = [
            of("a", "", "bc", "eth0"),
            of("a", "", "b", "ceth0"),
            of("ab", "", "c", "eth0"),
            of("a", "b", "c", "eth0"),
        ];
        for (index, name) in names.iter().enumerate() {
            assert!(!names[..index].contains(name));
        }
    }
}
