//! What is to be done so that identities are as the configuration says: from what it has, which cgroups are there and
//! which identities are there, to steps.
//!
//! Nothing is remembered from one time to the next: who is whose stands in the identities' records. Only what this instance has
//! declared is changed or removed, and what can't be changed while sockets are open is kept as it is and told of.

use std::path::PathBuf;

use sandwire_api::{identity::State, name::Name};
use sandwire_identity::Standing;

use crate::config::DeclaredIdentity;

/// The cgroup of a declared identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// Not there yet, or not there any more.
    Absent,
    /// There.
    There {
        /// Without symbolic links.
        path: PathBuf,
        /// Its number; another one of the same path has another.
        id: u64,
    },
    /// Something else is there, and why it can't have an identity.
    Unusable(String),
}

/// What is to be done about one identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Step<'a> {
    /// It isn't declared any more.
    Remove(&'a Standing),
    /// Its cgroup is there, with this number. If there is one of a former cgroup, it goes on there.
    Add(&'a DeclaredIdentity, u64),
    /// It may reach what the configuration says now.
    SetPolicy(&'a DeclaredIdentity, &'a Standing),
    /// Its cgroup isn't there.
    Await(&'a DeclaredIdentity),
    /// Its cgroup is there anew; sockets of one before are still open, and that one was another or had other settings.
    AwaitEnd(&'a DeclaredIdentity, &'a Standing),
    /// It can't be as the configuration says, for this reason.
    Tell(&'a DeclaredIdentity, String),
}

/// Removals come first: what they had may be another's now.
pub(super) fn plan<'a>(
    declared: &'a [(DeclaredIdentity, Place)],
    standing: &'a [Standing],
    instance: &Name,
) -> Vec<Step<'a>> {
    let is_declared = |one: &Standing| {
        let mut declared = declared.iter();
        declared.any(|(identity, place)| identity.name == one.name || is_at(identity, place, one))
    };
    let ours = standing.iter().filter(|one| one.is_declared_by(instance));
    let mut steps: Vec<Step<'_>> = ours
        .filter(|one| !is_declared(one))
        .map(Step::Remove)
        .collect();
    for (identity, place) in declared {
        let by_cgroup = standing.iter().find(|one| match place {
            Place::There { id, .. } => one.cgroup_id == *id,
            Place::Absent | Place::Unusable(_) => false,
        });
        let by_name = || standing.iter().find(|one| one.name == identity.name);
        // One of another name, as before the file had this one.
        let former = || {
            let mut dying = standing.iter().filter(|one| one.state == State::Dying);
            dying.find(|one| is_at(identity, place, one))
        };
        match by_cgroup.or_else(by_name).or_else(former) {
            Some(found) => look_at(&mut steps, identity, place, found, instance),
            None => steps.push(match place {
                Place::Absent => Step::Await(identity),
                Place::There { id, .. } => Step::Add(identity, *id),
                Place::Unusable(reason) => Step::Tell(identity, reason.clone()),
            }),
        }
    }
    steps
}

/// Whether an identity has the cgroup of a declared one, or has had one at its path.
fn is_at(identity: &DeclaredIdentity, place: &Place, one: &Standing) -> bool {
    let path = match place {
        Place::There { path, .. } => path,
        Place::Absent | Place::Unusable(_) => &identity.new.cgroup,
    };
    one.cgroup == *path
}

/// What is to be done where an identity is there of this name or cgroup.
fn look_at<'a>(
    steps: &mut Vec<Step<'a>>,
    identity: &'a DeclaredIdentity,
    place: &Place,
    found: &'a Standing,
    instance: &Name,
) {
    let is_ours = found.is_declared_by(instance);
    let is_same = found.name == identity.name && is_at(identity, place, found);
    let has_policy = found.policy.as_ref() == Some(&identity.new.policy);
    if is_ours && is_same && !has_policy {
        // Also of one whose cgroup is gone: its sockets are judged by it.
        steps.push(Step::SetPolicy(identity, found));
    }
    if found.state == State::Dying {
        steps.push(match place {
            Place::Absent => Step::Await(identity),
            Place::There { id, .. }
                if is_ours && is_same && differences(identity, place, found).is_empty() =>
            {
                Step::Add(identity, *id)
            }
            Place::There { .. } => Step::AwaitEnd(identity, found),
            Place::Unusable(reason) => Step::Tell(identity, reason.clone()),
        });
        return;
    }
    let mut differing = differences(identity, place, found);
    if !is_ours && !has_policy {
        differing.push("policy");
    }
    if !differing.is_empty() {
        steps.push(Step::Tell(identity, difference(found, is_ours, &differing)));
    }
}

/// The keys of which an identity has other values, but for its policy. Whether addresses were there before says nothing of
/// what it is.
fn differences(identity: &DeclaredIdentity, place: &Place, found: &Standing) -> Vec<&'static str> {
    let new = &identity.new;
    let (first, rest) = found
        .addresses
        .split_at(new.addresses.len().min(found.addresses.len()));
    let has_rest = rest.len() == new.prefixes.len()
        && new
            .prefixes
            .iter()
            .zip(rest)
            .all(|(prefix, address)| prefix.contains(address));
    let (wanted, has) = (new.allowed, found.allowed);
    let same = [
        ("name", found.name == identity.name),
        ("cgroup", is_at(identity, place, found)),
        ("addresses", first == new.addresses && has_rest),
        ("interface", found.interface == new.interface),
        ("tcp_only", found.tcp_only == new.tcp_only),
        (
            "allow_other_protocols",
            has.other_protocols == wanted.other_protocols,
        ),
        ("allow_loopback", has.loopback == wanted.loopback),
        (
            "allow_host_services",
            has.host_services == wanted.host_services,
        ),
    ];
    let differing = same.into_iter().filter(|(_, is_same)| !is_same);
    differing.map(|(key, _)| key).collect()
}

fn difference(found: &Standing, is_ours: bool, differing: &[&str]) -> String {
    let whose = if is_ours {
        "is there"
    } else {
        "was added by a command or another daemon"
    };
    format!(
        "identity {name} of {cgroup} {whose} with other settings ({settings}), and keeps them; for those of the \
         configuration, once its sockets may go on without rules: sandwire identity remove {name}",
        name = found.name,
        cgroup = found.cgroup.display(),
        settings = differing.join(", "),
    )
}

#[cfg(test)]
mod tests;
