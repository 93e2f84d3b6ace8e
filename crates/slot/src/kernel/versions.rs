//! Whether the host has the IP versions that a pool is of: what it lacks is refused before anything is made.

use ipnet::IpNet;
use sandwire_kernel_net::{interface::Interface, ipv6};

use super::Worker;
use crate::{
    error::NetworkError,
    plan::{Plan, names},
};

pub(super) fn needs_ipv6(plan: &Plan) -> bool {
    let mut prefixes = plan.clone_prefixes.iter();
    prefixes.any(|prefix| matches!(prefix, IpNet::V6(_)))
}

/// Refuses a pool of IPv6 where there is none. The shared interface has the host's addresses; one that is to be made has
/// IPv6 as new interfaces have it.
pub(super) fn check(
    instance: &str,
    worker: &mut Worker,
    plan: &Plan,
    interfaces: &[Interface],
) -> Result<(), NetworkError> {
    if !needs_ipv6(plan) {
        return Ok(());
    }
    let refuse = |with: String, remedy: String| {
        Err(NetworkError::Conflict {
            object: format!("IPv6 of pool {}", plan.spec.name),
            with,
            advice: format!(
                "give the pool no IPv6 (guest.ipv6 = \"\", and no prefix of it), or {remedy}"
            ),
        })
    };
    if !ipv6::is_known() {
        let with = "the kernel, which was booted with ipv6.disable=1 or built without IPv6";
        return refuse(with.to_owned(), "boot with IPv6".to_owned());
    }
    let shared = names::shared_interface(instance);
    let is_there = interfaces.iter().any(|found| found.name == shared);
    let whose = if is_there { &shared } else { "default" };
    let setting = format!("net/ipv6/conf/{whose}/disable_ipv6");
    if worker.procfs.read(&setting)? != "1" {
        return Ok(());
    }
    let setting = format!("net.ipv6.conf.{whose}.disable_ipv6");
    let remedy = format!("switch it on: sysctl -w {setting}=0");
    refuse(format!("the setting {setting}=1"), remedy)
}
