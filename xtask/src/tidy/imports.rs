//! Who may depend on whom. Dependencies point one way; this table is the only list of them.

use std::path::Path;

use super::{Finding, finding};
use crate::workspace::Package;

/// Each package of the workspace and the packages of the workspace that it may depend on.
const ALLOWED: &[(&str, &[&str])] = &[
    ("sandwire-api", &[]),
    ("sandwire-bpf-compiler", &[]),
    ("sandwire-cni", &["sandwire-api"]),
    ("sandwire-engine", &["sandwire-kernel-net"]),
    ("sandwire-kernel-net", &[]),
    ("sandwire-impair", &["sandwire-api", "sandwire-engine"]),
    (
        "sandwire-datapath",
        &[
            "sandwire-api",
            "sandwire-bpf-compiler",
            "sandwire-kernel-net",
        ],
    ),
    (
        "sandwire-identity",
        &[
            "sandwire-api",
            "sandwire-bpf-compiler",
            "sandwire-datapath",
            "sandwire-kernel-net",
        ],
    ),
    (
        "sandwire-impair-host",
        &[
            "sandwire-api",
            "sandwire-datapath",
            "sandwire-engine",
            "sandwire-impair",
            "sandwire-kernel-net",
        ],
    ),
    (
        "sandwire-slot",
        &["sandwire-api", "sandwire-datapath", "sandwire-kernel-net"],
    ),
    (
        "sandwire-daemon",
        &[
            "sandwire-api",
            "sandwire-datapath",
            "sandwire-identity",
            "sandwire-impair-host",
            "sandwire-kernel-net",
            "sandwire-slot",
            "sandwire-vsock-host",
        ],
    ),
    (
        "sandwire-bench",
        &[
            "sandwire-api",
            "sandwire-bpf-compiler",
            "sandwire-datapath",
            "sandwire-engine",
            "sandwire-identity",
            "sandwire-impair",
            "sandwire-kernel-net",
            "sandwire-relay",
            "sandwire-user-mode-linux",
            "sandwire-vsock-guest",
            "sandwire-vsock-host",
        ],
    ),
    (
        "sandwire-cli",
        &[
            "sandwire-api",
            "sandwire-bench",
            "sandwire-cni",
            "sandwire-daemon",
            "sandwire-datapath",
            "sandwire-engine",
            "sandwire-identity",
            "sandwire-impair",
            "sandwire-impair-host",
            "sandwire-kernel-net",
            "sandwire-rate",
            "sandwire-relay",
            "sandwire-slot",
            "sandwire-vsock-guest",
            "sandwire-vsock-host",
        ],
    ),
    ("sandwire-rate", &[]),
    (
        "sandwire-relay",
        &["sandwire-api", "sandwire-kernel-net", "sandwire-rate"],
    ),
    ("sandwire-testlab", &["sandwire-user-mode-linux"]),
    ("sandwire-user-mode-linux", &[]),
    ("sandwire-vsock-guest", &[]),
    (
        "sandwire-vsock-host",
        &["sandwire-api", "sandwire-rate", "sandwire-vsock-guest"],
    ),
    ("xtask", &["sandwire-api", TESTLAB]),
];

/// Never part of what is shipped: others may use it in tests only.
const TESTLAB: &str = "sandwire-testlab";

/// Checks the dependencies of all packages.
pub(super) fn check(packages: &[Package]) -> Vec<Finding> {
    packages.iter().flat_map(check_package).collect()
}

fn check_package(package: &Package) -> Vec<Finding> {
    let place = Path::new("xtask/src/tidy/imports.rs");
    let Some((_, allowed)) = ALLOWED.iter().find(|(name, _)| *name == package.name) else {
        let message = format!(
            "package {} is missing in the table of imports",
            package.name
        );
        return vec![finding(place, 1, message)];
    };
    let ours = |name: &str| ALLOWED.iter().any(|(known, _)| *known == name);
    package
        .dependencies
        .iter()
        .filter(|dependency| ours(&dependency.name))
        .filter(|dependency| !allowed.contains(&dependency.name.as_str()))
        .filter(|dependency| {
            dependency.name != TESTLAB || dependency.kind.as_deref() != Some("dev")
        })
        .map(|dependency| {
            let message = format!("{} may not depend on {}", package.name, dependency.name);
            finding(place, 1, message)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Dependency;

    fn package(name: &str, dependency: &str, kind: Option<&str>) -> Package {
        Package {
            name: name.to_owned(),
            dependencies: vec![Dependency {
                name: dependency.to_owned(),
                kind: kind.map(str::to_owned),
            }],
        }
    }

    #[test]
    fn an_import_against_the_direction_is_found() {
        let findings = check(&[package("sandwire-api", "sandwire-slot", None)]);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].message.contains("may not depend on"));
    }

    #[test]
    fn the_test_lab_is_for_tests() {
        assert!(check(&[package("sandwire-slot", TESTLAB, Some("dev"))]).is_empty());
        assert_eq!(check(&[package("sandwire-slot", TESTLAB, None)]).len(), 1);
    }

    #[test]
    fn a_package_that_the_table_lacks_is_found() {
        assert_eq!(check(&[package("sandwire-new", "serde", None)]).len(), 1);
    }

    #[test]
    fn packages_of_others_are_free() {
        assert!(check(&[package("sandwire-api", "serde", None)]).is_empty());
    }
}
