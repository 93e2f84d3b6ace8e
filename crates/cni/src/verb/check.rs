//! `CHECK`: compares what `ADD` said, `prevResult`, with what the daemon finds in the kernel.
//!
//! A later plugin may have changed routes and the MTU. What it changed is not in `prevResult` as the daemon made it, and no
//! difference then.

use std::{fs, os::unix::fs::MetadataExt, path::Path};

use ipnet::IpNet;
use sandwire_api::{
    attach::Attached,
    client::{Blocking, ClientError},
    error::ErrorCode,
    name::Name,
    policy::RateLimit,
    slot::Defect,
};

use crate::{
    answer::{self, Recorded},
    environment::Attachment,
    error::Error,
    network::{Network, PREVIOUS_RESULT},
    wish::{self, Wish},
};

/// What has to be so.
pub(crate) struct Expectation {
    lease: Name,
    wish: Wish,
    recorded: Recorded,
}

/// Reads a configuration with the result of its `ADD`.
pub(crate) fn expectation(
    network: &Network,
    attachment: &Attachment,
) -> Result<Expectation, Error> {
    let missing = |reason: String| Error::InvalidConfig {
        key: PREVIOUS_RESULT.to_owned(),
        reason,
    };
    let previous = network.previous()?;
    let previous = previous.ok_or_else(|| missing("it is missing: CHECK needs it".to_owned()))?;
    // The plugin's own result is in there, so that it doesn't say which place in the chain the plugin has.
    let is_later = network.interface.is_some();
    let wish = Wish::parse(network, attachment, is_later)?;
    let interface = wish::own_interface(network, attachment, is_later)?;
    let recorded = answer::recorded(&previous, &interface)
        .ok_or_else(|| missing(format!("it has no interface {interface} in a sandbox")))?;
    Ok(Expectation {
        lease: network.lease(&attachment.container),
        wish,
        recorded,
    })
}

pub(crate) fn run(network: &Network, attachment: &Attachment) -> Result<String, Error> {
    let expectation = expectation(network, attachment)?;
    super::add::look_at_namespace(attachment)?;
    let client = network.client();
    let container = &attachment.container;
    let operation = format!(
        "check interface {} of container {} in network {}",
        container.interface,
        container.id,
        network.name()
    );
    let failed = |source: ClientError| match source.code() {
        Some(ErrorCode::NotFound) => Error::UnknownContainer {
            reason: format!("cannot {operation}: it has no lease {}", expectation.lease),
        },
        _ => Error::of_client(operation.as_str(), source),
    };
    let differences = expectation.differences(&client, &attachment.netns);
    let differences = differences.map_err(failed)?;
    if differences.is_empty() {
        Ok(String::new())
    } else {
        Err(Error::Differs { differences })
    }
}

impl Expectation {
    fn differences(&self, client: &Blocking, netns: &Path) -> Result<Vec<String>, ClientError> {
        let state = client.attached(&self.lease, None)?;
        let attached = &state.attached;
        let mut found = Vec::new();
        for (whose, path) in [("CNI_NETNS", netns), ("prevResult", &self.recorded.sandbox)] {
            if !are_same(path, &attached.netns) {
                found.push(format!(
                    "interface {}: {whose} has the network namespace {}, and it was added to {}",
                    attached.interface,
                    path.display(),
                    attached.netns.display()
                ));
            }
        }
        let mac = attached.mac.to_string();
        if let Some(recorded) = &self.recorded.mac
            && !recorded.eq_ignore_ascii_case(&mac)
        {
            found.push(format!(
                "interface {}: prevResult has the Ethernet address {recorded}, the slot needs {mac}",
                attached.interface
            ));
        }
        for address in &self.recorded.addresses {
            if !attached.addresses.iter().any(|one| one.address == *address) {
                found.push(format!("address {address}: the lease doesn't have it"));
            }
        }
        let counted = state
            .defects
            .iter()
            .filter(|defect| !self.is_of_later(defect, attached));
        for defect in counted {
            found.push(format!("{}: {}", defect.object, defect.problem));
        }
        self.compare_ports(client, &mut found)?;
        self.compare_limits(client, &mut found)?;
        Ok(found)
    }

    /// Whether a later plugin has brought it about: the daemon's words name what it misses.
    fn is_of_later(&self, defect: &Defect, attached: &Attached) -> bool {
        let problem = &defect.problem;
        let kept = |destination: &IpNet| self.recorded.routes.contains(destination);
        let changed = attached.routes.iter().map(|route| route.destination);
        let mut changed = changed.filter(|destination| !kept(destination));
        let is_route = changed.any(|gone| problem.contains(&format!("route to {gone} is gone")));
        let has_mtu = self.recorded.mtu == Some(attached.mtu.into());
        is_route || (!has_mtu && problem.contains("its MTU is"))
    }

    fn compare_ports(&self, client: &Blocking, found: &mut Vec<String>) -> Result<(), ClientError> {
        if self.wish.ports.is_empty() {
            return Ok(());
        }
        let published = client.lease_ports(&self.lease, None)?;
        for port in &self.wish.ports {
            if !published.iter().any(|one| one.port == *port) {
                found.push(format!(
                    "{} port {} of the host: it doesn't lead to port {} of the container",
                    port.protocol, port.host_port, port.clone_port
                ));
            }
        }
        Ok(())
    }

    fn compare_limits(
        &self,
        client: &Blocking,
        found: &mut Vec<String>,
    ) -> Result<(), ClientError> {
        let Some(wanted) = self.wish.limits else {
            return Ok(());
        };
        let now = client.policy(&self.lease, None)?.policy.limits;
        for (direction, wanted, now) in [
            ("ingress", wanted.ingress, now.ingress),
            ("egress", wanted.egress, now.egress),
        ] {
            let rate = |limit: RateLimit| (limit.bits_per_second, limit.burst_bytes);
            if wanted.bits_per_second.is_some() && rate(wanted) != rate(now) {
                found.push(format!(
                    "limit of {direction}: it is {} bits per second, and not {}",
                    shown(now.bits_per_second),
                    shown(wanted.bits_per_second)
                ));
            }
        }
        Ok(())
    }
}

/// Whether two files are of one namespace, which may have several.
fn are_same(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.dev(), metadata.ino()))
    };
    one == other || identity(one).is_some_and(|one| identity(other) == Some(one))
}

fn shown(rate: Option<u64>) -> String {
    rate.map_or_else(|| "unlimited".to_owned(), |rate| rate.to_string())
}
