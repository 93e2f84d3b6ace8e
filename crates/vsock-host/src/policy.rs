//! Whether a policy can be carried out, decided before any of it is.
//!
//! Rights are the daemon's business: it knows who may manage a pool. Here is what has to be true whoever
//! asks. A policy is taken as a whole or not at all.

use std::path::Path;

use sandwire_api::vsock::{PortRange, VsockDestination, VsockKind, VsockPolicy, VsockRule};

use crate::{directory::host_path, listener::PATH_MAX};

/// Most rules of a policy.
pub const RULES_MAX: usize = 256;
/// Most ports in all rules of a guest whose VMM owns the device: each is a socket that we listen on.
pub const HYBRID_PORTS_MAX: u64 = 256;

/// Why a policy isn't taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// Too many rules.
    #[error(
        "the vsock policy has {0} rules; {RULES_MAX} are the most, and a range of ports is one"
    )]
    TooManyRules(usize),
    /// Two rules for one port.
    #[error(
        "rules {first} and {second} of the vsock policy both cover port {port}; a port leads to one place"
    )]
    Overlap {
        /// The earlier rule, counted from 1.
        first: usize,
        /// The later one.
        second: usize,
        /// The lowest port that both cover.
        port: u32,
    },
    /// More listening sockets than we make.
    #[error(
        "rule {rule} (port {port}) of the vsock policy brings the ports to {ports}; {HYBRID_PORTS_MAX} are the \
         most for a VMM that owns its vsock device, as each is a socket of its own"
    )]
    TooManyPorts {
        /// The rule, counted from 1.
        rule: usize,
        /// Its ports.
        port: PortRange,
        /// Ports up to and including that rule.
        ports: u64,
    },
    /// One rule that makes no sense.
    #[error("rule {rule} (port {port}) of the vsock policy: {defect}")]
    Rule {
        /// The rule, counted from 1.
        rule: usize,
        /// Its ports.
        port: PortRange,
        /// What is wrong with it.
        defect: Defect,
    },
}

/// What is wrong with a rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Defect {
    /// A relative path.
    #[error("'{0}' is not an absolute path; a service has no working directory to go by")]
    NotAbsolute(String),
    /// A path with a zero byte.
    #[error("the path {0:?} has a zero byte in it")]
    ZeroByte(String),
    /// A path that no socket can have.
    #[error("the path {path} is {length} bytes long; {PATH_MAX} are the most for a Unix socket")]
    TooLong {
        /// The path.
        path: String,
        /// Its length.
        length: usize,
    },
    /// An address that nobody can be reached at.
    #[error("{0} is no address to connect to; name a host's address and a port above 0")]
    NoAddress(std::net::SocketAddr),
    /// An AF_VSOCK address that nobody has.
    #[error(
        "{cid}:{port} is no vsock address to connect to; 0 and 4294967295 are nobody's CID, 4294967295 nobody's port"
    )]
    NoVsockAddress {
        /// The CID.
        cid: u32,
        /// The port.
        port: u32,
    },
    /// The last ports of the range lead to ports that don't exist.
    #[error("from port {port} of the sandbox on there are no {ports} ports")]
    PastLastPort {
        /// The sandbox's first port.
        port: u32,
        /// How many there should be.
        ports: u64,
    },
    /// Nobody could write the identity line.
    #[error(
        "the VMM connects to the owner's socket itself, so nobody could write the identity line"
    )]
    NoIdentity,
}

/// Whether a guest of that kind, with that Unix socket, can have this policy.
///
/// # Errors
/// The first thing that is wrong.
pub fn check(policy: &VsockPolicy, kind: VsockKind, socket: &Path) -> Result<(), PolicyError> {
    let rules = &policy.rules;
    if rules.len() > RULES_MAX {
        return Err(PolicyError::TooManyRules(rules.len()));
    }
    let mut listened: u64 = 0;
    for (index, rule) in rules.iter().enumerate() {
        let (number, port) = (index + 1, rule.port);
        check_rule(rule, kind, socket).map_err(|defect| PolicyError::Rule {
            rule: number,
            port,
            defect,
        })?;
        if let Some(earlier) = rules[..index]
            .iter()
            .position(|other| other.port.overlaps(port))
        {
            return Err(PolicyError::Overlap {
                first: earlier + 1,
                second: number,
                port: rules[earlier].port.first().max(port.first()),
            });
        }
        if kind == VsockKind::Hybrid && rule.to != VsockDestination::Host {
            listened += ports(port);
            if listened > HYBRID_PORTS_MAX {
                return Err(PolicyError::TooManyPorts {
                    rule: number,
                    port,
                    ports: listened,
                });
            }
        }
    }
    Ok(())
}

/// How many ports the range has.
fn ports(range: PortRange) -> u64 {
    u64::from(range.last() - range.first()) + 1
}

fn check_rule(rule: &VsockRule, kind: VsockKind, socket: &Path) -> Result<(), Defect> {
    let hybrid = kind == VsockKind::Hybrid;
    match &rule.to {
        VsockDestination::Host if hybrid && rule.identity => return Err(Defect::NoIdentity),
        VsockDestination::Host => check_path(&host_path(socket, rule.port.last()))?,
        VsockDestination::Unix { path } if path.contains('\0') => {
            return Err(Defect::ZeroByte(path.clone()));
        }
        VsockDestination::Unix { path } => check_path(Path::new(path))?,
        VsockDestination::Tcp { address } => {
            if address.port() == 0 || address.ip().is_unspecified() || address.ip().is_multicast() {
                return Err(Defect::NoAddress(*address));
            }
        }
        VsockDestination::Vsock { cid, port } => {
            if *cid == 0 || *cid == u32::MAX || *port == u32::MAX {
                return Err(Defect::NoVsockAddress {
                    cid: *cid,
                    port: *port,
                });
            }
        }
        VsockDestination::Sandbox { port, .. } => {
            let ports = ports(rule.port);
            if u64::from(*port) + ports > u64::from(u32::MAX) {
                return Err(Defect::PastLastPort { port: *port, ports });
            }
        }
    }
    if hybrid && rule.to != VsockDestination::Host {
        // What the VMM connects to.
        check_path(&host_path(socket, rule.port.last()))?;
    }
    Ok(())
}

fn check_path(path: &Path) -> Result<(), Defect> {
    let shown = path.display().to_string();
    let length = path.as_os_str().len();
    if !path.is_absolute() {
        return Err(Defect::NotAbsolute(shown));
    }
    if length > PATH_MAX {
        return Err(Defect::TooLong {
            path: shown,
            length,
        });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(port: &str, to: &str) -> VsockRule {
        let text = format!(r#"{{"port": "{port}", "to": {to}}}"#);
        serde_json::from_str(&text).expect("a rule")
    }

    fn policy<const N: usize>(rules: [VsockRule; N]) -> VsockPolicy {
        VsockPolicy {
            rules: rules.to_vec(),
        }
    }

    fn refused(policy: &VsockPolicy, kind: VsockKind) -> String {
        check(policy, kind, Path::new("/run/web.1/vsock.sock"))
            .expect_err("it can't be carried out")
            .to_string()
    }

    const HOST: &str = r#"{"kind": "host"}"#;
    const UNIX: &str = r#"{"kind": "unix", "path": "/run/service"}"#;

    #[test]
    fn an_overlap_is_named_by_both_rules_and_the_port() {
        let rules = policy([
            rule("1000-1999", HOST),
            rule("5", HOST),
            rule("1999-2003", UNIX),
        ]);
        let error = refused(&rules, VsockKind::VhostUser);
        assert!(error.starts_with("rules 1 and 3 "), "{error}");
        assert!(error.contains("port 1999"), "{error}");
    }

    #[test]
    fn two_hundred_and_fifty_six_rules_and_no_more() {
        let mut rules = VsockPolicy {
            rules: (0..256).map(|port| rule(&port.to_string(), HOST)).collect(),
        };
        let socket = Path::new("/run/web.1/vsock.sock");
        assert_eq!(check(&rules, VsockKind::VhostUser, socket), Ok(()));
        rules.rules.push(rule("9999", HOST));
        assert_eq!(
            check(&rules, VsockKind::VhostUser, socket),
            Err(PolicyError::TooManyRules(257))
        );
    }

    #[test]
    fn a_bad_destination_is_named_by_rule_and_port() {
        let long = format!(r#"{{"kind": "unix", "path": "/{}"}}"#, "x".repeat(107));
        for (to, says) in [
            (
                r#"{"kind": "unix", "path": "service"}"#,
                "not an absolute path",
            ),
            (r#"{"kind": "unix", "path": "/a\u0000b"}"#, "zero byte"),
            (long.as_str(), "108 bytes long; 107 are the most"),
            (r#"{"kind": "tcp", "address": "0.0.0.0:80"}"#, "no address"),
            (r#"{"kind": "tcp", "address": "[::1]:0"}"#, "no address"),
            (
                r#"{"kind": "vsock", "cid": 4294967295, "port": 1}"#,
                "no vsock address",
            ),
            (
                r#"{"kind": "sandbox", "lease": "db", "port": 4294967294}"#,
                "no 2 ports",
            ),
        ] {
            let error = refused(
                &policy([rule("1", UNIX), rule("7-8", to)]),
                VsockKind::VhostUser,
            );
            assert!(
                error.starts_with("rule 2 (port 7-8) of the vsock policy: "),
                "{error}"
            );
            assert!(error.contains(says), "{error}");
        }
    }

    #[test]
    fn a_vmm_that_owns_its_device_has_256_ports_beside_the_owners_own() {
        let socket = Path::new("/run/web.1/vsock.sock");
        let fits = policy([rule("0-99999", HOST), rule("100000-100255", UNIX)]);
        assert_eq!(check(&fits, VsockKind::Hybrid, socket), Ok(()));
        let over = policy([rule("1-256", UNIX), rule("300", UNIX)]);
        let error = refused(&over, VsockKind::Hybrid);
        assert!(
            error.contains("rule 2 (port 300)") && error.contains("257"),
            "{error}"
        );
        assert_eq!(check(&over, VsockKind::VhostUser, socket), Ok(()));
    }

    #[test]
    fn an_identity_line_needs_somebody_who_writes_it() {
        let mut rule = rule("1", HOST);
        rule.identity = true;
        let error = refused(&policy([rule.clone()]), VsockKind::Hybrid);
        assert!(error.contains("identity line"), "{error}");
        let socket = Path::new("/run/web.1/vsock.sock");
        assert_eq!(check(&policy([rule]), VsockKind::VhostUser, socket), Ok(()));
    }
}
