//! What a channel and its policy may be, as far as the request alone tells.

use std::{os::unix::ffi::OsStrExt, path::Path};

use sandwire_api::vsock::{
    HOST_CID, PortRange, VsockDestination, VsockKind, VsockPolicy, VsockRequest, VsockRule,
};

use super::SOCKET_PATH_BYTES_MAX;

/// Most rules of a policy.
pub const RULES_MAX: usize = 256;
/// Most ports in all rules of a guest whose VMM owns the device, but those of `host`, where the owner listens: each is a
/// listening socket of the service.
pub const HYBRID_PORTS_MAX: u64 = 256;

/// Why a channel or its policy can't be.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RuleError {
    /// A CID that the specification reserves.
    #[error("{field} = {cid} is reserved: a guest's CID is 3 to 4294967294")]
    Cid {
        /// Which one.
        field: &'static str,
        /// What was asked for.
        cid: u32,
    },
    /// Siblings would call the guest that they are.
    #[error(
        "virtual_cid = {cid} is also the guest's own CID, which a guest can't call: choose another"
    )]
    SameCid {
        /// The CID.
        cid: u32,
    },
    /// Too many rules.
    #[error("{count} rules are too many: a policy has at most {RULES_MAX}; use ranges of ports")]
    TooMany {
        /// How many.
        count: usize,
    },
    /// Two rules for one port.
    #[error("the rules for ports {first} and {second} overlap: a port leads to one place")]
    Overlap {
        /// One.
        first: PortRange,
        /// The other.
        second: PortRange,
    },
    /// Too many ports for a router that listens at each.
    #[error(
        "{ports} ports are too many for kind = hybrid: each is a socket beside the VMM's; at most \
         {HYBRID_PORTS_MAX} in all rules that lead elsewhere than to host"
    )]
    HybridPorts {
        /// How many.
        ports: u64,
    },
    /// A path that is no Unix socket's.
    #[error("the rule for port {port}: path '{path}' {reason}")]
    Path {
        /// The rule's port.
        port: PortRange,
        /// What was given, cut to a printable length.
        path: String,
        /// Why not.
        reason: &'static str,
    },
    /// A port that can't be connected to.
    #[error("the rule for port {port} leads to {destination}, which {reason}")]
    Port {
        /// The rule's port.
        port: PortRange,
        /// Where it leads.
        destination: String,
        /// Why not.
        reason: &'static str,
    },
    /// A line that nobody could write.
    #[error(
        "the rule for port {port}: identity is for kind = vhost_user, or for another destination than host: a VMM \
         that owns the device connects to the owner's socket itself"
    )]
    Identity {
        /// The rule's port.
        port: PortRange,
    },
}

/// Checks what is asked of a channel.
///
/// # Errors
/// Names what can't be, and why.
pub fn check_request(request: &VsockRequest) -> Result<(), RuleError> {
    for (field, cid) in [("cid", request.cid), ("virtual_cid", request.virtual_cid)] {
        if let Some(cid) = cid
            && (cid <= HOST_CID || cid == u32::MAX)
        {
            return Err(RuleError::Cid { field, cid });
        }
    }
    let own = request
        .cid
        .unwrap_or(sandwire_api::vsock::DEFAULT_GUEST_CID);
    if request.virtual_cid == Some(own) {
        return Err(RuleError::SameCid { cid: own });
    }
    match &request.policy {
        Some(policy) => check_policy(policy, request.kind),
        None => Ok(()),
    }
}

/// Checks a policy for a guest with a certain kind of device.
///
/// # Errors
/// Names the rule that can't be, and why.
pub fn check_policy(policy: &VsockPolicy, kind: VsockKind) -> Result<(), RuleError> {
    let rules = &policy.rules;
    if rules.len() > RULES_MAX {
        return Err(RuleError::TooMany { count: rules.len() });
    }
    for (place, rule) in rules.iter().enumerate() {
        let earlier = rules[..place].iter();
        if let Some(other) = earlier
            .into_iter()
            .find(|other| other.port.overlaps(rule.port))
        {
            return Err(RuleError::Overlap {
                first: other.port,
                second: rule.port,
            });
        }
        check_rule(rule, kind)?;
    }
    let listened = rules
        .iter()
        .filter(|rule| rule.to != VsockDestination::Host);
    let ports: u64 = listened.map(|rule| ports_of(rule.port)).sum();
    if kind == VsockKind::Hybrid && ports > HYBRID_PORTS_MAX {
        return Err(RuleError::HybridPorts { ports });
    }
    Ok(())
}

/// The first rule that leads where only those may lead a guest who may manage its pool.
#[must_use]
pub fn privileged_rule(policy: &VsockPolicy, owner_uid: u32) -> Option<&VsockRule> {
    let mut rules = policy.rules.iter();
    rules.find(|rule| is_privileged(rule, owner_uid))
}

/// Whether a rule is one of those.
#[must_use]
pub fn is_privileged(rule: &VsockRule, owner_uid: u32) -> bool {
    match &rule.to {
        VsockDestination::Sandbox { owner_uid: of, .. } => of.is_some_and(|uid| uid != owner_uid),
        to => is_host_service(to),
    }
}

/// Whether it is a service of the host: the process for vsock calls it by its own rights, which may be root's.
#[must_use]
pub fn is_host_service(to: &VsockDestination) -> bool {
    match to {
        VsockDestination::Host | VsockDestination::Sandbox { .. } => false,
        VsockDestination::Unix { .. }
        | VsockDestination::Tcp { .. }
        | VsockDestination::Vsock { .. } => true,
    }
}

fn ports_of(range: PortRange) -> u64 {
    u64::from(range.last()) - u64::from(range.first()) + 1
}

fn check_rule(rule: &VsockRule, kind: VsockKind) -> Result<(), RuleError> {
    let no_port = |destination: String, reason| {
        Err(RuleError::Port {
            port: rule.port,
            destination,
            reason,
        })
    };
    match &rule.to {
        VsockDestination::Host if rule.identity && kind == VsockKind::Hybrid => {
            Err(RuleError::Identity { port: rule.port })
        }
        VsockDestination::Host => Ok(()),
        VsockDestination::Unix { path } => check_path(rule.port, path),
        VsockDestination::Tcp { address } if address.port() == 0 => {
            no_port(address.to_string(), "is no TCP port")
        }
        VsockDestination::Tcp { address }
            if address.ip().is_unspecified() || address.ip().is_multicast() =>
        {
            no_port(address.to_string(), "is no host's address")
        }
        VsockDestination::Tcp { .. } => Ok(()),
        VsockDestination::Vsock { cid, port } if *cid == u32::MAX || *port == u32::MAX => {
            no_port(format!("{cid}:{port}"), "is the wildcard and no address")
        }
        VsockDestination::Vsock { cid: 0, port } => {
            no_port(format!("0:{port}"), "is the hypervisor and no host")
        }
        VsockDestination::Vsock { .. } => Ok(()),
        VsockDestination::Sandbox { lease, port, .. } => {
            let last = u64::from(*port) + ports_of(rule.port) - 1;
            if last >= u64::from(u32::MAX) {
                let destination = format!("ports {port} to {last} of lease {lease}");
                return no_port(destination, "goes beyond the last port, 4294967294");
            }
            Ok(())
        }
    }
}

fn check_path(port: PortRange, path: &str) -> Result<(), RuleError> {
    let bytes = Path::new(path).as_os_str().as_bytes();
    let reason = if !path.starts_with('/') {
        "is not absolute"
    } else if bytes.contains(&0) {
        "has a zero byte in it"
    } else if bytes.len() > SOCKET_PATH_BYTES_MAX {
        "is longer than the 107 bytes of a Unix socket's path"
    } else {
        return Ok(());
    };
    Err(RuleError::Path {
        port,
        path: path.chars().take(120).collect(),
        reason,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(text: &str) -> VsockPolicy {
        serde_json::from_str(text).unwrap()
    }

    fn refusal(text: &str, kind: VsockKind) -> String {
        check_policy(&policy(text), kind).unwrap_err().to_string()
    }

    #[test]
    fn every_destination_can_be_named() {
        let all = policy(
            r#"{"rules": [
                {"port": "1024", "to": {"kind": "host"}},
                {"port": "1025", "to": {"kind": "unix", "path": "/run/log.sock"}, "identity": true},
                {"port": "1026", "to": {"kind": "tcp", "address": "[::1]:80"}},
                {"port": "1027", "to": {"kind": "vsock", "cid": 1, "port": 5}},
                {"port": "5000-5009", "to": {"kind": "sandbox", "lease": "db", "port": 7000}}]}"#,
        );
        assert_eq!(check_policy(&all, VsockKind::VhostUser), Ok(()));
        assert_eq!(check_policy(&all, VsockKind::Hybrid), Ok(()));
    }

    #[test]
    fn what_cannot_be_is_refused_with_the_reason() {
        let vhost = VsockKind::VhostUser;
        let overlap = r#"{"rules": [{"port": "5-9", "to": {"kind": "host"}},
                                    {"port": "9", "to": {"kind": "host"}}]}"#;
        assert!(refusal(overlap, vhost).contains("5-9 and 9 overlap"));
        let relative = r#"{"rules": [{"port": "5", "to": {"kind": "unix", "path": "log.sock"}}]}"#;
        assert!(refusal(relative, vhost).contains("not absolute"));
        let long = format!(
            r#"{{"rules": [{{"port": "5", "to": {{"kind": "unix", "path": "/{}"}}}}]}}"#,
            "x".repeat(107)
        );
        assert!(refusal(&long, vhost).contains("107 bytes"));
        let zero = r#"{"rules": [{"port": "5", "to": {"kind": "tcp", "address": "1.2.3.4:0"}}]}"#;
        assert!(refusal(zero, vhost).contains("no TCP port"));
        let any = r#"{"rules": [{"port": "5", "to": {"kind": "tcp", "address": "0.0.0.0:80"}}]}"#;
        assert!(refusal(any, vhost).contains("no host's address"));
        let hypervisor =
            r#"{"rules": [{"port": "5", "to": {"kind": "vsock", "cid": 0, "port": 1}}]}"#;
        assert!(refusal(hypervisor, vhost).contains("no host"));
        let line = r#"{"rules": [{"port": "5", "to": {"kind": "host"}, "identity": true}]}"#;
        assert!(refusal(line, VsockKind::Hybrid).contains("identity"));
        assert_eq!(check_policy(&policy(line), vhost), Ok(()));
        let beyond = r#"{"rules": [{"port": "5-9", "to":
            {"kind": "sandbox", "lease": "db", "port": 4294967291}}]}"#;
        assert!(refusal(beyond, vhost).contains("beyond the last port"));
        let many = r#"{"rules": [{"port": "1-257", "to": {"kind": "unix", "path": "/run/s"}}]}"#;
        assert!(refusal(many, VsockKind::Hybrid).contains("257 ports"));
        assert_eq!(check_policy(&policy(many), vhost), Ok(()));
        let all = r#"{"rules": [{"port": "0-4294967294", "to": {"kind": "host"}}]}"#;
        for kind in [vhost, VsockKind::Hybrid] {
            assert_eq!(check_policy(&policy(all), kind), Ok(()), "nobody listens");
        }
    }

    #[test]
    fn reserved_cids_are_refused() {
        for cid in [0, 1, 2, u32::MAX] {
            let request = VsockRequest {
                cid: Some(cid),
                ..VsockRequest::default()
            };
            assert!(check_request(&request).is_err(), "CID {cid} was taken");
        }
        let request = VsockRequest {
            virtual_cid: Some(3),
            ..VsockRequest::default()
        };
        assert_eq!(check_request(&request), Err(RuleError::SameCid { cid: 3 }));
    }

    #[test]
    fn services_of_the_host_and_other_owners_need_the_right_to_manage() {
        let needs = |to: &str| {
            let text = format!(r#"{{"rules": [{{"port": "5", "to": {to}}}]}}"#);
            privileged_rule(&policy(&text), 1000).is_some()
        };
        assert!(!needs(r#"{"kind": "host"}"#));
        assert!(!needs(r#"{"kind": "sandbox", "lease": "db", "port": 1}"#));
        assert!(!needs(
            r#"{"kind": "sandbox", "lease": "db", "port": 1, "owner_uid": 1000}"#
        ));
        assert!(needs(
            r#"{"kind": "sandbox", "lease": "db", "port": 1, "owner_uid": 0}"#
        ));
        assert!(needs(r#"{"kind": "unix", "path": "/run/log.sock"}"#));
        assert!(needs(r#"{"kind": "tcp", "address": "127.0.0.1:80"}"#));
        assert!(needs(r#"{"kind": "vsock", "cid": 1, "port": 5}"#));
    }
}
