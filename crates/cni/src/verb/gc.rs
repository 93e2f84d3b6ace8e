//! `GC`: releases the leases of this network that belong to no valid attachment.

use std::collections::HashSet;

use sandwire_api::{error::ErrorCode, name::Name};
use serde_json::Value;

use crate::{
    environment::{Container, is_identifier},
    error::Error,
    network::Network,
    section::Section,
};

/// The specification's key, and the one that the first version of the reference library wrote.
const VALID: [&str; 2] = ["cni.dev/valid-attachments", "cni.dev/attachments"];

pub(crate) fn run(network: &Network) -> Result<String, Error> {
    let valid = valid_leases(network)?;
    let client = network.client();
    let operation = format!("collect stale leases of network {}", network.name());
    let leases = client
        .leases()
        .map_err(|source| Error::of_client(operation, source))?;
    let prefix = network.lease_prefix();
    let own_uid = rustix::process::geteuid().as_raw();
    let stale = leases.into_iter().filter(|lease| {
        // Root sees everybody's, and anybody may have chosen such a name.
        lease.owner_uid == own_uid
            && lease.name.as_str().starts_with(&prefix)
            && !valid.contains(&lease.name)
    });
    let mut problems = Vec::new();
    for lease in stale {
        match client.release(&lease.name, None) {
            Ok(_) => {}
            Err(error) if error.code() == Some(ErrorCode::NotFound) => {}
            Err(error) => problems.push(format!("cannot release lease {}: {error}", lease.name)),
        }
    }
    if problems.is_empty() {
        Ok(String::new())
    } else {
        Err(Error::Incomplete { problems })
    }
}

/// Names of the leases that are to stay. Without a list nothing is to be released, since an empty one ends everything.
pub(crate) fn valid_leases(network: &Network) -> Result<HashSet<Name>, Error> {
    let mut section = Section::whole(&network.keys);
    let Some(key) = VALID
        .into_iter()
        .find(|key| network.keys.contains_key(*key))
    else {
        return Err(section.invalid(VALID[0], "it is missing: GC needs it"));
    };
    let mut valid = HashSet::new();
    for mut attachment in section.sections(key)? {
        let id = attachment.text("containerID")?.unwrap_or_default();
        if !is_identifier(&id) {
            return Err(attachment.unsupported(
                "containerID",
                &Value::from(id),
                "it is no container's id",
            ));
        }
        let interface = attachment.parsed("ifname")?;
        let interface = interface.ok_or_else(|| attachment.invalid("ifname", "it is missing"))?;
        valid.insert(network.lease(&Container { id, interface }));
    }
    Ok(valid)
}
